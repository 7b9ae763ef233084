"""Upgrades and returns: code of earlier commits, and this one, open each other's stores."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Confirms
from gateway.protocols.mqtt.spec import PacketType, Property
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import free_ports
from tests.operator import bearer
from tests.ship.earlier import BEFORE_SCHEMA_7, EARLIER, PREVIOUS, package_of, run_code_of

PERSISTENT: Final = b"\x10\x00\x02"
DAY: Final = {Property.SESSION_EXPIRY_INTERVAL: 86_400}
COUNT: Final = 20
MAPPING: Final = """
version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "plant.{rest}"}
  - name: strict
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: "in.{name}"}
    to: {endpoint: amqp091, queue: "{name}"}
    on_reject: dead_letter
"""


def bodies_of(count: int) -> list[bytes]:
    """Return bodies of all places of a store: in the database, its heap and files of their own."""
    return [(b"%05d" % number).ljust((10, 100_000, 2_000_000)[number % 3], b".") for number in range(count)]


def leave_traces(gateway: GatewayProcess) -> None:
    """Leave a queue, a session with messages, a retained message, a dead letter and journal rows."""
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("kept", durable=True), m.QueueDeclareOk)
        client.call(m.QueueBind("kept", "amq.topic", "plant.#"), m.QueueBindOk)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        for body in bodies_of(COUNT):
            client.publish("", "kept", body, properties=PERSISTENT)
            client.next(Confirms)
        client.publish("amq.topic", "in.never", b"failed", properties=PERSISTENT)
        client.next(Confirms)
    sleeper, _ = connect(gateway, "sleeper", clean=False, properties=DAY)
    with sleeper:
        sleeper.subscribe("plant/#", 1)
    writer, _ = connect(gateway, "writer")
    with writer:
        for number in range(1, COUNT + 1):
            writer.publish("plant/line", b"%d" % number, qos=1, packet_id=number)
            writer.acked(PacketType.PUBACK)
        writer.publish("plant/state", b"on", qos=1, packet_id=COUNT + 1, retain=True)
        writer.acked(PacketType.PUBACK)


def letters(gateway: GatewayProcess) -> list[Any]:
    port = gateway.ports["http"]
    answer = httpx.get(f"http://{LOOPBACK}:{port}/api/v1/dead-letters", headers=bearer(port), trust_env=False)
    found: list[Any] = answer.json()["items"]
    return found


def queued(gateway: GatewayProcess) -> list[bytes]:
    with Amqp(gateway).open() as client:
        declared = client.call(m.QueueDeclare("kept", durable=True), m.QueueDeclareOk)
        assert isinstance(declared, m.QueueDeclareOk)
        client.call(m.BasicConsume("kept", consumer_tag="c", no_ack=True), m.BasicConsumeOk)
        return [bytes(one[-1]) for one in client.delivered(declared.message_count)]


def storing_gateway(folder: Path) -> GatewayProcess:
    """Return a gateway with a store, a journal, the mapping of this file and an HTTP port."""
    (folder / "mapping.yaml").write_text(MAPPING)
    (http,) = free_ports(1)
    return GatewayProcess(
        folder / "gateway",
        mappings=[str(folder / "mapping.yaml")],
        http={"host": LOOPBACK, "port": http},
        journal={"enabled": True, "flush_interval_secs": 0.01},
    )


@pytest.mark.parametrize("commit", [EARLIER, PREVIOUS])
def test_a_store_of_an_earlier_commit(commit: str, tmp_path: Path) -> None:
    gateway = storing_gateway(tmp_path)
    package = package_of(commit, tmp_path / "earlier")
    run_code_of(gateway, package)
    with gateway:
        assert f"code of {package}/gateway" in gateway.log
        leave_traces(gateway)
        assert gateway.terminate() == 0
        run_code_of(gateway, None)
        gateway.start()
        check_traces(gateway)
        assert gateway.terminate() == 0
        tail = gateway.command("journal", "tail", "--config", "gateway.yaml", "--json", "--start", "0")
        assert tail.count('"route":"up"') >= COUNT, tail[:1_000]
        assert "intact: " in gateway.command("store", "check", "--store", str(gateway.folder / "data"))


@pytest.mark.parametrize("commit", [BEFORE_SCHEMA_7, PREVIOUS])
def test_an_earlier_commit_returns_to_a_store_of_this_one(commit: str, tmp_path: Path) -> None:
    """It finds everything if the layout is the one that it knows, and refuses a newer one with a reason."""
    gateway = storing_gateway(tmp_path)
    package = package_of(commit, tmp_path / "earlier")
    with gateway:
        leave_traces(gateway)
        assert gateway.terminate() == 0
        run_code_of(gateway, package)
        gateway.start()
        assert f"code of {package}/gateway" in gateway.log
        check_traces(gateway)
        assert gateway.terminate() == 0
        with closing(sqlite3.connect(gateway.folder / "data" / "gateway.db")) as database, database:
            (layout,) = database.execute("PRAGMA user_version").fetchone()
            database.execute(f"PRAGMA user_version = {layout + 1}")
        with pytest.raises(AssertionError, match="a newer gateway"):
            gateway.start()


def check_traces(gateway: GatewayProcess) -> None:
    """Assert that a gateway has all that `leave_traces` left."""
    assert queued(gateway) == bodies_of(COUNT) + [b"%d" % one for one in range(1, COUNT + 1)] + [b"on"]
    sleeper, connack = connect(gateway, "sleeper", clean=False, properties=DAY)
    with sleeper:
        assert connack.session_present
        owed = [sleeper.row() for _ in range(COUNT + 1)]
        assert [row[4] for row in owed] == [b"%d" % one for one in range(1, COUNT + 1)] + [b"on"]
        for row in owed:
            sleeper.ack(PacketType.PUBACK, row[2])
        sleeper.subscribe("plant/state")
        assert sleeper.body() == b"on"
    ((body, route, reason),) = [(one["body"], one["route"], one["reason"]) for one in letters(gateway)]
    assert (body, route, reason) == ("failed", "strict", "no_route")

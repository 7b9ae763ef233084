"""Paused routes and restarts: what a client was not told to be accepted is taken when it comes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx
import pika
import pytest

from gateway.protocols.mqtt.packets import Connack, Connect, Will
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from tests.ingress.clients import Mqtt, eventually
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.operator import bearer

PUBACK, PUBREC, PUBREL, PUBCOMP = (
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
)
DAY: Final[PropertyMap] = {Property.SESSION_EXPIRY_INTERVAL: 86_400}
MAPPING: Final = """version: 1
routes:
  - {name: near, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
  - {name: memory, from: {endpoint: mqtt, topic: "memory/#"}, to: {endpoint: amqp091, queue: memory}}
  - {name: once, from: {endpoint: amqp091, exchange: in}, to: {endpoint: mqtt, topic: once},
     deduplicate: {window: 10m}}
"""
How = Callable[[GatewayProcess], object]


def killed(gateway: GatewayProcess) -> None:
    gateway.restart()


def stopped(gateway: GatewayProcess) -> None:
    assert gateway.terminate() == 0
    gateway.start()


class Site:
    """A gateway with routes, an operator, and the clients that a test has made."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self._clients: list[Mqtt] = []

    def act(self, what: str, route: str) -> None:
        port = self.gateway.port("http")
        done = httpx.post(
            f"http://{LOOPBACK}:{port}/api/v1/routes/{what}",
            json={"name": route},
            headers=bearer(port),
            trust_env=False,
        )
        assert done.status_code == 200

    def held(self, route: str) -> int:
        port = self.gateway.port("http")
        url = f"http://{LOOPBACK}:{port}/api/v1/routes"
        rows = httpx.get(url, headers=bearer(port), trust_env=False).json()["items"]
        (row,) = [one for one in rows if one["name"] == route]
        return int(row["held"])

    def holds(self, route: str, count: int) -> None:
        eventually(lambda: self.held(route) == count)

    def client(
        self, who: str, *, clean: bool = False, will: Will | None = None, properties: PropertyMap = DAY
    ) -> Mqtt:
        client = Mqtt(self.gateway.ports["mqtt"])
        self._clients.append(client)
        client.say(Connect(who, Version.V5, clean, will=will, properties={} if clean else properties))
        assert client.next(Connack).reason == 0
        return client

    def connection(self) -> pika.BlockingConnection:
        port = self.gateway.port("amqp091")
        parameters = pika.ConnectionParameters(LOOPBACK, port, heartbeat=0, socket_timeout=10)
        return pika.BlockingConnection(parameters)

    @contextmanager
    def channel(self) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
        with self.connection() as connection:
            yield connection.channel()

    def declare(self, queue: str, *, durable: bool = True) -> None:
        with self.channel() as channel:
            channel.queue_declare(queue, durable=durable)

    def taken(self, queue: str, count: int) -> list[bytes]:
        """The bodies that a queue has; waits until there are `count`."""
        with self.channel() as channel:

            def depth() -> int:
                return int(channel.queue_declare(queue, passive=True).method.message_count)

            eventually(lambda: depth() >= count)
            found = []
            while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
                found.append(got[2])
            return found

    def close(self) -> None:
        for client in self._clients:
            client.cut()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    file = tmp_path / "mapping.yaml"
    file.write_text(MAPPING)
    with GatewayProcess(tmp_path, http={"host": LOOPBACK, "port": 0}, mappings=[str(file)]) as gateway:
        made = Site(gateway)
        yield made
        made.close()


@pytest.mark.parametrize("how", [killed, stopped])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a session"])
def test_qos_2_into_a_paused_route_is_taken_when_it_is_repeated(site: Site, how: How, beside: bool) -> None:
    site.declare("near")
    if beside:
        site.client("reader").subscribe("near/#", 1)
    site.act("pause", "near")
    writer = site.client("writer")
    writer.publish("near/a", b"held", 2, 1)
    site.holds("near", 1)
    how(site.gateway)
    writer = site.client("writer")
    writer.publish("near/a", b"held", 2, 1, dup=True)
    site.holds("near", 1)
    site.act("resume", "near")
    assert writer.acked(PUBREC)[0] == 1
    writer.ack(PUBREL, 1)
    assert writer.acked(PUBCOMP) == (1, 0)
    assert site.taken("near", 1) == [b"held"]
    if beside:
        assert site.client("reader").body() == b"held"


def test_what_a_route_delivered_after_its_pause_is_known_after_a_restart(site: Site) -> None:
    site.declare("near")
    site.act("pause", "near")
    writer = site.client("writer")
    writer.publish("near/a", b"once", 2, 1)
    site.holds("near", 1)
    site.act("resume", "near")
    assert writer.acked(PUBREC) == (1, 0)
    site.gateway.restart()
    writer = site.client("writer")
    writer.publish("near/a", b"once", 2, 1, dup=True)
    assert writer.acked(PUBREC) == (1, 0)
    assert site.taken("near", 1) == [b"once"]


@pytest.mark.parametrize("paused", [False, True], ids=["straight", "through a pause"])
def test_qos_2_that_only_memory_has_is_taken_again_after_a_kill(site: Site, paused: bool) -> None:
    site.declare("memory", durable=False)
    writer = site.client("writer")
    if paused:
        site.act("pause", "memory")
    writer.publish("memory/a", b"again", 2, 1)
    if paused:
        site.holds("memory", 1)
        site.act("resume", "memory")
    assert writer.acked(PUBREC) == (1, 0)
    site.gateway.restart()
    site.declare("memory", durable=False)
    writer = site.client("writer")
    writer.publish("memory/a", b"again", 2, 1, dup=True)
    assert writer.acked(PUBREC) == (1, 0)
    assert site.taken("memory", 1) == [b"again"]


def test_qos_2_that_one_of_two_targets_has_on_disk_is_taken_once(site: Site) -> None:
    site.declare("near")
    listener = site.client("listener", clean=True)
    listener.subscribe("near/#", 1)
    writer = site.client("writer")
    writer.publish("near/a", b"once", 2, 1)
    assert writer.acked(PUBREC) == (1, 0)
    assert listener.body() == b"once"
    site.gateway.restart()
    writer = site.client("writer")
    writer.publish("near/a", b"once", 2, 1, dup=True)
    assert writer.acked(PUBREC) == (1, 0)
    assert site.taken("near", 1) == [b"once"]


@pytest.mark.parametrize("how", [killed, stopped])
def test_a_repeat_is_passed_on_when_the_first_was_only_held(site: Site, how: How) -> None:
    reader = site.client("reader")
    reader.subscribe("once", 1)
    reader.cut()
    with site.channel() as channel:
        channel.exchange_declare("in", "fanout", durable=True)
    given = pika.BasicProperties(message_id="7", delivery_mode=2)
    site.act("pause", "once")
    connection = site.connection()
    connection.channel().basic_publish("in", "", b"held", given)  # confirms would wait for the pause
    site.holds("once", 1)
    how(site.gateway)
    with suppress(pika.exceptions.AMQPError):
        connection.close()
    site.act("resume", "once")
    with site.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("in", "", b"held", given)
        channel.basic_publish("in", "", b"repeat", given)
    reader = site.client("reader")
    assert reader.body() == b"held"
    reader.ping()
    assert reader.quiet()


@pytest.mark.parametrize("retain", [False, True])
def test_a_will_that_a_paused_route_holds_survives_the_end(site: Site, retain: bool) -> None:
    site.declare("near")
    site.act("pause", "near")
    site.client("dying", properties=DAY, will=Will("near/a", b"will", 1, retain))
    stopped(site.gateway)
    site.holds("near", 1)
    stopped(site.gateway)
    site.holds("near", 1)
    site.act("resume", "near")
    assert site.taken("near", 1) == [b"will"]
    stopped(site.gateway)
    assert site.held("near") == 0
    assert site.taken("near", 0) == []


def test_each_will_of_a_client_that_a_paused_route_holds_survives(site: Site) -> None:
    site.declare("near")
    site.act("pause", "near")
    for number in range(3):
        client = site.client("dying", will=Will("near/a", b"%d" % number, 1))
        client.cut()
        site.holds("near", number + 1)
    site.client("dying", will=Will("near/a", b"of whoever is there", 1))
    site.gateway.restart()
    site.holds("near", 4)
    site.act("resume", "near")
    assert sorted(site.taken("near", 4)) == [b"0", b"1", b"2", b"of whoever is there"]

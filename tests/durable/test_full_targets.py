"""Targets that accept nothing for a while: a queue of a real RabbitMQ that is full (`x-overflow:
reject-publish`), and MQTT 5 brokers that answer so. Nothing is lost or a dead letter, and all of it arrives
later, once and in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pika
import pytest

from gateway.protocols.mqtt.spec import ReasonCode
from tests.durable.busy_broker import BusyBroker
from tests.durable.outboxes.test_outbox import channel, status, until
from tests.durable.test_dead_letters import listed
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import RabbitMQ, free_ports

COUNT: Final = 3_000
ROOM: Final = 100
IN_FLIGHT: Final = 50  # messages that may be on their way with a refused one
ROUTE: Final = """
version: 1
routes:
  - name: across
    from: {endpoint: from, queue: full.source}
    to: {endpoint: to, queue: full.target}
"""
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2)


@contextmanager
def bridge(rabbitmq: RabbitMQ, folder: Path, mapping: str, *, target: str = "") -> Iterator[GatewayProcess]:
    """A gateway with links from RabbitMQ and to `target`, or to the same RabbitMQ."""
    (folder / "mapping.yaml").write_text(mapping)
    (http,) = free_ports(1)
    waits = {"reconnect_min_secs": 0.1, "reconnect_max_secs": 0.5, "in_flight_max": IN_FLIGHT}
    with GatewayProcess(
        folder,
        listeners={},
        links={"from": {"url": rabbitmq.url, **waits}, "to": {"url": target or rabbitmq.url, **waits}},
        mappings=[str(folder / "mapping.yaml")],
        http={"host": LOOPBACK, "port": http},
        drain_timeout_secs=20,  # beyond it, what the disk has not taken yet is sent again
    ) as started:
        yield started


@pytest.fixture
def queues(rabbitmq: RabbitMQ) -> Iterator[None]:
    """The source with all messages, and the target, which is empty."""
    with channel(rabbitmq.url) as opened:
        opened.queue_declare("full.source", durable=True)
        opened.queue_declare(
            "full.target", durable=True, arguments={"x-max-length": ROOM, "x-overflow": "reject-publish"}
        )
        for number in range(COUNT):
            opened.basic_publish("", "full.source", b"%d" % number, PERSISTENT)
    yield
    with channel(rabbitmq.url) as opened:
        opened.queue_delete("full.source")
        opened.queue_delete("full.target")


def count(rabbitmq: RabbitMQ, queue: str) -> int:
    with channel(rabbitmq.url) as opened:
        found: int = opened.queue_declare(queue, passive=True).method.message_count
        return found


def consumed(rabbitmq: RabbitMQ, most: int) -> list[int]:
    """What comes out of the target, until so many messages have."""
    found: list[int] = []
    with channel(rabbitmq.url) as opened:
        opened.basic_qos(prefetch_count=200)
        for method, _, body in opened.consume("full.target", inactivity_timeout=60):
            if method is None:
                break
            found.append(int(body))
            opened.basic_ack(method.delivery_tag)
            if len(found) >= most:
                break
    return found


def retried(gateway: GatewayProcess) -> int:
    (route,) = status(gateway)["routes"]
    found: int = route["retried"]
    return found


def begin_again(gateway: GatewayProcess, more: str) -> None:
    """Kill it and start it again. With an outbox it is stopped: nobody is told when its source has all
    acknowledgements, without which it sends its messages again.
    """
    if "stored" in more:
        gateway.terminate()
        gateway.start()
    else:
        gateway.restart()


@pytest.mark.parametrize("more", ["", "    on_reject: retry\n", "    settle: stored\n"])
def test_a_full_target_costs_no_message(rabbitmq: RabbitMQ, tmp_path: Path, queues: None, more: str) -> None:
    with bridge(rabbitmq, tmp_path, ROUTE + more) as gateway:
        until(lambda: retried(gateway) >= 3)
        assert count(rabbitmq, "full.target") == ROOM
        assert listed(gateway) == []
        begin_again(gateway, more)
        until(lambda: retried(gateway) >= 3)
        found = consumed(rabbitmq, COUNT)
        assert sorted(set(found)) == list(range(COUNT))
        assert len(found) == COUNT, "each once"
        assert found[:ROOM] == list(range(ROOM)), "what was accepted before any was refused"
        late = max(abs(number - at) for at, number in enumerate(found))
        assert late < IN_FLIGHT, "what was on its way with a refused message may be accepted before it"
        until(lambda: count(rabbitmq, "full.source") == 0)
        assert listed(gateway) == []
        assert count(rabbitmq, "full.target") == 0


BUSY: Final = """
version: 1
routes:
  - name: across
    from: {endpoint: from, queue: busy.source}
    to: {endpoint: to, topic: busy, qos: QOS}
"""
BUSY_COUNT: Final = 500


@pytest.fixture
def source(rabbitmq: RabbitMQ) -> Iterator[None]:
    """A queue with all messages."""
    with channel(rabbitmq.url) as opened:
        opened.queue_declare("busy.source", durable=True)
        for number in range(BUSY_COUNT):
            opened.basic_publish("", "busy.source", b"%d" % number, PERSISTENT)
    yield
    with channel(rabbitmq.url) as opened:
        opened.queue_delete("busy.source")
        opened.queue_delete("busy.other")


@pytest.mark.parametrize(
    "code, qos, more",
    [
        (ReasonCode.QUOTA_EXCEEDED, 1, ""),
        (ReasonCode.SERVER_UNAVAILABLE, 2, ""),
        (ReasonCode.SERVER_BUSY, 1, "    on_reject: retry\n"),
        (ReasonCode.QUOTA_EXCEEDED, 2, "    on_reject: dead_letter\n"),
        (ReasonCode.SERVER_BUSY, 2, "    settle: stored\n"),
        (ReasonCode.QUOTA_EXCEEDED, 1, "    settle: stored\n"),
        (ReasonCode.SERVER_UNAVAILABLE, 1, "    settle: stored\n    on_reject: dead_letter\n"),
    ],
)
def test_a_busy_mqtt_broker_costs_no_message(
    rabbitmq: RabbitMQ, tmp_path: Path, source: None, code: int, qos: int, more: str
) -> None:
    with (
        BusyBroker(code, ROOM) as broker,
        bridge(rabbitmq, tmp_path, BUSY.replace("QOS", str(qos)) + more, target=broker.url) as gateway,
    ):
        until(lambda: retried(gateway) >= 2)
        assert (len(broker.accepted), listed(gateway)) == (ROOM, [])
        begin_again(gateway, more)
        until(lambda: retried(gateway) >= 2)
        assert (len(broker.accepted), listed(gateway)) == (ROOM, [])
        broker.relent()
        until(lambda: len(broker.accepted) >= BUSY_COUNT)
        until(lambda: count(rabbitmq, "busy.source") == 0)
        assert [int(body) for body in broker.accepted] == list(range(BUSY_COUNT)), "once, in order"
        assert (broker.qos, listed(gateway)) == ({qos}, [])


@pytest.mark.parametrize("more", ["", "    settle: stored\n"])
def test_a_reload_that_removes_the_route_of_a_busy_broker_costs_no_message(
    rabbitmq: RabbitMQ, tmp_path: Path, source: None, more: str
) -> None:
    mapping = BUSY.replace("QOS", "1") + more
    with (
        BusyBroker(ReasonCode.QUOTA_EXCEEDED, ROOM) as broker,
        bridge(rabbitmq, tmp_path, mapping, target=broker.url) as gateway,
    ):
        until(lambda: retried(gateway) >= 2)
        (tmp_path / "mapping.yaml").write_text(mapping.replace("across", "other").replace("source", "other"))
        until(lambda: [route["name"] for route in status(gateway)["routes"]] == ["other"])
        if more:  # they wait in the outbox for a route of that name
            until(lambda: count(rabbitmq, "busy.source") == 0)
        else:
            until(lambda: count(rabbitmq, "busy.source") == BUSY_COUNT - ROOM)
        assert (len(broker.accepted), listed(gateway)) == (ROOM, [])
        broker.relent()
        (tmp_path / "mapping.yaml").write_text(mapping)
        until(lambda: len(broker.accepted) >= BUSY_COUNT)
        until(lambda: count(rabbitmq, "busy.source") == 0)
        assert sorted(int(body) for body in broker.accepted) == list(range(BUSY_COUNT)), "each once"
        assert listed(gateway) == []

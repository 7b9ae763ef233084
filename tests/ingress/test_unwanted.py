"""Messages that nobody takes, no subscription, queue or route: counted, told in the log; MQTT 5 says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.ingress import source
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.mqtt.spec import PacketType, Version
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, no_errors_logged, running, settings_of

MAPPING: Final = """
version: 1
routes:
  - {name: other, from: {endpoint: mqtt, topic: "other/{x}"}, to: {endpoint: amqp091, queue: "{x}"}}
"""
EVENT: Final = "messages without recipient discarded"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Running]:
    """A gateway whose routes take nothing of this: one protocol's messages find nobody of another."""
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(MAPPING)
    with running(settings_of(mappings=(str(mapping),))) as one:
        yield one


def unwanted(gateway: Running, listener: str) -> int:
    return gateway.ask(lambda: gateway.gateway.listeners[listener].stats.unwanted_messages)


def settled(gateway: Running, listener: str) -> dict[tuple[str, str], int]:
    rows = gateway.ask(lambda: list(gateway.gateway.listeners[listener].stats.settled_counts()))
    return {(outcome, reason): count for outcome, reason, count in rows if count}


@pytest.mark.parametrize("qos, kind", [(1, PacketType.PUBACK), (2, PacketType.PUBREC)])
@pytest.mark.parametrize("version, reason", [(Version.V5, 0x10), (Version.V311, 0)])
def test_mqtt_5_says_that_nobody_was_there(
    alone: Running, version: Version, reason: int, qos: int, kind: PacketType
) -> None:
    with connect(alone, "writer", version=version)[0] as writer:
        writer.publish("nobody", b"x", qos, 1)
        assert writer.acked(kind) == (1, reason)
        if qos == 2:
            writer.ack(PacketType.PUBREL, 1)
            assert writer.acked(PacketType.PUBCOMP) == (1, 0)
        writer.publish("nobody", b"x", 0)
        for number in range(20):  # in one read: a burst
            writer.machine.publish(b"nobody", b"x", 1, packet_id=number + 2)
        writer.flush()
        assert [writer.acked(PacketType.PUBACK) for _ in range(20)] == [(n + 2, reason) for n in range(20)]
    assert settled(alone, "mqtt") == {("accepted", "no_taker"): 22}
    with connect(alone, "reader")[0] as reader, connect(alone, "writer", version=version)[0] as writer:
        reader.subscribe("nobody")
        writer.publish("nobody", b"x", qos, 1)
        assert writer.acked(kind) == (1, 0)
    assert unwanted(alone, "mqtt") == 22


def test_amqp(alone: Running) -> None:
    with Amqp(alone).open() as client:
        client.publish("amq.topic", "nobody", b"x", b"y")
        client.publish("amq.topic", "nobody", b"returned", mandatory=True)
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.publish("", "q", b"x")
        client.call(m.QueueDelete("q"), m.QueueDeleteOk)
    assert settled(alone, "amqp091") == {
        ("accepted", "no_taker"): 2,
        ("rejected", "no_route"): 1,
        ("accepted", "none"): 1,
    }


def test_amqpfast(alone: Running) -> None:
    with Fast(alone).open() as client:
        handle = client.handle("nobody", TOPIC)
        for confirm in (True, False):
            client.put(handle, b"x", b"y", confirm=confirm)
        client.quiet()
    assert settled(alone, "amqpfast") == {("accepted", "no_taker"): 4}


def test_one_line_a_minute_says_how_many(alone: Running) -> None:
    lines: list[Any]
    with no_errors_logged() as lines, connect(alone, "device")[0] as writer:

        def told() -> list[Any]:
            return [line for line in lines if line["event"] == EVENT]

        for number in range(3):
            writer.publish(f"nobody/{number}", b"x", 1, 1)
            writer.acked(PacketType.PUBACK)
        alone.until(lambda: len(told()) == 1)
        writer.publish("nobody/a", b"x", 1, 1)
        writer.acked(PacketType.PUBACK)
        (peer,) = alone.gateway.listeners["mqtt"].connections
        ingress = peer._ingress  # type: ignore[attr-defined]
        alone.ask(lambda: ingress.tick(ingress.now()))
        assert len(told()) == 1, "the next one comes in a minute"
        alone.ask(lambda: ingress.tick(ingress.now() + source.UNWANTED_SECS))
        last = told()[-1]
        assert (last["listener"], last["last_client"], last["messages_since_start"]) == ("mqtt", "device", 4)
        assert last["last_address"] == "nobody/a"

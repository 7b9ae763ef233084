"""A QoS 2 message that its client repeats on another connection while the first attempt is still pending."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from tests.ingress.clients import Mqtt
from tests.interop.gateway_fixture import Running, running, settings_of

MAPPING: Final = """version: 1
routes:
  - {name: away, from: {endpoint: mqtt, topic: "a/#"}, to: {endpoint: amqp091, queue: missing}}
  - {name: near, from: {endpoint: mqtt, topic: "b/#"}, to: {endpoint: amqp091, queue: present}}
"""
KEPT: Final[PropertyMap] = {Property.SESSION_EXPIRY_INTERVAL: 60}


def connected(gateway: Running, version: Version, *, present: bool) -> Mqtt:
    client = Mqtt(gateway.mqtt)
    properties = KEPT if version is Version.V5 else {}
    client.say(Connect("device", version, clean_start=False, properties=properties))
    assert client.next(Connack).session_present is present
    return client


@pytest.mark.parametrize(
    "topic, version, reason, letters",
    [
        ("a/b", Version.V5, 0x83, 0),
        ("a/b", Version.V311, 0, 1),  # its client cannot be told: a dead letter
        ("b/c", Version.V5, 0, 0),
        ("b/c", Version.V311, 0, 0),
    ],
)
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_client_hears_what_became_of_it(
    tmp_path: Path, topic: str, version: Version, reason: int, letters: int, repeats: int
) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text(MAPPING)
    declared = {"queues": ({"name": "present"},)}
    with running(settings_of(mappings=(str(file),), declare=declared)) as gateway:
        pauses = gateway.gateway.dispatcher.pauses
        for name in ("away", "near"):
            gateway.ask(lambda name=name: pauses.pause("route", name))
        client = connected(gateway, version, present=False)
        client.publish(topic, b"once", 2, 7)
        client.ping()
        for _ in range(repeats):
            before, client = client, connected(gateway, version, present=True)
            client.publish(topic, b"once", 2, 7, dup=True)
            client.ping()
            before.cut()
        for name in ("away", "near"):
            gateway.ask(lambda name=name: pauses.resume("route", name))
        gateway.ask(gateway.gateway.writes.flush)
        assert client.acked(PacketType.PUBREC) == (7, reason)
        if not reason:
            client.ack(PacketType.PUBREL, 7)
            assert client.acked(PacketType.PUBCOMP) == (7, 0)
        assert gateway.ask(lambda: len(gateway.gateway.dead_letters)) == letters
        client.publish(topic, b"another", 1, 7)
        assert client.acked(PacketType.PUBACK) == (7, reason)
        client.cut()


def test_a_repeat_while_memory_is_scarce_is_told_the_outcome_too(tmp_path: Path) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text(MAPPING)
    with running(settings_of(mappings=(str(file),))) as gateway:
        dispatcher = gateway.gateway.dispatcher
        gateway.ask(lambda: dispatcher.pauses.pause("route", "away"))
        first = connected(gateway, Version.V5, present=False)
        first.subscribe("c")  # a client that consumes is refused, and not held
        first.publish("a/b", b"once", 2, 7)
        first.ping()
        memory = dispatcher.memory

        def use(part: float) -> None:
            memory._resident = lambda: int(part * memory.watermark)
            memory.measure()

        gateway.ask(lambda: use(2.0))
        with connected(gateway, Version.V5, present=True) as client:
            first.cut()
            client.publish("a/b", b"once", 2, 7, dup=True)
            client.ping()
            gateway.ask(lambda: use(0.1))
            gateway.ask(lambda: dispatcher.pauses.resume("route", "away"))
            gateway.ask(gateway.gateway.writes.flush)
            assert client.acked(PacketType.PUBREC) == (7, 0x83)

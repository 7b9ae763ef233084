"""No more can be retained: what publishers hear, in the words of each version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits
from tests.broker.parts import newest
from tests.ingress.clients import connect, eventually
from tests.interop.gateway_fixture import Running, running, settings_of

PUBACK, PUBREC = PacketType.PUBACK, PacketType.PUBREC
TAKEN = (0, 0x10)


@pytest.fixture
def gateway() -> Iterator[Running]:
    with running(settings_of(limits=Limits(retained_messages_max=2))) as started:
        with connect(started, "first")[0] as client:
            for number in (1, 2):
                client.publish(f"full/{number}", b"kept", 1, number, retain=True)
                assert client.acked(PUBACK)[0] == number
        yield started


def test_mqtt_5_hears_quota_exceeded_and_subscribers_get_the_message(gateway: Running) -> None:
    with connect(gateway, "writer")[0] as writer, connect(gateway, "reader")[0] as reader:
        reader.subscribe("new", 1)
        for qos, kind in ((1, PUBACK), (2, PUBREC)):
            writer.publish("new", b"lives", qos, qos, retain=True)
            assert writer.acked(kind) == (qos, ReasonCode.QUOTA_EXCEEDED)
            assert reader.body() == b"lives"
        writer.publish("full/1", b"another", 1, 3, retain=True)
        assert writer.acked(PUBACK)[1] in TAKEN
        writer.publish("full/1", b"", 1, 4, retain=True)
        assert writer.acked(PUBACK)[1] in TAKEN
        writer.publish("new", b"has room", 1, 5, retain=True)
        assert writer.acked(PUBACK) == (5, 0)


@pytest.mark.parametrize("version", [Version.V311, Version.V31])
def test_before_mqtt_5_it_is_a_dead_letter_and_not_tried_again(gateway: Running, version: Version) -> None:
    writer, _ = connect(gateway, "writer", version=version)
    reader, _ = connect(gateway, "reader", version=version)
    with writer, reader:
        reader.subscribe("new", 1)
        writer.publish("new", b"lives", 1, 1, retain=True)
        assert writer.acked(PUBACK) == (1, 0)
        assert reader.body() == b"lives"
        assert reader.quiet()
    assert letters(gateway) == [(b"lives", "quota")]


def test_qos_0_is_counted(gateway: Running) -> None:
    with connect(gateway, "writer")[0] as writer:
        writer.publish("new", b"x", 0, 0, retain=True)
        writer.ping()
    assert gateway.ask(lambda: gateway.gateway.mqtt.retained.refused) == 1


def test_what_expires_makes_room(gateway: Running) -> None:
    with connect(gateway, "writer")[0] as writer:
        writer.publish("full/1", b"", 1, 1, retain=True)
        writer.acked(PUBACK)
        soon = encode_list({Property.MESSAGE_EXPIRY_INTERVAL: 1}, PacketType.PUBLISH)
        writer.publish("short", b"x", 1, 2, retain=True, properties=soon)
        assert writer.acked(PUBACK)[1] in TAKEN
        writer.publish("new", b"x", 1, 3, retain=True)
        assert writer.acked(PUBACK)[1] == ReasonCode.QUOTA_EXCEEDED
        eventually(lambda: gateway.ask(lambda: len(gateway.gateway.mqtt.retained)) == 1)
        writer.publish("new", b"x", 1, 4, retain=True)
        assert writer.acked(PUBACK)[1] in TAKEN


def test_a_will_that_cannot_be_retained_is_a_dead_letter(gateway: Running) -> None:
    client, _ = connect(gateway, "dying", will=Will("new", b"will", 1, True))
    client.cut()
    eventually(lambda: letters(gateway) == [(b"will", "quota")])


def letters(gateway: Running) -> list[tuple[bytes, str]]:
    found = gateway.ask(lambda: newest(gateway.gateway.core.dead_letters))
    return [(bytes(letter.message.body), letter.outcome.reason.value) for letter in found]

"""What a listener offers, says in its CONNACK, and holds its clients to; how it says goodbye."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.protocols.mqtt.packets import Disconnect, Will
from gateway.protocols.mqtt.properties import decode_list
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits
from tests.configured import make_listener
from tests.ingress.clients import connect, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

PUBLISH = PacketType.PUBLISH
UTF8 = b"\x01\x01"
ALIASES = {Property.TOPIC_ALIAS_MAXIMUM: 2}


def offering(limits: Limits | None = None, **options: Any) -> Any:
    """A gateway whose MQTT listener has these options."""
    listener = make_listener(protocol="mqtt", host=LOOPBACK, port=0, **options)
    return running(settings_of(limits=limits, listeners={"mqtt": listener}))


def test_aliases_stand_for_the_first_topics(gateway: Running) -> None:
    with connect(gateway, "r", properties=ALIASES)[0] as reader, connect(gateway, "w")[0] as writer:
        reader.subscribe("#")
        topics = 2 * ("to/a", "to/b", "to/c")
        for topic in topics:
            writer.publish(topic, topic.encode())
        assert [reader.row()[1:] for _ in topics] == [
            (topic.encode(), 0, b"", topic.encode()) for topic in topics
        ]
        assert sorted(reader.machine._aliases.items()) == [(1, b"to/a"), (2, b"to/b")]


def test_no_alias_without_being_asked(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.subscribe("a")
        client.publish("a")
        client.publish("a")
        assert [client.row()[1], client.row()[1]] == [b"a", b"a"]
        assert client.machine._aliases == {}


@pytest.mark.parametrize("asked, told", [(1, "reply/me"), (0, None)])
def test_response_information(asked: int, told: str | None) -> None:
    with offering(response_information="reply/{client_id}") as gateway:
        client, connack = connect(gateway, "me", properties={Property.REQUEST_RESPONSE_INFORMATION: asked})
        client.cut()
        assert connack.properties.get(Property.RESPONSE_INFORMATION) == told


NARROW = [
    ({"qos_max": 1}, {Property.MAXIMUM_QOS: 1}, 2, False, ReasonCode.QOS_NOT_SUPPORTED),
    ({"qos_max": 0}, {Property.MAXIMUM_QOS: 0}, 1, False, ReasonCode.QOS_NOT_SUPPORTED),
    ({"retain": False}, {Property.RETAIN_AVAILABLE: 0}, 0, True, ReasonCode.RETAIN_NOT_SUPPORTED),
]


@pytest.mark.parametrize("options, told, qos, retain, reason", NARROW)
@pytest.mark.parametrize("version", [Version.V5, Version.V311])
def test_what_is_not_offered_ends_the_connection(
    options: dict[str, Any], told: dict[Property, int], qos: int, retain: bool, reason: int, version: Version
) -> None:
    with offering(**options) as gateway:
        client, connack = connect(gateway, version=version)
        with client:
            if version is Version.V5:
                assert told.items() <= connack.properties.items()
            assert client.subscribe("a", 2) == min(2, options.get("qos_max", 2))
            client.publish("a", b"x", qos, packet_id=qos and 1, retain=retain)
            if version is Version.V5:
                assert client.next(Disconnect).reason == reason
            assert client.closed()
        will = Will("w", b"x", qos, retain)
        client, connack = connect(gateway, will=will, version=version)
        client.cut()
        assert connack.reason == (reason if version is Version.V5 else ReasonCode.SERVER_UNAVAILABLE)


@pytest.mark.parametrize("qos, kind", [(0, None), (1, PacketType.PUBACK), (2, PacketType.PUBREC)])
def test_a_body_is_what_its_format_says(gateway: Running, qos: int, kind: PacketType | None) -> None:
    with connect(gateway, "r")[0] as reader, connect(gateway)[0] as client:
        reader.subscribe("a")
        for number, body in enumerate((b"\xff", "é".encode()), 1):
            client.publish("a", body, qos, packet_id=qos and number, properties=UTF8)
            if kind is not None:
                reason = ReasonCode.PAYLOAD_FORMAT_INVALID if number == 1 else 0
                assert client.acked(kind) == (number, reason)
        client.publish("a", b"\xff", properties=b"\x26\x00\x01\x01\x00\x01\x01")  # by chance the same bytes
        assert [reader.body(), reader.body()] == ["é".encode(), b"\xff"]
        will = Will("w", b"\xff", properties={Property.PAYLOAD_FORMAT_INDICATOR: 1})
        other, connack = connect(gateway, "other", will=will)
        other.cut()
        assert connack.reason == ReasonCode.PAYLOAD_FORMAT_INVALID


def test_more_than_the_receive_maximum_ends_a_client_of_5() -> None:
    with running(settings_of(limits=Limits(inflight_max=10))) as gateway:
        client, connack = connect(gateway)
        with client, connect(gateway, "reader")[0] as reader:
            reader.subscribe("a")
            assert connack.properties[Property.RECEIVE_MAXIMUM] == 10
            for packet_id in range(1, 12):
                client.machine.publish(b"a", b"x", 1, packet_id=packet_id)
            client.flush()
            assert client.next(Disconnect).reason == ReasonCode.RECEIVE_MAXIMUM_EXCEEDED
        assert stats(gateway).protocol_errors.counts == {"receive_maximum_exceeded": 1}


@pytest.mark.parametrize("wants", [1, 0])
def test_reason_strings_are_for_those_who_want_them(gateway: Running, wants: int) -> None:
    with connect(gateway, properties={Property.REQUEST_PROBLEM_INFORMATION: wants})[0] as client:
        client.publish("$SYS/x", b"x", 1, 1)
        data = client.sock.recv(100)
        assert (b"the topic is reserved for the gateway" in data) == bool(wants)
        assert data[:5] == bytes((0x40, len(data) - 2, 0, 1, 0x87))


@pytest.mark.parametrize(
    "reference, moved, reason",
    [
        (None, False, ReasonCode.SERVER_SHUTTING_DOWN),
        ("b:1", False, ReasonCode.USE_ANOTHER_SERVER),
        ("b:1", True, ReasonCode.SERVER_MOVED),
    ],
)
def test_a_gateway_that_stops_says_where_to_go(
    reference: str | None, moved: bool, reason: ReasonCode
) -> None:
    with offering(server_reference=reference, server_moved=moved) as gateway:
        client, _ = connect(gateway)
        gateway.ask(gateway.gateway.stop)
        said = client.next(Disconnect)
        client.cut()
    assert (said.reason, said.properties.get(Property.SERVER_REFERENCE)) == (reason, reference)


def test_an_alias_travels_with_the_other_properties(gateway: Running) -> None:
    with connect(gateway, properties=ALIASES)[0] as client:
        client.subscribe("a", 0, {Property.SUBSCRIPTION_IDENTIFIER: (9,)})
        for _ in range(2):
            client.publish("a", b"x", properties=b"\x03\x00\x01t")
        for _ in range(2):
            _, topic, _, properties, _ = client.row()
            assert topic == b"a"
            assert decode_list(properties, PUBLISH) == {
                Property.CONTENT_TYPE: "t",
                Property.SUBSCRIPTION_IDENTIFIER: (9,),
            }

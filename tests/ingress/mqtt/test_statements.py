"""Statements of the specifications that no other test is about, packet by packet."""

from __future__ import annotations

import pytest

from gateway.protocols.mqtt.packets import Auth, Disconnect, Pingresp, Suback, Subscription, Unsuback, Will
from gateway.protocols.mqtt.properties import decode_list
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from tests.ingress.clients import Mqtt, Raw, connect
from tests.interop.gateway_fixture import Running

VERSIONS = (Version.V5, Version.V311)
PUBACK, PUBREC, PUBREL, PUBCOMP = PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP
FORWARDED = (
    b"\x01\x01"  # payload format
    b"\x26\x00\x01b\x00\x011\x03\x00\x01t\x26\x00\x01a\x00\x012"  # user property, content type, user property
    b"\x08\x00\x01r\x09\x00\x02\xff\x00\x26\x00\x01b\x00\x013"  # response topic, correlation, user property
)


def both(gateway: Running, topic_filter: str = "#", qos: int = 0) -> tuple[Mqtt, Mqtt]:
    """A subscriber and a publisher."""
    reader, writer = connect(gateway, "reader")[0], connect(gateway, "writer")[0]
    reader.subscribe(topic_filter, qos)
    return reader, writer


@pytest.mark.parametrize("version", VERSIONS)
def test_subacks_answer_every_filter_in_order(gateway: Running, version: Version) -> None:
    with connect(gateway, version=version)[0] as client:
        wanted = [Subscription("a", 2), Subscription("b", 0), Subscription("c", 1), Subscription("a", 1)]
        client.machine.subscribe(0x1234, wanted)
        client.flush()
        said = client.next(Suback)
        assert (said.packet_id, said.reasons) == (0x1234, (2, 0, 1, 1))


def test_a_refused_filter_does_not_spoil_the_others(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.machine.subscribe(7, [Subscription("a"), Subscription("#/a"), Subscription("b", 1)])
        client.flush()
        assert client.next(Suback).reasons == (0, ReasonCode.TOPIC_FILTER_INVALID, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_filter_that_is_there_already_is_replaced(gateway: Running, version: Version) -> None:
    with connect(gateway, version=version)[0] as client:
        client.publish("a", b"kept", 1, 1, retain=True)
        client.acked(PUBACK)
        assert client.subscribe("a", 2) == 2
        assert client.body() == b"kept"
        assert client.subscribe("a", 0) == 0
        assert client.body() == b"kept", "retained messages are sent again"
        client.publish("a", b"once", 1, 2)
        flags, _, _, _, body = client.row()
        assert (flags, body) == (0, b"once")
        assert client.quiet()


@pytest.mark.parametrize("version", VERSIONS)
def test_unsubacks_and_filters_compared_as_they_are_written(gateway: Running, version: Version) -> None:
    with connect(gateway, version=version)[0] as client:
        for topic_filter in ("a/b", "a/+"):
            client.subscribe(topic_filter)
        client.machine.unsubscribe(0x4321, ["a/b", "a/B", "#"])
        client.flush()
        said = client.next(Unsuback)
        none = ReasonCode.NO_SUBSCRIPTION_EXISTED
        assert (said.packet_id, said.reasons) == (0x4321, (0, none, none) if version is Version.V5 else ())
        client.publish("a/b", b"by the wildcard")
        assert client.body() == b"by the wildcard"
        client.machine.unsubscribe(1, ["a/+"])
        client.flush()
        client.next(Unsuback)
        client.publish("a/b", b"no more")
        assert client.quiet()


@pytest.mark.parametrize("qos, kind", [(1, PUBACK), (2, PUBREC)])
def test_unsubscribing_completes_what_has_been_sent(gateway: Running, qos: int, kind: PacketType) -> None:
    reader, writer = both(gateway, "a", qos)
    with reader, writer:
        writer.publish("a", b"begun", qos, 1)
        packet_id = reader.row()[2]
        reader.machine.unsubscribe(1, ["a"])
        reader.flush()
        reader.next(Unsuback)
        reader.ack(kind, packet_id)
        if qos == 2:
            assert reader.acked(PUBREL) == (packet_id, 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_pingreq_is_answered(gateway: Running, version: Version) -> None:
    with connect(gateway, version=version)[0] as client:
        client.ping()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_ping_is_answered_behind_what_came_before_it(gateway: Running, version: Version) -> None:
    with connect(gateway, version=version)[0] as client:
        client.machine.subscribe(1, [Subscription("a")])
        client.machine.publish(b"a", b"x", 1, packet_id=2)
        client.machine.send_pingreq(0.0)
        client.machine.send_pingreq(0.0)
        client.flush()
        heard = [type(client.next(object)) for _ in range(5)]
        assert heard == [Suback, Publishes, Acks, Pingresp, Pingresp]


def test_nothing_but_publish_waits_for_credit(gateway: Running) -> None:
    reader, _ = connect(gateway, "reader", properties={Property.RECEIVE_MAXIMUM: 1})
    with reader, connect(gateway, "writer")[0] as writer:
        reader.subscribe("a", 1)
        for packet_id in (1, 2):
            writer.publish("a", str(packet_id).encode(), 1, packet_id)
            writer.acked(PUBACK)
        packet_id = reader.row()[2]
        assert reader.quiet()
        assert reader.subscribe("b") == 0
        reader.ack(PUBACK, packet_id)
        assert reader.body() == b"2"


def test_a_refusing_pubrec_frees_credit_and_is_final(gateway: Running) -> None:
    reader, _ = connect(gateway, "reader", properties={Property.RECEIVE_MAXIMUM: 1})
    with reader, connect(gateway, "writer")[0] as writer:
        reader.subscribe("a", 2)
        for packet_id in (1, 2):
            writer.publish("a", str(packet_id).encode(), 2, packet_id)
        reader.ack(PUBREC, reader.row()[2], ReasonCode.UNSPECIFIED_ERROR)
        assert reader.body() == b"2"


def test_properties_are_forwarded_unaltered_and_in_order(gateway: Running) -> None:
    reader, writer = both(gateway)
    with reader, writer:
        writer.publish("a", b"x", properties=FORWARDED)
        assert reader.row()[3] == FORWARDED


def test_a_wills_properties_are_forwarded(gateway: Running) -> None:
    pairs = (("b", "1"), ("a", "2"), ("b", "3"))
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe("w")
        will = Will("w", b"x", properties={Property.CONTENT_TYPE: "t", Property.USER_PROPERTY: pairs})
        connect(gateway, "dying", will=will)[0].cut()
        found = decode_list(reader.row()[3], PacketType.PUBLISH)
        assert found == {Property.CONTENT_TYPE: "t", Property.USER_PROPERTY: pairs}


def test_the_expiry_that_is_left_is_told(gateway: Running) -> None:
    reader, writer = both(gateway)
    with reader, writer:
        writer.publish("a", b"x", properties=b"\x02\x00\x00\x00\x3c")
        left = decode_list(reader.row()[3], PacketType.PUBLISH)[Property.MESSAGE_EXPIRY_INTERVAL]
        assert 0 < left <= 60


@pytest.mark.parametrize(
    "topic", ["A", "é", "e\u0301", "a b", "/", "a//b", "\ufeffa", "a" * 65_535, "\U0001f600"]
)
def test_topics_are_not_normalised(gateway: Running, topic: str) -> None:
    with connect(gateway, "reader")[0] as reader, connect(gateway, "writer")[0] as writer:
        for other in ("a", "e\u0301", "é", "a/b", topic):
            if other == topic or other not in ("é", "e\u0301"):
                fits = len(other.encode()) <= gateway.gateway.settings.limits.topic_filter_bytes_max
                reader.subscribe(other if fits else "#")
        writer.publish(topic, b"x")
        assert reader.row()[1].decode() == topic
        assert reader.quiet()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_empty_body_clears_what_is_retained_and_a_plain_one_does_not(
    gateway: Running, version: Version
) -> None:
    with connect(gateway, "writer", version=version)[0] as writer:
        for number, (body, retain, kept) in enumerate(
            [(b"1", True, True), (b"2", False, True), (b"", False, True), (b"", True, False)], 1
        ):
            writer.publish("a", body, 1, number, retain=retain)
            writer.acked(PUBACK)
            gateway.until_retains("a", kept)


@pytest.mark.parametrize("as_published", [True, False])
def test_retain_as_published(gateway: Running, as_published: bool) -> None:
    with connect(gateway, "reader")[0] as reader, connect(gateway, "writer")[0] as writer:
        reader.subscribe("a", retain_as_published=as_published)
        for retain in (True, False):
            writer.publish("a", b"x", retain=retain)
        assert [reader.row()[0] & 1 for _ in range(2)] == [as_published, 0]


@pytest.mark.parametrize("qos", [1, 2])
def test_an_acknowledged_id_is_new_again_whatever_dup_says(gateway: Running, qos: int) -> None:
    reader, writer = both(gateway, "a", 0)
    with reader, writer:
        for body in (b"1", b"2"):
            writer.publish("a", body, qos, 5, dup=body == b"2")
            if qos == 1:
                assert writer.acked(PUBACK) == (5, 0)
            else:
                assert writer.acked(PUBREC) == (5, 0)
                writer.ack(PUBREL, 5)
                assert writer.acked(PUBCOMP) == (5, 0)
        assert [reader.body(), reader.body()] == [b"1", b"2"]


def test_dup_is_not_forwarded(gateway: Running) -> None:
    reader, writer = both(gateway, "a", 1)
    with reader, writer:
        writer.publish("a", b"x", 1, 1, dup=True)
        assert reader.row()[0] & 8 == 0


def test_aliases_end_with_their_connection(gateway: Running) -> None:
    with connect(gateway, "c")[0] as client:
        client.publish("a", b"x", properties=b"\x23\x00\x01")
        client.publish("", b"x", properties=b"\x23\x00\x01")
        client.ping()
    with connect(gateway, "c")[0] as client:
        client.publish("", b"x", properties=b"\x23\x00\x01")
        assert client.next(Disconnect).reason == ReasonCode.PROTOCOL_ERROR


def test_assigned_identifiers_differ(gateway: Running) -> None:
    found = set()
    for _ in range(3):
        client, connack = connect(gateway, "")
        client.cut()
        found.add(connack.properties[Property.ASSIGNED_CLIENT_IDENTIFIER])
    assert len(found) == 3


def test_what_follows_a_refused_connect_is_not_looked_at(gateway: Running) -> None:
    with connect(gateway, "reader")[0] as reader, Mqtt(gateway.mqtt) as client:
        reader.subscribe("#")
        refused = b"\x10\x12\x00\x04MQTT\x05\x02\x00\x00\x05\x15\x00\x02no\x00\x00"
        client.send(refused + b"\x30\x05\x00\x01a\x00x")
        assert client.rest() == b"\x20\x03\x00\x82\x00"
        assert reader.quiet()


FIRST_BYTES = [
    ("PUBACK", "41 02 00 01"),
    ("PUBREL without its bit", "60 02 00 01"),
    ("SUBSCRIBE without its bit", "80 07 00 01 00 00 01 61 00"),
    ("UNSUBSCRIBE without its bit", "a0 06 00 01 00 00 01 61"),
    ("PINGREQ", "c1 00"),
    ("DISCONNECT", "e1 00"),
    ("AUTH", "f1 00"),
    ("subscription options", "82 07 00 01 00 00 01 61 c0"),
]


@pytest.mark.parametrize("name, data", FIRST_BYTES, ids=[row[0] for row in FIRST_BYTES])
def test_reserved_bits_are_malformed(gateway: Running, name: str, data: str) -> None:
    with connect(gateway)[0] as client:
        client.send(bytes.fromhex(data))
        assert client.next(Disconnect).reason == ReasonCode.MALFORMED_PACKET
        assert client.closed()


def test_a_bom_is_a_character(gateway: Running) -> None:
    reader, writer = both(gateway, "\ufeffa")
    with reader, writer:
        writer.publish("a")
        writer.publish("\ufeffa")
        assert reader.row()[1].decode() == "\ufeffa"
        assert reader.quiet()


def test_identifiers_of_all_that_match_are_told(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        for number, topic_filter in ((3, "a/+"), (1, "a/#"), (2, "b")):
            client.subscribe(topic_filter, number % 3, {Property.SUBSCRIPTION_IDENTIFIER: (number,)})
        client.publish("a/b", b"x", 2, 1)
        flags, _, _, raw, _ = client.row()
        found = decode_list(raw, PacketType.PUBLISH)
        assert (flags >> 1 & 3, found) == (1, {Property.SUBSCRIPTION_IDENTIFIER: (1, 3)})


def test_auth_without_a_method_is_a_fault(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.machine.send(Auth(0x18, {Property.AUTHENTICATION_METHOD: "x"}))
        client.flush()
        assert client.next(Disconnect).reason == ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "client_id", ["a", "0123456789abcdefghijklm", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "é" * 100]
)
@pytest.mark.parametrize("version", VERSIONS)
def test_client_identifiers(gateway: Running, client_id: str, version: Version) -> None:
    client, connack = connect(gateway, client_id, version=version)
    client.cut()
    assert connack.reason == 0


def test_a_connect_that_is_cut_short_hears_nothing(gateway: Running) -> None:
    with Raw(gateway.mqtt) as client:
        client.send(b"\x10\x04\x00\x04MQ")
        assert client.rest() == b""

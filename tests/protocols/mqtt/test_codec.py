"""Every packet of every version as rows: encoded, decoded, byte by byte, truncated; and what is corrupt."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.protocols.mqtt.codec import decode
from gateway.protocols.mqtt.data_types import decode_topic, is_filter
from gateway.protocols.mqtt.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version, return_code
from gateway.protocols.mqtt.spec import Property as P
from gateway.protocols.mqtt.writers import encode

V2, V31, V311, V5 = Version.MQIPDP, Version.V31, Version.V311, Version.V5
OLD = (V2, V31, V311)

# name, version, packet, bytes
ROWS: list[tuple[str, Version, Packet, str]] = [
    ("connect 5, least", V5, Connect("c"), "10 0e 0004 4d515454 05 02 0000 00 0001 63"),
    (
        "connect 5, all",
        V5,
        Connect(
            "c",
            V5,
            False,
            60,
            Will("w", b"x", 2, True, {P.WILL_DELAY_INTERVAL: 5}),
            "u",
            b"p",
            {P.SESSION_EXPIRY_INTERVAL: 10, P.USER_PROPERTY: (("a", "1"), ("a", "2"))},
        ),
        "10 33 0004 4d515454 05 f4 003c 13 110000000a 26 0001 61 0001 31 26 0001 61 0001 32 0001 63 "
        "05 1800000005 0001 77 0001 78 0001 75 0001 70",
    ),
    (
        "connect 5, password alone",
        V5,
        Connect("", password=b"p"),
        "10 10 0004 4d515454 05 42 0000 00 0000 0001 70",
    ),
    ("connect 3.1.1", V311, Connect("c", V311, True, 10), "10 0d 0004 4d515454 04 02 000a 0001 63"),
    (
        "connect 3.1.1, bridge",
        V311,
        Connect("c", V311, False, 10, bridge=True),
        "10 0d 0004 4d515454 84 00 000a 0001 63",
    ),
    ("connect 3.1", V31, Connect("c", V31, True, 258), "10 0f 0006 4d5149736470 03 02 0102 0001 63"),
    (
        "connect 3.1, bridge",
        V31,
        Connect("c", V31, True, 258, bridge=True),
        "10 0f 0006 4d5149736470 83 02 0102 0001 63",
    ),
    (
        "connect 3.1, user",
        V31,
        Connect("c", V31, True, 0, None, "u", b"p"),
        "10 15 0006 4d5149736470 03 c2 0000 0001 63 0001 75 0001 70",
    ),
    (
        "connect 2, keep-alive little-endian, will, TNCOMP",
        V2,
        Connect("c", V2, True, 258, Will("w", b"x", 1, True), tncomp=True),
        "10 15 0006 4d5149706470 02 2f 0201 0001 63 0001 77 0001 78",
    ),
    ("connack 5", V5, Connack(True), "20 03 01 00 00"),
    (
        "connack 5, properties",
        V5,
        Connack(
            False,
            0,
            {
                P.RECEIVE_MAXIMUM: 10,
                P.MAXIMUM_QOS: 1,
                P.RETAIN_AVAILABLE: 0,
                P.MAXIMUM_PACKET_SIZE: 100,
                P.ASSIGNED_CLIENT_IDENTIFIER: "c",
                P.TOPIC_ALIAS_MAXIMUM: 5,
                P.REASON_STRING: "r",
                P.WILDCARD_SUBSCRIPTION_AVAILABLE: 1,
                P.SUBSCRIPTION_IDENTIFIER_AVAILABLE: 1,
                P.SHARED_SUBSCRIPTION_AVAILABLE: 0,
                P.SERVER_KEEP_ALIVE: 30,
                P.RESPONSE_INFORMATION: "i",
                P.SERVER_REFERENCE: "s",
                P.AUTHENTICATION_METHOD: "m",
                P.AUTHENTICATION_DATA: b"d",
            },
        ),
        "20 33 00 00 30 21000a 2401 2500 2700000064 12000163 220005 1f000172 2801 2901 2a00 13001e 1a000169 "
        "1c000173 1500016d 16000164",
    ),
    ("connack 5, refused", V5, Connack(False, 0x87), "20 03 00 87 00"),
    ("connack 3.1.1", V311, Connack(True), "20 02 01 00"),
    ("connack 3.1, refused", V31, Connack(False, ReasonCode.NOT_AUTHORIZED), "20 02 00 05"),
    ("connack 2, refused", V2, Connack(False, ReasonCode.SERVER_UNAVAILABLE), "20 02 00 03"),
    ("publish 5, QoS 0", V5, Publish("a/b", b"hi"), "30 08 0003 612f62 00 6869"),
    (
        "publish 5, all",
        V5,
        Publish(
            "t",
            b"x",
            2,
            True,
            True,
            7,
            {
                P.PAYLOAD_FORMAT_INDICATOR: 1,
                P.MESSAGE_EXPIRY_INTERVAL: 60,
                P.TOPIC_ALIAS: 3,
                P.RESPONSE_TOPIC: "r",
                P.CORRELATION_DATA: b"\0\xff",
                P.USER_PROPERTY: (("n", "v"),),
                P.SUBSCRIPTION_IDENTIFIER: (1, 128),
                P.CONTENT_TYPE: "j",
            },
        ),
        "3d 2a 0001 74 0007 23 0101 020000003c 230003 08000172 09000200ff 2600016e000176 0b01 0b8001 "
        "0300016a 78",
    ),
    ("publish 5, alias alone", V5, Publish("", b"", properties={P.TOPIC_ALIAS: 3}), "30 06 0000 03 230003"),
    (
        "publish 3.1.1, QoS 1, retained",
        V311,
        Publish("t", b"x", 1, True, False, 258),
        "33 06 0001 74 0102 78",
    ),
    ("publish 2, id little-endian", V2, Publish("t", b"x", 1, False, True, 258), "3a 06 0001 74 0201 78"),
    ("puback 5, short", V5, Ack(PacketType.PUBACK, 1), "40 02 0001"),
    ("puback 5, reason", V5, Ack(PacketType.PUBACK, 1, 0x10), "40 03 0001 10"),
    (
        "pubrec 5, properties",
        V5,
        Ack(PacketType.PUBREC, 1, 0x97, {P.REASON_STRING: "r"}),
        "50 08 0001 97 04 1f000172",
    ),
    ("pubrel 5, reason", V5, Ack(PacketType.PUBREL, 1, 0x92), "62 03 0001 92"),
    ("pubcomp 5", V5, Ack(PacketType.PUBCOMP, 65535), "70 02 ffff"),
    ("puback 3.1", V31, Ack(PacketType.PUBACK, 258), "40 02 0102"),
    ("pubrel 2", V2, Ack(PacketType.PUBREL, 258), "62 02 0201"),
    (
        "subscribe 5",
        V5,
        Subscribe(
            9,
            (Subscription("a/#", 2, True, True, 2), Subscription("$share/g/b", 1)),
            {P.SUBSCRIPTION_IDENTIFIER: (268_435_455,)},
        ),
        "82 1b 0009 05 0bffffff7f 0003 612f23 2e 000a 2473686172652f672f62 01",
    ),
    ("subscribe 3.1.1", V311, Subscribe(1, (Subscription("#", 1),)), "82 06 0001 0001 23 01"),
    ("subscribe 2", V2, Subscribe(1, (Subscription("#", 1),)), "82 06 0100 0001 23 01"),
    ("suback 5", V5, Suback(1, (0, 1, 2, 0x87), {P.REASON_STRING: ""}), "90 0a 0001 03 1f0000 00010287"),
    ("suback 3.1.1", V311, Suback(1, (0x80, 2)), "90 04 0001 80 02"),
    ("unsubscribe 5", V5, Unsubscribe(1, ("a", "b")), "a2 09 0001 00 0001 61 0001 62"),
    ("unsubscribe 3.1", V31, Unsubscribe(1, ("a",)), "a2 05 0001 0001 61"),
    ("unsuback 5", V5, Unsuback(1, (0, 0x11)), "b0 05 0001 00 00 11"),
    ("unsuback 3.1.1", V311, Unsuback(1), "b0 02 0001"),
    ("pingreq", V5, Pingreq(), "c0 00"),
    ("pingresp", V31, Pingresp(), "d0 00"),
    ("disconnect 5, short", V5, Disconnect(), "e0 00"),
    ("disconnect 5, reason", V5, Disconnect(0x04), "e0 01 04"),
    (
        "disconnect 5, properties",
        V5,
        Disconnect(0x9D, {P.SERVER_REFERENCE: "s"}),
        "e0 06 9d 04 1c000173",
    ),
    ("disconnect 3.1.1", V311, Disconnect(), "e0 00"),
    ("auth, short", V5, Auth(), "f0 00"),
    (
        "auth",
        V5,
        Auth(0x18, {P.AUTHENTICATION_METHOD: "m", P.AUTHENTICATION_DATA: b"d"}),
        "f0 0a 18 08 1500016d 16000164",
    ),
]
IDS = [row[0] for row in ROWS]


@pytest.mark.parametrize("name, version, packet, data", ROWS, ids=IDS)
def test_encode(name: str, version: Version, packet: Packet, data: str) -> None:
    assert encode(packet, version).hex() == data.replace(" ", "")


@pytest.mark.parametrize("name, version, packet, data", ROWS, ids=IDS)
def test_decode(name: str, version: Version, packet: Packet, data: str) -> None:
    wire = bytes.fromhex(data)
    assert decode(wire, version=version) == (packet, len(wire))
    assert decode(b"\xc0\0" + wire + b"\xff", 2, version=version) == (packet, len(wire) + 2)


@pytest.mark.parametrize("name, version, packet, data", ROWS, ids=IDS)
def test_byte_by_byte(name: str, version: Version, packet: Packet, data: str) -> None:
    wire = bytes.fromhex(data)
    for end in range(len(wire)):
        assert decode(wire[:end], version=version) is None
    assert decode(wire, version=version) == (packet, len(wire))


@pytest.mark.parametrize("name, version, packet, data", ROWS, ids=IDS)
def test_truncated(name: str, version: Version, packet: Packet, data: str) -> None:
    """A packet whose remaining length says less than its fields need is corrupt, or is another packet."""
    wire = bytes.fromhex(data)
    assert wire[1] < 0x80
    for cut in range(2, len(wire)):
        shorter = bytes((wire[0], cut - 2)) + wire[2:cut]
        try:
            found = decode(shorter, version=version)
        except RemoteProtocolError:
            continue
        assert found is not None
        assert found[0] != packet


# name, version, bytes, reason
CORRUPT: list[tuple[str, Version, str, int]] = [
    ("type 0", V5, "00 00", 0x81),
    ("remaining length of five bytes", V5, "30 ffffffff", 0x81),
    ("connect, other name", V5, "10 0d 0004 4d515455 04 02 000a 0001 63", 0x84),
    ("connect, level 6", V5, "10 0d 0004 4d515454 06 02 000a 0001 63", 0x84),
    ("connect, MQTT level 3", V5, "10 0d 0004 4d515454 03 02 000a 0001 63", 0x84),
    ("connect, MQIsdp level 4", V5, "10 0f 0006 4d5149736470 04 02 0102 0001 63", 0x84),
    ("connect, MQTT 5 bridge bit", V5, "10 0e 0004 4d515454 85 02 0000 00 0001 63", 0x84),
    ("connect, ArgoOTWP", V5, "10 11 0008 4172676f4f545750 01 02 0102 0001 63", 0x84),
    ("connect, reserved flag", V5, "10 0d 0004 4d515454 04 03 000a 0001 63", 0x81),
    ("connect, flags in the first byte", V5, "11 0d 0004 4d515454 04 02 000a 0001 63", 0x81),
    ("connect, will QoS without will", V5, "10 0d 0004 4d515454 04 0a 000a 0001 63", 0x81),
    ("connect, will QoS 3", V5, "10 13 0004 4d515454 04 1e 000a 0001 63 0001 77 0001 78", 0x81),
    ("connect, password without user", V5, "10 10 0004 4d515454 04 42 000a 0001 63 0001 70", 0x81),
    ("connect 3.1.1, no id, old session", V5, "10 0c 0004 4d515454 04 00 000a 0000", 0x85),
    ("connect 3.1, no id", V5, "10 0e 0006 4d5149736470 03 02 0102 0000", 0x85),
    ("connect, bytes left", V5, "10 0e 0004 4d515454 04 02 000a 0001 63 00", 0x81),
    ("connect, will topic with wildcard", V5, "10 13 0004 4d515454 04 06 000a 0001 63 0001 23 0001 78", 0x90),
    ("connect, NUL in the id", V5, "10 0d 0004 4d515454 04 02 000a 0001 00", 0x81),
    ("connect, receive maximum 0", V5, "10 11 0004 4d515454 05 02 0000 03 210000 0001 63", 0x82),
    ("connect, auth data alone", V5, "10 11 0004 4d515454 05 02 0000 03 160000 0001 63", 0x82),
    ("connect, request problem 2", V5, "10 10 0004 4d515454 05 02 0000 02 1702 0001 63", 0x82),
    ("connack, reserved flags", V311, "20 02 02 00", 0x81),
    ("connack, code 6", V311, "20 02 00 06", 0x81),
    ("connack, session of a refused", V311, "20 02 01 05", 0x82),
    ("connack 5, reason unknown", V5, "20 03 00 01 00", 0x82),
    ("publish, QoS 3", V5, "36 06 0001 74 0001 00", 0x81),
    ("publish, DUP at QoS 0", V311, "38 03 0001 74", 0x81),
    ("publish, id 0", V311, "32 05 0001 74 0000", 0x82),
    ("publish, wildcard", V311, "30 03 0001 2b", 0x90),
    ("publish, no topic", V311, "30 02 0000", 0x90),
    ("publish 5, neither topic nor alias", V5, "30 03 0000 00", 0x82),
    ("publish, topic is not UTF-8", V311, "30 03 0001 ff", 0x81),
    ("publish, surrogate", V311, "30 05 0003 eda080", 0x81),
    ("publish, overlong", V311, "30 04 0002 c080", 0x81),
    ("publish, property of another packet", V5, "30 07 0001 74 03 210001", 0x81),
    ("connect, property of another packet", V5, "10 11 0004 4d515454 05 02 0000 03 230001 0001 63", 0x81),
    (
        "will, property of another packet",
        V5,
        "10 16 0004 4d515454 05 06 0000 00 0001 63 03 230001 0001 74 0000",
        0x81,
    ),
    ("puback, property of another packet", V5, "40 07 0001 00 03 210001", 0x81),
    ("subscribe, property of another packet", V5, "82 09 0001 02 0101 0001 23 01", 0x81),
    ("disconnect, property of another packet", V5, "e0 04 00 02 0101", 0x81),
    ("publish, property that is none", V5, "30 06 0001 74 02 0001", 0x81),
    ("publish, property twice", V5, "30 08 0001 74 04 0101 0101", 0x82),
    ("publish, alias 0", V5, "30 07 0001 74 03 230000", 0x94),
    ("publish, subscription identifier 0", V5, "30 06 0001 74 02 0b00", 0x82),
    ("publish, identifier longer than it needs", V5, "30 07 0001 74 03 0b8100", 0x81),
    ("publish, payload format 2", V5, "30 06 0001 74 02 0102", 0x82),
    ("publish, response topic with wildcard", V5, "30 08 0001 74 04 080001 23", 0x82),
    ("publish, properties end late", V5, "30 05 0001 74 05 01", 0x81),
    ("puback, id 0", V5, "40 02 0000", 0x82),
    ("puback, flags", V5, "42 02 0001", 0x81),
    ("puback, one byte", V5, "40 01 00", 0x81),
    ("puback, long", V311, "40 03 0001 00", 0x81),
    ("puback, reason of another packet", V5, "40 03 0001 01", 0x82),
    ("pubrel, flags", V311, "60 02 0001", 0x81),
    ("subscribe, flags", V311, "80 06 0001 0001 23 01", 0x81),
    ("subscribe, nothing", V311, "82 02 0001", 0x82),
    ("subscribe, empty filter", V311, "82 05 0001 0000 01", 0x81),
    ("subscribe, QoS 3", V311, "82 06 0001 0001 23 03", 0x81),
    ("subscribe 3.1.1, options of 5", V311, "82 06 0001 0001 23 04", 0x81),
    ("subscribe 5, reserved options", V5, "82 07 0001 00 0001 23 41", 0x81),
    ("subscribe 5, retain handling 3", V5, "82 07 0001 00 0001 23 30", 0x82),
    ("subscribe 5, two identifiers", V5, "82 0b 0001 04 0b01 0b02 0001 23 01", 0x82),
    ("subscribe 5, no-local and shared", V5, "82 10 0001 00 000a 2473686172652f672f62 04", 0x82),
    ("suback, nothing", V311, "90 02 0001", 0x82),
    ("suback, code 3", V311, "90 03 0001 03", 0x81),
    ("unsubscribe, nothing", V5, "a2 03 0001 00", 0x82),
    ("unsuback 5, nothing", V5, "b0 03 0001 00", 0x82),
    ("pingreq, long", V311, "c0 01 00", 0x81),
    ("disconnect 3.1.1, long", V311, "e0 01 00", 0x81),
    ("disconnect 5, reason unknown", V5, "e0 01 05", 0x82),
    ("auth 3.1.1", V311, "f0 00", 0x81),
]


@pytest.mark.parametrize("name, version, data, reason", CORRUPT, ids=[row[0] for row in CORRUPT])
def test_corrupt(name: str, version: Version, data: str, reason: int) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(bytes.fromhex(data), version=version)
    assert caught.value.reason == reason


# what old or sloppy peers write and is understood nevertheless
LIBERAL: list[tuple[str, Version, str, Packet]] = [
    ("length in four bytes", V5, "c0 80808000", Pingreq()),
    (
        "3.1, reserved connect flag",
        V31,
        "10 0f 0006 4d5149736470 03 03 0102 0001 63",
        Connect("c", V31, True, 258),
    ),
    ("3.1, flags outweighed", V31, "10 0f 0006 4d5149736470 03 c2 0000 0001 63", Connect("c", V31)),
    (
        "3.1, password flag outweighed",
        V31,
        "10 12 0006 4d5149736470 03 c2 0000 0001 63 0001 75",
        Connect("c", V31, user_name="u"),
    ),
    ("2, unused connect flags", V2, "10 0f 0006 4d5149706470 02 c2 0000 0001 63", Connect("c", V2)),
    ("3.1, pubrel with DUP", V31, "6a 02 0001", Ack(PacketType.PUBREL, 1)),
    ("3.1, DUP at QoS 0", V31, "38 03 0001 74", Publish("t", dup=True)),
    ("2, TNCOMP response", V2, "20 02 01 00", Connack()),
]


@pytest.mark.parametrize("name, version, data, packet", LIBERAL, ids=[row[0] for row in LIBERAL])
def test_liberal(name: str, version: Version, data: str, packet: Packet) -> None:
    wire = bytes.fromhex(data)
    assert decode(wire, version=version) == (packet, len(wire))


ORDERS: list[tuple[Version, Any, int]] = [
    (V2, "auto", 0x0201),
    (V2, "little", 0x0201),
    (V2, "big", 0x0102),
    (V31, "auto", 0x0102),
    (V31, "little", 0x0201),
    (V31, "big", 0x0102),
    (V311, "little", 0x0102),
    (V5, "little", 0x0102),
]


@pytest.mark.parametrize("version, byte_order, value", ORDERS)
def test_byte_order(version: Version, byte_order: Any, value: int) -> None:
    """Keep-alive and packet ids turn around; lengths never do."""
    data = bytes.fromhex("40 02 0102")
    assert decode(data, version=version, byte_order=byte_order) == (Ack(PacketType.PUBACK, value), 4)
    assert encode(Ack(PacketType.PUBACK, value), version, byte_order) == data
    connect = encode(Connect("client", version, keep_alive=value), version, byte_order)
    assert b"\x01\x02" in connect
    found = decode(connect, byte_order=byte_order)
    assert found is not None
    assert found[0] == Connect("client", version, keep_alive=value)


def test_the_limit_counts_before_the_bytes_come() -> None:
    assert decode(b"\x30\x08", packet_bytes_max=10) is None
    with pytest.raises(RemoteProtocolError) as caught:
        decode(b"\x30\x09", packet_bytes_max=10)
    assert caught.value.reason == ReasonCode.PACKET_TOO_LARGE


UNSPEAKABLE: list[tuple[Version, Packet]] = [
    (V311, Auth(0x18)),
    (V5, Connack(False, 0x01)),
    (V5, Ack(PacketType.PUBACK, 0)),
    (V5, Ack(PacketType.PUBACK, 1, 0x92)),
    (V5, Publish("a\0b")),
    (V5, Publish("a" * 65_536)),
    (V5, Publish("\ud800")),
    (V5, Publish("a", properties={P.RECEIVE_MAXIMUM: 1})),
    (V5, Publish("a", properties={P.TOPIC_ALIAS: 0})),
    (V5, Subscribe(1, (Subscription("a"),), {P.SUBSCRIPTION_IDENTIFIER: (1, 2)})),
    (V5, Subscribe(1, (Subscription("a"),), {P.SUBSCRIPTION_IDENTIFIER: (0,)})),
    (V5, Subscribe(1, (Subscription("a"),), {P.SUBSCRIPTION_IDENTIFIER: (268_435_456,)})),
    (V311, Connect("c", V311, password=b"p")),
    (V2, Connect("c", V2, user_name="u")),
]


@pytest.mark.parametrize("version, packet", UNSPEAKABLE)
def test_what_must_not_be_said(version: Version, packet: Packet) -> None:
    with pytest.raises(LocalProtocolError):
        encode(packet, version)


def test_return_codes() -> None:
    """A reason of MQTT 5 in the few words of the older versions."""
    assert [return_code(code, V311) for code in (0, 0x84, 0x85, 0x88, 0x86, 0x87)] == [0, 1, 2, 3, 4, 5]
    assert [return_code(code, V2) for code in (0, 0x84, 0x85, 0x88, 0x86, 0x87)] == [0, 1, 2, 3, 3, 3]
    assert return_code(ReasonCode.BANNED, V31) == 5
    assert return_code(ReasonCode.SERVER_BUSY, V311) == 3


def test_a_refused_subscription_before_mqtt_5() -> None:
    assert encode(Suback(1, (1, ReasonCode.NOT_AUTHORIZED)), V311).hex() == "900400010180"


FILTERS = [
    ("a", True),
    ("/", True),
    ("a//b", True),
    ("+", True),
    ("+/+", True),
    ("#", True),
    ("a/#", True),
    ("$SYS/#", True),
    ("$share/g/a", True),
    ("$share/g//", True),
    ("a+", False),
    ("a/+b", False),
    ("#/a", False),
    ("a#", False),
    ("", False),
    ("$share/g", False),
    ("$share//a", False),
    ("$share/+/a", False),
    ("$share/g/", False),
]


@pytest.mark.parametrize("text, valid", FILTERS)
def test_filters(text: str, valid: bool) -> None:
    assert is_filter(text) is valid


def test_topics() -> None:
    assert decode_topic("/a/é/$".encode()) == "/a/é/$"
    for wire, reason in ((b"", 0x90), (b"a/+", 0x90), (b"#", 0x90), (b"\xff", 0x81), (b"a\0", 0x81)):
        with pytest.raises(RemoteProtocolError) as caught:
            decode_topic(wire)
        assert caught.value.reason == reason


@pytest.mark.parametrize("data", ["40 03 0001 95", "50 03 0001 92"])
def test_a_refusal_in_the_wrong_packet_is_still_a_refusal(data: str) -> None:
    """Mosquitto answers a PUBLISH over its size limit with PUBACK 0x95."""
    found = decode(bytes.fromhex(data), version=Version.V5)
    assert found is not None
    packet, _ = found
    assert isinstance(packet, Ack)
    assert packet.reason == int(data[-2:], 16)

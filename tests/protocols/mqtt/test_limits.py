"""What the machines refuse, at once and in which words, and what they will not say themselves."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.connection import Connection, State
from gateway.protocols.mqtt.packets import (
    Auth,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Will,
)
from gateway.protocols.mqtt.runs import Publishes
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.protocols.mqtt.spec import Property as P
from gateway.protocols.mqtt.writers import encode
from tests.protocols.mqtt.machines import METHOD, client, server, small_client

V5, V311 = Version.V5, Version.V311


def test_limits_hold_before_the_bytes_come() -> None:
    connection = server(State.START, packet_bytes_max=1000, connect_bytes_max=100)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(b"\x10\x63\x00\x04MQTT\x04", 0.0)
    assert caught.value.reason == ReasonCode.PACKET_TOO_LARGE
    connection.fail(caught.value)
    assert connection.data_to_send() == b""  # which MQTT 3 has no word for
    connection = server(State.OPEN, packet_bytes_max=1000, connect_bytes_max=100)
    assert connection.receive_data(b"\x30\xe5\x07", 0.0) == []  # 997 + 3
    connection = server(State.OPEN, packet_bytes_max=1000, connect_bytes_max=100)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(b"\x30\xe6\x07", 0.0)
    assert caught.value.reason == ReasonCode.PACKET_TOO_LARGE


def test_a_large_packet_in_small_pieces() -> None:
    connection = server(State.OPEN, V311, packet_bytes_max=1 << 24)
    body = bytes(range(256)) * 16_384
    wire = encode(Publish("t", body), V311) * 2
    events = []
    for at in range(0, len(wire), 65_536):
        events += connection.receive_data(wire[at : at + 65_536], 0.0)
    assert [len(event.rows) for event in events if isinstance(event, Publishes)] == [1, 1]
    assert all(isinstance(event, Publishes) and event.rows[0][4] == body for event in events)
    assert connection._buffer is None


@pytest.mark.parametrize("version", [V5, V311])
def test_an_accepted_connect_occupies_little(version: Version) -> None:
    """Its will, password and properties may have 192 KiB, on each of thousands of connections."""
    connection = server(State.START, version)
    five = version is V5
    large = {P.USER_PROPERTY: (("a", "x" * 1_000),), **METHOD, P.SESSION_EXPIRY_INTERVAL: 7} if five else {}
    packet = Connect("c", version, False, 9, Will("t", b"w"), "u", b"p", large)
    (taken,) = connection.receive_data(encode(packet, version), 0.0)
    assert taken == packet
    connection.send_connack()
    kept = {**METHOD, P.SESSION_EXPIRY_INTERVAL: 7} if five else {}
    assert connection.connect == Connect("c", version, False, 9, None, "u", None, kept)


FAILED: list[tuple[str, bytes, str]] = [
    ("unknown level", bytes.fromhex("10 0d 0004 4d515454 06 02 000a 0001 63"), "20020001"),
    ("level 1", bytes.fromhex("10 11 0008 4172676f4f545750 01 02 0102 0001 63"), "20020001"),
    ("3.1 without id", bytes.fromhex("10 0e 0006 4d5149736470 03 02 0102 0000"), "20020002"),
    ("3.1.1 without id", bytes.fromhex("10 0c 0004 4d515454 04 00 000a 0000"), "20020002"),
    ("3.1.1 corrupt", bytes.fromhex("10 0d 0004 4d515454 04 03 000a 0001 63"), ""),
    ("5 corrupt", bytes.fromhex("10 0e 0004 4d515454 05 03 0000 00 0001 63"), "2003008100"),
    ("5 wrong property", bytes.fromhex("10 11 0004 4d515454 05 02 0000 03 210000 0001 63"), "2003008200"),
    ("not MQTT", b"GET / HTTP/1.1\r\n\r\n", ""),
]


@pytest.mark.parametrize("name, data, answer", FAILED, ids=[row[0] for row in FAILED])
def test_a_failed_connect_is_answered(name: str, data: bytes, answer: str) -> None:
    connection = server(State.START)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(data, 0.0)
    connection.fail(caught.value)
    assert connection.data_to_send().hex() == answer
    assert connection.state is State.CLOSED


def test_a_failure_before_mqtt_5_is_silent() -> None:
    connection = server(State.OPEN, V311)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(b"\0\0", 0.0)
    connection.fail(caught.value)
    assert connection.data_to_send() == b""


@pytest.mark.parametrize(
    "version, data",
    [(V5, "2003008700"), (V311, "20020005"), (Version.V31, "20020005"), (Version.MQIPDP, "20020003")],
)
def test_refused_clients(version: Version, data: str) -> None:
    connection = server(State.START)
    connection.receive_data(encode(Connect("c", version), version), 0.0)
    connection.send_connack(reason=ReasonCode.NOT_AUTHORIZED)
    assert connection.data_to_send().hex() == data
    assert connection.state is State.CLOSED
    link = client(State.CONNECTING, version)
    link.receive_data(bytes.fromhex(data), 0.0)
    assert link.state is State.CLOSED


def test_the_connack_announces_the_limits() -> None:
    connection = server(State.START, packet_bytes_max=1000, receive_max=20, topic_alias_max=3)
    connection.receive_data(encode(Connect("c", keep_alive=99), V5), 0.0)
    connection.send_connack(properties={P.SERVER_KEEP_ALIVE: 10, P.MAXIMUM_QOS: 1, P.RETAIN_AVAILABLE: 0})
    assert connection.keep_alive == 10
    link = ClientConnection(packet_bytes_max=1 << 20)
    link.connect(Connect("", keep_alive=99), 0.0)
    link.data_to_send()
    link.receive_data(connection.data_to_send(), 0.0)
    assert (link.peer_packet_bytes_max, link.peer_receive_max, link.keep_alive) == (1000, 20, 10)
    assert (link.max_qos, link.retain_available) == (1, False)


@pytest.mark.parametrize("reason, data", [(0, "2003009500"), (0x87, "2003008700")])
def test_a_client_that_takes_too_little_is_refused(reason: int, data: str) -> None:
    connection = server(State.START)
    connection.receive_data(encode(Connect("", properties={P.MAXIMUM_PACKET_SIZE: 8}), V5), 0.0)
    connection.send_connack(reason=reason, properties={P.REASON_STRING: "a long explanation"})
    assert connection.data_to_send().hex() == data
    assert connection.state is State.CLOSED


def test_keep_alive_of_the_server() -> None:
    connection = server(State.START)
    connection.receive_data(encode(Connect("c", keep_alive=10), V5), 100.0)
    connection.send_connack()
    assert connection.deadline() == 115.0
    assert not connection.timed_out(114.9)
    assert connection.timed_out(115.0)
    connection.receive_data(encode(Pingreq(), V5), 110.0)
    assert connection.deadline() == 125.0
    assert server(State.OPEN).deadline() == float("inf")


def test_keep_alive_of_the_client() -> None:
    link = client(State.OPEN)  # keep-alive 10 s, connected at 0
    assert link.ping_at() == 5.0
    link.send_pingreq(5.0)
    assert link.ping_at() == float("inf")
    assert link.deadline() == 15.0
    link.receive_data(encode(Pingresp(), V5), 6.0)
    assert link.ping_at() == 10.0
    assert link.deadline() == 21.0
    assert not link.timed_out(20.9)


def test_what_the_peer_does_not_take_is_not_said() -> None:
    connection = small_client(20)
    rows = [(0, b"t", 0, b"", b"x" * size) for size in (14, 15, 0)]  # 20, 21 and 6 bytes
    assert list(connection.publish_many(rows)) == [1]
    assert len(connection.data_to_send()) == 26
    assert connection.sent[PacketType.PUBLISH] == 2
    assert not connection.publish(b"t", b"x" * 15)
    assert connection.data_to_send() == b""


def test_texts_are_left_out_when_they_are_too_long_or_not_wanted() -> None:
    connection = small_client(20)
    connection.send_ack(PacketType.PUBACK, 1, 0x97, "x" * 30)
    assert connection.data_to_send().hex() == "4003000197"
    connection.send_ack(PacketType.PUBACK, 1, 0x97, "why")
    assert connection.data_to_send().endswith(b"why")
    connection.send_disconnect(0x97, reference="x" * 30)
    assert connection.data_to_send().hex() == "e00197"
    connection = small_client(200, REQUEST_PROBLEM_INFORMATION=0)
    connection.send_ack(PacketType.PUBACK, 1, 0x97, "why")
    assert connection.data_to_send().hex() == "4003000197"


def test_what_must_not_be_said() -> None:
    calls: list[Any] = [
        lambda: server(State.START).send_connack(),
        lambda: server(State.OPEN).send_connack(),
        lambda: server(State.CONNECTING).publish(b"t", b""),
        lambda: server(State.CLOSED).acknowledge(PacketType.PUBACK, [1]),
        lambda: server(State.OPEN).publish(b"t", b"", 1),
        lambda: server(State.OPEN, V311).send_ack(PacketType.PUBACK, 1, 0x87),
        lambda: server(State.OPEN).send_ack(PacketType.PUBACK, 1, 0x92),
        lambda: server(State.OPEN).send_unsuback(1),
        lambda: client(State.OPEN).connect(Connect("c"), 0.0),
        lambda: client(State.CONNECTING).publish(b"t", b""),
        lambda: client(State.OPEN).subscribe(1, []),
        lambda: client(State.OPEN).unsubscribe(1, []),
        lambda: client(State.START).send_pingreq(0.0),
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError):
            call()


WRONG: list[tuple[str, ServerConnection | ClientConnection, Packet]] = [
    ("auth with another method", server(State.OPEN), Auth(0x19, {P.AUTHENTICATION_METHOD: "n"})),
    ("success from a client", server(State.OPEN), Auth(0, METHOD)),
    ("re-authentication too early", server(State.AUTHENTICATING), Auth(0x19, METHOD)),
    ("auth without a method", small_client(100), Auth(0x19, METHOD)),
    ("session prolonged", server(State.OPEN), Disconnect(0, {P.SESSION_EXPIRY_INTERVAL: 1})),
    ("reference from a client", server(State.OPEN), Disconnect(0x9C, {P.SERVER_REFERENCE: "s"})),
    ("server sets session expiry", client(State.OPEN), Disconnect(0x8B, {P.SESSION_EXPIRY_INTERVAL: 1})),
    ("server disconnects before 5", client(State.OPEN, V311), Disconnect()),
]


@pytest.mark.parametrize("name, connection, packet", WRONG, ids=[row[0] for row in WRONG])
def test_wrong_in_this_place(name: str, connection: Connection, packet: Packet) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(encode(packet, connection.version), 0.0)
    assert caught.value.reason == ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize("step", [1, 3, 1_000])
@pytest.mark.parametrize(
    "version, name, answer",
    [
        (5, b"MQTT", bytes.fromhex("20 03 00 95 00")),
        (4, b"MQTT", b""),
        (3, b"MQIsdp", b""),
        (9, b"MQTT", bytes.fromhex("20 02 00 01")),
        (5, b"MQTT" * 100, b""),
    ],
)
def test_a_connect_that_is_too_large_is_answered_in_its_version(
    version: int, name: bytes, answer: bytes, step: int
) -> None:
    connection = ServerConnection(packet_bytes_max=1 << 20, connect_bytes_max=300)
    data = b"\x10\xff\xff\x03" + len(name).to_bytes(2, "big") + name + bytes((version, 2, 0, 60))
    fault = None
    for at in range(0, len(data), step):
        try:
            connection.receive_data(data[at : at + step], 0.0)
        except RemoteProtocolError as error:
            fault = error
            break
    assert fault is not None
    connection.fail(fault)
    assert connection.data_to_send() == answer


def test_a_large_connect_that_is_legal_is_taken() -> None:
    """A will and a password of 64 KiB each."""
    connection = ServerConnection(packet_bytes_max=1 << 20)
    large = bytes(65_535)
    body = b"\0\4MQTT\5\xc6\0\x3c\0\0\1c\0\0\1t\xff\xff" + large + b"\0\1u" + b"\xff\xff" + large
    length = len(body)
    head = bytes((0x10, length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14))
    (packet,) = connection.receive_data(head + body, 0.0)
    assert isinstance(packet, Connect)

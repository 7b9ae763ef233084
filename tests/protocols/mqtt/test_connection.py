"""The two machines: their tables of states, their limits, and one wired to the other in memory."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.client import CLIENT, ClientConnection
from gateway.protocols.mqtt.connection import Connection, State
from gateway.protocols.mqtt.data_types import encode_varint
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
)
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.server import SERVER, ServerConnection
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.protocols.mqtt.spec import Property as P
from gateway.protocols.mqtt.writers import encode
from tests.protocols.mqtt.machines import METHOD, client, exchange, server, waits

V5, V311 = Version.V5, Version.V311

EXAMPLES: dict[PacketType, Packet] = {
    PacketType.CONNECT: Connect("c", properties=METHOD),
    PacketType.CONNACK: Connack(),
    PacketType.PUBLISH: Publish("t"),
    PacketType.PUBACK: Ack(PacketType.PUBACK, 1),
    PacketType.PUBREC: Ack(PacketType.PUBREC, 1),
    PacketType.PUBREL: Ack(PacketType.PUBREL, 1),
    PacketType.PUBCOMP: Ack(PacketType.PUBCOMP, 1),
    PacketType.SUBSCRIBE: Subscribe(1, (Subscription("t"),)),
    PacketType.SUBACK: Suback(1, (0,)),
    PacketType.UNSUBSCRIBE: Unsubscribe(1, ("t",)),
    PacketType.UNSUBACK: Unsuback(1, (0,)),
    PacketType.PINGREQ: Pingreq(),
    PacketType.PINGRESP: Pingresp(),
    PacketType.DISCONNECT: Disconnect(),
    PacketType.AUTH: Auth(0x18, METHOD),
}


@pytest.mark.parametrize("kind", PacketType)
@pytest.mark.parametrize("state", [State.START, State.AUTHENTICATING, State.OPEN])
def test_the_table_of_the_server(state: State, kind: PacketType) -> None:
    connection = server(state)
    data = encode(EXAMPLES[kind], V5)
    if (state, kind) not in SERVER:
        with pytest.raises(RemoteProtocolError) as caught:
            connection.receive_data(data[:1], 0.0)  # the first byte is enough
        assert caught.value.reason == ReasonCode.PROTOCOL_ERROR
        assert connection.state is State.CLOSED
        return
    assert len(connection.receive_data(data, 0.0)) == 1
    expected = State.AUTHENTICATING if kind is PacketType.CONNECT else SERVER[state, kind]
    assert connection.state is expected


@pytest.mark.parametrize("kind", PacketType)
@pytest.mark.parametrize("state", [State.CONNECTING, State.OPEN])
def test_the_table_of_the_client(state: State, kind: PacketType) -> None:
    connection = client(state)
    data = encode(EXAMPLES[kind], V5)
    if (state, kind) not in CLIENT:
        with pytest.raises(RemoteProtocolError) as caught:
            connection.receive_data(data[:1], 0.0)
        assert caught.value.reason == ReasonCode.PROTOCOL_ERROR
        return
    assert len(connection.receive_data(data, 0.0)) == 1
    assert connection.state is CLIENT[state, kind]


@pytest.mark.parametrize("connection", [server(State.CLOSED), client(State.CLOSED)])
def test_a_closed_connection_ignores_what_comes(connection: Connection) -> None:
    assert connection.receive_data(b"\xff\xff\xff\xff\xff", 0.0) == []
    assert not waits(connection)


@pytest.mark.parametrize("version", Version)
def test_a_whole_life(version: Version) -> None:
    here = ClientConnection(packet_bytes_max=1 << 20)
    there = ServerConnection(packet_bytes_max=1 << 20)
    connect = Connect("c", version, keep_alive=10)
    here.connect(connect, 0.0)
    assert exchange(here, there) == ([], [connect])
    there.send_connack(session_present=version >= V311)
    ours, _ = exchange(here, there)
    assert isinstance(ours[0], Connack)
    assert (ours[0].session_present, ours[0].reason) == (version >= V311, 0)
    assert {here.state, there.state} == {State.OPEN}
    assert here.subscribe(1, [Subscription("a/#", 2)])
    _, theirs = exchange(here, there)
    assert theirs == [Subscribe(1, (Subscription("a/#", 2),))]
    there.send_suback(1, [2])
    there.publish(b"a/b", b"zero")
    there.publish(b"a/b", b"one", 1, True, False, 258)
    there.publish(b"a/c", b"two", 2, False, True, 3)
    ours, _ = exchange(here, there)
    rows = [(0, b"a/b", 0, b"", b"zero"), (3, b"a/b", 258, b"", b"one"), (12, b"a/c", 3, b"", b"two")]
    assert ours == [Suback(1, (2,)), Publishes(rows)]
    here.acknowledge(PacketType.PUBACK, [258])
    here.acknowledge(PacketType.PUBREC, [3])
    assert exchange(here, there)[1] == [
        Acks(PacketType.PUBACK, [(258, 0)]),
        Acks(PacketType.PUBREC, [(3, 0)]),
    ]
    there.send_ack(PacketType.PUBREL, 3)
    assert exchange(here, there)[0] == [Acks(PacketType.PUBREL, [(3, 0)])]
    here.send_ack(PacketType.PUBCOMP, 3)
    here.unsubscribe(2, ["a/#"])
    assert exchange(here, there)[1] == [Acks(PacketType.PUBCOMP, [(3, 0)]), Unsubscribe(2, ("a/#",))]
    there.send_unsuback(2, [0])
    here.send_pingreq(5.0)
    ours, theirs = exchange(here, there)
    assert theirs == [Pingreq()]
    assert ours == [Unsuback(2, (0,) if version is V5 else ()), Pingresp()]
    here.disconnect()
    assert exchange(here, there)[1] == [Disconnect()]
    assert {here.state, there.state} == {State.CLOSED}
    assert here.sent == there.received
    assert there.sent == here.received


def test_pings_are_answered_behind_what_is_said_in_the_meantime() -> None:
    pings = encode(Pingreq(), V5) * 2
    connection = server(State.OPEN)
    connection.receive_data(pings, 0.0)
    connection.send_suback(1, [0])
    assert connection.data_to_send().hex() == "9004000100" + "00" + "d000d000"
    connection.receive_data(pings, 0.0)
    connection.send_disconnect()
    assert connection.data_to_send().hex() == "d000d000e0018b", "nothing comes behind a DISCONNECT"
    connection = server(State.OPEN)
    connection.receive_data(pings, 0.0)
    with pytest.raises(RemoteProtocolError) as raised:
        connection.receive_data(b"\x00\x00", 0.0)
    connection.fail(raised.value)
    assert connection.data_to_send().startswith(b"\xd0\x00\xd0\x00\xe0")


def test_what_is_pipelined_waits_for_the_connack() -> None:
    connection = server(State.START)
    connect = Connect("c", V311)
    wire = encode(connect, V311) + encode(Publish("t"), V311) + encode(Pingreq(), V311)
    assert connection.receive_data(wire[:-1], 0.0) == [connect]
    assert not waits(connection)
    assert connection.receive_data(wire[-1:], 0.0) == []
    assert connection.receive_data(b"", 0.0) == []
    connection.send_connack()
    assert waits(connection)
    assert connection.receive_data(b"", 0.0) == [Publishes([(0, b"t", 0, b"", b"")]), Pingreq()]
    assert connection.data_to_send().hex() == "20020000d000"
    assert not waits(connection)


def test_not_too_much_waits_for_the_connack() -> None:
    connection = server(State.START)
    connection.receive_data(encode(Connect("c"), V5), 0.0)
    for _ in range(4):
        assert connection.receive_data(bytes(65_536), 0.0) == []
        assert not waits(connection)
    assert connection.receive_data(b"x", 0.0) == []
    assert waits(connection)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(b"", 0.0)
    connection.fail(caught.value)
    assert connection.data_to_send() == encode(Connack(reason=ReasonCode.QUOTA_EXCEEDED), V5)


def test_events_before_a_fault_are_not_lost() -> None:
    connection = server(State.OPEN)
    wire = encode(Publish("t"), V5) + encode(Ack(PacketType.PUBACK, 1), V5) + b"\0\0"
    assert connection.receive_data(wire, 0.0) == [
        Publishes([(0, b"t", 0, b"", b"")]),
        Acks(PacketType.PUBACK, [(1, 0)]),
    ]
    assert waits(connection)
    assert connection.state is State.CLOSED
    with pytest.raises(RemoteProtocolError):
        connection.receive_data(b"", 0.0)
    assert not waits(connection)
    assert connection.receive_data(b"\0", 0.0) == []


def test_runs() -> None:
    """One event per run; an acknowledgement with a reason does not break its run."""
    connection = server(State.OPEN)
    acks = [Ack(PacketType.PUBACK, 1), Ack(PacketType.PUBACK, 2, 0x10), Ack(PacketType.PUBACK, 3)]
    packets: list[Packet] = [Publish("a"), Publish("b"), *acks, Ack(PacketType.PUBREC, 4), Publish("c")]
    wire = b"".join(encode(packet, V5) for packet in packets)
    assert connection.receive_data(wire, 0.0) == [
        Publishes([(0, b"a", 0, b"", b""), (0, b"b", 0, b"", b"")]),
        Acks(PacketType.PUBACK, [(1, 0), (2, 0x10), (3, 0)]),
        Acks(PacketType.PUBREC, [(4, 0)]),
        Publishes([(0, b"c", 0, b"", b"")]),
    ]


def published(*packets: Publish) -> bytes:
    return b"".join(encode(packet, V5) for packet in packets)


def test_topic_aliases() -> None:
    connection = server(State.OPEN, topic_alias_max=2)
    properties = {P.CONTENT_TYPE: "x", P.TOPIC_ALIAS: 2, P.USER_PROPERTY: (("a", "1"),)}
    wire = published(
        Publish("long/name", b"1", properties=properties),
        Publish("", b"2", properties={P.TOPIC_ALIAS: 2}),
        Publish("other", b"3", properties={P.TOPIC_ALIAS: 2}),
        Publish("", b"4", 1, packet_id=9, properties=properties),
    )
    bare = encode_list({P.CONTENT_TYPE: "x", P.USER_PROPERTY: (("a", "1"),)}, PacketType.PUBLISH)
    assert connection.receive_data(wire, 0.0) == [
        Publishes(
            [
                (0, b"long/name", 0, bare, b"1"),
                (0, b"long/name", 0, b"", b"2"),
                (0, b"other", 0, b"", b"3"),
                (2, b"other", 9, bare, b"4"),
            ]
        )
    ]


@pytest.mark.parametrize(
    "properties", [b"", b"\x26\x00\x01a\x00\x77" + bytes(119), b"\x26\x00\x01a\x00\x78" + bytes(120)]
)
@pytest.mark.parametrize("topic", [b"a", b"ab", b"a/b", b"a/bc", b"long/topic"])
def test_an_alias_makes_no_packet_larger(topic: bytes, properties: bytes) -> None:
    """A message that has exactly the client's Maximum Packet Size would not be sent."""
    connection = ServerConnection(packet_bytes_max=1 << 20, topic_alias_max=2)
    allowed = {P.TOPIC_ALIAS_MAXIMUM: 2, P.MAXIMUM_PACKET_SIZE: 500}
    connection.receive_data(encode(Connect("c", V5, properties=allowed), V5), 0.0)
    connection.send_connack()
    assert not connection.publish_many(connection.aliased([(0, topic, 0, properties, b"first")]))
    connection.data_to_send()
    sizes = len(encode_varint(len(properties))) + len(properties)
    body = bytes(500 - 1 - 2 - 2 - len(topic) - sizes)
    rows = [(0, topic, 0, properties, body)]
    assert not connection.publish_many(rows), "it fits"
    assert not connection.publish_many(connection.aliased(rows))


REFUSED: list[tuple[str, int, bytes, int]] = [
    ("alias over the limit", 2, published(Publish("t", properties={P.TOPIC_ALIAS: 3})), 0x94),
    ("alias when none is allowed", 0, published(Publish("t", properties={P.TOPIC_ALIAS: 1})), 0x94),
    ("alias that stands for nothing", 2, published(Publish("", properties={P.TOPIC_ALIAS: 1})), 0x82),
    ("no topic, other properties", 2, bytes.fromhex("30 05 0000 02 0101"), 0x82),
    ("properties end late", 2, bytes.fromhex("30 05 0001 74 05 01"), 0x81),
    ("properties end beyond the stream", 2, bytes.fromhex("30 05 0001 74 ff ff"), 0x81),
    ("property length is cut", 2, bytes.fromhex("30 04 0001 74 ff"), 0x81),
    ("topic ends late", 2, bytes.fromhex("30 03 0002 74"), 0x81),
    ("no packet id", 2, bytes.fromhex("32 03 0001 74"), 0x81),
    ("half a packet id", 2, bytes.fromhex("32 04 0001 74 01"), 0x81),
    ("no property length", 2, bytes.fromhex("32 05 0001 74 0001"), 0x81),
    ("nothing", 2, bytes.fromhex("30 00"), 0x81),
    ("QoS 3", 2, bytes.fromhex("36 06 0001 74 0001 00"), 0x81),
    ("DUP at QoS 0", 2, bytes.fromhex("38 04 0001 74 00"), 0x81),
    ("packet id 0", 2, bytes.fromhex("32 06 0001 74 0000 00"), 0x82),
    ("twice the same property", 2, bytes.fromhex("30 08 0001 74 04 0101 0101"), 0x82),
    ("ack of id 0", 2, bytes.fromhex("40 02 0000"), 0x82),
    ("ack with flags", 2, bytes.fromhex("41 02 0001"), 0x81),
]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name, alias_max, data, reason", REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_on_the_fast_path(name: str, alias_max: int, data: bytes, reason: int, alone: bool) -> None:
    connection = server(State.OPEN, topic_alias_max=alias_max)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(data if alone else data + bytes(40), 0.0)
    assert caught.value.reason == reason
    connection.fail(caught.value)
    answer = connection.data_to_send()
    assert answer[0] == 0xE0
    assert answer[2] == reason
    connection.fail(caught.value)
    connection.send_disconnect()
    assert connection.data_to_send() == b""


def test_enhanced_authentication() -> None:
    here = ClientConnection(packet_bytes_max=1 << 20)
    there = ServerConnection(packet_bytes_max=1 << 20)
    here.connect(Connect("c", properties=METHOD), 0.0)
    exchange(here, there)
    assert {there.state} == {State.AUTHENTICATING}
    there.send_auth(Auth(0x18, METHOD))
    assert exchange(here, there)[0] == [Auth(0x18, METHOD)]
    here.send_auth(Auth(0x18, {**METHOD, P.AUTHENTICATION_DATA: b"x"}))
    assert exchange(here, there)[1] == [Auth(0x18, {**METHOD, P.AUTHENTICATION_DATA: b"x"})]
    there.send_connack(properties=METHOD)
    exchange(here, there)
    assert {here.state, there.state} == {State.OPEN}
    here.send_auth(Auth(0x19, METHOD))
    assert exchange(here, there)[1] == [Auth(0x19, METHOD)]


@pytest.mark.parametrize(
    "byte_order, data", [("auto", "40020201"), ("little", "40020201"), ("big", "40020102")]
)
def test_the_little_endian_dialect(byte_order: Any, data: str) -> None:
    connection = server(State.OPEN, Version.MQIPDP, byte_order=byte_order)
    connection.acknowledge(PacketType.PUBACK, [258])
    wire = connection.data_to_send()
    assert wire.hex() == data
    assert connection.receive_data(wire, 0.0) == [Acks(PacketType.PUBACK, [(258, 0)])]
    assert connection.publish(b"t", b"x", 1, False, False, 258)
    assert connection.data_to_send() == encode(
        Publish("t", b"x", 1, packet_id=258), Version.MQIPDP, byte_order
    )


def test_connections_may_count_together() -> None:
    """What others have said says nothing about this one."""
    first, second, third = server(State.OPEN), server(State.OPEN), server(State.START)
    for connection in (second, third):
        connection.received, connection.sent = first.received, first.sent
    fault = RemoteProtocolError("a fault", reason=ReasonCode.PROTOCOL_ERROR)
    for connection in (first, second):
        connection.fail(fault)
        assert connection.data_to_send()[0] >> 4 == PacketType.DISCONNECT
        connection.fail(fault)
        assert not connection.data_to_send()
    with pytest.raises(RemoteProtocolError) as caught:
        third.receive_data(bytes.fromhex("10 0d 0004 4d515454 06 02 000a 0001 63"), 0.0)
    third.fail(caught.value)
    assert third.data_to_send()[0] >> 4 == PacketType.CONNACK
    assert first.sent[PacketType.DISCONNECT] == 2


STRANGE: list[tuple[PacketType, int]] = [
    *((PacketType.PUBACK, reason) for reason in (0x01, 0x82, 0x8E, 0x92, 0x95, 0xA2, 0xFF)),
    *((PacketType.PUBREC, reason) for reason in (0x02, 0x82, 0x8E, 0x92, 0x95, 0xA2, 0xFF)),
    (PacketType.PUBREL, 0x10),
    (PacketType.PUBCOMP, 0x80),
]


@pytest.mark.parametrize("properties", [b"", b"\0"])
@pytest.mark.parametrize("kind, reason", STRANGE)
def test_a_client_acknowledges_with_a_reason_of_the_packet(
    kind: PacketType, reason: int, properties: bytes
) -> None:
    """[MQTT-3.4.2-1]"""
    connection = server(State.OPEN)
    first = kind << 4 | (2 if kind is PacketType.PUBREL else 0)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(bytes((first, 3 + len(properties), 0, 1, reason)) + properties, 0.0)
    assert caught.value.reason == ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize("reason", [0x88, 0x89, 0x95, 0x96])
def test_a_broker_may_refuse_a_message_for_a_reason_of_another_packet(reason: int) -> None:
    """Mosquitto does: a refusal that is understood is worth more than the connection."""
    connection = client(State.OPEN)
    assert len(connection.receive_data(bytes((0x40, 3, 0, 1, reason)), 0.0)) == 1


@pytest.mark.parametrize("reason", [0x88, 0x84, 0x91, 0xFF])
def test_a_disconnect_may_have_a_reason_of_another_packet_only_from_a_broker(reason: int) -> None:
    """[MQTT-3.14.2-1]: the connection ends anyway, and why is worth knowing."""
    disconnect = bytes((0xE0, 1, reason))
    assert client(State.OPEN).receive_data(disconnect, 0.0) == [Disconnect(reason)]
    with pytest.raises(RemoteProtocolError) as caught:
        server(State.OPEN).receive_data(disconnect, 0.0)
    assert caught.value.reason == ReasonCode.PROTOCOL_ERROR

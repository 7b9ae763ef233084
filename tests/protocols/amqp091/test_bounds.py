"""What one client can cause at once is bounded: frames of a call, fields of a table, bytes of properties."""

from __future__ import annotations

import pytest

from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.spooled_bodies import join_pieces
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    encode_basic_properties,
    encode_content_frames,
    encode_method_frame,
)
from gateway.protocols.amqp091.connection import STEPS_MAX
from gateway.protocols.amqp091.server import ServerConnection
from gateway.protocols.amqp091.spec import HEARTBEAT_FRAME, ReplyCode
from tests.protocols.amqp091.wires import open_wire

READ = 65_536
VOID = Value(ValueType.VOID, None)
PUBLISH = encode_method_frame(1, m.BasicPublish("ex", "key"))


def message(headers: Headers, body: bytes = b"x") -> bytes:
    properties = encode_basic_properties(BasicProperties(headers=headers))
    return PUBLISH + join_pieces(encode_content_frames(1, properties, body, 131_072))


def fields(count: int, name: str = "") -> Headers:
    return tuple((f"{name}{at}", VOID) for at in range(count))


FLOODS = {
    "heartbeats": HEARTBEAT_FRAME,
    "channels": encode_method_frame(2, m.ChannelOpen()) + encode_method_frame(2, m.ChannelClose()),
    "gets": encode_method_frame(1, m.BasicGet("q")),
    "transactions": encode_method_frame(1, m.TxSelect()),
    "bodies of one byte": b"\3\0\1\0\0\0\1x\xce",
    "header tables": b"".join(message(fields(200, str(at))) for at in range(20)),
}


def calls(server: ServerConnection, data: bytes) -> list[list[e.Event]]:
    found = [server.receive_data(data, 1.0)]
    while server.unread:
        found.append(server.receive_data(b"", 1.0))
    return found


@pytest.mark.parametrize("name", FLOODS)
def test_one_call_does_only_so_much_and_nothing_is_lost(name: str) -> None:
    server = open_wire().server
    before = sum(server.received.values())
    packet = FLOODS[name]
    data = packet * (READ // len(packet))
    if name.startswith("bodies"):
        head = PUBLISH + b"".join(encode_content_frames(1, b"\0\0", b"", 4096))
        data = head.replace(bytes(8) + b"\0\0\xce", (1 << 20).to_bytes(8, "big") + b"\0\0\xce") + data
    most = counted = 0
    data_now = data
    while True:
        server.receive_data(data_now, 1.0)
        data_now = b""
        most = max(most, sum(server.received.values()) - before - counted)
        counted = sum(server.received.values()) - before
        if not server.unread:
            break
    assert most <= STEPS_MAX + 3
    assert counted == frames_of(data)
    assert server.received["connection.close"] == 0


def frames_of(data: bytes) -> int:
    at = count = 0
    while at < len(data):
        at += int.from_bytes(data[at + 3 : at + 7], "big") + 8
        count += 1
    return count


def test_usual_messages_are_all_taken_by_one_call() -> None:
    server = open_wire().server
    packet = message((("h", string("v")),), bytes(100))
    assert len(calls(server, packet * (READ // len(packet)))) == 1


def test_how_the_stream_is_split_and_the_work_divided_changes_nothing() -> None:
    data = b"".join(FLOODS[name] * 20 for name in FLOODS if not name.startswith("bodies"))
    whole, apart = open_wire().server, open_wire().server
    all_at_once = [event for events in calls(whole, data) for event in events]
    in_pieces: list[e.Event] = []
    for at in range(0, len(data), 1_000):
        for events in calls(apart, data[at : at + 1_000]):
            in_pieces += events
    assert flat(all_at_once) == flat(in_pieces)
    assert whole.received == apart.received


def flat(events: list[e.Event]) -> list[object]:
    return [row for event in events for row in (getattr(event, "contents", None) or [event])]


@pytest.mark.parametrize("nested", [False, True])
def test_a_message_with_more_headers_than_we_take_costs_its_channel(nested: bool) -> None:
    for count, taken in ((50, True), (51, False)):
        server = open_wire(properties_max=50).server
        headers = fields(count)
        if nested:
            headers = (("t", Value(ValueType.TABLE, fields(count - 2))), ("a", VOID))
        [event] = server.receive_data(message(headers), 0.0)
        if taken:
            assert isinstance(event, e.Publishes)
        else:
            assert isinstance(event, e.ChannelClosed)
            assert event.reply_code == ReplyCode.PRECONDITION_FAILED
        assert not server.closed


def test_an_array_counts_as_its_values() -> None:
    server = open_wire(properties_max=50).server
    headers: Headers = (("a", Value(ValueType.ARRAY, (VOID,) * 50)),)
    [event] = server.receive_data(message(headers), 0.0)
    assert isinstance(event, e.ChannelClosed)


def test_a_message_with_longer_properties_than_we_take_costs_its_channel() -> None:
    for size, taken in ((500, True), (1_100, False)):
        server = open_wire(properties_bytes_max=1_000).server
        [event] = server.receive_data(message((("h", string("v" * size)),)), 0.0)
        assert isinstance(event, e.Publishes if taken else e.ChannelClosed)


def test_a_method_whose_table_has_too_many_fields_costs_the_connection() -> None:
    for count, taken in ((50, True), (51, False)):
        server = open_wire(properties_max=50).server
        [event] = server.receive_data(
            encode_method_frame(1, m.QueueDeclare("q", arguments=fields(count))), 0.0
        )
        assert isinstance(event, e.MethodReceived if taken else e.Closed)


def test_a_large_frame_in_single_bytes_is_gathered_and_not_copied_each_time() -> None:
    server = open_wire().server
    data = message((), bytes(100_000))
    server.receive_data(data[:1_000], 0.0)
    server.receive_data(data[1_000:1_001], 0.0)
    gathered = server._rest
    for at in range(1_001, 5_000):
        assert server.receive_data(data[at : at + 1], 0.0) == []
    assert server._rest is gathered
    [event] = server.receive_data(data[5_000:], 0.0)
    assert isinstance(event, e.Publishes)
    assert event.contents[0][3] == bytes(100_000)

"""Messages, channels, faults and closing, the two state machines wired together or fed by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from errno import EMFILE
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.address import Address
from gateway.model.properties import string
from gateway.model.spooled_bodies import Spooled, join_pieces
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_publish,
    encode_basic_properties,
    encode_content_frames,
    encode_frame,
    encode_method,
    encode_method_frame,
)
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.sender import Deliverer, Publisher
from gateway.protocols.amqp091.server import ServerConnection
from gateway.protocols.amqp091.spec import HEARTBEAT_FRAME, ReplyCode
from tests.protocols.amqp091.wires import Wire, bytes_apart, heard, new_client, open_wire

RAW = bytes.fromhex("1000 02")
KEY = amqp_address("ex", "a.b")
OTHER = amqp_address("", "queue")


def publish_bytes(
    channel: int, address: Address, body: bytes, raw: bytes = RAW, frame_max: int = 131_072
) -> bytes:
    method = encode_method_frame(channel, m.BasicPublish(address.scope, address.name))
    return method + join_pieces(encode_content_frames(channel, raw, body, frame_max))


def arguments(address: Address) -> bytes:
    return encode_method(m.BasicPublish(address.scope, address.name))[4:]


def test_channels_open_and_close() -> None:
    wire = open_wire(3)
    wire.client.close_channel(2)
    wire.move()
    assert wire.take() == ([e.ChannelClosed(2, 200, "", 0, 0, by_peer=True)], [])
    assert wire.server.channels == wire.client.channels == [1, 3]
    assert wire.client.open_channel() == 2
    wire.move()
    assert wire.take() == ([e.ChannelOpened(2)], [e.ChannelOpened(2)])


def test_channel_max() -> None:
    wire = open_wire(2, channel_max=2)
    with pytest.raises(LocalProtocolError):
        wire.client.open_channel()
    (event,) = wire.server.receive_data(encode_method_frame(3, m.ChannelOpen()), 0)
    assert isinstance(event, e.Closed)
    assert event.reply_code == ReplyCode.NOT_ALLOWED


def test_the_server_closes_a_channel_and_discards() -> None:
    wire = open_wire(2)
    publisher = Publisher(wire.client, 1)
    wire.server.close_channel(1, 404, "no exchange 'x'" + "\u00e9" * 200, 60, 40)
    wire.server.send_method(1, m.QueueDeclareOk())
    publisher.publish_many([(KEY.wire, RAW, b"lost")])
    wire.client.send_method(1, m.QueueDeclare())
    wire.client.send_method(2, m.QueueDeclare())
    wire.move()
    (declare,), (closed,) = wire.take()
    assert declare == e.MethodReceived(2, m.QueueDeclare())
    assert isinstance(closed, e.ChannelClosed)
    assert (closed.channel, closed.reply_code, closed.class_id, closed.method_id, closed.by_peer) == (
        1,
        404,
        60,
        40,
        True,
    )
    assert len(closed.text.encode()) == 255
    assert not publisher.usable
    assert publisher.publish_many([(KEY.wire, RAW, b"lost")]) == []
    wire.client.ack(1, 1)
    assert wire.client.data_to_send() == b""
    assert wire.client.open_channel() == 1
    wire.move()
    assert wire.take() == ([e.ChannelOpened(1)], [e.ChannelOpened(1)])


def test_both_close_a_channel_at_once() -> None:
    wire = open_wire()
    wire.server.close_channel(1, 406, "")
    wire.client.close_channel(1)
    wire.move()
    assert wire.take() == ([], [])
    assert wire.client.open_channel() == 1
    wire.move()
    assert wire.take() == ([e.ChannelOpened(1)], [e.ChannelOpened(1)])


@pytest.mark.parametrize("client_first", [True, False])
def test_the_connection_closes(client_first: bool) -> None:
    wire = open_wire()
    first, other = (wire.client, wire.server) if client_first else (wire.server, wire.client)
    first.close(320, "bye")
    wire.move()
    events = wire.take()
    assert events[not client_first] == [] or events[client_first] == []
    assert [*events[0], *events[1]] == [e.Closed(320, "bye", 0, 0, by_peer=True)]
    assert first.closed
    assert other.closed
    assert wire.server.channels == []


def test_a_close_that_is_not_answered() -> None:
    wire = open_wire(heartbeat=0)
    assert wire.server.deadline() is None
    wire.server.receive_data(HEARTBEAT_FRAME, 100)
    wire.server.close(320, "bye")
    assert wire.server.deadline() == 110
    assert not wire.server.timed_out(109)
    assert wire.server.timed_out(110)
    assert (
        wire.server.receive_data(publish_bytes(1, KEY, b"x") + encode_method_frame(1, m.TxSelect()), 101)
        == []
    )
    assert wire.server.receive_data(encode_method_frame(0, m.ConnectionClose()), 101) == []
    assert wire.server.closed


def test_a_message_whose_body_cannot_be_read_costs_no_other() -> None:
    class Unreadable:
        def read(self, at: int, count: int) -> bytes:
            raise OSError(EMFILE, "too many open files")

    wire = open_wire(2)
    publisher = Publisher(wire.client, 2)
    large = Spooled(Unreadable(), 1_000_000)  # type: ignore[arg-type]
    rows = [(KEY.wire, RAW, b"one"), (KEY.wire, RAW, large), (KEY.wire, RAW, b"two")]
    assert publisher.publish_many(rows) == [1]
    assert "too many open files" in publisher.faults[1].why
    assert publisher.published == 2
    wire.move()
    (found,), _ = wire.take()
    assert isinstance(found, e.Publishes)
    assert [content[3] for content in found.contents] == [b"one", b"two"]


def test_publish_and_deliver() -> None:
    wire = open_wire(2)
    publisher = Publisher(wire.client, 2, mandatory=True)
    rows = [
        (KEY.wire, RAW, b"one"),
        (KEY.wire, RAW, b"two"),
        (OTHER.wire, b"\0\0", b""),
        (KEY.wire, RAW, b"three"),
    ]
    assert publisher.publish_many(rows) == []
    assert publisher.published == 4
    wire.client.send_method(2, m.BasicQos(prefetch_count=3))
    publisher.publish_many(rows[:1])
    wire.move()
    (first, qos, second), _ = wire.take()
    assert isinstance(first, e.Publishes)
    assert [(content[0], *content[2:]) for content in first.contents] == [(2, row[1], row[2]) for row in rows]
    assert decode_publish(first.contents[0][1]) == m.BasicPublish("ex", "a.b", mandatory=True)
    assert decode_publish(first.contents[2][1]) == m.BasicPublish("", "queue", mandatory=True)
    assert qos == e.MethodReceived(2, m.BasicQos(prefetch_count=3))
    assert isinstance(second, e.Publishes)
    assert wire.server.received["basic.publish"] == wire.server.received["header"] == 5
    assert wire.server.received["body"] == wire.client.sent["body"] == 4

    deliverer = Deliverer(wire.server, 2, "tag")
    again = [(True, *row) for row in rows]
    assert deliverer.deliver_many(7, again) == []
    assert deliverer.deliver_many(11, [(False, KEY.wire, RAW, b"last")]) == []
    wire.move()
    _, (deliveries,) = wire.take()
    assert isinstance(deliveries, e.Deliveries)
    expected = [(2, b"\x03tag", 7 + at, True, *row) for at, row in enumerate(rows)]
    assert deliveries.contents == [*expected, (2, b"\x03tag", 11, False, KEY.wire, RAW, b"last")]
    assert wire.client.received["basic.deliver"] == wire.server.sent["basic.deliver"] == 5


def test_acks_and_confirms() -> None:
    wire = open_wire(2)
    wire.client.ack(1, 1)
    wire.client.ack(2, 9, multiple=True)
    wire.client.nack(1, 2, requeue=True)
    wire.client.ack(1, 3)
    wire.server.ack(1, 4, multiple=True)
    wire.server.nack(1, 5)
    wire.server.ack(2, 1)
    wire.move()
    at_server, at_client = wire.take()
    nack = e.MethodReceived(1, m.BasicNack(2, False, True))
    assert at_server == [e.Acks([(1, 1, False), (2, 9, True)]), nack, e.Acks([(1, 3, False)])]
    assert at_client == [e.Confirms([(1, 4, True, True), (1, 5, False, False), (2, 1, False, True)])]
    assert (wire.client.received["basic.ack"], wire.client.received["basic.nack"]) == (2, 1)


def test_return_and_get() -> None:
    wire = open_wire()
    wire.server.send_content(1, m.BasicReturn(312, "NO_ROUTE", "ex", "a.b"), RAW, b"back")
    wire.server.ack(1, 1)
    wire.server.send_content(1, m.BasicGetOk(3, False, "", "q", 9), RAW, b"")
    wire.server.send_method(1, m.BasicCancel("tag", no_wait=True))
    wire.server.send_method(0, m.ConnectionBlocked("low"))
    wire.client.send_method(0, m.ConnectionUpdateSecret(b"new", "old"))
    wire.move()
    at_server, at_client = wire.take()
    assert at_client == [
        e.Returned(1, m.BasicReturn(312, "NO_ROUTE", "ex", "a.b"), RAW, b"back"),
        e.Confirms([(1, 1, False, True)]),
        e.GetResponse(1, m.BasicGetOk(3, False, "", "q", 9), RAW, b""),
        e.MethodReceived(1, m.BasicCancel("tag", no_wait=True)),
        e.MethodReceived(0, m.ConnectionBlocked("low")),
    ]
    assert at_server == [e.MethodReceived(0, m.ConnectionUpdateSecret(b"new", "old"))]


@pytest.mark.parametrize("size", [1, 4087, 4088, 4089, 8176, 30_000])
@pytest.mark.parametrize("split", [lambda data: [data], bytes_apart])
def test_bodies_of_many_frames(size: int, split: Callable[[bytes], list[bytes]]) -> None:
    wire = open_wire(frame_max=4096)
    body = bytes(range(256)) * 128
    Publisher(wire.client, 1).publish_many([(KEY.wire, RAW, body[:size]), (KEY.wire, RAW, b"next")])
    Deliverer(wire.server, 1, "").deliver_many(1, [(False, KEY.wire, RAW, body[:size])])
    wire.move(split)
    at_server, at_client = wire.take()
    contents = [
        content for event in at_server if isinstance(event, e.Publishes) for content in event.contents
    ]
    assert [content[3] for content in contents] == [body[:size], b"next"]
    (deliveries,) = at_client
    assert isinstance(deliveries, e.Deliveries)
    assert deliveries.contents == [(1, b"\0", 1, False, KEY.wire, RAW, body[:size])]
    assert wire.server.received["body"] == wire.client.sent["body"]
    assert wire.server._partial == wire.client._partial == 0


def test_interleaved_channels() -> None:
    wire = open_wire(2)
    one = publish_bytes(1, KEY, bytes(5000), frame_max=4096)
    two = publish_bytes(2, OTHER, b"two")
    cut = one.index(b"\x03\x00\x01")
    events = wire.server.receive_data(one[:cut] + two + HEARTBEAT_FRAME + two + one[cut:], 0)
    (publishes,) = events
    assert isinstance(publishes, e.Publishes)
    assert [(channel, len(body)) for channel, _, _, body in publishes.contents] == [(2, 3), (2, 3), (1, 5000)]


messages = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3]),
        st.sampled_from([KEY, OTHER]),
        st.sampled_from([RAW, b"\0\0"]),
        st.sampled_from([0, 1, 5, 4088, 9000]),
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=150)
@given(messages, st.lists(st.integers(1, 5000), max_size=40))
@example([(1, KEY, RAW, 0, False)], [22])
def test_the_split_never_changes_what_is_said(
    rows: list[tuple[int, Address, bytes, int, bool]], cuts: list[int]
) -> None:
    data = b""
    for channel, address, raw, size, ack in rows:
        data += publish_bytes(channel, address, bytes(size), raw, 4096)
        data += encode_method_frame(channel, m.BasicAck(size)) if ack else b""
    said = []
    for pieces in ([], cuts):
        wire = open_wire(3, frame_max=4096)
        at, events = 0, []
        for piece in [*pieces, len(data)]:
            events += wire.server.receive_data(data[at : at + piece], 0)
            at += piece
        flat: list[Any] = []
        for event in events:
            assert isinstance(event, e.Publishes | e.Acks)
            flat += event.contents if isinstance(event, e.Publishes) else event.acks
        said.append((flat, Counter(wire.server.received)))  # to which none is as good as no word of it
    assert said[0] == said[1]
    assert len(said[0][0]) == len(rows) + sum(row[-1] for row in rows)


HEADER = encode_frame(2, 1, bytes.fromhex("003c0000 0000000000000004 0000"))
PUBLISH = encode_method_frame(1, m.BasicPublish("e", "k"))
BODY = encode_frame(3, 1, b"1234")
ORDER_FAULTS = [
    (HEADER, 505),
    (BODY, 505),
    (PUBLISH + BODY, 505),
    (PUBLISH + PUBLISH, 505),
    (PUBLISH + encode_method_frame(1, m.TxSelect()), 505),
    (PUBLISH + encode_method_frame(1, m.BasicAck(1)), 505),
    (PUBLISH + HEADER + HEADER, 505),
    (PUBLISH + HEADER + BODY + BODY, 505),
    (PUBLISH + HEADER + encode_frame(3, 1, b"12345"), 501),
    (PUBLISH + HEADER + BODY[:-1] + b"\xcd", 501),
    (PUBLISH + HEADER + encode_frame(3, 9, b"1234"), 504),
    (PUBLISH + encode_frame(2, 9, HEADER[7:-1]) + BODY, 504),
    (PUBLISH + HEADER[:-1] + b"\xcd" + BODY, 501),
    (PUBLISH[:-1] + b"\xcd" + HEADER + BODY, 501),
    (PUBLISH + encode_frame(2, 1, bytes.fromhex("003d0000 0000000000000004 0000")) + BODY, 505),
    (PUBLISH + encode_frame(2, 1, bytes.fromhex("003c0001 0000000000000004 0000")) + BODY, 501),
    (PUBLISH + encode_frame(2, 1, bytes.fromhex("003c0000")) + BODY, 501),
    (PUBLISH + encode_frame(2, 1, bytes.fromhex("003c0000 0000000000000004")) + BODY, 501),
    (publish_bytes(0, KEY, b"x"), 504),
    (publish_bytes(9, KEY, b"x"), 504),
    (encode_method_frame(9, m.TxSelect()), 504),
    (encode_method_frame(9, m.ChannelCloseOk()), 504),
    (encode_method_frame(0, m.TxSelect()), 504),
    (encode_method_frame(1, m.ConnectionOpen()), 503),
    (encode_method_frame(1, m.BasicDeliver()), 503),
    (encode_frame(1, 1, bytes.fromhex("003c0028") + bytes(600)), 502),
    (encode_frame(1, 1, bytes.fromhex("003c0050") + bytes(8)), 501),
    (encode_frame(1, 1, b"\0"), 501),
    (encode_frame(1, 1, bytes.fromhex("00630063")), 501),
    (b"\x08\x00\x01\x00\x00\x00\x00\xce", 505),
    (b"\x05\x00\x01\x00\x00\x00\x00\xce", 501),
]


@pytest.mark.parametrize("data, code", ORDER_FAULTS)
@pytest.mark.parametrize("split", [lambda data: [data], bytes_apart])
def test_hard_faults(data: bytes, code: int, split: Callable[[bytes], list[bytes]]) -> None:
    wire = open_wire()
    good = publish_bytes(1, KEY, b"good")
    events = [event for piece in split(good + data + good) for event in heard(wire.server, piece)]
    first, *_, last = events
    assert isinstance(first, e.Publishes)
    assert first.contents[0] == (1, arguments(KEY), RAW, b"good")
    assert len([event for event in events if isinstance(event, e.Closed)]) == 1
    assert isinstance(last, e.Closed)
    assert (last.reply_code, last.by_peer) == (code, False)
    wire.to_client += wire.client.receive_data(wire.server.data_to_send(), 0)
    (seen,) = wire.to_client
    assert isinstance(seen, e.Closed)
    assert (seen.reply_code, seen.text, seen.by_peer) == (code, last.text, True)
    wire.server.receive_data(wire.client.data_to_send(), 0)
    assert wire.server.closed


def test_a_message_too_large_costs_the_channel() -> None:
    wire = open_wire(2, message_bytes_max=10_000)
    data = publish_bytes(1, KEY, bytes(10_001)) + publish_bytes(1, KEY, b"x") + publish_bytes(2, KEY, b"y")
    closed, publishes = wire.server.receive_data(data, 0)
    assert isinstance(closed, e.ChannelClosed)
    assert (closed.channel, closed.reply_code, closed.class_id, closed.method_id) == (1, 406, 60, 40)
    assert isinstance(publishes, e.Publishes)
    assert [content[0] for content in publishes.contents] == [2]
    assert wire.server._partial == 0


def test_unfinished_messages_are_limited() -> None:
    wire = open_wire(6, message_bytes_max=200_000)
    data = b""
    for channel in range(1, 7):
        frames = encode_content_frames(channel, RAW, bytes(200_000), 131_072)
        data += encode_method_frame(channel, m.BasicPublish()) + frames[0]
        data += encode_frame(3, channel, bytes(131_000)) + encode_frame(3, channel, bytes(68_999))
    (event,) = wire.server.receive_data(data, 0)
    assert isinstance(event, e.Closed)
    assert event.reply_code == ReplyCode.RESOURCE_ERROR
    assert wire.server._partial == 0


def test_properties_larger_than_a_frame_are_not_sent() -> None:
    wire = open_wire(frame_max=4096)
    huge = bytes(5000)
    publisher, deliverer = Publisher(wire.client, 1), Deliverer(wire.server, 1, "t")
    rows = [(KEY.wire, RAW, b"x"), (KEY.wire, huge, b"x"), (KEY.wire, RAW, b"x"), (KEY.wire, huge, b"x")]
    assert publisher.publish_many(rows) == [1, 3]
    assert publisher.published == 2
    assert deliverer.deliver_many(5, [(False, *row) for row in rows]) == [6, 8]
    wire.move()
    (publishes,), (deliveries,) = wire.take()
    assert isinstance(publishes, e.Publishes)
    assert len(publishes.contents) == 2
    assert isinstance(deliveries, e.Deliveries)
    assert [content[2] for content in deliveries.contents] == [5, 7]


def test_a_closed_channel_takes_no_message_with_the_same_beginning() -> None:
    wire = open_wire()
    wire.server.receive_data(publish_bytes(1, KEY, b"x") * 2, 0)
    wire.server.close_channel(1, 406)
    assert wire.server.receive_data(publish_bytes(1, KEY, b"x"), 0) == []


def test_channels_that_take_turns_share_what_is_equal_and_one_that_is_closed_takes_nothing() -> None:
    wire = open_wire(2)
    turns = publish_bytes(1, KEY, b"one") + publish_bytes(2, KEY, b"two")
    (publishes,) = wire.server.receive_data(turns * 3, 0)
    assert isinstance(publishes, e.Publishes)
    assert [(row[0], row[3]) for row in publishes.contents] == [(1, b"one"), (2, b"two")] * 3
    assert len({(id(row[1]), id(row[2])) for row in publishes.contents}) == 1
    wire.server.close_channel(1, 406)
    (publishes,) = wire.server.receive_data(turns * 2, 0)
    assert isinstance(publishes, e.Publishes)
    assert [row[0] for row in publishes.contents] == [2, 2]
    assert not [lead for lead in wire.server._leads.values() if lead.number == 1]


def test_large_properties_are_not_remembered_for_each_channel() -> None:
    wire = open_wire()
    raw = encode_basic_properties(BasicProperties(headers=(("long", string("x" * 1000)),)))
    (publishes,) = wire.server.receive_data(publish_bytes(1, KEY, b"x", raw) * 3, 0)
    assert isinstance(publishes, e.Publishes)
    assert [row[2] for row in publishes.contents] == [raw] * 3
    assert wire.server._leads == {}


def test_a_fault_that_the_application_finds() -> None:
    wire = open_wire()
    events: list[e.Event] = []
    wire.server.refuse(RemoteProtocolError("no", reason=406, class_id=60, method_id=40), 1, events)
    wire.server.refuse(RemoteProtocolError("bad", reason=502), 1, events)
    wire.server.refuse(RemoteProtocolError("again", reason=502), 1, events)
    assert events == [
        e.ChannelClosed(1, 406, "no", 60, 40, by_peer=False),
        e.Closed(502, "bad", 0, 0, by_peer=False),
    ]


def test_heartbeats() -> None:
    wire = open_wire(heartbeat=10)
    wire.server.data_to_send()
    server = wire.server
    assert server.deadline() == 5
    server.tick(4.9)
    assert server.data_to_send() == b""
    server.tick(5)
    assert server.data_to_send() == HEARTBEAT_FRAME
    server.tick(9.9)
    assert server.data_to_send() == b""
    server.tick(10)  # what was said last was a heartbeat, which counts for nothing
    assert server.data_to_send() == HEARTBEAT_FRAME
    server.send_method(1, m.BasicQosOk())
    server.data_to_send()
    server.tick(15)
    assert server.data_to_send() == HEARTBEAT_FRAME
    server.send_method(1, m.BasicQosOk())
    server.data_to_send()
    server.tick(16)  # so that was said in the second before
    server.tick(19)
    assert server.data_to_send() == b""
    assert not server.timed_out(19.9)
    assert server.deadline() == 20
    assert server.timed_out(20)
    assert server.receive_data(HEARTBEAT_FRAME, 19) == []
    assert server.received["heartbeat"] == 1
    assert not server.timed_out(38)
    assert server.timed_out(39)


LOCAL_FAULTS: list[Callable[[Wire], object]] = [
    lambda wire: wire.server.authenticated(),
    lambda wire: wire.server.secure(b""),
    lambda wire: wire.client.secure_ok(b""),
    lambda wire: wire.server.send_method(1, m.BasicDeliver()),
    lambda wire: wire.server.send_content(1, m.BasicAck(), RAW, b""),
    lambda wire: Deliverer(wire.server, 9, "t"),
    lambda wire: Publisher(wire.client, 9),
    lambda wire: Deliverer(wire.server, 1, "t" * 256),
    lambda wire: new_client().open_channel(),
    lambda wire: ServerConnection().send_method(0, m.ConnectionUpdateSecretOk()),
]


@pytest.mark.parametrize("fault", LOCAL_FAULTS)
def test_what_we_may_not_do(fault: Callable[[Wire], object]) -> None:
    with pytest.raises(LocalProtocolError):
        fault(open_wire())


DELIVER = encode_method_frame(1, m.BasicDeliver("t", 1, False, "e", "k"))
CLIENT_FAULTS = [
    (encode_method_frame(1, m.BasicPublish()), 503),
    (encode_method_frame(1, m.BasicDeliver("t")) + encode_method_frame(1, m.BasicDeliver("t")), 505),
    (encode_frame(1, 1, bytes.fromhex("003c003c ff") + bytes(12)) + HEADER + BODY, 502),
    (encode_frame(1, 1, bytes.fromhex("003c003c 00") + bytes(10)) + HEADER + BODY, 502),
    (encode_frame(1, 1, bytes.fromhex("003c0032 0138 05")) + HEADER + BODY, 501),
    (encode_method_frame(7, m.BasicAck(1)), 504),
    (DELIVER + encode_frame(2, 1, bytes.fromhex("003c0001 0000000000000004 0000")) + BODY, 501),
    (DELIVER + encode_frame(2, 1, bytes.fromhex("003c0000 0000000000000004")) + BODY, 501),
    (DELIVER + HEADER[:-1] + b"\xcd" + BODY, 501),
    (DELIVER[:-1] + b"\xcd" + HEADER + BODY, 501),
    (DELIVER + HEADER + BODY[:-1] + b"\xcd", 501),
    (DELIVER + HEADER + encode_frame(3, 1, b"12345"), 501),
    (DELIVER + HEADER + encode_frame(3, 2, b"1234"), 504),
    (DELIVER + encode_frame(2, 2, HEADER[7:-1]) + BODY, 504),
]


@pytest.mark.parametrize("data, code", CLIENT_FAULTS)
@pytest.mark.parametrize("split", [lambda data: [data], bytes_apart])
def test_hard_faults_of_a_server(data: bytes, code: int, split: Callable[[bytes], list[bytes]]) -> None:
    wire = open_wire()
    events = [event for piece in split(data) for event in wire.client.receive_data(piece, 0)]
    (event,) = events
    assert isinstance(event, e.Closed)
    assert (event.reply_code, event.by_peer) == (code, False)
    wire.move()
    assert wire.client.closed
    assert wire.server.closed


def told(data: bytes, sizes: list[int], *, runs: bool) -> tuple[list[Any], list[Any]]:
    """The messages that a server reads out of `data`, cut into pieces of these sizes, and what else."""
    server = open_wire(3).server
    if not runs:
        server._runs = {}
    contents: list[Any] = []
    others: list[Any] = []
    at = 0
    for size in (*sizes, len(data)):
        events = server.receive_data(data[at : at + size], 0)
        while events or server.unread:
            for event in events:
                if isinstance(event, e.Publishes):
                    contents += event.contents
                else:
                    others.append(event)
            events = server.receive_data(b"", 0) if server.unread else []
        at += size
    return contents, others


@pytest.mark.parametrize("seed", range(8))
def test_messages_that_all_differ_are_read_as_they_are_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    wrong = seed % 2
    for _ in range(60):
        parts = []
        for _ in range(chance.randrange(1, 12)):
            headers = tuple(
                ("n" * chance.randrange(1, 130), string("v" * chance.choice((0, 1, 7, 127, 128, 255, 256))))
                for _ in range(chance.randrange(3))
            )
            raw = encode_basic_properties(
                BasicProperties(
                    headers=headers or None,
                    delivery_mode=chance.choice((None, 1, 2)),
                    correlation_id=chance.choice((None, b"\xff" * 16, chance.randbytes(8))),
                )
            )
            body = chance.randbytes(chance.choice((0, 0, 1, 127, 128, 300)))
            parts.append(publish_bytes(chance.randrange(1, 3), chance.choice((KEY, OTHER)), body, raw))
        data = bytearray(b"".join(parts))
        for _ in range(wrong):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 2, 3, 60, 0xCE, 0xFF))
        sizes = [chance.randrange(1, 400) for _ in range(chance.randrange(4))]
        assert told(bytes(data), sizes, runs=True) == told(bytes(data), sizes, runs=False)

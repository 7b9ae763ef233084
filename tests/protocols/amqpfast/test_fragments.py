"""Messages in parts: fragments, restartable transfers, streams, out of band; what a sender holds back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import LocalProtocolError
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import encode_command
from gateway.protocols.amqpfast.sender import Notifier, Producer, Transfer
from gateway.protocols.amqpfast.spec import (
    DELIVERED,
    NOTIFY_STREAMING,
    OUT_OF_BAND,
    PARTIAL,
    RECOVERY,
    Scope,
)
from tests.protocols.amqpfast.wires import HEAD, NAMED, Wire, bytes_apart, queue_wire

FRAME_MAX = 1024


def bodies(events: list[e.Event]) -> list[tuple[bytes, bytes, bytes]]:
    """(head, body, name) of every message, whole or in fragments, which have to follow each other."""
    found = []
    head, body = b"", b""
    for event in events:
        if isinstance(event, e.Sends):
            found += [(row[2], row[3], row[4]) for row in event.rows]
        elif isinstance(event, e.Notifies):
            found += [(row[3], row[4], row[5]) for row in event.rows]
        elif isinstance(event, e.Fragment):
            assert event.first == (not body) or not event.offset
            head = event.head or head
            assert event.offset == len(body)
            body += event.data
            assert len(event.data) == event.size
            if event.last:
                assert len(body) == event.body_size
                found.append((head, body, event.dest_name))
                head, body = b"", b""
    return found


SIZES = st.lists(st.sampled_from([0, 1, 1005, 1009, 1010, 1024, 2033, 2034, 5000]), min_size=1, max_size=6)


@settings(max_examples=40)
@given(SIZES, st.booleans())
def test_bodies_are_cut_into_fragments(sizes: list[int], apart: bool) -> None:
    wire = queue_wire(frame_max=FRAME_MAX)
    wire.client.send(m.HandleConsume(1, 0, 10))
    rows = [(b"n", HEAD if size % 2 else NAMED, bytes(at for at in range(256)) * 20) for size in sizes]
    rows = [(name, head, body[:size]) for size, (name, head, body) in zip(sizes, rows, strict=True)]
    tags = Producer(wire.client, 1, confirm=True).send_many(rows)
    wire.move(bytes_apart if apart else lambda data: [data])
    at_server, _ = wire.take()
    assert bodies(at_server) == [(head, body, name) for name, head, body in rows]
    wire.server.reply_many([(1, tag) for tag in tags])
    assert Notifier(wire.server, 1).notify_many(1, [(False, *row) for row in rows]) == []
    wire.move(bytes_apart if apart else lambda data: [data])
    _, at_client = wire.take()
    replies = [row for event in at_client if isinstance(event, e.Replies) for row in event.rows]
    assert replies == [(1, 1, tag, 200, "") for tag in tags]
    assert bodies(at_client) == [(head, body, name) for name, head, body in rows]
    assert all(
        event.number and event.bits & DELIVERED for event in at_client if isinstance(event, e.Fragment)
    )


def test_fragments_interleave_across_channels() -> None:
    wire = queue_wire()
    wire.client.open_channel(confirm=False)
    other = wire.client.open_handle(m.HandleOpen(2, producer=True), confirm=False)
    one, two = Transfer(wire.client, 1, HEAD, 4), Transfer(wire.client, other, NAMED, 4, name=b"n")
    one.write(b"ab")
    two.write(b"AB")
    one.write(b"")
    two.write(b"CD", last=True, tag=wire.client.new_tag(2))
    one.write(b"cd", last=True)
    wire.move()
    found = [event for event in wire.take()[0] if isinstance(event, e.Fragment)]
    assert [(event.handle, event.offset, event.data, event.last) for event in found] == [
        (1, 0, b"ab", False),
        (other, 0, b"AB", False),
        (1, 2, b"", False),
        (other, 2, b"CD", True),
        (1, 2, b"cd", True),
    ]
    assert found[3].tag == 1
    wire.server.reply(other, 1)
    wire.move()
    assert wire.take()[1] == [e.Replies([(2, other, 1, 200, "")])]


def test_a_sender_holds_back_what_may_not_come_between() -> None:
    """2.2.8.8: only the next fragment, closes, and what belongs to other channels or the connection."""
    wire = queue_wire(2)
    client = wire.client
    producer = Producer(client, 2)
    transfer = Transfer(client, 1, HEAD, 2)
    with pytest.raises(LocalProtocolError):
        Transfer(client, 2, HEAD, 0)
    transfer.write(b"a")
    client.ack(1, 7)
    producer.send_many([(b"", HEAD, b"later")])
    client.close_handle(2)
    client.receive_data(encode_command(m.ConnectionPing(True)), 0)
    wire.move()
    at_server, _ = wire.take()
    assert [type(event) for event in at_server] == [e.Fragment]
    transfer.write(b"b", last=True)
    assert not transfer.usable
    wire.move()
    at_server, at_client = wire.take()
    assert at_server == [
        e.Fragment(1, 0, 0, 0, False, True, b"", 2, 1, 1, b"b", b""),
        e.Acks([(1, 0, 7)]),
        e.Sends([(2, 0, HEAD, b"later", b"")]),
        e.HandleClosed(2, 1, 200, "", by_peer=True),
    ]
    assert at_client == [e.Released(0, 2)]


def test_what_a_closed_handle_held_back_is_dropped() -> None:
    wire = queue_wire(2)
    for handle in (1, 2):
        wire.client.send(m.HandleConsume(handle, 0, 1))
    wire.server.receive_data(part(2, WHOLE, tag=5) + part(1, WHOLE, tag=6), 0)
    transfer = Transfer(wire.server, 1, HEAD, 2, number=1, bits=DELIVERED)
    transfer.write(b"a")
    wire.server.reply_many([(2, 5), (1, 6)])
    for handle in (1, 2):
        Notifier(wire.server, handle).notify(2, False, b"q", HEAD, b"body")
    wire.server.close_handle(1, 404)
    wire.client._channels[1].awaited.append(2 << 16 | 5)
    wire.move()
    assert [type(event) for event in wire.take()[1]] == [e.Fragment, e.HandleClosed, e.Replies, e.Notifies]
    assert not transfer.usable


@pytest.mark.parametrize("channel", [False, True])
def test_a_close_ends_a_transfer(channel: bool) -> None:
    wire = queue_wire(2)
    client = wire.client
    transfer = Transfer(client, 1, HEAD, 2)
    transfer.write(b"a")
    client.ack(1, 7)
    if channel:
        client.close_channel(1)
    else:
        client.close_handle(1)
    transfer.write(b"b", last=True)
    wire.move()
    at_server, _ = wire.take()
    kinds = [type(event) for event in at_server]
    assert kinds == ([e.Fragment, e.ChannelClosed] if channel else [e.Fragment, e.HandleClosed, e.Acks])
    if not channel:
        assert Producer(client, 2).send_many([(b"", HEAD, b"")]) == [0]
        wire.move()
        assert bodies(wire.take()[0]) == [(HEAD, b"", b"")]


def test_room() -> None:
    wire = queue_wire(frame_max=FRAME_MAX)
    transfer = Transfer(wire.client, 1, HEAD, 5000)
    assert transfer.capacity == FRAME_MAX - 4 - len(HEAD)
    with pytest.raises(LocalProtocolError):
        transfer.write(bytes(transfer.capacity + 1))
    transfer.write(bytes(transfer.capacity))
    assert transfer.capacity == FRAME_MAX
    with pytest.raises(LocalProtocolError):
        transfer.announce_bytes(5)
    with pytest.raises(LocalProtocolError):
        Transfer(wire.server, 1, bytes(2000), 0)


# --- restartable transfers


def test_a_restartable_transfer() -> None:
    wire = queue_wire(channel={"restartable": True})
    client, server = wire.client, wire.server
    client.prepare(1, NAMED, 10, b"012", b"hash")
    with pytest.raises(LocalProtocolError):
        client.prepare(1, NAMED, 10)
    wire.move()
    assert wire.take()[0] == [e.Prepared(1, NAMED, 10, b"012", b"hash")]
    with pytest.raises(LocalProtocolError):
        server.ready(1, 11)
    server.ready(1, 6)
    with pytest.raises(LocalProtocolError):
        server.ready(1, 6)
    wire.move()
    assert wire.take()[1] == [e.Ready(1, 6)]
    transfer = Transfer(client, 1, NAMED, 10, name=b"n", resumed=True)
    transfer.write(b"67")
    transfer.write(b"89", last=True, tag=client.new_tag(1))
    wire.move()
    assert wire.take()[0] == [
        e.Fragment(1, 0, 0, RECOVERY | PARTIAL, True, False, b"", 10, 6, 2, b"67", b""),
        e.Fragment(1, 3, 0, RECOVERY, False, True, b"", 10, 8, 2, b"89", b"n"),
    ]


def test_a_transfer_that_was_all_there() -> None:
    wire = queue_wire(channel={"restartable": True})
    wire.client.prepare(1, NAMED, 3, b"012")
    wire.move()
    wire.server.ready(1, 3)
    wire.move()
    wire.take()
    Transfer(wire.client, 1, NAMED, 3, resumed=True).write(b"", last=True)
    wire.move()
    assert wire.take()[0] == [e.Fragment(1, 0, 0, RECOVERY, True, True, b"", 3, 3, 0, b"", b"")]


def test_a_server_prepares_too() -> None:
    wire = queue_wire(channel={"restartable": True})
    wire.client.send(m.HandleConsume(1, 0, 1))
    wire.move()
    wire.server.prepare(1, HEAD, 4)
    wire.move()
    wire.client.ready(1, 0)
    wire.move()
    assert wire.take() == (
        [e.CommandReceived(m.HandleConsume(1, 0, 1)), e.Ready(1, 0)],
        [e.Prepared(1, HEAD, 4, b"", b"")],
    )
    Transfer(wire.server, 1, HEAD, 4, number=9, bits=DELIVERED, resumed=True).write(b"0123", last=True)
    wire.move()
    assert wire.take()[1] == [
        e.Fragment(1, 0, 9, RECOVERY | DELIVERED, True, True, b"", 4, 0, 4, b"0123", b"")
    ]


def test_a_fresh_message_after_ready() -> None:
    """7: recovery = 0 after READY is another message, and recovery needs another PREPARE then."""
    wire = queue_wire(channel={"restartable": True})
    wire.client.prepare(1, NAMED, 3)
    wire.move()
    wire.server.ready(1, 0)
    wire.move()
    wire.take()
    Producer(wire.client, 1).send_many([(b"", HEAD, b"fresh")])
    Transfer(wire.client, 1, NAMED, 3, resumed=True).write(b"012", last=True)
    wire.move()
    sends, closed, released = wire.take()[0]
    assert isinstance(sends, e.Sends)
    assert released == e.Released(0, 1)
    assert isinstance(closed, e.HandleClosed)
    assert closed.reply_code == 503


# --- streams and out of band


def test_a_stream() -> None:
    wire = queue_wire(service=3)
    for side, to in ((wire.client, 0), (wire.server, 1)):
        stream = Transfer(side, 1, HEAD, 0, number=to, streaming=True)
        stream.write(b"first", tag=0 if to else wire.client.new_tag(1))
        stream.write(b"second")
        wire.move()
        found = wire.take()[to]
        assert [type(event) for event in found] == [e.Fragment, e.Fragment]
        bits = NOTIFY_STREAMING | PARTIAL
        assert found == [
            e.Fragment(1, 0 if to else 3, to, bits, True, False, HEAD, 0, 0, 5, b"first", b""),
            e.Fragment(1, 0, to, bits, False, False, b"", 0, 5, 6, b"second", b""),
        ]
    with pytest.raises(LocalProtocolError):
        Producer(wire.client, 1).send_many([(b"", HEAD, b"")])
    with pytest.raises(LocalProtocolError):
        stream.write(b"", last=True)
    wire.server.reply(1, 3)
    wire.server.close_handle(1)
    wire.move()
    assert wire.take() == (
        [e.Released(0, 1)],
        [e.Replies([(1, 1, 3, 200, "")]), e.HandleClosed(1, 1, 200, "", by_peer=True)],
    )
    with pytest.raises(LocalProtocolError):
        Producer(wire.client, 1)


def test_out_of_band() -> None:
    wire = queue_wire(channel={"out_of_band": "folder:x"})
    transfer = Transfer(wire.client, 1, HEAD, 0, name=b"n", out_of_band=True)
    transfer.announce_bytes(1 << 31)
    transfer.announce_bytes(7, last=True)
    Producer(wire.client, 1).send_many([(b"", HEAD, b"inline")])
    wire.move()
    assert wire.take()[0] == [
        e.Fragment(1, 0, 0, OUT_OF_BAND | PARTIAL, True, False, b"", 0, 0, 1 << 31, b"", b""),
        e.Fragment(1, 0, 0, OUT_OF_BAND, False, True, b"", 0, 1 << 31, 7, b"", b"n"),
        e.Sends([(1, 0, HEAD, b"inline", b"")]),
    ]


# --- faults


def part(handle: int, data: bytes, tag: int = 0, **bits: Any) -> bytes:
    return encode_command(m.HandleSend(handle, tag, len(data), **bits)) + data


WHOLE = b"\0\0\0\2" + HEAD + b"ab"
BEGIN = part(1, b"\0\0\0\4" + HEAD + b"ab", partial=True)
STREAM = part(1, b"\0\0\0\0" + HEAD + b"ab", partial=True, streaming=True)
PREPARE = encode_command(m.HandlePrepare(1, len(WHOLE))) + WHOLE
RECOVER = part(1, b"ab", recovery=True)
CHANNEL, HANDLE = (Scope.CHANNEL, 503), Scope.HANDLE
R: dict[str, Any] = {"restartable": True}
NO: dict[str, Any] = {}

SEQUENCES: list[tuple[int, dict[str, Any], list[bytes], Any, str]] = [
    (1, NO, [BEGIN, part(2, WHOLE)], CHANNEL, "2.5: another message within a message"),
    (1, R, [BEGIN, PREPARE], CHANNEL, "2.5: PREPARE within a message"),
    (1, NO, [BEGIN, part(1, b"abc")], (HANDLE, 542), "2.5: too much"),
    (1, NO, [BEGIN, part(1, b"a")], (HANDLE, 542), "2.5: too little"),
    (1, NO, [BEGIN, part(1, b"abc", partial=True)], (HANDLE, 542), "2.5: too much, early"),
    (1, NO, [BEGIN, part(1, b"ab", recovery=True)], (HANDLE, 502), "7: recovery on every fragment"),
    (1, NO, [part(1, b"\0\0\0\4" + HEAD[:5], partial=True)], (HANDLE, 542), "2.5: head in two fragments"),
    (1, NO, [STREAM], (HANDLE, 503), "7: peers only"),
    (3, NO, [part(1, WHOLE, streaming=True)], (HANDLE, 502), "7: streaming without partial"),
    (3, NO, [part(1, WHOLE, streaming=True, recovery=True)], (HANDLE, 502), "7: streaming with recovery"),
    (3, NO, [part(1, WHOLE, streaming=True, partial=True)], (HANDLE, 502), "7: a body-size"),
    (3, NO, [STREAM, part(1, WHOLE)], CHANNEL, "7: no other message on the channel"),
    (3, NO, [STREAM, part(2, WHOLE)], CHANNEL, "7: no other message on the channel"),
    (3, NO, [STREAM, part(1, b"", streaming=True)], (HANDLE, 502), "7: streaming without partial"),
    (1, NO, [RECOVER], (HANDLE, 503), "7: recovery without PREPARE"),
    (1, R, [PREPARE, RECOVER], (HANDLE, 503), "7: recovery without READY"),
    (1, R, [PREPARE, PREPARE], (HANDLE, 503), "7: one PREPARE at a time"),
    (1, NO, [PREPARE], CHANNEL, "7: the channel is not restartable"),
    (1, R, [PREPARE[:11] + b"\0\0\0\1" + PREPARE[15:]], (HANDLE, 542), "2.5: too much in PREPARE"),
    (1, NO, [encode_command(m.HandleSend(1, 0, 9, out_of_band=True))], (HANDLE, 540), "7: not agreed"),
]


@pytest.mark.parametrize("service, channel, data, answer, clause", SEQUENCES)
@pytest.mark.parametrize("split", [lambda data: [data], bytes_apart])
def test_faults_in_sequences(
    service: int,
    channel: dict[str, Any],
    data: list[bytes],
    answer: Any,
    clause: str,
    split: Callable[[bytes], list[bytes]],
) -> None:
    wire = queue_wire(2, service=service, channel=channel)
    server = wire.server
    events: list[e.Event] = []
    follow = part(2, WHOLE) + encode_command(m.ConnectionPing(respond=True))
    for piece in split(b"".join(data) + follow):
        events += server.receive_data(piece, 0)
    faults = [event for event in events if isinstance(event, e.ChannelClosed | e.HandleClosed)]
    assert [
        (Scope.CHANNEL if isinstance(event, e.ChannelClosed) else Scope.HANDLE, event.reply_code)
        for event in faults
    ] == [answer], clause
    # The stream is still in step: the other handle goes on, unless its channel went, and PING is answered.
    assert isinstance(events[-1], e.Sends) is (answer[0] is Scope.HANDLE)
    assert server.sent[m.ConnectionPing.type] == 1


def test_a_receiver_bears_acks_within_a_message() -> None:
    wire = queue_wire()
    data = BEGIN + encode_command(m.ChannelAck(1, 0, 1)) + encode_command(m.HandleFlow(1, 0, True))
    found = wire.server.receive_data(data + part(1, b"cd"), 0)
    assert [type(event) for event in found] == [e.Fragment, e.Acks, e.CommandReceived, e.Fragment]


def test_a_message_number_stays_the_same() -> None:
    wire = queue_wire()
    wire.client.send(m.HandleConsume(1, 0, 1))
    said = [
        encode_command(m.HandleNotify(1, number, len(data), partial)) + data
        for number, partial, data in ((1, True, b"\0\0\0\4" + HEAD), (2, False, b"abcd"))
    ]
    found = wire.client.receive_data(b"".join(said), 0)
    assert isinstance(found[-1], e.ChannelClosed)


def test_a_message_too_large_is_told_by_its_head() -> None:
    head = b"\0\0\0\x65" + HEAD
    for data in (part(1, head, partial=True), encode_command(m.HandlePrepare(1, 15)) + head):
        wire = queue_wire(message_bytes_max=100, channel=R)
        (closed,) = wire.server.receive_data(data, 0)
        assert isinstance(closed, e.ChannelClosed)
        assert closed.reply_code == 311


def test_fragments_behind_a_close_are_passed_over() -> None:
    """2.5: whoever discards a command discards its fragment, too."""
    wire = queue_wire(2)
    server = wire.server
    server.close_handle(1, 404, "no")
    data = part(1, WHOLE) + BEGIN + part(1, b"ab") + part(2, WHOLE)
    for piece in bytes_apart(data[:-3]):
        assert server.receive_data(piece, 0) == []
        assert server.begun_bytes < 40
    (sends,) = server.receive_data(data[-3:], 0)
    assert sends == e.Sends([(2, 0, HEAD, b"ab", b"")])


def test_a_close_within_a_fragment() -> None:
    """The application closes while the rest of a fragment is still under way."""
    for close in (closes_handle, closes_channel):
        wire = queue_wire(2)
        data = part(1, WHOLE)
        assert wire.server.receive_data(data[:-1], 0) == []
        close(wire)
        wire.server.receive_data(data[-1:] + encode_command(m.ConnectionPing(respond=True)), 0)
        assert wire.server.sent[m.ConnectionPing.type] == 1


def closes_handle(wire: Wire) -> None:
    wire.server.close_handle(1, 404)


def closes_channel(wire: Wire) -> None:
    wire.server.close_channel(1, 404)


def test_a_message_between_prepare_and_ready() -> None:
    wire = queue_wire(channel=R)
    wire.client.prepare(1, NAMED, 3)
    Producer(wire.client, 1).send_many([(b"", HEAD, b"x")])
    wire.move()
    assert [type(event) for event in wire.take()[0]] == [e.Prepared, e.Sends]
    wire.server.ready(1, 0)
    Transfer(wire.client, 1, NAMED, 3, resumed=True).write(b"012", last=True)
    wire.move()
    assert [type(event) for event in wire.take()[0]] == [e.Fragment]

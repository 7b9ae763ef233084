"""Whole conversations, the two sides wired together or fed by hand: messages, replies, transactions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import LocalProtocolError
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import Head, encode_command, encode_head_properties
from gateway.protocols.amqpfast.sender import PREPARED_BYTES_MAX, Notifier, Producer
from gateway.protocols.amqpfast.spec import (
    DELIVERED,
    HANDLE_NOTIFY,
    HANDLE_SEND,
    REDELIVERED,
    ReplyCode,
)
from tests.protocols.amqpfast.wires import HEAD, NAMED, Wire, bytes_apart, open_wire, queue_wire

NO_HANDLE = e.NO_HANDLE


def send_bytes(handle: int, body: bytes, head: bytes = NAMED, tag: int = 0, name: str = "") -> bytes:
    fragment = len(body).to_bytes(4, "big") + head + body
    return encode_command(m.HandleSend(handle, tag, len(fragment), dest_name=name)) + fragment


def test_the_vectors_of_a_message() -> None:
    wire = queue_wire()
    data = bytes.fromhex(
        "000c1f0001000000000017 00 00 ce 00000005 01 04 00000000 00 00 03696431 0000 68656c6c6f"
    )
    assert data == send_bytes(1, b"hello")
    assert wire.server.receive_data(data, 0) == [e.Sends([(1, 0, NAMED, b"hello", b"")])]
    Producer(wire.client, 1).send_many([(b"", NAMED, b"hello")])
    assert wire.client.data_to_send() == data
    wire.client.send(m.HandleConsume(1, 0, 10))
    assert wire.client.data_to_send() == bytes.fromhex("000e200001000000 0a00000000000 0ce".replace(" ", ""))
    assert Notifier(wire.server, 1).notify(1, False, b"q", NAMED, b"hello")
    said = wire.server.data_to_send()
    assert said == bytes.fromhex("000f2900010000000100000017080171ce") + data[14:]
    assert wire.client.receive_data(said, 0) == [e.Notifies([(1, 1, DELIVERED, NAMED, b"hello", b"q")])]
    wire.client.ack(1, 1)
    assert wire.client.data_to_send() == bytes.fromhex("000a1500010000 00000001 ce")


def test_produce_and_consume() -> None:
    wire = queue_wire(2)
    wire.client.send(m.HandleConsume(2, wire.client.new_tag(1), 10))
    producer = Producer(wire.client, 1, confirm=True)
    names = [b"a", b"b"]
    rows = [(names[at % 3 == 0], HEAD if at % 2 else NAMED, b"x" * (at % 5)) for at in range(20)]
    tags = producer.send_many(rows)
    wire.move()
    at_server, at_client = wire.take()
    assert at_server == [
        e.CommandReceived(m.HandleConsume(2, 4, 10)),
        e.Sends([(1, tag, head, body, name) for tag, (name, head, body) in zip(tags, rows, strict=True)]),
    ]
    assert at_client == [e.Replies([(1, 2, 4, 200, "")])]
    sends = at_server[1]
    assert isinstance(sends, e.Sends)
    wire.server.reply_many([row[:2] for row in sends.rows])
    notifier = Notifier(wire.server, 2)
    assert (
        notifier.notify_many(7, [(at == 1, name, head, body) for at, (name, head, body) in enumerate(rows)])
        == []
    )
    wire.move()
    _, (replies, notifies) = wire.take()
    assert replies == e.Replies([(1, 1, tag, 200, "") for tag in tags])
    assert notifies == e.Notifies(
        [
            (2, 7 + at, DELIVERED | (REDELIVERED if at == 1 else 0), head, body, name)
            for at, (name, head, body) in enumerate(rows)
        ]
    )
    assert wire.server.received[HANDLE_SEND] == wire.client.sent[HANDLE_SEND] == 20
    assert wire.server.sent[HANDLE_NOTIFY] == wire.client.received[HANDLE_NOTIFY] == 20
    assert producer.capacity == 65_535


def script() -> tuple[bytes, int]:
    """What a client says: short, long and empty messages, with acks and other commands between."""
    parts = [
        send_bytes(1, b"one"),
        send_bytes(1, b"two", tag=5, name="n"),
        send_bytes(1, b""),
        encode_command(m.ChannelAck(1, 0, 9)),
        encode_command(m.ChannelAck(1, 3, 10)),
        b"\xff\xff\0\0" + encode_command(m.ConnectionPing(True)),
        send_bytes(2, b"x" * 3000, HEAD),
        b"\xff\xff\0\0" + send_bytes(2, b"long form"),
        encode_command(m.HandleFlow(1, 0, True)),
        encode_command(m.HandleSend(2, 0, 16, partial=True)) + b"\0\0\0\6" + HEAD + b"a",
        encode_command(m.HandleSend(2, 7, 5)) + b"bcdef",
        encode_command(m.ChannelClose(1)),
    ]
    return b"".join(parts), len(parts)


def flat(events: list[e.Event]) -> list[Any]:
    """The events with their runs taken apart, for where a run ends depends on how the bytes came."""
    found: list[Any] = []
    for event in events:
        rows = event.rows if isinstance(event, e.Sends | e.Acks) else None
        found += [event] if rows is None else [(type(event), row) for row in rows]
    return found


@settings(max_examples=60)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_how_the_stream_is_split_never_matters(sizes: list[int]) -> None:
    data, _ = script()
    whole, parts = queue_wire(2), queue_wire(2)
    expected = flat(whole.server.receive_data(data, 0))
    found: list[e.Event] = []
    at = 0
    for size in [*sizes, len(data)]:
        found += parts.server.receive_data(data[at : at + size], 0)
        at += size
    assert flat(found) == expected
    assert parts.server.received == whole.server.received
    assert parts.server.data_to_send() == whole.server.data_to_send()


def test_byte_by_byte() -> None:
    data, _ = script()
    wire = queue_wire(2)
    found = [event for byte in bytes_apart(data) for event in wire.server.receive_data(byte, 0)]
    assert flat(found) == flat(queue_wire(2).server.receive_data(data, 0))
    assert [type(event) for event in found if not isinstance(event, e.Sends | e.Acks)] == [
        e.CommandReceived,
        e.Fragment,
        e.Fragment,
        e.ChannelClosed,
    ]


def test_replies_keep_the_order_of_the_commands() -> None:
    """4: they never overtake, per channel; other channels are not concerned."""
    wire = queue_wire(2)
    wire.replies = False
    server = wire.server
    wire.client.open_channel(confirm=False)
    other = wire.client.open_handle(m.HandleOpen(2, producer=True), confirm=False)
    first = Producer(wire.client, 1, confirm=True).send_many([(b"", HEAD, b"")] * 3)
    wire.client.send(m.HandleConsume(2, wire.client.new_tag(1), 1))
    Producer(wire.client, other, confirm=True).send_many([(b"", HEAD, b"")])
    wire.move()
    wire.take()
    server.reply(2, 7)
    server.reply_many([(1, first[2]), (1, first[1])])
    server.reply(1, 9999)
    wire.move()
    assert wire.take() == ([], [])
    server.reply(other, 1)
    wire.move()
    assert wire.take()[1] == [e.Replies([(2, other, 1, 200, "")])]
    server.reply(1, first[0])
    wire.move()
    assert wire.take()[1] == [e.Replies([*((1, 1, tag, 200, "") for tag in first), (1, 2, 7, 200, "")])]
    channel = server._channels[1]
    assert not channel.reply_keys
    assert not channel.early_replies


def test_the_same_tag_many_times() -> None:
    wire = queue_wire()
    wire.server.receive_data(send_bytes(1, b"a", tag=1) * 3, 0)
    wire.server.reply_many([(1, 1), (1, 1)])
    wire.server.reply(1, 1)
    assert wire.server.data_to_send() == encode_command(m.HandleReply(1, 1)) * 3


def test_browse_and_query() -> None:
    """6: a failed BROWSE is replied in any case, a good one when it has a tag."""
    wire = queue_wire()
    client, server = wire.client, wire.server
    wire.replies = False
    client.send(m.HandleQuery(1, 0))
    client.send(m.HandleBrowse(1, 0, 5))
    client.send(m.HandleBrowse(1, 0, 6))
    client.send(m.HandleBrowse(1, client.new_tag(1), 7))
    wire.move()
    server.send(m.HandleIndex(1, 0, b"5-7"))
    assert Notifier(server, 1, delivered=False).notify(5, False, b"q", HEAD, b"five")
    server.reply(1, 0)
    server.reply(1, 0, ReplyCode.MESSAGE_NOT_FOUND, "gone")
    server.reply(1, 3)
    wire.move()
    assert wire.take()[1] == [
        e.CommandReceived(m.HandleIndex(1, 0, b"5-7")),
        e.Notifies([(1, 5, 0, HEAD, b"five", b"q")]),
        e.Replies([(1, 1, 0, 310, "gone"), (1, 1, 3, 200, "")]),
    ]
    server.reply(1, 0)  # nothing is owed
    assert not server._channels[1].early_replies
    assert server.data_to_send() == b""


def test_a_temporary_destination() -> None:
    wire = open_wire()
    wire.replies = False
    wire.client.open_channel(confirm=False)
    wire.client.open_handle(m.HandleOpen(1, consumer=True, temporary=True))
    wire.move()
    wire.server.send(m.HandleCreated(1, "tmp-1"))
    wire.server.reply(1, 1)
    wire.move()
    assert wire.take()[1] == [
        e.CommandReceived(m.HandleCreated(1, "tmp-1")),
        e.Replies([(1, 1, 1, 200, "")]),
    ]
    wire.server.send(m.HandleCreated(1, "tmp-1"))
    wire.move()
    assert isinstance(wire.take()[1][0], e.Closed)


def test_transactions() -> None:
    wire = queue_wire(channel={"transacted": True})
    client = wire.client
    Producer(client, 1).send_many([(b"", HEAD, b"x")])
    client.send(m.ChannelAck(1, client.new_tag(1), 4))
    client.send(m.ChannelCommit(1, client.new_tag(1)))
    client.send(m.ChannelRollback(1, 0))
    wire.replies = False
    wire.move()
    at_server, _ = wire.take()
    assert at_server == [
        e.Sends([(1, 0, HEAD, b"x", b"")]),
        e.Acks([(1, 3, 4)]),
        e.CommandReceived(m.ChannelCommit(1, 4)),
        e.CommandReceived(m.ChannelRollback(1, 0)),
    ]
    wire.server.reply_channel(1, 3)
    wire.server.reply_channel(1, 4, 201, "done")
    wire.server.reply_channel(1, 0)
    wire.move()
    assert wire.take()[1] == [e.Replies([(1, NO_HANDLE, 3, 200, ""), (1, NO_HANDLE, 4, 201, "done")])]


def test_an_ack_may_be_answered_in_either_scope() -> None:
    """3.3.9 says HANDLE REPLY; we say CHANNEL REPLY and understand both."""
    wire = queue_wire()
    wire.client.send(m.ChannelAck(1, wire.client.new_tag(1), 4))
    (event,) = wire.client.receive_data(encode_command(m.HandleReply(1, 3)), 0)
    assert event == e.Replies([(1, 1, 3, 200, "")])


def test_a_reply_that_nobody_asked_for() -> None:
    wire = queue_wire()
    (event,) = wire.client.receive_data(encode_command(m.HandleReply(1, 9)), 0)
    assert isinstance(event, e.Closed)
    assert event.reply_code == ReplyCode.COMMAND_NOT_VALID


def test_tags_run_out() -> None:
    wire = queue_wire()
    producer = Producer(wire.client, 1, confirm=True)
    row = (b"", HEAD, b"")
    tags = producer.send_many([row] * 65_535)
    assert sorted(tags) == list(range(1, 65_536))
    assert producer.capacity == 0
    with pytest.raises(LocalProtocolError):
        producer.send_many([row])
    with pytest.raises(LocalProtocolError):
        wire.client.new_tag(1)


def test_what_does_not_fit_is_not_sent() -> None:
    wire = queue_wire(frame_max=1024)
    wire.client.send(m.HandleConsume(1, 0, 1))
    wire.move()
    wire.take()
    wide = encode_head_properties(Head(mime_type="x" * 250, encoding="x" * 250, identifier="x" * 255))
    wide += bytes(1)  # no matter what it is: it is too long
    long = wide + bytes(300)
    assert Producer(wire.client, 1).send_many([(b"", long, b"a"), (b"", HEAD, b"b")]) == [-1, 0]
    assert Notifier(wire.server, 1).notify_many(1, [(False, b"", HEAD, b"b"), (False, b"", long, b"a")]) == [
        2
    ]
    wire.move()
    assert wire.take() == (
        [e.Sends([(1, 0, HEAD, b"b", b"")])],
        [e.Notifies([(1, 1, DELIVERED, HEAD, b"b", b"")])],
    )


def test_nothing_is_sent_where_nothing_is_open() -> None:
    wire = queue_wire()
    client, server = wire.client, wire.server
    producer, notifier = Producer(client, 1, confirm=True), Notifier(server, 1)
    client.close_channel(1)
    assert producer.send_many([(b"", HEAD, b"")] * 2) == [-1, -1]
    assert not client.send(m.ChannelAck(1))
    assert not client.send(m.HandleFlow(1))
    wire.move()
    assert notifier.notify_many(1, [(False, b"", HEAD, b"")]) == []
    server.reply(1, 1)
    server.reply_channel(1, 1)
    server.reply_many([(1, 1)])
    server.send(m.HandleCreated(1))
    server.ready(1, 0)
    client.prepare(1, HEAD, 0)
    assert server.data_to_send() == client.data_to_send() == b""
    with pytest.raises(LocalProtocolError):
        Producer(client, 1)
    with pytest.raises(LocalProtocolError):
        Notifier(server, 1)
    for wrong in (m.HandleCreated(1), m.ConnectionClose(), m.HandleSend(1)):
        with pytest.raises(LocalProtocolError):
            client.send(wrong)


def test_a_message_too_large() -> None:
    """5: CHANNEL CLOSE 311; its bytes are passed over."""
    wire = queue_wire(message_bytes_max=10)
    data = send_bytes(1, b"x" * 10) + send_bytes(1, b"x" * 11) + send_bytes(1, b"")
    sends, closed = wire.server.receive_data(data, 0)
    assert isinstance(sends, e.Sends)
    assert len(sends.rows) == 1
    assert closed == e.ChannelClosed(1, 311, "a message of 11 bytes exceeds 10", by_peer=False)


FAULTS = [
    (b"\0\0\0\5" + HEAD + b"1234", 542, "2.5: less than announced"),
    (b"\0\0\0\5" + HEAD + b"123456", 542, "2.5: more than announced"),
    (b"\0\0\0\0" + HEAD[:-1], 542, "2.5: the head is not whole"),
    (b"", 542, "2.5: no head"),
]


@pytest.mark.parametrize("fragment, code, clause", FAULTS)
def test_broken_messages(fragment: bytes, code: int, clause: str) -> None:
    """6: HANDLE CLOSE 542; other handles go on."""
    wire = queue_wire(2)
    data = encode_command(m.HandleSend(1, 3, len(fragment))) + fragment + send_bytes(2, b"fine")
    closed, sends = wire.server.receive_data(data, 0)
    assert isinstance(closed, e.HandleClosed)
    assert (closed.handle, closed.channel, closed.reply_code, closed.by_peer) == (1, 1, code, False), clause
    assert sends == e.Sends([(2, 0, NAMED, b"fine", b"")])
    assert not wire.server._channels[1].reply_keys


def test_an_oversize_fragment_is_passed_over() -> None:
    """2.5: CONNECTION CLOSE 501, and the bytes of the fragment are not taken for commands."""
    wire = queue_wire(frame_max=4096)
    data = encode_command(m.HandleSend(1, 0, 100_000))
    (closed,) = wire.server.receive_data(data, 0)
    assert isinstance(closed, e.Closed)
    assert closed.reply_code == ReplyCode.FRAMING_ERROR
    for _ in range(10):
        assert wire.server.receive_data(b"\xce" * 10_000, 0) == []
        assert wire.server.begun_bytes == 0
    assert wire.server.receive_data(encode_command(m.ConnectionClose()), 0) == []
    assert wire.server.closed


def test_memory_holds_one_fragment() -> None:
    wire = queue_wire(frame_max=4096)
    data = b"".join(send_bytes(1, b"x" * 4000) for _ in range(50))
    for at in range(0, len(data), 1000):
        wire.server.receive_data(data[at : at + 1000], 0)
        assert wire.server.begun_bytes <= 4096 + 20 + 1000
    for at in range(3000):
        wire.server.receive_data(data[at : at + 1], 0)
        assert wire.server.begun_bytes <= 4096 + 20


def test_a_handle_opens_with_defaults() -> None:
    wire = Wire()
    wire.move()
    wire.client.open_channel(confirm=False)
    command = m.HandleOpen(1, 0, 2, 0, True, False, False, False, "n", "m", "e")
    wire.client.open_handle(command, confirm=False)
    wire.move()
    assert wire.take()[0][-1] == e.CommandReceived(
        m.HandleOpen(1, 1, 2, 0, True, False, False, False, "n", "m", "e")
    )


LONG = b"\xff\xff\0\0"


def test_the_long_form_of_what_comes_in_number() -> None:
    wire = queue_wire()
    wire.client.send(m.HandleConsume(1, 0, 1))
    wire.client.data_to_send()
    ack = LONG + encode_command(m.ChannelAck(1, 5, 9))
    short = encode_command(m.ChannelAck(1, 0, 10))
    assert wire.server.receive_data(ack + short, 0) == [e.Acks([(1, 5, 9), (1, 0, 10)])]
    wire.server.reply_channel(1, 5)
    assert wire.server.data_to_send() == encode_command(m.ChannelReply(1, 5))
    assert Notifier(wire.server, 1).notify_many(3, [(True, b"q", HEAD, b"a")] * 2) == []
    one = wire.server.data_to_send()
    one = one[: len(one) // 2]
    bits = DELIVERED | REDELIVERED
    found = wire.client.receive_data(LONG + one + one + LONG + one + encode_command(m.HandleClose(1)), 0)
    row = (1, 3, bits, HEAD, b"a", b"q")
    assert found == [e.Notifies([row] * 3), e.HandleClosed(1, 1, 200, "", by_peer=True)]


@pytest.mark.parametrize("name", [b"\xff", b"\0"])
def test_a_name_that_is_none(name: bytes) -> None:
    """6: CONNECTION CLOSE 501; where the fragment ends is not known, so nothing is read behind it."""
    wire = queue_wire()
    wire.client.send(m.HandleConsume(1, 0, 1))
    wire.client.data_to_send()
    fragment = bytes(4) + HEAD
    for side, command in (
        (wire.server, m.HandleSend(1, 0, len(fragment), dest_name="x")),
        (wire.client, m.HandleNotify(1, 1, len(fragment), dest_name="x")),
    ):
        data = encode_command(command).replace(b"x", name) + fragment
        (closed,) = side.receive_data(data * 2, 0)
        assert isinstance(closed, e.Closed)
        assert closed.reply_code == ReplyCode.FRAMING_ERROR
        assert side.receive_data(data, 0) == []


def test_a_broken_delivery_costs_the_handle() -> None:
    wire = queue_wire()
    wire.client.send(m.HandleConsume(1, 0, 1))
    fragment = b"\0\0\0\5" + HEAD
    (closed,) = wire.client.receive_data(encode_command(m.HandleNotify(1, 1, len(fragment))) + fragment, 0)
    assert isinstance(closed, e.HandleClosed)
    assert closed.reply_code == ReplyCode.MESSAGE_CONTENTS_INVALID


def test_a_handle_that_closes_is_owed_nothing() -> None:
    wire = queue_wire(2)
    wire.replies = False
    client, server = wire.client, wire.server
    tags = [Producer(client, handle, confirm=True).send_many([(b"", HEAD, b"")] * 2) for handle in (1, 2)]
    wire.move()
    wire.take()
    server.reply_many([(1, tags[0][1]), (2, tags[1][0]), (2, tags[1][1])])
    assert server.data_to_send() == b""
    server.close_handle(1, 403)
    wire.move()
    assert wire.take()[1] == [
        e.HandleClosed(1, 1, 403, "", by_peer=True),
        e.Replies([(1, 2, tag, 200, "") for tag in tags[1]]),
    ]
    assert not client._channels[1].awaited
    assert not server._channels[1].early_replies


def test_ready_for_more_than_there_is() -> None:
    wire = queue_wire(channel={"restartable": True}, frame_max=1024)
    with pytest.raises(LocalProtocolError):
        wire.client.prepare(1, HEAD, 5000, bytes(2000))
    wire.client.prepare(1, HEAD, 5)
    wire.move()
    (closed,) = wire.client.receive_data(encode_command(m.HandleReady(1, 6)), 0)
    assert isinstance(closed, e.HandleClosed)
    assert closed.reply_code == ReplyCode.BAD_FIELD_VALUE


def test_what_a_handle_remembers_is_bounded() -> None:
    wire = queue_wire()
    wire.client.send(m.HandleConsume(1, 0, 1))
    producer, notifier = Producer(wire.client, 1), Notifier(wire.server, 1)
    for size in range(1_000):
        producer._prepare(b"", HEAD, size, 0)
    few = len(producer._prepared)
    assert 100 < few < PREPARED_BYTES_MAX // 400
    for size in range(1_000):
        producer._prepare(b"n" * 200, HEAD + bytes(3_000), size % 50, 0)  # also under keys that are there
    assert 5 < len(producer._prepared) < PREPARED_BYTES_MAX // 6_000
    producer.forget()
    for size in range(1_000):
        producer._prepare(b"", HEAD, size, 0)
    assert len(producer._prepared) == few
    for _ in range(2):
        notifier.notify_many(1, [(True, b"q", HEAD, b"")])
    found = wire.client.receive_data(wire.server.data_to_send(), 0)
    assert found == [e.Notifies([(1, 1, DELIVERED | REDELIVERED, HEAD, b"", b"q")] * 2)]


def test_a_selector_that_makes_a_command_larger_than_frame_max_is_not_sent() -> None:
    """3.2.5: the server would close the connection."""
    wire = queue_wire(frame_max=1_024)
    for made in (m.HandleConsume, m.HandleQuery):
        fits = made(1, selector=b"")
        fits.selector = b"x" * (1_024 - len(encode_command(fits)) + 2)
        assert wire.client.send(fits)
        wire.move()
        assert [type(event) for event in wire.take()[0]] == [e.CommandReceived]
        with pytest.raises(LocalProtocolError, match="frame-max is 1024"):
            wire.client.send(made(1, selector=fits.selector + b"x"))
        assert wire.client.data_to_send() == b""

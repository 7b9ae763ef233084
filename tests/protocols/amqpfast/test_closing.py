"""Closes that are answered, cross, wait and repeat; heartbeats; the time limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import encode_command
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.protocols.amqpfast.states import State
from tests.protocols.amqpfast.wires import HEAD, Wire, new_client, open_wire, queue_wire

PING = encode_command(m.ConnectionPing())
PING_RESPOND = encode_command(m.ConnectionPing(True))
CLOSE = encode_command(m.ConnectionClose())


def kinds(data: bytes) -> list[str]:
    """The names of the commands, none of which has a fragment."""
    found = []
    while data:
        found.append(m.FRAME_NAMES[data[2]])
        data = data[2 + int.from_bytes(data[:2], "big") :]
    return found


@pytest.mark.parametrize("by_client", [True, False])
@pytest.mark.parametrize("scope", ["handle", "channel", "connection"])
def test_a_close_is_answered(scope: str, by_client: bool) -> None:
    wire = queue_wire(2)
    one, other = (wire.client, wire.server) if by_client else (wire.server, wire.client)
    if scope == "handle":
        one.close_handle(1, 200, "bye")
    elif scope == "channel":
        one.close_channel(1, 320, "bye" + "\u00e9" * 200)
    else:
        one.close(320, "bye")
    wire.move()
    at_server, at_client = wire.take()
    at_one, at_other = (at_client, at_server) if by_client else (at_server, at_client)
    if scope == "handle":
        assert at_one == [e.Released(0, 1)]
        assert at_other == [e.HandleClosed(1, 1, 200, "bye", by_peer=True)]
        assert one.handles == other.handles == [2]
    elif scope == "channel":
        assert at_one == [e.Released(1, 0)]
        (closed,) = at_other
        assert isinstance(closed, e.ChannelClosed)
        assert (closed.reply_code, len(closed.text.encode())) == (320, 255)
        assert one.channels == other.channels == one.handles == other.handles == []
    else:
        assert at_one == []
        assert at_other == [e.Closed(320, "bye", by_peer=True)]
        assert (one.state, other.state) == (State.CLOSED, State.ENDING)
        assert other.receive_data(b"what still comes", 1) == []


def test_crossing_closes() -> None:
    """3.1: each counts as the answer to the other."""
    wire = queue_wire(2)
    for handle, code in ((1, 200), (2, 404)):
        wire.client.close_handle(handle, code)
        wire.server.close_handle(handle, code)
    wire.move()
    assert wire.take() == ([e.Released(0, 1), e.Released(0, 2)], [e.Released(0, 1), e.Released(0, 2)])
    wire.client.close_channel(1)
    wire.server.close_channel(1, 506)
    wire.move()
    assert wire.take() == ([e.Released(1, 0)], [e.Released(1, 0)])
    wire.client.close()
    wire.server.close(320)
    wire.move()
    assert wire.take() == ([], [])
    assert wire.server.closed
    assert wire.client.closed


def test_numbers_can_be_used_again() -> None:
    wire = queue_wire()
    for _ in range(3):
        wire.client.close_handle(1)
        wire.move()
        wire.server.receive_data(encode_command(m.HandleOpen(1, 1)), 0)
        assert wire.server.handles == [1]
        wire.server.receive_data(encode_command(m.HandleClose(1)), 0)
        wire.server.data_to_send()
    assert wire.server.handles == []


def test_a_close_waits_for_the_replies_before_it() -> None:
    """4: commands of a channel run one after the other, and a close is one of them."""
    wire = queue_wire(2)
    wire.replies = False
    tags = Producer(wire.client, 1, confirm=True).send_many([(b"", HEAD, b"")] * 2)
    wire.client.close_handle(1)
    (other,) = Producer(wire.client, 2, confirm=True).send_many([(b"", HEAD, b"")])
    wire.client.close_channel(1)
    wire.client.close()
    wire.move()
    assert [type(event) for event in wire.to_server] == [
        e.Sends,
        e.HandleClosed,
        e.Sends,
        e.ChannelClosed,
        e.Closed,
    ]
    server = wire.server
    assert server.deadline() == 5
    server.reply(2, other)
    assert server.data_to_send() == b""
    server.reply_many([(1, tag) for tag in tags])
    assert kinds(server.data_to_send()) == [
        "handle.reply",
        "handle.reply",
        "handle.close",
        "handle.reply",
        "channel.close",
        "connection.close",
    ]
    assert server.state is State.ENDING


@pytest.mark.parametrize("scope", ["handle", "channel", "connection"])
def test_a_close_does_not_wait_for_ever(scope: str) -> None:
    wire = queue_wire(2)
    Producer(wire.client, 1, confirm=True).send_many([(b"", HEAD, b"")])
    if scope == "handle":
        wire.client.close_handle(1)
    elif scope == "channel":
        wire.client.close_channel(1)
    else:
        wire.client.close()
    wire.move()
    assert wire.server.data_to_send() == b""
    assert wire.server.deadline() == 5
    wire.server.tick(4.9)
    assert wire.server.data_to_send() == b""
    wire.server.tick(5)
    assert kinds(wire.server.data_to_send()) == [f"{scope}.close"]
    wire.server.reply(1, 3)
    assert wire.server.data_to_send() == b""
    if scope == "handle":
        assert wire.server.handles == [2]
        assert not wire.server._channels[1].reply_keys


def test_what_the_application_says_before_the_answer_still_counts() -> None:
    """OPEN and CLOSE of a temporary destination in one breath: CREATED comes first."""
    wire = open_wire()
    said = [m.ChannelOpen(1), m.HandleOpen(1, 1, temporary=True, consumer=True), m.HandleClose(1)]
    wire.server.receive_data(b"".join(map(encode_command, said)), 0)
    wire.server.send(m.HandleCreated(1, "tmp-1"))
    assert kinds(wire.server.data_to_send()) == ["handle.created", "handle.close"]


def test_a_refusal_counts_as_the_answer() -> None:
    wire = open_wire()
    said = [m.ChannelOpen(1), m.HandleOpen(1, 1), m.HandleClose(1), m.ChannelOpen(2), m.ChannelClose(2)]
    wire.server.receive_data(b"".join(map(encode_command, said)), 0)
    wire.server.close_handle(1, 404)
    wire.server.close_channel(2, 540)
    assert kinds(wire.server.data_to_send()) == ["handle.close", "channel.close"]
    assert wire.server.data_to_send() == b""
    assert (wire.server.channels, wire.server.handles) == ([1], [])


def test_a_client_that_does_not_wait_for_the_answer() -> None:
    wire = open_wire()
    said = [
        *(m.ChannelOpen(1), m.HandleOpen(1, 1, tag=5), m.HandleClose(1), m.HandleOpen(1, 1)),
        *(m.ChannelClose(1), m.ChannelOpen(1), m.HandleOpen(1, 1)),
    ]
    events = wire.server.receive_data(b"".join(map(encode_command, said)), 0)
    assert [type(event) for event in events].count(e.CommandReceived) == 5
    assert kinds(wire.server.data_to_send()) == ["handle.close", "channel.close"]
    assert (wire.server.channels, wire.server.handles) == ([1], [1])
    wire.server.tick(6)
    assert wire.server.data_to_send() == b""  # nothing waits for an answer any more


def test_a_handle_that_leaves_goes_on_processing() -> None:
    """3.5.16: the initiator processes until the answer; after a fault it discards."""
    wire = queue_wire(2)
    producers = [Producer(wire.client, handle) for handle in (1, 2)]
    wire.server.close_handle(1)
    wire.server.close_handle(2, 404)
    wire.server.close_handle(1)
    for producer in producers:
        producer.send_many([(b"", HEAD, b"late")])
    wire.move()
    assert wire.take()[0] == [e.Sends([(1, 0, HEAD, b"late", b"")]), e.Released(0, 1), e.Released(0, 2)]


def test_a_refused_channel_takes_its_handles_along() -> None:
    """6: a handle whose OPEN was discarded counts as closing."""
    wire = open_wire()
    client, server = wire.client, wire.server
    client.open_channel()
    wire.move()
    wire.take()
    server.close_channel(1, 540, "no such scheme")
    handle = client.open_handle(m.HandleOpen(1, producer=True, consumer=True))
    Producer(client, handle).send_many([(b"", HEAD, b"x")])
    client.send(m.HandleConsume(handle, 0, 1))
    client.close_handle(handle)
    wire.move()
    assert wire.take() == (
        [e.Released(0, handle), e.Released(1, 0)],
        [e.ChannelClosed(1, 540, "no such scheme", by_peer=True)],
    )
    assert server.handles == client.handles == []
    assert client.open_channel() == 2
    wire.move()


CLOSERS: list[Callable[[ServerConnection], None]] = [
    lambda server: server.close_channel(1, 404),
    lambda server: server.close(320),
]


@pytest.mark.parametrize("close", CLOSERS)
def test_closes_are_repeated_but_not_too_often(close: Callable[[ServerConnection], None]) -> None:
    """3.2.9, 3.3.7: any command is answered by another CLOSE, once in 100 ms."""
    server = queue_wire().server
    close(server)
    (said,) = kinds(server.data_to_send())
    for now, count in ((0.0, 0), (0.05, 0), (0.1, 1), (0.15, 0), (0.25, 1)):
        server.receive_data(encode_command(m.ChannelAck(1)) * 3 + encode_command(m.HandleFlow(1)), now)
        assert kinds(server.data_to_send()) == [said] * count


def test_a_close_that_is_not_answered() -> None:
    server = open_wire(heartbeat=0).server
    server.receive_data(b"", 10)
    server.close(320)
    assert server.deadline() == 15
    assert not server.timed_out(14.9)
    assert server.timed_out(15)


def test_a_stream_that_does_not_end() -> None:
    server = open_wire(heartbeat=0).server
    assert server.receive_data(CLOSE, 10) == [e.Closed(200, "", by_peer=True)]
    assert server.data_to_send() == CLOSE
    assert server.deadline() == 15
    assert server.timed_out(15)
    server.tick(16)
    assert server.data_to_send() == b""


BROKEN: Final = b"\0\3\x0e\1\xcd"


def broken(server: ServerConnection, more: bytes = b"") -> None:
    (closed,) = server.receive_data(BROKEN + more, 1)
    assert closed == e.Closed(501, "a frame ends with 0xcd", by_peer=False)
    assert kinds(server.data_to_send()) == ["connection.close"]


def test_broken_frames_end_the_connection() -> None:
    """2.2: what is behind a broken frame is not read, and after 5 s the answer is not waited for any more."""
    server = queue_wire().server
    broken(server)
    assert server.receive_data(encode_command(m.ConnectionPing(respond=True)) + b"\xce", 2) == []
    server.close()
    assert server.data_to_send() == b""
    assert (server.closed, server.unanswered, server.deadline()) == (False, True, 6)
    assert not server.timed_out(5.9)
    assert server.timed_out(6)


@pytest.mark.parametrize("text", ["", "as you wish", "x" * 255])
@pytest.mark.parametrize(
    "before", [b"", b"\xce", encode_command(m.ChannelAck(1, 0, 9)) + b"\0\1", bytes(300)]
)
def test_behind_broken_frames_the_answer_is_still_heard(before: bytes, text: str) -> None:
    """3.2.9: a CLOSE is answered by CLOSE, which is the last of what a peer says."""
    answer = encode_command(m.ConnectionClose(200, text))
    for size in (1, 4, 1_000):
        server = queue_wire().server
        broken(server)
        said = before + answer
        for at in range(0, len(said), size):
            assert not server.closed
            assert server.receive_data(said[at : at + size], 1) == []
        assert server.closed
        assert server.data_to_send() == b""
    resolved = queue_wire().server
    broken(resolved, before + answer)
    assert resolved.closed


@pytest.mark.parametrize(
    "said", [b"\xce", CLOSE[:-1] + b"\xcd", CLOSE[1:], CLOSE + b"\xce", encode_command(m.ChannelClose(1))]
)
def test_what_is_no_answer_behind_broken_frames(said: bytes) -> None:
    server = queue_wire().server
    broken(server)
    assert server.receive_data(said, 2) == []
    assert server.unanswered


def test_an_unknown_command_leaves_the_stream_in_step() -> None:
    server = queue_wire().server
    (closed,) = server.receive_data(b"\0\3\x0f\1\xce" + CLOSE, 1)
    assert isinstance(closed, e.Closed)
    assert closed.reply_code == ReplyCode.FRAMING_ERROR
    assert server.closed


def test_a_client_that_was_never_connected() -> None:
    server = ServerConnection()
    server.close()
    assert server.closed
    assert server.deadline() is None


# --- heartbeats


def test_pings() -> None:
    """3.5: PING(0) when nothing else was sent; PING(1) after two silent intervals, then one more."""
    wire = Wire(ServerConnection(heartbeat=10), new_client(heartbeat=4))
    wire.move()
    server = wire.server
    assert server.deadline() == 2
    server.tick(1.9)
    assert server.data_to_send() == b""  # something was said within half of the interval
    for now in (2, 4, 6):
        server.tick(now)
        assert server.data_to_send() == PING
        server.tick(now + 1.9)
        assert server.data_to_send() == b""
    server.tick(19)
    server.data_to_send()
    server.tick(20)
    assert server.data_to_send() == PING_RESPOND
    assert not server.timed_out(29.9)
    assert server.timed_out(30)
    server.receive_data(PING, 29)
    assert not server.timed_out(40)
    server.excuse(100)
    assert not server.timed_out(119)


def test_a_ping_is_answered_ahead_of_what_is_queued() -> None:
    wire = queue_wire()
    wire.server.send(m.HandleCreated(1, "t"))
    wire.server.receive_data(PING_RESPOND + PING, 0)
    assert kinds(wire.server.data_to_send()) == ["connection.ping", "handle.created"]


@pytest.mark.parametrize("state", ["start", "tuned", "active"])
def test_a_ping_at_any_time(state: str) -> None:
    if state == "active":
        server = open_wire().server
    else:
        server = ServerConnection()
        server.receive_data(b"\x80\1", 0)
        if state == "tuned":
            server.receive_data(encode_command(m.ConnectionResponse("PLAIN")), 0)
            server.tune()
            server.receive_data(encode_command(m.ConnectionTune(4096)), 0)
    server.data_to_send()
    assert server.receive_data(PING_RESPOND, 0) == []
    assert server.data_to_send() == PING


def test_a_listener_without_heartbeat_never_pings() -> None:
    """12: an unexpected PING breaks the Java client of 2005."""
    wire = Wire(ServerConnection(heartbeat=0), new_client(heartbeat=1))
    wire.move()
    assert wire.server.deadline() is None
    wire.server.tick(1000)
    assert wire.server.data_to_send() == b""
    assert not wire.server.timed_out(1000)
    assert wire.client.deadline() == 2, "its client asks whether it lives"
    wire = Wire(ServerConnection(heartbeat=0), new_client(heartbeat=1, pings=False))
    wire.move()
    assert wire.client.deadline() is None, "unless the server cannot bear that"

"""Bodies that are not held: they go to a sink, by either side, however they are cut and interleaved."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from gateway.errors import RemoteProtocolError
from gateway.model.spooled_bodies import DiscardedBody, DiscardingSink
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import encode_frame, encode_method_frame
from gateway.protocols.amqp091.sender import Deliverer
from gateway.protocols.amqp091.spec import ReplyCode
from tests.protocols.amqp091.test_connection import KEY, RAW, publish_bytes
from tests.protocols.amqp091.wires import Wire, heard, new_client, open_wire

HELD = 1_000
ROOM = 5_000


class Shelf:
    """Sinks, and what went to them: `room` bytes in all."""

    def __init__(self) -> None:
        self.room = ROOM
        self.sinks: list[Sink] = []

    def sink(self, size: int) -> Sink:
        self.sinks.append(Sink(self, size))
        return self.sinks[-1]


class Sink:
    def __init__(self, shelf: Shelf, size: int) -> None:
        self.shelf = shelf
        self.size = size
        self.data = b""

    def write(self, data: bytes) -> None:
        self.shelf.room -= len(data)
        if self.shelf.room < 0:
            raise RemoteProtocolError("PRECONDITION_FAILED - full", reason=ReplyCode.PRECONDITION_FAILED)
        self.data += data

    def finish(self) -> bytes:
        assert len(self.data) == self.size
        return self.data


def shelved(channels: int = 1) -> tuple[Wire, Shelf]:
    shelf = Shelf()
    return open_wire(channels, message_bytes_max=100_000, held_bytes_max=HELD, sink=shelf.sink), shelf


def pieces(number: int, body: bytes, size: int) -> list[bytes]:
    """A message whose body comes in frames of `size` bytes."""
    whole = publish_bytes(number, KEY, body)
    head = whole[: len(whole) - len(body) - 8]
    return [head] + [encode_frame(3, number, body[at : at + size]) for at in range(0, len(body), size)]


@pytest.mark.parametrize("size", [1, 7, HELD + 1, 4_000])
def test_only_what_is_too_large_goes_there(size: int) -> None:
    wire, shelf = shelved()
    large = bytes(range(256)) * 10
    data = publish_bytes(1, KEY, bytes(HELD)) + b"".join(pieces(1, large, size))
    events = heard(wire.server, data + publish_bytes(1, KEY, b"x"))
    found = [e.Publishes, e.LargePublish, e.Publishes]
    assert [type(event) for event in events] == found
    (before, one, after) = events
    assert isinstance(before, e.Publishes)
    assert isinstance(one, e.LargePublish)
    assert isinstance(after, e.Publishes)
    assert [len(before.contents[0][3]), one.content[3], after.contents[0][3]] == [HELD, large, b"x"]
    assert one.content[:3] == after.contents[0][:3]
    assert len(shelf.sinks) == 1
    assert wire.server.begun_bytes == 0


def test_channels_have_sinks_of_their_own() -> None:
    wire, shelf = shelved(2)
    bodies = [b"a" * 2_000, b"b" * 1_500]
    parts = zip_longest(pieces(1, bodies[0], 300), pieces(2, bodies[1], 300), fillvalue=b"")
    events = heard(wire.server, b"".join(one + other for one, other in parts))
    assert sorted(event.content[3] for event in events if isinstance(event, e.LargePublish)) == bodies
    assert [sink.data for sink in shelf.sinks] == bodies


def test_a_sink_that_is_full_costs_the_channel_and_no_other() -> None:
    wire, shelf = shelved(2)
    shelf.room = 2_000
    events = heard(wire.server, b"".join(pieces(1, bytes(3_000), 700)) + publish_bytes(2, KEY, b"y"))
    closed = [event for event in events if isinstance(event, e.ChannelClosed)]
    assert [(event.channel, event.reply_code) for event in closed] == [(1, 406)]
    (publishes,) = [event for event in events if isinstance(event, e.Publishes)]
    assert [content[0] for content in publishes.contents] == [2]
    assert wire.server.begun_bytes == 0


def test_a_body_longer_than_announced_is_a_fault() -> None:
    wire, _ = shelved()
    head = pieces(1, bytes(2_000), 2_000)[0]
    events = heard(wire.server, head + encode_frame(3, 1, bytes(1_500)) + encode_frame(3, 1, bytes(501)))
    (closed,) = events
    assert isinstance(closed, e.Closed)
    assert closed.reply_code == ReplyCode.FRAME_ERROR


def test_a_client_passes_over_what_is_too_large() -> None:
    wire = Wire(client=new_client(message_bytes_max=HELD, sink=DiscardingSink))
    wire.move()
    wire.client.open_channel()
    wire.move()
    wire.take()
    deliverer = Deliverer(wire.server, 1, "t")
    bodies = [b"before", bytes(300_000), b"after"]
    deliverer.deliver_many(1, [(False, b"\0\1k", RAW, body) for body in bodies])
    (event,) = heard(wire.client, wire.server.data_to_send())
    assert isinstance(event, e.Deliveries)
    first, passed, last = [row[6] for row in event.contents]
    assert (first, last) == (b"before", b"after")
    assert isinstance(passed, DiscardedBody)
    assert (len(passed), passed.size) == (0, 300_000)
    assert wire.client.begun_bytes == 0


def test_a_method_in_the_midst_of_it_ends_the_connection() -> None:
    wire, _ = shelved()
    data = b"".join(pieces(1, bytes(2_000), 700)[:-1])
    (closed,) = heard(wire.server, data + encode_method_frame(1, m.TxSelect()))
    assert isinstance(closed, e.Closed)
    assert closed.reply_code == ReplyCode.UNEXPECTED_FRAME
    assert wire.server.begun_bytes == 0

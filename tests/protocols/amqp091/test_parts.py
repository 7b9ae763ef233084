"""Large body frames, which are taken as they come: wherever they are cut, and whatever happens meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.model.spooled_bodies import APART_BYTES_MIN, Piece
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091.codec import encode_frame
from gateway.protocols.amqp091.connection import PARTS_BYTES_MIN
from gateway.protocols.amqp091.sender import Deliverer, Publisher
from gateway.protocols.amqp091.spec import ReplyCode
from tests.protocols.amqp091.test_connection import KEY, RAW, publish_bytes
from tests.protocols.amqp091.wires import Wire, heard, open_wire

FRAME = 131_072
BODY = bytes(range(256)) * 160  # 40 960 bytes
LONG = BODY * 7  # three frames


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """What lies between these places."""
    places = [0, *at, len(data)]
    return [data[one:other] for one, other in pairwise(places)]


def owner(piece: Piece) -> object:
    """Whose bytes these are."""
    return piece.obj if isinstance(piece, memoryview) else piece


def bodies(events: list[e.Event]) -> list[tuple[int, bytes]]:
    """Of what was published: channel and body."""
    found = [row for event in events if isinstance(event, e.Publishes) for row in event.contents]
    return [(row[0], row[3]) for row in found]


def told(wire: Wire, parts: list[bytes]) -> list[e.Event]:
    return [event for part in parts for event in heard(wire.server, part)]


def test_a_message_may_be_cut_anywhere() -> None:
    """In its heads byte by byte, around the ends of its frames, and in between."""
    data = publish_bytes(1, KEY, LONG) + publish_bytes(1, KEY, b"next")
    head = len(publish_bytes(1, KEY, b"x")) - 9
    ends = [head + FRAME * number for number in (0, 1, 2)] + [head + 24 + len(LONG)]
    around = [end + at for end in ends for at in range(-10, 11)]
    places = sorted({*range(head + 12), *around, 70_000, 200_000})
    for at in places:
        wire = open_wire()
        found = bodies(told(wire, cut(data, [at])))
        assert found == [(1, LONG), (1, b"next")], at
        assert wire.server.begun_bytes == 0
        assert wire.server.body_bytes_remaining == 0


@pytest.mark.parametrize("step", [1_000, 4_095, 20_000, 65_536])
def test_in_steps(step: int) -> None:
    data = publish_bytes(1, KEY, LONG) + publish_bytes(1, KEY, BODY) + publish_bytes(1, KEY, b"next")
    wire = open_wire()
    found = bodies(told(wire, cut(data, list(range(step, len(data), step)))))
    assert found == [(1, LONG), (1, BODY), (1, b"next")]
    assert wire.server.begun_bytes == 0


def test_what_is_there_counts_as_begun_and_what_is_announced_as_due() -> None:
    wire = open_wire()
    data = publish_bytes(1, KEY, BODY)
    heard(wire.server, data[:20_000])
    assert 19_000 < wire.server.begun_bytes <= 20_000
    assert wire.server.body_bytes_remaining == len(BODY)
    heard(wire.server, data[20_000:30_000])
    assert 29_000 < wire.server.begun_bytes <= 30_000
    heard(wire.server, data[30_000:])
    assert (wire.server.begun_bytes, wire.server.body_bytes_remaining) == (0, 0)


def test_a_frame_that_does_not_end_as_one_ends_the_connection_and_tells_nothing() -> None:
    data = publish_bytes(1, KEY, BODY)
    for parts in (cut(data[:-1] + b"\0", [30_000]), [data[:-1], b"\0" + data]):
        wire = open_wire()
        (closed,) = told(wire, parts)
        assert isinstance(closed, e.Closed)
        assert closed.reply_code == ReplyCode.FRAME_ERROR
        assert wire.server.closed


def test_more_than_announced_is_a_fault_like_that_of_a_frame_that_is_whole() -> None:
    head = publish_bytes(1, KEY, BODY)[: -len(BODY) - 8]
    long = encode_frame(3, 1, BODY + b"x")
    for parts in ([head + long], cut(head + long, [30_000])):
        wire = open_wire()
        (closed,) = told(wire, parts)
        assert isinstance(closed, e.Closed)
        assert closed.reply_code == ReplyCode.FRAME_ERROR


def test_the_rest_is_passed_over_when_the_channel_is_closed_meanwhile() -> None:
    wire = open_wire(2)
    data = publish_bytes(1, KEY, BODY)
    heard(wire.server, data[:30_000])
    wire.server.close_channel(1, ReplyCode.PRECONDITION_FAILED, "no")
    assert wire.server.begun_bytes == 0
    events = told(wire, [data[30_000:35_000], data[35_000:] + publish_bytes(2, KEY, b"other")])
    assert bodies(events) == [(2, b"other")]
    assert (wire.server.begun_bytes, wire.server.ending) == (0, False)


def test_the_rest_is_passed_over_when_the_connection_is_closed_meanwhile() -> None:
    wire = open_wire()
    data = publish_bytes(1, KEY, BODY)
    heard(wire.server, data[:30_000])
    wire.server.close(ReplyCode.CONNECTION_FORCED, "no")
    assert told(wire, [data[30_000:] + data]) == []
    assert wire.server.begun_bytes == 0


def test_too_much_that_is_unfinished_is_refused_in_the_midst_of_a_frame() -> None:
    wire = open_wire(8, message_bytes_max=50_000)
    size = 50_000
    for number in range(1, 8):
        head = publish_bytes(number, KEY, bytes(size))[: -size - 8]
        assert heard(wire.server, head + encode_frame(3, number, bytes(45_000))) == []
    data = publish_bytes(8, KEY, bytes(size))
    assert heard(wire.server, data[:10_000]) == []
    events = heard(wire.server, data[10_000:30_000])
    (closed,) = events
    assert isinstance(closed, e.Closed)
    assert closed.reply_code == ReplyCode.RESOURCE_ERROR


def test_a_small_part_of_what_came_does_not_keep_the_rest_in_memory() -> None:
    wire = open_wire()
    messages = b"".join(publish_bytes(1, KEY, bytes(200)) for _ in range(300))
    heard(wire.server, messages + publish_bytes(1, KEY, BODY)[:12_000])
    body = wire.server._channels[1].body
    assert body is not None
    assert all(isinstance(part, bytes | bytearray) and len(part) < 12_000 for part in body._parts)


@pytest.mark.parametrize("size", [APART_BYTES_MIN, 100_000, 131_064, 131_065, 300_000])
def test_a_large_body_is_sent_without_a_copy(size: int) -> None:
    """In a piece of its own, again and again, and beside small ones."""
    wire = open_wire()
    body = bytes(size)
    deliverer = Deliverer(wire.server, 1, "t")
    publisher = Publisher(wire.client, 1)
    for _ in range(2):
        deliverer.deliver_many(1, [(False, b"\0\1k", RAW, body)])
        publisher.publish_many([(KEY.wire, RAW, body)])
        for side in (wire.server, wire.client):
            pieces = side.to_send()
            assert isinstance(pieces, list)
            assert sum(len(piece) for piece in pieces if owner(piece) is body) == size
    for _ in range(2):
        deliverer.deliver_many(1, [(False, b"\0\1k", RAW, b"small")])
        pieces = wire.server.to_send()
    assert isinstance(pieces, bytes)


def test_what_is_sent_in_pieces_arrives() -> None:
    wire = open_wire()
    deliverer = Deliverer(wire.server, 1, "t")
    sent = [b"before", LONG, BODY, b"after", BODY]
    deliverer.deliver_many(1, [(False, b"\0\1k", RAW, body) for body in sent])
    events = heard(wire.client, wire.server.data_to_send())
    assert [row[6] for event in events if isinstance(event, e.Deliveries) for row in event.contents] == sent
    assert len(BODY) > PARTS_BYTES_MIN

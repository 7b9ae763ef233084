"""Long fragments: passed on as they come, written without being joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import encode_command
from gateway.protocols.amqpfast.sender import Producer, Transfer
from gateway.protocols.amqpfast.spec import PARTIAL
from tests.protocols.amqpfast.test_fragments import bodies, closes_channel, closes_handle, part
from tests.protocols.amqpfast.wires import HEAD, Wire, queue_wire

LONG = bytes(range(251)) * 400  # of a fragment: more than is gathered before it is passed on


@pytest.mark.parametrize("read", [1_000, 15_000, 20_000, 70_000, 262_144])
def test_a_long_fragment_is_passed_on_as_it_comes(read: int) -> None:
    wire = queue_wire(frame_max=131_072)
    body = LONG * 2 + b"end"
    data = (
        encode_command(m.HandleSend(1, 0, len(HEAD) + 4 + 5, partial=True))
        + len(body).to_bytes(4, "big")
        + HEAD
        + body[:5]
        + part(1, body[5 : len(LONG)], partial=True)
        + part(1, body[len(LONG) : -3], partial=True)
        + part(1, b"end", 9)
        + part(1, (5).to_bytes(4, "big") + HEAD + b"small")
    )
    found: list[e.Event] = []
    held = 0
    for at in range(0, len(data), read):
        found += wire.server.receive_data(data[at : at + read], 0)
        held = max(held, wire.server.begun_bytes)
    assert held <= 16_384 + read
    assert bodies(found) == [(HEAD, body, b""), (HEAD, b"small", b"")]
    fragments = [event for event in found if isinstance(event, e.Fragment)]
    assert [event.tag for event in fragments if event.last] == [9]
    assert not any(event.tag for event in fragments if not event.last)
    assert all(event.bits & PARTIAL for event in fragments if not event.last)


@pytest.mark.parametrize("close", [closes_handle, closes_channel])
def test_what_still_comes_of_a_fragment_whose_handle_was_closed_is_passed_over(
    close: Callable[[Wire], None],
) -> None:
    wire = queue_wire(frame_max=131_072)
    wire.server.receive_data(
        encode_command(m.HandleSend(1, 0, len(HEAD) + 4, partial=True))
        + (2 * len(LONG)).to_bytes(4, "big")
        + HEAD,
        0,
    )
    data = part(1, LONG, partial=True)
    assert wire.server.receive_data(data[:50_000], 0)
    close(wire)
    ping = encode_command(m.ConnectionPing(True))
    assert wire.server.receive_data(data[50_000:] + ping, 0) == []
    assert wire.server.sent[m.ConnectionPing.type] == 1


def test_a_long_fragment_too_many_is_refused_before_it_has_come() -> None:
    wire = queue_wire(frame_max=131_072)
    wire.server.receive_data(
        encode_command(m.HandleSend(1, 0, len(HEAD) + 4, partial=True)) + (10).to_bytes(4, "big") + HEAD, 0
    )
    data = part(1, LONG, partial=True)
    (event,) = wire.server.receive_data(data[:20], 0)
    assert isinstance(event, e.HandleClosed)
    assert event.reply_code == 542
    assert wire.server.receive_data(data[20:] + encode_command(m.ConnectionPing(True)), 0) == []


def test_large_parts_of_a_body_leave_without_being_joined() -> None:
    wire = queue_wire(frame_max=131_072)
    body = memoryview(LONG)
    transfer = Transfer(wire.client, 1, HEAD, len(body) + 3)
    transfer.write(body)
    wire.client.receive_data(encode_command(m.ConnectionPing(True)), 0)
    transfer.write(b"end", last=True)
    pieces = wire.client.pieces_to_send()
    assert [piece is body for piece in pieces] == [False, True, False]
    assert wire.client.pieces_to_send() == []
    events = [event for piece in pieces for event in wire.server.receive_data(bytes(piece), 0)]
    assert bodies(events) == [(HEAD, LONG + b"end", b"")]


@pytest.mark.needs("time")
@settings(max_examples=30)
@given(st.lists(st.integers(1, 150_000), max_size=20), st.integers(1, 60_000))
def test_however_the_stream_is_split_the_bodies_are_the_same(sizes: list[int], rest: int) -> None:
    wire = queue_wire(2, frame_max=131_072)
    bodies_sent = [LONG, LONG * 2 + b"!", b"short", LONG[:16_384]]
    rows = [(b"n", HEAD, body) for body in bodies_sent]
    tags = Producer(wire.client, 1, confirm=True).send_many(rows)
    data = wire.client.data_to_send()
    found: list[e.Event] = []
    at = 0
    for size in [*sizes, *[rest] * (len(data) // rest + 1)]:
        found += wire.server.receive_data(data[at : at + size], 0)
        at += size
    assert bodies(found) == [(HEAD, body, b"n") for body in bodies_sent]
    told = [event.tag for event in found if isinstance(event, e.Fragment) and event.last]
    told += [row[1] for event in found if isinstance(event, e.Sends) for row in event.rows]
    assert sorted(told) == tags

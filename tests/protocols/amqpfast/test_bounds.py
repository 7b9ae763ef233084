"""What one client can cause at once is bounded: commands of one call, headers and bytes of one head."""

from __future__ import annotations

import pytest

from gateway.model.properties import string
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import Head, encode_command, encode_head_properties
from gateway.protocols.amqpfast.connection import STEPS_MAX
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import ReplyCode
from tests.protocols.amqpfast.wires import queue_wire

READ = 65_536


def send(head: bytes, body: bytes = b"x", partial: bool = False) -> bytes:
    fragment = (len(body) + partial).to_bytes(4, "big") + head + body
    return encode_command(m.HandleSend(1, 0, len(fragment), partial=partial)) + fragment


def head(count: int, value: str = "", name: str = "n") -> bytes:
    return encode_head_properties(Head(headers=tuple((f"{name}{at}", string(value)) for at in range(count))))


FLOODS = {
    "pings": encode_command(m.ConnectionPing(True)),
    "channels": encode_command(m.ChannelOpen(2)) + encode_command(m.ChannelClose(2)),
    "browses": encode_command(m.HandleFlow(1, False)),
    "header tables": b"".join(send(head(100, name=f"n{at}x")) for at in range(20)),
}


def calls(server: ServerConnection, data: bytes) -> list[list[e.Event]]:
    found = [server.receive_data(data, 1.0)]
    while server.unread:
        found.append(server.receive_data(b"", 1.0))
    return found


@pytest.mark.parametrize("name", FLOODS)
def test_one_call_does_only_so_much_and_nothing_is_lost(name: str) -> None:
    server = queue_wire().server
    packet = FLOODS[name]
    count = READ // len(packet)
    before = sum(server.received)
    server.receive_data(packet * count, 1.0)
    most = counted = sum(server.received) - before
    while server.unread:
        server.data_to_send()  # a channel's number is free again when its close has been answered
        server.receive_data(b"", 1.0)
        most = max(most, sum(server.received) - before - counted)
        counted = sum(server.received) - before
    each = {"channels": 2, "header tables": 20}.get(name, 1)
    assert counted == count * each
    assert most <= STEPS_MAX + 3


def test_usual_messages_are_all_taken_by_one_call() -> None:
    packet = send(head(1, "v"), bytes(100))
    assert len(calls(queue_wire().server, packet * (READ // len(packet)))) == 1


def test_how_the_stream_is_split_and_the_work_divided_changes_nothing() -> None:
    data = b"".join(FLOODS[name] * 20 for name in ("pings", "browses", "header tables"))
    whole, apart = queue_wire().server, queue_wire().server
    all_at_once = [event for events in calls(whole, data) for event in events]
    in_pieces: list[e.Event] = []
    for at in range(0, len(data), 1_000):
        for events in calls(apart, data[at : at + 1_000]):
            in_pieces += events
    assert flat(all_at_once) == flat(in_pieces)
    assert whole.received == apart.received


def flat(events: list[e.Event]) -> list[object]:
    return [row for event in events for row in (getattr(event, "rows", None) or [event])]


@pytest.mark.parametrize("partial", [False, True])
def test_a_head_with_more_than_we_take_costs_its_handle(partial: bool) -> None:
    for data, taken in ((head(50), True), (head(51), False), (head(1, "v" * 1_001), False)):
        server = queue_wire(properties_max=50, properties_bytes_max=1_000).server
        [event] = server.receive_data(send(data, partial=partial), 0.0)
        if taken:
            assert isinstance(event, e.Sends | e.Fragment)
        else:
            assert isinstance(event, e.HandleClosed)
            assert event.reply_code == ReplyCode.MESSAGE_CONTENTS_INVALID


def test_a_prepared_head_is_held_to_the_same() -> None:
    server = queue_wire(channel={"restartable": True}, properties_max=50).server
    fragment = (5).to_bytes(4, "big") + head(51)
    [event] = server.receive_data(encode_command(m.HandlePrepare(1, len(fragment))) + fragment, 0.0)
    assert isinstance(event, e.HandleClosed)


def test_a_large_fragment_in_single_bytes_is_gathered_and_not_copied_each_time() -> None:
    server = queue_wire(frame_max=200_000).server
    data = send(head(0), bytes(100_000))
    for at in range(100):
        server.receive_data(data[at : at + 1], 0.0)
    gathered = server._rest
    for at in range(100, 5_000):
        assert server.receive_data(data[at : at + 1], 0.0) == []
    assert server._rest is gathered
    [event] = server.receive_data(data[5_000:], 0.0)
    assert isinstance(event, e.Sends)
    assert event.rows[0][3] == bytes(100_000)

"""What one client can cause at once is bounded: packets of one call, properties and filters of one packet."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.connection import ROWS_MAX, RUN_BYTES, STEPS_MAX, Connection, State
from gateway.protocols.mqtt.data_types import Bounds
from gateway.protocols.mqtt.packets import (
    Ack,
    Connect,
    Event,
    Packet,
    Publish,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.protocols.mqtt.spec import Property as P
from gateway.protocols.mqtt.translate import publish_essentials
from gateway.protocols.mqtt.writers import encode
from tests.protocols.mqtt.machines import client, server

V5, V311 = Version.V5, Version.V311
READ = 65_536
PING, PUBACK, TINY = b"\xc0\0", b"\x40\2\0\1", b"\x30\4\0\1a\0"
MANY_PAIRS = b"\x26\0\0\0\0" * 100
PAIRS = b"\x30\xf9\x03\0\1a" + b"\xf4\x03" + MANY_PAIRS
FILTERS = encode(Subscribe(1, tuple(Subscription(f"{at:03}") for at in range(100))), V5)
FLOODS = {
    "pings": PING,
    "acknowledgements": PUBACK,
    "acknowledgements in turn": PUBACK + b"\x50\2\0\1",
    "publishes": TINY,
    "publishes between pings": TINY + PING,
    "filters": FILTERS,
    "properties": PAIRS,
}


def done(events: list[Event]) -> int:
    """How many packets, filters and pairs of properties."""
    count = 0
    for event in events:
        if isinstance(event, Subscribe):
            count += len(event.subscriptions)
        elif isinstance(event, Publishes):
            count += sum(max(1, len(row[3]) // 5) for row in event.rows)
        else:
            count += len(event.rows) if isinstance(event, Acks) else 1
    return count


def calls(connection: Connection, data: bytes) -> list[list[Event]]:
    """What each call gives, until there is nothing left."""
    found = [connection.receive_data(data, 1.0)]
    while connection.unread:
        found.append(connection.receive_data(b"", 1.0))
    return found


@pytest.mark.parametrize("name", FLOODS)
def test_one_call_does_only_so_much_and_nothing_is_lost(name: str) -> None:
    packet = FLOODS[name]
    data = packet * (READ // len(packet))
    found = calls(server(State.OPEN, packet_bytes_max=1 << 24), data)
    most = max(done(events) for events in found)
    assert most <= max(10 * STEPS_MAX, ROWS_MAX + RUN_BYTES // 4)
    rows = [row for events in found for event in events for row in getattr(event, "rows", [event])]
    assert len(rows) == len(data) // len(packet) * len(packets_of(packet))


def packets_of(data: bytes) -> list[bytes]:
    at, found = 0, []
    while at < len(data):
        size, start = data[at + 1] & 0x7F, at + 2
        if data[at + 1] > 0x7F:
            size, start = size + (data[at + 2] << 7), at + 3
        found.append(data[at : start + size])
        at = start + size
    return found


def test_usual_messages_are_all_taken_by_one_call() -> None:
    packet = encode(Publish("plant/line1/temperature", bytes(100), 1, packet_id=7), V5)
    assert len(calls(server(State.OPEN), packet * (READ // len(packet)))) == 1


def test_how_the_stream_is_split_and_the_work_divided_changes_nothing() -> None:
    packets = [PING, TINY, PUBACK, FILTERS, PAIRS, encode(Publish("b", bytes(9_000)), V5)] * 40
    data = b"".join(packets)
    whole = [event for events in calls(server(State.OPEN), data) for event in events]
    apart: list[Event] = []
    other = server(State.OPEN)
    for at in range(0, len(data), 1_000):
        for events in calls(other, data[at : at + 1_000]):
            apart += events
    assert flat(whole) == flat(apart)
    assert len(flat(whole)) == len(packets)


def flat(events: list[Event]) -> list[Any]:
    return [row for event in events for row in (getattr(event, "rows", None) or [event])]


def test_what_is_wrong_behind_much_is_told_when_its_turn_has_come() -> None:
    connection = server(State.OPEN)
    first = connection.receive_data(PING * 1_000 + b"\0\0", 1.0)
    assert len(first) <= STEPS_MAX
    heard = len(first)
    while heard < 1_000:
        heard += len(connection.receive_data(b"", 1.0))
    assert connection.pending
    with pytest.raises(RemoteProtocolError):
        connection.receive_data(b"", 1.0)


def test_a_client_of_ours_takes_all_that_its_broker_says() -> None:
    connection = client(State.OPEN)
    connection.receive_data(b"\xd0\0" * 10_000, 1.0)
    assert not connection.unread


# Limits of one packet.

BOUNDS = Bounds(properties_max=5, properties_bytes_max=100, filters_max=3)


def with_pairs(kind: str, count: int, text: str = "v") -> Packet:
    pairs = {P.USER_PROPERTY: (("n", text),) * count}
    match kind:
        case "publish":
            return Publish("t", b"", properties=pairs)
        case "subscribe":
            return Subscribe(1, (Subscription("t"),), pairs)
        case "unsubscribe":
            return Unsubscribe(1, ("t",), pairs)
        case "puback":
            return Ack(PacketType.PUBACK, 1, 0x10, pairs)
        case "will":
            return Connect("c", will=Will("t", b"", properties=pairs))
        case _:
            return Connect("c", properties=pairs)


def bounded(kind: str) -> ServerConnection:
    return server(State.START if kind in ("connect", "will") else State.OPEN, bounds=BOUNDS)


@pytest.mark.parametrize("kind", ["publish", "subscribe", "unsubscribe", "puback", "will", "connect"])
def test_more_properties_than_we_take_are_refused(kind: str) -> None:
    assert bounded(kind).receive_data(encode(with_pairs(kind, 5), V5), 0.0)
    for packet in (with_pairs(kind, 6), with_pairs(kind, 1, "v" * 101)):
        connection = bounded(kind)
        with pytest.raises(RemoteProtocolError) as caught:
            connection.receive_data(encode(packet, V5), 0.0)
        assert caught.value.reason == ReasonCode.QUOTA_EXCEEDED
        connection.fail(caught.value)
        assert bytes((ReasonCode.QUOTA_EXCEEDED,)) in connection.data_to_send()


def test_a_list_that_another_connection_may_send_is_refused_all_the_same() -> None:
    raw = b"\x26\0\1n\0\1v" * 6
    publish_essentials(raw)  # remembered
    with pytest.raises(RemoteProtocolError):
        publish_essentials(raw, 5)


@pytest.mark.parametrize("version", [V5, V311])
def test_more_filters_than_we_take_are_refused(version: Version) -> None:
    for count, taken in ((3, True), (4, False)):
        names = [str(at) for at in range(count)]
        for packet in (Subscribe(1, tuple(map(Subscription, names))), Unsubscribe(1, tuple(names))):
            connection = server(State.OPEN, version, bounds=BOUNDS)
            wire = encode(packet, version)
            if taken:
                assert connection.receive_data(wire, 0.0) == [packet]
                continue
            with pytest.raises(RemoteProtocolError) as caught:
                connection.receive_data(wire, 0.0)
            assert caught.value.reason == ReasonCode.QUOTA_EXCEEDED


def test_only_a_publish_may_be_of_any_size() -> None:
    for first, refused in ((0x82, True), (0xA2, True), (0x40, True), (0x32, False)):
        connection = server(State.OPEN, packet_bytes_max=1 << 24)
        announced = bytes((first,)) + b"\x80\x80\x80\x04"  # 8 MiB will follow
        if not refused:
            assert connection.receive_data(announced, 0.0) == []
            continue
        with pytest.raises(RemoteProtocolError) as caught:
            connection.receive_data(announced, 0.0)
        assert caught.value.reason == ReasonCode.PACKET_TOO_LARGE


def test_many_properties_keep_their_order() -> None:
    pairs = {P.USER_PROPERTY: tuple((str(at), "v") for at in range(5_000))}
    [packet] = server(State.START, connect_bytes_max=1 << 20).receive_data(
        encode(Connect("c", properties=pairs), V5), 0.0
    )
    assert isinstance(packet, Connect)
    assert packet.properties == pairs

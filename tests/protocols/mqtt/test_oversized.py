"""A PUBLISH over the limit in a version that cannot be told of it: known by its head, its body read past."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.packets import Event, Oversized, Publish
from gateway.protocols.mqtt.runs import Publishes
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.protocols.mqtt.writers import encode
from tests.protocols.mqtt.machines import server

LIMIT = 1_000
SIZES = (LIMIT, 3_000, 20_000)
OLD = (Version.MQIPDP, Version.V31, Version.V311)


def wire(version: Version) -> bytes:
    """Messages before, between and behind two that are too large."""
    small = [Publish("s", bytes([number]), 1, packet_id=number + 1) for number in range(3)]
    large = [Publish("l/é", bytes(size), qos, packet_id=qos and 9) for qos, size in enumerate(SIZES)]
    every = (small[0], large[0], large[2], small[1], large[1], small[2])
    return b"".join(encode(one, version) for one in every)


def told(events: list[Event]) -> list[object]:
    found: list[object] = []
    for event in events:
        if isinstance(event, Publishes):
            found += [row[4] for row in event.rows]
        else:
            assert isinstance(event, Oversized)
            found.append((event.publish.topic, event.publish.qos, event.publish.packet_id, event.byte_count))
    return found


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("seed", range(20))
def test_how_the_bytes_come_changes_nothing(version: Version, seed: int) -> None:
    data = wire(version)
    random = Random(seed)
    cuts = sorted(random.sample(range(1, len(data)), seed * 10))
    connection = server(State.OPEN, version, packet_bytes_max=LIMIT)
    events: list[Event] = []
    for start, stop in pairwise([0, *cuts, len(data)]):
        events += connection.receive_data(data[start:stop], 0.0)
        assert connection.begun_bytes < LIMIT, "nothing of it is held"
    assert told(events) == [
        b"\0",
        ("l/é", 0, 0, SIZES[0]),
        ("l/é", 2, 9, SIZES[2]),
        b"\1",
        ("l/é", 1, 9, SIZES[1]),
        b"\2",
    ]
    assert connection.received[PacketType.PUBLISH] == 6


@pytest.mark.parametrize("version", OLD)
def test_byte_by_byte(version: Version) -> None:
    connection = server(State.OPEN, version, packet_bytes_max=LIMIT)
    events: list[Event] = []
    for byte in wire(version):
        events += connection.receive_data(bytes([byte]), 0.0)
    assert len(told(events)) == 6


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"\x30\xff\x7f\x00\x00", ReasonCode.TOPIC_NAME_INVALID),
        (b"\x30\xff\x7f\x00\x01+", ReasonCode.TOPIC_NAME_INVALID),
        (b"\x30\xff\x7f\x00\x01\xff", ReasonCode.MALFORMED_PACKET),
        (b"\x36\xff\x7f\x00\x01a\x00\x01", ReasonCode.MALFORMED_PACKET),
        (b"\x32\xff\x7f\x00\x01a\x00\x00", ReasonCode.PROTOCOL_ERROR),
        (b"\x30\xff\x07\xff\xff" + bytes(1_021), ReasonCode.MALFORMED_PACKET),
        (b"\x82\xff\x7f\x00\x01", ReasonCode.PACKET_TOO_LARGE),
    ],
)
def test_a_head_that_is_none_ends_the_connection(data: bytes, reason: ReasonCode) -> None:
    connection = server(State.OPEN, Version.V311, packet_bytes_max=LIMIT)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(data, 0.0)
    assert caught.value.reason == reason


def test_mqtt_5_was_told() -> None:
    connection = server(State.OPEN, Version.V5, packet_bytes_max=LIMIT)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.receive_data(b"\x30\xff\x7f\x00\x01a", 0.0)
    assert caught.value.reason == ReasonCode.PACKET_TOO_LARGE

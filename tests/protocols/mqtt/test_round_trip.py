"""What is encoded is decoded to the same, whatever it is and however the stream is split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocols.mqtt.codec import decode
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.packets import Ack, Connect, Publish
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.protocols.mqtt.writers import encode
from tests.protocols.mqtt.strategies import packet_id, packets, qos, topic


@pytest.mark.parametrize("version", Version)
@settings(max_examples=150)
@given(st.data())
def test_every_packet(version: Version, data: st.DataObject) -> None:
    packet = data.draw(packets(version))
    wire = encode(packet, version)
    assert decode(wire, version=version) == (packet, len(wire))


def opened(version: Version, **limits: Any) -> ServerConnection:
    connection = ServerConnection(**{"packet_bytes_max": 1 << 20, "topic_alias_max": 65_535, **limits})
    connection.receive_data(encode(Connect("c", version), version), 0.0)
    connection.send_connack()
    connection.data_to_send()
    return connection


def flat(events: list[Any]) -> list[Any]:
    """Events without the borders of runs, which depend on how the stream was split."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, Publishes | Acks):
            found += [(event.kind, row) for row in event.rows]
        else:
            found.append(event)
    return found


@st.composite
def traffic(draw: st.DrawFn, version: Version) -> list[Any]:
    """PUBLISH and acknowledgements, mostly in runs, as a client sends them."""
    v5 = version is Version.V5
    expiry = st.fixed_dictionaries({}, optional={Property.MESSAGE_EXPIRY_INTERVAL: st.integers(0, 9)})
    found: list[Any] = []
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            level = draw(qos)
            body = draw(st.binary(max_size=300))
            number = draw(packet_id) if level else 0
            properties = draw(expiry) if v5 else {}
            found.append(Publish(draw(topic), body, level, False, False, number, properties))
        else:
            kind = draw(st.sampled_from([PacketType.PUBACK, PacketType.PUBREL]))
            reason = draw(st.sampled_from([0, 0x92])) if v5 and kind is PacketType.PUBREL else 0
            found.append(Ack(kind, draw(packet_id), reason))
    return found


@pytest.mark.needs("time")
@pytest.mark.parametrize("version", Version)
@settings(max_examples=100)
@given(st.data())
def test_the_fast_path_says_what_the_codec_says(version: Version, data: st.DataObject) -> None:
    sent = data.draw(traffic(version))
    wire = b"".join(encode(packet, version) for packet in sent)
    expected: list[Any] = []
    for packet in sent:
        if isinstance(packet, Publish):
            raw = encode_list(packet.properties, PacketType.PUBLISH)
            row = (packet.qos << 1, packet.topic.encode(), packet.packet_id, raw, packet.body)
            expected.append((PacketType.PUBLISH, row))
        else:
            expected.append((packet.kind, (packet.packet_id, packet.reason)))
    connection = opened(version)
    assert flat(connection.receive_data(wire, 1.0)) == expected
    assert sum(connection.received) == len(sent) + 1
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=5)))
    pieces = [wire[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    split = opened(version)
    assert flat([event for piece in pieces for event in split.receive_data(piece, 1.0)]) == expected
    dripped = opened(version)
    drops = [wire[at : at + 1] for at in range(len(wire))]
    assert flat([event for drop in drops for event in dripped.receive_data(drop, 1.0)]) == expected
    assert dripped.state is State.OPEN


@pytest.mark.parametrize("version", Version)
@settings(max_examples=60)
@given(st.data())
def test_the_fast_encoder_says_what_the_codec_says(version: Version, data: st.DataObject) -> None:
    sent = [packet for packet in data.draw(traffic(version)) if isinstance(packet, Publish)]
    rows = [
        (
            packet.qos << 1,
            packet.topic.encode(),
            packet.packet_id,
            encode_list(packet.properties, PacketType.PUBLISH),
            packet.body,
        )
        for packet in sent
    ]
    many, single = opened(version), opened(version)
    assert not many.publish_many(rows)
    for flags, name, number, properties, body in rows:
        assert single.publish(name, body, flags >> 1, False, False, number, properties)
    expected = b"".join(encode(packet, version) for packet in sent)
    assert many.data_to_send() == single.data_to_send() == expected
    assert many.sent[PacketType.PUBLISH] == len(sent)

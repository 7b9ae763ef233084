"""Runs of the frequent MQTT packets: one event for all that came in a row, each packet a plain tuple."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.model.spooled_bodies import Body
from gateway.protocols.mqtt.spec import PacketType

PublishRow = tuple[int, bytes, int, bytes, Body]
"""One PUBLISH of the fast path: (flags, topic, packet id, properties, body).

Flags are the low four bits of the first byte (DUP 8, QoS 6, RETAIN 1). The packet id is 0 at QoS 0. The topic
is UTF-8 as received, not yet validated (`decode_topic`). The properties are the property list of MQTT 5
without its length and without a topic alias, already validated; b"" if the packet has none.
"""


@dataclass
class Publishes:
    """Event for consecutive PUBLISH packets, with one row (PublishRow) for each."""

    rows: list[PublishRow]

    @property
    def kind(self) -> PacketType:
        """Packet type of the rows."""
        return PacketType.PUBLISH


@dataclass
class Acks:
    """Event for consecutive acknowledgements of one type; a row is (packet id, reason code)."""

    kind: PacketType
    rows: list[tuple[int, int]]

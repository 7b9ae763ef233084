"""Bursts: PUBLISH packets read together that differ only in packet identifier and body.

Devices that collect values send such packets. Their common properties are checked, and their routing is
looked up, once for all of them. Packets with QoS 2 or RETAIN, and bodies that must be checked for UTF-8,
never form a burst.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.ingress.mqtt.publish_checks import UTF8
from gateway.protocols.mqtt.runs import PublishRow

BURST_MIN: Final = 8  # the check costs more than it saves for fewer packets
_RETAIN_OR_QOS_2: Final = 0b101  # flags of packets that have to be processed one by one


class Burst(NamedTuple):
    """PUBLISH packets that differ only in packet identifier and body; flags and properties are common."""

    flags: int
    properties: bytes
    packet_ids: tuple[int, ...]
    bodies: tuple[bytes, ...]


def burst_in(rows: list[PublishRow], body_max: int) -> Burst | None:
    """Return all of `rows` as a burst, or None if they must be published one by one.

    `body_max` is the largest body, in bytes, of a burst.
    """
    flags, topic, _, raw, _ = rows[0]
    last = rows[-1]
    if flags & _RETAIN_OR_QOS_2 or last[1] != topic or last[3] != raw or (raw and UTF8 in raw):
        return None
    every, topics, packet_ids, raws, bodies = zip(*rows, strict=True)
    count = len(rows)
    if (
        topics.count(topic) != count
        or every.count(flags) != count
        or raws.count(raw) != count
        or max(map(len, bodies)) > body_max
    ):
        return None
    return Burst(flags, raw, packet_ids, bodies)

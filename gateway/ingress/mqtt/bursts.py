"""PUBLISH packets that were read together and differ in nothing but identifier and body, as a device sends
them that has gathered values. What they have in common is decided once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.ingress.mqtt.publish_checks import UTF8
from gateway.protocols.mqtt.packets import PublishRow

BURST_MIN: Final = 8  # fewer do not pay for the look at them
_RETAIN_OR_QOS_2: Final = 0b101  # flags of packets that have to be seen one by one


class Burst(NamedTuple):
    """What is the same in all packets, and, for each, what is not."""

    flags: int
    properties: bytes
    packet_ids: tuple[int, ...]
    bodies: tuple[bytes, ...]


def burst_in(rows: list[PublishRow], body_max: int) -> Burst | None:
    """All of `rows` as a burst; None when they are none, or not all bodies may be taken unseen."""
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

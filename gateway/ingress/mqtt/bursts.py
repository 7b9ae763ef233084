"""PUBLISH packets that were read together and differ in nothing but identifier and body, as a device sends
them that has gathered values. What they have in common is decided once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gateway.broker.dispatcher import RoutingEntry
from gateway.ingress.mqtt.publish_checks import UTF8
from gateway.model.message import NEVER, Message
from gateway.model.properties import NO_PROPERTIES
from gateway.protocols.mqtt.packets import PublishRow
from gateway.protocols.mqtt.translate import publish_essentials

if TYPE_CHECKING:
    from gateway.ingress.mqtt.connection import MqttConnection
    from gateway.ingress.mqtt.ingress import MqttIngress

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


def publish_burst(
    ingress: MqttIngress, connection: MqttConnection, entry: RoutingEntry, burst: Burst
) -> None:
    """Publish what a client sent. Raises RemoteProtocolError for malformed properties."""
    flags, raw, packet_ids, bodies = burst
    property_set, interval, hops = publish_essentials(raw) if raw else (NO_PROPERTIES, None, 0)
    expires = NEVER if interval is None else time.time() + interval
    address, sender, qos = entry.address, connection.sender, flags >> 1 & 3
    durable = qos > 0
    messages = [
        Message(address, body, property_set, qos, durable, False, expires, hops, sender) for body in bodies
    ]
    receipts: list[Any] = [None] * len(messages)
    if qos:
        connection.unsettled += len(messages)
        receipts = [
            (connection, packet_id, qos, message, entry)
            for packet_id, message in zip(packet_ids, messages, strict=True)
        ]
    publish, batch = ingress.dispatcher.publish, ingress.batch
    if not ingress.dispatcher.publish_burst(batch, entry, messages, receipts):
        for message, receipt in zip(messages, receipts, strict=True):
            if not publish(batch, entry, message, receipt):
                ingress.unclaimed(entry, message, receipt)

"""Messages for the tests of the engine."""

from __future__ import annotations

from gateway.model.message import NEVER, Message, Sender
from gateway.model.properties import NO_PROPERTIES, PropertySet
from gateway.protocols.mqtt.dialect import topic_address


def message_of(
    body: bytes = b"",
    topic: str = "a/b",
    *,
    properties: PropertySet = NO_PROPERTIES,
    qos: int = 0,
    retain: bool = False,
    client: str = "",
    expires: float = NEVER,
) -> Message:
    sender = Sender("mqtt", client)
    return Message(topic_address(topic), body, properties, qos, qos > 0, retain, expires, 0, sender)

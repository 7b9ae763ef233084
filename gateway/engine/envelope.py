"""What replicas tell each other of a message, in a header beside what AMQP's properties say for everybody.

A program that speaks AMQP reads and writes properties as ever. A replica finds the header and takes MQTT's
own octets out of it, so that nothing is lost between two replicas, and nothing is translated. Its value:

| octets | what |
|---|---|
| 1 | version, 1 |
| 1 | flags: 0 and 1 QoS, 2 retain, 3 expires, 4 and 5 of earlier versions, 6 MQTT's properties, 7 numbered |
| 1 | hops |
| 2, n | length of the publisher's client identifier, and that |
| 8 | if flagged: when it expires, in milliseconds UTC |
| 8, 8 | for each flag of earlier versions: passed over |
| 8, 8 | if flagged: a life of its publisher's replica, and the number that the message has there |
| rest | if flagged: the property list of its PUBLISH |

A header of a later version, which another replica may have while all are being replaced, is passed over: then
the message is what its AMQP properties say.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError
from gateway.model.message import NEVER, Message, Sender
from gateway.model.properties import NO_PROPERTIES, PropertySet, ValueType
from gateway.protocols.amqp091.codec import (
    U32,
    decode_properties,
    encode_short_string,
)
from gateway.protocols.amqp091.translate import (
    ENGINE_HEADER,
    EXPIRATION_MS_MAX,
    content_properties,
    encode_properties,
    essentials,
    with_pair,
    without_orders,
)
from gateway.protocols.mqtt.dialect import MQTT
from gateway.protocols.mqtt.translate import publish_essentials

VERSION: Final = 1
QOS: Final = 0x03
RETAIN: Final = 0x04
EXPIRES: Final = 0x08
EARLIER: Final = (0x10, 0x20)
LISTED: Final = 0x40
NUMBERED: Final = 0x80
HEAD: Final = Struct(">BBBH")
U64: Final = Struct(">Q")
NUMBER: Final = Struct(">8sQ")
LIFE_OCTETS: Final = 8
PAIR: Final = encode_short_string(ENGINE_HEADER) + b"x"
HOPS_MAX: Final = 0xFF
ENGINE: Final = "engine"


Number = tuple[bytes, int]
"""A life of a replica, and what that has counted. A message has the same one however often it comes."""


class Arrived(NamedTuple):
    """What a delivery says besides its address and body.

    `lifetime` is in seconds from now, for whoever said no `expires`.
    """

    property_set: PropertySet
    qos: int
    durable: bool
    retain: bool
    expires: float
    lifetime: float
    hops: int
    sender: Sender
    number: Number | None = None


def encode(
    message: Message,
    utc: float,
    *,
    number: Number | None = None,
    correction: float = 0.0,
) -> bytes:
    """The octets of a content header, from the flags on, for a message of any protocol. `utc` is in seconds,
    and `correction` what is subtracted from times of this process to have those of the cluster.

    Raises RemoteProtocolError for property octets that its sender malformed.
    """
    property_set = message.property_set
    raw = property_set.raw if property_set.protocol == MQTT.name else b""
    client = message.sender.client.encode()
    flags = message.assurance
    tail = b""
    if message.retain:
        flags |= RETAIN
    if message.expires:
        flags |= EXPIRES
        tail += U64.pack(max(0, int((message.expires - correction) * 1000)))
    if number is not None:
        flags |= NUMBERED
        tail += NUMBER.pack(*number)
    if raw or property_set is NO_PROPERTIES:
        flags |= LISTED
        tail += raw
    value = HEAD.pack(VERSION, flags, min(message.hops, HOPS_MAX), len(client)) + client + tail
    # Replicas find what the cluster would obey among MQTT's octets all the same.
    harmless = without_orders(encode_properties(message, utc, ms_max=EXPIRATION_MS_MAX))
    return with_pair(harmless, PAIR + U32.pack(len(value)) + value)


def decode(raw: bytes) -> Arrived:
    """What the octets of a content header say. Raises RemoteProtocolError for those that are none."""
    own = b""
    for name, value in decode_properties(raw).headers or ():
        if name == ENGINE_HEADER and value.type is ValueType.BYTES:
            own = value.value
    found = _decode_own(own) if own[:1] == bytes((VERSION,)) else None
    if found is not None:
        property_set = found.property_set
        return found._replace(property_set=content_properties(raw)) if property_set is _FOREIGN else found
    property_set = content_properties(raw)
    durable, expiration, retain, hops, _ = essentials(property_set)
    lifetime = 0.0 if expiration is None else max(expiration, 1) / 1000
    sender = Sender(ENGINE)
    return Arrived(property_set, int(durable), durable, retain, NEVER, lifetime, hops, sender)


_FOREIGN: Final = PropertySet("none", b"")  # the properties are those of AMQP


def _decode_own(own: bytes) -> Arrived | None:
    """None: it is cut short, or its list is none."""
    expires = NEVER
    number: Number | None = None
    try:
        _, flags, hops, size = HEAD.unpack_from(own)
        at = HEAD.size + size
        client = own[HEAD.size : at].decode()
        if flags & EXPIRES:
            expires = U64.unpack_from(own, at)[0] / 1000
            at += 8
        at += 8 * sum([flags & flag > 0 for flag in EARLIER])
        if flags & NUMBERED:
            life, count = NUMBER.unpack_from(own, at)
            number = (life, count)
            at += NUMBER.size
        property_set = publish_essentials(own[at:]) if flags & LISTED else _FOREIGN
    except (StructError, UnicodeDecodeError, RemoteProtocolError):
        return None
    if flags & LISTED and at == len(own):
        property_set = NO_PROPERTIES
    qos = min(flags & QOS, 2)
    sender = Sender(ENGINE, client)
    retain = flags & RETAIN != 0
    return Arrived(property_set, qos, qos > 0, retain, expires, 0.0, hops, sender, number)

"""Private AMQP header in which replicas pass on what AMQP's standard properties cannot express.

An AMQP program reads and writes properties as usual. A replica finds the header and takes the unchanged MQTT
bytes out of it, so that between two replicas nothing is lost or translated. The value of the header:

| bytes | content |
|---|---|
| 1 | version, 1 |
| 1 | flags by bit: 0 and 1 QoS, 2 retain, 3 expires, 4 not of an MQTT client, 6 MQTT properties, 7 numbered |
| 1 | hops |
| 2, n | length of the publisher's client identifier, and the identifier |
| 8 | if flagged: expiry time, in milliseconds UTC |
| 8, 8 | if flagged: id of the publisher's replica process, and the number that the message has there |
| rest | if flagged: the property list of the PUBLISH packet |

A header of a later version is ignored, which another replica may use during an update: then the message has
its AMQP properties only.
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
OTHER: Final = 0x10  # not set by earlier versions
LISTED: Final = 0x40
NUMBERED: Final = 0x80
HEAD: Final = Struct(">BBBH")
U64: Final = Struct(">Q")
NUMBER: Final = Struct(">8sQ")
LIFE_BYTES: Final = 8
PAIR: Final = encode_short_string(ENGINE_HEADER) + b"x"
HOPS_MAX: Final = 0xFF
ENGINE: Final = "engine"
ENGINE_OTHER: Final = "engine, other"  # endpoint of senders that are no clients of MQTT listeners


Number = tuple[bytes, int]
"""Random id (8 bytes) of a replica process, and the number that it gave to a message.

A message has the same number however often it arrives.
"""


class MessageHeader(NamedTuple):
    """Decoded content header of a received message.

    `expires` is in seconds UTC by the cluster's clock. `lifetime` is in seconds from now and used for
    messages without `expires`; 0.0 means no limit. `number` is the message's number at QoS 2. The endpoint of
    `sender` is ENGINE if its client identifier is one of an MQTT listener, otherwise ENGINE_OTHER.
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
    is_other: bool = False,
) -> bytes:
    """Return the content header of a message of any protocol, from the property flags on.

    `utc` is the present time in seconds. `correction` (seconds) is subtracted from times of this process to
    get those of the cluster. `number` is added if it is not None. `is_other` is True if no client of an MQTT
    listener has sent the message. Raises RemoteProtocolError if the sender's property bytes are malformed.
    """
    property_set = message.property_set
    raw = property_set.raw if property_set.protocol == MQTT.name else b""
    client = message.sender.client.encode()
    flags = message.assurance
    tail = b""
    if message.retain:
        flags |= RETAIN
    if is_other:
        flags |= OTHER
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
    # Replicas read properties that the cluster would act on from the MQTT bytes instead.
    harmless = without_orders(encode_properties(message, utc, ms_max=EXPIRATION_MS_MAX))
    return with_pair(harmless, PAIR + U32.pack(len(value)) + value)


def decode(raw: bytes) -> MessageHeader:
    """Parse `raw`, a content header from the property flags on.

    Raises RemoteProtocolError if the bytes are not a content header.
    """
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
    return MessageHeader(property_set, int(durable), durable, retain, NEVER, lifetime, hops, sender)


_FOREIGN: Final = PropertySet("none", b"")  # the properties are those of AMQP


def _decode_own(own: bytes) -> MessageHeader | None:
    """Parse `own`, the gateway's own header (the envelope) in a content header.

    Return None if it is truncated or its property list is malformed.
    """
    expires = NEVER
    number: Number | None = None
    try:
        _, flags, hops, size = HEAD.unpack_from(own)
        at = HEAD.size + size
        client = own[HEAD.size : at].decode()
        if flags & EXPIRES:
            expires = U64.unpack_from(own, at)[0] / 1000
            at += 8
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
    sender = Sender(ENGINE_OTHER if flags & OTHER else ENGINE, client)
    retain = flags & RETAIN != 0
    return MessageHeader(property_set, qos, qos > 0, retain, expires, 0.0, hops, sender, number)

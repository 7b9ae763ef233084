"""Property lists of MQTT 5 (5: 2.2.2): identifiers and values, checked against the table in spec.py.

A decoded list is a mapping. A property that occurs once has a number, text or bytes; SUBSCRIPTION_IDENTIFIER
has a tuple of numbers; USER_PROPERTY has a tuple of (name, value) pairs. Bits are 0 or 1. A fault of the peer
raises RemoteProtocolError; a value that cannot be encoded raises LocalProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.protocols.mqtt.data_types import (
    Reader,
    encode_binary,
    encode_text,
    encode_varint,
    malformed,
    quota_exceeded,
    violation,
)
from gateway.protocols.mqtt.spec import (
    LONG_MAX,
    PROPERTIES,
    VARINT_MAX,
    WORD_MAX,
    Kind,
    PacketType,
    Property,
    PropertyRule,
)

PropertyMap = Mapping[Property, Any]
NO_PROPERTIES: Final[PropertyMap] = {}

LISTED: Final = frozenset((Property.SUBSCRIPTION_IDENTIFIER, Property.USER_PROPERTY))
"""Properties whose value in a map is a tuple, because they may repeat."""


class Span(NamedTuple):
    """Property in an encoded property list: its value, and its bytes from `start` to `stop` (exclusive)."""

    id: Property
    value: Any
    start: int
    stop: int


def _bit(reader: Reader) -> int:
    value = reader.byte()
    if value > 1:
        raise violation(f"a property that is 0 or 1 is {value}")
    return value


_READERS: Final[dict[Kind, Callable[[Reader], Any]]] = {
    Kind.BIT: _bit,
    Kind.WORD: Reader.word,
    Kind.LONG: Reader.long,
    Kind.VARINT: Reader.varint,
    Kind.TEXT: Reader.text,
    Kind.BINARY: Reader.binary,
    Kind.PAIR: Reader.pair,
}
_NUMBERS: Final = frozenset((Kind.WORD, Kind.LONG, Kind.VARINT))
_RULES: Final[dict[int, tuple[Property, PropertyRule]]] = {
    int(id): (id, rule) for id, rule in PROPERTIES.items()
}
_USER_PROPERTY: Final = _RULES[Property.USER_PROPERTY]


def spans(data: bytes, place: int, most: int = VARINT_MAX) -> Iterator[Span]:
    """Yield the properties in an encoded property list (without its length), in order.

    `place` is the PacketType to which the list belongs, or WILL. Raises RemoteProtocolError: 0x81 for a
    property that cannot be parsed or is not allowed in `place`, 0x82 for one that occurs twice or has a
    forbidden value, 0x97 for more than `most` properties.
    """
    reader = Reader(data)
    seen_mask = 0
    count = 0
    while (start := reader.at) < reader.end:
        if count == most:
            raise quota_exceeded(f"more than {most} properties")
        count += 1
        number = reader.byte()  # every existing identifier fits one byte of the varint
        found = _RULES.get(number)
        # The one property that may occur a thousand times.
        if found is _USER_PROPERTY and place in found[1].places:
            yield Span(found[0], reader.pair(), start, reader.at)
            continue
        if found is None:
            raise malformed(f"property identifier {number:#04x} does not exist")
        id, rule = found
        if place not in rule.places:
            raise malformed(f"{id.name} is not allowed in this packet")  # 2.2.2.2
        if seen_mask >> number & 1 and place not in rule.repeats:
            raise violation(f"{id.name} occurs twice")
        seen_mask |= 1 << number
        value = _READERS[rule.kind](reader)
        if rule.kind in _NUMBERS and value < rule.low:
            raise RemoteProtocolError(f"{id.name} is {value}", reason=rule.fault)
        if id is Property.RESPONSE_TOPIC and (not value or "+" in value or "#" in value):
            raise violation("a response topic is empty or holds a wildcard")
        yield Span(id, value, start, reader.at)
    needed = 1 << Property.AUTHENTICATION_DATA
    if seen_mask & needed and not seen_mask >> Property.AUTHENTICATION_METHOD & 1:
        raise violation("authentication data without a method")


def decode_list(data: bytes, place: int, most: int = VARINT_MAX) -> PropertyMap:
    """Decode a property list without its length.

    `place` is the PacketType to which the list belongs, or WILL. Raises RemoteProtocolError, with 0x97 for
    more than `most` properties.
    """
    if not data:
        return NO_PROPERTIES
    found: dict[Property, Any] = {}
    listed: dict[Property, list[Any]] = {}
    for span in spans(data, place, most):
        if span.id in LISTED:
            listed.setdefault(span.id, found.setdefault(span.id, [])).append(span.value)
        else:
            found[span.id] = span.value
    for id, values in listed.items():
        found[id] = tuple(values)
    return found


def read_list(reader: Reader, place: int) -> PropertyMap:
    """Read a property list with its length.

    `place` is the PacketType to which the list belongs, or WILL. Raises RemoteProtocolError, with 0x97 if the
    list exceeds the bounds of the reader.
    """
    size = reader.varint()
    if size > reader.bounds.properties_bytes_max:
        raise quota_exceeded(f"{size} bytes of properties")
    return decode_list(reader.take(size), place, reader.bounds.properties_max)


def _number(value: int, low: int, high: int, byte_count: int) -> bytes:
    if not low <= value <= high:
        raise LocalProtocolError(f"a property's value {value} is not within {low} and {high}")
    return value.to_bytes(byte_count, "big")


def encode_property(id: Property, value: Any) -> bytes:
    """Encode one property: its identifier and value. Raises LocalProtocolError if the value does not fit."""
    rule = PROPERTIES[id]
    head = bytes((id,))
    match rule.kind:
        case Kind.BIT:
            return head + _number(int(value), 0, 1, 1)
        case Kind.WORD:
            return head + _number(value, rule.low, WORD_MAX, 2)
        case Kind.LONG:
            return head + _number(value, rule.low, LONG_MAX, 4)
        case Kind.VARINT:
            if value < rule.low:
                raise LocalProtocolError(f"{id.name} is {value}")
            return head + encode_varint(value)
        case Kind.TEXT:
            return head + encode_text(value)
        case Kind.BINARY:
            return head + encode_binary(value)
        case Kind.PAIR:
            return head + encode_text(value[0]) + encode_text(value[1])


def encode_list(properties: PropertyMap, place: int) -> bytes:
    """Encode a property list without its length.

    `place` is the PacketType to which the list belongs, or WILL. Raises LocalProtocolError if a property is
    not allowed there.
    """
    pieces: list[bytes] = []
    for id, value in properties.items():
        rule = PROPERTIES[id]
        if place not in rule.places:
            raise LocalProtocolError(f"{id.name} is not allowed in packet type {place}")
        values = value if id in LISTED else (value,)
        if len(values) > 1 and place not in rule.repeats:
            raise LocalProtocolError(f"{id.name} must not repeat in {PacketType(place).name}")
        pieces.extend(encode_property(id, one) for one in values)
    return b"".join(pieces)


def write_list(properties: PropertyMap, place: int) -> bytes:
    """Encode a property list with its length. `place` is the PacketType to which it belongs, or WILL."""
    if not properties:
        return b"\0"
    data = encode_list(properties, place)
    return encode_varint(len(data)) + data


def alias_among(raw: bytes, most: int) -> int:
    """Return the topic alias if it is one of the first `most` properties of a PUBLISH, otherwise 0."""
    for span in islice(spans(raw, PacketType.PUBLISH), most):
        if span.id is Property.TOPIC_ALIAS:
            return int(span.value)
    return 0

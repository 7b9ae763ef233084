"""Translation between the properties of a PUBLISH and those of the model.

Into the model, a property list is scanned once (`publish_essentials`), and decoded only when its meaning is
needed. Out of the model, `encode_properties` encodes a set once and stores the result in the set; only
expiry, hops and subscription ids, which differ between messages, are added each time. A set that came from
MQTT is forwarded unchanged and in order, without the properties that belong to one transmission.

MQTT 5 has no property for some fields of AMQP. They travel in user properties named in FIELDS, and the types
of headers in `gateway-types` (values.py), so that AMQP to MQTT 5 to AMQP restores fields and types. A header
that has one of these names itself is written with the prefix `gateway-header-`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Final, NamedTuple

from gateway.model.caches import Recurring
from gateway.model.losses import Loss, reported_losses
from gateway.model.message import Message
from gateway.model.properties import Headers, Properties, PropertySet, fits
from gateway.protocols.mqtt.data_types import quota_exceeded
from gateway.protocols.mqtt.properties import encode_property, spans
from gateway.protocols.mqtt.property_scan import (
    NUMBERS,
    TEXTS,
    USER_HEAD,
    ScannedProperties,
    scan,
    write_texts,
)
from gateway.protocols.mqtt.spec import (
    LONG_MAX,
    STRING_BYTES_MAX,
    VARINT_MAX,
    PacketType,
    Property,
)
from gateway.protocols.mqtt.values import Type, from_text, is_text, to_text

HOPS: Final = "gateway-hops"
TYPES: Final = "gateway-types"
ESCAPED: Final = "gateway-header-"
REPLY_TO: Final = "amqp-reply-to"
HOPS_MAX: Final = 1_000_000  # far above any limit of a route; bounds a hostile number

FIELDS: Final = {
    "content_encoding": "amqp-content-encoding",
    "priority": "amqp-priority",
    "timestamp": "amqp-timestamp",
    "message_id": "amqp-message-id",
    "type": "amqp-type",
    "app_id": "amqp-app-id",
    "user_id": "amqp-user-id",
}
"""Fields of the model without a property in MQTT 5, and the user property that carries each."""

MESSAGE_ID_HEAD: Final = USER_HEAD + bytes((len(FIELDS["message_id"]),)) + FIELDS["message_id"].encode()
_NUMERIC: Final = {"priority": 255, "timestamp": 2**64 - 1}
# A publisher may write any user id, so it is written and never read: it remains a header of that name.
_FIELD_BY_NAME: Final = {name: field for field, name in FIELDS.items() if field != "user_id"} | {
    REPLY_TO: "reply_to"
}
_RESERVED: Final = frozenset((HOPS, TYPES, REPLY_TO, *FIELDS.values()))

FORM: Final = "mqtt5"
"""Key of the encoding that `encode_properties` stores in a PropertySet of another protocol."""

LOSSES: Final = (
    Loss("header_name", "headers", "a name over 65 535 bytes, not UTF-8, or with U+0000", "drop"),
    Loss("header_value", "headers", "a value that is not of its type, or that has no text form", "drop"),
    Loss("header_types_long", "headers", "types over 65 535 bytes: values become strings", "downgrade"),
    Loss("text", "texts", "over 65 535 bytes, not UTF-8, or with U+0000", "drop"),
    Loss("correlation_long", "correlation", "over 65 535 bytes", "drop"),
    Loss("reply_to", "reply-to", f"not a topic name: user property {REPLY_TO}", "encode"),
)
"""Content that MQTT 5 cannot carry. Earlier versions have no properties at all."""
LOSING: Final = reported_losses(LOSSES)

_LISTS_MAX: Final = 4_096  # cached property lists; devices repeat a few
_LIST_BYTES_MAX: Final = 1_024  # bytes; longer lists are rarely repeated
_lists: Final[Recurring[ScannedProperties]] = Recurring(_LISTS_MAX)


def publish_essentials(raw: bytes, most: int = VARINT_MAX) -> ScannedProperties:
    """Return a property set for `raw`, the encoded property list of a PUBLISH.

    Sets of equal lists are shared. Raises RemoteProtocolError if the list is malformed, or has more than
    `most` properties (0x97).
    """
    if not raw:
        return EMPTY_SCANNED
    cached = _lists.cached.get(raw) or _lists.get(raw)
    if cached is None:
        cached = scan(raw, most, decode_properties) or _look_closely(raw, most)
        if len(raw) <= _LIST_BYTES_MAX:
            _lists.put(raw, cached)
    elif cached.total > most:  # cached for a connection with a higher limit
        raise quota_exceeded(f"more than {most} properties")
    return cached


def unread_list(raw: bytes) -> PropertySet:
    """Return a property set for `raw`, an encoded property list that was read from disk, without caching it.

    If `scan` does not support the list, it is parsed only when the set is decoded.
    """
    return scan(raw, VARINT_MAX, decode_properties) or PropertySet("mqtt", raw, decode_properties)


def message_id_in(raw: bytes) -> str | None:
    """Return the message id in `raw`, an encoded property list, or None if there is none.

    Raises RemoteProtocolError if `raw` is malformed, but not all of it is always parsed.
    """
    found = raw.find(MESSAGE_ID_HEAD)
    if found < 0:
        return None
    at, end = 0, len(raw)
    while at < found:  # the same bytes may be inside another property
        if raw[at] == Property.USER_PROPERTY and at + 3 <= end:
            at += 3 + int.from_bytes(raw[at + 1 : at + 3], "big")
            at += 2 + int.from_bytes(raw[at : at + 2], "big")
        elif raw[at] in TEXTS and at + 3 <= end:
            at += 3 + int.from_bytes(raw[at + 1 : at + 3], "big")
        elif raw[at] in NUMBERS:
            at += NUMBERS[raw[at]]
        else:
            break
        if at > found:
            found = raw.find(MESSAGE_ID_HEAD, at)
            if found < 0:
                return None
    at += len(MESSAGE_ID_HEAD)
    stop = at + 2 + int.from_bytes(raw[at : at + 2], "big")
    text = raw[at + 2 : stop]
    if at - len(MESSAGE_ID_HEAD) != found or stop > end or not text.isascii() or 0 in text:
        return decode_properties(raw).message_id
    return text.decode()


def _look_closely(raw: bytes, most: int) -> ScannedProperties:
    """Parse a property list that `scan` does not support. `most` is the maximum number of properties.

    Raises RemoteProtocolError if the list is malformed.
    """
    found = ScannedProperties(raw, 0, decode_properties)
    for span in spans(raw, PacketType.PUBLISH, most):
        found.total += 1
        if span.id is Property.TOPIC_ALIAS:
            found.alias, found.bare = span.value, raw[: span.start] + raw[span.stop :]
        elif span.id is Property.SUBSCRIPTION_IDENTIFIER:
            found.identified = True
        elif span.id is Property.MESSAGE_EXPIRY_INTERVAL:
            found.expiry = span.value
        elif span.id is Property.RESPONSE_TOPIC:
            found.has_reply_to = True
        elif span.id is Property.USER_PROPERTY:
            name, text = span.value
            if name == HOPS:
                found.hops = max(found.hops, _number(text, HOPS_MAX) or 0)
            elif name == REPLY_TO:
                found.has_reply_to = True
    return found


def _number(text: str, most: int) -> int | None:
    """Return the value of a user property as a number from 0 to `most`, or None if it is no such number."""
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        return None
    value = int(text)
    return value if value <= most else None


_PLACES: Final = {
    Property.CONTENT_TYPE: "content_type",
    Property.RESPONSE_TOPIC: "reply_to",
    Property.CORRELATION_DATA: "correlation",
}


def decode_properties(raw: bytes) -> Properties:
    """Decode the property list of a PUBLISH, without its length, to protocol-independent properties."""
    fields: dict[str, Any] = {}
    pairs: list[tuple[str, str]] = []
    types: Any = {}
    for span in spans(raw, PacketType.PUBLISH):
        if span.id in _PLACES:
            fields[_PLACES[span.id]] = span.value
        elif span.id is Property.PAYLOAD_FORMAT_INDICATOR:
            fields["utf8"] = bool(span.value)
        elif span.id is Property.USER_PROPERTY:
            name, text = span.value
            field = _FIELD_BY_NAME.get(name)
            if field is not None:
                value = _number(text, _NUMERIC[field]) if field in _NUMERIC else text
                if value is not None:
                    fields.setdefault(field, value)
            elif name == TYPES:
                types = _object(text)
            elif name != HOPS:
                pairs.append((name.removeprefix(ESCAPED), text))
    return Properties(**fields, headers=_headers(pairs, types))


EMPTY_SCANNED: Final = ScannedProperties(b"", 0, decode_properties)
EMPTY_SCANNED.parsed = b""


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}  # another sender's property of this name: the texts remain, as strings
    return found if isinstance(found, dict) else {}


def _headers(pairs: Iterable[tuple[str, str]], types: dict[str, Any]) -> Headers:
    """Convert user properties, pairs of name and text, to headers. `types` has their types by name.

    If the type is a list, the header is repeated, and each of its values has its own type in the list.
    """
    remaining_types = {name: iter(kind) for name, kind in types.items() if isinstance(kind, list)}
    found = []
    for name, text in pairs:
        kind = next(remaining_types[name], None) if name in remaining_types else types.get(name)
        found.append((name, from_text(text, kind)))
    return tuple(found)


def encode_properties(message: Message, utc: float, *, subscription_ids: Sequence[int] = ()) -> bytes:
    """Return the property list of the PUBLISH for `message`, without its length.

    `utc` is the present time in POSIX seconds, to which the expiry interval is relative. The interval is at
    least 1 s, so an expired message should not be sent.
    """
    property_set = message.property_set
    if property_set.protocol == "mqtt":
        data: bytes = _forwarded(property_set) if property_set.parsed is None else property_set.parsed
    else:
        data = _form(property_set).data
    if message.expires:
        remaining_secs = min(max(ceil(message.expires - utc), 1), LONG_MAX)
        data += encode_property(Property.MESSAGE_EXPIRY_INTERVAL, remaining_secs)
    hops = message.hops
    if hops:
        data += _HOPS[hops] if hops < len(_HOPS) else _hops(hops)
    for one in subscription_ids:
        data += encode_property(Property.SUBSCRIPTION_IDENTIFIER, one)
    return data


def losses(message: Message) -> tuple[str, ...]:
    """Return the names of the parts of `message` that MQTT 5 cannot express.

    Parts with the policy `encode` are left out, because other properties carry them. The encoded properties
    are cached, so that `encode_properties` need not encode them again.
    """
    property_set = message.property_set
    if property_set.protocol == "mqtt":
        return ()
    return _form(property_set).losses


def _hops(count: int) -> bytes:
    return encode_property(Property.USER_PROPERTY, (HOPS, str(count)))


_HOPS: Final = tuple([_hops(count) for count in range(16)])  # few messages cross more routes


class Form(NamedTuple):
    """Encoded property list for a property set of another protocol.

    `data` lacks those properties that differ between messages with the same set, such as the expiry interval.
    `losses` are the names of parts that MQTT cannot express, without those of policy `encode`. `key` is the
    key in the set's cache.
    """

    key: str
    data: bytes
    losses: tuple[str, ...]


def _form(property_set: PropertySet) -> Form:
    """Return the encoded property list for a property set of another protocol, and cache it in the set."""
    last = property_set.form
    if last is not None and last[0] == FORM:
        form: Form = last
        return form
    found: Form | None = property_set.stored_form(FORM)
    if found is None:
        found = _make_form(property_set)
    if last is not None:
        property_set.forms[last[0]] = last
    property_set.form = found
    return found


def _make_form(property_set: PropertySet) -> Form:
    if property_set.read_texts is not None:
        straight = write_texts(property_set.read_texts(property_set.raw, USER_HEAD, b"", False))
        if straight:
            return Form(FORM, straight, ())
    lost: set[str] = set()
    data = _encode(property_set, lost)
    return Form(FORM, data, tuple(sorted(lost & LOSING)))


_OF_THE_WAY: Final = frozenset(
    (Property.MESSAGE_EXPIRY_INTERVAL, Property.TOPIC_ALIAS, Property.SUBSCRIPTION_IDENTIFIER)
)
"""Properties that belong to one transmission and are not forwarded."""


def _forwarded(property_set: PropertySet) -> bytes:
    """Return those properties of a PUBLISH that are forwarded to receivers, as an encoded list.

    The list is also stored in `parsed` of the set.
    """
    raw = property_set.raw
    data = property_set.parsed = b"".join(
        raw[span.start : span.stop]
        for span in spans(raw, PacketType.PUBLISH)
        if span.id not in _OF_THE_WAY and not (span.id is Property.USER_PROPERTY and span.value[0] == HOPS)
    )
    return data


def _encode(property_set: PropertySet, lost: set[str]) -> bytes:
    """Encode a property set of another protocol as a property list.

    Properties that differ between messages with the same set are left out. Add the names of parts that MQTT
    cannot express to `lost`.
    """
    properties = property_set.properties
    found: list[bytes] = []
    pairs: list[tuple[str, str]] = []
    if properties.utf8 is not None:
        found.append(encode_property(Property.PAYLOAD_FORMAT_INDICATOR, properties.utf8))
    if properties.content_type is not None and _can_encode(properties.content_type, lost):
        found.append(encode_property(Property.CONTENT_TYPE, properties.content_type))
    if properties.reply_to is not None and _can_encode(properties.reply_to, lost):
        if properties.reply_to and not {"+", "#"} & set(properties.reply_to):
            found.append(encode_property(Property.RESPONSE_TOPIC, properties.reply_to))
        else:
            lost.add("reply_to")
            pairs.append((REPLY_TO, properties.reply_to))
    if properties.correlation is not None:
        if len(properties.correlation) <= STRING_BYTES_MAX:
            found.append(encode_property(Property.CORRELATION_DATA, properties.correlation))
        else:
            lost.add("correlation_long")
    for field, name in FIELDS.items():
        value = getattr(properties, field)
        if value is not None and _can_encode(text := str(value), lost):
            pairs.append((name, text))
    pairs += _pairs(properties.headers, lost)
    found += (encode_property(Property.USER_PROPERTY, pair) for pair in pairs)
    return b"".join(found)


def _can_encode(text: str, lost: set[str]) -> bool:
    """Return True if MQTT can carry the text. Otherwise add the word "text" to `lost`.

    `lost` has the names of what MQTT cannot express.
    """
    fits = is_text(text)
    if not fits:
        lost.add("text")
    return fits


def _pairs(headers: Headers, lost: set[str]) -> list[tuple[str, str]]:
    """Convert headers to user properties, in order.

    One more user property has the types of the headers, unless all of them are plain strings. Add the names
    of parts that MQTT cannot express to `lost`.
    """
    pairs: list[tuple[str, str]] = []
    types: dict[str, list[Type]] = {}
    for name, value in headers:
        if not fits(value):
            lost.add("header_value")
            continue
        text, kind = to_text(value)
        reserved = name in _RESERVED or name.startswith(ESCAPED)
        written = ESCAPED + name if reserved else name
        if not is_text(written):
            lost.add("header_name")
        elif not is_text(text):
            lost.add("header_value")
        else:
            pairs.append((written, text))
            types.setdefault(name, []).append(kind)
    header_types = {
        name: kinds[0] if len(kinds) == 1 else kinds
        for name, kinds in types.items()
        if any(kind is not None for kind in kinds)
    }
    if header_types:
        described = json.dumps(header_types, ensure_ascii=False, separators=(",", ":"))
        if is_text(described):
            pairs.append((TYPES, described))
        else:
            lost.add("header_types_long")
    return pairs

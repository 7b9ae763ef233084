"""Translation between message heads and properties of the model.

A head that AMQP/Fast wrote is sent byte for byte as it was received, unless something changed on the way. A
change (a hop, durability, expiry) is made to its fields, so nothing else is lost. Sets of other protocols are
translated from the model. Both are stored in the set's `forms`. Expiration is absolute in the model and on
the wire, so nothing has to be inserted for each message.

Content for which a head has no field travels in headers with upper-case names, as the predefined headers
have, which are removed again on the way back. A header of another protocol with such a name is escaped
(tables.py). LOSSES lists what cannot be carried.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any, Final, NamedTuple

from gateway.model.caches import Recurring
from gateway.model.losses import Loss, reported_losses
from gateway.model.message import NEVER, Message
from gateway.model.outcome import Reason
from gateway.model.properties import (
    Headers,
    Properties,
    PropertySet,
    Value,
    ValueType,
    is_unicode,
    string,
)
from gateway.protocols.amqpfast.codec import (
    FIXED,
    Head,
    decode_head_properties,
    encode_head_properties,
    encode_short_string,
)
from gateway.protocols.amqpfast.spec import (
    LONG_STRING_MAX,
    PRIORITY_MAX,
    SHORT_STRING_MAX,
    ReplyCode,
    Scope,
)
from gateway.protocols.amqpfast.tables import TYPES, decode_headers, encode_headers, encode_pair

PROTOCOL: Final = "amqpfast"
SETS_MAX: Final = 4096  # cached property sets
SET_BYTES_MAX: Final = 1024  # bytes of the largest cached property set
HOPS_MAX: Final = 65_535  # a header may claim more than a message can ever have crossed
FORMS_MAX: Final = 64  # encodings of one set: every second of expiry is another
EXPIRATION_MAX: Final = 0xFFFF_FFFF
PRIORITY_AT: Final = 1  # position in a head behind the body-size
HIGHEST: Final = bytes((PRIORITY_MAX,))

CORRELATION: Final = "CORRELATION_ID"
REPLY_TO: Final = "REPLY_TO"
TIMESTAMP: Final = "TIMESTAMP"
RETAIN: Final = "RETAIN"
HOPS: Final = "HOPS"
UTF8: Final = "UTF8"
USER: Final = "USER_ID"
TEXTS: Final = {
    "reply_to": REPLY_TO,
    "type": "TYPE",
    "app_id": "APP_ID",
    "user_id": USER,
}
"""Texts of the model without a field in a head, and the header that carries each."""
FIELDS: Final = {
    "content_type": ("mime_type", "MIME_TYPE"),
    "content_encoding": ("encoding", "ENCODING"),
    "message_id": ("identifier", "IDENTIFIER"),
}
"""Texts with a field in a head, and the header for a text that does not fit it."""
OWN_HEADERS: Final = frozenset(
    {CORRELATION, TIMESTAMP, RETAIN, HOPS, UTF8, TYPES, *TEXTS.values(), *(one for _, one in FIELDS.values())}
)
READ_HEADERS: Final = OWN_HEADERS - {TYPES, USER}
"""Headers that are read as properties.

A sender may write any user id, so it remains a header of that name.
"""
OF_THE_WAY: Final = frozenset({RETAIN, HOPS})


LOSSES: Final = (
    Loss("header_name_long", "headers", "a name over 128 bytes, or over that when escaped", "drop"),
    Loss("header_value_long", "headers", "a value over 65 535 bytes in its written form", "drop"),
    Loss("header_value", "headers", "a value that is not of its type", "drop"),
    Loss("header_order", "headers", "a repeated name with others between", "downgrade"),
    Loss("header_types_long", "headers", "types over 65 535 bytes: values become texts", "downgrade"),
    Loss("headers_long", "headers", "entries beyond a table of 65 535 bytes: the last ones", "drop"),
    Loss("text", "texts", "an unpaired surrogate, which is not valid Unicode", "drop"),
    Loss("long_text", "texts", "over 255 bytes, or with a zero byte: in a header of its own", "encode"),
    Loss("text_longer", "texts", "over 65 535 bytes", "drop"),
    Loss(
        "text_empty",
        "content type, encoding, message id",
        "an empty value is the same as no value",
        "downgrade",
    ),
    Loss("priority_zero", "priority", "0 is the same as no value", "downgrade"),
    Loss("priority_range", "priority", "outside 0 to 9: the nearest value", "downgrade"),
    Loss("timestamp_range", "timestamp", "not within 32 bits", "drop"),
    Loss("correlation_long", "correlation", "over 65 535 bytes", "drop"),
    Loss("expiration_fraction", "expiry", "fractions of a second are rounded up", "downgrade"),
    Loss("expiration_range", "expiry", "beyond 32 bits: never", "downgrade"),
)
"""Parts of messages that AMQP/Fast cannot express; `losses` returns the names of those in one message."""
OF_ONE_MESSAGE: Final = frozenset({"expiration_fraction"})  # not of its set of properties
LOSING: Final = reported_losses(LOSSES) - OF_ONE_MESSAGE

REFUSALS: Final = {
    Reason.NONE: (Scope.HANDLE, ReplyCode.INTERNAL_ERROR),
    Reason.NO_TAKER: (Scope.HANDLE, ReplyCode.INTERNAL_ERROR),
    Reason.NO_ROUTE: (Scope.HANDLE, ReplyCode.DESTINATION_NOT_FOUND),
    Reason.NOT_AUTHORIZED: (Scope.HANDLE, ReplyCode.ACCESS_REFUSED),
    Reason.NAME_INVALID: (Scope.HANDLE, ReplyCode.BAD_FIELD_VALUE),
    Reason.TOO_LARGE: (Scope.CHANNEL, ReplyCode.MESSAGE_TOO_LARGE),
    Reason.QUOTA: (Scope.CHANNEL, ReplyCode.INSUFFICIENT_RESOURCES),
    Reason.TARGET_DOWN: (Scope.HANDLE, ReplyCode.TEMPORARILY_FORBIDDEN),
    Reason.TARGET_REFUSED: (Scope.HANDLE, ReplyCode.TEMPORARILY_FORBIDDEN),
    Reason.EXPIRED: (Scope.HANDLE, ReplyCode.MESSAGE_CONTENTS_INVALID),
    Reason.HOPS: (Scope.HANDLE, ReplyCode.MESSAGE_CONTENTS_INVALID),
    Reason.MALFORMED: (Scope.HANDLE, ReplyCode.MESSAGE_CONTENTS_INVALID),
    Reason.LOST_PROPERTY: (Scope.HANDLE, ReplyCode.MESSAGE_CONTENTS_INVALID),
    Reason.STORE: (Scope.CHANNEL, ReplyCode.INSUFFICIENT_RESOURCES),
    Reason.INTERNAL: (Scope.HANDLE, ReplyCode.INTERNAL_ERROR),
}
"""Scope that is closed for a message that was not accepted, and the code: there is no negative reply."""

REASONS: Final[dict[int, Reason]] = {
    ReplyCode.MESSAGE_TOO_LARGE: Reason.TOO_LARGE,
    ReplyCode.ACCESS_REFUSED: Reason.NOT_AUTHORIZED,
    ReplyCode.DESTINATION_NOT_FOUND: Reason.NO_ROUTE,
    ReplyCode.BAD_FIELD_VALUE: Reason.NAME_INVALID,
    ReplyCode.INSUFFICIENT_RESOURCES: Reason.QUOTA,
    ReplyCode.TEMPORARILY_FORBIDDEN: Reason.TARGET_REFUSED,
    ReplyCode.MESSAGE_CONTENTS_INVALID: Reason.MALFORMED,
}


def refusal(code: int) -> Reason:
    """Return the reason why a server has closed a handle or channel with this reply code.

    A code to which no Reason corresponds gives TARGET_REFUSED.
    """
    return REASONS.get(code, Reason.TARGET_REFUSED)


class Essentials(NamedTuple):
    """Fields of a content header that routing needs, decoded; `expires` is in POSIX seconds, or NEVER."""

    durable: bool
    priority: int
    expires: float
    retain: bool
    hops: int


FORMS: Final = "amqpfast forms"
NO_ESSENTIALS: Final = Essentials(False, 0, NEVER, False, 0)

_sets: Final[Recurring[PropertySet]] = Recurring(SETS_MAX)


# --- from the wire


def head_properties(raw: bytes) -> PropertySet:
    """Return a property set for `raw`, an encoded content header without body-size.

    Sets of equal bytes are shared. The set is decoded on first use, when an invalid content header raises
    RemoteProtocolError 542.
    """
    found = _sets.cached.get(raw) or _sets.get(raw)
    if found is None:
        found = PropertySet(PROTOCOL, raw, decode_model)
        if len(raw) <= SET_BYTES_MAX:
            _sets.put(raw, found)
    return found


def essentials(property_set: PropertySet) -> Essentials:
    """Return those fields of a content header that routing needs, decoded once and cached in the set.

    Return NO_ESSENTIALS for a set of another protocol. Every byte is validated, so that a content header that
    is forwarded undecoded cannot harm the receiver. Raises RemoteProtocolError 542 if it is invalid.
    """
    if property_set.protocol != PROTOCOL:
        return NO_ESSENTIALS
    found: Essentials | None = property_set.parsed
    if found is None:
        head = decode_head_properties(property_set.raw)
        retained, crossed, asks = False, 0, False
        for name, (_, value) in head.headers:
            if name == RETAIN:
                retained = value == 1
            elif name == HOPS and isinstance(value, int):
                crossed = min(max(value, 0), HOPS_MAX)
            elif name == REPLY_TO:
                asks = True
        property_set.has_reply_to = asks
        found = Essentials(head.persistent, head.priority, float(head.expiration), retained, crossed)
        property_set.parsed = found
    return found


def retain(property_set: PropertySet) -> bool:
    """Return True if a header of the content header states that MQTT's retain flag was set."""
    return essentials(property_set).retain


def hops(property_set: PropertySet) -> int:
    """Return the number of routes that the message has crossed, according to its content header."""
    return essentials(property_set).hops


def decode_model(raw: bytes) -> Properties:
    """Decode an encoded content header to protocol-independent properties. Raises RemoteProtocolError 542."""
    head = decode_head_properties(raw)
    own: dict[str, Any] = {}
    others: list[tuple[str, Value]] = []
    for name, value in head.headers:
        if name in READ_HEADERS:
            own[name] = value.value
        else:
            others.append((name, value))
    texts = {field: _text(own.get(header)) for field, header in TEXTS.items() if header != USER}
    for field, (native, header) in FIELDS.items():
        texts[field] = getattr(head, native) or _text(own.get(header))
    correlation, utf8, timestamp = own.get(CORRELATION), own.get(UTF8), own.get(TIMESTAMP)
    return Properties(
        correlation=correlation.encode() if isinstance(correlation, str) else _data(correlation),
        utf8=bool(utf8) if isinstance(utf8, int) else None,
        timestamp=timestamp if isinstance(timestamp, int) and timestamp >= 0 else None,
        priority=head.priority or None,
        headers=decode_headers(tuple(others)),
        **texts,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _data(value: Any) -> bytes | None:
    return value if isinstance(value, bytes) else None


# --- to the wire


def encode_properties(message: Message, offset: int = 0) -> bytes:
    """Encode the properties of a message of any protocol as a content header without body-size.

    `offset` is the number of seconds to add to `message.expires` to get POSIX time. If nothing in the message
    has changed, its own bytes are returned. Raises RemoteProtocolError 542 if the sender's content header is
    malformed.
    """
    expires = message.expires + offset if message.expires else NEVER
    property_set = message.property_set
    if property_set.protocol == PROTOCOL:
        parsed = essentials(property_set)
        if (
            expires == parsed.expires
            and message.durable == parsed.durable
            and message.hops == parsed.hops
            and message.retain == parsed.retain
            and parsed.priority <= PRIORITY_MAX
        ):
            return property_set.raw
    return _form(message, expires)[0]


def losses(message: Message) -> tuple[str, ...]:
    """Return the names of the parts of `message` that AMQP/Fast cannot express.

    Parts with the policy `encode` are left out, because other fields carry them. The encoded content header
    is cached, so that `encode_properties` need not encode it again.
    """
    if message.property_set.protocol == PROTOCOL and encode_properties(message) is message.property_set.raw:
        return ()
    lost = _form(message, message.expires)[1]
    return tuple([name for name in lost if name in LOSING]) if lost else ()


Form = tuple[bytes, tuple[str, ...]]


def _form(message: Message, expires: float) -> Form:
    forms: dict[object, Form] = message.property_set.forms.setdefault(FORMS, {})
    key = (message.durable, expires, message.retain, message.hops)
    found = forms.get(key)
    if found is None:
        if len(forms) >= FORMS_MAX:
            forms.clear()
        found = forms[key] = _make_form(message, expires)
    return found


def _make_form(message: Message, expires: float) -> Form:
    """Encode the content header of a message. Return it with the names of the parts that it cannot express.

    `expires` is in POSIX seconds, or NEVER.
    """
    property_set = message.property_set
    lost: set[str] = set()
    if property_set.protocol == PROTOCOL:
        head = decode_head_properties(property_set.raw)
        if head.priority > PRIORITY_MAX:
            head.priority = _priority(head.priority, lost)
        pairs = [pair for pair in head.headers if pair[0] not in OF_THE_WAY]
    else:
        head, pairs = _from_model(property_set.properties, lost)
    first: list[tuple[str, Value]] = []
    if message.retain:
        first.append((RETAIN, Value(ValueType.INT32, 1)))
    if message.hops:
        first.append((HOPS, Value(ValueType.INT32, message.hops)))
    head.headers = _pairs_that_fit((*first, *pairs), lost)
    head.persistent = message.durable
    head.expiration = _expiration(expires, lost)
    return encode_head_properties(head, strict=False), tuple(sorted(lost))


def _expiration(expires: float, lost: set[str]) -> int:
    seconds = ceil(expires)
    if seconds > EXPIRATION_MAX:
        lost.add("expiration_range")
        return 0
    if seconds != expires:
        lost.add("expiration_fraction")
    return max(seconds, 0)


def _pairs_that_fit(pairs: Headers, lost: set[str]) -> Headers:
    """Return as many headers as one field table can hold; if some are left out, add `headers_long` to `lost`.

    If GATEWAY_TYPES is the last entry, it is moved to the front, so that it is not left out.
    """
    if pairs and pairs[-1][0] == TYPES:
        pairs = (pairs[-1], *pairs[:-1])
    size = 0
    for at, (name, value) in enumerate(pairs):
        size += len(encode_pair(name, value, strict=False))
        if size > LONG_STRING_MAX:
            lost.add("headers_long")
            return pairs[:at]
    return pairs


def _from_model(properties: Properties, lost: set[str]) -> tuple[Head, list[tuple[str, Value]]]:
    """Convert protocol-independent properties to a content header.

    Return it without its headers, and the headers. Add the names of parts that it cannot express to `lost`.
    """
    head = Head()
    pairs = _texts(properties, head, lost)
    if properties.correlation is not None:
        if len(properties.correlation) > LONG_STRING_MAX:
            lost.add("correlation_long")
        else:
            pairs.append((CORRELATION, Value(ValueType.STRING, properties.correlation)))
    if properties.utf8 is not None:
        pairs.append((UTF8, Value(ValueType.INT32, int(properties.utf8))))
    if properties.timestamp is not None:
        if 0 <= properties.timestamp <= EXPIRATION_MAX:
            pairs.append((TIMESTAMP, Value(ValueType.TIMESTAMP, properties.timestamp)))
        else:
            lost.add("timestamp_range")
    if properties.priority is not None:
        head.priority = _priority(properties.priority, lost)
    return head, pairs + encode_headers(properties.headers, OWN_HEADERS, lost)


def _texts(properties: Properties, head: Head, lost: set[str]) -> list[tuple[str, Value]]:
    """Copy text properties to the fields of `head` that exist for them, and return the others as headers.

    Add the names of parts that a content header cannot express to `lost`.
    """
    pairs: list[tuple[str, Value]] = []
    for field, (native, header) in FIELDS.items():
        text = getattr(properties, field)
        if text is None:
            continue
        if not is_unicode(text):
            lost.add("text")
        elif not text:
            lost.add("text_empty")
        elif len(text.encode()) > SHORT_STRING_MAX or "\0" in text:
            lost.add("long_text")
            _add_text(pairs, header, text, lost)
        else:
            setattr(head, native, text)
    for field, header in TEXTS.items():
        _add_text(pairs, header, getattr(properties, field), lost)
    return pairs


def _priority(priority: int, lost: set[str]) -> int:
    if not 0 < priority <= PRIORITY_MAX:
        lost.add("priority_range" if priority else "priority_zero")
    return min(max(priority, 0), PRIORITY_MAX)


def _add_text(pairs: list[tuple[str, Value]], name: str, text: str | None, lost: set[str]) -> None:
    if text is None:
        return
    if not is_unicode(text):
        lost.add("text")
    elif len(text.encode()) > LONG_STRING_MAX:
        lost.add("text_longer")
    else:
        pairs.append((name, string(text)))


# --- defaults of a handle, and refusals


def fit_priority(raw: bytes) -> bytes:
    """Return `raw`, an encoded content header, with a priority of at most PRIORITY_MAX."""
    return raw if raw[PRIORITY_AT] <= PRIORITY_MAX else raw[:PRIORITY_AT] + HIGHEST + raw[PRIORITY_AT + 1 :]


def fill_defaults(raw: bytes, mime_type: str, encoding: str) -> bytes:
    """Return a content header, with the handle's mime-type and encoding where it has none (3.5.2).

    `raw` is the encoded content header of a SEND, without its body-size. Raises RemoteProtocolError 542 if it
    is invalid.
    """
    at = FIXED.size
    if raw[at] and (raw[at + 1 + raw[at]] or not encoding):
        return raw
    head = decode_head_properties(raw)
    filled = replace(head, mime_type=head.mime_type or mime_type, encoding=head.encoding or encoding)
    if filled == head:
        return raw
    texts = [encode_short_string(one) for one in (filled.mime_type, filled.encoding)]
    skip = at + 2 + len(head.mime_type.encode()) + len(head.encoding.encode())
    return raw[:at] + b"".join(texts) + raw[skip:]

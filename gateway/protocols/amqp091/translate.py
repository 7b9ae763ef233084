"""Translation between the properties of class basic and those of the model.

A property set that AMQP wrote is sent byte for byte as it was received, unless something changed on the way.
A change (a hop, durability) is made to the native properties, so nothing else is lost. Sets of other
protocols are translated from the model. The results are stored in the set's `forms`, so a device that repeats
itself costs one look-up for each message; only a relative expiration is inserted for each message.

Content for which AMQP has no property travels in headers of the gateway (`x-mqtt-...`, `x-gateway-...`;
`x-...` for texts longer than a short string), which are removed again on the way back. LOSSES lists what is
left.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from contextlib import suppress
from functools import lru_cache
from math import ceil
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.caches import Recurring
from gateway.model.losses import Loss, reported_losses
from gateway.model.message import NEVER, Message
from gateway.model.properties import (
    Headers,
    Properties,
    PropertySet,
    Value,
    ValueType,
    fits,
    is_unicode,
    string,
)
from gateway.protocols.amqp091.codec import (
    U16,
    U32,
    BasicProperties,
    decode_properties,
    encode_basic_properties,
    encode_short_string,
)
from gateway.protocols.amqp091.spec import (
    FLAG_CONTINUED,
    FLAG_DELIVERY_MODE,
    FLAG_EXPIRATION,
    FLAG_HEADERS,
    FLAG_REPLY_TO,
    FLAG_USER_ID,
    PROPERTIES,
    SHORT_STRING_MAX,
    ReplyCode,
)
from gateway.protocols.amqp091.table import (
    TEXTS,
    UNKNOWN,
    decode_table,
    encode_value,
    survey,
    syntax_error,
    texts_of,
)

PROTOCOL: Final = "amqp091"
SETS_MAX: Final = 4096  # cached property sets
SET_BYTES_MAX: Final = 1024  # bytes of the largest cached property set
HOPS_MAX: Final = 65_535  # a header may claim more than a message can ever have crossed
FORMS_MAX: Final = 64  # encodings of one set: a peer chooses the initial hop count of a message

RETAIN_HEADER: Final = "x-mqtt-retain"
UTF8_HEADER: Final = "x-mqtt-utf8"
HOPS_HEADER: Final = "x-gateway-hops"
ENGINE_HEADER: Final = "x-gateway-engine"  # data that replicas exchange about a message
CORRELATION_HEADER: Final = "x-correlation-id"  # bytes that do not fit a short string
ENCODING_HEADER: Final = "x-correlation-encoding"  # base64: correlation-id is not the text it looks like
BASE64: Final = "base64"
LONG_TEXTS: Final = {
    "content_type": "x-content-type",
    "content_encoding": "x-content-encoding",
    "reply_to": "x-reply-to",
    "message_id": "x-message-id",
    "type": "x-type",
    "app_id": "x-app-id",
}
LONG_ID: Final = LONG_TEXTS["message_id"].encode()
USER_HEADER: Final = "x-user-id"  # an unverified user id

LOSSES: Final = (
    Loss("header_name_long", "headers", "a name longer than 255 bytes", "drop"),
    Loss("header_name", "headers", "a name with an unpaired surrogate, which is not valid Unicode", "drop"),
    Loss("header_value", "headers", "a value that its type cannot hold on the wire", "downgrade"),
    Loss("header_repeated", "headers", "repeated with values that are not all strings", "downgrade"),
    Loss("header_order", "headers", "a repeated name with others between", "downgrade"),
    Loss("header_own", "headers", "a name that the gateway uses for itself", "drop"),
    Loss("priority_range", "priority", "not within 0 to 255", "drop"),
    Loss("timestamp_range", "timestamp", "negative, or beyond 64 bits", "drop"),
    Loss("text", "texts", "an unpaired surrogate, which is not valid Unicode", "drop"),
    Loss("long_text", "texts", "longer than 255 bytes: in a header of its own", "encode"),
    Loss("correlation_bytes", "correlation", "not UTF-8, or too long: base64, or a header", "encode"),
)
"""Parts of messages that AMQP 0-9-1 cannot express; `losses` returns the names of those in one message."""
LOSING: Final = reported_losses(LOSSES)
OWN_HEADERS: Final = frozenset(
    {
        *(RETAIN_HEADER, UTF8_HEADER, HOPS_HEADER, ENGINE_HEADER, CORRELATION_HEADER, ENCODING_HEADER),
        *LONG_TEXTS.values(),
    }
)
BEFORE_EXPIRATION: Final = PROPERTIES[: [name for name, _, _ in PROPERTIES].index("expiration")]
FLAG_CONTENT_TYPE: Final = 0x8000
FLAG_CONTENT_ENCODING: Final = 0x4000
FLAG_MESSAGE_ID: Final = 0x0080
ONE_BYTE: Final = (0x1000, 0x0800)  # delivery mode and priority
SHORT_BEFORE_ID: Final = (0x8000, 0x4000, FLAG_HEADERS, *ONE_BYTE, 0x0400, 0x0200, 0x0100)
"""Flags of the properties before a message id, in order: short strings, except the table and two bytes."""
BEFORE_HEADERS: Final = FLAG_CONTENT_TYPE | FLAG_CONTENT_ENCODING  # the two short strings before the table
FLAGS_BEHIND_MODE: Final = 0x0FFC
FLAGS_UNUSED: Final = 0x0002 | FLAG_CONTINUED
# Flags of fields that are no properties of the model.
FLAGS_BESIDE_TEXTS: Final = FLAG_HEADERS | FLAG_DELIVERY_MODE | FLAG_EXPIRATION
HOPS_PAIR: Final = encode_short_string(HOPS_HEADER) + b"I"
# Few messages cross more routes.
HOPS_PAIRS: Final = tuple([HOPS_PAIR + U32.pack(hops) for hops in range(16)])
RETAIN_PAIR: Final = encode_short_string(RETAIN_HEADER) + b"t\1"
OWN_NAMES: Final = frozenset(encode_short_string(name) for name in OWN_HEADERS)
EXPIRATION_MS_MAX: Final = 315_360_000_000  # milliseconds, ten years; RabbitMQ closes the channel for more
PERSISTENT: Final = 2
TRANSIENT: Final = 1
BYTES: Final = tuple([bytes((byte,)) for byte in range(SHORT_STRING_MAX + 1)])
OWN_FIRST: Final = ord("x")  # first letter of all of them
PAIRS_MAX: Final = 16  # each pair is compared with all others
STRING_HEAD: Final = b"S\0\0"  # tag and the upper half of the length
TABLE_HEAD: Final = Struct(">HI").pack  # flags, size of the table


class Essentials(NamedTuple):
    """Properties of an AMQP message that routing needs, decoded before the others.

    `expiration_ms` is None if the message has no expiration. `special` is True if further checks are needed,
    because the message has a user id, the header CC or BCC, or RabbitMQ's direct reply-to.
    """

    durable: bool
    expiration_ms: int | None
    retain: bool
    hops: int
    special: bool = False


Form = tuple[int, bytes, bytes, tuple[str, ...]]
"""Encoded properties: their key in the set's cache, the bytes before and after the gap for an expiration, and
the names of parts that AMQP 0-9-1 cannot express.
"""


# Kinds of Form: without expiration, with a gap for a relative one, or with the expiration that the set has.
NONE: Final = 0
RELATIVE: Final = 1
KEPT: Final = 2
CROSSED: Final = "amqp091 crossed"  # unchanged but for the hop count
NO_ESSENTIALS: Final = Essentials(False, None, False, 0, False)
USUAL: Final = tuple([Essentials(durable, None, False, 0) for durable in (False, True)])
PRIORITY: Final = "amqp091 priority"
BLIND: Final = "BCC"
COPIES: Final = ("CC", BLIND)
SHOWN: Final = "amqp091 shown"  # without what only the broker may know
_OBEYED: Final = tuple(encode_short_string(name) for name in COPIES)
DIRECT_REPLY_PREFIX: Final = b"amq.rabbitmq.reply-to."
DIRECT_REPLY_TO: Final = encode_short_string("amq.rabbitmq.reply-to")

_sets: Final[Recurring[PropertySet]] = Recurring(SETS_MAX)


# --- from the wire


def message_id_in(raw: bytes) -> str | None:
    """Return the message id in encoded property flags and list, or None if there is none.

    Raises RemoteProtocolError if the bytes before the message id are malformed.
    """
    flags, at, end = int.from_bytes(raw[:2], "big"), 2, len(raw)
    usual = not flags & FLAG_CONTINUED
    for flag in SHORT_BEFORE_ID if usual else ():
        if not flags & flag:
            continue
        if flag == FLAG_HEADERS:
            begin, at = at, at + 4 + int.from_bytes(raw[at : at + 4], "big")
            usual = usual and LONG_ID not in raw[begin:at]
        elif flag in ONE_BYTE:
            at += 1
        else:
            at += 1 + raw[at] if at < end else 1
    if usual and at <= end and not flags & FLAG_MESSAGE_ID:
        return None
    text = raw[at + 1 : at + 1 + raw[at]] if at < end else b""
    if not usual or not text or len(text) < raw[at] or not text.isascii():
        return content_properties(raw).properties.message_id
    return text.decode()


def content_properties(raw: bytes) -> PropertySet:
    """Return a property set for `raw`, encoded property flags and list; sets of equal bytes are shared.

    The set is decoded on first use, when malformed properties raise RemoteProtocolError 502.
    """
    found = _sets.cached.get(raw) or _sets.get(raw)
    if found is None:
        found = PropertySet(PROTOCOL, raw, decode_model)
        if len(raw) <= SET_BYTES_MAX:
            _sets.put(raw, found)
    return found


@lru_cache(maxsize=1024)
def _present(flags: int) -> tuple[tuple[int, str], ...]:
    """Return (flag, domain) of each property whose flag is set in `flags`, the property flags."""
    return tuple((flag, domain) for _, domain, flag in PROPERTIES if flags & flag)


def _positions(raw: bytes) -> tuple[int, int, int, int, int]:
    """Return the positions of headers, delivery-mode, expiration, reply-to and user-id in `raw`.

    `raw` are encoded property flags and list; the position of an absent property is 0. No property is
    decoded. But the bounds of each one are computed, so that properties that are forwarded undecoded cannot
    harm the receiver. Raises RemoteProtocolError 502 if the last property does not end at the end of `raw`.
    """
    headers = mode = expiration = reply = user = 0
    try:
        flags = raw[0] << 8 | raw[1]
        if flags & FLAGS_UNUSED:
            decode_properties(raw)  # raises the error for such flags
        at = 2 if not flags & FLAG_CONTINUED else _behind_flags(raw)
        if flags & FLAG_CONTENT_TYPE:
            at += raw[at] + 1
        if flags & FLAG_CONTENT_ENCODING:
            at += raw[at] + 1
        if flags & FLAG_HEADERS:
            headers = at
            at += (raw[at] << 24 | raw[at + 1] << 16 | raw[at + 2] << 8 | raw[at + 3]) + 4
        if flags & FLAG_DELIVERY_MODE:
            mode = at
            at += 1
        if flags & FLAGS_BEHIND_MODE:
            expiration, reply, user, at = _behind_mode(raw, flags, at)
    except (IndexError, StructError):
        raise syntax_error("the properties are cut short") from None
    if at != len(raw):
        raise syntax_error("the properties do not end at the end of their data")
    return headers, mode, expiration, reply, user


def _behind_mode(raw: bytes, flags: int, at: int) -> tuple[int, int, int, int]:
    """Return the positions of expiration, reply-to and user-id, and the end of all properties.

    `flags` are the property flags in `raw`, and `at` is the position behind the delivery-mode.
    """
    expiration = reply = user = 0
    for flag, domain in _present(flags & FLAGS_BEHIND_MODE):
        if flag == FLAG_EXPIRATION:
            expiration = at
        elif flag == FLAG_REPLY_TO:
            reply = at
        elif flag == FLAG_USER_ID:
            user = at
        if domain == "o":
            at += 1
        elif domain == "ll":
            at += 8
        else:
            at += raw[at] + 1
    return expiration, reply, user, at


def _behind_flags(raw: bytes) -> int:
    """Return the position behind the property flags, at which the property list begins."""
    at = 0
    while U16.unpack_from(raw, at)[0] & FLAG_CONTINUED:
        at += 2
    return at + 2


def delivery_mode(raw: bytes) -> int:
    """Return the delivery-mode in encoded properties without decoding the others, or 0 if it is absent.

    Raises RemoteProtocolError 502.
    """
    at = _positions(raw)[1]
    return raw[at] if at else 0


def expiration_ms(raw: bytes) -> int | None:
    """Return the expiration in encoded properties in milliseconds, or None if it is absent.

    The other properties are not decoded. Raises RemoteProtocolError: 502 for malformed properties, 406 if the
    expiration is not a valid number.
    """
    at = _positions(raw)[2]
    return _read_expiration(raw, at) if at else None


def _read_expiration(raw: bytes, at: int) -> int:
    """Return the expiration at position `at` in milliseconds.

    Raises RemoteProtocolError 406, with RabbitMQ's text, if it is not a valid number.
    """
    text = raw[at + 1 : at + 1 + raw[at]]
    if text.isdigit() and int(text) <= EXPIRATION_MS_MAX:
        return int(text)
    if text[:1] in (b"+", b"-") and text[1:].isdigit() and 0 <= int(text) <= EXPIRATION_MS_MAX:
        return int(text)  # Erlang accepts a sign
    digits = len(text) - len(text.lstrip(b"0123456789"))
    expiration = text.decode(errors="replace")
    if digits == len(text) and digits:
        why = f"{{value_too_large,{expiration}}}"
    elif text[:1] == b"-" and text[1:].isdigit():
        why = f"{{value_negative,{expiration}}}"
    elif digits:
        why = f'{{leftover_string,"{expiration[digits:]}"}}'
    else:
        why = "no_integer"
    fault = f"PRECONDITION_FAILED - invalid expiration '{expiration}': {why}"
    raise RemoteProtocolError(fault, reason=ReplyCode.PRECONDITION_FAILED)


def essentials(property_set: PropertySet) -> Essentials:
    """Return those properties of a set that routing needs, decoded once and cached in the set.

    Return NO_ESSENTIALS for a set of another protocol. Raises RemoteProtocolError for malformed properties:
    406 for an invalid expiration, otherwise 502.
    """
    if property_set.protocol != PROTOCOL:
        return NO_ESSENTIALS
    found: Essentials | None = property_set.parsed
    if found is None:
        found = property_set.parsed = _read_essentials(property_set, property_set.raw)
    return found


def _read_essentials(property_set: PropertySet, raw: bytes) -> Essentials:
    """Decode from `raw` the properties that routing needs.

    Also set `has_reply_to` and `read_texts` of `property_set`, to which `raw` belongs.
    """
    headers, mode, expiration, reply, user = _positions(raw)
    durable = mode != 0 and raw[mode] == PERSISTENT
    limit = _read_expiration(raw, expiration) if expiration else None
    retained, crossed, asks = False, 0, reply != 0
    special = user != 0 or (asks and raw.startswith(DIRECT_REPLY_TO, reply))
    holds = survey(raw, headers) if headers else TEXTS
    if holds == UNKNOWN:
        for name, value in decode_table(raw, headers)[0]:
            if name == RETAIN_HEADER:
                retained = value.value is True
            elif name == HOPS_HEADER and type(value.value) is int:
                crossed = min(max(crossed, value.value), HOPS_MAX)
            elif name in COPIES:
                special = True
            elif name == LONG_TEXTS["reply_to"]:
                asks = True
    elif holds == TEXTS and headers and not (raw[0] << 8 | raw[1]) & ~FLAGS_BESIDE_TEXTS:
        property_set.read_texts = _read_texts
    property_set.has_reply_to = asks
    if limit is None and not (retained or crossed or special):
        return USUAL[durable]
    return Essentials(durable, limit, retained, crossed, special)


def _read_texts(raw: bytes, before: bytes, between: bytes, bare: bool) -> list[bytes]:
    return texts_of(raw, 2, before, between, bare)  # the table is the first property


def priority_of(message: Message) -> int:
    """Return the priority of a message, cached in its property set; 0 if it is absent or malformed."""
    property_set = message.property_set
    found: int | None = property_set.forms.get(PRIORITY)
    if found is None:
        try:
            found = property_set.properties.priority or 0
        except RemoteProtocolError:
            found = 0
        property_set.forms[PRIORITY] = found
    return found


def retain(property_set: PropertySet) -> bool:
    """Return True if the header `x-mqtt-retain`, which stands for MQTT's retain flag, is true."""
    return essentials(property_set).retain


def hops(property_set: PropertySet) -> int:
    """Return the number of routes that the message has crossed, according to its properties."""
    return essentials(property_set).hops


def decode_model(raw: bytes) -> Properties:
    """Decode encoded property flags and list to protocol-independent properties.

    Raises RemoteProtocolError 502.
    """
    native = decode_properties(raw)
    headers: list[tuple[str, Value]] = []
    own: dict[str, Any] = {}
    for name, value in native.headers or ():
        if name in OWN_HEADERS:
            own[name] = value.value
        elif name == BLIND:
            continue
        elif value.type is ValueType.ARRAY and _are_strings(value.value):
            headers += [(name, each) for each in value.value]
        else:
            headers.append((name, value))
    texts = {}
    for attribute, name in LONG_TEXTS.items():
        field_value = getattr(native, attribute)
        texts[attribute] = (
            own[name] if field_value is None and isinstance(own.get(name), str) else field_value
        )
    texts["user_id"] = native.user_id  # never read from a header
    utf8 = own.get(UTF8_HEADER)
    return Properties(
        utf8=utf8 if isinstance(utf8, bool) else None,
        correlation=_read_correlation(native.correlation_id, own),
        priority=native.priority,
        timestamp=native.timestamp,
        headers=tuple(headers),
        **texts,
    )


def _are_strings(values: tuple[Value, ...]) -> bool:
    """Return True for two or more strings, into which a repeated header is translated."""
    return len(values) > 1 and all(each.type is ValueType.STRING for each in values)


def _read_correlation(correlation_id: bytes | None, own: dict[str, Any]) -> bytes | None:
    """Return the correlation of a message as bytes, or None if it has none.

    `own` are the headers that only gateways write, by name. One of them has a correlation that does not fit
    the property correlation-id, another one states that the property is in base64.
    """
    if correlation_id is None:
        data = own.get(CORRELATION_HEADER)
        return data if isinstance(data, bytes) else None
    if own.get(ENCODING_HEADER) == BASE64:
        with suppress(Base64Error):
            return b64decode(correlation_id, validate=True)
    return correlation_id


# --- to the wire


def encode_properties(message: Message, utc: float, *, ms_max: int | None = None) -> bytes:
    """Encode the properties of a message of any protocol as property flags and property list.

    `utc`, in POSIX seconds, is the time to which the expiration is relative. The expiration is in
    milliseconds, rounded up, and at most `ms_max`. A message from AMQP that still has its expiration keeps it
    unchanged. Raises RemoteProtocolError if the sender's properties are malformed.
    """
    property_set = message.property_set
    expires = message.expires
    if property_set.protocol == PROTOCOL:
        durable, limit, retained, crossed, special = essentials(property_set)
        if special:
            property_set = _without_blind_copies(property_set)
        if (expires != NEVER) == (limit is not None):
            if message.durable == durable and message.retain == retained:
                if message.hops == crossed:
                    return property_set.raw
                if not crossed:
                    return _with_hops(property_set, message.hops)
            return _form(message, KEPT)[1]
    if expires == NEVER:
        return _form(message, NONE)[1]
    _, head, tail, _ = _form(message, RELATIVE)
    remaining_ms = max(0, ceil((expires - utc) * 1000))
    text = b"%d" % (remaining_ms if ms_max is None else min(remaining_ms, ms_max))
    return head + BYTES[len(text)] + text + tail


def outlasts(message: Message, utc: float) -> bool:
    """Return True if the message expires later than RabbitMQ's maximum expiration after `utc`.

    `utc` is the present time in POSIX seconds.
    """
    return (message.expires - utc) * 1000 > EXPIRATION_MS_MAX


def _without_blind_copies(property_set: PropertySet) -> PropertySet:
    """Return the property set without the header BCC, which consumers must not see.

    The header is removed only on delivery, because dead-lettering needs it.
    """
    found: PropertySet | None = property_set.forms.get(SHOWN)
    if found is None:
        found = property_set
        native = decode_properties(property_set.raw)
        if any(name == BLIND for name, _ in native.headers or ()):
            native.headers = tuple(pair for pair in native.headers or () if pair[0] != BLIND)
            found = content_properties(encode_basic_properties(native))
        property_set.forms[SHOWN] = found
    return found


def _with_hops(property_set: PropertySet, crossed: int) -> bytes:
    """Return the encoded properties of a set, with a header for the hop count `crossed`.

    The result is cached in the set. Many messages that cross a route need no other change.
    """
    found: tuple[int, bytes] | None = property_set.forms.get(CROSSED)
    if found is not None and found[0] == crossed:
        return found[1]
    data = with_pair(property_set.raw, _hops_pair(crossed))
    property_set.forms[CROSSED] = (crossed, data)
    return data


def with_pair(raw: bytes, pair: bytes) -> bytes:
    """Return `raw`, encoded property flags and list, with one more header.

    `pair` is the encoded name, type and value of this header.
    """
    flags = U16.unpack_from(raw)[0]
    if flags & FLAG_HEADERS:
        at = _positions(raw)[0]
        size = U32.unpack_from(raw, at)[0]
        end = at + 4 + size
        return raw[:at] + U32.pack(size + len(pair)) + raw[at + 4 : end] + pair + raw[end:]
    at = _behind_flags(raw)
    for _ in _present(flags & BEFORE_HEADERS):
        at += raw[at] + 1
    return U16.pack(flags | FLAG_HEADERS) + raw[2:at] + U32.pack(len(pair)) + pair + raw[at:]


def without_orders(raw: bytes) -> bytes:
    """Return `raw`, encoded properties, without what another broker would act on: CC, BCC and the user id.

    The other broker would route copies by the headers CC and BCC, and compare the user id with the gateway's
    own. The user id becomes a header. If nothing has to change, return the same object.
    """
    visible, blind = _OBEYED
    if not (visible in raw or blind in raw or U16.unpack_from(raw)[0] & FLAG_USER_ID):
        return raw
    native = decode_properties(raw)
    headers = tuple([pair for pair in native.headers or () if pair[0] not in COPIES])
    native.headers = headers or None
    return _without_user(native)


def without_user_id(raw: bytes) -> bytes:
    """Return encoded properties in which the user id is replaced by a header.

    If there is no user id, return the same object.
    """
    return _without_user(decode_properties(raw)) if U16.unpack_from(raw)[0] & FLAG_USER_ID else raw


def _without_user(native: BasicProperties) -> bytes:
    if native.user_id is not None:
        user, native.user_id = native.user_id, None
        others = [pair for pair in native.headers or () if pair[0] != USER_HEADER]
        native.headers = (*others, (USER_HEADER, string(user)))
    return encode_basic_properties(native)


def losses(message: Message) -> tuple[str, ...]:
    """Return the names of the parts of `message` that AMQP 0-9-1 cannot express.

    Parts with the policy `encode` are left out, because other fields carry them. The encoded properties are
    cached, so that `encode_properties` need not encode them again.
    """
    if message.property_set.protocol == PROTOCOL:
        return ()
    lost = _form(message, NONE if message.expires == NEVER else RELATIVE)[3]
    return tuple([name for name in lost if name in LOSING]) if lost else ()


def _form(message: Message, expiry: int) -> Form:
    """Return the encoded properties of a message (a Form), and cache them in its property set.

    `expiry` is NONE (no expiration), RELATIVE (with a gap for an expiration relative to the time of sending)
    or KEPT (with the expiration that the set has).
    """
    property_set = message.property_set
    key = message.hops << 4 | expiry << 2 | message.retain << 1 | message.durable
    last = property_set.form  # of any protocol: the keys differ
    if last is not None and last[0] == key:
        form: Form = last
        return form
    found: Form | None = property_set.stored_form(key)
    if found is None:
        found = _make_form(message, expiry, key)
        if last is not None:
            forms = property_set.forms
            if len(forms) >= FORMS_MAX:
                forms.clear()
            forms[last[0]] = last
    property_set.form = found
    return found


def _make_form(message: Message, expiry: int, key: int) -> Form:
    """Encode the properties of a message, without a cache. `expiry` is as in `_form`, `key` the cache key."""
    property_set = message.property_set
    if property_set.read_texts is not None and property_set.protocol != PROTOCOL:
        texts = property_set.read_texts(property_set.raw, b"", STRING_HEAD, False)
        straight = _of_texts(texts, message, expiry, key)
        if straight is not None:
            return straight
    lost: set[str] = set()
    if property_set.protocol == PROTOCOL:
        native = decode_properties(property_set.raw)
        if message.durable != (native.delivery_mode == PERSISTENT):
            native.delivery_mode = PERSISTENT if message.durable else TRANSIENT
        unsaid = (RETAIN_HEADER, HOPS_HEADER, BLIND)
        headers = [pair for pair in native.headers or () if pair[0] not in unsaid]
        had_table = native.headers is not None
    else:
        native, headers = _from_model(property_set.properties, lost)
        native.delivery_mode = PERSISTENT if message.durable else TRANSIENT
        had_table = False
    if message.retain:
        headers.append((RETAIN_HEADER, Value(ValueType.BOOL, True)))
    if message.hops:
        headers.append((HOPS_HEADER, Value(ValueType.INT32, message.hops)))
    native.headers = tuple(headers) if headers or had_table else None
    if expiry != KEPT:
        native.expiration = None
    raw = encode_basic_properties(native)
    if expiry != RELATIVE:
        return key, raw, b"", tuple(sorted(lost))
    at = len(encode_basic_properties(_until_expiration(native)))
    flags = U16.unpack_from(raw)[0] | FLAG_EXPIRATION
    return key, U16.pack(flags) + raw[2:at], raw[at:], tuple(sorted(lost))


def _of_texts(texts: list[bytes], message: Message, expiry: int, key: int) -> Form | None:
    """Encode the properties of a message that has no other properties than the headers in `texts`.

    `texts` has three elements for each header: its name, STRING_HEAD and its value. Return None if a header
    cannot be written unchanged, or if there are too many. `expiry` and `key` are as in `_make_form`.
    """
    end = len(texts)
    if not end or end > 3 * PAIRS_MAX:
        return None
    for at in range(0, end, 3):
        name = texts[at]
        if len(name) > 1 and name[1] == OWN_FIRST and name in OWN_NAMES:
            return None
        for before in range(0, at, 3):
            if texts[before] == name:
                return None
    if message.retain:
        texts.append(RETAIN_PAIR)
    if message.hops:
        texts.append(_hops_pair(message.hops))
    table = b"".join(texts)
    flags = FLAG_HEADERS | FLAG_DELIVERY_MODE | (FLAG_EXPIRATION if expiry == RELATIVE else 0)
    mode = PERSISTENT if message.durable else TRANSIENT
    return key, TABLE_HEAD(flags, len(table)) + table + BYTES[mode], b"", ()


def _hops_pair(hops: int) -> bytes:
    return HOPS_PAIRS[hops] if hops < len(HOPS_PAIRS) else HOPS_PAIR + U32.pack(hops)


def _until_expiration(native: BasicProperties) -> BasicProperties:
    return BasicProperties(**{name: getattr(native, name) for name, _, _ in BEFORE_EXPIRATION})


def _from_model(properties: Properties, lost: set[str]) -> tuple[BasicProperties, list[tuple[str, Value]]]:
    """Convert protocol-independent properties to those of AMQP 0-9-1.

    Return them without headers, and the list of headers. Add the names of parts that AMQP cannot express to
    `lost`.
    """
    native = BasicProperties()
    pairs = _unique(properties.headers, lost)
    for attribute, header in LONG_TEXTS.items():
        text = getattr(properties, attribute)
        if text is not None and not is_unicode(text):
            lost.add("text")
        elif text is not None and len(text.encode()) > SHORT_STRING_MAX:
            lost.add("long_text")
            pairs.append((header, string(text)))
        else:
            setattr(native, attribute, text)
    user = properties.user_id
    if user is not None and (not is_unicode(user) or len(user.encode()) > SHORT_STRING_MAX):
        lost.add("text")
    else:
        native.user_id = user
    if properties.priority is not None:
        if 0 <= properties.priority <= 0xFF:
            native.priority = properties.priority
        else:
            lost.add("priority_range")
    if properties.timestamp is not None:
        if 0 <= properties.timestamp < 1 << 64:
            native.timestamp = properties.timestamp
        else:
            lost.add("timestamp_range")
    if properties.utf8 is not None:
        pairs.append((UTF8_HEADER, Value(ValueType.BOOL, properties.utf8)))
    if properties.correlation is not None:
        pairs += _write_correlation(native, properties.correlation, lost)
    return native, pairs


def _write_correlation(native: BasicProperties, data: bytes, lost: set[str]) -> list[tuple[str, Value]]:
    """Set the correlation-id of `native` to `data`, in base64 if `data` is not UTF-8.

    If `data` is too long, the correlation-id is not set. Return the headers from which a receiver can restore
    `data` in these cases, and add `correlation_bytes` to `lost`.
    """
    try:
        data.decode()
        written, marked = data, False
    except UnicodeDecodeError:
        written, marked = b64encode(data), True
    if marked or len(written) > SHORT_STRING_MAX:
        lost.add("correlation_bytes")
    if len(written) > SHORT_STRING_MAX:
        return [(CORRELATION_HEADER, Value(ValueType.BYTES, data))]
    native.correlation_id = written
    return [(ENCODING_HEADER, string(BASE64))] if marked else []


def _unique(headers: Headers, lost: set[str]) -> list[tuple[str, Value]]:
    """Convert headers to a list with unique names, for a field table.

    The values of a repeated name become an array at the position of the first value. Headers whose names are
    reserved or cannot be encoded are left out. Add the names of parts that a table cannot express to `lost`.
    """
    found: dict[str, list[Value]] = {}
    last = None
    for name, value in headers:
        if name in OWN_HEADERS:
            lost.add("header_own")
            continue
        if not is_unicode(name) or len(name.encode()) > SHORT_STRING_MAX:
            lost.add("header_name" if not is_unicode(name) else "header_name_long")
            continue
        if name in found and name != last:
            lost.add("header_order")
        found.setdefault(name, []).append(_writable(value, lost))
        last = name
    pairs = []
    for name, values in found.items():
        if len(values) > 1:
            if not _are_strings(tuple(values)):
                lost.add("header_repeated")
            pairs.append((name, Value(ValueType.ARRAY, tuple(values))))
        else:
            pairs.append((name, values[0]))
    return pairs


def _writable(value: Value, lost: set[str]) -> Value:
    """Return `value` if AMQP can encode it. Otherwise return its text, and add `header_value` to `lost`."""
    if fits(value):
        # One level deeper than a table's values, because a repeated name puts them into an array.
        with suppress(LocalProtocolError):
            encode_value(Value(ValueType.ARRAY, (value,)))
            return value
    lost.add("header_value")
    try:
        text = str(value.value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested without end
        text = ""
    return string(text.encode(errors="replace").decode())

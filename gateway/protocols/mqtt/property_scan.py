"""Single-pass scan of the common kind of PUBLISH property list.

A device that sends a trace or a time in each message has property lists that no cache can hold. `scan`
therefore finds everything at once: validity, topic alias, expiry, reply address, and the properties to
forward. Texts are not decoded: an ASCII text is valid if it has no NUL, so the scan counts the bytes of the
list that are NUL or not ASCII and compares the counts with those in its length and number fields. Lists of
any other kind (other letters, correlation data, the names that the gateway uses itself, invalid lists) are
left to properties.py, which knows all rules and names the error. No list is valid here and invalid there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.model.properties import Properties, PropertySet
from gateway.protocols.mqtt.spec import Property

USER_PROPERTY: Final = int(Property.USER_PROPERTY)
PAYLOAD_FORMAT: Final = int(Property.PAYLOAD_FORMAT_INDICATOR)
EXPIRY: Final = int(Property.MESSAGE_EXPIRY_INTERVAL)
ALIAS: Final = int(Property.TOPIC_ALIAS)
CONTENT_TYPE: Final = int(Property.CONTENT_TYPE)
RESPONSE_TOPIC: Final = int(Property.RESPONSE_TOPIC)
TEXTS: Final = frozenset((CONTENT_TYPE, RESPONSE_TOPIC))
NUMBERS: Final = {PAYLOAD_FORMAT: 2, ALIAS: 3, EXPIRY: 5}  # size in bytes, including the identifier
ASCII: Final = bytes(range(0x80))
OWN: Final = (b"gateway-", b"amqp-")  # prefixes of the user properties that mean something to the gateway
OWN_FIRST: Final = bytes([byte in {name[0] for name in OWN} for byte in range(256)])
USER_HEAD: Final = b"\x26\0"  # start of a user property: identifier, high byte of the name's length

Decode = Callable[[bytes], Properties]
"""Decoder of a property list."""


class ScannedProperties(PropertySet):
    """Property set of a PUBLISH, with the values in its encoded property list that routing needs.

    `total` is the number of properties. `alias` is the topic alias, 0 if there is none, and `bare` the
    encoded list without it. `identified` is True if the list has subscription identifiers. `expiry` is in
    seconds from arrival, or None. `hops` is the number of routes that the message has crossed. `parsed` is
    the encoded list without those properties that apply to one transmission only.
    """

    __slots__ = ("alias", "bare", "expiry", "hops", "identified", "total")

    def __init__(self, raw: bytes, total: int, decode: Decode) -> None:
        super().__init__("mqtt", raw, decode)
        self.has_reply_to = False
        self.bare = raw
        self.total = total
        self.alias = 0
        self.identified = False
        self.expiry: int | None = None
        self.hops = 0


def scan(raw: bytes, most: int, decode: Decode) -> ScannedProperties | None:
    """Validate an encoded property list in one pass, and return it with the values that routing needs.

    Return None if the list has more than `most` properties, or if only `spans` can parse it: because of a
    rare property, a text that is not ASCII, a reserved name, or an error. `decode` decodes the list later, on
    demand.
    """
    end = len(raw)
    at = total = nuls = highs = seen_mask = 0  # bytes of lengths and numbers: 0, and over 127
    others: list[tuple[int, int, int]] = []  # kind, start and stop of each property that is no user property
    try:
        while at < end:
            kind = raw[at]
            if kind == USER_PROPERTY:
                size = raw[at + 1] << 8 | raw[at + 2]
                value_at = at + 3 + size
                value_size = raw[value_at] << 8 | raw[value_at + 1]
                nuls += (size < 256) + (value_size < 256) + (not size & 255) + (not value_size & 255)
                highs += (size >> 7 & 1) + (value_size >> 7 & 1) + (size >> 15) + (value_size >> 15)
                if size and OWN_FIRST[raw[at + 3]] and raw.startswith(OWN, at + 3, value_at):
                    return None
                at = value_at + 2 + value_size
            else:
                stop = _stop(raw, at, kind)
                if not stop or seen_mask >> kind & 1:
                    return None
                seen_mask |= 1 << kind
                numbers = raw[at + 1 : at + 3 if kind in TEXTS else stop]
                nuls += numbers.count(0)
                highs += len(numbers.translate(None, ASCII))
                others.append((kind, at, stop))
                at = stop
            total += 1
    except IndexError:
        return None
    if at != end or total > most or raw.count(0) != nuls:
        return None
    if highs != (0 if raw.isascii() else len(raw.translate(None, ASCII))):
        return None
    found = ScannedProperties(raw, total, decode)
    if others:
        _note(found, others)
    else:
        found.parsed = raw
        found.read_texts = texts_of
    return found


def _stop(raw: bytes, at: int, kind: int) -> int:
    """Return the end of the property at `at`, which has the identifier `kind` and is no user property.

    Return 0 if the property is invalid, or if `scan` does not support it.
    """
    stop = 0
    if kind in TEXTS:
        stop = at + 3 + (raw[at + 1] << 8 | raw[at + 2])
        text = raw[at + 3 : stop]
        if kind == RESPONSE_TOPIC and (not text or b"+" in text or b"#" in text):
            stop = 0
    elif kind in NUMBERS:
        stop = at + NUMBERS[kind]
        number = int.from_bytes(raw[at + 1 : stop], "big")
        if (kind == PAYLOAD_FORMAT and number > 1) or (kind == ALIAS and not number):
            stop = 0
    return stop


def _note(found: ScannedProperties, others: list[tuple[int, int, int]]) -> None:
    """Set `expiry`, `alias`, `bare`, `has_reply_to` and `parsed` of `found` from its property list.

    `others` has (identifier, start, stop) of each property in the list that is not a user property.
    """
    raw = forwarded = found.raw
    for kind, start, stop in reversed(others):
        if kind == RESPONSE_TOPIC:
            found.has_reply_to = True
        elif kind in (EXPIRY, ALIAS):  # belong to one transmission
            number = int.from_bytes(raw[start + 1 : stop], "big")
            forwarded = forwarded[:start] + forwarded[stop:]
            if kind == EXPIRY:
                found.expiry = number
            else:
                found.alias, found.bare = number, raw[:start] + raw[stop:]
    found.parsed = forwarded


def texts_of(raw: bytes, before: bytes, between: bytes, bare: bool = False) -> list[bytes]:
    """Return the names and values of a list that has only user properties, as a flat list of bytes.

    `scan` must have accepted `raw`. Parameters and result are those of ReadTexts (model/properties.py).
    Return an empty list if a name is longer than 255 bytes.
    """
    found: list[bytes] = []
    with_before, with_between = bool(before), bool(between)
    at, end = 0, len(raw)
    while at < end:
        if raw[at + 1]:
            return []
        value_size_at = at + 3 + raw[at + 2]
        stop = value_size_at + 2 + (raw[value_size_at] << 8 | raw[value_size_at + 1])
        if with_before:
            found.append(before)
        found.append(raw[at + 3 if bare else at + 2 : value_size_at])
        if with_between:
            found.append(between)
        found.append(raw[value_size_at + 2 if bare else value_size_at : stop])
        at = stop
    return found


def write_texts(texts: list[bytes]) -> bytes:
    """Join `texts`, the result of a ReadTexts function (model/properties.py), to encoded user properties.

    In `texts`, USER_HEAD must precede each name. Return b"" if the texts cannot be written unchanged, because
    a name is reserved or a text contains NUL.
    """
    for at in range(1, len(texts), 3):
        name, value = texts[at], texts[at + 1]
        if name.startswith(OWN, 1) or name.find(0, 1) > 0 or value.find(0, 2) > 0:
            return b""
    return b"".join(texts)

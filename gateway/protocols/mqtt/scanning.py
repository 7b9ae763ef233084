"""The property list of a PUBLISH in one pass, when it is of the common kind.

A device that states a trace or a time in each message has a list that no cache knows, so everything that is
asked of a list is found together: whether it is well-formed, its alias, expiry and reply address, and what of
it is forwarded. Texts are not decoded: one of ASCII is well-formed when it holds no NUL, and the octets of a
list that are NUL or no ASCII are counted at once, and compared with those of its lengths and numbers. What is
not of this kind (other letters, correlation data, the names that the gateway uses itself, a fault) is for
properties.py, which knows all rules, and says what is wrong. No octets mean one thing here and another there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.protocols.mqtt.spec import STRING_OCTETS_MAX, Property

USER_PROPERTY: Final = int(Property.USER_PROPERTY)
PAYLOAD_FORMAT: Final = int(Property.PAYLOAD_FORMAT_INDICATOR)
EXPIRY: Final = int(Property.MESSAGE_EXPIRY_INTERVAL)
ALIAS: Final = int(Property.TOPIC_ALIAS)
CONTENT_TYPE: Final = int(Property.CONTENT_TYPE)
RESPONSE_TOPIC: Final = int(Property.RESPONSE_TOPIC)
TEXTS: Final = frozenset((CONTENT_TYPE, RESPONSE_TOPIC))
NUMBERS: Final = {PAYLOAD_FORMAT: 2, ALIAS: 3, EXPIRY: 5}  # and how many octets they have, the first included
ASCII: Final = bytes(range(0x80))
OWN: Final = (b"gateway-", b"amqp-")  # the names that mean something to the gateway begin so
OWN_FIRST: Final = frozenset(name[0] for name in OWN)
Texts = tuple[tuple[bytes, bytes], ...]


class Scan(NamedTuple):
    """What a list of `total` properties says. `bare`: without the alias (0: there is none). `identified`: it
    names subscriptions. `forwarded`: without what belongs to one transmission; None: not known. `texts`:
    there is nothing but user properties.
    """

    alias: int
    bare: bytes
    identified: bool
    total: int
    expiry: int | None = None
    asks: bool = False
    forwarded: bytes | None = None
    texts: bool = False


def scan(raw: bytes, most: int) -> Scan | None:
    """What a list of at most `most` properties says; None: it is not of the common kind."""
    end = len(raw)
    at = total = nuls = highs = seen = 0  # octets of lengths and numbers that are 0, and that are over 127
    others: list[tuple[int, int, int]] = []  # kind, start and stop of what is no user property
    try:
        while at < end:
            kind = raw[at]
            if kind == USER_PROPERTY:
                size = raw[at + 1] << 8 | raw[at + 2]
                value_at = at + 3 + size
                value_size = raw[value_at] << 8 | raw[value_at + 1]
                nuls += (size < 256) + (value_size < 256) + (not size & 255) + (not value_size & 255)
                highs += (size >> 7 & 1) + (value_size >> 7 & 1) + (size >> 15) + (value_size >> 15)
                if size and raw[at + 3] in OWN_FIRST and raw.startswith(OWN, at + 3, value_at):
                    return None
                at = value_at + 2 + value_size
            else:
                stop = _stop(raw, at, kind)
                if not stop or seen >> kind & 1:
                    return None
                seen |= 1 << kind
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
    return _told(raw, total, others) if others else Scan(0, raw, False, total, forwarded=raw, texts=True)


def _stop(raw: bytes, at: int, kind: int) -> int:
    """Where a property ends that is no user property; 0: it is not common, or not well-formed."""
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


def _told(raw: bytes, total: int, others: list[tuple[int, int, int]]) -> Scan:
    """The scan of a list in which these stand beside user properties."""
    alias, expiry, asks = 0, None, False
    bare = forwarded = raw
    for kind, start, stop in reversed(others):
        if kind == RESPONSE_TOPIC:
            asks = True
        elif kind in (EXPIRY, ALIAS):  # belong to one transmission
            number = int.from_bytes(raw[start + 1 : stop], "big")
            forwarded = forwarded[:start] + forwarded[stop:]
            if kind == EXPIRY:
                expiry = number
            else:
                alias, bare = number, raw[:start] + raw[stop:]
    return Scan(alias, bare, False, total, expiry, asks, forwarded)


def texts_of(raw: bytes) -> Texts:
    """Names and values of a list that a scan has found to have nothing but user properties."""
    found: list[tuple[bytes, bytes]] = []
    at, end = 0, len(raw)
    while at < end:
        name_at = at + 3
        value_size_at = name_at + (raw[at + 1] << 8 | raw[at + 2])
        value_at = value_size_at + 2
        at = value_at + (raw[value_size_at] << 8 | raw[value_size_at + 1])
        found.append((raw[name_at:value_size_at], raw[value_at:at]))
    return tuple(found)


def write_texts(texts: Texts) -> bytes:
    """User properties with these names and values, which are ASCII; b"": they cannot be said as they are."""
    parts: list[bytes] = []
    for name, value in texts:
        if len(name) > STRING_OCTETS_MAX or len(value) > STRING_OCTETS_MAX or name.startswith(OWN):
            return b""
        if 0 in name or 0 in value:
            return b""
        parts += (b"\x26", len(name).to_bytes(2, "big"), name, len(value).to_bytes(2, "big"), value)
    return b"".join(parts)

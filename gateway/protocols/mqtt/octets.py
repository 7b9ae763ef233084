"""The data representation of MQTT (5: 1.5): integers, strings and variable length integers as octets.

`Reader` serves every packet that is not on the fast path. Whatever would leave its bounds, or is not what
the specification allows, is the peer's fault and raises RemoteProtocolError with an MQTT 5 reason code.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.protocols.mqtt.spec import LENGTH_OCTETS_MAX, STRING_OCTETS_MAX, VARINT_MAX, ReasonCode, Version

ByteOrder = Literal["auto", "little", "big"]


class Bounds(NamedTuple):
    """How much of what may repeat one packet may hold; beyond it: 0x97."""

    properties_max: int = VARINT_MAX
    properties_bytes_max: int = VARINT_MAX
    filters_max: int = VARINT_MAX


UNBOUNDED: Final = Bounds()


def is_little(version: Version, byte_order: ByteOrder) -> bool:
    """Whether keep-alive and packet ids are little-endian.

    Only levels 2 and 3 ever differed; `auto` takes level 2 for little and level 3 for big, until a client of
    level 3 shows otherwise (ServerConnection), of which only the keep-alive is worth to be read again.
    """
    if version > Version.V31:
        return False
    return byte_order == "little" or (byte_order == "auto" and version is Version.MQIPDP)


def malformed(text: str) -> RemoteProtocolError:
    """The error of a packet that cannot be parsed (reason 0x81)."""
    return RemoteProtocolError(text, reason=ReasonCode.MALFORMED_PACKET)


def violation(text: str) -> RemoteProtocolError:
    """The error of a packet that can be parsed but must not be (reason 0x82)."""
    return RemoteProtocolError(text, reason=ReasonCode.PROTOCOL_ERROR)


def too_much(text: str) -> RemoteProtocolError:
    """The error of a packet that holds more than its receiver takes (reason 0x97)."""
    return RemoteProtocolError(text, reason=ReasonCode.QUOTA_EXCEEDED)


def decode_length(octets: bytes, at: int) -> tuple[int, int] | None:
    """The remaining length at `at` and the position behind it; None: need more (5: 2.1.4).

    More than four octets raise 0x81. A length in more octets than it needs is taken: small clients write a
    fixed width, and nothing depends on it.
    """
    value = 0
    for index, octet in enumerate(octets[at : at + LENGTH_OCTETS_MAX]):
        value |= (octet & 0x7F) << 7 * index
        if octet < 0x80:
            return value, at + index + 1
    if len(octets) - at >= LENGTH_OCTETS_MAX:
        raise malformed("a remaining length has at most four octets")
    return None


def encode_varint(value: int) -> bytes:
    """A variable length integer (5: 1.5.5)."""
    if not 0 <= value <= VARINT_MAX:
        raise LocalProtocolError(f"{value} does not fit a variable length integer")
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def decode_text(octets: bytes) -> str:
    """A UTF-8 string without its length: no surrogates, no NUL (5: 1.5.4); anything else raises 0x81."""
    try:
        text = octets.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"a string is not UTF-8: {error.reason}") from None
    if "\0" in text:
        raise malformed("a string holds U+0000")
    return text


def is_utf8(octets: bytes) -> bool:
    """Whether a body is what a payload format indicator of 1 says (5: 3.3.2.3.2)."""
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True


def decode_topic(wire: bytes) -> str:
    """The topic name that `wire` holds (5: 4.7); raises 0x81 when it is no text, 0x90 when it is no name."""
    text = decode_text(wire)
    if not text or "+" in text or "#" in text:
        raise RemoteProtocolError(
            "a topic name is empty or holds a wildcard", reason=ReasonCode.TOPIC_NAME_INVALID
        )
    return text


def is_filter(text: str) -> bool:
    """Whether `text` is a topic filter: wildcards fill a level, `#` the last one (5: 4.7.1, 4.8.2)."""
    levels = text.split("/")
    if levels[0] == "$share":
        if len(levels) < 3 or not levels[1] or "+" in levels[1] or "#" in levels[1]:
            return False
        levels = levels[2:]
        if levels == [""]:
            return False
    last = len(levels) - 1
    for index, level in enumerate(levels):
        if "#" in level and (level != "#" or index != last):
            return False
        if "+" in level and level != "+":
            return False
    return bool(text)


class Reader:
    """Takes values from octets, in order. `little` turns packet ids and keep-alive around (level 2)."""

    __slots__ = ("at", "bounds", "end", "little", "octets")

    def __init__(self, octets: bytes, *, little: bool = False, bounds: Bounds = UNBOUNDED) -> None:
        self.octets = octets
        self.bounds = bounds
        self.at = 0
        self.end = len(octets)
        self.little = little

    def take(self, count: int) -> bytes:
        """The next `count` octets."""
        start = self.at
        self.at = stop = start + count
        if stop > self.end:
            raise malformed("a packet ends inside a field")
        return self.octets[start:stop]

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.end - self.at)

    def octet(self) -> int:
        return self.take(1)[0]

    def word(self) -> int:
        return int.from_bytes(self.take(2), "big")

    def long(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def dialect_word(self) -> int:
        """A word in the connection's byte order."""
        return int.from_bytes(self.take(2), "little" if self.little else "big")

    def packet_id(self) -> int:
        """A packet identifier, never 0 (5: 2.2.1)."""
        value = self.dialect_word()
        if value == 0:
            raise violation("packet identifier 0")
        return value

    def varint(self) -> int:
        """A variable length integer in its shortest form (5: 1.5.5)."""
        found = decode_length(self.octets, self.at)
        if found is None:
            raise malformed("a packet ends inside a variable length integer")
        value, stop = found
        if stop - self.at > 1 and self.octets[stop - 1] == 0:
            raise malformed("a variable length integer is longer than it needs to be")
        self.at = stop
        return value

    def binary(self) -> bytes:
        return self.take(self.word())

    def text(self) -> str:
        return decode_text(self.binary())

    def pair(self) -> tuple[str, str]:
        """Two texts. In one piece, for a packet may hold a thousand of them."""
        octets = self.octets
        name_at = self.at + 2
        name_end = name_at + int.from_bytes(octets[self.at : name_at], "big")
        value_at = name_end + 2
        value_end = value_at + int.from_bytes(octets[name_end:value_at], "big")
        if value_at > self.end or value_end > self.end:
            raise malformed("a packet ends inside a field")
        self.at = value_end
        return decode_text(octets[name_at:name_end]), decode_text(octets[value_at:value_end])

    def finish(self) -> None:
        """Nothing may be left."""
        if self.at != self.end:
            raise malformed("a packet is longer than its fields")


def encode_binary(octets: bytes) -> bytes:
    """Two octets of length and the octets; LocalProtocolError beyond 65 535."""
    if len(octets) > STRING_OCTETS_MAX:
        raise LocalProtocolError("a string or binary field has at most 65 535 octets")
    return len(octets).to_bytes(2, "big") + octets


def encode_text(text: str) -> bytes:
    """A UTF-8 string with its length; LocalProtocolError when MQTT cannot carry it."""
    try:
        octets = text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a string cannot be UTF-8: {error.reason}") from None
    if 0 in octets:
        raise LocalProtocolError("a string must not hold U+0000")
    return encode_binary(octets)

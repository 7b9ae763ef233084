"""Data representation of MQTT (5: 1.5): integers, strings and variable length integers as bytes.

`Reader` serves every packet that is not on the fast path. A value that exceeds its bounds, or that the
specification forbids, is the peer's fault and raises RemoteProtocolError with an MQTT 5 reason code. The
`encode_*` functions raise LocalProtocolError instead.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.protocols.mqtt.spec import LENGTH_BYTES_MAX, STRING_BYTES_MAX, VARINT_MAX, ReasonCode, Version

ByteOrder = Literal["auto", "little", "big"]


class Bounds(NamedTuple):
    """Limits for one received packet: number and bytes of its properties, and number of topic filters.

    A packet that exceeds a limit is refused with 0x97.
    """

    properties_max: int = VARINT_MAX
    properties_bytes_max: int = VARINT_MAX
    filters_max: int = VARINT_MAX


UNBOUNDED: Final = Bounds()


def is_little(version: Version, byte_order: ByteOrder) -> bool:
    """Return True if keep-alive and packet ids are little-endian on the wire.

    Only clients of protocol levels 2 and 3 may be little-endian. `auto` means little-endian for level 2 and
    big-endian for level 3. ServerConnection later corrects this for a client of level 3 whose packet ids are
    evidently little-endian.
    """
    if version > Version.V31:
        return False
    return byte_order == "little" or (byte_order == "auto" and version is Version.MQIPDP)


def malformed(text: str) -> RemoteProtocolError:
    """Return the error for a packet that cannot be parsed (reason 0x81)."""
    return RemoteProtocolError(text, reason=ReasonCode.MALFORMED_PACKET)


def violation(text: str) -> RemoteProtocolError:
    """Return the error for a packet that can be parsed but violates the protocol (reason 0x82)."""
    return RemoteProtocolError(text, reason=ReasonCode.PROTOCOL_ERROR)


def quota_exceeded(text: str) -> RemoteProtocolError:
    """Return the error for a packet that exceeds a limit of its receiver (reason 0x97)."""
    return RemoteProtocolError(text, reason=ReasonCode.QUOTA_EXCEEDED)


def decode_length(data: bytes, at: int) -> tuple[int, int] | None:
    """Decode the remaining length at `at` (5: 2.1.4). Return its value and the position behind it.

    Return None if it is incomplete. Raises RemoteProtocolError (0x81) for more than four bytes. A length with
    more bytes than necessary is accepted, because small clients write a fixed number of bytes.
    """
    value = 0
    for index, byte in enumerate(data[at : at + LENGTH_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    if len(data) - at >= LENGTH_BYTES_MAX:
        raise malformed("a remaining length has at most four bytes")
    return None


def encode_varint(value: int) -> bytes:
    """Encode a variable length integer (5: 1.5.5). Raises LocalProtocolError if it is out of range."""
    if not 0 <= value <= VARINT_MAX:
        raise LocalProtocolError(f"{value} does not fit a variable length integer")
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def decode_text(data: bytes) -> str:
    """Decode a UTF-8 string without its length prefix (5: 1.5.4).

    Raises RemoteProtocolError (0x81) for surrogates, NUL and invalid UTF-8.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"a string is not UTF-8: {error.reason}") from None
    if "\0" in text:
        raise malformed("a string holds U+0000")
    return text


def is_utf8(data: bytes) -> bool:
    """Return True if `data` is valid UTF-8, as a payload format indicator of 1 claims (5: 3.3.2.3.2)."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def decode_topic(wire: bytes) -> str:
    """Decode a topic name (5: 4.7).

    Raises RemoteProtocolError: 0x81 if it is not a UTF-8 string, 0x90 if it is empty or has a wildcard.
    """
    text = decode_text(wire)
    if not text or "+" in text or "#" in text:
        raise RemoteProtocolError(
            "a topic name is empty or holds a wildcard", reason=ReasonCode.TOPIC_NAME_INVALID
        )
    return text


def is_filter(text: str) -> bool:
    """Return True if `text` is a valid topic filter, with or without `$share` (5: 4.7.1, 4.8.2)."""
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
    """Reader that decodes consecutive values from the bytes of one packet.

    If `little` is True, packet ids and keep-alive are little-endian. Each method raises RemoteProtocolError
    (0x81) if the packet ends inside the value.
    """

    __slots__ = ("at", "bounds", "data", "end", "little")

    def __init__(self, data: bytes, *, little: bool = False, bounds: Bounds = UNBOUNDED) -> None:
        self.data = data
        self.bounds = bounds
        self.at = 0
        self.end = len(data)
        self.little = little

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        start = self.at
        self.at = stop = start + count
        if stop > self.end:
            raise malformed("a packet ends inside a field")
        return self.data[start:stop]

    def rest(self) -> bytes:
        """Read all remaining bytes."""
        return self.take(self.end - self.at)

    def byte(self) -> int:
        """Read one byte as an integer."""
        return self.take(1)[0]

    def word(self) -> int:
        """Read a big-endian 16-bit integer."""
        return int.from_bytes(self.take(2), "big")

    def long(self) -> int:
        """Read a big-endian 32-bit integer."""
        return int.from_bytes(self.take(4), "big")

    def dialect_word(self) -> int:
        """Read a 16-bit integer that may be little-endian: a packet id or the keep-alive."""
        return int.from_bytes(self.take(2), "little" if self.little else "big")

    def packet_id(self) -> int:
        """Read a packet identifier (5: 2.2.1). Raises RemoteProtocolError (0x82) if it is 0."""
        value = self.dialect_word()
        if value == 0:
            raise violation("packet identifier 0")
        return value

    def varint(self) -> int:
        """Read a variable length integer (5: 1.5.5).

        Raises RemoteProtocolError (0x81) if it has more bytes than necessary.
        """
        found = decode_length(self.data, self.at)
        if found is None:
            raise malformed("a packet ends inside a variable length integer")
        value, stop = found
        if stop - self.at > 1 and self.data[stop - 1] == 0:
            raise malformed("a variable length integer is not minimally encoded")
        self.at = stop
        return value

    def binary(self) -> bytes:
        """Read a 16-bit length and the bytes that follow it (5: 1.5.6)."""
        return self.take(self.word())

    def text(self) -> str:
        """Read a 16-bit length and the UTF-8 string that follows it (5: 1.5.4).

        Raises RemoteProtocolError (0x81) if the string is malformed.
        """
        return decode_text(self.binary())

    def pair(self) -> tuple[str, str]:
        """Read two UTF-8 strings, each after its 16-bit length.

        Faster than two calls of `text`: a packet may have a thousand user properties.
        """
        data = self.data
        name_at = self.at + 2
        name_end = name_at + int.from_bytes(data[self.at : name_at], "big")
        value_at = name_end + 2
        value_end = value_at + int.from_bytes(data[name_end:value_at], "big")
        if value_at > self.end or value_end > self.end:
            raise malformed("a packet ends inside a field")
        self.at = value_end
        return decode_text(data[name_at:name_end]), decode_text(data[value_at:value_end])

    def finish(self) -> None:
        """Raise RemoteProtocolError (0x81) if bytes remain."""
        if self.at != self.end:
            raise malformed("a packet is longer than its fields")


def encode_binary(data: bytes) -> bytes:
    """Return `data` with a 16-bit length in front.

    Raises LocalProtocolError beyond 65 535 bytes.
    """
    if len(data) > STRING_BYTES_MAX:
        raise LocalProtocolError("a string or binary field has at most 65 535 bytes")
    return len(data).to_bytes(2, "big") + data


def encode_text(text: str) -> bytes:
    """Encode a UTF-8 string with its 16-bit length.

    Raises LocalProtocolError if MQTT does not allow the string.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a string cannot be UTF-8: {error.reason}") from None
    if 0 in data:
        raise LocalProtocolError("a string must not hold U+0000")
    return encode_binary(data)

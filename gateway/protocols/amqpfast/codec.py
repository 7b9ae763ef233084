"""Codec of command frames, commands and message heads (2.2.4, 3.1.1, 3.4).

A decoder returns a value, or None if more bytes are needed, or raises RemoteProtocolError with the reply
code. The fast loops for runs of messages are in `server.py` and `client.py`; they fall back on these
functions for every uncommon case. Fragments are outside of frames; the connection determines where they begin
and end. Encoders raise LocalProtocolError for values that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers, string
from gateway.protocols.amqpfast.commands import COMMANDS, Command, ConnectionClose, HandleBrowse
from gateway.protocols.amqpfast.spec import (
    FRAME_END,
    FRAME_SIZE_MIN,
    HANDSHAKE_FRAME_MAX,
    HANDSHAKE_TYPE_MAX,
    INDEX_BYTES_MAX,
    LOGIN_FIELD,
    LONG_SIZE_MAX,
    LONG_STRING_MAX,
    NONE,
    PASSWORD_FIELD,
    PLAIN,
    SHORT_SIZE_MAX,
    SHORT_STRING_MAX,
    SIZE_ESCAPE,
    ReplyCode,
)
from gateway.protocols.amqpfast.tables import FIELDS_MAX, bad_field, decode_table, encode_table

U16: Final = Struct(">H")
U32: Final = Struct(">I")
END: Final = bytes((FRAME_END,))
CLOSE: Final = bytes((ConnectionClose.type,))
BROWSE_WITHOUT_TAG: Final = 6  # size in bytes of the fields of HANDLE BROWSE in the grammar


def framing_error(text: str) -> RemoteProtocolError:
    """Return the error for an invalid frame (501)."""
    return RemoteProtocolError(text, reason=ReplyCode.FRAMING_ERROR)


# --- frames


def decode_frame(data: bytes, at: int, frame_max: int) -> tuple[int, int, int] | None:
    """Find the frame at `at`. Return the positions of its type byte and end byte, and of the next frame.

    Return None if the frame is incomplete. Raises RemoteProtocolError 501 if the size is invalid or exceeds
    `frame_max` bytes (4096 for commands of the handshake, whatever was negotiated), or if the end byte is
    wrong.
    """
    have = len(data) - at
    if have < 2:
        return None
    size = U16.unpack_from(data, at)[0]
    begin = at + 2
    if size == SIZE_ESCAPE:
        if have < 6:
            return None
        size = U32.unpack_from(data, begin)[0]
        begin += 4
    if not FRAME_SIZE_MIN <= size <= LONG_SIZE_MAX:
        raise framing_error(f"a frame of {size} bytes")
    if size > frame_max:
        raise framing_error(f"a frame of {size} bytes exceeds frame-max {frame_max}")
    if begin < len(data) and size > HANDSHAKE_FRAME_MAX and data[begin] <= HANDSHAKE_TYPE_MAX:
        raise framing_error(f"a frame of {size} bytes exceeds {HANDSHAKE_FRAME_MAX} for its type")
    end = begin + size - 1
    if end >= len(data):
        return None
    if data[end] != FRAME_END:
        raise framing_error(f"a frame ends with 0x{data[end]:02x}")
    return begin, end, end + 1


def frame_bytes(data: bytes, at: int) -> int:
    """Return how many bytes `data` must have from `at` on before `decode_frame` can succeed.

    This is the size of the incomplete frame at `at` or, if its size field is incomplete, the size of its
    first fields.
    """
    have = len(data) - at
    if have < 3:
        return 3  # the size, and the type on which its limit depends
    size: int = U16.unpack_from(data, at)[0]
    if size != SIZE_ESCAPE:
        return size + 2
    return 7 if have < 7 else int(U32.unpack_from(data, at + 2)[0]) + 6


def encode_frame(content: bytes) -> bytes:
    """Encode a frame from its `content`: a type byte and fields. The short form is used if possible."""
    size = len(content) + 1
    if size <= SHORT_SIZE_MAX:
        return U16.pack(size) + content + END
    return b"\xff\xff" + U32.pack(size) + content + END


# --- domains


def _read_short_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 1 + data[at]
    if end > len(data):
        raise framing_error("a short string reaches beyond its frame")
    return data[at + 1 : end], end


def _read_short_string(data: bytes, at: int) -> tuple[str, int]:
    raw, end = _read_short_bytes(data, at)
    if 0 in raw:
        raise framing_error("a short string holds a zero byte")
    try:
        return raw.decode(), end
    except UnicodeDecodeError:
        raise framing_error("a short string is not UTF-8") from None


def _read_long_string(data: bytes, at: int) -> tuple[bytes, int]:
    begin = at + 2
    end = begin + U16.unpack_from(data, at)[0]
    if end > len(data):
        raise framing_error("a long string reaches beyond its frame")
    return data[begin:end], end


def _read_table(data: bytes, at: int) -> tuple[Headers, int]:
    raw, end = _read_long_string(data, at)
    return decode_table(U16.pack(len(raw)) + raw)[0], end


def _read_byte(data: bytes, at: int) -> tuple[int, int]:
    return data[at], at + 1


def _read_short(data: bytes, at: int) -> tuple[int, int]:
    return U16.unpack_from(data, at)[0], at + 2


def _read_long(data: bytes, at: int) -> tuple[int, int]:
    return U32.unpack_from(data, at)[0], at + 4


READ: Final[dict[str, Callable[[bytes, int], tuple[Any, int]]]] = {
    "o": _read_byte,
    "s": _read_short,
    "l": _read_long,
    "ss": _read_short_string,
    "sb": _read_short_bytes,
    "ls": _read_long_string,
    "T": _read_table,
}


def encode_short_string(text: str | bytes) -> bytes:
    """Encode a short string: a length byte and UTF-8.

    Raises LocalProtocolError beyond 255 bytes, and for NUL in a text.
    """
    data = text.encode() if isinstance(text, str) else text
    if len(data) > SHORT_STRING_MAX:
        raise LocalProtocolError(f"a short string has at most {SHORT_STRING_MAX} bytes")
    if isinstance(text, str) and "\0" in text:
        raise LocalProtocolError("a short string holds no zero byte")
    return bytes((len(data),)) + data


def _write_long_string(data: bytes) -> bytes:
    return U16.pack(len(data)) + data


def _write_byte(number: int) -> bytes:
    return bytes((number,))


WRITE: Final[dict[str, Callable[[Any], bytes]]] = {
    "o": _write_byte,
    "s": U16.pack,
    "l": U32.pack,
    "ss": encode_short_string,
    "sb": encode_short_string,
    "ls": _write_long_string,
    "T": encode_table,
}


# --- commands


def decode_command(content: bytes) -> Command:
    """Decode a command from `content`: the type byte and fields of its frame, without the end byte.

    HANDLE BROWSE is accepted with and without its confirm-tag. Raises RemoteProtocolError: 501 for an unknown
    type and for fields that do not fill the frame exactly, 502 for an invalid table.
    """
    kind = COMMANDS.get(content[0])
    if kind is None:
        raise framing_error(f"unknown command type {content[0]}")
    if kind is HandleBrowse and len(content) == 1 + BROWSE_WITHOUT_TAG:
        content = content[:3] + b"\0\0" + content[3:]
    try:
        return _decode_fields(kind, content)
    except (StructError, IndexError):
        raise framing_error(f"{kind.name} is cut short") from None
    except RemoteProtocolError as fault:
        raise RemoteProtocolError(f"{kind.name}: {fault}", reason=fault.reason) from None


def _decode_fields(kind: type[Command], content: bytes) -> Command:
    """Decode the fields of a command as `kind.layout` describes them.

    Raises exceptions of various types if the content does not fit the layout.
    """
    values = []
    at = 1
    bit = 0  # mask of the next bit in the byte before `at`; 0 if a new byte begins
    for domain, _ in kind.layout:
        value: Any
        if domain == "b":  # the first bit is the lowest
            if not bit:
                bit = 1
                at += 1
            value = bool(content[at - 1] & bit)
            bit = bit << 1 & 0xFF
        else:
            bit = 0
            value, at = READ[domain](content, at)
        values.append(value)
    if at != len(content):
        raise framing_error("bytes follow the last field")
    return kind(*values)


def encode_command(command: Command) -> bytes:
    """Encode a command as a frame. Raises LocalProtocolError if a field does not fit."""
    parts = [bytes((command.type,))]
    byte, mask = 0, 1
    for domain, name in command.layout:
        value = getattr(command, name)
        if domain == "b":  # no command has more than eight in a row
            byte |= mask if value else 0
            mask <<= 1
            continue
        if mask > 1:
            parts.append(bytes((byte,)))
            byte, mask = 0, 1
        try:
            parts.append(WRITE[domain](value))
        except (StructError, ValueError):
            raise LocalProtocolError(f"{command.name}: {name} cannot hold {value!r}") from None
    if mask > 1:
        parts.append(bytes((byte,)))
    return encode_frame(b"".join(parts))


CLOSE_BYTES_MIN: Final = 7  # of CONNECTION CLOSE: the size, the type, the code, an empty text, the end
CLOSE_BYTES_MAX: Final = CLOSE_BYTES_MIN + SHORT_STRING_MAX


def ends_with_close(data: bytes) -> bool:
    """Return True if the last bytes of `data` are a CONNECTION CLOSE, in the short form of a frame.

    The bytes before that command are ignored.
    """
    if data[-1:] != END:
        return False
    for length in range(min(SHORT_STRING_MAX, len(data) - CLOSE_BYTES_MIN) + 1):
        at = len(data) - CLOSE_BYTES_MIN - length
        size = length + CLOSE_BYTES_MIN - U16.size
        if data[at : at + 3] == U16.pack(size) + CLOSE and data[at + 5] == length:
            return True
    return False


# --- the head of a message
#
#     body-size u32 | persistent | priority | expiration u32 | mime-type | encoding | identifier | headers
#
# Its first fragment begins with it (3.4). Everything behind the body-size is called the *properties* of the
# message: like messages share these bytes, whatever the size of their bodies, so caches are keyed by them.

BODY_SIZE: Final = Struct(">I")
FIXED: Final = Struct(">BBI")  # persistent, priority, expiration
HEAD_FIXED: Final = BODY_SIZE.size + FIXED.size
HEAD_MIN: Final = HEAD_FIXED + 3 + 2  # with empty strings and an empty table
HEAD_MAX: Final = HEAD_MIN + 3 * SHORT_STRING_MAX + LONG_STRING_MAX


def contents_invalid(text: str) -> RemoteProtocolError:
    """Return the error for a message with an invalid content header or body (542)."""
    return RemoteProtocolError(text, reason=ReplyCode.MESSAGE_CONTENTS_INVALID)


@dataclass
class Head:
    """Content header of a message: its properties in AMQP/Fast, decoded.

    `expiration` is in POSIX seconds; 0 means never.
    """

    persistent: bool = False
    priority: int = 0
    expiration: int = 0
    mime_type: str = ""
    encoding: str = ""
    identifier: str = ""
    headers: Headers = ()


def find_head_end(data: bytes, at: int, stop: int) -> int:
    """Return the position behind the content header that begins at `at` with its body-size.

    Raises RemoteProtocolError 542 if the header extends beyond the position `stop`.
    """
    try:
        end = at + HEAD_FIXED
        end += 1 + data[end]
        end += 1 + data[end]
        end += 1 + data[end]
        end += 2 + int(U16.unpack_from(data, end)[0])
    except (IndexError, StructError):
        end = stop + 1
    if end > stop:
        raise contents_invalid("the first fragment does not hold the head of its message")
    return end


def decode_head_properties(raw: bytes, fields_max: int = FIELDS_MAX) -> Head:
    """Decode an encoded content header, without its body-size. Raises RemoteProtocolError 542.

    `fields_max` limits the number of headers.
    """
    try:
        persistent, priority, expiration = FIXED.unpack_from(raw)
        mime_type, at = _read_text(raw, FIXED.size)
        encoding, at = _read_text(raw, at)
        identifier, at = _read_text(raw, at)
        headers, at = decode_table(raw, at, fields_max)
    except (IndexError, StructError):
        raise contents_invalid("the head of a message is cut short") from None
    except RemoteProtocolError as fault:
        raise contents_invalid(f"the head of a message: {fault}") from None
    if at != len(raw):
        raise contents_invalid("bytes follow the headers of a message")
    return Head(bool(persistent & 1), priority, expiration, mime_type, encoding, identifier, headers)


def _read_text(raw: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + raw[at]
    data = raw[at + 1 : end]
    if end > len(raw) or 0 in data:
        raise contents_invalid("a short string is cut short or holds a zero byte")
    try:
        return data.decode(), end
    except UnicodeDecodeError:
        raise contents_invalid("a short string is not UTF-8") from None


def encode_head_properties(head: Head, *, strict: bool = True) -> bytes:
    """Encode a content header without its body-size. Raises LocalProtocolError if a value does not fit.

    If `strict` is False, headers may have any name that a peer has sent.
    """
    texts = [encode_short_string(text) for text in (head.mime_type, head.encoding, head.identifier)]
    fixed = FIXED.pack(head.persistent, head.priority, head.expiration)
    return fixed + b"".join(texts) + encode_table(head.headers, strict=strict)


# --- message lists, 3.5.12

LIST_ITEM: Final = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?\Z")
LIST_SEPARATORS: Final = re.compile(r"[,.;\s]+")


def encode_message_list(
    numbers: Iterable[int], *, singly: bool = False, bytes_max: int = INDEX_BYTES_MAX
) -> tuple[bytes, int]:
    """Return the message list for HANDLE INDEX, and the number of messages in it.

    `numbers` are message numbers in ascending order. The list has at most `bytes_max` bytes, so that the last
    numbers may be missing. Its items are separated by commas, and consecutive numbers become a range. If
    `singly` is True, there are no ranges, and blanks separate the numbers: this is the only form that the C
    client of 2005 supports.
    """
    parts: list[str] = []
    size = listed_count = 0
    separator = " " if singly else ","
    first = last = -1
    for number in numbers:
        joins = not singly and number == last + 1 and last >= 0
        part = f"{first}-{number}" if joins else str(number)
        grown = size + len(part) + 1 - (len(parts[-1]) + 1 if joins else 0)
        if grown - 1 > bytes_max:
            break
        if joins:
            parts[-1] = part
        else:
            parts.append(part)
            first = number
        size, last = grown, number
        listed_count += 1
    return separator.join(parts).encode(), listed_count


def decode_message_list(data: bytes) -> list[tuple[int, int]]:
    """Return the ranges (first, last) in the message list of a HANDLE INDEX.

    A single number becomes a range of one number. Items may be separated by `,`, `.`, `;` or blanks. Raises
    RemoteProtocolError 502.
    """
    text = data.decode("ascii", errors="replace").strip()
    ranges = []
    for item in LIST_SEPARATORS.split(text) if text else ():
        found = LIST_ITEM.match(item)
        if found is None:
            raise bad_field(f"message-list: {item!r} is neither a number nor a range")
        first = int(found[1])
        last = int(found[2] or found[1])
        if last < first:
            raise bad_field(f"message-list: the range {item!r} is reversed")
        ranges.append((first, last))
    return ranges


# --- credentials and hashes

SHA1_BYTES: Final = 20


def encode_credentials(user: str, password: str) -> Headers:
    """Return user and password as the responses of a CONNECTION RESPONSE with mechanism PLAIN."""
    return ((LOGIN_FIELD, string(user)), (PASSWORD_FIELD, string(password)))


def decode_credentials(mechanism: str, responses: Headers) -> tuple[str, str] | None:
    """Return (user, password) of a CONNECTION RESPONSE, or None for an anonymous login.

    A login is anonymous with mechanism NONE, and with PLAIN without responses, which clients of 2005 send.
    Mechanism and field names are compared case-insensitively. Raises RemoteProtocolError 502 for another
    mechanism or invalid responses.
    """
    word = mechanism.upper()
    if word not in (PLAIN, NONE):
        raise bad_field(f"mechanism {mechanism!r} is not supported")
    if not responses or word != PLAIN:
        return None
    stated = {name.upper().rstrip(":"): value.value for name, value in responses}
    user, password = stated.get(LOGIN_FIELD), stated.get(PASSWORD_FIELD, "")
    if not isinstance(user, str) or not isinstance(password, str):
        raise bad_field("responses: must have a login and a password")
    return user, password


def read_content_hash(data: bytes) -> bytes | None:
    """Return the SHA-1 digest in `data`, the content-hash of PREPARE: 40 hexadecimal digits or 20 bytes.

    Return b"" if there is none, and None if the content-hash is invalid.
    """
    if not data or len(data) == SHA1_BYTES:
        return data
    if len(data) != 2 * SHA1_BYTES:
        return None
    try:
        return bytes.fromhex(data.decode("ascii"))
    except ValueError:
        return None

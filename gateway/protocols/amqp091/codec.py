"""Codec of frames, methods and content headers (4.2).

A decoder returns a value, or None if more bytes are needed, or raises RemoteProtocolError with the reply code
and the ids of the method at fault. The fast loops for runs of messages are in `server.py` and `client.py`;
they fall back on these functions for every uncommon case. Encoders raise LocalProtocolError for values that
do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers, string
from gateway.model.spooled_bodies import Body, Piece, Spooled, part_of
from gateway.protocols.amqp091.methods import METHODS, BasicPublish, Method
from gateway.protocols.amqp091.spec import (
    BASIC,
    BASIC_PUBLISH,
    FLAG_CONTINUED,
    FLAG_HEADERS,
    FRAME_BODY,
    FRAME_END,
    FRAME_HEADER,
    FRAME_HEARTBEAT,
    FRAME_KINDS,
    FRAME_METHOD,
    FRAME_OVERHEAD,
    FRAME_PREFIX,
    PROPERTIES,
    SHORT_STRING_MAX,
    ReplyCode,
)
from gateway.protocols.amqp091.table import (
    FIELD_BYTES_MIN,
    FIELDS_UNBOUNDED,
    decode_table,
    encode_table,
    syntax_error,
)

FRAME: Final = Struct(">BHI")
U16: Final = Struct(">H")
U32: Final = Struct(">I")
U64: Final = Struct(">Q")
CONTENT: Final = Struct(">HHQ")  # class-id, weight, body size
END: Final = bytes((FRAME_END,))
CONTENT_HEADER_MIN: Final = CONTENT.size + 2  # with one word of flags


# --- frames


def decode_frame(data: bytes, at: int, frame_max: int) -> tuple[int, int, bytes, int] | None:
    """Decode the frame at `at`. Return its type, channel and payload, and the position behind it.

    Return None if the frame is incomplete. Raises RemoteProtocolError: 501 if the first seven bytes are not
    those of a frame, if the frame exceeds `frame_max` bytes, or if the end byte is wrong; 505 for an invalid
    heartbeat.
    """
    begin = at + FRAME_PREFIX
    if begin > len(data):
        return None
    kind, channel, size = FRAME.unpack_from(data, at)
    if kind not in FRAME_KINDS:
        raise frame_error(f"unknown frame type {kind}")
    if size + FRAME_OVERHEAD > frame_max:
        raise frame_error(f"a frame of {size} bytes exceeds frame-max {frame_max}")
    if kind == FRAME_HEARTBEAT and (channel or size):
        text = "a heartbeat must be empty and on channel 0"
        raise RemoteProtocolError(text, reason=ReplyCode.UNEXPECTED_FRAME)
    end = begin + size
    if end >= len(data):
        return None
    if data[end] != FRAME_END:
        raise frame_error(f"a frame ends with 0x{data[end]:02x}")
    return kind, channel, data[begin:end], end + 1


def frame_bytes(data: bytes, at: int) -> int:
    """Return how many bytes `data` must have from `at` on before `decode_frame` can succeed.

    This is the size of the incomplete frame at `at` or, if its size field is incomplete, FRAME_PREFIX.
    """
    begin = at + FRAME_PREFIX
    return FRAME_PREFIX if begin > len(data) else FRAME_OVERHEAD + int(FRAME.unpack_from(data, at)[2])


def encode_frame(kind: int, channel: int, payload: bytes) -> bytes:
    """Encode one frame of the type `kind`. Its size is not compared with frame-max."""
    return FRAME.pack(kind, channel, len(payload)) + payload + END


def encode_method_frame(channel: int, method: Method) -> bytes:
    """Encode a method as a method frame."""
    return encode_frame(FRAME_METHOD, channel, encode_method(method))


def encode_content_frames(channel: int, properties: bytes, body: Body, frame_max: int) -> list[Piece]:
    """Encode the header frame and the body frames of a message.

    `properties` are the encoded property flags and property list. An empty body has no frame. Raises OSError
    if the body cannot be read from disk.
    """
    header = CONTENT.pack(BASIC, 0, len(body)) + properties
    frames: list[Piece] = [encode_frame(FRAME_HEADER, channel, header)]
    if isinstance(body, Spooled):
        return frames + body_frames(channel, body, frame_max)
    room = frame_max - FRAME_OVERHEAD
    frames += [encode_frame(FRAME_BODY, channel, body[at : at + room]) for at in range(0, len(body), room)]
    return frames


def body_frames(channel: int, body: Body, frame_max: int) -> list[Piece]:
    """Return the frames of a body as pieces, without copying the body or reading it from disk.

    Raises OSError if the body is on disk and missing.
    """
    if isinstance(body, Spooled):
        body.check()
    room = frame_max - FRAME_OVERHEAD
    frames: list[Piece] = []
    for at in range(0, len(body), room):
        piece = part_of(body, at, room)
        frames += (FRAME.pack(FRAME_BODY, channel, len(piece)), piece, END)
    return frames


def frame_error(text: str) -> RemoteProtocolError:
    """Return the error for an invalid frame (501)."""
    return RemoteProtocolError(text, reason=ReplyCode.FRAME_ERROR)


# --- domains


def _read_short_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 1 + data[at]
    if end > len(data):
        raise syntax_error("a short string reaches beyond its frame")
    return data[at + 1 : end], end


def _read_short_string(data: bytes, at: int) -> tuple[str, int]:
    raw, end = _read_short_bytes(data, at)
    try:
        return raw.decode(), end
    except UnicodeDecodeError:
        raise syntax_error("a short string is not UTF-8") from None


def _read_long_string(data: bytes, at: int) -> tuple[bytes, int]:
    begin = at + 4
    end = begin + U32.unpack_from(data, at)[0]
    if end > len(data):
        raise syntax_error("a long string reaches beyond its frame")
    return data[begin:end], end


def _read_byte(data: bytes, at: int) -> tuple[int, int]:
    return data[at], at + 1


def _read_short(data: bytes, at: int) -> tuple[int, int]:
    return U16.unpack_from(data, at)[0], at + 2


def _read_long(data: bytes, at: int) -> tuple[int, int]:
    return U32.unpack_from(data, at)[0], at + 4


def _read_long_long(data: bytes, at: int) -> tuple[int, int]:
    return U64.unpack_from(data, at)[0], at + 8


def _read_table(data: bytes, at: int) -> tuple[Headers, int]:
    return decode_table(data, at)


READ: Final[dict[str, Callable[[bytes, int], tuple[Any, int]]]] = {
    "o": _read_byte,
    "s": _read_short,
    "l": _read_long,
    "ll": _read_long_long,
    "ss": _read_short_string,
    "sb": _read_short_bytes,
    "ls": _read_long_string,
    "T": _read_table,
}


def encode_short_string(text: str | bytes) -> bytes:
    """Encode a short string: a length byte and UTF-8. Raises LocalProtocolError beyond 255 bytes."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) > SHORT_STRING_MAX:
        raise LocalProtocolError("a short string has at most 255 bytes")
    return bytes((len(data),)) + data


def reply_text(text: str) -> str:
    """Return the text, truncated to 255 bytes, the maximum of a short string."""
    return text.encode(errors="replace")[:SHORT_STRING_MAX].decode(errors="ignore")


def _write_long_string(data: bytes) -> bytes:
    return U32.pack(len(data)) + data


def _write_byte(number: int) -> bytes:
    return bytes((number,))


WRITE: Final[dict[str, Callable[[Any], bytes]]] = {
    "o": _write_byte,
    "s": U16.pack,
    "l": U32.pack,
    "ll": U64.pack,
    "ss": encode_short_string,
    "sb": encode_short_string,
    "ls": _write_long_string,
    "T": encode_table,
}
ZERO: Final[dict[str, Any]] = {"o": 0, "s": 0, "l": 0, "ll": 0, "ss": "", "ls": b"", "T": (), "b": False}


# --- methods


def decode_method(payload: bytes, fields_max: int = FIELDS_UNBOUNDED) -> Method:
    """Decode the method in `payload`, the payload of a method frame.

    Raises RemoteProtocolError 501 for an unknown method, and for arguments that are invalid or contain tables
    of more than `fields_max` fields.
    """
    if len(payload) < U32.size:
        raise frame_error("a method frame holds no method")
    index = U32.unpack_from(payload)[0]
    kind = METHODS.get(index)
    if kind is None:
        text = f"FRAME_ERROR - method {index >> 16}.{index & 0xFFFF} is not known"
        raise RemoteProtocolError(
            text, reason=ReplyCode.FRAME_ERROR, class_id=index >> 16, method_id=index & 0xFFFF
        )
    try:
        return _decode_arguments(kind, payload, fields_max)
    except (StructError, IndexError):
        text = f"FRAME_ERROR - {kind.name} is cut short"
    except RemoteProtocolError as fault:
        text = f"FRAME_ERROR - {kind.name}: {fault}"
    raise RemoteProtocolError(
        text, reason=ReplyCode.FRAME_ERROR, class_id=index >> 16, method_id=index & 0xFFFF
    )


def _decode_arguments(kind: type[Method], payload: bytes, fields_max: int) -> Method:
    """Decode the arguments of a method as `kind.layout` describes them.

    Raises exceptions of various types if the payload does not fit the layout.
    """
    values = {}
    at = U32.size
    bit = 0  # mask of the next bit in the byte before `at`; 0 if a new byte begins
    for domain, name in kind.layout:
        value: Any
        if domain == "b":  # 4.2.5.2: the first bit is the lowest
            if not bit:
                bit = 1
                at += 1
            value = bool(payload[at - 1] & bit)
            bit = bit << 1 & 0xFF
        else:
            bit = 0
            if domain == "T":
                value, at = decode_table(payload, at, fields_max)
            else:
                value, at = READ[domain](payload, at)
        if name:
            values[name] = value
    if at != len(payload):
        raise syntax_error("bytes follow the last argument")
    return kind(**values)


def encode_method(method: Method) -> bytes:
    """Encode a method as a frame's payload. Raises LocalProtocolError if an argument does not fit."""
    parts = [U32.pack(method.index)]
    byte, mask = 0, 1
    for domain, name in method.layout:
        value = getattr(method, name) if name else ZERO[domain]
        if domain == "b":
            if mask > 0x80:
                parts.append(bytes((byte,)))
                byte, mask = 0, 1
            byte |= mask if value else 0
            mask <<= 1
            continue
        if mask > 1:
            parts.append(bytes((byte,)))
            byte, mask = 0, 1
        try:
            parts.append(WRITE[domain](value))
        except (StructError, ValueError):
            raise LocalProtocolError(f"{method.name}: {name} cannot hold {value!r}") from None
    if mask > 1:
        parts.append(bytes((byte,)))
    return b"".join(parts)


PUBLISH_IDS: Final = U32.pack(BASIC_PUBLISH)


def decode_publish(method: bytes) -> BasicPublish:
    """Decode `method`, the arguments of basic.publish without class-id and method-id.

    Raises RemoteProtocolError 501.
    """
    found = decode_method(PUBLISH_IDS + method)
    assert isinstance(found, BasicPublish)
    return found


def decode_address(wire: bytes) -> tuple[str, str]:
    """Decode `wire`, an exchange and a routing key as two short strings, and return both.

    Raises RemoteProtocolError 502.
    """
    try:
        exchange, at = _read_short_string(wire, 0)
        routing_key, at = _read_short_string(wire, at)
    except IndexError:
        raise syntax_error("exchange and routing key are cut short") from None
    if at != len(wire):
        raise syntax_error("bytes follow the routing key")
    return exchange, routing_key


# --- content headers


@dataclass
class BasicProperties:
    """Properties of a message, with the names and types of AMQP 0-9-1. An absent property is None."""

    content_type: str | None = None
    content_encoding: str | None = None
    headers: Headers | None = None
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: bytes | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None


BEFORE_HEADERS: Final = (1 << 15, 1 << 14)  # flags of the two short strings before the table
PROPERTY_FLAGS: Final = sum(flag for _, _, flag in PROPERTIES)


def decode_content_header(payload: bytes, index: int = 0) -> tuple[int, bytes]:
    """Decode the payload of a content header frame.

    Return the body size, and the bytes that follow it: property flags and property list. `index` is the
    method that the header follows (class-id << 16 | method-id), for the error. Raises RemoteProtocolError 501
    if the header is malformed, and 505 if its class is not basic.
    """
    if len(payload) < CONTENT_HEADER_MIN:
        raise frame_error("a content header is cut short")
    class_id, weight, size = CONTENT.unpack_from(payload)
    if weight:
        raise frame_error(f"a content header of weight {weight}")
    if class_id != BASIC:
        text = (
            f"UNEXPECTED_FRAME - expected content header for class {BASIC}, got one for class {class_id} "
            "instead"
        )
        ids = index >> 16, index & 0xFFFF
        raise RemoteProtocolError(text, reason=ReplyCode.UNEXPECTED_FRAME, class_id=ids[0], method_id=ids[1])
    return size, payload[CONTENT.size :]


def decode_properties(raw: bytes) -> BasicProperties:
    """Decode encoded property flags and property list (4.2.6.1). Raises RemoteProtocolError 502."""
    try:
        return _decode_properties(raw)
    except (StructError, IndexError):
        raise syntax_error("the properties are cut short") from None


def _decode_properties(raw: bytes) -> BasicProperties:
    """Decode properties as `decode_properties` does.

    Raises IndexError or StructError if they are cut short.
    """
    flags = more = U16.unpack_from(raw)[0]
    at = 2
    while more & FLAG_CONTINUED:
        more = U16.unpack_from(raw, at)[0]
        at += 2
        if more & ~FLAG_CONTINUED:
            raise syntax_error("a property beyond the fourteen of class basic")
    if flags & ~(PROPERTY_FLAGS | FLAG_CONTINUED):
        raise syntax_error("property flag 1 has no property")
    found = BasicProperties()
    for name, domain, flag in PROPERTIES:
        if flags & flag:
            value, at = READ[domain](raw, at)
            setattr(found, name, value)
    if at != len(raw):
        raise syntax_error("bytes follow the last property")
    return found


def check_fields(raw: bytes, fields_max: int) -> None:
    """Raise RemoteProtocolError 502 if the headers table in `raw` has more than `fields_max` fields.

    `raw` are encoded property flags and property list. Bytes that are too few for so many fields are not
    decoded. Malformed properties raise no error here; they are detected later.
    """
    if len(raw) <= fields_max * FIELD_BYTES_MIN:
        return
    try:
        flags = more = U16.unpack_from(raw)[0]
        at = 2
        while more & FLAG_CONTINUED:
            more = U16.unpack_from(raw, at)[0]
            at += 2
        if flags & FLAG_HEADERS:
            for flag in BEFORE_HEADERS:
                if flags & flag:
                    at += 1 + raw[at]
            decode_table(raw, at, fields_max)
    except (StructError, IndexError):
        pass


def encode_basic_properties(properties: BasicProperties) -> bytes:
    """Encode property flags and property list. Raises LocalProtocolError if a value does not fit."""
    flags = 0
    parts = [b""]
    for name, domain, flag in PROPERTIES:
        value = getattr(properties, name)
        if value is not None:
            flags |= flag
            try:
                parts.append(WRITE[domain](value))
            except (StructError, ValueError):
                raise LocalProtocolError(f"property {name} cannot hold {value!r}") from None
    parts[0] = U16.pack(flags)
    return b"".join(parts)


# --- credentials

PLAIN: Final = "PLAIN"
AMQPLAIN: Final = "AMQPLAIN"
EXTERNAL: Final = "EXTERNAL"


def encode_response(mechanism: str, user: str, password: str) -> bytes:
    """Return the SASL response for a login, which is sent in connection.start-ok.

    The response is empty for EXTERNAL, where the certificate identifies the user.
    """
    if mechanism == PLAIN:
        return b"\0" + user.encode() + b"\0" + password.encode()
    if mechanism == AMQPLAIN:
        return encode_table((("LOGIN", string(user)), ("PASSWORD", string(password))))[4:]
    return b""

"""Bytes to frames and back, and the headers of a frame as properties."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError
from gateway.model.properties import Properties, ValueType, string

FRAME_HEAD_MAX: Final = 65_536  # bytes of a command with its headers
HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
OWN: Final = frozenset(
    (
        *("destination", "content-length", "content-type", "receipt", "subscription"),
        *("message-id", "ack", "transaction"),
    )
)
SAID: Final = frozenset(
    (ValueType.STRING, ValueType.BOOL, ValueType.INT32, ValueType.INT64, ValueType.DOUBLE)
)
ESCAPES: Final = {"\\": "\\\\", "\r": "\\r", "\n": "\\n", ":": "\\c"}
UNESCAPED: Final = {"\\r": "\r", "\\n": "\n", "\\c": ":", "\\\\": "\\"}


class Frame(NamedTuple):
    """A command with its headers, of which the first of a name counts, and its body."""

    command: str
    headers: dict[str, str]
    body: bytes = b""


class Decoder:
    """Frames out of bytes, however they are split."""

    def __init__(self, body_max: int) -> None:
        self._data = b""
        self._body_max = body_max

    def receive(self, data: bytes) -> list[Frame]:
        """The frames that are whole now. Raises RemoteProtocolError."""
        self._data += data
        frames: list[Frame] = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        self._data = self._data.lstrip(b"\r\n")  # heart-beats
        data = self._data
        end = HEAD_END.search(data)
        if end is None:
            if len(data) > FRAME_HEAD_MAX:
                raise RemoteProtocolError("a frame's headers are too long", reason=0)
            return None
        command, headers = _head(data[: end.start()].replace(b"\r\n", b"\n"))
        start = end.end()
        length = headers.get("content-length")
        if length is not None:
            if not length.isascii() or not length.isdigit() or int(length) > self._body_max:
                raise RemoteProtocolError(f"content-length {length[:20]!r}", reason=0)
            stop = start + int(length)
        else:
            stop = data.find(b"\0", start)
        if stop < 0 or len(data) <= stop:
            if len(data) - start > self._body_max:
                raise RemoteProtocolError("a body is too long", reason=0)
            return None
        if data[stop] != 0:
            raise RemoteProtocolError("a frame ends with NUL", reason=0)
        self._data = data[stop + 1 :]
        return Frame(command, headers, data[start:stop])


def _head(data: bytes) -> tuple[str, dict[str, str]]:
    try:
        command, *lines = data.decode().split("\n")
    except UnicodeDecodeError:
        raise RemoteProtocolError("headers are UTF-8", reason=0) from None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise RemoteProtocolError(f"{line[:20]!r} is no header", reason=0)
        headers.setdefault(_plain(name), _plain(value))
    return command, headers


def _plain(text: str) -> str:
    if "\\" not in text:
        return text
    found, at = "", 0
    while at < len(text):
        if text[at] == "\\":
            if text[at : at + 2] not in UNESCAPED:
                raise RemoteProtocolError("an escape that there is not", reason=0)
            found, at = found + UNESCAPED[text[at : at + 2]], at + 2
        else:
            found, at = found + text[at], at + 1
    return found


def encode_frame(frame: Frame) -> bytes:
    """A frame's bytes."""
    lines = [frame.command, *(f"{_escaped(name)}:{_escaped(value)}" for name, value in frame.headers.items())]
    return "\n".join(lines).encode() + b"\n\n" + frame.body + b"\0"


def _escaped(text: str) -> str:
    return "".join(ESCAPES.get(one, one) for one in text)


def encode_headers(headers: dict[str, str]) -> bytes:
    """Headers by themselves, as a property set carries them."""
    return "\n".join(f"{_escaped(name)}:{_escaped(value)}" for name, value in headers.items()).encode()


def decode_properties(data: bytes) -> Properties:
    """What headers say. Raises RemoteProtocolError."""
    _, headers = _head(b"SEND\n" + data if data else b"SEND")
    own = tuple((name, string(value)) for name, value in headers.items() if name not in OWN)
    return Properties(content_type=headers.get("content-type"), headers=own)


def headers_of(properties: Properties) -> dict[str, str]:
    """Properties as headers: texts and numbers only."""
    headers = {} if properties.content_type is None else {"content-type": properties.content_type}
    for name, value in properties.headers:
        if value.type in SAID:
            headers.setdefault(name, str(value.value))
    return headers

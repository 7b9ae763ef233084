"""Frames, however they are split; and what is no frame."""

from __future__ import annotations

import pytest

from gateway.errors import RemoteProtocolError
from gateway.model.properties import Properties, string
from tests.stomp.protocol.codec import Decoder, Frame, decode_properties, encode_frame, headers_of

FRAMES = [
    Frame("SEND", {"destination": "a:b\\c\nd", "receipt": "1"}, b"body"),
    Frame("SEND", {"destination": "a", "content-length": "3"}, b"\0\0\n"),
    Frame("ACK", {"id": "é-1"}),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000])
def test_the_split_never_changes_what_is_said(size: int) -> None:
    data = b"".join(map(encode_frame, FRAMES)) + b"\n"
    decoder = Decoder(1_000)
    found = [frame for at in range(0, len(data), size) for frame in decoder.receive(data[at : at + size])]
    assert found == FRAMES


def test_lines_may_end_as_in_windows() -> None:
    (frame,) = Decoder(100).receive(b"SEND\r\ndestination:a\r\n\r\nb\r\nc\0")
    assert frame == Frame("SEND", {"destination": "a"}, b"b\r\nc")


@pytest.mark.parametrize(
    "data",
    [
        b"SEND\nno header\n\n\0",
        b"SEND\na:\\x\n\n\0",
        b"SEND\ncontent-length:1001\n\n",
        b"SEND\ncontent-length:-1\n\n",
        b"SEND\ncontent-length:1\n\nab\0",
        b"SEND\n\xff:a\n\n\0",
        b"SEND\n\n" + b"x" * 1_001,
        b"x" * 70_000,
    ],
)
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Decoder(1_000).receive(data)


def test_properties() -> None:
    made = Properties(content_type="text/plain", headers=(("unit", string("°C")),))
    data = encode_frame(Frame("SEND", headers_of(made)))[len("SEND\n") : -len("\n\n\0")]
    assert decode_properties(data) == made

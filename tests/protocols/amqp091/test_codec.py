"""Bytes <-> frames, methods, content headers.

Each row four ways: encoded, decoded, byte by byte, cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_address,
    decode_content_header,
    decode_frame,
    decode_method,
    decode_properties,
    decode_publish,
    encode_basic_properties,
    encode_content_frames,
    encode_frame,
    encode_method,
    encode_method_frame,
    encode_response,
)
from gateway.protocols.amqp091.spec import PROPERTIES, ReplyCode
from tests.protocols.amqp091.wires import all_methods, all_properties

FRAME_MAX = 131_072
METHOD_ROWS = [
    (m.ConnectionTune(2047, 131072, 60), "01 0000 0000000c 000a001e 07ff 00020000 003c ce"),
    (m.ConnectionOpen("/"), "01 0000 00000008 000a0028 01 2f 00 00 ce"),
    (m.ConnectionOpenOk(), "01 0000 00000005 000a0029 00 ce"),
    (m.ChannelOpen(), "01 0000 00000005 0014000a 00 ce"),
    (m.ChannelOpenOk(), "01 0000 00000008 0014000b 00000000 ce"),
    (m.ChannelFlow(False), "01 0000 00000005 00140014 00 ce"),
    (m.AccessRequest("/r", passive=True, read=True), "01 0000 00000008 001e000a 02 2f72 12 ce"),
    (m.QueueDeclare("q", durable=True), "01 0000 0000000d 0032000a 0000 01 71 02 00000000 ce"),
    (m.QueueDeclare("q", no_wait=True), "01 0000 0000000d 0032000a 0000 01 71 10 00000000 ce"),
    (m.ExchangeUnbindOk(), "01 0000 00000004 00280033 ce"),
    (m.BasicQos(0, 10, True), "01 0000 0000000b 003c000a 00000000 000a 01 ce"),
    (m.BasicPublish("e", "k", immediate=True), "01 0000 0000000b 003c0028 0000 01 65 01 6b 02 ce"),
    (
        m.BasicDeliver("c", 7, True, "", "k"),
        "01 0000 00000012 003c003c 01 63 0000000000000007 01 00 01 6b ce",
    ),
    (m.BasicNack(5, True, True), "01 0000 0000000d 003c0078 0000000000000005 03 ce"),
    (m.BasicGetEmpty(), "01 0000 00000005 003c0048 00 ce"),
    (m.TxCommitOk(), "01 0000 00000004 005a0015 ce"),
]


def byte_by_byte(data: bytes) -> Any:
    """The first answer that is not None, and that it comes with the last byte."""
    for end in range(len(data)):
        assert decode_frame(data[:end], 0, FRAME_MAX) is None
    return decode_frame(data, 0, FRAME_MAX)


def cut_short(payload: bytes, decode: Callable[[bytes], object], code: ReplyCode) -> None:
    for end in range(len(payload)):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(payload[:end])
        assert caught.value.reason == code


@pytest.mark.parametrize("method, data", METHOD_ROWS)
def test_a_method_row(method: m.Method, data: str) -> None:
    wire = bytes.fromhex(data)
    assert encode_method_frame(0, method) == wire
    assert byte_by_byte(wire) == (1, 0, wire[7:-1], len(wire))
    assert decode_method(wire[7:-1]) == method
    cut_short(wire[7:-1], decode_method, ReplyCode.FRAME_ERROR)


@given(all_methods)
def test_every_method_four_ways(method: m.Method) -> None:
    payload = encode_method(method)
    assert decode_method(payload) == method
    assert decode_frame(encode_method_frame(9, method) + b"\x01", 0, FRAME_MAX) == (
        1,
        9,
        payload,
        len(payload) + 8,
    )
    with pytest.raises(RemoteProtocolError) as caught:
        decode_method(payload[:-1])
    assert caught.value.reason == ReplyCode.FRAME_ERROR
    with pytest.raises(RemoteProtocolError) as caught:
        decode_method(payload + b"\0")
    assert (caught.value.reason, caught.value.class_id) == (ReplyCode.FRAME_ERROR, method.index >> 16)


@given(all_properties)
def test_every_property_set_four_ways(properties: BasicProperties) -> None:
    raw = encode_basic_properties(properties)
    assert decode_properties(raw) == properties
    cut_short(raw, decode_properties, ReplyCode.SYNTAX_ERROR)
    with pytest.raises(RemoteProtocolError):
        decode_properties(raw + b"\0")


@pytest.mark.parametrize("name, domain, flag", PROPERTIES)
def test_a_property_alone(name: str, domain: str, flag: int) -> None:
    value: Any = {"o": 2, "T": (), "ll": 9, "sb": b"x", "ss": "x"}[domain]
    data = {"o": "02", "T": "00000000", "ll": "0000000000000009", "sb": "0178", "ss": "0178"}[domain]
    raw = flag.to_bytes(2, "big") + bytes.fromhex(data)
    assert encode_basic_properties(BasicProperties(**{name: value})) == raw
    assert decode_properties(raw) == BasicProperties(**{name: value})


FRAME_FAULTS = [
    ("04 0000 00000000 ce", "frame type 4", 501),
    ("00 0000 00000000", "frame type 0", 501),
    ("08 0001 00000000 ce", "heartbeat", 505),
    ("08 0000 00000001 00 ce", "heartbeat", 505),
    ("01 0000 0001fff9", "frame-max", 501),
    ("01 0000 ffffffff", "frame-max", 501),
    ("01 0000 00000004 005a0015 cd", "0xcd", 501),
]


@pytest.mark.parametrize("data, text, code", FRAME_FAULTS)
def test_a_frame_that_is_none(data: str, text: str, code: int) -> None:
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        decode_frame(bytes.fromhex(data), 0, FRAME_MAX)
    assert caught.value.reason == code


def test_frame_max_counts_the_whole_frame() -> None:
    assert decode_frame(encode_frame(3, 1, bytes(4088)), 0, 4096) is not None
    with pytest.raises(RemoteProtocolError):
        decode_frame(encode_frame(3, 1, bytes(4089))[:7], 0, 4096)


def test_the_heartbeat() -> None:
    assert byte_by_byte(bytes.fromhex("0800000000000000ce")[:7] + b"\xce") == (8, 0, b"", 8)


METHOD_FAULTS = [
    ("", 501, 0, 0),
    ("000a", 501, 0, 0),
    ("000a00ff", 501, 10, 255),
    ("00460001", 501, 70, 1),
    ("003c0028 0000 ff", 501, 60, 40),
    ("003c0028 0000 01ff 00 00", 501, 60, 40),
    ("0032000a 0000 00 00 00000002 01", 501, 50, 10),
    ("0032000a 0000 00 00 00000003 01 61 5a", 501, 50, 10),
]


@pytest.mark.parametrize("payload, code, class_id, method_id", METHOD_FAULTS)
def test_a_method_that_is_none(payload: str, code: int, class_id: int, method_id: int) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_method(bytes.fromhex(payload))
    assert (caught.value.reason, caught.value.class_id, caught.value.method_id) == (code, class_id, method_id)


PROPERTY_FAULTS = [
    "",
    "80",
    "8000",
    "800001",
    "8000 01ff",
    "0002",
    "0001",
    "0001 8000",
    "2000 00000001 00",
    "0000 00",
]


@pytest.mark.parametrize("data", PROPERTY_FAULTS)
def test_properties_that_are_none(data: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_properties(bytes.fromhex(data))
    assert caught.value.reason == ReplyCode.SYNTAX_ERROR


def test_flags_may_be_continued() -> None:
    assert decode_properties(bytes.fromhex("1001 0001 0000 02")) == BasicProperties(delivery_mode=2)


HEADER_FAULTS = ["", "003c0000", "003c0000 0000000000000000", "003d0000 0000000000000000 0000"]
HEADER_FAULTS += ["003c0001 0000000000000000 0000"]


@pytest.mark.parametrize("data", HEADER_FAULTS)
def test_content_headers_that_are_none(data: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_content_header(bytes.fromhex(data))
    another_class = data.startswith("003d")
    assert caught.value.reason == (505 if another_class else 501)


LOCAL_FAULTS = [
    m.QueueDeclare("x" * 256),
    m.BasicQos(-1),
    m.BasicAck(1 << 64),
    m.ConnectionStart(256),
]


@pytest.mark.parametrize("method", LOCAL_FAULTS)
def test_what_we_may_not_say(method: m.Method) -> None:
    with pytest.raises(LocalProtocolError):
        encode_method(method)


def test_properties_that_we_may_not_say() -> None:
    with pytest.raises(LocalProtocolError, match="priority"):
        encode_basic_properties(BasicProperties(priority=256))


@pytest.mark.parametrize(
    "size, frames", [(0, [0]), (1, [1]), (4088, [4088]), (4089, [4088, 1]), (9000, [4088, 4088, 824])]
)
def test_bodies_are_split_at_frame_max(size: int, frames: list[int]) -> None:
    header, *bodies = encode_content_frames(3, b"\0\0", bytes(size), 4096)
    assert decode_content_header(header[7:-1]) == (size, b"\0\0")
    assert [len(body) - 8 for body in bodies] == (frames if size else [])


def test_publish_and_address() -> None:
    data = encode_method(m.BasicPublish("e", "k.\u00e9", mandatory=True))[4:]
    assert decode_publish(b"\xff\xff" + data[2:]) == m.BasicPublish("e", "k.\u00e9", mandatory=True)
    assert decode_address(data[2:-1]) == ("e", "k.\u00e9")
    for faulty in (b"", b"\x01e", b"\x01e\x02k", b"\x01e\x01k!", b"\x01\xff\x00"):
        with pytest.raises(RemoteProtocolError):
            decode_address(faulty)


def test_credentials() -> None:
    assert encode_response("PLAIN", "us\u00e9r", "pass word") == "\0us\u00e9r\0pass word".encode()
    assert encode_response("AMQPLAIN", "u", "p") == b"\x05LOGINS\0\0\0\1u\x08PASSWORDS\0\0\0\1p"
    assert encode_response("EXTERNAL", "", "") == b""

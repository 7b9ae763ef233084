"""The PROXY protocol: each row is read whole, byte by byte and with what follows; faults are told early."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RemoteProtocolError
from gateway.transport.proxy_protocol import SIGNATURE, TAIL_BYTES_MAX, ProxyHeader, parse_header

FOUR = bytes((192, 0, 2, 1, 198, 51, 100, 2)) + struct.pack("!HH", 51_000, 1883)
SIX = bytes.fromhex("20010db8" + "00" * 11 + "01") + bytes(16) + struct.pack("!HH", 51_000, 1883)
LONGEST = b"PROXY UNKNOWN" + 2 * (b" ffff" + 7 * b":ffff") + b" 65535 65535"


def binary(command: int, family: int, tail: bytes, size: int | None = None) -> bytes:
    """A header of version 2."""
    return SIGNATURE + struct.pack("!BBH", command, family, len(tail) if size is None else size) + tail


HEADERS = {
    "v1 TCP4": (b"PROXY TCP4 192.0.2.1 198.51.100.2 51000 1883\r\n", "192.0.2.1", 51_000),
    "v1 TCP6": (b"PROXY TCP6 2001:db8::1 2001:DB8::2 51000 1883\r\n", "2001:db8::1", 51_000),
    "v1 mapped": (b"PROXY TCP6 ::ffff:192.0.2.1 ::1 0 65535\r\n", "192.0.2.1", 0),
    "v1 unknown": (b"PROXY UNKNOWN\r\n", "", 0),
    "v1 unknown, longest": (LONGEST + b"\r\n", "", 0),
    "v2 TCP over IPv4": (binary(0x21, 0x11, FOUR), "192.0.2.1", 51_000),
    "v2 TCP over IPv6": (binary(0x21, 0x21, SIX), "2001:db8::1", 51_000),
    "v2 with TLVs": (binary(0x21, 0x11, FOUR + b"\x02\x00\x04host\x04\x00\x01\x00"), "192.0.2.1", 51_000),
    "v2 with all that fits": (
        binary(0x21, 0x11, FOUR + bytes(TAIL_BYTES_MAX - len(FOUR))),
        "192.0.2.1",
        51_000,
    ),
    "v2 local": (binary(0x20, 0x00, b""), "", 0),
    "v2 local with addresses": (binary(0x20, 0x11, FOUR), "", 0),
    "v2 unspecified": (binary(0x21, 0x00, b"\x04\x00\x01\x00"), "", 0),
    "v2 Unix stream": (binary(0x21, 0x31, bytes(216)), "", 0),
}


@pytest.mark.parametrize("data, address, port", HEADERS.values(), ids=HEADERS)
def test_a_header_is_read_however_it_is_split(data: bytes, address: str, port: int) -> None:
    expected = ProxyHeader(address, port, len(data))
    assert parse_header(data) == expected
    assert parse_header(data + b"\x10\x0c\x00\x04MQTT") == expected
    for size in range(1, len(data)):
        assert parse_header(data[:size]) is None


FAULTS = {
    "MQTT": (b"\x10\x0c\x00\x04MQTT", 1),
    "TLS": (b"\x16\x03\x01", 1),
    "HTTP": (b"POST / HTTP/1.1\r\n", 2),
    "v1 in lower case": (b"proxy TCP4 ", 1),
    "v1 without a family": (b"PROXY \r\n", None),
    "v1 UDP": (b"PROXY UDP4 192.0.2.1 198.51.100.2 51000 1883\r\n", None),
    "v1 two blanks": (b"PROXY TCP4  192.0.2.1 198.51.100.2 51000 1883\r\n", None),
    "v1 trailing blank": (b"PROXY TCP4 192.0.2.1 198.51.100.2 51000 1883 \r\n", None),
    "v1 no such address": (b"PROXY TCP4 192.0.2.256 198.51.100.2 51000 1883\r\n", None),
    "v1 leading zero": (b"PROXY TCP4 192.0.2.01 198.51.100.2 51000 1883\r\n", None),
    "v1 other family": (b"PROXY TCP4 2001:db8::1 2001:db8::2 51000 1883\r\n", None),
    "v1 port too large": (b"PROXY TCP4 192.0.2.1 198.51.100.2 65536 1883\r\n", None),
    "v1 port with a zero": (b"PROXY TCP4 192.0.2.1 198.51.100.2 051 1883\r\n", None),
    "v1 port missing": (b"PROXY TCP4 192.0.2.1 198.51.100.2 51000\r\n", None),
    "v1 only a line feed": (b"PROXY TCP4 192.0.2.1 198.51.100.2 51000 1883\n".ljust(107), 107),
    "v1 too long": (LONGEST + b"0\r\n", 107),
    "v1 for ever": (b"PROXY UNKNOWN ".ljust(200, b"x"), 107),
    "v2 broken signature": (SIGNATURE[:7] + b"X", 8),
    "v2 version 1": (binary(0x11, 0x11, FOUR), 16),
    "v2 unknown command": (binary(0x22, 0x11, FOUR), 16),
    "v2 UDP": (binary(0x21, 0x12, FOUR), 16),
    "v2 unknown family": (binary(0x21, 0x41, FOUR), 16),
    "v2 too short for IPv4": (binary(0x21, 0x11, FOUR[:-1]), 16),
    "v2 too short for IPv6": (binary(0x21, 0x21, SIX[:-1]), 16),
    "v2 too large": (binary(0x21, 0x11, FOUR, TAIL_BYTES_MAX + 1), 16),
    "v2 local, too large": (binary(0x20, 0x00, b"", 0xFFFF), 16),
}


@pytest.mark.parametrize("data, told_at", FAULTS.values(), ids=FAULTS)
def test_what_is_no_header_is_refused_as_soon_as_that_can_be_said(data: bytes, told_at: int | None) -> None:
    told_at = told_at or len(data)
    for size in range(1, told_at):
        assert parse_header(data[:size]) is None
    for size in {told_at, len(data)}:
        with pytest.raises(RemoteProtocolError, match="invalid PROXY protocol header"):
            parse_header(data[:size])


@given(
    st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", SIGNATURE, SIGNATURE + b"\x21"]), st.binary(max_size=300)
)
def test_whatever_comes_is_a_header_or_none_or_not_yet_one(beginning: bytes, rest: bytes) -> None:
    data = beginning + rest
    try:
        found = parse_header(data) if data else None
    except RemoteProtocolError:
        return
    assert found is not None or len(data) < 16 + TAIL_BYTES_MAX

"""The PROXY protocol, versions 1 and 2: a balancer says on whose behalf it connects, before anything else.

https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt; section numbers below are its own. Version 1 is a
line of text, version 2 is binary and may carry TLVs, which are passed over.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError

LINE_OCTETS_MAX: Final = 107  # 2.1: the longest line with its end
LINE_BEGINS: Final = b"PROXY "
LINE: Final = re.compile(rb"PROXY TCP([46]) ([0-9A-Fa-f:.]+) ([0-9A-Fa-f:.]+) (\d{1,5}) (\d{1,5})")
UNKNOWN: Final = re.compile(rb"PROXY UNKNOWN(?: [^\r\n]*)?")
SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
PREFIX: Final = struct.Struct("!12sBBH")  # 2.2: signature, version and command, family and transport, length
TAIL_OCTETS_MAX: Final = 4_096  # addresses and TLVs; a certificate may be among these
LOCAL: Final = 0x20
PROXY: Final = 0x21
TCP_OVER_IP: Final = {0x11: struct.Struct("!4s4sHH"), 0x21: struct.Struct("!16s16sHH")}
WITHOUT_ADDRESS: Final = (0x00, 0x31)  # unspecified, and a stream of the Unix domain


class Announced(NamedTuple):
    """What a header says: the client's `address` and `port` ("" and 0: it does not tell); its own size."""

    address: str
    port: int
    octets: int


def parse_header(data: bytes) -> Announced | None:
    """The header at the beginning of `data`; None: more is needed. RemoteProtocolError when it is none."""
    if data[:1] == b"P":
        return _line(data)
    if data[: len(SIGNATURE)] != SIGNATURE[: len(data)]:
        raise _malformed("it begins otherwise")
    if len(data) < PREFIX.size:
        return None
    _, command, family, size = PREFIX.unpack_from(data)
    if command not in (LOCAL, PROXY):
        raise _malformed(f"version and command are {command:#04x}")
    if size > TAIL_OCTETS_MAX:
        raise _malformed(f"it is larger than {TAIL_OCTETS_MAX} octets")
    end = PREFIX.size + size
    if command == PROXY and family not in WITHOUT_ADDRESS:
        addresses = TCP_OVER_IP.get(family)
        if addresses is None:
            raise _malformed(f"family and transport are {family:#04x}, and not TCP over IP")
        if size < addresses.size:
            raise _malformed("it is too short for its addresses")
        if len(data) < end:
            return None
        source, _, port, _ = addresses.unpack_from(data, PREFIX.size)
        return Announced(_text(ipaddress.ip_address(source)), port, end)
    return Announced("", 0, end) if len(data) >= end else None


def _line(data: bytes) -> Announced | None:
    """Version 1."""
    line, found, _ = data[:LINE_OCTETS_MAX].partition(b"\r\n")
    if line[: len(LINE_BEGINS)] != LINE_BEGINS[: len(line)]:
        raise _malformed("it begins otherwise")
    if not found:
        if len(data) >= LINE_OCTETS_MAX:
            raise _malformed(f"the line is longer than {LINE_OCTETS_MAX} octets")
        return None
    octets = len(line) + 2
    if UNKNOWN.fullmatch(line):
        return Announced("", 0, octets)
    fields = LINE.fullmatch(line)
    if fields is None:
        raise _malformed("the line cannot be read")
    family, source, target, *ports = (field.decode() for field in fields.groups())
    try:
        addresses = [ipaddress.ip_address(text) for text in (source, target)]
    except ValueError as error:
        raise _malformed(str(error)) from error
    if any(address.version != int(family) for address in addresses):
        raise _malformed(f"the addresses are not of TCP{family}")
    if any(int(port) > 65_535 or (port != "0" and port.startswith("0")) for port in ports):
        raise _malformed("a port is no port")
    return Announced(_text(addresses[0]), int(ports[0]), octets)


def _text(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """The address; IPv4 in the form of IPv6 as IPv4."""
    return str(getattr(address, "ipv4_mapped", None) or address)


def _malformed(why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"no header of the PROXY protocol: {why}", reason=0)

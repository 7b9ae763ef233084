"""Parser of PROXY protocol headers, versions 1 and 2, by which a load balancer announces its client.

https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt; section numbers below are its own. The header is
sent at the beginning of a connection. Version 1 is a line of text, version 2 is binary and may carry TLVs
(type, length, value). Only the TLV about TLS is read (2.2.5): whether the client has presented a certificate
that the balancer has verified, and what that contains. Others are ignored.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError

LINE_BYTES_MAX: Final = 107  # bytes; 2.1: the longest line with its CRLF
LINE_BEGINS: Final = b"PROXY "
LINE: Final = re.compile(rb"PROXY TCP([46]) ([0-9A-Fa-f:.]+) ([0-9A-Fa-f:.]+) (\d{1,5}) (\d{1,5})")
UNKNOWN: Final = re.compile(rb"PROXY UNKNOWN(?: [^\r\n]*)?")
SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
PREFIX: Final = struct.Struct("!12sBBH")  # 2.2: signature, version and command, family and transport, length
TAIL_BYTES_MAX: Final = 4_096  # bytes of addresses and TLVs, which may include a certificate
LOCAL: Final = 0x20
PROXY: Final = 0x21
TCP_OVER_IP: Final = {0x11: struct.Struct("!4s4sHH"), 0x21: struct.Struct("!16s16sHH")}
WITHOUT_ADDRESS: Final = (0x00, 0x31)  # unspecified, and a Unix domain stream


SSL: Final = 0x20  # type of the TLV about TLS; the next two are nested in it
COMMON_NAME: Final = 0x22
CERTIFICATE: Final = 0x28
TLV: Final = struct.Struct("!BH")  # type, length
SSL_HEAD: Final = struct.Struct("!BI")  # client flags, and 0 if the client's certificate was verified
SHOWN: Final = 0x02 | 0x04  # client presented a certificate, now or earlier in its TLS session


class Secured(NamedTuple):
    """Client certificate that a load balancer has verified, as its PROXY header reports it.

    `data` is the certificate (DER), which few balancers send. An empty `common_name` or `data` was not
    reported.
    """

    common_name: str = ""
    data: bytes = b""


class ProxyHeader(NamedTuple):
    """Content of a PROXY header.

    `address` and `port` are the client's ("" and 0 if not given), `byte_count` is the size of the header in
    bytes, and `secured` is the client's TLS data (None if not given).
    """

    address: str
    port: int
    byte_count: int
    secured: Secured | None = None


def parse_header(data: bytes) -> ProxyHeader | None:
    """Return the header at the beginning of `data`, or None if more bytes are needed.

    Raises RemoteProtocolError if `data` does not begin with a valid header.
    """
    if data[:1] == b"P":
        return _line(data)
    if data[: len(SIGNATURE)] != SIGNATURE[: len(data)]:
        raise _malformed("the signature is wrong")
    if len(data) < PREFIX.size:
        return None
    _, command, family, size = PREFIX.unpack_from(data)
    if command not in (LOCAL, PROXY):
        raise _malformed(f"version and command are {command:#04x}")
    if size > TAIL_BYTES_MAX:
        raise _malformed(f"the header is larger than {TAIL_BYTES_MAX} bytes")
    end = PREFIX.size + size
    if command == PROXY and family not in WITHOUT_ADDRESS:
        addresses = TCP_OVER_IP.get(family)
        if addresses is None:
            raise _malformed(f"family and transport are {family:#04x}, and not TCP over IP")
        if size < addresses.size:
            raise _malformed("the header is too short for its addresses")
        if len(data) < end:
            return None
        source, _, port, _ = addresses.unpack_from(data, PREFIX.size)
        secured = _secured(data[PREFIX.size + addresses.size : end])
        return ProxyHeader(_text(ipaddress.ip_address(source)), port, end, secured)
    return ProxyHeader("", 0, end) if len(data) >= end else None


def _secured(tail: bytes) -> Secured | None:
    """Return the TLS data in the TLVs `tail`, or None if there are none. Raises RemoteProtocolError."""
    found = _values(tail).get(SSL)
    if found is None:
        return None
    if len(found) < SSL_HEAD.size:
        raise _malformed("the TLS part of the header is too short")
    client, verified = SSL_HEAD.unpack_from(found)
    if not client & SHOWN or verified != 0:
        return Secured()
    within = _values(found[SSL_HEAD.size :])
    name = within.get(COMMON_NAME, b"").decode(errors="replace")
    return Secured(name, within.get(CERTIFICATE, b""))


def _values(tail: bytes) -> dict[int, bytes]:
    """Return the values of TLVs (type, length, value) by type, up to the first incomplete one, maybe padding.

    Raises RemoteProtocolError if a TLV that the gateway evaluates occurs twice.
    """
    found: dict[int, bytes] = {}
    at = 0
    while len(tail) - at >= TLV.size:
        kind, size = TLV.unpack_from(tail, at)
        at += TLV.size
        if len(tail) - at < size:
            break
        if kind in found and kind in (SSL, COMMON_NAME, CERTIFICATE):
            raise _malformed(f"TLV {kind:#04x} occurs twice")
        found[kind] = tail[at : at + size]
        at += size
    return found


def _line(data: bytes) -> ProxyHeader | None:
    """Return the version 1 header, a line of text, at the beginning of `data`, or None if it is incomplete.

    Raises RemoteProtocolError if the header is malformed.
    """
    line, found, _ = data[:LINE_BYTES_MAX].partition(b"\r\n")
    if line[: len(LINE_BEGINS)] != LINE_BEGINS[: len(line)]:
        raise _malformed("the signature is wrong")
    if not found:
        if len(data) >= LINE_BYTES_MAX:
            raise _malformed(f"the line is longer than {LINE_BYTES_MAX} bytes")
        return None
    byte_count = len(line) + 2
    if UNKNOWN.fullmatch(line):
        return ProxyHeader("", 0, byte_count)
    fields = LINE.fullmatch(line)
    if fields is None:
        raise _malformed("the line is malformed")
    family, source, target, *ports = (field.decode() for field in fields.groups())
    try:
        addresses = [ipaddress.ip_address(text) for text in (source, target)]
    except ValueError as error:
        raise _malformed(str(error)) from error
    if any(address.version != int(family) for address in addresses):
        raise _malformed(f"the addresses are not of TCP{family}")
    if any(int(port) > 65_535 or (port != "0" and port.startswith("0")) for port in ports):
        raise _malformed("a port is not a valid port number")
    return ProxyHeader(_text(addresses[0]), int(ports[0]), byte_count)


def _text(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return the address as text; an IPv4 address mapped into IPv6 is written as IPv4."""
    return str(getattr(address, "ipv4_mapped", None) or address)


def _malformed(why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"invalid PROXY protocol header: {why}", reason=0)

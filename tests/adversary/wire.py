"""Bytes for attacks: MQTT packets as large as one likes, made without the gateway's encoders, which refuse
to say what is said here."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

from tests.interop.gateway_fixture import LOOPBACK

PATIENCE_SECS: Final = 60.0


def length(size: int) -> bytes:
    """A variable byte integer."""
    found = bytearray()
    while True:
        size, low = divmod(size, 128)
        found.append(low | (128 if size else 0))
        if not size:
            return bytes(found)


def text(data: bytes) -> bytes:
    """A string with its length."""
    return len(data).to_bytes(2, "big") + data


def packet(first: int, *parts: bytes) -> bytes:
    """A control packet."""
    body = b"".join(parts)
    return bytes((first,)) + length(len(body)) + body


def pair(name: bytes, value: bytes) -> bytes:
    """A user property."""
    return b"\x26" + text(name) + text(value)


def connect_packet(client_id: bytes, *, level: int = 5, clean: bool = True, expiry_secs: int = 0) -> bytes:
    """CONNECT of MQTT 5 or 3.1.1, without keep-alive."""
    properties = b"\x11" + expiry_secs.to_bytes(4, "big") if expiry_secs else b""
    own = length(len(properties)) + properties if level == 5 else b""
    return packet(0x10, text(b"MQTT"), bytes((level, 2 if clean else 0)), b"\0\0", own, text(client_id))


def publish_packet(topic: bytes, body: bytes = b"x", *, qos: int = 0, properties: bytes = b"") -> bytes:
    """PUBLISH of MQTT 5; packet id 1."""
    number = b"\0\1" if qos else b""
    return packet(0x30 | qos << 1, text(topic), number, length(len(properties)), properties, body)


def opened(port: int, first: bytes = b"", *, timeout: float = PATIENCE_SECS) -> socket.socket:
    """A connection on which this much has been said."""
    sock = socket.create_connection((LOOPBACK, port), timeout=timeout)
    if first:
        sock.sendall(first)
    return sock


def mqtt(port: int, client_id: bytes = b"attacker", **more: int) -> socket.socket:
    """An MQTT client that has been let in."""
    sock = opened(port, connect_packet(client_id, **more))  # type: ignore[arg-type]
    answer = sock.recv(65_536)
    assert (answer[:1], answer[3:4]) == (b"\x20", b"\0"), answer
    return sock


def answered(sock: socket.socket, data: bytes = b"") -> bytes:
    """Say something; what comes back first. b"": the connection has ended, or ended while we spoke."""
    try:
        if data:
            sock.sendall(data)
        return sock.recv(65_536)
    except (ConnectionError, TimeoutError):
        return b""


def said(port: int, data: bytes) -> bytes:
    """All that a connection answers until it ends, or says nothing for a second."""
    found = b""
    with opened(port, timeout=1.0) as sock, suppress(OSError):
        sock.sendall(data)
        while data := sock.recv(65_536):
            found += data
    return found

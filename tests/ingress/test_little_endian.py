"""The little-endian dialect over a socket: no client of it survives, so its octets are written out here.

16-bit words (keep-alive, packet identifiers) have their low octet first, string lengths do not.
"""

from __future__ import annotations

import socket

import pytest

from gateway.settings import Listener
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of

CONNECT = bytes.fromhex("10 11 0006 4d51 4970 6470 02 02 3c00 0003 6f6c64".replace(" ", ""))
SUBSCRIBE = bytes.fromhex("82 08 0100 0003 612f62 01".replace(" ", ""))
PUBLISH = bytes.fromhex("32 0c 0003 612f62 0200 68656c6c6f".replace(" ", ""))


def converse(byte_order: str) -> bytes:
    """Everything that the listener answers to CONNECT, SUBSCRIBE to a/b and PUBLISH of hello, QoS 1."""
    listener = Listener(protocol="mqtt", host=LOOPBACK, port=0, byte_order=byte_order)
    with (
        running(settings_of(listeners={"mqtt": listener})) as gateway,
        socket.create_connection((LOOPBACK, gateway.mqtt), 5) as sock,
    ):
        sock.settimeout(5)
        sock.sendall(CONNECT + SUBSCRIBE + PUBLISH)
        answer = b""
        while len(answer) < 4 + 5 + 4 + 14:
            answer += sock.recv(1024)
        return answer


@pytest.mark.parametrize("byte_order", ["auto", "little"])
def test_words_are_little_endian(byte_order: str) -> None:
    answer = converse(byte_order)
    assert answer[:9] == bytes.fromhex("20020000 9003 0100 01".replace(" ", ""))
    assert bytes.fromhex("4002 0200".replace(" ", "")) in answer  # PUBACK 2
    assert (
        bytes.fromhex("320c 0003 612f62 0100 68656c6c6f".replace(" ", "")) in answer
    )  # our own identifier 1


def test_big_is_obeyed() -> None:
    answer = converse("big")
    assert bytes.fromhex("320c 0003 612f62 0001 68656c6c6f".replace(" ", "")) in answer

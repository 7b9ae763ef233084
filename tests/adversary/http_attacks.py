"""The HTTP port: no login, any address."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from tests.adversary.arena import Arena
from tests.adversary.cases import case
from tests.adversary.wire import opened, said

HOST = b"Host: localhost\r\n"
KEY = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
UPGRADE = b"GET / HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + KEY
SETTINGS = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: "

REQUESTS = (
    b"POST /api/v1/connections HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    UPGRADE + b"\r\n\x81\x85\x01\x02\x03\x04abcde",
    UPGRADE + b"Sec-WebSocket-Protocol: \xff\r\n\r\n",
    *(
        b"GET / HTTP/1.1\r\n" + HOST + SETTINGS + value + b"\r\n\r\n"
        for value in (b"AAAA", b"A", b"AAIAAAAF", b"", b"\xff", b"AAMAAABkAAQAAP__")
    ),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET http://[::1 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: \xe2\x82\xac\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"Expect: 200-maybe\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
)


@case()
def odd_requests(arena: Arena) -> None:
    """Upgrades, encodings and lengths that a server library chokes on."""
    for request in REQUESTS:
        said(arena.port("http"), request)
        assert arena.alive, request


@case()
def mutated_requests(arena: Arena) -> None:
    """Bytes changed, cut and repeated; the seed is fixed."""
    chance = random.Random(61_122)
    for _ in range(400):
        request = bytearray(chance.choice(REQUESTS))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(request))
            match chance.randrange(3):
                case 0:
                    request[at] = chance.randrange(256)
                case 1:
                    del request[at : at + chance.randint(1, 9)]
                case _:
                    request[at:at] = chance.randbytes(chance.randint(1, 9))
        with opened(arena.port("http")) as sock, suppress(OSError):
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1_024)
        assert arena.alive, bytes(request)


@case()
def bodies_that_never_come(arena: Arena) -> None:
    """More of them than there are places: others are still answered (the probe asks for /livez)."""
    request = b"POST /api/v1/connections HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\nx"
    held = []
    for number in range(600):
        with suppress(OSError):
            held.append(opened(arena.port("http"), request if number % 2 else b"PRI * HTTP/2.0\r\n\r\n"))
    for sock in held:
        sock.close()

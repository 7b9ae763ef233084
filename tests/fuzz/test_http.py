"""Whatever comes to the HTTP port, nothing but its connection ends, and nothing fails that nobody foresaw.

A grammar puts requests together out of what servers read (methods, targets, versions, framing, upgrades,
every header that changes a connection), then bytes are mutated; several may share a connection, in pieces.
`FUZZ_COUNT` sets how many connections (a tenth of it; at least 2 000); the seed is fixed.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Final

import pytest
import trio

from gateway.containment import counted
from gateway.settings import Http, StoreSettings
from tests.fuzz.mutation import mutated
from tests.interop.gateway_fixture import LOOPBACK, gateway_here, settings_of

COUNT: Final = max(int(os.environ.get("FUZZ_COUNT", "0")) // 10, 2_000)
pytestmark = pytest.mark.needs("time")  # as many inputs as FUZZ_COUNT says
SEED: Final = 7
AT_ONCE: Final = 16

METHODS: Final = b"GET GET GET POST POST HEAD OPTIONS PUT CONNECT PRI TRACE".split()
TARGETS: Final = (
    *b"/ /livez /livez/ /readyz /metrics /api/v1/status * /nothing // /%ff%00/../x ? /?a=b&&=&%".split(),
    *b"http://[ http://localhost/livez http://x localhost:80".split(),
    b"/api/v1/dead-letters/redrive",
    *b"/api/v1/dead-letters /api/v1/dead-letters?count=x /api/v1/dead-letters?count=9&route=%ff".split(),
    *b"/api/v1/dead-letters/1 /api/v1/dead-letters/%F0%9F /api/v1/dead-letters/purge".split(),
    *b"/api/v1/connections /api/v1/connections?count=%00 /api/v1/connections?user=%ff".split(),
    *b"/api/v1/connections/disconnect /api/v1/sessions /api/v1/sessions?count=-1".split(),
    *b"/api/v1/sessions?client=[*&count=5 /api/v1/sessions/remove /api/v1/openapi.json".split(),
    *b"/api/v1/journal?count=x /api/v1/publish /api/v1/mappings/dry-run /api/v1/queues/peek".split(),
    *b"/api/queues /api/queues/%2F/a /api/queues/%ff/%00?page=0 /api/bindings?columns=a..b /api/".split(),
    *b"/api/v1/queues /api/v1/queues?queue=%ff* /api/v1/queues/remove /api/v1/queues/purge".split(),
    *b"/api/v1/retained /api/v1/retained?topic=[ /api/v1/retained/remove".split(),
    b"/api/v1/dead-letters/" + b"9" * 5_000,
    b"/api/v1/connections?count=" + b"9" * 5_000,
    b"/" + b"a" * 20_000,
)
VERSIONS: Final = (b"1.1",) * 8 + (b"1.0", b"2.0", b"0.9", b"3.0", b"1.7")
VALUES: Final[dict[bytes, tuple[bytes, ...]]] = {
    b"Host": (b"localhost", b"localhost", b"[", b"[::1", b"", b"a,b", b"x:99999", b"\xff"),
    b"Connection": (b"close", b"keep-alive", b"Upgrade", b"Upgrade, HTTP2-Settings", b"\xff", b","),
    b"Upgrade": (b"h2c", b"websocket", b"h2c, websocket", b"TLS/1.0", b"\xff", b""),
    b"HTTP2-Settings": (b"AAAA", b"A", b"AAIAAAAF", b"", b"\xff"),
    b"Sec-WebSocket-Key": (b"dGhlIHNhbXBsZSBub25jZQ==", b"x", b"\xff"),
    b"Sec-WebSocket-Version": (b"13", b"8", b"\xff"),
    b"Sec-WebSocket-Protocol": (b"mqtt", b"\xff", b",,"),
    b"Sec-WebSocket-Extensions": (b"permessage-deflate", b"permessage-deflate; x=\xff"),
    b"Transfer-Encoding": (b"chunked", b"chunked", b"gzip", b"gzip, chunked", b"identity", b"\xff"),
    b"Content-Length": (b"0", b"3", b"3, 3", b"3, 4", b"-1", b"+3", b"9" * 5_000, b"99999999", b"x"),
    b"Expect": (b"100-continue", b"100-continue", b"200-ok", b"\xff"),
    b"Origin": (b"null", b"http://[", b"http://localhost", b"http://\xff", b"//\xe2\x84\x80"),
    b"Authorization": (b"Bearer \xff", b"Bearer", b"bearer " + b"x" * 2_000, b"Basic"),
    b"Content-Type": (b"application/json", b"multipart/form-data; boundary=\xff", b"text/\xff; charset=x"),
    b"X-Forwarded-For": (b"127.0.0.1",),
    b"Trailer": (b"x",),
    b"TE": (b"trailers",),
    b"Cookie": (b"\xff=\xff; a",),
    b"Range": (b"bytes=9-1",),
    b"X" * 300: (b"y",),
    b"Bad Name": (b"z",),
    b"": (b"empty",),
}
HEADERS: Final = [(name, value) for name, values in VALUES.items() for value in values]
BODIES: Final = (
    # JSON, and what is none
    *(b"", b"{}", b"[]", b'{"all": true}', b'{"ids": ["1"]}', b'{"ids": ["\xc3\x28"]}', b"[" * 3_000),
    *(b'{"ids": ["\\ud800"]}', b'{"client": "*"}', b'{"client": 1e999}', b'{"queue": "\\u0000*"}'),
    *(
        b'{"idle_longer_than": -1, "all": true}',
        b'{"idle_longer_than": "x"}',
        b'{"topic": "[", "dry_run": 1}',
    ),
    # chunks
    *(b"3\r\nabc\r\n0\r\n\r\n", b"zz\r\n", b"0\r\n\r\n", b"-1\r\n", b"f" * 40, b"1\r\nx\r\n" * 300),
    *(b"3;x=y\r\nabc\r\n0\r\nTrailer: x\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
    # other protocols: a WebSocket frame, HTTP/2, TLS
    *(
        b"\x81\x85\0\0\0\0hello",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        b"\x16\x03\x01\x02\0\1",
    ),
    b"\xff" * 70_000,
)
LINE_ENDS: Final = (b"\r\n",) * 12 + (b"\n", b"\r", b"\r\n ", b"\0\r\n")


def request(chance: random.Random) -> bytes:
    """One request, more or less."""
    end = chance.choice(LINE_ENDS)
    method, target, version = chance.choice(METHODS), chance.choice(TARGETS), chance.choice(VERSIONS)
    chosen = [(b"Host", b"localhost")] * (chance.random() < 0.8)
    chosen += chance.choices(HEADERS, k=chance.randrange(7))
    body = chance.choice(BODIES)
    if chance.random() < 0.4:
        chosen.append((b"Content-Length", str(len(body)).encode()))
    lines = [method + b" " + target + b" HTTP/" + version, *(name + b": " + value for name, value in chosen)]
    data = end.join([*lines, b"", b""]) + body
    return mutated(data, chance) if chance.random() < 0.5 else data


async def told(port: int, pieces: list[bytes]) -> bytes:
    """What a connection is answered that sends `pieces` and then nothing more."""
    answer = bytearray()
    with trio.fail_after(20):
        async with await trio.open_tcp_stream(LOOPBACK, port) as stream:
            try:
                for piece in pieces:
                    await stream.send_all(piece)
                await stream.send_eof()
                async for data in stream:
                    answer += data
            except trio.BrokenResourceError:
                pass  # it was ended while we spoke
    return bytes(answer)


@pytest.mark.parametrize("seed", [SEED])
async def test_requests(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    before = counted.copy()
    statuses: dict[bytes, int] = {}
    settings = settings_of(http=Http(host=LOOPBACK, port=0), store=StoreSettings(path=tmp_path))
    async with gateway_here(settings) as gateway:

        async def attack(count: int) -> None:
            for _ in range(count):
                data = b"".join(request(chance) for _ in range(chance.choice((1, 1, 1, 2, 3))))
                cut = chance.randrange(len(data) + 1)
                answer = await told(gateway.http_port, [data[:cut], data[cut:]])
                assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:80]
                for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer):
                    statuses[status] = statuses.get(status, 0) + 1
                    assert status != b"500", data

        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(attack, COUNT // AT_ONCE)
        answer = await told(gateway.http_port, [b"GET /livez HTTP/1.0\r\n\r\n"])
        assert answer.startswith(b"HTTP/1.1 200 ")
    assert counted == before
    assert {b"200", b"400", b"404", b"413", b"501"} <= statuses.keys(), statuses

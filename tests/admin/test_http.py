"""The HTTP server by itself, over raw sockets: what a peer may do, for how long, and who else hears of it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
import trio
from starlette.types import Message, Receive, Scope, Send

from gateway.admin.http import HttpServer
from gateway.containment import counted, forget
from gateway.settings import Http

LOOPBACK = "127.0.0.1"
SOON = 0.05  # a deadline that is awaited, however long the machine takes


class Application:
    """Answers `answer` to everything, and notes what it was asked; some paths behave otherwise."""

    def __init__(self) -> None:
        self.asked: list[Scope] = []
        self.bodies: list[bytes] = []
        self.go_on = trio.Event()
        self.noted: Callable[[], int] = int
        self.turns: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope)
        self.turns.append(self.noted())
        path = scope["path"]
        if path == "/fails":
            raise RuntimeError("not foreseen")
        if path == "/waits":
            await self.go_on.wait()
        text = b"answer"
        if path == "/body":
            text = await self._body(receive)
            self.bodies.append(text)
        if path == "/large":
            text = b"x" * 30_000_000
        headers: list[tuple[bytes, bytes]] = [(b"content-type", b"text/plain")]
        if path == "/bad-header":
            headers.append((b"x", b"a\r\nb"))
        if path != "/streams":
            headers.append((b"content-length", str(len(text)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if path == "/fails-late":
            raise RuntimeError("not foreseen")
        for byte in text if path == "/streams" else ():
            await send({"type": "http.response.body", "body": bytes((byte,)), "more_body": True})
        await send({"type": "http.response.body", "body": b"" if path == "/streams" else text})

    async def _body(self, receive: Receive) -> bytes:
        found = b""
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("it has gone")
            found += message["body"]
            if not message["more_body"]:
                return found


class Scene:
    """A server, and raw connections to it."""

    def __init__(self, **given: Any) -> None:
        self.app = Application()
        self.refused: Counter[str] = Counter()
        http = Http(host=LOOPBACK, port=0, **given)
        self.server = HttpServer(self.app, http, self.refused)
        self.listening = socket.create_server((LOOPBACK, 0))
        self.listening.setblocking(False)
        self.port = self.listening.getsockname()[1]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Scene]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.server.run, self.listening)
            with trio.fail_after(30):
                yield self
            nursery.cancel_scope.cancel()

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(LOOPBACK, self.port)

    async def told(self, data: bytes) -> bytes:
        """All that comes until the server closes."""
        async with await self.connect() as stream:
            await stream.send_all(data)
            return await rest(stream)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await trio.sleep(0.001)


async def rest(stream: trio.SocketStream) -> bytes:
    found = b""
    try:
        async for data in stream:
            found += data
    except trio.BrokenResourceError:
        pass
    return found


async def head(stream: trio.SocketStream) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        data = await stream.receive_some(1)
        assert data, found
        found += data
    return found


def get(path: str = "/", more: str = "", version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\nHost: here\r\n{more}\r\n".encode()


def post(body: bytes, more: str = "", path: str = "/body") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: here\r\n{more}\r\n".encode() + body


CLOSE = "Connection: close\r\n"


@pytest.mark.parametrize("parts", [1, 3, 1_000])
async def test_requests_that_come_together_or_byte_by_byte_are_answered_in_their_order(parts: int) -> None:
    async with Scene().serving() as scene, await scene.connect() as stream:
        data = get("/a?b=%20") + post(b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n", "Transfer-Encoding: chunked\r\n")
        data += get("/z%c3%a9", CLOSE) + (get("/never") if parts == 1 else b"")
        size = len(data) // parts + 1
        for start in range(0, len(data), size):
            await stream.send_all(data[start : start + size])
        answers = await rest(stream)
    assert answers.count(b"HTTP/1.1 200 \r\n") == 3
    asked = [(one["method"], one["path"], one["query_string"]) for one in scene.app.asked]
    assert asked == [("GET", "/a", b"b=%20"), ("POST", "/body", b""), ("GET", "/zé", b"")]
    assert scene.app.bodies == [b"abcd"]
    assert answers.endswith(b"Connection: close\r\n\r\nanswer")
    assert answers.count(b"\r\nDate: ") == 3
    assert not scene.refused


async def test_head_has_no_body_and_the_connection_goes_on() -> None:
    async with Scene().serving() as scene:
        data = get().replace(b"GET", b"HEAD") + get("/streams", CLOSE)
        first, second = (await scene.told(data)).split(b"HTTP/1.1 200 \r\n")[1:]
    assert first.endswith(b"\r\n\r\n")
    assert b"content-length: 6\r\n" in first
    assert second.endswith(b"\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in b"answer") + b"0\r\n\r\n")


async def test_http_1_0_is_answered_and_closed() -> None:
    async with Scene().serving() as scene:
        assert (await scene.told(get(version="1.0"))).endswith(b"answer")
        assert (await scene.told(get("/streams", version="1.0"))).endswith(b"\r\n\r\nanswer")


async def test_who_asks_first_is_told_to_go_on_when_the_body_is_wanted() -> None:
    more = "Content-Length: 3\r\nExpect: 100-continue\r\n"
    async with Scene().serving() as scene:
        async with await scene.connect() as stream:
            await stream.send_all(post(b"", more))
            assert await head(stream) == b"HTTP/1.1 100 \r\n\r\n"
            await stream.send_all(b"abc" + get(more=CLOSE))
            assert (await rest(stream)).count(b" 200 ") == 2
        assert scene.app.bodies == [b"abc"]
        answer = await scene.told(post(b"", more, path="/other"))
        assert answer.startswith(b"HTTP/1.1 200 "), "an answer instead of a 100"
        assert b"\r\nConnection: close\r\n" in answer, "whether the body will come is not known"


async def test_a_body_that_nobody_wanted_is_passed_over() -> None:
    async with Scene().serving() as scene:
        data = post(b"abc", "Content-Length: 3\r\n", path="/other") + get(more=CLOSE)
        assert (await scene.told(data)).count(b" 200 ") == 2
        data = post(b"1\r\nx\r\n" * 50, "Transfer-Encoding: chunked\r\n", path="/other")
        answer = await scene.told(data)
        assert b" 200 " in answer
        assert b"Connection: close" in answer, "there is too much of it"


UPGRADES = (
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAAA\r\n",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAIAAAAF\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    "Sec-WebSocket-Version: 13\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Protocol: \xff\r\n",
    "Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
)


@pytest.mark.parametrize("more", UPGRADES)
async def test_an_upgrade_is_not_made(more: str) -> None:
    frame = b"\x81\x85\0\0\0\0hello\r\n\r\n"
    async with Scene().serving() as scene, await scene.connect() as stream:
        await stream.send_all(get(more=more).decode().encode("latin-1") + get())
        assert (await head(stream)).startswith(b"HTTP/1.1 200 ")
        await stream.receive_some(6)
        assert (await head(stream)).startswith(b"HTTP/1.1 200 ")
        await stream.receive_some(6)
        await stream.send_all(get(more=more).decode().encode("latin-1") + frame)
        answers = await rest(stream)
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 400 " in answers, "for the frame"
    assert scene.refused == {"malformed": 1}


REFUSED = [
    (b"nonsense\r\n\r\n", 400, "malformed"),
    (b"\x16\x03\x01\x02\0\1\0\r\n\r\n", 400, "no_tls"),
    (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "malformed"),
    (get(more="Content-Length: 3, 4\r\n"), 400, "malformed"),
    (get(more="Content-Length: " + "9" * 5_000 + "\r\n"), 400, "malformed"),
    (get(more="Transfer-Encoding: gzip, chunked\r\n"), 501, "malformed"),
    (post(b"zz\r\n", "Transfer-Encoding: chunked\r\n"), 400, "malformed"),
    (post(b"-1\r\n", "Transfer-Encoding: chunked\r\n"), 400, "malformed"),
    (get("/" + "a" * 20_000), 431, "head_bytes"),
    (get(more="Cookie: a=b\r\n" * 1_300), 431, "head_bytes"),
    (b"a" * 20_000, 431, "head_bytes"),
    (post(b"", "Content-Length: 1001\r\n"), 413, "body_bytes"),
    (post(b"3e9\r\n" + b"x" * 1_001, "Transfer-Encoding: chunked\r\n"), 413, "body_bytes"),
    (post(b"1\r\nx\r\n" * 100, "Transfer-Encoding: chunked\r\n"), 413, "body_bytes"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "unsupported"),
    (b"CONNECT here:80 HTTP/1.1\r\nHost: here\r\n\r\n", 501, "unsupported"),
    (get()[:-2], 408, "head_timeout"),
    (post(b"ab", "Content-Length: 3\r\n"), 408, "body_timeout"),
    (post(b"2\r\nab\r\n", "Transfer-Encoding: chunked\r\n"), 408, "body_timeout"),
]


@pytest.mark.parametrize("data, status, reason", REFUSED)
async def test_what_is_refused_and_counted(data: bytes, status: int, reason: str) -> None:
    before = counted.copy()
    short = {"head_timeout_secs": SOON, "body_timeout_secs": SOON} if status == 408 else {}
    with structlog.testing.capture_logs() as lines:
        async with Scene(body_bytes_max=1_000, **short).serving() as scene:
            answer = await scene.told(data)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
            assert b"\r\nConnection: close\r\n" in answer
            assert answer.count(b"HTTP/1.1 ") == 1
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"\r\nContent-Type: application/problem+json\r\n" in head
            assert json.loads(body)["status"] == status
            late = 0
            while not (await scene.told(get(more=CLOSE))).endswith(b"answer"):
                late += 1
                assert short, "the others are served, but for those that have missed the same deadline"
    refused = [reason] + ["head_timeout"] * late
    assert scene.refused == Counter(refused)
    assert counted == before
    assert [(line["event"], line["reason"], line["limited"]) for line in lines] == [
        ("HTTP request refused", word, True) for word in refused
    ]


async def test_a_connection_that_says_nothing_more_is_closed() -> None:
    async with Scene(keep_alive_secs=SOON).serving() as scene:
        assert (await scene.told(get())).endswith(b"answer")
        await scene.until(lambda: not scene.server.connections)
    assert not scene.refused


async def test_who_does_not_read_the_answer_is_closed() -> None:
    async with Scene(send_timeout_secs=SOON).serving() as scene, await scene.connect() as stream:
        await stream.send_all(get("/large"))
        await scene.until(lambda: bool(scene.app.asked) and not scene.server.connections)
    assert scene.refused == {"send_timeout": 1}


@pytest.mark.parametrize(
    "data", [b"", get()[:5], post(b"", "Content-Length: 3\r\n"), get("/large"), get("/waits")]
)
async def test_who_leaves_is_forgotten(data: bytes) -> None:
    before = counted.copy()
    async with Scene().serving() as scene:
        async with await scene.connect() as stream:
            await stream.send_all(data)
            await scene.until(lambda: bool(scene.server.connections))
        scene.app.go_on.set()
        await scene.until(lambda: not scene.server.connections)
    assert counted == before
    assert not scene.refused


@pytest.mark.parametrize("path", ["/fails", "/fails-late", "/bad-header"])
async def test_an_error_that_nobody_foresaw_costs_its_connection(path: str) -> None:
    forget()
    before = counted["http"]
    async with Scene().serving() as scene, await scene.connect() as other:
        await other.send_all(get())
        await head(other)
        assert b"answer" not in await scene.told(get(path))
        await other.receive_some(6)
        await other.send_all(get(more=CLOSE))
        assert (await rest(other)).endswith(b"answer")
    assert counted["http"] == before + 1


async def test_who_only_waits_makes_room() -> None:
    async with Scene(connections_max=3).serving() as scene:
        waiting = [await scene.connect() for _ in range(3)]
        await scene.until(lambda: len(scene.server.connections) == 3)
        for count in (1, 2, 3):
            assert (await scene.told(get(more=CLOSE))).endswith(b"answer")
            assert scene.refused["evicted"] <= count
        assert await rest(waiting[0]) == b"", "the one that has waited longest"
        for stream in waiting:
            await stream.aclose()
    assert scene.refused["connections"] == 0


async def test_when_all_are_being_answered_the_new_one_is_told() -> None:
    async with Scene(connections_max=2).serving() as scene:
        busy = [await scene.connect() for _ in range(2)]
        for stream in busy:
            await stream.send_all(get("/waits", CLOSE))
        await scene.until(lambda: len(scene.app.asked) == 2)
        async with await scene.connect() as stream:
            assert (await rest(stream)).startswith(b"HTTP/1.1 503 ")
        assert scene.refused == {"connections": 1}
        scene.app.go_on.set()
        for stream in busy:
            assert (await rest(stream)).endswith(b"answer")
            await stream.aclose()


async def test_without_descriptors_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    failing = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "gone")]
    kind: Any = type(trio.socket.from_stdlib_socket(scene.listening))
    accept = kind.accept

    async def accept_or_fail(door: trio.socket.SocketType) -> Any:
        if failing:
            raise failing.pop()
        return await accept(door)

    monkeypatch.setattr(kind, "accept", accept_or_fail)
    async with scene.serving():
        assert (await scene.told(get(more=CLOSE))).endswith(b"answer")
    assert scene.refused == {"descriptors": 1}


async def test_many_that_come_at_once_leave_turns_to_others() -> None:
    """Between the beginnings of any two requests everybody else has had a turn."""
    turn = 0

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await trio.lowlevel.checkpoint()

    async with Scene().serving() as scene, trio.open_nursery() as nursery:
        scene.app.noted = lambda: turn
        streams = [await scene.connect() for _ in range(20)]
        await scene.until(lambda: len(scene.server.connections) == 20)
        nursery.start_soon(others)
        for stream in streams:
            assert os.write(stream.socket.fileno(), get("/any", CLOSE)), "all before the loop's next turn"
        for stream in streams:
            assert (await rest(stream)).endswith(b"answer")
            await stream.aclose()
        assert len(set(scene.app.turns)) == 20
        nursery.cancel_scope.cancel()

"""What the process that has started workers and each of them say to each other, over a pair of sockets.

A line is a JSON object. The first one tells the worker which it is (`Order`); it says `started` when it
serves, and answers a question about its state or its metrics, or the request to drain, with the number of
that. Either end knows by the end of the lines that the other process is gone: a worker without its supervisor
drains.
"""

from __future__ import annotations

import socket
from typing import Any, Final, Literal, NamedTuple, Self

import orjson
import trio

Question = Literal["reasons", "metrics", "stop"]
READ_OCTETS: Final = 65_536
STANDARD_INPUT: Final = 0


class Order(NamedTuple):
    """Which worker a process is; the ports of the listeners, and the memory of all workers, in octets."""

    number: int
    ports: dict[str, int]
    memory_bytes_max: int


class Lines:
    """One end."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._unread = bytearray()
        self._sending = trio.Lock()

    async def send(self, **said: Any) -> None:
        """Say something. Raises trio.BrokenResourceError when nobody is there."""
        async with self._sending:
            await self._stream.send_all(orjson.dumps(said) + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """What the other end has said; None: it is gone."""
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            try:
                octets = await self._stream.receive_some(READ_OCTETS)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not octets:
                return None
            self._unread += octets
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        found: dict[str, Any] = orjson.loads(line)
        return found

    def close(self) -> None:
        """Nothing more is said or heard."""
        self._stream.socket.close()


class Ordered:
    """The worker's end: its standard input."""

    def __init__(self, sock: socket.socket, order: Order) -> None:
        self.order = order
        self._sock = sock

    @classmethod
    def read(cls) -> Self:
        """Wait for the order, before there is an event loop. Raises EOFError when nobody gives one."""
        sock = socket.socket(fileno=STANDARD_INPUT)
        line = b""
        while not line.endswith(b"\n"):
            octet = sock.recv(1)
            if not octet:
                raise EOFError("nobody says which worker this is")
            line += octet
        return cls(sock, Order(**orjson.loads(line)))

    def lines(self) -> Lines:
        """From here on it is talked to in the event loop."""
        return Lines(self._sock)

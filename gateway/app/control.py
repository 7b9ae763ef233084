"""Messages between the supervisor and its workers, over a pair of sockets.

A line is a JSON object. The first one is the `WorkerOrder` of the worker. The worker sends `started` when it
serves, and replies to requests (its state, its metrics, draining) with the number of the request. Either side
detects the end of the other by the end of the stream: a worker without its supervisor drains. The processes
themselves are run by `gateway/app/workers.py`.
"""

from __future__ import annotations

import socket
from typing import Any, Final, Literal, NamedTuple, Self

import orjson
import trio

WorkerRequest = Literal["reasons", "metrics", "stop"]
READ_BYTES: Final = 65_536
STANDARD_INPUT: Final = 0


class WorkerOrder(NamedTuple):
    """Settings that the supervisor sends to one worker.

    `number` is the worker's number, starting at 1. `ports` has the port of each listener by name.
    `memory_bytes_max` is the memory watermark of all workers together, in bytes.
    """

    number: int
    ports: dict[str, int]
    memory_bytes_max: int


class JsonLines:
    """One end of the connection between supervisor and worker; each line is a JSON object."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._unread = bytearray()
        self._sending = trio.Lock()

    async def send(self, **fields: Any) -> None:
        """Send one JSON object. Raises trio.BrokenResourceError when the other end is closed."""
        async with self._sending:
            await self._stream.send_all(orjson.dumps(fields) + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return the next JSON object from the other end, or None if the other end is closed."""
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._unread += data
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        found: dict[str, Any] = orjson.loads(line)
        return found

    def close(self) -> None:
        """Close this end of the connection. `receive` then returns None at the other end."""
        self._stream.socket.close()


class SupervisorLink:
    """Connection of a worker to its supervisor, with the settings (order) that the worker has received."""

    def __init__(self, sock: socket.socket, order: WorkerOrder) -> None:
        self.order = order
        self._sock = sock

    @classmethod
    def read(cls) -> Self:
        """Read the worker's settings (order) from standard input, which is the socket to the supervisor.

        Call this before an event loop runs. Raises EOFError if the socket closes before an order arrives.
        """
        sock = socket.socket(fileno=STANDARD_INPUT)
        line = b""
        while not line.endswith(b"\n"):
            byte = sock.recv(1)
            if not byte:
                raise EOFError(
                    "no instructions from the main process; set `workers` instead of starting a"
                    " worker directly"
                )
            line += byte
        return cls(sock, WorkerOrder(**orjson.loads(line)))

    def lines(self) -> JsonLines:
        """Return the connection to the supervisor for use in the event loop."""
        return JsonLines(self._sock)

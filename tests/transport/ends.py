"""Sockets, watchers and owners for the transport's tests."""

from __future__ import annotations

import socket
from collections.abc import Callable

from gateway.transport.stream import Stream


class FakeSocket(socket.socket):
    """A socket that takes a given number of bytes at each write, and plays back what it is to read."""

    def __init__(self, *takes: int | OSError, reads: tuple[bytes | OSError, ...] = ()) -> None:
        super().__init__()
        self.close()
        self.takes = list(takes)
        self.reads = list(reads)
        self.written = bytearray()
        self.ended = False
        self.is_closed = False

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        taken = self.takes.pop(0) if self.takes else len(data)
        if isinstance(taken, OSError):
            raise taken
        if not taken:
            raise BlockingIOError
        self.written += data[:taken]
        return min(taken, len(data))

    def sendmsg(self, buffers, ancdata=(), flags=0, address=None):  # type: ignore[no-untyped-def]
        return self.send(b"".join(buffers), flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self.reads:
            raise BlockingIOError
        found = self.reads.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    def shutdown(self, how: int) -> None:
        self.ended = True

    def close(self) -> None:
        super().close()
        self.is_closed = True


class Watch:
    """A watcher that notes what it is asked to watch."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []
        self.forgotten = 0
        self.leaving: list[Stream] = []
        self.lingering: list[Stream] = []
        self.pauses: list[float] = []

    def watch(self, stream: Stream) -> None:
        self.seen.append((stream.reading, stream.writing))

    def forget(self, stream: Stream) -> None:
        self.forgotten += 1

    def abort_unread(self, stream: Stream) -> None:
        self.leaving.append(stream)

    def abort_unclosed(self, stream: Stream) -> None:
        self.lingering.append(stream)

    def pause(self, stream: Stream, seconds: float) -> None:
        self.pauses.append(seconds)


class Speaker:
    """An owner that says what the test puts into `out`."""

    def __init__(self, answer: Callable[[bytes], bytes] | None = None) -> None:
        self.out = b""
        self.heard = b""
        self.reasons: list[str] = []
        self.drains = 0
        self._answer = answer
        self.stream: Stream | None = None

    def receive(self, data: bytes, now: float) -> None:
        self.heard += data
        if self._answer is not None:
            self.out += self._answer(data)
            assert self.stream is not None
            self.stream.mark_for_flush()

    def data_to_send(self) -> bytes:
        out, self.out = self.out, b""
        return out

    def resume_writing(self) -> None:
        self.drains += 1

    def connection_lost(self, reason: str) -> None:
        self.reasons.append(reason)

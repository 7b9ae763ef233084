"""One task reads every socket that is ready.

A task per connection costs a Trio reschedule per read, several times what decoding costs. A poller keeps an
epoll object of its own (kqueue elsewhere), registers it with Trio as one readable descriptor, and at each
wake-up reads once from every ready stream, feeding its peer object synchronously. When all have been read, or
a megabyte has, `settled` is called: the owner routes the batch that has gathered, and everything is flushed.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Final

import structlog
import trio

from gateway.transport.stream import Stream, WriteSet

log = structlog.get_logger()

# After this many octets the batch is routed and written, so that one turn stays short and bounded.
TURN_OCTETS_MAX: Final = 1_048_576
LINGER_SECS: Final = 2.0  # at the most twice that: an ended stream waits for its peer's own end


class Poller:
    """Reads the streams of one listener or link. `turn_done` runs whenever a batch should move on."""

    def __init__(self, writes: WriteSet, turn_done: Callable[[], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._writes = writes
        self._turn_done = turn_done
        self._watched: dict[Stream, int] = {}
        self._lingering: set[Stream] = set()
        self.faults = 0

    def watch(self, stream: Stream) -> None:
        """Register `stream`, or follow its `reading` and `writing`."""
        events = (selectors.EVENT_READ if stream.reading else 0) | (
            selectors.EVENT_WRITE if stream.writing else 0
        )
        before = self._watched.get(stream, 0)
        if events == before:
            return
        if not events:
            self._selector.unregister(stream.sock)
            del self._watched[stream]
            return
        if before:
            self._selector.modify(stream.sock, events, stream)
        else:
            self._selector.register(stream.sock, events, stream)
        self._watched[stream] = events

    def forget(self, stream: Stream) -> None:
        """Stop watching `stream`; its socket is still open."""
        if self._watched.pop(stream, 0):
            self._selector.unregister(stream.sock)
        self._lingering.discard(stream)

    def linger(self, stream: Stream) -> None:
        """`stream` has said its last words: close it when its peer has closed, or soon."""
        self._lingering.add(stream)
        self.watch(stream)

    async def run(self, clock: Callable[[], float] = trio.current_time) -> None:
        """Poll until cancelled."""
        descriptor = self._selector.fileno()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                while True:
                    await trio.lowlevel.wait_readable(descriptor)
                    self.turn(clock())
        finally:
            for stream in list(self._watched):
                stream.abort("the gateway has stopped")
            self._selector.close()

    async def _sweep(self) -> None:
        """Close the streams that have lingered since the last sweep."""
        while True:
            before = list(self._lingering)
            await trio.sleep(LINGER_SECS)
            for stream in before:
                if stream in self._lingering:
                    stream.abort("its peer does not close")

    def turn(self, now: float) -> None:
        """Serve every stream that is ready, once."""
        octets = 0
        for key, events in self._selector.select(0):
            octets += self._serve(key.data, events, now)
            if octets >= TURN_OCTETS_MAX:
                octets = 0
                self._turn_done()
                self._writes.flush()
        self._turn_done()
        self._writes.flush()

    def _serve(self, stream: Stream, events: int, now: float) -> int:
        """One stream that is ready; returns the octets read. Where a connection's faults end."""
        try:
            if events & selectors.EVENT_WRITE and not stream.closed:
                stream.writable()
            if events & selectors.EVENT_READ and stream.reading and not stream.closed:
                return stream.read(now)
        except Exception:
            # A bug of ours, met by this peer's input: it costs this connection, is counted, and says where.
            self.faults += 1
            log.exception("a connection was ended by an internal error", remote=stream.remote)
            stream.abort("internal error")
        return 0

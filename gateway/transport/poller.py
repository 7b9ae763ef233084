"""One task reads every socket that is ready.

A task per connection costs a Trio reschedule per read, several times what decoding costs. A poller keeps an
epoll object of its own (kqueue elsewhere), registers it with Trio as one readable descriptor, and at each
wake-up reads once from every ready stream, feeding its peer object synchronously. After some streams, or a
megabyte, `turn_done` is called: the owner routes the batch that has gathered, and all is flushed.
"""

from __future__ import annotations

import select
import selectors
from collections.abc import Callable
from typing import Final

import trio

from gateway.containment import contained
from gateway.transport.stream import Stream, WriteSet

# After this many octets the batch is routed and written, so that one turn stays short and bounded.
TURN_OCTETS_MAX: Final = 1_048_576
# When a thousand connections are ready at once, the first are answered before the last are read.
TURN_STREAMS_MAX: Final = 32
READ: Final = 1  # EPOLLIN
WRITE: Final = 4  # EPOLLOUT
SWEEP_SECS: Final = 2.0
LINGER_SWEEPS: Final = 2  # an ended stream waits for its peer's own end
LEAVE_SWEEPS: Final = 16  # a peer that does not read what is left for it keeps a descriptor and all of that


class OtherReadiness:
    """The interface of an epoll object where there is none (kqueue)."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.fileno = self._selector.fileno
        self.unregister = self._selector.unregister
        self.close = self._selector.close

    def register(self, descriptor: int, events: int) -> None:
        """Watch `descriptor` for READ, WRITE or both."""
        self._selector.register(descriptor, _of_selectors(events))

    def modify(self, descriptor: int, events: int) -> None:
        """Watch it for something else."""
        self._selector.modify(descriptor, _of_selectors(events))

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """What is ready now."""
        return [
            (key.fd, (events & selectors.EVENT_READ and READ) | (events & selectors.EVENT_WRITE and WRITE))
            for key, events in self._selector.select(timeout)
        ]


def _of_selectors(events: int) -> int:
    return (events & READ and selectors.EVENT_READ) | (events & WRITE and selectors.EVENT_WRITE)


STOPPED: Final = "the gateway has stopped"


class Poller:
    """Reads the streams of one listener or link. `turn_done` runs whenever a batch should move on."""

    def __init__(self, writes: WriteSet, turn_done: Callable[[], None]) -> None:
        # The selectors module would do, but its rows for every ready descriptor cost as much as a read.
        self._ready = select.epoll() if hasattr(select, "epoll") else OtherReadiness()
        self._streams: list[Stream | None] = []  # by descriptor: those are small, for the lowest is taken
        self._writes = writes
        self._turn_done = turn_done
        self._watched: dict[Stream, int] = {}
        self._ended: dict[Stream, int] = {}  # and after how many sweeps it is cut off
        self._closed = False

    def watch(self, stream: Stream) -> None:
        """Register `stream`, or follow its `reading` and `writing`. After the end it is closed."""
        if self._closed:  # its last words waited for the disk, and that for the end
            stream.abort(STOPPED)
            return
        events = (READ if stream.reading else 0) | (WRITE if stream.writing else 0)
        before = self._watched.get(stream, 0)
        if events == before:
            return
        descriptor = stream.sock.fileno()
        if not events:
            self._ready.unregister(descriptor)
            del self._watched[stream]
            self._streams[descriptor] = None
            return
        if before:
            self._ready.modify(descriptor, events)
        else:
            self._ready.register(descriptor, events)
            self._streams += [None] * (descriptor + 1 - len(self._streams))
            self._streams[descriptor] = stream
        self._watched[stream] = events

    def forget(self, stream: Stream) -> None:
        """Stop watching `stream`; its socket is still open."""
        if self._watched.pop(stream, 0):
            descriptor = stream.sock.fileno()
            self._ready.unregister(descriptor)
            self._streams[descriptor] = None
        self._ended.pop(stream, None)

    def leave(self, stream: Stream) -> None:
        """`stream` has last words to write: cut it off when they are not taken for long."""
        self._ended[stream] = LEAVE_SWEEPS

    def linger(self, stream: Stream) -> None:
        """`stream` has said its last words: close it when its peer has closed, or soon."""
        self._ended[stream] = LINGER_SWEEPS
        self.watch(stream)

    async def run(self, clock: Callable[[], float] = trio.current_time) -> None:
        """Poll until cancelled."""
        descriptor = self._ready.fileno()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                while True:
                    await trio.lowlevel.wait_readable(descriptor)
                    self.turn(clock())
        finally:
            self.close()

    def close(self) -> None:
        """End every stream that is left, and the polling."""
        for stream in list(self._watched):
            stream.abort(STOPPED)
        self._closed = True
        self._ready.close()

    async def _sweep(self) -> None:
        """Close the streams that have ended and whose time is over."""
        while True:
            await trio.sleep(SWEEP_SECS)
            for stream, sweeps in list(self._ended.items()):
                self._ended[stream] = sweeps - 1
                if sweeps == 1:
                    stream.abort("its peer neither reads nor closes")

    def turn(self, now: float) -> None:
        """Serve every stream that is ready, once."""
        octets = served = 0
        streams = self._streams
        for descriptor, events in self._ready.poll(0):
            stream = streams[descriptor]
            if stream is None:
                continue  # it was closed by what another one said in this turn
            try:
                if events != READ and events & WRITE:
                    stream.writable()
                if events != WRITE and stream.reading and not stream.closed:
                    octets += stream.read(now)
                    served += 1
            except Exception as error:
                stream.fail(error)
            if served >= TURN_STREAMS_MAX or octets >= TURN_OCTETS_MAX:
                octets = served = 0
                self._end_turn()
        self._end_turn()

    def _end_turn(self) -> None:
        """Route what has gathered, and write what came of it."""
        try:
            self._turn_done()
        except Exception as error:
            contained("batch", error)
        self._writes.flush()

"""One task reads every socket that is ready.

A task per connection costs a Trio reschedule per read, several times what decoding costs. A poller keeps an
epoll object of its own (kqueue elsewhere), registers it with Trio as one readable descriptor, and at each
wake-up reads once from every ready stream, feeding its owner synchronously. After some streams, or 256 KiB,
`turn_done` is called: the owner routes the batch that has gathered, and all is flushed.

The order is fair by time. A turn that took long counts against its stream, unless it was this process that
did not run, and short ones make up for it; two in a row make it slow. New streams are slow until they are
known. Slow ones, and those that have not come to the end of what they read, wait in a queue behind all the
others. Of this queue a wake-up serves only so much that the quick ones are soon asked again. So whoever
causes much work gets what the others leave over, and a quick one waits for a few turns of others, never for
the whole flood. No wake-up takes much longer than TURN_SECS: what is left of it goes on when the other tasks
have had their turns.
"""

from __future__ import annotations

import heapq
import select
import selectors
import time
from collections.abc import Callable
from itertools import count
from typing import Final

import trio

from gateway.containment import contained
from gateway.transport.stream import STRIKES_MAX, Stream, WriteSet

# After this many octets the batch is routed and written, so that one turn stays short and bounded. Fewer fit
# a core's caches better; more make longer runs for each of a thousand subscribers, and larger groups on disk.
TURN_OCTETS_MAX: Final = 262_144
# When a thousand connections are ready at once, the first are answered before the last are read.
TURN_STREAMS_MAX: Final = 32
LONG_SECS: Final = 0.001  # a turn of some hundred messages
STRIKES_LONG: Final = 4  # that one long turn counts; a short one takes back one
STRIKES_SLOW: Final = 5  # with so many a stream is slow
TURN_SECS: Final = 0.02  # then other tasks, and those of them that are quick, have their turn
PACE_SECS: Final = 0.02  # how exactly a stream that was too fast is read again
PAUSE_SECS_MAX: Final = 10.0  # then it is looked at again: it may have closed
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
    """Reads the streams of one listener or link. `turn_done` runs whenever a batch should move on.

    `stopwatch` gives seconds, and measures turns; `worked` gives those in which this thread did run.
    """

    def __init__(
        self,
        writes: WriteSet,
        turn_done: Callable[[], None],
        stopwatch: Callable[[], float] = time.perf_counter,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        # The selectors module would do, but its rows for every ready descriptor cost as much as a read.
        self._ready = select.epoll() if hasattr(select, "epoll") else OtherReadiness()
        self._streams: list[Stream | None] = []  # by descriptor: those are small, for the lowest is taken
        self._writes = writes
        self._turn_done = turn_done
        self._watched: dict[Stream, int] = {}
        self._ended: dict[Stream, int] = {}  # and after how many sweeps it is cut off
        self._slow: dict[Stream, None] = {}  # those whose turn is due, in their order
        self._left: list[tuple[int, int]] = []  # of what was ready, not served yet
        self._paused: list[tuple[float, int, Stream]] = []  # a heap: until when, and who
        self._numbers = count()
        self._pausing = trio.Event()
        self._stopwatch = stopwatch
        self._worked = worked
        self._work_began = 0.0  # what had been worked when that was looked at
        self._work_at = 0.0  # and when that was
        self._closed = False

    def watch(self, stream: Stream) -> None:
        """Register `stream`, or follow its `reading` and `writing`. After the end it is closed."""
        if self._closed:  # its last words waited for the disk, and that for the end
            stream.abort(STOPPED)
            return
        events = WRITE if stream.writing else 0
        if stream.reading:  # the rest of what was read goes on when what came of it can be written
            events |= READ if not stream.unread else WRITE if stream.stalls else READ | WRITE
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
        self._slow.pop(stream, None)

    def leave(self, stream: Stream) -> None:
        """`stream` has last words to write: cut it off when they are not taken for long."""
        self._ended[stream] = LEAVE_SWEEPS

    def linger(self, stream: Stream) -> None:
        """`stream` has said its last words: close it when its peer has closed, or soon."""
        self._ended[stream] = LINGER_SWEEPS
        self.watch(stream)

    def pause(self, stream: Stream, seconds: float) -> None:
        """Read nothing of `stream` for so long."""
        stream.hold()
        self._push(stream, trio.current_time(), seconds)
        self._pausing.set()

    def _push(self, stream: Stream, now: float, seconds: float) -> None:
        """`seconds` may be too few to move the clock at all."""
        seconds = min(max(seconds, PACE_SECS), PAUSE_SECS_MAX)
        heapq.heappush(self._paused, (now + seconds, next(self._numbers), stream))

    async def run(self, clock: Callable[[], float] = trio.current_time) -> None:
        """Poll until cancelled."""
        descriptor = self._ready.fileno()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                nursery.start_soon(self._pace)
                while True:
                    if self._slow or self._left:
                        await trio.lowlevel.checkpoint()  # to other tasks; this one has something to do
                    else:
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

    async def _pace(self) -> None:
        """Let the paused streams go on in time."""
        paused = self._paused
        while True:
            await self._pausing.wait()
            self._pausing = trio.Event()
            while paused:
                await trio.sleep_until(paused[0][0])
                now = trio.current_time()
                while paused and paused[0][0] <= now:
                    stream = heapq.heappop(paused)[2]
                    wait = 0.0 if stream.closed or stream.rate is None else stream.rate.charge(0, now)
                    if wait > 0:
                        self._push(stream, now, wait)
                    else:
                        stream.release()

    def turn(self, now: float) -> None:
        """Serve the streams that are ready, once; of the slow ones only some."""
        octets = served = 0
        last: Stream | None = None
        streams = self._streams
        stopwatch = self._stopwatch
        ready = self._left or self._ready.poll(0)
        self._left = []
        began = stopwatch()  # to ask for thousands takes a while, and is nobody's
        until = began + TURN_SECS
        self._work_began, self._work_at = self._worked(), began
        for number, (descriptor, events) in enumerate(ready, 1):
            stream = streams[descriptor]
            if stream is None:
                continue  # it was closed by what another one said in this turn
            try:
                if events != READ and events & WRITE and stream.writing:
                    stream.writable()
                if stream.closed:
                    pass  # writing has ended it
                elif stream.unread or (stream.strikes >= STRIKES_SLOW and events != WRITE):
                    self._slow[stream] = None
                elif events != WRITE and stream.reading:
                    last = stream
                    octets += stream.read(now)
                    served += 1
            except Exception as error:
                stream.fail(error)
            ended = stopwatch()
            if ended - began > LONG_SECS:
                self._took_long(stream, began, ended)
            elif last is stream and stream.strikes:
                stream.strikes -= 1
            began = ended
            if served >= TURN_STREAMS_MAX or octets >= TURN_OCTETS_MAX:
                self._end_turn(began, last if served == 1 else None)
                octets = served = 0
                began = stopwatch()
            if began >= until:
                self._left = ready[number:]
                break
        if self._slow:
            if served:
                self._end_turn(began, last if served == 1 else None)
                began = stopwatch()
            self._serve_slow(now, began, until)
        else:
            self._end_turn(began, last if served == 1 else None)

    def _serve_slow(self, now: float, began: float, until: float) -> None:
        """Those that have waited longest; at least one, however late it is."""
        octets = served = 0
        last: Stream | None = None
        for stream in list(self._slow):
            if stream not in self._slow:
                continue  # another one has ended it
            del self._slow[stream]
            rest = stream.unread
            if not stream.reading or (stream.unread and stream.clogged):
                continue  # `watch` knows when it can go on
            try:
                last = stream
                octets += stream.read(now)
                served += 1
            except Exception as error:
                stream.fail(error)
            ended = self._stopwatch()
            if ended - began > LONG_SECS:
                self._took_long(stream, began, ended)
            elif stream.strikes and not rest:  # the end of much is no turn to judge it by
                stream.strikes -= 1
            began = ended
            if stream.unread:
                self._slow[stream] = None
            if served >= TURN_STREAMS_MAX or octets >= TURN_OCTETS_MAX:
                self._end_turn(began, last if served == 1 else None)
                octets = served = 0
                began = self._stopwatch()
            if began >= until:
                break
        self._end_turn(began, last if served == 1 else None)

    def _took_long(self, stream: Stream, began: float, ended: float) -> None:
        """A turn did, if that was work. Of work all is counted since it was last looked at, and who had turns
        in between is taken to have worked all the time: to look before each turn would cost too much, and
        what others have done may not count against a stream in whose turn this thread did not run.
        """
        worked = self._worked()
        seconds = min(ended - began, worked - self._work_began - (began - self._work_at))
        self._work_began, self._work_at = worked, ended
        if seconds <= LONG_SECS:
            return
        stream.strikes = min(stream.strikes + STRIKES_LONG, STRIKES_MAX)
        if self._writes.took_long is not None:
            self._writes.took_long(stream, seconds)

    def _end_turn(self, began: float, only: Stream | None) -> None:
        """Route what has gathered, and write what came of it; what is `only` one stream's counts as its."""
        try:
            self._turn_done()
        except Exception as error:
            contained("batch", error)
        self._writes.flush()
        if only is not None and (ended := self._stopwatch()) - began > LONG_SECS:
            self._took_long(only, began, ended)

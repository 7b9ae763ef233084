"""Poller: one task that reads every ready socket of a listener or link.

A task per connection costs a Trio reschedule per read, several times what decoding costs. The sockets of a
poller are in the socket loop's epoll object or, where there is no such loop, in one of its own (elsewhere
kqueue), for which a task waits. At each wake-up the poller reads once from every ready stream and feeds the
stream's owner synchronously. After TURN_STREAMS_MAX streams or TURN_BYTES_MAX bytes it calls `turn_done`, in
which the owner routes the collected batch, and writes all output.

Streams are served fairly by time. A long turn counts against its stream, except for time in which this thread
did not run, and short turns compensate for it; two long turns in a row make a stream slow. New streams are
slow until they have had enough short turns. Slow streams, and those with unprocessed data from their last
read, wait in a queue behind all others. Each wake-up serves only so much of this queue that the fast streams
are soon polled again. So a client that causes much work gets the time that the others leave, and a fast one
waits for a few turns of others, never for the whole flood. No wake-up takes much longer than TURN_SECS: the
rest of it continues after the other tasks have run.
"""

from __future__ import annotations

import heapq
import select
import selectors
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import trio

from gateway import clock
from gateway.containment import contained
from gateway.transport.socket_loop import LOOP, PollerSockets, Ready
from gateway.transport.stream import STRIKES_MAX, Stream, WriteSet

# Bytes after which the batch is routed and written, so that one turn stays short and bounded. A smaller value
# fits a core's caches better; a larger one gives each of a thousand subscribers more messages per write, and
# larger groups on disk.
TURN_BYTES_MAX: Final = 262_144
# When a thousand connections are ready at once, the first get their responses before the last are read.
TURN_STREAMS_MAX: Final = 32
LONG_SECS: Final = 0.001  # a turn of some hundred messages takes this long
STRIKES_LONG: Final = 4  # strikes for one long turn; a short turn removes one strike
STRIKES_SLOW: Final = 5  # a stream with this many strikes or more is slow
TURN_SECS: Final = 0.02  # time limit of a wake-up: then other tasks and fast streams have their turn
PACE_SECS: Final = 0.02  # shortest pause of a stream that exceeded its rate
PAUSE_SECS_MAX: Final = 10.0  # longest pause before the stream is checked again: it may have closed
READ: Final = 1  # EPOLLIN
WRITE: Final = 4  # EPOLLOUT
SWEEP_SECS: Final = 2.0
LINGER_SWEEPS: Final = 2  # sweeps for which an ended stream waits for its peer to close
LEAVE_SWEEPS: Final = 16  # sweeps for a peer that does not read: it occupies a descriptor and the output


class OtherReadiness:
    """Replacement for `select.epoll`, with the same interface, on systems without epoll."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.fileno = self._selector.fileno
        self.unregister = self._selector.unregister
        self.close = self._selector.close

    def register(self, descriptor: int, events: int) -> None:
        """Watch `descriptor` for READ, WRITE or both."""
        self._selector.register(descriptor, _of_selectors(events))

    def modify(self, descriptor: int, events: int) -> None:
        """Replace the events for which a registered `descriptor` is watched by `events`."""
        self._selector.modify(descriptor, _of_selectors(events))

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return the ready descriptors with their events, after waiting for at most `timeout` seconds."""
        return [
            (key.fd, (events & selectors.EVENT_READ and READ) | (events & selectors.EVENT_WRITE and WRITE))
            for key, events in self._selector.select(timeout)
        ]


def _of_selectors(events: int) -> int:
    """Convert the flags READ and WRITE to those of the `selectors` module."""
    return (events & READ and selectors.EVENT_READ) | (events & WRITE and selectors.EVENT_WRITE)


STOPPED: Final = "the gateway has stopped"


class Poller:
    """Reader of all streams of one listener or link. Reading the ready streams once is called a turn.

    `turn_done` is called whenever the messages collected so far should be routed. `stopwatch` returns the
    time and `worked` the CPU time of this thread, both in seconds.
    """

    def __init__(
        self,
        writes: WriteSet,
        turn_done: Callable[[], None],
        stopwatch: Callable[[], float] | None = None,
        worked: Callable[[], float] | None = None,
    ) -> None:
        # Not the selectors module: the objects that it builds per ready descriptor cost as much as a read.
        self._ready: Any = select.epoll() if hasattr(select, "epoll") else OtherReadiness()
        self._streams: list[Stream | None] = []  # by descriptor: the system assigns the lowest free one
        self._writes = writes
        self._turn_done = turn_done
        self._watched: dict[Stream, int] = {}
        self._ended: dict[Stream, int] = {}  # number of sweeps until it is aborted
        self._slow: dict[Stream, None] = {}  # slow streams whose turn is due, in their order
        self._unserved: list[tuple[int, int]] = []  # ready descriptors that are not served yet
        self._paused: list[tuple[float, int, Stream]] = []  # a heap, by the time at which each pause ends
        self._numbers = count()
        self._pausing = trio.Event()
        self._stopwatch = stopwatch or clock.perf_counter
        self._worked = worked or clock.thread_time
        self._work_began = 0.0  # value of `worked` when it was last read
        self._work_at = 0.0  # value of `stopwatch` at that moment
        self._closed = False

    def watch(self, stream: Stream) -> None:
        """Register the socket of `stream` for the events that it needs now, or update its registration.

        Which events these are depends on `reading`, `writing` and `unread` of the stream. If it needs no
        events, the registration ends. If this poller is closed, abort the stream.
        """
        if self._closed:  # its last output was held back for a write to disk until the gateway stopped
            stream.abort(STOPPED)
            return
        events = WRITE if stream.writing else 0
        if stream.reading:  # unprocessed data continues when the output that it causes can be written
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
        """Stop watching `stream`, before its socket is closed."""
        if self._watched.pop(stream, 0):
            descriptor = stream.sock.fileno()
            self._ready.unregister(descriptor)
            self._streams[descriptor] = None
        self._ended.pop(stream, None)
        self._slow.pop(stream, None)

    def abort_unread(self, stream: Stream) -> None:
        """Abort `stream`, which is ending, unless its peer reads the remaining output in time.

        The peer has LEAVE_SWEEPS * SWEEP_SECS seconds.
        """
        self._ended[stream] = LEAVE_SWEEPS

    def abort_unclosed(self, stream: Stream) -> None:
        """Abort `stream`, which has written all its output, unless its peer closes in time.

        The peer has LINGER_SWEEPS * SWEEP_SECS seconds.
        """
        self._ended[stream] = LINGER_SWEEPS
        self.watch(stream)

    def pause(self, stream: Stream, seconds: float) -> None:
        """Stop reading from `stream` for `seconds`, but at least PACE_SECS and at most PAUSE_SECS_MAX."""
        stream.hold()
        self._push(stream, clock.now(), seconds)
        self._pausing.set()

    def _push(self, stream: Stream, now: float, seconds: float) -> None:
        """Add a paused stream to the heap `_paused`; its pause ends `seconds` after `now`.

        `seconds` is limited to the range from PACE_SECS to PAUSE_SECS_MAX.
        """
        seconds = min(max(seconds, PACE_SECS), PAUSE_SECS_MAX)
        heapq.heappush(self._paused, (now + seconds, next(self._numbers), stream))

    @property
    def is_closing(self) -> bool:
        """True while ended streams write their last output or wait for their peers to close."""
        return bool(self._ended)

    @property
    def has_work(self) -> bool:
        """True if streams have to be served even if no socket becomes ready.

        These are slow streams, and streams that the last turn did not serve because its time was used up.
        """
        return bool(self._slow or self._unserved)

    async def run(self) -> None:
        """Watch the sockets and serve their streams until cancelled; then close the poller."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                nursery.start_soon(self._pace)
                loop = LOOP.get()
                if loop is not None:
                    self._move(PollerSockets(loop, self))
                    try:
                        await trio.sleep_forever()
                    finally:
                        try:
                            self.close()
                        finally:
                            loop.forget(self)
                descriptor = self._ready.fileno()
                while True:
                    if self.has_work:
                        await trio.lowlevel.checkpoint()  # let other tasks run; this one has work to do
                    else:
                        await trio.lowlevel.wait_readable(descriptor)
                    self.poll(clock.now())
        finally:
            self.close()

    def _move(self, sockets: PollerSockets) -> None:
        """Register all watched sockets in the socket loop, and close this poller's own epoll object."""
        for stream, events in self._watched.items():
            sockets.register(stream.sock.fileno(), events)
        self._ready.close()
        self._ready = sockets

    def close(self) -> None:
        """Abort every watched stream and stop polling."""
        for stream in list(self._watched):
            stream.abort(STOPPED)
        self._closed = True
        self._ready.close()

    async def _sweep(self) -> None:
        """Abort ended streams whose peers neither read nor close in time, until cancelled.

        Every SWEEP_SECS the remaining number of sweeps of each ended stream decreases by one; at 0 the stream
        is aborted.
        """
        while True:
            await trio.sleep(SWEEP_SECS)
            for stream, sweeps in list(self._ended.items()):
                self._ended[stream] = sweeps - 1
                if sweeps == 1:
                    stream.abort("the peer neither reads nor closes the connection")

    async def _pace(self) -> None:
        """Resume each paused stream when its pause ends. Extend the pause if its rate is still too high."""
        paused = self._paused
        while True:
            await self._pausing.wait()
            self._pausing = trio.Event()
            while paused:
                await trio.sleep_until(paused[0][0])
                now = clock.now()
                while paused and paused[0][0] <= now:
                    stream = heapq.heappop(paused)[2]
                    wait = 0.0 if stream.closed or stream.rate is None else stream.rate.charge(0, now)
                    if wait > 0:
                        self._push(stream, now, wait)
                    else:
                        stream.release()

    def poll(self, now: float) -> None:
        """Poll the sockets without waiting, and serve the ready streams; `now` is in loop-clock seconds."""
        self.turn(now, self._unserved or self._ready.poll(0))

    def turn(self, now: float, ready: Ready) -> None:
        """Read once from each stream of the `ready` descriptors, for about TURN_SECS.

        Slow streams are served last, and only some of them if time is short. Descriptors that are not served
        in time are stored; the next turn serves only these, and ignores its own `ready`, which epoll reports
        again. `now` is in loop-clock seconds.
        """
        byte_count = served = 0
        last: Stream | None = None
        streams = self._streams
        stopwatch = self._stopwatch
        ready = self._unserved or ready
        self._unserved = []
        began = stopwatch()  # polling thousands takes a while and counts against no stream
        deadline = began + TURN_SECS
        self._work_began, self._work_at = self._worked(), began
        for number, (descriptor, events) in enumerate(ready, 1):
            stream = streams[descriptor]
            if stream is None:
                continue  # closed because of what another stream received in this turn
            try:
                if events != READ and events & WRITE and stream.writing:
                    stream.writable()
                if stream.closed:
                    pass  # writing has closed it
                elif stream.unread or (stream.strikes >= STRIKES_SLOW and events != WRITE):
                    self._slow[stream] = None
                elif events != WRITE and stream.reading:
                    last = stream
                    byte_count += stream.read(now)
                    served += 1
            except Exception as error:
                stream.fail(error)
            ended = stopwatch()
            if ended - began > LONG_SECS:
                self._took_long(stream, began, ended)
            elif last is stream and stream.strikes:
                stream.strikes -= 1
            began = ended
            if served >= TURN_STREAMS_MAX or byte_count >= TURN_BYTES_MAX:
                self._end_turn(began, last if served == 1 else None)
                byte_count = served = 0
                began = stopwatch()
            if began >= deadline:
                self._unserved = ready[number:]
                break
        if self._slow:
            if served:
                self._end_turn(began, last if served == 1 else None)
                began = stopwatch()
            self._serve_slow(now, began, deadline)
        else:
            self._end_turn(began, last if served == 1 else None)

    def _serve_slow(self, now: float, began: float, deadline: float) -> None:
        """Serve the slow streams that have waited longest until `deadline`, but at least one stream.

        `began` and `deadline` are times of `stopwatch`; `now` is in loop-clock seconds.
        """
        byte_count = served = 0
        last: Stream | None = None
        for stream in list(self._slow):
            if stream not in self._slow:
                continue  # another stream has closed it
            del self._slow[stream]
            rest = stream.unread
            if not stream.reading or (stream.unread and stream.is_output_blocked):
                continue  # `watch` has registered for the event that lets it continue
            try:
                last = stream
                byte_count += stream.read(now)
                served += 1
            except Exception as error:
                stream.fail(error)
            ended = self._stopwatch()
            if ended - began > LONG_SECS:
                self._took_long(stream, began, ended)
            elif stream.strikes and not rest:  # finishing earlier data says nothing about its speed
                stream.strikes -= 1
            began = ended
            if stream.unread:
                self._slow[stream] = None
            if served >= TURN_STREAMS_MAX or byte_count >= TURN_BYTES_MAX:
                self._end_turn(began, last if served == 1 else None)
                byte_count = served = 0
                began = self._stopwatch()
            if began >= deadline:
                break
        self._end_turn(began, last if served == 1 else None)

    def _took_long(self, stream: Stream, began: float, ended: float) -> None:
        """Add strikes to `stream` and report it, if its turn took more than LONG_SECS of CPU time.

        `began` and `ended` are times of `stopwatch`. A stream with STRIKES_SLOW strikes or more is served
        after the others. The thread's CPU time is read only here and at the beginning of a turn, because each
        reading is expensive; all time between the last reading and `began` counts as CPU time of other
        streams.
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
        """Route the messages collected from the streams, and write the output of all streams.

        `began` is the present time of `stopwatch`. `only` is the stream that was read, or None if there were
        several: that stream gets strikes if this call takes long.
        """
        try:
            self._turn_done()
        except Exception as error:
            contained("batch", error)
        self._writes.flush()
        if only is not None and (ended := self._stopwatch()) - began > LONG_SECS:
            self._took_long(only, began, ended)

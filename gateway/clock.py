"""Readers of all clocks; gateway/model/times.py explains why their times have different types.

No other module of the gateway's process reads a clock (tests/house/test_times.py). The readers of the
system's clocks are attributes of this module, which a test replaces before it builds a gateway.

`utc` begins as the wall clock and then advances with a clock that cannot be set. It follows the wall clock
where that differs by less than a second, and otherwise by a thousandth of the elapsed time. So a jump of the
wall clock expires, delays and deletes nothing while the process runs; after a restart `utc` is the wall clock
again. Everything that is compared or deleted by its age uses `utc`. Stored times continue over a restart
(gateway/store/timeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Final

import trio

from gateway.boot import boot_id as boot_id
from gateway.model.times import LeaseTime, Monotonic, WallTime

STEP_SECS_MAX: Final = 1.0  # a larger difference is a jump of the wall clock
SLEW: Final = 0.001  # seconds by which a jump is followed in each second
BOOT_TIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)  # also advances while a machine sleeps
SYSTEM_TIME: Final = time.perf_counter  # what Trio's own clock reads

monotonic: Callable[[], float] = time.monotonic
"""Return seconds of a clock that cannot be set, for durations also outside of the event loop."""
perf_counter: Callable[[], float] = time.perf_counter
"""Return seconds of the finest clock, for durations of steps."""
thread_time: Callable[[], float] = time.thread_time
"""Return the seconds for which this thread has run."""
unix_time: Callable[[], float] = time.time
"""Return the wall clock's seconds since 1970 as a float; `wall` returns them with a type of their own."""
unix_time_ns: Callable[[], int] = time.time_ns
"""Return the wall clock's nanoseconds since 1970, for names that differ from those of an earlier process."""


def since_boot() -> float:
    """Return the seconds since the machine was started, by a clock that cannot be set."""
    return monotonic() if BOOT_TIME is None else time.clock_gettime(BOOT_TIME)


class SteadyClock:
    """Clock of UTC that advances with the time since boot and does not jump when the wall clock is set."""

    __slots__ = ("_at", "_boot")

    def __init__(self) -> None:
        self._at = since_boot()
        self._boot = wall() - self._at  # UTC when the time since boot was 0

    def utc(self) -> WallTime:
        """Return UTC in seconds since 1970."""
        at = since_boot()
        ahead = unix_time() - at - self._boot
        if not -STEP_SECS_MAX < ahead < STEP_SECS_MAX:
            most = (at - self._at) * SLEW
            ahead = min(max(ahead, -most), most)
        self._boot += ahead
        self._at = at
        return WallTime(at + self._boot)


class LoopTime:
    """Offset of an event loop's clock from `SYSTEM_TIME`, and the thread that runs this loop.

    If no event loop is known, `thread` is 0, and `offset` has no meaning.
    """

    __slots__ = ("offset", "thread")

    def __init__(self) -> None:
        self.thread = 0  # identifier of the thread; 0 is none
        self.offset = 0.0


_loop: Final = LoopTime()


def begin_loop(loop_clock: trio.abc.Clock) -> None:
    """Make `now` read the system clock for this thread's event loop, which is faster than to ask Trio.

    Call this at the start of the loop. Nothing happens if `loop_clock` is not Trio's own clock, or if `now`
    already does so for the event loop of another thread.
    """
    offset = getattr(loop_clock, "offset", None)
    if type(loop_clock).__name__ == "SystemClock" and isinstance(offset, float) and not _loop.thread:
        _loop.offset, _loop.thread = offset, get_ident()


def end_loop() -> None:
    """Undo `begin_loop`. Call this before the event loop of this thread ends."""
    if _loop.thread == get_ident():
        _loop.thread = 0


def now() -> Monotonic:
    """Return the time of the event loop's clock, in seconds.

    Times of different runs of an event loop cannot be compared.
    """
    if _loop.thread == get_ident():
        return Monotonic(_loop.offset + SYSTEM_TIME())
    return Monotonic(trio.current_time())


def lease_time() -> LeaseTime:
    """Return the time of the event loop's clock plus the seconds for which the machine has slept.

    Leases in a database end by the clock of the database, which goes on while this machine sleeps.
    """
    slept = round(since_boot() - monotonic(), 3)  # the two are not read at the same moment
    return LeaseTime(now() + slept)


def wall() -> WallTime:
    """Return the wall clock's seconds since 1970.

    The wall clock may be set at any time, so use it only for display and for comparing clocks.
    """
    return WallTime(unix_time())


_steady: Final = SteadyClock()


def utc() -> WallTime:
    """Return UTC in seconds since 1970, by a clock that does not jump when the wall clock is set."""
    return _steady.utc()


def wall_ahead() -> float:
    """Return the seconds by which the wall clock is ahead of `utc`."""
    return wall() - utc()


def wall_offset() -> int:
    """Return the seconds by which the wall clock has jumped ahead of `utc`, or 0 if it has not jumped.

    Add them to a time of `utc` that another program compares with its own clock.
    """
    ahead = wall_ahead()
    return 0 if -STEP_SECS_MAX < ahead < STEP_SECS_MAX else round(ahead)


def from_wall(seconds: float) -> float:
    """Convert a time that another program has read from the wall clock to a time of `utc`.

    Both are in seconds. The value 0, which stands for no time, is returned unchanged.
    """
    return seconds - wall_offset() if seconds else seconds

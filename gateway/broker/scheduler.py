"""Timers of the broker, for example for the expiry of messages and the deletion of unused queues.

One task sleeps until the first alarm is due. Times are in POSIX seconds, as in messages. Queues are often
deleted before their alarms are due, so a cancelled alarm drops its reference to the callback, and the heap is
rebuilt when half of it is cancelled alarms.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Final

import trio

from gateway import clock
from gateway.containment import contained

SLEEP_SECS_MAX: Final = 10.0  # the wall clock may be set, or the machine have slept
# Cancelled alarms that may be in the heap, in addition to as many as are not cancelled.
CANCELLED_MAX: Final = 1_024


class ScheduledCall:
    """Function that is scheduled to be called once, at `utc` (POSIX seconds)."""

    __slots__ = ("_alarms", "call", "utc")

    def __init__(self, alarms: CallScheduler, utc: float, call: Callable[[], None]) -> None:
        self.utc = utc
        self.call: Callable[[], None] | None = call
        self._alarms = alarms

    def cancel(self) -> None:
        """Cancel the call. Has no effect if it was made already."""
        if self.call is not None:
            self.call = None
            self._alarms.count_cancelled()


class CallScheduler:
    """Scheduler that calls functions at given times."""

    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, ScheduledCall]] = []
        self._cancelled = 0
        self._numbers = count()
        self._sleep: trio.CancelScope | None = None

    def __len__(self) -> int:
        return len(self._alarms)

    def set(self, utc: float, call: Callable[[], None]) -> ScheduledCall:
        """Schedule a call at `utc` (POSIX seconds), or as soon as possible if that time has passed."""
        alarm = ScheduledCall(self, utc, call)
        heapq.heappush(self._alarms, (utc, next(self._numbers), alarm))
        if self._sleep is not None and self._alarms[0][2] is alarm:
            self._sleep.cancel()
        return alarm

    def count_cancelled(self) -> None:
        """Count a cancelled call. If there are many, remove all cancelled calls from the heap."""
        self._cancelled += 1
        if self._cancelled > len(self._alarms) // 2 + CANCELLED_MAX:
            self._alarms = [entry for entry in self._alarms if entry[2].call is not None]
            heapq.heapify(self._alarms)
            self._cancelled = 0

    def run_due(self, utc: float) -> float:
        """Make all calls that are due at `utc` (POSIX seconds).

        Return when the next one is due, in POSIX seconds; infinity if there is none.
        """
        due_alarms = []
        while self._alarms and self._alarms[0][0] <= utc:
            due_alarms.append(heapq.heappop(self._alarms)[2])
        for alarm in due_alarms:
            call, alarm.call = alarm.call, None
            if call is None:
                self._cancelled -= 1
            else:
                try:
                    call()
                except Exception as error:
                    contained("timer", error)
        return self.next_due

    @property
    def next_due(self) -> float:
        """Time of the next scheduled call, in POSIX seconds; infinity if there is none."""
        return self._alarms[0][0] if self._alarms else math.inf

    async def run(self, after_run: Callable[[], None]) -> None:
        """Make calls when they are due until cancelled, and call `after_run` to write the results."""
        while True:
            self.run_due(clock.utc())
            after_run()
            next_at = self.next_due  # the calls may have set further alarms
            with trio.CancelScope() as self._sleep:
                await trio.sleep(max(0.0, min(next_at - clock.utc(), SLEEP_SECS_MAX)))
            self._sleep = None

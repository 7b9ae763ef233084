"""Conversion of the event loop's clock to wall-clock microseconds, always the same for the same time.

A message may be settled hours after it was received, and once for each target; the wall clock may be set in
between. A time is therefore converted with the difference of the clocks at that time, not with the present
one: rows of one message have equal `received` times, which are those that the wall clock showed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from gateway.model.times import Monotonic, WallTime

SECOND: Final = 1_000_000  # microseconds
LOOK_SECS: Final = 0.1  # between two comparisons of the clocks
SLACK_SECS: Final = 0.02  # tolerated deviation; each correction shifts the times since the one before
CHANGES_MAX: Final = 64  # that are stored; earlier times use the oldest


class WallClock:
    """Conversion of loop-clock times to wall-clock times, for the event loop only.

    It stores how the difference of the two clocks has changed: a time is converted by the difference of that
    time. `now` must be called before `micros`.
    """

    def __init__(self, clock: Callable[[], Monotonic], utc: Callable[[], WallTime]) -> None:
        self._clock = clock
        self._utc = utc
        self._offsets: list[float] = []
        self._changed: list[Monotonic] = []  # one fewer: the last time to which the offset before applies
        self._last: Monotonic | None = None
        self._looked: Monotonic | None = None

    def now(self) -> Monotonic:
        """Return the loop clock's time; compare the two clocks unless they were compared within LOOK_SECS."""
        now = self._clock()
        if self._looked is None or now - self._looked > LOOK_SECS:
            self._looked = now
            self._compare_clocks(now)
        self._last = now
        return now

    def micros(self, at: Monotonic) -> int:
        """Return the wall-clock time at the loop-clock time `at`, in microseconds UTC."""
        changed = self._changed
        offset = self._offsets[-1 if not changed or at > changed[-1] else bisect_left(changed, at)]
        return int((at + offset) * SECOND)

    def _compare_clocks(self, now: Monotonic) -> None:
        offset = float(self._utc()) - float(now)
        if not self._offsets:
            self._offsets.append(offset)
        elif abs(offset - self._offsets[-1]) > SLACK_SECS:
            self._offsets.append(offset)
            assert self._last is not None
            self._changed.append(self._last)
            del self._changed[:-CHANGES_MAX], self._offsets[: -CHANGES_MAX - 1]

"""From the event loop's clock to the wall clock's microseconds, always the same for the same time.

A message may be settled hours after it came, and once for each target; the wall clock may be set in between.
So what a time is by the wall clock is decided by when it was, not by when it is asked: rows of one message
agree, and their `received` is what a clock on the wall showed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from gateway.model.times import Monotonic, WallTime

SECOND: Final = 1_000_000  # in microseconds
LOOK_SECS: Final = 0.1  # between two looks at the difference between the clocks
SLACK_SECS: Final = 0.02  # by which it may be off; each change of it moves what came in between
CHANGES_MAX: Final = 64  # that are remembered; times before them are told by the oldest


class WallClock:
    """Both clocks, and how far they were apart when. Belongs to the event loop, and is asked `now`
    first."""

    def __init__(self, clock: Callable[[], Monotonic], utc: Callable[[], WallTime]) -> None:
        self._clock = clock
        self._utc = utc
        self._offsets: list[float] = []
        self._changed: list[Monotonic] = []  # one fewer: the last time that was told by the offset before
        self._last: Monotonic | None = None
        self._looked: Monotonic | None = None

    def now(self) -> Monotonic:
        """The loop's clock."""
        now = self._clock()
        if self._looked is None or now - self._looked > LOOK_SECS:
            self._looked = now
            self._look(now)
        self._last = now
        return now

    def micros(self, at: Monotonic) -> int:
        """What the wall clock showed then, in microseconds."""
        changed = self._changed
        offset = self._offsets[-1 if not changed or at > changed[-1] else bisect_left(changed, at)]
        return int((at + offset) * SECOND)

    def _look(self, now: Monotonic) -> None:
        offset = float(self._utc()) - float(now)
        if not self._offsets:
            self._offsets.append(offset)
        elif abs(offset - self._offsets[-1]) > SLACK_SECS:
            self._offsets.append(offset)
            assert self._last is not None
            self._changed.append(self._last)
            del self._changed[:-CHANGES_MAX], self._offsets[: -CHANGES_MAX - 1]

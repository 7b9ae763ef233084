"""Back-off of messages to a target that has released (temporarily refused) some.

After a release nothing is sent for a while, which doubles with each release in a row. Then one message is
sent alone, and as long as the target accepts, more and more may be in flight at a time. A full target
receives one message for each attempt, and a refused message can be overtaken only by those that were in
flight with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.model.times import Monotonic

UNLIMITED: Final = 1 << 30
DOUBLINGS_MAX: Final = 6
STREAK_MIN: Final = 16  # accepted messages before the window doubles
STREAK: Final = 64  # accepted messages before the window grows by one: at the ceiling
CEILING: Final = 32  # below it the window doubles, after the first release
WINDOW_MAX: Final = 1_024  # a wider window is unlimited


class Backoff:
    """Retry delay and in-flight window of one target, or of one route to a target.

    The delay doubles with each attempt. `window` is the maximum number of unsettled messages at the target.
    """

    __slots__ = (
        "_attempts",
        "_ceiling",
        "_jitter",
        "_retry_at",
        "_secs_max",
        "_secs_min",
        "_streak",
        "window",
    )

    def __init__(self, jitter: Callable[[], float], secs_min: float, secs_max: float) -> None:
        """Create a back-off that waits `secs_min` seconds, doubling up to `secs_max`.

        `jitter` returns numbers from 0 to 1.
        """
        self.window = UNLIMITED
        self._jitter = jitter
        self._secs_min = secs_min
        self._secs_max = secs_max
        self._attempts = 0
        self._ceiling = CEILING  # half of the window that was too wide
        self._retry_at: Monotonic | None = None
        self._streak = 0

    def is_waiting(self, now: Monotonic) -> bool:
        """Return True if nothing should be sent at `now` (loop-clock seconds)."""
        return self._attempts > 0 and self._retry_at is not None and now < self._retry_at

    def record_release(self, now: Monotonic) -> None:
        """Record that the target has refused a message for now (released it), at `now` in loop-clock seconds.

        Starts the next delay and sets the window to one message. Several releases during one delay count
        once.
        """
        if not self.is_waiting(now):
            self._attempts += 1
            self._retry_at = now + self.wait(self._attempts)
        if 1 < self.window < UNLIMITED:
            self._ceiling = self.window // 2
        self.window = 1
        self._streak = 0

    def record_acceptance(self, count: int) -> None:
        """Record that the target has accepted `count` messages, which may widen the window."""
        self._attempts = 0
        if self.window < UNLIMITED:
            self._streak += count
            doubles = self.window < self._ceiling
            if self._streak >= (max(STREAK_MIN, 4 * self.window) if doubles else STREAK):
                self._streak = 0
                self.window += self.window if doubles else 1
                if self.window > WINDOW_MAX:
                    self.window = UNLIMITED

    def wait(self, attempts: int) -> float:
        """Return the delay in seconds after failed attempt number `attempts`, with random jitter."""
        doublings = min(attempts - 1, DOUBLINGS_MAX)
        return min(self._secs_min * (1 << doublings), self._secs_max) * (0.5 + self._jitter() / 2)

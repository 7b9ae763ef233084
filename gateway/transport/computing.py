"""Work of seconds that is Python's own: in a thread, beside a loop that goes on serving.

Whenever the loop has waited for the kernel, as with each `recv` and `send`, it has to get the interpreter's
lock again. A thread that computes keeps that for the whole switch interval, 5 ms, so twenty connections that
are ready wait for 0.1 s. While somebody computes the interval is short.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, TypeVar

import trio

T = TypeVar("T")
SWITCH_SECS: Final = 0.000_2


class _Interval:
    """The interpreter's switch interval, which is one for all threads."""

    def __init__(self) -> None:
        self._computing = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        if not self._computing:
            self._usual = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_SECS)
        self._computing += 1

    def __exit__(self, *_: object) -> None:
        self._computing -= 1
        if not self._computing:
            sys.setswitchinterval(self._usual)


_short_interval: Final = _Interval()


async def computed(work: Callable[[], T]) -> T:
    """What `work` returns, or raises; it is done in a thread."""
    with _short_interval:
        return await trio.to_thread.run_sync(work)

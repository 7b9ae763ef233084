"""Python computations that take seconds, run in a thread while the event loop goes on serving.

After each system call, such as `recv` or `send`, the event loop has to acquire the interpreter's lock again.
A computing thread holds that lock for the whole switch interval, 5 ms, so that twenty ready connections wait
0.1 s. While a computation runs the switch interval is therefore SWITCH_SECS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, TypeVar

import trio

T = TypeVar("T")
SWITCH_SECS: Final = 0.000_2


class _Interval:
    """Context manager that shortens the interpreter's thread switch interval to SWITCH_SECS.

    The interval applies to all threads of the process. It is restored when no block uses this context manager
    any more.
    """

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
    """Run `work` in a thread and return its result. Raises whatever `work` raises."""
    with _short_interval:
        return await trio.to_thread.run_sync(work)

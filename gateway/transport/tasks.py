"""Tasks that serve others, none of which can end the rest.

An exception that leaves a task cancels its nursery, and with it everything that the process does. So what
serves one connection is started through `Tasks`, where its end costs that connection at most, and what has to
run as long as the gateway does runs `forever`: begun anew, after a while, whenever it fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from gateway.containment import Where, contained

AGAIN_SECS: Final = 1.0  # so that what fails at once does not keep the loop busy


class Tasks:
    """Starts tasks beside the loop, in a nursery of which they are no danger to."""

    __slots__ = ("_nursery",)

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `task(*args)`."""
        self._nursery.start_soon(self._run, task, args)

    @staticmethod
    async def _run(task: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        try:
            await task(*args)
        except Exception as error:
            contained("connection", error)


async def forever(where: Where, task: Callable[[], Awaitable[object]]) -> None:
    """Run `task` until it returns."""
    while True:
        try:
            await task()
        except Exception as error:
            contained(where, error)
        else:
            return
        await trio.sleep(AGAIN_SECS)

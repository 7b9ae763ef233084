"""Tasks of one connection or service, isolated so that the failure of one cannot end the others.

An exception that leaves a task cancels its nursery, and with it the whole process. So a task that serves one
connection is started through `Tasks`, where its failure costs at most that connection. A task that has to run
as long as the gateway is run by `run_forever`, which restarts it after AGAIN_SECS whenever it fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from gateway.containment import Where, contained

AGAIN_SECS: Final = 1.0  # so that a task that fails at once does not keep the loop busy


class Tasks:
    """Starter of background tasks in a nursery. An exception of one task does not cancel the others."""

    __slots__ = ("_nursery",)

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start `task(*args)` in the background; its exceptions are logged and not raised."""
        self._nursery.start_soon(self._run, task, args)

    @staticmethod
    async def _run(task: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        try:
            await task(*args)
        except Exception as error:
            contained("connection", error)


async def run_forever(where: Where, task: Callable[[], Awaitable[object]]) -> None:
    """Run `task` again and again until it returns without an error.

    An error is logged and counted under `where`, a part of the program; `task` is restarted after AGAIN_SECS.
    """
    while True:
        try:
            await task()
        except Exception as error:
            contained(where, error)
        else:
            return
        await trio.sleep(AGAIN_SECS)

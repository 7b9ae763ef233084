"""How long each turn of the loop takes, and who caused a long one.

There is one loop: while a task does not come to its next await, nobody else is served. So every step of
every task is measured, those of pollers, timers, HTTP and reloads alike, with two looks at the clock and
nothing per message. A step that took long is told with the name of its task; and with the connection that it
was for, when that is known: pollers name the one whose octets took longest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.telemetry.stats import Latency

log = structlog.get_logger(limited=True)

TOLD: Final = "the loop stood still, nobody else was served meanwhile"


class Cause(Protocol):
    """A stream, as it is named."""

    remote: str

    @property
    def endpoint(self) -> str:
        """The listener or link that it belongs to; "" before that is known."""

    @property
    def client(self) -> str:
        """The name of the client at its other end, as far as it has one."""


class Watchdog(trio.abc.Instrument):
    """Measures the steps of all tasks of a Trio loop that it is added to. `turns` is what it has seen."""

    def __init__(self, slow_turn_secs: float, stopwatch: Callable[[], float] = time.perf_counter) -> None:
        """A step of more than `slow_turn_secs` is told; 0: none is."""
        self.turns = Latency()
        self._slow_turn_secs = slow_turn_secs or float("inf")
        self._stopwatch = stopwatch
        self._began = 0.0
        self._suspected_secs = 0.0
        self._suspect: tuple[str, str, str] | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """A task goes on."""
        self._began = self._stopwatch()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """It waits for something, or has ended."""
        if not self._began:  # the step in which this was added to the loop
            return
        took = self._stopwatch() - self._began
        self.turns.observe(took)
        if took > self._slow_turn_secs:
            self._tell(task, took)
        if self._suspected_secs:
            self._suspected_secs = 0.0
            self._suspect = None

    def suspect(self, cause: Cause, seconds: float) -> None:
        """So much of the present step was for this connection."""
        if seconds > self._suspected_secs:
            self._suspected_secs = seconds
            self._suspect = (cause.endpoint, cause.remote, cause.client)

    def _tell(self, task: trio.lowlevel.Task, took: float) -> None:
        facts: dict[str, Any] = {}
        if self._suspect is not None and self._suspected_secs > took / 2:
            endpoint, remote, client = self._suspect
            facts = {"endpoint": endpoint, "remote": remote, "client": client}
        log.warning(TOLD, seconds=round(took, 3), task=task.name, **facts)


async def watch_wall_clock(sleep_secs: float = 1.0) -> None:
    """Log each jump of the wall clock, which the process does not follow, until cancelled."""
    logged = 0.0
    while True:
        await trio.sleep(sleep_secs)
        ahead = clock.wall_ahead()
        if abs(ahead - logged) >= clock.STEP_SECS_MAX:
            log.warning("wall clock jumped", ahead_seconds=round(ahead, 1))
            logged = ahead

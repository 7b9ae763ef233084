"""Durations of the steps of the event loop, and the causes of long ones.

There is one event loop: until a task reaches its next await, no other task runs. So every step of every task
is measured, including pollers, timers, HTTP and reloads, with two clock readings and no work per message. A
long step is logged with the name of its task, and with the connection that caused it if it is known: pollers
name the connection whose bytes took longest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import structlog
import trio

from gateway import clock
from gateway.telemetry.stats import Latency

log = structlog.get_logger(limited=True)

BLOCKED: Final = "event loop blocked"


class Cause(Protocol):
    """Connection that may be the cause of a long step of the event loop, for the log."""

    remote: str

    @property
    def endpoint(self) -> str:
        """Name of the connection's listener or link, or "" if it is not known yet."""

    @property
    def client(self) -> str:
        """Client identifier of the connection, or "" if there is none."""


class Watchdog:
    """Trio instrument that measures the duration of each step of a task, and of the socket poller.

    `turns` is the histogram of these durations. A step is what runs without giving control back to the event
    loop.
    """

    def __init__(self, slow_turn_secs: float, stopwatch: Callable[[], float] | None = None) -> None:
        """Set the minimum duration in seconds of steps that are logged; 0 means that none is logged.

        Steps are logged only after `attach` is called. `stopwatch` returns the time in seconds, by a clock
        for measurements.
        """
        self.turns = Latency()
        self._slow_turn_secs = slow_turn_secs or float("inf")
        self._limit = float("inf")  # until attached: no client waits while the gateway starts
        self._stopwatch = stopwatch or clock.perf_counter
        self._began = 0.0
        self._suspected_secs = 0.0
        self._suspect: tuple[str, str, str] | None = None

    def attach(self) -> None:
        """Begin to measure all steps of the running event loop from the next one on. Log long ones."""
        self._limit = self._slow_turn_secs
        self._began = 0.0
        trio.lowlevel.add_instrument(cast(trio.abc.Instrument, self))  # which need not be a subclass

    def detach(self) -> None:
        """Stop measuring the steps of the event loop."""
        with suppress(KeyError):  # Trio has removed it
            trio.lowlevel.remove_instrument(cast(trio.abc.Instrument, self))

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Start to measure a step of a task. Trio calls this before the step."""
        self.begin()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Record the duration of a step of a task. Trio calls this after the step."""
        if self._began:  # not the step in which this was added to the loop
            self.end(task.name)

    def begin(self) -> None:
        """Start to measure a step of the event loop. Call `end` after the step."""
        self._began = self._stopwatch()

    def end(self, name: str) -> None:
        """Record the duration of the step that began with `begin`, and log it if it is long.

        `name` is the name of the step in the log.
        """
        took = self._stopwatch() - self._began
        self.turns.observe(took)
        if took > self._limit:
            self._log_slow(name, took)
        if self._suspected_secs:
            self._suspected_secs = 0.0
            self._suspect = None

    def suspect(self, cause: Cause, seconds: float) -> None:
        """Report that `seconds` of the present step were spent on one connection (`cause`).

        The log names this connection if the step is long and this was more than half of it.
        """
        if seconds > self._suspected_secs:
            self._suspected_secs = seconds
            self._suspect = (cause.endpoint, cause.remote, cause.client)

    def _log_slow(self, name: str, took: float) -> None:
        facts: dict[str, Any] = {}
        if self._suspect is not None and self._suspected_secs > took / 2:
            endpoint, remote, client = self._suspect
            facts = {"endpoint": endpoint, "remote": remote, "client": client}
        log.warning(BLOCKED, seconds=round(took, 3), task=name, **facts)


async def watch_wall_clock(sleep_secs: float = 1.0) -> None:
    """Log each jump of the wall clock until this task is cancelled. Check every `sleep_secs` seconds."""
    logged = 0.0
    while True:
        await trio.sleep(sleep_secs)
        ahead = clock.wall_ahead()
        if abs(ahead - logged) >= clock.STEP_SECS_MAX:
            log.warning("wall clock jumped", ahead_seconds=round(ahead, 1))
            logged = ahead

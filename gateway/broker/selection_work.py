"""Time budget of selectors between two passes of the event loop.

Each selector of a topic or queue examines a message, and how long that takes depends on those who wrote the
selectors and the message. Selectors therefore have some milliseconds in one pass; the rest is evaluated in
the next ones, by calls stored with `postpone`. Nothing is lost or overtaken: a queue whose selector is
postponed adds later messages behind the waiting ones. Equal selectors are evaluated once for a message.

A subscription has neither queued nor stored a message that it has postponed. A source that must know whether
its targets have its messages, after it has sent a batch, compares `postponed_count` before and after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway import clock
from gateway.broker.scheduler import CallScheduler
from gateway.containment import contained
from gateway.model.message import Message

Selects = Callable[[Message], bool]
PASS_SECS: Final = 0.005  # of selectors in one pass of the loop
WINDOW_SECS: Final = 0.05  # after which a pass that was not postponed is over
REMEMBERED_SECS: Final = 0.00001  # a result that took longer is cached for equal selectors
RESULTS_MAX: Final = 10_000


class SelectionWork:
    """Time budget for all selectors of one gateway. Without `alarms` it is unlimited."""

    def __init__(self, alarms: CallScheduler | None = None, pass_secs: float = PASS_SECS) -> None:
        self._alarms = alarms
        self._pass_secs = pass_secs
        self._began = 0.0
        self._spent = 0.0
        self._calls: dict[Callable[[], None], None] = {}
        self._results: dict[tuple[Selects, Message], bool] = {}
        self._is_set = False
        self.postponed_count = 0  # parts that subscriptions have postponed so far
        self.is_selecting = False  # True while postponed messages are evaluated

    def selects(self, selects: Selects, message: Message) -> bool:
        """Return True if the selector `selects` selects a message, and add the time to the budget.

        If the evaluation took long, the result is cached until the next pass of the event loop, so that an
        equal selector need not be evaluated.
        """
        results = self._results
        if results:
            result = results.get((selects, message))
            if result is not None:
                return result
        began = clock.perf_counter()
        found = selects(message)
        took = clock.perf_counter() - began
        if began - self._began > WINDOW_SECS and not self._is_set:
            self._began, self._spent = began, 0.0
        self._spent += took
        if took > REMEMBERED_SECS and self._alarms is not None and len(results) < RESULTS_MAX:
            results[selects, message] = found
            self._set()
        return found

    @property
    def is_exhausted(self) -> bool:
        """True if selectors have used up their time in this pass, and the rest must be postponed."""
        return self._spent >= self._pass_secs and self._alarms is not None

    def postpone(self, call: Callable[[], None]) -> None:
        """Schedule a call for the next pass of the event loop; equal calls are made once."""
        self._calls[call] = None
        self._set()

    def _set(self) -> None:
        if not self._is_set and self._alarms is not None:
            self._is_set = True
            self._alarms.set(clock.utc(), self._next_pass)

    def _next_pass(self) -> None:
        """Begin a new pass with the full time budget, and make the postponed calls."""
        self._is_set = False
        self._began, self._spent = clock.perf_counter(), 0.0
        self._results.clear()
        calls, self._calls = self._calls, {}
        self.is_selecting = True
        for call in calls:
            if self.is_exhausted:
                self.postpone(call)
                continue
            try:
                call()
            except Exception as error:
                contained("delivery", error)
        self.is_selecting = False


UNBOUNDED: Final = SelectionWork()
"""Unlimited time budget, for queues whose consumers have no selectors."""

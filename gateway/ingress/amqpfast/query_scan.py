"""Selection of messages for one QUERY, in portions of some milliseconds.

A selector may take long for many messages. The scan therefore applies it for at most PASS_SECS at a time, and
other clients are served between two portions. It covers the messages that waited when the QUERY arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from gateway import clock
from gateway.broker.priorities import PriorityQueue
from gateway.broker.selection_work import PASS_SECS, Selects
from gateway.model.message import Message


class QueryScan:
    """Scan for the messages that a QUERY selects. `found` has their queues and positions."""

    __slots__ = ("_remaining", "_selects", "found")

    def __init__(
        self, waiting: Iterable[tuple[PriorityQueue, int, Message]], selects: Selects | None
    ) -> None:
        """Prepare the scan of `waiting`; without a selector, find all messages at once."""
        self._selects = selects
        self._remaining: list[tuple[PriorityQueue, int, Message]] = []
        self.found: list[tuple[PriorityQueue, int]] = []
        if selects is None:
            self.found = [(queue, position) for queue, position, _ in waiting]
        else:
            self._remaining = list(waiting)
            self._remaining.reverse()

    def go_on(self) -> bool:
        """Apply the selector for some milliseconds. Return True if all messages have been processed."""
        deadline = clock.perf_counter() + PASS_SECS
        while self._remaining:
            queue, position, message = self._remaining.pop()
            assert self._selects is not None
            if self._selects(message):
                self.found.append((queue, position))
            if clock.perf_counter() >= deadline:
                break
        return not self._remaining

    async def wait(self) -> None:
        """Let other tasks run before the next portion."""
        await trio.lowlevel.checkpoint()

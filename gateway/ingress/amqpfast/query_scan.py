"""The messages of one QUERY, looked at by its selector some milliseconds at a time."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import trio

from gateway.broker.priorities import PriorityQueue
from gateway.broker.selection_work import PASS_SECS, Selects
from gateway.model.message import Message


class QueryScan:
    """Where the messages wait that a QUERY selects (`found`), of those that waited when it came."""

    __slots__ = ("_left", "_selects", "found")

    def __init__(
        self, waiting: Iterable[tuple[PriorityQueue, int, Message]], selects: Selects | None
    ) -> None:
        """Without a selector all are found at once."""
        self._selects = selects
        self._left: list[tuple[PriorityQueue, int, Message]] = []
        self.found: list[tuple[PriorityQueue, int]] = []
        if selects is None:
            self.found = [(queue, position) for queue, position, _ in waiting]
        else:
            self._left = list(waiting)
            self._left.reverse()

    def go_on(self) -> bool:
        """Look at messages for some milliseconds. Return True when all have been looked at."""
        until = perf_counter() + PASS_SECS
        while self._left:
            queue, position, message = self._left.pop()
            assert self._selects is not None
            if self._selects(message):
                self.found.append((queue, position))
            if perf_counter() >= until:
                break
        return not self._left

    async def wait(self) -> None:
        """Let everybody else be served before it goes on."""
        await trio.lowlevel.checkpoint()

"""Messages that a link has brought, and that the targets of their routes have released: refused for now.

The broker that sent them keeps them, for they are not acknowledged. They are not given back to its queue: a
quorum queue counts that against a message, and drops it in the end. They wait here, at most as many as the
broker sends without an acknowledgement, and are tried again in their order, with back-off, by the routes that
have not accepted them. What comes for the same routes meanwhile waits behind them; other routes go on.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from gateway.broker.backoff import Backoff
from gateway.broker.routing import RoutingEntry
from gateway.model.message import Message
from gateway.model.times import Monotonic

WAIT_SECS_MIN: Final = 1.0
WAIT_SECS_MAX: Final = 10.0
BEHIND: Final = 1 << 40  # above the number of any message that was itself released

R = TypeVar("R")


class Line(Generic[R]):
    """Messages that wait for the same routes. `waiting` is a heap, by numbers in the order of arrival."""

    __slots__ = ("backoff", "in_flight", "key", "last_behind", "last_released", "waiting")

    def __init__(self, key: Hashable, backoff: Backoff) -> None:
        self.key = key
        self.backoff = backoff
        self.waiting: list[tuple[int, R]] = []
        self.in_flight = 0  # messages that are on their way again
        self.last_released = 0
        self.last_behind = BEHIND


class HeldBack(Generic[R]):
    """The receipts of one link that wait for a target. `on`: there are some, or it is known of some which
    routes are to have them."""

    def __init__(
        self, message_of: Callable[[R], Message], jitter: Callable[[], float] = random.random
    ) -> None:
        """`message_of` returns the message of a receipt; `jitter` gives numbers from 0 to 1."""
        self.on = False
        self._message_of = message_of
        self._jitter = jitter
        self._lines: dict[Hashable, Line[R]] = {}
        # On their way again, by the id of the message: line, number, and the receipt, which keeps the id.
        self._tried: dict[int, tuple[Line[R], int, R]] = {}
        # The only routes that have not accepted a message, likewise, and the message, which keeps the id.
        self._undone: dict[int, tuple[Message, frozenset[str]]] = {}

    def __len__(self) -> int:
        """Return how many messages wait, without those that are on their way again."""
        return sum([len(line.waiting) for line in self._lines.values()])

    def released(self, key: Hashable, receipt: R, now: Monotonic) -> None:
        """Hold back a message that a target has released. `key`: what it shares a line with."""
        tried = self._tried.pop(id(self._message_of(receipt)), None)
        if tried is None:
            line = self._lines.get(key)
            if line is None:
                backoff = Backoff(self._jitter, WAIT_SECS_MIN, WAIT_SECS_MAX)
                line = self._lines[key] = Line(key, backoff)
                self.on = True
            line.last_released += 1
            number = line.last_released
        else:
            line, number, _ = tried
            line.in_flight -= 1
        heapq.heappush(line.waiting, (number, receipt))
        line.backoff.released(now)

    def behind(self, key: Hashable, receipt: R) -> bool:
        """Hold back a new message if others with its key are. Return False if it may go on."""
        line = self._lines.get(key)
        if line is None:
            return False
        line.last_behind += 1
        heapq.heappush(line.waiting, (line.last_behind, receipt))
        return True

    def is_tried(self, receipt: R) -> bool:
        """Return True if the message was held back and is on its way again."""
        return id(self._message_of(receipt)) in self._tried

    def settled(self, receipt: R, *, by_target: bool = True) -> None:
        """Forget a message that has an outcome. Not `by_target`: its sender does not wait any more."""
        key = id(self._message_of(receipt))
        self._undone.pop(key, None)
        tried = self._tried.pop(key, None)
        if tried is not None:
            line = tried[0]
            line.in_flight -= 1
            if by_target:
                line.backoff.accepted(1)
            if not line.waiting and not line.in_flight and self._lines.get(line.key) is line:
                del self._lines[line.key]
        self.on = bool(self._lines or self._undone)

    def due(self, now: Monotonic) -> list[R]:
        """Return the receipts that are to be tried now, in order. Each is settled or released in the end."""
        found: list[R] = []
        for line in self._lines.values():
            backoff = line.backoff
            while line.waiting and line.in_flight < backoff.window and not backoff.is_waiting(now):
                number, receipt = heapq.heappop(line.waiting)
                line.in_flight += 1
                self._tried[id(self._message_of(receipt))] = line, number, receipt
                found.append(receipt)
        return found

    def note_undone(self, receipt: R, routes: frozenset[str]) -> None:
        """Note the only routes that have not accepted a message."""
        message = self._message_of(receipt)
        self._undone[id(message)] = message, routes
        self.on = True

    def try_all(self, receipt: R) -> bool:
        """Return True if some route has released a message that another has rejected. All of them are tried
        again then: the source cannot be told of the one without the other losing the message."""
        return self._undone.pop(id(self._message_of(receipt)), None) is not None

    def left_of(self, receipt: R, entry: RoutingEntry) -> RoutingEntry:
        """Return what is left of an entry: the routes that have not accepted the message. If a reload has
        renamed or removed all of them, that is every route."""
        undone = self._undone.pop(id(self._message_of(receipt)), None)
        if undone is None:
            return entry
        left = entry.by_routes(undone[1])
        return left if left.plan.branches else entry

    def give_up(self) -> list[R]:
        """Forget all, and return the receipts that waited: their messages are sent again by their broker."""
        waiting = [receipt for line in self._lines.values() for _, receipt in sorted(line.waiting)]
        self._lines.clear()
        self._tried.clear()
        self._undone.clear()
        self.on = False
        return waiting


def line_of(entry: RoutingEntry) -> tuple[str, ...]:
    """Return the names of the routes of an entry: messages that share them wait for each other."""
    return tuple([branch.route.name for branch in entry.plan.branches])

"""Received messages that the targets of their routes have released, i.e. refused for the time being.

The messages are not acknowledged, so the sending broker still has them. They are not requeued there: a quorum
queue counts each requeue and finally drops the message. Instead they wait here, at most as many as the broker
sends without acknowledgement. They are retried in order and with back-off on the routes that have not
accepted them. New messages for the same routes wait behind them; other routes are not affected. A message
that has expired meanwhile is not retried, because a queue or broker may deliver it at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from gateway import chance
from gateway.broker.backoff import Backoff
from gateway.broker.routing import RoutingEntry
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.times import Monotonic

WAIT_SECS_MIN: Final = 1.0
WAIT_SECS_MAX: Final = 10.0
ROUTE_REMOVED: Final = Outcome(
    Verdict.REJECTED, Reason.TARGET_DOWN, "the route was removed before the target accepted the message"
)
TOO_LONG: Final = Outcome(
    Verdict.REJECTED,
    Reason.EXPIRED,
    "the target refused the message for longer than the link's retry_secs_max",
)
EXPIRED: Final = Outcome(
    Verdict.REJECTED, Reason.EXPIRED, "the message expired before the target accepted it"
)
BEHIND: Final = 1 << 40  # above the number of any released message

R = TypeVar("R")
RetryKey = tuple[object, tuple[str, ...]]
"""Key of a line: the consumer, or None if all messages share lines, and the names of the routes."""


class RouteBacklog(Generic[R]):
    """Messages that wait for the same routes, with their common back-off.

    `waiting` is a heap in the order of arrival. Each element has the message's number in that order, the time
    since which it waits in loop-clock seconds, and its receipt.
    """

    __slots__ = ("backoff", "in_flight", "key", "last_behind", "last_released", "waiting")

    def __init__(self, key: RetryKey, backoff: Backoff) -> None:
        self.key = key
        self.backoff = backoff
        self.waiting: list[tuple[int, Monotonic, R]] = []
        self.in_flight = 0  # messages that are being retried
        self.last_released = 0
        self.last_behind = BEHIND


class HeldBack(Generic[R]):
    """Received messages of one link that wait until a target of their routes accepts them.

    A message is stored as its receipt: what the link needs to acknowledge it. Messages with the same key,
    which stands for the same routes, are retried in order. `on` is True if messages wait, or if routes of a
    message are recorded.
    """

    def __init__(
        self,
        message_of: Callable[[R], Message],
        jitter: Callable[[], float] = chance.random,
        *,
        secs_max: float | None = None,
    ) -> None:
        """Create the collection.

        `message_of` returns the message of a receipt (the link's data to acknowledge a message). `jitter`
        returns random numbers from 0 to 1, by which delays vary. `overdue` removes messages that have waited
        for `secs_max` seconds; None means no limit.
        """
        self.on = False
        self._secs_max = secs_max
        self._message_of = message_of
        self._jitter = jitter
        self._backlogs: dict[RetryKey, RouteBacklog[R]] = {}
        # Messages being retried, by the id of the message: backlog of their routes, number, time since which
        # they wait, and receipt, which keeps the id valid.
        self._tried: dict[int, tuple[RouteBacklog[R], int, Monotonic, R]] = {}
        # Routes that have not accepted a message, by its id, and the message, which keeps the id valid.
        self._undone: dict[int, tuple[Message, frozenset[str]]] = {}
        # Routes of a message that waits elsewhere, or has been rejected, by its id, and the message.
        self._recorded_routes: dict[int, tuple[Message, tuple[str, ...]]] = {}

    def __len__(self) -> int:
        """Return how many messages wait, not counting those that are being retried at present."""
        return sum([len(line.waiting) for line in self._backlogs.values()])

    def hold(self, key: RetryKey, receipt: R, now: Monotonic) -> None:
        """Store a message that a target has refused for now, until the target may accept it.

        Messages for the same routes are retried in order; `key` stands for these routes. `receipt` is what
        the link needs to acknowledge the message to its broker, and `now` is in loop-clock seconds.
        """
        tried = self._tried.pop(id(self._message_of(receipt)), None)
        if tried is None:
            line = self._backlogs.get(key)
            if line is None:
                backoff = Backoff(self._jitter, WAIT_SECS_MIN, WAIT_SECS_MAX)
                line = self._backlogs[key] = RouteBacklog(key, backoff)
                self.on = True
            line.last_released += 1
            number, released_at = line.last_released, now
        else:
            line, number, released_at, _ = tried
            line.in_flight -= 1
        heapq.heappush(line.waiting, (number, released_at, receipt))
        line.backoff.record_release(now)

    def hold_if_behind(self, key: RetryKey, receipt: R, now: Monotonic) -> bool:
        """Store a new message behind those for the same routes (`key`) that wait to be retried. Return True.

        Return False if no message waits for these routes, so that the new message may be published at once.
        `now` is in loop-clock seconds.
        """
        line = self._backlogs.get(key)
        if line is None:
            return False
        line.last_behind += 1
        heapq.heappush(line.waiting, (line.last_behind, now, receipt))
        return True

    def is_tried(self, receipt: R) -> bool:
        """Return True if the message was refused for now by a target before, and is being retried now."""
        return id(self._message_of(receipt)) in self._tried

    def record_settled(self, receipt: R, *, by_target: bool = True) -> None:
        """Forget a message, because it is settled or dropped.

        `by_target` is True if a target has accepted or rejected it; the delays for its routes are then
        shortened.
        """
        key = id(self._message_of(receipt))
        self._undone.pop(key, None)
        self._recorded_routes.pop(key, None)
        tried = self._tried.pop(key, None)
        if tried is not None:
            line = tried[0]
            line.in_flight -= 1
            if by_target:
                line.backoff.record_acceptance(1)
            if not line.waiting and not line.in_flight and self._backlogs.get(line.key) is line:
                del self._backlogs[line.key]
        self._check()

    def _check(self) -> None:
        self.on = bool(self._backlogs or self._undone or self._recorded_routes)

    def take_due(self, now: Monotonic) -> list[R]:
        """Remove and return the messages to retry now, in order, as receipts.

        The caller later calls `record_settled` or `hold` for each of them. `now` is in loop-clock seconds.
        """
        found: list[R] = []
        for line in self._backlogs.values():
            backoff = line.backoff
            while line.waiting and line.in_flight < backoff.window and not backoff.is_waiting(now):
                number, released_at, receipt = heapq.heappop(line.waiting)
                line.in_flight += 1
                self._tried[id(self._message_of(receipt))] = line, number, released_at, receipt
                found.append(receipt)
        return found

    def overdue(
        self, now: Monotonic, entry_of: Callable[[R], RoutingEntry]
    ) -> list[tuple[R, tuple[str, ...]]]:
        """Remove the messages that have waited for `secs_max` seconds. Return their receipts, in order.

        Each receipt is returned with the names of the routes that have not accepted its message. `entry_of`
        returns the current routing entry of a receipt. `record_settled` need not be called for these
        receipts. `now` is in loop-clock seconds.
        """
        if self._secs_max is None:
            return []
        found: list[tuple[R, tuple[str, ...]]] = []
        for line in list(self._backlogs.values()):
            while line.waiting and now - line.waiting[0][1] >= self._secs_max:
                receipt = heapq.heappop(line.waiting)[2]
                found.append((receipt, self._remaining_routes(receipt, entry_of(receipt), line)))
            if not line.waiting and not line.in_flight:
                del self._backlogs[line.key]
        for receipt, _ in found:
            self._undone.pop(id(self._message_of(receipt)), None)
            self._recorded_routes.pop(id(self._message_of(receipt)), None)
        self._check()
        return found

    def remaining_routes(self, receipt: R, entry: RoutingEntry) -> tuple[str, ...]:
        """Return the names of the routes that have not accepted a message that waited or was rejected.

        They are routes of `entry`, its current routing entry. If a reload has removed them all, their old
        names are returned; the result is ("",) if no name is known.
        """
        tried = self._tried.get(id(self._message_of(receipt)))
        return self._remaining_routes(receipt, entry, None if tried is None else tried[0])

    def _remaining_routes(
        self, receipt: R, entry: RoutingEntry, line: RouteBacklog[R] | None
    ) -> tuple[str, ...]:
        undone = self._undone.get(id(self._message_of(receipt)))
        if undone is not None:
            return route_names_of(_remaining(entry, undone[1])) or tuple(sorted(undone[1]))
        if line is not None:
            return route_names_of(entry) or line.key[1] or self.named(receipt)
        return route_names_of(entry) or self.named(receipt)

    def note_routes(self, receipt: R, routes: Iterable[str]) -> None:
        """Record the names of a message's routes until the message is settled.

        An empty `routes` changes nothing.
        """
        names = tuple(routes)
        if not names:
            return
        message = self._message_of(receipt)
        self._recorded_routes[id(message)] = message, names
        self.on = True

    def named(self, receipt: R) -> tuple[str, ...]:
        """Return the names of the routes that `note_routes` has recorded, or ("",)."""
        found = self._recorded_routes.get(id(self._message_of(receipt)))
        return ("",) if found is None else found[1]

    def record_remaining_routes(self, receipt: R, routes: frozenset[str]) -> None:
        """Record the names of the routes that have not accepted a message; only these are retried."""
        message = self._message_of(receipt)
        self._undone[id(message)] = message, routes
        self.on = True

    def take_mixed_outcome(self, receipt: R) -> bool:
        """Return True if one route has released a message for a retry and another route has rejected it.

        The caller then retries all routes: if it reported the rejection to the sender, the message would be
        lost for the route that has released it. The record of these routes is deleted.
        """
        return self._undone.pop(id(self._message_of(receipt)), None) is not None

    def remaining_entry(self, receipt: R, entry: RoutingEntry) -> RoutingEntry:
        """Return a copy of the routing entry with only the routes that have not accepted the message.

        The entry itself is returned if no such routes are recorded, or if a reload has renamed or removed
        them.
        """
        if not entry.plan.branches:
            return entry  # the names of its routes are still needed
        undone = self._undone.pop(id(self._message_of(receipt)), None)
        return entry if undone is None else _remaining(entry, undone[1])

    def take_all(self) -> list[R]:
        """Remove all waiting messages. Return their receipts; the broker redelivers them."""
        waiting = [receipt for line in self._backlogs.values() for _, _, receipt in sorted(line.waiting)]
        self._backlogs.clear()
        self._tried.clear()
        self._undone.clear()
        self._recorded_routes.clear()
        self.on = False
        return waiting


def _remaining(entry: RoutingEntry, names: frozenset[str]) -> RoutingEntry:
    remaining = entry.only_routes(names)
    return remaining if remaining.plan.branches else entry


def route_names_of(entry: RoutingEntry) -> tuple[str, ...]:
    """Return the names of the routes of a routing entry."""
    return tuple([branch.route.name for branch in entry.plan.branches])

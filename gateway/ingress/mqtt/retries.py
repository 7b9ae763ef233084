"""Retries of refused messages for clients before MQTT 5, which cannot be notified of a refusal.

A message refused by a target is published again after a delay that doubles each time. A message refused
because of the gateway's own disk is held, and published first when the disk has recovered, ahead of later
messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.broker.pressure import HeldReceipts
from gateway.broker.routing import RoutingEntry
from gateway.model.outcome import Outcome, Reason

RETRY_SECS_MIN: Final = 1.0
RETRY_SECS_MAX: Final = 30.0
DOUBLINGS_MAX: Final = 5


class Retries:
    """Refused messages of one connection that are published again. A message is stored as its receipt."""

    __slots__ = ("_undone", "_waiting", "attempts", "held_receipts")

    def __init__(self, disk_healthy: Callable[[], bool]) -> None:
        self.held_receipts: HeldReceipts[Any] = HeldReceipts(disk_healthy)
        self._waiting: list[tuple[float, Any]] = []
        self.attempts: dict[int, int] = {}  # by packet identifier; removed on acceptance
        self._undone: dict[int, frozenset[str]] = {}  # names of routes, by packet id

    @property
    def active_holds(self) -> HeldReceipts[Any] | None:
        """Messages held until the disk recovers, or None if no message is held.

        Later messages must queue behind them.
        """
        return self.held_receipts if self.held_receipts.on else None

    def add(self, receipt: Any, outcome: Outcome, now: float) -> None:
        """Schedule another attempt to publish the message of `receipt`, which was refused with `outcome`.

        If the store refused the message, the attempt is made when the disk is healthy, and otherwise after a
        delay that doubles each time. `now` is in loop-clock seconds.
        """
        if outcome.reason is Reason.STORE:
            self.held_receipts.add_refused(receipt)
            return
        attempts = self.attempts[receipt[1]] = self.attempts.get(receipt[1], 0) + 1
        wait = min(RETRY_SECS_MIN * 2 ** min(attempts - 1, DOUBLINGS_MAX), RETRY_SECS_MAX)
        self._waiting.append((now + wait, receipt))

    def record_remaining_routes(self, packet_id: int, routes: frozenset[str]) -> None:
        """Record which routes (by name) have not accepted a message: only these get the next attempt."""
        self._undone[packet_id] = routes

    def remaining_entry(self, packet_id: int, entry: RoutingEntry) -> RoutingEntry:
        """Return the entry restricted to the routes that have not accepted the message.

        Return the whole entry if no such routes are recorded, or if a reload has renamed or removed all of
        them.
        """
        routes = self._undone.pop(packet_id, None)
        if routes is None:
            return entry
        remaining = entry.only_routes(routes)
        return remaining if remaining.plan.branches else entry

    def take_due(self, now: float) -> list[Any]:
        """Remove and return the messages that are due to be published again, as receipts."""
        due_receipts = [receipt for at, receipt in self._waiting if at <= now]
        if due_receipts:
            self._waiting = [retry for retry in self._waiting if retry[0] > now]
        return self.held_receipts.take_due() + due_receipts

    def take_all(self) -> list[Any]:
        """Remove and return all messages, as receipts, because the connection is closed."""
        return self.take_due(float("inf")) + self.held_receipts.take_all()

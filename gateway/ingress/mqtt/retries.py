"""Messages that a target refused, of clients whose version of MQTT has no word for it: tried again, later.

Where our own disk was the reason they go first when it has recovered, before what came behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.broker.pressure import Held
from gateway.broker.routing import RoutingEntry
from gateway.model.outcome import Outcome, Reason

RETRY_SECS_MIN: Final = 1.0
RETRY_SECS_MAX: Final = 30.0
DOUBLINGS_MAX: Final = 5


class Retries:
    """The refused messages of one connection. A receipt's second member is its packet id."""

    __slots__ = ("_undone", "_waiting", "attempts", "held")

    def __init__(self, disk_healthy: Callable[[], bool]) -> None:
        self.held: Held[Any] = Held(disk_healthy)
        self._waiting: list[tuple[float, Any]] = []
        self.attempts: dict[int, int] = {}  # by packet id; an accepted message's are forgotten
        self._undone: dict[int, frozenset[str]] = {}  # names of routes, by packet id

    @property
    def waiting(self) -> Held[Any] | None:
        """The messages that wait for the disk, behind which all goes that comes; None: there are none."""
        return self.held if self.held.on else None

    def add(self, receipt: Any, outcome: Outcome, now: float) -> None:
        """Try again when the disk is healthy, or after a wait that doubles each time."""
        if outcome.reason is Reason.STORE:
            self.held.refused(receipt)
            return
        attempts = self.attempts[receipt[1]] = self.attempts.get(receipt[1], 0) + 1
        wait = min(RETRY_SECS_MIN * 2 ** min(attempts - 1, DOUBLINGS_MAX), RETRY_SECS_MAX)
        self._waiting.append((now + wait, receipt))

    def note_undone(self, packet_id: int, routes: frozenset[str]) -> None:
        """Note the only routes that have not accepted a message, which is about to be added."""
        self._undone[packet_id] = routes

    def left_of(self, packet_id: int, entry: RoutingEntry) -> RoutingEntry:
        """Return what is left of an entry: the routes that have not accepted the message. If a reload has
        renamed or removed all of them, that is every target."""
        routes = self._undone.pop(packet_id, None)
        if routes is None:
            return entry
        left = entry.by_routes(routes)
        return left if left.plan.branches else entry

    def due(self, now: float) -> list[Any]:
        """Remove and return the receipts whose time has come."""
        due = [receipt for at, receipt in self._waiting if at <= now]
        if due:
            self._waiting = [retry for retry in self._waiting if retry[0] > now]
        return self.held.due() + due

    def give_up(self) -> list[Any]:
        """The connection is gone: remove and return all."""
        return self.due(float("inf")) + self.held.give_up()

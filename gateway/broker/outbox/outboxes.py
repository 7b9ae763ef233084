"""All outboxes of the gateway: those of routes in force, and others that still contain messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet

import structlog

from gateway import chance, clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.outbox.arrival_times import ArrivalTimes
from gateway.broker.outbox.outbox import KIND, DepartureCallback, Outbox, OutboxState, OutboxTarget
from gateway.broker.shares import UserQuotas
from gateway.broker.storage import MemoryLimits
from gateway.mapping.routes import Route
from gateway.model.times import Monotonic, WallTime
from gateway.settings.limits import Limits
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

log = structlog.get_logger()


class Outboxes:
    """Outboxes of all routes with `settle: stored`, by name ("<link>/<route>").

    An outbox that was found in the store, or whose route was removed, remains until it is empty.
    """

    def __init__(
        self,
        store: Store,
        dead_letters: DeadLetters,
        memory: MemoryLimits,
        *,
        on_departure: DepartureCallback | None = None,
        quotas: UserQuotas | None = None,
        jitter: Callable[[], float] = chance.random,
        clock: Callable[[], Monotonic] = clock.now,
        utc: Callable[[], WallTime] = clock.utc,
    ) -> None:
        """Create the outboxes of a store, without any target or route.

        `memory` limits what one outbox has in memory; further messages are only on disk. `on_departure` is
        called for messages that leave an outbox. `quotas` limits each user's messages in an outbox; without
        it one user may fill it. `jitter`, `clock` and `utc` are as in Outbox.
        """
        self._store = store
        self._dead_letters = dead_letters
        self._memory = memory
        self._time = (jitter, clock, utc)
        self._arrivals = ArrivalTimes.load(store)
        self._on_departure = on_departure
        self._quotas = quotas or UserQuotas(Limits(user_share=1.0))
        self._targets: dict[str, OutboxTarget] = {}
        self._routes: dict[str, Route] = {}  # in force, by the name of their outbox
        self._boxes: dict[str, Outbox] = {}
        self._paused: AbstractSet[str] = frozenset()
        self._stopped = False
        for found in store.logs():
            if found.kind == KIND:
                with contain_failure(KIND, found.name):
                    self._open(found.name)
        self._arrivals.clear()

    def __iter__(self) -> Iterator[Outbox]:
        return iter(self._boxes.values())

    def states(self) -> list[OutboxState]:
        """Return the states of all outboxes for the console and metrics."""
        return [outbox.state() for outbox in self._boxes.values()]

    def add_target(self, link: str, target: OutboxTarget) -> None:
        """Add the link with the name `link`, to which outboxes send messages."""
        self._targets[link] = target

    def use(self, routes: Iterable[Route]) -> None:
        """Set the routes in force, and create outboxes for new ones.

        Outboxes whose route was removed keep their messages, which is logged.
        """
        self._routes = {
            f"{route.target_endpoint}/{route.name}": route
            for route in routes
            if route.target_endpoint in self._targets
        }
        for name, route in self._routes.items():
            if route.settle == "stored" and name not in self._boxes:
                self._open(name)
        for outbox in list(self):
            outbox.use(self._targets.get(outbox.link), self._routes.get(outbox.name), self._on_departure)
            if outbox.name not in self._routes and len(outbox):
                log.warning(
                    "outbox lost its route, messages preserved",
                    outbox=outbox.name,
                    messages=len(outbox),
                    why=outbox.state().problem,
                )
        self._sweep()

    def pause(self, routes: AbstractSet[str]) -> None:
        """Pause the outboxes of these routes, and resume all others."""
        self._paused = routes
        for outbox in list(self):
            outbox.pause(outbox.route_name in routes)

    def of(self, route: Route) -> Outbox:
        """Return the outbox of a route with `settle: stored`. Create it if it does not exist.

        It may not exist during a reload, as the new mapping routes messages before `use` is called.
        """
        name = f"{route.target_endpoint}/{route.name}"
        if name not in self._boxes:
            self._open(name).use(self._targets.get(route.target_endpoint), route, self._on_departure)
        return self._boxes[name]

    def link_up(self, link: str) -> None:
        """Send messages to a link that has connected."""
        for outbox in list(self):
            if outbox.link == link:
                outbox.tick()

    def tick(self) -> None:
        """Run the timers of all outboxes and delete unused ones; called several times a second."""
        for outbox in list(self):
            outbox.tick()
        self._sweep()

    def stop(self) -> None:
        """Stop sending messages from all outboxes, because the gateway is shutting down."""
        self._stopped = True
        for outbox in self:
            outbox.stop()

    def _open(self, name: str) -> Outbox:
        jitter, clock, utc = self._time
        outbox = self._boxes[name] = Outbox(
            name,
            self._store,
            self._dead_letters,
            marks=self._arrivals.get(name, ()),
            memory=self._memory,
            quotas=self._quotas,
            jitter=jitter,
            clock=clock,
            utc=utc,
        )
        outbox.pause(outbox.route_name in self._paused)
        if self._stopped:
            outbox.stop()
        return outbox

    def _sweep(self) -> None:
        """Delete empty outboxes whose route was removed or has no `settle: stored` any more."""
        for name, outbox in list(self._boxes.items()):
            route = self._routes.get(name)
            if not len(outbox) and (route is None or route.settle != "stored"):
                outbox.drop()
                del self._boxes[name]

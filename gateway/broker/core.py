"""Central objects of the broker: dispatcher, dead letters, deduplication, pauses and outboxes.

`BrokerCore` builds them once, connects them, and runs their timers. Namespaces are not here: they join the
dispatcher later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import trio

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dead_letters.forwarder import Forwarding
from gateway.broker.dead_letters.letters import CommonLetters
from gateway.broker.dead_letters.redrive import Redriving
from gateway.broker.deduplication import Deduplication
from gateway.broker.dispatcher import ALONE, Dispatcher, DispatcherServices
from gateway.broker.journal import JournalRecorder, RecordingDispatcher
from gateway.broker.memory import Memory
from gateway.broker.outbox.outbox import OutboxLimits, OutboxState, OutboxTarget
from gateway.broker.outbox.outboxes import Outboxes
from gateway.broker.pauses import Pauses
from gateway.broker.routing import Namespace
from gateway.broker.shares import UserQuotas
from gateway.broker.storage import MemoryLimits
from gateway.broker.tracing import TracingDispatcher, TracingRecordingDispatcher
from gateway.containment import contained
from gateway.mapping.router import Router, Targets
from gateway.mapping.routes import Route
from gateway.settings import Limits, LinkSettings
from gateway.settings.tree import Forward
from gateway.store.store import Store

if TYPE_CHECKING:  # OpenTelemetry need not be installed
    from gateway.telemetry.tracing import Tracing

TICK_SECS: Final = 0.25


def dispatcher_of(
    router: Router,
    dead_letters: DeadLetters,
    surroundings: DispatcherServices = ALONE,
    *,
    journaling: JournalRecorder | None = None,
    tracing: Tracing | None = None,
) -> Dispatcher:
    """Return a new dispatcher that records messages in the journal, and traces them, if configured.

    `surroundings` has the objects that it works with. `journaling` and `tracing` are None if they are off.
    """
    arguments = (router, dead_letters, surroundings)
    if tracing is None:
        if journaling is None:
            return Dispatcher(*arguments)
        return RecordingDispatcher(*arguments, journaling=journaling)
    if journaling is None:
        return TracingDispatcher(*arguments, tracing=tracing)
    return TracingRecordingDispatcher(*arguments, tracing=tracing, journaling=journaling)


class ClusterOutboxes(Protocol):
    """Outboxes of a link that are queues of a RabbitMQ cluster."""

    def of(self, route: Route) -> Namespace:
        """Return the outbox of a route in force."""

    def stop(self) -> None:
        """Stop sending messages from the outboxes."""

    def states(self) -> list[OutboxState]:
        """Return the current states of the outboxes."""


class BrokerCore:
    """Dispatcher of the broker with its dead letters, deduplication, pauses and outboxes.

    Without a store everything is in memory, and there are no outboxes.
    """

    def __init__(
        self,
        store: Store | None,
        router: Router,
        limits: Limits,
        *,
        links: Mapping[str, LinkSettings],
        memory: Memory,
        forward: Forward | None = None,
        common_letters: CommonLetters | None = None,
        deduplication: Deduplication | None = None,
        journaling: JournalRecorder | None = None,
        tracing: Tracing | None = None,
        quotas: UserQuotas | None = None,
    ) -> None:
        """Create all objects. Must be called before the store starts.

        `common_letters` and `deduplication` are those that all replicas of a cluster share.
        """
        namespaces: dict[str, Namespace] = {}
        shared = any(link.outbox.shared for link in links.values())
        self._shared: dict[str, ClusterOutboxes] = {}  # by link
        self._quotas = quotas or UserQuotas(limits)
        self.forwarding: Forwarding | None = None
        if forward is not None:
            self.forwarding = Forwarding(
                namespaces, forward.endpoint, forward.address(), assurance=forward.qos
            )
        self.dead_letters = DeadLetters(
            messages_max=limits.dead_letters_max,
            bytes_max=limits.dead_letters_bytes_max,
            store=store,
            forward=None if self.forwarding is None else self.forwarding.forward,
            common=common_letters,
            shares=None if quotas is None or store is not None else quotas.letters,
        )
        self.deduplication = deduplication or Deduplication(store)
        self.pauses = Pauses(store, self._paused)
        # Reports the messages that leave an outbox.
        self.on_departure = None if journaling is None else journaling.record_left
        self.outboxes: Outboxes | None = None
        if store is not None:
            self.outboxes = Outboxes(
                store,
                self.dead_letters,
                MemoryLimits(limits.queue_memory_messages_max, limits.queue_memory_bytes_max),
                on_departure=self.on_departure,
                quotas=self._quotas,
            )
        self.dispatcher = dispatcher_of(
            router,
            self.dead_letters,
            DispatcherServices(
                self.deduplication,
                links=links.keys(),
                namespaces=namespaces,
                outbox=self._outbox if self.outboxes is not None or shared else None,
                pauses=self.pauses,
                disk_healthy=lambda: store is None or store.healthy,
                memory=memory,
                quotas=self._quotas,
            ),
            journaling=journaling,
            tracing=tracing,
        )
        self._paused()
        self.redriving = Redriving(self.dispatcher, self.dead_letters)
        self._forward = forward
        self._journaling = journaling

    def _outbox(self, route: Route) -> Namespace | None:
        """Return the outbox of a route with `settle: stored`: in the store, or on the cluster."""
        shared = self._shared.get(route.target_endpoint)
        if shared is not None:
            return shared.of(route)
        return None if self.outboxes is None else self.outboxes.of(route)

    def share_outboxes(self, link: str, outboxes: ClusterOutboxes) -> None:
        """Use outboxes on a cluster for the routes to a link."""
        self._shared[link] = outboxes
        self.dispatcher.shared_outboxes.add(link)

    def add_link(
        self, name: str, options: LinkSettings, namespace: Namespace, up: Callable[[], bool]
    ) -> None:
        """Add a link as a target of outboxes.

        `up` returns True while the link is connected; `link_up` must be called when it has connected.
        """
        if self.outboxes is not None and not options.outbox.shared:
            stated = options.outbox
            limits = OutboxLimits(stated.messages_max, stated.bytes_max, stated.age_secs_max, stated.policy)
            self.outboxes.add_target(name, OutboxTarget(namespace, up, options.in_flight_max, limits))

    def link_up(self, name: str) -> None:
        """Resume the outboxes of a link that has connected."""
        if self.outboxes is not None:
            self.outboxes.link_up(name)

    def use(self, routes: Iterable[Route]) -> None:
        """Set the routes in force. Must be called after all links were added."""
        routes = list(routes)
        if self.outboxes is not None:
            self.outboxes.use(routes)
        self.deduplication.use(routes)
        self.pauses.use(routes)
        for route in routes:
            if self.dispatcher.uses_outbox(route):
                self.pauses.empty(route.name)

    def _paused(self) -> None:
        self.dispatcher.invalidate()
        if self.outboxes is not None:
            self.outboxes.pause(self.pauses.routes)

    def targets(self, link: str, targets: Targets) -> Targets:
        """Return the exchanges and queues that must exist at the broker of the link `link`.

        They are those in `targets` (of the link's routes), and the target of dead letter copies if the copies
        go to this link.
        """
        forward = self._forward
        if forward is None or forward.endpoint != link or not forward.dialect.queue_word:
            return targets
        scopes, queues, address = targets.scopes, targets.queues, forward.address()
        if address.scope:
            scopes = tuple(dict.fromkeys((*scopes, address.scope)))
        else:
            queues = tuple(dict.fromkeys((*queues, address.name)))
        return Targets(scopes, queues, targets.names)

    async def run(self, flush: Callable[[], None], *others: Callable[[], None]) -> None:
        """Run the timers of the core, and call `others`, several times a second until cancelled.

        `flush` is called after each round. It passes changes to the store and writes to sockets.
        """
        ticks = [self._quotas.tick, self.dead_letters.tick, self.deduplication.tick, self.pauses.tick]
        ticks += others
        if self.outboxes is not None:
            ticks.insert(0, self.outboxes.tick)
        if self._journaling is not None:
            ticks.append(self._journaling.tick)
        while True:
            await trio.sleep(TICK_SECS)
            for tick in ticks:
                try:
                    tick()
                except Exception as error:
                    contained("timer", error)
            flush()

    def in_flight_count(self, link: str) -> int:
        """Return how many messages from outboxes a link has not settled yet."""
        return sum(state.in_flight for state in self.outbox_states() if state.link == link)

    def stop(self) -> None:
        """Stop the outboxes, because the gateway is shutting down."""
        if self.outboxes is not None:
            self.outboxes.stop()
        for shared in self._shared.values():
            shared.stop()

    # For operators and metrics.

    def outbox_states(self) -> list[OutboxState]:
        """Return the current states of all outboxes."""
        own = [] if self.outboxes is None else self.outboxes.states()
        return [*own, *(state for shared in self._shared.values() for state in shared.states())]

    def forwarded_counts(self) -> Mapping[str, int]:
        """Return the counts of forwarded dead letters, by result."""
        return {} if self.forwarding is None else self.forwarding.counted

    def forgotten_ids(self) -> Mapping[str, int]:
        """Return how many message ids were forgotten before their window ended, by route."""
        return {ids.route: ids.forgotten for ids in self.deduplication}

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return functions that read the core's gauges, by metric name."""
        return {
            "gateway_dead_letters": lambda: len(self.dead_letters),
            "gateway_dead_letters_unwanted": lambda: self.dead_letters.unwanted_count,
            "gateway_dead_letters_bytes": lambda: self.dead_letters.byte_count,
            "gateway_deduplication_ids": lambda: sum(len(ids.accepted) for ids in self.deduplication),
        }

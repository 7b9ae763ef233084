"""Dispatcher: sends each published message to every recipient that must get it.

A message goes to its own protocol's namespace, and through the routes that match its address into other
namespaces. What the address alone determines is computed once and stored as a RoutingEntry. Sources cache
entries, keyed by the bytes that they read, and drop them when `generation` changes (a binding, a subscription
or the mapping changed). A route with `settle: stored` leads to its outbox in front of the link, and one that
deduplicates to its guard in front of either.

An error while a message is dispatched becomes the outcome of that message, on the route where it occurred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, NamedTuple

import structlog

from gateway import clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.deduplication import Deduplication, Guard, RouteEnd
from gateway.broker.memory import Memory, unlimited_memory
from gateway.broker.mqtt.echoes import EchoDetector
from gateway.broker.pauses import PauseGate, Pauses
from gateway.broker.poison import outcome_of_error
from gateway.broker.routing import AnswerEntry, Branch, Namespace, RoutingEntry, RoutingPlan, is_mandatory
from gateway.broker.scheduler import CallScheduler
from gateway.broker.selection_work import UNBOUNDED, SelectionWork
from gateway.broker.shares import UserQuotas
from gateway.broker.taps import Taps
from gateway.containment import contained
from gateway.errors import ProtocolError
from gateway.mapping.reply_routes import answer_to
from gateway.mapping.return_addresses import Return
from gateway.mapping.router import Router
from gateway.mapping.routes import RefusedRoute, ResolvedRoute, Route
from gateway.model.address import Address
from gateway.model.batch import Batch, Receipt, Recipient, Recorder, Sink, Source, SubBatch
from gateway.model.caches import make_room
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, INTERNAL, Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES
from gateway.model.spooled_bodies import Spooled
from gateway.model.times import Monotonic
from gateway.settings.limits import Limits
from gateway.store.journal.columns import WAS_STORED
from gateway.telemetry.stats import Latency

PLANS_MAX = 4_096  # more plans would not be shared: each address would have its own
FILTERS_MAX = 64  # subscriptions that change between two checks; with more, everything is looked up again
log = structlog.get_logger(limited=True)

UNROUTED = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "no queue or subscription matches the message")
AddressOf = Callable[[str], Address | None]


def sinks_of(namespace: Namespace, message: Message) -> tuple[Sink, ...]:
    """Return the sinks of a message in a namespace. The sink for retained messages is not included."""
    found = namespace.sinks(message.address)
    return namespace.choose(message) if found is None else found


class FailedRouting:
    """Namespace for an address whose routing raised an error: each message gets that error."""

    retained = None

    def __init__(self, error: Exception) -> None:
        self._error = error

    def sinks(self, address: Address) -> None:
        """Return None, so that `choose` is called for every message."""

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Raise the error that the routing of the address has raised."""
        raise self._error.with_traceback(None)


def protocol_mismatch(route: Route, message: Message) -> Outcome | None:
    """Return a rejection if a message has an address of another protocol than its route's target.

    That happens if the mapping was reloaded after the message crossed the route. Returns None if they agree.
    """
    expected, actual = route.target.dialect.name, message.address.protocol
    if expected == actual:
        return None
    text = f"the route {route.name!r} leads to {expected} now, and the message has an address of {actual}"
    return Outcome(Verdict.REJECTED, Reason.NAME_INVALID, text)


class ProtocolMismatchSink:
    """Destination of messages whose address is of another protocol than the present target of their route."""

    def publish(self, sub_batch: SubBatch) -> None:
        """Reject the messages, each with its reason."""
        recipient = sub_batch.recipient
        assert isinstance(recipient, RouteRecipient)
        for at, message in enumerate(sub_batch.messages):
            sub_batch.settle_at((at,), protocol_mismatch(recipient.route, message) or INTERNAL)


MISMATCH_SINK: Final = ProtocolMismatchSink()


class RouteRecipient(Recipient):
    """Recipient at the end of a route.

    It counts the route's messages. It also stores a dead letter, under the route's name, for each message
    that the target rejects if the route requires that or if the source cannot be informed.
    """

    __slots__ = ("_buries", "_dead_letters", "_latency", "route")

    def __init__(
        self,
        sink: Sink,
        route: Route,
        dead_letters: DeadLetters | None,
        recorder: Recorder | None = None,
        latency: Latency | None = None,
        *,
        buries: bool = True,
    ) -> None:
        """Create the recipient for a destination (`sink`) and the route that leads to it.

        Without `dead_letters` the source is informed of every rejection. `buries` is True if every message
        that the target rejects becomes a dead letter, whoever has published it. `recorder` writes settled
        messages to the journal. `latency` observes the seconds since messages were read. None turns either
        off.
        """
        super().__init__(sink, recorder)
        self.route = route
        self._dead_letters = dead_letters
        self._buries = buries
        self._latency = latency

    @property
    def mandatory(self) -> bool:
        """True if a message that the target's broker cannot route must be refused."""
        return self.route.mandatory

    @property
    def stored_first(self) -> bool:
        """True if the destination (sink) must store messages before it delivers them.

        True for routes that deduplicate, because they store the ids of messages. If a crash lost a message
        whose id is stored, the sender's second attempt would be dropped as a repeat.
        """
        return self.route.rule.deduplicate is not None

    def count_sent(self, count: int) -> None:
        """Count messages that were sent to the destination (sink)."""
        self.route.in_flight += count

    def settle(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Settle messages of `sub_batch` in their batch; count and record them in route and journal.

        `slots` are the positions of `messages` in the batch of `sub_batch`. A rejected message becomes a dead
        letter if the route requires that, and is accepted once the dead letter is on disk.
        """
        if self._recorder is not None:
            self._recorder.record(sub_batch, messages, slots, outcome)
        route = self.route
        route.in_flight -= len(messages)
        if outcome is ACCEPTED:
            route.delivered += len(messages)
            self.observe(sub_batch, len(messages))
        else:
            route.failed += len(messages)
        self.answer(sub_batch, messages, slots, outcome)

    def observe(self, sub_batch: SubBatch, count: int) -> None:
        """Measure how long `count` accepted messages of a sub-batch were on the way."""
        if self._latency is not None:
            self._latency.observe(clock.now() - sub_batch.batch.received, count)

    def answer(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Settle messages of `sub_batch`, and store dead letters of rejected messages where necessary.

        `slots` are the positions of `messages` in the batch of `sub_batch`. A rejected message becomes a dead
        letter if the route requires that, or if its source cannot be informed of the rejection. It is settled
        when the dead letter is stored.
        """
        batch, letters = sub_batch.batch, self._dead_letters
        if outcome.verdict is Verdict.REJECTED:
            log_rejected(self.route, outcome)
            if letters is not None and not batch.has_dead_letters:
                receipts, route = batch.receipts, self.route
                if self._buries:
                    buried, slots = slots, []
                else:
                    untold = [cannot_notify_source(batch, receipts[slot], route, outcome) for slot in slots]
                    messages = [message for message, kept in zip(messages, untold, strict=True) if kept]
                    buried = [slot for slot, kept in zip(slots, untold, strict=True) if kept]
                    slots = [slot for slot, kept in zip(slots, untold, strict=True) if not kept]
                self._store_dead_letters(letters, batch, messages, buried, outcome)
        if slots:
            settle_at_route(batch, slots, self.route, outcome)

    def _store_dead_letters(
        self,
        letters: DeadLetters,
        batch: Batch,
        messages: list[Message],
        slots: list[int],
        outcome: Outcome,
    ) -> None:
        """Store messages as dead letters, and settle them when they are stored or if there is no space.

        `slots` are the positions of `messages` in the batch.
        """
        if messages and letters.has_room_for(messages):
            settle, full = partial(batch.settle, slots), partial(settle_at_route, batch, slots, self.route)
            letters.add(messages, self.route.name, outcome, settle, crossed=True, full=full)
            return
        for message, slot in zip(messages, slots, strict=True):
            settle, full = partial(batch.settle, [slot]), partial(settle_at_route, batch, [slot], self.route)
            letters.add([message], self.route.name, outcome, settle, crossed=True, full=full)


class StagedRecipient(RouteRecipient):
    """Recipient for a stage in front of a route's target: duplicate check, pause or outbox.

    Messages count as sent by the route only when they leave the stage.
    """

    __slots__ = ()

    def count_sent(self, count: int) -> None:
        """Do nothing: the messages are not sent to the target yet."""

    def settle(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Settle messages of `sub_batch`, and record in the journal those that an outbox has accepted.

        `slots` are the positions of `messages` in the batch of `sub_batch`.
        """
        if self.route.settle == "stored" and outcome is ACCEPTED:
            self.observe(sub_batch, len(messages))
        if self._recorder is not None and self.route.settle == "stored":
            self._recorder.record(
                sub_batch, messages, slots, outcome._replace(text=outcome.text or WAS_STORED)
            )
        self.answer(sub_batch, messages, slots, outcome)


def _always() -> bool:
    return True


class DispatcherServices(NamedTuple):
    """Objects that a dispatcher works with.

    `links` are the endpoints that are remote brokers; `namespaces` has the local endpoints. `outbox` returns
    the outbox of a route with `settle: stored`; None if there are no outboxes. `pauses` has the paused
    routes. `disk_healthy` returns True if the store accepts messages, or if there is none. `memory` pauses
    publishers while memory is short. `quotas` has the per-user limits.
    """

    deduplication: Deduplication | None = None
    links: Collection[str] = ()
    namespaces: dict[str, Namespace] | None = None
    outbox: Callable[[Route], Namespace | None] | None = None
    pauses: Pauses | None = None
    disk_healthy: Callable[[], bool] = _always
    memory: Memory | None = None
    quotas: UserQuotas | None = None


ALONE: Final = DispatcherServices()


class Dispatcher:
    """Dispatcher of published messages to the namespaces of all endpoints, along the routes in force.

    `requesters` has a function for each listener that maps the reply address of one of its clients to the
    address at which that client receives replies.
    """

    def __init__(
        self, router: Router, dead_letters: DeadLetters, surroundings: DispatcherServices = ALONE
    ) -> None:
        namespaces, pauses = surroundings.namespaces, surroundings.pauses
        self.router = router
        self.dead_letters = dead_letters
        self.deduplication = surroundings.deduplication or Deduplication()
        self.echoes = EchoDetector()
        self.generation = 0
        self.namespaces: dict[str, Namespace] = {} if namespaces is None else namespaces
        self.links = surroundings.links
        self.requesters: dict[str, AddressOf] = {}
        self.shared_outboxes: set[str] = set()  # links whose outboxes are on the cluster
        self._confirmed_later: set[str] = set()  # endpoints whose namespace is on the cluster
        self.disk_healthy = surroundings.disk_healthy
        self.memory = surroundings.memory or unlimited_memory()
        self.quotas = surroundings.quotas or UserQuotas(Limits(user_share=1.0))
        self.pauses = Pauses(None) if pauses is None else pauses
        self.taps = Taps(self.invalidate)
        self.selection: SelectionWork = UNBOUNDED  # of the local subscriptions with a selector
        self._outbox = surroundings.outbox
        self._recipients: dict[tuple[Sink, str], Recipient] = {}
        self._guards: dict[str, Guard] = {}
        self._first_namespaces: dict[Route, Namespace | None] = {}
        self._unsubscribed_routes: dict[Route, bool] = {}
        self._plans: dict[tuple[object, ...], RoutingPlan] = {}  # by what determines them
        self.latencies: dict[str, Latency] = {}  # by the names of routes in force
        self._logged: set[tuple[str, object]] = set()  # of this pass of the event loop, logged
        self._logged_at = 0.0
        # Of the latest changes, if nothing else changed.
        self._filters: deque[list[str]] = deque(maxlen=FILTERS_MAX)

    def add_endpoint(self, endpoint: str, namespace: Namespace, requester: AddressOf | None = None) -> None:
        """Add an endpoint with its namespace.

        `requester` maps the reply address of one of its clients to the address at which that client receives
        replies; None if the endpoint has no replies.
        """
        self.namespaces[endpoint] = namespace
        if getattr(namespace, "confirms_later", False):
            self._confirmed_later.add(endpoint)
        if requester is not None:
            self.requesters[endpoint] = requester
        self.invalidate()

    def batch(self, source: Source, received: Monotonic) -> Batch:
        """Return a new batch for messages that `source` publishes.

        `received` is the time in loop-clock seconds at which the source has read them.
        """
        return Batch(source, received)

    def invalidate(self) -> None:
        """Invalidate all cached routing entries, because the recipients of addresses may have changed."""
        self._filters.clear()
        self._clear_caches()

    def _clear_caches(self) -> None:
        self.generation += 1
        self._recipients.clear()
        self._guards.clear()
        self._first_namespaces.clear()
        self._unsubscribed_routes.clear()
        self._plans.clear()

    def invalidate_filter(self, pattern: list[str]) -> None:
        """Invalidate the routing entries of MQTT topics that match a filter, and no others.

        `pattern` has the levels of the filter.
        """
        self._filters.append(pattern)
        self._clear_caches()

    def filters_since(self, generation: int) -> list[list[str]] | None:
        """Return the filters that were passed to `invalidate_filter` after generation number `generation`.

        Returns None if `invalidate` was called since then, so that all entries are invalid.
        """
        count = self.generation - generation
        return None if count > len(self._filters) else list(self._filters)[len(self._filters) - count :]

    def use(self, router: Router) -> None:
        """Put the mapping of `router` in force."""
        self.router = router
        names = {route.name for route in (*router.routes, *router.answers)}
        self.latencies = {name: latency for name, latency in self.latencies.items() if name in names}
        self.invalidate()

    def entry(
        self, endpoint: str, namespace: Namespace | None, address: Address, queue: str = ""
    ) -> RoutingEntry:
        """Return a new routing entry for messages that `endpoint` receives for `address`.

        `namespace` is that of the endpoint. It is None for a link: messages from its broker only take routes,
        and go to no subscriber of the endpoint itself. `queue` is the queue from which the link has consumed
        the messages, if a route names it. An error of the routing becomes part of the entry, and the outcome
        of each message.
        """
        try:
            return self._entry(endpoint, namespace, address, queue)
        except Exception as error:
            return RoutingEntry(address, RoutingPlan(FailedRouting(error), None))

    def _entry(
        self, endpoint: str, namespace: Namespace | None, address: Address, queue: str
    ) -> RoutingEntry:
        """Return a new routing entry for messages that `endpoint` receives for `address`.

        The parameters are those of `entry`, which calls this method. Errors while the routes are resolved are
        raised; `entry` turns them into an entry that fails each message.
        """
        if endpoint not in self.links and self.router.is_return(address):
            return self._answer_entry(endpoint, address)
        sinks = () if namespace is None else namespace.sinks(address)
        resolved_routes: list[ResolvedRoute] = []
        ends: list[tuple[Sink, ...] | None] = []
        decided: list[object] = [endpoint, namespace, sinks]
        for resolved in self.router.resolve(endpoint, address, queue, self._has_no_receivers):
            route = resolved.route
            if (
                isinstance(resolved, RefusedRoute)
                and not address.name
                and route.target_endpoint not in self.links
            ):
                continue  # no client can request a name that is empty there
            if resolved is route.unsubscribed:
                decided.append(resolved)
                ends.append(())
            else:
                target = self._first_namespace(route)
                if target is None:
                    continue
                end = None if resolved.target is None else target.sinks(resolved.target)
                decided += (route, type(resolved), end)
                ends.append(end)
            resolved_routes.append(resolved)
        made = tuple(resolved_routes)
        key = tuple(decided)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, endpoint, namespace, sinks, made, ends)
        return RoutingEntry(address, plan, plan.resolved_routes or made)

    def _plan(
        self,
        key: tuple[object, ...],
        endpoint: str,
        namespace: Namespace | None,
        sinks: tuple[Sink, ...] | None,
        resolved_routes: tuple[ResolvedRoute, ...],
        ends: Sequence[tuple[Sink, ...] | None],
    ) -> RoutingPlan:
        """Create the routing plan for addresses with these sinks and routes, and cache it.

        `key` is its key in the cache. `sinks` are those in the namespace of the endpoint; None if they depend
        on the message. `ends` has the sinks to which each of `resolved_routes` leads, None if they depend on
        the message.
        """
        recipients = (
            None if sinks is None else tuple([self._recipient(sink, None, endpoint) for sink in sinks])
        )
        branches = []
        for resolved, end in zip(resolved_routes, ends, strict=True):
            route = resolved.route
            target = self._first_namespace(route)
            assert target is not None, "the branch has been taken"
            found = None if end is None else tuple([self._recipient(sink, route) for sink in end])
            branches.append(Branch(route, target, found))
        make_room(self._plans, PLANS_MAX)
        plan = self._plans[key] = RoutingPlan(namespace, recipients, tuple(branches), resolved_routes)
        return plan

    def _has_no_receivers(self, route: Route) -> bool:
        """Return True if no client can receive messages in the target scope of a route.

        The route must have a constant target scope (exchange or service). The result is cached.
        """
        has_no_receivers = self._unsubscribed_routes.get(route)
        if has_no_receivers is None:
            assert route.short is not None
            target = self._first_namespace(route)
            nobody_at = getattr(target, "has_no_receivers", None)  # not every namespace has this method
            has_no_receivers = target is not None and nobody_at is not None and nobody_at(route.short.scope)
            if has_no_receivers and target is not None:
                has_no_receivers = Branch(route, target, ()).idle
            self._unsubscribed_routes[route] = has_no_receivers
        return has_no_receivers

    def _answer_entry(self, endpoint: str, address: Address) -> AnswerEntry:
        """Return the routing entry of a return address, which leads to the requester's own address."""
        found = self.router.requester(address)
        if found is None:
            return AnswerEntry(address, "unknown", None)
        route = self.router.answer_route(endpoint, found.endpoint)
        namespace = self.namespaces.get(found.endpoint)
        if route is None or namespace is None:
            return AnswerEntry(address, "no_route", found)
        there = self._address_of(found)
        if there is None:
            return AnswerEntry(address, "gone", found)
        resolved = answer_to(route, there, self.router.hops_max, coded=found.coded)
        ends = namespace.sinks(there)
        recipients = None if ends is None else tuple(self._recipient(sink, route) for sink in ends)
        resolved_routes = (resolved,)
        plan = RoutingPlan(None, (), (Branch(route, namespace, recipients),), resolved_routes)
        return AnswerEntry(address, "gone", found, plan, resolved_routes)

    def _address_of(self, requester: Return) -> Address | None:
        find = self.requesters.get(requester.endpoint)
        return None if find is None else find(requester.text)

    def requester_of(self, address: Address) -> tuple[str, Address] | None:
        """Return endpoint and address of the requester behind a return address, or None if there is none.

        Used to check whether the publisher of an answer may publish to that address.
        """
        found = self.router.requester(address)
        there = None if found is None else self._address_of(found)
        return None if found is None or there is None else (found.endpoint, there)

    def end(self, route: Route) -> Namespace | None:
        """Return the namespace at a route's end: that of its endpoint, or its outbox.

        If the route is paused and has no outbox, return the gate (PauseGate) in which messages wait. Returns
        None if this gateway does not have the endpoint.
        """
        end = self._final_namespace(route)
        pauses = self.pauses
        if end is None or self.uses_outbox(route) or not (pauses.routes or pauses.gates):
            return end
        gate = pauses.gates.get(route.name)
        if gate is None and route.name in pauses.routes:
            gate = pauses.gates[route.name] = PauseGate(
                route, self._recipients_after_pause, _when_unrouted, self.quotas
            )
        return end if gate is None else gate

    def _final_namespace(self, route: Route) -> Namespace | None:
        if self._outbox is not None and route.settle == "stored":
            return self._outbox(route)
        return self.namespaces.get(route.target_endpoint)

    def _recipients_after_pause(self, route: Route, message: Message) -> tuple[Recipient, ...]:
        if protocol_mismatch(route, message) is not None:
            return (RouteRecipient(MISMATCH_SINK, route, self.dead_letters),)
        end = self._final_namespace(route)
        return () if end is None else self._target_recipients(end, route, message)[0]

    def uses_outbox(self, route: Route) -> bool:
        """Return True if the route leads to an outbox."""
        return route.settle == "stored" and self._outbox is not None

    def is_staged(self, route: Route, sink: Sink) -> bool:
        """Return True if `sink` is a stage in front of the route's target, and not the target itself.

        Stages are outboxes, duplicate checks and pauses. A message counts as sent by the route when it leaves
        the stage.
        """
        return self.uses_outbox(route) or sink is self._guards.get(route.name) or type(sink) is PauseGate

    def _first_namespace(self, route: Route) -> Namespace | None:
        """Return the namespace that a route's messages enter first: its duplicate check, or else its end.

        The result is cached by route until routing changes, because it is the same for all addresses.
        """
        try:
            return self._first_namespaces[route]
        except KeyError:
            found = self._first_namespaces[route] = self._guarded_end(route)
            return found

    def _guarded_end(self, route: Route) -> Namespace | None:
        end = self.end(route)
        if end is None or route.rule.deduplicate is None:
            return end
        guard = self._guards.get(route.name)
        if guard is None:
            behind = partial(self._target_recipients, end, route)
            guarded = RouteEnd(
                *(route, behind, self._is_local(route), _when_unrouted(route)),
                *(self.accepts_in_memory, self.postponed_count),
            )
            guard = self._guards[route.name] = self.deduplication.guard(guarded)
        return guard

    def delivers_locally(self, route: Route) -> bool:
        """Return True if the route's target gets each message in the event-loop pass in which it arrives.

        The message is then in memory at once, or stored by the transaction of that pass. Returns False for a
        remote broker or database, which must confirm, and for a paused route. A local subscription that
        postpones the evaluation of its selector to a later pass is an exception; the caller detects it
        because `postponed_count` has changed.
        """
        claims = route.rule.deduplicate is not None and self.deduplication.is_shared
        return not claims and self._is_local(route)

    def _is_local(self, route: Route) -> bool:
        """Return True if a route's target accepts each message in the pass of the event loop that brings it.

        The message is then in memory, or is stored by the transaction of that pass. Returns False for links
        and paused routes. The result concerns the target alone: a duplicate check (`deduplicate`) in front of
        it does not change the result.
        """
        if route.settle == "stored":
            return route.target_endpoint not in self.shared_outboxes
        gated = route.name in self.pauses.routes or route.name in self.pauses.gates
        remote = route.target_endpoint in self.links or route.target_endpoint in self._confirmed_later
        return not gated and not remote

    def limit_selectors(self, alarms: CallScheduler) -> SelectionWork:
        """Create and return the time budget of the selectors of local subscriptions.

        `alarms` schedules the evaluation of selectors that were postponed to a later pass of the event loop.
        """
        self.selection = SelectionWork(alarms)
        return self.selection

    def postponed_count(self) -> int:
        """Return how often subscriptions left messages to a later pass, as selectors had used up their time.

        A subscription has neither queued nor stored a message that it has postponed.
        """
        return self.selection.postponed_count

    def accepts_in_memory(self) -> bool:
        """Return True while a resumed route sends its waiting messages, or selectors examine postponed ones.

        A message that a target accepts at once during that time is in memory only.
        """
        return self.pauses.is_releasing() or self.selection.is_selecting

    def _target_recipients(
        self, end: Namespace, route: Route, message: Message
    ) -> tuple[tuple[Recipient, ...], bool]:
        """Return a message's recipients at a route's end, and True if its address alone determines them."""
        fixed_sinks = end.sinks(message.address)
        sinks = end.choose(message) if fixed_sinks is None else fixed_sinks
        recipients = [self._recipient(sink, route) for sink in sinks]
        retaining = self._retaining(end, message)
        return (*recipients, *retaining), fixed_sinks is not None and not retaining

    def _retaining(self, namespace: Namespace, message: Message, endpoint: str = "") -> list[Recipient]:
        """Return the recipient that stores a retained message, in a list.

        Returns [] if the message is not to be retained, or the namespace retains none. `endpoint` is where
        the message was published.
        """
        if not message.retain or namespace.retained is None:
            return []
        return [self._recipient(namespace.retained, None, endpoint)]

    def publish(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """Add a message to the batch for each of its recipients.

        Return False if there is none; then the caller reports the outcome to the publisher.
        """
        plan = entry.plan
        recipient = plan.only_recipient
        if recipient is None or message.retain:
            return self._publish_all(batch, entry, message, receipt)
        asks = message.property_set.has_reply_to
        if plan.idle:
            if asks or message.hops >= plan.idle_hops_max:
                for at in plan.idle:
                    if not entry.resolved_routes[at].will_cross(message):
                        return self._publish_all(batch, entry, message, receipt)
            for idle in plan.idle_routes:
                idle.matched += 1
        route = plan.route
        if route is None:
            batch.add_only(receipt, recipient, message)
            return True
        target = None if asks and plan.bare else entry.target
        if target is not None and message.hops < plan.hops_max:
            route.matched += 1
            crossed = message.with_crossing(target)
            property_set = message.property_set
            if property_set is not NO_PROPERTIES and route.changes_protocol:
                last = route.last_losses
                if property_set is not last.property_set or crossed.hops != last.hops or last.losses:
                    # Its receiver needs the converted properties, too.
                    self._note_losses(batch, route, crossed)
            batch.add_only(receipt, recipient, crossed)
            return True
        return self._publish_across(batch, entry, recipient, message, receipt)

    def publish_large(
        self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt, bytes_max: int
    ) -> bool:
        """Publish a message whose body may be on disk and too large for routes.

        Queues of the endpoint where it is published keep the body on disk. Recipients behind a route get the
        body in memory, or refuse the message if it has more than `bytes_max` bytes.
        """
        everybody = entry.for_large_body(bytes_max, retained=message.retain)
        return self.publish(batch, everybody, message, receipt)

    def publish_burst(
        self, batch: Batch, entry: RoutingEntry, messages: list[Message], receipts: list[Receipt]
    ) -> bool:
        """Publish messages that differ only in their bodies.

        Returns False if they must be published one by one, because they have no or several recipients, or
        because more than their address changes.
        """
        plan = entry.plan
        first, route, recipient = messages[0], plan.route, plan.only_recipient
        asks = first.property_set.has_reply_to
        target = entry.address if route is None else None if asks and plan.bare else entry.target
        if (
            recipient is None
            or first.retain
            or target is None
            or (route is not None and first.hops >= plan.hops_max)
            or (plan.idle and (asks or first.hops >= plan.idle_hops_max))
        ):
            return False
        for idle in plan.idle_routes:
            idle.matched += len(messages)
        if route is not None:
            route.matched += len(messages)
            count = len(messages)
            messages = first.crossed_with(messages, target)
            if first.property_set is not NO_PROPERTIES and route.changes_protocol:
                self._note_losses(batch, route, messages[0], count)
        batch.add_burst(receipts, recipient, messages)
        return True

    def _publish_across(
        self, batch: Batch, entry: RoutingEntry, recipient: Recipient, message: Message, receipt: Receipt
    ) -> bool:
        """Publish a message by its only route, which changes more than the address.

        Return False if the message has no recipient; then the caller reports the outcome to the publisher.
        """
        place = entry.plan.branch_at
        branch = entry.plan.branches[place]
        try:
            crossed = entry.resolved_routes[place].cross(message)
        except Exception as error:
            crossed = _error_outcome(branch.route, error)
        if type(crossed) is Message and not crossed.retain:
            if crossed.property_set is not NO_PROPERTIES and branch.route.changes_protocol:
                self._note_losses(batch, branch.route, crossed)
            batch.add_only(receipt, recipient, crossed)
            return True
        if crossed is None:
            return False
        placed: list[tuple[Recipient, Message]] = []
        refused: list[tuple[Route, Outcome]] = []
        self._place_crossed(batch, branch, crossed, placed, refused)
        return self._place(batch, receipt, message, placed, refused)

    def _publish_all(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """Publish a message to all recipients and routes of its entry. Return False if there are none."""
        placed: list[tuple[Recipient, Message]] = []
        refused: list[tuple[Route, Outcome]] = []
        plan = entry.plan
        namespace = plan.namespace
        recipients = plan.recipients
        if recipients is None:
            assert namespace is not None
            endpoint = message.sender.endpoint
            try:
                recipients = tuple(
                    self._recipient(sink, None, endpoint) for sink in namespace.choose(message)
                )
            except ProtocolError:  # its sender wrote malformed properties, and is informed
                raise
            except Exception as error:
                contained("message", error, endpoint=endpoint)
                settle = partial(batch.settle, [batch.open(receipt, 1)])
                self.record_unrouted(entry, message, INTERNAL, batch.received)
                self.dead_letters.add([message], "", INTERNAL, settle, full=settle)
                return True
        for recipient in recipients:
            placed.append((recipient, message))
        if namespace is not None:
            endpoint = message.sender.endpoint
            placed += [(recipient, message) for recipient in self._retaining(namespace, message, endpoint)]
        for resolved, branch in zip(entry.resolved_routes, plan.branches, strict=True):
            try:
                crossed = resolved.cross(message)
            except Exception as error:
                crossed = _error_outcome(branch.route, error)
            if crossed is not None:
                self._place_crossed(batch, branch, crossed, placed, refused)
        return self._place(batch, receipt, message, placed, refused)

    def _place_crossed(
        self,
        batch: Batch,
        branch: Branch,
        crossed: Message | Outcome,
        placed: list[tuple[Recipient, Message]],
        refused: list[tuple[Route, Outcome]],
    ) -> None:
        """Add (recipient, message) to `placed` for each recipient of a message that has crossed a route.

        `crossed` is the message as the route has built it. If the route refused the message, `crossed` is the
        outcome, and (route, outcome) is added to `refused`.
        """
        route = branch.route
        if isinstance(crossed, Outcome):
            refused.append((route, crossed))
            return
        if crossed.property_set is not NO_PROPERTIES and route.changes_protocol and not branch.idle:
            self._note_losses(batch, route, crossed)
        ends = branch.recipients
        if ends is None:
            try:
                sinks = sinks_of(branch.namespace, crossed)
                ends = tuple([self._recipient(sink, route) for sink in sinks])
            except Exception as error:
                refused.append((route, outcome_of_error(error, route=route.name)))
                return
        if not ends and branch.mandatory:
            route.failed += 1
            refused.append((route, UNROUTED))
        ends = (*ends, *self._retaining(branch.namespace, crossed))
        placed += [(recipient, crossed) for recipient in ends]

    def _place(
        self,
        batch: Batch,
        receipt: Receipt,
        message: Message,
        placed: list[tuple[Recipient, Message]],
        refused: list[tuple[Route, Outcome]],
    ) -> bool:
        if not placed and not refused:
            return False
        slot = batch.add(receipt, placed, len(refused))
        for route, outcome in refused:
            self._refused(batch, slot, route, message, outcome)
            self._log_rejection_once(batch, route, outcome)
            if (
                outcome.verdict is Verdict.REJECTED
                and not batch.has_dead_letters
                and not isinstance(message.body, Spooled)
                and (
                    self._dead_letters_rejected(route) or cannot_notify_source(batch, receipt, route, outcome)
                )
            ):
                settle, full = partial(batch.settle, [slot]), partial(settle_at_route, batch, [slot], route)
                self.dead_letters.add([message], route.name, outcome, settle, full=full)
            else:
                settle_at_route(batch, [slot], route, outcome)
        return True

    def _recipient(self, sink: Sink, route: Route | None, endpoint: str = "") -> Recipient:
        """Return the recipient for a destination (`sink`) and a route, created on first use.

        Without a route, `endpoint` is where its messages are published.
        """
        key = (sink, "" if route is None else route.name)
        recipient = self._recipients.get(key)
        if recipient is None:
            recorder = self._recorder(route, endpoint)
            if self.taps.open:
                recorder = self.taps.recorder(recorder, route, endpoint)
            if route is None:
                recipient = Recipient(sink, recorder)
            else:
                kind = StagedRecipient if self.is_staged(route, sink) else RouteRecipient
                latency = self.latencies.setdefault(route.name, Latency())
                recipient = kind(
                    sink,
                    route,
                    self.dead_letters,
                    recorder,
                    latency,
                    buries=self._dead_letters_rejected(route),
                )
            self._recipients[key] = recipient
        return recipient

    def _dead_letters_rejected(self, route: Route) -> bool:
        """Return True if every message that the route's target rejects becomes a dead letter."""
        if route.on_reject is None:
            return route.source in self.links
        return route.on_reject == "dead_letter"

    def _log_rejection_once(self, batch: Batch, route: Route, outcome: Outcome) -> None:
        """Log a rejection, at most once in a pass of the event loop for each route and reason."""
        if self._is_new(batch, (route.name, outcome.reason)):
            log_rejected(route, outcome)

    def _note_losses(self, batch: Batch, route: Route, message: Message, count: int = 1) -> None:
        """Count and log the properties of a message that the target's protocol cannot carry.

        `count` is the number of messages that have the same properties; each is counted.
        """
        try:
            names = route.losses(message, count)
        except ProtocolError:  # malformed bytes, which the encoding step reports
            return
        except Exception as error:  # the message itself is unaffected
            contained("message", error, route=route.name)
            return
        if names and self._is_new(batch, (route.name, names)):
            log.info(
                "message properties lost, unsupported by target protocol",
                route=route.name,
                client=message.sender.client,
                properties=", ".join(names),
            )

    def _is_new(self, batch: Batch, key: tuple[str, object]) -> bool:
        """Return True the first time that `key` is used in a pass of the event loop, to limit log lines.

        A log line costs more time than a message.
        """
        if batch.received != self._logged_at:
            self._logged_at = batch.received
            self._logged.clear()
        if key in self._logged:
            return False
        self._logged.add(key)
        return True

    # Overridden to record what crosses.

    def _recorder(self, route: Route | None, endpoint: str) -> Recorder | None:
        """Return the journal's recorder for a recipient; None here, because this class records nothing.

        Without a route, `endpoint` is where its messages are published.
        """
        return None

    def _refused(self, batch: Batch, slot: int, route: Route, message: Message, outcome: Outcome) -> None:
        """Record that a route refused the message at the position `slot` of the batch.

        This class does nothing; overridden to write to the journal.
        """

    def record_unrouted(
        self, entry: RoutingEntry, message: Message, outcome: Outcome, received: Monotonic
    ) -> None:
        """Record the outcome of a message that has no target.

        This class does nothing; overridden to write to the journal. `publish` returned False for the message,
        or was not called. `received` is its time of arrival in loop-clock seconds.
        """


def log_rejected(route: Route, outcome: Outcome) -> None:
    """Log that a route's target rejected a message.

    The number of log lines is limited; metrics count all rejected messages.
    """
    log.warning(
        "message rejected by route target",
        route=route.name,
        endpoint=route.target_endpoint,
        reason=outcome.reason.value,
        why=outcome.text,
    )


def log_reply_kept(route: Route, message: Message) -> None:
    """Log that a message's reply address stays unchanged, because replies cannot be returned through it.

    The caller limits the number of log lines.
    """
    log.warning(
        "reply address not translatable by route, forwarded unchanged",
        route=route.name,
        client=message.sender.client,
        remote=message.sender.address,
        reply_to=message.properties.reply_to,
        reason="reply_kept",
        why=route.reply_kept_reason,
    )


def settle_at_route(batch: Batch, slots: list[int], route: Route, outcome: Outcome) -> None:
    """Settle the messages in `slots` of a batch with `outcome`, and record that `route` is responsible.

    `outcome` is the result at the target of `route`; a refusal is returned to the source with the route's
    name.
    """
    if outcome.verdict is Verdict.RELEASED:
        batch.returned_by(slots, route.name)
    elif outcome.verdict is Verdict.REJECTED:
        batch.rejected_by(slots, route.name)
    batch.settle(slots, outcome)


def cannot_notify_source(batch: Batch, receipt: Receipt, route: Route, outcome: Outcome) -> bool:
    """Return True if the sender of a message cannot be informed that `route` rejects the message.

    `receipt` is what the source of `batch` needs to acknowledge the message.
    """
    return batch.cannot_notify is not None and batch.cannot_notify(
        receipt, route.on_reject == "retry", outcome
    )


def _error_outcome(route: Route, error: Exception) -> Outcome:
    """Return the outcome of a message for which `route` raised `error`, and count the failure."""
    route.failed += 1
    return outcome_of_error(error, route=route.name)


def _when_unrouted(route: Route) -> Outcome:
    return UNROUTED if is_mandatory(route) else ACCEPTED

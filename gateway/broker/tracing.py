"""Tracing of messages, in dispatcher classes of their own, which are not used when tracing is off.

The entry of a traced message is rebuilt with resolved routes that report to its trace. All other messages are
dispatched as without tracing, after one check of their properties and one count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import ALONE, Dispatcher, DispatcherServices
from gateway.broker.journal import JournalRecorder, RecordingDispatcher
from gateway.broker.routing import RoutingEntry, RoutingPlan
from gateway.containment import contained
from gateway.mapping.router import Router
from gateway.mapping.routes import ResolvedRoute, Route
from gateway.model.batch import Batch, Receipt, Recorder, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.properties import NO_PROPERTIES

if TYPE_CHECKING:  # OpenTelemetry need not be installed
    from gateway.telemetry.tracing import MessageTrace, Tracing

Publish = Callable[[Batch, RoutingEntry, Message, Receipt], bool]


class TracedRoute(ResolvedRoute):
    """Resolved route for one traced message, which adds the crossing of the route to the message's trace."""

    __slots__ = ("_inner", "_trace")

    def __init__(self, inner: ResolvedRoute, trace: MessageTrace) -> None:
        super().__init__(inner.route, inner.target)
        self._inner = inner
        self._trace = trace

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return what the inner route returns, and add the crossing to the message's trace."""
        begun = self._trace.now_ns()
        crossed = self._inner.cross(message)
        if crossed is None:
            return None
        route = self.route
        try:
            return self._trace.record_crossing(route.name, route.target_endpoint, begun, crossed)
        except Exception as error:  # the message crosses nevertheless
            contained("message", error, route=route.name)
            return crossed


class TracedRecorder:
    """Recorder that reports settled messages to their traces."""

    def __init__(self, inner: Recorder | None, tracing: Tracing) -> None:
        self._inner = inner
        self._delivering = tracing.delivering

    def record(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Report messages that were settled with `outcome` to their traces, and to the inner recorder.

        `sub_batch`, `messages` and `slots` are those of Recorder.record. Never raises.
        """
        if self._inner is not None:
            self._inner.record(sub_batch, messages, slots, outcome)
        if not self._delivering:
            return
        for message in messages:
            trace = self._delivering.get(id(message))
            if trace is not None:
                try:
                    trace.delivered(message, outcome)
                except Exception as error:
                    contained("message", error)


def _publish(
    tracing: Tracing,
    plain: Publish,
    batch: Batch,
    entry: RoutingEntry,
    message: Message,
    receipt: Receipt,
) -> bool:
    """Publish a message with the function `plain`, with a trace if the message is selected for tracing."""
    carried = message.property_set is not NO_PROPERTIES and tracing.may_carry_context(message.property_set)
    if not carried:
        tracing.countdown -= 1
        if tracing.countdown > 0:
            return plain(batch, entry, message, receipt)
    try:
        trace = tracing.begin(message, batch.received)
    except Exception as error:  # the message is published without a trace
        contained("message", error)
        trace = None
    if trace is None:
        return plain(batch, entry, message, receipt)
    return _publish_traced(plain, trace, batch, entry, message, receipt)


def _are_untraced(tracing: Tracing, messages: list[Message]) -> bool:
    """Return True if none of these messages is selected for tracing, so that they can be one burst.

    All of them must have the same properties. If True, they count for the choice of the next traced message.
    """
    shared = messages[0].property_set
    if tracing.countdown <= len(messages) or (
        shared is not NO_PROPERTIES and tracing.may_carry_context(shared)
    ):
        return False
    tracing.countdown -= len(messages)
    return True


def _publish_traced(
    publish: Publish,
    trace: MessageTrace,
    batch: Batch,
    entry: RoutingEntry,
    message: Message,
    receipt: Receipt,
) -> bool:
    """Publish a message with a copy of its entry whose routes report to its trace.

    Return False if it has no recipients.
    """
    plan = entry.plan
    resolved_routes = tuple(
        [
            resolved if branch.idle and not message.retain else TracedRoute(resolved, trace)
            for resolved, branch in zip(entry.resolved_routes, plan.branches, strict=True)
        ]
    )
    # No branch of it is plain.
    every = RoutingPlan(plan.namespace, plan.recipients, plan.branches, resolved_routes)
    whole = RoutingEntry(entry.address, every, resolved_routes)
    slot = len(batch)
    batch.watch(slot, trace)
    accepted = False
    try:
        accepted = publish(batch, whole, message, receipt)
    finally:
        if not accepted:
            batch.unwatch(slot)
            trace.record_unreceived()
    return accepted


class TracingDispatcher(Dispatcher):
    """Dispatcher that traces the messages that are selected for tracing."""

    def __init__(
        self,
        router: Router,
        dead_letters: DeadLetters,
        surroundings: DispatcherServices = ALONE,
        *,
        tracing: Tracing,
    ) -> None:
        super().__init__(router, dead_letters, surroundings)
        self._tracing = tracing
        self._plain: Publish = partial(Dispatcher.publish, self)

    def publish(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """Publish a message, with a trace if it is selected for tracing.

        Return False if it has no recipients.
        """
        return _publish(self._tracing, self._plain, batch, entry, message, receipt)

    def publish_burst(
        self, batch: Batch, entry: RoutingEntry, messages: list[Message], receipts: list[Receipt]
    ) -> bool:
        """Publish messages that differ only in their bodies.

        Returns False if they must be published one by one, for example because one is traced.
        """
        together = _are_untraced(self._tracing, messages)
        return together and Dispatcher.publish_burst(self, batch, entry, messages, receipts)

    def _recorder(self, route: Route | None, endpoint: str) -> Recorder | None:
        found = Dispatcher._recorder(self, route, endpoint)
        return found if route is None else TracedRecorder(found, self._tracing)


class TracingRecordingDispatcher(RecordingDispatcher):
    """Dispatcher with tracing and a journal.

    A compiled class has one base, so the methods of TracingDispatcher are repeated here.
    """

    def __init__(
        self,
        router: Router,
        dead_letters: DeadLetters,
        surroundings: DispatcherServices = ALONE,
        *,
        tracing: Tracing,
        journaling: JournalRecorder,
    ) -> None:
        super().__init__(router, dead_letters, surroundings, journaling=journaling)
        self._tracing = tracing
        self._plain: Publish = partial(RecordingDispatcher.publish, self)

    def publish(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """Publish a message, with a trace if it is selected for tracing.

        Return False if it has no recipients.
        """
        return _publish(self._tracing, self._plain, batch, entry, message, receipt)

    def publish_burst(
        self, batch: Batch, entry: RoutingEntry, messages: list[Message], receipts: list[Receipt]
    ) -> bool:
        """Publish messages that differ only in their bodies.

        Returns False if they must be published one by one, for example because one is traced.
        """
        together = _are_untraced(self._tracing, messages)
        return together and RecordingDispatcher.publish_burst(self, batch, entry, messages, receipts)

    def _recorder(self, route: Route | None, endpoint: str) -> Recorder | None:
        found = RecordingDispatcher._recorder(self, route, endpoint)
        return found if route is None else TracedRecorder(found, self._tracing)

"""Messages that are traced take their way in a dispatcher of its own kind; nothing of this is there when
tracing is off.

Of one that is traced the entry is made anew, with resolved routes that tell its trace what they do. All
others go as they do without tracing, after one look at their properties and one count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import ALONE, Dispatcher, Surroundings
from gateway.broker.journaling import Journaling, RecordingDispatcher
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
    """A resolved route, for one message, which tells its trace what became of it here."""

    __slots__ = ("_inner", "_trace")

    def __init__(self, inner: ResolvedRoute, trace: MessageTrace) -> None:
        super().__init__(inner.route, inner.target)
        self._inner = inner
        self._trace = trace

    def cross(self, message: Message) -> Message | Outcome | None:
        begun = self._trace.now_ns()
        crossed = self._inner.cross(message)
        if crossed is None:
            return None
        route = self.route
        try:
            return self._trace.crossed(route.name, route.target_endpoint, begun, crossed)
        except Exception as error:  # it crosses all the same
            contained("message", error, route=route.name)
            return crossed


class TracedRecorder:
    """Tells the traces of messages that a recipient has settled them."""

    def __init__(self, inner: Recorder | None, tracing: Tracing) -> None:
        self._inner = inner
        self._delivering = tracing.delivering

    def record(self, part: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome) -> None:
        """See Recorder."""
        if self._inner is not None:
            self._inner.record(part, messages, slots, outcome)
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
    """Publish by `plain`, and have a trace hear of it if the message is to have one."""
    carried = message.property_set is not NO_PROPERTIES and tracing.carries(message.property_set)
    if not carried:
        tracing.until -= 1
        if tracing.until > 0:
            return plain(batch, entry, message, receipt)
    try:
        trace = tracing.begin(message, batch.received)
    except Exception as error:  # the message goes its way without
        contained("message", error)
        trace = None
    if trace is None:
        return plain(batch, entry, message, receipt)
    return _publish_traced(plain, trace, batch, entry, message, receipt)


def _go_together(tracing: Tracing, messages: list[Message]) -> bool:
    """Whether nobody traces any of these, which share their properties."""
    shared = messages[0].property_set
    if tracing.until <= len(messages) or (shared is not NO_PROPERTIES and tracing.carries(shared)):
        return False
    tracing.until -= len(messages)
    return True


def _publish_traced(
    publish: Publish,
    trace: MessageTrace,
    batch: Batch,
    entry: RoutingEntry,
    message: Message,
    receipt: Receipt,
) -> bool:
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
    taken = False
    try:
        taken = publish(batch, whole, message, receipt)
    finally:
        if not taken:
            batch.unwatch(slot)
            trace.unwanted()
    return taken


class TracingDispatcher(Dispatcher):
    """A dispatcher some of whose messages are traced."""

    def __init__(
        self,
        router: Router,
        dead_letters: DeadLetters,
        surroundings: Surroundings = ALONE,
        *,
        tracing: Tracing,
    ) -> None:
        super().__init__(router, dead_letters, surroundings)
        self._tracing = tracing
        self._plain: Publish = partial(Dispatcher.publish, self)

    def publish(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """As every dispatcher does, and traced if it is to be."""
        return _publish(self._tracing, self._plain, batch, entry, message, receipt)

    def publish_burst(
        self, batch: Batch, entry: RoutingEntry, messages: list[Message], receipts: list[Receipt]
    ) -> bool:
        """The same; those that somebody traces go one by one."""
        together = _go_together(self._tracing, messages)
        return together and Dispatcher.publish_burst(self, batch, entry, messages, receipts)

    def _recorder(self, route: Route | None, endpoint: str) -> Recorder | None:
        found = Dispatcher._recorder(self, route, endpoint)
        return found if route is None else TracedRecorder(found, self._tracing)


class TracingRecordingDispatcher(RecordingDispatcher):
    """The same with a journal. A compiled class has one base, so that its methods stand here once more."""

    def __init__(
        self,
        router: Router,
        dead_letters: DeadLetters,
        surroundings: Surroundings = ALONE,
        *,
        tracing: Tracing,
        journaling: Journaling,
    ) -> None:
        super().__init__(router, dead_letters, surroundings, journaling=journaling)
        self._tracing = tracing
        self._plain: Publish = partial(RecordingDispatcher.publish, self)

    def publish(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """See TracingDispatcher."""
        return _publish(self._tracing, self._plain, batch, entry, message, receipt)

    def publish_burst(
        self, batch: Batch, entry: RoutingEntry, messages: list[Message], receipts: list[Receipt]
    ) -> bool:
        """See TracingDispatcher."""
        together = _go_together(self._tracing, messages)
        return together and RecordingDispatcher.publish_burst(self, batch, entry, messages, receipts)

    def _recorder(self, route: Route | None, endpoint: str) -> Recorder | None:
        found = RecordingDispatcher._recorder(self, route, endpoint)
        return found if route is None else TracedRecorder(found, self._tracing)

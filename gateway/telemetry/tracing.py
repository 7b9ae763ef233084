"""Traces of messages, by OpenTelemetry's SDK. Imported only when tracing is on.

A traced message has the span `receive`, from reading it to acknowledging it to its source; the parent is the
context in the message, if it has one. Below it are, for each route that the message crosses, `route` (the
mapping) and `deliver` (until the route's target has settled it), and at the end `settle`, from the last
target's settlement to the acknowledgement. A message that crosses a route carries the context of its
`deliver` span, so that its consumer's spans are below that one; a message within its own protocol is not
changed.

Spans are created in the event loop, for as many messages per second as the settings allow, and sent by a
thread of the SDK with a bounded queue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway import chance, clock
from gateway.containment import contained
from gateway.errors import ProtocolError
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, worse_outcome
from gateway.model.properties import Properties, PropertySet, ValueType, property_set, string
from gateway.model.times import Monotonic
from gateway.telemetry.stats import Exemplar, Latency

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
NEVER_DUE: Final = 2**62
OPEN_MAX: Final = 1_000  # traced messages that are not settled yet; beyond it, the oldest is abandoned
SPANS_WAITING_MAX: Final = 4_096
ATTRIBUTE_MAX: Final = 256  # characters: peers may use names of 65 535 bytes, and many spans may wait
EXPORT_SECS: Final = 5.0
PROPAGATOR: Final = TraceContextTextMapPropagator()

LatencyOf = Callable[[str], Latency | None]


class Tracing:
    """Selection of the messages to trace, and export of their spans. Each process has one object.

    `counts` has the number of messages by the result of the selection. `countdown` is the number of messages
    without a trace context until the next one is traced; the caller of `begin` decrements it.
    """

    def __init__(
        self,
        exporter: SpanExporter | None = None,
        *,
        url: str | None = None,
        share: float = 0.0,
        messages_per_second_max: float = 100.0,
        service: str = "gateway",
        version: str = "",
        replica: str = "",
        latency_of_route: LatencyOf = lambda name: None,
        latency_of_endpoint: LatencyOf = lambda name: None,
    ) -> None:
        """Start the exporter of spans.

        Spans are sent by `exporter`, or by OTLP over HTTP to `url`. If both are None, the SDK's environment
        variables name the destination. `share` (0 to 1) is the fraction of messages without a trace context
        that are traced. All spans carry `service`, `version` and `replica`. `latency_of_route` and
        `latency_of_endpoint` take the name of a route or endpoint, and return the histogram to which
        exemplars are added.
        """
        self.counts: Counter[str] = Counter(sampled=0, limited=0, unsettled=0)
        self.latency_of_route = latency_of_route
        self.latency_of_endpoint = latency_of_endpoint
        self.delivering: dict[int, MessageTrace] = {}  # by the id() of a message that has crossed a route
        self._exporter = _Counted(
            OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECS) if exporter is None else exporter
        )
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # the selection is made in this class
            span_limits=SpanLimits(max_attribute_length=ATTRIBUTE_MAX),
            resource=Resource.create(
                {
                    "service.name": service,
                    "service.version": version,
                    "service.instance.id": replica,
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=SPANS_WAITING_MAX)
        )
        self.tracer = self._provider.get_tracer("gateway", version)
        self._share = share
        self._per_second = messages_per_second_max
        self._allowed = max(1.0, self._per_second)
        self._refilled_at = 0.0
        self._open: dict[MessageTrace, None] = {}
        self.countdown = self._draw_interval()

    def _draw_interval(self) -> int:
        """Draw at random how many messages without a trace context pass until the next one is traced."""
        if self._share <= 0:
            return NEVER_DUE
        if self._share >= 1:
            return 1
        return int(math.log(1.0 - chance.random()) / math.log1p(-self._share)) + 1

    @staticmethod
    def may_carry_context(found: PropertySet) -> bool:
        """Return True if a message with the properties `found` may have a trace context."""
        if found.raw:
            return b"traceparent" in found.raw
        try:
            return any(name == TRACEPARENT for name, _ in found.properties.headers)
        except ProtocolError:
            return False

    def begin(self, message: Message, received: Monotonic) -> MessageTrace | None:
        """Begin the trace of a message, or return None if the message is not to be traced.

        A message is traced if its trace context is sampled, or if it has no trace context and is selected at
        random, unless the limit of messages per second is reached. `received` is the loop-clock time at which
        the message was read.
        """
        parent: Context | None = None
        if self.may_carry_context(message.property_set):
            parent = _context_of(message.property_set)
            if parent is not None and not get_current_span(parent).get_span_context().trace_flags.sampled:
                return None
        if parent is None:
            if self.countdown > 0:
                return None
            self.countdown = self._draw_interval()
        now = clock.now()
        self._allowed = min(
            max(1.0, self._per_second), self._allowed + (now - self._refilled_at) * self._per_second
        )
        self._refilled_at = now
        if self._allowed < 1.0:
            self.counts["limited"] += 1
            return None
        self._allowed -= 1.0
        self.counts["sampled"] += 1
        if len(self._open) >= OPEN_MAX:
            self.counts["unsettled"] += 1
            next(iter(self._open)).abandon()
        trace = MessageTrace(self, message, received, parent)
        self._open[trace] = None
        return trace

    def remove(self, trace: MessageTrace) -> None:
        """Remove a trace, all spans of which have ended."""
        self._open.pop(trace, None)

    def spans(self) -> dict[str, int]:
        """Return the numbers of spans that were exported (`exported`) and lost (`failed`)."""
        return {"exported": self._exporter.exported, "failed": self._exporter.failed}

    def flush(self) -> None:
        """Export all spans that have ended, and return when they are exported."""
        self._provider.force_flush()

    def close(self) -> None:
        """End all traces, and export the remaining spans. Block until they are exported."""
        for trace in list(self._open):
            trace.abandon()
        self._provider.shutdown()


class MessageTrace:
    """Trace of one message: its spans, from reading the message to the response to its source."""

    def __init__(
        self, tracing: Tracing, message: Message, received: Monotonic, parent: Context | None
    ) -> None:
        self._tracing = tracing
        self._received = received
        self._endpoint = message.sender.endpoint
        self._delivers: dict[int, _Deliver] = {}  # by the id() of the message, which the value references
        self._last = 0
        now = clock.now()
        self._ahead = round(clock.utc() * 1e9 - now * 1e9)  # wall clock minus loop clock, ns
        self._receive = tracing.tracer.start_span(
            f"receive {self._endpoint}",
            parent,
            SpanKind.CONSUMER,
            {
                **_message_attributes(message),
                "messaging.operation.type": "receive",
                "messaging.client.id": message.sender.client,
                "gateway.endpoint": self._endpoint,
            },
            start_time=self._ns(received),
        )
        self._context = set_span_in_context(self._receive)

    def _ns(self, at: float) -> int:
        return round(at * 1e9) + self._ahead

    def now_ns(self) -> int:
        """Return the present time in nanoseconds since 1970, as spans need it."""
        return self._ns(clock.now())

    def record_crossing(
        self, route: str, target_endpoint: str, begun_ns: int, crossed: Message | Outcome
    ) -> Message | Outcome:
        """Record the result of a route for the message, and return this result (`crossed`).

        `crossed` is either the message for the route's target, into which the trace context of its `deliver`
        span is written, or the outcome if the route has refused the message. `begun_ns` is the time at which
        the route was applied, in nanoseconds since 1970.
        """
        now = self.now_ns()
        attributes = {"gateway.route": route}
        span = self._tracing.tracer.start_span(
            f"route {route}", self._context, SpanKind.INTERNAL, attributes, start_time=begun_ns
        )
        if isinstance(crossed, Outcome):
            _end(span, crossed, now)
            return crossed
        span.end(now)
        deliver = self._tracing.tracer.start_span(
            f"deliver {route}",
            self._context,
            SpanKind.PRODUCER,
            {
                **_message_attributes(crossed),
                **attributes,
                "messaging.operation.type": "send",
                "gateway.endpoint": target_endpoint,
            },
            start_time=now,
        )
        self._delivers[id(crossed)] = _Deliver(crossed, route, deliver)
        self._tracing.delivering[id(crossed)] = self
        _inject_context(crossed, deliver)
        return crossed

    def delivered(self, message: Message, outcome: Outcome) -> None:
        """Record the outcome that one recipient behind a route has reported for `message`."""
        deliver = self._delivers[id(message)]
        now = clock.now()
        deliver.outcome = outcome if deliver.at is None else worse_outcome(deliver.outcome, outcome)
        deliver.at = self._last = self._ns(now)
        if outcome is ACCEPTED:
            self._exemplify(self._tracing.latency_of_route(deliver.route), deliver.span, now)

    def record_outcome(self, outcome: Outcome) -> None:
        """Complete the trace, because the source of the message has received `outcome`. Never raises."""
        try:
            self._record_outcome(outcome)
        except Exception as error:  # the message itself is not affected
            contained("message", error, endpoint=self._endpoint)

    def record_unreceived(self) -> None:
        """Complete the trace of a message that has no recipients."""
        self._receive.set_attribute("gateway.unwanted", True)
        self._end(ACCEPTED, self.now_ns())

    def _record_outcome(self, outcome: Outcome) -> None:
        """Record the span `settle`, and complete the trace."""
        now = clock.now()
        at = self._ns(now)
        settle = self._tracing.tracer.start_span(
            f"settle {self._endpoint}",
            self._context,
            SpanKind.INTERNAL,
            {"messaging.operation.type": "settle", "gateway.endpoint": self._endpoint},
            start_time=self._last or at,
        )
        _end(settle, outcome, at)
        self._exemplify(self._tracing.latency_of_endpoint(self._endpoint), self._receive, now)
        self._end(outcome, at)

    def abandon(self) -> None:
        """Complete the trace although the message has not been settled."""
        self._end(None, self.now_ns())

    def _end(self, outcome: Outcome | None, at: int) -> None:
        for key, deliver in self._delivers.items():
            self._tracing.delivering.pop(key, None)
            if deliver.at is None:
                _end(deliver.span, outcome, at)
            else:
                _end(deliver.span, deliver.outcome, deliver.at)
        self._delivers.clear()
        _end(self._receive, outcome, at)
        self._tracing.remove(self)

    def _exemplify(self, latency: Latency | None, span: Span, now: Monotonic) -> None:
        if latency is not None and span.is_recording():
            of = span.get_span_context()
            ids = f"{of.trace_id:032x}", f"{of.span_id:016x}"
            latency.exemplify(Exemplar(*ids, now - self._received, clock.utc()))


class _Deliver:
    """Open span `deliver` of a message that has crossed a route.

    `at` is the time at which the message was settled, in nanoseconds since 1970, or None if it is not settled
    yet.
    """

    def __init__(self, message: Message, route: str, span: Span) -> None:
        self.message = message
        self.route = route
        self.span = span
        self.outcome = ACCEPTED
        self.at: int | None = None


def _context_of(found: PropertySet) -> Context | None:
    """Return the W3C trace context in the properties of a message.

    Return None if there is none, or if it is invalid.
    """
    try:
        headers = found.properties.headers
    except ProtocolError:
        return None
    carrier: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (TRACEPARENT, TRACESTATE) and value.type is ValueType.STRING:
            carrier.setdefault(name, []).append(str(value.value))
    if len(carrier.get(TRACEPARENT, ())) != 1:
        return None
    context = PROPAGATOR.extract(carrier, Context())
    return context if get_current_span(context).get_span_context().is_valid else None


def _inject_context(message: Message, span: Span) -> None:
    """Replace the trace context in the headers of a message by that of `span`.

    The message must not have been passed to any recipient yet.
    """
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, set_span_in_context(span))
    if not carrier:  # the SDK is disabled: the received context remains
        return
    stated: Properties = message.property_set.properties
    headers = tuple(header for header in stated.headers if header[0] not in (TRACEPARENT, TRACESTATE))
    added = tuple((name, string(text)) for name, text in carrier.items())
    made = property_set(replace(stated, headers=headers + added))
    message.byte_count += made.byte_count - message.property_set.byte_count
    message.property_set = made


def _message_attributes(message: Message) -> dict[str, str | int]:
    return {
        "messaging.system": message.address.protocol,
        "messaging.destination.name": message.address.name,
        "messaging.message.body.size": len(message.body),
    }


def _end(span: Span, outcome: Outcome | None, at: int) -> None:
    """End a span at the time `at`, in nanoseconds since 1970, and add the outcome of the message.

    The outcome None means that the message was not settled.
    """
    if outcome is None:
        span.set_attribute("gateway.outcome", "unsettled")
        span.set_status(Status(StatusCode.ERROR, "no outcome was reported for the message"))
    else:
        span.set_attribute("gateway.outcome", outcome.verdict.name.lower())
        if outcome.verdict is not ACCEPTED.verdict:
            span.set_attribute("error.type", outcome.reason.value)
            span.set_status(Status(StatusCode.ERROR, outcome.text or None))
    span.end(at)


class _Counted(SpanExporter):
    """Exporter that passes spans to the exporter `inner`, and counts those that were exported or lost."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans by `inner`, and count them. The SDK calls this in a thread of its own."""
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut down `inner`. The SDK calls this last."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Make `inner` export its waiting spans within `timeout_millis` milliseconds.

        Return True if it succeeded.
        """
        return self._inner.force_flush(timeout_millis)

"""Traced messages: which are, what their spans say, what crosses; and that nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gateway.broker.core import dispatcher_of
from gateway.broker.dispatcher import DispatcherServices
from gateway.broker.journal import open_journal
from gateway.broker.tracing import TracingRecordingDispatcher
from gateway.containment import counted
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, PropertySet, Value, ValueType, property_set, string
from gateway.settings.journal import Journal
from gateway.telemetry import tracing as traces
from gateway.telemetry.stats import Latency
from gateway.telemetry.tracing import Tracing
from tests.broker.parts import connected, mqtt, unreadable
from tests.broker.test_dispatcher import OUT, REFUSED, UP, Bench, routes

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = "b7ad6b7169203331"
SAMPLED: Final = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED: Final = f"00-{TRACE}-{PARENT}-00"


class Traced(Bench):
    """A bench whose dispatcher traces into memory."""

    def __init__(self, *rows: str, folder: Path | None = None, **stated: Any) -> None:
        super().__init__(*rows)
        self.memory = InMemorySpanExporter()
        self.at_endpoint: dict[str, Latency] = {}
        self.tracing = Tracing(
            self.memory,
            latency_of_route=lambda name: self.dispatcher.latencies.get(name),
            latency_of_endpoint=self.at_endpoint.get,
            **stated,
        )
        router, spaces = routes(*rows), self.dispatcher.namespaces
        journal = None if folder is None else open_journal(Journal(enabled=True), folder, router)
        self.dispatcher = dispatcher_of(
            router,
            self.letters,
            DispatcherServices(links=("erp",), namespaces=spaces),
            journaling=journal,
            tracing=self.tracing,
        )

    def spans(self) -> list[ReadableSpan]:
        self.tracing.flush()
        return sorted(self.memory.get_finished_spans(), key=lambda span: (span.start_time, span.name))

    def named(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans() if span.name == name]
        return found


@pytest.fixture
def make() -> Iterator[Callable[..., Traced]]:
    made: list[Traced] = []

    def one(*rows: str, **more: Any) -> Traced:
        made.append(Traced(*rows, **more))
        return made[-1]

    yield one
    for bench in made:
        bench.tracing.close()


def carrying(*contexts: str, topic: str = "out/x", state: str = "", body: bytes = b"1") -> Message:
    headers = tuple(("traceparent", string(text)) for text in contexts)
    if state:
        headers = (*headers, ("tracestate", string(state)))
    return mqtt(topic, body, properties=property_set(Properties(headers=(("a", string("b")), *headers))))


def context(message: Message) -> dict[str, str]:
    return {name: value.value for name, value in message.properties.headers}


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def test_a_context_is_continued_across_a_route(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "")
    source, placed = bench.publish("mqtt", carrying(SAMPLED, state="vendor=1"))
    assert (placed, source.told, bench.spans()[:-2]) == ([True], [], [])
    (crossed,) = bench.link.parts[0].messages
    bench.link.parts[0].settle(ACCEPTED)
    assert source.told == [(0, ACCEPTED)]
    receive, route, deliver, settle = (
        bench.named(f"{word} {of}")
        for word, of in (("receive", "test"), ("route", "out"), ("deliver", "out"), ("settle", "test"))
    )
    assert {f"{span.context.trace_id:032x}" for span in bench.spans() if span.context} == {TRACE}
    assert receive.parent is not None
    assert f"{receive.parent.span_id:016x}" == PARENT
    for child in (route, deliver, settle):
        assert child.parent is not None
        assert f"{child.parent.span_id:016x}" == id_of(receive)
    assert context(crossed) == {
        "a": "b",
        "traceparent": f"00-{TRACE}-{id_of(deliver)}-01",
        "tracestate": "vendor=1",
    }
    assert crossed.byte_count == mqtt("out", b"1", properties=crossed.property_set).byte_count
    assert deliver.attributes is not None
    assert deliver.attributes["messaging.destination.name"] == "out"
    assert deliver.attributes["gateway.route"] == "out"
    assert deliver.attributes["gateway.outcome"] == "accepted"
    assert bench.counts("out") == (1, 1, 0, 0)


def test_what_stays_in_its_own_world_is_not_changed(make: Callable[..., Traced]) -> None:
    bench = make(UP % (", mandatory: false", ""))
    bench.queue("q")
    outlet = connected(bench.space.session("c", "#"))
    message = carrying(SAMPLED, topic="a")
    bench.publish("mqtt", message)
    assert [row.message for row in outlet.rows] == [message]
    taken = bench.host.queues["q"].take()
    assert taken is not None
    assert context(taken[1])["traceparent"] not in (SAMPLED, None)


@pytest.mark.parametrize(
    "contexts",
    [
        (UNSAMPLED,),
        (SAMPLED, SAMPLED),
        ("00-" + "0" * 32 + f"-{PARENT}-01",),
        (f"ff-{TRACE}-{PARENT}-01",),
        ("traceparent",),
        ("",),
        ("\ud800",),
        (SAMPLED.upper(),),
    ],
    ids=["not sampled", "twice", "no trace", "version ff", "a word", "empty", "surrogate", "capitals"],
)
def test_no_context_that_is_sampled_is_passed_as_it_is(
    make: Callable[..., Traced], contexts: tuple[str, ...]
) -> None:
    bench = make(OUT % "")
    message = carrying(*contexts)
    bench.publish("mqtt", message)
    bench.link.parts[0].settle(ACCEPTED)
    assert bench.spans() == []
    assert bench.link.parts[0].messages[0].property_set is message.property_set
    assert bench.tracing.counts["sampled"] == 0


@pytest.mark.parametrize(
    "odd",
    [
        property_set(Properties(headers=(("traceparent", Value(ValueType.INT32, 7)),))),
        property_set(Properties(headers=(("traceparent", Value(ValueType.STRING, b"\xff")),))),
        PropertySet("mqtt", b"traceparent", lambda raw: Properties()),
        unreadable(),
    ],
    ids=["a number", "bytes", "elsewhere", "malformed"],
)
def test_properties_that_hold_no_context_do_no_harm(make: Callable[..., Traced], odd: PropertySet) -> None:
    bench = make(OUT % "")
    before = counted["message"]
    bench.publish("mqtt", mqtt("out/x", properties=odd))
    assert [part.messages[0].property_set for part in bench.link.parts] == [odd]
    assert (bench.spans(), counted["message"]) == ([], before)


def test_of_messages_without_a_context_a_share_begins_one(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "", share=0.25, messages_per_second_max=1e6)
    for _ in range(400):
        bench.publish("mqtt", mqtt("out/x"))
    found = bench.tracing.counts["sampled"]
    assert 40 < found < 180
    carried = [
        message for part in bench.link.parts for message in part.messages if message.properties.headers
    ]
    assert len(carried) == found
    assert len({context(message)["traceparent"][3:35] for message in carried}) == found


def test_a_refusal_is_told(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "")
    bench.publish("mqtt", carrying(SAMPLED))
    bench.link.parts[0].settle(REFUSED)
    for name in ("deliver out", "settle test", "receive test"):
        span = bench.named(name)
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes is not None
        assert span.attributes["error.type"] == Reason.TARGET_REFUSED.value


def test_a_route_that_refuses_is_told(make: Callable[..., Traced]) -> None:
    bench = make(UP % ("", ""))
    source, _ = bench.publish("mqtt", carrying(SAMPLED, topic="a" * 256))
    assert [outcome.reason for outcome in source.outcomes] == [Reason.NAME_INVALID]
    route = bench.named("route up")
    assert route.attributes is not None
    assert route.attributes["error.type"] == "name_invalid"
    assert [span.name for span in bench.spans() if span.name.startswith("deliver")] == []


def test_what_nobody_wants_has_a_span_all_the_same(make: Callable[..., Traced]) -> None:
    bench = make()
    assert bench.publish("mqtt", carrying(SAMPLED))[1] == [False]
    span = bench.named("receive test")
    assert span.attributes is not None
    assert span.attributes["gateway.unwanted"] is True


def test_two_targets_of_a_route_end_one_delivery_with_the_worse_outcome(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "")
    bench.publish("mqtt", carrying(SAMPLED))
    part = bench.link.parts[0]
    (trace,) = bench.tracing.delivering.values()
    trace.delivered(part.messages[0], Outcome(Verdict.RELEASED, Reason.TARGET_DOWN))
    part.settle(ACCEPTED)
    span = bench.named("deliver out")
    assert span.attributes is not None
    assert span.attributes["gateway.outcome"] == "released"
    assert not bench.tracing.delivering


def test_a_peer_that_samples_everything_costs_no_more_than_the_limit(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "", messages_per_second_max=3.0)
    for _ in range(50):
        bench.publish("mqtt", carrying(SAMPLED))
    assert bench.tracing.counts["sampled"] + bench.tracing.counts["limited"] == 50
    assert 3 <= bench.tracing.counts["sampled"] < 50
    assert context(bench.link.parts[-1].messages[0])["traceparent"] == SAMPLED, "passes as it is"


def test_of_those_that_nobody_settles_the_oldest_makes_room(
    make: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "OPEN_MAX", 2)
    bench = make(OUT % "")
    for _ in range(3):
        bench.publish("mqtt", carrying(SAMPLED))
    assert bench.tracing.counts["unsettled"] == 1
    assert len(bench.tracing.delivering) == 2
    gone = bench.named("receive test")
    assert gone.attributes is not None
    assert gone.attributes["gateway.outcome"] == "unsettled"
    bench.link.parts[0].settle(ACCEPTED)  # late: its spans have ended, and its source is told
    assert len([span for span in bench.spans() if span.name == "receive test"]) == 1


def test_a_name_is_told_as_far_as_it_fits(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "")
    bench.publish("mqtt", carrying(SAMPLED, topic="out/" + "é" * 5_000))
    bench.link.parts[0].settle(ACCEPTED)
    told = bench.named("receive test").attributes
    assert told is not None
    assert told["messaging.destination.name"] == ("out/" + "é" * 5_000)[: traces.ATTRIBUTE_MAX]


def test_a_context_is_kept_where_the_sdk_is_told_to_do_nothing(
    make: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    bench = make(OUT % "")
    source, _ = bench.publish("mqtt", carrying(SAMPLED, state="vendor=1"))
    bench.link.parts[0].settle(ACCEPTED)
    assert source.outcomes == [ACCEPTED]
    crossed = context(bench.link.parts[0].messages[0])
    assert (crossed["traceparent"], crossed["tracestate"]) == (SAMPLED, "vendor=1")
    assert (bench.spans(), bench.dispatcher.latencies["out"].exemplars) == ([], {})


def test_an_exemplar_leads_from_the_latency_to_the_trace(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "")
    at_endpoint = Latency()
    bench.at_endpoint["test"] = at_endpoint
    bench.publish("mqtt", carrying(SAMPLED))
    bench.link.parts[0].settle(ACCEPTED)
    for latency in (bench.dispatcher.latencies["out"], at_endpoint):
        assert [one.trace_id for one in latency.exemplars.values()] == [TRACE]


def test_messages_that_go_together_go_one_by_one_when_one_of_them_is_traced(
    make: Callable[..., Traced],
) -> None:
    bench = make(OUT % "", share=0.0)
    shared = carrying(SAMPLED)
    entry = bench.dispatcher.entry("mqtt", bench.space, shared.address)
    batch = bench.dispatcher.batch(bench.publish("mqtt")[0], 0.0)  # type: ignore[arg-type]
    assert not bench.dispatcher.publish_burst(batch, entry, [shared, shared], [0, 1])
    plain = [mqtt("out/x"), mqtt("out/x")]
    assert bench.dispatcher.publish_burst(batch, entry, plain, [0, 1])
    bench.tracing.countdown = 2
    assert not bench.dispatcher.publish_burst(batch, entry, plain, [0, 1])


def test_the_journal_is_written_beside_it(make: Callable[..., Traced], tmp_path: Path) -> None:
    bench = make(OUT % "", folder=tmp_path)
    source, _ = bench.publish("mqtt", carrying(SAMPLED, body=b"kept"))
    bench.link.parts[0].settle(ACCEPTED)
    assert source.outcomes == [ACCEPTED]
    assert bench.named("deliver out").status.status_code is StatusCode.UNSET
    assert isinstance(bench.dispatcher, TracingRecordingDispatcher)
    writer = bench.dispatcher.journaling.writer
    writer.close()
    assert writer.rows == 1


class Broken(SpanExporter):
    """A collector that takes nothing."""

    def export(self, spans: object) -> SpanExportResult:
        raise OSError("gone")

    def shutdown(self) -> None:
        pass


def test_spans_that_nobody_takes_are_counted_and_harm_no_message(make: Callable[..., Traced]) -> None:
    bench = make(OUT % "")
    broken = Tracing(Broken())
    bench.dispatcher._tracing = broken  # type: ignore[attr-defined]
    source, _ = bench.publish("mqtt", carrying(SAMPLED))
    bench.link.parts[0].settle(ACCEPTED)
    broken.close()
    assert source.outcomes == [ACCEPTED]
    assert broken.spans() == {"exported": 0, "failed": 4}


def test_an_error_while_spans_are_made_costs_no_message(
    make: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(OUT % "")
    for name in ("record_crossing", "delivered", "_record_outcome"):
        with monkeypatch.context() as patched:
            patched.setattr(traces.MessageTrace, name, lambda *_: 1 // 0)
            before = counted["message"]
            source, _ = bench.publish("mqtt", carrying(SAMPLED))
            bench.link.parts.pop().settle(ACCEPTED)
            assert source.outcomes == [ACCEPTED], name
            assert counted["message"] > before, name

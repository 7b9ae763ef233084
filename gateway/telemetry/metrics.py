"""Definitions of all metrics with their help and labels, and the collector that Prometheus scrapes.

Labels have bounded sets of values (endpoint, protocol, version, direction, frame, route, outcome, reason): a
topic or a client identifier never becomes one.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Final, Protocol, get_args

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from gateway import is_compiled, reloads
from gateway.containment import Where, counted
from gateway.protocols import DIALECTS
from gateway.telemetry.audit import trail
from gateway.telemetry.stats import (
    LATENCY_BUCKETS_SECS,
    EndpointStats,
    Latency,
    LinkStats,
    ListenerStats,
    OutboxCounts,
    RouteCounts,
)

ENDPOINT: Final = ("endpoint", "protocol")
OUTBOX: Final = ("endpoint", "route")

COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "gateway_frames": ("Packets, frames or methods.", (*ENDPOINT, "version", "direction", "frame")),
    "gateway_messages": ("Messages published by and delivered to peers.", (*ENDPOINT, "direction")),
    "gateway_network_bytes": ("Octets read from and written to sockets.", (*ENDPOINT, "direction")),
    "gateway_settled": ("Messages that were answered to their source.", (*ENDPOINT, "outcome", "reason")),
    "gateway_protocol_errors": ("Connections that broke their protocol.", (*ENDPOINT, "reason")),
    "gateway_connections_accepted": ("Connections that a listener took.", ENDPOINT),
    "gateway_connections_refused": ("Connections that a listener turned away.", (*ENDPOINT, "reason")),
    "gateway_connections_held": (
        "How often the publishes of a connection had to wait, for they had no room or came too fast.",
        ENDPOINT,
    ),
    "gateway_answers_lost": ("Answers to return addresses that nobody took.", (*ENDPOINT, "reason")),
    "gateway_denied": ("What clients asked for and may not do.", (*ENDPOINT, "action")),
    "gateway_logins": ("Clients that said who they are, by what came of it.", (*ENDPOINT, "outcome")),
    "gateway_duplicates": (
        "Messages that came again and were not taken twice: QoS 2, or by a route that deduplicates.",
        (*ENDPOINT, "route"),
    ),
    "gateway_deduplication_forgotten": (
        "Message ids that a route forgot before their time, since there were too many.",
        ("route",),
    ),
    "gateway_dead_letters_forwarded": ("Copies of dead letters, by what became of them.", ("outcome",)),
    "gateway_link_reconnects": ("Connections of a link after its first.", ENDPOINT),
    "gateway_link_failures": ("Connections of a link that failed or were lost.", (*ENDPOINT, "reason")),
    "gateway_link_restored": (
        "Exchanges, queues and consumers that a link's broker had lost, and that were restored or came back.",
        (*ENDPOINT, "reason"),
    ),
    "gateway_link_lessened": (
        "Messages that a link published with less QoS, or without retain, since its broker offers no more;"
        " without what they would have had it do; or with a life of ten years, for it takes no longer one.",
        (*ENDPOINT, "reason"),
    ),
    "gateway_route_messages": ("Messages of a route, by what became of them.", ("route", "outcome")),
    "gateway_route_lost_properties": (
        "Properties that a route could not say in the target.",
        ("route", "reason"),
    ),
    "gateway_engine_expirations_shortened": (
        "Messages that live for more than ten years, which is how long the cluster keeps them for replicas.",
        (),
    ),
    "gateway_engine_sessions_moved": ("Sessions that other replicas have taken over from this one.", ()),
    "gateway_sessions_evicted": (
        "MQTT sessions whose client was away and that ended before their time, for there was no place.",
        (),
    ),
    "gateway_dead_letters_dropped": (
        "Dead letters that newer ones have taken the place of: they had been accepted, and are lost.",
        (),
    ),
    "gateway_dead_letters_refused": (
        "Times that a message stayed with its source, since there was no room for another dead letter.",
        (),
    ),
    "gateway_share_refused": (
        "Requests that were refused at a limit, or at their user's share of it.",
        ("resource",),
    ),
    "gateway_share_evicted": (
        "Entries that gave way to newer ones, of a user who had more than an equal part.",
        ("resource",),
    ),
    "gateway_dropped": ("Messages that the embedded broker dropped.", ("reason",)),
    "gateway_dead_lettered": ("Messages that became dead letters.", ("route", "reason")),
    "gateway_traces": ("Messages that were to be traced, by what came of it.", ("outcome",)),
    "gateway_trace_spans": ("Spans that were handed to the exporter, by what came of it.", ("outcome",)),
    "gateway_mapping_reloads": ("Attempts to take changed mapping files.", ("outcome",)),
    "gateway_authorizer_failures": ("Questions that the authorizer has not answered.", ()),
    "gateway_rule_reloads": ("Attempts to take changed users, secrets and roles.", ("outcome",)),
    "gateway_file_reloads": (
        "Attempts to take changed certificates and keys of tokens.",
        ("outcome",),
    ),
    "gateway_authentications": (
        "Logins, by the kind of back end that was asked, and what it said.",
        ("backend", "outcome"),
    ),
    "gateway_authentication_failures": ("Questions of a back end that got no answer.", ("backend",)),
    "gateway_audit_events": ("Events of the audit log, by what became of their lines.", ("event", "outcome")),
    "gateway_http_refused": ("HTTP connections and requests that were not served.", ("reason",)),
    "gateway_internal_errors": (
        "Errors that nobody foresaw, by what was given up to contain them; the log has their stacks.",
        ("where",),
    ),
}
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "gateway_connections": ("Open connections.", ENDPOINT),
    "gateway_rates_left_out": ("Counters whose last hour is not kept, for there are too many.", ()),
    "gateway_http_connections": ("Open HTTP connections.", ()),
    "gateway_link_up": ("1 while the link is connected.", ENDPOINT),
    "gateway_link_leader": ("1 while this replica was elected to consume over the link.", ENDPOINT),
    "gateway_link_paused": ("1 while an operator has paused the link.", ("endpoint",)),
    "gateway_route_paused": ("1 while an operator has paused the route.", ("route",)),
    "gateway_route_held": ("Messages that wait in front of a paused route, not in an outbox.", ("route",)),
    "gateway_link_address": ("1 for the address that a link is connected to.", (*ENDPOINT, "address")),
    "gateway_link_blocked": ("1 while the remote broker lets the link publish nothing.", ENDPOINT),
    "gateway_link_in_flight": ("Messages published by a link and not yet confirmed.", ENDPOINT),
    "gateway_route_in_flight": ("Messages of a route that are on their way.", ("route",)),
    "gateway_link_lacking": (
        "Exchanges and queues that routes need and the link's broker lacks now.",
        ENDPOINT,
    ),
    "gateway_link_filters_refused": ("Topic filters that a link needs and its broker refuses now.", ENDPOINT),
    "gateway_outbox_messages": ("Messages in an outbox; in a shared one, what waits on the cluster.", OUTBOX),
    "gateway_outbox_bytes": ("What they weigh: bodies, properties, and 256 octets each.", OUTBOX),
    "gateway_outbox_oldest_seconds": ("How long the oldest of them has waited, about.", OUTBOX),
}
BROKER_GAUGES: Final[dict[str, str]] = {
    "gateway_bindings": "AMQP bindings of the embedded broker.",
    "gateway_clock_jump_seconds": "How far the wall clock has jumped ahead of the time in use.",
    "gateway_consumers": "AMQP consumers of the embedded broker.",
    "gateway_dead_letters": "Dead letters kept; of replicas over a cluster, those of all.",
    "gateway_dead_letters_bytes": "What they weigh: bodies, properties, and 256 octets each.",
    "gateway_dead_letters_unwanted": "Of them those that no route and no subscriber wanted: no fault.",
    "gateway_deduplication_ids": "Message ids that routes remember; over a cluster those passed on here.",
    "gateway_engine_bindings": "Binding keys that this replica's queue has on the cluster.",
    "gateway_engine_clock_skew_seconds": "How far this machine's clock is ahead of the cluster's.",
    "gateway_engine_retained_reads": "Pages of retained messages that wait until it is their user's turn.",
    "gateway_engine_reviewing": "1 while subscriptions of absent clients are checked by changed rules.",
    "gateway_engine_sessions": "Sessions of all replicas, counted every ten seconds.",
    "gateway_engine_retaining_messages": "Messages that wait until the database retains them, or behind one.",
    "gateway_engine_unconfirmed_clients": "Clients whose answer waits for the cluster.",
    "gateway_delayed_messages": "Messages that exchanges of type x-delayed-message hold until they are due.",
    "gateway_delayed_bytes": "Bytes of these messages.",
    "gateway_exchanges": "AMQP exchanges of the embedded broker.",
    "gateway_memory_blocked": "1 while publishers are stopped for want of memory.",
    "gateway_memory_bytes": "Memory that the process occupies.",
    "gateway_memory_shares_full": "Users and addresses that hold more than their share of the memory.",
    "gateway_memory_limit_bytes": "Above so much publishers are stopped.",
    "gateway_partial_transfers": "Restartable AMQP/Fast transfers that are not complete.",
    "gateway_partial_transfers_bytes": "Octets that have come of them.",
    "gateway_queue_bytes": "What waits in the broker's queues: bodies, properties, and 256 octets each.",
    "gateway_queue_messages": "Messages in the embedded broker's queues.",
    "gateway_queues": "AMQP queues of the embedded broker.",
    "gateway_retained_messages": "MQTT topics with a retained message.",
    "gateway_sessions": "MQTT sessions, connected or not.",
    "gateway_spool_bytes": "Octets of large AMQP bodies on disk.",
    "gateway_spool_files": "Files that they are in, those that are begun included.",
    "gateway_spool_held_bytes": "Octets of AMQP/Fast bodies that arrive, and for which memory is reserved.",
    "gateway_state_pending_operations": "Reads and writes of shared state that wait for the database.",
    "gateway_state_up": "1 while the database of shared state can be reached.",
    "gateway_subscriptions": "MQTT subscriptions.",
}
STORE_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "gateway_store_commits": ("Transactions of the store.", "commits"),
    "gateway_store_messages": ("Messages written to the store.", "messages"),
    "gateway_store_written_bytes": ("Octets of encoded messages written to the store.", "octets"),
    "gateway_store_failures": ("Transactions that the disk did not take.", "failures"),
    "gateway_store_refused": ("Messages refused because the disk did not take them.", "refused"),
    "gateway_store_damaged": ("Stored rows that could not be read.", "damaged"),
}
STORE_GAUGES: Final[dict[str, tuple[str, str]]] = {
    "gateway_store_pending_messages": ("Messages that wait for the disk.", "pending"),
    "gateway_store_pending_bytes": (
        "What they weigh: bodies, properties, and 256 octets each.",
        "pending_octets",
    ),
    "gateway_store_file_bytes": ("The store's files, with what is free in them.", "file_octets"),
    "gateway_store_commit_seconds": ("What the last transaction took.", "commit_secs"),
    "gateway_store_healthy": ("1 while the disk takes what is written.", "healthy"),
}
JOURNAL_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "gateway_journal_rows": ("Rows written to the journal.", "rows"),
    "gateway_journal_written_bytes": ("Octets written to the journal.", "octets"),
    "gateway_journal_dropped": ("Rows that the journal's disk did not take in time.", "dropped"),
    "gateway_journal_errors": ("Writes of the journal that failed.", "errors"),
}
REDACTION_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "gateway_journal_redacted": ("Messages of which the journal was told less, by `private`.", "redacted"),
    "gateway_journal_withheld": (
        "Bodies of them that are no JSON, and that it was not told at all.",
        "withheld",
    ),
}
JOURNAL_GAUGES: Final[dict[str, tuple[str, str]]] = {
    "gateway_journal_backlog_rows": ("Rows that wait to be written.", "backlog"),
    "gateway_journal_healthy": ("1 while the journal can be written.", "healthy"),
}
Series = tuple[str, str]
"""Kind of a metric (`gauge` or `counter`), and its help."""
QUEUE_LABELS: Final = ("protocol", "virtual_host", "kind", "queue")
QUEUE_SERIES: Final[dict[str, Series]] = {
    "gateway_detailed_queue_messages": ("gauge", "Messages of a queue that are ready."),
    "gateway_detailed_queue_bytes": ("gauge", "What they weigh: bodies, properties, and 256 octets each."),
    "gateway_detailed_queue_unacknowledged": ("gauge", "Messages that its consumers have not acknowledged."),
    "gateway_detailed_queue_consumers": ("gauge", "Its consumers."),
    "gateway_detailed_queue_in": ("counter", "Messages that it has been given."),
    "gateway_detailed_queue_out": ("counter", "Messages that have left it, whichever way."),
}
SESSION_LABELS: Final = ("client",)
SESSION_SERIES: Final[dict[str, Series]] = {
    "gateway_detailed_session_messages": ("gauge", "Messages that an MQTT session is owed."),
    "gateway_detailed_session_in_flight": ("gauge", "Messages that its client has not acknowledged."),
    "gateway_detailed_session_subscriptions": ("gauge", "Its subscriptions."),
    "gateway_detailed_session_connected": ("gauge", "1 while its client is connected."),
}
LEFT_OUT: Final = "gateway_detailed_left_out"
LEFT_OUT_TEXT: Final = "Queues or sessions that match and are not told of, for there are too many."
WORKER_SERIES: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "gateway_worker_up": ("gauge", "1 while the worker serves.", ("worker",)),
    "gateway_worker_restarts": (
        "counter",
        "Times that a worker was started again, and why: it had ended, or it did not answer.",
        ("worker", "reason"),
    ),
}
"""Kind, help and labels of the metrics that the process reports which has started the workers."""
SETTLE_SECONDS: Final = "gateway_settle_seconds"
ROUTE_SECONDS: Final = "gateway_route_seconds"
TURN_SECONDS: Final = "gateway_loop_turn_seconds"
ROUTE_OUTCOMES: Final = ("matched", "delivered", "failed", "retried", "dropped", "unparsable", "undecided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Functions and objects that are read at every scrape.

    `gauges` are by their names in BROKER_GAUGES; `dropped` is by reason, `dead_lettered` by route and reason,
    `share_refused` and `share_evicted` by kind; `forwarded` (copies of dead letters), `traces` and `spans`
    are by outcome; `forgotten_ids` by route,
    `authentications` by back end and outcome; `paused_routes` has the number of messages that each holds.
    `store`, `journal` and `redaction` have the attributes that their tables name. `turns` are those of the
    event loop.
    """

    routes: Callable[[], Iterable[RouteCounts]] = tuple
    dropped: Callable[[], Mapping[str, int]] = dict
    evicted_sessions: Callable[[], int] = int
    share_refused: Callable[[], Mapping[str, int]] = dict
    share_evicted: Callable[[], Mapping[str, int]] = dict
    engine_moved: Callable[[], int] = int
    engine_shortened: Callable[[], int] = int
    dropped_letters: Callable[[], int] = int
    refused_letters: Callable[[], int] = int
    dead_lettered: Callable[[], Mapping[tuple[str, str], int]] = dict
    forwarded: Callable[[], Mapping[str, int]] = dict
    forgotten_ids: Callable[[], Mapping[str, int]] = dict
    outboxes: Callable[[], Iterable[OutboxCounts]] = list
    authorizer_failures: Callable[[], int] = int
    authentications: Callable[[], Mapping[tuple[str, str], int]] = dict
    authentication_failures: Callable[[], Mapping[str, int]] = dict
    store: object | None = None
    journal: object | None = None
    redaction: object | None = None
    turns: Latency | None = None
    route_latencies: Callable[[], Mapping[str, Latency]] = dict
    paused_routes: Callable[[], Mapping[str, int]] = dict
    paused_links: Callable[[], Iterable[str]] = tuple
    traces: Callable[[], Mapping[str, int]] = dict
    spans: Callable[[], Mapping[str, int]] = dict
    rates_left_out: Callable[[], int] = int
    gauges: Mapping[str, Callable[[], float]] = field(default_factory=dict)


class HttpCounts(Protocol):
    """HTTP server whose open connections are counted."""

    @property
    def connections(self) -> Sized: ...


class Metrics(Collector):
    """Collector of all metrics; one per process."""

    def __init__(self, version: str, sources: Sources | None = None) -> None:
        """Set the sources. Raises KeyError for a gauge that is not in BROKER_GAUGES."""
        self.version = version
        self.sources = Sources() if sources is None else sources
        if unknown := self.sources.gauges.keys() - BROKER_GAUGES.keys():
            raise KeyError(f"{sorted(unknown)} are not in BROKER_GAUGES")
        self.listeners: dict[str, ListenerStats] = {}
        self.links: dict[str, LinkStats] = {}
        self.mapping_reloads = {"taken": 0, "refused": 0}
        self.rule_reloads = {"taken": 0, "refused": 0}
        self.http_servers: list[HttpCounts] = []
        self.http_refused: Counter[str] = Counter()  # by reason; all are constants of the HTTP server
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def http_connections(self) -> int:
        """Return the number of open connections of all HTTP servers."""
        return sum(len(server.connections) for server in self.http_servers)

    def listener(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> ListenerStats:
        """Create and return the counters of a new listener."""
        stats = self.listeners[name] = ListenerStats(name, protocol, frame_names)
        return stats

    def link(
        self, name: str, protocol: str, frame_names: Sequence[str] = (), addresses: tuple[str, ...] = ()
    ) -> LinkStats:
        """Create and return the counters of a new link to these addresses (`host:port`)."""
        stats = self.links[name] = LinkStats(name, protocol, frame_names, addresses)
        return stats

    def broker(self) -> dict[str, float]:
        """Return the current values of the broker's gauges. Booleans become numbers, which a page can show
        without words for them.
        """
        return {name: +read() for name, read in sorted(self.sources.gauges.items())}

    def endpoints(self) -> Iterator[EndpointStats]:
        """Yield the counters of all listeners, then of all links."""
        yield from self.listeners.values()
        yield from self.links.values()

    def exposed(self, accept: str) -> tuple[bytes, str]:
        """Return the response to /metrics and its content type, the best that the request's `Accept` header
        names. Only OpenMetrics has exemplars.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Read all counters once and yield the metric families."""
        yield InfoMetricFamily(
            "gateway_build",
            "Version of the gateway and of Python.",
            value={
                "version": self.version,
                "python": platform.python_version(),
                "compiled": str(is_compiled()).lower(),
            },
        )
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, (text, labels) in COUNTERS.items():
            families[name] = CounterMetricFamily(name, text, labels=labels)
        for name, (text, labels) in GAUGES.items():
            families[name] = GaugeMetricFamily(name, text, labels=labels)
        for name, values, number in self._samples():
            families[name].add_metric(values, number)
        yield from families.values()
        yield self._latencies()
        yield self._route_latencies()
        if self.sources.turns is not None:
            turns = HistogramMetricFamily(TURN_SECONDS, "Steps of tasks, during which nobody else is served.")
            turns.add_metric((), _cumulative(self.sources.turns), self.sources.turns.sum_secs)
            yield turns
        for name, number in self.broker().items():
            yield GaugeMetricFamily(name, BROKER_GAUGES[name], value=number)
        yield from _attributes(self.sources.store, STORE_COUNTERS, STORE_GAUGES)
        yield from _attributes(self.sources.journal, JOURNAL_COUNTERS, JOURNAL_GAUGES)
        yield from _attributes(self.sources.redaction, REDACTION_COUNTERS, {})

    def _samples(self) -> Iterator[tuple[str, Sequence[str], float]]:
        for stats in self.endpoints():
            yield from _endpoint_samples(stats)
        for listener in self.listeners.values():
            yield from _listener_samples(listener)
        for link in self.links.values():
            yield from _link_samples(link)
        yield from self._route_samples()
        yield from self._paused()
        yield from self._by_one_label()
        yield "gateway_sessions_evicted", (), self.sources.evicted_sessions()
        yield "gateway_engine_sessions_moved", (), self.sources.engine_moved()
        yield "gateway_engine_expirations_shortened", (), self.sources.engine_shortened()
        yield "gateway_dead_letters_dropped", (), self.sources.dropped_letters()
        yield "gateway_dead_letters_refused", (), self.sources.refused_letters()
        for (name, reason), count in self.sources.dead_lettered().items():
            yield "gateway_dead_lettered", (name, reason), count
        for outbox in self.sources.outboxes():
            at = (outbox.link, outbox.route)
            known = (
                ("gateway_outbox_messages", outbox.messages),
                ("gateway_outbox_bytes", outbox.octets),
                ("gateway_outbox_oldest_seconds", outbox.oldest_secs),
            )
            for name, value in known:
                if value is not None:
                    yield name, at, value
        yield "gateway_authorizer_failures", (), self.sources.authorizer_failures()
        yield "gateway_http_connections", (), self.http_connections()
        yield "gateway_rates_left_out", (), self.sources.rates_left_out()
        yield from self._who()
        for where in get_args(Where):
            yield "gateway_internal_errors", (where,), counted[where]

    def _by_one_label(self) -> Iterator[tuple[str, Sequence[str], float]]:
        sources = self.sources
        counts: tuple[tuple[str, Mapping[str, int]], ...] = (
            ("gateway_dropped", sources.dropped()),
            ("gateway_share_refused", sources.share_refused()),
            ("gateway_share_evicted", sources.share_evicted()),
            ("gateway_dead_letters_forwarded", sources.forwarded()),
            ("gateway_deduplication_forgotten", sources.forgotten_ids()),
            ("gateway_mapping_reloads", self.mapping_reloads),
            ("gateway_rule_reloads", self.rule_reloads),
            ("gateway_file_reloads", reloads.counted),
            ("gateway_http_refused", self.http_refused),
            ("gateway_traces", sources.traces()),
            ("gateway_trace_spans", sources.spans()),
        )
        for name, counted_by in counts:
            for label, count in counted_by.items():
                yield name, (label,), count

    def _paused(self) -> Iterator[tuple[str, Sequence[str], float]]:
        for name, held in self.sources.paused_routes().items():
            yield "gateway_route_paused", (name,), 1
            yield "gateway_route_held", (name,), held
        for name in self.sources.paused_links():
            yield "gateway_link_paused", (name,), 1

    def _who(self) -> Iterator[tuple[str, Sequence[str], float]]:
        for (backend, outcome), count in self.sources.authentications().items():
            yield "gateway_authentications", (backend, outcome), count
        for backend, count in self.sources.authentication_failures().items():
            yield "gateway_authentication_failures", (backend,), count
        kept = trail()
        for event, count in kept.counts.items():
            yield "gateway_audit_events", (event, "written"), count - kept.dropped[event]
            yield "gateway_audit_events", (event, "dropped"), kept.dropped[event]

    def _route_samples(self) -> Iterator[tuple[str, Sequence[str], float]]:
        for route in self.sources.routes():
            for outcome in ROUTE_OUTCOMES:
                yield "gateway_route_messages", (route.name, outcome), getattr(route, outcome)
            yield "gateway_route_in_flight", (route.name,), route.in_flight
            yield "gateway_route_lost_properties", (route.name, "reply_to"), route.reply_kept
            for reason, count in route.lost.items():
                yield "gateway_route_lost_properties", (route.name, reason), count
            if route.duplicates and (source := self._endpoint(route.source)) is not None:
                labels = (source.name, source.protocol, route.name)
                yield "gateway_duplicates", labels, route.duplicates

    def disks(self) -> dict[str, dict[str, float]]:
        """Return the counters and gauges of the store and the journal by short names; a missing one is
        omitted.
        """
        found: dict[str, dict[str, float]] = {}
        for part, source, names in (
            ("store", self.sources.store, STORE_COUNTERS | STORE_GAUGES),
            ("journal", self.sources.journal, JOURNAL_COUNTERS | JOURNAL_GAUGES),
        ):
            if source is not None:
                found[part] = {
                    name.removeprefix(f"gateway_{part}_"): float(getattr(source, attribute))
                    for name, (_, attribute) in names.items()
                }
        return found

    def latency_of(self, endpoint: str) -> Latency | None:
        """Return the histogram of acknowledgement times (seconds) at an endpoint, or None if it does not
        exist.
        """
        found = self._endpoint(endpoint)
        return None if found is None else found.latency

    def _endpoint(self, name: str) -> EndpointStats | None:
        return self.listeners.get(name) or self.links.get(name)

    def _latencies(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            SETTLE_SECONDS, "From reading a message to answering its source.", labels=ENDPOINT
        )
        for stats in self.endpoints():
            family.add_metric(
                (stats.name, stats.protocol), _cumulative(stats.latency), stats.latency.sum_secs
            )
        return family

    def _route_latencies(self) -> HistogramMetricFamily:
        text = "From reading a message to its acceptance at the end of a route, or in its outbox."
        family = HistogramMetricFamily(ROUTE_SECONDS, text, labels=("route",))
        for name, latency in self.sources.route_latencies().items():
            family.add_metric((name,), _cumulative(latency), latency.sum_secs)
        return family


class Rows(Collector):
    """Collector of metric families that have been read already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


def detailed(
    rows: Iterable[tuple[str, Sequence[str], float]], left_out: Mapping[str, int], accept: str
) -> tuple[bytes, str]:
    """Return the response to /metrics/detailed, with series of queues and sessions, and its content type.
    `rows` are metrics of QUEUE_SERIES and SESSION_SERIES with their labels, `left_out` are counts of omitted
    ones by kind.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for table, labels in ((QUEUE_SERIES, QUEUE_LABELS), (SESSION_SERIES, SESSION_LABELS)):
        for name, (kind, text) in table.items():
            made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            families[name] = made(name, text, labels=labels)
    for name, values, number in rows:
        families[name].add_metric(values, number)
    told = [family for family in families.values() if family.samples]
    beyond = GaugeMetricFamily(LEFT_OUT, LEFT_OUT_TEXT, labels=("series",))
    for kind, count in left_out.items():
        beyond.add_metric((kind,), count)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Rows([*told, beyond]))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _attributes(
    counted: object | None, counters: Mapping[str, tuple[str, str]], gauges: Mapping[str, tuple[str, str]]
) -> Iterator[Metric]:
    """Yield the metrics that `counted` has in its attributes; none if it is None."""
    if counted is None:
        return
    for name, (text, attribute) in counters.items():
        yield CounterMetricFamily(name, text, value=getattr(counted, attribute))
    for name, (text, attribute) in gauges.items():
        yield GaugeMetricFamily(name, text, value=getattr(counted, attribute))


def _cumulative(latency: Latency) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    total = 0
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for at, count in enumerate(latency.counts):
        total += count
        bound = str(LATENCY_BUCKETS_SECS[at]) if at < len(LATENCY_BUCKETS_SECS) else "+Inf"
        found = latency.exemplars.get(at)
        if found is None:
            buckets.append((bound, total))
        else:
            labels = {"trace_id": found.trace_id, "span_id": found.span_id}
            buckets.append((bound, total, Exemplar(labels, found.seconds, found.utc)))
    return buckets


Sample = tuple[str, Sequence[str], float]


def _endpoint_samples(stats: EndpointStats) -> Iterator[Sample]:
    labels = (stats.name, stats.protocol)
    yield "gateway_connections", labels, stats.connections
    for (version, direction, frame), count in stats.frames().items():
        yield "gateway_frames", (*labels, version, direction, frame), count
    for direction, count in (("in", stats.messages_in), ("out", stats.messages_out)):
        yield "gateway_messages", (*labels, direction), count
    for direction, count in (("in", stats.octets_in), ("out", stats.octets_out)):
        yield "gateway_network_bytes", (*labels, direction), count
    for outcome, reason, count in stats.settled():
        yield "gateway_settled", (*labels, outcome, reason), count
    for reason, count in stats.protocol_errors.counts.items():
        yield "gateway_protocol_errors", (*labels, reason), count


def _listener_samples(stats: ListenerStats) -> Iterator[Sample]:
    labels = (stats.name, stats.protocol)
    yield "gateway_connections_accepted", labels, stats.accepted
    yield "gateway_connections_held", labels, stats.held
    yield "gateway_duplicates", (*labels, ""), stats.duplicates
    for reason, count in stats.refused.counts.items():
        yield "gateway_connections_refused", (*labels, reason), count
    for outcome, count in stats.logins.counts.items():
        yield "gateway_logins", (*labels, outcome), count
    for action, count in stats.denied.counts.items():
        yield "gateway_denied", (*labels, action), count
    for reason, count in stats.answers_lost.counts.items():
        yield "gateway_answers_lost", (*labels, reason), count


def _link_samples(stats: LinkStats) -> Iterator[Sample]:
    labels = (stats.name, stats.protocol)
    yield "gateway_link_up", labels, int(stats.up)
    yield "gateway_link_blocked", labels, int(stats.blocked)
    if stats.leads is not None:
        yield "gateway_link_leader", labels, int(stats.leads)
    for address in stats.addresses:
        yield "gateway_link_address", (*labels, address), int(stats.up and address == stats.address)
    yield "gateway_link_in_flight", labels, stats.in_flight
    yield "gateway_link_reconnects", labels, stats.reconnects
    yield "gateway_link_lacking", labels, len(stats.lacking)
    for kind, count in stats.restored.counts.items():
        yield "gateway_link_restored", (*labels, kind), count
    for reason, count in stats.failures.counts.items():
        yield "gateway_link_failures", (*labels, reason), count
    if DIALECTS[stats.protocol].assurance_max > 1:
        yield "gateway_duplicates", (*labels, ""), stats.duplicates
        yield "gateway_link_filters_refused", labels, stats.filters_refused
        for reason, count in stats.lessened.counts.items():
            yield "gateway_link_lessened", (*labels, reason), count

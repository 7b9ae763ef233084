"""Definitions of all metrics with their help and labels, and the collector that Prometheus scrapes.

The values of a label are out of a limited set (endpoint, protocol, version, direction, frame, route, outcome,
reason): a topic or a client identifier is never the value of a label. The exception are the detailed metrics
of queues and sessions, which are requested separately.
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
    "gateway_network_bytes": ("Bytes read from and written to sockets.", (*ENDPOINT, "direction")),
    "gateway_settled": ("Messages whose source got an outcome.", (*ENDPOINT, "outcome", "reason")),
    "gateway_protocol_errors": ("Connections closed for violating their protocol.", (*ENDPOINT, "reason")),
    "gateway_spool_delayed": (
        "Deliveries of large bodies that were delayed because the body could not be read from disk.",
        (),
    ),
    "gateway_connections_accepted": ("Connections that a listener accepted.", ENDPOINT),
    "gateway_connections_refused": ("Connections that a listener refused.", (*ENDPOINT, "reason")),
    "gateway_connections_held": (
        "Times that publishes of a connection had to wait, for capacity or because of a rate limit.",
        ENDPOINT,
    ),
    "gateway_answers_lost": (
        "Responses to return addresses that reached no requester.",
        (*ENDPOINT, "reason"),
    ),
    "gateway_denied": ("Requests that were denied because the client lacks a right.", (*ENDPOINT, "action")),
    "gateway_logins": ("Logins of clients, by outcome.", (*ENDPOINT, "outcome")),
    "gateway_duplicates": (
        "Repeated messages that were not accepted again: QoS 2, or by a route that deduplicates.",
        (*ENDPOINT, "route"),
    ),
    "gateway_deduplication_forgotten": (
        "Message ids that a route forgot before the end of its window, because of `ids_max`.",
        ("route",),
    ),
    "gateway_dead_letters_forwarded": ("Copies of dead letters, by outcome.", ("outcome",)),
    "gateway_link_reconnects": ("Connections of a link after its first.", ENDPOINT),
    "gateway_link_failures": ("Connections of a link that failed or were lost.", (*ENDPOINT, "reason")),
    "gateway_link_restored": (
        "Exchanges, queues and consumers that a link's broker had lost and that were restored.",
        (*ENDPOINT, "reason"),
    ),
    "gateway_link_lessened": (
        "Messages that a link published with a lower QoS or without retain, as its broker offers no more,"
        " without headers that the broker would obey, or with an expiry shortened to ten years.",
        (*ENDPOINT, "reason"),
    ),
    "gateway_route_messages": ("Messages of a route, by outcome.", ("route", "outcome")),
    "gateway_route_lost_properties": (
        "Properties that the target of a route cannot express.",
        ("route", "reason"),
    ),
    "gateway_engine_expirations_shortened": (
        "Messages whose expiry of more than ten years was shortened to ten, the longest on the cluster.",
        (),
    ),
    "gateway_engine_sessions_moved": ("Sessions that other replicas have taken over from this one.", ()),
    "gateway_sessions_evicted": (
        "MQTT sessions of absent clients that were ended early, because a limit was reached.",
        (),
    ),
    "gateway_dead_letters_dropped": (
        "Dead letters that were deleted for newer ones at a limit, and are lost.",
        (),
    ),
    "gateway_dead_letters_refused": (
        "Times that a message stayed with its source, because of a limit on dead letters.",
        (),
    ),
    "gateway_share_refused": (
        "Requests that were refused at a limit, or at a user's share of it.",
        ("resource",),
    ),
    "gateway_share_evicted": (
        "Entries of users above their equal share that were removed for newer ones.",
        ("resource",),
    ),
    "gateway_dropped": ("Messages that the embedded broker dropped.", ("reason",)),
    "gateway_dead_lettered": ("Messages that became dead letters.", ("route", "reason")),
    "gateway_traces": ("Messages selected for tracing, by outcome.", ("outcome",)),
    "gateway_trace_spans": ("Spans passed to the exporter, by outcome.", ("outcome",)),
    "gateway_mapping_reloads": ("Reloads of mapping files, by outcome.", ("outcome",)),
    "gateway_authorizer_failures": ("Requests without a response from the authorizer.", ()),
    "gateway_rule_reloads": ("Reloads of users, secrets and roles, by outcome.", ("outcome",)),
    "gateway_file_reloads": (
        "Reloads of certificates and keys of tokens, by outcome.",
        ("outcome",),
    ),
    "gateway_authentications": (
        "Logins, by kind of back end and its outcome.",
        ("backend", "outcome"),
    ),
    "gateway_authentication_failures": ("Requests without a response from a back end.", ("backend",)),
    "gateway_audit_events": ("Events of the audit log, by outcome of their lines.", ("event", "outcome")),
    "gateway_http_refused": ("HTTP connections and requests that were not served.", ("reason",)),
    "gateway_internal_errors": (
        "Unexpected errors, by what they cost; the log has their stacks.",
        ("where",),
    ),
}
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "gateway_connections": ("Open connections.", ENDPOINT),
    "gateway_rates_left_out": (
        "Counters without a stored last hour, because of the limit on their number.",
        (),
    ),
    "gateway_http_connections": ("Open HTTP connections.", ()),
    "gateway_link_up": ("1 while the link is connected.", ENDPOINT),
    "gateway_link_required": ("1 for a link without which the gateway is not ready, else 0.", ENDPOINT),
    "gateway_link_leader": ("1 while this replica was elected to consume over the link.", ENDPOINT),
    "gateway_link_paused": ("1 while an operator has paused the link.", ("endpoint",)),
    "gateway_route_paused": ("1 while an operator has paused the route.", ("route",)),
    "gateway_route_held": ("Messages that wait in front of a paused route, not in an outbox.", ("route",)),
    "gateway_link_address": ("1 for the address that a link is connected to.", (*ENDPOINT, "address")),
    "gateway_link_blocked": ("1 while the remote broker blocks publishing by the link.", ENDPOINT),
    "gateway_link_in_flight": ("Messages published by a link and not yet confirmed.", ENDPOINT),
    "gateway_route_in_flight": ("Messages of a route without an outcome yet.", ("route",)),
    "gateway_link_lacking": (
        "Exchanges and queues that routes need and the link's broker does not have.",
        ENDPOINT,
    ),
    "gateway_link_filters_refused": ("Topic filters that a link needs but its broker refuses.", ENDPOINT),
    "gateway_certificate_expiry_timestamp_seconds": (
        "End of a certificate that the configuration names, in seconds since 1970.",
        ("key",),
    ),
    "gateway_disk_bytes": ("Size of the file system of the store or the journal.", ("of",)),
    "gateway_disk_free_bytes": ("Free space of the file system of the store or the journal.", ("of",)),
    "gateway_limit_used_ratio": (
        "Use of a limit, from 0 to 1; the highest where there are several.",
        ("limit",),
    ),
    "gateway_outbox_messages": ("Messages in an outbox; of a shared one, those on the cluster.", OUTBOX),
    "gateway_outbox_bytes": ("Size of messages in an outbox.", OUTBOX),
    "gateway_outbox_oldest_seconds": ("Approximate age of the oldest message in an outbox.", OUTBOX),
}
BROKER_GAUGES: Final[dict[str, str]] = {
    "gateway_bindings": "AMQP bindings of the embedded broker.",
    "gateway_clock_jump_seconds": "Seconds by which the wall clock has jumped ahead of the time in use.",
    "gateway_consumers": "AMQP consumers of the embedded broker.",
    "gateway_dead_letters": "Stored dead letters; of replicas, those of all.",
    "gateway_dead_letters_bytes": "Size of stored dead letters.",
    "gateway_dead_letters_unwanted": "Unwanted messages, without a route or subscriber.",
    "gateway_deduplication_ids": "Message ids that routes remember; of a replica, those that it passed on.",
    "gateway_engine_bindings": "Binding keys of this replica's queue on the cluster.",
    "gateway_engine_clock_skew_seconds": "Seconds by which this machine's clock is ahead of the cluster's.",
    "gateway_engine_retained_reads": "Pages of retained messages that wait for the turn of their user.",
    "gateway_engine_reviewing": "1 while subscriptions of absent clients are checked by changed rules.",
    "gateway_engine_sessions": "Sessions of all replicas, counted every ten seconds.",
    "gateway_engine_retaining_messages": (
        "Messages that wait to be stored as retained by the database, or behind such a message."
    ),
    "gateway_engine_unconfirmed_clients": "Clients whose response waits for the cluster or the database.",
    "gateway_delayed_messages": "Messages that wait in exchanges of type x-delayed-message.",
    "gateway_delayed_bytes": "Size of messages in exchanges of type x-delayed-message.",
    "gateway_dead_lettering_messages": "Dead messages of AMQP queues that wait to be routed as dead letters.",
    "gateway_dead_lettering_bytes": "Size of dead messages that wait to be routed.",
    "gateway_exchanges": "AMQP exchanges of the embedded broker.",
    "gateway_memory_blocked": "1 while the memory limit stops publishers.",
    "gateway_memory_bytes": "Memory of the process.",
    "gateway_memory_shares_full": "Users and addresses over their share of memory.",
    "gateway_memory_limit_bytes": "Memory above which publishers are stopped.",
    "gateway_partial_transfers": "Incomplete restartable AMQP/Fast transfers.",
    "gateway_partial_transfers_bytes": "Bytes received of incomplete restartable transfers.",
    "gateway_queue_bytes": "Size of messages in the embedded broker's queues.",
    "gateway_queue_messages": "Messages in the embedded broker's queues.",
    "gateway_queue_unconsumed_messages": "Messages in queues of the embedded broker without consumers.",
    "gateway_queues": "AMQP queues of the embedded broker.",
    "gateway_retained_messages": "MQTT topics with a retained message.",
    "gateway_ended_sessions": "Ended MQTT sessions whose messages wait for other shared subscribers.",
    "gateway_ended_sessions_bytes": (
        "Size of messages of ended MQTT sessions that wait for other members of their shared subscriptions."
    ),
    "gateway_waiting_wills": "Wills that were refused temporarily and wait for a retry.",
    "gateway_sessions": "MQTT sessions, connected or not.",
    "gateway_spool_bytes": "Bytes of large AMQP bodies on disk.",
    "gateway_spool_files": "Files of large AMQP bodies, complete or not.",
    "gateway_spool_held_bytes": "Memory reserved for AMQP/Fast bodies that are arriving.",
    "gateway_state_pending_operations": "Reads and writes of shared state that wait for the database.",
    "gateway_state_up": "1 while the database of shared state is reachable.",
    "gateway_subscriptions": "MQTT subscriptions.",
}
STORE_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "gateway_store_commits": ("Transactions of the store.", "commits"),
    "gateway_store_messages": ("Messages written to the store.", "messages"),
    "gateway_store_written_bytes": ("Bytes of encoded messages written to the store.", "byte_count"),
    "gateway_store_failures": ("Transactions that failed on disk.", "failures"),
    "gateway_store_refused": ("Messages refused because the disk failed or was full.", "refused"),
    "gateway_store_damaged": ("Stored rows that could not be read.", "damaged"),
}
STORE_GAUGES: Final[dict[str, tuple[str, str]]] = {
    "gateway_store_pending_messages": ("Messages that wait for the disk.", "pending"),
    "gateway_store_pending_bytes": (
        "Size of messages that wait for the disk.",
        "pending_bytes",
    ),
    "gateway_store_file_bytes": ("Size of the store's files, with free space in them.", "file_bytes"),
    "gateway_store_commit_seconds": ("Duration of the last transaction.", "commit_secs"),
    "gateway_store_healthy": ("1 while the store is writable.", "healthy"),
}
JOURNAL_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "gateway_journal_rows": ("Rows written to the journal.", "rows"),
    "gateway_journal_written_bytes": ("Bytes written to the journal.", "byte_count"),
    "gateway_journal_dropped": ("Rows dropped because the journal's disk was too slow.", "dropped"),
    "gateway_journal_errors": ("Writes of the journal that failed.", "errors"),
}
REDACTION_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "gateway_journal_redacted": ("Messages that the journal has redacted, by `private`.", "redacted"),
    "gateway_journal_withheld": (
        "Bodies that the journal has omitted, because `private` names fields and they are not JSON.",
        "withheld_count",
    ),
}
JOURNAL_GAUGES: Final[dict[str, tuple[str, str]]] = {
    "gateway_journal_backlog_rows": ("Rows that wait to be written.", "backlog"),
    "gateway_journal_healthy": ("1 while the journal is writable.", "healthy"),
}
Series = tuple[str, str]
"""Kind of a metric (`gauge` or `counter`), and its help."""
QUEUE_LABELS: Final = ("protocol", "virtual_host", "kind", "queue")
QUEUE_SERIES: Final[dict[str, Series]] = {
    "gateway_detailed_queue_messages": ("gauge", "Ready messages of a queue."),
    "gateway_detailed_queue_bytes": ("gauge", "Size of ready messages of a queue."),
    "gateway_detailed_queue_unacknowledged": ("gauge", "Unacknowledged messages of a queue."),
    "gateway_detailed_queue_consumers": ("gauge", "Consumers of a queue."),
    "gateway_detailed_queue_in": ("counter", "Messages that a queue received."),
    "gateway_detailed_queue_out": ("counter", "Messages that left a queue for any reason."),
}
SESSION_LABELS: Final = ("client",)
SESSION_SERIES: Final[dict[str, Series]] = {
    "gateway_detailed_session_messages": ("gauge", "Messages that wait in an MQTT session."),
    "gateway_detailed_session_in_flight": ("gauge", "Messages that a session's client has not acknowledged."),
    "gateway_detailed_session_subscriptions": ("gauge", "Subscriptions of a session."),
    "gateway_detailed_session_connected": ("gauge", "1 while a session's client is connected."),
}
LEFT_OUT: Final = "gateway_detailed_left_out"
LEFT_OUT_TEXT: Final = "Matching queues or sessions that are omitted because of the limit on their number."
WORKER_SERIES: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "gateway_worker_up": ("gauge", "1 while the worker serves.", ("worker",)),
    "gateway_worker_restarts": (
        "counter",
        "Restarts of a worker, because it ended or did not respond.",
        ("worker", "reason"),
    ),
}
"""Kind, help and labels of the metrics that the supervisor reports about its workers."""
SETTLE_SECONDS: Final = "gateway_settle_seconds"
ROUTE_SECONDS: Final = "gateway_route_seconds"
TURN_SECONDS: Final = "gateway_loop_turn_seconds"
ROUTE_OUTCOMES: Final = ("matched", "delivered", "failed", "retried", "dropped", "unparsable", "undecided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Functions and objects from which the metrics are read at each scrape.

    Functions that return a mapping have these keys: `gauges` the names in BROKER_GAUGES; `dropped` reasons;
    `dead_lettered` routes with reasons; `share_refused` and `share_evicted` kinds of resources; `forwarded`
    (copies of dead letters), `traces` and `spans` outcomes; `forgotten_ids` routes; `authentications` back
    ends with outcomes. `paused_routes` has the number of messages that each paused route holds.
    `certificates` has expiry times by configuration key, `disk_space` the free and the total bytes,
    `limit_ratios` the used fraction of each limit. `store`, `journal` and `redaction` are objects with the
    attributes that their tables of metrics name. `turns` is the histogram of the durations of the event
    loop's steps.
    """

    routes: Callable[[], Iterable[RouteCounts]] = tuple
    dropped: Callable[[], Mapping[str, int]] = dict
    evicted_sessions: Callable[[], int] = int
    share_refused: Callable[[], Mapping[str, int]] = dict
    share_evicted: Callable[[], Mapping[str, int]] = dict
    engine_moved: Callable[[], int] = int
    engine_shortened: Callable[[], int] = int
    dropped_letters: Callable[[], int] = int
    delayed_bodies: Callable[[], int] = int
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
    certificates: Callable[[], Mapping[str, float]] = dict
    disk_space: Callable[[], Mapping[str, tuple[int, int]]] = dict
    limit_ratios: Callable[[], Mapping[str, float]] = dict
    traces: Callable[[], Mapping[str, int]] = dict
    spans: Callable[[], Mapping[str, int]] = dict
    rates_left_out: Callable[[], int] = int
    gauges: Mapping[str, Callable[[], float]] = field(default_factory=dict)


class HttpCounts(Protocol):
    """HTTP server, as far as the metrics need it."""

    @property
    def connections(self) -> Sized:
        """Open connections of the server."""


class Metrics(Collector):
    """All metrics of a process, as a collector for the Prometheus client library."""

    def __init__(self, version: str, sources: Sources | None = None) -> None:
        """Set the version and the sources of the metrics.

        Raises KeyError for a gauge whose name is not in BROKER_GAUGES.
        """
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
        """Return the number of open connections to all HTTP servers together."""
        return sum(len(server.connections) for server in self.http_servers)

    def listener(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> ListenerStats:
        """Create and return the counters of a new listener.

        `frame_names` has the names of the protocol's frames, by number.
        """
        stats = self.listeners[name] = ListenerStats(name, protocol, frame_names)
        return stats

    def link(
        self, name: str, protocol: str, frame_names: Sequence[str] = (), addresses: tuple[str, ...] = ()
    ) -> LinkStats:
        """Create and return the counters of a new link.

        `frame_names` has the names of the protocol's frames, by number. `addresses` are those of the broker,
        as host:port.
        """
        stats = self.links[name] = LinkStats(name, protocol, frame_names, addresses)
        return stats

    def broker(self) -> dict[str, float]:
        """Return the present values of the broker's gauges by name.

        A Boolean becomes 0 or 1, because the console shows each gauge as a number.
        """
        return {name: +read() for name, read in sorted(self.sources.gauges.items())}

    def endpoints(self) -> Iterator[EndpointStats]:
        """Yield the counters of all listeners, then of all links."""
        yield from self.listeners.values()
        yield from self.links.values()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the page of metrics, and its content type.

        `accept` is the header `Accept` of the request, which selects the format of Prometheus or OpenMetrics.
        Only OpenMetrics includes exemplars.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Read all counters and gauges once, and yield them as metric families."""
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
            turns = HistogramMetricFamily(
                TURN_SECONDS, "Duration of steps of tasks, during which no client is served."
            )
            turns.add_metric((), _cumulative(self.sources.turns), self.sources.turns.sum_secs)
            yield turns
        for name, number in self.broker().items():
            yield GaugeMetricFamily(name, BROKER_GAUGES[name], value=number)
        yield from _attributes(self.sources.store, STORE_COUNTERS, STORE_GAUGES)
        yield from _attributes(self.sources.journal, JOURNAL_COUNTERS, JOURNAL_GAUGES)
        yield from _attributes(self.sources.redaction, REDACTION_COUNTERS, {})

    def _samples(self) -> Iterator[tuple[str, Sequence[str], float]]:
        """Yield name, label values and value of each sample of the metrics in COUNTERS and GAUGES."""
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
        yield "gateway_spool_delayed", (), self.sources.delayed_bodies()
        yield "gateway_dead_letters_dropped", (), self.sources.dropped_letters()
        yield "gateway_dead_letters_refused", (), self.sources.refused_letters()
        for (name, reason), count in self.sources.dead_lettered().items():
            yield "gateway_dead_lettered", (name, reason), count
        for outbox in self.sources.outboxes():
            at = (outbox.link, outbox.route)
            named_values = (
                ("gateway_outbox_messages", outbox.messages),
                ("gateway_outbox_bytes", outbox.messages_bytes),
                ("gateway_outbox_oldest_seconds", outbox.oldest_secs),
            )
            for name, value in named_values:
                if value is not None:
                    yield name, at, value
        yield "gateway_authorizer_failures", (), self.sources.authorizer_failures()
        yield "gateway_http_connections", (), self.http_connections()
        yield "gateway_rates_left_out", (), self.sources.rates_left_out()
        yield from self._authentication_rows()
        yield from self._shortages()
        for where in get_args(Where):
            yield "gateway_internal_errors", (where,), counted[where]

    def _by_one_label(self) -> Iterator[tuple[str, Sequence[str], float]]:
        """Yield the samples of metrics with a single label, whose values are the keys of a dictionary.

        Each sample is a tuple of name, label values and value.
        """
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
        for name, count in self.sources.paused_routes().items():
            yield "gateway_route_paused", (name,), 1
            yield "gateway_route_held", (name,), count
        for name in self.sources.paused_links():
            yield "gateway_link_paused", (name,), 1

    def _shortages(self) -> Iterator[tuple[str, Sequence[str], float]]:
        """Yield the samples about resources that can run out: certificates, disk space and limits.

        Each sample is a tuple of name, label values and value.
        """
        for key, end in self.sources.certificates().items():
            yield "gateway_certificate_expiry_timestamp_seconds", (key,), end
        for of, (free, total) in self.sources.disk_space().items():
            yield "gateway_disk_free_bytes", (of,), free
            yield "gateway_disk_bytes", (of,), total
        for limit, ratio in self.sources.limit_ratios().items():
            yield "gateway_limit_used_ratio", (limit,), ratio

    def _authentication_rows(self) -> Iterator[tuple[str, Sequence[str], float]]:
        """Yield the samples about authentication and about the audit log.

        Each sample is a tuple of name, label values and value.
        """
        for (backend, outcome), count in self.sources.authentications().items():
            yield "gateway_authentications", (backend, outcome), count
        for backend, count in self.sources.authentication_failures().items():
            yield "gateway_authentication_failures", (backend,), count
        audit = trail()
        for event, count in audit.counts.items():
            yield "gateway_audit_events", (event, "written"), count - audit.dropped[event]
            yield "gateway_audit_events", (event, "dropped"), audit.dropped[event]

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
        """Return the counters and gauges of the store and of the journal.

        The keys are `store` and `journal`, and then the names of the metrics without their prefix. The store
        or the journal is omitted if it is disabled.
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
        """Return the latency histogram of an endpoint, or None if there is no such endpoint.

        Latency is the time from reading a message to the response to its source.
        """
        found = self._endpoint(endpoint)
        return None if found is None else found.latency

    def _endpoint(self, name: str) -> EndpointStats | None:
        return self.listeners.get(name) or self.links.get(name)

    def _latencies(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            SETTLE_SECONDS, "Time from reading a message to the response to its source.", labels=ENDPOINT
        )
        for stats in self.endpoints():
            family.add_metric(
                (stats.name, stats.protocol), _cumulative(stats.latency), stats.latency.sum_secs
            )
        return family

    def _route_latencies(self) -> HistogramMetricFamily:
        text = "Time from reading a message to its acceptance by the route's target or outbox."
        family = HistogramMetricFamily(ROUTE_SECONDS, text, labels=("route",))
        for name, latency in self.sources.route_latencies().items():
            family.add_metric((name,), _cumulative(latency), latency.sum_secs)
        return family


class CollectedFamilies(Collector):
    """Collector for the Prometheus client library that returns `families`, which were read before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the metric families."""
        return self._families


def detailed(
    rows: Iterable[tuple[str, Sequence[str], float]], left_out: Mapping[str, int], accept: str
) -> tuple[bytes, str]:
    """Return a page with the metrics of single queues and sessions, and its content type.

    `rows` are tuples of name, label values and value, for metrics in QUEUE_SERIES and SESSION_SERIES.
    `left_out` has the number of queues or sessions that are not in `rows`, by kind. `accept` is the header
    `Accept` of the request.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for table, labels in ((QUEUE_SERIES, QUEUE_LABELS), (SESSION_SERIES, SESSION_LABELS)):
        for name, (kind, text) in table.items():
            made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            families[name] = made(name, text, labels=labels)
    for name, values, number in rows:
        families[name].add_metric(values, number)
    nonempty = [family for family in families.values() if family.samples]
    beyond = GaugeMetricFamily(LEFT_OUT, LEFT_OUT_TEXT, labels=("series",))
    for kind, count in left_out.items():
        beyond.add_metric((kind,), count)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CollectedFamilies([*nonempty, beyond]))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _attributes(
    counted: object | None, counters: Mapping[str, tuple[str, str]], gauges: Mapping[str, tuple[str, str]]
) -> Iterator[Metric]:
    """Yield metrics whose values are attributes of the object `counted`. Yield nothing if it is None.

    `counters` and `gauges` have the help text of each metric and the name of the attribute, by the metric's
    name.
    """
    if counted is None:
        return
    for name, (text, attribute) in counters.items():
        yield CounterMetricFamily(name, text, value=getattr(counted, attribute))
    for name, (text, attribute) in gauges.items():
        yield GaugeMetricFamily(name, text, value=getattr(counted, attribute))


def _cumulative(latency: Latency) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the buckets of a histogram in the form that the Prometheus client library expects.

    Each bucket has its upper bound, the number of values up to this bound, and its exemplar if there is one.
    """
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
    for direction, count in (("in", stats.bytes_in), ("out", stats.bytes_out)):
        yield "gateway_network_bytes", (*labels, direction), count
    for outcome, reason, count in stats.settled_counts():
        yield "gateway_settled", (*labels, outcome, reason), count
    for reason, count in stats.protocol_errors.counts.items():
        yield "gateway_protocol_errors", (*labels, reason), count


def _listener_samples(stats: ListenerStats) -> Iterator[Sample]:
    labels = (stats.name, stats.protocol)
    yield "gateway_connections_accepted", labels, stats.accepted
    yield "gateway_connections_held", labels, stats.pause_count
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
    yield "gateway_link_required", labels, int(stats.required)
    yield "gateway_link_blocked", labels, int(stats.blocked)
    if stats.is_elected is not None:
        yield "gateway_link_leader", labels, int(stats.is_elected)
    for address in stats.addresses:
        yield "gateway_link_address", (*labels, address), int(stats.up and address == stats.address)
    yield "gateway_link_in_flight", labels, stats.in_flight
    yield "gateway_link_reconnects", labels, stats.reconnects
    yield "gateway_link_lacking", labels, len(stats.missing_objects)
    for kind, count in stats.restored.counts.items():
        yield "gateway_link_restored", (*labels, kind), count
    for reason, count in stats.failures.counts.items():
        yield "gateway_link_failures", (*labels, reason), count
    if DIALECTS[stats.protocol].assurance_max > 1:
        yield "gateway_duplicates", (*labels, ""), stats.duplicates
        yield "gateway_link_filters_refused", labels, stats.filters_refused
        for reason, count in stats.degraded.counts.items():
            yield "gateway_link_lessened", (*labels, reason), count

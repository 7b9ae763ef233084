"""State of the gateway as one JSON document, which the console receives every two seconds.

Counters only grow; for a rate, subtract two documents and divide by the difference of `at_secs`.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import EndpointStats, LinkStats, ListenerStats, RouteCounts

FRAMES_SHOWN_MAX: Final = 200  # Keeps a document that is polled often small.


def status(metrics: Metrics, reasons: list[str], at_secs: float, started_secs: float) -> dict[str, Any]:
    """Return the state of the gateway as one JSON object, with the counters in `metrics`.

    `at_secs` is the present time and `started_secs` the start time, both in seconds of a monotonic clock.
    `reasons` are the reasons why the process is not ready; an empty list means that it is ready.
    """
    return {
        "version": metrics.version,
        "at_secs": at_secs,
        "uptime_secs": at_secs - started_secs,
        "ready": not reasons,
        "not_ready": reasons,
        "endpoints": [_endpoint(stats) for stats in metrics.endpoints()],
        "routes": [
            route_counters(route) | {"reply_kept": route.reply_kept, "lost": route.lost}
            for route in metrics.sources.routes()
        ],
        "broker": metrics.broker(),
        "disks": metrics.disks(),
        "mapping_reloads": dict(metrics.mapping_reloads),
    }


def endpoint_counters(stats: EndpointStats) -> dict[str, Any]:
    """Return the name, the protocol and the counters of a listener or link."""
    return {
        "name": stats.name,
        "protocol": stats.protocol,
        "connections": stats.connections,
        "messages_in": stats.messages_in,
        "messages_out": stats.messages_out,
        "bytes_in": stats.bytes_in,
        "bytes_out": stats.bytes_out,
    }


def _endpoint(stats: EndpointStats) -> dict[str, Any]:
    frames = sorted(stats.frames().items(), key=lambda item: -item[1])[:FRAMES_SHOWN_MAX]
    common: dict[str, Any] = {
        **endpoint_counters(stats),
        "settled": [
            {"outcome": outcome, "reason": reason, "count": count}
            for outcome, reason, count in stats.settled_counts()
        ],
        "protocol_errors": dict(stats.protocol_errors.counts),
        "latency_secs": {"p50": stats.latency.quantile(0.5), "p99": stats.latency.quantile(0.99)},
        "frames": [
            {"version": version, "direction": direction, "frame": frame, "count": count}
            for (version, direction, frame), count in frames
        ],
    }
    return common | _endpoint_facts(stats)


def _endpoint_facts(stats: EndpointStats) -> dict[str, Any]:
    """Return those fields of an endpoint's state that only listeners or only links have."""
    if isinstance(stats, ListenerStats):
        return {"kind": "listener", "accepted": stats.accepted, "refused": dict(stats.refused.counts)}
    assert isinstance(stats, LinkStats)
    return {
        "kind": "link",
        "up": stats.up,
        "address": stats.address,
        "blocked": stats.blocked,
        "reconnects": stats.reconnects,
        "in_flight": stats.in_flight,
        "failures": dict(stats.failures.counts),
        "filters_refused": stats.filters_refused,
    }


def route_counters(route: RouteCounts) -> dict[str, Any]:
    """Return the name, the endpoints and the counters of a route."""
    return {
        "name": route.name,
        "source": route.source,
        "target": route.target_endpoint,
        "matched": route.matched,
        "delivered": route.delivered,
        "failed": route.failed,
        "retried": route.retried,
        "dropped": route.dropped,
        "unparsable": route.unparsable,
        "undecided": route.undecided,
        "duplicates": route.duplicates,
        "in_flight": route.in_flight,
    }

"""Counted things for tests of what is seen from outside: machines, streams and routes as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.telemetry.metrics import Metrics, Sources

Counts = list[int] | dict[str, int]


@dataclass
class Machine:
    """A protocol machine that counts in lists or dictionaries."""

    received: Counts = field(default_factory=lambda: [0, 1, 5])
    sent: Counts = field(default_factory=lambda: [0, 0, 3])


@dataclass
class ResolvedRoute:
    """A route's counters."""

    name: str = "telemetry"
    source: str = "mqtt"
    target_endpoint: str = "erp"
    matched: int = 10
    delivered: int = 7
    failed: int = 1
    retried: int = 0
    dropped: int = 0
    unparsable: int = 2
    undecided: int = 0
    reply_kept: int = 1
    lost: dict[str, int] = field(default_factory=lambda: {"header_name_long": 3})
    in_flight: int = 2
    duplicates: int = 4


@dataclass
class Waiting:
    """An outbox's counters."""

    link: str = "erp"
    route: str = "telemetry"
    messages: int = 9
    messages_bytes: int = 900
    oldest_secs: float = 1.5


def metrics_with_traffic(**more: Any) -> Metrics:
    """One listener with a connection, one link that is up, and one route; `more` sources."""
    sources = Sources(
        routes=lambda: [ResolvedRoute()],
        forgotten_ids=lambda: {"telemetry": 6},
        forwarded=lambda: {"refused": 8},
        outboxes=lambda: [Waiting()],
        gauges={"gateway_queues": lambda: 3},
        **more,
    )
    metrics = Metrics("1.2.3", sources)
    listener = metrics.listener("mqtt", "mqtt", ("", "connect", "publish"))
    machine = Machine()
    listener.accepted += 1
    listener.add_connection(machine)
    listener.pause_count = 3
    listener.bytes_in, listener.bytes_out = 100, 30
    listener.set_version(machine, "5.0")
    listener.messages_in += 5
    listener.accepted_messages += 4
    listener.refuse(Outcome(Verdict.REJECTED, Reason.QUOTA))
    listener.refused.add("credentials", 2)
    listener.latency.observe(0.0007, 4)
    link = metrics.link("erp", "amqp091", addresses=("rabbit-1:5672", "rabbit-2:5672"))
    link.address = link.addresses[1]
    link.blocked = True
    link.up = True
    link.connects = 3
    link.failures.add("refused", 2)
    link.add_connection(Machine({"basic.ack": 4}, {"basic.publish": 4}))
    link.bytes_in, link.bytes_out = 7, 8
    return metrics

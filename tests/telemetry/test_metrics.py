"""Metrics: what is counted is what Prometheus reads, under names and labels that hold to the rules."""

from __future__ import annotations

import re
from copy import copy

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.metrics import BROKER_GAUGES, COUNTERS, GAUGES, Metrics, Sources
from gateway.telemetry.stats import REASONS_MAX, EndpointStats, Latency, ListenerStats, Reasons
from tests.telemetry.samples import Counts, Machine, ResolvedRoute, metrics_with_traffic

LABELS = {
    "key",  # of the configuration
    "limit",
    "of",  # the store or the journal
    "endpoint",
    "protocol",
    "version",
    "direction",
    "frame",
    "route",
    "outcome",
    "reason",
    "address",
    "where",
    "event",
    "log",
    "action",
    "backend",
    "resource",
}


def read(metrics: Metrics) -> dict[str, float]:
    """Samples as `name{label="value",...}` with the labels sorted."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition("")[0].decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


SAMPLES = [
    ('gateway_connections{endpoint="mqtt",protocol="mqtt"}', 1),
    ('gateway_connections_accepted_total{endpoint="mqtt",protocol="mqtt"}', 1),
    ('gateway_connections_held_total{endpoint="mqtt",protocol="mqtt"}', 3),
    ('gateway_connections_refused_total{endpoint="mqtt",protocol="mqtt",reason="credentials"}', 2),
    ('gateway_frames_total{direction="in",endpoint="mqtt",frame="publish",protocol="mqtt",version="5.0"}', 5),
    (
        'gateway_frames_total{direction="out",endpoint="mqtt",frame="publish",protocol="mqtt",version="5.0"}',
        3,
    ),
    (
        'gateway_frames_total{direction="out",endpoint="erp",frame="basic.publish",'
        'protocol="amqp091",version="unknown"}',
        4,
    ),
    ('gateway_messages_total{direction="in",endpoint="mqtt",protocol="mqtt"}', 5),
    ('gateway_network_bytes_total{direction="in",endpoint="mqtt",protocol="mqtt"}', 100),
    ('gateway_network_bytes_total{direction="out",endpoint="erp",protocol="amqp091"}', 8),
    ('gateway_settled_total{endpoint="mqtt",outcome="accepted",protocol="mqtt",reason="none"}', 4),
    ('gateway_settled_total{endpoint="mqtt",outcome="rejected",protocol="mqtt",reason="quota"}', 1),
    ('gateway_settle_seconds_bucket{endpoint="mqtt",le="0.0005",protocol="mqtt"}', 0),
    ('gateway_settle_seconds_bucket{endpoint="mqtt",le="0.001",protocol="mqtt"}', 4),
    ('gateway_settle_seconds_bucket{endpoint="mqtt",le="+Inf",protocol="mqtt"}', 4),
    ('gateway_settle_seconds_count{endpoint="mqtt",protocol="mqtt"}', 4),
    ('gateway_settle_seconds_sum{endpoint="mqtt",protocol="mqtt"}', 0.0028),
    ('gateway_link_up{endpoint="erp",protocol="amqp091"}', 1),
    ('gateway_link_reconnects_total{endpoint="erp",protocol="amqp091"}', 2),
    ('gateway_link_failures_total{endpoint="erp",protocol="amqp091",reason="refused"}', 2),
    ('gateway_route_messages_total{outcome="delivered",route="telemetry"}', 7),
    ('gateway_route_messages_total{outcome="unparsable",route="telemetry"}', 2),
    ('gateway_route_in_flight{route="telemetry"}', 2),
    ('gateway_route_lost_properties_total{reason="reply_to",route="telemetry"}', 1),
    ('gateway_route_lost_properties_total{reason="header_name_long",route="telemetry"}', 3),
    ('gateway_duplicates_total{endpoint="mqtt",protocol="mqtt",route=""}', 0),
    ('gateway_duplicates_total{endpoint="mqtt",protocol="mqtt",route="telemetry"}', 4),
    ('gateway_deduplication_forgotten_total{route="telemetry"}', 6),
    ('gateway_dead_letters_forwarded_total{outcome="refused"}', 8),
    ('gateway_outbox_messages{endpoint="erp",route="telemetry"}', 9),
    ('gateway_outbox_bytes{endpoint="erp",route="telemetry"}', 900),
    ('gateway_outbox_oldest_seconds{endpoint="erp",route="telemetry"}', 1.5),
    ('gateway_link_blocked{endpoint="erp",protocol="amqp091"}', 1),
    ('gateway_link_address{address="rabbit-1:5672",endpoint="erp",protocol="amqp091"}', 0),
    ('gateway_link_address{address="rabbit-2:5672",endpoint="erp",protocol="amqp091"}', 1),
    ('gateway_mapping_reloads_total{outcome="refused"}', 0),
    ('gateway_rule_reloads_total{outcome="refused"}', 0),
    ("gateway_queues", 3),
]


@pytest.mark.parametrize("sample, value", SAMPLES)
def test_what_is_counted_is_read(sample: str, value: float) -> None:
    assert read(metrics_with_traffic())[sample] == pytest.approx(value)


def test_the_build_and_the_process_are_told() -> None:
    found = read(Metrics("1.2.3"))
    assert any(name.startswith("gateway_build_info{") and 'version="1.2.3"' in name for name in found)
    assert found["process_resident_memory_bytes"] > 0


def test_names_and_labels_hold_to_the_rules() -> None:
    for name in (*COUNTERS, *GAUGES, *BROKER_GAUGES):
        assert re.fullmatch(r"gateway_[a-z_]+[a-z]", name)
        assert not name.endswith("_total"), "the exposition adds it to counters"
    for _, labels in (*COUNTERS.values(), *GAUGES.values()):
        assert set(labels) <= LABELS


def test_a_gauge_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(KeyError, match="not in BROKER_GAUGES"):
        Metrics("0", Sources(gauges={"gateway_topics": lambda: 0}))


def test_what_is_true_or_false_is_a_number() -> None:
    metrics = Metrics("0.0.1", Sources(gauges={"gateway_memory_blocked": lambda: False}))
    assert repr(metrics.broker()) == "{'gateway_memory_blocked': 0}", "JSON tells the two apart"


def test_routes_are_asked_at_every_scrape() -> None:
    routes: list[ResolvedRoute] = []
    metrics = Metrics("0", Sources(routes=lambda: routes))
    assert not any("gateway_route" in name for name in read(metrics))
    routes.append(ResolvedRoute("new"))
    assert 'gateway_route_in_flight{route="new"}' in read(metrics)


def test_a_closed_connection_leaves_its_sums() -> None:
    stats = ListenerStats("mqtt", "mqtt", ("", "connect", "publish"))
    first, second = Machine(), Machine([0, 1, 0], [0, 0, 0])
    for machine in (first, second):
        stats.add_connection(machine)
        stats.set_version(machine, "3.1.1")
    before = stats.frames()
    stats.remove_connection(first)
    stats.remove_connection(first)
    assert stats.frames() == before
    assert before == {
        ("3.1.1", "in", "connect"): 2,
        ("3.1.1", "in", "publish"): 5,
        ("3.1.1", "out", "publish"): 3,
    }
    assert stats.connections == 1


def test_a_connection_that_never_spoke_has_an_unknown_version() -> None:
    stats = EndpointStats("mqtt", "mqtt", ("", "connect"))
    machine = Machine([0, 1], [0, 0])
    stats.add_connection(machine)
    assert stats.frames() == {("unknown", "in", "connect"): 1}
    stats.remove_connection(machine)
    assert stats.frames() == {("unknown", "in", "connect"): 1}


COUNTS: list[tuple[Counts, Counts]] = [([0, 1, 2], [0, 3, 0]), ({"connect": 1, "publish": 2}, {"connect": 3})]


@pytest.mark.parametrize("first, second", COUNTS, ids=["lists", "dictionaries"])
def test_connections_of_one_version_share_their_counts(first: Counts, second: Counts) -> None:
    stats = EndpointStats("mqtt", "mqtt", ("", "connect", "publish"))
    one, other = Machine(first, second), Machine(copy(first), copy(second))
    for machine in (one, other):
        stats.add_connection(machine)
        stats.set_version(machine, "5.0")
    for counts in (one.received, other.received):
        counts["publish" if isinstance(counts, dict) else 2] += 10  # type: ignore[index]
    stats.remove_connection(one)
    assert stats.frames() == {
        ("5.0", "in", "connect"): 2,
        ("5.0", "in", "publish"): 24,
        ("5.0", "out", "connect"): 6,
    }


def test_reasons_are_bounded() -> None:
    reasons = Reasons()
    for number in range(REASONS_MAX + 5):
        reasons.add(f"reason {number}")
    assert len(reasons.counts) == REASONS_MAX + 1
    assert reasons.counts["other"] == 5
    assert reasons.total == REASONS_MAX + 5


QUANTILES = [
    ([], 0.5, None),
    ([(0.0001, 1)], 0.5, 0.0001),
    ([(0.00011, 1)], 0.5, 0.00025),
    ([(0.0002, 99), (0.2, 1)], 0.99, 0.00025),
    ([(0.0002, 98), (0.2, 2)], 0.99, 0.25),
    ([(60.0, 1)], 0.5, 10.0),
]


@pytest.mark.parametrize("observed, share, expected", QUANTILES)
def test_a_quantile_is_its_buckets_bound(
    observed: list[tuple[float, int]], share: float, expected: float | None
) -> None:
    latency = Latency()
    for seconds, count in observed:
        latency.observe(seconds, count)
    assert latency.quantile(share) == expected


def test_what_only_mqtt_links_count() -> None:
    metrics = Metrics("1.2.3")
    metrics.link("erp", "amqp091")
    link = metrics.link("plant", "mqtt")
    link.degraded.add("qos", 3)
    link.filters_refused, link.duplicates = 1, 2
    lines = metrics.exposition("")[0].decode().splitlines()
    assert 'gateway_link_lessened_total{endpoint="plant",protocol="mqtt",reason="qos"} 3.0' in lines
    assert 'gateway_duplicates_total{endpoint="plant",protocol="mqtt",route=""} 2.0' in lines
    found = [line for line in lines if line.startswith("gateway_link_filters_refused{")]
    assert found == ['gateway_link_filters_refused{endpoint="plant",protocol="mqtt"} 1.0']

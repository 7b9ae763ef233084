"""The metrics of several workers on one page."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_plain
from prometheus_client.samples import Sample

from gateway.telemetry.worker_metrics import OPENMETRICS, MergedMetrics
from tests.telemetry.samples import metrics_with_traffic


def page_of(metrics: object) -> str:
    return metrics.exposition(OPENMETRICS)[0].decode()  # type: ignore[attr-defined]


def samples(page: bytes, name: str) -> list[Sample]:
    return [one for family in read_plain(page.decode()) for one in family.samples if one.name == name]


def test_each_series_says_whose_it_is() -> None:
    pages = {number: page_of(metrics_with_traffic()) for number in (1, 2)}
    rows = [("gateway_worker_up", ("1",), 1.0), ("gateway_worker_restarts", ("2", "died"), 3.0)]
    page, content_type = MergedMetrics().exposition(pages, rows, "")
    assert content_type.startswith("text/plain")
    found = samples(page, "gateway_connections_accepted_total")
    assert [(one.labels["worker"], one.value) for one in found] == [("1", 1), ("2", 1)]
    assert {one.labels["worker"] for one in samples(page, "process_open_fds")} == {"0", "1", "2"}
    (restarts,) = samples(page, "gateway_worker_restarts_total")
    assert (restarts.labels, restarts.value) == ({"worker": "2", "reason": "died"}, 3)
    assert page.count(b"# TYPE gateway_connections_accepted_total ") == 1


def test_nothing_of_a_page_is_lost() -> None:
    """Every sample of a worker comes back as it was, but for its label; histograms whole."""
    own = page_of(metrics_with_traffic())
    page, content_type = MergedMetrics().exposition({7: own}, [], OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    merged = [
        one._replace(labels={key: value for key, value in one.labels.items() if key != "worker"})
        for family in read_openmetrics(page.decode())
        for one in family.samples
        if one.labels.get("worker") == "7"
    ]
    expected = [one for family in read_openmetrics(own) for one in family.samples]
    assert sorted(map(str, merged)) == sorted(map(str, expected))
    assert any(one.name == "gateway_settle_seconds_bucket" for one in merged)


def test_a_page_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="EOF"):
        MergedMetrics().exposition({1: "gateway_connections 1\n"}, [], "")

"""Metrics of all worker processes, merged into one response.

Each worker's series keep their names and get a label with its number. Sums and rates over workers are left to
Prometheus, which handles counters that restart at 0. The client library's mode for several processes cannot
be used: it adds up its own values in shared files, whereas these counters are read from memory at each
scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, get_args

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.containment import Where, counted
from gateway.telemetry.metrics import COUNTERS, WORKER_SERIES, CollectedFamilies

WORKER: Final = "worker"
SUPERVISOR: Final = "0"
"""Worker number in the metrics of the supervisor, the process that has started the workers."""
ERRORS: Final = "gateway_internal_errors"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
"""Format in which workers report their metrics: the one with exemplars."""


class MergedMetrics:
    """Merger of the metrics of all worker processes into one page, in the process that supervises them."""

    def __init__(self) -> None:
        self._own = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._own)
        PlatformCollector(registry=self._own)
        GCCollector(registry=self._own)

    def exposition(
        self, pages: Mapping[int, str], rows: Iterable[tuple[str, Sequence[str], float]], accept: str
    ) -> tuple[bytes, str]:
        """Return a page with the metrics of all workers and of the supervisor, and its content type.

        `pages` has the page of each worker, by its number, in the format OPENMETRICS. `rows` are tuples of
        name, label values and value, for metrics in WORKER_SERIES. `accept` is the header `Accept` of the
        request. Raises ValueError if a page is malformed.
        """
        text, labels = COUNTERS[ERRORS]
        errors = CounterMetricFamily(ERRORS, text, labels=labels)
        for where in get_args(Where):
            errors.add_metric((where,), counted[where])
        merged: dict[str, Metric] = {}
        _merge(merged, errors, SUPERVISOR)
        for family in self._own.collect():
            _merge(merged, family, SUPERVISOR)
        for number, page in sorted(pages.items()):
            for family in _read(page):
                _merge(merged, family, str(number))
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(CollectedFamilies([*merged.values(), *_worker_families(rows)]))
        return encode(registry), content_type


def _read(page: str) -> Iterator[Metric]:
    yield from text_string_to_metric_families(page)  # type: ignore[no-untyped-call]


def _merge(merged: dict[str, Metric], family: Metric, worker: str) -> None:
    found = merged.get(family.name)
    if found is None:
        found = merged[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
    found.samples += [sample._replace(labels={WORKER: worker, **sample.labels}) for sample in family.samples]


def _worker_families(rows: Iterable[tuple[str, Sequence[str], float]]) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for name, (kind, text, labels) in WORKER_SERIES.items():
        made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        families[name] = made(name, text, labels=labels)
    for name, values, number in rows:
        families[name].add_metric(values, number)
    yield from families.values()

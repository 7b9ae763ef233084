"""What may be asked of the source, and how a wrong option is refused; no Spark runs here."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, Not

from gateway.errors import PipelineError
from gateway.pipeline.journal.filters import Range, SelectedRows, narrowed
from gateway.pipeline.journal.options import EARLIEST, LATEST, Bound, columns_of, options_of
from gateway.pipeline.journal.planner import divide_rows

DAY_US = 1_700_006_400_000_000  # 2023-11-15
DAY = datetime(2023, 11, 15, tzinfo=UTC)


@pytest.mark.parametrize("text", ["/j/k", "file:/j/k", "file:///j/k"])
def test_paths(text: str) -> None:
    assert options_of({"path": text}, stream=False).folder.path() == Path("/j/k")


def test_defaults_are_kafkas() -> None:
    table = options_of({"PATH": "file:///j"}, stream=False)
    stream = options_of({"path": "/j"}, stream=True)
    assert table.folder.path() == stream.folder.path() == Path("/j")
    assert (table.start.otherwise, stream.start.otherwise) == (EARLIEST, LATEST)
    assert table.end.otherwise == LATEST
    assert (table.rows_max, table.partitions_min, table.fail) == (None, 1, True)
    assert (table.routes, table.protocols, columns_of({})) == (None, None, None)


BOUNDS = [
    ({"startingOffsets": "Earliest"}, Bound(EARLIEST, {})),
    ({"startingOffsets": "latest"}, Bound(LATEST, {})),
    ({"startingOffsets": '{"0": 5, "b/1": -1}'}, Bound(EARLIEST, {"0": 5, "b/1": -1})),
    ({"startingTimestamp": "1700006400000"}, Bound(EARLIEST, {}, DAY_US)),
    ({"startingTimestamp": "2023-11-15"}, Bound(EARLIEST, {}, DAY_US)),
    ({"startingTimestamp": "2023-11-15T01:00:00.000001+01:00"}, Bound(EARLIEST, {}, DAY_US + 1)),
]


@pytest.mark.parametrize("given, bound", BOUNDS)
def test_bounds(given: dict[str, str], bound: Bound) -> None:
    assert options_of({"path": "/j"} | given, stream=False).start == bound


WRONG = [
    ({}, "needs the journal's folder"),
    ({"path": "/j", "startOffsets": "latest"}, "did you mean startingOffsets"),
    ({"path": "/j", "xyz": "1"}, "known: path, columns"),
    ({"path": "/j", "startingOffsets": "soon"}, "is earliest, latest, or numbers"),
    ({"path": "/j", "startingOffsets": "[1]"}, "is earliest, latest, or numbers"),
    ({"path": "/j", "startingOffsets": '{"0": -3}'}, "is earliest, latest, or numbers"),
    ({"path": "/j", "startingOffsets": '{"0": true}'}, "is earliest, latest, or numbers"),
    ({"path": "/j", "startingTimestamp": "noon"}, "ISO 8601"),
    ({"path": "/j", "startingTimestamp": "1", "startingOffsets": "latest"}, "not both"),
    ({"path": "/j", "endingOffsets": "latest"}, "a stream has no end"),
    ({"path": "/j", "maxOffsetsPerTrigger": "0"}, "an integer from 1"),
    ({"path": "/j", "minPartitions": "many"}, "an integer from 1"),
    ({"path": "/j", "failOnDataLoss": "no"}, "must be true or false"),
]


@pytest.mark.parametrize("given, text", WRONG, ids=[text for _, text in WRONG])
def test_what_is_wrong_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        options_of(given, stream=True)


RECEIVED, SEQUENCE, SHARD, ROUTE = ("received",), ("sequence",), ("shard",), ("route",)
FILTERS: list[tuple[list[Filter], SelectedRows]] = [
    ([GreaterThanOrEqual(RECEIVED, DAY)], SelectedRows(received=Range(DAY_US))),
    ([GreaterThan(RECEIVED, DAY.replace(tzinfo=None))], SelectedRows(received=Range(DAY_US + 1))),
    (
        [LessThan(RECEIVED, DAY), EqualTo(SHARD, "1")],
        SelectedRows(Range(None, DAY_US), shards=frozenset("1")),
    ),
    ([EqualTo(SEQUENCE, 7)], SelectedRows(sequence=Range(7, 8))),
    ([GreaterThan(SEQUENCE, 3), LessThan(SEQUENCE, 9)], SelectedRows(sequence=Range(4, 9))),
    ([In(ROUTE, ("a", "b")), EqualTo(ROUTE, "a")], SelectedRows(only={"route": frozenset("a")})),
    ([Not(EqualTo(ROUTE, "a")), EqualTo(("body_size",), 3), EqualTo(ROUTE, None)], SelectedRows()),
]


@pytest.mark.parametrize("filters, wanted", FILTERS, ids=range(len(FILTERS)))
def test_filters_that_are_understood(filters: list[Filter], wanted: SelectedRows) -> None:
    assert narrowed(SelectedRows(), filters) == wanted


SHARES = [
    ({"0": 10, "1": 5}, 100, {"0": 10, "1": 5}),
    ({"0": 100, "1": 50}, 15, {"0": 10, "1": 5}),
    ({"0": 1, "1": 1, "2": 1}, 1, {"0": 1, "1": 0, "2": 0}),
    ({"0": 1, "1": 1_000_000}, 10, {"0": 0, "1": 10}),
    ({"0": 0}, 10, {"0": 0}),
]


@pytest.mark.parametrize("waiting, most, shares", SHARES)
def test_a_limit_is_shared_out(waiting: dict[str, int], most: int, shares: dict[str, int]) -> None:
    assert divide_rows(waiting, most) == shares

"""Selection of journal rows.

Blocks without selected rows are skipped; other rows are dropped before they leave the task. The selection
comes from load options or, for jobs that read the journal themselves, from the parts of an SQL condition that
are joined by AND. Comparisons with a value are supported for the time of receipt, shard, sequence, and any
coded column. Spark's own mechanism (`pushFilters`) is not used: Spark has one reader per table, so all uses
of the table in a query would get the filters of the last one, and rows would be lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import __version__

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.journal.arrow import batch_of, matching
from gateway.pipeline.journal.options import CODED, LoadOptions, microseconds_of
from gateway.store.journal.reader import Block

try:
    from pyspark.sql.datasource import (
        EqualNullSafe,
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )
except ImportError as error:
    raise PipelineError(f"the pipeline needs Spark 4.1 or newer, but this is {__version__}") from error


EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Range:
    """Range of integers from `first` up to, not including, `end`; None means no bound."""

    first: int | None = None
    end: int | None = None

    def misses(self, least: int, most: int) -> bool:
        """Return True if the range contains no number from `least` to `most`."""
        return (self.first is not None and most < self.first) or (self.end is not None and least >= self.end)

    def narrowed(self, filter_: Filter, value: int) -> Range:
        """Return the part of this range that satisfies the comparison `filter_` with `value`."""
        first, end = self.first, self.end
        if isinstance(filter_, GreaterThan | GreaterThanOrEqual | EqualTo | EqualNullSafe):
            least = value + isinstance(filter_, GreaterThan)
            first = least if first is None else max(first, least)
        if isinstance(filter_, LessThan | LessThanOrEqual | EqualTo | EqualNullSafe):
            most = value + (not isinstance(filter_, LessThan))
            end = most if end is None else min(end, most)
        return Range(first, end)


ANY: Final = Range()


@dataclass(frozen=True)
class SelectedRows:
    """Condition that selects rows of the journal.

    `received` is a range of times in microseconds UTC, `sequence` a range of sequence numbers. `shards` None
    means all shards. `only` maps dictionary-encoded columns to the texts that are permitted in them.
    """

    received: Range = ANY
    sequence: Range = ANY
    shards: frozenset[str] | None = None
    only: dict[str, frozenset[str]] = field(default_factory=dict)

    def rows(self, block: Block) -> Arrow | None:
        """Return a boolean array that is True for the selected rows of a block; None if all are selected."""
        tests = [matching(block, name, texts) for name, texts in self.only.items()]
        low, high = self.received.first, self.received.end
        if low is not None or high is not None:
            times = batch_of(block, ("received",))["received"].cast(pa.int64())
            if low is not None:
                tests.append(pc.greater_equal(times, low))
            if high is not None:
                tests.append(pc.less(times, high))
        found = None
        for test in tests:
            if test is not None:
                found = test if found is None else pc.and_(found, test)
        return found


def selection_of(options: LoadOptions) -> SelectedRows:
    """Return the condition on rows that the load options describe."""
    only = dict(options.only)
    for name, texts in (("route", options.routes), ("source_protocol", options.protocols)):
        if texts is not None:
            only[name] = only.get(name, texts) & texts
    return SelectedRows(Range(*options.received), shards=options.shards, only=only)


def options_for(selection: SelectedRows) -> dict[str, str]:
    """Return load options that select the rows of `selection`.

    The options may select additional rows, because there is no option for sequence numbers.
    """
    found = {}
    for name, at_us in (
        ("receivedFrom", selection.received.first),
        ("receivedBefore", selection.received.end),
    ):
        if at_us is not None:
            found[name] = (EPOCH + timedelta(microseconds=at_us)).isoformat()
    if selection.shards is not None:
        found["shards"] = json.dumps(sorted(selection.shards))
    if selection.only:
        found["only"] = json.dumps({name: sorted(texts) for name, texts in selection.only.items()})
    return found


def narrowed(selection: SelectedRows, filters: Iterable[Filter]) -> SelectedRows:
    """Return `selection` restricted by Spark's `filters`; filters of an unsupported kind are ignored."""
    for one in filters:
        name = ".".join(getattr(one, "attribute", ()))
        value = getattr(one, "value", None)
        if name == "received" and isinstance(value, datetime):
            selection = replace(selection, received=selection.received.narrowed(one, _microseconds(value)))
        elif name == "sequence" and isinstance(value, int):
            selection = replace(selection, sequence=selection.sequence.narrowed(one, value))
        elif (texts := _texts(one, value)) is None:
            continue
        elif name == "shard":
            selection = replace(
                selection, shards=texts if selection.shards is None else selection.shards & texts
            )
        elif name in CODED:
            selection = replace(
                selection, only=selection.only | {name: selection.only.get(name, texts) & texts}
            )
    return selection


def _texts(filter_: Filter, value: Any) -> frozenset[str] | None:
    """Return the texts that a filter on a dictionary-encoded column permits; None if unsupported.

    `value` is the value with which the filter compares.
    """
    if isinstance(filter_, EqualTo | EqualNullSafe) and isinstance(value, str):
        return frozenset({value})
    if isinstance(filter_, In) and all(isinstance(text, str) for text in value):
        return frozenset(value)
    return None


def _microseconds(value: datetime) -> int:
    return microseconds_of(value if value.tzinfo else value.replace(tzinfo=UTC))

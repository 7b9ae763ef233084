"""Stream reader of the journal, with the planner's state between micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.journal.filters import selection_of
from gateway.pipeline.journal.options import LoadOptions, Offsets
from gateway.pipeline.journal.partition_reader import read_part
from gateway.pipeline.journal.planner import (
    Shard,
    bounded,
    divide_rows,
    first_of,
    load_summaries,
    next_of,
    parts_of,
    reader_of,
)
from gateway.pipeline.limits import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for a streaming query, in the order in which rows were written.

    A shard that appears during the query is read from its first row.
    """

    def __init__(self, options: LoadOptions, names: tuple[str, ...]) -> None:
        self._options = options
        self._names = names
        self._selection = selection_of(options)
        self._reader = reader_of(options)
        self._shards: dict[str, Shard] = {}
        self._target: Offsets | None = None

    def initialOffset(self) -> Offsets:
        """Return the offsets at which a new query begins."""
        with self._reader.cached_listing():
            return bounded(self._reader, self._options.start, self._existing_shards())

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch by `maxOffsetsPerTrigger`."""
        most = self._options.rows_max
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end at the journal's present end."""
        with self._reader.cached_listing():
            self._target = {name: next_of(self._reader, name) for name in self._existing_shards()}

    def _existing_shards(self) -> list[str]:
        """Return the selected shards that exist."""
        only = self._selection.shards
        return [name for name in self._reader.shards() if only is None or name in only]

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Return the offsets at which the next micro-batch, which begins at `start`, ends.

        `limit` is the maximum number of rows. A shard without files ends at its offset in `start`.
        """
        with self._reader.cached_listing():
            return self._ends(start, limit)

    def _ends(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Return the offsets at which the next micro-batch ends, computed from the journal's files.

        The micro-batch begins at `start`, and `limit` is its maximum number of rows. Raises PipelineError if
        rows were lost and `failOnDataLoss` is set.
        """
        ends = dict(start)
        begins = {name: self._begin(start, name) for name in self._existing_shards()}
        load_summaries(
            self._reader, {name: max(self._next_row(name), first) for name, first in begins.items()}
        )
        for name in self._shards.keys() - begins.keys():
            next_row = self._shards.pop(name).next
            if next_row > start.get(name, 0) and self._options.fail:
                raise self._lost_rows_error(name, start.get(name, 0), next_row)
        for name, first in begins.items():
            if self._target is not None and name not in self._target:
                continue
            shard = self._shard(name, first)
            shard.forget(first)
            bound = shard.read_new_blocks()
            if self._target is not None:
                bound = min(bound, self._target[name])
            if bound > first:
                ends[name] = bound
        if isinstance(limit, ReadMaxRows):
            waiting = {name: bound - self._begin(start, name) for name, bound in ends.items()}
            shares = divide_rows(waiting, limit.max_rows)
            ends = {name: self._begin(start, name) + rows for name, rows in shares.items()}
        return ends

    def reportLatestOffset(self) -> Offsets:
        """Return the offsets after the newest rows found so far, for the query's progress report."""
        return {name: shard.next for name, shard in self._shards.items()}

    def partitions(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        """Return the partitions of the micro-batch from `start` up to, not including, `end`.

        The first micro-batch of a query may have been planned by a query that was killed, so the state of a
        shard is created if necessary. Raises PipelineError if rows were lost and `failOnDataLoss` is set.
        """
        ranges: dict[str, tuple[int, int]] = {}
        with self._reader.cached_listing():
            for name, bound in end.items():
                first = self._begin(start, name)
                if first >= bound:  # Nothing to read; the shard may be deleted.
                    continue
                shard = self._shard(name, first)
                if shard.next < bound and shard.read_new_blocks() < bound and self._options.fail:
                    raise self._lost_rows_error(name, shard.next, bound)
                ranges[name] = first, bound
        return [*parts_of(self._shards, ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Arrow]:
        """Yield the rows of a partition."""
        return read_part(self._options, self._selection, self._names, partition)

    def _begin(self, start: Offsets, name: str) -> int:
        found = start.get(name)
        return first_of(self._reader, name) if found is None else found

    def _next_row(self, name: str) -> int:
        return self._shards[name].next if name in self._shards else 0

    def _lost_rows_error(self, name: str, end: int, expected: int) -> PipelineError:
        return PipelineError(
            f"shard {name} of the journal in {self._options.folder.uri} ends before row {end}, and row"
            f" {expected} is wanted next: its end is lost, or it is another journal; with a new checkpoint,"
            " or failOnDataLoss=false, the query goes on"
        )

    def _shard(self, name: str, first: int) -> Shard:
        """Return the planner's state of the shard `name`. A new state begins at row `first`.

        Raises PipelineError if `failOnDataLoss` is set and the journal ends before that row: then the journal
        was replaced, or its last rows were lost.
        """
        shard = self._shards.get(name)
        if shard is None:
            end = next_of(self._reader, name)
            if end < first and self._options.fail:
                raise self._lost_rows_error(name, end, first)
            shard = self._shards[name] = Shard(
                self._reader, name, first, routes=self._selection.only.get("route")
            )
        return shard

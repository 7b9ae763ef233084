"""Interface to Spark: the journal as a table and as a stream.

Spark runs the planning in a Python process beside the driver, and `read` in one process per task. The
planner's state is in `self`; `read` depends on its partition alone. Offsets are the journal's sequence
numbers by shard, and the position is only in Spark's checkpoint: a batch that is read again has exactly the
same rows, whichever process was killed in between.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from gateway.errors import PipelineError
from gateway.pipeline.columns import BY_NAME, Arrow, spark_schema
from gateway.pipeline.journal.filters import narrowed, selection_of
from gateway.pipeline.journal.options import LoadOptions, Offsets, columns_of, options_of
from gateway.pipeline.journal.partition_reader import coded, read_part
from gateway.pipeline.journal.planner import (
    Shard,
    bounded,
    count_late_rows,
    load_summaries,
    parts_of,
    reader_of,
)
from gateway.pipeline.stores import Hadoop
from gateway.pipeline.workers import freeze_imports
from gateway.store.journal.reader import JournalReader


class JournalSource(DataSource):
    """Spark data source `gateway_journal`; `options.py` describes its options.

    If the user gives a schema, it selects the columns.
    """

    hadoop: ClassVar[Hadoop] = {}
    """Hadoop options for stores. `of` makes a class with those of a session."""

    @classmethod
    def of(cls, hadoop: Hadoop) -> type[JournalSource]:
        """Return a subclass of the source that has the Hadoop options `hadoop`.

        Spark plans a query in a process without a Spark session, from which the options could be read.
        """
        return type(cls.__name__, (cls,), {"hadoop": hadoop, "__doc__": cls.__doc__})

    @classmethod
    def name(cls) -> str:
        """Return Spark's name of the format, `gateway_journal`."""
        return "gateway_journal"

    def schema(self) -> StructType:
        """Return the schema of the columns that the options name."""
        return spark_schema(columns_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader for a batch query of the columns in `schema`."""
        freeze_imports()
        options = options_of(self.options, stream=False, hadoop=self.hadoop)
        return JournalTable(options, _names(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader for a streaming query of the columns in `schema`.

        Raises PipelineError if this version of Spark cannot limit micro-batches.
        """
        from gateway.pipeline.journal.stream import JournalStream

        return JournalStream(options_of(self.options, stream=True, hadoop=self.hadoop), _names(schema))


def _names(schema: StructType) -> tuple[str, ...]:
    """Return the column names of a schema.

    Raises PipelineError if a column has another type in the journal.
    """
    for field in schema.fields:
        if spark_schema((field.name,))[0].dataType != field.dataType:
            raise PipelineError(
                f"column {field.name} of the journal is {BY_NAME[field.name].spark},"
                f" not {field.dataType.simpleString()}"
            )
    return tuple(schema.names)


class JournalTable(DataSourceReader):
    """Reader for a batch query: its rows are between two bounds, computed when the query is planned."""

    def __init__(self, options: LoadOptions, names: tuple[str, ...]) -> None:
        self._options = options
        self._names = names
        self._selection = selection_of(options)

    def partitions(self) -> list[InputPartition]:
        """Return the partitions of all shards.

        Raises GoneError for deleted rows, DamageError for damaged ones, and PipelineError.
        """
        reader = reader_of(self._options)
        with reader.cached_listing():
            return self._planned(reader)

    def _planned(self, reader: JournalReader) -> list[InputPartition]:
        options, selection = self._options, self._selection
        shards = reader.shards()
        start = bounded(reader, options.start, shards)
        load_summaries(reader, start)
        end = bounded(reader, options.end, shards)
        self._log_late_rows(reader, end)
        found: dict[str, Shard] = {}
        ranges: dict[str, tuple[int, int]] = {}
        for name in shards:
            if selection.shards is not None and name not in selection.shards:
                continue
            first = max(start[name], selection.sequence.first or 0)
            bound = end[name] if selection.sequence.end is None else min(end[name], selection.sequence.end)
            if first < bound:
                found[name] = Shard(reader, name, first, selection.received, selection.only.get("route"))
                ranges[name] = (first, min(bound, found[name].read_new_blocks()))
        return [*parts_of(found, ranges, options)]

    def _log_late_rows(self, reader: JournalReader, end: Offsets) -> None:
        """Print a warning if rows received before `endingTimestamp` follow after `end`, where the read ends.

        `end` has a row number for each shard. Such rows were written later than others received at the same
        time, because their messages were settled later.
        """
        at_us, selection = self._options.end.at_us, selection_of(self._options)
        if at_us is None:
            return
        late_counts = {
            shard: count_late_rows(reader, shard, place, at_us, selection.rows)
            for shard, place in end.items()
            if selection.shards is None or shard in selection.shards
        }
        summary = ", ".join(f"shard {shard}: {rows}" for shard, rows in late_counts.items() if rows)
        if summary:
            print(
                f"gateway_journal: {sum(late_counts.values())} rows ({summary}) were received before"
                " endingTimestamp and settled behind the place that it stands for: they are not in this read;"
                " where(\"received < timestamp'…'\") without it has them",
                file=sys.stderr,
                flush=True,
            )

    def read(self, partition: InputPartition) -> Iterator[Arrow]:
        """Yield the rows of a partition."""
        return read_part(self._options, self._selection, self._names, partition)

    def read_coded(self, partition: InputPartition) -> Iterator[Arrow]:
        """Yield the rows of a partition with dictionary-encoded texts, which Spark itself does not accept."""
        return read_part(self._options, self._selection, self._names, partition, coded)

    def narrow(self, filters: Iterable[Filter]) -> None:
        """Restrict the read to blocks and rows that satisfy `filters`.

        Every row that the caller needs must satisfy all of them. Spark does not call this method, because it
        uses one reader for all uses of a table.
        """
        self._selection = narrowed(self._selection, filters)

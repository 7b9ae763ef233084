"""What Spark calls: the journal as a table, and as a stream.

Spark runs the planning in a Python process of its own beside the driver, and `read` in as many as there are
tasks; what the planner remembers lives in `self`, `read` depends on its partition alone. Offsets are the
journal's sequence numbers by shard, and Spark's checkpoint is the only place where a position is kept: so a
batch that is read again has exactly the same rows, whatever was killed in between.
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
from gateway.pipeline.journal.filters import narrowed, wanted_of
from gateway.pipeline.journal.options import Offsets, Options, columns_of, options_of
from gateway.pipeline.journal.planning import Shard, bounded, know, parts_of, reader_of, settled_later
from gateway.pipeline.journal.reading import coded, read_part
from gateway.pipeline.stores import Hadoop
from gateway.pipeline.workers import spare_imports
from gateway.store.journal.reader import JournalReader


class JournalSource(DataSource):
    """`format("gateway_journal")`; options.py has its options, and a given schema chooses columns, too."""

    hadoop: ClassVar[Hadoop] = {}
    """By which stores are reached; a session gets a class of its own with its options (`of`)."""

    @classmethod
    def of(cls, hadoop: Hadoop) -> type[JournalSource]:
        """The source for a session with these options; where it is planned there is no session to ask."""
        return type(cls.__name__, (cls,), {"hadoop": hadoop, "__doc__": cls.__doc__})

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "gateway_journal"

    def schema(self) -> StructType:
        """The columns that the options name."""
        return spark_schema(columns_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A table."""
        spare_imports()
        options = options_of(self.options, stream=False, hadoop=self.hadoop)
        return JournalTable(options, _names(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A stream. Raises PipelineError: this Spark has no limits for one."""
        from gateway.pipeline.journal.stream import JournalStream

        return JournalStream(options_of(self.options, stream=True, hadoop=self.hadoop), _names(schema))


def _names(schema: StructType) -> tuple[str, ...]:
    """The columns of a schema. Raises PipelineError: the journal has them otherwise."""
    for field in schema.fields:
        if spark_schema((field.name,))[0].dataType != field.dataType:
            raise PipelineError(
                f"column {field.name} of the journal is {BY_NAME[field.name].spark},"
                f" not {field.dataType.simpleString()}"
            )
    return tuple(schema.names)


class JournalTable(DataSourceReader):
    """Rows from one bound to another, as they were when the query was planned."""

    def __init__(self, options: Options, names: tuple[str, ...]) -> None:
        self._options = options
        self._names = names
        self._wanted = wanted_of(options)

    def partitions(self) -> list[InputPartition]:
        """Parts of all shards. Raises GoneError, DamageError, PipelineError."""
        reader = reader_of(self._options)
        with reader.at_a_glance():
            return self._planned(reader)

    def _planned(self, reader: JournalReader) -> list[InputPartition]:
        options, wanted = self._options, self._wanted
        shards = reader.shards()
        start = bounded(reader, options.start, shards)
        know(reader, start)
        end = bounded(reader, options.end, shards)
        self._tell_of_late_rows(reader, end)
        found: dict[str, Shard] = {}
        ranges: dict[str, tuple[int, int]] = {}
        for name in shards:
            if wanted.shards is not None and name not in wanted.shards:
                continue
            first = max(start[name], wanted.sequence.first or 0)
            until = end[name] if wanted.sequence.until is None else min(end[name], wanted.sequence.until)
            if first < until:
                found[name] = Shard(reader, name, first, wanted.received, wanted.only.get("route"))
                ranges[name] = (first, min(until, found[name].look()))
        return [*parts_of(found, ranges, options)]

    def _tell_of_late_rows(self, reader: JournalReader, end: Offsets) -> None:
        """An end by time is a place, and what was settled behind it is nowhere else missed by anybody."""
        at_us, asked = self._options.end.at_us, wanted_of(self._options)
        if at_us is None:
            return
        late = {
            shard: settled_later(reader, shard, place, at_us, asked.rows)
            for shard, place in end.items()
            if asked.shards is None or shard in asked.shards
        }
        told = ", ".join(f"shard {shard}: {rows}" for shard, rows in late.items() if rows)
        if told:
            print(
                f"gateway_journal: {sum(late.values())} rows ({told}) were received before endingTimestamp"
                " and settled behind the place that it stands for: they are not in this read;"
                " where(\"received < timestamp'…'\") without it has them",
                file=sys.stderr,
                flush=True,
            )

    def read(self, partition: InputPartition) -> Iterator[Arrow]:
        """The rows of a part."""
        return read_part(self._options, self._wanted, self._names, partition)

    def read_coded(self, partition: InputPartition) -> Iterator[Arrow]:
        """The same, with texts as places in dictionaries, which Spark does not take."""
        return read_part(self._options, self._wanted, self._names, partition, coded)

    def narrow(self, filters: Iterable[Filter]) -> None:
        """Pass over blocks and rows by these conditions, all of which hold for each row that is wanted. Not
        for Spark, which has one reader for all uses of a table."""
        self._wanted = narrowed(self._wanted, filters)

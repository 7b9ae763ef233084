"""The recorded traffic that a job is about: rows of a journal in a span of time, and what else is wanted of
them.

A DataFrame of rows is the way for all that Spark computes. What Python computes has a shorter one: blocks of
a journal are Arrow's already, and to make Spark's rows of them, and Arrow's of those for another worker,
costs more than to read and route them. So the tasks read the journal themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql.datasource import Filter, GreaterThanOrEqual, LessThan

from gateway.pipeline.archive.manifest import Archive
from gateway.pipeline.archive.reading import FiledRows
from gateway.pipeline.archive.tables import format_at, is_table_name
from gateway.pipeline.columns import BY_NAME, Arrow
from gateway.pipeline.jobs.archive import read_archive
from gateway.pipeline.journal.options import microseconds_of, options_of
from gateway.pipeline.journal.source import FilteredTable
from gateway.pipeline.stores import hadoop_of, place_of
from gateway.pipeline.times import moment
from gateway.pipeline.traffic.rows import LEFT
from gateway.store.journal.columns import LEFT_OUTBOX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REASON: Final = "reason_text"
ALWAYS: Final = ("shard", "sequence", "received", REASON)
WORD: Final = re.compile(r"[a-z_]+")

Batches = Callable[[Iterable[Arrow]], Iterator[Arrow]]
"""What `mapInArrow` takes; pickled to the tasks."""


class Span(NamedTuple):
    """Which rows: received from `begin` to before `end` (ISO 8601, UTC unless they say otherwise), and for
    which the SQL condition `where` is true. None: all."""

    begin: str | None = None
    end: str | None = None
    where: str | None = None

    @property
    def columns(self) -> list[str]:
        """The journal's columns that `where` may need."""
        return [word for word in WORD.findall(self.where or "") if word in BY_NAME]


class Recording(NamedTuple):
    """Rows of a journal, or of an archive, without those of what left an outbox: their messages have another
    row, of when they were accepted."""

    spark: SparkSession
    folder: str
    span: Span = Span()
    archive: str | None = None

    def through(self, names: Sequence[str], function: Batches, schema: str) -> DataFrame:
        """What `function` makes of batches with these columns; `schema` is Spark's, of what it makes. Raises
        PipelineError, JournalError."""
        columns = tuple(dict.fromkeys((*names, REASON)))
        filed = self._filed(columns)
        cores = self.spark.sparkContext.defaultParallelism
        if filed is not None:
            return self._straight(filed.read, filed.pieces(cores), function, schema)
        if self.archive is not None or self.span.where is not None:
            rows = traffic(self.spark, self.folder, names, self.span, archive=self.archive)
            staying = rows.where(~F.coalesce(F.expr(LEFT), F.lit(False)))
            return staying.select(*names).mapInArrow(function, schema)
        options = options_of(
            {"path": self.folder, "minPartitions": str(cores)}, stream=False, hadoop=hadoop_of(self.spark)
        )
        table = FilteredTable(options, columns)
        for bound in _bounds(self.span):
            table.pushFilters([bound])
        return self._straight(table.read, table.partitions(), function, schema)

    def _filed(self, names: Sequence[str]) -> FiledRows | None:
        """The files of the archive; None: it is a table, or Spark has to ask a condition."""
        if self.archive is None or self.span.where is not None or is_table_name(self.archive):
            return None
        place = place_of(self.archive, hadoop_of(self.spark))
        if format_at(place) is not None or not Archive(place).manifest().number:
            return None
        begin, end = (None if text is None else microseconds_of(moment(text)) for text in self.span[:2])
        return FiledRows(Archive(place), names, begin, end)

    def _straight(
        self, read: Callable[[Any], Iterator[Arrow]], parts: Sequence[Any], function: Batches, schema: str
    ) -> DataFrame:
        numbers = self.spark.range(0, len(parts), 1, max(1, len(parts)))
        return numbers.mapInArrow(_Straight(read, parts, function), schema)


class _Straight:
    """`mapInArrow` of numbers of parts: reads them, and hands their rows on."""

    def __init__(
        self, read: Callable[[Any], Iterator[Arrow]], parts: Sequence[Any], function: Batches
    ) -> None:
        self._read = read
        self._parts = parts
        self._function = function

    def __call__(self, batches: Iterable[Arrow]) -> Iterator[Arrow]:
        return self._function(self._rows(batches))

    def _rows(self, batches: Iterable[Arrow]) -> Iterator[Arrow]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from map(staying, self._read(self._parts[number]))


def _bounds(span: Span) -> Iterator[Filter]:
    if span.begin is not None:
        yield GreaterThanOrEqual(("received",), moment(span.begin))
    if span.end is not None:
        yield LessThan(("received",), moment(span.end))


def staying(batch: Arrow) -> Arrow:
    """The rows of a batch that LEFT_OUTBOX does not match; its texts are few."""
    reasons = pc.dictionary_encode(batch.column(REASON))
    left = pc.match_substring_regex(reasons.dictionary, LEFT_OUTBOX)
    if not pc.any(left).as_py():
        return batch
    return batch.filter(pc.invert(pc.fill_null(left.take(reasons.indices), False)))


def traffic(
    spark: SparkSession, folder: str, names: Iterable[str], span: Span, *, archive: str | None = None
) -> DataFrame:
    """These columns of a journal's rows, or of an archive's. Raises PipelineError for a time that is none."""
    columns = list(dict.fromkeys((*ALWAYS, *names, *span.columns)))
    if archive is not None:
        return within(read_archive(spark, archive).select(*columns), span)
    # Each job uses what it gets here once in a query.
    options = {"columns": ",".join(columns), "pushFilters": "true"}
    rows = spark.read.format("gateway_journal").options(**options).load(folder)
    return within(rows, span)


def within(rows: DataFrame, span: Span) -> DataFrame:
    """The rows in a span. Raises PipelineError for a time that is none."""
    received = F.col("received")
    if span.begin is not None:
        rows = rows.where(received >= F.lit(moment(span.begin)))
    if span.end is not None:
        rows = rows.where(received < F.lit(moment(span.end)))
    return rows if span.where is None else rows.where(span.where)


def rows_at(rows: DataFrame, places: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """The rows with these shards and sequence numbers."""
    by_shard: dict[str, list[int]] = {}
    for shard, sequence in places:
        by_shard.setdefault(shard, []).append(sequence)
    found: list[dict[str, Any]] = []
    for shard, sequences in by_shard.items():
        chosen = rows.where((F.col("shard") == shard) & F.col("sequence").isin(sequences))
        found += (row.asDict() for row in chosen.orderBy("sequence").collect())
    return found

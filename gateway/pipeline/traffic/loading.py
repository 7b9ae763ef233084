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

from gateway.pipeline.archive.manifest import Archive, Manifest
from gateway.pipeline.archive.reading import FiledRows
from gateway.pipeline.archive.tables import between, since, table_at
from gateway.pipeline.columns import BY_NAME, Arrow
from gateway.pipeline.jobs.archive import found_in, read_archive
from gateway.pipeline.journal.filters import Wanted, narrowed, options_for
from gateway.pipeline.journal.options import microseconds_of, options_of
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.stores import hadoop_of, place_of
from gateway.pipeline.times import moment
from gateway.pipeline.traffic.conditions import Condition, condition_of, holds, leaves_of
from gateway.pipeline.traffic.rows import ASIDE
from gateway.store.journal.columns import NO_TRAFFIC

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REASON: Final = "reason_text"
ALWAYS: Final = ("shard", "sequence", "received", REASON)
WORD: Final = re.compile(r"[a-z_]+")

Batches = Callable[[Iterable[Arrow]], Iterator[Arrow]]
"""What `mapInArrow` takes; pickled to the tasks."""

Piece = tuple[Callable[[Any], Iterator[Arrow]], Any]
"""What reads a part of the rows in a task, and the part."""


class Span(NamedTuple):
    """Which rows: received from `begin` to before `end` (ISO 8601, UTC unless they say otherwise), and for
    which the SQL condition `where` is true. None: all."""

    begin: str | None = None
    end: str | None = None
    where: str | None = None

    @property
    def columns(self) -> list[str]:
        """The journal's columns that `where` may need."""
        return [word for word in WORD.findall((self.where or "").lower()) if word in BY_NAME]


class Recording(NamedTuple):
    """Rows of a journal (`folder`), of an `archive`, or of both: then of the journal what the archive has not
    yet. Without those of what left an outbox: their messages have another row, of when they were accepted."""

    spark: SparkSession
    folder: str | None
    span: Span = Span()
    archive: str | None = None

    def through(self, names: Sequence[str], function: Batches, schema: str) -> DataFrame:
        """What `function` makes of batches with these columns; `schema` is Spark's, of what it makes. Raises
        PipelineError, JournalError."""
        where = self.span.where
        condition = None if where is None else condition_of(self.spark, where)
        is_table = self.archive is not None and table_at(self.spark, self.archive) is not None
        if is_table or (where is not None and condition is None):
            rows = traffic(self.spark, self.folder, names, self.span, archive=self.archive)
            staying = rows.where(~F.coalesce(F.expr(ASIDE), F.lit(False)))
            return staying.select(*names).mapInArrow(function, schema)
        columns = tuple(dict.fromkeys((*names, REASON, *self.span.columns)))
        pieces: list[Piece] = []
        given: dict[str, str] = {}
        if self.archive is not None:
            manifest, pieces = self._filed(columns)
            if self.folder is not None:
                given = between(*since(self.spark, self.folder, manifest.offsets))
        if self.folder is not None:
            pieces += self._journal(columns, given, condition)
        numbers = self.spark.range(0, len(pieces), 1, max(1, len(pieces)))
        return numbers.mapInArrow(_Straight(pieces, condition, function), schema)

    def _filed(self, names: Sequence[str]) -> tuple[Manifest, list[Piece]]:
        """The files of the archive."""
        archive = Archive(place_of(str(self.archive), hadoop_of(self.spark)))
        manifest = found_in(archive)
        begin, end = (None if text is None else microseconds_of(moment(text)) for text in self.span[:2])
        rows = FiledRows(archive, manifest.files, names, begin, end)
        return manifest, [(rows.read, part) for part in rows.pieces(self._cores)]

    def _journal(
        self, names: Sequence[str], given: dict[str, str], condition: Condition | None
    ) -> list[Piece]:
        """The parts of the journal."""
        stated = {"path": str(self.folder), "minPartitions": str(self._cores)} | given
        table = JournalTable(options_of(stated, stream=False, hadoop=hadoop_of(self.spark)), tuple(names))
        table.narrow([*_bounds(self.span), *(() if condition is None else leaves_of(condition))])
        return [(table.read_coded, part) for part in table.partitions()]

    @property
    def _cores(self) -> int:
        return self.spark.sparkContext.defaultParallelism


class _Straight:
    """`mapInArrow` of numbers of pieces: reads them, and hands their rows on for which a condition holds."""

    def __init__(self, pieces: Sequence[Piece], condition: Condition | None, function: Batches) -> None:
        self._pieces = pieces
        self._condition = condition
        self._function = function

    def __call__(self, batches: Iterable[Arrow]) -> Iterator[Arrow]:
        return self._function(self._rows(batches))

    def _rows(self, batches: Iterable[Arrow]) -> Iterator[Arrow]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                read, part = self._pieces[number]
                yield from map(staying, map(self._wanted, read(part)))

    def _wanted(self, rows: Arrow) -> Arrow:
        return rows if self._condition is None else rows.filter(holds(self._condition, rows))


def _bounds(span: Span) -> Iterator[Filter]:
    if span.begin is not None:
        yield GreaterThanOrEqual(("received",), moment(span.begin))
    if span.end is not None:
        yield LessThan(("received",), moment(span.end))


def staying(batch: Arrow) -> Arrow:
    """The rows of a batch that NO_TRAFFIC does not match; its texts are few."""
    reasons = batch.column(REASON).dictionary_encode()
    aside = pc.match_substring_regex(reasons.dictionary, NO_TRAFFIC)
    if not pc.any(aside).as_py():
        return batch
    return batch.filter(pc.invert(pc.fill_null(aside.take(reasons.indices), False)))


def traffic(
    spark: SparkSession, folder: str | None, names: Iterable[str], span: Span, *, archive: str | None = None
) -> DataFrame:
    """These columns of the rows of a journal, of an archive, or of both: of the journal what the archive has
    not. Raises PipelineError for a time that is none."""
    columns = list(dict.fromkeys((*ALWAYS, *names, *span.columns)))
    if archive is not None:
        return within(read_archive(spark, archive, folder, columns=columns), span)
    assert folder is not None
    condition = None if span.where is None else condition_of(spark, span.where)
    leaves = [*_bounds(span), *(() if condition is None else leaves_of(condition))]
    options = {"columns": ",".join(columns)} | options_for(narrowed(Wanted(), leaves))
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

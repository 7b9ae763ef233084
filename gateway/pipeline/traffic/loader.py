"""Loading of recorded traffic: journal or archive rows of a period that satisfy a condition.

`traffic` returns a DataFrame for computation in Spark. `Recording.map_batches` is faster for computation in
Python: blocks of a journal are converted to Arrow without a loop over rows, while converting them to Spark's
rows and back is more expensive than reading and routing them. So the tasks read the journal themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql.datasource import Filter, GreaterThanOrEqual, LessThan

from gateway.pipeline.archive.manifest import Archive, Manifest
from gateway.pipeline.archive.reader import ArchiveRows
from gateway.pipeline.archive.tables import range_options, rows_since, table_at
from gateway.pipeline.columns import BY_NAME, Arrow
from gateway.pipeline.jobs.archive import found_in, read_archive
from gateway.pipeline.journal.filters import SelectedRows, narrowed, options_for
from gateway.pipeline.journal.options import microseconds_of, options_of
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.journal.table import read_journal
from gateway.pipeline.stores import hadoop_of, place_of
from gateway.pipeline.times import moment
from gateway.pipeline.traffic.conditions import Condition, condition_of, evaluate, leaves_of
from gateway.pipeline.traffic.rows import ASIDE
from gateway.store.journal.columns import NO_TRAFFIC

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REASON: Final = "reason_text"
ALWAYS: Final = ("shard", "sequence", "received", REASON)
WORD: Final = re.compile(r"[a-z_]+")

Batches = Callable[[Iterable[Arrow]], Iterator[Arrow]]
"""Function for `mapInArrow`, pickled to the tasks."""

Piece = tuple[Callable[[Any], Iterator[Arrow]], Any]
"""Function that reads a part of the rows in a task, and the part."""


class RowSelection(NamedTuple):
    """Condition on journal rows: their time of receipt, and an SQL condition.

    Rows are selected if they were received from `begin` up to, not including, `end` (ISO 8601, UTC by
    default), and satisfy `where`. None means no restriction.
    """

    begin: str | None = None
    end: str | None = None
    where: str | None = None

    @property
    def columns(self) -> list[str]:
        """Names of the journal's columns that `where` may refer to."""
        return [word for word in WORD.findall((self.where or "").lower()) if word in BY_NAME]


class Recording(NamedTuple):
    """Recorded messages: the rows of a journal (`folder`), of an `archive`, or of both.

    With both, archived rows are read from the archive. Rows of messages that left an outbox are excluded,
    because such a message has an older row, which was written when it was accepted. Rows of messages that
    were rejected before they had a target are excluded, too.
    """

    spark: SparkSession
    folder: str | None
    span: RowSelection = RowSelection()
    archive: str | None = None

    def map_batches(self, names: Sequence[str], function: Batches, schema: str) -> DataFrame:
        """Apply `function`, in Spark tasks, to Arrow batches of the rows, and return the result.

        `names` are the columns of the batches, and `schema` is the Spark schema of the result. Raises
        PipelineError for an invalid selection or a missing archive, and JournalError if the journal cannot be
        read.
        """
        where = self.span.where
        condition = None if where is None else condition_of(self.spark, where)
        is_table = self.archive is not None and table_at(self.spark, self.archive) is not None
        if is_table or (where is not None and condition is None):
            rows = traffic(self.spark, self.folder, names, self.span, archive=self.archive)
            staying = rows.where(~F.coalesce(F.expr(ASIDE), F.lit(False)))
            return staying.select(*names).mapInArrow(function, schema)
        columns = tuple(dict.fromkeys((*names, REASON, *self.span.columns)))
        pieces: list[Piece] = []
        load_options: dict[str, str] = {}
        if self.archive is not None:
            manifest, pieces = self._archive_parts(columns)
            if self.folder is not None:
                load_options = range_options(*rows_since(self.spark, self.folder, manifest.offsets))
        if self.folder is not None:
            pieces += self._journal_parts(columns, load_options, condition)
        numbers = self.spark.range(0, len(pieces), 1, max(1, len(pieces)))
        return numbers.mapInArrow(_PartReader(pieces, condition, function), schema)

    def _archive_parts(self, names: Sequence[str]) -> tuple[Manifest, list[Piece]]:
        """Return the newest manifest of the archive, and the parts of its files to read.

        Each part comes with the function that reads it. `names` are the columns to read.
        """
        archive = Archive(place_of(str(self.archive), hadoop_of(self.spark)))
        manifest = found_in(archive)
        begin, end = (None if text is None else microseconds_of(moment(text)) for text in self.span[:2])
        rows = ArchiveRows(archive, manifest.files, names, begin, end)
        return manifest, [(rows.read, part) for part in rows.pieces(self._cores)]

    def _journal_parts(
        self, names: Sequence[str], load_options: dict[str, str], condition: Condition | None
    ) -> list[Piece]:
        """Return the partitions of the journal to read, each with the function that reads it.

        `names` are the columns to read. Blocks without rows that satisfy `condition` are skipped.
        """
        stated = {"path": str(self.folder), "minPartitions": str(self._cores)} | load_options
        table = JournalTable(options_of(stated, stream=False, hadoop=hadoop_of(self.spark)), tuple(names))
        table.narrow([*_bounds(self.span), *(() if condition is None else leaves_of(condition))])
        return [(table.read_coded, part) for part in table.partitions()]

    @property
    def _cores(self) -> int:
        return self.spark.sparkContext.defaultParallelism


class _PartReader:
    """Function for Spark's `mapInArrow` whose input rows are the numbers of parts of the recording.

    The function reads these parts, selects rows by the condition, and calls `function` with the batches.
    """

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
                yield from map(traffic_rows, map(self._filter_rows, read(part)))

    def _filter_rows(self, rows: Arrow) -> Arrow:
        return rows if self._condition is None else rows.filter(evaluate(self._condition, rows))


def _bounds(span: RowSelection) -> Iterator[Filter]:
    if span.begin is not None:
        yield GreaterThanOrEqual(("received",), moment(span.begin))
    if span.end is not None:
        yield LessThan(("received",), moment(span.end))


def traffic_rows(batch: Arrow) -> Arrow:
    """Return those rows of a batch by which messages can be replayed.

    Left out are rows of messages that left an outbox, which have an older row, and of messages that were
    rejected before they had a target.
    """
    reasons = batch.column(REASON).dictionary_encode()
    aside = pc.match_substring_regex(reasons.dictionary, NO_TRAFFIC)
    if not pc.any(aside).as_py():
        return batch
    return batch.filter(pc.invert(pc.fill_null(aside.take(reasons.indices), False)))


def traffic(
    spark: SparkSession,
    folder: str | None,
    names: Iterable[str],
    span: RowSelection,
    *,
    archive: str | None = None,
) -> DataFrame:
    """Return the columns `names` of those rows of a journal, an archive, or both that `span` selects.

    Raises PipelineError for an invalid time.
    """
    columns = list(dict.fromkeys((*ALWAYS, *names, *span.columns)))
    if archive is not None:
        return rows_in_span(read_archive(spark, archive, folder, columns=columns), span)
    assert folder is not None
    condition = None if span.where is None else condition_of(spark, span.where)
    leaves = [*_bounds(span), *(() if condition is None else leaves_of(condition))]
    options = {"columns": ",".join(columns)} | options_for(narrowed(SelectedRows(), leaves))
    return rows_in_span(read_journal(spark, folder, options), span)


def rows_in_span(rows: DataFrame, span: RowSelection) -> DataFrame:
    """Return those of `rows` that `span` selects. Raises PipelineError for an invalid time."""
    received = F.col("received")
    if span.begin is not None:
        rows = rows.where(received >= F.lit(moment(span.begin)))
    if span.end is not None:
        rows = rows.where(received < F.lit(moment(span.end)))
    return rows if span.where is None else rows.where(span.where)


def rows_at(rows: DataFrame, places: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the rows at the positions `places`: pairs of shard and sequence number."""
    by_shard: dict[str, list[int]] = {}
    for shard, sequence in places:
        by_shard.setdefault(shard, []).append(sequence)
    found: list[dict[str, Any]] = []
    for shard, sequences in by_shard.items():
        chosen = rows.where((F.col("shard") == shard) & F.col("sequence").isin(sequences))
        found += (row.asDict() for row in chosen.orderBy("sequence").collect())
    return found

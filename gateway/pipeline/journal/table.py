"""The journal as one table: segments in Parquet by Spark's own reader, the others by the Python source.

A segment in Parquet never changes, and rows have numbers. So the driver lists consecutive Parquet files from
the start on, and the Python source reads from the number behind them: each row is in one of the two, even if
segments become Parquet or are written before the query runs. Spark passes conditions and columns on to its
own reader; the Python source gets them as options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import functions as F

from gateway.pipeline.columns import spark_schema
from gateway.pipeline.journal.filters import SelectedRows, selection_of
from gateway.pipeline.journal.options import LATEST, Bound, LoadOptions, Offsets, columns_of, options_of
from gateway.pipeline.journal.planner import bounded, reader_of
from gateway.pipeline.stores import hadoop_of, spark_reaches
from gateway.store.journal.reader import JournalReader

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FORMAT: Final = "gateway_journal"


class _ClosedSegments(NamedTuple):
    """Consecutive Parquet segments of one shard, with the rows from `first` up to, not including, `next`.

    `names` are their paths below the journal's folder.
    """

    shard: str
    first: int
    next: int
    names: list[str]
    is_cut: bool
    """True if the files have further rows."""


def read_journal(spark: SparkSession, folder: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Return the journal in `folder` as a DataFrame. `options` are those of the format `gateway_journal`.

    `read_journal(spark, folder).createOrReplaceTempView("journal")` makes it a view for `spark.sql`. A query
    includes the rows that were written before it runs. Retention may delete files between this call and the
    query. Raises PipelineError, and errors of the journal's reader.
    """
    load_options = dict(options or {})
    source = spark.read.format(FORMAT).options(**load_options)
    parsed = options_of({"path": folder} | load_options, stream=False, hadoop=hadoop_of(spark))
    if parsed.end.at_us is not None:  # Only the source reports rows that are settled later.
        return source.load(folder)
    reader = reader_of(parsed)
    if not reader.is_there():
        return source.load(folder)
    found, starts = _closed(reader, parsed)
    if not found:
        return source.load(folder)
    names = columns_of(load_options) or tuple(spark_schema().names)
    root = spark_reaches(spark, parsed.folder)
    tables = [_table(spark, root, one, names, parsed) for one in found]
    stated = {key: value for key, value in load_options.items() if not key.lower().startswith("starting")}
    behind = json.dumps(starts)
    rest = spark.read.format(FORMAT).options(**stated, startingOffsets=behind).load(folder).select(*names)
    for table in tables:
        rest = table.union(rest)
    return rest


def _closed(reader: JournalReader, options: LoadOptions) -> tuple[list[_ClosedSegments], Offsets]:
    """Return the Parquet segments that Spark is to read itself, and where the journal source continues.

    The latter is a row number for each shard.
    """
    found: list[_ClosedSegments] = []
    only = options.shards
    with reader.cached_listing():
        shards = reader.shards()
        starts = bounded(reader, options.start, shards)
        is_open = options.end == Bound(LATEST, {})
        ends = None if is_open else bounded(reader, options.end, shards)
        for shard in shards:
            if only is not None and shard not in only:
                continue
            one = _of_shard(reader, shard, starts[shard], None if ends is None else ends[shard])
            if one is not None:
                found.append(one)
                starts[shard] = one.next
    return found, starts


def _of_shard(reader: JournalReader, shard: str, first: int, end: int | None) -> _ClosedSegments | None:
    """Return the consecutive Parquet segments with the rows of a shard from `first` on, or None.

    `end` is the number of the row before which the read ends; None means that the read has no end.
    """
    names: list[str] = []
    next_, is_cut = first, False
    folder = f"{shard.rpartition('/')[0]}/" if "/" in shard else ""
    for segment in reader.segments(shard):
        if end is not None and next_ >= end:
            break
        if segment.first > next_ or (segment.next is None and segment.first == next_):
            break
        if segment.next is not None and segment.next > next_:
            names.append(f"{folder}{segment.path.name}")
            is_cut = is_cut or segment.first < next_
            next_ = segment.next
    if not names:
        return None
    if end is not None and next_ > end:
        next_, is_cut = end, True
    return _ClosedSegments(shard, first, next_, names, is_cut)


def _table(
    spark: SparkSession, root: str, closed: _ClosedSegments, names: tuple[str, ...], options: LoadOptions
) -> DataFrame:
    """Return the rows of Parquet segments as a DataFrame.

    The column `shard` is filled with the name of the shard that is being read.
    """
    selection = selection_of(options)
    used = dict.fromkeys((*names, "sequence", "received", *selection.only))
    schema = spark_schema([name for name in used if name != "shard"])
    reader = spark.read.schema(schema)
    if not options.fail:
        reader = reader.option("ignoreMissingFiles", "true").option("ignoreCorruptFiles", "true")
    table = reader.parquet(*(f"{root}/{name}" for name in closed.names))
    if closed.is_cut:
        table = table.where((F.col("sequence") >= closed.first) & (F.col("sequence") < closed.next))
    for condition in _conditions(selection):
        table = table.where(condition)
    shard = F.lit(closed.shard).alias("shard")
    return table.select(*(shard if name == "shard" else F.col(name) for name in names))


def _conditions(selection: SelectedRows) -> list[Column]:
    """Convert a selection of rows to conditions on Spark columns."""
    found = [F.col(name).isin(*sorted(texts)) for name, texts in selection.only.items()]
    first, end = selection.received.first, selection.received.end
    if first is not None:
        found.append(F.col("received") >= F.timestamp_micros(F.lit(first)))
    if end is not None:
        found.append(F.col("received") < F.timestamp_micros(F.lit(end)))
    return found

"""Job `archive`: the journal as Parquet files by day and route, each row once, in files of a target size.

A run appends the rows since the last run, merges small files, and removes days beyond the retention; a run
without new rows changes nothing. Tables (Delta Lake, Iceberg) are written by
`gateway/pipeline/archive/tables.py`; other formats (ORC) by their own sinks, as a stream that ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import chain, count
from typing import Final, NamedTuple, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, StructField, StructType

from gateway.errors import PipelineError
from gateway.pipeline.archive.compaction import merge, merges_of
from gateway.pipeline.archive.manifest import Archive, ArchiveFile, Manifest, OvertakenError
from gateway.pipeline.archive.tables import (
    is_table_name,
    range_options,
    rows_since,
    snapshot,
    table_at,
    utc_date,
)
from gateway.pipeline.archive.writer import NAMES, write
from gateway.pipeline.columns import spark_schema
from gateway.pipeline.exclusive import FolderLease
from gateway.pipeline.journal.options import LoadOptions, Offsets, options_of
from gateway.pipeline.journal.planner import JournalPartition, next_of, reader_of
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.journal.table import read_journal
from gateway.pipeline.progress import Tell, progress
from gateway.pipeline.stores import hadoop_of, place_of, spark_reaches, spark_writes

FILE_BYTES: Final = 128 * 1_048_576
PART_BYTES: Final = 64 * 1_048_576  # Bytes of the journal in one part.
PARTS_MAX: Final = (
    # Parts that one task processes in sequence; each task writes files of its own, and few files are wanted.
    8
)
TASKS_PER_CORE: Final = 2  # Minimum, if there are enough parts.
PARQUET: Final = "parquet"
GRACE_SECS: Final = 3_600.0
"""Seconds that a removed file stays on disk, longer than a reader needs that has planned with it."""

Done = TypeVar("Done")


class ArchiveResult(NamedTuple):
    """Result of a run of the job `archive`.

    `rows` and `files` are the numbers of rows and files written, `missing` that of rows missing in the
    journal, `merged` that of files that were merged, and `dropped` that of files removed by retention. The
    totals are those of the whole archive after the run.
    """

    rows: int
    files: int
    missing: int
    merged: int
    dropped: int
    total_rows: int
    total_files: int
    total_bytes: int


def run(
    spark: SparkSession,
    journal: str,
    to: str,
    *,
    keep_days: int | None = None,
    file_bytes: int = FILE_BYTES,
    fail: bool = True,
    today: date | None = None,
    grace_secs: float = GRACE_SECS,
    sweep: bool = True,
    tell: Tell = lambda _: None,
) -> ArchiveResult:
    """Append the new rows of the journal to the archive `to`, then apply retention and merge files.

    `journal` and `to` are folders or URIs. Files of days more than `keep_days` days before `today` are
    removed; `keep_days` None removes none, and `today` None means the current day (UTC). `file_bytes` is the
    target size of a file. If `fail` is False, rows that were deleted or damaged before they were archived are
    skipped. Removed files are deleted after `grace_secs` seconds and, if `sweep` is True, files of
    interrupted runs as well. Dates and ages are by the clock of the folder or store that has the archive.
    `tell` is called with lines of text that report the progress. Raises OvertakenError if another run has
    changed the archive meanwhile, PipelineError, and errors of the journal's reader.
    """
    archive = Archive(place_of(to, hadoop_of(spark)).check_reachable())
    before = archive.manifest()
    before, swept = archive.sweep(before, grace_secs) if sweep else (before, 0)
    if swept:
        tell(f"archive: {swept} files of an interrupted run deleted")
    with progress(spark, "archive", tell):
        manifest, missing = _append_rows(spark, archive, before, journal, file_bytes, fail=fail)
        written = set(manifest.files) - set(before.files)
        manifest, dropped = _apply_retention(archive, manifest, keep_days, today)
        manifest, merged = _merge_small_files(spark, archive, manifest, file_bytes)
        _delete_removed_files(archive, manifest, grace_secs)
    return ArchiveResult(
        rows=sum(file.rows for file in written),
        files=len(written),
        missing=missing,
        merged=merged,
        dropped=dropped,
        total_rows=sum(file.rows for file in manifest.files),
        total_files=len(manifest.files),
        total_bytes=sum(file.byte_count for file in manifest.files),
    )


def following(run: Callable[[int], Done], every_secs: float) -> Iterator[Done]:
    """Call `run` with 0, 1, 2 and so on, without end, and yield each result.

    Calls begin at intervals of `every_secs` seconds, or immediately after a call that takes longer.
    """
    for number in count():
        begun = time.monotonic()
        yield run(number)
        time.sleep(max(0.0, begun + every_secs - time.monotonic()))


def rows_behind(spark: SparkSession, journal: str, path: str) -> int:
    """Return how many rows of the journal are not in the archive at `path`.

    Raises PipelineError if there is no archive, or if it has no position in the journal.
    """
    starts, ends = rows_since(spark, journal, offsets_of(spark, path), fail=False)
    return sum(ends.values()) - sum(starts.values())


def offsets_of(spark: SparkSession, path: str) -> Offsets:
    """Return, for each shard, the number of the next row that is not in the archive at `path`.

    Raises PipelineError if the archive has no position.
    """
    table = table_at(spark, path)
    if table is None:
        return found_in(Archive(place_of(path, hadoop_of(spark)))).offsets
    return snapshot(spark, table)[1]


def _append_rows(
    spark: SparkSession, archive: Archive, manifest: Manifest, journal: str, file_bytes: int, *, fail: bool
) -> tuple[Manifest, int]:
    """Append the journal's new rows to the archive, and save a manifest that lists the new files.

    `file_bytes` is the target size of a file. If `fail` is False, rows that the journal has lost are skipped.
    Return the manifest, and the number of rows missing in the journal.
    """
    options = _options(spark, manifest.offsets, journal, fail=fail)
    table = JournalTable(options, NAMES)
    parts = [part for part in table.partitions() if isinstance(part, JournalPartition)]
    if not parts:
        return manifest, 0

    def write_files(some: Sequence[JournalPartition]) -> list[ArchiveFile]:
        name = f"{some[0].shard.replace('/', '~')}-{some[0].first:020}"
        return write(archive, name, chain.from_iterable(map(table.read_coded, some)), file_bytes)

    tasks = [*_split_parts(parts, TASKS_PER_CORE * spark.sparkContext.defaultParallelism)]
    with archive.unless_overtaken():
        found = spark.sparkContext.parallelize(tasks, len(tasks)).map(write_files).collect()
        files = archive.checked_files([file for some in found for file in some])
    ends: Offsets = {}
    for part in parts:
        ends[part.shard] = max(part.next, ends.get(part.shard, 0))
    begins = {shard: min(part.first for part in parts if part.shard == shard) for shard in ends}
    row_count = sum(end - manifest.offsets.get(shard, begins[shard]) for shard, end in ends.items())
    missing = row_count - sum(file.rows for file in files)
    return _save_manifest(archive, manifest.next_version(offsets=ends, gained=files), files), missing


def _save_manifest(archive: Archive, manifest: Manifest, gained: Sequence[ArchiveFile]) -> Manifest:
    """Save `manifest`, which lists the new files `gained`, and return it.

    If another run has saved a manifest meanwhile, delete the new files and raise OvertakenError.
    """
    try:
        return archive.save(manifest)
    except OvertakenError:
        archive.delete(gained)
        raise


def _split_parts(parts: Sequence[JournalPartition], tasks: int) -> Iterator[Sequence[JournalPartition]]:
    """Yield groups of the journal's partitions `parts`, one group for each Spark task.

    There are about `tasks` groups. There are more if otherwise a group had more than PARTS_MAX partitions.
    """
    each = min(PARTS_MAX, -(-len(parts) // tasks))
    for first in range(0, len(parts), each):
        yield parts[first : first + each]


def _options(spark: SparkSession, offsets: Offsets, journal: str, *, fail: bool) -> LoadOptions:
    """Return load options that select the journal's rows that follow the position `offsets`.

    If `fail` is False, rows that the journal has lost are skipped.
    """
    hadoop = hadoop_of(spark)
    load_options = {
        "path": journal,
        "partitionBytes": str(PART_BYTES),
        "failOnDataLoss": str(fail).lower(),
    }
    reader = reader_of(options_of(load_options, stream=False, hadoop=hadoop))
    with reader.cached_listing():
        shards = reader.shards()
        shard_offsets = {shard: number for shard, number in offsets.items() if shard in shards}
        ends = {shard: next_of(reader, shard) for shard in shard_offsets}
    for shard, number in shard_offsets.items():
        end = ends[shard]
        if end < number and fail:
            raise PipelineError(
                f"shard {shard} of the journal in {journal} ends before row {end}, and the archive has the"
                f" rows before {number}: its end is lost, or it is another journal; --skip-lost goes on"
            )
    return options_of(
        load_options | {"startingOffsets": json.dumps(shard_offsets)}, stream=False, hadoop=hadoop
    )


def _apply_retention(
    archive: Archive, manifest: Manifest, keep_days: int | None, today: date | None
) -> tuple[Manifest, int]:
    """Remove from the manifest the files of days that are more than `keep_days` days before `today`.

    `keep_days` None removes none, and `today` None means the current day. Return the manifest, and the number
    of removed files.
    """
    if keep_days is None:
        return manifest, 0
    now = archive.now()
    oldest = (today or datetime.fromtimestamp(now, UTC).date()) - timedelta(days=keep_days)
    old = [file for file in manifest.files if file.date < oldest.isoformat()]
    if old:
        manifest = archive.save(manifest.next_version(lost=old, now=now))
    return manifest, len(old)


def _merge_small_files(
    spark: SparkSession, archive: Archive, manifest: Manifest, file_bytes: int
) -> tuple[Manifest, int]:
    """Merge small files of the archive. Return the new manifest, and the number of files that were merged."""
    merges = merges_of(manifest, file_bytes)
    if not merges:
        return manifest, 0
    with archive.unless_overtaken():
        made = (
            spark.sparkContext.parallelize(merges, len(merges))
            .map(lambda one: merge(archive, one, file_bytes))
            .collect()
        )
        gained = archive.checked_files([file for some in made for file in some])
    old = [file for one in merges for file in one.files]
    return _save_manifest(
        archive, manifest.next_version(gained=gained, lost=old, now=archive.now()), gained
    ), len(old)


def _delete_removed_files(archive: Archive, manifest: Manifest, grace_secs: float) -> None:
    """Delete the files that were removed from the manifest at least `grace_secs` seconds ago."""
    oldest = archive.now() - grace_secs if manifest.left else 0.0
    over = [one for one in manifest.left if one.since <= oldest]
    if over:
        archive.delete(over)
        archive.save(manifest.without_files(over))


def read_archive(
    spark: SparkSession, path: str, journal: str | None = None, *, columns: Sequence[str] | None = None
) -> DataFrame:
    """Return the archive at `path` as a DataFrame with the journal's columns and `date`.

    `path` is a folder, a URI, or the name of a table. A query with conditions on `date` and `route` skips
    files. If `journal` is given, its rows that are not archived yet are included. Then `columns` should name
    the needed columns (None: all), because Spark does not tell the journal source which columns a query uses.
    Of a Parquet archive only the files in the newest manifest are read. Raises PipelineError if there is no
    archive, or if the journal has lost rows that are not archived.
    """
    chosen = (*NAMES, "date") if columns is None else tuple(dict.fromkeys(columns))
    table = table_at(spark, path)
    if table is not None and journal is None:
        return _of_table(spark.table(table.name), path).select(*chosen)
    if table is not None:
        found, offsets = snapshot(spark, table)
        rows = _of_table(found, path)
    else:
        archive = Archive(place_of(path, hadoop_of(spark)))
        manifest = found_in(archive)
        rows, offsets = _filed(spark, archive, manifest), manifest.offsets
    rows = rows.select(*chosen)
    if journal is None:
        return rows
    read = ",".join(dict.fromkeys("received" if name == "date" else name for name in chosen))
    options = {"columns": read, **range_options(*rows_since(spark, journal, offsets))}
    rest = read_journal(spark, journal, options)
    return rows.union(rest.select(*(utc_date().alias(one) if one == "date" else one for one in chosen)))


def found_in(archive: Archive) -> Manifest:
    """Return the newest manifest of an archive. Raises PipelineError if there is none."""
    manifest = archive.manifest()
    if not manifest.number:
        where = archive.uri
        raise PipelineError(f"no archive in {where}; create one with gateway pipeline archive --to {where}")
    return manifest


def _filed(spark: SparkSession, archive: Archive, manifest: Manifest) -> DataFrame:
    schema = StructType([*spark_schema().fields, StructField("date", DateType())])
    if not manifest.files:
        return spark.createDataFrame([], schema)
    root = spark_reaches(spark, archive.place)
    found = spark.read.schema(schema).option("basePath", root)
    table = found.parquet(*(f"{root}/{file.path}" for file in manifest.files))
    route = F.coalesce(F.col("route"), F.lit("")).alias("route")
    return table.select(*(route if name == "route" else name for name in (*NAMES, "date")))


def _of_table(table: DataFrame, name: str) -> DataFrame:
    """Return an archive table with the journal's columns in their order; columns that it lacks are null.

    `name` is the name of the table, for errors. Raises PipelineError if the table is not an archive.
    """
    if not {"shard", "sequence", "date"} <= set(table.columns):
        raise PipelineError(f"{name} is not an archive: its columns are {', '.join(table.columns)}")
    types = {one.name: one.dataType.simpleString() for one in table.schema.fields}

    def column(field: StructField) -> Column:
        if field.name == "route":  # The partition of an empty route is null.
            return F.coalesce(F.col("route"), F.lit("")).alias("route")
        found = F.col(field.name) if field.name in types else F.lit(None)
        # A table may store numbers in a wider type.
        as_is = types.get(field.name) == field.dataType.simpleString()
        return found if as_is else found.cast(field.dataType).alias(field.name)

    return table.select(*map(column, spark_schema().fields), "date")


def run_stream(
    spark: SparkSession,
    journal: str,
    to: str,
    format_: str,
    *,
    checkpoint: str | None = None,
    fail: bool = True,
) -> int:
    """Archive the journal with Spark's own writer for the format `format_`. Return the number of rows.

    `to` is a folder, a URI, or the name of a table. `checkpoint` is the folder for the stream's position: by
    default it is below the folder `to`, and a named table needs one. If `fail` is False, rows that were
    deleted or damaged are skipped. Raises PipelineError if the session does not have the format, or if
    writing fails.
    """
    is_table = is_table_name(to)
    to = to if is_table else spark_writes(spark, place_of(to, hadoop_of(spark)))
    if is_table and checkpoint is None:
        raise PipelineError(f"{to} is the name of a table: set --checkpoint to a folder for the position")
    checkpoint_folder = checkpoint or f"{to}/_checkpoint"
    options = {"startingOffsets": "earliest", "failOnDataLoss": str(fail).lower()}
    rows = spark.readStream.format("gateway_journal").options(**options).load(journal)
    sink = (
        rows.withColumn("date", utc_date())
        .writeStream.format(format_)
        .partitionBy("date", "route")
        .option("checkpointLocation", checkpoint_folder)
        .trigger(availableNow=True)
    )
    try:
        with FolderLease([place_of(checkpoint_folder, hadoop_of(spark))]):
            query = sink.toTable(to) if is_table else sink.start(to)
            query.awaitTermination()
    except (AnalysisException, Py4JJavaError) as error:
        stated = error.java_exception if isinstance(error, Py4JJavaError) else error
        raise PipelineError(
            f"this session cannot write {format_}: {stated.getMessage()}"
            " (formats come with packages: --conf spark.jars.packages=...)"
        ) from error
    return sum(progress.numInputRows for progress in query.recentProgress)

"""Job `rates`: messages, bytes, frames, failures and latencies per time window, route and pair of protocols.

It runs as a batch over the journal or an archive, or as a stream that follows the gateway. The stream reports
a window when the journal is complete up to the window's end, and computes it from the journal itself: Spark
has no state and drops no row. A message that takes two routes has two rows and counts for both. The rows that
are written when a message *leaves* an outbox are excluded, because the message was counted when it was
accepted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

from pyarrow import fs
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from gateway.errors import PipelineError
from gateway.pipeline.archive.tables import FORMATS, is_table_name, prepare_table, read_table, upsert
from gateway.pipeline.exclusive import LEASES, FolderLease
from gateway.pipeline.failures import cause_of
from gateway.pipeline.jobs.archive import PARQUET, read_archive
from gateway.pipeline.jobs.batches import check_checkpoint
from gateway.pipeline.journal.filters import Range, SelectedRows, options_for
from gateway.pipeline.journal.options import Offsets, options_of
from gateway.pipeline.journal.planner import reader_of
from gateway.pipeline.journal.table import read_journal
from gateway.pipeline.progress import Tell, progress
from gateway.pipeline.report.database import is_database, put
from gateway.pipeline.report.page import WindowRate, page
from gateway.pipeline.stores import StoreFolder, hadoop_of, place_of, spark_writes
from gateway.pipeline.times import moment
from gateway.pipeline.traffic.windows import WindowRows, Windows, duration_us, runs_of
from gateway.protocols import DIALECTS
from gateway.store.journal.columns import LEFT_OUTBOX
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import BlockLocation

NEEDED: Final = (
    "received",
    "settled",
    "route",
    "client",
    "source_protocol",
    "target_protocol",
    "target_address",
    "outcome",
    "reason_text",
    "assurance",
    "delivered_assurance",
    "body_size",
)
KEYS: Final = ("begin", "end", "route", "source_protocol", "target_protocol", "client")
LATE: Final = "10 minutes"
RANGES_MAX: Final = 20  # Time ranges in one read; with more, their whole span is read.
REPORT_ROWS_MAX: Final = 200_000
SILENT_SECS: Final = 180.0  # Three heartbeats of a running gateway.
FRAME_BYTES: Final = 131_072  # Default of limits.frame_bytes_max.


class Rates(NamedTuple):
    """Result of a run: the number of rows in the rates table, and of the messages that they count."""

    rows: int
    messages: int


def rates(rows: DataFrame, window: str, *, clients: bool = False) -> DataFrame:
    """Return message rates and latencies for each window of time, route and pair of protocols.

    `rows` are rows of the journal, and `window` is the length of a window, such as "1 minute". With
    `clients`, there is a rate for each client as well. Latency is from receipt to settlement, in
    milliseconds.
    """
    latency = F.col("latency_ms")
    ways = [F.col(name) for name in ("route", "source_protocol", "target_protocol")]
    deliveries = (
        rows.where(~F.col("reason_text").rlike(LEFT_OUTBOX))
        .withColumn("latency_ms", (_micros("settled") - _micros("received")) / 1_000)
        .withColumn("frames", _frames())
    )
    percentiles = F.percentile_approx(latency, [0.5, 0.95, 0.99], 1_000)
    grouped = deliveries.groupBy(F.window("received", window), *ways, *([F.col("client")] if clients else []))
    found = grouped.agg(
        F.count("*").alias("messages"),
        F.sum("body_size").alias("body_bytes"),
        F.sum("frames").alias("frames"),
        _count("released"),
        _count("rejected"),
        percentiles.alias("percentiles"),
        F.max(latency).alias("max_ms"),
    )
    return found.select(
        F.col("window.start").alias("begin"),
        F.col("window.end").alias("end"),
        *ways,
        *([F.col("client")] if clients else []),
        "messages",
        "body_bytes",
        "frames",
        "released",
        "rejected",
        *(
            F.col("percentiles")[place].alias(name)
            for place, name in enumerate(("p50_ms", "p95_ms", "p99_ms"))
        ),
        "max_ms",
    )


def _micros(name: str) -> Column:
    return F.unix_micros(name)


def _count(outcome: str) -> Column:
    return F.sum((F.col("outcome") == outcome).cast("int")).alias(outcome)


def _frames() -> Column:
    """Return a column with the least possible number of frames, packets and commands for each message.

    Those of the message's receipt and of its delivery by a route are added. The real number is unknown,
    because the journal does not record how clients split messages.
    """
    came = _frames_of("source_protocol", "assurance")
    went = _frames_of("target_protocol", "delivered_assurance")
    crossed = (F.col("route") != "") & F.col("target_address").isNotNull() & (F.col("outcome") == "accepted")
    return (came + F.when(crossed, went).otherwise(0)).cast("long")


def _frames_of(protocol: str, assurance: str) -> Column:
    pieces = F.ceil(F.col("body_size") / FRAME_BYTES)
    found = F.lit(0)
    for dialect in DIALECTS.values():
        heads, pieces_min, answers = dialect.frame_count
        count = F.element_at(F.array(*map(F.lit, answers)), F.col(assurance) + 1) + heads
        if pieces_min is not None:
            count = count + F.greatest(pieces, F.lit(pieces_min))
        found = F.when(F.col(protocol) == dialect.name, count).otherwise(found)
    return found


def run(
    spark: SparkSession,
    journal: str | None,
    *,
    window: str = "1 minute",
    clients: bool = False,
    archive: str | None = None,
    start: str | None = None,
    end: str | None = None,
    to: str | None = None,
    format_: str = PARQUET,
    report: Path | None = None,
    tell: Tell = lambda _: None,
) -> Rates:
    """Compute message rates from a journal, an archive, or both; archived rows are read from the archive.

    Rows received from `start` up to, not including, `end` (ISO 8601) count. `window` is the length of a
    window of time, and `clients` requests rates for each client. The result is written as Parquet to the new
    folder `to`, or into a table of the format `format_` or a database, replacing older rates of the same
    windows; and as an HTML page to `report`. `tell` is called with lines of text that report the progress.
    Raises PipelineError if the rates cannot be computed or written.
    """
    source = " and ".join(filter(None, (archive, journal)))
    if archive is None:
        bounds = zip(("receivedFrom", "receivedBefore"), (start, end), strict=True)
        load_options = {name: moment(time).isoformat() for name, time in bounds if time is not None}
        rows = _journal(spark, str(journal), **load_options)
    else:
        rows = read_archive(spark, archive, journal, columns=NEEDED)
    received = F.col("received")
    if start is not None:
        rows = rows.where(received >= F.lit(moment(start)))
    if end is not None:
        rows = rows.where(received < F.lit(moment(end)))
    is_folder = to is not None and not is_database(to) and format_ not in FORMATS
    try:
        with (
            _leased_folder(spark, str(to)) if is_folder else nullcontext() as new,
            progress(spark, "rates", tell),
        ):
            found = rates(rows, window, clients=clients).orderBy("begin", "route").persist()
            counted = found.agg(F.count("*"), F.sum("messages")).first()
            assert counted is not None
            if to is not None:
                _write_rates(found, to, format_, str(new), mode="append")  # A lease is in the folder.
            if report is not None:
                _report(found, source, report)
            found.unpersist()
    except AnalysisException as error:
        raise PipelineError(f"rates not written: {cause_of(str(error))}") from error
    return Rates(counted[0], counted[1] or 0)


def follow(
    spark: SparkSession,
    journal: str,
    *,
    to: str,
    format_: str = PARQUET,
    checkpoint: str | None = None,
    window: str = "1 minute",
    lateness: str = LATE,
    clients: bool = False,
    starting: str = "earliest",
    report: Path | None = None,
    available_now: bool = False,
    every: str = "10 seconds",
    tell: Tell = lambda _: None,
) -> StreamingQuery:
    """Compute message rates as a stream, and return the running query.

    A window of time is written to `to`/batch=N/*.parquet when the journal is complete up to the window's end,
    or when rows received `lateness` after its end have been read; the page `report` is rewritten each time.
    If rows of the window are read later, the window is written again in a higher batch, and `newest_rates`
    returns the newest. A new stream begins at the offsets `starting`, and reads new rows at the interval
    `every`. With `available_now` the query ends at the present end of the journal. The position is stored in
    `to`/_checkpoint, pending windows in `to`/_windows. A table of another format has each window once, the
    newest; a named table needs a `checkpoint` for the position. `tell` is called with lines of text that
    report the progress.
    """
    database = is_database(to)
    if (database or is_table_name(to)) and checkpoint is None:
        raise PipelineError("a table without a folder needs a folder for the position: set --checkpoint")
    if database and report is not None:
        raise PipelineError("--report cannot be combined with a database")
    checkpoint_folder = _check_stream_folder(spark, to if checkpoint is None else checkpoint)
    if not (database or is_table_name(to)):
        to = _check_stream_folder(spark, to, None if format_ in FORMATS else checkpoint_folder)
    frame = rates(_journal(spark, journal), window, clients=clients)  # Spark checks the query here.
    if format_ in FORMATS and not database:
        # Before the checkpoint folder exists: Delta refuses a folder that is not empty.
        prepare_table(spark, to, format_, frame)
    late_us = duration_us(lateness)
    reader = reader_of(
        options_of({"path": journal, "failOnDataLoss": "false"}, stream=True, hadoop=hadoop_of(spark))
    )

    silent: set[str] = set()

    def tell_batch(batch: DataFrame, number: int) -> None:
        lease.check()
        touched = _touched(batch, window)
        windows = _windows(spark, checkpoint_folder, number - 1).read(number, touched)
        marks = _marks(reader, windows.ends, silent, tell)
        due_windows = windows.take_due(touched, marks, late_us)
        chosen = due_windows.windows
        if due_windows.late_rows:
            pruned = _deleted_windows(reader, due_windows.again)
            chosen = [one for one in due_windows.windows if one not in pruned]
            tell(
                f"rates: {due_windows.late_rows} rows arrived after their window was written; "
                f"{len(due_windows.again) - len(pruned)} windows are rewritten"
                + (
                    f", and {len(pruned)} are not, because retention has deleted some of their rows"
                    if pruned
                    else ""
                )
            )
        if chosen:
            ranges = runs_of(chosen)
            if len(ranges) > RANGES_MAX:
                ranges = [(ranges[0][0], ranges[-1][1])]
            # The source skips files by one range only, so each range is read separately.
            options = {"endingOffsets": json.dumps(windows.ends), "failOnDataLoss": "false"}
            parts = [_journal(spark, journal, **options, **_time_options(*times)) for times in ranges]
            rows = reduce(DataFrame.unionAll, parts)
            begins = spark.createDataFrame([(begin,) for begin, _ in chosen], "begin_us long")
            found = rates(rows, window, clients=clients).join(
                F.broadcast(begins), _micros("begin") == F.col("begin_us")
            )
            found = found.drop("begin_us")
            # A batch that Spark repeats, for instance after a kill, overwrites the first attempt.
            _write_rates(found, to, format_, f"{to}/batch={number}", mode="overwrite")
            if report is not None:
                newest = read_table(spark, to, format_) if format_ in FORMATS else newest_rates(spark, to)
                _report(newest, journal, report)
            tell(f"rates: {len(chosen)} windows more" + ("" if database else f" in {to}"))
        spark.createDataFrame([(windows.encode(),)], "value string").coalesce(1).write.mode("overwrite").text(
            f"{checkpoint_folder}/_windows/{number % 2}"
        )

    stream = spark.readStream.format("gateway_journal").options(columns="shard,sequence,received")
    rows = stream.option("startingOffsets", starting).load(journal)
    writer = rows.writeStream.foreachBatch(tell_batch).queryName("rates")
    trigger: dict[str, Any] = {"availableNow": True} if available_now else {"processingTime": every}
    ready = writer.trigger(**trigger).option("checkpointLocation", f"{checkpoint_folder}/_checkpoint")
    folders = [checkpoint_folder] if database or format_ in FORMATS else [checkpoint_folder, to]
    lease = FolderLease(place_of(folder, hadoop_of(spark)) for folder in folders)
    return lease.start_stream(ready.start)


def _write_rates(found: DataFrame, to: str, format_: str, folder: str, *, mode: str) -> None:
    """Write the rates `found` to `to`, which is a database, or a table of the format `format_`.

    For Parquet, they are written to `folder` with Spark's write mode `mode`.
    """
    if is_database(to):
        put(to, found.toLocalIterator())
    elif format_ in FORMATS:
        upsert(found.sparkSession, to, format_, found, _keys(found))
    else:
        found.coalesce(1).write.mode(mode).parquet(folder)


def _keys(found: DataFrame) -> list[str]:
    """Return the names of those columns of `found` that identify a row of rates."""
    return [one for one in KEYS if one in found.columns]


def _check_stream_folder(spark: SparkSession, to: str, checkpoint_folder: str | None = None) -> str:
    """Check that the stream may write to the folder `to`. Return the folder's name for Spark's writers.

    `checkpoint_folder` is the folder of the stream's checkpoint. Raises PipelineError if the store is
    unreachable, or if `to` was written with another checkpoint.
    """
    hadoop = hadoop_of(spark)
    if checkpoint_folder is not None:
        check_checkpoint(place_of(to, hadoop), place_of(checkpoint_folder, hadoop))
    return spark_writes(spark, place_of(to, hadoop))


@contextmanager
def _leased_folder(spark: SparkSession, to: str) -> Iterator[str]:
    """Lease the new folder `to` for the block, and yield its name for Spark's writers.

    Raises PipelineError if the folder exists, or if another run is writing to it.
    """
    place = place_of(to, hadoop_of(spark)).check_reachable()
    _check_new(place)
    name = spark_writes(spark, place)
    with FolderLease([place]):
        _check_new(place)  # Another run may just have ended.
        yield name


def _check_new(place: StoreFolder) -> None:
    """Raise PipelineError if the folder `place` exists, unless it contains only a lease file."""
    system, path = place.arrow()
    found = system.get_file_info(path).type
    if found == fs.FileType.NotFound:
        return
    inside = [] if found == fs.FileType.File else system.get_file_info(fs.FileSelector(path))
    if [info.base_name for info in inside] != [LEASES]:
        raise PipelineError(f"{place.uri} exists: give a new folder, or a table")


def newest_rates(spark: SparkSession, to: str) -> DataFrame:
    """Return the newest rates of each window that `follow` has written to `to`."""
    rows = spark.read.parquet(to)
    newest = rows.groupBy("begin").agg(F.max("batch").alias("batch"))
    return rows.join(F.broadcast(newest), ["begin", "batch"]).select(*rows.columns)


def _touched(batch: DataFrame, window: str) -> list[WindowRows]:
    """Count the rows of a micro-batch by shard and window. `window` is the length of a window."""
    times = F.window("received", window)
    found = batch.groupBy("shard", times.alias("window")).agg(
        F.count("*").alias("rows"),
        (F.max("sequence") + 1).alias("next"),
        F.max(_micros("received")).alias("last_us"),
    )
    begin, end = _micros("window.start").alias("begin"), _micros("window.end").alias("end")
    return [
        WindowRows(*row) for row in found.select("shard", begin, end, "rows", "next", "last_us").collect()
    ]


def _windows(spark: SparkSession, to: str, number: int) -> Windows:
    """Return the state of the windows that a stream has stored in the folder `to` after micro-batch `number`.

    Before the first micro-batch (`number` is negative) there are no windows. Raises PipelineError if the
    stored state is missing.
    """
    if number < 0:
        return Windows()
    try:
        row = spark.read.text(f"{to}/_windows/{number % 2}", wholetext=True).first()
    except AnalysisException as error:
        raise PipelineError(
            f"{to} has a position and no windows that wait: another release has written it; give another"
            " folder"
        ) from error
    assert row is not None
    return Windows.decode(row[0])


def _marks(reader: JournalReader, ends: Offsets, silent: set[str], tell: Tell) -> dict[str, int | None]:
    """Return, for each shard, the time up to which its rows before `ends` are complete, in microseconds UTC.

    `ends` has a row number for each shard. The time is None if it is unknown. Shards of stopped gateways are
    left out, because windows do not wait for them. `silent` has the shards that the previous call has left
    out; it is updated, and new ones are reported with `tell`.
    """
    shards = reader.shards()
    now = silent_of(reader, shards)
    if now - silent:
        tell(f"rates: nothing is written by {', '.join(sorted(now))}, which no window waits for")
    silent.clear()
    silent |= now
    return {shard: reader.low_water(shard, ends.get(shard)) for shard in shards if shard not in silent}


def silent_of(reader: JournalReader, shards: Iterable[str], now: float | None = None) -> set[str]:
    """Return the shards whose gateways have stopped; none if the gateways of all shards have stopped.

    A running gateway writes to its shard at least once a minute. `now` is in UTC seconds; None means the
    present time. The result is also empty for a journal in a store, where file times do not show activity.
    """
    folder: object = reader.folder
    if not isinstance(folder, Path):
        return set()
    now = time.time() if now is None else now
    silent, alive = set(), False
    for shard in shards:
        changed = [one.path.stat().st_mtime for one in reader.segments(shard)[-1:]]
        if changed and now - changed[0] > SILENT_SECS:
            silent.add(shard)
        else:
            alive = True
    return silent if alive else set()


def _deleted_windows(reader: JournalReader, windows: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return those of `windows` whose rows may have been deleted by retention.

    These windows begin before the oldest remaining row of a shard whose first rows were deleted. A window is
    (begin, end) in microseconds UTC.
    """
    oldest = 0
    for shard in reader.shards():
        first = next((item for item in reader.index(shard) if isinstance(item, BlockLocation)), None)
        if first is not None and first.header.base:
            oldest = max(oldest, first.header.first_us)
    return {window for window in windows if window[0] < oldest}


def _time_options(begin: int, end: int) -> dict[str, str]:
    """Return load options for rows received from `begin` up to, not including, `end` (microseconds UTC)."""
    return options_for(SelectedRows(Range(begin, end)))


def _journal(spark: SparkSession, folder: str, **options: str) -> DataFrame:
    return read_journal(spark, folder, {"columns": ",".join(NEEDED)} | options)


def _report(found: DataFrame, source: str, path: Path) -> None:
    """Write the HTML page `path` with the newest of the rates `found`, and replace the old page.

    At most REPORT_ROWS_MAX rates are shown. `source` is the name of the journal or archive.
    """
    newest = found.orderBy(F.col("begin").desc()).limit(REPORT_ROWS_MAX).collect()
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        draft.write_text(page(_rates(newest), source), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _rates(rows: Iterable[Row]) -> list[WindowRate]:
    made = []
    for row in rows:
        values: dict[str, Any] = row.asDict()
        begin, end = values.pop("begin").timestamp(), values.pop("end").timestamp()
        values.pop("batch", None)
        made.append(WindowRate(begin=begin, end=end, client=values.pop("client", ""), **values))
    return made

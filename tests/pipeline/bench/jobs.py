"""What is measured: a job for each line of the table, with what it is compared with.

A job is a function of a Bench; it is run once to warm up, then in turns with the others of its group.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from gateway.mapping.loader import parse
from gateway.pipeline.jobs import archive, rates
from gateway.pipeline.jobs.backtest import backtest
from gateway.pipeline.journal.parquet_writer import close_segments
from gateway.pipeline.journal.table import read_journal as read_table
from gateway.pipeline.traffic.fates import CandidateMapping
from gateway.pipeline.traffic.loader import Recording, RowSelection
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import parquet_name
from tests.pipeline.bench.journal import DAY_COUNTS
from tests.pipeline.streams import finished

Job = Callable[["Bench"], None]
FEW = "shard,sequence,received,route,client,source_address,target_address,outcome,body_size,body"


@dataclass
class Bench:
    """A session, a journal, and a folder for what is written."""

    spark: SparkSession
    journal: Path
    folder: Path
    written: int = field(default=0)

    def table(self, columns: str) -> DataFrame:
        """The journal, some columns of it."""
        return self.spark.read.format("gateway_journal").option("columns", columns).load(str(self.journal))

    def fresh(self, name: str) -> str:
        """A folder that is not there yet; the one before of that name is gone."""
        for old in self.folder.glob(f"{name}-*"):
            shutil.rmtree(old)
        self.written += 1
        return str(self.folder / f"{name}-{self.written - 1}")

    def files(self) -> list[list[Path]]:
        """The journal's files: the first of each shard, the second of each, and so on."""
        shards = {path.name.partition("-")[0] for path in self.journal.glob("*.gwj")}
        of_each = [sorted(self.journal.glob(f"{one}-*")) for one in shards]
        return [list(some) for some in zip(*of_each, strict=True)]

    def linked(self, files: Iterable[Iterable[Path]]) -> Path:
        """A journal of these files."""
        folder = Path(self.fresh("linked"))
        folder.mkdir(parents=True)
        for path in chain.from_iterable(files):
            (folder / path.name).symlink_to(path)
        return folder

    def archive(self) -> str:
        """An archive of the same rows."""
        path = self.folder / "kept"
        if not path.exists():
            archive.run(self.spark, str(self.journal), str(path))
        return str(path)

    def closed(self) -> str:
        """A journal of the same rows whose segments are Parquet, a file for each shard."""
        path = self.folder / "closed"
        if not path.exists():
            path.mkdir(parents=True)
            reader = JournalReader(self.journal)
            for shard in reader.shards():
                end = reader.end(shard)
                close_segments(self.journal, int(shard), 0, end, path / parquet_name(int(shard), 0, end))
        return str(path)

    def beside(self, name: str) -> Path:
        """Another journal; "": the one that is measured."""
        return self.journal.with_name(name) if name else self.journal

    def parquet(self, name: str = "") -> str:
        """The same rows as a journal has, all columns, as Spark itself writes and reads them."""
        path = self.folder / f"parquet{name}"
        if not path.exists():
            rows = self.spark.read.format("gateway_journal").load(str(self.beside(name)))
            rows.write.parquet(str(path))
        return str(path)


NUMBERS = "source_address,body_size,settled"


def _aggregated(table: DataFrame) -> None:
    table.groupBy("source_address").agg({"body_size": "sum", "settled": "max", "*": "count"}).collect()


def read_journal(name: str = "") -> Job:
    """Rows of a journal into an aggregate."""

    def read(bench: Bench) -> None:
        table = bench.spark.read.format("gateway_journal").option("columns", NUMBERS)
        _aggregated(table.load(str(bench.beside(name))))

    return read


def read_closed(bench: Bench) -> None:
    """The same from segments in Parquet, as a program of ours reads a journal."""
    _aggregated(read_table(bench.spark, bench.closed(), {"columns": NUMBERS}))


def closed(bench: Bench) -> None:
    """Writing of all segments as Parquet, all columns, as the process beside a gateway does it."""
    shutil.rmtree(bench.folder / "closed", ignore_errors=True)
    bench.closed()


def read_ids(bench: Bench) -> None:
    """Message ids into an aggregate."""
    bench.table("message_id").selectExpr("max(message_id)").collect()


def read_all(bench: Bench) -> None:
    """All columns, into nothing."""
    rows = bench.spark.read.format("gateway_journal").load(str(bench.journal))
    rows.write.format("noop").mode("overwrite").save()


def read_all_closed(bench: Bench) -> None:
    """The same from segments in Parquet."""
    read_table(bench.spark, bench.closed()).write.format("noop").mode("overwrite").save()


def read_all_parquet(bench: Bench) -> None:
    """The same from Parquet files of the same rows."""
    rows = bench.spark.read.parquet(bench.parquet())
    rows.write.format("noop").mode("overwrite").save()


def read_parquet(name: str = "") -> Job:
    """The same from Parquet files of the same rows."""

    def read(bench: Bench) -> None:
        _aggregated(bench.spark.read.parquet(bench.parquet(name)))

    return read


def read_archive(bench: Bench) -> None:
    """The same from an archive."""
    _aggregated(archive.read_archive(bench.spark, bench.archive()))


def read_both(bench: Bench) -> None:
    """The same from an archive, and of the journal what that has not yet: the newest file of each shard."""
    to = bench.folder / "most"
    if not to.exists():
        archive.run(bench.spark, str(bench.linked(bench.files()[:-1])), str(to))
    columns = NUMBERS.split(",")
    _aggregated(archive.read_archive(bench.spark, str(to), str(bench.journal), columns=columns))


def read_bodies(bench: Bench) -> None:
    """Bodies and addresses into an aggregate."""
    bench.table("source_address,body").selectExpr("max(length(body))", "max(source_address)").collect()


def _streamed(bench: Bench, columns: str | None) -> None:
    source = bench.spark.readStream.format("gateway_journal").option("startingOffsets", "earliest")
    source = source if columns is None else source.option("columns", columns)
    to = bench.fresh("stream")
    writer = source.load(str(bench.journal)).writeStream.format("parquet")
    ready = writer.option("checkpointLocation", f"{to}-c").trigger(availableNow=True)
    finished(lambda: ready.start(to))
    shutil.rmtree(f"{to}-c", ignore_errors=True)


def stream(bench: Bench) -> None:
    """As a stream into Parquet, ten columns with the body."""
    _streamed(bench, FEW)


def stream_all(bench: Bench) -> None:
    """As a stream into Parquet, all columns."""
    _streamed(bench, None)


def archived(bench: Bench) -> None:
    """`archive`, all columns, with merging."""
    archive.run(bench.spark, str(bench.journal), bench.fresh("archive"))


def archived_bit_by_bit(bench: Bench) -> None:
    """`archive --follow`: a run whenever there is another file of each shard."""
    to, journal = bench.fresh("followed"), bench.linked(())
    for files in bench.files():
        for path in files:
            (journal / path.name).symlink_to(path)
        archive.run(bench.spark, str(journal), to, sweep=False)
    assert archive.rows_behind(bench.spark, str(bench.journal), to) == 0


def rated(name: str = "") -> Job:
    """`rates` per minute, with its page."""

    def rate(bench: Bench) -> None:
        rates.run(bench.spark, str(bench.beside(name)), report=bench.folder / "rates.html")

    return rate


def rated_archive(bench: Bench) -> None:
    """The same of an archive, which Spark's own reader reads."""
    rates.run(bench.spark, None, archive=bench.archive(), report=bench.folder / "rates.html")


MAPPING = """version: 1
routes:
  - name: telemetry
    from: {endpoint: mqtt, topic: "plant/{line}/{machine}/{rest...}"}
    to: {endpoint: erp, exchange: telemetry, routing_key: "{line}.{machine}.{rest}"}
    delivery: {qos1: persistent}
  - name: other
    from: {endpoint: mqtt, topic: "plant/line7/#"}
    to: {endpoint: erp, queue: seven}
"""
CONDITION = MAPPING + '    when: "body.pressure > 1010.0"\n'


def _backtested(
    bench: Bench, text: str, span: RowSelection | None = None, archive: str | None = None
) -> None:
    candidate = CandidateMapping([parse(text)], {"<text>": text}, {})
    journal = str(bench.journal) if archive is None else None
    recording = Recording(bench.spark, journal, span or RowSelection(), archive)
    assert backtest(recording, candidate).messages > 0


def backtested(bench: Bench) -> None:
    """`backtest` of two routes, against what happened."""
    _backtested(bench, MAPPING)


def backtested_with_condition(bench: Bench) -> None:
    """The same, with a condition that looks into one message of fifty."""
    _backtested(bench, CONDITION)


def backtested_archive(bench: Bench) -> None:
    """The same of an archive."""
    _backtested(bench, MAPPING, archive=bench.archive())


def backtested_where(bench: Bench) -> None:
    """The same of rows that Spark is asked for."""
    _backtested(bench, MAPPING, RowSelection(where="source_endpoint = 'mqtt'"))


MILLION = "journal-1000000"
QUIET = "quiet"
OTHERS = {
    MILLION: "a million rows",
    QUIET: "a quiet gateway, ten messages a second",
} | {f"days-{count}": f"{count} days, 100 000 rows each" for count in DAY_COUNTS}
"""Journals beside the one that is measured, by their folders."""

JOURNALS = {
    f"{kind} of {text}": name for name, text in OTHERS.items() for kind in ("journal", "Parquet", "rates")
}
"""Which of them a job is about."""

READ = "journal into an aggregate"
PARQUET = "Parquet into the same"
CLOSED = "journal in Parquet into the same"
ALL = "journal, all columns, into nothing"
ALL_CLOSED = "journal in Parquet, all columns, into nothing"
ALL_PARQUET = "Parquet, all columns, into nothing"
RATED = "rates"
ARCHIVED = "rates of an archive"
LEAST, MOST = (f"days-{count}" for count in (min(DAY_COUNTS), max(DAY_COUNTS)))
RATIOS = (
    (READ, PARQUET),
    (CLOSED, PARQUET),
    (ALL, ALL_PARQUET),
    (ALL_CLOSED, ALL_PARQUET),
    ("archive into the same", PARQUET),
    ("archive and the journal's rest into the same", PARQUET),
    (f"journal of {OTHERS[MILLION]}", f"Parquet of {OTHERS[MILLION]}"),
    (f"journal of {OTHERS[MILLION]}", READ),
    (f"Parquet of {OTHERS[MILLION]}", PARQUET),
    (f"journal of {OTHERS[QUIET]}", f"Parquet of {OTHERS[QUIET]}"),
    (f"journal of {OTHERS[QUIET]}", READ),
    (f"journal of {OTHERS[MOST]}", f"Parquet of {OTHERS[MOST]}"),
    (f"journal of {OTHERS[MOST]}", f"journal of {OTHERS[LEAST]}"),
    (f"journal of {OTHERS[MOST]}", READ),
    (f"rates of {OTHERS[MILLION]}", RATED),
    (RATED, ARCHIVED),
)
"""Jobs of which one is told by the other."""

GROUPS: tuple[tuple[tuple[str, Job], ...], ...] = (
    (
        (READ, read_journal()),
        (PARQUET, read_parquet()),
        (CLOSED, read_closed),
        ("archive into the same", read_archive),
        ("archive and the journal's rest into the same", read_both),
    ),
    (("bodies into an aggregate", read_bodies), ("message ids into an aggregate", read_ids)),
    (("segments to Parquet", closed),),
    ((ALL, read_all), (ALL_CLOSED, read_all_closed), (ALL_PARQUET, read_all_parquet)),
    *(
        ((f"journal of {text}", read_journal(name)), (f"Parquet of {text}", read_parquet(name)))
        for name, text in OTHERS.items()
    ),
    (("stream into Parquet, 10 columns", stream), ("stream into Parquet, all columns", stream_all)),
    (("archive", archived), ("archive --follow", archived_bit_by_bit)),
    ((RATED, rated()), (ARCHIVED, rated_archive), (f"rates of {OTHERS[MILLION]}", rated(MILLION))),
    (("backtest", backtested), ("backtest with a condition", backtested_with_condition)),
    (("backtest of an archive", backtested_archive), ("backtest with --where", backtested_where)),
)
"""Jobs in a group are run in turns, so that what else the machine does meets them alike."""

NAMES = tuple(name for group in GROUPS for name, _ in group)

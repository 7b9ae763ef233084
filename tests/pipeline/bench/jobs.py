"""What is measured: a job for each line of the table, with what it is compared with.

A job is a function of a Bench; it is run once to warm up, then in turns with the others of its group.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from gateway.mapping.loading import parse
from gateway.pipeline.jobs import archive, rates
from gateway.pipeline.jobs.backtest import backtest
from gateway.pipeline.traffic.fates import Candidate
from gateway.pipeline.traffic.loading import Recording, Span
from tests.pipeline.bench.journal import QUIET_ROWS
from tests.pipeline.streams import finished

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
        shutil.rmtree(self.folder / f"{name}-{self.written - 1}", ignore_errors=True)
        self.written += 1
        return str(self.folder / f"{name}-{self.written - 1}")

    def parquet(self) -> str:
        """The same rows, all columns, as Spark itself writes and reads them."""
        path = self.folder / "parquet"
        if not path.exists():
            self.spark.read.format("gateway_journal").load(str(self.journal)).write.parquet(str(path))
        return str(path)


def _aggregated(table: DataFrame) -> None:
    table.groupBy("source_address").agg({"body_size": "sum", "settled": "max", "*": "count"}).collect()


def read_journal(bench: Bench) -> None:
    """Rows into an aggregate."""
    _aggregated(bench.table("source_address,body_size,settled"))


def read_quiet(bench: Bench) -> None:
    """The same from the journal of a gateway with ten messages a second."""
    table = bench.spark.read.format("gateway_journal").option("columns", "source_address,body_size,settled")
    _aggregated(table.load(str(bench.journal.with_name("quiet"))))


def read_parquet(bench: Bench) -> None:
    """The same from Parquet files of the same rows."""
    _aggregated(bench.spark.read.parquet(bench.parquet()))


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


def rated(bench: Bench) -> None:
    """`rates` per minute, with its page."""
    rates.run(bench.spark, str(bench.journal), report=bench.folder / "rates.html")


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


def _backtested(bench: Bench, text: str, span: Span | None = None, archive: str | None = None) -> None:
    candidate = Candidate([parse(text)], {"<text>": text}, {})
    recording = Recording(bench.spark, str(bench.journal), span or Span(), archive)
    assert backtest(recording, candidate).messages > 0


def backtested(bench: Bench) -> None:
    """`backtest` of two routes, against what happened."""
    _backtested(bench, MAPPING)


def backtested_with_condition(bench: Bench) -> None:
    """The same, with a condition that looks into one message of fifty."""
    _backtested(bench, CONDITION)


def backtested_archive(bench: Bench) -> None:
    """The same of an archive."""
    to = bench.folder / "kept"
    if not to.exists():
        archive.run(bench.spark, str(bench.journal), str(to))
    _backtested(bench, MAPPING, archive=str(to))


def backtested_where(bench: Bench) -> None:
    """The same of rows that Spark is asked for."""
    _backtested(bench, MAPPING, Span(where="source_endpoint = 'mqtt'"))


QUIET = "journal of ten messages a second, 50 000 rows"
ROWS = {QUIET: QUIET_ROWS}  # of those that have not as many as asked for
Job = Callable[[Bench], None]
GROUPS: tuple[tuple[tuple[str, Job], ...], ...] = (
    (("journal into an aggregate", read_journal), ("Parquet into the same", read_parquet)),
    (("bodies into an aggregate", read_bodies),),
    ((QUIET, read_quiet),),
    (("stream into Parquet, 10 columns", stream), ("stream into Parquet, all columns", stream_all)),
    (("archive", archived),),
    (("rates", rated),),
    (("backtest", backtested), ("backtest with a condition", backtested_with_condition)),
    (("backtest of an archive", backtested_archive), ("backtest with --where", backtested_where)),
)
"""Jobs in a group are run in turns, so that what else the machine does meets them alike."""

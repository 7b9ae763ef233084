"""Segments in Parquet and others as one table and one stream, also when they are converted meanwhile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark.sql.streaming.datasource")

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.streaming.datasource import ReadMaxRows

from gateway.pipeline.columns import BY_NAME, spark_schema
from gateway.pipeline.journal.options import options_of
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.journal.stream import JournalStream
from gateway.pipeline.journal.table import read_journal
from gateway.pipeline.traffic.loader import Recording, RowSelection
from gateway.store.journal.reader import GoneError, JournalReader
from tests.pipeline.journals import Journal, convert, written
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = 1_200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of several segments each, one of them in a folder of its own."""
    written(tmp_path / "journal", COUNT, block_rows=20, segment_bytes=20_000)
    written(tmp_path / "journal" / "host-1", 300, block_rows=20, segment_bytes=20_000)
    return tmp_path / "journal"


def numbers(found: DataFrame) -> list[tuple[str, int]]:
    return sorted((row.shard, row.sequence) for row in found.select("shard", "sequence").collect())


def rows_of(found: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in found.orderBy("shard", "sequence").collect()]


ALL = sorted([("0", n) for n in range(COUNT)] + [("host-1/0", n) for n in range(300)])


def test_every_column_is_the_same_in_both_forms(spark: SparkSession, folder: Path) -> None:
    before = rows_of(spark.read.format("gateway_journal").load(str(folder)))
    assert len(before) == len(ALL)
    convert(folder, 0, 4)
    convert(folder, 1, 3)
    convert(folder / "host-1", 0, 1)
    table = read_journal(spark, str(folder))
    assert table.schema == spark_schema()
    assert rows_of(table) == before
    assert rows_of(spark.read.format("gateway_journal").load(str(folder))) == before
    named = read_journal(spark, str(folder), {"columns": "low_water,sequence,headers"})
    expected = spark.read.format("gateway_journal").option("columns", "low_water,sequence,headers")
    key = F.col("sequence"), F.col("low_water")
    assert named.orderBy(*key).collect() == expected.load(str(folder)).orderBy(*key).collect()


@pytest.mark.parametrize(
    "options",
    [
        {"routes": "up"},
        {"only": '{"client": ["press-1"]}', "receivedFrom": "2023-11-14T22:13:20.100Z"},
        {"receivedBefore": "2023-11-14T22:13:20.500Z", "shards": "0"},
        {"startingOffsets": '{"0": 333, "host-1/0": -2}'},
        {"startingOffsets": '{"0": 333, "host-1/0": -1}', "endingOffsets": '{"0": 334, "host-1/0": -1}'},
        {"endingOffsets": '{"0": 777, "host-1/0": 20}'},
        {"startingTimestamp": "2023-11-14T22:13:20.250Z"},
        {"endingTimestamp": "2023-11-14T22:13:20.250Z"},
        {"endingOffsets": "earliest"},
        {"protocols": "amqp091"},
    ],
)
def test_options_select_the_same_rows(spark: SparkSession, folder: Path, options: dict[str, str]) -> None:
    expected = numbers(spark.read.format("gateway_journal").options(**options).load(str(folder)))
    convert(folder, 0, 4)
    convert(folder, 1, 3)
    convert(folder / "host-1", 0, 1)
    assert numbers(read_journal(spark, str(folder), options)) == expected


def test_a_hole_among_the_files_is_read_by_the_source(spark: SparkSession, folder: Path) -> None:
    """A segment that could not be converted stands between two that were."""
    convert(folder, 2, 4)
    assert numbers(read_journal(spark, str(folder))) == ALL
    convert(folder, 0, 1)
    assert numbers(read_journal(spark, str(folder))) == ALL


def test_a_table_that_was_made_before_segments_are_converted(spark: SparkSession, folder: Path) -> None:
    """And before more is written: a view has the rows of the moment of its query, each once."""
    convert(folder, 0, 2)
    read_journal(spark, str(folder)).createOrReplaceTempView("journal")
    assert spark.sql("SELECT count(*), count(DISTINCT shard, sequence) FROM journal").first() == (
        1_500,
        1_500,
    )
    convert(folder, 1, 3)
    assert spark.sql("SELECT count(*), count(DISTINCT shard, sequence) FROM journal").first() == (
        1_500,
        1_500,
    )
    more = Journal(folder)
    more.write(COUNT, 50)
    more.close()
    convert(folder, 2, 3)
    found = spark.sql("SELECT count(*), max(sequence) FROM journal WHERE shard = '0'").first()
    assert found == (COUNT + 50, COUNT + 49)


def test_conditions_and_columns_reach_the_files(spark: SparkSession, folder: Path) -> None:
    convert(folder, 0, 4)
    table = read_journal(spark, str(folder), {"columns": "shard,sequence,route,received,body"})
    query = table.where("route = 'up' AND received < timestamp'2023-11-14 22:13:20.3'").select("sequence")
    plan = query._jdf.queryExecution().executedPlan().toString()
    assert "Batched: true" in plan
    (files,) = [line for line in plan.splitlines() if "FileScan parquet" in line]
    assert "EqualTo(route,up)" in files
    assert "LessThan(received," in files
    (read,) = [part for part in files.split(", ") if part.startswith("ReadSchema")]
    assert "body" not in read
    assert len(query.collect()) == 300
    others = read_journal(spark, str(folder)).where("shard = 'host-1/0'")
    assert "FileScan" not in others._jdf.queryExecution().executedPlan().toString(), "another shard's files"


def test_rows_of_both_forms_reach_an_aggregate_in_one_function(spark: SparkSession, folder: Path) -> None:
    """Spark's own default copies each row of a union."""
    convert(folder, 0, 4)
    query = read_journal(spark, str(folder)).groupBy("route").agg({"body_size": "sum", "*": "count"})
    rows = spark.read.format("gateway_journal").load(str(folder))
    expected = rows.groupBy("route").agg({"body_size": "sum", "*": "count"}).orderBy("route").collect()
    assert sorted(query.collect()) == expected
    plan = query._jdf.queryExecution().executedPlan().toString()
    assert "FileScan parquet" in plan
    assert re.search(r"BatchScan gateway_journal.*\(Python\)", plan)
    assert re.search(r"\*\(1\) Union", plan), plan


def test_what_retention_deleted(spark: SparkSession, folder: Path) -> None:
    """The table begins with the first row that is there."""
    convert(folder, 0, 2)
    convert(folder, 1, 3)
    first, second, *_ = JournalReader(folder).segments("0")
    first.path.unlink()
    there = numbers(read_journal(spark, str(folder), {"shards": "0"}))
    assert there == [("0", n) for n in range(second.first, COUNT)]
    with pytest.raises(GoneError):
        list(JournalReader(folder).rows("0", 0))


def test_planned_partitions_are_read_after_the_conversion(folder: Path) -> None:
    options = options_of({"path": str(folder), "minPartitions": "7"}, stream=False)
    table = JournalTable(options, tuple(BY_NAME))
    parts = table.partitions()
    assert len(parts) > 5
    convert(folder, 0, 3)
    for read in (table.read, table.read_coded):
        rows = [row for part in parts for batch in read(part) for row in batch.to_pylist()]
        assert sorted((row["shard"], row["sequence"]) for row in rows) == ALL
    planned = JournalTable(options, ("shard", "sequence")).partitions()
    rows = [row for part in planned for batch in table.read(part) for row in batch.to_pylist()]
    assert sorted((row["shard"], row["sequence"]) for row in rows) == ALL


def test_micro_batches_across_conversions(folder: Path) -> None:
    """Each is planned, then files are converted, then it is read; and again, as after a restart."""
    given = {"path": str(folder), "startingOffsets": "earliest", "shards": "0"}
    stream = JournalStream(options_of(given, stream=True), ("shard", "sequence"))
    start, read = {"0": 0}, []
    for most in (100, 250, 300, 2_000):
        end = stream.latestOffset(start, ReadMaxRows(most))
        parts = list(stream.partitions(start, end))
        done = sum(one.next is not None for one in JournalReader(folder).segments("0"))
        convert(folder, done, done + 1)
        again = JournalStream(options_of(given, stream=True), ("shard", "sequence"))
        found = [
            [row["sequence"] for part in some for batch in one.read(part) for row in batch.to_pylist()]
            for one, some in ((stream, parts), (again, list(again.partitions(start, end))))
        ]
        assert sorted(found[0]) == sorted(found[1]) == [*range(start["0"], end["0"])]
        read += found[0]
        start = end
    assert sorted(read) == [*range(COUNT)]


def test_a_stream_of_spark(streams: SparkSession, folder: Path, tmp_path: Path) -> None:
    convert(folder, 0, 3)
    source = streams.readStream.format("gateway_journal").options(startingOffsets="earliest")
    to, checkpoint = str(tmp_path / "to"), str(tmp_path / "checkpoint")

    def run() -> None:
        rows = source.option("columns", "shard,sequence,body").load(str(folder))
        writer = rows.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        finished(lambda: writer.trigger(availableNow=True).start(to))

    run()
    convert(folder, 1, 3)
    more = Journal(folder)
    more.write(COUNT, 30)
    more.close()
    run()
    assert numbers(streams.read.parquet(to)) == sorted([*ALL, *(("0", n) for n in range(COUNT, COUNT + 30))])


def test_jobs_read_traffic_of_both_forms(spark: SparkSession, folder: Path) -> None:
    span = RowSelection(where="client = 'press-1' AND body_size > 8")
    copy = shutil.copytree(folder, folder.parent / "copy")
    convert(folder, 0, 3)

    def plain(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            names = batch["source_name"].cast("string")
            yield pa.RecordBatch.from_arrays([batch["sequence"], names], ["sequence", "source_name"])

    found = [
        Recording(spark, str(one), span)
        .map_batches(("sequence", "source_name"), plain, "sequence long, source_name string")
        .collect()
        for one in (folder, copy)
    ]
    assert sorted(found[0]) == sorted(found[1])
    assert len(found[0]) > 100

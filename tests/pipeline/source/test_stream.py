"""The journal as a stream: offsets, limits, `availableNow`, shards that appear, and a journal that lost rows.

What the planner decides is tested without Spark; Spark itself runs one query after the other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark.sql.streaming.datasource")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from gateway.errors import PipelineError
from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.pipeline.journal.options import Offsets, options_of
from gateway.pipeline.journal.planner import SPAN_BYTES, JournalPartition
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.journal.stream import JournalStream
from gateway.store.journal import reader, segments
from gateway.store.journal.merge import merge_segments
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import Segment, segments_in
from gateway.store.journal.writer import JournalOptions
from tests.pipeline.journals import HOME, START, Journal, message, written
from tests.pipeline.streams import finished
from tests.store.journal.samples import block

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALL = ReadAllAvailable()
Make = Callable[..., Path]


def stream(folder: Path, **options: str) -> JournalStream:
    given = {"path": str(folder), "startingOffsets": "earliest"}
    return JournalStream(options_of(given | options, stream=True), ("shard", "sequence"))


def rows(found: JournalStream, start: Offsets, end: Offsets) -> list[tuple[str, int]]:
    return sorted(
        (row["shard"], row["sequence"])
        for part in found.partitions(start, end)
        for batch in found.read(part)
        for row in batch.to_pylist()
    )


def batches(
    found: JournalStream, start: Offsets, limit: Any
) -> Iterator[tuple[Offsets, list[tuple[str, int]]]]:
    """Micro-batches until nothing is left, as Spark asks for them."""
    while True:
        end = found.latestOffset(start, limit)
        if end == start:
            return
        yield end, rows(found, start, end)
        found.commit(end)
        start = end


def test_it_begins_where_it_is_told_to(journal: Make) -> None:
    folder = journal(100)
    assert stream(folder).initialOffset() == {"0": 0}
    assert stream(folder, startingOffsets="latest").initialOffset() == {"0": 100}
    assert stream(folder, startingOffsets='{"0": 42}').initialOffset() == {"0": 42}
    given = {"path": str(folder), "startingTimestamp": "2023-11-14T22:13:20.010Z"}
    by_time = JournalStream(options_of(given, stream=True), ("sequence",))
    assert by_time.initialOffset() == {"0": 10}


def test_every_row_once_whatever_the_limit(tmp_path: Path) -> None:
    written(tmp_path, 90, block_rows=7)
    written(tmp_path, 10, shard=1, block_rows=7)
    expected = [("0", number) for number in range(90)] + [("1", number) for number in range(10)]
    for most in (1, 13, 64, 1_000):
        found = stream(tmp_path, maxOffsetsPerTrigger=str(most))
        assert found.getDefaultReadLimit() == ReadMaxRows(most)
        parts = [read for _, read in batches(found, {"0": 0, "1": 0}, ReadMaxRows(most))]
        assert all(0 < len(part) <= most for part in parts)
        assert sorted(row for part in parts for row in part) == expected


def test_what_is_written_later_and_a_shard_that_appears(tmp_path: Path) -> None:
    found = stream(tmp_path)
    assert found.latestOffset({}, ALL) == {}
    written(tmp_path, 5)
    written(tmp_path, 3, shard=1)
    assert [read for _, read in batches(found, {}, ALL)] == [
        [*(("0", number) for number in range(5)), *(("1", number) for number in range(3))]
    ]
    assert found.reportLatestOffset() == {"0": 5, "1": 3}
    written(tmp_path, 2, first=5)
    assert found.latestOffset({"0": 5, "1": 3}, ALL) == {"0": 7, "1": 3}
    assert rows(found, {"0": 5, "1": 3}, {"0": 7, "1": 3}) == [("0", 5), ("0", 6)]


def test_a_planned_batch_is_the_same_after_a_restart(tmp_path: Path) -> None:
    written(tmp_path, 50, block_rows=7)
    before = rows(stream(tmp_path), {"0": 5}, {"0": 33})
    written(tmp_path, 50, first=50, block_rows=7)
    assert rows(stream(tmp_path), {"0": 5}, {"0": 33}) == before
    assert [number for _, number in before] == [*range(5, 33)]


def test_available_now_ends_at_what_was_there(tmp_path: Path) -> None:
    written(tmp_path, 20)
    found = stream(tmp_path)
    found.prepareForTriggerAvailableNow()
    written(tmp_path, 20, first=20)
    written(tmp_path, 20, shard=1)
    assert found.latestOffset({"0": 3}, ALL) == {"0": 20}
    assert found.latestOffset({"0": 20}, ALL) == {"0": 20}


def test_a_torn_end_is_waited_for(tmp_path: Path) -> None:
    written(tmp_path, 20, block_rows=10)
    path = next(tmp_path.glob("*.gwj"))
    whole, more = path.read_bytes(), block(20, 5)
    found = stream(tmp_path)
    for cut in (1, 71, 72, len(more) - 1):
        path.write_bytes(whole + more[:cut])
        assert found.latestOffset({"0": 20}, ALL) == {"0": 20}
    path.write_bytes(whole + more)
    assert found.latestOffset({"0": 20}, ALL) == {"0": 25}
    assert rows(found, {"0": 20}, {"0": 25}) == [("0", number) for number in range(20, 25)]


def test_a_journal_that_ends_too_early(tmp_path: Path) -> None:
    written(tmp_path, 20)
    with pytest.raises(PipelineError, match="ends before row 20, and row 30 is wanted"):
        stream(tmp_path).latestOffset({"0": 30}, ALL)
    found = stream(tmp_path, failOnDataLoss="false")
    assert found.latestOffset({"0": 30}, ALL) == {"0": 30}


def test_a_replica_that_is_gone(tmp_path: Path) -> None:
    """With all that it has written read the others go on, also with a new process; what was not is lost."""
    for replica, count in (("one", 20), ("two", 30)):
        written(tmp_path / replica, count)
    found = stream(tmp_path)
    start = found.latestOffset({}, ALL)
    assert len(rows(found, {}, start)) == 50
    shutil.rmtree(tmp_path / "two")
    written(tmp_path / "one", 5, first=20)
    for one in (found, stream(tmp_path)):
        end = one.latestOffset(start, ALL)
        assert end == {"one/0": 25, "two/0": 30}
        assert rows(one, start, end) == [("one/0", number) for number in range(20, 25)]
    behind = {"one/0": 20, "two/0": 20}
    with pytest.raises(PipelineError, match="shard two/0 .* ends before row 0, and row 20 is wanted"):
        stream(tmp_path).partitions(behind, end)
    assert len(rows(stream(tmp_path, failOnDataLoss="false"), behind, end)) == 5
    found = stream(tmp_path)
    written(tmp_path / "three", 10)
    end = found.latestOffset(start, ReadMaxRows(10))
    shutil.rmtree(tmp_path / "three")
    with pytest.raises(PipelineError, match="shard three/0 "):
        found.latestOffset(end, ALL)


@pytest.mark.parametrize("count", [3, 30])
def test_the_files_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """However many replicas there are, for each folder is a request to a store; and new files are seen."""
    for replica in range(count):
        written(tmp_path / str(replica), 60, block_rows=20, segment_bytes=6_000)
    listed: list[Path] = []

    def noted(folder: Path, prefix: str = "") -> list[Segment]:
        listed.append(folder)
        return segments_in(folder, prefix)

    for module in (reader, segments):
        monkeypatch.setattr(module, "segments_in", noted)
    found = stream(tmp_path)
    for plan in (
        JournalTable(options_of({"path": str(tmp_path)}, stream=False), ("sequence",)).partitions,
        found.initialOffset,
        lambda: found.latestOffset({}, ALL),
    ):
        listed.clear()
        plan()
        assert len(listed) == count + 1
    written(tmp_path / "new", 5)
    assert found.latestOffset({}, ALL)["new/0"] == 5


def test_only_some_shards(tmp_path: Path) -> None:
    for replica in ("one", "two", "three"):
        written(tmp_path / replica, 5)
    end = stream(tmp_path, shards="one/0,three/0").latestOffset({}, ALL)
    assert end == {"one/0": 5, "three/0": 5}


def test_the_mark_is_of_what_comes_behind_a_row(tmp_path: Path) -> None:
    """A micro-batch may end in a block, and what is behind it there has been received long before."""
    journal = Journal(tmp_path, options=JournalOptions(flush_interval_secs=60))
    journal.clock.now = START + 100
    for second in (99, 10, 50, 98):
        journal.writer.record(HOME, [message(0)], ACCEPTED, Monotonic(START + second))
    journal.close()
    given = {"path": str(tmp_path), "startingOffsets": "earliest"}
    found = JournalStream(options_of(given, stream=True), ("sequence", "low_water"))
    marks = []
    for start in range(4):
        (part,) = found.partitions({"0": start}, {"0": start + 1})
        (batch,) = found.read(part)
        marks += [row["low_water"].timestamp() - START for row in batch.to_pylist()]
    assert marks == [10, 50, 98, 100]


def test_retention_that_was_faster(tmp_path: Path) -> None:
    written(tmp_path, 400, block_rows=20, segment_bytes=20_000)
    min(tmp_path.glob("*.gwj")).unlink()
    with pytest.raises(Exception, match="were deleted by retention"):
        stream(tmp_path).latestOffset({"0": 0}, ALL)
    found = stream(tmp_path, failOnDataLoss="false")
    ((_, read),) = batches(found, {"0": 0}, ALL)
    assert read[0][1] > 0
    assert read[-1] == ("0", 399)


@pytest.mark.needs("time")
def test_the_planner_keeps_spans_and_not_blocks(tmp_path: Path) -> None:
    written(tmp_path, 2_000, block_rows=2)
    found = stream(tmp_path)
    end = found.latestOffset({"0": 0}, ALL)
    files = [path.stat().st_size for path in tmp_path.glob("*.gwj")]
    assert len(found._shards["0"]._spans) <= sum(byte_count // SPAN_BYTES + 1 for byte_count in files)
    assert (
        sum(
            part.next - part.first
            for part in found.partitions({"0": 0}, end)
            if isinstance(part, JournalPartition)
        )
        == 2_000
    )
    found.latestOffset(end, ALL)
    assert found._shards["0"]._spans == []


@pytest.mark.needs("time")
def test_blocks_that_are_merged_between_planning_and_reading(tmp_path: Path) -> None:
    """Each micro-batch is planned, then files are put together, then it is read."""
    written(tmp_path, 4_000, block_rows=2, segment_bytes=60_000)
    found, start = stream(tmp_path), {"0": 0}
    read: list[int] = []
    for most in (700, 1_300, 5_000):
        end = found.latestOffset(start, ReadMaxRows(most))
        parts = list(found.partitions(start, end))
        complete = JournalReader(tmp_path).segments("0")[:-1]
        merge_segments(complete[: len(complete) // 2 + 1])
        read += [row["sequence"] for part in parts for batch in found.read(part) for row in batch.to_pylist()]
        start = end
    assert sorted(read) == [*range(4_000)]


def test_spark_reads_it_into_parquet(spark: SparkSession, tmp_path: Path) -> None:
    folder, sink, checkpoint = tmp_path / "j", tmp_path / "out", tmp_path / "checkpoint"
    written(folder, 100, block_rows=10)

    def run() -> list[int]:
        source = spark.readStream.format("gateway_journal").options(
            startingOffsets="earliest", maxOffsetsPerTrigger="30", columns="shard,sequence,body,received"
        )
        writer = (
            source.load(str(folder))
            .writeStream.format("parquet")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
        )
        query = finished(lambda: writer.start(str(sink)))
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    assert run() == [30, 30, 30, 10]
    written(folder, 100, first=100)
    assert sum(run()) == 100
    found = [row.sequence for row in spark.read.parquet(str(sink)).select("sequence").collect()]
    assert sorted(found) == [*range(200)]

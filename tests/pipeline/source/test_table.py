"""The journal as a table: every column as the reader has it, bounds, filters, gaps and damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PythonException

from gateway.errors import PipelineError
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.pipeline.archive.tables import range_options
from gateway.pipeline.columns import COLUMNS, spark_schema
from gateway.pipeline.journal.filters import narrowed
from gateway.pipeline.journal.options import microseconds_of, options_of
from gateway.pipeline.journal.planner import JournalPartition, count_late_rows
from gateway.pipeline.journal.source import JournalTable
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.reader import Gap, JournalReader
from gateway.store.journal.writer import JournalOptions
from tests.pipeline.journals import HOME, START, STEP, Journal, message, written
from tests.store.journal.samples import block

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Make = Callable[..., Path]


def table(spark: SparkSession, folder: Path, **options: str) -> DataFrame:
    return spark.read.format("gateway_journal").options(**options).load(str(folder))


def numbers(found: DataFrame) -> list[tuple[str, int]]:
    return sorted((row.shard, row.sequence) for row in found.select("shard", "sequence").collect())


def read(folder: Path, *names: str, **options: str) -> list[tuple[Any, ...]]:
    """The rows as Spark's tasks read them, one task after the other, without Spark."""
    found = JournalTable(options_of({"path": str(folder)} | options, stream=False), names)
    return [
        tuple(row.values())
        for part in found.partitions()
        for batch in found.read(part)
        for row in batch.to_pylist()
    ]


def test_every_column_is_what_the_reader_reads(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(tmp_path, options=JournalOptions(body_bytes_max=10))
    journal.write(0, 60)
    odd = Message(topic_address("a"), b"\xff" * 11, expires=1_800_000_000.5, hops=200, retain=True)
    journal.writer.record(HOME, [odd, odd], ACCEPTED, Monotonic(journal.clock()))
    journal.close()
    found = table(spark, tmp_path).orderBy("sequence").collect()
    expected = [row for row in JournalReader(tmp_path).rows("0") if not isinstance(row, Gap)]
    assert len(found) == len(expected) == 62
    for spark_row, row in zip(found, expected, strict=True):
        plain = spark_row.asDict(recursive=True)
        headers = plain.pop("headers")
        for name in ("received", "settled", "expires"):
            plain[name] = None if plain[name] is None else microseconds_of(plain[name].astimezone())
        plain["body"] = None if plain["body"] is None else bytes(plain["body"])
        assert plain == row
        written_headers = json.loads(row["properties"]).get("headers", [])
        assert [(one["name"], one["type"], one["value"]) for one in headers] == [
            (name, type_, value if isinstance(value, str) else json.dumps(value))
            for name, type_, value in written_headers
        ]
    assert found[61].body is None
    assert (found[61].body_size, found[61].hops) == (11, 200)


def test_the_schema_is_documented_and_columns_are_chosen(spark: SparkSession, journal: Make) -> None:
    folder = journal(3)
    assert table(spark, folder).schema == spark_schema()
    assert table(spark, folder, columns="body, sequence").columns == ["body", "sequence"]
    chosen = spark.read.format("gateway_journal").schema("sequence BIGINT, route STRING")
    assert [tuple(row) for row in chosen.load(str(folder)).collect()] == [(0, ""), (1, "up"), (2, "")]
    pages = Path(__file__).resolve().parents[3] / "docs"
    said = (pages / "reference/journal.md").read_text() + (pages / "guides/pipeline-journal.md").read_text()
    assert [column.name for column in COLUMNS if f"`{column.name}`" not in said] == []


ERRORS = [
    ({"columns": "sequence,colour"}, "has no column colour"),
    ({"startingOffset": "latest"}, "did you mean startingOffsets"),
    ({"startingOffsets": '{"9": 0}'}, "has no shard 9"),
    ({"only": '{"sequence": ["1"]}'}, "only is JSON as in"),
    ({"only": '{"client": "a"}'}, "only is JSON as in"),
    ({"only": "client"}, "only is JSON as in"),
    ({"receivedFrom": "soon"}, "receivedFrom is milliseconds since 1970 or ISO 8601"),
    ({"pushFilters": "true"}, "has no option pushfilters"),
]


@pytest.mark.parametrize("options, text", ERRORS, ids=[text for _, text in ERRORS])
def test_a_wrong_option_is_named(
    spark: SparkSession, journal: Make, options: dict[str, str], text: str
) -> None:
    with pytest.raises((AnalysisException, PythonException), match=text):
        table(spark, journal(3), **options).collect()


CHOSEN = [
    ({"receivedFrom": "2023-11-14T22:13:20.250Z", "routes": "up"}, range(251, 500, 2), range(251, 1_000, 2)),
    ({"receivedBefore": "1700000000010", "shards": "1"}, range(10), ()),
    ({"only": '{"client": ["press-1", "nobody"], "route": [""]}'}, range(4, 500, 6), range(4, 1_000, 6)),
    ({"only": '{"route": ["up", ""]}', "routes": "up"}, range(1, 500, 2), range(1, 1_000, 2)),
    ({"only": '{"route": []}'}, (), ()),
    ({"protocols": "amqp091"}, (), ()),
    ({"routes": "", "protocols": "mqtt,amqp091"}, range(0, 500, 2), range(0, 1_000, 2)),
]


@pytest.mark.parametrize("options, second, first", CHOSEN, ids=range(len(CHOSEN)))
def test_options_choose_rows(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], second: range, first: range
) -> None:
    written(tmp_path, 1_000, block_rows=100)
    written(tmp_path, 500, shard=1, block_rows=100)
    found = table(spark, tmp_path, columns="shard,sequence", **options)
    only = first if "shards" not in options else ()
    assert numbers(found) == [*(("0", number) for number in only), *(("1", number) for number in second)]


USES = [
    ("sequence < 10", "sequence >= 50", 20),
    ("route = 'up'", "route = ''", 60),
    ("received < timestamp'2023-11-14 22:13:20.010Z'", "shard = '0'", 70),
    ("client = 'press-1'", "true", 80),
]


@pytest.mark.parametrize("one, other, count", USES)
def test_each_use_of_a_table_has_its_own_conditions(
    spark: SparkSession, journal: Make, one: str, other: str, count: int
) -> None:
    """In one query and in one after the other, whichever comes last."""
    found = table(spark, journal(60), columns="shard,sequence,route,client,received")
    for first, second in ((one, other), (other, one)):
        few, others = found.where(first), found.where(second)
        assert few.union(others).count() == count
        assert few.count() + others.count() == count
        both = few.alias("a").join(others.alias("b"), "sequence").count()
        assert both == found.where(f"({one}) and ({other})").count()


def test_an_executor_without_the_folder_says_what_is_wanted(tmp_path: Path) -> None:
    found = JournalTable(options_of({"path": str(tmp_path / "j")}, stream=False), ("sequence",))
    with pytest.raises(PipelineError, match=r"no such folder on \S+, though the driver has it: every"):
        list(found.read(JournalPartition("0", 0, 5, None)))


def test_a_file_that_cannot_be_read_is_named(journal: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    found = JournalTable(options_of({"path": str(journal(5))}, stream=False), ("sequence",))

    def refused(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", "0-0.gwj")

    monkeypatch.setattr(JournalReader, "blocks", refused)
    with pytest.raises(PipelineError, match=r"shard 0 of the journal in .* cannot be read on .*0-0\.gwj"):
        list(found.read(JournalPartition("0", 0, 5, None)))


def test_conditions_pass_over_blocks(journal: Make) -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThan

    folder = journal(1_000, block_rows=100)
    found = JournalTable(options_of({"path": str(folder)}, stream=False), ("sequence",))
    found.narrow([GreaterThan(("sequence",), 850), EqualTo(("route",), "up")])
    (part,) = found.partitions()
    assert isinstance(part, JournalPartition)
    assert (part.first, part.next) == (851, 1_000)
    assert [row for batch in found.read(part) for row in batch["sequence"].to_pylist()] == [
        *range(851, 1_000, 2)
    ]
    assert narrowed(found._selection, ()) == found._selection


BOUNDS = [
    ({}, range(100)),
    ({"startingOffsets": '{"0": 17}', "endingOffsets": '{"0": 23}'}, range(17, 23)),
    ({"startingOffsets": "latest"}, range(0)),
    ({"endingOffsets": '{"0": -1}'}, range(100)),
    ({"endingOffsets": '{"0": 1000}'}, range(100)),
    ({"startingTimestamp": "2023-11-14T22:13:20.042Z"}, range(42, 100)),
    ({"startingTimestamp": "2023-11-14T22:13:20.0415Z", "endingTimestamp": "1700000000045"}, range(42, 45)),
    ({"endingTimestamp": "2024-01-01"}, range(100)),
    ({"minPartitions": "7"}, range(100)),
    ({"partitionBytes": "1"}, range(100)),
]


@pytest.mark.parametrize("options, expected", BOUNDS, ids=range(len(BOUNDS)))
def test_bounds(journal: Make, options: dict[str, str], expected: range) -> None:
    assert sorted(number for (number,) in read(journal(100, block_rows=10), "sequence", **options)) == [
        *expected
    ]


@pytest.mark.parametrize("segment_bytes", [1 << 30, 20_000])
def test_an_end_by_time_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], segment_bytes: int
) -> None:
    """What came before it, and was settled behind rows that came later; by shard, of what is asked for."""
    kept = JournalOptions(
        flush_rows=20, block_rows_max=20, flush_interval_secs=60, segment_bytes=segment_bytes
    )
    for shard, late in ((0, 7), (1, 3), (2, 0)):
        journal = Journal(tmp_path, shard=shard, options=kept)
        journal.writer._oldest = lambda: START  # what waits for a broker that is away
        journal.write(0, 400)
        for number in range(late):
            journal.writer.record(HOME, [message(number)], ACCEPTED, Monotonic(START + number * STEP))
        journal.writer._oldest = lambda: None
        journal.write(400, 400)
        journal.close()
    ends = {"endingTimestamp": "1700000000100"}
    expected = [number for late in (7, 3, 0) for number in range(100)]
    assert sorted(number for (number,) in read(tmp_path, "sequence", **ends)) == sorted(expected)
    assert "gateway_journal: 10 rows (shard 0: 7, shard 1: 3) were received before" in capsys.readouterr().err
    read(tmp_path, "sequence", shards="1", **ends)
    assert "gateway_journal: 3 rows (shard 1: 3) were" in capsys.readouterr().err
    for given in ({"routes": "up"} | ends, {"shards": "2"} | ends, {"endingTimestamp": "1700000000000"}, {}):
        read(tmp_path, "sequence", **given)
        assert not capsys.readouterr().err


def test_what_is_late_is_looked_for_as_long_as_there_may_be_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, 2_000, block_rows=20, segment_bytes=20_000)
    reader = JournalReader(folder)
    asked: list[int | None] = []
    blocks = JournalReader.blocks

    def watched(self: JournalReader, *given: Any, **options: Any) -> Any:
        asked.append(options["end"])
        return blocks(self, *given, **options)

    monkeypatch.setattr(JournalReader, "blocks", watched)
    before = microseconds_of(datetime.fromtimestamp(START, UTC))
    assert not count_late_rows(reader, "0", 100, before, lambda _: None)
    assert asked == [min(one.first for one in reader.segments("0") if one.first > 100)]


def test_there_are_as_many_tasks_as_are_asked_for(tmp_path: Path) -> None:
    written(tmp_path, 2_000, block_rows=10)
    for least in (1, 3, 50):
        given = {"path": str(tmp_path), "minPartitions": str(least)}
        parts = JournalTable(options_of(given, stream=False), ("sequence",)).partitions()
        assert least <= len(parts) <= least + 2


def test_segments_and_replicas(spark: SparkSession, tmp_path: Path) -> None:
    for replica in ("a", "b"):
        written(tmp_path / replica, 400, block_rows=20, segment_bytes=20_000, compress=1)
    assert len([*(tmp_path / "a").glob("*.gwj")]) > 2
    assert numbers(table(spark, tmp_path)) == [(f"{r}/0", n) for r in "ab" for n in range(400)]


def test_workers_of_replicas(tmp_path: Path) -> None:
    """Two folders deep: what lies deeper is nobody's, and a journal's own folders have no rows."""
    for below in ("a/worker-0", "a/worker-1", "b"):
        written(tmp_path / below, 5)
    written(tmp_path / "a" / "worker-0" / "old", 5)
    (tmp_path / "a" / "mappings").mkdir()
    shards = ("a/worker-0/0", "a/worker-1/0", "b/0")
    assert JournalReader(tmp_path).shards() == [*shards]
    assert sorted(read(tmp_path, "shard", "sequence")) == [(one, at) for one in shards for at in range(5)]


def test_a_shard_that_appears_meanwhile(tmp_path: Path) -> None:
    """Between what an archive has and where the journal ended: it is for the next run."""
    written(tmp_path / "one", 10)
    given = range_options({"one/0": 4}, {"one/0": 10})
    written(tmp_path / "two", 5)
    assert read(tmp_path, "shard", "sequence", **given) == [("one/0", number) for number in range(4, 10)]
    assert read(tmp_path, "shard", **range_options({}, {})) == []


def test_a_torn_end_is_not_there_and_an_empty_journal_is_empty(spark: SparkSession, tmp_path: Path) -> None:
    assert table(spark, tmp_path).count() == 0
    written(tmp_path, 30, block_rows=10)
    path = next(tmp_path.glob("*.gwj"))
    path.write_bytes(path.read_bytes() + block(30, 5)[:-3])
    assert [number for (number,) in read(tmp_path, "sequence")] == [*range(30)]


def test_damage_fails_or_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path, 30, block_rows=10)
    path = next(tmp_path.glob("*.gwj"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match="damaged"):
        read(tmp_path, "sequence")
    left = [number for (number,) in read(tmp_path, "sequence", failOnDataLoss="false")]
    assert left == [*range(10), *range(20, 30)]
    before = read(tmp_path, "sequence", endingOffsets='{"0": 10}')
    assert len(before) == 10, "damage behind the end is not asked for"


def test_what_retention_deleted_fails_or_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path, 400, block_rows=20, segment_bytes=20_000)
    min(tmp_path.glob("*.gwj")).unlink()
    first = JournalReader(tmp_path).segments()[0].first
    given = {"startingOffsets": '{"0": 0}'}
    with pytest.raises(Exception, match="were deleted by retention"):
        read(tmp_path, "sequence", **given)
    left = [number for (number,) in read(tmp_path, "sequence", **given, failOnDataLoss="false")]
    assert left == [*range(first, 400)]

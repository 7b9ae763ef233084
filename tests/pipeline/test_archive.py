"""The archive: every row once, in few files, through kills, damage and retention; and in other formats."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gateway.errors import PipelineError
from gateway.pipeline.archive.compaction import SMALL_MAX, merge, merges_of
from gateway.pipeline.archive.manifest import (
    FOLDER,
    OURS,
    STAGING,
    Archive,
    ArchiveFile,
    Manifest,
    OvertakenError,
    folder_of,
)
from gateway.pipeline.archive.writer import NAMES, write
from gateway.pipeline.exclusive import CLAIM_SECS, CLAIMS
from gateway.pipeline.failures import cause_of, convert_spark_errors
from gateway.pipeline.jobs import archive as job
from gateway.pipeline.journal.options import options_of
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.stores import place_of
from gateway.store.journal.reader import GoneError
from tests.cli.conftest import Run
from tests.pipeline.journals import START, Journal, written
from tests.pipeline.streams import TOO_LATE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = date(2023, 11, 14)
MIDNIGHT = 6_400.0  # seconds after START, at which the fifteenth begins


def files(to: Path) -> list[str]:
    return sorted(str(path.relative_to(to)) for path in to.rglob("*.parquet"))


def filed(to: Path, journal: Path, file_bytes: int = 1 << 27) -> list[ArchiveFile]:
    """What tasks write, without Spark."""
    table = JournalTable(options_of({"path": str(journal)}, stream=False), NAMES)
    return [
        file
        for part in table.partitions()
        for file in write(Archive(place_of(str(to))), "0", table.read_coded(part), file_bytes)
    ]


def test_the_archive_is_the_journal(spark: SparkSession, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    journal = Journal(folder)
    journal.write(0, 60)
    journal._start = START + MIDNIGHT  # the rest is of the next day
    journal.write(60, 40)
    journal.close()
    done = job.run(spark, str(folder), str(to))
    assert (done.rows, done.files, done.missing, done.merged, done.total_files) == (100, 4, 0, 0, 4)
    assert sorted({str(Path(path).parent) for path in files(to)}) == [
        "date=2023-11-14/route=__HIVE_DEFAULT_PARTITION__",
        "date=2023-11-14/route=up",
        "date=2023-11-15/route=__HIVE_DEFAULT_PARTITION__",
        "date=2023-11-15/route=up",
    ]
    table = spark.read.format("gateway_journal").load(str(folder))
    archived = job.read_archive(spark, str(to))
    assert archived.columns == [*table.columns, "date"]
    assert archived.drop("date").orderBy("sequence").collect() == table.orderBy("sequence").collect()
    assert spark.read.parquet(str(to)).where("route = 'up' and date = '2023-11-15'").count() == 20
    before = files(to)
    again = job.run(spark, str(folder), str(to))
    assert (again.rows, again.files, again.total_rows, files(to)) == (0, 0, 100, before)


def test_what_a_task_wrote_elsewhere_does_not_count(tmp_path: Path) -> None:
    """As on an executor that has another disk under the same path: the position stays what it was."""
    made = filed(tmp_path / "a", written(tmp_path / "j", 100))
    archive = Archive(place_of(str(tmp_path / "a")))
    assert archive.checked_files(made) == made
    (tmp_path / "a" / made[-1].path).unlink()
    with pytest.raises(PipelineError, match="not the same folder on the driver and on all executors"):
        archive.checked_files(made)


def test_a_run_takes_what_has_come_since_and_days_go(spark: SparkSession, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    for first in (0, 30):
        written(folder / "replica", 30, first=first, block_rows=10)
        assert job.run(spark, str(folder), str(to)).rows == 30
    written(folder, 10)
    done = job.run(spark, str(folder), str(to), keep_days=1, today=date(2023, 11, 15))
    assert (done.rows, done.dropped, done.total_rows) == (10, 0, 70)
    found = [(row.shard, row.sequence) for row in job.read_archive(spark, str(to)).collect()]
    assert sorted(found) == [*(("0", n) for n in range(10)), *(("replica/0", n) for n in range(60))]
    done = job.run(spark, str(folder), str(to), keep_days=1, today=date(2023, 11, 16), grace_secs=0)
    assert (done.dropped, done.total_rows, files(to)) == (6, 0, [])
    assert job.read_archive(spark, str(to)).count() == 0
    assert job.run(spark, str(folder), str(to)).rows == 0, "what is dropped does not come back"


def test_small_files_are_merged_and_rows_stay(spark: SparkSession, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 200, block_rows=10, segment_bytes=3_000)
    archive = Archive(place_of(str(to)))
    table = JournalTable(options_of({"path": str(folder), "minPartitions": "10"}, stream=False), NAMES)
    made = [
        file
        for number, part in enumerate(table.partitions())
        for file in write(archive, f"0-{number}", table.read_coded(part), 1 << 20)
    ]
    archive.save(Manifest().next_version(offsets={"0": 200}, gained=made))
    assert len(made) >= 2 * SMALL_MAX
    done = job.run(spark, str(folder), str(to), grace_secs=0)
    assert (done.merged, done.total_files, done.total_rows) == (len(made), 2, 200)
    assert [Path(path).name[:6] for path in files(to)] == ["merged", "merged"]
    assert job.read_archive(spark, str(to)).select("sequence").distinct().count() == 200


def file(day: str, route: str, number: int, byte_count: int) -> ArchiveFile:
    return ArchiveFile(f"{folder_of(day, route)}/{number}.parquet", day, route, 1, byte_count)


MERGES = [
    ([("2023-11-14", 10)] * 7, []),
    ([("2023-11-14", 10)] * 8, [8]),
    ([("2023-11-14", 10)] * 8 + [("2023-11-14", 2)] * 7 + [("2023-11-14", 40)] * 5, [8]),
    ([("2023-11-14", 10)] * 6 + [("2023-11-14", 2)] * 7 + [("2023-11-15", 40)], [13]),
    ([("2023-11-14", 10), ("2023-11-14", 60), ("2023-11-15", 10)], []),
    ([("2023-11-14", 10), ("2023-11-14", 10), ("2023-11-15", 2), ("2023-11-15", 2)], []),
    ([("2023-11-14", 2), ("2023-11-14", 2), ("2023-11-15", 2), ("2023-11-15", 2)], [2]),
    ([("2023-11-14", 40)] * 7 + [("2023-11-15", 10)], [3, 3]),
]


@pytest.mark.parametrize("there, merged", MERGES)
def test_what_is_worth_merging(there: list[tuple[str, int]], merged: list[int]) -> None:
    manifest = Manifest(
        files=tuple(file(day, "r", n, byte_count) for n, (day, byte_count) in enumerate(there))
    )
    assert [len(one.files) for one in merges_of(manifest, 100)] == merged


def test_what_follows_is_not_written_again_and_again() -> None:
    """A day of many runs: each of its rows is merged as often as sizes of eight go into the useful one."""
    runs, byte_count, written_again = 512, 16, 0
    manifest = Manifest()
    for number in range(runs):
        manifest = manifest.next_version(gained=[file("2023-11-14", "r", number, byte_count)])
        for one in merges_of(manifest, 1 << 20):
            size = sum(old.byte_count for old in one.files)
            merged = ArchiveFile(f"{one.name}.parquet", "2023-11-14", "r", 1, size)
            manifest = manifest.next_version(gained=[merged], lost=one.files)
            written_again += size
    assert 0 < written_again <= 3 * runs * byte_count
    assert len(manifest.files) < 3 * SMALL_MAX


def test_what_a_killed_run_left_is_swept_away(spark: SparkSession, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 20)
    archive = Archive(place_of(str(to)))
    filed(to, folder)
    (to / STAGING).mkdir(parents=True, exist_ok=True)
    (to / STAGING / "half.parquet").write_bytes(b"PAR1")
    (to / "mine.txt").write_text("not the archive's")
    assert len(files(to)) == 3
    said: list[str] = []
    done = job.run(spark, str(folder), str(to), tell=said.append, grace_secs=0.0)
    assert (done.rows, done.total_rows, len(files(to))) == (20, 20, 2)
    assert said[0] == "archive: 2 files of an interrupted run deleted"
    assert job.read_archive(spark, str(to)).count() == 20
    assert (to / "mine.txt").exists()
    old = archive.manifest()
    merged = merge(archive, merges_of(old, 1 << 40)[0], 1 << 40) if merges_of(old, 1 << 40) else []
    assert merged == [], "two routes of one day that goes on"


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    with pytest.raises(PipelineError, match="is not empty and is not an archive"):
        Archive(place_of(str(tmp_path))).sweep(Manifest(), 0.0)
    assert (tmp_path / "mine.parquet").exists()


@pytest.fixture(params=[True, False], ids=["a disk", "no links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that creates files exclusively, and one that does not, as a store."""
    if not request.param:
        monkeypatch.setattr("gateway.pipeline.exclusive._try_link", lambda *_: False)


@pytest.mark.usefixtures("links")
def test_a_manifest_has_the_keys_of_earlier_ones(tmp_path: Path) -> None:
    archive = Archive(place_of(str(tmp_path)))
    saved = archive.save(Manifest().next_version(gained=[file("2023-11-14", "r", 1, 700)]))
    (stored,) = (tmp_path / "_archive").glob("*.json")
    assert [set(one) for one in json.loads(stored.read_text())["files"]] == [
        {"path", "date", "route", "rows", "octets"}
    ]
    assert archive.manifest() == saved


def test_a_manifest_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run comes between the look and the writing."""
    first, other = (Archive(place_of(str(tmp_path / "a"))) for _ in range(2))
    listed = Archive._manifests

    def overtaken(archive: Archive) -> list[str]:
        names = listed(archive)
        monkeypatch.setattr(Archive, "_manifests", listed)
        other.save(Manifest().next_version(offsets={"0": 2}))
        return names

    monkeypatch.setattr(Archive, "_manifests", overtaken)
    with pytest.raises(OvertakenError):
        first.save(Manifest().next_version(offsets={"0": 1}))
    assert first.manifest() == Manifest(1, {"0": 2})
    assert [path.name for path in (tmp_path / "a" / FOLDER).rglob("*") if path.is_file()] == [f"{1:020}.json"]


@pytest.mark.usefixtures("links")
def test_a_manifest_that_was_forgotten_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run has saved so many since that the first of them is deleted."""
    first, other = (Archive(place_of(str(tmp_path / "a"))) for _ in range(2))
    listed = Archive._manifests

    def overtaken(archive: Archive) -> list[str]:
        names = listed(archive)
        monkeypatch.setattr(Archive, "_manifests", listed)
        manifest = Manifest()
        for number in range(2, 8):
            manifest = other.save(manifest.next_version(offsets={"0": number}))
        return names

    monkeypatch.setattr(Archive, "_manifests", overtaken)
    with pytest.raises(OvertakenError):
        first.save(Manifest().next_version(offsets={"0": 1}))
    assert first.manifest().offsets == {"0": 7}


def test_of_two_claims_none_wins_and_one_of_a_killed_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.exclusive._try_link", lambda *_: False)
    archive = Archive(place_of(str(tmp_path / "a")))
    claim = tmp_path / "a" / FOLDER / CLAIMS / f"{1:020}.json.other"
    claim.parent.mkdir(parents=True)
    claim.write_text("other")
    with pytest.raises(OvertakenError):
        archive.save(Manifest().next_version(offsets={"0": 1}))
    assert not archive.manifest().number
    os.utime(claim, (time.time() - CLAIM_SECS - 1.0,) * 2)
    archive.save(Manifest().next_version(offsets={"0": 1}))
    assert archive.manifest() == Manifest(1, {"0": 1})


def test_two_runs_at_a_time_are_refused(tmp_path: Path) -> None:
    archive = Archive(place_of(str(tmp_path / "a")))
    archive.save(Manifest().next_version(offsets={"0": 1}))
    with pytest.raises(PipelineError, match="one at a time"):
        archive.save(Manifest().next_version(offsets={"0": 2}))
    assert archive.manifest() == Manifest(1, {"0": 1})


STEPS = [
    # Which save of the run is held, where in it, rows that come meanwhile, and what the other run does.
    *((1, held, 30, {}) for held in ("before", "within")),
    *((2, held, 30, {}) for held in ("before", "within")),
    *((3, held, 30, {}) for held in ("before", "within")),
    (1, "before", 0, {}),
    (1, "within", 0, {"keep_days": 1, "today": date(2023, 11, 16), "grace_secs": 0.0}),
    (2, "within", 30, {"grace_secs": 0.0}),
]
"""Saves of a run: what has come, what retention drops, what was merged, and what is deleted for good."""


@pytest.mark.parametrize("number, held, more, options", STEPS)
def test_two_overlapping_runs_leave_each_row_once(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    held: str,
    more: int,
    options: dict[str, Any],
) -> None:
    """One run is held when it is about to save; another one passes it from beginning to end."""
    folder, to = tmp_path / "j", str(tmp_path / "a")
    written(folder, 5)
    for first in range(5, 5 * SMALL_MAX, 5):  # small files, which the run merges
        job.run(spark, str(folder), to, file_bytes=1)
        written(folder, 5, first=first)
    count = 5 * SMALL_MAX
    saves = 0
    passed: list[job.ArchiveResult] = []
    save, listed = Archive.save, Archive._manifests

    def pass_by() -> None:
        monkeypatch.setattr(Archive, "save", save)
        monkeypatch.setattr(Archive, "_manifests", listed)
        if more:
            written(folder, more, first=count)
        passed.append(job.run(spark, str(folder), to, **options))

    def held_save(archive: Archive, manifest: Manifest) -> Manifest:
        nonlocal saves
        saves += 1
        if saves == number and held == "before":
            pass_by()
        elif saves == number:

            def held_list(archive: Archive) -> list[str]:
                names = listed(archive)
                pass_by()
                return names

            monkeypatch.setattr(Archive, "_manifests", held_list)
        return save(archive, manifest)

    monkeypatch.setattr(Archive, "save", held_save)
    with suppress(PipelineError):
        job.run(spark, str(folder), to, grace_secs=0.0 if number == 3 else 3_600.0)
    assert len(passed) == 1, "the run was held"
    last = job.run(spark, str(folder), to)
    rows = [(row.shard, row.sequence) for row in job.read_archive(spark, to).collect()]
    there = 0 if "keep_days" in options else count + more
    assert (sorted(rows), last.total_rows) == ([("0", n) for n in range(there)], there)
    job.run(spark, str(folder), to, grace_secs=0.0)
    manifest = Archive(place_of(to)).manifest()
    assert files(Path(to)) == sorted(one.path for one in (*manifest.files, *manifest.left))


def test_a_run_that_was_overtaken_says_so_and_leaves_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 20)
    save = Archive.save

    def held(archive: Archive, manifest: Manifest) -> Manifest:
        monkeypatch.setattr(Archive, "save", save)
        job.run(spark, str(folder), str(to))
        return save(archive, manifest)

    monkeypatch.setattr(Archive, "save", held)
    with pytest.raises(PipelineError, match="another run has written the archive"):
        job.run(spark, str(folder), str(to))
    assert files(to) == sorted(one.path for one in Archive(place_of(str(to))).manifest().files)


def test_a_file_of_a_run_in_progress_is_not_swept_away(spark: SparkSession, tmp_path: Path) -> None:
    """Neither one that is in its place, nor one that is being written."""
    folder, to = tmp_path / "j", tmp_path / "a"
    made = filed(to, written(folder, 20))
    (to / STAGING).mkdir(parents=True, exist_ok=True)
    half = to / STAGING / "half.parquet"
    half.write_bytes(b"PAR1")
    job.run(spark, str(folder), str(to))
    assert half.exists()
    assert all((to / one.path).exists() for one in made)
    for path in (half, *(to / one.path for one in made)):
        os.utime(path, (time.time() - 4_000,) * 2)
    job.run(spark, str(folder), str(to))
    assert not half.exists()
    assert not any((to / one.path).exists() for one in made)


DAY_SECS = 86_400.0


@pytest.fixture
def a_day_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's clock, which differs from that of the store."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + DAY_SECS)


@pytest.mark.usefixtures("a_day_ahead")
def test_a_clock_that_is_ahead_deletes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Neither files of a run in progress, nor merged files that readers may use, nor days that are kept."""
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 10, start=time.time() - DAY_SECS)
    archive = Archive(place_of(str(to)))
    made = filed(to, folder)
    assert archive.sweep(Manifest(), job.GRACE_SECS) == (Manifest(), 0)
    saved = archive.save(Manifest().next_version(offsets={"0": 10}, gained=made))
    lost = archive.save(saved.next_version(lost=made[:1], now=archive.now()))
    done = job.run(spark, str(folder), str(to), keep_days=1)
    assert (done.dropped, archive.manifest()) == (0, lost)
    assert files(to) == sorted(one.path for one in made)


@pytest.mark.parametrize("merging", [False, True])
def test_a_run_that_is_taken_for_killed_fails_and_loses_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merging: bool
) -> None:
    """It is held when it has written its files, for longer than the grace period by all clocks."""
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 5)
    for first in range(5, 5 * SMALL_MAX, 5):
        job.run(spark, str(folder), str(to), file_bytes=1)
        written(folder, 5, first=first)
    found, swept = Archive.checked_files, 1 + merging
    calls: list[int] = []

    def held(archive: Archive, made: list[ArchiveFile]) -> Any:
        calls.append(len(made))
        if len(calls) == swept:
            for path in to.rglob("*.parquet"):
                os.utime(path, (1_000.0, 1_000.0))
            other = Archive(place_of(str(to)))
            _, deleted = other.sweep(other.manifest(), job.GRACE_SECS)
            assert deleted == len(made)
        return found(archive, made)

    monkeypatch.setattr(Archive, "checked_files", held)
    with pytest.raises(OvertakenError):
        job.run(spark, str(folder), str(to))
    assert len(calls) == swept
    done = job.run(spark, str(folder), str(to))
    assert done.total_rows == 5 * SMALL_MAX
    rows = [row.sequence for row in job.read_archive(spark, str(to)).select("sequence").collect()]
    assert sorted(rows) == [*range(5 * SMALL_MAX)]


def test_old_manifests_go(tmp_path: Path) -> None:
    archive = Archive(place_of(str(tmp_path)))
    manifest = Manifest()
    for number in range(6):
        manifest = archive.save(manifest.next_version(offsets={"0": number}))
    assert [path.name for path in sorted((tmp_path / FOLDER).glob("*.json"))] == [
        f"{n:020}.json" for n in (4, 5, 6)
    ]
    assert archive.manifest() == manifest


@pytest.mark.parametrize("route", ["", "up", "a/b=c d%", "é.*"])
def test_routes_are_folders_that_spark_understands(spark: SparkSession, tmp_path: Path, route: str) -> None:
    assert OURS.fullmatch(f"{folder_of('2023-11-14', route)}/x-7-0123456789ab-0.parquet")
    if route != "a/b=c d%":
        return
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 2, route=route)
    job.run(spark, str(folder), str(to))
    assert job.read_archive(spark, str(to)).where(f"route = '{route}'").count() == 1
    assert spark.read.parquet(str(to)).where(f"route = '{route}'").count() == 1


def test_the_command_follows(
    spark: SparkSession, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is interrupted, which is no failure; it says what each run has done, and how far it is."""
    folder, to, summary = tmp_path / "j", tmp_path / "a", tmp_path / "s.json"
    written(folder, 20)
    told: list[dict[str, float]] = []

    def wait(seconds: float) -> None:
        assert 0 < seconds <= 60
        told.append(json.loads(summary.read_text()))
        if len(told) == 1:
            written(folder, 30, first=20)
        if len(told) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(job, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=wait))
    ran = run(
        "pipeline",
        "archive",
        "--journal",
        str(folder),
        "--to",
        str(to),
        "--follow",
        "--summary",
        str(summary),
    )
    assert ran.code == 0, ran.err
    assert [line.partition(" in ")[0] for line in ran.out.splitlines()] == [
        "20 rows archived",
        "30 rows archived",
    ]
    assert [(one["rows"], one["rows_behind"], one["total_rows"]) for one in told] == [
        (20, 0, 20),
        (50, 0, 50),
        (50, 0, 50),
    ]
    written(folder, 7, first=50)
    assert job.rows_behind(spark, str(folder), str(to)) == 7
    refused = run(
        "pipeline", "archive", "--journal", str(folder), "--to", str(to), "--follow", "--format", "orc"
    )
    assert refused.code == 2
    assert "--follow is only for parquet and tables" in refused.err


def test_an_archive_and_what_it_has_not_yet(spark: SparkSession, tmp_path: Path) -> None:
    """Each row once, also of a shard that it has not seen; what is in neither is an error."""
    folder, to = tmp_path / "j", str(tmp_path / "a")
    written(folder, 20)
    job.run(spark, str(folder), to)
    assert job.read_archive(spark, to, str(folder)).count() == 20
    written(folder, 30, first=20)
    written(folder, 5, shard=1)
    both = job.read_archive(spark, to, str(folder))
    assert both.columns == job.read_archive(spark, to).columns
    assert sorted((row.shard, row.sequence) for row in both.select("shard", "sequence").collect()) == [
        *(("0", number) for number in range(50)),
        *(("1", number) for number in range(5)),
    ]
    assert both.where("date is null").count() == 0
    few = job.read_archive(spark, to, str(folder), columns=["date", "sequence", "route"])
    assert few.columns == ["date", "sequence", "route"]
    assert few.where("sequence > 20").subtract(both.select(*few.columns)).count() == 0
    assert few.count() == 55
    written(folder, 400, first=50, block_rows=20, segment_bytes=20_000)
    for path in sorted(folder.glob("0-*.gwj"))[:2]:
        path.unlink()
    with pytest.raises(PipelineError, match="were deleted by retention"), convert_spark_errors():
        job.read_archive(spark, to, str(folder)).count()


def test_files_end_at_a_useful_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.archive.writer.GROUP_ROWS", 50)
    monkeypatch.setattr("gateway.pipeline.journal.partition_reader.CODED_ROWS", 10)
    written(tmp_path / "j", 400, block_rows=10)
    made = filed(tmp_path / "a", tmp_path / "j", file_bytes=1)
    assert [(one.route, one.rows) for one in made] == [("", 50)] * 4 + [("up", 50)] * 4
    assert sum(one.byte_count for one in made) == sum(
        p.stat().st_size for p in (tmp_path / "a").rglob("*.parquet")
    )


def test_rows_that_are_gone(spark: SparkSession, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 20)
    job.run(spark, str(folder), str(to))
    written(folder, 400, first=20, block_rows=20, segment_bytes=20_000)
    for path in sorted(folder.glob("*.gwj"))[:2]:
        path.unlink()
    with pytest.raises(GoneError):
        job.run(spark, str(folder), str(to))
    done = job.run(spark, str(folder), str(to), fail=False)
    assert done.missing > 0
    assert done.rows == 400 - done.missing


def test_a_journal_that_ends_too_early(spark: SparkSession, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    written(folder, 20)
    job.run(spark, str(folder), str(to))
    next(folder.glob("*.gwj")).unlink()
    written(folder, 5)
    with pytest.raises(PipelineError, match="ends before row 5, and the archive has the rows before 20"):
        job.run(spark, str(folder), str(to))
    assert job.run(spark, str(folder), str(to), fail=False).rows == 0


@pytest.mark.usefixtures("spark")
def test_the_command(run: Run, journal: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(journal(50))
    ran = run("pipeline", "archive", "--journal", folder, "--to", str(tmp_path / "a"))
    assert ran.out.startswith("50 rows archived in 2 files, 0 rows of the journal missing; 0 files merged")
    assert ran.code == 0
    nowhere = run("pipeline", "archive", "--journal", folder, "--to", str(tmp_path / "d"), "--format", "hudi")
    assert (nowhere.code, "cannot write hudi" in nowhere.err) == (1, True)
    assert "spark.jars.packages" in nowhere.err


def test_another_format(
    run: Run, streams: SparkSession, journal: Callable[..., Path], tmp_path: Path
) -> None:
    to = str(tmp_path / "orc")
    orc = ("pipeline", "archive", "--journal", str(journal(50)), "--to", to, "--format", "orc")
    for rows in (50, 0):
        ran = run(*orc)
        while TOO_LATE in ran.err:
            ran = run(*orc)
        assert ran.out == f"{rows} rows archived as orc\n"
    assert streams.read.orc(to).where("route = 'up'").count() == 25


ERRORS = [
    (("--format", "orc", "--to", "catalog.table"), "set --checkpoint"),
    (("--journal", "/nonexistent"), "no such folder"),
]


@pytest.mark.parametrize("arguments, text", ERRORS, ids=[text for _, text in ERRORS])
def test_errors(
    run: Run,
    spark: SparkSession,
    journal: Callable[..., Path],
    tmp_path: Path,
    arguments: tuple[str, ...],
    text: str,
) -> None:
    given = ("--journal", str(journal(1)), "--to", str(tmp_path / "a"))
    ran = run("pipeline", "archive", *given, *arguments)
    assert ran.code == 1
    assert text in ran.err


def test_damage_is_named_and_nothing_is_archived(
    run: Run, spark: SparkSession, journal: Callable[..., Path], tmp_path: Path
) -> None:
    folder = journal(30, block_rows=10)
    path = next(folder.glob("*.gwj"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for command in (("archive", "--to", str(tmp_path / "a")), ("rates", "--to", str(tmp_path / "r"))):
        ran = run("pipeline", *command, "--journal", str(folder))
        assert ran.code == 1
        assert f"{path}: the block at offset" in ran.err
        assert "Traceback" not in ran.err.splitlines()[-1]
    assert files(tmp_path / "a") == []


PLAIN = [
    ("x\ngateway.errors.PipelineError: no such thing\n at java", "no such thing"),
    (
        "a\ngateway.store.journal.reader.GoneError: rows 1 to 2 were deleted by retention\n",
        "rows 1 to 2 were deleted by retention",
    ),
    ("\n [X] Path does not exist: y\n at z", "Spark: [X] Path does not exist: y"),
    (
        "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
        '  File "x.py", line 3, in y\n    raise OSError\nOSError: [Errno 5] no: such disk\n\n'
        "\tat org.x(Y)\nCaused by: Z",
        "a Python worker of Spark: OSError: [Errno 5] no: such disk",
    ),
    (
        "[STREAM_FAILED] it ended\nTraceback (most recent call last):\n  File\nValueError: the cause\n\n"
        "=== Streaming Query ===\nIdentifier: rates [id = 1, runId = 2]\nCurrent State: ACTIVE",
        "a Python worker of Spark: ValueError: the cause",
    ),
    ("", "Spark: no reason given"),
]


@pytest.mark.parametrize("text, line", PLAIN)
def test_a_failure_is_a_line(text: str, line: str) -> None:
    assert cause_of(text) == line


def test_no_archive(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no archive in"):
        job.read_archive(spark, str(tmp_path))

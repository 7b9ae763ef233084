"""`archive`, `ship` and leases, killed before each of their writes: each row is once, and nothing is left.

No process is killed: from the chosen write on, no write of the run reaches the disk, nor one of its clean-up.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from gateway.pipeline import exclusive
from gateway.pipeline.archive.manifest import FOLDER, Archive
from gateway.pipeline.exclusive import CLAIM_SECS, CLAIMS, DRAFTS, LEASES, FolderLease
from gateway.pipeline.jobs import archive as job
from gateway.pipeline.shipment import DAY_SECS, ship
from gateway.pipeline.stores import ArrowPath, StoreFolder, place_of
from gateway.store.journal.reader import JournalReader
from tests.pipeline.journals import START, convert, written

ROUNDS: Final = 9
ROWS: Final = 6  # in a round
MIDNIGHT: Final = 6_400.0  # seconds after START, at which the next day begins
WRITES: Final = ("create_dir", "open_output_stream", "move", "delete_file")


class Killed(BaseException):
    """What a killed run raises here instead of ending at once."""


class Disk:
    """What lets writes pass until one is chosen to kill the run."""

    def __init__(self) -> None:
        self.before: int | None = None
        self.writes = 0

    def kill(self, before: int | None) -> None:
        """Kill the next run before this write (None: not at all)."""
        self.before, self.writes = before, 0

    def write(self) -> None:
        """Count a write. Raises Killed if it is the one, or the run is killed already."""
        if self.before is not None and self.writes >= self.before:
            raise Killed
        self.writes += 1


class System:
    """A file system of Arrow, whose writes are counted."""

    def __init__(self, disk: Disk, real: Any) -> None:
        self._disk = disk
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in WRITES:
            return found

        def write(*given: Any, **more: Any) -> Any:
            self._disk.write()
            return found(*given, **more)

        return write


@pytest.fixture(params=[True, False], ids=["a disk", "no links"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that creates files exclusively, and one that does not, as a store."""
    made, arrow, linked = Disk(), StoreFolder.arrow, exclusive._try_link

    def killable(place: StoreFolder) -> ArrowPath:
        system, path = arrow(place)
        return ArrowPath(System(made, system), path)

    def link(staged: str, whole: str) -> bool:
        if request.param:
            made.write()
        return bool(request.param) and linked(staged, whole)

    monkeypatch.setattr(StoreFolder, "arrow", killable)
    monkeypatch.setattr(exclusive, "_try_link", link)
    return made


class Tasks:
    """What Spark is for `archive`, in this process and one after the other."""

    defaultParallelism = 2

    def __init__(self, tasks: Sequence[Any] = ()) -> None:
        self._tasks = tasks

    @property
    def sparkContext(self) -> Tasks:
        return self

    def statusTracker(self) -> Tasks:
        return self

    def getActiveStageIds(self) -> Sequence[int]:
        return ()

    def parallelize(self, tasks: Sequence[Any], _: int) -> Tasks:
        return Tasks(tasks)

    def map(self, job: Callable[[Any], Any]) -> Tasks:
        return Tasks([job(one) for one in self._tasks])

    def collect(self) -> Sequence[Any]:
        return self._tasks


SPARK: Final = cast("SparkSession", Tasks())


def kills(disk: Disk, run: Callable[[], object], fresh: Callable[[], None]) -> Iterator[int]:
    """Kill `run` before each of its writes, each time from the `fresh` state; yield its number."""
    for number in count():
        disk.kill(None)
        fresh()
        disk.kill(number)
        try:
            run()
        except Killed:
            disk.kill(None)
            yield number
        else:
            disk.kill(None)
            return


def copied(source: Path, to: Path) -> Callable[[], None]:
    def fresh() -> None:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(source, to)

    return fresh


def aged(folder: Path) -> None:
    """Everything in it was written long ago, by the store's clock."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (1_000.0, 1_000.0))


def rows_of(to: Path) -> list[int]:
    """The rows that the newest manifest names."""
    archive = Archive(place_of(str(to)))
    return sorted(
        number
        for file in archive.manifest().files
        for number in pq.ParquetFile(to / file.path).read(["sequence"])["sequence"].to_pylist()
    )


def test_an_archive(disk: Disk, tmp_path: Path) -> None:
    """A run that appends, drops a day, merges, and deletes what was removed."""
    journal, base, to = tmp_path / "j", tmp_path / "base", tmp_path / "to"
    for number in range(ROUNDS):
        written(journal, ROWS, first=number * ROWS, start=START + (MIDNIGHT if number else 0.0))
        if number < ROUNDS - 1:
            job.run(SPARK, str(journal), str(base), file_bytes=1)
    every = [*range(ROUNDS * ROWS)]
    phases = (every[:-ROWS], every, every[ROWS:])

    def run() -> None:
        job.run(SPARK, str(journal), str(to), keep_days=1, today=date(2023, 11, 16), grace_secs=0.0)

    killed = 0
    for killed in kills(disk, run, copied(base, to)):
        assert rows_of(to) in phases, f"write {killed}"
        aged_claims(to)
        job.run(SPARK, str(journal), str(to))
        assert rows_of(to) in phases[1:], f"write {killed}"
        aged(to)
        for _ in range(2):
            job.run(SPARK, str(journal), str(to))
        manifest = Archive(place_of(str(to))).manifest()
        there = {path.relative_to(to).as_posix() for path in to.rglob("*.parquet")}
        assert {one.path for one in manifest.files} <= there, f"write {killed}"
        assert there <= {one.path for one in (*manifest.files, *manifest.left)}, f"write {killed}"
        assert not strays(to / FOLDER), f"write {killed}"
    assert killed > 20
    assert rows_of(to) == phases[-1]
    assert len(list(to.rglob("*.parquet"))) == 2


def strays(folder: Path) -> list[Path]:
    """Drafts and claims, at any depth."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name in (DRAFTS, CLAIMS)]


def aged_claims(to: Path) -> None:
    """A killed run's claims end."""
    for path in to.rglob(f"{CLAIMS}/*"):
        os.utime(path, (time.time() - CLAIM_SECS - 1.0,) * 2)


def test_a_shipped_journal(disk: Disk, tmp_path: Path) -> None:
    """Some files are new, some are Parquet by now, and some are too old."""
    journal, base, to = tmp_path / "j", tmp_path / "base", tmp_path / "to"
    written(journal, 300, block_rows=20, segment_bytes=8_000)
    ship(journal, place_of(str(base)))
    convert(journal, 1, 3)
    ship(journal, place_of(str(base)))
    written(journal, 100, first=300, block_rows=20, segment_bytes=8_000)
    newest = max(one.first for one in JournalReader(journal).segments("0"))

    def numbers() -> list[int]:
        return [row["sequence"] for row in JournalReader(to).rows("0")]

    def run(days: float = 0.5) -> None:
        ship(journal, place_of(str(to)), keep_days=1, now=lambda: START + days * DAY_SECS)

    killed = 0
    for killed in kills(disk, run, copied(base, to)):
        there = numbers()
        assert there == [*range(len(there))], f"write {killed}"
        aged(to)
        for _ in range(2):
            run()
        assert numbers() == [*range(newest)], f"write {killed}"
        assert not list(to.rglob("*.tmp")), f"write {killed}"
    assert killed > 5
    files = len(list(to.glob("0-*")))
    for killed in kills(disk, lambda: run(1.5), lambda: None):
        there = numbers()
        assert there == [*range(newest - len(there), newest)], f"deletion {killed}"
    assert len(list(to.glob("0-*"))) < files


def test_a_lease(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, to = tmp_path / "base", tmp_path / "to"
    base.mkdir()
    place = place_of(str(to))

    def run() -> None:
        with FolderLease([place]) as lease:
            lease.check()

    killed = 0
    for killed in kills(disk, run, copied(base, to)):
        monkeypatch.setattr(exclusive, "_running", {})
        aged_claims(to)
        with FolderLease([place]) as lease:
            lease.check()
            assert len(list((to / LEASES).glob("*.json"))) == 1, f"write {killed}"
    assert killed > 2

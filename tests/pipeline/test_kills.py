"""Every row once, in Parquet, Delta Lake and archives, though the driver is killed with SIGKILL, and the
journal is being written.

The writer is the gateway's own; it writes a few bytes at a time, so that a reader finds the end torn at any
moment, and leaves a torn block behind whenever the driver dies, as a gateway that is killed does. KILLS says
how often the driver is killed; each costs a start of Spark, so it is once in `make test`, over a stream into
Parquet and an archive of it, and twenty times over both of both in `make kills`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

pytest.importorskip("pyspark")

from gateway.errors import PipelineError
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.pipeline.jobs.archive import read_archive
from gateway.pipeline.session import java
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.writer import JournalOptions, JournalWriter
from tests.clients.builds import NotBuiltError, built
from tests.conftest import missing
from tests.needs import needed
from tests.pipeline.kill_driver import arrived
from tests.pipeline.killing import PATIENCE_SECS, ROOT, killed
from tests.pipeline.streams import TOO_LATE
from tests.store.journal.samples import HOME, block, message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS: Final = int(os.environ.get("KILLS", "1"))
BOTH: Final = ("parquet", "delta")
ALL: Final = "KILLS" in os.environ  # a kill costs minutes
PROGRAM: Final = (sys.executable, "-m", "tests.pipeline.kill_driver")
BYTES_MAX: Final = 1_500  # written at a time
ROWS_MAX: Final = 400_000  # so that the end can be reached


class LiveWriter(threading.Thread):
    """Writes rows, some at a time, until it is stopped; then leaves a torn block behind."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._stop_wanted = threading.Event()
        self._writer = JournalWriter(
            folder,
            options=JournalOptions(flush_interval_secs=0.02, segment_bytes=300_000, sync_interval_secs=0),
            clock=time.monotonic,
            pwritev=_few_bytes,
        )

    def run(self) -> None:
        number = self._writer.next
        while not self._stop_wanted.wait(0.02):
            if number < ROWS_MAX and self._writer.backlog < 2_000:
                rows: list[Message] = [message(number + place) for place in range(40)]
                self._writer.record(HOME, rows, ACCEPTED, Monotonic(time.monotonic()))
                number += 40

    def stop(self) -> None:
        """End, with the last block torn."""
        self._stop_wanted.set()
        self.join()
        self._writer.close()
        newest = max(self._folder.glob("*.gwj"))
        torn = block(self._writer.next, 30)
        with newest.open("ab") as file:
            file.write(torn[: random.randrange(1, len(torn))])


def _few_bytes(file: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
    return os.pwrite(file, bytes(b"".join(pieces)[:BYTES_MAX]), offset)


def finished(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A driver that reads to the end of the journal."""
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECS,
        check=False,
    )


@pytest.fixture
@needed("Spark")
def delta() -> tuple[str, ...]:
    """The jars of Delta Lake."""
    try:
        java()
        return tuple(map(str, (built("spark") / "jars").glob("*.jar")))
    except (NotBuiltError, PipelineError) as error:
        missing(str(error))
        raise


def beside_a_writer(journal: Path, run: Callable[[], int]) -> list[int]:
    """What `run` says, which kills a driver, as often as wanted; then the journal has come to its end."""
    found = []
    for _ in range(KILLS):
        writer = LiveWriter(journal)
        writer.start()
        try:
            found.append(run())
        finally:
            writer.stop()
    writer = LiveWriter(journal)
    writer.start()
    writer.stop()  # has cut the torn end, and leaves another
    return found


def each_once(journal: Path, found: Mapping[str, int]) -> bool:
    """Whether all rows of the journal are there, and once."""
    rows = JournalReader(journal).extent("0").next
    return found == {"rows": rows, "distinct": rows, "first": 0, "last": rows - 1, "bodies": rows}


@pytest.mark.parametrize("form", BOTH if ALL else BOTH[:1])
def test_every_row_arrives_once(delta: tuple[str, ...], tmp_path: Path, form: str) -> None:
    journal, folder = tmp_path / "journal", tmp_path / "out"
    options = ("--format", form, "--jars", ",".join(delta))
    command = (*PROGRAM, str(journal), str(folder))
    batches = beside_a_writer(journal, lambda: killed((*command, *options), folder))
    done = finished((*command, "finish", *options))
    while TOO_LATE in done.stderr:
        done = finished((*command, "finish", *options))
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{KILLS} kills after {batches} micro-batches each: {found}")
    assert all(batches)
    assert each_once(journal, found)


@pytest.mark.parametrize("form", BOTH if ALL else BOTH[:1])
def test_an_archive_has_each_row_once(
    delta: tuple[str, ...], tables: SparkSession, tmp_path: Path, form: str
) -> None:
    """While it follows; the run after the last kill brings it to the end."""
    journal, folder = tmp_path / "journal", tmp_path / "archive"
    command = (
        *(sys.executable, "-m", "gateway", "pipeline", "archive", "--journal", str(journal)),
        *("--to", str(folder), "--format", form, "--master", "local[2]"),
        *("--conf", f"spark.jars={','.join(delta)}", "--conf", "spark.driver.memory=512m"),
        *("--conf", "spark.databricks.delta.snapshotPartitions=1"),
    )
    runs = beside_a_writer(
        journal, lambda: killed((*command, "--follow", "--every", "0"), folder, 2, commits=archive_commits)
    )
    done = finished(command)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = arrived(read_archive(tables, str(folder)))
    print(f"{KILLS} kills after {runs} runs each: {found}")
    assert each_once(journal, found)


def archive_commits(folder: Path) -> int:
    """Runs that an archive, or a table of Delta Lake, has the rows of; the first version has none."""
    manifests = (int(path.stem) for path in (folder / "_archive").glob("*.json"))
    versions = sum(path.stem.isdecimal() for path in (folder / "_delta_log").glob("*.json"))
    return max(versions - 1, *manifests, 0)

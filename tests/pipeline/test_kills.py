"""Every row once in Parquet, though the driver is killed with SIGKILL and the journal is being written.

The writer is the gateway's own; it writes a few octets at a time, so that a reader finds the end torn at any
moment, and leaves a torn block behind whenever the driver dies, as a gateway that is killed does. KILLS says
how often the driver is killed; each costs a start of Spark, so it is once in `make test` and twenty times in
`make kills`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gateway.errors import PipelineError
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.pipeline.session import java
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.writer import JournalWriter, Options
from tests.conftest import missing
from tests.pipeline.killing import PATIENCE_SECS, ROOT, killed
from tests.pipeline.streams import TOO_LATE
from tests.store.journal.samples import HOME, block, message

KILLS: Final = int(os.environ.get("KILLS", "1"))
PROGRAM: Final = (sys.executable, "-m", "tests.pipeline.kill_driver")
OCTETS_MAX: Final = 1_500  # written at a time
ROWS_MAX: Final = 400_000  # so that the end can be reached


class LiveWriter(threading.Thread):
    """Writes rows, some at a time, until it is stopped; then leaves a torn block behind."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._stop_wanted = threading.Event()
        self._writer = JournalWriter(
            folder,
            options=Options(flush_interval_secs=0.02, segment_bytes=300_000, sync_interval_secs=0),
            clock=time.monotonic,
            tell=lambda _: None,
            pwritev=_few_octets,
        )

    def run(self) -> None:
        number = self._writer.next
        while not self._stop_wanted.wait(0.02):
            if number < ROWS_MAX and self._writer.backlog < 2_000:
                rows: list[Message] = [message(number + place) for place in range(40)]
                self._writer.record(HOME, rows, ACCEPTED, time.monotonic())
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


def _few_octets(file: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
    return os.pwrite(file, bytes(b"".join(pieces)[:OCTETS_MAX]), offset)


def finished(journal: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Read to the end of the journal."""
    return subprocess.run(
        (*PROGRAM, str(journal), str(folder), "finish"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECS,
        check=False,
    )


def test_every_row_arrives_once(tmp_path: Path) -> None:
    try:
        java()
    except PipelineError as error:
        missing(str(error))
    journal, folder = tmp_path / "journal", tmp_path / "out"
    batches = []
    for _ in range(KILLS):
        writer = LiveWriter(journal)
        writer.start()
        try:
            batches.append(killed((*PROGRAM, str(journal), str(folder)), folder))
        finally:
            writer.stop()
    writer = LiveWriter(journal)
    writer.start()
    writer.stop()  # has cut the torn end, and leaves another
    done = finished(journal, folder)
    while TOO_LATE in done.stderr:
        done = finished(journal, folder)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    extent = JournalReader(journal).extent("0")
    print(f"{KILLS} kills after {batches} micro-batches each: {found}")
    assert all(batches)
    assert (found["rows"], found["distinct"], found["bodies"]) == (extent.next, extent.next, extent.next)
    assert (found["first"], found["last"]) == (0, extent.next - 1)

"""A journal after a power failure: what was synced is there, no row is damaged, and lost ones are gaps."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.store.journal.reader import Gap, JournalReader
from gateway.store.journal.segments import segment_name
from gateway.store.journal.writer import JournalOptions
from tests.chaos.disk_errors import CompilerError
from tests.chaos.power_failure import Disk, DiskRecord
from tests.store.journal.samples import HOME, block, message, writer

LIVES: Final = 2
BYTES: Final = 1_500_000  # recorded in each life
FAILURES: Final = 12  # in each life
OPTIONS: Final = JournalOptions(
    segment_bytes=60_000,
    sync_interval_secs=0.05,
    flush_interval_secs=0.01,
    block_rows_max=200,
    flush_rows=100,
)

MERGE: Final = """
import sys
from pathlib import Path
from gateway.store.journal.merge import merge_segments
from gateway.store.journal.segments import segments_in
merge_segments(segments_in(Path(sys.argv[1])))
"""


def record_rows(folder: Path, first: int) -> None:
    """Record rows until this process is killed; each body is its number."""
    made = writer(folder, options=OPTIONS)
    while True:
        rows = [message(number) for number in range(first, first + 50)]
        made.record(HOME, rows, ACCEPTED, Monotonic(time.monotonic()))
        first += 50
        made.tick()
        time.sleep(0.002)  # so that there are many small blocks


def read(folder: Path) -> dict[int, bytes]:
    """Return the bodies of all rows by sequence number."""
    found = {}
    for item in JournalReader(folder).rows("0"):
        if not isinstance(item, Gap):
            assert item["sequence"] not in found
            found[item["sequence"]] = item["body"]
    return found


def test_power_failure_at_any_moment(tmp_path: Path) -> None:
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print("seed", seed)
    rng = random.Random(seed)
    stored, left, synced = tmp_path / "stored", tmp_path / "left", tmp_path / "synced"
    stored.mkdir()
    for life in range(LIVES):
        disk = Disk(stored)
        try:
            record = DiskRecord(tmp_path / f"record-{life}", stored)
        except CompilerError as error:
            pytest.skip(str(error))
        program = (
            sys.executable,
            "-m",
            "tests.store.journal.test_power_failure",
            str(stored),
            str(life * 10**9),
        )
        with subprocess.Popen(program, env=os.environ | record.environment) as process:
            while not record.path.exists() or record.path.stat().st_size < BYTES:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        calls = record.calls()
        moments = {*rng.sample(range(len(calls)), FAILURES)}
        for moment, call in enumerate(calls):
            disk.apply(call)
            if moment in moments:
                for folder in (left, synced):
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                print(f"life {life}, call {moment} of {len(calls)}:", disk.leave(left, rng))
                disk.leave(synced, rng, share=0.0)
                durable = read(synced)
                made = writer(left, options=OPTIONS)
                found = read(left)
                assert {number: found.get(number) for number in durable} == durable
                made.record(HOME, [message(-1)], ACCEPTED, Monotonic(time.monotonic()))
                made.close()
                assert read(left) == found | {made.next - 1: b"-1"}
        shutil.rmtree(stored)
        shutil.copytree(left, stored)


def test_power_failure_in_a_merge(tmp_path: Path) -> None:
    """No order in which renaming and deletions reach the disk loses a row."""
    stored, left = tmp_path / "stored", tmp_path / "left"
    stored.mkdir()
    for first in range(0, 12, 3):
        (stored / segment_name(0, first)).write_bytes(block(first, 3))
    before, disk = read(stored), Disk(stored)
    try:
        record = DiskRecord(tmp_path / "record", stored)
    except CompilerError as error:
        pytest.skip(str(error))
    subprocess.run(
        (sys.executable, "-c", MERGE, str(stored)), env=os.environ | record.environment, check=True
    )
    assert len(list(stored.glob("*.gwj"))) == 1
    for call in record.calls():
        disk.apply(call)
        for seed in range(20):
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir()
            disk.leave(left, random.Random(seed), share=0.5)
            assert read(left) == before, (call.kind, seed)


if __name__ == "__main__":
    record_rows(Path(sys.argv[1]), int(sys.argv[2]))

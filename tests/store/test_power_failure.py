"""A power failure at any moment: what was reported as accepted is in the store, what was settled is not."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from gateway.store.repair import check
from tests.chaos.disk_errors import CompilerError
from tests.chaos.power_failure import Disk, DiskRecord, Kind
from tests.store.parts import opened
from tests.store.test_killed import Told

LIVES: Final = 2
BYTES: Final = 8_000_000  # recorded in each life
FAILURES: Final = 12  # in each life


def record_of(folder: Path, stored: Path, seed: int, first: int) -> DiskRecord:
    """Record a program that stores and settles messages, until the record has BYTES bytes."""
    record = DiskRecord(folder, stored)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store.killed", str(stored), str(seed), str(first)],
        stdout=subprocess.PIPE,
        env=os.environ | record.environment,
    ) as program:
        assert program.stdout is not None
        while program.stdout.readline() and record.path.stat().st_size < BYTES:
            pass
        program.kill()
    return record


def test_power_failure_at_any_moment(tmp_path: Path) -> None:
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print("seed", seed)
    rng = random.Random(seed)
    stored = tmp_path / "stored"
    stored.mkdir()
    kept: set[int] = set()  # on disk when the program began
    first = 0
    for life in range(LIVES):
        started = tmp_path / f"started-{life}"
        shutil.copytree(stored, started)
        disk = Disk(stored)
        try:
            record = record_of(tmp_path / f"record-{life}", stored, rng.randrange(2**32), first)
        except CompilerError as error:
            pytest.skip(str(error))
        calls = record.calls()
        moments = sorted(rng.sample(range(len(calls)), FAILURES))
        told = Told()
        for moment, call in enumerate(calls):
            disk.apply(call)
            if call.kind is Kind.OUTPUT:
                told.add(call.data.decode().split())
            if moment == moments[0]:
                del moments[0]
                left = tmp_path / "left"
                shutil.rmtree(left, ignore_errors=True)
                left.mkdir()
                said = f"life {life}, call {moment} of {len(calls)}: {disk.leave(left, rng)}"
                print(said)
                store = opened(left)
                found, last = told.check(store, kept, first)
                store.close()
                assert check(left).is_intact, said  # before, an unsynced commit in the log may look damaged
                if not moments:
                    break
        shutil.rmtree(stored)
        shutil.copytree(left, stored)
        kept, first = set(found), max(last + 1, first)

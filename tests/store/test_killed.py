"""`kill -9` at any moment: what was told to be accepted is there, what was told to be settled is gone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.store.parts import content, log_of, opened

KILLS = 20
KILLED_WITHIN_SECS = 0.25


def lines_of(folder: Path, seed: int, first: int, secs: float) -> list[list[str]]:
    """What the program has said `secs` after the first that was accepted, when it was killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store.killed", str(folder), str(seed), str(first)],
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline()]
        while not lines[-1].startswith("T"):
            lines.append(program.stdout.readline())
            assert lines[-1], "it has ended"
        time.sleep(secs)  # the moment of the kill is what chance decides here
        program.kill()
        lines += program.stdout.readlines()
    return [line.split() for line in lines if line.endswith("\n")]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    kept: set[int] = set()  # on disk when the program began
    first = 0
    accepted_in_all = 0
    for _ in range(KILLS):
        accepted: set[int] = set()
        begun: set[int] = set()
        settled: set[int] = set()
        for kind, *numbers in lines_of(
            tmp_path, rng.randrange(2**32), first, rng.uniform(0, KILLED_WITHIN_SECS)
        ):
            if kind == "T":
                accepted.update(range(int(numbers[0]), int(numbers[1])))
            else:
                (begun if kind == "B" else settled).update(map(int, numbers))
        store = opened(tmp_path)
        log = log_of(store)
        found = dict(content(store, log))
        assert list(found) == sorted(found)
        assert all(body.rstrip(b".") == b"%d" % number for number, body in found.items())
        assert not (kept | accepted) - begun - set(found), "lost"
        assert not settled & set(found), "came back"
        # Messages and the value that came with them are committed together, told or not.
        (value,) = (int(value) for _, value in store.records("value") if isinstance(value, bytes))
        assert not set(range(first, value + 1)) - begun - set(found), "torn"
        assert max(found, default=0) <= value
        accepted_in_all += len(accepted)
        gone = sorted(found)[: len(found) // 2] if rng.random() < 0.5 else []
        store.settle(log, gone)
        store.close()
        kept = set(found) - set(gone)
        first = value + 1
    assert accepted_in_all > KILLS

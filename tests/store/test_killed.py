"""`kill -9` at any moment: what was told to be accepted is there, what was told to be settled is gone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from gateway.store.store import Store
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


class Told:
    """What the program has said, and what the store must therefore contain."""

    def __init__(self) -> None:
        self.accepted: set[int] = set()
        self.begun: set[int] = set()
        self.settled: set[int] = set()

    def add(self, words: list[str]) -> None:
        """Add the words of one line."""
        kind, *numbers = words
        if kind == "T":
            self.accepted.update(range(int(numbers[0]), int(numbers[1])))
        else:
            (self.begun if kind == "B" else self.settled).update(map(int, numbers))

    def check(self, store: Store, kept: set[int], first: int) -> tuple[set[int], int]:
        """Check a store that is not started. Return the numbers of its messages, and the last number stored.

        `kept` are the numbers that were there before the program began, with the number `first`.
        """
        found = dict(content(store, log_of(store))) if store.logs() else {}
        assert list(found) == sorted(found)
        assert all(body.rstrip(b".") == b"%d" % number for number, body in found.items())
        assert not (kept | self.accepted) - self.begun - set(found), "lost"
        assert not self.settled & set(found), "came back"
        # Messages and the value that came with them are committed together, told or not.
        values = [int(value) for _, value in store.records("value") if isinstance(value, bytes)]
        last = max(values, default=-1)
        assert not set(range(first, last + 1)) - self.begun - set(found), "torn"
        assert max(found, default=-1) <= last
        return set(found), last


def test_killed_at_any_moment(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    kept: set[int] = set()  # on disk when the program began
    first = 0
    accepted_in_all = 0
    for _ in range(KILLS):
        told = Told()
        for words in lines_of(tmp_path, rng.randrange(2**32), first, rng.uniform(0, KILLED_WITHIN_SECS)):
            told.add(words)
        store = opened(tmp_path)
        found, last = told.check(store, kept, first)
        accepted_in_all += len(told.accepted)
        gone = sorted(found)[: len(found) // 2] if rng.random() < 0.5 else []
        store.settle(log_of(store), gone)
        store.close()
        kept = found - set(gone)
        first = last + 1
    assert accepted_in_all > KILLS

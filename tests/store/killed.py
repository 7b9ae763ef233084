"""A program that stores messages until it is killed, and says on its output what it does and is told.

Messages are numbered by their position, the first from the command line. Lines: `T a b` (messages a to b - 1
were accepted), `B n ...` (these are about to be settled), `S n ...` (they are, for a barrier was accepted).
With the messages of each append goes a value, the number of the last of them. A body is its number, with
dots behind it that make some rows too large for the database.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from gateway.model.outcome import ACCEPTED, Outcome
from tests.store.parts import Opened, messages

WAITING_MAX = 8
FILLED = 70_000


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Life:
    """What happens until the kill."""

    def __init__(self, folder: Path, seed: int, first: int) -> None:
        self.rng = random.Random(seed)
        self.one = Opened(folder)
        self.log = self.one.store.log("queue", "q")
        self.position = first
        self.waiting = 0

    def run(self) -> None:
        while True:
            for _ in range(self.rng.randrange(1, 4)):
                self.append()
            self.one.store.flush()
            self.one.loop.run_until(lambda: self.waiting < WAITING_MAX)

    def append(self) -> None:
        run = range(self.position, self.position + self.rng.choice([1, 1, 5, 30, 200]))
        self.position = run.stop
        self.waiting += 1
        dots = b"." * self.rng.choice((0, FILLED // len(run)))
        bodies = [b"%d%s" % (number, dots) for number in run]
        self.one.store.append(
            self.log,
            run.start,
            messages(*bodies),
            lambda outcome: self.told(outcome, "T", run.start, run.stop),
        )
        self.one.store.put("value", "last", b"%d" % (run.stop - 1))
        if self.rng.random() < 0.5:
            some = [number for number in run if self.rng.random() < 0.7]
            say("B", *some)
            self.waiting += 1
            self.one.store.settle(self.log, some)
            self.one.store.after_commit(lambda outcome: self.told(outcome, "S", *some))

    def told(self, outcome: Outcome, *words: object) -> None:
        assert outcome is ACCEPTED
        self.waiting -= 1
        say(*words)


if __name__ == "__main__":
    Life(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).run()

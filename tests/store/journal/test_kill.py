"""`kill -9` of a process that writes: what it had told is there, nothing twice, and the next one goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from gateway.store.journal.reader import JournalReader
from tests.store.journal.samples import numbers_of, rows_of, write

KILLS = 8
SCRIPT = """
import sys, time
from pathlib import Path
from gateway.model.outcome import ACCEPTED
from gateway.store.journal.writer import JournalOptions
from tests.store.journal.samples import HOME, message, writer
options = JournalOptions(flush_interval_secs=0.001, flush_rows=50, segment_bytes=60_000)
made = writer(Path(sys.argv[1]), options=options)
number = made.next
print("ready", flush=True)
while True:
    made.record(HOME, [message(number + place) for place in range(20)], ACCEPTED, time.monotonic())
    number += 20
    while made.backlog > 500:
        time.sleep(0.0005)
    print(made.next, flush=True)
"""


def test_killed_again_and_again(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    chance = random.Random(seed)
    told = 0
    for _ in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[3],
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split("\n")[:-1]
        process.stdout.close()
        process.wait()
        told = max([told, *map(int, lines)])
        rows = rows_of(tmp_path)
        assert numbers_of(rows) == [row["sequence"] for row in rows] == list(range(len(rows)))
        assert len(rows) >= told, "what was numbered had been written"
    write(tmp_path, range(len(rows), len(rows) + 1))
    assert numbers_of(rows_of(tmp_path)) == list(range(len(rows) + 1))
    assert list(JournalReader(tmp_path).verify("0")) == []

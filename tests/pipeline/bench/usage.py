"""What a job costs: wall time, processor time and memory of this process and all below it (Spark's JVM, its
Python workers), read from /proc. Memory is the sum of what is resident, so shared pages count more than once.
A worker that ends between two looks and whose parent has not yet asked for it takes its seconds along: then
the seconds are too few, or even below zero, which the table shows as unknown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECS: Final = 0.05


class Usage(NamedTuple):
    """Of one run: seconds by the clock and of processors, bytes resident at most: of all, and of the largest
    process that is not Java's."""

    wall: float
    cpu: float
    resident: int
    worker: int


class Process(NamedTuple):
    """What the system says of one."""

    name: str
    spent: float
    resident: int


def measured(job: Callable[[], object]) -> Usage:
    """Run a job."""
    peak, worker = [0], [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECS):
            there = list(_tree())
            peak[0] = max(peak[0], sum(one.resident for one in there))
            worker[0] = max(worker[0], *(one.resident for one in there if one.name != "java"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    cpu, wall = sum(one.spent for one in _tree()), time.perf_counter()
    job()
    wall = time.perf_counter() - wall
    cpu = sum(one.spent for one in _tree()) - cpu
    done.set()
    watcher.join()
    return Usage(wall, cpu, peak[0], worker[0])


def middle(runs: list[Usage]) -> Usage:
    """The medians, and the highest memory."""
    return Usage(
        median(run.wall for run in runs),
        median(run.cpu for run in runs),
        max(run.resident for run in runs),
        max(run.worker for run in runs),
    )


def _tree() -> Iterator[Process]:
    """Processor seconds (with those of ended children) and resident bytes of each process of ours."""
    below: dict[int, list[int]] = {}
    found: dict[int, Process] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended just now
            continue
        below.setdefault(int(fields[1]), []).append(int(path.name))
        found[int(path.name)] = Process(
            _program(path), sum(map(int, fields[11:15])) / TICKS, int(fields[21]) * PAGE
        )
    waiting = [os.getpid()]
    while waiting:
        process = waiting.pop()
        yield found[process]
        waiting += below.get(process, ())


def _program(path: Path) -> str:
    """The name of what a process runs; what it is called is wrong for a moment when Java has forked it."""
    try:
        return (path / "exe").readlink().name
    except OSError:  # it has ended
        return ""

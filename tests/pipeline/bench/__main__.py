"""`make bench-pipeline`: rows per second of the source and the jobs, on one core and on two.

    python -m tests.pipeline.bench [--rows N] [--rounds N] [--masters local[1],local[2],cluster]
                                   [--only PATTERN] [--folder FOLDER] [--quiet-days N]

Beside the journal of N rows there are one of a million, one of a quiet gateway's days, and ones of a day and
of many, where a chosen job needs them. How jobs compare stands in a second table, and what it takes to plan a
read in a third.
The journals are made in FOLDER and stay there for the next time; without one they are made anew. Each master
has a Spark of its own; `cluster` is a standalone one of two workers with a core each. The figures are
medians; the processor's seconds say more than the clock's on a machine that has other things to do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from gateway.pipeline.session import is_local, session
from tests.pipeline.bench.jobs import GROUPS, JOURNALS, MILLION, NAMES, QUIET, RATIOS, Bench
from tests.pipeline.bench.journal import DAY_COUNTS, days, made, planning_secs, quiet, rows_of
from tests.pipeline.bench.usage import Usage, measured, middle
from tests.pipeline.cluster import EQUIPPED, OPTIONS, Cluster

MEBIBYTE = 1_048_576
CLUSTER = "cluster"
CLUSTERED = OPTIONS | {"spark.driver.memory": "1g", "spark.executor.memory": "640m"}
HEAD = (
    "| job | master | rows/s | CPU s per million rows | memory, MiB | the largest Python process |\n"
    "|---|---|---|---|---|---|"
)
PLAIN = str.maketrans("[]*,:/", "------")  # what Spark would take for a pattern in a path


def measure(master: str, folder: Path, rows: int, rounds: int, only: str) -> dict[str, Usage]:
    """All jobs on one master."""
    own = {"spark.driver.memory": "2g"} if is_local(master) else CLUSTERED
    spark = session("bench", master=master, options=own)
    bench = Bench(spark, folder / f"journal-{rows}", folder / f"{master.translate(PLAIN)}-{rows}")
    found: dict[str, Usage] = {}
    for group in GROUPS:
        chosen = [(name, job) for name, job in group if re.search(only, name)]
        runs: dict[str, list[Usage]] = {name: [] for name, _ in chosen}
        for turn in range(rounds + 1):
            for name, job in chosen:
                usage = measured(lambda job=job: job(bench))  # type: ignore[misc]
                if turn:
                    runs[name].append(usage)
        found |= {name: middle(some) for name, some in runs.items()}
    return found


def print_ratios(usages: Mapping[str, Usage], rows: Mapping[str, int], *, known: bool) -> None:
    """How fast a row of one job is beside a row of another, and what of the processor it takes (`known`)."""
    print("\n| job | beside | rows/s, of the other's | CPU of a row, of the other's |\n|---|---|---|---|")
    for job, other in RATIOS:
        if job in usages and other in usages:
            one, two = usages[job], usages[other]
            count = rows[job] / rows[other]
            cost = f"{one.cpu / two.cpu / count:.2f}" if known and two.cpu > 0 else "?"
            print(f"| {job} | {other} | {two.wall / one.wall * count:.2f} | {cost} |", flush=True)


def main() -> None:
    """Measure in a process for each master, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--masters", default="local[2]")
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--quiet-days", type=float, default=1.0)
    parser.add_argument("--child", nargs=3, metavar=("MASTER", "FOLDER", "ROWS"))
    given = parser.parse_args()
    if given.child:
        child, name, rows = given.child
        print(json.dumps(measure(child, Path(name), int(rows), given.rounds, given.only)))
        return
    with ExitStack() as stack:
        name = str(given.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        journal = Path(name) / f"journal-{given.rows}"
        needed: dict[Path, Callable[[Path], object]] = {
            journal: lambda folder: made(folder, given.rows),
            journal.with_name(MILLION): lambda folder: made(folder, 1_000_000),
            journal.with_name(QUIET): partial(quiet, count=given.quiet_days),
        }
        needed |= {journal.with_name(f"days-{one}"): partial(days, count=one) for one in DAY_COUNTS}
        chosen = {JOURNALS.get(job, journal.name) for job in NAMES if re.search(given.only, job)}
        needed = {folder: make for folder, make in needed.items() if folder.name in {journal.name, *chosen}}
        for folder, make in needed.items():
            if not folder.exists():
                make(folder)
        rows_in = {folder.name: rows_of(folder) for folder in needed}
        byte_count = sum(path.stat().st_size for path in journal.glob("*.gwj"))
        print(
            f"{given.rows:,} rows, {byte_count / given.rows:.0f} bytes each; medians of {given.rounds}",
            flush=True,
        )
        for master in given.masters.split(","):
            print(f"\n{HEAD}", flush=True)
            url, env = master, dict(os.environ)
            if master == CLUSTER:
                own = stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-cluster-"))
                cluster = stack.enter_context(Cluster(Path(own)))
                url, env = cluster.url, cluster.environment(EQUIPPED)
            command = (sys.executable, "-m", "tests.pipeline.bench", "--child", url, name, str(given.rows))
            options = ("--rounds", str(given.rounds), "--only", given.only)
            done = subprocess.run(
                (*command, *options), stdout=subprocess.PIPE, text=True, check=True, env=env
            )
            usages = {name: Usage(*some) for name, some in json.loads(done.stdout.splitlines()[-1]).items()}
            counts = {job: rows_in[JOURNALS.get(job, journal.name)] for job in usages}
            for job, (wall, cpu, resident, worker) in usages.items():
                rows = counts[job]
                known = cpu > 0 and master != CLUSTER  # whose executors are no processes of the driver
                speed, cost = f"{rows / wall:,.0f}", f"{cpu / rows * 1e6:.2f}" if known else "?"
                memory = f"{resident / MEBIBYTE:.0f} | {worker / MEBIBYTE:.0f}"
                print(f"| {job} | {master} | {speed} | {cost} | {memory} |", flush=True)
            print_ratios(usages, counts, known=master != CLUSTER)
        print("\n| planning a read of | files | rows | ms |\n|---|---|---|---|")
        for folder in needed:
            files = len([*folder.glob("*.gwj")])
            print(
                f"| {folder.name} | {files} | {rows_in[folder.name]:,} | {planning_secs(folder) * 1e3:.1f} |"
            )


if __name__ == "__main__":
    main()

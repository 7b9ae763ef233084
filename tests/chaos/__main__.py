"""`python -m tests.chaos`: row after row in an order of chance, for as long as told.

A failure prints its seed; `--seed SEED --only NAME` runs that row again with the same faults at the same
moments. The exit code is 1 when any run failed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.chaos.disk_errors import CompilerError
from tests.chaos.faults import DiskError
from tests.chaos.replicas.rows import REPLICAS_SHORT, replica_rows
from tests.chaos.run import AnyRow, Brokers, run
from tests.chaos.scenarios import SHORT, matrix
from tests.interop.cluster import RabbitCluster
from tests.interop.servers import PeerMissingError, RabbitMQ

SEED_VARIABLE: Final = "CHAOS_SEED"


def main(given: list[str]) -> int:
    """0: every run was sound; 1: one was not; 2: no row has this name."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="(default: %(default)s)")
    parser.add_argument("--seed", default=os.environ.get(SEED_VARIABLE) or str(time.time_ns() % 1_000_000))
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="rows in whose name this text or regular expression is found",
    )
    parser.add_argument(
        "--once", action="store_true", help="end when each row has run, however long it takes"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    arguments = parser.parse_args(given)
    signal.signal(signal.SIGTERM, _stop)  # an orderly end: brokers are stopped and disks unmounted
    every: list[AnyRow] = [*matrix(), *replica_rows(), *SHORT, *REPLICAS_SHORT]
    known = {row.name: row for row in every}
    rows = [row for name, row in known.items() if arguments.only in name or re.search(arguments.only, name)]
    if arguments.list:
        print("\n".join(row.name for row in rows))
    if arguments.list or not rows:
        return 0 if rows else 2
    seconds, turns = (math.inf, 1) if arguments.once else (arguments.seconds, sys.maxsize)
    print(f"CHAOS_SEED={arguments.seed}, {len(rows)} rows, {seconds:.0f} s", flush=True)
    return int(_failures(rows, arguments.seed, seconds, turns) > 0)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _failures(rows: list[AnyRow], seed: str, seconds: float, turns: int) -> int:
    """Run rows until the time or the turns are over, each before any comes again; how many failed."""
    end = time.monotonic() + seconds
    failed = ran = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-chaos-")))
        rabbitmq: RabbitMQ | None = None
        cluster: RabbitCluster | None = None
        for turn in range(turns):
            # A turn's seed is one that can be given, so that what failed can be run alone.
            own = seed if not turn else f"{seed}.{turn}"
            Random(own).shuffle(rows)
            for row in rows:
                if time.monotonic() >= end:
                    return _told(ran, failed)
                if "rabbitmq" in row.remotes and rabbitmq is None:
                    rabbitmq = stack.enter_context(RabbitMQ(folder / "rabbitmq"))
                if "cluster" in row.remotes and cluster is None:
                    cluster = stack.enter_context(RabbitCluster(folder / "cluster"))
                ran += 1
                brokers = cluster if "cluster" in row.remotes else rabbitmq
                failed += not _sound(row, own, folder / f"{ran}", brokers)
    return _told(ran, failed)


def _told(ran: int, failed: int) -> int:
    print(f"{ran} runs, {failed} failed")
    return failed


def _sound(row: AnyRow, seed: str, folder: Path, rabbitmq: Brokers) -> bool:
    try:
        result = run(row, seed, folder, rabbitmq)
    except (CompilerError, DiskError, PeerMissingError) as error:
        print(f"skipped {row.name}: {error}", flush=True)
        return True
    except Exception as error:
        print(f"BROKEN {row.name}, CHAOS_SEED={seed}: {error!r}", flush=True)
        return False
    print(f"{'sound' if result.sound else 'FAILED'} {result}", flush=True)
    return result.sound


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.simulation`: run one seed, or one seed after the other for a while."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.plan import STEPS, Plan
from tests.simulation.shrinking import report, shrink
from tests.simulation.simulation import Result, simulate

SHRINK_SECS: float = 20.0


def main() -> int:
    """Return 1 if a seed has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="run seeds for so long")
    parser.add_argument("--seed", type=int, help="run this seed; with --seconds: the first one")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--without", default="", help="features and faults to leave out, with commas")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    given = parser.parse_args()
    without = frozenset(filter(None, given.without.split(",")))
    if given.seconds is None:
        result = simulate(Plan.of_seed(given.seed or 0, given.steps).without(without))
        print(report(result, lines_max=1_000_000 if given.trace or result.faults else 0))
        print(f"trace {result.digest}")
        return bool(result.faults)
    first = int(time.time()) if given.seed is None else given.seed
    return _run_seeds(first, given.steps, without, given.seconds)


def _run_seeds(first: int, steps: int, without: frozenset[str], seconds: float) -> int:
    """Run seeds from `first` on for so many seconds, and shrink those that fail."""
    end = time.monotonic() + seconds
    seed, simulated, delivered = first, 0.0, 0
    failed: list[Result] = []
    while time.monotonic() < end:
        result = simulate(Plan.of_seed(seed, steps).without(without))
        simulated += result.simulated_secs
        delivered += result.delivered
        if result.faults:
            failed.append(shrink(result, SHRINK_SECS))
            print(report(failed[-1]), flush=True)
        seed += 1
    count = seed - first
    print(
        f"{count} seeds from {first} on, {simulated / 3_600:.1f} simulated hours, "
        f"{simulated / seconds:.0f} simulated seconds a second, {delivered} deliveries, {len(failed)} failed"
    )
    for one in failed:
        print(one.plan.command())
    return bool(failed)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # one order of sets in all runs
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    sys.exit(main())

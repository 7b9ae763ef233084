"""What the attacks cost, a line each: python -m tests.adversary [NAME ...]

Exit code 1 when the gateway ended, grew beyond what the case allows, failed somebody else, met an error that
nobody foresaw, or had others wait longer than P99_SECS_MAX in more than one of a hundred round trips.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.adversary.arena import Arena, Seen, attacked
from tests.adversary.cases import CASES, MIB, Case
from tests.adversary.test_adversary import ATTACKS

P99_SECS_MAX: Final = 0.1
HEAD: Final = f"{'attack':38} {'secs':>6} {'p50 ms':>7} {'p99 ms':>7} {'max ms':>7} {'MiB':>5}  verdict"


def faults_of(seen: Seen, case: Case) -> list[str]:
    """What was not held."""
    return [
        *seen.failures[:1],
        *(["p99"] if seen.quantile(0.99) > P99_SECS_MAX else []),
        *([f"memory, {case.grown_mib} MiB allowed"] if seen.grown_bytes > case.grown_mib * MIB else []),
        *(["an internal error"] if seen.internal_errors else []),
    ]


def show(name: str) -> bool:
    """Run one; whether it held."""
    case = CASES[name]
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder, Arena(Path(folder), **case.configuration) as arena:
            begin = time.monotonic()
            seen = attacked(arena, case.attack)
    except (AssertionError, OSError) as error:
        print(f"{name:38} {time.monotonic() - begin:6.1f} {'':31} failed: {error!r:.200}", flush=True)
        return False
    figures = [1_000 * figure for figure in (seen.quantile(0.5), seen.quantile(0.99), seen.longest)]
    faults = faults_of(seen, case)
    row = " ".join(f"{figure:7.1f}" for figure in figures)
    print(
        f"{name:38} {time.monotonic() - begin:6.1f} {row} {seen.grown_bytes / MIB:5.0f}  "
        f"{', '.join(faults) or 'held'}",
        flush=True,
    )
    return not faults


def main() -> int:
    assert ATTACKS, "importing them has registered their cases"
    print(HEAD)
    held = [show(name) for name in sys.argv[1:] or CASES]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the attacks cost, as a table: python -m tests.adversary [NAME ...]

Exit code 1 when the gateway ended, grew beyond what the case allows, failed somebody else, or had him wait
longer than P99_SECS_MAX in more than one of a hundred round trips.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.adversary.arena import Arena, attacked
from tests.adversary.cases import CASES, MIB
from tests.adversary.test_adversary import ATTACKS

P99_SECS_MAX: Final = 0.1


def main() -> int:
    assert ATTACKS
    wanted = sys.argv[1:] or list(CASES)
    table = Table("attack", "seconds", "p50 ms", "p99 ms", "longest ms", "grown MiB", "verdict")
    bad = 0
    for name in wanted:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder, Arena(Path(folder), **case.configuration) as arena:
            begin = time.monotonic()
            try:
                seen = attacked(arena, case.attack)
            except (AssertionError, OSError) as error:
                table.add_row(
                    name, f"{time.monotonic() - begin:.1f}", "", "", "", "", f"failed: {error!r}"[:300]
                )
                bad += 1
                continue
            faults = [
                *seen.failures[:1],
                *(["p99"] if seen.quantile(0.99) > P99_SECS_MAX else []),
                *(["memory"] if seen.grown_octets > case.grown_mib * MIB else []),
                *(["internal"] if seen.internal_errors else []),
            ]
            bad += bool(faults)
            figures = (seen.quantile(0.5), seen.quantile(0.99), seen.longest)
            table.add_row(
                name,
                f"{time.monotonic() - begin:.1f}",
                *(f"{1_000 * figure:.1f}" for figure in figures),
                f"{seen.grown_octets / MIB:.0f}",
                ", ".join(faults) or "held",
            )
    Console(width=160).print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

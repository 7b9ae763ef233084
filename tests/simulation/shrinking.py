"""Smaller plans that fail in the same way as a larger one."""

from __future__ import annotations

import re
import time

from tests.simulation.simulation import Result, simulate


def kinds_of(result: Result) -> set[str]:
    """Return the faults of a result without their numbers, by which one is known again."""
    return {re.sub(r"\d+", "N", fault)[:60] for fault in result.faults}


def shrink(result: Result, seconds: float) -> Result:
    """Return the result of a smaller plan with one of the same faults, found within about `seconds`."""
    end = time.monotonic() + seconds
    kinds = kinds_of(result)
    candidates = result.plan.smaller()
    while candidates and time.monotonic() < end:
        smaller = simulate(candidates.pop(0))
        if kinds & kinds_of(smaller):
            result = smaller
            candidates = result.plan.smaller()
    return result


def report(result: Result, *, lines_max: int = 40) -> str:
    """Return what a person needs of a failure: its faults, its command and the end of its trace."""
    plan = result.plan
    return "\n".join(
        [
            f"seed {plan.seed}, {plan.steps} steps, {result.simulated_secs:.0f} simulated seconds",
            f"features: {', '.join(sorted(plan.features))}",
            f"faults: {', '.join(sorted(plan.faults)) or 'none'}",
            *(f"  {one}" for one in result.faults[:20]),
            f"  {plan.command()}",
            *result.trace[max(len(result.trace) - lines_max, 0) :],
        ]
    )

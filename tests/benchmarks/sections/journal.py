"""What the journal costs: scenario A of `embedded` with every message written down, and without.

The difference is smaller than what a machine's speed changes by within a minute. So short runs with and
without follow each other, now the one first and now the other; the figure is the median of the pairs' ratios.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load
from tests.benchmarks.subjects import Gateway

TARGET: Final = 0.9
PAIRS: Final = 5  # of runs, in place of one


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """One figure: with the journal against without."""
    options = {"enabled": True, "path": str(folder / "journal"), "retention_bytes": 1 << 30}
    with ExitStack() as stack:
        subjects = (
            stack.enter_context(Gateway(folder / "with", journal=options)),
            stack.enter_context(Gateway(folder / "without")),
        )
        found: list[list[Measured]] = [[], []]
        for number in range(repeat * PAIRS):
            pair = list(zip(found, subjects, strict=True))
            for runs, subject in reversed(pair) if number % 2 else pair:
                load = Load("mqtt", "amqp", subject.mqtt_port, subject.amqp_port, seconds=seconds / 2)
                runs.append(run(load, subject.cpu))
    rates = [median([one.rate for one in runs]) for runs in found]
    ratio = median([ours.rate / theirs.rate for ours, theirs in zip(*found, strict=True)])
    costs = [median([one.server_us for one in runs]) for runs in found]
    return [
        Figure(
            "J: scenario A with every message in the journal, against without",
            "messages/s",
            rates[0],
            rates[1],
            ratio=ratio,
            target=TARGET,
            more={"CPU us/message": f"{costs[0]:.2f}", "without": f"{costs[1]:.2f}"},
        )
    ]

"""What the journal costs: scenarios A and A2 of `embedded` with every message written down, and without.

The difference is smaller than what a machine's speed changes by within a minute, and than that between one
process and the next of the same program. So short runs with and without follow each other, now the one first
and now the other, new processes take over after a few, and the figure is the median of all pairs' ratios.
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
PAIRS: Final = 3  # of runs with the same two processes
ROUNDS: Final = 2  # of processes, for each repetition that is asked for


SCENARIOS: Final = {
    "J: scenario A with every message in the journal, against without": 1,
    "J2: scenario A2, with ten topics of each connection in turn, likewise": 10,
}
"""And the topics of a connection."""


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """With the journal against without."""
    figures = []
    for name, topics in SCENARIOS.items():
        found: list[list[Measured]] = [[], []]
        for number in range(repeat * ROUNDS):
            _compare(folder / f"{topics}-{number}", topics, seconds / 2, found)
        ours, theirs = (median([one.rate for one in runs]) for runs in found)
        costs = [median([one.server_us for one in runs]) for runs in found]
        figures.append(
            Figure(
                name,
                "messages/s",
                ours,
                theirs,
                ratio=median([one.rate / other.rate for one, other in zip(*found, strict=True)]),
                target=TARGET,
                more={"CPU us/message": f"{costs[0]:.2f}", "without": f"{costs[1]:.2f}"},
            )
        )
    return figures


def _compare(folder: Path, topics: int, seconds: float, found: list[list[Measured]]) -> None:
    """A few pairs of runs, with the journal and without, with processes of their own."""
    options = {"enabled": True, "path": str(folder / "journal"), "retention_bytes": 1 << 30}
    with ExitStack() as stack:
        subjects = (
            stack.enter_context(Gateway(folder / "with", journal=options)),
            stack.enter_context(Gateway(folder / "without")),
        )
        for number in range(PAIRS):
            pair = list(zip(found, subjects, strict=True))
            for runs, subject in reversed(pair) if number % 2 else pair:
                ports = subject.mqtt_port, subject.amqp_port
                runs.append(run(Load("mqtt", "amqp", *ports, topics=topics, seconds=seconds), subject.cpu))

"""What the journal costs: scenario A of `embedded` with every message written down, and without."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load
from tests.benchmarks.subjects import Gateway

TARGET: Final = 0.9


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """One figure: with the journal against without."""
    options = {"enabled": True, "path": str(folder / "journal"), "retention_bytes": 1 << 30}
    with ExitStack() as stack:
        subjects = (
            stack.enter_context(Gateway(folder / "with", journal=options)),
            stack.enter_context(Gateway(folder / "without")),
        )
        found: list[list[Measured]] = [[], []]
        for _ in range(repeat):
            for runs, subject in zip(found, subjects, strict=True):
                load = Load("mqtt", "amqp", subject.mqtt_port, subject.amqp_port, seconds=seconds)
                runs.append(run(load, subject.cpu))
    rates = [median([one.rate for one in runs]) for runs in found]
    costs = [median([one.server_us for one in runs]) for runs in found]
    return [
        Figure(
            "J: scenario A with every message in the journal, against without",
            "messages/s",
            rates[0],
            rates[1],
            ratio=rates[0] / rates[1],
            target=TARGET,
            more={"CPU us/message": f"{costs[0]:.2f}", "without": f"{costs[1]:.2f}"},
        )
    ]

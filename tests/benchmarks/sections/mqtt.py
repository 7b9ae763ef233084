"""MQTT to MQTT through the embedded broker, against Mosquitto: the same load, turn and turn about."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, target
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import compared, load_at
from tests.benchmarks.subjects import Gateway, Mosquitto, Subject

TARGET: Final = target(3.0, 6.0)
SCENARIOS: Final = {
    "F1: QoS 1, 20 connections, window 100 -> one subscriber, QoS 1": Load("mqtt", "mqtt", 0, 0),
    "F0: QoS 0, 20 connections -> one subscriber, QoS 0": Load("mqtt", "mqtt", 0, 0, qos=0),
}


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """One figure per scenario: medians of `repeat` runs."""
    with ExitStack() as stack:
        subjects: list[Subject] = [
            stack.enter_context(Gateway(folder / "gateway")),
            stack.enter_context(Mosquitto(folder / "mosquitto")),
        ]
        figures = []
        for name, load in SCENARIOS.items():
            found: list[list[Measured]] = [[], []]
            for _ in range(repeat):
                for runs, subject in zip(found, subjects, strict=True):
                    runs.append(run(load_at(subject, replace(load, seconds=seconds)), subject.cpu))
            figures.append(compared(name, found[0], found[1], TARGET))
        return figures

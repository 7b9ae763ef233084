"""Through the embedded broker, against RabbitMQ with its MQTT plugin: the same load, turn and turn about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, target
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import compared
from tests.benchmarks.subjects import Gateway, Rabbit, Subject

TARGET: Final = 5.0
TARGETS: Final = {"A": (10.0, 20.0), "C": (5.0, 8.0)}  # interpreted, compiled
SCENARIOS: Final[dict[str, Callable[[int, int, float], Load]]] = {
    "A: MQTT QoS 1, 20 connections, window 100 -> AMQP, acks": (
        lambda mqtt, amqp, secs: Load("mqtt", "amqp", mqtt, amqp, seconds=secs)
    ),
    "A2: the same with ten topics of each connection, in turn": (
        lambda mqtt, amqp, secs: Load("mqtt", "amqp", mqtt, amqp, topics=10, seconds=secs)
    ),
    "B: MQTT QoS 0, 20 connections -> AMQP, no acks": (
        lambda mqtt, amqp, secs: Load("mqtt", "amqp", mqtt, amqp, qos=0, acknowledge=False, seconds=secs)
    ),
    "C: MQTT QoS 1, 1 000 connections, window 1 -> AMQP, acks": (
        lambda mqtt, amqp, secs: Load("mqtt", "amqp", mqtt, amqp, connections=1_000, window=1, seconds=secs)
    ),
    "E: AMQP confirms, 20 connections, window 100 -> MQTT QoS 1": (
        lambda mqtt, amqp, secs: Load("amqp", "mqtt", amqp, mqtt, seconds=secs)
    ),
}


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """One figure per scenario: medians of `repeat` runs."""
    figures = []
    with ExitStack() as stack:
        subjects: list[Subject] = [
            stack.enter_context(Gateway(folder / "gateway")),
            stack.enter_context(Rabbit(folder / "rabbitmq")),
        ]
        for name, load in SCENARIOS.items():
            found: dict[str, list[Measured]] = {subject.name: [] for subject in subjects}
            for _ in range(repeat):
                for subject in subjects:
                    ports = subject.mqtt_port, subject.amqp_port
                    found[subject.name].append(run(load(*ports, seconds), subject.cpu))
            figures.append(_figure(name, found[Gateway.name], found[Rabbit.name]))
    return figures


def _figure(name: str, ours: list[Measured], peer: list[Measured]) -> Figure:
    figure = compared(name, ours, peer, target(*TARGETS.get(name.partition(":")[0], (TARGET, TARGET))))
    runs = {
        "ours": " ".join(f"{one.rate / 1000:.1f}k" for one in ours),
        "theirs": " ".join(f"{one.rate / 1000:.1f}k" for one in peer),
    }
    return replace(figure, more=figure.more | runs)

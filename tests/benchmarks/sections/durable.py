"""MQTT QoS 1 into a durable queue: against RabbitMQ's persistent messages, and against what durability costs.

The load of scenario A of `embedded`, to a durable queue. Three servers take turns: the gateway with its
store, the gateway without (the queue is in memory, whatever was declared), and RabbitMQ.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import compared
from tests.benchmarks.subjects import Gateway, Rabbit, Subject

AGAINST_RABBIT: Final = 4.0
AGAINST_MEMORY: Final = 0.5


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Two figures: stored against RabbitMQ, and against the same load in memory."""
    with ExitStack() as stack:
        stored: Subject = stack.enter_context(
            Gateway(folder / "stored", store={"path": str(folder / "stored" / "data")})
        )
        memory: Subject = stack.enter_context(Gateway(folder / "memory"))
        rabbit: Subject = stack.enter_context(Rabbit(folder / "rabbitmq"))
        subjects = stored, memory, rabbit
        found: list[list[Measured]] = [[] for _ in subjects]
        for _ in range(repeat):
            for runs, subject in zip(found, subjects, strict=True):
                load = Load(
                    "mqtt", "amqp", subject.mqtt_port, subject.amqp_port, durable=True, seconds=seconds
                )
                runs.append(run(load, subject.cpu))
    name = "D: MQTT QoS 1, 20 connections, window 100 -> durable AMQP queue, acks"
    return [
        compared(name, found[0], found[2], AGAINST_RABBIT),
        compared("D against the same load in memory", found[0], found[1], AGAINST_MEMORY),
    ]

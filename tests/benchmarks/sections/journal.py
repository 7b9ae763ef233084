"""What the journal costs: all written down against none, where messages are alike and where they differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from tests.benchmarks.report import Figure
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import with_against_without
from tests.benchmarks.sections.varied import loads_that_differ

TARGET: Final = 0.9
TARGET_VARIED: Final = 0.85
A: Final = Load("mqtt", "amqp", 0, 0)
VARIED: Final = {
    "topics": "J: 100 000 topics at random, MQTT QoS 1 -> AMQP, likewise",
    "headers": "J: AMQP, four headers and one that differs, likewise",
    "properties": "J: MQTT 5, four user properties and one that differs, likewise",
    "crossing": "J: the same from MQTT 5 to AMQP, likewise",
}


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """With the journal against without."""
    rows: list[tuple[str, Load, float]] = [
        ("J: scenario A with every message in the journal, against without", A, TARGET),
        (
            "J2: scenario A2, with ten topics of each connection in turn, likewise",
            replace(A, topics=10),
            TARGET,
        ),
    ]
    rows += [(VARIED[name], load, TARGET_VARIED) for name, load in loads_that_differ().items()]
    return [
        with_against_without(
            name,
            folder / str(number),
            partial(_at, load),
            seconds,
            repeat,
            target,
            {
                "journal": {
                    "enabled": True,
                    "path": str(folder / str(number) / "journal"),
                    "retention_bytes": 1 << 30,
                }
            },
        )
        for number, (name, load, target) in enumerate(rows)
    ]


def _at(load: Load, mqtt: int, amqp: int, seconds: float) -> Load:
    ports = {"mqtt": mqtt, "amqp": amqp}
    return replace(load, publish_port=ports[load.publish], consume_port=ports[load.consume], seconds=seconds)

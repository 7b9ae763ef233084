"""Publishers that send whatever they are acknowledged: how long messages wait, and what that costs the rate.

Everywhere else a load keeps few messages ahead of its consumer. Here only the publishers' windows bound them,
and the server decides how far its consumers may stay behind.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import load_at
from tests.benchmarks.subjects import Gateway, Mosquitto, Rabbit, Subject

DELAY_MS: Final = 50.0
RATE: Final = 0.9  # of what there is when few messages are ahead
UNBOUNDED: Final = 1 << 40


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Two figures of each load: the median delay, and the rate beside that with few messages ahead."""
    with ExitStack() as stack:
        ours: Subject = stack.enter_context(Gateway(folder / "gateway"))
        mosquitto: Subject = stack.enter_context(Mosquitto(folder / "mosquitto"))
        rabbit: Subject = stack.enter_context(Rabbit(folder / "rabbitmq"))
        rows = (
            ("F1: MQTT QoS 1 -> MQTT QoS 1", Load("mqtt", "mqtt", 0, 0, seconds=seconds), mosquitto),
            ("E: AMQP confirms -> MQTT QoS 1", Load("amqp", "mqtt", 0, 0, seconds=seconds), rabbit),
        )
        return [figure for row in rows for figure in _figures(*row, ours, repeat)]


def _figures(name: str, load: Load, peer: Subject, ours: Subject, repeat: int) -> list[Figure]:
    unbounded = replace(load, ahead_max=UNBOUNDED)
    found: list[list[Measured]] = [[], [], []]
    for _ in range(repeat):
        for measured, (subject, what) in zip(
            found, ((ours, unbounded), (peer, unbounded), (ours, load)), strict=True
        ):
            measured.append(run(load_at(subject, what), subject.cpu))
    delays = [median([one.delay_ms for one in runs]) for runs in found]
    rates = [median([one.rate for one in runs]) for runs in found]
    costs = [median([one.server_us for one in runs]) for runs in found]
    more = {"peer": peer.name, "lost": f"{max(one.lost for one in found[0])}"}
    cost = {"CPU us/message": f"{costs[0]:.1f}", "few ahead": f"{costs[2]:.1f}"}
    return [
        Figure(f"{name}, delay", "ms", delays[0], delays[1], DELAY_MS / max(delays[0], 0.5), 1.0, more),
        Figure(f"{name}, beside few ahead", "msg/s", rates[0], rates[2], rates[0] / rates[2], RATE, cost),
        Figure(f"{name}, rate", "msg/s", rates[0], rates[1], rates[0] / rates[1], None, more),
    ]

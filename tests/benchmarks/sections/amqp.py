"""AMQP 0-9-1 at both ends of the embedded broker, against RabbitMQ: confirms in, acknowledgements out.

Transient messages pass a gateway without a store, persistent ones go to a durable queue of one with a store.
Then what many channels on one connection cost, and what it costs to copy each message to a thousand queues,
all of which one connection consumes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import compared
from tests.benchmarks.subjects import Gateway, Rabbit, Subject

AGAINST_RABBIT: Final = 4.0
AGAINST_ONE_CHANNEL: Final = 0.8
CHANNELS: Final = 500
QUEUES: Final = 1_000
Scenario = Callable[[int, float], Load]


def transient(port: int, seconds: float) -> Load:
    """Twenty publishers, one consumer."""
    return Load("amqp", "amqp", port, port, persistent=False, seconds=seconds)


def durable(port: int, seconds: float) -> Load:
    """The same, and everything is on the disk before it is confirmed."""
    return Load("amqp", "amqp", port, port, durable=True, seconds=seconds)


def one_connection(port: int, seconds: float, channels: int) -> Load:
    """One publisher; as many messages are unconfirmed, however many channels they are on."""
    return Load(
        "amqp",
        "amqp",
        port,
        port,
        connections=1,
        window=2 * CHANNELS,
        channels=channels,
        persistent=False,
        seconds=seconds,
    )


def fan_out(port: int, seconds: float) -> Load:
    """Each message arrives a thousand times, without acknowledgements."""
    return Load(
        "amqp",
        "amqp",
        port,
        port,
        connections=1,
        window=10,
        ahead_max=20,
        persistent=False,
        acknowledge=False,
        exchange="amq.fanout",
        fan_out=QUEUES,
        seconds=seconds,
    )


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Medians of `repeat` runs, each scenario turn and turn about."""
    with ExitStack() as stack:
        memory: Subject = stack.enter_context(Gateway(folder / "memory"))
        stored: Subject = stack.enter_context(
            Gateway(folder / "stored", store={"path": str(folder / "stored" / "data")})
        )
        rabbit: Subject = stack.enter_context(Rabbit(folder / "rabbitmq"))

        def compare(*rows: tuple[Subject, Scenario]) -> list[list[Measured]]:
            found: list[list[Measured]] = [[] for _ in rows]
            for _ in range(repeat):
                for runs, (subject, load) in zip(found, rows, strict=True):
                    runs.append(run(load(subject.amqp_port, seconds), subject.cpu))
            return found

        our_memory, their_memory = compare((memory, transient), (rabbit, transient))
        our_disk, their_disk = compare((stored, durable), (rabbit, durable))
        one, many, peers = compare(
            (memory, lambda port, secs: one_connection(port, secs, 1)),
            (memory, lambda port, secs: one_connection(port, secs, CHANNELS)),
            (rabbit, lambda port, secs: one_connection(port, secs, CHANNELS)),
        )
        our_fan, their_fan = compare((memory, fan_out), (rabbit, fan_out))
    return [
        compared(
            "confirms -> acks, 20 connections, window 100, transient",
            our_memory,
            their_memory,
            AGAINST_RABBIT,
        ),
        compared("the same, persistent, durable queue", our_disk, their_disk, AGAINST_RABBIT),
        compared(f"{CHANNELS} channels on one connection", many, peers, AGAINST_RABBIT),
        compared(f"{CHANNELS} channels against 1 (ours)", many, one, AGAINST_ONE_CHANNEL),
        compared(f"fan-out to {QUEUES} queues, deliveries", our_fan, their_fan, None),
    ]

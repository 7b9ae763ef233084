"""The figure of runs of a load here and at a peer, or with something and without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load
from tests.benchmarks.subjects import Gateway, Subject

PAIRS: Final = 3  # of runs with the same two processes
ROUNDS: Final = 2  # of processes, for each repetition that is asked for
LoadAt = Callable[[int, int, float], Load]
"""A load at the ports of MQTT and AMQP, for so many seconds."""


def load_at(subject: Subject, load: Load) -> Load:
    """The load, sent to a server."""
    ports = {"mqtt": subject.mqtt_port, "amqp": subject.amqp_port}
    return replace(load, publish_port=ports[load.publish], consume_port=ports[load.consume])


def compared(name: str, ours: list[Measured], peer: list[Measured], target: float | None) -> Figure:
    """Messages/s, medians of both; `target` is the least ratio."""
    rates = median([one.rate for one in ours]), median([one.rate for one in peer])
    return Figure(
        name,
        "messages/s",
        *rates,
        ratio=rates[0] / rates[1],
        target=target,
        more={
            "CPU us/message": f"{median([one.server_us for one in ours]):.1f}",
            "peer's": f"{median([one.server_us for one in peer]):.1f}",
            "load's core": f"{max(one.busiest for one in (*ours, *peer)):.0%}",
            "lost": sum(one.lost for one in (*ours, *peer)),
        },
    )


def with_against_without(
    name: str,
    folder: Path,
    load: LoadAt,
    seconds: float,
    repeat: int,
    target: float | None,
    configured: dict[str, Any],
    also: dict[str, Any] | None = None,
) -> Figure:
    """A gateway with `configured` against one without; both have `also`. Short runs follow each other in
    pairs, and the figure is the median of the pairs' ratios: the difference may be smaller than what a
    machine's speed changes by within a minute."""
    found: list[list[Measured]] = [[], []]
    for number in range(repeat * ROUNDS):
        with ExitStack() as stack:
            subjects = (
                stack.enter_context(Gateway(folder / f"{number}-with", **(also or {}), **configured)),
                stack.enter_context(Gateway(folder / f"{number}-without", **(also or {}))),
            )
            for at in range(PAIRS):
                pair = list(zip(found, subjects, strict=True))
                for runs, subject in reversed(pair) if at % 2 else pair:
                    runs.append(run(load(subject.mqtt_port, subject.amqp_port, seconds / 2), subject.cpu))
    ours, theirs = (median([one.rate for one in runs]) for runs in found)
    costs = [median([one.server_us for one in runs]) for runs in found]
    pairs = list(zip(*found, strict=True))
    return Figure(
        name,
        "messages/s",
        ours,
        theirs,
        ratio=median([one.rate / other.rate for one, other in pairs]),
        target=target,
        more={
            "CPU us/message": f"{costs[0]:.2f}",
            "without": f"{costs[1]:.2f}",
            "CPU ratio": f"{median([one.server_us / other.server_us for one, other in pairs]):.3f}",
        },
    )

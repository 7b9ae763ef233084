"""What permissions cost: scenarios A, C and E of `embedded` with a hundred rules, and without any.

Clients with the same roles share what has been decided by address. In the last scenario the rules name the
client, so that no two do. As with the journal, the difference is smaller than what a machine's speed changes
by within a minute: short runs with and without follow each other, and the figure is the median of all ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load
from tests.benchmarks.subjects import Gateway

TARGET: Final = 0.97
PAIRS: Final = 3  # of runs with the same two processes
ROUNDS: Final = 2  # of processes, for each repetition that is asked for
RULES: Final = 100

EACH: Final = "R-C2: scenario C with rules that name each client"
TARGET_EACH: Final = 0.9
SCENARIOS: Final[dict[str, Callable[[int, int, float], Load]]] = {
    "R-A: scenario A with 100 rules, against without": (
        lambda mqtt, amqp, secs: Load("mqtt", "amqp", mqtt, amqp, seconds=secs)
    ),
    "R-C: scenario C, likewise": (
        lambda mqtt, amqp, secs: Load("mqtt", "amqp", mqtt, amqp, connections=1_000, window=1, seconds=secs)
    ),
    EACH: (
        lambda mqtt, amqp, secs: Load("mqtt", "amqp", mqtt, amqp, connections=1_000, window=1, seconds=secs)
    ),
    "R-E: scenario E, likewise": (lambda mqtt, amqp, secs: Load("amqp", "mqtt", amqp, mqtt, seconds=secs)),
}


def hundred_rules(last: str) -> dict[str, Any]:
    """Roles for clients without a name, and for guest; those that allow stand behind all others."""
    one, other = ([f"{word}/{number}/+/{last}/#" for number in range(RULES // 2 - 1)] for word in ("a", "b"))
    device = {"mqtt": {"publish": [*one, "#"], "subscribe": [*other, "#"]}}
    program = {"amqp091": {"/": {"configure": ".*", "write": "^x|^amq\\.|.*", "read": ".*"}}}
    return {
        "roles": {"device": device, "program": program},
        "default_roles": {"anonymous": ["device"], "guest": ["program", "device"]},
    }


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """With rules against without."""
    figures = []
    for at, (name, load) in enumerate(SCENARIOS.items()):
        found: list[list[Measured]] = [[], []]
        for number in range(repeat * ROUNDS):
            rules = hundred_rules("{client_id}" if name is EACH else "x")
            _compare(folder / f"{at}-{number}", load, seconds / 2, found, rules)
        ours, theirs = (median([one.rate for one in runs]) for runs in found)
        costs = [median([one.server_us for one in runs]) for runs in found]
        figures.append(
            Figure(
                name,
                "messages/s",
                ours,
                theirs,
                ratio=median([one.rate / other.rate for one, other in zip(*found, strict=True)]),
                target=TARGET_EACH if name is EACH else TARGET,
                more={"CPU us/message": f"{costs[0]:.2f}", "without": f"{costs[1]:.2f}"},
            )
        )
    return figures


def _compare(
    folder: Path,
    load: Callable[[int, int, float], Load],
    seconds: float,
    found: list[list[Measured]],
    rules: dict[str, Any],
) -> None:
    """A few pairs of runs, with rules and without, with processes of their own."""
    with ExitStack() as stack:
        subjects = (
            stack.enter_context(Gateway(folder / "with", **rules)),
            stack.enter_context(Gateway(folder / "without")),
        )
        for number in range(PAIRS):
            pair = list(zip(found, subjects, strict=True))
            for runs, subject in reversed(pair) if number % 2 else pair:
                runs.append(run(load(subject.mqtt_port, subject.amqp_port, seconds), subject.cpu))

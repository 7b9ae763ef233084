"""What permissions cost: scenarios A, C and E of `embedded` with a hundred rules, and without any.

Clients with the same roles share what has been decided by address. In the last scenario the rules name the
client, so that no two do. As with the journal, the difference is smaller than what a machine's speed changes
by within a minute: short runs with and without follow each other, and the figure is the median of all ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.report import Figure
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import with_against_without

TARGET: Final = 0.97
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
    return [
        with_against_without(
            name,
            folder / str(at),
            load,
            seconds,
            repeat,
            TARGET_EACH if name is EACH else TARGET,
            hundred_rules("{client_id}" if name is EACH else "x"),
        )
        for at, (name, load) in enumerate(SCENARIOS.items())
    ]

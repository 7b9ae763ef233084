"""The normative statements of MQTT that bind a server: where each comes from, and which test is about it.

The texts beside this file hold the last number of each section (or first and last), the clauses that bind a
client alone, and a row for all others: `clauses | what they ask for | test`, the name of a test function, or
`-` and the reason why there is none. `3.4.2-2..3` are two clauses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).resolve().parent
TESTS: Final = HERE.parent
VERSIONS: Final = {"5.0": "mqtt5.txt", "3.1.1": "mqtt311.txt"}


class Row(NamedTuple):
    """Clauses that are met in the same way. `test` or `reason` is empty."""

    clauses: tuple[str, ...]
    asks: str
    test: str
    reason: str

    @property
    def name(self) -> str:
        """The clauses as the specification writes them."""
        first, last = self.clauses[0], self.clauses[-1]
        return f"[MQTT-{first}]" if first == last else f"[MQTT-{first}] to [MQTT-{last}]"


class Table(NamedTuple):
    """One version's clauses."""

    every: tuple[str, ...]
    clients: tuple[str, ...]
    rows: tuple[Row, ...]


def _clauses(text: str) -> Iterator[str]:
    for word in text.split():
        section, _, numbers = word.partition("-")
        first, _, last = numbers.partition("..")
        for number in range(int(first), int(last or first) + 1):
            yield f"{section}-{number}"


def _row(line: str) -> Row:
    clauses, asks, met = (part.strip() for part in line.split(" | "))
    reason = met[1:].strip() if met.startswith("-") else ""
    return Row(tuple(_clauses(clauses)), asks, "" if reason else met, reason)


def read(version: str) -> Table:
    """The table of a version."""
    _, counts, clients, rows = re.split(r"^\[.*\]\n", (HERE / VERSIONS[version]).read_text(), flags=re.M)
    every = " ".join(word if ".." in word else word.replace("-", "-1..") for word in counts.split())
    found = [_row(line) for line in rows.splitlines() if line]
    return Table(tuple(_clauses(every)), tuple(_clauses(clients)), tuple(found))


def functions() -> dict[str, str]:
    """The file of every test function, by its name."""
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), flags=re.M):
            found.setdefault(name, str(path.relative_to(TESTS)))
    return found

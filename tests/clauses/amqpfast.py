"""What AMQP/Fast (AMQ RFC 006) asks for, section by section, and which test is about it.

The text beside this file has the sections that bind somebody; the flow summaries, a row for the commands that
one side treats alike (`section side | commands | what it does | file and test`); the errors (`code scope |
when | file and test`); and a row for everything else that the sections ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.protocols.amqpfast.commands import COMMANDS
from tests.clauses.mqtt import HERE, TESTS

NAME: Final = "amqpfast.txt"
SOCKET: Final = "the end of the socket"
FLOWS: Final = {"CONNECTION": "3.2.10", "CHANNEL": "3.3.9", "HANDLE": "3.5.17"}


class Row(NamedTuple):
    """`clause` as the table shows it; `commands` of a flow summary; `file` is relative to the tests."""

    clause: str
    commands: tuple[str, ...]
    asks: str
    file: str
    test: str


class Table(NamedTuple):
    """The parts of the text."""

    sections: tuple[str, ...]
    flow: tuple[Row, ...]
    errors: tuple[Row, ...]
    rows: tuple[Row, ...]


def _row(line: str) -> Row:
    clause, *middle, met = (part.strip() for part in line.split(" | "))
    file, _, test = met.partition(" ")
    commands = tuple(middle[0].split(", ")) if len(middle) > 1 else ()
    return Row(clause, commands, middle[-1], file, test)


def read() -> Table:
    """The table."""
    _, sections, *parts = re.split(r"^\[.*\]\n", (HERE / NAME).read_text(), flags=re.M)
    flow, errors, rows = (tuple(map(_row, part.splitlines())) for part in parts)
    return Table(tuple(sections.split()), flow, errors, rows)


def every_flow() -> Iterator[tuple[str, str]]:
    """The lines of the flow summaries: (section and side, command)."""
    for side in ("client", "server"):
        for kind in COMMANDS.values():
            name = kind.name.upper().replace(".", " ")
            yield f"{FLOWS[name.split()[0]]} {side}", name
        yield f"{FLOWS['CONNECTION']} {side}", SOCKET


def is_there(row: Row) -> bool:
    """Whether the test of a row exists."""
    path = TESTS / row.file
    return path.is_file() and re.search(rf"^(async )?def {row.test}\(", path.read_text(), re.M) is not None


def lines() -> Iterator[str]:
    """The table of the page, line by line."""
    table = read()
    yield "| section | asks for | test |"
    yield "|---|---|---|"
    for row in (*table.rows, *table.flow, *table.errors):
        what = f"{', '.join(row.commands)}: {row.asks}" if row.commands else row.asks
        yield f"| {row.clause} | {what} | `{row.file}::{row.test}` |"

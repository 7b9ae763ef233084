"""`python -m tests.clauses`: the README's tables of what MQTT and AMQP/Fast ask for, and how each is met."""

from __future__ import annotations

from collections.abc import Iterator

from tests.clauses import amqpfast
from tests.clauses.mqtt import VERSIONS, functions, read


def lines() -> Iterator[str]:
    """The tables, line by line."""
    files = functions()
    for version in VERSIONS:
        table = read(version)
        rows = table.rows
        bound = sum(len(row.clauses) for row in rows)
        without = sum(len(row.clauses) for row in rows if row.reason)
        yield f"MQTT {version}: {len(table.every)} statements, {bound} bind a server, {without} have no test."
        yield ""
        yield "| statement | asks for | test |"
        yield "|---|---|---|"
        for row in rows:
            met = f"none: {row.reason}" if row.reason else f"`{files[row.test]}` `{row.test}`"
            yield f"| {row.name} | {row.asks} | {met} |"
        yield ""


if __name__ == "__main__":
    print("\n".join([*lines(), *amqpfast.lines()]))

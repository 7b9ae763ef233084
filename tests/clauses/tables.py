"""The tables of what MQTT and AMQP/Fast ask for, and how each is met, as docs/conformance has them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.clauses import amqpfast
from tests.clauses.mqtt import functions, read


def lines(name: str) -> Iterator[str]:
    """The table of `amqpfast`, or of a version of MQTT, line by line."""
    if name == "amqpfast":
        yield from amqpfast.lines()
        return
    files = functions()
    table = read(name)
    bound = sum(len(row.clauses) for row in table.rows)
    without = sum(len(row.clauses) for row in table.rows if row.reason)
    yield f"MQTT {name}: {len(table.every)} statements, {bound} bind a server, {without} have no test."
    yield ""
    yield "| statement | requirement | test |"
    yield "|---|---|---|"
    for row in table.rows:
        met = f"none: {row.reason}" if row.reason else f"`{files[row.test]}::{row.test}`"
        yield f"| {row.name} | {row.asks} | {met} |"

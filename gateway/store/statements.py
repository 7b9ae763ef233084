"""SQLite transactions, and statements for many rows at a time.

Every step of a statement releases the interpreter lock, and a busy event loop may take milliseconds to return
it. One statement for many rows is therefore faster than many fast statements.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Final

ROWS_MAX: Final = 64  # the connection caches that many statements


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction: commit at its end, or roll back if it raises.

    Raises sqlite3.Error if the transaction cannot be written.
    """
    if connection.in_transaction:
        connection.rollback()  # a transaction that failed before
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.commit()
    except BaseException:
        if connection.in_transaction:  # SQLite rolls back itself after some errors
            connection.rollback()
        raise


def insert(connection: sqlite3.Connection, table: str, columns: int, rows: Sequence[Sequence[Any]]) -> None:
    """Insert `rows` into `table`, replacing rows with the same key. Each row has `columns` values."""
    one = f"({','.join('?' * columns)})"
    for at in range(0, len(rows), ROWS_MAX):
        some = rows[at : at + ROWS_MAX]
        connection.execute(
            f"INSERT OR REPLACE INTO {table} VALUES {','.join([one] * len(some))}",
            tuple(chain.from_iterable(some)),
        )


def delete(
    connection: sqlite3.Connection,
    table: str,
    column: str,
    keys: Iterable[int | str | bytes],
    *,
    kind: str | None = None,
) -> None:
    """Delete the rows of `table` whose column `column` is one of `keys`.

    With `kind`, only rows whose column `kind` has this value are deleted.
    """
    rest = iter(keys)
    only = "" if kind is None else "kind = ? AND "
    before = () if kind is None else (kind,)
    while some := tuple(islice(rest, ROWS_MAX)):
        condition = f"{only}{column} IN ({','.join('?' * len(some))})"
        connection.execute(f"DELETE FROM {table} WHERE {condition}", before + some)

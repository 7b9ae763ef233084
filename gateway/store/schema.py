"""Tables of the database, and the migration of an older database to the newest layout.

`user_version` is the number of the layout. The first of STEPS writes the layout BASE, that of release 0.1.0,
and each further one changes the layout before it to the next. A database with a higher number was written by
a newer gateway, one with a lower number by an unreleased one; both are refused. A step runs in a transaction
together with its number.

A row of `rows` is a run of messages of one log, encoded together (messages.py). Its settled bits are in a
separate table, because SQLite would otherwise write the messages again, up to 1 MiB for each acknowledgement.
The place of a large row's messages, which are not in the database, is in a third table (heap.py). There is no
index beside the row ids, since the gateway has one in memory: all rows are read once, without their messages,
at the start.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

from gateway.errors import StoreError
from gateway.store.statements import transaction

APPLICATION_ID: Final = 0x47574159  # "GWAY", so that another program's database is not mistaken for ours

BASE: Final = 3
"""Layout that the first step writes. No release wrote an older one, so no step leads from one."""

Step = Callable[[sqlite3.Connection], None]


def _base(connection: sqlite3.Connection) -> None:
    """Create the tables of the oldest supported layout, which has the number BASE."""
    for statement in (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
        "CREATE TABLE logs (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL)",
        # `octets` is their weight in bytes, `tag` is the owner's. The messages are the last column, so that
        # the other columns can be read without them.
        "CREATE TABLE rows (id INTEGER PRIMARY KEY, log INTEGER NOT NULL, first INTEGER NOT NULL,"
        " count INTEGER NOT NULL, octets INTEGER NOT NULL, tag BLOB NOT NULL, messages BLOB NOT NULL)",
        # Bit k % 8 of byte k // 8 is set: the message at `first` + k is settled.
        "CREATE TABLE settled (row INTEGER PRIMARY KEY, bits BLOB NOT NULL)",
        # Large rows are in a file of their own (heap.py), and have no bytes in `rows`.
        "CREATE TABLE places (row INTEGER PRIMARY KEY, at INTEGER NOT NULL, octets INTEGER NOT NULL)",
        # `message` is 1 if the value is an encoded message.
        "CREATE TABLE things (kind TEXT NOT NULL, key NOT NULL, message INTEGER NOT NULL,"
        " value BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
        "CREATE TABLE dead_letters (id INTEGER PRIMARY KEY, octets INTEGER NOT NULL, utc REAL NOT NULL,"
        " route TEXT NOT NULL, verdict INTEGER NOT NULL, reason TEXT NOT NULL, text TEXT NOT NULL,"
        " message BLOB NOT NULL, user TEXT NOT NULL DEFAULT '')",
        "INSERT INTO meta VALUES ('clean', 1)",
        f"PRAGMA application_id = {APPLICATION_ID}",
    ):
        connection.execute(statement)


def storable_name(user: str) -> str:
    """Return the user name with characters replaced that the database cannot store (lone surrogates)."""
    return user.encode(errors="replace").decode()


STEPS: Final[tuple[Step, ...]] = (_base,)


def newest_layout(steps: Sequence[Step] = STEPS) -> int:
    """Return the number of the database layout that all of these migration steps lead to."""
    return BASE + len(steps) - 1


def refuse_others(connection: sqlite3.Connection, steps: Sequence[Step] = STEPS) -> int:
    """Return the layout number of a database, or 0 if it is empty.

    Raises StoreError if the database was written by another program, by a newer gateway, or by one before
    release 0.1.0.
    """
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and application != APPLICATION_ID:
        raise StoreError("it belongs to another program; set store.path to another folder")
    newest = newest_layout(steps)
    if version > newest:
        raise StoreError(
            f"it was written by a newer gateway: its schema is version {version}, but this"
            f" gateway knows only {newest}; start the newer gateway, or set store.path to another"
            " folder"
        )
    if tables and version < BASE:
        raise StoreError(
            f"its schema {version} is older than that of release 0.1.0, {BASE}: empty its queues"
            " with the gateway that wrote it, then set store.path to another folder"
        )
    return version


def migrate(connection: sqlite3.Connection, version: int, steps: Sequence[Step] = STEPS) -> None:
    """Migrate a database of the layout `version` (0: empty) to the newest one. Raises sqlite3.Error."""
    step_count = version - BASE + 1 if version else 0
    for number, step in enumerate(steps[step_count:], start=BASE + step_count):
        with transaction(connection):
            step(connection)
            connection.execute(f"PRAGMA user_version = {number}")

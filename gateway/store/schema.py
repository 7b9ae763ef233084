"""The tables of the database, and how an older database becomes a newer one.

`user_version` is the number of STEPS that have been taken; a database with more than this gateway knows was
written by a newer one and is refused. A step runs in a transaction together with its count.

A row of `rows` is a run of messages of one log, encoded as one (messages.py). What of it is settled stands in
a table of its own: a changed column would make SQLite write the messages again, up to a mebibyte for each
acknowledgement. Where the messages of a large row stand, which are not in the database, is in another one
(heap.py). There is no index beside the row ids, for the gateway holds one in memory: all rows are read
once, without their messages, at the start.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

from gateway.errors import StoreError
from gateway.store.statements import transaction

APPLICATION_ID: Final = 0x47574159  # "GWAY", so that no other program's database is taken for ours

Step = Callable[[sqlite3.Connection], None]


def _first(connection: sqlite3.Connection) -> None:
    """Version 1."""
    for statement in (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
        "CREATE TABLE logs (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL)",
        # `octets` is what they weigh, `tag` is the owner's. The messages stand last, so that what precedes
        # them is read alone.
        "CREATE TABLE rows (id INTEGER PRIMARY KEY, log INTEGER NOT NULL, first INTEGER NOT NULL,"
        " count INTEGER NOT NULL, octets INTEGER NOT NULL, tag BLOB NOT NULL, messages BLOB NOT NULL)",
        # Bit k of octet k // 8, from the lowest, is set: the message at `first` + k is settled.
        "CREATE TABLE settled (row INTEGER PRIMARY KEY, bits BLOB NOT NULL)",
        # `message`: 1 when the value is an encoded message.
        "CREATE TABLE things (kind TEXT NOT NULL, key NOT NULL, message INTEGER NOT NULL,"
        " value BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
        "CREATE TABLE dead_letters (id INTEGER PRIMARY KEY, octets INTEGER NOT NULL, utc REAL NOT NULL,"
        " route TEXT NOT NULL, verdict INTEGER NOT NULL, reason TEXT NOT NULL, text TEXT NOT NULL,"
        " message BLOB NOT NULL)",
        "INSERT INTO meta VALUES ('clean', 1)",
        f"PRAGMA application_id = {APPLICATION_ID}",
    ):
        connection.execute(statement)


def _places(connection: sqlite3.Connection) -> None:
    """Version 2: large rows stand in a file of their own (heap.py), and have no octets in `rows`."""
    connection.execute(
        "CREATE TABLE places (row INTEGER PRIMARY KEY, at INTEGER NOT NULL, octets INTEGER NOT NULL)"
    )


STEPS: Final[tuple[Step, ...]] = (_first, _places)


def refuse_others(connection: sqlite3.Connection, steps: Sequence[Step] = STEPS) -> int:
    """How many steps were taken. Raises StoreError for a database of a newer gateway or another program."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and application != APPLICATION_ID:
        raise StoreError("it belongs to another program; name another folder in store.path")
    if version > len(steps):
        raise StoreError(
            f"it was written by a newer gateway: its schema is {version}, this gateway knows {len(steps)}; "
            "start the newer gateway, or name another folder in store.path"
        )
    return version


def migrate(connection: sqlite3.Connection, version: int, steps: Sequence[Step] = STEPS) -> None:
    """Take the steps that follow the first `version` ones. Raises sqlite3.Error."""
    for number, step in enumerate(steps[version:], start=version + 1):
        with transaction(connection):
            step(connection)
            connection.execute(f"PRAGMA user_version = {number}")

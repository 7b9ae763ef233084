"""Shared state of a single process in a SQLite database, with one lane."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway import clock as clocks
from gateway.errors import StoreError
from gateway.state.database import (
    SIZED,
    Database,
    LostError,
    OperationStatement,
    PendingNotice,
    RefusedError,
    Rows,
    demand_of,
    levels_of,
)
from gateway.state.interface import MatchRetained, Notice
from gateway.state.lanes import LanedStore
from gateway.state.schema import VERSIONS, Migrations, load_migrations, missing_steps

APPLICATION_ID: Final = 0x47575354  # "GWST", so that another program's database is not mistaken for this one
LANE: Final = "embedded"
BUSY_SECS: Final = 5.0
MATCH: Final = (
    "SELECT topic, message, expires_at - state_now() AS expires_in, login FROM retained"
    " WHERE topic > ? AND topic >= ? AND (? = '' OR topic < ? || '0')"
    " AND length(message) > 0 AND (expires_at IS NULL OR expires_at > state_now())"
    " AND NOT (? AND topic LIKE '$%') AND state_matches(topic, ?)"
    " ORDER BY topic LIMIT ?"
)
NEXT_GROUP: Final = "UPDATE lane SET number = ?, seen = state_now() WHERE id = ? AND number = ? - 1"


class SQLiteDatabase(Database):
    """Connection to a SQLite file, used by the only thread of the store."""

    def __init__(self, path: Path, clock: Callable[[], float], on_notice: Callable[[Notice], None]) -> None:
        self._path = path
        self._clock = clock
        self._on_notice = on_notice
        self._connection: sqlite3.Connection | None = None

    def connect(self) -> int:
        """Close and reopen the file. Return the number of the last group of operations that was committed."""
        self.close()
        try:
            self._connection = connection = _open(self._path, self._clock)
            connection.execute("INSERT OR IGNORE INTO lane VALUES (?, 0, state_now())", (LANE,))
            (number,) = connection.execute("SELECT number FROM lane WHERE id = ?", (LANE,)).fetchone()
        except sqlite3.Error as error:
            raise LostError(f"the state cannot be opened: {error}") from error
        return int(number)

    @property
    def _open(self) -> sqlite3.Connection:
        """Return the open connection to the database. Raises LostError if it is closed."""
        if self._connection is None:
            raise LostError("the state is closed")
        return self._connection

    def begin(self, number: int) -> None:
        """Begin the transaction for the group of operations with this number.

        Raises LostError also if another process has changed the file.
        """
        try:
            self._open.execute("BEGIN IMMEDIATE")
            if not self._open.execute(NEXT_GROUP, (number, LANE, number)).rowcount:
                raise LostError("another process uses this state database")
        except sqlite3.Error as error:
            raise LostError(str(error)) from error

    def run(self, calls: Sequence[OperationStatement]) -> list[Rows]:
        """Run the statements in order and return the result rows of each."""
        try:
            return [self._call(call) for call in calls]
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError | sqlite3.ProgrammingError):
                raise RefusedError(str(error)) from error
            raise LostError(str(error)) from error
        except (sqlite3.InterfaceError, UnicodeError, OverflowError) as error:
            raise RefusedError(str(error)) from error

    def _call(self, call: OperationStatement) -> Rows:
        """Run a statement once for each of its rows, and return the result rows.

        A statement that writes with rows returns no result rows.
        """
        names = [part.partition(" ")[0] for part in call.columns.split(", ")]
        marks = ", ".join("?" * len(names))
        relation = f"WITH op ({', '.join(names)}) AS (VALUES ({marks}))"
        sql = call.sql.replace("{op}", relation).replace("{lock}", "").replace("{skip}", "")
        if not call.columns:
            return self._open.execute(sql).fetchall()
        if call.sql.startswith("{op} SELECT"):
            return [row for values in call.rows for row in self._open.execute(sql, values)]
        self._open.executemany(sql, call.rows)
        return []

    def commit(self) -> None:
        """Commit the transaction that `begin` began."""
        try:
            self._open.commit()
        except sqlite3.Error as error:
            raise LostError(str(error)) from error

    def rollback(self) -> None:
        """Roll back the open transaction."""
        try:
            self._open.rollback()
        except sqlite3.Error as error:
            raise LostError(str(error)) from error

    def match(self, query: MatchRetained) -> Rows:
        """Return the page of retained messages that `query` describes, as rows.

        A row has topic, message, expiry (in seconds from now) and user.
        """
        demand = demand_of(query.topic_filter)
        levels = json.dumps([demand.levels, demand.least])
        try:
            prefix = demand.prefix
            parameters = (query.after, prefix, prefix, prefix, demand.not_system, levels, query.limit)
            return self._open.execute(SIZED.format(query.byte_count).format(MATCH), parameters).fetchall()
        except sqlite3.Error as error:
            raise LostError(str(error)) from error

    def notify(self, notices: Sequence[PendingNotice]) -> None:
        """Pass notices to the callback, because all replicas of this database run in this process."""
        for noted in notices:
            self._on_notice(Notice(noted.event, noted.key))

    def interrupt(self) -> None:
        """Interrupt the thread's pending call, if there is one. Called by other threads."""
        connection = self._connection
        if connection is not None:
            with suppress(sqlite3.Error):  # it was closed meanwhile
                connection.interrupt()

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _matches(topic: str, demand: str) -> bool:
    levels, least = json.loads(demand)
    return topic.count("/") + 1 >= least and set(levels) <= set(levels_of(topic))


def _open(path: Path, clock: Callable[[], float]) -> sqlite3.Connection:
    """Open the database and define the SQL functions that the schema uses. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, timeout=BUSY_SECS, isolation_level=None, check_same_thread=False)
    try:
        connection.create_function("state_now", 0, clock)
        connection.create_function("state_matches", 2, _matches, deterministic=True)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, migrations: Migrations) -> None:
    """Create the schema or migrate it to the latest version.

    Raises sqlite3.Error, and StoreError if the database is of a newer gateway or of another program.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise StoreError("the file belongs to another program")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        create, select = VERSIONS
        connection.execute(create)
        applied = connection.execute(select).fetchall()
        for step in missing_steps(applied, migrations, postgresql=False):
            for statement in step.statements:
                connection.execute(statement)
            connection.execute("INSERT INTO schema_version VALUES (?, ?)", (step.version, step.works_with))
        connection.commit()
    except BaseException:
        connection.rollback()
        raise


class SQLiteState(LanedStore):
    """Store for the shared state in a SQLite file, with one thread for all operations.

    Raises StoreError if the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] | None = None,
        patience_secs: float = 5.0,
        migrations: Migrations | None = None,
    ) -> None:
        """Open the file and migrate its schema. `clock` returns the database's time in UTC seconds."""
        clock = clock or clocks.unix_time
        try:
            connection = _open(path, clock)
            try:
                _migrate(connection, load_migrations() if migrations is None else migrations)
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error}") from error
        super().__init__([SQLiteDatabase(path, clock, self.notice)], patience_secs)

"""Shared state of replicas in PostgreSQL, used by psycopg in threads.

Each lane has a connection of its own. A group takes a round trip for each kind of its operations, one for the
time, one to write, and one to commit; statements in between are pipelined. Query plans use indexes only,
because the planner does not know how few rows a group has.

The loss of a server is detected by TCP, and the server ends a statement that takes too long. A frozen server
does neither, so a connection can be ended by another thread: `DatabaseSocket`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

import psycopg
from psycopg import sql as composed
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gateway.errors import ConfigurationError, StoreError
from gateway.state.database import (
    SIZED,
    AbortedError,
    Database,
    LostError,
    OperationStatement,
    PendingNotice,
    RefusedError,
    Rows,
    demand_of,
)
from gateway.state.interface import MatchRetained, Notice, NoticeSubject, SessionKey
from gateway.state.lanes import LanedStore
from gateway.state.schema import VERSIONS, Migrations, load_migrations, missing_steps

LANES: Final = 4
READERS: Final = 3  # two for queries that clients wait for, and one for reports
VERSION_MIN: Final = 150_000  # version of the server
CONNECT_SECS: Final = 5
STATEMENT_MS: Final = 10_000  # after which the server ends a statement
LOCK_MS: Final = 4_000  # after which it stops waiting for a row that another group has locked
BLOCKING_MS: Final = 1_000  # after which a group that others wait for is ended
MIGRATE_LOCK: Final = 0x67777374
PROBE_MIN: Final = 5_000  # matching topics up to which the index on levels is faster
NOTICE_BYTES_MAX: Final = 7_000  # of a key in a notice: PostgreSQL allows 8 000
NOTICE_SECS: Final = 0.5  # until the listener checks if it is to end
NAME_BYTES_MAX: Final = 63
# Prefixes of SQLSTATE. The server or a resource is unavailable: connection, read-only after a failover,
# resources, operator, system.
AWAY: Final = ("08", "25", "53", "57P", "58")
# Aborted in favour of another transaction, or by a timeout of a lock or a statement.
ABORTED: Final = ("40", "55P03", "57014")

OPTIONS: Final = (
    "SET enable_seqscan = off",
    "SET enable_hashjoin = off",
    "SET enable_mergejoin = off",
    # A plan with what is off looks so expensive that PostgreSQL would compile it each time, in 0.2 s.
    "SET jit = off",
    f"SET statement_timeout = {STATEMENT_MS}",
    f"SET lock_timeout = {LOCK_MS}",
    f"SET idle_in_transaction_session_timeout = {STATEMENT_MS}",
    # The server detects the loss of this machine and releases its locks.
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
)
# An earlier connection of this lane is ended before the number is read.
END_EARLIER: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE pid <> pg_backend_pid() AND usename = current_user AND application_name = $1"
)
# A group takes milliseconds. One that blocks this process for longer belongs to a process that is frozen or
# cut off within a pipeline, where no timeout of the server applies. If that process is only slow, its group
# is tried again. A group that itself waits for a lock or a standby is spared.
END_BLOCKING: Final = (
    "SELECT pg_terminate_backend(holder.pid) FROM pg_stat_activity AS waiting,"
    " unnest(pg_blocking_pids(waiting.pid)) AS blocking JOIN pg_stat_activity AS holder"
    " ON holder.pid = blocking"
    " WHERE waiting.usename = current_user AND starts_with(waiting.application_name, $1)"
    " AND waiting.wait_event_type = 'Lock'"
    " AND holder.usename = current_user AND split_part(holder.application_name, ' ', 1) = $2"
    " AND split_part(holder.application_name, ' ', 3) <> ''"
    " AND holder.wait_event_type IS DISTINCT FROM 'Lock' AND holder.wait_event IS DISTINCT FROM 'SyncRep'"
    f" AND holder.xact_start < clock_timestamp() - interval '{BLOCKING_MS} milliseconds'"
)
JOIN_LANE: Final = (
    "INSERT INTO lane (id, number, seen) VALUES ($1, 0, state_now())"
    " ON CONFLICT (id) DO UPDATE SET seen = excluded.seen RETURNING number"
)
NEXT_GROUP: Final = (
    "UPDATE lane SET number = $1, seen = state_now() WHERE id = $2 AND number = $1 - 1 RETURNING id"
)
COLUMNS: Final = "SELECT t.topic, message, expires_at - state_now() AS expires_in, login FROM "
SELECTED: Final = COLUMNS + "retained AS t WHERE topic > $1"
COUNTED: Final = "SELECT count(*) FROM (SELECT FROM retained WHERE topic > $1{} LIMIT {}) AS few"
# Found by the index on levels, then sorted, then read: the planner cannot choose another order.
FEW: Final = (
    "WITH few AS MATERIALIZED (SELECT topic FROM retained WHERE topic > $1{})"
    f" {COLUMNS}(SELECT topic FROM few ORDER BY topic LIMIT {{}}) AS one JOIN retained AS t USING (topic)"
)
UNEXPIRED: Final = " AND message <> '' AND (expires_at IS NULL OR expires_at > state_now())"
NOT_SYSTEM: Final = " AND topic NOT LIKE '$%'"
EXACT: Final = " AND topic = $2"
BELOW: Final = " AND topic >= $2 AND topic < $2 || '0'"
ONLY_BELOW: Final = " AND left(topic, length($2) + 1) IN ($2, $2 || '/')"
LEVELS: Final = " AND state_levels(topic) @> ${}::text[]"
LEAST: Final = " AND cardinality(string_to_array(topic, '/')) >= {}"


class DatabaseSocket:
    """Socket of a thread's database connection, through which another thread can end the connection.

    The thread that waits for the database then gets a connection error.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def follow(self, connection: Connection) -> None:
        """Use the socket of this connection from now on.

        The descriptor is duplicated, because libpq may close its own at any time.
        """
        copy = socket.socket(fileno=os.dup(connection.fileno()))
        with self._lock:
            before, self._socket = self._socket, copy
        if before is not None:
            before.close()

    def end(self) -> None:
        """End the present connection, if there is one; called by other threads."""
        with self._lock, suppress(OSError):  # it has ended by itself
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicated descriptor, after the connection was closed."""
        with self._lock:
            before, self._socket = self._socket, None
        if before is not None:
            before.close()


class PostgreSQLDatabase(Database):
    """Connection to PostgreSQL of one thread that commits operations or runs queries (a lane).

    `lane` is the thread's name: the application name in PostgreSQL, under which the number of its last
    committed group of operations is stored.
    """

    def __init__(self, server: Server, lane: str) -> None:
        self._server = server
        self._lane = lane
        self._wire = DatabaseSocket()
        self._connection: Connection | None = None
        self._number = 0
        self._is_begun = True  # or the next statement begins the transaction

    @property
    def _open(self) -> Connection:
        """Connection in use. Raises LostError if there is none."""
        if self._connection is None:
            raise LostError("no connection to PostgreSQL")
        return self._connection

    def connect(self) -> int:
        """Connect or reconnect. Return the number of the last group of operations that was committed.

        Only groups of this lane count. Transactions that an earlier connection of the lane has left open are
        ended.
        """
        self.close()
        self._server.prepare(self._wire)
        with _translated(None):
            self._connection = connection = self._server.connect(self._lane, self._wire)
            for option in OPTIONS:
                connection.execute(option)
            connection.execute(END_EARLIER, (self._lane,))
            row = connection.execute(JOIN_LANE, (self._lane,)).fetchone()
        assert row is not None
        self._is_begun = True
        return int(row[0])

    def begin(self, number: int) -> None:
        """Record `number` as the number of the next group of operations.

        The first call of `run` begins the group's transaction.
        """
        self._number = number
        self._is_begun = False

    def run(self, calls: Sequence[OperationStatement]) -> list[Rows]:
        """Run the statements in one round trip, and return the result rows of each.

        Raises LostError also if another connection uses the same lane name.
        """
        connection = self._open
        with _translated(connection):
            with connection.pipeline():
                number = self._begin(connection)
                cursors = [_execute(connection, call) for call in calls]
            if number is not None and not number.rowcount:
                raise LostError("another connection uses this lane")
            return [[] if cursor.description is None else cursor.fetchall() for cursor in cursors]

    def _begin(self, connection: Connection) -> Cursor | None:
        """Queue the statements that begin the transaction and store the group's number in it.

        Return the cursor of the latter, or None if the transaction has already begun.
        """
        if self._is_begun:
            return None
        self._is_begun = True
        connection.execute("BEGIN")
        return connection.execute(NEXT_GROUP, (str(self._number), self._lane), prepare=True)

    def commit(self) -> None:
        """Commit the transaction that `run` began."""
        with _translated(None):
            self._open.execute("COMMIT")

    def rollback(self) -> None:
        """Roll back the open transaction."""
        with _translated(None):
            self._open.execute("ROLLBACK")

    def match(self, query: MatchRetained) -> Rows:
        """Return the page of retained messages that `query` describes, as rows.

        A row has topic, message, expiry (in seconds from now) and user. For a filter without `+`, the topics
        are a range of the index. For other filters the index on levels is fast if few topics match. If many
        match, the topics that begin with the filter's first levels are read in order until the page is full.
        """
        topic_filter, after = query.topic_filter, query.after
        demand = demand_of(topic_filter)
        rest = (NOT_SYSTEM if demand.not_system else "") + UNEXPIRED
        below = BELOW if demand.prefix else ""
        parameters = (after, demand.prefix) if demand.prefix else (after,)
        levels = literal(demand.levels, "text")
        if "+" not in topic_filter.split("/"):
            if not topic_filter.endswith("#"):
                return self._select(query, EXACT + rest, (after, topic_filter))
            if demand.levels and not below:  # the first level is empty
                return self._select(query, LEVELS.format(2) + rest, (after, levels))
            return self._select(query, below + (below and ONLY_BELOW) + rest, parameters)
        if topic_filter.endswith("#"):
            rest += LEAST.format(demand.least)
        most = max(query.limit, PROBE_MIN)
        probe = LEVELS.format(2) + rest
        ((count,),) = self._fetch(COUNTED.format(probe, most + 1), (after, levels))
        if count <= most:
            few = FEW.format(probe, query.limit)
            return self._fetch(SIZED.format(query.byte_count).format(few), (after, levels))
        return self._select(query, below + LEVELS.format(len(parameters) + 1) + rest, (*parameters, levels))

    def _select(self, query: MatchRetained, condition: str, parameters: tuple[str, ...]) -> Rows:
        page = f"{SELECTED}{condition} ORDER BY topic LIMIT {query.limit}"
        return self._fetch(SIZED.format(query.byte_count).format(page), parameters)

    def _fetch(self, query: str, parameters: tuple[str, ...]) -> Rows:
        connection = self._open
        with _translated(connection):
            return connection.execute(query, parameters, prepare=True).fetchall()

    def notify(self, notices: Sequence[PendingNotice]) -> None:
        """Send notices in a transaction of their own.

        In the transaction that commits operations, they would hold a server-wide lock during the write to
        disk.
        """
        rows = [(channel_of(self._server.schema, one.replica), _payload(one)) for one in notices]
        call = OperationStatement(
            "{op} SELECT pg_notify(channel, payload) FROM op", "channel text, payload text", rows
        )
        self.run([call])

    def interrupt(self) -> None:
        """End the connection, so that the thread's pending call raises LostError. Called by other threads."""
        self._wire.end()

    def close(self) -> None:
        """Close the connection, if there is one, and its duplicated socket."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._wire.close()


Connection = psycopg.Connection[tuple[Any, ...]]
Cursor = psycopg.Cursor[tuple[Any, ...]]


class Server:
    """Database server and schema: opens connections, and migrates the schema before the first is used.

    `url` is a libpq URL. `password` is called for each connection; if it is None, libpq takes the password
    from the URL, its password file or its environment variables.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        password: Callable[[], str] | None = None,
        migrations: Migrations | None = None,
    ) -> None:
        self.schema = schema
        self._url = url
        self._password = password
        self._migrations = load_migrations() if migrations is None else migrations
        self._lock = threading.Lock()
        self._is_migrated = False

    def connect(self, name: str, wire: DatabaseSocket) -> Connection:
        """Open a connection named `name`, with the schema as its search path.

        Parameters in statements are written `$1`. Each statement is a transaction unless one was begun. The
        socket is recorded in `wire`, so that other threads can end the connection. Raises psycopg.Error, and
        LostError if the password cannot be read.
        """
        own: dict[str, Any] = {
            "application_name": name,
            "connect_timeout": CONNECT_SECS,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 1_000 * CONNECT_SECS,
            "target_session_attrs": "read-write",
        }
        parameters = conninfo_to_dict(self._url)
        options = {key: value for key, value in own.items() if key not in parameters}
        if self._password is not None:
            try:
                options["password"] = self._password()
            except ConfigurationError as error:
                raise LostError(str(error)) from error
        conninfo = make_conninfo(self._url, **options)
        connection = psycopg.connect(conninfo, autocommit=True, cursor_factory=psycopg.RawCursor)
        wire.follow(connection)
        connection.execute(composed.SQL("SET search_path = {}").format(composed.Identifier(self.schema)))
        return connection

    def prepare(self, wire: DatabaseSocket) -> None:
        """Migrate the schema, if this process has not done so yet. Raises LostError if this fails.

        `wire` gets the socket of the connection, so that other threads can end it.
        """
        with self._lock:
            if not self._is_migrated:
                try:
                    self.migrate(wire)
                except LostError:
                    raise
                except StoreError as error:
                    raise LostError(str(error)) from error
                self._is_migrated = True

    def migrate(self, wire: DatabaseSocket | None = None) -> None:
        """Create the schema or migrate it to the latest version.

        `wire` is as for `prepare`. Raises StoreError if that is impossible, or if a newer, incompatible
        program has migrated the schema.
        """
        wire = wire or DatabaseSocket()
        try:
            name = f"{self.schema} migration"
            with self.connect(name, wire) as connection, connection.transaction():
                self._migrate(connection)
        except psycopg.Error as error:
            raise StoreError(f"PostgreSQL: {_text_of(error)}") from error
        finally:
            wire.close()

    def _migrate(self, connection: Connection) -> None:
        """Create the schema if it is missing, and run the missing migrations, in the open transaction."""
        if connection.info.server_version < VERSION_MIN:
            raise StoreError("PostgreSQL 15 or later is needed")
        connection.execute("SELECT pg_advisory_xact_lock($1)", (MIGRATE_LOCK,))
        row = connection.execute("SELECT to_regnamespace(quote_ident($1))", (self.schema,)).fetchone()
        if row is None or row[0] is None:
            connection.execute(composed.SQL("CREATE SCHEMA {}").format(composed.Identifier(self.schema)))
        create, select = VERSIONS
        connection.execute(create)
        applied = [(version, works) for version, works in connection.execute(select)]
        for step in missing_steps(applied, self._migrations, postgresql=True):
            for statement in step.statements:
                connection.execute(statement.encode())
            parameters = (step.version, step.works_with)
            connection.execute("INSERT INTO schema_version (version, works_with) VALUES ($1, $2)", parameters)


def _execute(connection: Connection, call: OperationStatement) -> Cursor:
    """Execute a statement once for all of its rows: each column is passed as one array."""
    if not call.columns:
        return connection.execute(_statement(call.sql, ""), prepare=True)
    types = [part.partition(" ")[2] for part in call.columns.split(", ")]
    columns = zip(*call.rows, strict=True)
    arrays = [literal(values, kind) for values, kind in zip(columns, types, strict=True)]
    return connection.execute(_statement(call.sql, call.columns), arrays, prepare=True)


@cache
def _statement(sql: str, columns: str) -> str:
    """Return the SQL text for PostgreSQL: replace `{op}` by a table of the rows, and the lock clauses.

    `columns` has the names and SQL types of the columns of that table. `{lock}` becomes FOR UPDATE, `{skip}`
    FOR UPDATE SKIP LOCKED.
    """
    parts = [part.partition(" ") for part in columns.split(", ")]
    arrays = ", ".join(f"${number}::{kind}[]" for number, (_, _, kind) in enumerate(parts, start=1))
    names = ", ".join(name for name, _, _ in parts)
    relation = f"WITH op ({names}) AS (SELECT * FROM unnest({arrays}))"
    skip = "FOR UPDATE OF t SKIP LOCKED"
    return sql.replace("{op}", relation).replace("{lock}", "FOR UPDATE OF t").replace("{skip}", skip)


def literal(values: Sequence[Any], kind: str) -> str:
    """Return PostgreSQL's array literal of `values`, so that one parameter carries a whole column.

    `kind` is the SQL type of the elements, such as `text`.
    """
    if kind == "text":
        words = ['"' + one.replace("\\", "\\\\").replace('"', '\\"') + '"' for one in values]
    elif kind == "bytea":
        words = ["NULL" if one is None else f'"\\\\x{one.hex()}"' for one in values]
    else:
        words = ["NULL" if one is None else str(one) for one in values]
    return "{" + ",".join(words) + "}"


@contextmanager
def _translated(connection: Connection | None) -> Iterator[None]:
    """Convert errors of psycopg in the block to LostError, AbortedError or RefusedError.

    `connection` runs the statements in the block. With None, every error becomes LostError.
    """
    try:
        yield
    except (UnicodeError, psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError) as error:
        if connection is None or connection.broken:
            raise LostError(f"PostgreSQL: {_text_of(error)}") from error
        raise RefusedError(f"PostgreSQL: {_text_of(error)}") from error
    except psycopg.Error as error:
        text, state = f"PostgreSQL: {_text_of(error)}", error.sqlstate or ""
        if connection is None or connection.broken or not state or state.startswith(AWAY):
            raise LostError(text) from error
        if state.startswith(ABORTED):
            raise AbortedError(text) from error
        raise RefusedError(text) from error  # for example too large for an index: it would fail again


def _text_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def channel_of(schema: str, replica: str) -> str:
    """Return the name of the PostgreSQL channel on which a replica receives its notices."""
    return f"{schema}.{replica}"[:NAME_BYTES_MAX]


def _payload(noted: PendingNotice) -> str:
    """Return the text of a notice, or that of a MISSED notice if the text is too long for PostgreSQL."""
    if noted.key is None:
        return json.dumps([noted.event.value])
    payload = json.dumps([noted.event.value, *noted.key])
    return payload if len(payload) <= NOTICE_BYTES_MAX else json.dumps([NoticeSubject.MISSED.value])


def _notice(payload: str) -> Notice | None:
    """Parse the text of a notice. Return None if this version does not know its kind."""
    try:
        event, *key = json.loads(payload)
        return Notice(NoticeSubject(event), SessionKey(*key) if key else None)
    except (ValueError, TypeError):
        return None


class NoticeListener:
    """Receiver of PostgreSQL notices, over a connection of its own.

    It also ends transactions of other processes that block database threads of this process. `process` is the
    prefix of the names of these threads.
    """

    def __init__(self, server: Server, process: str) -> None:
        self._server = server
        self._process = process
        self._replicas: list[str] = []
        self._ended = threading.Event()
        self._wire = DatabaseSocket()

    def listen(self, replica: str) -> None:
        """Also receive the notices for the incarnation `replica` from now on."""
        self._replicas.append(replica)

    def interrupt(self) -> None:
        """End the present connection, so that `run` reconnects."""
        self._wire.end()

    def stop(self) -> None:
        """Make `run` return soon."""
        self._ended.set()

    def run(self, on_notice: Callable[[Notice], None], is_slow: Callable[[], bool]) -> None:
        """Receive notices until `stop` is called, and pass them to `on_notice`.

        Whenever notices may have been lost, a notice MISSED is passed. While `is_slow` returns True,
        transactions that block this process are ended.
        """
        while not self._ended.is_set():
            try:
                with self._server.connect(f"{self._server.schema} notices", self._wire) as connection:
                    self._wait(connection, on_notice, is_slow)
            except (psycopg.Error, LostError):
                self._ended.wait(NOTICE_SECS)  # the lanes report why the database cannot be used
            finally:
                self._wire.close()

    def _wait(
        self, connection: Connection, on_notice: Callable[[Notice], None], is_slow: Callable[[], bool]
    ) -> None:
        """Receive notices over one connection, until it is lost or `stop` is called."""
        listening = 0
        while not self._ended.is_set():
            if listening < len(self._replicas):
                for replica in self._replicas[listening:]:
                    channel = composed.Identifier(channel_of(self._server.schema, replica))
                    connection.execute(composed.SQL("LISTEN {}").format(channel))
                    listening += 1
                on_notice(Notice(NoticeSubject.MISSED))
            for notify in connection.notifies(timeout=NOTICE_SECS):
                if (notice := _notice(notify.payload)) is not None:
                    on_notice(notice)
            if is_slow():
                connection.execute(END_BLOCKING, (self._process, self._server.schema))


class PostgreSQLState(LanedStore):
    """Store for the shared state in a schema of a PostgreSQL database, which is created if missing.

    While the database cannot be used, `health` returns the reason.
    """

    def __init__(self, server: Server, *, lanes: int = LANES, patience_secs: float = 5.0) -> None:
        process = f"{server.schema} {secrets.token_hex(6)} "
        databases = [PostgreSQLDatabase(server, f"{process}{lane}") for lane in range(lanes)]
        readers = [PostgreSQLDatabase(server, f"{process}reader-{number}") for number in range(READERS)]
        super().__init__(databases, patience_secs, NoticeListener(server, process), readers)

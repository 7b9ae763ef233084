"""Interface of a database as groups of operations use it: statements over many rows, and a transaction.

A statement is written once for both databases. `{op}` begins it and defines a relation `op` of the rows that
are passed with it. `{lock}` ends a query of rows that are to be locked, and `{skip}` one that leaves out rows
locked by others; both refer to the table as `t`. Functions of the schema, such as `state_now()`, hide the
differences of the databases.

PostgreSQL runs a statement once over arrays, SQLite once for each row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.errors import StoreError
from gateway.state.interface import MatchRetained, NoticeSubject, SessionKey

Rows = list[tuple[Any, ...]]


class OperationStatement(NamedTuple):
    """SQL statement with the rows of values that it is run for; the statement calls these rows `op`.

    `columns` has the names and SQL types of the values in a row, such as `client text, epoch bigint`.
    """

    sql: str
    columns: str = ""
    rows: Sequence[tuple[Any, ...]] = ()


class PendingNotice(NamedTuple):
    """Notice to be sent to one replica.

    `replica` is its incarnation, `event` the change, and `key` the session that has changed. `key` is None if
    the notice concerns no single session.
    """

    replica: str
    event: NoticeSubject
    key: SessionKey | None = None


class LostError(StoreError):
    """Error while the database cannot be used; the transaction may be retried over a new connection."""


class AbortedError(LostError):
    """Error of a transaction that the database has aborted in favour of another one, as in a deadlock.

    The connection can still be used. The transaction may be retried over it.
    """


class RefusedError(StoreError):
    """Error of a transaction with a value that the database rejects; a retry would fail again."""


class Database(ABC):
    """Connection to a database, used by one thread.

    Only `interrupt` may be called by other threads. All methods except `interrupt` and `close` may raise
    LostError; `run` may also raise RefusedError.
    """

    @abstractmethod
    def connect(self) -> int:
        """Connect or reconnect to the database, and return the number of the last committed group.

        A group is the operations that one transaction commits. Transactions that an earlier connection of the
        same thread has left open are ended.
        """

    @abstractmethod
    def begin(self, number: int) -> None:
        """Begin a transaction for the next group of operations.

        `number` is the number of the group: that of the last committed group plus one.
        """

    @abstractmethod
    def run(self, calls: Sequence[OperationStatement]) -> list[Rows]:
        """Run SQL statements in order, and return the list of result rows for each statement."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction.

        After LostError the outcome is unknown: the number that `connect` returns tells if the group was
        committed.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Roll back the open transaction."""

    @abstractmethod
    def match(self, query: MatchRetained) -> Rows:
        """Return the page of retained messages that `query` describes, as rows.

        A row has topic, message, expiry (in seconds from now) and user.
        """

    @abstractmethod
    def notify(self, notices: Sequence[PendingNotice]) -> None:
        """Send each notice to its replica, if the replica listens for notices."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make the thread's pending call raise LostError. Called by other threads; raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Raises nothing."""


# The first rows of `page`, until they have the number of bytes together that is inserted as {}.
SIZED: Final = (
    "SELECT topic, message, expires_in, login FROM (SELECT topic, message, expires_in, login,"
    " sum(length(message)) OVER (ORDER BY topic) - length(message) AS bytes_before"
    " FROM ({{}}) AS page) AS sized"
    " WHERE bytes_before < {} ORDER BY topic"
)


class Demand(NamedTuple):
    """Conditions, derived from an MQTT topic filter, that a matching topic must meet.

    The result of `levels_of` for the topic must include `levels`: the literal levels of the filter with their
    positions and, unless the filter ends in `#`, the number of levels. `least` is the minimum number of
    levels. `prefix` has the levels before the first wildcard. If `not_system` is True, the topic must not
    begin with `$`.
    """

    levels: list[str]
    least: int
    prefix: str
    not_system: bool


def demand_of(topic_filter: str) -> Demand:
    """Return the conditions that a topic must meet to match `topic_filter`."""
    levels = topic_filter.split("/")
    not_system = levels[0] in ("+", "#")
    is_open = levels[-1] == "#"
    if is_open:
        levels.pop()
    conditions = [f"{at}:{level}" for at, level in enumerate(levels, start=1) if level != "+"]
    if not is_open:
        conditions.append(f"#{len(levels)}")
    prefix = levels[: levels.index("+")] if "+" in levels else levels
    return Demand(conditions, len(levels), "/".join(prefix), not_system)


def levels_of(topic: str) -> list[str]:
    """Return the levels of a topic with their positions, and their number: `a/b` gives `1:a`, `2:b`, `#2`."""
    levels = topic.split("/")
    return [f"{at}:{level}" for at, level in enumerate(levels, start=1)] + [f"#{len(levels)}"]

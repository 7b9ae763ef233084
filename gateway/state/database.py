"""What a group of operations needs of a database: statements over many rows, and a transaction.

A statement is written once for both databases. `{op}` begins it: a relation `op` of the rows that are given
with it. `{lock}` ends a query of rows that are to be locked, which mentions their table as `t`. Functions of
the schema hide what differs, as `state_now()`.

PostgreSQL runs a statement once over arrays, SQLite once for each row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.errors import StoreError
from gateway.state.interface import Event, MatchRetained, SessionKey

Rows = list[tuple[Any, ...]]


class Call(NamedTuple):
    """A statement and the rows of `op`. `columns`: their names and types, as `client text, epoch bigint`."""

    sql: str
    columns: str = ""
    rows: Sequence[tuple[Any, ...]] = ()


class Noted(NamedTuple):
    """A notice for a replica."""

    replica: str
    event: Event
    key: SessionKey | None = None


class LostError(StoreError):
    """The database is away: the group may be tried again over another connection."""


class AbortedError(LostError):
    """The database has aborted the transaction for the sake of another one; the connection is as it was."""


class RefusedError(StoreError):
    """The database rejects values of the group, and would reject them again."""


class Database(ABC):
    """One connection, for one thread, but `interrupt`. All methods raise LostError; `run` raises
    RefusedError, too."""

    @abstractmethod
    def connect(self) -> int:
        """Connect again, and end whatever an earlier connection has left. Return the number of the last
        group that was committed."""

    @abstractmethod
    def begin(self, number: int) -> None:
        """Begin the transaction of the group with this number, which follows that of the last one."""

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Rows]:
        """Run statements in their order. Return the rows of each."""

    @abstractmethod
    def commit(self) -> None:
        """Commit. After LostError nobody knows whether it was committed, until `connect` returns."""

    @abstractmethod
    def rollback(self) -> None:
        """Give the transaction up."""

    @abstractmethod
    def match(self, wanted: MatchRetained) -> Rows:
        """Return topic, message, expiry and user of retained messages that an MQTT filter matches."""

    @abstractmethod
    def notify(self, notices: Sequence[Noted]) -> None:
        """Send notices to whoever listens."""

    @abstractmethod
    def interrupt(self) -> None:
        """Have what the thread waits for raise LostError. For other threads; nothing is raised."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; nothing is raised."""


# The first of some rows `page`, as many as have the octets together that are given as {}.
SIZED: Final = (
    "SELECT topic, message, expires_in, login FROM (SELECT topic, message, expires_in, login,"
    " sum(length(message)) OVER (ORDER BY topic) - length(message) AS octets FROM ({{}}) AS page) AS sized"
    " WHERE octets < {} ORDER BY topic"
)


class Demand(NamedTuple):
    """What an MQTT filter demands of a topic.

    `levels`: literal levels with their positions as `levels_of` has them, and the number of levels unless
    `#` ends the filter. `least`: the least number of levels. `prefix`: levels before the first wildcard.
    `not_system`: the topic must not begin with `$`.
    """

    levels: list[str]
    least: int
    prefix: str
    not_system: bool


def demand_of(topic_filter: str) -> Demand:
    """Return what a filter demands."""
    levels = topic_filter.split("/")
    not_system = levels[0] in ("+", "#")
    is_open = levels[-1] == "#"
    if is_open:
        levels.pop()
    wanted = [f"{at}:{level}" for at, level in enumerate(levels, start=1) if level != "+"]
    if not is_open:
        wanted.append(f"#{len(levels)}")
    prefix = levels[: levels.index("+")] if "+" in levels else levels
    return Demand(wanted, len(levels), "/".join(prefix), not_system)


def levels_of(topic: str) -> list[str]:
    """Return the levels of a topic with their positions, and their number."""
    levels = topic.split("/")
    return [f"{at}:{level}" for at, level in enumerate(levels, start=1)] + [f"#{len(levels)}"]

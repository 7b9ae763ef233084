"""Rows of one table that a group has locked and changes: read once, changed in memory, written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from gateway.state.database import AbortedError, OperationStatement, Rows

R = TypeVar("R", bound=tuple[Any, ...])
Key = tuple[Any, ...]


class Table(Generic[R]):
    """Rows of one database table, by key, that one transaction has locked and changes in memory.

    `columns` has the names and SQL types of the columns; the first `keys` of them are the key. `row` builds a
    row from the values. A missing row cannot be locked. If two transactions may create the same row, a row
    with the values `blank` is therefore inserted first. Such a row counts as absent, and the transaction that
    locks it may replace it.
    """

    def __init__(
        self,
        name: str,
        row: Callable[..., R],
        columns: str,
        keys: int,
        blank: tuple[Any, ...] | None = None,
    ) -> None:
        self.rows: dict[Key, R] = {}
        self._name = name
        self._row = row
        self._columns = columns
        self._keys = keys
        self._blank = blank
        self._parts = columns.split(", ")
        self._names = [part.partition(" ")[0] for part in self._parts]
        self._changed: dict[Key, None] = {}
        self._removed: dict[Key, None] = {}
        self._created: set[Key] = set()

    @property
    def names(self) -> str:
        """Names of the columns for a query in which the table is called `t`."""
        return ", ".join(f"t.{name}" for name in self._names)

    # Reading.

    def lock(self, keys: Iterable[Key], creating: Iterable[Key] = ()) -> list[OperationStatement]:
        """Return the SQL statements that lock and read the rows of `keys`, in the order of the keys.

        Missing rows of `creating`, a subset of `keys`, are inserted blank. The caller runs the statements,
        and passes the rows that the last one returns to `take`.
        """
        calls = []
        key_names = self._names[: self._keys]
        if missing := sorted(set(creating)):
            assert self._blank is not None
            self._created.update(missing)
            rows = [(*key, *self._blank) for key in missing]
            calls.append(OperationStatement(self._insert("DO NOTHING"), self._columns, rows))
        if unique_keys := sorted(set(keys)):
            order = ", ".join(f"t.{name}" for name in key_names)
            calls.append(self._select(self._keys, f"ORDER BY {order} {{lock}}", unique_keys))
        return calls

    def select(self, prefixes: Sequence[Key], *, locking: bool = False) -> OperationStatement:
        """Return the SQL statement that reads all rows whose keys begin with one of `prefixes`.

        If `locking` is True, it also locks the rows.
        """
        return self._select(len(prefixes[0]), "{lock}" if locking else "", prefixes)

    def _select(self, size: int, end: str, prefixes: Sequence[Key]) -> OperationStatement:
        same = " AND ".join(f"t.{name} = op.{name}" for name in self._names[:size])
        sql = f"{{op}} SELECT {self.names} FROM op JOIN {self._name} AS t ON {same} {end}"
        return OperationStatement(sql, ", ".join(self._parts[:size]), prefixes)

    def delete(self, prefixes: Sequence[Key]) -> OperationStatement:
        """Return the statement that deletes all rows whose keys begin with one of `prefixes`."""
        size = len(prefixes[0])
        names = ", ".join(self._names[:size])
        sql = f"{{op}} DELETE FROM {self._name} WHERE ({names}) IN (SELECT {names} FROM op)"
        return OperationStatement(sql, ", ".join(self._parts[:size]), prefixes)

    def take(self, rows: Rows) -> None:
        """Add to the rows in memory those that the last statement of `lock` has read.

        Blank rows count as absent, and `writes` deletes them unless `put` replaces them. Raises AbortedError
        if another transaction has deleted a row of `creating` before it was locked.
        """
        if not self._created <= {row[: self._keys] for row in rows}:
            raise AbortedError(f"a row of {self._name} was deleted meanwhile")
        self.add(rows)

    def add(self, rows: Rows) -> None:
        """Add to the rows in memory those that another statement than that of `lock` has read and locked."""
        for values in rows:
            row = self._row(*values)
            key = row[: self._keys]
            if self._blank is not None and row[self._keys :] == self._blank:
                self._removed[key] = None
            else:
                self.rows[key] = row

    # Changing.

    def put(self, row: R) -> None:
        """Create `row`, or replace the row that has the same key, in memory."""
        key = row[: self._keys]
        self.rows[key] = row
        self._changed[key] = None
        self._removed.pop(key, None)

    def remove(self, key: Key) -> None:
        """Delete the row with this key in memory, even if it was not read."""
        self.rows.pop(key, None)
        self._changed.pop(key, None)
        self._removed[key] = None

    def forget(self, prefix: Key) -> None:
        """Drop the changes in memory of all rows whose keys begin with `prefix`.

        Call this if another statement of the transaction deletes these rows.
        """
        size = len(prefix)
        for changes in (self._changed, self._removed):
            for key in [key for key in changes if key[:size] == prefix]:
                del changes[key]

    # Writing.

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the table, in the order of keys."""
        calls = []
        if self._removed:
            calls.append(self.delete(sorted(self._removed)))
        if self._changed:
            values = ", ".join(f"{name} = excluded.{name}" for name in self._names[self._keys :])
            rows = [tuple(self.rows[key]) for key in sorted(self._changed)]
            conflict = f"DO UPDATE SET {values}" if values else "DO NOTHING"  # all columns are the key
            calls.append(OperationStatement(self._insert(conflict), self._columns, rows))
        return calls

    def _insert(self, conflict: str) -> str:
        names = ", ".join(self._names)
        keys = ", ".join(self._names[: self._keys])
        return (
            f"{{op}} INSERT INTO {self._name} ({names}) SELECT {names} FROM op WHERE true"
            f" ON CONFLICT ({keys}) {conflict}"
        )

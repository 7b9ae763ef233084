"""State of replicas in one SQLite file, committed by hand: no threads, and a clock that the test sets."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

from gateway.engine.membership import Membership
from gateway.model.times import Monotonic
from gateway.state.group import run_group
from gateway.state.interface import (
    UNAVAILABLE,
    Health,
    Notice,
    Operation,
    OperationOutcome,
    Reply,
    StateStore,
)
from gateway.state.queries import run_query
from gateway.state.sqlite import SQLiteDatabase, SQLiteState

SILENT_SECS: Final = 20.0


class LocalDatabase:
    """The database. `utc` is its clock. It is closed after its test (conftest.py)."""

    opened: ClassVar[list[LocalDatabase]] = []

    def __init__(self, folder: Path) -> None:
        self.opened.append(self)
        self.utc = time.time()
        self.stores: list[LocalState] = []
        path = folder / "state.db"
        SQLiteState(path, clock=lambda: self.utc)  # creates the schema
        self.database = SQLiteDatabase(path, lambda: self.utc, self._noticed)
        self.number = self.database.connect()
        assert self.database._connection is not None
        self.database._connection.execute("PRAGMA synchronous = OFF")  # no test loses its machine

    def _noticed(self, notice: Notice) -> None:
        for store in self.stores:
            store.notices.append(notice)

    def store(self) -> LocalState:
        """Return the store of another replica."""
        store = LocalState(self)
        self.stores.append(store)
        return store

    def settle(self) -> None:
        """Do all that waits, and what comes of it."""
        while [store for store in self.stores if store.step()]:
            pass


class LocalState(StateStore):
    """The store of one replica. While `is_away` it answers that the database is; while `is_deaf`, too, though
    the database commits what it is given, which `unheard` has with its replies."""

    def __init__(self, local: LocalDatabase) -> None:
        self.is_away = self.is_deaf = False
        self.unheard: list[tuple[Any, Reply[Any]]] = []
        self.notices: list[Notice] = []
        self._local = local
        self._waiting: list[tuple[Any, Callable[[Reply[Any]], None]]] = []

    def start(
        self, call_soon: Callable[[Callable[[], None]], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def submit(self, operation: Any, done: Callable[[Reply[Any]], None]) -> None:
        self._waiting.append((operation, done))

    def query(self, query: Any, done: Callable[[Reply[Any]], None]) -> None:
        self._waiting.append((query, done))

    def tick(self) -> None:
        """Nothing is late: the test decides what is answered."""

    def listen(self, replica: str) -> None:
        """All notices are noted."""

    @property
    def health(self) -> Health:
        return Health("away" if self.is_away else "", len(self._waiting))

    def take(self) -> Callable[[], None]:
        """Do what waits longest. Return the function that tells its reply."""
        (work, done), replies = self._waiting.pop(0), list[Reply[Any]]()
        self._waiting.insert(0, (work, replies.append))
        self.step()
        return lambda: done(replies[0])

    def step(self) -> bool:
        """Do what waits longest. False: nothing does."""
        if not self._waiting:
            return False
        work, done = self._waiting.pop(0)
        if self.is_away:
            done(UNAVAILABLE)
        elif isinstance(work, Operation):
            database, self._local.number = self._local.database, self._local.number + 1
            (reply,), noted = run_group(database, [work], self._local.number)
            database.commit()
            if self.is_deaf:
                self.unheard.append((work, reply))
            done(UNAVAILABLE if self.is_deaf else reply)
            database.notify(noted)
        else:
            done(Reply(OperationOutcome.DONE, run_query(self._local.database, work)))
        return True


def joined(local: LocalDatabase, name: str) -> tuple[LocalState, Membership]:
    """Return the store and the membership of a replica that has joined."""
    state = local.store()
    membership = Membership(state, name, "1", SILENT_SECS)
    membership.tick(Monotonic(0.0))
    local.settle()
    assert not membership.unavailable_reason
    return state, membership

"""State in either database, with a clock that tests move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from typing import Final, TypeVar

import psycopg
import pytest

from gateway.state.interface import Notice, Operation, OperationOutcome, Query, Reply, SessionKey, StateStore
from gateway.state.postgresql import PostgreSQLState, Server
from gateway.state.schema import Migrations
from gateway.state.sqlite import SQLiteState
from tests.interop.servers import PostgreSQL, PostgreSQLPair

T = TypeVar("T")
WAIT_SECS: Final = 30.0
TICK_SECS: Final = 0.05
KEY: Final = SessionKey("mqtt", "device-1")
NOW: Final = "CREATE OR REPLACE FUNCTION state_now() RETURNS double precision VOLATILE LANGUAGE sql AS "
CLOCK: Final = "'SELECT extract(epoch FROM clock_timestamp())::double precision + {}'"


class Replica:
    """One store, as a program uses it: `do` and `ask` wait for the reply."""

    def __init__(self, store: StateStore, name: str) -> None:
        self.store = store
        self.name = name
        self.notices: SimpleQueue[Notice] = SimpleQueue()

    def send(self, operation: Operation[T]) -> Future[Reply[T]]:
        """Submit an operation."""
        reply: Future[Reply[T]] = Future()
        self.store.submit(operation, reply.set_result)
        return reply

    def reply(self, operation: Operation[T]) -> Reply[T]:
        """Submit an operation, and return its reply."""
        return self.result(self.send(operation))

    def result(self, reply: Future[Reply[T]]) -> Reply[T]:
        """Return a reply; as the event loop does, tick while it has not come."""
        deadline = time.monotonic() + WAIT_SECS
        while True:
            try:
                return reply.result(TICK_SECS)
            except Late:
                assert time.monotonic() < deadline
                self.store.tick()

    def do(self, operation: Operation[T]) -> T:
        """The same for one that is DONE."""
        reply = self.reply(operation)
        assert reply.verdict is OperationOutcome.DONE, reply
        return reply.value  # type: ignore[return-value]

    def ask(self, query: Query[T]) -> T:
        """Return what a query asks for."""
        reply: Future[Reply[T]] = Future()
        self.store.query(query, reply.set_result)
        found = self.result(reply)
        assert found.verdict is OperationOutcome.DONE, found
        return found.value  # type: ignore[return-value]

    def until_healthy(self) -> None:
        """Return when every lane is connected."""
        deadline = time.monotonic() + WAIT_SECS
        while self.store.health.failure:
            assert time.monotonic() < deadline, self.store.health
            time.sleep(0.01)

    def heard(self, wanted: Callable[[Notice], bool]) -> Notice:
        """Return the next notice of that kind."""
        while True:
            notice = self.notices.get(timeout=WAIT_SECS)
            if wanted(notice):
                return notice


class World:
    """A database, and replicas that share it."""

    def __init__(self) -> None:
        self._stores: list[StateStore] = []

    def advance(self, secs: float) -> None:
        """Move the database's clock."""
        raise NotImplementedError

    def store(self, migrations: Migrations | None = None, patience_secs: float = WAIT_SECS) -> StateStore:
        """Return another store over the same state."""
        raise NotImplementedError

    def replica(
        self, name: str, migrations: Migrations | None = None, patience_secs: float = WAIT_SECS
    ) -> Replica:
        """Start another replica."""
        store = self.store(migrations, patience_secs)
        replica = Replica(store, name)
        store.start(lambda function: function(), replica.notices.put)
        store.listen(name)
        self._stores.append(store)
        return replica

    def close(self) -> None:
        """Stop all replicas."""
        for store in self._stores:
            store.stop()


class SQLiteWorld(World):
    """Replicas of one process: all have the same store."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._ahead = 0.0
        self._replica: Replica | None = None

    def advance(self, secs: float) -> None:
        self._ahead += secs

    def store(self, migrations: Migrations | None = None, patience_secs: float = WAIT_SECS) -> StateStore:
        return SQLiteState(
            self.path,
            clock=lambda: time.time() + self._ahead,
            migrations=migrations,
            patience_secs=patience_secs,
        )

    def replica(
        self, name: str, migrations: Migrations | None = None, patience_secs: float = WAIT_SECS
    ) -> Replica:
        if self._replica is None:
            self._replica = super().replica(name, migrations, patience_secs)
            return self._replica
        other = Replica(self._replica.store, name)
        other.notices = self._replica.notices
        return other


class PostgreSQLWorld(World):
    """Replicas with a store each, over one schema."""

    def __init__(self, server: PostgreSQL | PostgreSQLPair) -> None:
        super().__init__()
        self.server = server
        self.schema = f"state_{token_hex(6)}"
        self._ahead = 0.0

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement over a connection of its own."""
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            connection.execute(f"SET search_path = {self.schema}".encode())
            cursor = connection.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def advance(self, secs: float) -> None:
        self._ahead += secs
        self.execute(NOW + CLOCK.format(self._ahead))

    def store(self, migrations: Migrations | None = None, patience_secs: float = WAIT_SECS) -> StateStore:
        server = Server(self.server.url, self.schema, migrations=migrations)
        server.migrate()
        return PostgreSQLState(server, patience_secs=patience_secs)

    def close(self) -> None:
        super().close()
        self.execute(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")


@pytest.fixture
def shared(postgresql: PostgreSQL) -> Iterator[PostgreSQLWorld]:
    """PostgreSQL."""
    world = PostgreSQLWorld(postgresql)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Either database."""
    if request.param == "postgresql":
        server: PostgreSQL = request.getfixturevalue("postgresql")
        assert isinstance(server, PostgreSQL)
        world: World = PostgreSQLWorld(server)
    else:
        world = SQLiteWorld(tmp_path / "state.db")
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def one(world: World) -> Replica:
    """A replica."""
    return world.replica("one")


@pytest.fixture
def two(world: World, one: Replica) -> Replica:
    """Another replica."""
    return world.replica("two")

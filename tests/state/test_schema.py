"""Migrations: a schema moves on while an older program runs, and is refused by one that starts."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from gateway.errors import StoreError
from gateway.state.interface import FindSession, MatchRetained, Retain
from gateway.state.schema import load_migrations
from gateway.state.sqlite import SQLiteState
from tests.state.conftest import KEY, PostgreSQLWorld, World
from tests.state.test_sessions import opens

EXPANDS = """-- A column with a default, and a table.
ALTER TABLE session ADD COLUMN moved double precision NOT NULL DEFAULT 0;
CREATE TABLE later (id text {C} PRIMARY KEY, value {bytes} NOT NULL);
-- only postgresql
CREATE INDEX later_value ON later (value);
"""
NEWER = (*load_migrations(), EXPANDS)
KNOWN = len(load_migrations())
MARKED = (*load_migrations(), f"-- works with {KNOWN}\n{EXPANDS}")


def test_an_older_program_goes_on_when_the_schema_moves_on(world: World) -> None:
    old = world.replica("old")
    before = opens(old)
    old.do(Retain("a/b", b"1"))
    world.store(NEWER)  # it is migrated when it is made
    new = world.replica("new", NEWER)
    old.do(Retain("a/c", b"2"))
    assert [one.message for one in new.ask(MatchRetained("a/+"))] == [b"1", b"2"]
    found = opens(new)
    assert found.present
    assert opens(old).epoch > found.epoch > before.epoch
    with pytest.raises(StoreError, match="newer gateway"):
        world.store()


def test_several_programs_migrate_at_once(shared: PostgreSQLWorld) -> None:
    failures: list[Exception] = []

    def start() -> None:
        try:
            shared.store(NEWER)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert shared.execute("SELECT version FROM schema_version ORDER BY version") == [
        (number,) for number in range(1, len(NEWER) + 1)
    ]


def test_a_migration_that_fails_leaves_nothing(world: World) -> None:
    world.replica("one")
    with pytest.raises(StoreError):
        world.store((*load_migrations(), "CREATE TABLE half (id text);\nCREATE TABLE session (id text);\n"))
    again = world.replica("two", NEWER)
    assert again.ask(FindSession(KEY)) is None


def test_state_survives(world: World, tmp_path: Path) -> None:
    one = world.replica("one")
    opens(one)
    one.store.stop()
    if isinstance(world, PostgreSQLWorld):
        assert world.replica("two").ask(FindSession(KEY)) is not None
        return
    again = SQLiteState(tmp_path / "state.db")
    again.start(lambda function: function(), print)
    found = threading.Event()
    again.query(FindSession(KEY), lambda reply: found.set() if reply.value is not None else None)
    assert found.wait(30)
    again.stop()


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (id)")
    connection.close()
    with pytest.raises(StoreError, match="another program"):
        SQLiteState(path)


def test_an_older_program_starts_beside_a_schema_that_works_with_it(world: World) -> None:
    """As a replica that is restarted, or rolled back, in the middle of an update."""
    new = world.replica("new", MARKED)
    before = opens(new)
    old = world.replica("old")
    found = opens(old)
    assert found.present
    assert found.epoch > before.epoch
    assert opens(new).present
    world.store(MARKED)


def test_a_program_that_is_too_old_is_refused_whatever_came_last(world: World) -> None:
    """A schema that has contracted, and then expanded again for programs that know that."""
    later = f"-- works with {KNOWN + 1}\nCREATE TABLE even_later (id text);\n"
    world.store((*NEWER, later))
    with pytest.raises(StoreError, match="newer gateway"):
        world.store()
    world.store(NEWER)


def test_a_schema_that_does_not_remember_what_it_works_with(shared: PostgreSQLWorld) -> None:
    """Of a later one that forgot it nothing is assumed."""
    shared.store()
    shared.store(MARKED)
    shared.store()
    shared.execute("UPDATE schema_version SET works_with = NULL")
    with pytest.raises(StoreError, match="newer gateway"):
        shared.store()

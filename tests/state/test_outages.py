"""PostgreSQL goes away: between a commit and its answer, for a moment, for long. And it rejects values."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from string import ascii_letters

import psycopg
import pytest

from gateway.containment import counted
from gateway.errors import ConfigurationError
from gateway.state.database import AbortedError, Database, LostError
from gateway.state.interface import (
    AcquireLease,
    ChangeSession,
    FindSession,
    Lease,
    MatchRetained,
    NoticeSubject,
    OpenSession,
    OperationOutcome,
    Reply,
    Retain,
    Retained,
    SessionKey,
)
from gateway.state.postgresql import LOCK_MS, DatabaseSocket, PostgreSQLDatabase, PostgreSQLState, Server
from gateway.state.schema import load_migrations
from gateway.state.sessions import SessionOperation, Sessions
from tests.interop.servers import PostgreSQL
from tests.state.conftest import KEY, WAIT_SECS, PostgreSQLWorld, Replica
from tests.state.test_sessions import opens

BACKENDS = "FROM pg_stat_activity WHERE application_name LIKE '{} %' AND pid <> pg_backend_pid()"


@pytest.fixture
def own() -> Iterator[PostgreSQLWorld]:
    """A server that this test may stop."""
    with PostgreSQL() as server:
        world = PostgreSQLWorld(server)
        try:
            yield world
        finally:
            if not server.running:
                server.start()
            world.close()


def cut(world: PostgreSQLWorld) -> None:
    """End all connections of the replicas."""
    world.execute(f"SELECT pg_terminate_backend(pid) {BACKENDS.format(world.schema)}")


class Commits:
    """Has something happen at a commit: before it, or between it and its answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: PostgreSQLWorld, *, committed: bool) -> None:
        self.count = 0
        self._commit = PostgreSQLDatabase.commit
        self._world = world
        self._committed = committed
        self._armed = threading.Event()
        monkeypatch.setattr(PostgreSQLDatabase, "commit", lambda database: self._commit_and_cut(database))

    def arm(self) -> None:
        """Do it at the next commit."""
        self._armed.set()

    def _commit_and_cut(self, database: PostgreSQLDatabase) -> None:
        self.count += 1
        if not self._armed.is_set():
            self._commit(database)
            return
        self._armed.clear()
        if self._committed:
            self._commit(database)
        cut(self._world)
        if self._committed:
            raise LostError("the answer was lost")
        self._commit(database)


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_without_an_answer_is_repeated_only_if_it_was_none(
    shared: PostgreSQLWorld, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """An open would get another epoch, and name itself as the owner before, if it came twice."""
    one = shared.replica("one")
    first = opens(one).epoch
    commits = Commits(monkeypatch, shared, committed=committed)
    commits.arm()
    found = opens(one)
    assert found.before is not None
    assert found.before.epoch == first
    assert commits.count == (2 if committed else 3)  # the last one accepts the client
    view = one.ask(FindSession(KEY))
    assert view is not None
    assert view.owner.epoch == found.epoch
    one.do(ChangeSession(KEY, found.epoch, {"a": b""}))
    assert opens(one).contents.subscriptions == {"a": b""}


def test_a_commit_that_the_server_still_does_is_waited_for(
    shared: PostgreSQLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost for the replica, and not for the server, which goes on with the transaction."""
    one = shared.replica("one")
    first = opens(one).epoch
    lost: list[psycopg.Connection[tuple[object, ...]]] = []
    commit, armed = PostgreSQLDatabase.commit, [True]

    def lose(database: PostgreSQLDatabase) -> None:
        if armed:
            armed.clear()
            assert database._connection is not None
            lost.append(database._connection)  # it stays open, with its locks
            database._connection = None
            raise LostError("cut off")
        commit(database)

    monkeypatch.setattr(PostgreSQLDatabase, "commit", lose)
    found = opens(one)
    assert found.before is not None
    assert found.before.epoch == first
    with pytest.raises(psycopg.Error):
        lost[0].execute("COMMIT")
    assert opens(one).epoch > found.epoch


def test_what_is_done_while_it_restarts_is_done_once(own: PostgreSQLWorld) -> None:
    one = own.replica("one")
    epoch = opens(one).epoch
    waits = [one.send(ChangeSession(KEY, epoch, {str(number): b""})) for number in range(50)]
    own.server.stop(kill=True)
    waits += [one.send(ChangeSession(KEY, epoch, {str(number): b""})) for number in range(50, 100)]
    own.server.start()
    assert {wait.result(60).verdict for wait in waits} == {OperationOutcome.DONE}
    one.until_healthy()
    assert one.store.health.pending == 0
    assert set(opens(one).contents.subscriptions) == {str(number) for number in range(100)}
    assert one.heard(lambda notice: notice.event is NoticeSubject.MISSED)


def test_after_some_time_it_is_unavailable_and_then_it_is_back(own: PostgreSQLWorld) -> None:
    one = own.replica("one", patience_secs=0.5)
    epoch = opens(one).epoch
    own.server.stop()
    assert one.reply(ChangeSession(KEY, epoch, {"a": b""})).verdict is OperationOutcome.UNAVAILABLE
    assert one.reply(Retain("t", b"x")).verdict is OperationOutcome.UNAVAILABLE
    failure, pending = one.store.health
    assert "PostgreSQL" in failure
    assert pending == 0
    own.server.start()
    while one.reply(ChangeSession(KEY, epoch, {"b": b""})).verdict is OperationOutcome.UNAVAILABLE:
        pass
    one.do(Retain("t", b"x"))
    one.until_healthy()
    found = opens(one)
    assert (found.present, set(found.contents.subscriptions)) == (True, {"b"})


def test_no_more_wait_than_may(shared: PostgreSQLWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    one = shared.replica("one")
    monkeypatch.setattr(type(one.store), "pending_max", 3)
    go = threading.Event()
    begin = PostgreSQLDatabase.begin

    def wait(database: PostgreSQLDatabase, number: int) -> None:
        go.wait(30)
        begin(database, number)

    monkeypatch.setattr(PostgreSQLDatabase, "begin", wait)
    waits = [one.send(Retain(str(number), b"x")) for number in range(5)]
    assert [wait.result(30).verdict for wait in waits[3:]] == [OperationOutcome.UNAVAILABLE] * 2
    go.set()
    assert [wait.result(30).verdict for wait in waits[:3]] == [OperationOutcome.DONE] * 3


@pytest.mark.parametrize("topic", ["nul\0", "surrogate\ud800"])
def test_values_that_it_rejects_cost_nobody_else_anything(shared: PostgreSQLWorld, topic: str) -> None:
    one = shared.replica("one")
    waits = [one.send(Retain(name, b"x")) for name in ("a", topic, "b") for _ in range(20)]
    found = [wait.result(30).verdict for wait in waits]
    assert (
        found == [OperationOutcome.DONE] * 20 + [OperationOutcome.REFUSED] * 20 + [OperationOutcome.DONE] * 20
    )
    assert one.ask(MatchRetained("#")) == [Retained("a", b"x", None), Retained("b", b"x", None)]
    bad = OpenSession(SessionKey("mqtt", topic), "one", "", "", False, 0.0)
    assert one.reply(bad).verdict is OperationOutcome.REFUSED
    opens(one)


def test_a_bug_costs_one_operation(one: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Sessions.apply

    def fail(rows: Sessions, operation: SessionOperation, now: float) -> Reply[object]:
        if operation.key.client == "odd":  # type: ignore[union-attr]
            raise ZeroDivisionError
        return apply(rows, operation, now)

    monkeypatch.setattr(Sessions, "apply", fail)
    keys = [SessionKey("mqtt", client) for client in ("a", "odd", "b") for _ in range(10)]
    waits = [one.send(OpenSession(key, "one", "", "", False, 60.0)) for key in keys]
    found = [wait.result(30).verdict for wait in waits]
    assert (
        found == [OperationOutcome.DONE] * 10 + [OperationOutcome.REFUSED] * 10 + [OperationOutcome.DONE] * 10
    )
    assert counted["store"] >= 10


def test_what_was_submitted_is_committed_at_the_end(shared: PostgreSQLWorld) -> None:
    one, two = shared.replica("one"), shared.replica("two")
    waits = [one.send(Retain(str(number), b"x")) for number in range(2_000)]
    one.store.stop()
    assert {wait.result(0).verdict for wait in waits} == {OperationOutcome.DONE}
    assert len(two.ask(MatchRetained("+", limit=5_000))) == 2_000


def test_groups_that_lock_each_other_out_are_tried_again(shared: PostgreSQLWorld) -> None:
    """Topics of both replicas are created, replaced and cleared in the order that suits least."""
    replicas = [shared.replica("one"), shared.replica("two")]
    waits = [
        replica.send(Retain(f"t/{(number * step) % 97}", None if number % 3 else b"x"))
        for number in range(3_000)
        for replica, step in zip(replicas, (1, 96), strict=True)
    ]
    assert {wait.result(60).verdict for wait in waits} == {OperationOutcome.DONE}


def test_no_statement_is_compiled(shared: PostgreSQLWorld) -> None:
    """PostgreSQL compiles plans that look expensive, as those that read a whole table do here."""
    database = PostgreSQLDatabase(Server(shared.server.url, shared.schema), "compiled")
    database.connect()
    try:
        plan = database._open.execute("EXPLAIN ANALYZE SELECT count(*) FROM schema_version").fetchall()
    finally:
        database.close()
    assert "Seq Scan" in str(plan)
    assert "JIT" not in str(plan)


def test_a_lane_of_two_processes_is_refused(shared: PostgreSQLWorld) -> None:
    """As if an earlier connection came to life again: its next transaction is not this lane's."""
    shared.store()
    first: Database = PostgreSQLDatabase(Server(shared.server.url, shared.schema), "lane")
    second: Database = PostgreSQLDatabase(Server(shared.server.url, shared.schema), "lane")
    number = first.connect()
    assert second.connect() == number
    second.begin(number + 1)
    second.run([])
    second.commit()
    first.begin(number + 1)
    with pytest.raises(LostError):
        first.run([])
    first.close()
    second.close()


def test_a_connection_that_is_lost_while_a_group_is_given_up(
    shared: PostgreSQLWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes on, whatever fails."""
    one = shared.replica("one")
    faults: list[Exception] = [AbortedError("by another group"), ZeroDivisionError()]

    def fail(database: PostgreSQLDatabase) -> None:
        database.close()
        raise LostError("lost")

    begin = PostgreSQLDatabase.begin

    def abort(database: PostgreSQLDatabase, number: int) -> None:
        if faults:
            raise faults.pop(0)
        begin(database, number)

    monkeypatch.setattr(PostgreSQLDatabase, "rollback", fail)
    monkeypatch.setattr(PostgreSQLDatabase, "begin", abort)
    opens(one)
    one.until_healthy()
    assert one.store.health.pending == 0


def test_a_replica_that_starts_before_its_database_is_healthy_later(own: PostgreSQLWorld) -> None:
    """The first lane that connects creates the schema; nothing has to be submitted for that."""
    own.server.stop()
    one = Replica(PostgreSQLState(Server(own.server.url, own.schema), patience_secs=0.5), "one")
    one.store.start(lambda function: function(), one.notices.put)
    try:
        assert one.store.health.failure
        assert one.reply(Retain("t", b"x")).verdict is OperationOutcome.UNAVAILABLE
        own.server.start()
        one.until_healthy()
        one.do(Retain("t", b"x"))
    finally:
        one.store.stop()


def test_a_newer_schema_keeps_a_replica_out_and_says_why(shared: PostgreSQLWorld) -> None:
    Server(shared.server.url, shared.schema, migrations=(*load_migrations(), "SELECT 1;\n")).migrate()
    one = Replica(PostgreSQLState(Server(shared.server.url, shared.schema), patience_secs=0.5), "one")
    one.store.start(lambda function: function(), one.notices.put)
    try:
        assert one.reply(Retain("t", b"x")).verdict is OperationOutcome.UNAVAILABLE
        assert "a newer gateway has upgraded it" in one.store.health.failure
    finally:
        one.store.stop()


def test_a_password_that_cannot_be_read_is_the_reason_and_read_again(shared: PostgreSQLWorld) -> None:
    failures = [ConfigurationError("/secret: cannot be read")]

    def read() -> str:
        while failures:
            raise failures.pop()
        return "changed"

    server = Server(shared.server.url, shared.schema, read)
    with pytest.raises(LostError, match="/secret"):
        server.prepare(DatabaseSocket())
    server.prepare(DatabaseSocket())


def test_a_transaction_that_does_not_end_is_ended_by_who_waits_for_it(shared: PostgreSQLWorld) -> None:
    """A process that is frozen or cut off between two statements of a pipeline: no timeout of the server
    applies to it, since it is not idle in the eyes of PostgreSQL."""
    one = shared.replica("one")
    assert one.do(AcquireLease("link", "one", 60.0)) == Lease("one", 1)
    lane = f"{shared.schema} frozen 0"
    frozen = psycopg.connect(shared.server.url, autocommit=True, application_name=lane)
    frozen.execute(f"SET search_path = {shared.schema}".encode())
    frozen.execute("SET statement_timeout = 1000")
    frozen.execute("SET idle_in_transaction_session_timeout = 1000")
    with suppress(psycopg.OperationalError), frozen.pipeline():  # which finds at its end that it was ended
        frozen.execute("BEGIN")
        assert frozen.execute("SELECT name FROM lease FOR UPDATE").fetchall() == [("link",)]
        assert one.do(AcquireLease("link", "one", 60.0)) == Lease("one", 1)
    assert frozen.broken


def test_a_name_that_is_too_long_for_an_index_costs_nobody_else_anything(shared: PostgreSQLWorld) -> None:
    """PostgreSQL refuses it by an error that looks like one of the server."""
    one, two = shared.replica("one"), shared.replica("two")
    key = SessionKey("mqtt", "c")
    epoch = one.do(OpenSession(key, "one", "u", "p", True, 60.0, "q")).epoch
    random = Random(1)
    letters = "".join(random.choice(ascii_letters) for _ in range(4_000))
    one.until_healthy()
    assert one.reply(ChangeSession(key, epoch, {letters: b"options"})).verdict is OperationOutcome.REFUSED
    assert not one.store.health.failure
    two.do(ChangeSession(key, epoch, {"short": b"options"}))


def test_a_server_that_is_frozen_is_noticed_and_what_waits_is_answered(own: PostgreSQLWorld) -> None:
    """It accepts connections and says nothing: TCP and the server's own limits do not notice."""
    one = own.replica("one", patience_secs=0.5)
    epoch = opens(one).epoch
    one.until_healthy()
    own.server.freeze()
    try:
        waits = [one.send(ChangeSession(KEY, epoch, {str(number): b""})) for number in range(3)]
        assert {one.result(wait).verdict for wait in waits} == {OperationOutcome.UNAVAILABLE}
        assert "not responded" in one.store.health.failure or "PostgreSQL" in one.store.health.failure
        assert one.store.health.pending == 0
        begin = time.monotonic()
        while "not responded" in one.store.health.failure:
            one.store.tick()  # until its connection is ended, and another one is tried
            assert time.monotonic() - begin < WAIT_SECS
        assert "PostgreSQL" in one.store.health.failure
    finally:
        own.server.thaw()
    one.until_healthy()
    while one.reply(ChangeSession(KEY, epoch, {"b": b""})).verdict is OperationOutcome.UNAVAILABLE:
        pass
    assert "b" in opens(one).contents.subscriptions


def test_a_store_stops_though_its_server_is_frozen(own: PostgreSQLWorld) -> None:
    one = own.replica("one", patience_secs=0.5)
    epoch = opens(one).epoch
    own.server.freeze()
    try:
        wait = one.send(ChangeSession(KEY, epoch, {"a": b""}))
        begin = time.monotonic()
        one.store.stop()
        assert time.monotonic() - begin < 10.0
        assert wait.result(0).verdict is OperationOutcome.UNAVAILABLE
    finally:
        own.server.thaw()


def test_a_commit_that_waits_for_a_lock_is_answered(shared: PostgreSQLWorld) -> None:
    """Somebody else has locked a whole table, and is not ended."""
    one = shared.replica("one", patience_secs=0.5)
    epoch = opens(one).epoch
    with psycopg.connect(shared.server.url) as other:
        other.execute(f"LOCK TABLE {shared.schema}.subscription".encode())
        assert one.reply(ChangeSession(KEY, epoch, {"a": b""})).verdict is OperationOutcome.UNAVAILABLE
    while one.reply(ChangeSession(KEY, epoch, {"b": b""})).verdict is OperationOutcome.UNAVAILABLE:
        pass
    one.until_healthy()


def test_a_transaction_that_nobody_waits_for_is_left_alone(shared: PostgreSQLWorld) -> None:
    """A group that is merely slow, while others are aborted by each other or wait for something else."""
    one = shared.replica("one")
    assert one.do(AcquireLease("link", "one", 60.0)) == Lease("one", 1)
    lane = f"{shared.schema} slow 0"
    with psycopg.connect(shared.server.url, autocommit=True, application_name=lane) as slow:
        slow.execute(f"SET search_path = {shared.schema}".encode())
        slow.execute("BEGIN")
        slow.execute("INSERT INTO lease VALUES ('other', 'slow', 1, 0)")
        blocker = psycopg.connect(shared.server.url)
        blocker.execute(f"SELECT name FROM {shared.schema}.lease WHERE name = 'link' FOR UPDATE".encode())
        wait = one.send(AcquireLease("link", "one", 60.0))
        with pytest.raises(TimeoutError):
            wait.result(LOCK_MS / 1_000 + 1.5)  # it has waited for the lock in vain once
        blocker.close()
        assert one.result(wait).verdict is OperationOutcome.DONE
        slow.execute("COMMIT")

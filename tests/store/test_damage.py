"""Rows that cannot be read: each is a loss that is told and counted, and hides nothing behind it."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.broker import storage
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.mqtt.session import SessionLimits
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.errors import StoreError
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.store import writer
from gateway.store.database import READS_MAX
from gateway.store.letters import StoredDeadLetter
from gateway.store.repair import check, repair
from gateway.store.store import Store
from tests.broker.mqtt.test_durable_sessions import World
from tests.broker.parts import Space, Taker, connected, mqtt, publish
from tests.store.journal.samples import until
from tests.store.parts import Opened, content, log_of, messages, numbered, opened

LARGE = 2 * storage.PIECE_BYTES_MAX
SMALL = 200_000


def flip_body(folder: Path) -> None:
    """Spoil the first large row, far behind its head."""
    place = places(folder)[0]
    change(folder, place[0] + place[1] - 10)


def flip_head(folder: Path) -> None:
    """Spoil what says which form it has."""
    change(folder, places(folder)[0][0] + 4)


def cut(folder: Path) -> None:
    """Take the end of the heap away: all large rows."""
    os.truncate(folder / "gateway.heap", 0)


def change(folder: Path, at: int) -> None:
    with (folder / "gateway.heap").open("r+b") as heap:
        heap.seek(at)
        data = heap.read(1)
        heap.seek(at)
        heap.write(bytes((data[0] ^ 0x55,)))


def places(folder: Path) -> list[tuple[int, int]]:
    with closing(sqlite3.connect(folder / "gateway.db")) as database:
        return database.execute("SELECT at, octets FROM places ORDER BY row").fetchall()


HARMS = [flip_body, flip_head, cut]
Harm = Callable[[Path], None]


def filled(folder: Path, byte_count: int = LARGE, *, before: int = 0, behind: int = 50) -> None:
    with Opened(folder) as one:
        log = one.store.log("queue", "q")
        for number in range(before):
            one.append(log, number, b"%d" % number)
        one.append(log, before, b"large".ljust(byte_count))
        for number in range(before + 1, before + 1 + behind):
            one.append(log, number, b"%d" % number)


def letters_of(one: Opened) -> list[StoredDeadLetter]:
    found: list[list[StoredDeadLetter]] = []
    one.store.newest_letters(99, found.append)
    one.store.flush()
    one.loop.run_until(lambda: found)
    return found[0]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("byte_count", [LARGE, SMALL])
@pytest.mark.parametrize("before", [0, 3])
def test_a_queue_delivers_what_is_behind_a_damaged_row(
    tmp_path: Path, harm: Harm, byte_count: int, before: int
) -> None:
    filled(tmp_path, byte_count, before=before)
    harm(tmp_path)
    with Opened(tmp_path) as one:
        queue = Queue("q")
        QueueStorage(queue, one.store, log_of(one.store), MemoryLimits(100, 1 << 20))
        taker = Taker()
        queue.add(taker)
        expected = [*numbered(0, before), *numbered(before + 1, before + 51)]
        one.until(lambda: len(taker.bodies) >= len(expected))
        assert one.commit() is ACCEPTED
        assert taker.bodies == expected
        assert len(queue) == 0
        assert one.store.figures.damaged == 1
        (told,) = one.damage
        assert "cannot be read" in told


class FailingReads:
    """A disk whose next reads of large rows fail, as often as `left` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.EIO) -> None:
        self.left = 0
        self.code = code
        self._pread = os.pread
        monkeypatch.setattr(os, "pread", self.pread)
        monkeypatch.setattr(writer, "READ_AGAIN_SECS", 0.0)

    def pread(self, descriptor: int, count: int, at: int) -> bytes:
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return self._pread(descriptor, count, at)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM])
def test_a_row_that_the_disk_does_not_return_for_a_moment_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    filled(tmp_path, before=3, behind=3)
    disk = FailingReads(monkeypatch, code)
    with Opened(tmp_path) as one:
        disk.left = READS_MAX - 1
        assert [at for at, _ in one.read_from(log_of(one.store), 0, 99)] == list(range(7))
        disk.left = 1
        assert [at for at, _ in one.read_from(log_of(one.store), 3, 1)] == [3], "counted anew"
        assert one.store.figures.damaged == 0


def test_a_row_of_the_database_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 10, behind=0)
    monkeypatch.setattr(writer, "READ_AGAIN_SECS", 0.0)
    faults = [sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_NOMEM]

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            if sql.startswith("SELECT first, tag, messages") and faults:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = faults.pop()
                raise error
            return super().execute(sql, parameters)

    with Opened(tmp_path, factory=Connection) as one:
        assert len(one.read_from(log_of(one.store), 0, 1)) == 1
        assert not faults
        assert one.store.figures.damaged == 0


def test_a_row_is_read_again_before_the_thread_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, behind=1)
    disk = FailingReads(monkeypatch)
    with closing(opened(tmp_path)) as store:
        disk.left = READS_MAX - 1
        assert [at for at, _ in content(store, log_of(store))] == [0, 1]


def test_what_the_disk_never_returns_hides_nothing_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, before=0, behind=3)
    disk = FailingReads(monkeypatch)
    with Opened(tmp_path) as one:
        disk.left = READS_MAX
        assert [at for at, _ in one.read_from(log_of(one.store), 0, 99)] == [1, 2, 3]
        assert disk.left == 0
        one.loop.run_until(lambda: one.damage)
        assert "Input/output error" in one.damage[0]


def test_several_damaged_rows_in_a_row(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        for number in range(4):
            one.append(log, number, b"%d" % number + bytes(LARGE))
        one.append(log, 4, b"sound")
    cut(tmp_path)
    with Opened(tmp_path) as one:
        assert one.read_from(log_of(one.store), 0, 1) == [(4, b"sound")]
        assert one.read_from(log_of(one.store), 5, 1) == []
        assert one.read_from(log_of(one.store), 0, 1) == [(4, b"sound")]
        assert one.store.figures.damaged == 4, "each is told once"


def test_a_log_of_nothing_else_is_empty(tmp_path: Path) -> None:
    filled(tmp_path, behind=0)
    cut(tmp_path)
    with Opened(tmp_path) as one:
        assert one.read_from(log_of(one.store), 0, 9) == []


def test_what_can_be_told_of_it_is_a_dead_letter_once(tmp_path: Path) -> None:
    filled(tmp_path)
    flip_body(tmp_path)
    for _ in range(3):  # the row stays, for whoever repairs the store
        with Opened(tmp_path) as one:
            one.read_from(log_of(one.store), 0, 1)
            assert one.commit() is ACCEPTED
            (letter,) = letters_of(one)
            assert (letter.message.body, letter.outcome.verdict) == (b"", Verdict.REJECTED)
            assert (letter.outcome.reason, letter.message.address.name) == (Reason.STORE, "a/b")
            assert "damaged" in letter.outcome.text
    findings = check(tmp_path)
    assert findings.logs["queue", "q"].messages == 1


def test_a_letter_is_written_although_nothing_else_happens(tmp_path: Path) -> None:
    filled(tmp_path)
    flip_body(tmp_path)
    one = Opened(tmp_path)
    one.read_from(log_of(one.store), 0, 1)
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as database:
        until(lambda: database.execute("SELECT count(*) FROM dead_letters").fetchone() == (1,))
    one.store.close()


def test_a_session_gets_what_is_behind_a_damaged_row(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#")
        connected(session)
        session.detach()
        (grant,) = world.space.sinks(mqtt().address)
        for body in (b"large".ljust(LARGE), *numbered(0, 50)):
            publish(grant, [mqtt(body=body)])
            assert world.one.commit() is ACCEPTED
    flip_body(tmp_path)
    spaces: list[Space] = []

    def restore(store: Store) -> None:
        spaces.append(Space(SessionLimits(), store=store, retained=RetainedTopics(store=store)))

    with Opened(tmp_path, before=restore) as one:
        outlet = connected(spaces[0].sessions["c"])
        one.until(lambda: len(outlet.rows) == 50)
        assert [row.message.body for row in outlet.rows] == numbered(0, 50)


def test_a_damaged_letter_hides_no_other(tmp_path: Path) -> None:
    refused = Outcome(Verdict.REJECTED, Reason.NO_ROUTE)
    with Opened(tmp_path) as one:
        one.store.add_letters(messages(*numbered(0, 10)), "route", refused)
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as database:
        database.execute("UPDATE dead_letters SET message = zeroblob(40) WHERE id BETWEEN 5 AND 8")
        database.commit()
    with Opened(tmp_path) as one:
        assert [letter.message.body for letter in letters_of(one)] == [b"9", b"8", b"3", b"2", b"1", b"0"]
        found: list[list[StoredDeadLetter]] = []
        one.store.newest_letters(2, found.append, before=9)
        one.store.flush()
        one.loop.run_until(lambda: found)
        assert [letter.message.body for letter in found[0]] == [b"3", b"2"], (
            "a page is full if there are more"
        )


@pytest.mark.parametrize("byte_count", [LARGE, SMALL])
def test_a_large_row_without_a_place_stops_the_start_with_advice(tmp_path: Path, byte_count: int) -> None:
    filled(tmp_path, byte_count)
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as database:
        database.execute("DELETE FROM places")
        database.commit()
    with pytest.raises(StoreError, match=r"row \d+ has no place in gateway.heap.*gateway store repair"):
        opened(tmp_path)
    findings = check(tmp_path)
    assert findings.logs["queue", "q"].messages == 1
    repair(tmp_path)
    with Opened(tmp_path) as one:
        assert [body for _, body in one.read_from(log_of(one.store), 0, 99)] == numbered(1, 51)

"""What is handed in is there after a restart: logs, messages, settlements, values, barriers, dead letters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gateway.model.message import MESSAGE_BYTES, Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.store import writer
from gateway.store.database import Stored
from gateway.store.group import RUN_BYTES_MAX, RUN_MESSAGES_MAX, Group
from gateway.store.index import TRANSIENT, Log
from gateway.store.letters import StoredDeadLetter
from tests.store.parts import (
    PATIENCE_SECS,
    TOPIC,
    Disk,
    Opened,
    accepted,
    content,
    log_of,
    messages,
    numbered,
    opened,
)


def test_messages_are_there_after_a_restart(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        assert one.store.log("queue", "q") is log
        assert one.append(log, 7, b"a", b"b") is ACCEPTED
        assert one.append(log, 9, b"c") is ACCEPTED
    again = opened(tmp_path)
    log = log_of(again)
    assert (log.kind, log.name) == ("queue", "q")
    assert [(row.first, row.count, row.byte_count, row.settled, row.live) for row in again.rows(log)] == [
        (7, 2, 2 * (1 + MESSAGE_BYTES), None, 2),
        (9, 1, 1 + MESSAGE_BYTES, None, 1),
    ]
    assert content(again, log) == [(7, b"a"), (8, b"b"), (9, b"c")]
    again.close()


def test_appends_of_one_commit_are_one_row(tmp_path: Path) -> None:
    store = opened(tmp_path)
    log = store.log("queue", "q")
    for at in range(100):
        store.append(log, at, messages(b"%d" % at), accepted)
        store.flush()
    store.append(log, 200, messages(b"apart"), accepted)
    store.close()
    again = opened(tmp_path)
    assert [(row.first, row.count) for row in again.rows(log_of(again))] == [(0, 100), (200, 1)]
    again.close()


MIB, EMPTY = RUN_BYTES_MAX, MESSAGE_BYTES
LIMITS = [
    # what messages weigh (the lightest are empty), counts of the rows
    ([1] * RUN_MESSAGES_MAX, [RUN_MESSAGES_MAX]),
    ([1] * (2 * RUN_MESSAGES_MAX + 1), [RUN_MESSAGES_MAX, RUN_MESSAGES_MAX, 1]),
    ([MIB], [1]),
    ([MIB + 1], [1]),
    ([MIB // 2, MIB // 2], [2]),
    ([MIB // 2, MIB // 2, 1], [2, 1]),
    ([1, MIB + 1, 1], [1, 1, 1]),
    ([MIB // 2 + 1] * 3, [1, 1, 1]),
    ([0, MIB - 2 * EMPTY, 0], [3]),
]


@pytest.mark.parametrize("sizes, counts", LIMITS, ids=lambda value: str(len(value)))
@pytest.mark.parametrize("whole", [True, False])
def test_rows_are_bounded(tmp_path: Path, sizes: list[int], counts: list[int], whole: bool) -> None:
    store = opened(tmp_path)
    log = store.log("queue", "q")
    bodies = [bytes([at % 256]) * max(size - EMPTY, 0) for at, size in enumerate(sizes)]
    for first, some in [(0, bodies)] if whole else [(at, [body]) for at, body in enumerate(bodies)]:
        store.append(log, first, messages(*some), accepted)
    store.close()
    again = opened(tmp_path)
    log = log_of(again)
    assert [row.count for row in again.rows(log)] == counts
    assert content(again, log) == list(enumerate(bodies))
    again.close()


def test_what_is_settled_is_gone_after_a_restart(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, *numbered(0, 10))
        one.append(log, 10, *numbered(10, 20))
        one.store.settle(log, [9, 3, 3, 10])
        one.commit()
    again = opened(tmp_path)
    log = log_of(again)
    rows = again.rows(log)
    assert [(row.first, row.settled, row.live) for row in rows] == [
        (0, (1 << 3 | 1 << 9).to_bytes(2, "little"), 8),
        (10, b"\x01\x00", 9),
    ]
    left = [number for number in range(20) if number not in (3, 9, 10)]
    assert content(again, log) == [(number, b"%d" % number) for number in left]
    again.settle(log, range(10))
    again.settle(log, [11])
    again.close()
    third = opened(tmp_path)
    log = log_of(third)
    assert [(row.first, row.settled) for row in third.rows(log)] == [(10, b"\x03\x00")]
    third.close()


@pytest.mark.interpreted
@pytest.mark.parametrize("is_busy", [False, True])
def test_settlements_wait_for_the_next_message_while_commits_are_frequent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr(writer, "JOIN_SECS", PATIENCE_SECS)
    monkeypatch.setattr(writer, "BUSY_SECS", PATIENCE_SECS if is_busy else 0.0)
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        for number in range(writer.BUSY_COMMITS):
            one.append(log, number, b"%d" % number)
        commits = one.store.figures.commits
        one.store.settle(log, range(writer.BUSY_COMMITS))
        one.store.flush()
        if not is_busy:
            while one.store.figures.commits == commits:
                time.sleep(0.001)
        assert one.append(log, 100, b"next") is ACCEPTED
        assert one.store.figures.commits == commits + (1 if is_busy else 2)
    again = opened(tmp_path)
    assert content(again, log_of(again)) == [(100, b"next")]
    again.close()


def test_a_message_settled_in_its_own_wakeup_touches_no_disk(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.commit()
        before = disk.commits
        told: list[Outcome] = []
        one.store.append(log, 0, messages(b"a", b"b"), told.append)
        one.store.append(log, 2, messages(b"c"), told.append)
        one.store.settle(log, range(3))
        one.commit()
        assert told == [ACCEPTED, ACCEPTED]
        assert (disk.commits, one.store.figures.pending) == (before, 0)
    again = opened(tmp_path)
    assert again.rows(log_of(again)) == []
    again.close()


SETTLED_MEANWHILE = [
    # positions settled of 0 ... 9, the rows that are written, of (first, count, settled)
    ([0, 1], [(2, 8, None)]),
    ([8, 9], [(0, 8, None)]),
    ([0, 9], [(1, 8, None)]),
    ([4], [(0, 10, 1 << 4)]),
    ([0, 2, 9], [(1, 8, 1 << 1)]),
    ([*range(0, 10, 2)], [(1, 9, 0b010101010)]),
    ([*range(9)], [(9, 1, None)]),
    ([*range(10)], []),
    ([100, -5], [(0, 10, None)]),
]


@pytest.mark.parametrize("settled, rows", SETTLED_MEANWHILE, ids=str)
def test_messages_settled_before_their_commit_are_not_written(
    tmp_path: Path, settled: list[int], rows: list[tuple[int, int, int | None]]
) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.commit()
        disk.gate.clear()
        disk.waiting.clear()
        one.store.put("kind", "key", b"so that a commit is under way")
        one.store.flush()
        assert disk.waiting.wait(20)
        told: list[Outcome] = []
        one.store.append(log, 0, messages(*numbered(0, 10)), told.append)
        one.store.flush()
        one.store.settle(log, settled)
        one.store.flush()
        disk.gate.set()
        one.commit()
        assert told == [ACCEPTED]
        live = sorted(set(range(10)) - set(settled))
        assert one.store.figures.messages == len(live)
        assert one.read_from(log, 0, 100) == [(at, b"%d" % at) for at in live]
    again = opened(tmp_path)
    found = again.rows(log_of(again))
    assert [
        (row.first, row.count, row.settled and int.from_bytes(row.settled, "little")) for row in found
    ] == rows
    assert content(again, log_of(again)) == [(at, b"%d" % at) for at in live]
    again.close()


def test_an_append_behind_one_that_is_wholly_settled_is_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    log = store.log("queue", "q")
    store.append(log, 0, messages(b"a", b"b"), accepted)
    store.settle(log, [0, 1])
    store.append(log, 2, messages(b"c"), accepted)
    store.settle(log, [1])
    store.close()
    again = opened(tmp_path)
    assert content(again, log_of(again)) == [(2, b"c")]
    again.close()


def test_outcomes_come_in_order_and_in_one_call(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.commit()
        disk.gate.clear()
        disk.waiting.clear()
        one.store.put("kind", "key", b"")
        one.store.flush()
        assert disk.waiting.wait(PATIENCE_SECS)  # so that all others are in one group
        order: list[int] = []
        for number in range(50):
            one.store.append(log, number, messages(b"x"), lambda _, number=number: order.append(number))  # type: ignore[misc]
            one.store.flush()
        disk.gate.set()
        before = one.loop.calls
        one.loop.run_until(lambda: order)
        assert order == list(range(50))
        assert one.loop.calls - before <= 2  # the first commit's own, and this


def test_logs_are_dropped_with_their_messages(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log, other = one.store.log("queue", "q"), one.store.log("queue", "other")
        one.append(log, 0, *numbered(0, 3))
        one.append(other, 0, b"stays")
        one.store.settle(log, [1])
        one.store.append(log, 3, messages(b"goes too"), accepted)
        one.store.drop(log)
        one.store.drop(log)
        one.store.append(log, 4, messages(b"comes too late"), accepted)
        one.store.settle(log, [0])
        new = one.store.log("queue", "q")
        assert new.id != log.id
        assert one.commit() is ACCEPTED
        one.append(new, 0, b"new")
        assert one.read_from(log, 0, 10) == []
    again = opened(tmp_path)
    assert {one.name: content(again, one) for one in again.logs()} == {
        "other": [(0, b"stays")],
        "q": [(0, b"new")],
    }
    again.close()


def test_tags_come_back_and_keep_messages_apart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    log = store.log("queue", "q")
    for first, tag in enumerate([b"", b"", b"red", b"red", b""]):
        store.append(log, first, messages(b"%d" % first), accepted, tag=tag)
    store.close()
    again = opened(tmp_path)
    log = log_of(again)
    assert [row.count for row in again.rows(log)] == [2, 2, 1]
    found: list[Stored] = []
    again.read_from(log, 1, found.extend, messages_max=3, bytes_max=10_000)
    assert [(at, tag) for at, _, tag in found] == [(1, b""), (2, b"red"), (3, b"red")]
    again.close()


def test_transient_messages_are_gone_after_a_restart(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, *numbered(0, 3))
        one.store.append(log, 3, messages(*numbered(3, 6)), accepted, tag=TRANSIENT)
        one.append(log, 6, b"6")
        one.store.settle(log, [4])
        one.commit()
        assert [at for at, _ in one.read_from(log, 0, 100)] == [0, 1, 2, 3, 5, 6]
    again = opened(tmp_path)
    log = log_of(again)
    assert [at for at, _ in content(again, log)] == [0, 1, 2, 6]
    again.append(log, 3, messages(b"new"), accepted)
    again.close()
    third = opened(tmp_path)
    assert [at for at, _ in content(third, log_of(third))] == [0, 1, 2, 3, 6]
    assert third._database.connection.execute("SELECT count(*) FROM settled").fetchone() == (0,)
    third.close()


def test_the_extent_of_a_log(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        assert one.store.extent(log) == (0, 0, 0, 0)
        one.append(log, 5, b"a", b"bc")
        one.append(log, 10, b"def")
        one.store.settle(log, [5])
        one.commit()
    again = opened(tmp_path)
    log = log_of(again)
    assert again.extent(log) == (5, 11, 2, 6 + 3 * MESSAGE_BYTES)
    again.settle(log, range(11))
    again.close()
    third = opened(tmp_path)
    assert third.extent(log_of(third)) == (0, 0, 0, 0)
    third.close()


@pytest.mark.parametrize(
    "messages_max, bytes_max, positions",
    [(1, 100, 2), (2, 100, 2), (3, 100, 4), (100, 3, 4), (100, 1, 2), (9, 9, 6)],
)
def test_reading_is_bounded_by_messages_and_bytes(
    tmp_path: Path, messages_max: int, bytes_max: int, positions: int
) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        for first in (0, 2, 4):
            one.append(log, first, b"a", b"b")
        found: list[list[Stored]] = []
        most = bytes_max * (1 + MESSAGE_BYTES)
        one.store.read_from(log, 0, found.append, messages_max=messages_max, bytes_max=most)
        one.store.flush()
        one.loop.run_until(lambda: found)
        assert [at for at, _, _ in found[0]] == list(range(positions))


def test_a_store_is_congested_while_too_much_waits_for_the_disk(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory(), pending_bytes_max=10 + MESSAGE_BYTES) as one:
        log = one.store.log("queue", "q")
        disk.gate.clear()
        told: list[Outcome] = []
        seen = []
        for first, body in enumerate([b"x" * 10, b"x"]):
            one.store.append(log, first, messages(body), told.append)
            one.store.flush()
            seen.append(one.store.congested)
        disk.gate.set()
        one.loop.run_until(lambda: len(told) == 2)
        assert [*seen, one.store.congested] == [False, True, False]
        assert (one.store.figures.pending, one.store.figures.pending_bytes) == (0, 0)


def test_appends_out_of_order_are_stored_in_order(tmp_path: Path) -> None:
    store = opened(tmp_path)
    log = store.log("queue", "q")
    store.append(log, 20, messages(*numbered(20, 25)), accepted)
    store.append(log, 0, messages(*numbered(0, 5)), accepted)
    store.settle(log, [1, 22])
    store.append(log, 10, messages(*numbered(10, 15)), accepted)
    store.settle(log, [4, 10])
    store.close()
    again = opened(tmp_path)
    again.append(log_of(again), 7, messages(b"7"), accepted)
    again.close()
    third = opened(tmp_path)
    live = [0, 2, 3, 7, 11, 12, 13, 14, 20, 21, 23, 24]
    assert content(third, log_of(third)) == [(at, b"%d" % at) for at in live]
    third.close()


def test_messages_of_a_log_that_is_dropped_at_once_are_not_written(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        one.commit()
        told: list[Outcome] = []
        one.store.append(log, 0, messages(b"a"), told.append)
        one.store.drop(log)
        one.commit()
        assert told == [ACCEPTED]
        assert one.store.figures.messages == 0
        brief = one.store.log("queue", "brief")
        commits = one.store.figures.commits
        one.store.append(brief, 0, messages(b"a"), accepted)
        one.store.drop(brief)
        one.commit()
        assert one.store.figures.commits == commits


def test_a_group_forgets_what_was_appended_before_the_log_was_dropped(tmp_path: Path) -> None:
    store = opened(tmp_path)
    database = store._database
    group = Group(database.index, database.letters)
    kept, gone = Log(1, "queue", "kept"), Log(2, "queue", "gone")
    for log in (kept, gone):
        group.append(log, 0, messages(b"a"), 1, b"", accepted)
    group.drop(gone)
    assert [run.log for run in group.runs()] == [kept.id]
    store.close()


def test_what_a_dropped_log_left_is_cleared_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.database.GARBAGE_MAX", 10)
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        for at in range(0, 100, 2):
            one.store.append(log, at, messages(b"x"), accepted)
        one.commit()
        one.store.settle(log, [])
        one.store.drop(log)
        one.commit()
        one.store.put("kind", "key", b"")
        one.commit()
    again = opened(tmp_path)
    database = again._database
    assert 0 < len(database.garbage) < 50
    while database.tidy():
        pass
    assert database.connection.execute("SELECT count(*) FROM rows").fetchone() == (0,)
    assert again.log("queue", "new").id > log.id
    again.close()


def test_a_barrier_with_nothing_before_it_touches_no_disk(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        before = disk.commits
        assert one.commit() is ACCEPTED
        assert disk.commits == before


def test_reading_on_from_a_position(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        for first in (0, 4, 8, 20):
            one.append(log, first, *numbered(first, first + 4))
        one.store.settle(log, [5, *range(8, 12)])
        assert [at for at, _ in one.read_from(log, 2, 3)] == [2, 3, 4, 6, 7]
        assert [at for at, _ in one.read_from(log, 2, 5)] == [2, 3, 4, 6, 7]
        assert [at for at, _ in one.read_from(log, 2, 2)] == [2, 3]
        assert [at for at, _ in one.read_from(log, 5, 4)] == [6, 7, 20, 21, 22, 23]
        assert [at for at, _ in one.read_from(log, 12, 1)] == [20, 21, 22, 23]
        assert one.read_from(log, 24, 1) == []
        assert one.read_from(one.store.log("queue", "empty"), 0, 1) == []


def test_a_damaged_row_is_told_and_left_out(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, b"one")
        one.append(log, 1, b"two")
        one.store.put("kind", "key", Message(TOPIC, b"retained"))
        one.store.add_letters(messages(b"dead"), "route", ACCEPTED)
    store = opened(tmp_path)
    for table, column in (("rows", "messages"), ("things", "value"), ("dead_letters", "message")):
        store._database.connection.execute(
            f"UPDATE {table} SET {column} = zeroblob(40)" + " WHERE first = 0" * (table == "rows")
        )
    store.close()
    with Opened(tmp_path) as one:
        assert one.read_from(log_of(one.store), 0, 9) == [(1, b"two")]
        found: list[list[StoredDeadLetter]] = []
        one.store.newest_letters(9, found.append)
        one.store.flush()
        one.loop.run_until(lambda: found)
        assert found == [[]]
        one.loop.run_until(lambda: len(one.damage) == 2)
        assert all("cannot be read" in text for text in one.damage)
        assert one.store.figures.damaged == 2
    last = opened(tmp_path)
    assert list(last.records("kind")) == []
    assert last.figures.damaged == 1
    last.close()


def test_closing_commits_what_has_gathered(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    told: list[Outcome] = []
    log = one.store.log("queue", "q")
    one.store.append(log, 0, messages(b"a"), told.append)
    one.store.close()
    one.store.close()
    one.loop.run_until(lambda: told)
    assert told == [ACCEPTED]
    again = opened(tmp_path)
    assert content(again, log_of(again)) == [(0, b"a")]
    again.close()


def test_space_comes_back(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, *[b"x" * 10_000] * 300)
        one.store.settle(log, range(300))
        one.commit()
    assert (tmp_path / "gateway.db").stat().st_size < 200_000
    assert not (tmp_path / "gateway.db-wal").exists()


@pytest.mark.parametrize("taken", [True, False])
def test_what_moves_to_another_log_leaves_its_own_with_that_commit(tmp_path: Path, taken: bool) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        source, target = one.store.log("queue", "q"), one.store.log("queue", "other")
        one.append(source, 0, *numbered(0, 3))
        disk.fault = "" if taken else "disk is full"
        told: list[Outcome] = []
        one.store.append(target, 0, messages(b"1"), told.append)
        one.store.settle_beside(source, (1,))
        one.store.flush()
        one.loop.run_until(lambda: told)
        assert (told[0] is ACCEPTED) is taken
        if not taken:
            one.store.settle_beside(source, (2,))  # while nothing is taken nothing moves
            disk.fault = ""
            one.until_healthy(True)
    store = opened(tmp_path)
    left = [(0, b"0"), (2, b"2")] if taken else [(0, b"0"), (1, b"1"), (2, b"2")]
    assert content(store, log_of(store)) == left
    assert content(store, log_of(store, "other")) == ([(0, b"1")] if taken else [])
    store.close()


def test_what_is_settled_on_disk_is_not_written_again(tmp_path: Path) -> None:
    """As when messages moved to another log, and are settled when that is known."""
    with Opened(tmp_path) as opened:
        one, other = opened.store.log("queue", "one"), opened.store.log("queue", "other")
        opened.append(one, 0, *numbered(0, 3))
        opened.store.settle_beside(one, [1])
        opened.append(other, 0, b"1")
        commits = opened.store.figures.commits
        opened.store.settle(one, [1])
        opened.commit()
        assert opened.store.figures.commits == commits
        opened.store.settle(one, [1, 2])
        opened.commit()
        assert opened.store.figures.commits == commits + 1
        assert opened.read_from(one, 0, 9) == [(0, b"0")]


def test_a_message_that_moves_and_is_settled_at_once_leaves_its_log(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        source, target = one.store.log("queue", "q"), one.store.log("queue", "other")
        one.append(source, 0, *numbered(0, 2))
        one.store.append(target, 0, messages(b"0"), accepted)
        one.store.settle_beside(source, (0,))
        one.store.settle(target, (0,))
        assert one.commit() is ACCEPTED
    store = opened(tmp_path)
    assert content(store, log_of(store)) == [(1, b"1")]
    store.close()


@pytest.mark.parametrize("before", [True, False], ids=["written before", "new"])
def test_a_log_has_another_name(tmp_path: Path, before: bool) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("session", "q")
        if before:
            one.append(log, 0, b"old")
        one.store.rename(log, "ended", "was q")
        again = one.store.log("session", "q")
        one.append(again, 0, b"new")
        one.append(log, 1, b"more")
    store = opened(tmp_path)
    assert {(log.kind, log.name) for log in store.logs()} == {("session", "q"), ("ended", "was q")}
    assert [body for _, body in content(store, log_of(store))] == [b"new"]
    assert [body for _, body in content(store, log_of(store, "was q"))] == [b"old"] * before + [b"more"]
    store.rename(log_of(store, "was q"), "ended", "again")
    store.drop(log_of(store, "again"))
    store.close()
    store = opened(tmp_path)
    assert [log.name for log in store.logs()] == ["q"]
    store.close()

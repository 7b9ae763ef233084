"""Large rows beside the database: each is where the database says, whole, and nobody writes over it."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.errors import StoreError
from gateway.model.outcome import ACCEPTED
from gateway.store.heap import BLOCK, KEPT_BYTES, Heap, RowPlace
from gateway.store.repair import check, repair
from tests.store.parts import Opened, content, log_of, opened

LARGE = 200_000


def size(folder: Path) -> int:
    return (folder / "gateway.heap").stat().st_size


def of(row: int) -> bytes:
    """What a row has: as many bytes as only it has."""
    return bytes([row % 251]) * (row * 7_919 % 30_000 + 1)


def act(heap: Heap, rows: list[int], rng: random.Random, row: int) -> None:
    chance = rng.random()
    if chance < 0.5:
        data = of(row)
        cut = rng.randrange(len(data))
        heap.write(row, [data[:cut], data[cut:]])
        rows.append(row)
    elif chance < 0.9 and rows:
        heap.free(rows.pop(rng.randrange(len(rows))))
    else:
        before = dict(heap.places)
        former = heap.move()
        assert all(heap.places[one].at < before[one].at for one in former)
        heap.finish_move(former, committed=rng.random() < 0.7)


@pytest.mark.parametrize("seed", range(10))
def test_any_history(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    heap = Heap(tmp_path, {})
    rows: list[int] = []
    for row in range(400):
        act(heap, rows, rng, row)
        if rng.random() < 0.05:
            heap.shorten(0)
            last = max(heap.places.values(), default=RowPlace(0, 0))
            assert last.at + last.byte_count <= size(tmp_path) <= last.end
        if rng.random() < 0.05:  # as after a restart
            places = heap.places
            heap.close()
            heap = Heap(tmp_path, places)
        assert sorted(heap.places) == sorted(rows)
        ordered = sorted(heap.places.values())
        assert all(one.end <= other.at for one, other in pairwise(ordered))
        assert all(heap.read(one) == of(one) for one in rng.sample(rows, min(len(rows), 5)))
    for one in rows:
        assert heap.read(one) == of(one)
        heap.free(one)
    heap.shorten(0)
    assert size(tmp_path) == 0
    heap.close()


def test_what_is_free_is_used_again(tmp_path: Path) -> None:
    with closing(Heap(tmp_path, {})) as heap:
        for row in range(10):
            heap.write(row, [bytes(BLOCK)])
        heap.free(3)
        heap.free(4)
        assert heap.write(11, [bytes(BLOCK + 1)]) == RowPlace(3 * BLOCK, BLOCK + 1)
        assert heap.write(12, [bytes(1)]).at == 10 * BLOCK


def test_a_row_of_many_parts_and_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [b"%d" % number for number in range(3_000)]
    whole: Callable[[int, list[bytes], int], int] = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, some, at: whole(file, [b"".join(some)[:1_500]], at))
    with closing(Heap(tmp_path, {})) as heap:
        heap.write(1, parts)
        assert heap.read(1) == b"".join(parts)


def test_rows_in_one_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="two rows refer to byte 4096"):
        Heap(tmp_path, {1: RowPlace(0, 5_000), 2: RowPlace(4_096, 100)})


def filled(folder: Path, count: int = 10) -> None:
    with Opened(folder) as one:
        log = one.store.log("queue", "q")
        for number in range(count):
            assert one.append(log, number, b"%d" % number + bytes(LARGE)) is ACCEPTED


def test_large_messages_do_not_swell_the_database(tmp_path: Path) -> None:
    filled(tmp_path)
    assert (tmp_path / "gateway.db").stat().st_size < LARGE < size(tmp_path) // 10 + BLOCK
    store = opened(tmp_path)
    assert [(at, body[:1], len(body)) for at, body in content(store, log_of(store))] == [
        (number, b"%d" % number, LARGE + 1) for number in range(10)
    ]
    store.close()


def test_space_comes_back_in_the_middle_of_a_long_life(tmp_path: Path) -> None:
    """Rows that stay move to the front, so that the disk gets back what is behind them."""
    count = 2 * KEPT_BYTES // 1_000_000
    kept = [number for number in range(count) if number % 10 == 9]
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        for number in range(count):
            one.append(log, number, b"%d" % number + bytes(1_000_000))
    before = size(tmp_path)
    assert before > count * 1_000_000
    store = opened(tmp_path)
    store.settle(log_of(store), [number for number in range(count) if number % 10 != 9])
    store.close()  # it is tidied once
    store = opened(tmp_path)
    while store._database.tidy():
        pass
    assert size(tmp_path) < before * 2 // 3
    assert [(at, int(body.rstrip(b"\0"))) for at, body in content(store, log_of(store))] == [
        (at, at) for at in kept
    ]
    store.close()
    assert size(tmp_path) < KEPT_BYTES
    store = opened(tmp_path)
    assert [at for at, _ in content(store, log_of(store))] == kept
    store.close()


def test_a_move_that_the_database_refuses_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    store = opened(tmp_path)
    store.settle(log_of(store), range(5))
    store.close()
    store = opened(tmp_path)
    database = store._database
    before = dict(database.heap.places)

    def refused(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patching:
        patching.setattr("gateway.store.database.insert", refused)
        with pytest.raises(sqlite3.OperationalError):
            database._move()
    assert database.heap.places == before
    assert database._move()
    assert max(database.heap.places.values()).end == 5 * RowPlace(0, LARGE + 99).end
    assert [at for at, _ in content(store, log_of(store))] == [5, 6, 7, 8, 9]
    store.close()


def test_a_move_that_the_disk_refuses_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had been copied before, too."""
    with closing(Heap(tmp_path, {})) as heap:
        for row in range(8):
            heap.write(row, [b"%d" % row * BLOCK])
        for row in range(4):
            heap.free(row)
        before = dict(heap.places)
        whole: Callable[[int, list[bytes], int], int] = os.pwritev
        left = [1]

        def full(file: int, parts: list[bytes], at: int) -> int:
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")
            left.pop()
            return whole(file, parts, at)

        with monkeypatch.context() as patching:
            patching.setattr(os, "pwritev", full)
            with pytest.raises(OSError, match="No space"):
                heap.move()
        assert heap.places == before
        heap.free(7)  # the one that had been copied
        assert heap.move().keys() == {4, 5, 6}
        assert [heap.read(row) for row in (4, 5, 6)] == [b"%d" % row * BLOCK for row in (4, 5, 6)]


def test_a_full_disk_is_said_and_costs_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Opened(tmp_path, probe_secs=0.01) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, b"0" * LARGE)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patching:
            patching.setattr(os, "pwritev", full)
            assert "the disk is full" in one.append(log, 1, b"1" * LARGE).text
        one.loop.run_until(lambda: one.health == [False, True])
        assert one.append(log, 1, b"1" * LARGE) is ACCEPTED
        places = one.store._database.heap.places.values()
        assert sorted(place.at for place in places) == [0, min(place.end for place in places)]


@pytest.mark.parametrize("harm", ["spoilt", "cut", "gone"])
def test_what_is_damaged_is_told_and_repaired(tmp_path: Path, harm: str) -> None:
    filled(tmp_path)
    path = tmp_path / "gateway.heap"
    if harm == "gone":
        path.unlink()
    else:
        with path.open("r+b") as file:
            if harm == "cut":
                file.truncate(LARGE)
            else:
                file.seek(5)
                file.write(b"?")
    left = {"spoilt": list(range(1, 10)), "cut": [], "gone": []}[harm]
    with Opened(tmp_path) as one:
        assert [at for at, _ in one.read_from(log_of(one.store), 0, 99)] == left
        one.loop.run_until(lambda: len(one.damage) == 10 - len(left))
    findings = check(tmp_path)
    assert (findings.messages, findings.logs["queue", "q"].messages) == (len(left), 10 - len(left))
    _, aside = repair(tmp_path)
    assert aside is not None
    assert (aside / "gateway.heap").exists()
    assert check(tmp_path).is_intact
    store = opened(tmp_path)
    assert [at for at, _ in content(store, log_of(store))] == left
    store.close()


def test_places_that_cannot_be_are_told(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)) as connection:
        connection.execute("UPDATE places SET at = 4096 WHERE row = 3")
    with pytest.raises(StoreError, match="two rows refer to byte 4096.*gateway store check"):
        opened(tmp_path)
    assert check(tmp_path).logs["queue", "q"].messages == 1
    repair(tmp_path)
    store = opened(tmp_path)
    assert len(content(store, log_of(store))) == 9
    store.close()

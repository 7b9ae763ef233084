"""Backups of a store in use: each is the store at one moment, complete, and sound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gateway.broker.spool import SPOOLED_BYTES_MIN, Spool
from gateway.errors import StoreError
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.store import backup as backing_up
from gateway.store.backup import back_up, restore
from gateway.store.copy_lock import is_store_copied
from gateway.store.heap import HEAP
from gateway.store.repair import check
from tests.store.parts import Opened, content, log_of, messages, opened

LARGE = 200_000


def body(number: int) -> bytes:
    return b"%08d" % number + bytes([number % 251]) * LARGE


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` when the database is copied, and the large rows are not yet."""
    copy = backing_up._copy_heap

    def copied(*arguments: object) -> None:
        monkeypatch.setattr(backing_up, "_copy_heap", copy)
        act()
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(backing_up, "_copy_heap", copied)


def restored(backup: Path, folder: Path) -> list[tuple[int, bytes]]:
    assert check(backup).is_intact
    restore(backup, folder)
    assert check(folder).is_intact
    store = opened(folder)
    try:
        return content(store, log_of(store))
    finally:
        store.close()


def test_large_rows_that_end_meanwhile_are_in_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Opened(tmp_path / "data") as one:
        log = one.store.log("queue", "q")
        for number in range(5):
            assert one.append(log, number, body(number)) is ACCEPTED

        def replace_all() -> None:
            one.store.settle(log, range(5))
            one.commit()
            for number in range(5, 10):
                assert one.append(log, number, body(number)) is ACCEPTED

        between(monkeypatch, replace_all)
        back_up(tmp_path / "data", tmp_path / "copy")
        assert one.read_from(log, 0, 10) == [(number, body(number)) for number in range(5, 10)]
    assert restored(tmp_path / "copy", tmp_path / "again") == [(n, body(n)) for n in range(5)]


def test_a_gateway_that_restarts_meanwhile_keeps_what_the_backup_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    one = Opened(folder)
    log = one.store.log("queue", "q")
    for number in range(5):
        one.append(log, number, body(number))

    def restart() -> None:
        one.store.settle(log, range(5))
        one.store.close()
        with Opened(folder) as two:
            for number in range(5, 10):
                assert two.append(log_of(two.store), number, body(number)) is ACCEPTED

    between(monkeypatch, restart)
    back_up(folder, tmp_path / "copy")
    assert restored(tmp_path / "copy", tmp_path / "again") == [(n, body(n)) for n in range(5)]


def test_the_place_is_used_again_after_the_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    with Opened(folder) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, body(0))

        def settle() -> None:
            one.store.settle(log, [0])
            one.commit()

        between(monkeypatch, settle)
        back_up(folder, tmp_path / "copy")
        for number in range(1, 4):
            one.append(log, number, body(number))
            one.store.settle(log, [number])
            one.commit()
    assert (folder / HEAP).stat().st_size == 0


def test_bodies_in_files_stay_until_the_backup_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    with Opened(folder) as one:
        one.append(one.store.log("queue", "q"), 0, body(0))
        spool = Spool(folder / "spool", bytes_max=1 << 30, memory_bytes_max=0, memory_total_max=0)
        file = spool.draft()
        file.write(bytes(SPOOLED_BYTES_MIN))
        name = file.name
        del file

        def bury() -> None:
            assert is_store_copied(folder / HEAP)
            spool.delete_unreferenced()
            assert (folder / "spool" / name).exists()

        between(monkeypatch, bury)
        back_up(folder, tmp_path / "copy")
        assert (tmp_path / "copy" / "spool" / name).stat().st_size == SPOOLED_BYTES_MIN
        spool.delete_unreferenced()
        assert not (folder / "spool" / name).exists()
        assert spool.used_bytes == 0
        spool.close()


def test_everything_is_copied_under_load(tmp_path: Path) -> None:
    """While rows come and go, each backup has a run of consecutive messages: one moment of the queue."""
    folder = tmp_path / "data"
    with Opened(folder) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, body(0))
        ended = threading.Event()
        made: list[BaseException | None] = []

        def back_up_often() -> None:
            try:
                for number in range(3):
                    back_up(folder, tmp_path / f"copy{number}")
                made.append(None)
            except BaseException as error:
                made.append(error)
            ended.set()

        thread = threading.Thread(target=back_up_often)
        thread.start()
        at = 0
        while not ended.is_set():
            at += 1
            size = LARGE if at % 3 else 10
            assert one.append(log, at, body(at)[:size]) is ACCEPTED
            if at > 5:
                one.store.settle(log, [at - 6])
        thread.join()
        assert made == [None]
    for number in range(3):
        found = restored(tmp_path / f"copy{number}", tmp_path / f"again{number}")
        positions = [position for position, _ in found]
        assert positions == list(range(positions[0], positions[-1] + 1))
        assert 1 <= len(positions) <= 8
        assert all(data[:8] == b"%08d" % position for position, data in found)


def test_other_things_are_in_the_copy(tmp_path: Path) -> None:
    with Opened(tmp_path / "data") as one:
        one.append(one.store.log("queue", "q"), 0, b"x")
        one.store.put("session", b"c", b"{}")
        one.store.add_letters(messages(b"dead"), "route", Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "none"))
        one.commit()
        back_up(tmp_path / "data", tmp_path / "copy")
    assert restored(tmp_path / "copy", tmp_path / "again") == [(0, b"x")]
    assert check(tmp_path / "again").rows == {**check(tmp_path / "data").rows}


def test_a_stopped_store_is_copied_and_nothing_is_left_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with Opened(folder) as one:
        one.append(one.store.log("queue", "q"), 0, b"x")
    before = sorted(folder.iterdir())
    back_up(folder, tmp_path / "copy")
    assert sorted(folder.iterdir()) == before
    with closing(opened(folder)) as store:
        assert content(store, log_of(store)) == [(0, b"x")]


def test_an_interrupted_backup_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Opened(tmp_path / "data") as one:
        one.append(one.store.log("queue", "q"), 0, body(0))

        def fail() -> None:
            raise OSError(28, "No space left on device")

        between(monkeypatch, fail)
        with pytest.raises(StoreError, match="cannot be copied to .*No space left"):
            back_up(tmp_path / "data", tmp_path / "copy")
    with pytest.raises(StoreError, match="no store in"):
        restore(tmp_path / "copy", tmp_path / "again")


def test_used_folders_are_refused(tmp_path: Path) -> None:
    with Opened(tmp_path / "data") as one:
        one.append(one.store.log("queue", "q"), 0, b"x")
        back_up(tmp_path / "data", tmp_path / "copy")
        with pytest.raises(StoreError, match="copy is not empty: give a new folder"):
            back_up(tmp_path / "data", tmp_path / "copy")
        with pytest.raises(StoreError, match="is used by another gateway"):
            restore(tmp_path / "copy", tmp_path / "data")
    with pytest.raises(StoreError, match="contains a store .gateway.db"):
        restore(tmp_path / "copy", tmp_path / "data")
    with pytest.raises(StoreError, match="no store in"):
        back_up(tmp_path / "nothing", tmp_path / "new")

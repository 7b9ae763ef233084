"""A disk that is full or fails: messages are refused, nothing else is lost, and it recovers by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.store.group import Group
from tests.store.journal.samples import until
from tests.store.parts import Disk, Opened, content, log_of, messages, numbered, opened

FULL = "disk is full"


def refused(outcome: Outcome, text: str = FULL) -> None:
    assert outcome[:2] == (Verdict.RELEASED, Reason.STORE)
    assert text in outcome.text


def note(told: list[tuple[int, Outcome]], position: int, outcome: Outcome) -> None:
    told.append((position, outcome))


@pytest.mark.parametrize("fault", [FULL, "disk I/O error"])
def test_a_failed_commit_refuses_its_messages_and_keeps_all_else(tmp_path: Path, fault: str) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log, gone = one.store.log("queue", "q"), one.store.log("queue", "gone")
        one.append(log, 0, *numbered(0, 10))
        one.store.put("kind", "old", b"")
        one.commit()
        disk.fault = fault
        order: list[str] = []
        one.store.append(log, 10, messages(b"lost"), lambda outcome: order.append(f"first {outcome.reason}"))
        one.store.settle(log, [0, 5, 10])
        one.store.put("kind", "new", b"value")
        one.store.delete("kind", "old")
        one.store.drop(gone)
        new = one.store.log("queue", "new")
        one.store.add_letters(messages(b"dead"), "route", Outcome(Verdict.REJECTED, Reason.HOPS))
        one.store.append(log, 11, messages(b"lost too"), lambda outcome: order.append("second"))
        refused(one.commit(), fault)
        assert order == ["first Reason.STORE", "second"]
        one.until_healthy(False)
        assert one.store.failure == fault
        refused(one.append(log, 12, b"refused at once"), fault)
        one.store.settle(log, [1, 12])
        one.store.put("kind", "later", b"value")
        refused(one.commit(), fault)
        disk.fault = ""
        one.until_healthy(True)
        assert one.store.failure == ""
        assert one.append(log, 12, b"taken") is ACCEPTED
        assert one.append(new, 0, b"new") is ACCEPTED
        assert one.store.figures.refused == 3
        assert one.store.figures.pending == 0
        assert one.health == [False, True]
    again = opened(tmp_path)
    log = log_of(again)
    kept = [(at, b"%d" % at) for at in range(10) if at not in (0, 1, 5)]
    assert content(again, log) == [*kept, (12, b"taken")]
    assert content(again, log_of(again, "new")) == [(0, b"new")]
    assert [log.name for log in again.logs()] == ["q", "new"]
    assert dict(again.records("kind")) == {"new": b"value", "later": b"value"}
    assert again.letters_count == 1
    again.close()


def test_what_the_loop_hands_in_before_it_has_heard_of_a_failure_is_refused(tmp_path: Path) -> None:
    """The disk fails once, and takes everything again before the loop knows: nothing is overtaken."""
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory(), probe_secs=0.001) as one:
        log = one.store.log("queue", "q")
        one.commit()
        told: list[tuple[int, Outcome]] = []
        disk.fault = FULL
        for position in range(3):
            one.store.append(log, position, messages(b"x"), partial(note, told, position))
            one.store.flush()
            until(lambda: one.store.figures.failures > 0)
            disk.fault = ""
        assert not one.health, "the loop has run nothing yet"
        one.until_healthy(True)
        assert [at for at, _ in told] == [0, 1, 2]
        for _, outcome in told:
            refused(outcome)
        assert one.health == [False, True]
        assert one.append(log, 3, b"taken") is ACCEPTED
        assert one.read_from(log, 0, 9) == [(3, b"taken")]


def test_when_it_is_healthy_again_all_refusals_have_been_told(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.commit()
        disk.fault = FULL
        refused(one.append(log, 0, b"x"))
        one.until_healthy(False)
        told: list[Outcome] = []
        one.store.append(log, 1, messages(b"y"), told.append)
        assert not told, "not within the call"
        disk.fault = ""
        one.until_healthy(True)
        refused(told[0])
        assert (one.store.figures.refused, one.store.figures.pending) == (2, 0)


def test_a_value_beside_messages_goes_with_them(tmp_path: Path) -> None:
    """Whenever the process ends: the value is not on disk without the messages."""
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.store.put("seen", "before", b"old")
        one.store.put_with_messages("seen", "stored", b"1")
        assert one.append(log, 0, b"stored") is ACCEPTED
        disk.fault = FULL
        one.store.put_with_messages("seen", "refused", b"1")
        one.store.put_with_messages("seen", "before", b"new")
        one.store.put("seen", "alone", b"1")
        refused(one.append(log, 1, b"refused"))
        one.until_healthy(False)
        one.store.put_with_messages("seen", "refused at once", b"1")
        refused(one.append(log, 2, b"refused at once"))
        disk.fault = ""
        one.until_healthy(True)
    again = opened(tmp_path)
    assert dict(again.records("seen")) == {"stored": b"1", "alone": b"1"}
    again.close()


def test_a_value_is_stored_only_if_the_messages_beside_it_are_refused(tmp_path: Path) -> None:
    """Whenever the process ends: one of the old value, the message and the new value is on disk."""
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        for name in ("first", "second"):
            one.store.put("will", f"old {name}", b"1")
        one.store.delete("will", "old first")
        one.store.put_if_refused("will", "new first", b"1")
        assert one.append(log, 0, b"stored") is ACCEPTED
        disk.fault = FULL
        one.store.delete("will", "old second")
        one.store.put_if_refused("will", "new second", b"1")
        one.store.put_if_refused("will", "settled before", b"1")
        one.store.delete("will", "settled before")
        refused(one.append(log, 1, b"refused"))
        one.until_healthy(False)
        one.store.put_if_refused("will", "at once", b"1")
        refused(one.append(log, 2, b"refused at once"))
        disk.fault = ""
        one.until_healthy(True)
    again = opened(tmp_path)
    assert dict(again.records("will")) == {"new second": b"1", "at once": b"1"}
    again.close()


def test_positions_of_refused_messages_can_be_used_again(tmp_path: Path) -> None:
    """A settlement of a message that was refused is not one of the message that comes in its place."""
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.commit()
        disk.fault = FULL
        refused(one.append(log, 0, b"refused"))
        one.store.settle(log, [0])
        one.commit()
        disk.fault = ""
        one.until_healthy(True)
        assert one.append(log, 0, b"kept") is ACCEPTED
        assert one.read_from(log, 0, 9) == [(0, b"kept")]


def test_reading_goes_on_and_leaves_out_what_is_settled(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, b"a", b"b")
        disk.fault = FULL
        one.store.settle(log, [0])
        one.commit()
        assert one.read_from(log, 0, 9) == [(1, b"b")]
        disk.fault = ""


def test_nothing_to_write_is_accepted_even_then(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        log = one.store.log("queue", "q")
        one.commit()
        disk.fault = FULL
        refused(one.append(log, 0, b"x"))
        one.until_healthy(False)
        assert one.commit() is ACCEPTED
        disk.fault = ""


def test_the_disk_is_asked_again_and_again(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory(), probe_secs=0.001) as one:
        disk.fault = FULL
        one.store.put("kind", "key", b"")
        one.commit()
        while one.store.figures.failures < 5:
            one.commit()
        assert one.health == [False]
        disk.fault = ""
        one.until_healthy(True)


def test_letters_that_wait_for_the_disk_are_bounded(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory(), letters_max=3) as one:
        disk.fault = FULL
        for number in range(10):
            one.store.add_letters(messages(b"%d" % number), "", Outcome(Verdict.REJECTED, Reason.HOPS))
            one.commit()
        disk.fault = ""
        one.until_healthy(True)
        assert one.store.letters_count == 3


def test_closing_tries_once_more(tmp_path: Path) -> None:
    disk = Disk()
    one = Opened(tmp_path, factory=disk.factory(), probe_secs=1000.0)
    log = one.store.log("queue", "q")
    one.append(log, 0, b"a")
    disk.fault = FULL
    one.store.settle(log, [0])
    one.commit()
    one.until_healthy(False)
    disk.fault = ""
    one.store.close()
    again = opened(tmp_path)
    assert again.rows(log_of(again)) == []
    again.close()


def test_closing_on_a_full_disk_ends(tmp_path: Path) -> None:
    disk = Disk()
    one = Opened(tmp_path, factory=disk.factory())
    log = one.store.log("queue", "q")
    one.append(log, 0, b"a")
    disk.fault = FULL
    one.store.settle(log, [0])
    one.store.close()
    again = opened(tmp_path)
    assert content(again, log_of(again)) == [(0, b"a")]
    again.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_refuses_and_never_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        one.commit()

        def bug(group: Group) -> None:
            raise ZeroDivisionError("a bug")

        one.store._calls.append((bug,))
        told: list[Outcome] = []
        one.store.append(log, 0, messages(b"with it"), told.append)
        one.store.flush()
        one.until_healthy(False)
        refused(one.append(log, 1, b"after it"), "a bug")
        one.loop.run_until(lambda: told)
        refused(told[0], "a bug")
        assert "a bug" in one.store.failure
        assert (one.store.figures.pending, one.store.figures.pending_bytes) == (0, 0)


class SmallDisk:
    """A file system of 4 MB in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave nothing."""
        with self.ballast.open("wb", buffering=0) as file:
            for size in (65_536, 4_096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


RESERVE = 524_288


@pytest.mark.parametrize("count, byte_count", [(50, 1000), (1, 20_000), (1, 100), (1, 400_000)])
def test_a_full_disk_refuses_and_recovers_by_consuming(
    small_disk: SmallDisk, count: int, byte_count: int
) -> None:
    """Appends of `count` bodies, each a row of its own, for no position follows on the last one."""
    folder = small_disk.folder / "data"
    with Opened(folder, reserve_bytes=RESERVE) as one:
        log = one.store.log("queue", "q")
        one.commit()
        taken: list[range] = []
        while True:
            first = len(taken) * (count + 1)
            told: list[Outcome] = []
            for _ in range(100 if byte_count < 1000 else 1):
                one.store.append(log, first, messages(*[b"x" * byte_count] * count), told.append)
                taken.append(range(first, first + count))
                first += count + 1
            one.commit()
            if told[0] is not ACCEPTED:
                break
        refused(told[0])
        del taken[-len(told) :]
        positions = [position for run in taken for position in run]
        one.loop.run_until(lambda: one.health)
        assert one.health[0] is False  # for a moment only, if less than these messages still fits
        assert [at for at, _ in one.read_from(log, 0, 1 << 30)] == positions
        for run in taken:
            one.store.settle(log, run)
            one.store.flush()
        while one.commit() is not ACCEPTED:  # healthy for a while, until too much is settled at a time
            one.until_healthy(True)
        one.until_healthy(True)
        assert one.append(log, first, b"there is space again") is ACCEPTED
    again = opened(folder, reserve_bytes=RESERVE)
    assert content(again, log_of(again)) == [(first, b"there is space again")]
    again.close()


def test_a_disk_that_others_fill_loses_nothing(small_disk: SmallDisk) -> None:
    folder = small_disk.folder / "data"
    with Opened(folder, reserve_bytes=RESERVE) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, *numbered(0, 100))
        small_disk.fill()
        last = 100
        while one.append(log, last, *[b"x" * 1000] * 10) is ACCEPTED:
            last += 10
        one.store.settle(log, range(50))
        one.store.put("kind", "key", b"value")
        one.commit()
        one.until_healthy(False)
        small_disk.ballast.unlink()
        one.until_healthy(True)
        assert one.append(log, last, b"more") is ACCEPTED
    again = opened(folder, reserve_bytes=RESERVE)
    assert [at for at, _ in content(again, log_of(again))] == list(range(50, last + 1))
    assert dict(again.records("kind")) == {"key": b"value"}
    again.close()


def test_a_gateway_starts_on_a_full_disk_and_lets_it_be_consumed(small_disk: SmallDisk) -> None:
    folder = small_disk.folder / "data"
    with Opened(folder, reserve_bytes=RESERVE) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, *numbered(0, 100))
    small_disk.fill()
    with Opened(folder, reserve_bytes=RESERVE) as one:
        log = log_of(one.store)
        assert not one.store.healthy
        refused(one.append(log, 100, b"no"))
        assert len(one.read_from(log, 0, 100)) == 100
        one.store.settle(log, range(100))
        one.commit()
        os.unlink(small_disk.ballast)
        one.loop.run_until(lambda: one.health == [True])
        assert one.append(log, 100, b"yes") is ACCEPTED
    again = opened(folder, reserve_bytes=RESERVE)
    assert content(again, log_of(again)) == [(100, b"yes")]
    again.close()

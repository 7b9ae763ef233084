"""The writer: batching, the backlog, disks that are slow, full and well again, readers beside it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from json import loads
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.times import Monotonic
from gateway.protocols import DIALECTS
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.column_buffers import Gathering
from gateway.store.journal.reader import Gap, JournalReader
from gateway.store.journal.writer import JournalOptions
from tests.store.journal.samples import (
    HOME,
    UP,
    message,
    numbers_of,
    rows_of,
    until,
    whole,
    whole_block,
    write,
    writer,
)

PATIENT = JournalOptions(flush_interval_secs=60.0)
mqtt_set = DIALECTS["mqtt"].property_set
QUICK = JournalOptions(flush_interval_secs=0.001, retry_secs=0.001)


class Disk:
    """Stands for os.pwritev: it can refuse, take only some bytes of each write, or keep one waiting."""

    def __init__(self) -> None:
        self.full = False
        self.bytes_max: int | None = None
        self.refusals = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.waits = threading.Event()

    def __call__(self, file: int, pieces: Sequence[bytes], offset: int) -> int:
        if not self.go_on.is_set():
            self.waits.set()
            assert self.go_on.wait(20)
        data = b"".join(pieces)
        if self.full:
            self.refusals += 1
            os.pwrite(file, data[: len(data) // 2], offset)  # and half of it is on the disk all the same
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(file, data[: self.bytes_max], offset)


def test_times_are_utc(tmp_path: Path) -> None:
    made = writer(tmp_path, options=PATIENT, clock=lambda: 500.0, utc=lambda: 1_700_000_000.0)
    made.record(HOME, [message(0)], ACCEPTED, Monotonic(499.75))
    made.close()
    (row,) = rows_of(tmp_path)
    assert (row["received"], row["settled"]) == (1_699_999_999_750_000, 1_700_000_000_000_000)


def test_properties_that_fill_a_memory_end_a_block(tmp_path: Path) -> None:
    """Where each message says something new the next block is not looked through, but for the first."""
    made = writer(tmp_path, options=JournalOptions(flush_interval_secs=60.0, flush_rows=100))
    texts = [f"{at:08d}" * 3_750 for at in range(160)]  # 30 000 bytes each
    for begin in range(0, len(texts), 10):
        some = [
            message(at, property_set=mqtt_set(b"\x03" + len(text).to_bytes(2, "big") + text.encode()))
            for at, text in enumerate(texts[begin : begin + 10], begin)
        ]
        made.record(HOME, some, ACCEPTED, Monotonic(time.monotonic()))
    made.close()
    blocks = [whole_block(item) for item in JournalReader(tmp_path).blocks("0")]
    assert [block.header.rows for block in blocks] == [100, 40, 20]
    assert [bool(block.entries("properties").indices) for block in blocks] == [True, False, False]
    assert [loads(row["properties"])["content_type"] for row in rows_of(tmp_path)] == texts


def test_the_rows_of_one_message_have_the_same_time_and_slot(tmp_path: Path) -> None:
    """Its recipients settle one after the other, and meanwhile the two clocks drift a little apart; then UTC
    is set anew."""
    now, utc = 500.0, 1_700_000_000.0
    made = writer(tmp_path, options=PATIENT, clock=lambda: now, utc=lambda: utc)
    for ahead in (0.0, 0.004, -0.004, 3_600.0):
        now, utc = now + 1.0, utc + 1.0
        utc += ahead
        made.record(HOME, [message(7), message(8)], ACCEPTED, Monotonic(499.75), slots=[3, 5])
        if ahead == -0.004:
            made._flush()
        utc -= ahead if ahead < 1 else 0.0
    made.close()
    rows = rows_of(tmp_path)
    assert [row["slot"] for row in rows] == [3, 5] * 4
    assert len({row["received"] for row in rows}) == 1
    assert rows[6]["settled"] - rows[0]["settled"] == 3_603_000_000


def test_one_flush_is_one_block(tmp_path: Path) -> None:
    write(tmp_path, range(3), range(3, 4), range(4, 9), options=PATIENT)
    assert [at.header.rows for at in JournalReader(tmp_path).index("0") if not isinstance(at, Gap)] == [9]


def test_a_long_part_is_cut_into_blocks(tmp_path: Path) -> None:
    options = JournalOptions(flush_interval_secs=60.0, block_rows_max=4)
    write(tmp_path, range(3), range(3, 13), range(13, 14), options=options)
    rows = [at.header.rows for at in JournalReader(tmp_path).index("0") if not isinstance(at, Gap)]
    assert max(rows) == 4
    assert numbers_of(rows_of(tmp_path)) == list(range(14))


def test_large_bodies_make_small_blocks(tmp_path: Path) -> None:
    options = JournalOptions(flush_interval_secs=60.0, body_bytes_max=512 * 1_048_576)
    write(tmp_path, range(2), options=options)
    assert len(list(JournalReader(tmp_path).index("0"))) == 2


def test_enough_rows_become_columns_at_once(tmp_path: Path) -> None:
    made = writer(tmp_path, options=JournalOptions(flush_interval_secs=60.0, flush_rows=10))
    made.record(HOME, [message(n) for n in range(9)], ACCEPTED, Monotonic(time.monotonic()))
    assert made.backlog_bytes == 0
    made.record(HOME, [message(9)], ACCEPTED, Monotonic(time.monotonic()))
    assert (made.backlog_bytes > 0, made.backlog) == (True, 10)
    made.close()
    assert (made.backlog_bytes, made.backlog) == (0, 0)


def test_enough_bytes_wake_the_thread(tmp_path: Path) -> None:
    made = writer(tmp_path, options=PATIENT)
    made.record(HOME, [Message(topic_address("t"), bytes(65_536))] * 140, ACCEPTED, Monotonic(0.0))
    until(lambda: made.rows == 140)
    made.close()


def test_few_rows_are_written_soon(tmp_path: Path) -> None:
    made = writer(tmp_path, options=QUICK)
    made.record(HOME, [message(0)], ACCEPTED, Monotonic(time.monotonic()))
    until(lambda: made.rows == 1)
    made.record(HOME, [], ACCEPTED, Monotonic(0.0))
    made.close()
    assert (made.rows, made.blocks, made.next) == (1, 1, 1)
    assert made.byte_count == next(tmp_path.glob("*.gwj")).stat().st_size


def test_crossed_and_refused(tmp_path: Path) -> None:
    made = writer(tmp_path, options=PATIENT)
    sources = [message(0), message(1)]
    crossed = [Message(topic_address("there"), one.body) for one in sources]
    made.record(UP, crossed, ACCEPTED, Monotonic(0.0), sources)
    made.refuse(UP, sources[:1], Outcome(Verdict.REJECTED, Reason.HOPS, "a loop?"), Monotonic(0.0))
    made.close()
    rows = rows_of(tmp_path)
    assert [row["source_name"] for row in rows] == ["plant/0", "plant/1", "plant/0"]
    assert [row["target_name"] for row in rows] == ["there", "there", None]
    assert [row["outcome"] for row in rows] == ["accepted", "accepted", "rejected"]


@pytest.mark.parametrize("bytes_max", [1, 7, 500])
def test_a_disk_that_takes_little_at_a_time(tmp_path: Path, bytes_max: int) -> None:
    disk = Disk()
    disk.bytes_max = bytes_max
    write(tmp_path, range(20), range(20, 25), options=PATIENT, pwritev=disk)
    assert numbers_of(rows_of(tmp_path)) == list(range(25))


def test_a_slow_disk_costs_rows_and_says_so(tmp_path: Path) -> None:
    disk = Disk()
    disk.go_on.clear()
    options = JournalOptions(flush_interval_secs=0.001, flush_rows=20, backlog_bytes_max=100)
    made = writer(tmp_path, options=options, pwritev=disk)
    made.record(HOME, [message(n) for n in range(40)], ACCEPTED, Monotonic(time.monotonic()))
    assert disk.waits.wait(20)
    assert made.backlog_bytes > 100
    made.record(HOME, [message(n) for n in range(40, 90)], ACCEPTED, Monotonic(time.monotonic()))
    made.record(HOME, [message(n) for n in range(90, 120)], ACCEPTED, Monotonic(time.monotonic()))
    assert (made.backlog, made.dropped) == (40, 80)
    disk.go_on.set()
    until(lambda: made.next == 120)
    made.record(HOME, [message(120)], ACCEPTED, Monotonic(time.monotonic()))
    made.close()
    items = list(JournalReader(tmp_path).rows("0"))
    gaps = [item for item in items if isinstance(item, Gap)]
    assert [(gap.first, gap.rows, gap.reason) for gap in gaps] == [(40, 80, "backlog")]
    rows = [item for item in items if not isinstance(item, Gap)]
    assert numbers_of(rows) == [row["sequence"] for row in rows] == [*range(40), 120]
    assert (made.backlog, made.backlog_bytes) == (0, 0)


def test_large_bodies_do_not_gather(tmp_path: Path) -> None:
    """They become columns at once, or are left out of them, so that their messages may go."""
    made = writer(tmp_path, options=PATIENT)
    kept = Message(topic_address("t"), bytes(65_536))
    left_out = Message(topic_address("t"), bytes(1_048_576))
    made.record(HOME, [kept, message(0), left_out], ACCEPTED, Monotonic(0.0))
    assert made.backlog_bytes == 0
    made.record(HOME, [left_out, left_out, left_out, message(0)], ACCEPTED, Monotonic(0.0))
    assert 65_536 < made.backlog_bytes < 1_048_576
    made.close()
    assert [row["body_size"] for row in rows_of(tmp_path)] == [
        *(65_536, 1, 1_048_576),
        *(1_048_576, 1_048_576, 1_048_576, 1),
    ]


def test_a_full_disk_closes_nothing(tmp_path: Path) -> None:
    disk = Disk()
    with capture_logs() as told:
        options = JournalOptions(
            flush_interval_secs=0.001, retry_secs=0.001, flush_rows=3, backlog_bytes_max=100
        )
        made = writer(tmp_path, options=options, pwritev=disk)
        made.record(HOME, [message(n) for n in range(3)], ACCEPTED, Monotonic(time.monotonic()))
        until(lambda: made.rows == 3)
        disk.full = True
        made.record(HOME, [message(n) for n in range(3, 10)], ACCEPTED, Monotonic(time.monotonic()))
        until(lambda: disk.refusals > 3)
        assert (made.healthy, made.failure) == (False, "No space left on device")
        assert made.errors > 2
        for _ in range(3):
            made.record(HOME, [message(n) for n in range(10, 20)], ACCEPTED, Monotonic(time.monotonic()))
        assert made.dropped == 30
        assert numbers_of(rows_of(tmp_path)) == [0, 1, 2], "half a block is no block"
        disk.full = False
        until(lambda: made.next == 40)
        assert made.healthy
        made.record(HOME, [message(40)], ACCEPTED, Monotonic(time.monotonic()))
        made.close()
        facts = {"folder": str(tmp_path)}
        full = {
            "event": "journal not writable, rows buffered",
            "log_level": "error",
            "why": "No space left on device",
        }
        assert told == [facts | full, facts | {"event": "journal writable again", "log_level": "info"}]
        items = list(JournalReader(tmp_path).rows("0"))
        gaps = [item for item in items if isinstance(item, Gap)]
        assert [gap.reason for gap in gaps] == ["unwritable"] * len(gaps)
        assert (gaps[0].first, sum(gap.rows for gap in gaps)) == (10, 30)
        assert numbers_of([item for item in items if not isinstance(item, Gap)]) == [*range(10), 40]
        assert [item for item in JournalReader(tmp_path).verify("0") if not isinstance(item, Gap)] == []


def test_a_disk_that_is_full_until_the_end(tmp_path: Path) -> None:
    disk = Disk()
    disk.full = True
    with capture_logs() as told:
        made = writer(tmp_path, options=PATIENT, pwritev=disk)
        made.record(HOME, [message(0), message(1)], ACCEPTED, Monotonic(time.monotonic()))
        made.close()
        assert (told[-1]["event"], told[-1]["rows"]) == ("journal not writable at stop, rows lost", 2)
        assert told[-1]["why"] == "No space left on device"
        assert (made.rows, made.dropped) == (0, 2)
        write(tmp_path, range(1))
        assert numbers_of(rows_of(tmp_path)) == [0]


def test_rows_that_cannot_be_encoded_cost_themselves(tmp_path: Path) -> None:
    with capture_logs() as told:
        made = writer(tmp_path, options=QUICK)
        broken = message(1)
        broken.assurance = 1_000
        for one in (message(0), broken, message(2)):
            done = made.next
            made.record(HOME, [one], ACCEPTED, Monotonic(time.monotonic()))
            until(lambda done=done: made.next == done + 1)  # type: ignore[misc]
        made.close()
        assert made.failed == 1
        items = list(JournalReader(tmp_path).rows("0"))
        gap = items[1]
        assert isinstance(gap, Gap)
        assert (gap.first, gap.rows, gap.reason) == (1, 1, "error")
        assert numbers_of([whole(items[0]), whole(items[2])]) == [0, 2]
        assert (told[0]["event"], told[0]["rows"]) == ("journal rows not encoded, lost", 1)


def test_rows_that_cannot_be_gathered_cost_what_has_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as told:
        made = writer(tmp_path, options=PATIENT)
        made.record(HOME, [message(0), message(1)], ACCEPTED, Monotonic(time.monotonic()))
        with monkeypatch.context() as broken:
            broken.setattr(Gathering, "_copy_bodies", lambda *_: 1 / 0)
            made.record(HOME, [message(2)], ACCEPTED, Monotonic(time.monotonic()))
        made.record(HOME, [message(3)], ACCEPTED, Monotonic(time.monotonic()))
        made.close()
        assert (made.failed, made.backlog) == (3, 0)
        gap, row = JournalReader(tmp_path).rows("0")
        assert isinstance(gap, Gap)
        assert (gap.first, gap.rows, gap.reason) == (0, 3, "error")
        assert numbers_of([whole(row)]) == [3]
        assert (told[0]["event"], told[0]["rows"]) == ("journal rows not encoded, lost", 3)
        assert told[0]["error"].startswith("ZeroDivisionError")


@pytest.mark.parametrize("level", [0, 1])
def test_a_reader_follows_a_live_writer(tmp_path: Path, level: int) -> None:
    """While blocks are written a few bytes at a time and files are rolled."""
    disk = Disk()
    disk.bytes_max = 700
    options = JournalOptions(
        flush_interval_secs=0.001, segment_bytes=8_192, compress=level, block_rows_max=50
    )
    made = writer(tmp_path, options=options, pwritev=disk)
    count = 3_000
    done = threading.Event()

    def produce() -> None:
        for first in range(0, count, 20):
            made.record(
                HOME, [message(n) for n in range(first, first + 20)], ACCEPTED, Monotonic(time.monotonic())
            )
            if first % 100 == 0:
                until(lambda: made.backlog < 500)
        made.close()
        done.set()

    thread = threading.Thread(target=produce)
    thread.start()
    seen: list[int] = []
    deadline = time.monotonic() + 30
    rounds_left = [2]  # after the writer has ended

    def wait() -> bool:
        assert time.monotonic() < deadline
        rounds_left[0] -= done.is_set()
        time.sleep(0.001)
        return rounds_left[0] > 0

    until(lambda: any(tmp_path.glob("*.gwj")))
    for block in JournalReader(tmp_path).follow("0", 0, wait=wait):
        assert not isinstance(block, Gap)
        seen += [int(row["body"]) for row in block.rows()]
    thread.join()
    assert seen == list(range(count))
    assert len(JournalReader(tmp_path).segments()) > 3

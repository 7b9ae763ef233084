"""Files: rolled by size and age, deleted by size and age, numbered on after a restart, one writer each."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final
from unittest.mock import Mock

import pytest

from gateway import clock
from gateway.store.journal import segments
from gateway.store.journal.appender import RETENTION_SECS, Appender, JournalOptions
from gateway.store.journal.format import Draft, JournalError, lay_out, seal
from gateway.store.journal.reader import Gap, GoneError, JournalReader
from gateway.store.journal.segments import BlockLocation, Segment, segment_name, walk
from tests.store.journal.samples import block, draft, numbers_of, rows_of, whole, write, writer

DAY_SECS: Final = 86_400.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def appender(folder: Path, clock: Clock, **limits: Any) -> Appender:
    names = ("segment_bytes", "retention_bytes", "segment_secs", "retention_secs", "sync_interval_secs")
    chosen: dict[str, Any] = dict.fromkeys(names, 0)
    return Appender(folder, 0, JournalOptions(**(chosen | limits)), utc=clock)


def append(to: Appender, count: int = 2) -> int:
    """A block of `count` rows; returns its bytes."""
    laid = seal(lay_out(draft(to.next, count), 0))
    assert to.append([laid]) == 1
    return laid.header.byte_count


def firsts(folder: Path) -> list[int]:
    return [segment.first for segment in JournalReader(folder).segments()]


def test_a_segment_ends_at_its_size(tmp_path: Path) -> None:
    byte_count = append(appender(tmp_path / "measure", Clock()))
    made = appender(tmp_path / "journal", Clock(), segment_bytes=2 * byte_count + byte_count // 2)
    for _ in range(5):
        append(made)
    made.close()
    assert firsts(tmp_path / "journal") == [0, 4, 8]
    assert numbers_of(rows_of(tmp_path / "journal")) == list(range(10))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("secs, let_go", [(0, False), (1, True)])
def test_what_is_on_the_disk_need_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secs: int, let_go: bool, fails: bool
) -> None:
    """But for the end of it, and not before it is synced; the rows are the same."""
    told: list[tuple[int, int]] = []

    def advise(_: int, begin: int, count: int, __: int) -> None:
        told.append((begin, begin + count))
        if fails:
            raise OSError

    monkeypatch.setattr("gateway.store.journal.appender.CACHED_BYTES", 4_096)
    monkeypatch.setattr("os.posix_fadvise", advise)
    clock = Clock()
    made = appender(tmp_path, clock, sync_interval_secs=secs)
    byte_count = 0
    for _ in range(20):
        byte_count += append(made)
        clock.now += 1.0
        made.tick()
    made.close()
    assert bool(told) == let_go
    if let_go:
        assert [begin for begin, _ in told] == [0, *[end for _, end in told[:-1]]]
        assert 4_096 <= byte_count - told[-1][1] < 2 * 4_096
    assert numbers_of(rows_of(tmp_path)) == list(range(40))


@pytest.mark.interpreted
def test_a_segment_that_cannot_be_synced_is_completed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failed attempt takes its index back, and the next one completes the segment."""
    clock = Clock()
    made = appender(tmp_path, clock, segment_secs=10.0, sync_interval_secs=1.0)
    byte_count = append(made)
    (segment,) = JournalReader(tmp_path).segments()
    clock.now += 20.0
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", Mock(side_effect=OSError(errno.EIO, "input/output error")))
        for _ in range(3):
            with pytest.raises(OSError, match="input/output"):
                made.tick()
            assert segment.path.stat().st_size == byte_count
    made.tick()
    assert segment.path.stat().st_size > byte_count
    append(made)
    made.close()
    assert len(firsts(tmp_path)) == 2
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2, 3]
    with segment.path.open("rb", buffering=0) as file:
        assert [at.header.rows for at in walk(file, segment.path) if isinstance(at, BlockLocation)] == [2, 0]


@pytest.mark.interpreted
@pytest.mark.parametrize("is_killed", [False, True], ids=["one process", "killed before"])
def test_an_index_is_written_when_all_blocks_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    """After a power failure between the two a start finds no index, and so checks the blocks."""
    clock, sizes, fsync = Clock(), [], os.fsync

    def synced(file: int) -> None:
        sizes.append(os.fstat(file).st_size)
        fsync(file)

    if is_killed:
        (tmp_path / segment_name(0, 0)).write_bytes(block(0, 2))
    made = appender(tmp_path, clock, segment_secs=10.0, sync_interval_secs=1_000.0)
    monkeypatch.setattr("os.fsync", synced)
    if not is_killed:
        append(made)
    (segment,) = JournalReader(tmp_path).segments()
    clock.now += 20.0
    made.tick()
    made.close()
    assert sizes[-2:] == [segment.byte_count, segment.path.stat().st_size]
    assert sizes[-2] < sizes[-1]


@pytest.mark.parametrize("most, files", [(0, 1), (1, 10), (2, 5), (3, 4)])
def test_several_blocks_at_a_time(tmp_path: Path, most: int, files: int) -> None:
    """As many go into one write as fit into the segment."""
    blocks = [seal(lay_out(draft(2 * place, 2), 0)) for place in range(10)]
    largest = max(header.byte_count for header, *_ in blocks)
    made = appender(tmp_path, Clock(), segment_bytes=most * largest)
    while blocks:
        count = made.append(blocks)
        del blocks[:count]
    made.close()
    assert numbers_of(rows_of(tmp_path)) == list(range(20))
    assert len(firsts(tmp_path)) == files


def test_no_more_pieces_than_the_system_takes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.journal.appender.PIECES_MAX", 10)
    blocks = [seal(lay_out(draft(2 * place, 2), 0)) for place in range(10)]
    each = len(blocks[0].pieces)
    made = appender(tmp_path, Clock())
    assert made.append(blocks) == 10 // each
    while (written := made.next // 2) < len(blocks):
        made.append(blocks[written:])
    made.close()
    assert numbers_of(rows_of(tmp_path)) == list(range(20))


def test_a_block_larger_than_a_segment_is_one(tmp_path: Path) -> None:
    made = appender(tmp_path, Clock(), segment_bytes=1)
    append(made)
    append(made)
    made.close()
    assert firsts(tmp_path) == [0, 2]


def test_a_segment_ends_at_its_age(tmp_path: Path) -> None:
    clock = Clock()
    made = appender(tmp_path, clock, segment_secs=60)
    append(made)
    clock.now += 59
    append(made)
    clock.now += 1
    append(made)
    clock.now += 60
    made.tick()
    append(made)
    assert firsts(tmp_path) == [0, 6], "the first two are of one minute, which is over"
    made.close()
    assert numbers_of(rows_of(tmp_path)) == list(range(8))


def test_an_old_segment_is_ended_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()  # the time of the sample's rows
    made = appender(tmp_path, clock, segment_secs=60)
    append(made)
    made.close()
    clock.now += 61
    made = appender(tmp_path, clock, segment_secs=60)
    append(made)
    made.close()
    assert firsts(tmp_path) == [0, 2]


def test_retention_by_size_keeps_the_newest(tmp_path: Path) -> None:
    made = appender(tmp_path, Clock(), segment_bytes=1, retention_bytes=1)
    for _ in range(4):
        append(made)
    made.close()
    assert firsts(tmp_path) == [6]
    made = appender(tmp_path, Clock(), segment_bytes=1, retention_bytes=1)
    assert made.next == 8
    made.close()


def test_retention_by_size_counts_exactly(tmp_path: Path) -> None:
    byte_count = append(appender(tmp_path / "measure", Clock()))
    made = appender(tmp_path / "journal", Clock(), segment_bytes=1, retention_bytes=3 * byte_count + 1_000)
    for _ in range(5):
        append(made)
    made.close()
    assert firsts(tmp_path / "journal") == [4, 6, 8]


def test_retention_by_age(tmp_path: Path) -> None:
    clock = Clock()
    made = appender(tmp_path, clock, segment_bytes=1, retention_secs=1_000)
    for _ in range(3):
        append(made)
    for place, path in enumerate(sorted(tmp_path.glob("*.gwj"))):
        os.utime(path, (clock.now + place, clock.now + place))
    clock.now += 1_001 + RETENTION_SECS
    for path in sorted(tmp_path.glob("*.gwj"))[1:]:
        os.utime(path, (clock.now, clock.now))
    made.tick()
    assert firsts(tmp_path) == [2, 4]
    assert made.segments == 2
    made.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_segment_is_as_old_as_its_last_row(tmp_path: Path, restart: bool) -> None:
    """It ends when the next row is written, which may be long after."""
    clock = Clock(time.time())
    made = appender(tmp_path, clock, segment_bytes=1, retention_secs=1_000)
    append(made)
    if restart:
        made.close()
        made = appender(tmp_path, clock, segment_bytes=1, retention_secs=1_000)
    clock.now += 1_001 + RETENTION_SECS
    append(made)
    append(made)
    made.close()
    assert firsts(tmp_path) == [2, 4]


@pytest.mark.parametrize("step", [7_200.0, -7_200.0, 8 * DAY_SECS, -8 * DAY_SECS])
def test_a_wall_clock_that_was_set_changes_no_age(tmp_path: Path, step: float) -> None:
    """The file system goes by the wall clock; that was set by `step` while the gateway ran."""
    clock = Clock(time.time() - step)
    made = appender(tmp_path, clock, segment_bytes=1, retention_secs=int(7 * DAY_SECS))
    for _ in range(5):
        append(made)
    clock.now += RETENTION_SECS + 1
    made.tick()
    assert firsts(tmp_path) == [0, 2, 4, 6, 8]
    clock.now += 7 * DAY_SECS
    made.tick()
    assert firsts(tmp_path) == [8]
    made.close()


class Machine:
    """A machine whose wall clock is set between two processes; the file system goes by the wall clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(time.time())
        self.since_boot = 50_000.0
        patch.setattr(clock, "utc", self.clock)
        patch.setattr(clock, "since_boot", lambda: self.since_boot)
        patch.setattr(clock, "boot_id", lambda: "one")

    def pass_(self, secs: float) -> None:
        self.clock.now += secs
        self.since_boot += secs


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.interpreted
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("steps", [(30.0,), (-30.0,), (-30.0, 0.0), (30.0, 0.0), (30.0, 0.0, 0.0)])
def test_rows_outlive_a_clock_that_was_set_before_a_restart(
    tmp_path: Path, machine: Machine, steps: tuple[float, ...], killed: bool
) -> None:
    """Nothing is written after the restarts for so long that the segment with the rows ends."""
    limits = {"segment_secs": 3_600, "retention_secs": int(7 * DAY_SECS)}
    made = appender(tmp_path, machine.clock, **limits)
    made.append([seal(lay_out(dated(0, 2, int(machine.clock.now * 1e6)), 0))])
    machine.pass_(RETENTION_SECS + 1)
    made.tick()
    for days in steps:
        if killed:
            made._unlock()
        else:
            made.close()
        machine.clock.now += days * DAY_SECS
        machine.pass_(10.0)
        made = appender(tmp_path, machine.clock, **limits)
        made.tick()
    machine.pass_(3_601.0)
    for _ in range(2):
        append(made)
        machine.pass_(3_601.0)
        made.tick()
    assert firsts(tmp_path)[0] == 0, "they are some hours old"
    machine.pass_(7 * DAY_SECS)
    append(made)
    made.tick()
    made.close()
    assert 0 not in firsts(tmp_path)


@pytest.mark.interpreted
def test_a_segment_ends_in_time_after_the_clock_was_set_back(tmp_path: Path, machine: Machine) -> None:
    """It was begun in the future, by what its rows say."""
    made = appender(tmp_path, machine.clock, segment_secs=60)
    begun = int(machine.clock.now * 1e6)
    made.append([seal(lay_out(dated(0, 2, begun), 0))])
    made.close()
    machine.clock.now -= 30 * DAY_SECS
    machine.pass_(10.0)
    made = appender(tmp_path, machine.clock, segment_secs=60)
    machine.pass_(61.0)
    made.tick()
    append(made)
    made.close()
    assert firsts(tmp_path) == [0, 2]


def dated(first: int, count: int, us: int) -> Draft:
    """A block whose rows were received at `us`."""
    made = draft(first, count)
    return made._replace(header=made.header._replace(first_us=us, last_us=us))


@pytest.mark.interpreted
def test_segments_are_converted_in_time_after_the_clock_was_set_back(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[int]] = []

    def conversion(_: object, shard: int, chosen: Sequence[Segment], next_: int) -> None:
        begun.append([one.first for one in chosen])

    monkeypatch.setattr("gateway.store.journal.appender.Conversion", conversion)
    made = appender(tmp_path, machine.clock, segment_secs=3_600, converter=("x",))
    append(made)
    machine.pass_(RETENTION_SECS + 1)
    made.tick()
    made.close()
    machine.clock.now -= 30 * DAY_SECS
    machine.pass_(10.0)
    made = appender(tmp_path, machine.clock, segment_secs=3_600, converter=("x",))
    machine.pass_(3_601.0)
    append(made)
    machine.pass_(3_601.0)
    made.tick()
    made.close()
    assert begun
    assert begun[0][0] == 0


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    for part in (range(3), range(3, 7), range(7, 8)):
        write(tmp_path, part)
    rows = rows_of(tmp_path)
    assert numbers_of(rows) == [row["sequence"] for row in rows] == list(range(8))
    assert firsts(tmp_path) == [0], "a young segment is continued"


def test_two_writers_of_one_shard_are_refused(tmp_path: Path) -> None:
    one = writer(tmp_path)
    with pytest.raises(JournalError, match=f"process {os.getpid()} writes shard 0"):
        writer(tmp_path)
    writer(tmp_path, shard=1).close()
    one.close()
    writer(tmp_path).close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be written"):
        writer(tmp_path / "file" / "journal")


def test_shards_in_one_folder_and_below(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    write(tmp_path, range(3), shard=12)
    write(tmp_path / "replica-b", range(4))
    reader = JournalReader(tmp_path)
    assert reader.shards() == ["0", "12", "replica-b/0"]
    assert [len(rows_of(tmp_path, shard)) for shard in reader.shards()] == [2, 3, 4]
    assert {row["shard"] for row in rows_of(tmp_path, "replica-b/0")} == {"replica-b/0"}


def test_rows_that_retention_has_deleted(tmp_path: Path) -> None:
    made = appender(tmp_path, Clock(), segment_bytes=1)
    for _ in range(4):
        append(made)
    made.close()
    for path in sorted(tmp_path.glob("*.gwj"))[:2]:
        path.unlink()
    with pytest.raises(GoneError, match="rows 1 to 3 were deleted by retention") as told:
        rows_of(tmp_path, start=1)
    assert told.value.first == 4
    assert numbers_of(rows_of(tmp_path)) == [4, 5, 6, 7], "who asks for no number begins at the first row"
    gap, *rows = JournalReader(tmp_path, skip=True).rows("0", 1)
    assert isinstance(gap, Gap)
    assert (gap.first, gap.rows, gap.reason) == (1, 3, "gone")
    assert numbers_of([whole(row) for row in rows]) == [4, 5, 6, 7]


@pytest.mark.parametrize("skip", [False, True])
def test_retention_races_a_reader(tmp_path: Path, skip: bool) -> None:
    """What is deleted while it is being read is told, wherever the reader is just then."""
    made = appender(tmp_path, Clock(), segment_bytes=1)
    for _ in range(4):
        append(made)
    made.close()
    paths = sorted(tmp_path.glob("*.gwj"))
    reader = JournalReader(tmp_path, skip=skip)
    rows = reader.rows("0", 0)
    assert whole(next(rows))["sequence"] == 0
    for path in paths[:3]:
        path.unlink()
    assert whole(next(rows))["sequence"] == 1
    if skip:
        gap = next(rows)
        assert isinstance(gap, Gap)
        assert (gap.first, gap.rows, gap.reason) == (2, 4, "gone")
        assert numbers_of([whole(row) for row in rows]) == [6, 7]
    else:
        with pytest.raises(GoneError, match="rows 2 to 5 were deleted by retention"):
            next(rows)


def test_a_block_that_was_indexed_and_then_deleted(tmp_path: Path) -> None:
    made = appender(tmp_path, Clock(), segment_bytes=1)
    append(made)
    append(made)
    made.close()
    reader = JournalReader(tmp_path)
    at = next(reader.index("0"))
    assert not isinstance(at, Gap)
    at.path.unlink()
    with pytest.raises(GoneError) as told:
        reader.read("0", at)
    assert told.value.first == 2


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no such folder"):
        JournalReader(tmp_path / "none").shards()


def test_a_block_that_is_completed_while_the_next_is_searched_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / segments.segment_name(0, 0)
    whole = block(0, 3) + block(3, 2) + block(5, 4)
    path.write_bytes(whole[: len(block(0, 3)) + 100])
    search = segments._next_block

    def searched(file: BinaryIO, where: Path, offset: int) -> segments.BlockLocation | None:
        path.write_bytes(whole)
        return search(file, where, offset)

    monkeypatch.setattr(segments, "_next_block", searched)
    assert [row["sequence"] for row in rows_of(tmp_path)] == [*range(9)]

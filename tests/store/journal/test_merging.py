"""Small blocks become large ones, and nobody who reads, plans or kills meanwhile can tell by the rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, property_set
from gateway.model.times import Monotonic, WallTime
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal import appender, merge
from gateway.store.journal.appender import SMALL_MAX, Appender
from gateway.store.journal.format import DamageError
from gateway.store.journal.merge import merge_segments
from gateway.store.journal.reader import Block, Gap, JournalReader, Row
from gateway.store.journal.segments import Segment
from gateway.store.journal.writer import JournalOptions
from tests.store.journal.samples import HOME, UP, until, writer

START: Final = 1_700_000_000.0
REFUSED: Final = Outcome(Verdict.REJECTED, Reason.HOPS, "a loop?")
PATIENT: Final = JournalOptions(flush_interval_secs=60.0, body_bytes_max=20)


def odd(number: int) -> Message:
    """No two are alike in all: senders, addresses, property sets, expiry and bodies come and go."""
    said = Properties(
        message_id=f"id {number}" if number % 3 else None,
        content_type="" if number % 5 else "ä" * (number % 7),
    )
    return Message(
        topic_address(f"plant/{number % 11}/ü"),
        b"x" * (number % 23 * 3) if number % 7 else b"",
        property_set(said),
        number % 3,
        number % 2 == 0,
        number % 13 == 0,
        START + number if number % 4 == 0 else NEVER,
        number % 300,
        Sender("mqtt", f"c{number % 6}", "u", f"10.0.0.{number % 9}:1"),
    )


def went(message: Message, number: int) -> Message:
    made = odd(number)
    made.address = amqp_address("e", message.address.name)
    made.assurance, made.durable = 1, True
    return made


class Quiet:
    """A journal of which every flush is some rows; the clocks are set by hand."""

    def __init__(self, folder: Path, options: JournalOptions = PATIENT, **also: Any) -> None:
        self.now = 100.0
        clocks: dict[str, Any] = {"clock": lambda: self.now, "utc": lambda: self.now - 100.0 + START}
        self.writer = writer(folder, options=options, **clocks, **also)
        self.number = 0

    def write(self, blocks: int, rows: int = 2) -> None:
        for _ in range(blocks):
            for _ in range(rows):
                self._record(self.number)
                self.number += 1
            self.now += 1.0
            with self.writer._lock:
                self.writer._flush()
            self.writer._wake.set()
            until(lambda: not self.writer.backlog)

    def _record(self, number: int) -> None:
        one = odd(number)
        if number % 17 == 3:
            self.writer.refuse(UP._replace(route="never"), [one], REFUSED, Monotonic(self.now - 0.5))
        elif number % 2:
            crossed = UP._replace(route=f"up{number % 3}")
            self.writer.record(
                crossed, [went(one, number)], ACCEPTED, Monotonic(self.now - 1), [one], [number % 4]
            )
        else:
            self.writer.record(HOME, [one], ACCEPTED, Monotonic(self.now))


def rows_of(folder: Path, **also: Any) -> list[Row]:
    return [item for item in JournalReader(folder).rows("0", **also) if not isinstance(item, Gap)]


def blocks_of(folder: Path) -> list[int]:
    return [at.header.rows for at in JournalReader(folder).index("0") if not isinstance(at, Gap)]


def segments(folder: Path) -> list[Segment]:
    return JournalReader(folder).segments("0")


def leave_unmerged(patch: pytest.MonkeyPatch) -> None:
    """Segments end by their size, with an index and as they are."""
    patch.setattr(appender, "MERGED_FROM", 1 << 30)
    patch.setattr(Appender, "_put_together", lambda *_: None)


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_unmerged(monkeypatch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quiet")
    with pytest.MonkeyPatch.context() as patch:
        leave_unmerged(patch)
        made = Quiet(
            folder, JournalOptions(flush_interval_secs=60.0, body_bytes_max=20, segment_bytes=60_000)
        )
        made.write(100)
        made.writer.close()
    assert len(segments(folder)) > 3
    return folder


@pytest.fixture
def quiet(written: Path, tmp_path: Path, unmerged: None) -> Path:
    """Several complete segments of small blocks, and one in use."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("level", [0, 1])
def test_rows_are_the_same(quiet: Path, level: int) -> None:
    before, sizes = rows_of(quiet), [segment.byte_count for segment in segments(quiet)]
    *complete, _ = segments(quiet)
    for segment in complete:
        merge_segments([segment], level=level)
    assert rows_of(quiet) == before
    byte_count = merge_segments(segments(quiet)[:-1], level=level)
    assert rows_of(quiet) == before
    one, last = segments(quiet)
    assert one.byte_count == byte_count < sum(sizes[:-1]) / 4
    assert blocks_of(quiet)[0] == complete[-1].first + blocks_of(quiet)[0] - complete[-1].first
    extent = JournalReader(quiet).extent("0")
    assert (extent.rows, extent.next, extent.segments) == (len(before), len(before), 2)
    assert extent.replaced + extent.small + extent.blocks >= 100
    assert last.first == blocks_of(quiet)[0]


def test_runs_nulls_and_dictionaries_of_one_block_are_those_of_all(quiet: Path) -> None:
    merge_segments(segments(quiet)[:-1])
    block = next(iter(JournalReader(quiet).blocks("0")))
    assert isinstance(block, Block)
    assert len(set(block.texts("source_address"))) == len(block.texts("source_address")) == 11
    assert len(set(block.texts("target_address"))) == len(block.texts("target_address")) == 2 * 11 + 1
    assert set(block.values("expires")) >= {None}
    assert set(map(type, block.values("body"))) == {bytes, type(None)}


@pytest.mark.parametrize("seen", [0, 1, 7, 30, 55, 99, 150, 199])
def test_a_reader_that_has_begun_sees_each_row_once(quiet: Path, seen: int) -> None:
    """Blocks are read one by one meanwhile: the first file is open, and all others are put into it."""
    before = rows_of(quiet)
    reader = JournalReader(quiet).rows("0")
    found = [next(reader) for _ in range(seen)]
    merge_segments(segments(quiet)[:-1])
    found += reader
    assert found == before


@pytest.mark.parametrize("begin", [0, 1, 63, 120])
def test_what_was_planned_before_is_found(quiet: Path, begin: int) -> None:
    before = rows_of(quiet)
    reader = JournalReader(quiet)
    index = [at for at in reader.index("0", begin) if not isinstance(at, Gap)]
    block_ranges = [one for one in reader.block_ranges("0", begin) if not isinstance(one, Gap)]
    merge_segments(segments(quiet)[:-1])
    assert [row for at in index for row in reader.read("0", at).rows()] == before[begin - begin % 2 :]
    found: list[int] = []
    for one in block_ranges:
        for block in reader.blocks("0", one.first, end=one.next, near=one.place):
            assert isinstance(block, Block)
            found += range(max(block.begin, one.first), min(block.end, one.next))
    assert found == [*range(begin, len(before))]


@pytest.mark.needs("time")
def test_a_follower_sees_each_row_once(tmp_path: Path) -> None:
    made = Quiet(tmp_path)

    def write_on() -> bool:
        made.write(40)
        return made.number < 3 * SMALL_MAX

    made.write(10)
    found = []
    for block in JournalReader(tmp_path).follow("0", 0, wait=write_on):
        assert isinstance(block, Block)
        found += [row["sequence"] for row in block.rows()]
    made.writer.close()
    assert found == [*range(len(found))]
    assert len(found) > 2 * SMALL_MAX
    assert len(blocks_of(tmp_path)) < SMALL_MAX


@pytest.mark.needs("time")
def test_a_quiet_gateway_writes_large_blocks_in_the_end(tmp_path: Path) -> None:
    made = Quiet(tmp_path)
    made.write(SMALL_MAX + 1)
    until(lambda: len(blocks_of(tmp_path)) < 10)
    extent = JournalReader(tmp_path).extent("0")
    assert (extent.rows, extent.replaced >= SMALL_MAX) == (made.number, True)
    assert extent.small <= 2
    made.writer.close()
    assert [row["sequence"] for row in rows_of(tmp_path)] == [*range(made.number)]


def test_what_cannot_be_merged_is_left_alone(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not tried again with each file that is complete."""
    tried: list[object] = []

    def fails(segments: object, level: int = 0) -> None:
        tried.append(segments)
        raise DamageError("x")

    monkeypatch.setattr(appender, "merge_segments", fails)
    folder = shutil.copytree(written, tmp_path / "quiet")
    given: dict[str, Any] = {"segment_bytes": 64 << 20, "segment_secs": 3_600.0, "retention_bytes": 0}
    given |= {"retention_secs": 0, "sync_interval_secs": 0}
    one = Appender(folder, 0, JournalOptions(**given), utc=lambda: START + 1e6)
    for _ in range(5):
        one._to_merge = True
        one._put_together(WallTime(START + 1e6))
    one.close()
    assert len(tried) == 1


def test_gaps_are_missing_from_about_their_time(tmp_path: Path) -> None:
    made = Quiet(tmp_path)
    made.write(3)
    made.writer.dropped += 7
    made.write(3)
    found = {}
    for begin, end in ((None, None), (2.9, 3.1), (3.1, None), (None, 2.9), (None, 3.1), (2.9, None)):
        times = [None if second is None else round((START + second) * 1e6) for second in (begin, end)]
        found[begin, end] = JournalReader(tmp_path).missing_count("0", *times)
    made.writer.close()
    assert {span for span, missing in found.items() if missing == 0} == {(3.1, None), (None, 2.9)}
    assert set(found.values()) == {0, 7}


def test_gaps_stay(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Quiet(quiet)
    made.writer.dropped += 7
    made.write(3)
    made.writer.close()
    before = list(JournalReader(quiet).rows("0"))
    monkeypatch.setattr(appender, "MERGED_FROM", 1)
    made = Quiet(quiet, JournalOptions(flush_interval_secs=60.0, segment_secs=1.0))
    made.write(1)
    made.writer.close()
    assert [one.byte_count for one in segments(quiet)]
    after = list(JournalReader(quiet).rows("0"))
    assert after[: len(before)] == [
        one._replace(where=again.where) if isinstance(one, Gap) and isinstance(again, Gap) else one
        for one, again in zip(before, after, strict=False)
    ]
    assert JournalReader(quiet).extent("0").missing == 7
    assert [one.rows for one in JournalReader(quiet).block_ranges("0", 0) if isinstance(one, Gap)] in (
        [],
        [7],
    )


def test_damage_is_left_where_it_is(quiet: Path) -> None:
    one = segments(quiet)[1]
    data = bytearray(one.path.read_bytes())
    data[3_000] ^= 1
    one.path.write_bytes(data)
    before = {path: path.read_bytes() for path in quiet.glob("*")}
    with pytest.raises(DamageError):
        merge_segments(segments(quiet)[:3])
    assert {path: path.read_bytes() for path in quiet.glob("*")} == before


class Killed(BaseException):
    """The process is no more."""


@pytest.mark.parametrize("place", ["fsync", "replace", "unlink"])
def test_killed_in_a_merge(quiet: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows_of(quiet)

    def die(*_: Any, **also: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if place == "fsync":
            patched.setattr(merge.os, "fsync", die)
        else:
            patched.setattr(Path, place, die)
        with pytest.raises(Killed):
            merge_segments(segments(quiet)[:-1])
    assert rows_of(quiet) == before
    assert JournalReader(quiet).extent("0").rows == len(before)
    Quiet(quiet).writer.close()
    assert rows_of(quiet) == before
    assert not list(quiet.glob("*.tmp"))
    assert all(one.first < other.first for one, other in pairwise(segments(quiet)))
    ends = [at.header.next for at in JournalReader(quiet).index("0") if not isinstance(at, Gap)]
    assert ends == sorted(set(ends))


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from gateway.store.journal import reader, segments

    found: list[int] = []
    plain = segments.block_at

    def noted(file: Any, path: Path, offset: int) -> Any:
        found.append(offset)
        return plain(file, path, offset)

    monkeypatch.setattr(segments, "block_at", noted)
    monkeypatch.setattr(reader, "block_at", noted)
    return found


@pytest.mark.parametrize(
    "asked, expected",
    [
        ({"only": {"route": {"nobody"}}}, 0),
        ({"from_us": int((START + 1_000) * 1e6)}, 0),
        ({"to_us": int((START - 1_000) * 1e6)}, 0),
        ({"only": {"route": {"never"}}}, 12),
    ],
)
def test_files_that_cannot_answer_are_not_read(
    quiet: Path, asked: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = JournalReader(quiet)
    in_use = [at.offset for at in reader.index("0", segments(quiet)[-1].first) if not isinstance(at, Gap)]
    looked = _reads(monkeypatch)
    assert len([*reader.rows("0", **asked)]) == expected
    if not expected:
        assert len(looked) <= len(in_use) + 4


def test_planning_does_not_depend_on_blocks(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = _reads(monkeypatch)
    reader = JournalReader(quiet)
    files = len(segments(quiet))
    found = list(reader.block_ranges("0", 0))
    blocks = len([at for at in reader.index("0", segments(quiet)[-1].first) if not isinstance(at, Gap)])
    assert sum(one.next - one.first for one in found if not isinstance(one, Gap)) == 200
    assert len(looked) <= 4 * files + 3 * blocks


def test_routes_are_not_listed_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.store.journal import summary

    monkeypatch.setattr(summary, "ROUTES_MAX", 2)
    made = Quiet(tmp_path, JournalOptions(flush_interval_secs=60.0, segment_secs=1.0))
    made.write(30)
    made.writer.close()
    assert len(rows_of(tmp_path, only={"route": {"up1"}})) == len(
        [row for row in rows_of(tmp_path) if row["route"] == "up1"]
    )


@pytest.mark.needs("time")
def test_files_of_an_hour_become_one_when_it_is_over(tmp_path: Path) -> None:
    made = Quiet(tmp_path, JournalOptions(flush_interval_secs=60.0, segment_secs=600.0))
    made.write(3 * SMALL_MAX)
    until(lambda: len(blocks_of(tmp_path)) < 20)
    made.now += 1_300
    made.write(1)
    until(lambda: len(segments(tmp_path)) <= 3)
    made.writer.close()
    assert [row["sequence"] for row in rows_of(tmp_path)] == [*range(made.number)]
    assert JournalReader(tmp_path).extent("0").unindexed <= 1


Told = Callable[[], float | None]


def test_the_low_water_mark_is_of_what_is_open(tmp_path: Path) -> None:
    oldest: list[float | None] = [None]
    made = Quiet(tmp_path, oldest=lambda: oldest[0])
    marks: list[int | None] = []
    for place in (None, 99.0, 99.0, None):
        oldest[0] = place
        made.write(1)
        marks.append(JournalReader(tmp_path).low_water("0"))
    made.writer.close()
    seconds = [None if mark is None else round(mark / 1e6 - START) for mark in marks]
    assert seconds == [0, 0, 0, 3]
    assert [JournalReader(tmp_path).low_water("0", before) for before in (0, 1, 2)] == [None, None, marks[0]]


def test_a_gateway_that_waits_says_that_it_lives(tmp_path: Path) -> None:
    made = Quiet(tmp_path, oldest=lambda: 99.0)
    made.write(1)
    (path,) = tmp_path.glob("*.gwj")
    before = path.stat().st_size
    for _ in range(3):
        made.now += 50.0
        made.writer.tick()
        made.writer._wake.set()
        until(lambda: not made.writer.backlog_bytes)
    made.writer.close()
    assert path.stat().st_size > before
    assert JournalReader(tmp_path).low_water("0") == (99 - 100 + START) * 1e6


def test_a_quiet_hour_has_marks_too(tmp_path: Path) -> None:
    made = Quiet(tmp_path)
    made.writer.tick()
    assert segments(tmp_path) == []
    made.write(1)
    before = JournalReader(tmp_path).low_water("0")
    assert before is not None
    for _ in range(5):
        made.now += 30.0
        made.writer.tick()
        made.writer._wake.set()
    until(lambda: not made.writer.backlog_bytes)
    after = JournalReader(tmp_path).low_water("0")
    assert after is not None
    assert after - before > 120e6
    assert (blocks_of(tmp_path), len(rows_of(tmp_path))) == ([2], 2)
    made.write(1)
    made.writer.close()
    assert (JournalReader(tmp_path).end("0"), len(rows_of(tmp_path))) == (4, 4)
    assert list(JournalReader(tmp_path).verify("0")) == []


@pytest.mark.interpreted
def test_a_damaged_end_of_a_segment_stops_merging_and_not_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as told:
        made = Quiet(tmp_path, JournalOptions(flush_interval_secs=0.01, segment_secs=100.0))
        made.write(130)

        def damaged(_: object, segment: Segment) -> None:
            raise DamageError(f"{segment.path}: the summary at its end cannot be read")

        monkeypatch.setattr(appender, "summary_of", damaged)
        made.write(130)
        monkeypatch.undo()
        made.write(130)
        made.writer.close()
        assert len(rows_of(tmp_path)) == 780
        assert told
        assert {line["event"] for line in told} == {"journal segments not merged"}

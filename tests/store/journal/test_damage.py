"""Torn ends are cut and never read; damage in the middle is named, and passed over only when told to."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest

from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.store.journal.column_buffers import SettledMessages
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.format import (
    BUFFER_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    DamageError,
    decode_runs,
    decompressed,
)
from gateway.store.journal.reader import Gap, JournalReader
from gateway.store.journal.segments import SEARCH_BYTES, Hole, segment_name
from tests.store.journal.samples import (
    HOME,
    UTC_US,
    block,
    bytes_of,
    gathered,
    numbers_of,
    rows_of,
    whole,
    write,
    writer,
)
from tests.store.parts import TOPIC


def put(folder: Path, *blocks: bytes, first: int = 0, shard: int = 0) -> Path:
    path = folder / segment_name(shard, first)
    path.write_bytes(b"".join(blocks))
    return path


@pytest.mark.needs("time")
def test_a_torn_end_at_every_byte(tmp_path: Path) -> None:
    whole_part, torn = block(0, 3), block(3, 2)
    path = put(tmp_path, whole_part)
    reader = JournalReader(tmp_path)
    for kept in range(len(torn)):
        path.write_bytes(whole_part + torn[:kept])
        assert [item.header.next for item in reader.index("0") if not isinstance(item, Gap)] == [3]
        holes = list(reader.verify("0"))
        assert holes == ([Hole(path, len(whole_part), len(whole_part) + kept)] if kept else [])
    path.write_bytes(whole_part + torn)
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kept", [1, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9, -1])
def test_the_writer_cuts_a_torn_end_and_goes_on(tmp_path: Path, kept: int) -> None:
    put(tmp_path, block(0, 3), block(3, 2)[:kept])
    write(tmp_path, range(3, 5))
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2, 3, 4]
    assert list(JournalReader(tmp_path).verify("0")) == []


def test_zeros_that_a_crash_of_the_machine_left_are_a_torn_end(tmp_path: Path) -> None:
    """The size of the file may have survived, and the header, but not the content."""
    first, second = block(0, 3), block(3, 2)
    path = put(tmp_path, first, second[:HEADER_BYTES] + bytes(len(second) - HEADER_BYTES))
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2]
    assert list(JournalReader(tmp_path).verify("0")) == [Hole(path, len(first), len(first) + len(second))]
    write(tmp_path, range(3, 4))
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2, 3]


def test_a_segment_that_was_torn_at_once(tmp_path: Path) -> None:
    put(tmp_path, block(0, 3))
    put(tmp_path, block(3, 2)[:50], first=3)
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2]
    write(tmp_path, range(3, 5))
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2, 3, 4]


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes((data[place] ^ 0x40,)) + data[place + 1 :]


PLACES = [("in its magic", 3), ("in its length", 17), ("in its CRC", 70), ("in its content", 200)]


@pytest.mark.parametrize("place", [place for _, place in PLACES])
def test_the_writer_records_what_a_power_failure_damaged_before_the_end(tmp_path: Path, place: int) -> None:
    """Pages reach the disk in any order: an unsynced block may be damaged, and a later one not."""
    path = put(tmp_path, block(0, 3), flipped(block(3, 2), place), block(5, 4))
    size = path.stat().st_size
    with pytest.raises(DamageError):
        rows_of(tmp_path)
    again = writer(tmp_path)
    assert (again.lost_rows, again.cut_bytes, path.stat().st_size) == (2, 0, size)
    again.close()
    write(tmp_path, range(9, 10))
    items = list(JournalReader(tmp_path).rows("0"))
    (gap,) = (item for item in items if isinstance(item, Gap))
    assert (gap.first, gap.rows, gap.reason) == (3, 2, "damage")
    assert numbers_of([item for item in items if not isinstance(item, Gap)]) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert list(JournalReader(tmp_path).verify("0")) == [gap]


def test_a_block_in_a_body_behind_a_torn_header_prevents_no_start(tmp_path: Path) -> None:
    """A client may send a body that looks like a block with any number."""
    put(tmp_path, block(0, 3), block(3, 2_000)[:200], block(1 << 40, 1))
    assert writer(tmp_path).lost_rows == 0


def with_bodies(base: int, *bodies: bytes, level: int) -> bytes:
    messages = [Message(TOPIC, body) for body in bodies]
    part = SettledMessages(HOME, messages, None, ACCEPTED, UTC_US, UTC_US)
    gathering = gathered([part], body_bytes_max=1 << 30)
    return bytes_of(Encoder(0).encode(base, gathering), level)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("noise", [b"", random.Random(1).randbytes(100_000), MAGIC * 10_000])
def test_a_block_that_a_client_has_sent_is_not_found_behind_a_torn_header(
    tmp_path: Path, noise: bytes, level: int
) -> None:
    forged = [bytes(shift) + block(5, 1) + noise for shift in range(8)]
    torn = with_bodies(3, *forged, level=level)
    put(tmp_path, block(0, 3), torn)
    assert [row["body"] for row in rows_of(tmp_path)[3:]] == forged
    put(tmp_path, block(0, 3), flipped(torn, 3), block(11, 1))
    found = list(JournalReader(tmp_path, skip=True).rows("0"))
    (gap,) = (item for item in found if isinstance(item, Gap))
    assert (gap.first, gap.rows) == (3, 8)
    assert numbers_of([item for item in found if not isinstance(item, Gap)]) == [0, 1, 2, 11]
    put(tmp_path, block(0, 3), flipped(torn, 3))
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2]
    write(tmp_path, range(3, 4))
    assert numbers_of(rows_of(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize("place", [place for _, place in PLACES], ids=[name for name, _ in PLACES])
def test_damage_in_the_middle(tmp_path: Path, place: int) -> None:
    first, second, third = block(0, 3), block(3, 2), block(5, 4)
    path = put(tmp_path, first, flipped(second, place), third)
    found = list(JournalReader(tmp_path).verify("0"))
    gaps = [item for item in found if isinstance(item, Gap)]
    assert [(gap.first, gap.rows, gap.reason) for gap in gaps] == [(3, 2, "damage")]
    assert str(path) in gaps[0].where
    holes = [item for item in found if isinstance(item, Hole)]
    assert holes == ([] if place >= HEADER_BYTES else [Hole(path, len(first), len(first) + len(second))])

    with pytest.raises(DamageError, match="rows 3 to 4"):
        rows_of(tmp_path)
    skipped = list(JournalReader(tmp_path, skip=True).rows("0"))
    assert [item for item in skipped if isinstance(item, Gap)] == gaps
    kept = [item for item in skipped if not isinstance(item, Gap)]
    assert numbers_of(kept) == [0, 1, 2, 5, 6, 7, 8]
    assert numbers_of(rows_of(tmp_path, start=5)) == [5, 6, 7, 8], "who is past the damage goes on"
    write(tmp_path, range(9, 10))
    assert numbers_of(rows_of(tmp_path, start=5)) == [5, 6, 7, 8, 9], "and so does the writer"


def test_damage_at_the_end_of_a_segment_that_is_not_the_last(tmp_path: Path) -> None:
    put(tmp_path, block(0, 3), block(3, 2)[:-9])
    put(tmp_path, block(5, 1), first=5)
    with pytest.raises(DamageError, match="rows 3 to 4 are missing"):
        rows_of(tmp_path)
    (hole, gap) = JournalReader(tmp_path).verify("0")
    assert isinstance(hole, Hole)
    assert isinstance(gap, Gap)
    assert (gap.first, gap.rows) == (3, 2)


def test_the_next_block_is_found_far_behind_large_damage(tmp_path: Path) -> None:
    noise = b"GWJBLOCK" * 3 + bytes(SEARCH_BYTES * 2 - 8 * 4)
    put(tmp_path, block(0, 1), noise, block(1, 1))
    found = list(JournalReader(tmp_path).verify("0"))
    assert [(item.offset, item.end - item.offset) for item in found if isinstance(item, Hole)] == [
        (len(block(0, 1)), len(noise))
    ]
    assert numbers_of([whole(row) for row in JournalReader(tmp_path, skip=True).rows("0")]) == [0, 1]


def test_a_journal_in_a_body_is_not_taken_for_blocks(tmp_path: Path) -> None:
    """Only damage makes a reader look for blocks, and a sound one is stepped over whole."""
    inner = block(50, 1)
    write(tmp_path, range(2))
    path = next(tmp_path.glob("*.gwj"))
    path.write_bytes(path.read_bytes() + inner[:-1])
    assert numbers_of(rows_of(tmp_path)) == [0, 1]


@pytest.mark.parametrize(
    "stored, byte_count",
    [
        (zlib.compress(bytes(50_000_000)), 100),  # makes more than it says
        (zlib.compress(b"abc"), 4),  # makes less
        (zlib.compress(bytes(1_000)), 0xFFFF_FFFF),  # says more than it can make
        (zlib.compress(b"abc" * 100)[:-6], 300),  # is cut
        (b"no zlib", 7),
        (b"", 1),
    ],
)
def test_a_compressed_buffer_makes_no_more_than_it_says(stored: bytes, byte_count: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamageError):
            decompressed(stored, byte_count)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_buffer_of_runs_makes_no_more_than_a_block_may_have() -> None:
    stored = struct.pack("<IIIIQ", 1, 8, (BUFFER_BYTES_MAX >> 3) + 1, 0, 7)
    with pytest.raises(DamageError):
        decode_runs(memoryview(stored), BUFFER_BYTES_MAX + 8)


@pytest.mark.parametrize("data", [b"", b"abc", bytes(1_000_000)])
def test_what_was_compressed_comes_back(data: bytes) -> None:
    for level in (1, 9):
        assert decompressed(memoryview(zlib.compress(data, level)), len(data)) == data

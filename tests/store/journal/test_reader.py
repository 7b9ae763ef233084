"""What a reader is given: positions, times, filters, extents, and a light import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.model.outcome import ACCEPTED
from gateway.store.journal.column_buffers import RowLabels, SettledMessages
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.format import Column, ColumnKind, Draft, Header, encode_columns, gap_draft
from gateway.store.journal.reader import Gap, JournalReader, ShardExtent
from gateway.store.journal.segments import segment_name
from tests.store.journal.samples import (
    UTC_US,
    bytes_of,
    gathered,
    message,
    numbers_of,
    rows_of,
    whole,
    whole_block,
)

MINUTE = 60_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four blocks of two rows, a minute apart, by routes a, b, a, b; the first two in a segment."""
    encoder = Encoder(0)
    blocks = []
    for number in range(4):
        labels = RowLabels("ab"[number % 2], "", "erp", "amqp091")
        messages = [message(2 * number), message(2 * number + 1)]
        at = UTC_US + number * MINUTE
        part = SettledMessages(labels, messages, messages, ACCEPTED, at, at + 9)
        blocks.append(bytes_of(encoder.encode(2 * number, gathered([part]))))
    (tmp_path / segment_name(0, 0)).write_bytes(b"".join(blocks[:2]))
    (tmp_path / segment_name(0, 4)).write_bytes(b"".join(blocks[2:]))
    return tmp_path


@pytest.mark.parametrize("start", range(10))
def test_from_a_position(folder: Path, start: int) -> None:
    assert numbers_of(rows_of(folder, start=start)) == list(range(start, 8))


TIMES = [
    (None, None, list(range(8))),
    (UTC_US, UTC_US + 1, [0, 1]),
    (UTC_US + 1, None, [2, 3, 4, 5, 6, 7]),
    (UTC_US + MINUTE, UTC_US + 3 * MINUTE, [2, 3, 4, 5]),
    (None, UTC_US, []),
    (UTC_US + 4 * MINUTE, None, []),
]


@pytest.mark.parametrize("begin, end, expected", TIMES, ids=range(len(TIMES)))
def test_a_time_range(folder: Path, begin: int | None, end: int | None, expected: list[int]) -> None:
    assert numbers_of(rows_of(folder, from_us=begin, to_us=end)) == expected


def test_blocks_out_of_the_time_range_are_not_read(folder: Path) -> None:
    """Their content may be damaged, and nobody notices."""
    path = folder / segment_name(0, 0)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    assert numbers_of(rows_of(folder, from_us=UTC_US + 1)) == [2, 3, 4, 5, 6, 7]


FILTERS = [
    ({"route": {"a"}}, [0, 1, 4, 5]),
    ({"route": {"a", "b"}}, list(range(8))),
    ({"route": {"c"}}, []),
    ({"source_protocol": {"mqtt"}, "route": {"b"}}, [2, 3, 6, 7]),
    ({"source_protocol": {"amqp091"}}, []),
    ({"source_address": {"plant/0"}}, [0, 3, 6]),
]


@pytest.mark.parametrize("only, expected", FILTERS, ids=range(len(FILTERS)))
def test_filters(folder: Path, only: dict[str, set[str]], expected: list[int]) -> None:
    assert numbers_of(rows_of(folder, only=only)) == expected


def test_blocks_without_the_route_are_not_given(folder: Path) -> None:
    found = [whole_block(item) for item in JournalReader(folder).blocks("0", only={"route": ["b"]})]
    assert [block.header.base for block in found] == [2, 6]


def test_the_extent(folder: Path) -> None:
    byte_count = sum(path.stat().st_size for path in folder.iterdir())
    expected = ShardExtent("0", 0, 8, 8, 0, 4, 2, byte_count, UTC_US, UTC_US + 3 * MINUTE, None, 4, 0, 2)
    assert JournalReader(folder).extent("0") == expected
    assert JournalReader(folder).extent("9") == ShardExtent("9", 0, 0, 0, 0, 0, 0, 0, None, None)


def test_columns_of_a_later_gateway(folder: Path) -> None:
    """A column that nobody here knows is carried along by its kind."""
    columns = encode_columns(
        [Column("colour", ColumnKind.UINT32, (255, 0)), Column("text", ColumnKind.TEXT, (255, 1, 2))]
    )
    header = Header(0, 1, 0, 0, 2, 5, 5, 2, 0, 0, 0)
    buffers = [b"\1\0\0\0\2\0\0\0", b"\0\0\0\0\1\0\0\0\2\0\0\0", b"xy"]
    data = bytes_of(Draft(header, columns, buffers))
    (folder / segment_name(1, 0)).write_bytes(data)
    assert rows_of(folder, "1") == [
        {"shard": "1", "sequence": 0, "colour": 1, "text": "x"},
        {"shard": "1", "sequence": 1, "colour": 2, "text": "y"},
    ]


def test_following_stops_when_told(folder: Path) -> None:
    found = list(JournalReader(folder).follow("0", 3, wait=lambda: False, only={"route": {"b"}}))
    assert [whole_block(item).header.base for item in found] == [2, 6]


def test_the_reader_is_light() -> None:
    """Spark imports it on its workers: neither the gateway's loop nor its libraries may come along."""
    script = "import sys, gateway.store.journal.reader; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    heavy = {"trio", "asyncio", "sqlite3", "pydantic", "structlog", "orjson", "fcntl"}
    assert not modules & heavy
    rooms = {name.split(".")[1] for name in modules if name.startswith("gateway.")}
    assert rooms <= {"store", "errors", "model"}


def test_gaps_are_items(folder: Path) -> None:
    gap_bytes = bytes_of(gap_draft(0, 8, 5, UTC_US, b'{"reason":"backlog","text":"slow"}'))
    path = folder / segment_name(0, 4)
    path.write_bytes(path.read_bytes() + gap_bytes)
    *rows, gap = JournalReader(folder).rows("0")
    assert gap == Gap("0", 8, 5, "backlog", "slow", gap.where if isinstance(gap, Gap) else "")
    assert numbers_of([whole(row) for row in rows]) == list(range(8))
    extent = JournalReader(folder).extent("0")
    assert (extent.rows, extent.missing, extent.next) == (8, 5, 13)
    assert JournalReader(folder).missing_count("0") == 5

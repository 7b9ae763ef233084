"""What gathers for a block: bodies of any size, in memory that is used again when the block is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.column_buffers import (
    COPIED_BYTES,
    MEMORIES_MAX,
    MEMORY_BYTES,
    Gathering,
    Memories,
    OwnEntries,
    SettledMessages,
    UnsharedColumns,
)
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import segment_name
from tests.store.journal.samples import HOME, bytes_of, gathered, whole


def settled(*sizes: int) -> SettledMessages:
    """Messages with bodies of these sizes, each of one letter."""
    bodies = [b"%c" % (97 + at % 26) * size for at, size in enumerate(sizes)]
    return SettledMessages(HOME, [Message(topic_address("t"), body) for body in bodies], None, ACCEPTED, 0, 0)


def bodies_of(folder: Path, gathering: Gathering) -> list[bytes]:
    """As they are read back."""
    (folder / segment_name(0, 0)).write_bytes(bytes_of(Encoder(0).encode(0, gathering)))
    return [whole(row)["body"] for row in JournalReader(folder).rows("0")]


HALF = MEMORY_BYTES // 2


@pytest.mark.parametrize(
    "parts",
    [
        [(HALF, HALF)],
        [(HALF, HALF), (1,)],
        [(HALF + 1, HALF)],
        [(HALF,), (MEMORY_BYTES,), (1, 2, 3), (0, 0)],
        [(0, 0), (0,)],
        [(5,) * 20, (5,) * 30],
        [(5,) * 20, (6,) * 30],
        [(5,) * 20, tuple(range(20)), (7,) * 20],
    ],
    ids=str,
)
def test_bodies_are_kept_in_their_order(tmp_path: Path, parts: list[tuple[int, ...]]) -> None:
    given = [settled(*sizes) for sizes in parts]
    found = bodies_of(tmp_path, gathered(given, body_bytes_max=2 * MEMORY_BYTES))
    assert found == [one.body for part in given for one in part.heads]


@pytest.mark.parametrize(
    "byte_count", [[HALF, HALF], [HALF, HALF, 1], [HALF + 1, HALF, 3], [MEMORY_BYTES + 1]]
)
def test_entries_of_their_own_are_kept_in_their_order(byte_count: list[int]) -> None:
    entries = OwnEntries(Memories().take())
    given = [b"%c" % (97 + at) * size for at, size in enumerate(byte_count)]
    for one in given:
        entries.add((b"\1", [one]), None)
    assert entries.column.data() == b"".join(given)
    assert entries.sizes == byte_count
    assert entries.forms == bytes([1] * len(byte_count))
    assert entries.lengths is None


def test_what_is_left_out_takes_no_room(tmp_path: Path) -> None:
    gathering = gathered([settled(3, 9, 3), settled(9, 9), settled(3, 3)], body_bytes_max=5)
    assert gathering.bodies.used_bytes == len(gathering.bodies.data()) == 12
    assert gathering.byte_count == 39
    assert bodies_of(tmp_path, gathering) == [b"aaa", None, b"ccc", None, None, b"aaa", b"bbb"]


def test_memory_is_used_again_and_not_hoarded() -> None:
    memories = Memories()
    used = [memories.take() for _ in range(MEMORIES_MAX + 3)]
    assert len(set(map(id, used))) == len(used)
    for memory in used:
        assert len(memory) == MEMORY_BYTES
        memories.give_back(memory)
    again = [memories.take() for _ in range(MEMORIES_MAX + 1)]
    assert {id(one) for one in again[:-1]} <= {id(one) for one in used}
    assert id(again[-1]) not in {id(one) for one in used}


@pytest.mark.parametrize("byte_count, lent", [(0, 0), (COPIED_BYTES, 0), (COPIED_BYTES + 1, 1)])
def test_a_small_block_that_waits_keeps_no_memory(byte_count: int, lent: int) -> None:
    gathering = gathered(
        [settled(byte_count)], body_bytes_max=MEMORY_BYTES, apart=UnsharedColumns(True, True, True)
    )
    kept, free = gathering.memories(lent=True), gathering.memories(lent=False)
    assert (len(kept), len(free)) == (lent, 4 - lent)
    written = bytes(gathering.bodies.data())
    found = gathering.bodies.data()
    for memory in free:
        memory[:] = bytes(len(memory))  # whoever has it next
    assert found == written == b"a" * byte_count

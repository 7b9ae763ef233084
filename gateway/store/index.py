"""Index in memory of the rows that are stored of each log; the database has no such index.

A log is a sequence of messages, each at a position. A row is a run of messages with consecutive positions.
Rows of one log never overlap. The settled messages of a row are an integer whose bit k stands for position
`first` + k; WHOLE has all bits set, whatever the length of the row. The index is read once at the start and
updated after each commit.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

WHOLE: Final = -1
TRANSIENT: Final = b"transient"
"""Tag of messages that only overflow from memory: they are deleted at the next start."""
_BEYOND: Final = 1 << 62  # beyond any position
_HOLES_MIN: Final = 64  # with fewer holes, moving the other rows is not worthwhile


@dataclass(slots=True, eq=False)
class Log:
    """Durable sequence of messages: a queue, a session's queue or an outbox.

    `dropped` is True once it is deleted.
    """

    id: int
    kind: str
    name: str
    dropped: bool = False


class StoredRow(NamedTuple):
    """Stored row of messages: those at positions `first` to `first + count - 1` of a log.

    `byte_count` is the size of its messages in bytes, with overhead, including those that were settled since
    the row was written. In `settled`, the bit of each settled message is set, the first position in the
    lowest bit of the first byte; None if no message is settled.
    """

    id: int
    first: int
    count: int  # type: ignore[assignment]  # tuple.count is of no use here
    byte_count: int
    settled: bytes | None

    @property
    def live(self) -> int:
        """Number of unsettled messages in this row."""
        return self.count - (int.from_bytes(self.settled, "little").bit_count() if self.settled else 0)


class LogExtent(NamedTuple):
    """Summary of a log: its `count` unsettled messages are at positions `first` to `end - 1`.

    `byte_count` is the size in bytes, with overhead, of all messages in the log's rows, also of settled ones.
    """

    first: int
    end: int
    count: int  # type: ignore[assignment]  # as in StoredRow
    byte_count: int


class LogRows:
    """Rows of one log in order of position.

    A deleted row leaves a hole (a row with 0 messages) until `compact` removes it.
    """

    __slots__ = ("_byte_count", "_counts", "_firsts", "_holes", "_ids")

    def __init__(self) -> None:
        self._firsts = array("q")
        self._ids = array("q")
        self._counts = array("I")
        self._byte_count = array("q")
        self._holes = 0

    def __len__(self) -> int:
        return len(self._ids) - self._holes

    def add(self, id: int, first: int, count: int, byte_count: int) -> None:
        """Add a written row with the positions `first` to `first + count - 1`.

        `byte_count` is the size of its messages in bytes, with overhead.
        """
        at = len(self._firsts)
        if at and first < self._firsts[-1]:
            at = bisect_left(self._firsts, first)
        self._firsts.insert(at, first)
        self._ids.insert(at, id)
        self._counts.insert(at, count)
        self._byte_count.insert(at, byte_count)

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (id, first, count, byte_count) of each row with any of the positions `start` to `stop - 1`.

        Rows are in order of position.
        """
        firsts, ids, counts = self._firsts, self._ids, self._counts
        at = max(bisect_right(firsts, start) - 1, 0)
        # A hole keeps its first position, at which another row may have been written.
        while at and not counts[at]:
            at -= 1
        for place in range(at, len(firsts)):
            first = firsts[place]
            if first >= stop:
                return
            if first + counts[place] > start and counts[place]:
                yield ids[place], first, counts[place], self._byte_count[place]

    def remove(self, id: int, first: int) -> None:
        """Replace the deleted row `id` by a hole; `first` is the row's first position."""
        at = bisect_left(self._firsts, first)
        while self._ids[at] != id:
            at += 1
        self._counts[at] = 0
        self._holes += 1

    def compact(self) -> None:
        """Remove the holes that deleted rows have left, if there are many."""
        holes, places = self._holes, len(self._ids)
        if holes != places and (holes < _HOLES_MIN or holes * 2 < places):
            return
        filled = [at for at, count in enumerate(self._counts) if count]
        self._firsts = array("q", map(self._firsts.__getitem__, filled))
        self._ids = array("q", map(self._ids.__getitem__, filled))
        self._byte_count = array("q", map(self._byte_count.__getitem__, filled))
        self._counts = array("I", map(self._counts.__getitem__, filled))
        self._holes = 0

    def from_position(
        self, position: int, count: int, byte_count: int, bits: Callable[[int], int]
    ) -> tuple[list[int], int]:
        """Return the ids of the next rows from `position` on, and the position behind the last of them.

        The rows together have at least `count` unsettled messages or `byte_count` bytes, unless the log has
        fewer. `bits` returns which messages of a row are settled; rows without unsettled messages are left
        out.
        """
        chosen: list[int] = []
        end = position
        for id, first, size, more in self.overlapping(position, _BEYOND):
            settled = bits(id)
            if settled == WHOLE:
                continue
            chosen.append(id)
            end = first + size
            before = max(position - first, 0)
            count -= size - before - (settled >> before).bit_count()
            byte_count -= more
            if count <= 0 or byte_count <= 0:
                break
        return chosen, end

    def all(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (id, first, count, byte_count) of each row, in order of position."""
        for row in zip(self._ids, self._firsts, self._counts, self._byte_count, strict=True):
            if row[2]:
                yield row

    def ids(self) -> array[int]:
        """Return the ids of all rows."""
        return array("q", [id for id, count in zip(self._ids, self._counts, strict=True) if count])


class Index:
    """Rows of every log, and which of their messages are settled.

    `settled` has an integer for each row with settled messages: bit k is for the message at the row's first
    position + k.
    """

    def __init__(self) -> None:
        self.logs: dict[int, LogRows] = {}
        self.settled: dict[int, int] = {}  # by row; a row that is missing has no settled message

    def of(self, log: int) -> LogRows:
        """Return the rows of the log with id `log`, which may be empty."""
        rows = self.logs.get(log)
        if rows is None:
            rows = self.logs[log] = LogRows()
        return rows

    def extent(self, log: int) -> LogExtent:
        """Return the summary of the log with id `log`."""
        found = self.logs.get(log)
        if found is None or not len(found):
            return LogExtent(0, 0, 0, 0)
        start = end = messages = sizes = 0
        for id, first, count, byte_count in found.all():
            if not messages:
                start = first
            end = first + count
            settled = self.settled.get(id)
            messages += count if settled is None else count - settled.bit_count()
            sizes += byte_count
        return LogExtent(start, end, messages, sizes)

    def rows(self, log: int) -> list[StoredRow]:
        """Return the rows of the log with id `log`, in order of position."""
        found = self.logs.get(log)
        if found is None:
            return []
        if not self.settled:
            return [
                StoredRow(id, first, count, byte_count, None) for id, first, count, byte_count in found.all()
            ]
        settled = self.settled
        return [
            StoredRow(id, first, count, byte_count, bytes_of(settled[id], count) if id in settled else None)
            for id, first, count, byte_count in found.all()
        ]


def ranges(positions: Sequence[int] | range) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each range of consecutive numbers in `positions`; `stop` is not included.

    The positions may be in any order, and repeated.
    """
    if not positions:
        return
    if isinstance(positions, range) and positions.step == 1:
        yield positions.start, positions.stop
        return
    first, last = positions[0], positions[-1]
    if last - first + 1 == len(positions) and list(positions) == list(range(first, last + 1)):
        yield first, last + 1
        return
    ordered = sorted(set(positions))
    start = stop = ordered[0]
    for position in ordered:
        if position != stop:
            yield start, stop
            start = stop = position
        stop += 1
    yield start, stop


def position_bits(first: int, count: int, start: int, stop: int) -> int:
    """Return the bits of the positions `start` to `stop - 1` of a row, as an integer.

    The row has `count` positions from `first` on; bit 0 is for `first`. Return WHOLE if all bits are set.
    """
    low = start - first if start > first else 0
    high = stop - first if stop - first < count else count
    if high - low == count:
        return WHOLE
    return ((1 << (high - low)) - 1) << low


def merge_bits(bits: int, more: int, count: int) -> int:
    """Return the union of the bits `bits` and `more` of a row with `count` positions.

    Return WHOLE if all bits are set.
    """
    bits |= more
    return WHOLE if bits == WHOLE or bits == (1 << count) - 1 else bits


def bytes_of(bits: int, count: int) -> bytes:
    """Return the bits of a row with `count` positions as bytes, in their stored form."""
    return (bits & ((1 << count) - 1)).to_bytes((count + 7) // 8, "little")


def unsettled(bits: int, count: int) -> list[int]:
    """Return the offsets, from 0 to `count - 1`, of the messages whose settled bit in `bits` is not set."""
    if bits == WHOLE:
        return []
    text = f"{bits:0{count}b}"
    return [offset for offset, bit in enumerate(reversed(text)) if bit == "0"]

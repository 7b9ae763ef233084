"""File for large rows beside the database, `gateway.heap`.

SQLite writes a row page by page to its write-ahead log, with a checksum for each page, and later again to its
file. For a row of 64 KiB or more that is four times the work of the disk. Such rows are written to this file
instead, each in one piece, and the table `places` of the database contains their positions. A row is on disk
before the transaction that refers to it is committed, and its space is reused only after a transaction that
no longer refers to it. So every row that the database refers to is complete, even after a crash, and all
other space is free. No other record is needed.

While another process copies the store (copy_lock.py), space that is no longer needed is not overwritten.

Overwriting space that the file already has costs only the write itself, without an allocation. Some free
space behind the last row therefore stays in the file while the gateway runs.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Final, NamedTuple

from gateway.errors import StoreError
from gateway.store.copy_lock import is_copied
from gateway.store.folder import sync_path

HEAP: Final = "gateway.heap"
BYTES_MIN: Final = 65_536  # bytes; a smaller row is faster in the database: here it costs one more sync
BLOCK: Final = 4_096  # bytes; places begin and end at whole blocks
KEPT_BYTES: Final = 67_108_864  # free bytes behind the last row that the file keeps
HOLES_TRIED_MAX: Final = 1_000  # before the row is written at the end
MOVED_BYTES_MAX: Final = 16_777_216  # bytes moved at once
SPARSE: Final = 4  # a quarter of the file is free within: rows move from the end into the holes
PARTS_MAX: Final = 1_024  # byte strings of one write: IOV_MAX


class RowPlace(NamedTuple):
    """Position and size of a row in the heap file, in bytes."""

    at: int
    byte_count: int

    @property
    def end(self) -> int:
        """Position behind the last block of the row."""
        return self.at + (self.byte_count + BLOCK - 1) // BLOCK * BLOCK


class Heap:
    """Heap file, with the position and size of each of its rows in memory.

    Not thread-safe: only one thread at a time may use it.
    """

    def __init__(self, folder: Path, places: Mapping[int, RowPlace]) -> None:
        """Open the heap file in `folder`, creating it if necessary.

        `places` are the positions and sizes of rows that the database has, by row id. Raises OSError, and
        StoreError if two rows overlap.
        """
        for one, other in pairwise(sorted(places.values())):
            if one.end > other.at:
                raise StoreError(f"two rows refer to byte {other.at} of {HEAP}")
        new = not (folder / HEAP).exists()
        self._descriptor = os.open(folder / HEAP, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if new:
            sync_path(folder)
        self.places = dict(places)
        self._holes: list[tuple[int, int]] = []  # start and end, in order; no hole touches another
        self._dropped: list[tuple[int, int]] = []  # to become holes when nothing copies the file
        self._free = 0  # bytes in holes
        self._end = 0  # position behind the last row
        self._written = False  # True if something was written since the last sync
        for place in sorted(self.places.values()):
            self._drop(self._end, place.at)
            self._end = place.end
        end, blocks = self._end, -(-os.fstat(self._descriptor).st_size // BLOCK)
        if blocks * BLOCK > end:
            self._end = blocks * BLOCK
            self._drop(end, self._end)
        self._last = {place.end: row for row, place in self.places.items()}

    def write(self, row: int, parts: Sequence[bytes]) -> RowPlace:
        """Write a row, given as consecutive byte strings, into free space, and return its place.

        The row is durable only after `sync`. Raises OSError; then the space is free again.
        """
        byte_count = sum(map(len, parts))
        place = RowPlace(self._first_fit(byte_count), byte_count)
        self._place_row(row, place)
        try:
            at = place.at
            for first in range(0, len(parts), PARTS_MAX):
                some = parts[first : first + PARTS_MAX]
                at = self._write(at, some)
        except BaseException:
            self.free(row)
            raise
        self._written = True
        return place

    def _write(self, at: int, parts: Sequence[bytes]) -> int:
        """Write the byte strings `parts` at position `at`, and return the position behind them."""
        byte_count = sum(map(len, parts))
        done = os.pwritev(self._descriptor, parts, at)
        if done < byte_count:  # the disk is full, or a signal came: the next write shows which
            rest = memoryview(b"".join(parts))
            while done < byte_count:
                done += os.pwrite(self._descriptor, rest[done:], at + done)
        return at + byte_count

    def sync(self) -> None:
        """Flush all written rows to the disk. Raises OSError."""
        if self._written:
            os.fdatasync(self._descriptor)
            self._written = False

    def read(self, row: int) -> bytes:
        """Return the bytes of a row. Raises StoreError if they are missing."""
        place = self.places.get(row)
        if place is None:
            raise StoreError(f"the row has no place in {HEAP}")
        return read(self._descriptor, place)

    def free(self, row: int) -> None:
        """Free the space of a row that the database no longer refers to."""
        place = self.places.pop(row)
        del self._last[place.end]
        self._drop(place.at, place.end)

    # Free space.

    def _drop(self, start: int, end: int) -> None:
        """Free the bytes from `start` to `end`, or note them while another process copies the file.

        They are then freed when the copy has ended.
        """
        if start != end:
            self._dropped.append((start, end))
            self._release_dropped()

    def _release_dropped(self) -> None:
        if self._dropped and not is_copied(self._descriptor):
            for start, end in self._dropped:
                self._release(start, end)
            self._dropped.clear()

    def _first_fit(self, byte_count: int) -> int:
        """Return the start of a range of free bytes for `byte_count` bytes, or the end of the rows.

        Only the first HOLES_TRIED_MAX free ranges are tried.
        """
        for start, end in islice(self._holes, HOLES_TRIED_MAX):
            if end - start >= byte_count:
                return start
        return self._end

    def _place_row(self, row: int, place: RowPlace) -> None:
        """Record the position and size of a row (`place`), and remove its bytes from the free space."""
        self.places[row] = place
        self._last[place.end] = row
        if place.at == self._end:
            self._end = place.end
            return
        index = bisect_left(self._holes, (place.at,))
        _, end = self._holes[index]
        self._free -= place.end - place.at
        if end == place.end:
            del self._holes[index]
        else:
            self._holes[index] = (place.end, end)

    def _release(self, start: int, end: int) -> None:
        """Add the bytes from `start` to `end` to the free space, and merge them with free neighbours."""
        if start == end:
            return
        holes = self._holes
        index = bisect_left(holes, (start,))
        self._free += end - start
        if index < len(holes) and holes[index][0] == end:
            end = holes.pop(index)[1]
        if index and holes[index - 1][1] == start:
            index -= 1
            start = holes.pop(index)[0]
        if end == self._end:
            self._end = start
            self._free -= end - start
        else:
            holes.insert(index, (start, end))

    # Housekeeping.

    @property
    def is_sparse(self) -> bool:
        """True if there is so much free space between the rows that moving rows into it is worthwhile."""
        return self._free * SPARSE > self._end > KEPT_BYTES

    def move(self) -> dict[int, RowPlace]:
        """Copy rows from the end of the file into free space before them, and flush them to the disk.

        Returns the former places of the moved rows, by row id. They stay reserved until `finish_move`. While
        another process copies the file, no row is moved. Raises OSError.
        """
        former: dict[int, RowPlace] = {}
        self._release_dropped()
        if self._dropped:
            return former
        try:
            self._copy(former)
            self.sync()
        except BaseException:
            self.finish_move(former, committed=False)
            raise
        return former

    def _copy(self, former: dict[int, RowPlace]) -> None:
        """Copy at most about MOVED_BYTES_MAX bytes of rows into free space, last row first.

        The former places of the rows are added to `former` by row id.
        """
        copied = 0
        end = self._end
        while copied < MOVED_BYTES_MAX and (row := self._last.get(end)) is not None:
            place = self.places[row]
            room = self._first_fit(place.byte_count)
            if room >= place.at:
                break
            try:
                data = self.read(row)
            except StoreError:  # it stays; the reader of its messages reports the fault
                break
            self._write(room, [data])
            self._written = True
            former[row] = place
            self._place_row(row, RowPlace(room, place.byte_count))
            copied += place.byte_count
            end = place.at
            if end not in self._last and end:  # there is a hole before it
                end = self._holes[bisect_left(self._holes, (end,)) - 1][0]

    def finish_move(self, former: Mapping[int, RowPlace], *, committed: bool) -> None:
        """Free the former places of moved rows, or their new places if these were not committed."""
        for row, place in former.items():
            freed = place if committed else self.places[row]
            if not committed:
                self.places[row] = place
            del self._last[freed.end]
            self._drop(freed.at, freed.end)

    def shorten(self, reserve_bytes: int = KEPT_BYTES) -> None:
        """Truncate the free space behind the last row, except `reserve_bytes` bytes. Raises OSError."""
        self._release_dropped()
        if os.fstat(self._descriptor).st_size > self._end + reserve_bytes:
            os.ftruncate(self._descriptor, self._end + reserve_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def error_text(error: Exception) -> str:
    """Return the text of a disk error; for a full disk "the disk is full"."""
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return "the disk is full" if full else f"{HEAP}: {error.strerror}"
    return str(error)


def read(descriptor: int, place: RowPlace) -> bytes:
    """Return the bytes of the row at `place` in an open heap file. Raises StoreError if they are missing."""
    try:
        data = os.pread(descriptor, place.byte_count, place.at)
    except OSError as error:
        raise StoreError(f"{HEAP} cannot be read at {place.at}: {error.strerror}") from error
    if len(data) != place.byte_count:
        raise StoreError(f"{HEAP} ends before byte {place.at + place.byte_count}")
    return data

"""Large rows, in a file beside the database, `gateway.heap`.

SQLite writes a row page by page, with a checksum for each, to its log, and later again to its file: for a row
of 64 KiB and more that costs four times what the disk takes. Such rows stand here, each in one piece, and the
database knows where (table `places`). A row is on disk here before the transaction that names it is
committed, and its place is used again only after a transaction that does not name it any more: so whatever
the database names is whole, after a crash too, and what it does not name is free. Nothing else has to be
written down.

Who writes over a place that the file had before waits for nothing but the octets themselves; so some of what
is free behind the last row stays in the file while the gateway runs.
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

HEAP: Final = "gateway.heap"
OCTETS_MIN: Final = 65_536  # a smaller row is cheaper in the database: here it costs one more sync
BLOCK: Final = 4_096  # places begin and end at whole ones
KEPT_OCTETS: Final = 67_108_864  # free behind the last row, that the file keeps
HOLES_TRIED_MAX: Final = 1_000  # before the row goes to the end
MOVED_OCTETS_MAX: Final = 16_777_216  # in one go
SPARSE: Final = 4  # a fourth of it free, within: rows move from the end into the holes
PARTS_MAX: Final = 1_024  # octet strings of one write: IOV_MAX


class Place(NamedTuple):
    """Where a row stands, in octets."""

    at: int
    octets: int

    @property
    def end(self) -> int:
        """Behind its last block."""
        return self.at + (self.octets + BLOCK - 1) // BLOCK * BLOCK


class Heap:
    """The file, and who has which place in it. One thread at a time may use it."""

    def __init__(self, folder: Path, places: Mapping[int, Place]) -> None:
        """`places`: what the database names, by row. Raises OSError, StoreError when they overlap."""
        for one, other in pairwise(sorted(places.values())):
            if one.end > other.at:
                raise StoreError(f"two rows are said to be at octet {other.at} of {HEAP}")
        new = not (folder / HEAP).exists()
        self._descriptor = os.open(folder / HEAP, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if new:
            named = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            os.fsync(named)
            os.close(named)
        self.places = dict(places)
        self._holes: list[tuple[int, int]] = []  # start and end, in order; none touches another
        self._free = 0  # octets in holes
        self._end = 0  # behind the last row
        self._written = False  # since the last sync
        for place in sorted(self.places.values()):
            self._release(self._end, place.at)
            self._end = place.end
        self._last = {place.end: row for row, place in self.places.items()}

    def write(self, row: int, parts: Sequence[bytes]) -> Place:
        """Put a row, in octet strings that follow each other, where there is room; `sync` makes it last.

        Raises OSError; then its place is free.
        """
        octets = sum(map(len, parts))
        place = Place(self._room(octets), octets)
        self._take(row, place)
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
        """Where it ends."""
        wanted = sum(map(len, parts))
        done = os.pwritev(self._descriptor, parts, at)
        if done < wanted:  # the disk is full, or a signal came: the rest says which
            rest = memoryview(b"".join(parts))
            while done < wanted:
                done += os.pwrite(self._descriptor, rest[done:], at + done)
        return at + wanted

    def sync(self) -> None:
        """What was written is on disk. Raises OSError."""
        if self._written:
            os.fdatasync(self._descriptor)
            self._written = False

    def read(self, row: int) -> bytes:
        """What a row has here. Raises StoreError when it is not there."""
        place = self.places.get(row)
        if place is None:
            raise StoreError(f"it has no place in {HEAP}")
        return read(self._descriptor, place)

    def free(self, row: int) -> None:
        """Nobody names the row any more."""
        place = self.places.pop(row)
        del self._last[place.end]
        self._release(place.at, place.end)

    # Where there is room.

    def _room(self, octets: int) -> int:
        for start, end in islice(self._holes, HOLES_TRIED_MAX):
            if end - start >= octets:
                return start
        return self._end

    def _take(self, row: int, place: Place) -> None:
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
        """These octets are free, and one with what is free beside them."""
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

    # Keeping house.

    @property
    def sparse(self) -> bool:
        """So much is free between the rows that it is worth moving them."""
        return self._free * SPARSE > self._end > KEPT_OCTETS

    def move(self) -> dict[int, Place]:
        """Copy rows from the end into holes, and sync; returns the former places of those rows, which stay
        taken until `moved`. Raises OSError.
        """
        former: dict[int, Place] = {}
        try:
            self._copy(former)
            self.sync()
        except BaseException:
            self.moved(former, committed=False)
            raise
        return former

    def _copy(self, former: dict[int, Place]) -> None:
        copied = 0
        end = self._end
        while copied < MOVED_OCTETS_MAX and (row := self._last.get(end)) is not None:
            place = self.places[row]
            room = self._room(place.octets)
            if room >= place.at:
                break
            try:
                octets = self.read(row)
            except StoreError:  # it stays; whoever wants its messages is told
                break
            self._write(room, [octets])
            self._written = True
            former[row] = place
            self._take(row, Place(room, place.octets))
            copied += place.octets
            end = place.at
            if end not in self._last and end:  # a hole is before it
                end = self._holes[bisect_left(self._holes, (end,)) - 1][0]

    def moved(self, former: Mapping[int, Place], *, committed: bool) -> None:
        """The database names the new places of these rows; or the former ones, as its transaction failed."""
        for row, place in former.items():
            gone = place if committed else self.places[row]
            if not committed:
                self.places[row] = place
            del self._last[gone.end]
            self._release(gone.at, gone.end)

    def shorten(self, kept: int = KEPT_OCTETS) -> None:
        """Give back to the disk what is free behind the last row, but for `kept` octets. Raises OSError."""
        if os.fstat(self._descriptor).st_size > self._end + kept:
            os.ftruncate(self._descriptor, self._end + kept)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


def said(error: Exception) -> str:
    """What the disk said, in the words of the database if it is full."""
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return "the disk is full" if full else f"{HEAP}: {error.strerror}"
    return str(error)


def read(descriptor: int, place: Place) -> bytes:
    """What stands at a place of a heap that is open. Raises StoreError when it is not there."""
    try:
        octets = os.pread(descriptor, place.octets, place.at)
    except OSError as error:
        raise StoreError(f"{HEAP} cannot be read at {place.at}: {error.strerror}") from error
    if len(octets) != place.octets:
        raise StoreError(f"{HEAP} ends before octet {place.at + place.octets}")
    return octets

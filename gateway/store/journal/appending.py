"""Where blocks go: the segment in use, the next one, and the end of the oldest ones.

One process writes one shard of one folder. A block is written at a remembered offset, so that one that failed
half-way is written over when it is tried again. What the process before left incomplete at the end is cut
off when the shard is opened, and numbering goes on behind the last block that is whole; for this the newest
segment is kept however old it is.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Final

from gateway.clock import utc as wall_time
from gateway.model.times import WallTime
from gateway.store.journal.format import JournalError, Laid, Octets
from gateway.store.journal.segments import At, Segment, content_of, segment_name, segments_in, size_of, walk

RETENTION_SECS: Final = 60.0  # between two looks at what may go
PIECES_MAX: Final = 1_000  # that one system call takes (IOV_MAX is 1 024)
Pwritev = Callable[[int, Sequence[Octets], int], int]


class Appender:
    """The end of one shard. All methods but the constructor belong to the writer's thread.

    Limits of 0 do not limit. `next`: the sequence number of the next row; `cut`: octets that were cut off.
    Raises JournalError when another process writes the shard, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        shard: int,
        *,
        segment_bytes: int,
        segment_secs: float,
        retention_bytes: int,
        retention_secs: float,
        sync_interval_secs: float,
        utc: Callable[[], WallTime] = wall_time,
        pwritev: Pwritev = os.pwritev,
    ) -> None:
        if sys.byteorder != "little":
            raise JournalError("the journal is written on little-endian machines only")
        self.folder = folder
        self.shard = shard
        self._segment_bytes = segment_bytes
        self._segment_secs = segment_secs
        self._retention_bytes = retention_bytes
        self._retention_secs = retention_secs
        self._sync_secs = sync_interval_secs
        self._utc = utc
        self._pwritev = pwritev
        self.next = 0
        self.cut = 0
        self.segments = 0
        self._file: int | None = None
        self._octets = 0
        self._opened = utc()
        self._unsynced = False
        self._synced = utc()
        self._looked: WallTime | None = None  # at what may go
        self._lock = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._locked()
            self._recover()
        except OSError as error:
            self._unlock()
            raise JournalError(f"the journal in {folder} cannot be written: {error.strerror}") from error
        except JournalError:
            self._unlock()
            raise

    def append(self, blocks: Sequence[Laid]) -> int:
        """Write some of `blocks`, which follow each other; returns how many, at least one.

        Raises OSError; the journal is then as it was before.
        """
        first = blocks[0]
        if self._file is not None and self._is_full(first.header.octets):
            self._finish()
        if self._file is None:
            self._begin()
        assert self._file is not None
        room = (self._segment_bytes or sys.maxsize) - self._octets
        octets = first.header.octets
        pieces = [*first.pieces]
        count = 1
        for header, more in blocks[1:]:
            if octets + header.octets > room or len(pieces) + len(more) > PIECES_MAX:
                break
            octets += header.octets
            pieces += more
            count += 1
        try:
            self._write(self._file, pieces, octets)
        except OSError:
            with suppress(OSError):  # what is left of it would be written over, or cut at the next start
                os.ftruncate(self._file, self._octets)
            raise
        self._octets += octets
        self.next = blocks[count - 1].header.next
        self._unsynced = True
        return count

    def tick(self) -> None:
        """What is due by the clock: sync, the next segment, retention. Raises OSError."""
        now = self._utc()
        if self._file is not None and self._is_full(0):
            self._finish()
        elif self._unsynced and self._sync_secs and not 0 <= now - self._synced < self._sync_secs:
            self._sync()
        if self._looked is None or not 0 <= now - self._looked < RETENTION_SECS:
            self._retire()

    def close(self) -> None:
        """Sync what was written, and let others write the shard. Raises OSError."""
        try:
            if self._file is not None:
                self._finish()
        finally:
            self._unlock()

    def _locked(self) -> int:
        path = self.folder / f"{self.shard}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
            os.close(lock)
            raise JournalError(
                f"process {owner} writes shard {self.shard} of the journal in {self.folder};"
                " give this one another folder or shard"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        return lock

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _own(self) -> list[Segment]:
        return [one for one in segments_in(self.folder) if one.shard == str(self.shard)]

    def _recover(self) -> None:
        """Find the end of the newest segment, cut what is behind it, and go on there."""
        own = self._own()
        self.segments = len(own)
        if not own:
            return
        newest = own[-1]
        self.next = newest.first
        end, opened = 0, self._utc()
        with newest.path.open("rb", buffering=0) as file:
            for at in walk(file, newest.path):
                if isinstance(at, At) and content_of(file, at) is not None:
                    opened = opened if end else WallTime(at.header.first_us / 1e6)
                    end, self.next = at.end, at.header.next
            octets = size_of(file)
        self._file = os.open(newest.path, os.O_WRONLY | os.O_CLOEXEC)
        self._octets, self._opened = end, opened
        if octets > end:
            os.ftruncate(self._file, end)
            self.cut = octets - end
            self._unsynced = True

    def _begin(self) -> None:
        path = self.folder / segment_name(self.shard, self.next)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._octets = 0
        self._opened = self._utc()
        self.segments += 1
        if self._sync_secs:
            folder = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # the name of the file, too, has to survive
            finally:
                os.close(folder)

    def _is_full(self, octets: int) -> bool:
        """Whether `octets` more belong to the next segment; one without a block is never full."""
        if not self._octets:
            return False
        if self._segment_bytes and self._octets + octets > self._segment_bytes:
            return True
        return bool(self._segment_secs) and self._utc() - self._opened >= self._segment_secs

    def _write(self, file: int, pieces: Sequence[Octets], octets: int) -> None:
        written = self._pwritev(file, pieces, self._octets)
        while written < octets:
            begins = [0, *accumulate(map(len, pieces))]
            left = [
                piece[max(0, written - begin) :]
                for begin, piece in zip(begins, pieces, strict=False)
                if begin + len(piece) > written
            ]
            written += self._pwritev(file, left, self._octets + written)

    def _sync(self) -> None:
        assert self._file is not None
        self._synced = self._utc()
        os.fsync(self._file)
        self._unsynced = False

    def _finish(self) -> None:
        """The segment in use is complete."""
        file = self._file
        assert file is not None
        if self._unsynced and self._sync_secs:
            self._sync()
        self._file = None
        os.close(file)
        self._retire()

    def _retire(self) -> None:
        """Delete the oldest segments beyond the limits, never the newest."""
        self._looked = now = self._utc()
        own = self._own()
        octets = sum(segment.octets for segment in own)
        left = len(own)
        for segment in own[:-1]:
            over = self._retention_bytes and octets > self._retention_bytes
            old = self._retention_secs and _age(segment, now) > self._retention_secs
            if not (over or old):
                break
            segment.path.unlink(missing_ok=True)
            octets -= segment.octets
            left -= 1
        self.segments = left


def _age(segment: Segment, now: WallTime) -> float:
    """Seconds since the last row was written."""
    try:
        return now - WallTime(segment.path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0

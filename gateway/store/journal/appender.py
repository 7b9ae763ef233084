"""Files of one shard of a journal as its writer uses them: the current segment, the next one, and retention.

One process writes one shard of one folder. A block is written at a known offset, so that a partly written
block is overwritten by the next attempt. An incomplete block at the end that an earlier process left is cut
off when the shard is opened, and numbering continues behind the last complete block; the newest segment is
therefore never deleted, however old.

A segment is complete when it is large or old enough, or has too many small blocks. Then an index is written
behind its last block. A segment with many small blocks is rewritten with few large ones, and the small
segments of a past period are merged into one. Rewriting happens in another file, which then replaces the
first: a reader sees the old file or the new one, and a crash leaves one of them.

With a converter, complete segments become Parquet instead (conversion.py), oldest first.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from json import dumps
from pathlib import Path
from typing import Final

import structlog

from gateway.clock import utc as wall_time
from gateway.model.times import WallTime
from gateway.store.folder import sync_path
from gateway.store.journal.conversion import Conversion, ConversionError, remove_drafts
from gateway.store.journal.format import (
    LOOK_BYTES,
    BlockPieces,
    Bytes,
    DamageError,
    JournalError,
    gap_draft,
    lay_out,
    seal,
)
from gateway.store.journal.merge import merge_segments, remove_leftovers, statistics_of
from gateway.store.journal.reader import block_from
from gateway.store.journal.segments import (
    BlockLocation,
    Segment,
    content_of,
    segment_name,
    segments_in,
    size_of,
    walk,
    without_repeats,
)
from gateway.store.journal.summary import Summary, index_draft, is_small, summary_of
from gateway.store.recovery import contain_failure
from gateway.store.timeline import scale_ahead_secs, time_record

log = structlog.get_logger()

RETENTION_SECS: Final = 60.0  # between two checks of the retention limits
PIECES_MAX: Final = 1_000  # of one system call (IOV_MAX is 1 024)
MERGED_FROM: Final = 16  # small blocks; a segment with fewer is not rewritten
SMALL_MAX: Final = 256  # small blocks in the segment in use, which readers read one by one
# Bytes at a segment's end that stay in the page cache, for readers of new rows.
CACHED_BYTES: Final = 4 * 1_048_576
MERGED_PART: Final = 4  # part of a segment's size; a larger segment is not merged with others
CONVERT_AGAIN_SECS: Final = 3_600.0  # after a failed conversion
PERIOD_SECS: Final = 3_600.0  # period whose segments are merged, if their age has no limit
ROWS_MAX: Final = 0xFFFF_FFFF  # of a block
DAMAGED: Final = "the machine may have lost its power"
Pwritev = Callable[[int, Sequence[Bytes], int], int]


@dataclass(frozen=True, kw_only=True)
class JournalOptions:
    """Options of writing a journal. A limit of 0 means no limit.

    A segment is completed after `segment_bytes` or `segment_secs`; `retention_bytes` and `retention_secs`
    limit the size and age of a shard's segments. `compress` is zlib's level, 0 to 9; 0 does not compress.
    Bodies larger than `body_bytes_max` bytes are left out; 0 leaves out all. `sync_interval_secs` is the time
    between fsyncs; 0 never syncs. `backlog_bytes_max` limits the blocks that wait for the disk. `converter`
    is the command that writes complete segments as Parquet (conversion.py); without one they stay as blocks.
    """

    segment_bytes: int = 64 * 1_048_576
    segment_secs: float = 3_600.0
    retention_bytes: int = 10 * 1_073_741_824
    retention_secs: float = 7 * 86_400.0
    compress: int = 0
    body_bytes_max: int = 65_536
    flush_interval_secs: float = 0.2
    flush_rows: int = 4_096
    block_rows_max: int = 8_192
    backlog_bytes_max: int = 64 * 1_048_576
    sync_interval_secs: float = 1.0
    retry_secs: float = 1.0
    converter: tuple[str, ...] = ()


class Appender:
    """Writer of the segment files of one shard of the journal. Only the writer's thread calls its methods.

    `next` is the sequence number of the next row; `cut` is the size in bytes of the incomplete block that was
    cut off at the start, and `lost` the number of rows in damaged blocks. `utc` returns the wall-clock time.
    The constructor raises JournalError if another process writes the shard, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        shard: int,
        options: JournalOptions,
        *,
        utc: Callable[[], WallTime] = wall_time,
        pwritev: Pwritev = os.pwritev,
    ) -> None:
        if sys.byteorder != "little":
            raise JournalError("the journal is written on little-endian machines only")
        self.folder = folder
        self.shard = shard
        self._segment_bytes = options.segment_bytes
        self._segment_secs = options.segment_secs
        self._retention_bytes = options.retention_bytes
        self._retention_secs = options.retention_secs
        self._sync_secs = options.sync_interval_secs
        self._level = options.compress
        self._period = options.segment_secs or PERIOD_SECS
        self._summary = Summary(0, 0)  # of the segment in use
        self._merging_failed: set[Path] = set()
        self._to_merge = True  # True if there may be segments to merge
        self._periods_known: dict[tuple[Path, int], int] = {}
        self._converter = options.converter
        self._conversion: Conversion | None = None
        self._convert_from: dict[Path, WallTime] = {}  # time of the next attempt, after one has failed
        self._utc = utc
        self._pwritev = pwritev
        self.next = 0
        self.cut = 0
        self.lost = 0
        self.segments = 0
        self._file: int | None = None
        self._byte_count = 0
        self._let_go_to = 0  # offset up to which the file need not stay in the page cache
        self._opened = utc()  # when the segment in use was opened
        self._written = 0.0  # when its last row was written, on the scale of the segments' ages
        self._unsynced = False
        self._synced = utc()
        self._looked: WallTime | None = None  # time of the last check of the retention limits
        self._ahead_secs = 0.0  # time of the segments' ages minus the time of `utc`
        self._lock = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._locked()
            self._continue_time()
            self._recover()
        except OSError as error:
            self._unlock()
            raise JournalError(f"the journal in {folder} cannot be written: {error.strerror}") from error
        except JournalError:
            self._unlock()
            raise

    def append(self, blocks: Sequence[BlockPieces]) -> int:
        """Write the first block in `blocks`, and as many that follow as fit; return how many were written.

        The blocks must be consecutive. Raises OSError; then no block was written.
        """
        first = blocks[0]
        if self._file is not None and self._is_full(first.header.byte_count):
            self._finish()
        if self._file is None:
            self._begin(first.header.base)
        assert self._file is not None
        room = (self._segment_bytes or sys.maxsize) - self._byte_count
        byte_count = first.header.byte_count
        pieces = [*first.pieces]
        count = 1
        for header, more, _ in blocks[1:]:
            if byte_count + header.byte_count > room or len(pieces) + len(more) > PIECES_MAX:
                break
            byte_count += header.byte_count
            pieces += more
            count += 1
        try:
            self._write(self._file, pieces, byte_count)
        except OSError:
            with suppress(OSError):  # otherwise the rest is overwritten, or cut off at the next start
                os.ftruncate(self._file, self._byte_count)
            raise
        for header, _, statistics in blocks[:count]:
            self._summary.add(self._byte_count, header, statistics, small=is_small(header))
            self._byte_count += header.byte_count
        self.next = self._summary.next
        self._written = self._age_scale()
        self._unsynced = True
        return count

    def tick(self) -> None:
        """Run the timer: sync, complete the segment, delete, merge and convert old segments, each when due.

        Raises OSError.
        """
        now = self._utc()
        if self._file is not None and self._is_full(0):
            self._finish()
        elif self._unsynced and self._sync_secs and not 0 <= now - self._synced < self._sync_secs:
            self._sync()
        if self._looked is None or not 0 <= now - self._looked < RETENTION_SECS:
            self._retire()
        if self._conversion is not None:
            self._convert_on(self._conversion, now)
        elif self._to_merge:
            try:
                self._put_together(now)
            except JournalError as error:  # again after the next segment; what is recorded goes on
                self._to_merge = False
                log.warning("journal segments not merged", folder=str(self.folder), error=str(error))

    def close(self) -> None:
        """Sync what was written, and release the lock of the shard. Raises OSError."""
        try:
            if self._conversion is not None:
                self._conversion.stop()
            if self._file is not None:
                self._close_file()
                self._retire()
        finally:
            self._unlock()

    def _locked(self) -> int:
        """Lock the shard for this process, and return the descriptor of the lock file.

        Raises JournalError if another process has the lock, and OSError.
        """
        path = self.folder / f"{self.shard}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
            os.close(lock)
            raise JournalError(
                f"process {owner} writes shard {self.shard} of the journal in {self.folder}. Set"
                " journal.path to another folder, or use another replica name"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        return lock

    def _continue_time(self) -> None:
        """Read how far the clock for the segments' ages is ahead of the wall clock, as last recorded.

        So setting the wall clock while no gateway runs does not change the ages.
        """
        if self._time_file.exists():
            with contain_failure("time of the journal", self._time_file):
                self._ahead_secs = scale_ahead_secs(self._time_file.read_text())

    def _age_scale(self) -> float:
        """Return the present time of the clock for the segments' ages, in seconds.

        It is the wall clock's time with a correction, so that changes of the wall clock do not change the
        ages.
        """
        return self._utc() + self._ahead_secs

    def _record_time(self) -> None:
        """Write the present time of the clock for the segments' ages to a file, for the next process.

        Raises OSError.
        """
        draft = self._time_file.with_suffix(".time-new")
        draft.write_text(time_record(self._ahead_secs))
        draft.replace(self._time_file)

    @property
    def _time_file(self) -> Path:
        return self.folder / f"{self.shard}.time"

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _own_segments(self) -> list[Segment]:
        return [one for one in segments_in(self.folder) if one.shard == str(self.shard)]

    def _recover(self) -> None:
        """Open the newest segment to continue behind its last undamaged block; cut off what follows there.

        A complete segment is not opened; then only the numbering continues. Bytes that a power failure has
        damaged before an undamaged block are overwritten with a block that records the gap.
        """
        remove_leftovers(self.folder, self.shard)
        remove_drafts(self.folder, self.shard)
        own = self._without_repeats(self._own_segments())
        self.segments = len(own)
        if not own:
            return
        newest = own[-1]
        if newest.next is not None:
            self.next = newest.next
            return
        summary = Summary(newest.first, newest.first)
        end, opened = 0, self._utc()
        gaps: list[tuple[int, BlockPieces]] = []  # offset and block
        with newest.path.open("rb", buffering=0) as file:
            complete = summary_of(file, newest)
            if complete is not None:
                self.next = complete.next
                return
            for at in walk(file, newest.path):
                if isinstance(at, BlockLocation) and (raw := content_of(file, at)) is not None:
                    opened = opened if end else WallTime(at.header.first_us / 1e6)
                    if at.offset > end and (gap := self._gap_instead(summary.next, at, at.offset - end)):
                        gaps.append((end, gap))
                        summary.add(end, gap.header, None)
                    plain = at.header.rows and not at.header.is_gap
                    statistics = statistics_of(block_from(newest.shard, at, raw)) if plain else None
                    summary.add(at.offset, at.header, statistics, small=is_small(at.header))
                    end = at.end
            byte_count = size_of(file)
        self.next = summary.next
        self._summary = summary
        self._file = os.open(newest.path, os.O_WRONLY | os.O_CLOEXEC)
        self._unsynced = True  # also what a killed process has written
        for offset, gap in gaps:
            os.pwritev(self._file, gap.pieces, offset)
            self.lost += gap.header.rows
        self._byte_count, self._opened = (
            end,
            min(opened, self._utc()),
        )  # its rows have times of the wall clock
        # The file's time is on the scale if its writer closed it, and else that of the wall clock.
        written = newest.path.stat().st_mtime + max(self._ahead_secs, 0.0)
        self._written = min(written, self._age_scale())
        if byte_count > end:
            os.ftruncate(self._file, end)
            self.cut = byte_count - end

    def _gap_instead(self, first: int, following: BlockLocation, byte_count: int) -> BlockPieces | None:
        """Return a block of `byte_count` bytes which records that rows before the block `following` are lost.

        `first` is the number of the first lost row. Return None if no such block fits; then readers report
        the damage.
        """
        header = following.header
        reason = dumps({"reason": "damage", "text": DAMAGED}).encode().ljust(byte_count - LOOK_BYTES)
        rows = header.base - first
        if not 0 < rows <= ROWS_MAX:  # more, if `following` is part of a body that a client has chosen
            return None
        gap = seal(lay_out(gap_draft(self.shard, first, rows, header.first_us, reason), 0))
        return gap if gap.header.byte_count == byte_count else None

    def _without_repeats(self, own: list[Segment]) -> list[Segment]:
        """Delete segments in `own` whose rows are also in an earlier segment, and return the others.

        A merge that was killed after it wrote the merged segment leaves such segments.
        """
        remaining: list[Segment] = []
        reached = 0
        for segment in own:
            if segment.first < reached:
                segment.path.unlink(missing_ok=True)
                continue
            remaining.append(segment)
            if segment.next is not None:
                reached = segment.next
                continue
            with segment.path.open("rb", buffering=0) as file:
                summary = summary_of(file, segment)
            reached = segment.first if summary is None else summary.next
        return remaining

    def _begin(self, first: int) -> None:
        """Create the segment whose first row has number `first`, and write to it from now on."""
        path = self.folder / segment_name(self.shard, first)
        self._summary = Summary(first, first)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._byte_count = self._let_go_to = 0
        self._opened, self._written = self._utc(), self._age_scale()
        self.segments += 1
        if self._sync_secs:
            sync_path(self.folder)  # the name of the file has to survive, too

    def _is_full(self, byte_count: int) -> bool:
        """Return True if the next block, of `byte_count` bytes, must go to another segment.

        The reason is the segment's size, age, or number of small blocks. A segment without rows is never
        full.
        """
        if self._summary.next == self._summary.first:
            return False
        if self._summary.small >= SMALL_MAX:
            return True
        if self._segment_bytes and self._byte_count + byte_count > self._segment_bytes:
            return True
        return bool(self._segment_secs) and self._utc() - self._opened >= self._segment_secs

    def _write(self, file: int, pieces: Sequence[Bytes], byte_count: int) -> None:
        """Write `pieces` at the end of the segment; after a partial write, write the rest. Raises OSError.

        `file` is the segment's descriptor, `byte_count` the size of all pieces.
        """
        written = self._pwritev(file, pieces, self._byte_count)
        while written < byte_count:
            begins = [0, *accumulate(map(len, pieces))]
            unwritten = [
                piece[max(0, written - begin) :]
                for begin, piece in zip(begins, pieces, strict=False)
                if begin + len(piece) > written
            ]
            written += self._pwritev(file, unwritten, self._byte_count + written)

    def _sync(self) -> None:
        assert self._file is not None
        self._synced = self._utc()
        os.fsync(self._file)
        self._unsynced = False
        self._drop_cached_pages(self._file)

    def _drop_cached_pages(self, file: int) -> None:
        """Advise the system to drop the written pages of a file from the page cache, except the latest.

        Otherwise they would displace pages that are read more often.
        """
        begin, end = self._let_go_to, (self._byte_count // CACHED_BYTES - 1) * CACHED_BYTES
        if end > begin and hasattr(os, "posix_fadvise"):  # not on every system
            with suppress(OSError):  # only a hint
                os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_DONTNEED)
            self._let_go_to = end

    def _finish(self) -> None:
        """Complete the segment in use: append an index, or merge its blocks if many of them are small.

        Raises OSError; then the segment has no index and stays in use.
        """
        summary = self._summary
        file = self._file
        assert file is not None
        if summary.small < MERGED_FROM:
            if self._unsynced and self._sync_secs:
                self._sync()  # where an index is, no start checks the blocks before it
            index = seal(lay_out(index_draft(self.shard, self._byte_count, summary), 0))
            self._unsynced = True
            try:
                self._write(file, index.pieces, index.header.byte_count)
                if self._sync_secs:
                    self._sync()
            except OSError:
                with suppress(OSError):  # otherwise it is overwritten, or cut off at the next start
                    os.ftruncate(file, self._byte_count)
                raise
        self._close_file()
        if summary.small >= MERGED_FROM:
            self._merge([one for one in self._own_segments() if one.first == summary.first])
        self._to_merge = True
        self._retire()

    def _close_file(self) -> None:
        """Sync and close the segment in use.

        Its file's modification time is set to the time of its last write, by the clock for the segments'
        ages.
        """
        file = self._file
        assert file is not None
        if self._unsynced and self._sync_secs:
            self._sync()
        self._file = None
        try:
            os.utime(file, (self._written, self._written))  # retention does not use the wall clock
        finally:
            os.close(file)

    def _merge(self, segments: Sequence[Segment]) -> bool:
        """Merge complete segments into one. Return False if that failed; then they are unchanged."""
        try:
            merge_segments(segments, level=self._level)
        except (OSError, DamageError):
            self._merging_failed.update(segment.path for segment in segments)
            self._periods_known.update(dict.fromkeys([(one.path, one.inode) for one in segments], -1))
            return False
        return True

    def _put_together(self, now: WallTime) -> None:
        """Start a conversion to Parquet; if none is due, merge the small segments of one past period.

        `now` is the wall-clock time.
        """
        own = [one for one in self._own_segments() if self._file is None or one.first != self._summary.first]
        if self._converter and (conversion := self._to_convert(own, now)) is not None:
            self._conversion = conversion
            return
        for some in self._periods(own, now):
            if self._merge(some):
                return  # the next tick merges others
        self._to_merge = False

    def _to_convert(self, own: Sequence[Segment], now: WallTime) -> Conversion | None:
        """Start to convert the oldest segments in `own` that are not Parquet. Return the conversion, or None.

        A large segment is converted by itself as soon as it is complete; small ones are converted together
        when their period is over.
        """
        limit = self._segment_bytes or sys.maxsize
        waiting: list[Segment] = []
        period, byte_count = -1, 0
        ages_now = self._age_scale()
        for segment in without_repeats(own):
            if segment.next is not None or self._convert_from.get(segment.path, WallTime(0.0)) > now:
                if waiting:
                    break
                continue
            of = int((ages_now - _age(segment, ages_now)) // self._period)
            is_over = of < ages_now // self._period or segment.byte_count > limit // MERGED_PART
            if not is_over or (waiting and (of != period or byte_count + segment.byte_count > limit)):
                break
            waiting.append(segment)
            period, byte_count = of, byte_count + segment.byte_count
        if not waiting:
            return None
        try:
            return Conversion(self._converter, self.shard, waiting, self._end_of(waiting[-1], own))
        except OSError as error:
            self._not_converted(waiting, error, now)
        return None

    def _end_of(self, segment: Segment, own: Sequence[Segment]) -> int:
        """Return the sequence number behind the last row of a complete segment.

        `own` has all segments of the shard. Raises OSError.
        """
        with segment.path.open("rb", buffering=0) as file:
            summary = summary_of(file, segment)
        if summary is not None:
            return summary.next
        following = next((one.first for one in own if one.first > segment.first), None)
        if following is None:
            return self.next if self._file is None else self._summary.first
        return following

    def _convert_on(self, conversion: Conversion, now: WallTime) -> None:
        """Put the Parquet file in place if the conversion's process has ended; log a failure."""
        if not conversion.has_ended:
            return
        self._conversion = None
        try:
            conversion.commit()
        except (ConversionError, OSError) as error:
            self._not_converted(conversion.segments, error, now)
        self._retire()

    def _not_converted(self, segments: Sequence[Segment], error: Exception, now: WallTime) -> None:
        """Log a failed conversion; try to convert these segments again after CONVERT_AGAIN_SECS."""
        log.warning("journal segment not converted to Parquet", path=str(segments[0].path), error=str(error))
        later = WallTime(now + CONVERT_AGAIN_SECS)
        waiting = {path: until for path, until in self._convert_from.items() if until > now}
        self._convert_from = waiting | dict.fromkeys([one.path for one in segments], later)

    def _periods(self, own: Sequence[Segment], now: WallTime) -> Iterator[list[Segment]]:
        """Yield lists of consecutive small segments to merge, two or more, all from the same past period.

        `own` are the complete segments of the shard, `now` is the wall-clock time.
        """
        waiting: list[Segment] = []
        period, byte_count = -1, 0
        for segment in own:
            of = self._period_of(segment)
            most = (self._segment_bytes or sys.maxsize) // MERGED_PART
            if segment.byte_count > most:  # the few large segments of a busy hour are not merged
                of = -1
            fits = of == period and byte_count + segment.byte_count <= most * MERGED_PART
            if not fits:
                if len(waiting) > 1:
                    yield waiting
                waiting, byte_count = [], 0
            period = of
            if 0 <= of < now // self._period:
                waiting.append(segment)
                byte_count += segment.byte_count
        if len(waiting) > 1:
            yield waiting

    def _period_of(self, segment: Segment) -> int:
        """Return the number of the period in which a segment's earliest message was settled.

        Return -1 for a segment that must not be merged: it has no rows, is incomplete or Parquet, or an
        earlier merge of it failed. A period is `segment_secs` long.
        """
        period = self._periods_known.get((segment.path, segment.inode))
        if period is None:
            summary = None
            if segment.next is None and segment.path not in self._merging_failed:
                with suppress(FileNotFoundError), segment.path.open("rb", buffering=0) as file:
                    summary = summary_of(file, segment)
            rows = 0 if summary is None else summary.rows
            period = -1 if summary is None or not rows else int(summary.settled[0] / 1e6 // self._period)
            self._periods_known[segment.path, segment.inode] = period
        return period

    def _retire(self) -> None:
        """Delete the oldest segments beyond the limits of size and age, but never the newest segment."""
        self._looked, ages_now = self._utc(), self._age_scale()
        own = self._own_segments()
        byte_count = sum(segment.byte_count for segment in own)
        remaining = len(own)
        for segment in own[:-1]:
            over = self._retention_bytes and byte_count > self._retention_bytes
            old = self._retention_secs and _age(segment, ages_now) > self._retention_secs
            if not (over or old):
                break
            segment.path.unlink(missing_ok=True)
            byte_count -= segment.byte_count
            remaining -= 1
        self.segments = remaining
        with suppress(OSError):  # on a full disk the last record serves as well
            self._record_time()


def _age(segment: Segment, now: float) -> float:
    """Return the seconds from the last write of a segment to `now`, by the clock for the segments' ages."""
    try:
        return now - segment.path.stat().st_mtime
    except FileNotFoundError:
        return 0.0

"""Planning of reads: select ranges of rows and divide them into tasks.

The planner reads the summaries of files, and block headers of the file in use, never contents. A `BlockSpan`
is a run of blocks in one file, about one mebibyte; a stream's planner stores spans of unread rows, since
single blocks of a week would be too many. A task gets a `JournalPartition`: a range of rows of a shard, with
the place of its first block. If the writer has replaced that file meanwhile, the rows are found by their
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.journal.arrow import batch_of, expand_runs
from gateway.pipeline.journal.filters import ANY, Range
from gateway.pipeline.journal.options import EARLIEST, LATEST, Bound, LoadOptions, Offsets
from gateway.store.journal.reader import Block, BlockPlace, Gap, JournalReader
from gateway.store.journal.segments import Segment

KNOWN_AT_A_TIME: Final = 16  # Concurrent reads of file summaries in a store.
SPAN_BYTES: Final = 1_048_576
TIME: Final = "received"


class BlockSpan(NamedTuple):
    """Consecutive blocks of the journal, with the rows from `first` up to, not including, `next`.

    `place` is the position of the first block, and `byte_count` the size of all blocks.
    """

    first: int
    next: int
    place: BlockPlace
    byte_count: int


@dataclass
class JournalPartition(InputPartition):
    """Rows of a shard that one Spark task reads: from `first` up to, not including, `next`.

    `place` is the position of the block with which reading begins.
    """

    shard: str
    first: int
    next: int
    place: BlockPlace | None

    def split(self, count: int) -> Iterator[JournalPartition]:
        """Divide the rows into at most `count` partitions of about equal size.

        If a boundary is inside a block, both partitions read that block.
        """
        step = -(-(self.next - self.first) // count)
        for first in range(self.first, self.next, step):
            yield JournalPartition(self.shard, first, min(first + step, self.next), self.place)


class Shard:
    """Planner's state of one shard of the journal.

    It has the spans of blocks that may contain requested rows and are not planned yet. Requested rows were
    received in the range `received` (microseconds UTC) and have one of the routes `routes` (None: all).
    """

    def __init__(
        self,
        reader: JournalReader,
        name: str,
        first: int,
        received: Range = ANY,
        routes: frozenset[str] | None = None,
    ) -> None:
        self._reader = reader
        self._received = received
        self._routes = routes
        self.name = name
        self.next = first
        self._end: BlockPlace | None = None
        self._spans: list[BlockSpan] = []

    def read_new_blocks(self) -> int:
        """Add the blocks written since the last call. Return the number after that of the newest row."""
        for item in self._reader.block_ranges(self.name, self.next, near=self._end):
            if isinstance(item, Gap):
                self.next = item.first + item.rows
                continue
            self.next, self._end = item.next, item.end
            if self._received.misses(item.first_us, item.last_us) or self._is_unwanted(item.routes):
                continue
            last = self._spans[-1] if self._spans else None
            if last is not None and last.place.path == item.place.path and last.byte_count < SPAN_BYTES:
                self._spans[-1] = last._replace(next=self.next, byte_count=last.byte_count + item.byte_count)
            else:
                self._spans.append(BlockSpan(item.first, self.next, item.place, item.byte_count))
        return self.next

    def _is_unwanted(self, routes: frozenset[str] | None) -> bool:
        return self._routes is not None and routes is not None and not routes & self._routes

    def forget(self, end: int) -> None:
        """Drop the spans of blocks whose rows all have numbers below `end`."""
        first_place = next((place for place, span in enumerate(self._spans) if span.next > end), None)
        del self._spans[: len(self._spans) if first_place is None else first_place]

    def parts(self, first: int, end: int, byte_count: int) -> Iterator[JournalPartition]:
        """Yield partitions with the rows from `first` up to, not including, `end`.

        Each partition has blocks of about `byte_count` bytes.
        """
        begin, place, size = first, None, 0
        for span in self._spans:
            if span.next <= first or span.first >= end:
                continue
            if place is not None and size + span.byte_count > byte_count:
                yield JournalPartition(self.name, begin, span.first, place)
                place, size = None, 0
            if place is None:  # Blocks of other times may precede it and are skipped.
                begin, place = max(first, span.first), span.place
            size += span.byte_count
        if place is not None:
            yield JournalPartition(self.name, begin, end, place)

    def byte_count(self, first: int, end: int) -> int:
        """Return the approximate size in bytes of the blocks with the rows from `first` to `end` - 1."""
        return sum(span.byte_count for span in self._spans if span.next > first and span.first < end)


def reader_of(options: LoadOptions) -> JournalReader:
    """Return a reader for the journal in the folder of `options`."""
    return JournalReader(options.folder.path(), skip=not options.fail, expand=expand_runs)


def load_summaries(reader: JournalReader, begins: Mapping[str, int]) -> None:
    """Load the summaries of the journal's files that have requested rows.

    `begins` has, for each shard, the number of the first requested row. From a store the summaries are loaded
    concurrently, because a request takes longer than the transfer.
    """
    folder: object = reader.folder
    if isinstance(folder, Path):
        return
    to_read: list[Segment] = []
    for shard, first in begins.items():
        segments = reader.segments(shard)
        later = next((place for place, one in enumerate(segments) if one.first > first), len(segments))
        to_read += segments[max(0, later - 1) :]
    with ThreadPoolExecutor(KNOWN_AT_A_TIME) as pool:
        for _ in pool.map(reader.summary, to_read):
            pass


def first_of(reader: JournalReader, shard: str) -> int:
    """Return the number of the oldest row of a shard, or 0 if the shard has no files."""
    segments = reader.segments(shard)
    return segments[0].first if segments else 0


def next_of(reader: JournalReader, shard: str) -> int:
    """Return the number after that of the newest row of a shard."""
    return reader.end(shard)


def bounded(reader: JournalReader, bound: Bound, shards: Iterable[str]) -> Offsets:
    """Return the row number of the start or end `bound` of a read, for each of the shards.

    Raises PipelineError if `bound` names a shard that does not exist.
    """
    names = list(shards)
    unknown = sorted(set(bound.offsets) - set(names))
    if unknown:
        raise PipelineError(
            f"the journal in {reader.folder} has no shard {', '.join(unknown)};"
            f" it has {', '.join(names) or 'none'}"
        )
    return {shard: _number(reader, bound, shard) for shard in names}


def _number(reader: JournalReader, bound: Bound, shard: str) -> int:
    if bound.at_us is not None:
        return _first_row_at(reader, shard, bound.at_us)
    number = bound.offsets.get(shard, bound.otherwise)
    if number == EARLIEST:
        return first_of(reader, shard)
    return next_of(reader, shard) if number == LATEST else number


def _first_row_at(reader: JournalReader, shard: str, at_us: int) -> int:
    """Return the number of the first row of a shard that was received at `at_us` or later."""
    for block in reader.blocks(shard, from_us=at_us):
        if isinstance(block, Block):
            times = batch_of(block, (TIME,))[TIME].cast("int64")
            found = pc.index(pc.greater_equal(times, at_us), True).as_py()
            if found >= 0:
                return int(block.header.base + found)
    return next_of(reader, shard)


def count_late_rows(
    reader: JournalReader, shard: str, place: int, at_us: int, chosen: Callable[[Block], Arrow | None]
) -> int:
    """Return how many of a shard's rows from number `place` on were received before `at_us`.

    `at_us` is in microseconds UTC. Such rows are late, because their messages were settled later than others.
    Only rows that `chosen` selects are counted; `chosen` returns a boolean array for a block, or None for all
    rows. Reading stops where the journal has no further rows received before `at_us`.
    """
    end = None
    for segment in reader.segments(shard):
        summary = reader.summary(segment)
        if summary is not None and summary.next > place and summary.low_us >= at_us:
            end = summary.next
            break
    found = 0
    for block in reader.blocks(shard, place, to_us=at_us, end=end):
        if isinstance(block, Block):
            early = pc.less(batch_of(block, (TIME,))[TIME].cast("int64"), at_us)
            selected = chosen(block)
            counted = early if selected is None else pc.and_(early, selected)
            found += pc.sum(counted.slice(block.begin - block.header.base)).as_py() or 0
    return found


def divide_rows(waiting: dict[str, int], most: int) -> dict[str, int]:
    """Return how many rows to read from each shard, in proportion to its number of unread rows (`waiting`).

    The total is `most`, or that of `waiting` if it is less.
    """
    total = sum(waiting.values())
    if total <= most:
        return waiting
    shares = {shard: rows * most // total for shard, rows in waiting.items()}
    remaining = most - sum(shares.values())
    for shard in sorted(waiting, key=lambda name: waiting[name] * most % total, reverse=True)[:remaining]:
        shares[shard] += 1
    return shares


def parts_of(
    shards: Mapping[str, Shard], ranges: Mapping[str, tuple[int, int]], options: LoadOptions
) -> list[JournalPartition]:
    """Return the partitions, one for each Spark task, for a range of rows of each shard.

    `ranges` has the range by shard: the first row, and the row before which it ends. There are at least
    `minPartitions` partitions, and a partition has at most about `partitionBytes` bytes of blocks. The
    partitions of one shard have similar sizes.
    """
    byte_count = {name: shards[name].byte_count(*range_) for name, range_ in ranges.items()}
    size = max(1, min(options.partition_bytes, sum(byte_count.values()) // options.partitions_min))
    parts: list[JournalPartition] = []
    for name, range_ in ranges.items():
        count = max(1, -(-(byte_count[name] - SPAN_BYTES) // size))
        parts += shards[name].parts(*range_, byte_count[name] // count + SPAN_BYTES)
    if not 0 < len(parts) < options.partitions_min:
        return parts
    each = -(-options.partitions_min // len(parts))
    return [piece for part in parts for piece in part.split(each)]

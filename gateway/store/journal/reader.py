"""Reader of the journal: blocks, rows, and gaps between them.

A reader may run beside a live writer, in any process, on any machine that sees the folder. It has only the
file open that it reads, and caches the summaries of complete files. The writer may meanwhile replace several
files by one: an open file stays readable, and the rows of a missing one are found again by their numbers. The
folder has the segments of any number of shards, itself or in folders below it (one for each replica). A
position is the sequence number, in a shard, of the next row to read. A segment in Parquet (parquet.py) is
read like others, with row groups as blocks; where rows are in both forms for a moment, those in Parquet are
read.

Unreadable rows are never skipped silently. A Gap in the result stands for rows that the writer dropped. Rows
that retention deleted or that are damaged raise an error, or with `skip` become a Gap, too. An incomplete
block at the end of a shard is treated as not yet written.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from struct import unpack
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeVar, cast

from gateway.store.journal.columns import COLUMNS
from gateway.store.journal.format import (
    ABSENT,
    ADDRESS_TEXTS,
    BUFFERS,
    INDEX,
    ITEM_BYTES,
    LOOK_BYTES,
    MARK,
    RUNS,
    TEXT_OF,
    Bytes,
    Column,
    ColumnKind,
    DamageError,
    Header,
    JournalError,
    buffer_table,
    decode_columns,
    decode_runs,
    decompressed,
)
from gateway.store.journal.parquet import Arrow, LostRows, ParquetSegment
from gateway.store.journal.segments import (
    BlockLocation,
    Hole,
    Segment,
    block_at,
    content_of,
    segments_below,
    segments_in,
    size_of,
    walk,
    without_repeats,
)
from gateway.store.journal.summary import Summary, SummarySpan, is_small, summary_of, wider

Only = Mapping[str, Collection[str]]
"""Accepted texts by the name of a column (kind CODED): a row must have one of them in each column."""

Row = dict[str, Any]
Expand = Callable[[memoryview, int], bytes | memoryview]
Reason = Literal["backlog", "unwritable", "error", "damage", "gone"]
_CODES: Final = {
    ColumnKind.INT64: "q",
    ColumnKind.UINT32: "I",
    ColumnKind.UINT8: "B",
    ColumnKind.TIME: "q",
    ColumnKind.BOOLEAN: "?",
}
_NOTHING: Final = memoryview(b"")
_columns = lru_cache(maxsize=64)(decode_columns)  # all blocks of one gateway have the same


class GoneError(JournalError):
    """Error for requested rows that retention has deleted. `first` is the number of the oldest row left.

    `expected` is the number of the first requested row.
    """

    def __init__(self, shard: str, expected: int, first: int) -> None:
        super().__init__(
            f"shard {shard} of the journal: rows {expected} to {first - 1} were deleted by"
            f" retention; the first row is now {first}"
        )
        self.shard = shard
        self.first = first


class NoFolderError(JournalError):
    """Error for a journal whose folder does not exist."""


class Gap(NamedTuple):
    """Missing rows of a shard: `rows` rows from number `first` on.

    `reason` is the writer's: `backlog` (the disk was too slow), `unwritable` (the disk refused), `error` (a
    bug); or the reader's: `damage`, `gone` (retention). `where` is the file and offset, or "".
    """

    shard: str
    first: int
    rows: int
    reason: Reason
    text: str
    where: str = ""


class BlockPlace(NamedTuple):
    """File and offset at which a block begins or ends."""

    path: Path
    offset: int


class ShardExtent(NamedTuple):
    """Extent of a shard: rows from number `first` up to, not including, `next`.

    `missing` of them are in gaps. `first_us` and `last_us` are the earliest and latest receipt, in
    microseconds UTC; `segments` is the number of files, and `byte_count` their size in bytes.
    """

    shard: str
    first: int
    next: int
    rows: int
    missing: int
    blocks: int
    segments: int
    byte_count: int
    first_us: int | None
    last_us: int | None
    low_us: int | None = None
    """Time before which everything received is settled; None if unknown."""

    small: int = 0
    """Number of blocks that will be merged with others when their segment is complete."""

    replaced: int = 0
    """Number of blocks that were merged into the present ones."""

    unindexed: int = 0
    """Number of segments without an index at their end."""


class BlockRange(NamedTuple):
    """Consecutive blocks of one file, with rows from number `first` up to, not including, `next`.

    The blocks are between `place` and `end`. `routes` are those of the rows, or None if unknown. Times are of
    receipt, in microseconds UTC.
    """

    first: int
    next: int
    place: BlockPlace
    end: BlockPlace
    byte_count: int
    first_us: int
    last_us: int
    routes: frozenset[str] | None


OpenSegment = BinaryIO | ParquetSegment


class _OpenBlock(NamedTuple):
    """Block in an open file at the location `at`; rows before number `begin` are not requested."""

    file: OpenSegment
    at: BlockLocation
    begin: int


class EncodedEntries(NamedTuple):
    """Buffers of a column of encoded addresses or properties (kind 9 in format.py).

    If `indices` is empty, each row has the entry at its own position.
    """

    indices: memoryview
    forms: memoryview
    offsets: memoryview
    data: memoryview


@dataclass(frozen=True, slots=True)
class Block:
    """Block that was read from a journal file, and whose checksum was verified.

    Its buffers are views of `data`; only runs and compressed buffers are copied. The requested rows are those
    from number `begin` up to, not including, `end`; the columns have all rows of the block.
    """

    shard: str
    at: BlockLocation
    data: bytes
    columns: Mapping[str, Column]
    places: list[tuple[int, int, int]]
    begin: int
    end: int
    expand: Expand = decode_runs
    _decoded: dict[int, memoryview] = field(default_factory=dict)  # by number; columns share them
    _texts: dict[tuple[int, int], list[tuple[Bytes, ...]]] = field(default_factory=dict)  # as above

    @property
    def header(self) -> Header:
        """Header of the block, with the number of rows, the first sequence number and the times."""
        return self.at.header

    def buffers(self, name: str) -> tuple[memoryview, ...]:
        """Return the buffers of the column `name`, in the order of its kind (format.py).

        A missing buffer is an empty view. A column of encoded addresses or properties is decoded, and
        returned as the buffers of a column of texts (kind CODED).
        """
        numbers = self.columns[name].buffers
        if len(numbers) == BUFFERS[ColumnKind.WIRE]:
            return self._address_dictionaries(numbers)
        return tuple(map(self._buffer, numbers))

    def entries(self, name: str) -> EncodedEntries:
        """Return the buffers of a column of encoded addresses or properties, without decoding them."""
        indices, forms, offsets, byte_count, _ = self.columns[name].buffers
        return EncodedEntries(*map(self._buffer, (indices, forms, offsets, byte_count)))

    def _address_dictionaries(self, numbers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Decode a column of encoded addresses or properties, and return the buffers of a column of texts.

        `numbers` are the numbers of the column's buffers, followed by the number of the text that the column
        shows.
        """
        indices, forms, offsets, byte_count, text = numbers
        places = self._buffer(indices)
        if not places:  # each row has its own
            places = memoryview(array("I", range(self.at.header.rows)).tobytes())
        # Imported here because it needs the protocols, which readers of other columns do without.
        from gateway.store.journal.wires import address_dictionaries, id_dictionary, set_dictionaries

        entries = map(self._buffer, (forms, offsets, byte_count))
        key = offsets, byte_count
        found = self._texts.get(key)
        if found is None and text == TEXT_OF["message_id"]:
            made = id_dictionary(*entries)
        else:
            if found is None:
                decoded = address_dictionaries if text < ADDRESS_TEXTS else set_dictionaries
                found = self._texts[key] = decoded(*entries)
            made = found[text if text < ADDRESS_TEXTS else text - ADDRESS_TEXTS]
        return places, *[memoryview(buffer) for buffer in made]

    def texts(self, name: str) -> list[str | None]:
        """Return the texts in the dictionary of the column `name`, by index."""
        _, valid, offsets, data = self.buffers(name)
        values = _slices(offsets, data)
        return _with_nulls([str(value, "utf-8") for value in values], valid)

    def values(self, name: str) -> list[Any]:
        """Return the values of the column `name` in all rows: int, bool, str, bytes or None.

        Times are integers, in microseconds UTC.
        """
        kind = self.columns[name].kind
        rows = self.at.header.rows
        if kind is ColumnKind.CODED:
            indices = self.buffers(name)[0]
            texts = self.texts(name) if indices else []
            return [texts[index] for index in unpack(f"<{rows}I", indices)] if indices else [None] * rows
        if kind in ITEM_BYTES:
            valid, numbers = self.buffers(name)
            if not numbers:
                return [None] * rows
            return _with_nulls(unpack(f"<{rows}{_CODES[kind]}", numbers), valid)
        valid, offsets, data = self.buffers(name)
        if not offsets:
            return [None] * rows
        plain = [bytes(value) for value in _slices(offsets, data)]
        if kind is ColumnKind.TEXT:
            return _with_nulls([value.decode() for value in plain], valid)
        return _with_nulls(plain, valid)

    def rows(self) -> Iterator[Row]:
        """Yield the requested rows as dictionaries with all columns, `shard` and `sequence`."""
        names = list(self.columns)
        base = self.at.header.base
        for place, values in enumerate(zip(*map(self.values, names), strict=True)):
            if self.begin <= base + place < self.end:
                yield {"shard": self.shard, "sequence": base + place, **dict(zip(names, values, strict=True))}

    def may_hold(self, only: Only) -> bool:
        """Return False if certainly no row matches `only`, the accepted texts by column.

        Checks the dictionaries of the columns, not the rows.
        """
        for name, accepted_texts in only.items():
            column = self.columns.get(name)
            if (
                column is not None
                and column.kind is ColumnKind.CODED
                and not set(accepted_texts) & {*self.texts(name)}
            ):
                return False
        return True

    def _buffer(self, number: int) -> memoryview:
        """Return the buffer with this number, expanded or decompressed; an empty view if it is ABSENT."""
        if number == ABSENT:
            return _NOTHING
        offset, stored, byte_count = self.places[number]
        view = memoryview(self.data)[offset : offset + (stored & ~RUNS)]
        if stored == byte_count:
            return view
        cached = self._decoded.get(number)
        if cached is None:
            made = self.expand(view, byte_count) if stored & RUNS else decompressed(view, byte_count)
            cached = self._decoded[number] = memoryview(made)
        return cached


@dataclass(frozen=True, slots=True)
class ParquetBlock(Block):
    """Row group of a segment in Parquet, as a Block. A column is read from the file when it is used.

    Its methods raise DamageError where the file is damaged.
    """

    file: ParquetSegment | None = None

    def table(self, names: Sequence[str] | None = None) -> Arrow:
        """Return the columns `names` (None: all) of all rows as an Arrow table.

        Columns of texts are dictionary-encoded. Names that the file lacks are ignored.
        """
        assert self.file is not None
        return self.file.table(self.at.offset, names)

    def buffers(self, name: str) -> tuple[memoryview, ...]:
        """Raise JournalError, because columns in Parquet do not have the journal's buffers."""
        raise JournalError(f"{self.at.path} is Parquet: read column {name} by values, rows or table")

    def values(self, name: str) -> list[Any]:
        """Return the values of a column in all rows, with the same types as `Block.values`."""
        found = self.table((name,)).column(name)
        return list(
            (found.cast("int64") if self.columns[name].kind is ColumnKind.TIME else found).to_pylist()
        )

    def may_hold(self, only: Only) -> bool:
        """Return False if certainly no row matches `only`, the accepted texts by column.

        Checks the least and the greatest text of each column.
        """
        assert self.file is not None
        for name, accepted_texts in only.items():
            bounds = self.file.bounds(self.at.offset, name)
            if bounds is not None and not any(bounds[0] <= text <= bounds[1] for text in accepted_texts):
                return False
        return True


def _row_group(shard: str, at: BlockLocation, file: ParquetSegment, begin: int) -> ParquetBlock:
    columns = {column.name: column for column in COLUMNS if column.name in file.names}
    return ParquetBlock(shard, at, b"", columns, [], begin, at.header.next, file=file)


def block_from(
    shard: str, at: BlockLocation, data: bytes, begin: int | None = None, expand: Expand = decode_runs
) -> Block:
    """Return the block with the bytes `data`, whose checksum must have been verified.

    `at` is the position of the block in its file. Rows before number `begin` are not requested (None: all
    are). `expand` decodes buffers that are stored as runs of equal values.
    """
    header = at.header
    directory = data[LOOK_BYTES : LOOK_BYTES + header.directory_bytes]
    places = buffer_table(directory, header.buffers)
    columns = _columns(directory[12 * header.buffers :], header.columns)
    by_name = {column.name: column for column in columns}
    first = header.base if begin is None else begin
    return Block(shard, at, data, by_name, places, first, header.next, expand)


Item = TypeVar("Item")


def _with_nulls(values: Sequence[Item], valid: memoryview) -> list[Item | None]:
    if not valid:
        return list(values)
    return [value if valid[at >> 3] >> (at & 7) & 1 else None for at, value in enumerate(values)]


def _slices(offsets: memoryview, data: memoryview) -> list[memoryview]:
    return [data[begin:end] for begin, end in pairwise(unpack(f"<{len(offsets) // 4}i", offsets))]


class JournalReader:
    """Reader of the journal in a folder.

    With `skip` True it continues behind damaged and deleted rows, and yields a Gap in their place; otherwise
    it raises DamageError or GoneError for them.
    """

    def __init__(self, folder: Path, *, skip: bool = False, expand: Expand = decode_runs) -> None:
        """Create a reader of the journal in `folder`; `skip` is True to report lost rows as gaps.

        `expand` decodes buffers that are stored as runs: `decode_runs` or a faster equivalent.
        """
        self.folder = folder
        self.skip = skip
        self.expand = expand
        self._summaries: dict[Path, tuple[Segment, Summary | None]] = {}
        self._listing: dict[str, list[Segment]] | None = None  # by shard; None to list the folder each time

    def segments(self, shard: str | None = None) -> list[Segment]:
        """Return the present files of a shard (None: of all shards), by shard and sequence number.

        Raises NoFolderError.
        """
        listing = self._listing
        if listing is None and shard is not None:
            head = shard.rpartition("/")[0]
            folder = self.folder / head if head else self.folder
            if folder.is_dir():
                found = segments_in(folder, f"{head}/" if head else "")
                return without_repeats(one for one in found if one.shard == shard)
        if listing is None:
            listing = self._listed()
        if shard is not None:
            return listing.get(shard, [])
        return [one for name in sorted(listing) for one in listing[name]]

    def _listed(self) -> dict[str, list[Segment]]:
        if not self.folder.is_dir():
            raise NoFolderError(f"no journal in {self.folder}: no such folder")
        found: dict[str, list[Segment]] = {}
        for one in without_repeats(segments_below(self.folder)):
            found.setdefault(one.shard, []).append(one)
        return found

    @contextmanager
    def cached_listing(self) -> Iterator[None]:
        """List the journal's files only once, for all reads in the `with` block of this context manager.

        The files are listed again only if one is missing. Raises NoFolderError.
        """
        self._listing = self._listed()
        try:
            yield
        finally:
            self._listing = None

    def _look_again(self) -> None:
        if self._listing is not None:
            self._listing = self._listed()

    def is_there(self) -> bool:
        """Return True if the folder exists and has segments."""
        return self.folder.is_dir() and bool(self.segments())

    def shards(self) -> list[str]:
        """Return the names of the shards that have segments."""
        return sorted({segment.shard for segment in self.segments()})

    def extent(self, shard: str) -> ShardExtent:
        """Return which rows a shard has, from the summaries of its files or the headers of their blocks.

        Rows of damaged blocks are counted as missing.
        """
        segments = self.segments(shard)
        first = behind = segments[0].first if segments else 0
        total = Summary(first, first)
        unindexed = 0
        for segment in segments:
            summary, complete = self._described(segment, last=segment is segments[-1])
            unindexed += not complete
            if summary.next <= behind:
                continue
            total.missing += summary.missing + max(segment.first - behind, 0)
            behind = summary.next
            total.rows, total.blocks = total.rows + summary.rows, total.blocks + summary.blocks
            total.small, total.replaced = total.small + summary.small, total.replaced + summary.replaced
            total.low_us = max(total.low_us, summary.low_us)
            if summary.rows:
                total.received = wider(total.received, *summary.received)
        return ShardExtent(
            shard=shard,
            first=first,
            next=behind,
            rows=total.rows,
            missing=total.missing,
            blocks=total.blocks,
            segments=len(segments),
            byte_count=sum(segment.byte_count for segment in segments),
            first_us=total.received[0] if total.rows else None,
            last_us=total.received[1] if total.rows else None,
            low_us=total.low_us or None,
            small=total.small,
            replaced=total.replaced,
            unindexed=unindexed,
        )

    def missing_count(self, shard: str, from_us: int | None = None, to_us: int | None = None) -> int:
        """Return about how many of the rows received in a span of time are missing.

        The span is from `from_us` up to, not including, `to_us`, in microseconds UTC; None is no bound. The
        time of a missing row is estimated from the rows before and behind its gap.
        """
        segments = self.segments(shard)
        total, behind, last_us = 0, segments[0].first if segments else 0, None
        selection = _RowSelection(from_us, to_us)
        for first, next_, times in self._existing_runs(shard):
            if first > behind:
                around = sorted((times[0], times[0] if last_us is None else last_us))
                total += 0 if selection.misses(around, None) else first - behind
            if next_ > behind:
                behind, last_us = next_, times[1]
        if (end := self.end(shard)) > behind:  # the shard ends with a gap
            total += 0 if to_us is not None and last_us is not None and last_us >= to_us else end - behind
        return total

    def _existing_runs(self, shard: str) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Yield (first, next, (first_us, last_us)) of each run of rows that are not missing.

        `first` and `next` are the number of the first row, and that behind the last; the times are those of
        the earliest and latest receipt.
        """
        segments = self.segments(shard)
        for segment in segments:
            summary, _ = self._described(segment, last=segment is segments[-1])
            for span in summary.spans:
                yield span.first, span.next, (span.first_us, span.last_us)

    def end(self, shard: str) -> int:
        """Return the sequence number behind the newest row of a shard."""
        segments = self.segments(shard)
        behind = segments[-1].first if segments else 0
        if segments and segments[-1].next is not None:
            return segments[-1].next
        summary = self.summary(segments[-1]) if segments else None
        if summary is not None:
            return summary.next
        for item in self.index(shard, behind):
            behind = item.first + item.rows if isinstance(item, Gap) else item.header.next
        return behind

    def low_water(self, shard: str, before: int | None = None) -> int | None:
        """Return a time (microseconds UTC) such that no row from number `before` on was received earlier.

        With `before` None, that holds for all rows that will be written later. Return None if the time is
        unknown.
        """
        segments = [one for one in self.segments(shard) if before is None or one.first <= before][-2:]
        found = 0
        for segment in segments:
            summary = self.summary(segment)
            if summary is not None and (before is None or summary.next <= before):
                found = max(found, summary.low_us)
                continue
            if segment.next is not None:
                with suppress(FileNotFoundError):
                    found = max(found, ParquetSegment(segment).low_water(before or 0))
                continue
            with suppress(FileNotFoundError), segment.path.open("rb", buffering=0) as file:
                offset = 0 if summary is None or before is None else summary.place_of(before)
                for item in walk(file, segment.path, offset):
                    if isinstance(item, BlockLocation) and (before is None or item.header.next <= before):
                        found = max(found, item.header.low_us)
        return found or None

    def summary(self, segment: Segment) -> Summary | None:
        """Return the summary at the end of a segment, which is cached.

        Return None if the file is in use, is missing, or its writer was killed.
        """
        cached = self._summaries.get(segment.path)
        if cached is not None and cached[0] == segment:
            return cached[1]
        try:
            with _opened(segment) as file:
                return self._summary_in(file, segment)
        except FileNotFoundError:
            return None

    def _summary_in(self, file: OpenSegment, segment: Segment) -> Summary | None:
        found = file.summary if isinstance(file, ParquetSegment) else summary_of(file, segment)
        if found is not None:  # otherwise it may become complete without a change of the listing
            self._summaries[segment.path] = segment, found
        return found

    def _described(self, segment: Segment, *, last: bool) -> tuple[Summary, bool]:
        """Return a summary of a segment, and True if it was stored in the file, False if it is computed here.

        `last` is True for the newest segment of the shard.
        """
        try:
            summary = self.summary(segment)
        except DamageError:
            if segment.next is None:
                raise
            lost = segment.next - segment.first
            return Summary(segment.first, segment.next, missing=lost), True
        if summary is not None:
            return summary, True
        made = Summary(segment.first, segment.first)
        with suppress(FileNotFoundError), segment.path.open("rb", buffering=0) as file:
            for at in self._walk(file, segment, 0, last=last):
                if isinstance(at, BlockLocation):
                    made.missing += max(at.header.base - made.next, 0)
                    made.add(at.offset, at.header, None, small=is_small(at.header))
        return made, False

    def index(
        self, shard: str, start: int | None = None, *, near: BlockPlace | None = None
    ) -> Iterator[BlockLocation | Gap]:
        """Yield the locations of a shard's blocks from the one with row `start` on (None: all), and the gaps.

        Only headers are read; contents are not checked. `near` is a place, known from an earlier read, of
        that block or of the end of the block before it; blocks before that place are not searched.
        """
        for item in self._scan(shard, start, near):
            yield item if isinstance(item, Gap) else item.at

    def block_ranges(
        self, shard: str, start: int, *, near: BlockPlace | None = None
    ) -> Iterator[BlockRange | Gap]:
        """Yield groups of consecutive blocks of a shard from row `start` on, and the gaps.

        The blocks of complete files are in groups of about 1 MiB, others in groups of one. For `near` see
        `index`.
        """
        expected = start
        for item in self._scan(shard, start, near, whole=True):
            if isinstance(item, BlockRange | Gap):
                yield item
                continue
            at, header = item.at, item.at.header
            place, end = BlockPlace(at.path, at.offset), BlockPlace(at.path, at.end)
            expected = max(expected, item.begin)
            yield BlockRange(
                *(expected, header.next, place, end, header.byte_count, header.first_us, header.last_us, None)
            )

    def _scan(
        self,
        shard: str,
        start: int | None,
        near: BlockPlace | None,
        *,
        whole: bool = False,
        selection: _RowSelection | None = None,
    ) -> Iterator[Any]:
        """Yield the blocks (`_OpenBlock`) and gaps (`Gap`) of a shard from row `start` on, each row once.

        Blocks that `selection` excludes are skipped if a file's summary shows that. With `whole`, complete
        files yield a `BlockRange` for each group of blocks. For `near` see `index`.
        """
        segments = self.segments(shard)
        if not segments:
            return
        scan = _Scan(shard, segments[0].first if start is None else start, near, whole, selection)
        looked: tuple[int, list[tuple[Path, int]]] | None = None
        while segments:
            # Listed files may have been merged or deleted since: list them again before reporting a loss.
            listed = [(one.path, one.inode) for one in segments]
            again = looked != (scan.expected, listed)
            looked = scan.expected, listed
            if (yield from self._scan_files(scan, segments, listed if again else None)):
                return
            segments = self.segments(shard)

    def _scan_files(
        self, scan: _Scan, segments: list[Segment], listed: list[tuple[Path, int]] | None
    ) -> Generator[Any, None, bool]:
        """Yield the blocks and gaps in `segments` from row `scan.expected` on; return True at the end.

        `listed` has the files as the caller has listed them. Returns False if a file is missing or the list
        has changed; then the caller lists the files again. With `listed` None they were just listed again,
        and the result is always True.
        """
        later = next((at for at, one in enumerate(segments) if one.first > scan.expected), len(segments))
        for segment in segments[max(0, later - 1) :]:
            try:
                file = _opened(segment)
            except FileNotFoundError:
                if listed is not None:
                    self._look_again()
                    return False
                continue  # the next block shows what is missing
            except DamageError as error:
                if not self.skip or segment.next is None:
                    raise
                first, rows = scan.expected, segment.next - scan.expected
                yield Gap(scan.shard, first, rows, "damage", str(error), str(segment.path))
                scan.expected = segment.next
                continue
            with file:
                last = segment is segments[-1]
                if not (yield from self._scan_file(scan, file, segment, listed, last=last)):
                    return False
        return True

    def _scan_file(
        self,
        scan: _Scan,
        file: OpenSegment,
        segment: Segment,
        listed: list[tuple[Path, int]] | None,
        *,
        last: bool,
    ) -> Generator[Any, None, bool]:
        """Yield the blocks and gaps in one file from row `scan.expected` on.

        `listed` and the result are as in `_scan_files`. `last` is True for the newest segment of the shard.
        """
        for item in self._scan_segment(file, segment, scan, last=last):
            first, behind = _range(item)
            if behind <= scan.expected:
                continue
            if first > scan.expected:
                if listed is not None and self._has_changed(scan.shard, listed):
                    return False
                at = item if isinstance(item, BlockLocation) else BlockLocation(segment.path, 0, _NO_HEADER)
                yield self._missing(scan.shard, scan.expected, first, at)
            begin, scan.expected = max(first, scan.expected), behind
            if isinstance(item, BlockRange):
                yield item._replace(first=begin)
            elif isinstance(item, LostRows):
                reason = cast("Reason", item.reason)
                yield Gap(scan.shard, item.first, item.rows, reason, item.text, str(segment.path))
            elif isinstance(item, BlockLocation):
                if item.header.is_gap and not isinstance(file, ParquetSegment):
                    yield self._recorded_gap(scan.shard, item, file)
                else:
                    yield _OpenBlock(file, item, begin)
        return True

    def _has_changed(self, shard: str, listed: list[tuple[Path, int]]) -> bool:
        """List the files again, and return True if the list differs from `listed`."""
        self._look_again()
        return [(one.path, one.inode) for one in self.segments(shard)] != listed

    def _scan_segment(
        self, file: OpenSegment, segment: Segment, scan: _Scan, *, last: bool
    ) -> Iterator[BlockLocation | BlockRange | LostRows | range]:
        """Yield the contents of one file, beginning at or before row `scan.expected`.

        Yields a `range` of sequence numbers in place of rows that are not requested or are in a gap. `last`
        is True for the newest segment of the shard.
        """
        expected, near, selection = scan.expected, scan.near, scan.selection
        cached = self._summaries.get(segment.path)
        summary = (
            cached[1] if cached is not None and cached[0] == segment else self._summary_in(file, segment)
        )
        if summary is None:
            assert not isinstance(file, ParquetSegment)
            offset = 0
            if near is not None and near.path == segment.path and _leads_to(file, near, expected):
                offset = near.offset
            for at in self._walk(file, segment, offset, last=last):
                if isinstance(at, BlockLocation):
                    yield at
            return
        if selection is not None and selection.misses(summary.received, summary.routes):
            yield range(summary.first, summary.next)
            return
        if scan.whole:
            routes = None if summary.routes is None else frozenset(summary.routes)
            behind = summary.first
            for span in summary.spans:
                yield range(behind, span.first)  # a gap, if any
                behind = span.next
                place, end = (
                    BlockPlace(segment.path, span.offset),
                    BlockPlace(segment.path, span.offset + span.byte_count),
                )
                times = span.first_us, span.last_us
                yield BlockRange(span.first, span.next, place, end, span.byte_count, *times, routes)
            yield range(behind, summary.next)
            return
        passed = {}
        if selection is not None:
            passed = {
                span.offset: span
                for span in summary.spans
                if selection.misses((span.first_us, span.last_us), None)
            }
        if isinstance(file, ParquetSegment):
            for found in file.items(expected):
                missed = isinstance(found, BlockLocation) and found.offset in passed
                yield range(*_range(found)) if missed else found
            return
        for item in self._walk(file, segment, summary.place_of(expected), last=last, passed=passed):
            yield item if isinstance(item, BlockLocation) else range(item.first, item.next)

    @staticmethod
    def _walk(
        file: BinaryIO,
        segment: Segment,
        offset: int,
        *,
        last: bool,
        passed: Mapping[int, SummarySpan] | None = None,
    ) -> Iterator[BlockLocation | SummarySpan]:
        """Yield the blocks with rows, and the gaps, of one file from `offset` (bytes) on.

        `passed` has spans of blocks to skip, by offset: such a span is yielded in place of its blocks.
        Damaged blocks are not yielded, which shows in the sequence numbers. With `last`, a damaged block at
        the end of the file is not yielded either: a crash of the machine may have left only a part of it.
        """
        while True:
            if passed and (span := passed.get(offset)) is not None:
                yield span
                offset += span.byte_count
                continue
            item = next(walk(file, segment.path, offset), None)
            if item is None:
                return
            offset = item.end
            if isinstance(item, Hole):
                continue
            if last and item.end >= size_of(file) and content_of(file, item) is None:
                return
            if not item.header.flags & (INDEX | MARK):
                yield item

    def _missing(self, shard: str, first: int, base: int, at: BlockLocation) -> Gap:
        """Return a Gap for rows `first` up to, not including, `base`, which are in no block.

        `at` is the next block. Without `skip` an error is raised: GoneError if there is no older file,
        because retention has deleted the rows, otherwise DamageError.
        """
        older = [one for one in self.segments(shard) if one.first < base and one.path != at.path]
        if at.offset == 0 and not older:
            if not self.skip:
                raise GoneError(shard, first, base)
            return Gap(shard, first, base - first, "gone", "deleted by retention")
        if not self.skip:
            raise DamageError(f"{at.path}: rows {first} to {base - 1} are missing before offset {at.offset}")
        return Gap(shard, first, base - first, "damage", "no intact block contains these rows", str(at.path))

    def _recorded_gap(self, shard: str, at: BlockLocation, file: BinaryIO) -> Gap:
        """Return the gap that the writer has recorded in the block `at` for rows that it did not write."""
        header = at.header
        where = f"{at.path}:{at.offset}"
        data = content_of(file, at)
        if data is None:  # the header has the numbers
            return Gap(shard, header.base, header.rows, "error", "the reason is unreadable", where)
        document = json.loads(data[LOOK_BYTES:])
        return Gap(shard, header.base, header.rows, document["reason"], document["text"], where)

    def read(self, shard: str, at: BlockLocation) -> Block:
        """Read the block at a location that `index` yielded. If it was moved since, search for its rows.

        Raises DamageError, and GoneError if the rows were deleted since.
        """
        header = at.header
        try:
            with at.path.open("rb", buffering=0) as file:
                found = block_at(file, at.path, at.offset)
                if found is not None and found.header == header:
                    return block_from(shard, at, self._read_block(file, at), expand=self.expand)
        except FileNotFoundError:
            pass
        remaining = self.segments(shard)
        if not remaining or header.base < remaining[0].first:
            raise GoneError(shard, header.base, remaining[0].first if remaining else header.next)
        for block in JournalReader(self.folder, expand=self.expand).blocks(
            shard, header.base, end=header.next
        ):
            if isinstance(block, Block):
                return replace(block, end=header.next)
        raise DamageError(f"{at.path}: rows {header.base} to {header.next - 1} no longer exist")

    @staticmethod
    def _read_block(file: BinaryIO, at: BlockLocation) -> bytes:
        data = content_of(file, at)
        if data is None:
            raise DamageError(
                f"{at.path}: the block at offset {at.offset} (rows {at.header.base} to"
                f" {at.header.next - 1}) is damaged"
            )
        return data

    def blocks(
        self,
        shard: str,
        start: int | None = None,
        *,
        from_us: int | None = None,
        to_us: int | None = None,
        only: Only | None = None,
        end: int | None = None,
        near: BlockPlace | None = None,
    ) -> Iterator[Block | Gap]:
        """Yield the blocks of a shard that may have matching rows, and the gaps.

        Matching rows have numbers from `start` up to, not including, `end`, were received from `from_us` to
        before `to_us` (microseconds UTC) and have one of the texts of each column in `only`. A block may also
        have other rows. A block outside the time range is not read, and one without the texts is left out.
        For `near` see `index`.
        """
        routes = None if only is None else only.get("route")
        for item in self._scan(shard, start, near, selection=_RowSelection(from_us, to_us, routes)):
            if isinstance(item, Gap):
                behind = item.first + item.rows
                if end is None or item.first < end:
                    yield item
            else:
                header = item.at.header
                behind = header.next
                early = from_us is not None and header.last_us < from_us
                is_beyond = to_us is not None and header.first_us >= to_us
                if not early and not is_beyond and (end is None or item.begin < end):
                    block = self._read(shard, item)
                    if isinstance(block, Gap) or only is None or block.may_hold(only):
                        yield block
            if end is not None and behind >= end:
                return  # what is wrong behind it was not requested

    def _read(self, shard: str, found: _OpenBlock) -> Block | Gap:
        """Return the block at the location `found`; with `skip`, return a Gap if the block is damaged."""
        at, header, file = found.at, found.at.header, found.file
        try:
            if isinstance(file, ParquetSegment):
                if self.skip:
                    file.table(at.offset)  # checked now, because later it could only be an error
                return _row_group(shard, at, file, found.begin)
            return block_from(shard, at, self._read_block(file, at), found.begin, self.expand)
        except DamageError as error:
            if not self.skip:
                raise
            return Gap(shard, header.base, header.rows, "damage", str(error), f"{at.path}:{at.offset}")

    def rows(
        self,
        shard: str,
        start: int | None = None,
        *,
        from_us: int | None = None,
        to_us: int | None = None,
        only: Only | None = None,
    ) -> Iterator[Row | Gap]:
        """Yield exactly the matching rows of a shard, as dictionaries, and the gaps.

        Matching rows have numbers from `start` on, were received from `from_us` up to, not including, `to_us`
        (microseconds UTC) and have one of the texts of each column in `only`. None does not limit.
        """
        for block in self.blocks(shard, start, from_us=from_us, to_us=to_us, only=only):
            if isinstance(block, Gap):
                yield block
                continue
            for row in block.rows():
                if (
                    (start is None or row["sequence"] >= start)
                    and (from_us is None or row["received"] >= from_us)
                    and (to_us is None or row["received"] < to_us)
                    and row_matches(row, only)
                ):
                    yield row

    def follow(
        self, shard: str, start: int, *, wait: Callable[[], bool] | None = None, only: Only | None = None
    ) -> Iterator[Block | Gap]:
        """Yield the blocks and gaps from row `start` on, and continue with those that are written later.

        `wait` is called when there is nothing new; it waits a while, and returns False to end. By default it
        waits 0.2 s, and never ends. Blocks without the texts in `only` are left out.
        """
        position = start
        while True:
            for item in self.blocks(shard, position):
                if isinstance(item, Gap):
                    position = item.first + item.rows
                    yield item
                    continue
                position = item.header.next
                if only is None or item.may_hold(only):
                    yield item
            if not (wait or _wait)():
                return

    def verify(self, shard: str) -> Iterator[Gap | Hole]:
        """Read and check every block of a shard, and yield each gap and each damaged part of a file.

        A Hole that reaches to the end of the shard is an incomplete block, which a live writer may still
        complete.
        """
        segments = self.segments(shard)
        for segment in segments:
            if segment.next is not None:  # its row groups are checked below
                continue
            try:
                file = segment.path.open("rb", buffering=0)
            except FileNotFoundError:  # deleted by retention
                continue
            with file:
                yield from _holes(file, segment, last=segment is segments[-1])
        sound = JournalReader(self.folder, skip=True)
        for found in sound.blocks(shard):
            if isinstance(found, Gap):
                yield found


class _RowSelection(NamedTuple):
    """Requested rows, by time of receipt and route; None does not limit.

    Rows were received from `from_us` up to, not including, `to_us` (microseconds UTC).
    """

    from_us: int | None = None
    to_us: int | None = None
    routes: Collection[str] | None = None

    def misses(self, received: Sequence[int], routes: Collection[str] | None) -> bool:
        """Return True if certainly no row of a block or file is requested.

        `received` has the earliest and latest receipt of its rows, `routes` their routes (None: unknown).
        """
        first_us, last_us = received
        return (
            (self.from_us is not None and last_us < self.from_us)
            or (self.to_us is not None and first_us >= self.to_us)
            or (self.routes is not None and routes is not None and not set(routes) & set(self.routes))
        )


@dataclass(slots=True)
class _Scan:
    """State of reading a shard: `expected` is the number of the next row; the others are options.

    The options are those of `JournalReader._scan`.
    """

    shard: str
    expected: int
    near: BlockPlace | None
    whole: bool
    selection: _RowSelection | None


_NO_HEADER: Final = Header(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def _opened(segment: Segment) -> OpenSegment:
    """Open the file of a segment. Raises FileNotFoundError and DamageError; JournalError without pyarrow."""
    if segment.next is not None:
        return ParquetSegment(segment)
    return segment.path.open("rb", buffering=0)


def _range(item: BlockLocation | BlockRange | LostRows | range) -> tuple[int, int]:
    """Return the number of the first row of `item`, and the number behind its last row."""
    if isinstance(item, BlockLocation):
        return item.header.base, item.header.next
    if isinstance(item, LostRows):
        return item.first, item.first + item.rows
    return (item.first, item.next) if isinstance(item, BlockRange) else (item.start, item.stop)


def _leads_to(file: BinaryIO, near: BlockPlace, expected: int) -> bool:
    """Return True if reading from the place `near` on finds row `expected`.

    The file may have changed since the place was recorded. The place may also be the end of the file.
    """
    at = block_at(file, near.path, near.offset)
    return near.offset == size_of(file) if at is None else at.header.base <= expected


def _holes(file: BinaryIO, segment: Segment, *, last: bool) -> Iterator[Hole]:
    """Yield the damaged or incomplete parts of a file, also at its end.

    With `last` True the file is the newest segment of its shard, in which a damaged last block is incomplete.
    """
    end = 0
    for item in walk(file, segment.path):
        if isinstance(item, Hole):
            yield item
        elif last and item.end >= size_of(file) and content_of(file, item) is None:
            break
        end = item.end
    if end < size_of(file):
        yield Hole(segment.path, end, size_of(file))


def row_matches(row: Row, only: Only | None) -> bool:
    """Return True if a row has, for each column in `only`, one of the accepted texts."""
    return only is None or all(row.get(name) in texts for name, texts in only.items())


def _wait() -> bool:
    time.sleep(0.2)
    return True

"""Everybody else's side of the journal: blocks, rows, and what is missing between them.

A reader keeps nothing open and nothing in memory between two blocks; it may run beside a live writer, in any
process, on any machine that sees the folder. The folder holds the segments of any number of shards, itself or
one folder below (one for each replica). A position is a sequence number of a shard, that of the next row
wanted.

What cannot be read is never passed over in silence. A Gap stands in the stream for rows that the writer
dropped; for rows that retention deleted or that damage took, there is an error, or with `skip` a Gap too. An
incomplete block at the end of a shard is not there yet.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from struct import unpack
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeVar

from gateway.store.journal.format import (
    ABSENT,
    HEADER_OCTETS,
    ITEM_OCTETS,
    RUNS,
    Column,
    DamageError,
    Header,
    JournalError,
    Kind,
    buffer_table,
    decode_columns,
    decode_runs,
)
from gateway.store.journal.segments import At, Hole, Segment, content_of, segments_in, size_of, walk

Only = Mapping[str, Collection[str]]
"""Texts that a row must have one of, by the name of a coded column."""

Row = dict[str, Any]
Reason = Literal["backlog", "unwritable", "error", "damage", "gone"]
_CODES: Final = {Kind.INT64: "q", Kind.UINT32: "I", Kind.UINT8: "B", Kind.TIME: "q", Kind.BOOLEAN: "?"}
_NOTHING: Final = memoryview(b"")
_columns = lru_cache(maxsize=64)(decode_columns)  # all blocks of one gateway have the same


class GoneError(JournalError):
    """Rows that were asked for are gone: retention has deleted them. `first` is the first row there is."""

    def __init__(self, shard: str, wanted: int, first: int) -> None:
        super().__init__(
            f"shard {shard} of the journal: rows {wanted} to {first - 1} are gone; retention deletes what is"
            f" older than its limits, and {first} is the first row now"
        )
        self.shard = shard
        self.first = first


class Gap(NamedTuple):
    """`rows` rows from number `first` on are missing.

    `reason` is the writer's: `backlog` (the disk was too slow), `unwritable` (it refused), `error` (a bug);
    or the reader's: `damage`, `gone` (retention). `where`: the file and offset, if there is one.
    """

    shard: str
    first: int
    rows: int
    reason: Reason
    text: str
    where: str = ""


class Place(NamedTuple):
    """Where a block begins or ends."""

    path: Path
    offset: int


class Extent(NamedTuple):
    """What there is of a shard: rows `first` to before `next`. Times are of receipt, microseconds UTC."""

    shard: str
    first: int
    next: int
    rows: int
    missing: int
    blocks: int
    segments: int
    octets: int
    first_us: int | None
    last_us: int | None


@dataclass(frozen=True, slots=True)
class Block:
    """A block whose octets are sound. Its buffers are views of them; only runs and what is compressed
    are copied."""

    shard: str
    at: At
    octets: bytes
    columns: Mapping[str, Column]
    places: list[tuple[int, int, int]]

    @property
    def header(self) -> Header:
        """Rows, base, times."""
        return self.at.header

    def buffers(self, name: str) -> tuple[memoryview, ...]:
        """The buffers of a column in its kind's order (format.py); an empty view where there is none."""
        return tuple(map(self._buffer, self.columns[name].buffers))

    def texts(self, name: str) -> list[str | None]:
        """The dictionary of a coded column."""
        _, valid, offsets, octets = self.buffers(name)
        values = _slices(offsets, octets)
        return _with_nulls([str(value, "utf-8") for value in values], valid)

    def values(self, name: str) -> list[Any]:
        """A column as Python values: int, bool, str, bytes or None. Times are microseconds UTC."""
        kind = self.columns[name].kind
        rows = self.at.header.rows
        if kind is Kind.CODED:
            indices = self.buffers(name)[0]
            texts = self.texts(name) if indices else []
            return [texts[index] for index in unpack(f"<{rows}I", indices)] if indices else [None] * rows
        if kind in ITEM_OCTETS:
            valid, numbers = self.buffers(name)
            if not numbers:
                return [None] * rows
            return _with_nulls(unpack(f"<{rows}{_CODES[kind]}", numbers), valid)
        valid, offsets, octets = self.buffers(name)
        if not offsets:
            return [None] * rows
        plain = [bytes(value) for value in _slices(offsets, octets)]
        if kind is Kind.TEXT:
            return _with_nulls([value.decode() for value in plain], valid)
        return _with_nulls(plain, valid)

    def rows(self) -> Iterator[Row]:
        """The rows, each with its `shard` and `sequence`."""
        names = list(self.columns)
        base = self.at.header.base
        for place, values in enumerate(zip(*map(self.values, names), strict=True)):
            yield {"shard": self.shard, "sequence": base + place, **dict(zip(names, values, strict=True))}

    def may_hold(self, only: Only) -> bool:
        """False: no row has what `only` asks for. Looks at the dictionaries, not at the rows."""
        for name, wanted in only.items():
            column = self.columns.get(name)
            if column is not None and column.kind is Kind.CODED and not set(wanted) & {*self.texts(name)}:
                return False
        return True

    def _buffer(self, number: int) -> memoryview:
        if number == ABSENT:
            return _NOTHING
        offset, stored, octets = self.places[number]
        view = memoryview(self.octets)[offset : offset + (stored & ~RUNS)]
        if stored & RUNS:
            return memoryview(decode_runs(view, octets))
        return view if stored == octets else memoryview(zlib.decompress(view, bufsize=octets))


Item = TypeVar("Item")


def _with_nulls(values: Sequence[Item], valid: memoryview) -> list[Item | None]:
    if not valid:
        return list(values)
    return [value if valid[at >> 3] >> (at & 7) & 1 else None for at, value in enumerate(values)]


def _slices(offsets: memoryview, octets: memoryview) -> list[memoryview]:
    return [octets[begin:end] for begin, end in pairwise(unpack(f"<{len(offsets) // 4}i", offsets))]


class JournalReader:
    """Reads the journal in a folder. `skip`: go on behind damage and what is gone, with a Gap in its place;
    without it that raises DamageError or GoneError."""

    def __init__(self, folder: Path, *, skip: bool = False) -> None:
        self.folder = folder
        self.skip = skip

    def segments(self, shard: str | None = None) -> list[Segment]:
        """The files as they are now, in order of shard and sequence. Raises JournalError: no such folder."""
        if not self.folder.is_dir():
            raise JournalError(f"there is no journal in {self.folder}: no such folder")
        found = segments_in(self.folder)
        for below in sorted(self.folder.iterdir()):
            if below.is_dir():
                found += segments_in(below, f"{below.name}/")
        return [one for one in found if shard is None or one.shard == shard]

    def shards(self) -> list[str]:
        """The shards that have segments."""
        return sorted({segment.shard for segment in self.segments()})

    def extent(self, shard: str) -> Extent:
        """What there is of a shard, by the headers of its blocks. Damage is passed over here."""
        found = JournalReader(self.folder, skip=True)
        segments = self.segments(shard)
        first = segments[0].first if segments else 0
        behind, rows, missing, blocks = first, 0, 0, 0
        times: list[int] = []
        for item in found.index(shard):
            if isinstance(item, Gap):
                missing += item.rows
                behind = item.first + item.rows
                continue
            header = item.header
            blocks, rows, behind = blocks + 1, rows + header.rows, header.next
            times += (header.first_us, header.last_us)
        octets = sum(segment.octets for segment in segments)
        span = (min(times), max(times)) if times else (None, None)
        return Extent(shard, first, behind, rows, missing, blocks, len(segments), octets, *span)

    def index(self, shard: str, start: int | None = None, *, near: Place | None = None) -> Iterator[At | Gap]:
        """The blocks of a shard from the one that holds row `start` on (None: the first), by their headers:
        contents are not read, and not checked. Ends at the end of what is written now.

        `near` is where that block, or the end of the one before it, was found earlier; it spares the walk
        over the blocks before it.
        """
        segments = self.segments(shard)
        if start is not None:
            later = [place for place, one in enumerate(segments) if one.first > start]
            segments = segments[max(0, later[0] - 1) if later else len(segments) - 1 :] if segments else []
        expected = start if start is not None or not segments else segments[0].first
        for segment in segments:
            offset = near.offset if near is not None and near.path == segment.path else 0
            for at in self._walk(segment, offset, last=segment is segments[-1]):
                header = at.header
                if start is not None and header.next <= start:
                    continue
                if expected is not None and header.base > expected:
                    yield self._missing(shard, expected, header.base, at)
                expected = header.next
                yield self._told(shard, at) if header.gap else at

    def _walk(self, segment: Segment, offset: int, *, last: bool) -> Iterator[At]:
        """The blocks of one file from `offset` on. What damage took is missed by its sequence numbers. The
        very last block counts when its content is sound, for a crash of the machine may have left only some
        of it."""
        try:
            file = segment.path.open("rb", buffering=0)
        except FileNotFoundError:  # retention was faster; whatever comes next shows what is missing
            return
        with file:
            for item in walk(file, segment.path, offset):
                if isinstance(item, Hole):
                    continue
                if last and item.end >= size_of(file) and content_of(file, item) is None:
                    return
                yield item

    def _missing(self, shard: str, first: int, base: int, at: At) -> Gap:
        """Rows first to base - 1 are in no block: retention took them, if nothing older is left."""
        older = [one for one in self.segments(shard) if one.first < base and one.path != at.path]
        if at.offset == 0 and not older:
            if not self.skip:
                raise GoneError(shard, first, base)
            return Gap(shard, first, base - first, "gone", "deleted by retention")
        if not self.skip:
            raise DamageError(f"{at.path}: rows {first} to {base - 1} are missing before offset {at.offset}")
        return Gap(shard, first, base - first, "damage", "these rows are in no sound block", str(at.path))

    def _told(self, shard: str, at: At) -> Gap:
        """What the writer says of rows that it did not write."""
        header = at.header
        where = f"{at.path}:{at.offset}"
        try:
            given = json.loads(self._octets(at)[HEADER_OCTETS:])
        except (FileNotFoundError, DamageError):  # the header has said what matters
            return Gap(shard, header.base, header.rows, "error", "the reason is not to be read", where)
        return Gap(shard, header.base, header.rows, given["reason"], given["text"], where)

    def _octets(self, at: At) -> bytes:
        with at.path.open("rb", buffering=0) as file:
            octets = content_of(file, at)
        if octets is None:
            raise DamageError(
                f"{at.path}: the block at offset {at.offset} (rows {at.header.base} to"
                f" {at.header.next - 1}) is damaged"
            )
        return octets

    def read(self, shard: str, at: At) -> Block:
        """The block that `index` found. Raises DamageError; GoneError when its file was deleted since."""
        try:
            octets = self._octets(at)
        except FileNotFoundError as error:
            left = self.segments(shard)
            raise GoneError(shard, at.header.base, left[0].first if left else at.header.next) from error
        header = at.header
        directory = octets[HEADER_OCTETS : HEADER_OCTETS + header.directory_octets]
        places = buffer_table(directory, header.buffers)
        columns = _columns(directory[12 * header.buffers :], header.columns)
        return Block(shard, at, octets, {column.name: column for column in columns}, places)

    def blocks(
        self,
        shard: str,
        start: int | None = None,
        *,
        from_us: int | None = None,
        to_us: int | None = None,
        only: Only | None = None,
        end: int | None = None,
        near: Place | None = None,
    ) -> Iterator[Block | Gap]:
        """The blocks of a shard that may hold rows from number `start` to before `end`, received from
        `from_us` to before `to_us`, with the texts of `only`; whole, so that rows which do not fit may be
        among them. A block out of the time range is not read, one without the texts is not decoded. `near`:
        as in `index`.
        """
        for item in self.index(shard, start, near=near):
            if isinstance(item, Gap):
                behind = item.first + item.rows
                if end is None or item.first < end:
                    yield item
            else:
                first_us, last_us, behind = item.header.first_us, item.header.last_us, item.header.next
                early = from_us is not None and last_us < from_us
                late = to_us is not None and first_us >= to_us
                if not early and not late and (end is None or item.header.base < end):
                    block = self._sound(shard, item)
                    if isinstance(block, Gap) or only is None or block.may_hold(only):
                        yield block
            if end is not None and behind >= end:
                return  # what is wrong behind it is not asked for

    def _sound(self, shard: str, at: At) -> Block | Gap:
        """The block, or a Gap in the place of what cannot be read."""
        header = at.header
        try:
            return self.read(shard, at)
        except GoneError as error:
            if not self.skip:
                raise
            return Gap(shard, header.base, header.rows, "gone", str(error))
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
        """As `blocks`, but exactly the rows that fit."""
        for block in self.blocks(shard, start, from_us=from_us, to_us=to_us, only=only):
            if isinstance(block, Gap):
                yield block
                continue
            for row in block.rows():
                if (
                    (start is None or row["sequence"] >= start)
                    and (from_us is None or row["received"] >= from_us)
                    and (to_us is None or row["received"] < to_us)
                    and fits(row, only)
                ):
                    yield row

    def follow(
        self, shard: str, start: int, *, wait: Callable[[], bool] | None = None, only: Only | None = None
    ) -> Iterator[Block | Gap]:
        """As `blocks`, and what is written later. `wait` is called when there is nothing new: it waits a
        while and returns whether to go on; the default waits 0.2 s, for ever.
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
        """Everything that is wrong with a shard or missing in it, with every block read and checked. A Hole
        that reaches to the end of the shard is torn, or a live writer is about to fill it."""
        segments = self.segments(shard)
        for segment in segments:
            try:
                file = segment.path.open("rb", buffering=0)
            except FileNotFoundError:  # retention was faster
                continue
            with file:
                yield from _holes(file, segment, last=segment is segments[-1])
        sound = JournalReader(self.folder, skip=True)
        for found in sound.blocks(shard):
            if isinstance(found, Gap):
                yield found


def _holes(file: BinaryIO, segment: Segment, *, last: bool) -> Iterator[Hole]:
    end = 0
    for item in walk(file, segment.path):
        if isinstance(item, Hole):
            yield item
        elif last and item.end >= size_of(file) and content_of(file, item) is None:
            break
        end = item.end
    if end < size_of(file):
        yield Hole(segment.path, end, size_of(file))


def fits(row: Row, only: Only | None) -> bool:
    """Whether a row has what `only` asks for."""
    return only is None or all(row.get(name) in texts for name, texts in only.items())


def _wait() -> bool:
    time.sleep(0.2)
    return True

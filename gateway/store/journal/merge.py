"""Merging of many small blocks into few large ones, with the same rows and sequence numbers.

A gateway with little traffic writes two rows at a time, and a block of two rows costs as much to plan, read
and store as one of thousands. The columns of the blocks are joined; of dictionaries only the entries that a
row uses are copied. Blocks that are large enough are copied unchanged, and so are blocks with other columns
than this gateway writes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

from gateway.store.folder import sync_path
from gateway.store.journal.columns import COLUMNS, DELIVERED, FLAGS, OUTCOME, RECIPIENT, SENDER, SET
from gateway.store.journal.encoder import ENCODED_COLUMNS
from gateway.store.journal.entries import BlockDictionary, bitmap, offsets
from gateway.store.journal.format import (
    INDEX,
    MARK,
    BlockStatistics,
    Buffer,
    Bytes,
    DamageError,
    Draft,
    Header,
    Repeated,
    lay_out,
    seal,
)
from gateway.store.journal.reader import Block, block_from
from gateway.store.journal.segments import Hole, Segment, content_of, walk
from gateway.store.journal.summary import Summary, index_draft, is_small, summary_of
from gateway.store.journal.wires import wire_buffers

MERGED_ROWS: Final = 4_096
MERGED_BYTES: Final = 4 * 1_048_576
Known = TypeVar("Known")


class _Dictionary:
    """Dictionary of texts for the merged block, joined from the dictionaries of the blocks.

    An entry has one text for each of `columns`.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self.numbers: dict[tuple[bytes, ...], int] = {}

    def indices(self, block: Block) -> bytes:
        """Return the rows' indices into `block`'s dictionary, converted to indices into this dictionary.

        Texts that this dictionary lacks are added.
        """
        buffers = [block.buffers(name) for name in self._columns]
        found = buffers[0][0].cast("I")
        texts = [(starts.cast("i"), data) for _, _, starts, data in buffers]
        return _renumbered(found, self.numbers, lambda at: tuple([_slice(*text, at) for text in texts]))

    def buffers(self) -> list[bytes]:
        """Return the dictionary's buffers: offsets and texts of each column."""
        entries = BlockDictionary(len(self._columns))
        entries.add_all(list(self.numbers))
        return entries.end(0)


class _Bytes:
    """Dictionary of encoded addresses or properties for the merged block, joined from the blocks'.

    Each entry is preceded by one byte, the number of its encoding (format.py).
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def indices(self, block: Block, name: str) -> bytes:
        """Return the indices in a column of `block`, converted to indices into this dictionary.

        Entries that this dictionary lacks are added.
        """
        places, forms, offsets, data = block.entries(name)
        found = places.cast("I") if places else range(block.header.rows)
        starts = offsets.cast("i")
        return _renumbered(
            found, self._numbers, lambda at: bytes(forms[at : at + 1]) + _slice(starts, data, at)
        )

    def buffers(self) -> list[Buffer]:
        """Return the dictionary's buffers: encodings, offsets and joined entries."""
        data = [entry[1:] for entry in self._numbers]
        return wire_buffers(bytes([entry[0] for entry in self._numbers]), data)


def _renumbered(found: Iterable[int], numbers: dict[Known, int], entry_at: Callable[[int], Known]) -> bytes:
    """Convert `found`, indices into a block's dictionary, to indices into the merged dictionary.

    `numbers` has the indices of the merged dictionary's entries; missing entries are added. `entry_at`
    returns the entry for an index of the block.
    """
    here = {}
    for one in set(found):
        entry = entry_at(one)
        number = numbers.get(entry)
        if number is None:
            number = numbers[entry] = len(numbers)
        here[one] = number
    return array("I", [here[one] for one in found]).tobytes()


def _slice(starts: memoryview, data: memoryview, at: int) -> bytes:
    return bytes(data[starts[at] : starts[at + 1]])


def merge_blocks(blocks: Sequence[Block]) -> Draft:
    """Return one block with the rows of consecutive blocks.

    All blocks must have the columns that this version of the gateway writes.
    """
    rows = sum(block.header.rows for block in blocks)
    senders, recipients, outcomes = _Dictionary(SENDER), _Dictionary(RECIPIENT), _Dictionary(OUTCOME)
    origins, goals, sets = _Bytes(), _Bytes(), _Bytes()

    def values(name: str) -> bytes:
        return b"".join([block.buffers(name)[1] for block in blocks])

    received, settled = values("received"), values("settled")
    sources = b"".join([origins.indices(block, "source_address") for block in blocks])
    targets = b"".join([goals.indices(block, "target_address") for block in blocks])
    flags = {name: _runs(values(name), 1) for name in FLAGS}
    delivered_runs = [_runs(values(f"delivered_{name}"), 1) for name in DELIVERED]
    source, came, gone_to = _runs(sources, 4), origins.buffers(), goals.buffers()
    stayed = targets == sources and came == gone_to
    buffers: list[Buffer] = [
        _runs(received, 8),
        _runs(settled, 8),
        _runs(b"".join([recipients.indices(block) for block in blocks]), 4),
        _runs(b"".join([outcomes.indices(block) for block in blocks]), 4),
        _runs(values("slot"), 4),
        _runs(b"".join([senders.indices(block) for block in blocks]), 4),
        source,
        source if stayed else _runs(targets, 4),
        _runs(b"".join([sets.indices(block, SET[0]) for block in blocks]), 4),
        *flags.values(),
        *(
            flags[name] if _same(flags[name], went) else went
            for name, went in zip(DELIVERED, delivered_runs, strict=True)
        ),
        *_expiries(blocks),
        _runs(values("body_size"), 4),
        *_bodies(blocks),
        *senders.buffers(),
        *recipients.buffers(),
        *outcomes.buffers(),
        *came,
        *(came if stayed else gone_to),
        *sets.buffers(),
    ]
    times = array("q", settled)
    routes = frozenset(entry[1].decode() for entry in recipients.numbers)
    first = blocks[0].header
    header = Header(
        *(0, first.shard, 0, first.base, rows),
        min(block.header.first_us for block in blocks),
        max(block.header.last_us for block in blocks),
        *(len(COLUMNS), 0, 0, 0),
        max(block.header.low_us for block in blocks),
    )
    return Draft(header, ENCODED_COLUMNS, buffers, BlockStatistics(min(times), max(times), routes))


def _runs(values: bytes, width: int) -> Buffer:
    """Return a buffer of values of `width` bytes each, as runs of equal values if that is shorter."""
    first, count = values[:width], len(values) // width
    if first * count == values:
        return Repeated(first, width, [count])
    numbers = array({1: "B", 4: "I", 8: "q"}[width], values)
    found = [(value, sum(1 for _ in same)) for value, same in groupby(numbers)]
    if len(found) * (width + 4) >= len(values):
        return values
    firsts = array(numbers.typecode, [value for value, _ in found])
    return Repeated(firsts.tobytes(), width, [count for _, count in found])


def _same(one: Buffer, other: Buffer) -> bool:
    if isinstance(one, Repeated) and isinstance(other, Repeated):
        return (one.values, one.lengths) == (other.values, other.lengths)
    return one == other


def _present(valid: memoryview, rows: int) -> list[int]:
    """Return a list with 1 for each row that has a value and 0 for each other row.

    `valid` is a validity buffer; if it is empty all rows have values.
    """
    return [valid[at >> 3] >> (at & 7) & 1 for at in range(rows)] if valid else [1] * rows


def _expiries(blocks: Sequence[Block]) -> tuple[bytes, Buffer]:
    """Return the validity and values of the expiry times in the blocks, both empty if no row expires."""
    present: list[int] = []
    found: list[bytes] = []
    for block in blocks:
        rows = block.header.rows
        valid, values = block.buffers("expires")
        present += _present(valid, rows) if values else [0] * rows
        found.append(bytes(values) or bytes(8 * rows))
    if not any(present):
        return b"", b""
    return b"" if all(present) else bitmap(present), _runs(b"".join(found), 8)


def _bodies(blocks: Sequence[Block]) -> tuple[bytes, bytes, bytes]:
    """Return the buffers of the bodies in the blocks: validity, offsets and joined bytes."""
    sizes: list[int] = []
    present: list[int] = []
    found: list[memoryview] = []
    for block in blocks:
        rows = block.header.rows
        valid, starts, data = block.buffers("body")
        found.append(data)
        if starts:
            ends = starts.cast("i")
            sizes += [ends[at + 1] - ends[at] for at in range(rows)]
            present += _present(valid, rows)
        else:
            sizes += [0] * rows
            present += [0] * rows
    if not any(present):
        return b"", b"", b""
    return b"" if all(present) else bitmap(present), offsets(sizes), b"".join(found)


Piece = Block | tuple[Header, bytes, BlockStatistics | None]
"""Block to merge with others; or header, bytes and statistics of a block to copy."""


def merge_segments(segments: Sequence[Segment], *, level: int = 0) -> int:
    """Merge consecutive complete segments into one, named as the first one. Return its size in bytes.

    The merged segment has an index. `level` is the compression level of zlib. Raises OSError, and DamageError
    if a block is damaged or rows are missing without a gap; then everything stays unchanged.
    """
    first = segments[0]
    draft = first.path.with_name(f"{first.path.name}.tmp")
    summary = Summary(first.first, first.first)
    offset = 0
    try:
        with draft.open("wb") as out:
            os.fchmod(out.fileno(), 0o600)
            for header, pieces, statistics in _rewritten(segments, summary, level):
                out.writelines(pieces)
                summary.add(offset, header, statistics, small=is_small(header))
                offset += header.byte_count
            laid = seal(lay_out(index_draft(int(first.shard), offset, summary), 0))
            out.writelines(laid.pieces)
            out.flush()
            os.fsync(out.fileno())
            newest = max(segment.path.stat().st_mtime for segment in segments)
            os.utime(out.fileno(), (newest, newest))
        draft.replace(first.path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if segments[1:]:
        sync_path(first.path.parent)  # the name has to survive before the others go
    for segment in segments[1:]:
        segment.path.unlink(missing_ok=True)
    return offset + laid.header.byte_count


def _rewritten(
    segments: Iterable[Segment], summary: Summary, level: int
) -> Iterator[tuple[Header, list[Bytes], BlockStatistics | None]]:
    """Yield the blocks of the merged segment: header, byte strings to write, and statistics.

    `summary` gets the low-water mark and the number of merged blocks; `level` is the compression level.
    """
    waiting: list[Block] = []
    rows = byte_count = 0
    for piece in _pieces(segments, summary):
        block = piece if isinstance(piece, Block) else None
        if waiting and (block is None or rows + block.header.rows > MERGED_ROWS or byte_count > MERGED_BYTES):
            yield _block_pieces(waiting, level)
            waiting, rows, byte_count = [], 0, 0
        if block is not None:
            waiting.append(block)
            rows, byte_count = rows + block.header.rows, byte_count + block.header.byte_count
        elif isinstance(piece, tuple):
            header, raw, statistics = piece
            yield header, [raw], statistics
    if waiting:
        yield _block_pieces(waiting, level)


def _block_pieces(blocks: list[Block], level: int) -> tuple[Header, list[Bytes], BlockStatistics | None]:
    if len(blocks) == 1:
        return blocks[0].header, [blocks[0].data], statistics_of(blocks[0])
    return seal(lay_out(merge_blocks(blocks), level))


def _pieces(segments: Iterable[Segment], summary: Summary) -> Iterator[Piece]:
    """Yield the blocks of the segments in order, as Block to merge or as bytes to copy; each row once.

    Adds the low-water marks and the numbers of replaced blocks to `summary`. Raises DamageError.
    """
    expected = summary.first
    for segment in segments:
        with segment.path.open("rb", buffering=0) as file:
            file_summary = summary_of(file, segment)
            counted = file_summary is not None and file_summary.replaced > 0
            summary.replaced += file_summary.replaced if file_summary is not None else 0
            for at in walk(file, segment.path):
                if isinstance(at, Hole):
                    raise DamageError(f"{at.path}: bytes {at.offset} to {at.end} are not a valid block")
                header = at.header
                summary.low_us = max(summary.low_us, header.low_us)
                if header.flags & (INDEX | MARK) or header.next <= expected:
                    continue
                data = content_of(file, at)
                if header.base != expected or data is None:
                    raise DamageError(
                        f"{at.path}: the block at offset {at.offset} does not follow, or is damaged"
                    )
                expected = header.next
                if header.is_gap:
                    yield header, data, None
                    continue
                summary.replaced += not counted
                block = block_from(segment.shard, at, data)
                if (
                    header.rows * 2 > MERGED_ROWS
                    or header.byte_count > MERGED_BYTES // 2
                    or not _has_current_columns(block)
                ):
                    yield header, data, statistics_of(block)
                else:
                    yield block


def _has_current_columns(block: Block) -> bool:
    """Return True if the block has exactly the columns that this version writes.

    Blocks with other columns are not merged, because columns would be lost.
    """
    return tuple(block.columns.values()) == COLUMNS and all(
        block.buffers(name)[0] for name in ("client", "route", "outcome")
    )


def statistics_of(block: Block) -> BlockStatistics | None:
    """Return the statistics of a block, computed from its columns.

    Return None if the block lacks the column `settled` or `route`.
    """
    if "settled" not in block.columns or "route" not in block.columns:
        return None
    settled = block.buffers("settled")[1].cast("q")
    texts = block.texts("route")
    routes = frozenset(texts[one] or "" for one in set(block.buffers("route")[0].cast("I")))
    return BlockStatistics(min(settled), max(settled), routes)


def remove_leftovers(folder: Path, shard: int) -> None:
    """Delete the draft files of merges of this shard that were not completed."""
    for path in folder.glob(f"{shard}-*.gwj.tmp"):
        path.unlink(missing_ok=True)

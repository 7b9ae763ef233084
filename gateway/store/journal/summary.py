"""Summary of a complete segment, stored in its last block, so that planning need not read the other blocks.

The JSON object has the keys of `Summary`. `spans` are runs of consecutive blocks, about 1 MiB each, as lists:
offset, number of the first row, number behind the last, bytes, and the earliest and latest receipt.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Final, NamedTuple

from gateway.store.journal.format import (
    INDEX,
    LOOK_BYTES,
    MARK,
    BlockStatistics,
    DamageError,
    Draft,
    Header,
    padding,
)
from gateway.store.journal.segments import Segment, block_at, content_of, size_of

SPAN_BYTES: Final = 1_048_576
ROUTES_MAX: Final = 1_000  # in the list; a segment with more has no list
SMALL_ROWS: Final = 512
SMALL_BYTES: Final = 131_072  # bytes; a block with few rows may have large bodies, and is not small then
TRAILER: Final = struct.Struct("<8sQ")
TRAILER_MAGIC: Final = b"GWJINDEX"


class SummarySpan(NamedTuple):
    """Consecutive blocks in a file: `byte_count` bytes at `offset`.

    They have rows from number `first` up to, not including, `next`. `first_us` and `last_us` are the earliest
    and latest receipt, in microseconds UTC.
    """

    offset: int
    first: int
    next: int
    byte_count: int
    first_us: int
    last_us: int


@dataclass(slots=True)
class Summary:
    """Summary of a segment, whose rows have numbers from `first` up to, not including, `next`.

    `missing` of the rows are in `gaps` gaps. `received` and `settled` are the earliest and latest times, in
    microseconds UTC, or (0, 0) without rows. `routes` is None if there are too many to list, or they are
    unknown. `small` is the number of small blocks, and `replaced` the number of blocks that were merged into
    the present ones.
    """

    first: int
    next: int
    rows: int = 0
    missing: int = 0
    gaps: int = 0
    blocks: int = 0
    small: int = 0
    replaced: int = 0
    received: tuple[int, int] = (0, 0)
    settled: tuple[int, int] = (0, 0)
    low_us: int = 0
    routes: set[str] | None = field(default_factory=set)
    spans: list[SummarySpan] = field(default_factory=list)

    def add(
        self, offset: int, header: Header, statistics: BlockStatistics | None, *, small: bool = False
    ) -> None:
        """Add the next block of the segment to the summary; it is at `offset` in the file.

        `statistics` is None if unknown; `small` is True if the block should be merged with its neighbours.
        """
        self.low_us = max(self.low_us, header.low_us)
        self.next = header.next
        if header.flags & (INDEX | MARK):
            return
        if header.is_gap:
            self.gaps += 1
            self.missing += header.rows
            return
        self.blocks += 1
        self.small += small
        self.rows += header.rows
        self.received = wider(self.received, header.first_us, header.last_us)
        if statistics is None:
            self.routes = None
        else:
            self.settled = wider(self.settled, statistics.first_us, statistics.last_us)
            if self.routes is not None:
                self.routes |= statistics.routes
                if len(self.routes) > ROUTES_MAX:
                    self.routes = None
        span = self.spans[-1] if self.spans else None
        if span is not None and span.offset + span.byte_count == offset and span.byte_count < SPAN_BYTES:
            received = wider((span.first_us, span.last_us), header.first_us, header.last_us)
            byte_count = span.byte_count + header.byte_count
            self.spans[-1] = SummarySpan(span.offset, span.first, header.next, byte_count, *received)
        else:
            self.spans.append(
                SummarySpan(
                    offset, header.base, header.next, header.byte_count, header.first_us, header.last_us
                )
            )

    def has(self, routes: Iterable[str]) -> bool:
        """Return False if certainly no row has one of these routes."""
        return self.routes is None or not self.routes.isdisjoint(routes)

    def place_of(self, number: int) -> int:
        """Return the offset in the file of the block that has row `number`, or of one before that block."""
        return next((span.offset for span in reversed(self.spans) if span.first <= number), 0)


def wider(span: tuple[int, int], first: int, last: int) -> tuple[int, int]:
    """Return a span of times extended to include `first` and `last`; (0, 0) is the empty span."""
    return (first, last) if span == (0, 0) else (min(span[0], first), max(span[1], last))


def is_small(header: Header) -> bool:
    """Return True if a block is so small that it should be merged with its neighbours."""
    return 0 < header.rows < SMALL_ROWS and header.byte_count < SMALL_BYTES and not header.is_gap


def index_draft(shard: int, offset: int, summary: Summary) -> Draft:
    """Return the block with the summary, to be written at the end of a segment.

    `offset` is the position of that block in the file.
    """
    text = json.dumps(encode_summary(summary), separators=(",", ":")).encode()
    text += b" " * len(padding(len(text)))
    base, low = summary.next, summary.low_us
    header = Header(INDEX, shard, 0, base, 0, *summary.received, 0, 0, 0, 0, low)
    return Draft(header, b"", [text + TRAILER.pack(TRAILER_MAGIC, offset)])


def summary_of(file: BinaryIO, segment: Segment) -> Summary | None:
    """Read the summary at the end of a segment. Return None if it is missing or the end is damaged.

    Raises DamageError if the summary has a valid checksum but cannot be decoded.
    """
    size = size_of(file)
    if size < TRAILER.size:
        return None
    file.seek(size - TRAILER.size)
    magic, offset = TRAILER.unpack(file.read(TRAILER.size).ljust(TRAILER.size))
    if magic != TRAILER_MAGIC or offset >= size:
        return None
    at = block_at(file, segment.path, offset)
    if at is None or at.end != size or not at.header.flags & INDEX:
        return None
    data = content_of(file, at)
    if data is None:
        return None
    try:
        return decode_summary(json.loads(data[LOOK_BYTES : -TRAILER.size]))
    except (ValueError, TypeError, KeyError) as error:
        raise DamageError(f"{segment.path}: the summary at its end cannot be read: {error}") from error


def encode_summary(summary: Summary) -> dict[str, Any]:
    """Convert a summary to JSON values."""
    document = asdict(summary)
    document["routes"] = None if summary.routes is None else sorted(summary.routes)
    return document


def decode_summary(document: Mapping[str, Any]) -> Summary:
    """Convert the JSON values of `encode_summary` to a summary. Raises ValueError, TypeError or KeyError."""
    found = {name: document[name] for name in Summary.__slots__}  # a later gateway may write more keys
    found["routes"] = None if found["routes"] is None else set(found["routes"])
    found["spans"] = [SummarySpan(*span) for span in found["spans"]]
    found["received"], found["settled"] = tuple(found["received"]), tuple(found["settled"])
    return Summary(**found)

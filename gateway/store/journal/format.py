"""How the octets of a journal lie, for whoever writes or reads them.

A journal is a folder of *segments*, `<shard>-<sequence of the first row, 20 digits>.gwj`; a segment is blocks
one behind the other; a block is what one flush wrote, complete in itself. All numbers are little-endian; a
block's length and everything in it starts at a multiple of 8 octets from the start of the block.

    header      72 octets, HEADER below; its last four are the CRC-32 of the 68 before
    low water   8 octets: a time, see below
    directory   where the buffers lie, then which columns there are
    buffers     in any order, zero octets between them

The content CRC covers everything behind the header. The directory is, for each buffer, three uint32: its
offset in the block, the octets stored there, and its octets; where these differ it is compressed (zlib, RFC
1950), or written as runs. Of those the octets stored have their highest bit set, and are: two uint32, the
number of runs and the octets of a value; for each run a uint32, its length in values; zeros up to a multiple
of 8; the value of each run. Two buffers may lie at the same place. An empty buffer has three zeros. Then for
each column: its kind (one octet), the length of its name (one octet), one octet for each buffer of its kind
with that buffer's number in the table (255: the column has no such buffer), for kind 9 one octet more, and
its name in ASCII; then zeros up to a multiple of 8. A reader passes over columns whose names it does not
know, and must refuse kinds that it does not know.

| kind      | buffers                            | a row                                              |
|-----------|------------------------------------|----------------------------------------------------|
| 1 int64   | validity, values                   | eight octets, signed                               |
| 2 uint32  | validity, values                   | four octets                                        |
| 3 uint8   | validity, values                   | one octet                                          |
| 4 time    | validity, values                   | int64: microseconds since 1970-01-01 UTC           |
| 5 boolean | validity, values                   | one octet, 0 or 1                                  |
| 6 text    | validity, offsets, octets          | UTF-8 between two int32 offsets (rows + 1 of them) |
| 7 binary  | validity, offsets, octets          | the same without an encoding                       |
| 8 coded   | indices, validity, offsets, octets | uint32: the place of its text in a dictionary      |
| 9 wire    | indices, forms, offsets, octets    | the same, of an entry that a protocol has written  |

The dictionary of a coded column is its last three buffers, as of kind 6; it is the block's own. A text may be
there twice, or not be used by any row, so what it lacks no row has, but not the other way round.

The dictionary of a wire column has octets, of which its texts are made, and a form (one octet) for
each entry. Without indices the entry of a row is that of its own place. The octet more in the directory says
which text the column is: 0, 1 and 2 are of an address, as one text, its scope and its name; 3 and 4 are of
properties, as JSON and their message id. Of form 0 the octets are these texts themselves (three, or two),
each behind its length, a uint32 (2^32 - 1: null). The others are as a protocol writes it:

| form         | an address                                    | properties                                 |
|--------------|-----------------------------------------------|--------------------------------------------|
| 1 MQTT       | the topic                                     | list of a PUBLISH, without its length      |
| 2 AMQP 0-9-1 | exchange and routing key, two short strings   | of a content header, from the flags on     |
| 3 AMQP/Fast  | `queue`, `topic` or `peer`, a colon, the name | of a message's head, behind the body-size  |

Nulls: a validity buffer has a bit for each row (of a dictionary: for each text), least significant first, 1:
there is a value; without the buffer there are no nulls. A column whose values, offsets or indices are empty
in a block with rows is null in every row. These are the layouts of Apache Arrow.

The sequence number of a row is the header's `base` plus its place in the block; no number is used twice. A
block with flag GAP has no rows: `rows` numbers from `base` on were not written, and a JSON object behind the
header says why (`reason`: "backlog", "unwritable" or "error"; `text`).

The low-water mark of a block is a time, int64 as kind 4: of all that was received before it nothing was open
any more when the block was made, so no later block of the shard has a row with an earlier `received`, unless
the wall clock was set back. 0: not known. A block with flag MARK has no rows and says nothing else; while
nothing crosses there is one a minute.

The last block of a segment that is complete has the flag INDEX, no rows, and what is in the segment: a JSON
object behind the mark (`gateway/store/journal/summary.py` has its keys), spaces up to a multiple of 8, then
"GWJINDEX" and a uint64, the offset of this block in the file. A segment without it is the one in use, or its
writer was killed. Segments that are complete may be written anew with fewer, larger blocks and the same
rows, under the name of the first of them; the others are deleted then, and for a moment rows may be there
twice. So a reader goes by sequence numbers, passes over rows that it has seen, and looks for the files again
when one is gone. An incomplete block at the end of the last segment is torn: a reader stops before it (it may
be in the middle of being written), the writer cuts it off when it starts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Final, NamedTuple

from gateway.errors import GatewayError

Octets = bytes | memoryview
MAGIC: Final = b"GWJBLOCK"
VERSION: Final = 4
"""The one format that is read and written: that of release 0.1.0. What came before was never released."""
GAP: Final = 1  # flag: rows are missing here
INDEX: Final = 2  # flag: what is in the segment that ends here
MARK: Final = 4  # flag: only the low-water mark
HEADER: Final = struct.Struct("<8sHHIQQIIqqHHII")
HEADER_OCTETS: Final = HEADER.size + 4
LOW_WATER: Final = struct.Struct("<q")
LOOK_OCTETS: Final = HEADER_OCTETS + LOW_WATER.size  # of a block, for its Header; the directory follows
ABSENT: Final = 255  # in place of a buffer's number
ALIGNMENT: Final = 8
EXPANDED_MAX: Final = 1_040  # octets of each that is compressed: zlib makes 1 032 at most
BUFFER_OCTETS_MAX: Final = 1 << 30  # of one buffer: a body has 256 MiB at most, a block some MiB besides
RUNS: Final = 1 << 31  # in the octets stored: they are runs
COMPRESSED_FROM: Final = 64  # octets; a shorter buffer gains nothing
_BUFFER: Final = struct.Struct("<III")
_PADDING: Final = tuple(bytes(count) for count in range(ALIGNMENT))


class JournalError(GatewayError):
    """A journal that cannot be written or read; the text says where and why."""


class DamageError(JournalError):
    """Octets of a journal are not what was written."""


class Kind(IntEnum):
    """The kind of a column."""

    INT64 = 1
    UINT32 = 2
    UINT8 = 3
    TIME = 4
    BOOLEAN = 5
    TEXT = 6
    BINARY = 7
    CODED = 8
    WIRE = 9
    """Only in a directory: a Column of it is CODED, for so it is read, and has TEXT_OF as a fifth buffer."""


BUFFERS: Final = {
    Kind.INT64: 2,
    Kind.UINT32: 2,
    Kind.UINT8: 2,
    Kind.TIME: 2,
    Kind.BOOLEAN: 2,
    Kind.TEXT: 3,
    Kind.BINARY: 3,
    Kind.CODED: 4,
    Kind.WIRE: 5,
}
TEXT_OF: Final = {"address": 0, "scope": 1, "name": 2, "properties": 3, "message_id": 4}
"""What a wire column says of an entry. The first ADDRESS_TEXTS are of addresses."""
ADDRESS_TEXTS: Final = 3
ITEM_OCTETS: Final = {Kind.INT64: 8, Kind.UINT32: 4, Kind.UINT8: 1, Kind.TIME: 8, Kind.BOOLEAN: 1}


class Header(NamedTuple):
    """What a block's header says. `octets`: of the whole block. Times are in microseconds UTC: `first_us`
    and `last_us` of the earliest and latest receipt in it, `low_us` the low-water mark (0: not known)."""

    flags: int
    shard: int
    octets: int
    base: int
    rows: int
    first_us: int
    last_us: int
    columns: int
    buffers: int
    directory_octets: int
    crc: int
    low_us: int = 0

    @property
    def gap(self) -> bool:
        """True: the numbers base to base + rows were not written."""
        return bool(self.flags & GAP)

    @property
    def next(self) -> int:
        """The sequence number behind the block."""
        return self.base + self.rows


class Column(NamedTuple):
    """A column of a block. `buffers`: numbers in the block's table, ABSENT where there is none. A fifth says
    what a CODED column is of its entries, which are octets of a protocol."""

    name: str
    kind: Kind
    buffers: tuple[int, ...]


def padding(octets: int) -> bytes:
    """The zeros behind `octets` octets."""
    return _PADDING[-octets % ALIGNMENT]


def encode_header(header: Header) -> bytes:
    """The 72 octets."""
    raw = HEADER.pack(
        MAGIC,
        VERSION,
        header.flags,
        header.shard,
        header.octets,
        header.base,
        header.rows,
        header.columns,
        header.first_us,
        header.last_us,
        header.buffers,
        0,
        header.directory_octets,
        header.crc,
    )
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def decode_header(raw: bytes) -> Header | None:
    """The header in the first LOOK_OCTETS of a block; None when they are no header, or are damaged.

    Raises JournalError when it is of another format.
    """
    if len(raw) < LOOK_OCTETS or not raw.startswith(MAGIC):
        return None
    if zlib.crc32(raw[: HEADER.size]) != int.from_bytes(raw[HEADER.size : HEADER_OCTETS], "little"):
        return None
    _, version, flags, shard, octets, base, rows, columns, first, last, buffers, _, directory, crc = (
        HEADER.unpack_from(raw)
    )
    if version != VERSION:
        advice = (
            "read it with a gateway that knows it"
            if version > VERSION
            else "no release wrote it; move its files away, or name another folder in journal.path"
        )
        raise JournalError(f"the journal is of format {version}, this gateway's is {VERSION}: {advice}")
    (low,) = LOW_WATER.unpack_from(raw, HEADER_OCTETS)
    return Header(flags, shard, octets, base, rows, first, last, columns, buffers, directory, crc, low)


def encode_columns(columns: Sequence[Column]) -> bytes:
    """The second part of the directory."""
    return b"".join(
        bytes((_kind_written(kind, buffers), len(name), *buffers)) + name.encode("ascii")
        for name, kind, buffers in columns
    )


def _kind_written(kind: Kind, buffers: tuple[int, ...]) -> Kind:
    return Kind.WIRE if len(buffers) == BUFFERS[Kind.WIRE] else kind


def decode_columns(raw: bytes, count: int) -> tuple[Column, ...]:
    """The columns that `encode_columns` wrote. Raises DamageError for what no writer writes."""
    columns = []
    at = 0
    for _ in range(count):
        if at + 2 > len(raw):
            raise DamageError("the directory ends within a column")
        if raw[at] not in BUFFERS:
            raise DamageError(f"a column has the unknown kind {raw[at]}")
        kind, length = Kind(raw[at]), raw[at + 1]
        names = at + 2 + BUFFERS[kind]
        read_as = Kind.CODED if kind is Kind.WIRE else kind
        name = raw[names : names + length].decode("ascii")
        columns.append(Column(name, read_as, tuple(raw[at + 2 : names])))
        at = names + length
    return tuple(columns)


class BlockStatistics(NamedTuple):
    """What the rows of a block have in common, for the index of its segment: the first and the last time of
    settlement, in microseconds UTC, and the routes."""

    first_us: int
    last_us: int
    routes: frozenset[str]


class Laid(NamedTuple):
    """A block in pieces, to put one behind the other. Until `seal` they lack the header's octets, and the
    header the CRC."""

    header: Header
    pieces: list[Octets]
    statistics: BlockStatistics | None = None


class Repeated:
    """A buffer of values of `width` octets, each repeated: how often, is in `lengths`."""

    __slots__ = ("lengths", "octets", "values", "width")

    def __init__(self, values: bytes, width: int, lengths: Sequence[int]) -> None:
        self.values = values
        self.width = width
        self.lengths = lengths
        self.octets = width * sum(lengths)

    def __len__(self) -> int:
        return self.octets

    def encoded(self) -> bytes:
        """Its runs, or the values one by one when that is shorter."""
        count = len(self.lengths)
        head = 4 * count + 8
        head += -head % ALIGNMENT
        if head + len(self.values) >= self.octets:
            return expanded(self.values, self.width, self.lengths)
        runs = struct.pack(f"<{count + 2}I", count, self.width, *self.lengths)
        return runs.ljust(head, b"\0") + self.values


def expanded(values: bytes, width: int, lengths: Sequence[int]) -> bytes:
    """The values one by one."""
    places = range(0, len(values), width)
    return b"".join([values[at : at + width] * count for at, count in zip(places, lengths, strict=True)])


def decode_runs(stored: memoryview, octets: int) -> bytes:
    """The octets of a buffer that is written as runs. Raises DamageError when those are not as many."""
    if len(stored) >= 8 and octets <= BUFFER_OCTETS_MAX:
        count, width = struct.unpack_from("<II", stored)
        head = 4 * count + 8
        values = bytes(stored[head + -head % ALIGNMENT :])
        if width and len(values) == width * count:
            lengths = struct.unpack_from(f"<{count}I", stored, 8)
            if sum(lengths) * width == octets:
                return expanded(values, width, lengths)
    raise DamageError("the runs of a buffer do not fit together")


Buffer = Octets | Repeated


class Draft(NamedTuple):
    """A block before it is laid out. `columns` is what `encode_columns` made. A buffer that stands there
    twice (the same object) will be written once. Without columns the only buffer is the content.
    """

    header: Header
    columns: bytes
    buffers: list[Buffer]
    statistics: BlockStatistics | None = None


def lay_out(draft: Draft, level: int) -> Laid:
    """Lay out a block; `seal` completes it. `level` is zlib's, 0: nothing is compressed."""
    header, columns, buffers, statistics = draft
    if not columns:
        (given,) = buffers
        assert isinstance(given, bytes)
        content = given.ljust(len(given) + len(padding(len(given))))
        low_water = LOW_WATER.pack(header.low_us)
        return Laid(header._replace(octets=LOOK_OCTETS + len(content)), [low_water + content])
    directory = len(buffers) * _BUFFER.size + len(columns)
    pad = padding(LOOK_OCTETS + directory)
    at = LOOK_OCTETS + directory + len(pad)
    placed: dict[int, tuple[int, int, int]] = {}
    table: list[int] = []
    pieces: list[Octets] = []
    for buffer in buffers:
        octets = len(buffer)
        if not octets:
            table += (0, 0, 0)
            continue
        place = placed.get(id(buffer))
        if place is None:
            stored, flag = _stored(buffer, level)
            count = len(stored)
            place = placed[id(buffer)] = at, count | flag, octets
            pieces.append(stored)
            at += count
            if tail := padding(at):
                pieces.append(tail)
                at += len(tail)
        table += place
    head = LOW_WATER.pack(header.low_us) + struct.pack(f"<{len(table)}I", *table) + columns + pad
    done = header._replace(octets=at, buffers=len(buffers), directory_octets=directory + len(pad))
    return Laid(done, [head, *pieces], statistics)


def _stored(buffer: Buffer, level: int) -> tuple[Octets, int]:
    """What is written of a buffer, and its flag."""
    if isinstance(buffer, Repeated):
        made = buffer.encoded()
        return made, RUNS if len(made) < len(buffer) else 0
    if level and len(buffer) >= COMPRESSED_FROM:
        return _compressed(buffer, level), 0
    return buffer, 0


def seal(laid: Laid, crc32: Callable[[Octets, int], int] = zlib.crc32) -> Laid:
    """The block as it is written: its header in front, and of the rest few pieces, for what lies in memory
    of its own is not copied. `crc32` is zlib's, or another that is as good and faster; it lets the
    interpreter's lock go: a thread that wants that gets it here.
    """
    pieces: list[Octets] = []
    crc = 0
    for apart, some in groupby(laid.pieces, lambda piece: isinstance(piece, memoryview)):
        if apart:
            pieces += some
        else:
            pieces.append(b"".join(some))
    for piece in pieces:
        crc = crc32(piece, crc)
    header = laid.header._replace(crc=crc)
    return Laid(header, [encode_header(header), *pieces], laid.statistics)


def _compressed(buffer: Octets, level: int) -> Octets:
    """`buffer` compressed, or itself when that gains nothing: equal lengths mean that it is not."""
    made = zlib.compress(buffer, level)
    return made if len(made) < len(buffer) else buffer


def decompressed(stored: Octets, octets: int) -> bytes:
    """The octets of a buffer that is compressed. Raises DamageError when those are not as many, without
    making more of them than that: a journal may come from elsewhere."""
    if octets > min(EXPANDED_MAX * len(stored), BUFFER_OCTETS_MAX):
        raise DamageError(f"a buffer of {len(stored)} octets cannot be {octets}")
    machine = zlib.decompressobj()
    try:
        made = machine.decompress(stored, octets + 1)
    except zlib.error as error:
        raise DamageError(f"a buffer is not what was compressed: {error}") from None
    if len(made) != octets or not machine.eof:
        raise DamageError("a compressed buffer is not as long as it says")
    return made


def buffer_table(directory: bytes, count: int) -> list[tuple[int, int, int]]:
    """The places of the buffers: (offset, stored, octets)."""
    return list(_BUFFER.iter_unpack(directory[: count * _BUFFER.size]))


def mark_draft(shard: int, base: int, low_us: int) -> Draft:
    """A block that only says up to when the journal is complete."""
    return Draft(Header(MARK, shard, 0, base, 0, low_us, low_us, 0, 0, 0, 0, low_us), b"", [b""])


def gap_draft(shard: int, base: int, rows: int, now_us: int, reason: bytes) -> Draft:
    """A block that says that `rows` rows from `base` on were not written; `reason` is a JSON object."""
    return Draft(Header(GAP, shard, 0, base, rows, now_us, now_us, 0, 0, 0, 0), b"", [reason])

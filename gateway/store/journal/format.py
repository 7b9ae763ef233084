"""Byte format of the journal, for its writer and its readers.

A journal is a folder of *segments*, `<shard>-<sequence of the first row, 20 digits>.gwj`, and complete ones
may be Parquet (`gateway/store/journal/parquet.py`). A segment of the first kind is a sequence of blocks. A
block is what one flush wrote, complete in itself. All numbers are little-endian; the size of a block and the
position of everything in it are multiples of 8 bytes from the start of the block.

    header      72 bytes, HEADER below; its last four are the CRC-32 of the 68 before
    low water   8 bytes: a time, see below
    directory   positions of the buffers, then the columns
    buffers     in any order, with zero bytes between them

The content CRC covers everything behind the header. The directory has three uint32 for each buffer: its
offset in the block, its stored size and its size, in bytes. If the sizes differ, the buffer is compressed
(zlib, RFC 1950) or written as runs. For runs the highest bit of the stored size is set, and the stored
bytes are: two uint32, the number of runs and the size of a value; for each run a uint32, its length in
values; zeros up to a multiple of 8; the value of each run. Two buffers may have the same position. An
empty buffer has three zeros. No stored buffer contains "GWJBLOCK": one that would is written as a zlib
stream that does not, and may be longer. A reader that searches for the next header behind damage therefore
finds no header that a client has put into a body. Then follows for each column: its kind (one byte), the
length of its name (one byte), one byte for each buffer of its kind with that buffer's number in the table
(255: the column has no such buffer), for kind 9 one further byte, and its name in ASCII; then zeros up to
a multiple of 8. A reader ignores columns with unknown names, and must refuse unknown kinds.

| kind      | buffers                           | a row                                               |
|-----------|-----------------------------------|-----------------------------------------------------|
| 1 int64   | validity, values                  | eight bytes, signed                                 |
| 2 uint32  | validity, values                  | four bytes                                          |
| 3 uint8   | validity, values                  | one byte                                            |
| 4 time    | validity, values                  | int64: microseconds since 1970-01-01 UTC            |
| 5 boolean | validity, values                  | one byte, 0 or 1                                    |
| 6 text    | validity, offsets, bytes          | UTF-8 between two int32 offsets (rows + 1 of them)  |
| 7 binary  | validity, offsets, bytes          | bytes between two int32 offsets (rows + 1 of them)  |
| 8 coded   | indices, validity, offsets, bytes | uint32: the position of its text in a dictionary    |
| 9 wire    | indices, forms, offsets, bytes    | uint32: the position of its entry, see below        |

The dictionary of a coded column is its last three buffers, as of kind 6; it belongs to the block alone. A
text may be in it twice, or not be used by any row. A text that is not in it is in no row, but the reverse
does not hold.

The dictionary of a wire column has entries in the form of a protocol, from which its texts are derived, and a
form (one byte) for each entry. Without indices each row has the entry at its own position. The further byte
in the directory says which text the column shows: 0, 1 and 2 are those of an address, as one text, its scope
and its name; 3 to 6 are those of properties: as JSON, their message id, correlation id and content type. An
entry of form 0 has these texts themselves (three, or four; of properties the last two may be missing: null),
each behind its length, a uint32 (2^32 - 1: null). The other forms are those of the protocols:

| form         | an address                                    | properties                                 |
|--------------|-----------------------------------------------|--------------------------------------------|
| 1 MQTT       | the topic                                     | list of a PUBLISH, without its length      |
| 2 AMQP 0-9-1 | exchange and routing key, two short strings   | of a content header, from the flags on     |
| 3 AMQP/Fast  | `queue`, `topic` or `peer`, a colon, the name | of a message's head, behind the body-size  |

A validity buffer has a bit for each row (in a dictionary: for each text), least significant first. 1 means
that there is a value, 0 is null; without the buffer there are no nulls. A column whose values, offsets or
indices are empty in a block with rows is null in every row. These are the layouts of Apache Arrow.

The sequence number of a row is the header's `base` plus its position in the block. No number is used twice,
except those of rows that a power failure lost before they were synced. A block with flag GAP has no rows:
`rows` numbers from `base` on were not written, and a JSON object behind the header gives the reason
(`reason`: "backlog", "unwritable", "error" or "damage"; `text`).

The low-water mark of a block is a time, int64 as in kind 4, or 0 if unknown. When the block was written,
every message received before that time was settled. No later block of the shard therefore has a row with an
earlier `received`, unless the wall clock was set back. A block with flag MARK has no rows, only the mark;
without traffic there is one each minute.

The last block of a complete segment has the flag INDEX, no rows, and a summary of the segment: a JSON object
behind the mark (`gateway/store/journal/summary.py` has its keys), spaces up to a multiple of 8, then
"GWJINDEX" and a uint64, the offset of this block in the file. A segment without it is in use, or its writer
was killed. Complete segments may be rewritten with fewer, larger blocks and the same rows, under the name of
the first of them, or as one file in Parquet, whose name has the first sequence and that behind the last. The
others are deleted afterwards, so for a moment rows may exist twice. A reader therefore goes by sequence
numbers, skips rows that it has seen, and lists the files again when one is missing. An incomplete block at
the end of the last segment is torn: a reader stops before it, since it may still be written, and the writer
cuts it off when it starts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Final, NamedTuple

from gateway.errors import GatewayError

Bytes = bytes | memoryview
MAGIC: Final = b"GWJBLOCK"
VERSION: Final = 4
"""The only format that is read and written: that of release 0.1.0. Earlier formats were never released."""
GAP: Final = 1  # flag: rows are missing
INDEX: Final = 2  # flag: summary of the segment that ends here
MARK: Final = 4  # flag: only the low-water mark
HEADER: Final = struct.Struct("<8sHHIQQIIqqHHII")
HEADER_BYTES: Final = HEADER.size + 4
LOW_WATER: Final = struct.Struct("<q")
# Bytes of a block that contain its Header; the directory follows.
LOOK_BYTES: Final = HEADER_BYTES + LOW_WATER.size
ABSENT: Final = 255  # instead of a buffer's number
ALIGNMENT: Final = 8
EXPANDED_MAX: Final = 1_040  # decompressed bytes for each compressed byte: zlib has 1 032 at most
BUFFER_BYTES_MAX: Final = 1 << 30  # of one buffer: a body has 256 MiB at most, a block some MiB in addition
RUNS: Final = 1 << 31  # flag in the stored size: the buffer is written as runs
COMPRESSED_FROM: Final = 64  # bytes; a shorter buffer gains nothing
SEARCHED_BYTES: Final = 65_536  # bytes searched for MAGIC at once
DIVIDED_BYTES: Final = 16_384  # bytes of one part of a buffer that contains MAGIC; fit one block of zlib
DIVISIONS_MAX: Final = 64  # places in such a part; with more of them it is compressed
_EMPTY_PART: Final = b"\0\0\0\xff\xff"  # of a zlib stream: stored, 0 bytes
_LAST_PART: Final = b"\1\0\0\xff\xff"
_BUFFER: Final = struct.Struct("<III")
_PADDING: Final = tuple(bytes(count) for count in range(ALIGNMENT))


class JournalError(GatewayError):
    """Error of a journal that cannot be written or read; the text contains the place and the reason."""


class DamageError(JournalError):
    """Error of a journal whose bytes have changed since they were written."""


class ColumnKind(IntEnum):
    """Kind of a column, which determines the column's buffers (see the table in the module's docstring)."""

    INT64 = 1
    UINT32 = 2
    UINT8 = 3
    TIME = 4
    BOOLEAN = 5
    TEXT = 6
    BINARY = 7
    CODED = 8
    WIRE = 9
    """Only in a block's directory: its Column has kind CODED, and a value of TEXT_OF as fifth buffer."""


BUFFERS: Final = {
    ColumnKind.INT64: 2,
    ColumnKind.UINT32: 2,
    ColumnKind.UINT8: 2,
    ColumnKind.TIME: 2,
    ColumnKind.BOOLEAN: 2,
    ColumnKind.TEXT: 3,
    ColumnKind.BINARY: 3,
    ColumnKind.CODED: 4,
    ColumnKind.WIRE: 5,
}
TEXT_OF: Final = {
    "address": 0,
    "scope": 1,
    "name": 2,
    "properties": 3,
    "message_id": 4,
    "correlation_id": 5,
    "content_type": 6,
}
"""Number of each text that a column of kind WIRE can show: first those of addresses, then of properties."""
ADDRESS_TEXTS: Final = 3
ITEM_BYTES: Final = {
    ColumnKind.INT64: 8,
    ColumnKind.UINT32: 4,
    ColumnKind.UINT8: 1,
    ColumnKind.TIME: 8,
    ColumnKind.BOOLEAN: 1,
}


class Header(NamedTuple):
    """Header of a block in a journal file. `byte_count` is the size of the whole block in bytes.

    `base` is the sequence number of its first row. Times are in microseconds UTC: `first_us` and `last_us`
    are the earliest and latest receipt in the block, `low_us` is the low-water mark (0 if unknown): all
    messages received before it are settled.
    """

    flags: int
    shard: int
    byte_count: int
    base: int
    rows: int
    first_us: int
    last_us: int
    columns: int
    buffers: int
    directory_bytes: int
    crc: int
    low_us: int = 0

    @property
    def is_gap(self) -> bool:
        """True if the block only records that `rows` rows from number `base` on were not written."""
        return bool(self.flags & GAP)

    @property
    def next(self) -> int:
        """Sequence number behind the last row of the block."""
        return self.base + self.rows


class Column(NamedTuple):
    """Column of a block: its name, kind, and buffers.

    `buffers` are indices in the block's table of buffers, ABSENT for a missing buffer. A CODED column of
    encoded addresses or properties has a fifth number, which says which of their texts the column shows.
    """

    name: str
    kind: ColumnKind
    buffers: tuple[int, ...]


def padding(byte_count: int) -> bytes:
    """Return as many zero bytes as `byte_count` needs to become a multiple of ALIGNMENT."""
    return _PADDING[-byte_count % ALIGNMENT]


def encode_header(header: Header) -> bytes:
    """Encode a header as 72 bytes."""
    raw = HEADER.pack(
        MAGIC,
        VERSION,
        header.flags,
        header.shard,
        header.byte_count,
        header.base,
        header.rows,
        header.columns,
        header.first_us,
        header.last_us,
        header.buffers,
        0,
        header.directory_bytes,
        header.crc,
    )
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def decode_header(raw: bytes) -> Header | None:
    """Decode the header in `raw`, the first LOOK_BYTES bytes of a block.

    Return None if the header is incomplete or damaged. Raises JournalError if the block has another version
    of the format.
    """
    if len(raw) < LOOK_BYTES or not raw.startswith(MAGIC):
        return None
    if zlib.crc32(raw[: HEADER.size]) != int.from_bytes(raw[HEADER.size : HEADER_BYTES], "little"):
        return None
    _, version, flags, shard, byte_count, base, rows, columns, first, last, buffers, _, directory, crc = (
        HEADER.unpack_from(raw)
    )
    if version != VERSION:
        raise JournalError(
            f"the journal has format {version}, but this gateway reads format {VERSION}: read it"
            " with a gateway of that format, or set journal.path to another folder"
        )
    (low,) = LOW_WATER.unpack_from(raw, HEADER_BYTES)
    return Header(flags, shard, byte_count, base, rows, first, last, columns, buffers, directory, crc, low)


def encode_columns(columns: Sequence[Column]) -> bytes:
    """Encode the descriptions of columns, for the directory of a block."""
    return b"".join(
        bytes((_kind_written(kind, buffers), len(name), *buffers)) + name.encode("ascii")
        for name, kind, buffers in columns
    )


def _kind_written(kind: ColumnKind, buffers: tuple[int, ...]) -> ColumnKind:
    return ColumnKind.WIRE if len(buffers) == BUFFERS[ColumnKind.WIRE] else kind


def decode_columns(raw: bytes, count: int) -> tuple[Column, ...]:
    """Decode `count` descriptions of columns in `raw`, a part of a directory. Raises DamageError."""
    columns = []
    at = 0
    for _ in range(count):
        if at + 2 > len(raw):
            raise DamageError("the directory ends within a column")
        if raw[at] not in BUFFERS:
            raise DamageError(f"a column has the unknown kind {raw[at]}")
        kind, length = ColumnKind(raw[at]), raw[at + 1]
        names = at + 2 + BUFFERS[kind]
        read_as = ColumnKind.CODED if kind is ColumnKind.WIRE else kind
        name = raw[names : names + length].decode("ascii")
        columns.append(Column(name, read_as, tuple(raw[at + 2 : names])))
        at = names + length
    return tuple(columns)


class BlockStatistics(NamedTuple):
    """Statistics of a block, for the summary at the end of its segment.

    `first_us` and `last_us` are the earliest and latest settlement, in microseconds UTC; `routes` has the
    routes of the rows.
    """

    first_us: int
    last_us: int
    routes: frozenset[str]


class BlockPieces(NamedTuple):
    """Block as byte strings to be written one after the other.

    Until `seal` the pieces lack the encoded header, and `header` its CRC.
    """

    header: Header
    pieces: list[Bytes]
    statistics: BlockStatistics | None = None


class Repeated:
    """Buffer of values of `width` bytes each; value k stands for `lengths[k]` consecutive rows."""

    __slots__ = ("byte_count", "lengths", "values", "width")

    def __init__(self, values: bytes, width: int, lengths: Sequence[int]) -> None:
        self.values = values
        self.width = width
        self.lengths = lengths
        self.byte_count = width * sum(lengths)

    def __len__(self) -> int:
        return self.byte_count

    def encoded(self) -> bytes:
        """Return the bytes of the buffer, encoded as runs, or expanded if that is shorter."""
        count = len(self.lengths)
        head = 4 * count + 8
        head += -head % ALIGNMENT
        if head + len(self.values) >= self.byte_count:
            return expanded(self.values, self.width, self.lengths)
        runs = struct.pack(f"<{count + 2}I", count, self.width, *self.lengths)
        return runs.ljust(head, b"\0") + self.values


def expanded(values: bytes, width: int, lengths: Sequence[int]) -> bytes:
    """Return the values of `width` bytes each, where value k is repeated `lengths[k]` times."""
    places = range(0, len(values), width)
    return b"".join([values[at : at + width] * count for at, count in zip(places, lengths, strict=True)])


def decode_runs(stored: memoryview, byte_count: int) -> bytes:
    """Expand a buffer that is encoded as runs (`stored`) to `byte_count` bytes.

    Raises DamageError if it does not expand to that size.
    """
    if len(stored) >= 8 and byte_count <= BUFFER_BYTES_MAX:
        count, width = struct.unpack_from("<II", stored)
        head = 4 * count + 8
        values = bytes(stored[head + -head % ALIGNMENT :])
        if width and len(values) == width * count:
            lengths = struct.unpack_from(f"<{count}I", stored, 8)
            if sum(lengths) * width == byte_count:
                return expanded(values, width, lengths)
    raise DamageError("the runs of a buffer are inconsistent")


Buffer = Bytes | Repeated


class Draft(NamedTuple):
    """Contents of a block, before their positions in the block are computed.

    `columns` comes from `encode_columns`. A buffer that occurs twice (the same object) is written once.
    Without columns the only buffer is a JSON text.
    """

    header: Header
    columns: bytes
    buffers: list[Buffer]
    statistics: BlockStatistics | None = None


def lay_out(draft: Draft, level: int) -> BlockPieces:
    """Compute where the buffers of a block are placed, and compress the buffers or encode them as runs.

    The result lacks only the checksum and the encoded header, which `seal` adds. `level` is the compression
    level of zlib; 0 does not compress.
    """
    header, columns, buffers, statistics = draft
    if not columns:
        (content_bytes,) = buffers
        assert isinstance(content_bytes, bytes)
        content = content_bytes.ljust(len(content_bytes) + len(padding(len(content_bytes))))
        low_water = LOW_WATER.pack(header.low_us)
        return BlockPieces(header._replace(byte_count=LOOK_BYTES + len(content)), [low_water + content])
    directory = len(buffers) * _BUFFER.size + len(columns)
    pad = padding(LOOK_BYTES + directory)
    at = LOOK_BYTES + directory + len(pad)
    placed: dict[int, tuple[int, int, int]] = {}
    table: list[int] = []
    pieces: list[Bytes] = []
    for buffer in buffers:
        byte_count = len(buffer)
        if not byte_count:
            table += (0, 0, 0)
            continue
        place = placed.get(id(buffer))
        if place is None:
            stored, flag = _stored(buffer, level)
            count = len(stored)
            place = placed[id(buffer)] = at, count | flag, byte_count
            pieces.append(stored)
            at += count
            if tail := padding(at):
                pieces.append(tail)
                at += len(tail)
        table += place
    head = LOW_WATER.pack(header.low_us) + struct.pack(f"<{len(table)}I", *table) + columns + pad
    done = header._replace(byte_count=at, buffers=len(buffers), directory_bytes=directory + len(pad))
    return BlockPieces(done, [head, *pieces], statistics)


def _stored(buffer: Buffer, level: int) -> tuple[Bytes, int]:
    """Return a buffer's bytes as stored (plain, compressed or runs), and RUNS for runs, otherwise 0.

    `level` is the compression level of zlib; 0 does not compress.
    """
    if isinstance(buffer, Repeated):
        made = buffer.encoded()
        if not _has_magic(made):
            return made, RUNS if len(made) < len(buffer) else 0
        buffer = expanded(buffer.values, buffer.width, buffer.lengths)
    stored = _compressed(buffer, level) if level and len(buffer) >= COMPRESSED_FROM else buffer
    return _without_magic(buffer) if _has_magic(stored) else stored, 0


def _has_magic(stored: Bytes) -> bool:
    for at in range(0, len(stored), SEARCHED_BYTES):
        # Twice as fast as `find`, and in a memoryview nothing can be searched.
        if bytes(stored[at : at + SEARCHED_BYTES + len(MAGIC) - 1]).rfind(MAGIC) >= 0:
            return True
    return False


def _without_magic(buffer: Bytes) -> bytes:
    """Return `buffer` as a zlib stream that does not contain MAGIC.

    Most of it is stored in parts, which end within each MAGIC.
    """
    pieces = [b"\x78\x01"]
    checksum = 1
    for at in range(0, len(buffer), DIVIDED_BYTES):
        part = bytes(buffer[at : at + DIVIDED_BYTES])
        checksum = zlib.adler32(part, checksum)
        pieces.append(_EMPTY_PART)  # between bytes that would be MAGIC together
        made = _deflated(part) if part.count(MAGIC) > DIVISIONS_MAX else MAGIC
        pieces.append(_divided(part) if MAGIC in made else made)
    end = _LAST_PART + checksum.to_bytes(4, "big")
    if sum(map(len, pieces)) + len(end) == len(buffer):  # a reader would take it for the buffer itself
        pieces.append(_EMPTY_PART)
    return b"".join(pieces) + end


def _deflated(part: bytes) -> bytes:
    machine = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    return machine.compress(part) + machine.flush(zlib.Z_FULL_FLUSH)


def _divided(part: bytes) -> bytes:
    """Return the bytes `part` as stored parts of a zlib stream, of which none contains MAGIC."""
    pieces: list[bytes] = []
    begin = 0
    while begin < len(part):
        found = part.find(MAGIC, begin)
        end = len(part) if found < 0 else found + 1
        pieces += (struct.pack("<BHH", 0, end - begin, end - begin ^ 0xFFFF), part[begin:end])
        begin = end
    return b"".join(pieces)


def seal(laid: BlockPieces, crc32: Callable[[Bytes, int], int] = zlib.crc32) -> BlockPieces:
    """Return the complete block: add checksum and encoded header to `laid`, the result of `lay_out`.

    Pieces are joined, except memoryviews, which are not copied. `crc32` is that of zlib or a faster
    equivalent; it releases the interpreter lock, for which another thread may be waiting.
    """
    pieces: list[Bytes] = []
    crc = 0
    for apart, some in groupby(laid.pieces, lambda piece: isinstance(piece, memoryview)):
        if apart:
            pieces += some
        else:
            pieces.append(b"".join(some))
    for piece in pieces:
        crc = crc32(piece, crc)
    header = laid.header._replace(crc=crc)
    return BlockPieces(header, [encode_header(header), *pieces], laid.statistics)


def _compressed(buffer: Bytes, level: int) -> Bytes:
    """Return `buffer` compressed, or unchanged if that is not shorter.

    Readers recognize an uncompressed buffer by its equal sizes.
    """
    made = zlib.compress(buffer, level)
    return made if len(made) < len(buffer) else buffer


def decompressed(stored: Bytes, byte_count: int) -> bytes:
    """Decompress `stored` to `byte_count` bytes. Raises DamageError if the size differs.

    Never decompresses more than that, because a journal may come from an untrusted source.
    """
    if byte_count > min(EXPANDED_MAX * len(stored), BUFFER_BYTES_MAX):
        raise DamageError(f"a buffer of {len(stored)} bytes cannot be {byte_count}")
    machine = zlib.decompressobj()
    try:
        made = machine.decompress(stored, byte_count + 1)
    except zlib.error as error:
        raise DamageError(f"a compressed buffer is damaged: {error}") from None
    if len(made) != byte_count or not machine.eof:
        raise DamageError("a compressed buffer does not have the stated length")
    return made


def buffer_table(directory: bytes, count: int) -> list[tuple[int, int, int]]:
    """Return (offset, stored size, size) in bytes of each of the `count` buffers in a block's directory."""
    return list(_BUFFER.iter_unpack(directory[: count * _BUFFER.size]))


def mark_draft(shard: int, base: int, low_us: int) -> Draft:
    """Return a block without rows that records the low-water mark `low_us` (microseconds UTC).

    All messages received before that time are settled. `base` is the number of the shard's next row.
    """
    return Draft(Header(MARK, shard, 0, base, 0, low_us, low_us, 0, 0, 0, 0, low_us), b"", [b""])


def gap_draft(shard: int, base: int, rows: int, now_us: int, reason: bytes) -> Draft:
    """Return a block which records that `rows` rows from number `base` on were not written.

    `now_us` is the time in microseconds UTC. `reason` is an encoded JSON object.
    """
    return Draft(Header(GAP, shard, 0, base, rows, now_us, now_us, 0, 0, 0, 0), b"", [reason])

"""Files of a journal and the blocks in them: listing, checking, and searching for blocks behind damage.

The functions read headers and check CRCs; columns and rows are decoded in reader.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from os import SEEK_END
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from gateway.store.journal.format import (
    ALIGNMENT,
    HEADER_BYTES,
    LOOK_BYTES,
    MAGIC,
    Header,
    JournalError,
    decode_header,
)

try:  # zlib's takes ten times as long, more than everything else that is done with a few columns
    from isal.isal_zlib import crc32
except ImportError:  # a reader without the gateway's own dependencies
    from zlib import crc32

NAME: Final = re.compile(r"(\d{1,10})-(\d{20})(?:\.gwj|-(\d{20})\.parquet)")
"""Name of a segment's file: shard, number of its first row, in Parquet also that behind its last."""

LEVELS: Final = 2  # levels of folders below a journal's: a replica's, and a worker's in it
SEARCH_BYTES: Final = 1_048_576  # bytes read at once when searching for the next block


class Segment(NamedTuple):
    """File of a journal, either of blocks or in Parquet.

    `shard` is the shard's number, preceded by the names of the folders between the journal's folder and the
    file, each with a slash. `first` is the sequence number of the first row. `byte_count` is the size when
    the file was listed, and `inode` identifies the file. `next` is the number behind the last row of a
    segment in Parquet, and None for a file of blocks.
    """

    path: Path
    shard: str
    first: int
    byte_count: int
    inode: int = 0
    next: int | None = None


class BlockLocation(NamedTuple):
    """Location of a block: its file, its offset there in bytes, and its header."""

    path: Path
    offset: int
    header: Header

    @property
    def end(self) -> int:
        """Offset behind the block, in bytes."""
        return self.offset + self.header.byte_count


class Hole(NamedTuple):
    """Damaged or incomplete part of a file: the bytes from `offset` up to, not including, `end`."""

    path: Path
    offset: int
    end: int


def segment_name(shard: int, first: int) -> str:
    """Return the file name of the segment of a shard whose first row has number `first`."""
    return f"{shard}-{first:020}.gwj"


def parquet_name(shard: int, first: int, next_: int) -> str:
    """Return the file name of a segment in Parquet.

    It has the rows of a shard from number `first` up to, not including, `next_`.
    """
    return f"{shard}-{first:020}-{next_:020}.parquet"


def without_repeats(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments except those whose rows are also in a segment in Parquet.

    Both exist for a moment after a conversion. `segments` must be in the order of `segments_in`.
    """
    remaining: list[Segment] = []
    shard, reached = "", 0
    for segment in segments:
        if segment.shard != shard:
            shard, reached = segment.shard, 0
        if segment.first < reached:
            continue
        remaining.append(segment)
        reached = segment.next or 0
    return remaining


def segments_in(folder: Path, prefix: str = "") -> list[Segment]:
    """Return the segments of one folder, in order of shard and sequence number.

    `prefix` is put before the shards' numbers. A segment in Parquet precedes the segments whose rows it has.
    A folder on disk is listed until two listings agree, because a listing during a conversion may contain
    neither the Parquet file nor the segments that it replaces. In an object store both exist for a while, so
    one listing is enough.
    """
    before, found = None, _listed(folder, prefix)
    while found is None or (isinstance(folder, Path) and (before is None or before.keys() != found.keys())):
        before, found = found, _listed(folder, prefix)
    return sorted(found.values(), key=lambda one: (one.shard, one.first, one.next is None))


def _listed(folder: Path, prefix: str) -> dict[str, Segment] | None:
    """Return the segments of a folder by file name; None if a file was deleted during the listing.

    `prefix` is put before the shards' numbers.
    """
    found = {}
    for path in folder.iterdir():
        name = NAME.fullmatch(path.name)
        if name is None:
            continue
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        next_ = None if name[3] is None else int(name[3])
        shard = f"{prefix}{int(name[1])}"
        found[path.name] = Segment(path, shard, int(name[2]), stat.st_size, stat.st_ino, next_)
    return found


def segments_below(folder: Path, levels: int = LEVELS, prefix: str = "") -> list[Segment]:
    """Return the segments of a folder and of the folders below it, down to `levels` levels.

    `prefix` and the names of the folders below, with slashes, are put before the shards' numbers.
    """
    found = segments_in(folder, prefix)
    for below in sorted(folder.iterdir()) if levels else ():
        if NAME.fullmatch(below.name) is None and below.is_dir():
            found += segments_below(below, levels - 1, f"{prefix}{below.name}/")
    return found


def size_of(file: BinaryIO) -> int:
    """Return the present size of an open file in bytes. Moves the file's position to its end."""
    return file.seek(0, SEEK_END)


def walk(file: BinaryIO, path: Path, offset: int = 0) -> Iterator[BlockLocation | Hole]:
    """Yield the blocks of a file from `offset` on, and a Hole for each damaged part before a block.

    Only the headers are read. An incomplete block at the end of the file is not yielded. `file` must be
    unbuffered; `path` is its path. Raises JournalError if a block has another version of the format.
    """
    while True:
        at = block_at(file, path, offset)
        if at is None:
            following = _next_block(file, path, offset + ALIGNMENT)
            if following is None:
                return
            at = block_at(file, path, offset)
            if at is None:  # otherwise a live writer completed it, and wrote on, during the search
                yield Hole(path, offset, following.offset)
                at = following
        yield at
        offset = at.end


def block_at(file: BinaryIO, path: Path, offset: int) -> BlockLocation | None:
    """Return the location of the block at `offset`, or None if there is no complete block.

    The content is not checked. Raises JournalError if the block has another version of the format.
    """
    file.seek(offset)
    try:
        header = decode_header(file.read(LOOK_BYTES))
    except JournalError as error:
        raise JournalError(f"{path}: {error}") from error
    if header is None or header.byte_count < LOOK_BYTES:
        return None
    return BlockLocation(path, offset, header) if offset + header.byte_count <= size_of(file) else None


def content_of(file: BinaryIO, at: BlockLocation) -> bytes | None:
    """Return the bytes of the whole block at `at`, or None if its content is incomplete or damaged."""
    file.seek(at.offset)
    data = file.read(at.header.byte_count)
    if len(data) < at.header.byte_count:
        return None
    return data if crc32(memoryview(data)[HEADER_BYTES:]) == at.header.crc else None


def _next_block(file: BinaryIO, path: Path, offset: int) -> BlockLocation | None:
    """Search from `offset` on for a block with undamaged header and content. Return None without one."""
    while True:
        file.seek(offset)
        chunk = file.read(SEARCH_BYTES)
        place = chunk.find(MAGIC)
        while place >= 0:
            if (offset + place) % ALIGNMENT == 0:
                at = block_at(file, path, offset + place)
                if at is not None and content_of(file, at) is not None:
                    return at
            place = chunk.find(MAGIC, place + 1)
        if len(chunk) < SEARCH_BYTES:
            return None
        offset += SEARCH_BYTES - ALIGNMENT  # the magic may cross two chunks

"""Dictionary of texts that rows of a block refer to by number, and functions for buffers of texts.

A dictionary persists from block to block, so that repeated traffic finds its numbers (and the dictionary's
bytes) ready. It is cleared when most of it is unused or when it becomes too large.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

# Of a dictionary, which must be limited because peers choose addresses and properties.
ENTRIES_MAX: Final = 65_536
ENTRIES_BYTES_MAX: Final = 4 * 1_048_576
EVEN_BYTES_MAX: Final = 4_096  # bytes of a value for which offsets are cached
NUMBER: Final = struct.Struct("<I").pack


def bytes_of(text: str) -> bytes:
    """Encode any text as valid UTF-8; a lone surrogate is replaced by its escape sequence."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def bitmap(present: Sequence[int]) -> bytes:
    """Return a validity buffer with one bit for each 0 or 1 in `present`, least significant bit first."""
    digits = bytes(present).translate(_DIGITS)
    return int(digits[::-1], 2).to_bytes((len(digits) + 7) // 8, "little")


_DIGITS: Final = b"01" + bytes(254)


class BlockDictionary:
    """Dictionary to whose entries the rows of a block refer by index.

    An entry has one text for each column of the dictionary.
    """

    __slots__ = ("_buffers", "_byte_count", "_stale", "_texts", "_were")

    def __init__(self, columns: int) -> None:
        self._texts: list[list[bytes]] = [[] for _ in range(columns)]
        self._buffers: list[bytes] | None = None
        self._byte_count = 0
        self._stale = False
        self._were = 0

    def __len__(self) -> int:
        return len(self._texts[0])

    def add_all(self, entries: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Add entries to the dictionary, and return their indices as four bytes each.

        Each entry is a sequence with one text for each column.
        """
        first = len(self._texts[0])
        for column, texts in zip(self._texts, zip(*entries, strict=True), strict=True):
            column += texts
            self._byte_count += sum(map(len, texts))
        self._buffers = None
        count = len(entries)
        numbers = struct.pack(f"<{count}I", *range(first, first + count))
        return [numbers[at : at + 4] for at in range(0, 4 * count, 4)]

    def begin(self, rows: int) -> bool:
        """Begin a block of `rows` rows. Return True if the dictionary was cleared.

        It is cleared if most of its entries are unused, or if they are too many or too large. Indices that
        were returned before are then invalid.
        """
        count = len(self)
        afresh = (
            self._stale
            or count > 2 * rows + 64
            or count > ENTRIES_MAX
            or self._byte_count > ENTRIES_BYTES_MAX
        )
        if afresh:
            for column in self._texts:
                column.clear()
            self._buffers = None
            self._byte_count = 0
        self._were = len(self)
        return afresh

    def end(self, rows: int) -> list[bytes]:
        """End a block of `rows` rows. Return the offsets and the joined texts of each column, in turn."""
        # Most entries are new beside old ones: traffic that does not repeat itself.
        self._stale = self._were > 0 and len(self) - self._were > rows // 2
        if self._buffers is None:
            self._buffers = []
            for column in self._texts:
                self._buffers += (offsets(list(map(len, column))), b"".join(column))
        return self._buffers


def offsets(sizes: list[int]) -> bytes:
    """Return the buffer of offsets of joined values with these sizes (bytes).

    It has one int32 more than there are values.
    """
    count = len(sizes)
    if sizes.count(sizes[0]) == count:
        return even_offsets(sizes[0], count)
    return struct.pack(f"<{count + 1}i", *accumulate(sizes, initial=0))


def even_offsets(size: int, count: int) -> bytes:
    """Return the buffer of offsets of `count` joined values that all have `size` bytes.

    It has one int32 more than there are values. Small buffers are cached.
    """
    if size > EVEN_BYTES_MAX:
        return struct.pack(f"<{count + 1}i", *range(0, size * count + 1, size))
    return _even_offsets(size, 1 << count.bit_length())[: 4 * count + 4]


@lru_cache(maxsize=16)
def _even_offsets(size: int, count: int) -> bytes:
    return struct.pack(f"<{count + 1}i", *(size * place for place in range(count + 1)))

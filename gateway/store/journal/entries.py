"""A dictionary of a block, and the buffers that its texts make.

It lives on from block to block, so that traffic which repeats itself finds its numbers (and the dictionary's
octets) ready.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

ENTRIES_MAX: Final = 65_536  # of a dictionary; peers choose addresses and properties, so it has to end
ENTRIES_OCTETS_MAX: Final = 4 * 1_048_576
EVEN_OCTETS_MAX: Final = 4_096  # of a value, for offsets that are remembered
NUMBER: Final = struct.Struct("<I").pack


def octets_of(text: str) -> bytes:
    """Valid UTF-8 of any text; a lone surrogate, which has none, becomes its escape."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def bitmap(present: Sequence[int]) -> bytes:
    """A validity buffer: a bit for each element (0 or 1), least significant first."""
    digits = bytes(present).translate(_DIGITS)
    return int(digits[::-1], 2).to_bytes((len(digits) + 7) // 8, "little")


_DIGITS: Final = b"01" + bytes(254)


class Entries:
    """A dictionary of the block: for each entry its texts, one for each column that uses it."""

    __slots__ = ("_buffers", "_octets", "_stale", "_texts", "_were")

    def __init__(self, columns: int) -> None:
        self._texts: list[list[bytes]] = [[] for _ in range(columns)]
        self._buffers: list[bytes] | None = None
        self._octets = 0
        self._stale = False
        self._were = 0

    def __len__(self) -> int:
        return len(self._texts[0])

    def add_all(self, entries: Sequence[Sequence[bytes]]) -> list[bytes]:
        """New entries; returns their numbers."""
        first = len(self._texts[0])
        for column, texts in zip(self._texts, zip(*entries, strict=True), strict=True):
            column += texts
            self._octets += sum(map(len, texts))
        self._buffers = None
        count = len(entries)
        numbers = struct.pack(f"<{count}I", *range(first, first + count))
        return [numbers[at : at + 4] for at in range(0, 4 * count, 4)]

    def begin(self, rows: int) -> bool:
        """A block of `rows` begins. True: start afresh, for most of what is here is not in use."""
        count = len(self)
        afresh = (
            self._stale or count > 2 * rows + 64 or count > ENTRIES_MAX or self._octets > ENTRIES_OCTETS_MAX
        )
        if afresh:
            for column in self._texts:
                column.clear()
            self._buffers = None
            self._octets = 0
        self._were = len(self)
        return afresh

    def end(self, rows: int) -> list[bytes]:
        """The buffers, when all rows of the block have their numbers."""
        # Entries that were mostly new beside old ones: traffic that does not repeat itself.
        self._stale = self._were > 0 and len(self) - self._were > rows // 2
        if self._buffers is None:
            self._buffers = []
            for column in self._texts:
                self._buffers += (offsets(list(map(len, column))), b"".join(column))
        return self._buffers


def offsets(sizes: list[int]) -> bytes:
    """The offsets of values of these sizes: int32, one more than there are values."""
    count = len(sizes)
    if sizes.count(sizes[0]) == count:
        return even_offsets(sizes[0], count)
    return struct.pack(f"<{count + 1}i", *accumulate(sizes, initial=0))


def even_offsets(size: int, count: int) -> bytes:
    """The offsets of `count` values of one size; devices send bodies of a few sizes for ever."""
    if size > EVEN_OCTETS_MAX:
        return struct.pack(f"<{count + 1}i", *range(0, size * count + 1, size))
    return _even_offsets(size, 1 << count.bit_length())[: 4 * count + 4]


@lru_cache(maxsize=16)
def _even_offsets(size: int, count: int) -> bytes:
    return struct.pack(f"<{count + 1}i", *(size * place for place in range(count + 1)))

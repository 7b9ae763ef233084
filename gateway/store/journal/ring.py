"""Memory in which blocks wait for the disk, used again and again.

Memory that is allocated for each block and freed by the thread goes back to the system, and the next block
pays for it with a page fault for every 4 KiB: as much as it costs to make the block.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.store.journal.format import Octets


class Ring:
    """One thread at a time puts blocks in, another frees them in the same order."""

    __slots__ = ("_freed", "_memory", "_octets", "_put")

    def __init__(self, octets: int) -> None:
        self._memory = memoryview(bytearray(octets))
        self._octets = octets
        self._put = 0  # octets ever, with those left out at the end
        self._freed = 0

    def put(self, pieces: Sequence[Octets], octets: int) -> tuple[memoryview, int]:
        """The pieces, `octets` in all, one behind the other; and the place to free when they are not needed
        any more. When the ring is full they are in memory of their own.
        """
        begin = self._put % self._octets
        left_out = self._octets - begin if begin + octets > self._octets else 0
        end = self._put + left_out + octets
        if end - self._freed > self._octets:
            return memoryview(bytearray().join(pieces)), self._put
        view = self._memory[(begin + left_out) % self._octets :][:octets]
        at = 0
        for piece in pieces:
            behind = at + len(piece)
            view[at:behind] = piece
            at = behind
        self._put = end
        return view, end

    def free(self, place: int) -> None:
        """What was put before `place` is not needed any more."""
        self._freed = place

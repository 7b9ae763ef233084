"""Which messages of QoS 2 have come already.

A replica that has lost its connection sends again what was not confirmed, ten thousand messages if it had as
many on their way, and the cluster gives back to a replica what that had not acknowledged. Both repeat some of
the last messages of a life, so these are remembered. What is older than that is taken: it is better twice
than not at all.

A number is a bit of a chunk of 64, and a chunk is sixteen octets. Who gets all that a life publishes needs
few chunks for many numbers; who gets a message of it now and then has a chunk for each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.engine.envelope import Number

LIVES_MAX: Final = 64  # of more, the one that was heard of longest ago is forgotten
RECENT_LIVES_MAX: Final = 32  # lives that a session remembers: of all replicas, and of some that were lost
CHUNK_BITS: Final = 6  # of a number say which bit of its chunk it is
CHUNK: Final = 1 << CHUNK_BITS
Chunk = tuple[bytes, int]
"""A life, and the numbers of a chunk divided by 64."""


class Seen:
    """Numbers of one life."""

    __slots__ = ("_bits", "_chunks")

    def __init__(self, chunks: Iterable[tuple[int, int]] = ()) -> None:
        """`chunks`: in order, each with its bits."""
        pairs = list(chunks)
        self._chunks = array("Q", [chunk for chunk, _ in pairs])  # in order
        self._bits = array("Q", [bits for _, bits in pairs])

    def __len__(self) -> int:
        """Chunks."""
        return len(self._chunks)

    def __contains__(self, count: int) -> bool:
        chunk = count >> CHUNK_BITS
        at = bisect_left(self._chunks, chunk)
        there = at < len(self._chunks) and self._chunks[at] == chunk
        return there and self._bits[at] >> (count & CHUNK - 1) & 1 == 1

    def add(self, count: int) -> bool:
        """Note the number; False: it is there already."""
        chunks, chunk, bit = self._chunks, count >> CHUNK_BITS, 1 << (count & CHUNK - 1)
        at = len(chunks)
        if at and chunks[-1] >= chunk:  # else it is the highest of all, as most are
            at = bisect_left(chunks, chunk)
        if at == len(chunks) or chunks[at] != chunk:
            chunks.insert(at, chunk)
            self._bits.insert(at, bit)
            return True
        if self._bits[at] & bit:
            return False
        self._bits[at] |= bit
        return True

    def forget_lowest(self) -> int:
        """Forget the chunk with the lowest numbers, and return it."""
        del self._bits[0]
        return self._chunks.pop(0)

    def bits_of(self, chunk: int) -> int:
        """Return the bits of a chunk, 0 if there is none."""
        at = bisect_left(self._chunks, chunk)
        return self._bits[at] if at < len(self._chunks) and self._chunks[at] == chunk else 0

    def chunks(self) -> dict[int, int]:
        """Return the bits of all chunks, in order."""
        return dict(zip(self._chunks, self._bits, strict=True))


class Once:
    """What has come of all lives that this replica hears of."""

    def __init__(self, numbers: int) -> None:
        """`numbers`: of each life that are remembered, at least, if they come in their order."""
        self._chunks_max = -(-numbers // CHUNK)
        self._lives: dict[bytes, Seen] = {}

    def is_first(self, number: Number) -> bool:
        """Note the number; False: it has come before."""
        life, count = number
        seen = self._lives.pop(life, None)
        if seen is None:
            if len(self._lives) >= LIVES_MAX:
                del self._lives[next(iter(self._lives))]
            seen = Seen()
        self._lives[life] = seen
        first = seen.add(count)
        if len(seen) > self._chunks_max:
            seen.forget_lowest()
        return first


class Recent:
    """The last messages of QoS 2 that the client of a session has had, those of each life by themselves.

    Who publishes at a replica that is lost, and publishes again at another one, does so among all that others
    publish meanwhile; of the lost one's life nothing comes any more, so it is still known what was had of it.
    The life of which most is remembered is the one that is cut.
    """

    __slots__ = ("_chunks", "_chunks_max", "_lives")

    def __init__(self, chunks_max: int, stored: Mapping[Chunk, int] | None = None) -> None:
        """`chunks_max`: of all lives together. `stored`: chunks with their bits, of an earlier owner."""
        self._chunks_max = chunks_max
        by_life: dict[bytes, dict[int, int]] = {}
        for (life, chunk), bits in sorted((stored or {}).items()):
            by_life.setdefault(life, {})[chunk] = bits
        self._lives = {life: Seen(chunks.items()) for life, chunks in by_life.items()}
        self._chunks = sum(map(len, self._lives.values()))

    def __contains__(self, number: Number) -> bool:
        life, count = number
        seen = self._lives.get(life)
        return seen is not None and count in seen

    def stored(self) -> dict[Chunk, int]:
        """Return all chunks with their bits."""
        return {
            (life, chunk): bits for life, seen in self._lives.items() for chunk, bits in seen.chunks().items()
        }

    def add(self, number: Number) -> dict[Chunk, int | None]:
        """Note that the client has a message. Return what has changed: chunks with their bits, None for one
        that is forgotten."""
        life, count = number
        changes: dict[Chunk, int | None] = {}
        seen = self._lives.pop(life, None)
        if seen is None:
            if len(self._lives) >= RECENT_LIVES_MAX:
                self._forget_life(next(iter(self._lives)), changes)
            seen = Seen()
        self._lives[life] = seen
        before, chunk = len(seen), count >> CHUNK_BITS
        seen.add(count)
        changes[life, chunk] = seen.bits_of(chunk)
        self._chunks += len(seen) - before
        while self._chunks > self._chunks_max:
            largest = max(self._lives, key=self._length)
            changes[largest, self._lives[largest].forget_lowest()] = None
            self._chunks -= 1
        return changes

    def _forget_life(self, life: bytes, changes: dict[Chunk, int | None]) -> None:
        chunks = self._lives.pop(life).chunks()
        self._chunks -= len(chunks)
        changes.update(dict.fromkeys((life, chunk) for chunk in chunks))

    def _length(self, life: bytes) -> int:
        return len(self._lives[life])


def recent_chunks(unconfirmed: int, unacknowledged: int) -> int:
    """How many chunks a session needs for what may come again: of a replica that had so many messages on
    their way, beside which it gave numbers to as many others, and of those that its own client was sent, a
    chunk for each."""
    return unacknowledged + -(-2 * unconfirmed // CHUNK)

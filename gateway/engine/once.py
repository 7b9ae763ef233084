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
from struct import Struct
from typing import Final

from gateway.engine.envelope import Number

LIVES_MAX: Final = 64  # of more, the one that was heard of longest ago is forgotten
RECENT_LIVES_MAX: Final = 32  # lives that a session remembers: of all replicas, and of some that were lost
CHUNK_BITS: Final = 6  # of a number say which bit of its chunk it is
CHUNK: Final = 1 << CHUNK_BITS
PAIR: Final = Struct("<QQ")
Lives = tuple[tuple[bytes, bytes], ...]
"""Lives, and of each in 16 octets a chunk: the numbers in it divided by 64, and its bits, little-endian."""


class Seen:
    """Numbers of one life."""

    __slots__ = ("_bits", "_chunks")

    def __init__(self, octets: bytes = b"") -> None:
        """`octets`: as `octets` returns them."""
        pairs = list(PAIR.iter_unpack(octets))
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

    def forget_lowest(self) -> None:
        """The chunk with the lowest numbers."""
        del self._chunks[0], self._bits[0]

    def octets(self) -> bytes:
        """All of it."""
        return b"".join(map(PAIR.pack, self._chunks, self._bits))


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

    def __init__(self, chunks_max: int, lives: Lives = ()) -> None:
        """`chunks_max`: of all lives; `lives`: as `lives` returns them."""
        self._chunks_max = chunks_max
        self._lives = {life: Seen(octets) for life, octets in lives}
        self._chunks = sum(map(len, self._lives.values()))
        self._cut()

    def __contains__(self, number: Number) -> bool:
        life, count = number
        seen = self._lives.get(life)
        return seen is not None and count in seen

    def lives(self) -> Lives:
        """All of it; the life that was heard of longest ago first."""
        return tuple((life, seen.octets()) for life, seen in self._lives.items())

    def copy(self) -> Recent:
        """Another one that remembers the same."""
        return Recent(self._chunks_max, self.lives())

    def add(self, number: Number) -> None:
        """The client has it."""
        life, count = number
        seen = self._lives.pop(life, None)
        if seen is None:
            if len(self._lives) >= RECENT_LIVES_MAX:
                self._chunks -= len(self._lives.pop(next(iter(self._lives))))
            seen = Seen()
        self._lives[life] = seen
        before = len(seen)
        seen.add(count)
        self._chunks += len(seen) - before
        self._cut()

    def _cut(self) -> None:
        while self._chunks > self._chunks_max:
            max(self._lives.values(), key=len).forget_lowest()
            self._chunks -= 1


def recent_chunks(unconfirmed: int, unacknowledged: int) -> int:
    """How many chunks a session needs for what may come again: of a replica that had so many messages on
    their way, beside which it gave numbers to as many others, and of those that its own client was sent, a
    chunk for each."""
    return unacknowledged + -(-2 * unconfirmed // CHUNK)

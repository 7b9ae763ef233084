"""Detection of repeated QoS 2 messages by their numbers.

A replica that has lost its connection resends unconfirmed messages, ten thousand if as many were in flight,
and the cluster requeues the messages that a replica had not acknowledged. Both repeat some of the last
messages of a replica process, so the last numbers of each process are remembered. A message with an older
number is accepted: a duplicate is better than a loss.

A number has two parts: the random id of the replica process that numbered the message, called `life`
(envelope.py), and a count. Counts are stored as bits of chunks of 64, and a chunk takes 16 bytes. A receiver
of all messages of a process needs few chunks for many numbers; a receiver of rare messages needs a chunk for
each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.engine.envelope import Number

LIVES_MAX: Final = 64  # remembered replica processes; beyond that, the least recently used is forgotten
RECENT_LIVES_MAX: Final = 32  # replica processes that a session remembers, some of them lost
CHUNK_BITS: Final = 6  # bits of a number that are the position in its chunk
CHUNK: Final = 1 << CHUNK_BITS
Chunk = tuple[bytes, int]
"""Id of a replica process, and number of a chunk: message numbers of the process divided by 64."""


class NumberSet:
    """Set of message numbers of one replica process, stored as bits in chunks of 64.

    A message number has the id of the process and a count; the set has the counts.
    """

    __slots__ = ("_bits", "_chunks")

    def __init__(self, chunks: Iterable[tuple[int, int]] = ()) -> None:
        """Create the set from `chunks`: pairs of chunk number and bits, in ascending order."""
        pairs = list(chunks)
        self._chunks = array("Q", [chunk for chunk, _ in pairs])  # in order
        self._bits = array("Q", [bits for _, bits in pairs])

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._chunks)

    def __contains__(self, count: int) -> bool:
        chunk = count >> CHUNK_BITS
        at = bisect_left(self._chunks, chunk)
        there = at < len(self._chunks) and self._chunks[at] == chunk
        return there and self._bits[at] >> (count & CHUNK - 1) & 1 == 1

    def add(self, count: int) -> bool:
        """Add a message number's count. Return False if it is in the set already."""
        chunks, chunk, bit = self._chunks, count >> CHUNK_BITS, 1 << (count & CHUNK - 1)
        at = len(chunks)
        if at and chunks[-1] >= chunk:  # else the chunk is higher than all others, as usual
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
        """Remove the chunk with the lowest counts. Return the chunk's number."""
        del self._bits[0]
        return self._chunks.pop(0)

    def bits_of(self, chunk: int) -> int:
        """Return the bits of the chunk with number `chunk`, 0 if it is not in the set."""
        at = bisect_left(self._chunks, chunk)
        return self._bits[at] if at < len(self._chunks) and self._chunks[at] == chunk else 0

    def chunks(self) -> dict[int, int]:
        """Return the bits of each chunk by its number, in ascending order."""
        return dict(zip(self._chunks, self._bits, strict=True))


class DuplicateFilter:
    """Filter for repeated QoS 2 messages: the last message numbers of each replica process that sends."""

    def __init__(self, numbers: int) -> None:
        """Create a filter that remembers the last `numbers` message numbers of each replica process.

        If numbers do not arrive in order, it may remember fewer.
        """
        self._chunks_max = -(-numbers // CHUNK)
        self._lives: dict[bytes, NumberSet] = {}

    def is_first(self, number: Number) -> bool:
        """Record the number of a message. Return False if it has arrived before."""
        life, count = number
        numbers = self._lives.pop(life, None)
        if numbers is None:
            if len(self._lives) >= LIVES_MAX:
                del self._lives[next(iter(self._lives))]
            numbers = NumberSet()
        self._lives[life] = numbers
        first = numbers.add(count)
        if len(numbers) > self._chunks_max:
            numbers.forget_lowest()
        return first


class RecentNumbers:
    """Numbers of the last QoS 2 messages that the client of a session has received, by replica process.

    Numbers are stored as bits in chunks of 64. When the memory is full, the oldest numbers of the process
    with the most chunks are removed. So the numbers of a process that has ended stay while other processes
    add more.
    """

    __slots__ = ("_chunks", "_chunks_max", "_lives")

    def __init__(self, chunks_max: int, stored: Mapping[Chunk, int] | None = None) -> None:
        """Create a memory of at most `chunks_max` chunks for all replica processes together.

        `stored` has the bits of the chunks that an earlier owner of the session has stored.
        """
        self._chunks_max = chunks_max
        by_life: dict[bytes, dict[int, int]] = {}
        for (life, chunk), bits in sorted((stored or {}).items()):
            by_life.setdefault(life, {})[chunk] = bits
        self._lives = {life: NumberSet(chunks.items()) for life, chunks in by_life.items()}
        self._chunks = sum(map(len, self._lives.values()))

    def __contains__(self, number: Number) -> bool:
        life, count = number
        numbers = self._lives.get(life)
        return numbers is not None and count in numbers

    def stored(self) -> dict[Chunk, int]:
        """Return the bits of all chunks of message numbers, by replica process and chunk number."""
        return {
            (life, chunk): bits for life, seen in self._lives.items() for chunk, bits in seen.chunks().items()
        }

    def add(self, number: Number) -> dict[Chunk, int | None]:
        """Record the number of a message that the client has received.

        Return the changed chunks with their bits; the value is None for a chunk that was removed.
        """
        life, count = number
        changes: dict[Chunk, int | None] = {}
        numbers = self._lives.pop(life, None)
        if numbers is None:
            if len(self._lives) >= RECENT_LIVES_MAX:
                self._forget_incarnation(next(iter(self._lives)), changes)
            numbers = NumberSet()
        self._lives[life] = numbers
        before, chunk = len(numbers), count >> CHUNK_BITS
        numbers.add(count)
        changes[life, chunk] = numbers.bits_of(chunk)
        self._chunks += len(numbers) - before
        while self._chunks > self._chunks_max:
            largest = max(self._lives, key=self._length)
            changes[largest, self._lives[largest].forget_lowest()] = None
            self._chunks -= 1
        return changes

    def _forget_incarnation(self, life: bytes, changes: dict[Chunk, int | None]) -> None:
        chunks = self._lives.pop(life).chunks()
        self._chunks -= len(chunks)
        changes.update(dict.fromkeys((life, chunk) for chunk in chunks))

    def _length(self, life: bytes) -> int:
        return len(self._lives[life])


def recent_chunks(unconfirmed: int, unacknowledged: int) -> int:
    """Return the number of chunks (of 64 message numbers) that a session needs to recognize duplicates.

    It needs chunks for the `unconfirmed` messages of a lost replica, among as many others that the replica
    numbered meanwhile, and one for each of the `unacknowledged` messages that were sent to the client.
    """
    return unacknowledged + -(-2 * unconfirmed // CHUNK)

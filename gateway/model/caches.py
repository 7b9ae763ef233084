"""Memory of what has been worked out: room in a dictionary, and what is worth a place in one.

Emptied whole, a full dictionary would be as if everything came for the first time, again and again where
there is more than it may hold. So those that were put in first go, some at a time: that costs nothing that
could be measured.

Where each message says something new, nothing that is kept comes again: what goes to make room for it, and
the memory that all of it takes, which has left the processor's caches when it is given back, cost several
times what working it out does. So what has come once waits among a few others that are new, all of which go
when there are too many, and only what comes again meanwhile is kept.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
PART: Final = 16  # of what is remembered; a sixteenth goes at once
NEW_MAX: Final = 512  # octets that came once: about as many as one turn brings


def make_room(cache: dict[K, V], most: int) -> None:
    """Before something is put in: it will then remember `most` at the most."""
    if len(cache) >= most:
        for key in list(islice(cache, max(len(cache) - most + 1, most // PART))):
            del cache[key]


class Recurring(Generic[V]):
    """What has been worked out of octets: of up to `most` that have come twice, and of a few that are new.

    That something has come is known by a mark, an octet out of its hash, until something else takes the
    place. One of 256 that is new finds its own mark there, and is kept for nothing.
    """

    __slots__ = ("_known", "_marks", "_mask", "_most", "_new")

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[bytes, V] = {}
        self._new: dict[bytes, V] = {}
        self._mask = (2 << most.bit_length()) - 1
        self._marks = bytearray(self._mask + 1)

    def __len__(self) -> int:
        return len(self._known) + len(self._new)

    def get(self, octets: bytes) -> V | None:
        """What was worked out of these octets; None: it has to be, perhaps again."""
        found = self._known.get(octets)
        return self._new.get(octets) if found is None else found

    def put(self, octets: bytes, found: V) -> None:
        """This was worked out. It stays for at least as long as nothing else is."""
        number = hash(octets)
        place, mark = number & self._mask, number >> 40 & 0xFF or 1
        if self._marks[place] == mark:
            if len(self._known) >= self._most:
                make_room(self._known, self._most)
            self._known[octets] = found
            return
        self._marks[place] = mark
        if len(self._new) >= NEW_MAX:
            self._new.clear()
        self._new[octets] = found

    def clear(self) -> None:
        """Nothing is known any more."""
        self._known.clear()
        self._new.clear()

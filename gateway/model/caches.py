"""Memory of what has been worked out: room in a dictionary, and what is worth a place in one.

Emptied whole, a full dictionary would be as if everything came for the first time, again and again where
there is more than it may hold. So those that were put in first go, some at a time: that costs nothing that
could be measured.

Where each message says something new, nothing that is kept comes again: what goes to make room for it, and
the memory that all of it takes, which has left the processor's caches when it is given back, cost several
times what working it out does. So of what is not known only every eighth is kept, and the others go
when a few more have come.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
PART: Final = 16  # of what is remembered; a sixteenth goes at once
NEW_MAX: Final = 128  # octets that are not kept: as many as one turn brings
KEPT_OF: Final = 8


def make_room(cache: dict[K, V], most: int) -> None:
    """Before something is put in: it will then remember `most` at the most."""
    if len(cache) >= most:
        for key in list(islice(cache, max(len(cache) - most + 1, most // PART))):
            del cache[key]


class Recurring(Generic[V]):
    """What has been worked out of octets: of `most` that are kept, and of the last ones besides, of which
    there are 2 NEW_MAX at the most.

    What comes again and again is soon among the ones that are kept, for it is put in each time. These are
    `known`, which is asked first where each message asks.
    """

    __slots__ = ("_before", "_count", "_most", "_new", "known")

    def __init__(self, most: int) -> None:
        self._most = most
        self.known: dict[bytes, V] = {}
        self._new: dict[bytes, V] = {}
        self._before: dict[bytes, V] = {}  # those that were new, until as many had come behind them
        self._count = 0

    def __len__(self) -> int:
        return len(self.known) + len(self._new) + len(self._before)

    def get(self, octets: bytes) -> V | None:
        """What was worked out of these octets; None: it has to be, perhaps again."""
        found = self.known.get(octets)
        if found is None:
            found = self._new.get(octets)
            if found is None:
                found = self._before.get(octets)
        return found

    def put(self, octets: bytes, found: V) -> None:
        """This was worked out. It stays for at least as long as NEW_MAX others are not."""
        self._count = (self._count + 1) % KEPT_OF
        if not self._count:
            if len(self.known) >= self._most:
                make_room(self.known, self._most)
            self.known[octets] = found
            return
        if len(self._new) >= NEW_MAX:
            self._before = self._new
            self._new = {}
        self._new[octets] = found

    def clear(self) -> None:
        """Nothing is known any more."""
        self.known.clear()
        self._new.clear()
        self._before.clear()

"""Caches of computed results: eviction from a full dictionary, and a cache that admits only recurring keys.

Clearing a full dictionary would mean computing everything again, repeatedly where there are more keys than it
may hold. So `make_room` evicts the oldest entries, a sixteenth at a time, at no measurable cost.

Where each message brings a new key, no cached entry is ever used again. Evicting entries, and freeing their
memory, which has left the processor's caches by then, cost several times what computing a result does. So
`Recurring` stores only every eighth new result, and drops the others after a few more have arrived.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
PART: Final = 16  # one entry in this many is evicted at once
NEW_MAX: Final = 128  # entries in one generation of new results: about as many as one pass brings
KEPT_OF: Final = 8


def make_room(cache: dict[K, V], most: int) -> None:
    """Remove the oldest entries of a full cache, to add one more entry without exceeding `most` entries.

    At least `most` // PART entries are removed. A cache with fewer than `most` entries is not changed.
    """
    if len(cache) >= most:
        for key in list(islice(cache, max(len(cache) - most + 1, most // PART))):
            del cache[key]


class Recurring(Generic[V]):
    """Cache of results that are computed from bytes (the keys), where only some keys occur more than once.

    `cached` is a dictionary of at most `most` results, which callers on the message path read directly. Every
    KEPT_OF-th new result is stored there, so that a frequent key is soon included; the oldest results are
    evicted. Other new results are dropped once at most 2 * NEW_MAX newer ones have been added.
    """

    __slots__ = ("_before", "_count", "_most", "_new", "cached")

    def __init__(self, most: int) -> None:
        self._most = most
        self.cached: dict[bytes, V] = {}
        self._new: dict[bytes, V] = {}
        self._before: dict[bytes, V] = {}  # previous generation of new results
        self._count = 0

    def __len__(self) -> int:
        return len(self.cached) + len(self._new) + len(self._before)

    def get(self, data: bytes) -> V | None:
        """Return the cached result for `data`, or None if it is not cached."""
        found = self.cached.get(data)
        if found is None:
            found = self._new.get(data)
            if found is None:
                found = self._before.get(data)
        return found

    def put(self, data: bytes, found: V) -> None:
        """Store `found`, the result computed from `data`.

        Every KEPT_OF-th result is stored in `cached`, the others only until at most 2 * NEW_MAX newer ones
        have been added.
        """
        self._count = (self._count + 1) % KEPT_OF
        if not self._count:
            if len(self.cached) >= self._most:
                make_room(self.cached, self._most)
            self.cached[data] = found
            return
        if len(self._new) >= NEW_MAX:
            self._before = self._new
            self._new = {}
        self._new[data] = found

    def clear(self) -> None:
        """Remove all results."""
        self.cached.clear()
        self._new.clear()
        self._before.clear()

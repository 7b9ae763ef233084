"""Sessions of disconnected clients, grouped by holder, in the order in which they expire.

A holder is a user at an address. At a limit the holder with most disconnected sessions loses the one that
would expire first, so a user who fills the table, with however long an expiry, displaces only its own
sessions.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from gateway.broker.mqtt.session import Session
from gateway.broker.shares import Shares

SLACK: Final = 64  # outdated entries that may be in a heap, in addition to as many as are valid

EvictionEntry = tuple[float, int, Session]


class DisconnectedSessions:
    """Sessions of disconnected clients, ordered by expiry for each holder (user and client address).

    When a session is resumed, its heap entry stays until it reaches the top of the heap.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._entries: dict[Session, tuple[str, int]] = {}  # holder, number
        self._heaps: dict[str, list[EvictionEntry]] = {}
        self._holders = Shares()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, session: Session) -> None:
        """Add a session whose client has disconnected.

        Its `expires_at` is set already.
        """
        self.remove(session)
        holder = _holder(session.user, session.place)
        number = next(self._numbers)
        self._entries[session] = (holder, number)
        self._holders.add(holder)
        heap = self._heaps.setdefault(holder, [])
        heappush(heap, (session.expires_at, number, session))

    def remove(self, session: Session) -> None:
        """Remove a session that was resumed or has ended."""
        holder, _ = self._entries.pop(session, ("", 0))
        if not holder:
            return
        self._holders.remove(holder)
        remaining = self._holders[holder]
        heap = self._heaps[holder]
        if not remaining:
            del self._heaps[holder]
        elif len(heap) > 2 * remaining + SLACK:
            heap[:] = [entry for entry in heap if self._valid(entry)]
            heapify(heap)

    def session_to_evict(self, user: str | None = None, place: str | None = None) -> Session | None:
        """Return the session that expires first, of the user and address with most disconnected sessions.

        With `user` or `place` (a client address), only sessions of this user or from this address are
        considered. Return None if there is none.
        """
        largest = self._holders.largest
        # Rare: the largest holder is mostly the one that fills the table.
        if largest is not None and not _is_holder(largest, user, place):
            fitting = (one for one in self._heaps if _is_holder(one, user, place))
            largest = max(fitting, key=self._holders.__getitem__, default=None)
        return self._first(largest)

    def _first(self, holder: str | None) -> Session | None:
        heap = [] if holder is None else self._heaps.get(holder, [])
        while heap and not self._valid(heap[0]):
            heappop(heap)
        return heap[0][2] if heap else None

    def _valid(self, entry: EvictionEntry) -> bool:
        _, number, session = entry
        return self._entries.get(session, ("", -1))[1] == number


def _holder(user: str, place: str) -> str:
    return f"{place}\0{user}"  # no address contains U+0000


def _is_holder(holder: str, user: str | None, place: str | None) -> bool:
    its_place, _, its_user = holder.partition("\0")
    return user in (None, its_user) and place in (None, its_place)

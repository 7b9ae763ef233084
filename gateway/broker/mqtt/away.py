"""Sessions whose client is away, by who holds them, each holder's in the order in which they expire.

A holder is a user at a place. At a limit the one that has most sessions waiting loses the one that would
expire first: whoever fills the table, with however long an expiry, fills it with his own.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from gateway.broker.mqtt.session import Session
from gateway.broker.shares import Shares

SLACK: Final = 64  # entries of a heap that may be out of date, besides as many as are not

Absence = tuple[float, int, Session]


class Away:
    """When each session expires, and whose it is. What has come back stays in its heap until it is met."""

    def __init__(self) -> None:
        self._numbers = count()
        self._entries: dict[Session, tuple[str, int]] = {}  # holder, number
        self._heaps: dict[str, list[Absence]] = {}
        self._holders = Shares()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, session: Session) -> None:
        """Its client has gone; `expires_at` says until when it is kept."""
        self.remove(session)
        holder = _holder(session.user, session.place)
        number = next(self._numbers)
        self._entries[session] = (holder, number)
        self._holders.add(holder)
        heap = self._heaps.setdefault(holder, [])
        heappush(heap, (session.expires_at, number, session))

    def remove(self, session: Session) -> None:
        """Its client has come back, or it has ended."""
        holder, _ = self._entries.pop(session, ("", 0))
        if not holder:
            return
        self._holders.remove(holder)
        left = self._holders[holder]
        heap = self._heaps[holder]
        if not left:
            del self._heaps[holder]
        elif len(heap) > 2 * left + SLACK:
            heap[:] = [entry for entry in heap if self._valid(entry)]
            heapify(heap)

    def soonest(self, user: str | None = None, place: str | None = None) -> Session | None:
        """Of the holder with most, the session that expires first; among those of a user or a place only."""
        largest = self._holders.largest
        if largest is not None and not _fits(largest, user, place):  # seldom: it is who fills the table
            fitting = (one for one in self._heaps if _fits(one, user, place))
            largest = max(fitting, key=self._holders.__getitem__, default=None)
        return self._first(largest)

    def _first(self, holder: str | None) -> Session | None:
        heap = [] if holder is None else self._heaps.get(holder, [])
        while heap and not self._valid(heap[0]):
            heappop(heap)
        return heap[0][2] if heap else None

    def _valid(self, entry: Absence) -> bool:
        _, number, session = entry
        return self._entries.get(session, ("", -1))[1] == number


def _holder(user: str, place: str) -> str:
    return f"{place}\0{user}"  # no place holds U+0000


def _fits(holder: str, user: str | None, place: str | None) -> bool:
    its_place, _, its_user = holder.partition("\0")
    return user in (None, its_user) and place in (None, its_place)

"""Approximate arrival times of the messages in an outbox.

Now and then the position of a message that arrives is recorded with the time, as a *mark*. The messages from
there to the next mark arrived at that time or later. Thus the age of messages costs nothing per message and
survives a restart.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import Final

from gateway.model.times import WallTime
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

KIND: Final = "outbox-mark"  # the kind of record in the store
RECORD_SECS: Final = 1.0
RECORDS_MAX: Final = 2_000


class ArrivalTimes:
    """Times at which messages of one outbox arrived, in memory and in the store.

    Not every time is recorded: a *mark* is the position of a message and its time of arrival in POSIX
    seconds.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.interval = RECORD_SECS
        self._store = store
        self._name = name
        self._marks: deque[tuple[int, WallTime]] = deque()

    @staticmethod
    def load(store: Store) -> dict[str, list[tuple[int, WallTime]]]:
        """Return the stored marks of all outboxes as (position, POSIX seconds), by outbox name.

        Only valid before the store starts.
        """
        found: dict[str, list[tuple[int, WallTime]]] = {}
        for key, value in store.records(KIND):
            assert isinstance(key, str)
            assert isinstance(value, bytes)
            with contain_failure(KIND, key):
                name, _, position = key.partition(" ")
                came = store.timeline.restored(struct.unpack(">d", value)[0])
                found.setdefault(name, []).append((int(position), came))
        return found

    def recover(self, marks: Iterable[tuple[int, WallTime]], first: int, end: int, utc: WallTime) -> None:
        """Restore the marks that concern messages at positions from `first` to before `end`; delete others.

        A mark later than `utc` (POSIX seconds) was made by a wrong clock and is set to `utc`, the latest
        possible time.
        """
        for position, came in sorted(marks):
            if position < end:
                self._marks.append((position, min(came, utc)))
            else:
                self._store.delete(KIND, self._key(position))
        self.forget_before(first)

    def note(self, position: int, utc: WallTime) -> None:
        """Record that the message at `position` arrives at `utc` (POSIX seconds), as a mark.

        Does nothing if the last mark is less than `interval` seconds old.
        """
        if self._marks and utc - self._marks[-1][1] < self.interval:
            return
        self._marks.append((position, utc))
        self._store.put(KIND, self._key(position), struct.pack(">d", self._store.timeline.stored(utc)))
        if len(self._marks) > RECORDS_MAX:
            self._thin()

    def _thin(self) -> None:
        """Delete every second mark and double the interval, so that the number of marks stays limited."""
        self.interval *= 2
        marks = list(self._marks)
        self._marks = deque(marks[::2])
        for position, _ in marks[1::2]:
            self._store.delete(KIND, self._key(position))

    def forget_before(self, position: int) -> None:
        """Delete marks that only concern messages at positions before `position`."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= position:
            self._store.delete(KIND, self._key(marks.popleft()[0]))

    def clear(self) -> None:
        """Delete all marks, because the outbox is empty."""
        for position, _ in self._marks:
            self._store.delete(KIND, self._key(position))
        self._marks.clear()

    def time_of(self, position: int) -> WallTime | None:
        """Return the arrival time of the message at `position` (POSIX seconds); None if it is unknown.

        The result may be up to `interval` seconds too early.
        """
        found = None
        for first, utc in self._marks:
            if first > position:
                break
            found = utc
        return found

    def _key(self, position: int) -> str:
        return f"{self._name} {position:020d}"

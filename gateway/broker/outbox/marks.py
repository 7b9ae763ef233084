"""When the messages of an outbox came, about.

Now and then the position of the next message is noted with the time; what follows came then or later, up to
the next mark. So ages cost nothing per message, and are known after a restart.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import Final

from gateway.model.times import WallTime
from gateway.store.restoring import set_aside
from gateway.store.store import Store

MARKS: Final = "outbox-mark"  # the kind of thing in the store
MARK_SECS: Final = 1.0
MARKS_MAX: Final = 2_000


class Marks:
    """The marks of one outbox, (position, UTC seconds), in memory and in the store."""

    def __init__(self, store: Store, name: str) -> None:
        self.interval = MARK_SECS
        self._store = store
        self._name = name
        self._marks: deque[tuple[int, WallTime]] = deque()

    @staticmethod
    def load(store: Store) -> dict[str, list[tuple[int, WallTime]]]:
        """All marks in the store, by the outbox's name. Before the store starts."""
        found: dict[str, list[tuple[int, WallTime]]] = {}
        for key, value in store.things(MARKS):
            assert isinstance(key, str)
            assert isinstance(value, bytes)
            with set_aside(MARKS, key):
                name, _, position = key.partition(" ")
                found.setdefault(name, []).append((int(position), WallTime(struct.unpack(">d", value)[0])))
        return found

    def recover(self, marks: Iterable[tuple[int, WallTime]], first: int, end: int, utc: WallTime) -> None:
        """Take those found in the store that are of messages from `first` to before `end`.

        A mark that is later than `utc` was made by a clock that was wrong: its messages came now at the
        latest.
        """
        for position, came in sorted(marks):
            if position < end:
                self._marks.append((position, min(came, utc)))
            else:
                self._store.delete(MARKS, self._key(position))
        self.forget_before(first)

    def note(self, position: int, utc: WallTime) -> None:
        """The message at `position` came now."""
        if self._marks and utc - self._marks[-1][1] < self.interval:
            return
        self._marks.append((position, utc))
        self._store.put(MARKS, self._key(position), struct.pack(">d", utc))
        if len(self._marks) > MARKS_MAX:
            self._thin()

    def _thin(self) -> None:
        """Times become less exact, rather than ever more of them."""
        self.interval *= 2
        marks = list(self._marks)
        self._marks = deque(marks[::2])
        for position, _ in marks[1::2]:
            self._store.delete(MARKS, self._key(position))

    def forget_before(self, position: int) -> None:
        """No message before `position` waits any more."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= position:
            self._store.delete(MARKS, self._key(marks.popleft()[0]))

    def clear(self) -> None:
        """Nothing waits."""
        for position, _ in self._marks:
            self._store.delete(MARKS, self._key(position))
        self._marks.clear()

    def time_of(self, position: int) -> WallTime | None:
        """When the message at `position` came (UTC), or up to `interval` earlier; None: not known."""
        found = None
        for first, utc in self._marks:
            if first > position:
                break
            found = utc
        return found

    def _key(self, position: int) -> str:
        return f"{self._name} {position:020d}"

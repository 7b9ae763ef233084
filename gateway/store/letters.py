"""Dead letters on disk: messages that nothing would take, with the reason, the newest of them.

They have been accepted from their source, so they are never refused and outlast a full disk in memory. Here
stands what is still to be written or deleted, and how many octets each stored letter has; the oldest go when
there are too many.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.times import WallTime
from gateway.store.messages import MessageReader, encode_sound
from gateway.store.statements import delete, insert


class DeadLetter(NamedTuple):
    """A message, the route that it took ("" when none), what was said of it, and when (UTC seconds)."""

    id: int
    utc: WallTime
    route: str
    outcome: Outcome
    message: Message


Line = tuple[int, int, float, str, int, str, str, bytes]
"""One line of the table: id, octets of the body, UTC seconds, route, verdict, reason, text, message."""


class Letters:
    """What the table has, or shall have."""

    def __init__(self, connection: sqlite3.Connection, messages_max: int, octets_max: int) -> None:
        self._connection = connection
        self._messages_max = messages_max
        self._octets_max = octets_max
        self._sizes: dict[int, int] = dict(
            connection.execute("SELECT id, octets FROM dead_letters ORDER BY id")
        )
        self._last = max(self._sizes, default=0)
        self._added: dict[int, Line] = {}
        self._removed: set[int] = set()
        self.crowded_out = 0  # letters that went since newer ones needed their place
        self.added = self.added_octets = 0  # letters of this process, be they still there or not
        self.octets: int = sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def has_room(self, added: int, added_octets: int) -> bool:
        """Return True if no letter has to go when so many, with so many bytes, have been added in all since
        the start."""
        return (
            len(self._sizes) + added - self.added <= self._messages_max
            and self.octets + added_octets - self.added_octets <= self._octets_max
        )

    @property
    def changed(self) -> bool:
        """Whether there is something to write."""
        return bool(self._added or self._removed)

    def add(self, messages: Iterable[Message], route: str, outcome: Outcome, utc: WallTime) -> None:
        """Keep `messages`; the oldest letters make room."""
        verdict, reason, text = outcome
        text = text.encode(errors="replace").decode()  # a peer may have had a hand in it
        for message in messages:
            self._last += 1
            octets = message.octets
            self._sizes[self._last] = octets
            self.octets += octets
            self.added += 1
            self.added_octets += octets
            given = encode_sound(message)
            line = (self._last, octets, utc, route, int(verdict), reason.value, text, given)
            self._added[self._last] = line
        while len(self._sizes) > self._messages_max or self.octets > self._octets_max:
            self.delete((next(iter(self._sizes)),))
            self.crowded_out += 1

    def delete(self, ids: Iterable[int] | None) -> None:
        """Forget these letters; None: all."""
        for id in list(self._sizes) if ids is None else ids:
            if id in self._sizes:
                self.octets -= self._sizes.pop(id)
                if self._added.pop(id, None) is None:
                    self._removed.add(id)

    def write(self) -> None:
        """Put what has changed into the transaction."""
        delete(self._connection, "dead_letters", "id", self._removed)
        insert(self._connection, "dead_letters", 8, list(self._added.values()))

    def written(self) -> None:
        """The transaction was committed."""
        self._added.clear()
        self._removed.clear()

    def newest(self, before: int | None) -> Iterable[Line]:
        """The letters on disk, newest first, older than letter `before`; one after the other, so that one
        that cannot be read hides none.
        """
        return self.find([id for id in reversed(self._sizes) if before is None or id < before])

    def says(self, text: str) -> bool:
        """Return True if a letter on disk has this text."""
        query = "SELECT 1 FROM dead_letters WHERE text = ? LIMIT 1"
        return self._connection.execute(query, (text,)).fetchone() is not None

    def find(self, ids: Iterable[int]) -> Iterable[Line]:
        """The letters on disk that have these ids, in this order."""
        for id in ids:
            yield from self._connection.execute("SELECT * FROM dead_letters WHERE id = ?", (id,)).fetchall()


def letter(reader: MessageReader, line: Line) -> DeadLetter:
    """The letter that a line of the table is. Raises StoreError when it cannot be read."""
    id, _, utc, route, verdict, reason, text, octets = line
    try:
        outcome = Outcome(Verdict(verdict), Reason(reason), text)
    except ValueError as error:
        raise StoreError(f"dead letter {id} cannot be read: {error}") from error
    return DeadLetter(id, WallTime(utc), route, outcome, reader.decode_one(octets))

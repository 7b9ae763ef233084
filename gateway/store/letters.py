"""Dead letters on disk: messages that nothing would take, with the reason, the newest of them.

They have been accepted from their source, so they are never refused and outlast a full disk in memory. Here
is what has still to be written or deleted, and how many bytes each stored letter has. When there are too
many, the oldest of a user who has more than an equal part go.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserEntries, UserShares
from gateway.model.times import WallTime
from gateway.store.messages import MessageReader, encode_sound
from gateway.store.schema import storable_name
from gateway.store.statements import delete, insert


class DeadLetter(NamedTuple):
    """A message, the route that it took ("" when none), what was said of it, and when (UTC seconds)."""

    id: int
    utc: WallTime
    route: str
    outcome: Outcome
    message: Message


Line = tuple[int, int, float, str, int, str, str, bytes, str]
"""One line of the table: id, bytes of the body, UTC seconds, route, verdict, reason, text, message, user."""


class Letters:
    """Dead letters that the table has, or shall have. `shares` counts them by the users who sent them."""

    def __init__(self, connection: sqlite3.Connection, shares: UserShares) -> None:
        """`shares` has their limits, and counts nothing yet."""
        self.shares = shares
        self._connection = connection
        self._entries: UserEntries[int] = UserEntries(shares)
        self._last = 0
        for id, octets, user in connection.execute("SELECT id, octets, user FROM dead_letters ORDER BY id"):
            self._entries.add(id, user, octets)
            self._last = id
        self._added: dict[int, Line] = {}
        self._removed: set[int] = set()
        self.added = self.added_octets = 0  # letters of this process, be they still there or not

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, messages: list[Message], added: int, added_octets: int) -> bool:
        """Return True if no letter has to go for these messages, and each of their users has room for them.
        `added` and `added_octets` are what has been handed over since the start."""
        return self.shares.has_room_for(messages, added_octets - self.added_octets, added - self.added)

    @property
    def changed(self) -> bool:
        """Whether there is something to write."""
        return bool(self._added or self._removed)

    def add(self, messages: Iterable[Message], route: str, outcome: Outcome, utc: WallTime) -> None:
        """Keep `messages`; the oldest letters of whoever has too many make room."""
        verdict, reason, text = outcome
        text = text.encode(errors="replace").decode()  # a peer may have had a hand in it
        for message in messages:
            self._last += 1
            octets = message.octets
            user = storable_name(message.sender.user)
            self._entries.add(self._last, user, octets)
            self.added += 1
            self.added_octets += octets
            given = encode_sound(message)
            line = (self._last, octets, utc, route, int(verdict), reason.value, text, given, user)
            self._added[self._last] = line
            while (id := self._entries.crowded_out(user)) is not None:
                self.delete((id,))

    def delete(self, ids: Iterable[int] | None) -> None:
        """Forget these letters; None: all."""
        for id in list(self._entries) if ids is None else ids:
            if self._entries.discard(id) and self._added.pop(id, None) is None:
                self._removed.add(id)

    def write(self) -> None:
        """Put what has changed into the transaction."""
        delete(self._connection, "dead_letters", "id", self._removed)
        insert(self._connection, "dead_letters", 9, list(self._added.values()))

    def written(self) -> None:
        """The transaction was committed."""
        self._added.clear()
        self._removed.clear()

    def newest(self, before: int | None) -> Iterable[Line]:
        """The letters on disk, newest first, older than letter `before`; one after the other, so that one
        that cannot be read hides none.
        """
        return self.find([id for id in reversed(self._entries) if before is None or id < before])

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
    id, _, utc, route, verdict, reason, text, octets, _ = line
    try:
        outcome = Outcome(Verdict(verdict), Reason(reason), text)
    except ValueError as error:
        raise StoreError(f"dead letter {id} cannot be read: {error}") from error
    return DeadLetter(id, WallTime(utc), route, outcome, reader.decode_one(octets))

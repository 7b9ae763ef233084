"""Dead letters on disk: the newest messages that were permanently refused, with the reason.

The gateway has accepted these messages from their source, so storing them as dead letters is never refused;
while the disk is full, they wait in memory. `StoredLetters` has the dead letters that must still be written
or deleted, and the size in bytes of each stored one. When there are too many, the oldest ones of a user who
has more than an equal part of the limit are deleted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserEntries, UserShares
from gateway.model.times import WallTime
from gateway.store.messages import MessageReader, encode_sound
from gateway.store.schema import storable_name
from gateway.store.statements import delete, insert


class StoredDeadLetter(NamedTuple):
    """Stored dead letter: message, route ("" if none), outcome, and time in POSIX seconds."""

    id: int
    utc: WallTime
    route: str
    outcome: Outcome
    message: Message


Line = tuple[int, int, float, str, int, str, str, bytes, str]
"""Line of the table: id, bytes of the body, POSIX seconds, route, verdict, reason, text, message, user."""


class StoredLetters:
    """Stored and unwritten dead letters. `shares` counts them by the users who sent the messages."""

    def __init__(self, connection: sqlite3.Connection, shares: UserShares, ahead_secs: float = 0.0) -> None:
        """Read the ids and sizes of the stored dead letters. `shares` has the limits, and must be empty.

        The expiry of a message is stored as its time plus `ahead_secs` (timeline.py).
        """
        self.shares = shares
        self._ahead_secs = ahead_secs
        self._connection = connection
        self._entries: UserEntries[int] = UserEntries(shares)
        self._last = 0
        for id, byte_count, user in connection.execute(
            "SELECT id, octets, user FROM dead_letters ORDER BY id"
        ):
            self._entries.add(id, user, byte_count)
            self._last = id
        self._added: dict[int, Line] = {}
        self._removed: set[int] = set()
        self.added = self.added_bytes = 0  # letters of this process, including deleted ones

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, messages: list[Message], added: int, added_bytes: int) -> bool:
        """Return True if these messages fit within the limits, in total and by user, with no deletion.

        `added` and `added_bytes` count the messages, and their bytes, that were passed to the writer thread
        as dead letters since the start, including those that are not added here yet.
        """
        return self.shares.has_room_for(messages, added_bytes - self.added_bytes, added - self.added)

    @property
    def has_changes(self) -> bool:
        """True if there are dead letters to write or to delete."""
        return bool(self._added or self._removed)

    def add(self, messages: Iterable[Message], route: str, outcome: Outcome, utc: WallTime) -> None:
        """Add a dead letter for each message, and delete the oldest ones beyond the limits.

        `route` is the name of the route that refused them, or ""; `utc` is the time of the refusal.
        """
        verdict, reason, text = outcome
        text = text.encode(errors="replace").decode()  # a peer may have chosen a part of the text
        for message in messages:
            self._last += 1
            byte_count = message.byte_count
            user = storable_name(message.sender.user)
            self._entries.add(self._last, user, byte_count)
            self.added += 1
            self.added_bytes += byte_count
            record = encode_sound(message, self._ahead_secs)
            line = (self._last, byte_count, utc, route, int(verdict), reason.value, text, record, user)
            self._added[self._last] = line
            while (id := self._entries.entry_to_evict(user)) is not None:
                self.delete((id,))

    def delete(self, ids: Iterable[int] | None) -> None:
        """Delete the dead letters with these ids; None deletes all."""
        for id in list(self._entries) if ids is None else ids:
            if self._entries.discard(id) and self._added.pop(id, None) is None:
                self._removed.add(id)

    def write(self) -> None:
        """Write the additions and deletions in the current transaction."""
        delete(self._connection, "dead_letters", "id", self._removed)
        insert(self._connection, "dead_letters", 9, list(self._added.values()))

    def clear_changes(self) -> None:
        """Clear the additions and deletions. Called after the transaction was committed."""
        self._added.clear()
        self._removed.clear()

    def newest(self, before: int | None) -> Iterable[Line]:
        """Yield the dead letters on disk, newest first.

        With `before`, only letters older than the one with this id are included. Each is read by a query of
        its own, so that an unreadable one does not hide others.
        """
        return self.find([id for id in reversed(self._entries) if before is None or id < before])

    def has_text(self, text: str) -> bool:
        """Return True if the outcome of a dead letter on disk has exactly this text."""
        query = "SELECT 1 FROM dead_letters WHERE text = ? LIMIT 1"
        return self._connection.execute(query, (text,)).fetchone() is not None

    def find(self, ids: Iterable[int]) -> Iterable[Line]:
        """Yield the dead letters on disk that have these ids, in this order; missing ids are skipped."""
        for id in ids:
            yield from self._connection.execute("SELECT * FROM dead_letters WHERE id = ?", (id,)).fetchall()

    def routes(self, damage: Callable[[str], None]) -> list[tuple[int, WallTime, str]]:
        """Return id, time and route of the dead letters on disk, oldest first, without reading messages.

        The time is when the message was refused, in seconds UTC since 1970.

        Unreadable ones are left out; `damage` is called with the text of the last error.
        """
        found: list[tuple[int, WallTime, str]] = []
        text = ""
        for id in self._entries:
            try:
                found += self._connection.execute(
                    "SELECT id, utc, route FROM dead_letters WHERE id = ?", (id,)
                )
            except sqlite3.Error as error:
                text = f"dead letter {id} of the store cannot be read: {error}"
        if text:
            damage(text)
        return found


def letter(reader: MessageReader, line: Line) -> StoredDeadLetter:
    """Return the dead letter that is stored in `line`, a row of the table `dead_letters`.

    Raises StoreError if it cannot be decoded.
    """
    id, _, utc, route, verdict, reason, text, data, _ = line
    try:
        outcome = Outcome(Verdict(verdict), Reason(reason), text)
    except ValueError as error:
        raise StoreError(f"dead letter {id} cannot be read: {error}") from error
    return StoredDeadLetter(id, WallTime(utc), route, outcome, reader.decode_one(data))

"""Retained messages that a group writes, and what replicas that remember some have to read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.state.database import Call, Database, Noted
from gateway.state.interface import DONE, Event, Reply, Retain
from gateway.state.table import Table

RETAINED: Final = "topic text, message bytea, expires_at double precision"
CHANGED: Final = (
    "{op} INSERT INTO retained_change (version, topic, at) SELECT state_version(), topic, state_now() FROM op"
)
EVERYBODY: Final = ""
BLANK: Final = (b"", None)  # no other column than `message` is changed when a message takes its place


class RetainedRow(NamedTuple):
    """A row of `retained`."""

    topic: str
    message: bytes
    expires_at: float | None


class RetainedMessages:
    """Retained messages of a group."""

    def __init__(self) -> None:
        self.notices: list[Noted] = []
        self._table = Table("retained", RetainedRow, RETAINED, 1, BLANK)
        self._topics: set[str] = set()

    def load(self, database: Database, operations: Sequence[Retain]) -> None:
        """Lock the topics of `operations`, in one order for all groups."""
        topics = [(one.topic,) for one in operations]
        self._table.take(database.run(self._table.lock(topics, topics))[-1])

    def apply(self, operation: Retain, now: float) -> Reply[object]:
        """Change the message of a topic."""
        topic, message, lifetime = operation.topic, operation.message, operation.lifetime_secs
        self._topics.add(topic)
        if not message:
            self._table.remove((topic,))
        else:
            self._table.put(RetainedRow(topic, message, None if lifetime is None else now + lifetime))
        return DONE

    def writes(self) -> list[Call]:
        """Return the statements that write what has changed."""
        if not self._topics:
            return []
        self.notices.append(Noted(EVERYBODY, Event.RETAINED))
        changes = [(topic,) for topic in sorted(self._topics)]
        return [*self._table.writes(), Call(CHANGED, "topic text", changes)]

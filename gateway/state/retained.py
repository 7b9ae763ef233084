"""Rows of the retained messages that a group of operations locks and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.state.database import Database, OperationStatement
from gateway.state.interface import OperationOutcome, Reply, Retain, Retention
from gateway.state.table import Table

RETAINED: Final = (
    "topic text, message bytea, expires_at double precision, login text, weight bigint,"
    " client text, epoch bigint"
)
BLANK: Final = (b"", None, "", 0, "", 0)  # the row of a locked topic without a retained message
CLEARED_SECS: Final = 60.0  # how long a cleared topic is fenced against older messages of the same client


class StoredRetainedRow(NamedTuple):
    """Row of `retained`. `expires_at` is in UTC seconds. `message` is empty if the topic was cleared.

    `client` sent it, in its session of `epoch`.
    """

    topic: str
    message: bytes
    expires_at: float | None
    login: str
    weight: int
    client: str
    epoch: int


class RetainedMessages:
    """Retained messages that a group touches."""

    def __init__(self) -> None:
        self._table = Table("retained", StoredRetainedRow, RETAINED, 1, BLANK)

    def load(self, database: Database, operations: Sequence[Retain]) -> None:
        """Lock the topics of `operations`, in the same order for all groups."""
        topics = [(one.topic,) for one in operations]
        self._table.take(database.run(self._table.lock(topics, topics))[-1])

    def apply(self, operation: Retain, now: float) -> Reply[object]:
        """Retain or remove the message of a topic, if there is capacity and no later one of the same client.

        Return the reply of the operation.
        """
        topic, message, lifetime = operation.topic, operation.message, operation.lifetime_secs
        client, epoch = operation.client, operation.epoch
        row = self._table.rows.get((topic,))
        if row is not None and row.client == client and row.epoch > epoch > 0:
            return Reply(OperationOutcome.FENCED)
        is_there = row is not None and row.message and (row.expires_at is None or row.expires_at > now)
        before = (row.login, row.weight) if row is not None and is_there else None
        if message and not _fits(operation, before):
            return Reply(OperationOutcome.DONE, Retention(False, before))
        if message:
            expires_at = None if lifetime is None else now + lifetime
            self._table.put(
                StoredRetainedRow(topic, message, expires_at, operation.user, operation.weight, client, epoch)
            )
        elif row is not None and epoch:
            self._table.put(StoredRetainedRow(topic, b"", now + CLEARED_SECS, "", 0, client, epoch))
        else:
            self._table.remove((topic,))
        return Reply(OperationOutcome.DONE, Retention(True, before))

    def writes(self) -> list[OperationStatement]:
        """Return the statements that write the changes."""
        return self._table.writes()


def _fits(operation: Retain, before: tuple[str, int] | None) -> bool:
    """Return True if the message may replace the one before."""
    room = operation.room
    if room is None:
        return True
    user, weight = ("", 0) if before is None else before
    count, byte_count = int(before is None), operation.weight - weight
    if (count > 0 and count > room.messages) or (byte_count > 0 and byte_count > room.byte_count):
        return False
    if before is None or user != operation.user:
        count, byte_count = 1, operation.weight
    return (count <= 0 or count <= room.user_messages) and (byte_count <= 0 or byte_count <= room.user_bytes)

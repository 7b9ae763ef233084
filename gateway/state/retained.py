"""Rows of the retained messages that a group of operations locks and writes.

An operation may arrive late, from a replica that was frozen. It does not replace the message of a later
session of the same client. Epochs of sessions are times of the database's clock. If that was set back, a
session may have a smaller epoch than an earlier one of its client that has ended. So an operation with a
smaller epoch counts as late only if the client's present session has another epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.state.database import Database, OperationStatement
from gateway.state.interface import CLEARED_SECS, FENCED, OperationOutcome, Reply, Retain, Retention
from gateway.state.sessions import KEY, MICROSECONDS, OF_OP
from gateway.state.table import Table

RETAINED: Final = (
    "topic text, message bytea, expires_at double precision, login text, weight bigint,"
    " client text, epoch bigint"
)
BLANK: Final = (b"", None, "", 0, "", 0)  # the row of a locked topic without a retained message
EPOCHS: Final = OF_OP.format(names="t.domain, t.client, t.epoch", table="session")


class StoredRetainedRow(NamedTuple):
    """Row of table `retained`: the retained message of a topic.

    `expires_at` is in UTC seconds, or None. `message` is empty if the topic was cleared. `login` is the user.
    `client` sent the message in its session of epoch `epoch`.
    """

    topic: str
    message: bytes
    expires_at: float | None
    login: str
    weight: int
    client: str
    epoch: int


class RetainedMessages:
    """Rows of table `retained` that the operations of one transaction read and change."""

    def __init__(self) -> None:
        self._table = Table("retained", StoredRetainedRow, RETAINED, 1, BLANK)
        self._epochs: dict[tuple[str, str], int] = {}  # of sessions with operations that may be late

    def load(self, database: Database, operations: Sequence[Retain]) -> None:
        """Lock and read the rows of the topics in `operations`.

        Also read the present session epochs of clients whose operations may have been overtaken by a later
        session. All transactions lock topics in the same order.
        """
        topics = [(one.topic,) for one in operations]
        self._table.take(database.run(self._table.lock(topics, topics))[-1])
        newest = {(row.topic, row.client): row.epoch for row in self._table.rows.values()}
        for one in operations:
            newest[one.topic, one.client] = max(one.epoch, newest.get((one.topic, one.client), 0))
        keys = {
            (one.domain, one.client) for one in operations if 0 < one.epoch < newest[one.topic, one.client]
        }
        if keys:
            (rows,) = database.run([OperationStatement(EPOCHS, KEY, sorted(keys))])
            self._epochs = {(domain, client): epoch for domain, client, epoch in rows}

    def apply(self, operation: Retain, now: float) -> Reply[object]:
        """Retain or remove the message of a topic. Return the reply of the operation.

        The topic is unchanged if there is no capacity, if it does not retain the expected message, or if the
        same client has changed it in a later session. `now` is in UTC seconds of the database's clock.
        """
        topic, message, lifetime = operation.topic, operation.message, operation.lifetime_secs
        client, epoch = operation.client, operation.epoch
        row = self._table.rows.get((topic,))
        if row is not None and self._is_late(operation, row, now):
            return FENCED
        is_there = row is not None and row.message and (row.expires_at is None or row.expires_at > now)
        before = (row.login, row.weight) if row is not None and is_there else None
        is_expected = operation.expected in (None, row.message if row is not None and is_there else b"")
        if not is_expected or (message and not _has_capacity(operation, before)):
            return Reply(OperationOutcome.DONE, Retention(False, before))
        if message:
            expires_at = None if lifetime is None else now + lifetime
            self._table.put(
                StoredRetainedRow(topic, message, expires_at, operation.user, operation.weight, client, epoch)
            )
        elif epoch and (operation.remembered or row is not None):
            self._table.put(StoredRetainedRow(topic, b"", now + CLEARED_SECS, "", 0, client, epoch))
        else:
            self._table.remove((topic,))
        return Reply(OperationOutcome.DONE, Retention(True, before))

    def _is_late(self, operation: Retain, row: StoredRetainedRow, now: float) -> bool:
        """Return True if the same client has already set or cleared the topic in a later session.

        If the client has no session and the topic's epoch is in the future, the database's clock was set
        back: then the operation is not late. `now` is in UTC seconds of the database's clock.
        """
        if row.client != operation.client or not row.epoch > operation.epoch > 0:
            return False
        current = self._epochs.get((operation.domain, operation.client))
        if current is None:
            return row.epoch <= now * MICROSECONDS
        return current != operation.epoch

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the database."""
        return self._table.writes()


def _has_capacity(operation: Retain, before: tuple[str, int] | None) -> bool:
    """Return True if the message of `operation` fits into the remaining capacity, `operation.room`.

    `before` has the user and the size (bytes, with overhead) of the retained message that it replaces, or is
    None.
    """
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

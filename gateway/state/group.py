"""One transaction of many operations: lock their rows, change the rows in memory in order, write them.

All decisions of operations are made by Python code over locked rows, the same for both databases. Rows are
locked kind by kind and in the order of their keys, so that deadlocks between two groups are rare. When one
occurs the database aborts one of the groups, which is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from gateway.state.claims import GroupLetters, Identifiers, Leases, Replicas
from gateway.state.database import Database, OperationStatement, PendingNotice
from gateway.state.interface import (
    AcceptIds,
    AcquireLease,
    AddLetter,
    CancelOpening,
    ChangeSession,
    ClaimIds,
    ClaimLetters,
    DeleteLetters,
    EndSession,
    ForgetQueue,
    FreeIds,
    FreeLetters,
    Heartbeat,
    JoinReplica,
    LeaveSession,
    OpenSession,
    PurgeLetters,
    QuitReplica,
    Reap,
    ReleaseLease,
    ReleaseSession,
    Reply,
    Retain,
    SettleWill,
)
from gateway.state.retained import RetainedMessages
from gateway.state.sessions import Sessions

NOW: Final = OperationStatement("SELECT state_now()")
# A limited number of rows, and none that another transaction has locked: deleting a million takes longer than
# others wait for a lock.
TIDY: Final = (
    "DELETE FROM seen WHERE (route, id) IN (SELECT t.route, t.id FROM seen AS t"
    " WHERE t.replica = '' AND t.until <= state_now() LIMIT 5000 {skip})",
    "DELETE FROM seen WHERE (route, id) IN (SELECT t.route, t.id FROM seen AS t WHERE t.replica <> ''"
    " AND t.replica IN (SELECT r.replica FROM replica AS r WHERE r.dead = 1) LIMIT 5000 {skip})",
    "DELETE FROM retained WHERE topic IN (SELECT t.topic FROM retained AS t"
    " WHERE t.expires_at <= state_now() LIMIT 5000 {skip})",
    "DELETE FROM lane WHERE seen <= state_now() - 86400",
    "DELETE FROM replica WHERE dead = 1 AND seen <= state_now() - 86400"
    " AND NOT EXISTS (SELECT 1 FROM session WHERE owner = replica.replica AND connected = 1)",
)


class LockedRows(Protocol):
    """Rows of one or more tables that the operations of one transaction lock and change.

    A class handles the operations of one kind, such as those on sessions.
    """

    def load(self, database: Database, operations: Sequence[Any]) -> None:
        """Lock and read the rows that these operations of one transaction need."""

    def apply(self, operation: Any, now: float) -> Reply[object]:
        """Change the rows in memory as `operation` requires, and return its reply.

        `now` is the database's time in UTC seconds.
        """

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the database."""


KINDS: Final[tuple[tuple[type[LockedRows], tuple[type, ...]], ...]] = (
    (Replicas, (JoinReplica, Heartbeat, QuitReplica)),
    (
        Sessions,
        (
            OpenSession,
            CancelOpening,
            ChangeSession,
            LeaveSession,
            ReleaseSession,
            SettleWill,
            EndSession,
            ForgetQueue,
            Reap,
        ),
    ),
    (Leases, (AcquireLease, ReleaseLease)),
    (Identifiers, (ClaimIds, AcceptIds, FreeIds)),
    (GroupLetters, (AddLetter, ClaimLetters, FreeLetters, DeleteLetters, PurgeLetters)),
    (RetainedMessages, (Retain,)),
)
KIND_OF: Final = {operation: kind for kind, operations in KINDS for operation in operations}


def run_group(
    database: Database, operations: Sequence[object], number: int
) -> tuple[list[Reply[object]], list[PendingNotice]]:
    """Run a group of operations in one new transaction, without committing it.

    `number` is the number of the group, which the transaction stores. Return a reply for each operation, and
    the notices that must be sent after the commit. Raises LostError and RefusedError.
    """
    database.begin(number)
    kinds: dict[type[LockedRows], LockedRows] = {}
    for kind, types in KINDS:
        if some := [one for one in operations if type(one) in types]:
            kinds[kind] = kind()
            kinds[kind].load(database, some)
    ((now,),) = database.run([NOW])[0]
    replies = [kinds[KIND_OF[type(one)]].apply(one, now) for one in operations]
    calls = [call for rows in kinds.values() for call in rows.writes()]
    if any(isinstance(one, Reap) for one in operations):
        calls += map(OperationStatement, TIDY)
    if calls:
        database.run(calls)
    noted = [
        notice
        for rows in kinds.values()
        if isinstance(rows, Sessions)
        for notice in dict.fromkeys(rows.notices)
    ]
    return replies, noted

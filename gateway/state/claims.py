"""Effects of operations on replicas, leases, identifiers and dead letters on their locked rows.

Each class serves one kind of operations of a group (group.py). It locks and reads the rows that they need,
changes them in memory in the order of the operations, and returns the statements that write the changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.state.database import Database, OperationStatement
from gateway.state.interface import (
    CLAIM_SECS,
    DELETED_SECS,
    DONE,
    FENCED,
    AcceptIds,
    AcquireLease,
    AddLetter,
    Claim,
    ClaimIds,
    ClaimLetters,
    DeadLetter,
    DeleteLetters,
    FreeIds,
    FreeLetters,
    Heartbeat,
    JoinReplica,
    Lease,
    OperationOutcome,
    PurgeLetters,
    QuitReplica,
    ReleaseLease,
    Reply,
)
from gateway.state.table import Table

NOBODY: Final = ""


class ReplicaRow(NamedTuple):
    """Row of table `replica`: one incarnation (one run) of a replica.

    `seen` is the time of its last heartbeat in UTC seconds. `name` is the configured name. `dead` is 1 once
    the incarnation has ended or was declared dead.
    """

    replica: str
    name: str
    address: str
    version: str
    seen: float
    dead: int


REPLICA: Final = "replica text, name text, address text, version text, seen double precision, dead integer"
ReplicaOperation = JoinReplica | Heartbeat | QuitReplica


class Replicas:
    """Rows of table `replica` that the operations of one transaction read and change."""

    def __init__(self) -> None:
        self._table = Table("replica", ReplicaRow, REPLICA, 1)

    def load(self, database: Database, operations: Sequence[ReplicaOperation]) -> None:
        """Lock and read the rows of the replicas that `operations` name."""
        self._table.take(database.run(self._table.lock((one.replica,) for one in operations))[-1])

    def apply(self, operation: ReplicaOperation, now: float) -> Reply[object]:
        """Apply an operation to the locked rows at `now` (UTC seconds). Return its reply."""
        row = self._table.rows.get((operation.replica,))
        if isinstance(operation, JoinReplica):
            if row is not None and row.dead:
                return FENCED
            joined = (operation.replica, operation.name, operation.address, operation.version)
            self._table.put(ReplicaRow(*joined, now, 0))
            return Reply(OperationOutcome.DONE, now)
        if row is None or row.dead:
            return FENCED
        self._table.put(row._replace(seen=now, dead=int(isinstance(operation, QuitReplica))))
        return DONE if isinstance(operation, QuitReplica) else Reply(OperationOutcome.DONE, now)

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the database."""
        return self._table.writes()


class LeaseRow(NamedTuple):
    """Row of table `lease`: `until` is the end of the lease in UTC seconds, `holder` the replica that has it.

    `holder` is "" if no replica has the lease.
    """

    name: str
    holder: str
    epoch: int
    until: float


LEASE: Final = "name text, holder text, epoch bigint, until double precision"
LeaseOperation = AcquireLease | ReleaseLease


class Leases:
    """Rows of table `lease` that the operations of one transaction read and change."""

    def __init__(self) -> None:
        self._table = Table("lease", LeaseRow, LEASE, 1, (NOBODY, 0, 0.0))

    def load(self, database: Database, operations: Sequence[LeaseOperation]) -> None:
        """Lock and read the rows of the leases that `operations` name, and create missing rows."""
        names = [(one.name,) for one in operations]
        self._table.take(database.run(self._table.lock(names, names))[-1])

    def apply(self, operation: LeaseOperation, now: float) -> Reply[object]:
        """Apply an operation to the locked rows at `now` (UTC seconds). Return its reply."""
        row = self._table.rows.get((operation.name,), LeaseRow(operation.name, NOBODY, 0, 0.0))
        is_held = row.holder != NOBODY and row.until > now
        if isinstance(operation, ReleaseLease):
            if row.holder != operation.replica or not is_held:
                return FENCED
            self._table.put(row._replace(holder=NOBODY, until=0.0))
            return DONE
        if is_held and row.holder != operation.replica:
            end = now + operation.secs
            if row.until > end:  # the clock was set back: a dead holder must not keep the lease for longer
                self._table.put(row._replace(until=end))
            return Reply(OperationOutcome.DONE, Lease(row.holder, row.epoch))
        epoch = row.epoch if is_held else row.epoch + 1
        self._table.put(LeaseRow(operation.name, operation.replica, epoch, now + operation.secs))
        return Reply(OperationOutcome.DONE, Lease(operation.replica, epoch))

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the database."""
        return self._table.writes()


class SeenRow(NamedTuple):
    """Row of table `seen`: a message identifier of a deduplicating route, which is claimed or accepted.

    `replica` is the replica that has claimed the identifier. If `replica` is empty, the target of the route
    has accepted a message with the identifier, and the row is valid until `until` (UTC seconds). If `route`
    is empty, `id` is that of a deleted dead letter.
    """

    route: str
    id: bytes
    replica: str
    until: float


SEEN: Final = "route text, id bytea, replica text, until double precision"
IdsOperation = ClaimIds | AcceptIds | FreeIds
ALIVE: Final = "SELECT replica FROM replica WHERE dead = 0"


class Identifiers:
    """Rows of table `seen` that the operations of one transaction on deduplicating routes use."""

    def __init__(self) -> None:
        self._table = Table("seen", SeenRow, SEEN, 2, (NOBODY, 0.0))
        self._alive: set[str] = set()

    def load(self, database: Database, operations: Sequence[IdsOperation]) -> None:
        """Lock and read the rows of the identifiers in `operations`, and read which replicas are alive."""
        keys = [(one.route, id) for one in operations for id in one.ids]
        claimed = [(one.route, id) for one in operations if isinstance(one, ClaimIds) for id in one.ids]
        if keys:
            *_, rows, alive = database.run([*self._table.lock(keys, claimed), OperationStatement(ALIVE)])
            self._table.take([(route, bytes(id), *values) for route, id, *values in rows])
            self._alive = {replica for (replica,) in alive}

    def apply(self, operation: IdsOperation, now: float) -> Reply[object]:
        """Apply an operation to the locked rows at `now` (UTC seconds). Return its reply."""
        if isinstance(operation, ClaimIds):
            if operation.replica not in self._alive:
                return FENCED
            return Reply(OperationOutcome.DONE, [self._claim(operation, id, now) for id in operation.ids])
        for id in operation.ids:
            row = self._table.rows.get((operation.route, id))
            if isinstance(operation, AcceptIds):
                self._table.put(SeenRow(operation.route, id, NOBODY, now + operation.window_secs))
            elif row is not None and row.replica == operation.replica:
                self._table.remove((operation.route, id))
        return DONE

    def _claim(self, operation: ClaimIds, id: bytes, now: float) -> Claim:
        """Claim the identifier `id` for the replica of `operation`, and return the result.

        The claim fails if a message with the identifier was accepted, or if another live replica has claimed
        it. `now` is in UTC seconds of the database's clock.
        """
        row = self._table.rows.get((operation.route, id))
        if row is not None:
            if row.replica == NOBODY and row.until > now:
                return Claim.ACCEPTED
            if row.replica not in (NOBODY, operation.replica) and row.replica in self._alive:
                return Claim.OPEN
        self._table.put(SeenRow(operation.route, id, operation.replica, 0.0))
        return Claim.OURS

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the database."""
        return self._table.writes()


class ClaimedLetterRow(NamedTuple):
    """Row of table `dead_letter` without the dead letter's content: its id, and the replica that claimed it.

    `claimed_by` is "" if no replica has claimed it. `claimed_until` is the end of the claim in UTC seconds.
    """

    id: str
    claimed_by: str
    claimed_until: float


LETTER: Final = "id text, claimed_by text, claimed_until double precision"
ADD: Final = (
    "{op} INSERT INTO dead_letter (id, route, reason, message, login, weight, at, claimed_by, claimed_until)"
    " SELECT id, route, reason, message, login, weight, at, '', 0 FROM op WHERE true"
    " ON CONFLICT (id) DO NOTHING"
)
ADDED: Final = (
    "id text, route text, reason bytea, message bytea, login text, weight bigint, at double precision"
)
CLAIM: Final = (
    "{op} UPDATE dead_letter SET claimed_by = op.claimed_by, claimed_until = op.claimed_until"
    " FROM op WHERE dead_letter.id = op.id"
)
DELETE: Final = "{op} DELETE FROM dead_letter WHERE id IN (SELECT id FROM op)"
LETTERS: Final = ""  # in `seen`, the route of the ids of deleted dead letters
LetterOperation = AddLetter | ClaimLetters | FreeLetters | DeleteLetters | PurgeLetters


class GroupLetters:
    """Rows of table `dead_letter` that the operations of one transaction read and change."""

    def __init__(self) -> None:
        self._table = Table("dead_letter", ClaimedLetterRow, LETTER, 1)
        self._seen = Table("seen", SeenRow, SEEN, 2, (NOBODY, 0.0))
        self._added: dict[str, DeadLetter] = {}
        self._claims: dict[str, ClaimedLetterRow] = {}
        self._deleted: set[str] = set()

    def load(self, database: Database, operations: Sequence[LetterOperation]) -> None:
        """Lock and read the rows of the dead letters that `operations` name.

        A dead letter that is added for the first time has no row yet. For a repeated AddLetter, also read
        whether the dead letter was deleted after the first attempt.
        """
        claims = [one for one in operations if not isinstance(one, AddLetter)]
        again = [one.letter.id for one in operations if isinstance(one, AddLetter) and one.is_repeated]
        if calls := self._table.lock([(id,) for id in (*again, *(id for one in claims for id in one.ids))]):
            self._table.take(database.run(calls)[-1])
        if again:
            calls = self._seen.lock([(LETTERS, id.encode()) for id in again])
            self._seen.take([(route, bytes(id), *values) for route, id, *values in database.run(calls)[-1]])

    def apply(self, operation: LetterOperation, now: float) -> Reply[object]:
        """Apply an operation to the locked rows at `now` (UTC seconds). Return its reply."""
        rows = self._table.rows
        if isinstance(operation, AddLetter):
            letter = operation.letter._replace(at=now)
            deleted = self._seen.rows.get((LETTERS, letter.id.encode()))
            if operation.is_repeated and deleted is not None and deleted.until > now:
                return DONE
            self._added[letter.id] = letter
            self._deleted.discard(letter.id)
            rows.setdefault((letter.id,), ClaimedLetterRow(letter.id, NOBODY, 0.0))
            return DONE
        found = []  # ids that this operation affects
        for id in operation.ids:
            row = rows.get((id,))
            if row is None:
                continue
            is_free = row.claimed_by in (NOBODY, operation.replica) or row.claimed_until <= now
            if isinstance(operation, PurgeLetters):
                if is_free:
                    self._delete(id, now)
                else:
                    found.append(id)
            elif isinstance(operation, DeleteLetters):
                self._delete(id, now, is_remembered=not operation.make_room)
                found.append(id)
            elif isinstance(operation, ClaimLetters):
                if is_free:
                    rows[id,] = self._claims[id] = ClaimedLetterRow(id, operation.replica, now + CLAIM_SECS)
                    found.append(id)
            elif row.claimed_by == operation.replica:
                rows[id,] = self._claims[id] = ClaimedLetterRow(id, NOBODY, 0.0)
        return DONE if isinstance(operation, FreeLetters) else Reply(OperationOutcome.DONE, found)

    def _delete(self, id: str, now: float, *, is_remembered: bool = True) -> None:
        """Delete the dead letter `id`.

        If `is_remembered` is True, its id is recorded for DELETED_SECS, so that a repeated AddLetter does not
        store the dead letter again. `now` is in UTC seconds of the database's clock.
        """
        del self._table.rows[id,]
        if is_remembered:
            self._seen.put(SeenRow(LETTERS, id.encode(), NOBODY, now + DELETED_SECS))
        self._claims.pop(id, None)
        self._added.pop(id, None)
        self._deleted.add(id)

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the database."""
        calls = []
        if self._deleted:
            calls.append(OperationStatement(DELETE, "id text", [(id,) for id in sorted(self._deleted)]))
        if self._added:
            calls.append(OperationStatement(ADD, ADDED, sorted(self._added.values())))
        if self._claims:
            calls.append(OperationStatement(CLAIM, LETTER, sorted(self._claims.values())))
        return calls + self._seen.writes()

"""Effects of operations on sessions, and of Reap, on locked rows.

`holder` is the replica that may still consume a session's queue: the owner, or an earlier one that has not
released the queue yet. A will is a row of its own, by the epoch in which its client was connected: a will
that is due outlives its session.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from gateway.state.database import Database, OperationStatement, PendingNotice, Rows
from gateway.state.interface import (
    CLAIM_SECS,
    DONE,
    FENCED,
    CancelOpening,
    ChangeSession,
    ClaimedWork,
    Contents,
    EarlierSession,
    EndSession,
    ForgetQueue,
    LeaveSession,
    LeftSession,
    NoticeSubject,
    OpenedSession,
    OpenSession,
    OperationOutcome,
    Owner,
    Packet,
    Reap,
    ReleaseSession,
    Reply,
    SessionKey,
    SettleWill,
    Weight,
)
from gateway.state.table import Table

SIGN: Final = 1 << 63
BITS: Final = 1 << 64
MICROSECONDS: Final = 1_000_000
NOBODY: Final = ""


class StoredSessionRow(NamedTuple):
    """Row of table `session`.

    `login` is the user, `place` the client's network address, `weight` the size in bytes. `expiry` is in
    seconds. `expires_at` and `reap_at` (when Reap claims the session) are in UTC seconds, and None while the
    client is connected. Until the first client is accepted, `expiry` is 0 and `opening` is the name of its
    OpenSession.
    """

    domain: str
    client: str
    epoch: int
    owner: str
    connected: int
    login: str
    place: str
    queue: str
    expiry: float
    expires_at: float | None
    reap_at: float | None
    holder: str
    holder_epoch: int
    given_back: bytes
    subscriptions: int = 0
    weight: int = 0
    opening: str = ""

    @property
    def key(self) -> SessionKey:
        """Key of the session."""
        return SessionKey(self.domain, self.client)


class WillRow(NamedTuple):
    """Row of table `will`.

    `delay` is in seconds. `due_at` is in UTC seconds, and None while the client is connected. `claimed` is 1
    once a replica has claimed the will; `served` is 1 if its client was accepted. `login` is the user,
    `weight` the size in bytes, `replica` the one to which the client was connected.
    """

    domain: str
    client: str
    epoch: int
    message: bytes
    delay: float
    due_at: float | None
    claimed: int  # 1 while a replica publishes it
    served: int  # 1 once its client was accepted: until then the will is void
    login: str = ""
    weight: int = 0
    replica: str = ""


class StoredSubscriptionRow(NamedTuple):
    """Row of table `subscription`: a topic filter of a session, with its encoded options."""

    domain: str
    client: str
    filter: str
    options: bytes


class PacketRow(NamedTuple):
    """Row of table `packet`: QoS 2 state of one packet identifier in one direction.

    `incarnation` and `count` identify the message: the replica process that published it, and its number
    there. Both are None for a message without such an identity.
    """

    domain: str
    client: str
    direction: int
    packet_id: int
    incarnation: bytes | None = None
    count: int | None = None  # type: ignore[assignment]  # a column of this name, not tuple's method
    released: int = 0


class UnbindingRow(NamedTuple):
    """Row of table `unbinding`: a binding key from which the session's queue still has to be unbound."""

    domain: str
    client: str
    key: str


class EndedQueueRow(NamedTuple):
    """Row of table `ended_queue`: a queue that must be deleted.

    Reap returns the queue from `reap_at` (UTC seconds) on.
    """

    queue: str
    reap_at: float


class ReceivedRow(NamedTuple):
    """Row of table `received`: which messages of one replica process the client has received.

    Each row stands for 64 consecutive message numbers, and has a bit for each.
    """

    domain: str
    client: str
    incarnation: bytes
    chunk: int
    bits: int


SESSION: Final = (
    "domain text, client text, epoch bigint, owner text, connected integer, login text, place text,"
    " queue text, expiry double precision, expires_at double precision, reap_at double precision,"
    " holder text, holder_epoch bigint, given_back bytea, subscriptions integer, weight bigint, opening text"
)
BLANK: Final = (0, NOBODY, 0, "", "", "", 0.0, None, None, NOBODY, 0, b"", 0, 0, "")
WILL: Final = (
    "domain text, client text, epoch bigint, message bytea, delay double precision, due_at double precision,"
    " claimed integer, served integer, login text, weight bigint, replica text"
)
SUBSCRIPTION: Final = "domain text, client text, filter text, options bytea"
PACKET: Final = (
    "domain text, client text, direction integer, packet_id integer, incarnation bytea, count bigint,"
    " released integer"
)
RECEIVED: Final = "domain text, client text, incarnation bytea, chunk bigint, bits bigint"
UNBINDING: Final = "domain text, client text, key text"
QUEUE: Final = "queue text, reap_at double precision"
KEY: Final = "domain text, client text"
OF_OP: Final = (
    "{{op}} SELECT {names} FROM op JOIN {table} AS t ON t.domain = op.domain AND t.client = op.client"
)

# A heartbeat from the future is of a clock that was set back since: those who live have sent others.
DECLARE_DEAD: Final = (
    "{op} UPDATE replica SET dead = 1 WHERE dead = 0 AND replica <> (SELECT me FROM op)"
    " AND abs(state_now() - seen) > (SELECT silent FROM op)"
    " AND abs(state_now() - (SELECT coalesce(heard_at, state_now()) FROM op)) <= (SELECT silent FROM op) / 2"
)
REAPER: Final = "me text, silent double precision, heard_at double precision"
ORPHANS: Final = (
    "SELECT {names} FROM replica AS r JOIN session AS t ON t.owner = r.replica"
    " WHERE r.dead = 1 AND t.connected = 1 LIMIT {limit} {{skip}}"
)
EXPIRED: Final = "SELECT {names} FROM session AS t WHERE t.reap_at <= state_now() LIMIT {limit} {{skip}}"
DUE: Final = (
    "SELECT {names} FROM will AS t WHERE t.due_at <= state_now() AND t.claimed <= {claimed}"
    " LIMIT {limit} {{skip}}"
)

LEFT: Final = "SELECT {names} FROM ended_queue AS t WHERE t.reap_at <= state_now() LIMIT {limit} {{skip}}"

OfSession = (
    OpenSession | CancelOpening | ChangeSession | LeaveSession | ReleaseSession | SettleWill | EndSession
)
SessionOperation = OfSession | ForgetQueue | Reap


class Sessions:
    """Rows of sessions, with their contents and wills, that the operations of one transaction change."""

    def __init__(self) -> None:
        self.notices: list[PendingNotice] = []
        self._sessions = Table("session", StoredSessionRow, SESSION, 2, BLANK)
        self._wills = Table("will", WillRow, WILL, 3)
        self._will_epochs: dict[SessionKey, dict[int, None]] = {}  # of `_wills`, by session
        self._subscriptions = Table("subscription", StoredSubscriptionRow, SUBSCRIPTION, 3)
        self._packets = Table("packet", PacketRow, PACKET, 4)
        self._received = Table("received", ReceivedRow, RECEIVED, 4)
        self._unbindings = Table("unbinding", UnbindingRow, UNBINDING, 3)
        self._queues = Table("ended_queue", EndedQueueRow, QUEUE, 1)
        self._contents: dict[SessionKey, Contents] = {}  # of sessions that are opened
        self._wiped: set[SessionKey] = set()
        self._orphans: list[tuple[SessionKey, int]] = []  # with epochs
        self._expired: list[SessionKey] = []
        self._due_wills: list[tuple[SessionKey, int]] = []  # with epochs
        self._left_queues: list[EndedQueueRow] = []

    def load(self, database: Database, operations: Sequence[SessionOperation]) -> None:
        """Lock and read the sessions in `operations`, and the contents of the sessions that are opened.

        For Reap, also declare silent replicas dead, and lock the rows that are due.
        """
        reaps = [one for one in operations if isinstance(one, Reap)]
        keys = {one.key for one in operations if isinstance(one, OfSession)}
        opened = {one.key for one in operations if isinstance(one, OpenSession)}
        leaving = {one.key for one in operations if isinstance(one, LeaveSession | CancelOpening)}
        changes = [one for one in operations if isinstance(one, ChangeSession)]
        accepted = {one.key for one in changes if one.expiry_secs is not None}
        wills = opened | leaving | accepted
        self._contents = {key: Contents() for key in opened}
        if keys:
            rows = database.run(self._sessions.lock(keys, opened))
            self._sessions.take(rows[-1])
            self._take_wills(database, wills)
        if opened:
            self._load_contents(database, sorted(opened))
        for reap in reaps:
            self._load_due(database, reap)

    def _take_wills(self, database: Database, keys: Iterable[SessionKey]) -> None:
        """Lock and read the wills of the sessions `keys`, which are already locked."""
        if rows := sorted(keys):
            self._add_wills(database.run([self._wills.select(rows, locking=True)])[0])

    def _add_wills(self, rows: Rows) -> None:
        """Add to the wills in memory those in `rows`, which this transaction has read and locked."""
        self._wills.add(rows)
        for domain, client, epoch, *_ in rows:
            self._will_epochs.setdefault(SessionKey(domain, client), {})[epoch] = None

    def _load_contents(self, database: Database, keys: list[SessionKey]) -> None:
        subscriptions, packets, received, unbindings = database.run(
            [table.select(keys) for table in self._content_tables()]
        )
        for domain, client, key in unbindings:
            self._contents[SessionKey(domain, client)].unbindings.add(key)
        for domain, client, topic_filter, options in subscriptions:
            self._contents[SessionKey(domain, client)].subscriptions[topic_filter] = bytes(options)
        for domain, client, direction, packet_id, incarnation, count, released in packets:
            number = None if incarnation is None else (bytes(incarnation), count)
            contents = self._contents[SessionKey(domain, client)]
            contents.packets[direction, packet_id] = Packet(number, bool(released))
        for domain, client, incarnation, chunk, bits in received:
            self._contents[SessionKey(domain, client)].received[bytes(incarnation), chunk] = bits % BITS

    def _content_tables(self) -> tuple[Table[Any], ...]:
        """Return the tables with subscriptions, QoS 2 state, received messages and unbindings of sessions."""
        return self._subscriptions, self._packets, self._received, self._unbindings

    def _load_due(self, database: Database, reap: Reap) -> None:
        """Declare silent replicas dead, and lock and read the rows that `reap` may claim.

        These are the sessions of dead replicas, expired sessions, due wills, and queues of ended sessions.
        Rows that another transaction has locked are skipped.
        """
        names, limit = self._sessions.names, reap.limit
        if reap.silent_secs is not None:
            parameters = [(reap.replica, reap.silent_secs, reap.heard_at)]
            database.run([OperationStatement(DECLARE_DEAD, REAPER, parameters)])
        calls = [
            OperationStatement(ORPHANS.format(names=names, limit=limit)),
            OperationStatement(EXPIRED.format(names=names, limit=limit)),
            OperationStatement(
                DUE.format(names=self._wills.names, limit=limit, claimed=int(reap.reclaims_wills))
            ),
            OperationStatement(LEFT.format(names=self._queues.names, limit=limit)),
        ]
        orphans, expired, due_wills, left = database.run(calls)
        self._left_queues = [EndedQueueRow(*values) for values in left]
        self._orphans = [(row.key, row.epoch) for row in (StoredSessionRow(*values) for values in orphans)]
        self._expired = [StoredSessionRow(*values).key for values in expired]
        self._due_wills = [
            (SessionKey(*will[:2]), will.epoch) for will in (WillRow(*values) for values in due_wills)
        ]
        self._take_wills(database, {key for key, _ in self._orphans})
        self._add_wills(due_wills)
        self._sessions.add(orphans + expired)

    # Effects of operations. `now` is the database's time in UTC seconds.

    def apply(self, operation: SessionOperation, now: float) -> Reply[object]:
        """Apply an operation to the locked rows at `now` (UTC seconds). Return its reply."""
        if isinstance(operation, Reap):
            return Reply(OperationOutcome.DONE, self._reap(now))
        if isinstance(operation, ForgetQueue):
            self._queues.remove((operation.queue,))
            return DONE
        row = self._sessions.rows.get(operation.key)
        if isinstance(operation, OpenSession | CancelOpening):
            if isinstance(operation, OpenSession):
                found: object = self._open(operation, row, now)
            else:
                found = self._cancel(operation, row, now)
            return Reply(OperationOutcome.DONE, found)
        if isinstance(operation, ReleaseSession):
            self._release(operation, row)
            return Reply(OperationOutcome.DONE, "" if row is None else row.queue)
        if isinstance(operation, SettleWill):
            self._wills.remove((*operation.key, operation.epoch))
            return DONE
        if row is None or row.epoch != operation.epoch:
            return FENCED
        if isinstance(operation, LeaveSession):
            return Reply(OperationOutcome.DONE, self._leave_session(row, operation, now))
        if isinstance(operation, EndSession):
            return self._end(row, now)
        self._change(operation, row)
        return DONE

    def _open(self, operation: OpenSession, row: StoredSessionRow | None, now: float) -> OpenedSession:
        """Open a session for a new owner: resume the stored session, or replace it by an empty one.

        `row` is the stored session, or None. If it belongs to another user and `only_own` is set, or if the
        will exceeds its limit, refuse and change nothing.
        """
        key = operation.key
        if row is not None and operation.only_own and row.login != operation.user:
            return OpenedSession(row.epoch, Contents(), refused=True, user=row.login)
        if self._will_exceeds_room(operation):
            return OpenedSession(0, Contents(), refused=True, user=operation.user)
        present = (
            row is not None
            and not operation.clean
            and row.expiry > 0
            and (row.expires_at is None or row.expires_at > now)
        )
        epoch = max(int(now * MICROSECONDS), 0 if row is None else row.epoch + 1)
        before, queue, ended, given_back = None, operation.queue, "", b""
        weight, earlier = Weight(0, operation.byte_count), None
        will_bytes = sum([will.weight for will in self._unclaimed_wills(key) if will.served])
        published = {
            will.epoch
            for will in self._wills_of(key)
            if will.claimed and (not operation.reclaims_wills or (will.due_at or 0.0) > now)
        }
        wills = self._inherit_wills(key, row if present else None, published, now)
        if row is not None:
            earlier = _earlier_session(row, operation.replica, will_bytes)
            weight = Weight(row.subscriptions, row.weight) if present else weight
            if row.connected:
                self.notices.append(PendingNotice(row.owner, NoticeSubject.TAKEN, key))
            before = Owner(row.holder, row.holder_epoch) if row.holder else None
            given_back = row.given_back if before is None else b""
            queue, ended = (row.queue or queue, "") if present else (queue, row.queue)
            self._end_queue(ended, now)
        if not present:
            self._wipe(key)
        if operation.expiry_secs <= 0 and not present:
            queue = ""
        holder = Owner(operation.replica, epoch) if before is None or not present else before
        expiry_secs = row.expiry if row is not None and present else 0.0
        self._sessions.put(
            StoredSessionRow(
                *key,
                epoch,
                operation.replica,
                1,
                operation.user,
                operation.place,
                queue,
                expiry_secs,
                None,
                None,
                *holder,
                b"",
                *weight,
                operation.opening,
            )
        )
        if operation.will is not None:
            message, delay, size = operation.will
            user, replica = operation.user, operation.replica
            self._wills.put(WillRow(*key, epoch, message, delay, None, 0, 0, user, size, replica))
            self._will_epochs.setdefault(key, {})[epoch] = None
        contents, user = self._contents[key].copy(), operation.user
        is_delayed = any(will.epoch != epoch for will in self._unclaimed_wills(key))
        return OpenedSession(
            epoch,
            contents,
            present,
            False,
            queue,
            before,
            ended,
            given_back,
            user,
            wills,
            earlier,
            is_delayed,
            bool(published),
            expiry_secs,
        )

    def _will_exceeds_room(self, operation: OpenSession) -> bool:
        """Return True if the will of `operation` is larger than the user's earlier ones and the capacity."""
        if operation.will is None or operation.will_room is None:
            return False
        wills = self._unclaimed_wills(operation.key)
        before = sum([will.weight for will in wills if will.served and will.login == operation.user])
        return operation.will.byte_count - before > max(operation.will_room, 0)

    def _inherit_wills(
        self, key: SessionKey, resumed: StoredSessionRow | None, published: set[int], now: float
    ) -> tuple[tuple[int, bytes], ...]:
        """Delete, keep or claim the wills of earlier connections of a client that opens its session.

        The will of a client that was never accepted is deleted. A delayed will that is not due stays if the
        session `resumed` goes on: it becomes void when the client is accepted. All others, also those that
        have outlived their session or the claim of another replica, are claimed for the replica that opens
        the session (MQTT 5: 3.1.3.2.2), except those of the epochs `published`, which another replica
        publishes. Return (epoch, message) of each will that is claimed now.
        """
        claimed = []
        for will in self._wills_of(key):
            if will.epoch in published:
                continue
            due_at = will.due_at
            if due_at is None:
                due_at = now if resumed is None else now + min(will.delay, resumed.expiry)
            if not will.served:
                self._wills.remove(will[:3])
            elif resumed is not None and due_at > now:
                self._wills.put(will._replace(due_at=due_at))
            else:
                self._wills.put(will._replace(due_at=now + CLAIM_SECS, claimed=1))
                claimed.append((will.epoch, will.message))
        return tuple(claimed)

    def _wills_of(self, key: SessionKey) -> list[WillRow]:
        rows = (self._wills.rows.get((*key, epoch)) for epoch in self._will_epochs.get(key, ()))
        return [row for row in rows if row is not None]

    def _unclaimed_wills(self, key: SessionKey) -> list[WillRow]:
        return [one for one in self._wills_of(key) if not one.claimed]

    def _cancel(self, operation: CancelOpening, row: StoredSessionRow | None, now: float) -> LeftSession:
        """Disconnect the client whose OpenSession is cancelled, and delete its will.

        If another replica has opened the session meanwhile, only the wills of clients that were never
        accepted are deleted. `now` is in UTC seconds of the database's clock.
        """
        opened, epoch = operation.opened, None if row is None else row.epoch
        for will in self._unclaimed_wills(operation.key):
            if not will.served and will.epoch != epoch:
                self._wills.remove(will[:3])
        if row is None or (row.owner, row.opening) != (opened.replica, opened.opening):
            return LeftSession(False, False)
        return self._leave_session(row, LeaveSession(row.key, row.epoch, row.expiry, discard_will=True), now)

    def _change(self, operation: ChangeSession, row: StoredSessionRow) -> None:
        """Apply the changes in `operation` to the session `row`, and to the rows of its contents."""
        key = operation.key
        if operation.weight is not None:
            subscriptions, weight = operation.weight
            row = row._replace(subscriptions=subscriptions, weight=weight)
            self._sessions.put(row)
        is_accepted = operation.expiry_secs is not None
        if operation.expiry_secs is not None:
            self._sessions.put(row._replace(expiry=operation.expiry_secs, opening=""))
        for will in self._unclaimed_wills(key) if is_accepted else ():
            if will.epoch == operation.epoch:
                self._wills.put(will._replace(served=1))
            else:  # delayed, and its client is back
                self._wills.remove(will[:3])
        self._change_contents(operation)

    def _change_contents(self, operation: ChangeSession) -> None:
        """Apply the changes in `operation` to the rows of a session's contents."""
        key = operation.key
        contents = self._contents.get(key, Contents())
        for topic_filter, options in operation.subscriptions.items():
            if options is None:
                contents.subscriptions.pop(topic_filter, None)
                self._subscriptions.remove((*key, topic_filter))
            else:
                contents.subscriptions[topic_filter] = options
                self._subscriptions.put(StoredSubscriptionRow(*key, topic_filter, options))
        for at, packet in operation.packets.items():
            if packet is None:
                contents.packets.pop(at, None)
                self._packets.remove((*key, *at))
            else:
                contents.packets[at] = packet
                incarnation, count = packet.number or (None, None)
                self._packets.put(PacketRow(*key, *at, incarnation, count, int(packet.released)))
        for chunk, bits in operation.received.items():
            if bits is None:
                contents.received.pop(chunk, None)
                self._received.remove((*key, *chunk))
            else:
                contents.received[chunk] = bits
                self._received.put(ReceivedRow(*key, *chunk, bits - BITS if bits >= SIGN else bits))

        for name, is_owed in operation.unbindings.items():
            if is_owed:
                contents.unbindings.add(name)
                self._unbindings.put(UnbindingRow(*key, name))
            else:
                contents.unbindings.discard(name)
                self._unbindings.remove((*key, name))

    def _leave_session(self, row: StoredSessionRow, operation: LeaveSession, now: float) -> LeftSession:
        """Record that the client of a session has disconnected.

        The will is deleted, claimed for the caller, or scheduled after its delay. Does nothing if the client
        was already recorded as disconnected. `now` is in UTC seconds of the database's clock.
        """
        if not row.connected:  # Repeated: others may have claimed its will, or delete its queue.
            return LeftSession(False, False)
        expiry = operation.expiry_secs
        will = self._wills.rows.get((*row.key, row.epoch))
        publish = False
        if will is not None and (operation.discard_will or not will.served):
            self._wills.remove(will[:3])
        elif will is not None:
            publish = min(will.delay, expiry) <= 0
            due_at = now + (CLAIM_SECS if publish else min(will.delay, expiry))
            self._wills.put(will._replace(due_at=due_at, claimed=int(publish)))
        if expiry <= 0:
            self._delete(row)
            self._end_queue(row.queue, now)
            return LeftSession(True, publish)
        expires_at = now + expiry
        disconnected = row._replace(connected=0, expiry=expiry, expires_at=expires_at, reap_at=expires_at)
        self._sessions.put(disconnected)
        return LeftSession(False, publish)

    def _release(self, operation: ReleaseSession, row: StoredSessionRow | None) -> None:
        """Record that a replica no longer consumes the session's queue, and notify the present owner."""
        if row is None or not row.holder or row.holder_epoch != operation.epoch:
            return
        holder = Owner(NOBODY, 0)
        if row.connected and row.epoch > operation.epoch:
            holder = Owner(row.owner, row.epoch)
            self.notices.append(PendingNotice(row.owner, NoticeSubject.RELEASED, row.key))
        released = row._replace(
            holder=holder.replica, holder_epoch=holder.epoch, given_back=operation.given_back
        )
        self._sessions.put(released)

    def _end(self, row: StoredSessionRow, now: float) -> Reply[None]:
        if row.expires_at is None or row.expires_at > now:
            return FENCED
        self._delete(row)
        return DONE

    def _reap(self, now: float) -> list[ClaimedWork]:
        """Mark the sessions of dead replicas as disconnected, and claim work that is due at `now`.

        The work is: delayed wills to publish, expired sessions to delete, and queues of ended sessions to
        delete. Other replicas leave claimed work to this one until `now` + CLAIM_SECS. Only work that earlier
        operations of the same transaction have not done is claimed. Return the claimed work.
        """
        for key, epoch in self._orphans:
            row = self._sessions.rows.get(key)
            if row is not None and row.connected and row.epoch == epoch:
                self._end_orphaned(row, now)
        found = []
        for key, epoch in self._due_wills:
            will = self._wills.rows.get((*key, epoch))
            if will is not None and will.due_at is not None and will.due_at <= now:
                self._wills.put(will._replace(due_at=now + CLAIM_SECS, claimed=1))
                found.append(ClaimedWork(key, epoch, "", will.message))
        for key in self._expired:
            row = self._sessions.rows.get(key)
            if row is not None and row.reap_at is not None and row.reap_at <= now:
                self._sessions.put(row._replace(reap_at=now + CLAIM_SECS))
                found.append(ClaimedWork(key, row.epoch, row.queue, None))
        for queue in self._left_queues:
            self._queues.put(queue._replace(reap_at=now + CLAIM_SECS))
            found.append(ClaimedWork(None, 0, queue.queue, None))
        return found

    def _end_queue(self, queue: str, now: float) -> None:
        """Record that the queue of an ended session must be deleted.

        Reap returns the queue after CLAIM_SECS. Does nothing if `queue` is "". `now` is in UTC seconds of the
        database's clock.
        """
        if queue:
            self._queues.put(EndedQueueRow(queue, now + CLAIM_SECS))

    def _end_orphaned(self, row: StoredSessionRow, now: float) -> None:
        """Mark the session of a dead replica as disconnected, or delete it if it ends with its connection.

        Its will and its expiry count from `now`. The epoch is increased, so that operations of the dead
        replica are fenced.
        """
        will = self._wills.rows.get((*row.key, row.epoch))
        if will is not None and will.served:
            self._wills.put(will._replace(due_at=now + min(will.delay, row.expiry)))
        elif will is not None:
            self._wills.remove(will[:3])
        if row.expiry <= 0:
            self._delete(row)
            self._end_queue(row.queue, now - CLAIM_SECS)
            return
        expires_at = now + row.expiry
        self._sessions.put(
            row._replace(
                epoch=row.epoch + 1,
                connected=0,
                expires_at=expires_at,
                reap_at=expires_at,
                holder=NOBODY,
                holder_epoch=0,
            )
        )

    def _delete(self, row: StoredSessionRow) -> None:
        self._sessions.remove(row.key)
        self._wipe(row.key)

    def _wipe(self, key: SessionKey) -> None:
        """Delete the contents of a session, with the changes that this transaction has made to them."""
        self._wiped.add(key)
        contents = self._contents.get(key)
        if contents is not None:
            contents.clear()
        for table in self._content_tables():
            table.forget(key)

    # Writing.

    def writes(self) -> list[OperationStatement]:
        """Return the SQL statements that write the changed rows to the database."""
        calls = []
        if wiped := sorted(self._wiped):
            calls = [table.delete(wiped) for table in self._content_tables()]
        tables: tuple[Table[Any], ...] = (
            self._sessions,
            self._wills,
            *self._content_tables(),
            self._queues,
        )
        for table in tables:
            calls += table.writes()
        return calls


def _earlier_session(row: StoredSessionRow, replica: str, will_bytes: int) -> EarlierSession:
    """Return user and size of the stored session, which `replica` opens again.

    `will_bytes` is the size of its wills.
    """
    is_here = bool(row.connected) and row.owner == replica
    weight = Weight(row.subscriptions, row.weight + will_bytes)
    return EarlierSession(row.login, weight, is_here, is_accepted=row.expiry > 0 or not row.opening)

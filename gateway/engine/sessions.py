"""Sessions of this replica's clients in the database that all replicas share.

The session of a connecting client is opened in the database first, and the client is accepted when the reply
has reported the session. Later changes of a session are stored by one ChangeSession at a time; replies to the
client that depend on a change wait until it is stored. While the database is unavailable all of that waits,
too.

Messages wait in a queue of the session on the cluster. Only one replica may consume it: a replica that takes
a session over waits until the previous owner has released the queue, and reads from the database which
messages were requeued. Notices of the database report changes. They may be lost, so the same changes are
queried every second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

import structlog

from gateway import clock
from gateway.broker.shares import text_bytes
from gateway.containment import contained
from gateway.engine.claims import ClaimedWill
from gateway.engine.client_session import ClientSession, OutcomeCallback, SessionChange
from gateway.engine.consumers import Content
from gateway.engine.membership import Membership
from gateway.engine.names import readable
from gateway.engine.pending_clients import OpeningClient, PendingOpen
from gateway.engine.repeats import Repeats
from gateway.engine.sessions_elsewhere import SessionsElsewhere
from gateway.engine.stored_values import decode_fingerprints, delay_of, encode_fingerprints, encode_will
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.model.times import LeaseTime, Monotonic
from gateway.protocols.mqtt.dialect import MQTT
from gateway.state.interface import (
    AbsentSession,
    CancelOpening,
    ChangeSession,
    ClaimedWork,
    EndSession,
    FindOwned,
    FindSession,
    FindSuperseded,
    ForgetQueue,
    LeaveSession,
    LeftSession,
    ListReplicas,
    Notice,
    NoticeSubject,
    OpenedSession,
    OpenSession,
    OperationOutcome,
    Owned,
    Owner,
    ReleaseSession,
    ReplicaView,
    Reply,
    SessionCounts,
    SessionKey,
    SessionView,
    SettleWill,
    StateStore,
    WeighSessions,
    Weight,
    WillRecord,
)

log = structlog.get_logger(limited=True)

DOMAIN: Final = MQTT.name  # domain of client identifiers
UNSTORED_MAX: Final = 50_000  # sessions with pending changes, beyond which no more clients are accepted
AWAY_SECS: Final = 5.0  # how long the database may be unavailable until clients are refused
SUPERSEDED_SECS: Final = 1.0  # between two queries for changes whose notices may be lost
COUNT_SECS: Final = 10.0  # between two queries for the number of sessions, and for what each user has
RECOUNT_SECS: Final = 1.0  # the same if a client waits for the result
SWEEP_SECS: Final = 60.0  # between two comparisons of all clients with the database
OWNED_MAX: Final = 1_000  # sessions in one page of a comparison
STRAY_SECS: Final = 10.0  # until the next comparison when one has found a stray session
RELEASE_SECS: Final = 1.0  # until the heartbeat of an owner that has not released a queue is checked
RELEASE_SECS_MAX: Final = 5.0  # how long an owner that is alive may take to release a queue
ALIVE_SECS: Final = 4.0  # maximum age of the last heartbeat of a replica that is alive
REQUEUED_SECS: Final = 3.0  # how long requeued messages of a queue are awaited
WILL_SECS: Final = 5.0  # how long a client waits until another replica has published its will
TAKEN_OVER: Final = "a later connection has the same client identifier"
AWAY: Final = "the database of sessions is unreachable"
NOT_OURS: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the session has another owner")
Done = Callable[[], None]


class SessionClients(Protocol):
    """Interface of this replica's connected clients that SharedSessions uses."""

    def session_of(self, client: str) -> ClientSession | None:
        """Return the session of a client that is connected to this replica, or None."""

    def connected(self) -> Iterable[ClientSession]:
        """Return the sessions of all clients that are connected to this replica."""

    def is_expected(self, client: str) -> bool:
        """Return True if the database has reported a client's session and its CONNECT is not accepted yet."""

    def handle_new_owner(self, client: str, owner: Owner | None, *, at_once: bool) -> None:
        """Close the connection of a client whose session now has another owner, `owner` (None: unknown).

        `at_once` is True if the client has connected to this replica again in this pass of the event loop.
        """

    def add_arrival(self, arrival: OpeningClient) -> None:
        """Record the session that the database has reported for a client, which may be accepted now."""

    def deny_opening(self, opening: PendingOpen, user: str) -> None:
        """Record that a connecting client (`opening`) is to be denied, as its session belongs to `user`.

        If `user` is the client's own user, its will exceeds the limit instead.
        """

    def will_room(self, user: str) -> int:
        """Return by how many bytes the wills of a user may grow; negative if a limit is exceeded."""

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        """Abort the connection of a session's client for the reason `why`; the client must reconnect."""

    def publish_claimed(self, claim: ClaimedWill, publish: Done) -> None:
        """Publish the claimed will of a client that was just lost, by calling `publish`.

        `settle_will` is called when the cluster has accepted it.
        """

    def publish_due_will(self, claim: ClaimedWill, message: bytes) -> None:
        """Publish the encoded will `message`, claimed by this replica, of a client not connected to it.

        `settle_will` is called when the cluster has accepted it.
        """


class Queues(Protocol):
    """Interface of the queues of sessions on the cluster."""

    @property
    def is_up(self) -> bool:
        """True if the cluster can be reached and this replica is not stopping."""

    def consume(self, session: ClientSession) -> None:
        """Consume the queue of a session, now or when the cluster is connected."""

    def end(self, session: ClientSession, done: Callable[[Sequence[Content]], None]) -> None:
        """Stop consuming the queue of a session, and requeue its unsettled messages.

        `done` is called with the contents of these messages when they are requeued.
        """

    def delete(self, queue: str, done: Done | None = None) -> None:
        """Delete a queue; call `done` when the broker has confirmed that. Without a connection do nothing."""


class SessionWriter:
    """Writer of one session's changes to the database. It submits one operation at a time, in order."""

    __slots__ = (
        "_callbacks",
        "_epoch",
        "_flying",
        "_is_leaving",
        "_key",
        "_leaving",
        "_repeats",
        "_settled",
        "change",
    )

    def __init__(
        self, key: SessionKey, epoch: int, repeats: Repeats, settled: Callable[[OperationOutcome], None]
    ) -> None:
        """Create the writer for the session `key`; `epoch` is the number of its present opening.

        `repeats` submits operations until the database replies. `settled` is called with the outcome of each
        ChangeSession: DONE, FENCED if the session has another owner, or REFUSED if the database rejects the
        change.
        """
        self.change = SessionChange()
        self._key = key
        self._epoch = epoch
        self._repeats = repeats
        self._settled = settled
        self._flying: list[OutcomeCallback] | None = None  # callbacks of the submitted change, if any
        self._callbacks: list[OutcomeCallback] = []  # callbacks that wait for `change`
        self._leaving: tuple[LeaveSession, Callable[[Reply[LeftSession], LeaseTime], None]] | None = None
        self._is_leaving = False  # it is on its way

    @property
    def is_idle(self) -> bool:
        """True if no operation is submitted or waits to be submitted."""
        return not self.has_changes and self._leaving is None and not self._is_leaving

    @property
    def has_changes(self) -> bool:
        """True if a ChangeSession is submitted, or if changes wait to be submitted."""
        return self._flying is not None or bool(self.change)

    def after(self, done: OutcomeCallback) -> None:
        """Call `done` when the changes until now are stored or cannot be stored, with the outcome.

        Must be called only if `has_changes` is True.
        """
        if self.change:
            self._callbacks.append(done)
        else:
            assert self._flying is not None
            self._flying.append(done)

    def leave(self, operation: LeaveSession, done: Callable[[Reply[LeftSession], LeaseTime], None]) -> None:
        """Submit the LeaveSession of a disconnected client, after all pending changes.

        `done` is called with the reply, and with the time of the request that it replies to (lease clock).
        """
        self._leaving = operation, done
        self.flush()

    def flush(self) -> None:
        """Submit the next operation, unless one is submitted already."""
        if self._flying is not None:
            return
        if self.change:
            change, self.change = self.change, SessionChange()
            self._flying, self._callbacks = self._callbacks, []
            contents = change.subscriptions, change.packets, change.received
            operation = ChangeSession(
                self._key, self._epoch, *contents, change.expiry_secs, change.weight, change.unbindings
            )
            self._repeats.submit(operation, self._stored)
        elif self._leaving is not None:
            (leave, done), self._leaving = self._leaving, None
            self._is_leaving = True
            self._repeats.submit_claim(leave, partial(self._handle_leave_reply, done))

    def _handle_leave_reply(
        self,
        done: Callable[[Reply[LeftSession], LeaseTime], None],
        reply: Reply[LeftSession],
        requested_at: LeaseTime,
    ) -> None:
        self._is_leaving = False
        done(reply, requested_at)

    def _stored(self, reply: Reply[None]) -> None:
        callbacks, self._flying = self._flying or [], None
        is_stored = reply.verdict is OperationOutcome.DONE
        for done in callbacks:
            try:
                done(ACCEPTED if is_stored else NOT_OURS)
            except Exception as error:  # it concerns one callback; the others must not wait
                contained("connection", error)
        self.flush()
        self._settled(reply.verdict)


class Takeover:
    """State of a session whose queue is still consumed by the session's previous owner, `before`.

    The session waits until the owner has stopped consuming.
    """

    __slots__ = ("before", "started_at")

    def __init__(self, before: Owner) -> None:
        self.before = before
        self.started_at = clock.now()


class OwnershipSweep:
    """Comparison of the clients connected to this replica with its sessions in the database.

    `here` has the sessions of these clients. `unconfirmed` has those of them that have not been found in the
    database yet. `clientless` has client and epoch of sessions that are connected to this replica according
    to the database, but have no client here.
    """

    __slots__ = ("clientless", "incarnation", "unconfirmed")

    def __init__(self, incarnation: str, here: Iterable[ClientSession]) -> None:
        self.incarnation = incarnation
        self.unconfirmed = {one.client_id: one for one in here}
        self.clientless: set[tuple[str, int]] = set()


class SharedSessions:
    """Sessions of this replica's clients in the shared database; also due wills and sessions to end."""

    def __init__(
        self,
        state: StateStore,
        membership: Membership,
        queues: Queues,
        prefix: str,
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Create the sessions in the database `state`.

        The names of their queues begin with `prefix`. `soon` has the event loop call a function after its
        present pass.
        """
        self.clients: SessionClients  # set before the start
        self.count = 0  # sessions of all replicas, as of the last count
        self.on_keys_to_unbind: Callable[[AbsentSession, set[str]], None] | None = (
            None  # called with keys to unbind
        )
        self.elsewhere = SessionsElsewhere()
        self.moved = 0  # sessions whose clients have connected to another replica
        self._state = state
        self._membership = membership
        self._queues = queues
        self._prefix = prefix
        self._soon = soon
        self._repeats = Repeats(state)
        self._numbers = 0  # counter for the names of this process's queues and openings
        self._openings: dict[str, PendingOpen] = {}  # by client
        self._next_openings: dict[str, PendingOpen] = {}  # those that wait for one of another user, by client
        # Users whose sessions must be counted again: since when (loop clock), and what to call then.
        self._recounting: list[tuple[str, Monotonic, Done]] = []
        self.opening_wills = UserShares("wills of connecting clients")
        self._writers: dict[ClientSession, SessionWriter] = {}
        self._dirty: dict[ClientSession, None] = {}
        self._consumable: set[tuple[str, int]] = set()  # clients and epochs whose queues may be consumed here
        self._waiting: dict[ClientSession, Takeover] = {}
        self._expecting: dict[ClientSession, Monotonic] = {}  # until when requeued messages are awaited
        self._unserved: set[ClientSession] = set()  # with wills that are not in force yet
        self._ended: set[ClientSession] = set()  # whose queue is deleted when it is not consumed any more
        self._ending: set[ClientSession] = set()  # whose queue is still consumed
        self._releases = 0  # ReleaseSession operations without a reply
        self._after_releases: list[Done] = []
        self._away_since: Monotonic | None = None
        self._is_querying_superseded = self._is_counting = self._is_asking = False
        self._is_recount = False  # True if the last result was ignored for a user, so the query is repeated
        self._superseded_at = self._count_at = self._recount_at = self._sweep_at = Monotonic(0.0)
        self._sweep: OwnershipSweep | None = None  # the comparison in progress
        self._strays: set[tuple[str, int]] = set()  # clients and epochs that the last comparison found stray

    @property
    def pending(self) -> int:
        """Number of clients and sessions that wait for the database to reply."""
        return len(self._openings) + len(self._next_openings) + len(self._writers) + self._releases

    @property
    def unavailable_reason(self) -> str:
        """Reason, concerning the database, why no more clients should be accepted; "" if they may."""
        if self._away_since is not None and clock.now() - self._away_since >= AWAY_SECS:
            return AWAY
        if len(self._writers) >= UNSTORED_MAX:
            return "too many requests are waiting for the database of sessions"
        return ""

    # Connecting clients.

    def open(self, opening: PendingOpen) -> None:
        """Open the session of a connecting client in the database.

        Another client that is opening the same session is denied, because this one is later. Exception: if
        the other client has another user, and this client may only open a session of its own user, this
        client may be refused; so it waits for the reply to the other one.
        """
        client, connecting = opening.client, opening.connecting
        before = self._openings.get(client)
        if (
            before is not None
            and connecting.only_own
            and connecting.sender.user != before.connecting.sender.user
        ):
            waiting = self._next_openings.pop(client, None)
            if waiting is not None:
                waiting.deny(TAKEN_OVER)
            self._next_openings[client] = opening
            return
        if before is not None:
            before.deny(TAKEN_OVER)
        self._openings[client] = opening
        self._submit_opening(opening)

    def _submit_opening(self, opening: PendingOpen) -> None:
        """Submit the OpenSession of a connecting client, and count its will until the client is accepted."""
        client, connecting = opening.client, opening.connecting
        self._numbers += 1
        incarnation = self._membership.incarnation
        operation = OpenSession(
            SessionKey(DOMAIN, client),
            incarnation,
            connecting.sender.user,
            connecting.place,
            connecting.clean,
            connecting.expiry_secs,
            f"{self._prefix}.{readable(client)}.{incarnation}.{self._numbers}",
            None
            if connecting.will is None
            else WillRecord(encode_will(connecting), delay_of(connecting.will), opening.will_bytes),
            connecting.only_own,
            text_bytes(client),
            f"{incarnation}.{self._numbers}",
            self.clients.will_room(connecting.sender.user),
            self._membership.is_steady,
        )
        self.opening_wills.add(connecting.sender.user, opening.will_bytes)
        self._state.submit(
            operation, partial(self._handle_open_reply, opening, operation, clock.lease_time())
        )

    def _handle_open_reply(
        self,
        opening: PendingOpen,
        operation: OpenSession,
        requested_at: LeaseTime,
        reply: Reply[OpenedSession],
    ) -> None:
        """Process the reply to the OpenSession `operation`, submitted at `requested_at` (lease clock).

        The wills that the operation has claimed are published. The client in `opening` is accepted or denied,
        and a client that waits for the same session is opened next.
        """
        if reply.value is not None:
            self._publish_claimed(operation.key, reply.value.wills, requested_at)
        self._accept_or_deny(opening, operation, reply)
        self._open_next(opening.client, is_away=reply.verdict is OperationOutcome.UNAVAILABLE)

    def _open_next(self, client: str, *, is_away: bool) -> None:
        """Open the session for a connection of `client` that waits, unless another opening is pending.

        It is denied instead if the database is unavailable (`is_away`).
        """
        waiting = None if client in self._openings else self._next_openings.pop(client, None)
        if waiting is None:
            return
        if is_away or waiting.connection.stream.closed:
            waiting.deny(AWAY)
        else:
            self.open(waiting)

    def _accept_or_deny(
        self, opening: PendingOpen, operation: OpenSession, reply: Reply[OpenedSession]
    ) -> None:
        """Accept a connecting client (`opening`) if the database has opened its session; otherwise deny it.

        `operation` is the OpenSession to which `reply` is the reply.
        """
        client, found, incarnation = opening.client, reply.value, operation.replica
        if found is not None and not found.refused and incarnation != self._membership.incarnation:
            found = None  # other replicas have declared this one dead meanwhile
        is_latest = self._openings.get(client) is opening
        if found is None or found.refused:
            self._count_no_will(opening)
        if is_latest and found is not None and self._awaits_count(opening, found):
            return
        if is_latest:
            del self._openings[client]
        if found is None:
            opening.deny(AWAY)
            self._undo_open(operation, operation.queue, is_counted=False)
            return
        if found.refused:
            self.clients.deny_opening(opening, found.user)
            return
        owner = Owner(incarnation, found.epoch)
        if found.ended_queue and found.before is None:  # else that owner deletes it when it has released it
            self._delete(found.ended_queue)
        self.count += found.earlier is None
        self._count_earlier(found, -1)
        if not found.is_held:
            self._consumable.add((client, found.epoch))
        arrival = OpeningClient(opening, operation, owner, found)
        if not is_latest:  # and the later opening may fail
            self.abandon_arrival(arrival)
            return
        self.clients.handle_new_owner(client, owner, at_once=True)
        self.clients.add_arrival(arrival)
        if found.has_claimed_will:
            self._await_will(arrival, clock.now(), clock.now())
        else:
            opening.answer()

    def _awaits_count(self, opening: PendingOpen, found: OpenedSession) -> bool:
        """Return True if an opening that was refused because of its will must wait for a new count.

        Since the last count, another replica may have published the client's last will.
        """
        user = opening.connecting.sender.user
        is_over_limit = found.refused and found.user == user
        if not is_over_limit or self.elsewhere.is_counted(user, opening.opened_at):
            return False
        self.after_count(user, partial(self._open_recounted, opening))
        return True

    def _count_no_will(self, opening: PendingOpen) -> None:
        """Stop counting the will of a client that is accepted now, or whose opening has ended."""
        self.opening_wills.remove(opening.connecting.sender.user, opening.will_bytes)

    def _open_recounted(self, opening: PendingOpen) -> None:
        """Open the session of a connecting client again whose will seemed to exceed the limit.

        Do nothing if a later connection of the client has replaced it.
        """
        client = opening.client
        if self._openings.get(client) is not opening:
            return
        if opening.connection.stream.closed:
            del self._openings[client]
            self._open_next(client, is_away=False)
        else:
            self._submit_opening(opening)

    def _await_will(self, arrival: OpeningClient, since: Monotonic, look_at: Monotonic) -> None:
        """Accept a client when the will of its earlier connection is published, or WILL_SECS after `since`.

        `arrival` has the client. Another replica has claimed the will and publishes it; messages of the
        client must not come before. The next query is due at `look_at`: many clients may wait when a replica
        was killed, so the intervals grow.
        """
        if clock.now() < look_at:
            self._repeats.call_later(partial(self._await_will, arrival, since, look_at))
            return

        def on_view(reply: Reply[SessionView | None]) -> None:
            waited_secs = clock.now() - since
            if reply.value is not None and reply.value.has_claimed_will and waited_secs < WILL_SECS:
                next_at = Monotonic(since + min(2 * waited_secs, WILL_SECS))
                self._repeats.call_later(partial(self._await_will, arrival, since, next_at))
            else:
                arrival.opening.answer()

        self._state.query(FindSession(arrival.operation.key), on_view)

    def _count_earlier(self, found: OpenedSession, count: int) -> None:
        """Subtract a client's earlier session from its user's sessions at other replicas, or add it again.

        `found` has the earlier session. `count` is -1 to subtract it, because the session is here now, and 1
        to undo that. A session whose client was never accepted is not counted.
        """
        earlier = found.earlier
        if earlier is not None and earlier.is_accepted and not earlier.is_here:
            self.elsewhere.change(earlier.user, earlier.weight, count)

    def _publish_claimed(
        self, key: SessionKey, wills: Iterable[tuple[int, bytes]], requested_at: LeaseTime
    ) -> None:
        """Publish wills of earlier connections of a session's client, before it can publish anything.

        `key` is the session's. `wills` has epochs and encoded wills, which this replica has claimed at
        `requested_at`. If that was long ago, or the cluster is unavailable, nothing is published; other
        replicas claim the wills later.
        """
        for epoch, message in wills:
            claim = ClaimedWill(key, epoch, requested_at)
            if self._queues.is_up and not claim.is_ending:
                self.clients.publish_due_will(claim, message)

    def accept(self, session: ClientSession, arrival: OpeningClient) -> bool:
        """Store that a client is accepted, with its session's expiry, unless the database has that already.

        `arrival` is what the database had of the session. Return True if the CONNACK must wait until that is
        stored: until then, if the client were lost, an earlier will of it might be published, and its session
        would have its earlier expiry. The CONNACK need not wait for a new session without a will, with which
        nothing can be lost.
        """
        self._count_no_will(arrival.opening)
        found = arrival.found
        has_wills = arrival.opening.connecting.will is not None or found.has_delayed_will
        has_new_expiry = session.expiry_secs != found.expiry_secs
        if has_wills or has_new_expiry or not found.present:
            self.change(session).expiry_secs = session.expiry_secs
        if has_wills:
            self._unserved.add(session)
        return has_wills or (found.present and has_new_expiry)

    def abandon_arrival(self, arrival: OpeningClient) -> None:
        """Undo the opening of the session in `arrival`: its client disconnected before it was accepted.

        A session that the client had before remains.
        """
        operation, found = arrival.operation, arrival.found
        self._count_no_will(arrival.opening)
        self._undo_open(operation, found.queue, is_counted=True)
        if found.present:
            self._count_earlier(found, 1)
        if not found.is_held:
            self._release(
                operation.key, found.epoch, found.given_back, queue=found.queue if found.present else ""
            )

    def _undo_open(self, operation: OpenSession, queue: str, *, is_counted: bool) -> None:
        """Undo an OpenSession, which may not have been committed, because its client was not accepted.

        If the session ends, its `queue` is deleted. `is_counted` is True if `count` includes the session.
        """
        done = partial(self._handle_left_without_client, queue, is_counted)
        self._repeats.submit(CancelOpening(operation.key, operation), done)

    def _handle_left_without_client(self, queue: str, is_counted: bool, reply: Reply[LeftSession]) -> None:
        """Process the reply to an operation that left a session without a client at this replica.

        If the session has ended, its `queue` is deleted, and `count` is reduced if `is_counted` is True.
        """
        if reply.value is None or not reply.value.ended:
            return
        self.count -= is_counted  # it may be one of many that a full user opens
        if queue:
            self._delete(queue)

    # Changes of sessions.

    def change(self, session: ClientSession) -> SessionChange:
        """Return the collected changes of a session, which are stored soon; the caller adds more to them."""
        writer = self._writers.get(session)
        if writer is None:
            writer = self._writer(session)
        if session not in self._dirty:
            if not self._dirty:
                self._soon(self.flush)
            self._dirty[session] = None
        return writer.change

    def _writer(self, session: ClientSession) -> SessionWriter:
        """Create the SessionWriter of a session, and add it to `_writers`."""
        key = SessionKey(DOMAIN, session.client_id)
        settled = partial(self._settled, session)
        found = self._writers[session] = SessionWriter(key, session.owner.epoch, self._repeats, settled)
        return found

    def check_owner(self, session: ClientSession, done: Callable[[bool], None]) -> None:
        """Query if this replica owns a session and its queue; call `done` with True if so, else False."""

        def on_view(reply: Reply[SessionView | None]) -> None:
            if reply.verdict is OperationOutcome.UNAVAILABLE:
                self._repeats.call_later(partial(self.check_owner, session, done))
            else:
                view = reply.value
                done(view is not None and view.owner == session.owner and view.queue == session.queue)

        self._state.query(FindSession(SessionKey(DOMAIN, session.client_id)), on_view)

    def after_stored(self, session: ClientSession, done: OutcomeCallback) -> None:
        """Call `done` with ACCEPTED when all changes that a session has collected until now are stored.

        `done` is called with another outcome if they cannot be stored.
        """
        writer = self._writers.get(session)
        if writer is None or not writer.has_changes:
            done(NOT_OURS if session.is_stopped else ACCEPTED)
        else:
            writer.after(done)

    def flush(self) -> None:
        """Submit the collected changes of all sessions."""
        dirty, self._dirty = self._dirty, {}
        for session in dirty:
            writer = self._writers.get(session)
            if writer is not None:
                writer.flush()
                self._forget_idle(session)  # if nothing was added

    def _forget_idle(self, session: ClientSession) -> None:
        writer = self._writers.get(session)
        if writer is not None and writer.is_idle:
            del self._writers[session]

    def _settled(self, session: ClientSession, verdict: OperationOutcome) -> None:
        """Process `verdict`, the outcome of a ChangeSession: stop session and client unless it is DONE."""
        self._forget_idle(session)
        if session in self._unserved:
            self._unserved.discard(session)
            if verdict is not OperationOutcome.DONE:  # a replica of an earlier version may publish it
                self.settle_will(SessionKey(DOMAIN, session.client_id), session.owner.epoch)
        if verdict is OperationOutcome.DONE:
            return
        if self.clients.session_of(session.client_id) is session:
            if verdict is OperationOutcome.REFUSED:
                log.error("session not stored, client disconnected", client=session.client_id)
                self.clients.disconnect_client(session, "the client's session cannot be stored")
            else:  # `handle_new_owner` ignores a session that is stopped already
                self.clients.handle_new_owner(session.client_id, None, at_once=False)
        session.stop()

    def leave(self, session: ClientSession, publish: Done | None) -> None:
        """Submit a LeaveSession for a client that has disconnected, and stop consuming its session's queue.

        `publish` publishes the client's will; it is None if the client has no will any more.
        """
        is_held = self._waiting.pop(session, None) is None
        self._expecting.pop(session, None)
        key, epoch = SessionKey(DOMAIN, session.client_id), session.owner.epoch
        writer = self._writers.get(session) or self._writer(session)
        operation = LeaveSession(key, epoch, session.expiry_secs, discard_will=publish is None)
        weight = session.total_weight(with_will=publish is not None)
        self.elsewhere.begin_leaving(session.user, weight)
        if session.has_queue and is_held:
            self._ending.add(session)
        writer.leave(operation, partial(self._handle_leave_reply, session, weight, publish, is_held))
        if session.has_queue and is_held:
            self._queues.end(session, partial(self._release_or_delete_queue, session))

    def _handle_leave_reply(
        self,
        session: ClientSession,
        weight: Weight,
        publish: Done | None,
        is_held: bool,
        reply: Reply[LeftSession],
        requested_at: LeaseTime,
    ) -> None:
        """Process the reply to a LeaveSession that was submitted at `requested_at` (lease clock).

        `weight` is the size of the session, including the client's will unless that was discarded. The queue
        of an ended session is deleted; if this replica has consumed it (`is_held`), after it is released.
        `publish` publishes a will that the operation has claimed.
        """
        self._forget_idle(session)
        key, epoch = SessionKey(DOMAIN, session.client_id), session.owner.epoch
        left_session = reply.value
        is_here = self.clients.session_of(key.client) is not None or self.clients.is_expected(key.client)
        ended = left_session is not None and left_session.ended
        is_will_due = left_session is not None and left_session.publish_will
        remaining = session.weight if is_will_due else weight
        self.elsewhere.end_leaving(session.user, weight, None if ended or is_here else remaining)
        if left_session is not None and left_session.ended:
            self.count -= 1
            self._consumable.discard((key.client, epoch))
            if session in self._ending:
                self._ended.add(session)
            elif session.has_queue:  # not consumed, or released before the session has ended
                self._delete(session.queue)
        elif left_session is None and session.has_queue and not is_held:
            self._check_queue(key, session.queue, clock.now())
        elif left_session is not None:
            owed = {name for name, (on, _) in session.unbound.items() if not on}
            if owed and self.on_keys_to_unbind is not None:
                self.on_keys_to_unbind(AbsentSession(key, epoch, session.user, session.queue, {}), owed)
        claim = ClaimedWill(key, epoch, requested_at)
        if (
            left_session is not None
            and left_session.publish_will
            and publish is not None
            and not claim.is_ending
        ):
            self.clients.publish_claimed(claim, publish)

    def _check_queue(self, key: SessionKey, queue: str, since: Monotonic) -> None:
        """Delete a queue unless, according to the database, it is the queue of the session `key`.

        Called for a session that this replica no longer owns and whose queue it has not consumed: after a
        restore of the database no other replica might delete the queue. An earlier owner that may still
        consume the queue deletes it within RELEASE_SECS_MAX after `since`.
        """
        again = partial(self._check_queue, key, queue, since)

        def on_view(reply: Reply[SessionView | None]) -> None:
            if reply.verdict is OperationOutcome.UNAVAILABLE:
                self._repeats.call_later(again)
            elif reply.value is None or reply.value.queue != queue:
                self._delete(queue)

        if clock.now() - since < RELEASE_SECS_MAX:
            self._repeats.call_later(again)
        else:
            self._state.query(FindSession(key), on_view)

    def _release_or_delete_queue(self, session: ClientSession, requeued: Sequence[Content]) -> None:
        """Release or delete the queue of a session, because this replica has stopped consuming it.

        `requeued` has the contents of the messages that were requeued.
        """
        self._ending.discard(session)
        if session in self._ended:
            self._ended.discard(session)
            self._delete(session.queue)
        else:
            key = SessionKey(DOMAIN, session.client_id)
            fingerprints = encode_fingerprints(session.fingerprints(requeued))
            self._release(key, session.owner.epoch, fingerprints, queue=session.queue)

    def _release(self, key: SessionKey, epoch: int, fingerprints: bytes = b"", *, queue: str = "") -> None:
        """Submit a ReleaseSession for the session `key`: its owner in `epoch` consumes its queue no longer.

        `fingerprints` has the encoded fingerprints of requeued messages. If `queue` is given and is not the
        session's queue any more, it is deleted. The next owner cannot delete it: RabbitMQ (3.10) closes the
        connection of a replica whose consumer is starting while its queue is deleted.
        """
        self._releases += 1

        def on_released(reply: Reply[str]) -> None:
            self._releases -= 1
            if queue and reply.value is not None and reply.value != queue:
                self._delete(queue)
            self._consumable.discard((key.client, epoch))
            session = self.clients.session_of(key.client)
            if session is not None and session in self._waiting:
                self._query_session(key)
            if not self._releases:
                waiting, self._after_releases = self._after_releases, []
                for done in waiting:
                    done()

        self._repeats.submit(ReleaseSession(key, epoch, fingerprints), on_released)

    def release_all(self, sessions: Sequence[ClientSession], done: Done) -> None:
        """Release the queues of these sessions to other replicas, because the process ends.

        `done` is called when the database has recorded that.
        """
        for session in sessions:
            if session not in self._waiting:
                self._release_or_delete_queue(session, ())
        self._waiting.clear()
        self._after_releases.append(done)
        if not self._releases:
            self._after_releases.pop()()

    def settle_will(self, key: SessionKey, epoch: int) -> None:
        """Delete a will in the database, because it was published or must not be published.

        It is the will of the session `key` in its opening number `epoch`.
        """
        self._repeats.submit(SettleWill(key, epoch), lambda reply: None)

    # Queues that had another owner.

    def acquire(self, session: ClientSession, found: OpenedSession) -> None:
        """Consume the queue of a session, now or when the previous owner has stopped consuming it.

        `found` is the session as OpenSession has reported it.
        """
        before = found.before
        if before is None or not found.is_held:
            self._consume(session, found.given_back)
            return
        self._waiting[session] = Takeover(before)
        key = SessionKey(DOMAIN, session.client_id)
        if (
            before.replica == self._membership.incarnation
            and (key.client, before.epoch) not in self._consumable
        ):
            self._release(key, before.epoch)
        else:
            self._query_session(key)

    def _consume(self, session: ClientSession, encoded: bytes) -> None:
        """Consume the queue of a session; `encoded` has the encoded fingerprints of requeued messages."""
        self._waiting.pop(session, None)
        self._consumable.add((session.client_id, session.owner.epoch))
        if fingerprints := decode_fingerprints(encoded):
            session.expect(fingerprints)
            self._expecting[session] = Monotonic(clock.now() + REQUEUED_SECS)
        self._queues.consume(session)

    def is_waiting(self, session: ClientSession) -> bool:
        """Return True if the replica that owned a session before may still consume its queue."""
        return session in self._waiting

    def _query_session(self, key: SessionKey) -> None:
        """Query who owns a session, and whether the previous owner consumes its queue; act on the reply."""
        self._state.query(FindSession(key), partial(self._handle_view, key))

    def _handle_view(self, key: SessionKey, reply: Reply[SessionView | None]) -> None:
        """Process the database's record of the session `key`: disconnect its client if it has a new owner.

        If the previous owner has released the queue for which the session waits, consume the queue.
        """
        session, view = self.clients.session_of(key.client), reply.value
        if reply.verdict is not OperationOutcome.DONE:
            return
        if session is None:
            if self.clients.is_expected(key.client):
                self.clients.handle_new_owner(key.client, None if view is None else view.owner, at_once=False)
            return
        if view is None or view.owner.epoch != session.owner.epoch:
            self.clients.handle_new_owner(key.client, None if view is None else view.owner, at_once=False)
        elif not view.connected:  # it would expire
            self.clients.handle_new_owner(key.client, None, at_once=False)
        elif view.holder in (None, session.owner) and session in self._waiting:
            self._consume(session, view.given_back)

    def _release_superseded(self, reply: Reply[list[tuple[SessionKey, int]]]) -> None:
        """Process the reply to FindSuperseded: sessions opened again whose queues this replica may consume.

        If such a session has a client at this replica, it is queried. Otherwise its queue is released if this
        replica does not consume it.
        """
        self._is_querying_superseded = False
        for key, epoch in reply.value or ():
            session = self.clients.session_of(key.client)
            is_here = session is not None and session.owner.epoch == epoch
            if is_here or self.clients.is_expected(key.client):
                self._query_session(key)
            elif (key.client, epoch) not in self._consumable:
                self._release(key, epoch)

    def _query_owners(self, overdue: list[ClientSession]) -> None:
        """Query which replicas are alive, because previous owners do not release the queues of `overdue`."""
        self._is_asking = True
        self._state.query(ListReplicas(), partial(self._take_over_overdue, overdue))

    def _take_over_overdue(self, overdue: list[ClientSession], reply: Reply[list[ReplicaView]]) -> None:
        """Consume the queues of the sessions in `overdue` that their previous owners do not release.

        A queue is consumed if its previous owner is dead according to `reply`, or has not released it for
        RELEASE_SECS_MAX.
        """
        self._is_asking = False
        if reply.value is None:
            return
        alive = {one.replica for one in reply.value if one.silent_secs < ALIVE_SECS}
        for session in overdue:
            waiting = self._waiting.get(session)
            if waiting is None:
                continue
            if waiting.before.replica not in alive or clock.now() - waiting.started_at >= RELEASE_SECS_MAX:
                self._release(SessionKey(DOMAIN, session.client_id), waiting.before.epoch)
                self._consume(session, b"")

    # Comparison of the database with this replica.

    def _begin_sweep(self, now: Monotonic) -> None:
        """Begin to compare all clients of this replica with the database, page by page.

        After an outage, a failover or a restore of the database, the database or this replica may have
        sessions that the other lacks, and no notice reports that. `now` is in loop-clock seconds.
        """
        self._sweep = OwnershipSweep(self._membership.incarnation, self.clients.connected())
        self._sweep_at = Monotonic(now + SWEEP_SECS)
        self._read_owned(self._sweep, SessionKey("", ""))

    def _read_owned(self, sweep: OwnershipSweep, after: SessionKey) -> None:
        self._state.query(
            FindOwned(sweep.incarnation, after, OWNED_MAX), partial(self._handle_owned_page, sweep)
        )

    def _handle_owned_page(self, sweep: OwnershipSweep, reply: Reply[list[Owned]]) -> None:
        """Process a page of sessions that this replica owns according to the database; query the next page.

        After the last page, sessions that are here but not in the database are queried one by one. `sweep`
        has the results of the earlier pages.
        """
        if reply.value is None or sweep.incarnation != self._membership.incarnation:
            self._sweep = None  # it is repeated after the outage
            return
        for owned in reply.value:
            session = sweep.unconfirmed.get(owned.key.client)
            if session is not None and session.owner.epoch == owned.epoch:
                del sweep.unconfirmed[owned.key.client]
            else:
                self._note_stray(sweep, owned)
        if len(reply.value) >= OWNED_MAX:
            self._read_owned(sweep, reply.value[-1].key)
            return
        self._sweep, self._strays = None, sweep.clientless
        if sweep.clientless:
            self._sweep_at = Monotonic(min(self._sweep_at, clock.now() + STRAY_SECS))
        for client, session in sweep.unconfirmed.items():
            if self.clients.session_of(client) is session:
                self._query_session(SessionKey(DOMAIN, client))

    def _note_stray(self, sweep: OwnershipSweep, owned: Owned) -> None:
        """Record a session (`owned`) that is at this replica according to the database, but has no client.

        It is added to `sweep`. If the comparison before has found the same, a LeaveSession is submitted for
        the session: until then its client may be about to connect or disconnect.
        """
        client, epoch = owned.key.client, owned.epoch
        session = self.clients.session_of(client)
        is_known = session is not None and session.owner.epoch == epoch
        if is_known or client in self._openings or self.clients.is_expected(client):
            return
        if (client, epoch) not in self._strays:
            sweep.clientless.add((client, epoch))
            return
        log.warning("session without client marked disconnected", client=client)
        leave = LeaveSession(owned.key, epoch, owned.expiry_secs, discard_will=False)
        self._repeats.submit(leave, partial(self._handle_left_without_client, owned.queue, True))
        self._release(owned.key, epoch, queue=owned.queue)

    # Notices and the timer.

    def handle_notice(self, notice: Notice) -> None:
        """Query the session that a database notice is about; after a lost notice, check all sessions."""
        if notice.key is not None and notice.event in (NoticeSubject.TAKEN, NoticeSubject.RELEASED):
            self._query_session(notice.key)
        elif notice.event is NoticeSubject.MISSED:
            self._superseded_at = self._sweep_at = Monotonic(0.0)

    def run_due_work(self, work: ClaimedWork, requested_at: LeaseTime) -> None:
        """Publish a will that is due, or end an expired session, which a Reap has claimed for this replica.

        `requested_at` is when the Reap was submitted. If the cluster is unavailable other replicas do the
        work later.
        """
        if not self._queues.is_up:
            return
        if work.key is None:
            self._delete(work.queue)
        elif work.will is not None:
            self.clients.publish_due_will(ClaimedWill(work.key, work.epoch, requested_at), work.will)
        elif work.queue:
            self._queues.delete(work.queue, partial(self._end, work))
        else:
            self._end(work)

    def _end(self, work: ClaimedWork) -> None:
        """Delete the expired session in `work` from the database, because its queue was deleted."""
        assert work.key is not None
        self._repeats.submit(EndSession(work.key, work.epoch), lambda reply: None)

    def _delete(self, queue: str) -> None:
        """Delete the queue of a session that has ended, and record that in the database.

        If that fails another replica does it later.
        """
        self._queues.delete(queue, partial(self._repeats.submit, ForgetQueue(queue), lambda reply: None))

    def tick(self, now: Monotonic) -> None:
        """Run the timer; `now` is in loop-clock seconds.

        The timer repeats operations that have failed, and queries the changes of which notices may have been
        lost.
        """
        self._repeats.tick()
        is_away = bool(self._state.health.failure)
        if self._away_since is not None and not is_away:
            self._sweep_at = now
        self._away_since = (self._away_since or now) if is_away else None
        for session, end in list(self._expecting.items()):
            if now >= end:
                del self._expecting[session]
                session.stop_expecting()
        overdue = [one for one, waiting in self._waiting.items() if now - waiting.started_at >= RELEASE_SECS]
        if overdue and not self._is_asking:
            self._query_owners(overdue)
        if not self._is_querying_superseded and now >= self._superseded_at:
            self._is_querying_superseded, self._superseded_at = True, Monotonic(now + SUPERSEDED_SECS)
            self._state.query(FindSuperseded(self._membership.incarnation), self._release_superseded)
        if self._sweep is None and not is_away and now >= self._sweep_at:
            self._begin_sweep(now)
        if not self._is_counting and now >= (self._recount_at if self._recounting else self._count_at):
            self._begin_count(now)

    def _begin_count(self, now: Monotonic) -> None:
        """Query the number of all sessions and what each user has, at `now` in loop-clock seconds."""
        self._is_counting = True
        self._count_at, self._recount_at = Monotonic(now + COUNT_SECS), Monotonic(now + RECOUNT_SECS)
        self.elsewhere.begin(now)
        query = WeighSessions(self._membership.incarnation)
        self._state.query(query, self._store_counts)

    def after_count(self, user: str, done: Done) -> None:
        """Call `done` when a count that begins later has a result for a user."""
        self._recounting.append((user, clock.now(), done))

    def _store_counts(self, reply: Reply[SessionCounts]) -> None:
        """Store the number of all sessions, and of each user's sessions that are not connected here."""
        self._is_counting = False
        is_ignored = self.elsewhere.end(None if reply.value is None else reply.value.elsewhere)
        # The query reads all sessions, and in a busy cluster some user's sessions always change meanwhile.
        self._is_recount = is_ignored and not self._is_recount
        if self._is_recount:
            self._count_at = clock.now()
        if reply.value is not None:
            self.count = reply.value.total
        waiting, self._recounting = self._recounting, []
        for user, since, done in waiting:
            if self.elsewhere.is_counted(user, since):
                done()
            else:
                self._recounting.append((user, since, done))

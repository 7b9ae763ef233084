"""MQTT topics, sessions and subscriptions of one replica of the shared engine.

Subscriptions are those of this replica's clients; topics are common to all replicas. A connecting client is
accepted when the shared database has reported the session that it finds. A session is in memory here as long
as its client is connected, and is in the database and its queue after that. Wills are in the database, too:
the replica that claims one there publishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Final

import structlog
import trio

from gateway import clock
from gateway.access.principal import Principal
from gateway.broker.mqtt.namespace import (
    OVERDUE,
    ConnectingClient,
    LeftWill,
    MqttNamespace,
    Offers,
    SessionShares,
)
from gateway.broker.mqtt.session import WALKS_MAX, Grant, Session, SessionLimits, SubscriptionOptions
from gateway.broker.mqtt.shared_subscriptions import SharedGroup, shared_pattern
from gateway.broker.mqtt.system import SYS
from gateway.engine.arguments import type_arguments
from gateway.engine.claims import ClaimedWill
from gateway.engine.client_session import ClientSession, SharedReceivedIds
from gateway.engine.consumers import Consumers
from gateway.engine.envelope import Number
from gateway.engine.pending_clients import Opening, OpeningClient
from gateway.engine.retained import SharedRetained
from gateway.engine.session import EngineSession
from gateway.engine.sessions import TAKEN_OVER
from gateway.engine.shares import (
    EXPIRES_SECS,
    GRACE_SECS,
    LIST_AGE_SECS_MAX,
    TOUCH_SECS,
    SharedQueue,
    queue_of,
)
from gateway.engine.stored_values import decode_options, decode_will
from gateway.engine.walks import SharedWalk, Walked
from gateway.errors import StoreError
from gateway.ingress.mqtt.admission import AdmittedGuest
from gateway.ingress.mqtt.guest import MqttGuest
from gateway.ingress.mqtt.ingress import SentWill
from gateway.model.address import Address
from gateway.model.batch import Receipt, Recipient, Sink, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.pending import Pending, Superseded
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.shares import UserShares
from gateway.protocols.mqtt.packets import Will
from gateway.state.interface import SHARED_FILTERS_MAX, Owner, Reply, SharedFilters, StateStore

log = structlog.get_logger(limited=True)

Asked = tuple[Session, str, SubscriptionOptions]
FILTER_BYTES_MAX: Final = (
    1_500  # besides a client identifier: PostgreSQL limits a row of an index to 2 704 bytes
)
LIST_SECS: Final = 60.0  # between two queries for shared subscriptions that have ended
WALKED_SECS: Final = 60.0  # how late a message may arrive live that was sent as a retained one


class Countdown:
    """Counter of events that calls a function after the last one, or at once if none is expected."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._remaining = count
        self._then = then
        if not count:
            then()

    def count(self) -> None:
        """Count one event, and call the function if it was the last one."""
        self._remaining -= 1
        if not self._remaining:
            self._then()


class EngineNamespace(MqttNamespace):
    """MQTT sessions and subscriptions of one replica."""

    def __init__(
        self,
        engine: EngineSession,
        state: StateStore,
        limits: SessionLimits,
        retained: SharedRetained,
        *,
        shares: SessionShares,
        sessions_max: int,
        definition_shares: UserShares | None = None,
    ) -> None:
        self.confirms_later = True  # RabbitMQ has to confirm what subscriptions get
        self._engine = engine
        self._common = retained
        self._state = state
        self._change_count = 0  # counter of changes that clients wait for
        self._walks: list[Asked] = []  # walks without a barrier yet behind which they begin
        self._barrier_walks: list[list[Asked]] = []  # walks with a barrier, by barrier
        # Sessions with walks: None while a walk is running, else when the last one ended (monotonic).
        self._walking: dict[ClientSession, float | None] = {}
        # Callbacks that wait until the queue of a session is this replica's, and bound.
        self._unbound: list[tuple[ClientSession, Callable[[Outcome], None], Outcome]] = []
        self._arrived: dict[str, OpeningClient] = {}  # clients that are about to be accepted
        self._refused: dict[str, tuple[Opening, str]] = {}  # clients whose session is another user's
        self._lost: dict[str, Callable[[], None]] = {}  # publish wills of leaving clients
        # Wills that this replica has claimed, by the keys under which they are published, and the one whose
        # publishing is starting.
        self._publishing: dict[str, ClaimedWill] = {}
        self._claimed: ClaimedWill | None = None
        super().__init__(
            self._changed_filter,
            limits,
            definition_shares=definition_shares,
            shares=shares,
            sessions_max=sessions_max,
            retained=retained,
        )
        # A QoS 2 message that was sent belongs to its client even if that never returns: no other can get it.
        self.offers = Offers(shared_qos_max=1)
        self.filter_bytes_max = FILTER_BYTES_MAX
        self._shared: dict[str, SharedQueue] = {}  # with members here, by filter
        self._unused: dict[str, float] = {}  # filters without a member here, and since when (monotonic)
        self._unused_of: dict[str, str] = {}  # users for whom those of them count that had a member here
        self._shared_of_all: set[str] = set()  # filters that sessions of all replicas have
        self._touched = self._listed = 0.0
        self._is_listing = False
        engine.serve(self, self._number_of, self._epoch_of)
        self._arguments = self._queue_arguments()

    def _queue_arguments(self) -> Headers:
        """Return the arguments of a session's queue, which drops its oldest messages at its limit.

        It does not expire; it is deleted when the session ends.
        """
        return (("x-single-active-consumer", Value(ValueType.BOOL, True)), *self._limit_arguments())

    def _shared_arguments(self) -> Headers:
        expires = Value(ValueType.INT64, int(EXPIRES_SECS * 1_000))
        return (("x-expires", expires), *self._limit_arguments())

    def _limit_arguments(self) -> Headers:
        settings, limits = self._engine.settings, self.limits
        return (
            *type_arguments(settings),
            ("x-max-length", Value(ValueType.INT64, limits.messages_max)),
            ("x-max-length-bytes", Value(ValueType.INT64, limits.bytes_max)),
            ("x-overflow", string("drop-head")),
            ("x-dead-letter-exchange", string(self._engine.names.dropped)),
        )

    def _changed_filter(self, levels: list[str]) -> None:
        self._engine.forget_entries()

    # Replies to clients, and when they may be sent.

    @property
    def change_count(self) -> int:
        """Counter of changes that clients may learn about when the cluster and the database have them."""
        return self._change_count

    @property
    def unavailable(self) -> str:
        """Why no client can be accepted now; "" if clients can."""
        return self._engine.unavailable_reason

    @property
    def failing(self) -> bool:
        """True if the database of sessions accepts nothing now."""
        return bool(self._engine.sessions.unavailable_reason)

    def has_unstored_changes(self, before: int) -> bool:
        """Return True if a change since `change_count` was `before` must not be reported to clients yet."""
        return self.change_count != before

    def after_recorded(self, session: Session | None, done: Callable[[Outcome], None]) -> None:
        """Call `done` with ACCEPTED when the cluster and the database have all changes until now."""
        walks, self._walks = self._walks, []
        self._barrier_walks.append(walks)
        self._engine.after_bound(partial(self._bound, session, walks, done))

    def _bound(
        self,
        session: Session | None,
        walks: list[Asked],
        done: Callable[[Outcome], None],
        outcome: Outcome,
    ) -> None:
        """Begin the walks of subscriptions that are bound.

        The reply to the client waits for the first pages, so that messages published after it usually do not
        arrive twice.
        """
        self._barrier_walks = [one for one in self._barrier_walks if one is not walks]
        begun: list[SharedWalk] = []
        for walking, topic_filter, options in walks:
            if walking.subscriptions.get(topic_filter) is options:
                self._start_walk(walking, topic_filter, options)
                walk = walking.walks[topic_filter]
                if isinstance(walk, SharedWalk) and len(begun) < WALKS_MAX and not self._common.is_away:
                    begun.append(walk)
        countdown = Countdown(len(begun), partial(self._read, session, done, outcome))
        for walk in begun:
            walk.begin(countdown.count)

    def _read(self, session: Session | None, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        """Wait until subscriptions are stored, after the first pages of the walks have been read.

        They are stored when their queue is bound, which takes longer while another owner still has the queue.
        """
        if isinstance(session, ClientSession) and session.unbound and not session.is_stopped:
            self._unbound.append((session, done, outcome))
        elif isinstance(session, ClientSession):
            self._engine.after_stored(session, done)
        else:
            done(outcome)

    def _start_walk(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        if topic_filter.split("/", 1)[0] == SYS:
            super()._start_walk(session, topic_filter, options)
            return

        def is_wanted(walk: SharedWalk) -> bool:
            return session.walks.get(topic_filter) is walk and session.outlet is not None

        session.walks[topic_filter] = SharedWalk(
            self._common,
            topic_filter,
            Grant(session, [options], retained=True),
            session.walked if isinstance(session, ClientSession) else None,
            is_wanted,
            partial(_pull, session),
        )

    def exclude_already_sent(
        self, recipients: tuple[Recipient, ...], message: Message, number: Number | None
    ) -> tuple[Recipient, ...]:
        """Return the recipients that were not sent this message as a retained one.

        `number` is None below QoS 2.
        """
        if not self._walking:
            return recipients
        return tuple(one for one in recipients if _is_new(one.sink, message, number))

    def commit_notifier(self, session: Session) -> Callable[[Callable[[Outcome], None]], None] | None:
        """Return the function that reports when PUBREL and PUBCOMP may be sent; None for at once.

        For a session with a queue they wait until the database has stored the change.
        """
        if isinstance(session, ClientSession) and session.has_queue:
            return partial(self._engine.after_stored, session)
        return None

    # Topics.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Return the cluster as the sink of a topic; for `$SYS`, this replica's own subscribers."""
        return super().sinks(address) if address.name.startswith(SYS) else self._engine.sinks(address)

    def local_subscribers(self, address: Address) -> tuple[Sink, ...]:
        """Return this replica's clients that get messages of a topic by the replica's queue."""
        return tuple(sink for sink in super().sinks(address) if not _by_own_queue(sink))

    def subscribe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Add or replace a subscription; retained messages are sent when its binding is confirmed."""
        before = session.subscriptions.get(topic_filter)
        self._enter(session, topic_filter, options)
        if isinstance(session, ClientSession) and session.has_queue and options != before:
            session.subscribed(topic_filter, options, before)
        self._change_count += 1
        if shared_pattern(topic_filter) is not None:
            return
        if topic_filter.split("/", 1)[0] == SYS:
            self.system.show()
        if options.retain_handling == 0 or (options.retain_handling == 1 and before is None):
            self._walks.append((session, topic_filter, options))
            if isinstance(session, ClientSession):
                session.walked = session.walked or Walked()
                session.walked.begin(topic_filter, is_first=before is None)
                self._walking[session] = None

    def _enter(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        before = session.subscriptions.get(topic_filter)
        super()._enter(session, topic_filter, options)
        if shared_pattern(topic_filter) is not None:
            self._share(topic_filter)
            return
        lasting = isinstance(session, ClientSession) and session.has_queue
        had = before is not None and not (lasting and before.qos)
        has = not (lasting and options.qos)
        if has and not had:
            self._engine.bind(topic_filter.split("/"))
        elif had and not has:
            self._engine.unbind(topic_filter.split("/"))

    def _remove(self, session: Session, topic_filter: str) -> None:
        options = session.subscriptions[topic_filter]
        self._remove_local(session, topic_filter)
        self._change_count += 1
        if isinstance(session, ClientSession) and session.has_queue:
            session.subscribed(topic_filter, None, options)

    def _remove_local(self, session: Session, topic_filter: str) -> None:
        """Remove a subscription from this replica, and unbind or release its queue if it was the last one."""
        options = session.subscriptions[topic_filter]
        super()._remove(session, topic_filter)
        if shared_pattern(topic_filter) is not None:
            if topic_filter not in self._groups and (shared := self._shared.pop(topic_filter, None)):
                self._engine.share(shared, on=False)
                self._unused[topic_filter] = clock.now()
                self._unused_of[topic_filter] = session.user
                self._count_subscription(session.user, topic_filter, 1)
            return
        if not (isinstance(session, ClientSession) and session.has_queue and options.qos):
            self._engine.unbind(topic_filter.split("/"))

    # Shared subscriptions.

    def _share(self, topic_filter: str) -> None:
        self._use(topic_filter)
        if topic_filter in self._shared or (shared_pattern(topic_filter) or [])[:1] == [SYS]:
            return  # `$SYS` is shared within this replica
        queue = queue_of(self._engine.names.shares, topic_filter)
        group, prefetch = self._groups[topic_filter], self.limits.in_flight_max
        shared = SharedQueue(self._engine, group, queue, self._shared_arguments(), prefetch)
        self._shared[topic_filter] = shared
        self._engine.share(shared, on=True)

    def _use(self, topic_filter: str) -> None:
        """Note that a shared filter has a member again, or that its queue is deleted.

        Until then it counts for the user of its last member here: its queue exists, and a client could leave
        behind any number of them.
        """
        self._unused.pop(topic_filter, None)
        user = self._unused_of.pop(topic_filter, None)
        if user is not None:
            self._count_subscription(user, topic_filter, -1)

    def _sweep_shares(self, consumers: Consumers, now: float) -> None:
        for shared in self._shared.values():
            consumers.begin(shared)  # in case its node or the cluster was down
        is_due = any(now - since >= GRACE_SECS for since in self._unused.values())
        if not self._is_listing and (is_due or now - self._listed >= LIST_SECS):
            self._is_listing, self._listed = True, now
            self._list_shares(consumers, now, set(), "")

    def _list_shares(self, consumers: Consumers, now: float, live_filters: set[str], after: str) -> None:
        """Query the shared filters that sessions of all replicas have, page by page."""

        def listed(reply: Reply[list[str]]) -> None:
            if reply.value is None:
                self._is_listing = False
                return
            live_filters.update(reply.value)
            if len(reply.value) < SHARED_FILTERS_MAX:
                self._is_listing = False
                self._listed_shares(consumers, now, live_filters)
            else:
                self._list_shares(consumers, now, live_filters, reply.value[-1])

        self._state.query(SharedFilters(after, SHARED_FILTERS_MAX), listed)

    def _listed_shares(self, consumers: Consumers, now: float, live_filters: set[str]) -> None:
        """Delete the queues of shared subscriptions that have ended, unless other replicas consume them.

        `live_filters` has those that went on at `now`. If that was long ago, or the connection was lost
        meanwhile, nothing is deleted before the next list. The expiry of queues that only sessions of
        disconnected clients need is restarted.
        """
        if not consumers.is_live:
            return
        for topic_filter in self._shared_of_all - live_filters - self._shared.keys():
            self._unused.setdefault(topic_filter, now)
        self._shared_of_all = live_filters
        is_recent = clock.now() - now <= LIST_AGE_SECS_MAX
        for topic_filter, unused_at in list(self._unused.items()):
            if is_recent and now - unused_at >= GRACE_SECS:
                self._use(topic_filter)
                if topic_filter not in live_filters and topic_filter not in self._shared:
                    consumers.remove(queue_of(self._engine.names.shares, topic_filter))
        if now - self._touched >= TOUCH_SECS:
            self._touched = now
            for topic_filter in live_filters - self._shared.keys():
                consumers.touch(queue_of(self._engine.names.shares, topic_filter))

    # QoS 2.

    def _sweep_walks(self, now: float) -> None:
        """Forget which messages walks have sent, some time after the last walk: live messages may be late."""
        waiting: dict[Session, set[str]] = {}
        for walking, topic_filter, _ in chain(self._walks, *self._barrier_walks):
            waiting.setdefault(walking, set()).add(topic_filter)
        for session, ended_at in list(self._walking.items()):
            goes_on = {*session.walks, *waiting.get(session, ())}
            if session.walked is not None:
                session.walked.end_all_but(goes_on)
            if self.sessions.get(session.client_id) is not session:
                del self._walking[session]
            elif goes_on:
                self._walking[session] = None
            elif ended_at is None and session.walked is not None and session.walked.has_sent:
                self._walking[session] = now
            elif ended_at is None or now - ended_at >= WALKED_SECS:
                session.walked = None
                del self._walking[session]

    def _number_of(self, part: SubBatch, at: int) -> Number | None:
        """Return the number by which the replicas of subscribers recognize a client's message, or None."""
        receipt = part.batch.receipts[part.slots[at]]
        session = _session_of(receipt)
        ids = None if session is None else session.received_ids
        return ids.number(receipt[1]) if isinstance(ids, SharedReceivedIds) else None

    def _epoch_of(self, part: SubBatch, at: int) -> tuple[str, int]:
        """Return the client that sent a message, and the epoch of its session; "" and 0 if there is none."""
        session = _session_of(part.batch.receipts[part.slots[at]])
        return (session.client_id, session.owner.epoch) if isinstance(session, ClientSession) else ("", 0)

    def reserve_packet_ids(self, session: Session, packet_ids: list[int]) -> None:
        """Store the packet ids of a session's QoS 2 messages before these are published.

        Raises Pending until they are stored, and Superseded if the session has another owner.
        """
        ids = session.received_ids
        if not isinstance(ids, SharedReceivedIds):
            return
        if ids.is_lost:
            raise Superseded
        announced = ids.announce(packet_ids)
        if not announced:
            return
        assert isinstance(session, ClientSession)
        stored = trio.Event()

        def on_stored(outcome: Outcome) -> None:
            ids.record_stored(announced, outcome)
            stored.set()

        self._engine.after_stored(session, on_stored)
        raise Pending(stored)

    # Sessions.

    def user_of(self, client_id: str) -> str | None:
        """Return the user of a client's session, or None if there is no session or it is not known yet.

        A session that a client has just replaced is its user's, too: the new one needs no further capacity.
        """
        if client_id in self._refused:
            return self._refused[client_id][1]
        arrival = self._arrived.get(client_id)
        if arrival is not None:
            found = arrival.found
            return found.user if found.present or found.earlier is not None else None
        return super().user_of(client_id)

    def is_pending(self, client_id: str) -> bool:
        """Return True until the database has replied if a client has a session."""
        return bool(client_id) and client_id not in self._arrived

    def has_session(self, client_id: str) -> bool:
        """Return True if a client that is about to be accepted has an earlier session."""
        arrival = self._arrived.get(client_id)
        return arrival is not None and arrival.found.present

    def resumable(self, client_id: str) -> Mapping[str, SubscriptionOptions]:
        """Return the subscriptions of the session that a client which has arrived would resume."""
        arrival = self._arrived.get(client_id)
        if arrival is None or not arrival.found.present:
            return {}
        found = arrival.found.contents.subscriptions
        return {topic_filter: decode_options(options) for topic_filter, options in found.items()}

    def sessions_of(self, user: str) -> int:
        """Return the number of sessions of a user, at all replicas."""
        return super().sessions_of(user) + self._engine.sessions.elsewhere.of(user).sessions

    def subscriptions_of(self, user: str) -> int:
        """Return the number of subscriptions of a user, those of sessions elsewhere included."""
        return super().subscriptions_of(user) + self._engine.sessions.elsewhere.of(user).subscriptions

    def subscriptions_full(self, user: str, topic_filter: str) -> bool:
        """Return True if that user may not make this further subscription.

        One whose queue already counts for the user needs no further capacity.
        """
        if self._unused_of.get(topic_filter) == user:
            return False
        return super().subscriptions_full(user, topic_filter)

    @property
    def all_subscriptions(self) -> int:
        """Number of subscriptions of all users, those of sessions elsewhere included."""
        return self.subscriptions + self._engine.sessions.elsewhere.subscriptions

    def definitions_full(self, user: str, byte_count: int) -> bool:
        """Return True if further `byte_count` of definitions do not fit, and count a refusal.

        The limit of all users is for this process; the share of one user includes sessions elsewhere.
        """
        shares, elsewhere = self.definition_shares, self._engine.sessions.elsewhere.of(user)
        limit = shares.limit_of_all(byte_count) or shares.limit_of_user(
            user, byte_count + elsewhere.byte_count
        )
        if limit:
            shares.refuse(user, limit, 1)
        return bool(limit)

    def make_room(self, user: str, place: str, client_id: str = "") -> str:
        """Make another session possible. Return the limit that forbids it, or "".

        The sessions of all replicas have a limit, too; none is ended for another.
        """
        if self._engine.sessions.count > self.sessions_max:
            return "sessions_max"
        return super().make_room(user, place, client_id)

    def prepare_client(self, guest: object, coming: ConnectingClient) -> None:
        """Request the session of a connecting client from the database.

        Raises Pending until the reply has arrived.
        """
        assert isinstance(guest, MqttGuest)
        arrival = self._arrived.get(coming.client_id)
        if arrival is not None and arrival.opening.guest is guest:
            return
        opening = Opening(guest, coming)
        self._engine.sessions.open(opening)
        raise Pending(opening)

    def add_arrival(self, arrival: OpeningClient) -> None:
        """Record that a client may be accepted, with the session that the database has found."""
        self._arrived[arrival.opening.client] = arrival

    def deny_opening(self, opening: Opening, user: str) -> None:
        """Record that the requested session belongs to another user.

        `user` is that user. The client is denied when it is checked next.
        """
        self._refused[opening.client] = opening, user
        opening.answer()

    def session_of(self, client: str) -> ClientSession | None:
        """Return the session of a client that is connected here, or None."""
        session = self.sessions.get(client)
        return session if isinstance(session, ClientSession) else None

    def connected(self) -> Iterable[ClientSession]:
        """Return the sessions of all clients that are connected here."""
        return [one for one in self.sessions.values() if isinstance(one, ClientSession)]

    def is_expected(self, client: str) -> bool:
        """Return True if the database has opened the client's session but the client is not accepted yet."""
        return client in self._arrived

    def dropped(self, *, expired: bool) -> None:
        """Count a message that a queue has dropped because it was full, or because it `expired` there."""
        self.tally.expired += expired
        self.tally.queue_full += not expired

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Run the timer, once per second; `now` is in loop-clock seconds.

        The timer serves shared subscriptions and walks, and removes clients that left before they were
        accepted.
        """
        self._sweep_shares(consumers, now)
        self._sweep_walks(now)
        unbound, self._unbound = self._unbound, []
        for session, done, outcome in unbound:
            if self.sessions.get(session.client_id) is session:
                self._read(session, done, outcome)
        for client, arrival in list(self._arrived.items()):
            if arrival.opening.guest.stream.closed:
                del self._arrived[client]
                self._engine.sessions.abandon_arrival(arrival)
        for client, (opening, _) in list(self._refused.items()):
            if opening.guest.stream.closed:
                del self._refused[client]

    def open(
        self, client_id: str, *, clean: bool, expiry_secs: float, user: str = "", place: str = ""
    ) -> tuple[Session, bool]:
        """Return the session of a client that has arrived, and True if it is resumed.

        The session belongs to `user` at `place` and outlives its connection by `expiry_secs`.
        """
        opening, _, owner, found = self._arrived.pop(client_id)
        session = ClientSession(client_id, self.limits, self.tally, self._engine, owner)
        session.user, session.place, session.expiry_secs = user, place, expiry_secs
        self.sessions[client_id] = session
        self._count(session)
        if opening.coming.will is not None:
            self._engine.sessions.serve(session)
            self._change_count += 1  # CONNACK waits until the will is stored
        if found.queue:
            session.begin(found.contents, found.queue, self._arguments)
            session.fresh = not found.present
            for topic_filter, options in found.contents.subscriptions.items():
                self._enter(session, topic_filter, decode_options(options))
            self._change_count += bool(found.contents.subscriptions)
            self._engine.sessions.acquire(session, found)
        return session, found.present

    def detach_session(self, session: Session, now: float) -> None:
        """Release a session that outlives its connection, because its client has disconnected."""
        self._part(session)

    def discard(self, session: Session) -> None:
        """End a session whose client is connected here."""
        session.expiry_secs = 0.0
        self._part(session)

    def _part(self, session: Session) -> None:
        if self.sessions.get(session.client_id) is not session:
            return
        assert isinstance(session, ClientSession)
        self.requeue_shared(session, ended=True)
        for topic_filter in list(session.subscriptions):
            self._remove_local(session, topic_filter)
        del self.sessions[session.client_id]
        self._forget_owner(session)
        self._engine.sessions.leave(session, self._lost.pop(session.client_id, None))

    def requeue_shared(self, session: Session, *, ended: bool = False) -> None:
        """Requeue unacknowledged messages of shared subscriptions, because the client was lost."""
        if isinstance(session, ClientSession):
            session.requeue_shared()

    def queue_sessions(self) -> list[ClientSession]:
        """Return the sessions with a queue whose clients are connected here."""
        return [one for one in self.sessions.values() if isinstance(one, ClientSession) and one.has_queue]

    def handle_new_owner(self, client: str, owner: Owner | None, *, at_once: bool) -> None:
        """Disconnect a client whose session has another owner now, or none (None).

        `at_once` is True if the new owner is a connection to this replica in this wake-up.
        """
        waiting = self._arrived.get(client)
        if waiting is not None and waiting.owner != owner:
            del self._arrived[client]
            waiting.opening.deny(TAKEN_OVER)
            self._engine.sessions.abandon_arrival(waiting)
        session = self.session_of(client)
        if session is None or session.owner == owner or (session.is_stopped and not at_once):
            return  # or it is being disconnected already
        outlet: object = session.outlet
        if not isinstance(outlet, MqttGuest):
            return
        log.info("client reconnected, previous connection closed", client=client)
        patient = session.has_queue and not at_once
        self._engine.sessions.moved += not at_once
        if patient:
            session.stop()
        try:
            outlet.handle_takeover(patient=patient)
        except Exception as error:  # it concerns one client
            outlet.stream.fail(error)

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        """Abort the connection of a client for a reason; it must reconnect."""
        outlet: object = session.outlet
        if isinstance(outlet, MqttGuest):
            outlet.stream.abort(why)

    # Wills.

    @property
    def claims_wills(self) -> bool:
        """True: other replicas may publish a will, too, so it must be claimed before it is published."""
        return True

    def keep_will(self, client_id: str, will: Will | None, sender: Sender, principal: Principal) -> None:
        """Keep the claim of the will that is being published until `forget_will` is called with `client_id`.

        Other wills need no record here, because the database has them since the session was opened.
        """
        if self._claimed is not None:
            self._publishing[client_id], self._claimed = self._claimed, None

    def delay_will(self, client_id: str, at: float, publish: Callable[[], None]) -> None:
        """Have the database decide if the will of a lost client is published now, with `publish`.

        If `at` is OVERDUE, the will was claimed or refused before, and is published at the next tick.
        """
        if at <= OVERDUE:
            super().delay_will(client_id, at, publish)
        else:
            self._lost[client_id] = publish

    def publish_claimed(self, claim: ClaimedWill, publish: Callable[[], None]) -> None:
        """Publish a claimed will.

        If this process ends before the cluster has it, another replica publishes it.
        """
        self._claimed = claim
        try:
            publish()
        finally:
            claimed, self._claimed = self._claimed, None
            if claimed is not None:  # it was not published, or is settled already
                self._engine.sessions.settle_will(claimed.key, claimed.epoch)

    def publish_kept_will(self, key: str, publish: Callable[[], None]) -> None:
        """Publish a will, unless its claim is ending: then another replica claims and publishes it."""
        claim = self._publishing.pop(key, None)
        if claim is None:
            publish()
        elif not claim.is_ending:
            self.publish_claimed(claim, publish)

    def _publish_will(self, client_id: str) -> None:
        claim = self._publishing.get(client_id)
        if claim is not None and claim.is_ending:
            self._wills.pop(client_id, None)
        self.publish_kept_will(client_id, partial(MqttNamespace._publish_will, self, client_id))

    @property
    def has_ending_claims(self) -> bool:
        """True if wills are being published that another replica may publish soon."""
        return any(claim.is_ending for claim in self._publishing.values())

    def is_left_to_others(self, receipt: Receipt) -> bool:
        """Return True if a message must not be sent here any more: it is a will whose claim is ending."""
        claim = self._publishing.get(receipt.key) if isinstance(receipt, SentWill) else None
        return claim is not None and claim.is_ending

    def publish_due_will(self, claim: ClaimedWill, message: bytes) -> None:
        """Publish the due will of a client that is not connected here."""
        key, epoch, _ = claim
        try:
            will, sender, principal = decode_will(key.client, message)
        except StoreError as error:
            log.error("will unreadable, discarded", client=key.client, why=str(error))
            self._engine.sessions.settle_will(key, epoch)
            return
        name = self.new_will_key(key.client)
        self._publishing[name] = claim
        self._left_wills.append(LeftWill(will, sender, principal, 0.0, name))
        self.adopt()
        self._publish_will(name)

    def forget_will(self, key: str) -> None:
        """Settle a claimed will in the database, because it is published or void."""
        claim = self._publishing.pop(key, None)
        if claim is not None:
            self._engine.sessions.settle_will(claim.key, claim.epoch)

    def end_delays(self) -> bool:
        """Return False: at the end of the process delayed wills are left to other replicas."""
        self._engine.stopped = True
        return False


def _pull(session: Session) -> None:
    outlet: object = session.outlet
    if isinstance(outlet, AdmittedGuest):
        outlet.send_due_retained()


def _session_of(receipt: Receipt) -> Session | None:
    """Return the session of the client that has published a message, or None if there is none."""
    is_publish = isinstance(receipt, tuple) and isinstance(receipt[0], AdmittedGuest)
    return receipt[0].session if is_publish else None


def _is_new(sink: Sink, message: Message, number: Number | None) -> bool:
    if not isinstance(sink, Grant) or not isinstance(sink.session, ClientSession):
        return True
    walked = sink.session.walked
    return walked is None or walked.is_new(message, number, sink.qos)


def _by_own_queue(sink: Sink) -> bool:
    """Return True if a sink gets messages by the queue of its session or of a shared subscription."""
    return isinstance(sink, SharedGroup) or (
        isinstance(sink, Grant)
        and sink.qos > 0
        and isinstance(sink.session, ClientSession)
        and sink.session.has_queue
    )

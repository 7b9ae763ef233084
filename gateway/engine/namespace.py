"""MQTT topics, sessions and subscriptions of one replica of the shared engine.

Subscriptions are those of this replica's clients; topics are common to all replicas. A connecting client is
accepted when the shared database has reported the session that it finds. A session is in memory here while
its client is connected; afterwards it is in the database, and its messages are in its queue. Wills are in the
database, too: the replica that claims one there publishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, TypeGuard

import structlog
import trio

from gateway import clock
from gateway.access.principal import Principal
from gateway.broker.mqtt.namespace import (
    OVERDUE,
    ConnectingClient,
    EngineCapabilities,
    MqttNamespace,
    SessionShares,
    UnpublishedWill,
)
from gateway.broker.mqtt.records import will_bytes
from gateway.broker.mqtt.session import WALKS_MAX, Grant, Session, SessionLimits, SubscriptionOptions
from gateway.broker.mqtt.shared_subscriptions import SharedGroup, shared_pattern
from gateway.broker.mqtt.system import SYS
from gateway.engine.arguments import type_arguments
from gateway.engine.claims import ClaimedWill
from gateway.engine.client_session import ClientSession, SharedReceivedIds
from gateway.engine.consumers import Consumers, QueueOwner
from gateway.engine.envelope import ENGINE, Number
from gateway.engine.pending_clients import OpeningClient, PendingOpen
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
from gateway.engine.walks import SentRetained, SharedWalk
from gateway.errors import StoreError
from gateway.ingress.mqtt.admission import AdmittedMqttClient
from gateway.ingress.mqtt.ingress import SentWill
from gateway.ingress.mqtt.listener_client import MqttListenerClient
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
    1_500  # with a client identifier it fits into an index row of PostgreSQL (2 704 bytes)
)
LIST_SECS: Final = 60.0  # between two queries for shared subscriptions that have ended
WALKED_SECS: Final = 60.0  # how late a message may arrive live that was sent as a retained one


class Countdown:
    """Counter that calls a function after `count` events, or at once if `count` is 0."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._remaining = count
        self._then = then
        if not count:
            then()

    def count(self) -> None:
        """Count one event. Call the function if it was the last one."""
        self._remaining -= 1
        if not self._remaining:
            self._then()


class EngineNamespace(MqttNamespace):
    """MQTT topics, sessions and subscriptions of one replica."""

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
        self._change_count = 0  # see `change_count`
        # Walks that begin after the next `after_recorded` of their session.
        self._walks: dict[Session | None, list[Asked]] = {}
        self._barrier_walks: list[list[Asked]] = []  # walks that begin when pending bindings are confirmed
        # Sessions with walks: None while a walk is running, else when the last one ended (monotonic).
        self._walking: dict[ClientSession, float | None] = {}
        # Callbacks that wait until this replica owns the queue of a session and has bound it.
        self._unbound: list[tuple[ClientSession, Callable[[Outcome], None], Outcome]] = []
        self._arrived: dict[str, OpeningClient] = {}  # clients that are about to be accepted
        self._refused: dict[str, tuple[PendingOpen, str]] = {}  # clients whose session is another user's
        self._lost: dict[str, Callable[[], None]] = {}  # functions that publish wills of leaving clients
        # Wills that this replica has claimed, by the keys under which they are published, and the one whose
        # publishing is starting.
        self._publishing: dict[str, ClaimedWill] = {}
        self._claimed: ClaimedWill | None = None
        super().__init__(
            self._changed_filter,
            replace(limits, listeners=limits.listeners | {ENGINE}),
            definition_shares=definition_shares,
            shares=shares,
            sessions_max=sessions_max,
            retained=retained,
        )
        # A QoS 2 message that was sent belongs to its client even if that never returns: no other can get it.
        self.capabilities = EngineCapabilities(shared_qos_max=1)
        self.filter_bytes_max = FILTER_BYTES_MAX
        self._shared: dict[str, SharedQueue] = {}  # with members here, by filter
        self._unused: dict[str, float] = {}  # filters without a member here, and since when (monotonic)
        self._unused_of: dict[str, str] = {}  # users for whom unused filters count, by filter
        self._shared_of_all: set[str] = set()  # filters that sessions of all replicas have
        self._touched = self._listed = 0.0
        self._is_listing = False
        engine.serve(self, self._number_of, self._epoch_of, limits.listeners)
        self._arguments = self._queue_arguments()

    def _queue_arguments(self) -> Headers:
        """Return the arguments of a session's queue, which drops its oldest messages at its size limits.

        The queue does not expire; it is deleted when the session ends.
        """
        return (("x-single-active-consumer", Value(ValueType.BOOL, True)), *self._limit_arguments())

    def _shared_arguments(self) -> Headers:
        """Return the arguments of a shared subscription's queue, which expires after EXPIRES_SECS unused."""
        expires = Value(ValueType.INT64, int(EXPIRES_SECS * 1_000))
        return (("x-expires", expires), *self._limit_arguments())

    def _limit_arguments(self) -> Headers:
        """Return the arguments for the type and the size limits of a queue; dropped messages are counted."""
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
        """Number of changes made so far; clients get replies when the cluster and the database have them."""
        return self._change_count

    @property
    def unavailable(self) -> str:
        """Reason why no client can be accepted now; "" if clients can."""
        return self._engine.unavailable_reason

    @property
    def failing(self) -> bool:
        """True if the database of sessions cannot store changes now."""
        return bool(self._engine.sessions.unavailable_reason)

    def has_unstored_changes(self, before: int) -> bool:
        """Return True if `change_count` is not `before`, an earlier value of it.

        Then replies to clients must wait for `after_recorded`.
        """
        return self.change_count != before

    def after_recorded(self, session: Session | None, done: Callable[[Outcome], None]) -> None:
        """Call `done` with ACCEPTED when the cluster and the database have all changes until now.

        `session` is the session that was changed. `done` is called with another outcome if the session has
        another owner.
        """
        walks = self._walks.pop(session, [])
        self._barrier_walks.append(walks)
        self._engine.after_bound(session, partial(self._bound, session, walks, done))

    def _bound(
        self,
        session: Session | None,
        walks: list[Asked],
        done: Callable[[Outcome], None],
        outcome: Outcome,
    ) -> None:
        """Begin to send retained messages for new subscriptions, because they are bound; then call `_read`.

        `walks` has these subscriptions. The reply to the client waits for the first page of retained messages
        of each, so that messages published after the reply usually do not arrive twice. `done` and `outcome`
        are passed to `_read`.
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
        """Call `done` when the subscriptions of a session are stored; without a session, with `outcome` now.

        Called after the first pages of their retained messages have been read. Subscriptions are stored when
        the session's queue is bound, which takes longer while another owner has the queue.
        """
        if isinstance(session, ClientSession) and session.unbound and not session.is_stopped:
            self._unbound.append((session, done, outcome))
        elif isinstance(session, ClientSession):
            self._engine.after_stored(session, done)
        else:
            done(outcome)

    def _start_walk(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Start to send a subscriber the retained messages that a filter matches, page by page."""
        if topic_filter.split("/", 1)[0] == SYS:
            super()._start_walk(session, topic_filter, options)
            return

        def is_wanted(walk: SharedWalk) -> bool:
            return session.walks.get(topic_filter) is walk and session.outlet is not None

        session.walks[topic_filter] = SharedWalk(
            self._common,
            topic_filter,
            Grant(session, [options], retained=True),
            session.sent_retained if isinstance(session, ClientSession) else None,
            is_wanted,
            partial(_send_retained, session),
        )

    def exclude_already_sent(
        self, recipients: tuple[Recipient, ...], message: Message, number: Number | None
    ) -> tuple[Recipient, ...]:
        """Return those of `recipients` that have not got this published message as a retained one before.

        `number` is the message's number, None below QoS 2.
        """
        if not self._walking:
            return recipients
        return tuple(one for one in recipients if _is_new(one.sink, message, number))

    def commit_notifier(self, session: Session) -> Callable[[Callable[[Outcome], None]], None] | None:
        """Return a function that registers a callback for when PUBREL and PUBCOMP may be sent; None if now.

        For a session with a queue they wait until the database has stored the changed QoS 2 state.
        """
        if isinstance(session, ClientSession) and session.has_queue:
            return partial(self._engine.after_stored, session)
        return None

    # Topics.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Return the sinks (destinations) of messages to a topic.

        For a `$SYS` topic these are this replica's subscribers, for any other topic the cluster.
        """
        return super().sinks(address) if address.name.startswith(SYS) else self._engine.sinks(address)

    def local_subscribers(self, address: Address) -> tuple[Sink, ...]:
        """Return this replica's subscribers of a topic that get its messages by the replica's queue."""
        return tuple(sink for sink in super().sinks(address) if not _by_own_queue(sink))

    def subscribe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Add or replace a subscription. Retained messages are sent when its binding is confirmed."""
        before = session.subscriptions.get(topic_filter)
        self._add_subscription(session, topic_filter, options)
        if options != before and _is_stored(session, topic_filter):
            session.subscribed(topic_filter, options, before)
        self._change_count += 1
        if shared_pattern(topic_filter) is not None:
            return
        if topic_filter.split("/", 1)[0] == SYS:
            self.system.show()
        if options.retain_handling == 0 or (options.retain_handling == 1 and before is None):
            self._walks.setdefault(session, []).append((session, topic_filter, options))
            if isinstance(session, ClientSession):
                session.sent_retained = session.sent_retained or SentRetained()
                session.sent_retained.begin(topic_filter, is_first=before is None)
                self._walking[session] = None

    def _add_subscription(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Add a subscription of a session at this replica, and make its messages arrive here.

        The replica's queue is bound, or the queue of a shared filter is consumed; a session's own queue is
        bound elsewhere.
        """
        before = session.subscriptions.get(topic_filter)
        super()._add_subscription(session, topic_filter, options)
        if shared_pattern(topic_filter) is not None:
            self._consume_shared(topic_filter)
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
        if isinstance(session, ClientSession) and session.sent_retained is not None:
            session.sent_retained.end(topic_filter)
        self._change_count += 1
        if _is_stored(session, topic_filter):
            session.subscribed(topic_filter, None, options)

    def _remove_local(self, session: Session, topic_filter: str) -> None:
        """Remove a subscription of a session from this replica.

        The replica's queue is unbound from its key if no other subscription needs the key. The queue of a
        shared filter that has no more members at this replica is not consumed any more.
        """
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

    def _consume_shared(self, topic_filter: str) -> None:
        """Consume the queue of a shared filter, because it has a member at this replica."""
        self._use(topic_filter)
        if topic_filter in self._shared or (shared_pattern(topic_filter) or [])[:1] == [SYS]:
            return  # `$SYS` is shared within this replica
        queue = queue_of(self._engine.names.shares, topic_filter)
        group, prefetch = self._groups[topic_filter], self.limits.in_flight_max
        shared = SharedQueue(self._engine, group, queue, self._shared_arguments(), prefetch)
        self._shared[topic_filter] = shared
        self._engine.share(shared, on=True)

    def _use(self, topic_filter: str) -> None:
        """Stop counting an unused shared filter as a subscription of its last member's user.

        Called when the filter has a member at this replica again, or when its queue is deleted. Until then it
        counts for that user, because its queue exists, and a client could leave behind any number of them.
        """
        self._unused.pop(topic_filter, None)
        user = self._unused_of.pop(topic_filter, None)
        if user is not None:
            self._count_subscription(user, topic_filter, -1)

    def _sweep_shares(self, consumers: Consumers, now: float) -> None:
        """Consume the queues of shared filters with members here; query now and then which are in use.

        `now` is in loop-clock seconds.
        """
        for shared in self._shared.values():
            consumers.begin(shared)  # in case its node or the cluster was down
        is_due = any(now - since >= GRACE_SECS for since in self._unused.values())
        if not self._is_listing and (is_due or now - self._listed >= LIST_SECS):
            self._is_listing, self._listed = True, now
            self._list_shares(consumers, now, set(), "")

    def _list_shares(self, consumers: Consumers, now: float, live_filters: set[str], after: str) -> None:
        """Query the shared filters that sessions of all replicas have, page by page, into `live_filters`.

        `after` is the last filter of the previous page ("" for the first page). After the last page the
        unused queues are deleted. `now` is when the first page was queried, in loop-clock seconds.
        """

        def listed(reply: Reply[list[str]]) -> None:
            if reply.value is None:
                self._is_listing = False
                return
            live_filters.update(reply.value)
            if len(reply.value) < SHARED_FILTERS_MAX:
                self._is_listing = False
                self._delete_ended_shares(consumers, now, live_filters)
            else:
                self._list_shares(consumers, now, live_filters, reply.value[-1])

        self._state.query(SharedFilters(after, SHARED_FILTERS_MAX), listed)

    def _delete_ended_shares(self, consumers: Consumers, now: float, live_filters: set[str]) -> None:
        """Delete the queues of shared subscriptions that have ended, unless other replicas consume them.

        `live_filters` has the filters that some session had at `now` (loop-clock seconds). If that was long
        ago, or the connection was lost meanwhile, nothing is deleted before the next list. The expiry of
        queues that only sessions of disconnected clients need is restarted.
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
        """Forget which retained messages were sent to a session, some time after all of them were sent.

        Until then they are remembered, because the same messages may still arrive as published ones. `now` is
        in loop-clock seconds.
        """
        waiting: dict[Session, set[str]] = {}
        for walking, topic_filter, _ in chain(*self._walks.values(), *self._barrier_walks):
            waiting.setdefault(walking, set()).add(topic_filter)
        for session, ended_at in list(self._walking.items()):
            goes_on = {*session.walks, *waiting.get(session, ())}
            if session.sent_retained is not None:
                session.sent_retained.end_all_but(goes_on)
            if self.sessions.get(session.client_id) is not session:
                del self._walking[session]
            elif goes_on:
                self._walking[session] = None
            elif ended_at is None and session.sent_retained is not None and session.sent_retained.has_sent:
                self._walking[session] = now
            elif ended_at is None or now - ended_at >= WALKED_SECS:
                session.sent_retained = None
                del self._walking[session]

    def _number_of(self, sub_batch: SubBatch, at: int) -> Number | None:
        """Return the stored number of the message at position `at` of a sub-batch, or None if it has none.

        By this number the replicas of subscribers recognize a repeated QoS 2 message.
        """
        receipt = sub_batch.batch.receipts[sub_batch.slots[at]]
        session = _session_of(receipt)
        ids = None if session is None else session.received_ids
        return ids.number(receipt[1]) if isinstance(ids, SharedReceivedIds) else None

    def _epoch_of(self, sub_batch: SubBatch, at: int) -> tuple[str, int, bool]:
        """Return a message's client, the epoch of the client's session, and True if the message is a will.

        `at` is the message's position in `sub_batch`. Without a session at this replica, and for messages
        that no MQTT client has sent, return "", 0 and False.
        """
        receipt = sub_batch.batch.receipts[sub_batch.slots[at]]
        claim = self._publishing.get(receipt.key) if isinstance(receipt, SentWill) else None
        if claim is not None:
            return claim.key.client, claim.epoch, True
        session = _session_of(receipt)
        if isinstance(session, ClientSession):
            return session.client_id, session.owner.epoch, False
        return "", 0, False

    def reserve_packet_ids(self, session: Session, packet_ids: list[int]) -> None:
        """Store the packet ids of QoS 2 messages that a client has sent, before the messages are published.

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
        """Return the user of the session of this client, None if there is no session or it is not known yet.

        If the client has just replaced its session, the old one counts as its user's, so the new one needs no
        further capacity. It does not count if no replica had accepted the client with it.
        """
        opening, user = self._refused.get(client_id, (None, ""))
        if opening is not None and user != opening.connecting.sender.user:  # else its will exceeds the limit
            return user
        arrival = self._arrived.get(client_id)
        if arrival is not None:
            found = arrival.found
            return found.user if found.earlier is not None and found.earlier.is_accepted else None
        return super().user_of(client_id)

    def is_pending(self, client_id: str) -> bool:
        """Return True until the database has reported the session of a connecting client."""
        return bool(client_id) and client_id not in self._arrived

    def has_session(self, client_id: str) -> bool:
        """Return True if a client that is about to be accepted will resume a session."""
        arrival = self._arrived.get(client_id)
        return arrival is not None and arrival.found.present

    def replaces_connection(self, client_id: str, user: str) -> bool:
        """Return True if a connecting client of `user` takes the place of its own connection to this replica.

        The earlier connection is closed when the database has opened the session, before the client is
        accepted.
        """
        arrival = self._arrived.get(client_id)
        earlier = None if arrival is None else arrival.found.earlier
        if earlier is None:
            return super().replaces_connection(client_id, user)
        return earlier.is_here and earlier.user == user

    def resumable_expiry_secs(self, client_id: str) -> float:
        """Return the expiry in seconds of the session that a connecting client will resume, 0 without one."""
        arrival = self._arrived.get(client_id)
        return arrival.found.expiry_secs if arrival is not None and arrival.found.present else 0.0

    def resumable(self, client_id: str) -> Mapping[str, SubscriptionOptions]:
        """Return the subscriptions of the session that a connecting client will resume, by filter.

        Without such a session, or before the database has reported it, the result is empty.
        """
        arrival = self._arrived.get(client_id)
        if arrival is None or not arrival.found.present:
            return {}
        found = arrival.found.contents.subscriptions
        return {topic_filter: decode_options(options) for topic_filter, options in found.items()}

    def sessions_of(self, user: str) -> int:
        """Return the number of sessions of a user at all replicas, connected or not."""
        return super().sessions_of(user) + self._engine.sessions.elsewhere.of(user).sessions

    def subscriptions_of(self, user: str) -> int:
        """Return the number of subscriptions in all sessions of a user, at all replicas."""
        return super().subscriptions_of(user) + self._engine.sessions.elsewhere.of(user).subscriptions

    def subscriptions_full(self, user: str, topic_filter: str) -> bool:
        """Return True if a limit forbids the user to subscribe to this further filter.

        A shared filter whose queue already counts for the user needs no further capacity.
        """
        if self._unused_of.get(topic_filter) == user:
            return False
        return super().subscriptions_full(user, topic_filter)

    @property
    def all_subscriptions(self) -> int:
        """Number of subscriptions of all users, at all replicas."""
        return self.subscriptions + self._engine.sessions.elsewhere.subscriptions

    def definitions_full(self, user: str, byte_count: int) -> bool:
        """Return True if a user's definitions must not grow by `byte_count`, and count the refusal.

        The limit of all users together is for this process only. In the user's part of the limit, the
        sessions at other replicas are included.
        """
        shares, elsewhere = self.definition_shares, self._engine.sessions.elsewhere.of(user)
        limit = shares.exceeded_total_limit(byte_count) or shares.exceeded_user_limit(
            user, byte_count + elsewhere.byte_count
        )
        if limit:
            shares.refuse(user, limit, 1)
        return bool(limit)

    def await_count(self, user: str, client_id: str) -> None:
        """Raise Pending if a user's sessions at other replicas were not counted since a client has connected.

        The last count may have an earlier session of the client that has ended since, with its subscriptions.
        """
        arrival, session = self._arrived.get(client_id), self.session_of(client_id)
        since = None if session is None else session.opened_at
        if arrival is not None:
            since = arrival.opening.opened_at
        sessions, elsewhere = self._engine.sessions, self._engine.sessions.elsewhere
        if since is not None and any(elsewhere.of(user)) and not elsewhere.is_counted(user, since):
            counted = trio.Event()
            sessions.after_count(user, counted.set)
            raise Pending(counted)

    def make_room(self, user: str, place: str, client_id: str = "") -> str:
        """Make capacity for another session of a user. Return the limit that forbids the session, or "".

        For that a session may be ended. `place` is the network address of the client `client_id`. The number
        of sessions at all replicas is limited, too: if it is exceeded, "sessions_max" is returned, and no
        session is ended.
        """
        if self._engine.sessions.count > self.sessions_max:
            return "sessions_max"
        return super().make_room(user, place, client_id)

    def prepare_client(self, connection: object, connecting: ConnectingClient) -> None:
        """Open the session of a connecting client in the database.

        Raises Pending until the reply has arrived.
        """
        assert isinstance(connection, MqttListenerClient)
        arrival = self._arrived.get(connecting.client_id)
        if arrival is not None and arrival.opening.connection is connection:
            return
        opening = PendingOpen(connection, connecting)
        self._engine.sessions.open(opening)
        raise Pending(opening)

    def add_arrival(self, arrival: OpeningClient) -> None:
        """Record the session that the database has reported for a client, which may be accepted now."""
        self._arrived[arrival.opening.client] = arrival

    def will_full(self, user: str, client_id: str, will: Will) -> bool:
        """Return True if the database has refused this will, as it exceeds the user's part of the limit.

        Only the database can check that: an earlier will of the client, which is replaced, may count at
        another replica.
        """
        denied = self._refused.get(client_id)
        is_full = denied is not None and denied[0].connecting.will is will and denied[1] == user
        if is_full:
            self.definition_shares.refuse(user, "limits.definitions_bytes_max", 1)
        return is_full

    def will_room(self, user: str) -> int:
        """Return by how many bytes the wills of a user may grow; negative if a limit is exceeded.

        The wills of clients that are connecting now count, too.
        """
        _, all_bytes, _, user_bytes = self.definition_shares.room_of(user)
        opening, elsewhere = self._engine.sessions.opening_wills, self._engine.sessions.elsewhere
        return min(all_bytes - opening.total, user_bytes - opening.of(user) - elsewhere.of(user).byte_count)

    def deny_opening(self, opening: PendingOpen, user: str) -> None:
        """Record that a connecting client (`opening`) is to be denied, as its session belongs to `user`.

        If `user` is the client's own user, its will exceeds the limit instead. The client is denied when its
        CONNECT is processed again, which happens now.
        """
        self._refused[opening.client] = opening, user
        opening.answer()

    def session_of(self, client: str) -> ClientSession | None:
        """Return the session of a client that is connected to this replica, or None."""
        session = self.sessions.get(client)
        return session if isinstance(session, ClientSession) else None

    def connected(self) -> Iterable[ClientSession]:
        """Return the sessions of all clients that are connected to this replica."""
        return [one for one in self.sessions.values() if isinstance(one, ClientSession)]

    def is_expected(self, client: str) -> bool:
        """Return True if the database has reported a client's session and its CONNECT is not accepted yet."""
        return client in self._arrived

    def dropped(self, *, expired: bool) -> None:
        """Count a message that a queue on the cluster has dropped.

        `expired` is True if the message had expired, and False if the queue was full.
        """
        self.tally.expired += expired
        self.tally.queue_full += not expired

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Run the timer, once per second; `now` is in loop-clock seconds.

        The timer consumes and deletes queues of shared subscriptions, forgets which retained messages were
        sent, and removes clients that disconnected before they were accepted.
        """
        self._sweep_shares(consumers, now)
        self._sweep_walks(now)
        unbound, self._unbound = self._unbound, []
        for session, done, outcome in unbound:
            if self.sessions.get(session.client_id) is session:
                self._read(session, done, outcome)
        for client, arrival in list(self._arrived.items()):
            if arrival.opening.connection.stream.closed:
                del self._arrived[client]
                self._engine.sessions.abandon_arrival(arrival)
        for client, (opening, _) in list(self._refused.items()):
            if opening.connection.stream.closed:
                del self._refused[client]

    def open(
        self, client_id: str, *, clean: bool, expiry_secs: float, user: str = "", place: str = ""
    ) -> tuple[Session, bool]:
        """Create the session of a client that is accepted. Return it, and True if a stored one is resumed.

        The session belongs to `user` at the network address `place` and outlives its connection by
        `expiry_secs`. `clean` has no effect here: the database has opened the session accordingly.
        """
        arrival = self._arrived.pop(client_id)
        owner, found = arrival.owner, arrival.found
        session = ClientSession(client_id, self.limits, self.tally, self._engine, owner)
        session.user, session.place, session.expiry_secs = user, place, expiry_secs
        session.opened_at = arrival.opening.opened_at
        self.sessions[client_id] = session
        self._count(session)
        self._change_count += self._engine.sessions.accept(session, arrival)  # then CONNACK waits for it
        if found.queue:
            session.begin(found.contents, found.queue, self._arguments)
            session.fresh = not found.present
            for topic_filter, options in found.contents.subscriptions.items():
                self._add_subscription(session, topic_filter, decode_options(options))
            self._change_count += bool(found.contents.subscriptions)
            self._engine.sessions.acquire(session, found)
        return session, found.present

    def detach_session(self, session: Session, now: float) -> None:
        """Remove the session of a client that has disconnected from this replica; the database retains it."""
        self._remove_session(session)

    def discard(self, session: Session) -> None:
        """End the session of a client that is connected to this replica."""
        session.expiry_secs = 0.0
        self._remove_session(session)

    def _remove_session(self, session: Session) -> None:
        """Remove a session with its subscriptions from this replica, and leave it in the database."""
        if self.sessions.get(session.client_id) is not session:
            return
        assert isinstance(session, ClientSession)
        self.requeue_shared(session, ended=True)
        for topic_filter in list(session.subscriptions):
            self._remove_local(session, topic_filter)
        del self.sessions[session.client_id]
        self._walks.pop(session, None)
        self._forget_owner(session)
        self._count_will(session.client_id, None, "")
        self._engine.sessions.leave(session, self._lost.pop(session.client_id, None))

    def requeue_shared(self, session: Session, *, ended: bool = False) -> None:
        """Requeue messages of shared subscriptions that a lost client has not acknowledged.

        `ended` has no effect here.
        """
        if isinstance(session, ClientSession):
            session.requeue_shared()

    def pending_queue(self, session: ClientSession, consumers: Consumers) -> QueueOwner | None:
        """Return the owner of a queue for which replies to this session's client wait, or None.

        It is the session, or the queue of one of its shared filters.
        """
        if consumers.is_pending(session):
            return session
        awaited, filters = consumers.awaited, session.subscriptions
        found: Iterable[object] = awaited
        if len(awaited) > len(filters):
            found = (shared for one in filters if (shared := self._shared.get(one)) in awaited)
        for one in found:
            if isinstance(one, SharedQueue) and one.group.filter in filters:
                return one
        return None

    def queue_sessions(self) -> list[ClientSession]:
        """Return the sessions of connected clients that have a queue on the cluster."""
        return [one for one in self.sessions.values() if isinstance(one, ClientSession) and one.has_queue]

    def handle_new_owner(self, client: str, owner: Owner | None, *, at_once: bool) -> None:
        """Close the connection of a client whose session now has another owner, `owner` (None: unknown).

        `at_once` is True if the client has connected to this replica again in this pass of the event loop.
        Otherwise a session with a queue is only stopped at first: a DISCONNECT that its client has sent may
        still arrive.
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
        if not isinstance(outlet, MqttListenerClient):
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
        """Abort the connection of a session's client for the reason `why`; the client must reconnect."""
        outlet: object = session.outlet
        if isinstance(outlet, MqttListenerClient):
            outlet.stream.abort(why)

    # Wills.

    @property
    def claims_wills(self) -> bool:
        """True: a will must be claimed before it is published, because other replicas may publish it, too."""
        return True

    def store_will(self, client_id: str, will: Will | None, sender: Sender, principal: Principal) -> None:
        """Record the claim of the will that is being published, for `forget_will` with this `client_id`.

        If no will is being published, count the will of a connected client. It need not be stored: the
        database has had it since the session was opened.
        """
        if self._claimed is not None:
            self._publishing[client_id], self._claimed = self._claimed, None
        elif (session := self.session_of(client_id)) is not None:
            self._count_will(client_id, will, sender.user)
            session.will_bytes = 0 if will is None else will_bytes(will)

    def delay_will(
        self,
        client_id: str,
        at: float,
        publish: Callable[[], None],
        dropped: Callable[[], None] | None = None,
        *,
        retry_at: float = OVERDUE,
    ) -> None:
        """Let the database determine when the will of a lost client is due; `publish` publishes it then.

        If `at` is OVERDUE, the will was claimed before, or the cluster has refused it: it is published by the
        first tick after `retry_at`. `dropped` is passed on to the superclass in this case.
        """
        if at <= OVERDUE:
            super().delay_will(client_id, at, publish, dropped, retry_at=retry_at)
        else:
            self._lost[client_id] = publish

    def publish_claimed(self, claim: ClaimedWill, publish: Callable[[], None]) -> None:
        """Publish a claimed will by calling `publish`. If that publishes nothing, delete the will's record.

        If this process ends before the cluster has the will, another replica publishes it.
        """
        self._claimed = claim
        try:
            publish()
        finally:
            claimed, self._claimed = self._claimed, None
            if claimed is not None:  # it was not published, or is settled already
                self._engine.sessions.settle_will(claimed.key, claimed.epoch)

    def publish_stored_will(self, key: str, publish: Callable[[], None]) -> None:
        """Publish a will by calling `publish`, unless its claim is ending.

        If the claim is ending, another replica claims and publishes the will. `key` is the `client_id` that
        was passed to `store_will`.
        """
        claim = self._publishing.pop(key, None)
        if claim is None:
            publish()
        elif not claim.is_ending:
            self.publish_claimed(claim, publish)

    def _publish_will(self, client_id: str) -> None:
        claim = self._publishing.get(client_id)
        if claim is not None and claim.is_ending and client_id in self._wills:
            self._wills.pop(client_id).dropped()
        self.publish_stored_will(client_id, partial(MqttNamespace._publish_will, self, client_id))

    @property
    def has_ending_claims(self) -> bool:
        """True if this replica has a claim of a will not yet published, and the claim is about to end.

        Then another replica may publish the will.
        """
        return any(claim.is_ending for claim in self._publishing.values())

    def is_left_to_others(self, receipt: Receipt) -> bool:
        """Return True if a message is a will that another replica may publish, because its claim is ending.

        Such a message must not be sent by this replica any more. `receipt` is that of the message.
        """
        claim = self._publishing.get(receipt.key) if isinstance(receipt, SentWill) else None
        return claim is not None and claim.is_ending

    def publish_due_will(self, claim: ClaimedWill, message: bytes) -> None:
        """Publish the encoded will `message`, claimed by this replica, of a client not connected to it."""
        key, epoch, _ = claim
        try:
            will, sender, principal = decode_will(key.client, message)
        except StoreError as error:
            log.error("stored will unreadable, discarded", client=key.client, why=str(error))
            self._engine.sessions.settle_will(key, epoch)
            return
        name = self.new_will_key(key.client)
        self._publishing[name] = claim
        self._left_wills.append(UnpublishedWill(will, sender, principal, 0.0, name))
        self.take_over_restored()
        self._publish_will(name)

    def forget_will(self, key: str) -> None:
        """Delete the claimed will with the key `key` in the database, because it was published or is void."""
        claim = self._publishing.pop(key, None)
        if claim is not None:
            self._engine.sessions.settle_will(claim.key, claim.epoch)

    def end_delays(self) -> bool:
        """Return False: when this process ends, other replicas publish the delayed wills."""
        self._engine.stopped = True
        return False


def _send_retained(session: Session) -> None:
    """Send a session's client the retained messages that were read for its new subscriptions."""
    outlet: object = session.outlet
    if isinstance(outlet, AdmittedMqttClient):
        outlet.send_due_retained()


def _session_of(receipt: Receipt) -> Session | None:
    """Return the session of the client that has published a message, or None without a session.

    `receipt` is that of the message at its source.
    """
    is_publish = isinstance(receipt, tuple) and isinstance(receipt[0], AdmittedMqttClient)
    return receipt[0].session if is_publish else None


def _is_stored(session: Session, topic_filter: str) -> TypeGuard[ClientSession]:
    """Return True if a subscription is stored in the database.

    Those of a session that ends with its connection are not, except to shared filters: other replicas must
    not delete the queue of such a filter, even if no replica consumes it for a moment.
    """
    return isinstance(session, ClientSession) and (
        session.has_queue or shared_pattern(topic_filter) is not None
    )


def _is_new(sink: Sink, message: Message, number: Number | None) -> bool:
    """Return True unless `sink` is a session that has received this message as a retained one.

    `number` is the message's number, None below QoS 2.
    """
    if not isinstance(sink, Grant) or not isinstance(sink.session, ClientSession):
        return True
    walked = sink.session.sent_retained
    return walked is None or walked.is_new(message, number, sink.qos)


def _by_own_queue(sink: Sink) -> bool:
    """Return True if `sink` gets its messages by its own queue, and not by the replica's queue.

    Such a sink is a session with a queue or a shared subscription.
    """
    return isinstance(sink, SharedGroup) or (
        isinstance(sink, Grant)
        and sink.qos > 0
        and isinstance(sink.session, ClientSession)
        and sink.session.has_queue
    )

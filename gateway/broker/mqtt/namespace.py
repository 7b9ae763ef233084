"""Topic tree of MQTT: subscriptions, retained messages and sessions.

With a store, sessions with an expiry, their subscriptions, and wills are restored after a restart
(records.py). The namespace is the dispatcher's view of MQTT: `sinks` returns the sessions and groups for a
topic. It also enforces per-user limits, publishes delayed wills and discards expired sessions.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import structlog
from mypy_extensions import mypyc_attr

from gateway import clock
from gateway.access.principal import Principal
from gateway.broker.matching_steps import MatchingSteps, filter_steps
from gateway.broker.mqtt.disconnected_sessions import DisconnectedSessions
from gateway.broker.mqtt.durable_session import DurableSession
from gateway.broker.mqtt.ended_sessions import EndedSessions
from gateway.broker.mqtt.records import INCOMING, SESSION, Records, will_bytes
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.mqtt.session import (
    Grant,
    OutcomeCallback,
    RetainedWalk,
    Session,
    SessionLimits,
    SessionTally,
    SubscriptionOptions,
    is_shared,
)
from gateway.broker.mqtt.shared_subscriptions import MemberTurns, SharedGroup, shared_pattern
from gateway.broker.mqtt.system import SYS, System
from gateway.broker.shares import Shares, filter_bytes, share_of, text_bytes
from gateway.broker.topics import Trie
from gateway.containment import contained
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.shares import NO_LIMIT, UserShares
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.spec import Property
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

log = structlog.get_logger(limited=True)

Subscriber = tuple[Session, SubscriptionOptions] | SharedGroup
OVERDUE: Final = 0.0
RETRIED_MAX: Final = 500  # refused wills that are published again at one tick
SHARED_FIRST: Final = 1_000  # messages that a session passes on as soon as its client is lost
EXPIRE_SECS: Final = 0.005  # time budget for discarding sessions at once
CHECKED_AT_ONCE: Final = 4  # sessions that look for expired messages
LEFTOVERS_MAX: Final = 10_000  # messages of ended sessions in memory that wait for a full disk


class SessionShares(NamedTuple):
    """Limits of the sessions and subscriptions of one user, and of the sessions from one client address.

    0 means the default, a part of the limit of all. With `evicts`, a session of a disconnected client is
    ended when a limit is reached. `matching_steps_user_max` limits the work that the filters of one user may
    add to the matching of one message (see matching_steps.py).
    """

    user_max: int = 0
    place_max: int = 0
    subscriptions_max: int = 1_000_000
    subscriptions_user_max: int = 0
    evicts: bool = True
    matching_steps_user_max: int = NO_LIMIT

    def per_user(self, sessions_max: int) -> int:
        """Return how many of the `sessions_max` sessions one user may have."""
        return share_of(sessions_max, self.user_max)

    def per_place(self, sessions_max: int) -> int:
        """Return how many of the `sessions_max` sessions clients of one address may have."""
        return share_of(sessions_max, self.place_max)

    @property
    def subscriptions_per_user(self) -> int:
        """Maximum number of subscriptions of one user."""
        return share_of(self.subscriptions_max, self.subscriptions_user_max)


class EngineCapabilities(NamedTuple):
    """Server capabilities that depend on the engine.

    These are the maximum QoS and the maximum QoS of shared subscriptions.
    """

    qos_max: int = 2
    shared_qos_max: int = 2


class ConnectingClient(NamedTuple):
    """Properties of a client that is connecting.

    `clean` is Clean Start, `expiry_secs` the Session Expiry Interval in seconds, and `place` the client's
    address. With `only_own` it may not resume a session of another user.
    """

    client_id: str
    clean: bool
    expiry_secs: float
    place: str
    will: Will | None
    sender: Sender
    only_own: bool
    principal: Principal


class UnpublishedWill(NamedTuple):
    """Will that an earlier process has not published, with the seconds until it is due.

    `key` is the key of its record in the store, if that is not the client id.
    """

    will: Will
    sender: Sender
    principal: Principal
    left_secs: float
    key: str = ""


class DelayedWill(NamedTuple):
    """Will whose publication is delayed.

    `publish` is called at `at` (monotonic seconds), or when the session ends before. `dropped` is called
    instead if this gateway does not publish the will. An overdue will is published at a tick, at `retry_at`
    (monotonic seconds) or later.
    """

    at: float
    publish: Callable[[], None]
    dropped: Callable[[], None]
    retry_at: float

    def is_overdue(self, now: float) -> bool:
        """Return True if an overdue will may be published at `now` (monotonic seconds)."""
        return self.at <= OVERDUE and self.retry_at <= now


@mypyc_attr(allow_interpreted_subclasses=True)
class MqttNamespace:
    """Subscriptions, retained messages and sessions of one gateway."""

    def __init__(
        self,
        changed: Callable[[list[str]], None],
        limits: SessionLimits | None = None,
        *,
        shares: SessionShares | None = None,
        sessions_max: int = 100_000,
        retained: RetainedTopics | None = None,
        store: Store | None = None,
        definition_shares: UserShares | None = None,
        ended_shares: UserShares | None = None,
    ) -> None:
        """Create the namespace, and restore it from `store`, which must not have been started.

        `changed` is called with the levels of a filter that has a new subscriber or has lost one. `limits`
        are for each session, `shares` for each user and address. `definition_shares` limits the bytes of
        subscriptions, client ids and wills; `ended_shares` limits the logs of ended sessions, whose messages
        other members of shared subscriptions must get.
        """
        self.limits = limits or SessionLimits()
        self.sessions_max = sessions_max
        self.capabilities = EngineCapabilities()
        self.filter_bytes_max = 65_535  # maximum size of a topic filter, whatever the settings allow
        self.evicted = 0  # sessions that were ended before their expiry, for others
        self._shares = shares or SessionShares()
        self.steps = MatchingSteps(self._shares.matching_steps_user_max)  # of all filters
        self.definition_shares = UserShares("definitions") if definition_shares is None else definition_shares
        self._users = Shares()
        self._places = Shares()
        self._away = DisconnectedSessions()
        self._subscribed: dict[str, int] = {}  # subscriptions by user
        self.retained = RetainedTopics() if retained is None else retained
        self.tally = SessionTally()
        self.sessions: dict[str, Session] = {}
        self.store = store
        self.records = None if store is None else Records(store)
        self._changed = changed
        self.system = System(self)
        self._trie: Trie[Subscriber] = Trie("+", "#")
        self._groups: dict[str, SharedGroup] = {}  # by filter
        self._members = 0  # of all groups
        self._wills: dict[str, DelayedWill] = {}  # by client id or key
        self.will_shares = UserShares("waiting wills")  # in those that were refused
        self._left_wills: list[UnpublishedWill] = []
        self._defined_wills: dict[str, tuple[str, int]] = {}  # users and bytes of wills, by client id or key
        # Called after the start: a listener takes over the sessions that were restored.
        self.take_over_restored: Callable[[], None] = _do_nothing
        self._sent_wills = 0  # since this process started
        self._born = clock.unix_time_ns()  # distinguishes keys from those of an earlier process
        self._set_aside: set[str] = set()  # clients whose sessions could not be restored
        self._left_sessions: list[Session] = []  # `expires_at` is still the remaining time
        # Lost sessions that are passing their messages on, in portions.
        self._sharing: dict[Session, Iterator[int]] = {}
        self._unshared: dict[Session, None] = {}  # could not pass on everything, because the disk was full
        self._leftovers: deque[tuple[str, Message]] = deque()  # of sessions that ended then: filter, message
        self._expired_sessions: deque[Session] = deque()  # sessions that have expired
        self._checking: list[Session] = []  # sessions that look for expired messages on disk
        self._ended: EndedSessions | None = None
        if store is not None:
            shares_of_ended = UserShares("ended sessions") if ended_shares is None else ended_shares
            self._ended = EndedSessions(store, self.tally, self._pass_to_member, shares_of_ended)
        if self.records is not None:
            self._restore(self.records)

    # From an earlier process.

    def _restore(self, records: Records) -> None:
        """Restore sessions, subscriptions and wills from the records of an earlier process."""
        durable_sessions: dict[str, DurableSession] = {}
        shared = records.store.logs_tagged(is_shared)
        for client, record in records.sessions():
            with contain_failure("session", client):
                session = DurableSession(client, self.limits, self.tally, records)
                session.restore(record)
                # It may have unsubscribed since, so its subscriptions do not say so.
                session.shares = session.log.id in shared
                durable_sessions[client] = session
                self._count(session)
        self.sessions.update(durable_sessions)
        self._set_aside = {log.name for log in records.store.logs() if log.kind == SESSION} - set(
            durable_sessions
        )
        for client, topic_filter, options in records.subscriptions():
            if client in durable_sessions:
                with contain_failure("subscription", (client, topic_filter)):
                    self._add_subscription(durable_sessions[client], topic_filter, options)
        for client, topic_filter in records.retained_due():
            if (
                client in durable_sessions
                and (owing := durable_sessions[client].subscriptions.get(topic_filter)) is not None
            ):
                self._start_walk(durable_sessions[client], topic_filter, owing)
        self._restore_packet_ids(records, durable_sessions)
        for session in durable_sessions.values():
            session.expires_at = session.expiry_secs - session.away_secs
            if session.expires_at <= 0:
                self.discard(session)
            else:
                self._left_sessions.append(session)
        for key, will, sender, principal in records.wills():
            delay_secs = 0.0
            if key == sender.client and key in self.sessions:
                delay_secs = (
                    will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
                    - durable_sessions[sender.client].away_secs
                )
            self._left_wills.append(UnpublishedWill(will, sender, principal, delay_secs, key))
            self._count_will(key, will, sender.user)

    def _restore_packet_ids(self, records: Records, durable_sessions: dict[str, DurableSession]) -> None:
        """Restore the packet ids of QoS 2 messages in both directions, and of renumbered outgoing messages.

        The packet id of any other outgoing message follows from its position in the log.
        """
        for client, packet_id, _ in sorted(records.released_ids(), key=lambda one: one[2]):
            if client in durable_sessions:
                durable_sessions[client].restore_released(packet_id)
        for client, position, packet_id in records.renumbered():
            if client in durable_sessions:
                durable_sessions[client].restore_renumbered(position, packet_id)
        for log in records.store.logs():
            if log.kind == INCOMING and log.name in durable_sessions:
                with contain_failure(INCOMING, log.name):
                    durable_sessions[log.name].restore_received(log)

    def _forget_set_aside(self, records: Records, client_id: str) -> None:
        """Delete the records of a session that could not be read, because its client starts a new session."""
        self._set_aside.remove(client_id)
        records.forget_session(client_id)
        for kind in (SESSION, INCOMING):
            records.store.drop(records.store.log(kind, client_id))

    def begin(self, now: float) -> None:
        """Start the expiry of restored sessions at `now` (monotonic seconds).

        A later call has no effect.
        """
        left_sessions, self._left_sessions = self._left_sessions, []
        for session in left_sessions:
            if session.outlet is None and self.sessions.get(session.client_id) is session:
                session.expires_at += now
                self._away.add(session)

    def pop_unpublished_wills(self, endpoint: str | None) -> list[UnpublishedWill]:
        """Remove and return the wills that an earlier process has not published.

        `endpoint` is the listener of their clients; None means all listeners.
        """
        found = [left for left in self._left_wills if endpoint in (None, left.sender.endpoint)]
        self._left_wills = [left for left in self._left_wills if left not in found]
        return found

    # Durability, for connections.

    @property
    def change_count(self) -> int:
        """Number of recorded changes that must be on disk before clients may be informed of them."""
        return 0 if self.records is None else self.records.changes

    @property
    def failing(self) -> bool:
        """True if there is a store and its disk fails."""
        return self.records is not None and bool(self.records.failure)

    @property
    def unavailable(self) -> str:
        """Reason why no client can be accepted now; "" if clients can be accepted."""
        return ""

    def has_unstored_changes(self, before: int) -> bool:
        """Return True if `change_count` has changed since it was `before`, so that replies wait for the disk.

        Returns False while the store fails: nothing new is promised to clients then, and the end of a session
        or subscription is reported at once.
        """
        return self.change_count != before and not self.failing

    @property
    def claims_wills(self) -> bool:
        """True if replicas must claim the will of a lost client before one of them publishes it.

        False in this class: there are no other replicas.
        """
        return False

    def after_recorded(self, session: Session | None, done: Callable[[Outcome], None]) -> None:
        """Call `done` with the outcome once all changes recorded until now are on disk.

        `session` is the session that waits for this; not used in this class.
        """
        assert self.store is not None
        self.store.after_commit(done)

    def commit_notifier(self, session: Session) -> Callable[[Callable[[Outcome], None]], None] | None:
        """Return a function by which a connection waits for a commit before it sends PUBREL or PUBCOMP.

        The function gets a callback, which is called with the commit's outcome. Returns None if the packets
        may be sent at once, because the session is not on disk.
        """
        return self.store.after_commit if session.is_durable and self.store is not None else None

    def reserve_packet_ids(self, session: Session, packet_ids: list[int]) -> None:
        """Prepare to receive QoS 2 messages with these packet ids from a session's client.

        Raises Pending until the messages may be published. This class does nothing.
        """

    # Topics.

    @property
    def subscriptions(self) -> int:
        """Number of subscriptions."""
        return len(self._trie) - len(self._groups) + self._members

    def has_filters_below(self, level: str) -> bool:
        """Return True if some topic filter has this name, not a wildcard, as its first level."""
        return self._trie.begins(level)

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Return the destinations (sinks) for a topic: subscribed sessions (grants) and shared groups."""
        levels = address.name.split("/")
        matching = self._trie.match(levels, hidden=levels[0].startswith("$"))
        if not matching:
            return ()
        if len(matching) == 1:
            subscriber = next(iter(matching))
            return (
                subscriber if isinstance(subscriber, SharedGroup) else subscriber[0].grant_for(subscriber[1]),
            )
        merged: dict[Session, list[SubscriptionOptions]] = {}
        groups: list[SharedGroup] = []
        for subscriber in matching:
            if isinstance(subscriber, SharedGroup):
                groups.append(subscriber)
            else:
                merged.setdefault(subscriber[0], []).append(subscriber[1])
        return (*[Grant(session, options) for session, options in merged.items()], *groups)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the destinations (sinks) of the message's topic; its other properties do not matter."""
        return self.sinks(message.address)

    def subscribe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Add or replace a subscription of a session.

        Retained messages are queued afterwards by `Session.queue_retained`, as the options require. A shared
        subscription gets no retained messages (5: 4.8.2).
        """
        before = session.subscriptions.get(topic_filter)
        self._add_subscription(session, topic_filter, options)
        if session.is_durable and self.records is not None and options != before:
            self.records.put_subscription(session.client_id, topic_filter, options)
        silent = options.retain_handling == 2 or (options.retain_handling == 1 and before is not None)
        if silent or shared_pattern(topic_filter) is not None:
            return
        pattern = topic_filter.split("/")
        if pattern[0] == SYS:
            self.system.show()
        if len(self.retained):
            self._start_walk(session, topic_filter, options)
            if session.is_durable and self.records is not None and options.qos:
                self.records.put_owed(session.client_id, topic_filter)

    def _start_walk(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        grant = Grant(session, [options], retained=True)
        session.walks[topic_filter] = RetainedWalk(self.retained, topic_filter.split("/"), grant)

    def _add_subscription(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        before = session.subscriptions.get(topic_filter)
        session.subscriptions[topic_filter] = options
        shared = shared_pattern(topic_filter)
        if before is None:
            self._count_subscription(session.user, topic_filter, 1)
        if shared is None:
            pattern = topic_filter.split("/")
            if before is not None:
                self._trie.remove(pattern, (session, before))
            self._trie.add(pattern, (session, options))
            self._changed(pattern)
            return
        group = self._groups.get(topic_filter)
        if group is None:
            group = self._groups[topic_filter] = SharedGroup(topic_filter)
            self._trie.add(shared, group)
            self._changed(shared)
        session.shares = True
        self._members += session not in group.members
        group.join(session, options)

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Remove a subscription. Return False if there was none."""
        if topic_filter not in session.subscriptions:
            return False
        self._remove(session, topic_filter)
        if session.is_durable and self.records is not None:
            self.records.delete_subscription(session.client_id, topic_filter)
        return True

    def _remove(self, session: Session, topic_filter: str) -> None:
        options = session.subscriptions.pop(topic_filter)
        self._count_subscription(session.user, topic_filter, -1)
        session.end_retained(topic_filter)
        shared = shared_pattern(topic_filter)
        if shared is None:
            pattern = topic_filter.split("/")
            self._trie.remove(pattern, (session, options))
            self._changed(pattern)
            return
        group = self._groups[topic_filter]
        del group.members[session]
        self._members -= 1
        if not group.members:
            del self._groups[topic_filter]
            self._trie.remove(shared, group)
            self._changed(shared)

    def requeue_shared(self, session: Session, *, ended: bool = False) -> None:
        """Pass the session's undelivered messages of shared subscriptions to other members of their groups.

        `ended` is True if the session has ended, and False if only its client was lost. The log of an ended
        session is read later, in pieces; its messages are passed on then.
        """
        if not session.shares:
            return
        self._sharing.pop(session, None)
        if ended:
            self.tally.unshared += session.unfinished_count()
        left_log = session.detach_log() if ended else None
        if left_log is not None:
            assert self._ended is not None
            self._ended.add(left_log, session.user)
            return

        self._sharing[session] = self._share_in_portions(session, ended=ended)
        self._share_some(session, SHARED_FIRST)

    def _share_in_portions(self, session: Session, *, ended: bool) -> Iterator[int]:
        """Pass on messages of shared subscriptions in portions; yield how many each portion examined.

        The messages are those of `requeue_shared`. Ends early if the session's client has reconnected.
        """
        turns: dict[str, MemberTurns] = {}

        def pass_to_group(message: Message, grant: Grant, on_outcome: OutcomeCallback) -> bool:
            group = self._groups.get(grant.shared)
            if group is None:
                return False
            if grant.shared not in turns:
                turns[grant.shared] = MemberTurns(group, session, away=ended)
            on_handed = partial(self._report_passed, session, message, grant.shared, ended, on_outcome)
            if turns[grant.shared].redeliver(message, on_handed):
                return True
            if self.failing and ended:
                self._store_leftover(grant.shared, message)
            elif self.failing:
                self._unshared[session] = None
            return self.failing and ended

        for examined_count, unshared in session.share(pass_to_group):
            if ended:
                self.tally.unshared += unshared
            yield examined_count
            if session.outlet is not None and not ended:
                return
            turns.clear()

    def _share_some(self, session: Session, most: int) -> None:
        """Examine about `most` messages of a lost session and pass them on; `expire_more` continues."""
        for examined_count in self._sharing[session]:
            most -= examined_count
            if most <= 0:
                return
        del self._sharing[session]
        session.pump()

    def finish_sharing(self) -> None:
        """Pass on all messages that `requeue_shared` has not passed on yet, at the end of the process."""
        while self._sharing:
            self._share_some(next(iter(self._sharing)), sys.maxsize)

    def _report_passed(
        self,
        session: Session,
        message: Message,
        shared: str,
        ended: bool,
        on_outcome: OutcomeCallback,
        outcome: Outcome,
    ) -> None:
        """Call `on_outcome` with the outcome of passing a message to another session.

        `session` had the message. If the disk refused it, another attempt is scheduled. `shared` is the
        filter of the shared subscription, and `ended` is True if `session` has ended.
        """
        on_outcome(outcome)
        if outcome is not ACCEPTED:
            if ended:
                self._store_leftover(shared, message)
            else:
                self._unshared[session] = None

    def _store_leftover(self, shared: str, message: Message) -> None:
        """Store a message of an ended session in memory until the disk works again.

        `shared` is the filter of the message's shared subscription. If LEFTOVERS_MAX messages wait already,
        the message is dropped and counted.
        """
        if len(self._leftovers) < LEFTOVERS_MAX:
            self._leftovers.append((shared, message))
        else:
            self.tally.unshared += 1

    def _pass_to_member(self, shared: str, message: Message, on_outcome: OutcomeCallback) -> bool | None:
        """Pass a message to a member of the shared subscription with the filter `shared`.

        Return True if a member has it, False if none can accept it now, and None if there are no members.
        `on_outcome` is called with the outcome when a member has it.
        """
        group = self._groups.get(shared)
        return None if group is None else group.redeliver(message, None, on_outcome, away=True)

    def _retry_leftovers(self) -> None:
        """Retry messages of shared subscriptions that could not be passed on because the disk failed."""
        unshared, self._unshared = self._unshared, {}
        for session in unshared:
            if session.outlet is None and self.sessions.get(session.client_id) is session:
                self.requeue_shared(session)
        leftovers, self._leftovers = self._leftovers, deque()
        for shared, message in leftovers:

            def on_outcome(outcome: Outcome, shared: str = shared, message: Message = message) -> None:
                if outcome is not ACCEPTED:
                    self._store_leftover(shared, message)

            if not self._pass_to_member(shared, message, on_outcome):
                self.tally.unshared += 1

    # Sessions.

    def prepare_client(self, connection: object, connecting: ConnectingClient) -> None:
        """Prepare for a connecting client. Raises Pending until the client may be accepted.

        This class does nothing; overridden where sessions are shared by replicas.
        """

    def has_session(self, client_id: str) -> bool:
        """Return True if a session with this client id exists."""
        return client_id in self.sessions

    def replaces_connection(self, client_id: str, user: str) -> bool:
        """Return True if a connecting client of `user` takes the place of its own connection to this gateway.

        A connection of another user, which it may also close, counts for that user.
        """
        existing = self.sessions.get(client_id)
        return existing is not None and existing.outlet is not None and existing.user == user

    def resumable_expiry_secs(self, client_id: str) -> float:
        """Return the expiry in seconds of the session that a connecting client will resume, 0 without one."""
        existing = self.sessions.get(client_id)
        return 0.0 if existing is None else existing.expiry_secs

    def resumable(self, client_id: str) -> Mapping[str, SubscriptionOptions]:
        """Return the subscriptions of the session with this client id, by topic filter.

        Empty if there is no such session.
        """
        existing = self.sessions.get(client_id)
        return {} if existing is None else existing.subscriptions

    def is_pending(self, client_id: str) -> bool:
        """Return True while it is unknown whether a session with this client id exists.

        Always False in this class.
        """
        return False

    def user_of(self, client_id: str) -> str | None:
        """Return the user of a client's session, or None if there is no session."""
        existing = self.sessions.get(client_id)
        return None if existing is None else existing.user

    def sessions_of(self, user: str) -> int:
        """Return the number of sessions of a user."""
        return self._users[user]

    def await_count(self, user: str, client_id: str) -> None:
        """Raise Pending if a user's sessions and subscriptions must be counted before one is refused.

        `client_id` is that of the client, connecting or connected. This class does nothing; overridden where
        the sessions at other replicas count.
        """

    def make_room(self, user: str, place: str, client_id: str = "") -> str:
        """Return "" if a user may create a session from the address `place`, else the limit that forbids it.

        If a session limit is reached and the policy allows it, the disconnected session that expires first is
        ended: one of the user, or one from this address. At the limit of all sessions it is one of those of
        the user and address with the most.
        """
        shares, total = self._shares, self.sessions_max
        full = len(self.sessions) >= total
        if self.sessions_of(user) >= shares.per_user(total) and not self._evict(user, None):
            return "sessions_max" if full else "sessions_per_user_max"
        if self._places[place] >= shares.per_place(total) and not self._evict(None, place):
            return "sessions_max" if full else "sessions_per_address_max"
        if len(self.sessions) >= total and not self._evict(None, None):
            return "sessions_max"
        if self.definitions_full(user, text_bytes(client_id)):
            return "definitions_bytes_max"
        return ""

    def _evict(self, user: str | None, place: str | None) -> bool:
        """End a disconnected session of `user` or of the address `place`; None means any.

        Return False if there is no such session or the policy forbids it.
        """
        victim = self._away.session_to_evict(user, place) if self._shares.evicts else None
        if victim is None:
            return False
        self.evicted += 1
        log.warning("session evicted", client=victim.client_id, user=victim.user)
        self.discard(victim)
        return True

    def subscriptions_full(self, user: str, topic_filter: str) -> bool:
        """Return True if a limit forbids the user to subscribe to one more topic filter."""
        shares = self._shares
        if self.definitions_full(user, filter_bytes(topic_filter)):
            return True
        if self.steps.refuse_if_full(user, filter_steps(topic_filter)):
            return True
        mine = self.subscriptions_of(user)
        return self.all_subscriptions >= shares.subscriptions_max or mine >= shares.subscriptions_per_user

    def subscriptions_of(self, user: str) -> int:
        """Return the number of subscriptions of a user."""
        return self._subscribed.get(user, 0)

    @property
    def all_subscriptions(self) -> int:
        """Number of subscriptions that count against the limit on subscriptions of all users."""
        return self.subscriptions

    def definitions_full(self, user: str, byte_count: int) -> bool:
        """Return True if a limit forbids `user` to add `byte_count` bytes of definitions.

        Definitions are subscriptions, client ids and wills. A result of True is counted as a refusal.
        """
        return bool(self.definition_shares.refuse_if_full(user, byte_count))

    def _count_subscription(self, user: str, topic_filter: str, count: int) -> None:
        """Count a subscription with this filter for the user (`count` is 1), or no longer count it (-1).

        Updates the user's number of subscriptions, their bytes, and their matching work (matching_steps.py).
        """
        subscriptions = self._subscribed.get(user, 0) + count
        if subscriptions:
            self._subscribed[user] = subscriptions
        else:
            del self._subscribed[user]
        byte_count = filter_bytes(topic_filter)
        if count > 0:
            self.definition_shares.add(user, byte_count)
        else:
            self.definition_shares.remove(user, byte_count)
        self.steps.add(user, count * filter_steps(topic_filter))

    def _count(self, session: Session) -> None:
        """Count the session for its user and address."""
        self._users.add(session.user)
        self._places.add(session.place)
        self.definition_shares.add(session.user, text_bytes(session.client_id))

    def _forget_owner(self, session: Session) -> None:
        """Subtract the session from the counts of its user and address."""
        self._away.remove(session)
        self._users.remove(session.user)
        self._places.remove(session.place)
        self.definition_shares.remove(session.user, text_bytes(session.client_id))

    def _change_owner(self, session: Session, user: str, place: str) -> None:
        self._forget_owner(session)
        for topic_filter in session.subscriptions:
            self._count_subscription(session.user, topic_filter, -1)
            self._count_subscription(user, topic_filter, 1)
        session.user, session.place = user, place
        self._count(session)

    def detach_session(self, session: Session, now: float) -> None:
        """Start the expiry of a session whose client has disconnected at `now` (monotonic seconds)."""
        session.expires_at = now + session.expiry_secs
        self._away.add(session)

    def open(
        self, client_id: str, *, clean: bool, expiry_secs: float, user: str = "", place: str = ""
    ) -> tuple[Session, bool]:
        """Return the session of `client_id`, and True if an existing one is resumed.

        With `clean`, an existing session is ended first. The session belongs to `user` at the address `place`
        from now on, and will outlive its connection by `expiry_secs` seconds. A delayed will is not published
        if the session is resumed (5: 3.1.3.2.2).
        """
        session = self.sessions.get(client_id)
        if session is not None and clean:
            self.discard(session)
            session = None
        present = session is not None
        if session is None or (client_id in self._wills and self._wills[client_id].at <= OVERDUE):
            self._publish_will(client_id)  # due since an earlier process ended
        if session is None:
            if self.records is not None and expiry_secs > 0:
                if client_id in self._set_aside:
                    self._forget_set_aside(self.records, client_id)
                session = DurableSession(client_id, self.limits, self.tally, self.records)
            else:
                session = Session(client_id, self.limits, self.tally)
            self.sessions[client_id] = session
            session.user, session.place = user, place
            self._count(session)
        elif (session.user, session.place) != (user, place):
            self._change_owner(session, user, place)
        self._wills.pop(client_id, None)
        self._away.remove(session)
        session.expiry_secs = expiry_secs
        session.expires_at = 0.0
        return session, present

    def discard(self, session: Session) -> None:
        """End a session with its subscriptions and messages, and publish its delayed will."""
        for topic_filter in list(session.subscriptions):
            self._remove(session, topic_filter)
        self.requeue_shared(session, ended=True)
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
            self._forget_owner(session)
            self._publish_will(session.client_id)
        session.discarded()

    # Wills.

    def store_will(self, client_id: str, will: Will | None, sender: Sender, principal: Principal) -> None:
        """Store the will of a client that has connected. None deletes the will of its last connection."""
        self._count_will(client_id, will, sender.user)
        if self.records is None:
            return
        if will is None:
            self.records.delete_will(client_id)
        else:
            self.records.put_will(client_id, will, sender, principal)

    def will_full(self, user: str, client_id: str, will: Will) -> bool:
        """Return True if a limit forbids the user to store `will`, instead of the client's earlier will.

        The limit is on the bytes of subscriptions, client ids and wills. A result of True is counted as a
        refusal.
        """
        owner, before = self._defined_wills.get(client_id, (user, 0))
        more = will_bytes(will) - (before if owner == user else 0)
        return more > 0 and self.definitions_full(user, more)

    def _count_will(self, key: str, will: Will | None, user: str) -> None:
        """Count the bytes of a will for its user, instead of those of the earlier will with the same `key`.

        With None as the will, only the earlier one is subtracted.
        """
        before = self._defined_wills.pop(key, None)
        if before is not None:
            self.definition_shares.remove(*before)
        if will is not None:
            made = self._defined_wills[key] = (user, will_bytes(will))
            self.definition_shares.add(*made)

    def store_will_if_refused(self, key: str, will: Will, sender: Sender, principal: Principal) -> None:
        """Store the record of a will, but only if the store refuses the messages of this event-loop pass.

        Meant for a will that is being published, and whose earlier record is deleted in this pass: if its
        message cannot be stored, the new record remains. `key` identifies the record in the store.
        """
        if self.records is not None:
            self.records.put_will(key, will, sender, principal, if_refused=True)

    def forget_will(self, key: str) -> None:
        """Delete the record of a will that is settled or will not be published."""
        self._count_will(key, None, "")
        if self.records is not None:
            self.records.delete_will(key)

    def publish_stored_will(self, key: str, publish: Callable[[], None]) -> None:
        """Publish a stored will by calling `publish`, then delete its record `key`.

        `publish` stores another record if one is needed.
        """
        try:
            publish()
        finally:
            self.forget_will(key)

    def new_will_key(self, client_id: str) -> str:
        """Return a new key for the record of a will of this client that is being published."""
        self._sent_wills += 1
        return f"{client_id}\0{self._born:x} {self._sent_wills}"

    def delay_will(
        self,
        client_id: str,
        at: float,
        publish: Callable[[], None],
        dropped: Callable[[], None] | None = None,
        *,
        retry_at: float = OVERDUE,
    ) -> None:
        """Schedule a will: `publish` is called at `at` (monotonic seconds), or when the session ends before.

        If the will does not depend on the session, a key from `new_will_key` is given instead of a client id.
        With OVERDUE as `at`, `publish` is called at a later tick, not before `retry_at`, or when the client
        reconnects before. `dropped` is called instead of `publish` if this gateway does not publish the will.
        """
        self._wills[client_id] = DelayedWill(at, publish, dropped or _do_nothing, retry_at)

    def end_delays(self) -> bool:
        """Publish all delayed wills at the end of the process. Return False if there were none.

        With a store nothing is published, because the delay continues after the restart.
        """
        client_ids = list(self._wills) if self.records is None else []
        for client_id in client_ids:
            self._publish_will(client_id)
        return bool(client_ids)

    def _publish_will(self, client_id: str) -> None:
        if client_id in self._wills:
            publish = self._wills.pop(client_id).publish
            try:
                publish()
            except Exception as error:  # not a fault of the caller
                contained("message", error, client=client_id)
            self.forget_will(client_id)

    def expire(self, now: float) -> bool:
        """Publish due wills and discard expired sessions of disconnected clients; `now` in monotonic seconds.

        Return True if not everything could be done at once: `expire_more` continues.
        """
        for client_id in [client_id for client_id, will in self._wills.items() if OVERDUE < will.at <= now]:
            self._publish_will(client_id)
        refused = (client_id for client_id, will in self._wills.items() if will.is_overdue(now))
        for client_id in list(islice(refused, RETRIED_MAX)):
            self._publish_will(client_id)
        if (self._unshared or self._leftovers) and not self.failing:
            self._retry_leftovers()
        if self._ended is not None:
            self._ended.tick()
        self.retained.tick()
        self._drop_expired()
        self._expired_sessions.extend(
            [
                session
                for session in self.sessions.values()
                if session.outlet is None and 0 < session.expires_at <= now
            ]
        )
        return self.expire_more(now)

    def _drop_expired(self) -> None:
        """Remove expired messages from sessions of disconnected clients that use half of a limit or more.

        The removal continues in the background, for at most CHECKED_AT_ONCE sessions at a time.
        """
        utc = clock.utc()
        self._checking = [session for session in self._checking if session.is_checking]
        expired = [session for session in self.sessions.values() if 0.0 < session.purge_at <= utc]
        for session in expired[: CHECKED_AT_ONCE - len(self._checking)]:
            session.drop_expired()
            if session.is_checking:
                self._checking.append(session)

    def expire_more(self, now: float) -> bool:
        """Discard sessions that `expire` has found, and continue to pass on messages of lost sessions.

        Runs for about EXPIRE_SECS. `now` is in monotonic seconds. Return True if more work remains.
        """
        deadline = clock.perf_counter() + EXPIRE_SECS
        while self._sharing:
            self._share_some(next(iter(self._sharing)), 1)
            if clock.perf_counter() >= deadline:
                break
        while self._expired_sessions:
            session = self._expired_sessions.popleft()
            is_current = self.sessions.get(session.client_id) is session
            if is_current and session.outlet is None and 0 < session.expires_at <= now:
                self.discard(session)
            if clock.perf_counter() >= deadline:
                break
        return bool(self._expired_sessions or self._sharing)


def _do_nothing() -> None:
    """Do nothing, as no listener has started yet."""

"""MQTT's topics on the shared engine: subscriptions are this replica's clients', everything else is
everybody's.

A client that comes is let in when the shared database says what session it finds. Its session is here for as
long as its connection, and is left to the database and its queue after that. Wills are in the database, too:
whoever claims one there publishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Final

import structlog
import trio

from gateway import clock
from gateway.broker.mqtt.namespace import OVERDUE, LeftWill, MqttNamespace, Newcomer, Offers, SessionShares
from gateway.broker.mqtt.session import WALKS_MAX, Grant, Session, SessionLimits, SubscriptionOptions
from gateway.broker.mqtt.shared import SharedGroup, shared_pattern
from gateway.broker.mqtt.system import SYS
from gateway.engine.arguments import type_arguments
from gateway.engine.client_session import ClientSession, SharedReceivedIds
from gateway.engine.consumers import Consumers
from gateway.engine.envelope import Number
from gateway.engine.opening import Arrival, Opening
from gateway.engine.retained import SharedRetained
from gateway.engine.session import EngineSession
from gateway.engine.sessions import TAKEN_OVER
from gateway.engine.shares import EXPIRES_SECS, GRACE_SECS, TOUCH_SECS, SharedQueue, queue_of
from gateway.engine.stored import decode_options, decode_will
from gateway.engine.walks import SharedWalk, Walked
from gateway.errors import StoreError
from gateway.ingress.mqtt.admission import AdmittedGuest
from gateway.ingress.mqtt.guest import MqttGuest
from gateway.model.address import Address
from gateway.model.batch import Recipient, Sink, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.pending import Pending
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.shares import UserShares
from gateway.protocols.mqtt.packets import Will
from gateway.state.interface import SHARED_FILTERS_MAX, Owner, Reply, SessionKey, SharedFilters, StateStore

log = structlog.get_logger(limited=True)

Asked = tuple[Session, str, SubscriptionOptions]
FILTER_BYTES_MAX: Final = (
    1_500  # beside a client identifier: PostgreSQL has 2 704 bytes for a row of an index
)
LIST_SECS: Final = 60.0  # between two looks for shared subscriptions that nobody has any more
WALKED_SECS: Final = 60.0  # for which a live message may be late that was sent as a retained one


class Countdown:
    """Calls a function when so many other things have happened; at once for none."""

    def __init__(self, left: int, then: Callable[[], None]) -> None:
        self._left = left
        self._then = then
        if not left:
            then()

    def count(self) -> None:
        """One of them has happened."""
        self._left -= 1
        if not self._left:
            self._then()


class EngineNamespace(MqttNamespace):
    """Sessions and subscriptions of one replica."""

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
        self._engine = engine
        self._common = retained
        self._state = state
        self._shown = 0  # what clients wait for, since the start
        self._walks: list[Asked] = []  # that have no barrier yet behind which they begin, and
        self._asked: list[list[Asked]] = []  # those that have one
        # With walks, or since when there are none, monotonic.
        self._walking: dict[ClientSession, float | None] = {}
        # Who waits until the queue of a session is this replica's, and bound.
        self._unbound: list[tuple[ClientSession, Callable[[Outcome], None], Outcome]] = []
        self._arrived: dict[str, Arrival] = {}  # clients that are about to be let in
        self._refused: dict[str, tuple[Opening, str]] = {}  # clients whose session is another user's
        self._lost: dict[str, Callable[[], None]] = {}  # publish the will of a client that is just going
        # Wills that this replica has claimed, by the names under which they are published, and the one that
        # is just about to be.
        self._publishing: dict[str, tuple[SessionKey, int]] = {}
        self._claimed: tuple[SessionKey, int] | None = None
        super().__init__(
            self._changed_filter,
            limits,
            definition_shares=definition_shares,
            shares=shares,
            sessions_max=sessions_max,
            retained=retained,
        )
        # What is sent at QoS 2 is its client's even if that does not come back: nobody else could have it.
        self.offers = Offers(shared_qos_max=1)
        self.filter_bytes_max = FILTER_BYTES_MAX
        self._shared: dict[str, SharedQueue] = {}  # with members here, by filter
        self._unused: dict[str, float] = {}  # filters that nobody here has since then, monotonic
        self._shared_of_all: set[str] = set()  # that sessions of all replicas have
        self._touched = self._listed = 0.0
        self._is_listing = False
        engine.serve(self, self._number_of)
        self._arguments = self._queue_arguments()

    def _queue_arguments(self) -> Headers:
        """Return the arguments of a session's queue: it loses what is oldest at its limit. It is deleted when
        the session ends."""
        return (("x-single-active-consumer", Value(ValueType.BOOL, True)), *self._limit_arguments())

    def _shared_arguments(self) -> Headers:
        expires = Value(ValueType.INT64, int(EXPIRES_SECS * 1_000))
        return (("x-expires", expires), *self._limit_arguments())

    def _limit_arguments(self) -> Headers:
        settings, limits = self._engine.settings, self.limits
        return (
            *type_arguments(settings),
            ("x-max-length", Value(ValueType.INT64, limits.messages_max)),
            ("x-max-length-bytes", Value(ValueType.INT64, limits.octets_max)),
            ("x-overflow", string("drop-head")),
            ("x-dead-letter-exchange", string(self._engine.names.dropped)),
        )

    def _changed_filter(self, levels: list[str]) -> None:
        self._engine.forget_entries()

    # What clients are told, and when.

    @property
    def recorded(self) -> int:
        """Moves with whatever a client must not be told before the cluster knows it."""
        return self._shown

    @property
    def unavailable(self) -> str:
        """Why no client can be let in now."""
        return self._engine.why_not

    @property
    def failing(self) -> bool:
        """The database of sessions takes nothing now."""
        return bool(self._engine.sessions.why_not)

    def unsaid(self, before: int) -> bool:
        """Since `recorded` was `before` something has changed that a client must not be told yet."""
        return self.recorded != before

    def after_recorded(self, session: Session | None, done: Callable[[Outcome], None]) -> None:
        """`done` hears ACCEPTED when the cluster and the database have what they must."""
        asked, self._walks = self._walks, []
        self._asked.append(asked)
        self._engine.after_bound(partial(self._bound, session, asked, done))

    def _bound(
        self,
        session: Session | None,
        asked: list[Asked],
        done: Callable[[Outcome], None],
        outcome: Outcome,
    ) -> None:
        """Begin the walks of subscriptions that are bound. The client hears of that behind the first pages:
        what is published then does not come twice, as a rule."""
        self._asked = [one for one in self._asked if one is not asked]
        begun: list[SharedWalk] = []
        for owed, topic_filter, options in asked:
            if owed.subscriptions.get(topic_filter) is options:
                self._owe(owed, topic_filter, options)
                walk = owed.owed[topic_filter]
                if isinstance(walk, SharedWalk) and len(begun) < WALKS_MAX and not self._common.is_away:
                    begun.append(walk)
        countdown = Countdown(len(begun), partial(self._read, session, done, outcome))
        for walk in begun:
            walk.begin(countdown.count)

    def _read(self, session: Session | None, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        """The first pages are read: wait until subscriptions are stored, which they are when their queue is
        bound. While another owner still has the queue, that is later."""
        if isinstance(session, ClientSession) and session.unbound and not session.is_stopped:
            self._unbound.append((session, done, outcome))
        elif isinstance(session, ClientSession):
            self._engine.after_stored(session, done)
        else:
            done(outcome)

    def _owe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        if topic_filter.split("/", 1)[0] == SYS:
            super()._owe(session, topic_filter, options)
            return

        def is_wanted(walk: SharedWalk) -> bool:
            return session.owed.get(topic_filter) is walk and session.outlet is not None

        session.owed[topic_filter] = SharedWalk(
            self._common,
            topic_filter,
            Grant(session, [options], retained=True),
            session.walked if isinstance(session, ClientSession) else None,
            is_wanted,
            partial(_pull, session),
        )

    def new_to(
        self, recipients: tuple[Recipient, ...], message: Message, number: Number | None
    ) -> tuple[Recipient, ...]:
        """Return those that were not sent this message as a retained one; it has a number at QoS 2."""
        if not self._walking:
            return recipients
        return tuple(one for one in recipients if _is_new(one.sink, message, number))

    def answers_after(self, session: Session) -> Callable[[Callable[[Outcome], None]], None] | None:
        """The database has to have what the client is told of QoS 2."""
        if isinstance(session, ClientSession) and session.lasting:
            return partial(self._engine.after_stored, session)
        return None

    # Topics.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """The cluster; `$SYS` is this replica's own."""
        return super().sinks(address) if address.name.startswith(SYS) else self._engine.sinks(address)

    def wanting(self, address: Address) -> tuple[Sink, ...]:
        """Who of this replica's clients gets messages of a topic by its queue."""
        return tuple(sink for sink in super().sinks(address) if not _by_own_queue(sink))

    def subscribe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Add or replace a subscription; what is retained is owed when its binding is there."""
        before = session.subscriptions.get(topic_filter)
        self._enter(session, topic_filter, options)
        if isinstance(session, ClientSession) and session.lasting and options != before:
            session.subscribed(topic_filter, options, 0 if before is None else before.qos)
        self._shown += 1
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
        lasting = isinstance(session, ClientSession) and session.lasting
        had = before is not None and not (lasting and before.qos)
        has = not (lasting and options.qos)
        if has and not had:
            self._engine.bind(topic_filter.split("/"))
        elif had and not has:
            self._engine.unbind(topic_filter.split("/"))

    def _remove(self, session: Session, topic_filter: str) -> None:
        options = session.subscriptions[topic_filter]
        self._leave(session, topic_filter)
        self._shown += 1
        if isinstance(session, ClientSession) and session.lasting:
            session.subscribed(topic_filter, None, options.qos)

    def _leave(self, session: Session, topic_filter: str) -> None:
        """Nothing of this replica is for that subscription any more."""
        options = session.subscriptions[topic_filter]
        super()._remove(session, topic_filter)
        if shared_pattern(topic_filter) is not None:
            if topic_filter not in self._groups and (shared := self._shared.pop(topic_filter, None)):
                self._engine.share(shared, on=False)
                self._unused[topic_filter] = clock.now()
            return
        if not (isinstance(session, ClientSession) and session.lasting and options.qos):
            self._engine.unbind(topic_filter.split("/"))

    # Shared subscriptions.

    def _share(self, topic_filter: str) -> None:
        self._unused.pop(topic_filter, None)
        if topic_filter in self._shared or (shared_pattern(topic_filter) or [])[:1] == [SYS]:
            return  # what is this replica's own is shared here
        queue = queue_of(self._engine.names.shares, topic_filter)
        group, prefetch = self._groups[topic_filter], self.limits.in_flight_max
        shared = SharedQueue(self._engine, group, queue, self._shared_arguments(), prefetch)
        self._shared[topic_filter] = shared
        self._engine.share(shared, on=True)

    def _sweep_shares(self, consumers: Consumers, now: float) -> None:
        for shared in self._shared.values():
            consumers.begin(shared)  # if its node was down, or the cluster
        is_due = any(now - since >= GRACE_SECS for since in self._unused.values())
        if not self._is_listing and (is_due or now - self._listed >= LIST_SECS):
            self._is_listing, self._listed = True, now
            self._state.query(SharedFilters(), partial(self._listed_shares, consumers, now))

    def _listed_shares(self, consumers: Consumers, now: float, reply: Reply[list[str]]) -> None:
        """Delete the queues of shared subscriptions that nobody has any more, unless others consume them, and
        keep those of sessions whose clients are away."""
        self._is_listing = False
        if reply.value is None or len(reply.value) >= SHARED_FILTERS_MAX:
            return  # of a list that was cut nobody can say what is not on it
        wanted = set(reply.value)
        for topic_filter in self._shared_of_all - wanted - self._shared.keys():
            self._unused.setdefault(topic_filter, now)
        self._shared_of_all = wanted
        for topic_filter, since in list(self._unused.items()):
            if now - since >= GRACE_SECS:
                del self._unused[topic_filter]
                if topic_filter not in wanted and topic_filter not in self._shared:
                    consumers.remove(queue_of(self._engine.names.shares, topic_filter))
        if now - self._touched >= TOUCH_SECS:
            self._touched = now
            for topic_filter in wanted - self._shared.keys():
                consumers.touch(queue_of(self._engine.names.shares, topic_filter))

    # QoS 2.

    def _sweep_walks(self, now: float) -> None:
        """Forget what walks have sent, some time after the last one: live messages may be late."""
        waiting: dict[Session, set[str]] = {}
        for walking, topic_filter, _ in chain(self._walks, *self._asked):
            waiting.setdefault(walking, set()).add(topic_filter)
        for session, since in list(self._walking.items()):
            goes_on = {*session.owed, *waiting.get(session, ())}
            if session.walked is not None:
                session.walked.end_all_but(goes_on)
            if self.sessions.get(session.client_id) is not session:
                del self._walking[session]
            elif goes_on:
                self._walking[session] = None
            elif since is None and session.walked is not None and session.walked.has_sent:
                self._walking[session] = now
            elif since is None or now - since >= WALKED_SECS:
                session.walked = None
                del self._walking[session]

    def _number_of(self, part: SubBatch, at: int) -> Number | None:
        """The number that is stored for a client's message."""
        receipt = part.batch.receipts[part.slots[at]]
        if not isinstance(receipt, tuple) or not isinstance(receipt[0], AdmittedGuest):
            return None
        session = receipt[0].session
        ids = None if session is None else session.received_ids
        return ids.number(receipt[1]) if isinstance(ids, SharedReceivedIds) else None

    def taking(self, session: Session, packet_ids: list[int]) -> None:
        """Store the ids of a lasting session's messages before these are published. Raises Pending."""
        ids = session.received_ids
        if not isinstance(ids, SharedReceivedIds) or not ids.announce(packet_ids):
            return
        assert isinstance(session, ClientSession)
        stored = trio.Event()
        self._engine.after_stored(session, lambda outcome: stored.set())
        raise Pending(stored)

    # Sessions.

    def user_of(self, client_id: str) -> str | None:
        """Whose the session of a client is; None: there is none, or it is not known yet."""
        if client_id in self._refused:
            return self._refused[client_id][1]
        arrival = self._arrived.get(client_id)
        if arrival is not None:
            return arrival.found.user if arrival.found.present else None
        return super().user_of(client_id)

    def finds(self, client_id: str) -> bool:
        """A client that is about to be let in has an earlier session."""
        arrival = self._arrived.get(client_id)
        return arrival is not None and arrival.found.present

    def make_room(self, user: str, place: str, client_id: str = "") -> str:
        """The sessions of all replicas have a limit, too. Whether a client finds a session, and needs no
        room, is known when it has arrived."""
        if client_id and client_id not in self._arrived:
            return ""
        if self._engine.sessions.count > self.sessions_max:
            return "sessions_max"
        return super().make_room(user, place, client_id)

    def arriving(self, guest: object, coming: Newcomer) -> None:
        """Ask for the session of a client that connects. Raises Pending until that is answered."""
        assert isinstance(guest, MqttGuest)
        arrival = self._arrived.get(coming.client_id)
        if arrival is not None and arrival.opening.guest is guest:
            return
        opening = Opening(guest, coming)
        self._engine.sessions.open(opening)
        raise Pending(opening)

    def arrived(self, arrival: Arrival) -> None:
        """The database has answered a client that may be let in."""
        self._arrived[arrival.opening.client] = arrival

    def refused(self, opening: Opening, user: str) -> None:
        """The session that a client asks for is that of another user; it is told so when it is looked at."""
        self._refused[opening.client] = opening, user
        opening.answer()

    def session_of(self, client: str) -> ClientSession | None:
        """Return the session of a client that is here."""
        session = self.sessions.get(client)
        return session if isinstance(session, ClientSession) else None

    def connected(self) -> Iterable[ClientSession]:
        """Return the sessions of all clients that are here."""
        return [one for one in self.sessions.values() if isinstance(one, ClientSession)]

    def is_expected(self, client: str) -> bool:
        """Return True if a client may be let in, and is not yet."""
        return client in self._arrived

    def dropped(self, *, expired: bool) -> None:
        """A queue has had no room for a message; or it `expired` there."""
        self.tally.expired += expired
        self.tally.queue_full += not expired

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Once a second: clients that have gone before they were let in, and shared subscriptions."""
        self._sweep_shares(consumers, now)
        self._sweep_walks(now)
        unbound, self._unbound = self._unbound, []
        for session, done, outcome in unbound:
            if self.sessions.get(session.client_id) is session:
                self._read(session, done, outcome)
        for client, arrival in list(self._arrived.items()):
            if arrival.opening.guest.stream.closed:
                del self._arrived[client]
                self._engine.sessions.give_up(arrival)
        for client, (opening, _) in list(self._refused.items()):
            if opening.guest.stream.closed:
                del self._refused[client]

    def open(
        self, client_id: str, *, clean: bool, expiry_secs: float, user: str = "", place: str = ""
    ) -> tuple[Session, bool]:
        """The session of a client that has arrived."""
        opening, owner, found = self._arrived.pop(client_id)
        session = ClientSession(client_id, self.limits, self.tally, self._engine, owner)
        session.user, session.place, session.expiry_secs = user, place, expiry_secs
        self.sessions[client_id] = session
        self._count(session)
        if opening.coming.will is not None:
            self._engine.sessions.serve(session)
            self._shown += 1  # CONNACK waits for that
        if found.queue:
            session.begin(found.contents, found.queue, self._arguments)
            session.fresh = not found.present
            for topic_filter, options in found.contents.subscriptions.items():
                self._enter(session, topic_filter, decode_options(options))
            self._shown += bool(found.contents.subscriptions)
            self._engine.sessions.acquire(session, found)
        return session, found.present

    def left(self, session: Session, now: float) -> None:
        """The client of a session that outlives its connection has gone."""
        self._part(session)

    def discard(self, session: Session) -> None:
        """End a session whose client is here."""
        session.expiry_secs = 0.0
        self._part(session)

    def _part(self, session: Session) -> None:
        if self.sessions.get(session.client_id) is not session:
            return
        assert isinstance(session, ClientSession)
        self.hand_over(session, ended=True)
        for topic_filter in list(session.subscriptions):
            self._leave(session, topic_filter)
        del self.sessions[session.client_id]
        self._forget_owner(session)
        self._engine.sessions.leave(session, self._lost.pop(session.client_id, None))

    def hand_over(self, session: Session, *, ended: bool = False) -> None:
        """The client was lost: others get what it was owed of shared subscriptions, here or elsewhere."""
        if isinstance(session, ClientSession):
            session.give_back()

    def lasting(self) -> list[ClientSession]:
        """Sessions of clients that are here, with queues."""
        return [one for one in self.sessions.values() if isinstance(one, ClientSession) and one.lasting]

    def taken(self, client: str, owner: Owner | None, *, at_once: bool) -> None:
        """A client has another owner now; None: nobody. `at_once`: it takes its place in this wake-up."""
        waiting = self._arrived.get(client)
        if waiting is not None and waiting.owner != owner:
            del self._arrived[client]
            waiting.opening.lose(TAKEN_OVER)
            self._engine.sessions.give_up(waiting)
        session = self.session_of(client)
        if session is None or session.owner == owner or (session.is_stopped and not at_once):
            return  # or it is on its way already
        outlet: object = session.outlet
        if not isinstance(outlet, MqttGuest):
            return
        log.info("client reconnected, previous connection closed", client=client)
        patient = session.lasting and not at_once
        self._engine.sessions.moved += not at_once
        if patient:
            session.stop()
        try:
            outlet.taken_over(patient=patient)
        except Exception as error:  # of this one alone
            outlet.stream.fail(error)

    def let_go_of(self, session: ClientSession, why: str) -> None:
        """A client has to connect anew."""
        outlet: object = session.outlet
        if isinstance(outlet, MqttGuest):
            outlet.stream.abort(why)

    # Wills.

    @property
    def claims_wills(self) -> bool:
        """Other replicas may publish it, too."""
        return True

    def keep_will(self, client_id: str, will: Will | None, sender: Sender) -> None:
        """The database has the will of a client since that was opened. One that is just being published, and
        waits for the cluster, is settled when `forget_will` is called by this name."""
        if self._claimed is not None:
            self._publishing[client_id], self._claimed = self._claimed, None

    def delay_will(self, client_id: str, at: float, publish: Callable[[], None]) -> None:
        """The client of a session is lost: the database says whether `publish` is to be called now. A will
        that was claimed there, or was refused before, is published when the clock next ticks."""
        if at <= OVERDUE:
            super().delay_will(client_id, at, publish)
        else:
            self._lost[client_id] = publish

    def publish_claimed(self, key: SessionKey, epoch: int, publish: Callable[[], None]) -> None:
        """Publish a will that was claimed. If this process ends before the cluster has it another does."""
        self._claimed = key, epoch
        try:
            publish()
        finally:
            claimed, self._claimed = self._claimed, None
            if claimed is not None:  # it was not published, or has arrived
                self._engine.sessions.settle_will(*claimed)

    def _publish_will(self, client_id: str) -> None:
        claimed = self._publishing.pop(client_id, None)
        if claimed is None:
            super()._publish_will(client_id)
        else:
            self.publish_claimed(*claimed, partial(MqttNamespace._publish_will, self, client_id))

    def publish_left(self, key: SessionKey, epoch: int, message: bytes) -> None:
        """The will of a client that is not here is due."""
        try:
            will, sender = decode_will(key.client, message)
        except StoreError as error:
            log.error("will unreadable, discarded", client=key.client, why=str(error))
            self._engine.sessions.settle_will(key, epoch)
            return
        name = self.new_will_key(key.client)
        self._publishing[name] = key, epoch
        self._left_wills.append(LeftWill(will, sender, 0.0, name))
        self.adopt()
        self._publish_will(name)

    def forget_will(self, key: str) -> None:
        """It is published, or will not be."""
        found = self._publishing.pop(key, None)
        if found is not None:
            self._engine.sessions.settle_will(*found)

    def end_delays(self) -> bool:
        """The process ends: another replica sees to what waits for a delay."""
        self._engine.stopped = True
        return False


def _pull(session: Session) -> None:
    outlet: object = session.outlet
    if isinstance(outlet, AdmittedGuest):
        outlet.owe_retained()


def _is_new(sink: Sink, message: Message, number: Number | None) -> bool:
    if not isinstance(sink, Grant) or not isinstance(sink.session, ClientSession):
        return True
    walked = sink.session.walked
    return walked is None or walked.is_new(message, number, sink.qos)


def _by_own_queue(sink: Sink) -> bool:
    """What it wants comes by the queue of its session, or of a shared subscription."""
    return isinstance(sink, SharedGroup) or (
        isinstance(sink, Grant)
        and sink.qos > 0
        and isinstance(sink.session, ClientSession)
        and sink.session.lasting
    )

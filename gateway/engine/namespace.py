"""MQTT's topics on the shared engine: subscriptions are this replica's clients', everything else is
everybody's.

A client that comes is written to the log first, and let in when that has come back: by then it is known what
session it finds, and whoever had it has heard of it. Its session is here for as long as its connection, and
is left to the log and its queue after that. Wills are on the log, too; this replica publishes those of its
own clients, and of sessions that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import structlog
import trio

from gateway import clock
from gateway.broker.mqtt.namespace import OVERDUE, LeftWill, MqttNamespace, Newcomer, Offers, SessionShares
from gateway.broker.mqtt.session import WALKS_MAX, Grant, Session, SessionLimits, SubscriptionOptions
from gateway.broker.mqtt.shared import SharedGroup, shared_pattern
from gateway.broker.mqtt.system import SYS
from gateway.engine.arguments import type_arguments
from gateway.engine.client_session import ClientSession, LoggedReceivedIds
from gateway.engine.consumers import Consumers
from gateway.engine.envelope import Number
from gateway.engine.opening import Coming, Opening
from gateway.engine.records import Owner, WillSaid
from gateway.engine.retained import SharedRetained
from gateway.engine.session import TAKEN_OVER, EngineSession
from gateway.engine.shares import EXPIRES_SECS, GRACE_SECS, TOUCH_SECS, SharedQueue, queue_of
from gateway.engine.table import Arrival, SessionState
from gateway.engine.walks import SharedWalk, Walked
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
from gateway.protocols.mqtt.properties import decode_list, encode_list
from gateway.protocols.mqtt.spec import WILL as WILL_LIST
from gateway.protocols.mqtt.spec import Property

log = structlog.get_logger(limited=True)

EXPIRES_MS_MAX = 0xFFFF_FFFF  # of a queue
Asked = tuple[Session, str, SubscriptionOptions]
WALKED_SECS = 60.0  # for which a live message may be late that was sent as a retained one


class EngineNamespace(MqttNamespace):
    """Sessions and subscriptions of one replica."""

    def __init__(
        self,
        engine: EngineSession,
        limits: SessionLimits,
        retained: SharedRetained,
        *,
        shares: SessionShares,
        sessions_max: int,
        definition_shares: UserShares | None = None,
    ) -> None:
        self._engine = engine
        self._common = retained
        self._shown = 0  # what clients wait for, since the start
        self._walks: list[Asked] = []  # that have no barrier yet behind which they begin, and
        self._asked: list[list[Asked]] = []  # those that have one
        self._walking: dict[
            ClientSession, float | None
        ] = {}  # with walks, or since when there are none, monotonic
        self._arrived: dict[str, tuple[Opening, Arrival]] = {}  # clients that are about to be let in
        self._delays: dict[str, float] = {}  # UTC, of wills of clients that are just going
        self._publishing: dict[str, Owner] = {}  # wills of sessions that are kept here, by client
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
        self._shared: dict[str, SharedQueue] = {}  # with members here, by filter
        self._unused: dict[str, float] = {}  # filters that nobody here has since then, monotonic
        self._touched = 0.0
        engine.serve(self, self._number_of)
        self._arguments = self._queue_arguments()

    def _queue_arguments(self) -> Headers:
        """The queue of a session loses what is oldest at its limit. It outlives what the log says of it, for
        while that stands it is looked for again and again."""
        single = ("x-single-active-consumer", Value(ValueType.BOOL, True))
        return (single, *self._arguments_of(self._engine.settings.state_secs * 2))

    def _arguments_of(self, expires_secs: float) -> Headers:
        settings, limits = self._engine.settings, self.limits
        expires = min(int(expires_secs * 1_000), EXPIRES_MS_MAX)
        return (
            *type_arguments(settings),
            ("x-expires", Value(ValueType.INT64, expires)),
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
        """So much waits for the log that nothing more is begun."""
        return self._engine.recorder.full

    def unsaid(self, before: int) -> bool:
        """Since `recorded` was `before` something has changed that a client must not be told yet."""
        return self.recorded != before

    def after_recorded(self, done: Callable[[Outcome], None]) -> None:
        """`done` hears ACCEPTED when the cluster has what it must."""
        asked, self._walks = self._walks, []
        self._asked.append(asked)
        self._engine.after_recorded(partial(self._recorded, asked, done))

    def _recorded(self, asked: list[Asked], done: Callable[[Outcome], None], outcome: Outcome) -> None:
        """Begin the walks of subscriptions that are bound. The client hears of that behind the first pages:
        what is published then does not come twice, as a rule."""
        self._asked = [one for one in self._asked if one is not asked]
        begun: list[SharedWalk] = []
        for session, topic_filter, options in asked:
            if session.subscriptions.get(topic_filter) is options:
                self._owe(session, topic_filter, options)
                walk = session.owed[topic_filter]
                if isinstance(walk, SharedWalk) and len(begun) < WALKS_MAX and not self._common.is_away:
                    begun.append(walk)
        left = len(begun)

        def then() -> None:
            nonlocal left
            left -= 1
            if not left:
                done(outcome)

        for walk in begun:
            walk.begin(then)
        if not begun:
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
        """The log has to know what the client is told of QoS 2."""
        lasting = isinstance(session, ClientSession) and session.lasting
        return self._engine.after_logged if lasting else None

    # Topics.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """The cluster; `$SYS` is this replica's own."""
        return super().sinks(address) if address.name.startswith(SYS) else self._engine.sinks(address)

    def wanting(self, address: Address) -> tuple[Sink, ...]:
        """Who of this replica's clients gets messages of a topic by its queue."""
        return tuple(sink for sink in super().sinks(address) if not _by_own_queue(sink))

    def subscribe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Add or replace a subscription; what is retained is owed when the log has been read up to now."""
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
        shared = SharedQueue(self._engine, group, queue, self._arguments_of(EXPIRES_SECS), prefetch)
        self._shared[topic_filter] = shared
        self._engine.share(shared, on=True)

    def _sweep_shares(self, consumers: Consumers, now: float) -> None:
        for shared in self._shared.values():
            consumers.begin(shared)  # if its node was down, or the cluster
        table = self._engine.table
        for topic_filter, since in list(self._unused.items()):
            if now - since >= GRACE_SECS:
                del self._unused[topic_filter]
                if not table.subscribed(topic_filter):
                    consumers.remove(queue_of(self._engine.names.shares, topic_filter))
        if now - self._touched >= TOUCH_SECS:
            self._touched = now
            wanted = {name for state in table.states.values() for name in state.subscribed}
            for topic_filter in wanted:
                if shared_pattern(topic_filter) is not None and topic_filter not in self._shared:
                    consumers.touch(queue_of(self._engine.names.shares, topic_filter))

    def ended(self, state: SessionState) -> None:
        """A session is over, and this replica cleans up."""
        for topic_filter in state.subscribed:
            if shared_pattern(topic_filter) is not None and topic_filter not in self._shared:
                self._unused[topic_filter] = clock.now()

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
        """The number that the log has for a client's message."""
        receipt = part.batch.receipts[part.slots[at]]
        if not isinstance(receipt, tuple) or not isinstance(receipt[0], AdmittedGuest):
            return None
        session = receipt[0].session
        ids = None if session is None else session.received_ids
        return ids.number(receipt[1]) if isinstance(ids, LoggedReceivedIds) else None

    def taking(self, session: Session, packet_ids: list[int]) -> None:
        """Log the ids of a lasting session's messages before these are published. Raises Pending."""
        ids = session.received_ids
        if not isinstance(ids, LoggedReceivedIds) or not ids.announce(packet_ids):
            return
        logged = trio.Event()
        self._engine.after_logged(lambda outcome: logged.set())
        raise Pending(logged)

    # Sessions.

    def user_of(self, client_id: str) -> str | None:
        """Whose the session of a client is; None: there is none."""
        state = self._engine.table.states.get(client_id)
        return super().user_of(client_id) if state is None else state.user

    def finds(self, client_id: str) -> bool:
        """A client that is about to be let in has an earlier session."""
        found = self._arrived.get(client_id)
        return found is not None and found[1].resumed

    def make_room(self, user: str, place: str, client_id: str = "") -> str:
        """The sessions of all replicas have a limit, too."""
        if len(self._engine.table) >= self.sessions_max:
            return "sessions_max"
        return super().make_room(user, place, client_id)

    def arriving(self, guest: object, coming: Newcomer) -> None:
        """Log a client that connects. Raises Pending until the log knows it."""
        assert isinstance(guest, MqttGuest)
        found = self._arrived.get(coming.client_id)
        if found is not None and found[0].coming.guest is guest:
            return
        will = None if coming.will is None else _said(coming.will, coming.sender)
        opening = self._engine.open(
            Coming(
                guest,
                coming.client_id,
                coming.clean,
                coming.expiry_secs,
                coming.sender.user,
                coming.place,
                will,
                coming.only_own,
            )
        )
        raise Pending(opening)

    def arrived(self, opening: Opening, arrival: Arrival) -> None:
        """The log knows that a client has come to this replica, and what it has found."""
        if not arrival.refused:
            self._arrived[opening.coming.client] = (opening, arrival)
        opening.answer()

    def dropped(self, *, expired: bool) -> None:
        """A queue has had no room for a message; or it `expired` there."""
        self.tally.expired += expired
        self.tally.queue_full += not expired

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Once a second: clients that have gone before they were let in, and shared subscriptions."""
        self._sweep_shares(consumers, now)
        self._sweep_walks(now)
        for client, (opening, arrival) in list(self._arrived.items()):
            if opening.coming.guest.stream.closed:
                del self._arrived[client]
                if arrival.state is not None:
                    self._engine.abandon(opening, arrival.state)

    def open(
        self, client_id: str, *, clean: bool, expiry_secs: float, user: str = "", place: str = ""
    ) -> tuple[Session, bool]:
        """The session of a client that the log knows to be here."""
        opening, arrival = self._arrived.pop(client_id)
        session = ClientSession(client_id, self.limits, self.tally, self._engine, opening.owner)
        session.user, session.place, session.expiry_secs = user, place, expiry_secs
        self.sessions[client_id] = session
        self._count(session)
        state = arrival.state
        if state is not None and state.queue:
            session.begin(state, f"{self._engine.names.sessions}.{state.queue}", self._arguments)
            session.fresh = not arrival.resumed
            for topic_filter, options in state.subscribed.items():
                self._enter(session, topic_filter, options)
            self._shown += bool(state.subscribed)
            self._engine.acquire(session, arrival.before)
        return session, arrival.resumed

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
        will_at = self._delays.pop(session.client_id, 0.0)
        state = self._engine.table.states.get(session.client_id)
        if state is not None and state.owner == session.owner:
            self._engine.leave(session, will_at)
        elif session.lasting:
            self._engine.leave(session, 0.0)

    def hand_over(self, session: Session, *, ended: bool = False) -> None:
        """The client was lost: others get what it was owed of shared subscriptions, here or elsewhere."""
        if isinstance(session, ClientSession):
            session.give_back()

    def lasting(self) -> list[ClientSession]:
        """Sessions of clients that are here, with queues."""
        return [one for one in self.sessions.values() if isinstance(one, ClientSession) and one.lasting]

    def opened_elsewhere(self, client: str, owner: Owner, *, late: bool, at_once: bool) -> bool:
        """A client by that identifier has another owner now; `late`: for some time. True: it was here.
        `at_once`: the new one takes its place in this wake-up, or its session is over.

        Its will says that the first connection is gone; when the client has long been there again that would
        only mislead.
        """
        waiting = self._arrived.get(client)
        if waiting is not None and waiting[0].owner != owner:
            del self._arrived[client]
            waiting[0].lose(TAKEN_OVER)
        session = self.sessions.get(client)
        if not isinstance(session, ClientSession) or session.owner == owner:
            return False
        outlet: object = session.outlet
        if not isinstance(outlet, MqttGuest):
            return False
        log.info("a client has come anew, here or at another replica", client=client)
        if late and isinstance(outlet, AdmittedGuest):
            outlet.will = None
        patient = session.lasting and not at_once
        if patient:
            session.stop()
        try:
            outlet.taken_over(patient=patient)
        except Exception as error:  # of this one alone
            outlet.stream.fail(error)
        return True

    def let_go_of(self, session: ClientSession, why: str) -> None:
        """A client has to connect anew."""
        outlet: object = session.outlet
        if isinstance(outlet, MqttGuest):
            outlet.stream.abort(why)

    # Wills.

    def keep_will(self, client_id: str, will: Will | None, sender: Sender) -> None:
        """The log has it."""

    def delay_will(self, client_id: str, at: float, publish: Callable[[], None]) -> None:
        """Whoever keeps the session publishes it in time; here only what is due."""
        if at <= OVERDUE:
            super().delay_will(client_id, at, publish)
        else:
            self._delays[client_id] = self._engine.time.utc() + (at - float(clock.now()))

    def publish_left(self, state: SessionState) -> None:
        """The will of a session is due."""
        will = state.will
        if will is None:
            return
        self._publishing[state.client] = state.owner
        sender = Sender(will.endpoint, state.client, will.user, will.address)
        properties = decode_list(will.properties, WILL_LIST)
        given = Will(will.topic, will.body, will.qos, will.retain, properties)
        self._left_wills.append(LeftWill(given, sender, 0.0))

    def forget_will(self, client_id: str) -> None:
        """It is published, or will not be."""
        owner = self._publishing.pop(client_id, None)
        if owner is not None:
            self._engine.willed(client_id, owner)

    def wills_pass(self) -> None:
        """Other replicas hold this life for dead, and publish the wills of its clients."""
        for session in self.sessions.values():
            outlet: object = session.outlet
            if isinstance(outlet, AdmittedGuest) and session.client_id in self._engine.table.states:
                outlet.will = None

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


def _said(will: Will, sender: Sender) -> WillSaid:
    delay: Any = will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
    return WillSaid(
        will.topic,
        will.body,
        will.qos,
        will.retain,
        encode_list(will.properties, WILL_LIST),
        delay,
        sender.endpoint,
        sender.user,
        sender.address,
    )

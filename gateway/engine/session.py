"""What a replica says to the cluster, and hears, over all of its connections.

Outwards it has one sink for every topic. Inwards messages of the replica's queue are matched with its
clients' subscriptions. A client's SUBACK or CONNACK waits until all bindings that were asked for are there.

Sessions are in the database that replicas share (sessions.py). Their queues are consumed here, by the replica
that has the client.

Each life of a process has a queue of its own, so that two processes of one name cannot take each other's
messages. A queue outlives a short absence of its replica; when the cluster has been away for
`engine_timeout_secs` the clients are let go, and another life begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.routing import OneSink
from gateway.containment import contained
from gateway.egress.link import LinkStatus
from gateway.engine.bindings import Bindings
from gateway.engine.client_session import Change, ClientSession, Told
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.connection import EngineConnection
from gateway.engine.consumers import Consumers, Content
from gateway.engine.envelope import ENGINE, Arrived, Number, decode
from gateway.engine.membership import Membership
from gateway.engine.names import Names, names_of, topic_of
from gateway.engine.once import Once, recent_chunks
from gateway.engine.publisher import EnginePublisher, NumberOf
from gateway.engine.retained import SharedRetained
from gateway.engine.sessions import Clients as SessionClients
from gateway.engine.sessions import SharedSessions
from gateway.engine.shares import SharedQueue
from gateway.errors import RemoteProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Batch, Recipient, Sink, SubBatch
from gateway.model.caches import make_room
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.spooled import Body, PassedOver
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.codec import decode_address, decode_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.state.interface import StateStore
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

ARRIVED_MAX: Final = 4_096  # content headers that are remembered, and
ARRIVED_OCTETS_MAX: Final = 1_024  # the largest that is worth it
ONCE_MIN: Final = (
    65_536  # numbers that are remembered of each life, at least: replicas differ in their windows
)
EXPIRED: Final = "expired"  # as RabbitMQ says it
AWAY: Final = "the cluster is away"
STOPPING: Final = "this replica stops"
Done = Callable[[Outcome], None]
KnownAddress = tuple[Address, tuple[Recipient, ...]]


class Clients(Protocol):
    """The clients of this replica."""

    def wanting(self, address: Address) -> tuple[Sink, ...]:
        """Who of them gets messages of a topic."""

    def new_to(
        self, recipients: tuple[Recipient, ...], message: Message, number: Number | None
    ) -> tuple[Recipient, ...]:
        """Return those that were not sent this message as a retained one; it has a number at QoS 2."""

    def lasting(self) -> list[ClientSession]:
        """Sessions of clients that are here, with queues."""

    def let_go_of(self, session: ClientSession, why: str) -> None:
        """A client has to connect anew."""

    def dropped(self, *, expired: bool) -> None:
        """A queue has had no room for a message; or it `expired` there."""

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Once a second."""


class Served(Clients, SessionClients, Protocol):
    """The clients of this replica, as their sessions and the connection to the cluster know them."""


class EngineSession(OneSink):
    """The link session of the engine. `life` names this life of the replica."""

    def __init__(
        self,
        settings: RabbitEngine,
        replica: str,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        let_go: Callable[[], None],
        time: ClusterClock,
        retained: SharedRetained,
        state: StateStore,
        membership: Membership,
    ) -> None:
        """`time` is asked for over this connection. `let_go` ends the connections of all clients, for the
        cluster was away for too long."""
        self.time = time
        self.publisher = EnginePublisher(
            status.stats,
            names_of(settings.namespace, settings.topic_exchange),
            self.time,
            retained,
            self._alone,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
            topics_max=limits.cache_entries_max,
        )
        super().__init__(self.publisher)
        self.settings = settings
        self.replica = replica
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.names: Names = names_of(settings.namespace, settings.topic_exchange)
        self.bindings = Bindings()
        self.recent_chunks = recent_chunks(settings.in_flight_max, limits.inflight_max)
        self.sessions = SharedSessions(state, membership, self, self.names.sessions, _soon)
        self.clients: Clients  # from `serve` on
        self.life = ""
        self.stopped = False  # the process ends
        self.hear_dropped: list[Callable[[str, bytes], None]] = []  # by their queue; those of outboxes
        self.once = Once(max(ONCE_MIN, 2 * settings.in_flight_max))
        self._dispatcher = dispatcher
        self._membership = membership
        self._let_go = let_go
        self._connection: EngineConnection | None = None
        self._up = False
        self._down_since: float | None = None
        self._pumping: dict[ClientSession, None] = {}
        self._waiting: list[Done] = []
        self._binding: list[Done] = []  # who waits for what has been asked for
        self._entries: dict[bytes, KnownAddress] = {}
        self._recipients: dict[Sink, Recipient] = {}
        self._known: dict[bytes, Arrived] = {}
        self._batch = Batch(self, Monotonic(0.0))  # the clock does not run yet
        membership.on_buried.append(self._buried)
        membership.on_due.append(self.sessions.due)
        membership.may_act = partial(getattr, self, "is_up")
        self._begin_life()

    def _begin_life(self) -> None:
        self.life = secrets.token_hex(6)

    @property
    def queue(self) -> str:
        """The queue of this life."""
        return f"{self.names.queues}.{self.replica}.{self.life}"

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Its share of the broker's gauges."""
        return {
            "gateway_engine_bindings": lambda: len(self.bindings),
            "gateway_engine_clock_skew_seconds": lambda: self.time.skew,
            "gateway_engine_retaining_messages": lambda: len(self.publisher.retaining),
            "gateway_engine_sessions": lambda: self.sessions.count,
            "gateway_engine_unconfirmed_clients": lambda: (
                len(self._waiting) + len(self._binding) + self.sessions.pending
            ),
        }

    def serve(self, clients: Served, number_of: NumberOf) -> None:
        """Whose messages these are; `number_of` says which number is stored for one. Before it runs."""
        self.clients = self.sessions.clients = clients
        self.publisher.number_of = number_of

    @property
    def why_not(self) -> str:
        """Why clients cannot be served; "": they can."""
        if self.stopped:
            return STOPPING
        if not self._up:
            return self.status.why or AWAY
        return self.sessions.why_not or self._membership.why_not or self.time.why_not

    @property
    def is_up(self) -> bool:
        """The cluster can be reached, and this replica does not stop."""
        return self._up and not self.stopped

    # What the link asks.

    @property
    def idle(self) -> bool:
        """Nothing waits for the cluster."""
        return self.idle_but(0)

    def idle_but(self, held: int) -> bool:
        """The same: what it sends waits in front of no route."""
        return self.publisher.idle and not len(self._batch) and not self.sessions.pending

    @property
    def unconfirmed(self) -> int:
        """Messages for the cluster that it has not confirmed, sent or not."""
        publisher = self.publisher
        return publisher.waiting_messages + publisher.in_flight + len(publisher.retaining)

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Routes know listeners and links, and not what is behind them."""

    def connect(self, stream: Stream, target: Target, now: float) -> EngineConnection:
        """A connection stands: begin the handshake."""
        self._connection = EngineConnection(self, stream, target, now)
        return self._connection

    def turn_done(self) -> None:
        """Hand out what this wake-up has gathered; then it can be acknowledged."""
        batch = self._batch
        if len(batch):
            self._batch = Batch(self, clock.now())
            batch.send()
        pumping, self._pumping = self._pumping, {}
        for session in pumping:
            try:
                session.pump()
            except Exception as error:
                contained("delivery", error, client=session.client_id)
        if self._connection is not None:
            self._connection.dealt_with()

    def tick(self, now: float) -> None:
        """Once a second, connected or not."""
        if not self._up:
            self._down_since = now if self._down_since is None else self._down_since
            if now - self._down_since >= self.settings.engine_timeout_secs:
                self._give_clients_up(now)
        if self._connection is not None and self._up and not self.stopped:
            self.clients.sweep(self._connection.consumers, now)

    def _give_clients_up(self, now: float) -> None:
        self._down_since = now
        self._let_go()
        if self._connection is None:
            self._begin_life()

    # What batches ask: this is their source.

    def settle(self, receipts: list[None], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Sessions take everything, and count what they drop: the cluster has no part in it."""
        self.stats.accepted_messages += len(receipts)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """One slow client does not stop the others."""
        return []

    # What a connection asks.

    def disconnected(self, connection: EngineConnection, why: str) -> None:
        """The connection is gone; what it had not confirmed is sent again over the next one."""
        if self._connection is not connection:
            return
        self._connection = None
        self._up = False
        self.stats.blocked = False
        self._waiting = self._binding + self._waiting
        self._binding = []
        self.publisher.close()
        self.status.went_down(why)

    def deliver(self, wire: bytes, raw: bytes, body: Body) -> None:
        """A message of the replica's queue."""
        found = self._read_content(wire, raw, body)
        if found is None:
            return
        (address, recipients), arrived, body = found
        if arrived.number is not None and not self.once.is_first(arrived.number):
            self.stats.duplicates += 1
            return
        if recipients:
            message = _message(address, arrived, body, self.time.correction)
            if arrived.retain or arrived.number is not None:
                recipients = self.clients.new_to(recipients, message, arrived.number)
            if len(recipients) == 1:
                self._batch.add_only(None, recipients[0], message)
            elif recipients:
                self._batch.add(None, [(recipient, message) for recipient in recipients])

    def _read_content(self, wire: bytes, raw: bytes, body: Body) -> tuple[KnownAddress, Arrived, Body] | None:
        try:
            entry = self._entries.get(wire) or self._entry(wire)
            arrived = self._known.get(raw) or self._read(raw)
        except (NameRefused, RemoteProtocolError) as error:
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return None
        size = body.size if not body and isinstance(body, PassedOver) else len(body)
        if size > self.limits.message_bytes_max:
            text = f"a body of {size} octets exceeds limits.message_bytes_max; it was not kept"
            self._refuse(wire, b"", Outcome(Verdict.REJECTED, Reason.TOO_LARGE, text))
            return None
        return entry, arrived, body

    def dropped(self, raw: bytes, body: Body) -> None:
        """A queue has had no room for a message, or no time."""
        try:
            headers = dict(decode_properties(raw).headers or ())
        except RemoteProtocolError as error:
            self.stats.refuse(Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return
        reason, queue = (
            "" if found is None else str(found.value)
            for found in (headers.get("x-first-death-reason"), headers.get("x-first-death-queue"))
        )
        self.clients.dropped(expired=reason == EXPIRED)
        for hear in self.hear_dropped:
            hear(queue, bytes(body))
        if reason != EXPIRED:
            log.warning("queue on cluster full, oldest messages dropped", queue=queue)

    def _refuse(self, wire: bytes, body: Body, outcome: Outcome) -> None:
        """What no client could be given."""
        self.stats.refuse(outcome)
        log.warning("message from cluster undeliverable", why=outcome.text)
        message = Message(amqp_address(*decode_address(wire)), bytes(body), sender=Sender(ENGINE))
        self._dispatcher.dead_letters.add([message], "", outcome)

    def _entry(self, wire: bytes) -> KnownAddress:
        make_room(self._entries, self.limits.cache_entries_max)
        address = topic_of(decode_address(wire)[1])
        found = [self._recipient(sink) for sink in self.clients.wanting(address)]
        entry = self._entries[wire] = (address, tuple(found))
        return entry

    def _recipient(self, sink: Sink) -> Recipient:
        found = self._recipients.get(sink)
        if found is None:
            found = self._recipients[sink] = Recipient(sink)
        return found

    def _read(self, raw: bytes) -> Arrived:
        arrived = decode(raw)
        if len(raw) <= ARRIVED_OCTETS_MAX and arrived.number is None and not arrived.expires:
            make_room(self._known, ARRIVED_MAX)
            self._known[raw] = arrived
        return arrived

    def forget_entries(self) -> None:
        """Somebody has subscribed, or does no longer."""
        self._entries.clear()
        self._recipients.clear()

    # Bindings, and clients that wait for them.

    def bind(self, levels: list[str]) -> None:
        """A client of this replica wants what matches a filter."""
        key = self.bindings.add(levels)
        if key is not None and self._connection is not None:
            self._connection.bind(key, True)

    def unbind(self, levels: list[str]) -> None:
        """It does not any more."""
        key = self.bindings.remove(levels)
        if key is not None and self._connection is not None:
            self._connection.bind(key, False)

    def after_bound(self, done: Done) -> None:
        """`done` hears ACCEPTED when all bindings that were asked for until now are there."""
        self._waiting.append(done)
        self._ask_when_bound()

    def decided(self) -> None:
        """Of no queue it is open any more whether it is there: all that has to be bound is asked for."""
        self._ask_when_bound()

    def _ask_when_bound(self) -> None:
        connection = self._connection
        if connection is None or not self._up or not self._waiting or connection.consumers.undecided:
            return
        waiting, self._waiting = self._waiting, []
        self._binding += waiting
        connection.after_bound(partial(self._bound, connection, len(waiting)))

    def _bound(self, connection: EngineConnection, count: int) -> None:
        if self._connection is not connection:
            return
        bound, self._binding = self._binding[:count], self._binding[count:]
        for done in bound:
            try:
                done(ACCEPTED)
            except Exception as error:  # of one client: the others have waited as long
                contained("connection", error)

    def came_up(self) -> None:
        """All that is needed is there."""
        assert self._connection is not None
        self._up = True
        self._down_since = None
        self.status.came_up()
        for session in self.clients.lasting():
            if not self.sessions.is_waiting(session):
                self.consume(session)
        self._ask_when_bound()
        if not self.stopped:
            self.clients.sweep(self._connection.consumers, clock.now())

    def _buried(self, incarnation: str) -> None:
        """Other replicas hold this one for dead, and what it had is theirs."""
        self._let_go()
        self._begin_life()
        if self._connection is not None:
            self._connection.give_up("other replicas held this one for dead")

    # The queues of sessions.

    def consume(self, session: ClientSession) -> None:
        """Consume the queue of a session, now or when the cluster is there."""
        if self._connection is not None and self._up and not self.stopped:
            self._connection.consumers.begin(session)

    def end(self, session: ClientSession, done: Callable[[Sequence[Content]], None]) -> None:
        """Consume it no longer. `done` hears what it was given back."""
        if self._connection is None:
            done(())
        else:
            self._connection.consumers.end(session, done)

    def delete(self, queue: str, done: Callable[[], None] | None = None) -> None:
        """Delete a queue. Without a connection it stays, and `done` hears nothing."""
        if self._connection is not None:
            self._connection.delete_queue(queue, done)

    def hand_over(self, done: Done) -> None:
        """The process ends: other replicas get the queues of its clients' sessions, and `done` hears when the
        database says that they are free."""
        self.stopped = True
        sessions = self.clients.lasting()
        for session in sessions:
            session.stop()
        if self._connection is not None:
            self._connection.consumers.close()
        self.sessions.release_all(sessions, partial(done, ACCEPTED))

    def share(self, shared: SharedQueue, *, on: bool) -> None:
        """This replica has members of a shared subscription, or no longer."""
        if self._connection is not None and self._up:
            if on:
                self._connection.consumers.begin(shared)
            else:
                self._connection.consumers.end(shared, None)

    # What sessions ask.

    def change(self, session: ClientSession) -> Change:
        """Return what is to be stored of a session, for more to be added; it is stored soon."""
        return self.sessions.change(session)

    def after_stored(self, session: ClientSession, done: Told) -> None:
        """`done` hears what has become of all that was to be stored of a session until now."""
        self.sessions.after_stored(session, done)

    def pump(self, session: ClientSession) -> None:
        """It has something for its client; it is pumped when the wake-up ends."""
        self._pumping[session] = None

    def next_number(self) -> Number:
        """For a message that is going to be published."""
        return self.publisher.next_number()

    def let_go_of(self, session: ClientSession, why: str) -> None:
        """Its client has to connect anew."""
        self.clients.let_go_of(session, why)

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """The message of a delivery; None: there is none that could be delivered."""
        found = self._read_content(*content)
        if found is None:
            return None
        (address, _), arrived, body = found
        return _message(address, arrived, body, self.time.correction), arrived.number

    def check_owner(self, session: ClientSession, done: Callable[[bool], None]) -> None:
        """Call `done` with True if the database has the session as this replica's, with its queue."""
        self.sessions.check_owner(session, done)

    def bind_queue(self, session: ClientSession, key: str) -> None:
        """`unbound` says what is to be done with a key."""
        if self._connection is not None:
            self._connection.consumers.bind(session, key)

    # A message of nobody's.

    def _alone(self, message: Message) -> SubBatch:
        batch = Batch(self, clock.now())
        part = SubBatch(batch, Recipient(self.publisher))
        part.messages.append(message)
        part.slots.append(batch.open(None, 1))
        return part


def _soon(function: Callable[[], None]) -> None:
    trio.lowlevel.current_trio_token().run_sync_soon(function, idempotent=True)


def _message(address: Address, arrived: Arrived, body: Body, correction: float) -> Message:
    expires = arrived.expires + correction if arrived.expires else arrived.expires
    if arrived.lifetime:
        expires = clock.utc() + arrived.lifetime
    return Message(
        address,
        body,
        arrived.property_set,
        arrived.qos,
        arrived.durable,
        arrived.retain,
        expires,
        arrived.hops,
        arrived.sender,
    )

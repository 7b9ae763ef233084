"""Session of a replica with the cluster, over all of its connections.

Outgoing, the session is one sink for every topic. Incoming, messages of the replica's queue are matched with
the subscriptions of its clients. A client's SUBACK or CONNACK waits until all requested bindings are
confirmed.

MQTT sessions are in the database that replicas share (sessions.py). Their queues are consumed by the replica
to which the client is connected.

Each life of a replica has a queue of its own, so that two processes of one name cannot take each other's
messages. The queue outlives a short absence of its replica. When the cluster has been away for
`engine_timeout_secs`, or other replicas have declared this one dead, all clients are disconnected and a new
life begins.
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
from gateway.engine.client_session import ClientSession, SessionChange, Told
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.connection import EngineConnection
from gateway.engine.consumers import Consumers, Content
from gateway.engine.envelope import ENGINE, Arrived, Number, decode
from gateway.engine.membership import Membership
from gateway.engine.names import Names, names_of, topic_of
from gateway.engine.once import DuplicateFilter, recent_chunks
from gateway.engine.publisher import EnginePublisher, EpochOf, NumberOf
from gateway.engine.retained import SharedRetained
from gateway.engine.sessions import SessionClients as SessionClients
from gateway.engine.sessions import SharedSessions
from gateway.engine.shares import SharedQueue
from gateway.errors import RemoteProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Batch, Receipt, Recipient, Sink, SubBatch
from gateway.model.caches import make_room
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.spooled_bodies import Body, DiscardedBody
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.codec import decode_address, decode_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import Limits
from gateway.settings.endpoints import LinkUrl
from gateway.settings.engine import RabbitEngine
from gateway.state.interface import StateStore
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

ARRIVED_MAX: Final = 4_096  # cached content headers, and
ARRIVED_BYTES_MAX: Final = 1_024  # the size of the largest one that is cached
ONCE_MIN: Final = (
    65_536  # numbers remembered of each replica process, at least: replicas differ in their windows
)
EXPIRED: Final = "expired"  # in RabbitMQ's dead-letter history
AWAY: Final = "the cluster is away"
STOPPING: Final = "this replica stops"
Done = Callable[[Outcome], None]
KnownAddress = tuple[Address, tuple[Recipient, ...]]


class LocalClients(Protocol):
    """Clients of this replica, as this session uses them."""

    def local_subscribers(self, address: Address) -> tuple[Sink, ...]:
        """Return the clients that get messages of a topic by the replica's queue."""

    def exclude_already_sent(
        self, recipients: tuple[Recipient, ...], message: Message, number: Number | None
    ) -> tuple[Recipient, ...]:
        """Return the recipients that were not sent this message as a retained one.

        `number` is None below QoS 2.
        """

    def queue_sessions(self) -> list[ClientSession]:
        """Return the sessions with a queue whose clients are connected here."""

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        """Disconnect the client of a session with a reason; it must reconnect."""

    @property
    def has_ending_claims(self) -> bool:
        """True if wills are being published that another replica may publish soon."""

    def is_left_to_others(self, receipt: Receipt) -> bool:
        """Return True if a message must not be sent here any more: it is a will whose claim is ending."""

    def dropped(self, *, expired: bool) -> None:
        """Count a message that a queue has dropped because it was full, or because it `expired` there."""

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Run the timer, once per second."""


class ServedClients(LocalClients, SessionClients, Protocol):
    """Interface of this replica's clients, for their shared sessions and for the link to the cluster."""


class EngineSession(OneSink):
    """Link session of the engine. `life` is part of the name of the replica's queue."""

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
        """Create the session.

        `time` is queried over this connection. `let_go` disconnects all clients, when the cluster was away
        for too long or other replicas have declared this one dead.
        """
        self.time = time
        self.publisher = EnginePublisher(
            status.stats,
            names_of(settings.namespace, settings.topic_exchange),
            self.time,
            retained,
            self._alone,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            bytes_max=limits.queue_bytes_max,
            topics_max=limits.cache_entries_max,
        )
        self.publisher.share_among(dispatcher.quotas)
        super().__init__(self.publisher)
        self.settings = settings
        self.replica = replica
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.names: Names = names_of(settings.namespace, settings.topic_exchange)
        self.bindings = Bindings()
        self.recent_chunks = recent_chunks(settings.in_flight_max, limits.inflight_max)
        self.sessions = SharedSessions(state, membership, self, self.names.sessions, _call_soon)
        self.clients: LocalClients  # set by `serve`
        self.life = ""
        self.stopped = False  # True when the process ends
        self.hear_dropped: list[Callable[[str, bytes], None]] = []  # called with queue and body
        self.once = DuplicateFilter(max(ONCE_MIN, 2 * settings.in_flight_max))
        self._dispatcher = dispatcher
        self._retained = retained
        self._membership = membership
        self._let_go = let_go
        self._connection: EngineConnection | None = None
        self._up = False
        self._down_since: float | None = None
        self._pumping: dict[ClientSession, None] = {}
        self._waiting: list[Done] = []
        self._binding: list[Done] = []  # callbacks that wait for bindings that were requested
        self._entries: dict[bytes, KnownAddress] = {}
        self._recipients: dict[Sink, Recipient] = {}
        self._parsed: dict[bytes, Arrived] = {}
        self._batch = Batch(self, Monotonic(0.0))  # the loop clock does not run yet
        membership.on_buried.append(self._restart_incarnation)
        membership.on_due.append(self.sessions.run_due_work)
        membership.may_act = partial(getattr, self, "is_up")
        self._begin_life()

    def _begin_life(self) -> None:
        self.life = secrets.token_hex(6)

    @property
    def queue(self) -> str:
        """Name of the replica's queue in this life."""
        return f"{self.names.queues}.{self.replica}.{self.life}"

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return the engine's gauges, by metric name."""
        return {
            "gateway_engine_bindings": lambda: len(self.bindings),
            "gateway_engine_clock_skew_seconds": lambda: self.time.skew,
            "gateway_engine_retained_reads": lambda: self._retained.reads.waiting_count,
            "gateway_engine_retaining_messages": lambda: len(self.publisher.retaining),
            "gateway_engine_sessions": lambda: self.sessions.count,
            "gateway_engine_unconfirmed_clients": lambda: (
                len(self._waiting) + len(self._binding) + self.sessions.pending
            ),
        }

    def serve(self, clients: ServedClients, number_of: NumberOf, epoch_of: EpochOf) -> None:
        """Set the clients whose messages these are, and what is known of a message's sender.

        Called before the start.
        """
        self.clients = self.sessions.clients = clients
        self.publisher.number_of = number_of
        self.publisher.epoch_of = epoch_of

    @property
    def unavailable_reason(self) -> str:
        """Why clients cannot be served; "" if they can."""
        if self.stopped:
            return STOPPING
        if not self._up:
            return self.status.why or AWAY
        return (
            self.sessions.unavailable_reason
            or self._membership.unavailable_reason
            or self.time.unavailable_reason
        )

    @property
    def is_up(self) -> bool:
        """True if the cluster can be reached, and this replica does not stop."""
        return self._up and not self.stopped

    # Interface for the link.

    @property
    def idle(self) -> bool:
        """True if no message waits for the cluster, and nothing is on its way to the database."""
        return self.idle_but(0)

    def idle_but(self, held_count: int) -> bool:
        """Return `idle`; `held_count` has no effect: messages from the cluster pass through no route."""
        return self.publisher.idle and not len(self._batch) and not self.sessions.pending

    @property
    def unconfirmed(self) -> int:
        """Number of messages for the cluster that are not confirmed, sent or not."""
        publisher = self.publisher
        return publisher.waiting_messages + publisher.in_flight + len(publisher.retaining)

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Do nothing: routes refer to listeners and links, not to the engine behind them."""

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> EngineConnection:
        """Begin the handshake on a new connection. Return the owner of its stream."""
        self._connection = EngineConnection(self, stream, target, now)
        return self._connection

    def end_turn(self) -> None:
        """Publish the batch of this wake-up, let sessions send, and acknowledge what was received."""
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
        """Run the timer, once per second, connected or not."""
        if not self._up:
            self._down_since = now if self._down_since is None else self._down_since
            if now - self._down_since >= self.settings.engine_timeout_secs:
                self._disconnect_clients(now)
        if self.publisher.waiting_messages and self.clients.has_ending_claims:
            self.publisher.leave_to_others(self.clients.is_left_to_others)
        if self._connection is not None and self._up and not self.stopped:
            self.clients.sweep(self._connection.consumers, now)

    def _disconnect_clients(self, now: float) -> None:
        self._down_since = now
        self._let_go()
        if self._connection is None:
            self._begin_life()

    # Interface for batches, whose source this is.

    def settle(self, receipts: list[None], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Count the messages as accepted, whatever the outcome: sessions count their own drops."""
        self.stats.accepted_messages += len(receipts)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return no holds: one slow client does not stop the others."""
        return []

    # Interface for the connection.

    def disconnected(self, connection: EngineConnection, why: str) -> None:
        """Handle the end of a connection; unconfirmed messages are resent over the next one."""
        if self._connection is not connection:
            return
        self._connection = None
        self._up = False
        self.stats.blocked = False
        self._waiting = self._binding + self._waiting
        self._binding = []
        self.publisher.close()
        self.status.mark_down(why)

    def deliver(self, wire: bytes, raw: bytes, body: Body) -> None:
        """Pass a message of the replica's queue to the clients that want it."""
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
                recipients = self.clients.exclude_already_sent(recipients, message, arrived.number)
            if len(recipients) == 1:
                self._batch.add_only(None, recipients[0], message)
            elif recipients:
                self._batch.add(None, [(recipient, message) for recipient in recipients])

    def _read_content(self, wire: bytes, raw: bytes, body: Body) -> tuple[KnownAddress, Arrived, Body] | None:
        try:
            entry = self._entries.get(wire) or self._entry(wire)
            arrived = self._parsed.get(raw) or self._read(raw)
        except (NameRefused, RemoteProtocolError) as error:
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return None
        size = body.size if not body and isinstance(body, DiscardedBody) else len(body)
        if size > self.limits.message_bytes_max:
            text = f"a body of {size} bytes exceeds limits.message_bytes_max; it was not kept"
            self._refuse(wire, b"", Outcome(Verdict.REJECTED, Reason.TOO_LARGE, text))
            return None
        return entry, arrived, body

    def dropped(self, raw: bytes, body: Body) -> None:
        """Count a message that a queue has dropped, and pass queue name and body to `hear_dropped`.

        Logs a warning unless the message had expired: then the queue was full. A message with malformed
        properties (`raw`) is only counted as refused.
        """
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
        """Store a message that cannot be given to any client as a dead letter."""
        self.stats.refuse(outcome)
        log.warning("message from cluster undeliverable, dead-lettered", why=outcome.text)
        message = Message(amqp_address(*decode_address(wire)), bytes(body), sender=Sender(ENGINE))
        self._dispatcher.dead_letters.add([message], "", outcome)

    def _entry(self, wire: bytes) -> KnownAddress:
        make_room(self._entries, self.limits.cache_entries_max)
        address = topic_of(decode_address(wire)[1])
        found = [self._recipient(sink) for sink in self.clients.local_subscribers(address)]
        entry = self._entries[wire] = (address, tuple(found))
        return entry

    def _recipient(self, sink: Sink) -> Recipient:
        found = self._recipients.get(sink)
        if found is None:
            found = self._recipients[sink] = Recipient(sink)
        return found

    def _read(self, raw: bytes) -> Arrived:
        arrived = decode(raw)
        if len(raw) <= ARRIVED_BYTES_MAX and arrived.number is None and not arrived.expires:
            make_room(self._parsed, ARRIVED_MAX)
            self._parsed[raw] = arrived
        return arrived

    def forget_entries(self) -> None:
        """Clear the cache of recipients, because a subscription was added or removed."""
        self._entries.clear()
        self._recipients.clear()

    # Bindings, and clients that wait for them.

    def bind(self, levels: list[str]) -> None:
        """Count a subscription of this replica's clients, and bind its key if it is the first one.

        `levels` are the levels of the subscription's filter.
        """
        key = self.bindings.add(levels)
        if key is not None and self._connection is not None:
            self._connection.bind(key, True)

    def unbind(self, levels: list[str]) -> None:
        """Discount a subscription, given its filter's levels, and unbind its key if it was the last."""
        key = self.bindings.remove(levels)
        if key is not None and self._connection is not None:
            self._connection.bind(key, False)

    def after_bound(self, done: Done) -> None:
        """Call `done` with ACCEPTED when all bindings requested until now are confirmed."""
        self._waiting.append(done)
        self._ask_when_bound()

    def handle_checks_complete(self) -> None:
        """Continue with waiting bindings, because the existence of every queue is known now."""
        self._ask_when_bound()

    def _ask_when_bound(self) -> None:
        connection = self._connection
        if (
            connection is None
            or not self._up
            or not self._waiting
            or connection.consumers.has_pending_bindings
        ):
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
            except Exception as error:  # it concerns one client; the others must not wait
                contained("connection", error)

    def start_serving(self) -> None:
        """Start to serve, because everything that the engine needs exists."""
        assert self._connection is not None
        self._up = True
        self._down_since = None
        self.status.mark_up()
        for session in self.clients.queue_sessions():
            if not self.sessions.is_waiting(session):
                self.consume(session)
        self._ask_when_bound()
        if not self.stopped:
            self.clients.sweep(self._connection.consumers, clock.now())

    def _restart_incarnation(self, incarnation: str) -> None:
        """Disconnect all clients and start a new life, because other replicas have declared this one dead."""
        self._let_go()
        self._begin_life()
        if self._connection is not None:
            self._connection.abort("other replicas held this one for dead")

    # Queues of sessions.

    def consume(self, session: ClientSession) -> None:
        """Consume the queue of a session, if the cluster is connected; otherwise `start_serving` does it."""
        if self._connection is not None and self._up and not self.stopped:
            self._connection.consumers.begin(session)

    def end(self, session: ClientSession, done: Callable[[Sequence[Content]], None]) -> None:
        """Stop consuming the queue of a session. `done` is called with the requeued contents."""
        if self._connection is None:
            done(())
        else:
            self._connection.consumers.end(session, done)

    def delete(self, queue: str, done: Callable[[], None] | None = None) -> None:
        """Delete a queue. Without a connection it stays, and `done` is not called."""
        if self._connection is not None:
            self._connection.delete_queue(queue, done)

    def set_binding(self, queue: str, key: str, bound: bool, done: Callable[[], None]) -> None:
        """Bind the queue of an absent client's session to a key, or unbind it if `bound` is False.

        Without a connection `done` is not called.
        """
        if self._connection is not None:
            self._connection.set_binding(queue, key, bound, done)

    def release_sessions(self, done: Done) -> None:
        """Release the queues of all sessions to other replicas, because the process ends.

        `done` is called when the database has recorded that they are free.
        """
        self.stopped = True
        sessions = self.clients.queue_sessions()
        for session in sessions:
            session.stop()
        if self._connection is not None:
            self._connection.consumers.close()
        self.sessions.release_all(sessions, partial(done, ACCEPTED))

    def share(self, shared: SharedQueue, *, on: bool) -> None:
        """Start or stop consuming a shared subscription's queue.

        `on` is True if this replica has members of the subscription.
        """
        if self._connection is not None and self._up:
            if on:
                self._connection.consumers.begin(shared)
            else:
                self._connection.consumers.end(shared, None)

    # Interface for sessions.

    def change(self, session: ClientSession) -> SessionChange:
        """Return the pending changes of a session, for more to be added; they are stored soon."""
        return self.sessions.change(session)

    def after_stored(self, session: ClientSession, done: Told) -> None:
        """Call `done` with the outcome when all changes of a session until now are stored, or cannot be."""
        self.sessions.after_stored(session, done)

    def pump(self, session: ClientSession) -> None:
        """Schedule `session.pump()` for the end of this wake-up."""
        self._pumping[session] = None

    def next_number(self) -> Number:
        """Return a number for a message that will be published later."""
        return self.publisher.next_number()

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        """Disconnect the client of a session with a reason; it must reconnect."""
        self.clients.disconnect_client(session, why)

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """Return the message of a delivery and its number, or None if it cannot be delivered."""
        found = self._read_content(*content)
        if found is None:
            return None
        (address, _), arrived, body = found
        return _message(address, arrived, body, self.time.correction), arrived.number

    def check_owner(self, session: ClientSession, done: Callable[[bool], None]) -> None:
        """Call `done` with True if the database has the session as this replica's, with its queue."""
        self.sessions.check_owner(session, done)

    def bind_queue(self, session: ClientSession, key: str) -> None:
        """Bind or unbind a key of the session's queue, as `session.unbound` requests."""
        if self._connection is not None:
            self._connection.consumers.bind(session, key)

    # Messages whose publisher is not waiting.

    def _alone(self, message: Message) -> SubBatch:
        batch = Batch(self, clock.now())
        part = SubBatch(batch, Recipient(self.publisher))
        part.messages.append(message)
        part.slots.append(batch.open(None, 1))
        return part


def _call_soon(function: Callable[[], None]) -> None:
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

"""Session of a replica with the cluster, over all of its connections.

Outgoing, the session is one sink for every topic. Incoming, messages of the replica's queue are matched with
the subscriptions of its clients. A client's SUBACK or CONNACK waits until all requested bindings are
confirmed.

MQTT sessions are in the database that replicas share (sessions.py). Their queues are consumed by the replica
to which the client is connected.

The name of the replica's queue contains a random id, `queue_id`, so that two processes of one name cannot
take each other's messages. The queue outlives a short absence of its replica. When the cluster has been
unavailable for `engine_timeout_secs`, or other replicas have declared this one dead, all clients are
disconnected and a new queue is used.
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
from gateway.broker.mqtt.session import Session
from gateway.broker.routing import OneSink
from gateway.containment import contained
from gateway.egress.link import LinkStatus
from gateway.engine.bindings import Bindings
from gateway.engine.client_session import ClientSession, OutcomeCallback, SessionChange
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.connection import EngineConnection
from gateway.engine.consumers import Consumers, Content, QueueOwner
from gateway.engine.envelope import ENGINE, MessageHeader, Number, decode
from gateway.engine.membership import Membership
from gateway.engine.names import Names, names_of, topic_of
from gateway.engine.publisher import EnginePublisher, EpochOf, NumberOf
from gateway.engine.repeated_messages import DuplicateFilter, recent_chunks
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
AWAY: Final = "the cluster is unreachable"
STOPPING: Final = "this replica is stopping"
Done = Callable[[Outcome], None]
BoundCallback = tuple[Session | None, Done]
"""Session whose changes need bindings, or None; callback for when the cluster has confirmed these."""
KnownAddress = tuple[Address, tuple[Recipient, ...]]


class LocalClients(Protocol):
    """Interface of this replica's clients that the session with the cluster uses."""

    def local_subscribers(self, address: Address) -> tuple[Sink, ...]:
        """Return this replica's subscribers of a topic that get its messages by the replica's queue."""

    def exclude_already_sent(
        self, recipients: tuple[Recipient, ...], message: Message, number: Number | None
    ) -> tuple[Recipient, ...]:
        """Return those of `recipients` that have not got this published message as a retained one before.

        `number` is the message's number, None below QoS 2.
        """

    def pending_queue(self, session: ClientSession, consumers: Consumers) -> QueueOwner | None:
        """Return the owner of a queue for which replies to this session's client wait, or None."""

    def queue_sessions(self) -> list[ClientSession]:
        """Return the sessions of connected clients that have a queue on the cluster."""

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        """Abort the connection of a session's client for the reason `why`; the client must reconnect."""

    @property
    def has_ending_claims(self) -> bool:
        """True if this replica has a claim of a will not yet published, and the claim is about to end."""

    def is_left_to_others(self, receipt: Receipt) -> bool:
        """Return True if a message is a will whose claim is ending: then another replica may publish it.

        `receipt` is that of the message.
        """

    def dropped(self, *, expired: bool) -> None:
        """Count a message that a queue on the cluster has dropped.

        `expired` is True if the message had expired, and False if the queue was full.
        """

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Run the timer, once per second; `now` is in loop-clock seconds."""


class ServedClients(LocalClients, SessionClients, Protocol):
    """Interface of this replica's clients that their sessions and the session with the cluster use."""


class EngineSession(OneSink):
    """Link session of the engine: it exchanges the messages of this replica's clients with the cluster.

    `queue_id` is the random id in the name of the replica's present queue.
    """

    def __init__(
        self,
        settings: RabbitEngine,
        replica: str,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        disconnect_clients: Callable[[], None],
        time: ClusterClock,
        retained: SharedRetained,
        state: StateStore,
        membership: Membership,
    ) -> None:
        """Create the session. `replica` is this replica's configured name, `status` that of the connection.

        `time` is the estimate of the cluster's time, which is queried over the connection. `retained` has the
        retained messages, `state` is the shared database. `disconnect_clients` disconnects all clients; it
        is called if the cluster is unavailable for too long, or other replicas have declared this one dead.
        """
        self.time = time
        self.publisher = EnginePublisher(
            status.stats,
            names_of(settings.namespace, settings.topic_exchange),
            self.time,
            retained,
            self._single_message_batch,
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
        self.queue_id = ""
        self.stopped = False  # True when the process ends
        self.on_dropped: list[Callable[[str, bytes], None]] = []  # called with queue and body
        self.duplicate_filter = DuplicateFilter(max(ONCE_MIN, 2 * settings.in_flight_max))
        self._dispatcher = dispatcher
        self._retained = retained
        self._membership = membership
        self._disconnect_clients = disconnect_clients
        self._connection: EngineConnection | None = None
        self._up = False
        self._down_since: float | None = None
        self._pumping: dict[ClientSession, None] = {}
        self._waiting: list[BoundCallback] = []
        self._binding: list[BoundCallback] = []  # callbacks that wait for bindings that were requested
        # Callbacks that wait until a queue is consumed or its keys can be bound, by the queue's owner.
        self._blocked: dict[QueueOwner, list[BoundCallback]] = {}
        self._entries: dict[bytes, KnownAddress] = {}
        self._recipients: dict[Sink, Recipient] = {}
        self._parsed: dict[bytes, MessageHeader] = {}
        self._batch = Batch(self, Monotonic(0.0))  # the loop clock does not run yet
        membership.on_declared_dead.append(self._restart_incarnation)
        membership.on_claimed_work.append(self.sessions.run_due_work)
        membership.may_act = partial(getattr, self, "is_up")
        self._choose_queue_id()

    def _choose_queue_id(self) -> None:
        """Choose a new random id for the name of the replica's queue."""
        self.queue_id = secrets.token_hex(6)

    @property
    def queue(self) -> str:
        """Name of the replica's present queue."""
        return f"{self.names.queues}.{self.replica}.{self.queue_id}"

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return the engine's gauges: by metric name, a function that returns the value."""
        return {
            "gateway_engine_bindings": lambda: len(self.bindings),
            "gateway_engine_clock_skew_seconds": lambda: self.time.skew,
            "gateway_engine_retained_reads": lambda: self._retained.reads.waiting_count,
            "gateway_engine_retaining_messages": lambda: len(self.publisher.retain_queue),
            "gateway_engine_sessions": lambda: self.sessions.count,
            "gateway_engine_unconfirmed_clients": lambda: (
                len(self._waiting)
                + len(self._binding)
                + sum(map(len, self._blocked.values()))
                + self.sessions.pending
            ),
        }

    def serve(
        self, clients: ServedClients, number_of: NumberOf, epoch_of: EpochOf, listeners: frozenset[str]
    ) -> None:
        """Set the clients of this replica, and the functions that look up the sender of a message.

        `number_of` returns a message's stored number. `epoch_of` returns a message's client, the epoch of the
        client's session, and True if the message is a will. `listeners` has the names of the MQTT listeners.
        Called once, before the session is used.
        """
        self.clients = self.sessions.clients = clients
        self.publisher.number_of = number_of
        self.publisher.epoch_of = epoch_of
        self.publisher.is_left = clients.is_left_to_others
        self.publisher.listeners = listeners

    @property
    def unavailable_reason(self) -> str:
        """Reason why clients cannot be served; "" if they can."""
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
        """True if the cluster can be reached and this replica is not stopping."""
        return self._up and not self.stopped

    # Interface for the link.

    @property
    def idle(self) -> bool:
        """True if the cluster has confirmed all messages and the database all changes of sessions."""
        return self.idle_but(0)

    def idle_but(self, held_count: int) -> bool:
        """Return `idle`. `held_count` has no effect, because no route can hold messages from the cluster."""
        return self.publisher.idle and not len(self._batch) and not self.sessions.pending

    @property
    def unconfirmed(self) -> int:
        """Number of messages that the cluster has not confirmed, including those that are not sent yet."""
        publisher = self.publisher
        return publisher.waiting_messages + publisher.in_flight + len(publisher.retain_queue)

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Do nothing: routes refer to listeners and links, not to the engine behind them."""

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> EngineConnection:
        """Begin the handshake on a new connection. Return the owner of its stream."""
        self._connection = EngineConnection(self, stream, target, now)
        return self._connection

    def end_turn(self) -> None:
        """Deliver the messages of this event-loop pass to sessions, and acknowledge them to the cluster.

        Sessions with queued messages send them to their clients.
        """
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
            self._connection.acknowledge_arrived()

    def tick(self, now: float) -> None:
        """Run the timer, once per second, connected or not; `now` is in loop-clock seconds.

        The timer disconnects the clients when the cluster has been unavailable for too long.
        """
        if not self._up:
            self._down_since = now if self._down_since is None else self._down_since
            if now - self._down_since >= self.settings.engine_timeout_secs:
                self._disconnect_after_outage(now)
        if self.publisher.waiting_messages and self.clients.has_ending_claims:
            self.publisher.leave_to_others()
        if self._connection is not None and self._up and not self.stopped:
            self.clients.sweep(self._connection.consumers, now)

    def _disconnect_after_outage(self, now: float) -> None:
        """Disconnect all clients; use a new queue for this replica unless a connection is being opened.

        `now` is in loop-clock seconds.
        """
        self._down_since = now
        self._disconnect_clients()
        if self._connection is None:
            self._choose_queue_id()

    # Interface for batches, whose source this is.

    def settle(self, receipts: list[None], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Count the messages as accepted. Their outcomes are ignored: sessions count their own drops.

        `receipts` has an item for each message.
        """
        self.stats.accepted_messages += len(receipts)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return an empty list: reading from the cluster continues when a client is slow.

        One slow client must not stop the others.
        """
        return []

    # Interface for the connection.

    def disconnected(self, connection: EngineConnection, why: str) -> None:
        """Forget a connection that has ended for the reason `why`, and report the engine as down.

        Unconfirmed messages are resent over the next connection.
        """
        if self._connection is not connection:
            return
        self._connection = None
        self._up = False
        self.stats.blocked = False
        self._unblock_all()
        self._waiting = self._binding + self._waiting
        self._binding = []
        self.publisher.close()
        self.status.mark_down(why)

    def deliver(self, wire: bytes, raw: bytes, body: Body) -> None:
        """Add a message of the replica's queue to the present batch, for the clients that subscribe to it.

        `wire` is the encoded address, `raw` the content header. A repeated QoS 2 message is dropped.
        """
        found = self._read_content(wire, raw, body)
        if found is None:
            return
        (address, recipients), arrived, body = found
        if arrived.number is not None and not self.duplicate_filter.is_first(arrived.number):
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

    def _read_content(
        self, wire: bytes, raw: bytes, body: Body
    ) -> tuple[KnownAddress, MessageHeader, Body] | None:
        """Decode a message from the cluster. Return its address with recipients, its header, and its body.

        `wire` is the encoded address, `raw` the content header. If the message is malformed or too large,
        store it as a dead letter and return None.
        """
        try:
            entry = self._entries.get(wire) or self._entry(wire)
            arrived = self._parsed.get(raw) or self._read(raw)
        except (NameRefused, RemoteProtocolError) as error:
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return None
        size = body.size if not body and isinstance(body, DiscardedBody) else len(body)
        if size > self.limits.message_bytes_max:
            text = f"a body of {size} bytes exceeds limits.message_bytes_max; it was not stored"
            self._refuse(wire, b"", Outcome(Verdict.REJECTED, Reason.TOO_LARGE, text))
            return None
        return entry, arrived, body

    def dropped(self, raw: bytes, body: Body) -> None:
        """Count a message that a queue has dropped, and pass queue name and body to `on_dropped`.

        `raw` is its content header. A warning is logged if the queue was full, but not for expired messages.
        A message with a malformed header is only counted as refused.
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
        for callback in self.on_dropped:
            callback(queue, bytes(body))
        if reason != EXPIRED:
            log.warning("RabbitMQ queue full, oldest messages dropped", queue=queue)

    def _refuse(self, wire: bytes, body: Body, outcome: Outcome) -> None:
        """Store a message from the cluster that cannot be delivered to any client as a dead letter.

        `wire` is the encoded address, `outcome` the reason.
        """
        self.stats.refuse(outcome)
        log.warning("message from RabbitMQ undeliverable, dead-lettered", why=outcome.text)
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

    def _read(self, raw: bytes) -> MessageHeader:
        arrived = decode(raw)
        if len(raw) <= ARRIVED_BYTES_MAX and arrived.number is None and not arrived.expires:
            make_room(self._parsed, ARRIVED_MAX)
            self._parsed[raw] = arrived
        return arrived

    def forget_entries(self) -> None:
        """Clear the cached recipients of all topics, because subscriptions have changed."""
        self._entries.clear()
        self._recipients.clear()

    # Bindings, and clients that wait for them.

    def bind(self, levels: list[str]) -> None:
        """Count a subscription of this replica's clients. Bind its key if no other subscription needs it.

        `levels` are the levels of the subscription's filter.
        """
        key = self.bindings.add(levels)
        if key is not None and self._connection is not None:
            self._connection.bind(key, True)

    def unbind(self, levels: list[str]) -> None:
        """Stop counting a subscription that has ended. Unbind its key if no other subscription needs it.

        `levels` are the levels of the subscription's filter.
        """
        key = self.bindings.remove(levels)
        if key is not None and self._connection is not None:
            self._connection.bind(key, False)

    def after_bound(self, session: Session | None, done: Done) -> None:
        """Call `done` with ACCEPTED when the broker has confirmed all bindings requested until now.

        `done` also waits for queues that `session` needs, its own and those of its shared subscriptions,
        until they are consumed or cannot be. Queues of other sessions do not delay it.
        """
        self._waiting.append((session, done))
        self._await_bindings()

    def handle_queue_ready(self, target: QueueOwner) -> None:
        """Let callbacks of `after_bound` wait no longer for the queue of `target`, only for bindings."""
        blocked = self._blocked.pop(target, None)
        if blocked is not None:
            self._waiting += blocked
            self._await_bindings()

    def _unblock_all(self) -> None:
        """Let no callback of `after_bound` wait for the queue of a session or of a shared filter any more."""
        for blocked in self._blocked.values():
            self._waiting += blocked
        self._blocked.clear()

    def _await_bindings(self) -> None:
        """Have the callbacks of `after_bound` called when the broker has confirmed all requested bindings.

        Callbacks whose session needs a queue that is not ready wait for that queue first, because its
        bindings may not be requested yet.
        """
        connection = self._connection
        if connection is None or not self._up or not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        count = 0
        for callback in waiting:
            session = callback[0]
            target = (
                self.clients.pending_queue(session, connection.consumers)
                if isinstance(session, ClientSession)
                else None
            )
            if target is None:
                self._binding.append(callback)
                count += 1
            else:
                self._blocked.setdefault(target, []).append(callback)
        if count:
            connection.after_bound(partial(self._bound, connection, count))

    def _bound(self, connection: EngineConnection, count: int) -> None:
        """Call the first `count` callbacks of `after_bound`, because their bindings are confirmed.

        Do nothing if `connection`, on which the bindings were requested, is not the present one.
        """
        if self._connection is not connection:
            return
        bound, self._binding = self._binding[:count], self._binding[count:]
        for _, done in bound:
            try:
                done(ACCEPTED)
            except Exception as error:  # it concerns one client; the others must not wait
                contained("connection", error)

    def start_serving(self) -> None:
        """Report the engine as up and consume the queues of sessions, because everything is declared."""
        assert self._connection is not None
        self._up = True
        self._down_since = None
        self.status.mark_up()
        for session in self.clients.queue_sessions():
            if not self.sessions.is_waiting(session):
                self.consume(session)
        if not self.stopped:
            self.clients.sweep(self._connection.consumers, clock.now())
        self._await_bindings()

    def _restart_incarnation(self, incarnation: str) -> None:
        """Disconnect all clients and from the cluster, as other replicas have declared this one dead.

        At the next connection the replica uses a new queue. `incarnation` is the one that was declared dead.
        """
        self._disconnect_clients()
        self._choose_queue_id()
        if self._connection is not None:
            self._connection.abort("the other replicas declared this replica dead")

    # Queues of sessions.

    def consume(self, session: ClientSession) -> None:
        """Consume the queue of a session, now or when the cluster is connected."""
        if self._connection is not None and self._up and not self.stopped:
            self._connection.consumers.begin(session)

    def end(self, session: ClientSession, done: Callable[[Sequence[Content]], None]) -> None:
        """Stop consuming the queue of a session, and requeue its unsettled messages.

        `done` is called with the contents of these messages when they are requeued.
        """
        if self._connection is None:
            done(())
        else:
            self._connection.consumers.end(session, done)

    def delete(self, queue: str, done: Callable[[], None] | None = None) -> None:
        """Delete a queue; call `done` when the broker has confirmed that. Without a connection do nothing."""
        if self._connection is not None:
            self._connection.delete_queue(queue, done)

    def set_binding(self, queue: str, key: str, bound: bool, done: Callable[[], None]) -> None:
        """Bind the queue of an absent client's session to a key, or unbind it if `bound` is False.

        `done` is called when the broker has confirmed that. Without a connection do nothing.
        """
        if self._connection is not None:
            self._connection.set_binding(queue, key, bound, done)

    def release_sessions(self, done: Done) -> None:
        """Release the queues of all sessions to other replicas, because the process ends.

        `done` is called with ACCEPTED when the database has recorded that.
        """
        self.stopped = True
        sessions = self.clients.queue_sessions()
        for session in sessions:
            session.stop()
        if self._connection is not None:
            self._connection.consumers.close()
        self._unblock_all()
        self.sessions.release_all(sessions, partial(done, ACCEPTED))

    def share(self, shared: SharedQueue, *, on: bool) -> None:
        """Start to consume the queue of a shared subscription, or stop if `on` is False.

        `on` is True if clients of this replica are members of the subscription.
        """
        if self._connection is not None and self._up:
            if on:
                self._connection.consumers.begin(shared)
            else:
                self._connection.consumers.end(shared, None)

    # Interface for sessions.

    def change(self, session: ClientSession) -> SessionChange:
        """Return the collected changes of a session, which are stored soon; the caller adds more to them."""
        return self.sessions.change(session)

    def after_stored(self, session: ClientSession, done: OutcomeCallback) -> None:
        """Call `done` with ACCEPTED when all changes that a session has collected until now are stored.

        `done` is called with another outcome if they cannot be stored.
        """
        self.sessions.after_stored(session, done)

    def pump(self, session: ClientSession) -> None:
        """Schedule `session.pump()`, which sends queued messages, for the end of this event-loop pass."""
        self._pumping[session] = None

    def next_number(self) -> Number:
        """Return a new number, by which replicas recognize a QoS 2 message that will be published later."""
        return self.publisher.next_number()

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        """Abort the connection of a session's client for the reason `why`; the client must reconnect."""
        self.clients.disconnect_client(session, why)

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """Decode a delivered message. Return it with its number, or None if it cannot be delivered.

        The number, by which replicas recognize a repeated message, is None below QoS 2.
        """
        found = self._read_content(*content)
        if found is None:
            return None
        (address, _), arrived, body = found
        return _message(address, arrived, body, self.time.correction), arrived.number

    def check_owner(self, session: ClientSession, done: Callable[[bool], None]) -> None:
        """Query if this replica owns a session and its queue; call `done` with True if so, else False."""
        self.sessions.check_owner(session, done)

    def bind_queue(self, session: ClientSession, key: str) -> None:
        """Bind the session's queue with a key, or unbind it.

        The first item of `session.unbound[key]` is True to bind the queue, and False to unbind it.
        """
        if self._connection is not None:
            self._connection.consumers.bind(session, key)

    # Messages whose publisher is not waiting.

    def _single_message_batch(self, message: Message) -> SubBatch:
        """Return a sub-batch with one message for the publisher; no sender waits for the outcome."""
        batch = Batch(self, clock.now())
        sub_batch = SubBatch(batch, Recipient(self.publisher))
        sub_batch.messages.append(message)
        sub_batch.slots.append(batch.open(None, 1))
        return sub_batch


def _call_soon(function: Callable[[], None]) -> None:
    trio.lowlevel.current_trio_token().run_sync_soon(function, idempotent=True)


def _message(address: Address, arrived: MessageHeader, body: Body, correction: float) -> Message:
    """Return a delivered message, with its expiry time by the clock of this process.

    `arrived` is the decoded content header. `correction` is added to times of the cluster, in seconds.
    """
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

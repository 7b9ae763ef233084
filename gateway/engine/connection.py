"""Connection of a replica to the cluster, with the replica's own queue.

The connection has five channels: to declare and bind; to publish with confirms; to consume this replica's
queue; to count messages that queues have dropped; to query the cluster's time. The channels for the queues of
sessions are additional (consumers.py). All required exchanges and queues are declared without waiting between
them, replies arrive in the order of the requests, and a denied request ends the connection with the broker's
reason. When everything exists, the engine is up.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

import structlog

from gateway import clock
from gateway.egress.amqp091.session import new_machine
from gateway.engine.arguments import type_arguments
from gateway.engine.bindings import Bindings
from gateway.engine.cluster import ClusterConnection, DeclarationRequest
from gateway.engine.cluster_clock import ClusterClock, dead_lettered_at
from gateway.engine.consumers import Done, QueueOwner
from gateway.engine.names import Names
from gateway.engine.publisher import EnginePublisher
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.spooled_bodies import Body, Piece
from gateway.model.times import Monotonic
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import Delivery
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import (
    MethodReceived,
)
from gateway.protocols.amqp091.sender import Publisher
from gateway.settings import Limits
from gateway.settings.endpoints import LinkUrl
from gateway.settings.engine import RabbitEngine
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

TRANSIENT: Final = b"\x10\x00\x01"  # a content header with delivery-mode 1
TIME_SECS: Final = 10.0  # between two queries of the cluster's time
DROPPED_PREFETCH: Final = 1_000
DROPPED_MAX: Final = 10_000  # length limit of the queue of dropped messages, which wait to be counted
OUTLIVES_SECS: Final = (
    60.0  # in addition to engine_timeout_secs, until the queue of an absent replica expires
)


class ConnectionSession(Protocol):
    """Interface of the session that uses a connection to the cluster and processes its events."""

    settings: RabbitEngine
    limits: Limits
    stats: LinkStats
    names: Names
    bindings: Bindings
    time: ClusterClock
    publisher: EnginePublisher

    @property
    def queue(self) -> str:
        """Name of this replica's queue."""

    def start_serving(self) -> None:
        """Start to serve clients, because all needed exchanges, queues and channels exist."""

    def handle_queue_ready(self, target: QueueOwner) -> None:
        """Send replies to clients that have waited for the queue of `target`.

        The queue is consumed now, or cannot be consumed.
        """

    def deliver(self, wire: bytes, raw: bytes, body: Body) -> None:
        """Process a message of the replica's queue.

        `wire` is the encoded address, `raw` the encoded content header.
        """

    def dropped(self, raw: bytes, body: Body) -> None:
        """Process a message that a queue has dropped, because it was full or the message had expired.

        `raw` is the encoded content header.
        """

    def disconnected(self, connection: EngineConnection, why: str) -> None:
        """Forget a connection that has ended for the reason `why`, and report the engine as down."""


class EngineConnection(ClusterConnection):
    """Connection of the engine to the cluster, which processes the events of one stream."""

    def __init__(self, session: ConnectionSession, stream: Stream, target: LinkUrl, now: float) -> None:
        settings = session.settings
        machine = new_machine(target, session.limits, name=session.queue, heartbeat=settings.heartbeat_secs)
        deadline = now + settings.connect_timeout_secs
        super().__init__(machine, session.stats, session.publisher, session.names.topics, stream, deadline)
        self.ready = False  # True when everything needed has been declared
        self._session = session
        self._consuming = self._dropping = self._timing = 0
        self._time_queue = f"{session.names.clock}.{secrets.token_hex(6)}"  # exclusive to this connection
        self._asked_time: Monotonic | None = None  # when the time was queried, while the reply is pending
        self._ask_time_at = 0.0
        self._begun: set[int] = set()  # open channels whose use has been set up
        self._arrived: dict[int, int] = {}  # the last delivery tags received, by channel
        self._done: dict[int, int] = {}  # the last tags that may be acknowledged, by channel
        self._may_declare = False
        self._is_up = False
        self._bound = False  # bindings of the replica's queue may be requested at once

    # Interface for the stream.

    def data_to_send(self) -> bytes | list[Piece]:
        """Return the encoded bytes, with the acknowledgements of all processed messages at the end."""
        self.consumers.flush()
        for channel, tag in self._done.items():
            self.machine.ack(channel, tag, multiple=True)
        self._done.clear()
        return self.machine.to_send()

    def connection_lost(self, reason: str) -> None:
        """Drop all consumers, and report the end of the connection to the session."""
        self.ready = False
        self.consumers.drop_all()
        self._session.disconnected(self, self._why or reason)

    # Interface for the link.

    def tick(self, now: float) -> None:
        """Run the connection's timer; `now` is in loop-clock seconds.

        The timer sends heartbeats, enforces the handshake's deadline, opens another publishing channel if the
        broker refuses messages on the present one, and queries the cluster's time.
        """
        if not self._in_time(now):
            return
        if fresh := self._publisher.renew(now):
            self._publishing = fresh
            self._begun.discard(fresh)
        self._session.time.check()
        if now >= self._ask_time_at and self._timing in self._begun:
            self._query_time()
        self._stream.mark_for_flush()

    # Interface for the session.

    def acknowledge_arrived(self) -> None:
        """Acknowledge all received messages of the replica's queue, because they are processed.

        Notices of messages that queues have dropped are acknowledged as well.
        """
        if self._arrived:
            self._done.update(self._arrived)
            self._arrived.clear()
            self._stream.mark_for_flush()

    def bind(self, key: str, on: bool) -> None:
        """Bind a key to this replica's queue, or unbind it if `on` is False.

        Before the queue is declared do nothing, because all keys are bound when it has been declared.
        """
        session = self._session
        if self._bound:
            binding = session.queue, session.names.topics, key
            method = m.QueueBind(*binding) if on else m.QueueUnbind(*binding)
            self.declare(method, partial(session.bindings.set_bound, key, on))

    def handle_queue_ready(self, target: QueueOwner) -> None:
        """Inform the session that replies to clients need not wait for the queue of `target` any more."""
        self._session.handle_queue_ready(target)

    def delete_queue(self, queue: str, done: Done | None = None) -> None:
        """Delete the queue of a session that has ended; `done` is called when the broker has confirmed that.

        Before the channel for declarations is open do nothing.
        """
        if self._may_declare:
            self.consumers.delete(queue, done)

    def set_binding(self, queue: str, key: str, bound: bool, done: Done) -> None:
        """Bind the queue of a session to a key, or unbind it if `bound` is False.

        `done` is called when the broker has confirmed that, and also if the queue is missing. Before the
        channel for declarations is open do nothing.
        """
        if self._may_declare:
            self.consumers.set_binding(queue, key, bound, done)

    def after_bound(self, done: Done) -> None:
        """Call `done` when the broker has confirmed all declarations requested until now."""
        if self._requests:
            self._requests.append(DeclarationRequest(None, done))
        else:
            done()

    def shut_down(self) -> None:
        """Close the connection because the gateway stops or the link pauses.

        The replica's queue is deleted if it has no bindings.
        """
        if self._may_declare and not len(self._session.bindings):
            self.declare(m.QueueDelete(self._session.queue))
        super().shut_down()

    # Events.

    def _opened(self) -> None:
        self._declaring = self.machine.open_channel()
        self._publishing = self.machine.open_channel()
        self._consuming = self.machine.open_channel()
        self._dropping = self.machine.open_channel()
        self._timing = self.machine.open_channel()
        self.consumers.open()

    def _channel_opened(self, number: int) -> None:
        """Set up the channel `number`, which the broker has opened.

        On the channel for declarations, declare what the engine needs.
        """
        if self.consumers.use_channel(number):
            return
        if number == self._declaring and self._may_declare:
            self._send_requests()
        elif number == self._declaring:
            self._may_declare = True
            for method in self._required_declarations():
                self.declare(method)
            self.consumers.check_queue_exists(self._session.queue, self._declare_queue)
        self._set_up_channels()

    def _required_declarations(self) -> Iterable[m.Method]:
        """Yield the declarations of all exchanges and queues that must exist, except the replica's queue."""
        names = self._session.names
        is_predeclared = names.topics.startswith("amq.")  # predeclared by the broker, so it is only checked
        yield m.ExchangeDeclare(names.topics, "topic", passive=is_predeclared, durable=True)
        yield m.ExchangeDeclare(names.direct, "direct", durable=True)
        yield m.ExchangeDeclare(names.dropped, "fanout", durable=True)
        yield m.QueueDeclare(names.dropped, durable=True, arguments=_DROPPED_ARGUMENTS)
        yield m.QueueBind(names.dropped, names.dropped)
        # A message expires in one queue at once and is dead-lettered to the other, with the broker's time.
        answers = f"{self._time_queue}.answers"
        arguments = _time_arguments(names, answers)
        yield m.QueueDeclare(self._time_queue, exclusive=True, arguments=arguments)
        yield m.QueueBind(self._time_queue, names.direct, self._time_queue)
        yield m.QueueDeclare(answers, exclusive=True)
        yield m.QueueBind(answers, names.direct, answers)

    def _declare_queue(self, there: bool) -> None:
        """Declare the replica's queue unless `there` is True (it exists), and update its bindings."""
        session = self._session
        if not there:
            session.bindings.reset()
            arguments = _queue_arguments(session.settings, session.names)
            self.declare(m.QueueDeclare(session.queue, durable=True, arguments=arguments))
        self._bound = True
        for key, on in session.bindings.pending_changes():
            self.bind(key, on)
        self.after_bound(self._become_ready)

    def _become_ready(self) -> None:
        self.ready = True
        self._set_up_channels()

    def _set_up_channels(self) -> None:
        """Consume and publish on the channels that have opened, once everything has been declared."""
        if not self.ready:
            return
        session = self._session
        open_now = set(self.machine.channels) - self._begun
        self._begun |= open_now
        if self._publishing in open_now:
            self.machine.send_method(self._publishing, m.ConfirmSelect())
        if self._consuming in open_now:
            self._consume(self._consuming, session.queue, session.settings.prefetch, ())
        if self._dropping in open_now:
            self._consume(self._dropping, session.names.dropped, DROPPED_PREFETCH, ())
        if self._timing in open_now:
            self.machine.send_method(self._timing, m.BasicConsume(f"{self._time_queue}.answers", no_ack=True))
            self._query_time()
        channels = {self._publishing, self._consuming, self._dropping, self._timing}
        if not self._is_up and channels <= self._begun:
            self._is_up = True
            session.start_serving()

    def _query_time(self) -> None:
        """Query the cluster's time: publish a message that is dead-lettered, and so returns with the time.

        An earlier query without a reply is abandoned.
        """
        self._asked_time = clock.now()
        self._ask_time_at = self._asked_time + TIME_SECS
        wire = amqp_address(self._session.names.direct, self._time_queue).wire
        Publisher(self.machine, self._timing).publish_many([(wire, TRANSIENT, b"%f" % self._asked_time)])

    def _handle_time(self, raw: bytes, body: bytes) -> None:
        """Process the dead-lettered message that answers the time query; `raw` is its content header."""
        seconds, requested_at = dead_lettered_at(raw), self._asked_time
        if seconds is not None and requested_at is not None and body == b"%f" % requested_at:
            self._asked_time = None
            self._session.time.apply_reply(seconds, requested_at, clock.now())

    def _consume(self, channel: int, queue: str, prefetch: int, arguments: Headers) -> None:
        self.machine.send_method(channel, m.BasicQos(prefetch_count=prefetch))
        self.machine.send_method(channel, m.BasicConsume(queue, arguments=arguments))

    def _method(self, event: MethodReceived) -> None:
        if not self._common_method(event) and isinstance(event.method, m.BasicCancel):
            self.abort("the cluster has cancelled a consumer")

    def _deliveries(self, contents: Sequence[Delivery]) -> None:
        """Pass each message to the session, the clock or a consumer, depending on its channel."""
        session = self._session
        consuming, dropping, consumers = self._consuming, self._dropping, self.consumers
        for number, name, tag, redelivered, wire, raw, body in contents:
            if number == consuming:
                self._arrived[number] = tag
                session.deliver(wire, raw, body)
            elif number == self._timing:
                self._handle_time(raw, bytes(body))
            elif number == dropping:
                self._arrived[number] = tag
                session.dropped(raw, body)
            else:
                consumers.delivered(number, name, tag, redelivered, (wire, raw, body))
        session.stats.messages_in += len(contents)


# Always a quorum queue: all replicas declare it, and none could start while a classic one's node is down.
_DROPPED_ARGUMENTS: Final[Headers] = (
    ("x-queue-type", string("quorum")),
    ("x-max-length", Value(ValueType.INT64, DROPPED_MAX)),
    ("x-overflow", string("drop-head")),
)


def _time_arguments(names: Names, answers: str) -> Headers:
    return (
        ("x-message-ttl", Value(ValueType.INT64, 0)),
        ("x-dead-letter-exchange", string(names.direct)),
        ("x-dead-letter-routing-key", string(answers)),
    )


def _queue_arguments(settings: RabbitEngine, names: Names) -> Headers:
    """Return the arguments of the replica's queue.

    At its size limit the queue drops its oldest messages, because other replicas must not wait for a slow
    one. The queue expires when its replica is stopped for longer than its clients stay connected.
    """
    expires = int((settings.engine_timeout_secs + OUTLIVES_SECS) * 1000)
    return (
        *type_arguments(settings),
        ("x-expires", Value(ValueType.INT64, expires)),
        ("x-max-length-bytes", Value(ValueType.INT64, settings.queue_bytes_max)),
        ("x-overflow", string("drop-head")),
        ("x-dead-letter-exchange", string(names.dropped)),
    )

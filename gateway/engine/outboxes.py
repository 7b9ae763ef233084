"""Outboxes on the cluster: messages for a link that is down, accepted as soon as the cluster has them.

An outbox in the store is lost with its disk. One on the cluster is a durable queue for each route with
`settle: stored`, and any replica may serve its link: the queue has a single active consumer, so that its
order is kept, and a replica consumes it only while the link is up there. A message is in the queue in the
store's encoding, with address and properties of any protocol. It is acknowledged when the link's broker has
confirmed it; if a replica is lost before that, the next one resends it.

No replica must begin with messages behind those that another one still holds. So a replica whose link is down
for more than a moment requeues the messages in hand by closing the channel: the queue has all of them again
in one step, in order, before another consumer starts. Messages that were sent and are in doubt may be
delivered twice then, as after the loss of a replica. With QoS 2 of MQTT they must not, and the broker
recognizes a repeat only from the same sender: there the messages in hand stay, and another replica may
overtake them. A consumer that is stopped leaves when all messages in hand are confirmed.

The cluster removes messages that exceed the limits or are too old: with `policy: dead_letter` into a second
queue for each route, from which the first replica to receive them makes dead letters; otherwise to the queue
in which drops are counted.

For the cluster this is an AMQP link like any other: one connection for each link that has such outboxes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from typing import ClassVar, Final, Protocol

from gateway import clock
from gateway.broker.dispatcher import Dispatcher, protocol_mismatch
from gateway.broker.outbox.outbox import (
    CROWDED_OUT,
    EXPIRED,
    OUTBOX_FULL,
    OUTBOX_USER_FULL,
    TOO_OLD,
    Left,
    OutboxLimits,
    OutboxRecipient,
    OutboxState,
    exit_outcome,
)
from gateway.broker.poison import outcome_of_error
from gateway.broker.routing import Namespace, OneSink, RoutingEntry, RoutingPlan
from gateway.broker.shares import UserQuotas
from gateway.egress.amqp091.consumer import AmqpLinkConsumer
from gateway.egress.amqp091.publisher import AmqpLinkPublisher
from gateway.egress.amqp091.session import AmqpLinkConnection, AmqpLinkSession
from gateway.egress.amqp091.topology import Declaration
from gateway.egress.confirms import ConfirmedSink
from gateway.egress.link import LinkStatus
from gateway.egress.session import Entries
from gateway.engine.arguments import type_arguments
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.names import names_of
from gateway.engine.outbox_shares import SharedOutboxShares
from gateway.errors import RemoteProtocolError, StoreError
from gateway.mapping.router import Subscriptions, Targets
from gateway.mapping.routes import Route
from gateway.model.address import Address
from gateway.model.batch import Recipient, Sink, SubBatch
from gateway.model.caches import make_room
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, FINAL, Outcome, Reason, Verdict
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.times import Monotonic
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import decode_address
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import ChannelClosed, MethodReceived
from gateway.settings import AmqpLink, Limits, LinkSettings
from gateway.settings.endpoints import LinkUrl, Remote
from gateway.settings.engine import RabbitEngine
from gateway.store.journal.columns import WAS_BURIED, WAS_DELIVERED, WAS_DROPPED
from gateway.store.messages import MessageReader, encode_message
from gateway.transport.stream import Stream

REFUSALS_MAX: Final = 10_000  # messages; beyond that, the oldest counter is dropped and restarts
BESIDE_BYTES: Final = 4_194_304  # maximum size of a stored message besides its body
OVERFLOW: Final = {"reject": "reject-publish", "drop_oldest": "drop-head", "dead_letter": "drop-head"}
COUNT_SECS: Final = 5.0  # between two counts of waiting messages
# How long a link may be down before other replicas deliver; a cut connection is usually back before.
MOMENT_SECS: Final = 1.0
FIRST_REASON: Final = "x-first-death-reason"  # why the cluster removed a message from its queue


class Delivering(Protocol):
    """Session of the link that delivers the messages."""

    @property
    def publisher(self) -> ConfirmedSink:
        """Sink with which the session publishes."""


class OutboxPublisher(AmqpLinkPublisher):
    """Publisher into the outbox queues; a full queue releases (temporarily refuses) a message."""

    _nacked: ClassVar[Outcome] = OUTBOX_FULL


class SharedOutboxes(AmqpLinkSession):
    """Outboxes of one link on the cluster: the link session of their connection.

    `paused` returns the paused routes.
    """

    def __init__(
        self,
        link: str,
        options: LinkSettings,
        engine: RabbitEngine,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        *,
        client_id: str,
        time: ClusterClock,
        up: Callable[[], bool],
        delivers: ConfirmedSink,
        paused: Callable[[], Iterable[str]],
        on_departure: Left | None = None,
        quotas: UserQuotas | None = None,
    ) -> None:
        """Create the session of a link's outboxes, whose messages expire by `time`.

        `up` returns True if the link accepts messages; it publishes them with `delivers`. `on_departure` is
        called with the messages that leave an outbox at this replica. `quotas` has the shares of users.
        """
        remote = {name: getattr(engine, name) for name in Remote.model_fields}
        within = limits.model_copy(update={"message_bytes_max": limits.message_bytes_max + BESIDE_BYTES})
        super().__init__(
            status.name,
            AmqpLink(
                **remote | {"prefetch": min(options.in_flight_max, engine.prefetch), "survey_secs": 0.0}
            ),
            dispatcher,
            within,
            status,
            client_id=client_id,
            publishing=OutboxPublisher,
        )
        self.link = link
        self._time = time
        self._reader = MessageReader()
        self.refusals: dict[bytes, int] = {}  # refusals by the link's broker, by message hash
        self.waiting: dict[str, int] = {}  # ready messages in each queue, as counted last
        self._prefix = f"{engine.namespace}.outbox.{link}."
        self._given_up = f"{engine.namespace}.given-up.{link}."
        self._limits = options.outbox
        self._type = type_arguments(engine)
        names = names_of(engine.namespace, engine.topic_exchange)
        self._dropped, self._direct = names.dropped, names.direct
        self.topology.reached_by = names.direct
        self.up = up
        self._delivers = delivers
        self._paused = paused
        self._on_departure = on_departure
        self._quotas = UserQuotas(limits) if quotas is None else quotas
        self._stopped = False
        self._seen_up = False
        self._patient_until: Monotonic | None = None
        self._arrangement: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self._boxes: dict[str, SharedOutbox] = {}

    def queue_arguments(self, queue: str) -> Headers:
        """Return the arguments with which a queue is declared."""
        limits = self._limits
        bounds: Headers = (
            *self._type,
            ("x-max-length", Value(ValueType.INT64, limits.messages_max)),
            ("x-max-length-bytes", Value(ValueType.INT64, limits.bytes_max)),
        )
        counted: Headers = (("x-dead-letter-exchange", string(self._dropped)),)
        if queue.startswith(self._given_up):
            return (*bounds, ("x-overflow", string("drop-head")), *counted)
        own: Headers = (
            ("x-single-active-consumer", Value(ValueType.BOOL, True)),
            ("x-overflow", string(OVERFLOW[limits.policy])),
        )
        if limits.age_secs_max is not None:
            own += (("x-message-ttl", Value(ValueType.INT64, max(1, int(limits.age_secs_max * 1000)))),)
        if limits.policy == "drop_oldest":
            own += counted
        elif limits.policy == "dead_letter":
            own += (
                ("x-dead-letter-exchange", string(self._direct)),
                ("x-dead-letter-routing-key", string(self._given_up + queue.removeprefix(self._prefix))),
            )
        return (*bounds, *own)

    def states(self) -> list[OutboxState]:
        """Return the state of each outbox, as far as it is known to this replica."""
        paused = set(self._paused())
        own_limits = self._limits
        limits = OutboxLimits(
            own_limits.messages_max, own_limits.bytes_max, own_limits.age_secs_max, own_limits.policy
        )
        return [
            OutboxState(
                self.link,
                route.name,
                self.waiting.get(queue),
                None,
                0 if self._connection is None else self._connection.outstanding_of(queue),
                None,
                None,
                self._problem(route.name in paused),
                self.waiting.get(queue),
                None,
                limits,
                shared=True,
            )
            for queue, route in self._routes().items()
        ]

    def _problem(self, paused: bool) -> str:
        if not self.stats.up:
            return "the cluster is away"
        if paused:
            return "the route is paused"
        return "" if self.up() else "the link is down here"

    def counted_queues(self) -> tuple[str, ...]:
        """Return the queues whose messages are counted."""
        return tuple(self._routes())

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> OutboxConnection:
        """Begin the handshake on a new connection. Return the owner of its stream."""
        made = self._connection = OutboxConnection(self, stream, target, now)
        return made

    def of(self, route: Route) -> SharedOutbox:
        """Return the outbox of a route in force."""
        found = self._boxes.get(route.name)
        if found is None:
            address = amqp_address(self._direct, self._prefix + route.name)
            found = self._boxes[route.name] = SharedOutbox(self, address, self._new_shares())
            found.shares.reconcile(self.waiting.get(self._prefix + route.name, 0))
        return found

    def _new_shares(self) -> SharedOutboxShares:
        """Return the shares in one more outbox."""
        quota = self._quotas.outbox()
        quota.set_limits(self._limits.messages_max, self._limits.bytes_max)
        removes = self._limits.policy != "reject"
        return SharedOutboxShares(quota, self._quotas.outboxes, removes=removes)

    def count_waiting(self, queue: str, count: int) -> None:
        """Record how many messages wait in a queue."""
        self.waiting[queue] = count
        box = self._boxes.get(queue.removeprefix(self._prefix))
        if box is not None:
            box.shares.reconcile(count)

    def note(self, route: Route | None, messages: list[Message], outcome: Outcome, word: str) -> None:
        """Report to the journal that messages have left the outbox of a route.

        Does nothing if `route` is None because it is not in the mapping any more.
        """
        if self._on_departure is not None and route is not None and messages:
            self._on_departure(route, messages, exit_outcome(word, outcome), clock.now())

    def encode(self, message: Message) -> bytes:
        """Return a message as it is stored in an outbox, with the expiry time of the cluster."""
        return encode_message(message, -self._time.correction)

    def decode(self, data: bytes) -> Message:
        """Return a message of an outbox, with an expiry time of this process. Raises StoreError."""
        self._reader.ahead_secs = -self._time.correction
        return self._reader.decode_one(data)

    def dropped(self, queue: str, body: bytes) -> None:
        """Report to the journal a message that the cluster has dropped from an outbox queue.

        Messages of other queues are ignored.
        """
        if self._on_departure is None or not queue.startswith(self._prefix):
            return
        route = self._routes().get(queue)
        try:
            message = self.decode(body)
        except StoreError as error:
            self.stats.refuse(Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return
        self.note(route, [message], CROWDED_OUT, WAS_DROPPED)

    @property
    def namespace(self) -> Namespace | None:
        """Namespace to which the link's messages go, or None."""
        return self.dispatcher.namespaces.get(self.link)

    def stop(self) -> None:
        """Hand out no more messages, because the gateway stops."""
        self._stopped = True
        self._arrange()

    # Interface for the link.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Apply a changed mapping: every stored route of the link has a queue."""
        self._arrange()

    def tick(self, now: float) -> None:
        """Run the timer, once per second: start or stop consuming if the state of the link has changed."""
        super().tick(now)
        self._arrange()

    def _routes(self) -> dict[str, Route]:
        return {
            self._prefix + route.name: route
            for route in self.dispatcher.router.routes
            if route.target_endpoint == self.link and route.settle == "stored"
        }

    def _arrange(self) -> None:
        paused = set(self._paused())
        routes = self._routes()
        going = self._reaches() and not self._stopped
        if not going and not self.up():
            self._hand_back()
        if not self._arrangement[1] and self._unsettled_count():
            going = False  # messages in hand must be settled before others are consumed
        consumed = tuple(queue for queue, route in routes.items() if going and route.name not in paused)
        arrangement = tuple(routes), consumed
        if arrangement != self._arrangement:
            self._arrangement = arrangement
            given_up: tuple[str, ...] = ()
            if self._limits.policy == "dead_letter":
                given_up = tuple(self._given_up + route.name for route in routes.values())
            super().route(Subscriptions(queues=(*consumed, *given_up)), Targets(queues=arrangement[0]))

    def _reaches(self) -> bool:
        """Return True if the link is up, or was up within the last MOMENT_SECS."""
        up = self.up()
        if self._seen_up and not up:
            self._patient_until = clock.now() + MOMENT_SECS
        self._seen_up = up
        deadline = self._patient_until
        return up or (deadline is not None and clock.now() < deadline)

    def _hand_back(self) -> None:
        """Requeue the messages in hand, so that other replicas deliver them and all later ones in order.

        If a QoS 2 message is in doubt they stay, and others may deliver the later ones.
        """
        connection = self._connection
        if not isinstance(connection, OutboxConnection) or not self._unsettled_count():
            return
        self.end_turn()  # what has just arrived is in hand, too
        if self._delivers.has_doubtful(self._is_ours):
            connection.cancel_consumers(self._prefix)
        else:
            connection.hand_back(self._prefix)

    def _unsettled_count(self) -> int:
        """Return the number of unsettled messages of the outboxes, but not those removed from them."""
        connection = self._connection
        return connection.unsettled_count(self._prefix) if isinstance(connection, OutboxConnection) else 0

    def withdraw(self) -> None:
        """Release the messages of ended consumers that the link has not sent.

        The cluster delivers them from the queue again, to this replica or another one.
        """
        self._delivers.release_waiting(self._is_lost, DOWN)

    def _is_lost(self, part: SubBatch) -> bool:
        """Return True if the messages of a part are from an outbox here whose consumer has ended."""
        source = part.batch.source
        return self._is_ours(part) and isinstance(source, DrainSource) and not source.is_live

    def _is_ours(self, part: SubBatch) -> bool:
        source = part.batch.source
        return isinstance(source, DrainSource) and source.outboxes is self

    # Interface for batches, whose source this is.

    def handle_release(self, receipt: tuple[AmqpLinkConsumer, int, Message], outcome: Outcome) -> None:
        """Requeue a message, which another replica may deliver next."""
        if outcome.reason is Reason.STORE and receipt[0].live:
            self.held_receipts.add_refused(receipt)
        else:
            self.requeue_later(receipt)

    def orphaned(self, receipt: tuple[AmqpLinkConsumer, int, Message]) -> None:
        """Requeue a message that waited for the disk; it takes its way from the queue again."""
        self.held_back.record_settled(receipt, by_target=False)
        self.requeue_later(receipt)

    # Interface for the connection.

    def resolve(self, queue: str, wire: bytes, entries: Entries) -> RoutingEntry:
        """Return the entry that routes the messages of a queue.

        Messages of a route's outbox are routed to the link, removed ones to the dead letters.
        """
        address = amqp_address(*decode_address(wire))
        if queue.startswith(self._given_up):
            name = queue.removeprefix(self._given_up)
            grave = Recipient(RemovedMessageSink(self, name, self._routes().get(self._prefix + name)))
            entry = entries[wire] = RoutingEntry(address, RoutingPlan(None, (grave,)))
            return entry
        route = self._routes().get(queue)
        if route is None:  # it has just been removed from the mapping
            return RoutingEntry(address, RoutingPlan(None, (Recipient(RequeuingSink()),)))
        recipient = Recipient(Drain(self, route))
        entry = entries[wire] = RoutingEntry(address, RoutingPlan(None, (recipient,)))
        return entry


class OutboxConsumer(AmqpLinkConsumer):
    """Consumer that leaves when all messages in hand are confirmed, and without a cancel.

    A cancel would let the next consumer start before. Until then it acknowledges nothing, so that no more
    messages arrive than may be in hand. Messages that arrive in return for its last acknowledgement are
    requeued with the channel, and so are released ones.
    """

    __slots__ = ("_confirmed", "_leaves")

    def __init__(
        self,
        declaration: Declaration,
        machine: ClientConnection,
        channel: int,
        wake: Callable[[AmqpLinkConsumer], None],
    ) -> None:
        super().__init__(declaration, machine, channel, wake)
        self._leaves = False
        self._confirmed: list[int] = []  # tags to acknowledge on leaving

    @property
    def is_settled(self) -> bool:
        """True if no message of the consumer is pending, so that its channel can be closed.

        All messages in hand are then confirmed or, if the consumer is leaving, released.
        """
        settled = len(self._confirmed) + (len(self._later) if self._leaves else 0)
        return self.outstanding <= settled

    def stop(self) -> None:
        """Leave as soon as all messages in hand are confirmed."""
        self._leaves = self.stopping = True

    def cancel(self) -> None:
        """Let another consumer start before all messages in hand are confirmed."""
        if self._leaves or not self.stopping:
            self.acknowledge_all()
            super().stop()

    def tick(self, now: float) -> None:
        """Requeue messages whose wait is over.

        When leaving, released messages wait for the channel to close instead.
        """
        if self._leaves:
            self.wake()
        else:
            super().tick(now)

    def flush(self) -> None:
        """Acknowledge accepted messages; when leaving, only once all messages in hand are settled."""
        if self._leaves:
            self._confirmed += self.accepted
            self.accepted = []
            if not self.is_settled:
                return
            self.accepted, self._confirmed = self._confirmed, []
        super().flush()

    def acknowledge_all(self) -> None:
        """Acknowledge everything that is confirmed at once, and stop leaving."""
        self._leaves = False
        self.accepted += self._confirmed
        self._confirmed = []
        super().flush()


class OutboxConnection(AmqpLinkConnection):
    """Connection of a link's outboxes, with a channel on which the waiting messages are counted."""

    _consuming: ClassVar[type[AmqpLinkConsumer]] = OutboxConsumer

    def __init__(self, session: SharedOutboxes, stream: Stream, target: LinkUrl, now: float) -> None:
        super().__init__(session, stream, target, now)
        self._outboxes = session
        self._counting = 0
        self._counted_queues: deque[str] = deque()
        self._count_at = 0.0

    def tick(self, now: float) -> None:
        """Run the timer: query the message counts every COUNT_SECS."""
        super().tick(now)
        if not self._up or now < self._count_at:
            return
        self._count_at = now + COUNT_SECS
        if not self._counting:
            self._counting = self._new_channel()
        elif not self._counted_queues:
            self._count()

    def _drop(self, number: int) -> Declaration:
        """Forget a consumer whose channel is closed, and withdraw its messages from the link."""
        declaration = super()._drop(number)
        self._outboxes.withdraw()
        return declaration

    def unsettled_count(self, prefix: str) -> int:
        """Return the number of unsettled messages from queues whose names begin with `prefix`."""
        return sum(consumer.outstanding for _, consumer in self._outbox_consumers(prefix))

    def hand_back(self, prefix: str) -> None:
        """Stop consuming all queues whose names begin with `prefix`, and requeue their messages in hand."""
        for number, consumer in self._outbox_consumers(prefix):
            consumer.acknowledge_all()
            self.machine.close_channel(number)
            self._drop(number)
        self._stream.mark()

    def cancel_consumers(self, prefix: str) -> None:
        """Cancel the consumers of queues whose names begin with `prefix`; messages in hand stay here."""
        for _, consumer in self._outbox_consumers(prefix):
            consumer.cancel()
        self._stream.mark()

    def shut_down(self) -> None:
        """Close the connection: confirmed messages are acknowledged, the others are requeued with it."""
        for _, consumer in self._outbox_consumers(""):
            consumer.acknowledge_all()
        super().shut_down()

    def _outbox_consumers(self, prefix: str) -> list[tuple[int, OutboxConsumer]]:
        """Return the consumers of queues whose names begin with `prefix`, with their channels."""
        return [
            (number, one)
            for number, one in self._consumers.items()
            if isinstance(one, OutboxConsumer) and one.declaration.name.startswith(prefix)
        ]

    def _count(self) -> None:
        for queue in self._outboxes.counted_queues():
            self._counted_queues.append(queue)
            self.machine.send_method(self._counting, m.QueueDeclare(queue, passive=True))
        self._stream.mark()

    def _channel_opened(self, number: int) -> None:
        if number == self._counting:
            self._count()
        else:
            super()._channel_opened(number)

    def _channel_closed(self, event: ChannelClosed) -> None:
        if event.channel == self._counting:  # a queue does not exist yet or any more
            self._counting = 0
            self._counted_queues.clear()
        else:
            super()._channel_closed(event)

    def _method(self, event: MethodReceived) -> None:
        if event.channel == self._counting and isinstance(event.method, m.QueueDeclareOk):
            self._outboxes.count_waiting(self._counted_queues.popleft(), event.method.message_count)
        else:
            super()._method(event)

    def connection_lost(self, reason: str) -> None:
        """Forget the message counts and withdraw messages in hand, because the connection was lost.

        The cluster has requeued what was in hand.
        """
        self._outboxes.waiting.clear()
        super().connection_lost(reason)
        self._outboxes.withdraw()


class SharedOutbox(OneSink):
    """Outbox of one route: a namespace, and the only sink of it."""

    def __init__(self, outboxes: SharedOutboxes, address: Address, shares: SharedOutboxShares) -> None:
        """Create the outbox whose queue on the cluster has this address, and users these shares in it."""
        super().__init__(self)
        self.shares = shares
        self._outboxes = outboxes
        self._address = address
        self._recipient = Recipient(outboxes.publisher)

    def publish(self, part: SubBatch) -> None:
        """Publish messages to the queue; they are accepted when the cluster has confirmed them.

        Those of users who have their share of the outbox are released.
        """
        batch = part.batch.onward(SubBatchSource(part))
        for at, message in enumerate(part.messages):
            try:
                data = self._outboxes.encode(message)
            except Exception as error:
                part.settle_at((at,), outcome_of_error(error))
                continue
            if not self.shares.admit(message.sender.user, len(data)):
                part.settle_at((at,), OUTBOX_USER_FULL)
                continue
            stored = Message(self._address, data, assurance=1, durable=True, sender=message.sender)
            batch.add_from(part.slots[at], at, [(self._recipient, stored)])
        batch.send()


class SubBatchSource:
    """Source of messages that are put into an outbox from one part; receipts are positions in the part."""

    def __init__(self, part: SubBatch) -> None:
        self._part = part

    def settle(self, receipts: list[int], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Settle messages with the outcomes that the cluster has confirmed."""
        refused = refused or {}
        self._part.settle_at([receipt for at, receipt in enumerate(receipts) if at not in refused])
        for at, outcome in refused.items():
            self._part.settle_at((receipts[at],), outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Hold the publishers of the part. Return the functions that resume them."""
        return self._part.batch.source.hold(senders)


class RequeuingSink:
    """Sink of an outbox's messages whose route is not in the mapping: they stay in the queue."""

    def publish(self, part: SubBatch) -> None:
        """Release all messages, which requeues them."""
        part.settle_at(range(len(part.messages)), GONE)


class RemovedMessageSink:
    """Sink of messages that the cluster has removed from the outbox of a route: they become dead letters."""

    def __init__(self, outboxes: SharedOutboxes, name: str, route: Route | None) -> None:
        self._outboxes = outboxes
        self._name = name
        self._route = route  # the route in force with that name, if any

    def publish(self, part: SubBatch) -> None:
        """Store messages as dead letters; each is acknowledged when its dead letter is safe.

        While there is no room for dead letters they are released.
        """
        letters = self._outboxes.dispatcher.dead_letters
        for at, stored in enumerate(part.messages):
            outcome, message, crossed = CROWDED_OUT, stored, True
            try:
                reason = dict(stored.properties.headers).get(FIRST_REASON)
                if reason is not None and reason.value == "expired":
                    outcome = TOO_OLD
                message = self._outboxes.decode(bytes(stored.body))
            except (RemoteProtocolError, StoreError) as error:
                outcome, crossed = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)), False
            then = partial(self._settle_stored, part, at, message if crossed else None, outcome)
            letters.add(
                [message], self._name, outcome, then, crossed=crossed, full=partial(part.settle_at, (at,))
            )

    def _settle_stored(self, part: SubBatch, at: int, message: Message | None, outcome: Outcome) -> None:
        part.settle_at((at,))
        if message is not None:
            self._outboxes.note(self._route, [message], outcome, WAS_BURIED)


GONE: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the route of the outbox is in no mapping now")
DOWN: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the link is down")
ABSENT: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the link is not here")


class Drain:
    """Sink of messages from an outbox: they go to the link as the route has translated them."""

    def __init__(self, outboxes: SharedOutboxes, route: Route) -> None:
        self.route = route
        self.outboxes = outboxes
        self._recipients: dict[Sink, OutboxRecipient] = {}

    def publish(self, part: SubBatch) -> None:
        """Pass messages to the link. If the link is down they wait there, behind those that wait already.

        Messages that are expired, unreadable or do not fit the route become dead letters.
        """
        utc = clock.utc()
        namespace = self.outboxes.namespace
        batch = part.batch.onward(DrainSource(self, part))
        for at, stored in enumerate(part.messages):
            try:
                message = self.outboxes.decode(bytes(stored.body))
            except StoreError as error:
                outcome = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
                self.store_dead_letter(part, at, stored, outcome, crossed=False)
                continue
            if (unfit := protocol_mismatch(self.route, message)) is not None:
                self.store_dead_letter(part, at, message, unfit)
                continue
            if message.expires != NEVER and message.expires <= utc:
                self.store_dead_letter(part, at, message, EXPIRED)
                continue
            sinks = None if namespace is None else namespace.sinks(message.address)
            if not sinks:
                part.settle_at((at,), ABSENT)
                continue
            batch.add_from(part.slots[at], (at, message), [(self._recipient(sinks[0]), message)])
        batch.send()

    def _recipient(self, sink: Sink) -> OutboxRecipient:
        found = self._recipients.get(sink)
        if found is None:
            found = self._recipients[sink] = OutboxRecipient(sink, self.route, None)
        return found

    def tries_again(self, part: SubBatch, at: int, outcome: Outcome) -> bool:
        """Count a refusal of a message.

        Return True if it is requeued for another attempt; later messages may overtake it.
        """
        if outcome.reason in FINAL:
            return False
        refusals = self.outboxes.refusals
        key = blake2b(part.messages[at].body, digest_size=16).digest()
        times = refusals.pop(key, 0) + 1
        if times >= self.route.rule.attempts_max:
            return False
        make_room(refusals, REFUSALS_MAX)
        refusals[key] = times
        return True

    def store_dead_letter(
        self, part: SubBatch, at: int, message: Message, outcome: Outcome, *, crossed: bool = True
    ) -> None:
        """Store a message as a dead letter; it leaves the outbox when that is safe.

        While there is no room for dead letters it is released.
        """
        then = partial(self._settle_stored, part, at, message if crossed else None, outcome)
        letters = self.outboxes.dispatcher.dead_letters
        full = partial(self.retry, part, at)
        letters.add([message], self.route.name, outcome, then, crossed=crossed, full=full)

    def retry(self, part: SubBatch, at: int, outcome: Outcome) -> None:
        """Return a message to its queue, for another attempt."""
        self.route.retried += 1
        part.settle_at((at,), outcome)

    def _settle_stored(self, part: SubBatch, at: int, message: Message | None, outcome: Outcome) -> None:
        self.route.failed += 1
        part.settle_at((at,))
        if message is not None:
            self.note([message], outcome, WAS_BURIED)

    def note(self, messages: list[Message], outcome: Outcome, word: str) -> None:
        """Report to the journal that messages have left the outbox."""
        self.outboxes.note(self.route, messages, outcome, word)


class DrainSource:
    """Source of messages that leave an outbox, of one part. A receipt is (position in the part, message)."""

    def __init__(self, drain: Drain, part: SubBatch) -> None:
        self.outboxes = drain.outboxes
        self._drain = drain
        self._part = part

    @property
    def is_live(self) -> bool:
        """True while the consumer of the messages can acknowledge them."""
        receipts, slots = self._part.batch.receipts, self._part.slots
        return any(receipts[slot][0].live for slot in slots)

    def settle(
        self,
        receipts: list[tuple[int, Message]],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """Settle messages with the link's outcomes.

        Released messages, and refused ones that may be tried again, are requeued; other refused messages
        become dead letters.
        """
        refused = refused or {}
        done = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        self._part.settle_at([position for position, _ in done])
        self._drain.note([message for _, message in done], ACCEPTED, WAS_DELIVERED)
        for at, outcome in refused.items():
            position, message = receipts[at]
            if outcome.verdict is Verdict.RELEASED or self._drain.tries_again(self._part, position, outcome):
                self._drain.retry(self._part, position, outcome._replace(verdict=Verdict.RELEASED))
            else:
                self._drain.store_dead_letter(self._part, position, message, outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return no holds: the senders were acknowledged long ago."""
        return []

"""Outboxes on the cluster: messages for a link that is down, accepted as soon as the cluster has them.

An outbox in the store is lost with its disk. One on the cluster is a durable queue for each route with
`settle: stored`, and any replica may serve its link: the queue has a single active consumer, so that its
order is kept, and a replica consumes it only while the link is up there. A message is in the queue in the
store's encoding, with address and properties of any protocol. It is acknowledged when the link's broker has
confirmed it; if a replica is lost before that, the next one resends it.

No replica must begin with messages behind those that another replica has received and not settled. So a
replica whose link is down for more than a moment requeues its unsettled messages by closing the channel: the
queue has all of them again in one step, in order, before another consumer starts. Messages that were sent and
not confirmed may be delivered twice then, as after the loss of a replica. With QoS 2 of MQTT they must not,
and the broker recognizes a repeat only from the same sender: then the unsettled messages stay with this
replica, and another replica may deliver later ones first. A consumer that is stopped ends when all its
unsettled messages are confirmed.

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
    DepartureCallback,
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
from gateway.protocols.amqp091.events import ChannelClosed, MethodReceived, Returned
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


class OutboxDeliverer(Protocol):
    """Interface of the link session that delivers the messages of outboxes."""

    @property
    def publisher(self) -> ConfirmedSink:
        """Publisher by which the link session sends messages from the outbox to the link's broker."""


class OutboxPublisher(AmqpLinkPublisher):
    """Publisher into the outbox queues. A message that a full queue refuses is retried by its source."""

    _nacked: ClassVar[Outcome] = OUTBOX_FULL


class SharedOutboxes(AmqpLinkSession):
    """Link session that serves the outboxes of one link, which are queues on the cluster."""

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
        on_departure: DepartureCallback | None = None,
        quotas: UserQuotas | None = None,
    ) -> None:
        """Create the session of the outboxes of `link`, whose settings are `options`.

        `status` is that of the connection to the cluster (settings `engine`), `time` the clock by which
        messages expire. `up` returns True if the link is up; `delivers` publishes messages over the link.
        `paused` returns the names of paused routes. `on_departure` is called with messages that leave an
        outbox here. `quotas` has the per-user limits.
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
        """Return the declaration arguments of an outbox, or of the queue for messages removed from outboxes.

        `queue` is the queue's name.
        """
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
        """Return the state of each outbox for the HTTP interface, as far as this replica knows it."""
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
        """Return why this replica does not deliver messages of an outbox, or "" if it does.

        `paused` is True if the outbox's route is paused.
        """
        if not self.stats.up:
            return "the cluster is unreachable"
        if paused:
            return "the route is paused"
        return "" if self.up() else "the link is down at this replica"

    def counted_queues(self) -> tuple[str, ...]:
        """Return the queues whose ready messages are counted periodically."""
        return tuple(self._routes())

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> OutboxConnection:
        """Begin the handshake on a new connection. Return the owner of its stream."""
        made = self._connection = OutboxConnection(self, stream, target, now)
        return made

    def of(self, route: Route) -> SharedOutbox:
        """Return the outbox of a route in force, which is created at the first call."""
        found = self._boxes.get(route.name)
        if found is None:
            address = amqp_address(self._direct, self._prefix + route.name)
            found = self._boxes[route.name] = SharedOutbox(self, address, self._new_shares())
            found.shares.reconcile(self.waiting.get(self._prefix + route.name, 0))
        return found

    def _new_shares(self) -> SharedOutboxShares:
        """Create the per-user limits of one more outbox of this link."""
        quota = self._quotas.outbox()
        quota.set_limits(self._limits.messages_max, self._limits.bytes_max)
        removes = self._limits.policy != "reject"
        return SharedOutboxShares(quota, self._quotas.outboxes, removes=removes)

    def count_waiting(self, queue: str, count: int) -> None:
        """Record that the queue of an outbox has `count` ready messages."""
        self.waiting[queue] = count
        box = self._boxes.get(queue.removeprefix(self._prefix))
        if box is not None:
            box.shares.reconcile(count)

    def note(self, route: Route | None, messages: list[Message], outcome: Outcome, word: str) -> None:
        """Report to the journal that messages have left the outbox of a route; `word` says how.

        `outcome` is that of the messages. `route` is None if the mapping no longer has the route; then do
        nothing.
        """
        if self._on_departure is not None and route is not None and messages:
            self._on_departure(route, messages, exit_outcome(word, outcome), clock.now())

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message for an outbox, with its expiry time by the cluster's clock."""
        return encode_message(message, -self._time.correction)

    def decode(self, data: bytes) -> Message:
        """Decode a message of an outbox, with its expiry time by the clock of this process.

        Raises StoreError if the bytes are malformed.
        """
        self._reader.ahead_secs = -self._time.correction
        return self._reader.decode_one(data)

    def dropped(self, queue: str, body: bytes) -> None:
        """Report to the journal that the cluster has dropped a message from an outbox.

        `body` is the encoded message. Messages of queues that are not outboxes of this link are ignored.
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
        """Namespace of the link, to which messages of the outboxes are published, or None."""
        return self.dispatcher.namespaces.get(self.link)

    def stop(self) -> None:
        """Consume no more messages, because the gateway stops."""
        self._stopped = True
        self._update_consumers()

    # Interface for the link.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Declare and consume the outboxes of a changed mapping: one for each stored route of the link."""
        self._update_consumers()

    def tick(self, now: float) -> None:
        """Run the timer, once per second: start or stop consuming when the state of the link has changed."""
        super().tick(now)
        self._update_consumers()

    def _routes(self) -> dict[str, Route]:
        """Return the routes in force that have an outbox, by the names of their queues."""
        return {
            self._prefix + route.name: route
            for route in self.dispatcher.router.routes
            if route.target_endpoint == self.link and route.settle == "stored"
        }

    def _update_consumers(self) -> None:
        """Consume the outboxes that this replica can deliver now, and stop consuming the others.

        An outbox can be delivered if the link is up and its route is not paused.
        """
        paused = set(self._paused())
        routes = self._routes()
        going = self._is_link_reachable() and not self._stopped
        if not going and not self.up():
            self._requeue_all()
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

    def _is_link_reachable(self) -> bool:
        """Return True if the link is up, or was up within the last MOMENT_SECS seconds."""
        up = self.up()
        if self._seen_up and not up:
            self._patient_until = clock.now() + MOMENT_SECS
        self._seen_up = up
        deadline = self._patient_until
        return up or (deadline is not None and clock.now() < deadline)

    def _requeue_all(self) -> None:
        """Requeue all messages of the outboxes that this replica has not acknowledged, for other replicas.

        They are delivered there before later ones. If it is not known whether a QoS 2 message was delivered,
        the messages stay with this replica, and other replicas may deliver later ones first.
        """
        connection = self._connection
        if not isinstance(connection, OutboxConnection) or not self._unsettled_count():
            return
        self.end_turn()  # what has just arrived is in hand, too
        if self._delivers.has_doubtful(self._is_ours):
            connection.cancel_consumers(self._prefix)
        else:
            connection.requeue_unsettled(self._prefix)

    def _unsettled_count(self) -> int:
        """Return the number of messages that were consumed from the outboxes here and are not acknowledged.

        Messages that the cluster has removed from an outbox do not count.
        """
        connection = self._connection
        return connection.unsettled_count(self._prefix) if isinstance(connection, OutboxConnection) else 0

    def withdraw(self) -> None:
        """Take messages back from the link's queue, if the consumers that received them have ended.

        The cluster has requeued these messages, and delivers them to this or another replica.
        """
        self._delivers.release_waiting(self._is_lost, DOWN)

    def _is_lost(self, sub_batch: SubBatch) -> bool:
        """Return True if the messages of a sub-batch are from an outbox whose consumer has ended."""
        source = sub_batch.batch.source
        return self._is_ours(sub_batch) and isinstance(source, OutboxSource) and not source.is_live

    def _is_ours(self, sub_batch: SubBatch) -> bool:
        """Return True if the messages of a sub-batch are from these outboxes."""
        source = sub_batch.batch.source
        return isinstance(source, OutboxSource) and source.outboxes is self

    # Interface for batches, whose source this is.

    def handle_release(self, receipt: tuple[AmqpLinkConsumer, int, Message], outcome: Outcome) -> None:
        """Requeue a message that the link has returned with `outcome`; another replica may deliver it next.

        `receipt` has the message and its consumer. It is requeued after a delay, or if the reason is that the
        store is read-only, when the store is writable again.
        """
        if outcome.reason is Reason.STORE and receipt[0].live:
            self.held_receipts.add_refused(receipt)
        else:
            self.requeue_later(receipt)

    def handle_removed_routes(self, receipt: tuple[AmqpLinkConsumer, int, Message]) -> None:
        """Requeue a message that has waited until the store could be written; `receipt` has its consumer."""
        self.held_back.record_settled(receipt, by_target=False)
        self.requeue_later(receipt)

    # Interface for the connection.

    def resolve(self, queue: str, wire: bytes, entries: Entries) -> RoutingEntry:
        """Return the routing entry for the messages of `queue`; `wire` is the encoded address of a message.

        Messages of an outbox are routed to the link, and messages that the cluster has removed from an outbox
        to the dead letters. The result is added to `entries`.
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
        recipient = Recipient(OutboxSink(self, route))
        entry = entries[wire] = RoutingEntry(address, RoutingPlan(None, (recipient,)))
        return entry


class OutboxConsumer(AmqpLinkConsumer):
    """Consumer of an outbox. After `stop` it ends when the link's broker has confirmed all its messages.

    `stop` sends no basic.cancel, because the next consumer would start before the messages are confirmed.
    After `stop` the consumer acknowledges nothing, so that the cluster sends no more than the prefetch.
    Messages that arrive after its last acknowledgement are requeued when its channel is closed, and so are
    those that the link has returned to be retried.
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
        """True if all messages of the consumer are confirmed, so that its channel can be closed.

        After `stop`, messages that the link has returned to be retried count as well.
        """
        settled = len(self._confirmed) + (len(self._later) if self._leaves else 0)
        return self.outstanding <= settled

    def stop(self) -> None:
        """Let the consumer end when all of its messages are confirmed by the link's broker."""
        self._leaves = self.stopping = True

    def cancel(self) -> None:
        """Cancel the consumer now, even if some of its messages are not confirmed by the link's broker yet.

        The queue's next consumer, at this or another replica, may therefore start before they are confirmed.
        """
        if self._leaves or not self.stopping:
            self.acknowledge_all()
            super().stop()

    def tick(self, now: float) -> None:
        """Requeue messages that the link has returned to be retried, when their delay is over.

        `now` is in loop-clock seconds. After `stop` they are requeued by closing the channel instead.
        """
        if self._leaves:
            self.wake()
        else:
            super().tick(now)

    def flush(self) -> None:
        """Send acknowledgements of accepted messages to the cluster.

        After `stop` they are sent only when all messages of the consumer are confirmed.
        """
        if self._leaves:
            self._confirmed += self.accepted
            self.accepted = []
            if not self.is_settled:
                return
            self.accepted, self._confirmed = self._confirmed, []
        super().flush()

    def acknowledge_all(self) -> None:
        """Acknowledge all confirmed messages now, and undo the effect of `stop`."""
        self._leaves = False
        self.accepted += self._confirmed
        self._confirmed = []
        super().flush()


class OutboxConnection(AmqpLinkConnection):
    """Connection to the cluster for the outboxes of one link, with a channel for counting messages."""

    _consuming: ClassVar[type[AmqpLinkConsumer]] = OutboxConsumer

    def __init__(self, session: SharedOutboxes, stream: Stream, target: LinkUrl, now: float) -> None:
        super().__init__(session, stream, target, now)
        self._outboxes = session
        self._counting = 0
        self._counted_queues: deque[str] = deque()
        self._count_at = 0.0

    def tick(self, now: float) -> None:
        """Run the connection's timer, and query the queues' message counts every COUNT_SECS seconds."""
        super().tick(now)
        if not self._up or now < self._count_at:
            return
        self._count_at = now + COUNT_SECS
        if not self._counting:
            self._counting = self._new_channel()
        elif not self._counted_queues:
            self._count()

    def _drop(self, number: int) -> Declaration:
        """Remove the consumer of the closed channel `number`, and withdraw its messages from the link.

        Return the declaration of its queue.
        """
        declaration = super()._drop(number)
        self._outboxes.withdraw()
        return declaration

    def unsettled_count(self, prefix: str) -> int:
        """Return the number of unsettled messages from queues whose names begin with `prefix`."""
        return sum(consumer.outstanding for _, consumer in self._outbox_consumers(prefix))

    def requeue_unsettled(self, prefix: str) -> None:
        """Close the channels of the queues whose names begin with `prefix`, which requeues their messages.

        Confirmed messages are acknowledged before.
        """
        for number, consumer in self._outbox_consumers(prefix):
            consumer.acknowledge_all()
            self.machine.close_channel(number)
            self._drop(number)
        self._stream.mark_for_flush()

    def cancel_consumers(self, prefix: str) -> None:
        """Cancel the consumers of queues whose names begin with `prefix`.

        Messages that they have received stay at this replica, unsettled.
        """
        for _, consumer in self._outbox_consumers(prefix):
            consumer.cancel()
        self._stream.mark_for_flush()

    def shut_down(self) -> None:
        """Acknowledge all confirmed messages and close the connection, which requeues the others."""
        for _, consumer in self._outbox_consumers(""):
            consumer.acknowledge_all()
        super().shut_down()

    def _outbox_consumers(self, prefix: str) -> list[tuple[int, OutboxConsumer]]:
        """Return channel and consumer of each queue whose name begins with `prefix`."""
        return [
            (number, one)
            for number, one in self._consumers.items()
            if isinstance(one, OutboxConsumer) and one.declaration.name.startswith(prefix)
        ]

    def _count(self) -> None:
        for queue in self._outboxes.counted_queues():
            self._counted_queues.append(queue)
            self.machine.send_method(self._counting, m.QueueDeclare(queue, passive=True))
        self._stream.mark_for_flush()

    def _channel_opened(self, number: int) -> None:
        if number == self._counting:
            self._count()
        else:
            super()._channel_opened(number)

    def _channel_closed(self, event: ChannelClosed) -> None:
        if event.channel == self._counting:  # a queue does not exist yet or any more
            self._counting = 0
            self._counted_queues.clear()
            self._check_queues()
        else:
            super()._channel_closed(event)

    def _returned(self, event: Returned) -> None:
        super()._returned(event)
        self._check_queues()

    def _check_queues(self) -> None:
        """Check all queues again, and declare those that are missing because somebody has deleted them."""
        if self._up and self._declarer.idle:
            self._declarer.queue(self._outboxes.topology.survey())

    def _method(self, event: MethodReceived) -> None:
        if event.channel == self._counting and isinstance(event.method, m.QueueDeclareOk):
            self._outboxes.count_waiting(self._counted_queues.popleft(), event.method.message_count)
        else:
            super()._method(event)

    def connection_lost(self, reason: str) -> None:
        """Forget the message counts, and withdraw unsent messages from the link.

        The cluster has requeued all messages that were not acknowledged.
        """
        self._outboxes.waiting.clear()
        super().connection_lost(reason)
        self._outboxes.withdraw()


class SharedOutbox(OneSink):
    """Outbox of one route on the cluster: a namespace whose only sink is the outbox itself."""

    def __init__(self, outboxes: SharedOutboxes, address: Address, shares: SharedOutboxShares) -> None:
        """Create the outbox. `address` is the address of its queue, `shares` has its per-user limits."""
        super().__init__(self)
        self.shares = shares
        self._outboxes = outboxes
        self._address = address
        self._recipient = Recipient(outboxes.publisher)

    def publish(self, sub_batch: SubBatch) -> None:
        """Publish messages to the queue. They are accepted when the cluster has confirmed them.

        Messages beyond the user's part of the outbox's limit are returned to their source, to be retried.
        """
        batch = sub_batch.batch.forwarded_batch(SubBatchSource(sub_batch))
        batch.redelivered = sub_batch.is_redelivered
        for at, message in enumerate(sub_batch.messages):
            try:
                data = self._outboxes.encode(message)
            except Exception as error:
                sub_batch.settle_at((at,), outcome_of_error(error))
                continue
            if not self.shares.admit(message.sender.user, len(data)):
                sub_batch.settle_at((at,), OUTBOX_USER_FULL)
                continue
            stored = Message(self._address, data, assurance=1, durable=True, sender=message.sender)
            batch.add_from(sub_batch.slots[at], at, [(self._recipient, stored)])
        batch.send()


class SubBatchSource:
    """Source of the messages of a sub-batch that are published to an outbox.

    The receipt, by which the source knows a message, is its position in the sub-batch.
    """

    def __init__(self, sub_batch: SubBatch) -> None:
        self._sub_batch = sub_batch

    def settle(self, receipts: list[int], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Settle messages of the sub-batch with the outcomes that the cluster has confirmed.

        `receipts` are the messages' positions in the sub-batch; `refused` has the outcomes of those that are
        not accepted, by position in `receipts`. `received` is ignored.
        """
        refused = refused or {}
        self._sub_batch.settle_at([receipt for at, receipt in enumerate(receipts) if at not in refused])
        for at, outcome in refused.items():
            self._sub_batch.settle_at((receipts[at],), outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Make the publishers of the sub-batch stop sending. Return the functions that let them continue."""
        return self._sub_batch.batch.source.hold(senders)


class RequeuingSink:
    """Sink of messages from the outbox of a route that the mapping no longer has: it requeues them."""

    def publish(self, sub_batch: SubBatch) -> None:
        """Release all messages of the sub-batch, which requeues them."""
        sub_batch.settle_at(range(len(sub_batch.messages)), GONE)


class RemovedMessageSink:
    """Sink of messages that the cluster has removed from an outbox: it stores them as dead letters.

    `name` is the name of the outbox's route, and `route` the route of that name in force, or None.
    """

    def __init__(self, outboxes: SharedOutboxes, name: str, route: Route | None) -> None:
        self._outboxes = outboxes
        self._name = name
        self._route = route  # the route in force with that name, if any

    def publish(self, sub_batch: SubBatch) -> None:
        """Store messages as dead letters. Each is acknowledged when its dead letter is stored.

        Messages for which there is no capacity are returned to be retried.
        """
        letters = self._outboxes.dispatcher.dead_letters
        for at, stored in enumerate(sub_batch.messages):
            outcome, message, crossed = CROWDED_OUT, stored, True
            try:
                reason = dict(stored.properties.headers).get(FIRST_REASON)
                if reason is not None and reason.value == "expired":
                    outcome = TOO_OLD
                message = self._outboxes.decode(bytes(stored.body))
            except (RemoteProtocolError, StoreError) as error:
                outcome, crossed = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)), False
            then = partial(self._settle_stored, sub_batch, at, message if crossed else None, outcome)
            letters.add(
                [message],
                self._name,
                outcome,
                then,
                crossed=crossed,
                full=partial(sub_batch.settle_at, (at,)),
            )

    def _settle_stored(self, sub_batch: SubBatch, at: int, message: Message | None, outcome: Outcome) -> None:
        """Acknowledge the message at position `at`, because its dead letter is stored, and report it.

        The message's departure from the outbox is reported to the journal. `message` is None if it could not
        be decoded; then it is not reported. `outcome` is the reason of the dead letter.
        """
        sub_batch.settle_at((at,))
        if message is not None:
            self._outboxes.note(self._route, [message], outcome, WAS_BURIED)


GONE: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the outbox's route is in no mapping")
DOWN: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the link is down")
ABSENT: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the link is not configured at this replica")


class OutboxSink:
    """Sink of messages from the outbox of a route: it publishes them to the link.

    The route has translated the messages before they were put into the outbox.
    """

    def __init__(self, outboxes: SharedOutboxes, route: Route) -> None:
        self.route = route
        self.outboxes = outboxes
        self._recipients: dict[Sink, OutboxRecipient] = {}

    def publish(self, sub_batch: SubBatch) -> None:
        """Publish messages to the link. If the link is down, the messages wait in the link, in order.

        Messages that have expired, cannot be decoded or are not of the protocol of the route's target become
        dead letters.
        """
        utc = clock.utc()
        namespace = self.outboxes.namespace
        batch = sub_batch.batch.forwarded_batch(OutboxSource(self, sub_batch))
        for at, stored in enumerate(sub_batch.messages):
            try:
                message = self.outboxes.decode(bytes(stored.body))
            except StoreError as error:
                outcome = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
                self.store_dead_letter(sub_batch, at, stored, outcome, crossed=False)
                continue
            if (unfit := protocol_mismatch(self.route, message)) is not None:
                self.store_dead_letter(sub_batch, at, message, unfit)
                continue
            if message.expires != NEVER and message.expires <= utc:
                self.store_dead_letter(sub_batch, at, message, EXPIRED)
                continue
            sinks = None if namespace is None else namespace.sinks(message.address)
            if not sinks:
                sub_batch.settle_at((at,), ABSENT)
                continue
            batch.add_from(sub_batch.slots[at], (at, message), [(self._recipient(sinks[0]), message)])
        batch.send()

    def _recipient(self, sink: Sink) -> OutboxRecipient:
        found = self._recipients.get(sink)
        if found is None:
            found = self._recipients[sink] = OutboxRecipient(sink, self.route, None)
        return found

    def should_retry(self, sub_batch: SubBatch, at: int, outcome: Outcome) -> bool:
        """Count a refusal of the message at position `at`. Return True if the message must be retried.

        `outcome` is the refusal. A message is retried until the route's maximum number of attempts, unless
        the reason is final. It is requeued, so later messages may be delivered before it.
        """
        if outcome.reason in FINAL:
            return False
        refusals = self.outboxes.refusals
        key = blake2b(sub_batch.messages[at].body, digest_size=16).digest()
        times = refusals.pop(key, 0) + 1
        if times >= self.route.rule.attempts_max:
            return False
        make_room(refusals, REFUSALS_MAX)
        refusals[key] = times
        return True

    def store_dead_letter(
        self, sub_batch: SubBatch, at: int, message: Message, outcome: Outcome, *, crossed: bool = True
    ) -> None:
        """Store a message as a dead letter, and acknowledge it when that is done.

        If there is no capacity for dead letters the message is requeued. `outcome` is the reason of the dead
        letter. `crossed` is False if the message could not be decoded.
        """
        then = partial(self._settle_stored, sub_batch, at, message if crossed else None, outcome)
        letters = self.outboxes.dispatcher.dead_letters
        full = partial(self.retry, sub_batch, at)
        letters.add([message], self.route.name, outcome, then, crossed=crossed, full=full)

    def retry(self, sub_batch: SubBatch, at: int, outcome: Outcome) -> None:
        """Requeue the message at position `at` for another attempt; `outcome` is the reason."""
        self.route.retried += 1
        sub_batch.settle_at((at,), outcome)

    def _settle_stored(self, sub_batch: SubBatch, at: int, message: Message | None, outcome: Outcome) -> None:
        """Acknowledge the message at position `at`, because its dead letter is stored, and report it.

        The message's departure from the outbox is reported to the journal. `message` is None if it could not
        be decoded; then it is not reported. `outcome` is the reason of the dead letter.
        """
        self.route.failed += 1
        sub_batch.settle_at((at,))
        if message is not None:
            self.note([message], outcome, WAS_BURIED)

    def note(self, messages: list[Message], outcome: Outcome, word: str) -> None:
        """Report to the journal that messages have left the outbox; `word` says how, `outcome` is theirs."""
        self.outboxes.note(self.route, messages, outcome, word)


class OutboxSource:
    """Source of the messages of a sub-batch from an outbox that are published to the link.

    A receipt has the position in the sub-batch, and the message.
    """

    def __init__(self, sink: OutboxSink, sub_batch: SubBatch) -> None:
        self.outboxes = sink.outboxes
        self._sink = sink
        self._sub_batch = sub_batch

    @property
    def is_live(self) -> bool:
        """True while the consumer that has received the messages can acknowledge them."""
        receipts, slots = self._sub_batch.batch.receipts, self._sub_batch.slots
        return any(receipts[slot][0].live for slot in slots)

    def settle(
        self,
        receipts: list[tuple[int, Message]],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """Settle messages of the sub-batch with the outcomes from the link.

        `refused` has the outcomes of messages that are not accepted, by position in `receipts`. Messages that
        the link could not send now, and refused ones that may be retried, are requeued; other refused
        messages become dead letters. `received` is ignored.
        """
        refused = refused or {}
        done = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        self._sub_batch.settle_at([position for position, _ in done])
        self._sink.note([message for _, message in done], ACCEPTED, WAS_DELIVERED)
        for at, outcome in refused.items():
            position, message = receipts[at]
            if outcome.verdict is Verdict.RELEASED or self._sink.should_retry(
                self._sub_batch, position, outcome
            ):
                self._sink.retry(self._sub_batch, position, outcome._replace(verdict=Verdict.RELEASED))
            else:
                self._sink.store_dead_letter(self._sub_batch, position, message, outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return an empty list: no sender can be paused, because the senders were acknowledged long ago."""
        return []

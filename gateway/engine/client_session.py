"""Session of a client that is connected to this replica.

A session that outlives its connection has a queue on the cluster, which is bound to its filters of QoS 1 and
2. Messages for filters of QoS 0 arrive by the replica's queue, because only connected clients get them. A
message of the session's queue is acknowledged to the cluster when the client has acknowledged it.
Unacknowledged messages are delivered by the next replica to which the client connects, under another packet
id, which makes no difference at QoS 1.

At QoS 2 the shared database stores which message has which packet id before the message is sent to the
client, and stores that the client has received it before PUBREL is sent. So the next owner of the session
continues: a message that was sent is resent under its old id, and a message that the client has is
acknowledged to the cluster and not sent. The packet ids of messages that the client publishes are stored
before these are published, with the numbers by which subscribers' replicas recognize duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.broker.mqtt.received_ids import ReceivedIds
from gateway.broker.mqtt.session import (
    PACKET_IDS,
    ROWS_BYTES_MAX,
    ROWS_MAX,
    UNKEPT,
    Grant,
    OutgoingPublish,
    Session,
    SessionLimits,
    SessionOutlet,
    SessionTally,
    SubscriptionOptions,
)
from gateway.broker.mqtt.shared_subscriptions import shared_pattern
from gateway.broker.shares import filter_bytes, text_bytes
from gateway.broker.topics import topic_matches
from gateway.engine.consumers import PREFETCH_MAX, ClusterConsumer, Content, Done
from gateway.engine.envelope import Number
from gateway.engine.names import SHORTENED_MIN, binding_of
from gateway.engine.repeated_messages import RecentNumbers
from gateway.engine.requeue_order import RequeuedMessages, fingerprint_of
from gateway.engine.stored_values import encode_options
from gateway.engine.walks import SentRetained
from gateway.model.address import Address
from gateway.model.caches import make_room
from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.properties import Headers
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.spec import PacketType
from gateway.state.interface import INCOMING, OUTGOING, Contents, Owner, Packet, Weight

log = structlog.get_logger(limited=True)

# Messages that an earlier owner had sent usually arrive before new ones. A queue whose broker is busy
# or has lost a node may deliver new ones first, so ids are kept for some time: an error would lose a message.
LEFT_SECS: Final = 30.0
SPARE: Final = 128  # messages that may arrive between the requeued ones
# Prefetch limit as a multiple of the client's receive maximum, while requeued messages are awaited.
ROOM_TIMES: Final = 4
GRANTS_MAX: Final = 1_024  # topics whose grants a session caches
OutcomeCallback = Callable[[Outcome], None]


class ClusterOrigin(NamedTuple):
    """Delivery by which the cluster has sent a message of a session's queue; it must be settled once.

    `tag` is the delivery tag at `consumer`. `number` is the QoS 2 message's number, by which duplicates are
    recognized. `is_resend` is True if the cluster has delivered the message before: the client may have it.
    """

    consumer: ClusterConsumer
    tag: int
    number: Number | None
    is_resend: bool

    def settle(self) -> None:
        """Acknowledge the message to the cluster."""
        self.consumer.settle(self.tag)

    def requeue(self) -> None:
        """Return the message to its queue on the cluster, for another consumer."""
        self.consumer.requeue(self.tag)


class SessionChange:
    """Changes of one session, collected until they are submitted: the fields of the next ChangeSession.

    A value of None in a mapping removes the entry from the database.
    """

    __slots__ = ("expiry_secs", "packets", "received", "subscriptions", "unbindings", "weight")

    def __init__(self) -> None:
        self.expiry_secs: float | None = None  # set when the client is accepted
        self.subscriptions: dict[str, bytes | None] = {}
        self.packets: dict[tuple[int, int], Packet | None] = {}
        self.received: dict[tuple[bytes, int], int | None] = {}
        self.weight: Weight | None = None  # set whenever `subscriptions` change
        self.unbindings: dict[str, bool] = {}

    def __bool__(self) -> bool:
        is_accepted = self.expiry_secs is not None
        return bool(is_accepted or self.subscriptions or self.packets or self.received or self.unbindings)


class Engine(Protocol):
    """Interface of the engine that a client's session uses."""

    recent_chunks: int  # maximum number of chunks of received QoS 2 numbers per session

    def change(self, session: ClientSession) -> SessionChange:
        """Return the collected changes of a session, which are stored soon; the caller adds more to them."""

    def after_stored(self, session: ClientSession, done: OutcomeCallback) -> None:
        """Call `done` with ACCEPTED when all changes that a session has collected until now are stored.

        `done` is called with another outcome if the session has another owner.
        """

    def pump(self, session: ClientSession) -> None:
        """Schedule `session.pump()`, which sends queued messages, for the end of this event-loop pass."""

    def next_number(self) -> Number:
        """Return a new number, by which replicas recognize a QoS 2 message that will be published later."""

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """Decode a delivered message. Return it with its number, or None if it cannot be delivered.

        The number, by which replicas recognize a repeated message, is None below QoS 2.
        """

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        """Abort the connection of a session's client for the reason `why`; the client must reconnect."""

    def bind_queue(self, session: ClientSession, key: str) -> None:
        """Bind the session's queue with a key, or unbind it.

        The first item of `session.unbound[key]` is True to bind the queue, and False to unbind it.
        """

    def check_owner(self, session: ClientSession, done: Callable[[bool], None]) -> None:
        """Query if this replica owns a session and its queue; call `done` with True if so, else False."""


class ClientSession(Session):
    """MQTT session of a client that is connected to this replica."""

    __slots__ = (
        "_cached",
        "_consumer",
        "_deliveries",
        "_engine",
        "_flight",
        "_left_since",
        "_next",
        "_old",
        "_recent",
        "_requeued",
        "_reserved",
        "_sent",
        "_stopped",
        "_unbindings",
        "_unbound_options",
        "arguments",
        "fresh",
        "opened_at",
        "owner",
        "prefetch",
        "queue",
        "sent_retained",
        "unbound",
        "weight",
        "will_bytes",
    )

    def __init__(
        self, client_id: str, limits: SessionLimits, tally: SessionTally, engine: Engine, owner: Owner
    ) -> None:
        super().__init__(client_id, limits, tally)
        self.owner = owner
        self.queue = ""
        # Of the stored subscriptions and those about to be, and of the client identifier.
        self.weight = Weight(0, text_bytes(client_id))
        self.will_bytes = 0  # size of the client's will
        self.opened_at: Monotonic | None = None  # when its client connected
        self.prefetch = limits.in_flight_max
        self.arguments: Headers = ()
        self.fresh = False
        self.unbound: dict[str, tuple[bool, Done]] = {}
        # Encoded options of filters that are stored when their key is bound, by key.
        self._unbound_options: dict[str, dict[str, bytes | None]] = {}
        self._unbindings: set[str] = set()  # keys that are stored as those to be unbound
        self._engine = engine
        # Since then messages that an earlier owner had sent are awaited; some may never be redelivered.
        self._left_since: Monotonic | None = None
        self._next = 0
        self._deliveries: dict[int, ClusterOrigin] = {}  # of waiting messages, by position
        self._flight: dict[int, ClusterOrigin] = {}  # of messages in flight, by packet id
        self._reserved: dict[int, Number | None] = {}  # packet ids of QoS 2 that are stored, or being stored
        self._sent: dict[Number, int] = {}  # the inverse of `_reserved`: packet id by number
        self._recent = RecentNumbers(0)  # a session that ends with its connection gets no redeliveries
        self._old = 0  # messages to come that were in the queue before the client connected
        # Messages that an earlier owner requeued, until all of them have arrived.
        self._requeued: RequeuedMessages | None = None
        self._cached: dict[str, Grant | None] = {}
        self._consumer: ClusterConsumer | None = None  # the consumer that delivers the messages of its queue
        self.sent_retained: SentRetained | None = (
            None  # retained messages that were sent, while they may arrive live, too
        )
        self._stopped = False

    def total_weight(self, *, with_will: bool) -> Weight:
        """Return the session's number of subscriptions and its size in bytes.

        The size includes the client's will if `with_will` is True.
        """
        more = self.will_bytes if with_will else 0
        return self.weight._replace(byte_count=self.weight.byte_count + more)

    @property
    def has_queue(self) -> bool:
        """True if the session has a queue on the cluster, so that it outlives its connection."""
        return self.queue != ""

    def begin(self, contents: Contents, queue: str, arguments: Headers) -> None:
        """Restore the QoS 2 state of this session, which has a queue, from its `contents` in the database.

        The stored subscriptions are only added to the session's size in bytes; the caller subscribes. `queue`
        is the queue's name, `arguments` are those of its declaration. Keys that an earlier owner was about to
        unbind will be unbound.
        """
        self.queue, self.arguments = queue, arguments
        self._unbindings |= contents.unbindings
        self.unbound.update({key: (False, partial(self._record_unbound, key)) for key in contents.unbindings})
        for topic_filter in contents.subscriptions:
            self._count_weight(topic_filter, 1)
        received_numbers, sent = dict[int, Number](), dict[int, Number | None]()
        for (direction, packet_id), packet in sorted(contents.packets.items()):
            if direction == OUTGOING:
                sent[packet_id] = packet.number
                if packet.released:
                    self.released[packet_id] = None
            elif packet.number is not None:
                received_numbers[packet_id] = packet.number
        self.received_ids = SharedReceivedIds(self._engine, self, received_numbers)
        self._left_since = clock.now() if sent else None
        self._reserved.update(sent)
        self._sent.update({number: at for at, number in sent.items() if number is not None})
        self._recent = RecentNumbers(self._engine.recent_chunks, contents.received)

    def change(self) -> SessionChange:
        """Return the collected changes of this session, which are stored soon; the caller adds to them."""
        return self._engine.change(self)

    def _note_packet(self, packet_id: int, *, released: bool = False) -> None:
        self.change().packets[OUTGOING, packet_id] = Packet(self._reserved[packet_id], released)

    # Subscriptions.

    @property
    def keys(self) -> Iterable[str]:
        """Binding keys of the session's queue: one for each filter of QoS 1 or 2 that is not shared."""
        for topic_filter, options in self.subscriptions.items():
            if not options.qos or shared_pattern(topic_filter) is not None:
                continue
            if (key := binding_of(topic_filter.split("/"))) is not None:
                yield key

    def subscribed(
        self, topic_filter: str, options: SubscriptionOptions | None, before: SubscriptionOptions | None
    ) -> None:
        """Store a subscription that has begun or ended, and bind or unbind the queue for it.

        `options` is None if the subscription has ended. `before` has its options until now, or None if it is
        new. A new subscription is stored when the queue is bound for it; an ended one is removed at once.
        """
        self._cached.clear()
        self._count_weight(topic_filter, (options is not None) - (before is not None))
        encoded = None if options is None else encode_options(options)
        note = partial(self._record_subscription, topic_filter, encoded)
        key = None if shared_pattern(topic_filter) is not None else binding_of(topic_filter.split("/"))
        needs_binding = options is not None and options.qos > 0
        is_bound = before is not None and before.qos > 0 and key not in self.unbound
        if (
            key is None
            or (not needs_binding and (before is None or not before.qos))
            or (needs_binding and is_bound)
        ):
            note()
        elif needs_binding:
            self._unbound_options.setdefault(key, {})[topic_filter] = encoded
            self.unbound[key] = (True, partial(self._bound, key))
            self._engine.bind_queue(self, key)
        else:
            note()
            self._unbound_options.get(key, {}).pop(topic_filter, None)
            if self._needs(key, topic_filter):
                return
            self._unbound_options.pop(key, None)
            self.unbound[key] = (False, partial(self._record_unbound, key))
            self._unbindings.add(key)
            self.change().unbindings[key] = True
            self._engine.bind_queue(self, key)

    def _needs(self, key: str, without: str) -> bool:
        """Return True if a filter of this session other than `without` needs the same binding key `key`.

        Two filters have the same key only if the key of a long filter was shortened. A filter whose binding
        is pending counts, too.
        """
        if self._unbound_options.get(key):
            return True
        others = [
            one
            for one, options in self.subscriptions.items()
            if options.qos and max(len(one), len(without)) >= SHORTENED_MIN and one != without
        ]
        return any(
            shared_pattern(one) is None and binding_of(one.split("/")) == key for one in others if "#" in key
        )

    def _bound(self, key: str) -> None:
        """Store the subscriptions that waited for the queue to be bound with this key."""
        self._record_unbound(key)
        for topic_filter, encoded in self._unbound_options.pop(key, {}).items():
            self._record_subscription(topic_filter, encoded)

    def _record_unbound(self, key: str) -> None:
        """Store that the queue need not be unbound from a key any more: it is unbound, or bound again."""
        if key in self._unbindings:
            self._unbindings.discard(key)
            self.change().unbindings[key] = False

    def _record_subscription(self, topic_filter: str, options: bytes | None) -> None:
        """Add a subscription to the changes to be stored; `options` are encoded, None if it has ended."""
        change = self.change()
        change.subscriptions[topic_filter] = options
        change.weight = self.weight

    def _count_weight(self, topic_filter: str, count: int) -> None:
        """Add a subscription to the session's weight, its number of subscriptions and bytes, or subtract it.

        `count` is 1 to add it, -1 to subtract it, and 0 if it is only changed.
        """
        subscriptions, byte_count = self.weight
        self.weight = Weight(subscriptions + count, byte_count + count * filter_bytes(topic_filter))

    def _grant_for(self, address: Address) -> Grant | None:
        """Return the combined options of the session's subscriptions that match a topic, None if none does.

        Shared subscriptions are left out, because they have their own queues.
        """
        topic = address.name
        if topic in self._cached:
            return self._cached[topic]
        levels = topic.split("/")
        matching = [
            options
            for topic_filter, options in self.subscriptions.items()
            if shared_pattern(topic_filter) is None and topic_matches(topic_filter.split("/"), levels)
        ]
        make_room(self._cached, GRANTS_MAX)
        found = self._cached[topic] = Grant(self, matching) if matching else None
        return found

    # Messages from a queue.

    def drop_expired(self) -> None:
        """Do nothing: messages wait in a queue of the cluster, which drops expired ones itself."""
        self.purge_at = NEVER

    def set_backlog(self, count: int) -> None:
        """Record that the queue had `count` messages when this replica began to consume it for the client."""
        self._old = count

    def deliver(self, consumer: ClusterConsumer, tag: int, redelivered: bool, content: Content) -> None:
        """Process a message of the session's queue, or buffer it until all requeued messages have arrived.

        `tag` is its delivery tag at `consumer`, `redelivered` the flag of the delivery.
        """
        if consumer is not self._consumer:
            self._consumer = consumer
            self._forget_waiting()
        requeued = self._requeued
        if requeued is None:
            self._receive(consumer, tag, redelivered, content)
        elif requeued.hold((consumer, tag, redelivered, content)) or requeued.buffered_count >= self.prefetch:
            self.stop_expecting()  # all of them are here, or the prefetch is used up

    def expect(self, prints: Sequence[int]) -> None:
        """Buffer all messages until those that the previous owner has requeued are redelivered.

        `prints` are the fingerprints of the requeued messages. Called before the queue is consumed.
        """
        self._requeued = RequeuedMessages(prints)
        self.prefetch = self._prefetch_for(self.prefetch)

    def _prefetch_for(self, receive_maximum: int) -> int:
        """Return the prefetch count of the session's queue for the client's Receive Maximum.

        It has capacity for the Receive Maximum, for the requeued messages, and for some between them. It is
        limited, because a client that acknowledges nothing and moves from replica to replica causes more
        requeued messages each time.
        """
        if self._requeued is None:
            return max(receive_maximum, 1)
        most = min(ROOM_TIMES * receive_maximum + SPARE, PREFETCH_MAX)
        return min(max(receive_maximum, self._requeued.count) + SPARE, most)

    def fingerprints(self, requeued: Iterable[Content]) -> tuple[int, ...]:
        """Return the fingerprints of the messages that the next owner of the session must expect.

        These are the messages `requeued`, which have just been requeued, and those that this owner has
        expected.
        """
        before = self._requeued
        return tuple(map(fingerprint_of, requeued)) if before is None else before.fingerprints(requeued)

    def stop_expecting(self) -> None:
        """Process the buffered messages in order, and wait for no more requeued ones.

        Logs a warning if some requeued messages have not arrived.
        """
        requeued, self._requeued = self._requeued, None
        if requeued is None:
            return
        if requeued.missing_count:
            log.warning(
                "requeued messages not redelivered in time, order uncertain",
                client=self.client_id,
                messages=requeued.missing_count,
            )
        for buffered in requeued.in_order():
            if buffered[0] is self._consumer:  # else it is redelivered over another connection
                buffered[0].requeue_last(buffered[1])
                self._receive(*buffered)

    def _receive(self, consumer: ClusterConsumer, tag: int, redelivered: bool, content: Content) -> None:
        """Queue a message of the session's queue for the client, or settle it if the client must not get it.

        `tag` and `redelivered` are those of the delivery to `consumer`. The client does not get a message
        that cannot be decoded, that no subscription matches, or that is older than a retained message of the
        topic that was sent to it. A delivery at QoS 2 that has begun is completed, even if the client has
        unsubscribed (5: 3.10.4).
        """
        old = self._old > 0
        self._old -= old
        left_at = self._left_since
        if left_at is not None and not redelivered and clock.now() - left_at >= LEFT_SECS:
            self._left_since = None
            self._release_reserved()
        found = self._engine.read(content)
        grant = None if found is None else self._grant_for(found[0].address)
        if found is not None and grant is None and found[1] in self._sent:
            grant = Grant(self, [SubscriptionOptions(qos=2)])
        if found is None or grant is None:
            consumer.settle(tag)
            return
        message, number = found
        qos = min(message.assurance, grant.qos)
        walked = self.sent_retained if qos or not old else None
        is_late = walked is not None and not walked.is_new(message, number, qos, lasting=True)
        if is_late and not old and not redelivered:
            consumer.settle(tag)  # the client was sent a later one as retained
            return
        self.queue_message(message, grant, ClusterOrigin(consumer, tag, number, redelivered), old=old)

    def _forget_waiting(self) -> None:
        """Drop queued messages of an earlier connection to the cluster, which redelivers them.

        Retained messages and those of shared subscriptions stay queued.
        """
        waiting, self._waiting = self._waiting, None
        dropped_bytes = 0
        for message, grant, position in waiting or ():
            delivery = self._deliveries.get(position)
            if delivery is not None and delivery.consumer.target is self:
                del self._deliveries[position]
                dropped_bytes += message.byte_count
            else:
                self._wait([(message, grant, position)])
        self._subtract_bytes(dropped_bytes)

    def queue_message(
        self, message: Message, grant: Grant, delivery: ClusterOrigin, *, old: bool = False
    ) -> bool:
        """Queue a message for the client; settle its `delivery` when the client acknowledges the message.

        `grant` has the options of the matching subscriptions. `old` is True if the message arrived while the
        client was disconnected. Return False if the message is not queued, as it is settled or in flight
        already.
        """
        qos = min(message.assurance, grant.qos)
        if grant.no_local and self._is_own(message):
            delivery.settle()
            return False
        if not qos:
            delivery.settle()
            if old:
                self.tally.offline += 1
                return False
            self._wait([(message, grant, UNKEPT)])
        elif qos == 2 and self._is_duplicate(message, grant, delivery):
            return False
        else:
            self._enqueue(message, grant, delivery)
        self._byte_count += message.byte_count
        self._engine.pump(self)
        return True

    def _enqueue(self, message: Message, grant: Grant, delivery: ClusterOrigin) -> None:
        self._next += 1
        self._deliveries[self._next] = delivery
        self._wait([(message, grant, self._next)])

    def _is_duplicate(self, message: Message, grant: Grant, delivery: ClusterOrigin) -> bool:
        """Return True if a QoS 2 message was sent to the client before; then process its new `delivery`.

        If the client has the message, `delivery` is settled; otherwise it replaces the message's earlier
        delivery. `grant` has the options of the matching subscriptions. Called again before the message is
        sent, because its publisher may have repeated it meanwhile.
        """
        number = delivery.number
        if not self.has_queue or number is None:
            return False
        if number in self._recent:
            delivery.settle()
            return True
        at = self._sent.get(number)
        if at is None:
            return False
        self._reattach(at, message, grant, delivery)
        return True

    def _reattach(self, packet_id: int, message: Message, grant: Grant, delivery: ClusterOrigin) -> None:
        """Have the client's acknowledgement of a sent QoS 2 message settle `delivery` from now on.

        An earlier delivery of the message is settled at once. If only an earlier owner of the session has
        sent the message, it is resent under the same packet id, with the options in `grant`. If its PUBREC
        was received, `delivery` is settled at once.
        """
        if packet_id in self.released:
            delivery.settle()
            return
        before = self._flight.get(packet_id)
        if before is not None:
            before.settle()  # of two deliveries of one message only the later one stays open
        self._flight[packet_id] = delivery
        if packet_id not in self.in_flight:
            row = self.in_flight[packet_id] = OutgoingPublish(message, grant, 2, packet_id, True)
            self._byte_count += message.byte_count
            self._again[packet_id] = row
            self._engine.pump(self)

    def _release_reserved(self) -> None:
        """Send PUBREL for the QoS 2 messages of an earlier owner that the cluster does not redeliver.

        Such messages have expired in the queue, but the client may have received them and wait for PUBREL.
        """
        for packet_id in list(self._reserved):
            if packet_id not in self.in_flight and packet_id not in self.released:
                self.released[packet_id] = None
                self.credit -= 1
                self._note_packet(packet_id, released=True)
                self._engine.after_stored(self, partial(self._release, packet_id))

    def _release(self, packet_id: int, outcome: Outcome) -> None:
        """Send PUBREL for a packet id. Do nothing unless `outcome` (of storing its state) is ACCEPTED."""
        if outcome is ACCEPTED and self.outlet is not None and packet_id in self.released:
            self.outlet.send_release(packet_id)

    # Outgoing messages.

    def _next_rows(self) -> list[OutgoingPublish]:
        """Return the next messages to send: messages to resend if there are any, otherwise queued ones."""
        rows: list[OutgoingPublish] = []
        if self._stopped:
            return rows
        for row in islice(self._again.values(), ROWS_MAX):
            if row.dup:  # the others took their credit before they were stored
                if self.credit <= 0:
                    break
                self.credit -= 1
            rows.append(row)
        for row in rows:
            del self._again[row.packet_id]
        if rows:
            return rows
        return self._fresh_rows()

    def _fresh_rows(self) -> list[OutgoingPublish]:
        """Return the next queued messages that the client's Receive Maximum permits to send now.

        If the session has a queue, messages at QoS 2 are not returned: their packet ids are stored first,
        then `_send_stored` sends them.
        """
        rows: list[OutgoingPublish] = []
        unsaid: list[OutgoingPublish] = []
        waiting = self._waiting
        if waiting is None:
            return rows
        byte_count = dropped_bytes = 0
        while waiting and len(rows) + len(unsaid) < ROWS_MAX and byte_count < ROWS_BYTES_MAX:
            message, grant, position = waiting[0]
            qos = min(message.assurance, grant.qos)
            if qos and self.credit <= 0:
                break
            waiting.popleft()
            delivery = self._deliveries.pop(position, None)
            if message.expires and message.expires <= clock.utc():
                self.tally.expired += 1
                dropped_bytes += message.byte_count
                if delivery is not None:
                    delivery.settle()
                continue
            if qos == 2 and delivery is not None and self._is_duplicate(message, grant, delivery):
                dropped_bytes += message.byte_count
                continue
            byte_count += message.byte_count
            packet_id = self._free_id() if qos else 0
            row = OutgoingPublish(
                message, grant, qos, packet_id, delivery is not None and delivery.is_resend and qos > 0
            )
            if qos:
                self.credit -= 1
                self.in_flight[packet_id] = row
                if delivery is not None:
                    self._flight[packet_id] = delivery
            else:
                dropped_bytes += message.byte_count
            if qos == 2 and self.has_queue:
                self._reserve(packet_id, self._number_of(message) if delivery is None else delivery.number)
                unsaid.append(row.with_dup(before=False))
            else:
                rows.append(row)
        if unsaid:
            self._engine.after_stored(self, partial(self._send_stored, unsaid))
        self._subtract_bytes(dropped_bytes)
        return rows

    def _number_of(self, message: Message) -> Number | None:
        """Return and forget the number of a retained message that is being sent at QoS 2, or None.

        If the same message arrives as a published one as well, the session recognizes it by this number.
        """
        return None if self.sent_retained is None else self.sent_retained.number_of(message)

    def _reserve(self, packet_id: int, number: Number | None) -> None:
        self._reserved[packet_id] = number
        if number is not None:
            self._sent[number] = packet_id
        self._note_packet(packet_id)

    def _send_stored(self, rows: list[OutgoingPublish], outcome: Outcome) -> None:
        """Send QoS 2 messages. Do nothing unless `outcome` (of storing their packet ids) is ACCEPTED."""
        if outcome is ACCEPTED and self.outlet is not None:
            self._again.update((row.packet_id, row) for row in rows)
            self.pump()

    def _free_id(self) -> int:
        """Return the next packet id that is not in use."""
        candidate = self._last_id
        while True:
            candidate = candidate + 1 if candidate < PACKET_IDS else 1
            if candidate not in self.in_flight and candidate not in self._reserved:
                self._last_id = candidate
                return candidate

    # Acknowledgements, connect and disconnect of the client.

    def attach(self, outlet: SessionOutlet, receive_maximum: int) -> None:
        """Attach a connection of the client, `outlet`, and resend PUBREL for each message with a PUBREC.

        `receive_maximum` is the client's Receive Maximum.
        """
        self.outlet = outlet
        self.credit = receive_maximum - len(self.released)
        self.prefetch = self._prefetch_for(receive_maximum)
        for packet_id in self.released:
            outlet.send_release(packet_id)
        self.pump()

    def expects_ack(self, kind: PacketType, packet_id: int) -> bool:
        """Return True if the client may send an acknowledgement of type `kind` for this packet id now.

        For an id under which only an earlier owner has sent a message, PUBREC and PUBCOMP are both accepted.
        """
        if packet_id in self._reserved and packet_id not in self.in_flight:
            return kind is not PacketType.PUBACK
        return super().expects_ack(kind, packet_id)

    def handle_pubrec(self, packet_id: int) -> bool:
        """Process PUBREC: store that the client has the message; PUBREL is sent when that is stored.

        Return False if the packet id is unknown.
        """
        if packet_id not in self._reserved:
            return super().handle_pubrec(packet_id)
        if packet_id not in self.released:
            self._forget_resend(packet_id)
            self.released[packet_id] = None
            self._note_packet(packet_id, released=True)
            self._record_received(self._reserved[packet_id])
            delivery = self._flight.pop(packet_id, None)
            if delivery is not None:
                self._engine.after_stored(self, partial(_settle, delivery))
        return True

    def complete_delivery(self, packet_id: int) -> bool:
        """Process PUBACK or PUBCOMP, and acknowledge the message to the cluster.

        Return False if the packet id is unknown.
        """
        delivery = self._flight.pop(packet_id, None)
        if delivery is not None:
            delivery.settle()
        is_known = packet_id in self._reserved
        if is_known:
            number = self._reserved.pop(packet_id)
            if packet_id not in self.released:  # else it is remembered already
                self._forget_resend(packet_id)
                self._record_received(number)
            if number is not None:
                self._sent.pop(number, None)
            self.change().packets[OUTGOING, packet_id] = None
        if super().complete_delivery(packet_id):
            return True
        if is_known:
            self.released.pop(packet_id, None)
            self.credit += 1
        return is_known

    def _forget_resend(self, packet_id: int) -> None:
        """Do not resend a message that the client has just acknowledged.

        If only an earlier owner has sent it, one unit of the client's Receive Maximum is used for it.
        """
        if packet_id in self.in_flight:
            self._cancel_resend(packet_id)
        else:
            self.credit -= 1

    def _record_received(self, number: Number | None) -> None:
        """Record the number of a message that the client has, so that the message is not sent again.

        A session that ends with its connection records nothing.
        """
        if number is not None and self.has_queue:
            self.change().received.update(self._recent.add(number))

    @property
    def needs_queue(self) -> bool:
        """True unless the session has another owner, who may have deleted the queue."""
        return not self._stopped

    @property
    def keeps_order(self) -> bool:
        """True: a client gets the messages of a topic in order (MQTT 5: 4.6)."""
        return True

    @property
    def is_awaited(self) -> bool:
        """False: replies to the client do not wait for a consumer, only for the bindings in `unbound`."""
        return False

    def confirm(self, done: Callable[[bool], None]) -> None:
        """Call `done` with True if this replica still owns the session according to the database, else False.

        Called when the queue is missing: a notice of another owner may not have arrived yet.
        """
        self._engine.check_owner(self, done)

    @property
    def is_stopped(self) -> bool:
        """True after `stop`: this replica sends no more messages to the client."""
        return self._stopped

    def stop(self) -> None:
        """Send no more messages to the client, because another owner is about to get the queue."""
        self._stopped = True

    def requeue_shared(self) -> None:
        """Requeue messages of shared subscriptions that the lost client has not acknowledged."""
        for delivery in (*self._flight.values(), *self._deliveries.values()):
            if delivery.consumer.target is not self:
                delivery.requeue()

    def unreachable(self) -> None:
        """Disconnect the client, because the cluster node with its queue is down."""
        self._engine.disconnect_client(self, "the node with the session's queue is down")

    def refuse(self, why: str) -> None:
        """Disconnect the client, because the cluster refuses to declare its queue."""
        self._engine.disconnect_client(self, f"the cluster refuses the session's queue: {why}")

    def discarded(self) -> None:
        """Release what is cached for a session that has ended. LeaveSession deletes its stored contents."""
        self._grant = None


class SharedReceivedIds(ReceivedIds):
    """Packet ids of QoS 2 messages received from a client of a session that has a queue.

    Each id is stored in the database with the message's number before the message is published. So a next
    owner that receives the message again publishes it under the same number. A message whose id cannot be
    stored, because the session has another owner, must not be published here: `is_lost` is True from then on.
    """

    __slots__ = ("_engine", "_numbers", "_session", "_unstored", "is_lost")

    def __init__(self, engine: Engine, session: ClientSession, numbers: dict[int, Number]) -> None:
        super().__init__()
        self.is_lost = False
        self._unstored: dict[int, Number] = {}  # ids that the database has not confirmed
        self._engine = engine
        self._session = session
        self._numbers = dict(numbers)

    def number(self, packet_id: int) -> Number | None:
        """Return the number by which replicas recognize the message with this packet id, or None."""
        return self._numbers.get(packet_id)

    def announce(self, packet_ids: Iterable[int]) -> dict[int, Number]:
        """Have the packet ids of received messages stored. Return those not stored yet, with message numbers.

        The caller calls `record_stored` with the result when all changes of the session until now are stored.
        """
        for packet_id in packet_ids:
            if packet_id not in self._numbers:
                number = self._numbers[packet_id] = self._unstored[packet_id] = self._engine.next_number()
                self._session.change().packets[INCOMING, packet_id] = Packet(number)
        unstored = self._unstored
        return {packet_id: unstored[packet_id] for packet_id in packet_ids if packet_id in unstored}

    def record_stored(self, announced: dict[int, Number], outcome: Outcome) -> None:
        """Record that the ids in `announced` are stored, or that they cannot be (`outcome` is not ACCEPTED).

        `announced` is a result of `announce`; some of its ids may have been freed and reused since. They
        cannot be stored if the session has another owner.
        """
        if outcome is not ACCEPTED:
            self.is_lost = True
            return
        for packet_id, number in announced.items():
            if self._unstored.get(packet_id) == number:
                del self._unstored[packet_id]

    def forget(self, packet_id: int, *, refusal_sent: bool) -> None:
        """Forget a packet id whose message was not accepted.

        Unless a refusal was sent to the client (`refusal_sent`), the database keeps the id and its number: a
        part of the cluster may have the message, and replicas recognize by its number that it is repeated.
        """
        super().forget(packet_id, refusal_sent=refusal_sent)
        if refusal_sent:
            self._free(packet_id)

    def release(self, packet_id: int) -> bool:
        """Process PUBREL: remove a packet id in memory and in the database. Return True if it was known."""
        return super().release(packet_id) | self._free(packet_id)

    def _free(self, packet_id: int) -> bool:
        self._unstored.pop(packet_id, None)
        if self._numbers.pop(packet_id, None) is None:
            return False
        self._session.change().packets[INCOMING, packet_id] = None
        return True


def _settle(delivery: ClusterOrigin, outcome: Outcome) -> None:
    if outcome is ACCEPTED:
        delivery.settle()


def _do_nothing() -> None:
    """Do nothing: used as callback by bindings that need none."""

"""State of one AMQP 0-9-1 channel: consumers, unacknowledged deliveries, outstanding confirms, transaction.

A consumer receives messages from a queue within its credit. The channel remembers each delivery until it is
acknowledged, and collects confirms until the pass of the event loop ends. Methods are decoded and executed
elsewhere.

In a transaction, publishes and acknowledgements wait for tx.commit. A message is routed when it arrives, to
names of queues, as in RabbitMQ: later binds and unbinds make no difference, a queue deleted since then is
left out, and a new queue of the same name receives the message. The expiration counts from the commit.
Acknowledged deliveries leave the client's unacknowledged set at once, but are not settled. The commit puts
everything into the queues together; tx.commit-ok follows when every queue, and the disk, has it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from gateway import clock
from gateway.broker.amqp091.dead_letter_routing import copied_keys, own_properties, with_expiry
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import AmqpRefused, precondition_failed
from gateway.broker.amqp091.replies import ReplyTo
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.poison import UNREADABLE, outcome_of_error
from gateway.broker.queue import DISPATCH_MESSAGES_MAX, Queue
from gateway.broker.routing import RoutingEntry
from gateway.broker.scheduler import ScheduledCall
from gateway.errors import ProtocolError, RemoteProtocolError
from gateway.ingress.amqp091.admission import AmqpAdmissionSource, HandshakingAmqpClient
from gateway.ingress.amqp091.credit_queue import CreditQueue
from gateway.ingress.delivery_limit import Outstanding
from gateway.model.address import Address
from gateway.model.batch import Batch, Sink
from gateway.model.message import MESSAGE_BYTES, Message, weight_of
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.spooled_bodies import Spooled
from gateway.protocols.amqp091.codec import decode_properties, decode_publish
from gateway.protocols.amqp091.methods import BasicCancel, BasicPublish, BasicReturn, Method
from gateway.protocols.amqp091.sender import Deliverer, DeliverRow
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.translate import COPIES, encode_properties, essentials

# Approximate size in bytes of a delivery on the wire besides its body and properties, to notice congestion
# between flushes.
DELIVERY_OVERHEAD: Final = 96
# Difference in bytes between the size of a message in memory and on the wire.
SPARE: Final = MESSAGE_BYTES - DELIVERY_OVERHEAD
# Delay of a raised basic.qos(global) limit: many times what a client needs between basic.qos-ok and its
# next loop iteration.
RAISE_SECS: Final = 0.002


# Delivery that the client has to acknowledge: queue, consumer (None after basic.get), position, message. It
# is a plain tuple because one is created for every delivery, and a named tuple costs four times as much.
Unacknowledged = tuple[AmqpQueue, "AmqpConsumer | None", int, Message]
Touched = dict[Queue | CreditQueue, None]  # waiting lists and queues to dispatch after settling


Content = tuple[int, bytes, bytes, bytes]  # channel, method, properties, body


UNDELIVERABLE = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the properties do not fit the consumer's frame-max"
)


class PublishTarget:
    """Cached result of resolving an encoded basic.publish: its method and its routing entry."""

    __slots__ = ("entry", "mandatory", "method")

    def __init__(self, entry: RoutingEntry, method: BasicPublish) -> None:
        self.entry = entry
        self.method = method
        self.mandatory = method.mandatory


class AmqpSource(AmqpAdmissionSource):
    """Interface of an AMQP 0-9-1 listener to its channels; collects what its clients publish into batches."""

    @abstractmethod
    def publish_large(
        self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt | None
    ) -> bool:
        """Add to `batch` a message whose body may be too large for routes (limits.message_bytes_max).

        `receipt` is None if the client expects no confirm. Return False if neither a queue nor a route
        matches.
        """

    @abstractmethod
    def handle_unrouted(self, entry: RoutingEntry, message: Message, receipt: Receipt | None) -> None:
        """Process a message that no queue and no route matches.

        A mandatory message is sent back to the client; every message is confirmed if its channel requires it.
        Without `mandatory`, the message becomes a dead letter if its entry has no routes.
        """

    def undeliverable(self, message: Message, outcome: Outcome = UNDELIVERABLE) -> None:
        """Turn a message that cannot be encoded for its consumer into a dead letter.

        By default the reason is that its properties exceed the client's frame-max, or, for a body in the
        spool, that the body cannot be read.
        """
        if outcome is UNDELIVERABLE and isinstance(message.body, Spooled):
            outcome = UNREADABLE
        self.dead_letters.add([message], "", outcome)


class AmqpListenerClient(HandshakingAmqpClient):
    """Interface that the connection of an AMQP 0-9-1 client offers to its channels and to the listener."""

    host: VirtualHost
    endpoint: str
    unsettled: int
    outstanding: Outstanding
    line: CreditQueue
    channels: dict[int, AmqpChannel]
    confirming: dict[AmqpChannel, None]

    @property
    @abstractmethod
    def ingress(self) -> AmqpSource:
        """Protocol side of the client's listener, through which its channels publish."""

    @abstractmethod
    def check_key(self, permission: str, exchange: str, key: str | None) -> None:
        """Check `permission` (`write` or `read`) for a routing key of an exchange; None stands for all keys.

        Only topic exchanges have such permissions. Raises AmqpRefused 403.
        """

    @abstractmethod
    def renewed_entry(self, address: Address, copies: Sequence[str]) -> RoutingEntry:
        """Return the current routing entry of an address to which a transaction is to publish.

        `copies` are the routing keys in CC and BCC. Raises AmqpRefused 403 if the client may no longer
        publish to one of the keys, and Pending if the decision is pending.
        """

    @abstractmethod
    def report_outcome(self, receipt: Receipt, outcome: Outcome | None) -> None:
        """Report the result of the published message `receipt` to the client.

        It is a confirm, a return, or the result of the transaction. `outcome` None means accepted.
        """

    @abstractmethod
    def count_settled(self, count: int) -> None:
        """Subtract `count` publishes, whose outcomes were reported, from the unsettled ones."""

    @abstractmethod
    def refuse(
        self, number: int, error: RemoteProtocolError | AmqpRefused, method: type[Method] | Method
    ) -> None:
        """Close the channel `number` or the whole connection, depending on the code of `error`.

        `method` is the client's method that caused the error.
        """


class AmqpConsumer:
    """Consumer created by basic.consume: receives messages from one queue within its credit."""

    __slots__ = ("_channel", "_deliverer", "_properties", "no_ack", "outstanding", "prefetch", "queue", "tag")

    def __init__(
        self, channel: AmqpChannel, queue: AmqpQueue, tag: str, *, no_ack: bool, prefetch: int
    ) -> None:
        self.queue = queue
        self.tag = tag
        self.no_ack = no_ack
        self.prefetch = prefetch  # never 0: without basic.qos it is limits.prefetch_max
        self.outstanding = 0
        self._channel = channel
        self._deliverer = Deliverer(channel.connection.machine, channel.number, tag)
        self._properties: Callable[[Message, float], bytes] = encode_properties
        if queue.options.ttl_ms is not None or queue.options.quorum:
            self._properties = partial(own_properties, queue)

    @property
    def channel(self) -> AmqpChannel:
        """Channel that the consumer belongs to."""
        return self._channel

    def capacity(self) -> int:
        """Return the number of messages that the consumer accepts now.

        Return 0 and queue up for shared credit if the client's stream is congested, or if the channel or,
        unless `no_ack` is set, the connection has too many unacknowledged deliveries.
        """
        channel = self._channel
        connection = channel.connection
        if connection.stream.congested or (not self.no_ack and connection.outstanding.full):
            connection.line.join(self.queue)
            return 0
        if not channel.has_room():
            channel.line.join(self.queue)
            return 0
        if self.no_ack:
            return DISPATCH_MESSAGES_MAX
        room = self.prefetch - self.outstanding
        if channel.prefetch_all:
            room = min(room, channel.prefetch_all - channel.outstanding)
        return room

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Encode the messages as basic.deliver, and record them until they are acknowledged.

        `position` is the queue position of the first message, `redelivered` the flag of all messages.
        Messages that cannot be encoded become dead letters.
        """
        utc = clock.utc()
        properties = self._properties
        try:
            if self.queue.deliveries:
                rows = self._redelivered_rows(position, messages, redelivered, utc)
            else:
                rows = [(redelivered, m.address.wire, properties(m, utc), m.body) for m in messages]
        except Exception as error:
            self._deliver_singly(position, messages, redelivered, error)
        else:
            self._send_deliveries(position, messages, rows)

    def _redelivered_rows(
        self, position: int, messages: list[Message], redelivered: bool, utc: float
    ) -> list[DeliverRow]:
        """Encode deliveries of a quorum queue, with `x-delivery-count` for messages delivered before.

        `position` is the queue position of the first message, `utc` the present time in Unix seconds.
        """
        queue, deliveries = self.queue, self.queue.deliveries
        assert deliveries is not None
        return [
            (redelivered, m.address.wire, own_properties(queue, m, utc, deliveries.of(at) or None), m.body)
            for at, m in enumerate(messages, position)
        ]

    def _deliver_singly(
        self, position: int, messages: list[Message], redelivered: bool, error: Exception
    ) -> None:
        """Deliver messages one by one after the encoding error `error`.

        A single message that fails becomes a dead letter. `position` is the queue position of the first
        message.
        """
        if len(messages) > 1:
            for at, message in enumerate(messages, position):
                self.deliver(self.queue, at, [message], redelivered)
            return
        self.queue.acknowledged((position,))
        ingress = self._channel.connection.ingress
        ingress.undeliverable(messages[0], outcome_of_error(error, queue=self.queue.name))

    def _send_deliveries(self, position: int, messages: list[Message], rows: list[DeliverRow]) -> None:
        """Send encoded deliveries and record them as unacknowledged; with `no_ack`, settle them at once.

        `position` is the queue position of the first message, `rows` has the encoded messages. Messages that
        do not fit the client's frames are left to other consumers, or become dead letters in an exclusive
        queue.
        """
        channel = self._channel
        connection = channel.connection
        queue = self.queue
        first = channel.next_tag
        unsent = self._deliverer.deliver_many(first, rows)
        if (stopped := self._deliverer.stopped) is not None:
            messages, rows = self._hold_back(position, messages, rows, stopped)
        channel.next_tag = first + len(messages)
        aside: list[int] = []
        if unsent:
            if queue.owner is None:  # others may consume it
                aside = [tag for tag in unsent if not self._deliverer.fits(rows[tag - first][2])]
                unsent = [tag for tag in unsent if tag not in aside]
            for tag in unsent:
                connection.ingress.undeliverable(messages[tag - first])
        byte_count = weight_of(messages)
        begin = position
        if self.no_ack:
            positions = range(position, position + len(messages))
            remaining = [at for at in positions if at - position + first not in aside] if aside else positions
            queue.acknowledged(remaining)
        else:
            unacknowledged = channel.unacknowledged
            tag = first
            for message in messages:
                unacknowledged[tag] = (queue, self, position, message)
                tag += 1
                position += 1
            self.outstanding += len(messages)
            channel.outstanding += len(messages)
            connection.outstanding.byte_count += byte_count
        stream = connection.stream
        stream.queued += byte_count - SPARE * len(messages)
        stream.mark_for_flush()
        if unsent:
            channel.drop(unsent)
        for tag in aside:
            channel.set_aside(self, tag, begin + tag - first, messages[tag - first], rows[tag - first][0])
        connection.ingress.stats.messages_out += len(messages)

    def _hold_back(
        self, position: int, messages: list[Message], rows: list[DeliverRow], stopped: tuple[int, str]
    ) -> tuple[list[Message], list[DeliverRow]]:
        """Return unsent messages to the queue: the body of the first one cannot be read from disk now.

        The result has the messages that were sent, and their rows (encoded messages). `stopped` has the
        delivery tag of the first unsent message, and the reason.
        """
        self._deliverer.stopped = None
        tag, why = stopped
        count = tag - self._channel.next_tag
        gate = self._channel.connection.ingress.spool.delay_reads(why)
        self.queue.hold_back(list(enumerate(messages[count:], position + count)), gate)
        return messages[:count], rows[:count]

    def handle_error(self, error: Exception) -> None:
        """Close the connection because of this internal error, at the end of this event-loop pass."""
        self._channel.connection.stream.fail_later(error)

    def cancelled(self, queue: Queue) -> None:
        """Remove this consumer, because its queue was deleted.

        Send basic.cancel if the client has the capability `consumer_cancel_notify`.
        """
        channel = self._channel
        channel.consumers.pop(self.tag, None)
        connection = channel.connection
        if connection.hears_cancel:
            connection.machine.send_method(channel.number, BasicCancel(self.tag, True))
            connection.stream.mark_for_flush()


class AmqpChannel:
    """State of one AMQP 0-9-1 channel."""

    def __init__(self, connection: AmqpListenerClient, number: int, prefetch_max: int) -> None:
        self.connection = connection
        self.number = number
        self.closed = False  # what is decided later must not reach a new channel of the same number
        self.sender = connection.sender._replace(channel=number)
        self.prefetch = prefetch_max  # for the next consumer
        self.prefetch_all = 0  # basic.qos(global): for all consumers together; 0 is no limit
        self._raise: ScheduledCall | None = None  # for a larger limit that is to take effect
        self.outstanding = 0  # deliveries to consumers, without those of basic.get
        self.line = CreditQueue(self.has_room)
        self.next_tag = 1
        self.consumers: dict[str, AmqpConsumer] = {}
        self.unacknowledged: dict[int, Unacknowledged] = {}
        self.generated = ""  # name of a queue that is being declared without one
        self.last_queue = ""  # an empty queue name means the last one declared here
        self.requester: ReplyTo | None = None  # of direct replies
        self.requester_tag = ""
        self.transaction: Transaction | None = None
        self.confirming = False
        self.published = 0  # publishes since confirm.select
        self.unconfirmed: dict[int, None] = {}
        self.settled: list[int] = []

    # Deliveries.

    def has_room(self) -> bool:
        """Return True if the limit of basic.qos(global) permits another delivery."""
        return not self.prefetch_all or self.outstanding < self.prefetch_all

    def limit(self, prefetch: int) -> None:
        """Set the limit of basic.qos(global) to `prefetch` messages; 0 means no limit.

        A higher limit for which queues wait takes effect after RAISE_SECS seconds. Reason: some clients
        (Celery, for example) read until no bytes are left, run their timers, and sleep until more bytes
        arrive. They do not send the acknowledgements that these timers issue before they wake up, so both
        sides would wait. Deliveries sent directly after basic.qos-ok would be read before the timers run and
        would not wake the client.
        """
        if self._raise is not None:
            self._raise.cancel()
            self._raise = None
        more = self.prefetch_all and (not prefetch or prefetch > self.prefetch_all)
        if more and self.line:
            self._raise = self.connection.host.alarms.set(
                clock.utc() + RAISE_SECS, partial(self._limited, prefetch)
            )
        else:
            self._limited(prefetch)

    def _limited(self, prefetch: int) -> None:
        """Apply the limit `prefetch` of basic.qos(global), and dispatch the queues that wait for credit."""
        self._raise = None
        self.prefetch_all = prefetch
        self.line.dispatch()

    def acknowledge_each(self, tags: Sequence[int], touched: Touched) -> int | None:
        """Settle deliveries one by one, up to the first tag that is unknown.

        Return that tag, or None if all tags are known. Add the queues to dispatch to `touched`.
        """
        unknown = None
        deliveries: list[Unacknowledged] = []
        pop = self.unacknowledged.pop
        for tag in tags:
            found = pop(tag, None)
            if found is None:
                unknown = tag
                break
            deliveries.append(found)
        self.settle(deliveries, None, touched)
        return unknown

    def acknowledge(self, tag: int, multiple: bool, touched: Touched) -> bool:
        """Acknowledge the delivery `tag` or, with `multiple`, all deliveries up to it (0: all).

        Return False if the tag is unknown. In a transaction, the commit settles the deliveries. Adds the
        queues to dispatch to `touched`.
        """
        if self.transaction is not None:
            return self.transaction.settle(tag, multiple, None)
        if not multiple:
            return self.acknowledge_each((tag,), touched) is None
        if tag and tag not in self.unacknowledged:
            return False
        self.settle([one for _, one in self.pop_tagged(tag, True)], None, touched)
        return True

    def reject(self, tag: int, multiple: bool, *, requeue: bool) -> bool:
        """Reject the delivery `tag` or, with `multiple`, all deliveries up to it (0: all).

        Return False if the tag is unknown. `requeue` False drops the messages or dead-letters them, as their
        queue is configured. In a transaction, the commit rejects the deliveries.
        """
        if multiple and tag and tag not in self.unacknowledged:
            return False
        if self.transaction is not None:
            return self.transaction.settle(tag, multiple, requeue)
        deliveries = self.pop_tagged(tag, multiple)
        touched: Touched = {}
        self.settle([one for _, one in deliveries], requeue, touched)
        for one in touched:
            one.dispatch()
        return bool(deliveries) or (multiple and tag == 0)

    def pop_tagged(self, tag: int, multiple: bool) -> list[tuple[int, Unacknowledged]]:
        """Remove the unacknowledged delivery `tag` or, with `multiple`, all deliveries up to it (0: all).

        Return them with their tags, in order of delivery. The result is empty if the tag is unknown.
        """
        unacknowledged = self.unacknowledged
        if not multiple:
            found = unacknowledged.pop(tag, None)
            deliveries = [] if found is None else [(tag, found)]
        elif tag == 0:
            deliveries = list(unacknowledged.items())
            unacknowledged.clear()
        else:
            tags = []
            for candidate in unacknowledged:  # in order of delivery
                if candidate > tag:
                    break
                tags.append(candidate)
            deliveries = [(candidate, unacknowledged.pop(candidate)) for candidate in tags]
        return deliveries

    def restore_unacknowledged(self, deliveries: list[tuple[int, Unacknowledged]]) -> None:
        """Make deliveries that `pop_tagged` removed unacknowledged again."""
        self.unacknowledged = dict(sorted((*self.unacknowledged.items(), *deliveries)))

    def settle(self, deliveries: Sequence[Unacknowledged], requeue: bool | None, touched: Touched) -> None:
        """Settle deliveries that `pop_tagged` removed: acknowledge, requeue or reject them in their queues.

        `requeue` None acknowledges, True requeues and False rejects. Add to `touched` the objects on which
        the caller has to call `dispatch` afterwards: first the lists of queues that wait for shared credit,
        then the queues.
        """
        byte_count = 0
        for line in (self.connection.line, self.line):
            if line:
                touched[line] = None
        for queue, consumer, position, message in deliveries:
            byte_count += message.byte_count
            if consumer is not None:
                consumer.outstanding -= 1
                self.outstanding -= 1
            if requeue is None or queue.deleted:
                queue.unacknowledged -= 1
                if queue.removed_positions is not None:
                    queue.removed_positions.append(position)
            elif requeue:
                queue.requeue([(position, message)])
            else:
                queue.reject(position, message)
            touched[queue] = None
        self.connection.outstanding.subtract(byte_count)

    def drop(self, tags: list[int]) -> None:
        """Settle the deliveries `tags`, whose properties exceed the client's frame-max.

        Must be called while their queue delivers messages: the queue then notices the freed credit itself.
        """
        for tag in tags:
            self.settle([one for _, one in self.pop_tagged(tag, False)], None, {})

    def set_aside(
        self, consumer: AmqpConsumer, tag: int, position: int, message: Message, redelivered: bool
    ) -> None:
        """Leave a delivery to other consumers of its queue: its properties exceed the client's frame-max.

        `tag` is its delivery tag, `position` its position in the queue.
        """
        if self.unacknowledged.pop(tag, None) is not None:
            consumer.outstanding -= 1
            self.outstanding -= 1
            self.connection.outstanding.subtract(message.byte_count)
        consumer.queue.set_aside(consumer, position, message, redelivered)
        self.connection.ingress.log_oversized(self.connection.sender, consumer.queue.name)

    def recover(self) -> None:
        """Requeue all unacknowledged deliveries, except those that an open transaction has settled."""
        touched: Touched = {}
        self.settle([one for _, one in self.pop_tagged(0, True)], True, touched)
        for one in touched:
            one.dispatch()

    def request(self, tag: str) -> None:
        """Start to consume direct replies (`amq.rabbitmq.reply-to`) with the consumer tag `tag`."""
        deliverer = Deliverer(self.connection.machine, self.number, tag)

        def deliver(messages: list[Message]) -> None:
            sound, rows = self._replies(messages)
            first, ingress = self.next_tag, self.connection.ingress
            unsent = deliverer.deliver_many(first, rows)
            if deliverer.stopped is not None:
                (tag, why), deliverer.stopped = deliverer.stopped, None
                ingress.spool.delay_reads(why).wait(partial(deliver, sound[tag - first :]))
                sound = sound[: tag - first]
            for tag in unsent:
                ingress.undeliverable(sound[tag - first])
            self.next_tag += len(sound)
            self.connection.stream.queued += weight_of(sound) - SPARE * len(sound)
            self.connection.stream.mark_for_flush()
            ingress.stats.messages_out += len(sound)

        self.requester = self.connection.host.replies.add(deliver)
        self.requester_tag = tag

    def _replies(self, messages: list[Message]) -> tuple[list[Message], list[DeliverRow]]:
        """Encode direct replies. Return the messages that can be encoded, and their encoded deliveries.

        The others become dead letters.
        """
        utc = clock.utc()
        sound: list[Message] = []
        rows: list[DeliverRow] = []
        for message in messages:
            try:
                rows.append((False, message.address.wire, encode_properties(message, utc), message.body))
                sound.append(message)
            except Exception as error:
                self.connection.ingress.undeliverable(message, outcome_of_error(error))
        return sound, rows

    def request_no_more(self) -> None:
        """Stop consuming direct replies."""
        if self.requester is not None:
            self.connection.host.replies.remove(self.requester)
            self.requester = None

    def close(self) -> None:
        """Remove consumers, requeue deliveries and roll back the transaction, because the channel is closed.

        A running commit completes without a response. Publishes without an outcome get no confirm any more.
        """
        self.closed = True
        self.unconfirmed.clear()
        self.settled.clear()
        self.request_no_more()
        if self._raise is not None:
            self._raise.cancel()
        if self.transaction is not None:
            self.transaction.rollback()
        consumers = list(self.consumers.values())
        self.consumers.clear()
        for consumer in consumers:
            consumer.queue.remove(consumer, requeues=True)
        self.recover()
        for consumer in consumers:
            if not consumer.queue.deleted:
                consumer.queue.dispatch()  # messages that it set aside are free for others
            self.connection.host.delete_if_unused(consumer.queue)

    # Returns and confirms.

    def send_back(self, content: Content) -> None:
        """Send basic.return with a mandatory message that was not routed; the caller then confirms it.

        Close the channel if the body cannot be read from disk. Do nothing on a closed channel.
        """
        if self.closed:
            return
        number, data, raw, body = content
        method = decode_publish(data)
        connection = self.connection
        returned = BasicReturn(ReplyCode.NO_ROUTE, "NO_ROUTE", method.exchange, method.routing_key)
        try:
            connection.machine.send_content(number, returned, raw, body)
        except OSError as error:
            connection.refuse(
                number, precondition_failed(f"the spool cannot be read: {error.strerror}"), BasicPublish
            )
        else:
            connection.stream.queued += len(body)
        connection.stream.mark_for_flush()

    def expect_confirm(self) -> int:
        """Return the number of the next publish, and record that it has to be confirmed."""
        self.published += 1
        self.unconfirmed[self.published] = None
        return self.published

    def confirmed(self, number: int) -> None:
        """Queue the basic.ack of publish `number`, which is sent with others at the end of this pass.

        AmqpIngress.settle contains a copy of this code for speed.
        """
        self.connection.confirming[self] = None
        if self.unconfirmed.pop(number, self) is None:
            self.settled.append(number)

    def send_nack(self, number: int) -> None:
        """Send basic.nack for the refused publish `number`."""
        if self.unconfirmed.pop(number, self) is None:
            self.connection.machine.nack(self.number, number)

    def flush_confirms(self) -> None:
        """Send the collected confirms to the publisher.

        One ack with `multiple` confirms all publishes below the first unconfirmed one. Each publish above
        that gets an ack of its own.
        """
        settled = self.settled
        if not settled:
            return
        self.settled = []
        if not self.unconfirmed:
            self.connection.machine.ack(self.number, max(settled), len(settled) > 1)
            return
        first_open = next(iter(self.unconfirmed), self.published + 1)
        below = [number for number in settled if number < first_open]
        ack = self.connection.machine.ack
        if below:
            ack(self.number, max(below), len(below) > 1)
        if len(below) < len(settled):
            for number in settled:
                if number > first_open:
                    ack(self.number, number)


IN_TRANSACTION = -1  # replaces the confirm number in the receipts of a transaction


# Deliveries with their tags, and True to requeue them, False to reject them, None to acknowledge them.
Settlement = tuple[list[tuple[int, Unacknowledged]], bool | None]
PendingPublish = tuple[RoutingEntry, Message, Content | None]  # for the commit
"""Publish that waits for the commit: its routing entry, the message, and the content if it is mandatory."""


class FixedQueuesNamespace:
    """Namespace for one message whose queues were determined earlier: it routes to these queues only."""

    def __init__(self, host: VirtualHost, sinks: Iterable[Sink]) -> None:
        self._host = host
        self._sinks = tuple(sinks)

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """Return None: the receiving queues depend on the message, and not only on its address."""
        return None

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the queues that were determined earlier, as far as they exist.

        Each is looked up by its name, so a new queue of the same name is included.
        """
        queues = self._host.queues
        found = (queues.get(one.name) if isinstance(one, AmqpQueue) else one for one in self._sinks)
        return tuple(one for one in found if one is not None)

    @property
    def retained(self) -> None:
        """Receiver of retained messages: None, because AMQP has none."""


def _is_default_exchange(entry: RoutingEntry) -> bool:
    """Return True if the entry is of the default exchange, whose keys are queue names."""
    return not entry.address.scope


PublishedTo = tuple[Address, tuple[str, ...]]
"""Address of a message, and its further routing keys."""


def _published_to(message: Message) -> PublishedTo:
    """Return the address to which a message was published, and the routing keys in its CC and BCC headers."""
    if not essentials(message.property_set).special:
        return message.address, ()
    headers = decode_properties(message.property_set.raw).headers
    return message.address, tuple([key for name in COPIES for key in copied_keys(headers, name)])


class Transaction:
    """Publishes and settlements of one channel since its last commit or rollback.

    A commit is all or nothing. Deliveries are settled when all publishes are accepted. Their acknowledgements
    are written in the same disk transaction as the messages if all messages are stored on this machine, and
    otherwise after them. If a publish is refused (because the disk is full, for example), nothing is
    acknowledged, and the deliveries return to their queues when the channel closes.
    """

    def __init__(self, channel: AmqpChannel) -> None:
        self._channel = channel
        self._publishes: list[PendingPublish] = []
        self._generation = 0  # of the dispatcher, when the first publish was routed
        self.byte_count = 0  # of the publishes, without bodies on disk
        self.is_restrained = False  # True while the user exceeds its part of the memory
        self._settlements: list[Settlement] = []
        self._committing: list[Settlement] = []  # those of a commit that waits for its publishes
        self._open = 0  # parts of a commit without an outcome
        self._failed = False
        self._then: Callable[[bool], None] | None = None

    @property
    def targets(self) -> set[PublishedTo]:
        """Addresses to which the commit will publish, each with the routing keys in CC and BCC."""
        return {_published_to(message) for _, message, _ in self._publishes}

    def publish(self, entry: RoutingEntry, message: Message, content: Content | None) -> tuple[int, int]:
        """Add a message to the commit. Return the number and the total bytes of all messages added so far.

        `content` is the message as received, or None if it need not be returned to the client. Raises
        RemoteProtocolError if the routing depends on the message's headers and these are malformed.
        """
        if not self._publishes:
            self._generation = self._channel.connection.ingress.dispatcher.generation
        if entry.plan.recipients is None and not _is_default_exchange(entry):
            entry = self._routed(entry, message)
        self._publishes.append((entry, message, content))
        self.byte_count += message.byte_count - len(message.body) * isinstance(message.body, Spooled)
        return len(self._publishes), self.byte_count

    def restrain(self, on: bool) -> None:
        """Forbid further publishes in this transaction (`on` True), or allow them again.

        A publish that arrives while they are forbidden closes the channel.
        """
        self.is_restrained = on

    def settle(self, tag: int, multiple: bool, requeue: bool | None) -> bool:
        """Store a settlement for the commit: acknowledge (`requeue` None), requeue (True) or reject (False).

        It applies to the delivery `tag` or, with `multiple`, to all deliveries up to it. Return False if the
        tag is unknown.
        """
        deliveries = self._channel.pop_tagged(tag, multiple)
        if deliveries:
            self._settlements.append((deliveries, requeue))
        return bool(deliveries) or (multiple and tag == 0)

    def rollback(self) -> None:
        """Discard all publishes, and make the settled deliveries unacknowledged again."""
        self._publishes.clear()
        self.byte_count = 0
        settlements, self._settlements = self._settlements, []
        self._channel.restore_unacknowledged([one for taken, _ in settlements for one in taken])

    def commit(self, then: Callable[[bool], None]) -> None:
        """Apply everything or nothing. Call `then` with True if everything was applied, otherwise with False.

        The call is made at once or later, also if the channel has been closed meanwhile. Nothing is applied
        if one of the messages may not be published any more. Raises Pending, with the transaction unchanged,
        if the decision about that is pending.
        """
        ingress = self._channel.connection.ingress
        renewed: list[PendingPublish] | None = self._publishes
        if self._generation != ingress.dispatcher.generation:
            renewed = self._renew_all()
        self._publishes = []
        self._committing, self._settlements = self._settlements, []
        self.byte_count = 0
        self._then = then
        self._failed = False
        if renewed is None or (not ingress.disk_healthy() and self._must_be_whole(renewed)):
            self._failed = True
            self._finish()
            return
        self._open = len(renewed) + 1
        self._channel.connection.unsettled += len(renewed)
        batch = ingress.begun_batch()
        first = len(batch)
        utc = clock.utc()
        here, postponed = True, ingress.dispatcher.postponed_count()
        for entry, message, content in renewed:
            expiration = essentials(message.property_set).expiration_ms
            if expiration is not None:
                message = with_expiry(message, utc + expiration / 1000)
            receipt = (self._channel, IN_TRANSACTION, content)
            large = len(message.body) > ingress.limits.message_bytes_max
            publish = ingress.publish_large if large else ingress.dispatcher.publish
            here = here and ingress.delivers_locally(entry)
            if not publish(batch, entry, message, receipt):
                ingress.handle_unrouted(entry, message, receipt)
        ingress.end_turn()
        is_refused = self._failed or any(slot >= first for slot in batch.unaccepted_slots)
        if here and not is_refused and ingress.dispatcher.postponed_count() == postponed:
            self._acknowledge_beside()
        self.record_outcome(True)

    def _must_be_whole(self, publishes: list[PendingPublish]) -> bool:
        """Return True if the commit must be atomic on disk.

        That is so if it has a durable message, and at least one other message or settlement.
        """
        lasting = any(message.durable for _, message, _ in publishes)
        return lasting and (len(publishes) > 1 or bool(self._committing))

    def _acknowledge_beside(self) -> None:
        """Write the transaction's acknowledgements to disk in the same write as its messages."""
        for deliveries, requeue in self._committing:
            if requeue is None:
                for _, (queue, _, position, _) in deliveries:
                    if queue.storage is not None and not queue.deleted:
                        queue.storage.forget_beside((position,))

    def _routed(self, entry: RoutingEntry, message: Message) -> RoutingEntry:
        """Return the entry with the queues that match the message now, so that later bindings do not matter.

        Used for messages whose routing depends on their content, such as headers. Raises ProtocolError for
        malformed content.
        """
        namespace = entry.plan.namespace
        assert namespace is not None
        try:
            sinks = namespace.choose(message)
        except ProtocolError:
            raise
        except Exception:  # the commit fails in the same way, and dead-letters the message
            return entry
        return entry.with_namespace(FixedQueuesNamespace(self._channel.connection.host, sinks))

    def _renewed(self, entry: RoutingEntry, fresh: RoutingEntry) -> RoutingEntry:
        """Return the present routing entry (`fresh`) of an address, with the queues of the earlier `entry`.

        For the default exchange, `fresh` is returned unchanged.
        """
        found, recipients = entry.plan.namespace, entry.plan.recipients
        if recipients is not None and _is_default_exchange(entry):
            return fresh
        if recipients is not None:
            found = FixedQueuesNamespace(
                self._channel.connection.host, (recipient.sink for recipient in recipients)
            )
        return fresh.with_namespace(found)

    def _renew_all(self) -> list[PendingPublish] | None:
        """Return the publishes with their current routing entries.

        Return None if one may not be published any more, which is logged as denied. Raises Pending.
        """
        try:
            fresh = {target: self._channel.connection.renewed_entry(*target) for target in self.targets}
        except AmqpRefused:
            return None
        return [
            (self._renewed(entry, fresh[_published_to(message)]), message, content)
            for entry, message, content in self._publishes
        ]

    def record_outcome(self, accepted: bool) -> None:
        """Record one of the outcomes that the commit waits for, and finish the commit after the last one.

        If one of the outcomes is not `accepted`, the commit fails.
        """
        self._failed |= not accepted
        self._open -= 1
        if not self._open:
            self._finish()

    def _finish(self) -> None:
        """End the commit when all messages that it published have outcomes, and report its result.

        The acknowledgements of the transaction take effect now. If a publish was refused, the deliveries
        become unacknowledged again, or are requeued if the channel is closed.
        """
        settlements, self._committing = self._committing, []
        if self._failed and not self._channel.closed:
            self._channel.restore_unacknowledged([one for deliveries, _ in settlements for one in deliveries])
            self._answer(False)
            return
        touched: Touched = {}
        for deliveries, requeue in settlements:
            self._channel.settle([one for _, one in deliveries], self._failed or requeue, touched)
        for one in touched:
            one.dispatch()
        store = self._channel.connection.ingress.store
        if touched and store is not None:
            # The outcome is ignored: settling frees disk space, so it is written once there is some.
            store.after_commit(lambda outcome: self._answer(True))
        else:
            self._answer(not self._failed)

    def _answer(self, whole: bool) -> None:
        """Call the callback of `commit` once; `whole` is True if everything was applied."""
        then, self._then = self._then, None
        if then is not None:
            then(whole)


# Channel, confirm number (0: none), and the content if the message is mandatory.
Receipt = tuple[AmqpChannel, int, "Content | None"]

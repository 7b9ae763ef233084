"""One AMQP channel: its consumers, what they have not acknowledged, what its publisher has not been told, and
its transaction: publishes and acknowledgements that wait for tx.commit.

In a transaction what is published was routed when it came, to the names of queues, as RabbitMQ does it: what
has been bound or unbound since makes no difference, but a queue that was deleted is not there, and one that
has its name now is. A message lives from the commit on. What is acknowledged is out of the client's hands at
once, but not settled. At the commit all of it goes into the queues together, and the client is told when
every queue, and the disk, has it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from gateway import clock
from gateway.broker.alarms import Alarm
from gateway.broker.amqp091.dead_lettering import living, own_properties
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import Refused, failed
from gateway.broker.amqp091.replies import ReplyTo
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.poison import poisoned
from gateway.broker.queue import DISPATCH_MESSAGES_MAX, Queue
from gateway.broker.routing import RoutingEntry
from gateway.errors import ProtocolError, RemoteProtocolError
from gateway.ingress.amqp091.admission import AmqpEntrance, AmqpNewcomer
from gateway.ingress.amqp091.line import Line
from gateway.ingress.outstanding import Outstanding
from gateway.ingress.source import RouteRefused
from gateway.model.address import Address
from gateway.model.batch import Batch, Sink
from gateway.model.message import MESSAGE_OCTETS, Message, weight_of
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.spooled import Spooled
from gateway.protocols.amqp091.codec import decode_publish
from gateway.protocols.amqp091.methods import BasicCancel, BasicPublish, BasicReturn, Method
from gateway.protocols.amqp091.sending import Deliverer, DeliverRow
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.translate import encode_properties, essentials

# What a delivery costs on the wire besides its body and properties, about; for noticing congestion between
# flushes. A message weighs so much more, where it is held.
DELIVERY_OVERHEAD: Final = 96
SPARE: Final = MESSAGE_OCTETS - DELIVERY_OVERHEAD
RAISE_SECS: Final = 0.002  # many times what a client needs between basic.qos-ok and its next turn


# A delivery that the client has to acknowledge: queue, consumer (None after basic.get), position, message. A
# plain tuple, for one is made for every delivery and a named one costs four times as much.
Unacknowledged = tuple[AmqpQueue, "AmqpConsumer | None", int, Message]
Touched = dict[Queue | Line, None]  # what has to dispatch when something was settled, in this order


Content = tuple[int, bytes, bytes, bytes]  # channel, method, properties, body


UNDELIVERABLE = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the properties do not fit the consumer's frame-max"
)
UNREADABLE = Outcome(Verdict.REJECTED, Reason.STORE, "its body should be on disk, and cannot be read")


class PublishTarget:
    """What was found out about the octets of a basic.publish."""

    __slots__ = ("entry", "mandatory", "method")

    def __init__(self, entry: RoutingEntry, method: BasicPublish) -> None:
        self.entry = entry
        self.method = method
        self.mandatory = method.mandatory


class AmqpSource(AmqpEntrance):
    """The source of the batches of one listener, as its channels know it."""

    @abstractmethod
    def publish_large(
        self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt | None
    ) -> bool:
        """`publish` of a message that may be too large for routes."""

    @abstractmethod
    def unclaimed(self, entry: RoutingEntry, message: Message, receipt: Receipt | None) -> None:
        """No queue and no route takes the message."""

    def undeliverable(self, message: Message, outcome: Outcome = UNDELIVERABLE) -> None:
        """A delivery that cannot be said; by default its properties are larger than the client's frames."""
        if outcome is UNDELIVERABLE and isinstance(message.body, Spooled):
            outcome = UNREADABLE
        self.dead_letters.add([message], "", outcome)


class AmqpGuest(AmqpNewcomer):
    """A client's connection, as its channels and the source of its listener know it."""

    host: VirtualHost
    endpoint: str
    unsettled: int
    outstanding: Outstanding
    line: Line
    channels: dict[int, AmqpChannel]
    confirming: dict[AmqpChannel, None]

    @property
    @abstractmethod
    def ingress(self) -> AmqpSource:
        """The source of its listener."""

    @abstractmethod
    def check_key(self, permission: str, exchange: str, key: str | None) -> None:
        """Check a right on a routing key of an exchange; None stands for every key. Only topic exchanges
        have such rights."""

    @abstractmethod
    def settled(self, receipt: Receipt, outcome: Outcome | None) -> None:
        """A message has been settled; `outcome` is None when it was accepted."""

    @abstractmethod
    def answered(self, count: int) -> None:
        """Publishes have been settled, and their channels told."""

    @abstractmethod
    def refuse(
        self, number: int, error: RemoteProtocolError | Refused, method: type[Method] | Method
    ) -> None:
        """Close the channel or the connection, as the code asks; `method` is the one at fault."""


class AmqpConsumer:
    """A basic.consume: takes messages out of a queue as far as its credit goes."""

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
        """On which it consumes."""
        return self._channel

    def room(self) -> int:
        """Credit left; 0 while the client does not read, or its channel has no credit, be there need of any
        or not.
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
        """Encode the deliveries, and remember them until they are acknowledged."""
        utc = clock.utc()
        properties = self._properties
        try:
            if self.queue.deliveries:
                rows = self._rows_that_came_back(position, messages, redelivered, utc)
            else:
                rows = [(redelivered, m.address.wire, properties(m, utc), m.body) for m in messages]
        except Exception as error:
            self._deliver_singly(position, messages, redelivered, error)
        else:
            self._say(position, messages, rows)

    def _rows_that_came_back(
        self, position: int, messages: list[Message], redelivered: bool, utc: float
    ) -> list[DeliverRow]:
        """Messages of a quorum queue, some of which may have been there before: they say how often."""
        queue, deliveries = self.queue, self.queue.deliveries
        assert deliveries is not None
        return [
            (redelivered, m.address.wire, own_properties(queue, m, utc, deliveries.of(at) or None), m.body)
            for at, m in enumerate(messages, position)
        ]

    def _deliver_singly(
        self, position: int, messages: list[Message], redelivered: bool, error: Exception
    ) -> None:
        """Some of the messages cannot be encoded; the one that is left alone with its error is done with."""
        if len(messages) > 1:
            for at, message in enumerate(messages, position):
                self.deliver(self.queue, at, [message], redelivered)
            return
        self.queue.acknowledged((position,))
        ingress = self._channel.connection.ingress
        ingress.undeliverable(messages[0], poisoned(error, queue=self.queue.name))

    def _say(self, position: int, messages: list[Message], rows: list[DeliverRow]) -> None:
        channel = self._channel
        connection = channel.connection
        queue = self.queue
        first = channel.next_tag
        unsent = self._deliverer.deliver_many(first, rows)
        channel.next_tag = first + len(messages)
        aside: list[int] = []
        if unsent:
            if queue.owner is None:  # others may consume it
                aside = [tag for tag in unsent if not self._deliverer.fits(rows[tag - first][2])]
                unsent = [tag for tag in unsent if tag not in aside]
            for tag in unsent:
                connection.ingress.undeliverable(messages[tag - first])
        octets = weight_of(messages)
        begin = position
        if self.no_ack:
            positions = range(position, position + len(messages))
            left = [at for at in positions if at - position + first not in aside] if aside else positions
            queue.acknowledged(left)
        else:
            unacknowledged = channel.unacknowledged
            tag = first
            for message in messages:
                unacknowledged[tag] = (queue, self, position, message)
                tag += 1
                position += 1
            self.outstanding += len(messages)
            channel.outstanding += len(messages)
            connection.outstanding.octets += octets
        stream = connection.stream
        stream.queued += octets - SPARE * len(messages)
        stream.mark()
        if unsent:
            channel.drop(unsent)
        for tag in aside:
            channel.set_aside(self, tag, begin + tag - first, messages[tag - first], rows[tag - first][0])
        connection.ingress.stats.messages_out += len(messages)

    def failed(self, error: Exception) -> None:
        """That costs the connection, when the wake-up ends."""
        self._channel.connection.stream.doom(error)

    def cancelled(self, queue: Queue) -> None:
        """The queue was deleted: tell the client, if it understands (`consumer_cancel_notify`)."""
        channel = self._channel
        channel.consumers.pop(self.tag, None)
        connection = channel.connection
        if connection.hears_cancel:
            connection.machine.send_method(channel.number, BasicCancel(self.tag, True))
            connection.stream.mark()


class AmqpChannel:
    """One channel's state."""

    def __init__(self, connection: AmqpGuest, number: int, prefetch_max: int) -> None:
        self.connection = connection
        self.number = number
        self.sender = connection.sender._replace(channel=number)
        self.prefetch = prefetch_max  # for the next consumer
        self.prefetch_all = 0  # basic.qos(global): over all consumers; 0 is no limit
        self._raise: Alarm | None = None  # when a larger one takes effect
        self.outstanding = 0  # deliveries to consumers; what was got does not count
        self.line = Line(self.has_room)
        self.next_tag = 1
        self.consumers: dict[str, AmqpConsumer] = {}
        self.unacknowledged: dict[int, Unacknowledged] = {}
        self.generated = ""  # the name of a queue that is being declared without one
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
        """Whether basic.qos(global) leaves any credit."""
        return not self.prefetch_all or self.outstanding < self.prefetch_all

    def limit(self, prefetch: int) -> None:
        """basic.qos(global). More credit than before, if messages wait for it, takes effect in a moment. A
        client whose loop reads until nothing is there, calls its timers and sleeps until octets come (so
        does Celery's) keeps what those timers settle until it wakes: it waits for us and we for
        it. What came at the heels of basic.qos-ok would be read before that, and not wake it.
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
        self._raise = None
        self.prefetch_all = prefetch
        self.line.dispatch()

    def acknowledge_each(self, tags: Sequence[int], touched: Touched) -> int | None:
        """Settle deliveries one by one; returns the first tag that is unknown, behind which it stops."""
        unknown = None
        taken: list[Unacknowledged] = []
        pop = self.unacknowledged.pop
        for tag in tags:
            found = pop(tag, None)
            if found is None:
                unknown = tag
                break
            taken.append(found)
        self.settle(taken, None, touched)
        return unknown

    def acknowledge(self, tag: int, multiple: bool, touched: Touched) -> bool:
        """Settle one delivery, or all up to `tag` (0: all). False: the tag is unknown."""
        if self.transaction is not None:
            return self.transaction.settle(tag, multiple, None)
        if not multiple:
            return self.acknowledge_each((tag,), touched) is None
        if tag and tag not in self.unacknowledged:
            return False
        self.settle([one for _, one in self.tagged(tag, True)], None, touched)
        return True

    def give_back(self, tag: int, multiple: bool, *, requeue: bool) -> bool:
        """Reject one delivery, or all up to `tag` (0: all). False: the tag is unknown."""
        if multiple and tag and tag not in self.unacknowledged:
            return False
        if self.transaction is not None:
            return self.transaction.settle(tag, multiple, requeue)
        taken = self.tagged(tag, multiple)
        touched: Touched = {}
        self.settle([one for _, one in taken], requeue, touched)
        for one in touched:
            one.dispatch()
        return bool(taken) or (multiple and tag == 0)

    def tagged(self, tag: int, multiple: bool) -> list[tuple[int, Unacknowledged]]:
        """Take one delivery out of the client's hands, or all up to `tag` (0: all), in order, with their
        tags. Empty: the tag is unknown.
        """
        unacknowledged = self.unacknowledged
        if not multiple:
            found = unacknowledged.pop(tag, None)
            taken = [] if found is None else [(tag, found)]
        elif tag == 0:
            taken = list(unacknowledged.items())
            unacknowledged.clear()
        else:
            tags = []
            for candidate in unacknowledged:  # in order of delivery
                if candidate > tag:
                    break
                tags.append(candidate)
            taken = [(candidate, unacknowledged.pop(candidate)) for candidate in tags]
        return taken

    def untake(self, taken: list[tuple[int, Unacknowledged]]) -> None:
        """What was taken is in the client's hands again."""
        self.unacknowledged = dict(sorted((*self.unacknowledged.items(), *taken)))

    def settle(self, taken: Sequence[Unacknowledged], requeue: bool | None, touched: Touched) -> None:
        """Tell the queues of deliveries that were taken: acknowledged (None), returned, or not wanted.

        `touched` gets whoever has to dispatch then: first those that wait for credit that they share.
        """
        octets = 0
        for line in (self.connection.line, self.line):
            if line:
                touched[line] = None
        for queue, consumer, position, message in taken:
            octets += message.octets
            if consumer is not None:
                consumer.outstanding -= 1
                self.outstanding -= 1
            if requeue is None or queue.deleted:
                queue.unacknowledged -= 1
                if queue.gone is not None:
                    queue.gone.append(position)
            elif requeue:
                queue.requeue([(position, message)])
            else:
                queue.reject(position, message)
            touched[queue] = None
        self.connection.outstanding.settled(octets)

    def drop(self, tags: list[int]) -> None:
        """Deliveries whose properties do not fit a frame that the client takes: they can never be sent. Their
        queue dispatches still, so their credit need not be told of.
        """
        for tag in tags:
            self.settle([one for _, one in self.tagged(tag, False)], None, {})

    def set_aside(
        self, consumer: AmqpConsumer, tag: int, position: int, message: Message, redelivered: bool
    ) -> None:
        """Leave a delivery to others: its properties do not fit a frame that the client takes."""
        if self.unacknowledged.pop(tag, None) is not None:
            consumer.outstanding -= 1
            self.outstanding -= 1
            self.connection.outstanding.settled(message.octets)
        consumer.queue.set_aside(consumer, position, message, redelivered)
        self.connection.ingress.passed_over(self.connection.sender, consumer.queue.name)

    def recover(self) -> None:
        """Return all deliveries that are the client's; those settled within a transaction are not."""
        touched: Touched = {}
        self.settle([one for _, one in self.tagged(0, True)], True, touched)
        for one in touched:
            one.dispatch()

    def request(self, tag: str) -> None:
        """The channel consumes direct replies from now on."""
        deliverer = Deliverer(self.connection.machine, self.number, tag)

        def deliver(messages: list[Message]) -> None:
            rows = self._replies(messages)
            deliverer.deliver_many(self.next_tag, rows)
            self.next_tag += len(rows)
            self.connection.stream.queued += weight_of(messages) - SPARE * len(messages)
            self.connection.stream.mark()
            self.connection.ingress.stats.messages_out += len(messages)

        self.requester = self.connection.host.replies.add(deliver)
        self.requester_tag = tag

    def _replies(self, messages: list[Message]) -> list[DeliverRow]:
        """Direct replies, but for those that cannot be encoded."""
        utc = clock.utc()
        rows: list[DeliverRow] = []
        for message in messages:
            try:
                rows.append((False, message.address.wire, encode_properties(message, utc), message.body))
            except Exception as error:
                self.connection.ingress.undeliverable(message, poisoned(error))
        return rows

    def request_no_more(self) -> None:
        """Direct replies to the channel are delivered to nobody."""
        if self.requester is not None:
            self.connection.host.replies.remove(self.requester)
            self.requester = None

    def close(self) -> None:
        """The channel is gone: consumers leave, deliveries return."""
        self.request_no_more()
        if self._raise is not None:
            self._raise.cancel()
        if self.transaction is not None:
            self.transaction.close()
        consumers = list(self.consumers.values())
        self.consumers.clear()
        for consumer in consumers:
            consumer.queue.remove(consumer)
        self.recover()
        for consumer in consumers:
            if not consumer.queue.deleted:
                consumer.queue.dispatch()  # what it failed to take is there for others
            self.connection.host.consumer_left(consumer.queue)

    # Returns and confirms.

    def send_back(self, content: Content) -> None:
        """A mandatory message that nothing takes: basic.return, before its ack."""
        number, octets, raw, body = content
        method = decode_publish(octets)
        connection = self.connection
        returned = BasicReturn(ReplyCode.NO_ROUTE, "NO_ROUTE", method.exchange, method.routing_key)
        try:
            connection.machine.send_content(number, returned, raw, body)
        except OSError as error:
            connection.refuse(number, failed(f"the spool cannot be read: {error.strerror}"), BasicPublish)
        else:
            connection.stream.queued += len(body)
        connection.stream.mark()

    def expect_confirm(self) -> int:
        """The number of the next publish, which will be confirmed."""
        self.published += 1
        self.unconfirmed[self.published] = None
        return self.published

    def confirmed(self, number: int) -> None:
        """A publish is safe; told when the wake-up ends, with others (AmqpIngress.settle does the same)."""
        self.connection.confirming[self] = None
        if self.unconfirmed.pop(number, self) is None:
            self.settled.append(number)

    def refused(self, number: int) -> None:
        """A publish was refused: basic.nack."""
        if self.unconfirmed.pop(number, self) is None:
            self.connection.machine.nack(self.number, number)

    def tell_confirms(self) -> None:
        """Write the gathered confirms: one `multiple` for all below the first open one, the rest singly."""
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


IN_TRANSACTION = -1  # stands for the confirm number in the receipts of a transaction


Settlement = tuple[list[tuple[int, Unacknowledged]], bool | None]
PendingPublish = tuple[RoutingEntry, Message, Content | None]  # for the commit
"""Deliveries with their tags, and whether they are requeued; None: acknowledged."""


class Routed:
    """The namespace of one message that was routed some time ago."""

    def __init__(self, host: VirtualHost, sinks: Iterable[Sink]) -> None:
        self._host = host
        self._sinks = tuple(sinks)

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """The message decides."""
        return None

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """What it was routed to, as far as that is there."""
        queues = self._host.queues
        found = (queues.get(one.name) if isinstance(one, AmqpQueue) else one for one in self._sinks)
        return tuple(one for one in found if one is not None)

    @property
    def retained(self) -> None:
        """AMQP retains nothing."""


def _says_the_queue(entry: RoutingEntry) -> bool:
    """Whether the key is a queue's name, for the default exchange, so that there was nothing to route by."""
    return not entry.address.scope


class Transaction:
    """What a channel has said since its last commit or rollback.

    A commit is all or nothing. Deliveries are settled when everything that was published is safe: their
    acknowledgements reach the disk in the transaction of the messages where these are written here, and
    otherwise behind them. When a publish is refused (the disk is full) nothing is acknowledged, and the
    deliveries return to their queues with the channel.
    """

    def __init__(self, channel: AmqpChannel) -> None:
        self._channel = channel
        self._publishes: list[PendingPublish] = []
        self._generation = 0  # of the dispatcher, when the first of them was routed
        self.octets = 0  # of what is published, less what is on disk
        self._settlements: list[Settlement] = []
        self._committing: list[Settlement] = []  # those of a commit that waits for its publishes
        self._open = 0  # of a commit: what has not been heard of yet
        self._failed = False
        self._closed = False
        self._then: Callable[[bool], None] | None = None

    @property
    def addresses(self) -> set[Address]:
        """Where it is going to publish to."""
        return {message.address for _, message, _ in self._publishes}

    def publish(self, entry: RoutingEntry, message: Message, content: Content | None) -> tuple[int, int]:
        """Keep a message for the commit; returns how many are kept, and what they weigh.

        Raises RemoteProtocolError when the message decides where it goes, and malformed its headers.
        """
        if not self._publishes:
            self._generation = self._channel.connection.ingress.dispatcher.generation
        if entry.plan.recipients is None and not _says_the_queue(entry):
            entry = self._routed(entry, message)
        self._publishes.append((entry, message, content))
        self.octets += message.octets - len(message.body) * isinstance(message.body, Spooled)
        return len(self._publishes), self.octets

    def settle(self, tag: int, multiple: bool, requeue: bool | None) -> bool:
        """Keep the settling of deliveries (`requeue` None: acknowledged). False: the tag is unknown."""
        taken = self._channel.tagged(tag, multiple)
        if taken:
            self._settlements.append((taken, requeue))
        return bool(taken) or (multiple and tag == 0)

    def rollback(self) -> None:
        """Forget it all; what was acknowledged is unacknowledged again."""
        self._publishes.clear()
        self.octets = 0
        settlements, self._settlements = self._settlements, []
        self._channel.untake([one for taken, _ in settlements for one in taken])

    def close(self) -> None:
        """The channel is gone: roll back. A commit that is under way comes to its end unheard."""
        self.rollback()
        self._closed = True

    def commit(self, then: Callable[[bool], None]) -> None:
        """Put it all into effect, or nothing; `then` hears, now or later, whether everything has been."""
        ingress = self._channel.connection.ingress
        publishes, self._publishes = self._publishes, []
        self._committing, self._settlements = self._settlements, []
        self.octets = 0
        self._then = then
        self._failed = False
        renewed: list[PendingPublish] | None = publishes
        if self._generation != ingress.dispatcher.generation:
            renewed = self._renew_all(publishes)
        if renewed is None or (not ingress.disk_healthy() and self._must_be_whole(renewed)):
            self._failed = True
            self._finish()
            return
        self._open = len(renewed) + 1
        self._channel.connection.unsettled += len(renewed)
        batch = ingress.begun_batch()
        utc = clock.utc()
        here = True
        for entry, message, content in renewed:
            expiration = essentials(message.property_set).expiration_ms
            if expiration is not None:
                message = living(message, utc + expiration / 1000)
            receipt = (self._channel, IN_TRANSACTION, content)
            large = len(message.body) > ingress.limits.message_bytes_max
            publish = ingress.publish_large if large else ingress.dispatcher.publish
            here = here and ingress.ends_here(entry)
            if not publish(batch, entry, message, receipt):
                ingress.unclaimed(entry, message, receipt)
        ingress.turn_done()
        if here and not self._failed:
            self._acknowledge_beside()
        self.told(True)

    def _must_be_whole(self, publishes: list[PendingPublish]) -> bool:
        """Return True if some of this cannot be without the disk, and the rest must not be without that."""
        lasting = any(message.durable for _, message, _ in publishes)
        return lasting and (len(publishes) > 1 or bool(self._committing))

    def _acknowledge_beside(self) -> None:
        """Have acknowledgements written in the transaction of what was published just now."""
        for taken, requeue in self._committing:
            if requeue is None:
                for _, (queue, _, position, _) in taken:
                    if queue.storage is not None and not queue.deleted:
                        queue.storage.forget_beside((position,))

    def _routed(self, entry: RoutingEntry, message: Message) -> RoutingEntry:
        """The entry of a message that decides where it goes, with its decision."""
        namespace = entry.plan.namespace
        assert namespace is not None
        try:
            sinks = namespace.choose(message)
        except ProtocolError:
            raise
        except Exception:  # the commit meets it again, and makes a dead letter of the message
            return entry
        return entry.chosen_by(Routed(self._channel.connection.host, sinks))

    def _renewed(self, entry: RoutingEntry) -> RoutingEntry:
        """The entry as it is now, save for where its message was routed to. Raises RouteRefused."""
        connection = self._channel.connection
        find = partial(connection.ingress.dispatcher.entry, connection.endpoint, connection.host)
        fresh = connection.ingress.route(connection.rights, entry.address, find)
        found, recipients = entry.plan.namespace, entry.plan.recipients
        if recipients is not None and _says_the_queue(entry):
            return fresh
        if recipients is not None:
            found = Routed(connection.host, (recipient.sink for recipient in recipients))
        return fresh.chosen_by(found)

    def _renew_all(self, publishes: list[PendingPublish]) -> list[PendingPublish] | None:
        """Return the messages with their entries as they are now; None if one may not be published any more,
        which is logged as denied."""
        found: list[PendingPublish] = []
        for entry, message, content in publishes:
            try:
                found.append((self._renewed(entry), message, content))
            except RouteRefused as error:
                connection, address = self._channel.connection, message.address
                what = f"exchange '{address.scope}' with routing key '{address.name}'"
                connection.ingress.denied(connection.sender, "write", what, str(error))
                return None
        return found

    def told(self, accepted: bool) -> None:
        """One part of the commit is done."""
        self._failed |= not accepted
        self._open -= 1
        if not self._open:
            self._finish()

    def _finish(self) -> None:
        """Everything that was published is safe, or something was refused."""
        settlements, self._committing = self._committing, []
        if self._failed and not self._closed:
            self._channel.untake([one for taken, _ in settlements for one in taken])
            self._answer(False)
            return
        touched: Touched = {}
        for taken, requeue in settlements:
            self._channel.settle([one for _, one in taken], self._failed or requeue, touched)
        for one in touched:
            one.dispatch()
        store = self._channel.connection.ingress.store
        if touched and store is not None:
            # A full disk changes nothing: what is settled makes room, and is written when there is some.
            store.after_commit(lambda outcome: self._answer(True))
        else:
            self._answer(not self._failed)

    def _answer(self, whole: bool) -> None:
        then, self._then = self._then, None
        if then is not None and not self._closed:
            then(whole)


Receipt = tuple[AmqpChannel, int, "Content | None"]  # confirm number (0: none), content if it is mandatory

"""One AMQP channel: its consumers, what they have not acknowledged, and what its publisher has not been
told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.broker.amqp091.virtual_host import AmqpQueue
from gateway.broker.queue import DISPATCH_MESSAGES_MAX, Queue
from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.protocols.amqp091.methods import BasicCancel
from gateway.protocols.amqp091.sending import Deliverer
from gateway.protocols.amqp091.translate import encode_properties

if TYPE_CHECKING:
    from gateway.ingress.amqp091_connection import AmqpConnection

# What a delivery costs on the wire besides its body, about; for noticing congestion between flushes.
DELIVERY_OVERHEAD: Final = 96


# The flags of a content header without any property.
NO_PROPERTIES: Final = b"\0\0"


def sound_properties(message: Message, utc: float) -> bytes:
    """The properties of a content header; none for a message whose sender malformed them."""
    try:
        return encode_properties(message, utc)
    except RemoteProtocolError:
        return NO_PROPERTIES


# A delivery that the client has to acknowledge: queue, consumer (None after basic.get), position, message. A
# plain tuple, for one is made for every delivery and a named one costs four times as much.
Unacknowledged = tuple[Queue, "AmqpConsumer | None", int, Message]


class AmqpConsumer:
    """A basic.consume: takes messages out of a queue as far as its credit goes."""

    __slots__ = ("_channel", "_deliverer", "no_ack", "outstanding", "prefetch", "queue", "tag")

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

    def room(self) -> int:
        """Credit left; 0 while the client does not read."""
        channel = self._channel
        if channel.connection.stream.congested or not channel.flowing:
            return 0
        if self.no_ack:
            return DISPATCH_MESSAGES_MAX
        room = self.prefetch - self.outstanding
        if channel.prefetch_all:
            room = min(room, channel.prefetch_all - channel.outstanding)
        return room

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Encode the deliveries, and remember them until they are acknowledged."""
        channel = self._channel
        connection = channel.connection
        first = channel.next_tag
        channel.next_tag = first + len(messages)
        utc = time.time()
        try:
            rows = [(redelivered, m.address.wire, encode_properties(m, utc), m.body) for m in messages]
        except RemoteProtocolError:
            rows = [(redelivered, m.address.wire, sound_properties(m, utc), m.body) for m in messages]
        unsent = self._deliverer.deliver_many(first, rows)
        for tag in unsent:
            connection.ingress.undeliverable(messages[tag - first])
        if self.no_ack:
            queue.acknowledged(range(position, position + len(messages)))
        else:
            unacknowledged = channel.unacknowledged
            tag = first
            for message in messages:
                unacknowledged[tag] = (queue, self, position, message)
                tag += 1
                position += 1
            self.outstanding += len(messages)
            channel.outstanding += len(messages)
        stream = connection.stream
        stream.queued += sum([len(message.body) for message in messages]) + DELIVERY_OVERHEAD * len(messages)
        stream.mark()
        if unsent:
            channel.drop(unsent)
        connection.ingress.stats.messages_out += len(messages)

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

    def __init__(self, connection: AmqpConnection, number: int, prefetch_max: int) -> None:
        self.connection = connection
        self.number = number
        self.flowing = True
        self.prefetch = prefetch_max  # for the next consumer
        self.prefetch_all = 0  # basic.qos(global): over all consumers; 0 is no limit
        self.outstanding = 0
        self.next_tag = 1
        self.consumers: dict[str, AmqpConsumer] = {}
        self.unacknowledged: dict[int, Unacknowledged] = {}
        self.last_queue = ""  # an empty queue name means the last one declared here
        self.confirming = False
        self.published = 0  # publishes since confirm.select
        self._unconfirmed: dict[int, None] = {}
        self._settled: list[int] = []

    # Deliveries.

    def acknowledge(self, tag: int, multiple: bool, touched: dict[Queue, None]) -> bool:
        """Settle one delivery, or all up to `tag` (0: all). False: the tag is unknown."""
        taken: Sequence[Unacknowledged]
        if not multiple:
            found = self.unacknowledged.pop(tag, None)
            if found is None:
                return False
            self.outstanding -= 1
            taken = (found,)
        else:
            taken = self.take(tag)
        for queue, consumer, position, _ in taken:
            queue.unacknowledged -= 1
            if queue.gone is not None:
                queue.gone.append(position)
            if consumer is not None:
                consumer.outstanding -= 1
            touched[queue] = None
        return bool(taken) or tag == 0

    def take(self, tag: int) -> list[Unacknowledged]:
        """Remove and return the deliveries up to `tag`, in order; 0: all of them."""
        unacknowledged = self.unacknowledged
        if tag == 0:
            taken = list(unacknowledged.values())
            unacknowledged.clear()
        else:
            tags = []
            for candidate in unacknowledged:  # in order of delivery
                if candidate > tag:
                    break
                tags.append(candidate)
            taken = [unacknowledged.pop(candidate) for candidate in tags]
        self.outstanding -= len(taken)
        return taken

    def drop(self, tags: list[int]) -> None:
        """Deliveries whose properties do not fit a frame that the client takes: they can never be sent."""
        for tag in tags:
            self.acknowledge(tag, False, {})

    def take_one(self, tag: int) -> list[Unacknowledged]:
        """Remove and return one delivery; an empty list when the tag is unknown."""
        found = self.unacknowledged.pop(tag, None)
        if found is None:
            return []
        self.outstanding -= 1
        return [found]

    def give_back(self, taken: list[Unacknowledged], *, requeue: bool) -> None:
        """Deliveries that were rejected return to their places, or are dropped."""
        touched: dict[Queue, None] = {}
        for queue, consumer, position, message in taken:
            if consumer is not None:
                consumer.outstanding -= 1
            if requeue and not queue.deleted:
                queue.requeue([(position, message)])
            else:
                queue.acknowledged((position,))
            touched[queue] = None
        for queue in touched:
            queue.dispatch()

    def close(self) -> None:
        """The channel is gone: consumers leave, deliveries return."""
        consumers = list(self.consumers.values())
        self.consumers.clear()
        for consumer in consumers:
            consumer.queue.remove(consumer)
        self.give_back(self.take(0), requeue=True)
        for consumer in consumers:
            self.connection.host.consumer_left(consumer.queue)

    # Confirms.

    def expect_confirm(self) -> int:
        """The number of the next publish, which will be confirmed."""
        self.published += 1
        self._unconfirmed[self.published] = None
        return self.published

    def confirmed(self, number: int) -> None:
        """A publish is safe; told when the wake-up ends, with others."""
        if self._unconfirmed.pop(number, self) is None:
            self._settled.append(number)

    def refused(self, number: int) -> None:
        """A publish was refused: basic.nack."""
        if self._unconfirmed.pop(number, self) is None:
            self.connection.machine.nack(self.number, number)

    def tell_confirms(self) -> None:
        """Write the gathered confirms: one `multiple` for all below the first open one, the rest singly."""
        settled = self._settled
        if not settled:
            return
        self._settled = []
        first_open = next(iter(self._unconfirmed), self.published + 1)
        below = [number for number in settled if number < first_open]
        ack = self.connection.machine.ack
        if below:
            ack(self.number, max(below), len(below) > 1)
        if len(below) < len(settled):
            for number in settled:
                if number > first_open:
                    ack(self.number, number)

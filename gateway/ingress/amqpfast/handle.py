"""One handle and its consumers: what it was opened for, what it listens to, what it has listed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from gateway.broker.amqpfast.destinations import FastQueue, Subscription
from gateway.broker.dispatcher import RoutingEntry
from gateway.broker.poison import poisoned
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import DISPATCH_MESSAGES_MAX, Queue
from gateway.errors import LocalProtocolError
from gateway.ingress.amqpfast.channel import Delivery
from gateway.ingress.amqpfast.large_deliveries import LARGE_OCTETS, Large
from gateway.model.address import Address
from gateway.model.message import MESSAGE_OCTETS, Message, weight_of
from gateway.protocols.amqpfast.commands import HandleOpen
from gateway.protocols.amqpfast.sending import Notifier, NotifyRow
from gateway.protocols.amqpfast.spec import Service
from gateway.protocols.amqpfast.translate import encode_properties

if TYPE_CHECKING:
    from gateway.ingress.amqpfast.channel import FastChannel
    from gateway.ingress.amqpfast.peers import Conversation

# What a delivery costs on the wire besides its body, about; for noticing congestion between flushes.
DELIVERY_OVERHEAD: Final = 64
NAMES_MAX: Final = 4_096  # destinations whose octets a consumer remembers
LISTED_MAX: Final = 10_000  # messages that one INDEX lists; the client asks again for those behind them
INDEXED_MAX: Final = 100_000  # messages whose ids a handle remembers; for older ones 310 is answered
NO_HEAD: Final = bytes(11)

SERVICES: Final = {Service.QUEUE: "queue", Service.TOPIC: "topic", Service.PEER: "peer"}


def sound_head(message: Message) -> bytes:
    """The head of a message that is only looked at; an empty one when it cannot be encoded."""
    try:
        return encode_properties(message)
    except Exception as error:
        poisoned(error)
        return NO_HEAD


def name_octets(address: Address) -> bytes:
    """The destination's name in an address of AMQP/Fast."""
    return address.wire.partition(b":")[2]


def notifier_of(handle: FastHandle, *, delivered: bool = True) -> Notifier | None:
    """What speaks on a handle; None when the machine, which has read further than we have come, knows that it
    is closed.
    """
    try:
        return Notifier(handle.channel.connection.machine, handle.number, delivered=delivered)
    except LocalProtocolError:
        return None


class FastConsumer:
    """A HANDLE CONSUME: takes messages out of one or more queues, within one window."""

    def __init__(self, handle: FastHandle, *, prefetch: int, unreliable: bool) -> None:
        self.handle = handle
        self.queues: list[PriorityQueue] = []
        self._prefetch = prefetch
        self._unreliable = unreliable
        self._outstanding = 0
        self._names: dict[bytes, bytes] = {}
        self._notifier = notifier_of(handle)

    @property
    def paused(self) -> bool:
        """HANDLE FLOW has stopped it."""
        return self.handle.paused

    def room(self) -> int:
        """How many messages it will take now."""
        channel = self.handle.channel
        if (
            self.paused
            or not channel.large_deliveries.idle
            or channel.connection.stream.congested
            or not self._may_speak()
        ):
            return 0
        if self._unreliable:
            return DISPATCH_MESSAGES_MAX
        return 0 if channel.connection.outstanding.full else self._prefetch - self._outstanding

    def _may_speak(self) -> bool:
        """Not on a handle that the machine knows to be closed, though we have not come to that event yet."""
        try:
            return self._notifier is not None and self._notifier.usable
        except LocalProtocolError:  # a stream of ours is under way on the channel (3.5.3.1)
            return False

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Encode NOTIFY for each, and remember them until they are acknowledged."""
        channel = self.handle.channel
        octets = weight_of(messages) - MESSAGE_OCTETS * len(messages)
        name = self._name(queue.address) if isinstance(queue, FastQueue) else b""
        try:
            rows = [
                (redelivered, name or self._name(m.address), encode_properties(m), m.body) for m in messages
            ]
        except Exception as error:
            self._deliver_singly(queue, position, messages, redelivered, error)
            return
        if octets > LARGE_OCTETS or not channel.large_deliveries.idle:
            self._deliver_in_line(queue, position, messages, rows)
        else:
            self._say(queue, position, messages, rows, octets)

    def _deliver_singly(
        self, queue: Queue, position: int, messages: list[Message], redelivered: bool, error: Exception
    ) -> None:
        """Some of the messages cannot be encoded; the one that is left alone with its error is done with."""
        if len(messages) > 1:
            for at, message in enumerate(messages, position):
                self.deliver(queue, at, [message], redelivered)
            return
        queue.acknowledged((position,))
        ingress = self.handle.channel.connection.ingress
        ingress.undeliverable(messages[0], poisoned(error, queue=queue.name))

    def _say(
        self, queue: Queue, position: int, messages: list[Message], rows: list[NotifyRow], octets: int
    ) -> None:
        channel = self.handle.channel
        connection = channel.connection
        count = len(messages)
        assert self._notifier is not None  # or there was no room
        first = channel.next_number
        unsent = self._notifier.notify_many(first, rows)
        channel.take_numbers(count)
        if self._unreliable:
            queue.acknowledged(range(position, position + count))
        else:
            channel.delivered(Delivery(first, queue, self, position, messages))
            self._outstanding += count
        for number in unsent:
            connection.ingress.undeliverable(messages[number - first])
            if not self._unreliable:
                channel.drop(number)
        connection.delivered(channel, count, octets)

    def failed(self, error: Exception) -> None:
        """That costs the connection, when the wake-up ends."""
        self.handle.channel.connection.stream.doom(error)

    def _deliver_in_line(
        self, queue: Queue, position: int, messages: list[Message], rows: list[NotifyRow]
    ) -> None:
        """One of them is large, or such a one is on its way: one after the other."""
        channel = self.handle.channel
        connection = channel.connection
        first = channel.take_numbers(len(messages))
        if not self._unreliable:
            channel.delivered(Delivery(first, queue, self, position, messages))
            self._outstanding += len(messages)
        for at, message in enumerate(messages):
            redelivered, name, head, body = rows[at]
            channel.large_deliveries.say(
                Large(
                    self.handle,
                    first + at,
                    name,
                    head,
                    body,
                    partial(self._said, queue, position + at, message, first + at),
                    redelivered=redelivered,
                )
            )
        connection.delivered(channel, len(messages), 0)

    def _said(self, queue: Queue, position: int, message: Message, number: int, sent: bool) -> None:
        """A message has gone out, or will never."""
        channel = self.handle.channel
        if sent:
            channel.connection.delivered(channel, 0, 0)  # from now on it may be acknowledged
            if self._unreliable:
                queue.acknowledged((position,))
        elif self._unreliable:
            if not queue.deleted:
                queue.requeue([(position, message)])
                queue.dispatch()
        else:
            channel.unsaid(number)

    def _name(self, address: Address) -> bytes:
        """One object for each name, so that the wire's side knows it again."""
        found = self._names.get(address.wire)
        if found is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            found = self._names[address.wire] = name_octets(address)
        return found

    def acknowledged(self, count: int, touched: dict[Queue, None]) -> None:
        """Its window has opened: `touched` gets the queues that it may take from."""
        self._outstanding -= count
        for queue in self.queues:
            touched[queue] = None

    def cancelled(self, queue: Queue) -> None:
        """The queue is gone."""
        self.queues = [one for one in self.queues if one is not queue]

    def leave(self) -> None:
        """It takes nothing more; what it has taken stays outstanding."""
        queues, self.queues = self.queues, []
        for queue in queues:
            queue.remove(self)


class Index:
    """The ids under which a handle's QUERY listed messages; they are not message numbers (3.5.8)."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._ids: dict[tuple[Queue, int], int] = {}
        self._places: dict[int, tuple[PriorityQueue, int]] = {}

    def enter(self, found: Iterable[tuple[PriorityQueue, int]], above: int) -> tuple[list[int], bool]:
        """The ids above `above` of these messages, ascending, and whether there are more.

        Messages that were not listed before get ids.
        """
        listed: list[int] = []
        more = False
        for queue, position in found:
            number = self._ids.get((queue, position))
            if number is None:
                if len(listed) >= LISTED_MAX:
                    more = True
                    continue
                number = self._enter(queue, position)
            if number > above:
                listed.append(number)
        listed.sort()
        return listed[:LISTED_MAX], more or len(listed) > LISTED_MAX

    def _enter(self, queue: PriorityQueue, position: int) -> int:
        number = self._next
        self._next += 1
        self._ids[queue, position] = number
        self._places[number] = (queue, position)
        if len(self._places) > INDEXED_MAX:
            oldest = next(iter(self._places))
            del self._ids[self._places.pop(oldest)]
        return number

    def find(self, number: int) -> tuple[PriorityQueue, Message] | None:
        """The message with this id, if it still waits."""
        place = self._places.get(number)
        if place is None:
            return None
        queue, position = place
        message = None if queue.deleted else queue.look_at(position)
        return None if message is None else (queue, message)


@mypyc_attr(native_class=False)  # weak references point to it
class FastHandle:
    """One handle's state."""

    def __init__(self, channel: FastChannel, command: HandleOpen, name: str) -> None:
        self.channel = channel
        self.number = command.handle_id
        self.service = SERVICES[Service(command.service_type)]
        self.name = name
        self.mime_type = command.mime_type
        self.encoding = command.encoding
        self.silent = False  # True: it is gone for the client, nothing may be answered any more
        self.paused = False
        self.consumers: list[FastConsumer] = []
        self.subscriptions: list[Subscription] = []
        self.entries: dict[bytes, tuple[RoutingEntry, ...]] = {}  # what the names of SEND lead to
        self.generation = -1
        self.index: Index | None = None
        self.browser: Notifier | None = None
        self.conversations: dict[str, Conversation] = {}  # with peers, by their names

    def pause(self, paused: bool) -> None:
        """HANDLE FLOW: its messages go to others, or wait."""
        self.paused = paused
        self.dispatch()

    def dispatch(self) -> None:
        """Its consumers take what they may have."""
        for consumer in self.consumers:
            for queue in list(consumer.queues):
                queue.dispatch()

    def listed(self) -> Index:
        """The index of its queries."""
        if self.index is None:
            self.index = Index(1)
        return self.index

    def close(self) -> None:
        """The handle is over. What it has delivered stays outstanding on its channel."""
        host = self.channel.connection.host
        consumers, self.consumers = self.consumers, []
        for consumer in consumers:
            consumer.leave()
        subscriptions, self.subscriptions = self.subscriptions, []
        for subscription in subscriptions:
            subscription.attached = False
            subscription.local = None
            if subscription.key is None:
                host.unsubscribe(subscription)
        conversations, self.conversations = self.conversations, {}
        for conversation in conversations.values():
            conversation.end()

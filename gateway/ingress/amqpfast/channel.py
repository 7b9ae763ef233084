"""One channel and its handles: what they were opened for, what they listen to and have listed, what was
delivered and not acknowledged, and the channel's transaction.

Deliveries are kept in runs, as queues hand them out, for an acknowledgement counts for everything up to its
number. An acknowledgement, and a COMMIT, can only mean what the client may have seen: what was handed to the
socket before they were read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, Protocol

from mypy_extensions import mypyc_attr

from gateway.access.rights import Decision, Rights
from gateway.broker.amqpfast.destinations import FastQueue, Subscription
from gateway.broker.amqpfast.partials import Partial, Partials
from gateway.broker.amqpfast.virtual_host import FastHost
from gateway.broker.poison import poisoned
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import DISPATCH_MESSAGES_MAX, Queue
from gateway.broker.routing import RoutingEntry
from gateway.errors import LocalProtocolError
from gateway.ingress.amqpfast.large_deliveries import LARGE_OCTETS, Large, LargeDeliveries
from gateway.ingress.amqpfast.query_scan import QueryScan
from gateway.ingress.amqpfast.shared_folder import SharedFolder
from gateway.ingress.handshaking import HandshakingGuest
from gateway.ingress.outstanding import Outstanding
from gateway.ingress.source import ListenerSource
from gateway.ingress.waiting_publishes import WaitingPublishes
from gateway.model.address import Address
from gateway.model.message import MESSAGE_OCTETS, Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict, worse
from gateway.protocols.amqpfast.commands import ChannelOpen, HandleOpen
from gateway.protocols.amqpfast.events import Event, Fragment
from gateway.protocols.amqpfast.sending import Notifier, NotifyRow
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import MESSAGE_NUMBER_MAX, Service
from gateway.protocols.amqpfast.translate import encode_properties

NUMBERS_LOW: Final = (
    1_000_000  # message numbers left at which a channel is closed, for they cannot start anew
)


PROVISIONAL_MIN: Final = 16  # messages that a transaction is expected to acknowledge, at least

UNDELIVERABLE: Final = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the head does not fit the client's frame-max"
)


class FastSource(ListenerSource):
    """The source of the batches of one listener, as its channels know it."""

    partials: Partials

    @abstractmethod
    def start(self, task: Callable[[], Awaitable[None]]) -> None:
        """Begin a task, whose end nobody waits for."""

    @abstractmethod
    def soon(self, then: Callable[[], None]) -> None:
        """Call that in a turn of its own."""

    def undeliverable(self, message: Message, outcome: Outcome = UNDELIVERABLE) -> None:
        """A delivery that cannot be said; by default its head is larger than the client's frames."""
        super().undeliverable(message, outcome)


class FastGuest(HandshakingGuest[ServerConnection]):
    """A client's connection, as its channels and the source of its listener know it."""

    host: FastHost
    owner: str
    client_name: str
    channels: dict[int, FastChannel]
    handles: dict[int, FastHandle]
    outstanding: Outstanding
    sending: dict[LargeDeliveries, None]
    waiting: WaitingPublishes[Event]

    @property
    @abstractmethod
    def ingress(self) -> FastSource:
        """The source of its listener."""

    @property
    @abstractmethod
    def rights(self) -> Rights:
        """As the rules are now."""

    @abstractmethod
    def check(self, right: str, service: str, name: str, *, whole: bool = False) -> None:
        """Whether a right is given on a destination. Refused 403."""

    @abstractmethod
    def check_named(self, right: str, service: str, name: str, *, whole: bool) -> None:
        """The same, if the destination is named at all."""

    @abstractmethod
    def demand(self, decision: Decision, right: str, service: str, name: str) -> None:
        """Refused 403, if the decision is no."""

    @abstractmethod
    def await_replies(self, channel: FastChannel) -> None:
        """Have the channel go on when the replies that are owed on it have been given."""

    @abstractmethod
    def delivered(self, channel: FastChannel, count: int, octets: int) -> None:
        """Messages were encoded on a channel."""

    @abstractmethod
    def refuse(self, handle: FastHandle, code: int, text: str) -> None:
        """Close the handle, or its channel, as the code asks."""

    @abstractmethod
    def close_handle(self, handle: FastHandle, code: int, text: str) -> None:
        """Close a handle from our side."""

    @abstractmethod
    def close_channel(self, channel: FastChannel, code: int, text: str) -> None:
        """Close a channel from our side."""

    @abstractmethod
    def reopen_channel(self, number: int) -> None:
        """The number of a channel that was left is used again."""

    @abstractmethod
    def reopen_handle(self, number: int) -> None:
        """The same of a handle."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Nobody is there any more."""

    @abstractmethod
    def settled(self, receipt: Receipt, outcome: Outcome) -> None:
        """A message has been settled."""

    @abstractmethod
    def replied(self, count: int) -> None:
        """So many messages have been answered."""


class FragmentedMessage(Protocol):
    """A message that comes in fragments."""

    handle: FastHandle


class ReturningStream(Protocol):
    """A stream of a peer, whose octets wait for a reply."""

    def go_on(self) -> None:
        """No reply is owed on the channel any more."""


class PeerSession(Protocol):
    """What a handle and a peer have to do with each other."""

    def message(self, head: bytes, body: bytes) -> None:
        """A whole message came. Raises Refused."""

    def fragment(self, fragment: Fragment) -> None:
        """A part of a stream came. Raises Refused."""

    def end(self) -> None:
        """The handle is over."""


class Delivery:
    """A run of messages that were delivered: from `number` on the wire, from `position` in the queue."""

    __slots__ = ("at", "consumer", "count", "messages", "number", "position", "queue")

    def __init__(
        self, number: int, queue: Queue, consumer: FastConsumer, position: int, messages: list[Message]
    ) -> None:
        self.number = number
        self.queue = queue
        self.consumer = consumer
        self.position = position
        self.messages = messages
        self.at = 0  # where they begin in `messages`
        self.count = len(messages)

    def split(self, count: int) -> Delivery:
        """The first `count` of them; this one goes on behind them."""
        first = Delivery(self.number, self.queue, self.consumer, self.position, self.messages)
        first.at, first.count = self.at, count
        self.number += count
        self.position += count
        self.at += count
        self.count -= count
        return first

    def rows(self) -> list[tuple[int, Message]]:
        """Positions and messages."""
        messages = self.messages[self.at : self.at + self.count]
        return list(enumerate(messages, self.position))

    def settle(self) -> None:
        """The client has them for good."""
        self._let_go()
        queue = self.queue
        queue.unacknowledged -= self.count
        if queue.gone is not None:
            queue.gone.extend(range(self.position, self.position + self.count))

    def forget_beside(self) -> None:
        """Have them settled on disk in the transaction of what is published in this wake-up."""
        if self.queue.storage is not None and not self.queue.deleted:
            self.queue.storage.forget_beside(range(self.position, self.position + self.count))

    def set_aside(self) -> None:
        """Leave the first of them to other clients."""
        self._let_go()
        self.queue.set_aside(self.consumer, self.position, self.messages[self.at], False)

    def give_back(self) -> None:
        """They return to their queue."""
        self._let_go()
        if not self.queue.deleted:
            self.queue.requeue(self.rows())

    def _let_go(self) -> None:
        """The client holds them no longer."""
        connection = self.consumer.handle.channel.connection
        connection.outstanding.settled(weight_of(self.messages[self.at : self.at + self.count]))


class Join:
    """Waits until `left` things have settled, then calls `then` with the worst outcome."""

    __slots__ = ("_then", "left", "worst")

    def __init__(self, left: int, then: Callable[[Outcome], None]) -> None:
        self.left = left
        self.worst = ACCEPTED
        self._then = then

    def settled(self, outcome: Outcome) -> None:
        """One of them is."""
        self.worst = worse(self.worst, outcome)
        self.left -= 1
        if not self.left:
            self._then(self.worst)


class Call:
    """A message for the peer service `peer`."""

    __slots__ = ("body", "handle", "head", "peer")

    def __init__(self, handle: FastHandle, peer: str, head: bytes, body: bytes) -> None:
        self.handle = handle
        self.peer = peer
        self.head = head
        self.body = body


@mypyc_attr(native_class=False)  # weak references point to it
class FastChannel:
    """One channel's state."""

    def __init__(self, connection: FastGuest, command: ChannelOpen) -> None:
        self.connection = connection
        self.number = command.channel_id
        self.sender = connection.sender._replace(channel=command.channel_id)
        self.transacted = command.transacted
        self.restartable = command.restartable
        self.folder: SharedFolder | None = None  # for what goes out of band
        self.large_deliveries = LargeDeliveries(self)
        self.silent = False  # True: it is gone for the client, nothing may be answered any more
        self.closing = False  # it will be closed when this turn is done
        self.streamed = False  # a stream of ours was begun on it, which may still be under way
        self.handles: dict[int, FastHandle] = {}
        self.next_number = 1
        self.incoming: FragmentedMessage | None = None
        self.pending: list[tuple[RoutingEntry, Message]] = []  # sent within the transaction
        self.calls: list[Call] = []  # of peers, within the transaction
        self.pending_octets = 0  # of bodies that are in memory
        self.transferred: list[Partial] = []  # complete within the transaction
        self.streams: list[ReturningStream] = []  # of peers, with octets that wait for a reply
        self._kept: list[tuple[Delivery, bool]] = []  # messages that do, without numbers, and `redelivered`
        self._deliveries: deque[Delivery] = deque()
        self._acked: list[Delivery] = []  # within the transaction
        self._boundary = 1  # the first number of the transaction
        self._sent = 0  # the last number that was handed to the socket,
        self._written = 0  # and the last that was when the socket had taken everything

    # Deliveries.

    def take_numbers(self, count: int) -> int:
        """The first of `count` message numbers."""
        first = self.next_number
        self.next_number = first + count
        return first

    @property
    def exhausted(self) -> bool:
        """True: nothing more can be delivered, for there are no numbers left."""
        return self.next_number > MESSAGE_NUMBER_MAX - NUMBERS_LOW

    def delivered(self, delivery: Delivery) -> None:
        """Remember what the client has to acknowledge."""
        self._deliveries.append(delivery)
        self.connection.outstanding.octets += weight_of(delivery.messages)

    def flushed(self) -> None:
        """Everything that was encoded is being handed to the socket."""
        if not self.connection.stream.backlogged:
            self._written = self._sent
        self._sent = self.large_deliveries.limit - 1

    @property
    def unacknowledged(self) -> int:
        """Messages that were sent and not acknowledged."""
        return sum([delivery.count for delivery in self._deliveries])

    def acknowledge(self, number: int, touched: dict[Queue, None]) -> None:
        """The client has everything up to `number`; `touched` gets the queues that may go on."""
        for delivery in self._take(min(number, self._sent)):
            delivery.consumer.acknowledged(delivery.count, touched)
            if self.transacted:
                delivery.consumer.provisional += delivery.count
                self._acked.append(delivery)
            else:
                delivery.settle()
                touched[delivery.queue] = None

    def _take(self, number: int) -> list[Delivery]:
        deliveries = self._deliveries
        taken = []
        while deliveries and deliveries[0].number <= number:
            first = deliveries[0]
            count = number - first.number + 1
            if count < first.count:
                taken.append(first.split(count))
                break
            taken.append(deliveries.popleft())
        return taken

    def unget(self, handle: FastHandle, number: int) -> bool:
        """The client cannot use a message of `handle`; False: it is not outstanding."""
        at = self._find(number)
        if at < 0:
            return False
        delivery = self._deliveries[at]
        queue = delivery.queue
        if delivery.consumer.handle is not handle or not isinstance(queue, FastQueue):
            return False
        one = self._pick(at, number)
        touched: dict[Queue, None] = {queue: None}
        one.consumer.acknowledged(1, touched)
        self.connection.outstanding.settled(weight_of(message for _, message in one.rows()))
        if not queue.deleted:
            ((position, message),) = one.rows()
            queue.give_back(position, message, one.consumer)
        for one_queue in touched:
            one_queue.dispatch()
        return True

    def unsaid(self, number: int) -> None:
        """Not all of a message has reached the client, and it never will: somebody else may have it."""
        at = self._find(number)
        if at >= 0:
            one = self._pick(at, number)
            touched: dict[Queue, None] = {}
            one.consumer.acknowledged(1, touched)
            self._give_back([one], touched)

    def replied(self) -> None:
        """Send what had to wait for the replies that were owed, if all of them have been given."""
        self.large_deliveries.go_on()
        if self.connection.machine.owes(self.number):
            self.connection.await_replies(self)
            return
        self._deliver_kept()
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.go_on()
        if self.large_deliveries.idle:
            self.go_on()

    @property
    def keeps(self) -> bool:
        """Messages wait here for a reply that was owed: what comes must not overtake them."""
        return bool(self._kept)

    def keep(self, delivery: Delivery, redelivered: bool) -> None:
        """Keep messages until no reply is owed on the channel any more (3.2.11); then they get numbers. Until
        then they cannot be acknowledged, and count against the window of their consumer."""
        delivery.consumer.kept += delivery.count
        self.connection.outstanding.octets += weight_of(delivery.messages)
        self._kept.append((delivery, redelivered))

    def _deliver_kept(self) -> None:
        kept, self._kept = self._kept, []
        for delivery, redelivered in kept:
            consumer, queue = delivery.consumer, delivery.queue
            consumer.kept -= delivery.count
            self.connection.outstanding.octets -= weight_of(delivery.messages)
            if queue.deleted:
                queue.unacknowledged -= delivery.count
            elif consumer.takes_kept():
                try:
                    consumer.deliver(queue, delivery.position, delivery.messages, redelivered)
                except Exception as error:
                    consumer.failed(error)
            else:
                queue.requeue(delivery.rows())
                queue.dispatch()

    def give_back_kept(self, handle: FastHandle | None = None) -> None:
        """Return the messages that a handle (None: any) was to get, and that were not sent."""
        back: list[Delivery] = []
        left: list[tuple[Delivery, bool]] = []
        for delivery, redelivered in self._kept:
            if handle is None or delivery.consumer.handle is handle:
                back.append(delivery)
                delivery.consumer.kept -= delivery.count
            else:
                left.append((delivery, redelivered))
        self._kept = left
        if back:
            self._give_back(back, {})

    def go_on(self) -> None:
        """Nothing holds up the channel any more: its consumers may have more."""
        for handle in list(self.handles.values()):
            handle.dispatch()

    def _pick(self, at: int, number: int) -> Delivery:
        """Take the delivery of one message out of the run that stands at `at`."""
        delivery = self._deliveries[at]
        del self._deliveries[at]
        if before := number - delivery.number:
            self._deliveries.insert(at, delivery.split(before))
            at += 1
        one = delivery.split(1)
        if delivery.count:
            self._deliveries.insert(at, delivery)
        return one

    def _find(self, number: int) -> int:
        for at, delivery in enumerate(self._deliveries):
            if delivery.number <= number < delivery.number + delivery.count:
                return at
        return -1

    def drop(self, number: int, *, aside: bool = False) -> None:
        """What was just delivered under `number` could not be said to the client, and never can be. `aside`:
        it waits for other clients."""
        last = self._deliveries.pop()
        for part in (last.split(number - last.number), last.split(1), last):
            if part.number == number and part.count == 1 and part is not last:
                part.consumer.acknowledged(1, {})
                if aside:
                    part.set_aside()
                else:
                    part.settle()
            elif part.count:
                self._deliveries.append(part)

    # Transactions, 3.3.3.

    def commit(self, *, everything: bool) -> tuple[list[tuple[RoutingEntry, Message]], list[Delivery]]:
        """Return what was sent, and what was acknowledged, with `everything` also what was written before:
        that is for `finish`.
        """
        touched: dict[Queue, None] = {}
        settled, self._acked = self._acked, []
        if everything:
            seen = self._written if self.connection.stream.backlogged else self._sent
            confirmed = self._take(seen)
            for delivery in confirmed:
                delivery.consumer.acknowledged(delivery.count, touched)
                delivery.consumer.provisional += delivery.count
            settled += confirmed
        self._begin()
        for queue in touched:
            queue.dispatch()
        pending, self.pending = self.pending, []
        return pending, settled

    @staticmethod
    def _final(deliveries: Iterable[Delivery]) -> None:
        """What was acknowledged within the transaction is so for good, or not at all."""
        for delivery in deliveries:
            delivery.consumer.provisional -= delivery.count

    @staticmethod
    def settle(deliveries: Iterable[Delivery], touched: dict[Queue, None]) -> None:
        """The client has these for good."""
        for delivery in deliveries:
            delivery.settle()
            touched[delivery.queue] = None

    def finish(self, deliveries: list[Delivery], *, taken: bool) -> bool:
        """What was acknowledged within a transaction, whose messages are safe now, or were not taken. Return
        True if some of it is on disk.
        """
        touched: dict[Queue, None] = {}
        self._final(deliveries)
        if not taken:
            self._give_back(deliveries, touched)
            return False
        self.settle(deliveries, touched)
        for queue in touched:
            queue.dispatch()
        return any(queue.storage is not None for queue in touched)

    def rollback(self) -> None:
        """What was sent is dropped; what was notified since the last boundary, or acknowledged, comes
        again."""
        self._drop_sent()
        back, self._acked = self._acked, []
        self._final(back)
        touched: dict[Queue, None] = {}
        kept: deque[Delivery] = deque()
        for delivery in self._deliveries:
            if before := min(max(self._boundary - delivery.number, 0), delivery.count):
                kept.append(delivery.split(before))
            if delivery.count:
                delivery.consumer.acknowledged(delivery.count, touched)
                back.append(delivery)
        self._deliveries = kept
        self._begin()
        self._give_back(back, touched)

    def take_calls(self) -> list[Call]:
        """The calls of peers that the transaction has held."""
        calls, self.calls = self.calls, []
        return calls

    def _drop_sent(self) -> None:
        self.pending = []
        self.calls = []
        transferred, self.transferred = self.transferred, []
        for one in transferred:
            self.connection.ingress.partials.release(one)

    def _begin(self) -> None:
        self._boundary = self.next_number
        self.pending_octets = 0

    @staticmethod
    def _give_back(deliveries: Iterable[Delivery], touched: dict[Queue, None]) -> None:
        for delivery in deliveries:
            delivery.give_back()
            touched[delivery.queue] = None
        for queue in touched:
            if not queue.deleted:
                queue.dispatch()

    def close(self) -> None:
        """The channel is over: its handles are gone already; what is not acknowledged returns."""
        self._drop_sent()
        self.incoming = None
        self.streams.clear()
        self.give_back_kept()
        self._final(self._acked)
        back = [*self._acked, *self._deliveries]
        self._acked.clear()
        self._deliveries.clear()
        self._give_back(back, {})
        self.connection.host.channel_gone(self)


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
        self.provisional = 0  # messages that it has acknowledged within a transaction
        self.kept = 0  # messages that it has taken, and that wait for a reply on the channel
        self._prefetch = prefetch
        self._unreliable = unreliable
        self._outstanding = 0
        self._names: dict[bytes, bytes] = {}
        self._notifier = notifier_of(handle)

    @property
    def paused(self) -> bool:
        """HANDLE FLOW has stopped it."""
        return self.handle.paused

    @property
    def window(self) -> int:
        """How many messages it may hold at a time, stopped or not, besides as many as it has acknowledged and
        not committed, or more: this is no number that changes with each of them."""
        if self._unreliable:
            return DISPATCH_MESSAGES_MAX
        provisional = max(self.provisional, PROVISIONAL_MIN) if self.provisional else 0
        return self._prefetch + (1 << provisional.bit_length() if provisional else 0)

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
        assert self._notifier is not None  # or it might not speak
        if self._notifier.owes or channel.keeps:
            channel.connection.await_replies(channel)
            if channel.connection.outstanding.full:
                return 0
        if self._unreliable:
            return DISPATCH_MESSAGES_MAX - self.kept
        room = self._prefetch - self._outstanding - self.kept
        return 0 if channel.connection.outstanding.full else room

    def takes_kept(self) -> bool:
        """Return True if what was kept for a reply may be sent now."""
        return self in self.handle.consumers and not self.paused and self._may_speak()

    def _may_speak(self) -> bool:
        """Not on a handle that the machine knows to be closed, though we have not come to that event yet."""
        try:
            return self._notifier is not None and self._notifier.usable
        except LocalProtocolError:  # a stream of ours is under way on the channel (3.5.3.1)
            return False

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Encode NOTIFY for each, and remember them until they are acknowledged; or keep them for now."""
        channel = self.handle.channel
        assert self._notifier is not None  # or there was no room
        if self._notifier.owes or channel.keeps:
            channel.keep(Delivery(0, queue, self, position, messages), redelivered)
            return
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
        aside = unsent if isinstance(queue, FastQueue) and queue.owner is None else []
        if self._unreliable:
            positions = range(position, position + count)
            left = [at for at in positions if at - position + first not in aside] if aside else positions
            queue.acknowledged(left)
        else:
            channel.delivered(Delivery(first, queue, self, position, messages))
            self._outstanding += count
        for number in unsent:
            message = messages[number - first]
            if not aside:
                connection.ingress.undeliverable(message)
            else:
                connection.ingress.passed_over(connection.sender, queue.name)
            if not self._unreliable:
                channel.drop(number, aside=bool(aside))
            elif aside:
                queue.set_aside(self, position + number - first, message, rows[number - first][0])
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
        if not self._fit(rows):
            if len(messages) > 1:
                for at, message in enumerate(messages):
                    self._deliver_in_line(queue, position + at, [message], rows[at : at + 1])
            elif isinstance(queue, FastQueue) and queue.owner is None:
                connection.ingress.passed_over(connection.sender, queue.name)
                queue.set_aside(self, position, messages[0], rows[0][0])
            else:
                queue.acknowledged((position,))
                connection.ingress.undeliverable(messages[0])
            return
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

    def _fit(self, rows: list[NotifyRow]) -> bool:
        assert self._notifier is not None  # or there was no room
        return all(self._notifier.fits(name, head) for _, name, head, _ in rows)

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
        self.scan: QueryScan | None = None  # of a QUERY that is not answered yet
        self.peer_sessions: dict[str, PeerSession] = {}  # with peers, by their names

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
        self.channel.give_back_kept(self)
        subscriptions, self.subscriptions = self.subscriptions, []
        for subscription in subscriptions:
            subscription.attached = False
            subscription.local = None
            if subscription.key is None:
                host.unsubscribe(subscription)
        peer_sessions, self.peer_sessions = self.peer_sessions, {}
        for peer_session in peer_sessions.values():
            peer_session.end()


Receipt = FastHandle | tuple[FastHandle, int] | Join

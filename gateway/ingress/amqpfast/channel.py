"""One channel: what was delivered on it and not acknowledged, and its transaction.

Deliveries are kept in runs, as queues hand them out, for an acknowledgement counts for everything up to its
number. An acknowledgement, and a COMMIT, can only mean what the client may have seen: what was handed to the
socket before they were read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from gateway.broker.amqpfast.destinations import FastQueue
from gateway.broker.dispatcher import RoutingEntry
from gateway.broker.queue import Queue
from gateway.ingress.amqpfast.large_deliveries import LargeDeliveries
from gateway.model.message import Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome, worse
from gateway.protocols.amqpfast.commands import ChannelOpen
from gateway.protocols.amqpfast.spec import MESSAGE_NUMBER_MAX

if TYPE_CHECKING:
    from gateway.broker.amqpfast.partials import Partial
    from gateway.ingress.amqpfast.connection import FastConnection
    from gateway.ingress.amqpfast.handle import FastConsumer, FastHandle
    from gateway.ingress.amqpfast.incoming_transfers import IncomingTransfer
    from gateway.ingress.amqpfast.shared_folder import SharedFolder

NUMBERS_LOW: Final = (
    1_000_000  # message numbers left at which a channel is closed, for they cannot start anew
)


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

    def __init__(self, connection: FastConnection, command: ChannelOpen) -> None:
        self.connection = connection
        self.number = command.channel_id
        self.transacted = command.transacted
        self.restartable = command.restartable
        self.folder: SharedFolder | None = None  # for what goes out of band
        self.large_deliveries = LargeDeliveries(self)
        self.silent = False  # True: it is gone for the client, nothing may be answered any more
        self.closing = False  # it will be closed when this turn is done
        self.streamed = False  # a stream of ours was begun on it, which may still be under way
        self.handles: dict[int, FastHandle] = {}
        self.next_number = 1
        self.arriving: IncomingTransfer | None = None
        self.pending: list[tuple[RoutingEntry, Message]] = []  # sent within the transaction
        self.calls: list[Call] = []  # of peers, within the transaction
        self.pending_octets = 0  # of bodies that are in memory
        self.transferred: list[Partial] = []  # complete within the transaction
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
        large = self.large_deliveries.active
        self._sent = (self.next_number if large is None else large.limit) - 1

    def acknowledge(self, number: int, touched: dict[Queue, None]) -> None:
        """The client has everything up to `number`; `touched` gets the queues that may go on."""
        for delivery in self._take(min(number, self._sent)):
            delivery.consumer.acknowledged(delivery.count, touched)
            if self.transacted:
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

    def go_on(self) -> None:
        """A large message is done: its consumers may have more."""
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

    def drop(self, number: int) -> None:
        """What was just delivered under `number` could not be said to the client, and never can be."""
        last = self._deliveries.pop()
        for part in (last.split(number - last.number), last.split(1), last):
            if part.number == number and part.count == 1 and part is not last:
                part.consumer.acknowledged(1, {})
                part.settle()
            elif part.count:
                self._deliveries.append(part)

    # Transactions, 3.3.3.

    def commit(self, *, everything: bool) -> tuple[list[tuple[RoutingEntry, Message]], bool]:
        """What was acknowledged is, with `everything` also what was written before.

        Returns what was sent, and whether any of it all concerns the disk.
        """
        touched: dict[Queue, None] = {}
        settled, self._acked = self._acked, []
        if everything:
            seen = self._written if self.connection.stream.backlogged else self._sent
            confirmed = self._take(seen)
            for delivery in confirmed:
                delivery.consumer.acknowledged(delivery.count, touched)
            settled += confirmed
        for delivery in settled:
            delivery.settle()
            touched[delivery.queue] = None
        self._begin()
        for queue in touched:
            queue.dispatch()
        pending, self.pending = self.pending, []
        kept = any(queue.storage is not None for queue in touched)
        return pending, kept or any(message.durable for _, message in pending)

    def rollback(self) -> None:
        """What was sent is dropped; what was notified since the last boundary, or acknowledged, comes
        again."""
        self._drop_sent()
        back, self._acked = self._acked, []
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
        for partial in transferred:
            self.connection.ingress.partials.release(partial)

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
        self.arriving = None
        back = [*self._acked, *self._deliveries]
        self._acked.clear()
        self._deliveries.clear()
        self._give_back(back, {})
        self.connection.host.channel_gone(self)

"""State of AMQP/Fast channels and handles: consumers, unacknowledged deliveries, queries and transactions.

An acknowledgement applies to all deliveries up to its message number. Deliveries are therefore stored in
runs, as queues deliver them. An acknowledgement or a COMMIT can only apply to deliveries that the client may
have received: those that were passed to the socket before it was read.

A handle belongs to a channel and is opened for one destination. It has consumers, durable or temporary
subscriptions, an index of messages listed by QUERY, and sessions with peer services. Commands are executed by
the module `commands`, publishes by the module `publisher`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, Protocol

from mypy_extensions import mypyc_attr

from gateway import clock
from gateway.access.rights import Decision, Rights
from gateway.broker.amqpfast.destinations import FastQueue, TopicSubscription
from gateway.broker.amqpfast.partials import Partial, Partials
from gateway.broker.amqpfast.virtual_host import FastHost
from gateway.broker.poison import UNREADABLE, outcome_of_error
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import DISPATCH_MESSAGES_MAX, Queue
from gateway.broker.routing import RoutingEntry
from gateway.broker.shares import IDENTIFIER_BYTES
from gateway.errors import LocalProtocolError
from gateway.ingress.amqpfast.large_deliveries import LARGE_BYTES, LargeDeliveries, LargeDelivery
from gateway.ingress.amqpfast.query_scan import ListedIdentifiers, QueryScan
from gateway.ingress.amqpfast.shared_folder import SharedFolder
from gateway.ingress.delivery_limit import Outstanding
from gateway.ingress.handshake import HandshakingClient
from gateway.ingress.source import ListenerSource
from gateway.ingress.waiting_publishes import WaitingPublishes
from gateway.model.address import Address
from gateway.model.message import MESSAGE_BYTES, Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict, worse_outcome
from gateway.model.shares import Holding
from gateway.model.spooled_bodies import fault_of
from gateway.protocols.amqpfast.commands import ChannelOpen, HandleOpen
from gateway.protocols.amqpfast.events import Event, Fragment
from gateway.protocols.amqpfast.sender import Notifier, NotifyRow
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import MESSAGE_NUMBER_MAX, Service
from gateway.protocols.amqpfast.translate import encode_properties

NUMBERS_LOW: Final = (
    1_000_000  # message numbers left at which a channel is closed, as numbers cannot be reused
)


PROVISIONAL_MIN: Final = 16  # minimum addition to the window for acknowledgements in a transaction

UNDELIVERABLE: Final = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the head does not fit the client's frame-max"
)


class FastSource(ListenerSource):
    """Interface of an AMQP/Fast listener to its channels; collects what its clients publish into batches."""

    partials: Partials

    @abstractmethod
    def start(self, task: Callable[[], Awaitable[None]]) -> None:
        """Start a task in the background."""

    @abstractmethod
    def call_after_turn(self, then: Callable[[], None]) -> None:
        """Call `then` when the current pass of the event loop has been processed."""

    def undeliverable(self, message: Message, outcome: Outcome = UNDELIVERABLE) -> None:
        """Turn a message that cannot be encoded for its consumer into a dead letter.

        By default the reason is that its content header exceeds the client's frame-max.
        """
        super().undeliverable(message, outcome)


class FastListenerClient(HandshakingClient[ServerConnection]):
    """Interface of an AMQP/Fast client's connection to its channels and to the listener."""

    host: FastHost
    owner: str
    client_name: str
    channels: dict[int, FastChannel]
    handles: dict[int, FastHandle]
    holding: Holding
    outstanding: Outstanding
    sending: dict[LargeDeliveries, None]
    waiting: WaitingPublishes[Event]

    @property
    @abstractmethod
    def ingress(self) -> FastSource:
        """Object that receives the messages of all clients of the listener."""

    @property
    @abstractmethod
    def rights(self) -> Rights:
        """Rights of the client under the current rules."""

    @abstractmethod
    def check(self, right: str, service: str, name: str, *, whole: bool = False) -> None:
        """Check that the client has `right` (such as "read" or "write") on a destination.

        The destination is the queue, topic or peer service (`service`) called `name`. With `whole`, the right
        is required for all destinations whose names begin with `name`. Raises FastRefused 403 if it is not
        granted.
        """

    @abstractmethod
    def check_named(self, right: str, service: str, name: str, *, whole: bool) -> None:
        """Check that the client has `right` on the destination that a command names.

        If the destination does not exist, the right to create it is also required. With `whole`, a name that
        no destination has stands for all whose names begin with it; then nothing is created. Raises
        FastRefused 403.
        """

    @abstractmethod
    def demand(self, decision: Decision, right: str, service: str, name: str) -> None:
        """Log a denial and raise FastRefused 403 unless `decision` allows the access.

        The log and the error contain `right` and the destination, given by `service` and `name`.
        """

    @abstractmethod
    def await_replies(self, channel: FastChannel) -> None:
        """Call the channel's `send_held`, which sends waiting deliveries, when no reply is due any more."""

    @abstractmethod
    def delivered(self, channel: FastChannel, count: int, byte_count: int) -> None:
        """Count `count` messages that were encoded on a channel; `byte_count` is their size in bytes."""

    @abstractmethod
    def refuse(self, handle: FastHandle, code: int, text: str) -> None:
        """Close the handle or its channel, depending on the reply code; `text` is the reply text."""

    @abstractmethod
    def close_handle(self, handle: FastHandle, code: int, text: str) -> None:
        """Send HANDLE CLOSE with this reply code and text, and remove the handle."""

    @abstractmethod
    def close_channel(self, channel: FastChannel, code: int, text: str) -> None:
        """Send CHANNEL CLOSE with this reply code and text, and remove the channel."""

    @abstractmethod
    def reopen_channel(self, number: int) -> None:
        """Discard pending replies of a closed channel, because the client has reopened its number."""

    @property
    @abstractmethod
    def is_closing(self) -> bool:
        """True if the connection is closed or closing."""

    @abstractmethod
    def report_outcome(self, receipt: Receipt, outcome: Outcome) -> None:
        """Report the outcome of the message `receipt`: reply to it, or close its handle or channel."""

    @abstractmethod
    def count_replied(self, count: int) -> None:
        """Subtract `count` messages from the unsettled ones, because their replies have been encoded."""


class FragmentedMessage(Protocol):
    """Message of a client that is arriving in fragments on a handle."""

    handle: FastHandle


class ReturningStream(Protocol):
    """Stream of bytes from a peer service to the client.

    While a reply is due on the channel, the bytes wait.
    """

    def resume(self) -> None:
        """Write the waiting bytes, because no reply is due on the channel any more."""


class PeerSession(Protocol):
    """Session between a handle and a peer service."""

    def message(self, head: bytes, body: bytes) -> None:
        """Process a whole message from the client; `head` is its content header. Raises FastRefused."""

    def fragment(self, fragment: Fragment) -> None:
        """Process a fragment of a stream from the client. Raises FastRefused."""

    def end(self) -> None:
        """End the session, because the handle is closed."""


class DeliveryRun:
    """Run of unacknowledged messages of one queue, with consecutive message numbers and queue positions."""

    __slots__ = ("at", "consumer", "count", "messages", "number", "position", "queue")

    def __init__(
        self, number: int, queue: Queue, consumer: FastConsumer, position: int, messages: list[Message]
    ) -> None:
        self.number = number
        self.queue = queue
        self.consumer = consumer
        self.position = position
        self.messages = messages
        self.at = 0  # index of the first one in `messages`
        self.count = len(messages)

    def split(self, count: int) -> DeliveryRun:
        """Remove the first `count` messages from this run and return them as a run of their own."""
        first = DeliveryRun(self.number, self.queue, self.consumer, self.position, self.messages)
        first.at, first.count = self.at, count
        self.number += count
        self.position += count
        self.at += count
        self.count -= count
        return first

    def count_below(self, number: int) -> int:
        """Return how many messages of the run have a number below `number`."""
        return min(max(number - self.number, 0), self.count)

    def rows(self) -> list[tuple[int, Message]]:
        """Return the messages of the run, each with its position in the queue."""
        messages = self.messages[self.at : self.at + self.count]
        return list(enumerate(messages, self.position))

    def settle(self) -> None:
        """Remove the run's messages from their queue, because the client has acknowledged them."""
        self._subtract_outstanding()
        queue = self.queue
        queue.unacknowledged -= self.count
        if queue.removed_positions is not None:
            queue.removed_positions.extend(range(self.position, self.position + self.count))

    def delete_with_publishes(self) -> None:
        """Delete the run's messages from disk in the transaction that also stores new messages.

        Those are the messages published in this pass of the event loop.
        """
        if self.queue.storage is not None and not self.queue.deleted:
            self.queue.storage.forget_beside(range(self.position, self.position + self.count))

    def set_aside(self) -> None:
        """Return the first message of the run to its queue, for other consumers only."""
        self._subtract_outstanding()
        self.queue.set_aside(self.consumer, self.position, self.messages[self.at], False)

    def requeue(self) -> None:
        """Requeue the unacknowledged messages of this run, unless their queue is deleted."""
        self._subtract_outstanding()
        if not self.queue.deleted:
            self.queue.requeue(self.rows())

    def _subtract_outstanding(self) -> None:
        """Subtract the size of the run's messages from the connection's unacknowledged bytes."""
        connection = self.consumer.handle.channel.connection
        connection.outstanding.subtract(weight_of(self.messages[self.at : self.at + self.count]))


class OutcomeJoin:
    """Outcome collector of a message that is sent to several destinations.

    It collects `count` outcomes, then calls `then` with the worst of them.
    """

    __slots__ = ("_then", "remaining", "worst")

    def __init__(self, count: int, then: Callable[[Outcome], None]) -> None:
        self.remaining = count
        self.worst = ACCEPTED
        self._then = then

    def add_outcome(self, outcome: Outcome) -> None:
        """Record one outcome."""
        self.worst = worse_outcome(self.worst, outcome)
        self.remaining -= 1
        if not self.remaining:
            self._then(self.worst)


class PeerCall:
    """Message of a client to the peer service `peer`, sent on a handle; `head` is the content header."""

    __slots__ = ("body", "handle", "head", "peer")

    def __init__(self, handle: FastHandle, peer: str, head: bytes, body: bytes) -> None:
        self.handle = handle
        self.peer = peer
        self.head = head
        self.body = body


@mypyc_attr(native_class=False)  # weak references point to it
class FastChannel:
    """State of one AMQP/Fast channel."""

    def __init__(self, connection: FastListenerClient, command: ChannelOpen) -> None:
        self.connection = connection
        self.number = command.channel_id
        self.sender = connection.sender._replace(channel=command.channel_id)
        self.transacted = command.transacted
        self.restartable = command.restartable
        self.folder: SharedFolder | None = None  # for out-of-band transfers
        self.large_deliveries = LargeDeliveries(self)
        self.counted_bytes = 0  # bytes that count against its user's limit
        self.silent = False  # True: closed for the client, no more replies are allowed
        self.closing = False  # to be closed when this turn is done
        self.streamed = False  # an outgoing stream has begun, and may still be in progress
        self.handles: dict[int, FastHandle] = {}
        self.next_number = 1
        self.incoming: FragmentedMessage | None = None
        self.pending: list[tuple[RoutingEntry, Message]] = []  # sent within the transaction
        self.calls: list[PeerCall] = []  # of peers, within the transaction
        self.pending_bytes = 0  # of what the transaction has in memory
        self.is_restrained = False  # True while the user exceeds its part of the memory
        self.transferred: list[Partial] = []  # complete within the transaction
        self.streams: list[ReturningStream] = []  # of peers, with bytes that wait for a reply
        self._held_runs: list[
            tuple[DeliveryRun, bool]
        ] = []  # waiting deliveries without numbers, and `redelivered`
        self._deliveries: deque[DeliveryRun] = deque()
        self._acked: list[DeliveryRun] = []  # within the transaction
        self._boundary = 1  # first message number of the transaction
        self._sent = 0  # last message number passed to the socket
        self._written = 0  # last message number that the socket has certainly accepted

    # Deliveries.

    def take_numbers(self, count: int) -> int:
        """Reserve `count` message numbers. Return the first."""
        first = self.next_number
        self.next_number = first + count
        return first

    @property
    def is_exhausted(self) -> bool:
        """True if nothing more can be delivered, because message numbers have run out."""
        return self.next_number > MESSAGE_NUMBER_MAX - NUMBERS_LOW

    def delivered(self, delivery: DeliveryRun) -> None:
        """Record a delivery that the client has to acknowledge."""
        self._deliveries.append(delivery)
        self.connection.outstanding.byte_count += weight_of(delivery.messages)

    def flushed(self) -> None:
        """Record that all output encoded so far is being passed to the socket.

        Only deliveries in that output can be acknowledged.
        """
        if not self.connection.stream.backlogged:
            self._written = self._sent
        self._sent = self.large_deliveries.limit - 1

    @property
    def unacknowledged(self) -> int:
        """Number of messages sent and not acknowledged."""
        return sum([delivery.count for delivery in self._deliveries])

    def acknowledge(self, number: int, touched: dict[Queue, None]) -> None:
        """Acknowledge all messages up to `number`; add the queues to dispatch to `touched`.

        In a transaction the deliveries are settled by the commit.
        """
        for delivery in self._pop_deliveries(min(number, self._sent)):
            delivery.consumer.acknowledged(delivery.count, touched)
            if self.transacted:
                delivery.consumer.provisional += delivery.count
                self._acked.append(delivery)
            else:
                delivery.settle()
                touched[delivery.queue] = None

    def _pop_deliveries(self, number: int) -> list[DeliveryRun]:
        """Remove and return the deliveries up to a message number."""
        deliveries = self._deliveries
        removed = []
        while deliveries and deliveries[0].number <= number:
            first = deliveries[0]
            count = number - first.number + 1
            if count < first.count:
                removed.append(first.split(count))
                break
            removed.append(deliveries.popleft())
        return removed

    def unget(self, handle: FastHandle, number: int) -> bool:
        """Requeue the message `number`, which the client of `handle` rejects.

        Return False if the client has not received the message on this handle, or has acknowledged it.
        """
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
        self.connection.outstanding.subtract(weight_of(message for _, message in one.rows()))
        if not queue.deleted:
            ((position, message),) = one.rows()
            queue.return_unfit(position, message, one.consumer)
        for one_queue in touched:
            one_queue.dispatch()
        return True

    def requeue_unsent(self, number: int, *, is_missing: bool) -> None:
        """Requeue the message with this number, because it cannot be sent completely to the client.

        If `is_missing` is True, the message's body is lost: the message is removed from its queue instead.
        """
        at = self._find(number)
        if at >= 0:
            one = self._pick(at, number)
            touched: dict[Queue, None] = {}
            one.consumer.acknowledged(1, touched)
            if is_missing:
                one.settle()
            self._requeue([] if is_missing else [one], touched)

    def send_held(self) -> None:
        """Send the deliveries and streams that had to wait for replies on the channel.

        If a reply is still due, send nothing, and have this method called again when no reply is due any
        more.
        """
        self.large_deliveries.resume()
        if self.connection.machine.has_due_reply(self.number):
            self.connection.await_replies(self)
            return
        self._deliver_waiting()
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.resume()
        if self.large_deliveries.idle:
            self.resume()

    @property
    def has_held(self) -> bool:
        """True if deliveries wait for a reply, so that later ones must be queued behind them."""
        return bool(self._held_runs)

    def hold(self, delivery: DeliveryRun, redelivered: bool) -> None:
        """Hold a delivery until no reply is due on the channel (3.2.11).

        Its messages get their message numbers only then. Until then the client cannot acknowledge the
        messages, but they count against their consumer's window.
        """
        delivery.consumer.waiting_count += delivery.count
        self.connection.outstanding.byte_count += weight_of(delivery.messages)
        self._held_runs.append((delivery, redelivered))

    def _deliver_waiting(self) -> None:
        """Deliver the messages that waited for a reply; requeue those that their consumer cannot accept."""
        held_runs, self._held_runs = self._held_runs, []
        for delivery, redelivered in held_runs:
            consumer, queue = delivery.consumer, delivery.queue
            consumer.waiting_count -= delivery.count
            self.connection.outstanding.byte_count -= weight_of(delivery.messages)
            if queue.deleted:
                queue.unacknowledged -= delivery.count
            elif consumer.may_deliver_held():
                try:
                    consumer.deliver(queue, delivery.position, delivery.messages, redelivered)
                except Exception as error:
                    consumer.handle_error(error)
                    queue.requeue(delivery.rows())
                    queue.dispatch()
            else:
                queue.requeue(delivery.rows())
                queue.dispatch()

    def requeue_waiting(self, handle: FastHandle | None = None) -> None:
        """Requeue the messages of a handle, or of all handles (None), that wait in the channel to be sent."""
        back: list[DeliveryRun] = []
        remaining: list[tuple[DeliveryRun, bool]] = []
        for delivery, redelivered in self._held_runs:
            if handle is None or delivery.consumer.handle is handle:
                back.append(delivery)
                delivery.consumer.waiting_count -= delivery.count
            else:
                remaining.append((delivery, redelivered))
        self._held_runs = remaining
        if back:
            self._requeue(back, {})

    def resume(self) -> None:
        """Resume deliveries to the channel's consumers, because nothing blocks the channel any more."""
        for handle in list(self.handles.values()):
            handle.dispatch()

    def _pick(self, at: int, number: int) -> DeliveryRun:
        """Remove the message `number` from the run at index `at`. Return it as a run of one message."""
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
        """Return the index of the run that contains a message number, or -1."""
        for at, delivery in enumerate(self._deliveries):
            if delivery.number <= number < delivery.number + delivery.count:
                return at
        return -1

    def drop(self, number: int, *, aside: bool = False) -> None:
        """Remove the message delivered last, as `number`, from its queue: this client cannot receive it.

        With `aside`, return it to its queue for other consumers instead.
        """
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

    # Transactions (3.3.3).

    def commit(self, *, everything: bool) -> tuple[list[tuple[RoutingEntry, Message]], list[DeliveryRun]]:
        """Begin to commit the transaction. Return its publishes and the deliveries that it acknowledges.

        With `everything`, all deliveries that were written to the client before are acknowledged, too. The
        caller passes the deliveries to `finish` when the publishes have an outcome.
        """
        touched: dict[Queue, None] = {}
        settled, self._acked = self._acked, []
        if everything:
            sent_at = self._written if self.connection.stream.backlogged else self._sent
            confirmed = self._pop_deliveries(sent_at)
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
    def _subtract_provisional(deliveries: Iterable[DeliveryRun]) -> None:
        """Subtract the deliveries from the counts of messages that clients acknowledged in a transaction."""
        for delivery in deliveries:
            delivery.consumer.provisional -= delivery.count

    @staticmethod
    def settle(deliveries: Iterable[DeliveryRun], touched: dict[Queue, None]) -> None:
        """Settle deliveries, and add the queues to dispatch to `touched`."""
        for delivery in deliveries:
            delivery.settle()
            touched[delivery.queue] = None

    def finish(self, deliveries: list[DeliveryRun], *, accepted: bool) -> bool:
        """Settle the deliveries of a commit, or requeue them if a message of the commit was refused.

        `accepted` False means such a refusal. Return True if any settlement has to be written to disk.
        """
        touched: dict[Queue, None] = {}
        self._subtract_provisional(deliveries)
        if not accepted:
            self._requeue(deliveries, touched)
            return False
        self.settle(deliveries, touched)
        for queue in touched:
            queue.dispatch()
        return any(queue.storage is not None for queue in touched)

    def rollback(self) -> None:
        """Roll back the transaction: drop its publishes, and requeue what it has delivered or acknowledged.

        Large messages that have not begun to be sent stay with the channel, for the next transaction.
        """
        self._drop_sent()
        back, self._acked = self._acked, []
        self._subtract_provisional(back)
        touched: dict[Queue, None] = {}
        remaining: deque[DeliveryRun] = deque()
        unbegun = self.large_deliveries.unbegun
        for delivery in self._deliveries:
            if before := delivery.count_below(self._boundary):
                remaining.append(delivery.split(before))
            if begun := delivery.count_below(unbegun):
                delivery.consumer.acknowledged(begun, touched)
                back.append(delivery.split(begun))
            if delivery.count:
                remaining.append(delivery)
        self._deliveries = remaining
        self._begin()
        self._requeue(back, touched)

    def restrain(self, on: bool) -> None:
        """Forbid further messages in the transaction (`on` True), or allow them again.

        A message that arrives while they are forbidden closes the channel.
        """
        self.is_restrained = on

    def take_calls(self) -> list[PeerCall]:
        """Remove and return the transaction's messages to peer services."""
        calls, self.calls = self.calls, []
        return calls

    def _drop_sent(self) -> None:
        """Drop the transaction's publishes, messages to peer services, and transfers."""
        self.pending = []
        self.calls = []
        transferred, self.transferred = self.transferred, []
        for one in transferred:
            self.connection.ingress.partials.release(one)

    def _begin(self) -> None:
        """Begin the next transaction of a transacted channel."""
        self._boundary = self.large_deliveries.unbegun
        self.pending_bytes = 0

    @staticmethod
    def _requeue(deliveries: Iterable[DeliveryRun], touched: dict[Queue, None]) -> None:
        """Requeue deliveries, and dispatch their queues and those in `touched`."""
        for delivery in deliveries:
            delivery.requeue()
            touched[delivery.queue] = None
        for queue in touched:
            if not queue.deleted:
                queue.dispatch()

    def close(self) -> None:
        """Requeue all unacknowledged messages, because the channel is closed.

        The channel's handles are closed already.
        """
        self._drop_sent()
        self.incoming = None
        self.streams.clear()
        self.requeue_waiting()
        self._subtract_provisional(self._acked)
        back = [*self._acked, *self._deliveries]
        self._acked.clear()
        self._deliveries.clear()
        self._requeue(back, {})
        self.connection.host.delete_temporary_destinations(self)


# Approximate bytes of a delivery on the wire besides its body, to notice congestion between flushes.
DELIVERY_OVERHEAD: Final = 64
NAMES_MAX: Final = 4_096  # encoded destination names cached by a consumer
NO_HEAD: Final = bytes(11)

SERVICES: Final = {Service.QUEUE: "queue", Service.TOPIC: "topic", Service.PEER: "peer"}


def encoded_header_or_empty(message: Message) -> bytes:
    """Return the encoded content header of a browsed message, or an empty one if it cannot be encoded."""
    try:
        return encode_properties(message, clock.wall_offset())
    except Exception as error:
        outcome_of_error(error)
        return NO_HEAD


def name_bytes(address: Address) -> bytes:
    """Return the encoded destination name of an AMQP/Fast address."""
    return address.wire.partition(b":")[2]


def new_notifier(handle: FastHandle, *, delivered: bool = True) -> Notifier | None:
    """Return a new encoder for a handle's deliveries, or None if the client has closed the handle.

    `delivered` False encodes browsed copies instead, which need no acknowledgement. The protocol machine may
    have read HANDLE CLOSE although the connection has not processed it yet.
    """
    if handle.silent:
        return None
    try:
        return Notifier(handle.channel.connection.machine, handle.number, delivered=delivered)
    except LocalProtocolError:
        return None


class FastConsumer:
    """Consumer created by HANDLE CONSUME: receives messages from one or more queues.

    Its window limits the unacknowledged messages of all these queues together.
    """

    def __init__(self, handle: FastHandle, *, prefetch: int, unreliable: bool) -> None:
        self.handle = handle
        self.queues: list[PriorityQueue] = []
        self.provisional = 0  # messages acknowledged in an open transaction
        self.waiting_count = 0  # messages that wait for a reply on the channel
        self.prefetch = prefetch
        self.unreliable = unreliable
        self.outstanding = 0
        self._names: dict[bytes, bytes] = {}
        self._notifier = new_notifier(handle)

    @property
    def paused(self) -> bool:
        """True if HANDLE FLOW has stopped the consumer."""
        return self.handle.paused

    @property
    def window(self) -> int:
        """Maximum number of messages that the client may have unacknowledged; HANDLE FLOW does not change it.

        It is `prefetch` plus the number of messages acknowledged in an open transaction. That number is
        rounded up to a power of two, so that the window changes rarely.
        """
        if self.unreliable:
            return DISPATCH_MESSAGES_MAX
        provisional = max(self.provisional, PROVISIONAL_MIN) if self.provisional else 0
        return self.prefetch + (1 << provisional.bit_length() if provisional else 0)

    def capacity(self) -> int:
        """Return the number of messages that the consumer accepts now.

        Return 0 if it is paused, if the stream is congested, if a large message or an outgoing stream blocks
        the channel, or if the connection has too many unacknowledged bytes.
        """
        channel = self.handle.channel
        if (
            self.paused
            or not channel.large_deliveries.idle
            or channel.connection.stream.congested
            or not self._may_send()
        ):
            return 0
        assert self._notifier is not None  # or it could not send
        if self._notifier.has_due_reply or channel.has_held:
            channel.connection.await_replies(channel)
            if channel.connection.outstanding.full:
                return 0
        if self.unreliable:
            return DISPATCH_MESSAGES_MAX - self.waiting_count
        room = self.prefetch - self.outstanding - self.waiting_count
        return 0 if channel.connection.outstanding.full else room

    def may_deliver_held(self) -> bool:
        """Return True if messages that waited for a reply on the channel may be delivered now."""
        return self in self.handle.consumers and not self.paused and self._may_send()

    def _may_send(self) -> bool:
        """Return True if the handle may send messages now.

        Return False if the protocol machine has recorded the handle as closed, or if an outgoing stream
        blocks the channel.
        """
        try:
            return self._notifier is not None and self._notifier.usable
        except LocalProtocolError:  # an outgoing stream is in progress on the channel (3.5.3.1)
            return False

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Encode the messages as NOTIFY and record them until they are acknowledged.

        `position` is the queue position of the first message. If a reply is due on the channel, the messages
        wait for it. Messages that cannot be encoded become dead letters.
        """
        channel = self.handle.channel
        assert self._notifier is not None  # or there was no room
        if self._notifier.has_due_reply or channel.has_held:
            channel.hold(DeliveryRun(0, queue, self, position, messages), redelivered)
            return
        byte_count = weight_of(messages) - MESSAGE_BYTES * len(messages)
        name = self._name(queue.address) if isinstance(queue, FastQueue) else b""
        offset = clock.wall_offset()
        try:
            rows = [
                (redelivered, name or self._name(m.address), encode_properties(m, offset), m.body)
                for m in messages
            ]
        except Exception as error:
            self._deliver_singly(queue, position, messages, redelivered, error)
            return
        if byte_count > LARGE_BYTES or not channel.large_deliveries.idle:
            self._deliver_in_line(queue, position, messages, rows)
        else:
            self._send_deliveries(queue, position, messages, rows, byte_count)

    def _deliver_singly(
        self, queue: Queue, position: int, messages: list[Message], redelivered: bool, error: Exception
    ) -> None:
        """Deliver messages one by one after the encoding error `error`.

        A single message that fails becomes a dead letter. After any other error, this message and the later
        ones are requeued here, because the caller would requeue the delivered ones as well. `position` is the
        queue position of the first message.
        """
        if len(messages) > 1:
            for at, message in enumerate(messages):
                try:
                    self.deliver(queue, position + at, [message], redelivered)
                except Exception as fault:
                    self.handle_error(fault)
                    queue.requeue(list(enumerate(messages[at:], position + at)))
                    return
            return
        queue.acknowledged((position,))
        ingress = self.handle.channel.connection.ingress
        ingress.undeliverable(messages[0], outcome_of_error(error, queue=queue.name))

    def _send_deliveries(
        self, queue: Queue, position: int, messages: list[Message], rows: list[NotifyRow], byte_count: int
    ) -> None:
        """Send encoded messages and record them as unacknowledged, or settle them for an unreliable consumer.

        `position` is the queue position of the first message, `rows` has the encoded messages, `byte_count`
        their size. A message whose content header does not fit the client's frames is left to other
        consumers. In a temporary queue or a subscription, which have no others, it becomes a dead letter.
        """
        channel = self.handle.channel
        connection = channel.connection
        count = len(messages)
        assert self._notifier is not None  # or there was no room
        first = channel.next_number
        unsent = self._notifier.notify_many(first, rows)
        channel.take_numbers(count)
        aside = unsent if isinstance(queue, FastQueue) and queue.owner is None else []
        if self.unreliable:
            positions = range(position, position + count)
            remaining = [at for at in positions if at - position + first not in aside] if aside else positions
            queue.acknowledged(remaining)
        else:
            channel.delivered(DeliveryRun(first, queue, self, position, messages))
            self.outstanding += count
        for number in unsent:
            message = messages[number - first]
            if not aside:
                connection.ingress.undeliverable(message)
            else:
                connection.ingress.log_oversized(connection.sender, queue.name)
            if not self.unreliable:
                channel.drop(number, aside=bool(aside))
            elif aside:
                queue.set_aside(self, position + number - first, message, rows[number - first][0])
        connection.delivered(channel, count, byte_count)

    def handle_error(self, error: Exception) -> None:
        """Close the connection because of this internal error, at the end of this pass of the event loop."""
        self.handle.channel.connection.stream.fail_later(error)

    def _deliver_in_line(
        self, queue: Queue, position: int, messages: list[Message], rows: list[NotifyRow]
    ) -> None:
        """Queue messages in the channel's `large_deliveries`, which sends them one after the other.

        Used if one of the messages is large, or if a large message is being sent. `position` is the queue
        position of the first message, `rows` has the encoded messages.
        """
        channel = self.handle.channel
        connection = channel.connection
        if not self._fits_frames(rows):
            if len(messages) > 1:
                for at, message in enumerate(messages):
                    self._deliver_in_line(queue, position + at, [message], rows[at : at + 1])
            elif isinstance(queue, FastQueue) and queue.owner is None:
                connection.ingress.log_oversized(connection.sender, queue.name)
                queue.set_aside(self, position, messages[0], rows[0][0])
            else:
                queue.acknowledged((position,))
                connection.ingress.undeliverable(messages[0])
            return
        first = channel.take_numbers(len(messages))
        if not self.unreliable:
            channel.delivered(DeliveryRun(first, queue, self, position, messages))
            self.outstanding += len(messages)
        for at, message in enumerate(messages):
            redelivered, name, head, body = rows[at]
            channel.large_deliveries.queue_message(
                LargeDelivery(
                    self.handle,
                    first + at,
                    name,
                    head,
                    body,
                    partial(self._end_delivery, queue, position + at, message, first + at),
                    redelivered=redelivered,
                )
            )
        connection.delivered(channel, len(messages), 0)

    def _fits_frames(self, rows: list[NotifyRow]) -> bool:
        """Return True if the content headers of all encoded messages (`rows`) fit the client's frames."""
        assert self._notifier is not None  # or there was no room
        return all(self._notifier.fits(name, head) for _, name, head, _ in rows)

    def _end_delivery(self, queue: Queue, position: int, message: Message, number: int, sent: bool) -> None:
        """Settle or requeue a message that `_deliver_in_line` queued, or await its acknowledgement.

        `number` is its message number, `position` its queue position. `sent` True: it is settled if the
        consumer is unreliable, and otherwise awaits an acknowledgement. `sent` False: it is requeued, or
        becomes a dead letter if its body is lost.
        """
        channel = self.handle.channel
        if sent:
            channel.connection.delivered(channel, 0, 0)  # may be acknowledged from now on
            if self.unreliable:
                queue.acknowledged((position,))
            return
        fault = fault_of(message.body)
        is_missing = fault is not None and fault.is_lost and not queue.deleted
        if is_missing:
            channel.connection.ingress.undeliverable(message, UNREADABLE)
        if not self.unreliable:
            channel.requeue_unsent(number, is_missing=is_missing)
        elif is_missing:
            queue.acknowledged((position,))
        elif not queue.deleted:
            queue.requeue([(position, message)])
            queue.dispatch()

    def _name(self, address: Address) -> bytes:
        """Return the encoded name of an address.

        Equal addresses get the same object, which speeds up encoding.
        """
        found = self._names.get(address.wire)
        if found is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            found = self._names[address.wire] = name_bytes(address)
        return found

    def forget_names(self) -> None:
        """Drop cached destination names and encoded content headers, because memory is short."""
        self._names.clear()
        if self._notifier is not None:
            self._notifier.forget()

    def acknowledged(self, count: int, touched: dict[Queue, None]) -> None:
        """Increase the credit by `count` acknowledged messages. Add the consumer's queues to `touched`."""
        self.outstanding -= count
        for queue in self.queues:
            touched[queue] = None

    def cancelled(self, queue: Queue) -> None:
        """Stop consuming the queue, because it was deleted. A consumer that has no other queue ends."""
        self.queues = [one for one in self.queues if one is not queue]
        if not self.queues and self in self.handle.consumers:
            self.handle.consumers.remove(self)

    def stop(self) -> None:
        """Stop consuming. The client can still acknowledge the messages that it has received."""
        queues, self.queues = self.queues, []
        for queue in queues:
            queue.remove(self)


@mypyc_attr(native_class=False)  # weak references point to it
class FastHandle:
    """State of one AMQP/Fast handle."""

    def __init__(self, channel: FastChannel, command: HandleOpen, name: str) -> None:
        self.channel = channel
        self.number = command.handle_id
        self.service = SERVICES[Service(command.service_type)]
        self.name = name
        self.mime_type = command.mime_type
        self.encoding = command.encoding
        self.counted_bytes = 0  # bytes that count against its user's limit
        self.is_closed = False  # by the gateway; the client gets no more replies
        self.paused = False
        self._opened = command
        self.consumers: list[FastConsumer] = []
        self.subscriptions: list[TopicSubscription] = []
        self.entries: dict[bytes, tuple[RoutingEntry, ...]] = {}  # by the name in SEND
        self.generation = -1
        self.index: ListedIdentifiers | None = None
        self.indexed_bytes = 0  # of `counted_bytes`, those of the index
        self.browser: Notifier | None = None
        self.scan: QueryScan | None = None  # of a QUERY in progress
        self.peer_sessions: dict[str, PeerSession] = {}  # by the peer's name

    @property
    def silent(self) -> bool:
        """True if nothing more may be sent: the gateway has closed the handle, or its number is reused."""
        return self.is_closed or self.channel.connection.machine.is_reopened(self._opened)

    def pause(self, paused: bool) -> None:
        """Pause (`paused` True) or resume the handle's consumers, as HANDLE FLOW requests.

        Messages are meanwhile delivered to other consumers, or wait.
        """
        self.paused = paused
        self.dispatch()

    def dispatch(self) -> None:
        """Deliver waiting messages of the queues that the handle's consumers read."""
        for consumer in self.consumers:
            for queue in list(consumer.queues):
                queue.dispatch()

    def listed(self) -> ListedIdentifiers:
        """Return the identifiers that QUERY has given to messages on this handle; created at first use."""
        if self.index is None:
            self.index = ListedIdentifiers(1)
        return self.index

    def forget_entries(self) -> None:
        """Drop cached routing entries, destination names and content headers, because memory is short."""
        self.entries.clear()
        for consumer in self.consumers:
            consumer.forget_names()
        if self.browser is not None:
            self.browser.forget()

    def count_identifiers(self) -> str:
        """Add the identifiers that QUERY has given to messages to the user's memory for channels and handles.

        Return "", or the exceeded option with its value; then the new identifiers are not counted.
        """
        byte_count = IDENTIFIER_BYTES * len(self.listed())
        grown = byte_count - self.indexed_bytes
        holding = self.channel.connection.holding
        if grown < 0:
            holding.give(-grown)
        elif reached := holding.take(grown):
            return reached
        self.indexed_bytes = byte_count
        self.counted_bytes += grown
        return ""

    def close(self) -> None:
        """Remove the handle's consumers, temporary subscriptions and peer sessions.

        The client can still acknowledge on the channel what the handle has delivered.
        """
        host = self.channel.connection.host
        self.index = self.scan = None
        consumers, self.consumers = self.consumers, []
        for consumer in consumers:
            consumer.stop()
        self.channel.requeue_waiting(self)
        subscriptions, self.subscriptions = self.subscriptions, []
        for subscription in subscriptions:
            subscription.attached = False
            subscription.local = None
            if subscription.key is None:
                host.unsubscribe(subscription)
        peer_sessions, self.peer_sessions = self.peer_sessions, {}
        for peer_session in peer_sessions.values():
            peer_session.end()


Receipt = FastHandle | tuple[FastHandle, int] | OutcomeJoin

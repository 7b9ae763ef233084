"""Consumers of the session queues on one connection to the cluster.

The existence of a queue is checked before it is consumed; a missing queue is declared, with its bindings.
Many consumers share a few channels. To end a consumer means to cancel it, to requeue the messages that it has
not acknowledged, and to poll the queue's message count until the requeued messages are in the queue again.
Messages that the broker sends before it processes the cancel are requeued with the others.

A quorum queue applies some three dozen requeue commands immediately and the others as one batch when they are
on its log; a batch of more than 32 is put into an order of its own (RabbitMQ 3.10). So messages are requeued
16 at a time. Messages that are published meanwhile add to the count as if they had been requeued, so the
order is not guaranteed: the next consumer gets the fingerprints of the requeued messages (requeue_order.py).
The queue of a shared subscription has other consumers and no order, so its messages are requeued at once.

The broker closes a channel on which a message is unacknowledged for too long (its `consumer_timeout`). Then
its consumers restart on the others.

Queues have a single active consumer, so a consumer that starts before the last one has ended waits in the
broker. A replica that stops closes its channels: all messages delivered over one are requeued in one step.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body
from gateway.model.times import Monotonic
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import encode_short_string

log = structlog.get_logger(limited=True)

UNREACHABLE: Final = "inaccessible"  # in RabbitMQ's text if the node of a classic queue is down
# A queue whose count never reaches the expected one may have been full. Requeueing goes on after so many
# polls and so many seconds without a change. A busy broker is slow.
LOOKS_MAX: Final = 100
RETURN_SECS_MAX: Final = 2.0
RETURNED_MAX: Final = 16  # messages that are requeued at a time
LOOKS_MIN: Final = 3  # polls after each requeued chunk, at least
REMOVING_MAX: Final = 16  # queues that are being deleted at a time
PREFETCH_MAX: Final = 65_535  # basic.qos has two bytes for it
CHECKS_MAX: Final = 64  # checks that are sent at a time: when one fails, all of them are sent again
CHANNELS: Final = 8  # several, as a broker searches all unacknowledged deliveries of a channel
Done = Callable[[], None]
Freed = Callable[[Sequence["Content"]], None]
"""Callback that receives the contents that were requeued, in their order."""


class QueueOwner(Protocol):
    """Interface of the owner of a queue that is consumed: a session or a shared subscription."""

    queue: str
    prefetch: int
    arguments: Headers
    fresh: bool  # True if the queue does not exist yet
    unbound: dict[str, tuple[bool, Done]]  # keys to bind (True) or unbind, each with its callback

    @property
    def needs_queue(self) -> bool:
        """False if another owner has the queue: this replica must not declare it if it is missing."""

    @property
    def is_awaited(self) -> bool:
        """True if replies to clients must wait until this replica consumes the queue.

        From then on the queue cannot be deleted as unused.
        """

    @property
    def keeps_order(self) -> bool:
        """True if requeued messages must be delivered in their old order, so only one replica may consume."""

    def confirm(self, done: Callable[[bool], None]) -> None:
        """Query if the missing queue still belongs to this owner; call `done` with True if so, else False."""

    @property
    def keys(self) -> Iterable[str]:
        """Binding keys of the queue."""

    def deliver(self, consumer: ClusterConsumer, tag: int, redelivered: bool, content: Content) -> None:
        """Process a message of the queue. It must be settled at `consumer` by its delivery tag, `tag`.

        `redelivered` is the flag of the delivery.
        """

    def set_backlog(self, count: int) -> None:
        """Record that the queue had `count` messages when this replica began to consume it."""

    def unreachable(self) -> None:
        """Process that the queue cannot be consumed, because its cluster node is down."""

    def refuse(self, why: str) -> None:
        """Process that the cluster refuses to declare the queue, for the reason `why`."""


Content = tuple[bytes, bytes, Body]
"""Encoded address, encoded content header, and body of a message."""


class ConsumerConnection(Protocol):
    """Interface of the connection to the cluster that the consumers use."""

    machine: ClientConnection

    def wake(self) -> None:
        """Schedule the writing of encoded data for the end of this pass of the event loop."""

    def declare(
        self, method: m.Method, done: Done | None = None, consumer: ClusterConsumer | None = None
    ) -> None:
        """Send a declaration on the channel for declarations; `done` is called when the reply arrives.

        `Consumers.refuse` is called if the broker refuses to declare the queue of `consumer`.
        """

    def open_channel(self) -> int:
        """Open another channel. Return its number."""

    def handle_queue_ready(self, target: QueueOwner) -> None:
        """Send replies to clients that have waited for the queue of `target`.

        The queue is consumed now, or cannot be consumed.
        """


class ClusterConsumer:
    """Consumer of the queue of `target`, with the messages that it has received and not yet settled."""

    __slots__ = (
        "_consumers",
        "_unsettled",
        "channel",
        "ending",
        "has_channel",
        "is_checked",
        "name",
        "names",
        "on_finished",
        "queue",
        "requeued_contents",
        "returning",
        "target",
    )

    def __init__(self, consumers: Consumers, target: QueueOwner, name: str) -> None:
        self.target = target
        self.queue = target.queue
        self.name = name  # consumer tag; "" while it is not consuming
        self.names: set[str] = set()  # consumer tags for which messages may still arrive
        self.channel = 0
        self.has_channel = False  # True once its channel is assigned
        self.is_checked = False  # True while the check of its queue has no reply
        self.ending = False
        self.requeued_contents: list[Content] = []  # contents that are requeued when it ends
        self.returning: RequeueingConsumer | None = None  # requeueing in progress
        self.on_finished: Freed | None = None
        self._consumers = consumers
        self._unsettled: dict[int, Content] = {}

    def take(self, tag: int, content: Content) -> None:
        """Record a received message, which must be settled by its delivery tag."""
        self._unsettled[tag] = content

    def settle(self, tag: int) -> None:
        """Acknowledge the message with this delivery tag.

        A tag of a message that was requeued, or of a lost connection, is ignored.
        """
        if tag in self._unsettled:
            del self._unsettled[tag]
            self._consumers.acknowledge(self.channel, tag)

    def requeue(self, tag: int) -> None:
        """Requeue the message with this delivery tag for another consumer. An unknown tag is ignored."""
        if tag in self._unsettled:
            del self._unsettled[tag]
            self._consumers.requeue(self.channel, [tag])

    def finish(self) -> None:
        """Call the callback of `Consumers.end`, if there is one, with the requeued contents.

        Called when this replica does not consume the queue any more.
        """
        if self.on_finished is not None:
            self.on_finished(self.requeued_contents)

    def requeue_last(self, tag: int) -> None:
        """Move the message with delivery tag `tag` behind all other unsettled ones, to be requeued last."""
        content = self._unsettled.pop(tag, None)
        if content is not None:
            self._unsettled[tag] = content

    def drain(self) -> dict[int, Content]:
        """Remove all unsettled messages. Return their contents by delivery tag, in the order to requeue."""
        unsettled, self._unsettled = self._unsettled, {}
        return unsettled


class RequeueingConsumer:
    """Consumer whose unsettled messages are being requeued, chunk by chunk.

    After each chunk the queue's message count is polled until the queue has the messages again.
    """

    __slots__ = (
        "check_count",
        "checked_since",
        "consumer",
        "count",
        "expected_count",
        "queue",
        "started_at",
        "tags",
    )

    def __init__(self, consumer: ClusterConsumer, tags: list[int], started_at: Monotonic) -> None:
        self.consumer = consumer
        self.queue = consumer.target.queue
        self.tags = tags  # of messages that are not requeued yet
        self.expected_count = -1  # expected message count of the queue; -1 before the first poll
        self.count = -1  # message count of the last poll
        self.check_count = 0  # polls in a row with that count
        self.checked_since = LOOKS_MIN  # polls since the last requeued chunk
        self.started_at = started_at


class Removal(NamedTuple):
    """Deletion of a queue, or change of one of its bindings, that waits to be sent.

    `done` is called when the broker has confirmed it. A missing queue counts as unbound.
    """

    method: m.QueueDelete | m.QueueUnbind | m.QueueBind
    done: Done | None


class UnusedQueue(NamedTuple):
    """Check of a queue that is deleted if it has no consumers."""

    queue: str


CHECK_REPLIES: Final = (m.QueueDeclareOk, m.QueueDeleteOk, m.QueueUnbindOk, m.QueueBindOk)
Check = ClusterConsumer | RequeueingConsumer | Removal | UnusedQueue | m.Method


class Consumers:
    """Consumers of all session queues on one connection; also checks, deletions and bindings of queues.

    A check is a request whose failure closes the channel on which it is sent, so checks have their own
    channel.
    """

    def __init__(self, broker: ConsumerConnection, exchange: str, direct: str = "") -> None:
        """Create the consumers of the connection `broker`.

        `exchange` is the exchange to which queues are bound. `direct` is a second one to which each queue is
        bound by its name, or "".
        """
        self._broker = broker
        self._exchange = exchange
        self._direct = direct
        self._channels: list[int] = []
        self._reopening: set[int] = set()  # channels in place of closed ones, which are not open yet
        # Consumers without consume-ok yet, by channel and tag, with True if they are to be cancelled then:
        # RabbitMQ (3.10) ends the connection over a cancel that overtakes its own consume-ok.
        self._beginning: dict[tuple[int, str], bool] = {}
        self._checking = 0
        self._checks: deque[Check] = deque()
        self._sent = 0  # how many of the first checks were sent
        self._missing: set[ClusterConsumer] = (
            set()
        )  # whose queues are missing, while their owners are looked up
        self._awaited: set[QueueOwner] = set()  # whose queues are not consumed yet, and replies wait for that
        self._removals: deque[Removal] = deque()  # not sent yet: each that fails costs a channel
        self._removing = 0  # number of deletions that were sent
        self._own: tuple[m.Method, Callable[[bool], None]] | None = None  # check of the replica's queue
        self._consumers: dict[QueueOwner, ClusterConsumer] = {}
        self._consumed: Counter[str] = Counter()  # number of these consumers by queue
        self._by_name: dict[tuple[int, bytes], ClusterConsumer] = {}
        self._numbers = 0
        self._turn = 0
        self._acks: list[tuple[int, int]] = []
        self._live = True
        self._closed = False  # True when no queue is consumed any more

    # Channels.

    def open(self) -> None:
        """Open the channels for checks and consumers, because the connection is established."""
        self._checking = self._broker.open_channel()
        for _ in range(CHANNELS):
            self._channels.append(self._broker.open_channel())

    def use_channel(self, channel: int) -> bool:
        """Use a channel that the broker has opened. Return False if it is not a channel of the consumers."""
        if channel == self._checking:
            self._sent = 0
            self._send_checks()
            return True
        if channel in self._reopening:
            self._reopening.discard(channel)
            self._channels.append(channel)
        return channel in self._channels

    def handle_channel_closed(self, channel: int, text: str) -> bool:
        """Process that the broker has closed a channel for the reason `text`. Return True if that is handled.

        On the channel of the checks, the oldest check has failed: its queue is missing or still in use.
        Consumers of a closed channel are restarted on another one. Return False for other channels, or if no
        other channel of consumers is left.
        """
        if channel in self._channels and len(self._channels) > 1:
            self._restart_consumers(channel, text)
            return True
        if channel != self._checking or not self._checks:
            return False
        failed = self._take_check()
        self._checking = self._broker.open_channel()  # the other checks are repeated there
        self._report_own_queue(failed, there=False)
        if isinstance(failed, ClusterConsumer):
            self._handle_missing_queue(failed, text)
        elif isinstance(failed, RequeueingConsumer):
            self._remove_consumer(failed.consumer)
        elif isinstance(failed, Removal):
            if isinstance(failed.method, m.QueueDelete):
                log.info("RabbitMQ queue not deleted", queue=failed.method.queue, why=text)
            elif failed.done is not None:
                failed.done()
            self._removed()
        return True

    def _handle_missing_queue(self, consumer: ClusterConsumer, text: str) -> None:
        """Query if a missing queue is to be declared; give up its consumer if the queue's node is down.

        `text` is the broker's reason why the queue cannot be used.
        """
        target = consumer.target
        if UNREACHABLE in text:
            self._give_up(consumer, text)
            target.unreachable()
            return
        if consumer.ending or not target.needs_queue:  # its session may be over
            self._remove_consumer(consumer)
            return
        self._missing.add(consumer)
        target.confirm(partial(self._declare_if_needed, consumer))

    def refuse(self, consumer: ClusterConsumer, text: str) -> None:
        """Give up a consumer, because the broker has refused to declare its queue for the reason `text`."""
        self._give_up(consumer, text)
        consumer.target.refuse(text)

    def _give_up(self, consumer: ClusterConsumer, text: str) -> None:
        log.warning("RabbitMQ queue unusable, consumer stopped", queue=consumer.target.queue, why=text)
        consumer.ending = True
        self._remove_consumer(consumer)

    def _restart_consumers(self, channel: int, text: str) -> None:
        """Restart the consumers of a channel that the broker has closed for the reason `text`.

        The broker has requeued all messages that were not acknowledged there.
        """
        log.warning("RabbitMQ closed channel, consumers restarted", why=text)
        self._channels.remove(channel)
        self._acks = [ack for ack in self._acks if ack[0] != channel]
        self._beginning = {key: on for key, on in self._beginning.items() if key[0] != channel}
        self._reopening.add(self._broker.open_channel())
        for consumer in list(self._consumers.values()):
            if consumer.has_channel and consumer.channel == channel:
                consumer.requeued_contents += consumer.drain().values()
                if consumer.returning is not None:
                    consumer.returning.tags.clear()
                self._restart(consumer)

    def _declare_if_needed(self, consumer: ClusterConsumer, is_ours: bool) -> None:
        """Declare a missing queue if it is still needed.

        `is_ours` is False if the queue's session has ended or has another owner.
        """
        if consumer not in self._missing:
            return  # the connection was lost
        self._missing.discard(consumer)
        if consumer.ending or self._closed or not is_ours:
            self._remove_consumer(consumer)
            return
        log.info("RabbitMQ queue missing, declared again", queue=consumer.target.queue)
        self._declare(consumer)
        self._announce_if_ready(consumer.target)

    def process_method(self, channel: int, method: m.Method) -> bool:
        """Process a method on a channel of the consumers. Return False for other channels."""
        if channel == self._checking:
            if self._checks and isinstance(method, CHECK_REPLIES):
                found = self._take_check()
                self._sent -= 1
                self._send_checks()
                self._report_own_queue(found, there=True)
                if isinstance(found, ClusterConsumer) and isinstance(method, m.QueueDeclareOk):
                    found.target.set_backlog(method.message_count)
                    self._bind(found, list(found.target.unbound))
                    self._consume(found)
                    self._announce_if_ready(found.target)
                elif isinstance(found, RequeueingConsumer) and isinstance(method, m.QueueDeclareOk):
                    self._requeue_chunk(found, method.message_count)
                elif isinstance(found, UnusedQueue) and isinstance(method, m.QueueDeclareOk):
                    if not method.consumer_count and found.queue not in self._consumed:
                        self._check(m.QueueDelete(found.queue))
                elif isinstance(found, Removal):
                    self._removed()
                    if found.done is not None:
                        found.done()
            return True
        if channel not in self._channels:
            return False
        if isinstance(method, m.BasicConsumeOk):
            self._handle_consume_ok(channel, method.consumer_tag)
        elif isinstance(method, m.BasicCancel):
            self._cancelled_by_broker(channel, method.consumer_tag)
        elif isinstance(method, m.BasicCancelOk):
            self._handle_cancel_ok(channel, method.consumer_tag)
        return True

    def drop_all(self) -> None:
        """Drop all consumers with their unsettled messages, because the connection was lost."""
        self._live = False
        consumers = list(self._consumers.values())
        self._consumers.clear()
        self._consumed.clear()
        self._missing.clear()
        self._awaited.clear()
        for consumer in consumers:
            consumer.drain()
            consumer.finish()

    # Consuming.

    @property
    def is_live(self) -> bool:
        """True until the connection is lost."""
        return self._live

    @property
    def awaited(self) -> AbstractSet[QueueOwner]:
        """Owners of queues that are not consumed yet, and for which replies to clients wait."""
        return self._awaited

    def is_pending(self, target: QueueOwner) -> bool:
        """Return True if replies to clients wait for the queue of `target`.

        They wait until the queue is consumed, or, while its existence is checked, until its keys are bound.
        """
        consumer = self._consumers.get(target)
        return target in self._awaited or (
            consumer is not None
            and bool(target.unbound)
            and (consumer.is_checked or consumer in self._missing)
        )

    def consumes(self, target: QueueOwner) -> bool:
        """Return True if there is a consumer of `target`, even if it is starting or ending."""
        return target in self._consumers

    def begin(self, target: QueueOwner) -> None:
        """Start a consumer of the queue of `target`, unless there is one.

        Does nothing after `close`, or when the connection was lost.
        """
        if target in self._consumers or not self._live or self._closed:
            return
        self._numbers += 1
        consumer = self._consumers[target] = ClusterConsumer(self, target, str(self._numbers))
        self._consumed[consumer.queue] += 1
        if target.is_awaited:
            self._awaited.add(target)
        if target.fresh:
            self._declare(consumer)
        else:
            self._check(consumer)

    def end(self, target: QueueOwner, then: Freed | None) -> None:
        """Stop consuming the queue of `target`, and requeue the unsettled messages.

        `then` is called with the contents of these messages when they are requeued.
        """
        consumer = self._consumers.get(target)
        if consumer is None:
            if then is not None:
                then(())
            return
        if consumer.ending:
            consumer.on_finished = _combine(consumer.on_finished, then)
            return
        consumer.ending = True
        consumer.on_finished = then
        if consumer.has_channel:
            name = consumer.name
            self._cancel(consumer)
            self._requeue_unsettled(consumer, name)

    def renew(self, target: QueueOwner) -> None:
        """Restart the consumer of `target` with its present prefetch, or pause it if the prefetch is 0.

        Messages that it has received stay unsettled.
        """
        consumer = self._consumers.get(target)
        if consumer is None or not consumer.has_channel or consumer.ending:
            return
        self._cancel(consumer)
        if target.prefetch:
            self._numbers += 1
            consumer.name = str(self._numbers)
            self._consume_on(consumer)

    def close(self) -> None:
        """Close the channels of all consumers, because the replica stops.

        The broker requeues all their unsettled messages in one step.
        """
        self._closed = True
        self._awaited.clear()
        self.flush()
        consumers = list(self._consumers.values())
        self._consumers.clear()
        self._consumed.clear()
        self._by_name.clear()
        for channel in self._channels:
            self._broker.machine.close_channel(channel)
        self._channels.clear()
        self._broker.wake()
        for consumer in consumers:
            consumer.drain()
            consumer.ending = True
            consumer.finish()

    def touch(self, queue: str) -> None:
        """Restart the expiry of a queue that this replica needs but does not consume (passive declare)."""
        self._check(m.QueueDeclare(queue, passive=True))

    def check_queue_exists(self, queue: str, found: Callable[[bool], None]) -> None:
        """Check if a queue exists that this replica does not consume; call `found` with the result.

        Only one such check may be pending.
        """
        method = m.QueueDeclare(queue, passive=True)
        self._own = method, found
        self._check(method)

    def _report_own_queue(self, check: Check, *, there: bool) -> None:
        """Call the callback of `check_queue_exists` with `there` if `check` is its check.

        `there` is True if the queue exists.
        """
        if self._own is not None and check is self._own[0]:
            found, self._own = self._own[1], None
            found(there)

    def remove(self, queue: str) -> None:
        """Delete a queue unless it has consumers.

        The consumers are counted first: the broker closes the connection if a quorum queue is deleted on a
        condition. A consumer that this replica starts meanwhile counts, too: if the queue were deleted while
        it starts, the broker would close the connection (541). A consumer that starts later declares the
        queue.
        """
        self._check(UnusedQueue(queue))

    def delete(self, queue: str, done: Done | None) -> None:
        """Delete a queue; call `done`, if given, when the broker has confirmed that.

        If the queue's node is down the queue is not deleted, `done` is not called, and the broker closes the
        channel of the checks.
        """
        self._removals.append(Removal(m.QueueDelete(queue), done))
        self._send_removals()

    def set_binding(self, queue: str, key: str, bound: bool, done: Done) -> None:
        """Bind a queue that is not consumed by this replica to a key, or unbind it if `bound` is False.

        `done` is called when the broker has confirmed that, and also if the queue is missing.
        """
        self._removals.append(Removal(_binding(queue, self._exchange, key, bound), done))
        self._send_removals()

    def _removed(self) -> None:
        self._removing -= 1
        self._send_removals()

    def _send_removals(self) -> None:
        """Send waiting deletions and changes of bindings; at most REMOVING_MAX have no reply at a time."""
        while self._removals and self._removing < REMOVING_MAX:
            self._removing += 1
            self._check(self._removals.popleft())

    def _take_check(self) -> Check:
        """Remove the oldest check, which has its reply, and return it."""
        found = self._checks.popleft()
        if isinstance(found, ClusterConsumer):
            found.is_checked = False
        return found

    def _check(self, check: Check) -> None:
        if isinstance(check, ClusterConsumer):
            check.is_checked = True
        self._checks.append(check)
        self._send_checks()

    def _send_checks(self) -> None:
        """Send the oldest checks; at most CHECKS_MAX are without a reply at a time."""
        while self._sent < min(len(self._checks), CHECKS_MAX):
            self._send_check(self._checks[self._sent])
            self._sent += 1

    def _send_check(self, check: Check) -> None:
        if isinstance(check, ClusterConsumer):
            method: m.Method = m.QueueDeclare(check.target.queue, passive=True)
        elif isinstance(check, (RequeueingConsumer, UnusedQueue)):
            method = m.QueueDeclare(check.queue, passive=True)
        else:
            method = check.method if isinstance(check, Removal) else check
        self._broker.machine.send_method(self._checking, method)
        self._broker.wake()

    def _declare(self, consumer: ClusterConsumer) -> None:
        """Declare the queue of a consumer with its bindings, and consume it when that is confirmed."""
        target = consumer.target
        target.fresh = False

        keys = dict.fromkeys([*target.keys, *target.unbound])
        declare = m.QueueDeclare(target.queue, durable=True, arguments=target.arguments)
        bound = bool(keys or self._direct)
        consume = partial(self._consume, consumer)
        self._broker.declare(declare, None if bound else consume, consumer)
        if self._direct:
            self._broker.declare(m.QueueBind(target.queue, self._direct, target.queue), None, consumer)
        self._bind(consumer, keys)
        if bound:
            self._broker.declare(m.QueueDeclare(target.queue, passive=True), consume, consumer)

    def bind(self, target: QueueOwner, key: str) -> None:
        """Bind a key of the queue of `target`, or unbind it if `target.unbound` requests that.

        If the queue is not consumed, or its existence is being checked, do nothing: the key is bound later.
        """
        consumer = self._consumers.get(target)
        if consumer is not None and consumer not in self._checks and consumer not in self._missing:
            self._bind(consumer, [key])

    def _bind(self, consumer: ClusterConsumer, keys: Iterable[str]) -> None:
        """Bind the consumer's queue to each of these keys; unbind it from keys that have to be unbound.

        The `unbound` of the consumer's target says which keys have to be unbound.
        """
        target = consumer.target
        for key in keys:
            on, done = target.unbound.get(key, (True, _do_nothing))
            binding = _binding(target.queue, self._exchange, key, on)
            self._broker.declare(binding, _clear_then_call(target, key, done), consumer)

    def _consume(self, consumer: ClusterConsumer) -> None:
        """Assign a channel to a consumer, and consume its queue unless its prefetch is 0."""
        if consumer.ending:
            self._remove_consumer(consumer)
            return
        self._turn = (self._turn + 1) % len(self._channels)
        consumer.channel = self._channels[self._turn]
        consumer.has_channel = True
        if consumer.target.prefetch:
            self._consume_on(consumer)
        else:
            consumer.name = ""

    def _consume_on(self, consumer: ClusterConsumer) -> None:
        """Consume the queue of a consumer on its channel, under its consumer tag."""
        channel, target = consumer.channel, consumer.target
        self._by_name[channel, encode_short_string(consumer.name)] = consumer
        consumer.names.add(consumer.name)
        self._beginning[channel, consumer.name] = False
        self._send(channel, m.BasicQos(prefetch_count=target.prefetch))
        self._send(channel, m.BasicConsume(target.queue, consumer.name))

    def _handle_consume_ok(self, channel: int, name: str) -> None:
        """Process consume-ok of the consumer tag `name`; cancel the tag if that was requested meanwhile."""
        if self._beginning.pop((channel, name), False):
            self._send(channel, m.BasicCancel(name))
        consumer = self._by_name.get((channel, encode_short_string(name)))
        if consumer is not None:
            self._stop_awaiting(consumer.target)

    def _stop_awaiting(self, target: QueueOwner) -> None:
        """Send replies to clients that wait for the queue of `target`.

        The queue is consumed now, or cannot be consumed.
        """
        self._awaited.discard(target)
        self._announce_if_ready(target)

    def _announce_if_ready(self, target: QueueOwner) -> None:
        if not self.is_pending(target):
            self._broker.handle_queue_ready(target)

    def _cancel(self, consumer: ClusterConsumer) -> None:
        """Cancel the consumer's present tag, if it has one; if consume-ok is pending, do that afterwards."""
        channel, name = consumer.channel, consumer.name
        consumer.name = ""
        if (channel, name) in self._beginning:
            self._beginning[channel, name] = True
        elif name:
            self._send(channel, m.BasicCancel(name))

    def _handle_cancel_ok(self, channel: int, name: str) -> None:
        """Process cancel-ok: no more messages arrive under the consumer tag `name`."""
        consumer = self._by_name.pop((channel, encode_short_string(name)), None)
        if consumer is not None:
            consumer.names.discard(name)
            if consumer.ending:
                self._requeue_unsettled(consumer, name)

    def _send(self, channel: int, method: m.Method) -> None:
        self._broker.machine.send_method(channel, method)
        self._broker.wake()

    def _requeue_unsettled(self, consumer: ClusterConsumer, name: str) -> None:
        """Requeue the unsettled messages of an ending consumer, once all its consumer tags are cancelled.

        `name` is one of these tags; messages that still arrive under it are requeued, too.
        """
        if consumer.names:
            return
        unsettled = consumer.drain()
        consumer.requeued_contents = list(unsettled.values())
        if (
            unsettled and not consumer.target.keeps_order
        ):  # others consume meanwhile, so the count means nothing
            self.requeue(consumer.channel, list(unsettled))
            self._remove_consumer(consumer)
        elif unsettled:
            consumer.names.add(name)
            self._by_name[consumer.channel, encode_short_string(name)] = consumer
            consumer.returning = RequeueingConsumer(consumer, list(unsettled), clock.now())
            self._check(consumer.returning)
        else:
            self._remove_consumer(consumer)

    def _requeue_chunk(self, returning: RequeueingConsumer, count: int) -> None:
        """Requeue the next chunk of a consumer's messages, or poll the queue's message count again.

        `returning` has the messages still to be requeued; `count` is the polled message count of the queue.
        """
        if self._closed:
            return
        now = clock.now()
        if count != returning.count:
            returning.count, returning.check_count, returning.started_at = count, 0, now
        returning.check_count += 1
        returning.checked_since += 1
        vain = returning.check_count > LOOKS_MAX and now - returning.started_at > RETURN_SECS_MAX
        if (count >= returning.expected_count and returning.checked_since >= LOOKS_MIN) or vain:
            some = len(returning.tags) if vain else RETURNED_MAX
            tags, returning.tags = returning.tags[:some], returning.tags[some:]
            self.requeue(returning.consumer.channel, tags)
            if vain or not tags:
                self._remove_consumer(returning.consumer)
                return
            returning.expected_count = min(count + len(tags), _max_length_of(returning.consumer.target))
            returning.checked_since = 0
        self._check(returning)

    def _remove_consumer(self, consumer: ClusterConsumer, *, restarts: bool = False) -> None:
        """Remove a consumer that has ended, and report its end to the caller of `end`.

        With `restarts` True a new consumer of the queue follows: replies to clients go on waiting for the
        queue.
        """
        for name in consumer.names:
            self._by_name.pop((consumer.channel, encode_short_string(name)), None)
            if (consumer.channel, name) in self._beginning:
                self._beginning[consumer.channel, name] = True
        if self._consumers.get(consumer.target) is consumer:
            del self._consumers[consumer.target]
            self._consumed[consumer.queue] -= 1
            if not self._consumed[consumer.queue]:
                del self._consumed[consumer.queue]
            consumer.finish()
            if not restarts:
                self._stop_awaiting(consumer.target)

    def _cancelled_by_broker(self, channel: int, name: str) -> None:
        """Restart a consumer that the broker has cancelled, because its queue was deleted or moved.

        It is not restarted if it is ending, or if its session has another owner.
        """
        self._beginning.pop((channel, name), None)
        consumer = self._by_name.pop((channel, encode_short_string(name)), None)
        if consumer is not None:
            log.warning("RabbitMQ cancelled consumer", queue=consumer.target.queue)
            consumer.drain()
            self._restart(consumer)

    def _restart(self, consumer: ClusterConsumer) -> None:
        """Forget a consumer that the broker has ended. Start a new consumer if its queue is still needed."""
        restarts = not consumer.ending and consumer.target.needs_queue
        self._remove_consumer(consumer, restarts=restarts)
        if restarts:
            self.begin(consumer.target)

    # Messages.

    def delivered(self, channel: int, name: bytes, tag: int, redelivered: bool, content: Content) -> None:
        """Pass a message to its consumer, or requeue it if the consumer has ended.

        `name` is the encoded consumer tag, `tag` the delivery tag, `redelivered` the flag of the delivery.
        """
        consumer = self._by_name.get((channel, name))
        if consumer is None:
            self.requeue(channel, [tag])
            return
        if consumer.returning is not None:
            consumer.returning.tags.append(tag)
            consumer.requeued_contents.append(content)
            return
        consumer.take(tag, content)
        if not consumer.ending:
            consumer.target.deliver(consumer, tag, redelivered, content)

    def acknowledge(self, channel: int, tag: int) -> None:
        """Collect an acknowledgement of the delivery tag `tag`, which `flush` encodes."""
        if self._live and not self._closed:
            self._acks.append((channel, tag))
            self._broker.wake()

    def requeue(self, channel: int, tags: list[int]) -> None:
        """Requeue the messages with these delivery tags."""
        if self._live and tags and not self._closed:
            self.flush()
            for tag in tags:
                self._broker.machine.nack(channel, tag, requeue=True)
            self._broker.wake()

    def flush(self) -> None:
        """Encode the collected acknowledgements for sending."""
        acks, self._acks = self._acks, []
        for channel, tag in acks:
            self._broker.machine.ack(channel, tag)


def _max_length_of(target: QueueOwner) -> int:
    """Return the maximum number of messages (x-max-length) in the queue of `target`."""
    value = dict(target.arguments).get("x-max-length")
    return value.value if value is not None and isinstance(value.value, int) else sys.maxsize


def _combine(first: Freed | None, second: Freed | None) -> Freed | None:
    """Return a callback that calls both callbacks.

    If only one callback is given, that one is returned; if none is given, None.
    """
    if first is None or second is None:
        return first or second

    def call(contents: Sequence[Content]) -> None:
        first(contents)
        second(contents)

    return call


def _do_nothing() -> None:
    """Do nothing: used as callback by bindings that need none."""


def _binding(queue: str, exchange: str, key: str, on: bool) -> m.QueueBind | m.QueueUnbind:
    return m.QueueBind(queue, exchange, key) if on else m.QueueUnbind(queue, exchange, key)


def _clear_then_call(target: QueueOwner, key: str, done: Done) -> Done:
    """Return a callback that removes `key` from `target.unbound` and calls `done`.

    The callback does nothing if another binding or unbinding of the key was requested meanwhile.
    """

    def call() -> None:
        if target.unbound.get(key, (True, None))[1] is done:  # else the key was changed again since
            del target.unbound[key]
            done()

    return call

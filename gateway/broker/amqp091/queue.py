"""AMQP 0-9-1 queue: owner, time to live, limits, dead-lettering, priorities, active consumer.

The class Queue of all protocols delivers the messages. The classes here add what follows a delivery
(`dispatch`): messages beyond a limit are dropped, dead ones become dead letters, and an alarm is set for the
expiry of the head. If very many messages expire at once they are dropped in pieces, in several passes of the
event loop, and those behind them wait.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from gateway import clock
from gateway.broker.amqp091.arguments import QueueArguments, queue_arguments
from gateway.broker.amqp091.dead_letter_routing import (
    DELIVERY_LIMIT,
    EXPIRED,
    EXPIRED_MAX,
    REJECTED,
    RETRY_SECS,
    TOO_MANY,
    DeadLettering,
    with_durability,
)
from gateway.broker.amqp091.deliveries import DeliveryCounts
from gateway.broker.amqp091.policies import Policy, with_policy
from gateway.broker.pressure import FULL, FullQueues
from gateway.broker.priorities import STALE_MAX, PriorityQueue
from gateway.broker.queue import Consumer, Storage
from gateway.broker.scheduler import CallScheduler, ScheduledCall
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message, bodies_of
from gateway.model.properties import Headers
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqp091.translate import priority_of
from gateway.store.gate import Gate

if TYPE_CHECKING:
    from gateway.broker.amqp091.exchange import Exchange

BEYOND: Final = sys.maxsize  # a position that no message has


class QueueHost(Protocol):
    """Interface of the virtual host for its queues."""

    name: str
    queue_messages_max: int
    queue_bytes_max: int
    dead_lettering: DeadLettering
    alarms: CallScheduler
    policies: Sequence[Policy]
    full_queues: FullQueues

    @property
    def disk_fails(self) -> bool:
        """True if durable queues refuse persistent messages, because the disk fails."""

    def delete_queue(self, queue: AmqpQueue) -> int:
        """Delete a queue. Return the number of ready messages."""


class AmqpQueue(PriorityQueue):
    """Queue of an AMQP 0-9-1 virtual host."""

    def __init__(
        self,
        name: str,
        host: QueueHost,
        *,
        durable: bool,
        auto_delete: bool,
        arguments: Headers,
        options: QueueArguments,
        owner: object | None = None,
        user: str | None = "",
        **more: Any,
    ) -> None:
        super().__init__(
            name,
            durable=durable,
            messages_max=host.queue_messages_max,
            bytes_max=host.queue_bytes_max,
            full_queues=host.full_queues,
            **more,
        )
        self.auto_delete = auto_delete
        self.owner = owner  # connection of an exclusive queue
        self.user = user  # user of the connection that declared it; None for the configuration
        self.exclusive_consumer: Consumer | None = None
        self.arguments = arguments
        self.options = options
        self.used = clock.monotonic()
        self.bound: dict[Exchange, None] = {}
        self.deliveries: DeliveryCounts | None = None  # of a quorum queue
        self._host = host
        self._dead_lettering = host.dead_lettering
        self._limited = options.length_max is not None or options.bytes_max is not None
        self._refuses = self._limited and options.overflow != "drop-head"
        self.body_byte_count = 0  # of what waits here, for `x-max-length-bytes`; 0 without that limit
        self._ranks: dict[Consumer, int] = {}  # of the consumers whose priority is not 0
        # Messages from this position on are delivered to waiting consumers even if expired.
        self._arriving = BEYOND
        self._droppable = EXPIRED_MAX  # expired messages that this turn may drop
        self._alarm: ScheduledCall | None = None  # for the expiry of the head
        self._watch: ScheduledCall | None = None  # for a check if it is used
        self._waiting_gets: list[Callable[[], None]] = []  # called at the next dispatch

    # Bodies, which `x-max-length-bytes` limits.

    def attach_storage(self, storage: Storage, end: int, byte_count: int, gate: Gate) -> None:
        """Store the queue's messages in `storage` from now on, with the parameters of Queue.attach_storage.

        If `x-max-length-bytes` limits the queue, all stored messages are read to count the bytes of their
        bodies: the store has recorded only sizes that include properties.
        """
        super().attach_storage(storage, end, byte_count, gate)
        if self.options.bytes_max is not None and storage.first is not None:
            self.body_byte_count += sum(map(bodies_of, storage.stored_before(storage.first)))

    def add_to_size(self, messages: Sequence[Message]) -> None:
        """Add new messages to the size of the queue in bytes.

        The size of their bodies is also counted separately, if it is limited.
        """
        super().add_to_size(messages)
        if self.options.bytes_max is not None:
            self.body_byte_count += bodies_of(messages)

    def subtract_from_size(self, messages: Sequence[Message], byte_count: int | None = None) -> None:
        """Subtract messages, which leave the queue, from the size of the queue in bytes.

        `byte_count` is the messages' size in bytes; None if it must be computed. The size of their bodies is
        also counted separately, if it is limited.
        """
        super().subtract_from_size(messages, byte_count)
        if self.options.bytes_max is not None:
            self.body_byte_count -= bodies_of(messages)

    def subtract_missing_bytes(self, byte_count: int) -> None:
        """Subtract bytes that were counted but are not on disk.

        Called by the storage when it has read messages. If all messages are in memory now, their bodies are
        counted again.
        """
        if byte_count and self.options.bytes_max is not None:
            messages = list(self.messages_in_memory())
            if len(messages) == len(self):
                self.body_byte_count = bodies_of(messages)
        super().subtract_missing_bytes(byte_count)

    def purge(self) -> int:
        """Drop all ready messages, and return their number."""
        self.body_byte_count = 0
        return super().purge()

    # Publishing.

    def publish(self, sub_batch: SubBatch) -> None:
        """Queue the messages of a sub-batch; with an `x-overflow` that rejects, only those that fit."""
        if self._refuses:
            self._publish_what_fits(sub_batch)
        else:
            self._publish(sub_batch)

    def _publish(self, sub_batch: SubBatch) -> None:
        self._arriving = self.next
        super().publish(sub_batch)
        self._arriving = BEYOND

    def _publish_what_fits(self, sub_batch: SubBatch) -> None:
        """Queue the messages of a sub-batch, and refuse or drop those that exceed the queue's limits.

        Messages that consumers receive at once make space for the next ones.
        """
        at = 0
        while at < len(sub_batch.messages):
            count = self._fitting_count(sub_batch.messages, at)
            run = part_of(sub_batch, at, at + max(count, 1))
            if count:
                self._publish(run)
            elif self.may_hold or self.is_named_by(run.messages[0]):
                self._full_queues.refused += 1
                if self.options.overflow == "reject-publish-dlx":
                    self._dead_lettering.add_dead_message(self, run.messages[0], TOO_MANY)
                run.settle(FULL)
            else:
                self.drop_copies(run.messages)
                run.accept()
            at += len(run.messages)
        self.finish_dispatch()

    def _fitting_count(self, messages: Sequence[Message], at: int) -> int:
        """Return how many messages, from index `at` on, fit into the queue's limits."""
        options = self.options
        most = BEYOND if options.length_max is None else options.length_max - len(self)
        byte_count = BEYOND if options.bytes_max is None else options.bytes_max - self.body_byte_count
        count = 0
        while count < most and at + count < len(messages):
            byte_count -= len(messages[at + count].body)
            if byte_count < 0:
                break
            count += 1
        return count

    @property
    def is_delay(self) -> bool:
        """False, because the queue has messages for consumers, and not those that an exchange delays."""
        return False

    @property
    def owning_user(self) -> str | None:
        """Name of the user who declared the queue; None for the configuration."""
        return self.user

    def is_named_by(self, message: Message) -> bool:
        """Return True if the message was published to the default exchange."""
        address = message.address
        return not address.scope and address.protocol == AMQP091.name

    def _count_dropped(self, messages: Sequence[Message]) -> None:
        if self.options.dead_letter_exchange is None:
            super()._count_dropped(messages)
            return
        for message in messages:
            self._dead_lettering.add_dead_message(self, message, TOO_MANY)
        self.finish_dispatch()

    def prepare_messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages with the expiry of `x-message-ttl` applied.

        Changed messages are copies, because other queues share the originals.
        """
        ttl_ms = self.options.ttl_ms
        if ttl_ms is None:
            return messages
        latest = clock.utc() + ttl_ms / 1000
        return [
            Message(
                m.address,
                m.body,
                m.property_set,
                m.assurance,
                m.durable,
                m.retain,
                min(m.expires, latest) if m.expires else latest,
                m.hops,
                m.sender,
            )
            for m in messages
        ]

    # Consumers.

    def add_ranked(self, consumer: Consumer, rank: int, *, exclusive: bool) -> None:
        """Add a consumer; `rank` is its priority (`x-priority`).

        With `exclusive` no other consumer may be added until this one is removed.
        """
        if exclusive:
            self.exclusive_consumer = consumer
        if rank:
            self._ranks[consumer] = rank
        self.used = clock.monotonic()
        self.add(consumer)

    def remove(self, consumer: Consumer, *, requeues: bool = False) -> None:
        """Remove a consumer. In a queue with a single active consumer, the next one becomes active.

        With `requeues` the caller returns unacknowledged messages to the queue and dispatches it afterwards,
        so that the next consumer gets them first.
        """
        super().remove(consumer)
        self._ranks.pop(consumer, None)
        if self.exclusive_consumer is consumer:
            self.exclusive_consumer = None
        self.used = clock.monotonic()
        self.watch_use()
        if self.options.single_active:
            self._offers = bool(self._aside)  # to the one that is active now
            if not requeues:
                self.dispatch()

    def watch_use(self) -> None:
        """Schedule the deletion of a queue with `x-expires`, if it stays unused for that time."""
        if self.options.expires_ms is None or self._watch is not None or self.consumers:
            return
        remaining_secs = self.used + self.options.expires_ms / 1000 - clock.monotonic()
        self._watch = self._host.alarms.set(clock.utc() + remaining_secs, self._look_at_use)

    def _look_at_use(self) -> None:
        self._watch = None
        if self.consumers or self.options.expires_ms is None:
            return
        if clock.monotonic() - self.used >= self.options.expires_ms / 1000:
            self._host.delete_queue(self)
        else:
            self.watch_use()

    def _open(self) -> list[tuple[Consumer, int]]:
        """Return the consumers that may get the next message, each with the number that it accepts.

        These are the single active consumer, or the consumers of the highest priority, if they have credit.
        The list is empty while more messages have expired than may be dropped at once, and while too many
        dead letters wait.
        """
        if self._is_blocked():
            return []
        if self._head_expired():
            self.drop_expired(max(self._droppable, 0))
            if self._head_expired():
                return []
        if self.options.single_active:
            first = self.consumers[:1]
            return [(one, room) for one in first if (room := one.capacity()) > 0]
        open_ = super()._open()
        if self._ranks and len(open_) > 1:
            ranks = self._ranks
            best = max(ranks.get(consumer, 0) for consumer, _ in open_)
            return [one for one in open_ if ranks.get(one[0], 0) == best]
        return open_

    def _eligible(self) -> list[Consumer]:
        """Return the single active consumer, or all consumers by their priority, highest first."""
        if self.options.single_active:
            return self.consumers[:1]
        if not self._ranks:
            return self.consumers
        return sorted(self.consumers, key=lambda one: -self._ranks.get(one, 0))

    # Delivery and settlement.

    def _expire_max(self) -> int:
        """Return how many messages may expire now.

        The number is smaller the more dead messages wait to be routed, and 0 while expired messages must
        stay.
        """
        return 0 if self._keeps_expired else max(EXPIRED_MAX - self._dead_lettering.count_of(self), 0)

    @property
    def _keeps_expired(self) -> bool:
        """True while expired messages must stay in the queue, because they cannot become dead letters.

        That is so while the failing disk would refuse the dead letters, and while too many dead messages
        wait.
        """
        if self.options.dead_letter_exchange is None:
            return False
        is_refused = self.storage is not None and self._host.disk_fails
        return is_refused or self._dead_lettering.has_too_many(self)

    def _head_expired(self) -> bool:
        if self._returned:
            head = self._returned[0][1]
        elif self._ready and self._first < self._arriving:
            head = self._ready[0]
        else:
            return False
        return bool(head.expires) and head.expires <= clock.utc()

    def dispatch(self) -> None:
        """Deliver ready messages to consumers, then drop excess messages and send dead letters."""
        self._droppable = self._expire_max()
        super().dispatch()
        self.finish_dispatch()
        self._call_gets()

    def _call_gets(self) -> None:
        waiting, self._waiting_gets = self._waiting_gets, []
        for then in waiting:
            then()

    def _is_blocked(self) -> bool:
        """Return True if the queue may deliver nothing, because too many dead letters wait to be routed."""
        return self.options.dead_letter_exchange is not None and self._dead_lettering.is_blocked(self)

    def when_takeable(self, then: Callable[[], None]) -> bool:
        """Call `then` once, when `take`, which has returned None now, may return a message. Return True.

        Return False without a later call if that is not to be expected soon: no message is left, or the
        failing disk holds back expired messages or dead messages of the same owner.
        """
        if self.loading:
            assert self.storage is not None
            self.storage.when_loaded(then)
            return True
        is_blocked = self._is_blocked() and not self._host.disk_fails
        if len(self) and (is_blocked or (self._head_expired() and not self._keeps_expired)):
            self._waiting_gets.append(then)
            return True
        return False

    def take(self) -> tuple[int, Message, bool] | None:
        """Remove and return the next message, for basic.get, as (position, message, redelivered).

        Returns None if there is none, or while more messages have expired than may be dropped at once, or too
        many dead messages wait.
        """
        if self._is_blocked():
            return None
        self._droppable = self._expire_max()
        self.drop_expired(self._droppable)
        found = None if self._head_expired() else super().take()
        self.settle_head()  # the response to a `get` counts what is left
        return found

    def reject(self, position: int, message: Message) -> None:
        """Reject a delivered message: it becomes a dead letter, or is dropped."""
        self.unacknowledged -= 1
        self._die(position, message, REJECTED)

    def wake(self) -> None:
        """Read the first messages from disk after a restart, so that they expire even without consumers.

        Does nothing for a queue that has neither `x-message-ttl` nor a dead letter exchange.
        """
        if self.options.ttl_ms is not None or self.options.dead_letter_exchange is not None:
            self.dispatch()

    def settle_head(self) -> None:
        """Drop expired messages at the head of the queue, so that no message count includes them."""
        self.drop_expired(self._expire_max())
        self.finish_dispatch()

    def _die(self, position: int, message: Message, reason: str) -> None:
        """Register a message as dead, for the `reason` of its dead letter.

        It is settled together with its dead letter, or at once if the queue has no dead letter exchange.
        """
        if self._dead_lettering.add_dead_message(self, message, reason, position):
            self.awaiting_dead_letters += 1
        elif self.removed_positions is not None:
            self.removed_positions.append(position)

    def finish_dispatch(self) -> None:
        """Drop excess messages, send the dead letters of dead messages, and schedule the next expiry."""
        if self._limited and not self._refuses:
            self._drop_heads()
        expires = self._next_expiry()
        if self._aside and self._aside_expires:
            expires = min(expires or self._aside_expires, self._aside_expires)
        if expires and self._keeps_expired:
            expires = max(expires, clock.utc() + RETRY_SECS)
        if expires and (self._alarm is None or expires < self._alarm.utc) and not self.deleted:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._host.alarms.set(expires, self._alarmed)
        if self._dead_lettering.waiting_deaths:
            self._dead_lettering.send_dead_messages()
        if self.removed_positions:
            self._forget_removed()

    def _drop_heads(self) -> None:
        options = self.options
        while (options.length_max is not None and len(self) > options.length_max) or (
            options.bytes_max is not None and self.body_byte_count > options.bytes_max
        ):
            head = self.take_aside(_any) or super().take()
            if head is None:  # the rest is still being read
                return
            self.unacknowledged -= 1
            self._die(head[0], head[1], TOO_MANY)

    def _next_expiry(self) -> float:
        """Return when the first message in memory expires (POSIX seconds).

        Returns NEVER if it does not expire, or if no message is in memory.
        """
        if self._returned:
            return self._returned[0][1].expires
        return self._ready[0].expires if self._ready else NEVER

    def _alarmed(self) -> None:
        self._alarm = None
        self.drop_expired(self._expire_max())
        self.dispatch()  # also reads more from the disk

    def delete(self) -> int:
        """Cancel the consumers and drop all messages. Return the number of messages that were ready."""
        count = super().delete()
        for alarm in (self._alarm, self._watch):
            if alarm is not None:
                alarm.cancel()
        self._call_gets()
        return count

    def settle_beside(self, positions: list[int]) -> None:
        """Delete dead messages in the transaction that stores their dead letters in this event-loop pass.

        They stay on disk if that transaction fails.
        """
        if self.storage is not None and not self.deleted:
            self.storage.forget_beside(positions)

    def settle_dead(self, positions: list[int]) -> None:
        """Delete dead messages from disk, because their dead letters are stored or no queue gets them."""
        self.awaiting_dead_letters -= len(positions)
        if self.storage is not None and not self.deleted:
            self.storage.forget(positions)

    def _expire(self, position: int, message: Message) -> None:
        self._droppable -= 1
        self._die(position, message, EXPIRED)

    def _drop_expired(self, position: int, message: Message, utc: float) -> bool:
        return position < self._arriving and super()._drop_expired(position, message, utc)


class AmqpPriorityQueue(AmqpQueue):
    """Queue with `x-max-priority`. A higher priority of a message counts as the maximum.

    A message expires only at the head of its priority. While messages are sorted, `_lines` has a heap of
    positions for each priority, in which consumed messages stay until they are at its head.
    """

    def __init__(self, name: str, host: QueueHost, *, options: QueueArguments, **more: Any) -> None:
        self._lines: dict[int, list[int]] = {}
        super().__init__(name, host, options=options, priority=self._level_of, **more)

    def _stop_sorting(self) -> None:
        super()._stop_sorting()
        self._lines.clear()

    def _level_of(self, message: Message) -> int:
        return min(priority_of(message), self.options.priority_max)

    def _wait(self, position: int, message: Message, *, redelivered: bool) -> None:
        line = self._lines.setdefault(self._level_of(message), [])
        heapq.heappush(line, position)
        if len(line) > 2 * len(self._waiting) + STALE_MAX:
            line[:] = sorted({at for at in line if at in self._waiting} | {position})
        super()._wait(position, message, redelivered=redelivered)

    def _head_of(self, line: list[int]) -> tuple[int, Message] | None:
        """Return (position, message) of the first waiting message of a priority, or None.

        `line` is the heap of positions of this priority; consumed messages at its head are removed.
        """
        while line:
            found = self._waiting.get(line[0])
            if found is not None:
                return line[0], found[0]
            heapq.heappop(line)
        return None

    def _heads(self) -> list[tuple[int, Message]]:
        """Return (position, message) of the first sorted message of each priority."""
        return [head for line in self._lines.values() if (head := self._head_of(line)) is not None]

    def _next_expiry(self) -> float:
        """Return when the first message at the head of a priority expires (POSIX seconds).

        Returns NEVER if none of them expires, or no message is in memory.
        """
        if not self._sorted:
            return super()._next_expiry()
        return min((message.expires for _, message in self._heads() if message.expires), default=NEVER)

    def _head_expired(self) -> bool:
        if not self._sorted:
            return super()._head_expired()
        utc = clock.utc()
        return any(
            message.expires and message.expires <= utc and position < self._arriving
            for position, message in self._heads()
        )

    def drop_expired(self, most: int = BEYOND) -> float:
        """Drop expired messages at the head of each priority, at most `most` in total.

        Return when the next message expires (POSIX seconds), or NEVER.
        """
        if self._unsorted:
            self._sort()
        if not self._sorted:
            return super().drop_expired(most)
        if self._aside:
            self._drop_expired_aside()
        utc = clock.utc()
        for line in list(self._lines.values()):
            while most > 0 and (head := self._head_of(line)) is not None:
                if not self._drop_expired(*head, utc):
                    break
                del self._waiting[head[0]]
                most -= 1
        return self._next_expiry()

    def purge(self) -> int:
        """Drop all ready messages, and return their number."""
        self._lines.clear()
        return super().purge()


class QuorumQueue(AmqpQueue):
    """Queue with `x-queue-type: quorum`, on a single node.

    All its messages are durable, and it counts how often each was returned by consumers. A message that was
    returned more often than the delivery limit allows becomes a dead letter.
    """

    def __init__(self, name: str, host: QueueHost, **more: Any) -> None:
        super().__init__(name, host, **more)
        self.deliveries = self._counts = DeliveryCounts()
        self.removed_positions = []  # reported to `deliveries` even if nothing is on disk

    def prepare_messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages as durable ones."""
        return [
            one if one.durable else with_durability(one, True) for one in super().prepare_messages(messages)
        ]

    def requeue(self, deliveries: Iterable[tuple[int, Message]]) -> None:
        """Requeue messages for redelivery. Those beyond the delivery limit become dead letters instead."""
        most = self.options.delivery_limit
        returned = []
        for position, message in deliveries:
            if self._counts.count(position) > (BEYOND if most is None else most):
                self.unacknowledged -= 1
                self._die(position, message, DELIVERY_LIMIT)
            else:
                returned.append((position, message))
        super().requeue(returned)

    def put_back(self, deliveries: Iterable[tuple[int, Message]]) -> None:
        """Requeue messages that were removed from the queue but sent to no client.

        They do not count towards the delivery limit.
        """
        super().requeue(deliveries)

    def acknowledged(self, positions: Sequence[int]) -> None:
        """Settle the delivered messages at these positions, and drop their delivery counts."""
        super().acknowledged(positions)
        self._counts.forget(positions)

    def settle_dead(self, positions: list[int]) -> None:
        """Delete dead messages from disk, and drop their delivery counts."""
        self._counts.forget(positions)
        super().settle_dead(positions)

    def _forget_removed(self) -> None:
        assert self.removed_positions is not None
        self._counts.forget(self.removed_positions)
        if self.storage is None:
            self.removed_positions.clear()
        else:
            super()._forget_removed()

    def dispatch(self) -> None:
        """Deliver ready messages to consumers, then drop excess messages and send dead letters."""
        if self.storage is None and self.removed_positions:
            self._forget_removed()
        super().dispatch()

    def purge(self) -> int:
        """Drop all messages that are ready for delivery. Return their number."""
        self._counts.forget([*self._aside, *[position for position, _ in self._returned]])
        untouched = self.undelivered_ranges()
        if untouched:  # an earlier process may have counted these
            self._counts.forget_from(untouched[0][0])
        return super().purge()

    def delete(self) -> int:
        """Cancel the consumers and drop all messages. Return the number of messages that were ready."""
        count = super().delete()
        self._counts.clear()
        return count


def _any(message: Message) -> bool:
    return True


def part_of(sub_batch: SubBatch, start: int, stop: int) -> SubBatch:
    """Return messages of a sub-batch, from index `start` to before `stop`, as their own sub-batch.

    It is settled by itself. If these are all of its messages, `sub_batch` itself is returned.
    """
    if start == 0 and stop >= len(sub_batch.messages):
        return sub_batch
    found = SubBatch(sub_batch.batch, sub_batch.recipient)
    found.messages = sub_batch.messages[start:stop]
    found.slots = sub_batch.slots[start:stop]
    return found


def make_queue(
    name: str,
    host: QueueHost,
    *,
    durable: bool,
    auto_delete: bool,
    arguments: Headers,
    owner: object | None = None,
    user: str | None,
) -> AmqpQueue:
    """Return a new queue of the class that its arguments and policy require.

    `owner` is the connection of an exclusive queue, and `user` the user who declares it (None: the
    configuration). Raises AmqpRefused (406).
    """
    resource = f"queue '{name}' in vhost '{host.name}'"
    options = queue_arguments(arguments, resource)  # its own arguments must be valid
    if host.policies:
        options = queue_arguments(with_policy(host.policies, name, arguments), resource)
    kind = QuorumQueue if options.quorum else AmqpPriorityQueue if options.priority_max else AmqpQueue
    return kind(
        name,
        host,
        durable=durable,
        auto_delete=auto_delete,
        arguments=arguments,
        options=options,
        owner=owner,
        user=user,
    )

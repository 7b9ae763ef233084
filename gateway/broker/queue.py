"""Queue: ready messages in order, consumers with credit, and unacknowledged messages.

Fresh messages wait in a deque. The *position* of a message is its number of arrival; that of the first fresh
message is `_first`, so a position needs no memory until a message is consumed. Requeued messages keep their
position and wait in a heap, always ahead of the fresh ones. A message that does not fit a consumer's frames
is *set aside*: it waits for other consumers, and those behind it are delivered first.

`byte_count` is the size in bytes, with overhead, of the messages that wait. What consumers have received is
counted by them until it is settled.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Final, Protocol

import structlog

from gateway import clock
from gateway.broker.pressure import FULL, FullQueues, Pressure, reduced_limit
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message, weight_of
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.store.gate import Gate

log = structlog.get_logger(limited=True)

# One consumer gets at most this many messages at once, so that several share a long queue.
DISPATCH_MESSAGES_MAX: Final = 256
# And at most this many bytes at once (or one message), so that a client that does not read is noticed in
# time.
DISPATCH_BYTES_MAX: Final = 1_048_576
ALWAYS_OPEN: Final = Gate()  # of a queue without messages on disk
# Replaces a withdrawn message, so that positions stay consecutive; it expired long ago.
HOLE: Final = Message(amqp_address("", ""), b"", expires=1.0)


class Consumer(Protocol):
    """Receiver of a queue's messages, such as a subscription of one connection."""

    def capacity(self) -> int:
        """Return how many messages the consumer accepts now: 0 without credit, or with a congested stream."""

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Accept `messages`, whose positions in the queue are consecutive and begin with `position`.

        `redelivered` is True if a consumer may have received them before. Messages that cannot be encoded are
        acknowledged and become dead letters. Raises only for faults of the consumer itself, before it has
        accepted any.
        """

    def handle_error(self, error: Exception) -> None:
        """Handle an error that `deliver` has raised.

        The consumer has no more credit, and is removed after the pass of the event loop.
        """

    def cancelled(self, queue: Queue) -> None:
        """Handle the deletion of `queue`, which ends the consumption."""


class Storage(Protocol):
    """Storage of a queue on disk: all of its durable messages, and others that are not in memory.

    A storage registers itself with the queue for which it is created.
    """

    restrained: bool
    """True while the owner of the queue occupies too much memory: new messages are only on disk."""
    count: int
    """Number of messages that are only on disk, which have `byte_count` bytes."""
    byte_count: int
    recovered: int
    """End of the positions that an earlier process has stored."""

    @property
    def first(self) -> int | None:
        """Position of the first message that is only on disk; None if there is none."""

    def stored_before(self, position: int) -> Iterator[list[Message]]:
        """Yield the messages that an earlier process stored from `position` on, before the store starts."""

    def read_messages(self) -> Iterator[Message]:
        """Yield the messages that were read from disk and are not in the queue yet."""

    def undelivered_ranges(self) -> list[tuple[int, int]]:
        """Return the positions of messages that were never delivered, as ranges (first, end) in order."""

    def take(self, sub_batch: SubBatch, messages: list[Message]) -> list[Message]:
        """Queue `messages` of the sub-batch `sub_batch`, and store those that must survive a restart.

        They are queued in memory or on disk only. `sub_batch` is settled: stored messages after their commit,
        others at once. Return the queued messages: all of `messages`, unless the store is read-only now.
        """

    def delivered(self, position: int) -> tuple[bool, int]:
        """Return (delivered, end) for the stored message at `position`.

        `delivered` is True if an earlier process may have delivered the message. It is the same for all
        positions from `position` to before `end`.
        """

    def forget(self, positions: Sequence[int]) -> None:
        """Delete the messages at these positions from the disk, because they are settled."""

    def forget_beside(self, positions: Sequence[int]) -> None:
        """Delete settled messages in the transaction that stores what is published in this event-loop pass.

        If that transaction fails, they stay on disk. `forget` is called for them when it has succeeded.
        """

    def refill(self) -> bool:
        """Move the next messages from disk into the queue's memory.

        Return False if there are none, or if they are still being read.
        """

    def clear(self, first: int | None) -> None:
        """Delete all messages from position `first` on.

        None deletes only the messages that are on disk and not in memory.
        """

    def when_loaded(self, then: Callable[[], None]) -> None:
        """Call `then` when the queue's next messages are in memory: at once if they have been read."""

    def drop(self) -> None:
        """Delete the storage of a deleted queue."""


class UnfitMessage:
    """Message that was set aside because some consumers cannot receive it (`unable_consumers`)."""

    __slots__ = ("message", "redelivered", "unable_consumers")

    def __init__(self, message: Message, redelivered: bool) -> None:
        self.message = message
        self.redelivered = redelivered
        self.unable_consumers: list[Consumer] = []


class Queue:
    """Queue of messages in order of arrival, for any number of consumers."""

    def __init__(
        self,
        name: str,
        *,
        durable: bool = False,
        messages_max: int = 1_000_000,
        bytes_max: int = 1 << 30,
        expired: Callable[[Message], None] | None = None,
        full_queues: FullQueues | None = None,
    ) -> None:
        self.name = name
        self.durable = durable
        self.messages_max = messages_max  # so that an unread queue cannot use up the memory
        self.bytes_max = bytes_max
        self.byte_count = 0
        self.unacknowledged = 0
        self.awaiting_dead_letters = (
            0  # messages that have left, and stay on disk until their dead letters are there
        )
        self.deleted = False
        self.consumers: list[Consumer] = []
        self.storage: Storage | None = None  # None if nothing of this queue is on disk
        self.gate = ALWAYS_OPEN  # or that of the store
        self.reads = ALWAYS_OPEN  # or that of the spool, after a body could not be read
        # Positions that the storage may forget, reported once in a pass of the event loop.
        self.removed_positions: list[int] | None = None
        self.next = 0  # position of the next message
        self._ready: deque[Message] = deque()
        self._returned: list[tuple[int, Message]] = []
        self._aside: dict[int, UnfitMessage] = {}  # by position
        self._aside_expires = NEVER  # no message that is set aside expires earlier
        self._offered: tuple[int, UnfitMessage] | None = None  # to a consumer, right now
        self._offers = False  # some consumer may accept a message that is set aside
        self._first = 0  # position of the first in `_ready`
        self._turn = 0
        self._expired = expired
        self._pressure = self._new_pressure()
        self._full_queues = FullQueues() if full_queues is None else full_queues
        self._lossy_at: int | None = None  # position of the next message when a loss was last logged
        # Original limit in bytes, while `bytes_max` is reduced because its owner occupies too much memory.
        self._allowed: int | None = None

    def attach_storage(self, storage: Storage, end: int, byte_count: int, gate: Gate) -> None:
        """Store the queue's messages in `storage` from now on.

        An earlier process has left messages of `byte_count` bytes there, at positions before `end`. `gate` is
        the store's gate: while it is shut, the queue delivers nothing.
        """
        self.storage = storage
        self.next = end
        self.byte_count += byte_count
        self.gate = gate
        self.removed_positions = []

    def __len__(self) -> int:
        paged = 0 if self.storage is None else self.storage.count
        return len(self._ready) + len(self._returned) + len(self._aside) + paged

    @property
    def full(self) -> bool:
        """True if publishers should be paused until the queue has drained."""
        return len(self) >= self.messages_max or self.byte_count >= self.bytes_max

    @property
    def head(self) -> int | None:
        """Position of the first waiting message; None if no message waits.

        The position may be too low if messages were withdrawn from the queue.
        """
        if self._aside:
            return min(self._aside)
        if self._returned:
            return self._returned[0][0]
        if self._ready:
            return self._first
        return None if self.storage is None else self.storage.first

    @property
    def in_memory(self) -> int:
        """Size in bytes of the waiting messages that are in memory."""
        return self.byte_count if self.storage is None else self.byte_count - self.storage.byte_count

    def restrain(self, on: bool) -> None:
        """Limit the queue's memory because its owner's messages occupy too much (`on`), or lift that limit.

        While it is limited, a durable queue has new messages on disk only, and any other queue counts as full
        at about its present size. A repeated call has no effect.
        """
        if self.storage is not None:
            self.storage.restrained = on
        else:
            self.restrain_size(on)

    def restrain_size(self, on: bool) -> None:
        """Lower the limit in bytes to about the present size (`on`), or restore the original limit."""
        if on and self._allowed is None:
            self._allowed = self.bytes_max
            self.bytes_max = reduced_limit(self._allowed, self.byte_count)
        elif not on and self._allowed is not None:
            self.bytes_max, self._allowed = self._allowed, None
            self._resume_if_drained()

    def publish(self, sub_batch: SubBatch) -> None:
        """Queue the messages of a sub-batch; accept them at once, or after the commit if they are stored.

        A full queue pauses the connections that publish to it. Messages of a connection that cannot be paused
        (because it also consumes and must acknowledge) are refused at twice the limit. If the queue's owner
        may not pause publishers, new messages are dropped or refused instead (`_overflow`).
        """
        if self.full:
            if not self.may_hold:
                self._overflow(sub_batch)
                return
            if len(self) >= 2 * self.messages_max or self.byte_count >= 2 * self.bytes_max:
                self._full_queues.refused += len(sub_batch.messages)
                sub_batch.settle(FULL)
                return
            self._pressure.hold_sources(sub_batch)
        messages = self.prepare_messages(sub_batch.messages)
        if self.storage is None:
            self.put(messages)
            sub_batch.accept()
        else:
            self.storage.take(sub_batch, messages)
        self.dispatch()

    def _new_pressure(self) -> Pressure:
        """Return a new `Pressure`, which resumes paused publishers when the queue has drained.

        Overridden by queues that resume publishers user by user.
        """
        return Pressure()

    @property
    def may_hold(self) -> bool:
        """True if the queue, when full, may pause its publishers or refuse their messages."""
        return self._full_queues.may_hold(self.owning_user)

    def review_hold(self) -> None:
        """Resume paused publishers if changed rules no longer let the queue's owner pause publishers."""
        if self._pressure and not self.may_hold:
            self._pressure.resume_sources()

    def is_named_by(self, message: Message) -> bool:
        """Return True if the message was published to this queue by its name, not by a binding or topic."""
        return False

    def _overflow(self, sub_batch: SubBatch) -> None:
        """Settle messages for a full queue that may not pause publishers, without queuing any of them.

        Messages that name this queue are refused, so their publisher learns that it is full. Copies of
        messages that other recipients may have space for are dropped, counted, and reported as accepted.
        """
        direct_positions: list[int] = []
        copies: list[int] = []
        for at, message in enumerate(sub_batch.messages):
            (direct_positions if self.is_named_by(message) else copies).append(at)
        if direct_positions:
            self._full_queues.refused += len(direct_positions)
            sub_batch.settle_at(direct_positions, FULL)
        if copies:
            self.drop_copies([sub_batch.messages[at] for at in copies])
            sub_batch.settle_at(copies)

    def drop_copies(self, messages: Sequence[Message]) -> None:
        """Count and log messages that the full queue drops without informing their publishers.

        The first loss is logged, and later ones if half of the waiting messages arrived after the last log
        line.
        """
        if self._lossy_at is None or self.next - self._lossy_at > len(self) // 2:
            self._lossy_at = self.next
            log.warning("queue full, messages dropped", queue=self.name, user=self.owning_user)
        self._count_dropped(messages)

    def _count_dropped(self, messages: Sequence[Message]) -> None:
        self._full_queues.dropped += len(messages)

    @property
    def owning_user(self) -> str | None:
        """Name of the user who declared the queue; None for the configuration."""
        return None

    def prepare_messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages in the form in which this queue stores them: unchanged.

        Overridden by queues that change messages, for example their expiry.
        """
        return messages

    @property
    def memory_reaches_end(self) -> bool:
        """True if the next message to arrive can be added to those in memory, at the following position.

        It cannot if an earlier process has settled the last messages, so that their positions lie between.
        """
        return not self._ready or self._first + len(self._ready) == self.next

    def put(self, messages: list[Message]) -> None:
        """Append messages in memory, without delivering them to consumers yet.

        `memory_reaches_end` must be True.
        """
        if not self._ready:
            self._first = self.next  # what was only on disk may have ended before
        self._ready.extend(messages)
        self.next += len(messages)
        self.add_to_size(messages)

    def refill(self, first: int, messages: list[Message]) -> None:
        """Copy messages from disk into memory, at consecutive positions that begin with `first`.

        Must be called when memory has no messages that were never delivered.
        """
        assert not self._ready
        self._first = first
        self._ready.extend(messages)

    def remove_refused(self, first: int, count: int) -> list[Message]:
        """Remove and return messages that the store has refused, unless a consumer has received them.

        The range of positions is `first` to before `first + count`.
        """
        ready = self._ready
        withdrawn: list[Message] = []
        for place in range(max(first - self._first, 0), first + count - self._first):
            withdrawn.append(ready[place])
            ready[place] = HOLE
        self.subtract_from_size(withdrawn)
        while ready and ready[-1] is HOLE and self.memory_reaches_end:
            ready.pop()
            self.next -= 1
        self._resume_if_drained()
        return withdrawn

    def add(self, consumer: Consumer) -> None:
        """Add a consumer, and deliver waiting messages to it at once."""
        self.consumers.append(consumer)
        self._offers = bool(self._aside)
        self.dispatch()

    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer. The caller requeues the messages that it has not acknowledged."""
        self.consumers.remove(consumer)
        for aside in self._aside.values():
            if consumer in aside.unable_consumers:
                aside.unable_consumers.remove(consumer)

    def dispatch(self) -> None:
        """Deliver ready messages to consumers with credit, in turn."""
        if self.removed_positions:
            self._forget_removed()
        if self.gate.shut:
            self.gate.wait(self.dispatch)
            return
        if self.reads.shut:
            return
        if self._offers:
            self._offer_aside()
        while self._returned and self._hand_out_returned():
            pass
        while not self._returned and (self._ready or (self.storage is not None and self.storage.refill())):
            open_ = self._open()
            if not open_:
                return
            if len(open_) == 1:
                consumer, room = open_[0]
                self._deliver_run(consumer, min(room, DISPATCH_MESSAGES_MAX))
            else:
                self._share(open_)

    def _open(self) -> list[tuple[Consumer, int]]:
        """Return the consumers with credit, each with the number of messages that it accepts."""
        return [(consumer, room) for consumer in self.consumers if (room := consumer.capacity()) > 0]

    def _eligible(self) -> list[Consumer]:
        """Return the consumers that may get messages, with or without credit, the preferred ones first."""
        return self.consumers

    # Messages that some consumers cannot receive.

    def set_aside(
        self, consumer: Consumer | None, position: int, message: Message, redelivered: bool
    ) -> None:
        """Set aside a message that `consumer` cannot receive; other consumers may still receive it.

        `consumer` is None if a single request (basic.get) could not receive it.
        """
        offered = self._offered
        aside = (
            UnfitMessage(message, redelivered) if offered is None or offered[0] != position else offered[1]
        )
        if consumer is not None:
            aside.unable_consumers.append(consumer)
        self._aside[position] = aside
        self._note_expiry_aside(message)
        self.unacknowledged -= 1
        self.add_to_size((message,))
        self._offers = self._offers or any(one not in aside.unable_consumers for one in self._eligible())

    def _offer_aside(self) -> None:
        """Deliver set-aside messages to other consumers that can receive them and have credit.

        A message for which only consumers without credit are left is tried at the next dispatch.
        """
        self._drop_expired_aside()
        self._offers = False
        eligible = self._eligible()
        for position in sorted(self._aside):
            aside = self._aside[position]
            while position in self._aside:
                able = [
                    one
                    for one in eligible
                    if one not in aside.unable_consumers and self._may_have(one, aside.message)
                ]
                free = next((one for one in able if one.capacity() > 0), None)
                if free is None:
                    self._offers = self._offers or bool(able)
                    break
                del self._aside[position]
                self._mark_unacknowledged((aside.message,))
                self._offered = position, aside
                self._deliver(free, position, [aside.message], aside.redelivered)
                self._offered = None

    def _may_have(self, consumer: Consumer, message: Message) -> bool:
        """Return True if the consumer selects the message; overridden by queues with selectors."""
        return True

    def take_aside(self, fits: Callable[[Message], bool]) -> tuple[int, Message, bool] | None:
        """Remove and return the first set-aside message for which `fits` returns True, or None.

        The result is (position, message, redelivered).
        """
        if self.gate.shut or self.reads.shut or not self._aside:
            return None
        self._drop_expired_aside()
        for position in sorted(self._aside):
            aside = self._aside[position]
            if fits(aside.message):
                del self._aside[position]
                self._mark_unacknowledged((aside.message,))
                return position, aside.message, aside.redelivered
        return None

    def _note_expiry_aside(self, message: Message) -> None:
        if message.expires and (not self._aside_expires or message.expires < self._aside_expires):
            self._aside_expires = message.expires

    def _drop_expired_aside(self) -> None:
        """Drop expired messages that are set aside. Nothing is examined before the first one expires."""
        utc = clock.utc()
        if not self._aside_expires or utc < self._aside_expires:
            return
        self._aside_expires = NEVER
        for position, aside in list(self._aside.items()):
            if self._drop_expired(position, aside.message, utc):
                del self._aside[position]
            else:
                self._note_expiry_aside(aside.message)

    def take(self) -> tuple[int, Message, bool] | None:
        """Remove and return the next message, for a single request (basic.get), or None.

        The result is (position, message, redelivered).
        """
        if self.gate.shut or self.reads.shut:
            return None
        utc = clock.utc()
        while self._returned:
            position, message = heapq.heappop(self._returned)
            if not self._drop_expired(position, message, utc):
                self._mark_unacknowledged((message,))
                return position, message, True
        while self._ready or (self.storage is not None and self.storage.refill()):
            message = self._ready.popleft()
            position = self._first
            self._first += 1
            if not self._drop_expired(position, message, utc):
                self._mark_unacknowledged((message,))
                return position, message, self._was_delivered(position)
        return None

    def browse(self) -> Iterator[tuple[int, Message]]:
        """Yield positions and messages that wait in memory, in the order of delivery, without removing them.

        The queue must not change during the iteration.
        """
        utc = clock.utc()
        returned = sorted(self._returned, key=itemgetter(0))
        for position, message in chain(self._rows_aside(), returned, enumerate(self._ready, self._first)):
            if not message.expires or message.expires > utc:
                yield position, message

    def messages_in_memory(self) -> Iterator[Message]:
        """Yield all messages that wait in memory, in any order, including expired and read-ahead ones."""
        yield from self._ready
        yield from (message for _, message in self._returned)
        yield from (aside.message for aside in self._aside.values())
        if self.storage is not None:
            yield from self.storage.read_messages()

    def _rows_aside(self) -> list[tuple[int, Message]]:
        return [(position, self._aside[position].message) for position in sorted(self._aside)]

    def drop_expired(self, most: int = sys.maxsize) -> float:
        """Drop up to `most` expired messages at the head of the queue.

        Return when the first message that remains expires (POSIX seconds), or NEVER. It may have expired
        already if `most` messages were dropped.
        """
        if self._aside:
            self._drop_expired_aside()
        utc = clock.utc()
        while self._returned:
            if not most:
                return self._returned[0][1].expires
            most -= 1
            position, message = self._returned[0]
            if not self._drop_expired(position, message, utc):
                return message.expires
            heapq.heappop(self._returned)
        while self._ready:
            message = self._ready[0]
            if not most or not self._drop_expired(self._first, message, utc):
                return message.expires
            most -= 1
            self._ready.popleft()
            self._first += 1
            if not self._ready and self.storage is not None:
                self.storage.refill()
        return NEVER

    @property
    def loading(self) -> bool:
        """True if `take` finds nothing because the next messages are still being read from the disk."""
        return not self._ready and not self._returned and self.storage is not None and self.storage.count > 0

    def acknowledged(self, positions: Sequence[int]) -> None:
        """Settle the delivered messages at these positions: they leave the disk, too."""
        self.unacknowledged -= len(positions)
        if self.storage is not None:
            self.storage.forget(positions)

    def requeue(self, deliveries: Iterable[tuple[int, Message]]) -> None:
        """Requeue (position, message) pairs at their old positions, to be redelivered."""
        for position, message in deliveries:
            heapq.heappush(self._returned, (position, message))
            self.unacknowledged -= 1
            self.add_to_size((message,))

    def put_back(self, deliveries: Iterable[tuple[int, Message]]) -> None:
        """Requeue messages that were removed from the queue but sent to no client.

        Unlike `requeue` this does not count as a failed delivery.
        """
        self.requeue(deliveries)

    def hold_back(self, deliveries: Iterable[tuple[int, Message]], gate: Gate) -> None:
        """Requeue messages whose bodies cannot be read from disk now. Deliver nothing until `gate` opens."""
        self.put_back(deliveries)
        if self.reads is not gate:
            self.reads = gate
            gate.wait(self._resume_reads)

    def _resume_reads(self) -> None:
        self.reads = ALWAYS_OPEN
        self.dispatch()

    def purge(self) -> int:
        """Drop all messages that are ready for delivery. Return their number."""
        count = len(self)
        if self.storage is not None:
            self.storage.forget([*self._aside, *[position for position, _ in self._returned]])
            self.storage.clear(self._first if self._ready else None)
        self._first += len(self._ready)
        self._ready.clear()
        self._returned.clear()
        self._aside.clear()
        self.byte_count = 0
        self._resume_if_drained()
        return count

    def delete(self) -> int:
        """Cancel the consumers and drop all messages. Return the number of messages that were ready."""
        self.deleted = True
        consumers, self.consumers = self.consumers, []
        for consumer in consumers:
            consumer.cancelled(self)
        count = self.purge()
        if self.storage is not None:
            self.storage.drop()
        return count

    def _forget_removed(self) -> None:
        assert self.storage is not None
        assert self.removed_positions is not None
        self.storage.forget(self.removed_positions[:])
        self.removed_positions.clear()

    def _was_delivered(self, position: int) -> bool:
        """Return True if an earlier process may have delivered the message at this position."""
        storage = self.storage
        return storage is not None and position < storage.recovered and storage.delivered(position)[0]

    def _deliver_run(self, consumer: Consumer, count: int) -> None:
        """Deliver up to `count` messages from the head of the queue to a consumer.

        Fewer are delivered if only some of them may have been delivered before a restart.
        """
        redelivered = False
        if self.storage is not None and self._first < self.storage.recovered:
            redelivered, end = self.storage.delivered(self._first)
            count = min(count, end - self._first)
        position, messages = self._pop(count)
        if messages:
            self._deliver(consumer, position, messages, redelivered)

    def undelivered_ranges(self) -> list[tuple[int, int]]:
        """Return the positions of messages that were never delivered, as ranges (first, end) in order."""
        first = self._first
        if not self._ready:
            first = self.next if self.storage is None or self.storage.first is None else self.storage.first
        return [(first, self.next)] if first < self.next else []

    def _deliver(self, consumer: Consumer, position: int, messages: list[Message], redelivered: bool) -> None:
        """Pass messages to a consumer. If it raises an error, requeue them for other consumers."""
        if self.reads.shut:
            self.put_back(list(enumerate(messages, position)))
            return
        try:
            consumer.deliver(self, position, messages, redelivered)
        except Exception as error:
            consumer.handle_error(error)
            self.requeue(list(enumerate(messages, position)))
        if self._offers and self._offered is None:
            self._offer_aside()

    def _share(self, open_: list[tuple[Consumer, int]]) -> None:
        """Deliver one message to each consumer that has credit, in turn."""
        start = self._turn % len(open_)
        for consumer, _ in open_[start:] + open_[:start]:
            if not self._ready:
                return
            if consumer.capacity() <= 0:
                continue  # it shares its credit with the previous consumer
            self._turn += 1
            self._deliver_run(consumer, 1)

    def _pop(self, count: int) -> tuple[int, list[Message]]:
        """Remove up to `count` messages from the head of the queue. Return (first position, messages).

        The messages are unexpired and have consecutive positions. Expired messages in front of them are
        dropped, and so is one directly behind them. Fewer than `count` are returned before an expired
        message, and before messages that exceed DISPATCH_BYTES_MAX.
        """
        ready = self._ready
        if count >= len(ready):
            messages = list(ready)
            ready.clear()
        else:
            messages = [ready.popleft() for _ in range(count)]
        self._first += len(messages)
        byte_count = weight_of(messages)
        if byte_count > DISPATCH_BYTES_MAX:
            byte_count = self._shorten(messages)
        for message in messages:
            if message.expires:
                return self._without_expired(messages)
        self._mark_unacknowledged(messages, byte_count)
        return self._first - len(messages), messages

    def _shorten(self, messages: list[Message]) -> int:
        """Put back the messages that exceed DISPATCH_BYTES_MAX, but never the first one.

        The messages that are put back are removed from the end of `messages`. Return the size of the rest in
        bytes.
        """
        byte_count = 0
        for at, message in enumerate(messages):
            size = message.byte_count
            if at and byte_count + size > DISPATCH_BYTES_MAX:
                self._ready.extendleft(reversed(messages[at:]))
                self._first -= len(messages) - at
                del messages[at:]
                break
            byte_count += size
        return byte_count

    def _without_expired(self, messages: list[Message]) -> tuple[int, list[Message]]:
        """Drop expired messages, and return (first position, messages) of the first unexpired run.

        Messages behind the next expired one are put back into the queue, because the positions of the
        returned messages must be consecutive.
        """
        utc = clock.utc()
        remaining: list[Message] = []
        position = first = self._first - len(messages)
        for at, message in enumerate(messages):
            if not self._drop_expired(first + at, message, utc):
                remaining.append(message)
            elif remaining:
                rest = messages[at + 1 :]
                self._ready.extendleft(reversed(rest))
                self._first -= len(rest)
                break
            else:
                position = first + at + 1
        self._mark_unacknowledged(remaining)
        return position, remaining

    def _hand_out_returned(self) -> bool:
        """Deliver one requeued message to a consumer with credit, or drop it if it has expired.

        Return False if no message is requeued or no consumer has credit.
        """
        open_ = [] if self.reads.shut else self._open()
        if not open_ or not self._returned:
            return False
        consumer = open_[self._turn % len(open_)][0]
        position, message = heapq.heappop(self._returned)
        if not self._drop_expired(position, message, clock.utc()):
            self._turn += 1
            self._mark_unacknowledged((message,))
            self._deliver(consumer, position, [message], True)
        return True

    def _drop_expired(self, position: int, message: Message, utc: float) -> bool:
        if not message.expires or message.expires > utc:
            return False
        if message is HOLE:
            return True
        self.subtract_from_size((message,))
        self._expire(position, message)
        self._resume_if_drained(leaving=1)
        return True

    def _expire(self, position: int, message: Message) -> None:
        """Settle an expired message that leaves the queue, and report it to the `expired` callback.

        Overridden by queues that route expired messages as dead letters.
        """
        if self.removed_positions is not None:
            self.removed_positions.append(position)
        if self._expired is not None:
            self._expired(message)

    def add_to_size(self, messages: Sequence[Message]) -> None:
        """Add new messages, in memory or only on disk, to the size of the queue in bytes."""
        self.byte_count += weight_of(messages)

    def subtract_from_size(self, messages: Sequence[Message], byte_count: int | None = None) -> None:
        """Subtract messages, which leave the queue, from the size of the queue in bytes.

        `byte_count` is the messages' size in bytes; None if it must be computed.
        """
        self.byte_count -= weight_of(messages) if byte_count is None else byte_count

    def subtract_refused(self, messages: Sequence[Message]) -> None:
        """Subtract messages that were to be on disk only but that the store has refused.

        Resumes paused publishers if the queue has drained.
        """
        self.subtract_from_size(messages)
        self._resume_if_drained()

    def subtract_missing_bytes(self, byte_count: int) -> None:
        """Subtract bytes that were counted but are not on disk; add them if the number is negative.

        Called by the storage when it has read messages. Resumes paused publishers if the queue has drained.
        """
        self.byte_count -= byte_count
        self._resume_if_drained()

    def _mark_unacknowledged(self, messages: Sequence[Message], byte_count: int | None = None) -> None:
        """Move messages from the queue's size to its count of unacknowledged messages, for delivery.

        `byte_count` is the size of the messages in bytes; None if it must be computed.
        """
        self.unacknowledged += len(messages)
        self.subtract_from_size(messages, byte_count)
        if self._pressure:
            self._resume_if_drained()

    def _resume_if_drained(self, leaving: int = 0) -> None:
        """Resume paused publishers if at most half of the queue's limits is used.

        `leaving` is the number of messages that still count as waiting but are being removed.
        """
        if self._pressure and self.has_drained(leaving):
            self._pressure.resume_sources()

    def has_drained(self, leaving: int = 0) -> bool:
        """Return True if at most half of the limits is used, so that paused publishers may resume.

        `leaving` is the number of messages that still count as waiting but are being removed.
        """
        waiting = len(self) - leaving
        return waiting <= self.messages_max // 2 and self.byte_count <= self.bytes_max // 2

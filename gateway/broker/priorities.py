"""Queue with message priorities, whose consumers may select messages.

While all waiting messages have one priority and every consumer accepts any message, this is the plain queue,
which delivers runs of messages at no cost for each. Otherwise the messages in memory are *sorted*: a
dictionary by position, a heap of (priority, position) for consumers that accept anything, and another heap
for each consumer with a selector, with the messages that it selects. Heaps may contain positions
that were consumed meanwhile. When memory is empty, the queue is plain again.

Selectors are evaluated when their consumer has credit, and only for as many messages in one pass of the event
loop as `SelectionWork` allows: a consumer gets nothing before all messages that have arrived for it were
evaluated. A requeued message keeps its position. Messages on disk only are not sorted: priorities and
selectors apply to the messages in memory.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final

from gateway import clock
from gateway.broker.pressure import FullQueues
from gateway.broker.queue import DISPATCH_BYTES_MAX, DISPATCH_MESSAGES_MAX, HOLE, Consumer, Queue
from gateway.broker.selection_work import UNBOUNDED, SelectionWork
from gateway.containment import contained
from gateway.model.message import NEVER, Message

STALE_MAX: Final = 1_024  # consumed positions that may be in a heap, in addition to as many as wait

SelectorFunction = Callable[[Message], bool]
Heap = list[tuple[int, int]]  # (negated priority, position)
QueuedMessage = tuple[Message, bool]  # message, and True if it was delivered before


class SelectorResults:
    """Selector of one consumer, with the messages that it has selected so far.

    `heap` has the selected messages as (negative priority, position). `unseen` has the positions of messages
    for which the selector was not evaluated yet.
    """

    __slots__ = ("heap", "selector", "unseen")

    def __init__(self, selector: SelectorFunction, unseen: Iterable[int]) -> None:
        self.selector = selector
        self.heap: Heap = []
        self.unseen = deque(unseen)


class PriorityQueue(Queue):
    """Queue ordered by priority, then by arrival. Consumers may select messages by selectors."""

    def __init__(
        self,
        name: str,
        priority: Callable[[Message], int] | None = None,
        *,
        durable: bool = False,
        messages_max: int = 1_000_000,
        bytes_max: int = 1 << 30,
        expired: Callable[[Message], None] | None = None,
        full_queues: FullQueues | None = None,
        work: SelectionWork = UNBOUNDED,
    ) -> None:
        """Create an empty queue, which is full at `messages_max` messages or `bytes_max` bytes.

        `priority` returns the priority of a message; None gives all messages the same. `work` limits the time
        in which selectors are evaluated. `expired` is called with each expired message.
        """
        super().__init__(
            name,
            durable=durable,
            messages_max=messages_max,
            bytes_max=bytes_max,
            expired=expired,
            full_queues=full_queues,
        )
        self._priority = priority
        self._level = 0  # priority of everything in memory, while it is not sorted
        self._sorted = False
        self._unsorted = False  # what was read from the disk must still be sorted
        self._waiting: dict[int, QueuedMessage] = {}
        self._heap: Heap = []
        self._selector_results: dict[Consumer, SelectorResults] = {}
        self._work = work
        self._avoided: dict[int, Consumer] = {}  # position -> consumer that has just returned the message

    def __len__(self) -> int:
        return super().__len__() + len(self._waiting)

    # Publishing.

    def put(self, messages: list[Message]) -> None:
        """Append messages in memory, without delivering them to consumers yet."""
        if not self._sorted and self._has_one_priority(messages):
            if not self._ready:
                self._first = self.next
            super().put(messages)
            return
        self._sort()
        first = self.next
        self.next += len(messages)
        self.add_to_size(messages)
        for position, message in enumerate(messages, first):
            self._wait(position, message, redelivered=False)

    def refill(self, first: int, messages: list[Message]) -> None:
        """Copy messages from disk into memory, at consecutive positions that begin with `first`.

        Must be called when memory has no messages that were never delivered.
        """
        self._unsorted = not self._sorted and not self._has_one_priority(messages)
        if not self._sorted:
            super().refill(first, messages)
            return
        for position, message in enumerate(messages, first):
            self._wait(position, message, redelivered=self._was_delivered(position))

    def _has_one_priority(self, messages: list[Message]) -> bool:
        """Return True if the messages have the same priority as each other and as those in memory.

        Returns False if a consumer has a selector.
        """
        priority = self._priority
        if priority is None or self._selector_results or not messages:
            return not self._selector_results
        level = self._level if self._ready or self._returned else priority(messages[0])
        last = None
        for message in messages:
            if message.property_set is not last:
                last = message.property_set
                if priority(message) != level:
                    return False
        self._level = level
        return True

    def _sort(self) -> None:
        """Start to sort by priority: the messages in memory now, and those that arrive later.

        The queue sorts until no message is left in memory.
        """
        if self._sorted:
            return
        self._sorted = True
        self._unsorted = False
        ready, first = list(self._ready), self._first
        self._ready.clear()
        returned, self._returned = self._returned, []
        for position, message in returned:
            self._wait(position, message, redelivered=True)
        for position, message in enumerate(ready, first):
            if message is not HOLE:
                self._wait(position, message, redelivered=self._was_delivered(position))

    def _wait(self, position: int, message: Message, *, redelivered: bool) -> None:
        """Add a message to the sorted messages, and its position to `unseen` of each consumer's selector."""
        self._waiting[position] = (message, redelivered)
        entry = (-self._priority_of(message), position)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._waiting) + STALE_MAX:
            self._heap = self._fresh_heap()
        most = 2 * len(self._waiting) + STALE_MAX
        for results in self._selector_results.values():
            results.unseen.append(position)
            if len(results.unseen) > most:
                results.unseen = deque([at for at in results.unseen if at in self._waiting])
            if len(results.heap) > most:
                results.heap = [entry for entry in results.heap if entry[1] in self._waiting]
                heapq.heapify(results.heap)

    def _priority_of(self, message: Message) -> int:
        return 0 if self._priority is None else self._priority(message)

    def _fresh_heap(self) -> Heap:
        heap = [(-self._priority_of(message), position) for position, (message, _) in self._waiting.items()]
        heapq.heapify(heap)
        return heap

    def _evaluate(self, results: SelectorResults) -> bool:
        """Evaluate a consumer's selector for the messages that it was not evaluated for yet.

        Return False if the time budget is used up and the rest is postponed to the next pass of the event
        loop.
        """
        while results.unseen:
            if self._work.is_exhausted:
                self._work.postpone(self.dispatch)
                return False
            position = results.unseen.popleft()
            found = self._waiting.get(position)
            if found is not None and self._is_selected(results.selector, found[0]):
                heapq.heappush(results.heap, (-self._priority_of(found[0]), position))
        return True

    def _is_selected(self, selector: SelectorFunction, message: Message) -> bool:
        """Return True if the selector selects the message; False also if the selector fails."""
        try:
            return self._work.selects(selector, message)
        except Exception as error:
            contained("delivery", error)
            return False

    def remove_refused(self, first: int, count: int) -> list[Message]:
        """Remove and return messages that the store has refused, unless a consumer has received them.

        The range of positions is `first` to before `first + count`.
        """
        if not self._sorted:
            return super().remove_refused(first, count)
        withdrawn: list[Message] = []
        for position in range(first, first + count):
            self._avoided.pop(position, None)
            found = self._waiting.pop(position, None)
            if found is not None:
                withdrawn.append(found[0])
        self.subtract_from_size(withdrawn)
        self._resume_if_drained()
        return withdrawn

    def requeue(self, deliveries: Iterable[tuple[int, Message]]) -> None:
        """Requeue (position, message) pairs at their old positions, to be redelivered."""
        messages = list(deliveries)
        if not self._sorted and self._has_one_priority([message for _, message in messages]):
            super().requeue(messages)
            return
        self._sort()
        for position, message in messages:
            self.unacknowledged -= 1
            self.add_to_size((message,))
            self._wait(position, message, redelivered=True)

    def return_unfit(self, position: int, message: Message, consumer: Consumer) -> None:
        """Requeue a message that `consumer` could not use.

        The message is delivered to another consumer that accepts it, or again to `consumer` if there is none.
        """
        self._sort()
        self._avoided[position] = consumer
        self.requeue([(position, message)])

    # Consumers.

    def add(self, consumer: Consumer, selector: SelectorFunction | None = None) -> None:
        """Add a consumer, and deliver waiting messages to it.

        It gets the messages that its selector `selector` selects; None selects all.
        """
        if selector is not None:
            self._sort()
            self._selector_results[consumer] = SelectorResults(selector, self._waiting)
        super().add(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer. The caller requeues the messages that it has not acknowledged."""
        super().remove(consumer)
        self._selector_results.pop(consumer, None)
        if self._avoided:
            self.dispatch()

    def may_deliver_to(self, consumer: Consumer) -> bool:
        """Return True if the consumer may get messages of this queue.

        Overridden by queues whose consumers can be stopped.
        """
        return consumer in self.consumers

    def _may_have(self, consumer: Consumer, message: Message) -> bool:
        results = self._selector_results.get(consumer)
        return results is None or self._is_selected(results.selector, message)

    # Delivery and settlement.

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
        while self._dispatch_memory():
            if self.storage is None or not self.storage.refill():
                return

    def _dispatch_memory(self) -> bool:
        """Deliver the messages in memory. Return True if none is left, so that more can be read from disk.

        Returns False if no consumer has credit for the rest or selects it.
        """
        if self._unsorted:
            self._sort()
        if self._sorted:
            return self._dispatch_sorted()
        while self._returned and self._hand_out_returned():
            pass
        while not self._returned and self._ready and not self._sorted:
            open_ = self._open()
            if not open_:
                return False
            if len(open_) == 1:
                self._deliver_run(open_[0][0], min(open_[0][1], DISPATCH_MESSAGES_MAX))
            else:
                self._share(open_)
        return not self._returned and not self._ready and not self._waiting

    def _dispatch_sorted(self) -> bool:
        """Deliver sorted messages to consumers with credit, in turn.

        Return True if no message is left in memory. The queue then no longer sorts, unless a consumer has a
        selector.
        """
        while self._waiting:
            open_ = [] if self.reads.shut else self._open()
            if not open_:
                return False
            self._turn += 1
            start = self._turn % len(open_)
            handed = 0
            for consumer, room in open_[start:] + open_[:start]:
                if len(open_) == 1:
                    handed += self._hand_out_sorted(consumer, min(room, DISPATCH_MESSAGES_MAX))
                elif consumer.capacity() > 0:  # it may share its credit with the previous consumer
                    handed += self._hand_out_sorted(consumer, 1)
            if not handed:
                return False
        if self._sorted and not self._selector_results:
            self._stop_sorting()
        return True

    def _stop_sorting(self) -> None:
        """Queue new messages in order of arrival again, because memory has no sorted message left."""
        self._sorted = False
        self._heap.clear()
        self._first = self.next

    def _hand_out_sorted(self, consumer: Consumer, count: int) -> int:
        """Deliver at most `count` messages to a consumer, in the order of their priority.

        Return how many left the queue, including expired ones.
        """
        utc = clock.utc()
        rows: list[tuple[int, Message, bool]] = []
        removed_count = byte_count = 0
        for position, message, redelivered in self._take_best(consumer):
            if self._drop_expired(position, message, utc):
                removed_count += 1
            else:
                rows.append((position, message, redelivered))
                byte_count += message.byte_count
            is_full = len(rows) >= count or byte_count >= DISPATCH_BYTES_MAX
            if is_full or removed_count >= DISPATCH_MESSAGES_MAX:
                break
        self._mark_unacknowledged([message for _, message, _ in rows], byte_count)
        for position, messages, redelivered in _runs(rows):
            self._deliver(consumer, position, messages, redelivered)
        return removed_count + len(rows)

    def _take_best(self, consumer: Consumer | None) -> Iterator[tuple[int, Message, bool]]:
        """Remove and yield the messages that `consumer` may get, by priority and then by position.

        Each row is (position, message, redelivered). A `consumer` of None stands for a single request
        (basic.get).
        """
        heap = self._heap
        if consumer is not None and consumer in self._selector_results:
            results = self._selector_results[consumer]
            if results.unseen and not self._evaluate(results):
                return
            heap = results.heap
        aside: Heap = []
        try:
            while heap:
                entry = heapq.heappop(heap)
                position = entry[1]
                found = self._waiting.get(position)
                if found is None:
                    continue
                if consumer is not None and self._avoids(position, consumer, found[0]):
                    aside.append(entry)
                    continue
                del self._waiting[position]
                self._avoided.pop(position, None)
                yield (position, *found)
        finally:
            for entry in aside:
                heapq.heappush(heap, entry)

    def _avoids(self, position: int, consumer: Consumer, message: Message) -> bool:
        """Return True if `consumer` returned this message as unfit and another consumer would accept it."""
        if not self._avoided or self._avoided.get(position) is not consumer:
            return False
        for other in self.consumers:
            if other is not consumer and self.may_deliver_to(other) and self._may_have(other, message):
                return True
        return False

    def take(self) -> tuple[int, Message, bool] | None:
        """Remove and return the next message, for a single request (basic.get), or None.

        The result is (position, message, redelivered).
        """
        if self.gate.shut or self.reads.shut:
            return None
        if not self._sorted and not self._ready and not self._returned and self.storage is not None:
            self.storage.refill()
        if self._unsorted:
            self._sort()
        if not self._sorted:
            return super().take()
        utc = clock.utc()
        for position, message, redelivered in self._take_best(None):
            if not self._drop_expired(position, message, utc):
                self._mark_unacknowledged((message,))
                return position, message, redelivered
        return None

    def drop_expired(self, most: int = sys.maxsize) -> float:
        """Drop up to `most` expired messages at the head of the queue, the first ones by priority.

        Return when the first message that remains expires (POSIX seconds), or NEVER. It may have expired
        already if `most` messages were dropped.
        """
        if not self._sorted:
            return super().drop_expired(most)
        if self._aside:
            self._drop_expired_aside()
        utc = clock.utc()
        while self._heap:
            position = self._heap[0][1]
            found = self._waiting.get(position)
            if found is not None:
                if not most or not self._drop_expired(position, found[0], utc):
                    return found[0].expires
                del self._waiting[position]
                self._avoided.pop(position, None)
                most -= 1
            heapq.heappop(self._heap)
        return NEVER

    @property
    def loading(self) -> bool:
        """True if `take` finds nothing because the next messages are still being read from the disk."""
        return not self._waiting and super().loading

    def undelivered_ranges(self) -> list[tuple[int, int]]:
        """Return the positions of messages that were never delivered, as ranges (first, end) in order."""
        if not self._sorted:
            return super().undelivered_ranges()
        found: list[tuple[int, int]] = []
        for position in sorted(at for at, (_, redelivered) in self._waiting.items() if not redelivered):
            if found and found[-1][1] == position:
                found[-1] = (found[-1][0], position + 1)
            else:
                found.append((position, position + 1))
        if self.storage is not None and self.storage.first is not None:
            found.append((self.storage.first, self.next))
        return found

    # Reading without removing.

    def browse(self) -> Iterator[tuple[int, Message]]:
        """Yield positions and messages that wait in memory, in the order of delivery, without removing them.

        The queue may change during the iteration. A message that leaves the queue meanwhile may be yielded or
        not; a message that arrives meanwhile is not. Each step is short, however many messages wait.
        """
        utc = clock.utc()
        rows: Iterable[tuple[int, Message]]
        if self._sorted:
            rows = self._rows_by_priority(list(self._heap))
        else:
            returned = sorted(self._returned, key=lambda one: one[0])
            rows = chain(returned, enumerate(list(self._ready), self._first))
        for position, message in chain(self._rows_aside(), rows):
            if not message.expires or message.expires > utc:
                yield position, message

    def messages_in_memory(self) -> Iterator[Message]:
        """Yield all messages that wait in memory, in any order, including expired and read-ahead ones."""
        yield from super().messages_in_memory()
        yield from (message for message, _ in self._waiting.values())

    def _rows_by_priority(self, heap: Heap) -> Iterator[tuple[int, Message]]:
        """Yield the sorted messages that still wait, in the order of `heap`, a copy of the queue's heap."""
        last = -1
        while heap:
            position = heapq.heappop(heap)[1]
            found = self._waiting.get(position)
            if found is not None and position != last:  # a requeued message may be in the heap twice
                last = position
                yield position, found[0]

    def peek(self, position: int) -> Message | None:
        """Return the message that waits at `position` in memory, or None."""
        message: Message | None
        if position in self._aside:
            message = self._aside[position].message
        elif self._sorted:
            waiting = self._waiting.get(position)
            message = None if waiting is None else waiting[0]
        elif 0 <= position - self._first < len(self._ready):
            message = self._ready[position - self._first]
        else:
            message = next((one for at, one in self._returned if at == position), None)
        if message is None or (message.expires and message.expires <= clock.utc()):
            return None
        return message

    # Deletion.

    def purge(self) -> int:
        """Drop all messages that are ready for delivery. Return their number."""
        count = len(self)
        if self.storage is not None:
            self.storage.forget(list(self._waiting))
        self._waiting.clear()
        self._avoided.clear()
        self._heap.clear()
        for results in self._selector_results.values():
            results.heap.clear()
            results.unseen.clear()
        super().purge()
        return count


def _runs(rows: list[tuple[int, Message, bool]]) -> Iterator[tuple[int, list[Message], bool]]:
    """Yield runs of consecutive positions as (first position, messages, redelivered)."""
    messages: list[Message] = []
    first, last, kind = 0, -1, False
    for position, message, redelivered in rows:
        if messages and (position != last + 1 or redelivered is not kind):
            yield first, messages, kind
            messages = []
        if not messages:
            first, kind = position, redelivered
        messages.append(message)
        last = position
    if messages:
        yield first, messages, kind

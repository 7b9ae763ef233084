"""A queue whose messages have priorities, and whose consumers may choose.

As long as all that waits has one priority and every consumer takes whatever comes, this is the plain queue,
which hands out runs of messages at no cost for each. Otherwise what is in memory is *sorted*: a dictionary by
position, a heap of (priority, position) for the consumers that take anything, and one more heap for each
consumer that has wishes, with what it wants. Heaps may name positions that somebody else has taken meanwhile.
When the memory is empty, the plain life begins again. Wishes are asked when their consumer has room, and only
as many in one pass of the event loop as `SelectionWork` allows: a consumer gets nothing before all that has
come for it has been looked at. A message keeps its position whatever happens, so that
what comes back waits where it was. What is on disk alone has no place yet: priorities and wishes count among
the messages in memory.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gateway import clock
from gateway.broker.pressure import FullQueues
from gateway.broker.queue import DISPATCH_MESSAGES_MAX, DISPATCH_OCTETS_MAX, HOLE, Consumer, Queue
from gateway.broker.selection_work import UNBOUNDED, SelectionWork
from gateway.containment import contained
from gateway.model.message import NEVER, Message

STALE_MAX: Final = 1_024  # positions in a heap that nobody waits at any more, besides as many as do

Wish = Callable[[Message], bool]
Heap = list[tuple[int, int]]  # (priority, negated; position)
QueuedMessage = tuple[Message, bool]  # and whether it was delivered before


class Wishes:
    """What one consumer wants: `heap` of what it does, and positions that it has not been asked about."""

    __slots__ = ("heap", "unseen", "wish")

    def __init__(self, wish: Wish, unseen: Iterable[int]) -> None:
        self.wish = wish
        self.heap: Heap = []
        self.unseen = deque(unseen)


class PriorityQueue(Queue):
    """Higher priority first, then order of arrival. Consumers may want some messages only."""

    def __init__(
        self,
        name: str,
        priority: Callable[[Message], int],
        *,
        durable: bool = False,
        messages_max: int = 1_000_000,
        octets_max: int = 1 << 30,
        expired: Callable[[Message], None] | None = None,
        full_queues: FullQueues | None = None,
        work: SelectionWork = UNBOUNDED,
    ) -> None:
        """`work` says how many wishes may be asked in one go."""
        super().__init__(
            name,
            durable=durable,
            messages_max=messages_max,
            octets_max=octets_max,
            expired=expired,
            full_queues=full_queues,
        )
        self._priority = priority
        self._level = 0  # of everything in memory, while it is not sorted
        self._sorted = False
        self._unsorted = False  # what was read from the disk has still to be sorted
        self._waiting: dict[int, QueuedMessage] = {}
        self._heap: Heap = []
        self._wishes: dict[Consumer, Wishes] = {}
        self._work = work
        self._avoided: dict[int, Consumer] = {}  # position -> who has just given the message back

    def __len__(self) -> int:
        return super().__len__() + len(self._waiting)

    # In.

    def put(self, messages: list[Message]) -> None:
        """Append without dispatching."""
        if not self._sorted and self._fits(messages):
            if not self._ready:
                self._first = self.next
            super().put(messages)
            return
        self._sort()
        first = self.next
        self.next += len(messages)
        self.octets += self.weigh(messages)
        for position, message in enumerate(messages, first):
            self._wait(position, message, redelivered=False)

    def refill(self, first: int, messages: list[Message]) -> None:
        """Messages that were on disk alone; what was in memory before them is gone."""
        self._unsorted = not self._sorted and not self._fits(messages)
        if not self._sorted:
            super().refill(first, messages)
            return
        for position, message in enumerate(messages, first):
            self._wait(position, message, redelivered=self._was_delivered(position))

    def _fits(self, messages: list[Message]) -> bool:
        """Whether the messages have the one priority of what is in memory; theirs, when there is nothing."""
        if self._wishes or not messages:
            return not self._wishes
        level = self._level if self._ready or self._returned else self._priority(messages[0])
        last = None
        for message in messages:
            if message.property_set is not last:
                last = message.property_set
                if self._priority(message) != level:
                    return False
        self._level = level
        return True

    def _sort(self) -> None:
        """What is in memory is sorted from now on."""
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
        self._waiting[position] = (message, redelivered)
        entry = (-self._priority(message), position)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._waiting) + STALE_MAX:
            self._heap = self._fresh_heap()
        most = 2 * len(self._waiting) + STALE_MAX
        for wishes in self._wishes.values():
            wishes.unseen.append(position)
            if len(wishes.unseen) > most:
                wishes.unseen = deque([at for at in wishes.unseen if at in self._waiting])
            if len(wishes.heap) > most:
                wishes.heap = [entry for entry in wishes.heap if entry[1] in self._waiting]
                heapq.heapify(wishes.heap)

    def _fresh_heap(self) -> Heap:
        heap = [(-self._priority(message), position) for position, (message, _) in self._waiting.items()]
        heapq.heapify(heap)
        return heap

    def _ask(self, wishes: Wishes) -> bool:
        """Ask a consumer's wish about what has come. Return False if the rest is put off."""
        while wishes.unseen:
            if self._work.over:
                self._work.later(self.dispatch)
                return False
            position = wishes.unseen.popleft()
            found = self._waiting.get(position)
            if found is not None and self._wants(wishes.wish, found[0]):
                heapq.heappush(wishes.heap, (-self._priority(found[0]), position))
        return True

    def _wants(self, wish: Wish, message: Message) -> bool:
        """Whether a consumer wishes for the message; not when that cannot be told."""
        try:
            return self._work.selects(wish, message)
        except Exception as error:
            contained("delivery", error)
            return False

    def withdraw(self, first: int, count: int) -> None:
        """The disk did not take `count` messages: whoever has not got them yet will not."""
        if not self._sorted:
            super().withdraw(first, count)
            return
        for position in range(first, first + count):
            self._avoided.pop(position, None)
            found = self._waiting.pop(position, None)
            if found is not None:
                self.shrink(self.weigh(found[:1]))

    def requeue(self, taken: Iterable[tuple[int, Message]]) -> None:
        """Messages taken earlier return to their positions, and are redelivered."""
        messages = list(taken)
        if not self._sorted and self._fits([message for _, message in messages]):
            super().requeue(messages)
            return
        self._sort()
        for position, message in messages:
            self.unacknowledged -= 1
            self.octets += self.weigh((message,))
            self._wait(position, message, redelivered=True)

    def give_back(self, position: int, message: Message, consumer: Consumer) -> None:
        """`consumer` could not use a message that it had taken: another one had better have it."""
        self._sort()
        self._avoided[position] = consumer
        self.requeue([(position, message)])

    # Consumers.

    def add(self, consumer: Consumer, wish: Wish | None = None) -> None:
        """A consumer joins, which takes what it wishes or, without a wish, everything."""
        if wish is not None:
            self._sort()
            self._wishes[consumer] = Wishes(wish, self._waiting)
        super().add(consumer)

    def remove(self, consumer: Consumer) -> None:
        """A consumer leaves; what it has not acknowledged is its owner's to requeue."""
        super().remove(consumer)
        self._wishes.pop(consumer, None)
        if self._avoided:
            self.dispatch()

    def takes(self, consumer: Consumer) -> bool:
        """Whether the consumer may take a message sooner or later; one that does not is passed over."""
        return consumer in self.consumers

    def _may_have(self, consumer: Consumer, message: Message) -> bool:
        wishes = self._wishes.get(consumer)
        return wishes is None or self._wants(wishes.wish, message)

    # Out.

    def dispatch(self) -> None:
        """Hand out what is ready to consumers with room, in turn."""
        if self.gone:
            self._tell_gone()
        if self.gate.shut:
            self.gate.wait(self.dispatch)
            return
        if self._offers:
            self._offer_aside()
        while self._dispatch_memory():
            if self.storage is None or not self.storage.refill():
                return

    def _dispatch_memory(self) -> bool:
        """False: no consumer has room, or wants what is there."""
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
                self._hand_out(open_[0][0], min(open_[0][1], DISPATCH_MESSAGES_MAX))
            else:
                self._share(open_)
        return not self._returned and not self._ready and not self._waiting

    def _dispatch_sorted(self) -> bool:
        while self._waiting:
            open_ = self._open()
            if not open_:
                return False
            self._turn += 1
            start = self._turn % len(open_)
            handed = 0
            for consumer, room in open_[start:] + open_[:start]:
                if len(open_) == 1:
                    handed += self._hand_out_sorted(consumer, min(room, DISPATCH_MESSAGES_MAX))
                elif consumer.room() > 0:  # it may share its credit with one who has just had his
                    handed += self._hand_out_sorted(consumer, 1)
            if not handed:
                return False
        if self._sorted and not self._wishes:
            self._sorted = False
            self._heap.clear()
            self._first = self.next
        return True

    def _hand_out_sorted(self, consumer: Consumer, count: int) -> int:
        """Deliver at most `count` messages; returns how many left the queue, expired ones included."""
        utc = clock.utc()
        taken: list[tuple[int, Message, bool]] = []
        gone = octets = 0
        for position, message, redelivered in self._best(consumer):
            if self._drop_expired(position, message, utc):
                gone += 1
            else:
                taken.append((position, message, redelivered))
                octets += self.weigh((message,))
            if len(taken) >= count or octets >= DISPATCH_OCTETS_MAX:
                break
        self._taken([message for _, message, _ in taken], octets)
        for position, messages, redelivered in _runs(taken):
            self._deliver(consumer, position, messages, redelivered)
        return gone + len(taken)

    def _best(self, consumer: Consumer | None) -> Iterator[tuple[int, Message, bool]]:
        """Take what waits out of the sorted memory, in the order in which `consumer` may have it."""
        heap = self._heap
        if consumer is not None and consumer in self._wishes:
            wishes = self._wishes[consumer]
            if wishes.unseen and not self._ask(wishes):
                return
            heap = wishes.heap
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
        """`consumer` gave this message back, and there is another one who will take it."""
        if not self._avoided or self._avoided.get(position) is not consumer:
            return False
        for other in self.consumers:
            if other is not consumer and self.takes(other) and self._may_have(other, message):
                return True
        return False

    def take(self) -> tuple[int, Message, bool] | None:
        """The next message for a `get`: position, message, redelivered."""
        if self.gate.shut:
            return None
        if not self._sorted and not self._ready and not self._returned and self.storage is not None:
            self.storage.refill()
        if self._unsorted:
            self._sort()
        if not self._sorted:
            return super().take()
        utc = clock.utc()
        for position, message, redelivered in self._best(None):
            if not self._drop_expired(position, message, utc):
                self._taken((message,))
                return position, message, redelivered
        return None

    def drop_expired(self, most: int = sys.maxsize) -> float:
        """Drop what has expired; returns when the next of what is there will (UTC), or NEVER.

        What is sorted is looked at whole.
        """
        if self._unsorted:
            self._sort()
        if not self._sorted:
            return super().drop_expired(most)
        if self._aside:
            self._drop_expired_aside()
        utc = clock.utc()
        soonest = NEVER
        for position, (message, _) in list(self._waiting.items()):
            if self._drop_expired(position, message, utc):
                del self._waiting[position]
                self._avoided.pop(position, None)
            elif message.expires and (soonest == NEVER or message.expires < soonest):
                soonest = message.expires
        return soonest

    @property
    def loading(self) -> bool:
        """True: `take` finds nothing, for what comes next is still being read from the disk."""
        return not self._waiting and super().loading

    def untouched(self) -> list[tuple[int, int]]:
        """The positions of what nobody has been handed: in order, each range to before its end."""
        if not self._sorted:
            return super().untouched()
        found: list[tuple[int, int]] = []
        for position in sorted(at for at, (_, redelivered) in self._waiting.items() if not redelivered):
            if found and found[-1][1] == position:
                found[-1] = (found[-1][0], position + 1)
            else:
                found.append((position, position + 1))
        if self.storage is not None and self.storage.first is not None:
            found.append((self.storage.first, self.next))
        return found

    # Looking without taking.

    def browse(self) -> Iterator[tuple[int, Message]]:
        """Positions and messages that wait in memory, in the order in which they would be handed out."""
        utc = clock.utc()
        found: Iterable[tuple[int, Message]]
        if self._sorted:
            found = [(position, self._waiting[position][0]) for _, position in sorted(self._fresh_heap())]
        else:
            found = [*sorted(self._returned, key=lambda one: one[0]), *enumerate(self._ready, self._first)]
        for position, message in (*self._rows_aside(), *found):
            if not message.expires or message.expires > utc:
                yield position, message

    def look_at(self, position: int) -> Message | None:
        """The message that waits at `position` in memory."""
        if self._sorted:
            waiting = self._waiting.get(position)
            message = None if waiting is None else waiting[0]
        elif 0 <= position - self._first < len(self._ready):
            message = self._ready[position - self._first]
        else:
            message = next((one for at, one in self._returned if at == position), None)
        if message is None or (message.expires and message.expires <= clock.utc()):
            return None
        return message

    # The end.

    def purge(self) -> int:
        """Drop all that is ready; returns how many."""
        count = len(self)
        if self.storage is not None:
            self.storage.forget(list(self._waiting))
        self._waiting.clear()
        self._avoided.clear()
        self._heap.clear()
        for wishes in self._wishes.values():
            wishes.heap.clear()
            wishes.unseen.clear()
        super().purge()
        return count


def _runs(taken: list[tuple[int, Message, bool]]) -> Iterator[tuple[int, list[Message], bool]]:
    """Consecutive positions of one kind: the first position, the messages, whether they were delivered."""
    messages: list[Message] = []
    first, last, kind = 0, -1, False
    for position, message, redelivered in taken:
        if messages and (position != last + 1 or redelivered is not kind):
            yield first, messages, kind
            messages = []
        if not messages:
            first, kind = position, redelivered
        messages.append(message)
        last = position
    if messages:
        yield first, messages, kind

"""The queue: ready messages in order, consumers with credit, what they have not acknowledged yet.

Fresh messages wait in a deque. A message's *position* is its number of arrival; that of the first fresh one
is `_first`, so a position costs nothing until a message is taken. Messages that come back keep their position
and wait in a heap, always ahead of the fresh ones: requeueing is in place.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from gateway.broker.pressure import FULL, Pressure
from gateway.model.batch import Part
from gateway.model.message import Message

# One consumer gets at most this many messages at a time, so that several share a long queue.
DISPATCH_MESSAGES_MAX: Final = 256
# And at most this much at a time (or one message), so that a client that does not read is noticed in time.
DISPATCH_OCTETS_MAX: Final = 1_048_576


class Consumer(Protocol):
    """Who takes messages out of a queue."""

    def room(self) -> int:
        """How many messages it will take now; 0 when it has no credit or its stream is congested."""

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Take `messages`, the first of which has `position`, the next one more, and so on."""

    def cancelled(self, queue: Queue) -> None:
        """The queue is gone."""


class Queue:
    """Messages in order for any number of consumers."""

    def __init__(
        self,
        name: str,
        *,
        durable: bool = False,
        messages_max: int = 1_000_000,
        octets_max: int = 1 << 30,
        expired: Callable[[Message], None] | None = None,
    ) -> None:
        self.name = name
        self.durable = durable
        self.messages_max = messages_max  # so that a queue nobody reads cannot eat the process
        self.octets_max = octets_max
        self.octets = 0
        self.unacknowledged = 0
        self.deleted = False
        self.consumers: list[Consumer] = []
        self._ready: deque[Message] = deque()
        self._returned: list[tuple[int, Message]] = []
        self._first = 0
        self._turn = 0
        self._expired = expired
        self.refused = 0
        self._pressure = Pressure()

    def __len__(self) -> int:
        return len(self._ready) + len(self._returned)

    @property
    def full(self) -> bool:
        """True: its sources should stop reading until it has drained."""
        return len(self) >= self.messages_max or self.octets >= self.octets_max

    def publish(self, part: Part) -> None:
        """Take the part; it is accepted, for nothing here needs to survive.

        A full queue has its sources stop reading. Whoever cannot be stopped (a connection that also consumes
        must go on acknowledging) is refused at twice the limit.
        """
        if self.full:
            if len(self) >= 2 * self.messages_max or self.octets >= 2 * self.octets_max:
                self.refused += len(part.messages)
                part.settle(FULL)
                return
            self._pressure.hold_sources(part)
        self.put(part.messages)
        part.accept()
        self.dispatch()

    def put(self, messages: list[Message]) -> None:
        """Append without dispatching."""
        self._ready.extend(messages)
        self.octets += sum([len(message.body) for message in messages])

    def add(self, consumer: Consumer) -> None:
        """A consumer joins; messages that wait go out at once."""
        self.consumers.append(consumer)
        self.dispatch()

    def remove(self, consumer: Consumer) -> None:
        """A consumer leaves; what it has not acknowledged is its owner's to requeue."""
        self.consumers.remove(consumer)

    def dispatch(self) -> None:
        """Hand out what is ready to consumers with room, in turn."""
        while self._returned and self._hand_out_returned():
            pass
        while self._ready and not self._returned:
            open_ = [(consumer, room) for consumer in self.consumers if (room := consumer.room()) > 0]
            if not open_:
                return
            if len(open_) == 1:
                consumer, room = open_[0]
                self._hand_out(consumer, min(room, DISPATCH_MESSAGES_MAX))
            else:
                self._share(open_)

    def take(self) -> tuple[int, Message, bool] | None:
        """The next message for a `get`: position, message, redelivered."""
        utc = time.time()
        while self._returned:
            position, message = heapq.heappop(self._returned)
            if not self._drop_expired(message, utc):
                self._taken(1, len(message.body))
                return position, message, True
        while self._ready:
            message = self._ready.popleft()
            self._first += 1
            if not self._drop_expired(message, utc):
                self._taken(1, len(message.body))
                return self._first - 1, message, False
        return None

    def acknowledged(self, count: int) -> None:
        """`count` messages taken earlier are done with."""
        self.unacknowledged -= count

    def requeue(self, taken: Iterable[tuple[int, Message]]) -> None:
        """Messages taken earlier return to their positions, and are redelivered."""
        for position, message in taken:
            heapq.heappush(self._returned, (position, message))
            self.unacknowledged -= 1
            self.octets += len(message.body)

    def purge(self) -> int:
        """Drop all that is ready; returns how many."""
        count = len(self)
        self._first += len(self._ready)
        self._ready.clear()
        self._returned.clear()
        self.octets = 0
        self._tell_drained()
        return count

    def delete(self) -> int:
        """Cancel the consumers and drop all; returns how many messages were ready."""
        self.deleted = True
        consumers, self.consumers = self.consumers, []
        for consumer in consumers:
            consumer.cancelled(self)
        return self.purge()

    def _hand_out(self, consumer: Consumer, count: int) -> None:
        messages = self._pop(count)
        if messages:
            consumer.deliver(self, self._first - len(messages), messages, False)

    def _share(self, open_: list[tuple[Consumer, int]]) -> None:
        """Round-robin, one message each, for one round."""
        self._turn += 1
        start = self._turn % len(open_)
        for consumer, _ in open_[start:] + open_[:start]:
            self._hand_out(consumer, 1)

    def _pop(self, count: int) -> list[Message]:
        """The next `count` fresh messages at the most, without expired ones; stops behind an expired one."""
        ready = self._ready
        if count >= len(ready):
            messages = list(ready)
            ready.clear()
        else:
            messages = [ready.popleft() for _ in range(count)]
        self._first += len(messages)
        octets = 0
        expiring = False
        for message in messages:
            octets += len(message.body)
            if message.expires:
                expiring = True
        if octets > DISPATCH_OCTETS_MAX:
            octets = self._shorten(messages)
        if expiring:
            return self._without_expired(messages)
        self._taken(len(messages), octets)
        return messages

    def _shorten(self, messages: list[Message]) -> int:
        """Put back what exceeds DISPATCH_OCTETS_MAX, but not the first message; returns the octets kept."""
        octets = 0
        for at, message in enumerate(messages):
            if at and octets + len(message.body) > DISPATCH_OCTETS_MAX:
                self._ready.extendleft(reversed(messages[at:]))
                self._first -= len(messages) - at
                del messages[at:]
                break
            octets += len(message.body)
        return octets

    def _without_expired(self, messages: list[Message]) -> list[Message]:
        """Positions must stay consecutive: what follows an expired message goes back for the next round."""
        utc = time.time()
        kept: list[Message] = []
        for at, message in enumerate(messages):
            if self._drop_expired(message, utc):
                if kept:
                    rest = messages[at + 1 :]
                    self._ready.extendleft(reversed(rest))
                    self._first -= len(rest) + 1  # so that the last of `kept` ends just before `_first`
                    break
            else:
                kept.append(message)
        self._taken(len(kept), sum(len(message.body) for message in kept))
        return kept

    def _hand_out_returned(self) -> bool:
        """One returned message to a consumer with room; False when there is none."""
        count = len(self.consumers)
        for offset in range(count):
            consumer = self.consumers[(self._turn + offset) % count]
            if consumer.room() > 0:
                position, message = heapq.heappop(self._returned)
                if not self._drop_expired(message, time.time()):
                    self._turn += 1
                    self._taken(1, len(message.body))
                    consumer.deliver(self, position, [message], True)
                return True
        return False

    def _drop_expired(self, message: Message, utc: float) -> bool:
        if not message.expires or message.expires > utc:
            return False
        self.octets -= len(message.body)
        if self._expired is not None:
            self._expired(message)
        return True

    def _taken(self, count: int, octets: int) -> None:
        self.unacknowledged += count
        self.octets -= octets
        if self._pressure:
            self._tell_drained()

    def _tell_drained(self) -> None:
        if len(self) <= self.messages_max // 2 and self.octets <= self.octets_max // 2:
            self._pressure.relieve()

"""From what a server sends to messages: numbers that are owed an acknowledgement, and fragments joined.

CHANNEL ACK is cumulative for all handles of its channel (3.3.8). So a number is acknowledged when all that
were delivered before it on that channel are done with, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from gateway.protocols.amqpfast.events import Fragment


class Unsettled:
    """The messages of one channel that the server awaits an answer to, in the order of their delivery."""

    __slots__ = ("_done", "_order")

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._order) - len(self._done)

    @property
    def last(self) -> int:
        """The number of the latest message that awaits an answer; 0 if none does."""
        return self._order[-1] if self._order else 0

    def add(self, number: int) -> None:
        """A message was delivered."""
        self._order.append(number)

    def settle(self, numbers: Iterable[int]) -> int:
        """These are done with; returns what can be acknowledged now, 0 if nothing more than before."""
        order, done = self._order, self._done
        done.update(numbers)
        last = 0
        while order and order[0] in done:
            last = order.popleft()
            done.remove(last)
        return last


class Joined(NamedTuple):
    """A message whose last fragment has come. `body` is None when it was larger than the limit."""

    handle: int
    number: int
    bits: int
    head: bytes
    body: bytes | None
    name: bytes
    size: int


class Assembly:
    """Joins the fragments of one channel. A body of more than `octets_max` is passed over: to refuse it
    would cost the channel, and bring it again for ever."""

    __slots__ = ("_head", "_parts", "_size", "octets_max")

    def __init__(self, octets_max: int) -> None:
        self.octets_max = octets_max
        self._head = b""
        self._size = 0
        self._parts: list[bytes | memoryview] = []

    def take(self, fragment: Fragment) -> Joined | None:
        """The next fragment; the message when it was the last."""
        if fragment.first:
            self._head, self._size, self._parts = fragment.head, fragment.body_size, []
        fits = self._size <= self.octets_max
        if fits:
            self._parts.append(fragment.octets)
        if not fragment.last:
            return None
        body = b"".join(self._parts) if fits else None
        self._parts = []
        return Joined(
            fragment.handle, fragment.number, fragment.bits, self._head, body, fragment.dest_name, self._size
        )

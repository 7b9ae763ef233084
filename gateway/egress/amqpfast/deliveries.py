"""Received messages: numbers that await an acknowledgement, and joined fragments.

CHANNEL ACK is cumulative for all handles of its channel (3.3.8). So a number is acknowledged when everything
that was delivered before it on that channel is settled, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from gateway.protocols.amqpfast.events import Fragment


class Unsettled:
    """Unacknowledged messages of one channel, in the order of delivery."""

    __slots__ = ("_done", "_order")

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._order) - len(self._done)

    @property
    def last(self) -> int:
        """Number of the latest unacknowledged message, or 0 if there is none."""
        return self._order[-1] if self._order else 0

    def add(self, number: int) -> None:
        """Add the number of a delivered message."""
        self._order.append(number)

    def settle(self, numbers: Iterable[int]) -> int:
        """Mark the messages with these numbers as settled.

        Return the number to acknowledge now, up to which all messages are settled, or 0 if it has not
        changed.
        """
        order, done = self._order, self._done
        done.update(numbers)
        last = 0
        while order and order[0] in done:
            last = order.popleft()
            done.remove(last)
        return last


class JoinedMessage(NamedTuple):
    """Complete message, built from its fragments.

    `head` is its encoded content header, `size` the size of its body in bytes. `body` is None if it was
    larger than the limit.
    """

    handle: int
    number: int
    bits: int
    head: bytes
    body: bytes | None
    name: bytes
    size: int


class Assembly:
    """Assembly of messages from the fragments that arrive on one channel.

    A body of more than `bytes_max` bytes is skipped: a refusal would close the channel, and the server would
    send the message again on each new channel.
    """

    __slots__ = ("_head", "_parts", "_size", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._head = b""
        self._size = 0
        self._parts: list[bytes | memoryview] = []

    def take(self, fragment: Fragment) -> JoinedMessage | None:
        """Add the next fragment. Return the message if it was the last one, else None."""
        if fragment.first:
            self._head, self._size, self._parts = fragment.head, fragment.body_size, []
        fits = self._size <= self.bytes_max
        if fits:
            self._parts.append(fragment.data)
        if not fragment.last:
            return None
        body = b"".join(self._parts) if fits else None
        self._parts = []
        return JoinedMessage(
            fragment.handle, fragment.number, fragment.bits, self._head, body, fragment.dest_name, self._size
        )

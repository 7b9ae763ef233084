"""Order of messages that one owner of a session has requeued, restored at the next owner.

A quorum queue puts requeued messages into an order of its own when they are more than 32 or the broker is
busy (RabbitMQ 3.10), and delivers messages that are published meanwhile between them. So the previous owner
stores fingerprints of the requeued messages in the database, in order, and the next owner buffers the
messages that arrive until all requeued ones have been redelivered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

from gateway.engine.consumers import ClusterConsumer, Content

KNOWN_BYTES: Final = 4_096  # part of a body that is hashed: enough to distinguish messages of one topic
HeldDelivery = tuple[ClusterConsumer, int, bool, Content]
"""Delivered message: its consumer, delivery tag, redelivered flag, and contents."""


def fingerprint_of(content: Content) -> int:
    """Return a message's fingerprint: a CRC-32 of its address, and of its body's length and beginning.

    The content header is not included, because the broker adds to it.
    """
    wire, _, body = content
    return crc32(len(body).to_bytes(8), crc32(bytes(body[:KNOWN_BYTES]), crc32(wire)))


class RequeuedMessages:
    """Buffer of delivered messages until all requeued ones have arrived, to restore their old order.

    `prints` are the fingerprints of the requeued messages, in their old order.
    """

    __slots__ = ("_buffer", "_places", "_prints", "_remaining")

    def __init__(self, prints: Sequence[int]) -> None:
        self._places: dict[int, deque[int]] = {}
        for place, one in enumerate(prints):
            self._places.setdefault(one, deque()).append(place)
        self._prints = prints
        self._remaining = len(prints)
        self._buffer: list[tuple[int, HeldDelivery]] = []

    @property
    def count(self) -> int:
        """Number of requeued messages that are expected or have arrived."""
        return len(self._prints)

    @property
    def missing_count(self) -> int:
        """Number of requeued messages that have not been redelivered."""
        return self._remaining

    @property
    def buffered_count(self) -> int:
        """Number of buffered messages: the requeued ones that have arrived, and others."""
        return len(self._buffer)

    def hold(self, delivery: HeldDelivery) -> bool:
        """Buffer a delivered message, `delivery`. Return True if no requeued message is missing any more."""
        _, _, redelivered, content = delivery
        places = self._places.get(fingerprint_of(content)) if redelivered else None
        if places:
            self._remaining -= 1
            self._buffer.append((places.popleft(), delivery))
        else:
            self._buffer.append((self.count, delivery))
        return not self._remaining

    def fingerprints(self, again: Iterable[Content]) -> tuple[int, ...]:
        """Return the fingerprints of all messages that the session's next owner must expect.

        `again` are the contents of messages that have just been requeued. The result has the fingerprints
        that this object expects, whether they have arrived or not, and then those that `again` adds.
        """
        before = Counter(self._prints)
        others = []
        for one in map(fingerprint_of, again):
            if before[one]:
                before[one] -= 1
            else:
                others.append(one)
        return (*self._prints, *others)

    def in_order(self) -> list[HeldDelivery]:
        """Return all buffered messages: first the requeued ones in their old order, then the others.

        The other messages follow in the order of their arrival.
        """
        return [held for _, held in sorted(self._buffer, key=_place)]


def _place(one: tuple[int, HeldDelivery]) -> int:
    return one[0]

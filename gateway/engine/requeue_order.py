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
"""Arguments of `ClientSession.deliver`."""


def fingerprint_of(content: Content) -> int:
    """Return the fingerprint of a message: 32 bits of its address, and of length and start of its body.

    The content header is not included, because the broker adds to it.
    """
    wire, _, body = content
    return crc32(len(body).to_bytes(8), crc32(bytes(body[:KNOWN_BYTES]), crc32(wire)))


class RequeuedMessages:
    """Messages that must be redelivered in their old order, and a buffer for all that arrive meanwhile.

    `fingerprints` has the fingerprints of the requeued messages in order.
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
        """Number of requeued messages, whether redelivered or not."""
        return len(self._prints)

    @property
    def missing_count(self) -> int:
        """Number of requeued messages that have not been redelivered."""
        return self._remaining

    @property
    def buffered_count(self) -> int:
        """Number of buffered messages, requeued ones and others."""
        return len(self._buffer)

    def hold(self, delivery: HeldDelivery) -> bool:
        """Buffer one delivered message. Return True once all requeued messages have been redelivered."""
        _, _, redelivered, content = delivery
        places = self._places.get(fingerprint_of(content)) if redelivered else None
        if places:
            self._remaining -= 1
            self._buffer.append((places.popleft(), delivery))
        else:
            self._buffer.append((self.count, delivery))
        return not self._remaining

    def fingerprints(self, again: Iterable[Content]) -> tuple[int, ...]:
        """Return the fingerprints that the next owner must expect when the messages `again` are requeued.

        They are those of the messages that were requeued before, redelivered or not, followed by those of the
        others in `again`.
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
        """Return all buffered messages in order.

        The requeued ones are first, in their old order; the others follow as they arrived.
        """
        return [held for _, held in sorted(self._buffer, key=_place)]


def _place(one: tuple[int, HeldDelivery]) -> int:
    return one[0]

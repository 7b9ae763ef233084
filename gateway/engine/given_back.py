"""What a session's queue was given back by one owner, as the next one gets it.

A quorum queue puts what it is given back into an order of its own when that is more than 32 messages, or when
it is busy (RabbitMQ 3.10), and hands out what is published meanwhile between them. So the owner before says
in the database what it had, in its order, and the next one waits until all of that has come again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

from gateway.engine.consumers import Consumer, Content

KNOWN_OCTETS: Final = 4_096  # of a body: enough to tell messages of one topic apart
Held = tuple[Consumer, int, bool, Content]
"""What `ClientSession.deliver` is given."""


def print_of(content: Content) -> int:
    """By which a message is known again; what the broker adds to its header is not a part of it."""
    wire, _, body = content
    return crc32(len(body).to_bytes(8), crc32(bytes(body[:KNOWN_OCTETS]), crc32(wire)))


class GivenBack:
    """Messages by their prints, in their order, and what has come until all of them are there."""

    __slots__ = ("_held", "_left", "_places", "_prints")

    def __init__(self, prints: Sequence[int]) -> None:
        self._places: dict[int, deque[int]] = {}
        for place, one in enumerate(prints):
            self._places.setdefault(one, deque()).append(place)
        self._prints = prints
        self._left = len(prints)
        self._held: list[tuple[int, Held]] = []

    @property
    def count(self) -> int:
        """Messages that were given back."""
        return len(self._prints)

    @property
    def lacking(self) -> int:
        """Those of them that have not come."""
        return self._left

    @property
    def waiting(self) -> int:
        """Messages that have come."""
        return len(self._held)

    def hold(self, held: Held) -> bool:
        """A message has come. True: all that was given back is there."""
        _, _, redelivered, content = held
        places = self._places.get(print_of(content)) if redelivered else None
        if places:
            self._left -= 1
            self._held.append((places.popleft(), held))
        else:
            self._held.append((self.count, held))
        return not self._left

    def prints(self, again: Iterable[Content]) -> tuple[int, ...]:
        """For the next owner, when that is given back: of what was given back before, whether it has come or
        not, and of the others."""
        before = Counter(self._prints)
        others = []
        for one in map(print_of, again):
            if before[one]:
                before[one] -= 1
            else:
                others.append(one)
        return (*self._prints, *others)

    def in_order(self) -> list[Held]:
        """All that has come: first what was given back, as it was, then the others, as they came."""
        return [held for _, held in sorted(self._held, key=_place)]


def _place(one: tuple[int, Held]) -> int:
    return one[0]

"""Execution of one QUERY in portions, and the identifiers under which it lists messages.

A queue may be long, and a selector slow. The scan therefore examines messages until the client's time slice
is used up (`Stream.is_turn_spent`); other clients are served before the next portion. It lists messages that
waited when it reached their queue. A message that was not listed before gets an identifier at once, so that
no work is left to do for all of them together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final

import trio

from gateway.broker.priorities import PriorityQueue
from gateway.broker.selection_work import Selects
from gateway.model.message import Message

LISTED_MAX: Final = 10_000  # messages in one INDEX; the client requests the rest with another QUERY
INDEXED_MAX: Final = 100_000  # messages whose identifiers a handle stores; older ones are refused with 310


class PositionSet:
    """Set of positions in a queue, as ranges."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []  # in ascending order
        self._ends: list[int] = []  # positions behind each range

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, position: int) -> bool:
        at = bisect_right(self._starts, position) - 1
        return at >= 0 and position < self._ends[at]

    def add(self, position: int) -> None:
        """Add a position that is not in the set, and merge it with its neighbours."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, position)
        is_after = at > 0 and ends[at - 1] == position
        if at < len(starts) and starts[at] == position + 1:
            starts[at] = position
            if is_after:
                del starts[at], ends[at - 1]
        elif is_after:
            ends[at - 1] += 1
        else:
            starts.insert(at, position)
            ends.insert(at, position + 1)


class ListedIdentifiers:
    """Identifiers under which the QUERY commands of a handle have listed messages.

    An identifier is not a message number (3.5.8). Only the latest identifiers are stored. Messages with older
    ones are still known as listed and are not listed again, so that a client that repeatedly requests the
    rest of a list reaches its end.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._ids: dict[tuple[PriorityQueue, int], int] = {}
        self._places: dict[int, tuple[PriorityQueue, int]] = {}
        self._forgotten: dict[PriorityQueue, PositionSet] = {}

    def __len__(self) -> int:
        """Return the number of identifiers, plus the number of message ranges with dropped identifiers."""
        return len(self._places) + sum(map(len, self._forgotten.values()))

    def renewed(self) -> ListedIdentifiers:
        """Return the identifiers to use for a list of all messages.

        The result is this object, or a new one with larger identifiers if some of this one's have been
        dropped.
        """
        return ListedIdentifiers(self._next) if self._forgotten else self

    def is_forgotten(self, queue: PriorityQueue, position: int) -> bool:
        """Return True if the message at this position was listed and its identifier has been dropped."""
        forgotten = self._forgotten.get(queue)
        return forgotten is not None and position in forgotten

    def number_of(self, queue: PriorityQueue, position: int) -> int | None:
        """Return the identifier of the message at this queue position, or None if it has none."""
        return self._ids.get((queue, position))

    def enter(self, queue: PriorityQueue, position: int) -> int:
        """Assign a new identifier to the message at this queue position, and return the identifier.

        If too many identifiers are stored, the oldest one is dropped.
        """
        number = self._next
        self._next += 1
        place = (queue, position)
        self._ids[place] = number
        self._places[number] = place
        oldest = self._places.pop(number - INDEXED_MAX, None)
        if oldest is not None:
            del self._ids[oldest]
            if oldest[0] not in self._forgotten:
                self._forgotten[oldest[0]] = PositionSet()
            self._forgotten[oldest[0]].add(oldest[1])
        return number

    def find(self, number: int) -> tuple[PriorityQueue, Message] | None:
        """Return queue and message of the identifier `number`, or None if the message no longer waits."""
        place = self._places.get(number)
        if place is None:
            return None
        queue, position = place
        message = None if queue.deleted else queue.peek(position)
        return None if message is None else (queue, message)


class QueryScan:
    """Scan of waiting messages for those that a QUERY lists."""

    __slots__ = ("_above", "_index", "_is_cut", "_listed", "_selects", "_waiting")

    def __init__(
        self,
        waiting: Iterator[tuple[PriorityQueue, int, Message]],
        selects: Selects | None,
        index: ListedIdentifiers,
        above: int,
    ) -> None:
        """Prepare the scan of the messages that `waiting` yields, each with its queue and position.

        `selects` chooses messages; None chooses all. `index` has the identifiers that the handle's earlier
        QUERY commands have assigned. Only messages with an identifier above `above` are listed.
        """
        self._waiting = waiting
        self._selects = selects
        self._index = index
        self._above = above
        self._listed: list[int] = []
        self._is_cut = False  # True if messages without identifiers were left to another QUERY

    def scan(self, spent: Callable[[], bool]) -> bool:
        """Examine messages, at least one, until `spent` returns True.

        Return True if all messages have been examined.
        """
        for queue, position, message in self._waiting:
            if self._selects is None or self._selects(message):
                self._list(queue, position)
            if spent():
                return False
        return True

    def _list(self, queue: PriorityQueue, position: int) -> None:
        """List a message if its identifier is above the limit. Assign an identifier if there is none.

        A message without identifier is skipped if its identifier was dropped, or if the list is full.
        """
        number = self._index.number_of(queue, position)
        if number is None:
            if self._index.is_forgotten(queue, position):
                return
            if len(self._listed) >= LISTED_MAX:
                self._is_cut = True
                return
            number = self._index.enter(queue, position)
        if number > self._above:
            self._listed.append(number)

    def result(self) -> tuple[list[int], bool]:
        """Return the identifiers in ascending order, at most LISTED_MAX, and True if there are more."""
        listed = sorted(self._listed)
        return listed[:LISTED_MAX], self._is_cut or len(listed) > LISTED_MAX


class NextTurn:
    """Awaitable for a command that has used up its connection's time slice: other tasks run first."""

    async def wait(self) -> None:
        """Let other tasks run."""
        await trio.lowlevel.checkpoint()


NEXT_TURN: Final = NextTurn()

"""Queues that wait for credit that several consumers share: the credit of a channel or of a connection.

When a client acknowledges, credit becomes free that no particular queue is entitled to. A queue that could
not deliver to a consumer for lack of this credit is therefore appended to a waiting list. After a delivery it
goes to the end of the list, so that all queues are served in turn, however many messages each has.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.broker.queue import Queue


class CreditQueue:
    """Queues that wait for credit shared by their consumers; the one that has waited longest comes first.

    The function `has_room` returns True while there is credit.
    """

    __slots__ = ("_has_room", "_queues")

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._queues: dict[Queue, None] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def join(self, queue: Queue) -> None:
        """Append a queue to the waiting list; a queue that waits already keeps its position."""
        self._queues.setdefault(queue)

    def dispatch(self) -> None:
        """Let the waiting queues deliver in turn, until the credit is used up."""
        for _ in range(len(self._queues)):
            queue = next(iter(self._queues), None)
            if queue is None or not self._has_room():
                return
            del self._queues[queue]
            queue.dispatch()

"""Queues that wait for credit that several consumers share: the credit of a channel or of a whole connection.

Returned shared credit belongs to no particular queue. A queue that could not deliver to a consumer for lack
of such credit therefore joins a line. Once served it goes to the end of the line, so that each queue gets its
turn, however many messages the first one has.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.broker.queue import Queue


class CreditQueue:
    """Queues waiting for shared credit, in order of waiting time.

    `has_room` returns True while there is credit.
    """

    __slots__ = ("_has_room", "_queues")

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._queues: dict[Queue, None] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def join(self, queue: Queue) -> None:
        """Append the queue; a queue that already waits keeps its place."""
        self._queues.setdefault(queue)

    def dispatch(self) -> None:
        """Dispatch the waiting queues in turn, until the credit is used up."""
        for _ in range(len(self._queues)):
            queue = next(iter(self._queues), None)
            if queue is None or not self._has_room():
                return
            del self._queues[queue]
            queue.dispatch()

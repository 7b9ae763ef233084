"""Who waits for credit that several consumers share: those of a channel, or all of a connection.

Credit that comes back belongs to nobody's queue. So a queue that could give a consumer nothing for want of it
stands in line, and goes behind the others when it has been served: each has its turn, however much the first
one holds.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.broker.queue import Queue


class Line:
    """Queues that wait, the longest waiting first. `has_room`: whether there is credit."""

    __slots__ = ("_has_room", "_queues")

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._queues: dict[Queue, None] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def join(self, queue: Queue) -> None:
        """The queue waits; one that does already keeps its place."""
        self._queues.setdefault(queue)

    def dispatch(self) -> None:
        """Serve the queues in turn, as far as the credit goes."""
        for _ in range(len(self._queues)):
            queue = next(iter(self._queues), None)
            if queue is None or not self._has_room():
                return
            del self._queues[queue]
            queue.dispatch()

"""Destinations: each subscription has a queue of its own, for as long as it lasts."""

from __future__ import annotations

from gateway.broker.queue import Queue
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message


class StompNamespace:
    """What is subscribed to, by destination."""

    retained = None

    def __init__(self) -> None:
        self._queues: dict[str, list[Queue]] = {}

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """The queues of the subscriptions to this destination."""
        return tuple(self._queues.get(address.name, ()))

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The address decides."""
        return self.sinks(message.address)

    def subscribe(self, destination: str) -> Queue:
        """A subscription begins."""
        queue = Queue(destination)
        self._queues.setdefault(destination, []).append(queue)
        return queue

    def unsubscribe(self, queue: Queue) -> None:
        """It ends, and what it had not been sent goes with it."""
        self._queues[queue.name].remove(queue)
        queue.delete()

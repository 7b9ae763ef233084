"""Queues and subscriptions at a replica, whose storage is the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, cast

from gateway import clock
from gateway.broker.amqpfast.destinations import FastQueue, Interest, Subscription, Taker
from gateway.broker.amqpfast.virtual_host import QueueLimits
from gateway.broker.queue import Consumer
from gateway.engine.amqpfast.looking import Seen
from gateway.engine.amqpfast.storage import ClusterStorage
from gateway.model.message import Message

ELSEWHERE: Final = " elsewhere"  # owns temporary queues of other replicas' clients; no client is called so


class EngineQueue(FastQueue):
    """A destination of the queue service."""

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        storage: Callable[[EngineQueue], ClusterStorage],
        owner: str | None = None,
        maker: str | None = None,
    ) -> None:
        super().__init__(name, durable=True, owner=owner, maker=maker, **limits)
        self.seen: Seen = {}  # when it was looked at
        self.cluster = storage(self)

    def purge(self) -> int:
        """Drop all that is ready, here and on the cluster; returns how many were here."""
        self.seen = {}
        return super().purge()

    def browse(self) -> Iterator[tuple[int, Message]]:
        """What was seen when it was looked at, as far as it has not expired."""
        utc = clock.utc()
        for position, message in self.seen.items():
            if not message.expires or message.expires > utc:
                yield position, message

    def look_at(self, position: int) -> Message | None:
        """One of these."""
        message = self.seen.get(position)
        return None if message is None or (message.expires and message.expires <= clock.utc()) else message

    @property
    def window(self) -> int:
        """How many messages its consumers may hold, as long as they are not stopped."""
        takers = [cast(Taker, consumer) for consumer in self.consumers]
        return sum([taker.window for taker in takers if not taker.paused])

    def dispatch(self) -> None:
        """Hand out what is here, and have as much here as can be handed out."""
        super().dispatch()
        self.cluster.adjust(self.window)

    def remove(self, consumer: Consumer) -> None:
        """A consumer leaves."""
        super().remove(consumer)
        self.dispatch()

    def give_back(self, position: int, message: Message, consumer: Consumer) -> None:
        """`consumer` could not use a message: others here had better have it, or at another replica."""
        if len(self.consumers) > 1 or not self.cluster.holds(position):
            super().give_back(position, message, consumer)
        else:
            self.unacknowledged -= 1
            self.cluster.give_back(position)

    def requeue(self, taken: Iterable[tuple[int, Message]]) -> None:
        """What can still be settled returns to its place; the rest has gone back to the cluster."""
        super().requeue(still_held(self, taken))


class EngineSubscription(Subscription):
    """The messages of a topic that one consumer is owed."""

    def __init__(
        self,
        interest: Interest,
        limits: QueueLimits,
        storage: Callable[[EngineSubscription], ClusterStorage],
        key: tuple[str, str] | None = None,
        maker: str | None = None,
    ) -> None:
        super().__init__(interest, key=key, maker=maker, **limits)
        self.cluster = storage(self)

    @property
    def window(self) -> int:
        """How many messages its consumers may hold; while one is stopped they wait here, for nobody else
        would take them."""
        return sum([cast(Taker, consumer).window for consumer in self.consumers])

    def wants(self, message: Message) -> bool:
        """Whether it is for this: bindings know whole levels only, and no selectors."""
        interest = self.interest
        return (
            interest.covers(message.address.name)
            and (self.local is None or message.sender != self.local)
            and (interest.selects is None or interest.selects(message))
        )

    def dispatch(self) -> None:
        """Hand out what is here, and have as much here as can be handed out."""
        super().dispatch()
        self.cluster.adjust(self.window)

    def remove(self, consumer: Consumer) -> None:
        """The consumer leaves."""
        super().remove(consumer)
        self.dispatch()

    def requeue(self, taken: Iterable[tuple[int, Message]]) -> None:
        """What can still be settled returns to its place; the rest has gone back to the cluster."""
        super().requeue(still_held(self, taken))


def still_held(
    queue: EngineQueue | EngineSubscription, taken: Iterable[tuple[int, Message]]
) -> list[tuple[int, Message]]:
    """Those of the messages that can still be settled: of a connection that is lost all are the cluster's."""
    rows = list(taken)
    kept = [row for row in rows if queue.cluster.holds(row[0])]
    queue.unacknowledged -= len(rows) - len(kept)
    return kept

"""One queue that a link consumes from, on a channel of its own, and the acknowledgements that it owes.

A channel for each queue keeps a failure (the queue is gone, or not ours to read) to that queue, and makes
delivery tags consecutive per queue. A consumer lives as long as its channel; a settlement that comes later
finds it dead and is dropped, for the broker has long since given the message back to the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.egress.amqp091.topology import Declaration
from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection

# A message for which there is no memory goes back to its queue after this long; it is redelivered at once.
RELEASE_SECS: Final = 1.0


class AmqpLinkConsumer:
    """The consumer of one queue. `wake` is called when there is something to acknowledge.

    `accepted` gathers the tags of messages that were accepted until `flush`.
    """

    __slots__ = (
        "_answered",
        "_floor",
        "_later",
        "_machine",
        "_wake",
        "accepted",
        "channel",
        "counted",
        "declaration",
        "last",
        "live",
        "stopping",
        "tag",
    )

    def __init__(
        self,
        declaration: Declaration,
        machine: ClientConnection,
        channel: int,
        wake: Callable[[AmqpLinkConsumer], None],
    ) -> None:
        self.declaration = declaration
        self.channel = channel
        self.live = True
        self.counted = False  # the broker has counted the queue's consumers since it began, and found some
        self.stopping = False
        self.tag = ""  # of the consumer, once the broker has named it
        self.last = 0  # delivery tag of the last message
        self.accepted: list[int] = []
        self._machine = machine
        self._wake = wake
        self._floor = 1  # everything below it is answered
        self._answered: set[int] = set()  # tags above it that are
        self._later: list[tuple[float, int]] = []  # when to give back which

    @property
    def outstanding(self) -> int:
        """Messages that the broker awaits an answer to."""
        return self.last + 1 - self._floor - len(self._answered) if self.live else 0

    @property
    def done(self) -> bool:
        """Its channel can be closed: nothing is left that has to be answered."""
        return not self.outstanding

    def begin(self, prefetch: int, priority: int) -> None:
        """The channel is open: consume. `priority` is that of the consumer among those of the queue."""
        arguments = (("x-priority", Value(ValueType.INT32, priority)),) if priority else ()
        self._machine.send_method(self.channel, m.BasicQos(prefetch_count=prefetch))
        self._machine.send_method(self.channel, m.BasicConsume(self.declaration.name, arguments=arguments))

    def stop(self) -> None:
        """No more messages are wanted; those on their way are still answered."""
        self.stopping = True
        if self.tag:
            self._machine.send_method(self.channel, m.BasicCancel(self.tag))

    def wake(self) -> None:
        """The first of the accepted messages since the last flush."""
        if self.live:
            self._wake(self)

    def rejected(self, tag: int) -> None:
        """Have the broker drop a message, or dead-letter it."""
        if self.live:
            self._machine.nack(self.channel, tag)
            self._answer(tag)
            self._wake(self)

    def give_back_later(self, tag: int, now: float) -> None:
        """Requeue a message after RELEASE_SECS."""
        if self.live:
            self._later.append((now + RELEASE_SECS, tag))

    def tick(self, now: float) -> None:
        """Give back what has waited long enough."""
        if not self._later or not self.live:
            return
        due = [tag for at, tag in self._later if at <= now]
        self._later = [(at, tag) for at, tag in self._later if at > now]
        for tag in due:
            self._machine.nack(self.channel, tag, requeue=True)
            self._answer(tag)
        if due:
            self._wake(self)

    def flush(self) -> None:
        """Acknowledge what was accepted: at once up to the lowest open message, the rest one by one."""
        tags, self.accepted = self.accepted, []
        if not tags or not self.live:
            return
        tags.sort()
        answered = self._answered
        floor = self._floor
        last = count = 0
        for tag in tags:
            if tag == floor:
                floor += 1
                last = tag
                count += 1
                while answered and floor in answered:
                    answered.remove(floor)
                    floor += 1
            else:
                self._machine.ack(self.channel, tag)
                answered.add(tag)
        self._floor = floor
        if count:
            self._machine.ack(self.channel, last, multiple=count > 1)

    def _answer(self, tag: int) -> None:
        answered = self._answered
        answered.add(tag)
        while self._floor in answered:
            answered.remove(self._floor)
            self._floor += 1

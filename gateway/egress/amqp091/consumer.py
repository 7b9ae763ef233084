"""Consumer of one queue of a link, with a channel of its own and its pending acknowledgements.

A channel for each queue limits a failure (the queue was deleted, or may not be read) to that queue, and makes
delivery tags consecutive per queue. A consumer exists as long as its channel. When a message is settled after
the channel was closed, nothing is sent, because the broker has already requeued the message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.egress.amqp091.topology import Declaration
from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection

# Seconds until a message for which there is no memory is requeued; it is redelivered at once.
RELEASE_SECS: Final = 1.0


class AmqpLinkConsumer:
    """Consumer of one queue.

    `accepted` collects the delivery tags of accepted messages until `flush`. `wake` is called with the
    consumer when there is something to acknowledge.
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
        "is_repeated",
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
        self.counted = False  # the broker has reported consumers of the queue since this one began
        # The connection was lost, and the queue is consumed again: unsettled messages are delivered again.
        self.is_repeated = False
        self.stopping = False
        self.tag = ""  # of the consumer, once the broker has named it
        self.last = 0  # delivery tag of the last message
        self.accepted: list[int] = []
        self._machine = machine
        self._wake = wake
        self._floor = 1  # all lower tags are settled
        self._answered: set[int] = set()  # higher tags that are settled
        self._later: list[tuple[float, int]] = []  # when to requeue which tag

    @property
    def outstanding(self) -> int:
        """Number of messages that are not settled."""
        return self.last + 1 - self._floor - len(self._answered) if self.live else 0

    @property
    def is_settled(self) -> bool:
        """True if all messages are settled, so that the channel can be closed."""
        return not self.outstanding

    def begin(self, prefetch: int, priority: int) -> None:
        """Send basic.qos with this prefetch count, and basic.consume, on the open channel.

        `priority` is the consumer priority (x-priority); 0 is the default.
        """
        arguments = (("x-priority", Value(ValueType.INT32, priority)),) if priority else ()
        self._machine.send_method(self.channel, m.BasicQos(prefetch_count=prefetch))
        self._machine.send_method(self.channel, m.BasicConsume(self.declaration.name, arguments=arguments))

    def stop(self) -> None:
        """Send basic.cancel. Messages that were received before are still acknowledged."""
        self.stopping = True
        if self.tag:
            self._machine.send_method(self.channel, m.BasicCancel(self.tag))

    def wake(self) -> None:
        """Notify the connection of the first accepted message since the last flush."""
        if self.live:
            self._wake(self)

    def rejected(self, tag: int) -> None:
        """Reject the message with this delivery tag, so that the broker drops or dead-letters it."""
        if self.live:
            self._machine.nack(self.channel, tag)
            self._answer(tag)
            self._wake(self)

    def requeue_later(self, tag: int, now: float) -> None:
        """Requeue the message with this delivery tag at the broker after RELEASE_SECS seconds.

        `now` is in loop-clock seconds.
        """
        if self.live:
            self._later.append((now + RELEASE_SECS, tag))

    def tick(self, now: float) -> None:
        """Requeue messages whose wait is over.

        `now` is in loop-clock seconds.
        """
        if not self._later or not self.live:
            return
        due_tags = [tag for at, tag in self._later if at <= now]
        self._later = [(at, tag) for at, tag in self._later if at > now]
        for tag in due_tags:
            self._machine.nack(self.channel, tag, requeue=True)
            self._answer(tag)
        if due_tags:
            self._wake(self)

    def flush(self) -> None:
        """Send basic.ack for the accepted messages.

        One ack with `multiple` is for all messages below the lowest unsettled one. Other messages get an ack
        each.
        """
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

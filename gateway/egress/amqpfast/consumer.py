"""Consumer of one source of a link, with a channel of its own and its pending acknowledgements.

A channel for each source has message numbers of its own, so that a message that waits for its target does not
delay the acknowledgements of other sources. A consumer exists as long as its channel. When a message is
settled after the channel was closed, nothing is sent, because the server delivers the message again. When the
server closes only the handle, the consumer is `resting` until `reopen`: delivered messages are still
acknowledged on the channel.

AMQP/Fast has no negative acknowledgement that is final: a rejected message is acknowledged when it is stored
as a dead letter. A message for which there is no memory is returned to its queue after a while by UNGET, and
another consumer may get it. A topic does not accept returned messages, so these are retried locally.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.egress.amqpfast.deliveries import Assembly, Unsettled
from gateway.egress.amqpfast.login import split_name
from gateway.egress.amqpfast.sources import LinkSource
from gateway.model.message import Message
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.dialect import SERVICES

RELEASE_SECS: Final = 1.0  # until a message for which there is no memory is returned or retried
Receipt = tuple["FastLinkConsumer", int, Message]


class FastLinkConsumer:
    """Consumer of one source of a link, on a channel of its own.

    `accepted` collects the numbers of settled messages until `flush`. `wake` is called with the consumer when
    there is something to acknowledge.
    """

    __slots__ = (
        "_former",
        "_later",
        "_machine",
        "_wake",
        "accepted",
        "assembly",
        "channel",
        "handle",
        "live",
        "resting",
        "source",
        "stopping",
        "unsettled",
    )

    def __init__(
        self,
        source: LinkSource,
        machine: ClientConnection,
        wake: Callable[[FastLinkConsumer], None],
        bytes_max: int,
    ) -> None:
        """Open the channel and the handle. Raises LocalProtocolError if no channel or handle is free.

        Bodies of more than `bytes_max` bytes are skipped.
        """
        self.source = source
        self.live = True
        self.stopping = False
        self.resting = False
        self.accepted: list[int] = []
        self.unsettled = Unsettled()
        self.assembly = Assembly(bytes_max)
        self._machine = machine
        self._wake = wake
        self._later: list[tuple[float, Receipt]] = []
        self._former = 0  # messages up to this number were delivered on a closed handle
        self.channel = machine.open_channel(confirm=False)
        self.handle = self._open_handle()

    def _open_handle(self) -> int:
        begin, _ = self._names()
        command = m.HandleOpen(
            self.channel, service_type=SERVICES[self.source.service], consumer=True, dest_name=begin
        )
        return self._machine.open_handle(command, confirm=False)

    def reopen(self) -> None:
        """Open a new handle on the same channel, after the server has closed the previous handle.

        Raises LocalProtocolError if no handle is free.
        """
        self.handle = self._open_handle()
        self.resting = False
        self._former = self.unsettled.last

    def _names(self) -> tuple[str, str]:
        source = self.source
        return (source.name, "") if source.prefix else split_name(source.service, source.name)

    def begin(self, prefetch: int) -> None:
        """Send HANDLE CONSUME; at most `prefetch` messages are then delivered and not acknowledged."""
        source = self.source
        topic = source.service == "topic"
        self._machine.send(
            m.HandleConsume(
                self.handle,
                self._machine.new_tag(self.channel),
                prefetch,
                no_local=topic,  # messages of the gateway itself shall not be sent back
                dest_name=self._names()[1],
                identifier=source.identifier,
            )
        )

    def stop(self) -> None:
        """Stop consuming, and cancel a durable subscription. Received messages are still acknowledged."""
        self.stopping = True
        source = self.source
        if source.identifier:
            self._machine.send(m.HandleCancel(self.handle, 0, self._names()[1], source.identifier))
        self._machine.close_handle(self.handle)

    def wake(self) -> None:
        """Notify the connection of the first accepted message since the last flush."""
        if self.live:
            self._wake(self)

    def requeue_later(self, receipt: Receipt, now: float) -> None:
        """Return a message to its queue after RELEASE_SECS seconds, because memory is short.

        `now` is in loop-clock seconds.
        """
        if self.live:
            self._later.append((now + RELEASE_SECS, receipt))

    def tick(self, now: float) -> list[Receipt]:
        """Return messages to their queue by UNGET when the wait that `requeue_later` began is over.

        The result has the receipts of messages that cannot be returned to a queue: the link retries them
        itself. `now` is in loop-clock seconds.
        """
        if not self._later or not self.live:
            return []
        due_receipts = [receipt for at, receipt in self._later if at <= now]
        self._later = [one for one in self._later if one[0] > now]
        if self.source.service != "queue" or self.stopping or self.resting:
            return due_receipts
        # Those that belong to this handle.
        numbers = [number for _, number, _ in due_receipts if number > self._former]
        for number in numbers:
            self._machine.send(m.HandleUnget(self.handle, 0, number))
        if numbers:
            self.accepted += numbers
            self._wake(self)
        return [receipt for receipt in due_receipts if receipt[1] <= self._former]

    def flush(self) -> None:
        """Acknowledge all messages up to the last number below which every message is settled."""
        numbers, self.accepted = self.accepted, []
        if numbers and self.live:
            last = self.unsettled.settle(numbers)
            if last:
                self._machine.ack(self.channel, last)

"""One source that a link consumes, on a channel of its own, and the answers that it owes.

A channel for each source makes its message numbers its own, so that a message that waits for its target does
not hold up the acknowledgements of others. A consumer lives as long as its channel; a settlement that comes
later finds it dead and is dropped, for the server delivers the message again. When the server closes its
handle alone it rests: what was delivered is still acknowledged on the channel, until `reopen`.

AMQP/Fast has no word for a message that is refused for good: it is acknowledged when it is safe among the
dead letters. One for which there is no memory goes back to its queue after a while, by UNGET, which another
consumer may then have; a topic takes nothing back, so there it is tried again from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.egress.amqpfast.opening import split_name
from gateway.egress.amqpfast.reading import Assembly, Unsettled
from gateway.egress.amqpfast.sources import Source
from gateway.model.message import Message
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.dialect import SERVICES

RELEASE_SECS: Final = 1.0  # until a message for which there is no memory is given back, or tried again
Receipt = tuple["FastLinkConsumer", int, Message]


class FastLinkConsumer:
    """The consumer of one source. `wake` is called when there is something to acknowledge.

    `accepted` gathers the numbers of messages that are done with until `flush`.
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
        source: Source,
        machine: ClientConnection,
        wake: Callable[[FastLinkConsumer], None],
        octets_max: int,
    ) -> None:
        """Opens channel and handle. Raises LocalProtocolError when there is none left."""
        self.source = source
        self.live = True
        self.stopping = False
        self.resting = False
        self.accepted: list[int] = []
        self.unsettled = Unsettled()
        self.assembly = Assembly(octets_max)
        self._machine = machine
        self._wake = wake
        self._later: list[tuple[float, Receipt]] = []
        self._former = 0  # messages up to this number came by a handle that is closed
        self.channel = machine.open_channel(confirm=False)
        self.handle = self._open_handle()

    def _open_handle(self) -> int:
        begin, _ = self._names()
        command = m.HandleOpen(
            self.channel, service_type=SERVICES[self.source.service], consumer=True, dest_name=begin
        )
        return self._machine.open_handle(command, confirm=False)

    def reopen(self) -> None:
        """Open another handle, for the server has closed the one before. Raises LocalProtocolError when there
        is none left."""
        self.handle = self._open_handle()
        self.resting = False
        self._former = self.unsettled.last

    def _names(self) -> tuple[str, str]:
        source = self.source
        return (source.name, "") if source.prefix else split_name(source.service, source.name)

    def begin(self, prefetch: int) -> None:
        """Consume."""
        source = self.source
        topic = source.service == "topic"
        self._machine.send(
            m.HandleConsume(
                self.handle,
                self._machine.new_tag(self.channel),
                prefetch,
                no_local=topic,  # what we have brought there ourselves shall not come back
                dest_name=self._names()[1],
                identifier=source.identifier,
            )
        )

    def stop(self) -> None:
        """Nothing more is wanted, also not while we are away; what is on its way is still answered."""
        self.stopping = True
        source = self.source
        if source.identifier:
            self._machine.send(m.HandleCancel(self.handle, 0, self._names()[1], source.identifier))
        self._machine.close_handle(self.handle)

    def wake(self) -> None:
        """The first of the accepted messages since the last flush."""
        if self.live:
            self._wake(self)

    def give_back_later(self, receipt: Receipt, now: float) -> None:
        """Give a message for which there is no memory back to its queue after RELEASE_SECS."""
        if self.live:
            self._later.append((now + RELEASE_SECS, receipt))

    def tick(self, now: float) -> list[Receipt]:
        """Give back to a queue what has waited long enough; returns what is to be tried again from here."""
        if not self._later or not self.live:
            return []
        due = [receipt for at, receipt in self._later if at <= now]
        self._later = [one for one in self._later if one[0] > now]
        if self.source.service != "queue" or self.stopping or self.resting:
            return due
        known = [number for _, number, _ in due if number > self._former]  # to this handle
        for number in known:
            self._machine.send(m.HandleUnget(self.handle, 0, number))
        if known:
            self.accepted += known
            self._wake(self)
        return [receipt for receipt in due if receipt[1] <= self._former]

    def flush(self) -> None:
        """Acknowledge as far as everything is done with."""
        numbers, self.accepted = self.accepted, []
        if numbers and self.live:
            last = self.unsettled.settle(numbers)
            if last:
                self._machine.ack(self.channel, last)

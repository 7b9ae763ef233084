"""A transaction of one AMQP channel: publishes and acknowledgements that wait for tx.commit.

What is published was routed when it came, to the names of queues, as RabbitMQ does it: what has been bound
or unbound since makes no difference, but a queue that was deleted is not there, and one that has its name now
is. A message lives from the commit on. What is acknowledged is out of the client's hands at once, but not
settled. At the commit all of it goes into the queues together, and the client is told when every queue, and
the disk, has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gateway.broker.amqp091.dead_lettering import living
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.dispatcher import RoutingEntry
from gateway.errors import ProtocolError
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.spooled import Spooled
from gateway.protocols.amqp091.translate import essentials

if TYPE_CHECKING:
    from gateway.ingress.amqp091.channel import AmqpChannel, Touched, Unacknowledged
    from gateway.ingress.amqp091.connection import Content

IN_TRANSACTION = -1  # stands for the confirm number in the receipts of a transaction


class Routed:
    """The namespace of one message that was routed some time ago."""

    def __init__(self, host: VirtualHost, sinks: Iterable[Sink]) -> None:
        self._host = host
        self._sinks = tuple(sinks)

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """The message decides."""
        return None

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """What it was routed to, as far as that is there."""
        queues = self._host.queues
        found = (queues.get(one.name) if isinstance(one, AmqpQueue) else one for one in self._sinks)
        return tuple(one for one in found if one is not None)

    @property
    def retained(self) -> None:
        """AMQP retains nothing."""


def _says_the_queue(entry: RoutingEntry) -> bool:
    """Whether the key is a queue's name, for the default exchange, so that there was nothing to route by."""
    return not entry.address.scope


class Transaction:
    """What a channel has said since its last commit or rollback."""

    def __init__(self, channel: AmqpChannel) -> None:
        self._channel = channel
        self._publishes: list[tuple[RoutingEntry, Message, Content | None]] = []
        self._generation = 0  # of the dispatcher, when the first of them was routed
        self.octets = 0  # of what is published, less what is on disk
        self._settlements: list[tuple[list[tuple[int, Unacknowledged]], bool | None]] = []
        self._open = 0  # of a commit: what has not been heard of yet
        self._failed = False
        self._then: Callable[[bool], None] | None = None

    @property
    def addresses(self) -> set[Address]:
        """Where it is going to publish to."""
        return {message.address for _, message, _ in self._publishes}

    def publish(self, entry: RoutingEntry, message: Message, content: Content | None) -> tuple[int, int]:
        """Keep a message for the commit; returns how many are kept, and what they weigh.

        Raises RemoteProtocolError when the message decides where it goes, and malformed its headers.
        """
        if not self._publishes:
            self._generation = self._channel.connection.ingress.dispatcher.generation
        if entry.recipients is None and not _says_the_queue(entry):
            entry = self._routed(entry, message)
        self._publishes.append((entry, message, content))
        self.octets += message.octets - len(message.body) * isinstance(message.body, Spooled)
        return len(self._publishes), self.octets

    def settle(self, tag: int, multiple: bool, requeue: bool | None) -> bool:
        """Keep the settling of deliveries (`requeue` None: acknowledged). False: the tag is unknown."""
        taken = self._channel.tagged(tag, multiple)
        if taken:
            self._settlements.append((taken, requeue))
        return bool(taken) or (multiple and tag == 0)

    def rollback(self) -> None:
        """Forget it all; what was acknowledged is unacknowledged again."""
        self._publishes.clear()
        self.octets = 0
        settlements, self._settlements = self._settlements, []
        self._channel.untake([one for taken, _ in settlements for one in taken])

    def commit(self, then: Callable[[bool], None]) -> None:
        """Put it all into effect; `then` hears, now or later, whether everything has been."""
        ingress = self._channel.connection.ingress
        publishes, self._publishes = self._publishes, []
        self.octets = 0
        self._then = then
        self._failed = False
        self._open = len(publishes) + 1
        self._channel.connection.unsettled += len(publishes)
        changed = self._generation != ingress.dispatcher.generation
        batch = ingress.begun_batch()
        utc = time.time()
        for entry, message, content in publishes:
            if changed:
                entry = self._renewed(entry)
            expiration = essentials(message.property_set).expiration_ms
            if expiration is not None:
                message = living(message, utc + expiration / 1000)
            receipt = (self._channel, IN_TRANSACTION, content)
            large = len(message.body) > ingress.limits.message_bytes_max
            publish = ingress.publish_large if large else ingress.dispatcher.publish
            if not publish(batch, entry, message, receipt):
                ingress.unclaimed(entry, message, receipt)
        ingress.turn_done()
        if self._settle() and ingress.store is not None:
            ingress.store.after_commit(self._on_disk)
        else:
            self.told(True)

    def _routed(self, entry: RoutingEntry, message: Message) -> RoutingEntry:
        """The entry of a message that decides where it goes, with its decision."""
        assert entry.namespace is not None
        try:
            sinks = entry.namespace.choose(message)
        except ProtocolError:
            raise
        except Exception:  # the commit meets it again, and makes a dead letter of the message
            return entry
        return RoutingEntry(entry.address, Routed(self._channel.connection.host, sinks), None, entry.branches)

    def _renewed(self, entry: RoutingEntry) -> RoutingEntry:
        """The entry as it is now, save for where its message was routed to."""
        connection = self._channel.connection
        fresh = connection.ingress.dispatcher.entry(connection.endpoint, connection.host, entry.address)
        found = entry.namespace
        if entry.recipients is not None and _says_the_queue(entry):
            return fresh
        if entry.recipients is not None:
            found = Routed(connection.host, (recipient.sink for recipient in entry.recipients))
        return RoutingEntry(entry.address, found, None, fresh.branches)

    def _settle(self) -> bool:
        """Settle the deliveries; True: there were some, which may be on disk, or their letters."""
        settlements, self._settlements = self._settlements, []
        touched: Touched = {}
        for taken, requeue in settlements:
            self._channel.settle([one for _, one in taken], requeue, touched)
        for one in touched:
            one.dispatch()
        return bool(touched)

    def _on_disk(self, outcome: Outcome) -> None:
        self.told(outcome is ACCEPTED)

    def told(self, accepted: bool) -> None:
        """One part of the commit is done."""
        self._failed |= not accepted
        self._open -= 1
        if not self._open and self._then is not None:
            then, self._then = self._then, None
            then(not self._failed)

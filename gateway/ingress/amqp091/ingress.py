"""AMQP 0-9-1 on a listener: published messages become batches, and outcomes become confirms and returns.

A receipt is (channel, confirm number, content): the number is 0 outside confirm mode, the content is kept for
mandatory messages only. A message that nobody waits for has no receipt.
"""

from __future__ import annotations

from collections import Counter

import structlog

from gateway.access.rights import Rights
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.dispatcher import UNROUTED
from gateway.broker.routing import AnswerEntry, RoutingEntry
from gateway.ingress.amqp091.channel import AmqpChannel, AmqpGuest, AmqpSource, PublishTarget, Receipt
from gateway.ingress.guests import Guests
from gateway.ingress.services import Services
from gateway.model.address import Address
from gateway.model.batch import Batch
from gateway.model.dialect import NameRefused
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.dialect import AMQP091

log = structlog.get_logger(limited=True)


class AmqpIngress(AmqpSource):
    """The AMQP 0-9-1 side of one listener, and the source of its batches."""

    def __init__(self, name: str, services: Services, guests: Guests) -> None:
        super().__init__(name, services, guests)
        self.hosts = [services.hosts[host] for host in self.host_names]
        # A publisher with more than this unconfirmed is not read until half of them are.
        self.unsettled_max = self.limits.inflight_max * 10
        self._entries: dict[tuple[str, object], dict[bytes, PublishTarget]] = {}
        self._generation = -1

    @property
    def namespace(self) -> VirtualHost:
        """The first of the virtual hosts: routes belong to it."""
        return self.hosts[0]

    def requester(self, reply_to: str) -> Address | None:
        """A reply-to is a key of the default exchange."""
        try:
            return AMQP091.address("", reply_to)
        except NameRefused:
            return None

    # What batches ask: this is their source.

    def settle(
        self, receipts: list[Receipt | None], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Each receipt's channel hears what became of its message."""
        answered: list[AmqpGuest] = []
        last: AmqpChannel | None = None
        for at, receipt in enumerate(receipts):
            if receipt is None:
                continue
            channel, confirm, content = receipt
            if refused is None and content is None and confirm > 0:  # it only hears of its acceptance
                if channel is not last:
                    last = channel
                    settled = channel.settled
                    connection = channel.connection
                    unconfirmed = channel.unconfirmed
                    if not settled:
                        connection.confirming[channel] = None
                if unconfirmed.pop(confirm, last) is None:
                    settled.append(confirm)
                answered.append(connection)
            else:
                channel.connection.settled(receipt, None if refused is None else refused.get(at))
        for connection, count in Counter(answered).items():
            connection.answered(count)
        self.stats.answered(len(receipts), refused, self.now() - received)

    # What connections ask.

    def endpoint_of(self, host: VirtualHost) -> str:
        """Where routes look for what is published to a virtual host: the listener's name for the first one,
        and a name that no route can say for the others.
        """
        return self.name if host is self.hosts[0] else f"{self.name}/{host.name}"

    def entries_of(self, rights: Rights, host: VirtualHost) -> dict[bytes, PublishTarget]:
        """What basic.publish octets lead to, for these rights; emptied when something has changed since."""
        if self._generation != self.dispatcher.generation:
            self._generation = self.dispatcher.generation
            self._entries.clear()
        key = (host.name, rights.key)
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = {}
        return found

    def forget_entries(self) -> None:
        for entries in self._entries.values():
            entries.clear()

    def publish_large(
        self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt | None
    ) -> bool:
        """`publish` of a message that may be too large for routes."""
        most = self.limits.message_bytes_max
        return self.dispatcher.publish_large(batch, entry, message, receipt, most)

    def unclaimed(self, entry: RoutingEntry, message: Message, receipt: Receipt | None) -> None:
        """No queue and no route takes the message: returned if it is mandatory, and confirmed all the
        same.
        """
        if entry.plan.namespace is None and isinstance(entry, AnswerEntry):
            self.answer_lost(entry, message)
        if receipt is None or receipt[2] is None:
            if not entry.plan.branches:
                self.dead_letters.add([message], "", UNROUTED)
            self.nobody_wanted(entry, message)
            outcome = None
        else:
            self.refuse(entry, message, UNROUTED)
            outcome = UNROUTED
        if receipt is not None:
            receipt[0].connection.settled(receipt, outcome)

"""AMQP 0-9-1 source of one listener: published messages become batches; outcomes become confirms and returns.

A receipt is the tuple (channel, confirm number, content). The number is 0 outside confirm mode. The content
is present for mandatory messages only, because it may have to be returned. A message whose publisher expects
no response has no receipt. The source also caches which routing entry each basic.publish resolves to.
Connections and channels are in the modules beside it.
"""

from __future__ import annotations

from collections import Counter

import structlog

from gateway.access.rights import Rights
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.dispatcher import UNROUTED
from gateway.broker.routing import AnswerEntry, RoutingEntry
from gateway.ingress.amqp091.channel import (
    AmqpChannel,
    AmqpListenerClient,
    AmqpSource,
    PublishTarget,
    Receipt,
)
from gateway.ingress.clients import IngressClients
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
    """AMQP 0-9-1 side of one listener: collects what clients publish into batches, and reports outcomes."""

    def __init__(self, name: str, services: Services, ingress_clients: IngressClients) -> None:
        super().__init__(name, services, ingress_clients)
        self.hosts = [services.hosts[host] for host in self.host_names]
        # A publisher with more than this unconfirmed is not read until half of them are.
        self.unsettled_max = self.limits.inflight_max * 10
        self._entries: dict[tuple[str, object], dict[bytes, PublishTarget]] = {}
        self._generation = -1

    @property
    def namespace(self) -> VirtualHost:
        """Virtual host to which routes of this listener belong: the first of its virtual hosts."""
        return self.hosts[0]

    def requester(self, reply_to: str) -> Address | None:
        """Return the address of a message's reply-to, or None if it is no valid name.

        A reply-to is a routing key of the default exchange.
        """
        try:
            return AMQP091.address("", reply_to)
        except NameRefused:
            return None

    # Interface to batches.

    def settle(
        self, receipts: list[Receipt | None], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Report the outcome of each message to the channel in its receipt.

        `refused` maps indexes in `receipts` to outcomes; None means that all were accepted. `received` is the
        loop-clock time of the batch, for the latency statistics.
        """
        answered: list[AmqpListenerClient] = []
        last: AmqpChannel | None = None
        for at, receipt in enumerate(receipts):
            if receipt is None:
                continue
            channel, confirm, content = receipt
            if refused is None and content is None and confirm > 0:  # a plain confirm
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
                channel.connection.report_outcome(receipt, None if refused is None else refused.get(at))
        for connection, count in Counter(answered).items():
            connection.count_settled(count)
        self.stats.count_settled(len(receipts), refused, self.now() - received)

    # Interface to connections.

    def endpoint_of(self, host: VirtualHost) -> str:
        """Return the endpoint name by which routes select messages that are published to a virtual host.

        The first virtual host has the listener's name. The others have names that no route can select.
        """
        return self.name if host is self.hosts[0] else f"{self.name}/{host.name}"

    def entries_of(self, rights: Rights, host: VirtualHost) -> dict[bytes, PublishTarget]:
        """Return the cache of publish targets for these rights and this host.

        Its keys are encoded basic.publish methods. The whole cache is emptied first if routing has changed
        since the last call.
        """
        if self._generation != self.dispatcher.generation:
            self._generation = self.dispatcher.generation
            self._entries.clear()
        key = (host.name, rights.key)
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = {}
        return found

    def forget_entries(self) -> None:
        """Empty the cache of publish targets."""
        for entries in self._entries.values():
            entries.clear()

    def publish_large(
        self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt | None
    ) -> bool:
        """Add to `batch` a message whose body may be too large for routes (limits.message_bytes_max).

        `receipt` is None if the client expects no confirm. Return False if neither a queue nor a route
        matches.
        """
        most = self.limits.message_bytes_max
        return self.dispatcher.publish_large(batch, entry, message, receipt, most)

    def handle_unrouted(self, entry: RoutingEntry, message: Message, receipt: Receipt | None) -> None:
        """Process a message that no queue and no route matches.

        A mandatory message is sent back to the client; every message is confirmed if its channel requires it.
        Without `mandatory`, the message becomes a dead letter if its entry has no routes.
        """
        if entry.plan.namespace is None and isinstance(entry, AnswerEntry):
            self.answer_lost(entry, message)
        if receipt is None or receipt[2] is None:
            if not entry.plan.branches:
                self.dead_letters.add([message], "", UNROUTED)
            self.record_unreceived(entry, message)
            outcome = None
        else:
            self.refuse(entry, message, UNROUTED)
            outcome = UNROUTED
        if receipt is not None:
            receipt[0].connection.report_outcome(receipt, outcome)

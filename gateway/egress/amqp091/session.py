"""The AMQP 0-9-1 link: what stays when a connection goes.

What its mapping needs of the broker, what that refuses, and where the messages of a queue lead.
"""

from __future__ import annotations

import structlog
import trio

from gateway import clock
from gateway.broker.dispatcher import UNROUTED, Dispatcher, RoutingEntry
from gateway.egress.amqp091.connection import AmqpLinkConnection
from gateway.egress.amqp091.consumer import AmqpLinkConsumer
from gateway.egress.amqp091.publisher import AmqpLinkPublisher
from gateway.egress.amqp091.topology import Declaration, DeclarationState, Topology
from gateway.egress.link import LinkStatus
from gateway.egress.session import Entries, QueueLinkSession
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.codec import decode_address
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import AmqpLink, Limits
from gateway.settings.endpoints import Target
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

Receipt = tuple[AmqpLinkConsumer, int, Message]


class AmqpLinkSession(QueueLinkSession[AmqpLinkConnection, AmqpLinkConsumer, AmqpLinkPublisher]):
    """What the link `name` says to its AMQP 0-9-1 broker, and hears."""

    def __init__(
        self,
        name: str,
        settings: AmqpLink,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        *,
        client_id: str,
    ) -> None:
        super().__init__(name, settings, dispatcher, limits, status, client_id=client_id)
        self.options = settings
        self.topology = Topology(client_id, settings.declare, settings.reconnect_max_secs)
        self.publisher = AmqpLinkPublisher(
            self.stats,
            self._missing,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
        )

    # What the link asks.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: declare, consume and cancel what that means."""
        fresh, gone = self.topology.want(subscriptions, targets)
        for declaration in (*fresh, *gone):
            if declaration.kind == "exchange":
                self.publisher.allow(declaration.name)
        if self._peer is not None:
            self._peer.rearrange(fresh)

    def connect(self, stream: Stream, target: Target, now: float) -> AmqpLinkConnection:
        """A connection stands: begin the handshake."""
        self._peer = AmqpLinkConnection(self, stream, target, now)
        return self._peer

    # What batches ask: this is their source.

    def settle(
        self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Acknowledge what was accepted; refuse, or give back later, what was not."""
        if refused:
            now = trio.current_time()
            for at, outcome in refused.items():
                consumer, tag, _ = receipts[at]
                if outcome.reason is Reason.STORE and consumer.live:
                    self.held.refused(receipts[at])
                else:
                    consumer.refused(tag, outcome, now)
                self.stats.refuse(outcome)
            receipts = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        self.accept(receipts)
        self.stats.accepted_messages += len(receipts)

    def queue_of(self, consumer: AmqpLinkConsumer) -> str:
        """Routes may say a queue."""
        return consumer.declaration.route_queue

    # What a connection asks.

    def resolve(self, queue: str, wire: bytes, entries: Entries) -> RoutingEntry:
        """An address seen for the first time. Raises RemoteProtocolError when it cannot be read."""
        address = amqp_address(*decode_address(wire))
        if len(entries) >= self.limits.cache_entries_max:
            entries.clear()
        entry = entries[wire] = self.dispatcher.entry(self.name, None, address, queue)
        return entry

    def unclaimed(self, entry: RoutingEntry, receipt: Receipt) -> None:
        """No route takes the message: without any it is a dead letter, but the broker is rid of it."""
        if not entry.branches:
            self.dispatcher.dead_letters.add([receipt[2]], "", UNROUTED)
        self.settle([receipt], None, clock.now())

    def disconnected(self, peer: AmqpLinkConnection, why: str) -> None:
        """A connection is gone; what it had not confirmed is sent again over the next one."""
        if self._peer is peer:
            self.stats.blocked = False
        super().disconnected(peer, why)

    def met(self, declaration: Declaration) -> bool:
        """The broker has what is needed; False: the mapping does not ask for it any more."""
        if self.topology.in_force(declaration) is not declaration:
            return False
        if declaration.why:
            log.info("found what a route needs", link=self.name, kind=declaration.kind, name=declaration.name)
        declaration.state = DeclarationState.THERE
        declaration.why = ""
        if declaration.kind == "exchange":
            self.publisher.allow(declaration.name)
            self.publisher.pump()
        return True

    def failed(self, declaration: Declaration, why: str, now: float) -> None:
        """The broker does not have what is needed, or does not let us use it; other routes go on."""
        if self.topology.in_force(declaration) is not declaration:
            return
        if self.topology.failed(declaration, why, now):
            log.warning(
                "a route lacks something",
                link=self.name,
                kind=declaration.kind,
                name=declaration.name,
                why=why,
            )
        if declaration.kind == "exchange":
            self.publisher.refuse(declaration.name, Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, why))

    def _missing(self, exchange: str, outcome: Outcome) -> None:
        """A publish found that an exchange is not there: look for it until it is."""
        declaration, forgotten = self.topology.refused(exchange)
        for old in forgotten:
            self.publisher.allow(old.name)
        if self.topology.failed(declaration, outcome.text, trio.current_time()):
            log.warning("an exchange cannot be used", link=self.name, name=exchange, why=outcome.text)

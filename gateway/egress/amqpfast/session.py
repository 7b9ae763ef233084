"""The AMQP/Fast link: what stays when a connection goes.

What it consumes, what the server refuses, and what becomes of messages that nobody takes.
"""

from __future__ import annotations

from functools import partial

import structlog
import trio

from gateway import clock
from gateway.broker.dispatcher import UNROUTED, Dispatcher, RoutingEntry
from gateway.egress.amqpfast.connection import FastLinkConnection
from gateway.egress.amqpfast.consumer import FastLinkConsumer, Receipt
from gateway.egress.amqpfast.publisher import FastLinkPublisher
from gateway.egress.amqpfast.sources import Source, Sources
from gateway.egress.link import LinkStatus
from gateway.egress.session import Entries, QueueLinkSession
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.times import Monotonic
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.settings import FastLink, Limits
from gateway.settings.endpoints import Target
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)


class FastLinkSession(QueueLinkSession[FastLinkConnection, FastLinkConsumer, FastLinkPublisher]):
    """What the link `name` says to its AMQP/Fast server, and hears."""

    def __init__(
        self,
        name: str,
        settings: FastLink,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        *,
        client_id: str,
    ) -> None:
        super().__init__(name, settings, dispatcher, limits, status, client_id=client_id)
        self.sources = Sources(durable=settings.durable_subscriptions, wait_max=settings.reconnect_max_secs)
        self.publisher = FastLinkPublisher(
            self.stats,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
        )

    # What the link asks.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: consume and leave what that means. Destinations cannot be declared."""
        fresh, gone = self.sources.want(subscriptions)
        if self._peer is not None and self._peer.open:
            self._peer.rearrange(fresh, gone)
        else:
            self.sources.leave_behind(gone)

    def connect(self, stream: Stream, target: Target, now: float) -> FastLinkConnection:
        """A connection stands: begin the negotiation."""
        self._peer = FastLinkConnection(self, stream, target, now)
        return self._peer

    def tick(self, now: float) -> None:
        """Destinations that were refused get another chance, and what waits for the disk, if it recovered."""
        self.publisher.tick(now)
        super().tick(now)

    # What batches ask: this is their source.

    def settle(
        self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Acknowledge what was accepted; bury, or give back later, what was not."""
        if refused:
            now = trio.current_time()
            for at, outcome in refused.items():
                if outcome.verdict is Verdict.REJECTED:
                    self.bury(receipts[at], outcome)
                else:
                    self.stats.refuse(outcome)
                    if outcome.reason is Reason.STORE and receipts[at][0].live:
                        self.held.refused(receipts[at])
                    else:
                        receipts[at][0].released(receipts[at], now)
            receipts = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        self.accept(receipts)
        self.stats.accepted_messages += len(receipts)

    def bury(self, receipt: Receipt, outcome: Outcome) -> None:
        """A message that nobody will ever take is a dead letter, and acknowledged when that is safe: there is
        no other way to be rid of it."""
        self.stats.refuse(outcome)
        self.dispatcher.dead_letters.add([receipt[2]], "", outcome, partial(self.accept, [receipt]))

    def queue_of(self, consumer: FastLinkConsumer) -> str:
        """A destination is its address."""
        return ""

    # What a connection asks.

    def resolve(self, service: str, name: bytes, entries: Entries) -> RoutingEntry:
        """A destination seen for the first time."""
        if len(entries) >= self.limits.cache_entries_max:
            entries.clear()
        address = fast_address(service, name.decode())
        entry = entries[name] = self.dispatcher.entry(self.name, None, address)
        return entry

    def unclaimed(self, entry: RoutingEntry, receipt: Receipt) -> None:
        """No route takes the message. From a queue that makes it a dead letter, if there is no route at all;
        a topic's subscription may well be wider than the routes."""
        message = receipt[2]
        if not entry.branches and message.address.wire.startswith(b"queue:"):
            self.bury(receipt, UNROUTED)
        else:
            self.settle([receipt], None, clock.now())

    def met(self, source: Source) -> None:
        """The server lets us consume it."""
        if not self.sources.in_force(source):
            return
        if source.why:
            log.info("found what a route needs", link=self.name, service=source.service, name=source.name)
        self.sources.met(source)

    def failed(self, source: Source, why: str) -> None:
        """The server does not let us consume it; other routes go on, and it is tried again."""
        if self.sources.in_force(source) and self.sources.failed(source, why, trio.current_time()):
            log.warning(
                "a route lacks something", link=self.name, service=source.service, name=source.name, why=why
            )

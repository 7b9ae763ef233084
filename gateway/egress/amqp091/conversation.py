"""The AMQP 0-9-1 link: what stays when a connection goes.

What its mapping needs of the broker, what that refuses, and where the messages of a queue lead.
"""

from __future__ import annotations

import structlog
import trio

from gateway.broker.switch import UNROUTED, Entry, Switch
from gateway.egress.amqp091.intake import Intake
from gateway.egress.amqp091.outgoing import Outgoing
from gateway.egress.amqp091.peer import AmqpLinkPeer
from gateway.egress.amqp091.topology import Need, Standing, Topology
from gateway.egress.conversation import Entries, QueueConversation
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.amqp091.codec import decode_address
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import Limits
from gateway.settings.endpoints import Link as LinkSettings
from gateway.settings.endpoints import Target
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

Receipt = tuple[Intake, int, Message]


class AmqpConversation(QueueConversation[AmqpLinkPeer, Intake, Outgoing]):
    """What the link `name` says to its AMQP 0-9-1 broker, and hears. Set `link` before it connects."""

    def __init__(
        self,
        name: str,
        settings: LinkSettings,
        switch: Switch,
        limits: Limits,
        stats: LinkStats,
        *,
        client_id: str,
    ) -> None:
        super().__init__(name, settings, switch, limits, stats, client_id=client_id)
        self.topology = Topology(client_id, settings.declare, settings.reconnect_max_secs)
        self.outgoing = Outgoing(
            stats,
            self._missing,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
        )

    # What the link asks.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: declare, consume and cancel what that means."""
        fresh, gone = self.topology.want(subscriptions, targets)
        for need in (*fresh, *gone):
            if need.kind == "exchange":
                self.outgoing.allow(need.name)
        if self._peer is not None:
            self._peer.rearrange(fresh)

    def connect(self, stream: Stream, target: Target, now: float) -> AmqpLinkPeer:
        """A connection stands: begin the handshake."""
        self._peer = AmqpLinkPeer(self, stream, target, now)
        return self._peer

    # What batches ask: this is their source.

    def settle(self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: float) -> None:
        """Acknowledge what was accepted; refuse, or give back later, what was not."""
        if refused:
            now = trio.current_time()
            for at, outcome in refused.items():
                intake, tag, _ = receipts[at]
                if outcome.reason is Reason.STORE and intake.live:
                    self.held.refused(receipts[at])
                else:
                    intake.refused(tag, outcome, now)
                self.stats.refuse(outcome)
            receipts = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        self.accept(receipts)
        self.stats.accepted_messages += len(receipts)

    def queue_of(self, intake: Intake) -> str:
        """Routes may say a queue."""
        return intake.need.route_queue

    # What a connection asks.

    def resolve(self, queue: str, wire: bytes, entries: Entries) -> Entry:
        """An address seen for the first time. Raises RemoteProtocolError when it cannot be read."""
        address = amqp_address(*decode_address(wire))
        if len(entries) >= self.limits.cache_entries_max:
            entries.clear()
        entry = entries[wire] = self.switch.entry(self.name, None, address, queue)
        return entry

    def unclaimed(self, entry: Entry, receipt: Receipt) -> None:
        """No route takes the message: without any it is a dead letter, but the broker is rid of it."""
        if not entry.ways:
            self.switch.dead_letters.add([receipt[2]], "", UNROUTED)
        self.settle([receipt], None, 0.0)

    def disconnected(self, peer: AmqpLinkPeer, why: str) -> None:
        """A connection is gone; what it had not confirmed is sent again over the next one."""
        if self._peer is peer:
            self.stats.blocked = False
        super().disconnected(peer, why)

    def met(self, need: Need) -> bool:
        """The broker has what is needed; False: the mapping does not ask for it any more."""
        if self.topology.in_force(need) is not need:
            return False
        if need.why:
            log.info("found what a route needs", link=self.name, kind=need.kind, name=need.name)
        need.standing = Standing.THERE
        need.why = ""
        if need.kind == "exchange":
            self.outgoing.allow(need.name)
            self.outgoing.pump()
        return True

    def failed(self, need: Need, why: str, now: float) -> None:
        """The broker does not have what is needed, or does not let us use it; other routes go on."""
        if self.topology.in_force(need) is not need:
            return
        if self.topology.failed(need, why, now):
            log.warning("a route lacks something", link=self.name, kind=need.kind, name=need.name, why=why)
        if need.kind == "exchange":
            self.outgoing.refuse(need.name, Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, why))

    def _missing(self, exchange: str, outcome: Outcome) -> None:
        """A publish found that an exchange is not there: look for it until it is."""
        need, forgotten = self.topology.refused(exchange)
        for old in forgotten:
            self.outgoing.allow(old.name)
        if self.topology.failed(need, outcome.text, trio.current_time()):
            log.warning("an exchange cannot be used", link=self.name, name=exchange, why=outcome.text)

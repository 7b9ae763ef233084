"""The AMQP 0-9-1 link: what stays when a connection goes.

Outwards it is a namespace whose only sink is what the link publishes (`Outgoing`); inwards it is the source
of the batches of messages that it consumed. A receipt is (intake, delivery tag, message). What a remote
broker sends takes routes only: its own subscribers have it already.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio

from gateway.broker.pressure import Held
from gateway.broker.switch import UNROUTED, Entry, Switch
from gateway.egress.amqp091.intake import Intake
from gateway.egress.amqp091.outgoing import Outgoing
from gateway.egress.amqp091.peer import AmqpPeer
from gateway.egress.amqp091.topology import Need, Standing, Topology
from gateway.egress.link import Link
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address, AmqpAddress
from gateway.model.batch import Batch, Sink
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.amqp091.codec import decode_address
from gateway.settings import Limits
from gateway.settings.endpoints import Link as LinkSettings
from gateway.settings.endpoints import Target
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger()

Receipt = tuple[Intake, int, Message]
Entries = dict[bytes, Entry]


class AmqpConversation:
    """What the link `name` says to its AMQP 0-9-1 broker, and hears. Set `link` before it connects."""

    link: Link

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
        self.name = name
        self.settings = settings
        self.switch = switch
        self.limits = limits
        self.stats = stats
        self.client_id = client_id
        self.topology = Topology(client_id, settings.declare, settings.reconnect_max_secs)
        self.outgoing = Outgoing(
            stats,
            self._missing,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
        )
        self.batch = Batch(self, trio.current_time())
        self.held: Held[Receipt] = Held(lambda: switch.disk_healthy())
        self._peer: AmqpPeer | None = None
        self._caches: dict[str, Entries] = {}  # by the queue's name in routes
        self._generation = -1

    # What the switch asks: a namespace with one sink.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Every address of the remote broker."""
        return (self.outgoing,)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The address has decided."""
        return (self.outgoing,)

    @property
    def retained(self) -> None:
        """Retaining is not for AMQP: the flag travels as a header."""

    # What the link asks.

    @property
    def idle(self) -> bool:
        """Nothing waits for the broker, and nothing that it sent waits for us."""
        peer = self._peer
        return self.outgoing.idle and not len(self.batch) and (peer is None or not peer.outstanding)

    @property
    def unconfirmed(self) -> int:
        """Messages for the broker that it has not confirmed, sent or not."""
        return self.outgoing.waiting_messages + self.outgoing.in_flight

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: declare, consume and cancel what that means."""
        fresh, gone = self.topology.want(subscriptions, targets)
        for need in (*fresh, *gone):
            if need.kind == "exchange":
                self.outgoing.allow(need.name)
        if self._peer is not None:
            self._peer.rearrange(fresh)

    def connect(self, stream: Stream, target: Target, now: float) -> AmqpPeer:
        """A connection stands: begin the handshake."""
        self._peer = AmqpPeer(self, stream, target, now)
        return self._peer

    def turn_done(self) -> None:
        """Send on the batch that this wake-up has gathered."""
        batch = self.batch
        if len(batch):
            self.batch = Batch(self, trio.current_time())
            batch.send()

    def tick(self, now: float) -> None:
        """What waits for the disk is tried again, when it has recovered."""
        for receipt in self.held.due():
            self._retry(receipt)

    # What batches ask: this is their source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """A link goes on reading, for its own confirms come in between; it is refused and tries again."""
        return []

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
        for intake, tag, _ in receipts:
            accepted = intake.accepted
            if not accepted:
                intake.wake()
            accepted.append(tag)
        self.stats.accepted_messages += len(receipts)

    def _retry(self, receipt: Receipt) -> None:
        intake, _, message = receipt
        if not intake.live:
            return
        entry = self.switch.entry(self.name, None, message.address, intake.need.route_queue)
        for way in entry.ways:
            way.crossing.route.retried += 1
        if not self.switch.publish(self.batch, entry, message, receipt):
            self.unclaimed(entry, receipt)

    # What a connection asks.

    def caches(self) -> dict[str, Entries]:
        """Where addresses lead, by queue and by their octets; emptied when something has changed since."""
        if self._generation != self.switch.generation:
            self._generation = self.switch.generation
            self._caches.clear()
        return self._caches

    def resolve(self, queue: str, wire: bytes, entries: Entries) -> Entry:
        """An address seen for the first time. Raises RemoteProtocolError when it cannot be read."""
        address = AmqpAddress(*decode_address(wire))
        if len(entries) >= self.limits.cache_entries_max:
            entries.clear()
        entry = entries[wire] = self.switch.entry(self.name, None, address, queue)
        return entry

    def unclaimed(self, entry: Entry, receipt: Receipt) -> None:
        """No route takes the message: without any it is a dead letter, but the broker is rid of it."""
        if not entry.ways:
            self.switch.dead_letters.add([receipt[2]], "", UNROUTED)
        self.settle([receipt], None, 0.0)

    def disconnected(self, peer: AmqpPeer, why: str) -> None:
        """A connection is gone; what it had not confirmed is sent again over the next one."""
        if self._peer is peer:
            self._peer = None
            self.held.give_up()
            self.stats.blocked = False
        self.outgoing.close()
        self.link.went_down(why)

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

"""The AMQP/Fast link: what stays when a connection goes.

Outwards it is a namespace whose only sink is what the link sends (`Outgoing`); inwards it is the source of
the batches of messages that it consumed. A receipt is (intake, message number, message). What a remote server
sends takes routes only: its own subscribers have it already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
import trio

from gateway.broker.pressure import Held
from gateway.broker.switch import UNROUTED, Entry, Switch
from gateway.egress.amqpfast.intake import Receipt
from gateway.egress.amqpfast.outgoing import Outgoing
from gateway.egress.amqpfast.peer import FastPeer
from gateway.egress.amqpfast.sources import Source, Sources
from gateway.egress.link import Link
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address, FastAddress
from gateway.model.batch import Batch, Sink
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.settings import Limits
from gateway.settings.endpoints import Link as LinkSettings
from gateway.settings.endpoints import Target
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger()

Entries = dict[bytes, Entry]


class FastConversation:
    """What the link `name` says to its AMQP/Fast server, and hears. Set `link` before it connects."""

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
        self.sources = Sources(durable=settings.durable_subscriptions, wait_max=settings.reconnect_max_secs)
        self.outgoing = Outgoing(
            stats,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
        )
        self.batch = Batch(self, trio.current_time())
        self.held: Held[Receipt] = Held(lambda: switch.disk_healthy())
        self._peer: FastPeer | None = None
        self._caches: dict[str, Entries] = {}  # by service
        self._generation = -1

    # What the switch asks: a namespace with one sink.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Every destination of the remote server."""
        return (self.outgoing,)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The address has decided."""
        return (self.outgoing,)

    @property
    def retained(self) -> None:
        """Nothing is retained in AMQP/Fast: the flag travels as a header."""

    # What the link asks.

    @property
    def idle(self) -> bool:
        """Nothing waits for the server, and nothing that it sent waits for us."""
        peer = self._peer
        return self.outgoing.idle and not len(self.batch) and (peer is None or not peer.outstanding)

    @property
    def unconfirmed(self) -> int:
        """Messages for the broker that it has not confirmed, sent or not."""
        return self.outgoing.waiting_messages + self.outgoing.in_flight

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: consume and leave what that means. Destinations cannot be declared."""
        fresh, gone = self.sources.want(subscriptions)
        if self._peer is not None and self._peer.open:
            self._peer.rearrange(fresh, gone)
        else:
            self.sources.leave_behind(gone)

    def connect(self, stream: Stream, target: Target, now: float) -> FastPeer:
        """A connection stands: begin the negotiation."""
        self._peer = FastPeer(self, stream, target, now)
        return self._peer

    def turn_done(self) -> None:
        """Send on the batch that this wake-up has gathered."""
        batch = self.batch
        if len(batch):
            self.batch = Batch(self, trio.current_time())
            batch.send()

    def tick(self, now: float) -> None:
        """Destinations that were refused get another chance, and what waits for the disk, if it recovered."""
        self.outgoing.tick(now)
        for receipt in self.held.due():
            if receipt[0].live:
                self.retry(receipt)

    # What batches ask: this is their source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """A link goes on reading, for its own confirms come in between; it is refused and tries again."""
        return []

    def settle(self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: float) -> None:
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
        for intake, number, _ in receipts:
            accepted = intake.accepted
            if not accepted:
                intake.wake()
            accepted.append(number)
        self.stats.accepted_messages += len(receipts)

    def bury(self, receipt: Receipt, outcome: Outcome) -> None:
        """A message that nobody will ever take is a dead letter, and acknowledged when that is safe: there is
        no other way to be rid of it."""
        self.stats.refuse(outcome)
        self.switch.dead_letters.add([receipt[2]], "", outcome, partial(self._buried, receipt))

    @staticmethod
    def _buried(receipt: Receipt) -> None:
        intake, number, _ = receipt
        if not intake.accepted:
            intake.wake()
        intake.accepted.append(number)

    def retry(self, receipt: Receipt) -> None:
        """A message that was released, once more."""
        message = receipt[2]
        entry = self.switch.entry(self.name, None, message.address)
        for way in entry.ways:
            way.crossing.route.retried += 1
        if not self.switch.publish(self.batch, entry, message, receipt):
            self.settle([receipt], None, 0.0)

    # What a connection asks.

    def caches(self) -> dict[str, Entries]:
        """Where addresses lead, by service and name; emptied when something has changed since."""
        if self._generation != self.switch.generation:
            self._generation = self.switch.generation
            self._caches.clear()
        return self._caches

    def resolve(self, service: str, name: bytes, entries: Entries) -> Entry:
        """A destination seen for the first time."""
        if len(entries) >= self.limits.cache_entries_max:
            entries.clear()
        address = FastAddress(service, name.decode())
        entry = entries[name] = self.switch.entry(self.name, None, address)
        return entry

    def unclaimed(self, entry: Entry, receipt: Receipt) -> None:
        """No route takes the message. From a queue that makes it a dead letter, if there is no route at all;
        a topic's subscription may well be wider than the routes."""
        message = receipt[2]
        if not entry.ways and message.address.wire.startswith(b"queue:"):
            self.bury(receipt, UNROUTED)
        else:
            self.settle([receipt], None, 0.0)

    def disconnected(self, peer: FastPeer, why: str) -> None:
        """A connection is gone; what it had not confirmed is sent again over the next one."""
        if self._peer is peer:
            self._peer = None
            self.held.give_up()
        self.outgoing.close()
        self.link.went_down(why)

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

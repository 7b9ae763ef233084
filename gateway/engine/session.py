"""What a replica says to the cluster, and hears, over all of its connections.

Outwards it has one sink for every topic. Inwards messages of the replica's queue are matched with its
clients' subscriptions, and records of the log are applied. A *barrier* is what a client's SUBACK or CONNACK
waits for: all bindings that were asked for are there, and a mark, written behind them, has come back on the
log, so that all that was retained before has been read. There is one mark on its way at a time; whoever comes
meanwhile waits for the next one.

Each life of a process has a queue of its own, so that two processes of one name cannot take each other's
messages. A queue outlives a short absence of its replica; when the cluster has been away for
`engine_timeout_secs` the clients are let go, and another life begins.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.broker.dispatcher import Dispatcher
from gateway.containment import contained
from gateway.egress.link import LinkStatus
from gateway.engine.bindings import Bindings
from gateway.engine.connection import EngineConnection
from gateway.engine.envelope import ENGINE, Arrived, decode, encode
from gateway.engine.names import Names, key_of, names_of, topic_of
from gateway.engine.once import Once
from gateway.engine.publisher import EnginePublisher
from gateway.engine.records import Mark, Opened, decode_record
from gateway.engine.retained import EngineRetained
from gateway.errors import RemoteProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Batch, Recipient, Sink
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.spooled import Body, PassedOver
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.codec import decode_address
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.store.store import Store
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

MARK_SECS: Final = 15.0  # a mark that has not come back says that we follow another log than we write
ARRIVED_MAX: Final = 4_096  # content headers that are remembered, and
ARRIVED_OCTETS_MAX: Final = 1_024  # the largest that is worth it
AGAIN_SECS: Final = 60.0  # how often the log is looked through for what has to be written again, at most
RECORD_OVERHEAD: Final = 64  # octets of a record on the cluster's disks besides properties and body, about
ONCE_MIN: Final = (
    65_536  # numbers that are remembered of each life, at least: replicas differ in their windows
)
AWAY: Final = "the cluster is away"
LOST: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, AWAY)
Done = Callable[[Outcome], None]
Entry = tuple[Address, tuple[Recipient, ...]]


class Clients(Protocol):
    """The clients of this replica."""

    def wanting(self, address: Address) -> tuple[Sink, ...]:
        """Who of them gets messages of a topic."""

    def opened_elsewhere(self, client: str) -> bool:
        """Another replica has a client by that identifier now. True: it was here."""

    def opening_lost(self) -> None:
        """The connection is gone, and with it what was written of clients that have just come."""


class EngineSession:
    """The link session of the engine. `life` names this life of the replica."""

    def __init__(
        self,
        settings: RabbitEngine,
        replica: str,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        store: Store | None,
        let_go: Callable[[], None],
    ) -> None:
        """`let_go` ends the connections of all clients, for the cluster was away for too long."""
        self.settings = settings
        self.replica = replica
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.names: Names = names_of(settings.namespace, settings.topic_exchange)
        self.bindings = Bindings()
        self.kept = EngineRetained(
            settings.namespace,
            self._publish_alone,
            messages_max=limits.retained_messages_max,
            octets_max=limits.retained_bytes_max,
            store=store,
        )
        self.publisher = EnginePublisher(
            self.stats,
            self.names,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
            topics_max=limits.cache_entries_max,
        )
        self.clients: Clients
        self.life = ""
        self.records = dict.fromkeys(("taken", "late", "passed_over", "written_again", "moved"), 0)
        self.once = Once(max(ONCE_MIN, 2 * settings.in_flight_max))
        self._dispatcher = dispatcher
        self._let_go = let_go
        self._peer: EngineConnection | None = None
        self._up = False
        self._down_since: float | None = None
        self._numbers = 0
        self._waiting: list[Done] = []
        self._marked: list[Done] = []
        self._mark: int | None = None  # its number, while one is on its way
        self._mark_since = 0.0
        self._look_at = 0.0
        self._look_behind = 0  # octets of the log
        self._entries: dict[bytes, Entry] = {}
        self._recipients: dict[Sink, Recipient] = {}
        self._known: dict[bytes, Arrived] = {}
        self._batch = Batch(self, Monotonic(0.0))  # the clock does not run yet
        self._begin_life()

    def _begin_life(self) -> None:
        self.life = secrets.token_hex(6)
        self._opened: dict[str, int] = {}

    @property
    def queue(self) -> str:
        """The queue of this life."""
        return f"{self.names.queues}.{self.replica}.{self.life}"

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Its share of the broker's gauges."""
        return {
            "gateway_engine_bindings": lambda: len(self.bindings),
            "gateway_engine_log_position": lambda: self.kept.position,
            "gateway_engine_unconfirmed_clients": lambda: len(self._waiting) + len(self._marked),
        }

    @property
    def why_not(self) -> str:
        """Why clients cannot be served; "": they can."""
        return "" if self._up else (self.status.why or AWAY)

    # What the dispatcher asks, through the namespace.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Every topic goes to the cluster."""
        return (self.publisher,)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The address has decided."""
        return (self.publisher,)

    @property
    def retained(self) -> None:
        """What is retained goes the same way."""

    # What the link asks.

    @property
    def idle(self) -> bool:
        """Nothing waits for the cluster."""
        return self.idle_but(0)

    def idle_but(self, held: int) -> bool:
        """The same: what it sends waits in front of no route."""
        return self.publisher.idle and not len(self._batch)

    @property
    def unconfirmed(self) -> int:
        """Messages for the cluster that it has not confirmed, sent or not."""
        return self.publisher.waiting_messages + self.publisher.in_flight

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Routes know listeners and links, and not what is behind them."""

    def connect(self, stream: Stream, target: Target, now: float) -> EngineConnection:
        """A connection stands: begin the handshake."""
        self._peer = EngineConnection(self, stream, target, now)
        return self._peer

    def turn_done(self) -> None:
        """Hand out what this wake-up has gathered; then it can be acknowledged."""
        batch = self._batch
        if len(batch):
            self._batch = Batch(self, clock.now())
            batch.send()
        self.kept.note()
        if self._peer is not None:
            self._peer.dealt_with()

    def tick(self, now: float) -> None:
        """Once a second, connected or not."""
        if not self._up:
            self._down_since = now if self._down_since is None else self._down_since
            if now - self._down_since >= self.settings.engine_timeout_secs:
                self._give_clients_up(now)
        if self._peer is None:
            return
        if self._mark is not None and now - self._mark_since >= MARK_SECS:
            log.warning("the log is read from its beginning", position=self.kept.position)
            self.kept.begin_anew()
            self._peer.give_up("a mark did not come back on the log")
        elif self._up and (now >= self._look_at or self.kept.octets_read >= self._look_behind):
            self._look_at = now + min(AGAIN_SECS, self.settings.state_secs / 20)
            self._look_behind = self.kept.octets_read + self.settings.state_bytes_max // 20
            self._write_again()

    def _give_clients_up(self, now: float) -> None:
        self._down_since = now
        self._let_go()
        if self._peer is None:
            self._begin_life()

    def _write_again(self) -> None:
        assert self._peer is not None
        utc = time.time()
        rows = []
        for message, origin in self.kept.due(self.settings.state_secs, self.settings.state_bytes_max):
            wire = amqp_address(self.names.kept, (key_of(message.address.name) or b"").decode()).wire
            raw = encode(message, utc, written=int(utc * 1000), origin=origin)
            rows.append((wire, raw, bytes(message.body)))
        if rows:
            self.records["written_again"] += len(rows)
            self._peer.write_again(rows)

    # What batches ask: this is their source.

    def settle(self, receipts: list[None], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Sessions take everything, and count what they drop: the cluster has no part in it."""
        self.stats.accepted_messages += len(receipts)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """One slow client does not stop the others."""
        return []

    # What a connection asks.

    def follows(self) -> None:
        """The log is being read: by a mark it is known when it has been read to its end."""
        self._look_at = trio.current_time() + AGAIN_SECS
        self._send_mark()

    def disconnected(self, peer: EngineConnection, why: str) -> None:
        """The connection is gone; what it had not confirmed is sent again over the next one."""
        if self._peer is not peer:
            return
        self._peer = None
        self._up = False
        self.stats.blocked = False
        self._waiting = self._marked + self._waiting
        self._marked = []
        self._mark = None
        self.clients.opening_lost()
        self._opened.clear()
        self.publisher.close()
        self.status.went_down(why)

    def deliver(self, wire: bytes, raw: bytes, body: Body) -> None:
        """A message of the replica's queue."""
        try:
            address, recipients = self._entries.get(wire) or self._entry(wire)
            arrived = self._known.get(raw) or self._read(raw)
        except (NameRefused, RemoteProtocolError) as error:
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return
        if not body and isinstance(body, PassedOver):
            text = f"a body of {body.size} octets exceeds limits.message_bytes_max; it was not kept"
            self._refuse(wire, b"", Outcome(Verdict.REJECTED, Reason.TOO_LARGE, text))
            return
        if arrived.number is not None and not self.once.is_first(arrived.number):
            self.stats.duplicates += 1
            return
        if recipients:
            message = _message(address, arrived, body)
            if len(recipients) == 1:
                self._batch.add_only(None, recipients[0], message)
            else:
                self._batch.add(None, [(recipient, message) for recipient in recipients])

    def record(self, wire: bytes, raw: bytes, body: Body) -> None:
        """A record of the log."""
        try:
            arrived = decode(raw)
            exchange, key = decode_address(wire)
        except RemoteProtocolError as error:
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return
        self.kept.octets_read += len(raw) + len(body) + RECORD_OVERHEAD
        self.kept.records_read += 1
        position = self.kept.position
        if arrived.offset >= 0:
            if 0 <= position < arrived.offset - 1:
                log.warning("the log has forgotten records that were not read", position=position)
                self.kept.begin_anew()
            self.kept.position = arrived.offset
        if exchange:
            self._retain(key, arrived, body)
            return
        record = decode_record(bytes(body))
        if record is None:
            self.records["passed_over"] += 1
            log.warning("a record of the log is passed over, another version may have written it")
        elif isinstance(record, Mark):
            self._mark_came(record)
        else:
            self._opened_at(record)

    def _retain(self, key: str, arrived: Arrived, body: Body) -> None:
        try:
            address = topic_of(key)
        except NameRefused as error:
            wire = amqp_address(self.names.retained, key).wire
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.NAME_INVALID, str(error)))
            return
        message = _message(address, arrived, bytes(body))
        written = arrived.written or int(time.time() * 1000)
        taken = self.kept.apply(message, arrived.offset, origin=arrived.origin, written=written)
        self.records["taken" if taken else "late"] += 1

    def _refuse(self, wire: bytes, body: Body, outcome: Outcome) -> None:
        """What no client could be given."""
        self.stats.refuse(outcome)
        log.warning("a message of the cluster cannot be delivered", why=outcome.text)
        message = Message(amqp_address(*decode_address(wire)), bytes(body), sender=Sender(ENGINE))
        self._dispatcher.dead_letters.add([message], "", outcome)

    def _entry(self, wire: bytes) -> Entry:
        if len(self._entries) >= self.limits.cache_entries_max:
            self._entries.clear()
            self._recipients.clear()
        address = topic_of(decode_address(wire)[1])
        found = [self._recipient(sink) for sink in self.clients.wanting(address)]
        entry = self._entries[wire] = (address, tuple(found))
        return entry

    def _recipient(self, sink: Sink) -> Recipient:
        found = self._recipients.get(sink)
        if found is None:
            found = self._recipients[sink] = Recipient(sink)
        return found

    def _read(self, raw: bytes) -> Arrived:
        arrived = decode(raw)
        if len(raw) <= ARRIVED_OCTETS_MAX and arrived.number is None and not arrived.expires:
            if len(self._known) >= ARRIVED_MAX:
                self._known.clear()
            self._known[raw] = arrived
        return arrived

    def forget_entries(self) -> None:
        """Somebody has subscribed, or does no longer."""
        self._entries.clear()
        self._recipients.clear()

    # Bindings, marks, and clients that come.

    def bind(self, levels: list[str]) -> None:
        """A client of this replica wants what matches a filter."""
        key = self.bindings.add(levels)
        if key is not None and self._peer is not None:
            self._peer.bind(key)

    def unbind(self, levels: list[str]) -> None:
        """It does not any more."""
        key = self.bindings.remove(levels)
        if key is not None and self._peer is not None:
            self._peer.unbind(key)

    def after_recorded(self, done: Done) -> None:
        """`done` hears ACCEPTED when all that was asked for is there, and the log has been read up to now."""
        self._waiting.append(done)
        self._send_mark()

    def _send_mark(self) -> None:
        peer = self._peer
        if self._mark is not None or peer is None or not peer.ready or (self._up and not self._waiting):
            return
        self._marked, self._waiting = self._waiting, []
        self._numbers += 1
        self._mark = self._numbers
        self._mark_since = trio.current_time()
        mark = Mark(self.replica, self.life, self._numbers)
        peer.after_bound(lambda: peer.write(mark))

    def _mark_came(self, mark: Mark) -> None:
        if mark.life != self.life or mark.number != self._mark:
            return
        self._mark = None
        if not self._up:
            self._up = True
            self._down_since = None
            self.status.came_up()
        marked, self._marked = self._marked, []
        for done in marked:
            try:
                done(ACCEPTED)
            except Exception as error:  # of one client: the others have waited as long
                contained("connection", error)
        self._send_mark()

    def opened(self, client: str) -> None:
        """A client has come to this replica: others let go of it."""
        if self._peer is not None and self._peer.ready:
            self._numbers += 1
            self._opened[client] = self._numbers
            self._peer.write(Opened(client, self.replica, self.life, self._numbers))

    def opening(self, client: str) -> bool:
        """What was written of that client has not come back."""
        return client in self._opened

    def _opened_at(self, record: Opened) -> None:
        if record.life == self.life:
            if self._opened.get(record.client) == record.number:
                del self._opened[record.client]
        elif record.client not in self._opened:  # of ours the log will say later that it is here
            self.records["moved"] += self.clients.opened_elsewhere(record.client)

    # A message of nobody's.

    def _publish_alone(self, message: Message) -> None:
        batch = Batch(self, clock.now())
        batch.add_only(None, Recipient(self.publisher), message)
        batch.send()


def _message(address: Address, arrived: Arrived, body: Body) -> Message:
    expires = arrived.expires
    if arrived.lifetime:
        expires = time.time() + arrived.lifetime
    return Message(
        address,
        body,
        arrived.property_set,
        arrived.qos,
        arrived.durable,
        arrived.retain,
        expires,
        arrived.hops,
        arrived.sender,
    )

"""What a replica says to the cluster, and hears, over all of its connections.

Outwards it has one sink for every topic. Inwards messages of the replica's queue are matched with its
clients' subscriptions, and records of the log are applied. A *barrier* is what a client's SUBACK or CONNACK
waits for: all bindings that were asked for are there, and a mark, written behind them, has come back on the
log. What is retained is read from the database behind that. There is one mark on its way at a time; whoever
comes meanwhile waits for the next one.

Sessions that outlive their connections are a table, which the log says too (table.py). Their queues are
consumed by the replica that has the client; who takes one over waits a moment for the owner before to let go
of it. Of sessions whose clients are away the keeper sees to the end, and to the will.

Each life of a process has a queue of its own, so that two processes of one name cannot take each other's
messages. A queue outlives a short absence of its replica; when the cluster has been away for
`engine_timeout_secs` the clients are let go, and another life begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import structlog

from gateway import clock
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.routing import OneSink
from gateway.containment import contained
from gateway.egress.link import LinkStatus
from gateway.engine.bindings import Bindings
from gateway.engine.client_session import ClientSession, Told
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.connection import EngineConnection
from gateway.engine.consumers import Consumers, Content
from gateway.engine.cursor import Placement
from gateway.engine.envelope import ENGINE, Arrived, Number, decode
from gateway.engine.log_place import LogPlace
from gateway.engine.names import Names, names_of, topic_of
from gateway.engine.once import Once, recent_chunks
from gateway.engine.opening import Coming, Opening
from gateway.engine.publisher import EnginePublisher, NumberOf
from gateway.engine.recorder import Recorder
from gateway.engine.records import (
    Ended,
    Freed,
    Gone,
    Inherited,
    Left,
    Mark,
    Opened,
    Owner,
    Record,
    Willed,
    decode_record,
)
from gateway.engine.retained import SharedRetained
from gateway.engine.shares import SharedQueue
from gateway.engine.table import Arrival, SessionState, SessionTable
from gateway.errors import RemoteProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Batch, Recipient, Sink, SubBatch
from gateway.model.caches import make_room
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.spooled import Body, PassedOver
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.codec import decode_address, decode_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.store.store import Store
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

MARK_SECS: Final = 15.0  # without a record, after which a connection whose mark is not back is given up
ARRIVED_MAX: Final = 4_096  # content headers that are remembered, and
ARRIVED_OCTETS_MAX: Final = 1_024  # the largest that is worth it
AGAIN_SECS: Final = 60.0  # how often the log is looked through for what has to be written again, at most
RECORD_OVERHEAD: Final = 64  # octets of a record on the cluster's disks besides properties and body, about
ONCE_MIN: Final = (
    65_536  # numbers that are remembered of each life, at least: replicas differ in their windows
)
EXPIRED: Final = "expired"  # as RabbitMQ says it
AWAY: Final = "the cluster is away"
BEHIND: Final = "too much waits for the log"
TAKEN_OVER: Final = "a later connection has the same client identifier"
STOPPING: Final = "this replica stops"
ALIVE_SECS: Final = 5.0  # between signs of life, at most
SILENT_SIGNS: Final = 4  # of them that may be missing, besides the time that clients stay
LEFTOVER_SECS: Final = 30.0  # after the end of a session until its queue is deleted by other replicas, too
LEFTOVERS_MAX: Final = 10_000  # such queues that are remembered, and
LEFTOVERS_AT_ONCE: Final = 100  # that are deleted in a second
FREED_MAX: Final = 1_024  # owners that are remembered, for those who are just about to wait for them
GIVEN_BACK_SECS: Final = 3.0  # that a queue may take to hand out again what it was given back
LATE_SECS: Final = 5.0  # after which it is no news that a client has come elsewhere
# That an owner has to say that it frees a session's queue, before others wait for it in the broker.
LET_GO_SECS: Final = 1.0
LETTING_GO_SECS: Final = 5.0  # that it has when it has said so
Done = Callable[[Outcome], None]
KnownAddress = tuple[Address, tuple[Recipient, ...]]


class Clients(Protocol):
    """The clients of this replica."""

    def wanting(self, address: Address) -> tuple[Sink, ...]:
        """Who of them gets messages of a topic."""

    def new_to(
        self, recipients: tuple[Recipient, ...], message: Message, number: Number | None
    ) -> tuple[Recipient, ...]:
        """Return those that were not sent this message as a retained one; it has a number at QoS 2."""

    def opened_elsewhere(self, client: str, owner: Owner, *, late: bool, at_once: bool) -> bool:
        """A client by that identifier has another owner now; `late`: for some time. True: it was here."""

    def arrived(self, opening: Opening, arrival: Arrival) -> None:
        """The log knows that a client has come to this replica, and what it has found."""

    def lasting(self) -> list[ClientSession]:
        """Sessions of clients that are here, with queues."""

    def publish_left(self, state: SessionState) -> None:
        """The will of a session is due."""

    def wills_pass(self) -> None:
        """Other replicas hold this life for dead, and publish the wills of its clients."""

    def let_go_of(self, session: ClientSession, why: str) -> None:
        """A client has to connect anew."""

    def dropped(self, *, expired: bool) -> None:
        """A queue has had no room for a message; or it `expired` there."""

    def ended(self, state: SessionState) -> None:
        """A session is over, and this replica cleans up."""

    def sweep(self, consumers: Consumers, now: float) -> None:
        """Once a second."""


class Freshness:
    """The proof that the log has been read up to now, which is needed before anything is written again.

    A replica that was frozen, or reads slowly, does not know what others have published meanwhile. So a mark
    has to come back that was written when the proof was already wanted, and in time.
    """

    def __init__(self) -> None:
        self._is_wanted = False
        self._mark: tuple[int, Monotonic] | None = None  # its number, and when it was written

    def want(self) -> None:
        """Wait for the next mark that is written."""
        self._is_wanted, self._mark = True, None

    def wrote(self, number: int, now: Monotonic) -> None:
        """Note that a mark was written."""
        if self._is_wanted and self._mark is None:
            self._mark = number, now

    def is_proved(self, number: int, now: Monotonic) -> bool:
        """Return True if the mark that has come back is the one that was waited for."""
        if self._mark is None or number < self._mark[0]:
            return False
        in_time = now - self._mark[1] < MARK_SECS
        self._is_wanted, self._mark = False, None
        return in_time


class EngineSession(OneSink):
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
        time: ClusterClock,
        retained: SharedRetained,
    ) -> None:
        """`time` is asked for over this connection. `let_go` ends the connections of all clients, for the
        cluster was away for too long."""
        self.time = time
        self.publisher = EnginePublisher(
            status.stats,
            names_of(settings.namespace, settings.topic_exchange),
            self.time,
            retained,
            self._alone,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
            topics_max=limits.cache_entries_max,
        )
        super().__init__(self.publisher)
        self.settings = settings
        self.replica = replica
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.names: Names = names_of(settings.namespace, settings.topic_exchange)
        self.bindings = Bindings()
        self.kept = LogPlace(settings.namespace, store)
        recent = recent_chunks(settings.in_flight_max, limits.inflight_max)
        self.table = SessionTable(settings.namespace, self, store, clock.now, self.time.utc, recent)
        self.recorder = Recorder(self._wake)
        self.clients: Clients  # from `serve` on
        self.life = ""
        self.stopped = False  # the process ends
        self.hear_dropped: list[Callable[[str, bytes], None]] = []  # by their queue; those of outboxes
        outcomes = ("late", "passed_over", "written_again", "moved", "lost")
        self.records = dict.fromkeys(outcomes, 0)
        self.discarded = 0  # times that the state was forgotten and read again
        self.once = Once(max(ONCE_MIN, 2 * settings.in_flight_max))
        self._dispatcher = dispatcher
        self._let_go = let_go
        self._connection: EngineConnection | None = None
        self._up = False
        self._down_since: float | None = None
        self._openings: dict[str, Opening] = {}  # that have not come back, by client
        self._taking_over: dict[
            ClientSession, tuple[Owner, float]
        ] = {}  # who has to let go first, until when
        self._freed_lately: dict[Owner, None] = {}
        self._leftovers: dict[str, float] = {}  # queues of ended sessions, and when they go
        # By client: what its queue was given back when it was freed, and since when.
        self._given_back: dict[str, tuple[Sequence[int], Monotonic]] = {}
        self._expecting: dict[ClientSession, float] = {}  # that, and until when
        self._pumping: dict[ClientSession, None] = {}
        self._alive_secs = min(ALIVE_SECS, settings.engine_timeout_secs / 4)
        self._alive_at = self._up_since = 0.0
        self._said: dict[str, float] = {}  # records of our keeping, that are not written each second
        self._waiting: list[Done] = []
        self._marked: list[Done] = []
        self._mark: int | None = None  # its number, while one is on its way
        self._mark_since = 0.0
        self._mark_written = False
        self._look_at, self._look_behind = 0.0, 0  # octets of the log
        self._freshness = Freshness()
        self._entries: dict[bytes, KnownAddress] = {}
        self._recipients: dict[Sink, Recipient] = {}
        self._known: dict[bytes, Arrived] = {}
        self._batch = Batch(self, Monotonic(0.0))  # the clock does not run yet
        self._begin_life()

    def _begin_life(self) -> None:
        self.life = secrets.token_hex(6)
        self.recorder.begin(self.life)

    @property
    def queue(self) -> str:
        """The queue of this life."""
        return f"{self.names.queues}.{self.replica}.{self.life}"

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Its share of the broker's gauges."""
        return {
            "gateway_engine_bindings": lambda: len(self.bindings),
            "gateway_engine_clock_skew_seconds": lambda: self.time.skew,
            "gateway_engine_log_position": lambda: self.kept.position,
            "gateway_engine_retaining_messages": lambda: len(self.publisher.retaining),
            "gateway_engine_sessions": lambda: len(self.table),
            "gateway_engine_unconfirmed_clients": lambda: (
                len(self._waiting) + len(self._marked) + len(self._openings)
            ),
        }

    def serve(self, clients: Clients, number_of: NumberOf) -> None:
        """Whose messages these are; `number_of` says which number the log has for one. Before it runs."""
        self.clients = clients
        self.publisher.number_of = number_of

    @property
    def why_not(self) -> str:
        """Why clients cannot be served; "": they can."""
        if self.stopped:
            return STOPPING
        if not self._up:
            return self.status.why or AWAY
        return BEHIND if self.recorder.full else self.time.why_not

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
        publisher = self.publisher
        return publisher.waiting_messages + publisher.in_flight + len(publisher.retaining)

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Routes know listeners and links, and not what is behind them."""

    def connect(self, stream: Stream, target: Target, now: float) -> EngineConnection:
        """A connection stands: begin the handshake."""
        self._connection = EngineConnection(self, stream, target, now)
        return self._connection

    def turn_done(self) -> None:
        """Hand out what this wake-up has gathered; then it can be acknowledged."""
        batch = self._batch
        if len(batch):
            self._batch = Batch(self, clock.now())
            batch.send()
        pumping, self._pumping = self._pumping, {}
        for session in pumping:
            try:
                session.pump()
            except Exception as error:
                contained("delivery", error, client=session.client_id)
        self.table.note(self.kept.position)
        self.kept.note()
        if self._connection is not None:
            self._connection.dealt_with()

    def tick(self, now: float) -> None:
        """Once a second, connected or not."""
        if not self._up:
            self._down_since = now if self._down_since is None else self._down_since
            if now - self._down_since >= self.settings.engine_timeout_secs:
                self._give_clients_up(now)
        if self._connection is None:
            return
        if self._mark is not None and self._is_silent(self._connection, now):
            self.kept.cursor.stall()
            log.warning("state log silent, reconnecting", position=self.kept.position)
            self._connection.give_up("a mark did not come back on the log")
        elif self._up and (now >= self._look_at or self.kept.octets_read >= self._look_behind):
            self._look_at = now + min(AGAIN_SECS, self.settings.state_secs / 20)
            self._look_behind = self.kept.octets_read + self.settings.state_bytes_max // 20
            self._freshness.want()
            self._send_mark(alive=True)
        if self._up and not self.stopped and self.time.is_known:
            self._keep_house(now, self.time.utc())
            self.clients.sweep(self._connection.consumers, now)

    def _is_silent(self, connection: EngineConnection, now: float) -> bool:
        """Return True if a mark is late and nothing has arrived meanwhile.

        While records arrive, or declarations are answered, reading takes its time. Another mark is written
        then: other replicas see that this one lives, and a mark that comes back before an earlier one says
        that the log has lost that one.
        """
        if now - self._mark_since < MARK_SECS:
            return False
        if now - max(self.kept.cursor.received_at, connection.answered_at) >= MARK_SECS:
            return True
        self._mark_since = self._alive_at = now
        if self._mark_written:
            self._write_mark(connection, self.recorder.next_number())
        return False

    def _discard(self) -> None:
        """Forget what was read: the log lacks records that were not, and is read from its beginning."""
        log.error("log cut, reading it again", log=self.names.state, position=self.kept.position)
        self.discarded += 1
        self.kept.begin_anew()
        self.table.begin_anew()

    def _give_clients_up(self, now: float) -> None:
        self._down_since = now
        if self._connection is None:
            self.clients.wills_pass()
        self._let_go()
        if self._connection is None:
            self._begin_life()

    def _keep_house(self, now: float, utc: float) -> None:
        """What is due of sessions whose clients are away, and of replicas that are not heard of."""
        for session, (_, until) in list(self._taking_over.items()):
            if now >= until:
                self._consume(session)
        for session, end in list(self._expecting.items()):
            if now >= end:
                del self._expecting[session]
                session.expect_no_longer()
        for client, (_, since) in list(self._given_back.items()):
            if now - since >= GIVEN_BACK_SECS:
                del self._given_back[client]
        self._said = {what: at for what, at in self._said.items() if now - at < MARK_SECS}
        # Where two clocks differ either may be the wrong one, that of a node, too: nothing ends meanwhile.
        for state in () if self.time.why_not else self.table.kept_by(self.life):
            if state.will is not None and 0 < state.will_at <= utc:
                if self._once(f"will {state.owner}", now):
                    self.clients.publish_left(state)
            elif state.queue and state.ends_at <= utc and self._once(f"end {state.owner}", now):
                number = self.recorder.next_number()
                self.recorder.put(Ended(state.client, self.life, number, state.owner))
        self._delete_leftovers(now)
        if now - self._alive_at >= self._alive_secs:
            self._send_mark(alive=True)
            limit = self.settings.engine_timeout_secs + SILENT_SIGNS * self._alive_secs
            for life in self.table.silent(self.life, now - limit, self._up_since):
                if self._once(f"life {life}", now):
                    log.info("a replica is not heard of, its sessions are kept here", life=life)
                    self.recorder.put(Inherited(self.life, self.recorder.next_number(), life, utc))

    def _once(self, what: str, now: float) -> bool:
        """It is not on its way already."""
        if what in self._said:
            return False
        self._said[what] = now
        return True

    def _write_again(self) -> None:
        assert self._connection is not None

        def oldest(share: float) -> float:
            return self.kept.oldest(self.settings.state_bytes_max * share)

        for state in self.table.due(self.settings.state_secs, oldest):
            self.records["written_again"] += 1
            self.recorder.put(state.snapshot(self.life, self.recorder.next_number(), self.kept.position))
            if state.queue:
                self._connection.consumers.touch(f"{self.names.sessions}.{state.queue}")

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
        self._look_at = clock.now() + AGAIN_SECS
        self._send_mark()

    def disconnected(self, connection: EngineConnection, why: str) -> None:
        """The connection is gone; what it had not confirmed is sent again over the next one."""
        if self._connection is not connection:
            return
        self._connection = None
        self._up = False
        self.stats.blocked = False
        self._waiting = self._marked + self._waiting
        self._marked = []
        self._mark = None
        self._freshness = Freshness()
        self.recorder.down()
        openings, self._openings = self._openings, {}
        for opening in openings.values():
            opening.lose("the cluster was lost before it knew of this client")
        self.publisher.close()
        self.status.went_down(why)

    def deliver(self, wire: bytes, raw: bytes, body: Body) -> None:
        """A message of the replica's queue."""
        found = self._read_content(wire, raw, body)
        if found is None:
            return
        (address, recipients), arrived, body = found
        if arrived.number is not None and not self.once.is_first(arrived.number):
            self.stats.duplicates += 1
            return
        if recipients:
            message = _message(address, arrived, body, self.time.correction)
            if arrived.retain or arrived.number is not None:
                recipients = self.clients.new_to(recipients, message, arrived.number)
            if len(recipients) == 1:
                self._batch.add_only(None, recipients[0], message)
            elif recipients:
                self._batch.add(None, [(recipient, message) for recipient in recipients])

    def _read_content(self, wire: bytes, raw: bytes, body: Body) -> tuple[KnownAddress, Arrived, Body] | None:
        try:
            entry = self._entries.get(wire) or self._entry(wire)
            arrived = self._known.get(raw) or self._read(raw)
        except (NameRefused, RemoteProtocolError) as error:
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return None
        size = body.size if not body and isinstance(body, PassedOver) else len(body)
        if size > self.limits.message_bytes_max:
            text = f"a body of {size} octets exceeds limits.message_bytes_max; it was not kept"
            self._refuse(wire, b"", Outcome(Verdict.REJECTED, Reason.TOO_LARGE, text))
            return None
        return entry, arrived, body

    def record(self, wire: bytes, raw: bytes, body: Body) -> None:
        """A record of the log."""
        try:
            arrived = decode(raw)
            exchange = decode_address(wire)[0]
        except RemoteProtocolError as error:
            self._refuse(wire, body, Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return
        if arrived.offset >= 0 and not self._is_new(arrived.offset):
            return
        self.kept.octets_read += len(raw) + len(body) + RECORD_OVERHEAD
        self.kept.records_read += 1
        # What a replica of an earlier version retains comes by another exchange.
        record = decode_record(bytes(body)) if exchange == self.names.direct else None
        if record is None:
            self.records["passed_over"] += 1
            return
        if not self.table.apply(record, self.kept.position):
            self.records["late"] += 1
        if record.life != self.life:
            return
        if not self.recorder.came(record.number):
            self._lost_records()
        elif isinstance(record, Mark):
            self._mark_came(record)

    def _is_new(self, offset: int) -> bool:
        """Move to the record at `offset`. Return False if it was read before, or the log has been cut."""
        placement = self.kept.cursor.receive(offset, clock.now())
        if placement is Placement.CUT:
            self._discard()
            if self._connection is not None:
                self._connection.give_up("the log was cut, it is read from its beginning")
        elif placement is Placement.SAME and self._connection is not None:
            self._connection.give_up("the log goes on, it is read from where it stopped")
        return placement is Placement.NEW

    def _lost_records(self) -> None:
        """Clients wait for a record that will not come: all that has not come is written again over another
        connection."""
        if self._connection is not None:
            self.records["lost"] += 1
            log.warning(
                "the log has lost a record, the cluster is connected to anew", position=self.kept.position
            )
            self._connection.give_up("the log has lost a record")

    def dropped(self, raw: bytes, body: Body) -> None:
        """A queue has had no room for a message, or no time."""
        try:
            headers = dict(decode_properties(raw).headers or ())
        except RemoteProtocolError as error:
            self.stats.refuse(Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return
        reason, queue = (
            "" if found is None else str(found.value)
            for found in (headers.get("x-first-death-reason"), headers.get("x-first-death-queue"))
        )
        self.clients.dropped(expired=reason == EXPIRED)
        for hear in self.hear_dropped:
            hear(queue, bytes(body))
        if reason != EXPIRED:
            log.warning("a queue on the cluster is full, and loses its oldest messages", queue=queue)

    def _refuse(self, wire: bytes, body: Body, outcome: Outcome) -> None:
        """What no client could be given."""
        self.stats.refuse(outcome)
        log.warning("a message of the cluster cannot be delivered", why=outcome.text)
        message = Message(amqp_address(*decode_address(wire)), bytes(body), sender=Sender(ENGINE))
        self._dispatcher.dead_letters.add([message], "", outcome)

    def _entry(self, wire: bytes) -> KnownAddress:
        make_room(self._entries, self.limits.cache_entries_max)
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
            make_room(self._known, ARRIVED_MAX)
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
        if key is not None and self._connection is not None:
            self._connection.bind(key, True)

    def unbind(self, levels: list[str]) -> None:
        """It does not any more."""
        key = self.bindings.remove(levels)
        if key is not None and self._connection is not None:
            self._connection.bind(key, False)

    def after_recorded(self, done: Done) -> None:
        """`done` hears ACCEPTED when all that was asked for is there, and the log has been read up to now."""
        self._waiting.append(done)
        self._send_mark()

    def _send_mark(self, *, alive: bool = False) -> None:
        connection = self._connection
        if self._mark is not None or connection is None or not connection.ready:
            return
        if self._up and (connection.consumers.undecided or not (self._waiting or alive)):
            return
        if self._up:
            self._marked, self._waiting = self._waiting, []
        number = self._mark = self.recorder.next_number()
        self._mark_since = self._alive_at = clock.now()
        self._mark_written = False
        connection.after_bound(partial(self._write_mark, connection, number))

    def decided(self) -> None:
        """What waited to be bound is asked for."""
        self._send_mark()

    def _write_mark(self, connection: EngineConnection, number: int) -> None:
        self.recorder.flush()
        connection.write(Mark(self.replica, self.life, number))
        self.recorder.wrote(number)
        self._mark_written = True
        self._freshness.wrote(number, clock.now())

    def _mark_came(self, mark: Mark) -> None:
        if self._freshness.is_proved(mark.number, clock.now()):
            self._write_again()
        if mark.number != self._mark:
            return
        self._mark = None
        if not self._up:
            self._came_up()
        marked, self._marked = self._marked, []
        for done in marked:
            try:
                done(ACCEPTED)
            except Exception as error:  # of one client: the others have waited as long
                contained("connection", error)
        self._send_mark()

    def _came_up(self) -> None:
        """The log has been read to its end: who has lost a client by then knows it."""
        assert self._connection is not None
        self._up = True
        self._down_since = None
        self._up_since = clock.now()
        self.status.came_up()
        self.recorder.up(self._connection.write)
        for session in self.clients.lasting():
            state = self.table.states.get(session.client_id)
            if state is None or state.owner != session.owner:
                self.clients.let_go_of(session, "the log does not know its session any more")
            elif session not in self._taking_over:
                self._consume(session)
        if not self.stopped:
            self.clients.sweep(self._connection.consumers, self._up_since)

    # Clients that come and go, and what the table has learnt of them.

    def _wake(self) -> None:
        if self._connection is not None:
            self._connection.wake()

    def flush(self) -> None:
        """Write what sessions have to say."""
        self.recorder.flush()

    def open(self, coming: Coming) -> Opening:
        """A client has come; the log hears of it, and says what it finds."""
        assert self._connection is not None
        client = coming.client
        number = self.recorder.next_number()
        before = self._openings.get(client)
        if before is not None:
            before.lose(TAKEN_OVER)
        opening = self._openings[client] = Opening(coming, (self.life, number))
        self._connection.write(
            Opened(
                client,
                self.replica,
                self.life,
                number,
                coming.clean,
                coming.expiry_secs,
                self.time.utc(),
                coming.user,
                coming.place,
                coming.will,
                coming.only_own,
            )
        )
        self.recorder.wrote(number)
        return opening

    def came(self, record: Opened, arrival: Arrival) -> None:
        """A client has been opened at some replica."""
        opening = self._openings.get(record.client)
        ours = opening is not None and opening.owner == record.owner
        if not arrival.refused:
            self.records["moved"] += self.clients.opened_elsewhere(
                record.client,
                record.owner,
                late=not self._up or self.time.utc() - record.utc > LATE_SECS,
                at_once=ours or arrival.ended is not None,
            )
            if arrival.ended is not None:
                self.is_over(arrival.ended, record)
        if ours:
            assert opening is not None
            del self._openings[record.client]
            self.clients.arrived(opening, arrival)

    def letting_go(self, client: str, owner: Owner) -> None:
        """An owner is about to free the queue of a session: it lives, and giving back takes its time."""
        for session, (before, _) in self._taking_over.items():
            if session.client_id == client and before == owner:
                self._taking_over[session] = before, clock.now() + LETTING_GO_SECS

    def let_go(self, client: str, owner: Owner, given_back: Sequence[int]) -> None:
        """An owner has freed the queue of a session, which was given back messages with these prints."""
        self._freed_lately[owner] = None
        if len(self._freed_lately) > FREED_MAX:
            del self._freed_lately[next(iter(self._freed_lately))]
        if given_back and self._up:
            self._given_back[client] = given_back, clock.now()
            if len(self._given_back) > FREED_MAX:
                del self._given_back[next(iter(self._given_back))]
        for session, (before, _) in list(self._taking_over.items()):
            if session.client_id == client and before == owner:
                self._consume(session)

    def is_over(self, state: SessionState, record: Record) -> None:
        """A session has ended by that record; its writer cleans up."""
        if record.life != self.life:
            if state.queue:  # its writer may be lost before it deletes that
                make_room(self._leftovers, LEFTOVERS_MAX)
                self._leftovers[state.queue] = clock.now() + LEFTOVER_SECS
            return
        self.clients.ended(state)
        if state.queue:
            self._delete_queue(state.queue)
        if state.will is not None and state.will_at and self._once(f"will {state.owner}", clock.now()):
            self.clients.publish_left(state)

    def _delete_queue(self, queue: str) -> None:
        if self._connection is not None:
            self._connection.delete_queue(f"{self.names.sessions}.{queue}")

    def _delete_leftovers(self, now: float) -> None:
        """Delete the queues of sessions that others have ended some time ago, should they still be there."""
        due = [queue for queue, at in self._leftovers.items() if at <= now]
        for queue in due[:LEFTOVERS_AT_ONCE]:
            del self._leftovers[queue]
            self._delete_queue(queue)

    def buried(self, life: str) -> None:
        """A life is over, and others have what it had. If it is ours, we have been away for too long."""
        if life != self.life:
            return
        log.warning("other replicas hold this one for dead: it begins anew", life=life)
        self.clients.wills_pass()
        self._let_go()
        self._begin_life()
        if self._connection is not None:
            self._connection.give_up("other replicas held this one for dead")

    def stopping(self, write: Callable[[Record], None]) -> None:
        """The connection is ended in order: if the process ends, others keep what it has kept."""
        if self.stopped:
            self.recorder.flush()
            write(Gone(self.life, self.recorder.next_number(), self.time.utc()))

    def acquire(self, session: ClientSession, before: Owner | None) -> None:
        """Consume the queue of a session, when the owner before has let go of it."""
        if before is None or before in self._freed_lately:
            self._consume(session)
        else:
            self._taking_over[session] = before, clock.now() + LET_GO_SECS

    def share(self, shared: SharedQueue, *, on: bool) -> None:
        """This replica has members of a shared subscription, or no longer."""
        if self._connection is not None and self._up:
            if on:
                self._connection.consumers.begin(shared)
            else:
                self._connection.consumers.end(shared, None)

    def _consume(self, session: ClientSession) -> None:
        self._taking_over.pop(session, None)
        given_back = self._given_back.pop(session.client_id, None)
        if given_back is not None:
            session.expect(given_back[0])
            self._expecting[session] = clock.now() + GIVEN_BACK_SECS
        if self._connection is not None and self._up and not self.stopped:
            self._connection.consumers.begin(session)

    def hand_over(self, done: Done) -> None:
        """The process ends: other replicas get the queues of its clients' sessions, and `done` hears when the
        log says that they are free. At once while the cluster is away, for nobody could be told."""
        self.stopped = True
        self._taking_over.clear()
        connection, sessions = self._connection, self.clients.lasting()
        if connection is None or not self._up:
            done(ACCEPTED)
            return
        for session in sessions:
            session.stop()
        connection.consumers.close()
        for session in sessions:
            self._freed(session.client_id, session.owner)
        self.after_logged(done)

    def leave(self, session: ClientSession, will_at: float) -> None:
        """The client of a session has gone: the log hears of it, and again when its queue is free."""
        self._taking_over.pop(session, None)
        self._expecting.pop(session, None)
        self._pumping.pop(session, None)
        client, owner, number = session.client_id, session.owner, self.recorder.next_number()
        utc = self.time.utc()
        self.recorder.put(Left(client, self.life, number, owner, utc, session.expiry_secs, will_at))
        if session.lasting and not self.stopped and self._connection is not None:
            self._connection.consumers.end(session, partial(self._freed_by, session))

    def _freed_by(self, session: ClientSession, given_back: Sequence[Content]) -> None:
        self._freed(session.client_id, session.owner, session.prints(given_back))
        if self._connection is None or not self._up:  # or the table may not have been read to its end
            return
        state = self.table.states.get(session.client_id)
        if state is None or session.queue != f"{self.names.sessions}.{state.queue}":
            self._connection.delete_queue(session.queue)  # its session has ended while it was consumed here

    def _freed(self, client: str, owner: Owner, prints: tuple[int, ...] = ()) -> None:
        self.recorder.put(Freed(client, self.life, self.recorder.next_number(), owner, prints))

    def abandon(self, opening: Opening, state: SessionState) -> None:
        """A client has come, and has gone before it was let in."""
        number = self.recorder.next_number()
        client, owner = opening.coming.client, opening.owner
        self.recorder.put(Left(client, self.life, number, owner, self.time.utc(), state.expiry_secs, 0.0))
        self._freed(client, owner)

    def willed(self, client: str, owner: Owner) -> None:
        """A will has been published."""
        self.recorder.put(Willed(client, self.life, self.recorder.next_number(), owner))

    # What sessions ask.

    def changed(self, session: ClientSession) -> None:
        """Something of it has to be written to the log when the wake-up ends."""
        self.recorder.changed(session)

    def after_logged(self, done: Told) -> None:
        """`done` hears when all that was to be written until now is on the log."""
        self.recorder.after_logged(done)

    def pump(self, session: ClientSession) -> None:
        """It has something for its client; it is pumped when the wake-up ends."""
        self._pumping[session] = None

    def next_number(self) -> Number:
        """For a message that is going to be published."""
        return self.publisher.next_number()

    def let_go_of(self, session: ClientSession, why: str) -> None:
        """Its client has to connect anew."""
        self.clients.let_go_of(session, why)

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """The message of a delivery; None: there is none that could be delivered."""
        found = self._read_content(*content)
        if found is None:
            return None
        (address, _), arrived, body = found
        return _message(address, arrived, body, self.time.correction), arrived.number

    def bind_queue(self, session: ClientSession, key: str) -> None:
        """`unbound` says what is to be done with a key."""
        if self._connection is not None:
            self._connection.consumers.bind(session, key)

    # A message of nobody's.

    def _alone(self, message: Message) -> SubBatch:
        batch = Batch(self, clock.now())
        part = SubBatch(batch, Recipient(self.publisher))
        part.messages.append(message)
        part.slots.append(batch.open(None, 1))
        return part


def _message(address: Address, arrived: Arrived, body: Body, correction: float) -> Message:
    expires = arrived.expires + correction if arrived.expires else arrived.expires
    if arrived.lifetime:
        expires = clock.utc() + arrived.lifetime
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

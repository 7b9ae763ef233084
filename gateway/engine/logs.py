"""Further logs that all replicas follow: each a stream with one subject, and one order for all who read it.

What a replica has to say is a record, and counts when it has come back: then every replica has it in the same
place. What has not come back when the connection is lost is written again over the next one, when the log has
been read to its end; so records are such that coming twice makes no difference. All logs have one connection
to the cluster, with two channels each, and one to declare them.

A record begins with its version, the life that wrote it, its number in that, and the time there, in UTC
seconds. An empty one is a mark: when it comes back the log has been read up to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.containment import contained
from gateway.egress.amqp091.session import machine_to
from gateway.egress.link import LinkStatus
from gateway.engine.cluster import EngineLink
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.cursor import LogCursor, Placement
from gateway.engine.envelope import OFFSET_HEADER
from gateway.engine.names import names_of
from gateway.engine.unrouted import Unrouted
from gateway.errors import RemoteProtocolError
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.times import Monotonic, WallTime
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import Delivery
from gateway.protocols.amqp091.codec import decode_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import MethodReceived
from gateway.protocols.amqp091.sending import Publisher
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

VERSION: Final = 1
HEAD: Final = Struct(">B12sQd")
LIFE_CHARS: Final = 12
PERSISTENT: Final = b"\x10\x00\x02"  # a content header that says delivery-mode 2, and nothing else
PREFETCH: Final = 1_000
BESIDE_OCTETS: Final = 4_194_304  # that a record may have besides the body of a message
RETURN_SECS: Final = 15.0  # without a record, after which a connection whose records are not back is given up
RECORD_OVERHEAD: Final = 64  # octets of a record on the cluster's disks besides its body, about


def stream_arguments(settings: RabbitEngine, *, octets_max: int, secs: float | None = None) -> Headers:
    """Those of a stream that keeps so much, and for so long."""
    segment = min(settings.state_segment_bytes, octets_max // 4)
    age: Headers = () if secs is None else (("x-max-age", string(f"{int(secs)}s")),)
    return (
        ("x-queue-type", string("stream")),
        *age,
        ("x-max-length-bytes", Value(ValueType.INT64, octets_max)),
        ("x-stream-max-segment-size-bytes", Value(ValueType.INT64, segment)),
    )


class Record(NamedTuple):
    """The `number`th of a life. `behind`: octets of the log that had been read before it."""

    life: str
    number: int
    utc: WallTime
    body: bytes
    behind: int


class Reader(Protocol):
    """What follows from a log."""

    def begin_anew(self) -> None:
        """The log is read from its beginning: what was read before is forgotten."""

    def apply(self, record: Record) -> None:
        """A record that is no mark, in the order of the log; the same may come twice."""

    def lost(self) -> None:
        """The cluster is away: what waits for an answer has none for some time."""

    def tick(self, now: Monotonic) -> None:
        """Once a second, while the log can be written."""

    def stop(self) -> None:
        """The process ends: last words."""


class _Unlogged(NamedTuple):
    octets: bytes
    done: Callable[[], None] | None
    since: Monotonic


class SharedLog:
    """One log, `stream` on the cluster. `readable_secs`: how far back it is read; None: to its beginning."""

    def __init__(
        self,
        stream: str,
        arguments: Headers,
        life: str,
        time: ClusterClock,
        readable_secs: Callable[[], float] | None = None,
    ) -> None:
        """`arguments` are those that all replicas declare it with; by `time` records say when they were
        written."""
        self.stream = stream
        self.arguments = arguments
        self.life = life
        self.time = time
        self.reader: Reader  # from `use` on
        self.up = False
        self.octets_read = 0
        self.passed_over = 0  # records that nobody here knows
        self.unlogged_octets = 0
        self.discarded = 0  # times that all was forgotten and read again
        self._readable_secs = readable_secs
        self._cursor = LogCursor()
        self._numbers = 0
        self._marks: deque[int] = deque()  # written over this connection, and not back yet
        self._marked_at = Monotonic(0.0)
        self._reading_up: dict[int, Callable[[], None]] = {}  # by the number of a mark
        self._unlogged: dict[int, _Unlogged] = {}
        self._write: Callable[[bytes], None] | None = None
        self._came_up: Callable[[], None] = lambda: None

    def use(self, reader: Reader) -> None:
        """Who hears of its records. Before it is followed."""
        self.reader = reader

    def __len__(self) -> int:
        """Records of this life that have not come back."""
        return len(self._unlogged)

    # What its reader asks.

    def put(self, body: bytes, done: Callable[[], None] | None = None) -> int:
        """Write a record now, or when that is possible; `done` is called when it has come back, and has been
        applied. Returns its number."""
        self._numbers += 1
        octets = self._encoded(self._numbers, body)
        self._unlogged[self._numbers] = _Unlogged(octets, done, clock.now())
        self.unlogged_octets += len(octets)
        if self.up and self._write is not None:
            self._write(octets)
        return self._numbers

    def drop(self, kind: bytes) -> bool:
        """Of the records that begin with `kind`, and have not come back, the oldest is not written again; who
        waits for it is told. False: there is none."""
        for number, one in self._unlogged.items():
            if one.octets.startswith(kind, HEAD.size):
                self._came(number)
                return True
        return False

    def read_up(self, done: Callable[[], None]) -> None:
        """Call `done` when all has been read that is on the log now; never if the connection is lost before,
        or if that takes so long that others may have written much behind it."""
        if self.up and not self._reading_up:
            self._write_mark()
            self._reading_up[self._numbers] = done

    def withdraw(self, number: int) -> None:
        """A record that nobody wants any more is not written again."""
        gone = self._unlogged.pop(number, None)
        if gone is not None:
            self.unlogged_octets -= len(gone.octets)

    def _encoded(self, number: int, body: bytes) -> bytes:
        return HEAD.pack(VERSION, self.life.encode(), number, self.time.utc()) + body

    # What the connection asks.

    @property
    def may_begin(self) -> bool:
        """Return True if it is known where a new consumer has to begin."""
        return self._readable_secs is None or self._cursor.position >= 0 or self.time.is_known

    def begin(self) -> Value:
        """Return where a new consumer has to begin."""
        found = self._cursor.begin(clock.now())
        if found is not None:
            return found
        if self._readable_secs is None:
            return string("first")
        return Value(ValueType.TIMESTAMP, max(0, int(self.time.utc() + -self._readable_secs())))

    def connected(self, write: Callable[[bytes], None], came_up: Callable[[], None]) -> None:
        """It is followed, and can be written: by a mark it is known when it has been read to its end."""
        self._write = write
        self._came_up = came_up
        self._write_mark()

    def _write_mark(self) -> None:
        assert self._write is not None
        self._numbers += 1
        self._marks.append(self._numbers)
        self._marked_at = clock.now()
        self._write(self._encoded(self._numbers, b""))

    def disconnected(self) -> None:
        """The connection is gone."""
        self._write = None
        self._marks.clear()
        self._reading_up.clear()
        if self.up:
            self.up = False
            self.reader.lost()

    def tick(self, now: Monotonic, *, blocked: bool) -> str:
        """Once a second; returns why the connection is no use, "" if it is.

        While records arrive, reading takes its time. Another mark is written then: one that comes back before
        what was written earlier says that this is lost.
        """
        if self.up:
            self.reader.tick(now)
        waits = bool(self._marks) or (self.up and bool(self._unlogged))
        if not waits or blocked or self._write is None:
            return ""
        since = self._marked_at if self._marks else next(iter(self._unlogged.values())).since
        if now - since < RETURN_SECS:
            return ""
        if now - self._cursor.received_at >= RETURN_SECS:
            self._cursor.stall()
            return f"what was written to {self.stream} did not come back"
        self._write_mark()
        return ""

    def _discard(self) -> None:
        log.error("log cut, reading it again", log=self.stream, position=self._cursor.position)
        self.discarded += 1
        self._cursor.begin_anew()
        self.octets_read = 0
        self.reader.begin_anew()

    def receive(self, raw: bytes, body: bytes) -> str:
        """Apply a record. Return why the connection is no use, "" if it is."""
        placement = self._cursor.receive(_offset_of(raw), clock.now())
        if placement is Placement.CUT:
            self._discard()
            return f"{self.stream} was cut, it is read from its beginning"
        if placement is Placement.SAME:
            return f"{self.stream} goes on, it is read from where it stopped"
        return "" if placement is Placement.KNOWN else self._read(raw, body)

    def _read(self, raw: bytes, body: bytes) -> str:
        behind = self.octets_read
        self.octets_read += len(raw) + len(body) + RECORD_OVERHEAD
        try:
            version, life, number, utc = HEAD.unpack_from(body)
            name = life.decode()
        except (StructError, UnicodeDecodeError):
            version = 0
        if version != VERSION:
            self.passed_over += 1
            return ""
        said = body[HEAD.size :]
        lost = False
        try:
            if said:
                self.reader.apply(Record(name, number, WallTime(utc), said, behind))
        finally:  # whatever its reader makes of it, it is on the log
            if name == self.life:
                lost = not self._came(number)
        return f"{self.stream} has lost a record" if lost else ""

    def _came(self, number: int) -> bool:
        """Note that a record of this life has come back. Return False if one written before it is lost."""
        if number in self._marks:
            return self._mark_came(number)
        found = self._unlogged.pop(number, None)
        if found is None:
            return True
        self.unlogged_octets -= len(found.octets)
        if found.done is not None:
            try:
                found.done()
            except Exception as error:  # of one record: whoever waits for others is told all the same
                contained("batch", error)
        return True

    def _mark_came(self, number: int) -> bool:
        lost = self._marks.popleft() != number
        done = self._reading_up.pop(number, None)
        if done is not None and clock.now() - self._marked_at < RETURN_SECS:
            done()
        if self.up:
            return not lost and next(iter(self._unlogged), number) >= number
        self.up = True
        assert self._write is not None
        now = clock.now()
        for at, one in list(self._unlogged.items()):
            self._unlogged[at] = one._replace(since=now)
            self._write(one.octets)
        self._came_up()
        return not lost


def _offset_of(raw: bytes) -> int:
    """The position that the broker says. Raises RemoteProtocolError for octets that are no content header."""
    for name, value in decode_properties(raw).headers or ():
        if name == OFFSET_HEADER and isinstance(value.value, int):
            return value.value
    raise RemoteProtocolError("a record without its offset", reason=ReplyCode.SYNTAX_ERROR)


class Logs(Unrouted):
    """The link session of the connection that all of them have."""

    def __init__(
        self,
        settings: RabbitEngine,
        replica: str,
        limits: Limits,
        status: LinkStatus,
        logs: Sequence[SharedLog],
    ) -> None:
        self.settings = settings
        self.replica = replica
        self.limits = limits
        self.status = status
        self.stats: LinkStats = status.stats
        self.logs = logs
        self._connection: LogsConnection | None = None

    @property
    def why_not(self) -> str:
        """Why records cannot be written; "": they can."""
        if all(one.up for one in self.logs):
            return ""
        return self.status.why or "the logs have not been read yet"

    def came_up(self) -> None:
        """A log has been read to its end."""
        if all(one.up for one in self.logs):
            self.status.came_up()

    def disconnected(self, why: str) -> None:
        """The connection is gone."""
        self._connection = None
        self.stats.blocked = False
        for one in self.logs:
            one.disconnected()
        self.status.went_down(why)

    # What the link asks.

    @property
    def idle(self) -> bool:
        """Nothing waits for the cluster."""
        return self.idle_but(0)

    def idle_but(self, held: int) -> bool:
        """The same: what it reads waits in front of no route."""
        return not self.unconfirmed

    @property
    def unconfirmed(self) -> int:
        """Records that have not come back."""
        return sum(map(len, self.logs))

    def connect(self, stream: Stream, target: Target, now: float) -> LogsConnection:
        """A connection stands: begin the handshake."""
        self._connection = LogsConnection(self, stream, target, now)
        return self._connection

    def turn_done(self) -> None:
        """Nothing gathers."""

    def tick(self, now: float) -> None:
        """Once a second, connected or not."""
        for one in self.logs:
            why = one.tick(Monotonic(now), blocked=self.stats.blocked)
            if why:
                self.reconnect(why)
                return

    def reconnect(self, why: str) -> None:
        """Give the connection up: the next one goes on where this one stopped reading."""
        if self._connection is not None:
            log.warning("log connection given up", why=why)
            self._connection.give_up(why)


class LogsConnection(EngineLink):
    """A connection for all of them."""

    def __init__(self, session: Logs, stream: Stream, target: Target, now: float) -> None:
        settings, limits = session.settings, session.limits
        within = limits.model_copy(update={"message_bytes_max": limits.message_bytes_max + BESIDE_OCTETS})
        name = f"{session.replica} logs"
        machine = machine_to(target, within, name=name, heartbeat=settings.heartbeat_secs)
        super().__init__(machine, session.stats, stream, now + settings.connect_timeout_secs)
        self._session = session
        self._direct = names_of(settings.namespace, settings.topic_exchange).direct
        self._declaring = 0
        self._undeclared: deque[SharedLog] = deque()
        self._publishing: dict[int, SharedLog] = {}  # by channel
        self._following: dict[int, SharedLog] = {}
        self._unbegun: list[int] = []  # channels of logs that are not consumed yet
        self._read: dict[int, int] = {}  # the last delivery tags, by channel

    # What the stream asks.

    def data_to_send(self) -> bytes:
        """Acknowledgements of what has been read, and whatever was encoded."""
        for channel, tag in self._read.items():
            self.machine.ack(channel, tag, multiple=True)
        self._read.clear()
        return self.machine.data_to_send()

    def drained(self) -> None:
        """The broker reads again."""

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._session.disconnected(self._why or reason)

    # What the link asks.

    def tick(self, now: float) -> None:
        """Heartbeats, and the time for the handshake."""
        if self._in_time(now):
            if not self.machine.ending:
                self._follow()
            self._stream.mark()

    def shut_down(self) -> None:
        """The gateway is stopping."""
        for one in self._session.logs:
            if one.up:
                one.reader.stop()
        super().shut_down()

    # Events.

    def _opened(self) -> None:
        self._declaring = self.machine.open_channel()

    def _channel_opened(self, number: int) -> None:
        if number == self._declaring:
            direct = self._direct
            self.machine.send_method(number, m.ExchangeDeclare(direct, "direct", durable=True))
            for one in self._session.logs:
                self._undeclared.append(one)
                asked = m.QueueDeclare(one.stream, durable=True, arguments=one.arguments)
                self.machine.send_method(number, asked)
                self.machine.send_method(number, m.QueueBind(one.stream, direct, one.stream))
        elif number in self._following:
            self._unbegun.append(number)
            self._follow()
        elif number in self._publishing:
            self._begin(number, self._publishing[number])

    def _follow(self) -> None:
        """Consume the logs that can be."""
        unbegun, self._unbegun = self._unbegun, []
        for number in unbegun:
            one = self._following[number]
            if not one.may_begin:
                self._unbegun.append(number)
                continue
            begin: Headers = (("x-stream-offset", one.begin()),)
            self.machine.send_method(number, m.BasicQos(prefetch_count=PREFETCH))
            self.machine.send_method(number, m.BasicConsume(one.stream, arguments=begin))

    def _begin(self, number: int, one: SharedLog) -> None:
        publisher = Publisher(self.machine, number)
        wire = amqp_address(self._direct, one.stream).wire

        def write(octets: bytes) -> None:
            if not self._stream.ending:
                publisher.publish_many([(wire, PERSISTENT, octets)])
                self._stream.mark()

        one.connected(write, self._session.came_up)

    def _method(self, event: MethodReceived) -> None:
        method, channel = event.method, event.channel
        if isinstance(method, m.QueueBindOk) and channel == self._declaring:
            one = self._undeclared.popleft()
            self._following[self.machine.open_channel()] = one
        elif isinstance(method, m.BasicConsumeOk):
            self._publishing[self.machine.open_channel()] = self._following[channel]
        elif isinstance(method, m.BasicCancel):
            self._end("the stream of a log is gone")

    def _deliveries(self, contents: Sequence[Delivery]) -> None:
        for number, _, tag, _, _, raw, body in contents:
            one = self._following[number]
            self._read[number] = tag
            try:
                why = one.receive(raw, bytes(body))
            except Exception as error:  # of one record: those behind it are read
                one.passed_over += 1
                contained("message", error, log=one.stream)
            else:
                if why:
                    self._session.reconnect(why)
        self._session.stats.messages_in += len(contents)

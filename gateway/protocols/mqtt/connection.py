"""State machine that both ends of an MQTT connection share: bytes in, events out; calls in, bytes out.

There are few states, and a table of each end says which packet type is legal in which state and which state
follows; a missing row is the protocol error. Nearly all traffic is PUBLISH and its acknowledgements in state
OPEN: `_run` decodes runs of those in one loop with local variables, one plain tuple for each packet, and
stops at anything else. `_one` then decodes a single packet with the full codec, which also finds the error
message for an invalid one. Incomplete packets wait in one growing buffer until they are complete.

Memory and time are bounded for thousands of connections. Empty collections are None, because each
connection's memory has left the caches when its turn comes. A `bounded` connection limits the work of each
call, since 64 KiB may be 32 768 packets: it counts steps of some microseconds (about one small packet), stops
at STEPS_MAX, and is `unread` until the next call. Packets of `_run` cost a tenth of that, so only their rows
are counted, after RUN_BYTES bytes. Events before a corrupt packet are returned; the next call raises the
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from struct import pack
from typing import ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.byte_buffer import ByteBuffer
from gateway.model.spooled_bodies import APART_BYTES_MIN, Body, Piece
from gateway.protocols.mqtt.codec import decode_packet
from gateway.protocols.mqtt.data_types import (
    UNBOUNDED,
    Bounds,
    ByteOrder,
    decode_length,
    encode_varint,
    is_little,
    malformed,
    quota_exceeded,
    violation,
)
from gateway.protocols.mqtt.packets import Ack, Event, Oversized, Packet, Publish
from gateway.protocols.mqtt.properties import NO_PROPERTIES, PropertyMap, alias_among
from gateway.protocols.mqtt.runs import Acks, Publishes, PublishRow
from gateway.protocols.mqtt.spec import (
    FAILURE,
    FIRST_BYTE,
    PIPELINED_BYTES_MAX,
    REASONS,
    VARINT_MAX,
    PacketType,
    Property,
    ReasonCode,
    Version,
)
from gateway.protocols.mqtt.translate import publish_essentials
from gateway.protocols.mqtt.writers import encode


class State(IntEnum):
    """State of a connection.

    CONNECTING: the client has sent CONNECT, and the server has not sent CONNACK. AUTHENTICATING: the same,
    while the two exchange AUTH packets.
    """

    START = 0
    CONNECTING = 1
    AUTHENTICATING = 2
    OPEN = 3
    CLOSED = 4


OPEN: Final = State.OPEN  # a global name costs a quarter of an enum's attribute
PUBLISH: Final = int(PacketType.PUBLISH)  # an integer is faster as an index
PUBACK: Final = int(PacketType.PUBACK)
Table = Mapping[tuple[State, int], State]

ACKS: Final = (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP)
PUBACK_HEAD: Final = bytes((FIRST_BYTE[PacketType.PUBACK], 2))
_ACK_BY_FIRST: Final = {FIRST_BYTE[kind]: kind for kind in ACKS}
_WORDS: Final = tuple(value.to_bytes(2, "big") for value in range(65_536))
_PUBLISH_FIRST: Final = tuple(bytes((PacketType.PUBLISH << 4 | flags,)) for flags in range(16))
_LENGTHS: Final = tuple(encode_varint(size) for size in range(4_096))
_LENGTHS_END: Final = len(_LENGTHS)
FIXED_HEADER_MAX: Final = 5  # 5: 2.1
ALIAS_BYTES: Final = 3  # of the property Topic Alias
PUBLISH_EXTRA_MAX: Final = 5 + 2 + 2 + 4 + 3  # fixed header, lengths of topic and properties, id, alias
STEPS_MAX: Final = 128  # per call: one or two milliseconds, so that no flood delays the other connections
STEP_BYTES: Final = 16  # bytes per further step of a packet that the full codec decodes: about one filter
ROWS_MAX: Final = 1_024  # PUBLISH and acknowledgement rows per call: in all about as expensive as STEPS_MAX
ACK_BYTES: Final = 4  # size of an acknowledgement without reason and properties
RUN_BYTES: Final = 8_192  # bytes after which the rows are counted
ALIAS_TOPICS_BYTES_MAX: Final = 65_536  # of a peer's topics, which are stored as long as its connection
ALIAS_WITHIN: Final = 64  # factor of the maximum number of properties: the alias may be behind them
PUBLISH_PIECES: Final = 6  # pieces of each PUBLISH in `out`: joining all of them once is fastest


def swapped(word: int) -> int:
    """Return a 16-bit integer with its two bytes swapped."""
    return (word & 0xFF) << 8 | word >> 8


class Connection:
    """Base class of ServerConnection and ClientConnection: one end of an MQTT connection.

    `received` and `sent` count packets by type. `out` has the pieces that `data_to_send` joins. `pending` is
    True if `receive_data(b"", now)` would raise a stored error, or decode bytes that have waited for the
    CONNACK. `unread` is True if a call of `receive_data` has done its limited amount of work and bytes
    remain: the caller should call it again.
    """

    __slots__ = (
        "_alias_bytes",
        "_aliases",
        "_body_remaining",
        "_bounds",
        "_buffer",
        "_byte_order",
        "_error",
        "_little",
        "_needed",
        "_oversized",
        "_said_aliases",
        "_steps",
        "_v5",
        "_watched",
        "alias_max",
        "bounded",
        "keep_alive",
        "large",
        "last_received",
        "out",
        "packet_bytes_max",
        "peer_packet_bytes_max",
        "peer_receive_max",
        "pending",
        "received",
        "sent",
        "state",
        "topic_alias_max",
        "unread",
        "version",
        "wants_problems",
    )
    table: ClassVar[Table] = {}
    reading: ClassVar[frozenset[State]] = frozenset()
    serves: ClassVar[bool] = False  # True if the peer is a client

    def __init__(
        self,
        *,
        version: Version,
        packet_bytes_max: int,
        byte_order: ByteOrder,
        topic_alias_max: int,
        bounded: bool,
        bounds: Bounds = UNBOUNDED,
    ) -> None:
        """Create a connection in state START.

        If `bounded` is True, each call of `receive_data` does a limited amount of work and sets `unread` if
        bytes remain.
        """
        self.bounded = bounded
        self.state = State.START
        self._bounds = bounds
        self.packet_bytes_max = packet_bytes_max
        self.topic_alias_max = topic_alias_max
        self.alias_max = 0  # number of aliases that we may assign to topics
        self.peer_packet_bytes_max = VARINT_MAX + 5
        self.peer_receive_max = 65_535
        self.keep_alive = 0
        self.wants_problems = True
        self.last_received = 0.0
        self.received = [0] * 16
        self.sent = [0] * 16
        self.out: list[bytes] | None = None
        self.large = False  # True if `to_send` returns pieces
        self.pending = False
        self.unread = False
        self._steps = 0
        self._byte_order: ByteOrder = byte_order
        self._aliases: dict[int, bytes] = {}
        self._alias_bytes = 0  # of the topics in it
        self._said_aliases: dict[bytes, bytes] = {}
        self._buffer: ByteBuffer | None = None
        self._needed = 0
        self._oversized: Oversized | None = None  # being skipped, with `_body_remaining` bytes to come
        self._body_remaining = 0
        self._watched: int | None = None  # last packet id of a peer whose byte order is still unknown
        self._error: RemoteProtocolError | None = None
        self._set_version(version)

    def _set_version(self, version: Version) -> None:
        """Set the protocol version, and the byte order that follows from it."""
        self.version = version
        self._v5 = version is Version.V5
        self._little = is_little(version, self._byte_order)

    # -- bytes in

    @property
    def has_undecoded(self) -> bool:
        """True if some received bytes are buffered and not decoded yet."""
        return self._buffer is not None

    def _open(self, state: State) -> None:
        """Set the state to `state`, in which packets may be decoded.

        Set `pending` if received bytes wait for this.
        """
        self.state = state
        self.pending = self._buffer is not None

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Decode the bytes `data`, and return their events in order. `now` is in monotonic seconds.

        Raises RemoteProtocolError for a fault of the peer; the connection is then CLOSED and ignores further
        data. If there are events before the fault, they are returned and `pending` is set, and only the next
        call raises the error.
        """
        if self.pending:
            self._raise_late()
        if data:
            self.last_received = now
        events: list[Event] = []
        at = 0
        self._steps = 0
        if self.unread:
            self.unread = False
        if self._oversized is not None:
            data = self._read_past(data, events)
        if self._buffer is not None:
            data = self._joined(self._buffer, data)
            if not data:
                return events
        try:
            at = self._decode_all(data, events)
        except RemoteProtocolError as error:
            self.state = State.CLOSED
            if not events:
                raise
            self._fail_later(error)
        if self._watched is not None:
            self._watch(events)
        for event in events:
            if isinstance(event, Publishes):
                self.received[PUBLISH] += len(event.rows)
            elif isinstance(event, Acks):
                self.received[event.kind] += len(event.rows)
        if at < len(data) and self.state is not State.CLOSED:
            self._store_rest(ByteBuffer(data[at:]))
        return events

    def _decode_all(self, data: bytes, events: list[Event]) -> int:
        """Decode complete packets until the limit of work for one call is reached, and append their events.

        Return the position behind the last decoded packet.
        """
        at = 0
        # Compared by identity: a look-up in the set costs an enum's hash, as much as a small packet.
        while (state := self.state) is OPEN or state in self.reading:
            if state is OPEN and not self._little:
                begin = at
                at = self._run(data, at, events)
                if at == len(data):
                    break
                if self.bounded and self._is_enough(events, at - begin):
                    break
                if at - begin >= RUN_BYTES:
                    continue
                self._steps += (at - begin) >> 6
            stop = self._one(data, at, events)
            if stop == at:
                break
            at = stop
            if self._steps >= STEPS_MAX and self.bounded:
                self.unread = at < len(data)
                break
        return at

    def _raise_late(self) -> None:
        """Clear `pending`, and raise the error that an earlier call has stored, if there is one."""
        self.pending = False
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _joined(self, buffer: ByteBuffer, data: bytes) -> bytes:
        """Append `data` to `buffer`. Return all bytes in it if they can be decoded now, otherwise b""."""
        buffer.add(data)
        if self.state not in self.reading:
            self._hold(buffer)
            return b""
        if buffer.byte_count < self._needed:
            return b""
        self._buffer = None
        return buffer.take_all()

    def _store_rest(self, rest: ByteBuffer) -> None:
        """Store `rest`, the bytes behind the last decoded packet, for the next call of `receive_data`."""
        self._buffer = rest
        if self.unread:
            self._needed = 0
        if self.state not in self.reading:
            self.unread = False
            self._hold(rest)

    def _is_enough(self, events: list[Event], byte_count: int) -> bool:
        """Return True if this call of `receive_data` has done its limited amount of work. Then set `unread`.

        `byte_count` is the size in bytes of the packets that `_run` has just decoded. Called only if more
        bytes remain.
        """
        if byte_count >= RUN_BYTES:
            rows = sum(len(event.rows) for event in events if isinstance(event, Publishes | Acks))
            self.unread = rows >= ROWS_MAX
        self.unread = self.unread or self._steps >= STEPS_MAX
        return self.unread

    @property
    def begun_bytes(self) -> int:
        """Number of bytes of an incomplete packet that have arrived; 0 if there is no such packet."""
        return 0 if self._buffer is None else self._buffer.byte_count

    @property
    def needed_bytes(self) -> int:
        """Number of bytes that the incomplete packet needs to be decoded, as far as known, or 0."""
        return 0 if self._buffer is None else self._needed

    def _hold(self, buffer: ByteBuffer) -> None:
        """Check the number of bytes in `buffer`, which wait until packets may be decoded.

        If they exceed PIPELINED_BYTES_MAX, close the connection and store an error (0x97). If the connection
        is closed, discard them.
        """
        self._needed = 0
        if self.state is State.CLOSED:
            self._buffer = None
        elif buffer.byte_count > PIPELINED_BYTES_MAX:
            self.state = State.CLOSED
            text = "too many bytes before the CONNACK"
            self._fail_later(RemoteProtocolError(text, reason=ReasonCode.QUOTA_EXCEEDED))

    def _fail_later(self, error: RemoteProtocolError) -> None:
        """Store an error that the next call of `receive_data` raises."""
        self._error = error
        self.pending = True

    def _run(self, data: bytes, at: int, events: list[Event]) -> int:
        """Decode consecutive PUBLISH and successful acknowledgements from `at` on, and append events.

        Return the position of the first packet that is of another kind or incomplete. Decoding stops after
        about RUN_BYTES bytes.
        """
        most = len(data) - 3
        if most - at > RUN_BYTES:
            most = at + RUN_BYTES
        while at < most:
            first = data[at]
            if 0x30 <= first < 0x3E:
                stop = self._publish_run(data, at, most, events)
            elif first in _ACK_BY_FIRST:
                stop = self._ack_run(data, at, most, events)
            else:
                break
            if stop == at:
                break
            at = stop
            if self._steps >= STEPS_MAX and self.bounded:
                break
        return at

    def _publish_run(self, data: bytes, at: int, most: int, events: list[Event]) -> int:  # noqa: C901, PLR0912 - every packet
        """Decode consecutive PUBLISH packets from position `at` on that begin before `most`.

        Append their event, and return the position behind the last one. Stop early when the work for their
        properties has reached the limit for one call.
        """
        end = len(data)
        limit = self.packet_bytes_max
        v5 = self._v5
        publishes: list[PublishRow] | None = None
        while at < most:
            first = data[at]
            if not 0x30 <= first < 0x3E:
                break
            size = data[at + 1]
            start = at + 2
            if size > 127:
                if (high := data[start]) < 128:
                    size += (high << 7) - 128
                    start += 1
                elif (found := decode_length(data, at + 1)) is None:
                    break
                else:
                    size, start = found
            stop = start + size
            if stop > end or size < 3 or stop - at > limit:
                break
            topic_at = start + 2
            body_at = topic_end = topic_at + (data[start] << 8 | data[start + 1])
            packet_id = 0
            if first > 0x31:
                body_at += 2
                qos = first & 6
                if body_at > stop or qos == 6 or not qos:
                    break
                packet_id = data[topic_end] << 8 | data[topic_end + 1]
                if not packet_id:
                    break
            topic = data[topic_at:topic_end]
            properties = b""
            if v5:
                if body_at >= stop:
                    break
                if data[body_at]:
                    topic, properties, body_at = self._read_properties(data, topic, body_at, stop)
                    if self._steps >= STEPS_MAX and self.bounded:
                        most = at  # ends the loop after this packet
                else:
                    body_at += 1
            if body_at > stop or not topic:
                break
            if publishes is None:
                publishes = self._publishes(events).rows
            publishes.append((first & 15, topic, packet_id, properties, data[body_at:stop]))
            at = stop
        return at

    def _ack_run(self, data: bytes, at: int, most: int, events: list[Event]) -> int:
        """Decode consecutive four-byte acknowledgements of one type, from `at` on, that begin before `most`.

        Append their event, and return the position behind the last one.
        """
        first = data[at]
        rows: list[tuple[int, int]] | None = None
        while at < most and data[at] == first and data[at + 1] == 2 and self.packet_bytes_max >= ACK_BYTES:
            packet_id = data[at + 2] << 8 | data[at + 3]
            if not packet_id:
                break
            if rows is None:
                rows = self._acks(events, _ACK_BY_FIRST[first]).rows
            rows.append((packet_id, 0))
            at += ACK_BYTES
        return at

    def _publishes(self, events: list[Event]) -> Publishes:
        """Return the event to which the next decoded PUBLISH packets are added.

        It is the last one in `events` if that is a Publishes event. Otherwise a new one is appended.
        """
        if events and isinstance(last := events[-1], Publishes):
            return last
        event = Publishes([])
        events.append(event)
        return event

    def _acks(self, events: list[Event], kind: PacketType) -> Acks:
        """Return the event to which the next decoded acknowledgements of the type `kind` are added.

        It is the last one in `events` if that is an Acks event of this type. Otherwise a new one is appended.
        """
        if events and isinstance(last := events[-1], Acks) and last.kind is kind:
            return last
        event = Acks(kind, [])
        events.append(event)
        return event

    def _read_properties(self, data: bytes, topic: bytes, at: int, stop: int) -> tuple[bytes, bytes, int]:
        """Decode the property list at `at` in a PUBLISH that ends at `stop`, and resolve its topic alias.

        `topic` is the topic in the packet, b"" with an alias. Return the topic, the encoded properties
        without the alias, and the position of the body. Raises RemoteProtocolError.
        """
        size = data[at]
        start = at + 1
        if size > 127:
            if start < stop and (high := data[start]) < 128:
                size += (high << 7) - 128
                start += 1
            elif (found := decode_length(data, at)) is None:
                raise malformed("a PUBLISH ends inside its property length")
            else:
                size, start = found
        body_at = start + size
        if body_at > stop:
            raise malformed("a PUBLISH ends inside its properties")
        self._steps += size >> 8
        try:
            if size > self._bounds.properties_bytes_max:
                raise quota_exceeded(f"{size} bytes of properties")
            listed = publish_essentials(data[start:body_at], self._bounds.properties_max)
            alias, properties, identified = listed.alias, listed.bare, listed.identified
            self._steps += 1 + (listed.total >> 3)
        except RemoteProtocolError as error:
            if self.serves or error.reason != ReasonCode.QUOTA_EXCEEDED:
                raise
            # From a broker, which has no way to be informed: the receiver refuses this message alone.
            properties, identified = data[start:body_at], False
            alias = alias_among(properties, ALIAS_WITHIN * self._bounds.properties_max)
        if identified and self.serves:
            raise violation("a client must not send a subscription identifier")
        if alias:
            if alias > self.topic_alias_max:
                raise RemoteProtocolError(f"topic alias {alias}", reason=ReasonCode.TOPIC_ALIAS_INVALID)
            if topic:
                self._alias(alias, topic)
            else:
                aliased_topic = self._aliases.get(alias)
                if aliased_topic is None:
                    raise violation(f"topic alias {alias} is not defined")
                topic = aliased_topic
        return topic, properties, body_at

    def _alias(self, alias: int, topic: bytes) -> None:
        """Store that the topic alias `alias` stands for `topic` from now on.

        Raises RemoteProtocolError if the topics of all aliases have too many bytes.
        """
        self._alias_bytes += len(topic) - len(self._aliases.get(alias, b""))
        if self._alias_bytes > ALIAS_TOPICS_BYTES_MAX:
            raise quota_exceeded(f"topic aliases for more than {ALIAS_TOPICS_BYTES_MAX} bytes of topics")
        self._aliases[alias] = topic

    def _may_answer_oversized(self, data: bytes, start: int) -> bool:
        """Return True if an oversized packet can be refused now, False if more of its bytes are needed first.

        `start` is the position behind the packet's fixed header in `data`.
        """
        return True

    def _one(self, data: bytes, at: int, events: list[Event]) -> int:
        """Decode one packet of any type at `at`, and append its event.

        Return the position behind the packet, or `at` if the packet is incomplete.
        """
        end = len(data)
        self._needed = end - at + 1
        if at == end:
            return at
        kind = data[at] >> 4
        after = self.table.get((self.state, kind))
        if after is None:
            raise violation(f"packet type {kind} is not allowed in state {self.state.name}")
        found = decode_length(data, at + 1)
        if found is None:
            return at
        size, start = found
        stop = start + size
        limit = self._limit(kind)
        if stop - at > limit:
            if kind == PUBLISH and self.serves and self.state is OPEN and not self._v5:
                return self._begin_oversized(data, at, start, stop, events)
            if not self._may_answer_oversized(data, start):
                return at
            raise RemoteProtocolError(
                f"a packet of {stop - at} bytes, over {limit}", reason=ReasonCode.PACKET_TOO_LARGE
            )
        if stop > end:
            self._needed = stop - at
            return at
        self._steps += 1 + size // STEP_BYTES
        packet = self._decode(data[at], data[start:stop])
        self.state = after
        if isinstance(packet, Ack):
            if self.serves and packet.reason not in REASONS[packet.kind]:
                raise violation(f"{packet.kind.name} must not carry reason {packet.reason:#04x}")
            self._acks(events, packet.kind).rows.append((packet.packet_id, packet.reason))
        elif isinstance(packet, Publish):
            # Reached only before MQTT 5: a PUBLISH of MQTT 5 that `_run` leaves is corrupt.
            row = (data[at] & 15, packet.topic.encode(), packet.packet_id, b"", packet.body)
            self._publishes(events).rows.append(row)
        else:
            self.received[kind] += 1
            self._take(packet)
            events.append(packet)
        return stop

    def _begin_oversized(self, data: bytes, at: int, start: int, stop: int, events: list[Event]) -> int:
        """Begin to skip an oversized PUBLISH from a client of MQTT 3.x.

        The packet is at `at`, its topic at `start`, and it ends at `stop`. Return the position behind the
        bytes that were processed. The client cannot be informed of the limit: if the connection were closed,
        it would resend the message after each reconnect. The header is decoded to identify the message.
        """
        topic_end = start + 2 + int.from_bytes(data[start : start + 2], "big")
        body_at = min(topic_end + (2 if data[at] & 6 else 0), stop)
        if len(data) < max(body_at, start + 2):
            self._needed = max(body_at, start + 2) - at
            return at
        publish = self._decode(data[at], data[start:body_at])
        assert isinstance(publish, Publish)
        self._oversized = Oversized(publish, stop - body_at)
        self._body_remaining = stop - body_at
        return len(data) - len(self._read_past(data[body_at:], events))

    def _read_past(self, data: bytes, events: list[Event]) -> bytes:
        """Skip the next bytes of the oversized packet, and return the bytes in `data` behind it.

        When the whole packet has been skipped, append its event.
        """
        assert self._oversized is not None
        rest = data[self._body_remaining :]
        self._body_remaining -= len(data) - len(rest)
        if not self._body_remaining:
            self.received[PUBLISH] += 1
            events.append(self._oversized)
            self._oversized = None
        return rest

    def _decode(self, first: int, body: bytes) -> Packet:
        return decode_packet(first, body, self.version, self._byte_order, self._bounds)

    def _limit(self, kind: int) -> int:
        """Return the maximum size in bytes of a packet of the type `kind` in the present state."""
        return self.packet_bytes_max

    def _take(self, packet: Packet) -> None:
        """Process a received packet. The change of state that it causes is in the state table, not here."""

    def _watch(self, events: list[Event]) -> None:
        """Detect the peer's byte order from the packets in `events`. This is only done by a server."""

    def timed_out(self, now: float) -> bool:
        """Return True if the peer has been silent for one and a half times the keep-alive (5: 3.1.2.10).

        `now` is in monotonic seconds.
        """
        return now >= self.deadline()

    def deadline(self) -> float:
        """Return the time at which the keep-alive expires, in monotonic seconds; infinity if it is off."""
        return self.last_received + 1.5 * self.keep_alive if self.keep_alive else float("inf")

    # -- bytes out

    def data_to_send(self) -> bytes:
        """Remove and return the queued bytes."""
        out = self.out
        if out is None:
            return b""
        self.out = None
        self.large = False
        return out[0] if len(out) == 1 else b"".join(out)

    def to_send(self) -> bytes | list[Piece]:
        """Remove and return the queued bytes; as a list of pieces if one of them is large.

        A large body is not copied, however many connections send it.
        """
        if not self.large or self.out is None:
            return self.data_to_send()
        pieces: list[Piece] = [*self.out]
        self.out = None
        self.large = False
        return pieces

    def send(self, packet: Packet) -> bool:
        """Queue `packet`. Return False, and queue nothing, if it exceeds the peer's maximum packet size."""
        data = encode(packet, self.version, self._byte_order)
        if len(data) > self.peer_packet_bytes_max:
            return False
        self._queue_output(data)
        self.sent[packet.kind] += 1
        return True

    def _queue_output(self, data: bytes) -> None:
        if self.out is None:
            self.out = [data]
        else:
            self.out.append(data)

    def _require(self, *states: State) -> None:
        """Raise LocalProtocolError unless the connection is in one of these states."""
        if self.state not in states:
            raise LocalProtocolError(f"the packet is not allowed in state {self.state.name}")

    def publish(
        self,
        topic: bytes,
        body: Body,
        qos: int = 0,
        retain: bool = False,
        dup: bool = False,
        packet_id: int = 0,
        properties: bytes = b"",
    ) -> bool:
        """Queue one PUBLISH.

        Return False, and queue nothing, if it exceeds the peer's maximum packet size.
        """
        return not self.publish_many(((dup << 3 | qos << 1 | retain, topic, packet_id, properties, body),))

    def publish_many(self, rows: Iterable[PublishRow]) -> Sequence[int]:
        """Queue PUBLISH packets. Before MQTT 5 the properties in `rows` are omitted.

        Return the positions of the rows that exceed the peer's maximum packet size (5: 3.1.2.11.4) and were
        not queued.
        """
        if self.state is not OPEN:
            self._require(OPEN)
        limit = self.peer_packet_bytes_max
        safe = limit - FIXED_HEADER_MAX
        common = min(safe, APART_BYTES_MIN)
        v5 = self._v5
        little = self._little
        words, lengths, firsts, table_end = _WORDS, _LENGTHS, _PUBLISH_FIRST, _LENGTHS_END
        out = self.out
        if out is None:
            out = self.out = []
        before = len(out)
        refused: list[int] = []
        for flags, topic, packet_id, properties, body in rows:
            if flags & 6:
                if not packet_id:
                    raise LocalProtocolError("a PUBLISH with QoS needs a packet identifier")
                middle = words[swapped(packet_id) if little else packet_id]
            else:
                middle = b""
            if v5:
                size = len(properties)
                middle += (lengths[size] if size < table_end else encode_varint(size)) + properties
            size = len(topic) + 2 + len(middle) + len(body)
            length = lengths[size] if size < table_end else encode_varint(size)
            if size > common:
                if size > safe and size + 1 + len(length) > limit:
                    refused.append((len(out) - before) // PUBLISH_PIECES + len(refused))
                    continue
                self.large |= len(body) >= APART_BYTES_MIN
            out += (firsts[flags], length, words[len(topic)], topic, middle, body)
        self.sent[PUBLISH] += (len(out) - before) // PUBLISH_PIECES
        return refused

    def _set_alias_max(self, properties: PropertyMap) -> None:
        """Set `alias_max`, the number of topic aliases that this end may send.

        It is the smaller one of two limits: that of this end, and that in `properties` of the peer's CONNECT
        or CONNACK.
        """
        self.alias_max = min(properties.get(Property.TOPIC_ALIAS_MAXIMUM, 0), self.topic_alias_max)

    def aliased(self, rows: Sequence[PublishRow]) -> list[PublishRow]:
        """Return `rows` with topics replaced by topic aliases where possible (5: 3.3.2.3.4).

        The first `alias_max` different topics get an alias, except a topic that has at most as many bytes as
        the alias. A new alias is introduced only in a PUBLISH that certainly does not exceed the peer's
        maximum packet size.
        """
        aliases = self._said_aliases
        safe = self.peer_packet_bytes_max - PUBLISH_EXTRA_MAX
        aliased_rows: list[PublishRow] = []
        for flags, topic, packet_id, properties, body in rows:
            alias = aliases.get(topic)
            if alias is not None:
                aliased_rows.append((flags, b"", packet_id, properties + alias, body))
                continue
            is_longer = len(topic) > ALIAS_BYTES
            if (
                is_longer
                and len(aliases) < self.alias_max
                and len(topic) + len(properties) + len(body) <= safe
            ):
                number = len(aliases) + 1
                alias = aliases[topic] = bytes((Property.TOPIC_ALIAS, number >> 8, number & 0xFF))
                properties += alias
            aliased_rows.append((flags, topic, packet_id, properties, body))
        return aliased_rows

    def acknowledge(self, kind: PacketType, ids: Sequence[int]) -> None:
        """Queue successful acknowledgements of the type `kind`, one for each packet id in `ids`."""
        if self.state is not OPEN:
            self._require(OPEN)
        count = len(ids)
        if self._little:
            ids = [swapped(packet_id) for packet_id in ids]
        base = FIRST_BYTE[kind] << 24 | 2 << 16
        self._queue_output(pack(f">{count}I", *[base | packet_id for packet_id in ids]))
        self.sent[kind] += count

    def puback(self, packet_id: int) -> bytes:
        """Return an encoded PUBACK, which the caller sends without a queue. `out` must be None.

        For many devices that send one message each, this is faster than `acknowledge`.
        """
        if self.state is not OPEN:
            self._require(OPEN)
        self.sent[PUBACK] += 1
        return PUBACK_HEAD + _WORDS[swapped(packet_id) if self._little else packet_id]

    def send_ack(self, kind: PacketType, packet_id: int, reason: int = 0, text: str = "") -> None:
        """Queue one acknowledgement; `text` becomes its reason string if the peer accepts that (MQTT 5).

        Raises LocalProtocolError for a failure code before MQTT 5, where an acknowledgement has no reason
        code.
        """
        self._require(State.OPEN)
        if not self._v5 and reason >= FAILURE:
            raise LocalProtocolError(f"{self.version.name} has no acknowledgement that refuses")
        if not self.send(Ack(kind, packet_id, reason, self._problem(text))):
            self.send(Ack(kind, packet_id, reason))  # without the text it may fit (5: 3.4.2.2.2)

    def _problem(self, text: str) -> PropertyMap:
        return {Property.REASON_STRING: text} if text and self.wants_problems else NO_PROPERTIES

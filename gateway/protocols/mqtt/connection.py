"""What the two ends of an MQTT connection share: octets in, events out; calls in, octets out.

The states are few and a table of each end says which packet type is legal in which, and where it leads; a
missing row *is* the error. Nearly all traffic is PUBLISH and its acknowledgements in state OPEN: `_run`
decodes runs of those in one loop with local variables, one plain tuple per packet, and stops at whatever it
does not understand; `_one` then takes a single packet through the full codec, which also finds the words for
what is wrong. Octets that wait for their rest are kept in one growing buffer, taken when the packet is whole.
Of a thousand connections each has its turn when its memory has left the caches: so what is empty is None.

Who is `bounded` does only so much at each call, for 64 KiB may be 32 768 packets: it counts steps, each of
which costs about what a small packet does (some microseconds), stops at STEPS_MAX, and is `unread` until it
is called again. What `_run` takes costs a tenth: there rows are counted, and only after some thousand octets.

Events that precede a corrupt packet are not lost: they are returned, and the next call raises the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from struct import pack
from typing import ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.gathered import Gathered
from gateway.model.spooled import APART_OCTETS_MIN, Body, Piece
from gateway.protocols.mqtt.codec import decode_packet
from gateway.protocols.mqtt.octets import (
    UNBOUNDED,
    Bounds,
    ByteOrder,
    decode_length,
    encode_varint,
    is_little,
    malformed,
    too_much,
    violation,
)
from gateway.protocols.mqtt.packets import Ack, Acks, Event, Oversized, Packet, Publish, Publishes, PublishRow
from gateway.protocols.mqtt.properties import NO_PROPERTIES, PropertyMap, alias_among
from gateway.protocols.mqtt.spec import (
    FAILURE,
    FIRST_OCTET,
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
    """CONNECTING: CONNECT was said, CONNACK not. AUTHENTICATING: the same, and AUTH goes to and fro."""

    START = 0
    CONNECTING = 1
    AUTHENTICATING = 2
    OPEN = 3
    CLOSED = 4


OPEN: Final = State.OPEN  # a global name costs a quarter of an enum's attribute
PUBLISH: Final = int(PacketType.PUBLISH)  # and as an index an integer is faster
PUBACK: Final = int(PacketType.PUBACK)
Table = Mapping[tuple[State, int], State]

ACKS: Final = (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP)
PUBACK_HEAD: Final = bytes((FIRST_OCTET[PacketType.PUBACK], 2))
_ACK_BY_FIRST: Final = {FIRST_OCTET[kind]: kind for kind in ACKS}
_WORDS: Final = tuple(value.to_bytes(2, "big") for value in range(65_536))
_PUBLISH_FIRST: Final = tuple(bytes((PacketType.PUBLISH << 4 | flags,)) for flags in range(16))
_LENGTHS: Final = tuple(encode_varint(size) for size in range(4_096))
_LENGTHS_END: Final = len(_LENGTHS)
FIXED_HEADER_MAX: Final = 5  # 5: 2.1
PUBLISH_EXTRA_MAX: Final = 5 + 2 + 2 + 4 + 3  # fixed header, lengths of topic and properties, id, alias
STEPS_MAX: Final = 128  # of a server at each call: a millisecond or two, so that no flood holds up the others
STEP_OCTETS: Final = 16  # of a packet that is decoded whole, beside the step for itself: as of one filter
ROWS_MAX: Final = 1_024  # of runs: what they cost here and behind, together about the same
ACK_OCTETS: Final = 4  # of an acknowledgement without reason and properties
RUN_OCTETS: Final = 8_192  # after which the rows are counted
ALIAS_WITHIN: Final = 64  # times the properties that are taken: it may stand behind them
PUBLISH_PIECES: Final = 6  # of each PUBLISH in `out`: joined once, all together, they cost least


def swapped(word: int) -> int:
    """A word of 16 bits in the other byte order."""
    return (word & 0xFF) << 8 | word >> 8


class Connection:
    """One end of a connection. Subclasses bring the table and what is special about their end.

    `received` and `sent` count packets by type. `out` holds what `data_to_send` will join. `pending`:
    `receive_data(b"", now)` would tell more: an error, or octets that waited for a CONNACK. `unread`: the
    same, but this call has done enough, and the next should be in another turn.
    """

    __slots__ = (
        "_aliases",
        "_bounds",
        "_buffer",
        "_byte_order",
        "_error",
        "_left",
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
    serves: ClassVar[bool] = False  # the peer is a client

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
        """`bounded`: each call does a limited number of steps, and what is behind is `unread`."""
        self.bounded = bounded
        self.state = State.START
        self._bounds = bounds
        self.packet_bytes_max = packet_bytes_max
        self.topic_alias_max = topic_alias_max
        self.alias_max = 0  # of those that we give to topics
        self.peer_packet_bytes_max = VARINT_MAX + 5
        self.peer_receive_max = 65_535
        self.keep_alive = 0
        self.wants_problems = True
        self.last_received = 0.0
        self.received = [0] * 16
        self.sent = [0] * 16
        self.out: list[bytes] | None = None
        self.large = False  # `to_send` gives pieces
        self.pending = False
        self.unread = False
        self._steps = 0
        self._byte_order: ByteOrder = byte_order
        self._aliases: dict[int, bytes] = {}
        self._said_aliases: dict[bytes, bytes] = {}
        self._buffer: Gathered | None = None
        self._needed = 0
        self._oversized: Oversized | None = None  # what is read past now, and so much is still to come
        self._left = 0
        self._watched: int | None = None  # the last packet id of a peer whose byte order is not known yet
        self._error: RemoteProtocolError | None = None
        self._speak(version)

    def _speak(self, version: Version) -> None:
        self.version = version
        self._v5 = version is Version.V5
        self._little = is_little(version, self._byte_order)

    # -- octets in

    @property
    def held(self) -> bool:
        """Something has come that is not decoded yet."""
        return self._buffer is not None

    def _open(self, state: State) -> None:
        """Reading begins, or goes on: what was held back is to be asked for."""
        self.state = state
        self.pending = self._buffer is not None

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """The events that `data` completes, in order of arrival; `now` is in monotonic seconds.

        Raises RemoteProtocolError, after which the connection is CLOSED and ignores what comes.
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
            self._keep(Gathered(data[at:]))
        return events

    def _decode_all(self, data: bytes, events: list[Event]) -> int:
        """Decode what is whole, as much as one call should; returns the position behind it."""
        at = 0
        # Compared by identity: to ask the set costs an enum's hash, as much as a small packet.
        while (state := self.state) is OPEN or state in self.reading:
            if state is OPEN and not self._little:
                begin = at
                at = self._run(data, at, events)
                if at == len(data):
                    break
                if self.bounded and self._is_enough(events, at - begin):
                    break
                if at - begin >= RUN_OCTETS:
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
        """What was wrong behind the events of the last call."""
        self.pending = False
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _joined(self, buffer: Gathered, data: bytes) -> bytes:
        """What has gathered, with `data`, if it can be decoded now; nothing if it goes on gathering."""
        buffer.add(data)
        if self.state not in self.reading:
            self._hold(buffer)
            return b""
        if buffer.octets < self._needed:
            return b""
        self._buffer = None
        return buffer.joined()

    def _keep(self, rest: Gathered) -> None:
        """The octets behind what was decoded wait for more, or for the next call."""
        self._buffer = rest
        if self.unread:
            self._needed = 0
        if self.state not in self.reading:
            self.unread = False
            self._hold(rest)

    def _is_enough(self, events: list[Event], octets: int) -> bool:
        """Runs, the last one of so many octets, have brought as much as one call should; there is more."""
        if octets >= RUN_OCTETS:
            rows = sum(len(event.rows) for event in events if isinstance(event, Publishes | Acks))
            self.unread = rows >= ROWS_MAX
        self.unread = self.unread or self._steps >= STEPS_MAX
        return self.unread

    @property
    def begun(self) -> int:
        """Octets of a packet that has not come whole."""
        return 0 if self._buffer is None else self._buffer.octets

    @property
    def due(self) -> int:
        """Octets of that packet as far as they are known; 0: none has begun."""
        return 0 if self._buffer is None else self._needed

    def _hold(self, buffer: Gathered) -> None:
        """Nothing is decoded now; what a peer may pipeline meanwhile is limited."""
        self._needed = 0
        if self.state is State.CLOSED:
            self._buffer = None
        elif buffer.octets > PIPELINED_BYTES_MAX:
            self.state = State.CLOSED
            text = "too much was sent before the CONNACK"
            self._fail_later(RemoteProtocolError(text, reason=ReasonCode.QUOTA_EXCEEDED))

    def _fail_later(self, error: RemoteProtocolError) -> None:
        """The next call raises it."""
        self._error = error
        self.pending = True

    def _run(self, data: bytes, at: int, events: list[Event]) -> int:
        """Decode PUBLISH and plain acknowledgements from `at`; returns where something else begins."""
        most = len(data) - 3
        if most - at > RUN_OCTETS:
            most = at + RUN_OCTETS
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
        """Decode PUBLISH packets from `at` on that begin before `most`; returns the end of the last. It ends
        early when their properties took as long as one call should."""
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
                    topic, properties, body_at = self._described(data, topic, body_at, stop)
                    if self._steps >= STEPS_MAX and self.bounded:
                        most = at  # this is the last one
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
        """Decode acknowledgements of one type from `at` to before `most`, as far as they are of four octets;
        returns the end of the last."""
        first = data[at]
        rows: list[tuple[int, int]] | None = None
        while at < most and data[at] == first and data[at + 1] == 2 and self.packet_bytes_max >= ACK_OCTETS:
            packet_id = data[at + 2] << 8 | data[at + 3]
            if not packet_id:
                break
            if rows is None:
                rows = self._acks(events, _ACK_BY_FIRST[first]).rows
            rows.append((packet_id, 0))
            at += ACK_OCTETS
        return at

    def _publishes(self, events: list[Event]) -> Publishes:
        """The event of the run that goes on, or a new one."""
        if events and isinstance(last := events[-1], Publishes):
            return last
        event = Publishes([])
        events.append(event)
        return event

    def _acks(self, events: list[Event], kind: PacketType) -> Acks:
        if events and isinstance(last := events[-1], Acks) and last.kind is kind:
            return last
        event = Acks(kind, [])
        events.append(event)
        return event

    def _described(self, data: bytes, topic: bytes, at: int, stop: int) -> tuple[bytes, bytes, int]:
        """The topic, the properties without alias, and where the body starts."""
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
                raise too_much(f"{size} octets of properties")
            listed = publish_essentials(data[start:body_at], self._bounds.properties_max)
            alias, properties, identified = listed.alias, listed.bare, listed.identified
            self._steps += 1 + (listed.total >> 3)
        except RemoteProtocolError as error:
            if self.serves or error.reason != ReasonCode.QUOTA_EXCEEDED:
                raise
            # Of a broker, which could not be told: whoever takes the message refuses it alone.
            properties, identified = data[start:body_at], False
            alias = alias_among(properties, ALIAS_WITHIN * self._bounds.properties_max)
        if identified and self.serves:
            raise violation("only a server says which subscription a message matches")
        if alias:
            if alias > self.topic_alias_max:
                raise RemoteProtocolError(f"topic alias {alias}", reason=ReasonCode.TOPIC_ALIAS_INVALID)
            if topic:
                self._aliases[alias] = topic
            else:
                known = self._aliases.get(alias)
                if known is None:
                    raise violation(f"topic alias {alias} stands for nothing yet")
                topic = known
        return topic, properties, body_at

    def _may_answer_oversized(self, data: bytes, start: int) -> bool:
        """Return False if more of a packet that is too large is needed to answer it; `start` is behind its
        fixed header."""
        return True

    def _one(self, data: bytes, at: int, events: list[Event]) -> int:
        """Decode the packet at `at`, whatever it is; returns its end, or `at` when it is not yet whole."""
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
                f"a packet of {stop - at} octets, over {limit}", reason=ReasonCode.PACKET_TOO_LARGE
            )
        if stop > end:
            self._needed = stop - at
            return at
        self._steps += 1 + size // STEP_OCTETS
        packet = self._decode(data[at], data[start:stop])
        self.state = after
        if isinstance(packet, Ack):
            if self.serves and packet.reason not in REASONS[packet.kind]:
                raise violation(f"{packet.kind.name} must not carry reason {packet.reason:#04x}")
            self._acks(events, packet.kind).rows.append((packet.packet_id, packet.reason))
        elif isinstance(packet, Publish):
            # Here only before MQTT 5: what `_run` leaves over of MQTT 5 is corrupt.
            row = (data[at] & 15, packet.topic.encode(), packet.packet_id, b"", packet.body)
            self._publishes(events).rows.append(row)
        else:
            self.received[kind] += 1
            self._take(packet)
            events.append(packet)
        return stop

    def _begin_oversized(self, data: bytes, at: int, start: int, stop: int, events: list[Event]) -> int:
        """A client of MQTT 3.x sends more than we take, of which it cannot know, and would send it again for
        ever if the connection ended: what says which message it is is decoded, the rest is read past.
        """
        topic_end = start + 2 + int.from_bytes(data[start : start + 2], "big")
        body_at = min(topic_end + (2 if data[at] & 6 else 0), stop)
        if len(data) < max(body_at, start + 2):
            self._needed = max(body_at, start + 2) - at
            return at
        publish = self._decode(data[at], data[start:body_at])
        assert isinstance(publish, Publish)
        self._oversized = Oversized(publish, stop - body_at)
        self._left = stop - body_at
        return len(data) - len(self._read_past(data[body_at:], events))

    def _read_past(self, data: bytes, events: list[Event]) -> bytes:
        """What of `data` comes behind the oversized packet, which is an event when it has come whole."""
        assert self._oversized is not None
        rest = data[self._left :]
        self._left -= len(data) - len(rest)
        if not self._left:
            self.received[PUBLISH] += 1
            events.append(self._oversized)
            self._oversized = None
        return rest

    def _decode(self, first: int, body: bytes) -> Packet:
        return decode_packet(first, body, self.version, self._byte_order, self._bounds)

    def _limit(self, kind: int) -> int:
        """The octets that a packet of this type may have in this state."""
        return self.packet_bytes_max

    def _take(self, packet: Packet) -> None:
        """What a packet changes at this end, besides the state that the table gives."""

    def _watch(self, events: list[Event]) -> None:
        """Find out the peer's byte order by what it sends."""

    def timed_out(self, now: float) -> bool:
        """Whether the peer has been silent for one and a half times the keep-alive (5: 3.1.2.10)."""
        return now >= self.deadline()

    def deadline(self) -> float:
        """When the peer's silence ends the connection; infinity when keep-alive is off."""
        return self.last_received + 1.5 * self.keep_alive if self.keep_alive else float("inf")

    # -- octets out

    def data_to_send(self) -> bytes:
        """All that was said since the last call."""
        out = self.out
        if out is None:
            return b""
        self.out = None
        self.large = False
        return out[0] if len(out) == 1 else b"".join(out)

    def to_send(self) -> bytes | list[Piece]:
        """The same, in pieces if some of it is large: none of that is copied, however many hear of it."""
        if not self.large or self.out is None:
            return self.data_to_send()
        pieces: list[Piece] = [*self.out]
        self.out = None
        self.large = False
        return pieces

    def send(self, packet: Packet) -> bool:
        """Say `packet`; False when it is larger than the peer takes, and then nothing was said."""
        octets = encode(packet, self.version, self._byte_order)
        if len(octets) > self.peer_packet_bytes_max:
            return False
        self._say(octets)
        self.sent[packet.kind] += 1
        return True

    def _say(self, octets: bytes) -> None:
        if self.out is None:
            self.out = [octets]
        else:
            self.out.append(octets)

    def _require(self, *states: State) -> None:
        if self.state not in states:
            raise LocalProtocolError(f"this must not be said in state {self.state.name}")

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
        """Say one PUBLISH; False when it is larger than the peer takes, and then nothing was said."""
        return not self.publish_many(((dup << 3 | qos << 1 | retain, topic, packet_id, properties, body),))

    def publish_many(self, rows: Iterable[PublishRow]) -> Sequence[int]:
        """Say a run of PUBLISH; properties are left out before MQTT 5.

        Returns the positions of those that are larger than the peer takes (5: 3.1.2.11.4) and were not said.
        """
        if self.state is not OPEN:
            self._require(OPEN)
        limit = self.peer_packet_bytes_max
        safe = limit - FIXED_HEADER_MAX
        common = min(safe, APART_OCTETS_MIN)
        v5 = self._v5
        little = self._little
        words, lengths, firsts, known = _WORDS, _LENGTHS, _PUBLISH_FIRST, _LENGTHS_END
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
                middle += (lengths[size] if size < known else encode_varint(size)) + properties
            size = len(topic) + 2 + len(middle) + len(body)
            length = lengths[size] if size < known else encode_varint(size)
            if size > common:
                if size > safe and size + 1 + len(length) > limit:
                    refused.append((len(out) - before) // PUBLISH_PIECES + len(refused))
                    continue
                self.large |= len(body) >= APART_OCTETS_MIN
            out += (firsts[flags], length, words[len(topic)], topic, middle, body)
        self.sent[PUBLISH] += (len(out) - before) // PUBLISH_PIECES
        return refused

    def _may_alias(self, properties: PropertyMap) -> None:
        """Take as many aliases as the peer's CONNECT or CONNACK allows, and we ourselves."""
        self.alias_max = min(properties.get(Property.TOPIC_ALIAS_MAXIMUM, 0), self.topic_alias_max)

    def aliased(self, rows: Sequence[PublishRow]) -> list[PublishRow]:
        """The rows with aliases for the first `alias_max` topics that are said (5: 3.3.2.3.4).

        An alias is introduced only by a PUBLISH that is surely not too large for the peer.
        """
        known = self._said_aliases
        safe = self.peer_packet_bytes_max - PUBLISH_EXTRA_MAX
        given: list[PublishRow] = []
        for flags, topic, packet_id, properties, body in rows:
            alias = known.get(topic)
            if alias is not None:
                given.append((flags, b"", packet_id, properties + alias, body))
                continue
            if len(known) < self.alias_max and len(topic) + len(properties) + len(body) <= safe:
                number = len(known) + 1
                alias = known[topic] = bytes((Property.TOPIC_ALIAS, number >> 8, number & 0xFF))
                properties += alias
            given.append((flags, topic, packet_id, properties, body))
        return given

    def acknowledge(self, kind: PacketType, ids: Sequence[int]) -> None:
        """Say a run of acknowledgements of one type, all of them successes."""
        if self.state is not OPEN:
            self._require(OPEN)
        count = len(ids)
        if self._little:
            ids = [swapped(packet_id) for packet_id in ids]
        base = FIRST_OCTET[kind] << 24 | 2 << 16
        self._say(pack(f">{count}I", *[base | packet_id for packet_id in ids]))
        self.sent[kind] += count

    def puback(self, packet_id: int) -> bytes:
        """`acknowledge` and `data_to_send` in one, while nothing else is to be said (`out` is None): a
        thousand devices with one message each are slower than one with a thousand.
        """
        if self.state is not OPEN:
            self._require(OPEN)
        self.sent[PUBACK] += 1
        return PUBACK_HEAD + _WORDS[swapped(packet_id) if self._little else packet_id]

    def send_ack(self, kind: PacketType, packet_id: int, reason: int = 0, text: str = "") -> None:
        """Say one acknowledgement, with a text for people where the peer wants it (MQTT 5).

        Before MQTT 5 an acknowledgement can only mean yes: a refusal is LocalProtocolError there.
        """
        self._require(State.OPEN)
        if not self._v5 and reason >= FAILURE:
            raise LocalProtocolError(f"{self.version.name} has no acknowledgement that refuses")
        if not self.send(Ack(kind, packet_id, reason, self._problem(text))):
            self.send(Ack(kind, packet_id, reason))  # without the text it may fit (5: 3.4.2.2.2)

    def _problem(self, text: str) -> PropertyMap:
        return {Property.REASON_STRING: text} if text and self.wants_problems else NO_PROPERTIES

"""Publisher of an MQTT link: `confirms.py` with packet ids, DUP and the two steps of QoS 2.

A message with QoS 1 or 2 is in flight until its last acknowledgement, which settles it; one with QoS 0 is
settled when it is written. Packet ids represent the numbers of `confirms.py`. After a reconnect the
messages that were in flight are sent first, in order and within the window, so that the broker is not
flooded. If the broker has resumed the session, they keep their packet ids (5: 4.4).

A broker may close the connection whenever it receives a certain message (too large, or not permitted; 3:
3.3.5 has no other reply) and would receive that message again on each connection. Therefore a connection on
which messages were published and none was acknowledged is *barren*. After one, messages are sent one at a
time until one is acknowledged; after BARREN_MAX in a row the message that was sent alone is rejected.

A gateway that was killed does not know which packet ids it used, but the broker's session does. Ids of QoS 2
that wait for PUBREL use up the broker's Receive Maximum, and a new message with such an id would be taken for
a repetition (5: 4.3.3). Therefore, before the first QoS 2 message on a session of an earlier process, PUBREL
is sent for every id, and the message waits until the broker has answered the last one. If the connection is
lost before, no id of unknown state was used. A broker without QoS 2 may stop reading at the first PUBREL, or
close (RabbitMQ does); it holds no ids, and is detected by SWEEPS_MAX connections without a PUBCOMP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.broker.mqtt.echoes import Ledger, Unconfirmed
from gateway.broker.poison import outcome_of_error
from gateway.egress.confirms import EXPIRED, SLICE_MESSAGES_MAX, ConfirmedSink, Positions, settle_all
from gateway.egress.confirms import Unconfirmed as UnconfirmedSlice
from gateway.errors import GatewayError
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.mqtt.reason_codes import outcome_of
from gateway.protocols.mqtt.runs import PublishRow
from gateway.protocols.mqtt.spec import DUP, FAILURE, RETAIN, VARINT_MAX, PacketType
from gateway.protocols.mqtt.translate import encode_properties
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

PACKET_IDS: Final = 65_000  # of PUBLISH; higher ones belong to SUBSCRIBE and UNSUBSCRIBE
# Numbers after an unacknowledged one, before all open messages get new numbers.
NUMBERS_MAX: Final = 2 * PACKET_IDS
TWICE: Final = 4  # the flag of QoS 2
CHUNK_MESSAGES: Final = 256  # encoded at a time, so that congestion is noticed soon
CHUNK_BYTES: Final = 1_048_576
# Bytes of a body: topic and properties need space, too.
PACKET_BYTES_MAX: Final = VARINT_MAX - 32 * 1_048_576
BARREN_MAX: Final = 5
BARREN_MAX_TOO_LARGE: Final = 2  # if the broker has reported that a packet was too large
SWEEP_SECS: Final = 5.0  # how long the broker may be silent before it has answered for every id
SWEEPS_MAX: Final = 2

TOO_LARGE: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "larger than the broker's Maximum Packet Size")
POISON: Final = Outcome(
    Verdict.REJECTED,
    Reason.TARGET_REFUSED,
    "the broker closes the connection whenever it receives this message",
)

_NO_IDS: Final = tuple([0] * CHUNK_MESSAGES)
# The result of `encode_properties` for properties without expiry depends only on the hops. For a routed
# message these are at most limits.hops_max, which is at most 255.
_FORMS: Final = tuple(f"mqtt5 after {hops} hops" for hops in range(256))

PlaceInBatch = tuple[SubBatch, int]
"""Message of a sub-batch: the sub-batch, and the position there."""


class PublisherOutlet(Protocol):
    """Interface of the connection that its publisher uses."""

    @property
    def is_open(self) -> bool:
        """False once the broker has ended the connection, even if earlier packets are not handled yet."""

    def send(self, rows: list[PublishRow]) -> Sequence[int]:
        """Encode PUBLISH packets. Return the indexes of `rows` that exceed the Maximum Packet Size."""

    def release(self, packet_ids: list[int]) -> None:
        """Encode PUBREL packets, if the connection is open."""


class Terms(NamedTuple):
    """Protocol limits that the broker has announced for this connection.

    `five` is True for MQTT 5. `window` is the broker's Receive Maximum. `retains` is True if the broker
    supports retained messages.
    """

    five: bool
    window: int
    max_qos: int = 2
    retains: bool = True


class _Sent:
    """Result of encoding messages of a sub-batch as PUBLISH packets.

    The messages at `positions` await an acknowledgement, with packet ids `ids`; those at positions in
    `settled` already have an outcome. `written` messages, whose bodies have `byte_count` bytes in all, were
    encoded.
    """

    __slots__ = ("byte_count", "ids", "positions", "settled", "written")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.settled: list[tuple[Positions, Outcome]] = []
        self.written = 0
        self.byte_count = 0


class _UnsendableError(GatewayError):
    """Error of a message that must not be sent; `outcome` is the outcome of the message."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class MqttLinkPublisher(ConfirmedSink):
    """Destination end of routes to an MQTT link: it publishes to the broker.

    `stats.degraded` counts messages that were sent with a lower QoS than they had, or without their retain
    flag, because the broker supports no more.
    """

    def __init__(
        self,
        stats: LinkStats,
        *,
        in_flight_max: int,
        messages_max: int,
        bytes_max: int,
        make_ledger: Callable[[Unconfirmed], Ledger] | None = None,
    ) -> None:
        """Create the publisher of an MQTT link.

        `make_ledger` creates a ledger: the record of sent messages by which messages that return in a loop
        are recognized. It gets a function that returns the unacknowledged message with a packet id. It serves
        MQTT 3.1 and 3.1.1; messages of MQTT 5 have a hop count instead.
        """
        most = min(in_flight_max, PACKET_IDS)
        super().__init__(stats, in_flight_max=most, messages_max=messages_max, bytes_max=bytes_max)
        self._most = most
        self._ledger = None if make_ledger is None else make_ledger(self.unconfirmed)
        self._outlet: PublisherOutlet | None = None
        self._numbers: dict[int, int] = {}  # numbers of messages in flight, by packet id
        # Packet ids in flight for which PUBREC has arrived and PUBREL was sent.
        self._received: dict[int, None] = {}
        # Packet ids of messages that were in flight when the connection was lost.
        self._packet_ids: dict[PlaceInBatch, int] = {}
        self._released: dict[PlaceInBatch, None] = {}  # those of them for which PUBREC had arrived
        self._inherited = True  # True if the broker may hold unknown packet ids of QoS 2
        self._sweeps = 0  # connections on which they were released, since the last PUBCOMP
        # Deadline for the PUBCOMPs, if the ids were released on this connection.
        self._patient_until: float | None = None
        self._next_id = 1
        self._has_progressed = False  # True if a message was acknowledged on this connection
        self._barren = False  # True if none was on the last one, so that the window is narrow
        self._use(Terms(True, 0))

    def unconfirmed(self, packet_id: int) -> Message | None:
        """Return the unacknowledged message that was sent with this packet id, or None."""
        number = self._numbers.get(packet_id)
        run = None if number is None else self._run_of(number)
        if number is None or run is None:
            return None
        return run.sub_batch.messages[run.positions[number - run.first]]

    @property
    def awaits_answers(self) -> bool:
        """True if messages cannot be settled or sent before the broker sends acknowledgements."""
        return self.in_flight > 0 or self._patient_until is not None

    # Interface for the connection.

    def attach(self, outlet: PublisherOutlet, stream: Stream, terms: Terms, *, present: bool) -> None:
        """Start sending on a new connection.

        `present` is True if the broker resumed the session (MQTT 5: 4.4): messages that were in flight are
        then sent again with their packet ids. Otherwise all of them are published as new messages.
        """
        self._outlet = outlet
        self._stream = stream
        self._use(terms)
        if present:
            self._release_again(outlet)
        else:
            self._packet_ids.clear()
            self._released.clear()
            self._inherited = False
        self._has_progressed = False
        self._flowing = True
        self.pump()

    def _release_again(self, outlet: PublisherOutlet) -> None:
        """Send PUBREL again for the messages whose PUBREC had arrived on an earlier connection.

        They are not published again.
        """
        released, self._released = self._released, {}
        if not released:
            return
        for sub_batch, positions in self._withdraw_waiting(lambda sub_batch, at: (sub_batch, at) in released):
            for at, number in zip(positions, self._number(sub_batch, positions, clock.now()), strict=True):
                packet_id = self._packet_ids.pop((sub_batch, at))
                self._numbers[packet_id] = number
                self._received[packet_id] = None
        outlet.release(list(self._received))
        self._count_in_flight()

    def _use(self, terms: Terms) -> None:
        self._five = terms.five
        self._max_qos = terms.max_qos
        self._retains = terms.retains
        self._plain = terms.five and terms.max_qos == 2 and terms.retains
        self.in_flight_max = min(terms.window, self._most)
        self._window = min(self._window, self.in_flight_max) if self._suspects else self.in_flight_max
        # The flags of a PUBLISH, at index assurance * 2 + retain.
        self._flags = tuple(
            min(assurance, terms.max_qos) << 1 | (retain and terms.retains)
            for assurance in range(3)
            for retain in range(2)
        )

    def tick(self, now: float) -> None:
        """Run the ledger's timer, and abort the connection if PUBCOMPs are overdue.

        Called once per second. `now` is in loop-clock seconds.
        """
        if self._ledger is not None:
            self._ledger.tick(now)
        if self._patient_until is not None and now >= self._patient_until and self._stream is not None:
            self._stream.abort("the broker does not acknowledge PUBREL")

    def detach(self, *, too_large: bool = False, busy: bool = False) -> None:
        """Requeue unconfirmed messages after the connection is lost, and search for the cause among them.

        `too_large` is True if the broker reported a packet as too large. `busy` is True if the broker accepts
        no messages at present, or if the gateway has disconnected; then no message is the cause.
        """
        if self._outlet is None:
            return  # sending failed here, and the search for the cause has begun already
        unanswered = self.close()
        if self._has_progressed or not unanswered:
            self._restore_window()
        elif busy:
            return
        else:
            self._barren = True
            times = BARREN_MAX_TOO_LARGE if too_large else BARREN_MAX
            self._suspect(unanswered, TOO_LARGE if too_large else POISON, window=1, times=times)

    def close(self) -> int:
        """Requeue unconfirmed messages after the connection is lost.

        Return the number of messages that the broker has not received, so that they must be published again.
        """
        self._outlet = None
        if self._patient_until is not None:
            self._patient_until = None
            self._inherited = self._sweeps < SWEEPS_MAX
            if not self._inherited:
                log.warning("broker left PUBREL unacknowledged", link=self._stats.name)
        received = len(self._received)
        for packet_id, number in self._numbers.items():
            run = self._run_of(number)
            assert run is not None
            entry = (run.sub_batch, run.positions[number - run.first])
            self._packet_ids[entry] = packet_id
            if packet_id in self._received:
                self._released[entry] = None
        self._numbers.clear()
        self._received.clear()
        return super().close() - received

    # Handover to another replica.

    def has_doubtful(self, selects: Callable[[SubBatch], bool]) -> bool:
        """Return True if the broker may have unconfirmed QoS 2 messages of the selected sub-batches.

        `selects` returns True for these sub-batches. The broker detects duplicates by packet id, so only this
        link can safely send such messages again.
        """
        return any(
            selects(sub_batch) and self._is_recognized_again(sub_batch, at)
            for sub_batch, at in self._packet_ids
        )

    def release_waiting(self, selects: Callable[[SubBatch], bool], outcome: Outcome) -> None:
        """Settle waiting messages with this outcome, and free their packet ids.

        Only sub-batches for which `selects` returns True are considered. QoS 2 messages that were sent before
        are not included, because the broker may have them.
        """
        withdrawn = self._withdraw_waiting(
            lambda sub_batch, at: selects(sub_batch) and not self._is_recognized_again(sub_batch, at)
        )
        for sub_batch, positions in withdrawn:
            for at in positions:
                self._packet_ids.pop((sub_batch, at), None)
        settle_all(withdrawn, outcome)

    def _is_recognized_again(self, sub_batch: SubBatch, at: int) -> bool:
        return (sub_batch, at) in self._packet_ids and min(
            sub_batch.messages[at].assurance, self._max_qos
        ) == 2

    # Sending.

    @property
    def _usable(self) -> bool:
        return self._outlet is not None and self._outlet.is_open

    def _destination_of(self, message: Message) -> bytes:
        return message.address.wire

    def _send_capacity(self) -> int:
        """Return how many messages may be sent now.

        If the in-flight window is full, only messages with QoS 0 may be sent, as they need no
        acknowledgement: the result is SLICE_MESSAGES_MAX if the next waiting message has QoS 0, and 0
        otherwise.
        """
        room = super()._send_capacity()
        if room > 0:
            return room
        sub_batch, positions = self._waiting[0]
        message = sub_batch.messages[positions[0]]
        return 0 if self._flags[message.assurance * 2 + message.retain] > RETAIN else SLICE_MESSAGES_MAX

    def _may_expire(self, sub_batch: SubBatch, at: int) -> bool:
        """Return False if the message at index `at` was sent before, and keeps its packet id."""
        return (sub_batch, at) not in self._packet_ids

    def _take_slice(self, room: int) -> UnconfirmedSlice:
        """Remove and return the next waiting messages, at most `room`.

        Without a connection, return one message: the oldest one that the broker has not received, which is
        assumed to have caused the end of the connection. Its packet id is freed.
        """
        if self._outlet is not None:
            return super()._take_slice(room)
        (oldest,) = self._withdraw_waiting(
            lambda sub_batch, at: (sub_batch, at) not in self._released, most=1
        )
        self._packet_ids.pop((oldest.sub_batch, oldest.positions[0]), None)
        return oldest

    def _send(self, sub_batch: SubBatch, positions: Positions, messages: list[Message]) -> Positions:
        """Send `messages`, which are at `positions` in the sub-batch.

        Return the positions that have to wait.
        """
        outlet, stream = self._outlet, self._stream
        assert outlet is not None
        assert stream is not None
        if (
            self._plain
            and not self._packet_ids
            and self._send_at_once(outlet, sub_batch, positions, messages)
        ):
            return ()
        sent = _Sent()
        at = 0
        while at < len(messages) and not (at and stream.congested):
            end = at + CHUNK_MESSAGES
            count = self._send_chunk(outlet, sub_batch, positions[at:end], messages[at:end], sent)
            if not count:
                break
            at += count
        if sent.positions:
            numbers = self._number(sub_batch, sent.positions, clock.now())
            self._numbers.update(zip(sent.ids, numbers, strict=True))
            self._count_in_flight()
        if self._packet_ids:
            for one in positions[:at]:
                self._packet_ids.pop((sub_batch, one), None)
        self._written(sent.written, sent.byte_count)
        for settled, outcome in sent.settled:
            self._settle_unsent(settled, outcome)
        return positions[at:]

    def _send_at_once(
        self, outlet: PublisherOutlet, sub_batch: SubBatch, positions: Positions, messages: list[Message]
    ) -> bool:
        """Send all messages in one step, if none has QoS 0 and all fit into the in-flight window.

        Return True if they were sent. Return False, with nothing sent, if they have to be sent by
        `_send_chunk`.
        """
        table = self._flags
        flags = [table[message.assurance * 2 + message.retain] for message in messages]
        count = len(flags)
        if self._inherited and max(flags) >= TWICE:
            return False
        if min(flags) <= RETAIN or count > CHUNK_MESSAGES or count > self._window - self.in_flight:
            return False
        byte_count = sum([len(message.body) for message in messages])
        if byte_count > CHUNK_BYTES and count > 1:
            return False
        ids = self._new_ids(count)
        try:
            rows = self._rows(messages, flags, ids)
        except _UnsendableError:
            return False
        refused = outlet.send(rows)
        large = [positions[at] for at in refused]
        if large:
            accepted = [at for at in range(count) if at not in refused]
            positions, ids = [positions[at] for at in accepted], [ids[at] for at in accepted]
        if positions:
            numbers = self._number(sub_batch, positions, clock.now())
            self._numbers.update(zip(ids, numbers, strict=False))
            self._count_in_flight()
            self._written(len(positions), byte_count)
        if large:
            self._settle_unsent(large, TOO_LARGE)
        return True

    def _send_chunk(
        self,
        outlet: PublisherOutlet,
        sub_batch: SubBatch,
        positions: Positions,
        chunk: list[Message],
        sent: _Sent,
    ) -> int:
        """Send the first messages of `chunk`, which either all have QoS 0 or all have a higher QoS.

        Return how many were sent or have an outcome; `sent` records both. Return 0 if the in-flight window is
        full, or if QoS 2 has to wait until the packet ids of an earlier process are free
        (`_free_inherited_ids`).
        """
        table = self._flags
        flags = [table[message.assurance * 2 + message.retain] for message in chunk]
        assured = flags[0] > RETAIN
        count = self._sendable_count(chunk, flags, assured, len(sent.positions))
        if count and self._inherited and max(flags[:count]) >= TWICE:
            count = next(at for at, flag in enumerate(flags) if flag >= TWICE)
            if not count:
                self._free_inherited_ids()
        if not count:
            return 0
        del chunk[count:]
        ids = self._ids(sub_batch, positions[:count], flags) if assured else _NO_IDS
        rows, outcome = self._sendable(sub_batch, positions, chunk, flags, ids)
        if not rows:
            sent.settled.append((positions[:1], outcome))
            return 1
        count = len(rows)
        positions, ids = positions[:count], ids[:count]
        if self._max_qos < 2 or not self._retains:
            self._count_lowered(chunk)
        if refused := outlet.send(rows):
            sent.settled.append(([positions[index] for index in refused], TOO_LARGE))
            accepted = [index for index in range(count) if index not in refused]
            positions, ids = [positions[index] for index in accepted], [ids[index] for index in accepted]
        if not self._five and self._ledger is not None:
            self._ledger.send(chunk, clock.now(), [row[2] for row in rows])
        sent.written += len(positions)
        sent.byte_count += sum([len(message.body) for message in chunk])
        if assured:
            sent.ids += ids
            sent.positions += positions
        elif positions:
            sent.settled.append((positions, ACCEPTED))
        return count

    def _sendable_count(self, chunk: list[Message], flags: list[int], assured: bool, sent: int) -> int:
        """Return how many of the first messages in `chunk` may be sent together; 0 if the window is full.

        With `assured`, these messages have QoS 1 or 2, and need capacity of the in-flight window, of which
        `sent` earlier messages are not counted yet. Otherwise they have QoS 0. Their bodies have at most
        CHUNK_BYTES bytes in all, unless the first one is larger. `flags` has the PUBLISH flags of each
        message.
        """
        count = len(chunk)
        if assured:
            count = max(0, min(count, self._window - self.in_flight - sent))
            if min(flags) <= RETAIN:
                count = min(count, next(at for at, flag in enumerate(flags) if flag <= RETAIN))
        elif max(flags) > RETAIN:
            count = next(at for at, flag in enumerate(flags) if flag > RETAIN)
        if count > 1 and sum([len(message.body) for message in chunk]) > CHUNK_BYTES:
            byte_count = 0
            for at, message in enumerate(chunk[:count]):
                byte_count += len(message.body)
                if byte_count > CHUNK_BYTES:
                    return max(at, 1)
        return count

    def _ids(self, sub_batch: SubBatch, positions: Positions, flags: list[int]) -> Sequence[int]:
        """Return a packet id for each message.

        A message that was sent before keeps its packet id, and the DUP bit is set in its element of `flags`.
        """
        count = len(positions)
        if not self._packet_ids:
            return self._new_ids(count)
        found = [self._packet_ids.get((sub_batch, at), 0) for at in positions]
        new = iter(self._new_ids(found.count(0)))
        for index, packet_id in enumerate(found):
            if packet_id:
                flags[index] |= DUP
            else:
                found[index] = next(new)
        return found

    def _new_ids(self, count: int) -> Sequence[int]:
        """Return `count` unused packet ids. The in-flight window guarantees that there are enough."""
        first = self._next_id
        if first + count > PACKET_IDS:
            first = 1
        self._next_id = first + count
        ids: Sequence[int] = range(first, first + count)
        if self._packet_ids or not self._numbers.keys().isdisjoint(ids):
            used = {*self._numbers, *self._packet_ids.values()}
            found: list[int] = []
            while len(found) < count:
                if first not in used:
                    found.append(first)
                first = first % PACKET_IDS + 1
            self._next_id = first
            ids = found
        return ids

    def _rows(self, chunk: list[Message], flags: list[int], ids: Sequence[int]) -> list[PublishRow]:
        """Return the PUBLISH packets of `chunk`, whose messages have these PUBLISH flags and packet ids.

        Raises _UnsendableError if one of the messages must not be sent.
        """
        if len(chunk[0].body) > PACKET_BYTES_MAX:
            raise _UnsendableError(TOO_LARGE)
        raw = self._raw
        if not self._five:
            return [
                (
                    flag,
                    message.address.wire,
                    packet_id,
                    raw(message, flag) if message.expires else b"",
                    message.body,
                )
                for message, flag, packet_id in zip(chunk, flags, ids, strict=False)
            ]
        forms = _FORMS
        return [
            (
                flag,
                message.address.wire,
                packet_id,
                (not message.expires and message.property_set.forms.get(forms[message.hops]))
                or raw(message, flag),
                message.body,
            )
            for message, flag, packet_id in zip(chunk, flags, ids, strict=False)
        ]

    def _raw(self, message: Message, flags: int) -> bytes:
        """Return the encoded properties of a message; b"" before MQTT 5.

        Raises _UnsendableError if the message must not be sent. A repeated message (DUP in `flags`) is sent
        even if it has expired, because its packet id is in use.
        """
        if len(message.body) > PACKET_BYTES_MAX:
            raise _UnsendableError(TOO_LARGE)
        utc = 0.0
        if message.expires:
            utc = clock.utc()
            if message.expires <= utc and not flags & DUP:
                raise _UnsendableError(EXPIRED)
        if not self._five:
            return b""
        try:
            raw = encode_properties(message, utc)
        except Exception as error:
            raise _UnsendableError(outcome_of_error(error)) from error
        if not message.expires:
            message.property_set.forms[_FORMS[message.hops]] = raw
        return raw

    def _sendable(
        self,
        sub_batch: SubBatch,
        positions: Positions,
        chunk: list[Message],
        flags: list[int],
        ids: Sequence[int],
    ) -> tuple[list[PublishRow], Outcome]:
        """Return the PUBLISH packets of the messages in front of the first one that must not be sent.

        The second result is the outcome of that message, or ACCEPTED if all can be sent. The message and
        those behind it are removed from `chunk`.
        """
        outcome = ACCEPTED
        while chunk:
            try:
                return self._rows(chunk, flags, ids), outcome
            except _UnsendableError:
                outcome = self._drop_from_unsendable(sub_batch, positions, chunk)
        return [], outcome

    def _drop_from_unsendable(
        self, sub_batch: SubBatch, positions: Positions, chunk: list[Message]
    ) -> Outcome:
        """Remove from `chunk` the first message that must not be sent, and all messages behind it.

        Return the outcome of that message, or ACCEPTED if there is none.
        """
        for index, message in enumerate(chunk):
            try:
                self._raw(message, 0 if self._may_expire(sub_batch, positions[index]) else DUP)
            except _UnsendableError as error:
                del chunk[index:]
                return error.outcome
        return ACCEPTED

    def _free_inherited_ids(self) -> None:
        """Send PUBREL for every possible packet id, unless that was done on this connection.

        The broker then releases the ids that an earlier process of this gateway has left in use.
        """
        if self._patient_until is None:
            assert self._outlet is not None
            self._outlet.release(list(range(1, PACKET_IDS + 1)))
            self._sweeps += 1
            self._patient_until = clock.now() + SWEEP_SECS

    def _handle_sweep(self, packet_ids: Iterable[int]) -> None:
        """Process PUBCOMPs that reply to the PUBRELs of `_free_inherited_ids`.

        Each PUBCOMP extends the deadline. With that of the highest packet id, QoS 2 messages can be sent
        again.
        """
        self._sweeps = 0
        self._patient_until = clock.now() + SWEEP_SECS
        if PACKET_IDS in packet_ids:
            self._patient_until = None
            self._inherited = False

    def _count_lowered(self, chunk: list[Message]) -> None:
        lessened = self._stats.degraded
        if lowered := sum(message.assurance > self._max_qos for message in chunk):
            lessened.add("qos", lowered)
        if not self._retains and (unretained := sum(message.retain for message in chunk)):
            lessened.add("retain", unretained)

    # Outcomes.

    def acked(self, kind: PacketType, rows: list[tuple[int, int]]) -> list[int]:
        """Process acknowledgements of one kind: PUBACK, PUBREC or PUBCOMP.

        Each of `rows` is a packet id and a reason code. Return the packet ids of PUBRECs that are not in use.
        """
        strangers: list[int] = []
        if kind is PacketType.PUBREC:
            rows, strangers = self._take_received(rows)
        elif kind is PacketType.PUBCOMP:
            if self._patient_until is not None:
                self._handle_sweep([row[0] for row in rows])
            rows = [row for row in rows if row[0] in self._received]
        if rows:
            self._finish(rows, refuses=kind is not PacketType.PUBCOMP)
        self.pump()
        return strangers

    def _take_received(self, rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
        """Process PUBRECs: send PUBREL for each accepted message.

        Each of `rows` is a packet id and a reason code. Return the rows of refused messages, and the packet
        ids that are not in use.
        """
        refused: list[tuple[int, int]] = []
        strangers: list[int] = []
        accepted_ids: list[int] = []
        for packet_id, reason in rows:
            if reason >= FAILURE:
                refused.append((packet_id, reason))
            elif packet_id in self._numbers:
                accepted_ids.append(packet_id)
            else:
                strangers.append(packet_id)
        if strangers and self._packet_ids:
            strangers = self._accept_early_pubrecs(strangers)
        if accepted_ids:
            self._note_progress()
            self._received.update(dict.fromkeys(accepted_ids))
            if self._outlet is not None:
                self._outlet.release(accepted_ids)
        return refused, strangers

    def _accept_early_pubrecs(self, packet_ids: list[int]) -> list[int]:
        """Send PUBREL for messages whose PUBREC arrives before they are sent again on this connection.

        Return the packet ids that are not in use.
        """
        entries = {
            packet_id: entry
            for entry, packet_id in self._packet_ids.items()
            if self._is_recognized_again(*entry)
        }
        for packet_id in packet_ids:
            if packet_id in entries:
                self._released[entries[packet_id]] = None
        if self._outlet is not None:
            self._release_again(self._outlet)
        return [packet_id for packet_id in packet_ids if packet_id not in entries]

    def _finish(self, rows: Iterable[tuple[int, int]], *, refuses: bool) -> None:
        """Settle messages whose last acknowledgement has arrived.

        Each of `rows` is a packet id and a reason code. With `refuses` False (PUBCOMP) the reason code is
        ignored, because the broker has accepted the message by PUBREC.
        """
        take = self._numbers.pop
        received = self._received
        floor, early = self._floor, self._early
        singles: list[int] = []
        refused: list[tuple[int, int]] = []
        for packet_id, reason in rows:
            number = take(packet_id, 0)
            if not number:
                continue
            if received:
                received.pop(packet_id, None)
            if reason >= FAILURE and refuses:
                refused.append((number, reason))
            elif number == floor:
                floor += 1
                while early and floor in early:
                    early.remove(floor)
                    floor += 1
            else:
                singles.append(number)
                early.add(number)
        if floor > self._floor or singles or refused:
            self._note_progress()
        self._advance(floor)
        self._settle_singles(singles, ACCEPTED)
        for number, reason in refused:
            self._settle_singles([number], outcome_of(reason))
        self._count_in_flight()
        if self._next - self._floor > NUMBERS_MAX:
            self._renumber()

    def _renumber(self) -> None:
        """Assign new consecutive numbers to all unconfirmed messages.

        Called when NUMBERS_MAX numbers follow the oldest unconfirmed message, most of which are settled.
        """
        ids = sorted(self._numbers, key=self._numbers.__getitem__)
        runs, self._runs, self._firsts = self._runs, [], []
        self._early.clear()
        self._next = self._floor = 1
        for run in runs:
            if open_offsets := run.unsettled_positions():
                self._number(run.sub_batch, open_offsets, run.sent)
        self._numbers = dict(zip(ids, range(self._floor, self._next), strict=True))

    def _note_progress(self) -> None:
        if not self._has_progressed:
            self._has_progressed = True
            self._restore_window()

    def _restore_window(self) -> None:
        """Restore the full in-flight window, after a connection that acknowledged no message.

        Does nothing if the window was reduced for another reason.
        """
        if self._barren:
            self._barren = False
            self._reset_window()

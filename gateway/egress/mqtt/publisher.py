"""What an MQTT link publishes: `confirming.py`, with packet ids, DUP and the two steps of QoS 2.

A message with a QoS is on its way until its last acknowledgement, which settles it; one without is settled
when it is written. Packet ids stand for the numbers of `confirming.py`. After a reconnect what was on its way
goes first, in its order and within the window, so nothing floods the broker; if the broker has kept the
session, under the ids that it had (5: 4.4).

A broker that closes the connection whenever it meets a certain message (too large, or not allowed to us;
3: 3.3.5 gives it no other word) would be met with that message for ever. So a connection on which we
published and nothing was acknowledged is *barren*: after one, messages are sent one at a time until one is
acknowledged, and after BARREN_MAX in a row the message that was sent alone is rejected.

A gateway that was killed does not know which packet ids it used, but the broker's session does: ids of QoS 2
that wait for their PUBREL fill the broker's Receive Maximum, and a new message under one of them would be
taken for a repeat (5: 4.3.3). So before the first message of QoS 2 on a session of an earlier life every id
is released, and that message waits until the broker has answered for the last of them: on a connection that
is lost before, nothing has been said under an id of which nobody knows whose it is. A broker that does not
know QoS 2 may read nothing more behind the first PUBREL, or close (RabbitMQ's): it holds no ids, and is found
out by SWEEPS_MAX connections without an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import structlog
import trio

from gateway import clock
from gateway.broker.mqtt.echoes import Ledger, Unconfirmed
from gateway.broker.poison import poisoned
from gateway.egress.confirming import EXPIRED, SLICE_MESSAGES_MAX, ConfirmedSink, Positions, settle_all
from gateway.egress.confirming import Unconfirmed as UnconfirmedSlice
from gateway.errors import GatewayError
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.mqtt.packets import PublishRow
from gateway.protocols.mqtt.reason_codes import outcome_of
from gateway.protocols.mqtt.spec import DUP, FAILURE, RETAIN, VARINT_MAX, PacketType
from gateway.protocols.mqtt.translate import encode_properties
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

PACKET_IDS: Final = 65_000  # of PUBLISH; those above belong to SUBSCRIBE and UNSUBSCRIBE
NUMBERS_MAX: Final = 2 * PACKET_IDS  # behind one that is not acknowledged; then numbers begin anew
TWICE: Final = 4  # the flag of QoS 2
CHUNK_MESSAGES: Final = 256  # encoded at a time, so that congestion is noticed soon
CHUNK_OCTETS: Final = 1_048_576
PACKET_OCTETS_MAX: Final = VARINT_MAX - 32 * 1_048_576  # of a body: topic and properties need room too
BARREN_MAX: Final = 5
BARREN_MAX_TOO_LARGE: Final = 2  # when the broker itself has said that a packet was too large
SWEEP_SECS: Final = 5.0  # that the broker may be silent before it has answered for every id
SWEEPS_MAX: Final = 2

TOO_LARGE: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "larger than the broker takes")
POISON: Final = Outcome(
    Verdict.REJECTED, Reason.TARGET_REFUSED, "the broker ends the connection when it is sent this message"
)

_NO_IDS: Final = tuple([0] * CHUNK_MESSAGES)
# What `encode_properties` makes of a set without expiry depends on nothing but the hops; after a crossing
# these are at most limits.hops_max, which is at most 255.
_FORMS: Final = tuple(f"mqtt5 after {hops} hops" for hops in range(256))

PlaceInBatch = tuple[SubBatch, int]
"""A message: its part, and its position there."""


class Outlet(Protocol):
    """The connection through which messages go out."""

    def send(self, rows: list[PublishRow]) -> Sequence[int]:
        """Encode PUBLISH packets; returns the positions of those too large."""

    def release(self, packet_ids: list[int]) -> None:
        """Encode PUBREL packets."""


class Terms(NamedTuple):
    """What the broker takes on this connection. `window`: its Receive Maximum."""

    five: bool
    window: int
    max_qos: int = 2
    retains: bool = True


class _Sent:
    """What has been encoded of a part: `positions` with an acknowledgement to come, and their `ids`; what is
    settled already; how many messages were written, with how many octets."""

    __slots__ = ("ids", "octets", "positions", "settled", "written")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.settled: list[tuple[Positions, Outcome]] = []
        self.written = 0
        self.octets = 0


class _UnsendableError(GatewayError):
    """A message that must not be sent, and what its source is told."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class MqttLinkPublisher(ConfirmedSink):
    """The sink of an MQTT link.

    `stats.lessened` counts messages that were sent with less QoS than they had, or without their retain flag,
    since the broker offers no more.
    """

    def __init__(
        self,
        stats: LinkStats,
        *,
        in_flight_max: int,
        messages_max: int,
        octets_max: int,
        make_ledger: Callable[[Unconfirmed], Ledger] | None = None,
    ) -> None:
        """What is sent before MQTT 5, without hops, is noted in what `make_ledger` makes."""
        most = min(in_flight_max, PACKET_IDS)
        super().__init__(stats, in_flight_max=most, messages_max=messages_max, octets_max=octets_max)
        self._most = most
        self._ledger = None if make_ledger is None else make_ledger(self.unconfirmed)
        self._outlet: Outlet | None = None
        self._numbers: dict[int, int] = {}  # of what is on its way, by packet id
        self._received: dict[int, None] = {}  # of that: PUBREC came, PUBREL is said
        self._kept: dict[PlaceInBatch, int] = {}  # packet ids of what was on its way when the connection went
        self._released: dict[PlaceInBatch, None] = {}  # of that: PUBREC had come
        self._inherited = True  # the broker may hold ids of QoS 2 that we know nothing of
        self._sweeps = 0  # connections on which they were released, since an answer came
        self._patient_until: float | None = None  # for the answer, as they have been on this connection
        self._next_id = 1
        self._fruitful = False  # something was acknowledged on this connection
        self._barren = False  # nothing was on the one before, and so the window is narrow
        self._use(Terms(True, 0))

    def unconfirmed(self, packet_id: int) -> Message | None:
        """What was sent under this id, if it has not been acknowledged."""
        number = self._numbers.get(packet_id)
        run = None if number is None else self._run_of(number)
        if number is None or run is None:
            return None
        return run.part.messages[run.positions[number - run.first]]

    @property
    def awaits_answers(self) -> bool:
        """The broker has to say something before all that was sent is settled, or more can be."""
        return self.in_flight > 0 or self._patient_until is not None

    # What the connection tells.

    def attach(self, outlet: Outlet, stream: Stream, terms: Terms, *, present: bool) -> None:
        """A connection is usable. `present`: the broker kept the session (5: 4.4), so that what was in flight
        is told apart by its packet id; otherwise all of it is published anew."""
        self._outlet = outlet
        self._stream = stream
        self._use(terms)
        if present:
            self._release_again(outlet)
        else:
            self._kept.clear()
            self._released.clear()
            self._inherited = False
        self._fruitful = False
        self._flowing = True
        self.pump()

    def _release_again(self, outlet: Outlet) -> None:
        """What the broker has said PUBREC to is not sent again: PUBREL is."""
        released, self._released = self._released, {}
        if not released:
            return
        for part, positions in self._withdraw_waiting(lambda part, at: (part, at) in released):
            for at, number in zip(positions, self._number(part, positions, trio.current_time()), strict=True):
                packet_id = self._kept.pop((part, at))
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
        # The flags of a PUBLISH, at assurance * 2 + retain.
        self._flags = tuple(
            min(assurance, terms.max_qos) << 1 | (retain and terms.retains)
            for assurance in range(3)
            for retain in range(2)
        )

    def tick(self, now: float) -> None:
        """Once a second."""
        if self._ledger is not None:
            self._ledger.tick(now)
        if self._patient_until is not None and now >= self._patient_until and self._stream is not None:
            self._stream.abort("the broker does not answer PUBREL")

    def detach(self, *, too_large: bool = False, busy: bool = False) -> None:
        """The connection is gone. `too_large`: the broker said that a packet of ours was; `busy`: that it
        accepts nothing now, which is no message's fault."""
        if self._outlet is None:
            return  # it was us who could not go on, and what is to blame is looked for already
        unanswered = self.close()
        if self._fruitful or not unanswered:
            self._clear()
        elif busy:
            return
        else:
            self._barren = True
            times = BARREN_MAX_TOO_LARGE if too_large else BARREN_MAX
            self._suspect(unanswered, TOO_LARGE if too_large else POISON, window=1, times=times)

    def close(self) -> int:
        """The connection is gone. Returns how much is to be sent again: what the broker has not received."""
        self._outlet = None
        if self._patient_until is not None:
            self._patient_until = None
            self._inherited = self._sweeps < SWEEPS_MAX
            if not self._inherited:
                log.warning("a broker answers no PUBREL: it holds no packet ids", link=self._stats.name)
        received = len(self._received)
        for packet_id, number in self._numbers.items():
            run = self._run_of(number)
            assert run is not None
            entry = (run.part, run.positions[number - run.first])
            self._kept[entry] = packet_id
            if packet_id in self._received:
                self._released[entry] = None
        self._numbers.clear()
        self._received.clear()
        return super().close() - received

    # Whose messages they are.

    def in_doubt(self, wanted: Callable[[SubBatch], bool]) -> bool:
        """At QoS 2 the broker has a message once, if it comes again under its packet id."""
        return any(wanted(part) and self._known_again(part, at) for part, at in self._kept)

    def give_up(self, wanted: Callable[[SubBatch], bool], outcome: Outcome) -> None:
        """As above; packet ids of QoS 1 are free then."""
        taken = self._withdraw_waiting(lambda part, at: wanted(part) and not self._known_again(part, at))
        for part, positions in taken:
            for at in positions:
                self._kept.pop((part, at), None)
        settle_all(taken, outcome)

    def _known_again(self, part: SubBatch, at: int) -> bool:
        return (part, at) in self._kept and min(part.messages[at].assurance, self._max_qos) == 2

    # Sending.

    @property
    def _usable(self) -> bool:
        return self._outlet is not None

    def _place(self, message: Message) -> bytes:
        return message.address.wire

    def _room(self) -> int:
        """What is sent without an acknowledgement is not held up by what waits for one."""
        room = super()._room()
        if room > 0:
            return room
        part, positions = self._waiting[0]
        message = part.messages[positions[0]]
        return 0 if self._flags[message.assurance * 2 + message.retain] > RETAIN else SLICE_MESSAGES_MAX

    def _may_expire(self, part: SubBatch, at: int) -> bool:
        """Not what has been sent before: its packet id is in use."""
        return (part, at) not in self._kept

    def _take(self, room: int) -> UnconfirmedSlice:
        """The next of what waits. Without a connection it is the one to blame, which the broker has not
        received; its packet id is free."""
        if self._outlet is not None:
            return super()._take(room)
        (taken,) = self._withdraw_waiting(lambda part, at: (part, at) not in self._released, most=1)
        self._kept.pop((taken.part, taken.positions[0]), None)
        return taken

    def _send(self, part: SubBatch, positions: Positions, messages: list[Message]) -> Positions:
        outlet, stream = self._outlet, self._stream
        assert outlet is not None
        assert stream is not None
        if self._plain and not self._kept and self._send_at_once(outlet, part, positions, messages):
            return ()
        sent = _Sent()
        at = 0
        while at < len(messages) and not (at and stream.congested):
            end = at + CHUNK_MESSAGES
            count = self._send_chunk(outlet, part, positions[at:end], messages[at:end], sent)
            if not count:
                break
            at += count
        if sent.positions:
            numbers = self._number(part, sent.positions, trio.current_time())
            self._numbers.update(zip(sent.ids, numbers, strict=True))
            self._count_in_flight()
        if self._kept:
            for one in positions[:at]:
                self._kept.pop((part, one), None)
        self._written(sent.written, sent.octets)
        for settled, outcome in sent.settled:
            if len(settled) == len(part.slots):
                part.settle(outcome)
            else:
                part.settle_at(settled, outcome)
        return positions[at:]

    def _send_at_once(
        self, outlet: Outlet, part: SubBatch, positions: Positions, messages: list[Message]
    ) -> bool:
        """Send all of them, as it nearly always can be done. False: they have to be gone through."""
        table = self._flags
        flags = [table[message.assurance * 2 + message.retain] for message in messages]
        count = len(flags)
        if self._inherited and max(flags) >= TWICE:
            return False
        if min(flags) <= RETAIN or count > CHUNK_MESSAGES or count > self._window - self.in_flight:
            return False
        octets = sum([len(message.body) for message in messages])
        if octets > CHUNK_OCTETS and count > 1:
            return False
        ids = self._new_ids(count)
        try:
            rows = self._rows(messages, flags, ids)
        except _UnsendableError:
            return False
        refused = outlet.send(rows)
        large = [positions[at] for at in refused]
        if large:
            left = [at for at in range(count) if at not in refused]
            positions, ids = [positions[at] for at in left], [ids[at] for at in left]
        if positions:
            numbers = self._number(part, positions, trio.current_time())
            self._numbers.update(zip(ids, numbers, strict=False))
            self._count_in_flight()
            self._written(len(positions), octets)
        if large:
            part.settle_at(large, TOO_LARGE)
        return True

    def _send_chunk(
        self, outlet: Outlet, part: SubBatch, positions: Positions, chunk: list[Message], sent: _Sent
    ) -> int:
        """Send the next run of messages that all have, or all lack, a QoS; returns how many are dealt with.
        0: the window is full, or QoS 2 has to wait for `_swept`."""
        table = self._flags
        flags = [table[message.assurance * 2 + message.retain] for message in chunk]
        assured = flags[0] > RETAIN
        count = self._extent(chunk, flags, assured, len(sent.positions))
        if count and self._inherited and max(flags[:count]) >= TWICE:
            count = next(at for at, flag in enumerate(flags) if flag >= TWICE)
            if not count:
                self._sweep()
        if not count:
            return 0
        del chunk[count:]
        ids = self._ids(part, positions[:count], flags) if assured else _NO_IDS
        rows, outcome = self._sendable(part, positions, chunk, flags, ids)
        if not rows:
            sent.settled.append((positions[:1], outcome))
            return 1
        count = len(rows)
        positions, ids = positions[:count], ids[:count]
        if self._max_qos < 2 or not self._retains:
            self._count_lowered(chunk)
        if refused := outlet.send(rows):
            sent.settled.append(([positions[index] for index in refused], TOO_LARGE))
            left = [index for index in range(count) if index not in refused]
            positions, ids = [positions[index] for index in left], [ids[index] for index in left]
        if not self._five and self._ledger is not None:
            self._ledger.send(chunk, trio.current_time(), [row[2] for row in rows])
        sent.written += len(positions)
        sent.octets += sum([len(message.body) for message in chunk])
        if assured:
            sent.ids += ids
            sent.positions += positions
        elif positions:
            sent.settled.append((positions, ACCEPTED))
        return count

    def _extent(self, chunk: list[Message], flags: list[int], assured: bool, sent: int) -> int:
        """How many messages from the first one on may go together; 0 when the window is full."""
        count = len(chunk)
        if assured:
            count = max(0, min(count, self._window - self.in_flight - sent))
            if min(flags) <= RETAIN:
                count = min(count, next(at for at, flag in enumerate(flags) if flag <= RETAIN))
        elif max(flags) > RETAIN:
            count = next(at for at, flag in enumerate(flags) if flag > RETAIN)
        if count > 1 and sum([len(message.body) for message in chunk]) > CHUNK_OCTETS:
            octets = 0
            for at, message in enumerate(chunk[:count]):
                octets += len(message.body)
                if octets > CHUNK_OCTETS:
                    return max(at, 1)
        return count

    def _ids(self, part: SubBatch, positions: Positions, flags: list[int]) -> Sequence[int]:
        """A packet id for each message; one that was sent before keeps its own, and is flagged."""
        count = len(positions)
        if not self._kept:
            return self._new_ids(count)
        found = [self._kept.get((part, at), 0) for at in positions]
        new = iter(self._new_ids(found.count(0)))
        for index, packet_id in enumerate(found):
            if packet_id:
                flags[index] |= DUP
            else:
                found[index] = next(new)
        return found

    def _new_ids(self, count: int) -> Sequence[int]:
        """`count` packet ids that are not in use; there are more of them than the window is wide."""
        first = self._next_id
        if first + count > PACKET_IDS:
            first = 1
        self._next_id = first + count
        ids: Sequence[int] = range(first, first + count)
        if self._kept or not self._numbers.keys().isdisjoint(ids):
            used = {*self._numbers, *self._kept.values()}
            found: list[int] = []
            while len(found) < count:
                if first not in used:
                    found.append(first)
                first = first % PACKET_IDS + 1
            self._next_id = first
            ids = found
        return ids

    def _rows(self, chunk: list[Message], flags: list[int], ids: Sequence[int]) -> list[PublishRow]:
        """The PUBLISH packets of `chunk`; raises _UnsendableError for the first that must not be sent."""
        if len(chunk[0].body) > PACKET_OCTETS_MAX:
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
        """The property list of `message`; b"" before MQTT 5. What has been sent before, as its flags say, may
        not be withdrawn, for its packet id is in use."""
        if len(message.body) > PACKET_OCTETS_MAX:
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
            raise _UnsendableError(poisoned(error)) from error
        if not message.expires:
            message.property_set.forms[_FORMS[message.hops]] = raw
        return raw

    def _sendable(
        self,
        part: SubBatch,
        positions: Positions,
        chunk: list[Message],
        flags: list[int],
        ids: Sequence[int],
    ) -> tuple[list[PublishRow], Outcome]:
        """`_rows` of those before the first message that may not be sent, which `chunk` then ends with, and
        what becomes of that one."""
        outcome = ACCEPTED
        while chunk:
            try:
                return self._rows(chunk, flags, ids), outcome
            except _UnsendableError:
                outcome = self._cut(part, positions, chunk)
        return [], outcome

    def _cut(self, part: SubBatch, positions: Positions, chunk: list[Message]) -> Outcome:
        """Take the first message that may not be sent, and all behind it, from `chunk`; why it may not."""
        for index, message in enumerate(chunk):
            try:
                self._raw(message, 0 if self._may_expire(part, positions[index]) else DUP)
            except _UnsendableError as error:
                del chunk[index:]
                return error.outcome
        return ACCEPTED

    def _sweep(self) -> None:
        """Release every id, once on each connection."""
        if self._patient_until is None:
            assert self._outlet is not None
            self._outlet.release(list(range(1, PACKET_IDS + 1)))
            self._sweeps += 1
            self._patient_until = trio.current_time() + SWEEP_SECS

    def _swept(self, packet_ids: Iterable[int]) -> None:
        """The broker says PUBCOMP to these: it goes on, and to the last of them once it has heard of all."""
        self._sweeps = 0
        self._patient_until = trio.current_time() + SWEEP_SECS
        if PACKET_IDS in packet_ids:
            self._patient_until = None
            self._inherited = False

    def _count_lowered(self, chunk: list[Message]) -> None:
        lessened = self._stats.lessened
        if lowered := sum(message.assurance > self._max_qos for message in chunk):
            lessened.add("qos", lowered)
        if not self._retains and (unretained := sum(message.retain for message in chunk)):
            lessened.add("retain", unretained)

    # Outcomes.

    def acked(self, kind: PacketType, rows: list[tuple[int, int]]) -> list[int]:
        """PUBACK, PUBREC or PUBCOMP came: (packet id, reason). Returns the unknown ids of PUBREC."""
        strangers: list[int] = []
        if kind is PacketType.PUBREC:
            rows, strangers = self._take_received(rows)
        elif kind is PacketType.PUBCOMP:
            if self._patient_until is not None:
                self._swept([row[0] for row in rows])
            rows = [row for row in rows if row[0] in self._received]
        if rows:
            self._finish(rows, refuses=kind is not PacketType.PUBCOMP)
        self.pump()
        return strangers

    def _take_received(self, rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
        """PUBREC: the broker has the messages, PUBREL is next. Returns those it refused, and unknown ids."""
        refused: list[tuple[int, int]] = []
        strangers: list[int] = []
        taken: list[int] = []
        for packet_id, reason in rows:
            if reason >= FAILURE:
                refused.append((packet_id, reason))
            elif packet_id in self._numbers:
                taken.append(packet_id)
            else:
                strangers.append(packet_id)
        if strangers and self._kept:
            strangers = self._take_unasked(strangers)
        if taken:
            self._bore_fruit()
            self._received.update(dict.fromkeys(taken))
            if self._outlet is not None:
                self._outlet.release(taken)
        return refused, strangers

    def _take_unasked(self, packet_ids: list[int]) -> list[int]:
        """PUBREC for what has not been sent again yet: it need not be. Returns the unknown ids."""
        kept = {packet_id: entry for entry, packet_id in self._kept.items() if self._known_again(*entry)}
        for packet_id in packet_ids:
            if packet_id in kept:
                self._released[kept[packet_id]] = None
        if self._outlet is not None:
            self._release_again(self._outlet)
        return [packet_id for packet_id in packet_ids if packet_id not in kept]

    def _finish(self, rows: Iterable[tuple[int, int]], *, refuses: bool) -> None:
        """The last acknowledgements of messages came. Of a PUBCOMP the reason says nothing about the message:
        the broker answered for it with PUBREC."""
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
            self._bore_fruit()
        self._advance(floor)
        self._settle_singles(singles, ACCEPTED)
        for number, reason in refused:
            self._settle_singles([number], outcome_of(reason))
        self._count_in_flight()
        if self._next - self._floor > NUMBERS_MAX:
            self._number_anew()

    def _number_anew(self) -> None:
        """One that is not acknowledged for long holds fast all that came behind it: number what is open."""
        ids = sorted(self._numbers, key=self._numbers.__getitem__)
        runs, self._runs, self._firsts = self._runs, [], []
        self._early.clear()
        self._next = self._floor = 1
        for run in runs:
            if left := run.left():
                self._number(run.part, left, run.sent)
        self._numbers = dict(zip(ids, range(self._floor, self._next), strict=True))

    def _bore_fruit(self) -> None:
        if not self._fruitful:
            self._fruitful = True
            self._clear()

    def _clear(self) -> None:
        """Whatever the last connections were barren for, it is not what was sent."""
        if self._barren:
            self._barren = False
            self._widen()

"""What the remote MQTT broker is owed, whether it is connected or not.

Messages wait in the order in which they came, as ranges of their parts: a batch stays a batch. They go out as
the window allows, and those with a QoS stay in flight until their last acknowledgement, which settles them; a
message without one is settled when it is written. After a reconnect what was in flight goes first, in its
order and within the window, so nothing floods the broker.

A broker that closes the connection whenever it meets a certain message (too large, or not allowed to us;
3: 3.3.5 gives it no other word) would be met with that message for ever. So a connection on which we
published and nothing was acknowledged is *barren*: after one, messages are sent one at a time until one is
acknowledged, and after BARREN_MAX in a row the message that was sent alone is rejected.

A gateway that was killed does not know which packet ids it used, but the broker's session does: ids of QoS 2
that wait for their PUBREL fill the broker's Receive Maximum, and a new message under one of them would be
taken for a repeat (5: 4.3.3). So before the first message of QoS 2 on a session of an earlier life every id
is released, until an answer shows that the broker has heard it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Final, NamedTuple, Protocol

import trio

from gateway.broker.mqtt.echoes import Ledger, Unconfirmed
from gateway.broker.poison import poisoned
from gateway.errors import GatewayError
from gateway.model.batch import SubBatch
from gateway.model.message import MESSAGE_OCTETS, Message, weight_of
from gateway.model.outcome import ACCEPTED, INTERNAL, Outcome, Reason, Verdict
from gateway.protocols.mqtt.packets import PublishRow
from gateway.protocols.mqtt.spec import DUP, FAILURE, RETAIN, VARINT_MAX, PacketType
from gateway.protocols.mqtt.translate import encode_properties, refusal
from gateway.telemetry.stats import LinkStats

PACKET_IDS: Final = 65_000  # of PUBLISH; those above belong to SUBSCRIBE and UNSUBSCRIBE
TWICE: Final = 4  # the flag of QoS 2
CHUNK_MESSAGES: Final = 256  # encoded at a time, so that congestion is noticed soon
CHUNK_OCTETS: Final = 1_048_576
PACKET_OCTETS_MAX: Final = VARINT_MAX - 32 * 1_048_576  # of a body: topic and properties need room too
BARREN_MAX: Final = 5
BARREN_MAX_TOO_LARGE: Final = 2  # when the broker itself has said that a packet was too large

FULL: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "too much waits for the broker")
TOO_LARGE: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "larger than the broker takes")
EXPIRED: Final = Outcome(Verdict.REJECTED, Reason.EXPIRED, "the message expired while it waited")
POISON: Final = Outcome(
    Verdict.REJECTED, Reason.TARGET_REFUSED, "the broker ends the connection when it is sent this message"
)

_NO_IDS: Final = tuple([0] * CHUNK_MESSAGES)
# What `encode_properties` makes of a set without expiry depends on nothing but the hops; after a crossing
# these are at most limits.hops_max, which is at most 255.
_FORMS: Final = tuple(f"mqtt5 after {hops} hops" for hops in range(256))

Entry = tuple[SubBatch, int]
"""A message in flight: its part, and its position there."""


class Outlet(Protocol):
    """The connection through which messages go out."""

    @property
    def congested(self) -> bool:
        """True: write nothing more now; `MqttLinkPublisher.pump` is called when it has drained."""

    def send(self, rows: list[PublishRow], octets: int) -> Sequence[int]:
        """Encode PUBLISH packets with `octets` of bodies; returns the positions of those too large."""

    def release(self, packet_ids: list[int]) -> None:
        """Encode PUBREL packets."""

    def failed(self, error: Exception) -> None:
        """`send` has raised this: the connection is congested until it ends, with the wake-up."""


class Terms(NamedTuple):
    """What the broker takes on this connection. `window`: its Receive Maximum, within our own limit."""

    five: bool
    window: int
    max_qos: int = 2
    retains: bool = True


class _UnsendableError(GatewayError):
    """A message that must not be sent, and what its source is told."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class MqttLinkPublisher:
    """The messages that one link owes its broker.

    `stats.lessened` counts those that were sent with less QoS than they had, or without their retain flag,
    since the broker offers no more.
    """

    def __init__(
        self,
        stats: LinkStats,
        *,
        messages_max: int,
        octets_max: int,
        window_max: int,
        make_ledger: Callable[[Unconfirmed], Ledger] | None = None,
    ) -> None:
        """What is sent before MQTT 5, without hops, is noted in what `make_ledger` makes."""
        self.messages_max = messages_max  # waiting; beyond it the newest are released
        self.octets_max = octets_max  # of the bodies of those
        self.window_max = min(window_max, PACKET_IDS)
        self._stats = stats
        self._ledger = None if make_ledger is None else make_ledger(self.unconfirmed)
        self._outlet: Outlet | None = None
        self._waiting: deque[tuple[SubBatch, int, int]] = deque()  # a part, from where, to before where
        self._messages = 0
        self._octets = 0
        self._in_flight: dict[int, Entry] = {}
        self._released: dict[int, None] = {}  # of those in flight: PUBREC came, PUBREL is said
        self._again: deque[tuple[int, SubBatch, int]] = deque()  # in flight on the connection before
        self._dup = 0
        self._inherited = True  # the broker may hold ids of QoS 2 that we know nothing of
        self._sweeps = False  # they are to be released before more is sent
        self._next_id = 1
        self._barren = 0
        self._fruitful = False  # something was acknowledged on this connection
        self._use(Terms(True, 0))

    @property
    def waiting(self) -> int:
        """Messages that have not been sent yet."""
        return self._messages

    @property
    def in_flight(self) -> int:
        """Messages that were sent and have not been acknowledged."""
        return len(self._in_flight) + len(self._again)

    def unconfirmed(self, packet_id: int) -> Message | None:
        """What was sent under this id, if it has not been acknowledged."""
        entry = self._in_flight.get(packet_id)
        return None if entry is None else entry[0].messages[entry[1]]

    # What the dispatcher asks: this is the link's sink.

    def publish(self, part: SubBatch) -> None:
        """Owe the messages of `part` to the broker; what exceeds the limits is released."""
        messages = part.messages
        self._waiting.append((part, 0, len(messages)))
        self._messages += len(messages)
        self._octets += weight_of(messages)
        self.pump()
        if self._messages > self.messages_max or self._octets > self.octets_max:
            self._trim()

    def _trim(self) -> None:
        """Release the newest of what waits until the limits hold."""
        while self._waiting and (self._messages > self.messages_max or self._octets > self.octets_max):
            part, start, stop = self._waiting.pop()
            at = stop
            while at > start and (self._messages > self.messages_max or self._octets > self.octets_max):
                at -= 1
                self._messages -= 1
                self._octets -= part.messages[at].octets
            if at > start:
                self._waiting.append((part, start, at))
            part.settle_at(range(at, stop), FULL)

    # What the connection tells.

    def attach(self, outlet: Outlet, terms: Terms, *, present: bool) -> None:
        """A connection is usable. `present`: the broker kept the session (5: 4.4), so that what was in flight
        is told apart by its packet id; otherwise all of it is published anew."""
        self._outlet = outlet
        self._use(terms)
        before, self._in_flight = self._in_flight, {}
        if present:
            if self._released:
                for packet_id in self._released:
                    self._in_flight[packet_id] = before.pop(packet_id)
                outlet.release(list(self._released))
        else:
            self._released.clear()
            self._inherited = False
        self._sweeps = self._inherited
        self._again.extendleft((key, *entry) for key, entry in reversed(before.items()))
        self._dup = DUP if present else 0
        self._fruitful = False
        self.pump()

    def _use(self, terms: Terms) -> None:
        self._five = terms.five
        self._max_qos = terms.max_qos
        self._retains = terms.retains
        window = min(terms.window, self.window_max)
        self._window_full = window
        self._window = min(window, 1) if self._barren else window
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

    def detach(self, *, too_large: bool = False) -> None:
        """The connection is gone. `too_large`: the broker said that a packet of ours was."""
        self._outlet = None
        suspect = next((one for one in self._in_flight if one not in self._released), None)
        if self._fruitful or suspect is None:
            self._barren = 0
            return
        self._barren += 1
        if self._barren >= (BARREN_MAX_TOO_LARGE if too_large else BARREN_MAX):
            self._barren = 0
            part, at = self._in_flight.pop(suspect)
            part.settle_at((at,), TOO_LARGE if too_large else POISON)

    def pump(self) -> None:
        """Send what the window and the connection allow. What goes wrong costs the connection, so that the
        message to blame is found out in the end, as one that the broker does not like."""
        outlet = self._outlet
        try:
            self._pump(outlet)
        except Exception as error:
            if outlet is not None:
                outlet.failed(error)
        self._stats.in_flight = self.in_flight

    def _pump(self, outlet: Outlet | None) -> None:
        while outlet is not None and outlet is self._outlet and not outlet.congested:
            if self._again:
                if not self._resend(outlet):
                    break
            elif not self._waiting or not self._send(outlet):
                break

    def acked(self, kind: PacketType, rows: list[tuple[int, int]]) -> list[int]:
        """PUBACK, PUBREC or PUBCOMP came: (packet id, reason). Returns the unknown ids of PUBREC."""
        if kind is PacketType.PUBREC:
            done, strangers = self._received(rows)
        elif kind is PacketType.PUBCOMP:  # of those that we swept, too
            done, strangers = [row for row in rows if row[0] in self._released], []
        else:
            done, strangers = rows, []
        if done:
            self._finish(done, refuses=kind is not PacketType.PUBCOMP)
        self.pump()
        return strangers

    # Sending.

    def _send(self, outlet: Outlet) -> bool:
        """Send the next run of messages that all have, or all lack, a QoS. False: the window is full."""
        part, start, stop = self._waiting[0]
        chunk = part.messages[start : min(stop, start + CHUNK_MESSAGES)]
        table = self._flags
        flags = [table[message.assurance * 2 + message.retain] for message in chunk]
        assured = flags[0] > RETAIN
        count = self._extent(chunk, flags, assured)
        if not count:
            return False
        del chunk[count:]
        ids: Sequence[int] = self._take(count) if assured else _NO_IDS
        rows: list[PublishRow] | None = None
        while rows is None:
            try:
                rows = self._rows(chunk, flags, ids)
            except _UnsendableError:
                count, outcome = self._sendable(chunk)
                del chunk[count:]
                if not count:
                    self._advance(part, start, stop, 1)
                    part.settle_at((start,), outcome)
                    return True
        octets = self._advance(part, start, stop, count)
        if self._sweeps:
            self._sweep(outlet, rows)
        if assured:
            entries = zip(repeat(part), range(start, start + count), strict=False)
            self._in_flight.update(zip(ids, entries, strict=False))
        if self._max_qos < 2 or not self._retains:
            self._count_lowered(chunk)
        try:
            refused = outlet.send(rows, octets)
        except Exception:
            if not assured:
                part.settle_at(range(start, start + count), INTERNAL)
            raise
        if not self._five and self._ledger is not None:
            self._ledger.send(chunk, trio.current_time(), ids)
        self._stats.messages_out += count - len(refused)
        if refused:
            for at in refused:
                self._in_flight.pop(rows[at][2], None)
            part.settle_at([start + at for at in refused], TOO_LARGE)
        if not assured:
            _accept(part, start, count)
        return True

    def _extent(self, chunk: list[Message], flags: list[int], assured: bool) -> int:
        """How many messages from the first one on may go together; 0 when the window is full."""
        count = len(chunk)
        if assured:
            count = max(0, min(count, self._window - len(self._in_flight)))
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

    def _advance(self, part: SubBatch, start: int, stop: int, count: int) -> int:
        """Take `count` messages from the head of what waits; returns the octets of their content."""
        if start + count == stop:
            self._waiting.popleft()
        else:
            self._waiting[0] = (part, start + count, stop)
        octets = weight_of(part.messages[start : start + count])
        self._messages -= count
        self._octets -= octets
        return octets - count * MESSAGE_OCTETS

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
                    raw(message) if message.expires else b"",
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
                (not message.expires and message.property_set.forms.get(forms[message.hops])) or raw(message),
                message.body,
            )
            for message, flag, packet_id in zip(chunk, flags, ids, strict=False)
        ]

    def _raw(self, message: Message, *, late: bool = False) -> bytes:
        """The property list of `message`; b"" before MQTT 5. `late`: it has been sent before and may not be
        withdrawn, for its packet id is in use."""
        if len(message.body) > PACKET_OCTETS_MAX:
            raise _UnsendableError(TOO_LARGE)
        utc = 0.0
        if message.expires:
            utc = time.time()
            if message.expires <= utc and not late:
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

    def _sendable(self, chunk: list[Message]) -> tuple[int, Outcome]:
        """How many of `chunk` may be sent before the first that may not, and what becomes of that one."""
        for at, message in enumerate(chunk):
            try:
                self._raw(message)
            except _UnsendableError as error:
                return at, error.outcome
        return len(chunk), ACCEPTED

    def _resend(self, outlet: Outlet) -> bool:
        """Send again what was in flight on an earlier connection. False: the window is full."""
        room = min(self._window - len(self._in_flight), CHUNK_MESSAGES)
        if room <= 0:
            return False
        settled: list[tuple[Entry, Outcome]] = []
        rows: list[PublishRow] = []
        entries: list[Entry] = []
        octets = 0
        while self._again and len(rows) < room and octets < CHUNK_OCTETS:
            packet_id, part, at = self._again.popleft()
            message = part.messages[at]
            flags = self._flags[message.assurance * 2 + message.retain]
            try:
                raw = self._raw(message, late=self._dup > 0)
            except _UnsendableError as error:
                settled.append(((part, at), error.outcome))
                continue
            if flags > RETAIN:
                self._in_flight[packet_id] = (part, at)
                flags |= self._dup
            else:
                settled.append(((part, at), ACCEPTED))
            rows.append((flags, message.address.wire, packet_id, raw, message.body))
            entries.append((part, at))
            octets += len(message.body)
        if self._sweeps:
            self._sweep(outlet, rows)
        for at in outlet.send(rows, octets):
            self._in_flight.pop(rows[at][2], None)
            settled.insert(0, (entries[at], TOO_LARGE))
        for (part, at), outcome in settled:
            part.settle_at((at,), outcome)
        return True

    def _sweep(self, outlet: Outlet, rows: list[PublishRow]) -> None:
        """Release every id, if one of `rows` is of QoS 2. Whoever does not speak it would not understand."""
        if any(row[0] & TWICE for row in rows):
            self._sweeps = False
            outlet.release(list(range(1, PACKET_IDS + 1)))

    def _take(self, count: int) -> Sequence[int]:
        """`count` packet ids that are not in use; there are more of them than the window is wide."""
        first = self._next_id
        if first + count > PACKET_IDS:
            first = 1
        self._next_id = first + count
        ids: Sequence[int] = range(first, first + count)
        in_flight = self._in_flight
        if in_flight and not in_flight.keys().isdisjoint(ids):
            found: list[int] = []
            while len(found) < count:
                if first not in in_flight:
                    found.append(first)
                first = first % PACKET_IDS + 1
            self._next_id = first
            ids = found
        return ids

    def _count_lowered(self, chunk: list[Message]) -> None:
        lessened = self._stats.lessened
        if lowered := sum(message.assurance > self._max_qos for message in chunk):
            lessened.add("qos", lowered)
        if not self._retains and (unretained := sum(message.retain for message in chunk)):
            lessened.add("retain", unretained)

    # Settling.

    def _received(self, rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
        """PUBREC: the broker has the messages, PUBREL is next. Returns those it refused, and unknown ids."""
        refused: list[tuple[int, int]] = []
        strangers: list[int] = []
        taken: list[int] = []
        for packet_id, reason in rows:
            if reason >= FAILURE:
                refused.append((packet_id, reason))
            elif packet_id in self._in_flight:
                taken.append(packet_id)
            else:
                strangers.append(packet_id)
        if taken:
            self._inherited = False
            self._bore_fruit()
            self._released.update(dict.fromkeys(taken))
            if self._outlet is not None:
                self._outlet.release(taken)
        return refused, strangers

    def _finish(self, rows: Iterable[tuple[int, int]], *, refuses: bool) -> None:
        """The last acknowledgements of messages came. Of a PUBCOMP the reason says nothing about the message:
        the broker answered for it with PUBREC."""
        take = self._in_flight.pop
        released = self._released
        runs: list[tuple[SubBatch, list[int]]] = []
        refused: list[tuple[SubBatch, int, int]] = []
        part: SubBatch | None = None
        for packet_id, reason in rows:
            entry = take(packet_id, None)
            if entry is None:
                continue
            if released:
                released.pop(packet_id, None)
            if reason >= FAILURE and refuses:
                refused.append((entry[0], entry[1], reason))
                continue
            if entry[0] is not part:
                part = entry[0]
                positions: list[int] = []
                add = positions.append
                runs.append((part, positions))
            add(entry[1])
        if runs or refused:
            self._bore_fruit()
        for part, positions in runs:
            if len(positions) == len(part.slots):
                part.accept()
            else:
                part.settle_at(positions)
        for part, at, reason in refused:
            text = f"the broker refused it with reason {reason:#04x}"
            part.settle_at((at,), Outcome(Verdict.REJECTED, refusal(reason), text))

    def _bore_fruit(self) -> None:
        if not self._fruitful:
            self._fruitful = True
            self._barren = 0
            self._window = self._window_full


def _accept(part: SubBatch, start: int, count: int) -> None:
    """Messages without acknowledgements are accepted when they are written."""
    if count == len(part.slots):
        part.accept()
    else:
        part.settle_at(range(start, start + count))

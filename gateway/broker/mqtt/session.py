"""A session: what one client is owed, whether it is connected or not.

Outgoing: messages wait in order, go out as the client's Receive Maximum allows, and stay in flight until the
last acknowledgement of their QoS. ReceivedIds: the packet ids of QoS 2 messages that were taken but not
released.
The two directions have separate packet ids. A connection, while there is one, is the session's outlet.
Its octets are those of what waits and of what is in flight, until the client has acknowledged it.
What is here ends with the process; durable_session.py has the sessions that do not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Final, Protocol

from gateway import clock
from gateway.broker.mqtt.received_ids import ReceivedIds
from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX, PIECE_STEPS_MAX, Retained
from gateway.broker.pressure import MayHold, Pace, Pressure, everybody_may_hold, lowered
from gateway.model.batch import SubBatch
from gateway.model.message import Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.mqtt.spec import PacketType
from gateway.store.index import Log

QOS: Final = 0x03
RETAIN_AS_PUBLISHED: Final = 0x04
RETAINED: Final = 0x08
SHARED: Final = 0x10
IDENTIFIER_OCTETS: Final = 4


@dataclass(frozen=True)
class SubscriptionOptions:
    """How a subscription wants its messages (MQTT 5 §3.8.3.1)."""

    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0


class Grant:
    """What one session gets of a topic: its matching subscriptions, merged. It is a sink."""

    __slots__ = (
        "_hash",
        "identifiers",
        "no_local",
        "qos",
        "retain_as_published",
        "retained",
        "session",
        "shared",
    )

    def __init__(
        self,
        session: Session,
        options: list[SubscriptionOptions],
        *,
        retained: bool = False,
        shared: str = "",
    ) -> None:
        self.session = session
        self.shared = shared  # the filter of the shared subscription that it is a part of; "": of none
        self.retained = retained  # a retained message for a new subscription: it says so (§3.3.1.3)
        self.qos = max([option.qos for option in options])
        self.no_local = all(option.no_local for option in options)
        self.retain_as_published = any(option.retain_as_published for option in options)
        self.identifiers = tuple(sorted({option.identifier for option in options if option.identifier}))
        self._hash = hash(self._key())

    def is_of(self, options: SubscriptionOptions) -> bool:
        """Whether it is what one subscription with these options alone gives."""
        identifier = options.identifier
        return (
            self.qos == options.qos
            and self.no_local == options.no_local
            and self.retain_as_published == options.retain_as_published
            and self.identifiers == ((identifier,) if identifier else ())
        )

    def _key(self) -> tuple[object, ...]:
        options = (self.qos, self.no_local, self.retain_as_published, self.identifiers)
        return (self.session.client_id, self.shared, *options)

    def __eq__(self, other: object) -> bool:
        """Grants of one session with equal options are one recipient, whatever their topics."""
        if other is self:
            return True
        return isinstance(other, Grant) and other.session is self.session and other._key() == self._key()

    def __hash__(self) -> int:
        return self._hash

    def publish(self, part: SubBatch) -> None:
        """The session owes the messages; it settles the part."""
        self.session.take(part, self)

    def encode(self) -> bytes:
        """What must be known of the grant when a stored message is sent.

        An octet (bits 0 and 1: QoS, bit 2: retain as published, bit 3: retained, bit 4: shared), then each
        subscription identifier in 4 octets, big-endian. Of a shared subscription it is one, 0 for none, and
        the filter follows in UTF-8.
        """
        first = self.qos | self.retain_as_published * RETAIN_AS_PUBLISHED | self.retained * RETAINED
        identifiers = [one.to_bytes(IDENTIFIER_OCTETS, "big") for one in self.identifiers]
        if self.shared:
            identifiers = identifiers or [bytes(IDENTIFIER_OCTETS)]
            return bytes((first | SHARED,)) + identifiers[0] + self.shared.encode()
        return bytes((first,)) + b"".join(identifiers)


def shared_filter(octets: bytes) -> str:
    """The filter of the shared subscription in what `Grant.encode` wrote; "": it is of none."""
    return octets[1 + IDENTIFIER_OCTETS :].decode() if octets[0] & SHARED else ""


def decode_grant(session: Session, octets: bytes) -> Grant:
    """The grant that `Grant.encode` wrote; what it passes over was left out before it was stored."""
    first = octets[0]
    as_published = bool(first & RETAIN_AS_PUBLISHED)
    shared = ""
    if first & SHARED:
        shared = shared_filter(octets)
        octets = octets[: 1 + IDENTIFIER_OCTETS]
    options = [
        SubscriptionOptions(first & QOS, retain_as_published=as_published, identifier=identifier)
        for at in range(1, len(octets), IDENTIFIER_OCTETS)
        if (identifier := int.from_bytes(octets[at : at + IDENTIFIER_OCTETS], "big"))
    ]
    options = options or [SubscriptionOptions(first & QOS, retain_as_published=as_published)]
    return Grant(session, options, retained=bool(first & RETAINED), shared=shared)


class Owing(Protocol):
    """The retained messages that one subscription is still to be sent, whatever has them.

    `waits`: there is no next piece now, and somebody pulls again when there is one.
    """

    grant: Grant
    done: bool
    waits: bool

    def next(self, most: int = PIECE_MESSAGES_MAX) -> list[Message]:
        """The next piece. It may be empty although there is more."""


class Walk:
    """The retained messages of this process that one subscription is still to be sent."""

    __slots__ = ("_pattern", "_place", "_retained", "done", "grant", "waits")

    def __init__(self, retained: Retained, pattern: list[str], grant: Grant) -> None:
        self.grant = grant
        self.done = False
        self.waits = False
        self._retained = retained
        self._pattern = pattern
        self._place: list[str] | None = None

    def next(self, most: int = PIECE_MESSAGES_MAX) -> list[Message]:
        """The next piece. It may be empty although there is more."""
        found, self._place = self._retained.find(self._pattern, self._place, most, PIECE_STEPS_MAX)
        self.done = self._place is None
        return found


PACKET_IDS: Final = 65_535
WALKS_MAX: Final = 8  # through the retained messages, in one turn
UNKEPT: Final = -1  # position of a message that is in memory only
# Written in one go, so that a congested connection is noticed in time.
ROWS_MAX: Final = 256
ROWS_OCTETS_MAX: Final = 1_048_576
PACED_MIN: Final = 2 * ROWS_MAX  # messages that wait: fewer are no delay


class Row:
    """One PUBLISH to be written. Not changed once it has been made."""

    __slots__ = ("dup", "grant", "message", "packet_id", "qos")

    def __init__(self, message: Message, grant: Grant, qos: int, packet_id: int, dup: bool) -> None:
        self.message = message
        self.grant = grant
        self.qos = qos
        self.packet_id = packet_id
        self.dup = dup

    def said(self, *, before: bool) -> Row:
        """The same, which has been said before, or not."""
        return Row(self.message, self.grant, self.qos, self.packet_id, before)


class Outlet(Protocol):
    """The connection through which a session speaks."""

    @property
    def congested(self) -> bool:
        """True: write nothing more now; `Session.pump` is called when it has drained."""

    def send(self, rows: list[Row]) -> list[Row]:
        """Encode the rows; returns those that cannot be said to this client, which the session forgets.

        Raises only for what is wrong with the connection itself.
        """

    def failed(self, error: Exception) -> None:
        """`send` has raised this: the connection is congested until it ends, with the wake-up."""

    def send_release(self, packet_id: int) -> None:
        """Encode a PUBREL."""

    def send_received(self, packet_id: int) -> None:
        """Encode a PUBREC."""


@dataclass
class SessionTally:
    """What sessions dropped, by reason; telemetry reads it."""

    queue_full: int = 0
    offline: int = 0
    expired: int = 0
    undeliverable: int = 0  # larger than the client takes, or malformed by their sender
    unshared: int = 0  # of a shared subscription whose last member that could have them has ended


@dataclass
class SessionLimits:
    """What one session may hold."""

    messages_max: int = 100_000  # waiting; beyond it the newest is dropped and counted
    octets_max: int = 256 * 1024 * 1024
    in_flight_max: int = 256  # towards a client that states no Receive Maximum
    memory_messages_max: int = 100_000  # of a session that is kept on disk; others wait there alone
    memory_octets_max: int = 64 * 1024 * 1024
    holds: bool = True  # a connected client's sources stop reading at the limit; else it loses the newest
    may_hold: MayHold = everybody_may_hold  # by user: with `holds`, whose sessions do that
    stall_secs: float = 30.0  # how long for, when the client takes nothing
    delay_secs: float = 0.015  # of what waits for a client that takes it: beyond, sources are held; 0: never


QueuedRow = tuple[Message, Grant, int]
"""A message that is owed, by what, and its position, or UNKEPT."""
Told = Callable[[Outcome], None]
"""Hears ACCEPTED when a session owes a message safely, and otherwise why it does not."""
PassOn = Callable[[Message, Grant, Told], bool]
"""Has another session owe a message; False: none can."""


class Session:
    """One client's subscriptions and what it is owed."""

    __slots__ = (
        "_again",
        "_allowed",
        "_grant",
        "_last_id",
        "_octets",
        "_pace",
        "_since",
        "_tight",
        "_waiting",
        "client_id",
        "credit",
        "expires_at",
        "expiry_secs",
        "in_flight",
        "limits",
        "moved",
        "outlet",
        "owed",
        "patient",
        "place",
        "pressure",
        "received_ids",
        "released",
        "shares",
        "subscriptions",
        "tally",
        "user",
    )
    kept: ClassVar[bool] = False  # by the store

    def __init__(
        self, client_id: str, limits: SessionLimits, tally: SessionTally, *, user: str = "", place: str = ""
    ) -> None:
        """`user` is whose it is, and `place` where it was opened from: fair shares are counted by them."""
        self.client_id = client_id
        self.limits = limits
        self.tally = tally
        self.user = user
        self.place = place
        self.outlet: Outlet | None = None
        self.expiry_secs = 0.0  # how long it outlives its connection
        self.expires_at = 0.0  # monotonic; only while disconnected
        self.subscriptions: dict[str, SubscriptionOptions] = {}
        self.received_ids = ReceivedIds()
        self.in_flight: dict[int, Row] = {}
        self.owed: dict[str, Owing] = {}  # retained messages still to be sent, by filter
        self.released: dict[int, None] = {}  # in flight, PUBREC came, PUBREL was sent
        self.shares = False  # it has been a member of a shared subscription
        self.credit = 0
        self.pressure = Pressure()
        self.patient = limits.holds  # its sources are held; after a stall not again before half of it is gone
        self.moved = False  # something was sent since `stalled` was asked
        self._since = 0.0  # monotonic
        self._again: list[Row] = []  # in flight when the last connection was lost; the first is the last here
        self._waiting: deque[QueuedRow] | None = None  # an empty one takes 760 octets, of each session
        self._octets = 0  # that wait or are in flight
        self._tight = False  # sources are held, or it has stalled
        self._pace: Pace | None = None  # of the client, since much has waited for it; most never need it
        self._last_id = 0
        self._grant: Grant | None = None  # the last one of a single subscription: most have all the same
        self._allowed: SessionLimits | None = None  # while its owner holds too much, and `limits` are less

    def __len__(self) -> int:
        return 0 if self._waiting is None else len(self._waiting)

    @property
    def persistent(self) -> bool:
        """It outlives its connection."""
        return self.expiry_secs > 0

    @property
    def full(self) -> bool:
        """True: while the client is connected, its sources should stop reading."""
        return len(self) >= self.limits.messages_max or self._octets >= self.limits.octets_max

    @property
    def in_memory(self) -> int:
        """Octets of what waits or is in flight, and is not on disk alone."""
        return self._octets

    def restrain(self, on: bool) -> None:
        """Its owner holds too much of the memory, or does no longer. A repeated call is ignored."""
        if on and self._allowed is None:
            self._allowed = self.limits
            self.limits = self._lowered(self.limits)
        elif not on and self._allowed is not None:
            self.limits, self._allowed = self._allowed, None
            if self._tight:
                self._ease()

    def _lowered(self, limits: SessionLimits) -> SessionLimits:
        return replace(limits, octets_max=lowered(limits.octets_max, self._octets))

    @property
    def room(self) -> int:
        """How many messages would be sent at once; 0 while the client is away or does not read."""
        if self.outlet is None or self.outlet.congested:
            return 0
        return max(self.credit - len(self), 0)

    def granted(self, options: SubscriptionOptions) -> Grant:
        """What one of its subscriptions gets of a topic that no other of them matches."""
        grant = self._grant
        if grant is None or not grant.is_of(options):
            grant = self._grant = Grant(self, [options])
        return grant

    def take(self, part: SubBatch, grant: Grant) -> None:
        """Owe the messages of the part, which is what acceptance means here."""
        messages = part.messages
        if grant.no_local:
            messages = [message for message in messages if message.sender.client != self.client_id]
        if self.outlet is not None and self.patient:
            self._hold_if_late(part)
        self.offer(messages, grant)
        part.accept()

    def offer(self, messages: list[Message], grant: Grant) -> None:
        """Owe `messages` to the client. QoS 0 is for connected clients only.

        A connected client's sources are held at the limit, so only what cannot be held is dropped, at twice
        the limit. Of a client that is away, or has stalled, the newest messages beyond the limit are dropped,
        and counted.
        """
        if self.outlet is None:
            owed = (
                [message for message in messages if message.assurance and grant.qos]
                if self.persistent
                else []
            )
            self.tally.offline += len(messages) - len(owed)
            messages = owed
        messages = self._fitting(messages)
        self._wait([(message, grant, UNKEPT) for message in messages])
        self._octets += weight_of(messages)
        if self.outlet is not None:
            self.pump()

    def pull(self) -> bool:
        """Owe the next retained messages, when those before have been sent. False: not now, or none."""
        outlet = self.outlet
        if outlet is None or outlet.congested or len(self) >= PIECE_MESSAGES_MAX or not self.owed:
            return False
        left, moved = PIECE_MESSAGES_MAX, False
        for topic_filter in list(islice(self.owed, WALKS_MAX)):
            walk = self.owed[topic_filter]
            if walk.waits:
                continue
            moved = True
            messages = walk.next(left)
            if messages:
                self.offer(messages, walk.grant)
                left -= len(messages)
            if walk.done:
                self.forget_owed(topic_filter)
            if left <= 0 or not (walk.done or walk.waits):
                break
        return moved

    @property
    def pulls(self) -> bool:
        """Return True if a piece of what is owed retained is here, or can be asked for."""
        return any(not walk.waits for walk in islice(self.owed.values(), WALKS_MAX))

    def forget_owed(self, topic_filter: str) -> None:
        """A subscription is owed no retained messages any more."""
        self.owed.pop(topic_filter, None)

    def _fitting(self, messages: list[Message]) -> list[Message]:
        """As many of the messages as there is room for."""
        stretch = 1 if self.outlet is None or not self.patient else 2
        room = self.limits.messages_max * stretch - len(self)
        if len(messages) > room or self._octets > self.limits.octets_max * stretch:
            room = max(room, 0) if self._octets <= self.limits.octets_max * stretch else 0
            self.tally.queue_full += len(messages) - room
            messages = messages[:room]
        return messages

    def pump(self) -> None:
        """Write what waits, as far as credit and the connection allow."""
        outlet = self.outlet
        while outlet is not None and (self._waiting or self._again) and not outlet.congested:
            rows = self._next_rows()
            if not rows:
                return
            self.moved = True
            try:
                unsaid = outlet.send(rows)
            except Exception as error:  # what is in flight goes out again on the next connection
                outlet.failed(error)
                return
            for row in unsaid:
                self.tally.undeliverable += 1
                if row.qos:
                    self.finish(row.packet_id)

    def _next_rows(self) -> list[Row]:
        """The rows that there is credit for, at most as many as are written in one go."""
        if self._again:
            return self._rows_again()
        rows: list[Row] = []
        waiting = self._waiting
        in_flight = self.in_flight
        octets = gone = 0
        while waiting and len(rows) < ROWS_MAX and octets < ROWS_OCTETS_MAX:
            message, grant, _ = waiting[0]
            qos = message.assurance
            if qos > grant.qos:
                qos = grant.qos
            packet_id = 0
            if qos:
                if self.credit <= 0:
                    break
                packet_id = self._free_id()
            waiting.popleft()
            if message.expires and message.expires <= clock.utc():
                self.tally.expired += 1
                gone += message.octets
                continue
            octets += message.octets
            row = Row(message, grant, qos, packet_id, False)
            if qos:
                self.credit -= 1
                in_flight[packet_id] = row
            else:
                gone += message.octets
            rows.append(row)
        self._let_go(gone)
        if self._pace is not None:
            self._paced(len(rows))
        return rows

    def _let_go(self, octets: int) -> None:
        """So much is held no longer."""
        self._octets -= octets
        if self._tight:
            self._ease()

    def _ease(self) -> None:
        """Whoever waited for it may go on, if half of what it may hold has gone."""
        limits = self.limits
        if len(self) <= limits.messages_max // 2 and self._octets <= limits.octets_max // 2:
            self._tight = False
            self.patient = limits.holds
            self.pressure.relieve()

    def _hold_if_late(self, part: SubBatch) -> None:
        """Whoever publishes the part waits if the session is full, or what is in it will wait long."""
        if self.full:
            self._tight = True
            if self.limits.may_hold(self.user):
                self.pressure.hold_sources(part)
            else:  # the newest are dropped until half of what it holds has gone
                self.patient = False
        elif self._waiting is not None and len(self._waiting) >= PACED_MIN and self.limits.delay_secs:
            now = time.monotonic()
            if self._pace is None:
                self._pace = Pace(self.limits.delay_secs, PACED_MIN, now)
            if self._pace.behind(len(self), now) and self.limits.may_hold(self.user):
                self._pace.on = True
                self.pressure.hold_sources(part)

    def review_hold(self) -> None:
        """Let held publishers go on if the rules have changed and the session may not hold them any more."""
        if self.pressure and not self.limits.may_hold(self.user):
            if self._tight:
                self.patient = False
            if self._pace is not None:
                self._pace.on = False
            self.pressure.relieve()

    def _paced(self, taken: int) -> None:
        """The client was sent so many: whoever waited for it may go on when it has nearly caught up."""
        pace = self._pace
        if pace is not None:
            pace.taken += taken
            if pace.on and not pace.behind(len(self), time.monotonic()):
                self._unpace()

    def _unpace(self) -> None:
        if self._pace is not None:
            self._pace.on = False
            if not self._tight:
                self.pressure.relieve()

    def stalled(self, now: float) -> bool:
        """Its sources have waited `stall_secs` for a client that takes nothing; ask about once a second.

        They will not wait for it again before it has taken half of what a session may hold.
        """
        if not self.moved and self._pace is not None:
            self._unpace()  # who takes nothing is not waited for early
            self._pace = None
        if self.moved or not self.pressure:
            self.moved = False
            self._since = now
        elif now - self._since >= self.limits.stall_secs:
            self.patient = False
            return True
        return False

    def _rows_again(self) -> list[Row]:
        """Rows that were in flight on an earlier connection, under their old packet ids (§4.4)."""
        rows: list[Row] = []
        octets = 0
        while self._again and self.credit > 0 and len(rows) < ROWS_MAX and octets < ROWS_OCTETS_MAX:
            row = self._again.pop()
            self.credit -= 1
            octets += row.message.octets
            rows.append(row.said(before=True))
        return rows

    def attach(self, outlet: Outlet, receive_maximum: int) -> None:
        """A connection resumes the session: what was in flight is sent again first, in its order."""
        self.outlet = outlet
        self.credit = receive_maximum - len(self.released)
        self._again = [row for row in self.in_flight.values() if row.packet_id not in self.released]
        self._again.reverse()
        for packet_id in self.in_flight:
            if packet_id in self.released:
                outlet.send_release(packet_id)
        self.pump()

    def detach(self) -> None:
        """The connection is gone; nobody waits for it any longer."""
        self.outlet = None
        if not self._waiting:
            self._waiting = None
        self._pace = None
        self.pressure.relieve()

    def _wait(self, rows: Sequence[QueuedRow]) -> None:
        """These wait behind the others."""
        if rows:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.extend(rows)

    def hand(self, message: Message, grant: Grant, told: Told) -> None:
        """Owe a message that another member of a shared subscription owed until now."""
        self.offer([message], grant)
        told(ACCEPTED)

    @property
    def failing(self) -> bool:
        """True: it has to be on disk, and the disk takes nothing now."""
        return False

    def share(self, pass_on: PassOn) -> int:
        """Have others owe what this session owed of shared subscriptions, for its client is gone (5: 4.8.2).

        QoS 2 that was sent stays: the client may have it. Returns how many others stay, too.
        """
        left = 0
        for packet_id, row in list(self.in_flight.items()):
            if row.grant.shared and row.qos == 1:
                if self._passed(row.message, row.grant, self._position_of(packet_id), pass_on):
                    self._forget_in_flight(packet_id, row)
                else:
                    left += 1
        if any(grant.shared for _, grant, _ in self._waiting or ()):
            waiting, self._waiting = self._waiting, None
            for message, grant, position in waiting or ():
                owed = grant.shared and grant.qos and message.assurance
                if owed and self._passed(message, grant, position, pass_on):
                    self._let_go(message.octets)
                else:
                    left += bool(owed)
                    self._wait([(message, grant, position)])
        self.pump()
        return left

    def _passed(self, message: Message, grant: Grant, position: int, pass_on: PassOn) -> bool:
        """Have another session owe the message at this position."""
        return pass_on(message, grant, _nobody)

    def _position_of(self, packet_id: int) -> int:
        return UNKEPT

    def _forget_in_flight(self, packet_id: int, row: Row) -> None:
        """Forget a message in flight, which another session owes now."""
        self.finish(packet_id)

    def leave(self) -> Log | None:
        """The session ends. Return the log of what it owes, if that is for others to hand over."""
        return None

    def discarded(self) -> None:
        """The session has ended; nothing of it stays."""
        self._grant = None  # which knows the session
        self.received_ids.drop()

    def awaits(self, kind: PacketType, packet_id: int) -> bool:
        """False: the client acknowledges a delivery with another packet than that which is due for it.

        An id that is unknown may be from before; PUBREC may be said again until PUBCOMP.
        """
        if packet_id in self.released:
            return kind is not PacketType.PUBACK
        row = self.in_flight.get(packet_id)
        return row is None or kind is (PacketType.PUBACK if row.qos == 1 else PacketType.PUBREC)

    def received(self, packet_id: int) -> bool:
        """PUBREC came: the client has the message; PUBREL is next. False: the id is unknown."""
        if packet_id not in self.in_flight:
            return False
        self.released[packet_id] = None
        return True

    def finish(self, packet_id: int) -> bool:
        """The last acknowledgement of a message came. False: the id is unknown."""
        row = self.in_flight.pop(packet_id, None)
        if row is None:
            return False
        self.released.pop(packet_id, None)
        self.credit += 1
        self._octets -= row.message.octets
        if self._tight:
            self._ease()
        return True

    def _free_id(self) -> int:
        candidate = self._last_id
        in_flight = self.in_flight
        while True:
            candidate = candidate + 1 if candidate < PACKET_IDS else 1
            if candidate not in in_flight:
                self._last_id = candidate
                return candidate


def _nobody(outcome: Outcome) -> None:
    """Whoever passes it on has heard it."""

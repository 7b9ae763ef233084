"""A session: what one client is owed, whether it is connected or not.

Outgoing: messages wait in order, go out as the client's Receive Maximum allows, and stay in flight until the
last acknowledgement of their QoS. Incoming: the packet ids of QoS 2 messages that were taken but not
released.
The two directions have separate packet ids. A connection, while there is one, is the session's outlet.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from gateway.broker.pressure import Pressure
from gateway.model.batch import Part
from gateway.model.message import Message

PACKET_IDS: Final = 65_535
# Written in one go, so that a congested connection is noticed in time.
ROWS_MAX: Final = 256
ROWS_OCTETS_MAX: Final = 1_048_576


class Row(NamedTuple):
    """One PUBLISH to be written."""

    message: Message
    grant: Grant
    qos: int
    packet_id: int
    dup: bool


class Outlet(Protocol):
    """The connection through which a session speaks."""

    @property
    def congested(self) -> bool:
        """True: write nothing more now; `Session.pump` is called when it has drained."""

    def send(self, rows: list[Row]) -> list[Row]:
        """Encode the rows; returns those that cannot be said to this client, which the session forgets."""

    def send_release(self, packet_id: int) -> None:
        """Encode a PUBREL."""


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """How a subscription wants its messages (MQTT 5 §3.8.3.1)."""

    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0


class Grant:
    """What one session gets of a topic: its matching subscriptions, merged. It is a sink."""

    __slots__ = ("identifiers", "no_local", "qos", "retain_as_published", "retained", "session")

    def __init__(
        self, session: Session, options: list[SubscriptionOptions], *, retained: bool = False
    ) -> None:
        self.session = session
        self.retained = retained  # a retained message for a new subscription: it says so (§3.3.1.3)
        self.qos = max(option.qos for option in options)
        self.no_local = all(option.no_local for option in options)
        self.retain_as_published = any(option.retain_as_published for option in options)
        self.identifiers = tuple(sorted({option.identifier for option in options if option.identifier}))

    def _key(self) -> tuple[object, ...]:
        return (self.session.client_id, self.qos, self.no_local, self.retain_as_published, self.identifiers)

    def __eq__(self, other: object) -> bool:
        """Grants of one session with equal options are one lane, whatever their topics."""
        return isinstance(other, Grant) and other.session is self.session and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def publish(self, part: Part) -> None:
        """The session owes the messages now; that is what acceptance means here."""
        messages = part.messages
        if self.no_local:
            client = self.session.client_id
            messages = [message for message in messages if message.sender.client != client]
        session = self.session
        if session.outlet is not None and session.full:
            session.pressure.hold_sources(part)
        session.offer(messages, self)
        part.accept()


@dataclass(slots=True)
class SessionTally:
    """What sessions dropped, by reason; telemetry reads it."""

    queue_full: int = 0
    offline: int = 0
    expired: int = 0
    undeliverable: int = 0  # larger than the client takes, or malformed by their sender


@dataclass(slots=True)
class SessionLimits:
    """What one session may hold."""

    messages_max: int = 100_000  # waiting; beyond it the newest is dropped and counted
    octets_max: int = 256 * 1024 * 1024
    in_flight_max: int = 256  # towards a client that states no Receive Maximum


@dataclass(slots=True, eq=False)
class Session:
    """One client's subscriptions and what it is owed."""

    client_id: str
    limits: SessionLimits
    tally: SessionTally
    outlet: Outlet | None = None
    persistent: bool = False
    expires_at: float = 0.0  # monotonic; only while disconnected
    subscriptions: dict[str, SubscriptionOptions] = field(default_factory=dict)
    incoming: dict[int, bool] = field(
        default_factory=dict
    )  # QoS 2 ids; True: accepted, PUBREC may be said again
    in_flight: dict[int, Row] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)  # in flight, PUBREC came, PUBREL was sent
    credit: int = 0
    pressure: Pressure = field(default_factory=Pressure)
    _again: deque[Row] = field(default_factory=deque)  # in flight when the last connection was lost
    _waiting: deque[tuple[Message, Grant]] = field(default_factory=deque)
    _octets: int = 0
    _last_id: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """True: while the client is connected, its sources should stop reading."""
        return len(self._waiting) >= self.limits.messages_max or self._octets >= self.limits.octets_max

    def offer(self, messages: list[Message], grant: Grant) -> None:
        """Owe `messages` to the client. QoS 0 is for connected clients only.

        A connected client's sources are held at the limit, so only what cannot be held is dropped, at twice
        the limit. Of a client that is away the newest messages beyond the limit are dropped, and counted.
        """
        waiting = self._waiting
        if self.outlet is None:
            kept = (
                [message for message in messages if message.assurance and grant.qos]
                if self.persistent
                else []
            )
            self.tally.offline += len(messages) - len(kept)
            messages = kept
        stretch = 1 if self.outlet is None else 2
        room = self.limits.messages_max * stretch - len(waiting)
        if len(messages) > room or self._octets > self.limits.octets_max * stretch:
            room = max(room, 0) if self._octets <= self.limits.octets_max * stretch else 0
            self.tally.queue_full += len(messages) - room
            messages = messages[:room]
        waiting.extend([(message, grant) for message in messages])
        self._octets += sum([len(message.body) for message in messages])
        if self.outlet is not None:
            self.pump()

    def pump(self) -> None:
        """Write what waits, as far as credit and the connection allow."""
        outlet = self.outlet
        while outlet is not None and (self._waiting or self._again) and not outlet.congested:
            rows = self._next_rows()
            if not rows:
                return
            for row in outlet.send(rows):
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
        octets = 0
        while waiting and len(rows) < ROWS_MAX and octets < ROWS_OCTETS_MAX:
            message, grant = waiting[0]
            qos = message.assurance
            if qos > grant.qos:
                qos = grant.qos
            packet_id = 0
            if qos:
                if self.credit <= 0:
                    break
                packet_id = self._free_id()
            waiting.popleft()
            octets += len(message.body)
            if message.expires and message.expires <= time.time():
                self.tally.expired += 1
                continue
            row = Row(message, grant, qos, packet_id, False)
            if qos:
                self.credit -= 1
                in_flight[packet_id] = row
            rows.append(row)
        self._octets -= octets
        if self.pressure and len(waiting) <= self.limits.messages_max // 2:
            self.pressure.relieve()
        return rows

    def _rows_again(self) -> list[Row]:
        """Rows that were in flight on an earlier connection, under their old packet ids (§4.4)."""
        rows: list[Row] = []
        octets = 0
        while self._again and self.credit > 0 and len(rows) < ROWS_MAX and octets < ROWS_OCTETS_MAX:
            row = self._again.popleft()
            self.credit -= 1
            octets += len(row.message.body)
            rows.append(row._replace(dup=True))
        return rows

    def attach(self, outlet: Outlet, receive_maximum: int) -> None:
        """A connection resumes the session: what was in flight is sent again first, in its order."""
        self.outlet = outlet
        self.credit = receive_maximum - len(self.released)
        self._again = deque(row for row in self.in_flight.values() if row.packet_id not in self.released)
        for packet_id in self.in_flight:
            if packet_id in self.released:
                outlet.send_release(packet_id)
        self.pump()

    def detach(self) -> None:
        """The connection is gone; nobody waits for it any longer."""
        self.outlet = None
        self.pressure.relieve()

    def received(self, packet_id: int) -> bool:
        """PUBREC came: the client has the message; PUBREL is next. False: the id is unknown."""
        if packet_id not in self.in_flight:
            return False
        self.released.add(packet_id)
        return True

    def finish(self, packet_id: int) -> bool:
        """The last acknowledgement of a message came. False: the id is unknown."""
        if self.in_flight.pop(packet_id, None) is None:
            return False
        self.released.discard(packet_id)
        self.credit += 1
        return True

    def _free_id(self) -> int:
        candidate = self._last_id
        in_flight = self.in_flight
        while True:
            candidate = candidate + 1 if candidate < PACKET_IDS else 1
            if candidate not in in_flight:
                self._last_id = candidate
                return candidate

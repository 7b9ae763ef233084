"""MQTT session: the subscriptions of one client and its undelivered messages, connected or not.

Outgoing messages wait in order, are sent as the client's Receive Maximum allows, and stay in flight until the
last acknowledgement of their QoS. ReceivedIds has the packet ids of QoS 2 messages that were received and
whose PUBREL has not arrived. The two directions have separate packet ids. A connection, if there is one, is
the session's outlet. The session's size in bytes is that of the messages that wait or are in flight, until
the client has acknowledged them. These sessions end with the process; those of durable_session.py survive it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.broker.mqtt.received_ids import ReceivedIds
from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX, PIECE_STEPS_MAX, RetainedTopics
from gateway.broker.pressure import ConsumerRate, MayHold, Pressure, permit_always, reduced_limit
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.mqtt.spec import PacketType
from gateway.store.index import Log

log = structlog.get_logger(limited=True)

QOS: Final = 0x03
RETAIN_AS_PUBLISHED: Final = 0x04
RETAINED: Final = 0x08
SHARED: Final = 0x10
IDENTIFIER_BYTES: Final = 4
SHARED_AT_ONCE: Final = 200  # messages that a lost session passes to others, in about 5 ms


@dataclass(frozen=True)
class SubscriptionOptions:
    """Subscription options (MQTT 5 §3.8.3.1)."""

    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0


class Grant:
    """Destination of messages to one session: its subscriptions that match a topic, merged into one.

    `qos` is the highest QoS of these subscriptions, and `identifiers` has their Subscription Identifiers.
    """

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
        self.shared = shared  # filter of the shared subscription, if it belongs to one
        # For a retained message of a new subscription, which has RETAIN set (§3.3.1.3).
        self.retained = retained
        self.qos = max([option.qos for option in options])
        self.no_local = all(option.no_local for option in options)
        self.retain_as_published = any(option.retain_as_published for option in options)
        self.identifiers = tuple(sorted({option.identifier for option in options if option.identifier}))
        self._hash = hash(self._key())

    def unshared(self) -> Grant:
        """Return a copy that belongs to no shared subscription: its messages are not passed to others."""
        options = [
            SubscriptionOptions(self.qos, self.no_local, self.retain_as_published, identifier=identifier)
            for identifier in self.identifiers or (0,)
        ]
        return Grant(self.session, options, retained=self.retained)

    def is_of(self, options: SubscriptionOptions) -> bool:
        """Return True if a single subscription with these options would lead to an equal grant."""
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
        if other is self:
            return True
        return isinstance(other, Grant) and other.session is self.session and other._key() == self._key()

    def __hash__(self) -> int:
        return self._hash

    def publish(self, sub_batch: SubBatch) -> None:
        """Queue the messages of a sub-batch for the session's client. The session settles them."""
        self.session.take(sub_batch, self)

    def encode(self) -> bytes:
        """Encode the fields of the grant that are needed to send a stored message after a restart.

        One byte (bits 0 and 1: QoS, bit 2: retain as published, bit 3: retained, bit 4: shared), then each
        subscription identifier in 4 bytes, big-endian. A shared subscription has exactly one, 0 for none,
        followed by the filter in UTF-8.
        """
        first = self.qos | self.retain_as_published * RETAIN_AS_PUBLISHED | self.retained * RETAINED
        identifiers = [one.to_bytes(IDENTIFIER_BYTES, "big") for one in self.identifiers]
        if self.shared:
            identifiers = identifiers or [bytes(IDENTIFIER_BYTES)]
            return bytes((first | SHARED,)) + identifiers[0] + self.shared.encode()
        return bytes((first,)) + b"".join(identifiers)


def is_shared(data: bytes) -> bool:
    """Return True if this encoded grant belongs to a shared subscription."""
    return bool(data[0] & SHARED)


def qos_of(message: Message, data: bytes) -> int:
    """Return the QoS at which a stored message is sent; `data` is the encoded grant stored with it."""
    return min(message.assurance, data[0] & QOS)


def shared_filter(data: bytes) -> str:
    """Return the filter of a shared subscription from an encoded grant; "" if it is not shared."""
    return data[1 + IDENTIFIER_BYTES :].decode() if is_shared(data) else ""


def decode_grant(session: Session, data: bytes) -> Grant:
    """Decode a grant of `session` that `Grant.encode` has encoded.

    No-local is not restored: it was applied before the message was stored.
    """
    first = data[0]
    as_published = bool(first & RETAIN_AS_PUBLISHED)
    shared = ""
    if first & SHARED:
        shared = shared_filter(data)
        data = data[: 1 + IDENTIFIER_BYTES]
    options = [
        SubscriptionOptions(first & QOS, retain_as_published=as_published, identifier=identifier)
        for at in range(1, len(data), IDENTIFIER_BYTES)
        if (identifier := int.from_bytes(data[at : at + IDENTIFIER_BYTES], "big"))
    ]
    options = options or [SubscriptionOptions(first & QOS, retain_as_published=as_published)]
    return Grant(session, options, retained=bool(first & RETAINED), shared=shared)


class EndedSessionLog(NamedTuple):
    """Log of an ending session, of `byte_count` bytes.

    Messages at positions below `sent` may have been sent to its client.
    """

    log: Log
    sent: int
    byte_count: int


class PendingRetained(Protocol):
    """Retained messages that one new subscription has not received yet, wherever they are stored.

    They are read in pieces. `waits` is True while the next piece is not available; `Session.queue_retained`
    skips it then. `done` is True after the last piece.
    """

    grant: Grant
    done: bool
    waits: bool

    def next(self, most: int = PIECE_MESSAGES_MAX) -> list[Message]:
        """Return the next messages, at most `most`; the list may be empty before the last piece."""


class RetainedWalk:
    """Retained messages in this process's memory that one new subscription has not received yet.

    They are found in pieces, because a filter may match very many topics.
    """

    __slots__ = ("_pattern", "_place", "_retained", "done", "grant", "piece_place", "returns", "waits")

    def __init__(self, retained: RetainedTopics, pattern: list[str], grant: Grant) -> None:
        self.grant = grant
        self.done = False
        self.waits = False
        self._retained = retained
        self._pattern = pattern
        self._place: list[str] | None = None
        self.piece_place: list[str] | None = None  # where the last piece began
        self.returns = 0  # times that it went back

    def next(self, most: int = PIECE_MESSAGES_MAX) -> list[Message]:
        """Return at most `most` further messages. The list may be empty before the last piece."""
        self.piece_place = self._place
        found, self._place = self._retained.find(self._pattern, self._place, most, PIECE_STEPS_MAX)
        self.done = self._place is None
        return found

    def rewind(self, place: list[str] | None) -> None:
        """Continue at the topic `place` (its levels), because the piece that began there was refused."""
        self._place = place
        self.done = self.waits = False
        self.returns += 1


PACKET_IDS: Final = 65_535
WALKS_MAX: Final = 8  # walks through the retained messages, in one turn
UNKEPT: Final = -1  # position of a message that is in memory only
# Limits of what is written at once, so that a congested connection is noticed in time.
ROWS_MAX: Final = 256
ROWS_BYTES_MAX: Final = 1_048_576
LONG_AGO: Final = 1.0  # POSIX seconds
CHECKED_PER_SECOND: Final = 10_000  # waiting messages of one session that are checked for expired ones
PACED_MIN: Final = 2 * ROWS_MAX  # waiting messages; fewer are no delay


class OutgoingPublish:
    """PUBLISH packet to be sent. Immutable."""

    __slots__ = ("dup", "grant", "message", "packet_id", "qos")

    def __init__(self, message: Message, grant: Grant, qos: int, packet_id: int, dup: bool) -> None:
        self.message = message
        self.grant = grant
        self.qos = qos
        self.packet_id = packet_id
        self.dup = dup

    def unshared(self) -> OutgoingPublish:
        """Return this packet with a grant that belongs to no shared subscription."""
        return OutgoingPublish(self.message, self.grant.unshared(), self.qos, self.packet_id, self.dup)

    def with_dup(self, *, before: bool) -> OutgoingPublish:
        """Return this packet with the DUP flag set to `before`: True if it may have been sent before."""
        return OutgoingPublish(self.message, self.grant, self.qos, self.packet_id, before)


class SessionOutlet(Protocol):
    """Connection that sends for a session."""

    @property
    def congested(self) -> bool:
        """True while the session should send nothing, because the connection's buffer is full.

        The connection calls `Session.pump` when its buffer has drained.
        """

    def send(self, rows: list[OutgoingPublish]) -> list[OutgoingPublish]:
        """Encode and send PUBLISH packets. Return those that cannot be encoded, which the session drops.

        Raises only for faults of the connection itself.
        """

    def handle_error(self, error: Exception) -> None:
        """Handle an error that `send` has raised.

        The connection counts as congested until it is closed at the end of the pass of the event loop.
        """

    def send_release(self, packet_id: int) -> None:
        """Send a PUBREL with this packet id."""

    def send_received(self, packet_id: int) -> None:
        """Send a PUBREC with this packet id."""

    def send_due_retained(self) -> None:
        """Continue to send the retained messages that the session has not received for its subscriptions."""

    def require_ticks(self) -> None:
        """Call `Session.has_stalled` once a second from now on, because publishers wait for the session."""


@dataclass
class SessionTally:
    """Counts of messages that sessions dropped, by reason, for metrics."""

    queue_full: int = 0
    offline: int = 0
    expired: int = 0
    undeliverable: int = 0  # larger than the client's maximum packet size, or malformed by their sender
    unshared: int = 0  # of a shared subscription: no other member could or may have them


@dataclass
class SessionLimits:
    """Limits of one session."""

    messages_max: int = 100_000  # waiting; beyond it the newest is dropped and counted
    bytes_max: int = 256 * 1024 * 1024
    in_flight_max: int = 256  # for a client without a Receive Maximum
    memory_messages_max: int = 100_000  # of a session on disk; more messages wait there alone
    memory_bytes_max: int = 64 * 1024 * 1024
    # At the limit the sources of a connected client are paused; otherwise the newest is dropped.
    holds: bool = True
    may_hold: MayHold = permit_always  # by user: may such a session pause sources, with `holds`
    stall_secs: float = 30.0  # how long, if the client accepts nothing
    # Waiting time for an active client beyond which its sources are paused; 0 for never.
    delay_secs: float = 0.015
    listeners: frozenset[str] = frozenset()  # endpoints of MQTT, whose client ids are those of sessions


QueuedRow = tuple[Message, Grant, int]
"""Message that waits for the client, its grant, and its position in the log, or UNKEPT without one."""
OutcomeCallback = Callable[[Outcome], None]
"""Callback that gets ACCEPTED when a session has queued a message safely, and otherwise the reason."""
PassOn = Callable[[Message, Grant, OutcomeCallback], bool]
"""Function that queues a message at another session. Returns False if no session accepts it."""


class Session:
    """Subscriptions and undelivered messages of one client."""

    __slots__ = (
        "_again",
        "_allowed",
        "_byte_count",
        "_grant",
        "_is_unread",
        "_last_id",
        "_last_progress",
        "_lossy",
        "_pace",
        "_rests_until",
        "_soonest",
        "_tight",
        "_waiting",
        "client_id",
        "credit",
        "expires_at",
        "expiry_secs",
        "has_progressed",
        "in_flight",
        "limits",
        "may_pause_sources",
        "outlet",
        "place",
        "pressure",
        "purge_at",
        "received_ids",
        "released",
        "shares",
        "subscriptions",
        "tally",
        "user",
        "walks",
    )
    is_durable: ClassVar[bool] = False  # True if the store has it

    def __init__(
        self, client_id: str, limits: SessionLimits, tally: SessionTally, *, user: str = "", place: str = ""
    ) -> None:
        """Create a session of `user`, opened from the address `place`.

        It counts toward the limits per user and per address.
        """
        self.client_id = client_id
        self.limits = limits
        self.tally = tally
        self.user = user
        self.place = place
        self.outlet: SessionOutlet | None = None
        self.expiry_secs = 0.0  # seconds by which it outlives its connection
        self.expires_at = 0.0  # monotonic; only while disconnected
        self.subscriptions: dict[str, SubscriptionOptions] = {}
        self.received_ids = ReceivedIds()
        self.in_flight: dict[int, OutgoingPublish] = {}
        self.walks: dict[str, PendingRetained] = {}  # retained messages still to be sent, by filter
        self.released: dict[int, None] = {}  # in flight, after PUBREC, with PUBREL sent
        self.shares = False  # it has been a member of a shared subscription
        self.credit = 0
        self.pressure = Pressure()
        # Its sources may be paused; after a stall only once half of its content was sent.
        self.may_pause_sources = limits.holds
        self.has_progressed = False  # something was sent since the last call of `has_stalled`
        self._is_unread = False  # the gateway did not read from the client at a call since then
        self._last_progress = 0.0  # monotonic
        # In flight when the last connection was lost and not resent yet, by packet id; they take credit then.
        self._again: dict[int, OutgoingPublish] = {}
        self._waiting: deque[QueuedRow] | None = None  # an empty one takes 760 bytes, of each session
        self._byte_count = 0  # that wait or are in flight
        self._tight = False  # publishers are paused, it has stalled, or copies were dropped
        self._lossy = False  # copies were dropped since it last had space
        self._pace: ConsumerRate | None = (
            None  # of the client, since much has waited for it; most never need it
        )
        self._last_id = 0
        # When `drop_expired` is due (POSIX seconds): the client is disconnected, much waits, and some of it
        # may have expired. NEVER: it is not.
        self.purge_at = NEVER
        self._soonest = NEVER  # no message that waits expires earlier; only while disconnected
        self._rests_until = NEVER  # no check before this time, because it examines all messages
        # The last grant of a single subscription: most messages have the same.
        self._grant: Grant | None = None
        # Original limits, while `limits` are reduced because its owner occupies too much memory.
        self._allowed: SessionLimits | None = None

    def __len__(self) -> int:
        return 0 if self._waiting is None else len(self._waiting)

    @property
    def persistent(self) -> bool:
        """True if the session outlives its connection."""
        return self.expiry_secs > 0

    @property
    def full(self) -> bool:
        """True if publishers should pause while the client is connected, because a limit is reached."""
        return len(self) >= self.limits.messages_max or self._byte_count >= self.limits.bytes_max

    @property
    def in_memory(self) -> int:
        """Size in bytes of the messages in memory that wait or are in flight."""
        return self._byte_count

    def restrain(self, on: bool) -> None:
        """Limit the session's memory because its owner's messages occupy too much (`on`), or lift that limit.

        A repeated call has no effect.
        """
        if on and self._allowed is None:
            self._allowed = self.limits
            self.limits = self._restrained_limits(self.limits)
        elif not on and self._allowed is not None:
            self.limits, self._allowed = self._allowed, None
            if self._tight:
                self._resume_sources()

    def _restrained_limits(self, limits: SessionLimits) -> SessionLimits:
        return replace(limits, bytes_max=reduced_limit(limits.bytes_max, self._byte_count))

    @property
    def send_capacity(self) -> int:
        """Number of messages that would be sent at once; 0 if the client is disconnected or does not read."""
        if self.outlet is None or self.outlet.congested:
            return 0
        return max(self.credit - len(self), 0)

    @property
    def space(self) -> int:
        """Number of messages that can be queued before the session is full."""
        return 0 if self.full else self.limits.messages_max - len(self)

    def grant_for(self, options: SubscriptionOptions) -> Grant:
        """Return the grant for topics that match only one subscription of this session (with `options`)."""
        grant = self._grant
        if grant is None or not grant.is_of(options):
            grant = self._grant = Grant(self, [options])
        return grant

    def take(self, sub_batch: SubBatch, grant: Grant) -> None:
        """Queue the messages of a sub-batch for the client, and accept them.

        `grant` has the options of the session's subscriptions that match.
        """
        messages = self._without_own(sub_batch.messages, grant)
        if self.outlet is not None and self.may_pause_sources:
            self._hold_if_late(sub_batch)
        self.offer(messages, grant)
        sub_batch.accept()

    def _without_own(self, messages: list[Message], grant: Grant) -> list[Message]:
        """Return the messages that the client may get: with no-local, none that it has published itself."""
        return [one for one in messages if not self._is_own(one)] if grant.no_local else messages

    def _is_own(self, message: Message) -> bool:
        """Return True if the session's client has published the message.

        The client of a link, or of another protocol, may have the same name.
        """
        sender = message.sender
        return sender.client == self.client_id and sender.endpoint in self.limits.listeners

    def offer(self, messages: list[Message], grant: Grant) -> None:
        """Queue `messages` for the client; messages of QoS 0 only while it is connected.

        While the client is connected, publishers are paused at the session's limit. Messages of publishers
        that cannot be paused are dropped at twice the limit. If the client is disconnected or stalled, new
        messages beyond the limit are dropped and counted.
        """
        if self.outlet is None:
            eligible = (
                [message for message in messages if message.assurance and grant.qos]
                if self.persistent
                else []
            )
            self.tally.offline += len(messages) - len(eligible)
            messages = eligible
        messages = self._within_limits(messages)
        self._wait([(message, grant, UNKEPT) for message in messages])
        self._byte_count += weight_of(messages)
        if self.outlet is not None:
            self.pump()

    def queue_retained(self) -> bool:
        """Queue more retained messages for new subscriptions, if few messages wait for the client.

        Return False if none can be read now: there are none, they are not available yet, or the client cannot
        receive more.
        """
        outlet = self.outlet
        if outlet is None or outlet.congested or len(self) >= PIECE_MESSAGES_MAX or not self.walks:
            return False
        remaining, moved = PIECE_MESSAGES_MAX, False
        for topic_filter in list(islice(self.walks, WALKS_MAX)):
            walk = self.walks[topic_filter]
            if walk.waits or not self._may_walk(walk):
                continue
            moved = True
            messages = walk.next(remaining)
            if messages:
                self._queue_retained(walk, messages)
                remaining -= len(messages)
            if walk.done:
                self._finish_walk(topic_filter, walk)
            if remaining <= 0 or not (walk.done or walk.waits):
                break
        return moved

    def _may_walk(self, walk: PendingRetained) -> bool:
        """Return True if the session can receive the retained messages that `walk` yields now.

        Always True in this class. Overridden for sessions that store messages, which return False while the
        disk fails.
        """
        return True

    def _queue_retained(self, walk: PendingRetained, messages: list[Message]) -> None:
        """Queue retained messages, which `walk` has yielded, for the client."""
        self.offer(messages, walk.grant)

    def _finish_walk(self, topic_filter: str, walk: PendingRetained) -> None:
        """End the delivery of retained messages for a subscription, because all of them are queued."""
        self.end_retained(topic_filter)

    @property
    def has_retained_to_queue(self) -> bool:
        """True if `queue_retained` can read retained messages for new subscriptions now."""
        return any(not walk.waits for walk in islice(self.walks.values(), WALKS_MAX))

    def end_retained(self, topic_filter: str) -> None:
        """End the delivery of retained messages for the subscription with this filter."""
        self.walks.pop(topic_filter, None)

    def _within_limits(self, messages: list[Message]) -> list[Message]:
        """Return the first messages, as many as the limits allow; count and log the others as dropped."""
        if self.outlet is None:
            self._note_expiry(messages)
            self._plan_purge(len(messages))
        stretch = 1 if self.outlet is None or not self.may_pause_sources else 2
        room = self.limits.messages_max * stretch - len(self)
        if len(messages) > room or self._byte_count > self.limits.bytes_max * stretch:
            room = max(room, 0) if self._byte_count <= self.limits.bytes_max * stretch else 0
            self.tally.queue_full += len(messages) - room
            messages = messages[:room]
            if not self._lossy:  # no further log line before half of its messages were sent
                self._tight = self._lossy = True
                log.warning("session full, messages dropped", client=self.client_id, user=self.user)
        return messages

    # Expired messages of a disconnected client, which would take the place of others.

    def _note_expiry(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.expires and (not self._soonest or message.expires < self._soonest):
                self._soonest = message.expires

    def _plan_purge(self, coming: int = 0) -> None:
        """Set `purge_at`, the time of the next check for expired messages; NEVER unless a limit is half used.

        `coming` is the number of messages that are about to be queued.
        """
        limits = self.limits
        half_full = (
            2 * (len(self) + coming) >= limits.messages_max or 2 * self._byte_count >= limits.bytes_max
        )
        self.purge_at = max(self._soonest, self._rests_until) if half_full and self._soonest else NEVER

    def drop_expired(self) -> None:
        """Drop the expired messages that wait for a disconnected client, and count them."""
        self.purge_at = NEVER
        if self.outlet is not None:
            return
        utc = clock.utc()
        self._soonest = NEVER
        self._rests_until = utc + len(self) / CHECKED_PER_SECOND
        byte_count = 0
        waiting, self._waiting = self._waiting or (), None
        for row in waiting:
            message, _, position = row
            if message.expires and message.expires <= utc:
                self.tally.expired += 1
                byte_count += message.byte_count
                if position != UNKEPT:
                    self._settle_expired(row)
            else:
                self._note_expiry((message,))
                self._wait((row,))
        self._subtract_bytes(byte_count)
        self._plan_purge()

    @property
    def is_checking(self) -> bool:
        """True while `drop_expired` continues in the background."""
        return False

    def _settle_expired(self, row: QueuedRow) -> None:
        """Settle a waiting message that is in the store, because it has expired.

        This class does nothing: only durable sessions have messages in the store.
        """

    def pump(self) -> None:
        """Send waiting messages, as far as the client's Receive Maximum and the connection allow."""
        outlet = self.outlet
        while outlet is not None and (self._waiting or self._again) and not outlet.congested:
            rows = self._next_rows()
            if not rows:
                return
            self.has_progressed = True
            try:
                unsaid = outlet.send(rows)
            except Exception as error:  # what is in flight is sent again on the next connection
                outlet.handle_error(error)
                return
            for row in unsaid:
                self.tally.undeliverable += 1
                if row.qos:
                    self.complete_delivery(row.packet_id)

    def _next_rows(self) -> list[OutgoingPublish]:
        """Remove the next messages from the queue, and return them as PUBLISH packets to be sent.

        Their number is limited by the client's credit (Receive Maximum), ROWS_MAX and ROWS_BYTES_MAX. Expired
        messages are dropped. Packets of QoS 1 and 2 are in flight from now on.
        """
        if self._again:
            return self._rows_to_resend()
        rows: list[OutgoingPublish] = []
        waiting = self._waiting
        in_flight = self.in_flight
        byte_count = dropped_bytes = 0
        while waiting and len(rows) < ROWS_MAX and byte_count < ROWS_BYTES_MAX:
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
                dropped_bytes += message.byte_count
                continue
            byte_count += message.byte_count
            row = OutgoingPublish(message, grant, qos, packet_id, False)
            if qos:
                self.credit -= 1
                in_flight[packet_id] = row
            else:
                dropped_bytes += message.byte_count
            rows.append(row)
        self._subtract_bytes(dropped_bytes)
        if self._pace is not None:
            self._count_paced(len(rows))
        return rows

    def _subtract_bytes(self, byte_count: int) -> None:
        """Subtract the bytes of messages that left the session, and resume publishers if it has drained."""
        self._byte_count -= byte_count
        if self._tight:
            self._resume_sources()

    def _resume_sources(self) -> None:
        """Resume paused publishers if at least half of the limits is free."""
        limits = self.limits
        if len(self) <= limits.messages_max // 2 and self._byte_count <= limits.bytes_max // 2:
            self._tight = self._lossy = False
            self.may_pause_sources = limits.holds
            self.pressure.resume_sources()

    def _hold_if_late(self, sub_batch: SubBatch) -> None:
        """Pause the publishers of a sub-batch if the session is full, or its messages would wait too long."""
        if self.full:
            self._tight = True
            if self.limits.may_hold(self.user):
                self._hold_sources(sub_batch)
            else:  # the newest are dropped until half of its content was sent
                self.may_pause_sources = False
        elif self._waiting is not None and len(self._waiting) >= PACED_MIN and self.limits.delay_secs:
            now = clock.monotonic()
            if self._pace is None:
                self._pace = ConsumerRate(self.limits.delay_secs, PACED_MIN, now)
            if self._pace.is_behind(len(self), now) and self.limits.may_hold(self.user):
                self._pace.on = True
                self._hold_sources(sub_batch)

    def _hold_sources(self, sub_batch: SubBatch) -> None:
        if not self.pressure:
            self.has_progressed = True  # `stall_secs` begin now, and not at the last call of `has_stalled`
            if self.outlet is not None:
                self.outlet.require_ticks()
        self.pressure.hold_sources(sub_batch)

    def review_hold(self) -> None:
        """Resume paused publishers if changed rules no longer let the session's user pause publishers."""
        if self.pressure and not self.limits.may_hold(self.user):
            if self._tight:
                self.may_pause_sources = False
            if self._pace is not None:
                self._pace.on = False
            self.pressure.resume_sources()

    def _count_paced(self, count: int) -> None:
        """Count sent messages, and resume publishers that were paused because messages waited too long."""
        pace = self._pace
        if pace is not None:
            pace.consumed_count += count
            if pace.on and not pace.is_behind(len(self), clock.monotonic()):
                self._end_pacing()

    def _end_pacing(self) -> None:
        if self._pace is not None:
            self._pace.on = False
            if not self._tight:
                self.pressure.resume_sources()

    @property
    def is_at_rest(self) -> bool:
        """True if `has_stalled` need not be called until the outlet's `require_ticks` is called."""
        return self._pace is None and not self.has_progressed and not self.pressure

    def has_stalled(self, now: float, *, is_read: bool = True) -> bool:
        """Return True if publishers were paused for `stall_secs` while nothing was sent to the client.

        Must be called once a second, unless `is_at_rest`, with `now` in monotonic seconds. After
        `stall_secs`, the session pauses no publisher until half of its limits is free. `is_read` is False if
        the gateway does not read from the client now, so that an acknowledgement may be unread. The result is
        False if this was so at any call since something was last sent, because the client may not be the
        cause.
        """
        if not self.has_progressed and self._pace is not None:
            self._end_pacing()  # sources do not wait early for an inactive client
            self._pace = None
        if self.has_progressed or not self.pressure:
            self.has_progressed = False
            self._last_progress = now
            self._is_unread = not is_read
            return False
        self._is_unread = self._is_unread or not is_read
        if now - self._last_progress < self.limits.stall_secs:
            return False
        self.may_pause_sources = False
        if self._is_unread:
            self.pressure.resume_sources()
        return not self._is_unread

    def _rows_to_resend(self) -> list[OutgoingPublish]:
        """Return the next packets to resend with DUP, which were in flight on an earlier connection.

        They have their old packet ids (MQTT 5 §4.4). Their number is limited by the client's credit, ROWS_MAX
        and ROWS_BYTES_MAX.
        """
        rows: list[OutgoingPublish] = []
        byte_count = 0
        for row in islice(self._again.values(), max(min(self.credit, ROWS_MAX), 0)):
            rows.append(row)
            byte_count += row.message.byte_count
            if byte_count >= ROWS_BYTES_MAX:
                break
        for row in rows:
            del self._again[row.packet_id]
        self.credit -= len(rows)
        return rows

    def _cancel_resend(self, packet_id: int) -> None:
        """Remove an acknowledged message from those to be resent on this connection.

        If the message was not resent yet, it has used no credit (Receive Maximum), and none is returned for
        it.
        """
        row = self._again.pop(packet_id, None)
        if row is not None and row.dup:
            self.credit -= 1

    def attach(self, outlet: SessionOutlet, receive_maximum: int) -> None:
        """Attach a connection, and first resend the messages that were in flight, in their order."""
        self.outlet = outlet
        self.credit = receive_maximum - len(self.released)
        self._again = {
            packet_id: row.with_dup(before=True)
            for packet_id, row in self.in_flight.items()
            if packet_id not in self.released
        }
        for packet_id in self.in_flight:
            if packet_id in self.released:
                outlet.send_release(packet_id)
        self.pump()

    def detach(self) -> None:
        """Detach the connection, and resume the publishers that waited for it."""
        self.outlet = None
        if not self._waiting:
            self._waiting = None
        self._pace = None
        self.pressure.resume_sources()
        self._expect_expired()

    def _expect_expired(self) -> None:
        """Schedule a check for expired messages if many messages wait.

        Expiry times are not tracked while a client is connected, so any message may have expired.
        """
        if len(self):
            self._soonest = LONG_AGO
            self._plan_purge()

    def _wait(self, rows: Sequence[QueuedRow]) -> None:
        if rows:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.extend(rows)

    def queue_transferred(self, message: Message, grant: Grant, on_outcome: OutcomeCallback) -> None:
        """Queue a message of a shared subscription that another member of the group could not deliver.

        Calls `on_outcome` with the outcome.
        """
        self.offer([message], grant)
        on_outcome(ACCEPTED)

    @property
    def failing(self) -> bool:
        """True if the session must store messages on disk and the disk fails."""
        return False

    def share(self, pass_on: PassOn) -> Iterator[tuple[int, int]]:
        """Pass undelivered messages of shared subscriptions of a lost client to other sessions (5: 4.8.2).

        `pass_on` queues a message at another session, and returns False if none accepts it; the message then
        stays here. Messages sent at QoS 2 stay, too, because the client may have them. Yields (examined,
        unshared) now and then: how many messages were examined since the last yield, and how many of these
        were not accepted. The client must not reconnect meanwhile.
        """
        in_flight = list(self.in_flight.items())
        for start in range(0, len(in_flight), SHARED_AT_ONCE):
            unshared = 0
            for packet_id, row in in_flight[start : start + SHARED_AT_ONCE]:
                if row.grant.shared and row.qos == 1 and self.in_flight.get(packet_id) is row:
                    if self._pass_to_other(row.message, row.grant, self._position_of(packet_id), pass_on):
                        self._forget_in_flight(packet_id, row)
                    else:
                        unshared += 1
            yield min(len(in_flight) - start, SHARED_AT_ONCE), unshared
        if any(grant.shared for _, grant, _ in self._waiting or ()):
            yield from self._share_waiting(pass_on)

    def _share_waiting(self, pass_on: PassOn) -> Iterator[tuple[int, int]]:
        kept = count = 0  # the first messages stay; so many messages were left the last time
        while self._waiting:
            waiting = self._waiting
            if len(waiting) != count:  # it has changed since
                kept = 0
            if kept >= len(waiting):
                return
            waiting.rotate(-kept)
            rows = [waiting.popleft() for _ in range(min(len(waiting) - kept, SHARED_AT_ONCE))]
            stay: list[QueuedRow] = []
            unshared = 0
            for row in rows:
                message, grant, position = row
                is_owed = grant.shared and grant.qos and message.assurance
                is_owed = is_owed and not self._was_sent_at_qos_2(message, grant, position)
                if is_owed and self._pass_to_other(message, grant, position, pass_on):
                    self._subtract_bytes(message.byte_count)
                else:
                    unshared += bool(is_owed)
                    stay.append(row)
            waiting.extendleft(reversed(stay))
            waiting.rotate(kept)
            kept += len(stay)
            count = len(waiting)
            yield len(rows), unshared

    def unfinished_count(self) -> int:
        """Return how many messages of shared subscriptions were sent at QoS 2 and have no PUBREC yet.

        They are lost when the session ends, because no other client may get them ([MQTT-4.8.2-5]).
        """
        return sum(
            row.qos == 2 and row.grant.shared != "" and packet_id not in self.released
            for packet_id, row in self.in_flight.items()
        )

    def _pass_to_other(self, message: Message, grant: Grant, position: int, pass_on: PassOn) -> bool:
        """Pass the message at this position to another session. Return False if none accepts it."""
        return pass_on(message, grant, _ignore_outcome)

    def _position_of(self, packet_id: int) -> int:
        return UNKEPT

    def _forget_in_flight(self, packet_id: int, row: OutgoingPublish) -> None:
        """Drop a message in flight that was passed to another session."""
        self.complete_delivery(packet_id)

    def _was_sent_at_qos_2(self, message: Message, grant: Grant, position: int) -> bool:
        """Return True if this waiting message may have been sent at QoS 2 before a restart."""
        return False

    def detach_log(self) -> EndedSessionLog | None:
        """Return the log of an ending session, if other sessions must deliver its messages.

        Returns None in this class: only durable sessions have a log.
        """
        return None

    def discarded(self) -> None:
        """Release the session's references and received packet ids, because the session has ended."""
        self._grant = None  # it refers to the session
        self.received_ids.drop()

    def expects_ack(self, kind: PacketType, packet_id: int) -> bool:
        """Return False if the client acknowledges a message with a packet type that is not expected now.

        Returns True for an unknown packet id, because the acknowledgement may be an old one. PUBREC may be
        repeated until PUBCOMP.
        """
        if packet_id in self.released:
            return kind is not PacketType.PUBACK
        row = self.in_flight.get(packet_id)
        return row is None or kind is (PacketType.PUBACK if row.qos == 1 else PacketType.PUBREC)

    def may_resend(self, packet_id: int) -> bool:
        """Return True if a message sent with this packet id before a restart may still wait to be resent.

        Always False in this class, whose messages do not survive a restart.
        """
        return False

    def handle_pubrec(self, packet_id: int) -> bool:
        """Process PUBREC for this packet id: the client has the message, and PUBREL must be sent.

        Return False if the packet id is unknown.
        """
        if packet_id not in self.in_flight:
            return False
        self.released[packet_id] = None
        if self._again:
            self._cancel_resend(packet_id)
        return True

    def complete_delivery(self, packet_id: int) -> bool:
        """Process the last acknowledgement of a message (PUBACK or PUBCOMP), which ends its delivery.

        Return False if the packet id is unknown.
        """
        row = self.in_flight.pop(packet_id, None)
        if row is None:
            return False
        self.released.pop(packet_id, None)
        self.credit += 1
        if self._again:
            self._cancel_resend(packet_id)
        self._byte_count -= row.message.byte_count
        if self._tight:
            self._resume_sources()
        return True

    def _free_id(self) -> int:
        candidate = self._last_id
        in_flight = self.in_flight
        while True:
            candidate = candidate + 1 if candidate < PACKET_IDS else 1
            if candidate not in in_flight:
                self._last_id = candidate
                return candidate


def _ignore_outcome(outcome: Outcome) -> None:
    """Ignore the outcome, which was reported already."""

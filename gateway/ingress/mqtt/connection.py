"""One MQTT client: what its packets do on the broker, and how the broker's answers reach it.

What a client is told of its session must be on disk before. CONNACK, SUBACK, UNSUBACK and the end after a
DISCONNECT hold back all output until the commit that they depend on; acknowledgements of QoS 2 wait by
themselves. A commit that fails ends the connection: the client was told nothing, and will ask again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final

import structlog

from gateway import clock
from gateway.access.authorization import CurrentRights
from gateway.access.rights import Rights
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.mqtt.session import Row, Session, SubscriptionOptions
from gateway.broker.mqtt.shared import shared_pattern
from gateway.broker.poison import poisoned
from gateway.broker.routing import NOWHERE, RoutingEntry
from gateway.errors import RemoteProtocolError
from gateway.ingress.guest import Farewell, InFlight
from gateway.ingress.mqtt.acknowledgements import Answers, acknowledged
from gateway.ingress.mqtt.admission import AdmittedGuest
from gateway.ingress.mqtt.bursts import BURST_MIN, Burst, burst_in
from gateway.ingress.mqtt.guest import Receipt
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.ingress.mqtt.publish_checks import (
    NOT_TEXT,
    TOO_LARGE,
    UTF8,
    WHOLE_OFFER,
    Offer,
    check_publish,
    is_what_it_says,
    topic_refusal,
)
from gateway.ingress.mqtt.retries import Retries
from gateway.ingress.mqtt.routing_table import DeniedEntry
from gateway.ingress.source import RouteRefused
from gateway.ingress.waiting_publishes import EVERY_CHANNEL, WaitingPublishes, finish
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED, FINAL, Outcome, Reason, Verdict
from gateway.model.pending import Awaited, Pending
from gateway.model.properties import NO_PROPERTIES, PropertySet
from gateway.model.spooled import Piece, Withheld
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.octets import decode_topic, is_filter
from gateway.protocols.mqtt.packets import (
    Acks,
    Auth,
    Connect,
    Disconnect,
    Event,
    Oversized,
    Pingreq,
    Publishes,
    PublishRow,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from gateway.protocols.mqtt.reason_codes import SUBSCRIBE_REFUSED, publish_refused
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version, reason_name
from gateway.protocols.mqtt.translate import NOTHING_SAID, encode_properties, publish_essentials
from gateway.transport.stream import Stream

# A global name costs a quarter of an enum's attribute, and these are on the way of every message.
OPEN: Final = State.OPEN
log = structlog.get_logger(limited=True)
FILTER_BYTES: Final = 128  # of a topic filter that waits, besides its text
FAREWELLS: Final = {
    Farewell.EXPIRED: ReasonCode.NOT_AUTHORIZED,
    Farewell.REVOKED: ReasonCode.NOT_AUTHORIZED,
    Farewell.UNSERVED: ReasonCode.SERVER_BUSY,
    Farewell.RULES_CHANGED: ReasonCode.NOT_AUTHORIZED,
}


def _size_of(event: Event) -> int:
    """Return the bytes of memory of the filters in an event."""
    if isinstance(event, Subscribe):
        return sum([len(one.filter) + FILTER_BYTES for one in event.subscriptions])
    return sum([len(one) + FILTER_BYTES for one in event.filters]) if isinstance(event, Unsubscribe) else 0


class BegunPacket:
    """How far a SUBSCRIBE or UNSUBSCRIBE is that is done in more than one turn."""

    __slots__ = ("reasons", "recorded")

    def __init__(self, recorded: int) -> None:
        self.recorded = recorded  # `namespace.recorded` before it
        self.reasons: list[int] = []  # of its first filters


class MqttConnection(AdmittedGuest):
    """The owner of one client's stream, and its session's outlet."""

    __slots__ = (
        "_answers",
        "_awaits_ids",
        "_begun",
        "_current_rights",
        "_deadline",
        "_elsewhere",
        "_entries",
        "_generation",
        "_let_ids",
        "_let_publish",
        "_pubacks",
        "_pubrecs",
        "_retries",
        "_unreleased",
        "_yields",
        "offer",
        "rights",
        "unsettled",
        "waiting",
    )

    def __init__(self, ingress: MqttIngress, stream: Stream, now: float) -> None:
        limits = ingress.limits
        machine = ServerConnection(
            packet_bytes_max=limits.message_bytes_max + limits.connect_bytes_max,
            announced_bytes_max=limits.message_bytes_max,
            connect_bytes_max=limits.connect_bytes_max,
            byte_order=ingress.byte_order,
            topic_alias_max=limits.topic_alias_max,
            receive_max=limits.inflight_max,
            bounds=ingress.bounds,
        )
        super().__init__(ingress, stream, machine)
        self.unsettled = 0
        self._entries: dict[bytes, RoutingEntry] = {}
        self._generation = -1  # of the dispatcher, when the entries were looked up
        self.waiting: WaitingPublishes[Event] = WaitingPublishes(stream)
        self._let_publish: Callable[[], None] | None = None  # None: the client is not held
        self._let_ids: Callable[[], None] | None = None  # None: no ids of QoS 2 are waited for
        self._awaits_ids = False  # they have been, and may be again
        self._pubacks: list[int] | None = None  # None: none has gathered
        self._pubrecs: list[int] | None = None
        self._retries: Retries | None = None  # None: nothing has been refused
        self._unreleased: set[int] | None = None  # QoS 2 on this connection: PUBREC was due, PUBREL is
        self.rights: Rights | None = None
        self._current_rights = CurrentRights(ingress.authorization)
        self.offer: Offer | None = None  # None: everything is offered
        self._elsewhere = False  # the client is at another replica, and has a moment for its goodbye here
        self._yields = True  # what it was owed of shared subscriptions, when it is lost
        self._deadline = now + limits.connect_timeout_secs
        self._answers: Answers | None = None  # None: no acknowledgement waits for the disk
        self._begun: BegunPacket | None = None  # a packet with filters that is done in more than one turn

    # What it may do.

    def current_rights(self) -> Rights:
        """As the rules are now."""
        rights = self._current_rights.of(self.principal, self.sender.client)
        if rights is not self.rights:
            self.rights = rights
            offer = self._ingress.offer_to(rights)
            self.offer = None if offer == WHOLE_OFFER else offer
        return rights

    def renew_rights(self) -> None:
        """The client has proved anew who it is, and perhaps with other rights."""
        self._current_rights.forget()
        self._generation = -1
        with suppress(Pending):  # what it holds it keeps until it is known otherwise
            self.rules_changed()

    def rules_changed(self) -> None:
        """Other rules are in force: what is not allowed any more ends, and the client is let go for it, since
        MQTT has no word for less."""
        if self.session is None or self.machine.state is not OPEN:
            return
        rights = self.current_rights()
        decision = rights.enters_mqtt()
        if decision.allowed:
            decision = rights.has_client_id(self.sender.client)
        if not decision.allowed:
            self._ingress.denied(self.sender, "connect", self.sender.client, decision.rule)
        if self._ingress.drop_forbidden(self.session, rights, self.sender) or not decision.allowed:
            self._ingress.let_go(self, ReasonCode.NOT_AUTHORIZED)

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived, or its turn has come for what was left; a client's fault ends this connection and
        is counted.
        """
        try:
            machine = self.machine
            events = self.stream.postponed() or machine.receive_data(data, now)
            while True:
                if self.waiting.on:
                    events = self._without_waiting(events)
                for number, event in enumerate(events, 1):
                    if isinstance(event, Publishes):
                        if rows := self._publishes(event.rows):
                            self.stream.postpone([Publishes(rows), *events[number:]])
                            return
                    elif isinstance(event, Oversized):
                        self._oversized(event)
                    elif not self._perform(event):
                        self.stream.postpone([event, *events[number:]])
                        return
                    if self.gone:
                        return
                if not machine.pending:
                    break
                events = machine.receive_data(b"", now)
            if machine.unread:
                self.stream.again()
            self.stream.expect(machine.due)
        except RemoteProtocolError as error:
            self._fail(error)

    def _without_waiting(self, events: list[Event]) -> list[Event]:
        """Return the events that are due: what nothing holds any more, then those of `events` that do not
        have to wait."""
        waiting = self.waiting
        due = waiting.take_released()
        if self._awaits_ids and len(due) > 1:
            due = _joined(due)
        for event in events:
            if isinstance(event, Publishes):
                if waiting.blocks(EVERY_CHANNEL):
                    size = sum([len(raw) + len(body) for _, _, _, raw, body in event.rows])
                    waiting.add(EVERY_CHANNEL, event, len(event.rows), size)
                else:
                    due.append(event)
            elif (isinstance(event, Oversized | Subscribe | Unsubscribe) and waiting.has(EVERY_CHANNEL)) or (
                isinstance(event, Disconnect) and self._let_ids is not None
            ):
                waiting.add(EVERY_CHANNEL, event, 1, _size_of(event))
            elif isinstance(event, Disconnect):
                due += [*waiting.take(EVERY_CHANNEL), event]
            else:
                due.append(event)
        if waiting.full():
            if self._consumes and self._let_publish is None and self._let_ids is None:
                due += waiting.take(EVERY_CHANNEL)
            else:
                waiting.stop_reading()
        return due

    def data_to_send(self) -> bytes | list[Piece]:
        """Acknowledgements that have gathered, and whatever was encoded."""
        machine = self.machine
        if machine.state is not OPEN:
            return machine.to_send()
        pubacks = self._pubacks
        if pubacks is not None:
            self._pubacks = None
            if len(pubacks) == 1 and machine.out is None and self._pubrecs is None and not machine.pings:
                return machine.puback(pubacks[0])
            machine.acknowledge(PacketType.PUBACK, pubacks)
        if self._pubrecs is not None:
            machine.acknowledge(PacketType.PUBREC, self._pubrecs)
            self._pubrecs = None
        return machine.to_send()

    def drained(self) -> None:
        """The client reads again."""
        if self.session is not None and self.session.outlet is self:
            self.session.pump()

    def lost(self, reason: str) -> None:
        """The connection is gone; the session may stay, the will may be published."""
        ingress = self._ingress
        ingress.dispatcher.memory.forget(self)
        finish(self.waiting, self.stream, self._publish_last)
        self.gone = True
        ingress.forget(self, reason)
        session = self.session
        if session is None:
            return
        if self._retries is not None:
            for receipt in self._retries.give_up():
                self._forget_incoming(receipt)
        if session.outlet is not self:
            return
        session.detach()
        will, self.will = self.will, None
        ingress.leave_will(session, will, self.sender, self.principal)
        if session.persistent:
            if self._yields:
                ingress.namespace.hand_over(session)
            ingress.namespace.left(session, ingress.now())
        else:
            ingress.namespace.discard(session)

    def _publish_last(self, events: list[Event]) -> None:
        """Publish what waited when the connection was lost. What is malformed ends it."""
        for number, event in enumerate(events, 1):
            try:
                rows = self._publishes(event.rows) if isinstance(event, Publishes) else []
            except RemoteProtocolError as error:
                self._ingress.stats.protocol_errors.add(reason_name(error.reason))
                return
            if rows:
                self.stream.postpone([Publishes(rows), *events[number:]])
                return

    # What the listener asks.

    @property
    def idle(self) -> bool:
        """Nothing that this client published awaits its outcome."""
        return not self.unsettled

    def in_flight(self) -> InFlight:
        """What is under way."""
        session = self.session
        return InFlight(self.unsettled, 0 if session is None else len(session.in_flight))

    def hold(self) -> Callable[[], None] | None:
        """Stop reading, unless the client must go on acknowledging; returns what undoes it."""
        if self._consumes:
            return None
        self.stream.hold()
        return self.stream.release

    def hold_publishes(self, channel: int) -> Callable[[], None] | None:
        """Have what the client publishes wait, unless it consumes: it is refused at twice the limit."""
        return None if self._consumes else self.waiting.hold(channel)

    @property
    def waiting_publishes(self) -> WaitingPublishes[Any]:
        """The publishes that wait until a full queue has room."""
        return self.waiting

    @property
    def _consumes(self) -> bool:
        return self.session is not None and bool(self.session.subscriptions or self.session.in_flight)

    def tick(self, now: float) -> None:
        """Keep-alive, the time to CONNECT, and refused messages whose turn it is."""
        if self.session is None:
            if now >= self._deadline:
                self._ingress.stats.protocol_errors.add("connect_timeout")
                self.stream.abort("no CONNECT in time")
            return
        if not self.stream.listening:
            self.machine.last_received = now  # we do not read: its silence is ours
        late = self.machine.timed_out(now)
        if late or self.session.stalled(now):
            self._ingress.let_go(self, ReasonCode.KEEP_ALIVE_TIMEOUT if late else ReasonCode.QUOTA_EXCEEDED)
            return
        if self._retries is not None:
            for receipt in self._retries.due(now):
                if receipt[2] == 2:
                    self._note_taken(receipt[1], receipt[4])
                self._ingress.publish_again(receipt, self.current_rights())
        if self._answers is not None:
            self._answers.tick()

    def shut_down(self, farewell: Farewell) -> None:
        """0x8B, 0x9C, 0x9D, 0x87, 0x89 or 0x98 in MQTT 5. The will is published, but for a client that is
        sent elsewhere: it goes on there.
        """
        reason, reference = FAREWELLS.get(farewell, ReasonCode.ADMINISTRATIVE_ACTION), ""
        if farewell is Farewell.STOPPING:
            self._yields = False
            if self.machine.version is Version.V5:
                reference = self._ingress.options.server_reference or ""
            if reference:
                self.will = None
            reason = ReasonCode.SERVER_SHUTTING_DOWN
            if reference:
                moved = self._ingress.options.server_moved
                reason = ReasonCode.SERVER_MOVED if moved else ReasonCode.USE_ANOTHER_SERVER
        self.machine.send_disconnect(reason, reference=reference)
        self.stream.end(farewell.value)

    # What the session asks: this is its outlet.

    @property
    def congested(self) -> bool:
        """The client does not read fast enough, or not any more."""
        return self.machine.state is not State.OPEN or self.stream.congested

    def send(self, rows: list[Row]) -> list[Row]:
        """Encode the rows; returns those that cannot be said: over the client's Maximum Packet Size, or with
        properties that cannot be encoded.
        """
        five = self.machine.version is Version.V5
        utc = clock.utc() if five else 0.0
        raw = b""
        like: Row | None = None  # the one that `raw` was encoded for
        octets = 0
        given = []
        for row in rows:
            message, grant = row.message, row.grant
            if five and not (
                like is not None
                and message.property_set is like.message.property_set
                and message.expires == like.message.expires
                and message.hops == like.message.hops
                and grant is like.grant
            ):
                try:
                    raw = encode_properties(message, utc, subscription_ids=grant.identifiers)
                except Exception as error:
                    return self._send_singly(rows, error)
                like = row
            retain = grant.retained or (message.retain and grant.retain_as_published)
            body = message.body
            octets += len(body) + len(raw) + 32
            given.append(
                (row.dup << 3 | row.qos << 1 | retain, message.address.wire, row.packet_id, raw, body)
            )
        if self.machine.alias_max:
            given = self.machine.aliased(given)
        too_large = [rows[at] for at in self.machine.publish_many(given)]
        self._ingress.stats.messages_out += len(rows) - len(too_large)
        self.stream.queued += octets
        self.stream.mark()
        return too_large

    def _send_singly(self, rows: list[Row], error: Exception) -> list[Row]:
        """Some of the rows cannot be encoded; the one that is left alone with its error is a dead letter."""
        if len(rows) > 1:
            return [unsaid for row in rows for unsaid in self.send([row])]
        self._ingress.undeliverable(rows[0].message, poisoned(error, client=self.sender.client))
        return rows

    def failed(self, error: Exception) -> None:
        """That costs the connection, when the wake-up ends."""
        self.stream.doom(error)

    def send_release(self, packet_id: int) -> None:
        """PUBREL, for a client that returns: behind a CONNACK that waits for the disk, unless it is full."""
        if self._answers is not None and self._ingress.namespace.failing:
            self._answers.say_when_safe(PacketType.PUBREL, [packet_id])
            return
        self.machine.send_ack(PacketType.PUBREL, packet_id, ReasonCode.SUCCESS)
        self.stream.mark()

    def send_received(self, packet_id: int) -> None:
        """PUBREC."""
        if self._pubrecs is None:
            self._pubrecs = [packet_id]
        else:
            self._pubrecs.append(packet_id)
        self.stream.mark()

    # What the ingress tells of published messages.

    def accepted(self, packet_id: int, qos: int, *, taken: bool = True) -> None:
        """Every target has the message; not `taken`: there is none, for which MQTT 5 has a word (3.4.2.1)."""
        self.unsettled -= 1
        if self._retries is not None:
            self._retries.attempts.pop(packet_id, None)
        if not taken and self.machine.version is Version.V5 and self.machine.state is OPEN:
            self._accepted_for_nobody(packet_id, qos)
        elif qos == 1:
            if self._pubacks is None:
                self._pubacks = [packet_id]
                self.stream.mark()
            else:
                self._pubacks.append(packet_id)
        else:
            self._accept_once(packet_id)
        if self._let_publish is not None:
            self._publish_on()

    def _accepted_for_nobody(self, packet_id: int, qos: int) -> None:
        if qos == 1:
            self.machine.send_ack(PacketType.PUBACK, packet_id, ReasonCode.NO_MATCHING_SUBSCRIBERS)
            self.stream.mark()
        else:
            self._accept_once(packet_id, ReasonCode.NO_MATCHING_SUBSCRIBERS)

    def _publish_on(self) -> None:
        """The client was held for having too much unsettled; that may be over."""
        if self._let_publish is not None and self.unsettled <= self._ingress.unsettled_max // 2:
            let_publish, self._let_publish = self._let_publish, None
            let_publish()

    def _accept_once(self, packet_id: int, reason: ReasonCode = ReasonCode.SUCCESS) -> None:
        """QoS 2: the session remembers; whichever connection it has now says PUBREC."""
        session = self.session
        if session is None:
            return
        if packet_id in session.received_ids and self.machine.version is Version.V5:
            if self._unreleased is None:
                self._unreleased = set()
            self._unreleased.add(packet_id)
        stored = not self._ingress.accepted_in_memory
        if not session.received_ids.accept(packet_id, stored=stored) or session.outlet is None:
            return
        if reason and session.outlet is self:
            self.machine.send_ack(PacketType.PUBREC, packet_id, reason)
            self.stream.mark()
        else:
            session.outlet.send_received(packet_id)

    def refused(self, receipt: Receipt, outcome: Outcome) -> None:
        """A target did not take the message: MQTT 5 has words for it, older versions are tried again, or have
        made a dead letter."""
        _, packet_id, qos, _, _ = receipt
        if self.gone or self.machine.state is not State.OPEN:
            self._forget_incoming(receipt)
        elif self.machine.version == Version.V5:
            self._ingress.tell_refused(receipt[3], outcome)
            self._forget_incoming(receipt)
            kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
            self.machine.send_ack(kind, packet_id, publish_refused(outcome), outcome.text)
            self.stream.mark()
            self.unsettled -= 1
            if self._let_publish is not None:
                self._publish_on()
        elif outcome.reason in FINAL or self._given_up(receipt, outcome):  # and no route has kept it
            self._ingress.tell_refused(receipt[3], outcome)
            then = partial(self.accepted, packet_id, qos)
            self._ingress.bury(receipt[3], outcome, then, partial(self._try_again, receipt))
        else:
            self._try_again(receipt, outcome)

    @staticmethod
    def _given_up(receipt: Receipt, outcome: Outcome) -> bool:
        """Return True if no route that the message took asks for another attempt."""
        entry = receipt[4]
        return outcome.verdict is Verdict.REJECTED and not any(
            branch.route.on_reject == "retry" for branch in entry.plan.branches
        )

    def _try_again(self, receipt: Receipt, outcome: Outcome) -> None:
        """Publish a message once more, later; its client waits."""
        _, packet_id, qos, _, _ = receipt
        if qos == 2 and self.session is not None:
            self.session.received_ids.doubt(packet_id)
        self._needed_retries().add(receipt, outcome, self._ingress.now())

    def _needed_retries(self) -> Retries:
        if self._retries is None:
            self._retries = Retries(self._ingress.disk_healthy)
        return self._retries

    def note_undone(self, packet_id: int, routes: frozenset[str]) -> None:
        if not self.gone and self.machine.state is State.OPEN and self.machine.version < Version.V5:
            self._needed_retries().note_undone(packet_id, routes)

    def left_of(self, packet_id: int, entry: RoutingEntry) -> RoutingEntry:
        return entry if self._retries is None else self._retries.left_of(packet_id, entry)

    def is_untold(self, retries: bool, outcome: Outcome) -> bool:
        """Return True if the client cannot be told that a route rejects what it published, and waits for an
        acknowledgement. `retries`: the route asks for another attempt, if that can change anything."""
        if self.gone or self.machine.state is not State.OPEN or self.machine.version == Version.V5:
            return False
        return outcome.reason in FINAL or not retries

    def _forget_incoming(self, receipt: Receipt) -> None:
        """A QoS 2 message was not taken: when the client sends it again, that counts as the first time."""
        _, packet_id, qos, _, _ = receipt
        if qos == 2 and self.session is not None:
            self.session.received_ids.forget(packet_id)

    # Packets.

    def _perform(self, event: Event) -> bool:
        """Do what a packet asks for. Return False if it is to be postponed: a result is pending, or the rest
        of it is left for another turn."""
        try:
            return self._control(event)
        except Pending as pending:
            self._ingress.suspend(self.stream, pending.awaited)
            return False

    def _control(self, event: Event) -> bool:
        if isinstance(event, Acks):
            assert self.session is not None
            if self._unreleased and event.kind is PacketType.PUBREL:
                self._unreleased.difference_update([packet_id for packet_id, _ in event.rows])
            acknowledged(self.session, self.machine, self._answers, event.kind, event.rows)
        elif isinstance(event, Connect):
            self._connect(event)
        elif isinstance(event, Auth):
            self._authenticate(event)
        elif isinstance(event, Subscribe | Unsubscribe):
            return self._filters(event)
        elif isinstance(event, Disconnect):
            before = self._ingress.namespace.recorded
            self._disconnect(event)
            self.wait_for_commit(before)
        else:
            assert isinstance(event, Pingreq)  # the machine answers that
        self.stream.mark()  # the machine may have answered by itself
        return True

    def _filters(self, event: Subscribe | Unsubscribe) -> bool:
        """Go on with the filters of a packet. Return False if the rest is left for another turn: a thousand
        deep filters take longer than others should wait."""
        session, begun = self.session, self._begun
        assert session is not None
        if begun is None:
            begun = self._begun = BegunPacket(self._ingress.namespace.recorded)
        if isinstance(event, Subscribe):
            if not self._subscribe(session, event, begun.reasons):
                return False
        elif not self._unsubscribe(session, event, begun.reasons):
            return False
        self._begun = None
        self.wait_for_commit(begun.recorded)
        self.stream.mark()
        return True

    def _publishes(self, rows: list[PublishRow]) -> list[PublishRow]:
        """Publish them; returns those that are left for another turn: so many go where this user has not
        published before.
        """
        left = self._prepare(rows)
        if left is not None:
            return left
        if len(rows) >= BURST_MIN:
            left = self._publish_together(rows)
        if left is None:
            left = self._publish_each(rows)
        ingress, done = self._ingress, len(rows) - len(left)
        ingress.stats.messages_in += done
        if (rate := self.stream.rate) is not None:
            rate.messages += done
        if self._unacknowledged >= ingress.unsettled_max and self._let_publish is None:
            self._overrun()
        return left

    def _prepare(self, rows: list[PublishRow]) -> list[PublishRow] | None:
        """Check what concerns all of them. Return None if they may be published; otherwise those that are
        left for another turn, none if all were refused."""
        ingress = self._ingress
        dispatcher = ingress.dispatcher
        if dispatcher.memory.short and not dispatcher.memory.admits(self, len(rows)):
            self._refuse_publishes(rows)
            return []
        if self._generation != dispatcher.generation:
            self._entries = ingress.entries.of(self.current_rights().key)
            self._generation = dispatcher.generation
        if self.offer is not None:
            check_publish(rows, self.offer)
        if self._answers is not None and self._waits_for_ids(rows):
            return rows
        return None

    def _publish_together(self, rows: list[PublishRow]) -> list[PublishRow] | None:
        """Publish rows that differ in nothing but their bodies. Return None if they do, or have to go one by
        one for another reason; otherwise those that are left for another turn."""
        ingress, entries, topic = self._ingress, self._entries, rows[0][1]
        if self._retries is not None and self._retries.waiting is not None:
            return None
        if self.machine.version < Version.V5 and ingress.dispatcher.echoes.awaited:
            return None
        try:
            shared = entries.get(topic) or self._first_seen(topic, entries)
        except Pending as pending:
            ingress.suspend(self.stream, pending.awaited)
            return rows
        burst = burst_in(rows, ingress.body_max) if shared.plan.bursts else None
        if burst is None:
            return None
        ingress.begun_batch()
        self._publish_burst(shared, burst)
        return []

    def _publish_each(self, rows: list[PublishRow]) -> list[PublishRow]:  # noqa: PLR0912, PLR0915 - every message
        """Publish them one by one; returns those that are left for another turn."""
        ingress = self._ingress
        dispatcher = ingress.dispatcher
        entries = self._entries
        batch = ingress.begun_batch()
        sender = self.sender
        body_max = ingress.body_max
        held = None if self._retries is None else self._retries.waiting
        echoes = None
        if self.machine.version < Version.V5 and dispatcher.echoes.awaited:
            echoes = dispatcher.echoes
        one_by_one = iter(rows)
        left: list[PublishRow] = []
        property_set: PropertySet
        known = NOTHING_SAID
        for flags, topic, packet_id, raw, body in one_by_one:
            entry = entries.get(topic)
            if entry is None:
                if self.stream.spent():
                    left = [(flags, topic, packet_id, raw, body), *one_by_one]
                    break
                try:
                    entry = self._first_seen(topic, entries)
                except Pending as pending:
                    ingress.suspend(self.stream, pending.awaited)
                    left = [(flags, topic, packet_id, raw, body), *one_by_one]
                    break
            qos = flags >> 1 & 3
            if raw:
                known = publish_essentials(raw)
                property_set, interval, hops = known, known.expiry, known.hops
                expires = NEVER if interval is None else clock.utc() + interval
            else:
                property_set, expires, hops = NO_PROPERTIES, NEVER, 0
                if echoes is not None:
                    hops = echoes.hops(topic, body, sender, ingress.now())
            retain = flags & 1 == 1
            message = Message(
                entry.address, body, property_set, qos, DURABLE_AT_QOS[qos], retain, expires, hops, sender
            )
            if qos:
                if qos == 2 and not self._first_time(packet_id, entry):
                    continue
                self.unsettled += 1
                receipt: Receipt | None = (self, packet_id, qos, message, entry)
            else:
                receipt = None
            if len(body) > body_max:
                self._decline(entry, message, receipt, TOO_LARGE)
            elif raw and known.read_texts is None and UTF8 in raw and not is_what_it_says(message):
                self._decline(entry, message, receipt, NOT_TEXT)
            elif held is not None and receipt is not None:
                held.behind(receipt)  # what waits for the disk is not overtaken
            elif not dispatcher.publish(batch, entry, message, receipt):
                ingress.unclaimed(entry, message, receipt)
        return left

    def _waits_for_ids(self, rows: list[PublishRow]) -> bool:
        """The ids of QoS 2 messages have to be known elsewhere before these are published; then the rows come
        again."""
        session = self.session
        packet_ids = [packet_id for flags, _, packet_id, _, _ in rows if flags >> 1 & 3 == 2]
        if not packet_ids or session is None:
            return False
        try:
            self._ingress.namespace.taking(session, packet_ids)
        except Pending as pending:
            if self._elsewhere:  # there these ids are not known: it says the messages again, and that counts
                self._give_way()
            elif self.gone:
                self._ingress.suspend(self.stream, pending.awaited)
            else:
                self._awaits_ids = True
                self._let_ids = self.waiting.hold(EVERY_CHANNEL)
                self._ingress.tasks.start_soon(self._await_ids, pending.awaited)
            return True
        return False

    async def _await_ids(self, awaited: Awaited) -> None:
        """Let publishes go on when the ids are known. The connection is read meanwhile, so that what it
        consumes, and its pings, do not wait."""
        await awaited.wait()
        let_ids, self._let_ids = self._let_ids, None
        if let_ids is not None:
            let_ids()
        self._ingress.flush()

    def _publish_burst(self, entry: RoutingEntry, burst: Burst) -> None:
        """Publish what a client sent. Raises RemoteProtocolError for malformed properties."""
        flags, raw, packet_ids, bodies = burst
        property_set, expires, hops = NO_PROPERTIES, NEVER, 0
        if raw:
            known = publish_essentials(raw)
            property_set, hops = known, known.hops
            expires = NEVER if known.expiry is None else clock.utc() + known.expiry
        address, sender, qos = entry.address, self.sender, flags >> 1 & 3
        durable = DURABLE_AT_QOS[qos]
        messages = [
            Message(address, body, property_set, qos, durable, False, expires, hops, sender)
            for body in bodies
        ]
        receipts: list[Any] = [None] * len(messages)
        if qos:
            self.unsettled += len(messages)
            receipts = [
                (self, packet_id, qos, message, entry)
                for packet_id, message in zip(packet_ids, messages, strict=True)
            ]
        publish, batch = self._ingress.dispatcher.publish, self._ingress.batch
        if not self._ingress.dispatcher.publish_burst(batch, entry, messages, receipts):
            for message, receipt in zip(messages, receipts, strict=True):
                if not publish(batch, entry, message, receipt):
                    self._ingress.unclaimed(entry, message, receipt)

    def _first_seen(self, topic: bytes, entries: dict[bytes, RoutingEntry]) -> RoutingEntry:
        """A topic seen for the first time: check it, ask for permission, find out where it leads. One to
        which nothing may be published leads nowhere; `MqttIngress.unclaimed` says why."""
        name = decode_topic(topic)
        address = topic_address(name, topic)
        rights = self.current_rights()
        decision = self._ingress.may_publish(rights, address)
        entry: RoutingEntry
        if not decision.allowed:
            entry = DeniedEntry(address, decision.rule)
        elif topic_refusal(name, self._ingress.limits.topic_levels_max) is not None:
            entry = RoutingEntry(address, NOWHERE)
        else:
            try:
                entry = self._ingress.route(rights, address, self._ingress.entries.find)
            except RouteRefused as error:
                entry = DeniedEntry(address, str(error))
        self._ingress.entries.keep(entry, entries)
        return entry

    def _refuse_publishes(self, rows: list[PublishRow]) -> None:
        """There is no memory for them: QoS 0 is dropped. Before MQTT 5 only closing refuses the others."""
        self._ingress.stats.messages_in += len(rows)
        self._ingress.stats.refuse(LOW_ON_MEMORY, len(rows))
        assert self.session is not None
        for flags, _, packet_id, _, _ in rows:
            qos = flags >> 1 & 3
            if not qos:
                continue
            if self.machine.version is not Version.V5:
                self._ingress.let_go(self, ReasonCode.QUOTA_EXCEEDED)
                return
            if qos == 2 and packet_id in self.session.received_ids:  # it was taken when there was memory
                if self.session.received_ids.accepted(packet_id):
                    self.send_received(packet_id)
                continue
            kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
            self.machine.send_ack(kind, packet_id, publish_refused(LOW_ON_MEMORY), LOW_ON_MEMORY.text)
        self.stream.mark()

    @property
    def begun(self) -> int:
        """Octets of a packet that has not come whole."""
        return self.machine.begun

    def let_go_for_memory(self) -> None:
        """There is none for what it has begun."""
        self._ingress.let_go(self, ReasonCode.QUOTA_EXCEEDED)

    @property
    def _unacknowledged(self) -> int:
        """What counts against our Receive Maximum: QoS 1 until PUBACK, QoS 2 until PUBCOMP (5: 3.3.4)."""
        return self.unsettled if self._unreleased is None else self.unsettled + len(self._unreleased)

    def _overrun(self) -> None:
        """As much is unsettled as may be. MQTT 5 clients were told how much; what others publish
        waits."""
        if self.machine.version is not Version.V5:
            self._let_publish = self.waiting.hold(EVERY_CHANNEL)
        elif self._unacknowledged > self._ingress.unsettled_max:
            raise RemoteProtocolError(
                "more is unacknowledged than our Receive Maximum", reason=ReasonCode.RECEIVE_MAXIMUM_EXCEEDED
            )

    def _decline(
        self, entry: RoutingEntry, message: Message, receipt: Receipt | None, outcome: Outcome
    ) -> None:
        """A body over our limit, or no text."""
        self._ingress.refuse(entry, message, outcome)
        self._tell_declined(message, receipt, outcome)

    def _tell_declined(self, message: Message, receipt: Receipt | None, outcome: Outcome) -> None:
        if receipt is not None:
            self.refused(receipt, outcome)
        else:
            self._ingress.tell_refused(message, outcome)

    def _oversized(self, packet: Oversized) -> None:
        """A body that was not even read: of the message nothing is left that could be published again."""
        ingress, publish = self._ingress, packet.publish
        ingress.stats.messages_in += 1
        address = topic_address(publish.topic)
        nowhere = RoutingEntry(address, NOWHERE)
        if publish.qos == 2 and not self._first_time(publish.packet_id, nowhere):
            return
        message = Message(address, b"", NO_PROPERTIES, publish.qos, sender=self.sender._replace(endpoint=""))
        receipt: Receipt | None = None
        if publish.qos:
            self.unsettled += 1
            receipt = (self, publish.packet_id, publish.qos, message, nowhere)
        outcome = TOO_LARGE._replace(text=f"{TOO_LARGE.text}: {packet.octets} octets, which were not kept")
        came = Message(address, Withheld(packet.octets), NO_PROPERTIES, publish.qos, sender=self.sender)
        ingress.refuse(nowhere, came, outcome)
        self._tell_declined(message, receipt, outcome)

    def _first_time(self, packet_id: int, entry: RoutingEntry) -> bool:
        """QoS 2: False when this packet id was taken before and not released (§4.3.3)."""
        session = self.session
        assert session is not None
        if session.received_ids.take(packet_id):
            held = None if self._retries is None else self._retries.waiting
            if held is None:
                self._note_taken(packet_id, entry)
            return True
        self._ingress.stats.duplicates += 1
        if session.received_ids.accepted(packet_id):
            self.send_received(packet_id)
        return False

    def _note_taken(self, packet_id: int, entry: RoutingEntry) -> None:
        """Have the session told of a QoS 2 message when its targets have been given it, if all are here."""
        session = self.session
        if session is not None and session.kept and self._ingress.ends_here(entry):
            self._ingress.taken.append((session.received_ids, packet_id))

    # Subscriptions, and how a client leaves.

    def _subscribe(self, session: Session, packet: Subscribe, reasons: list[int]) -> bool:
        """Subscribe to the filters behind those that have `reasons`; return False if some are left. Then
        answer with a SUBACK and owe the retained messages: each filter is granted or refused by itself. A
        client that sent DISCONNECT right behind gets no answer. Raises RemoteProtocolError for filters that
        are none, before MQTT 5."""
        machine, rights = self.machine, self.current_rights()
        assert machine.connect is not None
        if len(self._ingress.batch):
            self._ingress.turn_done()  # what was published before and is retained must be found
        bridge = machine.connect.bridge  # of Mosquitto's kind: levels 0x83 and 0x84
        identifier = packet.properties.get(Property.SUBSCRIPTION_IDENTIFIER, (0,))[0]
        for wanted in islice(packet.subscriptions, len(reasons), None):
            if self.stream.spent():
                return False
            why = self._filter_refusal(session, rights, wanted)
            if why is not None:
                refused = SUBSCRIBE_REFUSED[why]
                if machine.version < Version.V5 and not is_filter(wanted.filter):
                    raise RemoteProtocolError(f"topic filter {wanted.filter!r} is malformed", reason=refused)
                self._ingress.tell_unsubscribed(session.client_id, wanted.filter, refused)
                reasons.append(refused)  # before MQTT 5 the codec says 0x80 for all of them
                continue
            qos = wanted.qos if self.offer is None else min(wanted.qos, self.offer.qos_max)
            if shared_pattern(wanted.filter) is not None:
                qos = min(qos, self._ingress.namespace.offers.shared_qos_max)
            options = SubscriptionOptions(
                qos,
                wanted.no_local or (bridge and shared_pattern(wanted.filter) is None),
                wanted.retain_as_published or bridge,
                wanted.retain_handling,
                identifier,
            )
            self._ingress.namespace.subscribe(session, wanted.filter, options)
            reasons.append(qos)
        if machine.state is State.OPEN:
            machine.send_suback(packet.packet_id, reasons)
        self._ingress.owe_retained(session)
        return True

    def _filter_refusal(
        self,
        session: Session,
        rights: Rights,
        wanted: Subscription,
    ) -> Reason | None:
        """Return why a filter is refused, or None. Raises Pending."""
        limits = self._ingress.limits
        decision = rights.mqtt_subscribe(wanted.filter, wanted.qos)
        size = len(wanted.filter.encode())
        if size > limits.topic_filter_bytes_max or size > self._ingress.namespace.filter_bytes_max:
            return Reason.NAME_INVALID
        if wanted.filter.count("/") >= limits.topic_levels_max or not is_filter(wanted.filter):
            return Reason.NAME_INVALID
        if not decision.allowed:
            self._ingress.denied(self.sender, "subscribe", wanted.filter, decision.rule)
            return Reason.NOT_AUTHORIZED
        if session.persistent and self._ingress.namespace.failing:
            return Reason.STORE  # it could not be recorded
        known = wanted.filter in session.subscriptions
        if not known and len(session.subscriptions) >= self._ingress.limits.subscriptions_max:
            return Reason.QUOTA
        if not known and self._ingress.namespace.subscriptions_full(session.user, wanted.filter):
            return Reason.QUOTA
        return None

    def _unsubscribe(self, session: Session, packet: Unsubscribe, reasons: list[int]) -> bool:
        """Unsubscribe from the filters behind those that have `reasons`; return False if some are left. Then
        answer with an UNSUBACK."""
        namespace = self._ingress.namespace
        for topic_filter in islice(packet.filters, len(reasons), None):
            if self.stream.spent():
                return False
            known = namespace.unsubscribe(session, topic_filter)
            reasons.append(ReasonCode.SUCCESS if known else ReasonCode.NO_SUBSCRIPTION_EXISTED)
        if self.machine.state is State.OPEN:
            self.machine.send_unsuback(packet.packet_id, reasons)
        return True

    def _disconnect(self, packet: Disconnect) -> None:
        """A client says goodbye; in MQTT 5 it may want its will published, or its session kept for another
        time (5: 3.14.2). Raises RemoteProtocolError when the session was to end with the connection."""
        session = self.session
        if packet.reason != ReasonCode.DISCONNECT_WITH_WILL:
            self.will = None
        expiry = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL)
        if expiry is not None and session is not None:
            if expiry and not session.persistent:
                raise RemoteProtocolError(
                    "a session that was to end with its connection cannot be prolonged",
                    reason=ReasonCode.PROTOCOL_ERROR,
                )
            most = self._ingress.expiry_secs_max(self.current_rights())
            if expiry > most:  # of CONNECT the CONNACK says so; a DISCONNECT has no answer
                log.info(
                    "session expiry shortened",
                    client=self.sender.client,
                    wanted_seconds=expiry,
                    seconds=most,
                )
            session.expiry_secs = float(min(expiry, most))
        self.stream.end("DISCONNECT")

    # The session, and what is said of it.

    def open(self, session: Session, receive_max: int) -> None:
        """The client is let in."""
        self.session = session
        after = self._ingress.namespace.answers_after(session)
        if after is not None:
            self._answers = Answers(after, self.machine, self.stream)
        session.attach(self, receive_max)
        self.owe_retained()
        self.stream.mark()

    def wait_for_commit(self, before: int) -> None:
        """Say nothing until what has changed since `before` is where it survives."""
        namespace = self._ingress.namespace
        if namespace.unsaid(before):
            self.stream.hold_output()
            namespace.after_recorded(self.session, self._committed)

    def _committed(self, outcome: Outcome) -> None:
        if outcome is not ACCEPTED:
            self.stream.abort(outcome.text)
            return
        self.stream.release_output()
        self.owe_retained()

    def owe_retained(self) -> None:
        """Go on with what the session is owed of retained messages."""
        if self.session is not None and self.session.owed and not self.gone:
            self._ingress.owe_retained(self.session)

    def taken_over(self, *, patient: bool = False) -> None:
        """Another connection has come with the same client identifier (3.1.4). A client that has said
        goodbye here, and went to another replica, may be heard of from there first: what it has acknowledged
        before is not to come again.
        """
        self.stream.hear_out(self._ingress.now())
        self._ingress.turn_done()
        if self.gone:
            return
        # What waits for the log is left to the new connection, which does not know of it.
        if patient and self.session is not None and self.session.in_flight and self.stream.listening:
            self._elsewhere = True
            self._ingress.tasks.start_soon(self._ingress.await_goodbye, self.stream, self._give_way)
        else:
            self._give_way()

    def _give_way(self) -> None:
        """The client has another connection, if it is still here."""
        if self.gone:
            return
        self._yields = False  # the client is here again
        self.machine.send_disconnect(ReasonCode.SESSION_TAKEN_OVER)
        self.stream.end("taken over")

    def _fail(self, error: RemoteProtocolError) -> None:
        ingress = self._ingress
        ingress.stats.protocol_errors.add(reason_name(error.reason))
        ingress.report(self.stream.remote, error)
        self.machine.fail(error)
        self.stream.end(str(error))


def _joined(events: list[Event]) -> list[Event]:
    """Return events with adjacent publishes as one, whose ids are stored together."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Publishes) and isinstance(last, Publishes):
            last.rows.extend(event.rows)
        else:
            found.append(event)
    return found


class MqttListenerSource(MqttIngress):
    """Which makes a connection of each client."""

    def connect(self, stream: Stream, now: float) -> MqttConnection:
        """A client has connected."""
        return MqttConnection(self, stream, now)

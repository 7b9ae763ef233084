"""Connection of one MQTT client: executes its packets on the broker, and delivers its session's messages.

`MqttConnection` processes the events of the protocol machine: publishes become messages in the listener's
batch, subscriptions change the session, acknowledgements settle deliveries. It is also the session's outlet,
which encodes deliveries. CONNECT and AUTH are in the module `admission`.

A client learns about a change of its session only when the change is on disk. CONNACK, SUBACK, UNSUBACK and
the end after DISCONNECT therefore hold back all output until the commit that they depend on; acknowledgements
of QoS 2 wait individually. A failed commit aborts the connection: the client has received no response and
will retry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import structlog

from gateway import clock
from gateway.access.authorization import CurrentRights
from gateway.access.rights import Rights
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.mqtt.session import OutgoingPublish, Session, SubscriptionOptions
from gateway.broker.mqtt.shared_subscriptions import shared_pattern
from gateway.broker.poison import outcome_of_error
from gateway.broker.publish_permission import PublishRefused
from gateway.broker.routing import NOWHERE, RoutingEntry
from gateway.errors import RemoteProtocolError
from gateway.ingress.client import CloseReason, InFlight
from gateway.ingress.mqtt.acknowledgements import DelayedAcknowledgements, acknowledged
from gateway.ingress.mqtt.admission import AdmittedMqttClient
from gateway.ingress.mqtt.bursts import BURST_MIN, Burst, burst_in
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.ingress.mqtt.listener_client import Receipt
from gateway.ingress.mqtt.publish_checks import (
    NOT_TEXT,
    TOO_LARGE,
    UTF8,
    WHOLE_OFFER,
    ServerCapabilities,
    check_publish,
    has_valid_format,
)
from gateway.ingress.mqtt.retries import Retries
from gateway.ingress.mqtt.routing_table import DeniedEntry
from gateway.ingress.waiting_publishes import EVERY_CHANNEL, LOST_WAITING, WaitingPublishes, finish
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED, FINAL, Outcome, Reason, Verdict
from gateway.model.pending import Awaited, Pending, Superseded
from gateway.model.properties import NO_PROPERTIES, PropertySet
from gateway.model.spooled_bodies import Piece, WithheldBody
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.data_types import decode_topic, is_filter
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.packets import (
    Auth,
    Connect,
    Disconnect,
    Event,
    Oversized,
    Pingreq,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from gateway.protocols.mqtt.reason_codes import SUBSCRIBE_REFUSED, publish_refused
from gateway.protocols.mqtt.runs import Acks, Publishes, PublishRow
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version, reason_name
from gateway.protocols.mqtt.translate import EMPTY_SCANNED, encode_properties, publish_essentials
from gateway.transport.stream import Stream

# Reading a global name costs a quarter of reading an enum member, and each message needs it.
OPEN: Final = State.OPEN
log = structlog.get_logger(limited=True)
REST_SECS: Final = 5.0  # longest time between two ticks of an idle connection
FILTER_BYTES: Final = 128  # memory of a waiting topic filter besides its text
FAREWELLS: Final = {
    CloseReason.EXPIRED: ReasonCode.NOT_AUTHORIZED,
    CloseReason.REVOKED: ReasonCode.NOT_AUTHORIZED,
    CloseReason.UNSERVED: ReasonCode.SERVER_BUSY,
    CloseReason.RULES_CHANGED: ReasonCode.NOT_AUTHORIZED,
}


def _size_of(event: Event) -> int:
    """Return the bytes that the topic filters of a SUBSCRIBE or UNSUBSCRIBE occupy; 0 for other events."""
    if isinstance(event, Subscribe):
        return sum([len(one.filter) + FILTER_BYTES for one in event.subscriptions])
    return sum([len(one) + FILTER_BYTES for one in event.filters]) if isinstance(event, Unsubscribe) else 0


class BegunPacket:
    """Progress of a SUBSCRIBE or UNSUBSCRIBE whose filters are processed in several portions."""

    __slots__ = ("reasons", "recorded")

    def __init__(self, recorded: int) -> None:
        self.recorded = recorded  # `namespace.change_count` before it
        self.reasons: list[int] = []  # reason codes of the filters processed so far


class MqttConnection(AdmittedMqttClient):
    """Connection of one MQTT client. It owns a stream, and sends the deliveries of the client's session."""

    __slots__ = (
        "_answers",
        "_awaits_ids",
        "_begun",
        "_current_rights",
        "_deadline",
        "_elsewhere",
        "_entries",
        "_generation",
        "_pubacks",
        "_pubrecs",
        "_release_ids",
        "_release_publishes",
        "_repeated",
        "_rests_until",
        "_retries",
        "_unreleased",
        "_yields",
        "capabilities",
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
        self._release_publishes: Callable[[], None] | None = None  # None: the client is not held
        self._release_ids: Callable[[], None] | None = None  # None: no QoS 2 identifiers are pending
        self._awaits_ids = False  # QoS 2 identifiers have been pending before
        self._pubacks: list[int] | None = None  # packet identifiers to acknowledge
        self._pubrecs: list[int] | None = None
        # QoS 2 identifiers of messages that the client repeated before they had an outcome; None: none yet.
        self._repeated: set[int] | None = None
        self._retries: Retries | None = None  # None: no message has been refused
        self._unreleased: set[int] | None = None  # QoS 2 identifiers that await PUBREL
        self.rights: Rights | None = None
        self._current_rights = CurrentRights(ingress.authorization)
        self.capabilities: ServerCapabilities | None = None  # None: there are no restrictions
        self._elsewhere = False  # the client has moved to another replica
        self._rests_until = 0.0  # loop-clock time until which `tick` has nothing to do
        self._yields = True  # pass on shared-subscription messages when the connection is lost
        self._deadline = now + limits.connect_timeout_secs
        self._answers: DelayedAcknowledgements | None = None  # None: no acknowledgement waits for the disk
        self._begun: BegunPacket | None = None  # packet that is processed in more than one turn

    # Permissions.

    def current_rights(self) -> Rights:
        """Return the client's rights under the current rules, and store them in `rights`.

        Also update `capabilities`, the highest QoS and the retain availability that these rights permit.
        """
        rights = self._current_rights.of(self.principal, self.sender.client)
        if rights is not self.rights:
            self.rights = rights
            offer = self._ingress.capabilities_for(rights)
            self.capabilities = None if offer == WHOLE_OFFER else offer
        return rights

    def renew_rights(self) -> None:
        """Apply the client's current rights, because it has authenticated again."""
        self._current_rights.forget()
        self._generation = -1
        self._ingress.recheck(self)

    def rules_changed(self) -> None:
        """Recheck the client after a change of the access rules: end its forbidden subscriptions.

        If there were any, or if the client may no longer connect, disconnect it, because MQTT has no message
        that ends only a subscription. Raises Pending if a permission decision is pending.
        """
        if self.session is None or self.machine.state is not OPEN:
            return
        rights = self.current_rights()
        decision = rights.enters_mqtt()
        connect = self.machine.connect
        assert connect is not None
        if decision.allowed and connect.client_id:  # an assigned one needs no permission
            decision = rights.has_client_id(self.sender.client)
        if not decision.allowed:
            self._ingress.record_denial(self.sender, "connect", self.sender.client, decision.rule)
        if self._ingress.drop_forbidden(self.session, rights, self.sender) or not decision.allowed:
            self._ingress.disconnect_client(self, ReasonCode.NOT_AUTHORIZED)

    # Interface to the stream.

    def receive(self, data: bytes, now: float) -> None:
        """Process received bytes, or the events that were postponed earlier if `data` is empty.

        A protocol error ends this connection and is counted. `now` is in loop-clock seconds.
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
                    if self.is_closed:
                        return
                if not machine.pending:
                    break
                events = machine.receive_data(b"", now)
            if machine.unread:
                self.stream.request_turn()
            self.stream.expect(machine.needed_bytes)
        except RemoteProtocolError as error:
            self._fail(error)

    def _without_waiting(self, events: list[Event]) -> list[Event]:
        """Store the events that have to wait in `waiting`. Return the events to process now.

        The result begins with earlier events that need not wait any more. Publishes wait while a queue or
        session that the client publishes to is full, and later packets that must not overtake them wait as
        well. Reading stops when too many events wait.
        """
        waiting = self.waiting
        ready_events = waiting.take_released()
        if self._awaits_ids and len(ready_events) > 1:
            ready_events = _joined(ready_events)
        for event in events:
            if isinstance(event, Publishes):
                if waiting.blocks(EVERY_CHANNEL):
                    size = sum([len(raw) + len(body) for _, _, _, raw, body in event.rows])
                    waiting.add(EVERY_CHANNEL, event, len(event.rows), size)
                else:
                    ready_events.append(event)
            elif (isinstance(event, Oversized | Subscribe | Unsubscribe) and waiting.has(EVERY_CHANNEL)) or (
                isinstance(event, Disconnect) and self._release_ids is not None
            ):
                waiting.add(EVERY_CHANNEL, event, 1, _size_of(event))
            elif isinstance(event, Disconnect):
                ready_events += [*waiting.take(EVERY_CHANNEL), event]
            else:
                ready_events.append(event)
        if waiting.full_channels():
            if self.consumes and self._release_publishes is None and self._release_ids is None:
                ready_events += waiting.take(EVERY_CHANNEL)
            else:
                waiting.stop_reading()
        return ready_events

    def data_to_send(self) -> bytes | list[Piece]:
        """Return the encoded output, preceded by the collected PUBACKs and PUBRECs."""
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

    def resume_writing(self) -> None:
        """Resume deliveries: the client's send buffer has drained."""
        if self.session is not None and self.session.outlet is self:
            self.session.pump()

    def connection_lost(self, reason: str) -> None:
        """Process the publishes that still wait, detach or discard the session, and publish the will."""
        ingress = self._ingress
        ingress.dispatcher.memory.forget(self)
        self.is_closed = True
        self._drop_waiting(finish(self.waiting, self.stream, self._publish_last))
        ingress.forget(self, reason)
        session = self.session
        if session is None:
            return
        if self._retries is not None:
            for receipt in self._retries.take_all():
                self._forget_incoming(receipt, refusal_sent=False)
        if session.outlet is not self:
            return
        if self.expiry_before:  # its client has no CONNACK with another expiry
            session.expiry_secs = self.expiry_before
        session.detach()
        will, self.will = self.will, None
        ingress.leave_will(session, will, self.sender, self.principal)
        if session.persistent:
            if self._yields:
                ingress.namespace.requeue_shared(session)
            ingress.namespace.detach_session(session, ingress.now())
        else:
            ingress.namespace.discard(session)

    def _drop_waiting(self, events: list[Event]) -> None:
        """Count the publishes in `events` as refused: the connection was lost before they were processed."""
        lost = sum([len(event.rows) for event in events if isinstance(event, Publishes)])
        if lost:
            self._ingress.stats.count_refused_unpublished(LOST_WAITING, lost)

    def _publish_last(self, events: list[Event]) -> None:
        """Publish the messages that still waited when the connection was lost, up to a malformed packet.

        Other packets in `events` are dropped. At a message whose permission or routing decision is pending,
        the rest is passed to `stream.postpone`.
        """
        for number, event in enumerate(events, 1):
            try:
                rows = self._publishes(event.rows) if isinstance(event, Publishes) else []
            except RemoteProtocolError as error:
                self._ingress.stats.protocol_errors.add(reason_name(error.reason))
                return
            if rows:
                self.stream.postpone([Publishes(rows), *events[number:]])
                return

    # Interface to the listener.

    @property
    def idle(self) -> bool:
        """True if none of the client's publishes awaits an outcome."""
        return not self.unsettled

    def in_flight(self) -> InFlight:
        """Return the numbers of unsettled publishes and unacknowledged deliveries."""
        session = self.session
        return InFlight(self.unsettled, 0 if session is None else len(session.in_flight))

    @property
    def waiting_publishes(self) -> WaitingPublishes[Any]:
        """Publishes that wait until a full queue has capacity."""
        return self.waiting

    @property
    def consumes(self) -> bool:
        """True if the client may have to acknowledge deliveries."""
        return self.session is not None and bool(self.session.subscriptions or self.session.in_flight)

    def tick(self, now: float) -> None:
        """Process the connection's timers: the timeouts of CONNECT, keep-alive and deliveries, and retries.

        A client that misses a timeout is disconnected. Refused messages whose retry is due are published
        again. `now` is in loop-clock seconds.
        """
        if self.session is None:
            if now >= self._deadline:
                self._ingress.stats.protocol_errors.add("connect_timeout")
                self.stream.abort("no CONNECT received in time")
            return
        if not self.stream.listening:
            self.machine.last_received = now  # the gateway does not read, so silence is no fault
        timed_out = self.machine.timed_out(now)
        if timed_out or self.session.has_stalled(now, is_read=self.stream.reading):
            self._ingress.disconnect_client(
                self, ReasonCode.KEEP_ALIVE_TIMEOUT if timed_out else ReasonCode.QUOTA_EXCEEDED
            )
            return
        if self._retries is not None:
            self._publish_again(self._retries.take_due(now))
        if self._answers is not None:
            self._answers.tick()
        has_answers = self._answers is not None and self._answers.is_waiting
        if self._retries is None and not has_answers and self.session.is_at_rest and self.stream.listening:
            silent_until = self.machine.last_received + (self.machine.keep_alive or REST_SECS)
            self._rests_until = min(now + REST_SECS, silent_until)

    def is_at_rest(self, now: float) -> bool:
        """Return True if `tick` need not be called yet: for many idle connections its calls take long."""
        return now < self._rests_until

    def require_ticks(self) -> None:
        """Process the connection's timers once a second from now on, until it is at rest again."""
        self._rests_until = 0.0

    def _publish_again(self, receipts: Sequence[Receipt]) -> None:
        """Publish refused messages again in order; each waits until the right to its topic is decided."""
        for at, receipt in enumerate(receipts):
            try:
                self._ingress.publish_again(receipt, self.current_rights())
            except Pending as pending:
                again = partial(self._publish_again, receipts[at:])
                self._ingress.suspend(self.stream, pending.awaited, again)
                return

    def shut_down(self, close_reason: CloseReason) -> None:
        """Disconnect the client for the reason `close_reason`; an MQTT 5 client receives its reason code.

        The will is published, except when the gateway stops and refers the client to another server, where
        its session continues.
        """
        reason, reference = FAREWELLS.get(close_reason, ReasonCode.ADMINISTRATIVE_ACTION), ""
        if close_reason is CloseReason.STOPPING:
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
        self.stream.end(close_reason.value)

    # Interface to the session, whose outlet this is.

    @property
    def congested(self) -> bool:
        """True if the client does not read fast enough, or if the connection is closing."""
        return self.machine.state is not State.OPEN or self.stream.congested

    def send(self, rows: list[OutgoingPublish]) -> list[OutgoingPublish]:
        """Encode deliveries as PUBLISH packets. Return the rows that cannot be sent.

        These exceed the client's Maximum Packet Size, or have properties that cannot be encoded.
        """
        five = self.machine.version is Version.V5
        utc = clock.utc() if five else 0.0
        raw = b""
        like: OutgoingPublish | None = None  # the row that `raw` was encoded for
        byte_count = 0
        publish_rows = []
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
            byte_count += len(body) + len(raw) + 32
            publish_rows.append(
                (row.dup << 3 | row.qos << 1 | retain, message.address.wire, row.packet_id, raw, body)
            )
        if self.machine.alias_max:
            publish_rows = self.machine.aliased(publish_rows)
        too_large = [rows[at] for at in self.machine.publish_many(publish_rows)]
        self._ingress.stats.messages_out += len(rows) - len(too_large)
        self.stream.queued += byte_count
        self.stream.mark_for_flush()
        return too_large

    def _send_singly(self, rows: list[OutgoingPublish], error: Exception) -> list[OutgoingPublish]:
        """Encode rows one by one after an encoding error; the single row that fails becomes a dead letter.

        Return the rows that cannot be sent.
        """
        if len(rows) > 1:
            return [unsaid for row in rows for unsaid in self.send([row])]
        self._ingress.undeliverable(rows[0].message, outcome_of_error(error, client=self.sender.client))
        return rows

    def handle_error(self, error: Exception) -> None:
        """Close the connection because of this internal error, at the end of this event-loop pass."""
        self.stream.fail_later(error)

    def send_release(self, packet_id: int) -> None:
        """Send the PUBREL of an unfinished QoS 2 delivery to a client that has resumed its session.

        Normally the CONNACK, which precedes the PUBREL, is delayed until the session's changes are on disk.
        While disk writes fail, the CONNACK is not delayed, and the PUBREL itself waits until the changes are
        on disk.
        """
        if self._answers is not None and self._ingress.namespace.failing:
            self._answers.send_when_stored(PacketType.PUBREL, [packet_id])
            return
        self.machine.send_ack(PacketType.PUBREL, packet_id, ReasonCode.SUCCESS)
        self.stream.mark_for_flush()

    def send_received(self, packet_id: int) -> None:
        """Queue the PUBREC of a QoS 2 message, which is sent when the current pass of the event loop ends."""
        if self._pubrecs is None:
            self._pubrecs = [packet_id]
        else:
            self._pubrecs.append(packet_id)
        self.stream.mark_for_flush()

    # Outcomes of published messages, reported by the source.

    def acknowledge(self, packet_id: int, qos: int, *, has_target: bool = True) -> None:
        """Acknowledge a message that every target has accepted.

        `has_target` False means that there was no target, which MQTT 5 reports with 0x10 (5: 3.4.2.1).
        """
        self.unsettled -= 1
        if self._retries is not None:
            self._retries.attempts.pop(packet_id, None)
        if not has_target and self.machine.version is Version.V5 and self.machine.state is OPEN:
            self._acknowledge_unrouted(packet_id, qos)
        elif qos == 1:
            if self._pubacks is None:
                self._pubacks = [packet_id]
                self.stream.mark_for_flush()
            else:
                self._pubacks.append(packet_id)
        else:
            self._accept_once(packet_id)
        if self._release_publishes is not None:
            self._publish_on()

    def _acknowledge_unrouted(self, packet_id: int, qos: int) -> None:
        """Acknowledge a message without subscribers with reason code 0x10."""
        if qos == 1:
            self.machine.send_ack(PacketType.PUBACK, packet_id, ReasonCode.NO_MATCHING_SUBSCRIBERS)
            self.stream.mark_for_flush()
        else:
            self._accept_once(packet_id, ReasonCode.NO_MATCHING_SUBSCRIBERS)

    def _publish_on(self) -> None:
        """Stop holding the client's publishes if at most half of the permitted messages are unsettled."""
        if self._release_publishes is not None and self.unsettled <= self._ingress.unsettled_max // 2:
            release_publishes, self._release_publishes = self._release_publishes, None
            release_publishes()

    def _accept_once(self, packet_id: int, reason: ReasonCode = ReasonCode.SUCCESS) -> None:
        """Record in the session that all targets have accepted a QoS 2 message, and send PUBREC if it is due.

        The session's current connection sends it, with `reason` if that is this connection. PUBREC is not due
        if the message is unknown, or if the acceptance is still to be written to disk.
        """
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
            self.stream.mark_for_flush()
        else:
            session.outlet.send_received(packet_id)

    def handle_refusal(self, receipt: Receipt, outcome: Outcome) -> None:
        """Report to the client that a target has refused its message `receipt`, or schedule another attempt.

        An MQTT 5 client is sent the reason code. For an older version the message is published again later,
        or becomes a dead letter and is acknowledged if another attempt is pointless. If the client has resent
        the message on a newer connection, that connection processes the refusal.
        """
        _, packet_id, qos, _, _ = receipt
        if self.is_closed or self.machine.state is not State.OPEN:
            heir = self._successor(packet_id) if qos == 2 else None
            if heir is None:
                self._forget_incoming(receipt, refusal_sent=False)
            else:
                heir.unsettled += 1
                heir.handle_refusal((heir, *receipt[1:]), outcome)
        elif self.machine.version == Version.V5:
            self._ingress.log_refused_message(receipt[3], outcome)
            self._forget_incoming(receipt, refusal_sent=True)
            kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
            self.machine.send_ack(kind, packet_id, publish_refused(outcome), outcome.text)
            self.stream.mark_for_flush()
            self.unsettled -= 1
            if self._release_publishes is not None:
                self._publish_on()
        elif outcome.reason in FINAL or self._is_final(receipt, outcome):  # and no route has stored it
            self._ingress.log_refused_message(receipt[3], outcome)
            then = partial(self.acknowledge, packet_id, qos)
            self._ingress.store_dead_letter(receipt[3], outcome, then, partial(self._try_again, receipt))
        else:
            self._try_again(receipt, outcome)

    def _successor(self, packet_id: int) -> MqttConnection | None:
        """Return the connection on which the client has resent a message after this one ended, or None."""
        outlet: object = None if self.session is None else self.session.outlet
        if isinstance(outlet, MqttConnection) and packet_id in (outlet._repeated or ()):
            return outlet
        return None

    @staticmethod
    def _is_final(receipt: Receipt, outcome: Outcome) -> bool:
        """Return True if the message was rejected and none of its routes has `on_reject: retry`."""
        entry = receipt[4]
        return outcome.verdict is Verdict.REJECTED and not any(
            branch.route.on_reject == "retry" for branch in entry.plan.branches
        )

    def _try_again(self, receipt: Receipt, outcome: Outcome) -> None:
        """Schedule another attempt to publish the refused message `receipt`, without acknowledging it."""
        _, packet_id, qos, _, _ = receipt
        if qos == 2 and self.session is not None:
            self.session.received_ids.mark_refused(packet_id)
        self._needed_retries().add(receipt, outcome, self._ingress.now())

    def _needed_retries(self) -> Retries:
        """Return the connection's `Retries`, which are created at first use."""
        if self._retries is None:
            self.require_ticks()
            self._retries = Retries(self._ingress.disk_healthy)
        return self._retries

    def record_remaining_routes(self, packet_id: int, routes: frozenset[str]) -> None:
        """Record the routes (by name) that have not accepted a message; only these get its next attempt."""
        if not self.is_closed and self.machine.state is State.OPEN and self.machine.version < Version.V5:
            self._needed_retries().record_remaining_routes(packet_id, routes)

    def remaining_entry(self, packet_id: int, entry: RoutingEntry) -> RoutingEntry:
        """Return the entry restricted to the routes that have not accepted the message `packet_id` yet."""
        return entry if self._retries is None else self._retries.remaining_entry(packet_id, entry)

    def cannot_notify(self, retries: bool, outcome: Outcome) -> bool:
        """Return True if the client cannot be notified that a route rejected its message.

        That is so while a client before MQTT 5 is connected, if the outcome is final or the route is not
        retried; the route then has to store a dead letter. `retries` is True if the route has `on_reject:
        retry`.
        """
        if self.is_closed or self.machine.state is not State.OPEN or self.machine.version == Version.V5:
            return False
        return outcome.reason in FINAL or not retries

    def _forget_incoming(self, receipt: Receipt, *, refusal_sent: bool) -> None:
        """Forget the packet identifier of a refused QoS 2 message, so that a repeated message is published.

        `refusal_sent` is True if the client was sent the refusal.
        """
        _, packet_id, qos, _, _ = receipt
        if qos == 2 and self.session is not None:
            self.session.received_ids.forget(packet_id, refusal_sent=refusal_sent)

    # Packets.

    def _perform(self, event: Event) -> bool:
        """Execute a packet. Return False if it must be continued in a later time slice of the connection.

        That is so if a result is pending, or if only some of the packet's topic filters were processed.
        """
        try:
            return self._control(event)
        except Pending as pending:
            self._ingress.suspend(self.stream, pending.awaited)
            return False

    def _control(self, event: Event) -> bool:
        """Execute a packet other than PUBLISH. Return False if some topic filters remain to be processed.

        Raises Pending if a permission decision is pending.
        """
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
            before = self._ingress.namespace.change_count
            self._disconnect(event)
            self.wait_for_commit(before)
        else:
            assert isinstance(event, Pingreq)  # the machine responds to it
        self.stream.mark_for_flush()  # the machine may have responded by itself
        return True

    def _filters(self, event: Subscribe | Unsubscribe) -> bool:
        """Process the topic filters of a SUBSCRIBE or UNSUBSCRIBE that are not processed yet.

        Return False if the connection's time slice was used up before the last filter, and True when the
        acknowledgement has been encoded. A packet may contain thousands of filters, for which other clients
        should not have to wait.
        """
        session, begun = self.session, self._begun
        assert session is not None
        if begun is None:
            begun = self._begun = BegunPacket(self._ingress.namespace.change_count)
        if isinstance(event, Subscribe):
            if not self._subscribe(session, event, begun.reasons):
                return False
        elif not self._unsubscribe(session, event, begun.reasons):
            return False
        self._begun = None
        self.wait_for_commit(begun.recorded)
        self.stream.mark_for_flush()
        return True

    def _publishes(self, rows: list[PublishRow]) -> list[PublishRow]:
        """Publish rows (messages). Return those that are postponed to a later time slice of the connection.

        Rows are postponed if the time slice is used up by topics that are not cached yet, or if a permission
        or routing decision is pending.
        """
        postponed = self._prepare(rows)
        if postponed is not None:
            return postponed
        if len(rows) >= BURST_MIN:
            postponed = self._publish_together(rows)
        if postponed is None:
            postponed = self._publish_each(rows)
        ingress, done = self._ingress, len(rows) - len(postponed)
        ingress.stats.messages_in += done
        if (rate := self.stream.rate) is not None:
            rate.messages += done
        if self._unacknowledged >= ingress.unsettled_max and self._release_publishes is None:
            self._limit_unsettled()
        return postponed

    def _prepare(self, rows: list[PublishRow]) -> list[PublishRow] | None:
        """Check conditions that concern all rows (messages). Return None if the rows may be published now.

        Otherwise return the rows to publish in a later time slice: all rows while packet identifiers are
        being stored, or none if all were refused for lack of memory. Raises RemoteProtocolError for a QoS or
        RETAIN that the client may not use.
        """
        ingress = self._ingress
        dispatcher = ingress.dispatcher
        if dispatcher.memory.short and not dispatcher.memory.admit(self, len(rows)):
            self._refuse_publishes(rows)
            return []
        if self._generation != dispatcher.generation:
            self._entries = ingress.entries.of(self.current_rights().key)
            self._generation = dispatcher.generation
        if self.capabilities is not None:
            check_publish(rows, self.capabilities)
        return None if self._answers is None else self._waits_for_ids(rows)

    def _publish_together(self, rows: list[PublishRow]) -> list[PublishRow] | None:
        """Publish all rows at once if they differ only in packet identifier and body.

        Return None, and publish nothing, if the rows differ in anything else or must be published one by one
        for another reason. Otherwise return the rows that are still to be published: none, or all of them if
        a permission or routing decision is pending. The connection publishes these once the decision is made.
        """
        ingress, entries, topic = self._ingress, self._entries, rows[0][1]
        if self._retries is not None and self._retries.active_holds is not None:
            return None
        if self.machine.version < Version.V5 and ingress.dispatcher.echoes.has_sent:
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
        """Publish rows (messages) one by one. Return those that are postponed to a later time slice."""
        ingress = self._ingress
        dispatcher = ingress.dispatcher
        entries = self._entries
        batch = ingress.begun_batch()
        sender = self.sender
        body_max = ingress.body_max
        held_receipts = None if self._retries is None else self._retries.active_holds
        echoes = None
        if self.machine.version < Version.V5 and dispatcher.echoes.has_sent:
            echoes = dispatcher.echoes
        one_by_one = iter(rows)
        postponed: list[PublishRow] = []
        property_set: PropertySet
        parsed = EMPTY_SCANNED
        for flags, topic, packet_id, raw, body in one_by_one:
            entry = entries.get(topic)
            if entry is None:
                if self.stream.is_turn_spent():
                    postponed = [(flags, topic, packet_id, raw, body), *one_by_one]
                    break
                try:
                    entry = self._first_seen(topic, entries)
                except Pending as pending:
                    ingress.suspend(self.stream, pending.awaited)
                    postponed = [(flags, topic, packet_id, raw, body), *one_by_one]
                    break
            qos = flags >> 1 & 3
            if raw:
                parsed = publish_essentials(raw)
                property_set, interval, hops = parsed, parsed.expiry, parsed.hops
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
                if qos == 2 and not self._record_packet_id(packet_id, entry):
                    continue
                self.unsettled += 1
                receipt: Receipt | None = (self, packet_id, qos, message, entry)
            else:
                receipt = None
            if len(body) > body_max:
                self._refuse_body(entry, message, receipt, TOO_LARGE)
            elif raw and parsed.read_texts is None and UTF8 in raw and not has_valid_format(message):
                self._refuse_body(entry, message, receipt, NOT_TEXT)
            elif held_receipts is not None and receipt is not None:
                held_receipts.append(receipt)  # keeps its place behind messages held for the disk
            elif not dispatcher.publish(batch, entry, message, receipt):
                ingress.handle_unrouted(entry, message, receipt)
        return postponed

    def _waits_for_ids(self, rows: list[PublishRow]) -> list[PublishRow] | None:
        """Store the packet identifiers of the QoS 2 messages in `rows`. Return None if all are stored.

        Otherwise return the rows that are postponed until the identifiers are stored. If the client has moved
        to another replica, or the connection has ended, only messages with QoS 0 are published or postponed,
        because the client sends the others again.
        """
        session = self.session
        packet_ids = [packet_id for flags, _, packet_id, _, _ in rows if flags >> 1 & 3 == 2]
        if not packet_ids or session is None:
            return None
        try:
            self._ingress.namespace.reserve_packet_ids(session, packet_ids)
        except Superseded:
            self._disconnect_taken_over()
            return self._publishes(_not_repeated(rows))
        except Pending as pending:
            if self._elsewhere:  # the identifiers are not known there
                self._disconnect_taken_over()
                return self._publishes(_not_repeated(rows))
            if self.is_closed:  # the client repeats what had no acknowledgement
                return self._publishes(_not_repeated(rows))
            if self._release_ids is None:
                self._awaits_ids = True
                self._release_ids = self.waiting.hold(EVERY_CHANNEL)
                self._ingress.tasks.start_soon(self._await_ids, pending.awaited)
            return rows
        return None

    async def _await_ids(self, awaited: Awaited) -> None:
        """Wait until packet identifiers are stored (`awaited`), then continue the publishes with them.

        Reading continues meanwhile, so that the client's acknowledgements and pings are processed.
        """
        await awaited.wait()
        release_ids, self._release_ids = self._release_ids, None
        if release_ids is not None:
            release_ids()
        self._ingress.flush()

    def _publish_burst(self, entry: RoutingEntry, burst: Burst) -> None:
        """Publish a burst of messages to the targets of `entry`.

        Raises RemoteProtocolError for malformed properties.
        """
        flags, raw, packet_ids, bodies = burst
        property_set, expires, hops = NO_PROPERTIES, NEVER, 0
        if raw:
            parsed = publish_essentials(raw)
            property_set, hops = parsed, parsed.hops
            expires = NEVER if parsed.expiry is None else clock.utc() + parsed.expiry
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
                    self._ingress.handle_unrouted(entry, message, receipt)

    def _first_seen(self, topic: bytes, entries: dict[bytes, RoutingEntry]) -> RoutingEntry:
        """Resolve the routing entry of a topic that is not in `entries` yet, and cache it in `entries`.

        The topic is checked against the client's permissions and the routing. A topic that may not be
        published to gets an entry without targets; `MqttIngress.handle_unrouted` reports the reason. Raises
        Pending if the permission decision is pending.
        """
        address = topic_address(decode_topic(topic), topic)
        entry: RoutingEntry
        try:
            entry = self._ingress.permitted_entry(self.current_rights(), address)
        except PublishRefused as refused:
            entry = DeniedEntry(address, str(refused))
        self._ingress.entries.cache_entry(entry, entries)
        return entry

    def _refuse_publishes(self, rows: list[PublishRow]) -> None:
        """Refuse messages for lack of memory: drop those with QoS 0, and refuse those with QoS 1 and 2.

        Before MQTT 5 the only way to refuse is to disconnect the client.
        """
        self._ingress.stats.count_refused_unpublished(LOW_ON_MEMORY, len(rows))
        assert self.session is not None
        for flags, _, packet_id, _, _ in rows:
            qos = flags >> 1 & 3
            if not qos:
                continue
            if self.machine.version is not Version.V5:
                self._ingress.disconnect_client(self, ReasonCode.QUOTA_EXCEEDED)
                return
            if qos == 2 and packet_id in self.session.received_ids:
                self._note_repeat(packet_id)
                continue
            kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
            self.machine.send_ack(kind, packet_id, publish_refused(LOW_ON_MEMORY), LOW_ON_MEMORY.text)
        self.stream.mark_for_flush()

    @property
    def begun_bytes(self) -> int:
        """Number of bytes of an incomplete packet that the protocol machine has stored."""
        return self.machine.begun_bytes

    def close_for_memory(self) -> None:
        """Disconnect the client, because no memory is left for its incomplete packet."""
        self._ingress.disconnect_client(self, ReasonCode.QUOTA_EXCEEDED)

    @property
    def _unacknowledged(self) -> int:
        """Number of messages that count against the Receive Maximum which the gateway sent to the client.

        QoS 1 counts until PUBACK, QoS 2 until PUBCOMP (5: 3.3.4).
        """
        return self.unsettled if self._unreleased is None else self.unsettled + len(self._unreleased)

    def _limit_unsettled(self) -> None:
        """Hold the publishes of a client with too many unsettled messages, before MQTT 5.

        Raises RemoteProtocolError for an MQTT 5 client that has exceeded the Receive Maximum of its CONNACK.
        """
        if self.machine.version is not Version.V5:
            self._release_publishes = self.waiting.hold(EVERY_CHANNEL)
        elif self._unacknowledged > self._ingress.unsettled_max:
            raise RemoteProtocolError(
                "unacknowledged messages exceed the gateway's Receive Maximum",
                reason=ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
            )

    def _refuse_body(
        self, entry: RoutingEntry, message: Message, receipt: Receipt | None, outcome: Outcome
    ) -> None:
        """Refuse a message because of its body; count and record the refusal, and report it to the client.

        `outcome` is the reason: the body is too large, or is marked as UTF-8 and is not valid UTF-8.
        """
        self._ingress.refuse(entry, message, outcome)
        self._report_declined(message, receipt, outcome)

    def _report_declined(self, message: Message, receipt: Receipt | None, outcome: Outcome) -> None:
        """Report a refusal to the client, or log it if no acknowledgement is expected (`receipt` None)."""
        if receipt is not None:
            self.handle_refusal(receipt, outcome)
        else:
            self._ingress.log_refused_message(message, outcome)

    def _oversized(self, packet: Oversized) -> None:
        """Refuse a PUBLISH whose body was too large and has been skipped, so that it cannot be retried."""
        ingress, publish = self._ingress, packet.publish
        ingress.stats.messages_in += 1
        address = topic_address(publish.topic)
        nowhere = RoutingEntry(address, NOWHERE)
        if publish.qos == 2 and not self._record_packet_id(publish.packet_id, nowhere):
            return
        message = Message(address, b"", NO_PROPERTIES, publish.qos, sender=self.sender._replace(endpoint=""))
        receipt: Receipt | None = None
        if publish.qos:
            self.unsettled += 1
            receipt = (self, publish.packet_id, publish.qos, message, nowhere)
        outcome = TOO_LARGE._replace(
            text=f"{TOO_LARGE.text}: {packet.byte_count} bytes, which were not stored"
        )
        came = Message(
            address, WithheldBody(packet.byte_count), NO_PROPERTIES, publish.qos, sender=self.sender
        )
        ingress.refuse(nowhere, came, outcome)
        self._report_declined(message, receipt, outcome)

    def _record_packet_id(self, packet_id: int, entry: RoutingEntry) -> bool:
        """Record the packet identifier of a QoS 2 message. Return False if it is in use already.

        It is in use until the client's PUBREL (4.3.3). In that case the message is a repetition.
        """
        session = self.session
        assert session is not None
        if session.received_ids.add(packet_id):
            if self._repeated:
                self._repeated.discard(packet_id)
            held_receipts = None if self._retries is None else self._retries.active_holds
            if held_receipts is None:
                self.note_local_delivery(packet_id, entry)
            return True
        self._note_repeat(packet_id)
        return False

    def _note_repeat(self, packet_id: int) -> None:
        """Send PUBREC for a repeated QoS 2 message if the first attempt was accepted.

        Otherwise record that the outcome of the first attempt is to be reported on this connection.
        """
        assert self.session is not None
        self._ingress.stats.duplicates += 1
        if self.session.received_ids.is_accepted(packet_id):
            self.send_received(packet_id)
        else:
            self._repeated = self._repeated or set()
            self._repeated.add(packet_id)

    def note_local_delivery(self, packet_id: int, entry: RoutingEntry) -> None:
        """Request that the packet identifier of a QoS 2 message is stored together with the message.

        The message is the one that is published next. Do nothing if the session ends with its connection, or
        if a target of `entry` gets the message only later.
        """
        session = self.session
        if session is not None and session.is_durable and self._ingress.delivers_locally(entry):
            slot = len(self._ingress.batch)  # the message's, which is published now
            self._ingress.local_ids.append((session.received_ids, packet_id, slot))

    # Subscriptions and DISCONNECT.

    def _subscribe(self, session: Session, packet: Subscribe, reasons: list[int]) -> bool:
        """Subscribe to the topic filters of a SUBSCRIBE that have no reason code in `reasons` yet.

        Append a reason code for each: filters are granted or refused individually. Return False if the
        connection's time slice was used up before the last filter. After the last one, send the SUBACK,
        unless the client has already sent DISCONNECT, and start to send retained messages. Raises
        RemoteProtocolError for a malformed filter before MQTT 5.
        """
        machine, rights = self.machine, self.current_rights()
        assert machine.connect is not None
        if len(self._ingress.batch):
            self._ingress.end_turn()  # messages retained by earlier publishes must be found
        bridge = machine.connect.bridge  # of Mosquitto's kind: levels 0x83 and 0x84
        identifier = packet.properties.get(Property.SUBSCRIPTION_IDENTIFIER, (0,))[0]
        for subscription in islice(packet.subscriptions, len(reasons), None):
            if self.stream.is_turn_spent():
                return False
            why = self._filter_refusal(session, rights, subscription)
            if why is not None:
                refused = SUBSCRIBE_REFUSED[why]
                if machine.version < Version.V5 and not is_filter(subscription.filter):
                    raise RemoteProtocolError(
                        f"topic filter {subscription.filter!r} is malformed", reason=refused
                    )
                self._ingress.log_refused_subscription(session.client_id, subscription.filter, refused)
                reasons.append(refused)  # before MQTT 5 the codec sends 0x80 for all of them
                continue
            qos = (
                subscription.qos
                if self.capabilities is None
                else min(subscription.qos, self.capabilities.qos_max)
            )
            if shared_pattern(subscription.filter) is not None:
                qos = min(qos, self._ingress.namespace.capabilities.shared_qos_max)
            options = SubscriptionOptions(
                qos,
                subscription.no_local or (bridge and shared_pattern(subscription.filter) is None),
                subscription.retain_as_published or bridge,
                subscription.retain_handling,
                identifier,
            )
            self._ingress.namespace.subscribe(session, subscription.filter, options)
            reasons.append(qos)
        if machine.state is State.OPEN:
            machine.send_suback(packet.packet_id, reasons)
        self._ingress.send_due_retained(session)
        return True

    def _filter_refusal(
        self,
        session: Session,
        rights: Rights,
        subscription: Subscription,
    ) -> Reason | None:
        """Return the reason why a topic filter of a SUBSCRIBE is refused, or None if the filter is granted.

        Raises Pending if the permission decision or the number of the user's subscriptions is pending.
        """
        limits = self._ingress.limits
        decision = rights.mqtt_subscribe(subscription.filter, subscription.qos)
        size = len(subscription.filter.encode())
        if size > limits.topic_filter_bytes_max or size > self._ingress.namespace.filter_bytes_max:
            return Reason.NAME_INVALID
        if subscription.filter.count("/") >= limits.topic_levels_max or not is_filter(subscription.filter):
            return Reason.NAME_INVALID
        if not decision.allowed:
            self._ingress.record_denial(self.sender, "subscribe", subscription.filter, decision.rule)
            return Reason.NOT_AUTHORIZED
        if session.persistent and self._ingress.namespace.failing:
            return Reason.STORE  # it could not be recorded
        is_subscribed = subscription.filter in session.subscriptions
        if not is_subscribed and len(session.subscriptions) >= self._ingress.limits.subscriptions_max:
            return Reason.QUOTA
        if not is_subscribed and self._ingress.namespace.subscriptions_full(
            session.user, subscription.filter
        ):
            self._ingress.namespace.await_count(session.user, session.client_id)
            return Reason.QUOTA
        return None

    def _unsubscribe(self, session: Session, packet: Unsubscribe, reasons: list[int]) -> bool:
        """Remove the subscriptions to topic filters of an UNSUBSCRIBE that have no reason code yet.

        Append a reason code to `reasons` for each. Return False if the connection's time slice was used up
        before the last filter. After the last one, send the UNSUBACK.
        """
        namespace = self._ingress.namespace
        for topic_filter in islice(packet.filters, len(reasons), None):
            if self.stream.is_turn_spent():
                return False
            was_subscribed = namespace.unsubscribe(session, topic_filter)
            reasons.append(ReasonCode.SUCCESS if was_subscribed else ReasonCode.NO_SUBSCRIPTION_EXISTED)
        if self.machine.state is State.OPEN:
            self.machine.send_unsuback(packet.packet_id, reasons)
        return True

    def _disconnect(self, packet: Disconnect) -> None:
        """Process DISCONNECT: drop the will, set the session expiry and end the stream (5: 3.14.2).

        The will stays if the reason code requests it. Raises RemoteProtocolError if a session that ends with
        its connection is to be prolonged.
        """
        session = self.session
        self.expiry_before = None  # its CONNACK is written before the stream ends, even if it is delayed
        if packet.reason != ReasonCode.DISCONNECT_WITH_WILL:
            self.will = None
        expiry = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL)
        if expiry is not None and session is not None:
            if expiry and not session.persistent:
                raise RemoteProtocolError(
                    "the session expiry interval cannot be changed from 0",
                    reason=ReasonCode.PROTOCOL_ERROR,
                )
            most = self._ingress.expiry_secs_max(self.current_rights())
            if expiry > most:  # the CONNACK reports this for CONNECT; DISCONNECT has no response
                log.info(
                    "session expiry shortened",
                    client=self.sender.client,
                    wanted_seconds=expiry,
                    seconds=most,
                )
            session.expiry_secs = float(min(expiry, most))
        self.stream.end("DISCONNECT")

    # Session.

    def open(self, session: Session, receive_max: int) -> None:
        """Attach the session of the admitted client and start its deliveries.

        `receive_max` is the maximum number of unacknowledged messages that the client accepts.
        """
        self.session = session
        after = self._ingress.namespace.commit_notifier(session)
        if after is not None:
            self._answers = DelayedAcknowledgements(after, self.machine, self.stream, self.require_ticks)
        session.attach(self, receive_max)
        self.send_due_retained()
        self.stream.mark_for_flush()

    def wait_for_commit(self, before: int) -> None:
        """Delay the connection's output until all changes of sessions since `before` are on disk.

        `before` is an earlier value of `namespace.change_count`.
        """
        namespace = self._ingress.namespace
        if namespace.has_unstored_changes(before):
            self.stream.hold_output()
            namespace.after_recorded(self.session, self._committed)
        else:
            self.expiry_before = None

    def _committed(self, outcome: Outcome) -> None:
        """Write the delayed output after a successful commit; abort the connection after a failed one.

        A new session then ends, because its CONNACK was in the delayed output and has not reached the client.
        """
        if outcome is not ACCEPTED:
            if self.expiry_before is not None and self.session is not None and not self.is_closed:
                self._abandon(self.session)
            self.stream.abort(outcome.text)
            return
        self.expiry_before = None
        self.stream.release_output()
        self.send_due_retained()

    def send_due_retained(self) -> None:
        """Continue to send the retained messages that match the session's new subscriptions."""
        if self.session is not None and self.session.walks and not self.is_closed:
            self._ingress.send_due_retained(self.session)

    def handle_takeover(self, *, patient: bool = False) -> None:
        """Disconnect the client, because another connection uses its client identifier (3.1.4).

        Packets that the client has sent before are processed first. With `patient`, a client that has moved
        to another replica stays connected for GRACE_SECS seconds, so that acknowledgements that are on their
        way arrive, and the acknowledged messages are not redelivered.
        """
        self.stream.read_remaining(self._ingress.now())
        self._ingress.end_turn()
        if self.is_closed:
            return
        # Publishes whose identifiers are not stored yet are dropped: the client sends them again elsewhere.
        if patient and self.session is not None and self.session.in_flight and self.stream.listening:
            self._elsewhere = True
            self._ingress.tasks.start_soon(
                self._ingress.call_after_grace, self.stream, self._disconnect_taken_over
            )
        else:
            self._disconnect_taken_over()

    def _disconnect_taken_over(self) -> None:
        """Send DISCONNECT 0x8E (session taken over) and close, unless already closed."""
        if self.is_closed:
            return
        self._yields = False  # the client has reconnected
        self.machine.send_disconnect(ReasonCode.SESSION_TAKEN_OVER)
        self.stream.end("taken over")

    def _fail(self, error: RemoteProtocolError) -> None:
        """End the connection because of the client's protocol error; log and count it."""
        ingress = self._ingress
        ingress.stats.protocol_errors.add(reason_name(error.reason))
        ingress.report(self.stream.remote, error)
        self.machine.fail(error)
        self.stream.end(str(error))


def _not_repeated(rows: list[PublishRow]) -> list[PublishRow]:
    """Return the rows (messages) with QoS 0, which a client never sends again."""
    return [row for row in rows if not row[0] >> 1 & 3]


def _joined(events: list[Event]) -> list[Event]:
    """Return events with adjacent publishes merged, so that their packet identifiers are stored together."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Publishes) and isinstance(last, Publishes):
            last.rows.extend(event.rows)
        else:
            found.append(event)
    return found


class MqttListenerSource(MqttIngress):
    """MQTT side of a listener, which creates an `MqttConnection` for each client."""

    def connect(self, stream: Stream, now: float) -> MqttConnection:
        """Return the connection object of a new client; `now` is in loop-clock seconds."""
        return MqttConnection(self, stream, now)

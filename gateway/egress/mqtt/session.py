"""MQTT link: session with one remote MQTT broker over all its connections.

The link session is the endpoint's namespace in the dispatcher, and the sink of every route that ends there
(publisher.py). Messages from the broker use the routes that start there (receiver.py), whose filters are
subscribed to (filters.py). The session outlives its connections.

With `version: auto` a link starts with MQTT 5.0. If a broker refuses that version, 3.1.1 is used from then
on. If the connection merely ends without a CONNACK, as with old brokers and also with brokers that are just
starting, the other version is tried next and nothing is remembered, so that a temporary failure does not cost
a broker of MQTT 5 its properties forever. A broker that has used 5.0 is not tried with the other version:
while it restarts it would resume the session in 3.1.1, and Mosquitto has lost a message because of that.

A link with shared subscriptions does not fall back, because only MQTT 5 defines `$share`. Many brokers
support it in 3.1.1, too; for the others it is a topic like any other, on which no message would ever arrive.
A link that authenticates by SCRAM does not fall back either: there are no AUTH packets before MQTT 5.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from gateway.access.scram import METHOD, Proof, ScramError
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.routing import OneSink
from gateway.egress.link import LinkStatus
from gateway.egress.mqtt.filters import Filters
from gateway.egress.mqtt.publisher import MqttLinkPublisher, Terms
from gateway.egress.mqtt.receiver import DeliveringConnection, MqttLinkReceiver
from gateway.errors import RemoteProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.batch import SubBatch
from gateway.model.message import Sender
from gateway.model.spooled_bodies import Piece
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.data_types import Bounds, violation
from gateway.protocols.mqtt.packets import Auth, Connack, Connect, Disconnect, Event, Suback, Unsuback
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.runs import Acks, Publishes, PublishRow
from gateway.protocols.mqtt.spec import (
    FAILURE,
    VARINT_MAX,
    VERSIONS,
    WORD_MAX,
    PacketType,
    Property,
    ReasonCode,
    Version,
    reason_name,
)
from gateway.settings import Limits, MqttLink
from gateway.settings.endpoints import LinkUrl
from gateway.transport.stream import Stream

# A CONNACK in the form of MQTT 3 that refuses the version: 0x01 is its own code, 0x84 that of MQTT 5.
_REFUSES_VERSION: Final = (b"\x20\x02\x00\x01", b"\x20\x02\x00\x84")
# Reasons with which a broker disconnects regardless of what it received.
BUSY: Final = frozenset(
    (
        *(ReasonCode.SERVER_UNAVAILABLE, ReasonCode.SERVER_BUSY, ReasonCode.SERVER_SHUTTING_DOWN),
        *(ReasonCode.MESSAGE_RATE_TOO_HIGH, ReasonCode.QUOTA_EXCEEDED, ReasonCode.ADMINISTRATIVE_ACTION),
        *(ReasonCode.SESSION_TAKEN_OVER, ReasonCode.USE_ANOTHER_SERVER),
    )
)


class MqttLinkConnection(DeliveringConnection):
    """Connection of an MQTT link, which processes the events of one stream.

    The handshake must be complete by `deadline`, in loop-clock seconds. `proof` is the state of an
    authentication by AUTH packets, or None.
    """

    def __init__(
        self,
        session: MqttLinkSession,
        stream: Stream,
        machine: ClientConnection,
        sender: Sender,
        deadline: float,
        proof: Proof | None = None,
    ) -> None:
        super().__init__(stream, machine, sender)
        self.answered = False  # a CONNACK arrived
        self.opened = False  # and it accepted the connection
        self.is_paused = False
        self.refuses_version = False
        self.too_large = False  # the broker reported a packet as too large
        self.busy = False  # the broker reported that it accepts nothing now, or the gateway disconnected
        self._session = session
        self._deadline = deadline
        self._proof = proof  # None if the password is sent, or there is none
        self._ping_at = 0.0

    # Interface for the stream.

    def receive(self, data: bytes, now: float) -> None:
        """Process received bytes. A protocol error of the broker is counted and ends the connection.

        If `data` is empty, process the events that an earlier call has left. `now` is in loop-clock seconds.
        """
        try:
            machine, stream = self.machine, self.stream
            self._process(stream.postponed() or machine.receive_data(data, now), now)
            while machine.pending and not (stream.unread or self.is_ending):
                self._process(machine.receive_data(b"", now), now)
            if machine.unread:
                stream.request_turn()
            stream.expect(machine.needed_bytes)
        except RemoteProtocolError as error:
            self.refuses_version = not self.opened and data[:4] in _REFUSES_VERSION
            self._session.stats.protocol_errors.add(reason_name(error.reason))
            self.stream.end(f"the broker violated the protocol: {error}")
        self._session.publisher.continue_turn()
        self._session.balance()

    def data_to_send(self) -> bytes | list[Piece]:
        """Return pending acknowledgements and everything else that was encoded."""
        self._acknowledge()
        return self.machine.to_send()

    def _acknowledge(self) -> None:
        machine = self.machine
        if self.is_open:
            if self.pubacks:
                machine.acknowledge(PacketType.PUBACK, self.pubacks)
                self.pubacks = []
            if self.pubrecs:
                machine.acknowledge(PacketType.PUBREC, self.pubrecs)
                self.pubrecs = []

    def resume_writing(self) -> None:
        """Continue to send messages, because the stream's send buffer has drained."""
        self._session.publisher.pump()

    def connection_lost(self, reason: str) -> None:
        """Report the loss of the connection to the session."""
        self._session.connection_lost(self, reason)

    # Interface for the link.

    def tick(self, now: float) -> None:
        """Send PINGREQ if it is due, and check the keep-alive and the time limit of the handshake.

        `now` is in loop-clock seconds.
        """
        machine = self.machine
        if not self.opened:
            if now >= self._deadline:
                self.stream.abort("no CONNACK received in time")
            return
        if self.is_paused:
            # Its packets wait in the socket, but PINGREQ must be sent all the same.
            machine.last_received = now
            is_due = machine.keep_alive > 0 and now >= self._ping_at
        elif machine.timed_out(now):
            self._session.stats.protocol_errors.add("keep_alive_timeout")
            self.stream.abort(f"the broker has been silent for {1.5 * machine.keep_alive:g} s")
            return
        else:
            is_due = now >= machine.ping_at()
        if is_due:
            self._ping_at = now + machine.keep_alive / 2
            machine.send_pingreq(now)
            self.stream.mark_for_flush()

    def shut_down(self) -> None:
        """Send DISCONNECT; the broker stores the session for session_expiry_secs."""
        self.busy = True
        self._acknowledge()
        self.machine.disconnect()
        self.stream.end("the gateway is stopping")

    # Interface for the publisher: the connection is its outlet.

    @property
    def is_open(self) -> bool:
        """False once the broker has ended the connection.

        The packets that were received before its DISCONNECT may not be processed yet; they are valid, but
        nothing can be sent.
        """
        return self.machine.state is State.OPEN

    def send(self, rows: list[PublishRow]) -> Sequence[int]:
        """Encode PUBLISH packets. Return the indexes of `rows` that exceed the Maximum Packet Size."""
        sent_rows = self.machine.aliased(rows) if self.machine.alias_max else rows
        return self.machine.publish_many(sent_rows)

    def release(self, packet_ids: list[int]) -> None:
        """Send PUBREL, if the connection is open."""
        if self.is_open:
            self.machine.acknowledge(PacketType.PUBREL, packet_ids)
            self.stream.mark_for_flush()

    # Interface for the link session.

    def hold(self, on: bool) -> None:
        """Stop reading (`on` True) or resume it."""
        if on is self.is_paused or self.is_ending:
            return
        self.is_paused = on
        if on:
            self.stream.hold()
        else:
            self.stream.release()

    # Packets.

    def _process(self, events: list[Event], now: float) -> None:
        session = self._session
        for at, event in enumerate(events, 1):
            if isinstance(event, Publishes):
                if rows := session.receiver.publish_packets(self, event.rows, now):
                    self.stream.postpone([Publishes(rows), *events[at:]])
                    break
            elif isinstance(event, Acks):
                self._acks(event.kind, event.rows)
            elif isinstance(event, Suback):
                session.filters.handle_suback(event.packet_id, event.reasons, now)
            elif isinstance(event, Unsuback):
                session.filters.handle_unsuback(event.packet_id, event.reasons)
            elif isinstance(event, Connack):
                # Or the machine was closed by an error that is reported next.
                if event.reason or self.machine.state is not State.CLOSED:
                    self._connack(event)
            elif isinstance(event, Auth):
                self._auth(event)
            elif isinstance(event, Disconnect):
                self.too_large = event.reason == ReasonCode.PACKET_TOO_LARGE
                self.busy = event.reason in BUSY
                self.stream.abort(
                    _refusal_text(event.reason, event.properties, "the broker disconnected the link")
                )
            if self.is_ending:
                return
        if self.pubacks or self.pubrecs or self.machine.out:
            self.stream.mark_for_flush()

    def _acks(self, kind: PacketType, rows: list[tuple[int, int]]) -> None:
        machine = self.machine
        five = machine.version is Version.V5
        unknown = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if five else ReasonCode.SUCCESS
        if kind is PacketType.PUBREL:
            answer = PacketType.PUBCOMP
            known_ids, strangers = self._session.receiver.release(rows)
            if known_ids and self.is_open:
                machine.acknowledge(answer, known_ids)
        else:
            answer = PacketType.PUBREL
            strangers = self._session.publisher.acked(kind, rows)
        for packet_id in strangers if self.is_open else ():
            machine.send_ack(answer, packet_id, unknown)

    def _auth(self, packet: Auth) -> None:
        """Reply to AUTH while the authentication that CONNECT began is not complete.

        Any other AUTH is a protocol error, which raises an exception.
        """
        if self._proof is None or self.opened or packet.reason != ReasonCode.CONTINUE_AUTHENTICATION:
            raise violation("the broker sent AUTH without a request")
        try:
            response = self._proof.answer(packet.properties.get(Property.AUTHENTICATION_DATA, b""))
        except ScramError as error:
            self.stream.abort(f"authentication failed: {error}")
            return
        properties = {Property.AUTHENTICATION_METHOD: METHOD, Property.AUTHENTICATION_DATA: response}
        self.machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, properties))

    def _connack(self, packet: Connack) -> None:
        self.answered = True
        if packet.reason >= FAILURE:
            self.refuses_version = packet.reason == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
            self.stream.abort(
                _refusal_text(packet.reason, packet.properties, "the broker refused the connection")
            )
            return
        if self._proof is not None:
            try:
                self._proof.check(packet.properties.get(Property.AUTHENTICATION_DATA, b""))
            except ScramError as error:
                self.stream.abort(f"authentication failed: {error}")
                return
        self.opened = True
        self._session.attach(self, present=packet.session_present)


def _refusal_text(reason: int, properties: PropertyMap, subject: str) -> str:
    text = properties.get(Property.REASON_STRING, "")
    words = f"{subject}: {reason_name(reason)}" + (f" ({text})" if text else "")
    if elsewhere := properties.get(Property.SERVER_REFERENCE):
        words += f"; it refers to the server {elsewhere}"
    if reason == ReasonCode.SESSION_TAKEN_OVER:
        words += "; another client uses the link's client_id"
    return words


PACKET_BYTES_MAX: Final = VARINT_MAX + 5
NEEDS_5: Final = (
    "share needs MQTT 5.0; set version: 3.1.1 if the broker supports shared subscriptions in MQTT 3.1.1"
)
PROVES_IN_5: Final = "authentication scram-sha-256 needs MQTT 5.0"


class MqttLinkSession(OneSink):
    """Session of one MQTT link. Implements `LinkSession` and `Sink`."""

    def __init__(
        self,
        name: str,
        settings: MqttLink,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        *,
        client_id: str,
    ) -> None:
        super().__init__(self)
        self.name = name
        self.status = status
        self.stats = stats = status.stats
        self.publisher = MqttLinkPublisher(
            stats,
            make_ledger=partial(dispatcher.echoes.ledger, name),
            messages_max=limits.queue_messages_max,
            bytes_max=limits.queue_bytes_max,
            in_flight_max=settings.in_flight_max,
        )
        self.publisher.share_among(dispatcher.quotas)
        self.receiver = MqttLinkReceiver(
            name, dispatcher, limits, stats, self.balance, retry_secs_max=settings.retry_secs_max
        )
        self.filters = Filters(name, settings.qos, stats, settings.share)
        self._settings = settings
        self._limits = limits
        self._client_id = client_id
        self._shares = settings.share is not None
        self._proves = settings.authentication == "scram-sha-256"
        self._connection: MqttLinkConnection | None = None
        self._older = False  # True if the broker has refused MQTT 5.0
        self._other = False  # True if it closed without a CONNACK: try the other version once
        self._spoke_5: set[str] = set()  # addresses of brokers that used MQTT 5.0

    # Interface for the link.

    @property
    def idle(self) -> bool:
        """True if no message waits for the broker, and every received one is settled or waits for a retry."""
        return self.idle_but(0)

    def idle_but(self, held_count: int) -> bool:
        """Return True if the session is idle, except for at most `held_count` unsettled received messages.

        If the broker stores the session, messages that wait in the receiver for a retry are not counted,
        because the broker delivers them again.
        """
        if self._settings.session_expiry_secs:
            held_count += self.receiver.held_back_count
        return self.publisher.idle and self.receiver.unsettled <= held_count

    @property
    def unconfirmed(self) -> int:
        """Number of messages for the broker, sent or waiting, that it has not confirmed."""
        return self.publisher.waiting_messages + self.publisher.in_flight

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Subscribe to the filters of a changed mapping. Topics need no declaration."""
        self.filters.set_filters(tuple(topic for _, topic in subscriptions.bindings))
        if self._connection is not None:
            self._connection.stream.mark_for_flush()

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> MqttLinkConnection:
        """Send CONNECT on a new connection. Return the owner of its stream.

        `now` is in loop-clock seconds.
        """
        limits = self._limits
        version = self._version()
        five = version is Version.V5
        expiry = self._settings.session_expiry_secs
        # Before MQTT 5 no limit can be announced to the broker; see MqttLinkReceiver.
        most = PACKET_BYTES_MAX
        if five:
            most = min(most, limits.message_bytes_max + limits.connect_bytes_max)
        bounds = Bounds(limits.properties_max, limits.properties_bytes_max)
        order = self._settings.byte_order
        machine = ClientConnection(packet_bytes_max=most, byte_order=order, bounded=True, bounds=bounds)
        proof = None
        if self._proves:
            proof = Proof(target.username, target.password, secrets.token_urlsafe(18))
        machine.connect(
            Connect(
                self._client_id,
                version,
                clean_start=not expiry,
                keep_alive=self._settings.heartbeat_secs,
                user_name=(target.username or None) if proof is None else None,
                password=target.password.encode() if target.password and proof is None else None,
                properties={**self._announced(most), **_authentication_properties(proof)} if five else {},
                bridge=self._settings.bridge and not five,
            ),
            now,
        )
        sender = Sender(self.name, self._client_id, target.username, stream.remote)
        deadline = now + self._settings.connect_timeout_secs
        return MqttLinkConnection(self, stream, machine, sender, deadline, proof)

    def forget_entries(self) -> None:
        """Clear the cached routing entries, because memory is short; they are computed again when needed."""
        self.receiver.forget_entries()

    def end_turn(self) -> None:
        """Publish the batch collected in this pass of the event loop."""
        self.receiver.end_turn()

    def tick(self, now: float) -> None:
        """Run the timers of filters, receiver and publisher; called once per second.

        The timers retry refused filters, retry messages that targets have refused for now, settle expired
        messages, and check deadlines. `now` is in loop-clock seconds.
        """
        self.filters.tick(now)
        self.receiver.tick(now)
        self.publisher.tick(now)
        self.publisher.settle_expired()
        if self._connection is not None:
            self._connection.stream.mark_for_flush()

    def publish(self, sub_batch: SubBatch) -> None:
        """Send the messages to the broker, or queue them."""
        self.publisher.publish(sub_batch)
        if self._connection is not None and self._connection.is_paused:
            self.balance()

    # Interface for the connection.

    def attach(self, connection: MqttLinkConnection, *, present: bool) -> None:
        """Start to send and receive after CONNACK.

        `present` is True if the broker resumed the session (MQTT 5: 3.2.2.1.1).
        """
        machine = connection.machine
        self._connection = connection
        self._other = False
        if machine.version is Version.V5:
            self._spoke_5.add(connection.stream.remote)
        self.stats.set_version(machine, machine.version.name.lower())
        self.status.mark_up()
        self.receiver.attach(connection, present=present)
        self.filters.attach(machine, present=present)
        terms = Terms(
            machine.version is Version.V5, machine.peer_receive_max, machine.max_qos, machine.retain_available
        )
        # MQTT 3.1 cannot express it, and repeating with the same ids is right in either case.
        self.publisher.attach(
            connection, connection.stream, terms, present=present or machine.version <= Version.V31
        )
        connection.stream.mark_for_flush()

    def connection_lost(self, connection: MqttLinkConnection, reason: str) -> None:
        """Process the loss of a connection.

        If the connection was never usable, the broker may not support its MQTT version: another one may be
        tried next.
        """
        if connection is self._connection:
            self._connection = None
            self.receiver.detach()
            self.filters.detach()
            self.publisher.detach(too_large=connection.too_large, busy=connection.busy)
        elif connection.refuses_version:
            self._older = True
            if self._settings.version == "auto" and (self._shares or self._proves):
                reason += f"; {NEEDS_5 if self._shares else PROVES_IN_5}"
        elif not connection.answered and connection.stream.remote not in self._spoke_5:
            self._other = not self._other
        self.status.mark_down(reason)

    def balance(self) -> None:
        """Stop reading while more than `prefetch` received messages are unsettled, then resume.

        A broker can send more than that where Receive Maximum does not apply, for example before MQTT 5.
        Reading continues while the publisher waits for acknowledgements.
        """
        connection = self._connection
        if connection is None:
            return
        most = self._settings.prefetch
        unsettled = self.receiver.unsettled
        if connection.is_paused or unsettled > most:
            connection.hold(
                unsettled > (most // 2 if connection.is_paused else most)
                and not self.publisher.awaits_answers
            )

    def _version(self) -> Version:
        version = self._settings.version
        if version != "auto":
            return VERSIONS[version]
        if self._shares or self._proves:
            return Version.V5
        return Version.V311 if self._older or self._other else Version.V5

    def _announced(self, packet_bytes_max: int) -> dict[Property, Any]:
        """Return the properties of CONNECT (MQTT 5: 3.1.2.11).

        `packet_bytes_max` is the Maximum Packet Size in bytes.
        """
        found: dict[Property, Any] = {Property.MAXIMUM_PACKET_SIZE: packet_bytes_max}
        if self._settings.session_expiry_secs:
            found[Property.SESSION_EXPIRY_INTERVAL] = self._settings.session_expiry_secs
        if self._settings.prefetch < WORD_MAX:
            found[Property.RECEIVE_MAXIMUM] = self._settings.prefetch
        if self._limits.topic_alias_max:
            found[Property.TOPIC_ALIAS_MAXIMUM] = self._limits.topic_alias_max
        return found


def _authentication_properties(proof: Proof | None) -> dict[Property, Any]:
    """Return the properties of CONNECT for an authentication by AUTH packets (MQTT 5: 3.1.2.11.9)."""
    if proof is None:
        return {}
    return {Property.AUTHENTICATION_METHOD: METHOD, Property.AUTHENTICATION_DATA: proof.first}

"""One MQTT client: what its packets do on the broker, and how the broker's answers reach it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.broker.access import Principal
from gateway.broker.mqtt.session import Row, Session
from gateway.broker.switch import Entry
from gateway.errors import RemoteProtocolError
from gateway.ingress.mqtt_acknowledgements import acknowledged
from gateway.ingress.mqtt_admission import connack_properties, expiry_secs, identifier_refused, reason_name
from gateway.ingress.mqtt_retries import Retries
from gateway.ingress.mqtt_subscriptions import subscribe, unsubscribe
from gateway.model.address import MqttAddress
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.octets import decode_topic
from gateway.protocols.mqtt.packets import (
    Acks,
    Connect,
    Disconnect,
    Event,
    Pingreq,
    Publishes,
    Subscribe,
    Unsubscribe,
    Will,
)
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.protocols.mqtt.translate import REASON_CODES, encode_properties, publish_facts
from gateway.transport.stream import Stream

if TYPE_CHECKING:
    from gateway.ingress.mqtt import MqttIngress

Receipt = tuple["MqttConnection", int, int, Message, Entry]

TOO_LARGE: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "the body exceeds limits.message_bytes_max")
# A global name costs a quarter of an enum's attribute, and these are on the way of every message.
OPEN: Final = State.OPEN
PUBACK: Final = PacketType.PUBACK


class MqttConnection:
    """The peer object of one client's stream, and its session's outlet."""

    def __init__(self, ingress: MqttIngress, stream: Stream, now: float) -> None:
        limits = ingress.limits
        self.stream = stream
        self.session: Session | None = None
        self.machine = ServerConnection(
            packet_bytes_max=limits.message_bytes_max + limits.connect_bytes_max,
            connect_bytes_max=limits.connect_bytes_max,
            byte_order=ingress.byte_order,
            topic_alias_max=limits.topic_alias_max,
            receive_max=limits.inflight_max,
        )
        self.unsettled = 0
        self._ingress = ingress
        self._deadline = now + limits.connect_timeout_secs
        self._principal: Principal | None = None
        self.sender = Sender(ingress.name)
        self._will: Will | None = None
        self._held = False
        self._lost = False
        self._pubacks: list[int] = []
        self._pubrecs: list[int] = []
        self._retries = Retries()
        self._expiry_secs = 0.0
        self._entries: dict[bytes, Entry] = {}
        self._generation = -1  # of the switch, when the entries were looked up

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived; a client's fault ends this connection and is counted."""
        try:
            machine = self.machine
            self._process(machine.receive_data(data, now))
            while machine.pending and not self._lost:
                self._process(machine.receive_data(b"", now))
        except RemoteProtocolError as error:
            self._fail(error)

    def data_to_send(self) -> bytes:
        """Acknowledgements that have gathered, and whatever was encoded."""
        machine = self.machine
        if machine.state is not OPEN:
            return machine.data_to_send()
        pubacks = self._pubacks
        if pubacks:
            self._pubacks = []
            machine.acknowledge(PUBACK, pubacks)
        if self._pubrecs:
            machine.acknowledge(PacketType.PUBREC, self._pubrecs)
            self._pubrecs = []
        return machine.data_to_send()

    def drained(self) -> None:
        """The client reads again."""
        if self.session is not None and self.session.outlet is self:
            self.session.pump()

    def lost(self, reason: str) -> None:
        """The connection is gone; the session may stay, the will may be published."""
        ingress = self._ingress
        self._lost = True
        ingress.forget(self)
        session = self.session
        if session is None:
            return
        for receipt in self._retries.give_up():
            self._forget_incoming(receipt)
        if session.outlet is not self:
            return
        session.detach()
        self._leave_will(session)
        if session.persistent:
            session.expires_at = ingress.now() + self._expiry_secs
        else:
            ingress.namespace.discard(session)

    def _leave_will(self, session: Session) -> None:
        """Publish the will now, or when its delay is over or the session ends (5: 3.1.2.5)."""
        will, self._will = self._will, None
        if will is None:
            return
        publish = partial(self._ingress.publish_will, will, self.sender)
        delay = will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
        if delay and session.persistent:
            self._ingress.namespace.delay_will(session, self._ingress.now() + delay, publish)
        else:
            publish()

    # What the listener asks.

    @property
    def idle(self) -> bool:
        """Nothing that this client published awaits its outcome."""
        return not self.unsettled

    def hold(self) -> Callable[[], None] | None:
        """Stop reading, unless the client must go on acknowledging; returns what undoes it."""
        if self.session is not None and self.session.subscriptions:
            return None
        self.stream.hold()
        return self.stream.release

    def tick(self, now: float) -> None:
        """Keep-alive, the time to CONNECT, and refused messages whose turn it is."""
        if self.session is None:
            if now >= self._deadline:
                self._ingress.stats.protocol_errors.add("connect_timeout")
                self.stream.abort("no CONNECT in time")
            return
        if not self.stream.reading:
            self.machine.last_received = now  # we do not read: its silence is ours
        elif self.machine.timed_out(now):
            self._ingress.stats.protocol_errors.add("keep_alive_timeout")
            self.machine.send_disconnect(ReasonCode.KEEP_ALIVE_TIMEOUT)
            self.stream.end("keep-alive timeout")
            return
        for receipt in self._retries.due(now):
            self._ingress.publish_again(receipt)

    def shut_down(self) -> None:
        """The gateway stops (MQTT 5: reason 0x8B); the will is not the client's fault and is kept quiet."""
        self._will = None
        self.machine.send_disconnect(ReasonCode.SERVER_SHUTTING_DOWN)
        self.stream.end("the gateway is stopping")

    # What the session asks: this is its outlet.

    @property
    def congested(self) -> bool:
        """The client does not read fast enough, or not any more."""
        return self.machine.state is not State.OPEN or self.stream.congested

    def send(self, rows: list[Row]) -> list[Row]:
        """Encode the rows; returns those that cannot be said: over the client's Maximum Packet Size, or with
        octets for properties that are none.
        """
        five = self.machine.version is Version.V5
        utc = time.time() if five else 0.0
        raw = b""
        octets = 0
        said = []
        for message, grant, qos, packet_id, dup in rows:
            if five:
                try:
                    raw = encode_properties(message, utc, subscription_ids=grant.identifiers)
                except RemoteProtocolError:
                    return self._send_sound(rows)
            retain = grant.retained or (message.retain and grant.retain_as_published)
            body = message.body
            octets += len(body) + 32
            said.append((dup << 3 | qos << 1 | retain, message.address.wire, packet_id, raw, body))
        too_large = [rows[at] for at in self.machine.publish_many(said)]
        self._ingress.stats.messages_out += len(rows) - len(too_large)
        self.stream.queued += octets
        self.stream.mark()
        return too_large

    def _send_sound(self, rows: list[Row]) -> list[Row]:
        """Send all but the rows whose sender, of another protocol, wrote malformed properties."""
        sound: list[Row] = []
        malformed: list[Row] = []
        for row in rows:
            try:
                row.message.property_set.properties  # noqa: B018 (decoded once, when it is asked for)
            except RemoteProtocolError:
                malformed.append(row)
            else:
                sound.append(row)
        self._ingress.undeliverable([row.message for row in malformed])
        return malformed + (self.send(sound) if malformed else sound)

    def send_release(self, packet_id: int) -> None:
        """PUBREL."""
        self.machine.send_ack(PacketType.PUBREL, packet_id, ReasonCode.SUCCESS)
        self.stream.mark()

    # What the ingress tells of published messages.

    def accepted(self, packet_id: int, qos: int) -> None:
        """Every target has the message."""
        self.unsettled -= 1
        if self._retries.attempts:
            self._retries.attempts.pop(packet_id, None)
        if qos == 1:
            if not self._pubacks:
                self.stream.mark()
            self._pubacks.append(packet_id)
        else:
            self._accept_once(packet_id)
        if self._held:
            self._read_on()

    def _read_on(self) -> None:
        """The client was held for having too much unsettled; that may be over."""
        if self.unsettled <= self._ingress.limits.inflight_max // 2:
            self._held = False
            self.stream.release()

    def _accept_once(self, packet_id: int) -> None:
        """QoS 2: the session remembers; whichever connection it has now says PUBREC."""
        session = self.session
        if session is None or packet_id not in session.incoming:
            return
        session.incoming[packet_id] = True
        outlet = session.outlet
        if isinstance(outlet, MqttConnection):
            outlet._pubrecs.append(packet_id)
            outlet.stream.mark()

    def refused(self, receipt: Receipt, outcome: Outcome) -> None:
        """A target did not take the message: MQTT 5 has words for it, older versions are tried again."""
        _, packet_id, qos, _, _ = receipt
        if self._lost or self.machine.state is not State.OPEN:
            self._forget_incoming(receipt)
        elif self.machine.version == Version.V5:
            self._forget_incoming(receipt)
            kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
            self.machine.send_ack(kind, packet_id, REASON_CODES[outcome.reason], outcome.text)
            self.stream.mark()
            self.unsettled -= 1
            if self._held:
                self._read_on()
        else:
            self._retries.add(receipt, self._ingress.now())

    def _forget_incoming(self, receipt: Receipt) -> None:
        """A QoS 2 message was not taken: when the client sends it again, that counts as the first time."""
        _, packet_id, qos, _, _ = receipt
        if qos == 2 and self.session is not None:
            self.session.incoming.pop(packet_id, None)

    # Packets.

    def _process(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Publishes):
                self._publishes(event.rows)
            elif isinstance(event, Acks):
                assert self.session is not None
                acknowledged(self.session, self.machine, event.kind, event.rows)
            elif isinstance(event, Connect):
                self._connect(event)
            elif isinstance(event, Subscribe):
                assert self.session is not None
                assert self._principal is not None
                subscribe(self._ingress, self.session, self._principal, self.machine, event)
            elif isinstance(event, Unsubscribe):
                assert self.session is not None
                unsubscribe(self._ingress, self.session, self.machine, event)
            elif isinstance(event, Disconnect):
                self._disconnect(event)
            elif not isinstance(event, Pingreq):  # the machine has answered that
                raise RemoteProtocolError(
                    "enhanced authentication is not offered", reason=ReasonCode.PROTOCOL_ERROR
                )
            if self._lost:
                return
        self.stream.mark()  # the machine may have answered by itself

    def _publishes(self, rows: list[tuple[int, bytes, int, bytes, bytes]]) -> None:
        ingress = self._ingress
        switch = ingress.switch
        if self._generation != switch.generation:
            self._entries = ingress.entries_of(self._principal)
            self._generation = switch.generation
        entries = self._entries
        publish = switch.publish
        batch = ingress.batch
        if not batch:
            batch.received = ingress.now()  # its first message: what waited before counts for nothing
        sender = self.sender
        body_max = ingress.limits.message_bytes_max
        for flags, topic, packet_id, raw, body in rows:
            entry = entries.get(topic)
            if entry is None:
                entry = self._resolve(topic, entries)
            qos = flags >> 1 & 3
            if raw:
                property_set, interval, hops = publish_facts(raw)
                expires = NEVER if interval is None else time.time() + interval
            else:
                property_set, expires, hops = NO_PROPERTIES, NEVER, 0
            retain = flags & 1 == 1
            message = Message(entry.address, body, property_set, qos, qos > 0, retain, expires, hops, sender)
            if qos:
                if qos == 2 and not self._first_time(packet_id):
                    continue
                self.unsettled += 1
                receipt: Receipt | None = (self, packet_id, qos, message, entry)
            else:
                receipt = None
            if len(body) > body_max:
                self._too_large(receipt)
                continue
            if not publish(batch, entry, message, receipt):
                ingress.unclaimed(entry, message, receipt)
        ingress.stats.messages_in += len(rows)
        if self.unsettled >= ingress.limits.inflight_max and not self._held:
            self._held = True
            self.stream.hold()

    def _too_large(self, receipt: Receipt | None) -> None:
        """A body over our limit in a packet within it. Before MQTT 5 only closing says no."""
        self._ingress.stats.refuse(TOO_LARGE)
        if receipt is None:
            return
        if self.machine.version < Version.V5:
            raise RemoteProtocolError(TOO_LARGE.text, reason=ReasonCode.PACKET_TOO_LARGE)
        self.refused(receipt, TOO_LARGE)

    def _resolve(self, topic: bytes, entries: dict[bytes, Entry]) -> Entry:
        """A topic seen for the first time: check it, ask for permission, find out where it leads."""
        name = decode_topic(topic)
        address = MqttAddress(name, topic)
        ingress = self._ingress
        if name.count("/") >= ingress.limits.topic_levels_max:
            raise RemoteProtocolError("a topic has too many levels", reason=ReasonCode.TOPIC_NAME_INVALID)
        assert self._principal is not None
        if not ingress.access.may_publish(self._principal, ingress.name, address):
            raise RemoteProtocolError(f"not allowed to publish to {name!r}", reason=ReasonCode.NOT_AUTHORIZED)
        entry = ingress.switch.entry(ingress.name, ingress.namespace, address)
        if len(entries) >= ingress.limits.cache_entries_max:
            entries.clear()
        entries[topic] = entry
        return entry

    def _first_time(self, packet_id: int) -> bool:
        """QoS 2: False when this packet id was taken before and not released (§4.3.3)."""
        session = self.session
        assert session is not None
        known = session.incoming.get(packet_id)
        if known is None:
            session.incoming[packet_id] = False
            return True
        self._ingress.stats.duplicates += 1
        if known:
            self._pubrecs.append(packet_id)
            self.stream.mark()
        return False

    def _disconnect(self, packet: Disconnect) -> None:
        if packet.reason != ReasonCode.DISCONNECT_WITH_WILL:
            self._will = None
        expiry = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL)
        if expiry is not None and self.session is not None:
            if expiry and not self.session.persistent:
                raise RemoteProtocolError(
                    "a session that was to end with its connection cannot be prolonged",
                    reason=ReasonCode.PROTOCOL_ERROR,
                )
            self.session.persistent = expiry > 0
            self._expiry_secs = float(min(expiry, self._ingress.limits.session_expiry_secs_max))
        self.stream.end("DISCONNECT")

    # CONNECT.

    def _connect(self, packet: Connect) -> None:
        """Admit the client, refuse it, or have its password verified; the machine holds what follows."""
        ingress = self._ingress
        if Property.AUTHENTICATION_METHOD in packet.properties:
            self._refuse(ReasonCode.BAD_AUTHENTICATION_METHOD, "enhanced authentication is not offered")
            return
        if packet.user_name is None:
            principal = ingress.access.anonymous(self.stream.remote, ingress.anonymous)
            self._admit(packet, principal, ReasonCode.NOT_AUTHORIZED)
            return
        password = packet.password or b""
        principal = ingress.access.known(packet.user_name, password, self.stream.remote)
        if principal is not None:
            self._admit(packet, principal, ReasonCode.SUCCESS)
        else:
            self.stream.hold()
            ingress.verify(packet.user_name, password, lambda found: self._verified(packet, found))

    def _verified(self, packet: Connect, principal: Principal | None) -> None:
        """The password has been looked at; go on with what came behind CONNECT."""
        if self._lost:
            return
        self.stream.release()
        self._admit(packet, principal, ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        if not self._lost:
            self.receive(b"", self._ingress.now())

    def _admit(self, packet: Connect, principal: Principal | None, otherwise: ReasonCode) -> None:
        ingress = self._ingress
        if principal is None:
            self._refuse(otherwise, "")
            return
        if identifier_refused(packet):
            self._refuse(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "a client identifier is needed")
            return
        if packet.client_id not in ingress.namespace.sessions and ingress.sessions_full:
            self._refuse(ReasonCode.QUOTA_EXCEEDED, "limits.sessions_max is reached")
            return
        will = packet.will
        if will is not None and not ingress.access.may_publish(
            principal, ingress.name, MqttAddress(will.topic)
        ):
            self._refuse(ReasonCode.NOT_AUTHORIZED, "not allowed to publish to the will's topic")
            return
        assigned = packet.client_id or ingress.new_client_id()
        properties = connack_properties(packet, assigned, ingress.limits)
        present = assigned in ingress.namespace.sessions and not packet.clean_start
        self.machine.send_connack(session_present=present, properties=properties)
        if self.machine.state is not State.OPEN:  # it takes no packet as large as our CONNACK
            self.stream.end("the client's Maximum Packet Size is too small")
            return
        ingress.stats.spoke(self.machine, packet.version.name.lower())
        self._principal = principal
        self.sender = Sender(ingress.name, assigned, principal.name, self.stream.remote)
        self._will = will
        self._open_session(packet, assigned)

    def _open_session(self, packet: Connect, client_id: str) -> None:
        ingress = self._ingress
        ingress.take_over(client_id)
        self._expiry_secs = expiry_secs(packet, ingress.limits)
        session, _ = ingress.namespace.open(
            client_id, clean=packet.clean_start, persistent=self._expiry_secs > 0
        )
        session.expires_at = 0.0
        self.session = session
        maximum = packet.properties.get(Property.RECEIVE_MAXIMUM, ingress.limits.inflight_max)
        session.attach(self, min(maximum, ingress.limits.inflight_max))
        self.stream.mark()

    def _refuse(self, reason: ReasonCode, text: str) -> None:
        self._ingress.stats.refused.add(reason.name.lower())
        properties = {Property.REASON_STRING: text} if text and self.machine.version == Version.V5 else {}
        self.machine.send_connack(reason=reason, properties=properties)
        self.stream.end(f"CONNECT refused: {reason.name.lower()}")

    def taken_over(self) -> None:
        """Another connection has come with the same client identifier (§3.1.4)."""
        self.machine.send_disconnect(ReasonCode.SESSION_TAKEN_OVER)
        self.stream.end("taken over")

    def _fail(self, error: RemoteProtocolError) -> None:
        ingress = self._ingress
        ingress.stats.protocol_errors.add(reason_name(error.reason))
        ingress.report(self.stream.remote, error)
        self.machine.fail(error)
        self.stream.end(str(error))

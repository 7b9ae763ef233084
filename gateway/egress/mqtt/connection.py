"""One connection of an MQTT link: what its packets do to the link session, which outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.access.scram import METHOD, Proof, ScramError
from gateway.errors import RemoteProtocolError
from gateway.model.message import Sender
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.octets import violation
from gateway.protocols.mqtt.packets import (
    Acks,
    Auth,
    Connack,
    Disconnect,
    Event,
    Publishes,
    PublishRow,
    Suback,
)
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.spec import FAILURE, PacketType, Property, ReasonCode, Version
from gateway.transport.stream import Stream

if TYPE_CHECKING:
    from gateway.egress.mqtt.session import MqttLinkSession

# A CONNACK in the form of MQTT 3 that refuses our version: 0x01 is its own word, 0x84 that of MQTT 5.
_REFUSES_VERSION: Final = (b"\x20\x02\x00\x01", b"\x20\x02\x00\x84")


class MqttLinkConnection:
    """The peer object of the link's stream.

    `epoch` says to which session of the broker it belongs. `pubacks` and `pubrecs` gather until the wake-up
    ends.
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
        self.stream = stream
        self.machine = machine
        self.sender = sender
        self.epoch = 0
        self.answered = False  # a CONNACK came
        self.opened = False  # and it let us in
        self.held = False
        self.refuses_version = False
        self.too_large = False  # the broker says that a packet of ours was
        self.pubacks: list[int] = []
        self.pubrecs: list[int] = []
        self._session = session
        self._deadline = deadline
        self._proof = proof  # None: the password was said, or there is none
        self._ping_at = 0.0

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived; what the broker does wrong ends this connection and is counted."""
        try:
            machine, stream = self.machine, self.stream
            self._process(stream.postponed() or machine.receive_data(data, now), now)
            while machine.pending and not (stream.unread or self._over):
                self._process(machine.receive_data(b"", now), now)
            if machine.unread:
                stream.again()
        except RemoteProtocolError as error:
            self.refuses_version = not self.opened and data[:4] in _REFUSES_VERSION
            self._session.stats.protocol_errors.add(reason_name(error.reason))
            self.stream.end(f"the broker broke the protocol: {error}")
        self._session.balance()

    def data_to_send(self) -> bytes:
        """Acknowledgements that have gathered, and whatever was encoded."""
        self._acknowledge()
        return self.machine.data_to_send()

    def _acknowledge(self) -> None:
        machine = self.machine
        if machine.state is State.OPEN:
            if self.pubacks:
                machine.acknowledge(PacketType.PUBACK, self.pubacks)
                self.pubacks = []
            if self.pubrecs:
                machine.acknowledge(PacketType.PUBREC, self.pubrecs)
                self.pubrecs = []

    def drained(self) -> None:
        """The broker reads again."""
        self._session.publisher.pump()

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._session.lost(self, reason)

    # What the link asks.

    def tick(self, now: float) -> None:
        """Keep-alive, and the time for the handshake."""
        machine = self.machine
        if not self.opened:
            if now >= self._deadline:
                self.stream.abort("no CONNACK in time")
            return
        if self.held:
            machine.last_received = now  # its answers wait in the socket; it must hear from us all the same
            due = machine.keep_alive > 0 and now >= self._ping_at
        elif machine.timed_out(now):
            self._session.stats.protocol_errors.add("keep_alive_timeout")
            self.stream.abort(f"the broker has been silent for {1.5 * machine.keep_alive:g} s")
            return
        else:
            due = now >= machine.ping_at()
        if due:
            self._ping_at = now + machine.keep_alive / 2
            machine.send_pingreq(now)
            self.stream.mark()

    def shut_down(self) -> None:
        """DISCONNECT; the session stays, for as long as session_expiry_secs."""
        self._acknowledge()
        self.machine.disconnect()
        self.stream.end("the gateway is stopping")

    # What outgoing messages ask: this is their outlet.

    def send(self, rows: list[PublishRow]) -> Sequence[int]:
        """Encode PUBLISH packets; returns the positions of those larger than the broker takes."""
        given = self.machine.aliased(rows) if self.machine.alias_max else rows
        return self.machine.publish_many(given)

    def release(self, packet_ids: list[int]) -> None:
        """PUBREL."""
        self.machine.acknowledge(PacketType.PUBREL, packet_ids)
        self.stream.mark()

    # What the link session asks.

    def refuse(self, kind: PacketType, packet_id: int, reason: int, text: str) -> None:
        """A negative PUBACK or PUBREC (MQTT 5)."""
        if not self._over:
            self.machine.send_ack(kind, packet_id, reason, text)
            self.stream.mark()

    def hold(self, wanted: bool) -> None:
        """Stop reading, or go on."""
        if wanted is self.held or self._over:
            return
        self.held = wanted
        if wanted:
            self.stream.hold()
        else:
            self.stream.release()

    @property
    def _over(self) -> bool:
        return self.stream.closed or self.stream.ending

    # Packets.

    def _process(self, events: list[Event], now: float) -> None:
        session = self._session
        for at, event in enumerate(events, 1):
            if isinstance(event, Publishes):
                if rows := session.receiver.take(self, event.rows, now):
                    self.stream.postpone([Publishes(rows), *events[at:]])
                    break
            elif isinstance(event, Acks):
                self._acks(event.kind, event.rows)
            elif isinstance(event, Suback):
                session.filters.answered(event.packet_id, event.reasons, now)
            elif isinstance(event, Connack):
                if event.reason or self.machine.state is not State.CLOSED:  # by a fault that comes next
                    self._connack(event)
            elif isinstance(event, Auth):
                self._auth(event)
            elif isinstance(event, Disconnect):
                self.too_large = event.reason == ReasonCode.PACKET_TOO_LARGE
                self.stream.abort(_given(event.reason, event.properties, "the broker disconnected us"))
            if self._over:
                return
        if self.pubacks or self.pubrecs or self.machine.out:
            self.stream.mark()

    def _acks(self, kind: PacketType, rows: list[tuple[int, int]]) -> None:
        machine = self.machine
        five = machine.version is Version.V5
        unknown = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if five else ReasonCode.SUCCESS
        if kind is PacketType.PUBREL:
            answer = PacketType.PUBCOMP
            known, strangers = self._session.receiver.release(rows)
            if known:
                machine.acknowledge(answer, known)
        else:
            answer = PacketType.PUBREL
            strangers = self._session.publisher.acked(kind, rows)
        for packet_id in strangers:
            machine.send_ack(answer, packet_id, unknown)

    def _auth(self, packet: Auth) -> None:
        """The broker's part of the authentication that CONNECT began; we begin no other."""
        if self._proof is None or self.opened or packet.reason != ReasonCode.CONTINUE_AUTHENTICATION:
            raise violation("AUTH that nobody has asked for")
        try:
            given = self._proof.answer(packet.properties.get(Property.AUTHENTICATION_DATA, b""))
        except ScramError as error:
            self.stream.abort(f"authentication failed: {error}")
            return
        properties = {Property.AUTHENTICATION_METHOD: METHOD, Property.AUTHENTICATION_DATA: given}
        self.machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, properties))

    def _connack(self, packet: Connack) -> None:
        self.answered = True
        if packet.reason >= FAILURE:
            self.refuses_version = packet.reason == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
            self.stream.abort(_given(packet.reason, packet.properties, "the broker refused us"))
            return
        if self._proof is not None:
            try:
                self._proof.check(packet.properties.get(Property.AUTHENTICATION_DATA, b""))
            except ScramError as error:
                self.stream.abort(f"authentication failed: {error}")
                return
        self.opened = True
        self._session.came_up(self, present=packet.session_present)


def reason_name(reason: int) -> str:
    """The name of a reason code, as a metric label."""
    return ReasonCode(reason).name.lower() if reason in ReasonCode.__members__.values() else "other"


def _given(reason: int, properties: PropertyMap, what: str) -> str:
    text = properties.get(Property.REASON_STRING, "")
    words = f"{what}: {reason_name(reason)}" + (f" ({text})" if text else "")
    if elsewhere := properties.get(Property.SERVER_REFERENCE):
        words += f"; it says to use {elsewhere}"
    if reason == ReasonCode.SESSION_TAKEN_OVER:
        words += "; somebody else uses our client_id"
    return words

"""Client end of an MQTT connection, which links use: the mirror of server.py.

`connect` sends CONNECT. The CONNACK arrives as an event and opens the connection, or closes it if the server
refuses. PINGREQ is sent at half the keep-alive, no matter what else is sent, because only a response proves
that the peer still reads. The module does no I/O: callers pass in bytes and the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from gateway.errors import LocalProtocolError
from gateway.protocols.mqtt.connection import Connection, State, Table
from gateway.protocols.mqtt.data_types import UNBOUNDED, Bounds, ByteOrder, violation
from gateway.protocols.mqtt.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from gateway.protocols.mqtt.properties import NO_PROPERTIES, PropertyMap
from gateway.protocols.mqtt.spec import FAILURE, PacketType, Property, Version

_FROM_SERVER: Final = (
    PacketType.PUBLISH,
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
    PacketType.SUBACK,
    PacketType.UNSUBACK,
    PacketType.PINGRESP,
    PacketType.AUTH,
)
CLIENT: Final[Table] = {
    (State.CONNECTING, PacketType.CONNACK): State.OPEN,
    (State.CONNECTING, PacketType.AUTH): State.CONNECTING,
    (State.OPEN, PacketType.DISCONNECT): State.CLOSED,
    **{(State.OPEN, kind): State.OPEN for kind in _FROM_SERVER},
}


class ClientConnection(Connection):
    """State machine of an MQTT connection at the client's end: bytes in, events out.

    The connection has the version of its CONNECT. After the CONNACK, `client_id` (perhaps assigned by the
    server), `alias_max`, `max_qos`, `retain_available`, `wildcards_available`, `shares_available`,
    `peer_receive_max` and `peer_packet_bytes_max` have the values that the server announced (5: 3.2.2.3).
    """

    __slots__ = (
        "_pinged_at",
        "_waits_pong",
        "client_id",
        "max_qos",
        "method",
        "retain_available",
        "shares_available",
        "wildcards_available",
    )
    table: ClassVar[Table] = CLIENT
    reading: ClassVar[frozenset[State]] = frozenset((State.CONNECTING, State.OPEN))

    def __init__(
        self,
        *,
        packet_bytes_max: int,
        byte_order: ByteOrder = "auto",
        bounded: bool = False,
        bounds: Bounds = UNBOUNDED,
    ) -> None:
        """Create a connection that has not sent CONNECT yet.

        `packet_bytes_max` is the maximum size of received packets. If `bounded` is True, each call of
        `receive_data` does a limited amount of work and sets `unread` if bytes remain. If the properties of a
        received PUBLISH exceed `bounds`, its event has them without validation.
        """
        super().__init__(
            version=Version.V311,
            packet_bytes_max=packet_bytes_max,
            byte_order=byte_order,
            topic_alias_max=0,
            bounded=bounded,
            bounds=bounds,
        )
        self.client_id = ""
        self.max_qos = 2
        self.retain_available = True
        self.wildcards_available = True
        self.shares_available = True
        self.method: str | None = None
        self._pinged_at = 0.0
        self._waits_pong = False

    def connect(self, packet: Connect, now: float) -> None:
        """Queue CONNECT, and apply the limits in its properties to this connection.

        `now`, in monotonic seconds, is the time at which the keep-alive interval begins.
        """
        self._require(State.START)
        self._set_version(packet.version)
        properties = packet.properties
        self.client_id = packet.client_id
        self.keep_alive = packet.keep_alive
        self.packet_bytes_max = min(
            self.packet_bytes_max, properties.get(Property.MAXIMUM_PACKET_SIZE, self.packet_bytes_max)
        )
        self.topic_alias_max = properties.get(Property.TOPIC_ALIAS_MAXIMUM, 0)
        self.method = properties.get(Property.AUTHENTICATION_METHOD)
        self.send(packet)
        self.last_received = self._pinged_at = now
        self._open(State.CONNECTING)

    def _take(self, packet: Packet) -> None:
        """Process a packet from the server, except PUBLISH and acknowledgements."""
        if isinstance(packet, Connack):
            self._take_connack(packet)
        elif packet.kind is PacketType.PINGRESP:
            self._waits_pong = False
        elif isinstance(packet, Auth):
            if self.method is None:
                raise violation("AUTH on a connection without an authentication method")
        elif isinstance(packet, Disconnect):
            if not self._v5:
                raise violation("a server sends no DISCONNECT before MQTT 5")
            if Property.SESSION_EXPIRY_INTERVAL in packet.properties:
                raise violation("a server must not set the session's expiry in DISCONNECT")

    def _take_connack(self, packet: Connack) -> None:
        """Process CONNACK: apply the server's limits, or close the connection if CONNACK is a refusal."""
        if packet.reason >= FAILURE:
            self.state = State.CLOSED
            return
        properties = packet.properties
        self.client_id = properties.get(Property.ASSIGNED_CLIENT_IDENTIFIER, self.client_id)
        self.keep_alive = properties.get(Property.SERVER_KEEP_ALIVE, self.keep_alive)
        self.max_qos = properties.get(Property.MAXIMUM_QOS, 2)
        self.retain_available = bool(properties.get(Property.RETAIN_AVAILABLE, 1))
        self.wildcards_available = bool(properties.get(Property.WILDCARD_SUBSCRIPTION_AVAILABLE, 1))
        self.shares_available = bool(properties.get(Property.SHARED_SUBSCRIPTION_AVAILABLE, 1))
        self._set_alias_max(properties)
        self.peer_receive_max = properties.get(Property.RECEIVE_MAXIMUM, self.peer_receive_max)
        self.peer_packet_bytes_max = properties.get(Property.MAXIMUM_PACKET_SIZE, self.peer_packet_bytes_max)

    def ping_at(self) -> float:
        """Return the time at which the next PINGREQ is due, in monotonic seconds.

        Return infinity while a PINGREQ has no response, if keep-alive is off, or if the connection is not
        open.
        """
        if not self.keep_alive or self._waits_pong or self.state is not State.OPEN:
            return float("inf")
        return self._pinged_at + self.keep_alive / 2

    def send_pingreq(self, now: float) -> None:
        """Queue PINGREQ.

        `now`, in monotonic seconds, is the time from which the next PINGREQ is scheduled.
        """
        self._require(State.OPEN)
        self._pinged_at = now
        self._waits_pong = True
        self.send(Pingreq())

    def subscribe(
        self,
        packet_id: int,
        subscriptions: Sequence[Subscription],
        properties: PropertyMap = NO_PROPERTIES,
    ) -> bool:
        """Queue SUBSCRIBE. Return False if it exceeds the server's maximum packet size."""
        self._require(State.OPEN)
        if not subscriptions:
            raise LocalProtocolError("a SUBSCRIBE has at least one topic filter")
        return self.send(Subscribe(packet_id, tuple(subscriptions), properties))

    def unsubscribe(self, packet_id: int, filters: Sequence[str]) -> bool:
        """Queue UNSUBSCRIBE. Return False if it exceeds the server's maximum packet size."""
        self._require(State.OPEN)
        if not filters:
            raise LocalProtocolError("an UNSUBSCRIBE has at least one topic filter")
        return self.send(Unsubscribe(packet_id, tuple(filters)))

    def send_auth(self, packet: Auth) -> None:
        """Queue AUTH, which continues an enhanced authentication or begins a re-authentication (5: 3.15)."""
        self._require(State.CONNECTING, State.OPEN)
        self.send(packet)

    def disconnect(self, reason: int = 0) -> None:
        """Close the connection, and queue DISCONNECT if it is open.

        Before MQTT 5 a DISCONNECT has no reason code.
        """
        if self.state is State.OPEN:
            self.send(Disconnect(reason))
        self.state = State.CLOSED

"""Listener end of an MQTT connection.

A CONNECT comes first and only once. Until the listener accepts or refuses it (`send_connack`), the bytes that
the client pipelines wait undecoded, so nothing from an unauthenticated client is decoded. Afterwards the
listener calls `receive_data(b"", now)` while `pending`. With an authentication method (5: 4.12) AUTH packets
are exchanged first. PINGREQ is answered here, behind the packets that the listener has queued; the listener
responds to every other packet with the methods below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.spooled_bodies import Piece
from gateway.protocols.mqtt.codec import read_version
from gateway.protocols.mqtt.connection import Connection, State, Table, swapped
from gateway.protocols.mqtt.data_types import UNBOUNDED, Bounds, ByteOrder, Reader, violation
from gateway.protocols.mqtt.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Event,
    Packet,
    Pingreq,
    Pingresp,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.runs import Publishes
from gateway.protocols.mqtt.spec import (
    CONNECT_BYTES_MAX,
    CONTROL_BYTES_MAX,
    FAILURE,
    REASONS,
    WORD_MAX,
    PacketType,
    Property,
    ReasonCode,
    Version,
)

NEEDED_PROPERTIES: Final = (Property.AUTHENTICATION_METHOD, Property.SESSION_EXPIRY_INTERVAL)
"""Properties of CONNECT that later packets must agree with."""

_FROM_CLIENT: Final = (
    PacketType.PUBLISH,
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
    PacketType.SUBSCRIBE,
    PacketType.UNSUBSCRIBE,
    PacketType.PINGREQ,
    PacketType.AUTH,
)
SERVER: Final[Table] = {
    (State.START, PacketType.CONNECT): State.CONNECTING,
    (State.AUTHENTICATING, PacketType.AUTH): State.AUTHENTICATING,
    (State.AUTHENTICATING, PacketType.DISCONNECT): State.CLOSED,
    (State.OPEN, PacketType.DISCONNECT): State.CLOSED,
    **{(State.OPEN, kind): State.OPEN for kind in _FROM_CLIENT},
}


PROTOCOL_NAME_END_MAX: Final = 8  # bytes of the longest protocol name, with its length


class ServerConnection(Connection):
    """State machine of an MQTT connection at the server's end: bytes in, events out.

    `connect` is the CONNECT packet once it has arrived. `wants_problems` is True if responses may have reason
    strings (5: 3.1.2.11.7). The CONNACK of MQTT 5 announces the limits that are given to the constructor; the
    announced packet size is `announced_bytes_max`, which may be smaller than the accepted size.
    """

    __slots__ = (
        "_announced_bytes_max",
        "_answered",
        "_connect_bytes_max",
        "_parted",
        "connect",
        "pings",
        "receive_max",
    )
    table: ClassVar[Table] = SERVER
    reading: ClassVar[frozenset[State]] = frozenset((State.START, State.AUTHENTICATING, State.OPEN))
    serves: ClassVar[bool] = True

    def __init__(
        self,
        *,
        packet_bytes_max: int,
        announced_bytes_max: int | None = None,
        connect_bytes_max: int = CONNECT_BYTES_MAX,
        byte_order: ByteOrder = "auto",
        topic_alias_max: int = 0,
        receive_max: int = WORD_MAX,
        bounds: Bounds = UNBOUNDED,
    ) -> None:
        super().__init__(
            version=Version.V311,
            packet_bytes_max=packet_bytes_max,
            byte_order=byte_order,
            topic_alias_max=topic_alias_max,
            bounded=True,
            bounds=bounds,
        )
        self.connect: Connect | None = None
        self._announced_bytes_max = announced_bytes_max or packet_bytes_max
        self.receive_max = receive_max
        self._connect_bytes_max = connect_bytes_max
        self._answered = False  # a CONNACK was sent
        self._parted = False  # a DISCONNECT was sent
        self.pings = 0  # PINGREQ without a response

    def _limit(self, kind: int) -> int:
        if self.state is State.OPEN:
            most = self.packet_bytes_max
            return most if kind == PacketType.PUBLISH else min(most, CONTROL_BYTES_MAX)
        return min(self._connect_bytes_max, self.packet_bytes_max)

    def _may_answer_oversized(self, data: bytes, start: int) -> bool:
        """Return True if an oversized packet can be refused now, False if more of its bytes are needed first.

        If the packet is a CONNECT, its protocol version is decoded, to refuse it in that version. `start` is
        the position behind its fixed header in `data`.
        """
        if self.state is not State.START:
            return True
        name_end = start + 2 + int.from_bytes(data[start : start + 2], "big")
        if len(data) < start + 2 or (name_end - start <= PROTOCOL_NAME_END_MAX and len(data) <= name_end):
            return False
        self._set_version(read_version(Reader(data[start : start + PROTOCOL_NAME_END_MAX + 1]))[0])
        return True

    def _decode(self, first: int, body: bytes) -> Packet:
        if self.state is State.START:
            # Set before anything can fail: `fail` responds in this version.
            self._set_version(read_version(Reader(body))[0])
        return super()._decode(first, body)

    def _take(self, packet: Packet) -> None:
        if isinstance(packet, Pingreq):
            self.pings += 1
        elif isinstance(packet, Connect):
            self._take_connect(packet)
        elif isinstance(packet, Auth):
            self._check_auth(packet)
        elif isinstance(packet, Disconnect):
            self._check_disconnect(packet)

    def _take_connect(self, packet: Connect) -> None:
        """Apply the version, the limits and the options in a CONNECT to this connection."""
        self._set_version(packet.version)
        self.connect = packet
        self.keep_alive = packet.keep_alive
        properties = packet.properties
        self.peer_packet_bytes_max = properties.get(Property.MAXIMUM_PACKET_SIZE, self.peer_packet_bytes_max)
        self.peer_receive_max = properties.get(Property.RECEIVE_MAXIMUM, self.peer_receive_max)
        self._set_alias_max(properties)
        self.wants_problems = bool(properties.get(Property.REQUEST_PROBLEM_INFORMATION, 1))
        if Property.AUTHENTICATION_METHOD in properties:
            self.state = State.AUTHENTICATING
        if packet.version is Version.V31 and self._byte_order == "auto":
            self._watched = 0

    def _watch(self, events: list[Event]) -> None:
        """Detect a little-endian client of level 3 from its packet identifiers, and correct the keep-alive.

        Level 3 is big-endian, but some clients older than its specification are little-endian, and a CONNECT
        does not show the difference: 60 s of a little-endian client are read as 15 360 s. Packet identifiers
        count from 1, so those of a little-endian client are multiples of 256 when read as big-endian. Two in
        a row prove it, and so does the first one of a new session. The byte order of the identifiers
        themselves does not matter, because they are returned unchanged.
        """
        assert self.connect is not None
        for event in events:
            for packet_id in _ids_of(event):
                first = not self._watched
                before, self._watched = self._watched or 0, packet_id
                little = packet_id == before + 256 and (self.connect.clean_start or not first)
                if little:
                    self.keep_alive = swapped(self.keep_alive)
                if little or packet_id & 0xFF:
                    self._watched = None
                    return

    def _check_auth(self, packet: Auth) -> None:
        """Raise RemoteProtocolError if an AUTH is not allowed now.

        AUTH must repeat the authentication method of the CONNECT, and may re-authenticate only an open
        connection (5: 4.12.1).
        """
        assert self.connect is not None
        method = self.connect.properties.get(Property.AUTHENTICATION_METHOD)
        if method is None:
            raise violation("AUTH on a connection without an authentication method")
        if packet.properties.get(Property.AUTHENTICATION_METHOD) != method:
            raise violation("AUTH with another authentication method")
        if packet.reason == 0:
            raise violation("a client must not send AUTH with success")
        if packet.reason == ReasonCode.REAUTHENTICATE and self.state is not State.OPEN:
            raise violation("re-authentication before the first authentication has ended")

    def _check_disconnect(self, packet: Disconnect) -> None:
        """Raise RemoteProtocolError if a client must not send the DISCONNECT `packet`."""
        if packet.reason not in REASONS[PacketType.DISCONNECT]:
            raise violation(f"DISCONNECT must not carry reason {packet.reason:#04x}")
        assert self.connect is not None
        if Property.SERVER_REFERENCE in packet.properties:
            raise violation("a client must not send a server reference")
        interval = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0)
        if interval and not self.connect.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0):
            raise violation("the session expiry interval cannot be changed from 0")

    def send_connack(
        self, *, session_present: bool = False, reason: int = 0, properties: PropertyMap | None = None
    ) -> None:
        """Queue CONNACK: accept the client, or refuse it with `reason`, a reason code of MQTT 5.

        A client of an older version gets the nearest return code. If the client is accepted, CONNACK
        announces the limits of this connection unless `properties` overrides them. If this CONNACK exceeds
        the client's maximum packet size, the client is refused, because it could not learn the limits.
        """
        self._require(State.CONNECTING, State.AUTHENTICATING)
        connack_properties = dict(properties or {})
        self._answered = True
        if reason < FAILURE:
            if self._v5:
                connack_properties = {**self._limits(), **connack_properties}
                self.keep_alive = connack_properties.get(Property.SERVER_KEEP_ALIVE, self.keep_alive)
            self._open(State.OPEN)
            self._shorten_connect()
        else:
            self.state = State.CLOSED
        if not self.send(Connack(session_present, reason, connack_properties)):
            self.state = State.CLOSED
            self.send(Connack(reason=reason if reason >= FAILURE else ReasonCode.PACKET_TOO_LARGE))

    def _shorten_connect(self) -> None:
        """Remove from `connect` what is not needed after CONNACK: will, password, most properties.

        These fields can have up to `connect_bytes_max` bytes. The others stay in memory while the connection
        is open.
        """
        assert self.connect is not None
        properties = self.connect.properties
        needed = {name: properties[name] for name in NEEDED_PROPERTIES if name in properties}
        self.connect = replace(self.connect, will=None, password=None, properties=needed)

    def _limits(self) -> dict[Property, Any]:
        """Return those properties of a CONNACK that announce the limits of this connection."""
        found: dict[Property, Any] = {Property.MAXIMUM_PACKET_SIZE: self._announced_bytes_max}
        if self.receive_max != WORD_MAX:
            found[Property.RECEIVE_MAXIMUM] = self.receive_max
        if self.topic_alias_max:
            found[Property.TOPIC_ALIAS_MAXIMUM] = self.topic_alias_max
        return found

    def send_suback(self, packet_id: int, reasons: Sequence[int]) -> None:
        """Queue SUBACK with a granted QoS or reason code for each filter.

        Before MQTT 5 every failure is 0x80.
        """
        self._require(State.OPEN)
        self.send(Suback(packet_id, tuple(reasons)))

    def send_unsuback(self, packet_id: int, reasons: Sequence[int] = ()) -> None:
        """Queue UNSUBACK with a reason code for each filter; before MQTT 5, without reason codes.

        Raises LocalProtocolError if reason codes are missing in MQTT 5.
        """
        self._require(State.OPEN)
        if self._v5 and not reasons:
            raise LocalProtocolError("an UNSUBACK of MQTT 5 has a reason per filter")
        self.send(Unsuback(packet_id, tuple(reasons)))

    def data_to_send(self) -> bytes:
        """Remove and return the queued bytes, with a PINGRESP for each PINGREQ at the end (5: 3.13).

        MQTT does not require that PINGRESP is the last packet. As it is the last one here, a client that
        receives it knows that everything that it sent before the PINGREQ has been accepted.
        """
        if self.pings:
            self._answer_pings()
        return super().data_to_send()

    def to_send(self) -> bytes | list[Piece]:
        """Remove and return the queued bytes, as a list of pieces if one of them is large."""
        if self.pings:
            self._answer_pings()
        return super().to_send()

    def _answer_pings(self) -> None:
        for _ in range(self.pings):
            self.send(Pingresp())
        self.pings = 0

    def send_auth(self, packet: Auth) -> None:
        """Queue AUTH, which continues an enhanced authentication or ends a re-authentication (5: 3.15)."""
        self._require(State.AUTHENTICATING, State.OPEN)
        self.send(packet)

    def send_disconnect(self, reason: int = ReasonCode.SERVER_SHUTTING_DOWN, reference: str = "") -> None:
        """Close the connection, and queue DISCONNECT if it is open and of MQTT 5.

        May be called in any state; a second call queues nothing. `reference` names another server (5: 4.13).
        """
        opened = self.state is State.OPEN
        self._answer_pings()
        self.state = State.CLOSED
        if not (opened and self._v5):
            return
        self._parted = True
        properties: dict[Property, Any] = {Property.SERVER_REFERENCE: reference} if reference else {}
        if not self.send(Disconnect(reason, properties)):
            self.send(Disconnect(reason))

    def fail(self, error: RemoteProtocolError) -> None:
        """Queue the packet that reports `error` of `receive_data` to the client. Close the connection.

        Before the CONNACK, this packet is a CONNACK (5: 4.13; 3: 3.1.4), afterwards the DISCONNECT of MQTT 5.
        """
        text = str(error)
        self._answer_pings()
        if self.connect is not None and self._answered:
            reason = error.reason
            if self._v5:
                is_valid = reason in REASONS[PacketType.DISCONNECT]
                properties = {Property.REASON_STRING: text}
                packet = Disconnect(reason if is_valid else ReasonCode.UNSPECIFIED_ERROR, properties)
                if not self._parted and not self.send(packet):
                    self.send(Disconnect(packet.reason))
                self._parted = True
        elif not self._answered:
            self._answered = True
            self._fail_connect(error)
        self.state = State.CLOSED

    def _fail_connect(self, error: RemoteProtocolError) -> None:
        """Queue the CONNACK that refuses an invalid CONNECT.

        A client of MQTT 3.x gets no CONNACK if no return code fits the error.
        """
        reason = error.reason
        if self._v5:
            is_valid = reason in REASONS[PacketType.CONNACK]
            self.send(Connack(reason=reason if is_valid else ReasonCode.UNSPECIFIED_ERROR))
        elif reason in (
            ReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
            ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
        ):
            self.send(Connack(reason=reason))


def connack_unavailable(data: bytes, text: str) -> bytes:
    """Return the CONNACK "server unavailable" for a client whose first bytes are `data`.

    In MQTT 5 `text` is its reason string. Return b"" if `data` does not hold a complete, valid CONNECT.
    """
    machine = ServerConnection(packet_bytes_max=CONNECT_BYTES_MAX)
    try:
        machine.receive_data(data, 0.0)
    except RemoteProtocolError:
        return b""
    if machine.state is not State.CONNECTING:
        return b""
    reason_properties = {Property.REASON_STRING: text} if machine.version == Version.V5 else {}
    machine.send_connack(reason=ReasonCode.SERVER_UNAVAILABLE, properties=reason_properties)
    data = machine.data_to_send()
    assert isinstance(data, bytes)
    return data


def _ids_of(event: Event) -> list[int]:
    """Return the packet ids in `event` that the client has chosen, in order."""
    if isinstance(event, Publishes):
        return [row[2] for row in event.rows if row[2]]
    return [event.packet_id] if isinstance(event, Subscribe | Unsubscribe) else []

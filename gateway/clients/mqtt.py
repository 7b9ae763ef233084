"""Blocking MQTT client for a broker that is given by a URL.

It uses MQTT 5, or 3.1.1 with a server that does not support MQTT 5, unless `ConnectionOptions.version` names
a version.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from gateway.clients.wire import IN_FLIGHT, BrokerRefusal, ConnectionOptions, ReceivedMessage, Silence, Wire
from gateway.errors import LinkError, RemoteProtocolError
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.message import NEVER, Message
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.data_types import decode_topic
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.packets import Connack, Connect, Disconnect, Suback, Subscription
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import FAILURE, VERSIONS, PacketType, Property, ReasonCode, Version
from gateway.protocols.mqtt.translate import encode_properties, publish_essentials
from gateway.settings import LinkUrl

KEEP_ALIVE_SECS = 30
PACKET_BYTES_MAX = 268_435_455
IDS: Final = 65_535
DUP: Final = 8
Event = TypeVar("Event")
FINAL: Final = frozenset(
    (
        *(ReasonCode.NOT_AUTHORIZED, ReasonCode.TOPIC_NAME_INVALID, ReasonCode.PAYLOAD_FORMAT_INVALID),
        *(ReasonCode.PACKET_TOO_LARGE, ReasonCode.TOPIC_FILTER_INVALID),
    )
)
TOO_LARGE: Final = BrokerRefusal("the message is larger than the server's Maximum Packet Size", final=True)


class MqttClient:
    """MQTT connection whose CONNECT the server has accepted.

    An empty `client_id` is replaced by a random one. `session_secs` is the session expiry interval in
    seconds; with 0 the session begins and ends with the connection. `receive_max` is the maximum number of
    unacknowledged messages from the server.
    """

    def __init__(
        self, access: ConnectionOptions, *, client_id: str = "", session_secs: int = 0, receive_max: int = IDS
    ) -> None:
        """Connect to the broker, with an older MQTT version if it does not support the first one.

        The other arguments are those of the class. Raises LinkError if the broker is unreachable, refuses, or
        supports none of the versions.
        """
        self._tokens: list[tuple[int, int]] = []  # (packet id, QoS) by token, beginning at `_first`
        self._first = 0
        self._last_id = 0
        self._early: list[Any] = []
        versions = (Version.V5, Version.V311) if access.version == "auto" else (VERSIONS[access.version],)
        for version in versions:
            if version is Version.MQIPDP and access.target.username:
                raise LinkError("MQTT before 3.1 (mqipdp) has no user name and no password")
            order = access.byte_order
            self._machine = ClientConnection(packet_bytes_max=PACKET_BYTES_MAX, byte_order=order)
            self._wire = Wire(access, self._machine, self._ping)
            packet = _connect(access.target, version, client_id, session_secs, receive_max)
            self._machine.connect(packet, time.monotonic())
            try:
                reason = self._next_event(Connack).reason
            except LinkError as error:
                self._wire.close_abruptly()
                if version is versions[-1] or isinstance(error, Silence):
                    raise
                continue  # a server older than MQTT 5 may close without a CONNACK
            if reason == 0:
                self._wire.mark_open()
                return
            self._wire.close_abruptly()
            if reason != ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
                raise self._wire.failure(f"the server refused the connection: {reason_name(reason)}")
        spoken = "neither MQTT 5 nor 3.1.1" if access.version == "auto" else f"no MQTT {access.version}"
        raise LinkError(f"the server supports {spoken}")

    def publish_many(
        self, messages: Sequence[Message], *, in_flight: int = IN_FLIGHT
    ) -> dict[int, BrokerRefusal]:
        """Publish messages and wait for their acknowledgements, as Client.publish_many defines.

        Return the refusals by position. A message with QoS 0 counts as accepted when it is written.
        """
        refused: dict[int, BrokerRefusal] = {}
        unanswered: dict[int, int] = {}  # position by packet id
        room = min(in_flight, self._machine.peer_receive_max)
        at = 0
        answers = self._wire.read_events()
        while at < len(messages) or unanswered:
            at = self._send(messages, at, at + room - len(unanswered), unanswered, refused)
            self._wire.flush()
            if not unanswered:
                continue
            for event in next(answers):
                if isinstance(event, Disconnect):
                    raise LinkError(f"the server disconnected: {reason_name(event.reason)}")
                if isinstance(event, Acks):
                    self._process_acks(event, unanswered, refused)
        return refused

    def _send(
        self,
        messages: Sequence[Message],
        at: int,
        end: int,
        unanswered: dict[int, int],
        refused: dict[int, BrokerRefusal],
    ) -> int:
        """Send the messages from position `at` up to, not including, `end`. Return the next position to send.

        `unanswered` maps the packet ids in use to positions. Messages that cannot be sent are added to
        `refused`.
        """
        utc = time.time()
        described = self._machine.version is Version.V5
        rows: list[Any] = []
        positions: list[int] = []
        for position in range(at, min(end, len(messages))):
            message = messages[position]
            try:
                decode_topic(message.address.wire)
                raw = encode_properties(message, utc) if described else b""
            except RemoteProtocolError as error:
                refused[position] = BrokerRefusal(str(error), final=True)
                continue
            qos = min(message.assurance, self._machine.max_qos)
            packet_id = 0
            if qos:
                packet_id = self._next_id(unanswered)
                unanswered[packet_id] = position
            rows.append((qos << 1 | message.retain, message.address.wire, packet_id, raw, message.body))
            positions.append(position)
        for unsent in self._machine.publish_many(rows):
            refused[positions[unsent]] = TOO_LARGE
            unanswered.pop(rows[unsent][2], None)
        return min(end, len(messages))

    def _next_id(self, used_ids: dict[int, int]) -> int:
        found = self._last_id % IDS + 1
        while found in used_ids:
            found = found % IDS + 1
        self._last_id = found
        return found

    def _process_acks(
        self, acks: Acks, unanswered: dict[int, int], refused: dict[int, BrokerRefusal]
    ) -> None:
        received: list[int] = []
        for packet_id, reason in acks.rows:
            if reason < FAILURE and acks.kind is PacketType.PUBREC:
                received.append(packet_id)
                continue
            position = unanswered.pop(packet_id, None)
            if position is not None and reason >= FAILURE:
                refused[position] = BrokerRefusal(reason_name(reason), reason in FINAL)
        if received:
            self._machine.acknowledge(PacketType.PUBREL, received)

    def listen(self, address_options: Mapping[str, str], qos: int) -> None:
        """Subscribe to the topic filter in `address_options` with this QoS, as Client.listen defines."""
        self.subscribe(address_options["topic"], qos)

    def subscribe(self, topic_filters: str | Sequence[str], qos: int) -> None:
        """Subscribe to one or more topic filters. Raises LinkError if the server refuses one of them."""
        filters = [topic_filters] if isinstance(topic_filters, str) else list(topic_filters)
        self._machine.subscribe(1, tuple(Subscription(one, qos) for one in filters))
        self._check(filters, self._next_event(Suback).reasons)

    def _next_event(self, event_type: type[Event]) -> Event:
        """Return the next event of type `event_type`. Raises LinkError if none arrives in time.

        Other events that arrive meanwhile, such as messages of the session, are stored for `arrivals`.
        """
        for events in self._wire.read_events():
            for at, event in enumerate(events):
                if isinstance(event, event_type):
                    self._early += events[:at] + events[at + 1 :]
                    return event
            self._early += events
        raise AssertionError("answers end with an error only")

    def _check(self, filters: Sequence[str], reasons: Sequence[int]) -> None:
        for one, reason in zip(filters, reasons, strict=False):
            if reason >= FAILURE:
                raise LinkError(f"the server refused the subscription to {one}: {reason_name(reason)}")

    def arrivals(self, seconds: float) -> list[ReceivedMessage]:
        """Return received messages after at most `seconds` seconds, as Client.arrivals defines."""
        early, self._early = self._early, []
        found: list[ReceivedMessage] = []
        for event in early or self._wire.turn(seconds):
            if isinstance(event, Publishes):
                found += [self._arrival(*row) for row in event.rows]
            elif isinstance(event, Acks) and event.kind is PacketType.PUBREL:
                self._machine.acknowledge(PacketType.PUBCOMP, [packet_id for packet_id, _ in event.rows])
            elif isinstance(event, Disconnect):
                raise LinkError(f"the server disconnected: {reason_name(event.reason)}")
        return found

    def _arrival(self, flags: int, topic: bytes, packet_id: int, raw: bytes, body: bytes) -> ReceivedMessage:
        qos = flags >> 1 & 3
        parsed = publish_essentials(raw)
        expires = NEVER if parsed.expiry is None else time.time() + parsed.expiry
        address = topic_address(decode_topic(topic), topic)
        message = Message(
            address, body, parsed, qos, DURABLE_AT_QOS[qos], flags & 1 == 1, expires, parsed.hops
        )
        self._tokens.append((packet_id, qos))
        return ReceivedMessage(message, self._first + len(self._tokens) - 1, flags & DUP != 0)

    def pause_reading(self, seconds: float) -> None:
        """Stay connected without reading for `seconds` seconds, as Client.pause_reading defines."""
        self._wire.pause_reading(seconds)

    def acknowledge(self, arrivals: Sequence[ReceivedMessage]) -> None:
        """Acknowledge these messages in the order in which they arrived (MQTT 5: 4.6.0-2)."""
        if not arrivals:
            return
        count = arrivals[-1].token - self._first + 1
        done, self._tokens = self._tokens[:count], self._tokens[count:]
        self._first += count
        for qos, kind in ((1, PacketType.PUBACK), (2, PacketType.PUBREC)):
            ids = [packet_id for packet_id, level in done if level == qos]
            if ids:
                self._machine.acknowledge(kind, ids)
        self._wire.flush()

    def close(self) -> None:
        """Send DISCONNECT and close the socket."""
        self._machine.disconnect()
        self._wire.close()

    def close_abruptly(self) -> None:
        """Close the socket at once, as Client.close_abruptly defines."""
        self._wire.close_abruptly()

    def _ping(self, now: float) -> None:
        if now >= self._machine.ping_at():
            self._machine.send_pingreq(now)


def _connect(
    target: LinkUrl, version: Version, client_id: str, session_secs: int, receive_max: int
) -> Connect:
    connect_properties: dict[Property, Any] = {}
    if version is Version.V5:
        connect_properties[Property.RECEIVE_MAXIMUM] = min(receive_max, IDS)
        if session_secs:
            connect_properties[Property.SESSION_EXPIRY_INTERVAL] = session_secs
    return Connect(
        client_id=client_id or f"gateway-{secrets.token_hex(6)}",
        version=version,
        clean_start=not session_secs,
        keep_alive=KEEP_ALIVE_SECS,
        user_name=target.username or None,
        password=target.password.encode() if target.password else None,
        properties=connect_properties,
    )


def reason_name(code: int) -> str:
    """Return a readable text for a reason code: its name, if it has one, and its hexadecimal number."""
    is_reason_code = code in ReasonCode.__members__.values()
    return (
        f"{ReasonCode(code).name.lower().replace('_', ' ')} (0x{code:02x})"
        if is_reason_code
        else f"0x{code:02x}"
    )

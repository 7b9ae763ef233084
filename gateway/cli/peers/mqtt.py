"""MQTT for the command line: MQTT 5, or 3.1.1 with a server that does not speak it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from gateway.cli.peers.wire import Wire
from gateway.errors import LinkError
from gateway.model.address import MqttAddress
from gateway.model.message import NEVER, Message
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.octets import decode_topic
from gateway.protocols.mqtt.packets import Acks, Connack, Connect, Disconnect, Publishes, Suback, Subscription
from gateway.protocols.mqtt.spec import FAILURE, PacketType, ReasonCode, Version
from gateway.protocols.mqtt.translate import encode_properties, publish_facts
from gateway.settings import Target

KEEP_ALIVE_SECS = 30
PACKET_BYTES_MAX = 268_435_455


class MqttPeer:
    """A connected client with a clean session."""

    def __init__(self, target: Target, timeout_secs: float, ca_file: str | None) -> None:
        """Raises LinkError when the server cannot be reached or refuses."""
        for version in (Version.V5, Version.V311):
            self._machine = ClientConnection(packet_bytes_max=PACKET_BYTES_MAX)
            self._wire = Wire(target, self._machine, timeout_secs, ca_file)
            packet = Connect(
                client_id=f"gateway-cli-{secrets.token_hex(4)}",
                version=version,
                keep_alive=KEEP_ALIVE_SECS,
                user_name=target.username or None,
                password=target.password.encode() if target.password else None,
            )
            self._machine.connect(packet, time.monotonic())
            try:
                reason = self._wire.wait(Connack).reason
            except LinkError:
                if version is Version.V311:
                    raise
                continue  # servers older than MQTT 5 may close without a word
            if reason == 0:
                return
            if reason != ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
                raise LinkError(f"the server refused the connection: {reason_name(reason)}")
        raise LinkError("the server speaks neither MQTT 5 nor 3.1.1")

    def publish(self, message: Message) -> str:
        """Publish and wait for the last acknowledgement; returns why it was refused, or ""."""
        assert isinstance(message.address, MqttAddress)
        qos = message.assurance
        raw = encode_properties(message, time.time()) if self._machine.version is Version.V5 else b""
        decode_topic(message.address.wire)
        if not self._machine.publish(
            message.address.wire, message.body, qos, message.retain, False, 1 if qos else 0, raw
        ):
            return "it is larger than the server takes"
        self._wire.flush()
        if not qos:
            return ""
        for event in self._wire.events(self._wire.timeout_secs):
            if isinstance(event, Disconnect):
                return reason_name(event.reason)
            if isinstance(event, Acks):
                reason = event.rows[0][1]
                if reason >= FAILURE:
                    return reason_name(reason)
                if event.kind is not PacketType.PUBREC:
                    return ""
                self._machine.send_ack(PacketType.PUBREL, 1)
        return f"no acknowledgement within {self._wire.timeout_secs} s"

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Raises LinkError when the server refuses."""
        self._machine.subscribe(1, (Subscription(topic_filter, qos),))
        reason = self._wire.wait(Suback).reasons[0]
        if reason >= FAILURE:
            raise LinkError(f"the server refused the subscription: {reason_name(reason)}")

    def messages(self, seconds: float | None) -> Iterator[Message]:
        """Messages as they come; each is acknowledged when the next one is asked for."""
        for event in self._wire.events(seconds, self._ping):
            if isinstance(event, Publishes):
                for flags, topic, packet_id, raw, body in event.rows:
                    qos = flags >> 1 & 3
                    properties, expiry, hops = publish_facts(raw)
                    expires = NEVER if expiry is None else time.time() + expiry
                    address = MqttAddress(decode_topic(topic), topic)
                    yield Message(address, body, properties, qos, qos > 0, flags & 1 == 1, expires, hops)
                    if qos:
                        self._machine.send_ack(
                            PacketType.PUBACK if qos == 1 else PacketType.PUBREC, packet_id
                        )
                        self._wire.flush()
            elif isinstance(event, Acks) and event.kind is PacketType.PUBREL:
                self._machine.acknowledge(PacketType.PUBCOMP, [packet_id for packet_id, _ in event.rows])
            elif isinstance(event, Disconnect):
                raise LinkError(f"the server disconnected: {reason_name(event.reason)}")

    def close(self) -> None:
        """DISCONNECT."""
        self._machine.disconnect()
        self._wire.close()

    def _ping(self) -> None:
        now = time.monotonic()
        if now >= self._machine.ping_at():
            self._machine.send_pingreq(now)


def reason_name(code: int) -> str:
    """A reason code for people."""
    known = code in ReasonCode.__members__.values()
    return f"{ReasonCode(code).name.lower().replace('_', ' ')} (0x{code:02x})" if known else f"0x{code:02x}"

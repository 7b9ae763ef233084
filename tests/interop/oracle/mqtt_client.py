"""MQTT clients for scripts that ask two brokers the same: what is said, what is heard, and what is compared.

A script is a list of (client, what it does): a packet, bytes, or CUT. After each step every client is asked
for a PINGRESP, so that all that the step leads to has been heard. Compared is what a client can rely on:
texts for people, limits that a server is free to choose, and identifiers that it makes up are left out.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.codec import decode
from gateway.protocols.mqtt.packets import (
    Ack,
    Connack,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Unsuback,
)
from gateway.protocols.mqtt.spec import Property, Version
from gateway.protocols.mqtt.writers import encode

LOOPBACK: Final = "127.0.0.1"
PATIENCE_SECS: Final = 5.0
CUT: Final = "cut"
FREE: Final = frozenset(  # for a server to choose
    (
        Property.RECEIVE_MAXIMUM,
        Property.MAXIMUM_PACKET_SIZE,
        Property.TOPIC_ALIAS_MAXIMUM,
        Property.SHARED_SUBSCRIPTION_AVAILABLE,
        Property.SERVER_KEEP_ALIVE,
        Property.REASON_STRING,
        Property.ASSIGNED_CLIENT_IDENTIFIER,
    )
)

Step = tuple[str, Packet | bytes | str]
Script = list[Step]
Log = list[tuple[Any, ...]]


class Client:
    """A socket that says packets and notes what it hears."""

    def __init__(self, port: int, name: str, version: Version, log: Log) -> None:
        self.name = name
        self.open = True
        self.connected = False
        self._version = version
        self._log = log
        self._sock = socket.create_connection((LOOPBACK, port), timeout=PATIENCE_SECS)
        self._rest = b""

    def say(self, what: Packet | bytes) -> None:
        data = what if isinstance(what, bytes) else encode(what, self._version)
        try:
            self._sock.sendall(data)
        except OSError:
            self._end()

    def cut(self) -> None:
        self.open = False
        self._sock.close()

    def _end(self) -> None:
        if self.open:
            self._log.append((self.name, "end"))
            self.cut()

    def hear_until(self, kind: type[Packet]) -> None:
        """Note what comes, up to a packet of this kind or the end."""
        while self.open:
            try:
                found = decode(self._rest, version=self._version)
            except RemoteProtocolError:
                self._log.append((self.name, "corrupt"))
                self.cut()
                return
            if found is None:
                try:
                    data = self._sock.recv(65_536)
                except ConnectionError:
                    data = b""
                if not data:
                    self._end()
                    return
                self._rest += data
                continue
            packet, at = found
            self._rest = self._rest[at:]
            if isinstance(packet, Connack):
                self.connected = packet.reason == 0
            if not isinstance(packet, Pingresp):
                self._log.append((self.name, *_told(packet)))
            if isinstance(packet, kind):
                return

    def settle(self) -> None:
        """Hear all that has been sent to this client."""
        if self.open and self.connected:
            self.say(Pingreq())
            self.hear_until(Pingresp)
        elif self.open:
            self.hear_until(Connack)


def _told(packet: Packet) -> tuple[Any, ...]:
    """What of a packet is compared."""
    properties = tuple(
        sorted(
            (key.name, value) for key, value in getattr(packet, "properties", {}).items() if key not in FREE
        )
    )
    if isinstance(packet, Connack):
        return "CONNACK", packet.session_present, packet.reason, properties
    if isinstance(packet, Publish):
        return (
            "PUBLISH",
            packet.topic,
            packet.body,
            packet.qos,
            packet.retain,
            packet.dup,
            packet.packet_id,
            properties,
        )
    if isinstance(packet, Ack):  # 0x10, nobody subscribes, may be said instead of 0 (5: 3.4.2.1)
        return packet.kind.name, packet.packet_id, packet.reason if packet.reason != 0x10 else 0
    if isinstance(packet, Suback | Unsuback):
        return packet.kind.name, packet.packet_id, packet.reasons
    if isinstance(packet, Disconnect):
        return "DISCONNECT", packet.reason
    return (packet.kind.name,)


def run(port: int, version: Version, script: Script) -> Log:
    """What a broker says to the script."""
    log: Log = []
    clients: dict[str, Client] = {}
    try:
        for name, what in script:
            if name not in clients or not clients[name].open:
                clients[name] = Client(port, name, version, log)
            client = clients[name]
            if isinstance(what, str):
                client.cut()
            else:
                client.say(what)
                if isinstance(what, Disconnect):
                    client.hear_until(Connack)  # nothing comes but the end
            for one in (client, *[other for other in clients.values() if other is not client]):
                one.settle()
    finally:
        for client in clients.values():
            client.cut()
    return log


def by_client(log: Log) -> Log:
    """What each client hears, in order: which of two hears first is up to the broker, as with QoS 2, which
    Mosquitto hands on when it is released, and we when it comes (both as 5: 4.3.3 has it).
    """
    return sorted(log, key=lambda heard: str(heard[0]))

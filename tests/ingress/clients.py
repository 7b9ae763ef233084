"""Blocking clients for tests that need every byte in hand: an MQTT machine, or nothing, on a socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import ClassVar, Final, Protocol, Self, TypeVar

from gateway.ingress.front.pending import PendingConnection
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Event,
    Suback,
    Subscription,
    Unsuback,
    Will,
)
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.runs import Acks, Publishes, PublishRow
from gateway.protocols.mqtt.spec import PacketType, Version
from gateway.telemetry.stats import ListenerStats
from tests.interop.gateway_fixture import LOOPBACK, Running

PATIENCE_SECS: Final = 30.0
Kind = TypeVar("Kind", Auth, Connack, Suback, Unsuback, Disconnect, Publishes, Acks)


class Ported(Protocol):
    """A gateway, in this process or another: what its clients need of it."""

    def port(self, listener: str) -> int:
        """The port of a listener."""


class Raw:
    """A socket to the gateway. `lead`: what a balancer says first."""

    lead: ClassVar[bytes] = b""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection((LOOPBACK, port), timeout=PATIENCE_SECS)
        if self.lead:
            self.sock.sendall(self.lead)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> Self:
        self.sock.sendall(data)
        return self

    def rest(self) -> bytes:
        """All that comes until the gateway closes, which it must."""
        found = b""
        while True:
            try:
                data = self.sock.recv(65_536)
            except ConnectionResetError:
                return found
            if not data:
                return found
            found += data

    def cut(self) -> None:
        """Vanish without a word."""
        self.sock.close()


class Mqtt(Raw):
    """A client that says and hears packets; nothing happens by itself."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.machine = ClientConnection(packet_bytes_max=268_435_455)
        self._events: list[Event] = []
        self.heard: list[Publishes] = []  # messages that `next` passed over

    def flush(self) -> None:
        self.send(self.machine.data_to_send())

    def say(self, packet: Connect) -> None:
        self.machine.connect(packet, 0.0)
        self.flush()

    def next(self, kind: type[Kind]) -> Kind:
        """The next event of a kind; others in between are passed over."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
                if isinstance(event, Publishes):
                    self.heard.append(event)
            data = self.sock.recv(65_536)
            if not data:
                raise ConnectionError("the gateway has closed the connection")
            self._events += self.machine.receive_data(data, 0.0)

    def closed(self) -> bool:
        """Wait until the gateway closes."""
        self.rest()
        return True

    def subscribe(
        self, topic_filter: str, qos: int = 0, properties: PropertyMap | None = None, **options: bool | int
    ) -> int:
        subscription = Subscription(topic_filter, qos, **options)  # type: ignore[arg-type]
        self.machine.subscribe(1, [subscription], properties or {})
        self.flush()
        return self.next(Suback).reasons[0]

    def publish(
        self, topic: str, body: bytes = b"x", qos: int = 0, packet_id: int = 0, **more: bool | bytes
    ) -> None:
        self.machine.publish(topic.encode(), body, qos, packet_id=packet_id, **more)  # type: ignore[arg-type]
        self.flush()

    def row(self) -> PublishRow:
        """The next message: flags, topic, packet id, properties, body. Messages must come one at a time."""
        publishes = self.next(Publishes)
        first, *others = publishes.rows
        if others:
            self._events.insert(0, Publishes(others))
        return first

    def body(self) -> bytes:
        return self.row()[4]

    def ack(self, kind: PacketType, packet_id: int, reason: int = 0) -> None:
        self.machine.send(Ack(kind, packet_id, reason))
        self.flush()

    def acked(self, kind: PacketType) -> tuple[int, int]:
        """Packet id and reason of the next acknowledgement, which is of that kind."""
        acks = self.next(Acks)
        assert acks.kind is kind
        first, *others = acks.rows
        if others:
            self._events.insert(0, Acks(kind, others))
        return first

    def ping(self) -> None:
        """A round trip: whatever was sent before has been taken."""
        self.machine.send_pingreq(0.0)
        self.flush()
        before = self.machine.received[PacketType.PINGRESP]
        while self.machine.received[PacketType.PINGRESP] == before:
            data = self.sock.recv(65_536)
            assert data, "the gateway has closed the connection"
            self._events += self.machine.receive_data(data, 0.0)

    def events(self, kind: type[Kind]) -> list[Kind]:
        """Those of a kind that have come so far; they stay."""
        return [event for event in self._events if isinstance(event, kind)]

    def quiet(self) -> bool:
        """Nothing but the answer to a ping has come."""
        self.ping()
        return not self.events(Publishes)


def connect(
    gateway: Ported,
    client_id: str = "c",
    *,
    version: Version = Version.V5,
    clean: bool = True,
    keep_alive: int = 0,
    will: Will | None = None,
    listener: str = "mqtt",
    properties: PropertyMap | None = None,
    user: tuple[str, bytes] | None = None,
) -> tuple[Mqtt, Connack]:
    """A connected client and the CONNACK that it got."""
    client = Mqtt(gateway.port(listener))
    name, password = user or (None, None)
    given = properties or {}
    client.say(Connect(client_id, version, clean, keep_alive, will, name, password, given))
    return client, client.next(Connack)


def stats(gateway: Running, listener: str = "mqtt") -> ListenerStats:
    return gateway.gateway.listeners[listener].stats


def bytes_of(stats: ListenerStats) -> tuple[int, int]:
    """In and out, as they are counted."""
    return stats.bytes_in, stats.bytes_out


def arrived(gateway: Running, listener: str) -> int:
    """Bytes that a listener has read, those included of clients that may yet come to be another's."""
    there = gateway.gateway.listeners[listener]
    waiting = [len(one.data) for one in list(there.connections) if isinstance(one, PendingConnection)]
    return there.stats.bytes_in + sum(waiting)


def eventually(condition: Callable[..., object], seconds: float = PATIENCE_SECS) -> None:
    """Return when the condition holds; AssertionError when it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)

"""While the database is away a client that publishes at QoS 2 goes on with all the rest."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client, Replica, replicas
from tests.interop.servers import LOOPBACK, RabbitMQ
from tests.interop.state_database import state_server

CONNECT = b"\x10\x14\x00\x04MQTT\x04\x00\x00\x3c\x00\x08"  # for a session that outlives it, and then the name
SUBSCRIBE = b"\x82\x08\x00\x01\x00\x03i/1\x01"
PINGREQ, PINGRESP = b"\xc0\x00", b"\xd0\x00"
DISCONNECT = b"\xe0\x00"


def publish(qos: int, packet_id: int, body: bytes) -> bytes:
    rest = b"\x00\x03i/2" + (packet_id.to_bytes(2, "big") if qos else b"") + body
    return bytes((0x30 | qos << 1, len(rest))) + rest


class Wire:
    """A client whose packets the test writes, and reads one by one."""

    def __init__(self, port: int, name: bytes) -> None:
        self.socket = socket.create_connection((LOOPBACK, port), timeout=PATIENCE_SECS)
        self.stream = self.socket.makefile("rb")
        self.socket.sendall(CONNECT + name)
        assert self.packet()[0] == 0x20
        self.socket.sendall(SUBSCRIBE)
        assert self.packet()[0] == 0x90

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.socket.close()

    def packet(self) -> bytes:
        head = self.stream.read(2)
        return head + self.stream.read(head[1]) if len(head) == 2 else head


@pytest.fixture
def held(rabbitmq: RabbitMQ) -> Iterator[tuple[Replica, Proxy, Client]]:
    """A replica that hears nothing of its database when its proxy stalls, and a client of what comes."""
    server = state_server()
    with Proxy(server.port) as way:
        url = server.url.replace(str(server.port), str(way.port))
        one = Replica("held", rabbitmq.url, "ids", postgresql={"url": url})
        with replicas(one), Client(one.mqtt, "hears") as hears:
            hears.subscribe("i/2", qos=1)
            yield one, way, hears


def test_acknowledgements_and_pings_do_not_wait(held: tuple[Replica, Proxy, Client]) -> None:
    """What it publishes waits, in its order."""
    one, way, hears = held
    with Wire(one.mqtt, b"exchange") as wire:
        way.stall("down")
        wire.socket.sendall(publish(2, 7, b"first") + publish(1, 8, b"second") + publish(0, 0, b"third"))
        wire.socket.sendall(PINGREQ)
        assert wire.packet() == PINGRESP
        for body in (b"a", b"b"):
            hears.publish("i/1", body, qos=1)
            received = wire.packet()
            assert received.endswith(body)
            wire.socket.sendall(b"\x40\x02" + received[-len(body) - 2 : -len(body)])
        wire.socket.sendall(publish(2, 9, b"fourth"))
        wire.socket.sendall(PINGREQ)
        assert wire.packet() == PINGRESP
        assert not hears.told
        way.resume()
        assert sorted(wire.packet() for _ in range(3)) == [
            b"\x40\x02\x00\x08",
            b"\x50\x02\x00\x07",
            b"\x50\x02\x00\x09",
        ]
        hears.until(lambda: hears.has_more_than(3))
        assert [body for _, body in hears.told] == [b"first", b"second", b"third", b"fourth"]


def test_a_goodbye_waits_behind_them(held: tuple[Replica, Proxy, Client]) -> None:
    one, way, hears = held
    with Wire(one.mqtt, b"farewell") as wire:
        way.stall("down")
        wire.socket.sendall(publish(2, 7, b"first") + publish(0, 0, b"second") + DISCONNECT)
        way.resume()
        hears.until(lambda: hears.has_more_than(1))
        assert [body for _, body in hears.told] == [b"first", b"second"]
        while wire.packet():
            pass


def test_a_client_that_is_lost_meanwhile(held: tuple[Replica, Proxy, Client]) -> None:
    """What had no acknowledgement comes again with the client."""
    one, way, hears = held
    with Wire(one.mqtt, b"lost-one") as wire:
        way.stall("down")
        wire.socket.sendall(publish(2, 7, b"first") + PINGREQ)
        assert wire.packet() == PINGRESP
    one.until(lambda: "lost-one" not in one.gateway.mqtt.sessions)
    way.resume()
    with Wire(one.mqtt, b"lost-one") as again:
        again.socket.sendall(publish(2, 7, b"first"))
        assert again.packet() == b"\x50\x02\x00\x07"
        hears.until(lambda: hears.has_more_than(0))
        assert [body for _, body in hears.told] == [b"first"]


def test_one_that_sends_more_than_may_wait_is_not_read(held: tuple[Replica, Proxy, Client]) -> None:
    one, way, hears = held
    with Wire(one.mqtt, b"too-much") as wire:
        way.stall("down")
        count = 6_000
        wire.socket.sendall(publish(2, 7, b"first"))
        wire.socket.sendall(PINGREQ)
        assert wire.packet() == PINGRESP
        wire.socket.sendall(b"".join(publish(0, 0, b"%d" % number) for number in range(count)))
        way.resume()
        assert wire.packet() == b"\x50\x02\x00\x07"
        hears.until(lambda: hears.has_more_than(count))
        assert [body for _, body in hears.told] == [b"first", *(b"%d" % number for number in range(count))]

"""While the database is away a client that publishes at QoS 2 goes on with all the rest."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.engine.client_session import SessionChange, SharedReceivedIds
from gateway.engine.sessions import NOT_OURS
from gateway.model.outcome import ACCEPTED
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
        way.stall("down", new=True)
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
        way.stall("down", new=True)
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
        way.stall("down", new=True)
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
        way.stall("down", new=True)
        count = 6_000
        wire.socket.sendall(publish(2, 7, b"first"))
        wire.socket.sendall(PINGREQ)
        assert wire.packet() == PINGRESP
        wire.socket.sendall(b"".join(publish(0, 0, b"%d" % number) for number in range(count)))
        way.resume()
        assert wire.packet() == b"\x50\x02\x00\x07"
        hears.until(lambda: hears.has_more_than(count))
        assert [body for _, body in hears.told] == [b"first", *(b"%d" % number for number in range(count))]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_client_that_moves_meanwhile_publishes_once(rabbitmq: RabbitMQ, is_closed: bool) -> None:
    """The first replica cannot store the identifiers, so it must not publish those messages, either. QoS 0
    has no identifier, and its client does not repeat it."""
    server = state_server()
    namespace = "closed" if is_closed else "moved"  # the other case leaves the client's identifiers
    with Proxy(server.port) as way:
        url = server.url.replace(str(server.port), str(way.port))
        first = Replica("first", rabbitmq.url, namespace, postgresql={"url": url})
        second = Replica("second", rabbitmq.url, namespace, postgresql={"url": server.url})
        with replicas(first, second), Client(second.mqtt, "hears") as hears:
            hears.subscribe("i/2", qos=2)
            with Wire(first.mqtt, b"wanderer") as wire:
                way.stall("up", new=True)
                wire.socket.sendall(publish(2, 7, b"once") + publish(0, 0, b"zero") + publish(2, 8, b"twice"))
                wire.socket.sendall(PINGREQ)
                assert wire.packet() == PINGRESP
                if is_closed:
                    wire.socket.shutdown(socket.SHUT_RDWR)
                    first.until(lambda: "wanderer" not in first.gateway.mqtt.sessions)
                with Wire(second.mqtt, b"wanderer") as again:
                    again.socket.sendall(publish(2, 7, b"once") + publish(2, 8, b"twice"))
                    assert again.packet() == b"\x50\x02\x00\x07"
                    assert again.packet() == b"\x50\x02\x00\x08"
                    way.resume()
                    first.until(lambda: "wanderer" not in first.gateway.mqtt.sessions)
                    first.until(lambda: not first.engine.sessions.pending and first.engine.publisher.idle)
            with Client(first.mqtt, "last") as last:
                last.publish("i/2", b"last", qos=2)
            hears.until(lambda: hears.has_more_than(3))
            bodies = [body for _, body in hears.told]
            assert sorted(bodies) == [b"last", b"once", b"twice", b"zero"]
            assert bodies.index(b"once") < bodies.index(b"twice") < bodies.index(b"last")


class Owner:
    """Session and engine of received ids: numbers the messages, and gathers the changes."""

    def __init__(self) -> None:
        self.changes = SessionChange()
        self.count = 0

    def change(self) -> SessionChange:
        return self.changes

    def next_number(self) -> tuple[bytes, int]:
        self.count += 1
        return (b"life", self.count)


def ids() -> SharedReceivedIds:
    owner: Any = Owner()
    return SharedReceivedIds(owner, owner, {3: (b"before", 3)})


def test_an_id_is_stored_when_the_database_has_answered() -> None:
    """Not when it is on its way: the message may come up once more before."""
    received = ids()
    announced = received.announce([1, 2, 3])
    assert announced.keys() == {1, 2}
    assert received.announce([1]) == {1: announced[1]}
    received.record_stored(announced, ACCEPTED)
    assert not received.announce([1, 2, 3])
    assert received.announce([4])


def test_an_id_that_is_reused_meanwhile_is_not_stored_by_the_earlier_answer() -> None:
    received = ids()
    earlier = received.announce([1])
    received.release(1)
    later = received.announce([1])
    received.record_stored(earlier, ACCEPTED)
    assert received.announce([1]) == later
    received.record_stored(later, ACCEPTED)
    assert not received.announce([1])


def test_an_id_that_another_owner_may_have_is_lost() -> None:
    received = ids()
    received.record_stored(received.announce([1]), NOT_OURS)
    assert received.is_lost


@pytest.mark.parametrize("told", [True, False])
def test_a_refused_message_keeps_its_number_unless_its_client_was_told(told: bool) -> None:
    received = ids()
    received.add(3)
    received.forget(3, refusal_sent=told)
    assert 3 not in received
    assert received.number(3) == (None if told else (b"before", 3))

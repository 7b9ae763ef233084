"""A client that loses the race for its identifier, or the database, before it is let in: it is told why."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gateway.engine.namespace import EngineNamespace
from gateway.engine.pending_clients import OpeningClient
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.settings.access import Role
from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client, Replica, lasting, replicas
from tests.ingress.clients import eventually
from tests.interop.servers import LOOPBACK, RabbitMQ
from tests.interop.state_database import state_server

CONNECTS = {4: b"\x00\x04MQTT\x04\x02\x00\x3c", 5: b"\x00\x04MQTT\x05\x02\x00\x3c\x00"}
ENDS = b"\x00\x04MQTT\x05\x00\x00\x3c\x00"  # it resumes a session, which ends with the connection
RESUMES = b"\x00\x04MQTT\x05\x00\x00\x3c\x05\x11\x00\x00\x01\x00"  # with an expiry
UNAVAILABLE = {4: 3, 5: 0x88}


class Raw:
    """A client that has sent CONNECT."""

    def __init__(
        self, port: int, name: str, version: int, *, connect: bytes = b"", then: bytes = b""
    ) -> None:
        self.version = version
        body = (connect or CONNECTS[version]) + len(name).to_bytes(2, "big") + name.encode()
        self.socket = socket.create_connection((LOOPBACK, port), timeout=PATIENCE_SECS)
        self.socket.sendall(bytes((0x10, len(body))) + body + then)

    def answer(self) -> int:
        """The reason of its CONNACK."""
        head = self.socket.recv(4)
        assert head[0] == 0x20, head
        return head[3]

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def over(self) -> bool:
        """Nothing comes but the end of the connection."""
        while data := self.socket.recv(1_000):
            assert self.version == 5, data
        return True


@pytest.fixture
def held(rabbitmq: RabbitMQ) -> Iterator[tuple[Replica, Proxy]]:
    """A replica that hears nothing of its database when its proxy stalls."""
    server = state_server()
    with Proxy(server.port) as way:
        url = server.url.replace(str(server.port), str(way.port))
        one = Replica("held", rabbitmq.url, "races", postgresql={"url": url})
        with replicas(one):
            yield one, way


@pytest.mark.parametrize("version", [4, 5])
def test_the_first_of_two_at_one_replica_is_told(held: tuple[Replica, Proxy], version: int) -> None:
    one, way = held
    way.stall("down")
    with Raw(one.mqtt, "same", version) as first:
        one.until(lambda: "same" in one.engine.sessions._openings)
        with Raw(one.mqtt, "same", version) as second:
            assert first.answer() == UNAVAILABLE[version]
            assert first.over()
            way.resume()
            assert second.answer() == 0


@pytest.mark.parametrize("version", [4, 5])
def test_who_waits_when_the_database_is_lost_is_told(held: tuple[Replica, Proxy], version: int) -> None:
    one, way = held
    way.stall("down")
    with Raw(one.mqtt, "waits", version) as client:
        one.until(lambda: "waits" in one.engine.sessions._openings)
        way.cut()
        way.shut()
        assert client.answer() == UNAVAILABLE[version]
        assert client.over()
    way.open()

    def is_let_in() -> bool:
        with Raw(one.mqtt, "waits", version) as client:
            return client.answer() == 0

    eventually(is_let_in, PATIENCE_SECS)  # the replica may have to join again after it is ready


def test_of_many_at_two_replicas_each_is_answered(rabbitmq: RabbitMQ) -> None:
    """Let in, and disconnected when another one is; or not let in."""
    two = [Replica(name, rabbitmq.url, "races") for name in ("left", "right")]
    with replicas(*two), ExitStack() as stack:
        clients = [stack.enter_context(Raw(two[at % 2].mqtt, "many", 5)) for at in range(40)]
        assert {client.answer() for client in clients} <= {0, UNAVAILABLE[5]}


@pytest.mark.interpreted
@pytest.mark.parametrize(("present", "connect"), [(False, RESUMES), (True, RESUMES), (True, ENDS)])
def test_a_failed_opening_leaves_what_was_there(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, present: bool, connect: bytes
) -> None:
    """No session and no queue if there was none."""
    one = Replica("fails", rabbitmq.url, "openingfails")
    topic, name = f"fails/{present}", f"fails {present} {len(connect)}"
    with replicas(one, but="internal error, contained"), Client(one.mqtt, f"p {present}") as other:
        if present:
            with lasting(one.mqtt, name) as client:
                client.subscribe(topic, qos=1)
            other.publish(topic, b"1")
        queues = {queue for queue in rabbitmq.queues if "openingfails" in queue}
        sessions = one.engine.sessions

        def fail(*_: object) -> None:
            raise RuntimeError("thrown by a test")

        with monkeypatch.context() as patch:
            patch.setattr(MqttIngress, "end_subscriptions", fail)
            with Raw(one.mqtt, name, 5, connect=connect) as guest:
                assert guest.over()
        one.until(lambda: not sessions.pending and (name not in one.gateway.mqtt.sessions))
        rows = one.stored("session", name, "connected")
        assert rows == ([(0,)] if present else [])
        if present:
            with lasting(one.mqtt, name) as client:
                assert client.present
                client.until(lambda: client.messages)
        eventually(lambda: {queue for queue in rabbitmq.queues if "openingfails" in queue} == queues, 60.0)


@pytest.mark.interpreted
def test_a_client_that_gets_no_connack_leaves_its_session_as_it_was(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its session was to end with this connection."""
    one, name = Replica("late", rabbitmq.url, "openinglate"), "late"
    with replicas(one):
        with lasting(one.mqtt, name) as client:
            client.subscribe("late", qos=1)
        with monkeypatch.context() as patch:
            patch.setattr(EngineNamespace, "after_recorded", lambda *_: None)
            with Raw(one.mqtt, name, 5, connect=ENDS):
                one.until(lambda: name in one.gateway.mqtt.sessions)
            one.until(lambda: name not in one.gateway.mqtt.sessions and not one.engine.sessions.pending)
        assert one.stored("session", name, "connected") == [(0,)]
        with lasting(one.mqtt, name) as client:
            assert client.present


@pytest.mark.interpreted
@pytest.mark.parametrize("clean", [False, True])
def test_a_client_that_takes_over_its_connection_here_keeps_its_place(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    """Although another connection of its user was admitted since the first one was closed."""
    role = Role.model_validate({"mqtt": {"subscribe": "#"}, "connections_max": 1})
    settings = {"roles": {"all": role}, "default_roles": {"anonymous": ("all",)}}
    one = Replica("places", rabbitmq.url, f"openingplaces{clean}".lower(), settings=settings)
    add_arrival = EngineNamespace.add_arrival

    def add_full(space: EngineNamespace, arrival: OpeningClient) -> None:
        add_arrival(space, arrival)
        one.gateway.authorization.connections[""] = 1

    with replicas(one), lasting(one.mqtt, "same") as before, monkeypatch.context() as patch:
        patch.setattr(EngineNamespace, "add_arrival", add_full)
        with Raw(one.mqtt, "other", 5, connect=RESUMES) as client:
            assert client.answer() == 0x97
        one.gateway.authorization.connections[""] = 1
        with Raw(one.mqtt, "same", 5, connect=CONNECTS[5] if clean else RESUMES) as client:
            assert client.answer() == 0
            before.until(lambda: before.ended)
        one.until(lambda: "same" not in one.gateway.mqtt.sessions)
        one.gateway.authorization.connections.pop("", None)


def test_a_session_ends_with_a_client_that_disconnects_before_its_connack(rabbitmq: RabbitMQ) -> None:
    """The CONNACK is written nevertheless, and the client has asked for the end."""
    one, name = Replica("hasty", rabbitmq.url, "openinghasty"), "hasty"
    with replicas(one):
        with lasting(one.mqtt, name) as client:
            client.subscribe("hasty", qos=1)
        with Raw(one.mqtt, name, 5, connect=ENDS, then=b"\xe0\x00") as hasty:
            assert not hasty.answer()
            assert hasty.over()
        one.until(lambda: name not in one.gateway.mqtt.sessions and not one.engine.sessions.pending)
        assert not one.stored("session", name, "connected")
        with lasting(one.mqtt, name) as client:
            assert not client.present

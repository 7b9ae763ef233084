"""One client's flood against the others: they are served in between, and the flood is answered to its end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Final

import pytest
import trio

from gateway.app import Gateway
from gateway.ingress.client import IngressClient
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import encode_method_frame
from gateway.protocols.mqtt.connection import STEPS_MAX
from gateway.protocols.mqtt.packets import Connect, Disconnect, Subscription
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.protocols.mqtt.writers import encode
from gateway.settings import Limits
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running, gateway_here, running, settings_of
from tests.interop.servers import LOOPBACK

PINGS: Final = 20_000
PONG: Final = b"\xd0\0"


def joined(gateway: Running, client_id: str) -> Mqtt:
    return connect(gateway, client_id)[0]


def test_a_flood_is_answered_whole_while_others_are_served(gateway: Running) -> None:
    with joined(gateway, "flood") as flood, joined(gateway, "other") as other:
        flood.sock.sendall(b"\xc0\0" * PINGS)
        for _ in range(3):
            other.ping()
        heard = b""
        while len(heard) < PINGS * 2:
            heard += flood.sock.recv(65_536)
        assert heard == PONG * PINGS


def test_a_flood_of_methods_is_answered_whole(gateway: Running) -> None:
    with Amqp(gateway).open() as flood:
        flood.sock.sendall(encode_method_frame(1, m.TxSelect()) * 5_000)
        heard = b""
        answer = encode_method_frame(1, m.TxSelectOk())
        while len(heard) < len(answer) * 5_000:
            heard += flood.sock.recv(65_536)
        assert heard == answer * 5_000


def test_what_was_said_behind_a_flood_is_done_before_the_end(gateway: Running) -> None:
    with joined(gateway, "watcher") as watcher:
        watcher.subscribe("t")
        with joined(gateway, "flood") as flood:
            flood.sock.sendall(b"\x30\6\0\1t\0hi" * 5_000 + b"\xe0\0")
        for _ in range(5_000):
            assert watcher.body() == b"hi"


async def test_a_turn_of_a_flood_does_its_share_and_the_other_comes_before_the_next() -> None:
    """As counted, in the loop of the test itself."""
    async with gateway_here() as gateway:
        flood, other = [await mqtt(gateway, name) for name in ("flood", "other")]
        peers = {one.sender.client: one for one in gateway.listeners["mqtt"].connections}
        order = watch(peers)
        flood.send(b"\xc0\0" * PINGS)
        while order.count("flood") < 20:
            await trio.lowlevel.checkpoint()
        begun = len(order)
        other.send(b"\xc0\0")
        while "other" not in order[begun:]:
            await trio.lowlevel.checkpoint()
        assert order.index("other", begun) - begun <= 3
        assert peers["flood"].machine.received[PacketType.PINGREQ] <= (len(order) + 1) * STEPS_MAX
        flood.close()
        other.close()


def watch(peers: dict[str, IngressClient]) -> list[str]:
    """Whose turn it was, from now on."""
    order: list[str] = []

    def noting(name: str, receive: Callable[[bytes, float], None]) -> Callable[[bytes, float], None]:
        def noted(data: bytes, now: float) -> None:
            order.append(name)
            receive(data, now)

        return noted

    class Noted:
        def __init__(self, name: str, peer: IngressClient) -> None:
            self._connection = peer
            self.receive = noting(name, peer.receive)

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

    for name, peer in peers.items():
        peer.stream.owner = Noted(name, peer)  # type: ignore[assignment]
    return order


async def mqtt(gateway: Gateway, client_id: str) -> socket.socket:
    sock = socket.create_connection((LOOPBACK, gateway.listeners["mqtt"].port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is sent is there when the clock jumps
    sock.send(encode(Connect(client_id), Version.V5))
    await trio.lowlevel.wait_readable(sock)
    assert sock.recv(1_000)[0] >> 4 == PacketType.CONNACK
    sock.setblocking(False)
    return sock


def test_limits_of_a_listener_bound_one_packet() -> None:
    limits: dict[str, Any] = {"properties_max": 3, "filters_max": 2}
    with running(settings_of(limits=Limits(**limits))) as gateway:
        with joined(gateway, "a") as client:
            client.machine.subscribe(1, [Subscription(name) for name in "xyz"], {})
            client.flush()
            assert client.next(Disconnect).reason == ReasonCode.QUOTA_EXCEEDED
        with joined(gateway, "b") as client:
            client.publish("t", properties=b"\x26\0\0\0\0" * 4)
            assert client.next(Disconnect).reason == ReasonCode.QUOTA_EXCEEDED
        with joined(gateway, "c") as client:
            client.publish("t", properties=b"\x26\0\0\0\0" * 3)
            client.ping()


@pytest.mark.parametrize("limit", [{"receive_bytes_per_sec_max": 100}, {"receive_messages_per_sec_max": 1}])
async def test_who_is_too_fast_is_not_read_for_a_while_and_stays(
    limit: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """Its keep-alive does not count meanwhile: it is we who do not read."""
    async with gateway_here(settings_of(limits=Limits(keep_alive_secs_max=5, **limit))) as gateway:
        sock = await mqtt(gateway, "fast")
        [peer] = gateway.listeners["mqtt"].connections
        sock.send(b"\x30\6\0\1t\0hi" * 100)
        await trio.sleep(2)
        assert not peer.stream.listening
        sock.send(b"\xc0\0")
        await trio.sleep(4)
        assert peer.machine.received[PacketType.PINGREQ] == 0
        assert not peer.stream.closed
        await trio.sleep(2)
        while not peer.machine.received[PacketType.PINGREQ]:
            assert not peer.stream.closed
            await trio.sleep(1)
        sock.close()

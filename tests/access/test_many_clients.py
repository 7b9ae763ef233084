"""A thousand clients publish and read while rules change: from then on nobody has a right that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import trio
import yaml

from gateway.settings import load_settings
from tests.files import replace_text
from tests.interop.gateway_fixture import LOOPBACK, gateway_here

CLIENTS: Final = 1_000
PATIENCE_SECS: Final = 60.0
NOT_AUTHORIZED: Final = 0x87
CONNACK, PUBACK, SUBACK, DISCONNECT = 0x20, 0x40, 0x90, 0xE0


def connect(client_id: str) -> bytes:
    """A CONNECT of MQTT 5."""
    name = client_id.encode()
    body = b"\x00\x04MQTT\x05\x02\x00\x00\x00" + len(name).to_bytes(2, "big") + name
    return bytes((0x10, len(body))) + body


def publish(topic: bytes, packet_id: int) -> bytes:
    """A PUBLISH of QoS 1."""
    body = len(topic).to_bytes(2, "big") + topic + packet_id.to_bytes(2, "big") + b"\x00x"
    return bytes((0x32, len(body))) + body


def subscribe(topic_filter: bytes) -> bytes:
    """A SUBSCRIBE of QoS 0."""
    body = b"\x00\x01\x00" + len(topic_filter).to_bytes(2, "big") + topic_filter + b"\x00"
    return bytes((0x82, len(body))) + body


class Client:
    """One that publishes as fast as it is answered."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answered = 0
        self.refused = 0
        self.ended = False
        self.last_success = 0.0
        self._unread = b""

    async def packet(self, stream: trio.SocketStream) -> bytes:
        """The next packet, which is short."""
        while len(self._unread) < 2 or len(self._unread) < 2 + self._unread[1]:
            data = await stream.receive_some(4_096)
            if not data:
                return b""
            self._unread += data
        size = 2 + self._unread[1]
        packet, self._unread = self._unread[:size], self._unread[size:]
        return packet

    async def run(self, port: int, ready: trio.Event) -> None:
        """Publish until it has been refused twice; every tenth only reads, until it is let go."""
        stream = await trio.open_tcp_stream(LOOPBACK, port)
        async with stream:
            await stream.send_all(connect(f"c-{self.number}"))
            assert (await self.packet(stream))[0] == CONNACK
            if self.number % 10 == 0:
                await stream.send_all(subscribe(b"a/#"))
                assert (await self.packet(stream))[0] == SUBACK
                ready.set()
                while packet := await self.packet(stream):
                    if packet[0] == DISCONNECT:
                        assert packet[2] == NOT_AUTHORIZED
                        self.ended = True
                        return
                return
            topic = b"b/%d" % self.number
            while self.refused < 2:
                asked = trio.current_time()
                await stream.send_all(publish(topic, self.answered % 60_000 + 1))
                packet = await self.packet(stream)
                assert packet[0] == PUBACK
                self.answered += 1
                ready.set()
                if len(packet) > 4 and packet[4] == NOT_AUTHORIZED:
                    self.refused += 1
                else:
                    self.last_success = asked
                await trio.sleep(0.3)  # they share a loop with the gateway
            self.ended = True


@pytest.mark.needs("time")
@pytest.mark.trio
async def test_nobody_keeps_a_right_that_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    document: dict[str, Any] = {
        "listeners": {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": 0}},
        "http": {"enabled": False},
        "store": {"enabled": False},
        "roles": {"anyone": {"mqtt": {"publish": ["b/+", "x/{client_id}"], "subscribe": "a/#"}}},
        "default_roles": {"anonymous": "anyone"},
    }
    file.write_text(yaml.safe_dump(document))
    clients = [Client(number) for number in range(CLIENTS)]
    async with gateway_here(load_settings(file, {})) as gateway:
        port = gateway.listeners["mqtt"].port
        with trio.fail_after(PATIENCE_SECS):
            async with trio.open_nursery() as nursery:
                ready = [trio.Event() for _ in clients]
                for client, told in zip(clients, ready, strict=True):
                    nursery.start_soon(client.run, port, told)
                for told in ready:
                    await told.wait()
                document["roles"]["anyone"]["mqtt"] = {"publish": "c/+", "subscribe": "c/#"}
                replace_text(file, yaml.safe_dump(document))
                changed = trio.current_time()
                while gateway.authorization.generation == 0:
                    await trio.sleep(0.001)
                forced = trio.current_time()
        last = max(client.last_success for client in clients)
        print(f"in force {forced - changed:.3f} s after the change; last success {last - changed:.3f} s")
        assert all(client.ended for client in clients)
        assert last <= forced
        assert gateway.listeners["mqtt"].stats.denied.counts["publish"] >= 2 * CLIENTS * 9 // 10
        assert not gateway.mqtt.subscriptions

"""A link to an AMQP/Fast server of 2005, through sockets: what that offers, and what it cannot bear."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import decode_credentials
from gateway.protocols.amqpfast.server import ServerConnection
from tests.configured import make_link
from tests.ingress.amqpfast.client import TOPIC, head
from tests.ingress.amqpfast.large import MIB, Whole, data
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of

PATIENCE_SECS = 30.0
LARGE = data(2 * MIB)
MAPPING = """
version: 1
routes:
  - name: up
    from: {endpoint: amqpfast, service: topic, destination: "up.{rest...}"}
    to: {endpoint: old, service: queue, destination: "{rest}"}
"""


class Server2005(threading.Thread):
    """Takes what it is sent, one connection after the other. Offers NONE, and drops whoever says PREPARE."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listening = socket.create_server((LOOPBACK, 0))
        self._current: socket.socket | None = None
        self._parts: list[bytes] = []
        self.port: int = self._listening.getsockname()[1]
        self.connections = 0
        self.prepares = 0
        self.pings = 0
        self.names: set[tuple[str, str] | None] = set()
        self.bodies: list[bytes] = []

    def run(self) -> None:
        with suppress(OSError):  # it is stopped
            while True:
                self._current, _ = self._listening.accept()
                self.connections += 1
                with self._current as sock, suppress(ConnectionError):
                    self._serve(sock)

    def stop(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        if self._current is not None:
            with suppress(OSError):  # the link has gone before
                self._current.shutdown(socket.SHUT_RDWR)
        self.join(PATIENCE_SECS)
        assert not self.is_alive()

    def _serve(self, sock: socket.socket) -> None:
        machine = ServerConnection(mechanisms="NONE", heartbeat=1)
        self._parts.clear()
        while said := sock.recv(65_536):
            events = machine.receive_data(said, 0.0)
            while events:
                for event in events:
                    if isinstance(event, e.Prepared):
                        self.prepares += 1
                        return
                    self._hear(machine, event)
                events = machine.receive_data(b"", 0.0)
            self.pings += machine.received[m.ConnectionPing.type]
            sock.sendall(machine.data_to_send())
            if machine.closed:
                return

    def _hear(self, machine: ServerConnection, event: e.Event) -> None:
        if isinstance(event, e.Authenticate):
            self.names.add(decode_credentials(event.mechanism, event.responses))
            machine.tune()
        elif isinstance(event, e.Open):
            machine.opened()
        elif isinstance(event, e.Sends):
            for handle, tag, _, body, _ in event.rows:
                self.bodies.append(body)
                machine.reply(handle, tag)
        elif isinstance(event, e.Fragment):
            self._parts.append(bytes(event.data))
            if event.last:
                self.bodies.append(b"".join(self._parts))
                self._parts.clear()
                machine.reply(event.handle, event.tag)
        elif isinstance(event, e.CommandReceived) and isinstance(event.command, m.ChannelOpen):
            machine.reply_channel(event.command.channel_id, event.command.tag)
        elif isinstance(event, e.CommandReceived) and isinstance(event.command, m.HandleOpen):
            machine.reply(event.command.handle_id, event.command.tag)


@pytest.fixture
def old() -> Iterator[Server2005]:
    server = Server2005()
    server.start()
    yield server
    server.stop()


def test_large_and_small_messages_reach_it_after_one_lost_connection(old: Server2005, tmp_path: Path) -> None:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    url = f"amqpfast://fast:secret@{LOOPBACK}:{old.port}/"
    link = make_link(
        url=url,
        heartbeat_secs=1,
        compatibility="openamq-2005",
        reconnect_min_secs=0.1,
        reconnect_max_secs=0.3,
    )
    settings = settings_of(links={"old": link}, mappings=[str(tmp_path / "mapping.yaml")])
    with running(settings) as near:
        near.until(lambda: near.gateway.links["old"].is_up, PATIENCE_SECS)
        with Whole(near).open() as client:
            handle = client.handle("up.", TOPIC)
            client.put(handle, b"small", name="q", head=head(persistent=True))
            client.put_large(handle, LARGE, head(persistent=True), name="q")
            client.put_large(handle, LARGE[1:], name="r")
            client.put(handle, b"behind", name="q")
    assert old.bodies == [b"small", LARGE, LARGE[1:], b"behind"]
    assert (old.connections, old.prepares) == (2, 1), "it is not asked twice"
    assert old.names == {None}, "NONE is told nothing"
    assert old.pings == 0

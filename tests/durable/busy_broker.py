"""An MQTT 5 broker that refuses messages for a while, with a reason code of the test's choice."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from contextlib import suppress
from typing import Self

from gateway.protocols.mqtt.packets import Connect
from gateway.protocols.mqtt.runs import Acks, Publishes, PublishRow
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType
from tests.interop.gateway_fixture import LOOPBACK


class BusyBroker:
    """Accepts `room` messages, then refuses all with `code` until `relent`. It forgets sessions."""

    def __init__(self, code: int, room: int) -> None:
        self.accepted: list[bytes] = []
        self.qos: set[int] = set()
        self.refused = 0
        self._code = code
        self._room = room
        self._lock = threading.Lock()
        broker = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                broker.serve(self.request)

        self._server = socketserver.ThreadingTCPServer((LOOPBACK, 0), Connection)
        self._server.daemon_threads = True
        self.url = f"mqtt://{LOOPBACK}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def relent(self) -> None:
        """Accept everything from now on."""
        with self._lock:
            self._room = 1 << 30

    def serve(self, sock: socket.socket) -> None:
        machine = ServerConnection(packet_bytes_max=1 << 20)
        while data := _received(sock):
            answers = b""
            for event in machine.receive_data(data, time.monotonic()):
                if isinstance(event, Connect):
                    machine.send_connack(session_present=False)
                elif isinstance(event, Publishes):
                    answers += b"".join([machine.data_to_send(), *map(self._answer, event.rows)])
                elif isinstance(event, Acks) and event.kind is PacketType.PUBREL:
                    machine.acknowledge(PacketType.PUBCOMP, [packet_id for packet_id, _ in event.rows])
            with suppress(ConnectionError):  # the gateway was killed meanwhile
                sock.sendall(answers + machine.data_to_send())

    def _answer(self, row: PublishRow) -> bytes:
        """Return PUBACK or PUBREC, with whatever code: brokers send more of them than the standard has."""
        flags, _, packet_id, _, body = row
        qos = flags >> 1 & 3
        with self._lock:
            self.qos.add(qos)
            if self._room:
                self._room -= 1
                self.accepted.append(body)
                code = 0
            else:
                self.refused += 1
                code = self._code
        kind = PacketType.PUBREC if qos == 2 else PacketType.PUBACK
        return bytes((kind << 4, 3)) + packet_id.to_bytes(2, "big") + bytes((code,))


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65_536)
    except ConnectionError:
        return b""

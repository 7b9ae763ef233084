"""MQTT clients that break the rules, never acknowledge, or all come at once: each costs only itself."""

from __future__ import annotations

import resource
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

import pytest

from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits
from tests.ingress.clients import Mqtt, connect, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

STORM: Final = 10_000
KNOWN_TURNS: Final = 20  # so many short ones, and a client is quick, however long its CONNECT took
STORM_SECS_MAX: Final = 300.0  # on a machine that has much else to do
SPARE_DESCRIPTORS: Final = 1_000
RESET: Final = struct.pack("ii", 1, 0)  # a close that leaves nothing behind


def publish(topic: bytes, version: Version, packet_id: bytes = b"") -> bytes:
    properties = b"\0" if version is Version.V5 else b""
    body = len(topic).to_bytes(2, "big") + topic + packet_id + properties + b"x"
    return bytes([0x32 if packet_id else 0x30, len(body)]) + body


def subscribe(packet_id: bytes, version: Version) -> bytes:
    properties = b"\0" if version is Version.V5 else b""
    body = packet_id + properties + b"\0\x01a\0"
    return bytes([0x82, len(body)]) + body


FAULTS: Final = {
    "a packet identifier of 0": lambda version: publish(b"a", version, b"\0\0"),
    "one in SUBSCRIBE": lambda version: subscribe(b"\0\0", version),
    "malformed UTF-8": lambda version: publish(b"\xc3\x28", version),
    "a surrogate": lambda version: publish(b"\xed\xa0\x80", version),
    "U+0000": lambda version: publish(b"a\0b", version),
    "a wildcard in a topic": lambda version: publish(b"a/+", version),
    "no topic": lambda version: publish(b"", version),
    "a topic longer than its packet": lambda version: b"\x30\x03\0\x09a",
    "reserved flags": lambda version: b"\xc1\0",
    "DUP at QoS 0": lambda version: b"\x38" + publish(b"a", version)[1:],
    "QoS 3": lambda version: b"\x36" + publish(b"a", version, b"\0\x01")[1:],
    "five bytes of length": lambda version: b"\x30\xff\xff\xff\xff\xff",
    "a packet of type 0": lambda version: b"\0\0",
    "a packet of the server's": lambda version: b"\xd0\0",
}


@pytest.mark.parametrize("version", [Version.V5, Version.V311])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_counted_and_ends_its_connection(
    gateway: Running, name: str, version: Version
) -> None:
    with connect(gateway, "bystander")[0] as bystander, connect(gateway, version=version)[0] as client:
        client.send(FAULTS[name](version))
        word = ""
        if version is Version.V5:
            word = ReasonCode(client.next(Disconnect).reason).name.lower()
        assert client.rest() == b""
        counts = stats(gateway).protocol_errors.counts
        eventually(lambda: sum(counts.values()) == 1)
        assert word in ("", *counts)
        assert bystander.quiet()
        eventually(lambda: stats(gateway).connections == 1)


@pytest.mark.parametrize("version", [Version.V5, Version.V311])
@pytest.mark.parametrize("clean", [True, False])
def test_a_client_that_never_acknowledges_holds_its_publishers_for_a_while_only(
    version: Version, clean: bool
) -> None:
    limits = Limits(queue_messages_max=50, inflight_max=5, stall_secs=0.5)
    lasting = {Property.SESSION_EXPIRY_INTERVAL: 600} if version is Version.V5 and not clean else {}
    with running(settings_of(limits=limits)) as gateway:
        mute, _ = connect(gateway, "mute", version=version, clean=clean, properties=lasting)
        with mute, connect(gateway, "writer")[0] as writer, connect(gateway, "reader")[0] as reader:
            mute.subscribe("a", 1)
            reader.subscribe("a", 0)
            for number in range(200):
                writer.publish("a", b"%d" % number, 1, packet_id=number % 5 + 1)
                assert writer.acked(PacketType.PUBACK)[1] == 0
            assert [reader.body() for _ in range(200)] == [b"%d" % number for number in range(200)]
            if version is Version.V5:
                assert mute.next(Disconnect).reason == ReasonCode.QUOTA_EXCEEDED
            mute.rest()
            assert stats(gateway).protocol_errors.counts == {"quota_exceeded": 1}
            if not clean:  # it comes back as bad as it was, and does not hold them again
                again, connack = connect(gateway, "mute", version=version, clean=False, properties=lasting)
                with again:
                    assert connack.session_present
                    assert not gateway.ask(lambda: gateway.gateway.mqtt.sessions["mute"].may_pause_sources)
                    for _ in range(200):
                        writer.publish("a", b"x", 1, packet_id=1)
                        assert writer.acked(PacketType.PUBACK)[1] == 0
                    assert stats(gateway).protocol_errors.counts == {"quota_exceeded": 1}
                assert gateway.ask(lambda: gateway.gateway.mqtt.tally.queue_full) > 0


@pytest.mark.parametrize("qos", [0, 1])
def test_a_client_that_does_not_read_is_let_go_and_leaves_nothing(qos: int) -> None:
    body = bytes(256 * 1024)
    limits = Limits(queue_bytes_max=4 * 1024 * 1024, stall_secs=0.5)
    with running(settings_of(limits=limits)) as gateway:
        deaf, _ = connect(gateway, "deaf")
        with deaf, connect(gateway, "writer")[0] as writer:
            deaf.subscribe("a", qos)
            for _ in range(100):
                writer.publish("a", body, 1, packet_id=1)
                assert writer.acked(PacketType.PUBACK)[1] in (0, 0x10)  # with nobody there, at the end
            assert stats(gateway).protocol_errors.counts == {"quota_exceeded": 1}
            eventually(lambda: stats(gateway).connections == 1)
            assert gateway.ask(lambda: list(gateway.gateway.mqtt.sessions)) == ["writer"]


def test_a_full_session_may_lose_the_newest_instead() -> None:
    limits = Limits(queue_messages_max=10, inflight_max=5, session_full="drop")
    with (
        running(settings_of(limits=limits)) as gateway,
        connect(gateway, "mute")[0] as mute,
        connect(gateway, "writer")[0] as writer,
    ):
        mute.subscribe("a", 1)
        for _ in range(40):
            writer.publish("a", b"x", 1, packet_id=1)
            assert writer.acked(PacketType.PUBACK)[1] == 0
        mute.ping()
        assert gateway.ask(lambda: gateway.gateway.mqtt.tally.queue_full) == 40 - 5 - 10


class Storm:
    """Clients that all connect at once, with one packet each, and then vanish."""

    def __init__(self, port: int, count: int, bystander: Mqtt, served: Callable[[], int]) -> None:
        """`served`: how many of them have been let in."""
        self.between = 0  # so many of them, at most, between what the bystander asked and its answer
        self._served = served
        self._port = port
        self._count = count
        self._bystander = bystander
        self._sockets: dict[int, tuple[socket.socket, bytes]] = {}

    def rage(self) -> list[bytes]:
        """What each was answered; the bystander is served in between."""
        answers: list[bytes] = []
        deadline = time.monotonic() + STORM_SECS_MAX
        with select.epoll() as ready:
            for number in range(self._count):
                self._start(ready, b"device-%05d" % number)
            while len(answers) < self._count:
                assert time.monotonic() < deadline, f"{len(answers)} of {self._count} were answered"
                for descriptor, events in ready.poll(1.0):
                    sock, name = self._sockets[descriptor]
                    if events & select.EPOLLIN:
                        answers.append(sock.recv(64))
                        ready.unregister(descriptor)
                        if len(answers) % 1_000 == 0:
                            before = self._served()
                            self._bystander.ping()
                            self.between = max(self.between, self._served() - before)
                    elif events & select.EPOLLOUT:
                        sock.send(b"\x10\x18\0\x04MQTT\x04\0\0\0\0\x0c" + name)
                        ready.modify(descriptor, select.EPOLLIN)
        return answers

    def _start(self, ready: select.epoll, name: bytes) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.connect_ex((LOOPBACK, self._port))
        self._sockets[sock.fileno()] = (sock, name)
        ready.register(sock, select.EPOLLOUT)

    def __enter__(self) -> Storm:
        return self

    def __exit__(self, *_: object) -> None:
        self.pass_over()

    def pass_over(self) -> None:
        for sock, _ in self._sockets.values():
            sock.close()
        self._sockets.clear()


def test_ten_thousand_that_reconnect_at_once_are_all_served() -> None:
    """Or as many as this process may have descriptors for, both ends being in it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * STORM + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    count = (most - SPARE_DESCRIPTORS) // 2
    limits = Limits(connections_max=STORM + 1, connect_timeout_secs=STORM_SECS_MAX)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        with (
            running(settings_of(limits=limits, drain_timeout_secs=0.1)) as gateway,
            connect(gateway, "bystander")[0] as bystander,
        ):
            bystander.sock.settimeout(STORM_SECS_MAX)
            for _ in range(KNOWN_TURNS):
                bystander.ping()
            with Storm(gateway.mqtt, count, bystander, lambda: stats(gateway).logins.total) as storm:
                assert set(storm.rage()) == {b"\x20\x02\0\0"}
                storm.pass_over()
                eventually(lambda: stats(gateway).connections == 1, STORM_SECS_MAX)
                assert set(storm.rage()) == {b"\x20\x02\x01\0"}  # with their sessions
                assert storm.between < count // 2, "it waited for some turns of others, not behind the storm"
            eventually(lambda: stats(gateway).connections == 1, STORM_SECS_MAX)
            assert gateway.ask(lambda: len(gateway.gateway.mqtt.sessions)) == count + 1
            assert stats(gateway).refused.counts == {}
            assert stats(gateway).protocol_errors.counts == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

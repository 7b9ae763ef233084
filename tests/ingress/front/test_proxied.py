"""Behind a balancer: who is believed, whose address counts, and what happens to everybody else."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.ingress.clients import IngressClients
from gateway.ingress.front.layers import front_of
from gateway.ingress.front.proxy_header import AwaitingProxyHeader, is_in_networks
from gateway.settings import Limits, Settings
from gateway.settings.endpoints import ListenerTls
from gateway.telemetry.stats import ListenerStats
from gateway.transport.stream import Stream, WriteSet
from tests.configured import make_listener
from tests.ingress.clients import Raw, arrived, bytes_of, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.transport.ends import FakeSocket, Watch
from tests.transport.test_proxy_protocol import FAULTS, HEADERS, SIX, binary
from tests.transport.test_tls import self_signed

HERE = ("127.0.0.0/8",)

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"
WELCOME = b"\x20\x02\x00\x00"
NOT_AUTHORISED = b"\x20\x02\x00\x05"
PING, PONG = b"\xc0\x00", b"\xd0\x00"
HEADER = HEADERS["v2 TCP over IPv4"][0]


def proxied(limits: Limits | None = None, **more: Any) -> Settings:
    """Settings with one listener of MQTT behind a balancer."""
    one = make_listener(
        protocol="mqtt",
        host=LOOPBACK,
        port=0,
        **({"proxy_protocol": "required", "proxy_protocol_from": HERE} | more),
    )
    return settings_of(listeners={"mqtt": one}, limits=limits)


def addresses(gateway: Running) -> list[str]:
    """Of the connected clients, as senders have them."""
    listener = gateway.gateway.listeners["mqtt"]
    return gateway.ask(lambda: [connection.sender.address for connection in listener.connections])


@pytest.mark.parametrize("data, address, port", HEADERS.values(), ids=HEADERS)
def test_access_and_senders_see_the_announced_address(data: bytes, address: str, port: int) -> None:
    with running(proxied()) as gateway, Raw(gateway.mqtt) as client:
        if address:  # of another machine, from which nobody may come without a name
            assert client.send(data + CONNECT).rest() == NOT_AUTHORISED
            assert stats(gateway).refused.counts == {"not_authorized": 1}
        else:
            assert client.send(data + CONNECT).sock.recv(4) == WELCOME
            assert addresses(gateway)[0].startswith(f"{LOOPBACK}:")


@pytest.mark.parametrize("name", ["v1 TCP4", "v2 with TLVs"])
def test_the_header_may_be_split_anywhere(name: str) -> None:
    data, address, port = HEADERS[name]
    data += CONNECT
    with running(proxied(anonymous="always")) as gateway:
        for at in range(1, len(data)):
            with Raw(gateway.mqtt) as client:
                before = arrived(gateway, "mqtt")
                client.send(data[:at])
                gateway.until(lambda: arrived(gateway, "mqtt") == before + at)  # noqa: B023
                client.send(data[at:])
                assert client.sock.recv(4) == WELCOME
                assert addresses(gateway) == [f"{address}:{port}"]
            eventually(lambda: stats(gateway).connections == 0)
        assert stats(gateway).bytes_in == (len(data) - 1) * len(data)


@pytest.mark.parametrize("data", [row[0] for row in FAULTS.values()], ids=FAULTS)
def test_what_is_no_header_costs_the_connection_and_is_counted(data: bytes) -> None:
    with running(proxied()) as gateway, Raw(gateway.mqtt) as client:
        assert client.send(data).rest() == b""
        eventually(lambda: stats(gateway).connections == 0)
        assert stats(gateway).protocol_errors.counts == {"proxy_protocol": 1}
        assert bytes_of(stats(gateway)) == (len(data), 0)


@pytest.mark.parametrize("data", [b"", b"PROXY TCP4 192.0.2.1", HEADER[:-1], HEADER])
def test_a_header_that_comes_late_or_alone_costs_the_connection(data: bytes) -> None:
    with running(proxied(Limits(connect_timeout_secs=0.3))) as gateway, Raw(gateway.mqtt) as client:
        assert client.send(data).rest() == b""
        eventually(lambda: stats(gateway).connections == 0)
        assert stats(gateway).protocol_errors.counts == {"connect_timeout": 1}


def test_only_balancers_may_connect() -> None:
    with running(proxied(proxy_protocol_from=("192.0.2.0/24", "::1"))) as gateway:
        with Raw(gateway.mqtt) as client:
            assert client.rest() == b""
        assert stats(gateway).refused.counts == {"proxy_protocol_from": 1}
        assert stats(gateway).accepted == 0


@pytest.mark.parametrize(
    "host, found",
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("fe80::1%eth0", True),
        ("fd00::1", True),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
        ("2001:db8::1", False),
    ],
)
def test_nobody_is_a_balancer_unless_the_operator_says_so(host: str, found: bool) -> None:
    given = make_listener(protocol="mqtt", port=0, proxy_protocol="required")
    networks = front_of("mqtt", given).proxies
    assert networks == ()
    assert not is_in_networks(networks, host)
    stated = ("127.0.0.0/8", "10.0.0.0/8", "fc00::/7", "fe80::/10")
    networks = front_of("mqtt", given.model_copy(update={"proxy_protocol_from": stated})).proxies
    assert networks is not None
    assert is_in_networks(networks, host) is found


def test_without_balancers_nobody_connects() -> None:
    with running(proxied(proxy_protocol_from=())) as gateway:
        with Raw(gateway.mqtt) as client:
            assert client.rest() == b""
        assert stats(gateway).refused.counts == {"proxy_protocol_from": 1}


class Beginning:
    """Notes what begins."""

    def __init__(self) -> None:
        self.ingress_clients = IngressClients(Limits(), ListenerStats("mqtt", "mqtt"), WriteSet())
        self.begun: list[tuple[str, bytes]] = []

    def begin(self, stream: Stream, since: float, data: bytes, now: float) -> None:
        self.begun.append((stream.remote, data))


@pytest.mark.parametrize(
    "socket, announced, seen",
    [
        ("10.0.0.9:5", b"192.0.2.1", "192.0.2.1:7"),
        ("10.0.0.9:5", b"127.0.0.1", "10.0.0.9:5"),
        ("10.0.0.9:5", b"127.1.2.3", "10.0.0.9:5"),
        ("127.0.0.1:5", b"127.0.0.1", "127.0.0.1:7"),
        ("::1:5", b"127.0.0.1", "127.0.0.1:7"),
        ("127.0.0.1:5", b"192.0.2.1", "192.0.2.1:7"),
    ],
)
def test_nobody_elsewhere_can_announce_a_client_on_this_machine(
    socket: str, announced: bytes, seen: str
) -> None:
    listener, stream = Beginning(), Stream(FakeSocket(), socket, Watch(), WriteSet())
    one = AwaitingProxyHeader(listener.ingress_clients, stream, 0.0, listener.begin)
    one.receive(b"PROXY TCP4 %s 192.0.2.9 7 1883\r\nrest" % announced, 1.0)
    assert listener.begun == [(seen, b"rest")]


@pytest.mark.parametrize("announced", ["::1", "::ffff:127.0.0.1"])
def test_that_holds_for_every_spelling_of_loopback(announced: str) -> None:
    listener, stream = Beginning(), Stream(FakeSocket(), "10.0.0.9:5", Watch(), WriteSet())
    one = AwaitingProxyHeader(listener.ingress_clients, stream, 0.0, listener.begin)
    one.receive(f"PROXY TCP6 {announced} 2001:db8::1 7 1883\r\n".encode(), 1.0)
    assert listener.begun == [("10.0.0.9:5", b"")]


@pytest.mark.parametrize(
    "after", [lambda header, hello: [header + hello], lambda header, hello: [header, hello]]
)
def test_the_header_comes_before_tls(tmp_path: Path, after: Callable[[bytes, bytes], list[bytes]]) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ListenerTls(cert_file=certificate, key_file=key)
    with running(proxied(tls=tls, anonymous="always")) as gateway, Raw(gateway.mqtt) as client:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=certificate)
        secure = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            secure.do_handshake()
        for data in after(binary(0x21, 0x21, SIX), outgoing.read()):
            client.send(data)
        while True:
            incoming.write(client.sock.recv(65_536))
            try:
                secure.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.send(outgoing.read())
        secure.write(CONNECT + PING)
        client.send(outgoing.read())
        heard = b""
        while len(heard) < 6:
            incoming.write(client.sock.recv(65_536))
            try:
                heard += secure.read(100)
            except ssl.SSLWantReadError:
                continue
        assert heard == WELCOME + PONG
        assert addresses(gateway) == ["2001:db8::1:51000"]


def test_a_gateway_stops_while_headers_are_awaited() -> None:
    with running(proxied()) as gateway, Raw(gateway.mqtt) as client:
        client.send(b"PROXY ")
        eventually(lambda: stats(gateway).connections == 1)
        gateway.stop()
        assert client.rest() == b""

"""One port for all: what begins with which bytes belongs to whom, in the clear and within TLS."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, Request

from gateway.settings import Limits, ListenerSettings, Settings
from gateway.settings.endpoints import ListenerTls
from gateway.transport.first_bytes import recognise
from tests.configured import make_listener
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import Mqtt, Raw, arrived, bytes_of, connect, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.transport.test_proxy_protocol import HEADERS
from tests.transport.test_tls import self_signed

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"
CONNACK = b"\x20\x02\x00\x00"
PUBLISH, PUBACK = b"\x32\x06\x00\x01a\x00\x07x", b"\x40\x02\x00\x07"
FAST = b"\x80"
AMQP = b"AMQP\x00\x00\x09\x01"
ALL = ("mqtt", "amqp091", "amqpfast", "ws")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ListenerTls:
    certificate, key = self_signed(tmp_path_factory.mktemp("certificate"))
    return ListenerTls(cert_file=certificate, key_file=key)


def shared(
    *, everywhere: Limits | None = None, others: dict[str, ListenerSettings] | None = None, **more: Any
) -> Settings:
    """Settings with a listener of everything, and a port for all of them."""
    here: dict[str, Any] = {"host": LOOPBACK, "port": 0}
    listeners = {
        # The shared port may come first: it is made last.
        "shared": make_listener(protocol="shared", **(here | {"shares": ALL} | more)),
        "mqtt": make_listener(protocol="mqtt", **here),
        "amqp091": make_listener(protocol="amqp091", **here),
        "amqpfast": make_listener(protocol="amqpfast", **here),
        "ws": make_listener(protocol="mqtt", websocket_path="/mqtt", **here),
    }
    return settings_of(listeners=listeners | (others or {}), limits=everywhere)


@pytest.fixture
def gateway(tls: ListenerTls) -> Iterator[Running]:
    with running(shared(tls=tls)) as one:
        yield one


def secured(client: Raw, tls: ListenerTls) -> None:
    context = ssl.create_default_context(cafile=tls.cert_file)
    client.sock = context.wrap_socket(client.sock, server_hostname="localhost")


BEGINNINGS = [
    (b"\x10", "mqtt"),
    (b"\x80", "amqpfast"),
    (b"\x16\x03", "tls"),
    (b"A", ""),
    (b"AM", ""),
    (b"AMQ", ""),
    (b"AMQP", "amqp091"),
    (b"AMQP\x00\x00\x09\x01", "amqp091"),
    (b"AC", "http"),
    (b"AMQX", "http"),
    (b"GET /", "http"),
    (b"P", "http"),
    (b"Z", "http"),
    (b"get", "unknown"),
    (b"\x30", "unknown"),
    (b"\x00", "unknown"),
    (b"@", "unknown"),
    (b"[", "unknown"),
    (b"\xff", "unknown"),
]


@pytest.mark.parametrize("data, spoken", BEGINNINGS)
def test_first_bytes_tell_protocols_apart(data: bytes, spoken: str) -> None:
    assert recognise(data) == spoken


@pytest.mark.parametrize("within", [False, True], ids=["in the clear", "TLS"])
def test_mqtt(gateway: Running, tls: ListenerTls, within: bool) -> None:
    with Mqtt(gateway.port("shared")) as client:
        if within:
            secured(client, tls)
        client.send(CONNECT + PUBLISH)
        assert read(client, 8) == CONNACK + PUBACK
        assert stats(gateway, "mqtt").connections == 1
        assert stats(gateway, "mqtt").messages_in == 1
        assert stats(gateway, "shared").connections == 0
    assert (stats(gateway, "mqtt").accepted, stats(gateway, "shared").accepted) == (1, 1)


def read(client: Raw, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = client.sock.recv(size - len(found))
        assert data, found
        found += data
    return found


@pytest.mark.parametrize("within", [False, True], ids=["in the clear", "TLS"])
def test_amqp(gateway: Running, tls: ListenerTls, within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if within:
        context, plain = ssl.create_default_context(cafile=tls.cert_file), socket.create_connection
        monkeypatch.setattr(
            socket,
            "create_connection",
            lambda *given, **more: context.wrap_socket(plain(*given, **more), server_hostname="localhost"),
        )
    with Amqp(gateway, listener="shared").open():
        assert stats(gateway, "amqp091").connections == 1
        assert stats(gateway, "shared").connections == 0


def test_amqpfast(gateway: Running) -> None:
    with Raw(gateway.port("shared")) as client:
        client.send(FAST)
        eventually(lambda: stats(gateway, "amqpfast").connections == 1)
        assert stats(gateway, "shared").connections == 0


@pytest.mark.parametrize("within", [False, True], ids=["in the clear", "TLS"])
def test_mqtt_over_websocket(gateway: Running, tls: ListenerTls, within: bool) -> None:
    ws = WSConnection(ConnectionType.CLIENT)
    with Raw(gateway.port("shared")) as client:
        if within:
            secured(client, tls)
        client.send(ws.send(Request(host="h", target="/mqtt", subprotocols=["mqtt"])))
        ws.receive_data(client.sock.recv(4_096))
        assert isinstance(next(ws.events()), AcceptConnection)
        client.send(ws.send(BytesMessage(CONNECT + PUBLISH)))
        heard = b""
        while len(heard) < 8:
            ws.receive_data(client.sock.recv(4_096))
            heard += b"".join(event.data for event in ws.events() if isinstance(event, BytesMessage))
        assert heard == CONNACK + PUBACK
        assert stats(gateway, "ws").connections == 1


def test_one_byte_at_a_time(gateway: Running) -> None:
    for data, listener in ((CONNECT, "mqtt"), (AMQP, "amqp091")):
        with Raw(gateway.port("shared")) as client:
            for at in range(len(data)):
                client.send(data[at : at + 1])
                seen = ("shared", listener)
                gateway.until(lambda at=at, seen=seen: sum(arrived(gateway, one) for one in seen) > at)
            assert client.sock.recv(4)
            assert bytes_of(stats(gateway, "shared")) == (0, 0)


HTTP = [
    (b"GET /livez HTTP/1.1\r\nHost: h\r\n\r\n", 200, b"alive\n", {}),
    (b"HEAD /livez HTTP/1.1\r\nHost: h\r\n\r\n", 200, b"", {}),
    (b"GET /livez?x HTTP/1.0\r\n\r\n", 200, b"alive\n", {}),
    (b"GET /livez/ HTTP/1.0\r\n\r\n", 200, b"alive\n", {}),
    (b"GET /health HTTP/1.0\r\n\r\n", 200, b"alive\n", {}),
    (b"OPTIONS / HTTP/1.0\r\n\r\n", 200, b"", {}),
    (b"OPTIONS /x HTTP/1.0\r\n\r\n", 404, None, {"http_404": 1}),
    (b"POST /health HTTP/1.1\r\nHost: h\r\n\r\n", 405, None, {"http_405": 1}),
    (b"POST /livez HTTP/1.1\r\nHost: h\r\n\r\n", 405, None, {"http_405": 1}),
    (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", 404, None, {"http_404": 1}),
    (b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 404, None, {"http_404": 1}),
    (b"NONSENSE\r\n\r\n", 400, None, {"http_400": 1}),
    (b"GET / HTTP/1.1\r\nX: " + b"x" * 9_000, 431, None, {"http_431": 1}),
]


@pytest.mark.parametrize("data, status, body, refused", HTTP)
@pytest.mark.parametrize("within", [False, True], ids=["in the clear", "TLS"])
def test_http_is_a_liveness_probe_and_nothing_else(
    gateway: Running,
    tls: ListenerTls,
    data: bytes,
    status: int,
    body: bytes | None,
    refused: dict[str, int],
    within: bool,
) -> None:
    with Raw(gateway.port("shared")) as client:
        if within:
            secured(client, tls)
        head, _, rest = client.send(data).rest().partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert body is None or rest == body
    assert stats(gateway, "shared").refused.counts == refused
    eventually(lambda: stats(gateway, "shared").connections == 0)


def test_a_plain_request_to_the_websocket_is_its_listeners_to_refuse(gateway: Running) -> None:
    with Raw(gateway.port("shared")) as client:
        answer = client.send(b"GET /mqtt HTTP/1.1\r\nHost: h\r\n\r\n").rest()
    assert answer.startswith(b"HTTP/1.1 426 ")
    assert stats(gateway, "ws").refused.counts == {"http_426": 1}


@pytest.mark.parametrize("data", [b"\x30\x04\x00\x01ax", b"\x00", b"ssh", b"\xff" * 100])
def test_what_nobody_speaks_is_ended_and_counted(gateway: Running, data: bytes) -> None:
    with connect(gateway, listener="shared")[0] as bystander, Raw(gateway.port("shared")) as client:
        assert client.send(data).rest() == b""
        assert stats(gateway, "shared").protocol_errors.counts == {"unknown_protocol": 1}
        eventually(lambda: bytes_of(stats(gateway, "shared")) == (len(data), 0))
        assert bystander.quiet()


def test_tls_within_tls_is_spoken_by_nobody(gateway: Running, tls: ListenerTls) -> None:
    with Raw(gateway.port("shared")) as client:
        secured(client, tls)
        assert client.send(b"\x16\x03\x01").rest() == b""
    assert stats(gateway, "shared").protocol_errors.counts == {"unknown_protocol": 1}


def test_a_broken_handshake_is_counted(gateway: Running) -> None:
    with Raw(gateway.port("shared")) as client:
        assert CONNACK not in client.send(b"\x16" + CONNECT).rest()
    eventually(lambda: stats(gateway, "shared").protocol_errors.counts == {"tls": 1})


@pytest.mark.parametrize(
    "data, more, word, answer",
    [
        (FAST, {"shares": ("mqtt",)}, "not_shared", b""),
        (AMQP, {"shares": ("mqtt",)}, "not_shared", b""),
        (b"\x16\x03\x01", {}, "no_tls", b"the client uses TLS, but this port does not\n"),
    ],
)
def test_what_the_port_has_not_is_refused(
    data: bytes, more: dict[str, Any], word: str, answer: bytes
) -> None:
    with running(shared(**more)) as gateway, Raw(gateway.port("shared")) as client:
        assert client.send(data).rest() == answer
        assert stats(gateway, "shared").refused.counts == {word: 1}


def test_a_listener_for_tls_only_stays_that(tls: ListenerTls) -> None:
    secret = make_listener(protocol="mqtt", host=LOOPBACK, port=0, tls=tls)
    with running(shared(tls=tls, others={"mqtt": secret})) as gateway:
        with Raw(gateway.port("shared")) as client:
            assert client.send(CONNECT).rest() == b"\x20\x02\x00\x03"
        assert stats(gateway, "shared").refused.counts == {"tls_required": 1}
        with Raw(gateway.port("shared")) as client:
            secured(client, tls)
            assert client.send(CONNECT).sock.recv(4) == CONNACK


@pytest.mark.parametrize("data", [b"", b"A", b"AMQ", b"GET /livez HTTP/1.1\r\n", CONNECT[:5], b"\x16\x03"])
def test_whoever_says_too_little_is_cut_off(tls: ListenerTls, data: bytes) -> None:
    limits = Limits(connect_timeout_secs=0.4)
    with running(shared(everywhere=limits, tls=tls)) as gateway, Raw(gateway.port("shared")) as client:
        begun = time.monotonic()
        assert client.send(data).rest() == b""
        assert time.monotonic() - begun < 5.0
        eventually(lambda: sum(stats(gateway, one).connections for one in ("shared", *ALL)) == 0)
        errors = [
            stats(gateway, one).protocol_errors.counts.get("connect_timeout", 0) for one in ("shared", "mqtt")
        ]
        assert sum(errors) == 1


def test_limits_are_those_of_the_listener_that_takes_it() -> None:
    small = make_listener(protocol="mqtt", host=LOOPBACK, port=0, limits=Limits(connections_max=1))
    with running(shared(others={"mqtt": small})) as gateway:
        with Raw(gateway.port("shared")) as first, Raw(gateway.port("shared")) as second:
            assert first.send(CONNECT).sock.recv(4) == CONNACK
            assert second.send(CONNECT).rest() == b""
        assert stats(gateway, "mqtt").refused.counts == {"connections_max": 1}
        eventually(lambda: stats(gateway, "mqtt").connections == 0)


def test_a_silent_crowd_has_its_own_limit() -> None:
    with running(shared(limits=Limits(connections_max=1))) as gateway:
        with Raw(gateway.port("shared")):
            eventually(lambda: stats(gateway, "shared").connections == 1)
            with Raw(gateway.port("shared")) as second:
                assert second.rest() == b""
        assert stats(gateway, "shared").refused.counts == {"connections_max": 1}


def test_behind_a_balancer_the_listener_sees_whom_it_announces(tls: ListenerTls) -> None:
    header = HEADERS["v2 TCP over IPv4"][0]
    with running(shared(proxy_protocol="required", proxy_protocol_from=("127.0.0.0/8",), tls=tls)) as gateway:
        with Raw(gateway.port("shared")) as client:
            assert client.send(header + CONNECT).rest() == b"\x20\x02\x00\x05"
        assert stats(gateway, "mqtt").refused.counts == {"not_authorized": 1}
        with Raw(gateway.port("shared")) as client:
            client.send(HEADERS["v2 local"][0])
            secured(client, tls)
            assert client.send(CONNECT).sock.recv(4) == CONNACK


def test_a_gateway_stops_while_somebody_is_undecided(gateway: Running) -> None:
    with Raw(gateway.port("shared")) as client:
        client.send(b"AMQ")
        eventually(lambda: stats(gateway, "shared").connections == 1)
        gateway.stop()
        assert client.rest() == b""


def test_certificates_of_a_shared_port_are_an_error_of_the_configuration(tmp_path: Path) -> None:
    broken = ListenerTls(cert_file=tmp_path / "none", key_file=tmp_path / "none")
    with pytest.raises(BaseExceptionGroup) as error, running(shared(tls=broken)):
        pass
    assert "listeners.shared.tls: the files cannot be used" in repr(error.value.exceptions)

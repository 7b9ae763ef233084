"""A plain client on a TLS port and a TLS client on a plain port are refused, logged, counted and told."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.properties import Property
from gateway.protocols.mqtt.spec import ReasonCode, Version
from gateway.settings import Http, HttpTls, ListenerSettings
from gateway.settings.endpoints import ListenerTls
from gateway.transport.first_bytes import check_first_bytes
from tests.configured import make_listener
from tests.ingress.clients import Mqtt, Raw, connect, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.transport.test_tls import self_signed

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"
CONNACK = b"\x20\x02\x00\x00"
REQUEST = b"GET /livez HTTP/1.1\r\nHost: h\r\n\r\n"
AMQP = b"AMQP\x00\x00\x09\x01"
FAST = b"\x80\x00"
ALONE: dict[str, dict[str, Any]] = {
    "mqtt": {"protocol": "mqtt"},
    "amqp091": {"protocol": "amqp091"},
    "amqpfast": {"protocol": "amqpfast"},
    "ws": {"protocol": "mqtt", "websocket_path": "/mqtt"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("certificate"))


def listeners(tls: ListenerTls | None = None) -> dict[str, ListenerSettings]:
    return {name: make_listener(host=LOOPBACK, port=0, tls=tls, **given) for name, given in ALONE.items()}


@pytest.fixture(scope="module")
def secure(files: tuple[Path, Path]) -> ListenerTls:
    return ListenerTls(cert_file=files[0], key_file=files[1])


def refusals(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "connection refused"]


@pytest.mark.parametrize(
    "listener, data, title, answer",
    [
        ("mqtt", CONNECT, "MQTT", b"\x20\x02\x00\x03"),
        ("mqtt", CONNECT[:5], "MQTT", b""),
        ("mqtt", b"\x10\x02\x00\x00", "MQTT", b""),
        ("mqtt", AMQP, "AMQP 0-9-1", b""),
        ("amqp091", AMQP, "AMQP 0-9-1", b""),
        ("amqp091", b"A", "a protocol", b""),
        ("amqpfast", FAST, "AMQP/Fast", b""),
        ("ws", REQUEST, "HTTP", b"HTTP/1.1 400 "),
        ("ws", CONNECT, "MQTT", b"\x20\x02\x00\x03"),
    ],
)
def test_a_plain_client_on_a_tls_port(
    secure: ListenerTls, listener: str, data: bytes, title: str, answer: bytes
) -> None:
    with running(settings_of(listeners=listeners(secure))) as gateway, capture_logs() as lines:
        with Raw(gateway.port(listener)) as client:
            remote = "{}:{}".format(*client.sock.getsockname())
            said = client.send(data).rest()
        assert said.startswith(answer)
        assert bool(said) == bool(answer)
        assert stats(gateway, listener).refused.counts == {"tls_required": 1}
        assert not stats(gateway, listener).protocol_errors.counts
        (line,) = refusals(lines)
        assert (line["listener"], line["remote"]) == (listener, remote)
        assert line["error"] == f"TLS is required, but the client uses {title} without TLS"
        eventually(lambda: stats(gateway, listener).connections == 0)


def test_an_mqtt_5_client_reads_the_reason(secure: ListenerTls) -> None:
    machine = ClientConnection(packet_bytes_max=100_000)
    machine.connect(Connect("c", Version.V5), 0.0)
    with running(settings_of(listeners=listeners(secure))) as gateway, Raw(gateway.mqtt) as client:
        (answer,) = machine.receive_data(client.send(machine.data_to_send()).rest(), 0.0)
    assert isinstance(answer, Connack)
    assert answer.reason == ReasonCode.SERVER_UNAVAILABLE
    assert "TLS is required" in answer.properties[Property.REASON_STRING]


@pytest.mark.parametrize("listener", ALONE)
def test_a_tls_client_on_a_plain_port(listener: str) -> None:
    context = ssl.create_default_context()
    with running(settings_of(listeners=listeners())) as gateway, capture_logs() as lines:
        with socket.create_connection((LOOPBACK, gateway.port(listener)), timeout=30) as sock:
            remote = "{}:{}".format(*sock.getsockname())
            with pytest.raises(ssl.SSLError) as error:
                context.wrap_socket(sock, server_hostname="localhost")
        assert error.value.reason == "WRONG_VERSION_NUMBER"
        assert stats(gateway, listener).refused.counts == {"no_tls": 1}
        assert not stats(gateway, listener).protocol_errors.counts
        (line,) = refusals(lines)
        assert (line["listener"], line["remote"]) == (listener, remote)
        assert line["error"] == "the client uses TLS, but this port does not"
        eventually(lambda: stats(gateway, listener).connections == 0)


def layer_of(gateway: Running, listener: str = "mqtt") -> str:
    (connection,) = gateway.gateway.listeners[listener].connections
    return type(connection.stream.layer).__name__


def test_the_check_costs_a_client_nothing_after_its_first_bytes(
    secure: ListenerTls, files: tuple[Path, Path]
) -> None:
    with running(settings_of(listeners=listeners())) as gateway, connect(gateway)[0]:
        assert gateway.ask(lambda: layer_of(gateway)) == "NoneType"
    context = ssl.create_default_context(cafile=files[0])
    with running(settings_of(listeners=listeners(secure))) as gateway, Mqtt(gateway.mqtt) as client:
        client.sock = context.wrap_socket(client.sock, server_hostname="localhost")
        assert client.send(CONNECT).sock.recv(4) == CONNACK
        assert gateway.ask(lambda: layer_of(gateway)) == "TlsFilter"


def test_the_first_byte_alone_is_enough_to_pass(secure: ListenerTls) -> None:
    with running(settings_of(listeners=listeners())) as gateway, Raw(gateway.mqtt) as client:
        for at in range(len(CONNECT)):
            client.send(CONNECT[at : at + 1])
        assert client.sock.recv(4) == CONNACK
    assert check_first_bytes(b"\xff", secure=True) is None
    assert check_first_bytes(b"\xff", secure=False) is None


def test_a_plain_request_to_the_https_port(files: tuple[Path, Path]) -> None:
    http = Http(host=LOOPBACK, port=0, tls=HttpTls(cert_file=files[0], key_file=files[1]))
    with running(settings_of(http=http)) as gateway, capture_logs() as lines:
        port = gateway.gateway.http_port
        with Raw(port) as client:
            said = client.send(REQUEST).rest()
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"TLS is required, but the client uses HTTP without TLS" in said
        assert gateway.gateway.metrics.http_refused == {"tls_required": 1}
        (line,) = [line for line in lines if line["event"] == "HTTP request refused"]
        assert (line["address"], line["reason"]) == (LOOPBACK, "tls_required")


def test_a_tls_client_on_the_http_port() -> None:
    with running(settings_of(http=Http(host=LOOPBACK, port=0))) as gateway, capture_logs() as lines:
        with (
            socket.create_connection((LOOPBACK, gateway.gateway.http_port), timeout=30) as sock,
            pytest.raises(ssl.SSLError) as error,
        ):
            ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
        assert error.value.reason == "WRONG_VERSION_NUMBER"
        eventually(lambda: gateway.gateway.metrics.http_refused == {"no_tls": 1})
        (line,) = [line for line in lines if line["event"] == "HTTP request refused"]
        assert (line["address"], line["reason"]) == (LOOPBACK, "no_tls")

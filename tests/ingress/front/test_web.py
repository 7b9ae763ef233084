"""WebSocket on a listener: its time limit, what is counted, and that a fault costs only its connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.settings import Limits
from tests.configured import make_listener
from tests.ingress.clients import Raw, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.transport.test_websocket import masked, request

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"
WELCOME = b"\x82\x04\x20\x02\x00\x00"
PING, PONG = b"\xc0\x00", b"\x82\x02\xd0\x00"
DISCONNECT = b"\xe0\x00"
ORIGIN = "https://app.example"


@pytest.fixture
def gateway() -> Iterator[Running]:
    one = make_listener(
        protocol="mqtt", host=LOOPBACK, port=0, websocket_path="/mqtt", websocket_origins=(ORIGIN,)
    )
    limits = Limits(connect_timeout_secs=0.5)
    with running(settings_of(listeners={"mqtt": one}, limits=limits)) as started:
        yield started


def opened(client: Raw, origin: str | None = None) -> bytes:
    """Ask for the upgrade; the head of the answer."""
    client.send(request(Origin=origin))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = client.sock.recv(1)
        assert data, head
        head += data
    return head


def test_a_client_of_many_frames_and_packets(gateway: Running) -> None:
    with Raw(gateway.mqtt) as client:
        assert opened(client, ORIGIN).startswith(b"HTTP/1.1 101 ")
        client.send(b"".join(masked(0x82, bytes((byte,))) for byte in CONNECT))
        assert client.sock.recv(100) == WELCOME
        client.send(masked(0x02, PING[:1]) + masked(0x80, PING[1:]))
        assert client.sock.recv(100) == PONG
        assert client.send(masked(0x82, DISCONNECT)).rest() == b"\x88\x02\x03\xe8"
    assert stats(gateway).protocol_errors.counts == {}


@pytest.mark.parametrize(
    "data", [b"", b"GET /mqtt HTTP/1.1\r\n", request(), request() + masked(0x82, CONNECT[:5])]
)
def test_the_time_to_connect_counts_from_the_socket(gateway: Running, data: bytes) -> None:
    with Raw(gateway.mqtt) as client:
        client.send(data).rest()
    eventually(lambda: stats(gateway).connections == 0)
    assert stats(gateway).protocol_errors.counts == {"connect_timeout": 1}


def test_a_page_from_elsewhere_is_refused_and_counted(gateway: Running) -> None:
    with Raw(gateway.mqtt) as client:
        assert client.send(request(Origin="https://evil.example")).rest().startswith(b"HTTP/1.1 403 ")
    assert stats(gateway).refused.counts == {"http_403": 1}
    eventually(lambda: stats(gateway).connections == 0)


def test_a_fault_in_frames_costs_its_connection_and_is_counted(gateway: Running) -> None:
    with Raw(gateway.mqtt) as good, Raw(gateway.mqtt) as bad:
        for client in (good, bad):
            opened(client)
        good.send(masked(0x82, CONNECT))
        assert good.sock.recv(100) == WELCOME
        assert bad.send(masked(0x81, b"text")).rest()[2:4] == b"\x03\xeb"
        assert stats(gateway).protocol_errors.counts == {"websocket_1003": 1}
        assert good.send(masked(0x82, PING)).sock.recv(100) == PONG


def test_a_fault_in_mqtt_is_told_in_a_frame_before_the_close(gateway: Running) -> None:
    connect = b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01c"
    with Raw(gateway.mqtt) as client:
        opened(client)
        client.send(masked(0x82, connect + b"\x36\x06\x00\x01a\x00\x01x"))  # QoS 3
        frames = client.rest()
    assert frames[0] == 0x82
    assert b"\xe0" in frames
    assert frames.endswith(b"\x88\x02\x03\xe8")
    assert stats(gateway).protocol_errors.counts == {"malformed_packet": 1}

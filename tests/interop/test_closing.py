"""A connection that the gateway ends keeps its socket until the peer has read everything and closes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final
from unittest.mock import patch

import pytest

from gateway.app import gateway
from gateway.app.operations import pause
from tests.configured import make_link
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

CONNECT: Final = b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x01c"
CONNACK: Final = b"\x20\x03\x00\x00\x00"
PINGREQ: Final = b"\xc0\x00"
PINGRESP: Final = b"\xd0\x00"
DISCONNECT: Final = 0xE0
WAIT_SECS: Final = 30.0
ENDINGS: Final[dict[str, Callable[[Running], object]]] = {
    "stop": lambda one: one.ask(one.gateway.stop),
    "pause": lambda one: one.ask(lambda: pause(one.gateway, "link", "plant")),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_broker_that_still_sends_meets_an_open_socket(ending: str) -> None:
    """A socket that is closed earlier is reset, and a broker may lose what it has not read until then."""
    with socket.create_server((LOOPBACK, 0)) as server:
        url = f"mqtt://{LOOPBACK}:{server.getsockname()[1]}"
        with running(settings_of(links={"plant": make_link(url=url)})) as one:
            broker, _ = server.accept()
            with broker:
                broker.settimeout(WAIT_SECS)
                assert broker.recv(4_096)[0] == 0x10
                broker.sendall(CONNACK)
                link = one.gateway.links["plant"]
                one.until(lambda: link.is_up)
                ENDINGS[ending](one)
                goodbye = b""
                while data := broker.recv(4_096):
                    goodbye += data
                assert goodbye[-2] == DISCONNECT or goodbye[-4] == DISCONNECT
                for _ in range(20):
                    broker.sendall(PINGRESP)
                    assert one.ask(lambda: link.connected)
            if ending == "pause":
                one.until(lambda: not link.connected)


def test_a_client_that_still_sends_when_the_gateway_stops_meets_an_open_socket() -> None:
    with (
        patch.object(gateway, "FINAL_PACKETS_SECS", WAIT_SECS),
        running(settings_of()) as one,
        socket.create_connection((LOOPBACK, one.mqtt), WAIT_SECS) as client,
    ):
        client.sendall(CONNECT)
        assert client.recv(4_096)[0] == 0x20
        one.ask(one.gateway.stop)
        goodbye = b""
        while data := client.recv(4_096):
            goodbye += data
        assert goodbye[0] == DISCONNECT
        assert goodbye[2] == 0x8B
        for _ in range(20):
            client.sendall(PINGREQ)
            assert one.ask(lambda: one.gateway.listeners["mqtt"].is_busy)

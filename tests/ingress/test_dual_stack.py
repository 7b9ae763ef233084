"""Listeners are there over IPv4 and IPv6 by default, and over IPv4 where a machine has no more."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pika
import pytest

from gateway.errors import ConfigurationError
from tests.configured import make_listener
from tests.ingress.amqp_client import Amqp
from tests.interop.gateway_fixture import running, settings_of


def refusal(**given: Any) -> str:
    """Why a gateway with such a listener does not start."""
    settings = settings_of(listeners={"amqp091": make_listener(protocol="amqp091", **({"port": 0} | given))})
    with pytest.RaisesGroup(ConfigurationError, flatten_subgroups=True) as refused, running(settings):
        pass
    error: BaseException = refused.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return str(error)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_are_there_by_default(host: str) -> None:
    settings = settings_of(listeners={"amqp091": make_listener(protocol="amqp091", port=0)})
    with running(settings) as gateway:
        port = gateway.port("amqp091")
        with pika.BlockingConnection(pika.ConnectionParameters(host, port)) as connection:
            connection.channel().queue_declare("q")
            found = [one.stream.remote for one in gateway.gateway.listeners["amqp091"].connections]
        assert [remote.rpartition(":")[0] for remote in found] == [host]


@pytest.mark.parametrize("code", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_machine_without_ipv6_has_ipv4(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(sock: socket.socket, address: Any) -> None:
        if sock.family == socket.AF_INET6:
            raise OSError(code, "no IPv6 here")
        socket.SocketType.bind(sock, address)

    monkeypatch.setattr(socket.socket, "bind", bind)
    settings = settings_of(listeners={"amqp091": make_listener(protocol="amqp091", port=0)})
    with running(settings) as gateway, Amqp(gateway).open():
        pass
    assert refusal(host="::1") == "listeners.amqp091: cannot listen on [::1]:0: no IPv6 here"


def test_a_port_that_is_taken_over_ipv6_is_an_error() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(("::1", 0))
        taken.listen()
        assert refusal(port=taken.getsockname()[1]).endswith("Address already in use")


def test_ipv4_alone_when_it_is_asked_for() -> None:
    settings = settings_of(listeners={"amqp091": make_listener(protocol="amqp091", host="0.0.0.0", port=0)})
    with running(settings) as gateway:
        with Amqp(gateway).open():
            pass
        with socket.socket(socket.AF_INET6) as other, pytest.raises(ConnectionRefusedError):
            other.connect(("::1", gateway.port("amqp091")))

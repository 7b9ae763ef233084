"""Peers that connect to an address: bytes of a stream go there, and come back, until either side ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gateway.protocols.amqpfast.events import Fragment
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.amqpfast.spec import NOTIFY_STREAMING
from gateway.settings.amqpfast import FastVirtualHost, PeerService
from tests.configured import make_listener
from tests.ingress.amqpfast.client import EMPTY, PEER, Fast
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import free_ports


@pytest.fixture
def target() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture
def tunnelling(target: socket.socket) -> Iterator[Running]:
    (closed,) = free_ports(1)
    peers = {
        "shell": PeerService(host=LOOPBACK, port=target.getsockname()[1]),
        "closed": PeerService(host=LOOPBACK, port=closed),
    }
    listener = make_listener(
        protocol="amqpfast", host=LOOPBACK, port=0, virtual_hosts={"/": FastVirtualHost(peers=peers)}
    )
    with running(settings_of(listeners={"amqpfast": listener})) as one:
        yield one


def heard(client: Fast, count: int) -> bytes:
    """So many bytes of the stream that comes back."""
    found = b""
    while len(found) < count:
        part = client.next(Fragment)
        assert part.bits & NOTIFY_STREAMING
        found += part.data
    return found


def test_bytes_go_both_ways(target: socket.socket, tunnelling: Running) -> None:
    with Fast(tunnelling).open() as client:
        handle = client.handle("shell", PEER)
        stream = Transfer(client.machine, handle, EMPTY, 0, streaming=True)
        stream.write(b"hello")
        client.flush()
        there, _ = target.accept()
        with there:
            assert there.recv(5, socket.MSG_WAITALL) == b"hello"
            there.sendall(b"y" * 300_000)
            assert heard(client, 300_000) == b"y" * 300_000
            sent = 0
            while sent < 300_000:
                stream.write(b"z" * 10_000)
                sent += 10_000
            client.flush()
            assert there.recv(sent, socket.MSG_WAITALL) == b"z" * sent
        assert client.handle_closed() == (handle, 200)  # the address has ended it


def test_the_client_ends_it(target: socket.socket, tunnelling: Running) -> None:
    with Fast(tunnelling).open() as client:
        handle = client.handle("shell", PEER)
        stream = Transfer(client.machine, handle, EMPTY, 0, streaming=True)
        stream.write(b"x")
        client.flush()
        there, _ = target.accept()
        with there:
            assert there.recv(1) == b"x"
            client.machine.close_handle(handle)
            client.flush()
            assert there.recv(1) == b""


def test_an_address_that_does_not_answer_and_a_message_that_is_no_stream(tunnelling: Running) -> None:
    with Fast(tunnelling).open() as client:
        handle = client.handle("closed", PEER)
        Transfer(client.machine, handle, EMPTY, 0, streaming=True).write(b"x")
        client.flush()
        assert client.handle_closed() == (handle, 507)
        handle = client.handle("shell", PEER)
        client.put(handle, b"x", confirm=False)
        assert client.handle_closed() == (handle, 503)

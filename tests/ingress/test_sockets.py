"""Listening sockets that processes share, and ports that are held for them."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from gateway.ingress.sockets import all_bound, place_at, reserve_port

LOOPBACK = "127.0.0.1"


def test_those_who_share_a_port_listen_beside_each_other() -> None:
    with ExitStack() as stack:
        (held,) = map(stack.enter_context, reserve_port(LOOPBACK, 0))
        port = held.getsockname()[1]
        for _ in range(2):
            (sock,) = map(stack.enter_context, all_bound(LOOPBACK, port, shared=True))
            sock.listen()
        with socket.create_connection((LOOPBACK, port), timeout=5):
            pass


def test_a_port_that_is_only_held_is_refused() -> None:
    """Nobody is left to wait for workers that do not listen."""
    with ExitStack() as stack:
        (held,) = map(stack.enter_context, reserve_port(LOOPBACK, 0))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, held.getsockname()[1]), timeout=5)


@pytest.mark.parametrize("shared", [False, True])
def test_who_listens_there_already_is_noticed(shared: bool) -> None:
    """The kernel would let two gateways of one user share a port."""
    with ExitStack() as stack:
        (taken,) = map(stack.enter_context, all_bound(LOOPBACK, 0, shared=shared))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            reserve_port(LOOPBACK, taken.getsockname()[1])


def test_all_addresses_of_a_host_have_one_port() -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in all_bound("::", 0)]
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert sockets[0].family == socket.AF_INET


def test_none_is_left_bound_when_one_is_taken() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken, pytest.raises(OSError, match="in use"):
        all_bound(LOOPBACK, taken.getsockname()[1])


def test_ipv6_stands_in_brackets() -> None:
    assert place_at("::1", 1) == "[::1]:1"
    assert place_at("localhost", 1) == "localhost:1"

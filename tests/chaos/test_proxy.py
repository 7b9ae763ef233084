"""What the proxy does to connections is what its name says, and nothing else happens to them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Final

import pytest

from tests.chaos.proxy import Proxy, Way
from tests.ingress.clients import eventually
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.servers import free_ports

SILENCE_SECS: Final = 0.1
PATIENCE_SECS: Final = 10.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as opened:
        opened.settimeout(PATIENCE_SECS)
        yield opened


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[Proxy]:
    with Proxy(listener.getsockname()[1]) as made:
        yield made


def dial(proxy: Proxy, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection: who connected, who listened."""
    near = socket.create_connection((LOOPBACK, proxy.port), PATIENCE_SECS)
    far, _ = listener.accept()
    far.settimeout(PATIENCE_SECS)
    return near, far


def silent(end: socket.socket) -> bool:
    """Nothing comes, not even the end."""
    end.settimeout(SILENCE_SECS)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE_SECS)
    return False


def over(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True


def carries(source: socket.socket, target: socket.socket) -> bool:
    source.sendall(b"x")
    return target.recv(1) == b"x"


def test_it_forwards_both_ways_whole_and_closes_with_its_ends(proxy: Proxy, listener: socket.socket) -> None:
    near, far = dial(proxy, listener)
    data = bytes(range(256)) * 4_096
    with near, far:
        for source, target in ((near, far), (far, near)):
            writing = threading.Thread(target=source.sendall, args=(data,))
            writing.start()
            found = b""
            while len(found) < len(data):
                found += target.recv(65_536)
            writing.join()
            assert found == data
        near.close()
        assert over(far)
    eventually(lambda: not proxy.wires())


def test_a_cut_closes_both_ends_of_one_or_of_all(proxy: Proxy, listener: socket.socket) -> None:
    pairs = [dial(proxy, listener) for _ in range(3)]
    eventually(lambda: len(proxy.wires()) == 3)
    proxy.wires()[1].cut()
    assert all(over(end) for end in pairs[1])
    assert carries(*pairs[0])
    assert carries(*pairs[2])
    proxy.cut()
    assert all(over(end) for pair in pairs for end in pair)
    later = dial(proxy, listener)
    assert carries(*later)
    for end in (*later, *(end for pair in pairs for end in pair)):
        end.close()


@pytest.mark.parametrize("way", ["up", "down", "both"])
def test_a_stall_forwards_nothing_and_says_nothing(proxy: Proxy, listener: socket.socket, way: Way) -> None:
    near, far = dial(proxy, listener)
    eventually(lambda: len(proxy.wires()) == 1)
    proxy.stall(way)
    with near, far:
        for stalled, source, target in (("up", near, far), ("down", far, near)):
            if way in (stalled, "both"):
                source.sendall(b"x")
                assert silent(target)
            else:
                assert carries(source, target)
        proxy.resume()
        for stalled, target in (("up", far), ("down", near)):
            if way in (stalled, "both"):
                assert target.recv(1) == b"x"


def test_a_stalled_connection_is_half_open_when_an_end_has_gone(
    proxy: Proxy, listener: socket.socket
) -> None:
    near, far = dial(proxy, listener)
    eventually(lambda: len(proxy.wires()) == 1)
    proxy.stall()
    near.close()
    with far:
        assert silent(far)
        others = dial(proxy, listener)
        assert carries(*others)
        proxy.wires()[0].cut()
        assert over(far)
    for end in others:
        end.close()


def test_a_delay_holds_each_piece_back(proxy: Proxy, listener: socket.socket) -> None:
    near, far = dial(proxy, listener)
    with near, far:
        eventually(lambda: len(proxy.wires()) == 1)
        proxy.delay(SILENCE_SECS)
        began = time.monotonic()
        assert carries(near, far)
        assert carries(far, near)
        assert time.monotonic() - began >= 2 * SILENCE_SECS


def test_it_can_be_shut_and_opened(proxy: Proxy, listener: socket.socket) -> None:
    before = dial(proxy, listener)
    eventually(lambda: len(proxy.wires()) == 1)
    proxy.shut()
    assert all(over(end) for end in before)
    refused = dial(proxy, listener)
    assert all(over(end) for end in refused)
    proxy.open()
    after = dial(proxy, listener)
    assert carries(*after)
    for end in (*before, *refused, *after):
        end.close()


def test_nobody_behind_it_is_an_end() -> None:
    with Proxy(free_ports(1)[0]) as proxy, socket.create_connection((LOOPBACK, proxy.port)) as near:
        near.settimeout(PATIENCE_SECS)
        assert over(near)

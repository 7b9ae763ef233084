"""The poller with real sockets: one turn serves all that is ready, and a fault costs one connection only."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio

from gateway.containment import counted
from gateway.transport import poller as poller_module
from gateway.transport.poller import Poller
from gateway.transport.stream import Stream, WriteSet
from tests.transport.ends import Speaker

MEGABYTE = 1_048_576


class Bench:
    """A poller with any number of connected streams."""

    def __init__(self) -> None:
        self.writes = WriteSet()
        self.turns = 0
        # Time stands still for it: how long turns take is the business of test_turns.py.
        self.poller = Poller(self.writes, self._done, lambda: 0.0, lambda: 0.0)
        self.sockets: list[socket.socket] = []

    def _done(self) -> None:
        self.turns += 1

    def connect(self, peer: Speaker) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        ours.setblocking(False)
        theirs.settimeout(5.0)
        peer.stream = Stream(ours, "peer", self.poller, self.writes)
        peer.stream.owner = peer
        self.poller.watch(peer.stream)
        return theirs


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.poller.close()
    for sock in made.sockets:
        sock.close()


def echo(data: bytes) -> bytes:
    return data.upper()


def test_one_turn_reads_all_that_is_ready_and_answers_each_with_one_write(bench: Bench) -> None:
    peers = [Speaker(echo) for _ in range(3)]
    others = [bench.connect(peer) for peer in peers]
    for number, other in enumerate(others):
        other.sendall(f"hello {number}".encode())
    bench.poller.poll(1.0)
    assert [other.recv(100) for other in others] == [b"HELLO 0", b"HELLO 1", b"HELLO 2"]
    assert bench.turns == 1


def test_last_words_that_come_after_the_end_close_their_stream(bench: Bench) -> None:
    peer = Speaker()
    other = bench.connect(peer)
    assert peer.stream is not None
    peer.stream.hold_output()  # as a CONNACK that waits for the disk
    peer.out = b"last words"
    peer.stream.end("the gateway is stopping")
    bench.writes.flush()
    bench.poller.close()
    peer.stream.release_output()
    bench.writes.flush()
    assert (other.recv(100), other.recv(100)) == (b"last words", b"")
    assert peer.stream.closed


def test_a_batch_moves_on_after_a_megabyte(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller_module, "TURN_BYTES_MAX", 10)
    for _ in range(4):
        bench.connect(Speaker()).sendall(b"123456")
    bench.poller.poll(1.0)
    assert bench.turns == 3


def test_a_batch_moves_on_after_some_streams(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller_module, "TURN_STREAMS_MAX", 2)
    others = [bench.connect(Speaker(echo)) for _ in range(5)]
    for other in others:
        other.sendall(b"x")
    bench.poller.poll(1.0)
    assert bench.turns == 3
    assert [other.recv(100) for other in others] == [b"X"] * 5


def test_a_held_stream_is_not_read_until_it_is_released(bench: Bench) -> None:
    peer = Speaker()
    other = bench.connect(peer)
    assert peer.stream is not None
    peer.stream.hold()
    other.sendall(b"waits")
    bench.poller.poll(1.0)
    assert peer.heard == b""
    peer.stream.release()
    bench.poller.poll(1.0)
    assert peer.heard == b"waits"


def test_a_large_write_goes_on_when_the_socket_takes_more(bench: Bench) -> None:
    peer = Speaker(lambda data: bytes(8 * MEGABYTE))
    other = bench.connect(peer)
    other.sendall(b"go")
    received = 0
    while received < 8 * MEGABYTE:
        bench.poller.poll(1.0)
        received += len(other.recv(MEGABYTE))
    assert peer.stream is not None
    bench.poller.poll(1.0)
    assert not peer.stream.writing


def test_a_bug_costs_the_connection_that_met_it_and_is_counted(bench: Bench) -> None:
    def fail(data: bytes) -> bytes:
        raise KeyError("a bug")

    bad, good = Speaker(fail), Speaker(echo)
    bench.connect(bad).sendall(b"x")
    other = bench.connect(good)
    other.sendall(b"y")
    before = counted["connection"]
    bench.poller.poll(1.0)
    assert other.recv(10) == b"Y"
    assert bad.reasons == ["internal error"]
    assert counted["connection"] - before == 1


def test_a_stream_that_was_forgotten_is_not_served(bench: Bench) -> None:
    peer = Speaker()
    other = bench.connect(peer)
    assert peer.stream is not None
    other.sendall(b"x")
    bench.poller.forget(peer.stream)
    bench.poller.forget(peer.stream)
    bench.poller.poll(1.0)
    assert peer.heard == b""


async def test_running_it_serves_until_cancelled_and_closes_what_is_left(
    bench: Bench, nursery: trio.Nursery
) -> None:
    peer = Speaker(echo)
    other = bench.connect(peer)
    nursery.start_soon(bench.poller.run)
    other.sendall(b"hello")
    await trio.lowlevel.wait_readable(other)
    assert other.recv(10) == b"HELLO"
    nursery.cancel_scope.cancel()
    await trio.lowlevel.checkpoint_if_cancelled()


async def test_an_ended_stream_does_not_linger_for_ever(
    bench: Bench, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    peer = Speaker()
    other = bench.connect(peer)
    assert peer.stream is not None
    peer.out = b"bye"
    peer.stream.end("over")
    bench.writes.flush()
    assert other.recv(10) == b"bye"
    assert other.recv(10) == b""
    assert not peer.stream.closed
    nursery.start_soon(bench.poller.run)
    await trio.sleep(poller_module.LINGER_SWEEPS * poller_module.SWEEP_SECS + 0.1)
    assert peer.stream.closed


async def test_an_ended_stream_whose_peer_does_not_read_is_cut_off(
    bench: Bench, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    peer = Speaker()
    bench.connect(peer)
    assert peer.stream is not None
    peer.out = bytes(16 * 1024 * 1024)
    peer.stream.end("over")
    bench.writes.flush()
    assert peer.stream.backlogged
    nursery.start_soon(bench.poller.run)
    await trio.sleep((poller_module.LEAVE_SWEEPS - 1) * poller_module.SWEEP_SECS + 0.1)
    assert not peer.stream.closed
    await trio.sleep(poller_module.SWEEP_SECS)
    assert peer.stream.closed

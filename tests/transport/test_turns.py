"""Turns: who causes much work is served behind the others, and never for long at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio

from gateway.transport import poller as poller_module
from gateway.transport.poller import STRIKES_SLOW, Poller
from gateway.transport.rate import ConnectionRate
from gateway.transport.stream import STRIKES_MAX, Stream, WriteSet
from tests.transport.ends import Speaker


class Worker(Speaker):
    """An owner that needs `cost` seconds for each byte, does `share` bytes a turn, and says so."""

    def __init__(self, bench: Bench, cost: float = 0.0, share: int = 1 << 30) -> None:
        super().__init__()
        self.bench = bench
        self.cost = cost
        self.share = share
        self.waiting = b""
        self.turns: list[int] = []

    def receive(self, data: bytes, now: float) -> None:
        self.waiting += data
        done, self.waiting = self.waiting[: self.share], self.waiting[self.share :]
        self.heard += done
        self.turns.append(len(done))
        self.bench.time += self.cost * len(done)
        self.bench.order.append(self)
        assert self.stream is not None
        if self.waiting:
            self.stream.request_turn()


class Bench:
    """A poller, whose stopwatch shows what its owners say that they have worked."""

    def __init__(self) -> None:
        self.time = 0.0
        self.order: list[Worker] = []
        self.long: list[tuple[Stream, float]] = []
        self.writes = WriteSet(took_long=lambda stream, seconds: self.long.append((stream, seconds)))
        self.poller = Poller(self.writes, lambda: None, lambda: self.time, lambda: self.time)
        self.sockets: list[socket.socket] = []

    def connect(self, peer: Worker, *, strikes: int = 0) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        ours.setblocking(False)
        theirs.settimeout(5.0)
        peer.stream = Stream(ours, "peer", self.poller, self.writes)
        peer.stream.owner = peer
        peer.stream.strikes = strikes
        self.poller.watch(peer.stream)
        return theirs

    def turn(self) -> list[Worker]:
        self.order.clear()
        self.poller.poll(self.time)
        return list(self.order)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.poller.close()
    for sock in made.sockets:
        sock.close()


def stream_of(peer: Worker) -> Stream:
    assert peer.stream is not None
    return peer.stream


def test_what_is_left_of_a_read_has_its_turns_before_more_is_read(bench: Bench) -> None:
    peer = Worker(bench, share=4)
    other = bench.connect(peer)
    other.sendall(b"0123456789")
    bench.turn()
    other.sendall(b"more")
    assert (peer.heard, stream_of(peer).unread, stream_of(peer).listening) == (b"0123", True, False)
    bench.turn()
    bench.turn()
    assert (peer.heard, stream_of(peer).unread) == (b"0123456789", False)
    bench.turn()
    assert peer.heard == b"0123456789more"
    assert peer.turns == [4, 4, 2, 4]


def test_a_quick_one_is_served_before_those_that_have_much_left(bench: Bench) -> None:
    flooders = [Worker(bench, share=1) for _ in range(5)]
    for flooder in flooders:
        bench.connect(flooder).sendall(bytes(100))
    bench.turn()
    quick = Worker(bench)
    bench.connect(quick).sendall(b"x")
    assert bench.turn()[0] is quick


def test_of_slow_ones_a_turn_serves_only_some_and_all_of_them_in_turn(bench: Bench) -> None:
    flooders = [Worker(bench, cost=0.006, share=1) for _ in range(10)]
    for flooder in flooders:
        bench.connect(flooder, strikes=STRIKES_MAX).sendall(bytes(100))
    served = [bench.turn() for _ in range(5)]
    assert [len(turn) for turn in served] == [4] * 5  # until 20 ms are over
    assert [worker for turn in served for worker in turn] == flooders * 2


def test_two_long_turns_make_a_stream_slow_and_short_ones_a_quick_one(bench: Bench) -> None:
    peer = Worker(bench, cost=0.002)
    other = bench.connect(peer)
    seen = []
    for cost in (0.002, 0.002, 0.0, 0.0, 0.0, 0.0):
        peer.cost = cost
        other.sendall(b"x")
        bench.turn()
        seen.append(stream_of(peer).strikes >= STRIKES_SLOW)
    assert seen == [False, True, True, True, True, False]
    assert [stream is peer.stream for stream, _ in bench.long] == [True, True]


def test_time_in_which_the_process_did_not_run_counts_against_nobody(bench: Bench) -> None:
    peer = Worker(bench, cost=1.0)
    bench.poller.close()
    bench.poller = Poller(bench.writes, lambda: None, lambda: bench.time, lambda: 0.0)
    bench.connect(peer).sendall(b"xyz")
    bench.turn()
    assert (stream_of(peer).strikes, bench.long) == (0, [])


def test_what_others_have_worked_does_not_count_against_one_in_whose_turn_the_process_did_not_run(
    bench: Bench,
) -> None:
    others = [Worker(bench, cost=0.0009) for _ in range(5)]
    innocent = Worker(bench, cost=0.005)

    def worked() -> float:
        """All but the turn of that one, if it was already."""
        return bench.time - 0.005 * len(innocent.turns)

    bench.poller.close()
    bench.poller = Poller(bench.writes, lambda: None, lambda: bench.time, worked)
    for other in others:
        bench.connect(other).sendall(b"x")
    bench.connect(innocent).sendall(b"x")
    assert bench.turn()[-1] is innocent
    assert (stream_of(innocent).strikes, bench.long) == (0, [])


def test_a_long_row_of_quick_ones_is_cut_and_goes_on_where_it_was(bench: Bench) -> None:
    peers = [Worker(bench, cost=0.0009) for _ in range(60)]
    for peer in peers:
        bench.connect(peer).sendall(b"x")
    turns = [bench.turn() for _ in range(4)]
    assert [peer for turn in turns for peer in turn] == peers
    assert max(map(len, turns)) <= poller_module.TURN_SECS / 0.0009 + 1


def test_nothing_more_is_done_for_a_peer_that_does_not_read_the_answers(bench: Bench) -> None:
    class Answering(Worker):
        def receive(self, data: bytes, now: float) -> None:
            super().receive(data, now)
            self.out += bytes(1 << 20)
            stream_of(self).mark_for_flush()

    peer = Answering(bench, share=1)
    other = bench.connect(peer)
    other.sendall(bytes(50))
    for _ in range(20):
        bench.turn()
    assert stream_of(peer).backlogged
    assert len(peer.turns) < 5
    got = 0
    while got < 50 << 20:
        bench.turn()
        got += len(other.recv(1 << 20))
    assert len(peer.turns) == 50


def test_the_rest_waits_while_its_stream_is_held(bench: Bench) -> None:
    peer = Worker(bench, share=1)
    bench.connect(peer).sendall(b"abc")
    bench.turn()
    stream_of(peer).hold()
    for _ in range(3):
        bench.turn()
    assert peer.heard == b"a"
    stream_of(peer).release()
    for _ in range(3):
        bench.turn()
    assert peer.heard == b"abc"


def test_a_stream_that_ends_with_something_left_says_no_more(bench: Bench) -> None:
    peer = Worker(bench, share=1)
    bench.connect(peer).sendall(b"abc")
    bench.turn()
    stream_of(peer).end("over")
    for _ in range(3):
        bench.turn()
    assert peer.heard == b"a"


async def test_what_is_left_needs_nothing_from_outside_to_go_on(bench: Bench, nursery: trio.Nursery) -> None:
    peer = Worker(bench, share=1)
    bench.connect(peer).sendall(bytes(200))
    nursery.start_soon(bench.poller.run)
    with trio.fail_after(30):
        while len(peer.heard) < 200:
            await trio.lowlevel.checkpoint()
    nursery.cancel_scope.cancel()


# Rates.


@pytest.mark.parametrize(
    ("byte_count", "messages", "wait"),
    [(1_000, 0, 0.0), (1_500, 0, 0.5), (0, 30, 2.0), (3_000, 20, 2.0), (0, 0, 0.0)],
)
def test_a_rate_gives_a_second_at_once_and_then_makes_up(byte_count: int, messages: int, wait: float) -> None:
    rate = ConnectionRate(1_000, 10, 5.0)
    rate.messages = messages
    assert rate.charge(byte_count, 5.0) == pytest.approx(wait)
    assert rate.charge(0, 5.0 + wait) == pytest.approx(0.0)


def test_what_is_not_used_is_kept_for_a_second_only() -> None:
    rate = ConnectionRate(1_000, 0, 0.0)
    assert rate.charge(1_500, 100.0) == pytest.approx(0.5)


async def test_who_sends_too_fast_is_not_read_until_the_time_has_come(
    bench: Bench, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    peer = Worker(bench)
    other = bench.connect(peer)
    stream_of(peer).rate = ConnectionRate(10, 0, trio.current_time())
    nursery.start_soon(bench.poller.run)
    other.sendall(bytes(310))
    await trio.sleep(1)
    other.sendall(b"later")
    await trio.sleep(28)
    assert (len(peer.heard), stream_of(peer).listening) == (310, False)
    await trio.sleep(2)
    assert len(peer.heard) == 315
    nursery.cancel_scope.cancel()

"""The socket loop: sockets are served while Trio waits, and Trio misses nothing meanwhile."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from gateway import containment
from gateway.transport.poller import Poller
from gateway.transport.socket_loop import LOOP, Ready, SocketLoop, attach_socket_loop, detach_socket_loop
from gateway.transport.stream import Stream, WriteSet
from tests.transport.ends import Speaker

WAIT_SECS = 20.0  # after which a test fails
LONG_SECS = 3_600.0


class Steps:
    """Names of the steps that ran."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self) -> None:
        pass

    def end(self, name: str) -> None:
        self.names.append(name)


class Served:
    """Poller of one socket, which calls `on_turn` in each turn."""

    def __init__(self, loop: SocketLoop, sock: socket.socket, on_turn: Callable[[], object]) -> None:
        self.has_work = False
        self.turns = 0
        self._sock = sock
        self._on_turn = on_turn
        loop.epoll.register(sock.fileno(), 1)
        loop.owners[sock.fileno()] = self

    def turn(self, now: float, ready: Ready) -> None:
        self.turns += 1
        if ready:
            self._sock.recv(1)
        self._on_turn()


@asynccontextmanager
async def attached(steps: Steps | None = None) -> AsyncIterator[SocketLoop]:
    loop = attach_socket_loop(steps or Steps())
    assert loop is not None, "Trio has changed: see the attributes that attach_socket_loop looks for"
    try:
        yield loop
    finally:
        detach_socket_loop(loop)


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


def run(main: Callable[[], object]) -> None:
    """Run `main` in Trio with its usual clock."""

    async def limited() -> None:
        with trio.fail_after(WAIT_SECS):
            await main()  # type: ignore[misc]

    trio.run(limited)


def test_a_poller_is_served_by_the_loop(pair: Pair) -> None:
    ours, theirs = pair
    steps = Steps()

    async def main() -> None:
        async with attached(steps), trio.open_nursery() as nursery:
            writes = WriteSet()
            poller = Poller(writes, lambda: None)
            speaker = Speaker(bytes.upper)
            speaker.stream = Stream(ours, "peer", poller, writes)
            speaker.stream.owner = speaker
            poller.watch(speaker.stream)  # before the poller runs, and so moved into the loop
            nursery.start_soon(poller.run)
            theirs.send(b"abc")
            answer = await trio.to_thread.run_sync(theirs.recv, 10)
            assert answer == b"ABC"
            assert "sockets" in steps.names
            nursery.cancel_scope.cancel()
        assert LOOP.get() is None

    run(main)


def test_a_task_that_a_turn_wakes_runs_at_once(pair: Pair) -> None:
    ours, theirs = pair

    async def main() -> None:
        async with attached() as loop, trio.open_nursery() as nursery:
            woken = trio.Event()
            Served(loop, ours, woken.set)
            nursery.start_soon(trio.sleep, LONG_SECS)  # Trio would wait for as long
            await trio.testing.wait_all_tasks_blocked()
            threading.Timer(0.0, theirs.send, (b"x",)).start()
            await woken.wait()
            nursery.cancel_scope.cancel()

    run(main)


def test_a_task_that_a_turn_cancels_runs_at_once_though_its_descriptor_was_ready(pair: Pair) -> None:
    """The cancelled task no longer waits for the descriptor, so Trio's own wait would not return."""
    ours, theirs = pair
    mine, other = socket.socketpair()

    async def main() -> None:
        async with attached() as loop, trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, LONG_SECS)

            def both(passes: int) -> None:
                if passes:  # until Trio has nothing to do
                    loop.call_soon(partial(both, passes - 1))
                    return
                other.send(b"y")
                theirs.send(b"x")

            with trio.CancelScope() as scope:
                Served(loop, ours, scope.cancel)
                loop.call_soon(partial(both, 5))
                await trio.lowlevel.wait_readable(mine)
            nursery.cancel_scope.cancel()

    with mine, other:
        run(main)


def test_an_exception_that_ends_tasks_ends_the_run(pair: Pair) -> None:
    ours, theirs = pair

    class Panic(BaseException):
        pass

    def fail() -> None:
        raise Panic

    async def main() -> None:
        async with attached() as loop:
            Served(loop, ours, fail)
            theirs.send(b"x")
            await trio.sleep_forever()

    with pytest.raises(trio.TrioInternalError) as raised:
        run(main)
    cause = raised.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert cause.subgroup(Panic) is not None


def test_a_deadline_that_a_turn_sets_is_kept(pair: Pair) -> None:
    ours, theirs = pair

    async def main() -> None:
        async with attached() as loop:
            with trio.CancelScope() as scope:

                def hurry() -> None:
                    scope.deadline = trio.current_time()

                Served(loop, ours, hurry)
                theirs.send(b"x")
                await trio.sleep_forever()
            assert scope.cancelled_caught

    run(main)


def test_deadlines_are_kept_while_a_poller_has_work(pair: Pair) -> None:
    ours, theirs = pair

    async def main() -> None:
        async with attached() as loop:
            served = Served(loop, ours, lambda: None)
            served.has_work = True
            theirs.send(b"x")
            while served.turns < 100:
                await trio.sleep(0.001)
            served.has_work = False

    run(main)


def test_sockets_are_served_while_tasks_keep_trio_busy(pair: Pair) -> None:
    ours, theirs = pair

    async def main() -> None:
        async with attached() as loop:
            served = Served(loop, ours, lambda: None)
            theirs.send(b"x")
            while not served.turns:
                await trio.lowlevel.checkpoint()

    run(main)


def test_descriptors_of_trio_are_served_while_sockets_are_busy(pair: Pair) -> None:
    ours, theirs = pair
    mine, other = socket.socketpair()

    async def main() -> None:
        async with attached() as loop:
            theirs.send(b"x")
            served = Served(loop, ours, lambda: theirs.send(b"x"))  # always ready
            while served.turns < 10:
                await trio.sleep(0.001)
            other.send(b"y")
            await trio.lowlevel.wait_readable(mine)

    with mine, other:
        run(main)


def test_a_thread_has_the_loop_call_a_function() -> None:
    async def main() -> None:
        async with attached() as loop, trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, LONG_SECS)
            called: list[object] = []
            done = trio.Event()

            def both() -> None:
                loop.call_soon(lambda: called.append(threading.current_thread()))
                loop.call_soon(done.set)

            thread = threading.Thread(target=both)
            thread.start()
            await done.wait()
            thread.join()
            assert called == [threading.main_thread()]
            nursery.cancel_scope.cancel()

    run(main)


def test_a_call_that_comes_while_calls_are_taken_hides_none_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = os.eventfd_read
    called: list[str] = []

    async def main() -> None:
        async with attached() as loop, trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, LONG_SECS)
            done = trio.Event()

            def interrupted(descriptor: int) -> int:
                if not called:
                    called.append("begun")
                    loop.call_soon(lambda: called.append("second"))  # as of a thread that runs just then
                return read(descriptor)

            monkeypatch.setattr(os, "eventfd_read", interrupted)
            loop.call_soon(lambda: called.append("first"))
            while len(called) < 3:
                await trio.sleep(0.001)
            threading.Timer(0.01, loop.call_soon, (done.set,)).start()
            await done.wait()
            assert called == ["begun", "first", "second"]
            nursery.cancel_scope.cancel()

    run(main)


def test_what_fails_costs_nobody_else(pair: Pair) -> None:
    ours, theirs = pair
    before = containment.counted["batch"], containment.counted["store"]

    async def main() -> None:
        async with attached() as loop:
            turned, done = trio.Event(), trio.Event()

            def fail() -> None:
                turned.set()
                raise ValueError("a turn")

            def fail_too() -> None:
                raise ValueError("a call")

            served = Served(loop, ours, fail)
            for turns in (1, 2):  # it is served again
                theirs.send(b"x")
                await turned.wait()
                turned = trio.Event()
                assert served.turns == turns
            loop.call_soon(fail_too)
            loop.call_soon(done.set)
            await done.wait()

    run(main)
    assert (containment.counted["batch"], containment.counted["store"]) == (before[0] + 2, before[1] + 1)


def test_a_socket_that_nobody_owns_is_watched_no_longer(pair: Pair) -> None:
    ours, theirs = pair

    async def main() -> None:
        async with attached() as loop:
            loop.epoll.register(ours.fileno(), 1)
            theirs.send(b"x")
            await trio.sleep(0.001)
            with pytest.raises(FileNotFoundError):
                loop.epoll.unregister(ours.fileno())

    run(main)


def test_calls_that_wait_when_the_loop_is_detached_are_run() -> None:
    called: list[int] = []

    async def main() -> None:
        async with attached() as loop:
            loop.call_soon(lambda: called.append(1))

    run(main)
    assert called == [1]


def test_gateways_of_one_run_share_the_loop(pair: Pair) -> None:
    ours, theirs = pair

    async def main() -> None:
        async with attached() as loop:
            async with attached() as same:
                assert same is loop
            done = trio.Event()
            Served(loop, ours, done.set)
            theirs.send(b"x")
            await done.wait()
        assert LOOP.get() is None

    run(main)


async def test_under_a_clock_of_tests_there_is_no_loop(autojump_clock: MockClock) -> None:
    assert attach_socket_loop(Steps()) is None

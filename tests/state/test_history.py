"""Ownership and retained messages are linearizable, on recorded histories of many clients at once.

`STATE_OPERATIONS=100000 pytest tests/state/test_history.py` has longer histories than `make test`.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Final

import pytest

from gateway.state.interface import (
    ChangeSession,
    FindSession,
    LeaveSession,
    MatchRetained,
    NoticeSubject,
    OpenSession,
    OperationOutcome,
    ReleaseSession,
    Retain,
    SessionKey,
)
from tests.interop.servers import PostgreSQLPair
from tests.state.conftest import PostgreSQLWorld, Replica, World
from tests.state.linear import Call, State, offence
from tests.state.test_outages import cut

OPERATIONS: Final = int(os.environ.get("STATE_OPERATIONS", "4000"))
WORKERS: Final = 16
OBJECTS: Final = 8
CUT_SECS: Final = 0.7
VALUE: Final = "value"


def owned(state: State, call: Call) -> State | None:
    """A session: its epoch, and the value that its owner has stored."""
    assert isinstance(state, tuple)
    assert isinstance(call.asked, tuple)
    epoch, value = state
    kind, *asked = call.asked
    if kind == "open":
        assert isinstance(call.returned, tuple)
        new, found = call.returned
        return (new, value) if found == value and new > epoch else None
    if kind == "find":
        return state if call.returned == epoch else None
    fenced = call.returned is OperationOutcome.FENCED
    if fenced or asked[0] != epoch:
        return state if fenced and asked[0] != epoch else None
    return (epoch, asked[1]) if kind == "change" else state


def register(state: State, call: Call) -> State | None:
    """A topic: what it retains."""
    assert isinstance(call.asked, tuple)
    if call.asked[0] == "write":
        return (call.asked[1],)
    return state if (call.returned,) == state else None


def test_the_checker_finds_what_is_wrong() -> None:
    write = [Call(("write", b"1"), None, 0, 1), Call(("write", b"2"), None, 2, 5)]
    assert offence([*write, Call(("read",), b"1", 3, 4)], register, (None,)) is None
    assert offence([*write, Call(("read",), b"2", 3, 4), Call(("read",), b"1", 6, 7)], register, (None,))
    assert offence([*write, Call(("read",), None, 3, 4)], register, (None,))
    opened = Call(("open",), (7, None), 0, 1)
    again = Call(("open",), (9, None), 2, 5)
    late = ("change", 7, b"x")
    assert offence([opened, again, Call(late, OperationOutcome.DONE, 3, 4)], owned, (0, None))
    assert offence(
        [opened, Call(late, OperationOutcome.DONE, 3, 4), again._replace(begin=5, end=6)], owned, (0, None)
    )
    seen = again._replace(returned=(9, b"x"))
    assert offence([opened, seen, Call(late, OperationOutcome.DONE, 3, 4)], owned, (0, None)) is None
    assert offence([opened, seen, Call(late, OperationOutcome.DONE, 6, 7)], owned, (0, None))


class Client:
    """One thread that does something at random, again and again; it never forgets an epoch by itself."""

    def __init__(self, replica: Replica, seed: str, count: int, ticks: itertools.count[int]) -> None:
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self._replica = replica
        self._chance = random.Random(seed)
        self._count = count
        self._ticks = ticks
        self._epochs: dict[str, int] = {}
        self._seed = seed

    def run(self) -> None:
        """Do all of it."""
        for number in range(self._count):
            name = f"{self._chance.randrange(OBJECTS)}"
            value = f"{self._seed} {number}".encode()
            begin = next(self._ticks)
            if self._chance.random() < 0.5:
                name = f"topic {name}"
                asked, returned = self._retain(name, value)
            else:
                asked, returned = self._own(name, value)
            self.calls[name].append(Call(asked, returned, begin, next(self._ticks)))

    def _retain(self, topic: str, value: bytes) -> tuple[Hashable, Hashable]:
        if self._chance.random() < 0.5:
            found = self._replica.ask(MatchRetained(topic))
            return ("read",), found[0].message if found else None
        new = None if self._chance.random() < 0.3 else value
        self._replica.do(Retain(topic, new))
        return ("write", new), None

    def _own(self, client: str, value: bytes) -> tuple[Hashable, Hashable]:
        key, epoch = SessionKey("mqtt", client), self._epochs.get(client, 1)
        what = self._chance.random()
        if what < 0.3:
            found = self._replica.do(OpenSession(key, self._replica.name, "", "", False, 600.0, "queue"))
            self._epochs[client] = found.epoch
            return ("open",), (found.epoch, found.contents.subscriptions.get(VALUE))
        if what < 0.4:
            view = self._replica.ask(FindSession(key))
            return ("find",), 0 if view is None else view.owner.epoch
        if what < 0.5:
            left = self._replica.reply(LeaveSession(key, epoch, 600.0, True))
            self._replica.reply(ReleaseSession(key, epoch))
            return ("leave", epoch), left.verdict
        return ("change", epoch, value), self._replica.reply(
            ChangeSession(key, epoch, {VALUE: value}, expiry_secs=600.0)
        ).verdict


def run_clients(clients: list[Client], disturb: Callable[[threading.Event], None]) -> None:
    """Run all clients in threads, with `disturb` beside them until they have ended; then check that what each
    object returned is linearizable."""
    failures: list[BaseException] = []

    def run(client: Client) -> None:
        try:
            client.run()
        except BaseException as error:
            failures.append(error)

    is_over = threading.Event()
    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    disturbing = threading.Thread(target=disturb, args=(is_over,))
    begin = time.monotonic()
    for thread in (*threads, disturbing):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    disturbing.join()
    print(f"{OPERATIONS} operations in {time.monotonic() - begin:.1f} s")
    assert failures == []
    histories: dict[str, list[Call]] = defaultdict(list)
    for client in clients:
        for name, calls in client.calls.items():
            histories[name] += calls
    assert len(histories) == 2 * OBJECTS
    for name, calls in histories.items():
        retains = name.startswith("topic")
        assert offence(calls, register if retains else owned, (None,) if retains else (0, None)) is None, name


def clients_of(replicas: tuple[Replica, ...], seed: int) -> list[Client]:
    """Return clients that use the replicas in turn."""
    ticks: itertools.count[int] = itertools.count()
    return [
        Client(replicas[number % len(replicas)], f"{seed}.{number}", OPERATIONS // WORKERS, ticks)
        for number in range(WORKERS)
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_histories_are_linearizable(world: World, one: Replica, two: Replica, seed: int) -> None:
    """With PostgreSQL all connections are cut now and then."""

    def cut_connections(is_over: threading.Event) -> None:
        while isinstance(world, PostgreSQLWorld) and not is_over.wait(CUT_SECS):
            cut(world)

    run_clients(clients_of((one, two), seed), cut_connections)


@pytest.fixture
def pair() -> Iterator[PostgreSQLPair]:
    """A primary and its standby, of this test."""
    with PostgreSQLPair() as servers:
        yield servers


def test_a_failover_loses_nothing_that_was_acknowledged(pair: PostgreSQLPair) -> None:
    """The primary is killed under load, and the standby promoted: what was acknowledged is there. What was
    not is there or not, once."""
    world = PostgreSQLWorld(pair)
    one, two = world.replica("one"), world.replica("two")
    clients = clients_of((one, two), 3)

    def fail_over(is_over: threading.Event) -> None:
        while sum(len(calls) for client in clients for calls in client.calls.values()) < OPERATIONS // 4:
            assert not is_over.wait(0.01), "it was over before"
        pair.lose_primary()
        pair.promote()

    try:
        run_clients(clients, fail_over)
        assert pair.standby.running
        assert not pair.primary.running
        one.until_healthy()
        assert one.heard(lambda notice: notice.event is NoticeSubject.MISSED)
    finally:
        world.close()

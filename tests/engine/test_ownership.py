"""Who owns a session, over recorded histories: one order of all changes explains what replicas were told.

Clients come and go at three replicas at random, and what they store is acknowledged, while notices are lost,
and the database is away, or commits without anybody hearing of it. `OWNERSHIP_OPERATIONS=100000 pytest
tests/engine/test_ownership.py` goes on for longer than `make test`.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from gateway import clock
from gateway.engine.client_session import ClientSession
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.times import Monotonic
from gateway.state.interface import Contents, OpenedSession, OpenSession, OperationOutcome, Reply
from tests.engine.local_state import LocalDatabase
from tests.engine.test_shared_sessions import World
from tests.idle import idle_report
from tests.state.linear import Call, State, offence

OPERATIONS: Final = int(os.environ.get("OWNERSHIP_OPERATIONS", "4000"))
RUN: Final = 1_000  # operations over one database
CLIENTS: Final = ("a", "b", "c")
REPLICAS: Final = ("one", "two", "three")
VALUE: Final = "value"
# Changes of a client that have no answer, and as many CONNECTs: each doubles what the checker has to try.
WAITING_MAX: Final = 3
AWAY_SECS: Final = 8.0  # at most: a replica that is silent for longer loses what it has
QUIET_SECS: Final = 90  # after which everything is as it should be


def owned(state: State, call: Call) -> State | None:
    """A session: its epoch, and the value that its owner has stored. Who is told that it is not the owner may
    have stored its value before, and not have heard of that."""
    assert isinstance(state, tuple)
    assert isinstance(call.asked, tuple)
    epoch, value = state
    kind, *asked = call.asked
    if kind == "open":
        assert isinstance(call.returned, tuple)
        new, found = call.returned
        return (new, value) if found == value and new > epoch else None
    if asked[0] == epoch:
        return (epoch, asked[1])
    return state if call.returned is OperationOutcome.FENCED else None


def test_the_checker_finds_two_owners() -> None:
    first, second = Call(("open",), (7, None), 0, 1), Call(("open",), (9, None), 2, 5)
    late = ("change", 7, b"x")
    assert offence([first, second, Call(late, OperationOutcome.DONE, 6, 7)], owned, (0, None))
    assert offence([first, second, Call(late, OperationOutcome.FENCED, 6, 7)], owned, (0, None)) is None
    seen = second._replace(returned=(9, b"x"))
    assert offence([first, seen, Call(late, OperationOutcome.FENCED, 3, 7)], owned, (0, None)) is None
    assert offence([first, seen, Call(late, OperationOutcome.FENCED, 6, 7)], owned, (0, None))


class Run:
    """Replicas over one database, and what they were told."""

    def __init__(self, folder: Path, seed: int, passed: list[float]) -> None:
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.local = LocalDatabase(folder)
        self.worlds = [World(self.local, name) for name in REPLICAS]
        self.kinds: Counter[str] = Counter()
        self._chance = Random(seed)
        self._passed = passed
        self._ticks = itertools.count()
        self._values = itertools.count()
        self._waiting: Counter[str] = Counter()  # changes without an answer, by client
        self._opening: Counter[str] = Counter()  # OpenSessions without an answer, by client
        self._back: dict[World, float] = {}  # when its database is there again
        for world in self.worlds:
            world.membership.on_claimed_work.append(world.sessions.run_due_work)
            self._record(world)

    def _record(self, world: World) -> None:
        """Note each OpenSession that is answered."""
        submit = world.store.submit

        def submitted(operation: Any, done: Callable[[Reply[Any]], None]) -> None:
            if not isinstance(operation, OpenSession):
                submit(operation, done)
                return
            begin = next(self._ticks)
            self._opening[operation.key.client] += 1

            def replied(reply: Reply[Any]) -> None:
                self._opening[operation.key.client] -= 1
                for work, unheard in world.store.unheard:
                    if work is operation:
                        reply_of = unheard
                        break
                else:
                    reply_of = reply
                self._opened(operation.key.client, reply_of.value, begin)
                done(reply)

            submit(operation, replied)

        world.store.submit = submitted  # type: ignore[method-assign]

    def _opened(self, client: str, found: OpenedSession | None, begin: int) -> None:
        if found is not None:
            contents: Contents = found.contents
            returned = (found.epoch, contents.subscriptions.get(VALUE))
            self.calls[client].append(Call(("open",), returned, begin, next(self._ticks)))

    # What may happen.

    def step(self) -> None:
        """Do one thing at random."""
        things: tuple[tuple[Callable[[World], None], int], ...] = (
            (self._open, 10),
            (self._let_in, 20),
            (self._change, 40),
            (self._leave, 5),
            (self._free, 15),
            (self._commit, 60),
            (self._notice, 15),
            (self._lose_notice, 2),
            (self._tick, 25),
            (self._disturb, 2),
        )
        (thing,) = self._chance.choices([one for one, _ in things], [weight for _, weight in things])
        self.kinds[thing.__name__] += 1
        thing(self._chance.choice(self.worlds))

    def _open(self, world: World) -> None:
        client = self._chance.choice(CLIENTS)
        if self._opening[client] < WAITING_MAX:
            world.open(client, secs=600.0)

    def _let_in(self, world: World) -> None:
        if world.arrivals:
            world.admit(world.arrivals.pop())

    def _change(self, world: World) -> None:
        if not world.here:
            return
        session = self._chance.choice(list(world.here.values()))
        if self._waiting[session.client_id] >= WAITING_MAX:
            return
        self._waiting[session.client_id] += 1
        value = b"%d" % next(self._values)
        asked = ("change", session.owner.epoch, value)
        session.change().subscriptions[VALUE] = value
        world.after_stored(session, partial(self._told, session, asked, next(self._ticks)))

    def _told(self, session: ClientSession, asked: tuple[Any, ...], begin: int, outcome: Outcome) -> None:
        self._waiting[session.client_id] -= 1
        verdict = OperationOutcome.DONE if outcome is ACCEPTED else OperationOutcome.FENCED
        self.calls[session.client_id].append(Call(asked, verdict, begin, next(self._ticks)))

    def _leave(self, world: World) -> None:
        if world.here:
            world.leave(self._chance.choice(list(world.here)))

    def _free(self, world: World) -> None:
        if world.ends:
            world.ends.pop(next(iter(world.ends)))([])

    def _commit(self, world: World) -> None:
        world.step_soon()
        world.store.step()

    def _notice(self, world: World) -> None:
        if world.store.notices:
            world.sessions.handle_notice(world.store.notices.pop(0))

    def _lose_notice(self, world: World) -> None:
        world.store.notices.clear()

    def _tick(self, world: World) -> None:
        secs = self._chance.choice((0.1, 0.2, 1.0))
        self._passed[0] += secs
        self.local.utc += secs
        for one, at in list(self._back.items()):
            if clock.now() >= at:
                del self._back[one]
                one.store.is_away = one.store.is_deaf = False
        for one in self.worlds:
            one.membership.tick(clock.now())
            one.sessions.tick(clock.now())

    def _disturb(self, world: World) -> None:
        if world not in self._back:
            self._back[world] = clock.now() + self._chance.uniform(0.5, AWAY_SECS)
            setattr(world.store, self._chance.choice(("is_away", "is_deaf")), True)

    def settle(self) -> None:
        """Let all that goes on come to its end, with the database there."""
        self._back.clear()
        for world in self.worlds:
            world.store.is_away = world.store.is_deaf = False
        for _ in range(QUIET_SECS):
            self._passed[0] += 1.0
            self.local.utc += 1.0
            for world in self.worlds:
                while world.arrivals:
                    self._let_in(world)
                while world.ends:
                    self._free(world)
                world.run()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the monotonic clock."""
    seconds = [1_000.0]
    monkeypatch.setattr(clock, "now", lambda: Monotonic(seconds[0]))
    return seconds


def test_each_session_has_one_owner_at_a_time(tmp_path: Path, passed: list[float]) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(max(OPERATIONS // RUN, 1)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run = Run(folder, seed, passed)
        for _ in range(RUN):
            run.step()
        run.settle()
        kinds += run.kinds
        for client, calls in run.calls.items():
            assert offence(calls, owned, (0, None)) is None, (seed, client)
        for client in CLIENTS:
            _check_agreement(run, client, seed)
        for world in run.worlds:
            assert not world.sessions.pending, seed
            assert idle_report(world) == [], seed
        run.local.database.close()
    assert set(kinds) >= {"_open", "_let_in", "_change", "_disturb", "_lose_notice"}


def _check_agreement(run: Run, client: str, seed: int) -> None:
    """The database and the replicas say the same of a client, and who has it consumes its queue."""
    here = [world for world in run.worlds if client in world.here]
    view = run.worlds[0].view(client)
    at = (seed, client)
    if view is None or not view.connected:
        assert not here, at
        return
    assert len(here) == 1, at
    session = here[0].here[client]
    assert session.owner == view.owner, at
    assert view.holder in (None, view.owner), at
    assert not here[0].sessions.is_waiting(session), at

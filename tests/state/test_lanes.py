"""Lanes over databases that the test holds: what hangs is noticed, answered by the loop, and left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from gateway.state.database import AbortedError, Database, LostError, OperationStatement, PendingNotice, Rows
from gateway.state.group import NOW
from gateway.state.interface import (
    FindSession,
    MatchRetained,
    NoticeSubject,
    OperationOutcome,
    Reply,
    SessionKey,
    SettleWill,
    SharedFilters,
    WeighRetained,
)
from gateway.state.lanes import READ_TIMES, LanedStore
from tests.state.conftest import KEY, WAIT_SECS, Replica

PATIENCE_SECS: Final = 0.2


def settling(number: int = 0) -> SettleWill:
    """An operation that needs no rows."""
    return SettleWill(SessionKey("mqtt", f"client-{number}"), 1)


class Held(Database):
    """A database without rows. `hold` has it answer nothing until `let_go`, or `interrupt`.

    An interrupted call ends the hold, unless `stays_held`: then the next call waits as well.
    """

    def __init__(self) -> None:
        self.commits = self.interrupts = self.connects = self.matches = 0
        self.aborts = self.stays_held = False
        self.fails: list[Exception] = []  # of the next notices
        self.notified: list[PendingNotice] = []
        self._free = threading.Event()
        self._free.set()
        self._is_cut = False
        self.is_waited_for = threading.Event()

    def hold(self) -> None:
        self._free.clear()

    def let_go(self) -> None:
        self.stays_held = False
        self._free.set()

    def _answer(self) -> None:
        self.is_waited_for.set()
        assert self._free.wait(WAIT_SECS)
        if self._is_cut:
            self._is_cut = False
            if self.stays_held:
                self._free.clear()
            raise LostError("cut")

    def connect(self) -> int:
        self._answer()
        self.connects += 1
        return self.commits

    def begin(self, number: int) -> None:
        self._answer()
        if self.aborts:
            raise AbortedError("by another one")

    def run(self, calls: Sequence[OperationStatement]) -> list[Rows]:
        self._answer()
        return [[(0.0,)] if call == NOW else [] for call in calls]

    def commit(self) -> None:
        self._answer()
        self.commits += 1

    def rollback(self) -> None:
        """There is nothing."""

    def match(self, wanted: MatchRetained) -> Rows:
        self._answer()
        self.matches += 1
        return []

    def notify(self, notices: Sequence[PendingNotice]) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.notified += notices

    def interrupt(self) -> None:
        self.interrupts += 1
        self._is_cut = self._is_cut or not self._free.is_set()  # it may come twice before the call ends
        self._free.set()

    def close(self) -> None:
        """There is nothing."""


class Rig:
    """A store with one lane and two readers."""

    def __init__(self) -> None:
        self.lane, self.walks, self.reports = Held(), Held(), Held()
        store = LanedStore([self.lane], PATIENCE_SECS, None, [self.walks, self.reports])
        self.replica = Replica(store, "one")
        self.store = store
        store.start(lambda function: function(), print)
        self.replica.until_healthy()

    def verdict(self, wait: Any) -> OperationOutcome:
        found: Reply[Any] = self.replica.result(wait)
        return found.verdict

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECS
        while not holds():
            assert time.monotonic() < deadline
            self.store.tick()
            time.sleep(0.01)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    try:
        yield made
    finally:
        for one in (made.lane, made.walks, made.reports):
            one.aborts = False
            one.let_go()
        made.store.stop()


def test_what_hangs_is_noticed_and_answered(rig: Rig) -> None:
    rig.lane.stays_held = True
    rig.lane.hold()
    waits = [rig.replica.send(settling(number)) for number in range(3)]
    assert {rig.verdict(wait) for wait in waits} == {OperationOutcome.UNAVAILABLE}
    assert "not responded" in rig.store.health.failure
    assert rig.store.health.pending == 0
    rig.lane.let_go()
    rig.until(lambda: not rig.store.health.failure)
    assert rig.verdict(rig.replica.send(settling())) is OperationOutcome.DONE


def test_what_was_given_up_is_not_done_later(rig: Rig) -> None:
    """The first group is on its way, and nobody can say; the others were never begun."""
    rig.lane.hold()
    rig.lane.is_waited_for.clear()
    first = rig.replica.send(settling(0))
    assert rig.lane.is_waited_for.wait(WAIT_SECS)
    waits = [first, *(rig.replica.send(settling(number)) for number in range(1, 5))]
    assert {rig.verdict(wait) for wait in waits} == {OperationOutcome.UNAVAILABLE}
    rig.lane.let_go()
    assert rig.verdict(rig.replica.send(settling())) is OperationOutcome.DONE
    assert rig.lane.commits <= 2


def test_a_connection_that_never_answers_is_ended(rig: Rig) -> None:
    rig.lane.hold()
    wait = rig.replica.send(settling())
    rig.until(lambda: rig.lane.connects == 2)
    assert rig.verdict(wait) is OperationOutcome.UNAVAILABLE
    rig.until(lambda: not rig.store.health.failure)
    assert rig.verdict(rig.replica.send(settling())) is OperationOutcome.DONE


def test_what_is_aborted_again_and_again_is_answered(rig: Rig) -> None:
    rig.lane.aborts = True
    assert rig.verdict(rig.replica.send(settling())) is OperationOutcome.UNAVAILABLE
    rig.lane.aborts = False
    assert rig.verdict(rig.replica.send(settling())) is OperationOutcome.DONE


@pytest.mark.parametrize("aborts", [False, True])
def test_it_stops_though_nothing_is_answered(rig: Rig, aborts: bool) -> None:
    if aborts:
        rig.lane.aborts = True
    else:
        rig.lane.hold()
    wait = rig.replica.send(settling())
    begin = time.monotonic()
    rig.store.stop()
    assert time.monotonic() - begin < WAIT_SECS / 3
    assert wait.result(0).verdict is OperationOutcome.UNAVAILABLE


def test_a_slow_query_delays_no_operation_and_no_walk(rig: Rig) -> None:
    rig.reports.hold()
    replica = rig.replica
    slow: list[OperationOutcome] = []
    rig.store.query(WeighRetained(), lambda reply: slow.append(reply.verdict))
    rig.store.query(SharedFilters(), lambda reply: slow.append(reply.verdict))
    assert rig.verdict(replica.send(settling())) is OperationOutcome.DONE
    assert replica.ask(MatchRetained("#")) == []
    assert replica.ask(FindSession(KEY)) is None
    assert not slow
    rig.reports.let_go()
    rig.until(lambda: len(slow) == 2)


def test_many_queries_in_a_turn_are_not_taken_for_one_that_hangs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is answered soon; together they take longer than any of them may."""
    rig.walks.hold()
    rig.walks.is_waited_for.clear()
    found: list[OperationOutcome] = []
    count, seconds = 12, READ_TIMES * PATIENCE_SECS / 8
    for number in range(count):
        rig.store.query(MatchRetained(str(number)), lambda reply: found.append(reply.verdict))
    assert rig.walks.is_waited_for.wait(WAIT_SECS)
    match = rig.walks.match

    def slow(wanted: MatchRetained) -> Rows:
        time.sleep(seconds)
        return match(wanted)

    monkeypatch.setattr(rig.walks, "match", slow)
    rig.walks.let_go()

    def are_answered() -> bool:
        assert not rig.store.health.failure
        return len(found) == count and rig.walks.matches >= found.count(OperationOutcome.DONE)

    rig.until(are_answered)
    assert rig.walks.matches < count, "what was given up is not read"
    assert found.count(OperationOutcome.DONE) > 1
    assert OperationOutcome.UNAVAILABLE in found, "the last ones have waited for too long"
    assert rig.walks.connects == 1
    assert not rig.walks.interrupts


def test_a_query_of_a_session_follows_its_operations(rig: Rig) -> None:
    """What looks whether an operation without an answer was done must not come before it."""
    rig.lane.hold()
    rig.lane.is_waited_for.clear()
    order: list[str] = []
    rig.store.submit(settling(), lambda reply: order.append("settled"))
    assert rig.lane.is_waited_for.wait(WAIT_SECS)
    rig.store.query(FindSession(KEY), lambda reply: order.append("found"))
    rig.lane.let_go()
    rig.until(lambda: len(order) == 2)
    assert order == ["settled", "found"]


@pytest.mark.parametrize(
    "error, is_sent", [(AbortedError("cancelled"), True), (LostError("cut"), True), (ValueError("no"), False)]
)
def test_notices_are_sent_again_and_stop_no_lane(rig: Rig, error: Exception, is_sent: bool) -> None:
    """Notices of a group that is committed, which the database cancels, never gets or rejects."""
    notice = PendingNotice("other", NoticeSubject.MISSED)
    (lane,) = rig.store._lanes
    lane.patience_secs = WAIT_SECS  # reconnecting takes long on a busy machine
    rig.lane.fails.append(error)
    lane._noted.append(notice)
    assert rig.verdict(rig.replica.send(settling())) is OperationOutcome.DONE
    assert rig.lane.notified == ([notice] if is_sent else [])

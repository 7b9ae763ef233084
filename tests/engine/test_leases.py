"""Leases and the incarnation of a replica, over a database that answers when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import clock
from gateway.engine import elections
from gateway.engine.elections import ELSEWHERE, LEASE_SECS, REST_SECS, UNDECIDED, Candidate, Elections
from gateway.engine.membership import HEARTBEAT_SECS, STEADY_SECS, Membership
from gateway.model.times import Monotonic
from gateway.state.interface import (
    CLAIM_SECS,
    DONE,
    FENCED,
    UNAVAILABLE,
    AcquireLease,
    ChangeSession,
    ClaimedWork,
    Health,
    Heartbeat,
    JoinReplica,
    Lease,
    LeaveSession,
    Notice,
    OpenedSession,
    OpenSession,
    OperationOutcome,
    QuitReplica,
    Reap,
    ReleaseLease,
    Reply,
    SessionKey,
    StateStore,
    WillRecord,
)
from gateway.telemetry.stats import LinkStats
from tests.engine.local_state import SILENT_SECS, LocalDatabase, joined


class Answering(StateStore):
    """A store whose replies the test gives."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Callable[[Reply[Any]], None]]] = []
        self.listening: list[str] = []

    def start(
        self, call_soon: Callable[[Callable[[], None]], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def submit(self, operation: Any, done: Callable[[Reply[Any]], None]) -> None:
        self.waiting.append((operation, done))

    def query(self, query: Any, done: Callable[[Reply[Any]], None]) -> None:
        self.waiting.append((query, done))

    def tick(self) -> None:
        """Nothing is late: the test decides what is answered."""

    def listen(self, replica: str) -> None:
        self.listening.append(replica)

    @property
    def health(self) -> Health:
        return Health("", len(self.waiting))

    def answer(self, kind: type, reply: Reply[Any]) -> Any:
        """Reply to the first operation of a kind, and return it."""
        for at, (operation, done) in enumerate(self.waiting):
            if isinstance(operation, kind):
                del self.waiting[at]
                done(reply)
                return operation
        raise AssertionError(f"no {kind.__name__} in {self.waiting}")

    def kinds(self) -> list[type]:
        return [type(operation) for operation, _ in self.waiting]


class Rig:
    """One candidate at a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept = 0.0
        monkeypatch.setattr(clock, "now", lambda: Monotonic(self.now))
        monkeypatch.setattr(clock, "since_boot", lambda: clock.monotonic() + self.slept)
        self.state = Answering()
        self.membership = Membership(self.state, "one", "1", 20.0)
        self.heard: list[tuple[bool, str]] = []
        self.serves = True
        self.stats = LinkStats("far", "mqtt", (), ())
        self.candidate = Candidate(
            "far",
            self.stats,
            lambda elected, why: self.heard.append((elected, why)),
            serves=lambda: self.serves,
            timeout_secs=10.0,
        )
        self.elections = Elections(self.state, self.membership)
        self.elections.candidates.append(self.candidate)

    def tick(self, secs: float = 0.0) -> None:
        self.now += secs
        self.elections.tick(clock.lease_time())

    def grant(self, holder: str = "") -> None:
        lease = Lease(holder or self.membership.incarnation, 1)
        self.state.answer(AcquireLease, Reply(OperationOutcome.DONE, lease))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_lease_counts_from_its_request(rig: Rig) -> None:
    """However late the reply is, the holder stops before the database lets another one begin."""
    rig.tick()
    rig.now += LEASE_SECS - 1
    rig.grant()
    assert rig.heard == [(True, "")]
    rig.tick(1)
    assert rig.heard[-1] == (False, UNDECIDED)


@pytest.mark.parametrize("clocks", ["now", "slept"])
def test_a_reply_that_is_later_than_the_lease_elects_nobody(rig: Rig, clocks: str) -> None:
    rig.tick()
    setattr(rig, clocks, getattr(rig, clocks) + LEASE_SECS)
    rig.grant()
    assert not rig.candidate.is_elected


def test_a_holder_whose_machine_has_slept_stops(rig: Rig) -> None:
    rig.tick()
    rig.grant()
    assert rig.candidate.is_elected
    rig.slept += 3_600.0
    rig.tick(0.1)
    assert rig.heard[-1] == (False, UNDECIDED)
    rig.grant(holder="another")
    assert rig.heard[-1] == (False, ELSEWHERE)


def test_a_replica_whose_machine_has_slept_declares_no_others_dead(rig: Rig) -> None:
    for _ in range(int(STEADY_SECS) + 4):
        rig.now += 1.0
        rig.membership.tick(clock.lease_time())
        for operation, _ in list(rig.state.waiting):
            rig.state.answer(
                type(operation), Reply(OperationOutcome.DONE, [] if type(operation) is Reap else 1.0)
            )
    rig.now += 1.0
    rig.membership.tick(clock.lease_time())
    assert rig.state.answer(Reap, Reply(OperationOutcome.DONE, [])).silent_secs is not None
    rig.slept += 3_600.0
    rig.now += 1.0
    rig.membership.tick(clock.lease_time())
    assert rig.state.answer(Reap, Reply(OperationOutcome.DONE, [])).silent_secs is None


def test_a_holder_that_slept_has_stopped_before_it_asks(rig: Rig) -> None:
    rig.tick()
    rig.grant()
    rig.tick(10 * LEASE_SECS)
    assert rig.heard[-1] == (False, UNDECIDED)
    assert rig.state.kinds() == [AcquireLease]


def test_a_lease_outlives_a_short_absence_of_the_database(rig: Rig) -> None:
    rig.tick()
    rig.grant()
    rig.tick(elections.RENEW_SECS)
    rig.state.answer(AcquireLease, UNAVAILABLE)
    assert rig.candidate.is_elected
    rig.tick(elections.TRY_SECS)
    rig.grant()
    rig.tick(LEASE_SECS - 0.1)
    assert rig.candidate.is_elected


def test_who_does_not_hold_it_stands_by(rig: Rig) -> None:
    rig.tick()
    rig.grant("another")
    assert rig.heard == [(False, ELSEWHERE)]
    rig.tick(elections.TRY_SECS)
    rig.grant()
    assert rig.candidate.is_elected


def test_who_cannot_serve_gives_it_up_and_rests(rig: Rig) -> None:
    """A renewal that was on its way when it did so elects nobody."""
    rig.tick()
    rig.grant()
    rig.serves = False
    for _ in range(9):
        rig.tick(1)
        if AcquireLease in rig.state.kinds():
            rig.grant()
    assert rig.candidate.is_elected
    while rig.candidate.is_elected:
        rig.tick(0.5)
    assert rig.now - 100 == pytest.approx(10, abs=1)
    assert rig.state.kinds()[-1] is ReleaseLease
    if AcquireLease in rig.state.kinds():
        rig.grant()
    assert not rig.candidate.is_elected
    rig.tick(REST_SECS - 0.1)
    assert AcquireLease not in rig.state.kinds()
    rig.tick(0.1)
    rig.grant()
    assert rig.candidate.is_elected


def test_an_end_in_order_frees_what_is_held(rig: Rig) -> None:
    rig.tick()
    rig.grant()
    rig.elections.stop()
    assert rig.state.kinds() == [ReleaseLease]
    assert not rig.candidate.is_elected
    rig.tick(1)
    assert rig.state.kinds() == [ReleaseLease]


def test_nothing_is_held_that_was_requested_before_an_end_in_order(rig: Rig) -> None:
    rig.tick()
    rig.elections.stop()
    assert rig.state.kinds() == [AcquireLease, ReleaseLease]
    rig.grant()
    assert not rig.candidate.is_elected


def test_an_incarnation_joins_and_lives(rig: Rig) -> None:
    one = rig.membership
    assert one.unavailable_reason
    one.tick(Monotonic(1.0))
    one.tick(Monotonic(1.2))
    assert rig.state.kinds() == [JoinReplica]  # one at a time
    rig.state.answer(JoinReplica, UNAVAILABLE)
    one.tick(Monotonic(1.4))
    rig.state.answer(JoinReplica, DONE)
    assert one.unavailable_reason == ""
    one.tick(Monotonic(1.4 + HEARTBEAT_SECS))
    assert rig.state.kinds() == [Heartbeat, Reap]
    rig.state.answer(Heartbeat, DONE)
    one.end_incarnation()
    one.tick(Monotonic(100.0))
    assert rig.state.kinds() == [Reap, QuitReplica]


def test_a_replica_that_was_frozen_declares_nobody_dead(tmp_path: Path, rig: Rig) -> None:
    """The database was away as well, so the others could send no heartbeats."""
    local = LocalDatabase(tmp_path)
    members = [Membership(local.store(), name, "1", SILENT_SECS) for name in ("one", "other")]
    frozen, other = members
    buried = list[str]()
    other.on_declared_dead.append(buried.append)

    def pass_time(secs: float, *awake: Membership) -> None:
        rig.now += secs
        local.utc += secs
        for member in awake:
            member.tick(Monotonic(rig.now))
        local.settle()

    for _ in range(20):
        pass_time(1.0, *members)
    local.stores[1].is_away = True
    for _ in range(25):
        pass_time(1.0, other)
    local.stores[1].is_away = False
    pass_time(0.1, frozen)
    for _ in range(5):
        pass_time(1.0, *members)
    assert not buried


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("step", [3_600.0, -3_600.0])
def test_a_step_of_the_database_s_clock_declares_nobody_dead(
    tmp_path: Path, rig: Rig, step: float, phase: int
) -> None:
    """One who is silent from then on is declared dead by the new time."""
    local = LocalDatabase(tmp_path)
    members = [Membership(local.store(), name, "1", SILENT_SECS) for name in ("one", "other")]
    buried = list[str]()
    for member in members:
        member.on_declared_dead.append(buried.append)

    def pass_time(secs: float, *awake: Membership) -> None:
        rig.now += secs
        local.utc += secs
        for member in awake:
            member.tick(Monotonic(rig.now))
        local.settle()

    pass_time(1.0, members[0])  # so each sends heartbeats when the other one does not
    for _ in range(20 + phase):
        pass_time(1.0, *members)
    local.utc += step
    for _ in range(40):
        pass_time(1.0, *members)
    assert not buried
    local.utc += step
    for _ in range(40):
        pass_time(1.0, members[0])
    pass_time(1.0, *members)
    pass_time(1.0, *members)
    assert len(buried) == 1


@pytest.mark.parametrize("late", ["", "now", "slept"])
def test_a_late_reply_to_a_reap_is_ignored(tmp_path: Path, rig: Rig, late: str) -> None:
    """The replica was frozen, or its machine has slept: what it had claimed may be claimed by others."""
    local = LocalDatabase(tmp_path)
    store, one = joined(local, "one")
    due = list[ClaimedWork]()
    one.on_claimed_work.append(lambda one, since: due.append(one))
    key = SessionKey("mqtt", "c")
    opened = list[Reply[OpenedSession]]()
    opening = OpenSession(key, one.incarnation, "", "", True, 0.0, "q", WillRecord(b"gone", 1.0), False, 1)
    store.submit(opening, opened.append)
    local.settle()
    assert opened[0].value is not None
    store.submit(ChangeSession(key, opened[0].value.epoch, expiry_secs=60.0), lambda reply: None)
    store.submit(LeaveSession(key, opened[0].value.epoch, 60.0, False), lambda reply: None)
    local.settle()
    local.utc += CLAIM_SECS + 1
    one.tick(Monotonic(rig.now))
    if late:
        setattr(rig, late, getattr(rig, late) + CLAIM_SECS)
    local.settle()
    assert len(due) == (not late)


def test_an_incarnation_that_was_declared_dead_is_followed_by_another(rig: Rig) -> None:
    one, buried = rig.membership, list[str]()
    one.on_declared_dead.append(buried.append)
    one.tick(Monotonic(1.0))
    first = rig.state.answer(JoinReplica, DONE).replica
    one.tick(Monotonic(1.0 + HEARTBEAT_SECS))
    rig.state.answer(Heartbeat, FENCED)
    assert buried == [first]
    assert one.unavailable_reason
    one.tick(Monotonic(1.2 + HEARTBEAT_SECS))
    second = rig.state.answer(JoinReplica, DONE).replica
    assert second != first
    assert rig.state.listening == [first, second]

"""Ids of deduplicating routes that replicas have in common: each crosses once, wherever it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.deduplication import UNSETTLED
from gateway.broker.dispatcher import Dispatcher, DispatcherServices
from gateway.engine.ids import AWAY, IDS_MAX, UNFREED_MAX, SharedIds
from gateway.engine.membership import HEARTBEAT_SECS, REAP_SECS
from gateway.model.batch import Batch
from gateway.model.message import Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES, Properties, property_set
from gateway.model.times import Monotonic
from gateway.state.interface import QuitReplica
from tests.broker.parts import Answers, mqtt, unreadable
from tests.broker.test_deduplication import DOWN, REFUSED, Target, mapping
from tests.engine.local_state import SILENT_SECS, LocalDatabase, joined


class Heard(Answers):
    """What the source of a batch was told, by receipt."""

    @property
    def heard(self) -> dict[object, Outcome]:
        assert len(dict(self.told)) == len(self.told), "told twice"
        return dict(self.told)


class Replica:
    """A route that deduplicates, at one replica."""

    def __init__(self, local: LocalDatabase, **more: Any) -> None:
        self.state, self.membership = joined(local, "one")
        self.ids = SharedIds(self.state, self.membership)
        self.target = more.pop("target", None) or Target()
        self.router = mapping(**more)
        self.dispatcher = Dispatcher(
            self.router,
            DeadLetters(),
            DispatcherServices(self.ids, links={"erp"}, namespaces={"mqtt": Target(0), "erp": self.target}),
        )

    def publish(self, *rows: tuple[str | None, bytes], client: str = "a") -> Heard:
        """(message id, body) each; receipts are bodies."""
        source = Heard()
        batch = Batch(source, Monotonic(0.0))
        for id, body in rows:
            said = NO_PROPERTIES if id is None else property_set(Properties(message_id=id))
            message = mqtt("a", body, properties=said, sender=Sender("mqtt", client))
            entry = self.dispatcher.entry("mqtt", self.dispatcher.namespaces["mqtt"], message.address)
            assert self.dispatcher.publish(batch, entry, message, body)
        batch.send()
        return source

    @property
    def duplicates(self) -> int:
        return self.router.routes[0].duplicates


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    given = [1_000.0]
    monkeypatch.setattr("gateway.clock.now", lambda: Monotonic(given[0]))
    return given


@pytest.fixture
def local(tmp_path: Path, now: list[float]) -> LocalDatabase:
    return LocalDatabase(tmp_path)


def test_what_one_has_accepted_another_knows(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    first = one.publish((None, b"0"), ("i", b"1"), (None, b"2"))
    assert one.target.bodies == [b"0"]  # which needs no claim
    local.settle()
    assert one.target.bodies == [b"0", b"1", b"2"]
    one.target.settle()
    assert first.heard == {b"0": ACCEPTED}  # before the commit the other one could not know
    local.settle()
    assert first.heard == {b"0": ACCEPTED, b"1": ACCEPTED, b"2": ACCEPTED}
    for replica in (one, other, Replica(local)):
        told = replica.publish(("i", b"again"))
        local.settle()
        assert told.heard == {b"again": ACCEPTED}
        assert (replica.duplicates, replica.target.bodies) == (1, [])


def test_messages_of_a_client_keep_their_order(local: LocalDatabase) -> None:
    """Also when the guard of the route is replaced while claims are on their way."""
    one, other = Replica(local), Replica(local)
    other.publish(("held", b"x"))
    local.settle()
    told = [one.publish(("i", b"1")), one.publish((None, b"2"), ("held", b"y"), (None, b"3"))]
    one.dispatcher.invalidate()
    told += [one.publish((None, b"4")), one.publish(("j", b"5"), (None, b"6"))]
    one.publish((None, b"another's"), client="b")
    assert one.target.bodies == [b"another's"]  # which waits for none of them
    local.settle()
    assert one.target.bodies == [b"another's", b"1", b"2", b"3", b"4", b"5", b"6"]
    one.target.settle()
    local.settle()
    assert [source.heard for source in told] == [
        {b"1": ACCEPTED},
        {b"2": ACCEPTED, b"y": UNSETTLED, b"3": ACCEPTED},
        {b"4": ACCEPTED},
        {b"5": ACCEPTED, b"6": ACCEPTED},
    ]
    assert not one.ids.lines("once")


def test_a_repeat_at_the_same_replica_costs_no_query(local: LocalDatabase) -> None:
    one = Replica(local)
    one.publish(("i", b"1"))
    local.settle()
    one.target.settle()
    local.settle()
    assert one.publish(("i", b"again")).heard == {b"again": ACCEPTED}
    assert one.state.health.pending == 0


def test_of_two_in_one_moment_one_crosses(local: LocalDatabase) -> None:
    """Neither has heard of the other when it claims."""
    one, other = Replica(local), Replica(local)
    first, second = one.publish(("i", b"one")), other.publish(("i", b"other"))
    local.settle()
    assert (one.target.bodies, other.target.bodies) == ([b"one"], [])
    assert (first.heard, second.heard) == ({}, {b"other": UNSETTLED})
    one.target.settle()
    local.settle()
    told = other.publish(("i", b"again"))
    local.settle()
    assert told.heard == {b"again": ACCEPTED}


@pytest.mark.parametrize("outcome", [DOWN, REFUSED])
def test_what_was_not_accepted_may_cross_elsewhere(local: LocalDatabase, outcome: Outcome) -> None:
    one, other = Replica(local), Replica(local)
    told = one.publish(("i", b"1"))
    local.settle()
    one.target.settle(outcome)
    assert told.heard == {b"1": outcome}
    local.settle()
    other.publish(("i", b"2"))
    local.settle()
    assert other.target.bodies == [b"2"]


@pytest.mark.parametrize("skew", [0.0, 86_400.0, -86_400.0])
def test_a_window_ends_by_the_clock_of_the_database(
    local: LocalDatabase, now: list[float], monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    """Whatever the clock of the replica's machine says."""
    monkeypatch.setattr("gateway.clock.utc", lambda: local.utc + skew)
    one, other = Replica(local), Replica(local)
    one.publish(("i", b"1"))
    local.settle()
    one.target.settle()
    local.settle()
    local.utc, now[0] = local.utc + 599, now[0] + 599
    told = one.publish(("i", b"2")), other.publish(("i", b"2"))
    local.settle()
    assert [source.heard for source in told] == [{b"2": ACCEPTED}] * 2
    local.utc, now[0] = local.utc + 2, now[0] + 2
    one.ids.tick()
    assert not one.ids.of("once").accepted
    one.publish(("i", b"3"))
    local.settle()
    assert one.target.bodies == [b"3"]


def test_the_oldest_are_forgotten_in_memory_and_known_to_the_database(local: LocalDatabase) -> None:
    one = Replica(local, options="window: 10m, ids_max: 2")
    one.publish(*((f"{at}", b"%d" % at) for at in range(5)))
    local.settle()
    one.target.settle()
    local.settle()
    assert len(one.ids.of("once").accepted) == 2
    assert one.ids.of("once").forgotten == 3
    told = one.publish(("0", b"again"))
    local.settle()
    assert told.heard == {b"again": ACCEPTED}


def test_claims_of_a_lost_replica_end_and_those_of_a_living_one_do_not(local: LocalDatabase) -> None:
    lost, living, other = (Replica(local) for _ in range(3))
    lost.publish(("lost", b"1"))
    living.publish(("held", b"2"))
    local.settle()
    passed = 0.0
    while passed <= SILENT_SECS:
        told = other.publish(("held", b"x"), ("lost", b"y"))
        local.settle()
        assert told.heard == {b"x": UNSETTLED, b"y": UNSETTLED}
        passed += HEARTBEAT_SECS
        local.utc += HEARTBEAT_SECS
        for replica in (living, other):
            replica.membership.tick(Monotonic(passed))
        local.settle()
    for replica in (living, other):
        replica.membership.tick(Monotonic(passed + REAP_SECS))
    local.settle()
    told = other.publish(("held", b"x"), ("lost", b"again"))
    local.settle()
    assert told.heard == {b"x": UNSETTLED}
    assert other.target.bodies == [b"again"]


def test_a_replica_that_was_declared_dead_claims_nothing(local: LocalDatabase) -> None:
    """It was frozen, and does not know yet that its claims do not count."""
    frozen, other = Replica(local), Replica(local)
    frozen.state.submit(QuitReplica(frozen.membership.incarnation), lambda reply: None)
    local.settle()
    told = frozen.publish(("i", b"1"))
    local.settle()
    assert told.heard == {b"1": AWAY}
    other.publish(("i", b"1"))
    local.settle()
    assert (frozen.target.bodies, other.target.bodies) == ([], [b"1"])


def test_a_replica_that_stops_frees_what_it_has(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.publish(("i", b"1"))
    local.settle()
    one.membership.end_incarnation()
    local.settle()
    other.publish(("i", b"2"))
    local.settle()
    assert other.target.bodies == [b"2"]


def test_without_the_database_nothing_with_an_id_crosses(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.state.is_away = True
    told = one.publish(("i", b"1"), (None, b"2"))
    local.settle()
    assert told.heard == {b"1": AWAY}
    assert one.target.bodies == [b"2"]
    one.target.settle()
    one.state.is_away = False
    one.publish(("i", b"3"))
    local.settle()
    assert one.target.bodies == [b"3"]
    one.ids.tick()  # what was to be freed is on its way again
    local.settle()
    told = other.publish(("i", b"4"))
    local.settle()
    assert told.heard == {b"4": UNSETTLED}


def test_what_was_accepted_while_the_database_was_away_is_acknowledged_then(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    told = one.publish(("i", b"1"))
    local.settle()
    one.state.is_away = True
    one.target.settle()
    local.settle()
    assert not told.heard
    assert one.publish(("i", b"2")).heard == {b"2": UNSETTLED}
    one.state.is_away = False
    one.ids.tick()
    local.settle()
    assert told.heard == {b"1": ACCEPTED}
    again = other.publish(("i", b"3"))
    local.settle()
    assert again.heard == {b"3": ACCEPTED}


def test_what_was_not_accepted_while_the_database_was_away_is_freed_then(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.publish(("i", b"1"))
    local.settle()
    one.state.is_away = True
    one.target.settle(REFUSED)
    local.settle()
    one.state.is_away = False
    one.ids.tick()
    local.settle()
    other.publish(("i", b"2"))
    local.settle()
    assert other.target.bodies == [b"2"]


def test_one_id_that_is_tried_again_and_again_is_freed_once(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.state.is_away = True
    for _ in range(5):
        assert one.publish(("i", b"1"), ("j", b"2")).heard == {}
        local.settle()
        one.ids.tick()
    assert one.state.health.pending == 1
    local.settle()
    one.ids.tick()
    one.state.is_away = False
    local.settle()
    assert not one.ids._unfreed
    assert not one.state.health.pending
    other.publish(("i", b"3"))
    local.settle()
    assert other.target.bodies == [b"3"]


def test_many_ids_are_freed_in_operations_and_no_more_are_claimed(local: LocalDatabase) -> None:
    """Without the database nothing with an id would cross, and each id would wait to be freed."""
    one, other = Replica(local), Replica(local)
    one.state.is_away = True
    for start in range(0, UNFREED_MAX, IDS_MAX):
        one.publish(*((f"{at}", b"%d" % at) for at in range(start, start + IDS_MAX)))
        local.settle()
    told = one.publish(("more", b"more"))
    assert not one.state.health.pending
    assert told.heard == {b"more": AWAY}
    one.ids.tick()
    assert one.state.health.pending == UNFREED_MAX // IDS_MAX
    one.publish(("more", b"more"))
    assert one.state.health.pending == UNFREED_MAX // IDS_MAX  # those on their way count, too
    one.state.is_away = False
    local.settle()
    one.publish(("more", b"more"))
    local.settle()
    assert one.target.bodies == [b"more"]
    other.publish(("0", b"0"))
    local.settle()
    assert other.target.bodies == [b"0"]


def test_a_replica_that_has_not_joined_lets_nothing_with_an_id_cross(local: LocalDatabase) -> None:
    """Its claims would not count."""
    one = Replica(local)
    one.membership._start_incarnation()
    assert one.publish(("i", b"1"), (None, b"2")).heard == {b"1": AWAY}
    assert one.target.bodies == [b"2"]


def test_odd_ids_and_malformed_ones(local: LocalDatabase) -> None:
    one = Replica(local)
    one.publish(("\ud800", b"1"), ("x" * 300, b"2"), ("once/x", b"3"))
    local.settle()
    assert one.target.bodies == [b"1", b"2", b"3"]
    source = Heard()
    batch = Batch(source, Monotonic(0.0))
    message = mqtt("a", b"4", properties=unreadable())
    entry = one.dispatcher.entry("mqtt", one.dispatcher.namespaces["mqtt"], message.address)
    one.dispatcher.publish(batch, entry, message, b"4")
    batch.send()
    assert source.heard[b"4"].reason is Reason.MALFORMED


def test_what_nobody_takes_is_free_again(local: LocalDatabase) -> None:
    one, other = Replica(local, target=Target(0)), Replica(local)
    told = one.publish(("i", b"1"))
    local.settle()
    assert told.heard[b"1"].verdict is Verdict.REJECTED
    local.settle()
    other.publish(("i", b"2"))
    local.settle()
    assert other.target.bodies == [b"2"]

"""Sessions: who owns them, what they hold, when they end, and their wills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.state.interface import (
    CLAIM_SECS,
    INCOMING,
    OUTGOING,
    AbsentSession,
    CancelOpening,
    ChangeSession,
    EarlierSession,
    EndSession,
    FindAbsent,
    FindOwned,
    FindSession,
    FindSuperseded,
    Heartbeat,
    JoinReplica,
    LeaveSession,
    LeftSession,
    NoticeSubject,
    OpenedSession,
    OpenSession,
    Operation,
    OperationOutcome,
    Owned,
    Owner,
    Packet,
    QuitReplica,
    Reap,
    ReleaseSession,
    SessionCounts,
    SessionKey,
    SettleWill,
    SharedFilters,
    UserSessions,
    WeighSessions,
    Weight,
    WillRecord,
)
from tests.state.conftest import KEY, PostgreSQLWorld, Replica, World

OTHER = SessionKey("mqtt", 'device \u20ac {"\\,\'$1" \n')
WEEK = 604_800.0
BYTES = 5


def opens(
    replica: Replica,
    *,
    key: SessionKey = KEY,
    clean: bool = False,
    expiry_secs: float = WEEK,
    will: WillRecord | None = None,
    user: str = "user",
    only_own: bool = False,
) -> OpenedSession:
    """Open a session, and accept its client."""
    found = replica.do(
        OpenSession(
            key,
            replica.name,
            user,
            "",
            clean,
            expiry_secs,
            f"queue-{replica.name}",
            will,
            only_own,
            BYTES,
        )
    )
    replica.do(ChangeSession(key, found.epoch, expiry_secs=expiry_secs))
    return found


def joins(replica: Replica) -> None:
    replica.do(JoinReplica(replica.name, replica.name, "host:1883", "1"))


def leaves(
    replica: Replica, epoch: int, *, discard_will: bool = False, expiry_secs: float = WEEK
) -> LeftSession:
    return replica.do(LeaveSession(KEY, epoch, expiry_secs, discard_will))


def test_a_new_session_has_nothing(one: Replica) -> None:
    found = opens(one)
    assert (found.present, found.queue, found.before, found.ended_queue) == (False, "queue-one", None, "")
    assert found.contents.subscriptions == {}
    view = one.ask(FindSession(KEY))
    assert view is not None
    assert (view.owner, view.holder) == (Owner("one", found.epoch), Owner("one", found.epoch))
    assert (view.connected, view.expires_in) == (True, None)
    assert one.ask(FindSession(OTHER)) is None


@pytest.mark.parametrize("key", [KEY, OTHER, SessionKey("", "x" * 65_535)])
def test_a_session_goes_on_at_another_replica_with_all_that_it_held(
    one: Replica, two: Replica, key: SessionKey
) -> None:
    epoch = opens(one, key=key).epoch
    packets = {
        (OUTGOING, 1): Packet((b"life", 7)),
        (OUTGOING, 2): Packet(None, released=True),
        (INCOMING, 65_535): Packet((b'\0\\"', 2**63 - 1)),
    }
    received = {(b"life", 0): 1, (b"life", 3): 2**64 - 1, (b"", 2**40): 1 << 63}
    one.do(ChangeSession(key, epoch, {"a/+": b"\1", 'b/"\\{}': b"", "c": b"x"}, packets, received))
    one.do(ChangeSession(key, epoch, {"c": None}, {(OUTGOING, 1): None}, {(b"life", 0): None}))
    found = opens(two, key=key)
    assert found.present
    assert found.before == Owner("one", epoch)
    assert found.queue == "queue-one"
    assert found.contents.subscriptions == {"a/+": b"\1", 'b/"\\{}': b""}
    assert found.contents.packets == {at: packets[at] for at in packets if at != (OUTGOING, 1)}
    assert found.contents.received == {at: received[at] for at in received if at != (b"life", 0)}


def test_keys_to_unbind_go_with_the_session(one: Replica, two: Replica) -> None:
    epoch = opens(one).epoch
    one.do(ChangeSession(KEY, epoch, unbindings={"a.b": True, "c": True}))
    one.do(ChangeSession(KEY, epoch, unbindings={"a.b": True, "c": False, "never": False}))
    found = opens(two)
    assert found.contents.unbindings == {"a.b"}
    waits = [
        two.send(ChangeSession(KEY, found.epoch, unbindings={"d": True})),
        two.send(OpenSession(KEY, "two", "user", "", False, WEEK, "unused")),
    ]
    _, again = [wait.result(30).value for wait in waits]
    assert isinstance(again, OpenedSession)
    assert again.contents.unbindings == {"a.b", "d"}
    assert opens(one, clean=True).contents.unbindings == set()
    assert opens(two).contents.unbindings == set()


def test_a_group_sees_its_own_changes_in_order(one: Replica) -> None:
    """Nothing is waited for in between, so they are likely to be one group."""
    first = opens(one).epoch
    waits = [
        one.send(ChangeSession(KEY, first, {"a": b"1", "b": b"1"})),
        one.send(OpenSession(KEY, "one", "user", "", False, WEEK, "unused")),
        one.send(ChangeSession(KEY, first, {"c": b"1"})),
        one.send(OpenSession(KEY, "one", "user", "", True, WEEK, "fresh")),
        one.send(OpenSession(KEY, "one", "user", "", False, WEEK, "another")),
    ]
    _, again, late, clean, last = [wait.result(30) for wait in waits]
    assert isinstance(again.value, OpenedSession)
    assert again.value.contents.subscriptions == {"a": b"1", "b": b"1"}
    assert late.verdict is OperationOutcome.FENCED
    assert isinstance(clean.value, OpenedSession)
    assert (clean.value.present, clean.value.ended_queue, clean.value.queue) == (False, "queue-one", "fresh")
    assert isinstance(last.value, OpenedSession)
    assert (last.value.present, last.value.ended_queue) == (False, "fresh"), "no client was accepted with it"
    assert first < again.value.epoch < clean.value.epoch < last.value.epoch


def test_a_frozen_owner_is_fenced_and_changes_nothing(one: Replica, two: Replica) -> None:
    old = opens(one).epoch
    new = opens(two).epoch
    for operation in (
        ChangeSession(KEY, old, {"a": b""}),
        ChangeSession(KEY, old),
        LeaveSession(KEY, old, 0.0, False),
        EndSession(KEY, old),
    ):
        assert one.reply(operation).verdict is OperationOutcome.FENCED
    two.do(ChangeSession(KEY, new))
    assert opens(two).contents.subscriptions == {}


def test_a_frozen_owner_is_fenced_after_its_session_began_anew(one: Replica, two: Replica) -> None:
    """The row was deleted in between: an epoch never comes again."""
    old = opens(one).epoch
    two.do(LeaveSession(KEY, opens(two).epoch, 0.0, True))
    assert one.ask(FindSession(KEY)) is None
    assert one.reply(ChangeSession(KEY, old, {"a": b""})).verdict is OperationOutcome.FENCED
    opens(two)
    assert one.reply(ChangeSession(KEY, old, {"a": b""})).verdict is OperationOutcome.FENCED


def test_the_owner_before_hears_and_releases_and_the_next_one_hears_that(one: Replica, two: Replica) -> None:
    old = opens(one).epoch
    new = opens(two).epoch
    assert one.heard(lambda notice: notice.event is NoticeSubject.TAKEN).key == KEY
    assert one.ask(FindSuperseded("one")) == [(KEY, old)]
    one.do(ReleaseSession(KEY, old, b"prints"))
    assert two.heard(lambda notice: notice.event is NoticeSubject.RELEASED).key == KEY
    view = two.ask(FindSession(KEY))
    assert view is not None
    assert (view.holder, view.given_back) == (Owner("two", new), b"prints")
    assert one.ask(FindSuperseded("one")) == []


def test_what_was_given_back_waits_for_the_next_owner(one: Replica, two: Replica) -> None:
    old = opens(one).epoch
    leaves(one, old)
    one.do(ReleaseSession(KEY, old, b"prints"))
    found = opens(two)
    assert (found.present, found.before, found.given_back) == (True, None, b"prints")
    two.do(ReleaseSession(KEY, old, b"late"))
    view = two.ask(FindSession(KEY))
    assert view is not None
    assert (view.holder, view.given_back) == (Owner("two", found.epoch), b"")


def test_only_the_owner_that_consumes_the_queue_releases_it(one: Replica, two: Replica) -> None:
    """A later owner, such as a client that was never accepted, may leave before it has consumed the queue."""
    old = opens(one).epoch
    found = opens(two)
    two.do(LeaveSession(KEY, found.epoch, WEEK, discard_will=True))
    two.do(ReleaseSession(KEY, found.epoch))
    assert opens(two).before == Owner("one", old)
    one.do(ReleaseSession(KEY, old, b"prints"))
    view = two.ask(FindSession(KEY))
    assert view is not None
    assert (view.holder, view.given_back) == (view.owner, b"prints")


def test_a_session_of_another_user_is_left_alone(one: Replica, two: Replica) -> None:
    epoch = opens(one, user="alice").epoch
    assert opens(two, user="bob", only_own=True).refused
    one.do(ChangeSession(KEY, epoch))
    assert not opens(two, user="alice", only_own=True).refused
    assert opens(two, key=OTHER, user="bob", only_own=True).epoch


@pytest.mark.parametrize(("secs", "present"), [(WEEK - 60, True), (WEEK + 1, False)])
def test_a_session_ends_by_the_database_s_clock(
    world: World, one: Replica, two: Replica, secs: float, present: bool
) -> None:
    epoch = opens(one).epoch
    one.do(ChangeSession(KEY, epoch, {"a": b""}))
    leaves(one, epoch)
    world.advance(secs)
    found = opens(two)
    assert found.present is present
    assert found.ended_queue == ("" if present else "queue-one")
    assert found.contents.subscriptions == ({"a": b""} if present else {})


def test_the_clock_of_a_replica_has_no_part(shared: PostgreSQLWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is two days late, as far as it knows."""
    one, two = shared.replica("one"), shared.replica("two")
    monkeypatch.setattr("gateway.clock.unix_time", lambda: 0.0)
    leaves(one, opens(one).epoch)
    assert opens(two).present
    assert one.do(Reap(60.0)) == []


def test_a_session_that_ends_with_its_connection_leaves_nothing(one: Replica) -> None:
    found = opens(one, expiry_secs=0.0)
    one.do(ChangeSession(KEY, found.epoch, {"a": b""}))
    assert found.queue == ""
    assert leaves(one, found.epoch, expiry_secs=0.0) == LeftSession(ended=True, publish_will=False)
    assert one.ask(FindSession(KEY)) is None
    assert opens(one).contents.subscriptions == {}


def test_a_repeated_end_of_a_connection_does_not_prolong_its_session(
    world: World, one: Replica, two: Replica
) -> None:
    """Its replica was frozen before it had the reply, and its queue is being deleted."""
    epoch = opens(one).epoch
    leaves(one, epoch)
    world.advance(WEEK + 1)
    (due,) = two.do(Reap(WEEK * 9))
    assert leaves(one, epoch) == LeftSession(ended=False, publish_will=False)
    two.do(EndSession(*due[:2]))
    assert two.ask(FindSession(KEY)) is None


def test_an_expired_session_is_reaped_once_and_again_if_nobody_ends_it(
    world: World, one: Replica, two: Replica
) -> None:
    epoch = opens(one).epoch
    leaves(one, epoch)
    assert one.do(Reap(60.0)) == []
    world.advance(WEEK + 1)
    (due,) = one.do(Reap(WEEK * 9))
    assert due == (KEY, epoch, "queue-one", None)
    assert two.do(Reap(WEEK * 9)) == []
    world.advance(CLAIM_SECS + 1)
    assert two.do(Reap(WEEK * 9)) == [due]
    two.do(EndSession(*due[:2]))
    assert one.ask(FindSession(KEY)) is None
    assert one.reply(EndSession(*due[:2])).verdict is OperationOutcome.FENCED


def test_a_client_that_comes_back_while_its_session_is_reaped(
    world: World, one: Replica, two: Replica
) -> None:
    leaves(one, opens(one).epoch)
    world.advance(WEEK + 1)
    (due,) = one.do(Reap(WEEK * 9))
    found = opens(two)
    assert (found.present, found.ended_queue, found.queue) == (False, "queue-one", "queue-two")
    assert one.reply(EndSession(*due[:2])).verdict is OperationOutcome.FENCED
    assert one.ask(FindSession(KEY)) is not None


class TestWills:
    """A will is published once, when it is due, by whoever claims it."""

    @pytest.mark.parametrize("expiry_secs", [0.0, WEEK])
    def test_claimed_before_the_client_comes_back(
        self, one: Replica, two: Replica, expiry_secs: float
    ) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 0.0), expiry_secs=expiry_secs).epoch
        leaves(one, epoch, expiry_secs=expiry_secs)
        found = opens(two)
        assert (found.wills, found.has_claimed_will, found.has_delayed_will) == ((), True, False)
        for is_settled in (False, True):
            view = two.ask(FindSession(KEY))
            assert view is not None
            assert view.has_claimed_will is not is_settled
            one.do(SettleWill(KEY, epoch))
        assert not opens(one).has_claimed_will

    def test_without_a_delay_who_has_lost_the_client_publishes(self, world: World, one: Replica) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 0.0)).epoch
        assert leaves(one, epoch).publish_will
        assert one.do(Reap(60.0)) == []
        world.advance(CLAIM_SECS + 1)  # it has not done so
        (due,) = one.do(Reap(WEEK))
        assert due == (KEY, epoch, "", b"bye")
        one.do(SettleWill(KEY, epoch))
        world.advance(CLAIM_SECS + 1)
        assert one.do(Reap(WEEK)) == []

    @pytest.mark.parametrize("delay", [0.0, 60.0])
    def test_a_repeated_end_of_a_connection_leaves_it_to_its_claimant(
        self, world: World, one: Replica, two: Replica, delay: float
    ) -> None:
        """The reply of the first was lost, and another replica publishes the will now."""
        epoch = opens(one, will=WillRecord(b"bye", delay)).epoch
        leaves(one, epoch)
        world.advance(delay + CLAIM_SECS + 1)
        assert [due.will for due in two.do(Reap(WEEK))] == [b"bye"]
        assert not leaves(one, epoch).publish_will
        two.do(SettleWill(KEY, epoch))
        world.advance(WEEK - CLAIM_SECS)
        assert not [due for due in one.do(Reap(WEEK * 9)) if due.will is not None]

    def test_discarded(self, world: World, one: Replica) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 5.0)).epoch
        assert not leaves(one, epoch, discard_will=True).publish_will
        world.advance(60)
        assert one.do(Reap(WEEK)) == []

    def test_delayed_and_the_client_comes_back(self, world: World, one: Replica, two: Replica) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 5.0)).epoch
        assert not leaves(one, epoch).publish_will
        assert one.do(Reap(60.0)) == []
        assert opens(two).present
        world.advance(60)
        assert one.do(Reap(WEEK)) == []

    @pytest.mark.parametrize("is_lost", [True, False])
    def test_delayed_and_the_client_comes_back_and_is_not_accepted(
        self, world: World, one: Replica, two: Replica, is_lost: bool
    ) -> None:
        epoch = opens(two, will=WillRecord(b"bye", 5.0)).epoch
        if is_lost:
            leaves(two, epoch)
        opened = opening("x", will=WillRecord(b"other", 0.0))
        assert one.do(opened).has_delayed_will
        one.do(CancelOpening(KEY, opened))
        assert two.do(Reap(WEEK)) == []
        world.advance(6)
        assert [due.will for due in two.do(Reap(WEEK))] == [b"bye"]

    def test_delayed_and_due(self, world: World, one: Replica, two: Replica) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 5.0)).epoch
        leaves(one, epoch)
        world.advance(6)
        assert [due.will for due in one.do(Reap(WEEK))] == [b"bye"]
        assert opens(two, clean=True).ended_queue == "queue-one"  # it is claimed: nobody else publishes it
        assert two.do(Reap(WEEK)) == []

    @pytest.mark.parametrize("clean", [True, False])
    @pytest.mark.parametrize("delay", [0.0, 5.0])
    def test_taken_over_while_connected(self, one: Replica, two: Replica, clean: bool, delay: float) -> None:
        epoch = opens(one, will=WillRecord(b"bye", delay)).epoch
        found = opens(two, clean=clean, will=WillRecord(b"other", 0.0))
        void = delay > 0 and not clean
        assert found.wills == (() if void else ((epoch, b"bye"),))
        assert two.do(Reap(60.0)) == []
        assert leaves(two, found.epoch).publish_will

    def test_claimed_by_who_opens_the_session_and_is_lost(
        self, world: World, one: Replica, two: Replica
    ) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 0.0)).epoch
        assert opens(two).wills == ((epoch, b"bye"),)
        assert opens(one).wills == ()
        world.advance(CLAIM_SECS + 1)
        assert [due.will for due in one.do(Reap(60.0))] == [b"bye"]

    @pytest.mark.parametrize("how", ["leaves", "is taken over", "dies"])
    def test_of_a_client_that_was_never_accepted(
        self, world: World, one: Replica, two: Replica, how: str
    ) -> None:
        joins(one)
        epoch = one.do(opening("x", will=WillRecord(b"bye", 0.0))).epoch
        if how == "leaves":
            assert leaves(one, epoch) == LeftSession(ended=False, publish_will=False)
        elif how == "is taken over":
            assert opens(two).wills == ()
        world.advance(CLAIM_SECS * 4)
        joins(two)
        for _ in range(2):
            assert [due.will for due in two.do(Reap(60.0)) if due.will is not None] == []
        assert opens(two, clean=True).wills == ()

    @pytest.mark.parametrize("delay", [0.0, 600.0])
    def test_outlives_its_session_and_the_client_comes_back(
        self, world: World, one: Replica, two: Replica, delay: float
    ) -> None:
        """A dead replica has left it, and it is due, but nobody has claimed it yet."""
        joins(one)
        epoch = opens(one, will=WillRecord(b"bye", delay), expiry_secs=0.0).epoch
        world.advance(61)
        joins(two)
        assert two.do(Reap(60.0)) == []
        found = opens(two, will=WillRecord(b"other", 0.0))
        assert (found.wills, found.has_delayed_will) == (((epoch, b"bye"),), False)
        assert two.do(Reap(60.0)) == []
        world.advance(CLAIM_SECS + 1)
        two.do(Heartbeat("two"))
        assert [due.will for due in two.do(Reap(60.0))] == [b"bye"]

    def test_no_later_than_the_end_of_the_session(self, world: World, one: Replica) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 600.0)).epoch
        assert not leaves(one, epoch, expiry_secs=60.0).publish_will
        world.advance(61)
        assert {due.will for due in one.do(Reap(WEEK))} == {b"bye", None}
        epoch = opens(one, expiry_secs=0.0, will=WillRecord(b"bye", 600.0)).epoch
        assert leaves(one, epoch, expiry_secs=0.0) == LeftSession(ended=True, publish_will=True)


def in_one_group(world: World, *operations: Operation[Any]) -> list[Any]:
    """Return what the operations of another replica reply that are committed together, in this order.

    PostgreSQL may commit them at the same time instead.
    """
    store = world.store()
    replica = Replica(store, "group")
    waits = [replica.send(operation) for operation in operations]
    store.start(lambda function: function(), replica.notices.put)
    try:
        return [replica.result(wait).value for wait in waits]
    finally:
        store.stop()


class TestReapingWithOthers:
    """One transaction reaps, and does before what the reaper would do."""

    def test_a_due_will_has_one_claim(self, world: World, one: Replica) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 5.0)).epoch
        leaves(one, epoch)
        world.advance(6)
        opened, reaped = in_one_group(world, opening("x"), Reap(WEEK))
        assert [*opened.wills, *(due[1:4:2] for due in reaped)] == [(epoch, b"bye")]

    def test_a_settled_will_does_not_come_back(self, world: World, one: Replica) -> None:
        epoch = opens(one, will=WillRecord(b"bye", 0.0)).epoch
        leaves(one, epoch)
        world.advance(CLAIM_SECS + 1)
        in_one_group(world, SettleWill(KEY, epoch), Reap(WEEK))
        world.advance(CLAIM_SECS + 1)
        assert one.do(Reap(WEEK)) == []

    def test_a_session_of_a_dead_replica_that_is_opened_again_stays(
        self, world: World, one: Replica, two: Replica
    ) -> None:
        joins(one)
        opens(one, will=WillRecord(b"bye", 0.0))
        world.advance(61)
        joins(two)
        opened, _ = in_one_group(world, replace(opening("x"), replica="two"), Reap(60.0, replica="two"))
        view = two.ask(FindSession(KEY))
        assert view is not None
        assert (view.connected, view.owner) == (True, Owner("two", opened.epoch))


def opening(
    name: str, *, queue: str = "queue-one", expiry_secs: float = WEEK, will: WillRecord | None = None
) -> OpenSession:
    """Return an operation of the replica "one"."""
    return OpenSession(KEY, "one", "user", "", False, expiry_secs, queue, will, opening=name)


class TestCancelledOpenings:
    """An opening without a reply is cancelled, and nothing else, whatever has happened to the session."""

    def test_a_session_that_it_has_created_ends(self, one: Replica) -> None:
        opened = opening("x")
        one.do(opened)
        assert one.do(CancelOpening(KEY, opened)) == LeftSession(ended=True, publish_will=False)
        assert one.do(CancelOpening(KEY, opened)) == LeftSession(ended=False, publish_will=False)
        assert one.ask(FindSession(KEY)) is None

    def test_an_earlier_session_continues(self, one: Replica, two: Replica) -> None:
        leaves(two, opens(two).epoch)
        opened = opening("x")
        one.do(opened)
        assert one.do(CancelOpening(KEY, opened)) == LeftSession(ended=False, publish_will=False)
        view = one.ask(FindSession(KEY))
        assert view is not None
        assert not view.connected

    @pytest.mark.parametrize("is_here", [True, False])
    def test_a_later_opening_stays(self, one: Replica, two: Replica, is_here: bool) -> None:
        """Also one by a replica of an earlier version, which leaves the name of the first."""
        will = WillRecord(b"bye", 0.0)
        lost = opening("x", will=will)
        one.do(lost)
        later = opening("y" if is_here else "x", will=will)
        epoch = one.do(later if is_here else replace(later, replica="two")).epoch
        assert one.do(CancelOpening(KEY, lost)) == LeftSession(ended=False, publish_will=False)
        view = one.ask(FindSession(KEY))
        assert view is not None
        assert (view.connected, view.owner.epoch) == (True, epoch)
        assert two.do(Reap(60.0)) == []
        one.do(ChangeSession(KEY, epoch, expiry_secs=WEEK))
        assert leaves(one, epoch).publish_will  # its own

    def test_one_that_was_not_committed(self, one: Replica) -> None:
        """The session of the client's earlier connection is left by another operation."""
        epoch = one.do(opening("before", will=WillRecord(b"bye", 0.0))).epoch
        one.do(ChangeSession(KEY, epoch, expiry_secs=WEEK))
        one.do(CancelOpening(KEY, opening("x", expiry_secs=0.0)))
        assert leaves(one, epoch).publish_will
        assert one.ask(FindSession(KEY)) is not None


class TestDeadReplicas:
    """A replica that is silent for too long loses its sessions."""

    @pytest.mark.parametrize("quits", [False, True])
    def test_its_sessions_are_left(self, world: World, one: Replica, two: Replica, quits: bool) -> None:
        joins(one)
        joins(two)
        epoch = opens(one, will=WillRecord(b"bye", 0.0)).epoch
        opens(one, key=OTHER, expiry_secs=0.0)
        mine = opens(two, key=SessionKey("mqtt", "another")).epoch
        if quits:
            one.do(QuitReplica("one"))
        else:
            world.advance(61)
            two.do(Heartbeat("two"))
        assert two.do(Reap(60.0)) == []
        assert [due.will for due in two.do(Reap(60.0))] == [b"bye"]
        assert one.reply(Heartbeat("one")).verdict is OperationOutcome.FENCED
        assert one.reply(ChangeSession(KEY, epoch, {"a": b""})).verdict is OperationOutcome.FENCED
        two.do(ChangeSession(SessionKey("mqtt", "another"), mine))
        view = two.ask(FindSession(KEY))
        assert view is not None
        assert (view.connected, view.holder) == (False, None)
        assert two.ask(FindSession(OTHER)) is None
        assert opens(two).before is None

    def test_a_heartbeat_keeps_it(self, world: World, one: Replica) -> None:
        joins(one)
        epoch = opens(one).epoch
        for _ in range(3):
            world.advance(40)
            one.do(Heartbeat("one"))
            one.do(Reap(60.0))
        one.do(ChangeSession(KEY, epoch))

    def test_more_than_one_turn_takes(self, world: World, one: Replica, two: Replica) -> None:
        joins(one)
        for number in range(25):
            opens(one, key=SessionKey("mqtt", str(number)))
        world.advance(61)
        joins(two)
        for _ in range(3):
            two.do(Reap(60.0, limit=10))
        assert not any(
            view is None or view.connected
            for view in (two.ask(FindSession(SessionKey("mqtt", str(number)))) for number in range(25))
        )


def test_the_clients_of_a_replica_are_listed_page_by_page(one: Replica, two: Replica) -> None:
    keys = [SessionKey("mqtt", f"{number:02}") for number in range(25)]
    epochs = {key: opens(one, key=key).epoch for key in keys}
    opens(two, key=keys[3])
    one.do(LeaveSession(keys[7], epochs[keys[7]], WEEK, True))
    found: list[Owned] = []
    page: list[Owned] | None = None
    while page is None or page:
        page = one.ask(FindOwned("one", found[-1].key if found else SessionKey("", ""), 10))
        found += page
    wanted = [key for key in keys if key not in (keys[3], keys[7])]
    assert found == [Owned(key, epochs[key], WEEK, "queue-one") for key in wanted]


def test_what_each_user_has_elsewhere_is_summed(one: Replica, two: Replica, world: World) -> None:
    joins(one)
    joins(two)
    epoch = opens(one).epoch
    one.do(ChangeSession(KEY, epoch, {"a": b"", "b": b""}, weight=Weight(2, 50)))
    opens(one, key=OTHER, user="another")
    mine, others = UserSessions(1, 2, 50), UserSessions(1, 0, BYTES)
    assert one.ask(WeighSessions("one")) == SessionCounts(2, {})
    assert two.ask(WeighSessions("one")) == SessionCounts(2, {})
    assert two.ask(WeighSessions("two")) == SessionCounts(2, {"user": mine, "another": others})
    leaves(one, epoch)
    assert one.ask(WeighSessions("one")) == SessionCounts(2, {"user": mine})
    found = opens(two)
    assert found.earlier == EarlierSession("user", Weight(2, 50), False)
    assert two.ask(WeighSessions("two")) == SessionCounts(2, {"another": others})
    assert opens(two, clean=True).earlier == EarlierSession("user", Weight(2, 50), True)
    assert one.ask(WeighSessions("one")) == SessionCounts(2, {"user": UserSessions(1, 0, BYTES)})
    world.advance(61)
    one.do(JoinReplica("three", "three", "host:1883", "1"))
    one.do(Reap(60.0))  # both replicas are dead: nobody has the sessions, and they count
    assert one.ask(WeighSessions("one")).elsewhere == {"user": UserSessions(1, 0, BYTES), "another": others}


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("secs", [CLAIM_SECS - 1.0, CLAIM_SECS + 1.0])
def test_a_will_whose_claim_has_run_out_is_published_by_the_next_owner(
    one: Replica, two: Replica, world: World, secs: float, clean: bool
) -> None:
    """The replica that had claimed it has failed; the client's next messages must come behind the will."""
    epoch = opens(one, will=WillRecord(b"bye", 0.0)).epoch
    assert leaves(one, epoch).publish_will
    world.advance(secs)
    found = opens(two, clean=clean)
    is_over = secs > CLAIM_SECS
    assert (found.wills, found.has_claimed_will) == (((epoch, b"bye"),) if is_over else (), not is_over)
    assert one.do(Reap(None)) == []
    world.advance(CLAIM_SECS + 1.0)
    assert [(work.epoch, work.will) for work in one.do(Reap(None)) if work.will] == [(epoch, b"bye")]


def test_a_will_whose_claim_has_run_out_is_left_to_its_replica_if_that_may_be_late(
    one: Replica, two: Replica, world: World
) -> None:
    epoch = opens(one, will=WillRecord(b"bye", 0.0)).epoch
    assert leaves(one, epoch).publish_will
    world.advance(CLAIM_SECS + 1.0)
    assert not [work for work in two.do(Reap(None, reclaims_wills=False)) if work.will]
    found = two.do(OpenSession(KEY, "two", "user", "", False, WEEK, "queue-two", reclaims_wills=False))
    assert (found.wills, found.has_claimed_will) == ((), True)
    one.do(SettleWill(KEY, epoch))
    assert not opens(two).wills


def test_wills_are_summed_with_the_sessions_of_their_users(one: Replica, two: Replica, world: World) -> None:
    delayed = WillRecord(b"bye", 60.0, 1_000)

    def bytes_elsewhere(replica: Replica) -> int:
        return one.ask(WeighSessions(replica.name)).elsewhere.get("user", UserSessions()).byte_count

    epoch = opens(one, will=delayed).epoch
    assert (bytes_elsewhere(one), bytes_elsewhere(two)) == (0, BYTES + 1_000)
    leaves(one, epoch)
    assert (bytes_elsewhere(one), bytes_elsewhere(two)) == (BYTES + 1_000, BYTES + 1_000)
    found = opens(two, will=WillRecord(b"bye", 0.0, 300))
    assert found.earlier == EarlierSession("user", Weight(0, BYTES + 1_000), False)
    assert (bytes_elsewhere(one), bytes_elsewhere(two)) == (BYTES + 300, 0)  # the delayed one is void
    leaves(two, found.epoch, discard_will=True)
    assert bytes_elsewhere(one) == BYTES
    epoch = opens(one, will=delayed).epoch
    leaves(one, epoch, expiry_secs=30.0)
    world.advance(31.0)
    assert [work.will for work in one.do(Reap(None))] == [b"bye", None]
    one.do(EndSession(KEY, epoch))
    assert bytes_elsewhere(one) == 1_000  # until it is published
    one.do(SettleWill(KEY, epoch))
    assert bytes_elsewhere(one) == 0


def test_a_will_that_is_being_published_makes_no_room(one: Replica, two: Replica) -> None:
    """It does not count any more for the session: a client could subtract it once for each connection."""
    epoch = opens(one, will=WillRecord(b"bye", 0.0, 1_000)).epoch
    assert leaves(one, epoch).publish_will
    will = WillRecord(b"bye", 0.0, 101)
    session = OpenSession(KEY, "two", "user", "", False, WEEK, "queue-two", will, False, BYTES, "", 100)
    assert two.do(session).refused
    assert opens(two).earlier == EarlierSession("user", Weight(0, BYTES), False)


@pytest.mark.parametrize("clean", [False, True])
def test_a_will_that_exceeds_its_room_opens_nothing(one: Replica, two: Replica, clean: bool) -> None:
    def opens_with(byte_count: int, user: str = "user") -> OpenedSession:
        will = WillRecord(b"bye", 0.0, byte_count)
        session = OpenSession(KEY, "two", user, "", clean, WEEK, "queue-two", will, False, BYTES, "", 100)
        return two.do(session)

    assert opens_with(101).refused
    assert one.ask(FindSession(KEY)) is None
    epoch = opens(one, will=WillRecord(b"bye", 0.0, 1_000)).epoch
    for refused in (opens_with(1_101), opens_with(101, "another")):  # the earlier one of the user is replaced
        assert refused.refused
    view = one.ask(FindSession(KEY))
    assert view is not None
    assert view.owner.epoch == epoch
    assert not opens_with(1_100).refused


def test_shared_filters_are_listed_page_by_page(one: Replica) -> None:
    filters = [f"$share/g/{number}" for number in range(5)]
    one.do(ChangeSession(KEY, opens(one).epoch, {**dict.fromkeys(filters, b""), "other": b""}))
    assert one.ask(SharedFilters(limit=3)) == filters[:3]
    assert one.ask(SharedFilters(filters[2], limit=3)) == filters[3:]


def test_absent_sessions_are_listed_page_by_page_with_their_subscriptions(one: Replica) -> None:
    keys = [SessionKey("mqtt", f"{number}") for number in range(5)]
    epochs = {key: opens(one, key=key).epoch for key in keys}
    for key in keys[:4]:
        one.do(ChangeSession(key, epochs[key], {f"a/{key.client}": b"1", "b": b"2"}))
    for key in keys[1:]:
        one.do(LeaveSession(key, epochs[key], WEEK, True))
    subscribed = [
        AbsentSession(key, epochs[key], "user", "queue-one", {f"a/{key.client}": b"1", "b": b"2"})
        for key in keys[1:4]
    ]
    found = one.ask(FindAbsent(SessionKey("", ""), 2))
    assert found == subscribed[:2]
    rest = [subscribed[2], AbsentSession(keys[4], epochs[keys[4]], "user", "queue-one", {})]
    assert one.ask(FindAbsent(found[-1].key, 3)) == rest
    epoch = opens(one, key=keys[1]).epoch  # it has returned: a review that is late changes nothing
    assert one.reply(ChangeSession(keys[1], epochs[keys[1]], {"b": None})).verdict is OperationOutcome.FENCED
    one.do(ChangeSession(keys[1], epoch, {"b": None}))

"""Shared subscriptions whose members end, or are lost while the disk is full: others get what is owed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.broker.mqtt.ended_sessions import ENDED, _parse_log_name
from gateway.broker.mqtt.namespace import SessionShares
from gateway.broker.mqtt.session import Session, SubscriptionOptions
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.protocols.mqtt.dialect import topic_address
from tests.broker.mqtt.test_durable_sessions import World
from tests.broker.parts import Connection, Space, connected, mqtt, publish
from tests.store.crashes import Crashes

SHARED = "$share/g/a/#"
OLD = 1.0  # a time that is over by the namespace's clock


@pytest.fixture
def crashes() -> Iterator[Crashes]:
    made = Crashes()
    yield made
    made.check()


def numbered(count: int, first: int = 0, qos: int = 1) -> list[Message]:
    return [mqtt("a/b", b"%d" % at, qos) for at in range(first, first + count)]


def give(world: World, messages: list[Message]) -> None:
    """All in one batch, all accepted."""
    (sink,) = world.space.sinks(topic_address("a/b"))
    told = publish(sink, messages)
    assert world.one.commit() is ACCEPTED
    assert told.outcomes == [ACCEPTED] * len(messages)


def away(world: World, *names: str, qos: int = 1) -> list[Session]:
    found = []
    for name in names:
        session = world.session(name, SHARED, qos=qos)
        connected(session)
        session.detach()
        world.space.detach_session(session, 1e9)
        found.append(session)
    return found


def clean_start(world: World, session: Session) -> None:
    world.space.open(session.client_id, clean=True, expiry_secs=60.0)


def deletion(world: World, session: Session) -> None:
    world.space.discard(session)


def expiry(world: World, session: Session) -> None:
    session.expires_at = OLD
    world.space.expire(OLD)


def eviction(world: World, session: Session) -> None:
    world.space._away.remove(session)
    session.expires_at = OLD
    world.space._away.add(session)
    world.space._shares = SessionShares()
    world.space.sessions_max = len(world.space.sessions)
    assert world.space.make_room("", "") == ""
    assert world.space.evicted == 1


ENDS = [clean_start, deletion, expiry, eviction]
End = Callable[[World, Session], None]


def settle(world: World) -> None:
    """The clock ticks until nothing is left of sessions that have ended."""
    ended = world.space._ended
    assert ended is not None

    def done() -> bool:
        world.space.expire(0.0)
        return not len(ended)

    world.one.until(done)
    assert world.one.commit() is ACCEPTED


def received(world: World, session: Session, count: int, crashes: Crashes | None = None) -> list[int]:
    """The client returns and acknowledges `count` messages."""
    outlet = connected(session, receive_maximum=1_000)
    world.one.until(lambda: len(outlet.rows) >= count)
    found = [int(row.message.body) for row in outlet.rows]
    for row in outlet.rows:
        if crashes is not None:
            crashes.settled.add(bytes(row.message.body))
        session.complete_delivery(row.packet_id)
    session.pump()
    assert world.one.commit() is ACCEPTED
    return sorted(found)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("restart", [False, True])
def test_who_is_left_gets_what_an_ended_session_was_owed(
    tmp_path: Path, crashes: Crashes, end: End, restart: bool
) -> None:
    with World(tmp_path, crashes=crashes) as world:
        first, second = away(world, "A", "B")
        give(world, numbered(10))
        assert (len(first), len(second)) == (5, 5)
        settle(world)
        end(world, first)
        if restart:
            assert world.one.commit() is ACCEPTED
        else:
            settle(world)
            assert received(world, second, 10, crashes) == list(range(10))
        assert world.space.tally.unshared == 0
    if restart:
        with World(tmp_path, crashes=crashes) as world:
            settle(world)
            assert received(world, world.space.sessions["B"], 10, crashes) == list(range(10))
            assert [log.name for log in world.one.store.logs() if log.kind == ENDED] == []


@pytest.mark.parametrize("end", ENDS)
def test_what_was_read_from_the_disk_before_goes_to_others_too(
    tmp_path: Path, crashes: Crashes, end: End
) -> None:
    """Half of it is in memory, some of that in flight; QoS 2 that was sent is nobody else's."""
    with World(tmp_path, crashes=crashes, memory_messages_max=4) as world:
        first, second = away(world, "A", "B", qos=2)
        give(world, [*numbered(20), *numbered(20, 20, qos=2)])
        outlet = connected(first, receive_maximum=12)
        world.one.until(lambda: len(outlet.rows) == 12)
        sent = {int(row.message.body) for row in outlet.rows if row.qos == 2}
        first.detach()
        world.space.detach_session(first, 1e9)
        crashes.settled |= {b"%d" % number for number in sent}
        end(world, first)
        settle(world)
        assert received(world, second, 40 - len(sent), crashes) == sorted(set(range(40)) - sent)
        assert world.space.tally.unshared == len(sent)


@pytest.mark.parametrize("stored", [True, False])
def test_what_is_in_flight_at_qos_2_ends_with_its_session_and_is_counted(
    tmp_path: Path, stored: bool
) -> None:
    """No other member may get it. What the client has acknowledged by PUBREC is no loss, nor is its own."""
    with World(tmp_path) as world:
        space = world.space if stored else Space()
        session = space.session("A", SHARED, qos=2)
        space.session("A", "own", qos=2)
        outlet = connected(session, 10)
        for topic, messages in (("own", [mqtt("own", b"own", 2)]), ("a/b", numbered(5, qos=2))):
            (sink,) = space.sinks(topic_address(topic))
            publish(sink, messages)
        assert world.one.commit() is ACCEPTED
        session.pump()
        assert len(outlet.rows) == 6
        session.handle_pubrec(outlet.rows[1].packet_id)
        session.detach()
        space.discard(session)
        assert space.tally.unshared == 4


def send_first_of_two(world: World, qos: int = 2) -> None:
    """The client of A is sent one message, and one more waits; both clients disconnect."""
    first = world.session("A", SHARED, qos=qos)
    outlet = connected(first, 1)
    give(world, numbered(2, qos=qos))
    first.pump()
    assert [int(row.message.body) for row in outlet.rows] == [0]
    away(world, "B", qos=qos)
    first.detach()
    world.space.detach_session(first, 1e9)
    assert world.one.commit() is ACCEPTED


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_was_sent_at_qos_2_is_nobody_elses_after_a_restart(
    tmp_path: Path, crashes: Crashes, end: End, restarts: int, qos: int
) -> None:
    """With two restarts, the second one comes before others have got what the session left."""
    with World(tmp_path, crashes=crashes) as world:
        send_first_of_two(world, qos)
        if qos == 2:
            crashes.settled.add(b"0")
        if not restarts:
            end(world, world.space.sessions["A"])
    if restarts:
        with World(tmp_path, crashes=crashes) as world:
            world.space.begin(1.0)
            end(world, world.space.sessions["A"])
            if restarts == 2:
                world.space._ended = None  # nobody reads the log
    with World(tmp_path, crashes=crashes) as world:
        settle(world)
        others = [1] if qos == 2 else [0, 1]
        assert received(world, world.space.sessions["B"], len(others), crashes) == others


@pytest.mark.parametrize("end", ENDS)
def test_what_was_sent_at_qos_2_before_a_restart_is_counted(
    tmp_path: Path, crashes: Crashes, end: End
) -> None:
    with World(tmp_path, crashes=crashes) as world:
        send_first_of_two(world)
        crashes.settled.add(b"0")
    with World(tmp_path, crashes=crashes) as world:
        world.space.begin(1.0)
        end(world, world.space.sessions["A"])
        settle(world)
        assert world.space.tally.unshared == 1
        assert len(world.space.sessions["B"]) == 1


@pytest.mark.parametrize("qos", [1, 2])
def test_after_a_kill_all_that_was_stored_may_have_been_sent(
    tmp_path: Path, crashes: Crashes, qos: int
) -> None:
    with World(tmp_path, crashes=crashes) as world:
        first = world.session("A", SHARED, qos=qos)
        connected(first, 1)
        give(world, numbered(2, qos=qos))
        first.pump()
        away(world, "B", qos=qos)
        assert world.one.commit() is ACCEPTED
        if qos == 2:
            crashes.settled |= {b"0", b"1"}
    with World(tmp_path, crashes=crashes) as world:
        world.space.begin(1.0)
        deletion(world, world.space.sessions["A"])
        settle(world)
        assert world.space.tally.unshared == (2 if qos == 2 else 0)
        assert len(world.space.sessions["B"]) == (0 if qos == 2 else 2)


def test_what_waits_for_its_second_sending_is_nobody_elses(tmp_path: Path, crashes: Crashes) -> None:
    """The client returns after a restart with a smaller Receive Maximum, and is lost again."""
    with World(tmp_path, crashes=crashes) as world:
        first = world.session("A", SHARED, qos=2)
        outlet = connected(first, 2)
        give(world, numbered(3, qos=2))
        first.pump()
        assert len(outlet.rows) == 2
        first.detach()
        world.space.detach_session(first, 1e9)
        assert world.one.commit() is ACCEPTED
    with World(tmp_path, crashes=crashes) as world:
        world.space.begin(1.0)
        again = world.space.sessions["A"]
        outlet = connected(again, 1)
        world.one.until(lambda: len(outlet.rows) == 1)
        other = connected(world.session("B", SHARED, qos=2))
        again.detach()
        world.space.requeue_shared(again)
        assert world.one.commit() is ACCEPTED
        assert [int(row.message.body) for row in other.rows] == [2]
        outlet = connected(again)
        world.one.until(lambda: len(outlet.rows) == 2)
        assert [(int(row.message.body), row.dup) for row in outlet.rows] == [(0, True), (1, True)]
        assert world.space.tally.unshared == 0


def test_what_is_not_of_a_group_ends_with_the_session(tmp_path: Path, crashes: Crashes) -> None:
    with World(tmp_path, crashes=crashes) as world:
        first, second = away(world, "A", "B")
        world.session("A", "own")
        (sink,) = world.space.sinks(topic_address("own"))
        publish(sink, [mqtt("own", b"own")])
        give(world, numbered(2))
        crashes.settled.add(b"own")
        deletion(world, first)
        settle(world)
        assert received(world, second, 2, crashes) == [0, 1]
        assert world.space.tally.unshared == 0


@pytest.mark.parametrize("stored", [True, False])
def test_with_no_member_left_it_is_counted(tmp_path: Path, stored: bool) -> None:
    with World(tmp_path) as world:
        space = world.space if stored else Space()
        session = space.session("A", SHARED)
        connected(session, 1)
        session.detach()
        (sink,) = space.sinks(topic_address("a/b"))
        publish(sink, numbered(5))
        assert world.one.commit() is ACCEPTED
        space.discard(session)
        if stored:
            settle(world)
        assert space.tally.unshared == 5


def test_a_full_member_gets_it_when_it_has_room(tmp_path: Path, crashes: Crashes) -> None:
    with World(tmp_path, crashes=crashes, messages_max=8) as world:
        first, second = away(world, "A", "B")
        give(world, numbered(14))
        assert (len(first), len(second)) == (7, 7)
        deletion(world, first)
        world.space.expire(0.0)
        world.one.until(lambda: len(second) == 8)
        assert world.one.commit() is ACCEPTED
        found: list[int] = []
        while len(found) < 14:
            found += received(world, second, 1, crashes)
            second.detach()
            world.space.expire(0.0)
            world.one.until(lambda: len(second)) if len(found) < 14 else None
        assert sorted(found) == list(range(14))
        assert world.space.tally.unshared == 0


def in_memory(world: World, name: str, messages_max: int, receive_maximum: int) -> tuple[Session, Connection]:
    """A connected member that ends with the process."""
    session = world.space.session(name, SHARED, persistent=False)
    session.limits = replace(session.limits, messages_max=messages_max)
    return session, connected(session, receive_maximum)


def test_a_member_in_memory_that_fills_up_gets_each_message_of_two_ended_sessions_once(
    tmp_path: Path, crashes: Crashes
) -> None:
    """It accepts at once, while what was read of the first log is still being passed on."""
    with World(tmp_path, crashes=crashes) as world:
        first, second = away(world, "A", "B")
        give(world, numbered(60))
        crashes.settled |= {b"%d" % number for number in range(60)}
        member, outlet = in_memory(world, "C", 10, receive_maximum=1)
        deletion(world, first)
        deletion(world, second)
        found: list[int] = []
        while len(found) < 60:
            world.space.expire(0.0)
            assert world.one.commit() is ACCEPTED  # what is read now is passed on in this turn
            for row in outlet.rows[len(found) :]:
                found.append(int(row.message.body))
                member.complete_delivery(row.packet_id)
                member.pump()
        assert sorted(found) == list(range(60))
        assert world.space.tally.unshared == 0
        settle(world)


def test_what_the_disk_refuses_for_one_ended_session_is_not_taken_from_another(
    tmp_path: Path, crashes: Crashes
) -> None:
    """One member is in memory and accepts at once, the other one's disk fails."""
    with World(tmp_path, crashes=crashes) as world:
        first, second = away(world, "A", "B")
        give(world, numbered(60))
        _, outlet = in_memory(world, "C", 1_000, receive_maximum=1_000)
        stored = world.session("D", SHARED)
        other = connected(stored, 1_000)
        crashes.settled |= {b"%d" % number for number in range(60)}
        assert world.one.commit() is ACCEPTED
        deletion(world, first)
        deletion(world, second)
        world.space.expire(0.0)
        world.one.until(lambda: outlet.rows)
        world.fail()
        world.one.store.flush()
        world.one.until_healthy(False)
        world.disk.fault = ""
        world.one.until_healthy(True)
        settle(world)
        found = [int(row.message.body) for row in (*outlet.rows, *other.rows)]
        assert sorted(set(found)) == list(range(60))
        assert world.space.tally.unshared == 0


@pytest.mark.parametrize("end", ENDS)
def test_what_was_owed_before_an_unsubscribe_goes_to_others_after_a_restart(
    tmp_path: Path, crashes: Crashes, end: End
) -> None:
    with World(tmp_path, crashes=crashes) as world:
        first, _ = away(world, "A", "B")
        give(world, numbered(20))
        world.space.unsubscribe(first, SHARED)
        assert world.one.commit() is ACCEPTED
    with World(tmp_path, crashes=crashes) as world:
        first, second = (world.space.sessions[name] for name in "AB")
        assert len(first) == 10
        end(world, first)
        settle(world)
        assert received(world, second, 20, crashes) == list(range(20))
        assert world.space.tally.unshared == 0


@pytest.mark.parametrize("shared", [False, True])
def test_after_a_restart_only_logs_with_messages_of_a_group_outlive_their_sessions(
    tmp_path: Path, shared: bool
) -> None:
    with World(tmp_path) as world:
        session = world.session("A", SHARED if shared else "a/#")
        connected(session).congested = True
        session.detach()
        give(world, numbered(3))
        for topic_filter in list(session.subscriptions):
            world.space.unsubscribe(session, topic_filter)
        assert world.one.commit() is ACCEPTED
    with World(tmp_path) as world:
        world.space.discard(world.space.sessions["A"])
        assert len(world.space._ended or ()) == shared
        settle(world)
        assert world.space.tally.unshared == (3 if shared else 0)
        assert [log.kind for log in world.one.store.logs() if log.kind in ("session", ENDED)] == []


# A full disk.


@pytest.mark.parametrize("known", [True, False], ids=["known to be full", "full since just now"])
def test_a_member_is_lost_while_the_disk_is_full(tmp_path: Path, crashes: Crashes, known: bool) -> None:
    with World(tmp_path, crashes=crashes) as world:
        lost = world.session("a", SHARED)
        connected(lost, 10)
        give(world, numbered(20))
        assert (len(lost.in_flight), len(lost)) == (10, 10)
        other = world.session("b", SHARED)
        outlet = connected(other)
        world.fail()
        if known:
            world.one.store.put("x", "y", b"")
            world.one.store.flush()
            world.one.until_healthy(False)
        lost.detach()
        world.space.requeue_shared(lost)
        world.one.store.flush()
        if not known:
            world.one.until_healthy(False)
            world.one.until(lambda: len(lost) + len(lost.in_flight) == 20)
        assert len(lost) + len(lost.in_flight) == 20
        world.disk.fault = ""
        world.one.until_healthy(True)
        world.space.expire(0.0)
        assert world.one.commit() is ACCEPTED
        bodies = {int(row.message.body) for row in outlet.rows}
        assert bodies == set(range(20))
        assert (len(lost), len(lost.in_flight)) == (0, 0)
    with World(tmp_path, crashes=crashes) as world:
        assert received(world, world.space.sessions["b"], 20, crashes) == list(range(20))
        assert len(world.space.sessions["a"]) == 0


def test_a_member_that_returns_before_the_disk_is_well_gets_its_own_again(
    tmp_path: Path, crashes: Crashes
) -> None:
    with World(tmp_path, crashes=crashes) as world:
        lost = world.session("a", SHARED)
        first = connected(lost, 3)
        give(world, numbered(6))
        connected(world.session("b", SHARED))
        world.fail()
        lost.detach()
        world.space.requeue_shared(lost)
        world.one.store.flush()
        world.one.until_healthy(False)
        world.one.until(lambda: len(lost) + len(lost.in_flight) == 6)
        again = connected(lost, 10)
        world.one.until(lambda: len(again.rows) == 6)
        assert [(int(body), packet_id, dup) for body, _, packet_id, dup in again.said] == [
            (number, number + 1, number < 3) for number in range(6)
        ]
        assert first.said[0][2] == 1
        world.disk.fault = ""
        world.one.until_healthy(True)


@pytest.mark.parametrize("granted", [1, 2])
@pytest.mark.parametrize("full", [True, False])
def test_quality_2_is_not_passed_on_before_it_is_on_disk(tmp_path: Path, granted: int, full: bool) -> None:
    """Its publisher would repeat what the disk refuses, and the other client would have it twice."""
    with World(tmp_path) as world:
        lost = world.session("a", SHARED, qos=granted)
        connected(lost, 1)
        (sink,) = world.space.sinks(topic_address("a/b"))
        told = publish(sink, numbered(3, qos=2))
        outlet = connected(world.space.session("b", SHARED, qos=2, persistent=False))
        if full:
            world.fail()
        lost.detach()
        world.space.requeue_shared(lost)
        assert outlet.rows == []
        if full:
            world.one.store.flush()
            world.one.until_healthy(False)
            world.one.until(lambda: len(told.outcomes) == 3)
            assert ACCEPTED not in told.outcomes
            assert (outlet.rows, len(lost), len(lost.in_flight)) == ([], 0, 0)
        else:
            assert world.one.commit() is ACCEPTED
            assert {int(row.message.body) for row in outlet.rows} == {0, 1, 2}
        world.disk.fault = ""
        world.one.until_healthy(True) if full else world.one.commit()


def test_what_was_sent_and_then_refused_is_not_passed_on(tmp_path: Path) -> None:
    """Its publisher repeats it, and the other client would have it twice."""
    with World(tmp_path) as world:
        lost = world.session("a", SHARED, qos=1)
        outlet = connected(lost, 9)
        (sink,) = world.space.sinks(topic_address("a/b"))
        publish(sink, numbered(1, qos=2))
        assert world.one.commit() is ACCEPTED
        world.fail()
        told = publish(sink, numbered(2, first=1, qos=2))
        assert len(outlet.rows) == 3
        world.one.store.flush()
        world.one.until_healthy(False)
        world.one.until(lambda: len(told.outcomes) == 2)
        world.disk.fault = ""
        world.one.until_healthy(True)
        other = connected(world.space.session("b", SHARED, qos=2, persistent=False))
        lost.detach()
        world.space.requeue_shared(lost)
        assert world.one.commit() is ACCEPTED
        assert [int(row.message.body) for row in other.rows] == [0]
        again = connected(lost, 9)
        assert [(int(body), dup) for body, _, _, dup in again.said] == [(1, True), (2, True)]
        lost.complete_delivery(again.said[0][2])
        lost.complete_delivery(again.said[1][2])


def test_what_waits_for_its_commit_is_passed_on_with_the_log_of_an_ended_session(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        lost = world.session("a", SHARED, qos=2)
        connected(lost, 1)
        (sink,) = world.space.sinks(topic_address("a/b"))
        publish(sink, numbered(3, qos=2))
        outlet = connected(world.space.session("b", SHARED, qos=2, persistent=False))
        lost.detach()
        world.space.requeue_shared(lost)
        world.space.discard(lost)
        settle(world)
        assert [int(row.message.body) for row in outlet.rows] == [0, 1, 2]


def test_what_waited_for_its_commit_stays_if_nobody_takes_it(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        lost = world.session("a", SHARED, qos=2)
        connected(lost, 1)
        (sink,) = world.space.sinks(topic_address("a/b"))
        publish(sink, numbered(3, qos=2))
        other = world.space.session("b", SHARED, qos=2, persistent=False)
        connected(other)
        lost.detach()
        world.space.requeue_shared(lost)
        other.detach()
        world.space.discard(other)
        assert world.one.commit() is ACCEPTED
        assert len(lost) == 3
        assert received(world, lost, 3) == [0, 1, 2]


@pytest.mark.parametrize("known", [True, False], ids=["known to be full", "full since just now"])
def test_a_session_in_memory_ends_while_the_disk_is_full(tmp_path: Path, known: bool) -> None:
    with World(tmp_path) as world:
        lost = world.space.session("a", SHARED, persistent=False)
        connected(lost, 2)
        (sink,) = world.space.sinks(topic_address("a/b"))
        publish(sink, numbered(4))
        outlet = connected(world.session("b", SHARED))
        assert world.one.commit() is ACCEPTED
        world.fail()
        if known:
            world.one.store.put("x", "y", b"")
            world.one.store.flush()
            world.one.until_healthy(False)
        lost.detach()
        world.space.discard(lost)
        world.one.store.flush()
        if not known:
            world.one.until_healthy(False)
            world.one.until(lambda: len(world.space._leftovers) == 4)
        world.disk.fault = ""
        world.one.until_healthy(True)
        world.space.expire(0.0)
        assert world.one.commit() is ACCEPTED
        assert {int(row.message.body) for row in outlet.rows} == {0, 1, 2, 3}
        assert world.space.tally.unshared == 0


# Shares of users.


def full(world: World, name: str, topic_filter: str = SHARED, user: str = "") -> Session:
    """A session away that has as many messages as it may."""
    session, _ = world.space.open(name, clean=True, expiry_secs=60.0, user=user)
    world.space.subscribe(session, topic_filter, SubscriptionOptions(1))
    connected(session)
    session.detach()
    world.space.detach_session(session, 1e9)
    return session


def give_to(world: World, topic: str, count: int) -> None:
    (sink,) = world.space.sinks(topic_address(topic))
    publish(sink, [mqtt(topic, b"%d" % at) for at in range(count)])
    assert world.one.commit() is ACCEPTED


def ended_bodies(world: World) -> list[str]:
    """Clients whose logs are left, the oldest first."""
    return [_client(log.name) for log in world.one.store.logs() if log.kind == ENDED]


def _client(name: str) -> str:
    client = json.loads(name)[0]
    assert isinstance(client, str)
    return client


def quiet(world: World) -> None:
    """Have the last sessions end, so that what has ended is dropped."""
    for session in list(world.space.sessions.values()):
        world.space.discard(session)
    settle(world)


@pytest.mark.parametrize("restart", [False, True])
def test_logs_of_ended_sessions_beyond_the_share_of_their_user_are_dropped(
    tmp_path: Path, restart: bool
) -> None:
    with World(tmp_path, messages_max=10) as world:
        settle(world)
        member = full(world, "B", user="mallory")
        give_to(world, "a/b", 10)
        assert member.full
        shares = world.space._ended.shares  # type: ignore[union-attr]
        for name, user in (("other", "alice"), ("A0", "mallory"), ("A1", "mallory"), ("A2", "mallory")):
            session = full(world, name, user=user)
            give_to(world, "a/b", 10)
            assert len(session) == 10
            world.space.discard(session)
            assert world.one.commit() is ACCEPTED
        assert shares.count == 4
        byte_count = shares.of("alice")
        assert shares.total == 4 * byte_count > 0
        assert shares.of("mallory") == 3 * byte_count
        if not restart:
            shares.set_limits(4, 1 << 30)
            session = full(world, "A3", user="mallory")
            give_to(world, "a/b", 10)
            world.space.discard(session)
            assert world.one.commit() is ACCEPTED
            assert ended_bodies(world) == ["other", "A1", "A2", "A3"]
            assert shares.evicted_count == 1
            quiet(world)
            assert (shares.count, shares.total) == (0, 0)
        world.one.store.close()
    if restart:
        with World(tmp_path, messages_max=10) as world:
            shares = world.space._ended.shares  # type: ignore[union-attr]
            assert (shares.count, shares.of("mallory")) == (4, 3 * byte_count)
            quiet(world)
            assert (shares.count, shares.total) == (0, 0)


def test_a_log_that_is_being_read_is_dropped_when_nothing_of_it_is_on_its_way(tmp_path: Path) -> None:
    with World(tmp_path, messages_max=100) as world:
        settle(world)
        first, second = full(world, "A0"), full(world, "B")
        give_to(world, "a/b", 10)
        assert (len(first), len(second)) == (5, 5)
        ended = world.space._ended
        assert ended is not None
        ended.shares.set_limits(1, 1 << 30)
        world.space.discard(first)
        third = full(world, "A1")
        give_to(world, "a/b", 2)
        world.space.discard(third)
        assert (ended.shares.count, ended.shares.evicted_count) == (1, 1)
        settle(world)
        assert ended_bodies(world) == []


def test_a_group_that_is_full_delays_no_other(tmp_path: Path) -> None:
    """Without a tick."""
    with World(tmp_path, messages_max=10) as world:
        settle(world)
        stays_full = full(world, "B")
        give_to(world, "a/b", 10)
        assert stays_full.full
        blocked = [full(world, f"A{at}") for at in range(3)]
        give_to(world, "a/b", 9)
        free, other = full(world, "D", "$share/h/c"), full(world, "C", "$share/h/c")
        give_to(world, "c", 6)
        assert (len(free), len(other)) == (3, 3)
        for session in [*blocked, other]:
            world.space.discard(session)
        world.one.until(lambda: len(free) == 6)
        assert world.one.commit() is ACCEPTED
        assert [len(logs) for logs in world.space._ended._waiting.values()] == [3]  # type: ignore[union-attr]
        received(world, stays_full, 10)
        stays_full.detach()
        world.space.detach_session(stays_full, 1e9)
        world.space.expire(0.0)  # one tick is enough for all logs of a group
        world.one.until(lambda: len(stays_full) == 9)
        quiet(world)


def test_logs_of_an_earlier_version_have_no_user(tmp_path: Path) -> None:
    with World(tmp_path, messages_max=10) as world:
        give_log = world.one.store.log("session", "old")
        world.one.store.rename(give_log, ENDED, "old 1a<7")
        assert _parse_log_name(give_log) == (7, "")
        world.one.store.drop(give_log)

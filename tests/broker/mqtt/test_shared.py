"""Shared subscriptions: who gets what, and who gets it instead when a member is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.broker.mqtt.namespace import SHARED_FIRST
from gateway.broker.mqtt.session import (
    Grant,
    QueuedRow,
    Session,
    SessionLimits,
    SubscriptionOptions,
    decode_grant,
)
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.protocols.mqtt.dialect import topic_address
from tests.broker.mqtt.test_durable_sessions import World
from tests.broker.parts import Answers, Connection, Space, connected, mqtt, publish

SHARED = "$share/g/a/#"


def numbered(count: int, qos: int = 1) -> list[Message]:
    return [mqtt("a/b", str(at).encode(), qos) for at in range(count)]


def give(space: Space, messages: list[Message], topic: str = "a/b") -> Answers:
    """All in one batch."""
    (sink,) = space.sinks(topic_address(topic))
    return publish(sink, messages)


def bodies(*outlets: Connection) -> list[list[int]]:
    return [[int(row.message.body) for row in outlet.rows] for outlet in outlets]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_members_take_turns(qos: int, one_by_one: bool) -> None:
    space = Space()
    first, second, third = (connected(space.session(name, SHARED, qos=qos)) for name in "xyz")
    told = space.give(*numbered(9, qos)) if one_by_one else give(space, numbered(9, qos))
    assert bodies(first, second, third) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert len(told.outcomes) == 9


def test_members_with_room_come_first_and_then_all_take_turns() -> None:
    space = Space()
    narrow, wide = space.session("narrow", SHARED), space.session("wide", SHARED)
    outlets = connected(narrow, 1), connected(wide, 4)
    give(space, numbered(8))
    assert bodies(*outlets) == [[0], [1, 2, 3, 4]]
    assert sorted([len(narrow), len(wide)]) == [1, 2]


def test_who_is_connected_comes_before_who_is_away() -> None:
    space = Space()
    away, here = space.session("away", SHARED), space.session("here", SHARED)
    outlet = connected(here)
    give(space, numbered(3))
    assert (bodies(outlet), len(away)) == ([[0, 1, 2]], 0)


def test_when_all_are_away_they_are_owed_what_must_be_acknowledged() -> None:
    space = Space()
    sessions = [space.session(name, SHARED) for name in "xy"]
    assert len(give(space, numbered(4) + numbered(2, qos=0)).outcomes) == 6
    assert [len(one) for one in sessions] == [2, 2]
    assert space.tally.offline == 2


def test_a_member_at_quality_0_that_is_away_takes_nothing_from_one_that_stores() -> None:
    space = Space()
    space.session("gets only what is sent at once", SHARED, qos=0)
    away = space.session("away", SHARED)
    give(space, numbered(4))
    assert (len(away), space.tally.offline) == (4, 0)


def test_a_full_member_that_is_away_gets_nothing_while_another_has_space(tmp_path: Path) -> None:
    with World(tmp_path, messages_max=10) as world:
        full, other = (world.session(name, SHARED) for name in ("full", "other"))
        world.space.subscribe(full, "own", SubscriptionOptions(1))
        (own,) = world.space.sinks(topic_address("own"))
        publish(own, [mqtt("own", b"%d" % at) for at in range(8)])
        give(world.space, numbered(10))
        assert world.one.commit() is ACCEPTED
        assert (world.space.tally.queue_full, len(full), len(other)) == (0, 10, 8)


def test_a_group_is_one_of_many_subscribers() -> None:
    space = Space()
    both = connected(space.session("both", SHARED, "a/b"))
    other = connected(space.session("other", "$share/h/a/+"))
    space.give(*numbered(1))
    assert bodies(both, other) == [[0, 0], [0]]
    assert space.subscriptions == 3


def test_members_that_come_and_go_change_nothing_for_publishers() -> None:
    space = Space()
    first = space.session("first", SHARED)
    before = space.changes
    second = space.session("second", SHARED)
    assert space.unsubscribe(first, SHARED)
    assert space.changes == before
    assert space.unsubscribe(second, SHARED)
    assert (space.changes, space.subscriptions) == (before + 1, 0)
    assert space.sinks(topic_address("a/b")) == ()


@pytest.mark.parametrize("ended", [True, False])
def test_what_a_lost_member_has_not_acknowledged_goes_to_another(ended: bool) -> None:
    space = Space()
    lost, other = space.session("lost", SHARED, qos=2), space.session("other", SHARED, qos=2)
    gone = connected(lost, 2)
    give(space, [mqtt("a/b", b"0", 1), mqtt("a/b", b"1", 2), mqtt("a/b", b"2", 1), mqtt("a/b", b"3", 2)])
    assert bodies(gone) == [[0, 1]]
    outlet = connected(other)
    lost.detach()
    if ended:
        space.discard(lost)
    else:
        space.requeue_shared(lost)
        assert [row.message.body for row in lost.in_flight.values()] == [b"1"], "QoS 2 that was sent stays"
        assert len(lost) == 0
    assert sorted(bodies(outlet)[0]) == [0, 2, 3]
    assert not any(row.dup for row in outlet.rows)


class Examined(deque[QueuedRow]):
    """Waiting messages, and how often somebody looked at all of them."""

    looks = 0

    def __iter__(self) -> Iterator[QueuedRow]:
        self.looks += 1
        return super().__iter__()


@pytest.mark.parametrize("topic_filter, is_searched", [("a/#", False), (SHARED, True)])
def test_only_a_member_is_searched_for_what_others_may_have(topic_filter: str, is_searched: bool) -> None:
    """Otherwise each lost connection would cost as much as its client has waiting."""
    space = Space()
    session = space.session("c", topic_filter)
    give(space, numbered(3))
    waiting = session._waiting = Examined(session._waiting or ())
    connected(session, 1)
    session.detach()
    space.requeue_shared(session)
    assert (waiting.looks > 0) is is_searched


class Members(dict[Session, Grant]):
    """Members of a group, and how often all of them were examined."""

    looks = 0

    def __iter__(self) -> Iterator[Session]:
        self.looks += 1
        return super().__iter__()


@pytest.mark.interpreted
@pytest.mark.parametrize("connects", [True, False])
def test_members_are_examined_once_for_all_that_one_leaves(connects: bool) -> None:
    """With 800 members away, and 20 000 messages, all clients waited for 16 s."""
    space = Space()
    lost = space.session("lost", SHARED)
    connected(lost, 1)
    give(space, numbered(50))
    others = [space.session(name, SHARED) for name in ("b", "c")]
    outlets = [connected(one, 1) for one in others if connects]
    (group,) = space._groups.values()
    members = group.members = Members(group.members)
    lost.detach()
    space.requeue_shared(lost)
    assert members.looks <= 2
    assert [len(outlet.rows) for outlet in outlets] == [1, 1][: len(outlets)]
    assert [len(one) for one in (lost, *others)] == ([0, 24, 24] if connects else [49, 0, 0])


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("finish", ["expire", "stop", "return"])
def test_a_lost_member_passes_very_many_messages_on_in_portions(ended: bool, finish: str) -> None:
    """All others waited for a second for 100 000 of them. What is of another subscription stays in order."""
    space = Space(SessionLimits(messages_max=10_000))
    lost = space.session("lost", SHARED, "own/#")
    own: list[Message] = []
    for first in range(0, 3 * SHARED_FIRST, 100):
        give(space, numbered(3 * SHARED_FIRST)[first : first + 100])
        own.append(mqtt("own/1", b"%d" % first, 1))
        give(space, own[-1:], "own/1")
    outlet = connected(space.session("other", SHARED), 65_535)
    space.discard(lost) if ended else space.requeue_shared(lost)
    assert 0 < len(outlet.rows) <= SHARED_FIRST
    if finish == "return" and not ended:
        again = connected(lost, 65_535)
        count = len(outlet.rows)
        assert not space.expire_more(0.0)
        assert len(outlet.rows) == count
        shared = [int(row.message.body) for row in again.rows if row.message.address.name != "own/1"]
        assert [*range(count), *shared] == list(range(3 * SHARED_FIRST))
        return
    if finish == "stop":
        space.finish_sharing()
    else:
        while space.expire_more(0.0):
            pass
    assert [int(row.message.body) for row in outlet.rows] == list(range(3 * SHARED_FIRST))
    assert not space._sharing
    if not ended:
        assert [row.message.body for row in connected(lost, 65_535).rows] == [one.body for one in own]
        assert len(lost) == 0


def test_without_another_member_it_stays() -> None:
    space = Space()
    lost, away = space.session("lost", SHARED), space.session("away", SHARED)
    connected(lost, 1)
    give(space, numbered(2))
    lost.detach()
    space.requeue_shared(lost)
    assert (len(lost.in_flight), len(lost), len(away)) == (1, 1, 0)
    again = connected(lost)
    assert [(body, dup) for body, _, _, dup in again.said] == [(b"0", True), (b"1", False)]
    lost.detach()
    space.discard(lost)
    assert len(away) == 2, "when a session ends, one that is away is better than nobody"


def test_a_refusal_by_the_client_is_final() -> None:
    space = Space()
    refusing, other = space.session("refusing", SHARED), space.session("other", SHARED)
    connected(refusing)
    give(space, numbered(1))
    refusing.complete_delivery(1)
    outlet = connected(other)
    space.discard(refusing)
    assert bodies(outlet) == [[]]


@pytest.mark.parametrize("identifier", [0, 7])
def test_a_grant_of_a_group_is_stored_and_read(identifier: int) -> None:
    session = Space().session("c")
    grant = Grant(session, [SubscriptionOptions(1, identifier=identifier)], shared="$share/g/é/+")
    found = decode_grant(session, grant.encode())
    assert found == grant
    assert (found.shared, found.identifiers) == ("$share/g/é/+", (identifier,) * bool(identifier))


def test_members_and_what_they_are_owed_survive_a_restart(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("kept", SHARED)
        connected(session)
        session.detach()
        told = give(world.space, numbered(3))
        world.one.commit()
        assert told.outcomes == [ACCEPTED] * 3
    with World(tmp_path) as world:
        kept, other = world.space.sessions["kept"], world.session("other", SHARED)
        lost = connected(kept, 2)
        world.one.store.flush()
        world.one.loop.run_until(lambda: lost.rows)
        assert bodies(lost) == [[0, 1]]
        outlet = connected(other)
        kept.detach()
        world.space.requeue_shared(kept)
        world.one.commit()
        assert bodies(outlet)[0][:2] == [0, 1]
    with World(tmp_path) as world:
        owed = [connected(world.space.sessions[name]) for name in ("kept", "other")]
        world.one.store.flush()
        world.one.loop.run_until(lambda: sum(len(one.rows) for one in owed) == 3)
        first, second = bodies(*owed)
        assert sorted(first + second) == [0, 1, 2], "each is owed by one of them"


def test_a_full_member_is_passed_over() -> None:
    space = Space(SessionLimits(messages_max=1))
    lost, full = space.session("lost", SHARED), space.session("full", "$share/g/a/#")
    connected(lost, 1)
    give(space, numbered(2))
    connected(full, 0)
    full.offer(numbered(1), Grant(full, [SubscriptionOptions(1)]))
    lost.detach()
    space.requeue_shared(lost)
    assert (len(lost.in_flight), len(full)) == (1, 1)

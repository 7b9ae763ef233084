"""MQTT's namespace: retained messages, sessions that come, go and expire, wills that wait."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX, PIECE_STEPS_MAX, RetainedTopics
from gateway.broker.mqtt.session import RetainedWalk, SubscriptionOptions
from gateway.model.message import MESSAGE_BYTES, Message
from gateway.protocols.mqtt.dialect import topic_address
from tests.broker.parts import Space, connected, mqtt


def retained(space: Space, *topics: str) -> None:
    for topic in topics:
        space.retained.set_retained(mqtt(topic, topic.encode(), retain=True))


def found(space: Space, topic_filter: str, options: SubscriptionOptions | None = None) -> list[bytes]:
    session = space.session("reader")
    space.subscribe(session, topic_filter, options or SubscriptionOptions())
    return [message.body for walk in list(session.walks.values()) for message in whole(walk)]


def whole(walk: RetainedWalk, most: int = 3) -> list[Message]:
    """What a walk finds, in pieces."""
    messages: list[Message] = []
    while not walk.done:
        piece = walk.next(most)
        assert len(piece) <= most
        messages += piece
    return messages


@pytest.mark.parametrize(
    "topic_filter, bodies",
    [
        ("a/b", [b"a/b"]),
        ("a/+", [b"a/b", b"a/c"]),
        ("#", [b"/", b"a/b", b"a/b/d", b"a/c"]),
        ("a/#", [b"a/b", b"a/b/d", b"a/c"]),
        ("a/b/#", [b"a/b", b"a/b/d"]),
        ("+/b", [b"a/b"]),
        ("+/+", [b"/", b"a/b", b"a/c"]),
        ("$own/#", [b"$own/x"]),
        ("+/x", []),
        ("$share/g/#", []),
        ("none", []),
    ],
)
def test_a_new_subscription_gets_what_is_retained(topic_filter: str, bodies: list[bytes]) -> None:
    space = Space()
    retained(space, "a/b", "a/c", "a/b/d", "/", "$own/x")
    assert found(space, topic_filter) == bodies


def test_an_empty_body_forgets_and_a_later_one_replaces() -> None:
    space = Space()
    retained(space, "a", "b")
    space.retained.set_retained(mqtt("a", b"", retain=True))
    space.retained.set_retained(mqtt("b", b"newer", retain=True))
    assert found(space, "#") == [b"newer"]
    assert space.retained.byte_count == 5 + MESSAGE_BYTES


def test_what_is_retained_expires() -> None:
    space = Space()
    space.retained.set_retained(mqtt("a", b"x", retain=True, expires=time.time() - 1.0))
    assert found(space, "#") == []


@pytest.mark.parametrize("handling, first, again", [(0, 1, 1), (1, 1, 0), (2, 0, 0)])
def test_retain_handling(handling: int, first: int, again: int) -> None:
    space = Space()
    retained(space, "a")
    options = SubscriptionOptions(retain_handling=handling)
    assert [len(found(space, "a", options)) for _ in range(2)] == [first, again]


@pytest.mark.parametrize("limits", [{"messages_max": 2}, {"bytes_max": 2 * (1 + MESSAGE_BYTES)}])
def test_retained_messages_are_bounded_and_the_refused_are_counted(limits: dict[str, Any]) -> None:
    space = Space(retained=RetainedTopics(**limits))
    retained(space, "a", "b", "c", "a")
    assert found(space, "#") == [b"a", b"b"]
    assert space.retained.refused == 1


def test_a_clean_start_ends_the_session_before() -> None:
    space = Space()
    session = space.session("c", "a")
    same, present = space.open("c", clean=False, expiry_secs=60.0)
    assert (same, present) == (session, True)
    fresh, present = space.open("c", clean=True, expiry_secs=60.0)
    assert (fresh is session, present) == (False, False)
    assert space.sinks(topic_address("a")) == ()
    assert space.subscriptions == 0


def test_sessions_end_when_they_have_been_away_too_long() -> None:
    space = Space()
    away, here, unlimited = (space.session(name, "a") for name in ("away", "here", "unlimited"))
    away.expires_at = here.expires_at = 10.0
    connected(here)
    space.expire(9.9)
    assert len(space.sessions) == 3
    space.expire(10.0)
    assert set(space.sessions) == {"here", "unlimited"}
    assert unlimited.expires_at == 0.0


def test_subscribing_and_unsubscribing_change_what_addresses_lead_to() -> None:
    space = Space()
    session = space.session("c", "a")
    before = space.changes
    assert space.unsubscribe(session, "a")
    assert not space.unsubscribe(session, "a")
    assert space.changes == before + 1
    assert space.sinks(topic_address("a")) == ()


def test_a_will_waits_for_its_delay() -> None:
    space, said = Space(), []
    space.session("c")
    space.delay_will("c", 5.0, lambda: said.append("will"))
    space.expire(4.9)
    assert said == []
    space.expire(5.0)
    space.expire(6.0)
    assert said == ["will"]


def test_a_will_is_not_published_when_its_session_goes_on() -> None:
    space, said = Space(), []
    space.session("c")
    space.delay_will("c", 5.0, lambda: said.append("will"))
    space.open("c", clean=False, expiry_secs=60.0)
    space.expire(9.0)
    assert said == []


@pytest.mark.parametrize("end", ["clean start", "expiry"])
def test_a_will_is_published_at_the_latest_when_its_session_ends(end: str) -> None:
    space, said = Space(), []
    session = space.session("c")
    session.expires_at = 2.0
    space.delay_will("c", 500.0, lambda: said.append("will"))
    if end == "clean start":
        space.open("c", clean=True, expiry_secs=60.0)
    else:
        space.expire(2.0)
    assert said == ["will"]


def test_walks_send_a_piece_at_a_time_when_the_one_before_has_been_taken() -> None:
    """Two hundred filters that match everything hold no more than one that does."""
    space = Space()
    count = 3 * PIECE_MESSAGES_MAX
    retained(space, *(f"t/{at:04}" for at in range(count)))
    session = space.session("reader")
    outlet = connected(session)
    filters = ["#", "t/#", "t/+", "+/+", "t/0007"]
    for topic_filter in filters:
        space.subscribe(session, topic_filter, SubscriptionOptions())
    assert outlet.rows == []
    outlet.congested = True
    assert not session.queue_retained()
    outlet.congested = False
    pulls = 0
    while session.queue_retained():
        pulls += 1
        assert len(outlet.rows) <= pulls * PIECE_MESSAGES_MAX
        assert len(session) == 0
    assert session.walks == {}
    bodies = [row.message.body for row in outlet.rows]
    assert len(bodies) == 4 * count + 1
    assert bodies[:count] == sorted(set(bodies))


def test_a_walk_that_finds_nothing_stops_now_and_then() -> None:
    space = Space()
    retained(space, *(f"{at}/x" for at in range(3 * PIECE_STEPS_MAX)), "z/y")
    session = space.session("reader")
    space.subscribe(session, "+/y", SubscriptionOptions())
    (walk,) = session.walks.values()
    pieces = []
    while not walk.done:
        pieces.append(len(walk.next()))
    assert sum(pieces) == 1
    assert len(pieces) > 3


def test_what_is_unsubscribed_or_asked_for_again_is_not_walked_twice() -> None:
    space = Space()
    retained(space, "a", "b")
    session = space.session("reader")
    for _ in range(3):
        space.subscribe(session, "#", SubscriptionOptions())
    assert len(session.walks) == 1
    space.unsubscribe(session, "#")
    assert not session.walks
    assert not session.queue_retained()

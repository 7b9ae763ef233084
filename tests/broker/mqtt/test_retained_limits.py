"""Retained messages at their limits: expired ones free their places, and nothing is acknowledged and lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway import clock
from gateway.broker.mqtt.retained import RETAINED_FULL, SLACK, RetainedTopics
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.model.message import MESSAGE_BYTES, NEVER, Message
from gateway.model.outcome import ACCEPTED, Outcome
from tests.broker.mqtt.test_durable_sessions import World
from tests.broker.parts import Space, connected, mqtt, publish
from tests.store.crashes import Crashes
from tests.store.parts import Opened


class Utc:
    """A wall clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1e9


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Utc:
    made = Utc()
    monkeypatch.setattr(clock, "utc", lambda: made.now)
    return made


def test_a_topic_that_is_cleared_beyond_a_lowered_limit_stays_cleared(tmp_path: Path) -> None:
    made: list[RetainedTopics] = []

    def started(most: int) -> Opened:
        return Opened(
            tmp_path, before=lambda store: made.append(RetainedTopics(messages_max=most, store=store))
        )

    first = started(10)
    publish(made[-1], [one("a"), one("b"), one("c")])
    assert first.commit() is ACCEPTED
    first.store.close()
    lowered = started(1)
    assert [topic in made[-1] for topic in "abc"] == [True, False, False]
    publish(made[-1], [one("b", b"")])
    assert lowered.commit() is ACCEPTED
    lowered.store.close()
    again = started(10)
    assert [topic in made[-1] for topic in "abc"] == [True, False, True]
    again.store.close()


def one(topic: str, body: bytes = b"x", expires: float = NEVER, qos: int = 1) -> Message:
    return mqtt(topic, body, qos, retain=True, expires=expires)


def told(retained: RetainedTopics, *given: Message) -> list[Outcome]:
    """What each is answered, in its order."""
    answers = dict(publish(retained, list(given)).told)
    return [answers[at] for at in range(len(given))]


def bodies(retained: RetainedTopics) -> dict[str, bytes]:
    return {message.address.name: bytes(message.body) for message in retained.messages()}


@pytest.mark.parametrize("limits", [{"messages_max": 3}, {"bytes_max": 3 * (1 + MESSAGE_BYTES)}])
def test_expired_messages_free_their_places(utc: Utc, limits: dict[str, Any]) -> None:
    retained = RetainedTopics(**limits)
    soon = utc.now + 10
    assert told(retained, one("a", expires=soon), one("b", expires=soon + 10), one("c")) == [ACCEPTED] * 3
    assert told(retained, one("d")) == [RETAINED_FULL]
    utc.now = soon
    assert told(retained, one("d")) == [ACCEPTED]
    assert told(retained, one("e")) == [RETAINED_FULL]
    assert bodies(retained) == {"b": b"x", "c": b"x", "d": b"x"}
    assert (retained.refused, retained.byte_count) == (2, 3 * (1 + MESSAGE_BYTES))


def test_the_clock_frees_them_without_anybody_who_publishes(utc: Utc) -> None:
    space = Space()
    for topic in "abc":
        space.retained.set_retained(one(topic, expires=utc.now + 10))
    utc.now += 10
    space.expire(0.0)
    assert (len(space.retained), space.retained.byte_count) == (0, 0)
    outlet = connected(space.session("c"))
    space.subscribe(space.sessions["c"], "#", SubscriptionOptions(1))
    space.sessions["c"].queue_retained()
    assert outlet.rows == []


def test_what_has_another_life_now_stays(utc: Utc) -> None:
    retained = RetainedTopics()
    soon = utc.now + 10
    for topic, expires in (("longer", soon + 10), ("for ever", NEVER), ("cleared", soon)):
        retained.set_retained(one(topic, expires=soon))
        retained.set_retained(one(topic, b"" if topic == "cleared" else b"new", expires=expires))
    utc.now = soon
    retained.tick()
    assert bodies(retained) == {"longer": b"new", "for ever": b"new"}
    utc.now = soon + 10
    retained.tick()
    assert bodies(retained) == {"for ever": b"new"}


def test_updates_of_what_expires_take_no_more_memory(utc: Utc) -> None:
    retained = RetainedTopics()
    for number in range(10 * SLACK):
        retained.set_retained(one("a", expires=utc.now + 1_000 + number))
    assert len(retained._expiring) <= SLACK + 3
    utc.now += 1_000 + 10 * SLACK
    retained.tick()
    assert len(retained) == 0


def test_an_update_at_the_limit_keeps_the_old_value_and_is_refused() -> None:
    retained = RetainedTopics(bytes_max=2 * (MESSAGE_BYTES + 10))
    assert told(retained, one("a", b"a" * 10), one("b", b"b" * 10)) == [ACCEPTED] * 2
    assert told(retained, one("a", b"A" * 11), one("b", b"B" * 10)) == [RETAINED_FULL, ACCEPTED]
    assert bodies(retained) == {"a": b"a" * 10, "b": b"B" * 10}
    assert told(retained, one("a", b"A" * 9), one("b", b"B" * 11)) == [ACCEPTED] * 2
    assert told(retained, one("a", b"", qos=0)) == [ACCEPTED], "there is always room for less"
    assert bodies(retained) == {"b": b"B" * 11}


def test_at_the_limit_of_topics_they_are_updated_all_the_same() -> None:
    retained = RetainedTopics(messages_max=1)
    answers = publish(retained, [one("a"), one("b"), one("a", b"new"), one("b", b"")])
    assert dict(answers.told) == {0: ACCEPTED, 1: RETAINED_FULL, 2: ACCEPTED, 3: ACCEPTED}
    assert bodies(retained) == {"a": b"new"}


def test_subscribers_get_what_is_not_retained() -> None:
    space = Space(retained=RetainedTopics(messages_max=0))
    outlet = connected(space.session("c", "a"))
    space.give(one("a"))
    assert told(space.retained, one("a")) == [RETAINED_FULL]
    assert len(outlet.rows) == 1


@pytest.mark.parametrize("restart", [True, False])
def test_the_disk_has_what_the_topic_retains(tmp_path: Path, utc: Utc, restart: bool) -> None:
    crashes = Crashes()
    crashes.settled = {b"old", b"gone"}
    with World(tmp_path, crashes=crashes) as world:
        world.space.retained.shares.bytes_max = 2 * (MESSAGE_BYTES + 5)
        answers = publish(world.space.retained, [one("a", b"kept"), one("b", b"gone", utc.now + 10)])
        assert world.one.commit() is ACCEPTED
        assert answers.outcomes == [ACCEPTED] * 2
        answers = publish(world.space.retained, [one("a", b"refused" * 5), one("b", b"", qos=1)])
        assert answers.told == [(0, RETAINED_FULL)]
        assert world.one.commit() is ACCEPTED
        assert answers.told[1:] == [(1, ACCEPTED)]
        world.space.retained.set_retained(one("c", b"old", utc.now + 10))
        assert world.one.commit() is ACCEPTED
        utc.now += 10
        if not restart:
            world.space.expire(0.0)
            assert world.one.commit() is ACCEPTED
            assert b"old" not in crashes.last.bodies
    with World(tmp_path, crashes=crashes) as world:
        assert bodies(world.space.retained) == {"a": b"kept"}
        assert world.one.commit() is ACCEPTED
    assert crashes.last.bodies == {b"kept"}
    crashes.check()


@pytest.mark.parametrize("rest", ["x" * 60_000, "/".join("a" * 190)], ids=["long", "deep"])
def test_the_topics_count_as_well(rest: str) -> None:
    """A body of one byte may have a topic of 64 KiB, or of 200 levels, each of them a node of the tree."""
    retained = RetainedTopics(bytes_max=1_000_000)
    full = told(retained, *(one(f"{number}/{rest}") for number in range(1_000))).index(RETAINED_FULL)
    assert full < 30
    assert retained.byte_count <= 1_000_000
    assert told(retained, one(f"0/{rest}", b"y"), one(f"1/{rest}", b"")) == [ACCEPTED, ACCEPTED]
    for number in range(full):
        retained.set_retained(one(f"{number}/{rest}", b""))
    assert (len(retained), retained.byte_count) == (0, 0)
    assert told(retained, one("short/topic")) == [ACCEPTED]
    assert retained.byte_count == MESSAGE_BYTES + 1

"""Retained messages: found by filter, expired by the database's clock, and their limits."""

from __future__ import annotations

from typing import Final

import pytest

from gateway.broker.topics import topic_matches
from gateway.state.interface import (
    CLEARED_SECS,
    LeaveSession,
    MatchRetained,
    OpenSession,
    OperationOutcome,
    Reap,
    Retain,
    Retained,
    RetainedCapacity,
    Retention,
    WeighRetained,
)
from gateway.state.postgresql import PROBE_MIN
from tests.state.conftest import KEY, PostgreSQLWorld, Replica, World

WORDS = (
    "a a/b a/b/c a/b/c/d a/ /a / // a//b b b/b b/b/c $SYS/a $SYS/a/b",
    "a! a/b!c a/b0 a-b/c a%_/b 1:a/b #1",
)
TOPICS = [*" ".join(WORDS).split(), '{"\\,}/b', "\u00fc/\u20ac", "\U0001f600/b"]
PATTERNS = (
    "# + +/+ /+ +/ a/# a/+ a/b a/b/# a/b/+ +/b +/b/# +/b/c a/+/c a/+/# +/+/#",
    "+/# $SYS/# $SYS/+ +/a /# // a%_/+ % a_b 1:a/+ none/# +//+",
)
FILTERS = [*" ".join(PATTERNS).split(), '{"\\,}/+', "\u00fc/+", "+/\u20ac"]


def topics_of(found: list[Retained]) -> list[str]:
    return [one.topic for one in found]


@pytest.mark.parametrize("topic_filter", FILTERS)
def test_a_filter_finds_what_it_matches(one: Replica, topic_filter: str) -> None:
    for wait in [one.send(Retain(topic, topic.encode())) for topic in TOPICS]:
        wait.result(30)
    pattern = topic_filter.split("/")
    wanted = sorted(topic for topic in TOPICS if topic_matches(pattern, topic.split("/")))
    found = one.ask(MatchRetained(topic_filter))
    assert topics_of(found) == wanted
    assert all(message == topic.encode() for topic, message, *_ in found)
    paged: list[str] = []
    while some := one.ask(MatchRetained(topic_filter, paged[-1] if paged else "", limit=2)):
        paged += topics_of(some)
    assert paged == wanted


def test_the_last_one_of_a_topic_stays_and_a_clear_deletes(one: Replica, two: Replica) -> None:
    waits = [one.send(Retain("t", str(number).encode())) for number in range(100)]
    assert all(wait.result(30) for wait in waits)
    assert two.ask(MatchRetained("t")) == [Retained("t", b"99", None)]
    two.do(Retain("t", None))
    assert one.ask(MatchRetained("#")) == []
    one.do(Retain("t", b"x"))
    one.do(Retain("t", b""))
    assert one.ask(MatchRetained("#")) == []


def test_it_expires_by_the_database_s_clock(world: World, one: Replica) -> None:
    one.do(Retain("t", b"x", 60.0))
    ((_, _, expires_in, _),) = one.ask(MatchRetained("+"))
    assert expires_in is not None
    assert 50 < expires_in <= 60
    world.advance(61)
    assert one.ask(MatchRetained("+")) == []
    one.do(Reap(60.0))
    one.do(Retain("t", b"y"))
    assert one.ask(MatchRetained("+")) == [Retained("t", b"y", None)]


@pytest.mark.parametrize("topic_filter", ["+/+", "r/+", "+/7", "r/#"])
def test_pages_of_many(shared: PostgreSQLWorld, topic_filter: str) -> None:
    """More than the probe of the index finds."""
    one = shared.replica("one")
    count = PROBE_MIN + 500
    for topic in ("'r/' || n", "n || '/7'"):
        shared.execute(
            f"INSERT INTO retained SELECT {topic}, 'x', NULL FROM generate_series(1, {count}) AS n"
        )
    shared.execute("ANALYZE retained")
    found: list[str] = []
    while some := one.ask(MatchRetained(topic_filter, found[-1] if found else "")):
        assert len(some) <= 1_000
        found += topics_of(some)
    assert found == sorted(set(found))
    assert len(found) == {"+/+": 2 * count, "r/+": count, "+/7": count + 1, "r/#": count}[topic_filter]


@pytest.mark.parametrize("topic_filter", ["r/#", "r/+", "+/+", "#"])
def test_a_page_ends_with_its_bytes(one: Replica, topic_filter: str) -> None:
    """And a message that is larger than a page has one of its own."""
    sizes = {"r/a": 10, "r/b": 10, "r/c": 500, "r/d": 90, "r/e": 20}
    for topic, size in sizes.items():
        one.do(Retain(topic, bytes(size)))
    pages: list[list[str]] = []
    after, is_last = "", False
    while not is_last:
        query = MatchRetained(topic_filter, after, byte_count=100)
        found = one.ask(query)
        pages.append(topics_of(found))
        after, is_last = found[-1].topic if found else "", query.is_last(found)
    assert pages == [["r/a", "r/b", "r/c"], ["r/d", "r/e"], []]


ROOM: Final = RetainedCapacity(1, 100, 1, 50)


@pytest.mark.parametrize(
    ("operation", "stored"),
    [
        (Retain("new", b"x", None, "u", 50, ROOM), True),
        (Retain("new", b"x", None, "u", 51, ROOM), False),
        (Retain("new", b"x", None, "u", 1, RetainedCapacity(0, 100, 1, 50)), False),
        (Retain("new", b"x", None, "u", 1, RetainedCapacity(1, 100, 0, 50)), False),
        (Retain("old", b"x", None, "u", 60, RetainedCapacity(0, 50, 0, 50)), True),  # of which 10 are free
        (Retain("old", b"x", None, "u", 61, RetainedCapacity(0, 50, 0, 50)), False),
        (Retain("old", b"x", None, "u", 5, RetainedCapacity(-9, -9, -9, -9)), True),  # it shrinks
        (
            Retain("old", b"x", None, "other", 5, RetainedCapacity(0, 0, 0, 50)),
            False,
        ),  # all for a user who had none
        (Retain("old", b"x", None, "other", 10, RetainedCapacity(0, 0, 1, 10)), True),
        (
            Retain("late", b"x", None, "u", 5, RetainedCapacity(0, 50, 0, 50)),
            False,
        ),  # what has expired makes no room
        (Retain("old", b"x", None, "u", 99), True),
    ],
)
def test_a_message_is_stored_where_there_is_room(
    world: World, one: Replica, operation: Retain, stored: bool
) -> None:
    one.do(Retain("old", b"before", None, "u", 10))
    one.do(Retain("late", b"before", 5.0, "u", 10))
    world.advance(6)
    before = ("u", 10) if operation.topic == "old" else None
    assert one.do(operation) == Retention(stored, before)
    found = one.ask(MatchRetained(operation.topic))
    old = [Retained("old", b"before", None, "u")] if before else []
    assert found == ([Retained(operation.topic, b"x", None, operation.user)] if stored else old)


def test_what_each_user_has_is_weighed(world: World, one: Replica) -> None:
    one.do(Retain("a", b"1", None, "u", 10))
    one.do(Retain("b", b"1", None, "u", 10))
    one.do(Retain("b", b"1", None, "u", 20))
    one.do(Retain("c", b"1", None, "v", 5))
    one.do(Retain("d", b"1", 5.0, "v", 5))
    one.do(Retain("e", b"1", None, "w", 5))
    assert one.do(Retain("e", None)) == Retention(True, ("w", 5))
    assert one.ask(WeighRetained()) == {"u": (2, 30), "v": (2, 10)}
    world.advance(6)
    assert one.ask(WeighRetained()) == {"u": (2, 30), "v": (1, 5)}


def test_an_earlier_epoch_of_the_same_client_changes_nothing(one: Replica, two: Replica) -> None:
    one.do(Retain("t", b"1", None, "u", 10, client="c", epoch=2))
    for late in (b"0", None):
        assert (
            two.reply(Retain("t", late, None, "u", 10, client="c", epoch=1)).verdict
            is OperationOutcome.FENCED
        )
    assert one.ask(MatchRetained("t")) == [Retained("t", b"1", None, "u")]
    for other in (Retain("t", b"2", client="d", epoch=1), Retain("t", b"3"), Retain("t", b"4", client="d")):
        assert two.do(other).stored
    two.do(Retain("t", b"5", client="d", epoch=1))  # the latest was in no session
    assert one.ask(MatchRetained("t")) == [Retained("t", b"5", None)]


def test_a_clock_that_is_set_back_fences_no_later_session(world: World, one: Replica, two: Replica) -> None:
    """Epochs are times of that clock, and an ended session leaves none that the next one could exceed."""

    def session(replica: Replica) -> int:
        opening = OpenSession(KEY, replica.name, "u", "", True, 0.0, "", None, False, 0)
        return replica.do(opening).epoch

    def retain(topic: str, message: bytes | None, epoch: int) -> Retain:
        return Retain(topic, message, client=KEY.client, epoch=epoch, domain=KEY.domain)

    def ends(epoch: int) -> None:
        one.do(LeaveSession(KEY, epoch, 0.0, True))

    frozen = session(two)
    before = session(one)
    for topic in ("a", "b", "c", "later"):
        one.do(retain(topic, b"before", before))
    ends(before)
    world.advance(-3_600)
    after = session(one)
    assert after < frozen < before
    assert one.do(retain("a", b"after", after)).stored
    assert one.do(retain("b", None, after)).stored
    assert two.reply(retain("c", b"frozen", frozen)).verdict is OperationOutcome.FENCED
    world.advance(3_610)
    assert one.do(retain("later", b"after", after)).stored
    world.advance(-3_610)
    ends(after)
    assert one.do(retain("c", b"last", after)).stored  # which the database gets after the end
    found = {one.topic: one.message for one in two.ask(MatchRetained("#"))}
    assert found == {"a": b"after", "c": b"last", "later": b"after"}


def test_a_cleared_topic_is_fenced_for_a_while(world: World, one: Replica) -> None:
    late = Retain("t", b"0", None, "u", 10, ROOM, client="c", epoch=1)
    one.do(Retain("t", b"1", None, "u", 10, client="c", epoch=1))
    assert one.do(Retain("t", None, client="c", epoch=2)) == Retention(True, ("u", 10))
    assert one.reply(late).verdict is OperationOutcome.FENCED
    assert one.ask(MatchRetained("#")) == []
    assert one.ask(WeighRetained()) == {}
    assert one.do(Retain("t", b"2", None, "v", 10, client="d", epoch=1)) == Retention(True, None)
    for remembered in (False, True):
        clear = Retain("never", None, client="c", epoch=2, remembered=remembered)
        assert one.do(clear) == Retention(True, None)
        reply = one.reply(Retain("never", b"0", client="c", epoch=1))
        assert (reply.verdict is OperationOutcome.FENCED) is remembered
        one.do(Retain("never", None))
    one.do(Retain("t", None, client="c", epoch=2))
    world.advance(CLEARED_SECS + 1)
    one.do(Reap(None))
    assert one.do(late).stored


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_clear_beyond_the_share_fences_where_something_was(one: Replica, is_cleared: bool) -> None:
    one.do(Retain("t", b"1", client="c", epoch=1))
    if is_cleared:
        one.do(Retain("t", None, client="c", epoch=2))
    one.do(Retain("t", None, client="c", epoch=3, remembered=False))
    assert one.reply(Retain("t", b"late", client="c", epoch=2)).verdict is OperationOutcome.FENCED
    assert one.ask(MatchRetained("#")) == []


def test_no_row_of_a_cleared_topic_stays(shared: PostgreSQLWorld) -> None:
    one = shared.replica("one")
    one.do(Retain("t", b"1", client="c", epoch=1))
    one.do(Retain("t", None, client="c", epoch=1))
    assert shared.execute("SELECT topic, length(message) FROM retained") == [("t", 0)]
    shared.advance(CLEARED_SECS + 1)
    one.do(Reap(None))
    assert shared.execute("SELECT topic FROM retained") == []

"""The limits of an outbox: how much, and for how long; what happens then; what is known of time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.broker.outbox.arrival_times import KIND
from gateway.broker.outbox.outbox import REMOVED_AT_ONCE, OutboxLimits
from gateway.model.message import MESSAGE_BYTES, Message
from gateway.model.outcome import ACCEPTED, Reason, Verdict
from gateway.store.store import Store
from tests.broker.outbox.bench import DOWN, REFUSED, Bench, made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.one.store.close()


@pytest.mark.parametrize(
    "more, way, refused",
    [
        (", outbox: {messages_max: 3}", {}, [4, 5]),
        (f", outbox: {{bytes_max: {3 * (1 + MESSAGE_BYTES)}}}", {}, [4, 5]),
        ("", {"limits": OutboxLimits(messages_max=3)}, [4, 5]),
        (", outbox: {messages_max: 4}", {"limits": OutboxLimits(messages_max=3)}, [5]),
    ],
    ids=["messages", "bytes", "of the link", "the route's own goes first"],
)
def test_a_full_outbox_refuses_what_is_new(
    tmp_path: Path, more: str, way: dict[str, Any], refused: list[int]
) -> None:
    bench = made(tmp_path, more, **way)
    bench.link.up = False
    source = bench.stored(1, 2, 3, 4, 5)
    told = dict(source.told)
    assert [receipt for receipt, outcome in told.items() if outcome is not ACCEPTED] == refused
    assert {told[number].reason for number in refused} == {Reason.QUOTA}
    assert {told[number].verdict for number in refused} == {Verdict.RELEASED}
    bench.link.up = True
    bench.outboxes.link_up("erp")
    assert bench.link.bodies == [number for number in range(1, 6) if number not in refused]
    assert bench.counts()["failed"] == len(refused)
    bench.one.store.close()


@pytest.mark.parametrize("paged", [False, True], ids=["in memory", "on disk alone"])
@pytest.mark.parametrize("policy", ["drop_oldest", "dead_letter"])
def test_the_oldest_make_room(tmp_path: Path, policy: str, paged: bool) -> None:
    count = 300 if paged else 10
    bench = made(tmp_path, f", outbox: {{messages_max: {count // 2}, policy: {policy}}}")
    bench.link.up = False
    for number in range(count):
        assert bench.stored(number).outcomes == [ACCEPTED]
    gone = list(range(count - count // 2))
    bench.until(lambda: bench.state.messages == count // 2)
    bench.commit()
    letters = [body for body, _, _ in bench.dead()]
    assert letters == (gone if policy == "dead_letter" else [])
    assert bench.state.dropped == (0 if policy == "dead_letter" else len(gone))
    bench.restart()
    bench.link.up = True
    bench.outboxes.link_up("erp")
    got: list[int] = []
    while len(got) < count // 2:
        bench.until(lambda: bench.link.parts)
        got += bench.link.bodies
        bench.link.settle()
    assert got == list(range(len(gone), count))
    bench.one.store.close()


def test_the_cost_of_many_dead_letters_is_proportional_to_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = made(tmp_path, ", outbox: {age_secs_max: 10, policy: dead_letter}")
    bench.link.up = False
    count = 1_000
    bench.stored(*range(count))
    checked = 0

    def has_room_for(messages: list[Message], *, is_awaited: bool = True) -> bool:
        nonlocal checked
        checked += len(messages)
        return True

    monkeypatch.setattr(bench.letters, "has_room_for", has_room_for)
    bench.after(20)
    bench.until(lambda: not bench.state.messages)
    bench.commit()
    assert len(bench.dead()) == 999, "as many as are asked for"
    assert checked <= count * REMOVED_AT_ONCE // 2 + count
    bench.one.store.close()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "policy, left, dead, accepted",
    [
        ("reject", [1, 2], [], False),
        ("drop_oldest", [2, 3], [], True),
        ("dead_letter", [2, 3], [1], True),
    ],
)
def test_what_is_too_old(
    tmp_path: Path, policy: str, left: list[int], dead: list[int], accepted: bool, restart: bool
) -> None:
    bench = made(tmp_path, f", outbox: {{age_secs_max: 60, policy: {policy}}}")
    bench.link.up = False
    bench.stored(1)
    bench.after(30)
    bench.stored(2)
    if restart:
        bench.restart()
    bench.after(35)
    assert 64 <= bench.state.oldest_secs <= 66 if policy == "reject" else bench.state.oldest_secs < 36
    source = bench.stored(3)
    assert (source.outcomes == [ACCEPTED]) is accepted
    bench.until(lambda: [body for body, _, _ in bench.dead()] == dead)
    bench.link.up = True
    bench.outboxes.link_up("erp")
    bench.until(lambda: len(bench.link.bodies) == len(left))
    assert bench.link.bodies == left
    bench.link.settle()
    bench.after(1)
    assert bench.state.oldest_secs == 0
    bench.one.store.close()


def test_marks_of_time_are_bounded_and_go_with_the_messages(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.broker.outbox.arrival_times.RECORDS_MAX", 8)
    bench.link.up = False
    for number in range(40):
        bench.stored(number)
        bench.after(2)
    assert bench.state.oldest_secs == 80
    bench.one.store.close()
    store = Store(bench.folder)
    assert 1 <= len(list(store.records(KIND))) <= 8
    store.close()
    bench.open(bench.dispatcher.router)
    bench.link.up = True
    bench.link.at_once = ACCEPTED
    bench.outboxes.link_up("erp")
    bench.until(lambda: not bench.state.messages)
    bench.after(1)
    bench.one.store.close()
    store = Store(bench.folder)
    assert list(store.records(KIND)) == []
    store.close()
    bench.open(bench.dispatcher.router)


# What is released, and expires then.


def timed(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Bench:
    """A bench by whose clock messages expire, too."""
    bench = made(folder, more)
    monkeypatch.setattr("gateway.clock.utc", lambda: bench.now)
    return bench


def release_and_expire(bench: Bench) -> None:
    """Five messages that the link has released, and of which nothing is left when their time is over."""
    bench.link.at_once = DOWN
    bench.stored(1, 2, 3, 4, 5, expires=bench.now + 10)
    bench.after(11)
    assert [number for number, _, _ in bench.dead()] == [1, 2, 3, 4, 5]
    assert bench.state.messages == 0


@pytest.mark.parametrize("policy", ["drop_oldest", "dead_letter", "reject"])
def test_what_was_released_and_expired_makes_nothing_else_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    bench = timed(tmp_path, monkeypatch, f", outbox: {{age_secs_max: 60, policy: {policy}}}")
    release_and_expire(bench)
    bench.link.at_once = None
    bench.after(31)
    for number in range(10, 200):
        assert bench.stored(number).outcomes == [ACCEPTED]
        bench.after(1.0)
        bench.link.settle()
    assert bench.state.messages == 0
    assert len(bench.dead()) == 5
    assert bench.counts()["delivered"] == 190
    bench.link.up = False
    bench.stored(200)
    bench.after(58.0)
    assert bench.state.oldest_secs == pytest.approx(58, abs=1)
    assert bench.stored(201).outcomes == [ACCEPTED]
    bench.after(5.0)
    if policy == "reject":
        assert [outcome.verdict for outcome in bench.stored(202).outcomes] == [Verdict.RELEASED]
    else:
        assert bench.state.messages == 1, "what is old goes, and nothing else"
    bench.one.store.close()


def test_the_age_is_right_while_others_expire_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = timed(tmp_path, monkeypatch)
    release_and_expire(bench)
    bench.link.up = False
    bench.stored(6, expires=bench.now + 5)
    bench.stored(7)
    for _ in range(3):
        bench.after(10.0)
        bench.stored(8, expires=bench.now + 5)
    assert bench.state.oldest_secs == pytest.approx(30, abs=1)
    bench.restart()
    bench.link.up = False
    bench.after(10.0)
    assert bench.state.oldest_secs == pytest.approx(40, abs=1)
    bench.link.up, bench.link.at_once = True, None
    bench.after(31.0)
    bench.until(lambda: bench.link.parts)
    bench.link.settle()
    bench.after(1.0)
    assert (bench.state.messages, bench.state.oldest_secs) == (0, 0.0)
    bench.one.store.close()


def test_what_is_released_again_and_again_is_as_old_as_it_is(tmp_path: Path) -> None:
    """As behind a broker's memory alarm."""
    bench = made(tmp_path, ", outbox: {age_secs_max: 300, policy: dead_letter}")
    bench.link.at_once = DOWN
    bench.stored(1)
    for _ in range(20):
        bench.after(10.0)
        bench.stored(2)
    assert bench.state.oldest_secs == pytest.approx(200, abs=1)
    assert (bench.state.messages, bench.dead()) == (21, [])
    bench.link.up = False
    bench.after(102.0)
    assert bench.dead() == [(1, "out", "expired")]
    bench.one.store.close()


def test_what_came_by_a_clock_that_was_ahead_is_not_kept_longer(tmp_path: Path) -> None:
    bench = made(tmp_path, ", outbox: {age_secs_max: 300, policy: dead_letter}")
    bench.link.up = False
    bench.now += 8 * 86_400
    bench.stored(1)
    bench.now -= 8 * 86_400
    bench.restart()
    bench.link.up = False
    bench.after(200.0)
    assert bench.state.oldest_secs == pytest.approx(200, abs=1)
    bench.after(102.0)
    assert bench.dead() == [(1, "out", "expired")]
    bench.one.store.close()


def test_without_room_for_dead_letters_the_outbox_keeps_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = made(tmp_path, ", attempts_max: 1, outbox: {messages_max: 3, policy: dead_letter}")
    with monkeypatch.context() as full:
        full.setattr(bench.letters, "has_room_for", lambda messages, is_awaited: False)
        bench.link.at_once = REFUSED
        bench.stored(1)
        bench.link.up = False
        assert bench.stored(2, 3, 4).outcomes == [ACCEPTED] * 3, "the limit is exceeded by one wake-up"
        assert [outcome.verdict for outcome in bench.stored(5).outcomes] == [Verdict.RELEASED]
        assert (bench.dead(), bench.state.messages) == ([], 4)
        assert bench.letters.refused > 0, "it is counted and logged"
    bench.after(31.0)
    assert bench.dead() == [(1, "out", "quota")]
    assert bench.stored(6).outcomes == [ACCEPTED]
    assert [number for number, _, _ in bench.dead()] == [1, 2]
    bench.one.store.close()


@pytest.mark.parametrize("limits", ["messages_max: 3, ", "age_secs_max: 20, "])
def test_an_outbox_that_keeps_what_exceeds_its_limits_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str
) -> None:
    bench = timed(tmp_path, monkeypatch, f", outbox: {{{limits}policy: dead_letter}}")
    monkeypatch.setattr(bench.letters, "has_room_for", lambda messages, is_awaited: False)
    bench.link.up = False
    bench.stored(1, 2, 3, 4)
    for _ in range(3):
        bench.after(31.0)
    assert bench.state.messages == 4
    assert bench.letters.refused == 1


@pytest.mark.parametrize("policy", ["reject", "drop_oldest", "dead_letter"])
@pytest.mark.parametrize("at", ["head", "middle", "disk"])
def test_what_expires_without_room_for_its_dead_letter_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, at: str
) -> None:
    """It is not sent, and what is behind it waits, as behind every dead letter without room.

    What is on its way together with it is not held up.
    """
    bench = timed(tmp_path, monkeypatch, f", outbox: {{policy: {policy}}}")
    bench.link.up = False
    first = [1] if at == "middle" else []
    if first:
        bench.stored(*first)
    bench.stored(2, 3, expires=bench.now + 10)
    bench.stored(4)
    if at == "disk":
        bench.restart()
        bench.link.up = False
    with monkeypatch.context() as full:
        full.setattr(bench.letters, "has_room_for", lambda messages, is_awaited: False)
        bench.after(20.0)
        bench.link.up, bench.link.at_once = True, ACCEPTED
        for _ in range(5):
            bench.after(40.0)
            bench.commit()
            bench.commit()
            bench.stored(5)
        assert bench.link.bodies == [*first, 4]
        assert (bench.state.messages, bench.dead()) == (7, [])
        assert bench.letters.refused > 0, "it is counted and logged"
    bench.after(40.0)
    bench.until(lambda: 5 in bench.link.bodies)
    bench.commit()
    assert bench.link.bodies == [*first, 4, 5, 5, 5, 5, 5]
    assert bench.dead() == [(2, "out", "expired"), (3, "out", "expired")]
    assert bench.state.messages == 0
    bench.one.store.close()


@pytest.mark.parametrize("at", ["memory", "disk"])
def test_many_that_have_expired_are_removed_in_portions_when_the_link_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Otherwise all other clients would wait meanwhile."""
    monkeypatch.setattr("gateway.broker.outbox.outbox.EXPIRED_AT_ONCE", 5)
    monkeypatch.setattr("gateway.broker.queue.DISPATCH_MESSAGES_MAX", 3)
    bench = timed(tmp_path, monkeypatch)
    bench.link.up = False
    bench.stored(*range(40), expires=bench.now + 10)
    bench.stored(40)
    if at == "disk":
        bench.restart()
    bench.now += 20.0
    bench.link.up = True
    bench.outboxes.link_up("erp")
    counts = [41, bench.state.messages]
    while bench.link.bodies != [40]:
        bench.commit()
        bench.after(0.25)
        counts.append(bench.state.messages)
    assert max(before - after for before, after in pairwise(counts)) <= 5 + 3
    assert len(counts) <= 12
    assert bench.dead() == [(number, "out", "expired") for number in range(40)]
    bench.link.settle()
    bench.commit()
    bench.one.store.close()

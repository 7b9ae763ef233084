"""The limits of an outbox: how much, and for how long; what happens then; what is known of time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.broker.outbox.marks import MARKS
from gateway.broker.outbox.outbox import OutboxLimits
from gateway.model.message import MESSAGE_OCTETS
from gateway.model.outcome import ACCEPTED, Reason, Verdict
from gateway.store.store import Store
from tests.broker.outbox.bench import Bench, made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.one.store.close()


@pytest.mark.parametrize(
    "more, way, refused",
    [
        (", outbox: {messages_max: 3}", {}, [4, 5]),
        (f", outbox: {{bytes_max: {3 * (1 + MESSAGE_OCTETS)}}}", {}, [4, 5]),
        ("", {"limits": OutboxLimits(messages_max=3)}, [4, 5]),
        (", outbox: {messages_max: 4}", {"limits": OutboxLimits(messages_max=3)}, [5]),
    ],
    ids=["messages", "octets", "of the link", "the route's own goes first"],
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
    monkeypatch.setattr("gateway.broker.outbox.marks.MARKS_MAX", 8)
    bench.link.up = False
    for number in range(40):
        bench.stored(number)
        bench.after(2)
    assert bench.state.oldest_secs == 80
    bench.one.store.close()
    store = Store(bench.folder)
    assert 1 <= len(list(store.things(MARKS))) <= 8
    store.close()
    bench.open(bench.dispatcher.router)
    bench.link.up = True
    bench.link.at_once = ACCEPTED
    bench.outboxes.link_up("erp")
    bench.until(lambda: not bench.state.messages)
    bench.after(1)
    bench.one.store.close()
    store = Store(bench.folder)
    assert list(store.things(MARKS)) == []
    store.close()
    bench.open(bench.dispatcher.router)

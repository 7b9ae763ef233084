"""One user has no more than its share of an outbox, so that others find room in it, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.broker.outbox.outbox import OUTBOX_FULL, OUTBOX_USER_FULL
from gateway.broker.shares import UserQuotas
from gateway.model.message import MESSAGE_BYTES
from gateway.model.outcome import ACCEPTED
from gateway.model.shares import UserShares
from gateway.settings.limits import Limits
from tests.broker.outbox.bench import DOWN, REFUSED, Bench, mapping

HALF = Limits(user_share=0.5)


def made(folder: Path, more: str, limits: Limits = HALF, **way: Any) -> Bench:
    bench = Bench(folder, mapping(more), UserQuotas(limits), **way)
    bench.link.up = False
    return bench


def told(bench: Bench, user: str, *numbers: int) -> list[int]:
    """Publish as a user; return the numbers that its share refuses. No other refusal comes."""
    outcomes = dict(bench.stored(*numbers, users=(user,)).told)
    assert set(outcomes.values()) <= {ACCEPTED, OUTBOX_USER_FULL}
    return [number for number in numbers if outcomes[number] is OUTBOX_USER_FULL]


def shares(bench: Bench) -> UserShares:
    (outbox,) = bench.outboxes
    return outbox._shares


def is_exact(bench: Bench) -> bool:
    """Return True if the users have in sum what waits."""
    (outbox,) = bench.outboxes
    of = outbox._shares
    return (of.count, of.total) == (len(outbox._queue), outbox._queue.byte_count)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("more", ["messages_max: 8", f"bytes_max: {8 * (1 + MESSAGE_BYTES)}"])
def test_one_user_has_no_more_than_its_share(tmp_path: Path, more: str, restart: bool) -> None:
    bench = made(tmp_path, f", outbox: {{{more}}}")
    assert told(bench, "greedy", 1, 2, 3) == []
    if restart:
        bench.restart()
        bench.link.up = False
    assert told(bench, "greedy", 4, 5, 6) == [5, 6]
    assert told(bench, "modest", 7, 8) == []
    assert told(bench, "greedy", 9) == [9]
    assert bench.quotas is not None
    assert (bench.quotas.outboxes.refused, bench.quotas.outboxes.last_user) == (3, "greedy")
    assert bench.quotas.refusal_counts()["outbox_messages"] == 3
    bench.link.up = True
    bench.outboxes.link_up("erp")
    bench.until(lambda: len(bench.link.bodies) == 6)
    assert bench.link.bodies == [1, 2, 3, 4, 7, 8]
    assert told(bench, "greedy", 10, 11, 12) == [], "what the link has been given no longer counts"
    bench.link.settle()
    assert is_exact(bench)
    bench.one.store.close()


def test_in_one_batch_the_messages_of_others_stay_in_order(tmp_path: Path) -> None:
    bench = made(tmp_path, ", outbox: {messages_max: 8}")
    answers = dict(bench.stored(*range(11), users=("greedy", "greedy", "modest")).told)
    assert [number for number, outcome in answers.items() if outcome is OUTBOX_USER_FULL] == [6, 7, 9, 10]
    bench.link.up = True
    bench.outboxes.link_up("erp")
    assert bench.link.bodies == [0, 1, 2, 3, 4, 5, 8]
    bench.one.store.close()


def test_the_total_holds_for_all_users(tmp_path: Path) -> None:
    bench = made(tmp_path, ", outbox: {messages_max: 4}")
    assert told(bench, "greedy", 1, 2) == told(bench, "modest", 3, 4) == []
    assert bench.stored(5, users=("third",)).outcomes == [OUTBOX_FULL]
    bench.one.store.close()


def test_a_single_user_may_have_everything(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mapping(", outbox: {messages_max: 4}"), UserQuotas(HALF, several=lambda: False))
    bench.link.up = False
    assert told(bench, "only", 1, 2, 3, 4) == []
    bench.one.store.close()


@pytest.mark.parametrize("policy", ["drop_oldest", "dead_letter"])
def test_who_has_its_share_removes_its_own_messages_and_nobody_elses(tmp_path: Path, policy: str) -> None:
    bench = made(tmp_path, f", outbox: {{messages_max: 4, policy: {policy}}}")
    assert told(bench, "greedy", 1, 2, 3, 4, 5) == [], "alone it has all, and loses its oldest"
    assert told(bench, "modest", 6) == []
    assert told(bench, "greedy", 7) == [7]
    assert told(bench, "modest", 8) == []
    assert shares(bench).count_of("modest") == 2
    assert told(bench, "modest", 9) == [9], "half of all is its share"
    assert is_exact(bench)
    bench.one.store.close()


@pytest.mark.parametrize("paged", [False, True], ids=["in memory", "on disk alone"])
def test_what_the_disk_does_not_take_counts_for_nobody(tmp_path: Path, paged: bool) -> None:
    bench = made(tmp_path, ", outbox: {messages_max: 200}")
    if paged:
        assert told(bench, "greedy", *range(60)) == []
        assert told(bench, "greedy", *range(60, 70)) == []
    before = shares(bench).count
    bench.disk.fault = "disk is full"
    bench.publish(100, 101, users=("greedy", "modest"))
    assert shares(bench).count == before + 2
    assert bench.one.commit() is not ACCEPTED
    assert (shares(bench).count, shares(bench).count_of("modest")) == (before, 0)
    bench.one.until_healthy(False)
    bench.publish(102, 103, users=("greedy", "modest"))
    bench.publish(104, qos=0, users=("modest",))
    assert shares(bench).count == before + (not paged)
    assert is_exact(bench)
    bench.one.store.close()


def test_the_count_is_exact_whatever_becomes_of_messages(tmp_path: Path) -> None:
    """Delivered, released, refused, expired, too many, on disk alone, lost by the disk, over a restart."""
    bench = made(
        tmp_path, ", attempts_max: 2, outbox: {messages_max: 400}", Limits(user_share=0.9), window=30
    )
    users = ("a", "b", "c")
    for number in range(100):
        bench.stored(2 * number, 2 * number + 1, users=users)  # over 50 wait on disk alone
    bench.stored(200, 201, users=users, expires=1_001.0)
    bench.stored(202, 203, qos=0, users=users)
    assert is_exact(bench)
    bench.restart()
    assert shares(bench).count > 0
    assert is_exact(bench)
    bench.link.up = True
    bench.after(5.0)
    for outcome in (DOWN, REFUSED, REFUSED, ACCEPTED, DOWN):
        bench.until(lambda: bench.link.parts)
        bench.link.settle(outcome)
        assert is_exact(bench)
        bench.after(60.0)
        assert is_exact(bench)
    while bench.state.messages:
        bench.until(lambda: bench.link.parts or not bench.state.messages)
        bench.link.settle()
        assert is_exact(bench)
    assert (shares(bench).count, shares(bench).total) == (0, 0)
    bench.one.store.close()

"""Shares in outboxes on the cluster: who has filled one leaves room for others, at any replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.engine.outbox_shares import PERIODS_MAX, SharedOutboxShares
from gateway.model.shares import UserShares, always

MAX = 100
RESERVE = 20


def never() -> bool:
    return False


class Replica:
    """The shares at one replica, in an outbox of 100 messages of 10 bytes, or of 1 000 bytes."""

    def __init__(
        self, *, bytes_max: int = 10**9, applies: Callable[[], bool] = always, removes: bool = False
    ) -> None:
        limits: dict[str, Any] = {
            "count_max": MAX if bytes_max == 10**9 else 10**9,
            "bytes_max": bytes_max,
        }
        quota = UserShares("outbox messages", user_share=0.8, applies=applies, **limits)
        self.quota = quota
        self.refusals = UserShares("outbox messages")
        self.shares = SharedOutboxShares(quota, self.refusals, removes=removes)

    def put(self, user: str, count: int) -> int:
        """Return how many messages are accepted."""
        return [self.shares.admit(user, 10) for _ in range(count)].count(True)


@pytest.mark.parametrize("bytes_max", [10**9, 1_000])
def test_a_user_leaves_the_reserve_to_others(bytes_max: int) -> None:
    one = Replica(bytes_max=bytes_max)
    assert one.put("greedy", MAX) == MAX - RESERVE
    assert (one.refusals.refused, one.refusals.last_user) == (RESERVE, "greedy")
    assert "limits.user_share" in one.refusals.last_limit
    assert one.put("modest", 3) == 3
    assert one.put("other", MAX) == RESERVE // 4


def test_a_user_who_has_filled_it_elsewhere_gets_a_part_of_the_reserve() -> None:
    one, other = Replica(), Replica()
    put = one.put("greedy", MAX)
    for replica in (one, other):
        replica.shares.reconcile(put)
    assert other.put("greedy", MAX) == RESERVE // 4
    assert other.put("modest", 3) == 3
    assert one.put("greedy", 1) == 0


def test_what_has_left_counts_no_more() -> None:
    one = Replica()
    one.put("greedy", MAX)
    one.shares.reconcile(MAX - RESERVE)
    assert one.put("greedy", 1) == 0
    one.shares.reconcile(0)
    assert (one.quota.count, one.quota.total) == (0, 0)
    assert one.put("greedy", MAX) == MAX - RESERVE


def test_the_oldest_leave_first() -> None:
    one = Replica()
    one.put("first", 30)
    one.shares.reconcile(30)
    one.put("second", 30)
    one.shares.reconcile(30)
    assert (one.quota.count_of("first"), one.quota.count_of("second")) == (0, 30)


def test_old_periods_are_joined() -> None:
    one = Replica(bytes_max=10**6)
    for at in range(3 * PERIODS_MAX):
        one.put(f"u{at % 2}", 1)
        one.shares.reconcile(MAX * 10)
    assert one.quota.count == 3 * PERIODS_MAX
    assert len(one.shares._periods) <= PERIODS_MAX + 1


def test_a_single_user_may_have_all() -> None:
    assert Replica(applies=never).put("only", MAX) == MAX


def test_a_user_may_replace_its_own_messages_alone() -> None:
    one = Replica(removes=True)
    assert one.put("only", 2 * MAX) == 2 * MAX
    one.shares.reconcile(MAX)
    assert one.put("modest", 1) == 1
    assert one.put("only", 1) == 0

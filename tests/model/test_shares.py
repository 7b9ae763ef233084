"""Shares of users: counts in total and by user, and which entries give way."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model.shares import UserEntries, UserShares

ADDED = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=40)


def test_one_user_has_a_share_and_leaves_the_rest_to_others() -> None:
    shares = UserShares("things", count_max=10, bytes_max=100, user_share=0.8, share_option="limits.share")
    shares.add("a", 10, 8)
    assert "limits.share (8 things)" in shares.refuse_if_full("a", 0)
    assert not shares.refuse_if_full("b", 80, 2)
    assert "80 bytes of things" in shares.refuse_if_full("b", 81)
    assert (shares.refused, shares.last_user) == (2, "b")
    shares.add("b", 0, 2)
    assert shares.refuse_if_full("c", 0), "that is all there is"
    shares.remove("a", 10, 8)
    assert not shares.refuse_if_full("a", 0, 8)
    assert (shares.of("a"), shares.count_of("a"), shares.count) == (0, 0, 2)


def test_a_single_user_may_have_everything() -> None:
    several = [False]
    shares = UserShares("things", count_max=10, user_share=0.5, applies=lambda: several[0])
    assert not shares.refuse_if_full("a", 0, 10)
    several[0] = True
    assert shares.refuse_if_full("a", 0, 6)


@pytest.mark.parametrize("total, most", [(0, 0), (1, 1), (2, 1), (5, 4), (20, 18), (1_000, 900)])
def test_a_share_leaves_a_place_to_others_if_there_are_two(total: int, most: int) -> None:
    assert UserShares("things", count_max=total, user_share=0.9).user_count_max == most


@given(ADDED, st.integers(0, 8), st.integers(0, 20))
def test_no_user_pushes_out_what_one_with_less_has(
    added: list[tuple[str, int]], count_max: int, bytes_max: int
) -> None:
    entries: UserEntries[int] = UserEntries(UserShares("x", count_max=count_max, bytes_max=bytes_max))
    model: dict[int, tuple[str, int]] = {}
    for key, (user, byte_count) in enumerate(added):
        entries.add(key, user, byte_count)
        model[key] = user, byte_count
        while (gone := entries.entry_to_evict(user)) is not None:
            counts = Counter(name for name, _ in model.values())
            loser = model[gone][0]
            assert gone == min(key for key, (name, _) in model.items() if name == loser), "its oldest"
            if len(model) > count_max and sum(has for _, has in model.values()) <= bytes_max:
                assert loser == user or counts[loser] == max(counts.values())
                assert counts[loser] * len(counts) >= len(model)
            entries.discard(gone)
            del model[gone]
        assert list(entries) == list(model)
        assert len(model) <= count_max
        assert entries.shares.total == sum(has for _, has in model.values()) <= bytes_max

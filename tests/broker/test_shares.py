"""Fair shares: counts, and who has most."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.broker.shares import Shares, share_of

STEPS = st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60)


@given(STEPS)
def test_it_counts_as_a_counter_does_and_knows_who_has_most(steps: list[tuple[str, bool]]) -> None:
    shares, model = Shares(), Counter[str]()
    for holder, more in steps:
        if more:
            shares.add(holder)
            model[holder] += 1
        elif model[holder]:
            shares.remove(holder)
            model[holder] -= 1
        model += Counter()
        assert {one: shares[one] for one in "abcde" if shares[one]} == model
        assert len(shares) == len(model)
        if model:
            assert shares.largest is not None
            assert model[shares.largest] == max(model.values())
        else:
            assert shares.largest is None


def test_a_share_leaves_a_place_for_somebody_else_when_there_are_ten() -> None:
    assert [share_of(total, 0) for total in (1, 2, 9, 10, 10_000)] == [1, 2, 9, 9, 9_000]
    assert share_of(10_000, 17) == 17

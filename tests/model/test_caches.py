"""Room in what is remembered: the oldest go, a part at a time."""

from __future__ import annotations

import pytest

from gateway.model.caches import PART, make_room


@pytest.mark.parametrize("most", [1, 2, PART, 100, 1_000])
def test_never_more_and_seldom_much_less(most: int) -> None:
    cache: dict[int, int] = {}
    for number in range(3 * most):
        make_room(cache, most)
        cache[number] = number
        assert len(cache) <= most
        assert len(cache) > min(number, most - most // PART - 1)
        assert list(cache) == list(range(number - len(cache) + 1, number + 1)), "the newest are there"


def test_a_limit_that_has_become_lower() -> None:
    cache = {number: number for number in range(1_000)}
    make_room(cache, 100)
    assert list(cache) == list(range(901, 1_000))

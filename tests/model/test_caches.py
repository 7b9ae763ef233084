"""Room in what is remembered: the oldest go, a part at a time."""

from __future__ import annotations

import pytest

from gateway.model.caches import KEPT_OF, NEW_MAX, PART, Recurring, make_room


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


def test_what_comes_again_is_kept_and_what_comes_once_goes() -> None:
    seen: Recurring[int] = Recurring(64)
    for turn in range(8 * KEPT_OF):
        for number in range(32):
            if seen.get(b"again %d" % number) is None:
                seen.put(b"again %d" % number, number)
        for number in range(NEW_MAX):
            seen.put(b"once %d %d" % (turn, number), number)
            assert len(seen) <= 64 + 2 * NEW_MAX
    assert seen.get(b"once 0 1") is None


def test_as_much_as_fits_is_kept_when_it_comes_in_turn() -> None:
    seen: Recurring[int] = Recurring(4_096)
    for _ in range(3 * KEPT_OF):
        for number in range(3_000):
            if seen.get(b"%d" % number) is None:
                seen.put(b"%d" % number, number)
    assert sum(seen.get(b"%d" % number) == number for number in range(3_000)) > 2_000


def test_what_was_put_in_is_there_until_others_have_come() -> None:
    seen: Recurring[str] = Recurring(1)
    for number in range(5_000):
        seen.put(b"%d" % number, str(number))
        for before in range(max(number - NEW_MAX + 1, 0), number + 1):
            kept = before % KEPT_OF == KEPT_OF - 1
            assert kept or seen.get(b"%d" % before) == str(before)
        assert len(seen) <= 1 + 2 * NEW_MAX
    seen.clear()
    assert not len(seen)
    assert seen.get(b"4999") is None

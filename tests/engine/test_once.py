"""Messages of QoS 2 that come again, against a set that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.once import LIVES_MAX, Once, Window


@given(st.lists(st.integers(1, 60), max_size=200))
def test_within_the_window_each_number_is_first_once(counts: list[int]) -> None:
    window, seen = Window(64), set[int]()
    for count in counts:
        assert window.is_first(count) is (count not in seen)
        seen.add(count)


@given(st.lists(st.integers(1, 200), max_size=200))
def test_nothing_new_is_ever_taken_for_a_repeat(counts: list[int]) -> None:
    window, seen, top = Window(16), set[int](), 0
    for count in counts:
        first = window.is_first(count)
        assert first or count in seen
        if count > top - 16:
            assert first is (count not in seen)
        seen.add(count)
        top = max(top, count)


def test_lives_do_not_meet_and_the_oldest_is_forgotten() -> None:
    once = Once(8)
    lives = [bytes((life,)) for life in range(LIVES_MAX)]
    assert all(once.is_first((life, 1)) for life in lives)
    assert not any(once.is_first((life, 1)) for life in lives)
    assert once.is_first((b"another", 1))
    assert not once.is_first((lives[-1], 1))
    assert once.is_first((lives[0], 1))

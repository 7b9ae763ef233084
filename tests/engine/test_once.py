"""Messages of QoS 2 that come again, against a set that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.once import LIVES_MAX, RECENT_LIVES_MAX, RECENT_MAX, Once, Recent, Window


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


def test_what_was_had_of_a_lost_life_is_known_among_all_that_others_send() -> None:
    lost, others = b"lostlife", [b"others%02d" % at for at in range(RECENT_LIVES_MAX)]
    had = Recent([(lost, 5), (lost, 3)])
    for count in range(10_000):
        for other in others[1:]:
            had.add((other, count))
    assert (lost, 3) in had
    assert (lost, 4) not in had
    assert list(Recent(had)) == list(had)
    assert len(list(had)) == 2 + (RECENT_LIVES_MAX - 1) * RECENT_MAX
    had.add((others[0], 1))
    assert (lost, 3) not in had, "one life more than are remembered"

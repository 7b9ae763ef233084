"""Messages of QoS 2 that come again, against a set that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.repeated_messages import (
    CHUNK,
    LIVES_MAX,
    RECENT_LIVES_MAX,
    Chunk,
    DuplicateFilter,
    NumberSet,
    RecentNumbers,
    recent_chunks,
)

numbers = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 2**64 - 1)), max_size=200)


@given(numbers)
def test_each_number_is_first_once(counts: list[int]) -> None:
    known, seen = NumberSet(), set[int]()
    for count in counts:
        assert (count in known) is (count in seen)
        assert known.add(count) is (count not in seen)
        seen.add(count)
        assert count in known
    again = NumberSet(known.chunks().items())
    assert all((count in again) is (count in seen) for count in [*counts, 0, 7, 2**63])


@given(st.lists(st.integers(1, 40 * CHUNK), max_size=200))
def test_nothing_new_is_ever_taken_for_a_repeat(counts: list[int]) -> None:
    once, seen, top = DuplicateFilter(16 * CHUNK), set[int](), 0
    for count in counts:
        first = once.is_first((b"a life", count))
        assert first or count in seen
        if count > top - 15 * CHUNK:
            assert first is (count not in seen)
        seen.add(count)
        top = max(top, count)


def test_lives_do_not_meet_and_the_oldest_is_forgotten() -> None:
    once = DuplicateFilter(8)
    lives = [bytes((life,)) for life in range(LIVES_MAX)]
    assert all(once.is_first((life, 1)) for life in lives)
    assert not any(once.is_first((life, 1)) for life in lives)
    assert once.is_first((b"another", 1))
    assert not once.is_first((lives[-1], 1))
    assert once.is_first((lives[0], 1))


def test_what_was_had_of_a_lost_life_is_known_among_all_that_others_send() -> None:
    lost, others = b"lostlife", [b"others%02d" % at for at in range(RECENT_LIVES_MAX)]
    chunks = 4 * RECENT_LIVES_MAX
    had, stored = RecentNumbers(chunks), dict[Chunk, int]()
    had.add((lost, 3))
    stored.update(had.stored())
    for number in ((lost, 5), *((other, count) for count in range(1_000) for other in others[1:])):
        for chunk, bits in had.add(number).items():
            if bits is None:
                del stored[chunk]
            else:
                stored[chunk] = bits
    assert (lost, 3) in had
    assert (lost, 4) not in had
    assert RecentNumbers(chunks, stored).stored() == had.stored() == stored
    assert chunks - 8 <= len(stored) <= chunks
    assert all((other, count) in had for other in others[1:] for count in range(1_000 - 3 * CHUNK, 1_000))
    had.add((others[0], 1))
    assert (lost, 3) not in had, "one life more than are remembered"
    assert (others[1], 999) in had


@given(st.integers(1, 50_000), st.integers(1, 2_000), st.integers(1, 1_000))
def test_what_may_come_again_is_remembered(unconfirmed: int, unacknowledged: int, apart: int) -> None:
    had = RecentNumbers(recent_chunks(unconfirmed, unacknowledged))
    published = range(1, 2 * unconfirmed, max(1, unconfirmed // 100))  # of numbers one after the other
    sent = [3 * unconfirmed + at * apart for at in range(unacknowledged)]
    for count in (*published, *sent):
        had.add((b"a life", count))
    assert all((b"a life", count) in had for count in (*published, *sent))
    smaller, newest = RecentNumbers(1, had.stored()), 4 * max(sent)
    assert set(smaller.add((b"a life", newest))) >= set(had.stored())
    assert list(smaller.stored()) == [(b"a life", newest // CHUNK)]

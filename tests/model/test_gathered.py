"""Bytes in parts of any size are the same bytes, and small parts take hardly more memory than that."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model.byte_buffer import PART_BYTES_MIN, ByteBuffer

SIZES = (0, 1, 7, PART_BYTES_MIN - 1, PART_BYTES_MIN, 3 * PART_BYTES_MIN)


@given(st.lists(st.sampled_from(SIZES)), st.sampled_from(SIZES))
def test_what_was_put_in_comes_out(sizes: list[int], first: int) -> None:
    given_ = bytes(at % 251 for at in range(first + sum(sizes)))
    gathered = ByteBuffer(given_[:first])
    ends = [first]
    for size in sizes:
        ends.append(ends[-1] + size)
    for begin, end in pairwise(ends):
        gathered.add(given_[begin:end])
    assert gathered.byte_count == len(given_)
    assert gathered.take_all() == given_
    assert (gathered.byte_count, gathered.take_all()) == (0, b"")


@pytest.mark.parametrize("sizes", [(1,), (1, PART_BYTES_MIN), (PART_BYTES_MIN - 1, PART_BYTES_MIN)])
def test_what_it_takes_is_not_much_more_than_what_it_holds(sizes: tuple[int, ...]) -> None:
    gathered = ByteBuffer()
    for number in range(100_000 // len(sizes)):
        gathered.add(bytes(sizes[number % len(sizes)]))
    taken = sum(map(sys.getsizeof, gathered._parts)) + sys.getsizeof(gathered._parts)
    assert taken < 1.2 * gathered.byte_count + 1_000


def test_a_whole_part_is_not_copied() -> None:
    part = bytes(PART_BYTES_MIN)
    gathered = ByteBuffer()
    gathered.add(part)
    assert gathered.take_all() is part

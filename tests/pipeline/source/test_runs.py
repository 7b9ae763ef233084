"""Runs expanded by numpy are those that the journal's own reader expands."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("pyarrow")

from hypothesis import given
from hypothesis import strategies as st

from gateway.pipeline.journal.arrow import expand_runs
from gateway.store.journal.format import DamageError, Repeated, decode_runs
from tests.store.journal.test_formats import DAMAGED

runs = st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(0, 40)), min_size=1, max_size=20)


@given(runs, st.sampled_from([1, 2, 4, 8]))
def test_both_say_the_same(given: list[tuple[bytes, int]], width: int) -> None:
    values = b"".join(value[:width] for value, _ in given)
    lengths = [length for _, length in given]
    head = struct.pack(f"<{len(given) + 2}I", len(given), width, *lengths)
    stored = memoryview(head.ljust(len(head) + -len(head) % 8, b"\0") + values)
    byte_count = len(Repeated(values, width, lengths))
    assert bytes(expand_runs(stored, byte_count)) == decode_runs(stored, byte_count)


@pytest.mark.parametrize("stored", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_damage(stored: bytes) -> None:
    with pytest.raises(DamageError, match="runs of a buffer"):
        expand_runs(memoryview(stored), 120)

"""The ring: what was put in is there until it is freed, wherever it lies and however full the ring is."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gateway.store.journal.ring import Ring

# Octets to put in, or None: free the oldest.
steps = st.lists(st.one_of(st.none(), st.integers(1, 40)), max_size=60)


@given(steps, st.integers(1, 60))
def test_nothing_is_written_over(steps: list[int | None], size: int) -> None:
    ring = Ring(size)
    waiting: deque[tuple[bytes, memoryview, int]] = deque()
    for number, step in enumerate(steps):
        if step is not None:
            octets = bytes((number,)) * step
            waiting.append((octets, *ring.put([octets[:3], octets[3:]], step)))
        elif waiting:
            ring.free(waiting.popleft()[2])
        for octets, view, _ in waiting:
            assert bytes(view) == octets


def test_it_uses_its_memory_again() -> None:
    ring = Ring(10)
    used = set()
    for _ in range(20):
        view, place = ring.put([b"abcd"], 4)
        memory = view.obj
        used.add(id(memory))
        ring.free(place)
    assert len(used) == 1
    assert ring.put([b"x" * 11], 11)[0].obj is not memory

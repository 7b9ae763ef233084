"""The wall clock's time of something is decided by when it was, however late and often it is asked for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.store.journal.wall import CHANGES_MAX, WallClock
from tests.store.journal.samples import HOME, message, rows_of, writer

UTC = 1_700_000_000.0


class Clocks:
    """A loop's clock that began anywhere, and a wall clock that somebody may set."""

    def __init__(self, loop: float = 734_211.7) -> None:
        self.loop = loop
        self.ahead = UTC - loop

    def later(self, seconds: float) -> None:
        self.loop += seconds

    def set(self, seconds: float) -> None:
        self.ahead += seconds

    def wall(self) -> WallClock:
        return WallClock(lambda: self.loop, lambda: self.loop + self.ahead)  # type: ignore[arg-type,return-value]


def seconds(wall: WallClock, at: float) -> float:
    return wall.micros(at) / 1e6  # type: ignore[arg-type]


@pytest.mark.parametrize("loop", [0.0, 0.5, 3_600.0 * 24 * 40, 9.9e8])
def test_a_clock_that_began_anywhere(loop: float) -> None:
    clocks = Clocks(loop)
    wall = clocks.wall()
    wall.now()
    clocks.later(86_400.0 * 9)
    assert seconds(wall, wall.now()) == pytest.approx(UTC + 86_400 * 9, abs=1e-3)
    assert seconds(wall, loop) == pytest.approx(UTC, abs=1e-3)


@pytest.mark.parametrize("step", [-3_600.0, -1.0, 0.5, 86_400.0])
def test_a_wall_clock_that_is_set_moves_only_what_comes_later(step: float) -> None:
    clocks = Clocks()
    wall = clocks.wall()
    came = wall.now()
    before = seconds(wall, came)
    clocks.later(1.0)
    clocks.set(step)
    clocks.later(1.0)
    after = clocks.loop
    assert seconds(wall, wall.now()) == pytest.approx(UTC + 2 + step, abs=1e-3)
    clocks.later(50.0)
    wall.now()
    assert (seconds(wall, came), seconds(wall, after)) == (before, pytest.approx(UTC + 2 + step, abs=1e-3))


def test_a_clock_that_is_pulled_along_stays_near_and_goes_on() -> None:
    clocks = Clocks()
    wall = clocks.wall()
    told = []
    for _ in range(1_000):
        clocks.later(0.2)
        clocks.set(0.001)
        told.append(seconds(wall, wall.now()))
        assert told[-1] == pytest.approx(clocks.loop + clocks.ahead, abs=0.021)
    assert all(one < other for one, other in pairwise(told))
    assert len(wall._offsets) == len(wall._changed) + 1 <= CHANGES_MAX + 1


def test_rows_of_one_message_agree_though_the_clock_was_set_between_them(tmp_path: Path) -> None:
    clocks = Clocks()
    given: dict[str, Any] = {"clock": lambda: clocks.loop, "utc": lambda: clocks.loop + clocks.ahead}
    journal = writer(tmp_path, **given)
    came = clocks.loop
    journal.record(HOME, [message(1)], ACCEPTED, Monotonic(came))
    clocks.later(3.0)
    clocks.set(-900.0)
    journal.record(HOME, [message(1)], ACCEPTED, Monotonic(came))
    journal.close()
    one, other = rows_of(tmp_path)
    assert one["received"] == other["received"] == pytest.approx(UTC * 1e6, abs=1_000)
    assert other["settled"] == pytest.approx((UTC + 3 - 900) * 1e6, abs=1_000)

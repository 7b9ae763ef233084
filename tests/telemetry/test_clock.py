"""UTC that does not jump with the wall clock."""

from __future__ import annotations

from functools import partial

import pytest
import structlog.testing
import trio

from gateway import clock
from gateway.clock import SLEW, STEP_SECS_MAX, SteadyClock
from gateway.telemetry.watchdog import watch_wall_clock

BEGAN = 1_000_000.0


class Machine:
    """A wall clock that may be set, and time that passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.boot = BEGAN, 50.0
        monkeypatch.setattr(clock, "unix_time", lambda: self.wall)
        monkeypatch.setattr(clock, "monotonic", lambda: self.boot)
        monkeypatch.setattr(clock, "BOOT_TIME", None)
        self.clock = SteadyClock()

    def wait(self, seconds: float, *, wall: float | None = None) -> float:
        self.boot += seconds
        self.wall += seconds if wall is None else wall
        return self.clock.utc()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_it_goes_with_a_right_clock(machine: Machine) -> None:
    assert machine.wait(10.0) == BEGAN + 10.0
    assert machine.wait(1.0, wall=1.5) == pytest.approx(BEGAN + 11.5)
    assert machine.wait(1.0, wall=0.7) == pytest.approx(BEGAN + 12.2)


async def test_leases_also_run_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"now": 10.0, "monotonic": 500.0, "since_boot": 500.0}
    for name in times:
        monkeypatch.setattr(clock, name, partial(times.__getitem__, name))
    before = clock.lease_time()
    for name in times:
        times[name] += 1.0
    times["since_boot"] += 3_600.0
    assert clock.lease_time() - before == 3_601.0


@pytest.mark.parametrize("step", [2.0, -2.0, 7_200.0, -7_200.0, 691_200.0])
def test_a_jump_is_followed_slowly(machine: Machine, step: float) -> None:
    machine.wall += step
    direction = 1 if step > 0 else -1
    before = machine.clock.utc()
    assert before == BEGAN
    for _ in range(100):
        after = machine.wait(1.0)
        assert after - before == pytest.approx(1.0 + direction * SLEW)
        before = after


@pytest.mark.parametrize("step", [3.0, -3.0])
def test_a_jump_ends_when_it_has_been_followed(machine: Machine, step: float) -> None:
    machine.wall += step
    for _ in range(int((abs(step) - STEP_SECS_MAX) / SLEW) + 2):
        machine.wait(1.0)
    assert machine.clock.utc() == machine.wall


def test_a_machine_that_slept_knows_it(machine: Machine) -> None:
    assert machine.wait(3_600.0) == BEGAN + 3_600.0


async def test_each_jump_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    ahead = [0.0]
    monkeypatch.setattr(clock, "wall_ahead", lambda: ahead[0])
    with structlog.testing.capture_logs() as logged:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_wall_clock)
            for ahead[0] in (0.0, 0.4, 7_200.0, 7_199.9, 0.1, -5.0):
                await trio.sleep(5.0)
            nursery.cancel_scope.cancel()
    assert [line["ahead_seconds"] for line in logged] == [7_200.0, 0.1, -5.0]

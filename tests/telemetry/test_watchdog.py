"""Turns of the loop are measured, and a long one is told with its cause."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from gateway.settings import Http
from gateway.settings.tree import LogSettings
from gateway.telemetry.metrics import TURN_SECONDS, Metrics, Sources
from gateway.telemetry.watchdog import BLOCKED, Watchdog
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of


class Cause:
    endpoint, remote, client = "mqtt", "192.0.2.7:4711", "sensor"


class World:
    """A watchdog whose stopwatch shows what tasks say that they have taken."""

    def __init__(self, slow_turn_secs: float) -> None:
        self.time = 1.0
        self.dog = Watchdog(slow_turn_secs, lambda: self.time)

    async def works(self, *steps: float, suspected: float = 0.0) -> None:
        for secs in steps:
            await trio.lowlevel.checkpoint()
            self.time += secs
            if suspected:
                self.dog.suspect(Cause(), suspected)
                self.dog.suspect(Cause(), suspected / 2)
        await trio.lowlevel.checkpoint()

    async def run(self, *steps: float, suspected: float = 0.0) -> list[Any]:
        self.dog.attach()
        try:
            with capture_logs() as logs:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(self.works, suspected=suspected), *steps, name="timer")
        finally:
            self.dog.detach()
        return [one for one in logs if one["event"] == BLOCKED]


async def test_a_long_step_is_told_with_its_task() -> None:
    [told] = await World(0.1).run(0.05, 0.25, 0.09)
    assert (told["seconds"], told["task"]) == (0.25, "timer")
    assert "remote" not in told


async def test_it_names_the_connection_that_most_of_it_was_for() -> None:
    [told] = await World(0.1).run(0.2, suspected=0.15)
    assert (told["endpoint"], told["remote"], told["client"]) == ("mqtt", "192.0.2.7:4711", "sensor")


async def test_it_names_no_connection_that_took_but_a_part() -> None:
    [told] = await World(0.1).run(0.2, suspected=0.05)
    assert "remote" not in told


async def test_a_suspicion_ends_with_its_step() -> None:
    world = World(0.1)
    await world.run(0.05, suspected=0.04)
    [told] = await world.run(0.2)
    assert "remote" not in told


async def test_0_tells_nothing_and_measures_all() -> None:
    world = World(0.0)
    assert await world.run(3.0) == []
    assert world.dog.turns.sum_secs == pytest.approx(3.0)


async def test_turns_are_a_histogram() -> None:
    world = World(0.1)
    await world.run(0.004, 0.2)
    metrics = Metrics("1", Sources(turns=world.dog.turns))
    text = metrics.exposition("")[0].decode()
    assert f'{TURN_SECONDS}_bucket{{le="10.0"}} {float(sum(world.dog.turns.counts))}' in text
    assert f"{TURN_SECONDS}_sum 0.20" in text


def test_a_start_is_not_told_and_what_follows_is(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogSettings(slow_turn_secs=1e-9)  # every step is too long
    http = Http(host=LOOPBACK, port=0)  # its start takes steps
    with running(settings_of(log=log, http=http)) as gateway:
        gateway.ask(lambda: None)
    lines = capsys.readouterr().out
    assert lines.index("'started'") < lines.index(BLOCKED)

"""The last hour: rings of what the counters have counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.model.times import Monotonic
from gateway.telemetry import history as module
from gateway.telemetry.history import STEP_SECS, STEPS, CounterKey, History
from gateway.telemetry.metrics import Metrics, Sources
from tests.telemetry.samples import ResolvedRoute

UTC = 1_800_000_000.0
IN = CounterKey("process", "", "in")


class Scene:
    """A listener, a link and a route, and a clock that the test turns."""

    def __init__(self) -> None:
        self.route = ResolvedRoute(matched=0, delivered=0, failed=0)
        self.routes: list[Any] = [self.route]
        self.letters: dict[tuple[str, str], int] = {}
        sources = Sources(routes=lambda: self.routes, dead_lettered=lambda: self.letters)
        self.metrics = Metrics("1", sources)
        self.listener = self.metrics.listener("mqtt", "mqtt")
        self.link = self.metrics.link("erp", "amqp091")
        self.history = History(self.metrics)
        self.now = 1_000.0
        self.tick()

    def tick(self, secs: float = 0.0) -> None:
        self.now += secs
        self.history.tick(Monotonic(self.now), UTC + self.now)

    def values(self, key: CounterKey) -> list[float]:
        return self.history.series(key).values


def test_what_was_counted_before_the_first_look_is_no_rate() -> None:
    busy = Metrics("1")
    busy.listener("mqtt", "mqtt").messages_in = 1_000_000
    history = History(busy)
    history.tick(Monotonic(5.0), UTC)
    history.tick(Monotonic(15.0), UTC + 10)
    assert history.series(IN).values == [0.0]
    assert history.current_rate(IN) == 0.0


def test_each_step_has_what_was_counted_in_it() -> None:
    scene = Scene()
    for second in range(35):
        scene.listener.messages_in += 10 if second < 20 else 0
        scene.link.messages_in += 1
        scene.tick(1.0)
    assert scene.values(IN) == [9.9, 11.0, 2.0]
    assert scene.values(CounterKey("listener", "mqtt", "in")) == [9.0, 10.0, 1.0]
    assert scene.values(CounterKey("link", "erp", "in")) == [0.9, 1.0, 1.0]
    assert scene.history.current_rate(CounterKey("link", "erp", "in")) == 1.0
    assert scene.history.end == UTC + 1_030.0


def test_an_hour_is_kept_and_no_more() -> None:
    scene = Scene()
    for step in range(STEPS + 20):
        scene.listener.messages_in += step
        scene.tick(float(STEP_SECS))
    values = scene.values(IN)
    assert len(values) == STEPS - 1
    assert values[-1] == (STEPS + 18) / STEP_SECS
    assert values[0] == 20 / STEP_SECS


@pytest.mark.parametrize("hours", [0.5, 1, 3])
def test_a_gateway_that_stood_still_has_counted_nothing_meanwhile(hours: float) -> None:
    scene = Scene()
    scene.listener.messages_in += 50
    scene.tick(1.0)
    scene.tick(hours * 3_600)
    values = scene.values(IN)
    assert sum(values) == (5.0 if hours < 1 else 0.0)
    assert len(values) == min(int(hours * 360), STEPS - 1)


def test_a_clock_that_goes_back_a_little_does_no_harm() -> None:
    scene = Scene()
    scene.listener.messages_in += 5
    scene.tick(10.0)
    scene.listener.messages_in += 5
    scene.tick(-10.0)
    scene.tick(20.0)
    assert sum(scene.values(IN)) == 1.0


def test_a_counter_that_begins_anew_goes_on() -> None:
    scene = Scene()
    key = CounterKey("route", "telemetry", "in")
    scene.route.matched = 100
    scene.tick(1.0)
    scene.routes[:] = [ResolvedRoute(matched=7, delivered=0, failed=0)]
    scene.tick(1.0)
    scene.tick(10.0)
    assert scene.values(key) == [10.7]


def test_routes_count_what_failed_and_their_dead_letters() -> None:
    scene = Scene()
    scene.route.failed, scene.route.dropped = 3, 4
    scene.letters = {("telemetry", "no_route"): 2, ("telemetry", "expired"): 1, ("", "no_route"): 5}
    scene.tick(1.0)
    scene.tick(10.0)
    assert scene.values(CounterKey("route", "telemetry", "refused")) == [0.7]
    assert scene.values(CounterKey("route", "telemetry", "dead_letters")) == [0.3]
    assert scene.values(CounterKey("process", "", "dead_letters")) == [0.8]


def test_a_route_that_has_gone_is_forgotten_after_an_hour() -> None:
    scene = Scene()
    key = CounterKey("route", "telemetry", "in")
    scene.route.matched = 10
    scene.tick(1.0)
    scene.routes.clear()
    scene.tick(3_000.0)
    assert key in scene.history.counters()
    assert scene.history.current_rate(key) == 0.0
    scene.tick(600.0)
    assert key not in scene.history.counters()
    assert scene.values(key) == []


def test_there_is_a_most_of_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERIES_MAX", 20)
    scene = Scene()
    before = len(scene.history.counters())
    scene.routes[:] = [ResolvedRoute(name=f"r{number}") for number in range(100)]
    scene.tick(1.0)
    assert len(scene.history.counters()) == 20
    assert scene.history.left_out == 4 * 100 - (20 - before)


def test_a_step_counts_as_much_as_it_can() -> None:
    scene = Scene()
    scene.listener.messages_in = 1 << 40
    scene.tick(1.0)
    scene.tick(10.0)
    assert scene.values(IN) == [((1 << 32) - 1) / STEP_SECS]


def test_frames_are_counted_by_protocol_and_direction() -> None:
    scene = Scene()
    frames = SimpleNamespace(received={}, sent={})
    scene.listener.add_connection(frames)
    scene.listener.set_version(frames, "5.0")
    frames.received["PUBLISH"] = 40
    frames.sent["PUBACK"] = 20
    scene.tick(STEP_SECS)
    scene.tick(STEP_SECS)
    assert scene.values(CounterKey("protocol", "mqtt", "frames_in"))[-1] == 4.0
    assert scene.values(CounterKey("protocol", "mqtt", "frames_out"))[-1] == 2.0
    assert scene.values(CounterKey("protocol", "amqp091", "frames_in"))[-1] == 0.0

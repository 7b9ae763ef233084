"""Rates of counters during the last hour, in steps of ten seconds, stored in ring buffers.

The recording lets a chart show data as soon as it is opened. Once a second the existing counters are read;
nothing else is counted for this purpose. A series is one counter: of the process, of a protocol, of a
listener or link, or of a route. Each series takes the same memory with or without traffic, and the number of
series is limited. A counter that restarts, such as those of routes when the mapping changes, continues from
zero; a counter that has not existed for an hour is removed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import trio

from gateway import clock
from gateway.model.times import Monotonic
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import ListenerStats

STEP_SECS: Final = 10
STEPS: Final = 360
SERIES_MAX: Final = 2_000  # 1.5 KB each
RECENT_SECS: Final = 5  # period over which the current rate is measured
TICK_SECS: Final = 1.0
COUNT_MAX: Final = (1 << 32) - 1  # largest count of one step


class CounterKey(NamedTuple):
    """Key of a counter in the history.

    `kind` is `process`, `protocol`, `listener`, `link` or `route`, and `name` is the name of the object of
    this kind. `what` is what is counted, such as `in` or `settled`.
    """

    kind: str
    name: str
    what: str


class Series(NamedTuple):
    """Rates of one counter, in events per second.

    `now` is the rate over the last RECENT_SECS seconds. `values` has the rate over each step (STEP_SECS
    seconds) of the last hour, the oldest first.
    """

    key: CounterKey
    now: float
    values: list[float]


class History:
    """Rates of the gateway's counters during the last hour, which is divided into steps of STEP_SECS seconds.

    `end` is the time at which the last complete step ended, in wall-clock seconds. At most SERIES_MAX
    counters are recorded; `left_out` is the number of the others.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.end = 0.0
        self.left_out = 0
        self._metrics = metrics
        self._rings: dict[CounterKey, array[int]] = {}
        self._recent: deque[tuple[float, dict[CounterKey, int]]] = deque(maxlen=RECENT_SECS + 1)
        self._step = 0
        self._whole = 0  # whole steps since the start, at most STEPS - 1

    async def run(self) -> None:
        """Read the counters every TICK_SECS seconds until this task is cancelled."""
        while True:
            self.tick(clock.now(), clock.wall())
            await trio.sleep(TICK_SECS)

    def tick(self, now: Monotonic, utc: float) -> None:
        """Read the counters, and add their increases to the present step.

        `now` is in loop-clock seconds, `utc` in wall-clock seconds.
        """
        counts: dict[CounterKey, int] = {}
        rings = self._rings
        self.left_out = 0
        for key, count in self._current_counts():
            if key not in rings:
                if len(rings) >= SERIES_MAX:
                    self.left_out += 1
                    continue
                rings[key] = array("I", [0] * STEPS)
            counts[key] = count
        self._advance(int(now // STEP_SECS), utc - now % STEP_SECS, counts)
        if self._recent:
            before = self._recent[-1][1]
            place = self._step % STEPS
            for key, count in counts.items():
                count_before = before.get(key, 0)
                if count != count_before:
                    ring = rings[key]
                    ring[place] = min(ring[place] + _increase(count_before, count), COUNT_MAX)
        self._recent.append((now, counts))

    def _advance(self, step: int, began: float, counts: dict[CounterKey, int]) -> None:
        """Begin step number `step`, and set the values of this step and of skipped steps to 0.

        Nothing happens if the step has begun already. `began` is the time when it began, in wall-clock
        seconds. `counts` has the present counters; a counter that is not in it, and has not increased for an
        hour, is removed.
        """
        if not self._recent:
            self._step = step
            self.end = began
        passed = step - self._step
        if passed <= 0:
            return
        self._step, self.end = step, began
        self._whole = min(self._whole + passed, STEPS - 1)
        for key, ring in list(self._rings.items()):
            for step_passed in range(max(step - STEPS, step - passed) + 1, step + 1):
                ring[step_passed % STEPS] = 0
            if key not in counts and not any(ring):
                del self._rings[key]

    def counters(self) -> list[CounterKey]:
        """Return the keys of all recorded counters, sorted."""
        return sorted(self._rings)

    def series(self, key: CounterKey) -> Series:
        """Return the rates of one counter. Its `values` are empty if the counter is not recorded."""
        ring = self._rings.get(key)
        steps = range(self._step - self._whole, self._step)
        values = [] if ring is None else [ring[step % STEPS] / STEP_SECS for step in steps]
        return Series(key, self.current_rate(key), values)

    def current_rate(self, key: CounterKey) -> float:
        """Return the rate of a counter, in events per second, over the last RECENT_SECS seconds.

        Return 0 if the counter was not recorded during all of this time.
        """
        if len(self._recent) < 2:
            return 0.0
        (began, before), (ended, after) = self._recent[0], self._recent[-1]
        if key not in before or key not in after or ended <= began:
            return 0.0
        return _increase(before[key], after[key]) / (ended - began)

    def _current_counts(self) -> Iterator[tuple[CounterKey, int]]:
        """Yield key and present value of each counter to record."""
        metrics = self._metrics
        letters: dict[str, int] = {}
        for (route, _), count in metrics.sources.dead_lettered().items():
            letters[route] = letters.get(route, 0) + count
        totals = {"in": 0, "out": 0, "settled": 0, "refused": 0}
        frames: dict[tuple[str, str], int] = {}
        rows: list[tuple[CounterKey, int]] = []
        for stats in metrics.endpoints():
            kind = "listener" if isinstance(stats, ListenerStats) else "link"
            for direction, count in zip(("in", "out"), stats.frame_totals(), strict=True):
                at = (stats.protocol, direction)
                frames[at] = frames.get(at, 0) + count
            settled = refused = 0
            for outcome, _, count in stats.settled_counts():
                settled += count
                refused += count if outcome != "accepted" else 0
            counts = (stats.messages_in, stats.messages_out, settled, refused)
            for field, count in zip(totals, counts, strict=True):
                totals[field] += count
                rows.append((CounterKey(kind, stats.name, field), count))
        for field, count in totals.items():
            yield CounterKey("process", "", field), count
        for (protocol, direction), count in frames.items():
            yield CounterKey("protocol", protocol, f"frames_{direction}"), count
        yield CounterKey("process", "", "dead_letters"), sum(letters.values())
        yield from rows
        for one in metrics.sources.routes():
            yield CounterKey("route", one.name, "in"), one.matched
            yield CounterKey("route", one.name, "out"), one.delivered
            yield CounterKey("route", one.name, "refused"), one.failed + one.dropped
            yield CounterKey("route", one.name, "dead_letters"), letters.get(one.name, 0)


def _increase(before: int, after: int) -> int:
    """Return the increase of a counter from `before` to `after`.

    If `after` is lower, the counter has restarted from zero, and the result is `after`.
    """
    return after - before if after >= before else after

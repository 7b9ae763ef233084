"""Numbers of each queue or client during the last hour, which the console shows on the object's own page.

Clients choose how many queues and clients there are, other than the counters in
`gateway/telemetry/history.py`. So the numbers are read only every STEP_SECS seconds, in slices with turns of
the event loop in between, and only the first OBJECTS_MAX objects that are found have a history.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import trio

from gateway import clock
from gateway.admin.messages import moment
from gateway.admin.selection import slices

STEP_SECS: Final = 30
STEPS: Final = 120
SECS_MIN: Final = 0.001
OBJECTS_MAX: Final = 500  # 2 KB each

T = TypeVar("T")


class ObjectSteps:
    """Values of one object (such as a queue) in the last hour: one for each step, the oldest first.

    `values` has one array for each kind of recorded number. `numbers` are the numbers that were read in the
    last step, from which the next increases of counts are calculated.
    """

    __slots__ = ("numbers", "round", "values")

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.values = [array("f") for _ in numbers]
        self.round = 0  # number of the last `step` that has found the object


class ObjectHistory(Generic[T]):
    """Recorder of the numbers of many objects, such as all queues, during the last hour.

    `every` returns the objects, `key` the identifier of an object. `read` returns the present numbers of an
    object: first its levels (such as messages in a queue), named by `levels`, then its counts (such as
    messages received), named by `counts`. A level is stored unchanged, a count as its increase per second.
    `dropped` is called with the key of each object that no longer exists.
    """

    def __init__(
        self,
        every: Callable[[], Iterable[T]],
        key: Callable[[T], str],
        read: Callable[[T], Sequence[int]],
        levels: Sequence[str],
        counts: Sequence[str],
        dropped: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._every = every
        self._key = key
        self._read = read
        self._levels = len(levels)
        self._names = (*levels, *counts)
        self._dropped = dropped
        self._steps: dict[str, ObjectSteps] = {}
        self._round = 0
        self._now = 0.0  # loop-clock time of the last `step`
        self._secs = 0.0  # seconds between the last two, which may be a little more than STEP_SECS
        self._at: float | None = None  # wall-clock time at which the last `step` began

    async def run(self) -> None:
        """Read the objects every STEP_SECS until cancelled."""
        while True:
            await self.step(clock.now())
            await trio.sleep(STEP_SECS)

    async def step(self, now: float) -> None:
        """Read the numbers of all objects once, and delete the history of objects that no longer exist.

        `now` is in loop-clock seconds.
        """
        self._round += 1
        self._secs, self._now = max(now - self._now, SECS_MIN), now
        self._at = clock.wall()
        async for some in slices(self._every()):
            for one in some:
                self._note(self._key(one), one)
        for key in [key for key, steps in self._steps.items() if steps.round != self._round]:
            del self._steps[key]
            self._dropped(key)

    def _note(self, key: str, one: T) -> None:
        """Add the present numbers of the object `one` to its history, or create the history.

        `key` is the identifier of the object.
        """
        steps = self._steps.get(key)
        if steps is None:
            if len(self._steps) < OBJECTS_MAX:
                steps = self._steps[key] = ObjectSteps(self._read(one))
                steps.round = self._round
            return
        numbers = self._read(one)
        for at, (before, number, values) in enumerate(zip(steps.numbers, numbers, steps.values, strict=True)):
            if at < self._levels:
                values.append(number)
            else:  # a count lower than before has restarted from zero
                values.append((number - before if number >= before else number) / self._secs)
            if len(values) > STEPS:
                del values[0]
        steps.numbers, steps.round = numbers, self._round

    def shown(self, one: T) -> Mapping[str, Any] | None:
        """Return the history of the object `one` as JSON (HistoryRow), or None if nothing is recorded yet."""
        steps = self._steps.get(self._key(one))
        if steps is None or self._at is None or not steps.values[0]:
            return None
        return {
            "step_secs": STEP_SECS,
            "until": moment(self._at),
            "values": {
                name: [round(number, 3) for number in values]
                for name, values in zip(self._names, steps.values, strict=True)
            },
        }

"""Numbers of each queue or client during the last hour, for the pages of single objects.

Other than in `gateway/telemetry/history.py`, clients choose how many such objects there are. So they are read
every STEP_SECS only, in slices, and only the first OBJECTS_MAX that are found have a history.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

import trio

from gateway import clock
from gateway.admin.selection import slices

STEP_SECS: Final = 30
STEPS: Final = 120
OBJECTS_MAX: Final = 500  # 2 KB each

T = TypeVar("T")


class ObjectSteps:
    """Numbers of one object at the end of each step, the oldest first.

    `numbers` are the latest ones, which counts are compared with.
    """

    __slots__ = ("numbers", "round", "values")

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.values = [array("f") for _ in numbers]
        self.round = 0  # number of the walk that has found the object


class ObjectHistory(Generic[T]):
    """Recorder of the numbers of `every` object, identified by `key`.

    `read` returns the present levels of an object, named by `levels`, and behind them its counts, named by
    `counts`. A count is stored as its increase per second. `dropped` is called with the key of each object
    that no longer exists.
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
        self._at: float | None = None  # wall time at which the last walk began

    async def run(self) -> None:
        """Read the objects every STEP_SECS until cancelled."""
        while True:
            await self.step()
            await trio.sleep(STEP_SECS)

    async def step(self) -> None:
        """Read the objects once, and forget those that no longer exist."""
        self._round += 1
        self._at = clock.wall()
        async for some in slices(self._every()):
            for one in some:
                self._note(self._key(one), one)
        for key in [key for key, steps in self._steps.items() if steps.round != self._round]:
            del self._steps[key]
            self._dropped(key)

    def _note(self, key: str, one: T) -> None:
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
                values.append((number - before if number >= before else number) / STEP_SECS)
            if len(values) > STEPS:
                del values[0]
        steps.numbers, steps.round = numbers, self._round

    def shown(self, one: T) -> Mapping[str, Any] | None:
        """Return the history of an object as a part of its row, None if it has none yet."""
        steps = self._steps.get(self._key(one))
        if steps is None or self._at is None or not steps.values[0]:
            return None
        return {
            "step_secs": STEP_SECS,
            "until": datetime.fromtimestamp(self._at, UTC).isoformat(timespec="seconds"),
            "values": {
                name: [round(number, 3) for number in values]
                for name, values in zip(self._names, steps.values, strict=True)
            },
        }

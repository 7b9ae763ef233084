"""Which windows of time a stream may tell, and which it has to tell again. Pure: no Spark, no files.

The journal is in the order of settlement: what waits for a broker that is away is written hours after what
came later and was settled at once. So the newest row says nothing of older ones, and a watermark on it loses
them. The journal itself says up to when it is complete (`gateway/store/journal/format.py`), and a window is
told when that is past its end; or, should one message stay open for ever, when rows that came `late` after
its end have been seen. What comes later still is counted, and its windows are told again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple

from gateway.errors import PipelineError
from gateway.pipeline.journal.options import Offsets

SECOND: Final = 1_000_000  # in microseconds
UNITS: Final = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}


class Touched(NamedTuple):
    """Rows of a micro-batch in one shard and window (microseconds UTC), the number behind the newest of them,
    and when the last one was received."""

    shard: str
    begin: int
    end: int
    rows: int
    next: int
    last_us: int


class Due(NamedTuple):
    """What a micro-batch tells: `windows`, (begin, end) in order; those of them that were told before; and
    how many rows came later than their window was told."""

    windows: list[tuple[int, int]]
    again: set[tuple[int, int]]
    late_rows: int


@dataclass
class Windows:
    """What a stream of windows remembers from one micro-batch to the next.

    `number`: of the micro-batch; `ends`: the rows read, by shard; `horizon`: windows that end up to then have
    been told; `waiting`: windows with rows that have not.
    """

    number: int = -1
    ends: Offsets = field(default_factory=dict)
    horizon: int = 0
    newest: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)

    def encode(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Windows:
        """What `encode` wrote."""
        given = json.loads(text)
        return cls(**given | {"waiting": [(begin, end) for begin, end in given["waiting"]]})

    def read(self, number: int, rows: Iterable[Touched]) -> Windows:
        """What is known when micro-batch `number` with these rows has been read; nothing is told yet."""
        found = Windows(number, dict(self.ends), self.horizon, self.newest)
        waiting = set(self.waiting)
        for one in rows:
            waiting.add((one.begin, one.end))
            found.ends[one.shard] = max(one.next, found.ends.get(one.shard, 0))
            found.newest = max(one.last_us, found.newest)
        found.waiting = sorted(waiting)
        return found

    def due(self, rows: Iterable[Touched], marks: Mapping[str, int | None], late_us: int) -> Due:
        """What may be told now, by the low-water mark of each shard; they do not wait any more."""
        before = self.horizon
        known = [mark for mark in marks.values() if mark is not None]
        complete = min(known) if known and len(known) == len(marks) else 0
        self.horizon = max(before, complete, self.newest - late_us)
        told = [window for window in self.waiting if window[1] <= self.horizon]
        self.waiting = [window for window in self.waiting if window[1] > self.horizon]
        late = sum(one.rows for one in rows if one.end <= before)
        return Due(told, {window for window in told if window[1] <= before}, late)


def runs_of(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Times from the begin of the first to the end of the last of those that follow each other."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(windows):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def duration_us(text: str) -> int:
    """Microseconds of "10 minutes". Raises PipelineError."""
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]+?)s?\s*", text)
    if found is None or found[2] not in UNITS:
        raise PipelineError(
            f"a time is said as in '10 minutes' (seconds, minutes, hours, days), not {text!r}"
        )
    return int(found[1]) * UNITS[found[2]] * SECOND

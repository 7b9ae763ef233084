"""Time windows of a stream: which ones are complete, and which have to be reported again.

The code is pure, without Spark or files.

The journal is in the order of settlement: a message that waits for an unreachable broker is written hours
after later messages. So the newest row does not bound older ones, and a watermark on it would lose them. The
journal itself records up to when it is complete (`gateway/store/journal/format.py`). A window is reported
when that time is past its end; or, in case a message never settles, when rows received `lateness` after its
end have been read. Later rows are counted, and their windows reported again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple

from gateway.errors import PipelineError
from gateway.pipeline.journal.options import Offsets

SECOND: Final = 1_000_000  # In microseconds.
UNITS: Final = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}


class Touched(NamedTuple):
    """Rows of a micro-batch in one shard and window.

    `rows` is their number, `next` the number behind the newest one, and `last_us` the last time of receipt;
    times are in microseconds UTC.
    """

    shard: str
    begin: int
    end: int
    rows: int
    next: int
    last_us: int


class DueWindows(NamedTuple):
    """Result of a micro-batch: windows to report.

    `windows` are all of them as (begin, end), in order; `again` those that were reported before; `late_rows`
    is the number of rows that were read after the report of their window.
    """

    windows: list[tuple[int, int]]
    again: set[tuple[int, int]]
    late_rows: int


@dataclass
class Windows:
    """State of a stream of windows between micro-batches.

    `number` is that of the micro-batch; `ends` the rows read, by shard; windows that end at `horizon` or
    earlier have been reported; `waiting` are windows with rows that have not.
    """

    number: int = -1
    ends: Offsets = field(default_factory=dict)
    horizon: int = 0
    newest: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)

    def encode(self) -> str:
        """Return the state as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Windows:
        """Return the state that `encode` wrote."""
        document = json.loads(text)
        return cls(**document | {"waiting": [(begin, end) for begin, end in document["waiting"]]})

    def read(self, number: int, rows: Iterable[Touched]) -> Windows:
        """Return the state after reading micro-batch `number` with these rows.

        No window is reported yet.
        """
        found = Windows(number, dict(self.ends), self.horizon, self.newest)
        waiting = set(self.waiting)
        for one in rows:
            waiting.add((one.begin, one.end))
            found.ends[one.shard] = max(one.next, found.ends.get(one.shard, 0))
            found.newest = max(one.last_us, found.newest)
        found.waiting = sorted(waiting)
        return found

    def take_due(self, rows: Iterable[Touched], marks: Mapping[str, int | None], late_us: int) -> DueWindows:
        """Return the windows to report, and remove them from `waiting`.

        `marks` are the low-water marks of the shards, and `late_us` is the lateness in microseconds.
        """
        before = self.horizon
        known_marks = [mark for mark in marks.values() if mark is not None]
        complete = min(known_marks) if known_marks and len(known_marks) == len(marks) else 0
        self.horizon = max(before, complete, self.newest - late_us)
        ended = [window for window in self.waiting if window[1] <= self.horizon]
        self.waiting = [window for window in self.waiting if window[1] > self.horizon]
        late_rows = sum(one.rows for one in rows if one.end <= before)
        return DueWindows(ended, {window for window in ended if window[1] <= before}, late_rows)


def runs_of(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the windows with adjacent ones merged, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(windows):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def duration_us(text: str) -> int:
    """Return the microseconds of a duration such as "10 minutes". Raises PipelineError."""
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]+?)s?\s*", text)
    if found is None or found[2] not in UNITS:
        raise PipelineError(
            f"a time is said as in '10 minutes' (seconds, minutes, hours, days), not {text!r}"
        )
    return int(found[1]) * UNITS[found[2]] * SECOND

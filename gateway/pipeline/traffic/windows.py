"""Time windows of a stream: which windows are complete, and which must be reported again.

The code is pure, without Spark or files.

The rows of the journal are in the order of settlement: a message that waits for an unreachable broker is
written hours after later messages. So older rows may follow the newest one, and a watermark derived from it
would lose them. The journal itself records up to when it is complete (`gateway/store/journal/format.py`). A
window is reported when that time is past its end; or, in case a message never settles, when rows received
`lateness` after its end have been read. Later rows are counted, and their windows reported again.
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


class WindowRows(NamedTuple):
    """Number of rows (`rows`) in a micro-batch that belong to one shard and one window of time.

    `begin` and `end` are those of the window, `next` is the sequence number after that of the newest row, and
    `last_us` the latest time of receipt. Times are in microseconds UTC.
    """

    shard: str
    begin: int
    end: int
    rows: int
    next: int
    last_us: int


class DueWindows(NamedTuple):
    """Windows of time to report after a micro-batch.

    `windows` has all of them in order, as (begin, end) in microseconds UTC. `again` has those of them that
    were reported before. `late_rows` is the number of rows that were read after their window was reported.
    """

    windows: list[tuple[int, int]]
    again: set[tuple[int, int]]
    late_rows: int


@dataclass
class Windows:
    """State of a stream's windows of time between two micro-batches.

    `number` is that of the last micro-batch. `ends` has, by shard, the number of the next row to read.
    `waiting` are the windows with rows that were not reported yet. Windows that end at `horizon` or earlier
    are due. `newest` is the latest time of receipt. Times are in microseconds UTC.
    """

    number: int = -1
    ends: Offsets = field(default_factory=dict)
    horizon: int = 0
    newest: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)

    def encode(self) -> str:
        """Encode the state as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Windows:
        """Decode the text that `encode` returned."""
        document = json.loads(text)
        return cls(**document | {"waiting": [(begin, end) for begin, end in document["waiting"]]})

    def read(self, number: int, rows: Iterable[WindowRows]) -> Windows:
        """Return the state after reading micro-batch `number`. `rows` are its row counts.

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

    def take_due(
        self, rows: Iterable[WindowRows], marks: Mapping[str, int | None], late_us: int
    ) -> DueWindows:
        """Remove the windows that are now due from `waiting`, and return them.

        `rows` are the row counts of the micro-batch. `horizon` advances to the least of the low-water marks
        in `marks` (one for each shard, None: unknown), or to the latest time of receipt minus `late_us` (the
        lateness in microseconds), whichever is later.
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
    """Return the windows in order; windows that overlap or follow each other are merged into one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(windows):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def duration_us(text: str) -> int:
    """Parse a duration such as "10 minutes" to microseconds. Raises PipelineError for any other text."""
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]+?)s?\s*", text)
    if found is None or found[2] not in UNITS:
        raise PipelineError(
            f"a duration must be written as '10 minutes' (seconds, minutes, hours, days), not {text!r}"
        )
    return int(found[1]) * UNITS[found[2]] * SECOND

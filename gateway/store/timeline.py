"""Times in the store, which no setting of the wall clock between two processes moves.

`clock.utc` begins as the wall clock. If that was set while no gateway ran, ages that are computed from stored
times would be wrong by the step. So times are stored on a scale that continues where the last process ended,
and translated when they are read and written. Since the last commit at least no time has passed; if the
machine was not restarted, its time since boot tells how much; otherwise the wall clock does, unless it is
behind the stored time.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Final

from gateway import clock
from gateway.clock import STEP_SECS_MAX
from gateway.model.message import NEVER
from gateway.model.times import WallTime
from gateway.store.restoring import set_aside

KEY: Final = "time"  # of the table meta: when the last commits were, JSON
EVERY_SECS: Final = 1.0  # between two records of it


class Timeline:
    """Scale of the times in one database. `ahead_secs` is a stored time minus the time of `clock.utc`."""

    __slots__ = ("_recorded", "ahead_secs")

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Continue the scale of the process before. Raises sqlite3.Error."""
        self.ahead_secs = 0.0
        self._recorded = -EVERY_SECS  # seconds since boot
        line = connection.execute("SELECT value FROM meta WHERE key = ?", (KEY,)).fetchone()
        if line is not None:
            with set_aside("time of the store", line[0]):
                self._continue(**json.loads(line[0]))

    def _continue(self, utc: float, boot: str, since_boot: float) -> None:
        """Continue after `utc` (stored time), which was `since_boot` seconds after the start of `boot`."""
        now = clock.utc()
        passed = clock.since_boot() - since_boot
        same = boot == clock.boot_id() != ""
        ahead = (utc + passed if same and passed >= 0 else max(utc, now)) - float(now)
        if abs(ahead) >= STEP_SECS_MAX:
            self.ahead_secs = ahead

    def stored(self, utc: float) -> float:
        """Return the time to store for a time of `clock.utc`; NEVER stays NEVER."""
        return utc + self.ahead_secs if utc else NEVER

    def restored(self, stored: float) -> WallTime:
        """Return the time of `clock.utc` that was stored; NEVER stays NEVER."""
        return WallTime((stored - self.ahead_secs or -1.0) if stored else NEVER)

    def record(self, connection: sqlite3.Connection, every_secs: float = EVERY_SECS) -> None:
        """Store the present time, unless it was recorded less than `every_secs` ago. Raises sqlite3.Error."""
        since_boot = clock.since_boot()
        if since_boot - self._recorded >= every_secs:
            now = {"utc": self.stored(clock.utc()), "boot": clock.boot_id(), "since_boot": since_boot}
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (KEY, json.dumps(now)))
            self._recorded = since_boot

"""Time scale of the store, which is not affected if the wall clock is set between two processes.

`clock.utc` begins as the wall clock. If the wall clock was set while no gateway ran, ages that are computed
from stored times would be wrong by the difference. So times are stored on a scale that continues where the
last process ended, and converted when they are read and written. The time that has passed since the last
commit is measured by the machine's time since boot if the machine was not restarted; otherwise by the wall
clock, but is at least 0.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Final

from gateway import clock
from gateway.clock import STEP_SECS_MAX
from gateway.model.message import NEVER
from gateway.model.times import WallTime
from gateway.store.recovery import contain_failure

KEY: Final = "time"  # of the table meta: when the last commits were, JSON
EVERY_SECS: Final = 1.0  # minimum time between two records of the time


def time_record(ahead_secs: float) -> str:
    """Return a record of the present time as JSON, from which the next process continues the time scale.

    The scale is `ahead_secs` seconds ahead of `clock.utc`.
    """
    now = {"utc": clock.utc() + ahead_secs, "boot": clock.boot_id(), "since_boot": clock.since_boot()}
    return json.dumps(now)


def scale_ahead_secs(record: str) -> float:
    """Return how many seconds a time scale, continued from its last record, is ahead of `clock.utc`.

    `record` is the last `time_record` of the previous process. Small differences (below STEP_SECS_MAX) return
    0.0. Raises ValueError, KeyError or TypeError for an invalid record.
    """
    found = json.loads(record)
    utc, now = float(found["utc"]), float(clock.utc())
    passed = clock.since_boot() - float(found["since_boot"])
    same = found["boot"] == clock.boot_id() != ""
    ahead = (utc + passed if same and passed >= 0 else max(utc, now)) - now
    return ahead if abs(ahead) >= STEP_SECS_MAX else 0.0


class Timeline:
    """Time scale of one database: a stored time is the time of `clock.utc` plus `ahead_secs`."""

    __slots__ = ("_recorded", "ahead_secs")

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Continue the time scale of the previous process from its record in the database.

        Raises sqlite3.Error.
        """
        self.ahead_secs = 0.0
        self._recorded = -EVERY_SECS  # seconds since boot
        line = connection.execute("SELECT value FROM meta WHERE key = ?", (KEY,)).fetchone()
        if line is not None:
            with contain_failure("time of the store", line[0]):
                self.ahead_secs = scale_ahead_secs(line[0])

    def stored(self, utc: float) -> float:
        """Convert seconds of `clock.utc` to the seconds to store; NEVER stays NEVER."""
        return utc + self.ahead_secs if utc else NEVER

    def restored(self, stored: float) -> WallTime:
        """Convert stored seconds to seconds of `clock.utc`; NEVER stays NEVER."""
        return WallTime((stored - self.ahead_secs or -1.0) if stored else NEVER)

    def record(self, connection: sqlite3.Connection, every_secs: float = EVERY_SECS) -> None:
        """Store the present time for the next process, unless it was stored less than `every_secs` ago.

        Raises sqlite3.Error.
        """
        since_boot = clock.since_boot()
        if since_boot - self._recorded >= every_secs:
            connection.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (KEY, time_record(self.ahead_secs))
            )
            self._recorded = since_boot

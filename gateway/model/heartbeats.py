"""Schedule of heartbeats for a silent connection: AMQP 0-9-1 heartbeats and AMQP/Fast PINGs.

A peer closes the connection after one or two intervals of silence, depending on its implementation. So a
heartbeat is due after half an interval without other output, and after each further half. Heartbeats do not
count as output: otherwise each would postpone the next. The caller checks the time only now and then. Output
since the last check counts as sent at that check, so that a heartbeat is early rather than late.
"""

from __future__ import annotations


class HeartbeatSchedule:
    """Schedule by which one end of a connection sends its heartbeats."""

    __slots__ = ("_interval", "_looked", "at", "has_sent")

    def __init__(self) -> None:
        self.at = 0.0  # loop-clock seconds of the next check: a heartbeat is due unless there was output
        self.has_sent = False  # output since the last check; set by every writer except that of heartbeats
        self._interval = 0.0
        self._looked = 0.0

    def agree(self, interval: float, now: float) -> None:
        """Start the schedule: the peer expects output at least every `interval` seconds.

        An interval of 0 means no heartbeats. `now` is in loop-clock seconds.
        """
        self._interval = interval
        self._looked = now
        self.at = now + interval / 2

    def is_due(self, now: float) -> bool:
        """Return True if the caller must send a heartbeat now. The schedule then continues as if it was sent.

        `now` is in loop-clock seconds.
        """
        previous, self._looked = self._looked, now
        if self.has_sent:
            self.has_sent = False
            self.at = previous + self._interval / 2
        if not self._interval or now < self.at:
            return False
        self.at = now + self._interval / 2
        return True

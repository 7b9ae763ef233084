"""UTC as the cluster has it: the one clock by which replicas decide when sessions, wills and claims end.

A replica whose own clock is wrong would end sessions of others. So all times that replicas write down for
each other are the cluster's. RabbitMQ says the time, in whole seconds, in the history of each message that it
dead-letters. A replica has a message dead-lettered every few seconds: the cluster said its time between the
moment when that was published and the moment when it arrived. Several answers together are more exact than
one; an answer that contradicts the others replaces them. In between the event loop's clock goes on, which
nobody can set.

A replica whose wall clock is wrong by more than SKEW_MAX_SECS is not ready, for it shows and compares wrong
times elsewhere, as in the expiry of messages. It ends no sessions, for it may be the node's clock that is
wrong.
"""

from __future__ import annotations

from typing import Final

import structlog

from gateway import clock
from gateway.model.properties import Headers, ValueType
from gateway.model.times import Monotonic, WallTime
from gateway.protocols.amqp091.codec import decode_properties

log = structlog.get_logger(limited=True)

SKEW_MAX_SECS: Final = 5.0
HISTORY: Final = "x-death"
UNKNOWN: Final = "the cluster's time is not known yet"


class ClusterClock:
    """The cluster's time, and how wrong the wall clock of this process is."""

    def __init__(self) -> None:
        self._low = self._high = 0.0  # the cluster's time minus that of the loop's clock is between these
        self._is_known = False
        self._is_wrong = False

    def utc(self) -> WallTime:
        """Return the cluster's time; until that is known, the wall clock's."""
        if not self._is_known:
            return clock.utc()
        return WallTime((self._low + self._high) / 2 + clock.now())

    @property
    def skew(self) -> float:
        """Seconds by which the wall clock is ahead of the cluster's; 0.0 while that is not known."""
        return clock.wall() - self.utc() if self._is_known else 0.0

    @property
    def correction(self) -> float:
        """Seconds to subtract from times of `clock.utc`; 0.0 as long as that is right, to be exact."""
        ahead = clock.utc() - self.utc() if self._is_known else 0.0
        return ahead if abs(ahead) - (self._high - self._low) / 2 > SKEW_MAX_SECS else 0.0

    def answer(self, seconds: int, asked_at: Monotonic, now: Monotonic) -> None:
        """Take the cluster's time, in whole seconds UTC, at some moment from `asked_at` to `now`."""
        low, high = seconds - float(now), seconds + 1 - float(asked_at)
        if self._is_known and max(low, self._low) <= min(high, self._high):
            self._low, self._high = max(low, self._low), min(high, self._high)
        else:
            self._low, self._high, self._is_known = low, high, True
        self.check()

    def check(self) -> None:
        """Compare the wall clock, and log if it has become wrong or right."""
        skew = self.skew
        if self.correction and abs(skew) <= SKEW_MAX_SECS:
            clock.follow_wall()  # the process began with a wrong clock, which has been set right
        is_wrong = abs(skew) - (self._high - self._low) / 2 > SKEW_MAX_SECS
        if is_wrong and not self._is_wrong:
            log.error("clock wrong, replica not ready", ahead_of_cluster_seconds=round(skew, 1))
        elif self._is_wrong and not is_wrong:
            log.info("clock right again", ahead_of_cluster_seconds=round(skew, 1))
        self._is_wrong = is_wrong

    @property
    def why_not(self) -> str:
        """Return why this replica must not serve clients, "" if it may."""
        if not self._is_known:
            return UNKNOWN
        if self._is_wrong:
            return f"the clock of this machine differs from the cluster's by {self.skew:.1f} seconds"
        return ""


def dead_lettered_at(raw: bytes) -> int | None:
    """Return when the broker dead-lettered a message, in seconds UTC, from its content header; None if it
    did not. Raises RemoteProtocolError for octets that are no content header."""
    found = dict(decode_properties(raw).headers or ()).get(HISTORY)
    if found is None or found.type is not ValueType.ARRAY or not found.value:
        return None
    table: Headers = found.value[0].value
    time = dict(table).get("time")
    return time.value if time is not None and isinstance(time.value, int) else None

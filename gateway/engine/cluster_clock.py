"""UTC of the cluster: the one clock by which replicas write the expiry times of messages.

A replica whose own clock is wrong would let messages of others expire. So expiry times that replicas write
for each other are the cluster's. RabbitMQ includes the time, in whole seconds, in the history of each message
that it dead-letters. Every few seconds a replica has a message dead-lettered: the reported time is between
the moments of publishing and arrival. Several replies together are more exact than one; a reply that
contradicts the others replaces them. Between replies the event loop's clock is used, which no one can set.

A replica whose wall clock is wrong by more than SKEW_MAX_SECS is not ready, because it would display and
compare wrong times elsewhere, for example in the expiry of messages. It ends no sessions, because the clock
of the cluster node may be the wrong one. Once the wall clock is right the replica is ready; `clock.utc`,
which does not jump, may be wrong for longer, and `correction` is the difference.
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
UNKNOWN: Final = "the cluster's time is not determined yet"


class ClusterClock:
    """Estimate of the cluster's UTC, and of the error of this process's wall clock."""

    def __init__(self) -> None:
        self._low = self._high = 0.0  # bounds of the cluster's time minus the loop clock's
        self._is_known = False
        self._is_wrong = False

    def utc(self) -> WallTime:
        """Return the cluster's estimated time, or this process's own UTC if the cluster's is unknown."""
        if not self._is_known:
            return clock.utc()
        return WallTime((self._low + self._high) / 2 + clock.now())

    @property
    def skew(self) -> float:
        """Seconds by which the wall clock is ahead of the cluster's; 0.0 while that is unknown."""
        return clock.wall() - self.utc() if self._is_known else 0.0

    @property
    def correction(self) -> float:
        """Seconds to subtract from times of `clock.utc` to get the cluster's time.

        The value is 0.0 while the error is within SKEW_MAX_SECS.
        """
        ahead = clock.utc() - self.utc() if self._is_known else 0.0
        return ahead if abs(ahead) - (self._high - self._low) / 2 > SKEW_MAX_SECS else 0.0

    def apply_reply(self, seconds: int, requested_at: Monotonic, now: Monotonic) -> None:
        """Improve the estimate by the reply to a query of the cluster's time.

        The cluster's time was `seconds` (whole seconds UTC) at some moment between `requested_at` and `now`,
        which are in loop-clock seconds.
        """
        low, high = seconds - float(now), seconds + 1 - float(requested_at)
        if self._is_known and max(low, self._low) <= min(high, self._high):
            self._low, self._high = max(low, self._low), min(high, self._high)
        else:
            self._low, self._high, self._is_known = low, high, True
        self.check()

    def check(self) -> None:
        """Compare the wall clock with the cluster's time. Log when the wall clock becomes wrong, or right."""
        skew = self.skew
        is_wrong = abs(skew) - (self._high - self._low) / 2 > SKEW_MAX_SECS
        if is_wrong and not self._is_wrong:
            log.error(
                "clock differs from cluster, replica not ready", ahead_of_cluster_seconds=round(skew, 1)
            )
        elif self._is_wrong and not is_wrong:
            log.info("clock agrees with cluster again", ahead_of_cluster_seconds=round(skew, 1))
        self._is_wrong = is_wrong

    @property
    def unavailable_reason(self) -> str:
        """Reason why this replica must not serve clients: its clock is unknown or wrong; "" if it may."""
        if not self._is_known:
            return UNKNOWN
        if self._is_wrong:
            return f"the clock of this machine differs from the cluster's by {self.skew:.1f} seconds"
        return ""


def dead_lettered_at(raw: bytes) -> int | None:
    """Return when the broker dead-lettered a message, in seconds UTC. `raw` is its content header.

    Return None if it was not dead-lettered. Raises RemoteProtocolError if the bytes are not a content header.
    """
    found = dict(decode_properties(raw).headers or ()).get(HISTORY)
    if found is None or found.type is not ValueType.ARRAY or not found.value:
        return None
    table: Headers = found.value[0].value
    time = dict(table).get("time")
    return time.value if time is not None and isinstance(time.value, int) else None

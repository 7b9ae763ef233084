"""Claims of this replica to work that the replicas share, which end CLAIM_SECS after the database has them.

A replica uses a claim for half of that time, counted from its request. It may have been frozen before it read
the reply, its machine may have slept, or it may not reach the cluster: then another replica claims the work,
and does it.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway import clock
from gateway.model.times import LeaseTime
from gateway.state.interface import CLAIM_SECS, SessionKey


def is_ending(requested_at: LeaseTime) -> bool:
    """Return True if a claim that was requested at `requested_at` must not be used any more."""
    return clock.lease_time() - requested_at >= CLAIM_SECS / 2


class ClaimedWill(NamedTuple):
    """Will of one epoch of a session, and when this replica has requested the claim."""

    key: SessionKey
    epoch: int
    requested_at: LeaseTime

    @property
    def is_ending(self) -> bool:
        """True if the will must not be published here, because another replica may publish it."""
        return is_ending(self.requested_at)

"""Expiry of this replica's claims to work that the replicas share.

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
    """Return True if a claim to shared work must not be used any more, as it was requested too long ago.

    `requested_at` is the time of the request. Another replica may claim the same work soon.
    """
    return clock.lease_time() - requested_at >= CLAIM_SECS / 2


class ClaimedWill(NamedTuple):
    """Will that this replica has claimed: its session and epoch, and when the claim was requested."""

    key: SessionKey
    epoch: int
    requested_at: LeaseTime

    @property
    def is_ending(self) -> bool:
        """True if the claim must not be used any more, because another replica may publish the will."""
        return is_ending(self.requested_at)

"""Election of the one replica that consumes over a link, by a lease in the database.

Each replica tries to acquire the lease of each elected link; the holder consumes and renews the lease. The
holder measures the lease from the moment of its request, so it stops before the lease ends in the database.
When a replica is killed, frozen or cut off from the database, another replica takes its place within the
lease time.

A holder that cannot process messages for some time, because it cannot reach the link's broker or the cluster,
releases the lease and pauses while others try. If none of them keeps the lease, it may acquire it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from gateway import clock
from gateway.engine.membership import Membership
from gateway.model.times import LeaseTime
from gateway.state.interface import AcquireLease, Lease, OperationOutcome, ReleaseLease, Reply, StateStore
from gateway.telemetry.stats import LinkStats

log = structlog.get_logger()

LEASE_SECS: Final = 3.0
RENEW_SECS: Final = 1.0
TRY_SECS: Final = 0.5  # between attempts to take a lease that another replica holds
REST_SECS: Final = 2.0  # after a holder gave up, until it tries again
NEVER: Final = LeaseTime(0.0)
ELSEWHERE: Final = "another replica consumes over the link"
UNDECIDED: Final = "the database is unreachable, so no replica can be elected to consume over the link"


class Candidate:
    """Candidacy of this replica to consume over one link.

    `on_decision` is called with True when the replica may consume, and with False and a reason when it must
    not. `serves` returns True if the link can process messages, or if an operator has paused it. A holder
    that does not serve for `timeout_secs` releases the lease.
    """

    def __init__(
        self,
        link: str,
        stats: LinkStats,
        on_decision: Callable[[bool, str], None],
        *,
        serves: Callable[[], bool],
        timeout_secs: float,
    ) -> None:
        self.link = link
        self.lease_end = NEVER  # when the lease ends, by this machine's clock
        self.next_at = NEVER  # when the lease is requested next
        self.request = 0  # the number of the request whose reply counts; earlier ones are void
        self.is_pending = False
        self._serves = serves
        self._timeout_secs = timeout_secs
        self._served_at = NEVER
        self._stats = stats
        self._on_decision = on_decision
        stats.is_elected = False

    @property
    def is_elected(self) -> bool:
        """True while this replica consumes over the link."""
        return bool(self._stats.is_elected)

    def is_useless(self, now: LeaseTime) -> bool:
        """Return True if this replica has held the lease for `timeout_secs` while the link did not serve."""
        if not self.is_elected or self._serves():
            self._served_at = now
        return now - self._served_at >= self._timeout_secs

    def decide(self, elected: bool, why: str = "") -> None:
        """Record that this replica consumes over the link (`elected` True) or not; call `on_decision`.

        `why` is the reason not to consume. A change is logged.
        """
        if elected and not self.is_elected:
            log.info("replica started consuming over link", link=self.link)
            self._served_at = clock.lease_time()
        elif self.is_elected and not elected:
            log.info("replica stopped consuming over link", link=self.link, why=why)
        self._stats.is_elected = elected
        self._on_decision(elected, why)


class Elections:
    """Candidacies of this replica for all links over which one replica consumes, and their leases."""

    def __init__(self, state: StateStore, membership: Membership) -> None:
        self.candidates: list[Candidate] = []
        self._state = state
        self._membership = membership

    def tick(self, now: LeaseTime) -> None:
        """Run the timer: stop consuming over links whose leases have ended, and request leases when due.

        A lease is released if its link has not served for too long. `now` is a time of the lease clock.
        """
        for candidate in self.candidates:
            if candidate.is_elected and now >= candidate.lease_end:
                candidate.decide(False, UNDECIDED)
            if candidate.is_useless(now):
                log.warning("link not connected at this replica, lease released", link=candidate.link)
                self._release(candidate)
                candidate.next_at = now + REST_SECS
            elif now >= candidate.next_at and not candidate.is_pending:
                self._request(candidate, now)

    def stop(self) -> None:
        """Release all leases because the process ends, so that other replicas can consume at once.

        A lease whose request has no reply yet is released as well, because the request may still get it.
        """
        for candidate in self.candidates:
            if candidate.is_elected or candidate.is_pending:
                self._release(candidate)
        self.candidates = []

    def _release(self, candidate: Candidate) -> None:
        candidate.request += 1
        candidate.is_pending = False
        candidate.lease_end = NEVER
        candidate.decide(False, ELSEWHERE)
        release = ReleaseLease(_lease_of(candidate), self._membership.incarnation)
        self._state.submit(release, lambda reply: None)

    def _request(self, candidate: Candidate, now: LeaseTime) -> None:
        candidate.request += 1
        candidate.is_pending = True
        incarnation = self._membership.incarnation
        done = partial(self._replied, candidate, candidate.request, incarnation, now)
        self._state.submit(AcquireLease(_lease_of(candidate), incarnation, LEASE_SECS), done)

    def _replied(
        self,
        candidate: Candidate,
        request: int,
        incarnation: str,
        requested_at: LeaseTime,
        reply: Reply[Lease],
    ) -> None:
        """Process the reply to a lease request: consume if the lease is granted, else stop consuming.

        `candidate` has made the request. `request` is its number; replies to any but the latest are ignored.
        `incarnation` is this replica's at `requested_at`, the time of the request.
        """
        if request != candidate.request:
            return
        now = clock.lease_time()
        candidate.is_pending = False
        candidate.next_at = requested_at + TRY_SECS
        if reply.verdict is not OperationOutcome.DONE:
            if now >= candidate.lease_end:
                candidate.decide(False, UNDECIDED)
            return
        assert reply.value is not None
        if reply.value.holder != incarnation:
            candidate.decide(False, ELSEWHERE)
            return
        candidate.lease_end = requested_at + LEASE_SECS
        candidate.next_at = requested_at + RENEW_SECS
        if now < candidate.lease_end:
            candidate.decide(True)


def _lease_of(candidate: Candidate) -> str:
    return f"link {candidate.link}"

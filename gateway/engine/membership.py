"""Membership of this process among the replicas: its incarnation, and heartbeats that keep it alive.

An incarnation joins and sends a heartbeat every few seconds. When the other replicas have declared it dead it
is fenced, and a new incarnation begins: the sessions and leases of the old one belong to others. Each replica
also runs Reap: it declares those replicas dead that have sent no heartbeat for too long, by the clock of the
database, and claims wills and sessions that have become due.

A replica that was frozen does not know what has changed meanwhile. It declares no others dead, and takes no
will that another replica has claimed, before its heartbeats were confirmed for some time. It ignores claims
whose confirmation it reads late, because others may have them. The same time passes after a step of the
database's clock, or a failover to a database with a different clock, so that others can send heartbeats by
the new time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from gateway import clock
from gateway.containment import contained
from gateway.engine.claims import is_ending
from gateway.model.times import LeaseTime
from gateway.state.interface import (
    ClaimedWork,
    Heartbeat,
    JoinReplica,
    OperationOutcome,
    QuitReplica,
    Reap,
    Reply,
    StateStore,
)

log = structlog.get_logger()

HEARTBEAT_SECS: Final = 2.0
REAP_SECS: Final = 1.0
REAP_MAX: Final = 1_000  # wills and sessions that are claimed in one operation
# Heartbeats must have been confirmed for so long before others are declared dead: after an outage of the
# database all replicas seem to have been silent.
STEADY_SECS: Final = 10.0
INCARNATION_BYTES: Final = 6


class Membership:
    """Incarnation of this process among the replicas, and its heartbeats.

    A replica that has sent no heartbeat for `silent_secs` is declared dead by the others.
    """

    def __init__(self, state: StateStore, name: str, version: str, silent_secs: float) -> None:
        self.incarnation = secrets.token_hex(INCARNATION_BYTES)
        self.on_declared_dead: list[
            Callable[[str], None]
        ] = []  # called with the incarnation that was declared dead
        # Called with wills and sessions that are due, and when their claim was requested.
        self.on_claimed_work: list[Callable[[ClaimedWork, LeaseTime], None]] = []
        self._state = state
        self._name = name
        self._version = version
        self._silent_secs = silent_secs
        self._is_joined = False
        self._is_pending = False  # True while a JoinReplica or Heartbeat has no reply
        self._is_reaping = False
        self._heartbeat_at = self._reap_at = self._asked_at = self._now = LeaseTime(0.0)
        self._heard_at: float | None = None  # time of the database at the last heartbeat
        self._steady_since: LeaseTime | None = None  # since then each heartbeat was confirmed soon
        self._listened = ""  # the last incarnation whose notices were requested
        self.may_act: Callable[[], bool] | None = None  # returns False while the cluster is unavailable

    @property
    def unavailable_reason(self) -> str:
        """Reason why this replica cannot own sessions, leases or claims; "" if it can."""
        return "" if self._is_joined else "the replica has not joined the other replicas yet"

    @property
    def is_steady(self) -> bool:
        """True if the database has confirmed each heartbeat soon for STEADY_SECS, as of the last tick.

        Otherwise other replicas may have been unable to send heartbeats, or to settle wills that they have
        published.
        """
        return self._steady_since is not None and self._now - self._steady_since >= STEADY_SECS

    def tick(self, now: LeaseTime) -> None:
        """Run the timer: submit JoinReplica or Heartbeat, and Reap, when they are due.

        Reap declares silent replicas dead, and claims wills and sessions that have become due.
        """
        if now - self._now > 2 * HEARTBEAT_SECS:
            self._steady_since = None  # the process was frozen, and the database may have been away
        self._now = now
        if not self._is_pending and (not self._is_joined or now >= self._heartbeat_at):
            self._is_pending, self._asked_at = True, now
            self._heartbeat_at = LeaseTime(now + HEARTBEAT_SECS)
            if self._is_joined:
                self._state.submit(Heartbeat(self.incarnation), self._handle_heartbeat)
            else:
                if self._listened != self.incarnation:
                    self._listened = self.incarnation
                    self._state.listen(self.incarnation)
                join = JoinReplica(self.incarnation, self._name, "", self._version)
                self._state.submit(join, self._handle_heartbeat)
        if self._is_joined and not self._is_reaping and now >= self._reap_at:
            self._is_reaping, self._reap_at = True, LeaseTime(now + REAP_SECS)
            limit = REAP_MAX if self.may_act is None or self.may_act() else 0
            silent_secs = self._silent_secs if self.is_steady else None
            operation = Reap(silent_secs, limit, self.incarnation, self._heard_at, self.is_steady)
            self._state.submit(operation, partial(self._handle_claimed_work, clock.lease_time()))

    def end_incarnation(self) -> None:
        """End the incarnation in the database, because the process ends."""
        if self._is_joined:
            self._is_joined, self._is_pending = False, True  # or another tick would join again
            self._state.submit(QuitReplica(self.incarnation), lambda reply: None)

    def _handle_heartbeat(self, reply: Reply[float]) -> None:
        """Process the reply to JoinReplica or Heartbeat: this replica has joined, or was declared dead.

        While replies are late or missing, this replica does not declare others dead.
        """
        self._is_pending = False
        before, self._heard_at = self._heard_at, reply.value
        is_late = self._now - self._asked_at > 2 * HEARTBEAT_SECS
        if reply.value is None or is_late or (before and abs(reply.value - before) > STEADY_SECS):
            self._steady_since = None
        elif self._steady_since is None:
            self._steady_since = self._now
        if reply.verdict is OperationOutcome.DONE:
            self._is_joined = True
        elif reply.verdict is OperationOutcome.FENCED:
            self._start_incarnation()

    def _start_incarnation(self) -> None:
        """Choose a new incarnation, because the others have declared the old one dead; call the listeners."""
        buried, self.incarnation = self.incarnation, secrets.token_hex(INCARNATION_BYTES)
        self._is_joined = False
        log.warning("replica declared dead by its peers, rejoining", incarnation=buried)
        for callback in self.on_declared_dead:
            try:
                callback(buried)
            except Exception as error:
                contained("store", error)

    def _handle_claimed_work(self, requested_at: LeaseTime, reply: Reply[list[ClaimedWork]]) -> None:
        """Do the work (wills to publish, sessions to end) that a Reap has claimed.

        `requested_at` is when the Reap was submitted. Do nothing if the claims may end before the work is
        done.
        """
        self._is_reaping = False
        if is_ending(requested_at):
            return
        if len(reply.value or ()) >= REAP_MAX:
            self._reap_at = LeaseTime(0.0)  # there may be more
        for work in reply.value or ():
            for callback in self.on_claimed_work:
                try:
                    callback(work, requested_at)
                except Exception as error:  # it concerns one item, which is claimed again later
                    contained("store", error)

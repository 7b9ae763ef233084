"""This process as one of the replicas: its incarnation, and heartbeats that keep it alive in the database.

An incarnation joins and sends a heartbeat every few seconds. When the others have declared it dead it is
fenced, and another incarnation begins: what the old one owned belongs to others. Each replica also reaps:
declares those dead that were silent for too long, by the clock of the database.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import structlog

from gateway.containment import contained
from gateway.model.times import Monotonic
from gateway.state.interface import (
    Due,
    Heartbeat,
    JoinReplica,
    QuitReplica,
    Reap,
    Reply,
    StateStore,
    Verdict,
)

log = structlog.get_logger()

HEARTBEAT_SECS: Final = 2.0
REAP_SECS: Final = 1.0
INCARNATION_BYTES: Final = 6


class Membership:
    """The incarnation of this process among the replicas. `silent_secs`: after which others count as dead."""

    def __init__(self, state: StateStore, name: str, version: str, silent_secs: float) -> None:
        self.incarnation = secrets.token_hex(INCARNATION_BYTES)
        self.on_buried: list[Callable[[str], None]] = []  # called with the incarnation that was declared dead
        self.on_due: list[Callable[[Due], None]] = []  # called with wills and sessions whose time has come
        self._state = state
        self._name = name
        self._version = version
        self._silent_secs = silent_secs
        self._is_joined = False
        self._is_pending = False  # a JoinReplica or Heartbeat
        self._is_reaping = False
        self._heartbeat_at = self._reap_at = Monotonic(0.0)

    @property
    def why_not(self) -> str:
        """Why this replica cannot own anything; empty: it can."""
        return "" if self._is_joined else "it has not joined the other replicas yet"

    def tick(self, now: Monotonic) -> None:
        """Join, or send what is due."""
        if not self._is_pending and (not self._is_joined or now >= self._heartbeat_at):
            self._is_pending, self._heartbeat_at = True, now + HEARTBEAT_SECS
            if self._is_joined:
                self._state.submit(Heartbeat(self.incarnation), self._heard)
            else:
                self._state.listen(self.incarnation)
                join = JoinReplica(self.incarnation, self._name, "", self._version)
                self._state.submit(join, self._heard)
        if self._is_joined and not self._is_reaping and now >= self._reap_at:
            self._is_reaping, self._reap_at = True, now + REAP_SECS
            self._state.submit(Reap(self._silent_secs), self._reaped)

    def quit(self) -> None:
        """The process ends."""
        if self._is_joined:
            self._is_joined, self._is_pending = False, True  # or another tick would join again
            self._state.submit(QuitReplica(self.incarnation), lambda reply: None)

    def _heard(self, reply: Reply[None]) -> None:
        self._is_pending = False
        if reply.verdict is Verdict.DONE:
            self._is_joined = True
        elif reply.verdict is Verdict.FENCED:
            self._begin_again()

    def _begin_again(self) -> None:
        buried, self.incarnation = self.incarnation, secrets.token_hex(INCARNATION_BYTES)
        self._is_joined = False
        log.warning("replica declared dead by its peers, rejoining", incarnation=buried)
        for hear in self.on_buried:
            try:
                hear(buried)
            except Exception as error:
                contained("store", error)

    def _reaped(self, reply: Reply[list[Due]]) -> None:
        self._is_reaping = False
        for due in reply.value or ():
            for hear in self.on_due:
                try:
                    hear(due)
                except Exception as error:  # of this one: it is claimed again
                    contained("store", error)

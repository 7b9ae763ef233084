"""Operations on the database that must be committed some time, however long the database is away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gateway import clock
from gateway.model.times import LeaseTime
from gateway.state.interface import Operation, OperationOutcome, Reply, StateStore

T = TypeVar("T")


class Repeats:
    """Operations that failed because the database was away, and that are submitted again."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._waiting: list[Callable[[], None]] = []

    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        """Submit an operation. `done` is called with its reply, which is never UNAVAILABLE."""
        self.submit_claim(operation, lambda reply, requested_at: done(reply))

    def submit_claim(self, operation: Operation[T], done: Callable[[Reply[T], LeaseTime], None]) -> None:
        """Submit an operation that claims something.

        `done` is called with its reply, which is never UNAVAILABLE, and when this was requested.
        """

        def attempt() -> None:
            self._state.submit(operation, partial(on_reply, clock.lease_time()))

        def on_reply(requested_at: LeaseTime, reply: Reply[T]) -> None:
            if reply.verdict is OperationOutcome.UNAVAILABLE:
                self.call_later(attempt)
            else:
                done(reply, requested_at)

        attempt()

    def call_later(self, submit: Callable[[], None]) -> None:
        """Call `submit` at the next tick."""
        self._waiting.append(submit)

    def tick(self) -> None:
        """Submit the waiting operations again."""
        waiting, self._waiting = self._waiting, []
        for submit in waiting:
            submit()

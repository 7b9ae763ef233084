"""Operations on the database that are repeated until it replies, however long it is unavailable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gateway import clock
from gateway.model.times import LeaseTime
from gateway.state.interface import Operation, OperationOutcome, Reply, StateStore

T = TypeVar("T")


class Repeats:
    """Database operations that are submitted again at each `tick` until the database has replied."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._waiting: list[Callable[[], None]] = []

    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        """Submit an operation, again at each tick until the database has replied.

        `done` is called with the reply, which is never UNAVAILABLE.
        """
        self.submit_claim(operation, lambda reply, requested_at: done(reply))

    def submit_claim(self, operation: Operation[T], done: Callable[[Reply[T], LeaseTime], None]) -> None:
        """Submit an operation that claims work, again at each tick until the database has replied.

        `done` is called with the reply, which is never UNAVAILABLE, and the time of the attempt that got it.
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
        """Call `submit`, which submits an operation, at the next tick."""
        self._waiting.append(submit)

    def tick(self) -> None:
        """Run the timer: submit the operations again that have failed since the last tick."""
        waiting, self._waiting = self._waiting, []
        for submit in waiting:
            submit()

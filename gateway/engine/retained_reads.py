"""Queries of retained messages for subscribers: a few at a time, and users take turns.

A client may subscribe to `#` again and again, and each time the database reads all retained messages. So at
most IN_FLIGHT_MAX pages are queried at a time, as many as the database has connections for them; the next one
is that of the user whose last turn is longest ago. Other clients of a user with many subscriptions wait for
these; clients of another user wait for the pages that are being read, and for one page of each other user.

A query whose subscriber has subscribed again or is lost is not sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from gateway.state.interface import MatchRetained, OperationOutcome, Reply, Retained, StateStore

IN_FLIGHT_MAX: Final = 2
Done = Callable[[Reply[list[Retained]]], None]


class PageQuery(NamedTuple):
    """Query of a page of retained messages that waits to be sent.

    `done` is called with its reply. If `is_wanted` returns False when the query is due, it is not sent, and
    `drop` is called.
    """

    query: MatchRetained
    is_wanted: Callable[[], bool]
    done: Done
    drop: Callable[[], None]


class RetainedReads:
    """Waiting queries for retained messages, in one queue for each user; users take turns."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._lines: dict[str, deque[PageQuery]] = {}
        self._in_flight = 0
        self._is_sending = False

    @property
    def waiting_count(self) -> int:
        """Number of queries that are not sent yet."""
        return sum(map(len, self._lines.values()))

    def submit(self, user: str, read: PageQuery) -> None:
        """Queue a query of a client of `user`, and send it if fewer than IN_FLIGHT_MAX have no reply."""
        self._lines.setdefault(user, deque()).append(read)
        self._send()

    def fail_all(self) -> None:
        """Reply UNAVAILABLE to all queries that are not sent yet."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            for read in line:
                read.done(Reply(OperationOutcome.UNAVAILABLE))

    def _send(self) -> None:
        """Send waiting queries until IN_FLIGHT_MAX queries have no reply."""
        if self._is_sending:
            return  # a dropped query has led to another one
        self._is_sending = True
        try:
            while self._lines and self._in_flight < IN_FLIGHT_MAX:
                self._send_one(self._pop_next())
        finally:
            self._is_sending = False

    def _pop_next(self) -> PageQuery:
        """Remove and return the next query: the oldest of the user whose turn it is.

        The user's next turn is after those of all other users.
        """
        user, line = next(iter(self._lines.items()))
        read = line.popleft()
        del self._lines[user]
        if line:
            self._lines[user] = line
        return read

    def _send_one(self, read: PageQuery) -> None:
        if read.is_wanted():
            self._in_flight += 1
            self._state.query(read.query, partial(self._replied, read.done))
        else:
            read.drop()

    def _replied(self, done: Done, reply: Reply[list[Retained]]) -> None:
        self._in_flight -= 1
        try:
            done(reply)
        finally:
            self._send()

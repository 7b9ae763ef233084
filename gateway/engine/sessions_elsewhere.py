"""Usage of each user by sessions that are not connected to this replica: number, subscriptions, bytes.

The database is queried for it every ten seconds. In between, sessions that leave this replica are added, and
those that it opens are subtracted. A session that is leaving is counted separately until the database has
stored that. Sessions that other replicas have added since the last query are not known, so limits may be
exceeded by these.
"""

from __future__ import annotations

from typing import Final

from gateway.state.interface import UserSessions, Weight

NONE: Final = UserSessions()


class SessionsElsewhere:
    """Usage of each user by the sessions that are not connected to this replica.

    `weight` is the number of subscriptions of one session, and its size in bytes.
    """

    def __init__(self) -> None:
        self.subscriptions = 0  # of all users
        self._sums: dict[str, UserSessions] = {}
        self._leaving: dict[str, UserSessions] = {}
        self._changes: list[tuple[str, Weight, int]] | None = None  # since the current query began

    def of(self, user: str) -> UserSessions:
        """Return a user's number of sessions not connected here, with their subscriptions and bytes."""
        leaving = self._leaving.get(user)
        found = self._sums.get(user, NONE)
        return found if leaving is None else _total(found, leaving)

    def begin_leaving(self, user: str, weight: Weight) -> None:
        """Add a session that leaves this replica: its LeaveSession has been submitted to the database."""
        _change(self._leaving, user, weight, 1)
        self.subscriptions += weight.subscriptions

    def end_leaving(self, user: str, weight: Weight, *, remains: bool) -> None:
        """Process the reply to a LeaveSession: stop counting the session as one that leaves this replica.

        If the session `remains` stored, it is added to the user's usage instead.
        """
        _change(self._leaving, user, weight, -1)
        self.subscriptions -= weight.subscriptions
        if remains:
            self.change(user, weight, 1)

    def change(self, user: str, weight: Weight, count: int) -> None:
        """Add a session to a user's usage (`count` 1), or subtract it (-1)."""
        if self._changes is not None:
            self._changes.append((user, weight, count))
        before = self._sums.get(user, NONE).subscriptions
        _change(self._sums, user, weight, count)
        self.subscriptions += self._sums.get(user, NONE).subscriptions - before

    def begin(self) -> None:
        """Start to record changes, because a query begins whose reply may include them or not."""
        self._changes = []

    def end(self, found: dict[str, UserSessions] | None) -> None:
        """Replace the usage of all users by the result of a query, with the changes recorded since `begin`.

        `found` is None if the query has failed.
        """
        changes, self._changes = self._changes or [], None
        if found is None:
            return
        self._sums = dict(found)
        for user, weight, count in changes:
            _change(self._sums, user, weight, count)
        sums = (*self._sums.values(), *self._leaving.values())
        self.subscriptions = sum([one.subscriptions for one in sums])


def _total(one: UserSessions, other: UserSessions) -> UserSessions:
    return UserSessions(*[a + b for a, b in zip(one, other, strict=True)])


def _change(sums: dict[str, UserSessions], user: str, weight: Weight, count: int) -> None:
    """Add a session to a user's sums (`count` 1), or subtract it (-1). Sums never fall below 0."""
    before = sums.get(user, NONE)
    changed = (1, *weight)
    after = UserSessions(*[max(a + count * b, 0) for a, b in zip(before, changed, strict=True)])
    if after.sessions:
        sums[user] = after
    else:
        sums.pop(user, None)

"""Usage of each user by sessions that are not connected to this replica: number, subscriptions, bytes.

The database is queried for it every ten seconds. In between, sessions that leave this replica are added, and
those that it opens are subtracted. A session that is leaving is counted separately until the database has
stored that. Sessions that other replicas have added since the last query are not known, so limits may be
exceeded by these. Those that have ended there since are still counted, so a client that has just connected
and would be refused waits for another query.

The result of a query may or may not include a session that begins or ends to leave meanwhile, and the session
would count twice. So the result is ignored for its user, and the next query is soon.
"""

from __future__ import annotations

from typing import Final

from gateway.model.times import Monotonic
from gateway.state.interface import UserSessions, Weight

NONE: Final = UserSessions()
IGNORED_MAX: Final = 3  # results in succession that are ignored for a user


class SessionsElsewhere:
    """Number, subscriptions and bytes of each user's sessions that are not connected to this replica."""

    def __init__(self) -> None:
        self.subscriptions = 0  # of all users
        self._sums: dict[str, UserSessions] = {}
        self._leaving: dict[str, UserSessions] = {}
        self._changes: list[tuple[str, Weight, int]] | None = None  # since the current query began
        self._changed: set[str] = set()  # users whose sessions have changed since then, or are leaving
        self._ignored: dict[str, int] = {}  # by user: results in succession that were ignored
        # When the last query began, and when the last one that has a result began.
        self._begun_at: Monotonic | None = None
        self._counted_at: Monotonic | None = None

    def of(self, user: str) -> UserSessions:
        """Return the number, subscriptions and bytes of a user's sessions that are not connected here."""
        leaving = self._leaving.get(user)
        found = self._sums.get(user, NONE)
        return found if leaving is None else _total(found, leaving)

    def begin_leaving(self, user: str, weight: Weight) -> None:
        """Add a session whose client has left this replica: a LeaveSession was submitted to the database.

        `weight` has the session's number of subscriptions and its size in bytes.
        """
        self._changed.add(user)
        _change(self._leaving, user, weight, 1)
        self.subscriptions += weight.subscriptions

    def end_leaving(self, user: str, weight: Weight, remaining: Weight | None) -> None:
        """Process the reply to a LeaveSession: subtract `weight`, which `begin_leaving` has added.

        `remaining` is added instead: what the database still has of the session, or None if it has ended.
        Both are a number of subscriptions and a size in bytes.
        """
        _change(self._leaving, user, weight, -1)
        self.subscriptions -= weight.subscriptions
        if remaining is not None:
            self.change(user, remaining, 1)

    def change(self, user: str, weight: Weight, count: int) -> None:
        """Add a session to the sums of its user (`count` 1), or subtract it (-1).

        `weight` has the session's number of subscriptions and its size in bytes.
        """
        self._changed.add(user)
        if self._changes is not None:
            self._changes.append((user, weight, count))
        before = self._sums.get(user, NONE).subscriptions
        _change(self._sums, user, weight, count)
        self.subscriptions += self._sums.get(user, NONE).subscriptions - before

    def is_counted(self, user: str, since: Monotonic) -> bool:
        """Return True if the sums of a user are the result of a query that began after `since`.

        Also if that query has failed. `since` is in loop-clock seconds.
        """
        return self._counted_at is not None and self._counted_at > since and user not in self._ignored

    def begin(self, now: Monotonic) -> None:
        """Start to record changes, because the sums are queried; the reply may lack some changes.

        `now` is in loop-clock seconds.
        """
        self._begun_at = now
        self._changes = []
        self._changed = set(self._leaving)

    def end(self, found: dict[str, UserSessions] | None) -> bool:
        """Replace the users' sums by the result of a query. Return True if it was ignored for some users.

        It is ignored for users with changes since `begin`, but only IGNORED_MAX times in succession; after
        that these changes are added to it. `found` is None if the query has failed.
        """
        self._counted_at = self._begun_at
        changes, self._changes = self._changes or [], None
        if found is None:
            self._ignored = {}
            return False
        counts = {user: self._ignored.get(user, 0) for user in self._changed}
        ignored = {user: count + 1 for user, count in counts.items() if count < IGNORED_MAX}
        self._ignored = ignored
        before, self._sums = self._sums, {user: sums for user, sums in found.items() if user not in ignored}
        self._sums.update({user: before[user] for user in ignored if user in before})
        for user, weight, count in changes:
            if user not in ignored:
                _change(self._sums, user, weight, count)
        sums = (*self._sums.values(), *self._leaving.values())
        self.subscriptions = sum([one.subscriptions for one in sums])
        return bool(ignored)


def _total(one: UserSessions, other: UserSessions) -> UserSessions:
    return UserSessions(*[a + b for a, b in zip(one, other, strict=True)])


def _change(sums: dict[str, UserSessions], user: str, weight: Weight, count: int) -> None:
    """Add a session to the sums of its user (`count` 1), or subtract it (-1). No sum falls below 0.

    `weight` has the session's number of subscriptions and its size in bytes.
    """
    before = sums.get(user, NONE)
    changed = (1, *weight)
    after = UserSessions(*[max(a + count * b, 0) for a, b in zip(before, changed, strict=True)])
    if any(after):
        sums[user] = after
    else:
        sums.pop(user, None)

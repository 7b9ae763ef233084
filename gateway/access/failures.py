"""Throttling of failed logins: further logins are delayed, then refused for a while.

Failures are counted in three ways. A pair of user name and place (places.py, a client's network origin) is
refused after too many failures, so that no client can lock out a user at another place. A place is refused
when it has failed with many names, except for users that recently logged in from there: a whole plant may
share one address. Failures of a user name from all places together only delay its logins.

A connection that breaks the rules of a protocol before it names a user is counted by its place alone. The
place is then blocked as a whole, unless a user recently logged in from there.

Attackers can invent names and, with IPv6, places: the tables are limited, and the entries that failed longest
ago are dropped first. Failures from this machine are never counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Final

from gateway import clock as clocks
from gateway.access.places import LOOPBACK, place_of
from gateway.settings.logins import LoginSettings

KEYS_MAX: Final = 10_000  # of each table
NAME_MAX: Final = 64  # characters; a longer user name is stored as its digest
RIGHT_SECS: Final = 86_400.0  # a user is trusted at a place this long after a login there
DELAYS_MAX: Final = 4


class _Tally:
    """Number of failures of one key in its time window, and the time until which the key is refused."""

    __slots__ = ("count", "refused_until", "window_start")

    def __init__(self, window_start: float) -> None:
        self.count = 0
        self.window_start = window_start
        self.refused_until = 0.0


class _Table:
    """Numbers of failures by key, for example by network origin.

    A key with `most` failures within `window_secs` is refused for `refused_secs`; with `most` 0 no key is
    ever refused. `now` is in seconds of one monotonic clock.
    """

    def __init__(self, most: int, window_secs: float, refused_secs: float) -> None:
        self._most = most
        self._window_secs = window_secs
        self._refused_secs = refused_secs
        self._tallies: dict[Hashable, _Tally] = {}

    def __len__(self) -> int:
        return len(self._tallies)

    def add(self, key: Hashable, now: float) -> None:
        """Count a failure of this key, and refuse the key if it has too many failures."""
        tally = self._tallies.pop(key, None)
        if tally is None or now - tally.window_start >= self._window_secs:
            refused_until = 0.0 if tally is None else tally.refused_until
            tally = _Tally(now)
            tally.refused_until = refused_until
        self._tallies[key] = tally
        tally.count += 1
        if self._most and tally.count >= self._most:
            tally.refused_until = now + self._refused_secs
        if len(self._tallies) > KEYS_MAX:
            del self._tallies[next(iter(self._tallies))]

    def count(self, key: Hashable, now: float) -> int:
        """Return the number of failures of this key in its current window."""
        tally = self._tallies.get(key)
        return 0 if tally is None or now - tally.window_start >= self._window_secs else tally.count

    def is_refused(self, key: Hashable, now: float) -> bool:
        """Return True if the key is refused at the time `now`, because of too many failures."""
        tally = self._tallies.get(key)
        return tally is not None and now < tally.refused_until

    def forget(self, key: Hashable) -> None:
        """Delete the failures of this key, because a login has succeeded."""
        self._tallies.pop(key, None)


class Failures:
    """Failed logins at all listeners of a gateway; decides which logins are delayed or refused.

    `remote` is the client's address as host:port. A place is a network origin (see places.py).
    """

    def __init__(
        self, options: LoginSettings | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        options = options or LoginSettings()
        self._clock = clock or clocks.monotonic
        self._delay_secs = options.delay_secs
        window, refused = options.failure_window_secs, options.refused_secs
        self._pairs = _Table(options.failures_max, window, refused)
        self._places = _Table(options.address_failures_max, window, refused)
        self._users = _Table(0, window, refused)
        self._negotiations = _Table(options.negotiation_failures_max, window, refused)
        self._right: dict[tuple[str, str], float] = {}

    def is_refused(self, remote: str, user: str) -> bool:
        """Return True if a login must be refused without verifying its password."""
        place = place_of(remote)
        if place == LOOPBACK:
            return False
        now = self._clock()
        if self._pairs.is_refused((place, _user_key(user)), now):
            return True
        return self._places.is_refused(place, now) and not self.is_trusted(remote, user)

    def blocks(self, remote: str) -> bool:
        """Return True if all connections from the network origin of `remote` are refused.

        This is the case after many of these connections have broken the rules of their protocol, unless a
        user recently logged in from there.
        """
        place, now = place_of(remote), self._clock()
        if not self._negotiations.is_refused(place, now):
            return False
        return not any(one == place and until > now for (one, _), until in self._right.items())

    def broke_negotiation(self, remote: str) -> None:
        """Count a connection that broke the rules of its protocol before it sent a user name."""
        place = place_of(remote)
        if place != LOOPBACK:
            self._negotiations.add(place, self._clock())

    def delay_secs(self, remote: str, user: str) -> float:
        """Return for how many seconds a login must be delayed before its password is verified."""
        place = place_of(remote)
        if place == LOOPBACK or self.is_trusted(remote, user):
            return 0.0
        now = self._clock()
        steps = max(
            self._pairs.count((place, _user_key(user)), now),
            self._places.count(place, now),
            self._users.count(_user_key(user), now),
        )
        return self._delay_secs * min(steps, DELAYS_MAX)

    def is_trusted(self, remote: str, user: str) -> bool:
        """Return True if the user has logged in from the network origin of `remote` within RIGHT_SECS.

        A failed login of the user from there ends the trust.
        """
        pair = (place_of(remote), _user_key(user))
        return self._right.get(pair, 0.0) > self._clock()

    def count_failure(self, remote: str, user: str) -> None:
        """Record a login that failed because its name or password was wrong."""
        place, name, now = place_of(remote), _user_key(user), self._clock()
        self._right.pop((place, name), None)
        if place == LOOPBACK:
            return
        self._pairs.add((place, name), now)
        self._places.add(place, now)
        self._users.add(name, now)

    def succeeded(self, remote: str, user: str) -> None:
        """Record a successful login: trust the user at the network origin of `remote`.

        Earlier failures of the user from there are deleted.
        """
        pair = (place_of(remote), _user_key(user))
        self._pairs.forget(pair)
        self._right.pop(pair, None)
        self._right[pair] = self._clock() + RIGHT_SECS
        if len(self._right) > KEYS_MAX:
            del self._right[next(iter(self._right))]


def _user_key(user: str) -> str:
    """Return the key under which the failures of a user name are counted.

    It is the name itself, or its digest if the name has more than NAME_MAX characters, to limit the memory.
    """
    if len(user) <= NAME_MAX:
        return user
    return hashlib.sha256(user.encode(errors="surrogatepass")).hexdigest()

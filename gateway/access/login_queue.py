"""Fair queue for work that few logins can do at a time, such as hashing a password.

A login waits while all slots are in use. Logins of trusted users go first. Among the others the places
(network origins, places.py) take turns, and at one place its user names: a thousand attempts from one address
delay a login from another by one. The queue has a maximum length. When it is full, the place or user with
most entries loses its newest one to a login of a place or user with fewer. Cancelled logins leave the queue.
"""

from __future__ import annotations

from typing import Final

import trio

WAITING: Final = "waiting"
GRANTED: Final = "granted"
DISPLACED: Final = "displaced"


class LoginQueueFull(Exception):
    """Error for a login that a full queue does not accept, or that another login has displaced from it."""


class _Waiter:
    """Login that waits in the queue until `state` changes from WAITING to GRANTED or DISPLACED."""

    __slots__ = ("place", "state", "user", "woken")

    def __init__(self, place: str, user: str) -> None:
        self.place = place
        self.user = user
        self.state = WAITING
        self.woken = trio.Event()

    def wake(self, state: str) -> None:
        self.state = state
        self.woken.set()


class _RoundRobin:
    """Waiting logins by network origin (`place`) and user, from which the next one is chosen in turn.

    An origin whose login was chosen goes to the end of the origins, and its user to the end of the users at
    this origin.
    """

    def __init__(self) -> None:
        self._places: dict[str, dict[str, dict[_Waiter, None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, waiter: _Waiter) -> None:
        self._places.setdefault(waiter.place, {}).setdefault(waiter.user, {})[waiter] = None

    def remove(self, waiter: _Waiter) -> None:
        """Remove a waiting login. It must have been added."""
        users = self._places[waiter.place]
        line = users[waiter.user]
        del line[waiter]
        if not line:
            del users[waiter.user]
        if not users:
            del self._places[waiter.place]

    def pop_next(self) -> _Waiter:
        """Remove and return the login whose turn it is."""
        place, users = next(iter(self._places.items()))
        user, line = next(iter(users.items()))
        waiter = next(iter(line))
        del users[user]
        users[user] = line
        del self._places[place]
        self._places[place] = users
        self.remove(waiter)
        return waiter

    def count(self, place: str, user: str | None = None) -> int:
        """Return the number of waiting logins from the network origin `place`.

        If `user` is given, count only those with this user name.
        """
        users = self._places.get(place, {})
        return sum(map(len, users.values())) if user is None else len(users.get(user, ()))

    def newest_of_largest_user(self) -> _Waiter:
        """Return the newest login of the user with most waiting logins at the busiest network origin."""
        place = max(self._places, key=self.count)
        users = self._places[place]
        return next(reversed(users[max(users, key=lambda user: len(users[user]))]))


class LoginQueue:
    """Fair queue for logins: at most `slots` are processed at a time, and at most `waiting_max` wait.

    When a slot is free, the network origins of clients take turns, and so do the users at one origin.
    """

    def __init__(self, slots: int, waiting_max: int) -> None:
        self.waiting = 0
        self._free = slots
        self._waiting_max = waiting_max
        self._trusted = _RoundRobin()
        self._others = _RoundRobin()

    async def acquire(self, place: str, user: str, *, trusted: bool = False) -> None:
        """Wait until it is the login's turn. The caller must call `release` after processing the login.

        `place` is the network origin of the client. A `trusted` login, of a user who has logged in from there
        before, has precedence. Raises LoginQueueFull if the queue is full, or if another login displaces this
        one.
        """
        if self._free:
            self._free -= 1
            return
        if self.waiting >= self._waiting_max:
            self._make_room(place, user, trusted)
        waiters = self._trusted if trusted else self._others
        waiter = _Waiter(place, user)
        waiters.add(waiter)
        self.waiting += 1
        try:
            await waiter.woken.wait()
        except BaseException:
            if waiter.state is WAITING:
                waiters.remove(waiter)
                self.waiting -= 1
            elif waiter.state is GRANTED:
                self.release()
            raise
        if waiter.state is DISPLACED:
            raise LoginQueueFull

    def release(self) -> None:
        """End the processing of a login, and start that of the next waiting login."""
        waiters = self._trusted or self._others
        if not waiters:
            self._free += 1
            return
        self.waiting -= 1
        waiters.pop_next().wake(GRANTED)

    def _make_room(self, place: str, user: str, trusted: bool) -> None:
        """Remove a waiting login from the full queue, so that a new one can be added.

        A trusted login displaces any login that is not trusted. Other logins displace only a login of a
        network origin, or of a user at the same origin, with more waiting logins. Raises LoginQueueFull if no
        login can be removed.
        """
        others = self._others
        if not others:
            raise LoginQueueFull
        last = others.newest_of_largest_user()
        if not trusted:
            same = last.place == place
            most = others.count(last.place, last.user if same else None)
            if most <= others.count(place, user if same else None) + 1:
                raise LoginQueueFull
        others.remove(last)
        self.waiting -= 1
        last.wake(DISPLACED)

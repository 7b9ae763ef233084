"""Turns at a work that few can have at a time: hashing a password.

Whoever comes while all places are taken waits. Users who were right before pass first; among the others the
places they come from (places.py) take turns, and at one place its user names: a thousand attempts from one
address delay those of another by one. The queue has a maximum. When it is full, whoever has most in it loses
its last one to whoever has fewer. Somebody who leaves while he waits, by being cancelled, leaves the queue.
"""

from __future__ import annotations

from typing import Final

import trio

WAITING: Final = "waiting"
GRANTED: Final = "granted"
DISPLACED: Final = "displaced"


class Crowded(Exception):
    """Too many wait already, or others with more right have come."""


class _Waiter:
    """One who waits."""

    __slots__ = ("place", "state", "user", "woken")

    def __init__(self, place: str, user: str) -> None:
        self.place = place
        self.user = user
        self.state = WAITING
        self.woken = trio.Event()

    def wake(self, state: str) -> None:
        """The waiting is over."""
        self.state = state
        self.woken.set()


class _RoundRobin:
    """Those who wait, by place and by user; whoever is served goes to the end of both rounds."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, dict[_Waiter, None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, waiter: _Waiter) -> None:
        """Another one waits."""
        self._places.setdefault(waiter.place, {}).setdefault(waiter.user, {})[waiter] = None

    def remove(self, waiter: _Waiter) -> None:
        """It waits no longer."""
        users = self._places[waiter.place]
        line = users[waiter.user]
        del line[waiter]
        if not line:
            del users[waiter.user]
        if not users:
            del self._places[waiter.place]

    def next(self) -> _Waiter:
        """Take out whose turn it is."""
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
        """How many wait of a place, or of one user there."""
        users = self._places.get(place, {})
        return sum(map(len, users.values())) if user is None else len(users.get(user, ()))

    def last_of_most(self) -> _Waiter:
        """The newest one of the user with most at the place with most."""
        place = max(self._places, key=self.count)
        users = self._places[place]
        return next(reversed(users[max(users, key=lambda user: len(users[user]))]))


class Turns:
    """`slots` at a time, `waiting_max` in the queue."""

    def __init__(self, slots: int, waiting_max: int) -> None:
        self.waiting = 0
        self._free = slots
        self._waiting_max = waiting_max
        self._trusted = _RoundRobin()
        self._others = _RoundRobin()

    async def take(self, place: str, user: str, *, trusted: bool = False) -> None:
        """Wait for a turn; `give_back` when done. Raises Crowded."""
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
                self.give_back()
            raise
        if waiter.state is DISPLACED:
            raise Crowded

    def give_back(self) -> None:
        """The work is done: the next one."""
        waiters = self._trusted or self._others
        if not waiters:
            self._free += 1
            return
        self.waiting -= 1
        waiters.next().wake(GRANTED)

    def _make_room(self, place: str, user: str, trusted: bool) -> None:
        """Raises Crowded when nobody has to go for this one."""
        others = self._others
        if not others:
            raise Crowded
        last = others.last_of_most()
        if not trusted:
            same = last.place == place
            most = others.count(last.place, last.user if same else None)
            if most <= others.count(place, user if same else None) + 1:
                raise Crowded
        others.remove(last)
        self.waiting -= 1
        last.wake(DISPLACED)

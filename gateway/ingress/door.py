"""The places of a listener: who may take one, and who has to give one up.

Besides the total, one address (of IPv6, one /64) and one user have a share. Unless the configuration says
how large, it is nine tenths, so that somebody else always gets in, and clients on this machine are not
counted: a sidecar's, and those of a balancer beside us, all come from there. Connections that have not said
who they are never fill a listener: the oldest stranger of the address with most of them gives way, unless it
has only just come.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from gateway.access.places import LOOPBACK
from gateway.broker.shares import Shares, share_of
from gateway.settings import Limits

Holder = TypeVar("Holder")
Seat = tuple[str, str | None]  # place, and user name once it is said
STRANGE_SECS: Final = 1.0  # for which a handshake is left in peace
RATES_MAX: Final = 10_000  # addresses whose connects are counted; whoever came longest ago is forgotten


class Rate:
    """At most `most` in a second by one holder, and as many at once; 0: any number."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._left: dict[str, tuple[float, float]] = {}  # what it has left, and when

    def take(self, holder: str, now: float) -> bool:
        """Whether it may have another one now."""
        if not self._most:
            return True
        full = max(self._most, 1.0)
        left, since = self._left.pop(holder, (full, now))
        left = min(full, left + (now - since) * self._most)
        taken = left >= 1.0
        self._left[holder] = (left - 1.0 if taken else left, now)
        if len(self._left) > RATES_MAX:
            del self._left[next(iter(self._left))]
        return taken


class Door(Generic[Holder]):
    """Who is in: guests by their place, the user names of those that have said theirs."""

    def __init__(self, limits: Limits, connections_max: int) -> None:
        self._most = connections_max
        self._per_address = share_of(connections_max, limits.connections_per_address_max)
        self._per_user = share_of(connections_max, limits.connections_per_user_max)
        self._address_said = limits.connections_per_address_max > 0
        self._user_said = limits.connections_per_user_max > 0
        self._rate = Rate(limits.connects_per_second_max)
        self._places = Shares()
        self._users = Shares()
        self.guests: dict[Holder, Seat] = {}
        self._seat: Seat = ("", None)  # the last one: a fleet's are all the same
        self._strangers: dict[str, dict[Holder, float]] = {}  # by place, with when they came
        self._strange = Shares()  # strangers by place

    def full(self, now: float) -> bool:
        """Nobody else may come, and nobody has to go."""
        return len(self.guests) >= self._most and self.in_the_way(now) is None

    def refusal(self, place: str, now: float) -> str:
        """The limit that keeps another one of that place out; "" when none does."""
        if self.full(now):
            return "connections_max"
        counted = self._address_said or place != LOOPBACK
        if counted and self._places[place] >= self._per_address:
            return "connections_per_address_max"
        return ""

    def too_fast(self, place: str, now: float) -> bool:
        """Another one of that place comes too soon."""
        return not self._rate.take(place, now)

    def in_the_way(self, now: float) -> Holder | None:
        """Who has to go before another one can come, if anybody."""
        place = self._strange.largest
        if len(self.guests) < self._most or place is None:
            return None
        guest, since = next(iter(self._strangers[place].items()))
        return guest if now - since >= STRANGE_SECS else None

    def enter(self, guest: Holder, place: str, now: float) -> None:
        """Another one is in, and has not said who it is."""
        self._sit(guest, (place, None))
        self._places.add(place)
        self._strangers.setdefault(place, {})[guest] = now
        self._strange.add(place)

    def may_be(self, user: str, place: str) -> bool:
        """Whether another connection of that user may stay."""
        counted = self._user_said or place != LOOPBACK
        return not counted or self._users[user] < self._per_user

    def named(self, guest: Holder, user: str) -> None:
        """It has said who it is."""
        place, known = self.guests.get(guest, ("", user))
        if known is not None:
            return  # it has gone, or said so before
        self._forget_stranger(guest, place)
        self._sit(guest, (place, user))
        if self._user_said or place != LOOPBACK:
            self._users.add(user)

    def _sit(self, guest: Holder, seat: Seat) -> None:
        if seat != self._seat:
            self._seat = seat
        self.guests[guest] = self._seat

    def leave(self, guest: Holder) -> None:
        """It has gone; a repeated call is ignored."""
        if guest not in self.guests:
            return
        place, user = self.guests.pop(guest)
        self._places.remove(place)
        if user is None:
            self._forget_stranger(guest, place)
        elif self._user_said or place != LOOPBACK:
            self._users.remove(user)

    def _forget_stranger(self, guest: Holder, place: str) -> None:
        same = self._strangers[place]
        del same[guest]
        if not same:
            del self._strangers[place]
        self._strange.remove(place)

"""Admission by number: connection limits of a listener, in total, for each address and for each user.

An address (for IPv6, a /64) and a user each have a share of the listener's connections. The default share is
90 %, so that others can always connect; under the default, clients on this machine are not limited, because
all clients of a sidecar or a local balancer come from there. Unauthenticated clients never fill a listener:
when it is full, the oldest of them at the address with the most is disconnected, unless it connected within
the last STRANGE_SECS. Permissions are not checked here.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from gateway.access.places import LOOPBACK
from gateway.broker.shares import Shares, share_of
from gateway.settings import Limits

Holder = TypeVar("Holder")
Seat = tuple[str, str | None]  # address, and user name after authentication
STRANGE_SECS: Final = 1.0  # seconds in which an unauthenticated client is not evicted
RATES_MAX: Final = 10_000  # addresses whose connects are counted; the least recent one is dropped


class HolderRate:
    """Token bucket for each holder, such as an address or user.

    A holder gets at most `most` tokens per second, and may use that many at once. 0 means no limit.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._tokens: dict[str, tuple[float, float]] = {}  # tokens left, and at what time

    def take(self, holder: str, now: float) -> bool:
        """Consume one token of the holder. Return False if none is left. `now` is in loop-clock seconds."""
        if not self._most:
            return True
        full = max(self._most, 1.0)
        tokens, filled_at = self._tokens.pop(holder, (full, now))
        tokens = min(full, tokens + (now - filled_at) * self._most)
        has_token = tokens >= 1.0
        self._tokens[holder] = (tokens - 1.0 if has_token else tokens, now)
        if len(self._tokens) > RATES_MAX:
            del self._tokens[next(iter(self._tokens))]
        return has_token


class ListenerConnections(Generic[Holder]):
    """Connections of one listener, with the client's address and, after authentication, the user of each."""

    def __init__(self, limits: Limits, connections_max: int) -> None:
        self._most = connections_max
        self._per_address = share_of(connections_max, limits.connections_per_address_max)
        self._per_user = share_of(connections_max, limits.connections_per_user_max)
        self._is_address_limited = limits.connections_per_address_max > 0
        self._is_user_limited = limits.connections_per_user_max > 0
        self._rate = HolderRate(limits.connects_per_second_max)
        self._places = Shares()
        self._users = Shares()
        self.connections: dict[Holder, Seat] = {}
        self._seat: Seat = ("", None)  # the last one, reused: those of a fleet are equal
        self._unauthenticated: dict[
            str, dict[Holder, float]
        ] = {}  # unauthenticated, by address, with start times
        self._unauthenticated_counts = Shares()  # counts of unauthenticated connections by address

    def full(self, now: float) -> bool:
        """Return True if connections_max is reached and no connection can be evicted."""
        return len(self.connections) >= self._most and self.connection_to_evict(now) is None

    def refusal(self, place: str, now: float) -> str:
        """Return the name of the limit that prevents another connection from the client address `place`.

        Return "" if no limit does. `now` is in loop-clock seconds.
        """
        if self.full(now):
            return "connections_max"
        counted = self._is_address_limited or place != LOOPBACK
        if counted and self._places[place] >= self._per_address:
            return "connections_per_address_max"
        return ""

    def too_fast(self, place: str, now: float) -> bool:
        """Count an attempt to connect. Return True if its address exceeds limits.connects_per_second_max."""
        return not self._rate.take(place, now)

    def connection_to_evict(self, now: float) -> Holder | None:
        """Return the unauthenticated connection to close in favour of a new one.

        Return None if the listener is not full, or if that connection is less than STRANGE_SECS old. `now` is
        in loop-clock seconds.
        """
        place = self._unauthenticated_counts.largest
        if len(self.connections) < self._most or place is None:
            return None
        connection, connected_at = next(iter(self._unauthenticated[place].items()))
        return connection if now - connected_at >= STRANGE_SECS else None

    def enter(self, connection: Holder, place: str, now: float) -> None:
        """Add a new, unauthenticated connection. `place` is the client's address."""
        self._set_seat(connection, (place, None))
        self._places.add(place)
        self._unauthenticated.setdefault(place, {})[connection] = now
        self._unauthenticated_counts.add(place)

    def may_add_connection(self, user: str, place: str) -> bool:
        """Return True if another connection of the user is allowed by the limit of connections for each user.

        `place` is the client's address. On the loopback address the default limit does not apply.
        """
        counted = self._is_user_limited or place != LOOPBACK
        return not counted or self._users[user] < self._per_user

    def set_user(self, connection: Holder, user: str) -> None:
        """Record the user of an authenticated connection. Ignore repeated calls and removed connections."""
        place, known_user = self.connections.get(connection, ("", user))
        if known_user is not None:
            return  # removed, or named before
        self._forget_unauthenticated(connection, place)
        self._set_seat(connection, (place, user))
        if self._is_user_limited or place != LOOPBACK:
            self._users.add(user)

    def _set_seat(self, connection: Holder, seat: Seat) -> None:
        if seat != self._seat:
            self._seat = seat
        self.connections[connection] = self._seat

    def remove(self, connection: Holder) -> None:
        """Remove a closed connection; repeated calls are ignored."""
        if connection not in self.connections:
            return
        place, user = self.connections.pop(connection)
        self._places.remove(place)
        if user is None:
            self._forget_unauthenticated(connection, place)
        elif self._is_user_limited or place != LOOPBACK:
            self._users.remove(user)

    def _forget_unauthenticated(self, connection: Holder, place: str) -> None:
        same = self._unauthenticated[place]
        del same[connection]
        if not same:
            del self._unauthenticated[place]
        self._unauthenticated_counts.remove(place)

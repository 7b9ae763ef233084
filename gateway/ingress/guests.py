"""Who is connected to one listener, whatever has become of their protocol: the places that connections take,
and how much each may send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import structlog
import trio

from gateway.access.places import place_of
from gateway.access.rights import Rights
from gateway.ingress.door import Door
from gateway.ingress.guest import Guest
from gateway.model.message import Sender
from gateway.settings import Limits, User
from gateway.telemetry.audit import audit
from gateway.telemetry.stats import ListenerStats
from gateway.transport.rate import Rate
from gateway.transport.stream import Stream, WriteSet

SHORT_INTERVAL_SECS: Final = 4  # a heartbeat below it is not kept by looking once a second

log = structlog.get_logger(limited=True)


class Entrance(NamedTuple):
    """A client was let in, by the event loop's clock; the version of its protocol that it speaks."""

    since: float
    version: str


class Guests:
    """The connections of one listener. `users` may have rates of their own."""

    def __init__(
        self,
        limits: Limits,
        stats: ListenerStats,
        writes: WriteSet,
        users: Mapping[str, User] | None = None,
    ) -> None:
        self.limits = limits
        self.stats = stats
        self.hurried: set[Guest] = set()  # those that have ticks in between
        self._users = users or {}
        self._writes = writes
        self._door: Door[Guest] = Door(limits, limits.connections_max)
        self.connections = self._door.guests
        self._by_sender: dict[Sender, Guest] = {}  # those that are named; a sender has their address

    @property
    def name(self) -> str:
        """The listener's."""
        return self.stats.name

    # Places.

    def full(self) -> bool:
        """Nobody else may come, and nobody has to go."""
        return self._door.full(trio.current_time())

    def refusal(self, place: str) -> str:
        """The limit that keeps a client of that place from connecting now; "" when none does."""
        now = trio.current_time()
        return (
            "connects_per_second_max" if self._door.too_fast(place, now) else self._door.refusal(place, now)
        )

    def refused(self, word: str, remote: str) -> None:
        """Count and log that there was no place."""
        self.stats.refused.add(word)
        audit("refused", endpoint=self.name, remote=remote, reason=word)
        log.warning("connection refused, limit reached", listener=self.name, remote=remote, limit=word)

    def no_place(self, stream: Stream) -> bool:
        """Whether a connection from a shared port has to go, since there is no place here; it is told so."""
        word = self._door.refusal(place_of(stream.remote), trio.current_time())
        if word:
            self.refused(word, stream.remote)
            stream.abort(word)
        return bool(word)

    def enter(self, connection: Guest, stream: Stream) -> None:
        """It has a place, and the stream. A stranger goes, if the listener is full of them."""
        now = trio.current_time()
        stranger = self._door.in_the_way(now)
        if stranger is not None:
            self.refused("gave_way", stranger.stream.remote)
            stranger.stream.abort("it has not said who it is, and its place is needed")
        stream.owner = connection
        self._door.enter(connection, place_of(stream.remote), now)
        self.stats.opened(connection.frames)

    def may_be(self, user: str, remote: str) -> bool:
        """Whether another connection of that user may stay."""
        return self._door.may_be(user, place_of(remote))

    def named(self, connection: Guest, user: str, rights: Rights) -> None:
        """The client has said who it is. Said once: or it would get another second's worth each time."""
        self._door.named(connection, user)
        self._by_sender[connection.sender] = connection
        own = self._users.get(user)
        if own is not None or not rights.unlimited:
            connection.stream.rate = self.rate(rights, own)

    def forget(self, connection: Guest) -> None:
        """A connection has ended."""
        self.hurried.discard(connection)
        self._door.leave(connection)
        if self._by_sender.get(connection.sender) is connection:
            del self._by_sender[connection.sender]
        self.stats.closed(connection.frames)

    # What they may send, and when they are looked at.

    def rate(self, *given: Rights | User | None) -> Rate | None:
        """How much a connection may send: as the last of those says that says anything; None: as much as it
        can."""
        octets = self.limits.receive_bytes_per_sec_max
        messages = self.limits.receive_messages_per_sec_max
        for one in given:
            if one is not None and one.receive_bytes_per_sec_max is not None:
                octets = one.receive_bytes_per_sec_max
            if one is not None and one.receive_messages_per_sec_max is not None:
                messages = one.receive_messages_per_sec_max
        return Rate(octets, messages, trio.current_time()) if octets or messages else None

    def hurry(self, connection: Guest, interval: float) -> None:
        """The client expects to hear from us every `interval` seconds; 0: it does not."""
        if 0 < interval < SHORT_INTERVAL_SECS:
            self.hurried.add(connection)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """A queue or session is full: have its publishers wait; returns what lets them go on."""
        releases = []
        for sender in senders:
            guest = self._by_sender.get(sender.connection)
            if guest is not None and (release := guest.hold_publishes(sender.channel)) is not None:
                releases.append(release)
        self.stats.held += len(releases)
        return releases

    def flush(self) -> None:
        """Write what was encoded outside a wake-up."""
        self._writes.flush()

"""Connections of one listener: admission by number, lookup by sender, rate limits and eviction.

`IngressClients` contains every open connection, before and after its protocol has begun. It applies the
limits of the module `admission`, logs refusals, limits the receive rate of each stream, and holds the
publishers of a full queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import structlog

from gateway import clock
from gateway.access.places import place_of
from gateway.access.rights import Rights
from gateway.ingress.admission import ListenerConnections
from gateway.ingress.client import IngressClient
from gateway.model.message import Sender
from gateway.settings import Limits, User
from gateway.telemetry.audit import audit
from gateway.telemetry.stats import ListenerStats
from gateway.transport.rate import ConnectionRate
from gateway.transport.stream import Stream, WriteSet

SHORT_INTERVAL_SECS: Final = 4  # shorter heartbeats need more than one tick a second

log = structlog.get_logger(limited=True)


class ClientAdmission(NamedTuple):
    """Time of a client's admission, in loop-clock seconds, and its protocol version."""

    admitted_at: float
    version: str


class IngressClients:
    """All connections of one listener, with the limits for new ones.

    `users` has the configured users by name, which may have receive rates of their own.
    """

    def __init__(
        self,
        limits: Limits,
        stats: ListenerStats,
        writes: WriteSet,
        users: Mapping[str, User] | None = None,
    ) -> None:
        self.limits = limits
        self.stats = stats
        self.fast_ticked: set[IngressClient] = set()  # connections that need more frequent ticks
        self._users = users or {}
        self._writes = writes
        self._admission: ListenerConnections[IngressClient] = ListenerConnections(
            limits, limits.connections_max
        )
        self.connections = self._admission.connections
        self._by_sender: dict[Sender, IngressClient] = {}  # authenticated connections

    @property
    def name(self) -> str:
        """Name of the listener."""
        return self.stats.name

    # Admission.

    def full(self) -> bool:
        """Return True if connections_max is reached and no connection can be evicted."""
        return self._admission.full(clock.now())

    def refusal(self, place: str) -> str:
        """Return the name of the limit that prevents a connection from the client address `place` now.

        Return "" if none does. The attempt counts towards connects_per_second_max.
        """
        now = clock.now()
        return (
            "connects_per_second_max"
            if self._admission.too_fast(place, now)
            else self._admission.refusal(place, now)
        )

    def count_refused(self, word: str, remote: str) -> None:
        """Count and log a connection that was refused because of the limit `word`."""
        self.stats.refused.add(word)
        audit("refused", endpoint=self.name, remote=remote, reason=word)
        log.warning("connection refused, limit reached", listener=self.name, remote=remote, limit=word)

    def refuse_over_limit(self, stream: Stream) -> bool:
        """Close a connection handed over by a shared port if it exceeds a limit of this listener.

        Return True if it was closed, which is counted and logged.
        """
        word = self._admission.refusal(place_of(stream.remote), clock.now())
        if word:
            self.count_refused(word, stream.remote)
            stream.abort(word)
        return bool(word)

    def enter(self, connection: IngressClient, stream: Stream) -> None:
        """Add a connection as the stream's owner. If the listener is full, close an unauthenticated one."""
        now = clock.now()
        evicted = self._admission.connection_to_evict(now)
        if evicted is not None:
            self.count_refused("gave_way", evicted.stream.remote)
            evicted.stream.abort("evicted: not authenticated, and connections_max is reached")
        stream.owner = connection
        self._admission.enter(connection, place_of(stream.remote), now)
        self.stats.add_connection(connection.frames)

    def may_add_connection(self, user: str, remote: str) -> bool:
        """Return True if another connection of the user is allowed by the limit of connections for each user.

        `remote` is the client's network address. On the loopback address the default limit does not apply.
        """
        return self._admission.may_add_connection(user, place_of(remote))

    def set_user(self, connection: IngressClient, user: str, rights: Rights) -> None:
        """Record the user of an authenticated connection and set its receive rate.

        Call it once per connection, because each call grants the receive rate's initial allowance of one
        second.
        """
        self._admission.set_user(connection, user)
        self._by_sender[connection.sender] = connection
        own = self._users.get(user)
        if own is not None or not rights.unlimited:
            connection.stream.rate = self.rate(rights, own)

    def forget(self, connection: IngressClient) -> None:
        """Remove a closed connection."""
        self.fast_ticked.discard(connection)
        self._admission.remove(connection)
        if self._by_sender.get(connection.sender) is connection:
            del self._by_sender[connection.sender]
        self.stats.remove_connection(connection.frames)

    # Receive rates and ticks.

    def rate(self, *owners: Rights | User | None) -> ConnectionRate | None:
        """Return a new receive rate for a connection, or None if it has no limit.

        The limits of bytes and of messages are each taken from the last of `owners` (user, roles) that sets
        it, or else from the listener.
        """
        byte_count = self.limits.receive_bytes_per_sec_max
        messages = self.limits.receive_messages_per_sec_max
        for one in owners:
            if one is not None and one.receive_bytes_per_sec_max is not None:
                byte_count = one.receive_bytes_per_sec_max
            if one is not None and one.receive_messages_per_sec_max is not None:
                messages = one.receive_messages_per_sec_max
        return ConnectionRate(byte_count, messages, clock.now()) if byte_count or messages else None

    def tick_faster(self, connection: IngressClient, interval: float) -> None:
        """Call the connection's `tick` more often, if its client expects a byte every few seconds.

        `interval` is the client's heartbeat or keep-alive in seconds; 0 means that it expects no bytes.
        Intervals of SHORT_INTERVAL_SECS or more change nothing.
        """
        if 0 < interval < SHORT_INTERVAL_SECS:
            self.fast_ticked.add(connection)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Hold the publishes of the clients `senders`, because a queue or session is full.

        Return functions that let the clients continue.
        """
        releases = []
        for sender in senders:
            client = self._by_sender.get(sender.connection)
            if client is not None and (release := client.hold_publishes(sender.channel)) is not None:
                releases.append(release)
        self.stats.pause_count += len(releases)
        return releases

    def flush(self) -> None:
        """Write output that was encoded outside a pass of the event loop."""
        self._writes.flush()

"""State that replicas share in PostgreSQL: opened before the event loop, started in it, stopped last.

`SharedState` combines the parts in `gateway/state`: membership, elections, ids for deduplication, dead
letters, retained messages and sessions. The module builds and runs them; it stores nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from typing import Final

import trio

from gateway import __version__, clock
from gateway.admin import Readiness
from gateway.app.storage import caller_of
from gateway.broker.shares import UserQuotas
from gateway.egress.link import Link
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.elections import ELSEWHERE, UNDECIDED, Candidate, Elections
from gateway.engine.ids import SharedIds
from gateway.engine.letters import SharedLetters
from gateway.engine.membership import Membership
from gateway.engine.retain_queue import RetainQueue
from gateway.engine.retained import SharedRetained
from gateway.engine.sessions import SharedSessions
from gateway.errors import ConfigurationError
from gateway.settings import Settings
from gateway.settings.engine import RabbitEngine
from gateway.state.interface import Notice, StateStore
from gateway.store.store import Store
from gateway.transport.stream import WriteSet

TICK_SECS: Final = 0.2
# Seconds after which a replica counts as dead, in addition to the time that clients stay connected.
SILENT_SECS: Final = 20.0
SCHEMA_CHARS_MAX: Final = 40  # Names in PostgreSQL have 63 bytes; channels and lanes append to the schema.


class SharedState:
    """State that replicas share in a database, and this replica's services that use it."""

    def __init__(self, store: StateStore, membership: Membership, quotas: UserQuotas) -> None:
        """Build the services on `store`. `quotas` has the limits of dead letters and of retained messages."""
        self.store = store
        self.membership = membership
        self.elections = Elections(store, membership)
        self.ids = SharedIds(store, membership)
        self.time = ClusterClock()
        self.letters = SharedLetters(store, membership, quotas.common_letters, self.time)
        self.retained = SharedRetained(store, quotas.retained)
        self.retain_queue: RetainQueue | None = None  # Messages that wait to be retained.
        self.sessions: SharedSessions | None = None  # None unless the gateway has MQTT listeners.

    @property
    def unavailable_reason(self) -> str:
        """Reason why the shared state cannot be used, or "" if it can be used.

        Either the database is unavailable, or this replica has not joined the other replicas.
        """
        return self.store.health.failure or self.membership.unavailable_reason

    def start(self, writes: WriteSet) -> None:
        """Start the database threads.

        Replies and notifications of the database are handled in the running event loop, each in a separate
        pass of the event loop.
        """
        self.store.start(caller_of(writes), self._handle_notice)

    async def run(self, flush: Callable[[], None]) -> None:
        """Run the timers of all services until cancelled. `flush` sends what the timers have encoded."""
        while True:
            self.store.tick()
            self.membership.tick(clock.lease_time())
            self.elections.tick(clock.lease_time())
            self.letters.tick(clock.now())
            self.retained.run(clock.now())
            if self.retain_queue is not None:
                self.retain_queue.run()
            if self.sessions is not None:
                self.sessions.tick(clock.now())
            flush()
            await trio.sleep(TICK_SECS)

    async def stop(self) -> None:
        """Release the leases, claims and sessions of this replica, and end the database threads.

        Returns when the database has stored the release, or after some seconds if the database cannot be
        reached.
        """
        self.elections.stop()
        self.letters.stop()
        self.membership.end_incarnation()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self.store.stop)

    def elect(self, settings: Settings, links: Iterable[Link], serves: Callable[[], bool]) -> None:
        """Make this replica a candidate for each elected link, over which only one replica may consume.

        The link is disconnected until this replica is elected. `serves` returns True while the cluster can be
        reached.
        """
        for link in links:
            options = settings.links.get(link.endpoint)
            if options is not None and options.elected and link.consumes:
                candidate = Candidate(
                    link.endpoint,
                    link.stats,
                    partial(_apply_election, link),
                    serves=partial(_serves, link, serves),
                    timeout_secs=options.elected_timeout_secs,
                )
                self.elections.candidates.append(candidate)
                link.hold_down(ELSEWHERE)

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return the gauges of the database: for each metric name a function that returns the value."""
        return {
            "gateway_state_pending_operations": lambda: self.store.health.pending,
            "gateway_state_up": lambda: not self.store.health.failure,
        }

    def _handle_notice(self, notice: Notice) -> None:
        if self.sessions is not None:
            self.sessions.handle_notice(notice)


def open_state(settings: Settings, quotas: UserQuotas) -> SharedState | None:
    """Return the shared state of replicas, or None unless the engine is a RabbitMQ cluster.

    `quotas` has the limits of dead letters and of retained messages. Raises ConfigurationError if psycopg is
    not installed.
    """
    options = settings.broker
    if not isinstance(options, RabbitEngine):
        return None
    try:
        from gateway.state.postgresql import PostgreSQLState, Server  # an optional dependency
    except ImportError as error:
        raise ConfigurationError(
            f"broker.postgresql: psycopg cannot be loaded ({error}): pip install 'gateway[postgresql]'"
        ) from error
    database = options.postgresql
    password = None if database.password_file is None else database.password
    store = PostgreSQLState(Server(database.url, schema_of(options.namespace), password))
    silent_secs = options.engine_timeout_secs + SILENT_SECS
    return SharedState(store, Membership(store, settings.replica, __version__, silent_secs), quotas)


def schema_of(namespace: str) -> str:
    """Return the name of the database schema for a `namespace`.

    A long namespace is shortened, and a hash is appended.
    """
    if len(namespace) <= SCHEMA_CHARS_MAX:
        return namespace
    digest = blake2b(namespace.encode(), digest_size=8).hexdigest()
    return f"{namespace[: SCHEMA_CHARS_MAX - len(digest) - 1]}-{digest}"


def watch_stores(readiness: Readiness, store: Store | None, state: SharedState | None) -> None:
    """Register the store and the shared state, unless they are None, as conditions of readiness."""
    if store is not None:
        readiness.watch("store", partial(getattr, store, "failure"))
    if state is not None:
        readiness.watch("state", partial(getattr, state, "unavailable_reason"))


def _serves(link: Link, serves: Callable[[], bool]) -> bool:
    return (link.is_up or link.is_paused) and serves()


def _apply_election(link: Link, elected: bool, why: str) -> None:
    if not elected:
        link.hold_down(why)
    for reason in {ELSEWHERE, UNDECIDED} - {why}:
        link.remove_hold(reason)

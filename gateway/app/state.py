"""State that replicas share: opened before the loop runs, started in it, ended behind everything else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Final

import trio

from gateway.admin import Readiness
from gateway.app.storage import caller_of
from gateway.errors import ConfigurationError
from gateway.settings import Settings
from gateway.settings.engine import RabbitEngine
from gateway.state.interface import Notice, StateStore
from gateway.store.store import Store
from gateway.transport.stream import WriteSet

SCHEMA_CHARS_MAX: Final = 40  # a name of PostgreSQL has 63 bytes; channels and lanes append to the schema


def open_state(settings: Settings) -> StateStore | None:
    """Return the state that replicas share, or None without a cluster. Raises ConfigurationError."""
    given = settings.broker
    if not isinstance(given, RabbitEngine):
        return None
    try:
        from gateway.state.postgresql import PostgreSQLState, Server  # an optional dependency
    except ImportError as error:
        raise ConfigurationError(
            f"broker.postgresql: psycopg cannot be used ({error}): install the gateway with [postgresql]"
        ) from error
    database = given.postgresql
    password = None if database.password_file is None else database.password
    return PostgreSQLState(Server(database.url, schema_of(given.namespace), password))


def schema_of(namespace: str) -> str:
    """Return the name of the schema for a namespace."""
    if len(namespace) <= SCHEMA_CHARS_MAX:
        return namespace
    digest = blake2b(namespace.encode(), digest_size=8).hexdigest()
    return f"{namespace[: SCHEMA_CHARS_MAX - len(digest) - 1]}-{digest}"


def start_state(state: StateStore | None, writes: WriteSet, on_notice: Callable[[Notice], None]) -> None:
    """Start its threads; replies and notices are handled in this loop, each as a wake-up of its own."""
    if state is not None:
        state.start(caller_of(writes), on_notice)


def watch_stores(readiness: Readiness, store: Store | None, state: StateStore | None) -> None:
    """Make the process ready only while the store can be written and the shared state be reached."""
    if store is not None:
        readiness.watch("store", partial(getattr, store, "failure"))
    if state is not None:
        readiness.watch("state", lambda: state.health.failure)


async def stop_state(state: StateStore | None) -> None:
    """Commit what was submitted, as far as the database accepts it, and end the threads."""
    if state is not None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(state.stop)


def gauges_of(state: StateStore | None) -> dict[str, Callable[[], float]]:
    """Return the gauges of the shared state."""
    if state is None:
        return {}
    return {
        "gateway_state_pending_operations": lambda: state.health.pending,
        "gateway_state_up": lambda: not state.health.failure,
    }

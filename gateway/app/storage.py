"""Opening and start of a gateway's store, before and in the event loop."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog
import trio

from gateway.containment import contained
from gateway.model.shares import UserShares
from gateway.settings import Settings
from gateway.store.store import Store
from gateway.transport.socket_loop import LOOP
from gateway.transport.stream import WriteSet

log = structlog.get_logger()

KEY: Final = "return key"  # Kind under which the store has the key.
KEY_BYTES: Final = 32


def open_store(
    settings: Settings, on_health: Callable[[bool], None], letters: UserShares | None = None
) -> Store | None:
    """Open the store and return it, or return None if it is disabled.

    `on_health` is called with False when the store can no longer be written, and with True when it can be
    written again. `letters` limits the dead letters of each user. Raises StoreError, with advice in its text,
    if the store cannot be opened.
    """
    options = settings.store
    if not options.enabled:
        return None
    return Store(
        options.path,
        probe_secs=options.probe_secs,
        pending_bytes_max=settings.limits.store_pending_bytes_max,
        letters_max=settings.limits.dead_letters_max,
        letters_bytes_max=settings.limits.dead_letters_bytes_max,
        letter_shares=letters,
        on_health=on_health,
        on_damage=lambda text: log.error("store damaged", damage=text),
    )


def return_key(store: Store | None) -> bytes:
    """Return the key that signs return addresses: the stored key, or a new one, which is then stored.

    Because the key survives restarts, replies still reach clients that sent their requests before a restart.
    Call this before the store's thread is started.
    """
    if store is None:
        return secrets.token_bytes(KEY_BYTES)
    for _, found in store.records(KEY):
        if isinstance(found, bytes) and len(found) == KEY_BYTES:
            return found
    made = secrets.token_bytes(KEY_BYTES)
    store.put(KEY, "", made)
    return made


def start_store(store: Store | None, writes: WriteSet) -> None:
    """Start the store's thread. Each of its results is handled in a separate pass of the event loop."""
    if store is not None:
        store.start(caller_of(writes))


def caller_of(writes: WriteSet) -> Callable[[Callable[[], None]], None]:
    """Return a function that passes a call from any thread to the running event loop.

    Its argument is the function to call, which has no arguments itself and whose errors are logged. `writes`
    are flushed after each call.
    """
    loop = LOOP.get()
    soon = trio.lowlevel.current_trio_token().run_sync_soon

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            contained("store", error)
        writes.flush()

    def call_soon(function: Callable[[], None]) -> None:
        if loop is not None:
            loop.call_soon(partial(call, function))
            return
        with suppress(trio.RunFinishedError):  # The loop has ended.
            soon(call, function)

    return call_soon

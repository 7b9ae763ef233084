"""Ends of the subscriptions of clients that are not connected to any replica.

A client may disconnect before its queue is unbound from a filter that it has unsubscribed from: the queue may
still belong to another replica, or the cluster be unavailable. After the disconnect its replica unbinds the
queue; if the client has reconnected meanwhile, its present replica does it. Other subscriptions end because
rights have changed.

Every replica whose rules change goes through these sessions in the database, page by page, in the order of
their keys. A subscription that is not allowed any more is removed there, under the session's epoch: if the
client has reconnected meanwhile nothing is changed, since the replica to which it has connected checks the
session by the rules in force. Then the queue is unbound, so that it gets no further messages for the filter.
If the client reconnects during the unbinding, the queue is bound again; messages for a filter without a
subscription are discarded.

While the database or the cluster is unavailable the review waits, and rules that change during a review start
it again. The database has the keys until the queue is unbound. If the process ends before that, the queue
still gets messages for the filter until the client reconnects; then they are discarded, and the queue is
unbound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol, TypeVar

import structlog
import trio

from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.broker.mqtt.shared_subscriptions import shared_pattern
from gateway.broker.shares import filter_bytes, text_bytes
from gateway.containment import contained
from gateway.engine.names import binding_of
from gateway.engine.stored_values import decode_options
from gateway.model.pending import Pending
from gateway.state.interface import (
    AbsentSession,
    ChangeSession,
    FindAbsent,
    FindSession,
    Operation,
    OperationOutcome,
    Query,
    Reply,
    SessionKey,
    StateStore,
    Weight,
)

log = structlog.get_logger(limited=True)

PAGE: Final = 100  # sessions that are read at a time
RETRY_SECS: Final = 1.0  # between two attempts while database or cluster are unavailable
BIND_SECS: Final = 5.0  # after which a binding or unbinding without a reply is repeated
T = TypeVar("T")
FindForbidden = Callable[[str, str, Mapping[str, SubscriptionOptions]], list[str]]
"""Function of user, client identifier and subscriptions that returns the filters that are not allowed.

Raises Pending while a permission check is pending.
"""


class Cluster(Protocol):
    """Interface of the connection to the cluster that AbsentReview uses."""

    @property
    def is_up(self) -> bool:
        """True if the cluster can be reached and this replica is not stopping."""

    def set_binding(self, queue: str, key: str, bound: bool, done: Callable[[], None]) -> None:
        """Bind the queue of a session to a key, or unbind it if `bound` is False.

        `done` is called when the broker has confirmed that. Without a connection it is not called.
        """


class AbsentReview:
    """Task that removes subscriptions which disconnected clients may no longer have; one review at a time.

    `judge` returns the topic filters of a session that its user may not subscribe to.
    """

    def __init__(self, state: StateStore, cluster: Cluster, judge: FindForbidden) -> None:
        self.is_running = False
        self._state = state
        self._cluster = cluster
        self._find_forbidden = judge
        self._begun = trio.Event()
        self._pending_unbinds: dict[SessionKey, tuple[AbsentSession, set[str]]] = {}  # keys to unbind
        self._owing = trio.Event()

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return the review's gauge by metric name: its function returns 1 during a review, else 0."""
        return {"gateway_engine_reviewing": lambda: self.is_running}

    def begin(self) -> None:
        """Review the sessions of disconnected clients, as rights have changed. Restart a running review."""
        self.is_running = True
        self._begun.set()

    def unbind_later(self, absent: AbsentSession, keys: set[str]) -> None:
        """Unbind the queue of the session `absent` from `keys`, unless its client has reconnected.

        The unbinding is only scheduled here: `run` does it.
        """
        self._pending_unbinds[absent.key] = absent, keys
        self._owing.set()

    async def run(self) -> None:
        """Run a review after each `begin`, and the unbindings of `unbind_later`, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_unbindings)
            await self._run_reviews()

    async def _run_unbindings(self) -> None:
        while True:
            await self._owing.wait()
            self._owing = trio.Event()
            while self._pending_unbinds:
                absent, keys = self._pending_unbinds.pop(next(iter(self._pending_unbinds)))
                try:
                    if await self._is_absent(absent):
                        await self._unbind(absent, keys)
                except Exception as error:  # it concerns one session
                    contained("reload", error, client=absent.key.client)

    async def _run_reviews(self) -> None:
        while True:
            await self._begun.wait()
            self._begun = trio.Event()
            await self._review()
            self.is_running = self._begun.is_set()

    async def _review(self) -> None:
        """Check all sessions of disconnected clients, page by page; stop early if `begin` is called again."""
        after, ended = SessionKey("", ""), 0
        while not self._begun.is_set():
            page = await self._query(FindAbsent(after, PAGE))
            for absent in page:
                try:
                    ended += await self._check(absent)
                except Exception as error:  # in one session, which is checked again when its client connects
                    contained("reload", error, client=absent.key.client)
            if len(page) < PAGE:
                break
            after = page[-1].key
        if ended:
            log.info("subscriptions of disconnected clients ended, no longer permitted", subscriptions=ended)

    async def _check(self, absent: AbsentSession) -> int:
        """Remove the forbidden subscriptions of the session `absent`, and unbind its queue from their keys.

        Return the number of removed subscriptions.
        """
        options = {name: decode_options(data) for name, data in absent.subscriptions.items()}
        forbidden = await self._forbidden(absent, options)
        if not forbidden:
            return 0
        remaining = options.keys() - set(forbidden)
        byte_count = text_bytes(absent.key.client) + sum(map(filter_bytes, remaining))
        keys = _keys({name: options[name] for name in forbidden})
        unbound = keys - _keys({name: options[name] for name in remaining})
        change = ChangeSession(
            absent.key,
            absent.epoch,
            dict.fromkeys(forbidden),
            weight=Weight(len(remaining), byte_count),
            unbindings=dict.fromkeys(unbound, True),
        )
        await self._until_up()
        if not await self._submit(change):
            return 0
        await self._unbind(absent, unbound)
        return len(forbidden)

    async def _unbind(self, absent: AbsentSession, keys: set[str]) -> None:
        for key in keys:
            await self._set_binding(absent.queue, key, bound=False)
        done = ChangeSession(absent.key, absent.epoch, unbindings=dict.fromkeys(keys, False))
        if keys and not await self._submit(done):
            # The client has returned, and may have bound the keys again for filters that it may have.
            for key in keys:
                await self._set_binding(absent.queue, key, bound=True)

    async def _is_absent(self, absent: AbsentSession) -> bool:
        """Return True if the session still has the epoch of `absent`, so its client has not reconnected."""
        found = await _reply(partial(self._state.query, FindSession(absent.key)))
        while found.verdict is OperationOutcome.UNAVAILABLE:
            await trio.sleep(RETRY_SECS)
            found = await _reply(partial(self._state.query, FindSession(absent.key)))
        return found.value is not None and found.value.owner.epoch == absent.epoch

    async def _forbidden(
        self, absent: AbsentSession, options: Mapping[str, SubscriptionOptions]
    ) -> list[str]:
        """Return the forbidden filters of the session `absent`, after waiting for permission checks.

        `options` has the options of the session's subscriptions, by topic filter.
        """
        while True:
            try:
                return self._find_forbidden(absent.user, absent.key.client, options)
            except Pending as pending:
                await pending.awaited.wait()

    async def _set_binding(self, queue: str, key: str, *, bound: bool) -> None:
        """Bind a session's queue with `key`, or unbind it if `bound` is False.

        The request is repeated until the broker has confirmed it.
        """
        done = trio.Event()
        while not done.is_set():
            await self._until_up()
            self._cluster.set_binding(queue, key, bound, done.set)
            with trio.move_on_after(BIND_SECS):
                await done.wait()

    async def _until_up(self) -> None:
        while not self._cluster.is_up:
            await trio.sleep(RETRY_SECS)

    async def _submit(self, operation: Operation[None]) -> bool:
        """Submit an operation and wait for its reply. Submit it again while the database is unavailable.

        Return True if the operation was stored, False if the session has another epoch.
        """
        while True:
            reply = await _reply(partial(self._state.submit, operation))
            if reply.verdict is not OperationOutcome.UNAVAILABLE:
                return reply.verdict is OperationOutcome.DONE
            await trio.sleep(RETRY_SECS)

    async def _query(self, query: Query[list[T]]) -> list[T]:
        """Return the result of a query, which is repeated while the database is unavailable."""
        while True:
            reply: Reply[list[T]] = await _reply(partial(self._state.query, query))
            if reply.value is not None:
                return reply.value
            await trio.sleep(RETRY_SECS)


async def _reply(request: Callable[[Callable[[Reply[T]], None]], None]) -> Reply[T]:
    """Call `request` with a callback for a reply. Wait for the reply and return it."""
    replies: list[Reply[T]] = []
    answered = trio.Event()

    def add_reply(reply: Reply[T]) -> None:
        replies.append(reply)
        answered.set()

    request(add_reply)
    await answered.wait()
    return replies[0]


def _keys(options: Mapping[str, SubscriptionOptions]) -> set[str]:
    """Return the binding keys that these subscriptions need in the queue of their session.

    `options` has the options of each subscription by its topic filter.
    """
    bound = [name for name, one in options.items() if one.qos and shared_pattern(name) is None]
    return {key for name in bound if (key := binding_of(name.split("/"))) is not None}

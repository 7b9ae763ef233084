"""Retained messages of all replicas for the HTTP API.

The API reads and clears them page by page in the database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Final, TypeVar

import trio

from gateway.admin.responses import UnavailableError
from gateway.admin.retained import LocalMessages, RetainedOperations
from gateway.app.state import SharedState
from gateway.broker.mqtt.retained import RetainedTopics as LocalRetained
from gateway.engine.retained import SharedRetained, decode_retained
from gateway.model.message import Message
from gateway.state.interface import MatchRetained, Reply, Retained, Retention
from gateway.store.store import Store

ANSWER_SECS: Final = 60.0  # Longest wait for a reply of the database.
AWAY: Final = "the database of retained messages is unreachable"
T = TypeVar("T")
V = TypeVar("V")


class SharedMessages:
    """Retained messages of all replicas, and this replica's own `$SYS` messages, for the HTTP API.

    `flush` sends the queued requests to the database and the store.
    """

    def __init__(self, retained: SharedRetained, flush: Callable[[], None]) -> None:
        self._retained = retained
        self._flush = flush

    async def slices(self, topic_filter: str) -> AsyncIterator[list[Message]]:
        """Yield the retained messages whose topics match an MQTT filter, in one list for each database page.

        The first list has all `$SYS` messages of this replica, even those that the filter does not match.
        Raises UnavailableError if the database cannot be reached.
        """
        yield self._retained.messages()
        async for page in self._pages(topic_filter):
            yield [message for message, _ in page]

    async def remove(self, topic_filter: str, chosen: Callable[[Message], bool]) -> int:
        """Remove the retained messages that an MQTT filter matches and `chosen` accepts. Return their number.

        `$SYS` messages are removed if `chosen` accepts them, even if the filter does not match. A message is
        not removed if a newer message has replaced it meanwhile. Raises UnavailableError if the database
        cannot be reached; some messages may have been removed then.
        """
        own = [one for one in self._retained.messages() if chosen(one)]
        removed = sum(map(self._retained.forget, own))
        async for page in self._pages(topic_filter):
            found = [stored for message, stored in page if chosen(message)]
            replies = await self._replies(self._retained.clear, found)
            if any(reply.value is None for reply in replies):
                raise UnavailableError(AWAY)
            removed += sum(map(_is_removed, replies))
        return removed

    async def _pages(self, topic_filter: str) -> AsyncIterator[list[tuple[Message, Retained]]]:
        """Yield pages of messages in the database that match an MQTT filter, each with its database row."""
        query, is_last = MatchRetained(topic_filter), False
        while not is_last:
            (reply,) = await self._replies(self._retained.read, [query])
            found = reply.value
            if found is None:
                raise UnavailableError(AWAY)
            decoded = [(decode_retained(row), row) for row in found]
            yield [(one.message, row) for one, row in decoded if one is not None]
            is_last = not found or query.is_last(found)
            if found:
                query = replace(query, after=found[-1].topic)

    async def settle(self) -> None:
        """Do nothing: `remove` returns only when the database has committed the removals."""

    async def _replies(
        self, submit: Callable[[V, Callable[[Reply[T]], None]], None], requests: list[V]
    ) -> list[Reply[T]]:
        """Call `submit` with each request and a callback for its reply. Return the replies in any order.

        Raises UnavailableError if a reply is missing after ANSWER_SECS.
        """
        replies: list[Reply[T]] = []
        all_there = trio.Event()

        def add_reply(reply: Reply[T]) -> None:
            replies.append(reply)
            if len(replies) == len(requests):
                all_there.set()

        for one in requests:
            submit(one, add_reply)
        self._flush()
        if requests:
            with trio.move_on_after(ANSWER_SECS):
                await all_there.wait()
        if len(replies) < len(requests):
            raise UnavailableError(f"the database has not responded for {ANSWER_SECS:g} s")
        return replies


def _is_removed(reply: Reply[Retention]) -> bool:
    return reply.value is not None and reply.value.stored and reply.value.before is not None


def retained_messages(
    retained: LocalRetained, state: SharedState | None, store: Store | None, flush: Callable[[], None]
) -> RetainedOperations:
    """Return an object by which the HTTP API reads and removes retained messages.

    With a shared state it serves the messages of all replicas, otherwise those of this process.
    """
    if state is not None:
        return SharedMessages(state.retained, flush)
    return LocalMessages(retained, store, flush)

"""Operations on retained MQTT messages: listing and clearing them.

`topic` is an MQTT topic filter, or with `exact` the topic itself; `client` and `user` are those of the
publisher.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.answers import BadChoiceError, answer
from gateway.admin.models import Removed, RetainedRow
from gateway.admin.operations import ServedOperation
from gateway.admin.selection import RemovalPace, named, on_disk, page_of_slices, query_of, removal_of, slices
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.topics import topic_matches
from gateway.model.message import Message
from gateway.operations import REMOVE_RETAINED, RETAINED
from gateway.protocols.mqtt.data_types import is_filter
from gateway.store.store import Store

log = structlog.get_logger()


class RetainedOperations(Protocol):
    """Retained messages of this process or of all replicas. All methods raise UnavailableError."""

    def slices(self, topic_filter: str) -> AsyncIterator[list[Message]]:
        """Yield at least the messages that an MQTT filter matches, in slices."""

    async def forget(self, messages: list[Message]) -> int:
        """Clear the topics of these messages. Return how many were retained."""

    async def settle(self) -> None:
        """Return when the cleared state is durable."""


class LocalMessages:
    """Retained messages of this process. `flush` ends a wake-up."""

    def __init__(self, retained: RetainedTopics, store: Store | None, flush: Callable[[], None]) -> None:
        self._retained = retained
        self._store = store
        self._flush = flush

    def slices(self, topic_filter: str) -> AsyncIterator[list[Message]]:
        """Yield all messages in slices."""
        return slices(self._retained.messages())

    async def forget(self, messages: list[Message]) -> int:
        """Clear the topics that still have these messages. Return their number."""
        pace = RemovalPace(self._flush)
        removed = 0
        for message in messages:
            await pace.spend(1)
            removed += self._retained.forget(message)
        return removed

    async def settle(self) -> None:
        """Return when all changes are on disk. Raises UnavailableError if the disk does not store them."""
        await on_disk(self._store, self._flush)


class RetainedApi:
    """Operations on retained messages."""

    def __init__(self, retained: RetainedOperations) -> None:
        self._retained = retained

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations with their functions."""
        return [
            ServedOperation(RETAINED, self._list, RetainedRow),
            ServedOperation(REMOVE_RETAINED, self._remove, Removed),
        ]

    async def _list(self, request: Request) -> Response:
        choice, count, after = await query_of(request, RETAINED.words)
        chosen, found = _chooser(choice), self._retained.slices(choice.get("topic", "#"))
        page = await page_of_slices(found, chosen, _topic, shown, count, after)
        return page.answer()

    async def _remove(self, request: Request) -> Response:
        choice = await removal_of(request, REMOVE_RETAINED)
        chosen = _chooser(choice)
        removed = 0
        async for some in self._retained.slices(choice.get("topic", "#")):
            removed += await self._retained.forget([message for message in some if chosen(message)])
        if removed:
            await self._retained.settle()
            log.info("operator removed retained messages", count=removed, **choice)
        return answer({"removed": removed})


def _topic(message: Message) -> str:
    return message.address.name


def _chooser(choice: Mapping[str, Any]) -> Callable[[Message], bool]:
    topic, client, user = _topics(choice), named(choice, "client"), named(choice, "user")

    def chosen(message: Message) -> bool:
        sender = message.sender
        return topic(_topic(message)) and client(sender.client) and user(sender.user)

    return chosen


def _topics(choice: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that returns True for selected topics.

    Raises BadChoiceError for an invalid filter.
    """
    topic_filter: str = choice.get("topic", "#")
    if choice.get("exact") and "topic" in choice:
        return topic_filter.__eq__
    if not is_filter(topic_filter):
        raise BadChoiceError(f"topic: {topic_filter!r} is not a topic filter")
    pattern = topic_filter.split("/")
    return lambda topic: topic_matches(pattern, topic.split("/"))


def shown(message: Message) -> dict[str, Any]:
    """Return the row of a retained message."""
    expires = message.expires
    return {
        "topic": _topic(message),
        "qos": message.assurance,
        "body_bytes": len(message.body),
        "client": message.sender.client,
        "user": message.sender.user,
        "expires": datetime.fromtimestamp(expires, UTC).isoformat(timespec="seconds") if expires else None,
    }

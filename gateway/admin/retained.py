"""Operations on retained MQTT messages: listing and clearing them.

Messages are selected by `topic`, which is an MQTT topic filter or with `exact` a topic, and by `client` and
`user` of the publisher.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.messages import moment
from gateway.admin.models import RemovalResult, RetainedRow
from gateway.admin.operations import ServedOperation
from gateway.admin.responses import BadChoiceError, json_response
from gateway.admin.selection import (
    RemovalPace,
    name_matcher,
    page_of,
    query_of,
    removal_of,
    slices,
    wait_until_durable,
)
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.topics import topic_matches
from gateway.model.message import Message
from gateway.operations import REMOVE_RETAINED, RETAINED
from gateway.protocols.mqtt.data_types import is_filter
from gateway.store.store import Store

log = structlog.get_logger()


class RetainedOperations(Protocol):
    """Access to retained MQTT messages of this process or of all replicas.

    All methods raise UnavailableError if the messages cannot be read or changed at present.
    """

    def slices(self, topic_filter: str) -> AsyncIterator[list[Message]]:
        """Yield lists of retained messages: all that the MQTT topic filter matches, and possibly others."""

    async def remove(self, topic_filter: str, chosen: Callable[[Message], bool]) -> int:
        """Remove the retained messages for which `chosen` returns True, and return their number.

        Only topics that the MQTT filter `topic_filter` matches are searched. A message that replaces a chosen
        one before the removal is not removed.
        """

    async def settle(self) -> None:
        """Wait until all removals are durable."""


class LocalMessages:
    """Access to retained messages in the memory of this process.

    `flush` passes changes to the store and writes to sockets, as the end of each pass of the event loop does.
    """

    def __init__(self, retained: RetainedTopics, store: Store | None, flush: Callable[[], None]) -> None:
        self._retained = retained
        self._store = store
        self._flush = flush

    def slices(self, topic_filter: str) -> AsyncIterator[list[Message]]:
        """Yield lists with all retained messages. The topic filter is not applied."""
        return slices(self._retained.messages())

    async def remove(self, topic_filter: str, chosen: Callable[[Message], bool]) -> int:
        """Remove the retained messages for which `chosen` returns True, and return their number.

        A message that was replaced after `chosen` was called is not counted, and the new message is not
        removed.
        """
        pace = RemovalPace(self._flush)
        removed = 0
        async for some in self.slices(topic_filter):
            for message in filter(chosen, some):
                await pace.spend(1)
                removed += self._retained.forget(message)
        return removed

    async def settle(self) -> None:
        """Wait until all changes are on disk. Raises UnavailableError if they cannot be stored."""
        await wait_until_durable(self._store, self._flush)


class RetainedApi:
    """API operations on retained MQTT messages."""

    def __init__(self, retained: RetainedOperations) -> None:
        self._retained = retained

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on retained messages, each with the function that serves it."""
        return [
            ServedOperation(RETAINED, self._list, RetainedRow),
            ServedOperation(REMOVE_RETAINED, self._remove, RemovalResult),
        ]

    async def _list(self, request: Request) -> Response:
        choice, count, after = await query_of(request, RETAINED.words)
        chosen, found = _chooser(choice), self._retained.slices(choice.get("topic", "#"))
        page = await page_of(found, chosen, _topic, retained_row, count, after)
        return page.to_response()

    async def _remove(self, request: Request) -> Response:
        choice = await removal_of(request, REMOVE_RETAINED)
        chosen = _chooser(choice)
        removed = await self._retained.remove(choice.get("topic", "#"), chosen)
        if removed:
            await self._retained.settle()
            log.info("operator removed retained messages", count=removed, **choice)
        return json_response({"removed": removed})


def _topic(message: Message) -> str:
    return message.address.name


def _chooser(choice: Mapping[str, Any]) -> Callable[[Message], bool]:
    topic, client, user = _topics(choice), name_matcher(choice, "client"), name_matcher(choice, "user")

    def is_selected(message: Message) -> bool:
        sender = message.sender
        return topic(_topic(message)) and client(sender.client) and user(sender.user)

    return is_selected


def _topics(choice: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a predicate: True for the topics that the parameters `topic` and `exact` in `choice` select.

    Raises BadChoiceError for an invalid topic filter.
    """
    topic_filter: str = choice.get("topic", "#")
    if choice.get("exact") and "topic" in choice:
        return topic_filter.__eq__
    if not is_filter(topic_filter):
        raise BadChoiceError(f"topic: {topic_filter!r} is not a topic filter")
    pattern = topic_filter.split("/")
    return lambda topic: topic_matches(pattern, topic.split("/"))


def retained_row(message: Message) -> dict[str, Any]:
    """Return a retained message as a JSON object of the API (RetainedRow)."""
    expires = message.expires
    return {
        "topic": _topic(message),
        "qos": message.assurance,
        "body_bytes": len(message.body),
        "client": message.sender.client,
        "user": message.sender.user,
        "expires": moment(expires) if expires else None,
    }

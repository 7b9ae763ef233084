"""Retained MQTT messages over HTTP: for which topics there are any, and an operator's way to clear them.

`topic` is an MQTT topic filter; `client` and `user` are those of whoever published the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.answers import answer
from gateway.admin.choosing import Pace, matcher, on_disk, page_of, query_of, removal_of, slices
from gateway.admin.models import Removed, RetainedRow
from gateway.admin.operations import Operation
from gateway.broker.mqtt.retained import Retained
from gateway.broker.topics import topic_matches
from gateway.model.message import Message
from gateway.store.store import Store

WORDS: Final = {"topic": str, "client": str, "user": str}

log = structlog.get_logger()


class RetainedApi:
    """`flush` ends a wake-up."""

    def __init__(self, retained: Retained, store: Store | None, flush: Callable[[], None]) -> None:
        self._retained = retained
        self._store = store
        self._flush = flush

    def operations(self) -> Sequence[Operation]:
        """What can be asked."""
        at = "/retained"
        return [
            Operation("GET", at, "Retained messages", self._list, RetainedRow, WORDS, paged=True),
            Operation(
                "POST",
                f"{at}/remove",
                "Clear retained messages",
                self._remove,
                Removed,
                takes=WORDS | {"all": bool},
            ),
        ]

    async def _list(self, request: Request) -> Response:
        wanted, count, after = await query_of(request, WORDS)
        page = await page_of(self._retained.messages(), _chooser(wanted), _topic, shown, count, after)
        return page.answer()

    async def _remove(self, request: Request) -> Response:
        wanted = await removal_of(request, WORDS, {})
        chosen = _chooser(wanted)
        pace = Pace(self._flush)
        removed = 0
        async for some in slices(self._retained.messages()):
            for message in some:
                if chosen(message):
                    await pace.spend(1)
                    removed += self._retained.forget(message)
        if removed:
            await on_disk(self._store, self._flush)
            log.info("an operator removed retained messages", count=removed, **wanted)
        return answer({"removed": removed})


def _topic(message: Message) -> str:
    return message.address.name


def _chooser(wanted: Mapping[str, Any]) -> Callable[[Message], bool]:
    pattern = wanted.get("topic", "#").split("/")
    client, user = matcher(wanted.get("client", "*")), matcher(wanted.get("user", "*"))

    def chosen(message: Message) -> bool:
        sender = message.sender
        return (
            topic_matches(pattern, _topic(message).split("/")) and client(sender.client) and user(sender.user)
        )

    return chosen


def shown(message: Message) -> dict[str, Any]:
    """For people and programs."""
    expires = message.expires
    return {
        "topic": _topic(message),
        "qos": message.assurance,
        "body_bytes": len(message.body),
        "client": message.sender.client,
        "user": message.sender.user,
        "expires": datetime.fromtimestamp(expires, UTC).isoformat(timespec="seconds") if expires else None,
    }

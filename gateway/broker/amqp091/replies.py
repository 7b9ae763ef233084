"""Direct reply-to: a reply goes from its publisher's channel to the requester's, without a queue between.

Whoever consumes from REPLY_TO gets a name of its own, which is put into the reply-to of its requests; what is
published to that name through the default exchange is delivered to it at once, or to nobody.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from gateway.model.batch import SubBatch
from gateway.model.message import Message

REPLY_TO: Final = "amq.rabbitmq.reply-to"
PREFIX: Final = REPLY_TO + "."


class ReplyTo:
    """One requester: a sink whose messages are gone when they are delivered."""

    __slots__ = ("deliver", "name")

    def __init__(self, deliver: Callable[[list[Message]], None]) -> None:
        self.name = PREFIX + secrets.token_urlsafe(24)
        self.deliver = deliver

    def publish(self, part: SubBatch) -> None:
        """Deliver; replies are transient, and accepted whether or not the requester can take them."""
        self.deliver(part.messages)
        part.accept()


class Replies:
    """The requesters of a virtual host, by name."""

    def __init__(self) -> None:
        self._waiting: dict[str, ReplyTo] = {}

    def add(self, deliver: Callable[[list[Message]], None]) -> ReplyTo:
        """A requester, whose name nobody can guess."""
        requester = ReplyTo(deliver)
        self._waiting[requester.name] = requester
        return requester

    def remove(self, requester: ReplyTo) -> None:
        """It waits no more."""
        del self._waiting[requester.name]

    def find(self, name: str) -> ReplyTo | None:
        """The requester of that name."""
        return self._waiting.get(name)

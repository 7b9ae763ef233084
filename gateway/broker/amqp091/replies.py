"""Direct reply-to: a reply goes from its publisher's channel to the requester's, without a queue.

A client that consumes from REPLY_TO gets a unique name, which is put into the reply-to of its requests. A
message that is published to that name through the default exchange is delivered to the client at once, or
dropped if the client cannot receive it.
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
    """Requester of direct replies: a destination that delivers messages to its client, without a store."""

    __slots__ = ("deliver", "name")

    def __init__(self, deliver: Callable[[list[Message]], None]) -> None:
        self.name = PREFIX + secrets.token_urlsafe(24)
        self.deliver = deliver

    def publish(self, sub_batch: SubBatch) -> None:
        """Deliver replies to the requester, and accept them even if the requester cannot receive them."""
        self.deliver(sub_batch.messages)
        sub_batch.accept()


class RequesterNames:
    """Requesters of direct replies in a virtual host, by name."""

    def __init__(self) -> None:
        self._waiting: dict[str, ReplyTo] = {}

    def add(self, deliver: Callable[[list[Message]], None]) -> ReplyTo:
        """Add and return a requester, which gets a new unguessable name.

        `deliver` is called with the messages for it.
        """
        requester = ReplyTo(deliver)
        self._waiting[requester.name] = requester
        return requester

    def remove(self, requester: ReplyTo) -> None:
        """Remove a requester whose client no longer consumes replies."""
        del self._waiting[requester.name]

    def find(self, name: str) -> ReplyTo | None:
        """Return the requester of that name, or None."""
        return self._waiting.get(name)

"""What of a virtual host survives a restart: queues, topics, durable subscriptions, and their messages.

Each is a record of its own in the store. What clients had made is there again after a restart; when that is
not allowed any more, only what still holds messages is, so that none is lost by a change of the
configuration.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Final

import structlog

from gateway.broker.amqpfast.destinations import Interest
from gateway.broker.amqpfast.selection import selection
from gateway.broker.amqpfast.selector import SelectorRefused
from gateway.broker.bodies import Bodies
from gateway.broker.host_records import HostRecords
from gateway.broker.queue import Queue
from gateway.model.message import Message
from gateway.store.restoring import set_aside
from gateway.store.store import Store

QUEUE: Final = "fast-queue"
TOPIC: Final = "fast-topic"
SUBSCRIPTION: Final = "fast-subscription"
UNTOUCHED: Final = "fast-untouched"  # see broker/untouched.py

log = structlog.get_logger(limited=True)


class FastDefinitions(HostRecords):
    """The records of one virtual host."""

    def __init__(
        self,
        store: Store,
        host: str,
        bodies: Bodies,
        *,
        memory_messages_max: int,
        memory_octets_max: int,
    ) -> None:
        """As HostRecords."""
        super().__init__(
            store,
            host,
            bodies,
            untouched=UNTOUCHED,
            memory_messages_max=memory_messages_max,
            memory_octets_max=memory_octets_max,
        )

    def add(self, kind: str, name: str, maker: str | None = None) -> None:
        """Record a QUEUE or TOPIC, and who made it."""
        self._put(kind, {"maker": maker}, name)

    def remove(self, kind: str, name: str) -> None:
        """It is deleted; a queue drops its messages itself."""
        self._delete(kind, name)

    def keep(self, queue: Queue, kind: str, *words: str) -> None:
        """Give a queue or subscription what the store has of it, and keep its messages from now on."""
        kept = self._storage(queue, kind, *words)
        self._untouched.recall(kept, kind, *words)

    def note_untouched(self, queue: Queue, kind: str, *words: str) -> None:
        """The process ends: note what of a queue or subscription nobody has been handed."""
        self._untouched.note(queue.storage, kind, *words)

    def add_subscription(self, client: str, identifier: str, interest: Interest, maker: str | None) -> None:
        """Record a durable subscription, in place of an earlier one."""
        given = {
            "name": interest.name,
            "prefix": interest.prefix,
            "selector": b64encode(interest.selector).decode(),
            "mime_type": interest.mime_type,
            "no_local": interest.no_local,
            "maker": maker,
        }
        self._put(SUBSCRIPTION, given, client, identifier)

    def remove_subscription(self, client: str, identifier: str) -> None:
        """It is cancelled."""
        self._delete(SUBSCRIPTION, client, identifier)

    def names(self, kind: str) -> list[tuple[str, str | None]]:
        """The recorded queues or topics, and who made them."""
        return [(words[0], given["maker"]) for words, given in self._records(kind)]

    def subscriptions(self) -> list[tuple[str, str, Interest, str | None]]:
        """The recorded subscriptions: client, identifier, what for, whose.

        A selector that an earlier version took and this one refuses selects nothing, until the client says
        another one: what waits is not lost, and the others start.
        """
        found = []
        for words, given in self._records(SUBSCRIPTION):
            with set_aside(SUBSCRIPTION, words):
                client, identifier = words
                selector = b64decode(given["selector"])
                try:
                    selects = selection(given["mime_type"], selector)
                except SelectorRefused as error:
                    log.warning(
                        "a durable subscription selects nothing: its selector is refused now",
                        client=client,
                        identifier=identifier,
                        reason=str(error),
                    )
                    selects = _nothing
                interest = Interest(
                    given["name"],
                    prefix=given["prefix"],
                    selector=selector,
                    mime_type=given["mime_type"],
                    selects=selects,
                    no_local=given["no_local"],
                )
                found.append((client, identifier, interest, given["maker"]))
        return found


def _nothing(message: Message) -> bool:
    return False

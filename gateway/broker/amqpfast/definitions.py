"""Records of AMQP/Fast virtual hosts that survive a restart.

Queues, topics and durable subscriptions each have a record of their own in the store, beside their messages.
At a start everything that clients created is restored. When the configuration no longer lets clients create
destinations, only queues that still hold messages are restored, so that a change of the configuration loses
no message.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Final

import structlog

from gateway.broker.amqpfast.destinations import Interest
from gateway.broker.amqpfast.selection import selection
from gateway.broker.amqpfast.selector import SelectorRefused
from gateway.broker.host_records import HostRecords
from gateway.broker.queue import Queue
from gateway.model.message import Message
from gateway.store.recovery import contain_failure

QUEUE: Final = "fast-queue"
TOPIC: Final = "fast-topic"
SUBSCRIPTION: Final = "fast-subscription"

log = structlog.get_logger(limited=True)


class FastDefinitions(HostRecords):
    """Records of an AMQP/Fast virtual host: its durable queues, topics, subscriptions and messages."""

    untouched = "fast-untouched"

    def add(self, kind: str, name: str, maker: str | None = None) -> None:
        """Record a QUEUE or TOPIC and the user who created it (`maker`)."""
        self._put(kind, {"maker": maker}, name)

    def remove(self, kind: str, name: str) -> None:
        """Delete the record of a queue or topic. The messages of a queue are deleted by the queue itself."""
        self._delete(kind, name)

    def persist(self, queue: Queue, kind: str, *words: str) -> None:
        """Restore the stored messages of a queue or subscription, and store its messages from now on.

        `kind` and `words` identify its records: the name of a queue, or (client, identifier) of a
        subscription.
        """
        storage = self._storage(queue, kind, *words)
        self._untouched.restore_ranges(storage, kind, *words)

    def note_untouched(self, queue: Queue, kind: str, *words: str) -> None:
        """Record at the end of the process which messages of a queue were never delivered.

        The queue may be that of a subscription. `kind` and `words` identify it as in `persist`.
        """
        self._untouched.record_ranges(queue.storage, kind, *words)

    def add_subscription(self, client: str, identifier: str, interest: Interest, maker: str | None) -> None:
        """Record a durable subscription, which the user `maker` has created.

        It replaces an earlier one of the same client and identifier.
        """
        record = {
            "name": interest.name,
            "prefix": interest.prefix,
            "selector": b64encode(interest.selector).decode(),
            "mime_type": interest.mime_type,
            "no_local": interest.no_local,
            "maker": maker,
        }
        self._put(SUBSCRIPTION, record, client, identifier)

    def remove_subscription(self, client: str, identifier: str) -> None:
        """Delete the record of a cancelled durable subscription."""
        self._delete(SUBSCRIPTION, client, identifier)

    def names(self, kind: str) -> list[tuple[str, str | None]]:
        """Return (name, user who created it) of each recorded queue or topic."""
        return [(words[0], given["maker"]) for words, given in self._records(kind)]

    def subscriptions(self) -> list[tuple[str, str, Interest, str | None]]:
        """Return the recorded subscriptions as (client, identifier, interest, user).

        If this version no longer accepts a stored selector, the subscription selects no new messages until
        its client sends another selector. Its waiting messages are not lost.
        """
        found = []
        for words, record in self._records(SUBSCRIPTION):
            with contain_failure(SUBSCRIPTION, words):
                client, identifier = words
                selector = b64decode(record["selector"])
                try:
                    selects = selection(record["mime_type"], selector)
                except SelectorRefused as error:
                    log.warning(
                        "durable subscription disabled, selector refused",
                        client=client,
                        identifier=identifier,
                        reason=str(error),
                    )
                    selects = _match_none
                interest = Interest(
                    record["name"],
                    prefix=record["prefix"],
                    selector=selector,
                    mime_type=record["mime_type"],
                    selects=selects,
                    no_local=record["no_local"],
                )
                found.append((client, identifier, interest, record["maker"]))
        return found


def _match_none(message: Message) -> bool:
    return False

"""Retained messages: the last one of each topic, for whoever subscribes later. It is a sink of the
dispatcher.

With a store each is written, too, and is there after a restart. Whoever publishes one at QoS 1 or 2 is told
when the commit has it. When the disk takes nothing the publisher is refused, and the message is written
later.

Whoever subscribes is sent them in pieces, by a Walk through the topics: a filter may match all of them, and
so may each of the next two hundred.
"""

from __future__ import annotations

from typing import Final

from gateway import clock
from gateway.broker.topics import TopicTree
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.store.restoring import set_aside
from gateway.store.store import Store

PIECE_MESSAGES_MAX: Final = 256
PIECE_STEPS_MAX: Final = 2_000  # branches of the tree that are looked at in one turn
KIND: Final = "retained"  # of record in the store; its key is the topic, in UTF-8, its value the message


class Retained:
    """The retained messages of one topic tree, by topic."""

    def __init__(
        self,
        *,
        messages_max: int = 100_000,
        octets_max: int = 256 * 1024 * 1024,
        store: Store | None = None,
    ) -> None:
        """Each keeps a body: beyond the limits a new topic is not retained, and counted in `refused`.

        What is in `store`, which has not been started, is retained from the beginning.
        """
        self.messages_max = messages_max
        self.octets_max = octets_max
        self.octets = 0
        self.refused = 0
        self._messages: dict[str, Message] = {}
        self._tree: TopicTree[Message] = TopicTree()
        self._store = store
        if store is not None:
            self._restore(store)

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, topic: str) -> bool:
        return topic in self._messages

    def _restore(self, store: Store) -> None:
        utc = clock.utc()
        for key, message in store.things(KIND):
            assert isinstance(message, Message)
            if message.expires and message.expires <= utc:
                store.delete(KIND, key)
                continue
            with set_aside(KIND, key):
                self._set(message)

    def publish(self, part: SubBatch) -> None:
        """Keep each message for its topic."""
        for message in part.messages:
            self.keep(message)
        if self._store is None or not any(message.assurance for message in part.messages):
            part.accept()
            return
        part.settle_at([at for at, message in enumerate(part.messages) if not message.assurance])
        self._store.after_commit(part.settle)

    def keep(self, message: Message) -> None:
        """Keep `message` for its topic; an empty body forgets the topic (5: 3.3.1.3)."""
        address = message.address
        known = address.name in self._messages
        kept = self._set(message)
        if self._store is not None:
            if kept:
                self._store.put(KIND, address.wire, message)
            elif known:
                self._store.delete(KIND, address.wire)

    def messages(self) -> list[Message]:
        """All of them now."""
        return list(self._messages.values())

    def forget(self, message: Message) -> bool:
        """Forget this message; False: its topic has another one, or none."""
        if self._messages.get(message.address.name) is not message:
            return False
        self.keep(Message(message.address, b""))
        return True

    def show(self, message: Message) -> None:
        """Keep `message` for its topic as long as the process lives: it is made anew by the next one."""
        self._set(message)

    def _set(self, message: Message) -> bool:
        """In memory; False: the topic has no retained message now."""
        topic = message.address.name
        before = self._messages.pop(topic, None)
        if before is not None:
            self.octets -= before.octets
        empty = not len(message.body)
        full = len(self._messages) >= self.messages_max or self.octets + message.octets > self.octets_max
        if empty or full:
            self.refused += not empty
            if before is not None:
                self._tree.remove(topic.split("/"))
            return False
        self._messages[topic] = message
        self._tree.put(topic.split("/"), message)
        self.octets += message.octets
        return True

    def find(
        self, pattern: list[str], after: list[str] | None, most: int, steps: int
    ) -> tuple[list[Message], list[str] | None]:
        """As TopicTree.find: messages whose topics match the levels of a filter, without expired ones."""
        found, place = self._tree.find(pattern, after, most=most, steps=steps)
        utc = clock.utc()
        return [message for message in found if not message.expires or message.expires > utc], place

"""Retained messages: the latest of each topic, for later subscribers. A sink of the dispatcher.

With a store each message is also written to disk, and restored after a restart. The publisher of a message at
QoS 1 or 2 is informed after the commit; while the disk fails the publisher is refused, and the message is
written later. A message beyond the limits of all users or of its publisher is refused, rather than
acknowledged and lost, and the topic keeps its earlier message. Messages count for the user who published
them, also after a restart. Expired messages are removed at a tick, or when another message needs the space.

New subscribers get retained messages in pieces (RetainedWalk), because a filter may match all topics, and so
may the next two hundred filters.
"""

from __future__ import annotations

import sys
from heapq import heapify, heappop, heappush
from typing import Final

from gateway import clock
from gateway.broker.shares import filter_bytes
from gateway.broker.topics import TopicTree
from gateway.model.address import ADDRESS_BYTES_FEW
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

PIECE_MESSAGES_MAX: Final = 256
PIECE_STEPS_MAX: Final = 2_000  # branches of the tree visited in one turn
EXPIRED_MAX: Final = 1_000  # messages removed in one turn
SLACK: Final = 64  # outdated entries that may be in the heap, in addition to as many as are valid
RETAINED_FULL: Final = Outcome(
    Verdict.REJECTED,
    Reason.QUOTA,
    "limits.retained_... or limits.user_share is reached: the previous retained message is unchanged",
)
KIND: Final = "retained"  # kind of record in the store; its key is the topic in UTF-8, its value the message


class RetainedTopics:
    """Retained messages of one topic tree, by topic."""

    def __init__(
        self,
        *,
        messages_max: int = 100_000,
        bytes_max: int = 256 * 1024 * 1024,
        store: Store | None = None,
        shares: UserShares | None = None,
    ) -> None:
        """Create the collection, and restore it from `store`, which must not have been started.

        `messages_max` and `bytes_max` limit all messages. `shares` replaces these limits, and limits the
        messages of each user, too. A message beyond a limit is refused and counted in `refused`.
        """
        self.messages_max = messages_max
        self.shares = shares or UserShares(
            "retained messages",
            count_max=messages_max,
            bytes_max=bytes_max,
            count_option="limits.retained_messages_max",
            bytes_option="limits.retained_bytes_max",
        )
        self.refused = 0
        self._messages: dict[str, Message] = {}
        self._tree: TopicTree[Message] = TopicTree()
        self._expiring: list[tuple[float, str]] = []  # heap of expiry times and topics; some are outdated
        self._store = store
        self._left_out: set[object] = set()  # keys of stored messages that are not in memory
        if store is not None:
            self._restore(store)

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def byte_count(self) -> int:
        """Size of all retained messages in bytes."""
        return self.shares.total

    def __contains__(self, topic: str) -> bool:
        return topic in self._messages

    def _restore(self, store: Store) -> None:
        utc = clock.utc()
        for key, message in store.records(KIND):
            assert isinstance(message, Message)
            if message.expires and message.expires <= utc:
                store.delete(KIND, key)
                continue
            self._left_out.add(key)
            with contain_failure(KIND, key):
                if self._set(message, utc, restoring=True):
                    self._left_out.discard(key)

    def publish(self, sub_batch: SubBatch) -> None:
        """Retain each message of a sub-batch for its topic, and settle the sub-batch."""
        refused = [at for at, message in enumerate(sub_batch.messages) if not self.set_retained(message)]
        if refused:
            sub_batch.settle_at(refused, RETAINED_FULL)
        if self._store is None or not any(message.assurance for message in sub_batch.messages):
            sub_batch.accept()
            return
        sub_batch.settle_at([at for at, message in enumerate(sub_batch.messages) if not message.assurance])
        self._store.after_commit(sub_batch.settle)

    def set_retained(self, message: Message) -> bool:
        """Retain `message` for its topic; with an empty body, remove the topic's message (5: 3.3.1.3).

        Returns False if there is no space; then the topic is unchanged.
        """
        address = message.address
        was_retained = address.name in self._messages
        stored = self._set(message, clock.utc())
        if self._store is not None:
            if stored:
                self._store.put(KIND, address.wire, message)
            elif stored is False and (was_retained or address.wire in self._left_out):
                self._store.delete(KIND, address.wire)
            if stored is not None:
                self._left_out.discard(address.wire)
        return stored is not None

    def messages(self) -> list[Message]:
        """Return all retained messages."""
        return list(self._messages.values())

    def forget(self, message: Message) -> bool:
        """Remove this message. Return False if it is no longer the retained message of its topic."""
        if self._messages.get(message.address.name) is not message:
            return False
        self.set_retained(Message(message.address, b""))
        return True

    def show(self, message: Message) -> None:
        """Retain `message` in memory and not in the store, because each process builds it itself."""
        self._set(message, clock.utc())

    def _set(self, message: Message, utc: float, *, restoring: bool = False) -> bool | None:
        """Store a topic's retained message in memory, or remove it if the body is empty. Return the result.

        The result is True if the message is stored, False if the topic's message was removed, and None if a
        limit forbids it. `utc` is the present time in POSIX seconds; expired messages are removed to make
        space. With `restoring` (at the start, from disk) the limits of all messages apply, but not those of
        one user.
        """
        topic = message.address.name
        if not len(message.body):
            self._drop(topic)
            return False
        if restoring:  # it was accepted, and a share may have been configured since
            if self.shares.exceeded_total_limit(retained_weight(message)):
                self.refused += 1
                return None
        elif not self._has_capacity(message):
            self.forget_expired(utc)
            if not self._has_capacity(message, counted=True):
                self.refused += 1
                return None
        before = self._messages.pop(topic, None)
        if before is not None:
            self.shares.remove(before.sender.user, retained_weight(before))
        self._messages[topic] = message
        self._tree.put(topic.split("/"), message)
        self.shares.add(message.sender.user, retained_weight(message))
        if message.expires:
            self._will_expire(message.expires, topic)
        return True

    def _has_capacity(self, message: Message, *, counted: bool = False) -> bool:
        """Return True if the message may replace the retained message of its topic, or be added.

        With `counted`, a refusal is counted for the user.
        """
        check = self.shares.refuse_if_full if counted else self.shares.exceeded_limit
        before = self._messages.get(message.address.name)
        if before is None:
            return not check(message.sender.user, retained_weight(message))
        self.shares.remove(before.sender.user, retained_weight(before))
        full = check(message.sender.user, retained_weight(message))
        self.shares.add(before.sender.user, retained_weight(before))
        return not full

    def _drop(self, topic: str) -> None:
        before = self._messages.pop(topic, None)
        if before is not None:
            self.shares.remove(before.sender.user, retained_weight(before))
            self._tree.remove(topic.split("/"))

    # Expiry.

    def _will_expire(self, expires: float, topic: str) -> None:
        heappush(self._expiring, (expires, topic))
        if len(self._expiring) > 2 * len(self._messages) + SLACK:
            self._expiring = [(one.expires, topic) for topic, one in self._messages.items() if one.expires]
            heapify(self._expiring)

    def tick(self) -> None:
        """Remove some expired messages; called regularly."""
        self.forget_expired(clock.utc(), EXPIRED_MAX)

    def forget_expired(self, utc: float, most: int = sys.maxsize) -> None:
        """Remove messages that have expired by `utc` (POSIX seconds), at most `most` of them."""
        while self._expiring and self._expiring[0][0] <= utc and most > 0:
            expires, topic = heappop(self._expiring)
            message = self._messages.get(topic)
            if message is not None and message.expires == expires:
                most -= 1
                self._drop(topic)
                self._delete_expired(message)

    def _delete_expired(self, message: Message) -> None:
        """Delete an expired message from the store; it was removed from memory already."""
        if self._store is not None:
            self._store.delete(KIND, message.address.wire)

    def find(
        self, pattern: list[str], after: list[str] | None, most: int, steps: int
    ) -> tuple[list[Message], list[str] | None]:
        """Return unexpired messages whose topics match a filter, and the topic at which the search stopped.

        At most `most` messages are found, of topics after `after`, while at most `steps` nodes of the topic
        tree are visited. The second result is the value of `after` for the next call, or None at the end.
        Topics and `pattern` (the filter) are lists of levels.
        """
        found, place = self._tree.find(pattern, after, most=most, steps=steps)
        utc = clock.utc()
        return [message for message in found if not message.expires or message.expires > utc], place


def retained_weight(message: Message) -> int:
    """Return how many bytes of the limit a retained message uses: its size, and more for a deep topic.

    Each level of the topic is a node of the topic tree, and even a short topic may have 200 levels.
    """
    address = message.address
    return message.byte_count + max(filter_bytes(address.name) - ADDRESS_BYTES_FEW, 0) - address.excess_bytes

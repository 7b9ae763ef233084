"""Queue of messages that wait for the database to retain them, before they are published to the cluster.

A message with RETAIN is published when the database has it: a subscriber that has a binding by then gets it
live, and one that is bound later finds it in the database. Of each topic one message is submitted to the
database at a time, so that a repeated operation does not undo a later one. Messages that arrive meanwhile are
combined: the newest is retained, and all are published, in order. Later messages of the same client wait,
too, because a client's messages keep their order.

While the database is unavailable messages wait for some seconds, and are refused then. A message that is not
retained because the limits are reached is published nevertheless, as the embedded broker does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from gateway import clock
from gateway.broker.mqtt.retained import RETAINED_FULL
from gateway.broker.shares import UserQuotas
from gateway.egress.confirms import WAITING_FULL, WAITING_USER_FULL
from gateway.engine.retained import AWAY, LATE, RetainedPublication, SharedRetained
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.shares import UserShares

WAIT_SECS: Final = 10.0  # how long messages wait while the database is unavailable
Key = str | tuple[str, str]


class WaitingMessage:
    """Message that waits to be retained in the database, or only behind messages that do.

    `stored` is what the database must retain, or None if the message only waits behind earlier messages of
    its client. `at` is its position in `sub_batch`, which is None once the message is settled.
    """

    __slots__ = ("at", "is_ready", "keys", "message", "queued_at", "stored", "sub_batch")

    def __init__(self, sub_batch: SubBatch, at: int, stored: RetainedPublication | None) -> None:
        self.sub_batch: SubBatch | None = sub_batch
        self.at = at
        self.message = message = sub_batch.messages[at]
        self.stored = stored
        self.is_ready = stored is None
        self.queued_at = clock.now()
        client = client_of(message)
        self.keys: tuple[Key, ...] = (client,) if stored is None else (client, message.address.name)


class RetainQueue:
    """Queues, by client and by topic, of messages that wait until the database retains them."""

    def __init__(
        self,
        retained: SharedRetained,
        send: Callable[[SubBatch, Sequence[int]], None],
        alone: Callable[[Message], SubBatch],
        *,
        messages_max: int,
        bytes_max: int,
    ) -> None:
        """Create the queues. Sources must retry messages beyond `messages_max` or `bytes_max`.

        `retained` writes messages to the database. `send` publishes messages of a sub-batch, by their
        positions. `alone` returns a sub-batch with one message whose publisher does not wait for the outcome.
        """
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self._shares: UserShares | None = None
        self._retained = retained
        self._send = send
        self._alone = alone
        self._queues: dict[Key, deque[WaitingMessage]] = {}
        self._submitted: set[str] = set()  # topics with a submitted message, or one to be submitted again
        self._later: dict[str, None] = {}  # topics that wait for the database to return
        self._messages = self._byte_count = 0

    def share_among(self, quotas: UserQuotas) -> None:
        """Limit the waiting messages of each user by `quotas`. Called before messages wait."""
        self._shares = quotas.waiting_in(self.messages_max, self.bytes_max)

    def __len__(self) -> int:
        return self._messages

    def has(self, message: Message) -> bool:
        """Return True if any messages of the client that sent `message` wait."""
        return client_of(message) in self._queues

    def add(self, sub_batch: SubBatch, at: int, stored: RetainedPublication | None) -> None:
        """Queue the message at position `at` of a sub-batch.

        `stored` is what the database must retain, or None if the message only waits behind earlier ones. The
        message is settled with WAITING_FULL if the queues are full, or WAITING_USER_FULL if its user's part
        of the limit is used up.
        """
        byte_count = sub_batch.messages[at].byte_count
        if self._messages >= self.messages_max or self._byte_count + byte_count > self.bytes_max:
            sub_batch.settle_at((at,), WAITING_FULL)
            return
        if self._shares is not None:
            if self._shares.refuse_over_share(sub_batch.messages[at : at + 1]):
                sub_batch.settle_at((at,), WAITING_USER_FULL)
                return
            self._shares.add_messages(sub_batch.messages[at : at + 1])
        self._messages += 1
        self._byte_count += byte_count
        entry = WaitingMessage(sub_batch, at, stored)
        for key in entry.keys:
            self._queues.setdefault(key, deque()).append(entry)
        topic = entry.message.address.name
        if stored is not None and topic not in self._submitted:
            self._submit(topic)

    def run(self) -> None:
        """Run the timer: submit messages again that have failed because the database was unavailable."""
        later, self._later = self._later, {}
        for topic in later:
            self._submit(topic)

    def _submit(self, topic: str) -> None:
        """Submit the newest waiting message of a topic to the database to retain it, if there is one."""
        waiting = [held for held in self._queues.get(topic, ()) if not held.is_ready]
        if not waiting:
            self._submitted.discard(topic)
            return
        self._submitted.add(topic)
        newest = waiting[-1].stored
        assert newest is not None  # what waits in a topic's queue is to be retained
        self._retained.retain(newest, partial(self._replied, topic, waiting))

    def _replied(self, topic: str, waiting: list[WaitingMessage], outcome: Outcome) -> None:
        """Process the outcome of retaining the newest of the messages in `waiting`, all for one topic.

        If it is retained, all of them are published, because it replaces the others. If the database is
        unavailable they are tried again, or refused after WAIT_SECS. With LATE they are not retained.
        """
        if outcome is ACCEPTED:
            for entry in waiting:
                entry.is_ready = True
        elif outcome is AWAY:
            now = clock.now()
            for entry in waiting:
                if now - entry.queued_at >= WAIT_SECS:
                    _settle(entry, AWAY)
            self._later[topic] = None
        elif outcome is LATE:
            _settle_late(waiting)
        else:
            self._refuse(waiting[-1], outcome)
        self._release(waiting)
        if topic not in self._later:
            self._submit(topic)

    def _refuse(self, entry: WaitingMessage, outcome: Outcome) -> None:
        """Settle a message (`entry`) that is not retained, with `outcome`.

        If the reason is that the limits of retained messages are reached, publish the message nevertheless.
        """
        _settle(entry, outcome)
        if outcome is RETAINED_FULL:
            entry.sub_batch, entry.at = self._alone(entry.message), 0

    def _release(self, changed: list[WaitingMessage]) -> None:
        """Publish the messages that need not wait any more.

        `changed` are those that have just been retained, published or settled; messages behind them may
        follow.
        """
        found: list[WaitingMessage] = []
        heads = deque(changed)
        while heads:
            entry = heads.popleft()
            if not entry.is_ready or not self._is_first(entry):
                continue
            for key in entry.keys:
                queue = self._queues[key]
                queue.popleft()
                if queue:
                    heads.append(queue[0])
                else:
                    del self._queues[key]
            self._messages -= 1
            self._byte_count -= entry.message.byte_count
            if self._shares is not None:
                self._shares.remove_messages((entry.message,))
            found.append(entry)
        at = 0
        while at < len(found):
            sub_batch, begin = found[at].sub_batch, at
            while at < len(found) and found[at].sub_batch is sub_batch:
                at += 1
            if sub_batch is not None:
                self._send(sub_batch, [entry.at for entry in found[begin:at]])

    def _is_first(self, entry: WaitingMessage) -> bool:
        """Return True if the message `entry` is the first one in the queues of its client and topic."""
        for key in entry.keys:
            queue = self._queues.get(key)
            if not queue or queue[0] is not entry:
                return False
        return True


def _settle(entry: WaitingMessage, outcome: Outcome) -> None:
    sub_batch, entry.sub_batch, entry.is_ready = entry.sub_batch, None, True
    if sub_batch is not None:
        sub_batch.settle_at((entry.at,), outcome)


def _settle_late(waiting: list[WaitingMessage]) -> None:
    """Settle the last message with LATE, and those that its client sent in the same or an earlier session.

    `waiting` has messages for one topic; the last one was not retained because a later session of the client
    has published to the topic. Wills are published without being retained: a will may be late because its
    claim has changed hands.
    """
    newest = waiting[-1].stored
    for entry in waiting:
        stored = entry.stored
        if stored and newest and stored.client == newest.client and 0 < stored.epoch <= newest.epoch:
            if stored.is_will:
                entry.is_ready = True
            else:
                _settle(entry, LATE)


def client_of(message: Message) -> tuple[str, str]:
    """Return endpoint and client identifier of a message's sender, whose messages keep their order."""
    return message.sender.endpoint, message.sender.client

"""Shared subscriptions over all replicas: one queue for each filter, consumed by every replica with members.

The broker divides messages among the replicas, and each divides its own among its members. A message is
acknowledged when the member has acknowledged it; when its client is lost it goes back, and any other member
gets it, here or elsewhere. The queue waits for sessions whose clients are away. When nobody has the
subscription any more, whoever had it last deletes it; of what nobody could clean up the broker is rid in a
day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final, Protocol

from gateway.broker.mqtt.shared import SharedGroup, shared_pattern
from gateway.engine.client_session import ClientSession, Delivery
from gateway.engine.consumers import Consumer, Content, Done
from gateway.engine.envelope import Number
from gateway.engine.names import binding_of, readable
from gateway.model.message import Message
from gateway.model.properties import Headers

EXPIRES_SECS: Final = 86_400.0
TOUCH_SECS: Final = EXPIRES_SECS / 8  # between two looks for queues that sessions need whose clients are away
GRACE_SECS: Final = 2.0  # until a queue is deleted that seems to have no members
HASH_OCTETS: Final = 8


class Reader(Protocol):
    """What a queue asks of the engine."""

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """The message of a delivery; None: there is none that could be delivered."""


class SharedQueue:
    """The queue of one filter, as this replica consumes it."""

    def __init__(
        self, reader: Reader, group: SharedGroup, queue: str, arguments: Headers, prefetch: int
    ) -> None:
        """`group` has the members at this replica."""
        self.group = group
        self.queue = queue
        self.arguments = arguments
        self.prefetch = prefetch
        self.fresh = False
        key = binding_of(shared_pattern(group.filter) or [])
        self._keys = () if key is None else (key,)
        self.unbound: dict[str, tuple[bool, Done]] = dict.fromkeys(self._keys, (True, _nobody))
        self._reader = reader

    @property
    def is_wanted(self) -> bool:
        """It has members here."""
        return True

    def confirm(self, done: Callable[[bool], None]) -> None:
        """Whoever has members declares it."""
        done(True)

    @property
    def keys(self) -> Iterable[str]:
        """What it is bound to."""
        return self._keys

    def waits(self, count: int) -> None:
        """So many messages are in the queue already."""

    def unreachable(self) -> None:
        """Its node is down; it is looked for again."""

    def deliver(self, consumer: Consumer, tag: int, redelivered: bool, content: Content) -> None:
        """A message for one of the members."""
        found = self._reader.read(content)
        if found is None:
            consumer.settle(tag)
            return
        chosen = self.group.choose()
        if chosen is None:
            chosen = next(iter(self.group.members), None)
        if not isinstance(chosen, ClientSession):
            consumer.give_back(tag)  # the last one has just gone
            return
        message, number = found
        chosen.owe(message, self.group.members[chosen], Delivery(consumer, tag, number, again=False))


def queue_of(prefix: str, topic_filter: str) -> str:
    """The name of the queue of a filter: the same at every replica."""
    group = topic_filter.split("/", 2)[1]
    digest = blake2b(topic_filter.encode(), digest_size=HASH_OCTETS).hexdigest()
    return f"{prefix}.{readable(group)}.{digest}"


def _nobody() -> None:
    """Nobody waits for it."""

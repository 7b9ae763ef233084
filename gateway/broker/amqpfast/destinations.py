"""Queues, topics and the subscriptions of topics.

A topic is a name and nothing more: each subscription has a queue of its own, which takes copies. Both kinds
of queue have priorities, and hand back what a client could not use to somebody else first.
"""

from __future__ import annotations

from typing import Final, Protocol, cast

from gateway.broker.amqpfast.selection import Selects
from gateway.broker.pressure import FullQueues
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import Consumer
from gateway.errors import RemoteProtocolError
from gateway.model.batch import SubBatch
from gateway.model.message import Message, Sender
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.amqpfast.spec import PRIORITY_MAX
from gateway.protocols.amqpfast.translate import PRIORITY_AT, PROTOCOL

PRIORITY: Final = "amqpfast priority"


def priority_of(message: Message) -> int:
    """The priority of a message of any protocol, 0 to 9."""
    property_set = message.property_set
    if property_set.protocol == PROTOCOL:
        return min(property_set.raw[PRIORITY_AT], PRIORITY_MAX)
    found: int | None = property_set.forms.get(PRIORITY)
    if found is None:
        try:
            found = min(max(property_set.properties.priority or 0, 0), PRIORITY_MAX)
        except RemoteProtocolError:
            found = 0  # its sender malformed it
        property_set.forms[PRIORITY] = found
    return found


class Taker(Consumer, Protocol):
    """A consumer of these queues."""

    @property
    def paused(self) -> bool:
        """HANDLE FLOW has stopped it: messages go to others."""

    @property
    def window(self) -> int:
        """How many messages it may hold at a time, stopped or not."""


class FastQueue(PriorityQueue):
    """A destination of the queue service. `owner` is the client of a temporary one, which alone consumes."""

    def __init__(
        self,
        name: str,
        *,
        durable: bool,
        messages_max: int,
        octets_max: int,
        owner: str | None = None,
        maker: str | None = None,
        full_queues: FullQueues | None = None,
    ) -> None:
        super().__init__(
            name,
            priority_of,
            durable=durable,
            messages_max=messages_max,
            octets_max=octets_max,
            full_queues=full_queues,
        )
        self.address = fast_address("queue", name)
        self.owner = owner
        self.maker = maker  # the user who has made it; None: the configuration, or a route
        self.channel: object | None = None  # a temporary destination ends with it

    @property
    def owning_user(self) -> str | None:
        """The user who made the destination; None: the configuration, or a route."""
        return self.maker

    def is_named_by(self, message: Message) -> bool:
        """Return True: a destination of the queue service is reached by its name alone."""
        return True

    def takes(self, consumer: Consumer) -> bool:
        """Whether the consumer may take a message sooner or later."""
        return not cast(Taker, consumer).paused


class Topic:
    """A destination of the topic service."""

    __slots__ = ("address", "channel", "maker", "name", "owner")

    def __init__(self, name: str, owner: str | None = None, maker: str | None = None) -> None:
        self.name = name
        self.address = fast_address("topic", name)
        self.owner = owner
        self.maker = maker
        self.channel: object | None = None


class Interest:
    """What a subscription is for: a topic, or all whose names begin with `name`, and a selector."""

    __slots__ = ("mime_type", "name", "no_local", "prefix", "selector", "selects")

    def __init__(
        self,
        name: str,
        *,
        prefix: bool,
        selector: bytes = b"",
        mime_type: str = "",
        selects: Selects | None = None,
        no_local: bool = False,
    ) -> None:
        self.name = name
        self.prefix = prefix
        self.selector = selector
        self.mime_type = mime_type
        self.selects = selects
        self.no_local = no_local

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interest) and self.said == other.said

    def __hash__(self) -> int:
        return hash(self.said)

    @property
    def said(self) -> tuple[object, ...]:
        """What tells it from others."""
        return (self.name, self.prefix, self.selector, self.mime_type.lower(), self.no_local)

    def covers(self, topic: str) -> bool:
        """Whether messages of this topic are meant."""
        return topic.startswith(self.name) if self.prefix else topic == self.name


class Subscription(PriorityQueue):
    """The messages of a topic that one consumer is owed. `key` is (client, identifier) of a durable one."""

    def __init__(
        self,
        interest: Interest,
        *,
        messages_max: int,
        octets_max: int,
        key: tuple[str, str] | None = None,
        maker: str | None = None,
        full_queues: FullQueues | None = None,
    ) -> None:
        super().__init__(
            interest.name,
            priority_of,
            durable=key is not None,
            messages_max=messages_max,
            octets_max=octets_max,
            full_queues=full_queues,
        )
        self.interest = interest
        self.key = key
        self.maker = maker
        self.attached = False  # a handle consumes it
        self.local: Sender | None = None  # whose messages are not taken

    @property
    def owning_user(self) -> str | None:
        """The user who subscribed."""
        return self.maker

    def publish(self, part: SubBatch) -> None:
        """Take what is wanted; the rest is accepted by being passed over."""
        local, selects = self.local, self.interest.selects
        if local is None and selects is None:
            super().publish(part)
            return
        wanted = [
            at
            for at, message in enumerate(part.messages)
            if message.sender is not local and (selects is None or selects(message))
        ]
        if len(wanted) == len(part.messages):
            super().publish(part)
            return
        chosen = SubBatch(part.batch, part.recipient)
        chosen.messages = [part.messages[at] for at in wanted]
        chosen.slots = [part.slots[at] for at in wanted]
        passed = set(range(len(part.messages))).difference(wanted)
        part.settle_at(sorted(passed))
        if wanted:
            super().publish(chosen)

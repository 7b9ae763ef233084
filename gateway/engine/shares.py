"""Shared subscriptions over all replicas: one queue for each filter, consumed by every replica with members.

The broker divides messages among the replicas, and each replica divides its own among its members (subscribed
clients). A message is acknowledged when the member has acknowledged it. When a member's client is lost its
messages are requeued, and any other member gets them, at this replica or another. The queue remains for
sessions whose clients are disconnected. When the subscription has ended everywhere, the last replica that had
it deletes the queue; a queue that no replica could delete expires on the broker after a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final, Protocol

from gateway.broker.mqtt.shared_subscriptions import SharedGroup, shared_pattern
from gateway.broker.topics import topic_matches
from gateway.engine.client_session import ClientSession, ClusterOrigin
from gateway.engine.consumers import ClusterConsumer, Content, Done
from gateway.engine.envelope import Number
from gateway.engine.names import binding_of, readable
from gateway.model.message import Message
from gateway.model.properties import Headers

EXPIRES_SECS: Final = 86_400.0
TOUCH_SECS: Final = EXPIRES_SECS / 8  # between renewals of queues that only absent clients need
GRACE_SECS: Final = 2.0  # until a queue that seems to have no members is deleted
# How old a list of the shared filters that sessions have may be for queues to be deleted by it. Later, a
# client may have subscribed elsewhere and disconnected: only the queue has its messages.
LIST_AGE_SECS_MAX: Final = 5.0
HASH_BYTES: Final = 8


class DeliveryDecoder(Protocol):
    """Interface of the decoder of deliveries that a shared queue uses."""

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """Decode a delivered message. Return it with its number, or None if it cannot be delivered.

        The number, by which replicas recognize a repeated message, is None below QoS 2.
        """


class SharedQueue:
    """State of the queue of one shared filter, which this replica consumes for its members."""

    def __init__(
        self, reader: DeliveryDecoder, group: SharedGroup, queue: str, arguments: Headers, prefetch: int
    ) -> None:
        """Create the state of the queue named `queue`; `reader` decodes its messages.

        `group` has the members at this replica. `arguments` are those of the queue's declaration, `prefetch`
        is that of its consumer.
        """
        self.group = group
        self.queue = queue
        self.arguments = arguments
        self.prefetch = prefetch
        self.fresh = False
        self._pattern = shared_pattern(group.filter) or []
        key = binding_of(self._pattern)
        self._keys = () if key is None else (key,)
        self.unbound: dict[str, tuple[bool, Done]] = dict.fromkeys(self._keys, (True, _do_nothing))
        self._reader = reader

    @property
    def needs_queue(self) -> bool:
        """True: a missing queue is declared, as it is consumed only while the filter has local members."""
        return True

    @property
    def is_awaited(self) -> bool:
        """True: replies to clients wait until the queue is consumed.

        So a new member gets all messages that are published after its SUBACK, even if the queue was deleted.
        """
        return True

    @property
    def keeps_order(self) -> bool:
        """False: the members at all replicas divide the messages among themselves."""
        return False

    def confirm(self, done: Callable[[bool], None]) -> None:
        """Call `done` with True: any replica with members may declare the missing queue."""
        done(True)

    @property
    def keys(self) -> Iterable[str]:
        """Binding keys of the queue: the key of its topic filter, or none if no binding fits the filter."""
        return self._keys

    def set_backlog(self, count: int) -> None:
        """Do nothing: `count`, the number of messages in the queue, is not needed."""

    def unreachable(self) -> None:
        """Do nothing: the timer of the namespace tries again to consume the queue."""

    def refuse(self, why: str) -> None:
        """Disconnect the members, which would get no messages."""
        for session in list(self.group.members):
            if isinstance(session, ClientSession):
                session.refuse(why)

    def deliver(self, consumer: ClusterConsumer, tag: int, redelivered: bool, content: Content) -> None:
        """Queue a message for one of the members, or requeue it on the cluster if there is none.

        `tag` is the delivery tag at `consumer`, `redelivered` the flag of the delivery. A message that the
        filter does not match is acknowledged without delivery.
        """
        found = self._reader.read(content)
        if found is None or not topic_matches(self._pattern, found[0].address.name.split("/")):
            consumer.settle(tag)  # its key also matches topics that begin with `$`, or a shortened one more
            return
        chosen = self.group.choose()
        if chosen is None:
            chosen = next(iter(self.group.members), None)
        if not isinstance(chosen, ClientSession):
            consumer.requeue(tag)  # the last member has just left
            return
        message, number = found
        chosen.queue_message(
            message, self.group.members[chosen], ClusterOrigin(consumer, tag, number, is_resend=False)
        )


def queue_of(prefix: str, topic_filter: str) -> str:
    """Return the name of a shared filter's queue, which is the same at every replica.

    The name begins with `prefix`.
    """
    group = topic_filter.split("/", 2)[1]
    digest = blake2b(topic_filter.encode(), digest_size=HASH_BYTES).hexdigest()
    return f"{prefix}.{readable(group)}.{digest}"


def _do_nothing() -> None:
    """Do nothing: used as callback by bindings that need none."""

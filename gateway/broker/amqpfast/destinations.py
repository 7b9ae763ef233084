"""Queues, topics and subscriptions of AMQP/Fast.

A topic is only a name: each subscription to it has a queue of its own that receives copies. Queues and
subscriptions order messages by priority. A message that one client returned is offered to other consumers
first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol, cast

from gateway import clock
from gateway.broker.pressure import FULL, FullQueues
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import Consumer
from gateway.broker.scheduler import CallScheduler, ScheduledCall
from gateway.broker.selection_work import UNBOUNDED, SelectionWork, Selects
from gateway.errors import RemoteProtocolError
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message, Sender
from gateway.model.shares import ROUTES
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.amqpfast.spec import PRIORITY_MAX
from gateway.protocols.amqpfast.translate import PRIORITY_AT, PROTOCOL

PRIORITY: Final = "amqpfast priority"
EXPIRED_MAX: Final = 1_000  # messages that one turn removes
FULL_SECS: Final = 1.0  # between two searches for expired messages while publishers wait
PUT_OFF_MAX: Final = 1_000  # largest number of messages that wait for a subscription's selector


def priority_of(message: Message) -> int:
    """Return the priority of a message of any protocol, from 0 to 9; 0 if it has none."""
    property_set = message.property_set
    if property_set.protocol == PROTOCOL:
        return min(property_set.raw[PRIORITY_AT], PRIORITY_MAX)
    found: int | None = property_set.forms.get(PRIORITY)
    if found is None:
        try:
            found = min(max(property_set.properties.priority or 0, 0), PRIORITY_MAX)
        except RemoteProtocolError:
            found = 0  # the sender encoded the property wrongly
        property_set.forms[PRIORITY] = found
    return found


class DestinationConsumer(Consumer, Protocol):
    """Consumer of an AMQP/Fast queue or subscription."""

    @property
    def paused(self) -> bool:
        """True while HANDLE FLOW has stopped the consumer; other consumers get the messages."""

    @property
    def window(self) -> int:
        """Largest number of unacknowledged messages of the consumer, whether it is stopped or not."""


class DestinationQueue(PriorityQueue):
    """Queue that removes expired messages while it is full, so that no publisher waits for a consumer."""

    def __init__(
        self,
        name: str,
        *,
        durable: bool,
        messages_max: int,
        bytes_max: int,
        full_queues: FullQueues | None,
        work: SelectionWork,
        alarms: CallScheduler | None,
    ) -> None:
        super().__init__(
            name,
            priority_of,
            durable=durable,
            messages_max=messages_max,
            bytes_max=bytes_max,
            full_queues=full_queues,
            work=work,
        )
        self._alarms = CallScheduler() if alarms is None else alarms
        self._alarm: ScheduledCall | None = None  # while publishers wait

    def publish(self, sub_batch: SubBatch) -> None:
        """Queue the messages of a sub-batch; a full queue removes expired messages first."""
        if self.full:
            self.drop_expired(EXPIRED_MAX)
        super().publish(sub_batch)
        self._watch_expiry(clock.utc() + FULL_SECS)

    def _watch_expiry(self, utc: float) -> None:
        if self._pressure and self._alarm is None and not self.deleted:
            self._alarm = self._alarms.set(utc, self._remove_expired)

    def _remove_expired(self) -> None:
        """Remove expired messages while publishers wait. If many have expired, other tasks run between."""
        self._alarm = None
        if not self._pressure or self.gate.shut:
            self._watch_expiry(clock.utc() + FULL_SECS)
            return
        expires = self.drop_expired(EXPIRED_MAX)
        self.dispatch()  # also reads more from the disk
        utc = clock.utc()
        self._watch_expiry(utc if NEVER < expires <= utc else utc + FULL_SECS)


class FastQueue(DestinationQueue):
    """Destination of the queue service.

    `owner` is the client that created a temporary queue, which alone may consume it; None for other queues.
    """

    def __init__(
        self,
        name: str,
        *,
        durable: bool,
        messages_max: int,
        bytes_max: int,
        owner: str | None = None,
        maker: str | None = None,
        full_queues: FullQueues | None = None,
        work: SelectionWork = UNBOUNDED,
        alarms: CallScheduler | None = None,
    ) -> None:
        super().__init__(
            name,
            durable=durable,
            messages_max=messages_max,
            bytes_max=bytes_max,
            full_queues=full_queues,
            work=work,
            alarms=alarms,
        )
        self.address = fast_address("queue", name)
        self.owner = owner
        self.maker = maker  # the user who has made it, or ROUTES; None: the configuration
        self.channel: object | None = None  # a temporary destination ends with it

    @property
    def owning_user(self) -> str | None:
        """Name of the user who created the queue; None for the configuration or a route."""
        return None if self.maker == ROUTES else self.maker

    def is_named_by(self, message: Message) -> bool:
        """Return True: a destination of the queue service is addressed by its name alone."""
        return True

    def may_deliver_to(self, consumer: Consumer) -> bool:
        """Return True unless HANDLE FLOW has stopped the consumer."""
        return not cast(DestinationConsumer, consumer).paused


class Topic:
    """Destination of the topic service."""

    __slots__ = ("address", "channel", "maker", "name", "owner")

    def __init__(self, name: str, owner: str | None = None, maker: str | None = None) -> None:
        self.name = name
        self.address = fast_address("topic", name)
        self.owner = owner
        self.maker = maker
        self.channel: object | None = None


class Interest:
    """Topics and conditions of a subscription.

    `name` is the topic, or, if `prefix` is True, the text with which all its topics begin. `selects` is the
    compiled `selector`, which restricts the messages further.
    """

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
        return isinstance(other, Interest) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> tuple[object, ...]:
        """Values that are the same for two equal interests."""
        return (self.name, self.prefix, self.selector, self.mime_type.lower(), self.no_local)

    def is_of(self, name: str, *, prefix: bool) -> bool:
        """Return True if the interest has exactly this name and this value of `prefix`.

        Its selector is ignored.
        """
        return self.name == name and self.prefix == prefix

    def covers(self, topic: str) -> bool:
        """Return True if the interest includes messages of this topic."""
        return topic.startswith(self.name) if self.prefix else topic == self.name


class TopicSubscription(DestinationQueue):
    """Queue of the messages that one subscriber of a topic must still get.

    `key` is (client, identifier) of a durable subscription, None for any other.
    """

    def __init__(
        self,
        interest: Interest,
        *,
        messages_max: int,
        bytes_max: int,
        key: tuple[str, str] | None = None,
        maker: str | None = None,
        full_queues: FullQueues | None = None,
        work: SelectionWork = UNBOUNDED,
        alarms: CallScheduler | None = None,
    ) -> None:
        super().__init__(
            interest.name,
            durable=key is not None,
            messages_max=messages_max,
            bytes_max=bytes_max,
            full_queues=full_queues,
            work=work,
            alarms=alarms,
        )
        self.interest = interest
        self.key = key
        self.maker = maker
        self.attached = False  # True while a handle consumes the subscription
        self.local: Sender | None = None  # the sender whose messages are skipped (no-local)
        self._put_off: deque[SubBatch] = deque()  # parts that the selector has not been evaluated for
        self._put_off_count = 0  # number of messages in _put_off

    @property
    def owning_user(self) -> str | None:
        """Name of the user who subscribed."""
        return self.maker

    @property
    def full(self) -> bool:
        """True if publishers should pause: too many messages are queued, or wait for the selector."""
        return self._put_off_count >= PUT_OFF_MAX or super().full

    def publish(self, sub_batch: SubBatch) -> None:
        """Queue the messages that the selector and no-local select; accept and drop the others.

        The selector has limited time in each pass of the event loop. Messages for which it was not evaluated
        wait until the next pass, and so do all later messages.
        """
        if self.local is None and self.interest.selects is None:
            super().publish(sub_batch)
            return
        rest = sub_batch if self._put_off else self._select(sub_batch)
        if rest is None:
            return
        if self._put_off_count >= PUT_OFF_MAX:
            if not self.may_hold:
                self._overflow(rest)
                return
            if self._put_off_count >= 2 * PUT_OFF_MAX:
                self._full_queues.refused += len(rest.messages)
                rest.settle(FULL)
                return
            self._pressure.hold_sources(rest)
        self._put_off.append(rest)
        self._put_off_count += len(rest.messages)
        self._work.postponed_count += 1
        self._work.postpone(self._select_more)

    def _select(self, sub_batch: SubBatch) -> SubBatch | None:
        """Queue the messages of a sub-batch that the selector selects, and accept and drop the others.

        If the selector's time ends before, return a sub-batch of the remaining messages, otherwise None.
        """
        local, selects, work = self.local, self.interest.selects, self._work
        positions: list[int] = []
        passed: list[int] = []
        seen_count = 0
        for at, message in enumerate(sub_batch.messages):
            if selects is not None and work.is_exhausted:
                break
            seen_count = at + 1
            if (local is None or message.sender.connection != local) and (
                selects is None or work.selects(selects, message)
            ):
                positions.append(at)
            else:
                passed.append(at)
        if len(positions) == len(sub_batch.messages):
            super().publish(sub_batch)
            return None
        rest = (
            None
            if seen_count == len(sub_batch.messages)
            else _select_messages(sub_batch, range(seen_count, len(sub_batch.messages)))
        )
        sub_batch.settle_at(passed)
        if positions:
            super().publish(_select_messages(sub_batch, positions))
        return rest

    def _select_more(self) -> None:
        """Evaluate the selector for waiting messages while time is left in this pass."""
        while self._put_off:
            sub_batch = self._put_off.popleft()
            self._put_off_count -= len(sub_batch.messages)
            rest = self._select(sub_batch)
            if rest is not None:
                self._put_off.appendleft(rest)
                self._put_off_count += len(rest.messages)
                self._work.postpone(self._select_more)
                break
        self._resume_if_drained()

    def has_drained(self, leaving: int = 0) -> bool:
        """Return True if at most half of the limits is used, so that paused publishers may resume.

        `leaving` is the number of messages that still count as queued but are being removed.
        """
        return self._put_off_count <= PUT_OFF_MAX // 2 and super().has_drained(leaving)

    def delete(self) -> int:
        """Delete the subscription with its messages, also those that wait for the selector.

        Return the number of messages that were ready.
        """
        parts, self._put_off = self._put_off, deque()
        self._put_off_count = 0
        for sub_batch in parts:
            sub_batch.accept()
        return super().delete()


def _select_messages(sub_batch: SubBatch, places: Iterable[int]) -> SubBatch:
    """Return the messages of a sub-batch at the indexes `places`, as their own sub-batch.

    It is settled by itself.
    """
    chosen = SubBatch(sub_batch.batch, sub_batch.recipient)
    chosen.messages = [sub_batch.messages[at] for at in places]
    chosen.slots = [sub_batch.slots[at] for at in places]
    return chosen

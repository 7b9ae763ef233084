"""Messages that an exchange of type `x-delayed-message` holds until their delay is over.

An exchange of that type has one `DelayedMessages`, a queue without consumers. A message with a delay waits in
it with the time at which it is due in place of its expiry, so the clock, the order and the store of queues
apply to it. A due message leaves like an expired one: it is routed by the exchange, with a negative
`x-delay`, in the transaction that deletes it here. If that fails, the message waits here until the disk works
again. Messages are in memory, the durable ones on disk, too.

A sender chooses the delay, and may have a right to publish alone. Each user who sends has therefore a part of
the exchange's limits, in number and bytes, and its messages count against the user's part of the memory
limit. To a user beyond one of these parts the exchange is full. A paused publisher resumes when few of its
user's own messages are left, because those of others may wait for years.

The lifetime of a message starts at the end of its delay if its `expiration` is that of AMQP, as in RabbitMQ.
An expiry of another protocol runs while the message waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from math import isfinite
from typing import Any, Final, NamedTuple, Protocol

from gateway import clock
from gateway.broker.amqp091.arguments import EXPIRY_MS_MAX, INTEGERS, QueueArguments
from gateway.broker.amqp091.dead_letter_routing import (
    COPIES,
    COPIES_MAX,
    EXPIRED_MAX,
    RETRY_SECS,
    DeadLettering,
    DeadLetteringQueue,
    blind_copies,
    copied_keys,
    with_expiry,
)
from gateway.broker.pressure import FULL, FullQueues, Pressure, PressureByUser, reduced_limit
from gateway.broker.priorities import PriorityQueue
from gateway.broker.scheduler import CallScheduler, ScheduledCall
from gateway.errors import ProtocolError
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message, weight_of
from gateway.model.properties import RANGES, Headers, Value, ValueType
from gateway.model.shares import NO_LIMIT
from gateway.protocols.amqp091.codec import decode_properties, encode_basic_properties
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqp091.translate import (
    BLIND,
    PROTOCOL,
    content_properties,
    encode_properties,
    essentials,
)

DELAY: Final = "x-delay"
Route = Callable[[Sequence[str], Message], Sequence[DeadLetteringQueue]]


class DelayHost(Protocol):
    """Interface of the virtual host that its queues of delayed messages use."""

    queue_messages_max: int
    queue_bytes_max: int
    dead_lettering: DeadLettering
    alarms: CallScheduler
    full_queues: FullQueues

    @property
    def disk_fails(self) -> bool:
        """True if durable queues refuse persistent messages, because the disk fails."""


def delay_of(headers: Headers) -> int:
    """Return the delay in milliseconds that the header `x-delay` requests; 0 if there is no valid delay.

    Integers, decimal texts and numbers with a fraction (which is cut off) are valid. A negative delay, which
    marks a delay that is over, and a delay beyond ten years count as 0.
    """
    delay = next((value for name, value in headers if name == DELAY), None)
    milliseconds = 0 if delay is None else _milliseconds(delay)
    return milliseconds if 0 < milliseconds <= EXPIRY_MS_MAX else 0


def _milliseconds(delay: Value) -> int:
    content: Any = delay.value
    if delay.type in INTEGERS:
        return int(content)
    if delay.type is ValueType.STRING and isinstance(content, str):
        digits = content.removeprefix("-").removeprefix("+")
        return int(content) if digits.isascii() and digits.isdigit() and len(digits) < 20 else 0
    if isinstance(content, float) and isfinite(content):
        return int(content)
    return int(content) if isinstance(content, Decimal) else 0


class DelayedMessages(PriorityQueue):
    """Queue of the messages that one exchange delays, in the order in which they are due."""

    def __init__(self, name: str, host: DelayHost, route: Route, *, durable: bool, user: str | None) -> None:
        """Create the queue of delayed messages of the exchange `name`, which `user` has declared.

        `route` returns the queues to which the exchange routes a message, given its routing keys and the
        message.
        """
        super().__init__(
            name,
            _due_first,
            durable=durable,
            messages_max=host.queue_messages_max,
            bytes_max=host.queue_bytes_max,
            full_queues=host.full_queues,
        )
        self.user = user
        self.options = QueueArguments()
        self._dead_lettering = host.dead_lettering
        self._alarms = host.alarms
        self._host = host
        self._route = route
        self._alarm: ScheduledCall | None = None
        self._shares = host.full_queues.user_shares()
        self._shares.set_limits(self.messages_max, self.bytes_max)
        self._restrained: dict[str, int] = {}  # bytes at which the exchange is full to these users
        self._sort()

    def _new_pressure(self) -> Pressure:
        self._user_pressure = PressureByUser()
        return self._user_pressure

    @property
    def is_delay(self) -> bool:
        """True, because messages wait in this queue only until they are due."""
        return True

    @property
    def owning_user(self) -> str | None:
        """User who declared the exchange; None for the configuration."""
        return self.user

    def is_named_by(self, message: Message) -> bool:
        """Return True if the message was published to this exchange, not routed to it by a binding."""
        address = message.address
        return address.scope == self.name and address.protocol == AMQP091.name

    def claims(self) -> Iterator[tuple[DelayedMessagesClaim, int, str]]:
        """Yield (claim, bytes, user) for each user who sent messages that are delayed now.

        A claim represents the memory of these messages. Its method `restrain` makes the exchange count as
        full for the user (memory_shares.py).
        """
        for user, byte_count in self._shares.bytes_by_user().items():
            yield DelayedMessagesClaim(self, user), byte_count, user

    def restrain_sender(self, user: str, on: bool) -> None:
        """Treat the exchange as full for a user whose messages occupy too much memory (`on`), or end that.

        A repeated call has no effect.
        """
        if on and user not in self._restrained:
            self._restrained[user] = reduced_limit(self.bytes_max, self._shares.of(user))
        elif not on and self._restrained.pop(user, 0):
            self._pressure.resume_sources()

    # Publishing.

    def publish(self, sub_batch: SubBatch) -> None:
        """Queue the messages of a sub-batch until their delays are over, and settle the sub-batch."""
        if self.deleted:  # after a transaction had routed the messages
            self._dead_lettering.dropped["delayed_deleted"] += len(sub_batch.messages)
            sub_batch.accept()
            return
        utc = clock.utc()
        for at, message in enumerate(sub_batch.messages):
            if message.expires and (
                message.property_set.protocol != PROTOCOL
                or essentials(message.property_set).expiration_ms is None
            ):
                sub_batch.messages[at] = _with_rest(message, utc)
        sub_batch = self._refuse_excess(sub_batch)
        if sub_batch.messages:
            super().publish(sub_batch)
        if self._user_pressure:  # a failing disk may have taken nothing
            for user in {message.sender.user for message in sub_batch.messages}:
                self._resume_user(user)

    def _refuse_excess(self, sub_batch: SubBatch) -> SubBatch:
        """Refuse messages of users who exceed their limits of delayed messages. Return the other messages.

        If the exchange may pause publishers, the connections of a user are paused at the limit, and messages
        are refused only at twice the limit.
        """
        shares = self._shares
        count = shares.count + len(sub_batch.messages)
        byte_count = shares.total + weight_of(sub_batch.messages)
        fits = count <= shares.user_count_max and byte_count <= shares.user_bytes_max
        if fits and not self._restrained:
            return sub_batch
        may_hold = self.may_hold
        refused: list[int] = []
        held_positions: list[int] = []
        accepted: dict[str, tuple[int, int]] = {}
        for at, message in enumerate(sub_batch.messages):
            user = message.sender.user
            mine, mine_bytes = accepted.get(user, (0, 0))
            mine, mine_bytes = mine + 1, mine_bytes + message.byte_count
            excess = self._excess(user, mine, mine_bytes)
            if excess > (2 if may_hold else 1):
                refused.append(at)
                continue
            accepted[user] = mine, mine_bytes
            if excess > 1:
                held_positions.append(at)
        if held_positions and not self.full:
            self._pressure.hold_sources(sub_batch.select(held_positions))
        if not refused:
            return sub_batch
        without = set(refused)
        if may_hold:
            self._full_queues.refused += len(refused)
            sub_batch.settle_at(refused, FULL)
        else:
            self._overflow(sub_batch.select(refused))
        return sub_batch.select([at for at in range(len(sub_batch.messages)) if at not in without])

    def _excess(self, user: str, count: int, byte_count: int) -> float:
        """Return how many times a user's limit is used, if `count` messages of `byte_count` bytes are added.

        The limits are those of delayed messages. Above 1 the limit is exceeded; 2 is twice the limit. A
        result up to 1 only says that the messages fit, and is not exact.
        """
        shares = self._shares
        all_bytes = shares.of(user) + byte_count
        excess = all_bytes / self._restrained.get(user, NO_LIMIT)
        if shares.exceeded_user_limit(user, byte_count, count):
            by_count = (shares.count_of(user) + count) / shares.user_count_max
            excess = max(excess, by_count, all_bytes / shares.user_bytes_max)
        return excess

    def prepare_messages(self, messages: list[Message]) -> list[Message]:
        """Return copies of the messages, with the end of their delay as their time of expiry."""
        utc = clock.utc()
        return [with_expiry(one, utc + delay_of(one.properties.headers) / 1000) for one in messages]

    def _wait(self, position: int, message: Message, *, redelivered: bool) -> None:
        self._shares.add(message.sender.user, message.byte_count)
        super()._wait(position, message, redelivered=redelivered)

    def remove_refused(self, first: int, count: int) -> list[Message]:
        """Remove and return messages that the store has refused.

        The range of positions is `first` to before `first + count`.
        """
        withdrawn = super().remove_refused(first, count)
        self._shares.remove_messages(withdrawn)
        for user in {message.sender.user for message in withdrawn}:
            self._resume_user(user)
        return withdrawn

    # Delivery and settlement.

    def dispatch(self) -> None:
        """Route the messages that are due, and set the alarm for the next one."""
        if self.gate.shut:
            self.gate.wait(self.dispatch)
            return
        while self.storage is not None and self.storage.refill():
            pass
        if self._host.disk_fails:  # queues would refuse due messages, which stay here until then
            due_at = clock.utc() + RETRY_SECS if self._heap else NEVER
        else:
            due_at = self.drop_expired(max(EXPIRED_MAX - self._dead_lettering.count_of(self), 0))
        if due_at:
            self._set_alarm(due_at)
        if self._dead_lettering.waiting_deaths:
            self._dead_lettering.send_dead_messages()

    def _set_alarm(self, utc: float) -> None:
        """Set the alarm for the next dispatch to `utc` (POSIX seconds), unless it is set earlier."""
        if not self.deleted and (self._alarm is None or utc < self._alarm.utc):
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._alarms.set(utc, self._alarmed)

    def _alarmed(self) -> None:
        self._alarm = None
        self.dispatch()

    def _expire(self, position: int, message: Message) -> None:
        user = message.sender.user
        self._shares.remove(user, message.byte_count)
        self._dead_lettering.add_delayed(self, message, position)
        self._resume_user(user)

    def _resume_user(self, user: str) -> None:
        """Resume the paused connections of a user whose messages use at most half of the user's limits.

        While the exchange is full for all users, they are resumed only if none of the user's messages is
        left.
        """
        if not self._user_pressure.is_paused(user):
            return
        shares = self._shares
        count, byte_count = shares.count_of(user), shares.of(user)
        bytes_max = min(shares.user_bytes_max, self._restrained.get(user, NO_LIMIT))
        is_low = count <= shares.user_count_max // 2 and byte_count <= bytes_max // 2
        if not count or (is_low and not self.full):
            self._user_pressure.resume_user(user)

    def release(self, message: Message, utc: float) -> tuple[Sequence[DeadLetteringQueue], Message]:
        """Return the queues for a message whose delay is over, and a copy of the message for these queues.

        The copy has a negative `x-delay`, and its expiration begins now. `utc` is the present time in POSIX
        seconds.
        """
        expiration_ms = essentials(message.property_set).expiration_ms
        own = message if expiration_ms is not None else with_expiry(message, NEVER)
        native = decode_properties(encode_properties(own, utc))
        headers = _negated(native.headers or ())
        blind = blind_copies(message)
        keys = [message.address.name, *copied_keys(headers, COPIES), *copied_keys(blind, BLIND)]
        native.headers = (*blind, *headers)
        properties = content_properties(encode_basic_properties(native))
        limit = essentials(properties).expiration_ms
        released = Message(
            message.address,
            message.body,
            properties,
            message.assurance,
            message.durable,
            message.retain,
            NEVER if limit is None else utc + limit / 1000,
            message.hops,
            message.sender,
        )
        return self._route(keys[: COPIES_MAX + 1], released), released

    def settle_dead(self, positions: list[int]) -> None:
        """Delete routed messages from disk, because the queues that got them have stored them."""
        if self.storage is not None and not self.deleted:
            self.storage.forget(positions)

    def settle_beside(self, positions: list[int]) -> None:
        """Delete messages in the transaction that stores them in other queues in this pass of the event loop.

        They stay on disk if that transaction fails.
        """
        if self.storage is not None and not self.deleted:
            self.storage.forget_beside(positions)

    def requeue_refused(self, position: int, message: Message) -> bool:
        """Requeue a message that is due but that the failing disk refused; it is routed again later.

        Return False if the exchange is deleted. Queues that had accepted the message get it a second time.
        """
        if self.deleted:
            return False
        self.add_to_size((message,))
        self._wait(position, message, redelivered=False)
        self._set_alarm(clock.utc() + RETRY_SECS)
        return True

    def purge(self) -> int:
        """Drop all messages. Return their number."""
        self._shares.replace({})
        return super().purge()

    def delete(self) -> int:
        """Drop and count all messages of a deleted exchange. Return their number."""
        count = super().delete()
        self._dead_lettering.dropped["delayed_deleted"] += count
        if self._alarm is not None:
            self._alarm.cancel()
        return count


class DelayedMessagesClaim(NamedTuple):
    """Memory of one user's messages that an exchange delays; `restrain` limits it (memory_shares.py)."""

    delayed: DelayedMessages
    user: str

    def restrain(self, on: bool) -> None:
        """Treat the exchange as full for the user (`on`), or end that."""
        self.delayed.restrain_sender(self.user, on)


def _due_first(message: Message) -> int:
    return -int(message.expires * 1000)


def _with_rest(message: Message, utc: float) -> Message:
    """Return a copy of the message whose AMQP expiration is the lifetime left at the end of its delay.

    `utc` is the present time in POSIX seconds.
    """
    due_at = utc + delay_of(message.properties.headers) / 1000
    remaining_secs = max(message.expires - due_at, 0.0)
    try:
        data = encode_properties(with_expiry(message, utc + remaining_secs), utc)
    except ProtocolError:  # raised again when it is due, and then the message's outcome
        return message
    return Message(
        message.address,
        message.body,
        content_properties(data),
        message.assurance,
        message.durable,
        message.retain,
        message.expires,
        message.hops,
        message.sender,
    )


def _negated(headers: Iterable[tuple[str, Value]]) -> Headers:
    """Return the headers with a negative `x-delay`, which marks the delay as over."""
    found: list[tuple[str, Value]] = []
    for name, value in headers:
        if name == DELAY:
            over = -_milliseconds(value)
            kind = ValueType.INT32 if over >= RANGES[ValueType.INT32][0] else ValueType.INT64
            found.append((name, Value(kind, over)))
        else:
            found.append((name, value))
    return tuple(found)

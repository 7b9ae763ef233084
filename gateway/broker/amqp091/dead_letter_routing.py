"""Dead-lettering: routing of messages that leave a queue without being consumed.

A message that expires, is rejected or exceeds the queue's length is noted as dead, and processed when the
queue has finished its work: its dead letter is routed by the queue's dead letter exchange and put into the
queues there. The store adds the dead letter and settles the dead message in one commit; if the disk refuses,
the dead message is retried when the disk works.

The users who own queues take turns in this work. Dead messages that wait for it are not settled, and count in
number, in bytes and in memory for the owner of their queue. While very many wait, the owner's queues deliver
nothing, because consumers could reject it, too. `x-death` lists where a message has died before. A dead
letter does not return to a queue in which it has died, unless a consumer has rejected it since; otherwise it
would circulate forever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from gateway import clock
from gateway.broker.amqp091.arguments import QueueArguments
from gateway.broker.poison import outcome_of_error
from gateway.broker.pressure import FullQueues, reduced_limit
from gateway.broker.scheduler import CallScheduler, ScheduledCall
from gateway.containment import contained
from gateway.errors import LocalProtocolError, ProtocolError
from gateway.model.address import Address
from gateway.model.batch import Batch, Recipient, Sink
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.shares import NO_LIMIT, OPERATOR, UserShares
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.codec import BasicProperties, decode_properties, encode_basic_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.table import encode_table
from gateway.protocols.amqp091.translate import (
    BLIND,
    PERSISTENT,
    PROTOCOL,
    content_properties,
    encode_properties,
    essentials,
)

EXPIRED: Final = "expired"
REJECTED: Final = "rejected"
TOO_MANY: Final = "maxlen"
DELAYED: Final = "delayed"  # not a death: the delay of a message is over
DELIVERY_LIMIT: Final = "delivery_limit"
HISTORY: Final = "x-death"
COUNT: Final = "x-delivery-count"
COPIES_MAX: Final = 100  # keys besides the first, each of which is routed by itself
COPIES: Final = "CC"
DEATHS_MAX: Final = 64  # in one history, which each dead letter copies
EXPIRED_MAX: Final = 1_000  # messages that expire, or are due, in one turn
BURIED_MAX: Final = 500  # dead letters and their targets in one turn: about 20 ms
BURIED_OF_USER: Final = 100  # of these, of one user before the next one
# Dead messages of a virtual host that wait; each user may have a part of them. Beyond that the user's queues
# deliver nothing, and messages beyond a length limit get no dead letter: dead letters could multiply faster
# than they are processed.
NOTED_MAX: Final = 100_000
RETRY_SECS: Final = 1.0  # between two checks whether a failing disk accepts messages again
COUNT_MAX: Final = (1 << 63) - 1  # deaths; a client may claim any number
TOO_OFTEN: Final = Outcome(
    Verdict.REJECTED, Reason.HOPS, "the message was dead-lettered by too many queues in succession"
)
NOBODY: Final = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "no queue matches the dead letter")
NOBODY_NOW: Final = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "no queue matches the delayed message")
Lost = Callable[[list[Message], Outcome], None]


class DeadLetteringQueue(Sink, Protocol):
    """Queue whose expired, rejected and surplus messages become dead letters.

    Dead letters of other queues may be routed to it.
    """

    name: str
    options: QueueArguments
    deleted: bool

    @property
    def owning_user(self) -> str | None:
        """User who declared the queue or exchange; None for the configuration."""

    @property
    def is_delay(self) -> bool:
        """True if the queue holds messages that an exchange delays, and not messages for consumers.

        Its messages do not become dead letters. A dead letter may therefore be routed to this queue in any
        case.
        """

    def settle_beside(self, positions: list[int]) -> None:
        """Delete dead messages in the transaction that stores their dead letters in this event-loop pass.

        They stay on disk if that transaction fails.
        """

    def settle_dead(self, positions: list[int]) -> None:
        """Delete dead messages from disk, because their dead letters are stored or no queue gets them."""

    def dispatch(self) -> None:
        """Deliver ready messages to consumers."""


class Delay(DeadLetteringQueue, Protocol):
    """Queue of the messages that an exchange delays."""

    def release(self, message: Message, utc: float) -> tuple[Sequence[DeadLetteringQueue], Message]:
        """Return the queues to which the exchange routes a message whose delay is over, and the message.

        `utc` is the present time in POSIX seconds.
        """

    def requeue_refused(self, position: int, message: Message) -> bool:
        """Requeue a message that is due but that the failing disk refused.

        Return False if the exchange is deleted.
        """


class DeadMessage:
    """Message that has left its queue and waits to be routed as a dead letter, or because it is due."""

    __slots__ = ("delay", "is_settled", "message", "position", "queue", "reason")

    def __init__(
        self,
        queue: DeadLetteringQueue,
        message: Message,
        reason: str,
        position: int | None,
        delay: Delay | None = None,
    ) -> None:
        """Record a message that has left `queue` for `reason`, a reason of `x-death`.

        `position` is where it was in the queue; None if it never was there. If the message did not die, but
        its delay is over, `delay` is the queue of delayed messages.
        """
        self.queue = queue
        self.message = message
        self.reason = reason
        self.position = position
        self.delay = delay
        self.is_settled = False  # every queue has accepted or refused it


class DeadLetterRouter(Protocol):
    """Interface of a virtual host that dead-lettering uses."""

    alarms: CallScheduler
    queue_bytes_max: int
    full_queues: FullQueues

    @property
    def disk_fails(self) -> bool:
        """True if durable queues refuse persistent messages, because the disk fails."""

    def route_keys(self, exchange: str, keys: list[str], message: Message) -> Sequence[DeadLetteringQueue]:
        """Return the queues to which an exchange routes a message with these routing keys."""


class WaitingDeaths:
    """Dead messages of all queues that wait to be routed, in one list for each user who owns queues.

    The users take turns. The waiting messages count against the limits in `shares`, for the owner of their
    queue.
    """

    def __init__(self, shares: UserShares) -> None:
        self.shares = shares
        self._lines: dict[str, deque[DeadMessage]] = {}  # by user; the first one has the turn
        self._spent = 0  # dead letters and targets in this user's turn
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, user: str) -> int:
        """Return how many dead messages of a user's queues wait to be routed."""
        return len(self._lines.get(user, ()))

    def add(self, death: DeadMessage, *, first: bool = False) -> None:
        """Append a dead message to the list of its queue's owner, or insert it at the beginning (`first`)."""
        user = user_of(death.queue)
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = deque()
        if first:
            line.appendleft(death)
        else:
            line.append(death)
        self._count += 1
        self.shares.add(user, death.message.byte_count)

    def take(self) -> DeadMessage:
        """Remove and return the oldest dead message of the user whose turn it is.

        There must be a waiting message.
        """
        user, line = next(iter(self._lines.items()))
        death = line.popleft()
        if not line:
            del self._lines[user]
        self._count -= 1
        self.shares.remove(user, death.message.byte_count)
        return death

    def spend(self, death: DeadMessage, count: int) -> None:
        """Count the work that the dead message `death` has caused, for the user whose turn it is.

        `count` is the number of its dead letters and of the queues that got them. When the work of the turn
        has reached BURIED_OF_USER, it is the next user's turn.
        """
        user = user_of(death.queue)
        line = self._lines.get(user)
        self._spent = 0 if line is None else self._spent + count
        if line is not None and self._spent >= BURIED_OF_USER:
            self._spent = 0
            del self._lines[user]
            self._lines[user] = line


class DeadLettering:
    """Dead messages of one virtual host that wait to be routed, and the publisher of their dead letters."""

    def __init__(self, host: DeadLetterRouter, lost: Lost | None = None) -> None:
        """Create the dead-lettering of the virtual host `host`.

        `lost` is called with dead letters that a queue refused.
        """
        shares = host.full_queues.user_shares()
        shares.set_limits(NOTED_MAX, host.queue_bytes_max)
        self.waiting_deaths = WaitingDeaths(shares)
        self.dropped: Counter[str] = Counter()  # by reason: messages that were dropped
        self._host = host
        self._lost = lost
        self._burying = False
        self._next_turn: ScheduledCall | None = None
        self._postponed: deque[DeadMessage] = deque()  # until the disk works
        self._retry: ScheduledCall | None = None
        # Queues that deliver nothing until fewer deaths wait, by user.
        self._waiting: dict[str, dict[DeadLetteringQueue, None]] = {}
        self._restrained: dict[str, int] = {}  # bytes of deaths at which these users have too many

    @property
    def has_unsent(self) -> bool:
        """True if dead messages are left for the next pass of the event loop."""
        return self._next_turn is not None

    def add_dead_message(
        self, queue: DeadLetteringQueue, message: Message, reason: str, position: int | None = None
    ) -> bool:
        """Register a dead message of a queue, from which it has been removed.

        `position` is where it was; None if it never was in the queue. Return False if there will be no dead
        letter: the queue then settles the message itself.
        """
        if queue.options.dead_letter_exchange is None or queue.deleted:
            self.dropped[f"queue_{reason}"] += 1
            return False
        if (position is None or reason == TOO_MANY) and self._has_too_many(user_of(queue)):
            self.dropped["dead_letter_refused"] += 1
            return False
        self.waiting_deaths.add(DeadMessage(queue, message, reason, position))
        return True

    def has_too_many(self, queue: DeadLetteringQueue) -> bool:
        """Return True if the waiting dead messages have reached a limit.

        The limits are those of the owner of `queue` and of all users together.
        """
        return self._has_too_many(user_of(queue))

    def is_blocked(self, queue: DeadLetteringQueue) -> bool:
        """Return True if `queue` may deliver nothing, because too many dead messages wait to be routed.

        The queue is then dispatched again once fewer dead messages wait.
        """
        user = user_of(queue)
        if not self._has_too_many(user):
            return False
        self._waiting.setdefault(user, {})[queue] = None
        return True

    def count_of(self, queue: DeadLetteringQueue) -> int:
        """Return how many dead messages of all queues of this queue's owner wait to be routed.

        Messages that wait for the disk to work are not included.
        """
        return self.waiting_deaths.count_of(user_of(queue))

    def claims(self) -> Iterator[tuple[DeadMessagesClaim, int, str]]:
        """Yield (claim, bytes, user) for each user whose dead messages wait to be routed.

        A claim represents the memory of these messages. Its method `restrain` lowers their limit in bytes
        (memory_shares.py).
        """
        for user, byte_count in self.waiting_deaths.shares.bytes_by_user().items():
            yield DeadMessagesClaim(self, user), byte_count, "" if user == OPERATOR else user

    def restrain_user(self, user: str, on: bool) -> None:
        """Lower the limit in bytes of a user's waiting dead messages (`on`), or restore it.

        Called when the user occupies too much memory. A repeated call has no effect.
        """
        if on and user not in self._restrained:
            shares = self.waiting_deaths.shares
            self._restrained[user] = reduced_limit(shares.user_bytes_max, shares.of(user))
        elif not on and self._restrained.pop(user, 0):
            self._resume_queues()

    def _has_too_many(self, user: str) -> bool:
        shares = self.waiting_deaths.shares
        if self._restrained and shares.of(user) >= self._restrained.get(user, NO_LIMIT):
            return True
        return bool(shares.exceeded_limit(user, 1))

    def _has_few(self, user: str) -> bool:
        shares = self.waiting_deaths.shares
        bytes_max = min(shares.user_bytes_max, self._restrained.get(user, NO_LIMIT))
        return (
            shares.count <= shares.count_max // 2
            and shares.total <= shares.bytes_max // 2
            and shares.count_of(user) <= shares.user_count_max // 2
            and shares.of(user) <= bytes_max // 2
        )

    def _resume_queues(self) -> None:
        """Dispatch the blocked queues of users whose waiting dead messages use at most half of all limits."""
        for user in [one for one in self._waiting if self._has_few(one)]:
            for queue in self._waiting.pop(user, ()):
                queue.dispatch()

    def add_delayed(self, delay: Delay, message: Message, position: int) -> None:
        """Queue a message whose delay is over, to be routed when the dead letters are sent."""
        self.waiting_deaths.add(DeadMessage(delay, message, DELAYED, position, delay))

    def send_dead_messages(self) -> None:
        """Route the waiting dead messages, and messages that become dead meanwhile.

        If there are many, the rest is routed in later passes of the event loop.
        """
        if self._burying or self._next_turn is not None:
            return
        self._burying = True
        try:
            remaining = BURIED_MAX
            while self.waiting_deaths and remaining > 0:
                remaining -= self._send_batch(remaining)
        finally:
            self._burying = False
        if self.waiting_deaths:
            self._next_turn = self._host.alarms.set(clock.utc(), self._send_rest)
        if self._waiting:
            self._resume_queues()

    def _send_rest(self) -> None:
        self._next_turn = None
        self.send_dead_messages()

    def _postpone(self, death: DeadMessage) -> bool:
        """Schedule a dead message that the failing disk has refused to be routed when the disk works.

        A message whose delay is over is requeued instead. Return False if its exchange is deleted, so that
        the caller must drop it; otherwise True.
        """
        if death.delay is not None and death.position is not None:
            return death.delay.requeue_refused(death.position, death.message)
        death.is_settled = False
        self._postponed.append(death)
        self.waiting_deaths.shares.add(user_of(death.queue), death.message.byte_count)
        self._plan_retry()
        return True

    def _plan_retry(self) -> None:
        if self._retry is None:
            self._retry = self._host.alarms.set(clock.utc() + RETRY_SECS, self._try_again)

    def _try_again(self) -> None:
        """Route the dead messages that wait for the disk, the oldest first, if the disk works again."""
        self._retry = None
        if self._host.disk_fails:
            self._plan_retry()
            return
        while self._postponed:
            death = self._postponed.pop()
            self.waiting_deaths.shares.remove(user_of(death.queue), death.message.byte_count)
            self.waiting_deaths.add(death, first=True)
        self.send_dead_messages()

    def _send_batch(self, most: int) -> int:
        """Route up to about `most` registered messages in one batch, and settle them.

        Return the number of messages plus the number of queues that got them.
        """
        batch = Batch(self, clock.now())
        recipients: dict[DeadLetteringQueue, Recipient] = {}
        settled: dict[DeadLetteringQueue, list[int]] = {}
        sent: dict[int, DeadMessage] = {}  # by slot
        utc = clock.utc()
        count = 0
        while self.waiting_deaths and count < most:
            death = self.waiting_deaths.take()
            letter, targets = self._routed(death, utc)
            count += 1 + len(targets)
            self.waiting_deaths.spend(death, 1 + len(targets))
            if targets:
                for target in targets:
                    if target not in recipients:
                        recipients[target] = Recipient(target)
                placed = [(recipients[target], letter) for target in targets]
                sent[batch.add((death, letter), placed)] = death
            elif death.position is not None:
                settled.setdefault(death.queue, []).append(death.position)
        batch.send()
        for queue, positions in settled.items():
            queue.settle_dead(positions)
        for slot in batch.unaccepted_slots:  # the gateway's dead letter of a refused copy comes first
            sent.pop(slot, None)
        _settle_beside(sent.values())
        return count

    def _routed(self, death: DeadMessage, utc: float) -> tuple[Message, Sequence[DeadLetteringQueue]]:
        """Return the message to send for `death`, and the queues that get it.

        It is a dead letter, or a message whose delay is over. `utc` is the present time in POSIX seconds. If
        there are no queues, it is dropped here, or becomes a dead letter of the gateway.
        """
        queue, message, delay = death.queue, death.message, death.delay
        targets: Sequence[DeadLetteringQueue] | None
        try:
            if delay is None:
                targets, letter = self._build_dead_letter(queue, message, death.reason, utc)
            else:
                targets, letter = delay.release(message, utc)
        except Exception as error:
            # A due message does not expire as a dead letter.
            letter = message if delay is None else with_expiry(message, NEVER)
            self._drop_letter(letter, outcome_of_error(error, queue=queue.name))
            return letter, ()
        if targets is None:
            self._drop_letter(letter, TOO_OFTEN)
        elif not targets and delay is not None:
            self._drop_letter(letter, NOBODY_NOW, "delayed_unrouted")
        elif not targets and queue.options.at_least_once:
            self._drop_letter(letter, NOBODY)
        elif not targets:
            self.dropped[f"queue_{death.reason}"] += 1
        return letter, targets or ()

    def _build_dead_letter(
        self, queue: DeadLetteringQueue, message: Message, reason: str, utc: float
    ) -> tuple[Sequence[DeadLetteringQueue] | None, Message]:
        """Build the dead letter of a message that left `queue` for `reason`. Return (queues, dead letter).

        The queues get the dead letter; they are None if the message has died too often without being rejected
        by a consumer, so that it may circulate forever. `utc` is the present time in POSIX seconds.
        """
        address = message.address
        exchange, key = queue.options.dead_letter_exchange, queue.options.dead_letter_key
        assert exchange is not None
        native = _native(queue, message, utc)
        headers = _with_death(native, queue.name, reason, address, int(utc))
        if not _can_be_written(headers):  # nested as deeply as can be read, and now one level deeper
            headers = _with_death(BasicProperties(), queue.name, reason, address, int(utc))
        endless = len(dict(headers)[HISTORY].value) > DEATHS_MAX
        if endless:
            headers, endless = _shortened(headers)
        copies, blind = copied_keys(headers, COPIES), blind_copies(message)
        copies += copied_keys(blind, BLIND)
        native.headers = (*blind, *headers)
        if key is not None:
            native.headers = tuple(pair for pair in headers if pair[0] != COPIES)
            copies = []
        native.expiration = None
        first = address.name if key is None else key
        letter = Message(
            amqp_address(exchange, first),
            message.body,
            content_properties(encode_basic_properties(native)),
            message.assurance,
            native.delivery_mode == PERSISTENT if queue.options.quorum else message.durable,
            message.retain,
            NEVER,
            message.hops,
            message.sender,
        )
        if endless:
            return None, letter
        found = self._host.route_keys(exchange, [first, *copies[:COPIES_MAX]], letter)
        if reason != REJECTED:
            visited = _visited(headers)
            found = [target for target in found if target.is_delay or target.name not in visited]
        return found, letter

    # Interface of a batch's source.

    def settle(
        self,
        receipts: list[tuple[DeadMessage, Message]],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """Settle dead messages, and messages whose delay is over, with the outcomes of their target queues.

        `receipts` has each message and what was sent for it; `refused` has the outcomes of refused ones by
        index, None if there are none. A message that a queue refused is counted and reported to `lost`. A
        message that the failing disk refused is retried. `received` is not used.
        """
        settled: dict[DeadLetteringQueue, list[int]] = {}
        for at, (death, letter) in enumerate(receipts):
            death.is_settled = True
            outcome = ACCEPTED if refused is None else refused.get(at, ACCEPTED)
            if outcome.reason is Reason.STORE and self._postpone(death):
                continue
            if death.position is not None:
                settled.setdefault(death.queue, []).append(death.position)
            if outcome is not ACCEPTED:
                self._drop_letter(letter, outcome)
        for queue, positions in settled.items():
            queue.settle_dead(positions)

    def _drop_letter(self, letter: Message, outcome: Outcome, word: str = "dead_letter_refused") -> None:
        self.dropped[word] += 1
        if self._lost is not None:
            self._lost([letter], outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return [] because nothing can be paused: dead messages have no sender that could wait."""
        return []


def user_of(queue: DeadLetteringQueue) -> str:
    """Return the user against whose limit the dead messages of a queue count: its owner, or OPERATOR."""
    user = queue.owning_user
    return OPERATOR if user is None else user


def _settle_beside(sent: Iterable[DeadMessage]) -> None:
    """Delete messages from their queues in the transaction that stores their dead letters.

    Messages that are already settled are skipped.
    """
    pending: dict[DeadLetteringQueue, list[int]] = {}
    for death in sent:
        if death.position is not None and not death.is_settled:
            pending.setdefault(death.queue, []).append(death.position)
    for queue, positions in pending.items():
        queue.settle_beside(positions)


def own_properties(
    queue: DeadLetteringQueue, message: Message, utc: float, returns: int | None = None
) -> bytes:
    """Return the encoded properties of a message for a consumer of `queue`, at the POSIX time `utc`.

    An expiration from the queue's `x-message-ttl` and the durability from a quorum queue are left out.
    `returns` (how often the message was returned) is added as a header, unless it is None. Raises
    RemoteProtocolError for properties that the sender malformed.
    """
    if returns is not None:
        native = decode_properties(own_properties(queue, message, utc))
        headers = dict(native.headers or ()) | {COUNT: Value(ValueType.INT64, returns)}
        native.headers = tuple(sorted(headers.items()))
        return encode_basic_properties(native)
    if queue.options.quorum and message.property_set.protocol == PROTOCOL:
        message = with_durability(message, essentials(message.property_set).durable)
    if queue.options.ttl_ms is None or not message.expires or message.property_set.protocol != PROTOCOL:
        return encode_properties(message, utc)
    limited = essentials(message.property_set).expiration_ms is not None
    return encode_properties(with_expiry(message, message.expires if limited else NEVER), utc)


def with_durability(message: Message, durable: bool) -> Message:
    """Return a copy of the message that is durable or not."""
    return Message(
        message.address,
        message.body,
        message.property_set,
        message.assurance,
        durable,
        message.retain,
        message.expires,
        message.hops,
        message.sender,
    )


def with_expiry(message: Message, expires: float) -> Message:
    """Return a copy of the message that expires at `expires` (POSIX seconds, or NEVER)."""
    return Message(
        message.address,
        message.body,
        message.property_set,
        message.assurance,
        message.durable,
        message.retain,
        expires,
        message.hops,
        message.sender,
    )


def _native(queue: DeadLetteringQueue, message: Message, utc: float) -> BasicProperties:
    """Return the properties of a message; empty ones if the sender malformed them."""
    try:
        return decode_properties(own_properties(queue, message, utc))
    except ProtocolError:
        return BasicProperties()
    except Exception as error:
        contained("delivery", error, queue=queue.name)
        return BasicProperties()


def copied_keys(headers: Headers | None, name: str) -> list[str]:
    """Return the routing keys in the header `name` (`CC` or `BCC`), which lists copies.

    Values that are not texts are skipped.
    """
    found = dict(headers or ()).get(name)
    if found is None or found.type is not ValueType.ARRAY:
        return []
    return [one.value for one in found.value if isinstance(one.value, str)]


def blind_copies(message: Message) -> Headers:
    """Return the `BCC` header of a message, as its only header; () if it has none."""
    property_set = message.property_set
    if property_set.protocol != PROTOCOL:
        return ()
    try:
        if not essentials(property_set).special:
            return ()
        headers = decode_properties(property_set.raw).headers
    except ProtocolError:
        return ()
    return tuple(pair for pair in headers or () if pair[0] == BLIND)


def _shortened(headers: Headers) -> tuple[Headers, bool]:
    """Return the headers with `x-death` limited to the DEATHS_MAX newest entries.

    The second result is True if none of them is a rejection by a consumer, so that the message may circulate
    forever.
    """
    found = dict(headers)
    deaths = found[HISTORY].value[:DEATHS_MAX]
    found[HISTORY] = Value(ValueType.ARRAY, deaths)
    return tuple(found.items()), all(_entry_fields(death).get("reason") != REJECTED for death in deaths)


def _can_be_written(headers: Headers) -> bool:
    try:
        encode_table(headers)
    except LocalProtocolError:
        return False
    return True


def _with_death(native: BasicProperties, queue: str, reason: str, address: Address, utc: int) -> Headers:
    """Return the headers with one more death in `x-death`, in RabbitMQ's order."""
    headers = dict(native.headers or ())
    keys = [address.name, *copied_keys(native.headers, COPIES)]
    death = [
        ("count", Value(ValueType.INT64, 1)),
        ("reason", string(reason)),
        ("queue", string(queue)),
        ("time", Value(ValueType.TIMESTAMP, utc)),
        ("exchange", string(address.scope)),
        ("routing-keys", Value(ValueType.ARRAY, tuple(string(key) for key in keys))),
    ]
    if native.expiration is not None:
        death.append(("original-expiration", string(native.expiration)))
    history = headers.get(HISTORY)
    if history is None:
        deaths: tuple[Value, ...] = (Value(ValueType.TABLE, tuple(death)),)
        headers["x-first-death-reason"] = string(reason)
        headers["x-first-death-queue"] = string(queue)
        headers["x-first-death-exchange"] = string(address.scope)
    elif history.type is not ValueType.ARRAY:
        deaths = (Value(ValueType.TABLE, tuple(death)),)
    else:
        deaths = _history_with_death(history.value, death, queue, reason)
    headers[HISTORY] = Value(ValueType.ARRAY, deaths)
    return tuple(sorted(headers.items()))


def _history_with_death(
    history: tuple[Value, ...], death: list[tuple[str, Value]], queue: str, reason: str
) -> tuple[Value, ...]:
    """Return the entries of `x-death` with one more death.

    If there is an entry of the same queue and reason, its count is increased. The latest entry is first.
    """
    others = []
    existing: dict[str, Value] | None = None
    for one in _grouped(history):
        fields = _entry_fields(one)
        if existing is None and (fields.get("queue"), fields.get("reason")) == (queue, reason):
            existing = dict(one.value)
            count = fields.get("count")
            again = count + 1 if isinstance(count, int) and 0 <= count < COUNT_MAX else 1
            existing["count"] = Value(ValueType.INT64, again)
        else:
            others.append(one)
    pairs = death if existing is None else list(existing.items())
    return (Value(ValueType.TABLE, tuple(sorted(pairs))), *others)


def _grouped(history: tuple[Value, ...]) -> list[Value]:
    """Return the entries of `x-death` with one for each queue and reason, in RabbitMQ's order.

    Old brokers wrote one entry for each death, without a count.
    """
    if len(history) == 1:
        return [*history]
    groups: dict[tuple[object, ...], list[Value]] = {}
    for at, one in enumerate(history):
        fields = _entry_fields(one)
        groups.setdefault((fields.get("queue"), fields.get("reason")) if fields else (at,), []).append(one)
    found = []
    for first, *others in reversed(groups.values()):
        if first.type is ValueType.TABLE and "count" not in _entry_fields(first):
            count = ("count", Value(ValueType.INT64, 1 + len(others)))
            first = Value(ValueType.TABLE, (count, *first.value))
        found.append(first)
    return found


def _entry_fields(death: Value) -> dict[str, Any]:
    """Return the fields of an entry of `x-death`; {} if it is no table."""
    if death.type is not ValueType.TABLE:
        return {}
    return {name: value.value for name, value in death.value}


def _visited(headers: Headers) -> set[str]:
    """Return the names of queues in which the message has died since a consumer last rejected it."""
    found = set()
    for death in dict(headers)[HISTORY].value:
        fields = _entry_fields(death)
        if fields.get("reason") == REJECTED:
            break
        queue = fields.get("queue")
        if isinstance(queue, str):
            found.add(queue)
    return found


class DeadMessagesClaim(NamedTuple):  # behind DeadLettering, which mypyc needs for its fields
    """Memory of one user's dead messages that wait to be routed; `restrain` limits it (memory_shares.py)."""

    dead_lettering: DeadLettering
    user: str

    def restrain(self, on: bool) -> None:
        """Lower the limit of the user's waiting dead messages (`on`), or restore it.

        At the limit, the user's queues with a dead letter exchange deliver nothing, and drop excess messages
        without dead letters.
        """
        self.dead_lettering.restrain_user(self.user, on)

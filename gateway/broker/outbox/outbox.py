"""Outboxes: durable queues in front of a link, whose messages are accepted once they are in the local store.

An outbox belongs to one link and one route. Its only consumer sends batches to the link's session while the
link is up, never more than the link's window at a time, and settles what the broker has confirmed. If the
link releases a message (refuses it for now), the message is requeued and the outbox waits, as often as
necessary. Then a single message is sent, and more at a time as long as they are accepted.

A message that the broker refuses is retried on its own while later ones overtake it. After `attempts_max`
refusals, or a final one, it becomes a dead letter. The number of refusals is not stored over a restart.

One user may use only a part of each limit (`limits.user_share`): further messages of that user are refused.
With a policy that removes the oldest messages, they are refused only when the outbox is full and messages of
other users, which would be removed, wait in it.

An outbox whose route is removed from the mapping files keeps its messages until the route is added again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from gateway import clock
from gateway.broker.backoff import Backoff
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import RouteRecipient, protocol_mismatch
from gateway.broker.outbox.arrival_times import RECORD_SECS, ArrivalTimes
from gateway.broker.queue import HOLE, Queue
from gateway.broker.routing import Namespace, OneSink
from gateway.broker.shares import UserQuotas
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.containment import contained
from gateway.mapping.routes import Route
from gateway.model.batch import Batch, SubBatch
from gateway.model.message import NEVER, Message, Sender, weight_of
from gateway.model.outcome import ACCEPTED, FINAL, Outcome, Reason, Verdict
from gateway.model.times import Monotonic, WallTime
from gateway.store.journal.columns import WAS_BURIED, WAS_DELIVERED, WAS_DROPPED
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.mapping.schema import OutboxRule

KIND: Final = "outbox"  # of the outbox's log in the store
UNBOUNDED: Final = 1 << 62  # the limits of the outbox apply instead of the queue's
# Bytes of one outbox: a window of large messages needs memory, too.
IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024
RETRY_SECS_MIN: Final = 0.5
RETRY_SECS_MAX: Final = 30.0
EXPIRED_AT_ONCE: Final = 1_000  # expired messages that are removed before the next tick
REMOVED_AT_ONCE: Final = 100  # dead letters for which space is requested together

OUTBOX_FULL: Final = Outcome(Verdict.RELEASED, Reason.QUOTA, "the outbox is full")
OUTBOX_USER_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "the user's share of the outbox is used up (limits.user_share)"
)
OUTBOX_STALE: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "the messages in the outbox are older than outbox.age_secs_max"
)
OUTBOX_REMOVED: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "a reload has removed the outbox")
CROWDED_OUT: Final = Outcome(Verdict.REJECTED, Reason.QUOTA, "the outbox was full, newer messages arrived")
TOO_OLD: Final = Outcome(
    Verdict.REJECTED, Reason.EXPIRED, "the message waited longer than outbox.age_secs_max"
)
EXPIRED: Final = Outcome(Verdict.REJECTED, Reason.EXPIRED, "the message expired in the outbox")

Policy = Literal["reject", "drop_oldest", "dead_letter"]
DepartureCallback = Callable[[Route, list[Message], Outcome, Monotonic], None]


def exit_outcome(word: str, outcome: Outcome) -> Outcome:
    """Return `outcome` with a text that begins with `word`, for the journal.

    `word` says how messages have left the outbox (delivered, dropped, dead letter).
    """
    return outcome._replace(text=f"{word}: {outcome.text}" if outcome.text else word)


class OutboxLimits(NamedTuple):
    """Limits of one outbox for messages, bytes and age, and the policy that applies at a limit.

    The age is in seconds; None means no limit.
    """

    messages_max: int = 1_000_000
    bytes_max: int = 1 << 30
    age_secs_max: float | None = None
    policy: Policy = "reject"

    def overridden_by(self, rule: OutboxRule | None) -> OutboxLimits:
        """Return these limits, with the values that `rule` sets instead. A rule of None sets nothing."""
        if rule is None:
            return self
        byte_count = self.bytes_max if rule.bytes_max is None else rule.bytes_max
        return OutboxLimits(
            self.messages_max if rule.messages_max is None else rule.messages_max,
            byte_count,
            self.age_secs_max if rule.age_secs_max is None else rule.age_secs_max,
            rule.policy or self.policy,
        )


class OutboxTarget(NamedTuple):
    """Link to which outboxes send messages.

    `up` returns True while it is connected. `window` is the largest number of unsettled messages.
    """

    namespace: Namespace
    up: Callable[[], bool]
    window: int
    limits: OutboxLimits = OutboxLimits()


class OutboxState(NamedTuple):
    """State of one outbox for the console and metrics.

    `problem` is the reason why nothing is sent, "" if messages can be sent. `messages` counts all messages,
    `in_flight` those at the link. `waiting` and `waiting_bytes` count messages that were not yet passed to
    the link; the limits apply to these.

    `shared` is True if the outbox is on a cluster of brokers. Then `messages` counts only ready messages, as
    `waiting` does, and `in_flight` those that this replica has passed to the link. A count is None if the
    cluster does not report it, or not at present.
    """

    link: str
    route: str
    messages: int | None
    messages_bytes: int | None
    in_flight: int
    oldest_secs: float | None
    dropped: int | None
    problem: str
    waiting: int | None
    waiting_bytes: int | None
    limits: OutboxLimits
    shared: bool = False


class OutboxRecipient(RouteRecipient):
    """Link as the recipient of messages from an outbox. The outbox handles refusals and retries."""

    __slots__ = ()

    def settle(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Settle messages in the batch of `sub_batch` with the link's outcome, and count delivered ones.

        `slots` are the positions of `messages` in that batch.
        """
        route = self.route
        route.in_flight -= len(messages)
        if outcome is ACCEPTED:
            route.delivered += len(messages)
        sub_batch.batch.settle(slots, outcome)


class OutboxQueue(Queue):
    """Queue of an outbox, in which expired messages stay while there is no space for their dead letters.

    `keeps_expired` is True if an expired message may be among those that are delivered next. `droppable` is
    the number of expired messages that may be removed before the next tick, so that other tasks run between.
    """

    def __init__(self, name: str, letters: DeadLetters, expired: Callable[[Message], None]) -> None:
        super().__init__(name, durable=True, messages_max=UNBOUNDED, bytes_max=UNBOUNDED, expired=expired)
        self.keeps_expired = False
        self.droppable = EXPIRED_AT_ONCE
        self._letters = letters

    def _drop_expired(self, position: int, message: Message, utc: float) -> bool:
        is_expired = NEVER < message.expires <= utc and message is not HOLE
        if is_expired:
            if self.droppable <= 0 or not self._letters.has_room_for([message], is_awaited=False):
                self.keeps_expired = True
                return False
            self.droppable -= 1
        return super()._drop_expired(position, message, utc)


class Outbox(OneSink):
    """Outbox of one route.

    It is sink and namespace at the route's end, the consumer of its queue, and the source of the batches that
    it sends to the link.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        dead_letters: DeadLetters,
        *,
        marks: Iterable[tuple[int, WallTime]],
        memory: MemoryLimits,
        quotas: UserQuotas,
        jitter: Callable[[], float],
        clock: Callable[[], Monotonic],
        utc: Callable[[], WallTime],
    ) -> None:
        """Create the outbox, or restore it from the store, before the store starts.

        `name` is "<link>/<route>". `marks` are the stored arrival times (arrival_times.py). Beyond the limits
        `memory`, messages are only on disk. `quotas` limits the messages of each user. `jitter` returns
        numbers from 0 to 1, `clock` the time of the event loop, and `utc` POSIX seconds.
        """
        super().__init__(self)
        self.name = name
        self.link, _, self.route_name = name.partition("/")
        self.dropped = 0
        self._dead_letters = dead_letters
        self._clock = clock
        self._utc = utc
        self._target: OutboxTarget | None = None
        self._route: Route | None = None
        self._recipient: OutboxRecipient | None = None
        self._on_departure: DepartureCallback | None = None
        self._protocol = ""  # of the link, as the route states
        self._unsure_before = 0  # messages at lower positions may have addresses of another protocol
        self._limits = OutboxLimits()
        self._attempts_max = 1
        self._stopped = False
        self._paused = False  # an operator has paused the route
        self._stale = False
        self._sending = False
        self._letters_full = False  # the policy asks for dead letters, but their store is full
        self._backoff = Backoff(jitter, RETRY_SECS_MIN, RETRY_SECS_MAX)
        self._open: dict[int, Message] = {}  # handed to the link or waiting for a retry
        self._byte_count = 0  # bytes of the messages in _open
        self._attempts: dict[int, int] = {}
        self._later: list[tuple[Monotonic, int]] = []  # when to retry which of them
        log = store.log(KIND, name)
        extent = store.extent(log)
        self._arrivals = ArrivalTimes(store, name)
        self._arrivals.recover(marks, extent.first, extent.end, utc())
        self._queue = OutboxQueue(name, dead_letters, self._expired)
        self._storage = QueueStorage(self._queue, store, log, memory)
        self._shares = quotas.outbox()
        self._storage.on_refused = self._shares.remove_messages
        if extent.count:
            for messages in self._storage.stored_before(extent.first):
                self._shares.add_messages(messages)
        self._queue.add(self)

    def __len__(self) -> int:
        return len(self._queue) + len(self._open)

    def use(
        self, target: OutboxTarget | None, route: Route | None, on_departure: DepartureCallback | None = None
    ) -> None:
        """Set the outbox's route (None if the mapping no longer has it) and link, with their limits.

        `on_departure` is called with messages that have left the outbox, for the journal.
        """
        self._on_departure = on_departure
        self._target = target
        self._route = route
        self._recipient = None
        if route is not None:
            protocol = route.target.dialect.name
            if protocol != self._protocol:
                self._protocol = protocol
                self._unsure_before = self._queue.next
        if target is not None and route is not None:
            self._limits = target.limits.overridden_by(route.rule.outbox)
            self._shares.set_limits(self._limits.messages_max, self._limits.bytes_max)
            self._attempts_max = route.rule.attempts_max
            age = self._limits.age_secs_max
            self._arrivals.interval = RECORD_SECS if age is None else min(RECORD_SECS, max(age / 100, 0.1))
        self._make_room()
        self._queue.dispatch()

    def drop(self) -> None:
        """Delete the outbox with its queue and its stored arrival times."""
        self._arrivals.clear()
        self._queue.delete()

    def stop(self) -> None:
        """Stop sending messages, because the gateway is shutting down."""
        self._stopped = True

    def pause(self, on: bool) -> None:
        """Pause or resume the outbox on behalf of an operator."""
        was, self._paused = self._paused, on
        if was and not on:
            self.tick()

    def state(self) -> OutboxState:
        """Return the state of the outbox for the console and metrics."""
        return OutboxState(
            self.link,
            self.route_name,
            len(self),
            self._queue.byte_count + self._byte_count,
            len(self._open) - len(self._later),
            self._oldest_secs(),
            self.dropped,
            self._problem(),
            len(self._queue),
            self._queue.byte_count,
            self._limits,
        )

    def _problem(self) -> str:
        if self._target is None:
            return f"link {self.link!r} is not configured"
        if self._route is None:
            return f"route {self.route_name!r} is in no mapping"
        if self._paused:
            return "the route is paused"
        return "" if self._target.up() else "the link is down"

    def publish(self, sub_batch: SubBatch) -> None:
        """Store the messages of a sub-batch, and settle them.

        Transient messages in memory are accepted at once, others after their commit. If the outbox was
        deleted after the messages were routed, their source must route them again.
        """
        if self._queue.deleted:
            sub_batch.settle(OUTBOX_REMOVED)
            return
        sub_batch = self._refuse_excess(sub_batch)
        messages = sub_batch.messages
        count = len(messages)
        if not count:
            return
        refuses = self._limits.policy == "reject" or self._letters_full
        fits = self._fitting_count(messages) if refuses else count
        if fits:
            self._arrivals.note(self._queue.next, self._utc())
            accepted_count = self._storage.take(sub_batch, messages if fits == count else messages[:fits])
            self._shares.add_messages(accepted_count)
            self._queue.dispatch()
        if fits < count:
            if self._route is not None:
                self._route.failed += count - fits
            sub_batch.settle_at(range(fits, count), OUTBOX_STALE if self._stale else OUTBOX_FULL)
        self._make_room()

    def _refuse_excess(self, sub_batch: SubBatch) -> SubBatch:
        """Refuse messages of users who exceed their limit in this outbox; their sources retry them.

        Return the sub-batch without these messages.
        """
        shares, messages = self._shares, sub_batch.messages
        count, byte_count = len(messages), weight_of(messages)
        removes = self._limits.policy != "reject"
        if removes and not shares.exceeded_total_limit(byte_count, count):
            return sub_batch
        refused = shares.refuse_over_share(messages, spares_lone=removes)
        if not refused:
            return sub_batch
        rest = sub_batch.without(set(refused))
        if self._route is not None:
            self._route.failed += len(refused)
        sub_batch.settle_at(refused, OUTBOX_USER_FULL)
        return rest

    def _fitting_count(self, messages: list[Message]) -> int:
        """Return how many of `messages`, from the first one on, fit into the limits."""
        limits = self._limits
        if self._stale:
            return 0
        room = min(len(messages), max(limits.messages_max - len(self._queue), 0))
        byte_count = self._queue.byte_count
        for at, message in enumerate(messages[:room]):
            byte_count += message.byte_count
            if byte_count > limits.bytes_max:
                return at
        return room

    def _make_room(self) -> None:
        """Remove the oldest messages while a limit of number, bytes or age is exceeded.

        Depending on the policy they are dropped or become dead letters. Does nothing with the policy
        `reject`.
        """
        while self._remove_oldest():
            pass

    def _remove_oldest(self) -> bool:
        """Remove up to REMOVED_AT_ONCE messages as `_make_room` does. Return True if there may be more."""
        limits = self._limits
        was_full, self._letters_full = self._letters_full, False
        if limits.policy == "reject":
            return False
        queue = self._queue
        positions: list[int] = []
        crowded: list[Message] = []
        old: list[Message] = []
        cutoff = None if limits.age_secs_max is None else self._utc() + -limits.age_secs_max
        while len(queue) and len(positions) < REMOVED_AT_ONCE:
            too_many = len(queue) > limits.messages_max or queue.byte_count > limits.bytes_max
            if not too_many and not self._head_is_older(cutoff):
                break
            head = queue.take()
            if head is None:
                if queue.loading:
                    self._storage.when_loaded(self._make_room)
                break
            position, message, _ = head
            if limits.policy == "dead_letter" and not self._dead_letters.has_room_for(
                [*crowded, *old, message], is_awaited=False
            ):
                queue.requeue([(position, message)])
                self._letters_full = True
                self._dead_letters.refused += not was_full  # called at each tick
                break
            positions.append(position)
            (crowded if too_many else old).append(message)
        if positions:
            self._shares.remove_messages(chain(crowded, old))
            queue.acknowledged(positions)
            self._discard(crowded, CROWDED_OUT)
            self._discard(old, TOO_OLD)
        return len(positions) == REMOVED_AT_ONCE

    def _head_is_older(self, cutoff: WallTime | None) -> bool:
        """Return True if the oldest waiting message arrived before `cutoff` (POSIX seconds).

        Returns False if `cutoff` is None.
        """
        if cutoff is None:
            return False
        head = self._queue.head
        came = None if head is None else self._arrivals.time_of(head)
        return came is not None and came + self._arrivals.interval <= cutoff

    def _discard(self, messages: list[Message], outcome: Outcome) -> None:
        if not messages:
            return
        route = self._route
        if self._limits.policy == "dead_letter":
            self._add_dead_letters(messages, outcome)
            return
        self.dropped += len(messages)
        if route is not None:
            route.dropped += len(messages)
            self._note(messages, outcome, WAS_DROPPED)

    # Interface for the queue: the outbox is its consumer.

    def capacity(self) -> int:
        """Return how many messages may be passed to the link now.

        The result is 0 if the link is down or the outbox is paused, or if more expired messages are to be
        removed first.
        """
        target = self._target
        if target is None or self._route is None or self._stopped or self._paused or not target.up():
            return 0
        if (
            self._queue.droppable <= 0
            or self._byte_count >= IN_FLIGHT_BYTES_MAX
            or self._backoff.is_waiting(self._clock())
        ):
            return 0
        sent = len(self._open) - len(self._later)
        return min(target.window - len(self._open), self._backoff.window - sent)

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        """Send messages of the queue to the link. Their positions are consecutive and begin with `position`.

        Messages that have expired, or whose address is of another protocol than the link's, become dead
        letters.
        """
        waited = messages
        self._byte_count += weight_of(messages)
        self._open.update(enumerate(messages, position))
        positions: Sequence[int] = range(position, position + len(messages))
        if position < self._unsure_before or self._queue.keeps_expired:
            positions = self._deliverable(positions)
            messages = [self._open[one] for one in positions]
        if messages:
            recipient = self._recipient or self._find_recipient(messages[0])
            self._send(recipient, positions, messages)
        self._shares.remove_messages(waited)

    def _deliverable(self, positions: Iterable[int]) -> list[int]:
        """Return the positions of unexpired messages whose address is of the link's protocol.

        An address may be of another protocol if the mapping or the link was changed after the message was
        routed. Messages at the other positions become dead letters, or are requeued if there is no space.
        """
        route = self._route
        assert route is not None
        utc = clock.utc()
        self._queue.keeps_expired = False
        fitting: list[int] = []
        unfit: list[tuple[int, Outcome]] = []
        for position in positions:
            message = self._open[position]
            outcome = EXPIRED if NEVER < message.expires <= utc else protocol_mismatch(route, message)
            if outcome is None:
                fitting.append(position)
            else:
                unfit.append((position, outcome))
        if unfit:
            self._refused(unfit)
        return fitting

    def handle_error(self, error: Exception) -> None:
        """Log an error in the delivery to the link, and wait before the next attempt."""
        contained("link", error, outbox=self.name)
        self._backoff.record_release(self._clock())

    def cancelled(self, queue: Queue) -> None:
        """Do nothing: only the outbox deletes its queue."""

    def _find_recipient(self, message: Message) -> OutboxRecipient:
        assert self._target is not None
        assert self._route is not None
        (sink,) = self._target.namespace.sinks(message.address) or ()
        self._recipient = OutboxRecipient(sink, self._route, None)
        return self._recipient

    def _send(self, recipient: OutboxRecipient, positions: Iterable[int], messages: list[Message]) -> None:
        batch = Batch(self, self._clock())
        for position, message in zip(positions, messages, strict=True):
            batch.add_only(position, recipient, message)
        self._sending, before = True, self._sending
        batch.send()
        self._sending = before

    def _expired(self, message: Message) -> None:
        self._shares.remove_messages([message])
        self._add_dead_letters([message], EXPIRED)

    # Interface for batches: the outbox is their source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return [] because nothing is paused: the messages' senders were acknowledged long ago."""
        return []

    def settle(self, receipts: list[int], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Settle messages with the outcomes that the link has reported.

        `receipts` are the positions of the messages in the queue. `refused` has the outcomes of refused
        messages, by index in `receipts`; None means that all were accepted.
        """
        done = receipts
        if refused is not None:
            done = [position for at, position in enumerate(receipts) if at not in refused]
        if done:
            self._backoff.record_acceptance(len(done))
            if self._on_departure is not None:
                self._note([self._open[position] for position in done], ACCEPTED, WAS_DELIVERED)
            self._finish(done)
        if refused is not None:
            self._refused([(receipts[at], outcome) for at, outcome in refused.items()])
        if not self._sending:
            self._queue.dispatch()

    def _finish(self, positions: list[int]) -> None:
        take = self._open.pop
        self._byte_count -= sum([take(position).byte_count for position in positions])
        if self._attempts:
            for position in positions:
                self._attempts.pop(position, None)
        self._queue.acknowledged(positions)

    def _refused(self, rows: list[tuple[int, Outcome]]) -> None:
        """Requeue, retry or give up messages that the link has refused; `rows` has (position, outcome).

        A released message is requeued. A rejected message is retried after a delay, unless the reason is
        final or all attempts are used: then it becomes a dead letter, or is requeued if there is no space for
        that.
        """
        now = self._clock()
        back: list[tuple[int, Message]] = []
        retried = 0
        for position, outcome in rows:
            message = self._open[position]
            attempts = self._attempts.get(position, 0) + 1
            if outcome.verdict is Verdict.RELEASED:
                back.append((position, message))
            elif outcome.reason not in FINAL and attempts < self._attempts_max:
                retried += 1
                self._attempts[position] = attempts
                heapq.heappush(self._later, (now + self._backoff.wait(attempts), position))
            elif self._dead_letters.has_room_for([message], is_awaited=False):
                self._add_dead_letters([message], outcome)
                self._finish([position])
            else:
                self._dead_letters.refused += 1
                back.append((position, message))
        if back:
            retried += len(back)
            for position, message in back:
                del self._open[position]
                self._byte_count -= message.byte_count
            self._backoff.record_release(now)
            self._shares.add_messages([message for _, message in back])
            self._queue.requeue(back)
        if self._route is not None:
            self._route.retried += retried

    def _add_dead_letters(self, messages: list[Message], outcome: Outcome) -> None:
        """Store `messages` as dead letters of the route, for the reason in `outcome`.

        The caller settles the messages in the same pass, so that both are in one commit.
        """
        if self._route is not None:
            self._route.failed += len(messages)
        self._note(messages, outcome, WAS_BURIED)
        self._dead_letters.add(messages, self.route_name, outcome, crossed=True)

    def _note(self, messages: list[Message], outcome: Outcome, word: str) -> None:
        """Report to the journal that messages have left the outbox. `word` says how, and `outcome` why."""
        if self._on_departure is not None and self._route is not None and messages:
            self._on_departure(self._route, messages, exit_outcome(word, outcome), self._clock())

    # Timer.

    def tick(self) -> None:
        """Send messages whose retry is due, and remove messages that have expired or are too old.

        Called several times a second.
        """
        self._queue.droppable = EXPIRED_AT_ONCE
        now = self._clock()
        target = self._target
        going = target is not None and self._route is not None and target.up()
        if going and not (self._stopped or self._paused):
            due_positions: list[int] = []
            while self._later and self._later[0][0] <= now:
                due_positions.append(heapq.heappop(self._later)[1])
            if due_positions:
                due_positions = self._deliverable(sorted(due_positions))
            if due_positions:
                recipient = self._recipient or self._find_recipient(self._open[due_positions[0]])
                self._send(recipient, due_positions, [self._open[position] for position in due_positions])
        self._queue.drop_expired(EXPIRED_AT_ONCE)
        oldest = self._oldest()
        if oldest is None:
            self._arrivals.clear()
            self._shares.replace({})  # messages may have been counted that the disk has lost
        else:
            self._arrivals.forget_before(oldest)
        age = self._limits.age_secs_max
        self._stale = age is not None and self._oldest_secs() > age
        self._make_room()
        self._queue.dispatch()

    def _oldest(self) -> int | None:
        """Return the lowest position of an unsettled message, or None if the outbox is empty."""
        head = self._queue.head
        return min((*self._open, *(() if head is None else (head,))), default=None)

    def _oldest_secs(self) -> float:
        oldest = self._oldest()
        came = None if oldest is None else self._arrivals.time_of(oldest)
        return 0.0 if came is None else max(0.0, self._utc() - came)

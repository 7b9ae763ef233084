"""Messages of one pass of the event loop, which are routed together, and their settlement.

A source opens a Batch and adds, for each message, a *receipt* (whatever it needs to acknowledge the message)
and its recipients (a recipient is a sink and the route that leads to it). `send` hands each recipient's sink
its SubBatch. A sink settles each message of its SubBatch once, immediately or later, singly or in ranges.
When the last recipient of a message has settled it, the source gets the receipt back with the worst outcome.
Slots are positions in the batch; the `messages` and `slots` of a sub-batch are parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from gateway.containment import contained
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, INTERNAL, Outcome, Verdict, worse_outcome
from gateway.model.times import Monotonic

Receipt = Any
CannotNotify = Callable[[Receipt, bool, Outcome], bool]
"""Function that returns True if a source cannot be notified that a route rejects the message of a receipt, so
that the route has to store a dead letter. The second argument is True if the route requests another attempt
(`on_reject: retry`).
"""
_EVERY: set[int] = set()  # marker, compared by identity: the whole sub-batch is settled


class Source(Protocol):
    """Publisher of a batch, which is notified of the outcome of its messages."""

    def settle(
        self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Acknowledge accepted messages to their sender, and report or retry refused ones.

        `receipts` has, for each message, the object that this source gave for it to `Batch.add`. `refused`
        maps a position in `receipts` to the outcome of a message that was not accepted; None means that all
        were accepted. `received` is the time at which the batch arrived, in loop-clock seconds.
        """

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Stop reading from these senders, because a queue or link that receives their messages is full.

        Return the functions that resume reading.
        """


class Sink(Protocol):
    """Destination of messages: a queue, a subscription, a link."""

    def publish(self, sub_batch: SubBatch) -> None:
        """Accept the messages of `sub_batch`, and report each outcome by `sub_batch.settle_at`, now or later.

        Never blocks, never awaits, never raises because of a message's content.
        """


class Recorder(Protocol):
    """Observer that records the outcomes of messages."""

    def record(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Record that `messages` of `sub_batch`, or all of them, were settled with `outcome`. Never raises.

        `slots` has the position of each message in `sub_batch.batch`.
        """


class Watcher(Protocol):
    """Observer of one message, notified of its outcome after the message's source."""

    def record_outcome(self, outcome: Outcome) -> None:
        """Record the `outcome` that the source of the message has just received. Never raises."""


class Recipient:
    """Recipient of messages: a sink, with an optional `recorder` of the outcomes of its messages.

    Each combination of a sink and the route that leads to it has one recipient; batches group messages by
    recipient.
    """

    __slots__ = ("_recorder", "sink")

    def __init__(self, sink: Sink, recorder: Recorder | None = None) -> None:
        self.sink = sink
        self._recorder = recorder

    @property
    def stored_first(self) -> bool:
        """True if a message that must survive a crash is delivered only after it was written to disk.

        If False, the message may be delivered while it is still being written. If the process dies before the
        write is complete, the publisher has no acknowledgement and publishes the message again.
        """
        return False

    def count_sent(self, count: int) -> None:
        """Record that `count` messages were passed to the sink.

        This class records nothing; a subclass may count the messages.
        """

    def settle(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Record the outcome of `messages`, which the sink has settled, and settle them in the batch.

        `slots` has the position of each message in `sub_batch.batch`. A subclass may settle the messages in
        the batch later.
        """
        if self._recorder is not None:
            self._recorder.record(sub_batch, messages, slots, outcome)
        if outcome.verdict is Verdict.RELEASED:
            sub_batch.batch.returned_by(slots, "")
        sub_batch.batch.settle(slots, outcome)


class Batch:
    """Messages that arrived in one pass of the event loop, with the outcomes that their recipients reported.

    The slot of a message is its position in the batch.
    """

    __slots__ = (
        "_open",
        "_parts",
        "_rejected_by",
        "_released_by",
        "_transient",
        "_unaccepted",
        "_watchers",
        "_worst",
        "cannot_notify",
        "has_dead_letters",
        "receipts",
        "received",
        "redelivered",
        "rejected",
        "returned",
        "source",
    )

    def __init__(self, source: Source, received: Monotonic) -> None:
        self.source = source
        self.received = received
        self.returned: Callable[[Receipt, frozenset[str]], None] | None = None
        self._released_by: dict[int, frozenset[str]] = {}  # names of routes, by slot
        self.rejected: Callable[[Receipt, frozenset[str]], None] | None = None
        self._rejected_by: dict[int, frozenset[str]] = {}
        # Returns True if a broker delivers the message again, so that its copy here must not be sent.
        self.redelivered: Callable[[Receipt], bool] | None = None
        self.cannot_notify: CannotNotify | None = None  # None: the source is notified of every rejection
        self.has_dead_letters = False  # a rejected message is a dead letter already: store no second one
        self.receipts: list[Receipt] = []
        self._open: list[int] = []
        self._parts: dict[Recipient, SubBatch] = {}
        self._worst: dict[int, Outcome] = {}
        self._unaccepted: list[int] = []
        self._transient: dict[int, int] = {}  # by slot: copies on disk that a restart deletes
        self._watchers: dict[int, Watcher] | None = None  # by slot

    def __len__(self) -> int:
        return len(self.receipts)

    def open(self, receipt: Receipt, recipients: int) -> int:
        """Register a message that `recipients` recipients must settle, and return its slot.

        Once all of them have settled the message, the source gets `receipt`, its own object for acknowledging
        the message, together with the outcome.
        """
        slot = len(self.receipts)
        self.receipts.append(receipt)
        self._open.append(recipients)
        return slot

    def add(self, receipt: Receipt, placed: Iterable[tuple[Recipient, Message]], refused: int = 0) -> int:
        """Add a message for its recipients, and return its slot.

        `receipt` is the source's object for acknowledging the message. `placed` has each recipient with the
        copy of the message for that recipient. `refused` is the number of further recipients that did not
        accept the message; the caller must call `settle` once for each of these.
        """
        rows = list(placed)
        slot = self.open(receipt, len(rows) + refused)
        for recipient, message in rows:
            sub_batch = self._parts.get(recipient)
            if sub_batch is None:
                sub_batch = self._parts[recipient] = SubBatch(self, recipient)
            sub_batch.messages.append(message)
            sub_batch.slots.append(slot)
        return slot

    def add_only(self, receipt: Receipt, recipient: Recipient, message: Message) -> None:
        """Add a message that has a single recipient. The source gets `receipt` back with the outcome."""
        sub_batch = self._parts.get(recipient)
        if sub_batch is None:
            sub_batch = self._parts[recipient] = SubBatch(self, recipient)
        sub_batch.messages.append(message)
        sub_batch.slots.append(len(self.receipts))
        self.receipts.append(receipt)
        self._open.append(1)

    def forwarded_batch(self, source: Source) -> Batch:
        """Return an empty batch in which a sink forwards messages of this batch to other recipients.

        `source` receives the outcomes of the new batch. The new batch has the time of arrival of this one.
        """
        batch = Batch(source, self.received)
        batch.has_dead_letters = self.has_dead_letters
        return batch

    def add_from(self, origin: int, receipt: Receipt, placed: Iterable[tuple[Recipient, Message]]) -> int:
        """Add a message to a batch that `forwarded_batch` of another batch returned. Return its slot here.

        `origin` is the slot of the message in that other batch, for subclasses; this class does not use it.
        The other parameters are those of `add`.
        """
        return self.add(receipt, placed)

    def add_burst(self, receipts: list[Receipt], recipient: Recipient, messages: list[Message]) -> None:
        """Add several messages with the same single recipient. `receipts` has the receipt of each."""
        sub_batch = self._parts.get(recipient)
        if sub_batch is None:
            sub_batch = self._parts[recipient] = SubBatch(self, recipient)
        begin = len(self.receipts)
        sub_batch.messages += messages
        sub_batch.slots += range(begin, begin + len(messages))
        self.receipts += receipts
        self._open += [1] * len(messages)

    def send(self) -> None:
        """Publish to the sink of each recipient the messages for it, as one SubBatch.

        The sinks are called in the order in which their recipients were added first.
        """
        parts, self._parts = self._parts, {}
        for recipient, sub_batch in parts.items():
            recipient.count_sent(len(sub_batch.messages))
            try:
                recipient.sink.publish(sub_batch)
            except Exception as error:  # only the unsettled messages of this sub-batch fail
                contained("batch", error)
                try:
                    sub_batch.settle(INTERNAL)
                except Exception as another:
                    contained("batch", another)

    def settle(self, slots: list[int], outcome: Outcome = ACCEPTED) -> None:
        """Record that one recipient has settled the messages in `slots`.

        The source is notified of those messages that all their recipients have now settled. Raises
        AssertionError if a message is settled more often than it has recipients.
        """
        open_counts = self._open
        if outcome is not ACCEPTED:
            worst = self._worst
            for slot in slots:
                worst[slot] = worse_outcome(worst.get(slot, ACCEPTED), outcome)
        done = []
        for slot in slots:
            count = open_counts[slot] = open_counts[slot] - 1
            if not count:
                done.append(slot)
            elif count < 0:
                raise AssertionError(f"slot {slot} was settled more often than it has recipients")
        if done:
            self._report_settled(done)

    @property
    def unaccepted_slots(self) -> list[int]:
        """Slots of messages that must not be recorded as accepted, although some may not be settled yet.

        These are the messages that a recipient, or a target to which a recipient forwards, has refused, and
        those whose remaining copies a restart would delete.
        """
        transient = [slot for slot, count in self._transient.items() if self._open[slot] <= count]
        return [*self._worst, *self._unaccepted, *transient]

    def mark_refused(self, slots: Iterable[int]) -> None:
        """Add messages to `unaccepted_slots`: a target behind one of their recipients refused them."""
        self._unaccepted.extend(slots)

    def store_until_restart(self, slots: Iterable[int]) -> None:
        """Record that one recipient has the messages in `slots` on disk only until the next restart."""
        for slot in slots:
            self._transient[slot] = self._transient.get(slot, 0) + 1

    def returned_by(self, slots: list[int], route: str) -> None:
        """Record that `route` returns the messages in `slots` (positions in the batch) for a retry.

        This has an effect only if the source has set the callback `returned`. Just before the source gets the
        outcome of such a message, `returned` is called with the message's receipt and the names of all routes
        that returned it. A `route` of "" means that no single route is responsible: `returned` is then not
        called, and the source retries all routes.
        """
        if self.returned is not None:
            for slot in slots:
                self._released_by[slot] = self._released_by.get(slot, frozenset()) | {route}

    def rejected_by(self, slots: list[int], route: str) -> None:
        """Record that `route` has rejected the messages in `slots` (positions in the batch).

        This has an effect only if the source has set the callback `rejected`. Just before the source gets the
        outcome of such a message, `rejected` is called with the message's receipt and the names of all routes
        that rejected it.
        """
        if self.rejected is not None:
            for slot in slots:
                self._rejected_by[slot] = self._rejected_by.get(slot, frozenset()) | {route}

    def _report_settled(self, done: list[int]) -> None:
        """Report the outcomes of the messages in the slots `done`, which all their recipients have settled.

        First call `rejected` and `returned` with the routes that rejected or returned a message, then notify
        the source, and last the watchers of the messages.
        """
        receipts = self.receipts
        worst = self._worst
        if self._rejected_by and self.rejected is not None:
            for slot in done:
                if names := self._rejected_by.pop(slot, None):
                    self.rejected(receipts[slot], names)
        if self._released_by and self.returned is not None:
            for slot in done:
                names = self._released_by.pop(slot, frozenset())
                if names and "" not in names:
                    self.returned(receipts[slot], names)
        refused = {at: worst[slot] for at, slot in enumerate(done) if slot in worst} if worst else None
        self.source.settle([receipts[slot] for slot in done], refused or None, self.received)
        if self._watchers is not None:
            for slot in done:
                watcher = self._watchers.pop(slot, None)
                if watcher is not None:
                    watcher.record_outcome(worst.get(slot, ACCEPTED))

    def watch(self, slot: int, watcher: Watcher) -> None:
        """Register `watcher` for the outcome of the message that will be added next, in `slot`."""
        if self._watchers is None:
            self._watchers = {}
        self._watchers[slot] = watcher

    def unwatch(self, slot: int) -> None:
        """Remove the watcher of `slot`, because no message will be added in that slot."""
        if self._watchers is not None:
            self._watchers.pop(slot, None)


class SubBatch:
    """Messages of a batch for one recipient, whose sink settles each of them exactly once."""

    __slots__ = ("_settled", "batch", "messages", "number", "recipient", "slots")

    def __init__(self, batch: Batch, recipient: Recipient) -> None:
        self.batch = batch
        self.recipient = recipient
        self.messages: list[Message] = []
        self.slots: list[int] = []
        # Number of the first message, if the sink numbers messages that it may have to resend; 0: none yet.
        self.number = 0
        self._settled: set[int] | None = None  # None: none yet; positions if settled one by one

    def select(self, positions: Iterable[int]) -> SubBatch:
        """Return a new sub-batch with the messages at `positions` of this one.

        Settle these messages only in the new sub-batch, not in this one.
        """
        sub_batch = SubBatch(self.batch, self.recipient)
        for at in positions:
            sub_batch.messages.append(self.messages[at])
            sub_batch.slots.append(self.slots[at])
        return sub_batch

    def without(self, positions: Collection[int]) -> SubBatch:
        """Return a new sub-batch with the messages that are not at `positions` of this one; see `select`."""
        return self.select([at for at in range(len(self.messages)) if at not in positions])

    def is_redelivered(self, at: int) -> bool:
        """Return True if a broker will redeliver the message at position `at`.

        This copy of the message must then not be sent.
        """
        is_redelivered = self.batch.redelivered
        return is_redelivered is not None and is_redelivered(self.batch.receipts[self.slots[at]])

    def accept(self) -> None:
        """Settle all messages of this sub-batch as accepted, except those that are settled already."""
        self.settle(ACCEPTED)

    def settle(self, outcome: Outcome) -> None:
        """Settle with `outcome` all messages of this sub-batch that are not settled yet."""
        if self._settled is not None:
            self.settle_at(range(len(self.slots)), outcome)
            return
        self._settled = _EVERY
        self.recipient.settle(self, self.messages, self.slots, outcome)

    def settle_at(self, positions: Iterable[int], outcome: Outcome = ACCEPTED) -> None:
        """Settle the messages at `positions` with `outcome`, except those that are settled already."""
        settled = self._settled
        if settled is _EVERY:
            return
        if settled is None:
            settled = self._settled = set()
        chosen = [at for at in positions if at not in settled]
        if not chosen:
            return
        settled.update(chosen)
        messages = self.messages
        slots = self.slots
        self.recipient.settle(self, [messages[at] for at in chosen], [slots[at] for at in chosen], outcome)

"""The messages of one wake-up, moving together with their settlement.

A source opens a Batch and adds, for each message, a *receipt* (whatever it needs to answer the message) and
the recipients that must take it (a recipient is a sink, and the route that leads there). `send` hands every
recipient's sink its SubBatch. A sink settles each message of its part once, at once or later, alone or in
ranges; when the last recipient of a message has settled, the source gets the receipt back with the worst
outcome. Slots are positions in the batch; a part's `messages` and `slots` are parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from gateway.containment import contained
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, INTERNAL, Outcome, Verdict, worse
from gateway.model.times import Monotonic

Receipt = Any
Untold = Callable[[Receipt, bool, Outcome], bool]
"""Return True if a source cannot be told that a route rejects the message of a receipt, so that the route has
to keep a dead letter. The second argument: the route asks for another attempt (`on_reject: retry`)."""
_EVERY: set[int] = set()  # by identity: the part was settled whole


class Source(Protocol):
    """Who published a batch and waits to hear what became of it."""

    def settle(
        self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Answer `receipts`. `refused` maps a position in `receipts` to an outcome that is not ACCEPTED;
        None: all were accepted. `received` is the batch's time of arrival by the event loop's clock."""

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """A sink is full: stop reading from these senders. Returns what lets them go on."""


class Sink(Protocol):
    """What a message can end in: a queue, a subscription, a link."""

    def publish(self, part: SubBatch) -> None:
        """Take the messages. Never blocks, never awaits, never raises for what a message holds."""


class Recorder(Protocol):
    """Who notes what became of messages."""

    def record(self, part: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome) -> None:
        """`messages` of `part`, which stand in `slots` of its batch, were settled. Never raises."""


class Watcher(Protocol):
    """Who wants to hear when the source of a message has been told what became of it."""

    def told(self, outcome: Outcome) -> None:
        """It has. Never raises."""


class Recipient:
    """One way out: a sink, and whoever counts what becomes of the messages that take it.

    A recipient is made once for its sink and route; batches group by it. `recorder`, if there is one, hears
    of every settlement. `stored_first`: what must survive a crash is delivered only when it is on disk.
    """

    __slots__ = ("_recorder", "sink")

    def __init__(self, sink: Sink, recorder: Recorder | None = None) -> None:
        self.sink = sink
        self._recorder = recorder

    @property
    def stored_first(self) -> bool:
        """Otherwise it may be delivered while it is written; then it comes again when the process dies, from
        its sender."""
        return False

    def sent(self, count: int) -> None:
        """`count` messages have been handed to the sink."""

    def settle(self, part: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome) -> None:
        """The sink has settled `messages` of `part`, which stand in `slots`: tell the batch, now or later."""
        if self._recorder is not None:
            self._recorder.record(part, messages, slots, outcome)
        if outcome.verdict is Verdict.RELEASED:
            part.batch.released_by(slots, "")
        part.batch.settle(slots, outcome)


class Batch:
    """One wake-up's messages, joined over all their recipients."""

    __slots__ = (
        "_open",
        "_parts",
        "_released_by",
        "_watchers",
        "_worst",
        "keeps_letters",
        "receipts",
        "received",
        "source",
        "undone",
        "untold",
    )

    def __init__(self, source: Source, received: Monotonic) -> None:
        self.source = source
        self.received = received
        self.undone: Callable[[Receipt, frozenset[str]], None] | None = None
        self._released_by: dict[int, frozenset[str]] = {}  # names of routes, by slot
        self.untold: Untold | None = None  # None: the source is told of every rejection
        self.keeps_letters = False  # what is rejected is a dead letter already, and stays the one that it is
        self.receipts: list[Receipt] = []
        self._open: list[int] = []
        self._parts: dict[Recipient, SubBatch] = {}
        self._worst: dict[int, Outcome] = {}
        self._watchers: dict[int, Watcher] | None = None  # by slot

    def __len__(self) -> int:
        return len(self.receipts)

    def open(self, receipt: Receipt, recipients: int) -> int:
        """Register a message that as many must settle; returns its slot."""
        slot = len(self.receipts)
        self.receipts.append(receipt)
        self._open.append(recipients)
        return slot

    def add(self, receipt: Receipt, placed: Iterable[tuple[Recipient, Message]], refused: int = 0) -> int:
        """Put a message on its recipients, for each as it is to be there; returns its slot. As many as
        `refused` would not take it, and are to be settled by the caller.
        """
        rows = list(placed)
        slot = self.open(receipt, len(rows) + refused)
        for recipient, message in rows:
            part = self._parts.get(recipient)
            if part is None:
                part = self._parts[recipient] = SubBatch(self, recipient)
            part.messages.append(message)
            part.slots.append(slot)
        return slot

    def add_only(self, receipt: Receipt, recipient: Recipient, message: Message) -> None:
        """`add` of a message that has a single recipient."""
        part = self._parts.get(recipient)
        if part is None:
            part = self._parts[recipient] = SubBatch(self, recipient)
        part.messages.append(message)
        part.slots.append(len(self.receipts))
        self.receipts.append(receipt)
        self._open.append(1)

    def onward(self, source: Source) -> Batch:
        """A batch for what the sink of a part of this one passes on; `source` hears what becomes of it."""
        return Batch(source, self.received)

    def add_from(self, origin: int, receipt: Receipt, placed: Iterable[tuple[Recipient, Message]]) -> int:
        """`add` of a message that stands in slot `origin` of the batch that this one goes onward from."""
        return self.add(receipt, placed)

    def add_burst(self, receipts: list[Receipt], recipient: Recipient, messages: list[Message]) -> None:
        """`add_only` of several messages."""
        part = self._parts.get(recipient)
        if part is None:
            part = self._parts[recipient] = SubBatch(self, recipient)
        begin = len(self.receipts)
        part.messages += messages
        part.slots += range(begin, begin + len(messages))
        self.receipts += receipts
        self._open += [1] * len(messages)

    def send(self) -> None:
        """Hand every sink its part, in the order in which the recipients were first named."""
        parts, self._parts = self._parts, {}
        for recipient, part in parts.items():
            recipient.sent(len(part.messages))
            try:
                recipient.sink.publish(part)
            except Exception as error:  # it costs what is still open of this part, and no other
                contained("batch", error)
                try:
                    part.settle(INTERNAL)
                except Exception as another:
                    contained("batch", another)

    def settle(self, slots: list[int], outcome: Outcome = ACCEPTED) -> None:
        """One recipient says what became of the messages in `slots`."""
        left = self._open
        if outcome is not ACCEPTED:
            worst = self._worst
            for slot in slots:
                worst[slot] = worse(worst.get(slot, ACCEPTED), outcome)
        done = []
        for slot in slots:
            count = left[slot] = left[slot] - 1
            if not count:
                done.append(slot)
            elif count < 0:
                raise AssertionError(f"slot {slot} was settled more often than it has recipients")
        if done:
            self._tell(done)

    def released_by(self, slots: list[int], route: str) -> None:
        """Note that a route has released the messages in `slots`, for a source that tries them again: before
        it is told the outcome, `undone` is called with the receipt and the names of all such routes. "": it
        was no route, and all of them are tried again."""
        if self.undone is not None:
            for slot in slots:
                self._released_by[slot] = self._released_by.get(slot, frozenset()) | {route}

    def _tell(self, done: list[int]) -> None:
        receipts = self.receipts
        worst = self._worst
        if self._released_by and self.undone is not None:
            for slot in done:
                names = self._released_by.pop(slot, frozenset())
                if names and "" not in names:
                    self.undone(receipts[slot], names)
        refused = {at: worst[slot] for at, slot in enumerate(done) if slot in worst} if worst else None
        self.source.settle([receipts[slot] for slot in done], refused or None, self.received)
        if self._watchers is not None:
            for slot in done:
                watcher = self._watchers.pop(slot, None)
                if watcher is not None:
                    watcher.told(worst.get(slot, ACCEPTED))

    def watch(self, slot: int, watcher: Watcher) -> None:
        """Have the watcher told of the message that will have this slot."""
        if self._watchers is None:
            self._watchers = {}
        self._watchers[slot] = watcher

    def unwatch(self, slot: int) -> None:
        """There is no such message."""
        if self._watchers is not None:
            self._watchers.pop(slot, None)


class SubBatch:
    """The messages of a batch that take one recipient; its sink settles each of them exactly once."""

    __slots__ = ("_settled", "batch", "messages", "number", "recipient", "slots")

    def __init__(self, batch: Batch, recipient: Recipient) -> None:
        self.batch = batch
        self.recipient = recipient
        self.messages: list[Message] = []
        self.slots: list[int] = []
        self.number = (
            0  # of its first message, if its sink numbers what it may have to send again; 0: none yet
        )
        self._settled: set[int] | None = None  # None: none yet. Positions, once settled one by one

    def accept(self) -> None:
        """All messages of this part are accepted."""
        self.settle(ACCEPTED)

    def settle(self, outcome: Outcome) -> None:
        """All messages of this part that are still open have the same outcome."""
        if self._settled is not None:
            self.settle_at(range(len(self.slots)), outcome)
            return
        self._settled = _EVERY
        self.recipient.settle(self, self.messages, self.slots, outcome)

    def settle_at(self, positions: Iterable[int], outcome: Outcome = ACCEPTED) -> None:
        """The messages at `positions` of this part have this outcome; one settled before is passed over."""
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

"""The journal: what is kept of a batch for it, and which recipients it hears of.

Nothing of this is there when the journal is off. When it is on the dispatcher is a RecordingDispatcher, which
makes RecordedBatches, and gives the recipients that are to be recorded a recorder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import structlog

from gateway import clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import ALONE, Dispatcher, Surroundings
from gateway.broker.redacting import Redactor, Redactors
from gateway.broker.routing import RoutingEntry
from gateway.containment import contained
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.model.address import Address
from gateway.model.batch import Batch, Receipt, Recipient, Recorder, Source, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.times import Monotonic
from gateway.settings.journal import Journal
from gateway.store.journal.bursts import Bursts
from gateway.store.journal.gathering import RowLabels
from gateway.store.journal.mappings import keep
from gateway.store.journal.writer import JournalWriter, Options

log = structlog.get_logger()


class OpenBatches:
    """Batches with messages that are not settled, in the order in which they came: how far the journal is
    complete."""

    __slots__ = ("_batches",)

    def __init__(self) -> None:
        self._batches: OrderedDict[RecordedBatch, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._batches)

    def begun(self, batch: RecordedBatch) -> None:
        """It has its first message."""
        self._batches[batch] = None

    def settled(self, batch: RecordedBatch) -> None:
        """All of its messages are."""
        self._batches.pop(batch, None)

    def oldest(self) -> Monotonic | None:
        """When the oldest of them came; None: there are none."""
        first = next(iter(self._batches), None)
        return None if first is None else first.received


class RecordedBatch(Batch):
    """A batch that remembers how its messages came in, and of which it is known how long it is open.

    `sources` has, for each slot, the message as it came in, or only its address, when that is all that its
    one recipient's route changes (so the message itself can go); `bare` of them are addresses. `origins` are
    the slots in the batch that this one goes onward from, if it does. `bursts`: what was published in bursts.
    `private`: by slot, what takes out of a message what a route says must not be told.
    """

    __slots__ = (
        "_before",
        "_open_batches",
        "_sent",
        "_told",
        "bare",
        "bursts",
        "origins",
        "private",
        "sources",
    )

    def __init__(
        self,
        source: Source,
        received: Monotonic,
        open_batches: OpenBatches | None = None,
        before: RecordedBatch | None = None,
    ) -> None:
        super().__init__(source, received)
        self._before = before  # which is open for as long as this one is
        self._open_batches = open_batches
        self._sent = False
        self._told = 0
        self.sources: list[Message | Address] = []
        self.bare = 0
        self.origins: list[int] = []
        self.bursts: Bursts | None = None
        self.private: dict[int, Redactor] = {}

    def came(self, source: Message | Address) -> None:
        """Note how the message in the newest slot came in."""
        sources = self.sources
        if not sources and self._open_batches is not None:
            self._open_batches.begun(self)
        if not isinstance(source, Message):
            self.bare += 1
        sources.append(source)

    def came_in_burst(self, messages: list[Message], target: Address, *, changed: bool) -> None:
        """Note how the newest ones came in: together, and their route, if they take one, changes them."""
        if not self.sources and self._open_batches is not None:
            self._open_batches.begun(self)
        self.sources += [messages[0].address] * len(messages) if changed else messages
        self.bare += len(messages) if changed else 0
        if self.bursts is None:
            self.bursts = Bursts()
        self.bursts.add(messages, target)

    def onward(self, source: Source) -> RecordedBatch:
        """One that knows where its messages were in this one."""
        return RecordedBatch(source, self.received, before=self)

    def add_from(self, origin: int, receipt: Receipt, placed: Iterable[tuple[Recipient, Message]]) -> int:
        """Note the origin, and how the message came in there."""
        self.origins.append(origin)
        if self._before is not None and self._before.sources:
            self.came(self._before.sources[origin])
            if origin in self._before.private:
                self.private[len(self.receipts)] = self._before.private[origin]
        return self.add(receipt, placed)

    def send(self) -> None:
        """Hand every sink its part; some may settle it at once."""
        self._sent = True
        super().send()
        self._close()

    def _tell(self, done: list[int]) -> None:
        self._told += len(done)
        self._close()
        super()._tell(done)

    def _close(self) -> None:
        # Before it is sent others may follow those that have been settled at once.
        if self._sent and self._told == len(self.receipts) and self._open_batches is not None:
            self._open_batches.settled(self)


class RecipientRecorder:
    """Tells the journal what one recipient settled. What goes wrong there costs rows of it, and no
    settlement.
    """

    __slots__ = ("_labels", "_redactor", "_writer")

    def __init__(self, writer: JournalWriter, labels: RowLabels, redactor: Redactor | None = None) -> None:
        """`redactor`: of a route; rows of a message's own world go by their message."""
        self._writer = writer
        self._labels = labels
        self._redactor = redactor

    def record(self, part: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome) -> None:
        """See Recorder."""
        try:
            self._record(part, messages, slots, outcome)
        except Exception as error:
            contained("journal", error)

    def _record(self, part: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome) -> None:
        batch = part.batch
        if not isinstance(batch, RecordedBatch):  # the gateway's own: its messages came in as they are
            places = None if slots is part.slots and len(slots) == len(batch.receipts) else slots
            if self._redactor is not None:
                messages = [self._redactor(message) for message in messages]
            self._writer.record(self._labels, messages, outcome, batch.received, None, places)
            return
        came, origins, bursts = batch.sources, batch.origins, batch.bursts
        sources: list[Message | Address] | None = came or None
        known: list[int] | None = origins or None
        if bursts is not None and len(bursts.bodies) != len(slots):
            bursts = None
        if slots is not part.slots or len(slots) != len(batch.receipts):  # not all of the batch, in its order
            sources = [came[slot] for slot in slots] if came else None
            known = [origins[slot] for slot in slots] if origins else slots
            bursts = None
        if self._redactor is not None or batch.private:
            bursts = None
            redactors = [self._redactor or batch.private.get(slot) for slot in slots]
            messages = [_redacted(one, by) for one, by in zip(messages, redactors, strict=True)]
            if sources is not None:
                sources = [
                    _redacted(one, by) if isinstance(one, Message) else one
                    for one, by in zip(sources, redactors, strict=True)
                ]
        if sources == messages:  # none of them took a route
            sources = None
        mixed = 0 < batch.bare < len(came)
        alike = None if sources is None else _alike(sources, messages, mixed=mixed)
        self._writer.record(self._labels, messages, outcome, batch.received, alike, known, bursts)


def _redacted(message: Message, redactor: Redactor | None) -> Message:
    return message if redactor is None else redactor(message)


def _alike(
    sources: list[Message | Address], messages: list[Message], *, mixed: bool
) -> list[Message] | list[Address]:
    """`sources` as messages only, or as addresses only; `mixed`: their batch has both."""
    if mixed and Message in (kinds := set(map(type, sources))) and len(kinds) > 1:
        return [
            one if isinstance(one, Message) else _before(one, message)
            for one, message in zip(sources, messages, strict=True)
        ]
    return cast(list[Message] | list[Address], sources)


def _before(address: Address, message: Message) -> Message:
    """`message` as it was before it crossed from `address`, unchanged but for a hop."""
    return Message(
        address,
        message.body,
        message.property_set,
        message.assurance,
        message.durable,
        message.retain,
        message.expires,
        message.hops - 1,
        message.sender,
    )


class Journaling:
    """Ties recipients to the journal. `all`: also routes that do not ask for it, and what takes no route."""

    def __init__(
        self,
        writer: JournalWriter,
        router: Router,
        *,
        all_: bool,
        open_batches: OpenBatches,
        hash_key: bytes = b"",
    ) -> None:
        """`open_batches`: those that `writer` asks for the oldest."""
        self.writer = writer
        self.router = router  # the one in force
        self._hash_key = hash_key
        self.redactors = Redactors(router.routes, hash_key, writer.options.body_bytes_max)
        self.redacts = bool(self.redactors)  # for each message this is asked
        self.open_batches = open_batches
        self._all = all_

    @property
    def redacted(self) -> int:
        """Messages of which less was told than there was."""
        return self.redactors.redacted

    @property
    def withheld(self) -> int:
        """Bodies that were not told at all, for nobody could look into them."""
        return self.redactors.withheld

    def recorder(self, route: Route | None, endpoint: str) -> RecipientRecorder | None:
        """What hears of a recipient; `endpoint` is where its messages stay without a route. None: nothing
        does.
        """
        if route is not None:
            if not self._wanted(route):
                return None
            return RecipientRecorder(self.writer, self._labels(route), self.redactors.of(route))
        if not self._all:
            return None
        labels = RowLabels("", "", endpoint, self.router.endpoints.get(endpoint, ""), False)
        return RecipientRecorder(self.writer, labels)

    def refuse(
        self, route: Route, message: Message, outcome: Outcome, received: Monotonic, slot: int
    ) -> None:
        """A route would not let a message cross."""
        if self._wanted(route):
            told = _redacted(message, self.redactors.of(route))
            self.writer.refuse(self._labels(route), [told], outcome, received, [slot])

    def left(self, route: Route, messages: list[Message], outcome: Outcome, received: Monotonic) -> None:
        """Messages have left the outbox of a route. What goes wrong here costs rows, and no settlement."""
        if self._wanted(route):
            try:
                redactor = self.redactors.of(route)
                told = messages if redactor is None else [redactor(message) for message in messages]
                self.writer.record(self._labels(route), told, outcome, received)
            except Exception as error:
                contained("journal", error)

    def use(self, router: Router) -> None:
        """A new mapping is in force."""
        self.router = router
        self.redactors = Redactors(
            router.routes, self._hash_key, self.writer.options.body_bytes_max, self.redactors
        )
        self.redacts = bool(self.redactors)
        self.note_mappings()

    def note_mappings(self) -> None:
        """Keep the mapping files beside the journal, whose rows name them by their versions."""
        try:
            keep(self.writer.folder, self.router.texts)
        except OSError as error:
            log.warning("the mapping files were not kept beside the journal", error=error.strerror)

    def private(self, entry: RoutingEntry) -> Redactor | None:
        """What takes out of messages to an address what a route there says; None: there is no such route."""
        if not self.redacts:
            return None
        return self.redactors.at([branch.route for branch in entry.plan.branches])

    def _wanted(self, route: Route) -> bool:
        return self._all or route.rule.journal

    def _labels(self, route: Route) -> RowLabels:
        return RowLabels(
            route.name,
            self.router.versions.get(route.file, ""),
            route.target_endpoint,
            route.target.dialect.name,
            route.guarantee is not None or route.retain is not None,
        )


class RecordingDispatcher(Dispatcher):
    """A dispatcher whose recipients are recorded."""

    def __init__(
        self,
        router: Router,
        dead_letters: DeadLetters,
        surroundings: Surroundings = ALONE,
        *,
        journaling: Journaling,
    ) -> None:
        super().__init__(router, dead_letters, surroundings)
        self.journaling = journaling

    def batch(self, source: Source, received: Monotonic) -> RecordedBatch:
        """One that remembers how its messages came in."""
        return RecordedBatch(source, received, self.journaling.open_batches)

    def use(self, router: Router) -> None:
        """A new mapping is in force, also for what is recorded."""
        self.journaling.use(router)
        super().use(router)

    def publish(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """As every dispatcher does; what was taken is noted as it came in."""
        if not Dispatcher.publish(self, batch, entry, message, receipt):
            return False
        recorded = cast(RecordedBatch, batch)
        whole = entry.target is None or message.retain or (message.property_set.asks and entry.plan.bare)
        recorded.came(message if whole else entry.address)
        if self.journaling.redacts:
            self._keep_private(recorded, entry, 1)
        return True

    def publish_burst(
        self, batch: Batch, entry: RoutingEntry, messages: list[Message], receipts: list[Receipt]
    ) -> bool:
        """The same for messages that differ in nothing but their bodies."""
        if not Dispatcher.publish_burst(self, batch, entry, messages, receipts):
            return False
        target = entry.address if entry.plan.route is None else entry.target
        assert target is not None
        recorded = cast(RecordedBatch, batch)
        recorded.came_in_burst(messages, target, changed=entry.plan.route is not None)
        if self.journaling.redacts:
            self._keep_private(recorded, entry, len(messages))
        return True

    def _keep_private(self, batch: RecordedBatch, entry: RoutingEntry, count: int) -> None:
        """Note what must not be told of the newest messages."""
        redactor = self.journaling.private(entry)
        if redactor is not None:
            end = len(batch.receipts)
            batch.private.update(dict.fromkeys(range(end - count, end), redactor))

    def _recorder(self, route: Route | None, endpoint: str) -> Recorder | None:
        return self.journaling.recorder(route, endpoint)

    def _refused(self, batch: Batch, slot: int, route: Route, message: Message, outcome: Outcome) -> None:
        self.journaling.refuse(route, message, outcome, batch.received, slot)


def open_journal(settings: Journal, folder: Path, router: Router) -> Journaling:
    """The journal in `folder`. Raises JournalError when it cannot be written."""
    options = Options(**settings.model_dump(exclude={"enabled", "all", "path", "shard", "hash_key"}))
    open_batches = OpenBatches()
    writer = JournalWriter(
        folder,
        settings.shard,
        options,
        clock=clock.now,
        tell=lambda text: log.error("journal", what=text),
        oldest=open_batches.oldest,
    )
    if writer.cut:
        log.warning("the journal's end was incomplete and has been cut off", octets=writer.cut)
    key = b"" if settings.hash_key is None else settings.hash_key.get_secret_value().encode()
    made = Journaling(writer, router, all_=settings.all, open_batches=open_batches, hash_key=key)
    made.note_mappings()
    return made

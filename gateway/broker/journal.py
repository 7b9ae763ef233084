"""Journaling: which data batches keep for the journal, and which recipients report to it.

Nothing of this exists when the journal is off. When it is on, the dispatcher is a RecordingDispatcher, which
creates RecordedBatches, and gives a recorder to the recipients whose messages are recorded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

import structlog

from gateway import clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import ALONE, Dispatcher, DispatcherServices
from gateway.broker.redaction import Redactor, Redactors
from gateway.broker.routing import RoutingEntry
from gateway.containment import contained
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.model.address import Address
from gateway.model.batch import Batch, Receipt, Recipient, Recorder, Source, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import NO_TAKER, Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES
from gateway.model.spooled_bodies import Spooled, WithheldBody
from gateway.model.times import Monotonic
from gateway.settings.journal import Journal
from gateway.store.journal.bursts import Bursts
from gateway.store.journal.column_buffers import RowLabels
from gateway.store.journal.columns import WAS_UNROUTED
from gateway.store.journal.mappings import store_mappings
from gateway.store.journal.writer import JournalOptions, JournalWriter

log = structlog.get_logger()

# Options of the writer that are not passed on.
NO_OPTIONS: Final = {"enabled", "all", "unrouted", "path", "shard", "hash_key", "parquet"}
CONVERTER: Final = (sys.executable, "-P", "-m", "gateway.pipeline.journal.parquet_writer")
"""Command that writes complete segments as Parquet. It needs pyarrow, and is a process of its own."""

UNROUTED_LABELS: Final = RowLabels("", "", "", "", False)
UNROUTED_MAX: Final = 512  # messages without a target that are recorded together
SLOTS_UNROUTED: Final = 1 << 31  # more than a batch has
SLOTS_LAST: Final = (1 << 32) - UNROUTED_MAX


class OpenBatches:
    """Batches with unsettled messages, in order of arrival.

    The oldest determines up to which time the journal is complete. `waiting` is the time of arrival of
    messages whose rows wait to be recorded, or None.
    """

    __slots__ = ("_batches", "waiting")

    def __init__(self) -> None:
        self._batches: OrderedDict[RecordedBatch, None] = OrderedDict()
        self.waiting: Monotonic | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: RecordedBatch) -> None:
        """Add a batch, to which its first message was added."""
        self._batches[batch] = None

    def remove(self, batch: RecordedBatch) -> None:
        """Remove a batch whose messages are all settled."""
        self._batches.pop(batch, None)

    def oldest(self) -> Monotonic | None:
        """Return the time of arrival (loop-clock seconds) of the oldest unsettled message; None if none."""
        first = next(iter(self._batches), None)
        if first is None or (self.waiting is not None and self.waiting < first.received):
            return self.waiting
        return first.received


class RecordedBatch(Batch):
    """Batch that stores its messages as they were received, and is tracked until it is settled.

    A slot is the position of a message in the batch. `sources` has the message of each slot as received, or
    only its original address if a single recipient gets it, by a route that changes nothing else: so the
    message can be freed. `bare` counts these slots. If this batch passes on messages of another batch,
    `origins` has their slots in that batch. `bursts` has the messages that were published in bursts.
    `private` has, by slot, the redactor of fields that a route's `private` hides.
    """

    __slots__ = (
        "_before",
        "_open_batches",
        "_sent",
        "_settled_count",
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
        self._settled_count = 0
        self.sources: list[Message | Address] = []
        self.bare = 0
        self.origins: list[int] = []
        self.bursts: Bursts | None = None
        self.private: dict[int, Redactor] = {}

    def record_source(self, source: Message | Address) -> None:
        """Store the newest message as it was received (`source`), or only its original address."""
        sources = self.sources
        if not sources and self._open_batches is not None:
            self._open_batches.add(self)
        if not isinstance(source, Message):
            self.bare += 1
        sources.append(source)

    def record_burst(self, messages: list[Message], target: Address, *, changed: bool) -> None:
        """Store the newest messages, which form a burst, as they were received.

        `target` is the address that they have now. `changed` is True if they took a route, which changed the
        address.
        """
        if not self.sources and self._open_batches is not None:
            self._open_batches.add(self)
        self.sources += [messages[0].address] * len(messages) if changed else messages
        self.bare += len(messages) if changed else 0
        if self.bursts is None:
            self.bursts = Bursts()
        self.bursts.add(messages, target)

    def forwarded_batch(self, source: Source) -> RecordedBatch:
        """Return a batch in which a stage, such as a pause, passes on messages of this batch.

        The new batch records the slots that its messages had in this batch. `source` is the stage.
        """
        batch = RecordedBatch(source, self.received, before=self)
        batch.has_dead_letters = self.has_dead_letters
        return batch

    def add_from(self, origin: int, receipt: Receipt, placed: Iterable[tuple[Recipient, Message]]) -> int:
        """Add a message that was in slot `origin` of the batch from which this one passes messages on.

        `placed` has its recipients, each with the message as the recipient gets it. Return the message's slot
        in this batch.
        """
        self.origins.append(origin)
        if self._before is not None and self._before.sources:
            self.record_source(self._before.sources[origin])
            if origin in self._before.private:
                self.private[len(self.receipts)] = self._before.private[origin]
        return self.add(receipt, placed)

    def send(self) -> None:
        """Send each recipient its sub-batch, which the recipient may settle at once."""
        self._sent = True
        super().send()
        self._close()

    def _report_settled(self, done: list[int]) -> None:
        self._settled_count += len(done)
        self._close()
        super()._report_settled(done)

    def _close(self) -> None:
        # Before it is sent, others may follow those that were settled at once.
        if self._sent and self._settled_count == len(self.receipts) and self._open_batches is not None:
            self._open_batches.remove(self)


class RecipientRecorder:
    """Recorder that writes the messages settled by one recipient to the journal.

    An error loses rows of the journal, but does not affect the settlement.
    """

    __slots__ = ("_labels", "_redactor", "_writer")

    def __init__(self, writer: JournalWriter, labels: RowLabels, redactor: Redactor | None = None) -> None:
        """Create a recorder that writes rows with these labels.

        `redactor` is the route's; rows without a route are redacted by the rules for their message.
        """
        self._writer = writer
        self._labels = labels
        self._redactor = redactor

    def record(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Write messages of `sub_batch` that were settled with `outcome` to the journal. Never raises.

        `slots` are the positions of the messages in the sub-batch's batch.
        """
        try:
            self._record(sub_batch, messages, slots, outcome)
        except Exception as error:
            contained("journal", error)

    def _record(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Write settled messages of `sub_batch` to the journal, each as received and as delivered, redacted.

        `slots` are the positions of `messages` in the batch of `sub_batch`.
        """
        batch = sub_batch.batch
        if not isinstance(batch, RecordedBatch):  # the gateway's own: its messages are as received
            places = None if slots is sub_batch.slots and len(slots) == len(batch.receipts) else slots
            if self._redactor is not None:
                messages = [self._redactor(message) for message in messages]
            self._writer.record(self._labels, messages, outcome, batch.received, None, places)
            return
        came, origins, bursts = batch.sources, batch.origins, batch.bursts
        sources: list[Message | Address] | None = came or None
        origin_slots: list[int] | None = origins or None
        if bursts is not None and len(bursts.bodies) != len(slots):
            bursts = None
        if slots is not sub_batch.slots or len(slots) != len(
            batch.receipts
        ):  # not the whole batch, in its order
            sources = [came[slot] for slot in slots] if came else None
            origin_slots = [origins[slot] for slot in slots] if origins else slots
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
        alike = None if sources is None else _sources_of_one_type(sources, messages, mixed=mixed)
        self._writer.record(self._labels, messages, outcome, batch.received, alike, origin_slots, bursts)


def _without_content(message: Message) -> Message:
    """Return a copy of the message without properties, and with only the size of its body.

    Otherwise a client without the right to publish could write any content to the journal by messages that
    are refused.
    """
    return Message(
        message.address,
        WithheldBody(len(message.body)),
        NO_PROPERTIES,
        message.assurance,
        message.durable,
        message.retain,
        message.expires,
        message.hops,
        message.sender,
    )


def _redacted(message: Message, redactor: Redactor | None) -> Message:
    return message if redactor is None else redactor(message)


def _sources_of_one_type(
    sources: list[Message | Address], messages: list[Message], *, mixed: bool
) -> list[Message] | list[Address]:
    """Return `sources` (messages as received, or original addresses) as a list of one type only.

    If the batch has both types (`mixed`), each address is replaced by a copy of the message in `messages`
    with that address.
    """
    if mixed and Message in (kinds := set(map(type, sources))) and len(kinds) > 1:
        return [
            one if isinstance(one, Message) else _before_crossing(one, message)
            for one, message in zip(sources, messages, strict=True)
        ]
    return cast(list[Message] | list[Address], sources)


def _before_crossing(address: Address, message: Message) -> Message:
    """Return `message` as it was before it crossed a route that changed only its address.

    `address` is its original address.
    """
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


class UnroutedRows:
    """Messages without a target that wait to be written to the journal together.

    Messages that arrived together and have the same outcome are written in one piece, because a piece for
    each would cost as much as the message. They are in no batch; the journal numbers them from SLOTS_UNROUTED
    on, and `first_slot` is the number of the first waiting message.
    """

    __slots__ = ("first_slot", "messages", "outcome", "received")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.outcome = NO_TAKER
        self.received: Monotonic | None = None
        self.first_slot = SLOTS_UNROUTED

    def can_add(self, outcome: Outcome, received: Monotonic) -> bool:
        """Return True if a message with this outcome and time of arrival can join the collected ones."""
        return received == self.received and outcome == self.outcome and len(self.messages) < UNROUTED_MAX

    def take(self) -> tuple[list[Message], range]:
        """Remove and return the collected messages, with the numbers that the journal has given to them."""
        messages, self.messages = self.messages, []
        slots = range(self.first_slot, self.first_slot + len(messages))
        self.first_slot = SLOTS_UNROUTED if slots.stop > SLOTS_LAST else slots.stop
        return messages, slots


class JournalRecorder:
    """Connection between the dispatcher's recipients and the journal's writer.

    With `all`, routes without `journal` and messages that take no route are recorded, too; with `unrouted`,
    also messages without any target.
    """

    def __init__(
        self,
        writer: JournalWriter,
        router: Router,
        *,
        all_: bool,
        open_batches: OpenBatches,
        hash_key: bytes = b"",
        unrouted: bool = True,
    ) -> None:
        """Create the connection for the routes of `router`.

        `all_` also records routes without `journal`, and `unrouted` then messages without a target.
        `open_batches` are the unsettled batches, from which `writer` gets the time up to which the journal is
        complete. `hash_key` is the key with which private fields are hashed.
        """
        self.writer = writer
        self.router = router  # the one in force
        self._hash_key = hash_key
        self.redactors = Redactors(router.routes, hash_key, writer.options.body_bytes_max)
        self.redacts = bool(self.redactors)  # checked for each message
        self.open_batches = open_batches
        self.records_unrouted = all_ and unrouted
        self._all = all_
        self._unrouted = UnroutedRows()

    @property
    def redacted(self) -> int:
        """Number of recorded messages in which a field was hidden or changed."""
        return self.redactors.redacted

    @property
    def withheld_count(self) -> int:
        """Number of bodies that were hidden entirely, because they could not be parsed."""
        return self.redactors.withheld_count

    def recorder(self, route: Route | None, endpoint: str) -> RecipientRecorder | None:
        """Return the recorder of a recipient, or None if its messages are not recorded.

        Without a route, `endpoint` is where its messages are published.
        """
        if route is not None:
            if not self._is_journaled(route):
                return None
            return RecipientRecorder(self.writer, self._labels(route), self.redactors.of(route))
        if not self._all:
            return None
        labels = RowLabels("", "", endpoint, self.router.endpoints.get(endpoint, ""), False)
        return RecipientRecorder(self.writer, labels)

    def refuse(
        self, route: Route, message: Message, outcome: Outcome, received: Monotonic, slot: int
    ) -> None:
        """Record a message that a route refused; `slot` is its slot in the batch."""
        if self._is_journaled(route):
            redacted = _redacted(message, self.redactors.of(route))
            if outcome.reason is Reason.NOT_AUTHORIZED:
                redacted = _without_content(redacted)
            self.writer.refuse(self._labels(route), [redacted], outcome, received, [slot])

    def record_unrouted(self, message: Message, outcome: Outcome, received: Monotonic) -> None:
        """Collect a message that has no target, to be recorded later with others of the same outcome.

        `received` is its time of arrival in loop-clock seconds.
        """
        rows = self._unrouted
        if rows.messages and not rows.can_add(outcome, received):
            self.flush_unrouted()
        rows.messages.append(message)
        rows.outcome, rows.received = outcome, received
        self.open_batches.waiting = received
        if isinstance(message.body, Spooled):  # its file is in use for as long as its message is held
            self.flush_unrouted()

    def flush_unrouted(self) -> None:
        """Record the collected messages that have no target.

        An error loses rows of the journal, but does not affect the settlement.
        """
        rows = self._unrouted
        received = rows.received
        if received is None or not rows.messages:
            return
        messages, slots = rows.take()
        try:
            self.writer.refuse(UNROUTED_LABELS, messages, rows.outcome, received, slots)
        except Exception as error:
            contained("journal", error)
        self.open_batches.waiting = None

    def tick(self) -> None:
        """Record collected messages, and run the writer's timers; called regularly."""
        self.flush_unrouted()
        self.writer.tick()

    def close(self) -> None:
        """Record collected messages, and close the writer."""
        self.flush_unrouted()
        self.writer.close()

    def record_left(
        self, route: Route, messages: list[Message], outcome: Outcome, received: Monotonic
    ) -> None:
        """Record messages that have left the outbox of a route.

        An error loses rows of the journal, but does not affect the settlement.
        """
        if self._is_journaled(route):
            try:
                redactor = self.redactors.of(route)
                redacted = messages if redactor is None else [redactor(message) for message in messages]
                self.writer.record(self._labels(route), redacted, outcome, received)
            except Exception as error:
                contained("journal", error)

    def use(self, router: Router) -> None:
        """Put the mapping of `router` in force."""
        self.router = router
        self.redactors = Redactors(
            router.routes, self._hash_key, self.writer.options.body_bytes_max, self.redactors
        )
        self.redacts = bool(self.redactors)
        self.note_mappings()

    def note_mappings(self) -> None:
        """Store copies of the mapping files beside the journal, whose rows refer to their versions."""
        try:
            store_mappings(self.writer.folder, self.router.texts)
        except OSError as error:
            log.warning("mapping files not stored beside journal", error=error.strerror)

    def private(self, entry: RoutingEntry) -> Redactor | None:
        """Return the redactor for messages with this routing entry; None if no route hides anything."""
        if not self.redacts:
            return None
        return self.redactors.for_routes([branch.route for branch in entry.plan.branches])

    def _is_journaled(self, route: Route) -> bool:
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
    """Dispatcher that records the messages of its recipients in the journal."""

    def __init__(
        self,
        router: Router,
        dead_letters: DeadLetters,
        surroundings: DispatcherServices = ALONE,
        *,
        journaling: JournalRecorder,
    ) -> None:
        super().__init__(router, dead_letters, surroundings)
        self.journaling = journaling

    def batch(self, source: Source, received: Monotonic) -> RecordedBatch:
        """Return a new batch that keeps its messages as they were received, for the journal."""
        return RecordedBatch(source, received, self.journaling.open_batches)

    def use(self, router: Router) -> None:
        """Put the mapping of `router` in force, for dispatching and for the journal."""
        self.journaling.use(router)
        super().use(router)

    def publish(self, batch: Batch, entry: RoutingEntry, message: Message, receipt: Receipt) -> bool:
        """Publish a message, and keep it as it was received if it has recipients."""
        if not Dispatcher.publish(self, batch, entry, message, receipt):
            return False
        recorded = cast(RecordedBatch, batch)
        whole = (
            entry.target is None or message.retain or (message.property_set.has_reply_to and entry.plan.bare)
        )
        recorded.record_source(message if whole else entry.address)
        if self.journaling.redacts:
            self._keep_private(recorded, entry, 1)
        return True

    def publish_burst(
        self, batch: Batch, entry: RoutingEntry, messages: list[Message], receipts: list[Receipt]
    ) -> bool:
        """Publish messages that differ only in their bodies, and keep them as they were received.

        Returns False if they must be published one by one.
        """
        if not Dispatcher.publish_burst(self, batch, entry, messages, receipts):
            return False
        target = entry.address if entry.plan.route is None else entry.target
        assert target is not None
        recorded = cast(RecordedBatch, batch)
        recorded.record_burst(messages, target, changed=entry.plan.route is not None)
        if self.journaling.redacts:
            self._keep_private(recorded, entry, len(messages))
        return True

    def _keep_private(self, batch: RecordedBatch, entry: RoutingEntry, count: int) -> None:
        """Store the redactor of the newest `count` messages in the batch, if a route hides fields of them."""
        redactor = self.journaling.private(entry)
        if redactor is not None:
            end = len(batch.receipts)
            batch.private.update(dict.fromkeys(range(end - count, end), redactor))

    def _recorder(self, route: Route | None, endpoint: str) -> Recorder | None:
        return self.journaling.recorder(route, endpoint)

    def _refused(self, batch: Batch, slot: int, route: Route, message: Message, outcome: Outcome) -> None:
        self.journaling.refuse(route, message, outcome, batch.received, slot)

    def record_unrouted(
        self, entry: RoutingEntry, message: Message, outcome: Outcome, received: Monotonic
    ) -> None:
        """Record the outcome of a message without a target, without fields that routes declare private."""
        journaling = self.journaling
        if not journaling.records_unrouted:
            return
        try:
            if journaling.redacts:
                plan = entry.plan
                if plan.namespace is None and not plan.branches:  # refused before it was routed
                    entry = self.entry(message.sender.endpoint, None, message.address)
                message = _redacted(message, journaling.private(entry))
            if outcome.verdict is Verdict.REJECTED:
                if outcome.reason is not Reason.NO_ROUTE:
                    message = _without_content(message)
                outcome = outcome._replace(text=f"{WAS_UNROUTED}: {outcome.text}")
            journaling.record_unrouted(message, outcome, received)
        except Exception as error:
            contained("journal", error)


def open_journal(settings: Journal, folder: Path, router: Router) -> JournalRecorder:
    """Open the journal in `folder`. Raises JournalError if it cannot be written."""
    converter = CONVERTER if settings.parquet and find_spec("pyarrow") is not None else ()
    options = JournalOptions(**settings.model_dump(exclude=NO_OPTIONS), converter=converter)
    open_batches = OpenBatches()
    writer = JournalWriter(
        folder,
        settings.shard,
        options,
        clock=clock.now,
        oldest=open_batches.oldest,
    )
    if writer.cut_bytes:
        log.warning("journal end incomplete, removed", removed_bytes=writer.cut_bytes)
    if writer.lost_rows:
        log.warning("damaged journal rows recorded as lost", rows=writer.lost_rows)
    key = b"" if settings.hash_key is None else settings.hash_key.get_secret_value().encode()
    made = JournalRecorder(
        writer,
        router,
        all_=settings.all,
        open_batches=open_batches,
        hash_key=key,
        unrouted=settings.unrouted,
    )
    made.note_mappings()
    return made

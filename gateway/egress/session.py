"""What links to brokers with queues have in common: everything but their protocol's words.

Outwards a link session is a namespace whose only sink is what the link publishes; inwards it is the source
of the batches of messages that it consumed. A receipt is (consumer, tag, message). What a remote broker sends
takes routes only: its own subscribers have it already.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from gateway import clock
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.pressure import Held
from gateway.broker.routing import OneSink, RoutingEntry
from gateway.egress.confirming import WAITING_FULL, ConfirmedSink
from gateway.egress.held_back import HeldBack, line_of
from gateway.egress.link import LinkStatus
from gateway.model.batch import Batch
from gateway.model.message import Message, Sender
from gateway.model.outcome import NO_TAKER, Outcome, Reason
from gateway.model.times import Monotonic
from gateway.settings import Limits
from gateway.settings.endpoints import Link as LinkSettings

Entries = dict[bytes, RoutingEntry]


def message_of(receipt: tuple[Any, int, Message]) -> Message:
    """Return the message of a receipt."""
    return receipt[2]


class LinkConsumer(Protocol):
    """A consumer, as its link session sees it."""

    accepted: list[int]  # tags to acknowledge when the wake-up ends
    stopping: bool  # its queue is not wanted any more

    @property
    def live(self) -> bool:
        """Its connection can still be answered."""

    def wake(self) -> None:
        """Something is `accepted` now."""


class ConsumingConnection(Protocol):
    """A connection, as its link session sees it."""

    @property
    def outstanding(self) -> int:
        """Messages that it has brought and not answered."""


ConnectionT = TypeVar("ConnectionT", bound=ConsumingConnection)
ConsumerT = TypeVar("ConsumerT", bound=LinkConsumer)
SinkT = TypeVar("SinkT", bound=ConfirmedSink)


class QueueLinkSession(OneSink, Generic[ConnectionT, ConsumerT, SinkT]):
    """What the link `name` says to its broker, and hears."""

    def __init__(
        self,
        name: str,
        settings: LinkSettings,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        publisher: SinkT,
        *,
        client_id: str,
    ) -> None:
        super().__init__(publisher)
        self.publisher = publisher
        self.name = name
        self.settings = settings
        self.dispatcher = dispatcher
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.client_id = client_id
        self.held: Held[tuple[ConsumerT, int, Message]] = Held(lambda: dispatcher.disk_healthy())
        self.held_back: HeldBack[tuple[ConsumerT, int, Message]] = HeldBack(message_of)
        self._sending_held_back = False
        self.batch = self.new_batch()
        self._connection: ConnectionT | None = None
        self._caches: dict[str, Entries] = {}
        self._generation = -1

    # What the link asks.

    @property
    def idle(self) -> bool:
        """Nothing waits for the broker, and nothing that it sent waits for us."""
        return self.idle_but(0)

    def idle_but(self, held: int) -> bool:
        """The same, but for so many of the messages that it sent."""
        connection = self._connection
        nothing_of_ours = self.publisher.idle and not len(self.batch)
        return nothing_of_ours and (
            connection is None or connection.outstanding <= held + len(self.held_back)
        )

    @property
    def unconfirmed(self) -> int:
        """Messages for the broker that it has not confirmed, sent or not."""
        return self.publisher.waiting_messages + self.publisher.in_flight

    def new_batch(self) -> Batch:
        """Return an empty batch of this source, which hears by which routes to try again."""
        batch = self.dispatcher.batch(self, clock.now())
        batch.undone = self.held_back.note_undone
        return batch

    def begun_batch(self) -> Batch:
        """Return the batch of this wake-up: before its first message, it is as old as the one before."""
        batch = self.batch
        if not batch.receipts:
            batch.received = clock.now()
        return batch

    def turn_done(self) -> None:
        """Send on the batch that this wake-up has gathered."""
        batch = self.batch
        if len(batch):
            self.batch = self.new_batch()
            batch.send()

    def tick(self, now: float) -> None:
        """Try again the messages that wait for the disk, once it has recovered, or for a target."""
        if self.dispatcher.memory.short:
            return
        for receipt in self.held.due():
            if not receipt[0].live:
                self.held_back.settled(receipt, by_target=False)
            elif not self.held_back.behind(self.line_of(receipt), receipt):
                self.retry(receipt, self.begun_batch())
        self.send_held_back(Monotonic(now))

    # What batches ask: this is their source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """A link goes on reading, for its own confirms come in between; it is refused and tries again."""
        return []

    @abstractmethod
    def settle(
        self,
        receipts: list[tuple[ConsumerT, int, Message]],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """Acknowledge what was accepted; refuse, or give back later, what was not."""

    def accept(self, receipts: list[tuple[ConsumerT, int, Message]]) -> None:
        """Have these acknowledged when the wake-up ends."""
        for consumer, tag, _ in receipts:
            accepted = consumer.accepted
            if not accepted:
                consumer.wake()
            accepted.append(tag)

    def released(self, receipt: tuple[ConsumerT, int, Message], outcome: Outcome) -> None:
        """Hold back a message that was released, until its target or our own disk may accept it. When memory
        is short, or its queue is not wanted any more, it goes back to its broker."""
        consumer = receipt[0]
        if outcome is LOW_ON_MEMORY or not consumer.live or consumer.stopping:
            self.held_back.settled(receipt, by_target=False)
            self.give_back_later(receipt)
        elif outcome.reason is Reason.STORE and not self.held_back.is_tried(receipt):
            self.held.refused(receipt)
        else:
            self.held_back.released(self.line_of(receipt), receipt, clock.now())

    @abstractmethod
    def give_back_later(self, receipt: tuple[ConsumerT, int, Message]) -> None:
        """Give a message back to its broker after a moment."""

    def line_of(self, receipt: tuple[ConsumerT, int, Message]) -> Hashable:
        """Return what a message shares with those that wait for the same routes: they keep their order."""
        consumer, _, message = receipt
        entry = self.dispatcher.entry(self.name, None, message.address, self.queue_of(consumer))
        return consumer, line_of(entry)

    def is_behind(self, entry: RoutingEntry, receipt: tuple[ConsumerT, int, Message]) -> bool:
        """Hold back a new message if others wait for the disk, or for the same routes. Return False if it may
        go on its way."""
        if self.held.on:
            self.held.behind(receipt)
            return True
        return self.held_back.behind((receipt[0], line_of(entry)), receipt)

    def let_others_follow(self, receipts: list[tuple[ConsumerT, int, Message]]) -> None:
        """Note that these messages have been accepted, or refused for good: others may be tried again."""
        if self.held_back.on:
            for receipt in receipts:
                self.held_back.settled(receipt)
            self.send_held_back(clock.now())

    def send_held_back(self, now: Monotonic) -> None:
        """Send on their way what has waited long enough, in a batch of its own: this may be called while
        another is being filled, and by the settlement of what it has sent."""
        if self._sending_held_back or not self.held_back.on:
            return
        self._sending_held_back = True
        try:
            while due := self.held_back.due(now):
                batch = self.new_batch()
                for receipt in due:
                    if receipt[0].live and not receipt[0].stopping:
                        self.retry(receipt, batch)
                    else:
                        self.released(receipt, WAITING_FULL)
                batch.send()
        finally:
            self._sending_held_back = False

    def retry(self, receipt: tuple[ConsumerT, int, Message], batch: Batch) -> None:
        """Publish a message that was released once more, by the routes that have not accepted it."""
        if self.dispatcher.memory.short:
            self.settle([receipt], {0: LOW_ON_MEMORY}, clock.now())
            return
        consumer, _, message = receipt
        entry = self.dispatcher.entry(self.name, None, message.address, self.queue_of(consumer))
        entry = self.held_back.left_of(receipt, entry)
        for branch in entry.plan.branches:
            branch.route.retried += 1
        if not self.dispatcher.publish(batch, entry, message, receipt):
            self.unclaimed(entry, receipt)

    @abstractmethod
    def queue_of(self, consumer: ConsumerT) -> str:
        """By which queue routes know what a consumer brings; "": by its address alone."""

    def unclaimed(self, entry: RoutingEntry, receipt: tuple[ConsumerT, int, Message]) -> None:
        """No route takes the message: record that, and answer for it."""
        self.dispatcher.record_unrouted(entry, receipt[2], NO_TAKER, self.begun_batch().received)
        self.answer_unclaimed(entry, receipt)

    @abstractmethod
    def answer_unclaimed(self, entry: RoutingEntry, receipt: tuple[ConsumerT, int, Message]) -> None:
        """Be rid of a message that no route takes."""

    # What a connection asks.

    def caches(self) -> dict[str, Entries]:
        """Where addresses lead, by queue or service; emptied when something has changed since."""
        if self._generation != self.dispatcher.generation:
            self._generation = self.dispatcher.generation
            self._caches.clear()
        return self._caches

    def forget_entries(self) -> None:
        """Memory is short: connections hold these very entries."""
        for entries in self._caches.values():
            entries.clear()

    def disconnected(self, connection: ConnectionT, why: str) -> None:
        """A connection is gone; what it had not confirmed is sent again over the next one."""
        if self._connection is connection:
            self._connection = None
            self.held.give_up()
            self.held_back.give_up()
        self.publisher.close()
        self.status.went_down(why)

"""Protocol-independent base of link sessions for brokers with queues.

For outgoing messages a link session is a namespace whose only sink is the link's publisher. For incoming ones
it is the source of the batches of consumed messages. A receipt is (consumer, tag, message). Messages from a
remote broker go to routes only: that broker has already sent them to its own subscribers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import structlog

from gateway import clock
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.pressure import HeldReceipts
from gateway.broker.routing import OneSink, RoutingEntry
from gateway.egress.confirms import WAITING_FULL, ConfirmedSink
from gateway.egress.held_back import EXPIRED, ROUTE_REMOVED, TOO_LONG, HeldBack, RetryKey, route_names_of
from gateway.egress.link import LinkStatus
from gateway.model.batch import Batch
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import NO_TAKER, Outcome, Reason
from gateway.model.times import Monotonic
from gateway.settings import Limits
from gateway.settings.endpoints import LinkSettings as LinkSettings

log = structlog.get_logger(limited=True)

Entries = dict[bytes, RoutingEntry]


def message_of(receipt: tuple[Any, int, Message]) -> Message:
    """Return the message of a receipt (consumer, tag, message)."""
    return receipt[2]


class LinkConsumer(Protocol):
    """Interface of a consumer that its link session uses."""

    accepted: list[int]  # tags to acknowledge when the pass of the event loop ends
    stopping: bool  # True if the queue is no longer wanted

    @property
    def live(self) -> bool:
        """True while the connection can send acknowledgements."""

    def wake(self) -> None:
        """Cause the acknowledgements in `accepted` to be sent; called when the first one is added."""


class ConsumingConnection(Protocol):
    """Interface of a connection that its link session uses."""

    @property
    def outstanding(self) -> int:
        """Number of received messages that are not settled."""


ConnectionT = TypeVar("ConnectionT", bound=ConsumingConnection)
ConsumerT = TypeVar("ConsumerT", bound=LinkConsumer)
SinkT = TypeVar("SinkT", bound=ConfirmedSink)


class QueueLinkSession(OneSink, Generic[ConnectionT, ConsumerT, SinkT]):
    """Session of the link `name` to a broker with queues."""

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
        publisher.share_among(dispatcher.quotas)
        self.name = name
        self.settings = settings
        self.dispatcher = dispatcher
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.client_id = client_id
        self.held_receipts: HeldReceipts[tuple[ConsumerT, int, Message]] = HeldReceipts(
            lambda: dispatcher.disk_healthy()
        )
        self.held_back: HeldBack[tuple[ConsumerT, int, Message]] = HeldBack(
            message_of, secs_max=settings.retry_secs_max
        )
        self._sending_held_back = False
        # Messages that wait for space among the dead letters, with the routes whose dead letters they become.
        self._burials: list[tuple[tuple[ConsumerT, int, Message], Outcome, tuple[str, ...]]] = []
        self.batch = self.new_batch()
        self._connection: ConnectionT | None = None
        self._caches: dict[str, Entries] = {}
        self._generation = -1

    # Interface for the link.

    @property
    def idle(self) -> bool:
        """True if no message waits for the broker, and every received one is settled or in `held_back`."""
        return self.idle_but(0)

    def idle_but(self, held_count: int) -> bool:
        """Return True if the session is idle, except for at most `held_count` unsettled received messages.

        Messages in `held_back` are not counted.
        """
        connection = self._connection
        nothing_of_ours = self.publisher.idle and not len(self.batch)
        return nothing_of_ours and (
            connection is None or connection.outstanding <= held_count + len(self.held_back)
        )

    @property
    def unconfirmed(self) -> int:
        """Number of messages for the broker, sent or waiting, that it has not confirmed."""
        return self.publisher.waiting_messages + self.publisher.in_flight

    def new_batch(self) -> Batch:
        """Return an empty batch of this source, which records the routes that have not accepted a message."""
        batch = self.dispatcher.batch(self, clock.now())
        batch.returned = self.held_back.record_remaining_routes
        batch.redelivered = self.is_redelivered
        return batch

    def is_redelivered(self, receipt: tuple[ConsumerT, int, Message]) -> bool:
        """Return True if the broker delivers a message again because its consumer has ended.

        A broker that has restarted may have lost a message that is not durable.
        """
        return not receipt[0].live and receipt[2].durable

    def begun_batch(self) -> Batch:
        """Return the batch of this pass of the event loop, to which a message will be added.

        The first message sets the batch's time of receipt.
        """
        batch = self.batch
        if not batch.receipts:
            batch.received = clock.now()
        return batch

    def end_turn(self) -> None:
        """Publish the batch collected in this pass of the event loop."""
        batch = self.batch
        if len(batch):
            self.batch = self.new_batch()
            batch.send()

    def tick(self, now: float) -> None:
        """Retry messages that wait in the session for a target or the disk, and dead letters not stored yet.

        A message waits because a target has refused it for now, or until the local disk works. Messages for
        the broker that have expired are settled. `now` is in loop-clock seconds.
        """
        self.publisher.settle_expired()
        burials, self._burials = self._burials, []
        for receipt, outcome, routes in burials:
            if receipt[0].stopping:
                self.requeue_later(receipt)
            elif receipt[0].live and self.dispatcher.dead_letters.has_room_for([receipt[2]]):
                self._store_dead_letters(receipt, outcome, routes)
            elif receipt[0].live:
                self._burials.append((receipt, outcome, routes))
        if self.dispatcher.memory.short:
            return
        for receipt in self.held_receipts.take_due():
            if not receipt[0].live:
                self.held_back.record_settled(receipt, by_target=False)
            elif not self.held_back.hold_if_behind(self.retry_key_of(receipt), receipt, Monotonic(now)):
                self.retry(receipt, self.begun_batch())
        for receipt, routes in self.held_back.overdue(Monotonic(now), self._entry_of):
            if receipt[0].stopping:
                self.requeue_later(receipt)
            elif receipt[0].live:
                self.store_dead_letter(receipt, TOO_LONG, routes)
        self.send_held_back(Monotonic(now))

    # Interface for batches: the session is their source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return an empty list: a link continues to read when a queue is full.

        Confirms arrive between the messages, so reading must not stop; refused messages are retried instead.
        """
        return []

    def settle(
        self,
        receipts: list[tuple[ConsumerT, int, Message]],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """Acknowledge accepted messages, and reject, store or later requeue the others.

        `receipts` has (consumer, delivery tag, message) of each message. `refused` maps an index in
        `receipts` to the outcome of a message that was not accepted. `received` is when the batch was
        received, in loop-clock seconds.
        """
        if refused:
            for at, outcome in refused.items():
                self.settle_refused(receipts[at], outcome)
            receipts = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        self.accept(receipts)
        self.stats.accepted_messages += len(receipts)
        self.retry_followers(receipts)

    @abstractmethod
    def settle_refused(self, receipt: tuple[ConsumerT, int, Message], outcome: Outcome) -> None:
        """Reject a message that was not accepted to its broker, make it a dead letter, or retry it later."""

    def accept(self, receipts: list[tuple[ConsumerT, int, Message]]) -> None:
        """Acknowledge messages, given as (consumer, tag, message), when this event-loop pass ends."""
        for consumer, tag, _ in receipts:
            accepted = consumer.accepted
            if not accepted:
                consumer.wake()
            accepted.append(tag)

    def handle_release(self, receipt: tuple[ConsumerT, int, Message], outcome: Outcome) -> None:
        """Store a message that was released by a target or the local disk, to be retried later.

        If memory is short, or no route needs its queue any more, the message is requeued at its broker
        instead. `receipt` is (consumer, delivery tag, message); `outcome` is the reason.
        """
        consumer = receipt[0]
        if outcome is LOW_ON_MEMORY or not consumer.live or consumer.stopping:
            self.held_back.record_settled(receipt, by_target=False)
            self.requeue_later(receipt)
        elif outcome.reason is Reason.STORE and not self.held_back.is_tried(receipt):
            self.held_back.note_routes(receipt, route_names_of(self._entry_of(receipt)))
            self.held_receipts.add_refused(receipt)
        else:
            self.held_back.hold(self.retry_key_of(receipt), receipt, clock.now())

    @abstractmethod
    def requeue_later(self, receipt: tuple[ConsumerT, int, Message]) -> None:
        """Requeue a message at its broker after a short delay."""

    def store_dead_letter(
        self,
        receipt: tuple[ConsumerT, int, Message],
        outcome: Outcome,
        routes: tuple[str, ...] = ("",),
    ) -> None:
        """Store a message as a dead letter, and acknowledge it when the dead letter is on disk.

        `routes` has the names of the routes that have not accepted it; each gets a dead letter of its own.
        While dead letters cannot be stored for lack of space, the message stays unacknowledged.
        """
        self.stats.refuse(outcome)
        self._store_dead_letters(receipt, outcome, routes)

    def _store_dead_letters(
        self, receipt: tuple[ConsumerT, int, Message], outcome: Outcome, routes: tuple[str, ...]
    ) -> None:
        def wait(full: Outcome) -> None:
            self._burials.append((receipt, outcome, routes))

        if len(routes) > 1:
            then = partial(self._store_dead_letters, receipt, outcome, routes[1:])
        else:
            then = partial(self.settle_dead_letter, receipt, outcome)
        self.dispatcher.dead_letters.add([receipt[2]], routes[0], outcome, then, full=wait)

    def settle_dead_letter(self, receipt: tuple[ConsumerT, int, Message], outcome: Outcome) -> None:
        """Acknowledge a message whose dead letter is stored."""
        self.accept([receipt])

    def _entry_of(self, receipt: tuple[ConsumerT, int, Message]) -> RoutingEntry:
        consumer, _, message = receipt
        return self.dispatcher.entry(self.name, None, message.address, self.queue_of(consumer))

    def retry_key_of(self, receipt: tuple[ConsumerT, int, Message]) -> RetryKey:
        """Return the key under which a message waits in order for a retry: its consumer and its routes."""
        return receipt[0], route_names_of(self._entry_of(receipt))

    def hold_if_behind(self, entry: RoutingEntry, receipt: tuple[ConsumerT, int, Message]) -> bool:
        """Store a new message behind others that wait for the disk or for the same routes. Return True.

        Return False if no others wait, so that the message may be published now. `entry` is its routing
        entry; a message that no route accepts is never stored.
        """
        if not (entry.plan.branches or entry.plan.recipients):
            return False
        if self.held_receipts.on:
            self.held_back.note_routes(receipt, route_names_of(entry))
            self.held_receipts.append(receipt)
            return True
        return self.held_back.hold_if_behind((receipt[0], route_names_of(entry)), receipt, clock.now())

    def retry_followers(self, receipts: list[tuple[ConsumerT, int, Message]]) -> None:
        """Record that these messages are settled, and retry messages that waited behind them."""
        if self.held_back.on:
            for receipt in receipts:
                self.held_back.record_settled(receipt)
            self.send_held_back(clock.now())

    def send_held_back(self, now: Monotonic) -> None:
        """Retry the messages in `held_back` whose wait is over, in batches of their own.

        This may be called while another batch is being filled, and by the settlement of its own batches.
        `now` is in loop-clock seconds.
        """
        if self._sending_held_back or not self.held_back.on:
            return
        self._sending_held_back = True
        try:
            while receipts := self.held_back.take_due(now):
                batch = self.new_batch()
                for receipt in receipts:
                    if receipt[0].live and not receipt[0].stopping:
                        self.retry(receipt, batch)
                    else:
                        self.handle_release(receipt, WAITING_FULL)
                batch.send()
        finally:
            self._sending_held_back = False

    def retry(self, receipt: tuple[ConsumerT, int, Message], batch: Batch) -> None:
        """Publish a message again that targets have refused for now, to the routes that have not accepted it.

        If the message has expired, store a dead letter for each of these routes instead.
        """
        if self.dispatcher.memory.short:
            self.settle([receipt], {0: LOW_ON_MEMORY}, clock.now())
            return
        if NEVER < receipt[2].expires <= clock.utc():
            routes = self.held_back.remaining_routes(receipt, self._entry_of(receipt))
            self.held_back.record_settled(receipt, by_target=False)
            self.store_dead_letter(receipt, EXPIRED, routes)
            return
        entry = self.held_back.remaining_entry(receipt, self._entry_of(receipt))
        for branch in entry.plan.branches:
            branch.route.retried += 1
        if self.dispatcher.publish(batch, entry, receipt[2], receipt):
            return
        if entry.plan.branches:
            self.handle_unrouted(entry, receipt)
        else:
            self.handle_removed_routes(receipt)

    @abstractmethod
    def queue_of(self, consumer: ConsumerT) -> str:
        """Return the queue by which routes select a consumer's messages; "" if they use only the address."""

    def handle_removed_routes(self, receipt: tuple[ConsumerT, int, Message]) -> None:
        """Store a message as dead letters, because a reload has removed the routes that it waited for."""
        routes = self.held_back.remaining_routes(receipt, self._entry_of(receipt))
        self.retry_followers([receipt])
        self.store_dead_letter(receipt, ROUTE_REMOVED, routes)

    def handle_unrouted(self, entry: RoutingEntry, receipt: tuple[ConsumerT, int, Message]) -> None:
        """Record that no route accepts a message, and settle it. `entry` is its routing entry."""
        self.dispatcher.record_unrouted(entry, receipt[2], NO_TAKER, self.begun_batch().received)
        self.settle_unrouted(entry, receipt)

    @abstractmethod
    def settle_unrouted(self, entry: RoutingEntry, receipt: tuple[ConsumerT, int, Message]) -> None:
        """Settle a message that no route accepts. `entry` is its routing entry."""

    # Interface for the connection.

    def log_unusable(self, kind: str, name: str, why: str) -> None:
        """Log that an object at the broker that routes need cannot be used, and why."""
        log.warning("broker object unusable, retrying", link=self.name, kind=kind, name=name, why=why)

    def caches(self) -> dict[str, Entries]:
        """Return the caches of routing entries by queue or service; empty them if routes have changed."""
        if self._generation != self.dispatcher.generation:
            self._generation = self.dispatcher.generation
            self._caches.clear()
        return self._caches

    def forget_entries(self) -> None:
        """Clear the cached routing entries, because memory is short.

        The dictionaries remain, because connections refer to them.
        """
        for entries in self._caches.values():
            entries.clear()

    def disconnected(self, connection: ConnectionT, why: str) -> None:
        """Forget a connection that was lost for the reason `why`.

        Its unconfirmed messages are sent again on the next connection.
        """
        if self._connection is connection:
            self._connection = None
            self.held_receipts.take_all()
            self.held_back.take_all()
            self.dispatcher.pauses.drop_redelivered()
        self.publisher.close()
        self.status.mark_down(why)

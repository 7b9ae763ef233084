"""Messages from the remote MQTT broker: the source of a link's batches.

A receipt is (connection, packet id, QoS, message). An accepted message is acknowledged only on the connection
that delivered it: a QoS 1 message whose connection was lost is redelivered by the broker. A QoS 2 message,
however, belongs to the session: its packet id is stored until PUBREL, over reconnects, so that the message is
accepted once. A broker that lost the session starts a new epoch, in which the old ids are invalid.

A message that a target has returned to be retried waits in this process without acknowledgement and is
retried; later messages for the same routes wait behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from gateway import clock
from gateway.broker.dead_letters.letters import PROPERTIES_LOST, with_loss
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.pressure import HeldReceipts
from gateway.broker.routing import RoutingEntry
from gateway.egress.held_back import EXPIRED, ROUTE_REMOVED, TOO_LONG, HeldBack, RetryKey, route_names_of
from gateway.errors import RemoteProtocolError
from gateway.model.batch import Batch
from gateway.model.caches import make_room
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import NO_TAKER, Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES, PropertySet
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.data_types import decode_topic, quota_exceeded
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.reason_codes import publish_refused
from gateway.protocols.mqtt.runs import PublishRow
from gateway.protocols.mqtt.spec import PacketType, Version
from gateway.protocols.mqtt.translate import publish_essentials
from gateway.settings import Limits
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

TOPIC_BYTES_MAX: Final = 1_024  # a longer topic is not cached
OVERSIZED: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "larger than limits.message_bytes_max")

MALFORMED: Final = Outcome(Verdict.REJECTED, Reason.MALFORMED, "the topic or a property is malformed")


class DeliveringConnection:
    """Connection of a link on which the broker delivers messages.

    `epoch` identifies the broker's session to which the connection belongs. `pubacks` and `pubrecs` collect
    acknowledgements until the pass of the event loop ends.
    """

    def __init__(self, stream: Stream, machine: ClientConnection, sender: Sender) -> None:
        self.stream = stream
        self.machine = machine
        self.sender = sender
        self.epoch = 0
        self.pubacks: list[int] = []
        self.pubrecs: list[int] = []

    def refuse(self, kind: PacketType, packet_id: int, reason: int, text: str) -> None:
        """Send a negative PUBACK or PUBREC (`kind`) with a reason code and reason string (MQTT 5)."""
        if not self.is_ending:
            self.machine.send_ack(kind, packet_id, reason, text)
            self.stream.mark_for_flush()

    @property
    def is_ending(self) -> bool:
        """True if the connection has ended or is ending."""
        return self.stream.closed or self.stream.ending


Receipt = tuple[DeliveringConnection, int, int, Message]


def _message_of(receipt: Receipt) -> Message:
    return receipt[3]


class MqttLinkReceiver:
    """Receiver of one link, which publishes the broker's messages to the link's routes.

    `settled` is called after each settlement.
    """

    def __init__(
        self,
        name: str,
        dispatcher: Dispatcher,
        limits: Limits,
        stats: LinkStats,
        settled: Callable[[], None],
        *,
        retry_secs_max: float | None = None,
    ) -> None:
        self.epoch = 0
        self.unsettled = 0
        self._name = name
        self._dispatcher = dispatcher
        self._held_back: HeldBack[Receipt] = HeldBack(_message_of, secs_max=retry_secs_max)
        self._sending_held_back = False
        self.batch = self._new_batch()
        self._limits = limits
        self._stats = stats
        self._settled = settled
        self._connection: DeliveringConnection | None = None
        self._entries: dict[bytes, RoutingEntry] = {}
        self._generation = -1
        # Packet ids of QoS 2 before PUBREL; True if accepted, so that PUBREC may be sent.
        self._used_packet_ids: dict[int, bool] = {}
        # Messages that wait for space among the dead letters, with the routes whose dead letters they become.
        self._burials: list[tuple[Receipt, Outcome, tuple[str, ...]]] = []
        self._held_receipts: HeldReceipts[Receipt] = HeldReceipts(lambda: dispatcher.disk_healthy())

    def attach(self, connection: DeliveringConnection, *, present: bool) -> None:
        """Receive from a new connection. `present` is True if the broker resumed the session.

        If `present` is False, the stored packet ids of QoS 2 messages are forgotten.
        """
        if not present:
            self.epoch += 1
            self._used_packet_ids.clear()
        connection.epoch = self.epoch
        self._connection = connection
        self._dispatcher.pauses.drop_redelivered()

    def detach(self) -> None:
        """Forget the connection, because it is lost."""
        self._connection = None

    @property
    def held_back_count(self) -> int:
        """Number of unacknowledged messages that wait until a target accepts them."""
        return len(self._held_back)

    # Interface for the connection.

    def publish_packets(  # noqa: C901, PLR0912, PLR0915 - every message
        self, connection: DeliveringConnection, rows: list[PublishRow], now: float
    ) -> list[PublishRow]:
        """Add received PUBLISH packets to the batch, which is sent when the pass of the event loop ends.

        Return the packets that are left for a later time slice of the connection, if many have topics that
        are not cached. `now` is in loop-clock seconds.
        """
        dispatcher = self._dispatcher
        if self._generation != dispatcher.generation:
            self._generation = dispatcher.generation
            self._entries.clear()
        batch = self.batch
        if not batch.receipts:
            batch.received = clock.now()
        echoes = None
        if connection.machine.version is not Version.V5:
            rows = self._within_limits(connection, rows)
            echoes = dispatcher.echoes if dispatcher.echoes.has_sent else None
        entries = self._entries
        publish = dispatcher.publish
        sender = connection.sender
        behind, waits = self._held_receipts.on, self._held_back.on
        memory = dispatcher.memory
        raw_max, properties_max = self._limits.properties_bytes_max, self._limits.properties_max
        in_turn = iter(rows)
        postponed: list[PublishRow] = []
        for flags, topic, packet_id, raw, body in in_turn:
            entry = entries.get(topic)
            if entry is None and connection.stream.is_turn_spent():
                postponed = [(flags, topic, packet_id, raw, body), *in_turn]
                break
            qos = flags >> 1 & 3
            properties: PropertySet = NO_PROPERTIES
            expires, hops = NEVER, 0
            try:
                if entry is None:
                    entry = self._resolve(topic)
                if raw:
                    if len(raw) > raw_max:
                        raise quota_exceeded(f"{len(raw)} bytes of properties")
                    parsed = publish_essentials(raw, properties_max)
                    properties, hops = parsed, parsed.hops
                    if parsed.expiry is not None:
                        expires = clock.utc() + parsed.expiry
                elif echoes is not None:
                    hops = echoes.hops(topic, body, sender, now)
            except RemoteProtocolError as error:
                self._reject_malformed(
                    connection, (flags, topic, packet_id, raw, body), MALFORMED._replace(text=str(error))
                )
                continue
            message = Message(
                entry.address,
                body,
                properties,
                qos,
                DURABLE_AT_QOS[qos],
                flags & 1 == 1,
                expires,
                hops,
                sender,
            )
            receipt: Receipt | None = None
            if qos:
                if qos == 2 and not self._record_packet_id(connection, packet_id):
                    continue
                self.unsettled += 1
                receipt = (connection, packet_id, qos, message)
                if behind and entry.plan.branches:
                    self._held_back.note_routes(receipt, route_names_of(entry))
                    self._held_receipts.append(receipt)
                    continue
                if (
                    waits
                    and entry.plan.branches
                    and self._held_back.hold_if_behind((None, route_names_of(entry)), receipt, clock.now())
                ):
                    continue
                if memory.short:
                    self.settle([receipt], {0: LOW_ON_MEMORY}, clock.now())
                    continue
            elif memory.is_scarce:
                memory.refused += 1
                self._stats.refuse(LOW_ON_MEMORY)
                continue
            if not publish(batch, entry, message, receipt):
                dispatcher.record_unrouted(entry, message, NO_TAKER, batch.received)
                if receipt is not None:
                    self._accept(receipt)
        self._stats.messages_in += len(rows) - len(postponed)
        return postponed

    def release(self, rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Process PUBRELs, given as packet ids with their reason codes: free the packet ids of QoS 2.

        Return the packet ids that were in use, and those that were not.
        """
        known_ids: list[int] = []
        strangers: list[int] = []
        for packet_id, _ in rows:
            is_known = self._used_packet_ids.pop(packet_id, None) is not None
            (known_ids if is_known else strangers).append(packet_id)
        return known_ids, strangers

    def _new_batch(self) -> Batch:
        """Return an empty batch.

        Its routes store a dead letter for a rejected message if the rejection cannot be reported to the
        broker.
        """
        batch = self._dispatcher.batch(self, clock.now())
        batch.cannot_notify = self._cannot_notify_source
        batch.returned = self._record_remaining_routes
        batch.rejected = self._note_rejected
        batch.redelivered = self._is_certainly_redelivered
        return batch

    def _record_remaining_routes(self, receipt: Receipt | None, routes: frozenset[str]) -> None:
        if receipt is not None:
            self._held_back.record_remaining_routes(receipt, routes)

    def _note_rejected(self, receipt: Receipt | None, routes: frozenset[str]) -> None:
        """Record the routes that rejected a message if the rejection cannot be reported to the broker."""
        if receipt is not None and self._connection_for_reply(receipt) is None:
            self._held_back.note_routes(receipt, sorted(routes))

    def _cannot_notify_source(self, receipt: Receipt | None, retries: bool, outcome: Outcome) -> bool:
        """Return True if the rejection of a message cannot be reported to the broker.

        The route then has to store the message. `retries` and `outcome`, which `CannotNotify` of
        gateway.model.batch requires, are not used.
        """
        return receipt is not None and self._connection_for_reply(receipt) is None

    def _connection_for_reply(self, receipt: Receipt) -> DeliveringConnection | None:
        """Return the connection on which the broker can be notified that a message was rejected, or None.

        Only MQTT 5 reports rejections. For QoS 1 it is the connection that delivered the message, because the
        broker delivers the message again on a later one. The result is None if the broker has lost, or may
        have lost, the session of the message.
        """
        if self._connection is None or receipt[0].epoch != self.epoch:
            return None
        answers = receipt[0] if receipt[2] == 1 else self._connection
        return answers if answers.machine.version is Version.V5 else None

    def end_turn(self) -> None:
        """Publish the batch collected in this pass of the event loop."""
        batch = self.batch
        if batch.receipts:
            self.batch = self._new_batch()
            batch.send()

    def tick(self, now: float) -> None:
        """Retry messages that targets have refused for now, when their delay is over.

        Nothing is retried while memory is short. `now` is in loop-clock seconds.
        """
        if self._connection is None or self._dispatcher.memory.short:
            return
        if not self.batch.receipts:
            self.batch.received = clock.now()
        for receipt in self._held_receipts.take_due():
            if not self._held_back.hold_if_behind(self._retry_key_of(receipt), receipt, Monotonic(now)):
                self._retry(receipt, self.batch)
        burials, self._burials = self._burials, []
        for receipt, outcome, routes in burials:
            if self._is_redelivered(receipt):
                self.unsettled -= 1
            elif self._dispatcher.dead_letters.has_room_for([receipt[3]]):
                self._store_dead_letters(receipt, outcome, routes)
            else:
                self._burials.append((receipt, outcome, routes))
        for receipt, routes in self._held_back.overdue(Monotonic(now), self._entry_of):
            self._abandon_message(receipt, TOO_LONG, routes)
        self._send_held_back(Monotonic(now))
        self._settled()

    def _entry_of(self, receipt: Receipt) -> RoutingEntry:
        return self._dispatcher.entry(self._name, None, receipt[3].address)

    def _retry_key_of(self, receipt: Receipt) -> RetryKey:
        return None, route_names_of(self._entry_of(receipt))

    def _send_held_back(self, now: Monotonic) -> None:
        """Retry messages that targets have refused for now, when their delay is over, in separate batches.

        This may be called while another batch is being filled, and by the settlement of its own batches.
        `now` is in loop-clock seconds.
        """
        if self._sending_held_back or not self._held_back.on or self._connection is None:
            return
        self._sending_held_back = True
        try:
            while receipts := self._held_back.take_due(now):
                batch = self._new_batch()
                for receipt in receipts:
                    self._retry(receipt, batch)
                batch.send()
        finally:
            self._sending_held_back = False

    # Interface for batches: the receiver is their source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return an empty list: a link continues to read when a queue is full.

        Acknowledgements arrive between the messages, so reading must not stop; refused messages are retried
        instead.
        """
        return []

    def settle(
        self, receipts: list[Receipt | None], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Acknowledge or reject messages to the broker, or store them to be retried, by their outcomes.

        `refused` maps an index in `receipts` to the outcome of a message that was not accepted; None means
        that all were accepted. `received` is when the batch was received, in loop-clock seconds.
        """
        connection = self._connection
        plain = [one[1] for one in receipts if one is not None and one[2] == 1 and one[0] is connection]
        if connection is not None and refused is None and len(plain) == len(receipts):
            self.unsettled -= len(plain)
            connection.pubacks += plain
            connection.stream.mark_for_flush()
        else:
            for at, receipt in enumerate(receipts):
                if receipt is None:
                    continue
                if refused is not None and at in refused:
                    self._refuse(receipt, refused[at])
                else:
                    self._accept(receipt)
        if self._held_back.on:
            for at, receipt in enumerate(receipts):
                if receipt is not None and (refused is None or not _is_released(refused.get(at))):
                    self._held_back.record_settled(receipt)
            self._send_held_back(clock.now())
        stats = self._stats
        stats.latency.observe(clock.now() - received, len(receipts))
        stats.accepted_messages += len(receipts) - (len(refused) if refused else 0)
        for outcome in refused.values() if refused else ():
            stats.refuse(outcome)
        self._settled()

    def _accept(self, receipt: Receipt) -> None:
        """Acknowledge a message."""
        self.unsettled -= 1
        connection, packet_id, qos, _ = receipt
        if qos == 1:
            if connection is self._connection:
                connection.pubacks.append(packet_id)
                connection.stream.mark_for_flush()
        elif connection.epoch == self.epoch and packet_id in self._used_packet_ids:
            self._used_packet_ids[packet_id] = True
            if self._connection is not None:
                self._connection.pubrecs.append(packet_id)
                self._connection.stream.mark_for_flush()

    def _refuse(self, receipt: Receipt, outcome: Outcome) -> None:
        """Process a message that was not accepted: retry it later, or report its rejection to the broker.

        A released message is retried, unless the broker delivers it again. A rejection is reported to the
        broker with MQTT 5. If that is not possible, the message becomes a dead letter and is acknowledged.
        """
        _, packet_id, qos, _ = receipt
        if outcome.verdict is Verdict.RELEASED or self._held_back.take_mixed_outcome(receipt):
            if self._is_certainly_redelivered(receipt):
                self.unsettled -= 1
                self._held_back.record_settled(receipt, by_target=False)
            elif outcome is LOW_ON_MEMORY:
                self._held_back.record_settled(receipt, by_target=False)
                self._wait_for_room(receipt)  # retried once there is memory, with the messages behind it
            elif outcome.reason is Reason.STORE and not self._held_back.is_tried(receipt):
                self._wait_for_room(receipt)
            else:
                self._held_back.hold(self._retry_key_of(receipt), receipt, clock.now())
            return
        answers = self._connection_for_reply(receipt)
        if answers is None:
            self._store_dead_letters(receipt, outcome, self._held_back.named(receipt))
            return
        self.unsettled -= 1
        if answers is not self._connection:
            return
        if qos == 2:
            self._used_packet_ids.pop(packet_id, None)
        kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
        answers.refuse(kind, packet_id, publish_refused(outcome), outcome.text)

    def _wait_for_room(self, receipt: Receipt) -> None:
        """Store a message, unacknowledged, until the local disk or memory accepts messages."""
        self._held_back.note_routes(receipt, route_names_of(self._entry_of(receipt)))
        self._held_receipts.add_refused(receipt)

    def _acknowledge_dead_letter(self, receipt: Receipt) -> None:
        """Acknowledge a message that is stored as a dead letter."""
        self._accept(receipt)
        self._settled()

    def _retry(self, receipt: Receipt, batch: Batch) -> None:
        """Add a message that waited for a retry to `batch`, for the routes that have not accepted it.

        If the broker delivers the message again, drop it here instead. If the message has expired, or a
        reload has removed its routes, it becomes a dead letter.
        """
        message = receipt[3]
        if self._is_certainly_redelivered(receipt):
            self.unsettled -= 1
            self._held_back.record_settled(receipt, by_target=False)
            return
        if NEVER < message.expires <= clock.utc():
            routes = self._held_back.remaining_routes(receipt, self._entry_of(receipt))
            self._held_back.record_settled(receipt, by_target=False)
            self._abandon_message(receipt, EXPIRED, routes)
            return
        entry = self._held_back.remaining_entry(receipt, self._entry_of(receipt))
        for branch in entry.plan.branches:
            branch.route.retried += 1
        if self._dispatcher.publish(batch, entry, message, receipt):
            return
        routes = self._held_back.remaining_routes(receipt, entry)
        self._held_back.record_settled(receipt)
        if entry.plan.branches:
            self._dispatcher.record_unrouted(entry, message, NO_TAKER, batch.received)
            self._accept(receipt)
        else:  # a reload has removed its route
            self._abandon_message(receipt, ROUTE_REMOVED, routes)

    def _abandon_message(self, receipt: Receipt, outcome: Outcome, routes: tuple[str, ...]) -> None:
        """Store a message as a dead letter of each of the named routes, which have not accepted it.

        If the broker is certain to deliver the message again, it is only dropped.
        """
        if self._is_certainly_redelivered(receipt):
            self.unsettled -= 1
        else:
            self._stats.refuse(outcome)
            self._store_dead_letters(receipt, outcome, routes)

    def _is_redelivered(self, receipt: Receipt) -> bool:
        """Return True if the broker delivers a QoS 1 message again on the present connection.

        This is so if the message arrived on an earlier connection, and the broker has resumed the session.
        """
        connection, _, qos, _ = receipt
        return qos == 1 and connection is not self._connection and connection.epoch == self.epoch

    def _is_certainly_redelivered(self, receipt: Receipt | None) -> bool:
        """Return True if the broker delivers a QoS 1 message again, and a route exists that can accept it.

        Return False while the link is disconnected, because the broker may have lost the session.
        """
        if receipt is None or self._connection is None or not self._is_redelivered(receipt):
            return False
        return bool(self._entry_of(receipt).plan.branches)

    def forget_entries(self) -> None:
        """Clear the cached routing entries, as memory is short; they are computed again when needed."""
        self._entries.clear()

    def _resolve(self, topic: bytes) -> RoutingEntry:
        """Resolve the routing entry of a topic, cache it, and return it.

        Raises RemoteProtocolError if the topic is invalid.
        """
        entry = self._dispatcher.entry(self._name, None, topic_address(decode_topic(topic), topic))
        if len(topic) <= TOPIC_BYTES_MAX:
            make_room(self._entries, self._limits.cache_entries_max)
            self._entries[topic] = entry
        return entry

    def _record_packet_id(self, connection: DeliveringConnection, packet_id: int) -> bool:
        """Record the packet id of a QoS 2 message. Return False if it is in use already (MQTT 5: 4.3.3).

        If the message with that id was accepted before, its PUBREC is sent again.
        """
        accepted = self._used_packet_ids.get(packet_id)
        if accepted is None:
            self._used_packet_ids[packet_id] = False
            return True
        self._stats.duplicates += 1
        if accepted:
            connection.pubrecs.append(packet_id)
        return False

    def _within_limits(self, connection: DeliveringConnection, rows: list[PublishRow]) -> list[PublishRow]:
        """Return the packets in `rows` that do not exceed the limit of message sizes.

        The others become dead letters. Before MQTT 5 a client cannot announce its limit to the broker.
        """
        limit = self._limits.message_bytes_max
        if not any(len(row[4]) > limit for row in rows):
            return rows
        fitting: list[PublishRow] = []
        for row in rows:
            if len(row[4]) <= limit:
                fitting.append(row)
            else:
                self._reject_malformed(connection, row, OVERSIZED)
        return fitting

    def _reject_malformed(self, connection: DeliveringConnection, row: PublishRow, outcome: Outcome) -> None:
        """Acknowledge a malformed or oversized message (`row`) and store it as a dead letter.

        To disconnect, as MQTT requires, would cause the same message to be sent again on the next connection.
        The broker may not be at fault: RabbitMQ makes a topic of any routing key.
        """
        flags, topic, packet_id, raw, body = row
        if raw:
            outcome = with_loss(PROPERTIES_LOST, outcome)
        qos = flags >> 1 & 3
        address = topic_address(topic.decode(errors="replace"))
        message = Message(address, body, NO_PROPERTIES, qos, sender=connection.sender)
        if qos == 2 and not self._record_packet_id(connection, packet_id):
            return
        self._stats.refuse(outcome)
        if qos:
            self.unsettled += 1
            receipt = (connection, packet_id, qos, message)
            self._store_dead_letters(receipt, outcome, ("",))
        else:
            self._dispatcher.dead_letters.add([message], "", outcome)

    def _store_dead_letters(self, receipt: Receipt, outcome: Outcome, routes: tuple[str, ...]) -> None:
        """Store a message as a dead letter of each of these routes, then settle it.

        While dead letters cannot be stored for lack of space, `tick` tries again.
        """

        def wait(full: Outcome) -> None:
            self._burials.append((receipt, outcome, routes))

        if len(routes) > 1:
            then = partial(self._store_dead_letters, receipt, outcome, routes[1:])
        else:
            then = partial(self._acknowledge_dead_letter, receipt)
        self._dispatcher.dead_letters.add([receipt[3]], routes[0], outcome, then, full=wait)


def _is_released(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.verdict is Verdict.RELEASED

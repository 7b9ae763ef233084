"""AMQP 0-9-1 link: successive connections, and the state that outlives them.

A connection has one channel to publish on, in confirm mode; one per consumed queue; and one for declarations
while there are any. The link is up when the publishing channel confirms and the broker has replied for
everything that the routes need, whether or not all of it exists.
"""

from __future__ import annotations

from typing import ClassVar, Final

import structlog

from gateway import __version__, clock
from gateway.broker.dead_letters.letters import BODY_LOST, PROPERTIES_LOST, with_loss
from gateway.broker.dispatcher import UNROUTED, Dispatcher
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.routing import RoutingEntry
from gateway.egress.amqp091.consumer import AmqpLinkConsumer
from gateway.egress.amqp091.publisher import AmqpLinkPublisher
from gateway.egress.amqp091.topology import (
    RETRY_SECS_MIN,
    SINGLE_ACTIVE,
    Declaration,
    DeclarationState,
    Declarer,
    Topology,
)
from gateway.egress.connection import QueueLinkConnection
from gateway.egress.link import LinkStatus
from gateway.egress.session import Entries, QueueLinkSession
from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.caches import make_room
from gateway.model.delivery_mode import QOS_OF_DURABLE
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES, Headers, Value, ValueType, string
from gateway.model.spooled_bodies import Body, DiscardedBody, DiscardingSink, Piece
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection, Delivery
from gateway.protocols.amqp091.codec import PLAIN, check_fields, decode_address, encode_response
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import (
    Challenged,
    ChannelClosed,
    ChannelOpened,
    Closed,
    Confirms,
    Deliveries,
    Event,
    MethodReceived,
    Opened,
    Returned,
)
from gateway.protocols.amqp091.spec import BASIC, BASIC_PUBLISH, ReplyCode
from gateway.protocols.amqp091.table import FIELD_BYTES_MIN
from gateway.protocols.amqp091.translate import content_properties, essentials, without_user_id
from gateway.settings import AmqpLink, Limits
from gateway.settings.endpoints import LinkUrl
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

VERSION: Final = "0-9-1"
GUEST: Final = "guest"  # user and password if the URL names none, as with every other client
CAPABILITIES: Final = (
    "publisher_confirms",
    "basic.nack",
    "consumer_cancel_notify",
    "connection.blocked",
    "authentication_failure_close",
)
PUBLISH_METHOD: Final = BASIC_PUBLISH & 0xFFFF
# Codes with which a broker closes the connection because of its content.
CONTENT_FAULTS: Final = frozenset({ReplyCode.FRAME_ERROR, ReplyCode.SYNTAX_ERROR, ReplyCode.UNEXPECTED_FRAME})
POLITE: Final = frozenset({ReplyCode.SUCCESS, ReplyCode.CONNECTION_FORCED})


def client_properties(connection_name: str) -> Headers:
    """Return the client properties of connection.start-ok."""
    yes = Value(ValueType.BOOL, True)
    return (
        ("product", string("gateway")),
        ("version", string(__version__)),
        ("platform", string("Python")),
        ("connection_name", string(connection_name)),
        ("capabilities", Value(ValueType.TABLE, tuple((name, yes) for name in CAPABILITIES))),
    )


def new_machine(target: LinkUrl, limits: Limits, *, name: str, **more: int) -> ClientConnection:
    """Return the protocol machine of a client connection called `name` to `target`.

    `limits` has the maximum sizes of frames and bodies. `more` are further parameters of ClientConnection.
    """
    return ClientConnection(
        mechanism=PLAIN,
        response=encode_response(PLAIN, target.username or GUEST, target.password or GUEST),
        virtual_host=target.virtual_host,
        client_properties=client_properties(name),
        frame_max=limits.frame_bytes_max,
        message_bytes_max=limits.message_bytes_max,
        bounded=True,
        sink=DiscardingSink,
        **more,
    )


class AmqpLinkConnection(QueueLinkConnection[ClientConnection, AmqpLinkConsumer]):
    """Connection of an AMQP 0-9-1 link, which processes the events of one stream."""

    _codes = ReplyCode
    _consuming: ClassVar[type[AmqpLinkConsumer]] = AmqpLinkConsumer

    def __init__(self, session: AmqpLinkSession, stream: Stream, target: LinkUrl, now: float) -> None:
        settings, limits = session.options, session.limits
        machine = new_machine(
            target,
            limits,
            name=session.client_id,
            heartbeat=settings.heartbeat_secs,
            channel_max=limits.channels_max,
        )
        super().__init__(machine, session.stats, stream, now + settings.connect_timeout_secs)
        self._session = session
        self._sender = Sender(session.name, address=stream.remote)
        self._plain_max = min(limits.properties_max * FIELD_BYTES_MIN, limits.properties_bytes_max)
        self._is_blocked = False  # by connection.blocked
        self._is_stopped = False  # the publishing channel, by channel.flow
        self._publishing = 0  # channel number
        self._confirming = False
        self._survey_at = now + settings.survey_secs
        self._declarer = Declarer(
            self.machine, settings.declare, session.queue_arguments, self._finish_declaration
        )

    # Interface for the stream.

    def receive(self, data: bytes, now: float) -> None:
        """Process received bytes, or if `data` is empty the events that an earlier call has left.

        `now` is in loop-clock seconds.
        """
        self._process(self._stream.postponed() or self.machine.receive_data(data, now))
        if self.machine.unread:
            self._stream.request_turn()
        self._session.publisher.continue_turn()
        self._stream.expect(self.machine.body_bytes_remaining)

    def data_to_send(self) -> bytes | list[Piece]:
        """Return pending acknowledgements and everything else that was encoded."""
        self._acknowledge()
        return self.machine.to_send()

    def resume_writing(self) -> None:
        """Continue to send messages, because the stream's send buffer has drained."""
        self._session.publisher.pump()

    def connection_lost(self, reason: str) -> None:
        """Handle the loss of the connection: unconfirmed messages are sent again on the next one."""
        for consumer in self._consumers.values():
            self._session.note_lost(consumer)
        self._abandon_consumers()
        self._session.disconnected(self, self._why or reason)

    # Interface for the link.

    def tick(self, now: float) -> None:
        """Check heartbeats and the time limit of the handshake, and process timers that are due.

        `now` is in loop-clock seconds.
        """
        if not self._in_time(now):
            return
        for consumer in self._consumers.values():
            consumer.tick(now)
        if fresh := self._session.publisher.renew(now):
            self._publish_on(fresh)
        if self.open:
            self._declarer.queue(self._session.topology.take_due(now))
            every = self._session.options.survey_secs
            if self._up and every and now >= self._survey_at and self._declarer.idle:
                self._survey_at = now + every
                self._declarer.queue(self._session.topology.survey())
        self._stream.mark_for_flush()

    # Interface for the link session.

    @property
    def outstanding(self) -> int:
        """Number of received messages that are not settled."""
        return sum(consumer.outstanding for consumer in self._consumers.values())

    def outstanding_of(self, queue: str) -> int:
        """Return the number of unsettled messages from one queue."""
        consumers = self._consumers.values()
        return sum(one.outstanding for one in consumers if one.declaration.name == queue)

    def update_consumers(self, fresh: list[Declaration]) -> None:
        """Check the new declarations, and cancel the consumers of queues that no route needs any more.

        Called when the mapping has changed.
        """
        if not self.open:
            return
        topology = self._session.topology
        for consumer in list(self._consumers.values()):
            declaration = topology.current(consumer.declaration)
            if (declaration is None or not declaration.consume) and not consumer.stopping:
                consumer.stop()
                self._close_stopped(consumer)
        self._declarer.queue([*topology.leftovers(), *fresh])
        self._update_link_state()
        self._stream.mark_for_flush()

    # Events.

    def _process(self, events: list[Event]) -> None:
        for at, event in enumerate(events, 1):
            if isinstance(event, Confirms):
                self._session.publisher.confirm(event.confirms)
            elif isinstance(event, Deliveries):
                if contents := self._deliveries(event.contents):
                    self._stream.postpone([Deliveries(contents), *events[at:]])
                    self._stream.mark_for_flush()
                    return
            elif isinstance(event, MethodReceived):
                self._method(event)
            elif isinstance(event, Returned):
                self._returned(event)
            elif isinstance(event, ChannelOpened):
                self._channel_opened(event.channel)
            elif isinstance(event, ChannelClosed):
                self._channel_closed(event)
            elif isinstance(event, Opened):
                self._opened()
            elif isinstance(event, Challenged):
                self._why = "the broker requires another authentication than name and password"
                self.machine.close(ReplyCode.NOT_ALLOWED, self._why)
            elif isinstance(event, Closed):
                self._closed(event)
        if self.machine.closed:
            self._stream.end(self._why or "closed")
        self._stream.mark_for_flush()

    def _opened(self) -> None:
        session = self._session
        session.stats.set_version(self.machine, VERSION)
        self.open = True
        self._publish_on(self._new_channel())
        self._declarer.queue(session.topology.connected())

    def _publish_on(self, number: int) -> None:
        """Use channel `number` for publishing when it is in confirm mode.

        A channel.flow of the broker for the previous channel does not apply to it.
        """
        self._publishing, self._confirming = number, False
        self._is_stopped = False
        self._session.stats.blocked = self._is_blocked

    def _new_channel(self) -> int:
        """Open a channel. Return its number, or 0 if the connection is ending or has no number left."""
        try:
            return self.machine.open_channel()
        except LocalProtocolError as error:
            log.warning("channel not opened", link=self._session.name, error=str(error))
            return 0

    def _channel_opened(self, number: int) -> None:
        if number == self._publishing:
            self.machine.send_method(number, m.ConfirmSelect())
        elif number == self._declarer.channel:
            self._declarer.send_pending()
        elif number in self._consumers:
            settings = self._session.options
            self._consumers[number].begin(settings.prefetch, settings.consumer_priority)

    def _channel_closed(self, event: ChannelClosed) -> None:
        number = event.channel
        if not event.by_peer:
            self._count_fault(event.reply_code)
        if number == self._publishing:
            log.warning("publishing channel closed", link=self._session.name, error=event.text)
            self._session.publisher.handle_channel_closed(event.reply_code, event.text)
            self._publish_on(self._new_channel())
        elif number == self._declarer.channel:
            self._declarer.process_reply(event)
        elif number in self._consumers:
            self._session.mark_failed(self._drop(number), event.text, clock.now())

    def _closed(self, event: Closed) -> None:
        self._why = f"{event.reply_code} {event.text}"
        if event.reply_code not in POLITE:
            self._count_fault(event.reply_code)
        over_content = (event.class_id, event.method_id) == (BASIC, PUBLISH_METHOD)
        if event.by_peer and (over_content or event.reply_code in CONTENT_FAULTS):
            self._session.publisher.handle_channel_closed(event.reply_code, event.text)

    def _method(self, event: MethodReceived) -> None:
        method, number = event.method, event.channel
        if isinstance(method, m.ConnectionBlocked):
            log.warning("publishing blocked by broker", link=self._session.name, reason=method.reason)
            self._is_blocked = True
            self._update_link_state()
        elif isinstance(method, m.ConnectionUnblocked):
            log.info("publishing unblocked by broker", link=self._session.name)
            self._is_blocked = False
            self._update_link_state()
        elif isinstance(method, m.ChannelFlow):
            self.machine.send_method(number, m.ChannelFlowOk(method.active))
            if number == self._publishing:
                self._is_stopped = not method.active
                self._update_link_state()
        elif number == self._publishing:
            if isinstance(method, m.ConfirmSelectOk) and number in self.machine.channels:
                self._confirming = True
                self._session.publisher.open(self.machine, number, self._stream)
                self._update_link_state()
        elif number == self._declarer.channel:
            self._declarer.process_reply(method)
        elif number in self._consumers:
            self._consumer_method(self._consumers[number], method)

    def _returned(self, event: Returned) -> None:
        if not self._session.publisher.settle_returned(event):
            self._session.stats.protocol_errors.add("return_unknown")
            log.error("broker returned message that matches none in flight", link=self._session.name)

    # Needs of the routes.

    def _update_link_state(self) -> None:
        """Record the link as up once it can publish, and start or stop sending.

        Called when confirm mode, the declarations, or the broker's `blocked` or `flow` have changed.
        """
        ready = self._confirming and self._session.topology.surveyed
        if ready and not self._up:
            self._up = True
            self._session.status.mark_up()
        blocked = self._session.stats.blocked = self._is_blocked or self._is_stopped
        self._session.publisher.flow(ready and not blocked)

    def _finish_declaration(self, declaration: Declaration, why: str) -> None:
        session = self._session
        session.topology.forget_leftover(declaration)
        if why:
            session.mark_failed(declaration, why, clock.now())
        elif session.mark_met(declaration) and declaration.consume:
            self._consume(declaration)
        self._update_link_state()

    def _consume(self, declaration: Declaration) -> None:
        """Start to consume a queue that has been declared, on a channel of its own.

        If a consumer of the queue exists, it continues. It is replaced if the broker has dropped it (see
        `_is_gone`).
        """
        for consumer in self._consumers.values():
            if consumer.declaration.name == declaration.name and not consumer.stopping:
                if self._is_gone(consumer, declaration):
                    self.machine.close_channel(consumer.channel)
                    self._drop(consumer.channel)
                    self._session.count_restored("consumer", declaration)
                    break
                consumer.declaration = declaration
                return
        number = self._new_channel()
        if number:
            self._consumers[number] = self._consuming(declaration, self.machine, number, self._wake)
        else:
            self._session.mark_failed(declaration, "no free channel", clock.now())

    @staticmethod
    def _is_gone(consumer: AmqpLinkConsumer, declaration: Declaration) -> bool:
        """Return True if the broker has dropped this consumer, by the consumer count of its queue.

        That is certain if the broker reports no consumer of the queue, but has reported one while this
        consumer existed.
        """
        if consumer.tag and declaration.consumer_count:
            consumer.counted = True
        return consumer.counted and not declaration.consumer_count

    def _consumer_method(self, consumer: AmqpLinkConsumer, method: m.Method) -> None:
        if isinstance(method, m.BasicConsumeOk):
            consumer.tag = method.consumer_tag
            consumer.declaration.wait = RETRY_SECS_MIN
            self._session.note_consumed_again(consumer.declaration)
            if consumer.stopping:
                consumer.stop()
        elif isinstance(method, m.BasicCancel):
            self.machine.close_channel(consumer.channel)
            declaration = self._drop(consumer.channel)
            self._session.mark_failed(declaration, "the broker cancelled the consumer", clock.now())
        elif isinstance(method, m.BasicCancelOk):
            self._close_stopped(consumer)

    def _drop(self, number: int) -> Declaration:
        consumer = self._consumers.pop(number)
        consumer.live = False
        self._owing.pop(consumer, None)
        return consumer.declaration

    def _close_stopped(self, consumer: AmqpLinkConsumer) -> None:
        """Close the channel of a cancelled consumer when all its messages are settled."""
        if consumer.stopping and consumer.tag and consumer.is_settled and consumer.live:
            self.machine.close_channel(consumer.channel)
            self._drop(consumer.channel)

    # Messages.

    def _deliveries(self, contents: list[Delivery]) -> list[Delivery]:
        """Publish received messages to the routes.

        Return the messages that are left for a later time slice of the connection, if many have addresses
        that are not cached.
        """
        session = self._session
        caches = session.caches()
        publish = session.dispatcher.publish
        batch = session.begun_batch()
        consumers = self._consumers
        others_wait, short = session.held_receipts.on or session.held_back.on, session.dispatcher.memory.short
        sender = self._sender
        number = 0
        consumer: AmqpLinkConsumer | None = None
        in_turn = iter(contents)
        postponed: list[Delivery] = []
        for row in in_turn:
            row_number, _, tag, _, wire, raw, body = row
            if row_number != number:
                number = row_number
                consumer = consumers.get(number)
                if consumer is not None:
                    entries = caches.setdefault(consumer.declaration.route_queue, {})
            if consumer is None:
                continue  # it was closed meanwhile, the message is requeued
            entry = entries.get(wire)
            if entry is None and self._stream.is_turn_spent():
                postponed = [row, *in_turn]
                break
            consumer.last = tag
            property_set = content_properties(raw)
            try:
                if entry is None:
                    entry = session.resolve(consumer.declaration.route_queue, wire, entries)
                if len(raw) > self._plain_max:
                    self._check_properties(raw)
                durable, expiration, retained, hops, special = essentials(property_set)
                if special and not session.options.trust_user_id:
                    property_set = content_properties(without_user_id(raw))
            except RemoteProtocolError as error:
                self._refuse(consumer, tag, entry, body, Reason.MALFORMED, str(error))
                continue
            if not body and isinstance(body, DiscardedBody):
                text = f"a body of {body.size} bytes exceeds limits.message_bytes_max"
                self._refuse(consumer, tag, entry, body, Reason.TOO_LARGE, text)
                continue
            message = Message(
                entry.address,
                body,
                property_set,
                QOS_OF_DURABLE[durable],
                durable,
                retained,
                NEVER if expiration is None else clock.utc() + expiration / 1000,
                hops,
                sender,
            )
            receipt = (consumer, tag, message)
            if others_wait and session.hold_if_behind(entry, receipt):
                continue
            if short:
                session.settle([receipt], {0: LOW_ON_MEMORY}, clock.now())
            elif not publish(batch, entry, message, receipt):
                session.handle_unrouted(entry, receipt)
        session.stats.messages_in += len(contents) - len(postponed)
        return postponed

    def _check_properties(self, raw: bytes) -> None:
        """Check the encoded properties `raw` against the limits that apply to listeners.

        Raises RemoteProtocolError.
        """
        limits = self._session.limits
        if len(raw) > limits.properties_bytes_max:
            raise RemoteProtocolError(f"{len(raw)} bytes of properties", reason=ReplyCode.RESOURCE_ERROR)
        check_fields(raw, limits.properties_max)

    def _refuse(
        self,
        consumer: AmqpLinkConsumer,
        tag: int,
        entry: RoutingEntry | None,
        body: Body,
        reason: Reason,
        text: str,
    ) -> None:
        """Store a malformed or oversized message as a dead letter, without its properties.

        `reason` and `text` say why; `entry` is None if the message's address is malformed. If all its routes
        have `on_reject: retry`, the message is rejected to the broker instead, which may have a dead-letter
        exchange.
        """
        session = self._session
        part = BODY_LOST if isinstance(body, DiscardedBody) else PROPERTIES_LOST
        outcome = with_loss(part, Outcome(Verdict.REJECTED, reason, text))
        log.warning("malformed or oversized message refused", link=session.name, error=outcome.text)
        branches = () if entry is None else entry.plan.branches
        if branches and all(branch.route.on_reject == "retry" for branch in branches):
            session.stats.refuse(outcome)
            consumer.rejected(tag)
            return
        address = amqp_address("", consumer.declaration.route_queue) if entry is None else entry.address
        message = Message(address, bytes(body), NO_PROPERTIES, sender=self._sender)
        session.store_dead_letter((consumer, tag, message), outcome)


Receipt = tuple[AmqpLinkConsumer, int, Message]


class AmqpLinkSession(QueueLinkSession[AmqpLinkConnection, AmqpLinkConsumer, AmqpLinkPublisher]):
    """Session of the link `name` to an AMQP 0-9-1 broker."""

    def __init__(
        self,
        name: str,
        settings: AmqpLink,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        *,
        client_id: str,
        publishing: type[AmqpLinkPublisher] = AmqpLinkPublisher,
    ) -> None:
        """Create the session. `publishing` is the class of its publisher.

        `client_id` is the connection name, and begins the names of the link's own queues.
        """
        publisher = publishing(
            status.stats,
            self._missing,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            bytes_max=limits.queue_bytes_max,
        )
        super().__init__(name, settings, dispatcher, limits, status, publisher, client_id=client_id)
        self.options = settings
        self.topology = Topology(client_id, settings.declare, settings.reconnect_max_secs)
        # Consumers with unsettled messages whose connections were lost, by queue, until it is consumed again.
        self._lost_consumers: dict[str, list[AmqpLinkConsumer]] = {}

    def queue_arguments(self, queue: str) -> Headers:
        """Return the arguments with which the link declares a queue."""
        return SINGLE_ACTIVE if self.options.single_active_consumer else ()

    # Interface for the link.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Declare, consume and cancel what a changed mapping requires at the broker."""
        fresh, unneeded = self.topology.set_needs(subscriptions, targets)
        for declaration in (*fresh, *unneeded):
            if declaration.kind == "exchange":
                self.publisher.allow(declaration.name)
        self.stats.missing_objects = self.topology.unmet_needs()
        if self._connection is not None:
            self._connection.update_consumers(fresh)

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> AmqpLinkConnection:
        """Begin the handshake on a new connection. Return the owner of its stream.

        `now` is in loop-clock seconds.
        """
        self._connection = AmqpLinkConnection(self, stream, target, now)
        return self._connection

    # Interface for batches: the session is their source.

    def settle_refused(self, receipt: Receipt, outcome: Outcome) -> None:
        """Reject a message that was not accepted to the broker, or store it to be retried."""
        if outcome.verdict is Verdict.RELEASED or self.held_back.take_mixed_outcome(receipt):
            self.handle_release(receipt, outcome)
        else:
            receipt[0].rejected(receipt[1])
            self.retry_followers([receipt])
        self.stats.refuse(outcome)

    def is_redelivered(self, receipt: Receipt) -> bool:
        """Return True if a message's connection is lost and the broker delivers the message again.

        Return False until its queue is consumed again, and if its queue was deleted, because the message is
        then lost at the broker.
        """
        return receipt[0].is_repeated and super().is_redelivered(receipt)

    def note_lost(self, consumer: AmqpLinkConsumer) -> None:
        """Record that the connection of a consumer is lost, before its unsettled messages are abandoned."""
        if consumer.outstanding:
            self._lost_consumers.setdefault(consumer.declaration.name, []).append(consumer)

    def note_consumed_again(self, declaration: Declaration) -> None:
        """Record that a queue is consumed again after the loss of a connection.

        Messages from the lost connection are dropped, because the broker delivers them again. They are not
        dropped if the link had to create the queue.
        """
        lost = self._lost_consumers.pop(declaration.name, [])
        if lost and not declaration.made:
            for consumer in lost:
                consumer.is_repeated = True
            self.dispatcher.pauses.drop_redelivered()

    def requeue_later(self, receipt: Receipt) -> None:
        """Requeue a message at its broker after a short delay."""
        receipt[0].requeue_later(receipt[1], clock.now())

    def handle_unrouted(self, entry: RoutingEntry, receipt: Receipt) -> None:
        """Record that no route accepts a message, and settle it.

        If a reload has removed the routes of its queue, the message is requeued at the broker instead.
        """
        if receipt[0].stopping:
            self.handle_removed_routes(receipt)
        else:
            super().handle_unrouted(entry, receipt)

    def handle_removed_routes(self, receipt: Receipt) -> None:
        """Requeue a message if no route consumes its queue any more; otherwise store it as a dead letter.

        Called for a message whose routes a reload has removed.
        """
        if receipt[0].stopping:
            self.held_back.record_settled(receipt, by_target=False)
            self.requeue_later(receipt)
        else:
            super().handle_removed_routes(receipt)

    def settle_dead_letter(self, receipt: Receipt, outcome: Outcome) -> None:
        """Acknowledge a message whose dead letter is stored.

        A message whose body was too large to store is rejected instead, because the broker may have a
        dead-letter exchange for the whole message.
        """
        if outcome.reason is Reason.TOO_LARGE:
            receipt[0].rejected(receipt[1])
        else:
            self.accept([receipt])

    def queue_of(self, consumer: AmqpLinkConsumer) -> str:
        """Return the queue of a consumer, by which routes may select its messages."""
        return consumer.declaration.route_queue

    # Interface for the connection.

    def resolve(self, queue: str, wire: bytes, entries: Entries) -> RoutingEntry:
        """Resolve the routing entry of a new address, cache it in `entries`, and return it.

        `wire` is the encoded address. Raises RemoteProtocolError if it is invalid.
        """
        address = amqp_address(*decode_address(wire))
        make_room(entries, self.limits.cache_entries_max)
        entry = entries[wire] = self.dispatcher.entry(self.name, None, address, queue)
        return entry

    def settle_unrouted(self, entry: RoutingEntry, receipt: Receipt) -> None:
        """Acknowledge a message that no route accepts.

        If `entry` has no route at all, the message is first stored as a dead letter.
        """
        if not entry.plan.branches:
            self.dispatcher.dead_letters.add([receipt[2]], "", UNROUTED)
        self.settle([receipt], None, clock.now())

    def disconnected(self, connection: AmqpLinkConnection, why: str) -> None:
        """Forget a connection that was lost for the reason `why`.

        Its unconfirmed messages are sent again on the next connection.
        """
        if self._connection is connection:
            self.stats.blocked = False
        super().disconnected(connection, why)

    def mark_met(self, declaration: Declaration) -> bool:
        """Record that a declaration exists at the broker. Return False if the mapping no longer needs it."""
        if self.topology.current(declaration) is not declaration:
            return False
        if declaration.why:
            log.info("broker object usable now", link=self.name, kind=declaration.kind, name=declaration.name)
        if declaration.was_there and (declaration.made or declaration.why):
            self.count_restored(declaration.made or declaration.kind, declaration)
        declaration.was_there = True
        declaration.state = DeclarationState.THERE
        declaration.why = ""
        declaration.drop = frozenset()
        self.stats.missing_objects = self.topology.unmet_needs()
        if declaration.kind == "exchange":
            self.publisher.allow(declaration.name)
            self.publisher.pump()
        return True

    def count_restored(self, kind: str, declaration: Declaration) -> None:
        """Count and log an object (`kind`) that was missing at the broker and has been declared again."""
        self.stats.restored.add(kind)
        log.warning(
            "broker object lost, declared again",
            link=self.name,
            kind=kind,
            name=declaration.exchange if kind == "exchange" and declaration.exchange else declaration.name,
        )

    def mark_failed(self, declaration: Declaration, why: str, now: float) -> None:
        """Record why a declaration failed, and retry it later. Other declarations are not affected.

        `now` is in loop-clock seconds.
        """
        if self.topology.current(declaration) is not declaration:
            return
        news = self.topology.mark_failed(declaration, why, now)
        self.stats.missing_objects = self.topology.unmet_needs()
        if news:
            self.log_unusable(declaration.kind, declaration.name, why)
        if declaration.kind == "exchange":
            self.publisher.refuse(declaration.name, Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, why))

    def _missing(self, exchange: str, outcome: Outcome) -> None:
        """Record that the broker did not find an exchange on a publish, and check for it until it exists."""
        declaration, forgotten = self.topology.declaration_of_missing(exchange)
        for old in forgotten:
            self.publisher.allow(old.name)
        if self.topology.mark_failed(declaration, outcome.text, clock.now()):
            self.log_unusable("exchange", exchange, outcome.text)

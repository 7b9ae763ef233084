"""AMQP/Fast link: successive connections, and the state that outlives them.

A connection has one channel to send on, one per consumed source, and, once needed, one for large messages.
The link is up when the sending channel is open and the server has replied for every source, positively or
not.
"""

from __future__ import annotations

from typing import Final

import structlog

from gateway import clock
from gateway.broker.dead_letters.letters import BODY_LOST, PROPERTIES_LOST, with_loss
from gateway.broker.dispatcher import UNROUTED, Dispatcher
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.routing import RoutingEntry
from gateway.egress.amqpfast.consumer import FastLinkConsumer, Receipt
from gateway.egress.amqpfast.deliveries import JoinedMessage
from gateway.egress.amqpfast.login import client_machine
from gateway.egress.amqpfast.publisher import FastLinkPublisher
from gateway.egress.amqpfast.sources import LinkSource, LinkSources, Survey
from gateway.egress.connection import QueueLinkConnection
from gateway.egress.held_back import ROUTE_REMOVED
from gateway.egress.link import LinkStatus
from gateway.egress.session import Entries, QueueLinkSession
from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.batch import Batch
from gateway.model.caches import make_room
from gateway.model.delivery_mode import QOS_OF_DURABLE
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES
from gateway.model.spooled_bodies import Piece
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import decode_head_properties
from gateway.protocols.amqpfast.dialect import SERVICES, fast_address
from gateway.protocols.amqpfast.events import (
    NO_HANDLE,
    Challenged,
    ChannelClosed,
    Closed,
    CommandReceived,
    Event,
    Fragment,
    HandleClosed,
    Notifies,
    NotifyRow,
    Opened,
    Prepared,
    Ready,
    Released,
    Replies,
    ReplyRow,
)
from gateway.protocols.amqpfast.spec import BODY_SIZE_MAX, DELIVERED, ReplyCode
from gateway.protocols.amqpfast.tables import FIELD_BYTES_MIN
from gateway.protocols.amqpfast.translate import essentials, head_properties
from gateway.settings import FastLink, Limits
from gateway.settings.endpoints import LinkUrl
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

VERSION: Final = "0.7c0"
NOT_DELIVERED: Final = "not_delivered"  # NOTIFY of a message that was shown, not delivered
REOPEN_SECS: Final = 1.0  # until the sending channel is reopened, if it was closed with nothing in flight
POLITE: Final = frozenset({ReplyCode.SUCCESS, ReplyCode.CLIENT_ALREADY_ACTIVE})
# Codes with which a server closes the connection because of its content.
CONTENT_FAULTS: Final = frozenset(
    (
        *(ReplyCode.FRAMING_ERROR, ReplyCode.BAD_FIELD_VALUE, ReplyCode.COMMAND_NOT_VALID),
        *(ReplyCode.INTERNAL_ERROR, ReplyCode.MESSAGE_CONTENTS_INVALID),
    )
)


class FastLinkConnection(QueueLinkConnection[ClientConnection, FastLinkConsumer]):
    """Connection of an AMQP/Fast link, which processes the events of one stream."""

    _codes = ReplyCode

    def __init__(self, session: FastLinkSession, stream: Stream, target: LinkUrl, now: float) -> None:
        settings, limits = session.settings, session.limits
        machine = client_machine(
            target,
            session.client_id,
            frame_max=limits.frame_bytes_max,
            channel_max=limits.channels_max,
            heartbeat=settings.heartbeat_secs,
            pings=session.pings,
            message_bytes_max=BODY_SIZE_MAX,  # larger messages than the limit are skipped, see Assembly
            bounded=True,
        )
        super().__init__(machine, session.stats, stream, now + settings.connect_timeout_secs)
        self._session = session
        self._sender = Sender(session.name, address=stream.remote)
        self._plain_max = min(limits.properties_max * FIELD_BYTES_MIN, limits.properties_bytes_max)
        self._sending = 0  # channel number
        self._reopen_at = 0.0
        self._by_handle: dict[int, FastLinkConsumer] = {}
        self._unanswered: dict[int, FastLinkConsumer] = {}  # with an unanswered CONSUME, by handle
        self._surveys: dict[LinkSource, Survey] = {}  # of prefixes of queues
        self._survey_channel = 0

    # Interface for the stream.

    def receive(self, data: bytes, now: float) -> None:
        """Process received bytes, or if `data` is empty the events that an earlier call has left.

        `now` is in loop-clock seconds.
        """
        self._process(self._stream.postponed() or self.machine.receive_data(data, now))
        if self.machine.unread:
            self._stream.request_turn()
        self._session.publisher.continue_turn()

    def data_to_send(self) -> bytes | list[Piece]:
        """Return pending acknowledgements and everything else that was encoded."""
        self._acknowledge()
        return self.machine.to_send()

    def resume_writing(self) -> None:
        """Continue to send messages, because the stream's send buffer has drained."""
        self._session.publisher.resume_writing()

    def connection_lost(self, reason: str) -> None:
        """Handle the loss of the connection: unconfirmed messages are sent again on the next one."""
        self._abandon_consumers()
        self._by_handle.clear()
        self._session.disconnected(self, self._why or reason)

    # Interface for the link.

    def tick(self, now: float) -> None:
        """Check heartbeats and the time limit of the handshake, and process timers that are due.

        `now` is in loop-clock seconds.
        """
        if not self._in_time(now):
            return
        session = self._session
        for consumer in list(self._consumers.values()):
            for receipt in consumer.tick(now):
                session.retry(receipt, session.begun_batch())
        if self.open:
            if self._reopen_at and now >= self._reopen_at:
                self._open_sending()
            for source in session.sources.take_due(now):
                self._consume(source)
            self._survey(now)
        self._stream.mark_for_flush()

    # Interface for the link session.

    @property
    def outstanding(self) -> int:
        """Number of received messages that are not acknowledged."""
        return sum(len(consumer.unsettled) for consumer in self._consumers.values())

    def update_consumers(self, fresh: list[LinkSource], obsolete: list[LinkSource]) -> None:
        """Consume from new sources and stop consuming from obsolete sources.

        Called when the mapping has changed.
        """
        consumed = {
            consumer.source: consumer for consumer in self._consumers.values() if not consumer.stopping
        }
        resting = [source for source, consumer in consumed.items() if consumer.resting]
        for source in obsolete:
            survey = self._surveys.pop(source, None)
            if survey is not None:
                self.machine.close_handle(survey.handle)
            if source in resting and not source.identifier:
                consumed[source].stopping = True
                self._close_stopped(consumed[source])
            elif source in consumed and source not in resting:
                consumed[source].stop()
            elif source.identifier:
                self._abandon(source)
        for source in fresh:
            self._consume(source)
        self._update_link_state()
        self._stream.mark_for_flush()

    # Events.

    def _process(self, events: list[Event]) -> None:
        for at, event in enumerate(events, 1):
            if isinstance(event, Replies):
                self._replies(event.rows)
            elif isinstance(event, Notifies):
                if rows := self._notifies(event.rows):
                    self._stream.postpone([Notifies(rows), *events[at:]])
                    self._stream.mark_for_flush()
                    return
            elif isinstance(event, Fragment):
                self._fragment(event)
            elif isinstance(event, HandleClosed):
                self._handle_closed(event)
            elif isinstance(event, ChannelClosed):
                self._channel_closed(event)
            elif isinstance(event, Released):
                self._released(event)
            elif isinstance(event, Ready):
                self._session.publisher.ready(event.handle, event.message_size)
            else:
                self._rare(event)
        if self.machine.closed:
            self._stream.end(self._why or "closed")
        self._stream.mark_for_flush()

    def _rare(self, event: Event) -> None:
        if isinstance(event, Opened):
            self._opened()
        elif isinstance(event, Closed):
            self._closed(event)
        elif isinstance(event, Prepared):
            text = "this client requested no restartable delivery"
            self.machine.close_handle(event.handle, ReplyCode.NOT_IMPLEMENTED, text)
        elif isinstance(event, Challenged):
            self._why = "the server requires another authentication than name and password"
            self.machine.close(ReplyCode.ACCESS_REFUSED, self._why)
        elif isinstance(event, CommandReceived) and isinstance(event.command, m.HandleIndex):
            self._surveyed(event.command)

    def _opened(self) -> None:
        session = self._session
        session.stats.set_version(self.machine, VERSION)
        self.open = True
        self._open_sending()
        for source in session.sources.obsolete():
            self._abandon(source)
        for source in session.sources.connected():
            self._consume(source)

    def _open_sending(self) -> None:
        self._reopen_at = 0.0
        try:
            self._sending = self.machine.open_channel()
        except LocalProtocolError as error:
            log.warning("channel not opened", link=self._session.name, error=str(error))
            self._sending = 0
            self._reopen_at = clock.now() + REOPEN_SECS

    def _closed(self, event: Closed) -> None:
        self._why = f"{event.reply_code} {event.text}".rstrip()
        if event.reply_code not in POLITE:
            self._count_fault(event.reply_code)
        if event.by_peer and event.reply_code in CONTENT_FAULTS:
            self._session.publisher.handle_channel_closed(event.reply_code, event.text)

    def _replies(self, rows: list[ReplyRow]) -> None:
        """Process replies of the server: to CONSUMEs, to the opening of the sending channel, or to SENDs."""
        publisher = self._session.publisher
        if self._unanswered or not publisher.is_open:
            sent: list[ReplyRow] = []
            for row in rows:
                consumer = self._unanswered.pop(row[1], None)
                if consumer is not None:
                    self._session.mark_met(consumer.source)
                    self._begin_survey(consumer.source)
                    self._update_link_state()
                elif row[1] != NO_HANDLE:
                    sent.append(row)
                elif row[0] == self._sending:
                    publisher.open(self.machine, row[0], self._stream)
                    self._update_link_state()
            rows = sent
        publisher.settle_replies(rows)

    def _handle_closed(self, event: HandleClosed) -> None:
        """Process the server's close of a handle, which may be for consuming, for QUERY or for sending."""
        if not event.by_peer:
            self._count_fault(event.reply_code)
        consumer = self._by_handle.get(event.handle)
        if consumer is None:
            for source in [one for one, survey in self._surveys.items() if survey.handle == event.handle]:
                del self._surveys[source]  # the prefix may not be browsed, or was deleted
                return
            self._session.publisher.handle_closed(event.handle, event.reply_code, event.text)
            return
        # HANDLE CLOSE answers it (3.5.16). Messages that it delivered stay outstanding on the channel, and
        # are acknowledged there; the next attempt opens another handle on it.
        self.machine.close_handle(event.handle)
        self._forget_handle(consumer)
        if consumer.stopping:
            self._stopped(consumer)
            return
        consumer.resting = True
        self._session.mark_failed(consumer.source, f"{event.reply_code} {event.text}")
        self._update_link_state()

    def _channel_closed(self, event: ChannelClosed) -> None:
        """Process the close of a channel that is for consuming, QUERY, sending or large messages."""
        if not event.by_peer:
            self._count_fault(event.reply_code)
        publisher = self._session.publisher
        consumer = self._consumers.get(event.channel)
        if consumer is not None:
            self._drop_consumer(consumer, f"{event.reply_code} {event.text}")
        elif event.channel == self._survey_channel:
            self._surveys.clear()  # the server does not support the queries on this connection
        elif event.channel == self._sending:
            log.warning("publishing channel closed", link=self._session.name, error=event.text)
            idle = not publisher.in_flight
            publisher.handle_channel_closed(event.reply_code, event.text)
            if idle:
                self._sending, self._reopen_at = 0, clock.now() + REOPEN_SECS
            else:
                self._open_sending()
        else:
            publisher.large_closed(event.channel, event.reply_code, event.text)

    def _released(self, event: Released) -> None:
        consumer = self._by_handle.get(event.handle) if event.handle else None
        if consumer is not None:
            self._forget_handle(consumer)
            self._stopped(consumer)
        else:
            self._session.publisher.pump()

    def _forget_handle(self, consumer: FastLinkConsumer) -> None:
        self._by_handle.pop(consumer.handle, None)
        self._unanswered.pop(consumer.handle, None)

    # Sources of the routes.

    def _update_link_state(self) -> None:
        """Record the link as up once it can publish and the server has replied for all sources."""
        session = self._session
        if not self._up and session.publisher.is_open and session.sources.surveyed:
            self._up = True
            session.status.mark_up()

    def _consume(self, source: LinkSource) -> None:
        consumer = self._open_consumer(source)
        if consumer is not None:
            self._unanswered[consumer.handle] = consumer
            consumer.begin(self._session.settings.prefetch)

    def _survey(self, now: float) -> None:
        """Send QUERY for each prefix of queues that is due, to find queues that were created later.

        A prefix from which a message is unacknowledged is not queried. `now` is in loop-clock seconds.
        """
        for source, survey in self._surveys.items():
            if survey.is_due(now) and self._idle(source) is not None:
                survey.awaits_reply = True
                self.machine.send(m.HandleQuery(survey.handle))

    def _idle(self, source: LinkSource) -> FastLinkConsumer | None:
        """Return the active consumer of a source if all its messages are acknowledged, else None."""
        for consumer in self._consumers.values():
            away = consumer.stopping or consumer.resting or consumer.handle in self._unanswered
            if consumer.source is source and not away:
                return None if len(consumer.unsettled) else consumer
        return None

    def _begin_survey(self, source: LinkSource) -> None:
        """Start the periodic check for queues that are created later, if the source is a prefix of queues."""
        if not source.prefix or source.service != "queue" or source in self._surveys:
            return
        try:
            if not self._survey_channel:
                self._survey_channel = self.machine.open_channel(confirm=False)
            command = m.HandleOpen(
                self._survey_channel,
                service_type=SERVICES[source.service],
                browser=True,
                dest_name=source.name,
            )
            handle = self.machine.open_handle(command, confirm=False)
        except LocalProtocolError:
            return  # there is none left: later queues are found on the next connection
        self._surveys[source] = Survey(handle, clock.now())

    def _surveyed(self, index: m.HandleIndex) -> None:
        for source, survey in self._surveys.items():
            if survey.handle == index.handle_id:
                consumer = self._idle(source)
                waits = bool(index.message_list) and consumer is not None
                if survey.process_reply(waits=waits, now=clock.now()) and consumer is not None:
                    log.info(
                        "consumer restarted for new queue of prefix",
                        link=self._session.name,
                        prefix=source.name,
                    )
                    consumer.stop()
                    self._consume(source)

    def _abandon(self, source: LinkSource) -> None:
        """Cancel the durable subscription of a source, without having consumed it on this connection."""
        consumer = self._open_consumer(source)
        if consumer is not None:
            consumer.stop()

    def _open_consumer(self, source: LinkSource) -> FastLinkConsumer | None:
        """Open a handle to consume a source, on a channel of its own. Return the new consumer.

        If the server had closed only the handle of an earlier consumer, that consumer gets the new handle.
        Return None if no channel or handle is free; the source is then retried later.
        """
        session = self._session
        consumer = next(
            (one for one in self._consumers.values() if one.source is source and one.resting), None
        )
        try:
            if consumer is None:
                consumer = FastLinkConsumer(
                    source, self.machine, self._wake, session.limits.message_bytes_max
                )
            else:
                consumer.reopen()
        except LocalProtocolError as error:
            session.mark_failed(source, str(error))
            self._update_link_state()
            return None
        self._consumers[consumer.channel] = consumer
        self._by_handle[consumer.handle] = consumer
        return consumer

    def _drop_consumer(self, consumer: FastLinkConsumer, why: str) -> None:
        """Forget a consumer whose channel was closed for the reason `why`, and retry its source later."""
        consumer.live = False
        self._consumers.pop(consumer.channel, None)
        self._forget_handle(consumer)
        self._owing.pop(consumer, None)
        if not consumer.stopping:
            self._session.mark_failed(consumer.source, why)
        self._update_link_state()

    def _stopped(self, consumer: FastLinkConsumer) -> None:
        """Record that the server has closed the handle of a consumer that was stopped.

        The server has then cancelled its durable subscription, too.
        """
        if consumer.stopping:
            self._session.sources.mark_cancelled(consumer.source)
        self._close_stopped(consumer)

    def _close_stopped(self, consumer: FastLinkConsumer) -> None:
        """Close the channel of a stopped consumer when all its messages are acknowledged."""
        over = consumer.stopping and consumer.handle not in self._by_handle and not len(consumer.unsettled)
        if over and consumer.live:
            consumer.live = False
            self.machine.close_channel(consumer.channel)
            self._consumers.pop(consumer.channel, None)

    # Messages.

    def _notifies(self, rows: list[NotifyRow]) -> list[NotifyRow]:
        """Publish received messages to the routes.

        Return the messages that are left for a later time slice of the connection, if many have addresses
        that are not cached.
        """
        session = self._session
        caches = session.caches()
        publish = session.dispatcher.publish
        batch = session.begun_batch()
        others_wait = session.held_receipts.on or session.held_back.on
        short = session.dispatcher.memory.short
        sender = self._sender
        last_handle, last_head = -1, b""
        consumer: FastLinkConsumer | None = None
        in_turn = iter(rows)
        postponed: list[NotifyRow] = []
        for row in in_turn:
            handle, number, bits, head, body, name = row
            if handle != last_handle:
                last_handle, last_head = handle, b""
                consumer = self._by_handle.get(handle)
                if consumer is not None:
                    entries = caches.setdefault(consumer.source.service, {})
                    limit = consumer.assembly.bytes_max
            if consumer is None or not bits & DELIVERED:
                self._skip_undelivered(consumer)
                continue
            if name not in entries and self._stream.is_turn_spent():
                postponed = [row, *in_turn]
                break
            consumer.unsettled.add(number)
            try:
                if head is not last_head:
                    if len(head) > self._plain_max:
                        self._check_head(head)
                    properties = head_properties(head)
                    durable, _, expires, retained, hops = essentials(properties)
                    last_head = head
                entry = entries.get(name) or session.resolve(consumer.source.service, name, entries)
            except RemoteProtocolError as error:
                outcome = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
                self._unusable(consumer, number, name, outcome, body)
                continue
            if len(body) > limit:
                self._unusable(consumer, number, name, _oversized(len(body)))
                continue
            message = Message(
                entry.address,
                body,
                properties,
                QOS_OF_DURABLE[durable],
                durable,
                retained,
                clock.from_wall(expires),
                hops,
                sender,
            )
            receipt = (consumer, number, message)
            if others_wait and session.hold_if_behind(entry, receipt):
                continue
            if short:
                session.settle([receipt], {0: LOW_ON_MEMORY}, clock.now())
            elif not publish(batch, entry, message, receipt):
                session.handle_unrouted(entry, receipt)
        session.stats.messages_in += len(rows) - len(postponed)
        return postponed

    def _check_head(self, head: bytes) -> None:
        """Check an encoded content header against the limits of listeners. Raises RemoteProtocolError."""
        limits = self._session.limits
        if len(head) > limits.properties_bytes_max:
            text = f"{len(head)} bytes of properties"
            raise RemoteProtocolError(text, reason=ReplyCode.MESSAGE_CONTENTS_INVALID)
        decode_head_properties(head, limits.properties_max)

    def _fragment(self, fragment: Fragment) -> None:
        consumer = self._by_handle.get(fragment.handle)
        joined: JoinedMessage | None = None if consumer is None else consumer.assembly.take(fragment)
        if consumer is None or joined is None:
            return
        if not joined.bits & DELIVERED:
            self._skip_undelivered(consumer)
        elif joined.body is None:
            consumer.unsettled.add(joined.number)
            self._unusable(consumer, joined.number, joined.name, _oversized(joined.size))
        else:
            row = (joined.handle, joined.number, joined.bits, joined.head, joined.body, joined.name)
            self._notifies([row])

    def _skip_undelivered(self, consumer: FastLinkConsumer | None) -> None:
        """Skip a message without the delivered flag, and log this.

        It must be neither processed nor acknowledged (AMQP/Fast 3.5.11). `consumer` is None, and nothing is
        logged, in two cases: the handle of the message was closed meanwhile, or it is the handle of a
        publisher, which has received a response of a peer service.
        """
        if consumer is not None:
            self._session.stats.protocol_errors.add(NOT_DELIVERED)
            log.warning(
                "received message skipped, delivered flag missing",
                link=self._session.name,
                source=consumer.source.name,
            )

    def _unusable(
        self,
        consumer: FastLinkConsumer,
        number: int,
        name: bytes,
        outcome: Outcome,
        body: bytes | None = None,
    ) -> None:
        """Store a malformed or oversized message as a dead letter, for the reason in `outcome`.

        `number` is its delivery number, `name` its destination. `body` is None if it was too large to
        receive.
        """
        session = self._session
        outcome = with_loss(BODY_LOST if body is None else PROPERTIES_LOST, outcome)
        log.warning("malformed or oversized message refused", link=session.name, error=outcome.text)
        entry: RoutingEntry = session.resolve(consumer.source.service, name, {})
        message = Message(entry.address, body or b"", NO_PROPERTIES, sender=self._sender)
        session.store_dead_letter((consumer, number, message), outcome)


def _oversized(byte_count: int) -> Outcome:
    text = f"a body of {byte_count} bytes exceeds limits.message_bytes_max"
    return Outcome(Verdict.REJECTED, Reason.TOO_LARGE, text)


class FastLinkSession(QueueLinkSession[FastLinkConnection, FastLinkConsumer, FastLinkPublisher]):
    """Session of the link `name` to an AMQP/Fast server."""

    def __init__(
        self,
        name: str,
        settings: FastLink,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        *,
        client_id: str,
    ) -> None:
        publisher = FastLinkPublisher(
            status.stats,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            bytes_max=limits.queue_bytes_max,
        )
        super().__init__(name, settings, dispatcher, limits, status, publisher, client_id=client_id)
        self.pings = settings.compatibility == "rfc"
        self.sources = LinkSources(
            durable=settings.durable_subscriptions, wait_max=settings.reconnect_max_secs
        )

    # Interface for the link.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Consume from new sources and stop those no longer needed, because the mapping has changed.

        `targets` is not used: destinations of an AMQP/Fast server cannot be declared.
        """
        fresh, obsolete = self.sources.set_needs(subscriptions)
        self.sources.add_obsolete(obsolete)  # the connection may be lost before the server has cancelled
        if self._connection is not None and self._connection.open:
            self._connection.update_consumers(fresh, obsolete)

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> FastLinkConnection:
        """Begin the negotiation on a new connection. Return the owner of its stream.

        `now` is in loop-clock seconds.
        """
        self._connection = FastLinkConnection(self, stream, target, now)
        return self._connection

    def is_redelivered(self, receipt: Receipt) -> bool:
        """Return True if a message's connection is lost and the server delivers the message again.

        That is so for messages from queues, and for those of durable subscriptions that the mapping still
        needs, while a route exists that can accept them.
        """
        if not super().is_redelivered(receipt):
            return False
        source = receipt[0].source
        if source.service == "queue":
            return True
        is_stored = bool(source.identifier) and self.sources.is_current(source)
        return is_stored and bool(self._entry_of(receipt).plan.branches)

    def tick(self, now: float) -> None:
        """Retry refused destinations, messages that wait for the disk, and dead letters not stored yet.

        `now` is in loop-clock seconds.
        """
        self.publisher.tick(now)
        super().tick(now)

    # Interface for batches: the session is their source.

    def settle_refused(self, receipt: Receipt, outcome: Outcome) -> None:
        """Make a rejected message a dead letter, and retry a released one later."""
        if outcome.verdict is Verdict.REJECTED:
            self.store_dead_letter(receipt, outcome)
            self.retry_followers([receipt])
        else:
            self.stats.refuse(outcome)
            self.handle_release(receipt, outcome)

    def requeue_later(self, receipt: Receipt) -> None:
        """Return a message to its queue at the server after a short delay."""
        receipt[0].requeue_later(receipt, clock.now())

    def new_batch(self) -> Batch:
        """Return an empty batch whose routes store every message that they reject as a dead letter.

        AMQP/Fast has no negative acknowledgement, so the server cannot be notified of a rejection.
        """
        batch = super().new_batch()
        batch.cannot_notify = self._cannot_notify_source
        return batch

    def _cannot_notify_source(self, receipt: Receipt, retries: bool, outcome: Outcome) -> bool:
        """Return True: no AMQP/Fast server can be notified of a rejection, so the route stores the message.

        The parameters, which `CannotNotify` of gateway.model.batch requires, are not used.
        """
        return True

    def queue_of(self, consumer: FastLinkConsumer) -> str:
        """Return "", because routes select the messages of AMQP/Fast by their address only."""
        return ""

    # Interface for the connection.

    def resolve(self, service: str, name: bytes, entries: Entries) -> RoutingEntry:
        """Resolve the routing entry of a new destination, cache it in `entries`, and return it."""
        make_room(entries, self.limits.cache_entries_max)
        address = fast_address(service, name.decode())
        entry = entries[name] = self.dispatcher.entry(self.name, None, address)
        return entry

    def settle_unrouted(self, entry: RoutingEntry, receipt: Receipt) -> None:
        """Settle a message that no route accepts.

        A message from a queue becomes a dead letter if no route selects its address. Others are acknowledged:
        a subscription to topics may include more topics than the routes select.
        """
        message = receipt[2]
        if not entry.plan.branches and message.address.wire.startswith(b"queue:"):
            self.store_dead_letter(receipt, ROUTE_REMOVED if receipt[0].stopping else UNROUTED)
        else:
            self.settle([receipt], None, clock.now())

    def mark_met(self, source: LinkSource) -> None:
        """Record that the server consumes a source for the link: its CONSUME was accepted."""
        if not self.sources.is_current(source):
            return
        if source.why:
            log.info("broker object usable now", link=self.name, kind=source.service, name=source.name)
        self.sources.mark_met(source)

    def mark_failed(self, source: LinkSource, why: str) -> None:
        """Record why the server refuses a source, and retry it later. Other sources are not affected."""
        if self.sources.is_current(source) and self.sources.mark_failed(source, why, clock.now()):
            self.log_unusable(source.service, source.name, why)

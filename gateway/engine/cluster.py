"""Common base of the engine's connections to the cluster.

Such a connection publishes with confirms, declares, and consumes queues. A request that the broker denies
ends the connection with the broker's reason, and the link reconnects. Each connection has a channel for
declarations, whose replies arrive in the order of the requests, one to publish, and those on which queues are
consumed (consumers.py). Only the queue of a client that the broker does not declare costs no more than that
client.

All bytes of a pass of the event loop are parsed before the first of their events is processed, so the
connection or a channel may have ended when an event is processed. Of the events before that end, only
publisher confirms and returned messages still count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog

from gateway.egress.amqp091.consumer import AmqpLinkConsumer
from gateway.egress.amqp091.publisher import AmqpLinkPublisher
from gateway.egress.amqp091.session import CONTENT_FAULTS, POLITE, PUBLISH_METHOD, VERSION
from gateway.egress.connection import QueueLinkConnection
from gateway.engine.consumers import ClusterConsumer, Consumers, Done, QueueOwner
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection, Delivery
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
from gateway.protocols.amqp091.spec import BASIC, ReplyCode
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

QUEUE_ERRORS: Final = frozenset({ReplyCode.NOT_FOUND, ReplyCode.PRECONDITION_FAILED})


class DeclarationRequest(NamedTuple):
    """Declaration that the broker has not confirmed yet, with its callback `done`.

    If `method` is None nothing was sent: `done` is called when all declarations before it are confirmed.
    `consumer` is the consumer of the queue that the declaration concerns, or None.
    """

    method: m.Method | None
    done: Done | None
    consumer: ClusterConsumer | None = None


NOTHING: Final = DeclarationRequest(None, None)


class ClusterConnection(QueueLinkConnection[ClientConnection, AmqpLinkConsumer]):
    """Connection to the cluster, which processes the events of its stream until the stream is lost."""

    _codes = ReplyCode

    def __init__(
        self,
        machine: ClientConnection,
        stats: LinkStats,
        publisher: AmqpLinkPublisher,
        exchange: str,
        stream: Stream,
        deadline: float,
        *,
        direct: str = "",
    ) -> None:
        """Create a connection whose handshake must end before `deadline` (loop-clock seconds).

        `machine` is its AMQP state machine, `stats` has its counters, and `publisher` publishes over it.
        `exchange` is the exchange to which queues are bound. `direct` is the exchange that reaches queues by
        their names, or "".
        """
        super().__init__(machine, stats, stream, deadline)
        self.consumers = Consumers(self, exchange, direct)
        self._publisher = publisher
        self._requests: deque[DeclarationRequest] = deque()
        self._declaring = self._publishing = 0

    # Interface for the stream.

    def receive(self, data: bytes, now: float) -> None:
        """Parse bytes that have arrived, and process their events; `now` is in loop-clock seconds.

        If the AMQP state machine leaves bytes unparsed, another call in a later pass of the event loop is
        requested.
        """
        self._process(self.machine.receive_data(data, now))
        if self.machine.unread:
            self._stream.request_turn()
        self._publisher.continue_turn()
        self._stream.expect(self.machine.body_bytes_remaining)

    def resume_writing(self) -> None:
        """Resume publishing, because the send buffer has drained."""
        self._publisher.pump()

    # Interface for the session and the consumers.

    def abort(self, why: str) -> None:
        """Abort the connection at once for the reason `why`; the link reconnects."""
        self._why = why
        self._stream.abort(why)

    def declare(
        self, method: m.Method, done: Done | None = None, consumer: ClusterConsumer | None = None
    ) -> None:
        """Send a declaration on the channel for declarations; `done` is called when the reply arrives.

        `consumer` is the consumer of the queue that the declaration concerns. If the broker refuses to
        declare that queue, the consumer ends; any other refused declaration ends the connection.
        """
        self._requests.append(DeclarationRequest(method, done, consumer))
        self.machine.send_method(self._declaring, method)
        self._stream.mark_for_flush()

    def open_channel(self) -> int:
        """Open another channel. Return its number."""
        return self.machine.open_channel()

    def wake(self) -> None:
        """Schedule the writing of encoded data for the end of this pass of the event loop."""
        self._stream.mark_for_flush()

    @abstractmethod
    def handle_queue_ready(self, target: QueueOwner) -> None:
        """Do nothing. Subclasses send replies to clients that have waited for the queue of `target`."""

    # Events.

    @abstractmethod
    def _opened(self) -> None:
        """Request the channels, because the handshake is over."""

    @abstractmethod
    def _channel_opened(self, number: int) -> None:
        """Set up the channel `number`, which the broker has opened."""

    @abstractmethod
    def _deliveries(self, contents: Sequence[Delivery]) -> None:
        """Process messages that consumers on this connection have received."""

    @abstractmethod
    def _method(self, event: MethodReceived) -> None:
        """Process a method, usually after `_common_method` has returned False for it."""

    def _returned(self, event: Returned) -> None:
        """Do nothing with a mandatory message that the broker has returned."""

    def _confirmed(self, event: Confirms) -> None:
        self._publisher.confirm(event.confirms)

    def _common_method(self, event: MethodReceived) -> bool:
        """Process a method that all connections to the cluster treat alike, and return True.

        Return False for any other method.
        """
        method, number = event.method, event.channel
        if self.consumers.process_method(number, method):
            return True
        elif number == self._declaring:
            self._call_waiting(replies=1)
        elif isinstance(method, m.ConfirmSelectOk) and number in self.machine.channels:
            self._publisher.open(self.machine, number, self._stream)
            self._publisher.flow(not self._stats.blocked)
            self._confirming()
        else:
            return False
        return True

    def _call_waiting(self, *, replies: int) -> None:
        """Remove the oldest requests, of which `replies` have a reply now, and call their callbacks.

        Requests behind them that wait only for earlier declarations are removed and called back, too.
        """
        while self._requests and (replies or self._requests[0].method is None):
            method, done, _ = self._requests.popleft()
            replies -= method is not None
            if done is not None:
                done()

    def _send_requests(self) -> None:
        """Send again all declarations that have no reply, because their channel was opened again."""
        for method, _, _ in self._requests:
            if method is not None:
                self.machine.send_method(self._declaring, method)

    def _confirming(self) -> None:
        """Do nothing. Called when the publishing channel confirms, so that messages can be published."""

    def _process(self, events: list[Event]) -> None:
        """Process parsed events in order.

        Once the connection is ending only confirms, returned messages and closings are processed.
        """
        for event in events:
            if isinstance(event, Confirms):
                self._confirmed(event)
            elif isinstance(event, Returned):
                self._returned(event)
            elif isinstance(event, ChannelClosed):
                self._channel_closed(event)
            elif isinstance(event, Closed):
                self._closed(event)
            elif self.machine.ending:
                continue
            elif isinstance(event, Deliveries):
                self._deliveries(event.contents)
            elif isinstance(event, MethodReceived):
                self._handle_method(event)
            elif isinstance(event, ChannelOpened):
                if event.channel in self.machine.channels:
                    self._channel_opened(event.channel)
            elif isinstance(event, Opened):
                self._stats.set_version(self.machine, VERSION)
                self.open = True
                self._opened()
            elif isinstance(event, Challenged):
                self._why = "the broker requires another authentication than name and password"
                self.machine.close(ReplyCode.NOT_ALLOWED, self._why)
        if self.machine.closed:
            self._stream.end(self._why or "closed")
        self._stream.mark_for_flush()

    def _handle_method(self, event: MethodReceived) -> None:
        method = event.method
        if isinstance(method, m.ConnectionBlocked):
            log.warning("RabbitMQ blocked publishing", link=self._stats.name, reason=method.reason)
            self._block(True)
        elif isinstance(method, m.ConnectionUnblocked):
            log.info("RabbitMQ unblocked publishing", link=self._stats.name)
            self._block(False)
        else:
            self._method(event)

    def _block(self, on: bool) -> None:
        self._stats.blocked = on
        self._publisher.flow(not on)

    def _channel_closed(self, event: ChannelClosed) -> None:
        """End the connection if a channel was closed, unless the channel concerns only queues of clients.

        On such a channel the check, the consumer or the declaration of a queue has failed, which the
        consumers handle.
        """
        is_queue_error = event.by_peer and event.reply_code in QUEUE_ERRORS and not self.machine.ending
        if is_queue_error and (
            self.consumers.handle_channel_closed(event.channel, event.text) or self._is_refused(event)
        ):
            return
        if event.channel == self._publishing:
            self._publisher.handle_channel_closed(event.reply_code, event.text)
        if not event.by_peer:
            self._count_fault(event.reply_code)
        log.warning("RabbitMQ closed channel, reconnecting", link=self._stats.name, why=event.text)
        self._end(event.text)

    def _is_refused(self, event: ChannelClosed) -> bool:
        """Return True if the channel was closed because the broker refuses to declare a consumer's queue.

        Then the consumer is ended and its other declarations are dropped; declarations for other queues are
        sent again on a new channel.
        """
        method, _, consumer = self._requests[0] if self._requests else NOTHING
        if event.channel != self._declaring or consumer is None or not isinstance(method, m.QueueDeclare):
            return False
        self._requests = deque([one for one in self._requests if one.consumer is not consumer])
        self._declaring = self.machine.open_channel()
        self._call_waiting(replies=0)
        self.consumers.refuse(consumer, event.text)
        return True

    def _end(self, why: str) -> None:
        """Close the connection with connection.close; `why` is reported unless there is an earlier reason."""
        self._why = self._why or why
        self.machine.close(ReplyCode.SUCCESS, "")
        self._stream.end(self._why)

    def _closed(self, event: Closed) -> None:
        self._why = self._why or f"{event.reply_code} {event.text}"
        if event.reply_code not in POLITE:
            self._count_fault(event.reply_code)
        over_content = (event.class_id, event.method_id) == (BASIC, PUBLISH_METHOD)
        if event.by_peer and (over_content or event.reply_code in CONTENT_FAULTS):
            self._publisher.handle_channel_closed(event.reply_code, event.text)

    def _close_stopped(self, consumer: AmqpLinkConsumer) -> None:
        """Do nothing: the consumers of these connections are not stopped one by one."""

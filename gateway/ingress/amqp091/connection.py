"""Connection of one AMQP 0-9-1 client to the embedded broker: its channels, publishes and acknowledgements.

`AmqpConnection` receives events from the protocol machine and executes them: publishes go to the dispatcher
in batches, acknowledgements to the channels, and other methods to the table in the module `methods`. The
handshake is in the module `admission`, the state of a channel in the module `channel`.

While a full queue or too many unsettled publishes hold the client, its publishes wait here, in order with the
methods behind them on the same channel. Large bodies are on disk and may have to be synchronised first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import trio

from gateway import clock
from gateway.access.rights import Rights
from gateway.broker.amqp091.refusals import AmqpRefused, access_refused, precondition_failed
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.memory_shares import BEYOND_SHARE, Holder
from gateway.broker.pressure import FULL
from gateway.broker.publish_permission import amqp_entry
from gateway.broker.routing import RoutingEntry
from gateway.broker.shares import CHANNEL_BYTES, argument_bytes
from gateway.broker.spool import SpoolFile
from gateway.errors import RemoteProtocolError
from gateway.ingress.amqp091.channel import (
    IN_TRANSACTION,
    AmqpChannel,
    Content,
    PublishTarget,
    Receipt,
    Touched,
)
from gateway.ingress.amqp091.checked_properties import resolve_special
from gateway.ingress.amqp091.credit_queue import CreditQueue
from gateway.ingress.amqp091.ingress import AmqpIngress
from gateway.ingress.amqp091.large import LargeBody
from gateway.ingress.amqp091.methods import METHODS, AmqpActions
from gateway.ingress.client import CloseReason, InFlight
from gateway.ingress.delivery_limit import Outstanding
from gateway.ingress.waiting_publishes import EVERY_CHANNEL, LOST_WAITING, WaitingPublishes, finish
from gateway.model.address import Address
from gateway.model.caches import make_room
from gateway.model.delivery_mode import QOS_OF_DURABLE
from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason
from gateway.model.pending import Pending
from gateway.model.shares import Holding
from gateway.model.spooled_bodies import Piece, Spooled
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import decode_publish
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import (
    Acks,
    Authenticate,
    ChannelClosed,
    ChannelOpened,
    Closed,
    Event,
    LargePublish,
    MethodReceived,
    Open,
    Publishes,
)
from gateway.protocols.amqp091.server import ServerConnection
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.translate import DIRECT_REPLY_PREFIX, content_properties, essentials
from gateway.transport.stream import Stream

FEW_PROPERTIES_BYTES = 8_192  # bytes of client properties that are not counted: clients send 5 KB at most
PUBLISH, ACK = m.BasicPublish, m.BasicAck
AHEAD = (m.BasicNack, m.BasicReject)
"""Methods that do not wait for earlier publishes of their channel, except in a transaction."""
REFUSED_FOR: Final[dict[int, Reason]] = {
    ReplyCode.ACCESS_REFUSED: Reason.NOT_AUTHORIZED,
    ReplyCode.NOT_FOUND: Reason.NO_ROUTE,
}
"""Reasons in the record of a message whose channel is closed for it, by reply code.

Codes that are not listed mean malformed.
"""


class AmqpConnection(AmqpActions):
    """Connection of one AMQP 0-9-1 client, which owns a stream."""

    def __init__(self, ingress: AmqpIngress, stream: Stream, now: float) -> None:
        limits = ingress.limits
        machine = ServerConnection(
            frame_max=limits.frame_bytes_max,
            channel_max=limits.channels_max,
            heartbeat=limits.heartbeat_secs,
            message_bytes_max=limits.amqp_message_bytes_max,
            server_properties=ingress.server_properties,
            mechanisms=ingress.mechanisms,
            properties_max=limits.properties_max,
            properties_bytes_max=limits.properties_bytes_max,
            held_bytes_max=limits.message_bytes_max,
            sink=lambda size: LargeBody(ingress.spool, size, self.sender.user),
        )
        super().__init__(ingress, stream, machine, now)
        self._ingress = ingress
        self.host = ingress.hosts[0]  # until connection.open names another
        self.endpoint = ingress.name
        self._blocked = {"disk": "", "memory": ""}  # reasons why publishing is blocked; "": it is not
        self._reported_blocked = False
        self.unsettled = 0
        self.outstanding = Outstanding(stream, limits.unacknowledged_bytes_max)
        self.line = CreditQueue(lambda: not (stream.congested or self.outstanding.full))
        self.channels = {}
        self._holding = Holding(ingress.opened, "")  # of its user, once that has entered the virtual host
        self.confirming = {}
        self.waiting: WaitingPublishes[Event] = WaitingPublishes(stream)
        self._release_publishes: Callable[[], None] | None = None  # None: the client is not held

    @property
    def ingress(self) -> AmqpIngress:
        """Protocol side of the client's listener."""
        return self._ingress

    # Permissions.

    def check_key(self, permission: str, exchange: str, key: str | None) -> None:
        """Check `permission` (`write` or `read`) for a routing key of an exchange; None stands for all keys.

        Only topic exchanges, and names of exchanges that do not exist, have such permissions. Raises
        AmqpRefused 403.
        """
        if not self.rights.unlimited and exchange:
            found = self.host.exchanges.get(exchange)
            if found is None or found.is_topic:
                self.check_topic(permission, exchange, key)

    @property
    def publish_rights(self) -> Rights:
        """Rights of the client under the current rules."""
        return self.rights

    def renewed_entry(self, address: Address, copies: Sequence[str]) -> RoutingEntry:
        """Return the current routing entry of an address to which a transaction is to publish.

        `copies` are the routing keys in CC and BCC. Raises AmqpRefused 403 if the client may no longer
        publish to one of the keys, and Pending if the decision is pending.
        """
        dispatcher = self._ingress.dispatcher
        return amqp_entry(dispatcher, self, self.endpoint, self.host, address, copies, is_accepted=True)

    def refuse_publish(self, resource: str, rule: str) -> NoReturn:
        """Log that `rule` denies publishing to `resource`, and raise AmqpRefused 403."""
        self._refuse_access("write", resource, rule)

    def _recheck(self) -> None:
        """Close the channels whose consumers or transaction use something that the rules now forbid.

        Raises Pending if a permission decision is pending.
        """
        for channel in list(self.channels.values()):
            try:
                for consumer in channel.consumers.values():
                    self.check("read", "queue", consumer.queue.name)
                if channel.transaction is not None:
                    for address, copies in channel.transaction.targets:
                        self.renewed_entry(address, copies)
            except AmqpRefused as error:
                self.refuse(channel.number, error, m.BasicConsume)

    # Interface to the stream.

    def data_to_send(self) -> bytes | list[Piece]:
        """Return the encoded output, preceded by the collected confirms."""
        if self.confirming:
            channels, self.confirming = self.confirming, {}
            alone = []  # with hundreds of channels, most have one confirm
            for channel in channels:
                settled = channel.settled
                if len(settled) == 1 and not channel.unconfirmed:
                    alone.append((channel.number, settled.pop()))
                else:
                    channel.flush_confirms()
            self.machine.ack_each(alone)
        return self.machine.to_send()

    def resume_writing(self) -> None:
        """Resume deliveries: the client's send buffer has drained."""
        self.line.dispatch()

    def connection_lost(self, reason: str) -> None:
        """Process the publishes that still wait, then close all channels and forget the connection.

        Unacknowledged deliveries are requeued, and exclusive queues are deleted.
        """
        self._ingress.dispatcher.memory.forget(self)
        self._drop_publishes(finish(self.waiting, self.stream, self._process), LOST_WAITING)
        self.machine.abandon()
        self._close_channels()
        self._ingress.forget(self, reason)

    def _close_with(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        self.machine.close(code, text, class_id, method_id)
        self._close_channels()

    def _close_channels(self) -> None:
        """Close all channels and delete the exclusive queues."""
        channels = list(self.channels.values())
        self.channels.clear()
        for channel in channels:
            channel.close()
        self._holding.end()
        self.host.delete_exclusive_queues(self)

    # Interface to the listener.

    @property
    def idle(self) -> bool:
        """True if none of the client's publishes awaits an outcome."""
        return not self.unsettled

    def in_flight(self) -> InFlight:
        """Return the numbers of unsettled publishes and unacknowledged deliveries."""
        return InFlight(self.unsettled, sum([len(one.unacknowledged) for one in self.channels.values()]))

    @property
    def waiting_publishes(self) -> WaitingPublishes[Any]:
        """Publishes that wait until a full queue has capacity."""
        return self.waiting

    @property
    def consumes(self) -> bool:
        """True if the client may have to acknowledge deliveries."""
        return any(channel.consumers or channel.unacknowledged for channel in self.channels.values())

    @property
    def channel_count(self) -> int:
        """Number of open channels."""
        return len(self.channels)

    def tick(self, now: float) -> None:
        """Send and check heartbeats, and enforce the handshake timeout. `now` is in loop-clock seconds."""
        if self._in_time(now):
            self.stream.mark_for_flush()

    def shut_down(self, close_reason: CloseReason) -> None:
        """Close the connection with 320 (CONNECTION_FORCED), after which clients reconnect."""
        self.machine.close(ReplyCode.CONNECTION_FORCED, f"CONNECTION_FORCED - {close_reason.value}")
        self.stream.end(close_reason.value)

    # Events.

    def _process(self, events: list[Event]) -> None:
        """Process events in order. Postpone the rest if the stream is suspended or a result is pending.

        The stream stores postponed events until they can be processed.
        """
        self.stream.expect(self.machine.body_bytes_remaining)
        if self.waiting.on:
            events = self._without_waiting(events)
        for at, event in enumerate(events):
            if self.stream.is_suspended:
                self.stream.postpone(events[at:])
                break
            try:
                if not self._process_event(events, at, event):
                    return
            except Pending as pending:
                self._ingress.suspend(self.stream, pending.awaited)
                self.stream.postpone(events[at:])
                break
        if self.machine.closed:
            if not self.machine.sent:
                self._report(0, "the connection does not begin with the AMQP 0-9-1 protocol header")
            self.stream.end("closed", peer_closes=self.machine.closed_by_peer)
        self.stream.mark_for_flush()

    def _without_waiting(self, events: list[Event]) -> list[Event]:
        """Store the events that have to wait in `waiting`. Return the events to process now.

        The result begins with earlier events that need not wait any more. Publishes wait while a full queue
        holds their channel, and later events of the channel that must not overtake them wait as well. Reading
        stops when too many events wait.
        """
        waiting = self.waiting
        ready_events = waiting.take_released()
        for event in events:
            if isinstance(event, Publishes):
                if contents := self._unheld(event.contents):
                    ready_events.append(Publishes(contents))
            elif isinstance(event, Acks):
                if acks := self._unheld_acks(event.acks):
                    ready_events.append(Acks(acks))
            elif isinstance(event, ChannelClosed):
                ready_events += [*waiting.take(event.channel), event]
            elif isinstance(event, Closed):
                ready_events += [*waiting.take_all(), event]
            elif isinstance(event, LargePublish) and self._blocks(event.content[0], publishes=True):
                waiting.add(event.content[0], event, 1, 0)
            elif isinstance(event, MethodReceived) and self._must_wait(event):
                waiting.add(event.channel, event, 1, argument_bytes(getattr(event.method, "arguments", ())))
            else:
                ready_events.append(event)
        for number in waiting.full_channels():
            if waiting.is_held_alone(number) and self.consumes:
                ready_events += waiting.take(number)
            else:
                waiting.stop_reading()
        return ready_events

    def _unheld(self, contents: list[Content]) -> list[Content]:
        """Store messages in `waiting` if a full queue holds their channel. Return the other messages."""
        unheld: list[Content] = []
        by_channel: dict[int, list[Content]] = {}
        for content in contents:
            number = content[0]
            if self._blocks(number, publishes=True):
                by_channel.setdefault(number, []).append(content)
            else:
                unheld.append(content)
        for number, of_channel in by_channel.items():
            size = sum([len(properties) + len(body) for _, _, properties, body in of_channel])
            self.waiting.add(number, Publishes(of_channel), len(of_channel), size)
        return unheld

    def _unheld_acks(self, acks: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
        """Store acknowledgements that have to wait in `waiting`. Return the others, to be processed now.

        An item is (channel, delivery tag, multiple flag). It waits if it belongs to a transaction, and
        earlier events of its channel wait.
        """
        unheld: list[tuple[int, int, bool]] = []
        for ack in acks:
            channel = self.channels.get(ack[0])
            if channel is not None and channel.transaction is not None and self.waiting.has(ack[0]):
                self.waiting.add(ack[0], Acks([ack]), 1, 0)
            else:
                unheld.append(ack)
        return unheld

    def _must_wait(self, event: MethodReceived) -> bool:
        """Return True if a method has to wait until earlier publishes of its channel are processed."""
        channel = self.channels.get(event.channel)
        if channel is not None and channel.transaction is None and isinstance(event.method, AHEAD):
            return False
        if isinstance(event.method, m.TxCommit):
            return self.waiting.blocks(event.channel)
        return self.waiting.has(event.channel)

    def _blocks(self, number: int, *, publishes: bool) -> bool:
        """Return True if an event of channel `number` has to wait.

        A publish (`publishes` True) waits while a full queue holds the channel's publishes, except in a
        transaction. Any event waits if earlier events of the channel wait.
        """
        waiting = self.waiting
        channel = self.channels.get(number)
        if channel is not None and channel.transaction is not None:
            publishes = False  # only the commit publishes
        return waiting.blocks(number) if publishes else waiting.has(number)

    def _forget_waiting(self, number: int) -> None:
        """Drop the waiting events of the closed channel `number`, and count their messages as refused."""
        self._drop_publishes(self.waiting.take(number), FULL)
        self.waiting.forget(number)

    def _drop_publishes(self, events: list[Event], outcome: Outcome) -> None:
        """Count the messages in `events`, which will not be processed, as refused with this outcome."""
        lost = 0
        for event in events:
            if isinstance(event, Publishes):
                lost += len(event.contents)
            elif isinstance(event, LargePublish):
                lost += 1
        if lost:
            self._ingress.stats.count_refused_unpublished(outcome, lost)

    def _process_event(self, events: list[Event], at: int, event: Event) -> bool:
        """Process `event`, which is at index `at` of `events`.

        Return False if the rest of `events` was postponed, with any messages of this event that remain.
        Raises Pending if a result that the event needs is not available yet.
        """
        if isinstance(event, Publishes):
            if contents := self._publishes(event.contents):
                self.stream.postpone([Publishes(contents), *events[at + 1 :]])
                self.stream.mark_for_flush()
                return False
        elif isinstance(event, Acks):
            self._take_acks(event.acks)
        elif isinstance(event, LargePublish):
            self._check_large(event.content[1])
            self._publish_large(event.content)
        elif isinstance(event, MethodReceived):
            self._method(event)
        else:
            self._process_state_event(event)
        return True

    def _check_large(self, data: bytes) -> None:
        """Resolve and cache the target of a large message before its body is published.

        `data` is the message's encoded basic.publish. Raises Pending if a permission decision is pending;
        other errors are reported when the message is published.
        """
        entries = self._ingress.entries_of(self.rights, self.host)
        if data not in entries:
            with suppress(RemoteProtocolError, AmqpRefused):
                self._resolve(data, entries)

    def _process_state_event(self, event: Event) -> None:
        """Process an event that changes the state of a channel or of the connection."""
        if isinstance(event, ChannelOpened):
            self._channel_opened(event)
        elif isinstance(event, ChannelClosed):
            self._channel_closed(event)
        elif isinstance(event, Authenticate):
            self._authenticate(event)
        elif isinstance(event, Open):
            self._open(event)
        elif isinstance(event, Closed):
            self._closed(event)

    def _channel_opened(self, event: ChannelOpened) -> None:
        """Create a channel, or close the connection if no memory for channels is left.

        The memory is limited for all users together and for each user.
        """
        if reached := self._holding.take(CHANNEL_BYTES):
            text = f"RESOURCE_ERROR - {reached} is reached"
            self._report(ReplyCode.RESOURCE_ERROR, text)
            self._close_with(ReplyCode.RESOURCE_ERROR, text, 20, 10)
            return
        self.channels[event.channel] = AmqpChannel(self, event.channel, self._ingress.limits.prefetch_max)

    def _channel_closed(self, event: ChannelClosed) -> None:
        if not event.by_peer:
            self._report(event.reply_code, event.text, channel=True)
        channel = self.channels.pop(event.channel, None)
        if channel is not None:
            if self.waiting.on:
                self._forget_waiting(channel.number)
            channel.close()
            self._holding.give(CHANNEL_BYTES)

    def _closed(self, event: Closed) -> None:
        if not event.by_peer:
            self._report(event.reply_code, event.text)
        self._close_channels()

    def _set_up_client(self) -> None:
        """Enter the virtual host and send connection.open-ok.

        Close the connection if its client properties exceed the user's part of the memory for connections.
        """
        ingress = self._ingress
        self.host = next(host for host in ingress.hosts if host.name == self.host_name)
        self.endpoint = ingress.endpoint_of(self.host)
        self._holding = Holding(ingress.opened, self.sender.user)
        if reached := self._holding.take(max(self.client_properties_bytes - FEW_PROPERTIES_BYTES, 0)):
            text = f"RESOURCE_ERROR - {reached} is reached"
            self._report(ReplyCode.RESOURCE_ERROR, text)
            self._close_with(ReplyCode.RESOURCE_ERROR, text, 10, 40)
            return
        self._welcome()
        if ingress.store is not None and not ingress.store.healthy:
            self.blocked(ingress.store.failure)

    # Publishing.

    def _publish_large(self, content: Content) -> None:
        """Publish a message whose body is in a file.

        The file of a durable message is first synchronised to disk, in a task; later input of the client
        waits for that.
        """
        _, _, raw, body = content
        try:
            durable = essentials(content_properties(raw)).durable
        except RemoteProtocolError:
            durable = False  # malformed properties: the message is refused below
        if durable and isinstance(body, Spooled) and self._ingress.store is not None:
            self._sync(body, content)
        else:
            self._publishes([content], large=True)

    def _sync(self, body: Spooled, content: Content) -> None:
        """Synchronise the body's file to disk, then publish the message; later input waits for that.

        Close the channel if the file cannot be written.
        """
        file = body.file
        assert isinstance(file, SpoolFile)

        async def task() -> None:
            fault: OSError | None = None
            try:
                await trio.to_thread.run_sync(file.sync)
            except OSError as error:
                fault = error
            if self.stream.closed:
                return
            if fault is None:
                self._publishes([content], large=True)
            else:
                self.refuse(
                    content[0], precondition_failed(f"the spool cannot be written: {fault.strerror}"), PUBLISH
                )
            self.stream.resume()
            self._ingress.flush()

        self.stream.suspend()
        self._ingress.tasks.start_soon(task)

    def _publishes(self, contents: list[Content], *, large: bool = False) -> list[Content]:
        """Publish messages. Return those that are postponed to a later time slice of the connection.

        Messages are postponed if the time slice is used up by targets that are not cached yet, or if a
        permission decision is pending. `large` True means one message with a body in a file, which is never
        postponed.
        """
        ingress = self._ingress
        memory = ingress.dispatcher.memory
        if memory.short and not memory.admit(self, len(contents)):
            self._refuse_publishes(contents)
            return []
        postponed = self._publish_each(contents, large=large)
        done = len(contents) - len(postponed)
        ingress.stats.messages_in += done
        if (rate := self.stream.rate) is not None:
            rate.messages += done
        if self.unsettled >= ingress.unsettled_max and self._release_publishes is None:
            self._release_publishes = self.waiting.hold(EVERY_CHANNEL)
        return postponed

    def _publish_each(self, contents: list[Content], *, large: bool) -> list[Content]:  # noqa: PLR0915 - every message
        """Publish messages one by one. Return those that are postponed to a later time slice.

        `large` True means one message with a body in a file, which is never postponed.
        """
        ingress = self._ingress
        dispatcher = ingress.dispatcher
        entries = ingress.entries_of(self.rights, self.host)
        batch = ingress.begun_batch()
        channels = self.channels
        previous: tuple[bytes, bytes] | None = None  # of the previous message, compared by identity
        in_turn = iter(contents)
        postponed: list[Content] = []
        for content in in_turn:
            number, data, raw, body = content
            channel = channels.get(number)
            if channel is None:
                continue  # it was closed by a message before this one
            try:
                if previous is None or data is not previous[0] or raw is not previous[1]:
                    previous = None
                    if data not in entries and not large and self.stream.is_turn_spent():
                        postponed = [content, *in_turn]
                        break
                    found = entries.get(data) or self._resolve(data, entries)
                    shared = content_properties(raw)
                    durable, expiration, retained, hops, special = essentials(shared)
                    previous = data, raw
                entry, property_set = found.entry, shared
                if special:
                    entry, property_set = resolve_special(channel, entry, property_set)
            except (RemoteProtocolError, AmqpRefused) as refusal:
                self._refuse_publish(content, refusal)
                continue
            except Pending as pending:
                if large:  # the decision has left the cache since `_check_large`
                    self.refuse(
                        number, access_refused("the permission could not be checked; retry later"), PUBLISH
                    )
                    continue
                ingress.suspend(self.stream, pending.awaited)
                postponed = [content, *in_turn]
                break
            message = Message(
                entry.address,
                body,
                property_set,
                QOS_OF_DURABLE[durable or channel.confirming],
                durable,
                retained,
                NEVER if expiration is None else clock.utc() + expiration / 1000,
                hops,
                channel.sender,
            )
            if channel.transaction is not None:
                self._keep_for_commit(channel, entry, message, content if found.mandatory else None)
                continue
            confirm = channel.expect_confirm() if channel.confirming else 0
            receipt: Receipt | None = None
            if confirm or found.mandatory:
                receipt = (channel, confirm, content if found.mandatory else None)
                self.unsettled += 1
            try:
                if large:
                    accepted = ingress.publish_large(batch, entry, message, receipt)
                else:
                    accepted = dispatcher.publish(batch, entry, message, receipt)
                if not accepted:
                    ingress.handle_unrouted(entry, message, receipt)
            except RemoteProtocolError as error:  # a headers exchange looked into malformed properties
                self.refuse(number, error, PUBLISH)
        return postponed

    def _refuse_publish(self, content: Content, refusal: RemoteProtocolError | AmqpRefused) -> None:
        """Close the channel of a message that may not be published, because of the error `refusal`.

        The message is recorded as refused, unless it was malformed.
        """
        number, data, raw, body = content
        if isinstance(refusal, AmqpRefused):
            method = decode_publish(data)
            address = amqp_address(method.exchange, method.routing_key)
            message = Message(address, body, content_properties(raw), sender=self.sender)
            why = REFUSED_FOR.get(refusal.code, Reason.MALFORMED)
            self._ingress.record_refused(message, why, str(refusal))
        self.refuse(number, refusal, PUBLISH)

    def _refuse_publishes(self, contents: list[Content]) -> None:
        """Refuse and count the messages `contents` for lack of memory.

        Sends basic.nack on a channel in confirm mode, and closes a channel with a transaction. Messages of
        other channels are dropped.
        """
        for number, *_ in contents:
            channel = self.channels.get(number)
            if channel is None:
                continue
            if channel.transaction is not None:
                text = f"PRECONDITION_FAILED - {LOW_ON_MEMORY.text}"
                self.refuse(number, AmqpRefused(ReplyCode.PRECONDITION_FAILED, text), PUBLISH)
            elif channel.confirming:
                channel.send_nack(channel.expect_confirm())
        self._ingress.stats.count_refused_unpublished(LOW_ON_MEMORY, len(contents))
        self.stream.mark_for_flush()

    def _keep_for_commit(
        self, channel: AmqpChannel, entry: RoutingEntry, message: Message, content: Content | None
    ) -> None:
        """Add a message to the channel's transaction.

        The channel is closed if the transaction then exceeds its limits. `content` is the message as
        received, or None if it need not be returned to the client.
        """
        assert channel.transaction is not None
        limits = self._ingress.limits
        try:
            count, byte_count = channel.transaction.publish(entry, message, content)
        except RemoteProtocolError as error:  # a headers exchange looked into malformed properties
            self.refuse(channel.number, error, PUBLISH)
            return
        if channel.transaction.is_restrained:
            text = f"PRECONDITION_FAILED - {BEYOND_SHARE}"
            self.refuse(channel.number, AmqpRefused(ReplyCode.PRECONDITION_FAILED, text), PUBLISH)
        elif count > limits.transaction_messages_max or byte_count > limits.transaction_bytes_max:
            which = "messages" if count > limits.transaction_messages_max else "bytes"
            text = f"PRECONDITION_FAILED - limits.transaction_{which}_max is reached by one transaction"
            self.refuse(channel.number, AmqpRefused(ReplyCode.PRECONDITION_FAILED, text), PUBLISH)

    def _resolve(self, data: bytes, entries: dict[bytes, PublishTarget]) -> PublishTarget:
        """Return the target of a basic.publish (`data`) that `entries` lacks, and cache it in `entries`.

        Raises RemoteProtocolError 540 for `immediate`, and AmqpRefused if the exchange does not exist, is
        internal, or may not be written to. Raises Pending if a permission check has to wait.
        """
        method = decode_publish(data)
        ingress = self._ingress
        if method.immediate:
            raise RemoteProtocolError(
                "NOT_IMPLEMENTED - immediate=true",
                reason=ReplyCode.NOT_IMPLEMENTED,
                class_id=60,
                method_id=40,
            )
        address = amqp_address(method.exchange, method.routing_key)
        entry = amqp_entry(ingress.dispatcher, self, self.endpoint, self.host, address)
        found = PublishTarget(entry, method)
        make_room(entries, ingress.limits.cache_entries_max)
        entries[data] = found
        return found

    def report_outcome(self, receipt: Receipt, outcome: Outcome | None) -> None:
        """Report the result of the published message `receipt` to the client.

        It is a confirm, a return, or the result of the transaction. `outcome` None means accepted.
        """
        channel, confirm, content = receipt
        self.count_settled(1)
        if content is not None:
            if outcome is not None and outcome.reason is Reason.NO_ROUTE:
                channel.send_back(content)
                outcome = None
            elif outcome is None and DIRECT_REPLY_PREFIX in content[1]:
                channel.send_back(content)  # as in RabbitMQ: a direct reply is in no queue
        if not confirm:
            return
        if confirm == IN_TRANSACTION:
            if channel.transaction is not None:
                channel.transaction.record_outcome(outcome is None)
            return
        if outcome is None:
            channel.confirmed(confirm)
        else:
            channel.send_nack(confirm)

    def count_settled(self, count: int) -> None:
        """Subtract `count` publishes from the unsettled ones.

        Publishes that wait in the connection continue when at most half of `unsettled_max` are unsettled.
        """
        self.stream.mark_for_flush()
        self.unsettled -= count
        if self._release_publishes is not None and self.unsettled <= self._ingress.unsettled_max // 2:
            release_publishes, self._release_publishes = self._release_publishes, None
            release_publishes()

    # Errors.

    def refuse(
        self, number: int, error: RemoteProtocolError | AmqpRefused, method: type[m.Method] | m.Method
    ) -> None:
        """Close the channel `number` or the whole connection, depending on the code of `error`.

        `method` is the client's method that caused the error.
        """
        code = error.code if isinstance(error, AmqpRefused) else error.reason
        ids = method.index >> 16, method.index & 0xFFFF
        fault = RemoteProtocolError(str(error), reason=code, class_id=ids[0], method_id=ids[1])
        events: list[Event] = []
        self.machine.refuse(fault, number, events)
        for event in events:
            if isinstance(event, ChannelClosed):
                self._channel_closed(event)
            elif isinstance(event, Closed):
                self._closed(event)

    # Acknowledgements.

    def _take_acks(self, acks: list[tuple[int, int, bool]]) -> None:
        """Process basic.acks in order: tuples of channel, delivery tag and multiple flag.

        An unknown tag closes its channel.

        A client sends one ack per delivery, so runs of single acks on one channel are settled together:
        per-message work here is a third of the cost of a delivery. The queues dispatch after the last ack.
        """
        touched: Touched = {}
        single: list[int] = []  # tags of the channel `run`
        run = 0
        for number, tag, multiple in acks:
            if number != run or multiple:
                self._acknowledge_each(run, single, touched)
                single, run = [], number
            if not multiple:
                single.append(tag)
                continue
            channel = self.channels.get(number)
            if channel is not None and not channel.acknowledge(tag, True, touched):
                self._refuse_tag(number, tag)
        self._acknowledge_each(run, single, touched)
        for one in touched:
            one.dispatch()

    def _acknowledge_each(self, number: int, tags: list[int], touched: Touched) -> None:
        channel = self.channels.get(number)
        if channel is None or not tags:
            return
        if channel.transaction is None:
            unknown = channel.acknowledge_each(tags, touched)
        else:
            unknown = next((tag for tag in tags if not channel.acknowledge(tag, False, touched)), None)
        if unknown is not None:
            self._refuse_tag(number, unknown)

    def _refuse_tag(self, number: int, tag: int) -> None:
        self.refuse(number, precondition_failed(f"unknown delivery tag {tag}"), ACK)

    # Methods.

    def _method(self, event: MethodReceived) -> None:
        """Execute a method by its action; errors close the channel or the connection.

        If the method has changed a durable object, output waits until the change is on disk.
        """
        channel = self.channels.get(event.channel)
        method = event.method
        if len(self._ingress.batch):
            self._ingress.end_turn()  # a method must see the client's earlier publishes in the queues
        if channel is None:
            if isinstance(method, m.ConnectionUpdateSecret):
                self._update_secret(method)
            return
        action = METHODS.get(type(method))
        if action is None:
            text = "COMMAND_INVALID - unimplemented method"
            self.refuse(event.channel, AmqpRefused(ReplyCode.COMMAND_INVALID, text), method)
            return
        try:
            action(self, channel, method)
        except AmqpRefused as error:
            self.refuse(event.channel, error, method)
        if self.host.has_durable_changes:
            self.host.has_durable_changes = False
            self._wait_for_commit()

    def _wait_for_commit(self) -> None:
        """Delay output until the declarations and deletions made so far are on disk.

        A failed write aborts the connection, because it is then unknown whether they survive a restart.
        """

        def committed(outcome: Outcome) -> None:
            if outcome is ACCEPTED:
                self.stream.release_output()
            else:
                self.stream.abort(outcome.text)

        store = self._ingress.store
        assert store is not None
        self.stream.hold_output()
        store.after_commit(committed)

    def blocked(self, reason: str) -> None:
        """Process a change of the store: `reason` is why it is read-only, or "" if it is writable again.

        The client gets connection.blocked or connection.unblocked.
        """
        self._block("disk", reason)

    def notify_memory(self, short: bool) -> None:
        """Notify the client that memory is short (`short` True), or no longer is.

        The client gets connection.blocked or connection.unblocked. The caller reports `short` True only to
        clients that publish at that time.
        """
        self._block("memory", "low on memory" if short else "")

    @property
    def begun_bytes(self) -> int:
        """Number of bytes of messages that are incomplete or belong to an open transaction."""
        channels = self.channels.values()
        return self.machine.begun_bytes + sum(
            one.transaction.byte_count for one in channels if one.transaction
        )

    @property
    def outstanding_bytes(self) -> int:
        """Number of bytes of unacknowledged deliveries."""
        return self.outstanding.byte_count

    @property
    def transactions(self) -> Iterable[tuple[Holder, int]]:
        """Open transactions, each with the bytes of its publishes in memory."""
        found = [channel.transaction for channel in self.channels.values()]
        return [(one, one.byte_count) for one in found if one is not None and one.byte_count]

    def close_for_memory(self) -> None:
        """Close the connection with 506 (RESOURCE_ERROR): no memory is left for its incomplete messages."""
        text = f"RESOURCE_ERROR - {LOW_ON_MEMORY.text}"
        self._report(ReplyCode.RESOURCE_ERROR, text)
        self.machine.close(ReplyCode.RESOURCE_ERROR, text)
        self.stream.end(LOW_ON_MEMORY.text)

    def _block(self, cause: str, reason: str) -> None:
        """Set why `cause` ("disk" or "memory") blocks publishing; an empty `reason` ends this block.

        Send connection.blocked when the first cause blocks and connection.unblocked when none does any more,
        if the client has that capability.
        """
        self._blocked[cause] = reason
        blocked = any(self._blocked.values())
        if blocked is self._reported_blocked or not (self._ready and self._hears_blocked):
            return
        self._reported_blocked = blocked
        self.machine.send_method(0, m.ConnectionBlocked(reason) if blocked else m.ConnectionUnblocked())
        self.stream.mark_for_flush()


class AmqpListenerSource(AmqpIngress):
    """AMQP 0-9-1 side of a listener, which creates an `AmqpConnection` for each client."""

    def connect(self, stream: Stream, now: float) -> AmqpConnection:
        """Return the connection object of a new client; `now` is in loop-clock seconds."""
        return AmqpConnection(self, stream, now)

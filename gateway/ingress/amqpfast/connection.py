"""Connection of one AMQP/Fast client: negotiation, admission, events, closing of channels and handles.

`FastConnection` receives events from the protocol machine. It authenticates the client and opens the virtual
host, passes SENDs to its `FastPublisher` and commands to the tables of the module `commands`, and applies
acknowledgements. While a full queue holds a channel, later events of the channel wait here in order. Closed
channels are remembered until their numbers are reused, because replies may still be due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from gateway.access.authorization import CurrentRights
from gateway.access.backends import Denial
from gateway.access.principal import Principal
from gateway.access.rights import Decision, Rights
from gateway.broker.amqpfast.destinations import FastQueue
from gateway.broker.amqpfast.virtual_host import FastRefused
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.memory_shares import Holder
from gateway.broker.pressure import FULL
from gateway.broker.queue import Queue
from gateway.errors import RemoteProtocolError
from gateway.ingress.amqpfast.channel import DELIVERY_OVERHEAD, FastChannel, FastHandle, Receipt
from gateway.ingress.amqpfast.commands import CONNECTION_COMMANDS, HANDLE_COMMANDS, FastActions
from gateway.ingress.amqpfast.incoming_transfers import IncomingTransfers
from gateway.ingress.amqpfast.ingress import CHANNEL, HANDLE, FastIngress
from gateway.ingress.amqpfast.publisher import FastPublisher
from gateway.ingress.client import CloseReason, InFlight
from gateway.ingress.delivery_limit import Outstanding
from gateway.ingress.waiting_publishes import LOST_WAITING, WaitingPublishes, finish
from gateway.model.message import Sender
from gateway.model.outcome import Outcome
from gateway.model.pending import Pending
from gateway.model.shares import Holding
from gateway.model.spooled_bodies import Piece
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import decode_credentials
from gateway.protocols.amqpfast.events import (
    Acks,
    Authenticate,
    ChannelClosed,
    Closed,
    CommandReceived,
    Event,
    Fragment,
    HandleClosed,
    NegotiationFailed,
    Open,
    Prepared,
    Ready,
    SendRow,
    Sends,
)
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import NONE, ReplyCode
from gateway.protocols.amqpfast.states import State
from gateway.transport.stream import Stream

# Refusals that close the channel, as the lack concerns more than a handle (section 5 of the notes).
OF_CHANNELS: Final = frozenset((ReplyCode.INSUFFICIENT_RESOURCES, ReplyCode.MESSAGE_TOO_LARGE))


DENIALS: Final = {
    Denial.WRONG: (
        ReplyCode.ACCESS_REFUSED,
        "the name or password is wrong, or guest connected from another machine",
    ),
    Denial.EXPIRED: (ReplyCode.ACCESS_REFUSED, "the token has expired"),
    Denial.UNAVAILABLE: (ReplyCode.TEMPORARILY_FORBIDDEN, "authentication is temporarily unavailable"),
    Denial.REFUSED: (ReplyCode.ACCESS_REFUSED, "too many failed logins"),
    Denial.BUSY: (ReplyCode.TEMPORARILY_FORBIDDEN, "too many logins are waiting"),
}


FAREWELLS: Final = {
    CloseReason.STOPPING: ReplyCode.SUCCESS,
    CloseReason.DISMISSED: ReplyCode.TEMPORARILY_FORBIDDEN,
    CloseReason.EXPIRED: ReplyCode.ACCESS_REFUSED,
    CloseReason.REVOKED: ReplyCode.ACCESS_REFUSED,
    CloseReason.UNSERVED: ReplyCode.TEMPORARILY_FORBIDDEN,
    CloseReason.RULES_CHANGED: ReplyCode.ACCESS_REFUSED,
}


AHEAD: Final = (m.HandleOpen, m.HandleFlow, m.HandleUnget)
"""Handle commands that do not wait for earlier publishes: they change credit, requeue a message, or open a
handle, whose number later commands need."""
OF_TRANSACTIONS: Final = (m.ChannelCommit, m.ChannelRollback)
CACHED_ENTRY_BYTES: Final = 1_024  # bytes of a routing entry that a handle has cached, about
UNREAD_SECS_MAX: Final = 2.0  # for which a client above the limit of waiting publishes may stay unread


def _size_of(event: Event) -> int:
    """Return the bytes that an event occupies: those of its content, or of the texts in its command."""
    if isinstance(event, Fragment | Prepared):
        return len(event.data)
    if not isinstance(event, CommandReceived):
        return 0
    values = [getattr(event.command, name) for _, name in event.command.layout]
    return sum([len(value) for value in values if isinstance(value, bytes | str)])


def _messages_of(event: Event) -> int:
    """Return the number of whole messages in an event."""
    if isinstance(event, Sends):
        return len(event.rows)
    return int(isinstance(event, Fragment) and event.last)


def _handle_of(event: Event) -> int | None:
    """Return the number of the handle that an event belongs to, or None."""
    if isinstance(event, Fragment | Prepared):
        return event.handle
    if isinstance(event, CommandReceived) and isinstance(event.command, m.HandleCommand):
        return event.command.handle_id
    return None


class FastConnection(FastActions):
    """Connection of one AMQP/Fast client, and the owner of its stream."""

    def __init__(self, ingress: FastIngress, stream: Stream, now: float) -> None:
        limits = ingress.limits
        self._ingress = ingress
        self.stream = stream
        self.host = ingress.hosts[0]
        self.holding = Holding(ingress.opened, "")  # of its user, once that has entered a virtual host
        self.machine = ServerConnection(
            frame_max=limits.frame_bytes_max,
            channel_max=limits.channels_max,
            handle_max=limits.handles_max,
            heartbeat=limits.heartbeat_secs,
            message_bytes_max=limits.fast_message_bytes_max,
            negotiation_pause=ingress.options.negotiation_pause_secs,
            mechanisms="PLAIN",
            properties_max=limits.properties_max,
            properties_bytes_max=limits.properties_bytes_max,
            all_browse=ingress.replies_first,
        )
        self.waiting = WaitingPublishes(stream)
        self.publisher = FastPublisher(self, ingress)
        self.outstanding = Outstanding(stream, limits.unacknowledged_bytes_max)
        self.channels = {}
        self.handles = {}
        self.principal: Principal | None = None
        self._current_rights = CurrentRights(ingress.authorization)
        self.sender = Sender(ingress.name)
        self.client_name = ""
        self.owner = ""  # of temporary destinations: the client-name, or a name for this connection alone
        # Closed by the client, which receives replies until their numbers are reused.
        self._left_channels: WeakValueDictionary[int, FastChannel] = WeakValueDictionary()
        self.arrivals = IncomingTransfers(self, ingress, self.publisher)
        self.sending = {}  # channels with a large message under way
        self._delivering: dict[FastChannel, None] = {}
        self._replying: dict[FastChannel, None] = {}  # channels with messages that wait for replies
        self._deadline = now + limits.connect_timeout_secs
        self._ready = False

    @property
    def ingress(self) -> FastIngress:
        """Protocol side of the client's listener."""
        return self._ingress

    # Permissions.

    @property
    def rights(self) -> Rights:
        """Rights of the client under the current rules."""
        return self._current_rights.of(self.principal, self.client_name)

    def check(self, right: str, service: str, name: str, *, whole: bool = False) -> None:
        """Check that the client has `right` (such as "read" or "write") on a destination.

        The destination is the queue, topic or peer service (`service`) called `name`. With `whole`, the right
        is required for all destinations whose names begin with `name`. Raises FastRefused 403 if it is not
        granted.
        """
        rights = self.rights
        if not rights.unlimited:
            self.demand(rights.fast(self.host.name, right, service, name, whole=whole), right, service, name)

    def check_named(self, right: str, service: str, name: str, *, whole: bool) -> None:
        """Check that the client has `right` on the destination that a command names.

        If the destination does not exist, the right to create it is also required. With `whole`, a name that
        no destination has stands for all whose names begin with it; then nothing is created. Raises
        FastRefused 403.
        """
        if self.rights.unlimited:
            return
        beginning = whole and self.host.means_several(service, name)
        self.check(right, service, name, whole=beginning)
        if not beginning and self.host.would_create(service, name):
            self.check("create", service, name)

    def demand(self, decision: Decision, right: str, service: str, name: str) -> None:
        """Log a denial and raise FastRefused 403 unless `decision` allows the access.

        The log and the error contain `right` and the destination, given by `service` and `name`.
        """
        if not decision.allowed:
            self._ingress.record_denial(self.sender, right, f"{service}:{name}", decision.rule)
            raise FastRefused(ReplyCode.ACCESS_REFUSED, f"{right}: access to {service} {name!r} is refused")

    def check_folder(self, path: Path) -> None:
        """Check the right to use the folder `path` for out-of-band transfers. Raises FastRefused 403."""
        rights = self.rights
        if not rights.unlimited:
            decision = rights.fast_out_of_band(self.host.name, self._ingress.folder_name(path))
            self.demand(decision, "out_of_band", "folder", str(path))

    def rules_changed(self) -> None:
        """Recheck the client after a change of the access rules.

        If the client may not enter its virtual host or use its client-name any more, close the connection.
        Otherwise close the handles that consume or call something that is now forbidden, and the channels
        whose transaction or shared folder is now forbidden.
        """
        if not self._ready or self.is_closing:
            return
        rights, host = self.rights, self.host.name
        if not rights.enters_fast(host).allowed or not self._has_its_name(rights, self.client_name):
            text = f"access to virtual host {host!r} with client-name {self.client_name!r} is refused"
            self._report(ReplyCode.ACCESS_REFUSED, text)
            self.machine.close(ReplyCode.ACCESS_REFUSED, text)
            self._close_channels()
            self.stream.mark_for_flush()
            return
        for handle in list(self.handles.values()):
            try:
                self._check_reading(handle)
                for peer in handle.peer_sessions:
                    self.check("talk", "peer", peer)
            except FastRefused as error:
                self.refuse(handle, error.code, str(error))
        for channel in list(self.channels.values()):
            try:
                for _, message in channel.pending:
                    self.publisher.permitted_entry(message.address)
                for call in channel.calls:
                    self.check("talk", "peer", call.peer)
                if channel.folder is not None:
                    self.check_folder(channel.folder.path)
            except FastRefused as error:
                self.close_channel(channel, error.code, str(error))

    def _check_reading(self, handle: FastHandle) -> None:
        """Check that the client may still read what the handle consumes. Raises FastRefused 403."""
        for consumer in handle.consumers:
            for queue in consumer.queues:
                if isinstance(queue, FastQueue) and queue.owner != self.owner:
                    self.check("read", "queue", queue.name)
        for subscription in handle.subscriptions:
            interest = subscription.interest
            topic = self.host.topics.get(interest.name)
            if topic is None or topic.owner != self.owner:
                self.check("read", "topic", interest.name, whole=interest.prefix)

    def _has_its_name(self, rights: Rights, client_name: str) -> bool:
        """Return True if the client may use its client-name. An empty name needs no permission."""
        decision = rights.has_client_id(client_name)
        if client_name and not decision.allowed:
            self._ingress.record_denial(self.sender, "client_id", client_name, decision.rule)
            return False
        return True

    # Interface to the stream.

    def data_to_send(self) -> bytes | list[Piece]:
        """Return all encoded output.

        First, the deliveries that waited for replies in this output are encoded, and as much of large
        messages as the client accepts.
        """
        if self._replying:
            replying, self._replying = self._replying, {}
            for channel in replying:
                channel.send_held()
        if self.sending:
            self._pump()
        if self._delivering:
            channels, self._delivering = self._delivering, {}
            for channel in channels:
                channel.flushed()
        return self.machine.to_send()

    def await_replies(self, channel: FastChannel) -> None:
        """Call the channel's `send_held` when the output with the due replies is collected."""
        self._replying[channel] = None

    def resume_writing(self) -> None:
        """Resume large messages and deliveries: the client's send buffer has drained."""
        self.stream.mark_for_flush()
        self._dispatch()

    def _pump(self) -> None:
        """Encode large messages, one fragment of each in turn, until the client does not read fast enough."""
        while self.sending:
            for large_deliveries in list(self.sending):
                if self.stream.congested:
                    return
                if large_deliveries in self.sending:
                    large_deliveries.write()

    def _dispatch(self) -> None:
        """Deliver waiting messages of all queues that the client consumes."""
        for handle in list(self.handles.values()):
            for consumer in list(handle.consumers):
                for queue in list(consumer.queues):
                    queue.dispatch()

    def connection_lost(self, reason: str) -> None:
        """Process the publishes that still wait, then close all channels and forget the connection.

        Unacknowledged deliveries are requeued, and temporary destinations are deleted.
        """
        self._ingress.dispatcher.memory.forget(self)
        lost = sum(
            [_messages_of(event) for event in finish(self.waiting, self.stream, self._process)],
        )
        if lost:
            self._ingress.stats.count_refused_unpublished(LOST_WAITING, lost)
        self._close_channels()
        self._ingress.forget(self, reason)

    @property
    def is_closing(self) -> bool:
        """True if the connection is closed or closing."""
        return self.stream.closed or self.stream.ending

    def _close_channels(self) -> None:
        """Close all channels, and make the client-name available to other connections.

        The partial transfers of a client without client-name are deleted.
        """
        for channel in list(self.channels.values()):
            self._drop_channel(channel, silent=False)
        self.holding.end()
        self._ingress.clients.remove(self.owner, self)
        if self.owner and not self.client_name:
            self._ingress.partials.drop_of(self.host.name, self.sender.user, self.owner)

    # Interface to the listener.

    @property
    def virtual_host(self) -> str:
        """Name of the client's virtual host; before it opens one, the listener's first."""
        return self.host.name

    @property
    def channel_count(self) -> int:
        """Number of open channels."""
        return len(self.channels)

    @property
    def idle(self) -> bool:
        """True if no message of the client awaits a reply, and no command is suspended."""
        return not self.publisher.unsettled and not self.stream.is_suspended

    def in_flight(self) -> InFlight:
        """Return the numbers of unsettled publishes and unacknowledged deliveries."""
        sent = sum([channel.unacknowledged for channel in self.channels.values()])
        return InFlight(self.publisher.unsettled, sent)

    @property
    def waiting_publishes(self) -> WaitingPublishes[Any]:
        """Publishes that wait until a full queue has capacity."""
        return self.waiting

    @property
    def consumes(self) -> bool:
        """True if the client may have to acknowledge deliveries."""
        return any(handle.consumers for handle in self.handles.values())

    @property
    def begun_bytes(self) -> int:
        """Number of bytes of uncommitted publishes.

        Messages that arrive in fragments are not included, because a limit for all connections together
        applies to them.
        """
        return sum(channel.pending_bytes for channel in self.channels.values())

    @property
    def outstanding_bytes(self) -> int:
        """Number of bytes of unacknowledged deliveries."""
        return self.outstanding.byte_count

    @property
    def transactions(self) -> Iterable[tuple[Holder, int]]:
        """Open transactions, each with the bytes that it has in memory."""
        return [(one, one.pending_bytes) for one in self.channels.values() if one.pending_bytes]

    @property
    def cached_bytes(self) -> int:
        """Estimated bytes of the routing entries that the handles have cached."""
        return CACHED_ENTRY_BYTES * sum([len(handle.entries) for handle in self.handles.values()])

    def forget_entries(self) -> None:
        """Drop the routing entries, names and content headers that the client's handles have cached."""
        for handle in self.handles.values():
            handle.forget_entries()

    def close_for_memory(self) -> None:
        """Close the connection with 506: no memory is left for its transactions."""
        self._report(ReplyCode.INSUFFICIENT_RESOURCES, LOW_ON_MEMORY.text)
        self.machine.close(ReplyCode.INSUFFICIENT_RESOURCES, LOW_ON_MEMORY.text)
        self.stream.end(LOW_ON_MEMORY.text)

    def tick(self, now: float) -> None:
        """Process the timeouts of the connection.

        They are the handshake, heartbeats, closes without response, and the pause after a failed negotiation.
        `now` is in loop-clock seconds.
        """
        machine = self.machine
        failed = machine.state is State.FAILED
        if not self._ready and not failed and now >= self._deadline:
            self._ingress.stats.protocol_errors.add("connect_timeout")
            self.stream.abort("the handshake timed out")
            return
        if self.waiting.unread_seconds(now) >= UNREAD_SECS_MAX:
            self._refuse_waiting()
        machine.tick(now)
        if machine.closed:
            self.stream.end("closed")
        elif not self.stream.listening:
            machine.excuse(now)
        elif machine.timed_out(now):
            word, why = self._silence()
            self._ingress.stats.protocol_errors.add(word)
            self.stream.end(why)
            return
        if any(channel.streamed for channel in self.channels.values()):
            self._dispatch()  # a stream that held up deliveries may have ended
        self.stream.mark_for_flush()

    def _silence(self) -> tuple[str, str]:
        """Return the error name and the text for a client that did not respond in time.

        The missing data is the reply to a close, the end of the stream, or a heartbeat.
        """
        if self.machine.unanswered:
            return "close_timeout", "the client did not confirm the close"
        if self.machine.state is State.ENDING:
            return "close_timeout", "the client did not close the stream"
        return "heartbeat_timeout", "the client is silent"

    def handle_takeover(self) -> None:
        """Close the connection: a client with the same client-name is connected to another replica."""
        text = f"client {self.client_name!r} is connected elsewhere"
        self._report(ReplyCode.CLIENT_ALREADY_ACTIVE, text)
        self.machine.close(ReplyCode.CLIENT_ALREADY_ACTIVE, text)
        self.stream.end(text)
        self.stream.mark_for_flush()

    def shut_down(self, close_reason: CloseReason) -> None:
        """Close the connection with 200, 403 or 507, depending on the reason."""
        self.machine.close(FAREWELLS[close_reason], close_reason.value)
        self.stream.end(close_reason.value)

    # Events.

    def _process(self, events: list[Event]) -> None:
        """Process events in order. Postpone the rest if the stream is suspended or a result is pending.

        The stream stores postponed events until they can be processed.
        """
        if self.waiting.on:
            events = self._without_waiting(events)
        for at, event in enumerate(events):
            if self.stream.is_suspended:
                self.stream.postpone(events[at:])
                break
            if isinstance(event, Sends):
                if rows := self.publisher.publish_rows(event.rows):
                    self.stream.postpone([Sends(rows), *events[at + 1 :]])
                    self.stream.mark_for_flush()
                    return
            elif isinstance(event, Acks):
                self._acks(event.rows)
            elif not self._perform(event):
                self.stream.postpone(events[at:])
                break
        if self.arrivals.unwritten:
            self.arrivals.write()
        if self.machine.closed:
            self.stream.end("closed")
        self.stream.mark_for_flush()

    def _without_waiting(self, events: list[Event]) -> list[Event]:
        """Store the events that have to wait in `waiting`. Return the events to process now.

        The result begins with earlier events that need not wait any more. Publishes wait while a full queue
        holds their channel, and later events of the channel that must not overtake them wait as well.
        """
        waiting = self.waiting
        ready_events = waiting.take_released()
        opened: dict[int, int] = {}  # channel numbers of the handles that these events open
        for event in events:
            if isinstance(event, Sends):
                if rows := self._unheld(event.rows, opened):
                    ready_events.append(Sends(rows))
            elif isinstance(event, Acks):
                if rows_of_acks := self._unheld_acks(event.rows):
                    ready_events.append(Acks(rows_of_acks))
            elif isinstance(event, HandleClosed | ChannelClosed):
                ready_events += [*waiting.take(event.channel), event]
            elif isinstance(event, Closed):
                ready_events += [*waiting.take_all(), event]
            elif channel := self._channel_waited_for(event, opened):
                waiting.add(channel.number, event, 1, _size_of(event))
            else:
                ready_events.append(event)
                if isinstance(event, CommandReceived) and isinstance(event.command, m.HandleOpen):
                    opened[event.command.handle_id] = event.command.channel_id
        for number in waiting.full_channels():
            if waiting.is_held_alone(number) and self.consumes:
                ready_events += waiting.take(number)
            else:
                waiting.stop_reading()
        return ready_events

    def _unheld(self, rows: list[SendRow], opened: dict[int, int]) -> list[SendRow]:
        """Store messages in `waiting` if a full queue holds their channel. Return the other messages.

        `opened` has the handles that the same events open, with the numbers of their channels.
        """
        unheld: list[SendRow] = []
        by_channel: dict[int, list[SendRow]] = {}
        for row in rows:
            channel = self._channel_of(row[0], opened)
            if channel is None or not self._blocks(channel, publishes=not channel.transacted):
                unheld.append(row)
            else:
                by_channel.setdefault(channel.number, []).append(row)
        for number, of_channel in by_channel.items():
            size = sum([len(head) + len(body) for _, _, head, body, _ in of_channel])
            self.waiting.add(number, Sends(of_channel), len(of_channel), size)
        return unheld

    def _channel_of(self, handle: int, opened: dict[int, int]) -> FastChannel | None:
        """Return the channel of a handle, or None if neither exists.

        `opened` has the handles that the same events open, with the numbers of their channels.
        """
        number = opened.get(handle)
        if number is not None:
            return self.channels.get(number)
        found = self.handles.get(handle)
        return None if found is None else found.channel

    def _unheld_acks(self, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Store acknowledgements that have to wait in `waiting`. Return the others, to be processed now.

        An acknowledgement waits if it belongs to a transaction, and earlier events of its channel wait.
        """
        unheld: list[tuple[int, int, int]] = []
        for row in rows:
            channel = self.channels.get(row[0])
            if channel is not None and channel.transacted and self.waiting.has(channel.number):
                self.waiting.add(channel.number, Acks([row]), 1, 0)
            else:
                unheld.append(row)
        return unheld

    def _channel_waited_for(self, event: Event, opened: dict[int, int]) -> FastChannel | None:
        """Return the channel whose earlier events an event has to wait for, or None if there is none.

        `opened` has the handles that the same events open, with the numbers of their channels.
        """
        publishes = False
        handle = _handle_of(event)
        if handle is not None:
            channel = self._channel_of(handle, opened)
            publishes = isinstance(event, Fragment) and event.last
            if isinstance(event, CommandReceived) and isinstance(event.command, AHEAD):
                return None
            if channel is not None and channel.transacted:
                publishes = False
        elif isinstance(event, CommandReceived) and isinstance(event.command, OF_TRANSACTIONS):
            channel = self.channels.get(event.command.channel_id)
            publishes = isinstance(event.command, m.ChannelCommit)
        else:
            return None
        return channel if channel is not None and self._blocks(channel, publishes=publishes) else None

    def _blocks(self, channel: FastChannel, *, publishes: bool) -> bool:
        """Return True if an event of the channel has to wait.

        A publish (`publishes` True) waits while a full queue holds the channel's publishes. Any event waits
        if earlier events of the channel wait.
        """
        waiting = self.waiting
        return waiting.blocks(channel.number) if publishes else waiting.has(channel.number)

    def _refuse_waiting(self) -> None:
        """Close with 506 the channels that have reached the limit of waiting publishes (2.2.8.8).

        The client is then read again.
        """
        for number in self.waiting.full_channels():
            if self.waiting.is_held_alone(number):
                self.close_channel(self.channels[number], ReplyCode.INSUFFICIENT_RESOURCES, FULL.text)

    def _perform(self, event: Event) -> bool:
        """Process an event that is neither a SEND nor an acknowledgement.

        Return False if the event must be postponed because a result is pending, and otherwise True.
        """
        try:
            if isinstance(event, Fragment):
                self.arrivals.fragment(event)
            elif isinstance(event, CommandReceived):
                self._command(event.command)
            elif (hear := RARE.get(type(event))) is not None:
                hear(self, event)
        except Pending as pending:
            self._ingress.suspend(self.stream, pending.awaited)
            return False
        return True

    def _handle_closed(self, event: HandleClosed) -> None:
        if not event.by_peer:
            self._report(event.reply_code, event.text, HANDLE)
        handle = self.handles.get(event.handle)
        if handle is not None:
            self._drop_handle(handle, silent=not event.by_peer)

    def _channel_closed(self, event: ChannelClosed) -> None:
        if not event.by_peer:
            self._report(event.reply_code, event.text, CHANNEL)
        channel = self.channels.get(event.channel)
        if channel is not None:
            self._drop_channel(channel, silent=not event.by_peer)

    def _closed(self, event: Closed) -> None:
        if not event.by_peer:
            self._report(event.reply_code, event.text)
        self._flush_publishes()
        self._close_channels()

    def _handle_prepare(self, event: Prepared) -> None:
        self.arrivals.handle_prepare(event)

    def _handle_ready(self, event: Ready) -> None:
        """Send the large message for which the client's READY has arrived."""
        handle = self.handles.get(event.handle)
        if handle is not None:
            handle.channel.large_deliveries.ready(handle, event.message_size)

    def _flush_publishes(self) -> None:
        """Route the client's earlier publishes, so that its next command finds them in the queues."""
        if len(self._ingress.batch):
            self._ingress.end_turn()

    def _command(self, command: m.Command) -> None:
        """Execute a command by its action; an error closes the handle or the channel."""
        self._flush_publishes()
        opens = CONNECTION_COMMANDS.get(type(command))
        if opens is not None:
            opens(self, command)
            return
        assert isinstance(command, m.HandleCommand)
        handle = self.handles.get(command.handle_id)
        if handle is None:
            return  # closed by an earlier event
        try:
            HANDLE_COMMANDS[type(command)](self, handle, command)
        except FastRefused as error:
            self.refuse(handle, error.code, str(error))

    def _acks(self, rows: list[tuple[int, int, int]]) -> None:
        """Process acknowledgements (`rows`): tuples of channel, tag and message number.

        They are cumulative, so only the highest message number of each channel is applied. Those with a tag
        get a reply, after the settlement is on disk.
        """
        touched: dict[Queue, None] = {}
        tagged: list[tuple[FastChannel, int]] = []
        highest: dict[int, int] = {}
        for number, tag, message_number in rows:
            if message_number > highest.get(number, 0):
                highest[number] = message_number
            if tag and number in self.channels:
                tagged.append((self.channels[number], tag))
        for number, message_number in highest.items():
            if number in self.channels:
                self.channels[number].acknowledge(message_number, touched)
        for queue in touched:
            queue.dispatch()
        if tagged:
            if any(queue.storage is not None for queue in touched):
                self._ingress.after_commit(lambda outcome: self._acked(tagged))
            else:
                self._acked(tagged)

    def _acked(self, tagged: list[tuple[FastChannel, int]]) -> None:
        """Reply to acknowledgements (`tagged`: channel and tag) when the store has written their settlement.

        The client gets the replies after a failed write, too: its messages may then be redelivered after a
        crash.
        """
        for channel, tag in tagged:
            if not channel.silent:
                self.machine.reply_channel(channel.number, tag)
        self.stream.mark_for_flush()

    def delivered(self, channel: FastChannel, count: int, byte_count: int) -> None:
        """Count `count` messages that were encoded on a channel; `byte_count` is their size in bytes.

        Schedules the close of a channel whose message numbers have run out.
        """
        self._delivering[channel] = None
        stream = self.stream
        stream.queued += byte_count + DELIVERY_OVERHEAD * count
        stream.mark_for_flush()
        self._ingress.stats.messages_out += count
        if channel.is_exhausted and not channel.closing:
            channel.closing = True
            text = "all message numbers of the channel are used"
            self._ingress.call_after_turn(
                lambda: self.close_channel(channel, ReplyCode.INSUFFICIENT_RESOURCES, text)
            )

    # Replies and closes.

    def report_outcome(self, receipt: Receipt, outcome: Outcome) -> None:
        """Report the outcome of the message `receipt`: reply to it, or close its handle or channel."""
        self.publisher.report_outcome(receipt, outcome)

    def count_replied(self, count: int) -> None:
        """Subtract `count` messages from the unsettled ones, because their replies have been encoded."""
        self.publisher.count_replied(count)

    def refuse(self, handle: FastHandle, code: int, text: str) -> None:
        """Close the handle or its channel, depending on the reply code, because a command is refused."""
        of_channel = code in OF_CHANNELS
        self._report(code, text, CHANNEL if of_channel else HANDLE)
        if of_channel:
            self.close_channel(handle.channel, code, text)
        else:
            self.close_handle(handle, code, text)

    def close_handle(self, handle: FastHandle, code: int, text: str) -> None:
        """Send HANDLE CLOSE with this reply code and text, and remove the handle.

        HANDLE CLOSE is not sent if the client has reopened the handle's number.
        """
        if not handle.is_closed:
            if not handle.silent:
                self.machine.close_handle(handle.number, code, text)
            self._drop_handle(handle, silent=True)
            self.stream.mark_for_flush()

    def close_channel(self, channel: FastChannel, code: int, text: str) -> None:
        """Send CHANNEL CLOSE with this reply code and text, and remove the channel."""
        if not channel.silent:
            self.machine.close_channel(channel.number, code, text)
            self._drop_channel(channel, silent=True)
            self.stream.mark_for_flush()

    def _drop_handle(self, handle: FastHandle, *, silent: bool) -> None:
        """Remove a closed handle, and release its consumers, sessions and memory.

        `silent` True: nothing more may be sent on the handle, not even pending replies.
        """
        handle.is_closed = silent
        if self.handles.get(handle.number) is handle:
            if self.waiting.has(handle.channel.number):
                self._forget_waiting(handle.channel, handle.number)
            del self.handles[handle.number]
            del handle.channel.handles[handle.number]
            self.arrivals.abandon_handle(handle)
            handle.close()
            self.holding.give(handle.counted_bytes)
            handle.channel.large_deliveries.abandon_handle(handle)

    def _drop_channel(self, channel: FastChannel, *, silent: bool) -> None:
        """Remove a closed channel and its handles, and requeue its unacknowledged deliveries.

        `silent` True: nothing more may be sent on the channel, not even pending replies.
        """
        channel.silent = silent
        if self.waiting.has(channel.number):
            self._forget_waiting(channel, None)
        channel.large_deliveries.close()
        for handle in list(channel.handles.values()):
            self._drop_handle(handle, silent=silent)
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]
            self.waiting.forget(channel.number)
            self._delivering.pop(channel, None)
            self._replying.pop(channel, None)
            channel.close()
            self.holding.give(channel.counted_bytes)
            if channel.folder is not None:
                self._ingress.unshare(channel.folder)
        if not silent:
            self._left_channels[channel.number] = channel

    def _forget_waiting(self, channel: FastChannel, handle: int | None) -> None:
        """Drop the waiting events of a closed channel, or only those of its handle number `handle`.

        The dropped messages are counted as refused.
        """
        if self.channels.get(channel.number) is not channel:
            return
        lost = 0
        for event in self.waiting.take(channel.number):
            if isinstance(event, Sends):
                remaining = [] if handle is None else [row for row in event.rows if row[0] != handle]
                lost += len(event.rows) - len(remaining)
                if remaining:
                    size = sum([len(head) + len(body) for _, _, head, body, _ in remaining])
                    self.waiting.add(channel.number, Sends(remaining), len(remaining), size)
            elif handle is not None and _handle_of(event) != handle:
                self.waiting.add(channel.number, event, 1, _size_of(event))
            else:
                lost += _messages_of(event)
        if lost:
            self._ingress.stats.count_refused_unpublished(FULL, lost)

    def reopen_channel(self, number: int) -> None:
        """Discard pending replies of a closed channel, because the client has reopened its number."""
        abandoned = self._left_channels.pop(number, None)
        if abandoned is not None:
            abandoned.silent = True

    def _report(self, code: int, text: str, part: str = "connection") -> None:
        """Count and log an error with this reply code and text.

        `part` names what the error closes: the connection, a channel or a handle.
        """
        try:
            word = ReplyCode(code).name.lower()
        except ValueError:
            word = "other"
        self._ingress.stats.protocol_errors.add(word)
        if self._ready:
            self._ingress.report_closed(self.stream.remote, text, part)
        else:
            self._ingress.report_refused(self.stream.remote, text)

    # Negotiation.

    def _authenticate(self, event: Authenticate) -> None:
        """Verify the client by its password or token, or admit it anonymously; deny it if that fails.

        A failure before the client has sent a user name is counted for its address.
        """
        ingress = self._ingress
        if ingress.logins.failures.blocks(self.stream.remote):
            ingress.logins.log_denied(self.stream, "", Denial.REFUSED)
            self._deny(*DENIALS[Denial.REFUSED])
            return
        if not event.offered and event.mechanism.upper() != NONE:
            self._count_failed_negotiation()
            self._deny(ReplyCode.BAD_FIELD_VALUE, f"mechanism {event.mechanism!r} is not supported")
            return
        try:
            pair = decode_credentials(event.mechanism, event.responses)
        except RemoteProtocolError as error:
            self._count_failed_negotiation()
            self._deny(error.reason, str(error))
            return
        user, password = pair or ("", "")
        credentials = ingress.logins.credentials(self.stream, user, password.encode())
        if pair is None and not ingress.access.recognizes(credentials):
            anonymous = ingress.access.anonymous_principal(self.stream.remote, ingress.anonymous)
            if anonymous is None:
                ingress.logins.audit_refusal(self.stream, "", "anonymous")
                self._count_failed_negotiation()
                self._deny(ReplyCode.ACCESS_REFUSED, "a login and a password are needed")
            else:
                self._admit(anonymous)
            return
        principal = ingress.access.verify_nowait(credentials)
        if principal is not None:
            self._admit(principal)
        else:
            ingress.logins.verify(self.stream, credentials, partial(self._verified, user))

    def _verified(self, user: str, found: Principal | Denial) -> None:
        """Admit the client and process its further input, or deny it if its verification failed."""
        if isinstance(found, Denial):
            self._ingress.logins.log_denied(self.stream, user, found)
            self._deny(*DENIALS[found])
        else:
            self._admit(found)
            self.receive(b"", self._ingress.now())

    def _deny(self, code: int, text: str) -> None:
        self._ingress.stats.refused.add("access_refused")
        self.machine.fail(code, text)
        self._fail_negotiation(code, text)

    def _count_failed_negotiation(self) -> None:
        """Count a failed negotiation for the client's address, because no user name was sent (3.2.12)."""
        self._ingress.logins.failures.broke_negotiation(self.stream.remote)

    def _negotiation_failed(self, event: NegotiationFailed) -> None:
        if event.begun:
            self._count_failed_negotiation()
        self._fail_negotiation(event.reply_code, event.text)

    def _fail_negotiation(self, code: int, text: str) -> None:
        """Log a failed negotiation and stop reading; `tick` closes the connection after a pause."""
        self._report(code, text)
        self.stream.hold()

    def _admit(self, principal: Principal) -> None:
        self.principal = principal
        self.sender = Sender(self._ingress.name, "", principal.name, self.stream.remote)
        self._ingress.logins.count_accepted()
        self.machine.tune()
        self.stream.mark_for_flush()

    def _open(self, event: Open) -> None:
        """Open the virtual host for the client, or close the connection.

        Reasons to close it are an unknown or forbidden virtual host, a client-name that is active or
        forbidden, and the limit of the user's connections.
        """
        host = next((one for one in self._ingress.hosts if one.name == event.virtual_path), None)
        if host is None:
            assert self.principal is not None
            self._ingress.logins.audit_refusal(
                self.stream, self.principal.name, "virtual_host", event.client_name, proved=True
            )
            text = f"no virtual host {event.virtual_path!r}"
            self._report(ReplyCode.VIRTUAL_PATH_NOT_VALID, text)
            self.machine.close(ReplyCode.VIRTUAL_PATH_NOT_VALID, text)
            return
        owner = event.client_name or self._ingress.new_owner()
        if self._ingress.clients.is_active(owner):
            text = f"client {owner!r} is already connected"
            self._report(ReplyCode.CLIENT_ALREADY_ACTIVE, text)
            self.machine.close(ReplyCode.CLIENT_ALREADY_ACTIVE, text)
            return
        assert self.principal is not None
        rights = self._ingress.rights_of(self.principal, event.client_name)
        decision = rights.enters_fast(host.name)
        if not decision.allowed:
            self._ingress.record_denial(self.sender, "connect", f"virtual host {host.name!r}", decision.rule)
        if not decision.allowed or not self._has_its_name(rights, event.client_name):
            resource = repr(event.client_name) if decision.allowed else f"virtual host {host.name!r}"
            text = f"access to {resource} refused for user {self.principal.name!r}"
            self._report(ReplyCode.ACCESS_REFUSED, text)
            self.machine.close(ReplyCode.ACCESS_REFUSED, text)
            return
        self.sender = Sender(self._ingress.name, event.client_name, self.principal.name, self.stream.remote)
        if limit := self._ingress.admit_client(self, self.principal, rights, event.client_name, "0.7c0"):
            text = f"{limit} is reached by user {self.principal.name!r}"
            self._report(ReplyCode.INSUFFICIENT_RESOURCES, text)
            self.machine.close(ReplyCode.INSUFFICIENT_RESOURCES, text)
            return
        self.host, self.client_name, self.owner = host, event.client_name, owner
        self.holding = Holding(self._ingress.opened, self.sender.user)
        self._ingress.clients.enter(owner, self)
        self._ready = True
        self.machine.opened()
        self._ingress.tick_faster(self, self.machine.peer_heartbeat)
        self._ingress.stats.set_version(self.machine, "0.7c0")


RARE: Final[dict[type[Event], Callable[[FastConnection, Any], None]]] = {
    HandleClosed: FastConnection._handle_closed,
    ChannelClosed: FastConnection._channel_closed,
    Closed: FastConnection._closed,
    Prepared: FastConnection._handle_prepare,
    Ready: FastConnection._handle_ready,
    Authenticate: FastConnection._authenticate,
    Open: FastConnection._open,
    NegotiationFailed: FastConnection._negotiation_failed,
}


class FastListenerSource(FastIngress):
    """AMQP/Fast side of a listener, which creates a `FastConnection` for each client."""

    def connect(self, stream: Stream, now: float) -> FastConnection:
        """Return the connection object of a new client; `now` is in loop-clock seconds."""
        return FastConnection(self, stream, now)

    def forget_entries(self) -> None:
        """Drop the routing entries and names that the clients' handles have cached; memory is short."""
        for connection in self.ingress_clients.connections:
            if isinstance(connection, FastConnection):
                connection.forget_entries()

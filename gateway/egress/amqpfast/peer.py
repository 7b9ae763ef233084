"""One connection of an AMQP/Fast link: negotiation, its channels, and what the server says on them.

There is one channel to send on; one per source that is consumed; and, once it is needed, one for large
messages. The link is up when the first of them is open and the server has answered for every source, whether
or not it lets us have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.switch import Entry
from gateway.egress.amqpfast.intake import Intake
from gateway.egress.amqpfast.opening import client_machine
from gateway.egress.amqpfast.reading import Joined
from gateway.egress.amqpfast.sources import Source, Survey
from gateway.egress.connection import QueuePeer
from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES
from gateway.model.spooled import Piece
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.dialect import SERVICES
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
from gateway.protocols.amqpfast.spec import BODY_SIZE_MAX, ReplyCode
from gateway.protocols.amqpfast.translate import facts, head_properties
from gateway.settings.endpoints import Target
from gateway.transport.stream import Stream

if TYPE_CHECKING:
    from gateway.egress.amqpfast.conversation import FastConversation

log = structlog.get_logger(limited=True)

VERSION: Final = "0.7c0"
REOPEN_SECS: Final = 1.0  # the sending channel, when it was closed though nothing was on its way
POLITE: Final = frozenset({ReplyCode.SUCCESS, ReplyCode.CLIENT_ALREADY_ACTIVE})
# Closing the connection with one of these, a server complains of what it was sent.
CONTENT_FAULTS: Final = frozenset(
    (
        *(ReplyCode.FRAMING_ERROR, ReplyCode.BAD_FIELD_VALUE, ReplyCode.COMMAND_NOT_VALID),
        *(ReplyCode.INTERNAL_ERROR, ReplyCode.MESSAGE_CONTENTS_INVALID),
    )
)


class FastLinkPeer(QueuePeer[ClientConnection, Intake]):
    """The peer object of a link's stream, for as long as that connection lives."""

    _codes = ReplyCode

    def __init__(self, conversation: FastConversation, stream: Stream, target: Target, now: float) -> None:
        settings, limits = conversation.settings, conversation.limits
        machine = client_machine(
            target,
            conversation.client_id,
            frame_max=limits.frame_bytes_max,
            channel_max=limits.channels_max,
            heartbeat=settings.heartbeat_secs,
            message_bytes_max=BODY_SIZE_MAX,  # a larger one than we take is passed over, see Assembly
        )
        super().__init__(machine, conversation.stats, stream, now + settings.connect_timeout_secs)
        self._conversation = conversation
        self._sender = Sender(conversation.name, address=stream.remote)
        self._sending = 0  # channel number
        self._reopen_at = 0.0
        self._by_handle: dict[int, Intake] = {}
        self._asked: dict[int, Intake] = {}  # whose CONSUME has not been answered, by handle
        self._surveys: dict[Source, Survey] = {}  # of prefixes of queues
        self._survey_channel = 0

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived."""
        self._process(self.machine.receive_data(data, now))

    def data_to_send(self) -> bytes | list[Piece]:
        """Acknowledgements that have gathered, and whatever was encoded."""
        self._acknowledge()
        machine = self.machine
        return machine.pieces_to_send() if machine.large else machine.data_to_send()

    def drained(self) -> None:
        """The server reads again."""
        self._conversation.outgoing.drained()

    def lost(self, reason: str) -> None:
        """The connection is gone: nobody waits for our acknowledgements, and sends must be repeated."""
        self._let_go()
        self._by_handle.clear()
        self._conversation.disconnected(self, self._why or reason)

    # What the link asks.

    def tick(self, now: float) -> None:
        """Heartbeats, the time for the negotiation, and what was put off."""
        if not self._in_time(now):
            return
        conversation = self._conversation
        for intake in list(self._intakes.values()):
            for receipt in intake.tick(now):
                conversation.retry(receipt)
        if self.open:
            if self._reopen_at and now >= self._reopen_at:
                self._open_sending()
            for source in conversation.sources.due(now):
                self._consume(source)
            self._survey(now)
        self._stream.mark()

    # What the conversation asks.

    @property
    def outstanding(self) -> int:
        """Messages that the server awaits an answer to."""
        return sum(len(intake.unsettled) for intake in self._intakes.values())

    def rearrange(self, fresh: list[Source], gone: list[Source]) -> None:
        """The mapping changed: consume what is new, leave what is not wanted any more."""
        consumed = {intake.source: intake for intake in self._intakes.values() if not intake.stopping}
        for source in gone:
            survey = self._surveys.pop(source, None)
            if survey is not None:
                self.machine.close_handle(survey.handle)
            if source in consumed:
                consumed[source].stop()
            elif source.identifier:
                self._abandon(source)
        for source in fresh:
            self._consume(source)
        self._arranged()
        self._stream.mark()

    # Events.

    def _process(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Replies):
                self._replies(event.rows)
            elif isinstance(event, Notifies):
                self._notifies(event.rows)
            elif isinstance(event, Fragment):
                self._fragment(event)
            elif isinstance(event, HandleClosed):
                self._handle_closed(event)
            elif isinstance(event, ChannelClosed):
                self._channel_closed(event)
            elif isinstance(event, Released):
                self._released(event)
            elif isinstance(event, Ready):
                self._conversation.outgoing.ready(event.handle, event.message_size)
            else:
                self._rare(event)
        if self.machine.closed:
            self._stream.end(self._why or "closed")
        self._stream.mark()

    def _rare(self, event: Event) -> None:
        if isinstance(event, Opened):
            self._opened()
        elif isinstance(event, Closed):
            self._closed(event)
        elif isinstance(event, Prepared):
            text = "this client asked for no restartable delivery"
            self.machine.close_handle(event.handle, ReplyCode.NOT_IMPLEMENTED, text)
        elif isinstance(event, Challenged):
            self._why = "the server wants more than a name and password"
            self.machine.close(ReplyCode.ACCESS_REFUSED, self._why)
        elif isinstance(event, CommandReceived) and isinstance(event.command, m.HandleIndex):
            self._surveyed(event.command)

    def _opened(self) -> None:
        conversation = self._conversation
        conversation.stats.spoke(self.machine, VERSION)
        self.open = True
        self._open_sending()
        for source in conversation.sources.left_behind():
            self._abandon(source)
        for source in conversation.sources.connected():
            self._consume(source)

    def _open_sending(self) -> None:
        self._reopen_at = 0.0
        try:
            self._sending = self.machine.open_channel()
        except LocalProtocolError as error:
            log.warning("no channel", link=self._conversation.name, error=str(error))
            self._sending = 0
            self._reopen_at = trio.current_time() + REOPEN_SECS

    def _closed(self, event: Closed) -> None:
        self._why = f"{event.reply_code} {event.text}".rstrip()
        if event.reply_code not in POLITE:
            self._count_fault(event.reply_code)
        if event.by_peer and event.reply_code in CONTENT_FAULTS:
            self._conversation.outgoing.close_over(event.reply_code, event.text)

    def _replies(self, rows: list[ReplyRow]) -> None:
        outgoing = self._conversation.outgoing
        if self._asked or not outgoing.opened:
            sent: list[ReplyRow] = []
            for row in rows:
                intake = self._asked.pop(row[1], None)
                if intake is not None:
                    self._conversation.met(intake.source)
                    self._begin_survey(intake.source)
                    self._arranged()
                elif row[1] != NO_HANDLE:
                    sent.append(row)
                elif row[0] == self._sending:
                    outgoing.open(self.machine, row[0], self._stream)
                    self._arranged()
            rows = sent
        outgoing.replies(rows)

    def _handle_closed(self, event: HandleClosed) -> None:
        if not event.by_peer:
            self._count_fault(event.reply_code)
        intake = self._by_handle.get(event.handle)
        if intake is None:
            for source in [one for one, survey in self._surveys.items() if survey.handle == event.handle]:
                del self._surveys[source]  # it may not be looked through, or has gone
                return
            self._conversation.outgoing.handle_closed(event.handle, event.reply_code, event.text)
            return
        # What it has delivered is given back with its channel, and comes again.
        intake.flush()
        self.machine.close_channel(intake.channel)
        self._failed(intake, f"{event.reply_code} {event.text}")

    def _channel_closed(self, event: ChannelClosed) -> None:
        if not event.by_peer:
            self._count_fault(event.reply_code)
        outgoing = self._conversation.outgoing
        intake = self._intakes.get(event.channel)
        if intake is not None:
            self._failed(intake, f"{event.reply_code} {event.text}")
        elif event.channel == self._survey_channel:
            self._surveys.clear()  # the server does not like to be asked, on this connection
        elif event.channel == self._sending:
            log.warning("sending channel closed", link=self._conversation.name, error=event.text)
            idle = not outgoing.in_flight
            outgoing.close_over(event.reply_code, event.text)
            if idle:
                self._sending, self._reopen_at = 0, trio.current_time() + REOPEN_SECS
            else:
                self._open_sending()
        else:
            outgoing.large_closed(event.channel, event.reply_code, event.text)

    def _released(self, event: Released) -> None:
        intake = self._by_handle.get(event.handle) if event.handle else None
        if intake is not None:
            del self._by_handle[event.handle]
            self._asked.pop(event.handle, None)
            self._leave(intake)
        else:
            self._conversation.outgoing.pump()

    # What the routes need.

    def _arranged(self) -> None:
        """Something changed that decides whether the link is up."""
        conversation = self._conversation
        if not self._up and conversation.outgoing.opened and conversation.sources.surveyed:
            self._up = True
            conversation.link.came_up()

    def _consume(self, source: Source) -> None:
        intake = self._intake(source)
        if intake is not None:
            self._asked[intake.handle] = intake
            intake.begin(self._conversation.settings.prefetch)

    def _survey(self, now: float) -> None:
        """Ask what waits at the prefixes of queues of which nothing is on its way."""
        for source, survey in self._surveys.items():
            if survey.due(now) and self._idle(source) is not None:
                survey.asked = True
                self.machine.send(m.HandleQuery(survey.handle))

    def _idle(self, source: Source) -> Intake | None:
        """Who consumes a source, if all that it has brought is answered."""
        for intake in self._intakes.values():
            if intake.source is source and not (intake.stopping or intake.handle in self._asked):
                return None if len(intake.unsettled) else intake
        return None

    def _begin_survey(self, source: Source) -> None:
        """A prefix of queues is consumed: from now on look for those that are made later."""
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
            return  # there is none left: what is made later is found at the next connection
        self._surveys[source] = Survey(handle, trio.current_time())

    def _surveyed(self, index: m.HandleIndex) -> None:
        for source, survey in self._surveys.items():
            if survey.handle == index.handle_id:
                intake = self._idle(source)
                waits = bool(index.message_list) and intake is not None
                if survey.answered(waits=waits, now=trio.current_time()) and intake is not None:
                    log.info("consuming anew", link=self._conversation.name, prefix=source.name)
                    intake.stop()
                    self._consume(source)

    def _abandon(self, source: Source) -> None:
        """Let go of a durable subscription that is not consumed."""
        intake = self._intake(source)
        if intake is not None:
            intake.stop()

    def _intake(self, source: Source) -> Intake | None:
        conversation = self._conversation
        try:
            intake = Intake(source, self.machine, self._wake, conversation.limits.message_bytes_max)
        except LocalProtocolError as error:
            conversation.failed(source, str(error))
            self._arranged()
            return None
        self._intakes[intake.channel] = intake
        self._by_handle[intake.handle] = intake
        return intake

    def _failed(self, intake: Intake, why: str) -> None:
        """The source cannot be consumed, or not any more."""
        intake.live = False
        self._intakes.pop(intake.channel, None)
        self._by_handle.pop(intake.handle, None)
        self._asked.pop(intake.handle, None)
        self._owing.pop(intake, None)
        if not intake.stopping:
            self._conversation.failed(intake.source, why)
        self._arranged()

    def _leave(self, intake: Intake) -> None:
        """Close the channel of a source that is not wanted any more, when all its messages are answered."""
        over = intake.stopping and intake.handle not in self._by_handle and not len(intake.unsettled)
        if over and intake.live:
            intake.live = False
            self.machine.close_channel(intake.channel)
            self._intakes.pop(intake.channel, None)

    # Messages.

    def _notifies(self, rows: list[NotifyRow]) -> None:
        conversation = self._conversation
        caches = conversation.caches()
        publish = conversation.switch.publish
        batch = conversation.batch
        behind = conversation.held.on
        short = conversation.switch.memory.short
        sender = self._sender
        last_handle, last_head = -1, b""
        intake: Intake | None = None
        for handle, number, _, head, body, name in rows:
            if handle != last_handle:
                last_handle, last_head = handle, b""
                intake = self._by_handle.get(handle)
                if intake is not None:
                    entries = caches.setdefault(intake.source.service, {})
                    limit = intake.assembly.octets_max
            if intake is None:
                continue  # it was closed meanwhile, or a peer service has answered what we sent
            intake.unsettled.add(number)
            try:
                if head is not last_head:
                    properties = head_properties(head)
                    durable, _, expires, retained, hops = facts(properties)
                    last_head = head
                entry = entries.get(name) or conversation.resolve(intake.source.service, name, entries)
            except RemoteProtocolError as error:
                outcome = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
                self._unusable(intake, number, name, outcome, body)
                continue
            if len(body) > limit:
                self._unusable(intake, number, name, _oversized(len(body)))
                continue
            message = Message(
                entry.address, body, properties, 1 if durable else 0, durable, retained, expires, hops, sender
            )
            receipt = (intake, number, message)
            if behind:
                conversation.held.behind(receipt)
            elif short:
                conversation.settle([receipt], {0: LOW_ON_MEMORY}, 0.0)
            elif not publish(batch, entry, message, receipt):
                conversation.unclaimed(entry, receipt)
        conversation.stats.messages_in += len(rows)

    def _fragment(self, fragment: Fragment) -> None:
        intake = self._by_handle.get(fragment.handle)
        joined: Joined | None = None if intake is None else intake.assembly.take(fragment)
        if intake is None or joined is None:
            return
        if joined.body is None:
            intake.unsettled.add(joined.number)
            self._unusable(intake, joined.number, joined.name, _oversized(joined.size))
        else:
            row = (joined.handle, joined.number, joined.bits, joined.head, joined.body, joined.name)
            self._notifies([row])

    def _unusable(
        self, intake: Intake, number: int, name: bytes, outcome: Outcome, body: bytes = b""
    ) -> None:
        """A message that cannot be read, or is too large: its dead letter says that it was there."""
        conversation = self._conversation
        log.warning("a message cannot be taken", link=conversation.name, error=outcome.text)
        entry: Entry = conversation.resolve(intake.source.service, name, {})
        message = Message(entry.address, body, NO_PROPERTIES, sender=self._sender)
        conversation.bury((intake, number, message), outcome)


def _oversized(octets: int) -> Outcome:
    text = f"a body of {octets} octets exceeds limits.message_bytes_max; it was not kept"
    return Outcome(Verdict.REJECTED, Reason.TOO_LARGE, text)

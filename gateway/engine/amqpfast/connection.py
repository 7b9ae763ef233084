"""One connection to the cluster for AMQP/Fast, and what is said over it.

It has a channel to declare and delete what is known to be there, one to publish with confirms, and those on
which queues are consumed (consumers.py). A *question* is asked on a channel of its own, for a broker says no
by closing the channel: whether a queue can be declared so, whether a client-name is free. What is asked of
one queue is asked in order. A look at a queue (looking.py) has a channel of its own, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import structlog

from gateway.egress.amqp091.consumer import AmqpLinkConsumer
from gateway.egress.amqp091.session import CONTENT_FAULTS, POLITE, PUBLISH_METHOD, VERSION, machine_to
from gateway.egress.connection import QueueLinkConnection
from gateway.engine.amqpfast.looking import Look
from gateway.engine.amqpfast.publisher import FastEnginePublisher
from gateway.engine.consumers import Consumers, Done
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
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

QUESTIONS_MAX: Final = 64  # that are asked at a time: each has a channel
BESIDE_OCTETS: Final = 4_194_304  # that a stored message may have besides its body
UNUSED: Final = frozenset({ReplyCode.NOT_FOUND, ReplyCode.PRECONDITION_FAILED})
Answer = Callable[[int, str], None]
"""0: yes; or the broker's code, and what it says."""


class Question(NamedTuple):
    """What is asked, and who hears the answer."""

    method: m.Method
    answered: Answer


class Speaker(Protocol):
    """Whoever has something to say over a connection, and hears what comes."""

    settings: RabbitEngine
    limits: Limits
    stats: LinkStats
    publisher: FastEnginePublisher
    exchange: str
    questions: deque[Question]
    name: str

    def came_up(self) -> None:
        """All that is needed is there."""

    def disconnected(self, peer: FastEngineConnection, why: str) -> None:
        """The connection is gone."""


class FastEngineConnection(QueueLinkConnection[ClientConnection, AmqpLinkConsumer]):
    """The peer object of its stream, for as long as that connection lives."""

    _codes = ReplyCode

    def __init__(self, session: Speaker, stream: Stream, target: Target, now: float) -> None:
        settings = session.settings
        octets_max = session.limits.message_bytes_max + BESIDE_OCTETS
        limits = session.limits.model_copy(update={"message_bytes_max": octets_max})
        machine = machine_to(target, limits, name=session.name, heartbeat=settings.heartbeat_secs)
        super().__init__(machine, session.stats, stream, now + settings.connect_timeout_secs)
        self._session = session
        self._asked: deque[Done | None] = deque()  # on the channel for declarations
        self._declaring = self._publishing = 0
        self._questions: dict[int, Question] = {}  # by channel
        self._looks: dict[int, Look] = {}  # likewise
        self.consumers = Consumers(self, session.exchange)

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived, or its turn has come for what was left."""
        self._process(self.machine.receive_data(data, now))
        if self.machine.unread:
            self._stream.again()

    def data_to_send(self) -> bytes:
        """Acknowledgements, and whatever was encoded."""
        self.consumers.flush()
        return self.machine.data_to_send()

    def drained(self) -> None:
        """The broker reads again."""
        self._session.publisher.pump()

    def lost(self, reason: str) -> None:
        """The connection is gone: what was asked is asked again over the next one."""
        self.consumers.lose()
        self._session.questions.extendleft(reversed(self._questions.values()))
        self._questions.clear()
        looks, self._looks = self._looks, {}
        for look in looks.values():
            look.end()
        self._session.disconnected(self, self._why or reason)

    # What the link asks.

    def tick(self, now: float) -> None:
        """Heartbeats, and the time for the handshake."""
        if self._in_time(now):
            for channel, look in list(self._looks.items()):
                if now >= look.deadline:
                    look.end()
                self._leave_look(channel, look)
            self._publishing = self._session.publisher.renew(now) or self._publishing
            self._stream.mark()

    # What the session, and the consumers, ask.

    def ask(self, method: m.Method, done: Done | None = None) -> None:
        """Ask for something that no broker refuses; `done` is called when it is answered."""
        self._asked.append(done)
        self.machine.send_method(self._declaring, method)
        self._stream.mark()

    def open_channel(self) -> int:
        """A further channel."""
        return self.machine.open_channel()

    def decided(self) -> None:
        """Nobody waits for that here."""

    def wake(self) -> None:
        """Something is to be written when the wake-up ends."""
        self._stream.mark()

    def ask_next(self) -> None:
        """The questions that wait, as many as may be asked at a time."""
        if not self._up or self._stream.ending:
            return
        asked = {_queue_of(question) for question in self._questions.values()}
        left: deque[Question] = deque()
        for question in self._session.questions:
            queue = _queue_of(question)
            if queue in asked or len(self._questions) >= QUESTIONS_MAX:
                left.append(question)
            else:
                self._questions[self.machine.open_channel()] = question
                self._stream.mark()
            asked.add(queue)
        self._session.questions = left

    def look(self, look: Look) -> None:
        """Look at a queue."""
        if not self._up or self._stream.ending:
            look.end()
        else:
            self._looks[self.machine.open_channel()] = look
            self._stream.mark()

    def _leave_look(self, channel: int, look: Look) -> None:
        if look.over and self._looks.pop(channel, None) is not None:
            self.machine.close_channel(channel)

    # Events.

    def _process(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Confirms):
                self._session.publisher.confirm(event.confirms)
            elif isinstance(event, Deliveries):
                self._deliveries(event.contents)
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
                self._why = "the broker wants more than a name and password"
                self.machine.close(ReplyCode.NOT_ALLOWED, self._why)
            elif isinstance(event, Closed):
                self._closed(event)
        if self.machine.closed:
            self._stream.end(self._why or "closed")
        self._stream.mark()

    def _deliveries(self, contents: list[Delivery]) -> None:
        for number, name, tag, redelivered, wire, raw, body in contents:
            look = self._looks.get(number)
            if look is None:
                self.consumers.delivered(number, name, tag, redelivered, (wire, raw, body))
            else:
                look.take(bytes(body))
                self._leave_look(number, look)
        self._session.stats.messages_in += len(contents)

    def _returned(self, event: Returned) -> None:
        if not self._session.publisher.returned(event):
            self._session.stats.protocol_errors.add("return_unknown")

    def _opened(self) -> None:
        self._session.stats.spoke(self.machine, VERSION)
        self.open = True
        self._declaring = self.machine.open_channel()
        self._publishing = self.machine.open_channel()
        self.consumers.open()

    def _channel_opened(self, number: int) -> None:
        if number not in self.machine.channels or self.consumers.opened(number):
            return
        if number == self._declaring:
            self.ask(m.ExchangeDeclare(self._session.exchange, "topic", durable=True), self._declared)
        elif number == self._publishing and self._up:  # in place of one that refused
            self.machine.send_method(number, m.ConfirmSelect())
        elif number in self._questions:
            self.machine.send_method(number, self._questions[number].method)
        elif number in self._looks:
            self._looks[number].opened(self.machine, number)

    def _declared(self) -> None:
        """There is an exchange to publish to."""
        self.machine.send_method(self._publishing, m.ConfirmSelect())

    def _method(self, event: MethodReceived) -> None:
        method, number = event.method, event.channel
        if isinstance(method, m.ConnectionBlocked | m.ConnectionUnblocked):
            blocked = isinstance(method, m.ConnectionBlocked)
            log.warning("the cluster blocks publishing", blocked=blocked)
            self._session.stats.blocked = blocked
            self._session.publisher.flow(not blocked)
        elif self.consumers.answered(number, method):
            return
        elif number == self._declaring:
            done = self._asked.popleft() if self._asked else None
            if done is not None:
                done()
        elif isinstance(method, m.ConfirmSelectOk):
            self._session.publisher.open(self.machine, number, self._stream)
            self._session.publisher.flow(not self._session.stats.blocked)
            if not self._up:
                self._up = True
                self._session.came_up()
                self.ask_next()
        elif number in self._looks:
            self._looks[number].answered(self.machine, number, method)
            self._leave_look(number, self._looks[number])
        elif number in self._questions:
            question = self._questions.pop(number)
            self.machine.close_channel(number)
            question.answered(0, "")
            self.ask_next()

    def _channel_closed(self, event: ChannelClosed) -> None:
        number = event.channel
        look = self._looks.pop(number, None)
        if look is not None:
            look.end()  # it is not there any more
            return
        question = self._questions.pop(number, None)
        if question is not None:
            question.answered(event.reply_code, event.text)
            self.ask_next()
            return
        if not event.by_peer:
            self._count_fault(event.reply_code)
        elif event.reply_code in UNUSED and self.consumers.closed(number, event.text):
            return
        if number == self._publishing:
            self._session.publisher.close_over(event.reply_code, event.text)
        log.warning("the cluster has closed a channel", why=event.text)
        self._why = event.text
        self.machine.close(ReplyCode.SUCCESS, "")
        self._stream.end(event.text)

    def _closed(self, event: Closed) -> None:
        self._why = self._why or f"{event.reply_code} {event.text}"
        if event.reply_code not in POLITE:
            self._count_fault(event.reply_code)
        over_content = (event.class_id, event.method_id) == (BASIC, PUBLISH_METHOD)
        if event.by_peer and (over_content or event.reply_code in CONTENT_FAULTS):
            self._session.publisher.close_over(event.reply_code, event.text)

    def _leave(self, consumer: AmqpLinkConsumer) -> None:
        """There are none of these."""


def _queue_of(question: Question) -> str:
    return str(getattr(question.method, "queue", ""))

"""One connection to the cluster for AMQP/Fast, and what is said over it.

It has a channel to declare and delete what is known to be there, one to publish with confirms, and those on
which queues are consumed (consumers.py). A *question* is asked on a channel of its own, for a broker says no
by closing the channel: whether a queue can be declared so, whether a client-name is free. What is asked of
one queue is asked in order. A look at a queue (looking.py) has a channel of its own, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import structlog

from gateway.egress.amqp091.session import machine_to
from gateway.engine.amqpfast.looking import Look
from gateway.engine.amqpfast.publisher import FastEnginePublisher
from gateway.engine.cluster import ClusterConnection
from gateway.model.spooled import Piece
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import Delivery
from gateway.protocols.amqp091.events import (
    ChannelClosed,
    MethodReceived,
    Returned,
)
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

QUESTIONS_MAX: Final = 64  # that are asked at a time: each has a channel
BESIDE_OCTETS: Final = 4_194_304  # that a stored message may have besides its body
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
    direct: str
    questions: deque[Question]
    name: str

    def came_up(self) -> None:
        """All that is needed is there."""

    def disconnected(self, connection: FastEngineConnection, why: str) -> None:
        """The connection is gone."""


class FastEngineConnection(ClusterConnection):
    """The owner of its stream, for as long as that connection lives."""

    def __init__(self, session: Speaker, stream: Stream, target: Target, now: float) -> None:
        settings = session.settings
        octets_max = session.limits.message_bytes_max + BESIDE_OCTETS
        limits = session.limits.model_copy(update={"message_bytes_max": octets_max})
        machine = machine_to(target, limits, name=session.name, heartbeat=settings.heartbeat_secs)
        deadline = now + settings.connect_timeout_secs
        super().__init__(
            machine,
            session.stats,
            session.publisher,
            session.exchange,
            stream,
            deadline,
            direct=session.direct,
        )
        self._session = session
        self._questions: dict[int, Question] = {}  # by channel
        self._looks: dict[int, Look] = {}  # likewise

    # What the stream asks.

    def data_to_send(self) -> bytes | list[Piece]:
        """Acknowledgements, and whatever was encoded."""
        self.consumers.flush()
        return self.machine.to_send()

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
            self._publishing = self._publisher.renew(now) or self._publishing
            self._stream.mark()

    # What the session, and the consumers, ask.

    def decided(self) -> None:
        """Nobody waits for that here."""

    def ask_next(self) -> None:
        """The questions that wait, as many as may be asked at a time, and of one queue one."""
        if not self._up or self._stream.ending or self.machine.ending:
            return
        waiting = self._session.questions
        asked = {_queue_of(question) for question in self._questions.values()}
        passed: list[Question] = []
        while waiting and len(self._questions) < QUESTIONS_MAX:
            question = waiting.popleft()
            queue = _queue_of(question)
            if queue in asked:
                passed.append(question)
            else:
                asked.add(queue)
                self._questions[self.machine.open_channel()] = question
                self._stream.mark()
        waiting.extendleft(reversed(passed))

    def look(self, look: Look) -> None:
        """Look at a queue."""
        if not self._up or self._stream.ending or self.machine.ending:
            look.end()
        else:
            self._looks[self.machine.open_channel()] = look
            self._stream.mark()

    def _leave_look(self, channel: int, look: Look) -> None:
        if look.over and self._looks.pop(channel, None) is not None:
            self.machine.close_channel(channel)

    # Events.

    def _deliveries(self, contents: Sequence[Delivery]) -> None:
        for number, name, tag, redelivered, wire, raw, body in contents:
            look = self._looks.get(number)
            if look is None:
                self.consumers.delivered(number, name, tag, redelivered, (wire, raw, body))
            else:
                look.take(bytes(body))
                self._leave_look(number, look)
        self._session.stats.messages_in += len(contents)

    def _returned(self, event: Returned) -> None:
        if not self._publisher.returned(event):
            self._session.stats.protocol_errors.add("return_unknown")

    def _opened(self) -> None:
        self._declaring = self.machine.open_channel()
        self._publishing = self.machine.open_channel()
        self.consumers.open()

    def _channel_opened(self, number: int) -> None:
        if self.consumers.opened(number):
            return
        if number == self._declaring:
            self.ask(m.ExchangeDeclare(self._session.direct, "direct", durable=True))
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

    def _confirming(self) -> None:
        if not self._up:
            self._up = True
            self._session.came_up()
            self.ask_next()

    def _method(self, event: MethodReceived) -> None:
        if self._common_method(event):
            return
        method, number = event.method, event.channel
        if number in self._looks:
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
        super()._channel_closed(event)


def _queue_of(question: Question) -> str:
    return str(getattr(question.method, "queue", ""))

"""Links that only one of all replicas may consume over: which one does is decided by a queue for each.

The queue has a single active consumer, and a message in it, the token. Every replica consumes; whoever gets
the token keeps it unacknowledged, and consumes over the link for as long as its connection to the cluster
lives. When that is lost the broker gives the token to the next one. So the connection is one of its own, with
a heartbeat of a second: who is killed, frozen or cut off has lost it within two or three, and whoever has
lost it stops at once. The log decides nothing here, for a sign of life in each second would have to stand in
it for as long as it is kept.

Whoever has been elected and does not reach the link's broker for some time gives the token back, and queues
up behind the others. Where there is no other, or none that gets further, it comes round again.

There may be more tokens than one, for only the active consumer gets any. Whoever has been given one adds
another, so that a queue type which gives up a message that has come back too often is never without. A token
is acknowledged for the next one now and then: RabbitMQ closes the channel over a message that has been held
for half an hour (`consumer_timeout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from gateway import clock
from gateway.egress.amqp091.session import machine_to
from gateway.egress.link import LinkStatus
from gateway.engine.cluster import EngineLink
from gateway.engine.names import names_of
from gateway.engine.unrouted import Unrouted
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import Delivery
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import MethodReceived
from gateway.protocols.amqp091.sending import Publisher
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger()

HEARTBEAT_SECS: Final = 1
TOKENS_MAX: Final = 2  # that wait in a queue, besides the one that somebody has
PERSISTENT: Final = b"\x10\x00\x02"
RENEW_SECS: Final = 300.0  # after which a token is acknowledged for the next one
ELSEWHERE: Final = "another replica consumes over it"
UNDECIDED: Final = "who consumes over it cannot be decided without the cluster"


class Candidate:
    """This replica, as one that may come to consume over a link. `heard` is called when it is, or is not any
    more. `serves`: it reaches the link's broker, or an operator does not want it to."""

    def __init__(
        self,
        link: str,
        stats: LinkStats,
        heard: Callable[[bool, str], None],
        *,
        serves: Callable[[], bool],
        timeout_secs: float,
    ) -> None:
        """`timeout_secs`: how long it stays elected when it does not serve."""
        self.link = link
        self._serves = serves
        self._timeout_secs = timeout_secs
        self._served_at = 0.0
        self._stats = stats
        self._heard = heard
        stats.leads = False

    @property
    def elected(self) -> bool:
        """It consumes."""
        return bool(self._stats.leads)

    def is_useless(self, now: float) -> bool:
        """It has been elected for some time, and all that time has served nobody."""
        if not self.elected or self._serves():
            self._served_at = now
        return now - self._served_at >= self._timeout_secs

    def decide(self, elected: bool, why: str) -> None:
        """The queue has decided; `why` not, if it is not."""
        if elected and not self.elected:
            log.info("this replica consumes over a link now", link=self.link)
            self._served_at = clock.now()
        elif self.elected and not elected:
            log.info("this replica does not consume over a link any more", link=self.link, why=why)
        self._stats.leads = elected
        self._heard(elected, why)


class Elections(Unrouted):
    """The link session of the connection that elections need."""

    def __init__(self, settings: RabbitEngine, replica: str, limits: Limits, status: LinkStatus) -> None:
        self.settings = settings
        self.replica = replica
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.direct = names_of(settings.namespace, settings.topic_exchange).direct
        self.candidates: list[Candidate] = []

    def queue(self, candidate: Candidate) -> str:
        """The queue that decides."""
        return f"{self.settings.namespace}.lead.{candidate.link}"

    def decide(self, elected: bool, why: str) -> None:
        """The same for all links: none is decided any more."""
        for candidate in self.candidates:
            candidate.decide(elected, why)

    # What the link asks.

    @property
    def idle(self) -> bool:
        """It carries no messages."""
        return True

    def idle_but(self, held: int) -> bool:
        """The same."""
        return True

    @property
    def unconfirmed(self) -> int:
        """There are none."""
        return 0

    def connect(self, stream: Stream, target: Target, now: float) -> ElectionConnection:
        """A connection stands: begin the handshake."""
        return ElectionConnection(self, stream, target, now)

    def turn_done(self) -> None:
        """Nothing gathers."""

    def tick(self, now: float) -> None:
        """Nothing is due."""


class ElectionConnection(EngineLink):
    """A connection for them, with a channel for each link."""

    def __init__(self, session: Elections, stream: Stream, target: Target, now: float) -> None:
        name = f"{session.replica} elections"
        machine = machine_to(target, session.limits, name=name, heartbeat=HEARTBEAT_SECS)
        super().__init__(machine, session.stats, stream, now + session.settings.connect_timeout_secs)
        self._session = session
        self._candidates: dict[int, Candidate] = {}  # by channel
        self._empty: set[int] = set()  # channels whose queues have no token
        self._tokens: dict[int, tuple[int, float]] = {}  # by channel: the delivery tag, and since when

    # What the stream asks.

    def data_to_send(self) -> bytes:
        """Whatever was encoded."""
        return self.machine.data_to_send()

    def drained(self) -> None:
        """Nothing waits."""

    def lost(self, reason: str) -> None:
        """Whoever was elected is not any more."""
        self._session.decide(elected=False, why=UNDECIDED)
        self._session.status.went_down(self._why or reason)

    # What the link asks.

    def tick(self, now: float) -> None:
        """Heartbeats, the time for the handshake, and what is due of tokens."""
        if not self._in_time(now) or self.machine.ending:
            return
        for channel, candidate in list(self._candidates.items()):
            if candidate.is_useless(now):
                self._step_back(channel, candidate)
            elif channel in self._tokens and now - self._tokens[channel][1] >= RENEW_SECS:
                self._add_token(channel)
                self.machine.ack(channel, self._tokens.pop(channel)[0], multiple=False)
        self._stream.mark()

    def _step_back(self, channel: int, candidate: Candidate) -> None:
        """With its channel the token goes back; the next one's consumer stands behind those of others."""
        log.warning(
            "this replica gives an elected link up: it does not reach its broker", link=candidate.link
        )
        del self._candidates[channel]
        self._tokens.pop(channel, None)
        candidate.decide(elected=False, why=ELSEWHERE)
        self.machine.close_channel(channel)
        self._candidates[self.machine.open_channel()] = candidate

    # Events.

    def _opened(self) -> None:
        for candidate in self._session.candidates:
            self._candidates[self.machine.open_channel()] = candidate
        self._session.status.came_up()

    def _channel_opened(self, channel: int) -> None:
        arguments: Headers = (
            ("x-queue-type", string(self._session.settings.queue_type)),
            ("x-single-active-consumer", Value(ValueType.BOOL, True)),
            ("x-max-length", Value(ValueType.INT64, TOKENS_MAX)),
        )
        queue = self._session.queue(self._candidates[channel])
        direct = self._session.direct
        self.machine.send_method(channel, m.ExchangeDeclare(direct, "direct", durable=True))
        self.machine.send_method(channel, m.QueueDeclare(queue, durable=True, arguments=arguments))
        self.machine.send_method(channel, m.QueueBind(queue, direct, queue))

    def _method(self, event: MethodReceived) -> None:
        method, channel = event.method, event.channel
        candidate = self._candidates.get(channel)
        if candidate is None:
            return
        if isinstance(method, m.QueueDeclareOk):
            if not method.message_count:
                self._empty.add(channel)
        elif isinstance(method, m.QueueBindOk):
            if channel not in self.machine.channels:
                return
            if channel in self._empty:
                self._empty.remove(channel)
                self._add_token(channel)
            self.machine.send_method(channel, m.BasicQos(prefetch_count=1))
            self.machine.send_method(channel, m.BasicConsume(self._session.queue(candidate)))
        elif isinstance(method, m.BasicConsumeOk):
            if not candidate.elected:
                candidate.decide(elected=False, why=ELSEWHERE)
        elif isinstance(method, m.BasicCancel):
            self._end("the queue of an election is gone")

    def _deliveries(self, contents: Sequence[Delivery]) -> None:
        for number, _, tag, *_ in contents:
            self._elected(number, tag)

    def _elected(self, channel: int, tag: int) -> None:
        candidate = self._candidates.get(channel)
        if candidate is not None and channel in self.machine.channels:
            self._tokens[channel] = tag, clock.now()
            self._add_token(channel)
            candidate.decide(elected=True, why="")

    def _add_token(self, channel: int) -> None:
        wire = amqp_address(self._session.direct, self._session.queue(self._candidates[channel])).wire
        token = self._session.replica.encode()  # for people's eyes
        Publisher(self.machine, channel).publish_many([(wire, PERSISTENT, token)])

    def _end(self, why: str) -> None:
        log.warning("an election cannot be held", why=why)
        super()._end(why)

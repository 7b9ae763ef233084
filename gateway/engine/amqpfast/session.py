"""What a replica says to the cluster for AMQP/Fast, and hears, over all of its connections.

What is asked while there is no connection is asked over the next one. When a connection is lost the cluster
gives back to its queues what was here and not acknowledged; what clients have of it comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import structlog
import trio

from gateway import clock
from gateway.broker.amqpfast.destinations import priority_of
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.poison import poisoned
from gateway.containment import contained
from gateway.egress.link import LinkStatus
from gateway.engine.amqpfast.connection import Answer, FastEngineConnection, Question
from gateway.engine.amqpfast.looking import Look, Seen
from gateway.engine.amqpfast.names import FastNames
from gateway.engine.amqpfast.publisher import FastEnginePublisher
from gateway.engine.amqpfast.storage import ClusterStorage
from gateway.engine.arguments import type_arguments
from gateway.engine.connection import OUTLIVES_SECS
from gateway.engine.consumers import Content
from gateway.engine.envelope import ENGINE
from gateway.engine.names import names_of
from gateway.engine.outboxes import SubBatchSource
from gateway.engine.shares import TOUCH_SECS
from gateway.engine.unrouted import Unrouted
from gateway.model.address import Address
from gateway.model.batch import Recipient, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.spooled import Spooled
from gateway.model.times import Monotonic
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import decode_address
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.translate import content_properties
from gateway.protocols.amqpfast.spec import PRIORITY_MAX
from gateway.settings import Limits
from gateway.settings.endpoints import Target
from gateway.settings.engine import RabbitEngine
from gateway.store.messages import MessageReader, encode_message
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

AWAY: Final = "the cluster is away"
TOO_LARGE: Final = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the cluster takes no more than limits.message_bytes_max"
)
MODE_AND_PRIORITY: Final = b"\x18\x00"  # the flags of a content header that says these, and nothing else


class FastEngineSession(Unrouted):
    """The link session of AMQP/Fast's connection to the cluster."""

    def __init__(
        self,
        settings: RabbitEngine,
        replica: str,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        flush: Callable[[], None],
    ) -> None:
        """`flush` writes what was encoded outside a wake-up."""
        self.settings = settings
        self.limits = limits
        self.status = status
        self.stats = status.stats
        self.name = f"{replica} {status.name}"
        shared = names_of(settings.namespace, settings.topic_exchange)
        self.names = FastNames(settings.namespace, shared.dropped)
        self.exchange = self.names.exchange
        self.direct = shared.direct
        self.publisher = FastEnginePublisher(
            self.stats,
            None,
            in_flight_max=settings.in_flight_max,
            messages_max=limits.queue_messages_max,
            octets_max=limits.queue_bytes_max,
        )
        self.reader = MessageReader()
        self.questions: deque[Question] = deque()
        self._when_up: Callable[[], None]  # from `serve` on
        self._each_second: Callable[[float], None]
        self._flush = flush
        self._dispatcher = dispatcher
        self._recipient = Recipient(self.publisher)
        self._connection: FastEngineConnection | None = None
        self._up = False
        self._consumed: dict[ClusterStorage, None] = {}
        self._kept: dict[ClusterStorage, None] = {}  # that go when nobody touches them
        self._touched: dict[ClusterStorage, None] = {}
        self._touch_at = 0.0

    def serve(self, when_up: Callable[[], None], each_second: Callable[[float], None]) -> None:
        """Say to those who have the destinations that there is another connection, and what time it is.
        Before it runs."""
        self._when_up, self._each_second = when_up, each_second

    @property
    def why_not(self) -> str:
        """Why clients cannot be served; "": they can."""
        return "" if self._up else self.status.why or AWAY

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Its share of the broker's gauges."""
        return {
            "gateway_engine_destinations": lambda: len(self._consumed),
            "gateway_engine_held_messages": lambda: sum(one.held for one in self._consumed),
        }

    def arguments(self, mark: str, *, messages_max: int, octets_max: int, drops: bool, ends: bool) -> Headers:
        """Those of a queue. `drops`: at its limit it loses what is oldest, else it takes no more. `ends`: it
        goes when it was not used for longer than clients stay without a cluster."""
        given = type_arguments(self.settings)
        if self.settings.queue_type == "classic":
            given = (*given, ("x-max-priority", Value(ValueType.INT32, PRIORITY_MAX)))
        if ends:
            expires = int((self.settings.engine_timeout_secs + OUTLIVES_SECS) * 1000)
            given = (*given, ("x-expires", Value(ValueType.INT64, expires)))
        return (
            *given,
            ("x-max-length", Value(ValueType.INT64, messages_max)),
            ("x-max-length-bytes", Value(ValueType.INT64, octets_max)),
            ("x-overflow", string("drop-head" if drops else "reject-publish")),
            ("x-dead-letter-exchange", string(self.names.dropped)),
            ("x-dead-letter-routing-key", string(mark)),
        )

    # What the link asks.

    @property
    def idle(self) -> bool:
        """Nothing waits for the cluster."""
        return self.idle_but(0)

    def idle_but(self, held: int) -> bool:
        """The same: what it sends waits in front of no route."""
        return self.publisher.idle

    @property
    def unconfirmed(self) -> int:
        """Messages for the cluster that it has not confirmed, sent or not."""
        return self.publisher.waiting_messages + self.publisher.in_flight

    def connect(self, stream: Stream, target: Target, now: float) -> FastEngineConnection:
        """A connection stands: begin the handshake."""
        self._connection = FastEngineConnection(self, stream, target, now)
        return self._connection

    def turn_done(self) -> None:
        """Hand out what this wake-up has brought."""
        while self._touched:
            touched, self._touched = self._touched, {}
            for storage in touched:
                try:
                    storage.pump()
                except Exception as error:
                    contained("delivery", error, queue=storage.queue)

    def tick(self, now: float) -> None:
        """Once a second: what clients have and do not use is used."""
        if self._up:
            self._each_second(now)
        if self._up and self._connection is not None and now >= self._touch_at:
            self._touch_at = now + min(TOUCH_SECS, self.settings.engine_timeout_secs / 2)
            for storage in self._kept:
                if not storage.prefetch:
                    self._connection.consumers.touch(storage.queue)

    # What the connection says.

    def came_up(self) -> None:
        """All that is needed is there."""
        self._up = True
        self.status.came_up()
        for storage in list(self._consumed):
            storage.pump()
        self._when_up()

    def disconnected(self, connection: FastEngineConnection, why: str) -> None:
        """A connection is gone; what it had not confirmed is sent again over the next one."""
        if self._connection is not connection:
            return
        self._connection = None
        self._up = False
        self.stats.blocked = False
        self.publisher.close()
        for storage in list(self._consumed):
            storage.lost()
        self.status.went_down(why)
        self.turn_done()

    # What destinations ask.

    def question(self, method: m.Method, answered: Answer) -> None:
        """Ask the cluster for something that it may refuse."""
        self.questions.append(Question(method, answered))
        if self._connection is not None:
            self._connection.ask_next()

    async def answer(self, method: m.Method) -> tuple[int, str]:
        """The same, from a task that waits for the answer."""
        heard = trio.Event()
        answers: list[tuple[int, str]] = []

        def hear(code: int, text: str) -> None:
            answers.append((code, text))
            heard.set()

        self.question(method, hear)
        self._flush()
        await heard.wait()
        return answers[0]

    def ask(self, method: m.Method, then: Callable[[], None] | None = None) -> None:
        """The same, when nobody wants to know the answer; `then` it is there."""

        def heard(code: int, text: str) -> None:
            if code and code != ReplyCode.NOT_FOUND:
                log.warning("the cluster has refused what was asked of a queue", why=text)
            if then is not None:
                then()

        self.question(method, heard)

    def look(self, queue: str, done: Callable[[Seen], None]) -> None:
        """`done` is called with what waits in a queue."""
        look = Look(queue, self.reader, done, clock.now())
        if self._connection is None:
            look.end()
        else:
            self._connection.look(look)

    def keep(self, storage: ClusterStorage, *, ends: bool) -> None:
        """The cluster has its queue. `ends`: it goes when it is not used."""
        self._consumed[storage] = None
        if ends:
            self._kept[storage] = None

    def let_go(self, storage: ClusterStorage) -> None:
        """It is not wanted here any more; what was here goes back."""
        self._consumed.pop(storage, None)
        self._kept.pop(storage, None)
        self._touched.pop(storage, None)
        if self._connection is not None:
            self._connection.consumers.end(storage, None)

    def delete(self, storage: ClusterStorage) -> None:
        """Its queue goes, with all that is in it."""
        self.let_go(storage)
        self.ask(m.QueueDelete(storage.queue))

    def renew(self, storage: ClusterStorage) -> None:
        """Another number of its messages can be taken here."""
        if self._connection is None or not self._up or storage not in self._consumed:
            storage.prefetch = 0
        elif self._connection.consumers.consumes(storage):
            self._connection.consumers.renew(storage)
        elif storage.prefetch:
            self._connection.consumers.begin(storage)

    def touch(self, storage: ClusterStorage) -> None:
        """It has something to hand out when the wake-up ends."""
        self._touched[storage] = None

    def send(
        self,
        part: SubBatch,
        messages: list[Message],
        address_of: Callable[[Message], Address],
        missing: Callable[[], None] | None = None,
        answered: Callable[[int], None] | None = None,
    ) -> None:
        """Publish a part to a queue, or to the topics. What is for a queue comes back if that is not there,
        and `missing` hears of it; `answered` hears of how many messages it is known what became of them."""
        batch = part.batch.onward(ClusterSource(part, missing, answered))
        unsent = 0
        for at, message in enumerate(messages):
            try:
                octets = self._encoded(message)
            except Exception as error:
                part.settle_at((at,), poisoned(error))
                unsent += 1
                continue
            if octets is None:
                part.settle_at((at,), TOO_LARGE)
                unsent += 1
                continue
            head = MODE_AND_PRIORITY + bytes((2 if message.durable else 1, priority_of(message)))
            stored = Message(
                address_of(message),
                octets,
                content_properties(head),
                1,
                message.durable,
                False,
                message.expires,
                0,
                message.sender,
            )
            batch.add_from(part.slots[at], at, [(self._recipient, stored)])
        if unsent and answered is not None:
            answered(unsent)
        batch.send()

    def _encoded(self, message: Message) -> bytes | None:
        """None: it is too large for the cluster."""
        if len(message.body) > self.limits.message_bytes_max:
            return None
        if isinstance(message.body, Spooled):
            message = message.holding(message.body.octets())
        return encode_message(message)

    def bury(self, content: Content, why: str, then: Callable[[], None]) -> None:
        """A message of the cluster that nobody can read is a dead letter; `then`, when that is safe."""
        outcome = Outcome(Verdict.REJECTED, Reason.MALFORMED, why)
        self.stats.refuse(outcome)
        log.warning("a message of the cluster cannot be delivered", why=why)
        message = Message(
            amqp_address(*decode_address(content[0])),
            bytes(content[2]),
            content_properties(content[1]),
            sender=Sender(ENGINE),
        )
        self._dispatcher.dead_letters.add([message], "", outcome, then)


class ClusterSource(SubBatchSource):
    """The source of what goes to the cluster of one part. `missing` hears when it came back, `answered` of
    how many messages it is known what became of them."""

    def __init__(
        self,
        part: SubBatch,
        missing: Callable[[], None] | None,
        answered: Callable[[int], None] | None,
    ) -> None:
        super().__init__(part)
        self._missing = missing
        self._answered = answered

    def settle(self, receipts: list[int], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """The cluster says what became of messages."""
        super().settle(receipts, refused, received)
        if self._missing is not None and any(
            outcome.reason is Reason.NO_ROUTE for outcome in (refused or {}).values()
        ):
            self._missing()
        if self._answered is not None:
            self._answered(len(receipts))

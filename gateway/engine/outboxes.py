"""Outboxes on the cluster: what a link shall have when it can, accepted as soon as the cluster has it.

An outbox in the store is lost with its disk. One on the cluster is a durable queue for each route with
`settle: stored`, and its link is any replica's to serve: the queue has a single active consumer, so that its
order is kept, and a replica consumes it only while the link is up there. A message lies in it as the store
would have written it, address and properties of any protocol included. It is acknowledged when the link's
broker has confirmed it; a replica that is lost before has the next one send it again.

Nobody is to begin behind messages that another one still holds. So a replica whose link is down for more
than a moment gives back what it has in hand, with the channel: the queue has all of it again in one step, in
order, and only then another consumer. What was sent and is in doubt may come twice then, as from a replica
that is lost. At QoS 2 of MQTT it must not, and the broker knows it again only from who has sent it: there it
stays, with all that is in hand, and another replica passes it. One that is told to stop leaves when all that
is in hand is confirmed.

What is too much, or too old, the cluster takes out: with `policy: dead_letter` into a second queue for each
route, from which whichever replica comes first makes dead letters; otherwise to where drops are counted.

Towards the cluster this is an AMQP link like any other: one connection for each link that has such outboxes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from typing import ClassVar, Final, Protocol

from gateway import clock
from gateway.broker.dispatcher import Dispatcher, misfit
from gateway.broker.outbox.outbox import (
    CROWDED_OUT,
    EXPIRED,
    OUTBOX_FULL,
    TOO_OLD,
    Left,
    OutboxLimits,
    OutboxRecipient,
    OutboxState,
    left_as,
)
from gateway.broker.poison import poisoned
from gateway.broker.routing import Namespace, OneSink, RoutingEntry, RoutingPlan
from gateway.egress.amqp091.consumer import AmqpLinkConsumer
from gateway.egress.amqp091.publisher import AmqpLinkPublisher
from gateway.egress.amqp091.session import AmqpLinkConnection, AmqpLinkSession
from gateway.egress.amqp091.topology import Declaration
from gateway.egress.confirming import ConfirmedSink
from gateway.egress.link import LinkStatus
from gateway.egress.session import Entries
from gateway.engine.arguments import type_arguments
from gateway.engine.names import names_of
from gateway.errors import RemoteProtocolError, StoreError
from gateway.mapping.router import Subscriptions, Targets
from gateway.mapping.routes import Route
from gateway.model.address import Address
from gateway.model.batch import Recipient, Sink, SubBatch
from gateway.model.caches import make_room
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, FINAL, Outcome, Reason, Verdict
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.times import Monotonic
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import decode_address
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import ChannelClosed, MethodReceived
from gateway.settings import AmqpLink, Limits, Link
from gateway.settings.endpoints import Remote, Target
from gateway.settings.engine import RabbitEngine
from gateway.store.journal.columns import WAS_BURIED, WAS_DELIVERED, WAS_DROPPED
from gateway.store.messages import MessageReader, encode_message
from gateway.transport.stream import Stream

REFUSALS_MAX: Final = 10_000  # messages; of more, the one that was refused longest ago begins anew
BESIDE_OCTETS: Final = 4_194_304  # that a stored message may have besides its body
OVERFLOW: Final = {"reject": "reject-publish", "drop_oldest": "drop-head", "dead_letter": "drop-head"}
COUNT_SECS: Final = 5.0  # between two looks at how much waits
# That a link may be down before others are to deliver; one whose connection was cut is back before that.
MOMENT_SECS: Final = 1.0
FIRST_REASON: Final = "x-first-death-reason"  # why the cluster took a message out of its queue


class Delivering(Protocol):
    """The session of the link."""

    @property
    def publisher(self) -> ConfirmedSink:
        """What it publishes with."""


class OutboxPublisher(AmqpLinkPublisher):
    """What goes into the queues; one that is full refuses it for now."""

    _nacked: ClassVar[Outcome] = OUTBOX_FULL


class SharedOutboxes(AmqpLinkSession):
    """The outboxes of one link: the link session of their connection. `paused` are routes that wait."""

    def __init__(
        self,
        link: str,
        given: Link,
        engine: RabbitEngine,
        dispatcher: Dispatcher,
        limits: Limits,
        status: LinkStatus,
        *,
        client_id: str,
        up: Callable[[], bool],
        delivers: ConfirmedSink,
        paused: Callable[[], Iterable[str]],
        left: Left | None = None,
    ) -> None:
        """`up`: the link can be given messages; it publishes them with `delivers`. `left` hears what leaves
        an outbox, at this replica."""
        remote = {name: getattr(engine, name) for name in Remote.model_fields}
        within = limits.model_copy(update={"message_bytes_max": limits.message_bytes_max + BESIDE_OCTETS})
        super().__init__(
            status.name,
            AmqpLink(**remote | {"prefetch": min(given.in_flight_max, engine.prefetch), "survey_secs": 0.0}),
            dispatcher,
            within,
            status,
            client_id=client_id,
            publishing=OutboxPublisher,
        )
        self.link = link
        self.reader = MessageReader()
        self.refusals: dict[bytes, int] = {}  # of messages that the link's broker has refused, by their hash
        self.waiting: dict[str, int] = {}  # messages that have not been handed out, by queue
        self._prefix = f"{engine.namespace}.outbox.{link}."
        self._given_up = f"{engine.namespace}.given-up.{link}."
        self._limits = given.outbox
        self._type = type_arguments(engine)
        names = names_of(engine.namespace, engine.topic_exchange)
        self._dropped, self._direct = names.dropped, names.direct
        self.topology.reached_by = names.direct
        self.up = up
        self._delivers = delivers
        self._paused = paused
        self._left = left
        self._stopped = False
        self._seen_up = False
        self._patient_until: Monotonic | None = None
        self._wanted: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self._boxes: dict[str, SharedOutbox] = {}

    def queue_arguments(self, queue: str) -> Headers:
        """Those of a queue that is declared."""
        limits = self._limits
        bounds: Headers = (
            *self._type,
            ("x-max-length", Value(ValueType.INT64, limits.messages_max)),
            ("x-max-length-bytes", Value(ValueType.INT64, limits.bytes_max)),
        )
        counted: Headers = (("x-dead-letter-exchange", string(self._dropped)),)
        if queue.startswith(self._given_up):
            return (*bounds, ("x-overflow", string("drop-head")), *counted)
        own: Headers = (
            ("x-single-active-consumer", Value(ValueType.BOOL, True)),
            ("x-overflow", string(OVERFLOW[limits.policy])),
        )
        if limits.age_secs_max is not None:
            own += (("x-message-ttl", Value(ValueType.INT64, max(1, int(limits.age_secs_max * 1000)))),)
        if limits.policy == "drop_oldest":
            own += counted
        elif limits.policy == "dead_letter":
            own += (
                ("x-dead-letter-exchange", string(self._direct)),
                ("x-dead-letter-routing-key", string(self._given_up + queue.removeprefix(self._prefix))),
            )
        return (*bounds, *own)

    def states(self) -> list[OutboxState]:
        """As far as they are known here."""
        paused = set(self._paused())
        given = self._limits
        limits = OutboxLimits(given.messages_max, given.bytes_max, given.age_secs_max, given.policy)
        return [
            OutboxState(
                self.link,
                route.name,
                self.waiting.get(queue),
                None,
                0 if self._connection is None else self._connection.outstanding_of(queue),
                None,
                None,
                self._problem(route.name in paused),
                self.waiting.get(queue),
                None,
                limits,
                shared=True,
            )
            for queue, route in self._routes().items()
        ]

    def _problem(self, paused: bool) -> str:
        if not self.stats.up:
            return "the cluster is away"
        if paused:
            return "the route is paused"
        return "" if self.up() else "the link is down here"

    def counted(self) -> tuple[str, ...]:
        """The queues whose messages are counted."""
        return tuple(self._routes())

    def connect(self, stream: Stream, target: Target, now: float) -> OutboxConnection:
        """A connection stands: begin the handshake."""
        made = self._connection = OutboxConnection(self, stream, target, now)
        return made

    def of(self, route: Route) -> SharedOutbox:
        """The outbox of a route in force."""
        found = self._boxes.get(route.name)
        if found is None:
            address = amqp_address(self._direct, self._prefix + route.name)
            found = self._boxes[route.name] = SharedOutbox(self, address)
        return found

    def note(self, route: Route | None, messages: list[Message], outcome: Outcome, word: str) -> None:
        """Have the journal hear that messages have left the outbox of a route; None: it has gone from the
        mapping."""
        if self._left is not None and route is not None and messages:
            self._left(route, messages, left_as(word, outcome), clock.now())

    def dropped(self, queue: str, body: bytes) -> None:
        """The cluster has dropped what a queue held, which may be that of a route here."""
        if self._left is None or not queue.startswith(self._prefix):
            return
        route = self._routes().get(queue)
        try:
            message = self.reader.decode_one(body)
        except StoreError as error:
            self.stats.refuse(Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            return
        self.note(route, [message], CROWDED_OUT, WAS_DROPPED)

    @property
    def namespace(self) -> Namespace | None:
        """Where the link's messages go."""
        return self.dispatcher.namespaces.get(self.link)

    def stop(self) -> None:
        """The gateway is leaving: hand out nothing more."""
        self._stopped = True
        self._arrange()

    # What the link asks.

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: every stored route of the link has a queue."""
        self._arrange()

    def tick(self, now: float) -> None:
        """Once a second: the link may have come up, or gone down."""
        super().tick(now)
        self._arrange()

    def _routes(self) -> dict[str, Route]:
        return {
            self._prefix + route.name: route
            for route in self.dispatcher.router.routes
            if route.target_endpoint == self.link and route.settle == "stored"
        }

    def _arrange(self) -> None:
        paused = set(self._paused())
        routes = self._routes()
        going = self._reaches() and not self._stopped
        if not going and not self.up():
            self._hand_back()
        if not self._wanted[1] and self._connection is not None and self._connection.outstanding:
            going = False  # what is in hand still comes before the rest
        consumed = tuple(queue for queue, route in routes.items() if going and route.name not in paused)
        wanted = tuple(routes), consumed
        if wanted != self._wanted:
            self._wanted = wanted
            given_up: tuple[str, ...] = ()
            if self._limits.policy == "dead_letter":
                given_up = tuple(self._given_up + route.name for route in routes.values())
            super().route(Subscriptions(queues=(*consumed, *given_up)), Targets(queues=wanted[0]))

    def _reaches(self) -> bool:
        """The link is up, or was so a moment ago."""
        up = self.up()
        if self._seen_up and not up:
            self._patient_until = clock.now() + MOMENT_SECS
        self._seen_up = up
        until = self._patient_until
        return up or (until is not None and clock.now() < until)

    def _hand_back(self) -> None:
        """Others are to deliver what is in hand, and what comes after it."""
        connection = self._connection
        if not isinstance(connection, OutboxConnection) or not connection.outstanding:
            return
        self.turn_done()  # what has just come is in hand, too
        if self._delivers.in_doubt(self._is_ours):
            connection.let_others_begin()
        else:
            connection.hand_back(self._prefix)
            self.withdraw()

    def withdraw(self) -> None:
        """What the link has not been sent comes out of its queue again, here or elsewhere."""
        self._delivers.give_up(self._is_ours, DOWN)

    def _is_ours(self, part: SubBatch) -> bool:
        source = part.batch.source
        return isinstance(source, DrainSource) and source.outboxes is self

    # What batches ask: this is their source.

    def released(self, receipt: tuple[AmqpLinkConsumer, int, Message], outcome: Outcome) -> None:
        """Give a message back to its queue, from which another replica may be the next to deliver it."""
        if outcome.reason is Reason.STORE and receipt[0].live:
            self.held.refused(receipt)
        else:
            self.give_back_later(receipt)

    # What a connection asks.

    def resolve(self, queue: str, wire: bytes, entries: Entries) -> RoutingEntry:
        """What the queue of a route has goes to the link."""
        address = amqp_address(*decode_address(wire))
        if queue.startswith(self._given_up):
            name = queue.removeprefix(self._given_up)
            grave = Recipient(Grave(self, name, self._routes().get(self._prefix + name)))
            entry = entries[wire] = RoutingEntry(address, RoutingPlan(None, (grave,)))
            return entry
        route = self._routes().get(queue)
        if route is None:  # it has just gone from the mapping
            return RoutingEntry(address, RoutingPlan(None, (Recipient(RequeuingSink()),)))
        recipient = Recipient(Drain(self, route))
        entry = entries[wire] = RoutingEntry(address, RoutingPlan(None, (recipient,)))
        return entry


class OutboxConsumer(AmqpLinkConsumer):
    """One that leaves when all that is in hand is confirmed, and without a cancel, which would let the next
    one begin before. Until then it acknowledges nothing, so that no more comes than may be in hand; what
    comes in return for its acknowledgement goes back with the channel, and so does what was released.
    """

    __slots__ = ("_confirmed", "_leaves")

    def __init__(
        self,
        declaration: Declaration,
        machine: ClientConnection,
        channel: int,
        wake: Callable[[AmqpLinkConsumer], None],
    ) -> None:
        super().__init__(declaration, machine, channel, wake)
        self._leaves = False
        self._confirmed: list[int] = []  # tags to acknowledge when it leaves

    @property
    def done(self) -> bool:
        """As above."""
        settled = len(self._confirmed) + (len(self._later) if self._leaves else 0)
        return self.outstanding <= settled

    def stop(self) -> None:
        """As above."""
        self._leaves = self.stopping = True

    def cancel(self) -> None:
        """Let another one begin before all that is in hand is confirmed."""
        if self._leaves or not self.stopping:
            self.acknowledge_all()
            super().stop()

    def tick(self, now: float) -> None:
        """As above; what was released waits for the channel to close, and may be the last that is in hand."""
        if self._leaves:
            self.wake()
        else:
            super().tick(now)

    def flush(self) -> None:
        """As above."""
        if self._leaves:
            self._confirmed += self.accepted
            self.accepted = []
            if not self.done:
                return
            self.accepted, self._confirmed = self._confirmed, []
        super().flush()

    def acknowledge_all(self) -> None:
        """Whatever is confirmed, at once."""
        self._leaves = False
        self.accepted += self._confirmed
        self._confirmed = []
        super().flush()


class OutboxConnection(AmqpLinkConnection):
    """A connection of theirs: it also asks how much waits, on a channel for that."""

    _consuming: ClassVar[type[AmqpLinkConsumer]] = OutboxConsumer

    def __init__(self, session: SharedOutboxes, stream: Stream, target: Target, now: float) -> None:
        super().__init__(session, stream, target, now)
        self._outboxes = session
        self._counting = 0
        self._asked: deque[str] = deque()
        self._count_at = 0.0

    def tick(self, now: float) -> None:
        """Ask now and then."""
        super().tick(now)
        if not self._up or now < self._count_at:
            return
        self._count_at = now + COUNT_SECS
        if not self._counting:
            self._counting = self._new_channel()
        elif not self._asked:
            self._count()

    def hand_back(self, prefix: str) -> None:
        """The queues of such names are to have again what of them is in hand; nothing more comes."""
        for number, consumer in self._outbox_consumers():
            if consumer.declaration.name.startswith(prefix):
                consumer.acknowledge_all()
                self.machine.close_channel(number)
                self._drop(number)
        self._stream.mark()

    def let_others_begin(self) -> None:
        """What is in hand stays, and nothing more comes."""
        for _, consumer in self._outbox_consumers():
            consumer.cancel()
        self._stream.mark()

    def shut_down(self) -> None:
        """As above: what has not been confirmed goes back with the connection."""
        for _, consumer in self._outbox_consumers():
            consumer.acknowledge_all()
        super().shut_down()

    def _outbox_consumers(self) -> list[tuple[int, OutboxConsumer]]:
        found = self._consumers.items()
        return [(number, one) for number, one in found if isinstance(one, OutboxConsumer)]

    def _count(self) -> None:
        for queue in self._outboxes.counted():
            self._asked.append(queue)
            self.machine.send_method(self._counting, m.QueueDeclare(queue, passive=True))
        self._stream.mark()

    def _channel_opened(self, number: int) -> None:
        if number == self._counting:
            self._count()
        else:
            super()._channel_opened(number)

    def _channel_closed(self, event: ChannelClosed) -> None:
        if event.channel == self._counting:  # a queue is not there yet, or no longer
            self._counting = 0
            self._asked.clear()
        else:
            super()._channel_closed(event)

    def _method(self, event: MethodReceived) -> None:
        if event.channel == self._counting and isinstance(event.method, m.QueueDeclareOk):
            self._outboxes.waiting[self._asked.popleft()] = event.method.message_count
        else:
            super()._method(event)

    def lost(self, reason: str) -> None:
        """The connection is gone: nobody says how much waits, and what was in hand is back in its queues."""
        self._outboxes.waiting.clear()
        super().lost(reason)
        self._outboxes.withdraw()


class SharedOutbox(OneSink):
    """The outbox of one route: its namespace, and the only sink of that."""

    def __init__(self, outboxes: SharedOutboxes, address: Address) -> None:
        """`address`: of its queue on the cluster."""
        super().__init__(self)
        self._address = address
        self._recipient = Recipient(outboxes.publisher)

    def publish(self, part: SubBatch) -> None:
        """Put messages into the queue; they are accepted when the cluster has confirmed them."""
        batch = part.batch.onward(SubBatchSource(part))
        for at, message in enumerate(part.messages):
            try:
                octets = encode_message(message)
            except Exception as error:
                part.settle_at((at,), poisoned(error))
                continue
            stored = Message(self._address, octets, assurance=1, durable=True, sender=message.sender)
            batch.add_from(part.slots[at], at, [(self._recipient, stored)])
        batch.send()


class SubBatchSource:
    """The source of what goes into an outbox of one part; receipts are positions in that."""

    def __init__(self, part: SubBatch) -> None:
        self._part = part

    def settle(self, receipts: list[int], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """The cluster says what became of messages."""
        refused = refused or {}
        self._part.settle_at([receipt for at, receipt in enumerate(receipts) if at not in refused])
        for at, outcome in refused.items():
            self._part.settle_at((receipts[at],), outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Whoever published the part stops reading."""
        return self._part.batch.source.hold(senders)


class RequeuingSink:
    """The sink of what no route leads out of an outbox: it stays there."""

    def publish(self, part: SubBatch) -> None:
        """Give it back."""
        part.settle_at(range(len(part.messages)), GONE)


class Grave:
    """The sink of what the cluster has taken out of the outbox of a route: dead letters."""

    def __init__(self, outboxes: SharedOutboxes, name: str, route: Route | None) -> None:
        self._outboxes = outboxes
        self._name = name
        self._route = route  # the one in force by that name

    def publish(self, part: SubBatch) -> None:
        """Keep them; they leave their queue when that is safe."""
        letters = self._outboxes.dispatcher.dead_letters
        for at, stored in enumerate(part.messages):
            outcome, message, crossed = CROWDED_OUT, stored, True
            try:
                given = dict(stored.properties.headers).get(FIRST_REASON)
                if given is not None and given.value == "expired":
                    outcome = TOO_OLD
                message = self._outboxes.reader.decode_one(bytes(stored.body))
            except (RemoteProtocolError, StoreError) as error:
                outcome, crossed = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)), False
            then = partial(self._gone, part, at, message if crossed else None, outcome)
            letters.add([message], self._name, outcome, then, crossed=crossed)

    def _gone(self, part: SubBatch, at: int, message: Message | None, outcome: Outcome) -> None:
        part.settle_at((at,))
        if message is not None:
            self._outboxes.note(self._route, [message], outcome, WAS_BURIED)


GONE: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the route of the outbox is in no mapping now")
DOWN: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the link is down")
ABSENT: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "the link is not here")


class Drain:
    """The sink of what comes out of an outbox: it goes to the link as the route had made it."""

    def __init__(self, outboxes: SharedOutboxes, route: Route) -> None:
        self.route = route
        self.outboxes = outboxes
        self._recipients: dict[Sink, OutboxRecipient] = {}

    def publish(self, part: SubBatch) -> None:
        """Hand messages to the link. If it has just gone down they wait there, behind what waits already."""
        utc = clock.utc()
        namespace = self.outboxes.namespace
        batch = part.batch.onward(DrainSource(self, part))
        for at, stored in enumerate(part.messages):
            try:
                message = self.outboxes.reader.decode_one(bytes(stored.body))
            except StoreError as error:
                outcome = Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
                self.bury(part, at, stored, outcome, crossed=False)
                continue
            if (unfit := misfit(self.route, message)) is not None:
                self.bury(part, at, message, unfit)
                continue
            if message.expires != NEVER and message.expires <= utc:
                self.bury(part, at, message, EXPIRED)
                continue
            sinks = None if namespace is None else namespace.sinks(message.address)
            if not sinks:
                part.settle_at((at,), ABSENT)
                continue
            batch.add_from(part.slots[at], (at, message), [(self._recipient(sinks[0]), message)])
        batch.send()

    def _recipient(self, sink: Sink) -> OutboxRecipient:
        found = self._recipients.get(sink)
        if found is None:
            found = self._recipients[sink] = OutboxRecipient(sink, self.route, None)
        return found

    def tries_again(self, part: SubBatch, at: int, outcome: Outcome) -> bool:
        """Whether a message that was refused goes back for another attempt; what follows passes it."""
        if outcome.reason in FINAL:
            return False
        refusals = self.outboxes.refusals
        key = blake2b(part.messages[at].body, digest_size=16).digest()
        times = refusals.pop(key, 0) + 1
        if times >= self.route.rule.attempts_max:
            return False
        make_room(refusals, REFUSALS_MAX)
        refusals[key] = times
        return True

    def bury(
        self, part: SubBatch, at: int, message: Message, outcome: Outcome, *, crossed: bool = True
    ) -> None:
        """It is a dead letter, and leaves the outbox when that is safe."""
        self.route.failed += 1
        then = partial(self._gone, part, at, message if crossed else None, outcome)
        letters = self.outboxes.dispatcher.dead_letters
        letters.add([message], self.route.name, outcome, then, crossed=crossed)

    def _gone(self, part: SubBatch, at: int, message: Message | None, outcome: Outcome) -> None:
        part.settle_at((at,))
        if message is not None:
            self.note([message], outcome, WAS_BURIED)

    def note(self, messages: list[Message], outcome: Outcome, word: str) -> None:
        """Have the journal hear that these have left."""
        self.outboxes.note(self.route, messages, outcome, word)


class DrainSource:
    """The source of what leaves an outbox, of one part. A receipt is (position in the part, message)."""

    def __init__(self, drain: Drain, part: SubBatch) -> None:
        self.outboxes = drain.outboxes
        self._drain = drain
        self._part = part

    def settle(
        self,
        receipts: list[tuple[int, Message]],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """The link says what became of messages: what is refused is a dead letter, what is released goes
        back to its queue."""
        refused = refused or {}
        done = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        self._part.settle_at([position for position, _ in done])
        self._drain.note([message for _, message in done], ACCEPTED, WAS_DELIVERED)
        for at, outcome in refused.items():
            position, message = receipts[at]
            if outcome.verdict is Verdict.RELEASED or self._drain.tries_again(self._part, position, outcome):
                self._drain.route.retried += 1
                self._part.settle_at((position,), outcome._replace(verdict=Verdict.RELEASED))
            else:
                self._drain.bury(self._part, position, message, outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """The senders have been answered long ago."""
        return []

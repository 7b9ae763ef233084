"""The session of a client that is connected to this replica.

One that outlives its connection has a queue on the cluster, bound to its filters of QoS 1 and 2; what filters
of QoS 0 want comes by the replica's queue, for that is for clients that are connected. A message of the queue
is acknowledged there when the client has acknowledged it here. What is not, another replica gets when the
client is there, under another packet id, which at QoS 1 is all the same.

At QoS 2 the shared database knows which message has which id before the client gets it, and that it has it
before PUBREL. So whoever owns the session next goes on: a message that was sent comes under its old id, and
one that the client has had is acknowledged and not sent. The ids of messages that the client publishes are
stored before these are published, with the numbers by which subscribers' replicas know them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.broker.mqtt.received_ids import ReceivedIds
from gateway.broker.mqtt.session import (
    PACKET_IDS,
    ROWS_MAX,
    ROWS_OCTETS_MAX,
    UNKEPT,
    Grant,
    Outlet,
    Row,
    Session,
    SessionLimits,
    SessionTally,
    SubscriptionOptions,
)
from gateway.broker.mqtt.shared import shared_pattern
from gateway.broker.topics import topic_matches
from gateway.engine.consumers import PREFETCH_MAX, Consumer, Content, Done
from gateway.engine.envelope import Number
from gateway.engine.given_back import GivenBack, print_of
from gateway.engine.names import binding_of
from gateway.engine.once import Recent
from gateway.engine.stored import encode_options
from gateway.engine.walks import Walked
from gateway.model.address import Address
from gateway.model.caches import make_room
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.properties import Headers
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.spec import PacketType
from gateway.state.interface import INCOMING, OUTGOING, Contents, Owner, Packet

log = structlog.get_logger(limited=True)

# What an earlier owner had sent comes again before anything new, as a rule. A queue whose broker is busy, or
# has lost a node, may have new things first, so ids are kept for some time: to be wrong would lose a message.
LEFT_SECS: Final = 30.0
SPARE: Final = 128  # messages that may come between those that were given back
# Of as many as its client may have unacknowledged, for what was given back and what comes between.
ROOM_TIMES: Final = 4
GRANTS_MAX: Final = 1_024  # topics of which a session remembers what it is granted of them
Told = Callable[[Outcome], None]


class Delivery(NamedTuple):
    """Where a message has come from, and how it is settled there. `again`: its client may have had it."""

    consumer: Consumer
    tag: int
    number: Number | None
    again: bool

    def settle(self) -> None:
        """It has been dealt with."""
        self.consumer.settle(self.tag)

    def give_back(self) -> None:
        """Somebody else is to have it."""
        self.consumer.give_back(self.tag)


class Change:
    """Gathers what a session has to store: the fields of the next ChangeSession. None removes."""

    __slots__ = ("packets", "received", "served", "subscriptions")

    def __init__(self) -> None:
        self.served = False
        self.subscriptions: dict[str, bytes | None] = {}
        self.packets: dict[tuple[int, int], Packet | None] = {}
        self.received: dict[tuple[bytes, int], int | None] = {}

    def __bool__(self) -> bool:
        return bool(self.served or self.subscriptions or self.packets or self.received)


class Engine(Protocol):
    """What a session asks of the engine."""

    recent_chunks: int  # that a session remembers of the messages of QoS 2 that its client has

    def change(self, session: ClientSession) -> Change:
        """Return what is to be stored of a session, for more to be added; it is stored soon."""

    def after_stored(self, session: ClientSession, done: Told) -> None:
        """`done` hears ACCEPTED when all that was to be stored of a session until now is stored. It hears
        another outcome when the session has another owner."""

    def pump(self, session: ClientSession) -> None:
        """It has something for its client; it is pumped when the wake-up ends."""

    def next_number(self) -> Number:
        """For a message that is going to be published."""

    def read(self, content: Content) -> tuple[Message, Number | None] | None:
        """The message of a delivery; None: there is none that could be delivered."""

    def let_go_of(self, session: ClientSession, why: str) -> None:
        """Its client has to connect anew."""

    def bind_queue(self, session: ClientSession, key: str) -> None:
        """`unbound` says what is to be done with a key."""

    def check_owner(self, session: ClientSession, done: Callable[[bool], None]) -> None:
        """Call `done` with True if the database has the session as this replica's, with its queue."""


class ClientSession(Session):
    """A session of a client of this replica."""

    __slots__ = (
        "_cached",
        "_consumer",
        "_deliveries",
        "_engine",
        "_flight",
        "_given_back",
        "_left_since",
        "_next",
        "_old",
        "_recent",
        "_reserved",
        "_sent",
        "_stopped",
        "arguments",
        "fresh",
        "owner",
        "prefetch",
        "queue",
        "unbound",
        "walked",
    )

    def __init__(
        self, client_id: str, limits: SessionLimits, tally: SessionTally, engine: Engine, owner: Owner
    ) -> None:
        super().__init__(client_id, limits, tally)
        self.owner = owner
        self.queue = ""
        self.prefetch = limits.in_flight_max
        self.arguments: Headers = ()
        self.fresh = False
        self.unbound: dict[str, tuple[bool, Done]] = {}
        self._engine = engine
        # An earlier owner may have sent what does not come again; that is looked for since then.
        self._left_since: Monotonic | None = None
        self._next = 0
        self._deliveries: dict[int, Delivery] = {}  # of what waits, by position
        self._flight: dict[int, Delivery] = {}  # of what is in flight, by packet id
        self._reserved: dict[int, Number | None] = {}  # packet ids of QoS 2 that are stored, or will be
        self._sent: dict[Number, int] = {}  # the same the other way round
        self._recent = Recent(0)  # of a session that ends with its connection nothing comes again
        self._old = 0  # so many messages of the queue were there before the client
        # What its queue was given back by an earlier owner, until all of that is here.
        self._given_back: GivenBack | None = None
        self._cached: dict[str, Grant | None] = {}
        self._consumer: Consumer | None = None  # that its queue's messages come by
        self.walked: Walked | None = None  # what it was sent as retained, while that may come live, too
        self._stopped = False

    @property
    def lasting(self) -> bool:
        """It has a queue."""
        return self.queue != ""

    def begin(self, contents: Contents, queue: str, arguments: Headers) -> None:
        """The session has a queue, and the contents that the database has, but no subscriptions yet."""
        self.queue, self.arguments = queue, arguments
        taken, sent = dict[int, Number](), dict[int, Number | None]()
        for (direction, packet_id), packet in sorted(contents.packets.items()):
            if direction == OUTGOING:
                sent[packet_id] = packet.number
                if packet.released:
                    self.released[packet_id] = None
            elif packet.number is not None:
                taken[packet_id] = packet.number
        self.received_ids = SharedReceivedIds(self._engine, self, taken)
        self._left_since = clock.now() if sent else None
        self._reserved.update(sent)
        self._sent.update({number: at for at, number in sent.items() if number is not None})
        self._recent = Recent(self._engine.recent_chunks, contents.received)

    def change(self) -> Change:
        """Return what is to be stored, for more to be added."""
        return self._engine.change(self)

    def _note_packet(self, packet_id: int, *, released: bool = False) -> None:
        self.change().packets[OUTGOING, packet_id] = Packet(self._reserved[packet_id], released)

    # Subscriptions.

    @property
    def keys(self) -> Iterable[str]:
        """What its queue is bound to."""
        for topic_filter, options in self.subscriptions.items():
            if not options.qos or shared_pattern(topic_filter) is not None:
                continue
            if (key := binding_of(topic_filter.split("/"))) is not None:
                yield key

    def subscribed(self, topic_filter: str, options: SubscriptionOptions | None, before: int) -> None:
        """A subscription is made, or ends (None). It is stored when the queue is bound, but one that ends at
        once. `before`: the QoS that it had."""
        self._cached.clear()
        given = None if options is None else encode_options(options)
        note = partial(self._note, topic_filter, given)
        key = None if shared_pattern(topic_filter) is not None else binding_of(topic_filter.split("/"))
        wanted = options is not None and options.qos > 0
        if key is None or wanted == (before > 0):
            note()
        elif wanted:
            self.unbound[key] = (True, note)
            self._engine.bind_queue(self, key)
        else:
            note()
            self.unbound[key] = (False, _nobody)
            self._engine.bind_queue(self, key)

    def _note(self, topic_filter: str, options: bytes | None) -> None:
        self.change().subscriptions[topic_filter] = options

    def _granted(self, address: Address) -> Grant | None:
        topic = address.name
        if topic in self._cached:
            return self._cached[topic]
        levels = topic.split("/")
        matching = [
            options
            for topic_filter, options in self.subscriptions.items()
            if shared_pattern(topic_filter) is None and topic_matches(topic_filter.split("/"), levels)
        ]
        make_room(self._cached, GRANTS_MAX)
        found = self._cached[topic] = Grant(self, matching) if matching else None
        return found

    # What comes from a queue.

    def waits(self, count: int) -> None:
        """So many messages are in the queue already."""
        self._old = count

    def deliver(self, consumer: Consumer, tag: int, redelivered: bool, content: Content) -> None:
        """A message of the queue."""
        if consumer is not self._consumer:
            self._consumer = consumer
            self._forget_waiting()
        given_back = self._given_back
        if given_back is None:
            self._take(consumer, tag, redelivered, content)
        elif given_back.hold((consumer, tag, redelivered, content)) or given_back.waiting >= self.prefetch:
            self.expect_no_longer()  # all of it is here, or nothing else would come

    def expect(self, prints: Sequence[int]) -> None:
        """Wait with what comes until what has these prints has come again. Before the queue is consumed."""
        self._given_back = GivenBack(prints)
        self.prefetch = self._prefetch_for(self.prefetch)

    def _prefetch_for(self, receive_maximum: int) -> int:
        """How many messages may be here: what was given back, too, and some that come between. A client that
        acknowledges nothing and goes from replica to replica has more of them each time, within limits."""
        if self._given_back is None:
            return max(receive_maximum, 1)
        most = min(ROOM_TIMES * receive_maximum + SPARE, PREFETCH_MAX)
        return min(max(receive_maximum, self._given_back.count) + SPARE, most)

    def prints(self, given_back: Iterable[Content]) -> tuple[int, ...]:
        """What the next owner is to expect, when this one has given that back."""
        before = self._given_back
        return tuple(map(print_of, given_back)) if before is None else before.prints(given_back)

    def expect_no_longer(self) -> None:
        """Go on with what has come."""
        given_back, self._given_back = self._given_back, None
        if given_back is None:
            return
        if given_back.lacking:
            log.warning(
                "requeued messages late, order not guaranteed",
                client=self.client_id,
                missing=given_back.lacking,
            )
        for held in given_back.in_order():
            if held[0] is self._consumer:  # else it comes again over another connection
                held[0].order(held[1])
                self._take(*held)

    def _take(self, consumer: Consumer, tag: int, redelivered: bool, content: Content) -> None:
        old = self._old > 0
        self._old -= old
        since = self._left_since
        if since is not None and not redelivered and clock.now() - since >= LEFT_SECS:
            self._left_since = None
            self._close_left()
        found = self._engine.read(content)
        grant = None if found is None else self._granted(found[0].address)
        if found is None or grant is None:
            consumer.settle(tag)
            return
        message, number = found
        qos = min(message.assurance, grant.qos)
        walked = self.walked if qos or not old else None
        is_late = walked is not None and not walked.is_new(message, number, qos, lasting=True)
        if is_late and not old and not redelivered:
            consumer.settle(tag)  # it was sent a later one as retained
            return
        self.owe(message, grant, Delivery(consumer, tag, number, redelivered), old=old)

    def _forget_waiting(self) -> None:
        """What waits of an earlier connection to the cluster comes again over this one."""
        waiting, self._waiting = self._waiting, None
        gone = 0
        for message, grant, position in waiting or ():
            delivery = self._deliveries.get(position)
            if delivery is not None and delivery.consumer.target is self:
                del self._deliveries[position]
                gone += message.octets
            else:
                self._wait([(message, grant, position)])
        self._let_go(gone)

    def owe(self, message: Message, grant: Grant, delivery: Delivery, *, old: bool = False) -> bool:
        """Owe a message of a queue. `old`: it came when the client was away. False: it is settled."""
        qos = min(message.assurance, grant.qos)
        if grant.no_local and message.sender.client == self.client_id:
            delivery.settle()
            return False
        if not qos:
            delivery.settle()
            if old:
                self.tally.offline += 1
                return False
            self._wait([(message, grant, UNKEPT)])
        elif qos == 2 and self._knows(message, grant, delivery):
            return False
        else:
            self._enqueue(message, grant, delivery)
        self._octets += message.octets
        self._engine.pump(self)
        return True

    def _enqueue(self, message: Message, grant: Grant, delivery: Delivery) -> None:
        self._next += 1
        self._deliveries[self._next] = delivery
        self._wait([(message, grant, self._next)])

    def _knows(self, message: Message, grant: Grant, delivery: Delivery) -> bool:
        """Its client has had it, or has been sent it. Asked again when it is sent: whoever published it may
        have done so twice while it waited."""
        number = delivery.number
        if not self.lasting or number is None:
            return False
        if number in self._recent:
            delivery.settle()
            return True
        at = self._sent.get(number)
        if at is None:
            return False
        self._again_at(at, message, grant, delivery)
        return True

    def _again_at(self, packet_id: int, message: Message, grant: Grant, delivery: Delivery) -> None:
        """A message that is known under a packet id: it is in flight here, or was at an earlier owner."""
        if packet_id in self.released:
            delivery.settle()
            return
        before = self._flight.get(packet_id)
        if before is not None:
            before.settle()  # of two that are here the later one is waited for
        self._flight[packet_id] = delivery
        if packet_id not in self.in_flight:
            row = self.in_flight[packet_id] = Row(message, grant, 2, packet_id, True)
            self._octets += message.octets
            self._again.insert(0, row)
            self._engine.pump(self)

    def _close_left(self) -> None:
        """What an earlier owner had sent, and has not come again, has expired: the client may have it, and
        is told that it is over."""
        for packet_id in list(self._reserved):
            if packet_id not in self.in_flight and packet_id not in self.released:
                self.released[packet_id] = None
                self._note_packet(packet_id, released=True)
                self._engine.after_stored(self, partial(self._release, packet_id))

    def _release(self, packet_id: int, outcome: Outcome) -> None:
        if outcome is ACCEPTED and self.outlet is not None and packet_id in self.released:
            self.credit -= 1
            self.outlet.send_release(packet_id)

    # Out.

    def _next_rows(self) -> list[Row]:
        rows: list[Row] = []
        if self._stopped:
            return rows
        while self._again and len(rows) < ROWS_MAX:
            row = self._again[-1]
            if row.dup:  # the others had their credit before they were written down
                if self.credit <= 0:
                    break
                self.credit -= 1
            rows.append(self._again.pop())
        if rows:
            return rows
        return self._fresh_rows()

    def _fresh_rows(self) -> list[Row]:
        rows: list[Row] = []
        unsaid: list[Row] = []
        waiting = self._waiting
        if waiting is None:
            return rows
        octets = gone = 0
        while waiting and len(rows) + len(unsaid) < ROWS_MAX and octets < ROWS_OCTETS_MAX:
            message, grant, position = waiting[0]
            qos = min(message.assurance, grant.qos)
            if qos and self.credit <= 0:
                break
            waiting.popleft()
            delivery = self._deliveries.pop(position, None)
            if message.expires and message.expires <= clock.utc():
                self.tally.expired += 1
                gone += message.octets
                if delivery is not None:
                    delivery.settle()
                continue
            if qos == 2 and delivery is not None and self._knows(message, grant, delivery):
                gone += message.octets
                continue
            octets += message.octets
            packet_id = self._free_id() if qos else 0
            row = Row(message, grant, qos, packet_id, delivery is not None and delivery.again and qos > 0)
            if qos:
                self.credit -= 1
                self.in_flight[packet_id] = row
                if delivery is not None:
                    self._flight[packet_id] = delivery
            else:
                gone += message.octets
            if qos == 2 and self.lasting:
                self._reserve(packet_id, self._number_of(message) if delivery is None else delivery.number)
                unsaid.append(row.said(before=False))
            else:
                rows.append(row)
        if unsaid:
            self._engine.after_stored(self, partial(self._say, unsaid))
        self._let_go(gone)
        return rows

    def _number_of(self, message: Message) -> Number | None:
        """The number of a retained message: it may come live as well."""
        return None if self.walked is None else self.walked.number_of(message)

    def _reserve(self, packet_id: int, number: Number | None) -> None:
        self._reserved[packet_id] = number
        if number is not None:
            self._sent[number] = packet_id
        self._note_packet(packet_id)

    def _say(self, rows: list[Row], outcome: Outcome) -> None:
        """Send messages whose packet identifiers are stored."""
        if outcome is ACCEPTED and self.outlet is not None:
            self._again[:0] = reversed(rows)
            self.pump()

    def _free_id(self) -> int:
        candidate = self._last_id
        while True:
            candidate = candidate + 1 if candidate < PACKET_IDS else 1
            if candidate not in self.in_flight and candidate not in self._reserved:
                self._last_id = candidate
                return candidate

    # The client acknowledges, comes and goes.

    def attach(self, outlet: Outlet, receive_maximum: int) -> None:
        """As Session; PUBREL is said for what an earlier owner had heard of."""
        self.outlet = outlet
        self.credit = receive_maximum - len(self.released)
        self.prefetch = self._prefetch_for(receive_maximum)
        for packet_id in self.released:
            outlet.send_release(packet_id)
        self.pump()

    def awaits(self, kind: PacketType, packet_id: int) -> bool:
        """As Session; an earlier owner may have sent what is unknown here."""
        if packet_id in self._reserved and packet_id not in self.in_flight:
            return kind is not PacketType.PUBACK
        return super().awaits(kind, packet_id)

    def received(self, packet_id: int) -> bool:
        """As Session; it is stored before PUBREL is said."""
        if packet_id not in self._reserved:
            return super().received(packet_id)
        if packet_id not in self.released:
            self.released[packet_id] = None
            self._note_packet(packet_id, released=True)
            self._had(self._reserved[packet_id])
            delivery = self._flight.pop(packet_id, None)
            if delivery is not None:
                self._engine.after_stored(self, partial(_settle, delivery))
        return True

    def finish(self, packet_id: int) -> bool:
        """As Session."""
        delivery = self._flight.pop(packet_id, None)
        if delivery is not None:
            delivery.settle()
        known = packet_id in self._reserved
        if known:
            number = self._reserved.pop(packet_id)
            if packet_id not in self.released:  # else it is remembered already
                self._had(number)
            if number is not None:
                self._sent.pop(number, None)
            self.change().packets[OUTGOING, packet_id] = None
        if super().finish(packet_id):
            return True
        if known and packet_id in self.released:
            del self.released[packet_id]
            self.credit += 1
        return known

    def _had(self, number: Number | None) -> None:
        """The client has a message, and is not sent it again. One whose session ends with its connection is
        remembered by nobody."""
        if number is not None and self.lasting:
            self.change().received.update(self._recent.add(number))

    @property
    def is_wanted(self) -> bool:
        """Return False for one whose queue another owner has, who may have deleted it."""
        return not self._stopped

    def confirm(self, done: Callable[[bool], None]) -> None:
        """Ask the database: a notice that the session is another owner's may be on its way."""
        self._engine.check_owner(self, done)

    @property
    def is_stopped(self) -> bool:
        """Nothing more is sent from here."""
        return self._stopped

    def stop(self) -> None:
        """Its queue is about to be somebody else's: nothing more is sent from here."""
        self._stopped = True

    def give_back(self) -> None:
        """The client is gone: others may have what it was owed of shared subscriptions."""
        for delivery in (*self._flight.values(), *self._deliveries.values()):
            if delivery.consumer.target is not self:
                delivery.give_back()

    def unreachable(self) -> None:
        """The node that has its queue is down."""
        self._engine.let_go_of(self, "the node that has its queue is down")

    def discarded(self) -> None:
        """As Session; what is stored of it ends with LeaveSession."""
        self._grant = None


class SharedReceivedIds(ReceivedIds):
    """The ids of QoS 2 messages of a client. What is taken is stored, with the number of the message, before
    that is published: whoever gets it again publishes it under the same number."""

    __slots__ = ("_engine", "_numbers", "_session")

    def __init__(self, engine: Engine, session: ClientSession, taken: dict[int, Number]) -> None:
        super().__init__()
        self._engine = engine
        self._session = session
        self._numbers = dict(taken)

    def number(self, packet_id: int) -> Number | None:
        """By which a message is known again."""
        return self._numbers.get(packet_id)

    def announce(self, packet_ids: Iterable[int]) -> bool:
        """Have these ids stored. Return False if they are."""
        lacking = [packet_id for packet_id in packet_ids if packet_id not in self._numbers]
        for packet_id in lacking:
            number = self._numbers[packet_id] = self._engine.next_number()
            self._session.change().packets[INCOMING, packet_id] = Packet(number)
        return bool(lacking)

    def forget(self, packet_id: int) -> None:
        """As above."""
        super().forget(packet_id)
        self._free(packet_id)

    def release(self, packet_id: int) -> bool:
        """As above."""
        return super().release(packet_id) | self._free(packet_id)

    def _free(self, packet_id: int) -> bool:
        if self._numbers.pop(packet_id, None) is None:
            return False
        self._session.change().packets[INCOMING, packet_id] = None
        return True


def _settle(delivery: Delivery, outcome: Outcome) -> None:
    if outcome is ACCEPTED:
        delivery.settle()


def _nobody() -> None:
    """Nobody waits for it."""

"""An MQTT broker in memory at the other end of a link: no sockets, no waiting, and it does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import trio

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.egress.mqtt.session import MqttLinkConnection, MqttLinkSession
from gateway.errors import RemoteProtocolError
from gateway.mapping.loader import parse
from gateway.mapping.router import Router, Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Batch, Recipient, Sink, SubBatch
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.properties import NO_PROPERTIES, PropertySet
from gateway.model.spooled_bodies import Piece, join_pieces
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.packets import Connect, Event, Subscribe, Unsubscribe
from gateway.protocols.mqtt.runs import Acks, Publishes, PublishRow
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, Property
from gateway.settings import Limits
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream
from tests.configured import make_link
from tests.egress.queue_rig import NotedStatus

ROUTES: Final = """
version: 1
routes:
  - {name: up, from: {endpoint: plant, topic: "up/#"}, to: {endpoint: local, topic: "in/{topic}"}}
"""


def whole(said: bytes | list[Piece]) -> bytes:
    """It, in one."""
    return said if isinstance(said, bytes) else join_pieces(said)


class FakeStream:
    """What an owner asks of a stream."""

    remote = "broker:1883"

    def __init__(self) -> None:
        self.owner: MqttLinkConnection | None = None
        self.closed = False
        self.ending = False
        self.congested = False
        self.queued = 0
        self.holds = 0
        self.why = ""
        self.last = b""
        self.unread = False
        self.pending_error: Exception | None = None
        self._postponed: list[Event] | None = None

    def mark_for_flush(self) -> None:
        """Everything is collected by `World.talk`."""

    def fail_later(self, error: Exception) -> None:
        """The test drops it then."""
        self.pending_error = error
        self.congested = True

    def expect(self, byte_count: int) -> None:
        """Here all comes at once."""

    def request_turn(self) -> None:
        assert self.owner is not None
        self.owner.receive(b"", trio.current_time())

    def postpone(self, events: list[Event]) -> None:
        self._postponed = events

    def postponed(self) -> list[Event] | None:
        events, self._postponed = self._postponed, None
        return events

    def is_turn_spent(self) -> bool:
        return False

    def hold(self) -> None:
        self.holds += 1

    def release(self) -> None:
        self.holds -= 1

    def end(self, reason: str) -> None:
        if not self.ending and not self.closed:
            self.ending = True
            assert self.owner is not None
            self.last = whole(self.owner.data_to_send())
            self._lose(reason)

    def abort(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        owner, self.owner = self.owner, None
        self.why = reason
        if owner is not None:
            owner.connection_lost(reason)


class Collector:
    """A sink, a namespace and the source of the messages that are published in a test."""

    def __init__(self) -> None:
        self.parts: list[SubBatch] = []
        self.outcomes: dict[Any, Outcome] = {}
        self.answer: Outcome | None = ACCEPTED  # None: settle later

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)
        if self.answer is not None:
            part.settle(self.answer)

    @property
    def messages(self) -> list[Message]:
        return [message for part in self.parts for message in part.messages]

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        return (self,)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        return (self,)

    @property
    def retained(self) -> None:
        """Nothing to keep."""

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        return []

    def settle(self, receipts: list[Any], refused: dict[int, Outcome] | None, received: float) -> None:
        for at, receipt in enumerate(receipts):
            assert receipt not in self.outcomes, "settled twice"
            self.outcomes[receipt] = (refused or {}).get(at, ACCEPTED)


class Remote:
    """The broker's side of one connection. `acks`: it answers PUBLISH and PUBREL by itself."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = ServerConnection(
            packet_bytes_max=world.packet_bytes_max,
            receive_max=world.receive_max,
            topic_alias_max=world.topic_alias_max,
        )
        self.acks = world.acks
        self.connect: Connect | None = None
        self.events: list[Event] = []
        self.rows: list[PublishRow] = []
        self.answered = 0  # of `rows`, and of the PUBRELs, by a test that answers a few at a time
        self.completed = 0

    def receive(self, data: bytes) -> None:
        for event in self.machine.receive_data(data, 0.0):
            self.events.append(event)
            if isinstance(event, Connect):
                self._connect(event)
            elif isinstance(event, Subscribe):
                refused = self.world.refused_filters
                reasons = [refused.get(one.filter, one.qos) for one in event.subscriptions]
                self.machine.send_suback(event.packet_id, reasons)
            elif isinstance(event, Unsubscribe):
                self.machine.send_unsuback(event.packet_id, [0] * len(event.filters))
            elif isinstance(event, Publishes):
                self.rows += event.rows
                if self.acks:
                    self.ack(event.rows)
            elif isinstance(event, Acks) and event.kind is PacketType.PUBREL and self.acks:
                self.machine.acknowledge(PacketType.PUBCOMP, [one for one, _ in event.rows])
        if self.machine.unread:
            self.receive(b"")

    def _connect(self, packet: Connect) -> None:
        self.connect = packet
        if self.world.asks:
            return
        reason = self.world.connack_reason
        properties = {} if reason else self.world.connack_properties
        present = self.world.present and not reason
        self.machine.send_connack(session_present=present, reason=reason, properties=properties)

    def ack(self, rows: Iterable[PublishRow]) -> None:
        for flags, _, packet_id, _, _ in rows:
            if flags & 6:
                kind = PacketType.PUBACK if flags & 2 else PacketType.PUBREC
                self.machine.acknowledge(kind, [packet_id])

    def acks_of(self, kind: PacketType) -> list[tuple[int, int]]:
        """What the link has acknowledged: (packet id, reason)."""
        found = [event.rows for event in self.events if isinstance(event, Acks) and event.kind is kind]
        return [row for rows in found for row in rows]

    def said(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class World:
    """A conversation, its surroundings, and the broker that it talks to."""

    def __init__(
        self, *, routes: str = ROUTES, limits: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.limits = Limits(**(limits or {}))
        self.dead_letters = DeadLetters()
        self.dispatcher = Dispatcher(
            Router([parse(routes)], {"plant": "mqtt", "local": "mqtt"}), self.dead_letters
        )
        self.stats = LinkStats("plant", "mqtt")
        self.link = NotedStatus(self.stats)
        self.settings = make_link(url="mqtt://broker", **settings)
        self.session = MqttLinkSession(
            "plant", self.settings, self.dispatcher, self.limits, self.link, client_id="us"
        )
        self.local = Collector()
        self.dispatcher.namespaces = {"plant": self.session, "local": self.local}
        self.source = Collector()
        self.recipient = Recipient(self.session)
        # How the broker behaves.
        self.packet_bytes_max = 1 << 20
        self.receive_max = 65_535
        self.topic_alias_max = 0
        self.present = False
        self.asks = False  # it says nothing to CONNECT by itself
        self.acks = True
        self.connack_reason = 0
        self.connack_properties: dict[Property, Any] = {}
        self.refused_filters: dict[str, int] = {}
        self.stream = FakeStream()
        self.remote = Remote(self)

    @property
    def connection(self) -> MqttLinkConnection:
        assert self.stream.owner is not None
        return self.stream.owner

    def subscribe(self, *filters: str) -> None:
        self.session.route(Subscriptions(bindings=tuple(("", one) for one in filters)), Targets())

    def connect(self, now: float = 0.0) -> Remote:
        """A new connection, up to where it is usable or refused."""
        self.stream = FakeStream()
        self.remote = Remote(self)
        connection = self.session.connect(cast(Stream, self.stream), self.settings.target(), now)
        self.stream.owner = connection
        self.stats.add_connection(connection.machine)
        self.talk()
        return self.remote

    def talk(self, now: float = 0.0) -> None:
        """Carry bytes to and fro until nobody has anything to say; each arrival is one wake-up."""
        for _ in range(1_000):
            said = whole(self.stream.owner.data_to_send()) if self.stream.owner else self.stream.last
            self.stream.last = b""
            if said:
                self.remote.receive(said)
            answer = self.remote.machine.data_to_send()
            if answer and self.stream.owner is not None:
                self.stream.owner.receive(answer, now)
                self.session.end_turn()
            if not said and not answer:
                return
        raise AssertionError("they never stop talking")

    def drop(self, reason: str = "closed by the connection") -> None:
        self.stream.abort(reason)

    def publish(self, *messages: Message, receipts: Iterable[Any] | None = None) -> SubBatch:
        """One batch for the link; the receipts are the bodies unless given."""
        batch = Batch(self.source, Monotonic(0.0))
        for message, receipt in zip(messages, receipts or [one.body for one in messages], strict=True):
            batch.add_only(receipt, self.recipient, message)
        part = batch._parts[self.recipient]
        batch.send()
        return part

    def deliver(self, *rows: PublishRow) -> None:
        """The broker sends PUBLISH packets, all in one wake-up."""
        assert not self.remote.machine.publish_many(rows)
        self.talk()

    @property
    def outcomes(self) -> dict[Any, Outcome]:
        return self.source.outcomes

    def sent(self) -> list[tuple[int, bytes]]:
        """(flags, body) of every PUBLISH on this connection."""
        return [(row[0], row[4]) for row in self.remote.rows]


def message(
    body: str | bytes,
    qos: int = 1,
    *,
    topic: str = "t",
    retain: bool = False,
    expires: float = NEVER,
    properties: PropertySet = NO_PROPERTIES,
    hops: int = 1,
) -> Message:
    data = body.encode() if isinstance(body, str) else body
    return Message(topic_address(topic), data, properties, qos, qos > 0, retain, expires, hops)


def row(
    body: str, qos: int = 1, packet_id: int = 1, *, topic: str = "up/a", raw: bytes = b"", flags: int = 0
) -> PublishRow:
    return (qos << 1 | flags, topic.encode(), packet_id if qos else 0, raw, body.encode())


def broken() -> PropertySet:
    """A property set whose bytes cannot be read."""

    def decode(raw: bytes) -> Any:
        raise RemoteProtocolError("not readable", reason=0x81)

    return PropertySet("amqp091", b"?", decode)

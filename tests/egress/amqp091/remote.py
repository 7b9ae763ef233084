"""A broker in memory at the other end of an AMQP 0-9-1 link: no sockets, no waiting, and it does as told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.egress.amqp091.session import AmqpLinkConnection, AmqpLinkSession
from gateway.mapping import load
from gateway.mapping.router import Router, Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Sink, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import decode_publish
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.sender import Deliverer
from gateway.protocols.amqp091.server import ServerConnection
from gateway.settings import Limits
from gateway.telemetry.stats import LinkStats
from tests.configured import make_link
from tests.egress import queue_rig
from tests.egress.queue_rig import NotedStatus, QueueRig

NO_PROPERTIES: Final = b"\0\0"
PERSISTENT: Final = b"\x10\0\x02"
PLAIN: Final[dict[type[m.Method], m.Method]] = {
    m.ExchangeBind: m.ExchangeBindOk(),
    m.ConfirmSelect: m.ConfirmSelectOk(),
    m.BasicQos: m.BasicQosOk(),
}
NOTHING: Final = Subscriptions()
NOWHERE: Final = Targets()


class Remote:
    """The broker's side of one connection; what it knows is shared by all its connections (`world`)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = ServerConnection(server_properties=(), heartbeat=world.heartbeat)
        self.numbers: dict[int, int] = {}  # publishes, by channel
        self.newest = 0  # the channel of the last one
        self.consumers: dict[int, tuple[str, Deliverer]] = {}
        self.tags: dict[int, int] = {}

    def receive(self, data: bytes) -> None:
        events = self.machine.receive_data(data, 0.0)
        while self.machine.unread:
            events += self.machine.receive_data(b"", 0.0)
        for event in events:
            if isinstance(event, e.Authenticate):
                self.world.client_properties = event.client_properties
                self.world.response = event.response
                self.machine.authenticated()
            elif isinstance(event, e.Open):
                self.machine.opened()
            elif isinstance(event, e.ChannelOpened):
                self.numbers[event.channel] = self.tags[event.channel] = 0
            elif isinstance(event, e.Publishes):
                for content in event.contents:
                    self._publish(*content)
            elif isinstance(event, e.Acks):
                self.world.acks += event.acks
            elif isinstance(event, e.MethodReceived):
                self._method(event.channel, event.method)

    def _publish(self, channel: int, data: bytes, properties: bytes, body: bytes) -> None:
        if channel not in self.machine.channels:
            return
        world = self.world
        method = decode_publish(data)
        self.newest = channel
        number = self.numbers[channel] = self.numbers[channel] + 1
        if method.exchange and method.exchange not in world.exchanges:
            self._missing(channel, f"no exchange '{method.exchange}'", 60, 40)
            return
        if body in world.poison:
            self.machine.close_channel(channel, *world.refusal, 60, 40)
            return
        world.published.append((method.exchange, method.routing_key, method.mandatory, properties, body))
        if method.mandatory and method.routing_key in world.unroutable:
            reply = m.BasicReturn(312, "NO_ROUTE", method.exchange, method.routing_key)
            self.machine.send_content(channel, reply, properties, body)
        if world.confirms:
            self.machine.ack(channel, number)

    def _method(self, channel: int, method: m.Method) -> None:
        world, send = self.world, self.machine.send_method
        world.heard.append(method)
        if isinstance(method, m.ExchangeDeclare):
            if method.passive and method.exchange not in world.exchanges:
                self._missing(channel, f"no exchange '{method.exchange}'", 40, 10)
                return
            world.exchanges.setdefault(method.exchange, method.type)
            send(channel, m.ExchangeDeclareOk())
        elif isinstance(method, m.QueueDeclare):
            if method.passive and method.queue not in world.queues:
                self._missing(channel, f"no queue '{method.queue}'", 50, 10)
                return
            world.queues.add(method.queue)
            count = sum(queue == method.queue for queue, _ in self.consumers.values())
            send(channel, m.QueueDeclareOk(method.queue, consumer_count=count))
        elif isinstance(method, m.QueueDelete):
            world.queues.discard(method.queue)
            send(channel, m.QueueDeleteOk())
        elif isinstance(method, m.QueueBind):
            world.bindings.add((method.queue, method.exchange, method.routing_key))
            send(channel, m.QueueBindOk())
        elif isinstance(method, m.QueueUnbind):
            if method.queue not in world.queues or method.exchange not in world.exchanges:
                self._missing(channel, f"no queue '{method.queue}'", 50, 50)
                return
            world.bindings.discard((method.queue, method.exchange, method.routing_key))
            send(channel, m.QueueUnbindOk())
        elif type(method) in PLAIN:
            send(channel, PLAIN[type(method)])
        elif isinstance(method, m.BasicConsume):
            if method.queue not in world.queues:
                self._missing(channel, f"no queue '{method.queue}'", 60, 20)
                return
            self.consumers[channel] = method.queue, Deliverer(self.machine, channel, f"tag{channel}")
            send(channel, m.BasicConsumeOk(f"tag{channel}"))
        elif isinstance(method, m.BasicCancel):
            self.consumers.pop(channel, None)
            send(channel, m.BasicCancelOk(method.consumer_tag))
        elif isinstance(method, m.BasicNack):
            world.nacks.append((channel, method.delivery_tag, method.requeue))

    def _missing(self, channel: int, what: str, class_id: int, method_id: int) -> None:
        self.machine.close_channel(channel, 404, f"NOT_FOUND - {what} in vhost '/'", class_id, method_id)

    @property
    def publishing(self) -> int:
        """The channel that messages arrived on."""
        return max(self.numbers, key=lambda channel: self.numbers[channel])

    @property
    def consumed(self) -> list[str]:
        return sorted(queue for queue, _ in self.consumers.values())

    def deliver(
        self, queue: str, address: Address, bodies: Iterable[bytes], properties: bytes = PERSISTENT
    ) -> None:
        channel, deliverer = next(
            (channel, deliverer) for channel, (name, deliverer) in self.consumers.items() if name == queue
        )
        for body in bodies:
            tag = self.tags[channel] = self.tags[channel] + 1
            deliverer.deliver_many(tag, [(False, address.wire, properties, body)])


class World:
    """What survives the broker's connections."""

    def __init__(self) -> None:
        self.heartbeat = 60
        self.confirms = True
        self.exchanges: dict[str, str] = {}
        self.queues: set[str] = set()
        self.bindings: set[tuple[str, str, str]] = set()
        self.unroutable: set[str] = set()
        self.poison: set[bytes] = set()  # bodies that cost the channel, for this reason:
        self.refusal = (406, "PRECONDITION_FAILED - user_id property set to 'x'")
        self.published: list[tuple[str, str, bool, bytes, bytes]] = []
        self.heard: list[m.Method] = []
        self.acks: list[tuple[int, int, bool]] = []
        self.nacks: list[tuple[int, int, bool]] = []
        self.client_properties: Any = ()
        self.response = b""

    @property
    def bodies(self) -> list[bytes]:
        return [row[4] for row in self.published]


class Settled(queue_rig.Settled):
    """A source that publishes to exchanges."""

    def publish(self, sink: Sink, exchange: str, bodies: Iterable[bytes], key: str = "k") -> None:
        address = amqp_address(exchange, key)
        sink.publish(self.part([Message(address, body, durable=True) for body in bodies], sink))


class LinkRig(QueueRig[AmqpLinkSession, AmqpLinkConnection, Remote]):
    """A conversation with its remote broker."""

    def __init__(
        self, dispatcher: Dispatcher | None = None, limits: Limits | None = None, **settings: Any
    ) -> None:
        self.world = World()
        conversation = AmqpLinkSession(
            "erp",
            make_link(url="amqp://erp:secret@remote/prod", **settings),
            dispatcher or Dispatcher(Router([], {}), DeadLetters()),
            limits or Limits(),
            NotedStatus(LinkStats("erp", "amqp091")),
            client_id="gw-1",
        )
        super().__init__(conversation, lambda: Remote(self.world))

    def route(self, subscriptions: Subscriptions = NOTHING, targets: Targets = NOWHERE) -> None:
        self.session.route(subscriptions, targets)


class Shelf:
    """A namespace whose messages all end on one shelf, and are settled when the test says so."""

    def __init__(self) -> None:
        self.parts: list[SubBatch] = []
        self.outcome: Outcome | None = ACCEPTED
        self.accepted: list[bytes] = []  # bodies, in order

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)
        if self.outcome is not None:
            part.settle(self.outcome)
        if self.outcome is ACCEPTED:
            self.accepted += [message.body for message in part.messages]

    @property
    def messages(self) -> list[Message]:
        return [message for part in self.parts for message in part.messages]

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        return (self,)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        return (self,)

    @property
    def retained(self) -> None:
        return


def routed(folder: Path, text: str, **more: str) -> Router:
    """A router for the endpoints `mqtt` and `erp`, and `more` by their protocols, with the mapping `text`."""
    path = folder / "mapping.yaml"
    path.write_text(text)
    return Router(load([path]), {"mqtt": "mqtt", "erp": "amqp091"} | more)

"""An AMQP/Fast server in memory at the other end of a link: no sockets, no waiting, and it does as told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.egress.amqpfast.session import FastLinkConnection, FastLinkSession
from gateway.mapping import load
from gateway.mapping.router import Router, Subscriptions, Targets
from gateway.model.message import Message
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import Head, decode_credentials, encode_head_properties
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.amqpfast.sender import Notifier
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.settings import Limits
from gateway.telemetry.stats import LinkStats
from tests.configured import make_link
from tests.egress.queue_rig import NotedStatus, QueueRig, Settled

PERSISTENT: Final = encode_head_properties(Head(persistent=True))
TRANSIENT: Final = encode_head_properties(Head())


class Sent(NamedTuple):
    """A message that the server has taken."""

    name: str
    head: bytes
    body: bytes


class Consumer(NamedTuple):
    """A CONSUME."""

    channel: int
    handle: int
    name: str
    prefetch: int
    no_local: bool
    identifier: str
    notifier: Notifier


class World:
    """What survives the server's connections, and how it is to behave."""

    def __init__(self) -> None:
        self.replies = True
        self.missing: set[str] = set()  # names that cost the handle, 404
        self.busy: set[str] = set()  # names that cost the handle,
        self.busy_code = 507  # with this code
        self.poison: set[bytes] = set()  # bodies that cost the handle, 542,
        self.harsh = False  # or the channel, as with the server of 2005
        self.restartable = True
        self.held: dict[bytes, bytes] = {}  # of a restartable transfer, by its head
        self.ignores_prepare = False
        self.prepared: list[tuple[bytes, bytes]] = []  # head and hash
        self.break_at = 0  # bytes of a large message at which this server stops listening
        self.limits: dict[str, int] = {}
        self.sent: list[Sent] = []
        self.acks: list[tuple[int, int]] = []
        self.ungets: list[int] = []
        self.cancelled: list[str] = []
        self.waiting = False  # something does, for whoever asks
        self.said: list[m.Command] = []
        self.client_name = ""
        self.virtual_path = ""
        self.credentials: tuple[str, str] | None = None

    @property
    def bodies(self) -> list[bytes]:
        return [one.body for one in self.sent]


class Remote:
    """The server's side of one connection."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = ServerConnection(**world.limits)
        self.channels: dict[int, int] = {}  # by handle
        self.names: dict[int, str] = {}  # by handle
        self.numbers: dict[int, int] = {}  # of messages, by channel
        self.consumers: list[Consumer] = []
        self.parts: dict[int, list[bytes]] = {}
        self.heads: dict[int, bytes] = {}
        self.owed: list[tuple[int, int]] = []

    def receive(self, data: bytes) -> None:
        events = self.machine.receive_data(data, 0.0)
        while events:
            for event in events:
                self._event(event)
            events = self.machine.receive_data(b"", 0.0)

    def _event(self, event: e.Event) -> None:
        world = self.world
        if isinstance(event, e.Authenticate):
            world.credentials = decode_credentials(event.mechanism, event.responses)
            self.machine.tune()
        elif isinstance(event, e.Open):
            world.client_name, world.virtual_path = event.client_name, event.virtual_path
            self.machine.opened()
        elif isinstance(event, e.Sends):
            for handle, tag, head, body, name in event.rows:
                self._send(handle, tag, head, body, name.decode())
        elif isinstance(event, e.Acks):
            world.acks += [(channel, number) for channel, _, number in event.rows]
        elif isinstance(event, e.CommandReceived):
            world.said.append(event.command)
            self._command(event.command)
        elif isinstance(event, e.Prepared):
            self._prepared(event)
        elif isinstance(event, e.Fragment):
            self._fragment(event)

    def _send(self, handle: int, tag: int, head: bytes, body: bytes, name: str) -> None:
        world = self.world
        if handle not in self.machine.handles:
            return
        full = self.names[handle] + name
        fault = (
            (404, f"there is no {full!r}")
            if full in world.missing
            else (world.busy_code, "not now")
            if full in world.busy
            else (542, "not that")
            if body in world.poison
            else None
        )
        if fault is not None:
            if world.harsh:
                self.machine.close_channel(self.channels[handle], *fault)
            else:
                self.machine.close_handle(handle, *fault)
            return
        world.sent.append(Sent(full, head, body))
        if world.replies:
            self.machine.reply(handle, tag)
        else:
            self.owed.append((handle, tag))

    def confirm(self, count: int) -> None:
        """Reply to the next messages that were not replied to."""
        now, self.owed = self.owed[:count], self.owed[count:]
        self.machine.reply_many(now)

    def _prepared(self, event: e.Prepared) -> None:
        world = self.world
        if not world.restartable:
            self.machine.close_handle(event.handle, 540, "not here")
            return
        world.prepared.append((event.head, event.content_hash))
        if world.ignores_prepare:
            return
        self.heads[event.handle] = event.head
        world.held.setdefault(event.head, b"")
        self.machine.ready(event.handle, len(world.held[event.head]))

    def _fragment(self, event: e.Fragment) -> None:
        world = self.world
        if event.head:
            self.heads[event.handle] = event.head
        head = self.heads[event.handle]
        held = world.held.setdefault(head, b"")
        if event.first and event.head:
            held = b""
        if world.break_at and len(held) >= world.break_at:
            return
        assert event.offset == len(held)
        world.held[head] = held + event.data
        if event.last:
            self._send(event.handle, event.tag, head, world.held.pop(head), event.dest_name.decode())

    def _command(self, command: m.Command) -> None:
        machine = self.machine
        if isinstance(command, m.ChannelOpen):
            self.numbers[command.channel_id] = 0
            machine.reply_channel(command.channel_id, command.tag)
        elif isinstance(command, m.HandleOpen):
            self.names[command.handle_id] = command.dest_name
            self.channels[command.handle_id] = command.channel_id
            machine.reply(command.handle_id, command.tag)
        elif isinstance(command, m.HandleConsume):
            self._consume(command)
        elif isinstance(command, m.HandleUnget):
            self.world.ungets.append(command.message_number)
        elif isinstance(command, m.HandleQuery):
            listed = b"1-2" if self.world.waiting else b""
            machine.send(m.HandleIndex(command.handle_id, 0, listed))
        elif isinstance(command, m.HandleCancel):
            self.world.cancelled.append(command.identifier)

    def _consume(self, command: m.HandleConsume) -> None:
        handle = command.handle_id
        name = self.names[handle] + command.dest_name
        if name in self.world.missing:
            self.machine.close_handle(handle, 404, f"there is no {name!r}")
            return
        self.machine.reply(handle, command.tag)
        notifier = Notifier(self.machine, handle)
        self.consumers.append(
            Consumer(
                self.channels[handle],
                handle,
                name,
                command.prefetch,
                command.no_local,
                command.identifier,
                notifier,
            )
        )

    def consumer(self, name: str) -> Consumer:
        (found,) = [one for one in self.consumers if one.name == name]
        return found

    def notify(
        self, source: str, name: str, bodies: Iterable[bytes], head: bytes = PERSISTENT, skip: int = 0
    ) -> None:
        """Deliver to the consumer of `source`; `skip` numbers are never used."""
        found = self.consumer(source)
        for body in bodies:
            number = self.numbers[found.channel] = self.numbers[found.channel] + 1 + skip
            assert found.notifier.notify(number, False, name.encode(), head, body)


class LinkRig(QueueRig[FastLinkSession, FastLinkConnection, Remote]):
    """A conversation with its remote server."""

    def __init__(
        self, dispatcher: Dispatcher | None = None, limits: Limits | None = None, **settings: Any
    ) -> None:
        self.world = World()
        conversation = FastLinkSession(
            "fast",
            make_link(url="amqpfast://fast:secret@remote/prod", **settings),
            dispatcher or Dispatcher(Router([], {}), DeadLetters()),
            limits or Limits(),
            NotedStatus(LinkStats("fast", "amqpfast", m.FRAME_NAMES)),
            client_id="gw-1",
        )
        super().__init__(conversation, lambda: Remote(self.world))

    def route(self, *destinations: tuple[str, str]) -> None:
        self.session.route(Subscriptions(prefixes=destinations), Targets())

    def publish(self, source: Settled, bodies: Iterable[bytes], *names: str, service: str = "queue") -> None:
        """One part, its messages for each of `names` in turn; receipts are the bodies."""
        addresses = [fast_address(service, name) for name in names or ("q",)]
        outgoing = self.session.publisher
        messages = [
            Message(addresses[at % len(addresses)], body, durable=True) for at, body in enumerate(bodies)
        ]
        outgoing.publish(source.part(messages, outgoing))
        self.move()


def routed(folder: Path, text: str) -> Router:
    """A router for the endpoints `mqtt` and `fast` with the mapping `text`."""
    path = folder / "mapping.yaml"
    path.write_text(text)
    return Router(load([path]), {"mqtt": "mqtt", "fast": "amqpfast"})

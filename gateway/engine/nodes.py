"""Connections to the cluster on behalf of AMQP clients: one for each, to whichever node lives.

Each client begins with another node, and those that have failed not long ago come last. What the cluster is
told of a client is what that has said of itself, for the server goes by its capabilities; its user is the
gateway's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.egress.amqp091.session import GUEST
from gateway.egress.link import open_socket, tls_to
from gateway.engine.names import Names, names_of
from gateway.errors import ConfigurationError, LinkError
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import PLAIN, encode_response
from gateway.protocols.amqp091.events import Challenged, Closed, Event, Opened
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.table import encode_table
from gateway.settings.endpoints import Target, address_of
from gateway.settings.engine import RabbitEngine
from gateway.telemetry.stats import LinkStats, Reasons
from gateway.transport.stream import Ending, Stream

log = structlog.get_logger(limited=True)

AVOID_SECS: Final = 5.0  # for which a node that has failed comes last
NODE_SECS_MIN: Final = 1.0  # that each has to answer
SAID_OCTETS_MAX: Final = 3_000  # of what a client says of itself: a server's first frame has 4 096
CAPABILITIES: Final = "capabilities"
CONNECTION_NAME: Final = "connection_name"


class NotThere(LinkError):
    """No node lets a client in, for the client asks for what is not there. `code` is the server's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Caller(Protocol):
    """The connection of a client, as the connection to its node knows it."""

    stream: Stream

    def joined(self, node: NodeConnection) -> str:
        """The node takes the client; returns why the client cannot have it, "": it can."""

    def from_node(self, data: bytes, now: float) -> None:
        """Octets for the client."""

    def node_drained(self) -> None:
        """The node takes octets again."""

    def node_lost(self, reason: str) -> None:
        """It is gone."""


class Wish(Protocol):
    """What a client has agreed on."""

    frame_max: int
    channel_max: int


class NodeConnection:
    """The owner of the stream to a node. Until it is `open` the handshake is its own."""

    def __init__(
        self, caller: Caller, stream: Stream, machine: ClientConnection, leaving: set[NodeConnection]
    ) -> None:
        """`leaving` are those without a client, that have said goodbye."""
        self.stream = stream
        self.machine = machine
        self.open = False
        self.taken = False  # a client has had it
        self.settled = trio.Event()  # it is open, or never will be
        self.why = ""
        self.code = 0  # of the server's, if it has refused
        self._caller = caller
        self._leaving = leaving
        self._held = False

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived."""
        if self.open:
            self.machine.excuse(now)
            self._caller.from_node(data, now)
            return
        if self in self._leaving:
            self.machine.receive_data(data, now)
            if self.machine.closed:
                self.stream.end("closed")
            return
        for event in self.machine.receive_data(data, now):
            self._take(event)
        if self.taken and (rest := self.machine.unread_octets()):
            self._caller.from_node(rest, now)
        if self.machine.closed:
            self.stream.end(self.why or "closed")
        self.stream.mark()

    def _take(self, event: Event) -> None:
        if isinstance(event, Opened):
            self.open = self.taken = True
            self.why = self._caller.joined(self)
            if self.why:
                self.open = self.taken = False
                self.machine.close(ReplyCode.SUCCESS, "")
            else:
                self.settled.set()
        elif isinstance(event, Closed):
            self.code = event.reply_code
            self.why = self.why or f"{event.reply_code} {event.text}"
        elif isinstance(event, Challenged):
            self.why = "the cluster wants more than a name and password"
            self.machine.close(ReplyCode.NOT_ALLOWED, self.why)

    def data_to_send(self) -> bytes:
        """Whatever is to be said."""
        return self.machine.data_to_send()

    def drained(self) -> None:
        """The node reads again."""
        self._caller.node_drained()

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self.machine.abandon()
        self._leaving.discard(self)
        self.why = self.why or reason
        self.settled.set()
        if self.open:
            self.open = False
            self._caller.node_lost(reason)

    # What the client's connection asks.

    def write(self, pieces: list[bytes]) -> None:
        """Frames for the node."""
        if pieces:
            self.machine.out += pieces
            self.stream.queued += sum(map(len, pieces))
            self.stream.mark()

    def tick(self, now: float) -> None:
        """Heartbeats."""
        self.machine.tick(now)
        if not self.stream.listening:
            self.machine.excuse(now)
        elif self.machine.timed_out(now):
            self.stream.abort("it does not answer")
            return
        self.stream.mark()

    def leave(self, why: str, *, goodbye: bool, begun: bytes = b"") -> None:
        """The client has gone: what it said before is said to the end. `goodbye`: it has not said its own,
        and the answer is waited for, since a server drops what it has not dealt with when the socket closes.
        `begun`: octets of the node that are a part of a frame."""
        self.open = False
        if self.stream.closed:
            return
        if not goodbye:
            self.stream.end(why)
            return
        self._leaving.add(self)
        self.machine.tick(clock.now())
        self.machine.close(ReplyCode.SUCCESS, why)
        if self._held:
            self._held = False
            self.stream.release()
        self.receive(begun, clock.now())
        self.stream.mark()

    def hold(self) -> None:
        """Its client does not keep up."""
        if not self._held:
            self._held = True
            self.stream.hold()

    def release(self) -> None:
        """It does again."""
        if self._held:
            self._held = False
            self.stream.release()


class Nodes:
    """Of one cluster. `joined` are connections of clients that have a node."""

    def __init__(self, settings: RabbitEngine, replica: str, stats: LinkStats) -> None:
        """`stats` counts octets."""
        self.names: Names = names_of(settings.namespace, settings.topic_exchange)
        self.namespace = settings.namespace
        self.timeout_secs = settings.connect_timeout_secs
        self.joined: set[NodeConnection] = set()
        self.leaving: set[NodeConnection] = set()  # whose clients have gone
        self.failures = Reasons()  # connections that ended for the cluster, by reason
        self.frame_max = self.channel_max = 0xFFFF_FFFF  # of the cluster, as far as that is known
        self._settings = settings
        self._replica = replica
        self._stats = stats
        self._next = 0
        self._failed: dict[int, float] = {}  # by its place: until when it comes last

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Its share of the broker's gauges."""
        return {"gateway_engine_relays": lambda: len(self.joined)}

    def tick(self, now: float) -> None:
        """Nodes that do not answer a goodbye have had their time."""
        for node in list(self.leaving):
            node.tick(now)

    def offered(self, frame_max: int, channel_max: int) -> tuple[int, int]:
        """What a client may be offered that is to have so much at most."""
        return min(frame_max, self.frame_max), min(channel_max, self.channel_max)

    def suits(self, machine: ClientConnection, wish: Wish) -> bool:
        """Whether a node grants what a client has been offered; if not, the next clients are offered less."""
        if machine.frame_max < wish.frame_max:
            self.frame_max = machine.frame_max
        elif machine.channel_max < wish.channel_max:
            self.channel_max = machine.channel_max
        else:
            return True
        return False

    def _turns(self) -> Iterator[int]:
        """The nodes, in the order in which the next client tries them."""
        count, now = len(self._settings.all_urls), clock.now()
        self._next = (self._next + 1) % count
        order = [(self._next + at) % count for at in range(count)]
        yield from sorted(order, key=lambda at: self._failed.get(at, 0.0) > now)

    async def reach(self, caller: Caller, wish: Wish, *, host: str, said: Headers, name: str) -> None:
        """Connect a client to a node that lives; it has `joined` then. `host` is its virtual host, "" that of
        the urls; `said` is what the client says of itself, `name` what it is called.

        Raises LinkError, which says of each why not, and NotThere.
        """
        count = len(self._settings.all_urls)
        secs = max(NODE_SECS_MIN, self.timeout_secs / count)
        faults = []
        for at in self._turns():
            try:
                target = self._settings.target(at)
                await self._reach(caller, wish, target, host, self._said(said, name), secs)
            except NotThere:
                raise
            except (LinkError, ConfigurationError) as error:
                self._failed[at] = clock.now() + AVOID_SECS
                faults.append(str(error))
            else:
                self._failed.pop(at, None)
                return
        raise LinkError("; ".join(faults))

    async def _reach(
        self, caller: Caller, wish: Wish, target: Target, host: str, said: Headers, secs: float
    ) -> None:
        began = clock.now()
        layer = tls_to(target, self._settings.tls, "broker")
        sock = await open_socket(target, secs)
        machine = ClientConnection(
            mechanism=PLAIN,
            response=encode_response(PLAIN, target.username or GUEST, target.password or GUEST),
            virtual_host=host or target.virtual_host,
            client_properties=said,
            frame_max=wish.frame_max,
            channel_max=wish.channel_max,
            heartbeat=self._settings.heartbeat_secs,
        )
        stream = caller.stream.beside(sock, address_of(target), layer, layer_ended=self._layer_ended)
        stream.count_with(self._stats)
        node = NodeConnection(caller, stream, machine, self.leaving)
        stream.owner = node
        try:
            stream.begin()
            with trio.fail_after(max(0.0, secs - (clock.now() - began))):
                await node.settled.wait()
        except trio.TooSlowError:
            raise LinkError(f"{stream.remote}: no answer within {secs:g} s") from None
        finally:
            if not node.taken:
                stream.abort("it is not needed")
        if node.code == ReplyCode.NOT_ALLOWED:
            raise NotThere(node.code, node.why.partition(" ")[2])
        if not node.taken:
            raise LinkError(f"{stream.remote}: {node.why}")

    def _layer_ended(self, stream: Stream, ending: Ending) -> None:
        """TLS came to its end: count what was wrong."""
        if word := ending.broke or ending.refused:
            self._stats.protocol_errors.add(word)

    def _said(self, said: Headers, name: str) -> Headers:
        """What a node is told of a client."""
        called = (CONNECTION_NAME, string(f"{name} by {self._replica}"))
        others = tuple([pair for pair in said if pair[0] != CONNECTION_NAME])
        if len(encode_table(others)) > SAID_OCTETS_MAX:
            others = tuple([pair for pair in others if pair[0] == CAPABILITIES and _small(pair[1])])
        return (*others, called)


def _small(value: Value) -> bool:
    return value.type is ValueType.TABLE and len(encode_table(value.value)) <= SAID_OCTETS_MAX

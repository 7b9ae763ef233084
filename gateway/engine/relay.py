"""AMQP 0-9-1 on the shared engine: a client's conversation is passed on to a node of the cluster.

The gateway knows who the client is and what it may do, and keeps it within its limits; queues, exchanges
and everything else are the cluster's. Each client has a connection of its own to a node, so that what belongs
to a connection there (exclusive queues, the order of confirms, transactions) is as without the gateway.
Either side is read only as fast as the other one takes it, and has heartbeats of its own.

When its node is lost the client is told at once, 320, and connects again. What it had not been confirmed it
publishes again, as with any server that goes away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import structlog
import trio

from gateway.access.questions import Undecided
from gateway.access.rights import Rights
from gateway.broker.amqp091.refusals import Refused
from gateway.engine.judging import Allowed, ClientJudge
from gateway.engine.nodes import NodeConnection, Nodes, NotThere
from gateway.errors import LinkError, RemoteProtocolError
from gateway.ingress.amqp091.admission import AmqpEntrance, AmqpNewcomer
from gateway.ingress.guest import Farewell, InFlight
from gateway.ingress.guests import Guests
from gateway.ingress.services import Services
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.properties import Headers
from gateway.model.spooled import Piece
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.events import Authenticate, Closed, Event, Open
from gateway.protocols.amqp091.relaying import Relayed, ToClient, ToServer
from gateway.protocols.amqp091.server import ServerConnection
from gateway.protocols.amqp091.spec import CLOSE_WAIT_SECS, FRAME_MIN, ReplyCode
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

RIGHTS_MAX: Final = 1_000  # of which it is remembered what was allowed; in sum the limit is that of one


class Elsewhere:
    """What clients publish does not end in this gateway, and no route leads there."""

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """None."""
        return ()

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """None."""
        return ()

    @property
    def retained(self) -> None:
        """Nothing."""


class RelaySource(AmqpEntrance):
    """A listener whose clients talk to the cluster."""

    def __init__(self, name: str, services: Services, guests: Guests, nodes: Nodes) -> None:
        super().__init__(name, services, guests)
        self.nodes = nodes
        self._elsewhere = Elsewhere()
        self._allowed: dict[object, Allowed] = {}  # by virtual host and rights
        self._generation = -1

    @property
    def namespace(self) -> Elsewhere:
        """Nothing of the gateway's."""
        return self._elsewhere

    def connect(self, stream: Stream, now: float) -> RelayedConnection:
        """A client has connected."""
        return RelayedConnection(self, stream, now)

    def settle(self, receipts: list[Any], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Nothing of its clients' is in a batch."""

    def forget_entries(self) -> None:
        self._allowed.clear()

    def tick(self, now: float) -> None:
        """What somebody else has decided is asked again, when its time is over; what is remembered of all
        rights together has a limit."""
        super().tick(now)
        self.nodes.tick(now)
        kept = sum(map(len, self._allowed.values()))
        if self.authorization.authorizer is not None or kept > self.limits.cache_entries_max:
            self._allowed.clear()

    def allowed(self, host: str, rights: Rights) -> Allowed:
        """What may be published by all who have the same rights; emptied when the rules have changed."""
        if self._generation != self.authorization.generation or len(self._allowed) > RIGHTS_MAX:
            self._generation = self.authorization.generation
            self._allowed.clear()
        return self._allowed.setdefault((host, rights.key), {})


class RelayedConnection(AmqpNewcomer):
    """The owner of one client's stream."""

    def __init__(self, source: RelaySource, stream: Stream, now: float) -> None:
        limits, nodes = source.limits, source.nodes
        frame_max, channel_max = nodes.offered(limits.frame_bytes_max, limits.channels_max)
        machine = ServerConnection(
            frame_max=max(frame_max, FRAME_MIN),
            channel_max=channel_max,
            heartbeat=limits.heartbeat_secs,
            server_properties=source.server_properties,
            mechanisms=source.mechanisms,
            properties_max=limits.properties_max,
            properties_bytes_max=limits.properties_bytes_max,
        )
        super().__init__(source, stream, machine, now)
        self._source = source
        self._said: Headers = ()
        self._reaching = trio.CancelScope()
        self._node: NodeConnection | None = None  # from when it has one until either goes
        self._to_server: ToServer | None = None
        self._to_client: ToClient | None = None
        self._judge = ClientJudge(self, source, nodes.names, nodes.namespace, self._count_consumers)
        self._publishes = False
        self._held = False  # for the node does not keep up
        self._waiting = False  # for the node closes a channel
        self._close_by: float | None = None  # when a close has to be answered

    @property
    def channels(self) -> dict[int, Relayed]:
        """Those that are open."""
        return {} if self._to_server is None else self._to_server.channels

    def _count_consumers(self) -> int:
        return sum([len(one.consumers) + len(one.unnamed) for one in self.channels.values()])

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived."""
        if self._ready:
            self.machine.excuse(now)
            self._pass_on(data, now)
            return
        machine = self.machine
        self._process(self.stream.postponed() or machine.receive_data(data, now))
        while not (self._ready or machine.unread or self.stream.unread):
            events = machine.receive_data(b"", now)
            if not events:
                break
            self._process(events)
        if machine.unread and not self._ready:
            self.stream.again()

    def data_to_send(self) -> bytes | list[Piece]:
        """Whatever was encoded."""
        return self.machine.data_to_send()

    def drained(self) -> None:
        """The client reads again: so is its node."""
        if self._node is not None:
            self._node.release()

    def lost(self, reason: str) -> None:
        """The connection is gone: so is that to its node, when that has heard all."""
        self._source.dispatcher.memory.forget(self)
        self.machine.abandon()
        self._leave()
        self._source.forget(self, reason)

    def _leave(self) -> None:
        self._reaching.cancel()
        node, self._node = self._node, None
        if node is not None:
            self._source.nodes.joined.discard(node)
            said = self._to_server is not None and (self._to_server.closing or self._to_server.closed)
            begun = b"" if self._to_client is None else self._to_client.unread_octets()
            node.leave("the client is gone", goodbye=not said, begun=begun)

    # What the listener asks.

    @property
    def channel_count(self) -> int:
        """Channels that are open at the node, or were asked for."""
        return len(self.channels)

    @property
    def idle(self) -> bool:
        """All that the client has said is written."""
        return self._node is None or not self._node.stream.backlogged

    def in_flight(self) -> InFlight:
        """The cluster knows what is."""
        return InFlight()

    def hold(self) -> Callable[[], None] | None:
        """Stop reading, for memory is short: one that consumes has to acknowledge, and goes on until memory
        is scarce. Returns what undoes it."""
        if self._count_consumers() and not self._source.dispatcher.memory.scarce:
            return None
        self.stream.hold()
        return self.stream.release

    def told_of_memory(self, short: bool) -> None:
        """Only the node says `connection.blocked`: of the two nobody could tell which one has ended."""

    def let_go_for_memory(self) -> None:
        """It has nothing that could be given back."""

    def tick(self, now: float) -> None:
        """Heartbeats of both sides, and the time for the handshake and for the end."""
        if not self._in_time(now):
            return
        if self._close_by is not None and now >= self._close_by:
            self.stream.abort("the close was not answered in time")
            return
        if self._node is not None:
            self._node.tick(now)
        self.stream.mark()

    def shut_down(self, farewell: Farewell) -> None:
        """320, whatever the reason: clients come back after it. Whom a node still serves stays when only the
        engine's own connection is away."""
        if farewell is Farewell.UNSERVED and self._node is not None:
            return
        self._end(ReplyCode.CONNECTION_FORCED, f"CONNECTION_FORCED - {farewell.value}", farewell.value)

    def _dismiss(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        self.machine.close(code, text, class_id, method_id)
        self.stream.end(text)

    def _end(self, code: int, text: str, why: str) -> None:
        """Close in the protocol's words."""
        self.machine.close(code, text)
        self.stream.end(why)

    # The handshake.

    def _process(self, events: list[Event]) -> None:
        for at, event in enumerate(events):
            try:
                self._take(event)
            except Undecided as question:
                self._source.decide(self.stream, question)
                self.stream.postpone(events[at:])
                break
        if self.machine.closed:
            if not self.machine.sent:
                self._report(0, "it does not begin with the header of AMQP 0-9-1")
            self.stream.end("closed")
        self.stream.mark()

    def _take(self, event: Event) -> None:
        if isinstance(event, Authenticate):
            self._said = event.client_properties
            self._authenticate(event)
        elif isinstance(event, Open):
            self._open(event)
        elif isinstance(event, Closed):
            if not event.by_peer:
                self._report(event.reply_code, event.text)
            self._leave()

    def _let_in(self) -> None:
        self._deadline = self._source.now() + self._source.nodes.timeout_secs + CLOSE_WAIT_SECS
        self._source.tasks.start_soon(self._reach)

    async def _reach(self) -> None:
        """Find a node. The virtual host that routes would join is that of the engine's urls."""
        source = self._source
        host = "" if self.host_name == source.host_names[0] else self.host_name
        sender = self.sender
        name = " ".join(word for word in (sender.client, f"{sender.user}@{sender.address}") if word)
        try:
            with self._reaching:
                await source.nodes.reach(self, self.machine, host=host, said=self._said, name=name)
        except NotThere as absent:
            self._away(absent.code, str(absent), str(absent))
        except LinkError as error:
            text = "CONNECTION_FORCED - the cluster behind this gateway is away"
            self._away(ReplyCode.CONNECTION_FORCED, text, str(error))
        except Exception as fault:
            self.stream.fail(fault)
        source.flush()

    def _away(self, code: int, text: str, why: str) -> None:
        if self.stream.closed or self.stream.ending:
            return
        self._source.nodes.failures.add("cluster_away" if code == ReplyCode.CONNECTION_FORCED else "refused")
        log.warning(
            "no node of the cluster takes a client",
            listener=self._source.name,
            remote=self.stream.remote,
            user=self.sender.user,
            why=why,
        )
        self._end(code, text, "the cluster is away")

    def joined(self, node: NodeConnection) -> str:
        """There is a node."""
        source, limits, machine = self._source, self._source.limits, self.machine
        if self.stream.closed or self.stream.ending:
            return "the client is gone"
        if not source.nodes.suits(node.machine, machine):
            return "it grants smaller frames, or fewer channels, than the client was offered"
        self._node = node
        source.nodes.joined.add(node)
        self._welcome()
        self._to_server = ToServer(
            self._judge,
            machine.received,
            frame_max=machine.frame_max,
            channel_max=machine.channel_max,
            message_bytes_max=limits.amqp_message_bytes_max,
            properties_max=limits.properties_max,
            properties_bytes_max=limits.properties_bytes_max,
        )
        self._to_client = ToClient(self._to_server.channels, machine.sent, frame_max=node.machine.frame_max)
        if rest := machine.unread_octets():
            self._pass_on(rest, source.now())
        self.stream.mark()
        return ""

    # What is passed on.

    def _pass_on(self, data: bytes, now: float) -> None:
        """To the node, as far as the client may."""
        relay, node, source, judge = self._to_server, self._node, self._source, self._judge
        if relay is None or node is None:
            return
        judge.allowed = source.allowed(self.host_name, self.rights)
        messages = relay.messages
        fault: RemoteProtocolError | None = None
        try:
            relay.receive_data(data)
        except RemoteProtocolError as error:
            fault = error
        node.write(relay.taken())
        messages = relay.messages - messages
        source.stats.messages_in += messages
        self._publishes = self._publishes or bool(messages)
        if self._publishes and source.dispatcher.memory.short:
            source.dispatcher.memory.admits(self, 0)
        if (rate := self.stream.rate) is not None:
            rate.messages += messages
        self._say(relay.answers)
        relay.answers = []
        if fault is not None:
            self._report(fault.reason, str(fault))
            self._dismiss(fault.reason, str(fault), fault.class_id, fault.method_id)
            return
        secrets, relay.secrets = relay.secrets, []
        for method in secrets:
            self._update_secret(method)
        self._look_behind(relay, node, now)

    def _look_behind(self, relay: ToServer, node: NodeConnection, now: float) -> None:
        """What has stopped the client's octets, if anything."""
        if relay.closed:
            self.stream.end("closed")
            return
        if relay.closing and self._close_by is None:
            self._close_by = now + CLOSE_WAIT_SECS
        if relay.refusal is not None and not self._waiting:
            assert self._to_client is not None
            self._waiting = True
            self.stream.hold()
            node.write([self._to_client.refuse(relay.refusal)])
            fault = relay.refusal.fault
            self._report(fault.reason, str(fault))
        elif relay.undecided and self._judge.question is not None:
            question, self._judge.question = self._judge.question, None
            self._source.decide(self.stream, question, self._go_on)
        elif relay.unread:
            self.stream.again()
        if not self._held and node.stream.congested:
            self._held = True
            self.stream.hold()

    def _go_on(self) -> None:
        """What has waited is looked at again."""
        self._pass_on(b"", self._source.now())

    def node_drained(self) -> None:
        """The node takes octets again: so does the gateway."""
        if self._held:
            self._held = False
            self.stream.release()

    def from_node(self, data: bytes, now: float) -> None:
        """Octets for the client."""
        relay, node = self._to_client, self._node
        if relay is None or node is None:
            return
        messages = relay.messages
        try:
            pieces = relay.receive_data(data)
        except RemoteProtocolError as error:
            node.stream.abort(f"the cluster has broken a rule: {error}")
            return
        self._source.stats.messages_out += relay.messages - messages
        self._say(pieces)
        if relay.answers:
            node.write(relay.answers)
            relay.answers = []
        if relay.closed:
            self.stream.end("closed")
            return
        if relay.closing and self._close_by is None:
            self._close_by = now + CLOSE_WAIT_SECS
        if self._waiting and relay.refused is None:
            assert self._to_server is not None
            self._waiting = False
            self._to_server.refusal = None
            self.stream.release()
            self._go_on()
        if self.stream.congested:
            node.hold()

    def _say(self, pieces: list[bytes]) -> None:
        if pieces:
            self.machine.out += pieces
            self.stream.queued += sum(map(len, pieces))
            self.stream.mark()

    def node_lost(self, reason: str) -> None:
        """320, unless one of both has said goodbye."""
        node, self._node = self._node, None
        if node is None:
            return
        self._source.nodes.joined.discard(node)
        if self._close_by is not None:
            self.stream.end("closed")
            return
        log.warning(
            "the node of a client is lost",
            listener=self._source.name,
            remote=self.stream.remote,
            user=self.sender.user,
            node=node.stream.remote,
            why=reason,
        )
        self._source.nodes.failures.add("node_lost")
        text = "CONNECTION_FORCED - the node of the cluster that served this connection is gone"
        self._end(ReplyCode.CONNECTION_FORCED, text, "its node is lost")

    def _recheck(self) -> None:
        """Here the connection is closed, for a channel may be in the midst of a message."""
        for channel in self.channels.values():
            for queue in channel.consuming:
                try:
                    self._judge.check_consumed(queue)
                except Refused as error:
                    self._report(error.code, str(error))
                    self._end(error.code, str(error), "it may not read any more what it consumes")
                    return

"""A link: one supervised connection to a remote broker.

The task here connects, hands the socket to a poller, waits until the connection is lost, and tries again: at
the next URL, and when a round of all of them has failed, after a jittered, doubling wait. What is said over
the connection is the link session's business: one class per protocol, which outlives connections and keeps
what has not been confirmed.
"""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.containment import contained
from gateway.egress.connect_errors import reason
from gateway.errors import ConfigurationError, LinkError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.protocols import DIALECTS
from gateway.settings.endpoints import LinkTls, Remote, Target, address_of
from gateway.telemetry.stats import FrameCounts, LastError, LinkStats
from gateway.transport.poller import Poller
from gateway.transport.stacked import within
from gateway.transport.stream import Ending, Filter, Stream, StreamOwner, WriteSet
from gateway.transport.tls import TlsFilter
from gateway.transport.websocket import WebSocketClient

TICK_SECS: Final = 1.0
# A connection that held this long was a success: the next failure starts with the shortest wait again.
STABLE_SECS: Final = 10.0
PAUSED: Final = "an operator has paused it"

log = structlog.get_logger()


class LinkConnection(StreamOwner, Protocol):
    """One connection of a link session."""

    @property
    def machine(self) -> FrameCounts:
        """The protocol machine, which counts frames."""

    def tick(self, now: float) -> None:
        """Keep-alive, and the time for the handshake."""

    def shut_down(self) -> None:
        """Say goodbye in the protocol's words and end the stream."""


class LinkStatus:
    """Whether a link is up: its session says so, and whoever supervises the connection goes by it.

    `when_up` is called each time that it has come up.
    """

    def __init__(self, name: str, stats: LinkStats, when_up: Callable[[], None] | None = None) -> None:
        self.name = name
        self.stats = stats
        self.why = ""
        self._when_up = when_up
        self._lost = trio.Event()

    @property
    def up(self) -> bool:
        """The link session has said that its connection is usable."""
        return self.stats.up

    def connected(self) -> None:
        """There is another connection, which has not been lost yet."""
        self._lost = trio.Event()

    def came_up(self) -> None:
        """The handshake is over; called by the link session."""
        self.stats.up = True
        self.stats.connects += 1
        log.info("link is up", link=self.name, address=self.stats.address)
        if self._when_up is not None:
            self._when_up()

    def went_down(self, why: str) -> None:
        """The connection is gone; called by the link session's connection when it is lost."""
        self.stats.up = False
        self.why = why
        self._lost.set()

    async def lost(self) -> None:
        """Wait until the connection is gone."""
        await self._lost.wait()


class LinkSession(Protocol):
    """What a link says and hears; it outlives its connections. It is a namespace of the dispatcher.

    Made with a LinkStatus, which it tells when its connection is usable, and when it is gone.
    """

    @property
    def idle(self) -> bool:
        """Nothing waits for the broker, and nothing that it sent waits for us."""

    def idle_but(self, held: int) -> bool:
        """The same, but for so many of the messages that it sent."""

    def forget_entries(self) -> None:
        """Memory is short: what has been worked out of addresses goes, and is worked out again."""

    @property
    def unconfirmed(self) -> int:
        """Messages for the broker that it has not confirmed, sent or not."""

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """Where messages for an address of the remote broker go: itself."""

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The address decides; never asked."""

    @property
    def retained(self) -> None:
        """The remote broker retains what is published with the flag."""

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: what to subscribe to and what must exist; put in force if connected."""

    def connect(self, stream: Stream, target: Target, now: float) -> LinkConnection:
        """A connection stands: begin the handshake."""

    def turn_done(self) -> None:
        """Send on the batch that this wake-up has gathered."""

    def tick(self, now: float) -> None:
        """Once a second, connected or not."""


class Turns:
    """Which of a link's URLs is tried next, and after which wait.

    The next one is always another, if there is one: whatever failed at this one, be it that nobody answers,
    that it refuses us or that it went away, is likelier to be so still. The URLs of a round follow each other
    at once. A connection that held ends its round, so that all the gateways of a broker that goes down do not
    fall upon the next one in the same moment.
    """

    def __init__(
        self, count: int, wait_min: float, wait_max: float, jitter: Callable[[], float] = random.random
    ) -> None:
        self.at = 0
        self._count = count
        self._waits = (wait_min, wait_max)
        self._jitter = jitter
        self._wait = wait_min
        self._left = count  # URLs of this round that have not failed

    def failed(self, held: bool) -> float:
        """The connection at `at` failed, or was lost after it had `held`; returns the seconds to wait."""
        self.at = (self.at + 1) % self._count
        self._left -= 1
        if held:
            self._wait = self._waits[0]
        elif self._left:
            return 0.0
        self._left = self._count
        pause = self._wait * (0.5 + self._jitter() / 2)
        self._wait = min(self._wait * 2, self._waits[1])
        return pause


async def open_socket(target: Target, timeout_secs: float) -> socket.socket:
    """A connected socket. Raises LinkError, which says why there is none after `timeout_secs` at most."""
    try:
        with trio.fail_after(timeout_secs):
            opened = await trio.open_tcp_stream(target.host, target.port)
    except trio.TooSlowError:
        raise LinkError(f"{address_of(target)}: no answer within {timeout_secs:g} s") from None
    except OSError as error:
        raise LinkError(f"{address_of(target)}: {reason(error)}") from error
    sock = socket.socket(fileno=opened.socket.detach())
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def tls_to(target: Target, tls: LinkTls, name: str) -> Filter | None:
    """The TLS of a connection to it, None: without. Raises LinkError when the files of `name` are no use."""
    if not target.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if not tls.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:
        raise LinkError(f"the TLS files of {name} cannot be used: {error}") from error
    return TlsFilter(context, server_side=False, server_hostname=target.host)


class Link:
    """Supervises the connection of one link session."""

    def __init__(
        self,
        status: LinkStatus,
        settings: Remote,
        session: LinkSession,
        writes: WriteSet,
        *,
        endpoint: str = "",
        consumes: bool = True,
        publishes: bool = True,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`endpoint`: its name in the configuration, of which there is one link for each direction when the
        two are apart, and that of `status`, which `session` was made with, is another.
        """
        self.status = status
        self.name = status.name
        self.endpoint = endpoint or status.name
        self.settings = settings
        self.session = session
        self.consumes = consumes
        self._publishes = publishes
        self.stats = status.stats
        self._writes = writes
        self._turns = Turns(
            len(settings.all_urls), settings.reconnect_min_secs, settings.reconnect_max_secs, jitter
        )
        self._poller = Poller(writes, session.turn_done)
        self._connection: LinkConnection | None = None
        self._stream: Stream | None = None
        self._stopping = False
        self._held_down: dict[str, None] = {}  # why
        self._goes_on = trio.Event()  # nothing holds it down
        self._goes_on.set()

    @property
    def up(self) -> bool:
        """Its connection is usable."""
        return self.status.up

    @property
    def why(self) -> str:
        """Why it is not up, as far as that is known."""
        return next(iter(self._held_down), self.status.why)

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """The mapping changed: what its endpoint's routes need, of which this link sees to its part."""
        self.session.route(
            subscriptions if self.consumes else Subscriptions(), targets if self._publishes else Targets()
        )

    def flush(self) -> None:
        """Write what was encoded outside a wake-up."""
        self._writes.flush()

    @property
    def paused(self) -> bool:
        """An operator wants it down."""
        return PAUSED in self._held_down

    def pause(self) -> None:
        """Say goodbye, and stay down until `resume`: as a link whose broker is away."""
        self.hold_down(PAUSED)

    def resume(self) -> None:
        """Connect again."""
        self.let_up(PAUSED)

    def hold_down(self, why: str) -> None:
        """Stay down until `let_up` with the same reason, and for as long as there is another one."""
        if not self._held_down:
            self._goes_on = trio.Event()
            if self._connection is not None:
                self._connection.shut_down()
        self._held_down[why] = None

    def let_up(self, why: str) -> None:
        """That is no reason any more."""
        self._held_down.pop(why, None)
        if not self._held_down:
            self._goes_on.set()

    def shut_down(self) -> None:
        """The gateway is stopping: say goodbye."""
        self._stopping = True
        if self._connection is not None:
            self._connection.shut_down()

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._poller.run)
            nursery.start_soon(self._tick)
            while True:
                if self._held_down:
                    log.info("link is held down", link=self.name, why=self.why)
                    await self._goes_on.wait()
                began = trio.current_time()
                try:
                    await self._once()
                except LinkError as error:
                    self.status.why = str(error)
                except Exception as fault:
                    contained("link", fault, link=self.name)
                    self.status.why = "internal error"
                if self._held_down:
                    continue
                held = trio.current_time() - began > STABLE_SECS
                self.stats.failures.add("lost" if held else "failed")
                if self._stopping:
                    return
                self.stats.failed = LastError(self.why, clock.utc())
                pause = self._turns.failed(held)
                log.warning(
                    "link is down",
                    link=self.name,
                    address=self.stats.address,
                    why=self.why,
                    retry_in_secs=round(pause, 2),
                    next=self.settings.addresses[self._turns.at],
                )
                await trio.sleep(pause)

    async def _once(self) -> None:
        """One connection, from its socket to its end. Raises LinkError when there is none."""
        self.stats.address = self.settings.addresses[self._turns.at]
        try:
            target = self.settings.target(self._turns.at)
        except ConfigurationError as error:
            raise LinkError(str(error)) from error
        websocket = (
            WebSocketClient(address_of(target), target.websocket, DIALECTS[target.protocol].subprotocols[0])
            if target.websocket
            else None
        )
        layer = within(tls_to(target, self.settings.tls, self.name), websocket)
        sock = await open_socket(target, self.settings.connect_timeout_secs)
        if self._held_down:
            sock.close()
            raise LinkError(self.why)
        self.status.connected()
        stream = Stream(
            sock,
            address_of(target),
            self._poller,
            self._writes,
            layer,
            layer_ended=self._layer_ended,
            stalls=False,
        )
        stream.count_with(self.stats)
        try:
            self._connection = self.session.connect(stream, target, trio.current_time())
        except Exception:
            sock.close()
            raise
        self._stream = stream
        stream.owner = self._connection
        machine = self._connection.machine
        self.stats.opened(machine)
        try:
            self._poller.watch(stream)
            stream.mark()
            self._writes.flush()
            await self.status.lost()
        finally:
            self._connection = self._stream = None
            self.stats.up = False
            self.stats.closed(machine)
            if not stream.closed:
                stream.abort(self.why or "the link was stopped")

    def _layer_ended(self, stream: Stream, ending: Ending) -> None:
        """TLS or WebSocket came to its end: count what was wrong."""
        if word := ending.broke or ending.refused:
            self.stats.protocol_errors.add(word)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_SECS)
            try:
                self._ticked(trio.current_time())
            except Exception as error:
                contained("timer", error, link=self.name)
            self._writes.flush()

    def _ticked(self, now: float) -> None:
        connection, stream = self._connection, self._stream
        if connection is not None and stream is not None:
            try:
                connection.tick(now)
            except Exception as error:
                stream.fail(error)
        self.session.tick(now)
        self.session.turn_done()

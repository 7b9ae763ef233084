"""Link: supervised connection to a remote broker.

The task of a link connects, hands the socket to a poller, waits until the connection is lost, and reconnects
at the next URL. When a round of all URLs has failed, it waits first; the wait doubles each time and is
jittered. The link session handles the protocol: it is of one class per protocol, outlives connections and
stores unconfirmed messages.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol

import structlog
import trio

from gateway import chance, clock
from gateway.containment import contained
from gateway.egress.connect_errors import reason
from gateway.errors import ConfigurationError, LinkError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.protocols import DIALECTS
from gateway.settings.endpoints import LinkTls, LinkUrl, Remote, address_of
from gateway.telemetry.stats import FrameCounts, LastError, LinkStats
from gateway.transport.certificates import load_pair
from gateway.transport.filter import Ending, Filter
from gateway.transport.filter_stack import stack_filters
from gateway.transport.poller import Poller
from gateway.transport.stream import Stream, StreamOwner, WriteSet
from gateway.transport.tls import TlsFilter
from gateway.transport.websocket import WebSocketClient

TICK_SECS: Final = 1.0
# A connection that lasted this long was a success: the next wait is the shortest again.
STABLE_SECS: Final = 10.0
PAUSED: Final = "an operator has paused the link"
CLOSING_SECS: Final = 5.0  # Longest wait for the peer to close a connection that was ended in an orderly way.
CLOSING_POLL_SECS: Final = 0.02

log = structlog.get_logger()


class LinkConnection(StreamOwner, Protocol):
    """Interface of a protocol's connection that its link uses."""

    @property
    def machine(self) -> FrameCounts:
        """Protocol machine, which counts frames."""

    def tick(self, now: float) -> None:
        """Send heartbeats, and check the time limit of the handshake.

        `now` is in loop-clock seconds.
        """

    def shut_down(self) -> None:
        """Close the connection with the protocol's handshake and end the stream."""


class LinkStatus:
    """State of a link, which its session updates and its supervisor (Link) observes.

    `when_up` is called each time the link comes up.
    """

    def __init__(self, name: str, stats: LinkStats, when_up: Callable[[], None] | None = None) -> None:
        self.name = name
        self.stats = stats
        self.why = ""
        self._when_up = when_up
        self._lost = trio.Event()

    @property
    def is_up(self) -> bool:
        """True if the link session has reported its connection as usable."""
        return self.stats.up

    def connected(self) -> None:
        """Reset the status before the handshake of a new connection.

        From then on, `wait_until_lost` waits for the end of this connection.
        """
        self._lost = trio.Event()

    def mark_up(self) -> None:
        """Record the link as up after the handshake; called by the link session."""
        self.stats.up = True
        self.stats.connects += 1
        log.info("link connected", link=self.name, address=self.stats.address)
        if self._when_up is not None:
            self._when_up()

    def mark_down(self, why: str) -> None:
        """Record that the link is down for the reason `why`.

        The link session calls this when its connection is lost.
        """
        self.stats.up = False
        self.why = why
        self._lost.set()

    async def wait_until_lost(self) -> None:
        """Wait until the connection is lost."""
        await self._lost.wait()


class LinkSession(Protocol):
    """Part of a link that depends on its protocol.

    For the dispatcher, it is also a namespace: `sinks` returns the destination of each address of the remote
    broker. The session outlives connections. It is created with a LinkStatus, to which it reports
    connections that become usable or are lost.
    """

    @property
    def idle(self) -> bool:
        """True if no message waits for the broker, and every message received from it is settled."""

    def idle_but(self, held_count: int) -> bool:
        """Return True if the session is idle, except for at most `held_count` unsettled received messages."""

    def forget_entries(self) -> None:
        """Clear the cached routing entries, because memory is short; they are computed again when needed."""

    @property
    def unconfirmed(self) -> int:
        """Number of messages for the broker, sent or waiting, that it has not confirmed."""

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """Return the destination (sink) for an address of the remote broker: the session itself."""

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the destinations (sinks) of a message; never called, because the address determines them."""

    @property
    def retained(self) -> None:
        """Store of retained messages: None, because the remote broker stores retained messages."""

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Set the addresses to consume (`subscriptions`) and the targets that must exist at the broker.

        Called when the mapping has changed. A connected session applies the changes at once.
        """

    def connect(self, stream: Stream, target: LinkUrl, now: float) -> LinkConnection:
        """Begin the handshake on a new connection. Return the owner of its stream.

        `now` is in loop-clock seconds.
        """

    def end_turn(self) -> None:
        """Publish the batch collected in this pass of the event loop."""

    def tick(self, now: float) -> None:
        """Run the timer, once per second, connected or not.

        `now` is in loop-clock seconds.
        """


class UrlOrder:
    """Order in which a link tries its URLs, with the waits between connection attempts.

    After a failure the next URL is always a different one, if there are several: the cause of the failure (no
    reply, a refusal, a shutdown) is likely to persist. The URLs of a round are tried without a wait between
    them; when all have failed, the link waits. The loss of a stable connection ends the round, too, so that
    the gateways of a broker that goes down do not all connect to the next one at the same moment.
    """

    def __init__(
        self, count: int, wait_min: float, wait_max: float, jitter: Callable[[], float] = chance.random
    ) -> None:
        self.at = 0
        self._count = count
        self._waits = (wait_min, wait_max)
        self._jitter = jitter
        self._wait = wait_min
        self._remaining_count = count  # URLs of this round that have not failed

    def advance(self, was_stable: bool) -> float:
        """Select the next URL. Return the number of seconds to wait before connecting to it.

        `was_stable` is True if the connection lasted before it was lost.
        """
        self.at = (self.at + 1) % self._count
        self._remaining_count -= 1
        if was_stable:
            self._wait = self._waits[0]
        elif self._remaining_count:
            return 0.0
        self._remaining_count = self._count
        pause = self._wait * (0.5 + self._jitter() / 2)
        self._wait = min(self._wait * 2, self._waits[1])
        return pause


async def open_socket(target: LinkUrl, timeout_secs: float) -> socket.socket:
    """Return a connected socket. Raises LinkError after `timeout_secs` seconds or when it cannot connect."""
    try:
        with trio.fail_after(timeout_secs):
            opened = await trio.open_tcp_stream(target.host, target.port)
    except trio.TooSlowError:
        raise LinkError(f"{address_of(target)}: no response within {timeout_secs:g} s") from None
    except OSError as error:
        raise LinkError(f"{address_of(target)}: {reason(error)}") from error
    sock = socket.socket(fileno=opened.socket.detach())
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def tls_to(target: LinkUrl, tls: LinkTls, name: str) -> Filter | None:
    """Return the filter that encrypts a stream to `target` by TLS, or None if its URL has no TLS.

    `name` is that of the link, for the error text. Raises LinkError if the files in `tls` are unusable.
    """
    if not target.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if not tls.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if tls.cert_file is not None and tls.key_file is not None:
            load_pair(context, tls.cert_file, tls.key_file)
    except OSError as error:
        raise LinkError(f"the TLS files of {name} cannot be used: {error}") from error
    return TlsFilter(context, server_side=False, server_hostname=target.host)


async def _until_closed(stream: Stream) -> None:
    """Wait until the peer has closed a connection that was ended properly, for at most CLOSING_SECS seconds.

    If the socket were closed while the peer still sends, the connection would be reset, and the peer could
    lose the last acknowledgements and commands.
    """
    with trio.move_on_after(CLOSING_SECS):
        while stream.ending and not stream.closed:
            await trio.sleep(CLOSING_POLL_SECS)


class Link:
    """Supervisor of the connection of one link session."""

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
    ) -> None:
        """Create the link; `run` connects it.

        `endpoint` is the name in the configuration. If separate connections are used to consume and to
        publish, the endpoint has two links: `consumes` and `publishes` tell which one this is, and `status`,
        with which `session` was created, has a name of its own.
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
        self._turns = UrlOrder(
            len(settings.all_urls), settings.reconnect_min_secs, settings.reconnect_max_secs
        )
        self._poller = Poller(writes, session.end_turn)
        self._connection: LinkConnection | None = None
        self._stream: Stream | None = None
        self._stopping = False
        self._held_down: dict[str, None] = {}  # reasons
        self._goes_on = trio.Event()  # set while there is no reason to stay down
        self._goes_on.set()

    @property
    def is_up(self) -> bool:
        """True if the connection of the link is usable."""
        return self.status.is_up

    @property
    def connected(self) -> bool:
        """True if the link has a socket, also while it waits for the peer to close it."""
        return self._stream is not None

    @property
    def down_reason(self) -> str:
        """Reason why the link is down, or an empty text if it is not known."""
        return next(iter(self._held_down), self.status.why)

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """Apply a changed mapping: what this link has to consume, and to which targets it publishes.

        `subscriptions` and `targets` are those of all routes of the endpoint. The link ignores
        `subscriptions` if it only publishes, and `targets` if it only consumes.
        """
        self.session.route(
            subscriptions if self.consumes else Subscriptions(), targets if self._publishes else Targets()
        )

    def flush(self) -> None:
        """Write data to the socket that was encoded while no pass of the event loop was in progress."""
        self._writes.flush()

    @property
    def is_paused(self) -> bool:
        """True if an operator has paused the link."""
        return PAUSED in self._held_down

    def pause(self) -> None:
        """Disconnect and stay down until `resume`, as if the broker were unreachable."""
        self.hold_down(PAUSED)

    def resume(self) -> None:
        """Reconnect after `pause`."""
        self.remove_hold(PAUSED)

    def hold_down(self, why: str) -> None:
        """Disconnect and stay down for the reason `why`.

        The link reconnects when `remove_hold` was called for each reason.
        """
        if not self._held_down:
            self._goes_on = trio.Event()
            if self._connection is not None:
                self._connection.shut_down()
        self._held_down[why] = None

    def remove_hold(self, why: str) -> None:
        """Remove a reason why the link must stay disconnected. Reconnect if no reason is left."""
        self._held_down.pop(why, None)
        if not self._held_down:
            self._goes_on.set()

    def shut_down(self) -> None:
        """Disconnect and do not reconnect, because the gateway is stopping."""
        self._stopping = True
        if self._connection is not None:
            self._connection.shut_down()

    async def run(self) -> None:
        """Keep the link connected until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._poller.run)
            nursery.start_soon(self._tick)
            while True:
                if self._held_down:
                    log.info("link suspended", link=self.name, why=self.down_reason)
                    await self._goes_on.wait()
                began = clock.now()
                try:
                    await self._run_connection()
                except LinkError as error:
                    self.status.why = str(error)
                except Exception as fault:
                    contained("link", fault, link=self.name)
                    self.status.why = "internal error"
                if self._held_down:
                    continue
                was_stable = clock.now() - began > STABLE_SECS
                self.stats.failures.add("lost" if was_stable else "failed")
                if self._stopping:
                    return
                self.stats.failed = LastError(self.down_reason, clock.wall())
                pause = self._turns.advance(was_stable)
                log.warning(
                    "link disconnected",
                    link=self.name,
                    address=self.stats.address,
                    why=self.down_reason,
                    retry_in_secs=round(pause, 2),
                    next=self.settings.addresses[self._turns.at],
                )
                await trio.sleep(pause)

    async def _run_connection(self) -> None:
        """Connect, and run the connection until it ends. Raises LinkError if the link cannot connect."""
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
        layer = stack_filters(tls_to(target, self.settings.tls, self.name), websocket)
        sock = await open_socket(target, self.settings.connect_timeout_secs)
        if self._held_down or self._stopping:
            sock.close()
            raise LinkError(self.down_reason)
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
            self._connection = self.session.connect(stream, target, clock.now())
        except Exception:
            sock.close()
            raise
        self._stream = stream
        stream.owner = self._connection
        machine = self._connection.machine
        self.stats.add_connection(machine)
        try:
            self._poller.watch(stream)
            stream.mark_for_flush()
            self._writes.flush()
            await self.status.wait_until_lost()
            self._connection = None
            self.stats.up = False
            await _until_closed(stream)
        finally:
            self._connection = self._stream = None
            self.stats.up = False
            self.stats.remove_connection(machine)
            if not stream.closed:
                stream.abort(self.down_reason or "the link was stopped")

    def _layer_ended(self, stream: Stream, ending: Ending) -> None:
        """Count the error with which the TLS or WebSocket layer has ended."""
        if word := ending.violation or ending.refused:
            self.stats.protocol_errors.add(word)

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_SECS)
            try:
                self._ticked(clock.now())
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
        self.session.end_turn()

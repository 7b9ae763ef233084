"""Listener: accepts connections for one protocol, and reads them with its poller.

A connection first passes the listener's front (PROXY protocol, TLS, WebSocket), then its protocol. A shared
port hands its connections to other listeners, which adopt them.

Connections are objects, not tasks. Each listener has three tasks: accepting, polling, and a tick once a
second for timeouts (keep-alive, heartbeats, slow handshakes). Connections whose clients expect bytes every
few seconds have additional ticks.
"""

from __future__ import annotations

import errno
import socket
import sys
from typing import Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.access.places import place_of, place_of_host
from gateway.containment import contained
from gateway.errors import ConfigurationError
from gateway.ingress.client import IngressClient
from gateway.ingress.clients import ClientAdmission, IngressClients
from gateway.ingress.front.layers import Front
from gateway.ingress.front.pending import PendingConnection
from gateway.ingress.front.proxy_header import AwaitingProxyHeader, is_in_networks
from gateway.ingress.sockets import all_bound, place_at
from gateway.settings import Limits
from gateway.transport.filter import Ending, Filter
from gateway.transport.filter_stack import stack_filters
from gateway.transport.poller import Poller
from gateway.transport.stream import Stream, WriteSet

TICK_SECS: Final = 1.0
SHORT_TICKS: Final = 4  # per tick, for connections with short heartbeats
BACKLOG: Final = 4096  # ten thousand devices may reconnect at once
ACCEPTS_PER_TURN: Final = 256  # before the poller is served
OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = structlog.get_logger(limited=True)


class Ingress(Protocol):
    """Protocol side of a listener: creates the connections of new clients and routes their messages."""

    limits: Limits

    def connect(self, stream: Stream, now: float) -> IngressClient:
        """Return the object that owns the stream of a new client, accepted at `now` (loop-clock seconds)."""

    def end_turn(self) -> None:
        """Route the batch of messages that clients have published in this pass of the event loop."""

    def tick(self, now: float) -> None:
        """Process the timers that do not belong to a connection. `now` is in loop-clock seconds."""

    def admission_of(self, connection: IngressClient) -> ClientAdmission | None:
        """Return the time and protocol version of a client's admission, or None before its admission."""

    def forget_entries(self) -> None:
        """Drop cached routing entries, because memory is short."""


class Listener:
    """Listening address of one protocol, with the tasks that accept and read its connections."""

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        protocol: Ingress,
        ingress_clients: IngressClients,
        writes: WriteSet,
        *,
        front: Front | None = None,
        descriptors_max: int = sys.maxsize,
    ) -> None:
        """Create a listener without opening a port. `ingress_clients` has the connections of `protocol`.

        `writes` collects the streams that have output to write. `front` has the layers (TLS, WebSocket) of
        the connections. Clients whose file descriptor is `descriptors_max` or higher are refused.
        """
        self.name = name
        self.host = host
        self.port = port
        self.ingress_clients = ingress_clients
        self.stats = ingress_clients.stats
        self.connections = ingress_clients.connections
        self.open = False
        self.front = front or Front()
        self.descriptors_max = descriptors_max
        self._protocol = protocol
        self._writes = writes
        self._sockets: list[socket.socket] = []
        self._poller = Poller(writes, protocol.end_turn)
        self._accepting = trio.CancelScope()

    def admission_of(self, connection: IngressClient) -> ClientAdmission | None:
        """Return the time and protocol version of a client's admission, or None before its admission."""
        return self._protocol.admission_of(connection)

    def bind(self, *, shared: bool = False) -> None:
        """Open the listening sockets; for port 0 the system selects a free port, which is set as `port`.

        `shared` True lets other processes listen on the same port. Raises ConfigurationError if a socket
        cannot be opened.
        """
        try:
            self._sockets = all_bound(self.host, self.port, shared=shared)
            for sock in self._sockets:
                sock.listen(BACKLOG)
                sock.setblocking(False)
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"listeners.{self.name}: cannot listen on {self.place}: {error.strerror or error}"
            ) from error
        self.port = self._sockets[0].getsockname()[1]
        self.open = True

    @property
    def is_busy(self) -> bool:
        """True while there are connections, or ended connections whose last output is still being written."""
        return bool(self.connections) or self._poller.is_closing

    @property
    def place(self) -> str:
        """Listening address as `host:port`, with an IPv6 address in brackets."""
        return place_at(self.host, self.port)

    def close(self) -> None:
        """Stop accepting connections and close the listening sockets."""
        self.open = False
        self._accepting.cancel()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def forget_entries(self) -> None:
        """Drop the protocol's cached routing entries, because memory is short."""
        self._protocol.forget_entries()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._poller.run)
                nursery.start_soon(self._tick)
                with self._accepting:
                    async with trio.open_nursery() as accepting:
                        for sock in self._sockets:
                            accepting.start_soon(self._accept, sock)
                await trio.sleep_forever()
        finally:
            self.close()

    async def _accept(self, sock: socket.socket) -> None:
        """Accept connections on one socket until the listener is closed."""
        while self.open:  # `close` may precede this task's first run, or its turn after a wake-up
            await trio.lowlevel.wait_readable(sock)
            for _ in range(ACCEPTS_PER_TURN if self.open else 0):
                try:
                    accepted, address = sock.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    self.stats.refused.add("accept")
                    if error.errno in OUT_OF_DESCRIPTORS:
                        log.error(
                            "connection not accepted, descriptors or memory exhausted",
                            listener=self.name,
                            error=str(error),
                        )
                        await trio.sleep(TICK_SECS)
                    break  # anything else concerns a connection that died while it waited
                try:
                    self._add(accepted, address[0], address[1])
                except Exception as fault:  # of one connection, which may have died already
                    self.stats.refused.add("accept")
                    accepted.close()
                    contained("connection", fault, listener=self.name)

    def _add(self, sock: socket.socket, host: str, port: int) -> None:
        """Serve the accepted socket of a client at `host` and `port`, or close it if a limit is reached."""
        proxies = self.front.proxies
        if sock.fileno() >= self.descriptors_max:  # the kernel assigns the lowest free number
            word = "descriptors"
        elif proxies is None:
            word = self.ingress_clients.refusal(place_of_host(host))
        elif not is_in_networks(proxies, host):
            word = "proxy_protocol_from"
        else:
            word = "connections_max" if self.ingress_clients.full() else ""
        if word:
            self.ingress_clients.count_refused(word, f"{host}:{port}")
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = Stream(
            sock,
            f"{host}:{port}",
            self._poller,
            self._writes,
            layer_ended=self._layer_ended,
            rate=self.ingress_clients.rate(),
            backlog_max=self._backlog_max,
        )
        now = clock.now()
        self.stats.accepted += 1
        if proxies is None:
            self._begin(stream, now)
        else:
            self.ingress_clients.enter(
                AwaitingProxyHeader(self.ingress_clients, stream, now, self.begin), stream
            )
        self._poller.watch(stream)

    @property
    def _backlog_max(self) -> int:
        """Maximum size, in bytes, of a connection's output that is not written yet.

        It exceeds output_bytes_max by two of the largest messages, because a message is written as a whole.
        """
        limits = self._protocol.limits
        return limits.output_bytes_max + 2 * limits.message_bytes_max

    def begin(self, stream: Stream, accepted_at: float, data: bytes, now: float) -> None:
        """Start TLS, WebSocket and the protocol on `stream`, after a balancer's PROXY protocol header.

        `accepted_at` is the time of accepting in loop-clock seconds, `data` the bytes received after the
        header. The connection is closed if a limit is reached.
        """
        word = self.ingress_clients.refusal(place_of(stream.remote))
        if word:
            self.ingress_clients.count_refused(word, stream.remote)
            stream.abort(word)
            return
        self._begin(stream, accepted_at)
        if data:
            stream.feed(data, now, stream.layer)

    def _begin(self, stream: Stream, accepted_at: float) -> None:
        """Begin TLS, if it is configured, and then the protocol.

        The client's first bytes are checked, to detect a client that uses TLS on a port without TLS, or the
        reverse.
        """
        stream.layer = self.front.new_tls_filter()
        self._connect(stream, accepted_at)
        stream.layer = self.front.checked(stream)

    def adopt(self, stream: Stream, accepted_at: float, data: bytes, now: float) -> None:
        """Take over a connection that a shared port has handed over.

        `data` are the bytes received so far, decrypted if TLS is used. `accepted_at` and `now` are in
        loop-clock seconds.
        """
        stream.move(
            self._poller,
            layer_ended=self._layer_ended,
            rate=self.ingress_clients.rate(),
            backlog_max=self._backlog_max,
        )
        self.stats.accepted += 1
        stream.feed(data, now, self._connect(stream, accepted_at))

    def _connect(self, stream: Stream, accepted_at: float) -> Filter | None:
        """Begin the protocol on a stream, inside WebSocket if that is configured.

        Return the WebSocket layer, or None.
        """
        websocket = self.front.upgraded(stream.backlog_max)
        stream.layer = stack_filters(stream.layer, websocket)
        connection = self._protocol.connect(stream, accepted_at)
        if not isinstance(connection, PendingConnection):
            stream.count_with(self.stats)
        self.ingress_clients.enter(connection, stream)
        return websocket

    def _layer_ended(self, stream: Stream, ending: Ending) -> None:
        """Count and log the error with which TLS or WebSocket has ended (`ending`), if there was one."""
        if ending.violation:
            self.stats.protocol_errors.add(ending.violation)
        elif ending.refused:
            self.stats.refused.add(ending.refused)
        else:
            return
        log.warning("connection refused", listener=self.name, remote=stream.remote, error=ending.text)

    def end_turn(self) -> None:
        """Route the batch of messages that clients have published in this pass of the event loop."""
        self._protocol.end_turn()

    async def _tick(self) -> None:
        """Call `tick` of the connections and of the protocol once a second; log errors that they raise."""
        short = 0
        while True:
            is_fast = bool(self.ingress_clients.fast_ticked)
            await trio.sleep(TICK_SECS / SHORT_TICKS if is_fast else TICK_SECS)
            short = (short + 1) % SHORT_TICKS if is_fast else 0
            now = clock.now()
            for connection in list(
                self.ingress_clients.fast_ticked if short else self.ingress_clients.connections
            ):
                try:
                    if not connection.is_at_rest(now):
                        connection.tick(now)
                except Exception as error:
                    connection.stream.fail(error)
            try:
                if not short:
                    self._protocol.tick(now)
                self._protocol.end_turn()
            except Exception as error:
                contained("timer", error, listener=self.name)
            self._writes.flush()

"""A listener: accepts connections of one protocol, and gives them to its poller.

What a connection has to pass before its protocol (TLS, WebSocket, a header of the PROXY protocol) is the
listener's front; a shared port gives its connections to other listeners, which adopt them.

Connections are objects, not tasks. The tasks here are three: accepting, polling, and a tick once a second for
what is due by the clock (keep-alive, heartbeats, handshakes that take too long). Connections whose clients
expect to hear from us within a few seconds have ticks in between.
"""

from __future__ import annotations

import errno
import socket
import sys
from typing import Final, Protocol

import structlog
import trio

from gateway.access.places import place_of, place_of_host
from gateway.containment import contained
from gateway.errors import ConfigurationError
from gateway.ingress.front.layers import Front
from gateway.ingress.front.pending import PendingConnection
from gateway.ingress.front.proxy_header import AwaitingProxyHeader, within_any
from gateway.ingress.guest import Guest
from gateway.ingress.guests import Entrance, Guests
from gateway.ingress.sockets import all_bound, place_at
from gateway.settings import Limits
from gateway.transport.poller import Poller
from gateway.transport.stacked import within
from gateway.transport.stream import Ending, Filter, Stream, WriteSet

TICK_SECS: Final = 1.0
SHORT_TICKS: Final = 4  # to each, for connections that are in a hurry
BACKLOG: Final = 4096  # ten thousand devices may reconnect at once
ACCEPTS_PER_TURN: Final = 256  # then the poller has its turn
OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = structlog.get_logger(limited=True)


class Ingress(Protocol):
    """What a listener needs of its protocol."""

    limits: Limits

    def connect(self, stream: Stream, now: float) -> Guest:
        """A new connection's owner; `now` is when it was accepted."""

    def turn_done(self) -> None:
        """Route the batch that this wake-up has gathered."""

    def tick(self, now: float) -> None:
        """Do what is due by the clock, beside its connections."""

    def entrance(self, connection: Guest) -> Entrance | None:
        """When a client was let in; None: it has not said who it is."""

    def forget_entries(self) -> None:
        """Memory is short: what has been worked out of addresses goes, and is worked out again."""


class Listener:
    """One listening address of one protocol."""

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        protocol: Ingress,
        guests: Guests,
        writes: WriteSet,
        *,
        front: Front | None = None,
        descriptors_max: int = sys.maxsize,
    ) -> None:
        """`guests` are those that `protocol` knows. A descriptor of `descriptors_max` and above is for others
        than clients."""
        self.name = name
        self.host = host
        self.port = port
        self.guests = guests
        self.stats = guests.stats
        self.connections = guests.connections
        self.open = False
        self.front = front or Front()
        self.descriptors_max = descriptors_max
        self._protocol = protocol
        self._writes = writes
        self._sockets: list[socket.socket] = []
        self._poller = Poller(writes, protocol.turn_done)
        self._accepting = trio.CancelScope()

    def entrance(self, connection: Guest) -> Entrance | None:
        """When a client was let in; None: it has not said who it is."""
        return self._protocol.entrance(connection)

    def bind(self, *, shared: bool = False) -> None:
        """Open the listening sockets; port 0 takes a free one and sets `port`. `shared`: other processes
        listen there, too. ConfigurationError when refused.
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
    def place(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        return place_at(self.host, self.port)

    def close(self) -> None:
        """Accept no more."""
        self.open = False
        self._accepting.cancel()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def forget_entries(self) -> None:
        """Memory is short."""
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
        while self.open:  # `close` may come before this task first runs, or between its wake-up and its turn
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
        proxies = self.front.proxies
        if sock.fileno() >= self.descriptors_max:  # the lowest one that is free: all below are taken
            word = "descriptors"
        elif proxies is None:
            word = self.guests.refusal(place_of_host(host))
        elif not within_any(proxies, host):
            word = "proxy_protocol_from"
        else:
            word = "connections_max" if self.guests.full() else ""
        if word:
            self.guests.refused(word, f"{host}:{port}")
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
            rate=self.guests.rate(),
            backlog_max=self._backlog_max,
        )
        now = trio.current_time()
        self.stats.accepted += 1
        if proxies is None:
            self._begin(stream, now)
        else:
            self.guests.enter(AwaitingProxyHeader(self.guests, stream, now, self.begin), stream)
        self._poller.watch(stream)

    @property
    def _backlog_max(self) -> int:
        """A single message may exceed the limit: it is written whole."""
        limits = self._protocol.limits
        return limits.output_bytes_max + 2 * limits.message_bytes_max

    def begin(self, stream: Stream, since: float, octets: bytes, now: float) -> None:
        """`stream`, accepted at `since`, passes this listener's layers from here on, beginning with
        `octets`. A balancer has said for whom it connects.
        """
        word = self.guests.refusal(place_of(stream.remote))
        if word:
            self.guests.refused(word, stream.remote)
            stream.abort(word)
            return
        self._begin(stream, since)
        if octets:
            stream.feed(octets, now, stream.layer)

    def _begin(self, stream: Stream, since: float) -> None:
        stream.layer = self.front.secured()
        self._connect(stream, since)

    def adopt(self, stream: Stream, since: float, octets: bytes, now: float) -> None:
        """Take a connection from a shared port, which has read `octets` of it, through TLS if need be."""
        stream.move(
            self._poller,
            layer_ended=self._layer_ended,
            rate=self.guests.rate(),
            backlog_max=self._backlog_max,
        )
        self.stats.accepted += 1
        stream.feed(octets, now, self._connect(stream, since))

    def _connect(self, stream: Stream, since: float) -> Filter | None:
        """The protocol begins, behind WebSocket if that is how it is spoken here; returns that layer."""
        websocket = self.front.upgraded(stream.backlog_max)
        stream.layer = within(stream.layer, websocket)
        connection = self._protocol.connect(stream, since)
        if not isinstance(connection, PendingConnection):
            stream.count_with(self.stats)
        self.guests.enter(connection, stream)
        return websocket

    def _layer_ended(self, stream: Stream, ending: Ending) -> None:
        """TLS or WebSocket came to its end: count what was wrong."""
        if ending.broke:
            self.stats.protocol_errors.add(ending.broke)
        elif ending.refused:
            self.stats.refused.add(ending.refused)
        else:
            return
        log.warning("connection refused", listener=self.name, remote=stream.remote, error=ending.text)

    def turn_done(self) -> None:
        """Route what has gathered."""
        self._protocol.turn_done()

    async def _tick(self) -> None:
        short = 0
        while True:
            hurried = bool(self.guests.hurried)
            await trio.sleep(TICK_SECS / SHORT_TICKS if hurried else TICK_SECS)
            short = (short + 1) % SHORT_TICKS if hurried else 0
            now = trio.current_time()
            for connection in list(self.guests.hurried if short else self.guests.connections):
                try:
                    connection.tick(now)
                except Exception as error:
                    connection.stream.fail(error)
            try:
                if not short:
                    self._protocol.tick(now)
                self._protocol.turn_done()
            except Exception as error:
                contained("timer", error, listener=self.name)
            self._writes.flush()

"""Port shared by several listeners: the first bytes of the client select the protocol.

This works because the client sends first in all supported protocols. Each dialect defines the first bytes of
its clients; 0x16 begins a TLS handshake, inside which the detection is repeated; an upper-case letter begins
an HTTP request. The connection is then handed to the listener of that protocol, and counts in its statistics,
limits and access control. Over HTTP, the port itself serves only a liveness probe.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gateway.ingress.client import IngressClient
from gateway.ingress.clients import ClientAdmission, IngressClients
from gateway.ingress.front.layers import front_of
from gateway.ingress.front.pending import PendingConnection
from gateway.ingress.listener import Listener
from gateway.settings import Settings, SharedListener
from gateway.telemetry.metrics import Metrics
from gateway.transport.first_bytes import check_first_bytes, recognise
from gateway.transport.http import Refusal, parse_request, response
from gateway.transport.stream import Stream, WriteSet
from gateway.transport.tls import TlsFilter

LIVENESS: Final = frozenset(("/livez", "/livez/", "/health", "/health/"))
SHOWN: Final = 8  # bytes of an unknown protocol in the log


def shared_listeners(
    settings: Settings,
    listeners: Mapping[str, Listener],
    writes: WriteSet,
    metrics: Metrics,
    descriptors_max: int,
) -> list[Listener]:
    """Return the shared ports of the configuration, which hand their connections to `listeners`."""
    made = []
    for name, options in settings.listeners.items():
        if not isinstance(options, SharedListener):
            continue
        front = front_of(name, options)
        ingress_clients = IngressClients(
            settings.limits_of(name), metrics.listener(name, options.protocol), writes
        )
        port = SharedPort(
            [(settings.listeners[one].protocol, listeners[one]) for one in options.shares],
            ingress_clients,
            tls=front.tls,
        )
        listener = Listener(
            name,
            options.host,
            options.port,
            port,
            ingress_clients,
            writes,
            front=front._replace(tls=None, detects=True),
            descriptors_max=descriptors_max,
        )
        made.append(listener)
    return made


class SharedPort:
    """Protocol side of a shared port, which detects the protocol of each connection.

    `shares` are the listeners that share the port, each with its protocol.
    """

    def __init__(
        self,
        shares: Iterable[tuple[str, Listener]],
        ingress_clients: IngressClients,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self.limits = ingress_clients.limits
        self.tls = tls
        self._clients = ingress_clients
        self.by_protocol: dict[str, Listener] = {}
        self.by_path: dict[str, Listener] = {}
        for protocol, listener in shares:
            if path := listener.front.websocket_path:
                self.by_path[path] = listener
            else:
                self.by_protocol[protocol] = listener

    def connect(self, stream: Stream, now: float) -> UndecidedConnection:
        """Return the first owner of a new client's stream; `now` is in loop-clock seconds."""
        return UndecidedConnection(self, self._clients, stream, now)

    def admission_of(self, connection: IngressClient) -> ClientAdmission | None:
        """Return None: clients are admitted by other listeners."""

    def forget_entries(self) -> None:
        """Do nothing: only the other listeners have entries."""

    def end_turn(self) -> None:
        """Route the messages of connections that were handed over to listeners in this event-loop pass."""
        for listener in (*self.by_protocol.values(), *self.by_path.values()):
            listener.end_turn()

    def tick(self, now: float) -> None:
        """Do nothing: only connections have timeouts."""


class UndecidedConnection(PendingConnection):
    """Connection to a shared port whose protocol is not known yet."""

    def __init__(
        self, port: SharedPort, ingress_clients: IngressClients, stream: Stream, accepted_at: float
    ) -> None:
        super().__init__(ingress_clients, stream, accepted_at)
        self._port = port
        self._secure = False

    def examine(self, now: float) -> None:
        """Detect the protocol, and hand the connection over or refuse it."""
        spoken = recognise(self.data)
        if not spoken:
            return
        if spoken == "tls" and not self._secure:
            self._secure_it(now)
        elif spoken == "http":
            self._http(now)
        elif spoken in ("tls", "unknown"):
            self.break_off(
                "unknown_protocol",
                f"unknown protocol: the connection begins with {self.data[:SHOWN].hex(' ')}",
            )
        elif spoken in self._port.by_protocol:
            self._hand_over(self._port.by_protocol[spoken], now)
        else:
            self.refuse("not_shared", f"no listener for {spoken} shares this port")

    def _secure_it(self, now: float) -> None:
        """Start TLS, or refuse the client if the port has no certificate."""
        if self._port.tls is None:
            self._refuse_tls_mismatch(secure=False)
            return
        self._secure = True
        hello, self.data = self.data, b""
        self.stream.layer = TlsFilter(self._port.tls(), server_side=True)
        self.stream.feed(hello, now, self.stream.layer)

    def _hand_over(self, listener: Listener, now: float) -> None:
        """Hand the connection to a listener, or refuse it if TLS is missing or a limit is reached."""
        if listener.front.tls is not None and not self._secure:
            self._refuse_tls_mismatch(secure=True)
        elif not listener.ingress_clients.refuse_over_limit(self.stream):
            listener.adopt(self.stream, self.accepted_at, self.detach(), now)

    def _refuse_tls_mismatch(self, *, secure: bool) -> None:
        """Refuse a client without TLS where it is required (`secure`), or with TLS where there is none."""
        found = check_first_bytes(self.data, secure=secure)
        assert found is not None
        self.refuse(found.reason, found.text, found.answer)

    def _http(self, now: float) -> None:
        """Hand a WebSocket request to its listener, respond to a liveness probe, or refuse the request."""
        try:
            request = parse_request(self.data)
            if request is None:
                return
            if listener := self._port.by_path.get(request.path):
                self._hand_over(listener, now)
                return
            probed = request.method == "OPTIONS" and request.path == "/"  # HAProxy's default probe
            if not probed and request.path not in LIVENESS:
                raise Refusal(404, "nothing is served at this path")
            if not probed and request.method not in ("GET", "HEAD"):
                raise Refusal(405, "only GET and HEAD are allowed", {"Allow": "GET, HEAD"})
        except Refusal as refusal:
            self.refuse(f"http_{refusal.status}", str(refusal), refusal.response)
        else:
            self.answer(response(200, "alive\n", with_body=request.method == "GET"))

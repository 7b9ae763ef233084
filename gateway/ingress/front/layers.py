"""What a listener's connections pass before its protocol sees them."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from typing import NamedTuple

from gateway.protocols import DIALECTS
from gateway.settings import Listener
from gateway.settings.endpoints import WebListener
from gateway.transport.certificates import server_context
from gateway.transport.stream import Filter
from gateway.transport.tls import TlsFilter
from gateway.transport.websocket import WebSocketFilter

Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


class Front(NamedTuple):
    """The layers of one listener, from the socket inwards.

    `proxies`: who must announce the client by a header of the PROXY protocol, and nobody else may connect;
    None: no such header is read. `tls` gives the context for the next connection. `websocket_path` "" is
    none; `origins` None is any.
    """

    proxies: Networks | None = None
    tls: Callable[[], ssl.SSLContext] | None = None
    websocket_path: str = ""
    subprotocols: tuple[str, ...] = ()
    origins: tuple[str, ...] | None = None

    def secured(self) -> Filter | None:
        """TLS for a new connection, if it is to have it."""
        return None if self.tls is None else TlsFilter(self.tls(), server_side=True)

    def upgraded(self, message_octets_max: int) -> Filter | None:
        """WebSocket for a new connection, if it is to have it."""
        if not self.websocket_path:
            return None
        return WebSocketFilter(
            self.websocket_path,
            subprotocols=self.subprotocols,
            origins=self.origins,
            message_octets_max=message_octets_max,
        )


def front_of(name: str, given: Listener) -> Front:
    """The layers that the configuration of listener `name` asks for. Raises ConfigurationError."""
    tls = given.tls
    web = given if isinstance(given, WebListener) else None
    return Front(
        proxies=None
        if given.proxy_protocol == "off"
        else tuple(ipaddress.ip_network(network) for network in given.proxy_protocol_from),
        tls=None
        if tls is None
        else server_context(
            name,
            tls.cert_file,
            tls.key_file,
            tls.client_ca_file,
            crl_file=tls.crl_file,
            optional=tls.client_certificate == "optional",
        ),
        websocket_path=web.websocket_path if web is not None and web.websocket_path else "",
        subprotocols=DIALECTS[given.protocol].subprotocols if web is not None else (),
        origins=None if web is None else web.websocket_origins,
    )

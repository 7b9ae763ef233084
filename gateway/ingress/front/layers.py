"""Layers between a listener's sockets and its protocol: PROXY protocol, TLS and WebSocket.

`Front` holds the configured layers of one listener and creates the TLS and WebSocket filters for its
connections. The filters themselves are in gateway.transport; the PROXY protocol header is read by the module
`proxy_header`.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from typing import NamedTuple

from gateway.protocols import DIALECTS
from gateway.settings import ListenerSettings
from gateway.settings.endpoints import WebListener
from gateway.transport.certificates import server_context
from gateway.transport.filter import Filter
from gateway.transport.first_bytes import FirstBytesFilter
from gateway.transport.stream import Stream
from gateway.transport.tls import TlsFilter
from gateway.transport.websocket import WebSocketFilter

Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


class Front(NamedTuple):
    """Configured layers of one listener, from the socket inwards.

    `proxies` are the networks of the balancers that must announce each client with a PROXY protocol header;
    other addresses may not connect. None means that no header is read. `tls` returns the TLS context for the
    next connection. `websocket_path` "" means no WebSocket; `origins` None allows any origin. `detects` is
    True for a shared port, whose protocol object decides by the first bytes if there is TLS.
    """

    proxies: Networks | None = None
    tls: Callable[[], ssl.SSLContext] | None = None
    websocket_path: str = ""
    subprotocols: tuple[str, ...] = ()
    origins: tuple[str, ...] | None = None
    detects: bool = False

    def new_tls_filter(self) -> Filter | None:
        """Return a TLS filter for a new connection, or None without TLS."""
        return None if self.tls is None else TlsFilter(self.tls(), server_side=True)

    def checked(self, stream: Stream) -> Filter | None:
        """Return a filter for a new stream that first checks whether the client uses TLS as configured.

        If so, the filter passes the client's bytes on to the stream's present layer. A shared port needs no
        check: the present layer is returned, or None if there is none.
        """
        if self.detects:
            return stream.layer
        return FirstBytesFilter(stream, stream.layer, secure=self.tls is not None)

    def upgraded(self, message_bytes_max: int) -> Filter | None:
        """Return a WebSocket filter for a new connection, or None if the listener has no `websocket_path`.

        `message_bytes_max` is the size in bytes of the largest message that a client may send.
        """
        if not self.websocket_path:
            return None
        return WebSocketFilter(
            self.websocket_path,
            subprotocols=self.subprotocols,
            origins=self.origins,
            message_bytes_max=message_bytes_max,
        )


def front_of(name: str, options: ListenerSettings) -> Front:
    """Return the configured layers of the listener `name`.

    Raises ConfigurationError for unusable certificates.
    """
    tls = options.tls
    web = options if isinstance(options, WebListener) else None
    return Front(
        proxies=None
        if options.proxy_protocol == "off"
        else tuple(ipaddress.ip_network(network) for network in options.proxy_protocol_from),
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
        subprotocols=DIALECTS[options.protocol].subprotocols if web is not None else (),
        origins=None if web is None else web.websocket_origins,
    )

"""PROXY protocol headers, by which a balancer announces the client of a connection.

After the header, the announced address is that of the connection, for access control, logs and senders. The
same holds for the client certificate that the balancer reports as verified. There is one exception: a
balancer on another machine cannot announce a client on this machine, because loopback addresses have more
rights. Such a connection retains the balancer's own address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from gateway.access.places import is_loopback
from gateway.errors import RemoteProtocolError
from gateway.ingress.clients import IngressClients
from gateway.ingress.front.layers import Networks
from gateway.ingress.front.pending import PendingConnection
from gateway.transport.proxy_protocol import parse_header
from gateway.transport.stream import Stream

Begin = Callable[[Stream, float, bytes, float], None]


class AwaitingProxyHeader(PendingConnection):
    """Connection that waits for the PROXY protocol header. After it, `begin` starts TLS or the protocol."""

    def __init__(
        self, ingress_clients: IngressClients, stream: Stream, accepted_at: float, begin: Begin
    ) -> None:
        super().__init__(ingress_clients, stream, accepted_at)
        self._begin = begin

    def examine(self, now: float) -> None:
        """Parse the header. When it is complete, start TLS or the protocol with the bytes that follow it."""
        try:
            header = parse_header(self.data)
        except RemoteProtocolError as error:
            self.break_off("proxy_protocol", str(error))
            return
        if header is None:
            return
        stream = self.stream
        if header.address and (is_loopback(stream.remote) or not is_loopback(f"{header.address}:0")):
            stream.remote = f"{header.address}:{header.port}"
        stream.secured = header.secured
        rest = self.detach()[header.byte_count :]
        self._begin(stream, self.accepted_at, rest, now)


def is_in_networks(networks: Networks, host: str) -> bool:
    """Return True if the address `host` is in one of the networks. IPv4-mapped IPv6 counts as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in networks)

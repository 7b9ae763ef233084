"""Connections that a balancer makes on behalf of clients: its header says whose they are.

From then on the announced address is the connection's, for access, logs and senders alike, and so is the
certificate that the balancer says it has verified. A header is believed with one exception: whoever connects
from another machine cannot announce a client on this one, for whom the rules of loopback would open doors;
such a connection keeps the balancer's own address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from gateway.access.places import is_loopback
from gateway.errors import RemoteProtocolError
from gateway.ingress.front.layers import Networks
from gateway.ingress.front.pending import PendingConnection
from gateway.ingress.guests import Guests
from gateway.transport.proxy_protocol import parse_header
from gateway.transport.stream import Stream

Begin = Callable[[Stream, float, bytes, float], None]


class AwaitingProxyHeader(PendingConnection):
    """Waits for the header, before TLS and anything else; `begin` goes on behind it."""

    def __init__(self, guests: Guests, stream: Stream, since: float, begin: Begin) -> None:
        super().__init__(guests, stream, since)
        self._begin = begin

    def look(self, now: float) -> None:
        """Read the header; the listener's protocol begins behind it."""
        try:
            header = parse_header(self.octets)
        except RemoteProtocolError as error:
            self.break_off("proxy_protocol", str(error))
            return
        if header is None:
            return
        stream = self.stream
        if header.address and (is_loopback(stream.remote) or not is_loopback(f"{header.address}:0")):
            stream.remote = f"{header.address}:{header.port}"
        stream.secured = header.secured
        rest = self.leave()[header.octets :]
        self._begin(stream, self.since, rest, now)


def within_any(networks: Networks, host: str) -> bool:
    """Is the address `host` in one of the networks? IPv4 in the form of IPv6 counts as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in networks)

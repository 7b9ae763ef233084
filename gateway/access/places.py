"""Places: network origins of clients, by which limits and queues treat clients fairly.

Addresses that one owner can choose freely are one place. With IPv6 a customer gets a network of 64 bits at
least and may use a new address for every connection, so the place is that network. With IPv4 the place is the
address, shared by all clients behind the same address translator. This machine is a place of its own, which
is not limited: an attacker who can connect from here could do worse.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

LOOPBACK: Final = "loopback"
NETWORK_BITS: Final = 64  # of IPv6


def is_loopback(remote: str) -> bool:
    """Return True if an address (host, or host:port) is a loopback address of this machine."""
    address = _address(remote.rsplit(":", 1)[0])
    return address is not None and address.is_loopback


def place_of(remote: str) -> str:
    """Return the network origin (place) of a client, whose address is host:port.

    This is an IPv4 address, an IPv6 network of 64 bits, or LOOPBACK for this machine.
    """
    return place_of_host(remote.rpartition(":")[0])


@lru_cache(maxsize=4_096)
def place_of_host(host: str) -> str:
    """Return the network origin (place) of a client, whose address is `host`, without a port.

    This is an IPv4 address, an IPv6 network of 64 bits, or LOOPBACK for this machine. A text that is not an
    IP address is returned unchanged.
    """
    address = _address(host)
    if address is None:
        return host
    if address.is_loopback:
        return LOOPBACK
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address) >> NETWORK_BITS << NETWORK_BITS, NETWORK_BITS)))
    return str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address. Return None if `host` is not an IP address.

    An IPv4 address that is mapped to IPv6 is returned as an IPv4 address.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address

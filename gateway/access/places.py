"""Where a client comes from, as far as fairness cares: what one owner of addresses can choose freely is one
place.

With IPv6 a customer gets a network of 64 bits at least and may have a new address for every connection, so
that network is the place. With IPv4 it is the address, with whoever else stands behind the same translator.
This machine is a place of its own: who can connect from it could do worse.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

LOOPBACK: Final = "loopback"
NETWORK_BITS: Final = 64  # of IPv6


def is_loopback(remote: str) -> bool:
    """Is the address (host, or host:port as streams write it) on this machine?"""
    address = _address(remote.rsplit(":", 1)[0])
    return address is not None and address.is_loopback


def place_of(remote: str) -> str:
    """The place of an address (host:port, as streams write it)."""
    return place_of_host(remote.rpartition(":")[0])


@lru_cache(maxsize=4_096)
def place_of_host(host: str) -> str:
    """The place of an address without a port."""
    address = _address(host)
    if address is None:
        return host
    if address.is_loopback:
        return LOOPBACK
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address) >> NETWORK_BITS << NETWORK_BITS, NETWORK_BITS)))
    return str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """IPv4 in the form of IPv6 counts as IPv4; None: this is no address."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address

"""Listening sockets: the addresses of a host name, and ports shared by several processes.

A `shared` socket has SO_REUSEPORT, and the kernel distributes connections among the processes that listen on
the port. The kernel admits any process of the same user. A process that reserves such a port therefore checks
first that it is free.
"""

from __future__ import annotations

import errno
import socket
from typing import Any, Final, NamedTuple

EVERYWHERE: Final = "::"
NO_SUCH_FAMILY: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


class SocketAddress(NamedTuple):
    """Socket address without the port: the address family, and an address of that family."""

    family: int
    address: tuple[Any, ...]


def places_of(host: str, port: int) -> list[SocketAddress]:
    """Return the addresses to bind for the configured host name or address `host`.

    `::` stands for all IPv4 and all IPv6 addresses, with a socket for each family, so that IPv4 clients have
    IPv4 addresses. Raises OSError for an unknown name.
    """
    if host == EVERYWHERE:
        return [SocketAddress(socket.AF_INET, ("0.0.0.0",)), SocketAddress(socket.AF_INET6, (EVERYWHERE,))]
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [SocketAddress(family, (address[0], *address[2:])) for family, _, _, _, address in found]


def bound(place: SocketAddress, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound to the address and the port but does not listen.

    `shared` True lets other processes bind the same port. Raises OSError.
    """
    sock = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if place.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((place.address[0], port, *place.address[1:]))
    except BaseException:
        sock.close()
        raise
    return sock


def all_bound(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Return a bound socket for each address of a host, all on one port; port 0 selects a free one.

    For `::` on a machine without IPv6, only the IPv4 socket is returned. Raises OSError and closes all
    sockets if an address cannot be bound.
    """
    found: list[socket.socket] = []
    try:
        for place in places_of(host, port):
            try:
                found.append(bound(place, port, shared=shared))
            except OSError as error:
                if not (host == EVERYWHERE and found and error.errno in NO_SUCH_FAMILY):
                    raise
            port = found[0].getsockname()[1]
    except BaseException:
        for sock in found:
            sock.close()
        raise
    return found


def reserve_port(host: str, port: int) -> list[socket.socket]:
    """Bind sockets that reserve a port for processes that will share it, and return the sockets.

    The sockets never listen. Raises OSError, also if another process listens on a shared socket there.
    """
    for sock in all_bound(host, port):
        port = sock.getsockname()[1]
        sock.close()
    return all_bound(host, port, shared=True)


def place_at(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

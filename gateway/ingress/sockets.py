"""Listening sockets: which addresses a host stands for, and ports that several processes share.

With `shared` a socket has SO_REUSEPORT, and the kernel divides connections among the processes that listen
there. It lets in any process of the same user, so whoever holds such a port looks first whether it is free.
"""

from __future__ import annotations

import errno
import socket
from typing import Any, Final, NamedTuple

EVERYWHERE: Final = "::"
NO_SUCH_FAMILY: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


class Place(NamedTuple):
    """A family, and an address of it without the port."""

    family: int
    address: tuple[Any, ...]


def places_of(host: str, port: int) -> list[Place]:
    """What to bind for a host: `::` is all of IPv4 and of IPv6, a socket each, so that addresses of clients
    look as they do elsewhere. Raises OSError for a name that is not known.
    """
    if host == EVERYWHERE:
        return [Place(socket.AF_INET, ("0.0.0.0",)), Place(socket.AF_INET6, (EVERYWHERE,))]
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [Place(family, (address[0], *address[2:])) for family, _, _, _, address in found]


def bound(place: Place, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that is bound there, and does not listen yet. Raises OSError."""
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
    """A socket for each address of a host, on one port; 0: a free one. A machine without IPv6 has the first
    of `::`. Raises OSError, and has bound none then.
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


def reserved(host: str, port: int) -> list[socket.socket]:
    """The same for processes that are going to share it: sockets that hold the port, and never listen. Raises
    OSError, also when somebody listens there who shares it.
    """
    for sock in all_bound(host, port):
        port = sock.getsockname()[1]
        sock.close()
    return all_bound(host, port, shared=True)


def place_at(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

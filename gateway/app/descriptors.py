"""Descriptors: as many as the system lets us have, and a reserve that clients do not get.

A connection costs one, and so do files of the store, links and requests over HTTP. The usual soft limit of
1 024 is for programs that use `select`; we raise it to the hard one.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Final

import structlog

from gateway.ingress.listener import Listener
from gateway.settings import Settings

DESCRIPTORS_MAX: Final = 1 << 20  # the kernel's usual maximum, where the hard limit says "infinity"

log = structlog.get_logger()


def raise_descriptors() -> None:
    """Raise the soft limit of this process to the hard one, if we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of descriptors cannot be raised", soft=soft, error=str(error))


def descriptors_for_clients(reserved: int) -> int:
    """The first descriptor that no client gets; at most a quarter of all is kept from them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    return limit - min(reserved, limit // 4)


def divide_descriptors(settings: Settings, listeners: Iterable[Listener]) -> None:
    """Tell the listeners where to stop, and the operator when that is before `connections_max`."""
    most = descriptors_for_clients(settings.limits.descriptors_reserved)
    wanted = 0
    for listener in listeners:
        listener.descriptors_max = most
        wanted = max(wanted, listener.limits.connections_max)
    if wanted > most:
        log.warning(
            "limits.connections_max is more than there are descriptors: raise the hard limit (ulimit -Hn)",
            connections_max=wanted,
            descriptors=most,
        )

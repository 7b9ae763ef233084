"""Descriptors: as many as the system lets us have, and a reserve that clients do not get.

A connection costs one, and so do files of the store, links and requests over HTTP. The usual soft limit of
1 024 is for programs that use `select`; we raise it to the hard one.
"""

from __future__ import annotations

import resource
from typing import Final

import structlog

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


def divided_descriptors(settings: Settings) -> int:
    """Where listeners stop; the operator hears when that is before `connections_max` of one."""
    most = descriptors_for_clients(settings.limits.descriptors_reserved)
    wanted = max([settings.limits_of(name).connections_max for name in settings.listeners], default=0)
    if wanted > most:
        log.warning(
            "limits.connections_max is more than there are descriptors: raise the hard limit (ulimit -Hn)",
            connections_max=wanted,
            descriptors=most,
        )
    return most

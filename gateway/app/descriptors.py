"""File descriptors: the limit of this process, and a reserve that clients cannot use.

Each connection takes one, as do files of the store, links and HTTP requests. The usual soft limit of 1 024 is
meant for programs that use `select`, so the gateway raises it to the hard limit.
"""

from __future__ import annotations

import resource
from typing import Final

import structlog

from gateway.settings import Settings

DESCRIPTORS_MAX: Final = 1 << 20  # Usual maximum of the kernel, for a hard limit of "infinity".

log = structlog.get_logger()


def raise_descriptors() -> None:
    """Raise this process's soft limit of open files to the hard limit, or DESCRIPTORS_MAX if that is lower.

    If the system does not permit it, log a warning.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError) as error:
        log.warning("file descriptor limit not raised", soft_limit=soft, error=str(error))


def descriptors_for_clients(reserved: int) -> int:
    """Return how many file descriptors client connections may use.

    The result is the soft limit of this process minus `reserved`, but at least 75 % of the soft limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    return limit - min(reserved, limit // 4)


def divided_descriptors(settings: Settings) -> int:
    """Return how many file descriptors client connections may use, given `limits.descriptors_reserved`.

    Log a warning if the `connections_max` of a listener is larger.
    """
    most = descriptors_for_clients(settings.limits.descriptors_reserved)
    demand = max([settings.limits_of(name).connections_max for name in settings.listeners], default=0)
    if demand > most:
        log.warning(
            "file descriptors fewer than connections_max, raise ulimit -Hn",
            connections_max=demand,
            descriptors=most,
        )
    return most

"""Resources that run out unless somebody acts: certificates, disk space, limits.

They are read when metrics or alarms are requested, and cost system calls only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from gateway.admin.process import Limit
from gateway.documents import dotted
from gateway.settings import Settings


class DiskSpace(NamedTuple):
    """Space of a file system for this user, in bytes."""

    free: int
    total: int


class CertificateEnds:
    """Certificates that the configuration names, with their ends. A changed file is read again."""

    def __init__(self, settings: Settings) -> None:
        self._paths = {dotted(place): path for place, path in settings.files() if place[-1] == "cert_file"}
        self._cache: dict[str, tuple[tuple[int, int], float]] = {}

    def expiries(self) -> dict[str, float]:
        """Return the end of each certificate in seconds since 1970, by its key in the configuration.

        Unreadable files are left out; their users report them.
        """
        found = {}
        for place, path in self._paths.items():
            try:
                stat = path.stat()
                state = (stat.st_mtime_ns, stat.st_size)
                entry = self._cache.get(place)
                if entry is None or entry[0] != state:
                    entry = self._cache[place] = (state, _first_end(path))
            except (OSError, ValueError):
                continue
            found[place] = entry[1]
        return found


def _first_end(path: Path) -> float:
    """Return the earliest end of the certificates in a PEM file. Raises OSError or ValueError."""
    chain = x509.load_pem_x509_certificates(path.read_bytes())
    return min(one.not_valid_after_utc.timestamp() for one in chain)


def disk_space(settings: Settings) -> dict[str, DiskSpace]:
    """Return the space of the disks of `store` and `journal`, of those that are enabled and exist."""
    used = {
        "store": settings.store.path if settings.store.enabled else None,
        "journal": settings.journal_path() if settings.journal.enabled else None,
    }
    found = {}
    for name, path in used.items():
        if path is not None and path.exists():
            disk = os.statvfs(path)
            found[name] = DiskSpace(disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)
    return found


def limit_ratios(limits: Iterable[Limit]) -> dict[str, float]:
    """Return the highest use of each limit that is set, from 0 to 1, by its name."""
    found: dict[str, float] = {}
    for one in limits:
        if one.limit > 0:
            found[one.name] = max(found.get(one.name, 0.0), one.used / one.limit)
    return found

"""Resources that an operator must renew or enlarge in time: certificates, disk space, limits.

The functions are called when metrics or alarms are requested, and cost system calls only.
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
    """Free and total space of a file system in bytes, as far as the user of this process may use it."""

    free: int
    total: int


class CertificateEnds:
    """Expiry times of the certificates that the configuration names. Changed files are read again."""

    def __init__(self, settings: Settings) -> None:
        self._paths = {dotted(place): path for place, path in settings.files() if place[-1] == "cert_file"}
        self._cache: dict[str, tuple[tuple[int, int], float]] = {}

    def expiries(self) -> dict[str, float]:
        """Return the expiry time of each certificate, in seconds since 1970, by its key in the configuration.

        Unreadable files are omitted; the listeners and links that use them log an error.
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
    """Return the earliest expiry time of the certificates in a PEM file, in seconds since 1970.

    Raises OSError or ValueError if the file cannot be read.
    """
    chain = x509.load_pem_x509_certificates(path.read_bytes())
    return min(one.not_valid_after_utc.timestamp() for one in chain)


def disk_space(settings: Settings) -> dict[str, DiskSpace]:
    """Return the disk space for the store and the journal, by the names `store` and `journal`.

    A disabled store or journal is omitted, and so is one whose folder does not exist.
    """
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
    """Return the fraction of each limit that is used, by name; 1 means that the limit is reached.

    If several limits have the same name, the highest fraction counts. Limits of 0 (unlimited) are omitted.
    """
    found: dict[str, float] = {}
    for one in limits:
        if one.limit > 0:
            found[one.name] = max(found.get(one.name, 0.0), one.used / one.limit)
    return found

"""Files that are read again when they change."""

from __future__ import annotations

from pathlib import Path
from typing import Final

LOOK_SECS: Final = 0.5  # between two looks whether a file has changed
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """What is different when a file has changed, or another one has its name. Raises OSError."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino

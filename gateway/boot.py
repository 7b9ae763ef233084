"""Identifier of the machine's present boot, without an event loop, which jobs on Spark must not import.

Times since boot and process ids have a meaning only until the machine is started again.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")  # of Linux


@cache
def boot_id() -> str:
    """Return the system's identifier of the present boot, or "" if the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""

"""Exit codes, so that scripts can tell what went wrong."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """FAILED: it was tried; USAGE: wrong arguments; CONFIGURATION: wrong files (EX_CONFIG of sysexits)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIGURATION = 78

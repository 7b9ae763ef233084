"""Exit codes of the command line, so that scripts can distinguish the kinds of failure."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit code of the program.

    FAILED means that the command failed, USAGE that its arguments are invalid, and CONFIGURATION that the
    configuration cannot be used (EX_CONFIG in sysexits.h).
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIGURATION = 78

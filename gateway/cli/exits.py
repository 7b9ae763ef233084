"""Exit codes of the command line, so that scripts can distinguish the kinds of failure."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit code of the program.

    FAILED: the command ran and failed. USAGE: the arguments are wrong. CONFIGURATION: files cannot be used;
    it is EX_CONFIG of sysexits.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIGURATION = 78

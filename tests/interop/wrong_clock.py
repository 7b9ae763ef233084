"""A gateway whose clock is wrong, and can be set while it runs."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Final

from tests.interop.gateway_process import REPORTING

WRONG: Final = """
import mmap, os, struct, time
shared = mmap.mmap(os.open({file!r}, os.O_RDONLY), 16, prot=mmap.PROT_READ)
right, right_ns, right_of = time.time, time.time_ns, time.clock_gettime
time.time = lambda: right() + struct.unpack("d", shared[:8])[0]
time.time_ns = lambda: right_ns() + int(struct.unpack("d", shared[:8])[0] * 1e9)
time.clock_gettime = lambda id: right_of(id) + struct.unpack("d", shared[8:16])[0]
"""


class Clock:
    """How wrong it is, in a file; `program` runs the gateway by it, which `reports_idle`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.offset_secs = 0.0
        self._passed_secs = 0.0
        file.write_bytes(bytes(16))
        self.program = (sys.executable, "-c", WRONG.format(file=str(file)) + REPORTING)

    def step(self, seconds: float) -> None:
        """Set the wall clock."""
        self.offset_secs += seconds
        self._write()

    def advance(self, seconds: float) -> None:
        """Have so much time pass, by all clocks but those of event loops."""
        self._passed_secs += seconds
        self.step(seconds)

    def _write(self) -> None:
        with self._file.open("r+b") as file:
            file.write(struct.pack("2d", self.offset_secs, self._passed_secs))

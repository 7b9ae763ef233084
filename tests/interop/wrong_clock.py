"""A clock of a gateway that is wrong, and can be set while the gateway runs."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import Final

from gateway import clock
from gateway.broker import scheduler

LOOKS_SECS: Final = 0.2  # between two looks of the broker's alarms at a clock that has been set
FORMAT: Final = "2d"  # by how many seconds the wall clock is wrong, and the clock that counts since boot


class Clock:
    """How wrong the clock is, in a file; see `GatewayProcess.clock`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.offset_secs = 0.0
        self._passed_secs = 0.0
        file.write_bytes(bytes(struct.calcsize(FORMAT)))

    def step(self, seconds: float) -> None:
        """Set the wall clock."""
        self.offset_secs += seconds
        self._write()

    def advance(self, seconds: float) -> None:
        """Have so much time pass, by all clocks but those of event loops."""
        self._passed_secs += seconds
        self.step(seconds)

    def _write(self) -> None:
        with self.file.open("r+b") as file:
            file.write(struct.pack(FORMAT, self.offset_secs, self._passed_secs))


def follow(path: str) -> None:
    """Make this process, which has imported the gateway, read the time by a `Clock`'s file from now on."""
    with Path(path).open("rb") as file:
        shared = mmap.mmap(file.fileno(), struct.calcsize(FORMAT), prot=mmap.PROT_READ)
    right, right_ns, right_of = time.time, time.time_ns, time.clock_gettime

    def wrong() -> float:
        return right() + float(struct.unpack(FORMAT, shared)[0])

    def wrong_ns() -> int:
        return right_ns() + int(struct.unpack(FORMAT, shared)[0] * 1e9)

    def wrong_of(id_: int) -> float:
        return right_of(id_) + float(struct.unpack(FORMAT, shared)[1])

    vars(scheduler)["SLEEP_SECS_MAX"] = LOOKS_SECS  # where compiled, they look when they always do
    time.time = clock.unix_time = wrong
    time.time_ns = clock.unix_time_ns = wrong_ns
    time.clock_gettime = wrong_of

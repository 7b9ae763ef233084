"""A mapping with thousands of routes comes into force while clients are served: how long it takes, and how
long any of them waits for an answer meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from tests.benchmarks import wires
from tests.benchmarks.report import Figure, median
from tests.benchmarks.sections.varied import MAPPING, OTHER
from tests.benchmarks.subjects import Gateway, SubjectError

ROUTES: Final = 5_000
SECS_MAX: Final = 10.0
WAIT_MS_MAX: Final = 100.0
GIVE_UP_SECS: Final = 120.0
PINGREQ: Final = b"\xc0\0"
PINGRESP: Final = b"\xd0\0"
TAKEN: Final = f'"routes":{ROUTES + 1}'  # in the line of the log that says so


def _mapping(routes: int) -> str:
    return MAPPING.format(others="".join(OTHER.format(number=number) for number in range(routes)))


def _reloaded(folder: Path) -> tuple[float, float]:
    """Seconds until the new mapping is in force, and the longest that a client waited for a PINGRESP."""
    folder.mkdir(parents=True)
    mapping = folder / "mapping.yaml"
    mapping.write_text(_mapping(0))
    longest = 0.0
    with (
        Gateway(folder / "gateway", mappings=[str(mapping)], log={"level": "info"}) as gateway,
        wires.mqtt_connect(gateway.mqtt_port, "waits") as sock,
    ):
        mapping.write_text(_mapping(ROUTES))
        begin = time.monotonic()
        os.kill(gateway.pid, signal.SIGHUP)
        while TAKEN not in gateway.said:
            asked = time.monotonic()
            if asked > begin + GIVE_UP_SECS:
                raise SubjectError(f"the mapping was not taken:\n{gateway.said[-2_000:]}")
            sock.sendall(PINGREQ)
            if sock.recv(len(PINGRESP)) != PINGRESP:
                raise SubjectError("no PINGRESP")
            longest = max(longest, time.monotonic() - asked)
        return time.monotonic() - begin, longest


def measure(folder: Path, repeat: int) -> list[Figure]:
    """Two figures, medians of `repeat` reloads."""
    found = [_reloaded(folder / str(number)) for number in range(repeat)]
    secs, waited = (median(values) for values in zip(*found, strict=True))
    name = f"reload of a mapping with {ROUTES} routes"
    ms = waited * 1000
    return [
        Figure(name, "s", secs, SECS_MAX, SECS_MAX / secs, 1.0),
        Figure("the longest wait of a client meanwhile", "ms", ms, WAIT_MS_MAX, WAIT_MS_MAX / ms, 1.0),
    ]

"""Memory that the system grants this process, and memory that it occupies.

A container may use what its control group allows (version 2: `memory.max`, version 1:
`memory.limit_in_bytes`, of its own group or one above it), but never more than the machine has. The watermark
itself, and its effects, are in `gateway/broker`.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.broker.memory import HeldPublisher, Memory, unlimited_memory
from gateway.settings import Limits

# RabbitMQ's value. The rest is for use above the watermark: data that was read already, connections that must
# not be paused, password hashing, the store's cache, and memory that the allocator cannot reuse.
SHARE: Final = 0.6
DEFINITIONS: Final = 4  # Divisor: names and arguments of definitions may occupy 25 % of the watermark.
GROUPS: Final = Path("/sys/fs/cgroup")
PROCESS: Final = Path("/proc/self")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def definition_bytes_max(limits: Limits, memory: Memory) -> int:
    """Return how many bytes the definitions of all clients, such as queues and subscriptions, may occupy."""
    return limits.definitions_bytes_max or memory.watermark // DEFINITIONS


def available(groups: Path = GROUPS, process: Path = PROCESS, machine: int | None = None) -> int:
    """Return how many bytes of memory this process may use.

    The result is the memory of the machine or, if lower, the lowest limit of the process's control groups.
    `groups` is the mount point of the control groups, `process` the process's folder in `/proc`. `machine` is
    the memory of the machine in bytes; with None it is read from the system.
    """
    if machine is None:
        machine = PAGE * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_allowed(groups, process)])


def _allowed(groups: Path, process: Path) -> Iterator[int]:
    """Yield the memory limits, in bytes, of this process's control groups and of the groups above them.

    Version 2 groups without a limit are skipped. Version 1 groups without a limit have a huge number.
    """
    with suppress(OSError):
        for line in (process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, name = (
                (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
            )
            group = root / path.lstrip("/")
            for one in (group, *group.parents):
                with suppress(OSError, ValueError):
                    yield int((one / name).read_text())
                if one == root:
                    break


def resident_reader(process: Path = PROCESS) -> Callable[[], int] | None:
    """Return a function that returns how many bytes of memory this process occupies (resident set size).

    Return None if the system has no file `statm`. The function has this file open as long as it exists.
    """
    try:
        descriptor = os.open(process / "statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None

    def resident() -> int:
        return int(os.pread(descriptor, 128, 0).split()[1]) * PAGE

    weakref.finalize(resident, os.close, descriptor)
    return resident


def trimmer() -> Callable[[], None] | None:
    """Return a function that makes glibc return free memory to the system, or None with another C library.

    Call the function in the event loop. In a thread, it would hold the lock of the allocator, the event loop
    would wait at its next allocation, and an innocent connection would be logged as slow.
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None

    def trim() -> None:
        malloc_trim(0)

    return trim


def watched_memory(
    watermark: int, changed: Callable[[bool], None], connections: Callable[[], Iterable[HeldPublisher]]
) -> Memory:
    """Return the object that compares the memory use of this process with `watermark`, in bytes.

    A watermark of 0 stands for the fraction SHARE of the available memory. `changed` is called with True when
    memory becomes short, and with False when it is available again. `connections` returns the connections
    that are paused while memory is short. Memory is unlimited if the system has no file `statm`.
    """
    resident = resident_reader()
    if resident is None:
        return unlimited_memory()
    return Memory(
        watermark or int(available() * SHARE),
        resident,
        trim=trimmer(),
        changed=changed,
        connections=connections,
    )

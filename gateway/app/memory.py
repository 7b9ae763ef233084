"""What the system says about memory: how much there is for this process, and how much it occupies.

A container has what its control group allows (version 2: `memory.max`, version 1: `memory.limit_in_bytes`, of
its own group or one above it), but never more than the machine has.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.broker.memory import Memory, Publisher, plenty
from gateway.settings import Limits

# RabbitMQ's share. The rest is for what goes on above the mark: what has been read already, connections that
# must not be stopped, hashing of passwords, the store's cache, and what the allocator cannot use again.
SHARE: Final = 0.6
DEFINITIONS: Final = 4  # a fourth of the mark is for the names and arguments of what clients define
GROUPS: Final = Path("/sys/fs/cgroup")
PROCESS: Final = Path("/proc/self")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def definition_octets_max(limits: Limits, memory: Memory) -> int:
    """Return how many bytes the definitions of all clients may occupy."""
    return limits.definitions_bytes_max or memory.mark // DEFINITIONS


def available(groups: Path = GROUPS, process: Path = PROCESS, machine: int | None = None) -> int:
    """Octets of memory that this process may come to use."""
    if machine is None:
        machine = PAGE * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_allowed(groups, process)])


def _allowed(groups: Path, process: Path) -> Iterator[int]:
    """The limits of every control group that this process is in. One that is not limited says `max`, or a
    number beyond all memory."""
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
    """What reads the octets that this process occupies, from a file that is open for as long as it is; None
    where the system has no such file."""
    try:
        descriptor = os.open(process / "statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None

    def resident() -> int:
        return int(os.pread(descriptor, 128, 0).split()[1]) * PAGE

    weakref.finalize(resident, os.close, descriptor)
    return resident


def trimmer() -> Callable[[], None] | None:
    """What has glibc return all that is free; None where there is another library.

    To call it in a thread would not spare the loop: it has the allocator locked for as long as it takes, so
    that the next body or read waits for it, and its connection would be blamed for the long turn.
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None

    def trim() -> None:
        malloc_trim(0)

    return trim


def watched_memory(
    mark: int, changed: Callable[[bool], None], connections: Callable[[], Iterable[Publisher]]
) -> Memory:
    """The watermark of this process at `mark` octets; 0: at its share of what there is."""
    resident = resident_reader()
    if resident is None:
        return plenty()
    return Memory(
        mark or int(available() * SHARE),
        resident,
        trim=trimmer(),
        changed=changed,
        connections=connections,
    )

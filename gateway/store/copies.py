"""Lock that tells a running gateway that another process copies its store, as a backup does.

The process that copies holds a shared lock of `gateway.heap` (flock). It takes the lock before it opens its
view of the database. Until it ends, the gateway neither writes over the place of a large row that it no
longer needs, nor deletes a body in a file, because the copy may name them. The lock of a dead process has no
effect.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_copied(descriptor: int) -> bool:
    """Return True if a process copies the store of this open heap file.

    May also return True for a moment while another thread of this gateway calls it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_store_copied(heap: Path) -> bool:
    """Return True if a process copies the store with this heap file; False if there is no such file."""
    try:
        descriptor = os.open(heap, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_copied(descriptor)
    finally:
        os.close(descriptor)


def lock_for_copy(descriptor: int) -> None:
    """Tell the gateway that its store is copied, until the descriptor of its heap file is closed."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)

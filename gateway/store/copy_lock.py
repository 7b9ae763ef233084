"""Lock that tells a running gateway that another process copies its store, as a backup does.

The copying process holds a shared lock (flock) of the file `gateway.heap`. It takes the lock before it begins
its read transaction. While the lock is held, the gateway neither overwrites the space of large rows that it
no longer needs nor deletes body files, because the copied database may refer to them. The lock ends with the
process that holds it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_copied(descriptor: int) -> bool:
    """Return True if another process is copying the store.

    `descriptor` is the file descriptor of the store's open heap file. May also return True for a moment while
    another thread of this gateway calls this function.
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
    """Take the lock that marks a store as being copied.

    `descriptor` is the file descriptor of the store's open heap file; closing it releases the lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH)

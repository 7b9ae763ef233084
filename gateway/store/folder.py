"""Folder of the store: a lock for one gateway at a time, and disk space reserved for a full disk.

Settling messages frees space, but SQLite must write in order to delete. A reserve file is therefore allocated
at the start and deleted when the disk is full. The store is healthy again only when the reserve file can be
allocated again.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.errors import StoreError

LOCK: Final = "gateway.lock"
RESERVE: Final = "gateway.reserve"
PAGE_BYTES: Final = 4_096
LOG_PAGES_MAX: Final = 1_000  # SQLite's own default
_BLOCK: Final = bytes(65_536)


def fault(folder: Path) -> str:
    """Return the reason why this process cannot use or create the store's folder, or "" if it can."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    user = f"user id {os.geteuid()}"
    if not there.is_dir():
        return f"{there} is a file, not a folder"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{there} is on a file system that is mounted read-only"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written by {user}"
    lock = folder / LOCK
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        return f"{lock} cannot be written by {user}; it belongs to another user"
    return ""


class FolderLock:
    """Lock of the store's folder for this process until `release`; it ends with the process, too."""

    def __init__(self, folder: Path) -> None:
        """Create the folder (mode 0700) and lock it. Raises StoreError if it is not writable or is in use."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"the store's folder {folder} cannot be used: {fault(folder) or error.strerror}."
                " Correct that, or set store.path to another folder"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StoreError(
                f"the store's folder {folder} is used by another gateway, process "
                f"{owner or 'unknown'}. Stop that gateway, or set store.path to another folder"
            ) from error
        self._sign()

    def _sign(self) -> None:
        """Write the process id into the lock file."""
        with suppress(OSError):  # the process id is for people only; the disk may be full
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


class Reserve:
    """Reserve file of `byte_count` bytes, deleted when the disk is full to make its space available."""

    def __init__(self, folder: Path, byte_count: int) -> None:
        self._path = folder / RESERVE
        self._byte_count = byte_count

    @property
    def pages(self) -> int:
        """Maximum length of the database's write-ahead log, in pages.

        A checkpoint may need the size of the log a second time, so both must fit into the reserved space.
        """
        return max(min(self._byte_count // 2 // PAGE_BYTES, LOG_PAGES_MAX), 1)

    def allocate(self) -> bool:
        """Allocate the reserve file. Return False if the disk has too little space."""
        try:
            if self._path.exists() and self._path.stat().st_size == self._byte_count:
                return self.has_space()
            if not self.has_space(self._byte_count):
                return False
            self._path.touch(mode=0o600)
            with self._path.open("wb") as file:
                for _ in range(0, self._byte_count - len(_BLOCK) + 1, len(_BLOCK)):
                    file.write(_BLOCK)
                file.write(bytes(self._byte_count % len(_BLOCK)))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.delete()
            return False
        return True

    def has_space(self, more: int = 0) -> bool:
        """Return True if a write-ahead log of maximum length and `more` further bytes fit on the disk."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize >= more + self._byte_count // 2

    def delete(self) -> None:
        """Delete the reserve file, so that the database can use its space."""
        with suppress(OSError):  # a disk that has become read-only: the next probe reports it
            self._path.unlink()


def sync_path(path: Path) -> None:
    """Flush a file, or the list of files in a folder, to the disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The folder of the store: one gateway at a time, and some space put by for a full disk.

Settling messages is what makes room, but SQLite must write in order to delete. So some octets are kept in a
file of their own, and given up when the disk is full; only when they can be had again is the store healthy.
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
PAGE_OCTETS: Final = 4_096
LOG_PAGES_MAX: Final = 1_000  # SQLite's own default
_BLOCK: Final = bytes(65_536)


def fault(folder: Path) -> str:
    """Why this process cannot keep its files in the folder, or make it; "" when nothing speaks against it."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    user = f"this user (number {os.geteuid()})"
    if not there.is_dir():
        return f"{there} is a file, not a folder"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{there} is on a file system that is mounted read-only"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written by {user}"
    lock = folder / LOCK
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        return f"{lock} cannot be written by {user}; it is another one's"
    return ""


class FolderLock:
    """Holds the folder for this process until `release`; the lock of a process that died is void."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder (0700). Raises StoreError when it cannot be written or is in use."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"the store's folder {folder} cannot be used: {fault(folder) or error.strerror}; "
                "mend that, or name another folder in store.path"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StoreError(
                f"the store's folder {folder} is used by another gateway, process {owner or 'unknown'}: "
                "stop that one, or name another folder in store.path"
            ) from error
        self._sign()

    def _sign(self) -> None:
        with suppress(OSError):  # the number of our process is for people only; the disk may be full
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have the folder."""
        os.close(self._descriptor)


class Reserve:
    """`octets` of disk space in a file."""

    def __init__(self, folder: Path, octets: int) -> None:
        self._path = folder / RESERVE
        self._octets = octets

    @property
    def pages(self) -> int:
        """How long the database's log may become: what it holds must fit into the space a second time."""
        return max(min(self._octets // 2 // PAGE_OCTETS, LOG_PAGES_MAX), 1)

    def take(self) -> bool:
        """Make sure of the space. False: the disk has not that much."""
        try:
            if self._path.exists() and self._path.stat().st_size == self._octets:
                return self.plenty()
            if not self.plenty(self._octets):
                return False
            self._path.touch(mode=0o600)
            with self._path.open("wb") as file:
                for _ in range(0, self._octets - len(_BLOCK) + 1, len(_BLOCK)):
                    file.write(_BLOCK)
                file.write(bytes(self._octets % len(_BLOCK)))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.give_up()
            return False
        return True

    def plenty(self, more: int = 0) -> bool:
        """Whether a log of full length still fits beside `more` octets."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize >= more + self._octets // 2

    def give_up(self) -> None:
        """Let the database have the space."""
        with suppress(OSError):  # a disk that has become read-only: the next probe says so
            self._path.unlink()

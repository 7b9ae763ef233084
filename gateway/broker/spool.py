"""Spool: folder for bodies that are too large to be held in memory.

A body is written as it arrives, and stays until nothing needs it. Everything that needs it has its SpoolFile:
messages that wait or are being delivered, durable queues for what they have on disk (bodies.py), interrupted
transfers (amqpfast/partials.py). When the last reference is dropped, the file is deleted; not at once,
because deleting a large file takes time, but by `delete_unreferenced` in a thread. Files of a gateway that
was killed are deleted by the next one, unless something stored refers to them. While another process copies
the store, no file is deleted. File descriptors are open only while a file
is written or read, because clients may have any number of transfers in progress.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary, finalize, ref

import structlog

from gateway import clock
from gateway.errors import GatewayError, StoreError
from gateway.model.shares import UserShares
from gateway.model.spooled_bodies import Spooled
from gateway.model.times import Monotonic
from gateway.store.copy_lock import is_store_copied
from gateway.store.folder import sync_path
from gateway.store.gate import Gate
from gateway.store.group import RUN_BYTES_MAX
from gateway.store.heap import HEAP

log = structlog.get_logger(limited=True)

SUFFIX: Final = ".body"
RETRY_SECS: Final = 1.0  # until a body is read again that could not be
# Smaller bodies are always held in memory: the store has separate rows for larger ones only.
SPOOLED_BYTES_MIN: Final = RUN_BYTES_MAX + 1
OWNED: Final = "-"  # in a file's name, before the digest of the user who sent the body
OWNER_BYTES: Final = 8
PIECE_BYTES: Final = 1_048_576  # bytes hashed at once
GATHERED_MAX: Final = 64  # pieces written in one call; systems allow 1 024


class SpoolFull(GatewayError):
    """Error of a write to the spool: the disk or a limit leaves no space."""


class OpenFile:
    """File descriptor for reading a spooled file.

    The descriptor is closed when this object is deleted. It stays open while parts of the body wait to be
    sent to a socket.
    """

    __slots__ = ("__weakref__", "_descriptor")

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # false if opening failed
            os.close(self._descriptor)

    def send(self, descriptor: int, at: int, count: int) -> int:
        """Send up to `count` bytes of the file, from offset `at` on, to a socket without copying them.

        `descriptor` is the socket's. Return the number of bytes that the socket accepted. Raises OSError.
        """
        return os.sendfile(descriptor, self._descriptor, at, count)


class SpoolFile:
    """Reference to a file in the spool, which has a body, or its first part, of `size` bytes.

    The file is deleted when the reference is dropped, unless `preserve` was called.
    """

    def __init__(self, spool: Spool, name: str, size: int, user: str = "") -> None:
        """Create the reference to the file `name` of `size` bytes.

        The name contains the digest of the user who sent the body (`owner_in`); `user` is for the log.
        """
        self.name = name
        self.size = size
        self.owner = owner_in(name)
        self._user = user
        self.checked = b""  # SHA-1 of the body, if its sender gave it and it was verified
        self._spool = spool
        self._path = spool.folder / name
        self._opened: ref[OpenFile] | None = None
        self._finalize = finalize(self, spool.unreferenced_names.append, name)
        self._finalize.atexit = False

    def write(self, *data: bytes | bytearray | memoryview) -> None:
        """Append bytes to the file. Raises SpoolFull; the bytes that fitted stay in the file."""
        spool = self._spool
        views = [memoryview(one) for one in data if one]
        spool.check_room(sum(map(len, views)), self._user, self.owner)
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while views:
                    count = os.pwritev(descriptor, views[:GATHERED_MAX], self.size)
                    self.size += count
                    spool.count(count, self.owner)
                    while views and count >= len(views[0]):
                        count -= len(views.pop(0))
                    if count:
                        views[0] = views[0][count:]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SpoolFull(f"the spool cannot be written: {error.strerror}") from error

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from `at` on, fewer at the end. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, count, at)
        finally:
            os.close(descriptor)

    def open_file(self) -> OpenFile:
        """Return an open descriptor of the file, shared by all sockets that use it. Raises OSError."""
        found = None if self._opened is None else self._opened()
        if found is None:
            found = OpenFile(self._path)
            self._opened = ref(found)
        return found

    def body(self) -> bytes:
        """Return the body as bytes if it is small, otherwise as a reference to this file. Raises OSError."""
        whole = Spooled(self, self.size)
        return whole if self.size >= SPOOLED_BYTES_MIN else whole.data()

    def sync(self) -> None:
        """Flush the file to the disk, and wait for it. Raises OSError."""
        for path in (self._path, self._path.parent):
            sync_path(path)

    def digest(self) -> bytes:
        """Return the SHA-1 digest of the body, which takes long for a large one. Raises OSError."""
        found = hashlib.sha1(usedforsecurity=False)
        with self._path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                found.update(piece)
        return found.digest()

    def preserve(self) -> None:
        """Prevent the deletion of the file when this reference is dropped.

        The next gateway process decides whether the file is needed.
        """
        self._finalize.detach()


def owner_of(user: str) -> str:
    """Return the digest of a user for file names; "" for clients without a user name."""
    if not user:
        return ""
    return hashlib.blake2b(user.encode(errors="replace"), digest_size=OWNER_BYTES).hexdigest()


def owner_in(name: str) -> str:
    """Return the digest of the user in a file's name; "" for clients without a user name."""
    return name.removesuffix(SUFFIX).partition(OWNED)[2]


class Spool:
    """Folder of bodies that are too large for memory.

    `used_bytes` is the size of its files, and `reserved_bytes` the size of bodies in memory. The files count
    toward the limits in `shares` for the users who sent them. The name of a file contains a digest of the
    user, so that the next gateway process can assign the file to the same user.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        bytes_max: int,
        memory_bytes_max: int,
        memory_total_max: int,
        shares: UserShares | None = None,
    ) -> None:
        """Open the folder; None creates a temporary folder for this process when it is needed.

        `bytes_max` limits the bytes of the folder; `shares` replaces it and has a limit for each user, too.
        `memory_bytes_max` limits one body in memory, and `memory_total_max` all of them. Raises StoreError.
        """
        self.is_persistent = folder is not None
        self.shares = shares or UserShares(
            "spooled bodies", bytes_max=bytes_max, bytes_option="limits.spool_bytes_max"
        )
        self.reserved_bytes = 0
        self.reads = Gate()  # shut while deliveries wait because a body could not be read
        self.unread_count = 0  # deliveries that had to wait
        self._retry_at: Monotonic | None = None  # while the gate is shut
        self.unreferenced_names: deque[str] = deque()  # names of unreferenced files
        self._copied: deque[str] = deque()  # those that a copy of the store may need
        self._memory_max = memory_bytes_max
        self._memory_total_max = memory_total_max
        self._lock = threading.Lock()  # the thread of the store looks up files, too
        self.files: WeakValueDictionary[str, SpoolFile] = WeakValueDictionary()
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise StoreError(f"the folder {folder} cannot be created: {error.strerror}") from error

    @property
    def folder(self) -> Path:
        """Path of the folder, created if necessary. Raises SpoolFull if it cannot be created."""
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="gateway-spool-"))
            except OSError as error:
                raise SpoolFull(f"no temporary folder can be created: {error.strerror}") from error
        return self._folder

    def reserve(self, size: int) -> bool:
        """Reserve memory for a body of `size` bytes; `release_reservation` ends that.

        Return False, without a reservation, if the body must be written to disk.
        """
        with self._lock:
            fits = size <= self._memory_max and self.reserved_bytes + size <= self._memory_total_max
            if fits or size < SPOOLED_BYTES_MIN:
                self.reserved_bytes += size
                return True
            return False

    def release_reservation(self, size: int) -> None:
        """Release the memory reserved for a body of `size` bytes."""
        with self._lock:
            self.reserved_bytes -= size

    def delay_reads(self, why: str) -> Gate:
        """Count and log a body that cannot be read from disk now, for the reason `why`.

        Return the gate that opens when the read can be tried again.
        """
        self.unread_count += 1
        if not self.reads.shut:
            self.reads.close()
            self._retry_at = clock.now() + RETRY_SECS
        log.warning("body on disk unreadable, delivery delayed", why=why)
        return self.reads

    def tick(self) -> None:
        """Open the gate of delayed reads when it is time to try again; called regularly."""
        if self._retry_at is not None and clock.now() >= self._retry_at:
            self._retry_at = None
            self.reads.open()

    @property
    def used_bytes(self) -> int:
        """Size in bytes of the files in the folder."""
        return self.shares.total

    def check_room(self, byte_count: int, user: str = "", owner: str | None = None) -> None:
        """Raise SpoolFull if `byte_count` more bytes would exceed the limit of all users or of `user`.

        `owner` is the digest of the user, if it is known.
        """
        with self._lock:
            shares = self.shares
            if limit := shares.refuse_if_full(owner_of(user) if owner is None else owner, byte_count, 0):
                shares.last_user = user
                raise SpoolFull(f"{limit} would be exceeded")

    def count(self, byte_count: int, owner: str) -> None:
        """Add `byte_count` bytes in the folder to the usage of the user with the digest `owner`."""
        with self._lock:
            self.shares.add(owner, byte_count, 0)

    def draft(self, user: str = "") -> SpoolFile:
        """Return a new file for a body that `user` begins to send. Its bytes count against the user's limit.

        Raises SpoolFull.
        """
        owner = owner_of(user)
        name = secrets.token_hex(16) + (OWNED + owner if owner else "") + SUFFIX
        return self._register(SpoolFile(self, name, 0, user))

    def open_stored(self, name: str, size: int | None = None) -> SpoolFile:
        """Return the file with this name, to which a stored record refers.

        `size` is the expected size in bytes; None accepts any. Raises StoreError if the file is missing or
        has another size.
        """
        with self._lock:
            found = self.files.get(name)
        if found is None:
            found = SpoolFile(self, name, self._size(name))
            if size is not None and found.size != size:
                found.preserve()
                raise StoreError(f"{self.folder / name} has {found.size} bytes, not {size}")
            self._register(found)
        return found

    def _register(self, file: SpoolFile) -> SpoolFile:
        with self._lock:
            self.files[file.name] = file
        return file

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except OSError as error:
            raise StoreError(f"{self.folder / name} cannot be opened: {error.strerror}") from error

    def stored_body(self, name: str, size: int) -> Spooled:
        """Return the body in the file `name`, to which a stored message refers. Raises StoreError."""
        return Spooled(self.open_stored(name, size), size)

    def sweep(self) -> None:
        """Delete the files to which nothing stored refers, at the start.

        Must be called after all stored references were restored with `open_stored`. While another process
        copies the store, the files are left to `delete_unreferenced`.
        """
        if not self.is_persistent:
            return
        is_copied = self._is_copied()
        for path in self.folder.glob("*" + SUFFIX):
            size = path.stat().st_size
            if path.name not in self.files and not is_copied:
                path.unlink()
                continue
            self.count(size, owner_in(path.name))
            if path.name not in self.files:
                self._copied.append(path.name)

    def delete_unreferenced(self) -> None:
        """Delete the files to which no reference is left. Takes long, so it runs in a thread.

        While another process copies the store, the files stay, and a later call deletes them.
        """
        if self._is_copied():
            while self.unreferenced_names:
                self._copied.append(self.unreferenced_names.popleft())
            return
        while self._copied:
            self.unreferenced_names.append(self._copied.popleft())
        while True:
            try:
                name = self.unreferenced_names.popleft()
            except IndexError:
                return
            with self._lock:
                if name in self.files:  # it was recalled since, and is unreferenced again later
                    continue
            path = self.folder / name
            with suppress(FileNotFoundError):  # nothing was written to it yet
                size = path.stat().st_size
                path.unlink()
                with self._lock:
                    self.shares.remove(owner_in(name), size, 0)

    def _is_copied(self) -> bool:
        return self._folder is not None and self.is_persistent and is_store_copied(self._folder.parent / HEAP)

    def close(self) -> None:
        """Close the spool: files that stored messages refer to stay, and a temporary folder is deleted."""
        if self._folder is None:
            return
        self.delete_unreferenced()
        for file in list(self.files.values()):
            file.preserve()
        if not self.is_persistent:
            shutil.rmtree(self.folder, ignore_errors=True)

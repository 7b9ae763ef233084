"""The folder of bodies that are too large to be held in memory.

A body is written as it comes, and stays where it is until nobody needs it. Whoever does has its SpoolFile:
messages that wait or are being delivered, durable queues for what they have on disk (bodies.py), transfers
that were broken off (amqpfast/partials.py). When the last one has let go, the file is removed: not at once,
for removing a large one takes its time, but by `bury`, in a thread. What a gateway leaves that was killed is
removed by the next one, unless something stored refers to it.

No descriptor is kept while nothing is written or read, for clients may have as many transfers under way as
they like.
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

from gateway.errors import GatewayError, StoreError
from gateway.model.shares import UserShares
from gateway.model.spooled import Spooled
from gateway.store.group import RUN_OCTETS_MAX

SUFFIX: Final = ".body"
# Smaller bodies are always held: the store has rows of its own for larger ones only.
SPOOLED_OCTETS_MIN: Final = RUN_OCTETS_MAX + 1
OWNED: Final = "-"  # in a file's name, before the digest of the user who sent the body
OWNER_OCTETS: Final = 8
PIECE_OCTETS: Final = 1_048_576  # hashed at a time
GATHERED_MAX: Final = 64  # pieces written in one call; systems allow 1 024


class SpoolFull(GatewayError):
    """There is no room for more on the disk, or not so much is allowed."""


class OpenFile:
    """A descriptor to read from, as long as this object is there: while parts of a body wait for a socket."""

    __slots__ = ("__weakref__", "_descriptor")

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # or it was not opened
            os.close(self._descriptor)

    def send(self, descriptor: int, at: int, count: int) -> int:
        """Hand `count` octets from `at` on to a socket, past this process; returns how many it took.

        Raises OSError.
        """
        return os.sendfile(descriptor, self._descriptor, at, count)


class SpoolFile:
    """One body, or the beginning of one: `size` octets."""

    def __init__(self, spool: Spool, name: str, size: int, user: str = "") -> None:
        """`name` says whose share it is in (`owner_in`); `user` is the name of that user, for the log."""
        self.name = name
        self.size = size
        self.owner = owner_in(name)
        self._user = user
        self.checked = b""  # the SHA-1 of all of it, if its sender said it and it was found right
        self._spool = spool
        self._path = spool.folder / name
        self._opened: ref[OpenFile] | None = None
        self._finalize = finalize(self, spool.dead.append, name)
        self._finalize.atexit = False

    def write(self, *octets: bytes | bytearray | memoryview) -> None:
        """Append to it. Raises SpoolFull; what did fit counts."""
        spool = self._spool
        views = [memoryview(one) for one in octets if one]
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
        """`count` octets from `at` on, fewer at the end. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, count, at)
        finally:
            os.close(descriptor)

    def opened(self) -> OpenFile:
        """For a socket to read; the same as long as somebody has it. Raises OSError."""
        found = None if self._opened is None else self._opened()
        if found is None:
            found = OpenFile(self._path)
            self._opened = ref(found)
        return found

    def body(self) -> bytes:
        """The body that it is; in memory, if it is small. Raises OSError."""
        whole = Spooled(self, self.size)
        return whole if self.size >= SPOOLED_OCTETS_MIN else whole.octets()

    def sync(self) -> None:
        """Have it survive a loss of power; waits for the disk. Raises OSError."""
        for path in (self._path, self._path.parent):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def digest(self) -> bytes:
        """SHA-1 of all of it; takes its time. Raises OSError."""
        found = hashlib.sha1(usedforsecurity=False)
        with self._path.open("rb") as file:
            while piece := file.read(PIECE_OCTETS):
                found.update(piece)
        return found.digest()

    def keep(self) -> None:
        """Whether it is needed is for the next gateway to say: it stays."""
        self._finalize.detach()


def owner_of(user: str) -> str:
    """Return the digest by which the names of files tell whose they are; "" for clients without a name."""
    if not user:
        return ""
    return hashlib.blake2b(user.encode(errors="replace"), digest_size=OWNER_OCTETS).hexdigest()


def owner_in(name: str) -> str:
    """Return the owner in a file's name; "" for files of clients without a name and of older gateways."""
    return name.removesuffix(SUFFIX).partition(OWNED)[2]


class Spool:
    """The folder. `used` are the bytes in it, `held` those reserved for bodies that arrive in memory.

    Its bytes are counted in `shares` for the users who sent them. A file's name has a digest of the user, so
    that the next gateway counts the same.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        octets_max: int,
        memory_octets_max: int,
        memory_total_max: int,
        shares: UserShares | None = None,
    ) -> None:
        """Without a folder there will be one for this process alone. `shares` has the limit `octets_max` with
        the part that one user may have. Raises StoreError."""
        self.lasting = folder is not None
        self.shares = shares or UserShares(
            "spooled bodies", octets_max=octets_max, octets_option="limits.spool_bytes_max"
        )
        self.held = 0
        self.dead: deque[str] = deque()  # names of files that nobody needs any more
        self._memory_max = memory_octets_max
        self._memory_total_max = memory_total_max
        self._lock = threading.Lock()  # the thread of the store looks files up, too
        self.files: WeakValueDictionary[str, SpoolFile] = WeakValueDictionary()
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise StoreError(f"the folder {folder} cannot be made: {error.strerror}") from error

    @property
    def folder(self) -> Path:
        """Where the files are. Raises SpoolFull when it has to be made and cannot."""
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="gateway-spool-"))
            except OSError as error:
                raise SpoolFull(f"no folder can be made: {error.strerror}") from error
        return self._folder

    def hold(self, size: int) -> bool:
        """Whether a body of `size` octets may arrive in memory; it is counted until `let_go`."""
        with self._lock:
            fits = size <= self._memory_max and self.held + size <= self._memory_total_max
            if fits or size < SPOOLED_OCTETS_MIN:
                self.held += size
                return True
            return False

    def let_go(self, size: int) -> None:
        """It has arrived, or never will."""
        with self._lock:
            self.held -= size

    @property
    def used(self) -> int:
        """Bytes in the folder."""
        return self.shares.total

    def check_room(self, octets: int, user: str = "", owner: str | None = None) -> None:
        """Raises SpoolFull when there is no room for so much, or not in that user's share. `owner` is the
        digest of the user, if it is known."""
        with self._lock:
            shares = self.shares
            if limit := shares.full_with(owner_of(user) if owner is None else owner, octets, 0):
                shares.last_user = user
                raise SpoolFull(f"{limit} would be exceeded")

    def count(self, octets: int, owner: str) -> None:
        """So many bytes more of this owner are in the folder."""
        with self._lock:
            self.shares.add(owner, octets, 0)

    def draft(self, user: str = "") -> SpoolFile:
        """A file for a body that begins to arrive, in the share of the user who sends it. Raises
        SpoolFull."""
        owner = owner_of(user)
        name = secrets.token_hex(16) + (OWNED + owner if owner else "") + SUFFIX
        return self._enter(SpoolFile(self, name, 0, user))

    def recall(self, name: str, size: int | None = None) -> SpoolFile:
        """The file that something stored refers to; None: what is there of it. Raises StoreError."""
        with self._lock:
            found = self.files.get(name)
        if found is None:
            found = SpoolFile(self, name, self._size(name))
            if size is not None and found.size != size:
                found.keep()
                raise StoreError(f"{self.folder / name} has {found.size} octets, not {size}")
            self._enter(found)
        return found

    def _enter(self, file: SpoolFile) -> SpoolFile:
        with self._lock:
            self.files[file.name] = file
        return file

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except OSError as error:
            raise StoreError(f"{self.folder / name} is gone: {error.strerror}") from error

    def recall_body(self, name: str, size: int) -> Spooled:
        """The body that a stored message has in a file. Raises StoreError."""
        return Spooled(self.recall(name, size), size)

    def sweep(self) -> None:
        """Everything that is stored has been recalled: remove the others."""
        if not self.lasting:
            return
        for path in self.folder.glob("*" + SUFFIX):
            size = path.stat().st_size
            if path.name in self.files:
                self.count(size, owner_in(path.name))
            else:
                path.unlink()

    def bury(self) -> None:
        """Remove the files that nobody needs any more; takes its time."""
        while True:
            try:
                name = self.dead.popleft()
            except IndexError:
                return
            path = self.folder / name
            with suppress(FileNotFoundError):  # nothing had come of it yet
                size = path.stat().st_size
                path.unlink()
                with self._lock:
                    self.shares.remove(owner_in(name), size, 0)

    def close(self) -> None:
        """The gateway ends: what is stored stays, also when those who need it are forgotten."""
        if self._folder is None:
            return
        self.bury()
        for file in list(self.files.values()):
            file.keep()
        if not self.lasting:
            shutil.rmtree(self.folder, ignore_errors=True)

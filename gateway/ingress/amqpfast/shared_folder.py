"""Out-of-band transfers: bodies as files in a folder that client and gateway share (3.3.2, 3.5.3.1).

The listener's configuration names a folder. CHANNEL OPEN names the same folder, or a folder directly in it,
as `file:` and the path; one channel at a time may use it. Where roles are configured, they say which folders
a user may name. The names of the files are fixed:

- `HANDLE-N.send` is the N-th out-of-band fragment, from 1, that the client sends on a handle of the channel:
  the file is complete before its SEND, has exactly `fragment-size` bytes, begins with the content header if
  it is the first fragment, and is removed by the gateway after reading.
- `NUMBER.notify` is the message of that number, header and body, for the client to remove. Remaining files
  are removed when the channel is closed.

The gateway opens only names built from numbers, and follows no symbolic links, so no other file is reachable.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gateway.model.spooled_bodies import Spooled

SCHEME: Final = "file:"
OWN_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
FILE_MODE: Final = 0o660
PIECE_BYTES: Final = 1_048_576
PRUNED_MIN: Final = 1_000  # names of files, before those that the client has removed are dropped
READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def negotiated_folder(text: str, folder: Path) -> Path | None:
    """Return the folder that an out-of-band string (such as `file:/shared/orders`) names.

    Return None unless it is `folder` itself or directly in it.
    """
    path = text.removeprefix(SCHEME)
    base = str(folder.absolute())
    if path == base:
        return Path(base)
    parent, _, name = path.rpartition("/")
    return Path(path) if parent == base and OWN_NAME.fullmatch(name) else None


def name_in(path: Path, folder: Path) -> str:
    """Return the name of an agreed path in `folder`, or "" for `folder` itself."""
    return "" if path == folder.absolute() else path.name


class SharedFolder:
    """Shared folder of one channel. Its methods block on file access: call them in a thread."""

    def __init__(self, path: Path) -> None:
        """Check that `path` is a folder. Raises OSError if it is not."""
        self.path = path
        self._fragment_counts: dict[int, int] = {}  # fragments by handle
        self._put: set[str] = set()  # names of messages that the client may not have removed yet
        self._prune_at = PRUNED_MIN
        self._is_closed = False
        descriptor = os.open(path, FOLDER)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        self.identity = found.st_dev, found.st_ino  # whatever its path

    def next_name(self, handle: int) -> str:
        """Return the name of the file with the client's next fragment on `handle`."""
        count = self._fragment_counts[handle] = self._fragment_counts.get(handle, 0) + 1
        return f"{handle}-{count}.send"

    @contextmanager
    def reading(self, name: str, size: int) -> Iterator[int]:
        """Open a file of exactly `size` bytes, yield its descriptor, then remove the file.

        The file stays if the caller raises an error. Raises OSError if the file is missing, has another size,
        or is not a plain file with one link.
        """
        folder = os.open(self.path, FOLDER)
        try:
            descriptor = os.open(name, READ, dir_fd=folder)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                    raise OSError(f"{name} is not a regular file")
                if found.st_size != size:
                    raise OSError(f"{name} has {found.st_size} bytes, not {size}")
                yield descriptor
            finally:
                os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def put(self, number: int, head: bytes, body: bytes) -> None:
        """Write message `number` as a file for the client. Raises OSError.

        `head` is the content header with the body size. An old file of this name, from a process that was
        killed, is replaced. If the channel is closed meanwhile, the file is removed again.
        """
        name = f"{number}.notify"
        folder = os.open(self.path, FOLDER)
        try:
            if name not in self._put:
                _remove_left(name, folder)
            descriptor = os.open(name, WRITE, FILE_MODE, dir_fd=folder)
            self._put.add(name)
            self._prune(folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(head)
                if isinstance(body, Spooled):
                    for at in range(0, body.size, PIECE_BYTES):
                        file.write(body.read(at, min(PIECE_BYTES, body.size - at)))
                else:
                    file.write(body)
                if self._is_closed:
                    _remove_same(file.fileno(), name, folder)
        except OSError:
            if name in self._put:  # it may be written again
                os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(folder)

    def _prune(self, folder: int) -> None:
        """Forget the names of messages that the client has removed, so that the set does not grow forever.

        `folder` is a descriptor of the folder. Nothing is done until the set is twice as large as after the
        last time.
        """
        if len(self._put) >= self._prune_at:
            self._put.intersection_update(os.listdir(folder))
            self._prune_at = max(2 * len(self._put), PRUNED_MIN)

    def close(self) -> None:
        """Remove the messages that the client has not removed, because the channel is closed.

        A message that a thread is writing meanwhile is removed by that thread.
        """
        self._is_closed = True
        try:
            folder = os.open(self.path, FOLDER)
        except OSError:
            return  # the client has removed the folder
        for name in list(self._put):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
        os.close(folder)


def _remove_left(name: str, folder: int) -> None:
    """Remove the plain file `name`, which an earlier channel has left in the folder; keep anything else.

    `folder` is a descriptor of the folder.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)


def _remove_same(descriptor: int, name: str, folder: int) -> None:
    """Remove the file `name` if it is the open file `descriptor`, not the file of a later channel.

    `folder` is a descriptor of the folder.
    """
    with suppress(FileNotFoundError):
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if os.path.samestat(os.fstat(descriptor), there):
            os.unlink(name, dir_fd=folder)

"""Bodies of messages that stay on disk, because they are too large for memory.

`len()` of such a body is its size; code that uses its content as `bytes` finds it empty. Code that inspects
bodies (conditions, the journal) ignores bodies of this size, since it has size limits of its own. Code that
forwards bodies checks the type first.
"""

from __future__ import annotations

from errno import ENOENT
from typing import Final, NamedTuple, Protocol

APART_BYTES_MIN: Final = 32_768  # bytes; copying a smaller body into its frame costs less
LOST: Final = (None, ENOENT)  # error numbers of reading a body that is too short or missing


class OpenBody(Protocol):
    """Body on disk whose file stays open as long as this object exists."""

    def send(self, descriptor: int, at: int, count: int) -> int:
        """Send `count` bytes from offset `at` to the socket `descriptor`. Raises OSError.

        Return the number of bytes that the socket accepted.
        """


class BodyFile(Protocol):
    """Body in a store on disk; the stored bytes are deleted when this object is destroyed."""

    @property
    def name(self) -> str:
        """Identifier of the body in its store."""

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from offset `at`, fewer at the end. Raises OSError."""

    def open_file(self) -> OpenBody:
        """Open the body for sending to a socket. Raises OSError."""

    def preserve(self) -> None:
        """Make the stored bytes outlive this object, which otherwise deletes them when it is destroyed."""

    @property
    def checked(self) -> bytes:
        """SHA-1 digest of the bytes if the sender stated a digest and it matched; otherwise b""."""


class BodySink(Protocol):
    """Receiver of a large body as it arrives."""

    def write(self, data: bytes) -> None:
        """Append the next bytes. Raises RemoteProtocolError if there is no space for them."""

    def finish(self) -> bytes:
        """Return the complete body, possibly Spooled. Raises RemoteProtocolError if it cannot be read."""


class Spooled(bytes):
    """Message body of `size` bytes in `file`."""

    file: BodyFile
    size: int

    def __new__(cls, file: BodyFile, size: int) -> Spooled:
        """Create a body of `size` bytes in `file`, without reading the file."""
        made = super().__new__(cls)
        made.file = file
        made.size = size
        return made

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spooled) and other.file.name == self.file.name

    def __hash__(self) -> int:
        return hash(self.file.name)

    def __repr__(self) -> str:
        return f"Spooled({self.file.name!r}, {self.size})"

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from offset `at`, fewer at the end. Raises OSError."""
        return self.file.read(at, count)

    def data(self) -> bytes:
        """Read the whole body into memory and return it.

        Raises OSError, also if the file is shorter than it was.
        """
        found = self.read(0, self.size)
        if len(found) != self.size:
            raise OSError(f"{self.file.name} has {len(found)} bytes, not {self.size}")
        return found

    def check(self) -> None:
        """Raise OSError if the file is missing, or shorter than it was."""
        if self.size and not self.read(self.size - 1, 1):
            raise OSError(f"{self.file.name} was truncated")

    def piece(self, at: int, count: int) -> SpooledPiece:
        """Return `count` bytes from offset `at` as a piece that is read from disk when sent.

        Raises OSError.
        """
        return SpooledPiece(self.file, at, count)


class DiscardedBody(bytes):
    """Placeholder for a message body of `size` bytes that was too large and has been discarded.

    Unlike a body on disk (`Spooled`), it has no content, and `len()` of it is 0.
    """

    size: int

    def __new__(cls, size: int) -> DiscardedBody:
        """Create the placeholder of a body of `size` bytes."""
        made = super().__new__(cls)
        made.size = size
        return made


class WithheldBody(Spooled):
    """Placeholder for a message body whose size is shown to a reader who may not see its content."""

    def __new__(cls, size: int) -> WithheldBody:
        """Create the placeholder of a body of `size` bytes; it has no file."""
        made = bytes.__new__(cls)
        made.size = size
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithheldBody) and other.size == self.size

    def __hash__(self) -> int:
        return hash(self.size)


class DiscardingSink:
    """Body sink that discards a body of `size` bytes."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def write(self, data: bytes) -> None:
        """Discard the bytes."""

    def finish(self) -> bytes:
        """Return a placeholder for the discarded body."""
        return DiscardedBody(self._size)


class SpooledPiece:
    """Part of a body that stays on disk until a socket accepts it, and may never be loaded into memory."""

    __slots__ = ("_at", "_count", "_file", "_opened")

    def __init__(self, file: BodyFile, at: int, count: int) -> None:
        """Open `count` bytes of `file` from offset `at`. Raises OSError."""
        self._file = file
        self._opened = file.open_file()
        self._at = at
        self._count = count

    def __len__(self) -> int:
        return self._count

    def send(self, descriptor: int, skip: int) -> int:
        """Send the bytes after the first `skip` ones to the socket `descriptor`.

        Return the number of bytes that the socket accepted. Raises OSError, also if the file is shorter than
        it was.
        """
        sent_count = self._opened.send(descriptor, self._at + skip, self._count - skip)
        if not sent_count:
            raise OSError(f"{self._file.name} was truncated")
        return sent_count

    def data(self) -> bytes:
        """Read the piece into memory and return it.

        Raises OSError, also if the file is shorter than it was.
        """
        found = self._file.read(self._at, self._count)
        if len(found) != self._count:
            raise OSError(f"{self._file.name} was truncated")
        return found


Body = bytes | Spooled
"""Body of a message. Annotating one as `bytes` lets a compiler use the size in memory, which is 0 for a body
on disk.
"""

Piece = bytes | memoryview | SpooledPiece
"""Bytes for a socket, which should not be copied on the way."""


def is_large(body: Body) -> bool:
    """Return True if a body is on disk, or too large to be copied into its frame.

    Such a body is written to the socket as a separate piece.
    """
    return len(body) >= APART_BYTES_MIN or isinstance(body, Spooled)


def is_lost(error: OSError) -> bool:
    """Return True if `error` means that a stored body is missing or too short, so that no retry can succeed.

    Other errors, of the disk or for lack of file descriptors or memory, may be temporary.
    """
    return error.errno in LOST


class ReadFault(NamedTuple):
    """Reason why a body cannot be read (`why`), and `is_lost`: True if no retry can succeed.

    Used instead of an exception, whose stack frames would keep the body in memory.
    """

    why: str
    is_lost: bool


def fault_in(error: OSError) -> ReadFault:
    """Return the ReadFault for an `error` that was raised while a body was read."""
    return ReadFault(str(error), is_lost(error))


def fault_of(body: Body) -> ReadFault | None:
    """Return why a body cannot be read, or None if it can be."""
    if isinstance(body, Spooled):
        try:
            body.check()
        except OSError as error:
            return fault_in(error)
    return None


def part_of(body: Body, at: int, count: int) -> Piece:
    """Return `count` bytes of a body from offset `at`, fewer at the end. Raises OSError.

    The piece of a body on disk is read when it is sent, not now.
    """
    if isinstance(body, Spooled):
        return body.piece(at, min(count, body.size - at))
    return body[at : at + count] if count >= len(body) else memoryview(body)[at : at + count]


def join_pieces(pieces: list[Piece]) -> bytes:
    """Return all pieces joined in memory. Raises OSError."""
    return b"".join([piece.data() if isinstance(piece, SpooledPiece) else piece for piece in pieces])

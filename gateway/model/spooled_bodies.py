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
    """Body in a store on disk. The store deletes the bytes when this object is destroyed."""

    @property
    def name(self) -> str:
        """Identifier of the body in its store."""

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from offset `at`, or fewer if the body ends before. Raises OSError."""

    def open_file(self) -> OpenBody:
        """Open the body for sending to a socket. Raises OSError."""

    def preserve(self) -> None:
        """Make the stored bytes outlive this object. Otherwise they are deleted when it is destroyed."""

    @property
    def checked(self) -> bytes:
        """SHA-1 digest of the bytes if the sender sent a digest that matches them; otherwise b""."""


class BodySink(Protocol):
    """Object to which a large body is written while it arrives."""

    def write(self, data: bytes) -> None:
        """Append the next bytes. Raises RemoteProtocolError if there is no space for them."""

    def finish(self) -> bytes:
        """Return the complete body, perhaps on disk (Spooled). Raises RemoteProtocolError if that fails."""


class Spooled(bytes):
    """Message body of `size` bytes that is on disk, in `file`."""

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
        """Return `count` bytes from offset `at`, or fewer if the body ends before. Raises OSError."""
        return self.file.read(at, count)

    def data(self) -> bytes:
        """Read the whole body into memory and return it.

        Raises OSError, also if the file has fewer than `size` bytes.
        """
        found = self.read(0, self.size)
        if len(found) != self.size:
            raise OSError(f"{self.file.name} has {len(found)} bytes, not {self.size}")
        return found

    def check(self) -> None:
        """Raise OSError if the file is missing, or has fewer than `size` bytes."""
        if self.size and not self.read(self.size - 1, 1):
            raise OSError(f"{self.file.name} was truncated")

    def piece(self, at: int, count: int) -> SpooledPiece:
        """Return `count` bytes from offset `at` as a piece that is read from disk only when it is sent.

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
    """Placeholder for a message body that a user may not see, while its size may be shown."""

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
        """Return a DiscardedBody of the body's size."""
        return DiscardedBody(self._size)


class SpooledPiece:
    """Part of a body on disk that is read only while it is sent to a socket."""

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
        """Send the piece without its first `skip` bytes to the socket `descriptor`.

        Return the number of bytes that the socket accepted. Raises OSError, also if the file is too short.
        """
        sent_count = self._opened.send(descriptor, self._at + skip, self._count - skip)
        if not sent_count:
            raise OSError(f"{self._file.name} was truncated")
        return sent_count

    def data(self) -> bytes:
        """Read the piece into memory and return it. Raises OSError, also if the file is too short."""
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
    """Return True if a body is on disk, or has at least APART_BYTES_MIN bytes.

    Such a body is not copied into its frame, but written to the socket as a separate piece.
    """
    return len(body) >= APART_BYTES_MIN or isinstance(body, Spooled)


def is_lost(error: OSError) -> bool:
    """Return True if `error` means that a stored body is missing or too short, so that no retry can succeed.

    Other errors, such as those of the disk, or a lack of file descriptors or memory, may be temporary.
    """
    return error.errno in LOST


class ReadFault(NamedTuple):
    """Reason why a body cannot be read (`why`); `is_lost` is True if no retry can succeed.

    Used instead of an exception, whose stack frames would keep the body in memory.
    """

    why: str
    is_lost: bool


def fault_in(error: OSError) -> ReadFault:
    """Return the ReadFault for an `error` that was raised while a body was read."""
    return ReadFault(str(error), is_lost(error))


def fault_of(body: Body) -> ReadFault | None:
    """Return the reason why a body cannot be read, or None if it can be read."""
    if isinstance(body, Spooled):
        try:
            body.check()
        except OSError as error:
            return fault_in(error)
    return None


def part_of(body: Body, at: int, count: int) -> Piece:
    """Return `count` bytes of a body from offset `at`, or fewer if the body ends before. Raises OSError.

    If the body is on disk, the result is read only when it is sent.
    """
    if isinstance(body, Spooled):
        return body.piece(at, min(count, body.size - at))
    return body[at : at + count] if count >= len(body) else memoryview(body)[at : at + count]


def join_pieces(pieces: list[Piece]) -> bytes:
    """Return the bytes of all pieces, joined in memory. Raises OSError."""
    return b"".join([piece.data() if isinstance(piece, SpooledPiece) else piece for piece in pieces])

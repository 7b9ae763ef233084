"""A body that stays on disk, for it is too large to be held.

To whoever counts, it has its size; to whoever wants its octets as `bytes`, it is empty. What is as large as
that is left alone by everything that looks at bodies (conditions, the journal): they have limits of their
own. Whoever passes bodies on asks for the type first.
"""

from __future__ import annotations

from typing import Final, Protocol

APART_OCTETS_MIN: Final = 32_768  # a body of fewer is copied to what stands around it: that costs less


class OpenBody(Protocol):
    """Open for reading, as long as this object is there."""

    def send(self, descriptor: int, at: int, count: int) -> int:
        """Hand `count` octets from `at` on to a socket; returns how many it took. Raises OSError."""


class BodyFile(Protocol):
    """The octets of a body, somewhere; they are there as long as this object is."""

    @property
    def name(self) -> str:
        """What the store knows it by."""

    def read(self, at: int, count: int) -> bytes:
        """`count` octets from `at` on, fewer at the end. Raises OSError."""

    def opened(self) -> OpenBody:
        """To be read by a socket. Raises OSError."""

    def keep(self) -> None:
        """They stay when this object is gone."""

    @property
    def checked(self) -> bytes:
        """Their SHA-1, if their sender said it and it was found right; else b""."""


class BodySink(Protocol):
    """Takes a large body as it comes."""

    def write(self, octets: bytes) -> None:
        """The next of it. Raises RemoteProtocolError when there is no room for it."""

    def finish(self) -> bytes:
        """It is whole: here it is, maybe Spooled. Raises RemoteProtocolError when it cannot be read."""


class Spooled(bytes):
    """The body of a message, `size` octets in `file`."""

    file: BodyFile
    size: int

    def __new__(cls, file: BodyFile, size: int) -> Spooled:
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
        """`count` octets from `at` on, fewer at the end. Raises OSError."""
        return self.file.read(at, count)

    def octets(self) -> bytes:
        """All of it, in memory. Raises OSError, also when the file is shorter than it was."""
        found = self.read(0, self.size)
        if len(found) != self.size:
            raise OSError(f"{self.file.name} has {len(found)} octets, not {self.size}")
        return found

    def check(self) -> None:
        """Raises OSError when the file is gone, or shorter than it was."""
        if self.size and not self.read(self.size - 1, 1):
            raise OSError(f"{self.file.name} is shorter than it was")

    def piece(self, at: int, count: int) -> SpooledPiece:
        """`count` octets from `at` on, still on disk. Raises OSError."""
        return SpooledPiece(self.file, at, count)


class PassedOver(bytes):
    """The body of a message, which had `size` octets: too many to be taken, so they were thrown away."""

    size: int

    def __new__(cls, size: int) -> PassedOver:
        made = super().__new__(cls)
        made.size = size
        return made


class Withheld(Spooled):
    """The body of a message of which nothing is told but its size."""

    def __new__(cls, size: int) -> Withheld:
        made = bytes.__new__(cls)
        made.size = size
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Withheld) and other.size == self.size

    def __hash__(self) -> int:
        return hash(self.size)


class Nowhere:
    """Where the body goes that is passed over."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def write(self, octets: bytes) -> None:
        """They are gone."""

    def finish(self) -> bytes:
        """What is left of it."""
        return PassedOver(self._size)


class SpooledPiece:
    """A part of a body that stays on disk until a socket takes it, and may never come to memory."""

    __slots__ = ("_at", "_count", "_file", "_opened")

    def __init__(self, file: BodyFile, at: int, count: int) -> None:
        """Raises OSError."""
        self._file = file
        self._opened = file.opened()
        self._at = at
        self._count = count

    def __len__(self) -> int:
        return self._count

    def send(self, descriptor: int, skip: int) -> int:
        """Hand what is behind the first `skip` octets to a socket; returns how many it took.

        Raises OSError, also when the file is shorter than it was.
        """
        taken = self._opened.send(descriptor, self._at + skip, self._count - skip)
        if not taken:
            raise OSError(f"{self._file.name} is shorter than it was")
        return taken

    def octets(self) -> bytes:
        """All of it, in memory. Raises OSError, also when the file is shorter than it was."""
        found = self._file.read(self._at, self._count)
        if len(found) != self._count:
            raise OSError(f"{self._file.name} is shorter than it was")
        return found


Body = bytes | Spooled
"""The body of a message. Who says `bytes` for it has a compiler count the octets in memory, which are none of
those on disk."""

Piece = bytes | memoryview | SpooledPiece
"""Octets on their way to a socket, which nobody wants to copy."""


def is_large(body: Body) -> bool:
    """Whether it goes to the socket in a piece of its own."""
    return len(body) >= APART_OCTETS_MIN or isinstance(body, Spooled)


def part_of(body: Body, at: int, count: int) -> Piece:
    """`count` octets of a body from `at` on, still on disk if it is; fewer at the end. Raises OSError."""
    if isinstance(body, Spooled):
        return body.piece(at, min(count, body.size - at))
    return body[at : at + count] if count >= len(body) else memoryview(body)[at : at + count]


def joined(pieces: list[Piece]) -> bytes:
    """All of them in memory. Raises OSError."""
    return b"".join([piece.octets() if isinstance(piece, SpooledPiece) else piece for piece in pieces])

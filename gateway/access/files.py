"""Files that are read again when they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

Seen = TypeVar("Seen")

LOOK_SECS: Final = 0.5  # between two looks whether a file has changed
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp:
    """What is different when a file has changed, or another one has its name. Raises OSError."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def stamp_if_there(path: Path) -> Stamp | None:
    """The same; None for a file that is not there or cannot be asked."""
    try:
        return stamp_of(path)
    except OSError:
        return None


class Watched(Generic[Seen]):
    """Files that have changed once they are as they were at the look before: whoever writes them in place
    may be in the midst, and half of the users is a file of users, too.
    """

    def __init__(self, look: Callable[[], Seen]) -> None:
        """`look`: what is different when they have changed. Make it before they are read: what changes
        meanwhile is seen next time."""
        self._look = look
        self._taken = self._before = look()

    def take(self) -> None:
        """They are about to be read: as they are now they have not changed."""
        self._taken = self._look()

    def changed(self) -> bool:
        """Look; true once for each change."""
        before, self._before = self._before, self._look()
        if self._before == self._taken or self._before != before:
            return False
        self._taken = self._before
        return True

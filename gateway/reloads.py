"""Files that are read again when they change, the same rule for all of them.

A change is noticed by the file's stamp. Values built from a file are replaced only by a whole and usable
file: `Reloaded` keeps the last value when building fails, counts the refusal in `counted`, and reports it.
What "whole" means for a YAML file is `gateway.documents.lost_end`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

Seen = TypeVar("Seen")
Value = TypeVar("Value")

LOOK_SECS: Final = 0.5  # between two looks whether a file has changed
Stamp = tuple[int, int, int, int]

counted: Final = {"taken": 0, "refused": 0}
"""Attempts of this process to rebuild values of type `Reloaded`."""


def stamp_of(path: Path) -> Stamp:
    """Return values that differ when a file has changed, was replaced, or may be read by others. Raises
    OSError.
    """
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def stamp_if_there(path: Path) -> Stamp | None:
    """Return the stamp of a file, or None if the file does not exist or cannot be examined."""
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


class Reloaded(Generic[Value]):
    """A value built from files. `value` is the last one that could be built."""

    def __init__(
        self,
        paths: Sequence[Path],
        build: Callable[[], Value],
        *,
        taken: Callable[[Value], None],
        refused: Callable[[Exception], None],
    ) -> None:
        """`taken` and `refused` report a reload. Raises what `build` raises."""
        self._paths = tuple(paths)
        self._build = build
        self._report_taken = taken
        self._report_refused = refused
        self._watched = Watched(self._stamps)  # before they are read
        self._seen = self._stamps()
        self.value = build()

    def look_settled(self) -> None:
        """Rebuild the value if the files have changed and nobody is writing to them any more."""
        if self._watched.changed():
            self.reload()

    def look(self) -> None:
        """Rebuild the value if the files are not what was read last, even if somebody is still writing."""
        if self._stamps() != self._seen:
            self.reload()

    def reload(self) -> bool:
        """Rebuild the value. Return False, with the old value in force, if that fails."""
        self._seen = self._stamps()
        try:
            value = self._build()
        except (OSError, ValueError, TypeError) as error:
            counted["refused"] += 1
            self._report_refused(error)
            return False
        self.value = value
        counted["taken"] += 1
        self._report_taken(value)
        return True

    def _stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(map(stamp_if_there, self._paths))

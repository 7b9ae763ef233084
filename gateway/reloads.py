"""Files that are read again when they change, by the same rule for all of them.

A change is detected by the file's stamp. Values built from a file are replaced only by a whole and usable
file: `ReloadedValue` keeps the last value when building fails, counts the refusal in `counted`, and reports
it. `gateway.documents.refuse_lost_end` defines what "whole" means for a YAML file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

Seen = TypeVar("Seen")
Value = TypeVar("Value")

LOOK_SECS: Final = 0.5  # between two checks if a file has changed
Stamp = tuple[int, int, int, int]

counted: Final = {"taken": 0, "refused": 0}
"""Number of attempts of this process to rebuild values of type `ReloadedValue`, by result."""


def stamp_of(path: Path) -> Stamp:
    """Return a value that differs when a file was changed or replaced, or its permissions changed.

    Raises OSError.
    """
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def stamp_if_there(path: Path) -> Stamp | None:
    """Return the stamp of a file, or None if the file does not exist or cannot be examined."""
    try:
        return stamp_of(path)
    except OSError:
        return None


class ChangeDetector(Generic[Seen]):
    """Detector of file changes, which reports a change once the files are the same in two checks in a row.

    A program that writes a file in place may not be finished at the first check, and half of a file of users
    is a valid file of users, too.
    """

    def __init__(self, look: Callable[[], Seen]) -> None:
        """Start with the present state. `look` returns a value that differs when the files have changed.

        Create the object before the files are read: a change that happens meanwhile is detected by the next
        check.
        """
        self._look = look
        self._accepted = self._before = look()

    def take(self) -> None:
        """Use the present state as unchanged, because the files are about to be read."""
        self._accepted = self._look()

    def changed(self) -> bool:
        """Check the files. Return True once for each change."""
        before, self._before = self._before, self._look()
        if self._before == self._accepted or self._before != before:
            return False
        self._accepted = self._before
        return True


class ReloadedValue(Generic[Value]):
    """Value built from files. `value` is the last one that could be built."""

    def __init__(
        self,
        paths: Sequence[Path],
        build: Callable[[], Value],
        *,
        report_loaded: Callable[[Value], None],
        refused: Callable[[Exception], None],
    ) -> None:
        """Build the value. `report_loaded` and `refused` report later reloads. Raises what `build` raises."""
        self._paths = tuple(paths)
        self._build = build
        self._report_taken = report_loaded
        self._report_refused = refused
        self._watched = ChangeDetector(self._stamps)  # before they are read
        self._loaded_stamps = self._stamps()
        self.value = build()

    def look_settled(self) -> None:
        """Rebuild the value if the files have changed and are not being written any more."""
        if self._watched.changed():
            self.reload()

    def look(self) -> None:
        """Rebuild the value if the files differ from those read last, even while they are being written."""
        if self._stamps() != self._loaded_stamps:
            self.reload()

    def reload(self) -> bool:
        """Rebuild the value. Return False, with the old value in force, if that fails."""
        self._loaded_stamps = self._stamps()
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

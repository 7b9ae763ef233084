"""Rules by which files are read again after they have changed.

A change is detected by a file's stamp: its times, size and inode. `ReloadedValue` replaces a value that is
built from files only if building succeeds; otherwise it keeps the last value, counts the failure in
`counted`, and reports it. `gateway.documents.refuse_lost_end` detects a YAML file that was only partly
written.
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
    """Return a value that changes whenever the file or its permissions change. Raises OSError."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def stamp_if_there(path: Path) -> Stamp | None:
    """Return `stamp_of` a file, or None if the file does not exist or cannot be examined."""
    try:
        return stamp_of(path)
    except OSError:
        return None


class ChangeDetector(Generic[Seen]):
    """Detector of changes to files, which reports a change only if two checks in a row find the same state.

    A program that writes a file in place may not have finished at the first check, and the first half of a
    file of users is often a valid file of users, too.
    """

    def __init__(self, look: Callable[[], Seen]) -> None:
        """Store the present state of the files, which `look` returns: a value that differs after a change.

        Create this object before the files are read: the next check then detects a change that happens
        meanwhile.
        """
        self._look = look
        self._accepted = self._before = look()

    def accept(self) -> None:
        """Store the present state of the files as known, because the caller is about to read them."""
        self._accepted = self._look()

    def has_changed(self) -> bool:
        """Check the files. Return True once for each change.

        A change is reported when two checks in a row have found the same state.
        """
        before, self._before = self._before, self._look()
        if self._before == self._accepted or self._before != before:
            return False
        self._accepted = self._before
        return True


class ReloadedValue(Generic[Value]):
    """Value that is built from files, and built again when they change.

    `value` is the latest one that could be built.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        build: Callable[[], Value],
        *,
        report_loaded: Callable[[Value], None],
        refused: Callable[[Exception], None],
    ) -> None:
        """Build the value by calling `build`, which reads the files at `paths`. Raises what `build` raises.

        Later, `report_loaded` is called with each new value, and `refused` with the error if one cannot be
        built.
        """
        self._paths = tuple(paths)
        self._build = build
        self._report_taken = report_loaded
        self._report_refused = refused
        self._watched = ChangeDetector(self._stamps)  # before they are read
        self._loaded_stamps = self._stamps()
        self.value = build()

    def reload_if_settled(self) -> None:
        """Build the value again if the files have changed and two checks in a row found the same state."""
        if self._watched.has_changed():
            self.reload()

    def reload_if_changed(self) -> None:
        """Build the value again if the files have changed since they were read.

        A file may then be read while another program still writes it.
        """
        if self._stamps() != self._loaded_stamps:
            self.reload()

    def reload(self) -> bool:
        """Build the value again. If that fails, report the error, keep the old value, return False."""
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

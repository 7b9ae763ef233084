"""A disk that is slow or fails below SQLite: a library (disk_errors.c) that is preloaded into a gateway.

The test compiles it, and changes by a file what it does while the gateway runs.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_suffix(".c")
CONTROL: Final = struct.Struct("3i")


class CompilerError(Exception):
    """There is no C compiler here."""


def compiled(source: Path, folder: Path) -> Path:
    """Compile a library that can be preloaded, into the new folder `folder`. Raises CompilerError."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise CompilerError("there is no C compiler (cc)")
    folder.mkdir(parents=True)
    library = folder / source.with_suffix(".so").name
    flags = ("-O1", "-Wall", "-Werror", "-shared", "-fPIC")
    subprocess.run((compiler, *flags, "-o", str(library), str(source), "-ldl", "-lpthread"), check=True)
    return library


class FailingDisk:
    """A file system whose writes below a folder can be delayed or fail. Raises CompilerError."""

    def __init__(self, folder: Path, stored: Path) -> None:
        """Compile the library into `folder`; `stored` is where the gateway has its store."""
        library = compiled(SOURCE, folder)
        self._control = folder / "control"
        self._control.write_bytes(bytes(CONTROL.size))
        self.environment = {
            "LD_PRELOAD": str(library),
            "CHAOS_DISK_CONTROL": str(self._control),
            "CHAOS_DISK_FOLDER": str(stored.resolve()) + os.sep,
        }

    def set(self, *, delay_secs: float = 0.0, write_error: int = 0, sync_error: int = 0) -> None:
        """Have each sync take so much longer, and writes or syncs fail with an error number; 0 is none."""
        with self._control.open("r+b") as file:
            file.write(CONTROL.pack(int(delay_secs * 1e6), write_error, sync_error))

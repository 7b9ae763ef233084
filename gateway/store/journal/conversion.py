"""Conversion of complete segments to Parquet by another process, and its commit by the writer.

The process (`gateway/pipeline/journal/parquet_writer.py`) only writes a draft file, syncs it and ends. The
writer, which has the lock of the shard, renames the draft and deletes the segments whose rows it has. So
after a kill at any time there are the segments, or the file, or both, and readers prefer the file. The
process ends when the writer does, because its standard input is then closed. A process that takes too long is
killed. Remaining drafts are deleted at the next start.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from gateway import clock
from gateway.errors import GatewayError
from gateway.store.folder import sync_path
from gateway.store.journal.segments import Segment, parquet_name

DRAFT: Final = ".parquet.tmp"
REASON_CHARACTERS_MAX: Final = 500
ERRORS_BYTES_MAX: Final = 4 * REASON_CHARACTERS_MAX  # of the end of what the process wrote
CONVERT_SECS_MAX: Final = 3_600.0  # a gigabyte takes minutes, at the lowest priority


class ConversionError(GatewayError):
    """Error of the process that converts segments; the text is the last line that it wrote to stderr."""


class Conversion:
    """Running process that converts consecutive segments of a shard to one Parquet file.

    `next_` is the sequence number behind the last row. The constructor starts the command `converter` with
    the folder, the shard, the first number, `next_` and the path of a draft file as further arguments. Raises
    OSError.
    """

    def __init__(self, converter: Sequence[str], shard: int, segments: Sequence[Segment], next_: int) -> None:
        first = segments[0]
        folder = first.path.parent
        self.segments = segments
        self._final = folder / parquet_name(shard, first.first, next_)
        # A name of its own, because the process of a killed writer may be slow to notice.
        self._draft = folder / f"{shard}-{first.first:020}.{uuid4().hex}{DRAFT}"
        self._end = clock.monotonic() + CONVERT_SECS_MAX
        self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - a full pipe stops its writer
        try:
            self._process = subprocess.Popen(
                (*converter, str(folder), str(shard), str(first.first), str(next_), str(self._draft)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                process_group=0,  # an interrupt at the terminal is for the gateway
            )
        except OSError:
            self._errors.close()
            raise

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. Reading this property kills a process that takes too long.

        The limit is CONVERT_SECS_MAX seconds.
        """
        if self._process.poll() is None and clock.monotonic() >= self._end:
            self._process.kill()
            self._process.wait()
        return self._process.poll() is not None

    def commit(self) -> None:
        """Replace the segments by the Parquet file, after the process has ended.

        If retention has deleted a segment meanwhile, nothing is replaced. Raises ConversionError if the
        process failed, and OSError.
        """
        self._close()
        try:
            if self._process.returncode:
                raise ConversionError(
                    self._reason or f"the conversion process ended with exit code {self._process.returncode}"
                )
            if all(segment.path.exists() for segment in self.segments):
                self._draft.replace(self._final)
                sync_path(self._final.parent)  # the name has to survive before the others go
                for segment in self.segments:
                    segment.path.unlink(missing_ok=True)
        finally:
            self._draft.unlink(missing_ok=True)

    def stop(self) -> None:
        """Kill the process of the conversion, and delete its draft file."""
        self._process.kill()
        self._close()
        with suppress(OSError):
            self._draft.unlink(missing_ok=True)

    def _close(self) -> None:
        """Wait for the process, and set `_reason` to the last line that it wrote to stderr."""
        self._process.communicate()
        with self._errors:
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(size - ERRORS_BYTES_MAX, 0))
            written = self._errors.read().decode("utf-8", "replace").strip()
        self._reason = written.rpartition("\n")[2][:REASON_CHARACTERS_MAX]


def remove_drafts(folder: Path, shard: int) -> None:
    """Delete the draft files of conversions of this shard that were not completed."""
    for path in folder.glob(f"{shard}-*{DRAFT}"):
        path.unlink(missing_ok=True)

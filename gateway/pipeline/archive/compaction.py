"""Merging of small archive files of one day and route.

Files are merged when there are many small ones; or when the day is over, and together they reach the target
size, or two of them are tiny. Merging is as expensive as writing, so files of the present day are not
rewritten by every run, and files of a long run are not rewritten at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

import pyarrow.parquet as pq

from gateway.pipeline.archive.manifest import Archive, ArchiveFile, Manifest
from gateway.pipeline.archive.writer import FILED, ArchiveWriter
from gateway.pipeline.journal.arrow import DICTIONARIES

CODED_NAMES: Final = sorted(DICTIONARIES & set(FILED))
# Small files of one day that are merged. While the day lasts they are of similar size, so that no row is
# rewritten often.
SMALL_MAX: Final = 8
TINY_PER_USEFUL: Final = 32  # A file is tiny if this many of them make one of the target size.


class Merge(NamedTuple):
    """Plan to merge archive files of one day and route into new files, whose names begin with `name`."""

    name: str
    files: tuple[ArchiveFile, ...]


def merges_of(manifest: Manifest, file_bytes: int) -> list[Merge]:
    """Return plans for the merges of small files that are due.

    `file_bytes` is the target size of a file. Files of at least half that size are not merged.
    """
    newest = max((file.date for file in manifest.files), default="")

    def group_key(file: ArchiveFile) -> tuple[str, str, int]:
        return file.date, file.route, _size_class(file) if file.date == newest else 0

    small = [file for file in manifest.files if file.byte_count < file_bytes // 2]
    found: list[Merge] = []
    for (date, _, _), group in groupby(
        sorted(small, key=lambda file: (*group_key(file), file.path)), key=group_key
    ):
        for files in _group_by_size(group, file_bytes):
            tiny = sum(file.byte_count < file_bytes // TINY_PER_USEFUL for file in files)
            useful = len(files) > 1 and sum(file.byte_count for file in files) >= file_bytes
            if len(files) >= SMALL_MAX or (date < newest and (tiny > 1 or useful)):
                found.append(Merge(f"merged-{len(found)}", tuple(files)))
    return found


def _size_class(file: ArchiveFile) -> int:
    """Return a number for a file's size: files of one class differ in size by less than a factor of eight.

    So eight files of one class, merged, make a file of the next class.
    """
    return file.byte_count.bit_length() // 3


def _group_by_size(files: Iterable[ArchiveFile], file_bytes: int) -> Iterator[list[ArchiveFile]]:
    """Group `files`, in order, into lists of at least `file_bytes` bytes in total.

    The last list may have fewer bytes, or be empty.
    """
    run: list[ArchiveFile] = []
    for file in files:
        run.append(file)
        if sum(one.byte_count for one in run) >= file_bytes:
            yield run
            run = []
    yield run


def merge(archive: Archive, merge_plan: Merge, file_bytes: int) -> list[ArchiveFile]:
    """Write the rows of the files in `merge_plan` into new archive files, and return the new files.

    A new file is completed once it has 2 * `file_bytes` bytes. The old files are not deleted.
    """
    first = merge_plan.files[0]
    writer = ArchiveWriter(archive, merge_plan.name, first.date, first.route, 2 * file_bytes)
    for file in merge_plan.files:
        with archive.system.open_input_file(archive.path(file.path)) as source:
            for batch in pq.ParquetFile(source, read_dictionary=CODED_NAMES).iter_batches():
                writer.write(batch)
    return writer.close()

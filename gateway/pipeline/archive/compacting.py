"""Few files of many: what every run adds to a day and a route becomes one file when it is worth it.

It is when there are many small ones; or when the day is over, and they make a file of the useful size, or two
of them are tiny. For to merge costs as much as to write: the files of today are not written again by every
run, and not those of a long run at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

import pyarrow.parquet as pq

from gateway.pipeline.archive.manifest import Archive, Filed, Manifest
from gateway.pipeline.archive.writing import FILED, Writer
from gateway.pipeline.journal.arrow import DICTIONARIES

CODED_NAMES: Final = sorted(DICTIONARIES & set(FILED))
SMALL_MAX: Final = 8  # small files of a day; while it goes on, of about one size: else each is written often
TINY_PER_USEFUL: Final = 32  # so many tiny files make one of the useful size


class Merge(NamedTuple):
    """Files of one day and route that become files named `name`."""

    name: str
    files: tuple[Filed, ...]


def merges_of(manifest: Manifest, file_octets: int) -> list[Merge]:
    """What there is to do; a file of half the useful size is good enough."""
    newest = max((file.date for file in manifest.files), default="")

    def alike(file: Filed) -> tuple[str, str, int]:
        return file.date, file.route, _size_class(file) if file.date == newest else 0

    small = [file for file in manifest.files if file.octets < file_octets // 2]
    found: list[Merge] = []
    for (date, _, _), group in groupby(sorted(small, key=lambda file: (*alike(file), file.path)), key=alike):
        for files in _filled(group, file_octets):
            tiny = sum(file.octets < file_octets // TINY_PER_USEFUL for file in files)
            useful = len(files) > 1 and sum(file.octets for file in files) >= file_octets
            if len(files) >= SMALL_MAX or (date < newest and (tiny > 1 or useful)):
                found.append(Merge(f"merged-{manifest.number:020}-{len(found)}", tuple(files)))
    return found


def _size_class(file: Filed) -> int:
    """The same for files of about one size: eight of them make one of the next."""
    return file.octets.bit_length() // 3


def _filled(files: Iterable[Filed], file_octets: int) -> Iterator[list[Filed]]:
    """Runs of files that make about one of the useful size."""
    run: list[Filed] = []
    for file in files:
        run.append(file)
        if sum(one.octets for one in run) >= file_octets:
            yield run
            run = []
    yield run


def merge(archive: Archive, wanted: Merge, file_octets: int) -> list[Filed]:
    """Write the files as one, or as few; the old ones stay."""
    first = wanted.files[0]
    writer = Writer(archive, wanted.name, first.date, first.route, 2 * file_octets)
    for file in wanted.files:
        with archive.system.open_input_file(archive.path(file.path)) as source:
            for batch in pq.ParquetFile(source, read_dictionary=CODED_NAMES).iter_batches():
                writer.write(batch)
    return writer.close()

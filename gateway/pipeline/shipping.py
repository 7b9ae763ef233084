"""Segments of the journal that are complete, copied to a store, where jobs read them as they read a folder.

What is complete does not change, but for merging: a file may come again under its name with the rows of those
that followed it, which are deleted then. So a file goes when the store has none of its name and size; and one
that the journal has no more is deleted there when another has its rows. A file counts when it is whole: it is
written under another name and moved. The mapping files beside the journal go along.

What is older than it is to be kept is deleted there by the time of its newest row, oldest first, and is not
copied again while the journal has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.stores import Place
from gateway.store.journal.mappings import FOLDER, versions
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import NAME, Segment
from gateway.store.journal.summary import Summary, summary_of

DAY_SECS: Final = 86_400.0
COPY_OCTETS: Final = 8 * 1_048_576


class Shipped(NamedTuple):
    """What a run did: files and octets copied, files deleted; and the files that are there now."""

    files: int
    octets: int
    deleted: int
    total: int


def ship(
    journal: Path, to: Place, *, keep_days: int | None = None, now: Callable[[], float] = time.time
) -> Shipped:
    """Copy what is complete and not there. `keep_days`: files whose newest row is older than that are
    deleted there; None: none are. Raises PipelineError: nobody answers, or it cannot be written;
    JournalError: no such folder."""
    system, root = to.reached().arrow()
    try:
        oldest_us = 0 if keep_days is None else int((now() - keep_days * DAY_SECS) * 1e6)
        _ship_mappings(journal, system, root)
        return _shipped(journal, system, root, to, oldest_us)
    except OSError as error:
        raise PipelineError(f"the journal cannot be shipped to {to.uri}: {error}") from error


def _ship_mappings(journal: Path, system: fs.FileSystem, root: str) -> None:
    folder = f"{root}/{FOLDER}"
    there = {info.path.rpartition("/")[2] for info in system.get_file_info(_selector(folder))}
    for one in versions(journal):
        if one.path.name not in there:
            _copy(one.path, system, f"{folder}/{one.path.name}")


def _selector(folder: str) -> fs.FileSelector:
    return fs.FileSelector(folder, recursive=True, allow_not_found=True)


def _shipped(journal: Path, system: fs.FileSystem, root: str, to: Place, oldest_us: int) -> Shipped:
    found = {info.path.removeprefix(f"{root}/"): info.size for info in system.get_file_info(_selector(root))}
    there = {name: size for name, size in found.items() if NAME.fullmatch(name.rpartition("/")[2])}
    reader = JournalReader(journal)
    files = octets = deleted = 0
    for shard in reader.shards():
        covered: list[range] = []
        segments = reader.segments(shard)
        for segment, summary, following in _complete(segments):
            name = segment.path.relative_to(journal).as_posix()
            covered.append(range(segment.first, following))
            if there.get(name) == segment.octets or _is_over(segment, summary, oldest_us):
                continue
            _copy(segment.path, system, f"{root}/{name}")
            there[name] = segment.octets
            files, octets = files + 1, octets + segment.octets
        kept = {one.path.relative_to(journal).as_posix() for one in segments}
        for name in [name for name in there if _shard_of(name) == shard and name not in kept]:
            if any(_first_of(name) in rows for rows in covered):
                system.delete_file(f"{root}/{name}")
                del there[name]
                deleted += 1
    if oldest_us and there:
        gone = _over(to, oldest_us)
        for name in gone:
            system.delete_file(f"{root}/{name}")
            del there[name]
        deleted += len(gone)
    return Shipped(files, octets, deleted, len(there))


def _over(store: Place, oldest_us: int) -> list[str]:
    """The files of a store that are too old, by their names; the newest of each shard is looked at last, and
    stays."""
    reader = JournalReader(store.path())
    found = []
    for shard in reader.shards():
        folder = f"{shard.rpartition('/')[0]}/" if "/" in shard else ""
        for segment in reader.segments(shard)[:-1]:
            with segment.path.open("rb", buffering=0) as file:
                summary = summary_of(file, segment)
            if not _is_over(segment, summary, oldest_us):
                break
            found.append(f"{folder}{segment.path.name}")
    return found


def _is_over(segment: Segment, summary: Summary | None, oldest_us: int) -> bool:
    """Whether its newest row is older; of a file that does not say, whether it was written before that."""
    if summary is None or not summary.rows:
        return segment.path.stat().st_mtime * 1e6 < oldest_us
    return summary.received[1] < oldest_us


def _complete(segments: list[Segment]) -> Iterator[tuple[Segment, Summary | None, int]]:
    """The files that are not written any more, each with what it says of itself, and the number behind its
    rows."""
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        with segment.path.open("rb", buffering=0) as file:
            summary = summary_of(file, segment)
        if summary is not None:
            yield segment, summary, summary.next
        elif following is not None:  # of an older gateway, or one that was killed
            yield segment, None, following.first


def _copy(file: Path, system: fs.FileSystem, path: str) -> None:
    system.create_dir(path.rpartition("/")[0], recursive=True)
    draft = f"{path}.tmp"
    with file.open("rb") as source, system.open_output_stream(draft) as sink:
        while octets := source.read(COPY_OCTETS):
            sink.write(octets)
    system.move(draft, path)


def _shard_of(name: str) -> str:
    """As the reader names it."""
    folder, _, file = name.rpartition("/")
    number = int(file.partition("-")[0])
    return f"{folder}/{number}" if folder else str(number)


def _first_of(name: str) -> int:
    return int(name.rpartition("-")[2].partition(".")[0])

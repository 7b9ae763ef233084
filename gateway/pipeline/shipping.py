"""Segments of the journal that are complete, copied to a store, where jobs read them as they read a folder.

What is complete does not change, but for merging: a file may come again under its name with the rows of those
that followed it, which are deleted then. So a file goes when the store has none of its name and size; and one
that the journal has no more is deleted there when another has its rows. A file counts when it is whole: it is
written under another name and moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.stores import Place
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import NAME, Segment
from gateway.store.journal.summary import summary_of

COPY_OCTETS: Final = 8 * 1_048_576


class Shipped(NamedTuple):
    """What a run did: files and octets copied, files deleted; and the files that are there now."""

    files: int
    octets: int
    deleted: int
    total: int


def ship(journal: Path, to: Place) -> Shipped:
    """Copy what is complete and not there. Raises PipelineError: nobody answers, or it cannot be written;
    JournalError: no such folder."""
    system, root = to.reached().kept()
    try:
        return _shipped(journal, system, root)
    except OSError as error:
        raise PipelineError(f"the journal cannot be shipped to {to.uri}: {error}") from error


def _shipped(journal: Path, system: fs.FileSystem, root: str) -> Shipped:
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    found = {info.path.removeprefix(f"{root}/"): info.size for info in system.get_file_info(selector)}
    there = {name: size for name, size in found.items() if NAME.fullmatch(name.rpartition("/")[2])}
    reader = JournalReader(journal)
    files = octets = deleted = 0
    for shard in reader.shards():
        covered: list[range] = []
        segments = reader.segments(shard)
        for segment, following in _complete(segments):
            name = segment.path.relative_to(journal).as_posix()
            covered.append(range(segment.first, following))
            if there.get(name) == segment.octets:
                continue
            _copy(segment, system, f"{root}/{name}")
            there[name] = segment.octets
            files, octets = files + 1, octets + segment.octets
        kept = {one.path.relative_to(journal).as_posix() for one in segments}
        for name in [name for name in there if _shard_of(name) == shard and name not in kept]:
            if any(_first_of(name) in rows for rows in covered):
                system.delete_file(f"{root}/{name}")
                del there[name]
                deleted += 1
    return Shipped(files, octets, deleted, len(there))


def _complete(segments: list[Segment]) -> Iterator[tuple[Segment, int]]:
    """The files that are not written any more, each with the number behind its rows."""
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        with segment.path.open("rb", buffering=0) as file:
            summary = summary_of(file, segment)
        if summary is not None:
            yield segment, summary.next
        elif following is not None:  # of an older gateway, or one that was killed
            yield segment, following.first


def _copy(segment: Segment, system: fs.FileSystem, path: str) -> None:
    system.create_dir(path.rpartition("/")[0], recursive=True)
    draft = f"{path}.tmp"
    with segment.path.open("rb") as source, system.open_output_stream(draft) as sink:
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

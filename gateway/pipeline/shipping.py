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
from uuid import uuid4

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.stores import Place
from gateway.store.journal.mappings import FOLDER, folders_of, versions
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import NAME, Segment
from gateway.store.journal.summary import Summary, summary_of

DAY_SECS: Final = 86_400.0
LISTED_MAX: Final = 10  # times of one shard
COPY_OCTETS: Final = 8 * 1_048_576
DRAFT: Final = ".tmp"
DRAFT_SECS: Final = 3_600.0  # after which nobody is writing it any more


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
    if to.is_local and Path(to.uri).resolve() == journal.resolve():
        raise PipelineError(f"{to.uri} is the journal itself, of which ship would delete what is old")
    try:
        oldest_us = 0 if keep_days is None else int((now() - keep_days * DAY_SECS) * 1e6)
        _ship_mappings(journal, system, root)
        return _shipped(journal, system, root, to, oldest_us)
    except OSError as error:
        raise PipelineError(f"the journal cannot be shipped to {to.uri}: {error}") from error


def _ship_mappings(journal: Path, system: fs.FileSystem, root: str) -> None:
    for below in folders_of(journal, JournalReader(journal).shards()):
        folder = f"{root}/{(below / FOLDER).relative_to(journal).as_posix()}"
        there = {info.path.rpartition("/")[2] for info in system.get_file_info(_selector(folder))}
        for one in versions(below):
            if one.path.name not in there:
                _copy(one.path, system, f"{folder}/{one.path.name}")


def _selector(folder: str) -> fs.FileSelector:
    return fs.FileSelector(folder, recursive=True, allow_not_found=True)


def _shipped(journal: Path, system: fs.FileSystem, root: str, to: Place, oldest_us: int) -> Shipped:
    infos = system.get_file_info(_selector(root))
    for info in infos:
        if info.path.endswith(DRAFT) and info.mtime and info.mtime.timestamp() < time.time() - DRAFT_SECS:
            system.delete_file(info.path)  # a killed run has left it
    found = {info.path.removeprefix(f"{root}/"): info.size for info in infos}
    there = {name: size for name, size in found.items() if NAME.fullmatch(name.rpartition("/")[2])}
    run = _Run(journal, system, root, oldest_us, there)
    for shard in JournalReader(journal).shards():
        run.ship(shard)
    if oldest_us and there:
        for name in _over(to, oldest_us):
            run.delete(name)
    return Shipped(run.files, run.octets, run.deleted, len(there))


class _Run:
    """What one run has done. `there`: the files of the store and their sizes, as it goes on."""

    def __init__(
        self, journal: Path, system: fs.FileSystem, root: str, oldest_us: int, there: dict[str, int]
    ) -> None:
        self._reader = JournalReader(journal)
        self._journal = journal
        self._system = system
        self._root = root
        self._oldest_us = oldest_us
        self._there = there
        self.files = self.octets = self.deleted = 0

    def ship(self, shard: str) -> None:
        """Bring the store up to what is complete of a shard. A gateway that lives may merge or delete what
        has been listed, before it is read: so it is listed again. Raises OSError."""
        for again in range(LISTED_MAX, 0, -1):
            try:
                self._ship(self._reader.segments(shard), shard)
                return
            except FileNotFoundError:
                if again == 1:
                    raise

    def _ship(self, segments: list[Segment], shard: str) -> None:
        covered: list[range] = []
        for segment, summary, following in _complete(segments):
            name = segment.path.relative_to(self._journal).as_posix()
            covered.append(range(segment.first, following))
            if self._there.get(name) == segment.octets or _is_over(segment, summary, self._oldest_us):
                continue
            octets = _copy(segment.path, self._system, f"{self._root}/{name}")
            self._there[name] = octets
            self.files, self.octets = self.files + 1, self.octets + octets
        kept = {one.path.relative_to(self._journal).as_posix() for one in segments}
        for name in [name for name in self._there if _shard_of(name) == shard and name not in kept]:
            if any(_first_of(name) in rows for rows in covered):
                self.delete(name)

    def delete(self, name: str) -> None:
        """A file of the store."""
        self._system.delete_file(f"{self._root}/{name}")
        del self._there[name]
        self.deleted += 1


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
        elif following is not None:  # its writer was killed
            yield segment, None, following.first


def _copy(file: Path, system: fs.FileSystem, path: str) -> int:
    """Returns how much it was: another file may stand there by now than was listed."""
    count = 0
    system.create_dir(path.rpartition("/")[0], recursive=True)
    draft = f"{path}.{uuid4().hex}{DRAFT}"  # another run may copy it, too
    with file.open("rb") as source, system.open_output_stream(draft) as sink:
        while octets := source.read(COPY_OCTETS):
            sink.write(octets)
            count += len(octets)
    system.move(draft, path)
    return count


def _shard_of(name: str) -> str:
    """As the reader names it."""
    folder, _, file = name.rpartition("/")
    number = int(file.partition("-")[0])
    return f"{folder}/{number}" if folder else str(number)


def _first_of(name: str) -> int:
    return int(name.rpartition("-")[2].partition(".")[0])

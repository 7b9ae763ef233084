"""Job `ship`: copy complete segments of the journal to a store, where jobs read them like a folder.

Complete segments do not change, except by merging and by conversion to Parquet. Then a file appears, under
the name of the first segment or another, that also has the rows of the segments behind it, and these are
deleted. So a file is copied if the store has none of its name and size, and a file that the journal no longer
has is deleted in the store when another one has its rows. A Parquet file has another name than its segments,
so a listing of the store during the change could contain neither. The segments are therefore deleted only by
the run after the one that copied the Parquet file. A file is written under a temporary name and moved when it
is complete. The mapping files beside the journal are copied as well. Files beyond the retention are deleted
in the store by the time of their newest row, oldest first, and are not copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.exclusive import PROBE, store_time, written_at
from gateway.pipeline.stores import StoreFolder
from gateway.store.journal.mappings import FOLDER, folders_of, versions
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import NAME, Segment
from gateway.store.journal.summary import Summary

DAY_SECS: Final = 86_400.0
LISTED_MAX: Final = 10  # Attempts for one shard.
COPY_BYTES: Final = 8 * 1_048_576
DRAFT: Final = PROBE
DRAFT_SECS: Final = 3_600.0  # After this time a draft has no writer.


class ShipmentResult(NamedTuple):
    """Result of a run: the number of files and bytes copied, files deleted, and files now in the store."""

    files: int
    byte_count: int
    deleted: int
    total: int


def ship(
    journal: Path, to: StoreFolder, *, keep_days: int | None = None, now: Callable[[], float] | None = None
) -> ShipmentResult:
    """Copy the journal's complete segments and mapping files to the store `to`; delete outdated copies there.

    Files that the store already has are not copied. With `keep_days`, copies of segments whose newest row is
    more than `keep_days` days old are deleted, too. `now` returns the time in UTC seconds (None: by the
    store's clock). Raises PipelineError if the store is unreachable or read-only, and JournalError if the
    journal's folder does not exist.
    """
    system, root = to.check_reachable().arrow()
    if to.is_local and Path(to.uri).resolve() == journal.resolve():
        raise PipelineError(f"{to.uri} is the journal itself; give another folder")
    try:
        _ship_mappings(journal, system, root)
        if keep_days is None:
            return _ship_segments(journal, system, root, to, 0)
        moment = store_time(system, root) if now is None else now()
        return _ship_segments(journal, system, root, to, int((moment - keep_days * DAY_SECS) * 1e6))
    except OSError as error:
        raise PipelineError(f"the journal cannot be shipped to {to.uri}: {error}") from error


def _ship_mappings(journal: Path, system: fs.FileSystem, root: str) -> None:
    """Copy those stored mapping files of the journal to the store that the store does not have.

    `root` is the path of the store's folder on `system`.
    """
    for below in folders_of(journal, JournalReader(journal).shards()):
        folder = f"{root}/{(below / FOLDER).relative_to(journal).as_posix()}"
        there = {info.path.rpartition("/")[2] for info in system.get_file_info(_selector(folder))}
        for one in versions(below):
            if one.path.name not in there:
                _copy(one.path, system, f"{folder}/{one.path.name}")


def _selector(folder: str) -> fs.FileSelector:
    return fs.FileSelector(folder, recursive=True, allow_not_found=True)


def _ship_segments(
    journal: Path, system: fs.FileSystem, root: str, to: StoreFolder, oldest_us: int
) -> ShipmentResult:
    """Copy the journal's segments to the store, delete outdated copies there, and return the result.

    `root` is the path of the folder `to` on `system`. Copies of segments whose newest row is older than
    `oldest_us` (microseconds UTC) are deleted; 0 deletes none.
    """
    infos = system.get_file_info(_selector(root))
    drafts = [info for info in infos if info.path.endswith(DRAFT)]
    oldest = store_time(system, root) - DRAFT_SECS if drafts else 0.0
    for info in drafts:
        if written_at(info) < oldest:
            _delete(system, info.path)  # Left by an interrupted run.
    found = {info.path.removeprefix(f"{root}/"): info.size for info in infos}
    there = {name: size for name, size in found.items() if NAME.fullmatch(name.rpartition("/")[2])}
    run = _Run(journal, system, root, oldest_us, there)
    for shard in JournalReader(journal).shards():
        run.ship(shard)
    if oldest_us and there:
        for name in _expired_files(to, oldest_us):
            run.delete(name)
    return ShipmentResult(run.files, run.byte_count, run.deleted, len(there))


class _Run:
    """State of one run of `ship`. `there` has the size of each file in the store by name, kept up to date."""

    def __init__(
        self, journal: Path, system: fs.FileSystem, root: str, oldest_us: int, there: dict[str, int]
    ) -> None:
        self._reader = JournalReader(journal)
        self._journal = journal
        self._system = system
        self._root = root
        self._oldest_us = oldest_us
        self._there = there
        self.files = self.byte_count = self.deleted = 0

    def ship(self, shard: str) -> None:
        """Copy the complete segments of a shard to the store, and delete outdated copies.

        If a running gateway merges or deletes segments meanwhile, the segments are listed again. Raises
        OSError if a file cannot be copied or deleted.
        """
        for again in range(LISTED_MAX, 0, -1):
            try:
                self._ship(self._reader.segments(shard), shard)
                return
            except FileNotFoundError:
                if again == 1:
                    raise

    def _ship(self, segments: list[Segment], shard: str) -> None:
        """Copy those of `segments` that are complete and not in the store.

        Then delete the shard's files in the store whose rows other files now contain.
        """
        covered: list[range] = []
        for segment, summary, following in _complete(self._reader, segments):
            name = segment.path.relative_to(self._journal).as_posix()
            is_there = self._there.get(name) == segment.byte_count
            if is_there or segment.next is None:
                covered.append(range(segment.first, following))
            if is_there or _is_over(segment, summary, self._oldest_us):
                continue
            byte_count = _copy(segment.path, self._system, f"{self._root}/{name}")
            self._there[name] = byte_count
            self.files, self.byte_count = self.files + 1, self.byte_count + byte_count
        paths = {one.path.relative_to(self._journal).as_posix() for one in segments}
        for name in [name for name in self._there if _shard_of(name) == shard and name not in paths]:
            if any(_first_of(name) in rows for rows in covered):
                self.delete(name)

    def delete(self, name: str) -> None:
        """Delete the file `name` from the store."""
        _delete(self._system, f"{self._root}/{name}")
        del self._there[name]
        self.deleted += 1


def _delete(system: fs.FileSystem, path: str) -> None:
    with suppress(FileNotFoundError):  # Another run has deleted it in between.
        system.delete_file(path)


def _expired_files(store: StoreFolder, oldest_us: int) -> list[str]:
    """Return the names of the files in a store whose newest row was received before `oldest_us`.

    `oldest_us` is in microseconds UTC. The newest file of a shard is never included.
    """
    reader = JournalReader(store.path())
    found = []
    for shard in reader.shards():
        folder = f"{shard.rpartition('/')[0]}/" if "/" in shard else ""
        for segment in reader.segments(shard)[:-1]:
            if not _is_over(segment, reader.summary(segment), oldest_us):
                break
            found.append(f"{folder}{segment.path.name}")
    return found


def _is_over(segment: Segment, summary: Summary | None, oldest_us: int) -> bool:
    """Return True if the newest row of a segment was received before `oldest_us` (microseconds UTC).

    If the segment has no summary or no rows, the modification time of the file is used.
    """
    if summary is None or not summary.rows:
        return segment.path.stat().st_mtime * 1e6 < oldest_us
    return summary.received[1] < oldest_us


def _complete(
    reader: JournalReader, segments: list[Segment]
) -> Iterator[tuple[Segment, Summary | None, int]]:
    """Yield (segment, summary, number after that of the last row) for each complete segment.

    The summary is None if the process that wrote the segment was killed. Raises FileNotFoundError if a
    segment was merged, converted or deleted.
    """
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        segment.path.stat()
        summary = reader.summary(segment)
        if summary is not None:
            yield segment, summary, summary.next
        elif following is not None:  # Its writer was killed.
            yield segment, None, following.first


def _copy(file: Path, system: fs.FileSystem, path: str) -> int:
    """Copy a file to `path` in a store. Return the number of bytes copied.

    The number may differ from the file's size when it was listed.
    """
    count = 0
    system.create_dir(path.rpartition("/")[0], recursive=True)
    draft = f"{path}.{uuid4().hex}{DRAFT}"  # Another run may copy it at the same time.
    with file.open("rb") as source, system.open_output_stream(draft) as sink:
        while data := source.read(COPY_BYTES):
            sink.write(data)
            count += len(data)
    system.move(draft, path)
    return count


def _shard_of(name: str) -> str:
    """Return the name of the shard to which a file in the store belongs."""
    folder, _, file = name.rpartition("/")
    number = int(file.partition("-")[0])
    return f"{folder}/{number}" if folder else str(number)


def _first_of(name: str) -> int:
    return int(name.rpartition("/")[2].split("-")[1].partition(".")[0])

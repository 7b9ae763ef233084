"""Manifest of an archive: one JSON file with its files and its position in the journal.

`_archive/<number>.json` lists every file and the next row of each shard; the highest number is valid. A
manifest is never changed, only followed by another one. A file belongs to the archive while the newest
manifest names it. So a run takes effect completely or not at all: files that no manifest names are deleted by
a later run, which starts at the manifest's position. A removed file stays on disk for a grace period, for
readers that planned with an earlier manifest.

Any number of processes may read an archive, and one run at a time may write it. If two runs overlap, the
first to save its manifest wins: each number is created once, and the other run fails without an effect. A
file name contains the id of the run, so that files of two runs never collide, and the number of the manifest
that may name the file. If that manifest exists without naming the file, no run can use the file any more, and
it may be deleted. To delete the files of a killed run, a later run therefore saves a manifest with that
number first. It does so only after the grace period, because the run may still be alive; if it is, it fails
as overtaken, and loses no row (`exclusive.py` creates the manifests).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Final
from urllib.parse import quote
from uuid import uuid4

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.exclusive import CLAIMS, DRAFTS, create, store_time, written_at
from gateway.pipeline.journal.options import Offsets
from gateway.pipeline.stores import StoreFolder, folder_mismatch

FOLDER: Final = "_archive"
STAGING: Final = f"{FOLDER}/{DRAFTS}"
OURS: Final = re.compile(r"date=[0-9-]{10}/route=[^/]+/[^/]+-(\d+)-[0-9a-f]{12}-\d+\.parquet")
HALF: Final = re.compile(rf"{FOLDER}/(?:{DRAFTS}|{CLAIMS})/(?:(\d+)[.-])?[^/]+")
"""Files of runs, with the number of the manifest for which they are made."""
NO_ROUTE: Final = "__HIVE_DEFAULT_PARTITION__"  # Spark's name for the folder of a null partition value.
KEPT: Final = 3  # Manifests that are preserved; a reader may still use the previous one.

KEYS: Final = {"byte_count": "octets"}
"""Keys of a file in a stored manifest that differ from the fields of `ArchiveFile`."""
FIELDS: Final = {key: name for name, key in KEYS.items()}


@dataclass(frozen=True)
class ArchiveFile:
    """File of an archive with its metadata.

    `path` is relative to the archive's root. All rows in the file are of the day `date` and the route
    `route`. `rows` is the number of rows, and `byte_count` the size of the file in bytes.
    """

    path: str
    date: str
    route: str
    rows: int
    byte_count: int


@dataclass(frozen=True)
class RemovedFile:
    """Archive file still to be deleted, which the manifest has not listed since `since` (UTC seconds)."""

    path: str
    since: float


@dataclass(frozen=True)
class Manifest:
    """Version of an archive's manifest: the list of its files, and the position in the journal.

    `number` is the number of this version, 0 for a new archive. `offsets` has, for each shard of the journal,
    the number of the next row that is not archived. `files` are the files of the archive. `left` are removed
    files that are still to be deleted, because readers may still use them.
    """

    number: int = 0
    offsets: Offsets = field(default_factory=dict)
    files: tuple[ArchiveFile, ...] = ()
    left: tuple[RemovedFile, ...] = ()

    def next_version(
        self,
        *,
        offsets: Offsets | None = None,
        gained: Iterable[ArchiveFile] = (),
        lost: Collection[ArchiveFile] = (),
        now: float = 0.0,
    ) -> Manifest:
        """Return a copy of the manifest with the next number, and with these changes.

        The files `gained` are added, and the files `lost` are removed at the time `now` in UTC seconds.
        `offsets` replaces the positions of the shards that it contains.
        """
        lost_files = set(lost)
        return replace(
            self,
            number=self.number + 1,
            offsets=self.offsets | (offsets or {}),
            files=tuple(file for file in (*self.files, *gained) if file not in lost_files),
            left=(*self.left, *(RemovedFile(file.path, now) for file in lost)),
        )

    def without_files(self, deleted: Collection[RemovedFile]) -> Manifest:
        """Return a copy of the manifest with the next number, and without the files `deleted` in `left`."""
        remaining = tuple(one for one in self.left if one not in deleted)
        return replace(self, number=self.number + 1, left=remaining)


class OvertakenError(PipelineError):
    """Error of a run that cannot save a manifest, because another run has saved one with the same number."""


class Archive:
    """Archive folder, on this machine or in an object store, that one run of a job reads and changes.

    `run` is the id of the run, and `next` the number of the manifest that the run may save next.
    """

    def __init__(self, place: StoreFolder) -> None:
        self.place = place
        self.uri = place.uri
        self.run = uuid4().hex[:12]
        self.next = 1

    @property
    def system(self) -> Arrow:
        """Arrow file system on which the archive is stored."""
        return self.place.arrow().system

    @property
    def root(self) -> str:
        """Path of the archive folder on its Arrow file system."""
        return self.place.arrow().path

    def path(self, below: str) -> str:
        """Return the path, on the Arrow file system, of the archive's file with the relative path `below`."""
        return f"{self.root}/{below}"

    def manifest(self) -> Manifest:
        """Return the newest manifest; an empty one if the archive does not exist."""
        names = self._manifests()
        if not names:
            return Manifest()
        with self.system.open_input_stream(self.path(f"{FOLDER}/{names[-1]}")) as stream:
            document = json.loads(stream.read())
        self.next = document["number"] + 1
        left = tuple(RemovedFile(**one) for one in document["left"])
        files = tuple(
            ArchiveFile(**{FIELDS.get(key, key): file[key] for key in file}) for file in document["files"]
        )
        return Manifest(document["number"], document["offsets"], files, left)

    def checked_files(self, files: Sequence[ArchiveFile]) -> Sequence[ArchiveFile]:
        """Check that `files`, which Spark tasks have written, exist with their recorded sizes; return them.

        Raises PipelineError if a file does not exist: then the tasks use another folder than the driver.
        """
        infos = self.system.get_file_info([self.path(file.path) for file in files]) if files else []
        for file, info in zip(files, infos, strict=True):
            if info.size != file.byte_count:
                raise folder_mismatch(self.place, f"a task has written {file.path}, which is missing here")
        return files

    def save(self, manifest: Manifest) -> Manifest:
        """Save `manifest` as the newest manifest, delete old manifests, and return `manifest`.

        Raises OvertakenError if another run has saved a manifest meanwhile.
        """
        names = self._manifests()
        name = _name_of(manifest.number)
        if names and names[-1] >= name:
            raise self._overtaken()
        files = [{KEYS.get(key, key): of for key, of in asdict(file).items()} for file in manifest.files]
        self._create(name, json.dumps(asdict(manifest) | {"files": files}).encode())
        if self._manifests()[-1] != name:  # A manifest of this number existed and was already deleted.
            self._delete(f"{FOLDER}/{name}")
            raise self._overtaken()
        self.next = manifest.number + 1
        for old in names[: -KEPT + 1]:
            self._delete(f"{FOLDER}/{old}")
        return manifest

    def _create(self, name: str, data: bytes) -> None:
        """Create the manifest file `name` with the content `data`. Raises OvertakenError if it exists."""
        try:
            create(self.place, FOLDER, name, data, self.run)
        except FileExistsError as error:
            raise self._overtaken() from error

    def _overtaken(self) -> OvertakenError:
        return OvertakenError(
            f"another run has written the archive {self.uri}; restart this run, and run only one at a time"
        )

    def now(self) -> float:
        """Return the present time in seconds UTC, by the clock of the archive's store."""
        return store_time(self.system, self.path(STAGING))

    @contextmanager
    def unless_overtaken(self) -> Iterator[None]:
        """Convert an error of the block to OvertakenError if another run has saved a manifest meanwhile.

        That run may have deleted files that this run needs.
        """
        try:
            yield
        except Exception as error:
            if self._manifests()[-1:] >= [_name_of(self.next)]:
                raise self._overtaken() from error
            raise

    def sweep(self, manifest: Manifest, grace_secs: float) -> tuple[Manifest, int]:
        """Delete files that interrupted runs have left in the archive: those that no manifest lists.

        Return the newest manifest, and the number of deleted data files. A file of a run that may still save
        a manifest is deleted only if it is older than `grace_secs` seconds. Before that, a manifest without
        the file is saved, so that such a run fails with OvertakenError if it continues. Raises PipelineError
        if the folder is not an archive.
        """
        if self.system.get_file_info(self.root).type == fs.FileType.File:
            raise PipelineError(f"{self.uri} is a file, not a folder; give another name")
        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        times = {
            info.path.removeprefix(f"{self.root}/"): written_at(info)
            for info in self.system.get_file_info(selector)
        }
        found = times.keys()
        if not manifest.number and found and FOLDER not in found:
            raise PipelineError(f"{self.uri} is not empty and is not an archive; give another folder")
        referenced = {file.path for file in manifest.files} | {file.path for file in manifest.left}
        numbers = {
            path: int(made[1] or self.next)
            for path in found
            if path not in referenced and (made := OURS.fullmatch(path) or HALF.fullmatch(path))
        }
        usable = [path for path, number in numbers.items() if number > manifest.number]
        oldest = self.now() - grace_secs if usable else 0.0
        recent = {path for path in usable if times[path] > oldest}
        if len(recent) < len(usable):
            manifest = self.save(manifest.next_version())
        orphans = [path for path in numbers if path not in recent]
        for path in orphans:
            self._delete(path)
        return manifest, sum(OURS.fullmatch(path) is not None for path in orphans)

    def delete(self, files: Iterable[RemovedFile | ArchiveFile]) -> None:
        """Delete files from the archive's folder. Files that do not exist are ignored."""
        for file in files:
            self._delete(file.path)

    def _delete(self, below: str) -> None:
        path = self.path(below)
        if self.system.get_file_info(path).type != fs.FileType.NotFound:
            with suppress(FileNotFoundError):  # Another run has deleted it in between.
                self.system.delete_file(path)

    def _manifests(self) -> list[str]:
        selector = fs.FileSelector(self.path(FOLDER), allow_not_found=True)
        return sorted(
            info.base_name
            for info in self.system.get_file_info(selector)
            if re.fullmatch(r"\d{20}\.json", info.base_name)
        )


def _name_of(number: int) -> str:
    """Return the file name of the manifest with this number."""
    return f"{number:020}.json"


def folder_of(date: str, route: str) -> str:
    """Return the folder for the rows of a day and a route, named as Spark names partitions."""
    return f"date={date}/route={quote(route, safe=' ') if route else NO_ROUTE}"

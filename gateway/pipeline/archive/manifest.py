"""What the archive holds, and how far the journal is in it: one JSON file, replaced as a whole.

`_archive/<number>.json` lists every file and the next row of each shard; the newest number is the truth. A
file counts from the moment a manifest names it until one no longer does. So a run that is killed has either
happened or not: what it left without a name is swept away by the next one, which starts where the manifest
says. A file that counts no longer stays where it is until its grace is over, for a reader that has planned
before will still open it.

Any number read an archive, and one run at a time writes it. Of two that overlap the first to save its
manifest wins: a number is created once, and the other run is told so and has changed nothing. No file of one
has the name of a file of another, for each name has the run's id; and a run sweeps away only what has been
left for longer than the grace. A disk creates a file exclusively; a store that cannot (S3) has a claim for
the number first, and of two runs that find each other's claim none goes on.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Final
from urllib.parse import quote
from uuid import uuid4

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.journal.options import Offsets
from gateway.pipeline.stores import Place, not_there

FOLDER: Final = "_archive"
STAGING: Final = f"{FOLDER}/staging"
CLAIMS: Final = f"{FOLDER}/claims"
CLAIM_SECS: Final = 600.0  # that a claim holds, whose run may have been killed
OURS: Final = re.compile(r"date=[0-9-]{10}/route=[^/]+/[^/]+\.parquet")
HALF: Final = re.compile(rf"({STAGING}|{CLAIMS})/[^/]+")
NO_ROUTE: Final = "__HIVE_DEFAULT_PARTITION__"  # Spark's word for a directory of nothing
KEPT: Final = 3  # manifests; a reader may still be at the one before


@dataclass(frozen=True)
class Filed:
    """A file of the archive: its path below the root; rows and octets; `date` and `route` of all its rows."""

    path: str
    date: str
    route: str
    rows: int
    octets: int


@dataclass(frozen=True)
class Left:
    """A file that counts no longer, since the time `since` (seconds UTC)."""

    path: str
    since: float


@dataclass(frozen=True)
class Manifest:
    """What the archive holds. `offsets`: the next row of each shard that is not in it; `left`: files that
    readers may still be at."""

    number: int = 0
    offsets: Offsets = field(default_factory=dict)
    files: tuple[Filed, ...] = ()
    left: tuple[Left, ...] = ()

    def changed(
        self,
        *,
        offsets: Offsets | None = None,
        gained: Iterable[Filed] = (),
        lost: Collection[Filed] = (),
        now: float = 0.0,
    ) -> Manifest:
        """The manifest after this one. `now`: seconds UTC, at which files are `lost`."""
        gone = set(lost)
        return replace(
            self,
            number=self.number + 1,
            offsets=self.offsets | (offsets or {}),
            files=tuple(file for file in (*self.files, *gained) if file not in gone),
            left=(*self.left, *(Left(file.path, now) for file in lost)),
        )

    def without(self, left: Collection[Left]) -> Manifest:
        """The manifest after this one, when these are deleted."""
        kept = tuple(one for one in self.left if one not in left)
        return replace(self, number=self.number + 1, left=kept)


class OvertakenError(PipelineError):
    """Another run has saved the next manifest, or is about to."""


class Archive:
    """A folder, of this machine or in a store, as one run sees it: `run` is the run's id."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.uri = place.uri
        self.run = uuid4().hex[:12]

    @property
    def system(self) -> Arrow:
        """Arrow's file system."""
        return self.place.arrow().system

    @property
    def root(self) -> str:
        """The folder on it."""
        return self.place.arrow().path

    def path(self, below: str) -> str:
        """The whole path of a file of the archive."""
        return f"{self.root}/{below}"

    def manifest(self) -> Manifest:
        """The newest one; of an archive that is not there yet, the empty one."""
        names = self._manifests()
        if not names:
            return Manifest()
        with self.system.open_input_stream(self.path(f"{FOLDER}/{names[-1]}")) as stream:
            given = json.loads(stream.read())
        left = tuple(Left(**one) for one in given["left"])
        files = tuple(Filed(**file) for file in given["files"])
        return Manifest(given["number"], given["offsets"], files, left)

    def found(self, files: Sequence[Filed]) -> Sequence[Filed]:
        """The same files, when they are there, as large as those who wrote them say. Raises PipelineError:
        those have another folder."""
        infos = self.system.get_file_info([self.path(file.path) for file in files]) if files else []
        for file, info in zip(files, infos, strict=True):
            if info.size != file.octets:
                raise not_there(self.place, f"a task has written {file.path}, and it is not here")
        return files

    def save(self, manifest: Manifest) -> Manifest:
        """Make `manifest` the newest. Raises OvertakenError when another run has made one meanwhile."""
        names = self._manifests()
        name = f"{manifest.number:020}.json"
        if names and names[-1] >= name:
            raise self._overtaken()
        self._create(name, json.dumps(asdict(manifest)).encode())
        if self._manifests()[-1] != name:  # the one of this number was there, and is forgotten
            self._delete(f"{FOLDER}/{name}")
            raise self._overtaken()
        for old in names[: -KEPT + 1]:
            self._delete(f"{FOLDER}/{old}")
        return manifest

    def _create(self, name: str, octets: bytes) -> None:
        """Write a manifest that is not there. Raises OvertakenError: it is."""
        self.system.create_dir(self.path(STAGING), recursive=True)
        below = f"{STAGING}/{self.run}.json"
        staged, whole = self.path(below), self.path(f"{FOLDER}/{name}")
        with self.system.open_output_stream(staged) as stream:
            stream.write(octets)
        try:
            if not (self.place.is_local and _linked(staged, whole)):
                self._move_claimed(name, staged, whole)
        except FileExistsError as error:
            raise self._overtaken() from error
        finally:
            self._delete(below)

    def _move_claimed(self, name: str, staged: str, whole: str) -> None:
        """Move a manifest into its place, where no other run claims that. Raises FileExistsError."""
        self.system.create_dir(self.path(CLAIMS), recursive=True)
        claim = f"{name}.{self.run}"
        with self.system.open_output_stream(self.path(f"{CLAIMS}/{claim}")) as stream:
            stream.write(self.run.encode())
        try:
            oldest = time.time() - CLAIM_SECS
            others = [
                info
                for info in self.system.get_file_info(fs.FileSelector(self.path(CLAIMS)))
                if info.base_name.startswith(f"{name}.") and info.base_name != claim and _since(info) > oldest
            ]
            # In this order: a claim goes when its manifest is there.
            if others or name in self._manifests():
                raise FileExistsError(whole)
            self.system.move(staged, whole)
        finally:
            self._delete(f"{CLAIMS}/{claim}")

    def _overtaken(self) -> OvertakenError:
        return OvertakenError(
            f"another run has written the archive {self.uri} meanwhile; run one at a time, and this again"
        )

    def sweep(self, manifest: Manifest, grace_secs: float) -> int:
        """Delete files that no manifest names and that are older than `grace_secs`: a killed run has left
        them. Return how many.

        Raises PipelineError when the folder is somebody else's.
        """
        if self.system.get_file_info(self.root).type == fs.FileType.File:
            raise PipelineError(f"{self.uri} is a file and no folder; give another name")
        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        times = {
            info.path.removeprefix(f"{self.root}/"): _since(info)
            for info in self.system.get_file_info(selector)
        }
        found = times.keys()
        if not manifest.number and found and FOLDER not in found:
            raise PipelineError(f"{self.uri} is not empty and no archive; give another folder")
        named = {file.path for file in manifest.files} | {file.path for file in manifest.left}
        oldest = time.time() - grace_secs
        over = [path for path in found if times[path] <= oldest]
        left = [path for path in over if OURS.fullmatch(path) and path not in named]
        for path in (*left, *(path for path in over if HALF.fullmatch(path))):
            self._delete(path)
        return len(left)

    def delete(self, files: Iterable[Left | Filed]) -> None:
        """Delete files that nobody is at any more; a run that was killed may have deleted some of them."""
        for file in files:
            self._delete(file.path)

    def _delete(self, below: str) -> None:
        path = self.path(below)
        if self.system.get_file_info(path).type != fs.FileType.NotFound:
            with suppress(FileNotFoundError):  # another run has deleted it in between
                self.system.delete_file(path)

    def _manifests(self) -> list[str]:
        selector = fs.FileSelector(self.path(FOLDER), allow_not_found=True)
        return sorted(
            info.base_name
            for info in self.system.get_file_info(selector)
            if re.fullmatch(r"\d{20}\.json", info.base_name)
        )


def _linked(staged: str, whole: str) -> bool:
    """Give a file of this machine its name. Return False if its disk has no links. Raises FileExistsError."""
    try:
        os.link(staged, whole)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _since(info: Arrow) -> float:
    """When a file was written, in seconds UTC. A store that does not say has it from now."""
    return time.time() if info.mtime is None else float(info.mtime.timestamp())


def folder_of(date: str, route: str) -> str:
    """Where the rows of a day and a route lie, as Spark names partitions."""
    return f"date={date}/route={quote(route, safe=' ') if route else NO_ROUTE}"

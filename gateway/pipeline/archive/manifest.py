"""What the archive holds, and how far the journal is in it: one JSON file, replaced as a whole.

`_archive/<number>.json` lists every file and the next row of each shard; the newest number is the truth. A
file counts from the moment a manifest names it until one no longer does. So a run that is killed has either
happened or not: what it left without a name is swept away by the next one, which starts where the manifest
says. A file that counts no longer stays where it is until its grace is over, for a reader that has planned
before will still open it. One process at a time writes an archive; any number read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final
from urllib.parse import quote

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.journal.options import Offsets
from gateway.pipeline.stores import Place, not_there

FOLDER: Final = "_archive"
STAGING: Final = f"{FOLDER}/staging"
OURS: Final = re.compile(r"date=[0-9-]{10}/route=[^/]+/[^/]+\.parquet")
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


class Archive:
    """A folder, of this machine or in a store."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.uri = place.uri

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
        """Make `manifest` the newest. Raises PipelineError when somebody else made one meanwhile."""
        names = self._manifests()
        name = f"{manifest.number:020}.json"
        if names and names[-1] >= name:
            raise PipelineError(
                f"another run has written the archive {self.uri} meanwhile; run one at a time"
            )
        self.system.create_dir(self.path(STAGING), recursive=True)
        staged = self.path(f"{STAGING}/{name}")
        with self.system.open_output_stream(staged) as stream:
            stream.write(json.dumps(asdict(manifest)).encode())
        self.system.move(staged, self.path(f"{FOLDER}/{name}"))
        for old in names[: -KEPT + 1]:
            self.system.delete_file(self.path(f"{FOLDER}/{old}"))
        return manifest

    def sweep(self, manifest: Manifest) -> int:
        """Delete files that no manifest names, which a killed run has left; returns how many.

        Raises PipelineError when the folder is somebody else's.
        """
        if self.system.get_file_info(self.root).type == fs.FileType.File:
            raise PipelineError(f"{self.uri} is a file and no folder; give another name")
        selector = fs.FileSelector(self.root, recursive=True, allow_not_found=True)
        found = [info.path.removeprefix(f"{self.root}/") for info in self.system.get_file_info(selector)]
        if not manifest.number and found and FOLDER not in found:
            raise PipelineError(f"{self.uri} is not empty and no archive; give another folder")
        named = {file.path for file in manifest.files} | {file.path for file in manifest.left}
        left = [path for path in found if OURS.fullmatch(path) and path not in named]
        for path in left:
            self.system.delete_file(self.path(path))
        if STAGING in found:
            self.system.delete_dir_contents(self.path(STAGING))
        return len(left)

    def delete(self, files: Iterable[Left]) -> None:
        """Delete files that nobody is at any more; a run that was killed may have deleted some of them."""
        for file in files:
            path = self.path(file.path)
            if self.system.get_file_info(path).type != fs.FileType.NotFound:
                self.system.delete_file(path)

    def _manifests(self) -> list[str]:
        selector = fs.FileSelector(self.path(FOLDER), allow_not_found=True)
        return sorted(
            info.base_name
            for info in self.system.get_file_info(selector)
            if re.fullmatch(r"\d{20}\.json", info.base_name)
        )


def folder_of(date: str, route: str) -> str:
    """Where the rows of a day and a route lie, as Spark names partitions."""
    return f"date={date}/route={quote(route, safe=' ') if route else NO_ROUTE}"

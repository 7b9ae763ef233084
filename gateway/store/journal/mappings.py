"""Copies of the mapping files by which messages were routed, stored beside the journal.

In the folder `mappings` the file VERSION-NAME has the text of the mapping file NAME in that version; the rows
of the journal contain the version. A copy stays when its rows are deleted, because an archive still has those
rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = "mappings"
NAME: Final = re.compile(r"([0-9a-f]+)-(.+)")
VERSIONS_MAX: Final = 1_000  # the newest ones; a program may write the mapping often


class MappingVersion(NamedTuple):
    """Stored copy of a mapping file: its version, its name without folders, and the path of the copy."""

    version: str
    name: str
    path: Path


def store_mappings(journal: Path, texts: Mapping[str, tuple[str, str]]) -> None:
    """Write mapping files that are not stored yet to the journal's folder; delete the oldest copies.

    At most VERSIONS_MAX copies remain. `texts` has the file name and the text by mapping version. Raises
    OSError.
    """
    folder = journal / FOLDER
    fresh = {f"{version}-{Path(file).name}": text for version, (file, text) in texts.items()}
    there = {one.path.name for one in versions(journal)}
    if not fresh.keys() - there:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in sorted(fresh.keys() - there):
        draft = folder / f".{name}.tmp"
        draft.write_text(fresh[name], encoding="utf-8")
        draft.replace(folder / name)
    newest = sorted(versions(journal), key=lambda one: one.path.stat().st_mtime, reverse=True)
    for one in newest[VERSIONS_MAX:]:
        one.path.unlink(missing_ok=True)


def folders_of(journal: Path, shards: Iterable[str]) -> list[Path]:
    """Return the folders that may have copies of mapping files.

    These are the journal's folder, and the folders below it that have shards.
    """
    return [journal, *(journal / head for head in sorted({one.rpartition("/")[0] for one in shards}) if head)]


def versions(journal: Path) -> list[MappingVersion]:
    """Return the mapping files that are stored beside a journal."""
    folder = journal / FOLDER
    names = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [MappingVersion(found[1], found[2], path) for found, path in names if found is not None]

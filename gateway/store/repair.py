"""`check` and `repair`: what a damaged store has lost, and a new one with what it has not.

No gateway runs meanwhile: both hold the folder's lock. `repair` writes what is sound into a new database in
the folder `repairing`, which becomes `repaired` when it is whole and on disk. Only then the old files go into
`damaged-TIME`, and the new one takes their place. If it ends in between, a second call takes up from there,
and no gateway starts before.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from gateway.errors import StoreError
from gateway.store.damage import Findings, Keep, Row, examine, wal_faults
from gateway.store.database import FILE, REPAIRED, connect
from gateway.store.folder import FolderLock
from gateway.store.heap import HEAP
from gateway.store.schema import newest_layout, refuse_others
from gateway.store.statements import transaction

REPAIRING: Final = "repairing"
FAULTS_MAX: Final = 10  # lines of SQLite's own check
# Rows that stood in the heap stand in the new database.
COLUMNS: Final = {"logs": 3, "rows": 7, "settled": 2, "things": 4, "dead_letters": 9}
BESIDE: Final = ("-wal", "-shm")


def check(folder: Path) -> Findings:
    """What the store in `folder` has lost; nothing is changed. Raises StoreError when it cannot be read."""
    lock = _locked(folder)
    try:
        return _examined(folder, _drop)
    finally:
        lock.release()


def repair(folder: Path) -> tuple[Findings, Path | None]:
    """Put what is sound into a new database. Returns what was lost, and where the old files are.

    None: nothing was damaged, or an earlier repair has been finished. Raises StoreError.
    """
    lock = _locked(folder)
    try:
        if (folder / REPAIRED).exists():
            return Findings(), _put_in_place(folder)
        findings = _examined(folder, _drop)
        if findings.sound:
            return findings, None
        return _copied(folder), _put_in_place(folder)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the store {folder / FILE} cannot be repaired: {error}") from error
    finally:
        lock.release()


def _locked(folder: Path) -> FolderLock:
    if not (folder / FILE).is_file() and not (folder / REPAIRED).exists():
        raise StoreError(f"there is no store in {folder}: it has no file {FILE}")
    return FolderLock(folder)


def _drop(table: str, rows: list[Row]) -> None:
    """It was only to be looked at."""


def _examined(folder: Path, keep: Keep) -> Findings:
    path = folder / FILE
    findings = Findings()
    with closing(_opened(path)) as connection:
        try:
            _identify(connection)
            clean = _is_clean(connection, findings)
            findings.file += wal_faults(path, clean=clean)
            findings.file += _faults(connection)
            examine(connection, path, findings, keep)
        except (sqlite3.Error, StoreError) as error:
            raise StoreError(
                f"the store {path}: {error}; if it is damaged, restore a backup, or, to start empty, move "
                f"{FILE}, {FILE}-wal, {FILE}-shm and {HEAP} away together"
            ) from error
    return findings


def _opened(path: Path) -> sqlite3.Connection:
    """For reading only. Without a log SQLite would make one, unless it is told that nobody writes."""
    alone = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{alone}", uri=True, isolation_level=None)


def _identify(connection: sqlite3.Connection) -> None:
    version = refuse_others(connection)
    if version != newest_layout():
        raise StoreError(
            f"its schema is {version}, this gateway's {newest_layout()}: repair it with that gateway"
        )


def _is_clean(connection: sqlite3.Connection, findings: Findings) -> bool:
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'clean'").fetchone()
    except sqlite3.Error as error:
        findings.file.append(f"the table meta cannot be read: {error}")
        return False
    return bool(found == (1,))


def _faults(connection: sqlite3.Connection) -> list[str]:
    """What SQLite itself finds wrong."""
    try:
        found = [text for (text,) in connection.execute(f"PRAGMA quick_check({FAULTS_MAX})")]
    except sqlite3.Error as error:
        return [str(error)]
    return [] if found == ["ok"] else [line for text in found for line in text.splitlines()][:FAULTS_MAX]


def _copied(folder: Path) -> Findings:
    """Write the new database, whole and on disk, into the folder REPAIRED."""
    new = folder / REPAIRING
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    with closing(connect(new)) as connection:

        def keep(table: str, rows: list[Row]) -> None:
            values = ",".join("?" * COLUMNS[table])
            with transaction(connection):
                connection.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({values})", rows)

        findings = _examined(folder, keep)
        with transaction(connection):
            connection.execute("DELETE FROM settled WHERE row NOT IN (SELECT id FROM rows)")
            connection.execute("UPDATE meta SET value = 1 WHERE key = 'clean'")
        if faults := _faults(connection):
            raise StoreError(f"the repaired database is not sound either, is the disk? {faults[0]}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    _sync(new / FILE)
    _sync(new)
    new.rename(folder / REPAIRED)
    _sync(folder)
    return findings


def _put_in_place(folder: Path) -> Path:
    """Set the old files aside, and the new database where they were. May have been begun before."""
    aside = folder / f"damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    aside.mkdir(mode=0o700, exist_ok=True)
    new = folder / REPAIRED / FILE
    if new.exists():
        for name in (FILE, *(FILE + suffix for suffix in BESIDE), HEAP):
            if (folder / name).exists():
                (folder / name).rename(aside / name)
        _sync(aside)
        new.rename(folder / FILE)
        _sync(folder)
    shutil.rmtree(folder / REPAIRED)
    _sync(folder)
    return aside


def _sync(path: Path) -> None:
    """See to it that the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

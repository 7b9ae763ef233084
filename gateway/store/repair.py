"""Check and repair of a damaged store: report the losses, and write a new database with the sound rows.

No gateway may run meanwhile: both functions hold the folder's lock. `repair` writes the sound rows into a new
database in the folder `repairing`, which is renamed to `repaired` when it is complete and on disk. Only then
are the old files moved to `damaged-TIME`, and the new one takes their place. If the process ends in between,
a second call continues from there, and no gateway starts before.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from gateway import clock
from gateway.errors import StoreError
from gateway.store.damage import Findings, Keep, Row, examine, wal_faults
from gateway.store.database import FILE, REPAIRED, connect
from gateway.store.folder import FolderLock, sync_path
from gateway.store.heap import HEAP
from gateway.store.schema import newest_layout, refuse_others
from gateway.store.statements import transaction
from gateway.store.timeline import KEY as TIME

REPAIRING: Final = "repairing"
FAULTS_MAX: Final = 10  # lines of SQLite's own check
# Rows from the heap are written into the table of the new database.
COLUMNS: Final = {"logs": 3, "rows": 7, "settled": 2, "things": 4, "dead_letters": 9}
BESIDE: Final = ("-wal", "-shm")


def check(folder: Path) -> Findings:
    """Examine the store in `folder`, without changing it, and return what is damaged or lost.

    Raises StoreError if nothing can be read, there is no store, or a gateway uses it.
    """
    lock = _locked(folder)
    try:
        return _examined(folder, _ignore_rows)
    finally:
        lock.release()


def repair(folder: Path) -> tuple[Findings, Path | None]:
    """Write the sound rows of a damaged store into a new database, which replaces the old one.

    Returns the losses, and the folder to which the old files were moved; None if nothing was damaged. The
    losses are empty if this call only finishes an interrupted repair. Raises StoreError.
    """
    lock = _locked(folder)
    try:
        if (folder / REPAIRED).exists():
            return Findings(), _put_in_place(folder)
        findings = _examined(folder, _ignore_rows)
        if findings.is_intact:
            return findings, None
        return _copied(folder), _put_in_place(folder)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the store {folder / FILE} cannot be repaired: {error}") from error
    finally:
        lock.release()


def _locked(folder: Path) -> FolderLock:
    if not (folder / FILE).is_file() and not (folder / REPAIRED).exists():
        raise StoreError(f"no store in {folder}: the file {FILE} is missing")
    return FolderLock(folder)


def _ignore_rows(table: str, rows: list[Row]) -> None:
    """Ignore sound rows: `check` only examines the store. The function is a `Keep` of damage.py."""


def _examined(folder: Path, keep: Keep) -> Findings:
    """Examine the database and its write-ahead log, and return what is damaged.

    `keep` is called with the name of each table and its sound rows. Raises StoreError, with advice for the
    operator, if nothing can be read.
    """
    path = folder / FILE
    findings = Findings()
    with closing(open_read_only(path)) as connection:
        try:
            _identify(connection)
            clean = _is_clean(connection, findings)
            findings.file += wal_faults(path, clean=clean)
            findings.file += database_faults(connection)
            examine(connection, path, findings, keep)
        except (sqlite3.Error, StoreError) as error:
            raise StoreError(
                f"the store {path}: {error}; if it is damaged, restore a backup, or, to start empty, move "
                f"{FILE}, {FILE}-wal, {FILE}-shm and {HEAP} away together"
            ) from error
    return findings


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open the database at `path` read-only.

    If it has no write-ahead log, it is opened as immutable, because otherwise SQLite would create one.
    """
    alone = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{alone}", uri=True, isolation_level=None)


def _identify(connection: sqlite3.Connection) -> None:
    version = refuse_others(connection)
    if version != newest_layout():
        raise StoreError(
            f"its schema is version {version}, but this gateway's is {newest_layout()}: repair it"
            " with the gateway that wrote it"
        )


def _is_clean(connection: sqlite3.Connection, findings: Findings) -> bool:
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'clean'").fetchone()
    except sqlite3.Error as error:
        findings.file.append(f"the table meta cannot be read: {error}")
        return False
    return bool(found == (1,))


def database_faults(connection: sqlite3.Connection) -> list[str]:
    """Return the faults that SQLite's `quick_check` finds, at most FAULTS_MAX; [] if there are none."""
    try:
        found = [text for (text,) in connection.execute(f"PRAGMA quick_check({FAULTS_MAX})")]
    except sqlite3.Error as error:
        return [str(error)]
    return [] if found == ["ok"] else [line for text in found for line in text.splitlines()][:FAULTS_MAX]


def _copied(folder: Path) -> Findings:
    """Write the sound rows into a new database in the folder REPAIRED, on disk, and return the losses."""
    new = folder / REPAIRING
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    with closing(connect(new)) as connection:

        def insert_rows(table: str, rows: list[Row]) -> None:
            values = ",".join("?" * COLUMNS[table])
            with transaction(connection):
                connection.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({values})", rows)

        findings = _examined(folder, insert_rows)
        with transaction(connection):
            connection.execute("DELETE FROM settled WHERE row NOT IN (SELECT id FROM rows)")
            connection.execute("UPDATE meta SET value = 1 WHERE key = 'clean'")
            _keep_time(folder / FILE, connection)
        if faults := database_faults(connection):
            raise StoreError(f"the repaired database is damaged, too; check the disk: {faults[0]}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    sync_path(new / FILE)
    sync_path(new)
    new.rename(folder / REPAIRED)
    sync_path(folder)
    return findings


def _keep_time(path: Path, new: sqlite3.Connection) -> None:
    """Copy the record of the time scale (timeline.py) from the database at `path`, if it can be read."""
    with (
        closing(open_read_only(path)) as connection,
        suppress(sqlite3.Error),
    ):  # which `_is_clean` has reported
        for line in connection.execute("SELECT key, value FROM meta WHERE key = ?", (TIME,)):
            new.execute("INSERT INTO meta VALUES (?, ?)", line)


def _put_in_place(folder: Path) -> Path:
    """Move the old files aside and the repaired database into their place.

    Return the folder of the old files. Continues an interrupted call.
    """
    aside = folder / f"damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(clock.unix_time()))}"
    aside.mkdir(mode=0o700, exist_ok=True)
    new = folder / REPAIRED / FILE
    if new.exists():
        for name in (FILE, *(FILE + suffix for suffix in BESIDE), HEAP):
            if (folder / name).exists():
                (folder / name).rename(aside / name)
        sync_path(aside)
        new.rename(folder / FILE)
        sync_path(folder)
    shutil.rmtree(folder / REPAIRED)
    sync_path(folder)
    return aside

"""Backup and restore of a store by copying it, even while a gateway uses it.

The copy contains the store at one moment. The database is read in one transaction, which SQLite isolates from
the gateway's commits without delaying them. The large rows (heap.py) and the body files that the transaction
refers to are not overwritten or deleted until the copy is complete (copy_lock.py). The database file gets its
final name last, when everything else is on disk, so an interrupted copy is not mistaken for a store.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from gateway.errors import StoreError
from gateway.store.copy_lock import lock_for_copy
from gateway.store.database import FILE, REPAIRED
from gateway.store.folder import FolderLock, sync_path
from gateway.store.heap import HEAP, RowPlace
from gateway.store.heap import read as read_place
from gateway.store.repair import database_faults, open_read_only
from gateway.store.schema import refuse_others
from gateway.store.statements import transaction

SPOOL: Final = "spool"
PARTIAL: Final = f"{FILE}.partial"
STEP_PAGES: Final = 256  # of the database, 1 MiB
# Bytes between two flushes. Otherwise the last flush would write everything at once, and commits of the
# gateway would wait for the disk.
FLUSH_BYTES: Final = 4_194_304


def back_up(folder: Path, to: Path) -> int:
    """Copy the store in `folder` into the folder `to`, and return the size of the copy in bytes.

    A gateway may use the store meanwhile. Raises StoreError if `to` exists and is not empty, if there is no
    store, or if it cannot be read or written.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise StoreError(f"{to} is not empty: give a new folder")
    _require(folder)
    with _guard(folder), _errors(folder, to):
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _copy(folder, to)


def restore(backup: Path, folder: Path) -> int:
    """Copy a backup into the store's folder, and return the size of the copy in bytes.

    Raises StoreError if a gateway uses the folder, if a store is in it, if there is no backup, or if it
    cannot be read or written.
    """
    _require(backup)
    lock = FolderLock(folder)
    try:
        if used := [
            name for name in (FILE, f"{FILE}-wal", HEAP, SPOOL, REPAIRED) if (folder / name).exists()
        ]:
            raise StoreError(
                f"{folder} contains a store ({used[0]}). Move that store away, or set store.path"
                " to another folder"
            )
        with _errors(backup, folder):
            return _copy(backup, folder)
    finally:
        lock.release()


def _require(folder: Path) -> None:
    """Raise StoreError if the folder contains no store, or a store whose repair is not finished."""
    if (folder / REPAIRED).exists():
        raise StoreError(
            f"the store in {folder} has an unfinished repair: finish it with `gateway store repair`"
        )
    if not (folder / FILE).is_file():
        raise StoreError(f"no store in {folder}: the file {FILE} is missing")


@contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Lock the store's folder during the `with` block, so that no gateway starts with it.

    If a gateway uses the folder already, the block runs without the lock.
    """
    lock = None
    with suppress(StoreError):  # a gateway uses it; other reasons show when its files are read
        lock = FolderLock(folder)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def _errors(folder: Path, to: Path) -> Iterator[None]:
    """Convert OSError and sqlite3.Error raised in the `with` block to StoreError.

    The text names both folders. A StoreError raised in the block is raised again, with `folder` in its text.
    """
    try:
        yield
    except StoreError as error:
        raise StoreError(f"the store in {folder} cannot be copied: {error}") from error
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the store in {folder} cannot be copied to {to}: {error}") from error


def _copy(folder: Path, to: Path) -> int:
    """Copy the database, the heap and the body files into the folder `to`.

    Return the disk space of the copy in bytes.
    """
    (to / PARTIAL).unlink(missing_ok=True)  # of an interrupted copy
    heap: int | None = None
    with suppress(FileNotFoundError):  # a repaired store has none until a gateway starts
        heap = os.open(folder / HEAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if heap is not None:
            lock_for_copy(heap)  # before the transaction begins
        with closing(open_read_only(folder / FILE)) as source:
            source.execute("BEGIN")
            refuse_others(source)
            _copy_database(source, to / PARTIAL)
            places = [RowPlace(*line) for line in source.execute("SELECT at, octets FROM places ORDER BY at")]
            if heap is not None or places:
                _copy_heap(heap, places, to / HEAP)
            if (folder / SPOOL).is_dir():
                _copy_spool(folder / SPOOL, to / SPOOL)
    finally:
        if heap is not None:
            os.close(heap)
    _finish(to / PARTIAL)
    sync_path(to)
    (to / PARTIAL).rename(to / FILE)
    sync_path(to)
    return sum(path.stat().st_blocks * 512 for path in to.rglob("*") if path.is_file())


def _copy_database(source: sqlite3.Connection, path: Path) -> None:
    path.touch(mode=0o600)
    with closing(sqlite3.connect(path, isolation_level=None)) as target:
        written = _Written(path)
        target.execute("PRAGMA synchronous = OFF")  # `written` flushes
        page = source.execute("PRAGMA page_size").fetchone()[0]
        source.backup(target, pages=STEP_PAGES, progress=lambda *_: written(STEP_PAGES * page))
    sync_path(path)


def _copy_heap(heap: int | None, places: list[RowPlace], path: Path) -> None:
    """Copy the large rows at `places` to the same positions of the new file `path`.

    The space between the rows is not written, so it takes no disk space. Raises StoreError if `heap` is None.
    """
    if heap is None:
        raise StoreError(f"{HEAP} is missing")
    path.touch(mode=0o600)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        written = _Written(path)
        for place in places:
            data = memoryview(read_place(heap, place))
            at = place.at
            while data:
                done = os.pwrite(descriptor, data, at)
                data = data[done:]
                at += done
            written(place.byte_count)
    finally:
        os.close(descriptor)
    sync_path(path)


def _copy_spool(folder: Path, to: Path) -> None:
    """Copy the files of message bodies into the folder `to`.

    A file that the gateway deletes meanwhile is skipped.
    """
    to.mkdir(mode=0o700, exist_ok=True)
    for path in sorted(folder.iterdir()):
        with suppress(FileNotFoundError):  # it was created and deleted after the transaction had begun
            shutil.copy(path, to / path.name)
            sync_path(to / path.name)
    sync_path(to)


class _Written:
    """Counter of the bytes written to a file since its last flush."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._byte_count = 0

    def __call__(self, byte_count: int) -> None:
        """Count written bytes; flush the file to disk if FLUSH_BYTES were written since the last flush."""
        self._byte_count += byte_count
        if self._byte_count >= FLUSH_BYTES:
            self._byte_count = 0
            sync_path(self._path)


def _finish(path: Path) -> None:
    """Check the copied database, and mark it as cleanly closed, because its write-ahead log is empty.

    Raises StoreError if SQLite's check finds a fault.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if faults := database_faults(connection):
            raise StoreError(f"{faults[0]}; `gateway store check` reports what is lost")
        with transaction(connection):
            connection.execute("UPDATE meta SET value = 1 WHERE key = 'clean'")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    sync_path(path)

"""SQLite database of the store: opening, checking, one transaction for each group, reading at the start.

`connect` opens or migrates the file. `StoreDatabase` executes the writer thread's transactions, and caches in
memory which rows are stored (index.py), where large rows are (heap.py) and which dead letters exist
(letters.py). It does not know what queues or sessions are. A row that cannot be read is reported as damage
and left in place. "Log" means a log of messages (index.py); SQLite's own log is called write-ahead log.
"""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from gateway import clock
from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.model.spooled_bodies import is_lost
from gateway.store.group import RUN_BYTES_MAX, Group, Key, MessageRun
from gateway.store.heap import BYTES_MIN, HEAP, KEPT_BYTES, Heap, RowPlace
from gateway.store.index import TRANSIENT, WHOLE, Index, Log, bytes_of
from gateway.store.letters import Line, StoredDeadLetter, StoredLetters, letter
from gateway.store.messages import MessageReader, encode_sound, sound_parts
from gateway.store.schema import STEPS, Step, migrate, refuse_others
from gateway.store.statements import delete, insert, transaction
from gateway.store.timeline import Timeline

FILE: Final = "gateway.db"
REPAIRED: Final = "repaired"  # folder of a repaired database that is not yet in place
CHECK_BYTES_MAX: Final = (
    268_435_456  # bytes; a larger database is checked without its messages, which have checksums
)
CACHE_KIBIBYTES: Final = 8_192
GARBAGE_MAX: Final = 2_000  # rows of dropped logs that one commit deletes
VACUUM_PAGES: Final = 1_024  # pages returned to the disk at once, while idle
VACUUM_PAGE_BYTES: Final = 3 * 4_096  # bytes that returning one page may add to the log
BUSY_SECS: Final = 5.0  # another program may read the file with a tool of SQLite
READS_MAX: Final = 10  # attempts to read a row from a failing disk

DISK_ERRORS: Final = (sqlite3.Error, OSError)
"""Exceptions of a failed write to the disk."""
Damage = Callable[[str], None]
Stored = tuple[int, Message, bytes]
"""Position of a message, the message, and the tag under which it was appended."""
T = TypeVar("T")


class ReadDelayed(StoreError):
    """Error of a row that a failing disk does not return now; reading it may be tried again."""


def connect(
    folder: Path, factory: type[sqlite3.Connection] = sqlite3.Connection, steps: Sequence[Step] = STEPS
) -> sqlite3.Connection:
    """Open the database in `folder`; create or migrate it if necessary.

    Raises StoreError with advice for the operator.
    """
    path = folder / FILE
    connection = None
    if (folder / REPAIRED).exists():
        raise StoreError(f"the store {path} has an unfinished repair: finish it with `gateway store repair`")
    try:
        path.touch(mode=0o600)  # SQLite creates its other files with the same permissions
        connection = sqlite3.connect(
            path, timeout=BUSY_SECS, isolation_level=None, check_same_thread=False, factory=factory
        )
        _prepare(connection, path, steps)
    except (OSError, sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        advice = _advice(error) if isinstance(error, sqlite3.Error) else str(error)
        raise StoreError(f"the store {path} cannot be opened: {advice}") from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, steps: Sequence[Step]) -> None:
    """Set SQLite's options, migrate the database, and check it if it was not closed cleanly.

    Raises StoreError, OSError or sqlite3.Error.
    """
    if not path.stat().st_size:
        # Before anything is read; later it has no effect.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    version = refuse_others(connection, steps)  # before anything is changed
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(f"its file system has no shared memory for a write-ahead log (mode {mode})")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA temp_store = MEMORY")
    # Some builds overwrite deleted content, which costs as much as writing it.
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIBIBYTES}")
    migrate(connection, version, steps)
    clean = connection.execute("SELECT value FROM meta WHERE key = 'clean'").fetchone()
    if clean != (1,):
        _check(connection, path)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Check the database after an unclean shutdown.

    Raises sqlite3.DatabaseError with the first fault that SQLite finds.
    """
    tables = [""] if path.stat().st_size <= CHECK_BYTES_MAX else ["(meta)", "(logs)", "(settled)", "(things)"]
    for table in tables:
        (found,) = connection.execute(f"PRAGMA quick_check{table}").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)


def _advice(error: sqlite3.Error) -> str:
    """Return the text of an SQLite error, with advice for the operator."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        advice = (
            "the file is damaged. `gateway store check` reports what is lost, `gateway store"
            " repair` saves what is readable (both with the same --config); or restore a backup."
            " To start empty, move gateway.db, gateway.db-wal, gateway.db-shm and gateway.heap"
            " away together"
        )
    elif code == sqlite3.SQLITE_FULL:
        advice = "free some space on this disk"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        advice = "another program has locked it for writing; stop that program"
    else:
        advice = "make the folder and the files in it readable and writable for this user"
    return f"{error}: {advice}"


def _may_be_temporary(error: BaseException | None) -> bool:
    """Return True for an error while reading that does not mean that the bytes on disk are wrong or lost."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        return code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    if isinstance(error, OSError):
        return not is_lost(error)
    return isinstance(error, MemoryError) or (error is not None and _may_be_temporary(error.__cause__))


def read_now(read: Callable[[], T]) -> T:
    """Call `read` until it no longer raises ReadDelayed, and return its result."""
    while True:
        with suppress(ReadDelayed):
            return read()


class CommitCounts(NamedTuple):
    """Content of a committed transaction: number of messages, and bytes of encoded messages."""

    messages: int
    byte_count: int


class StoreDatabase:
    """Tables of the store, with an index in memory. Not thread-safe: only one thread at a time may use it."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        folder: Path,
        reader: MessageReader,
        *,
        letters: UserShares,
        damage: Damage,
    ) -> None:
        """Read the whole database except the messages.

        `letters` has the limits of the dead letters, and must be empty. `damage` is called with a text for
        each piece of data that cannot be read later. Raises StoreError if the database or the heap cannot be
        read.
        """
        self.connection = connection
        self._path = folder / FILE
        self._files = (self._path, folder / f"{FILE}-wal", folder / HEAP)
        self.reader = reader
        self.damage = damage
        self.index = Index()
        self.tagged: dict[bytes, set[int]] = {}  # ids of the logs with messages of a tag, at the start
        self.garbage: array[int] = array("q")
        self._elsewhere: array[int] = array("q")  # rows whose messages must be in the heap
        self._unreadable: set[int] = set()  # rows that were reported as damaged
        self._attempts: Counter[int] = Counter()  # failed ones, by row, of rows that may be read again
        self._last_row = 0
        self.log_is_read = False  # another program was reading the log when it was to be emptied
        try:
            self.timeline = Timeline(connection)
            reader.ahead_secs = self.timeline.ahead_secs
            self.letters = StoredLetters(connection, letters, self.timeline.ahead_secs)
            self.logs = [
                Log(*line) for line in connection.execute("SELECT id, kind, name FROM logs ORDER BY id")
            ]
            self.last_log = max((log.id for log in self.logs), default=0)
            self._load_rows()
            places = connection.execute("SELECT row, at, octets FROM places")
            self.heap = Heap(folder, {row: RowPlace(at, byte_count) for row, at, byte_count in places})
            self._check_places()
        except sqlite3.Error as error:
            connection.close()
            raise StoreError(f"the store cannot be read: {_advice(error)}") from error
        except (OSError, StoreError) as unreadable:
            connection.close()
            advice = _advice(sqlite3.DatabaseError(str(unreadable)))
            raise StoreError(f"the store in {folder} cannot be opened: {advice}") from unreadable

    def _load_rows(self) -> None:
        """Add all rows of messages to the index.

        Rows of dropped logs, and of messages that are stored only until the next start (TRANSIENT), are not
        added; they are deleted later, as `garbage`.
        """
        of = {log.id: self.index.of(log.id).add for log in self.logs}
        id = 0
        for id, log, first, count, byte_count, tag, elsewhere in self.connection.execute(
            "SELECT id, log, first, count, octets, tag, length(messages) = 0 FROM rows ORDER BY id"
        ):
            if elsewhere:
                self._elsewhere.append(id)
            add = of.get(log)
            if add is None:  # its log was dropped
                self.garbage.append(id)
                self.last_log = max(self.last_log, log)
            elif tag == TRANSIENT:
                self.garbage.append(id)
            else:
                add(id, first, count, byte_count)
                if tag:
                    self.tagged.setdefault(tag, set()).add(log)
        self._last_row = id
        for id, bits in self.connection.execute("SELECT row, bits FROM settled"):
            self.index.settled[id] = int.from_bytes(bits, "little")
        for id in self.garbage:
            self.index.settled.pop(id, None)

    def _check_places(self) -> None:
        """Raise StoreError if the database does not say where in the heap a large row is."""
        lacking = [row for row in self._elsewhere if row not in self.heap.places]
        self._elsewhere = array("q")
        if lacking:
            self.heap.close()
            more = f", nor have {len(lacking) - 1} others" if len(lacking) > 1 else ""
            raise StoreError(f"row {lacking[0]} has no place in {HEAP}{more}")

    def mark(self, clean: bool) -> None:
        """Record in the database whether the gateway was shut down cleanly. Raises sqlite3.Error."""
        self.connection.execute("UPDATE meta SET value = ? WHERE key = 'clean'", (int(clean),))
        if clean:
            self.timeline.record(self.connection, 0.0)

    # One transaction.

    def commit(self, group: Group) -> CommitCounts | None:
        """Write the operations in `group` in one transaction.

        Return None if nothing was written, because the operations have no effect in sum. Raises one of
        DISK_ERRORS; then nothing has changed.
        """
        runs = [(self._next_row(), run) for run in group.runs()]
        if not runs and not group.has_changes:
            return None
        large: dict[int, RowPlace] = {}
        try:
            lines, byte_count = self._encode(runs, large)
            self.heap.sync()
            with transaction(self.connection):
                self._write_logs(group)
                insert(self.connection, "rows", 7, lines)
                insert(self.connection, "places", 3, [(id, *place) for id, place in large.items()])
                self._write_settled(group, runs)
                self._write_things(group)
                self.letters.write()
                self.timeline.record(self.connection)
                collected = self._delete_garbage()
        except BaseException:
            for id in large:
                self.heap.free(id)
            raise
        self._committed(group, runs, collected)
        return CommitCounts(sum(len(run.messages) for _, run in runs), byte_count)

    def _encode(
        self, runs: list[tuple[int, MessageRun]], large: dict[int, RowPlace]
    ) -> tuple[list[tuple[Any, ...]], int]:
        """Return the values to insert into the table `rows`, and the total size of the messages in bytes.

        `runs` are row ids with their messages. Large rows are written to the heap, and their places are added
        to `large` by row id.
        """
        lines = []
        total = 0
        for id, run in runs:
            parts = sound_parts(run.messages, run.offsets, self.timeline.ahead_secs)
            byte_count = sum(map(len, parts))
            total += byte_count
            if byte_count >= BYTES_MIN:
                large[id] = self.heap.write(id, parts)
                parts = []
            line = (id, run.log, run.first, run.count, run.byte_count, run.tag, b"".join(parts))
            lines.append(line)
        return lines, total

    def _next_row(self) -> int:
        self._last_row += 1
        return self._last_row

    def _write_logs(self, group: Group) -> None:
        delete(self.connection, "logs", "id", group.dropped)
        logs = (*group.created.values(), *group.renamed.values())
        insert(self.connection, "logs", 3, [(log.id, log.kind, log.name) for log in logs])

    def _write_settled(self, group: Group, runs: list[tuple[int, MessageRun]]) -> None:
        """Write which messages of partly settled rows are settled, and delete completely settled rows.

        `runs` are the new rows; positions without a message are stored as settled.
        """
        settled_rows = self.index.settled
        whole = [id for id, change in group.changes.items() if change.bits == WHOLE]
        self._delete_rows(whole)
        delete(self.connection, "settled", "row", [id for id in whole if id in settled_rows])
        parts = [
            (id, bytes_of(change.bits, change.count))
            for id, change in group.changes.items()
            if change.bits != WHOLE
        ]
        parts += [(id, bytes_of(gaps_of(run), run.count)) for id, run in runs if run.offsets is not None]
        insert(self.connection, "settled", 2, parts)

    def _write_things(self, group: Group) -> None:
        """Write, replace and delete the small records of `group` in the table `things`.

        A small record is a value by kind and key.
        """
        connection = self.connection
        for kind, prefix in group.emptied:
            if not prefix:
                connection.execute("DELETE FROM things WHERE kind = ?", (kind,))
                continue
            end = after(prefix)
            within = "" if end is None else " AND key < ?"  # apart, so that the index finds both ends
            bounds = (prefix,) if end is None else (prefix, end)
            connection.execute(
                f"DELETE FROM things WHERE kind = ? AND key >= ?{within} AND typeof(key) = ?",
                (kind, *bounds, "text" if isinstance(prefix, str) else "blob"),
            )
        lines: list[tuple[str, Key, int, bytes]] = []
        deleted_keys: dict[str, list[Key]] = {}
        for (kind, key), value in group.things.items():
            if value is None:
                deleted_keys.setdefault(kind, []).append(key)
            elif isinstance(value, Message):
                lines.append((kind, key, 1, encode_sound(value, self.timeline.ahead_secs)))
            else:
                lines.append((kind, key, 0, value))
        for kind, keys in deleted_keys.items():
            delete(connection, "things", "key", keys, kind=kind)
        insert(connection, "things", 4, lines)

    def _delete_garbage(self) -> array[int]:
        """Delete at most GARBAGE_MAX rows of dropped logs or transient messages, and return their ids."""
        some = self.garbage[-GARBAGE_MAX:]
        self._delete_rows(some)
        delete(self.connection, "settled", "row", some)
        return some

    def _delete_rows(self, ids: Sequence[int]) -> None:
        delete(self.connection, "rows", "id", ids)
        delete(self.connection, "places", "row", [id for id in ids if id in self.heap.places])

    def _committed(self, group: Group, runs: list[tuple[int, MessageRun]], collected: array[int]) -> None:
        """Update the index in memory after the operations in `group` were committed.

        `runs` are the new rows by row id, `collected` the ids of rows that `_delete_garbage` has deleted.
        """
        index = self.index
        settled = index.settled
        self._forget_garbage(collected)
        for log in group.dropped:
            rows = index.logs.pop(log, None)
            if rows is not None:
                ids = rows.ids()
                self.garbage += ids
                for id in ids:
                    settled.pop(id, None)
        touched = set()
        for id, change in group.changes.items():
            if change.bits == WHOLE:
                settled.pop(id, None)
                rows = index.logs[change.log]
                rows.remove(id, change.first)
                self._free(id)
                touched.add(rows)
            else:
                settled[id] = change.bits
        for rows in touched:
            rows.compact()
        for id, run in runs:
            index.of(run.log).add(id, run.first, run.count, run.byte_count)
            if run.offsets is not None:
                settled[id] = gaps_of(run)
        self.letters.clear_changes()

    def _free(self, row: int) -> None:
        if row in self.heap.places:
            self.heap.free(row)

    def _forget_garbage(self, collected: array[int]) -> None:
        """Free the heap space of deleted rows, and remove them from the list of rows to delete (`garbage`).

        `collected` are the ids of these rows, which are the last ones in that list.
        """
        for id in collected:
            self._free(id)
        del self.garbage[len(self.garbage) - len(collected) :]

    # Reading.

    def messages(self, ids: Sequence[int], bits: Callable[[int], int]) -> list[Stored]:
        """Return the unsettled messages of the rows with these ids, each with its position and tag.

        `bits` returns which messages of a row are settled. A row that cannot be read is reported as damage
        and left out. It stays in the table for `gateway store repair`. Its messages become dead letters
        without bodies, as far as their other fields are readable. Raises ReadDelayed if a row cannot be read
        now, at the first READS_MAX - 1 attempts.
        """
        found: list[Stored] = []
        for id in ids:
            if id in self._unreadable:
                continue
            data = b""
            try:
                line = self.connection.execute(
                    "SELECT first, tag, messages FROM rows WHERE id = ?", (id,)
                ).fetchone()
                if line is None:
                    continue
                first, tag, data = line
                data = data or self.heap.read(id)
                offsets, messages = self.reader.decode(data)
            except (sqlite3.Error, StoreError, MemoryError) as error:
                self._delay_read(id, error)
                self._unreadable.add(id)
                self._report_lost_row(id, data, bits(id), error)
                continue
            if self._attempts:
                self._attempts.pop(id, None)
            settled = bits(id)
            found += [
                (first + offset, message, tag)
                for offset, message in zip(offsets, messages, strict=True)
                if not settled or not settled >> offset & 1
            ]
        return found

    def _delay_read(self, id: int, error: Exception) -> None:
        """Raise ReadDelayed if `error` may be temporary and the row was tried less than READS_MAX times.

        Return if the row is lost.
        """
        if not _may_be_temporary(error):
            return
        self._attempts[id] += 1
        if self._attempts[id] < READS_MAX:
            raise ReadDelayed(f"row {id} of the store cannot be read now: {error}") from error
        del self._attempts[id]

    def _report_lost_row(self, id: int, data: bytes, settled: int, error: Exception) -> None:
        """Report a damaged row, and store its unsettled messages, without bodies, as dead letters.

        `data` are the row's bytes as far as they could be read; `settled` has a bit for each settled message.
        No dead letters are added if an earlier process has added them.
        """
        self.damage(f"row {id} of the store cannot be read, its messages are skipped: {error}")
        text = f"row {id} of the store is damaged, the body is lost: {error}"
        heads = [head for at, head in self.reader.heads(data) if not settled >> at & 1]
        try:
            if heads and not self.letters.has_text(text):
                self.letters.add(heads, "", Outcome(Verdict.REJECTED, Reason.STORE, text), clock.utc())
        except sqlite3.Error as another:
            self.damage(f"the dead letters of row {id} cannot be stored: {another}")

    def references(self) -> Iterator[tuple[int, int, Message]]:
        """Yield log id, position and message of each stored message that has its body in a file.

        Only the rows of such messages are read. A query finds them by size: the encoded row is much shorter
        than the size of its message, which includes the body.
        """
        ids = self.connection.execute(
            "SELECT id, log FROM rows WHERE octets > ? AND octets > 2 * length(messages) AND tag != ?",
            (RUN_BYTES_MAX, TRANSIENT),
        ).fetchall()
        passed = self.heap.places.keys() | set(self.garbage)
        for id, log in ids:
            if id not in passed:
                for position, message, _ in read_now(partial(self.messages, [id], lambda row: 0)):
                    yield log, position, message

    def records(self, kind: str) -> Iterator[tuple[Key, bytes | Message]]:
        """Yield key and value of each record of a kind in the table `things`, in order of key.

        The table has all records except messages and dead letters, such as sessions and definitions.
        Unreadable records are reported as damage and left out.
        """
        for key, message, value in self.connection.execute(
            "SELECT key, message, value FROM things WHERE kind = ? ORDER BY key", (kind,)
        ):
            try:
                found = self.reader.decode_one(value) if message else value
            except StoreError as error:
                self.damage(f"{kind} {key!r} of the store cannot be read and is skipped: {error}")
            else:
                yield key, found

    def dead_letters(
        self, query: Callable[[], Iterable[Line]], count: int | None, bytes_max: int
    ) -> list[StoredDeadLetter]:
        """Return the first `count` dead letters that `query` yields; None returns all.

        The result ends early with the message that fills up `bytes_max` bytes. Unreadable ones are reported
        as damage and left out.
        """
        found: list[StoredDeadLetter] = []
        try:
            for line in query():
                if len(found) == count or bytes_max <= 0:
                    break
                try:
                    found.append(letter(self.reader, line))
                    bytes_max -= found[-1].message.byte_count  # callers count it, too, so not by the row
                except StoreError as error:
                    self.damage(f"dead letter {line[0]} of the store cannot be read: {error}")
        except sqlite3.Error as failure:
            self.damage(f"a dead letter of the store cannot be read, nor can the following ones: {failure}")
        return found

    # Housekeeping.

    def tidy(self, pages: int = VACUUM_PAGES, *, reserve_bytes: int = KEPT_BYTES) -> bool:
        """Return free disk space to the file system, and shorten the write-ahead log.

        Returns True if there is more to do. At most `pages` free pages of the database are returned, and the
        free end of the heap except `reserve_bytes` bytes. On an almost full disk fewer pages are returned,
        because that itself needs space in the write-ahead log. Raises one of DISK_ERRORS.
        """
        if self.garbage:
            with transaction(self.connection):
                collected = self._delete_garbage()
            self._forget_garbage(collected)
        moved = self.heap.is_sparse and self._move()
        self.heap.shorten(reserve_bytes)
        free = self._number("PRAGMA freelist_count")
        possible = min(pages, self._free_bytes() // VACUUM_PAGE_BYTES)
        if free and possible:
            # Each page is a step without columns, and `execute` runs only the first step of such a statement.
            self.connection.executescript(f"PRAGMA incremental_vacuum({possible})")
        self.shorten()
        return free > possible > 0 or len(self.garbage) > 0 or moved

    def _move(self) -> bool:
        """Move rows from the end of the heap into free space before them. Return False if none was moved."""
        former = self.heap.move()
        moved = [(row, *self.heap.places[row]) for row in former]
        committed = False
        try:
            with transaction(self.connection):
                insert(self.connection, "places", 3, moved)
            committed = True
        finally:
            self.heap.finish_move(former, committed=committed)
        return bool(former)

    def shorten(self) -> bool:
        """Copy the write-ahead log into the database file and truncate it. Return True if it is empty.

        Returns False without an attempt if the disk has no space for it, because an interrupted copy would
        have grown the database file without shortening the write-ahead log. Also returns False if another
        program (a backup) reads the database: the pages that the reader does not need are copied, and this
        method does not wait for it, because commits would wait too. Raises sqlite3.Error.
        """
        size = self._number("PRAGMA page_count") * self._number("PRAGMA page_size")
        if size - self._path.stat().st_size > self._free_bytes():
            return False
        self._wait_for_others(0.0)
        try:
            (busy, _, _) = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._wait_for_others(BUSY_SECS)
        self.log_is_read = bool(busy)
        return not busy

    def _wait_for_others(self, seconds: float) -> None:
        """Set how many seconds a statement waits for a lock of another program."""
        self.connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}").fetchall()

    def checkpoints(self, pages: int) -> None:
        """Let SQLite make a checkpoint whenever the write-ahead log has this many pages; 0 for never."""
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {pages}").fetchall()

    def _number(self, pragma: str) -> int:
        found: int = self.connection.execute(pragma).fetchone()[0]
        return found

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize

    def size(self) -> int:
        """Return the total size of the database, write-ahead log and heap in bytes."""
        byte_count = 0
        for path in self._files:
            with suppress(OSError):  # there is no log before the first transaction
                byte_count += path.stat().st_size
        return byte_count

    def close(self) -> None:
        """Truncate the free end of the heap, and close the heap and the database."""
        with suppress(OSError):  # a failing disk: the heap stays longer than necessary
            self.heap.shorten(0)
        self.heap.close()
        self.connection.close()


def gaps_of(run: MessageRun) -> int:
    """Return the positions of `run` without a message as bits: bit k is for position `first` + k.

    `run` must have `offsets`. These positions are stored as settled.
    """
    assert run.offsets is not None
    live = 0
    for offset in run.offsets:
        live |= 1 << offset
    return ~live & ((1 << run.count) - 1)


def after(prefix: Key) -> Key | None:
    """Return the smallest key greater than all keys that begin with `prefix`, in SQLite's order.

    Returns None if there is no such key.
    """
    if isinstance(prefix, bytes):
        trimmed = prefix.rstrip(b"\xff")
        return trimmed[:-1] + bytes((trimmed[-1] + 1,)) if trimmed else None
    text = prefix.rstrip("\U0010ffff")
    if not text:
        return None
    point = ord(text[-1]) + 1
    return text[:-1] + chr(0xE000 if 0xD800 <= point <= 0xDFFF else point)

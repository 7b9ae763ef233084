"""The database: opened, checked, read at the start, and one transaction for each group."""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway import clock
from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.store.group import RUN_OCTETS_MAX, Group, Key, Run
from gateway.store.heap import HEAP, KEPT_OCTETS, OCTETS_MIN, Heap, Place
from gateway.store.index import TRANSIENT, WHOLE, Index, Log, octets_of
from gateway.store.letters import DeadLetter, Letters, Line, letter
from gateway.store.messages import MessageReader, encode_sound, sound_parts
from gateway.store.schema import STEPS, Step, migrate, refuse_others
from gateway.store.statements import delete, insert, transaction

FILE: Final = "gateway.db"
REPAIRED: Final = "repaired"  # folder in which a repaired database waits for its place
CHECK_OCTETS_MAX: Final = (
    268_435_456  # a larger database is checked without its messages: they have checksums
)
CACHE_KIBIBYTES: Final = 8_192
GARBAGE_MAX: Final = 2_000  # rows of dropped logs that are deleted with one commit
VACUUM_PAGES: Final = 1_024  # given back to the disk in one go, when there is nothing else to do
VACUUM_PAGE_OCTETS: Final = 3 * 4_096  # what giving back one page may add to the log
BUSY_SECS: Final = 5.0  # somebody may look into the file with a tool of SQLite's

DISK_ERRORS: Final = (sqlite3.Error, OSError)
"""What writing raises when the disk does not take it."""
Damage = Callable[[str], None]
Stored = tuple[int, Message, bytes]
"""A position, its message, and the tag under which it was appended."""


def connect(
    folder: Path, factory: type[sqlite3.Connection] = sqlite3.Connection, steps: Sequence[Step] = STEPS
) -> sqlite3.Connection:
    """Open the database, creating or migrating it. Raises StoreError, which says what to do."""
    path = folder / FILE
    connection = None
    if (folder / REPAIRED).exists():
        raise StoreError(
            f"the store {path} is being repaired: call `gateway store repair` again to finish it"
        )
    try:
        path.touch(mode=0o600)  # what SQLite puts beside it has the same rights
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
    if not path.stat().st_size:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before anything is read, or never
    version = refuse_others(connection, steps)  # before anything is changed
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(f"its file system has no shared memory for a write-ahead log (mode {mode})")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA temp_store = MEMORY")
    # Some builds overwrite what is deleted, which costs as much as writing it did.
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIBIBYTES}")
    migrate(connection, version, steps)
    clean = connection.execute("SELECT value FROM meta WHERE key = 'clean'").fetchone()
    if clean != (1,):
        _check(connection, path)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """After an end that was not clean. Raises StoreError naming the first fault."""
    tables = (
        [""] if path.stat().st_size <= CHECK_OCTETS_MAX else ["(meta)", "(logs)", "(settled)", "(things)"]
    )
    for table in tables:
        (found,) = connection.execute(f"PRAGMA quick_check{table}").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)


def _advice(error: sqlite3.Error) -> str:
    """What SQLite said, and what to do about it."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        advice = (
            "the file is damaged. `gateway store check` says what is lost, `gateway store repair` saves "
            "what can be read (both with the same --config); or restore a backup; to start empty, move "
            "gateway.db, gateway.db-wal, gateway.db-shm and gateway.heap away together"
        )
    elif code == sqlite3.SQLITE_FULL:
        advice = "free some space on this disk"
    elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        advice = "another program holds it open for writing; end that program"
    else:
        advice = "make the folder and the files in it readable and writable for this user"
    return f"{error}: {advice}"


class Written(NamedTuple):
    """What a transaction wrote: messages, and octets of encoded messages."""

    messages: int
    octets: int


class Database:
    """The tables, and what is known of them in memory. One thread at a time may use it."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        folder: Path,
        reader: MessageReader,
        *,
        letters: UserShares,
        damage: Damage,
    ) -> None:
        """Reads what is stored, without messages. `letters` has the limits of dead letters. Raises
        StoreError when that cannot be read."""
        self.connection = connection
        self._path = folder / FILE
        self._files = (self._path, folder / f"{FILE}-wal", folder / HEAP)
        self.reader = reader
        self.damage = damage
        self.index = Index()
        self.garbage: array[int] = array("q")
        self._elsewhere: array[int] = array("q")  # rows that have to be in the heap
        self._unreadable: set[int] = set()  # rows that were reported
        self._last_row = 0
        self.log_is_read = False  # another program needed the log when it was to be emptied
        try:
            self.letters = Letters(connection, letters)
            self.logs = [
                Log(*line) for line in connection.execute("SELECT id, kind, name FROM logs ORDER BY id")
            ]
            self.last_log = max((log.id for log in self.logs), default=0)
            self._load_rows()
            places = connection.execute("SELECT row, at, octets FROM places")
            self.heap = Heap(folder, {row: Place(at, octets) for row, at, octets in places})
            self._check_places()
        except sqlite3.Error as error:
            connection.close()
            raise StoreError(f"the store cannot be read: {_advice(error)}") from error
        except (OSError, StoreError) as error:
            connection.close()
            advice = _advice(sqlite3.DatabaseError(str(error)))
            raise StoreError(f"the store in {folder} cannot be opened: {advice}") from error

    def _load_rows(self) -> None:
        of = {log.id: self.index.of(log.id).add for log in self.logs}
        id = 0
        for id, log, first, count, octets, tag, elsewhere in self.connection.execute(
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
                add(id, first, count, octets)
        self._last_row = id
        for id, bits in self.connection.execute("SELECT row, bits FROM settled"):
            self.index.settled[id] = int.from_bytes(bits, "little")
        for id in self.garbage:
            self.index.settled.pop(id, None)

    def _check_places(self) -> None:
        """Raises StoreError when a large row has no place in the heap."""
        lacking = [row for row in self._elsewhere if row not in self.heap.places]
        self._elsewhere = array("q")
        if lacking:
            self.heap.close()
            more = f", nor have {len(lacking) - 1} others" if len(lacking) > 1 else ""
            raise StoreError(f"row {lacking[0]} has no place in {HEAP}{more}")

    def mark(self, clean: bool) -> None:
        """Note whether this gateway has ended in good order. Raises sqlite3.Error."""
        self.connection.execute("UPDATE meta SET value = ? WHERE key = 'clean'", (int(clean),))

    # One transaction.

    def commit(self, group: Group) -> Written | None:
        """Write the group. Raises one of DISK_ERRORS: nothing has changed.

        None: everything in the group has cancelled out, and the disk was not touched.
        """
        runs = [(self._next_row(), run) for run in group.runs()]
        if not runs and not group.changed:
            return None
        large: dict[int, Place] = {}
        try:
            lines, octets = self._encode(runs, large)
            self.heap.sync()
            with transaction(self.connection):
                self._write_logs(group)
                insert(self.connection, "rows", 7, lines)
                insert(self.connection, "places", 3, [(id, *place) for id, place in large.items()])
                self._write_settled(group, runs)
                self._write_things(group)
                self.letters.write()
                collected = self._delete_garbage()
        except BaseException:
            for id in large:
                self.heap.free(id)
            raise
        self._committed(group, runs, collected)
        return Written(sum(len(run.messages) for _, run in runs), octets)

    def _encode(
        self, runs: list[tuple[int, Run]], large: dict[int, Place]
    ) -> tuple[list[tuple[Any, ...]], int]:
        """Lines for the table of rows, and their octets in all; the large ones are written to the heap."""
        lines = []
        total = 0
        for id, run in runs:
            parts = sound_parts(run.messages, run.offsets)
            octets = sum(map(len, parts))
            total += octets
            if octets >= OCTETS_MIN:
                large[id] = self.heap.write(id, parts)
                parts = []
            line = (id, run.log, run.first, run.count, run.octets, run.tag, b"".join(parts))
            lines.append(line)
        return lines, total

    def _next_row(self) -> int:
        self._last_row += 1
        return self._last_row

    def _write_logs(self, group: Group) -> None:
        delete(self.connection, "logs", "id", group.dropped)
        named = (*group.created.values(), *group.renamed.values())
        insert(self.connection, "logs", 3, [(log.id, log.kind, log.name) for log in named])

    def _write_settled(self, group: Group, runs: list[tuple[int, Run]]) -> None:
        known = self.index.settled
        whole = [id for id, change in group.changes.items() if change.bits == WHOLE]
        self._delete_rows(whole)
        delete(self.connection, "settled", "row", [id for id in whole if id in known])
        parts = [
            (id, octets_of(change.bits, change.count))
            for id, change in group.changes.items()
            if change.bits != WHOLE
        ]
        parts += [(id, octets_of(gaps_of(run), run.count)) for id, run in runs if run.offsets is not None]
        insert(self.connection, "settled", 2, parts)

    def _write_things(self, group: Group) -> None:
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
        gone: dict[str, list[Key]] = {}
        for (kind, key), value in group.things.items():
            if value is None:
                gone.setdefault(kind, []).append(key)
            elif isinstance(value, Message):
                lines.append((kind, key, 1, encode_sound(value)))
            else:
                lines.append((kind, key, 0, value))
        for kind, keys in gone.items():
            delete(connection, "things", "key", keys, kind=kind)
        insert(connection, "things", 4, lines)

    def _delete_garbage(self) -> array[int]:
        """Delete some of what dropped logs have left."""
        some = self.garbage[-GARBAGE_MAX:]
        self._delete_rows(some)
        delete(self.connection, "settled", "row", some)
        return some

    def _delete_rows(self, ids: Sequence[int]) -> None:
        delete(self.connection, "rows", "id", ids)
        delete(self.connection, "places", "row", [id for id in ids if id in self.heap.places])

    def _committed(self, group: Group, runs: list[tuple[int, Run]], collected: array[int]) -> None:
        """The index follows the tables."""
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
            index.of(run.log).add(id, run.first, run.count, run.octets)
            if run.offsets is not None:
                settled[id] = gaps_of(run)
        self.letters.written()

    def _free(self, row: int) -> None:
        if row in self.heap.places:
            self.heap.free(row)

    def _forget_garbage(self, collected: array[int]) -> None:
        for id in collected:
            self._free(id)
        del self.garbage[len(self.garbage) - len(collected) :]

    # Reading.

    def messages(self, ids: Sequence[int], bits: Callable[[int], int]) -> list[Stored]:
        """The messages of these rows, less those that `bits` says are settled.

        A row that cannot be read is reported as damage and left out; it stays where it is, for `gateway store
        repair`. Of what can still be told of its messages there are dead letters.
        """
        found: list[Stored] = []
        for id in ids:
            if id in self._unreadable:
                continue
            octets = b""
            try:
                line = self.connection.execute(
                    "SELECT first, tag, messages FROM rows WHERE id = ?", (id,)
                ).fetchone()
                if line is None:
                    continue
                first, tag, octets = line
                octets = octets or self.heap.read(id)
                offsets, messages = self.reader.decode(octets)
            except (sqlite3.Error, StoreError) as error:
                self._unreadable.add(id)
                self._lose(id, octets, bits(id), error)
                continue
            settled = bits(id)
            found += [
                (first + offset, message, tag)
                for offset, message in zip(offsets, messages, strict=True)
                if not settled or not settled >> offset & 1
            ]
        return found

    def _lose(self, id: int, octets: bytes, settled: int, error: Exception) -> None:
        """The messages of a row are lost: say so, and keep what can be told of them as dead letters, once."""
        self.damage(f"row {id} of the store cannot be read, its messages are left out: {error}")
        text = f"row {id} of the store is damaged, the body is lost: {error}"
        heads = [head for at, head in self.reader.heads(octets) if not settled >> at & 1]
        try:
            if heads and not self.letters.says(text):
                self.letters.add(heads, "", Outcome(Verdict.REJECTED, Reason.STORE, text), clock.utc())
        except sqlite3.Error as another:
            self.damage(f"the dead letters of row {id} cannot be kept: {another}")

    def references(self) -> Iterator[tuple[int, int, Message]]:
        """Log, position and message of what will be there after a restart with its body in a file.

        Such rows are found without reading them: they are much shorter than what they weigh.
        """
        ids = self.connection.execute(
            "SELECT id, log FROM rows WHERE octets > ? AND octets > 2 * length(messages) AND tag != ?",
            (RUN_OCTETS_MAX, TRANSIENT),
        ).fetchall()
        passed = self.heap.places.keys() | set(self.garbage)
        for id, log in ids:
            if id not in passed:
                for position, message, _ in self.messages([id], lambda row: 0):
                    yield log, position, message

    def things(self, kind: str) -> Iterator[tuple[Key, bytes | Message]]:
        """Keys and values of a kind, in order of key, less those that cannot be read, which are reported as
        damage."""
        for key, message, value in self.connection.execute(
            "SELECT key, message, value FROM things WHERE kind = ? ORDER BY key", (kind,)
        ):
            try:
                found = self.reader.decode_one(value) if message else value
            except StoreError as error:
                self.damage(f"{kind} {key!r} of the store cannot be read, and is left out: {error}")
            else:
                yield key, found

    def dead_letters(self, query: Callable[[], Iterable[Line]], count: int | None = None) -> list[DeadLetter]:
        """The first `count` letters that `query` finds, less those that cannot be read, which are reported as
        damage."""
        found: list[DeadLetter] = []
        try:
            for line in query():
                if len(found) == count:
                    break
                try:
                    found.append(letter(self.reader, line))
                except StoreError as error:
                    self.damage(f"dead letter {line[0]} of the store cannot be read: {error}")
        except sqlite3.Error as error:
            self.damage(f"a dead letter of the store cannot be read, nor can those behind it: {error}")
        return found

    # Keeping house.

    def tidy(self, pages: int = VACUUM_PAGES, *, kept: int = KEPT_OCTETS) -> bool:
        """Give `pages` back to the disk, and all but `kept` octets of what is free at the heap's end; shorten
        the log. True: there is more. Raises one of DISK_ERRORS.

        On a disk that is nearly full it leaves room for what has to be written: a log that cannot grow keeps
        what is settled from being deleted.
        """
        if self.garbage:
            with transaction(self.connection):
                collected = self._delete_garbage()
            self._forget_garbage(collected)
        moved = self.heap.sparse and self._move()
        self.heap.shorten(kept)
        free = self._number("PRAGMA freelist_count")
        possible = min(pages, self._room() // VACUUM_PAGE_OCTETS)
        if free and possible:
            # Each page is a step without columns, and `execute` takes only the first of such.
            self.connection.executescript(f"PRAGMA incremental_vacuum({possible})")
        self.shorten()
        return free > possible > 0 or len(self.garbage) > 0 or moved

    def _move(self) -> bool:
        """Rows from the end of the heap into its holes. False: none has room there."""
        former = self.heap.move()
        moved = [(row, *self.heap.places[row]) for row in former]
        committed = False
        try:
            with transaction(self.connection):
                insert(self.connection, "places", 3, moved)
            committed = True
        finally:
            self.heap.moved(former, committed=committed)
        return bool(former)

    def shorten(self) -> bool:
        """Empty the log into the file. False: the disk has no room for that, or another program reads the
        file (a backup). Raises sqlite3.Error.

        Without room it is not even tried: halfway the file would have grown, and the log not have shrunk. A
        reader is not waited for, since commits would wait with it: as much is moved as it does not need.
        """
        size = self._number("PRAGMA page_count") * self._number("PRAGMA page_size")
        if size - self._path.stat().st_size > self._room():
            return False
        self._wait_for_others(0.0)
        try:
            (busy, _, _) = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._wait_for_others(BUSY_SECS)
        self.log_is_read = bool(busy)
        return not busy

    def _wait_for_others(self, seconds: float) -> None:
        """Set how long a statement waits for a lock of another program."""
        self.connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}").fetchall()

    def checkpoints(self, pages: int) -> None:
        """Shorten the log by itself whenever it has so many pages; 0: never."""
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {pages}").fetchall()

    def _number(self, pragma: str) -> int:
        found: int = self.connection.execute(pragma).fetchone()[0]
        return found

    def _room(self) -> int:
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize

    def size(self) -> int:
        """Octets of the files on disk."""
        octets = 0
        for path in self._files:
            with suppress(OSError):  # there is no log before the first transaction
                octets += path.stat().st_size
        return octets

    def close(self) -> None:
        """Let go of the files."""
        with suppress(OSError):  # the disk fails: it stays longer than it need be
            self.heap.shorten(0)
        self.heap.close()
        self.connection.close()


def gaps_of(run: Run) -> int:
    """The bits of what was settled before the run was written."""
    assert run.offsets is not None
    live = 0
    for offset in run.offsets:
        live |= 1 << offset
    return ~live & ((1 << run.count) - 1)


def after(prefix: Key) -> Key | None:
    """The least key beyond all that begin with `prefix`, in SQLite's order; None: there is none."""
    if isinstance(prefix, bytes):
        kept = prefix.rstrip(b"\xff")
        return kept[:-1] + bytes((kept[-1] + 1,)) if kept else None
    text = prefix.rstrip("\U0010ffff")
    if not text:
        return None
    point = ord(text[-1]) + 1
    return text[:-1] + chr(0xE000 if 0xD800 <= point <= 0xDFFF else point)

"""Examination of a damaged database: find the readable parts without changing anything.

SQLite stores a table as a tree of pages. A damaged page makes everything below it unreachable, and a
statement that reads it fails. Each table is therefore read by ranges of its key: a range that fails is halved
until it is small, or until none of its sampled keys can be read. Each readable row is then decoded as the
gateway would decode it. Its messages have a checksum, in the table or in the heap, and each body file that a
message refers to must exist.

Three kinds of loss are reported: rows with damaged bytes, whose log is known; unreachable ranges of a table,
whose messages are estimated from the gap in the positions of a log; and the latest commits, if the
write-ahead log is missing or damaged.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct, unpack
from typing import Any, Final

from gateway.errors import StoreError
from gateway.model.spooled_bodies import OpenBody, Spooled
from gateway.store.heap import HEAP, RowPlace, read
from gateway.store.index import TRANSIENT
from gateway.store.messages import MessageReader

KEY_MAX: Final = (1 << 62) - 1
SAMPLES: Final = 64  # keys of a range that are tried before the whole range is given up
NUMBERED: Final = {"logs": "id", "rows": "id", "settled": "row", "places": "row", "dead_letters": "id"}
SHOWN_MAX: Final = 1_000  # lost records that are named; the others are only counted
COPIED_BYTES_MAX: Final = 16_777_216  # bytes of rows that are copied together

WAL_HEAD: Final = Struct(">8I")
FRAME_HEAD: Final = Struct(">6I")
WAL_MAGIC: Final = 0x377F0682  # its last bit is the byte order of the checksums
# Bytes; the log is shortened long before, and the checksums take a while.
WAL_CHECKED_MAX: Final = 64 * 1024 * 1024

Row = tuple[Any, ...]
Key = str | bytes
Keep = Callable[[str, list[Row]], None]
"""Callback for the sound rows of a table."""


@dataclass
class LostMessages:
    """Numbers of lost messages of one log: certainly lost (`messages`) and possibly lost (`perhaps`)."""

    messages: int = 0
    perhaps: int = 0


@dataclass
class Findings:
    """Result of the examination of a database."""

    file: list[str] = field(default_factory=list)
    """Faults of the files themselves."""
    rows: dict[str, int] = field(default_factory=dict)
    """Number of sound rows, by table."""
    hidden: dict[str, int] = field(default_factory=dict)
    """Number of unreadable ranges, by table; how many rows they had is unknown."""
    messages: int = 0
    """Number of readable messages."""
    logs: dict[tuple[str, str], LostMessages] = field(default_factory=dict)
    """Unreadable messages, by kind and name of their log; ("", "") if its name is lost as well."""
    things: list[tuple[str, str]] = field(default_factory=list)
    """Kind and key of unreadable small records: sessions, subscriptions, retained messages, definitions.
    """
    things_lost: int = 0
    letters: int = 0
    """Number of unreadable dead letters."""
    settled: int = 0
    """Number of unreadable records of acknowledgements: their messages will be redelivered."""
    bodies: list[str] = field(default_factory=list)
    """Why bodies in files are missing; their messages are counted in `logs`."""

    @property
    def is_intact(self) -> bool:
        """True if the examination found no damage."""
        lost = (self.file, self.hidden, self.logs, self.things_lost, self.letters, self.settled)
        return not any(lost)

    def count_lost(self, kind: str, name: str, *, messages: int = 0, perhaps: int = 0) -> None:
        """Count lost messages of the log with this kind and name.

        `messages` are certainly lost, `perhaps` possibly.
        """
        lost = self.logs.setdefault((kind, name), LostMessages())
        lost.messages += messages
        lost.perhaps += perhaps

    def count_lost_record(self, kind: str, key: object) -> None:
        """Count a lost small record, and list its kind and key, up to SHOWN_MAX records."""
        self.things_lost += 1
        if len(self.things) < SHOWN_MAX:
            text = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
            self.things.append((kind, text.replace("\0", " ")))


def examine(connection: sqlite3.Connection, path: Path, findings: Findings, keep: Keep) -> None:
    """Read all tables of a database, and add the results to `findings`.

    `path` is the database file, beside which the heap and the body files are. `keep` is called with the name
    of each table and its sound rows. Raises StoreError if nothing can be read.
    """
    _Examination(connection, path, findings, keep).run()


class _Examination:
    """Examination of all tables of one database; `run` adds the losses to `findings`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        findings: Findings,
        keep: Keep,
    ) -> None:
        self._connection = connection
        self._findings = findings
        self._keep = keep
        self._reader = MessageReader(self._body)
        self._spool = path.parent / "spool"
        self._heap = path.parent / HEAP
        self._file: int | None = None  # file descriptor of the heap, once it is open
        self._places: dict[int, RowPlace] = {}  # of rows whose messages are in the heap
        self._logs: dict[int, tuple[str, str]] = {}
        # Row id, log, first position, position behind the last.
        self._extents: list[tuple[int, int, int, int]] = []
        self._bits: dict[int, int] = {}
        self._ranges: list[tuple[int, int]] = []  # unreachable ranges of keys, of all tables in turn
        self._missing: str | None = None  # why the body of the message that is being decoded is missing

    def run(self) -> None:
        try:
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            raise StoreError(f"no part of it can be read: {error}") from error
        self._read_logs()
        self._read_settled()
        self._read_places()
        self._read_rows()
        self._read_letters()
        self._read_things()
        if self._file is not None:
            os.close(self._file)

    # Tables with a number as key.

    def _read_logs(self) -> None:
        good = []
        for row in self._numbered("logs", "id, kind, name", self._lose_log):
            id, kind, name = row
            if isinstance(kind, str) and isinstance(name, str):
                self._logs[id] = (kind, name)
                good.append(row)
        self._keep_readable("logs", good)

    def _lose_log(self, id: int) -> None:
        """Do nothing for an unreadable row of `logs`: the messages of that log are counted as lost later."""

    def _read_settled(self) -> None:
        good = []
        for row in self._numbered("settled", "row, bits", self._lose_settled):
            if isinstance(row[1], bytes):
                self._bits[row[0]] = int.from_bytes(row[1], "little")
                good.append(row)
        self._keep_readable("settled", good)

    def _lose_settled(self, _: int) -> None:
        self._findings.settled += 1

    def _read_places(self) -> None:
        for row, at, byte_count in self._numbered("places", "row, at, octets", self._lose_place):
            if isinstance(at, int) and isinstance(byte_count, int) and min(at, byte_count) >= 0:
                self._places[row] = RowPlace(at, byte_count)

    def _lose_place(self, _: int) -> None:
        """Do nothing for an unreadable row of `places`: its messages are counted as lost later."""

    def _from_heap(self, id: int) -> bytes:
        """Return the encoded messages of a row that is in the heap.

        Raises StoreError if they cannot be read.
        """
        place = self._places.get(id)
        if place is None:
            raise StoreError("their place in the file is unknown")
        if self._file is None:
            try:
                self._file = os.open(self._heap, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StoreError(f"{self._heap} cannot be read: {error.strerror}") from error
        return read(self._file, place)

    def _read_rows(self) -> None:
        """Decode all rows of messages.

        Sound rows are passed to `keep`; the unsettled messages of the others are counted as lost.
        """
        columns = "id, log, first, count, octets, tag, messages"
        hidden_before = len(self._ranges)
        good: list[Row] = []
        count = weight = 0
        for row in self._numbered("rows", columns, self._lose_row):
            id, log, first, number, _, tag, byte_count = row
            if log not in self._logs or tag == TRANSIENT:
                if log not in self._logs and tag != TRANSIENT and self._is_damaged("logs"):
                    self._findings.count_lost("", "", messages=self._left(id, number))
                continue
            self._extents.append((id, log, first, first + number))
            try:
                messages = byte_count or self._from_heap(id)
                offsets, _ = self._reader.decode(messages)
            except (StoreError, TypeError) as error:
                self._spoilt_row(id, log, number, error)
                continue
            bits = self._bits.get(id, 0)
            self._findings.messages += sum(not bits >> offset & 1 for offset in offsets)
            good.append((*row[:-1], messages))
            weight += len(messages)
            if len(good) >= 64 or weight >= COPIED_BYTES_MAX:
                count += len(good)
                self._keep("rows", good)
                good, weight = [], 0
        self._keep("rows", good)
        self._findings.rows["rows"] = count + len(good)
        for low, high in self._ranges[hidden_before:]:
            self._guess(low, high)

    def _lose_row(self, id: int) -> None:
        """Count the unsettled messages of an unreadable row as lost.

        They are counted for the row's log if the other columns are readable. Otherwise one lost message is
        counted, without a log. Transient messages are not counted.
        """
        try:
            line = self._connection.execute(
                "SELECT log, first, count, tag FROM rows WHERE id = ?", (id,)
            ).fetchone()
        except sqlite3.Error:
            line = None
        if line is None or not isinstance(line[2], int):
            self._findings.count_lost("", "", messages=1)
        elif line[3] != TRANSIENT and (line[0] in self._logs or self._is_damaged("logs")):
            self._extents.append((id, line[0], line[1], line[1] + line[2]))
            self._spoilt_row(id, line[0], line[2], None)

    def _spoilt_row(self, id: int, log: int, count: int, error: Exception | None) -> None:
        """Count the unsettled messages of the damaged row `id` as lost; it has `count` positions of `log`.

        `error` is why it could not be decoded, or None if it could not be read.
        """
        kind, name = self._logs.get(log, ("", ""))
        self._findings.count_lost(kind, name, messages=self._left(id, count))
        if error is not None and self._missing is not None:
            self._findings.bodies.append(self._missing)
        self._missing = None

    def _left(self, id: int, count: int) -> int:
        """Return the number of unsettled messages in row `id`, which has `count` positions."""
        return count - (self._bits.get(id, 0) & ((1 << min(max(count, 0), 65_536)) - 1)).bit_count()

    def _guess(self, low: int, high: int) -> None:
        """Count possibly lost messages after a failure to read the rows with ids `low` to `high`.

        These are the log positions that are missing between the readable rows before and behind that range.
        """
        before: dict[int, int] = {}
        behind: dict[int, int] = {}
        for id, log, first, end in self._extents:
            if id < low:
                before[log] = max(before.get(log, 0), end)
            elif id > high:
                behind[log] = min(behind.get(log, first), first)
        for log, first in behind.items():
            gap = first - before.get(log, first)
            if gap > 0 and log in self._logs:
                self._findings.count_lost(*self._logs[log], perhaps=gap)

    def _read_letters(self) -> None:
        columns = "id, octets, utc, route, verdict, reason, text, message, user"
        good = []
        for row in self._numbered("dead_letters", columns, self._lose_letter):
            try:
                self._reader.decode_one(row[-2])
            except (StoreError, TypeError):
                self._findings.letters += 1
            else:
                good.append(row)
        self._keep_readable("dead_letters", good)

    def _lose_letter(self, _: int) -> None:
        self._findings.letters += 1

    def _keep_readable(self, table: str, rows: list[Row]) -> None:
        self._findings.rows[table] = len(rows)
        self._keep(table, rows)

    def _is_damaged(self, table: str) -> bool:
        return table in self._findings.hidden

    def _numbered(self, table: str, columns: str, lose: Callable[[int], None]) -> Iterator[Row]:
        """Yield the readable rows of a table whose key is a number.

        `lose` is called with the key of each unreadable row, to count what is lost.
        """
        key = NUMBERED[table]
        for id in self._ids(table, key):
            try:
                row = self._connection.execute(
                    f"SELECT {columns} FROM {table} WHERE {key} = ?", (id,)
                ).fetchone()
            except sqlite3.Error:
                lose(id)
                continue
            if row is not None:
                yield row

    def _ids(self, table: str, key: str) -> list[int]:
        """Return the readable keys of a table, in order; `key` is the name of the key column.

        The unreadable ranges of keys are counted in the findings, and added to `_ranges`.
        """
        query = f"SELECT {key} FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"
        found: list[int] = []
        failed: list[tuple[int, int]] = []
        stack = [(0, KEY_MAX)]
        while stack:
            low, high = stack.pop()
            try:
                found += [id for (id,) in self._connection.execute(query, (low, high))]
                continue
            except sqlite3.Error:
                pass
            if low == high or not self._is_partly_readable(query, low, high):
                if failed and failed[-1][1] + 1 == low:
                    failed[-1] = (failed[-1][0], high)
                else:
                    failed.append((low, high))
                continue
            middle = (low + high) // 2
            stack += [(middle + 1, high), (low, middle)]
        if failed:
            self._findings.hidden[table] = len(failed)
        self._ranges += failed
        return found

    def _is_partly_readable(self, query: str, low: int, high: int) -> bool:
        """Return True if at least one sampled key in the range `low` to `high` can be read."""
        step = max((high - low) // SAMPLES, 1)
        for key in (*range(low, high, step), high):
            try:
                self._connection.execute(query, (key, key)).fetchone()
            except sqlite3.Error:
                continue
            return True
        return False

    # The table of small records, whose keys are texts and bytes.

    def _read_things(self) -> None:
        """Read all small records, pass the sound ones to `keep`, and count the others as lost."""
        good: list[Row] = []
        for kind, key in self._record_keys():
            try:
                row = self._connection.execute(
                    "SELECT kind, key, message, value FROM things WHERE kind = ? AND key = ?", (kind, key)
                ).fetchone()
            except sqlite3.Error:
                row = ()
            if row is None:
                continue
            if row and self._is_sound_thing(row):
                good.append(row)
            else:
                self._findings.count_lost_record(str(kind), key)
        self._keep_readable("things", good)

    def _is_sound_thing(self, row: Row) -> bool:
        _, _, message, value = row
        if not isinstance(value, bytes):
            return False
        if message:
            try:
                self._reader.decode_one(value)
            except StoreError:
                return False
        return True

    def _record_keys(self) -> Iterable[tuple[str, Key]]:
        """Return the kinds and keys of the small records, read from both ends of the table.

        Keys between two damaged pages are not found.
        """
        found: dict[tuple[str, Key], None] = {}
        for order in ("", " DESC"):
            try:
                query = f"SELECT kind, key FROM things ORDER BY kind{order}, key{order}"
                for kind, key in self._connection.execute(query):
                    found[kind, key] = None
                return found
            except sqlite3.Error:
                self._findings.hidden["things"] = 1
        return sorted(found, key=lambda one: (one[0], isinstance(one[1], bytes), one[1]))

    # Bodies in files.

    def _body(self, name: str, size: int) -> Spooled:
        """Return the body in the file `name`.

        Raises StoreError if its size is not `size` bytes, or it is missing.
        """
        path = self._spool / name
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            self._missing = f"{path} is missing" if there is None else f"{path} has {there} bytes, not {size}"
            raise StoreError(self._missing)
        return Spooled(_BodyFile(path), size)


class _BodyFile:
    """Reference to the existing file of a message body, which the decoder stores in the message.

    The examination does not read the file.
    """

    checked = b""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path

    def read(self, at: int, count: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(at)
            return file.read(count)

    def open_file(self) -> OpenBody:
        raise StoreError(f"{self._path} is not for sockets")

    def preserve(self) -> None:
        """Do nothing: an examination deletes no files."""


# The write-ahead log.


def wal_faults(path: Path, *, clean: bool) -> list[str]:
    """Return descriptions of the faults in the write-ahead log of the database file `path`.

    `clean` is True if the database was closed cleanly; only then may the log be missing.
    """
    wal = path.with_name(path.name + "-wal")
    if not wal.exists():
        if clean:
            return []
        return [f"{wal.name} is missing although the gateway was killed: the last commits are lost"]
    data = wal.read_bytes()[:WAL_CHECKED_MAX]
    if len(data) < WAL_HEAD.size:
        return []
    magic, _, page, _, *salt = WAL_HEAD.unpack_from(data)[:6]
    if magic & ~1 != WAL_MAGIC or page not in {1 << bit for bit in range(9, 17)}:
        return [f"{wal.name} has no valid SQLite header: the last commits are lost"]
    order = ">" if magic & 1 else "<"
    sums = _sum(data[:24], order, (0, 0))
    if sums != WAL_HEAD.unpack_from(data)[6:]:
        return [f"the header of {wal.name} is damaged: the last commits are lost"]
    for at in range(WAL_HEAD.size, len(data) - FRAME_HEAD.size - page + 1, FRAME_HEAD.size + page):
        head = FRAME_HEAD.unpack_from(data, at)
        if list(head[2:4]) != salt:  # the rest is from before the log was restarted
            return []
        body = at + FRAME_HEAD.size
        sums = _sum(data[body : body + page], order, _sum(data[at : at + 8], order, sums))
        if sums != head[4:]:
            return _lost_transactions(data, at + FRAME_HEAD.size + page, page, salt, wal.name)
    return []


def _lost_transactions(data: bytes, at: int, page: int, salt: list[int], name: str) -> list[str]:
    """Return a description of the loss if a complete transaction follows a damaged frame; otherwise [].

    `data` is the write-ahead log, `at` the offset behind the damaged frame, `page` the page size in bytes.
    """
    for place in range(at, len(data) - FRAME_HEAD.size - page + 1, FRAME_HEAD.size + page):
        head = FRAME_HEAD.unpack_from(data, place)
        if list(head[2:4]) == salt and head[1]:
            return [f"{name} is damaged: commits after byte {at} are lost"]
    return []


def _sum(data: bytes, order: str, start: tuple[int, ...]) -> tuple[int, int]:
    """Return SQLite's WAL checksum of `data`, continued from the checksum `start`; `order` is ">" or "<"."""
    one, other = start
    words = unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        one = (one + words[at] + other) & 0xFFFF_FFFF
        other = (other + words[at + 1] + one) & 0xFFFF_FFFF
    return one, other

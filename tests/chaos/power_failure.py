"""What a power failure may leave of a folder, from a record of all that a process did to its files.

`DiskRecord` compiles a library (disk_record.c) that is preloaded into the process. `Disk` replays the record.
At any moment `leave` writes a folder that the disk could have after a power failure: what was synced is
there; of each later write, any of its sectors, or none, in any order; a file that was created, renamed or
deleted since its folder was synced has its new name or its old one.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from tests.chaos.disk_errors import compiled

SOURCE: Final = Path(__file__).with_name("disk_record.c")
HEADER: Final = struct.Struct("4H2Q")
SECTOR: Final = 512  # bytes; a disk writes at least so many at once
MEMORY: Final = "-shm"  # SQLite's shared memory, which no power failure leaves


class Kind(IntEnum):
    """What was done; the same numbers as in disk_record.c."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC_BEGINS = 4
    SYNC = 5
    RENAME = 6
    LINK = 7
    UNLINK = 8
    OUTPUT = 9


class Call(NamedTuple):
    """One call of the process. `at` is a position, a size, or for syncs the number of the thread."""

    kind: Kind
    path: str
    other: str
    at: int
    data: bytes


class DiskRecord:
    """Record of what a process does to the files in a folder. Raises CompilerError."""

    def __init__(self, folder: Path, stored: Path) -> None:
        """Compile the library into `folder`, which is created; record the files in the folder `stored`."""
        self.path = folder / "record"
        self.environment = {
            "LD_PRELOAD": str(compiled(SOURCE, folder)),
            "CHAOS_DISK_RECORD": str(self.path),
            "CHAOS_DISK_FOLDER": str(stored.resolve()),
        }

    def calls(self) -> list[Call]:
        """Return the calls so far, without one whose record is incomplete because the process was killed."""
        return list(self._calls(memoryview(self.path.read_bytes())))

    def mark(self, text: bytes) -> None:
        """Append an output of the process that a client has received meanwhile."""
        with self.path.open("ab", buffering=0) as file:
            file.write(HEADER.pack(Kind.OUTPUT, 0, 0, 0, 0, len(text)) + text)

    @staticmethod
    def _calls(data: memoryview) -> Iterator[Call]:
        at = 0
        while at + HEADER.size <= len(data):
            kind, path, other, _, position, size = HEADER.unpack_from(data, at)
            at += HEADER.size
            names = bytes(data[at : at + path + other]).decode()
            at += path + other
            written = size if kind in {Kind.WRITE, Kind.OUTPUT} else 0
            if at + written > len(data):
                return
            yield Call(Kind(kind), names[:path], names[path:], position, bytes(data[at : at + written]))
            at += written


class _File:
    """A file: its bytes as last synced, and the writes and truncations since."""

    def __init__(self, synced: bytes = b"") -> None:
        self.synced = bytearray(synced)
        self.pending: list[Call] = []

    def sync(self, count: int) -> None:
        """Apply the oldest `count` pending calls."""
        for call in self.pending[:count]:
            _apply(self.synced, call)
        del self.pending[:count]

    def left(self, rng: random.Random, share: float) -> bytearray:
        """Return what a power failure may leave; about `share` of what was not synced is there."""
        found = bytearray(self.synced)
        for call in self.pending:
            if call.kind is Kind.TRUNCATE:
                if rng.random() < share:
                    _apply(found, call)
                continue
            for sector in _sectors(call):
                if rng.random() < share:
                    _apply(found, sector)
        return found


def _apply(data: bytearray, call: Call) -> None:
    if call.kind is Kind.TRUNCATE:
        del data[call.at :]
        data.extend(bytes(call.at - len(data)))
        return
    data.extend(bytes(max(call.at - len(data), 0)))
    data[call.at : call.at + len(call.data)] = call.data


def _sectors(call: Call) -> Iterator[Call]:
    """Yield the parts of a write that lie in different sectors."""
    start, end = call.at, call.at + len(call.data)
    while start < end:
        stop = min(end, (start // SECTOR + 1) * SECTOR)
        yield call._replace(at=start, data=call.data[start - call.at : stop - call.at])
        start = stop


class Disk:
    """Files of a folder, as the process sees them and as a power failure may leave them."""

    def __init__(self, stored: Path) -> None:
        """Begin with all files of the folder `stored`, which are on disk."""
        self._root = str(stored.resolve())
        self._names: dict[str, _File] = {}
        for path in stored.rglob("*"):
            if path.is_file() and not path.name.endswith(MEMORY):
                self._names[str(path.resolve())] = _File(path.read_bytes())
        self._durable = dict(self._names)
        self._syncs: dict[tuple[int, str], int] = {}  # pending calls when a sync began, by thread and path

    def apply(self, call: Call) -> None:
        """Do what the process did."""
        path = call.path
        if path.endswith(MEMORY):
            return
        match call.kind:
            case Kind.CREATE:
                self._names[path] = _File()
            case Kind.WRITE | Kind.TRUNCATE:
                if (file := self._names.get(path)) is not None:  # else it was deleted while open
                    file.pending.append(call)
            case Kind.SYNC_BEGINS:
                file = self._names.get(path)
                self._syncs[call.at, path] = 0 if file is None else len(file.pending)
            case Kind.SYNC:
                self._sync(path, self._syncs.pop((call.at, path)))
            case Kind.RENAME:
                self._names[call.other] = self._names.pop(path)
            case Kind.LINK:
                self._names[call.other] = self._names[path]
            case Kind.UNLINK:
                self._names.pop(path, None)

    def _sync(self, path: str, count: int) -> None:
        if (file := self._names.get(path)) is not None:
            file.sync(count)
            return
        for name in {*self._names, *self._durable}:
            if os.path.dirname(name) == path:
                if (file := self._names.get(name)) is None:
                    del self._durable[name]
                else:
                    self._durable[name] = file

    def leave(self, to: Path, rng: random.Random, share: float | None = None) -> str:
        """Write into the new folder `to` what a power failure now may leave, and return a description.

        About `share` (0 to 1) of what was not synced is there; None chooses it at random.
        """
        if share is None:
            share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        unsynced = 0
        for name in sorted({*self._names, *self._durable}):
            now, durable = self._names.get(name), self._durable.get(name)
            file = now if now is durable or rng.random() < share else durable
            if file is not None:
                unsynced += len(file.pending)
                path = to / os.path.relpath(name, self._root)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.left(rng, share))
        return f"{share:.0%} of {unsynced} calls that were not synced are on disk"

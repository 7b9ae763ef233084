"""Disk of a simulation: the store's thread as steps, faults of its commits, and crashes.

The thread is not started. `step` does one of its turns with what the event loop has handed in, so that any
order of commits and wake-ups can be had. A crash copies the folder as it is between two steps, which is what
`kill -9` leaves: what is committed is there, and nothing else.
"""

from __future__ import annotations

import queue
import shutil
import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from gateway import clock
from gateway.store.folder import LOCK, Reserve
from gateway.store.store import Store
from gateway.store.writer import Calls, CallSoon, Writer

FULL: Final = "database or disk is full"
BROKEN: Final = "disk I/O error"


class SteppedCalls:
    """Queue of calls for the thread that never waits."""

    def __init__(self, calls: queue.SimpleQueue[Calls | None]) -> None:
        self._calls: deque[Calls | None] = deque()
        while not calls.empty():
            self._calls.append(calls.get())

    def put(self, calls: Calls | None) -> None:
        """Add the calls of a wake-up."""
        self._calls.append(calls)

    def get(self, timeout: float | None = None) -> Calls | None:
        """Return the oldest calls. Raises queue.Empty."""
        if not self._calls:
            raise queue.Empty
        return self._calls.popleft()

    get_nowait = get

    def empty(self) -> bool:
        """Return True if there are none."""
        return not self._calls


class SteppedThread:
    """The writer's thread, of which nothing happens by itself."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def join(self) -> None:
        """Do everything until the end."""
        self.writer.run()


class Disk:
    """State of the disk of one gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fault = ""  # error of each commit; "" while the disk works
        self._writer: Writer | None = None

    @property
    def connections(self) -> type[sqlite3.Connection]:
        """Return the class of connections whose commits fail with this disk."""
        disk = self

        class Connection(sqlite3.Connection):
            """Connection to a database on this disk."""

            def commit(self) -> None:
                if disk.fault:
                    raise sqlite3.OperationalError(disk.fault)
                super().commit()

        return Connection

    @property
    def has_work(self) -> bool:
        """True if the thread has something to do now."""
        writer = self._writer
        if writer is None or writer.broken or writer._ending:
            return False
        is_probe_due = bool(writer.failure) and clock.monotonic() >= writer._probe_at
        return not writer.calls.empty() or is_probe_due

    def step(self) -> None:
        """Do one turn of the thread, if it has something to do."""
        if self.has_work and self._writer is not None:
            self._writer._run_turn()

    def tidy(self) -> None:
        """Do what the thread does when it has been idle for a while."""
        if self._writer is not None and not self._writer.broken and not self._writer.failure:
            self._writer._tidy()

    def start(self, store: Store, call_soon: CallSoon) -> None:
        """Do what `Store.start` does, without a thread."""
        writer = store._writer
        store._database.tagged.clear()
        writer.call_soon = call_soon
        writer.calls = SteppedCalls(writer.calls)  # type: ignore[assignment]
        store._writer_thread = SteppedThread(writer)  # type: ignore[assignment]
        self._writer = writer

    def crash(self) -> Path:
        """Copy what the disk has now. Return the folder of the copy."""
        copy = self.folder.with_name(f"{self.folder.name} crashed")
        shutil.copytree(self.folder, copy, ignore=shutil.ignore_patterns(LOCK))
        self._writer = None
        self.fault = ""  # of the folder that is given up; the caller sets the fault again
        return copy

    def restore(self, copy: Path) -> None:
        """Put the copy in the place of the folder, which nothing uses any more."""
        shutil.rmtree(self.folder)
        copy.rename(self.folder)


@contextmanager
def virtual_disks(*folders: Path) -> Iterator[list[Disk]]:
    """Have stores that are opened in these folders within the block use disks of a simulation."""
    disks = {folder: Disk(folder) for folder in folders}
    made, take = Store.__init__, Reserve.allocate

    @wraps(made)
    def open_store(store: Store, folder: Path, **options: Any) -> None:
        made(store, folder, factory=disks[folder].connections, **options)

    def start(store: Store, call_soon: CallSoon) -> None:
        disks[store.folder].start(store, call_soon)

    def take_reserve(reserve: Reserve) -> bool:
        return not disks[reserve._path.parent].fault and take(reserve)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Store, "__init__", open_store))
        stack.enter_context(patch.object(Store, "start", start))
        stack.enter_context(patch.object(Reserve, "allocate", take_reserve))
        yield list(disks.values())

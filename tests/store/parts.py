"""A loop that runs what the store hands back, messages, and databases that fail or wait when told to."""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.database import Stored
from gateway.store.index import Log
from gateway.store.store import Store
from tests.idle import idle_report

PATIENCE_SECS: Final = 20.0
COMMITS_MAX: Final = 100
SENDER: Final = Sender("mqtt", "c1")
TOPIC: Final = topic_address("a/b")


class Loop:
    """Runs, in the test's own thread, what the store's thread hands over."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.calls = 0

    def call_soon(self, function: Callable[[], None]) -> None:
        self._calls.put(function)

    def run_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._calls.get(timeout=PATIENCE_SECS)()
            self.calls += 1


class Opened:
    """A store with its thread and a loop."""

    def __init__(
        self, folder: Path, *, before: Callable[[Store], None] | None = None, **options: Any
    ) -> None:
        """`before` is called with the store before its thread starts."""
        self.loop = Loop()
        self.health: list[bool] = []
        self.damage: list[str] = []
        self.store = opened(
            folder, **{"on_health": self.health.append, "on_damage": self.damage.append, **options}
        )
        if before is not None:
            before(self.store)
        self.store.start(self.loop.call_soon)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(kind is None, self.store)

    def end(self, passed: bool, root: object, tick: Callable[[], object] = lambda: None) -> None:
        """Close the store. If the test has passed and the disk works, nothing waits in `root` any more."""
        try:
            if passed and self.store.healthy and not self.store._closed:
                self.until_idle(root, tick)
        finally:
            self.store.close()

    def commit(self) -> Outcome:
        """End the wake-up, and wait until all is on disk or refused."""
        told: list[Outcome] = []
        self.store.after_commit(told.append)
        self.store.flush()
        self.loop.run_until(lambda: told)
        return told[0]

    def append(self, log: Log, first: int, *bodies: bytes) -> Outcome:
        told: list[Outcome] = []
        self.store.append(log, first, messages(*bodies), told.append)
        self.store.flush()
        self.loop.run_until(lambda: told)
        return told[0]

    def read_from(self, log: Log, position: int, count: int) -> list[tuple[int, bytes]]:
        found: list[list[Stored]] = []
        self.store.read_from(log, position, found.append, messages_max=count, bytes_max=1 << 30)
        self.store.flush()
        self.loop.run_until(lambda: found)
        return [(at, message.body) for at, message, _ in found[0]]

    def until(self, condition: Callable[[], object]) -> None:
        """As the gateway does: whatever the store hands back is followed by the end of a wake-up."""
        while not condition():
            self.store.flush()
            calls = self.loop.calls
            self.loop.run_until(lambda calls=calls: self.loop.calls > calls)  # type: ignore[misc]

    def until_idle(self, root: object, tick: Callable[[], object] = lambda: None) -> None:
        """Commit until nothing waits in `root`: what one commit hands back may make another call.

        `tick` is called before each commit. Fails with what still waits after COMMITS_MAX of them.
        """
        for _ in range(COMMITS_MAX):
            tick()
            self.commit()
            if not (report := idle_report(root)):
                return
        raise AssertionError("\n".join(["it is not idle:", *report]))

    def until_healthy(self, healthy: bool) -> None:
        self.loop.run_until(lambda: self.store.healthy is healthy and self.health[-1:] == [healthy])


def opened(folder: Path, **options: Any) -> Store:
    """A store without its thread."""
    return Store(folder, **{"probe_secs": 0.01, "reserve_bytes": 65_536, **options})


def messages(*bodies: bytes) -> list[Message]:
    return [Message(TOPIC, body, assurance=1, durable=True, sender=SENDER) for body in bodies]


def numbered(start: int, stop: int) -> list[bytes]:
    """Bodies that say their position."""
    return [b"%d" % number for number in range(start, stop)]


def accepted(outcome: Outcome) -> None:
    assert outcome is ACCEPTED


def content(store: Store, log: Log, first: int = 0) -> list[tuple[int, bytes]]:
    """Positions and bodies of what is stored from `first` on; before the store is started."""
    found: list[Stored] = []
    store.read_from(log, first, found.extend, messages_max=1 << 30, bytes_max=1 << 40)
    return [(position, message.body) for position, message, _ in found]


def log_of(store: Store, name: str = "q") -> Log:
    """The log that an earlier store has made."""
    (found,) = [log for log in store.logs() if log.name == name]
    return found


class Disk:
    """What a database is told to do: to fail, or to wait in its commits."""

    def __init__(self) -> None:
        self.fault = ""
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.commits = 0

    def factory(self) -> type[sqlite3.Connection]:
        disk = self

        class Connection(sqlite3.Connection):
            """One that asks the disk first."""

            def commit(self) -> None:
                disk.commits += 1
                disk.waiting.set()
                assert disk.gate.wait(PATIENCE_SECS)
                disk.check()
                super().commit()

            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                if sql.startswith("UPDATE"):
                    disk.check()
                return super().execute(sql, parameters)

        return Connection

    def check(self) -> None:
        if self.fault:
            raise sqlite3.OperationalError(self.fault)

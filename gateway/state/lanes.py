"""Threads that commit operations in groups: a lane is a thread, its connection, and what waits for it.

Equal subjects have the same lane, so their order is kept; lanes commit beside each other. All that has
gathered while a lane committed is its next group.

Each group of a lane has a number, which the group itself stores. When the connection is lost during a commit
the lane connects again, waits for what the lost connection may still be doing, and reads the number: so it
knows whether the group was committed, and repeats it only if it was not.

While the database is away operations wait for `patience_secs`, then they are answered with UNAVAILABLE.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from gateway.containment import contained
from gateway.state.database import AbortedError, Database, LostError, Noted
from gateway.state.group import run_group
from gateway.state.interface import (
    REFUSED,
    UNAVAILABLE,
    Health,
    Notice,
    Operation,
    Query,
    Reply,
    StateStore,
    Verdict,
)
from gateway.state.queries import run_query

GROUP_MAX: Final = 1_000  # operations in one transaction
NOT_YET: Final = "not connected yet"
RETRY_SECS: Final = 0.05  # until the first attempt to connect again
RETRY_SECS_MAX: Final = 1.0
T = TypeVar("T")
CallSoon = Callable[[Callable[[], None]], None]
Answer = tuple[Callable[[Reply[Any]], None], Reply[Any]]


class Listener(Protocol):
    """A thread that waits for notices."""

    def run(self, on_notice: Callable[[Notice], None]) -> None:
        """Wait for notices until `stop`."""

    def listen(self, replica: str) -> None:
        """Wait for those of this incarnation, too."""

    def stop(self) -> None:
        """Have `run` return."""


class Item(NamedTuple):
    """An operation or a query that waits. `since`: monotonic seconds."""

    work: object
    done: Callable[[Reply[Any]], None]
    since: float


class Doubt(NamedTuple):
    """A group whose commit had no answer."""

    number: int
    items: list[Item]
    replies: list[Reply[Any]]
    noted: list[Noted]


class Committer:
    """One thread and its database."""

    def __init__(
        self, database: Database, patience_secs: float, tell: Callable[[list[Answer]], None]
    ) -> None:
        self.failure = NOT_YET
        self.items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._database = database
        self._patience_secs = patience_secs
        self._tell = tell
        self._pending: list[Item] = []
        self._number: int | None = None  # of the last group; None: there is no connection
        self._doubt: Doubt | None = None
        self._retry_secs = RETRY_SECS
        self._is_ending = False

    def run(self) -> None:
        """Commit what comes until the end."""
        try:
            while not self._is_ending or self._pending or self._doubt is not None:
                self._gather()
                self._turn()
        finally:
            self._database.close()

    def _gather(self) -> None:
        """Add what has come to what is pending; wait if nothing is, and before the next attempt to connect,
        which is made whether anything is pending or not."""
        patience: float | None = None
        if self._pending or self._doubt is not None or self._is_ending or self._number is None:
            patience = self._retry_secs if self.failure not in ("", NOT_YET) else 0.0
        try:
            item = self.items.get(timeout=patience)
            while item is not None:
                self._pending.append(item)
                item = self.items.get_nowait()
            self._is_ending = True
        except queue.Empty:
            return

    def _turn(self) -> None:
        """Try to commit one group; after an error connect again."""
        try:
            self._connect()
            try:
                self._work()
            except AbortedError:
                self._database.rollback()
        except LostError as error:
            self._lost(error)
        except Exception as error:  # a bug: what is pending is tried again, until it has waited too long
            contained("store", error)
            self._lost(LostError(f"the thread of the state has failed: {error!r}"))

    def _work(self) -> None:
        """Commit one group, and answer the queries that came with it."""
        some, rest = self._pending[:GROUP_MAX], self._pending[GROUP_MAX:]
        operations = [item for item in some if isinstance(item.work, Operation)]
        queries = [item for item in some if not isinstance(item.work, Operation)]
        if operations:
            self._commit(operations, queries + rest)
        for at, item in enumerate(queries):
            self._read(item)
            self._pending = queries[at + 1 :] + rest

    def _connect(self) -> None:
        """Connect if there is no connection, and find out what has become of a group in doubt."""
        if self._number is None:
            self._number = self._database.connect()
            doubt, self._doubt = self._doubt, None
            if doubt is not None and doubt.number == self._number:
                self._committed(doubt)
            elif doubt is not None:
                self._pending[:0] = doubt.items
        if self.failure:
            self.failure, self._retry_secs = "", RETRY_SECS

    def _commit(self, items: list[Item], rest: list[Item]) -> None:
        """Commit a group; `rest` is pending after that. A group with values that the database rejects is
        committed one by one."""
        assert self._number is not None
        number = self._number + 1
        try:
            replies, noted = run_group(self._database, [item.work for item in items], number)
        except LostError:
            raise
        except Exception as error:  # the database rejects values, or a bug: it costs one operation
            self._database.rollback()
            if len(items) > 1:
                for at, item in enumerate(items):
                    self._commit([item], items[at + 1 :] + rest)
                return
            contained("store", error)
            replies, noted = [REFUSED], []
        else:
            doubt = Doubt(number, items, replies, noted)
            try:
                self._database.commit()
            except LostError:
                self._doubt, self._pending = doubt, rest
                raise
            self._number = number
        self._pending = rest
        self._committed(Doubt(number, items, replies, noted))

    def _committed(self, group: Doubt) -> None:
        self._answer(group.items, group.replies)
        if group.noted:
            self._database.notify(group.noted)

    def _read(self, item: Item) -> None:
        try:
            reply: Reply[Any] = Reply(Verdict.DONE, run_query(self._database, item.work))
        except LostError:
            raise
        except Exception as error:
            contained("store", error)
            reply = REFUSED
        self._answer([item], [reply])

    def _lost(self, error: LostError) -> None:
        """The database is away: wait for longer each time, and answer those that have waited too long."""
        if self.failure:
            self._retry_secs = min(2 * self._retry_secs, RETRY_SECS_MAX)
        self.failure = str(error)
        self._number = None
        self._database.close()
        oldest = monotonic() - (0.0 if self._is_ending else self._patience_secs)
        doubt = self._doubt
        if doubt is not None and doubt.items[0].since <= oldest:
            self._answer(doubt.items, [UNAVAILABLE] * len(doubt.items))
            self._doubt = None
        late = [item for item in self._pending if item.since <= oldest]
        self._answer(late, [UNAVAILABLE] * len(late))
        self._pending = [item for item in self._pending if item.since > oldest]

    def _answer(self, items: Sequence[Item], replies: Sequence[Reply[Any]]) -> None:
        if items:
            self._tell([(item.done, reply) for item, reply in zip(items, replies, strict=True)])


class LanedStore(StateStore):
    """A store of several lanes. `listener`: runs beside them, if notices come over a connection."""

    def __init__(
        self, databases: Sequence[Database], patience_secs: float, listener: Listener | None = None
    ) -> None:
        self._lanes = [Committer(database, patience_secs, self._tell) for database in databases]
        self._listener = listener
        self._threads: list[threading.Thread] = []
        self._pending = 0
        self._call_soon: CallSoon
        self._on_notice: Callable[[Notice], None]

    def start(self, call_soon: CallSoon, on_notice: Callable[[Notice], None]) -> None:
        self._call_soon, self._on_notice = call_soon, on_notice
        runs: list[tuple[str, Callable[[], None]]] = [
            (f"state-{number}", lane.run) for number, lane in enumerate(self._lanes)
        ]
        if self._listener is not None:
            runs.append(("state-notices", partial(self._listener.run, self.notice)))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        for lane in self._lanes:
            lane.items.put(None)
        if self._listener is not None:
            self._listener.stop()
        for thread in self._threads:
            thread.join()

    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        self._put(hash(operation.subject), operation, done)

    def query(self, query: Query[T], done: Callable[[Reply[T]], None]) -> None:
        self._put(hash(query), query, done)

    def _put(self, number: int, work: object, done: Callable[[Reply[Any]], None]) -> None:
        if self._pending >= self.pending_max:
            self._call_soon(partial(done, UNAVAILABLE))
            return
        self._pending += 1
        self._lanes[number % len(self._lanes)].items.put(Item(work, done, monotonic()))

    def listen(self, replica: str) -> None:
        if self._listener is not None:
            self._listener.listen(replica)

    @property
    def health(self) -> Health:
        failure = next((lane.failure for lane in self._lanes if lane.failure), "")
        return Health(failure, self._pending)

    # From the threads.

    def notice(self, notice: Notice) -> None:
        """Have the event loop hear a notice."""
        self._call_soon(partial(self._on_notice, notice))

    def _tell(self, answers: list[Answer]) -> None:
        self._call_soon(partial(self._answered, answers))

    def _answered(self, answers: list[Answer]) -> None:
        """In the event loop."""
        self._pending -= len(answers)
        for done, reply in answers:
            try:
                done(reply)
            except Exception as error:  # it concerns whoever waited, and nobody behind
                contained("store", error)

"""Threads that commit operations on the shared state in groups.

A lane is such a thread with its connection and its waiting operations. Operations with equal subjects go to
the same lane, so their order is kept; lanes commit concurrently. All operations that arrive while a lane
commits are its next group.

Each group of a lane has a number, which is stored by the same transaction. When the connection is lost during
a commit the lane reconnects, ends what the lost connection may still be doing, and reads the number. So the
lane knows if the group was committed, and repeats it only if it was not.

Queries with a subject go to the lane of that subject, behind its operations. Other queries may take long, so
they have lanes of their own, the readers.

A database may be unreachable, reject values, or accept connections and never reply. In each case the event
loop replies UNAVAILABLE to operations that have waited for `patience_secs` (`tick`), and the lane skips
these. Each lane records when it began to use its database, which `health` checks. A connection without a
reply for several times `patience_secs` is ended by another thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from gateway import clock
from gateway.containment import contained
from gateway.state.database import AbortedError, Database, LostError, PendingNotice
from gateway.state.group import run_group
from gateway.state.interface import (
    REFUSED,
    UNAVAILABLE,
    Health,
    Notice,
    Operation,
    OperationOutcome,
    Query,
    Reply,
    StateStore,
)
from gateway.state.queries import run_query

GROUP_MAX: Final = 1_000  # operations in one transaction
NOT_YET: Final = "not connected yet"
READ_TIMES: Final = 3  # multiple of `patience_secs` that queries without a subject wait
STUCK_TIMES: Final = 3  # multiple of it that a lane may use its connection until that is ended
STOP_TIMES: Final = 2  # multiple of it that `stop` waits until connections are ended, and
STOP_SECS: Final = 2.0  # seconds that it waits then
RETRY_SECS: Final = 0.05  # until the first attempt to reconnect
RETRY_SECS_MAX: Final = 1.0
SLOW_SECS: Final = 1.0  # after which a lane without a reply may be waiting for a lock
T = TypeVar("T")
CallSoon = Callable[[Callable[[], None]], None]
Answer = tuple["Item", Reply[Any]]


class NoticeReceiver(Protocol):
    """Interface of a database connection that receives notices in a thread, which calls `run`."""

    def run(self, on_notice: Callable[[Notice], None], is_slow: Callable[[], bool]) -> None:
        """Receive notices until `stop` is called, and pass them to `on_notice`.

        `is_slow` returns True while a thread of the store may be waiting for a lock in the database.
        """

    def listen(self, replica: str) -> None:
        """Also receive the notices for the incarnation `replica` from now on."""

    def interrupt(self) -> None:
        """End the present connection, so that `run` reconnects."""

    def stop(self) -> None:
        """Make `run` return soon."""


class Item:
    """Operation or query (`work`) that waits for its reply; `done` is called with the reply.

    `submitted_at` is in monotonic seconds. `is_given_up` is True once the reply UNAVAILABLE was given.
    """

    __slots__ = ("done", "is_given_up", "submitted_at", "work")

    def __init__(self, work: object, done: Callable[[Reply[Any]], None]) -> None:
        self.work = work
        self.done = done
        self.submitted_at = clock.monotonic()
        self.is_given_up = False


class UncertainCommit(NamedTuple):
    """Group of operations whose commit is not confirmed: its number, operations, replies and notices."""

    number: int
    items: list[Item]
    replies: list[Reply[Any]]
    notices: list[PendingNotice]


class Committer:
    """Thread that commits operations and runs queries, with its database connection; also called a lane.

    `run` is the function of the thread, and `items` the queue of operations and queries to it. `waiting` has
    those without a reply; only the event loop uses it, so that each gets one reply. `failure` is why the
    database cannot be used, or "". `deliver_replies` is called, in the thread, with the lane and its replies.
    """

    def __init__(
        self,
        database: Database,
        patience_secs: float,
        deliver_replies: Callable[[Committer, list[Answer]], None],
    ) -> None:
        self.failure = NOT_YET
        self.patience_secs = patience_secs
        self.items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.waiting: dict[Item, None] = {}  # in the order of submission
        self.busy_since: float | None = None  # monotonic, while the database is used
        self._database = database
        self._deliver_replies = deliver_replies
        self._pending: list[Item] = []
        self._number: int | None = None  # of the last group; None without a connection
        self._uncertain_commit: UncertainCommit | None = None
        self._noted: list[PendingNotice] = []  # notices of committed groups that are not sent yet
        self._retry_secs = RETRY_SECS
        self._is_ending = False

    def busy_secs(self) -> float:
        """Return how many seconds the thread has waited for the database; 0.0 if it is not waiting."""
        busy_at = self.busy_since
        return 0.0 if busy_at is None else clock.monotonic() - busy_at

    def interrupt(self) -> None:
        """End the database connection, so that the thread reconnects; called by other threads."""
        self._database.interrupt()

    def run(self) -> None:
        """Commit operations and run queries until the queue delivers None and each of them has a reply."""
        try:
            while not self._is_ending or self._pending or self._uncertain_commit is not None:
                self._gather()
                self._commit_group()
        finally:
            self._database.close()

    def _gather(self) -> None:
        """Move all operations and queries from the queue to the list of pending ones.

        If none is pending, wait for one. After an error, wait at most until the next attempt to connect is
        due.
        """
        patience: float | None = None
        if (
            self._pending
            or self._uncertain_commit is not None
            or self._noted
            or self._is_ending
            or self._number is None
        ):
            patience = self._retry_secs if self.failure not in ("", NOT_YET) else 0.0
        try:
            item = self.items.get(timeout=patience)
            while item is not None:
                self._pending.append(item)
                item = self.items.get_nowait()
            self._is_ending = True
        except queue.Empty:
            return

    def _commit_group(self) -> None:
        """Connect if necessary, commit pending operations in one transaction, and run pending queries.

        An error closes the connection.
        """
        self._pending = [item for item in self._pending if not item.is_given_up]
        self.busy_since = clock.monotonic()
        try:
            self._connect()
            try:
                self._work()
            except AbortedError:
                self._database.rollback()
        except LostError as error:
            self._handle_loss(error)
        except Exception as error:  # a bug: what is pending is tried again, until it has waited too long
            contained("store", error)
            self._handle_loss(LostError(f"the state thread has failed: {error!r}"))
        finally:
            self.busy_since = None

    def _work(self) -> None:
        """Send unsent notices, commit pending operations as one group, then run pending queries.

        At most GROUP_MAX operations and queries are processed.
        """
        self._notify()
        some, rest = self._pending[:GROUP_MAX], self._pending[GROUP_MAX:]
        operations = [item for item in some if isinstance(item.work, Operation)]
        queries = [item for item in some if not isinstance(item.work, Operation)]
        if operations:
            self._commit(operations, queries + rest)
        for at, item in enumerate(queries):
            if not item.is_given_up:
                self.busy_since = clock.monotonic()
                self._read(item)
            self._pending = queries[at + 1 :] + rest

    def _connect(self) -> None:
        """Connect if there is no connection, and find out if an unconfirmed group was committed.

        If it was, its replies are delivered; otherwise its operations become pending again.
        """
        if self._number is None:
            self._number = self._database.connect()
            doubt, self._uncertain_commit = self._uncertain_commit, None
            if doubt is not None and doubt.number == self._number:
                self._committed(doubt)
            elif doubt is not None:
                self._pending[:0] = [item for item in doubt.items if not item.is_given_up]
        if self.failure:
            self.failure, self._retry_secs = "", RETRY_SECS

    def _commit(self, items: list[Item], rest: list[Item]) -> None:
        """Commit the operations in `items` as one group, in one transaction; `rest` stays pending.

        If the database rejects the group, its operations are committed one by one, and the rejected ones get
        the reply REFUSED.
        """
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
            doubt = UncertainCommit(number, items, replies, noted)
            try:
                self._database.commit()
            except LostError:
                self._uncertain_commit, self._pending = doubt, rest
                raise
            self._number = number
        self._pending = rest
        self._committed(UncertainCommit(number, items, replies, noted))

    def _committed(self, group: UncertainCommit) -> None:
        """Deliver the replies of a committed group of operations, and send its notices."""
        self._answer(group.items, group.replies)
        self._noted += group.notices
        self._notify()

    def _notify(self) -> None:
        """Send the unsent notices of committed operations.

        If the database cannot be used, they are sent after the next connect. If the database rejects them,
        they are dropped, because they would block the thread; periodic queries find the same changes.
        """
        if not self._noted:
            return
        try:
            self._database.notify(self._noted)
        except (AbortedError, LostError):
            raise
        except Exception:
            self._noted = []
            raise
        self._noted = []

    def _read(self, item: Item) -> None:
        """Run the query in `item` and deliver its reply: REFUSED if the database rejects its values."""
        try:
            reply: Reply[Any] = Reply(OperationOutcome.DONE, run_query(self._database, item.work))
        except LostError:
            raise
        except Exception as error:
            contained("store", error)
            reply = REFUSED
        self._answer([item], [reply])

    def _handle_loss(self, error: LostError) -> None:
        """Close the connection, because the database cannot be used.

        The delay before the next attempt doubles. If the thread is stopping, all pending operations and
        queries get the reply UNAVAILABLE, and there is no further attempt.
        """
        if self.failure:
            self._retry_secs = min(2 * self._retry_secs, RETRY_SECS_MAX)
        self.failure = str(error)
        self._number = None
        self._database.close()
        if self._is_ending:
            unanswered = [
                *(self._uncertain_commit.items if self._uncertain_commit is not None else ()),
                *self._pending,
            ]
            self._uncertain_commit, self._pending = None, []
            self._answer(unanswered, [UNAVAILABLE] * len(unanswered))

    def _answer(self, items: Sequence[Item], replies: Sequence[Reply[Any]]) -> None:
        if items:
            self._deliver_replies(self, list(zip(items, replies, strict=True)))


class LanedStore(StateStore):
    """Store for the shared state with several threads that commit operations and run queries.

    Each of `databases` gets a thread (lane) for operations, and for queries about the same subjects. Each of
    `readers` gets a thread for other queries; the last of them runs those that read whole tables (reports).
    `listener`, if given, receives notices in a further thread.
    """

    def __init__(
        self,
        databases: Sequence[Database],
        patience_secs: float,
        listener: NoticeReceiver | None = None,
        readers: Sequence[Database] = (),
    ) -> None:
        self._patience_secs = patience_secs
        self._lanes = [Committer(database, patience_secs, self._post_replies) for database in databases]
        self._readers = [Committer(one, READ_TIMES * patience_secs, self._post_replies) for one in readers]
        self._all = [*self._lanes, *self._readers]
        self._listener = listener
        self._threads: list[threading.Thread] = []
        self._pending = 0
        self._is_stopped = False
        self._call_soon: CallSoon
        self._on_notice: Callable[[Notice], None]

    def start(self, call_soon: CallSoon, on_notice: Callable[[Notice], None]) -> None:
        """Start the threads for operations and queries, and one for the notice receiver if there is one.

        `call_soon` makes the event loop call a function; `on_notice` is called there with each notice.
        """
        self._call_soon, self._on_notice = call_soon, on_notice
        runs: list[tuple[str, Callable[[], None]]] = [
            (f"state-{number}", lane.run) for number, lane in enumerate(self._all)
        ]
        if self._listener is not None:
            runs.append(("state-notices", partial(self._listener.run, self.notice, self._is_slow)))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Commit the submitted operations and end the threads.

        After STOP_TIMES * `patience_secs` seconds the connections are ended, and operations without a reply
        get UNAVAILABLE.
        """
        for lane in self._all:
            lane.items.put(None)
        if self._listener is not None:
            self._listener.stop()
        if not self._join(STOP_TIMES * self._patience_secs):
            self._interrupt(self._all)
            self._join(STOP_SECS)  # a thread that still runs ends with the process
        self._call_soon(partial(self._expire_items, lambda lane: clock.monotonic()))
        self._is_stopped = True

    def _join(self, secs: float) -> bool:
        """Wait at most `secs` seconds for the threads to end. Return False if some still run."""
        deadline = clock.monotonic() + secs
        for thread in self._threads:
            thread.join(max(deadline - clock.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue an operation for the thread that commits all operations on its subject.

        `done` is called with the reply.
        """
        self._submit(self._lanes[hash(operation.subject) % len(self._lanes)], operation, done)

    def query(self, query: Query[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue a query; `done` is called with the reply.

        A query with a subject runs in the thread of that subject, after its earlier operations. Others run in
        a reader thread, if there is one; reports have a reader of their own.
        """
        subject, lanes, readers = query.subject, self._lanes, self._readers
        if subject is not None:
            lane = lanes[hash(subject) % len(lanes)]
        elif not readers:
            lane = lanes[hash(query) % len(lanes)]
        elif query.is_report or len(readers) == 1:
            lane = readers[-1]
        else:
            lane = readers[hash(query) % (len(readers) - 1)]
        self._submit(lane, query, done)

    def _submit(self, lane: Committer, work: object, done: Callable[[Reply[Any]], None]) -> None:
        """Queue `work`, an operation or query, for the thread of `lane`.

        If `pending_max` operations and queries wait already, `done` gets the reply UNAVAILABLE instead.
        """
        if self._pending >= self.pending_max:
            self._call_soon(partial(done, UNAVAILABLE))
            return
        self._pending += 1
        item = Item(work, done)
        lane.waiting[item] = None
        lane.items.put(item)

    def listen(self, replica: str) -> None:
        """Receive the notices for `replica` from now on, if there is a notice receiver."""
        if self._listener is not None:
            self._listener.listen(replica)

    def tick(self) -> None:
        """Reply UNAVAILABLE to operations and queries that have waited too long.

        Connections that do not respond are ended.
        """
        self._expire_items(lambda lane: clock.monotonic() - lane.patience_secs)
        if any(one.busy_secs() >= STUCK_TIMES * one.patience_secs for one in self._all):
            self._interrupt([one for one in self._all if one.busy_secs() >= one.patience_secs])

    def _expire_items(self, oldest: Callable[[Committer], float]) -> None:
        """Reply UNAVAILABLE to operations and queries that have waited too long.

        `oldest` returns a monotonic time for a lane: everything submitted to the lane earlier has expired.
        """
        for lane in self._all:
            cutoff = oldest(lane)
            expired: list[Answer] = []
            for item in list(lane.waiting):
                if item.submitted_at > cutoff:
                    break
                item.is_given_up = True
                expired.append((item, UNAVAILABLE))
            if expired:
                self._call_done(lane, expired)

    def _interrupt(self, lanes: Sequence[Committer]) -> None:
        for lane in lanes:
            lane.interrupt()
        if self._listener is not None:
            self._listener.interrupt()

    @property
    def health(self) -> Health:
        """Reason why the database cannot be used or is silent, or "", and number of waiting operations."""
        failure = next((lane.failure for lane in self._all if lane.failure), "")
        if not failure and (slow := [one for one in self._all if one.busy_secs() >= one.patience_secs]):
            failure = f"the database has not responded for {slow[0].busy_secs():.0f} s"
        return Health(failure, self._pending)

    # Called by the threads.

    def notice(self, notice: Notice) -> None:
        """Pass a notice to the event loop; called by other threads."""
        if not self._is_stopped:
            self._call_soon(partial(self._on_notice, notice))

    def _is_slow(self) -> bool:
        return any(lane.busy_secs() >= SLOW_SECS for lane in self._lanes)

    def _post_replies(self, lane: Committer, answers: list[Answer]) -> None:
        if not self._is_stopped:
            self._call_soon(partial(self._call_done, lane, answers))

    def _call_done(self, lane: Committer, answers: list[Answer]) -> None:
        """Call the callbacks of operations and queries with their replies.

        Those that already got the reply UNAVAILABLE are skipped.
        """
        for item, reply in answers:
            if lane.waiting.pop(item, item) is item:
                continue
            self._pending -= 1
            try:
                item.done(reply)
            except Exception as error:  # it concerns one caller only
                contained("store", error)

"""Writer thread of the store; once it runs, only this thread uses the database.

Each pass of the event loop passes a list of calls. All calls that have arrived form one group, which is
committed in one transaction; further calls queue meanwhile. The outcomes of a group are sent to the event
loop together.

A failed commit makes the store unhealthy. The messages of its group are refused and dropped, and so are
messages that arrive later. Everything else stays in the group, and a probe tries to commit it (or a small
write if it is empty) at once and then every `probe_secs` seconds until the disk works. The store is healthy
again only when the event loop knows of the failure: messages that are appended until then may follow a
refused message of the same source, and must not overtake it.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import structlog

from gateway import clock
from gateway.containment import contained
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.store.database import DISK_ERRORS, ReadDelayed, StoreDatabase
from gateway.store.folder import Reserve
from gateway.store.group import Done, Group
from gateway.store.heap import error_text

GROUP_MESSAGES_MAX: Final = 20_000  # of one transaction, to limit the delay of its acknowledgements
BUSY_COMMITS: Final = 32  # of the last BUSY_SECS, from which on operations that nobody waits for may wait
BUSY_SECS: Final = 0.2
JOIN_SECS: Final = 0.002  # how long they wait for operations with which they are committed
TIDY_SECS: Final = 1.0  # of idleness, until space is returned to the disk and the log is shortened
TIDY_AGAIN_SECS: Final = 0.05  # if there is more to return than one turn does
TIDY_BUSY_SECS: Final = 10.0  # if the store is never idle
SIZE_SECS: Final = 1.0  # between two measurements of the files' size
READ_AGAIN_SECS: Final = 1.0  # until a row is read again that the disk did not return
PROBE_PAGES: Final = 64  # pages returned at once while there is hardly space to write
PROBE_CHANGES_MAX: Final = 1_000  # rows that are settled in one transaction then

log = structlog.get_logger(limited=True)

Calls = list[tuple[Any, ...]]
"""Calls of one pass of the event loop: a method of Group and its arguments, each."""
CallSoon = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Figures:
    """Figures of the store for metrics.

    `byte_count` is the size of the encoded messages written since the start, in bytes, and `commit_secs` the
    duration of the last commit in seconds.
    """

    commits: int = 0
    messages: int = 0
    byte_count: int = 0
    pending: int = 0  # messages handed in, whose sources wait for the outcome
    pending_bytes: int = 0  # their weight in bytes
    file_bytes: int = 0
    commit_secs: float = 0.0
    failures: int = 0
    refused: int = 0  # messages
    damaged: int = 0  # rows and letters that could not be read
    healthy: bool = True


class Writer:
    """Work of the store's writer thread.

    `calls` is the queue of lists of operations for the thread; None in the queue ends `run`.
    """

    def __init__(
        self,
        database: StoreDatabase,
        reserve: Reserve,
        figures: Figures,
        *,
        probe_secs: float,
        on_health: Callable[[bool], None],
        on_reported: Callable[[], None],
        failure: str = "",
    ) -> None:
        """Create the writer without starting a thread.

        While the disk fails, a write is tried every `probe_secs` seconds. In the event loop, `on_health` is
        called when the disk starts (False) or stops (True) failing, and `on_reported` after outcomes were
        reported, when fewer bytes wait for the disk. `failure` is an error of the disk that is known already;
        then the writer begins as unhealthy.
        """
        self.calls: queue.SimpleQueue[Calls | None] = queue.SimpleQueue()
        self.call_soon: CallSoon = _call
        self.failure = failure
        figures.healthy = not failure
        figures.file_bytes = database.size()
        self.broken = False  # by a bug: `calls` is no longer read
        self._failure_reported = True  # the loop knows of the failure, if there is one
        self.group = Group(database.index, database.letters)
        self._database = database
        self._reserve = reserve
        self._figures = figures
        self._probe_secs = probe_secs
        self._on_health = on_health
        self._on_reported = on_reported
        # Reads that are tried again at `_reads_at`.
        self._delayed_reads: list[Callable[[], Callable[[], None]]] = []
        self._reads_at = 0.0
        self._probe_at = 0.0
        self._commit_times: deque[float] = deque(maxlen=BUSY_COMMITS)  # of the last ones, by `perf_counter`
        self._measure_at = 0.0  # when the size of the files is measured again, by `clock.perf_counter`
        self._tidy_at = clock.monotonic() + TIDY_BUSY_SECS
        self._rest: float | None = TIDY_SECS  # seconds until it is time to tidy; None if everything is tidy
        self._ending = False
        database.checkpoints(0 if failure else reserve.pages)

    def run(self) -> None:
        """Execute the queued operations until None is queued. Runs in the writer thread.

        An exception would be a bug. It is raised again, and from then on the store refuses all messages.
        """
        try:
            while not self._ending:
                self._run_turn()
        except BaseException as error:
            self.broken = True
            self._fail(f"the store thread has ended: {error!r}")
            self._post_outcome(self.refusal)
            self.refuse_calls()
            raise

    def end(self) -> None:
        """Commit the remaining operations, mark a clean shutdown and close the database. Called after `run`.

        If the disk fails, the database is only closed.
        """
        if not self.broken:
            try:
                self._database.commit(self.group)
                self._database.mark(clean=True)
                self._database.tidy()
            except DISK_ERRORS as error:
                self._fail(error_text(error))
        self._database.close()

    def refuse_calls(self) -> None:
        """Refuse the messages of all queued operations, because the thread has ended with an exception."""
        while True:
            try:
                calls = self.calls.get_nowait()
            except queue.Empty:
                return
            for method, *arguments in calls or ():
                if method is Group.append:
                    self._figures.pending -= len(arguments[2])
                    self._figures.pending_bytes -= arguments[3]
                if method is Group.fence:
                    arguments[0]()
                if method in (Group.append, Group.barrier):
                    self.call_soon(partial(arguments[-1], self.refusal))
                    self.call_soon(self._on_reported)

    def acknowledge_failure(self) -> None:
        """Record that the event loop knows that the disk fails, so that the store may recover.

        All messages that it had appended before are refused. The next attempt to write is due at once.
        """
        self._failure_reported = True
        self._probe_at = clock.monotonic()

    @property
    def refusal(self) -> Outcome:
        """Outcome that sources get while the store cannot write."""
        return refusal_of(self.failure)

    def _run_turn(self) -> None:
        """Wait until operations are queued or other work is due, and do the work.

        Operations are committed; while the disk fails, their messages are refused. Other work is an attempt
        to write to the failing disk, a repeated read, or housekeeping. Reads are executed last.
        """
        calls = self._next_calls()
        if self.failure:
            if calls is not None:
                self._apply_calls(calls)
                self._refuse()
            if clock.monotonic() >= self._probe_at:
                self._probe()
        elif calls is not None:
            self._gather(calls)
            if not self.group.is_awaited and self._is_busy:
                self._gather_more()
            self._commit()
            if clock.monotonic() >= self._tidy_at:
                self._tidy()
        elif not self._ending:
            self._tidy()
        self._read()
        if self.group.letters.has_changes and not self.failure:  # of rows that could not be read
            self._commit()

    def _read(self) -> None:
        """Execute the reads that wait for the last commit, and failed reads that are due again."""
        reads = self.group.take_reads()
        if self._delayed_reads and clock.monotonic() >= self._reads_at:
            reads += self._delayed_reads
            self._delayed_reads = []
        for read in reads:
            try:
                self.call_soon(read())
            except ReadDelayed as delayed:
                log.warning("store read failed, retrying", why=str(delayed))
                self._delayed_reads.append(read)
                self._reads_at = clock.monotonic() + READ_AGAIN_SECS
            except Exception as error:
                contained("store", error)

    def _next_calls(self) -> Calls | None:
        """Wait for the next list of operations in the queue, and return it.

        Return None if other work is due before, or if the thread has to end (`_ending`).
        """
        patience = max(self._probe_at - clock.monotonic(), 0.0) if self.failure else self._rest
        if self._delayed_reads:
            wait_secs = max(self._reads_at - clock.monotonic(), 0.0)
            patience = wait_secs if patience is None else min(patience, wait_secs)
        try:
            calls = self.calls.get(timeout=patience)
        except queue.Empty:
            return None
        if calls is None:
            self._ending = True
        return calls

    def _apply_calls(self, calls: Calls) -> None:
        group = self.group
        rest = iter(calls)
        try:
            for method, *arguments in rest:
                method(group, *arguments)
        except BaseException:  # a bug: the calls behind it get a refusal
            self.calls.put(list(rest))
            raise

    def _gather(self, calls: Calls | None) -> None:
        """Add these operations and all that are queued to the next transaction.

        No more are added after GROUP_MESSAGES_MAX messages. `calls` is None at the end of the queue.
        """
        while calls is not None:
            self._apply_calls(calls)
            if self.group.appended >= GROUP_MESSAGES_MAX:
                return
            try:
                calls = self.calls.get_nowait()
            except queue.Empty:
                return
        self._ending = True

    @property
    def _is_busy(self) -> bool:
        """True if there were BUSY_COMMITS commits in the last BUSY_SECS."""
        times = self._commit_times
        return len(times) == BUSY_COMMITS and clock.perf_counter() - times[0] < BUSY_SECS

    def _gather_more(self) -> None:
        """Wait up to JOIN_SECS for further operations of the next transaction.

        At 1 000 messages a second, each acknowledgement of a consumer would otherwise cause a commit, which
        the next message would wait for.
        """
        try:
            calls = self.calls.get(timeout=JOIN_SECS)
        except queue.Empty:
            return
        self._gather(calls)

    # Writing.

    def _commit(self) -> None:
        """Commit the collected operations, and report the outcome of their messages."""
        try:
            self._write()
        except DISK_ERRORS as error:
            self._fail(error_text(error))
            self._refuse()

    def _write(self, changes_max: int | None = None) -> None:
        """Commit the collected operations in one transaction, report success, and begin a new group.

        At most `changes_max` rows are updated or deleted for settled messages; the others follow in the next
        transaction. Raises one of DISK_ERRORS; then all operations are still to be committed.
        """
        started = clock.perf_counter()
        group = self.group
        changes = group.changes
        deferred = {}
        if group.moved:
            group.changes = dict(changes)
            group.settle_moved()
        if changes_max is not None:
            group.changes = dict(islice(changes.items(), changes_max))
            deferred = dict(islice(changes.items(), changes_max, None))
        try:
            written = self._database.commit(group)
        except DISK_ERRORS:
            group.changes = changes
            raise
        if written is not None:
            figures = self._figures
            figures.commits += 1
            figures.messages += written.messages
            figures.byte_count += written.byte_count
            figures.commit_secs = clock.perf_counter() - started
            self._commit_times.append(started)
            if started >= self._measure_at:
                self._measure_at = started + SIZE_SECS
                figures.file_bytes = self._database.size()
            self._rest = TIDY_SECS
        settled = group.take_settled()
        if settled and not deferred:
            self.call_soon(partial(_call_all, settled))
            settled = []
        self._post_outcome(ACCEPTED)
        self.group = Group(self._database.index, self._database.letters)
        self.group.reads = group.take_reads()
        self.group.changes = deferred
        self.group.settled_callbacks = settled

    def _refuse(self) -> None:
        """Drop the messages among the collected operations, and report their refusal.

        If there was nothing to write, report success.
        """
        group = self.group
        nothing = not group.has_changes and next(group.runs(), None) is None
        group.drop_messages()
        self._post_outcome(ACCEPTED if nothing else self.refusal)

    def _post_outcome(self, outcome: Outcome) -> None:
        callbacks, messages, byte_count = self.group.take_callbacks()
        if callbacks:
            self.call_soon(partial(self._call_waiting, callbacks, outcome, messages, byte_count))

    def _call_waiting(self, callbacks: list[Done], outcome: Outcome, messages: int, byte_count: int) -> None:
        """Call the callbacks with the outcome, and update the statistics. Runs in the event loop.

        `messages` and `byte_count` are the number, and the size in bytes with overhead, of the messages that
        waited for this outcome.
        """
        figures = self._figures
        figures.pending -= messages
        figures.pending_bytes -= byte_count
        if outcome is not ACCEPTED:
            figures.refused += messages
        for done in callbacks:
            try:
                done(outcome)
            except Exception as error:  # a failure of one callback must not affect the others
                contained("store", error)
        self._on_reported()

    # A disk that is full or fails.

    def _fail(self, text: str) -> None:
        """Mark the store as unhealthy with the error `text`, and delete the reserve file."""
        self._figures.failures += 1
        was_failing, self.failure = bool(self.failure), text
        self._figures.healthy = False
        self._probe_at = clock.monotonic()
        self._reserve.delete()
        self._database.checkpoints(0)  # `tidy` makes checkpoints while there is space
        if not was_failing:
            self._failure_reported = False
            self.call_soon(partial(self._on_health, False))

    def _probe(self) -> None:
        """Try to commit the collected operations in small portions: each may free space for the next.

        The store becomes healthy again if the write-ahead log is empty, the reserve file is allocated, and
        the event loop knows of the failure.
        """
        try:
            self._write(PROBE_CHANGES_MAX)
            self._database.mark(clean=False)
            more = self._database.tidy(PROBE_PAGES, reserve_bytes=0)
            while self.group.changes or (more and self.calls.empty()):
                self._write(PROBE_CHANGES_MAX)
                more = self._database.tidy(PROBE_PAGES, reserve_bytes=0)
            shortened = self._database.shorten()
        except DISK_ERRORS as error:
            self._fail(error_text(error))
        else:
            if shortened and self._failure_reported and self._reserve.allocate():
                self.failure = ""
                self._figures.healthy = True
                self._database.checkpoints(self._reserve.pages)
                self.call_soon(partial(self._on_health, True))
        self._probe_at = clock.monotonic() + self._probe_secs

    def _tidy(self) -> None:
        try:
            more = self._database.tidy()
        except DISK_ERRORS as error:
            self._fail(error_text(error))
            return
        self._figures.file_bytes = self._database.size()
        if more:
            self._rest = TIDY_AGAIN_SECS
        else:
            self._rest = TIDY_SECS if self._database.log_is_read else None
        self._tidy_at = clock.monotonic() + TIDY_BUSY_SECS


def refusal_of(failure: str) -> Outcome:
    """Return the outcome (released, with the text `failure`) that sources get after a failure of the disk."""
    return Outcome(Verdict.RELEASED, Reason.STORE, f"the gateway cannot store the message: {failure}")


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    """Call each of the callbacks; an exception of one does not affect the others. Runs in the event loop."""
    for done in callbacks:
        try:
            done()
        except Exception as error:  # a failure of one callback must not affect the others
            contained("store", error)


def _call(function: Callable[[], None]) -> None:
    """Call the function at once; used until an event loop exists that could run it."""
    function()

"""The thread of the store: it alone uses the database once it runs.

Wake-ups of the event loop arrive as lists of what they hand in. All that have arrived are one group, and a
group is one transaction; while it is being committed the next one gathers. What the loop shall hear goes back
to it once per group.

A commit that fails makes the store unhealthy. The messages of its group are refused and forgotten, and so are
messages that come while it lasts. All else stays in the group, and a probe tries to commit it, or a small
write when there is nothing, at once and then every `probe_secs`, until the disk takes it. Healthy again is
the store only when the loop has heard that it was not, for what is handed in until then may have come behind
a message that was refused, and must not overtake it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import monotonic, perf_counter
from typing import Any, Final

from gateway.containment import contained
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.store.database import DISK_ERRORS, Database
from gateway.store.folder import Reserve
from gateway.store.group import Done, Group
from gateway.store.heap import said

GROUP_MESSAGES_MAX: Final = 20_000  # of one transaction: so that its acknowledgements do not wait for ever
TIDY_SECS: Final = 1.0  # of rest, until space is given back and the log is cut short
TIDY_AGAIN_SECS: Final = 0.05  # when there is more to give back than one turn does
TIDY_BUSY_SECS: Final = 10.0  # when there is no rest
PROBE_PAGES: Final = 64  # given back in one go while there is hardly space to write
PROBE_CHANGES_MAX: Final = 1_000  # rows that are settled in one transaction then

Calls = list[tuple[Any, ...]]
"""What one wake-up hands in: a method of Group and its arguments, each."""
CallSoon = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Figures:
    """What telemetry reads. Octets are those of the encoded messages, seconds those of the last commit."""

    commits: int = 0
    messages: int = 0
    octets: int = 0
    pending: int = 0  # messages handed in, whose sources wait to hear
    pending_octets: int = 0  # what they weigh
    file_octets: int = 0
    commit_secs: float = 0.0
    failures: int = 0
    refused: int = 0  # messages
    damaged: int = 0  # rows and letters that could not be read
    healthy: bool = True


class Writer:
    """What the thread does. `run` ends when `calls` brings None."""

    def __init__(
        self,
        database: Database,
        reserve: Reserve,
        figures: Figures,
        *,
        probe_secs: float,
        on_health: Callable[[bool], None],
        on_told: Callable[[], None],
        failure: str = "",
    ) -> None:
        """`on_told` is called in the loop when less waits for the disk. `failure`: why the disk is known not
        to take anything before it was tried.
        """
        self.calls: queue.SimpleQueue[Calls | None] = queue.SimpleQueue()
        self.call_soon: CallSoon = _call
        self.failure = failure
        figures.healthy = not failure
        figures.file_octets = database.size()
        self.broken = False  # by a bug: nobody reads `calls` any more
        self._heard = True  # by the loop, that there is a failure
        self.group = Group(database.index, database.letters)
        self._database = database
        self._reserve = reserve
        self._figures = figures
        self._probe_secs = probe_secs
        self._on_health = on_health
        self._on_told = on_told
        self._probe_at = 0.0
        self._tidy_at = monotonic() + TIDY_BUSY_SECS
        self._rest: float | None = TIDY_SECS  # until it is time to tidy; None: all is tidy
        self._ending = False
        database.checkpoints(0 if failure else reserve.pages)

    def run(self) -> None:
        """Commit what comes until the end. An exception here is a bug, and leaves the store refusing."""
        try:
            while not self._ending:
                self._turn()
        except BaseException as error:
            self.broken = True
            self._sicken(f"the thread of the store has ended: {error!r}")
            self._tell(self.refusal)
            self.refuse_calls()
            raise

    def end(self) -> None:
        """After `run`: what is still kept, the mark of a clean end, a checkpoint, if the disk takes them."""
        if not self.broken:
            try:
                self._database.commit(self.group)
                self._database.mark(clean=True)
                self._database.tidy()
            except DISK_ERRORS as error:
                self._sicken(said(error))
        self._database.close()

    def refuse_calls(self) -> None:
        """The thread has ended early: whoever waits is told so."""
        while True:
            try:
                calls = self.calls.get_nowait()
            except queue.Empty:
                return
            for method, *arguments in calls or ():
                if method is Group.append:
                    self._figures.pending -= len(arguments[2])
                    self._figures.pending_octets -= arguments[3]
                if method is Group.fence:
                    arguments[0]()
                if method in (Group.append, Group.barrier):
                    self.call_soon(partial(arguments[-1], self.refusal))
                    self.call_soon(self._on_told)

    def heard(self) -> None:
        """The loop knows of the failure; what it handed in before that has been refused."""
        self._heard = True
        self._probe_at = monotonic()

    @property
    def refusal(self) -> Outcome:
        """What a source hears while the store cannot write."""
        return refusal_of(self.failure)

    def _turn(self) -> None:
        calls = self._next()
        if self.failure:
            if calls is not None:
                self._take(calls)
                self._refuse()
            if monotonic() >= self._probe_at:
                self._probe()
        elif calls is not None:
            self._gather(calls)
            self._commit()
            if monotonic() >= self._tidy_at:
                self._tidy()
        elif not self._ending:
            self._tidy()
        for read in self.group.take_reads():
            try:
                self.call_soon(read())
            except Exception as error:
                contained("store", error)
        if self.group.letters.changed and not self.failure:  # of rows that could not be read
            self._commit()

    def _next(self) -> Calls | None:
        """What comes next; None when it is time for something else, or to end."""
        patience = max(self._probe_at - monotonic(), 0.0) if self.failure else self._rest
        try:
            calls = self.calls.get(timeout=patience)
        except queue.Empty:
            return None
        if calls is None:
            self._ending = True
        return calls

    def _take(self, calls: Calls) -> None:
        group = self.group
        rest = iter(calls)
        try:
            for method, *arguments in rest:
                method(group, *arguments)
        except BaseException:  # a bug: those behind it are told so
            self.calls.put(list(rest))
            raise

    def _gather(self, calls: Calls | None) -> None:
        """These, and whatever else has come, into the group."""
        while calls is not None:
            self._take(calls)
            if self.group.appended >= GROUP_MESSAGES_MAX:
                return
            try:
                calls = self.calls.get_nowait()
            except queue.Empty:
                return
        self._ending = True

    # Writing.

    def _commit(self) -> None:
        """Write the group and tell whoever waits for it."""
        try:
            self._write()
        except DISK_ERRORS as error:
            self._sicken(said(error))
            self._refuse()

    def _write(self, changes_max: int | None = None) -> None:
        """One transaction, of not more than so many settled rows; the others stay in the group.

        Raises one of DISK_ERRORS; then the group is as it was.
        """
        started = perf_counter()
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
            figures.octets += written.octets
            figures.commit_secs = perf_counter() - started
            figures.file_octets = self._database.size()
            self._rest = TIDY_SECS
        self._tell(ACCEPTED)
        self.group = Group(self._database.index, self._database.letters)
        self.group.reads = group.take_reads()
        self.group.changes = deferred

    def _refuse(self) -> None:
        """Nothing can be written: forget the messages, unless there is nothing left to write."""
        group = self.group
        nothing = not group.changed and next(group.runs(), None) is None
        group.forget()
        self._tell(ACCEPTED if nothing else self.refusal)

    def _tell(self, outcome: Outcome) -> None:
        told, messages, octets = self.group.take_told()
        if told:
            self.call_soon(partial(self._tell_all, told, outcome, messages, octets))

    def _tell_all(self, told: list[Done], outcome: Outcome, messages: int, octets: int) -> None:
        """In the event loop."""
        figures = self._figures
        figures.pending -= messages
        figures.pending_octets -= octets
        if outcome is not ACCEPTED:
            figures.refused += messages
        for done in told:
            try:
                done(outcome)
            except Exception as error:  # it concerns whoever waited, and nobody behind
                contained("store", error)
        self._on_told()

    # A disk that is full or fails.

    def _sicken(self, text: str) -> None:
        self._figures.failures += 1
        told, self.failure = bool(self.failure), text
        self._figures.healthy = False
        self._probe_at = monotonic()
        self._reserve.give_up()
        self._database.checkpoints(0)  # `tidy` makes them, when there is room
        if not told:
            self._heard = False
            self.call_soon(partial(self._on_health, False))

    def _probe(self) -> None:
        """Try to write what is kept, in small portions, each of which may make room for the next.

        Healthy again only when the log is empty and the reserve can be had, too, and the loop has heard.
        """
        try:
            self._write(PROBE_CHANGES_MAX)
            self._database.mark(clean=False)
            more = self._database.tidy(PROBE_PAGES, kept=0)
            while self.group.changes or (more and self.calls.empty()):
                self._write(PROBE_CHANGES_MAX)
                more = self._database.tidy(PROBE_PAGES, kept=0)
            shortened = self._database.shorten()
        except DISK_ERRORS as error:
            self._sicken(said(error))
        else:
            if shortened and self._heard and self._reserve.take():
                self.failure = ""
                self._figures.healthy = True
                self._database.checkpoints(self._reserve.pages)
                self.call_soon(partial(self._on_health, True))
        self._probe_at = monotonic() + self._probe_secs

    def _tidy(self) -> None:
        try:
            more = self._database.tidy()
        except DISK_ERRORS as error:
            self._sicken(said(error))
            return
        self._figures.file_octets = self._database.size()
        if more:
            self._rest = TIDY_AGAIN_SECS
        else:
            self._rest = TIDY_SECS if self._database.log_is_read else None
        self._tidy_at = monotonic() + TIDY_BUSY_SECS


def refusal_of(failure: str) -> Outcome:
    """What a source hears of a failure of the disk."""
    return Outcome(Verdict.RELEASED, Reason.STORE, f"the gateway cannot store it: {failure}")


def _call(function: Callable[[], None]) -> None:
    """Before there is a loop to run it."""
    function()

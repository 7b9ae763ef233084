"""Interface of the store for the event loop.

Almost every call only adds an operation to a list. `flush`, at the end of a pass of the event loop, passes
the list to the writer thread, which executes all operations of one pass together and in order. The event loop
never waits for the disk, except in the constructor and in `close`. Callbacks given to the store are called in
the event loop, through `call_soon`.

When the disk fails, the writer thread refuses the messages of the failed commit. From the moment the event
loop learns of the failure until it learns that the disk works again, this class refuses messages, and reports
these refusals after those of the thread. A source therefore gets its refusals in the order of its messages.
All messages before the recovery are refused and reported, and none after it; a source that waits for the
recovery overtakes none of its own messages.

Positions are chosen by the owner of a log: messages are appended at rising positions, and never two at the
same one while the first is stored. Messages appended to a dropped log are dropped as well.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gateway import clock
from gateway.model.message import Message, weight_of
from gateway.model.outcome import Outcome
from gateway.model.shares import UserShares
from gateway.model.spooled_bodies import Spooled
from gateway.model.times import WallTime
from gateway.store.database import Stored, StoreDatabase, connect, read_now
from gateway.store.folder import FolderLock, Reserve
from gateway.store.gate import Gate
from gateway.store.group import Done, Group, Key
from gateway.store.index import Log, LogExtent, StoredRow
from gateway.store.letters import Line, StoredDeadLetter
from gateway.store.messages import MakeBody, MessageReader
from gateway.store.schema import STEPS, Step
from gateway.store.writer import Calls, CallSoon, Figures, Writer, refusal_of

PROBE_SECS: Final = 1.0
PENDING_BYTES_MAX: Final = 67_108_864
RESERVE_BYTES: Final = 8_388_608
LETTERS_MAX: Final = 10_000
LETTERS_BYTES_MAX: Final = 67_108_864


class Store:
    """Durable store of logs of messages, small records and dead letters, for the event loop.

    A log is a sequence of messages, such as a queue. A small record is a value with a kind and a key, such as
    a retained message.
    """

    def __init__(
        self,
        folder: Path,
        *,
        probe_secs: float = PROBE_SECS,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        reserve_bytes: int = RESERVE_BYTES,
        letters_max: int = LETTERS_MAX,
        letters_bytes_max: int = LETTERS_BYTES_MAX,
        letter_shares: UserShares | None = None,
        on_health: Callable[[bool], None] = lambda healthy: None,
        on_damage: Callable[[str], None] = lambda text: None,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
        steps: Sequence[Step] = STEPS,
    ) -> None:
        """Open the store in `folder`, creating it if necessary, and read its content except the messages.

        While the disk fails, a write is tried every `probe_secs` seconds. The store is congested while more
        than `pending_bytes_max` bytes wait for the disk. `reserve_bytes` of disk space are reserved for a
        full disk. The other limits are those of the dead letters. `on_health` is called with False when the
        disk starts failing, and with True when it works again; `on_damage` is called with a text about data
        that could not be read. `factory` and `steps` are for tests. Raises StoreError with the reason and
        advice for the operator.
        """
        self.folder = folder
        self.figures = Figures()
        self._pending_bytes_max = pending_bytes_max
        self._on_damage = on_damage
        self._calls: Calls = []
        # Callbacks of paused sources, called when the store is no longer congested.
        self._releases: list[Callable[[], None]] = []
        # Callbacks that get their refusal at the end of a pass, after the thread's refusals.
        self._refused: list[Done] = []
        self._letters_added = self._letters_bytes_added = 0  # handed to the thread since the start
        self._fenced = True
        self.gate = Gate()
        self._on_health = on_health
        self._writer_thread: threading.Thread | None = None
        self._closed = False
        self._lock = FolderLock(folder)
        try:
            reserve = Reserve(folder, reserve_bytes)
            if failure := "" if reserve.has_space() else "the disk is full":
                reserve.delete()
            self._database = StoreDatabase(
                connect(folder, factory, steps),
                folder,
                MessageReader(),
                letters=letter_shares
                or UserShares("dead letters", count_max=letters_max, bytes_max=letters_bytes_max),
                damage=self._damaged,
            )
            self.timeline = self._database.timeline
            self._writer = Writer(
                self._database,
                reserve,
                self.figures,
                probe_secs=probe_secs,
                on_health=self._health_changed,
                on_reported=self._release_held,
                failure=failure or self._open(reserve),
            )
        except BaseException:
            self._lock.release()
            raise
        self._failure = self._writer.failure  # as far as the loop knows
        self._logs = {(log.kind, log.name): log for log in self._database.logs}
        self._last_log = self._database.last_log

    def _open(self, reserve: Reserve) -> str:
        """Mark the database as not cleanly closed, and allocate the reserve file.

        Returns the reason why the disk cannot be written, or "" if it can.
        """
        try:
            self._database.mark(clean=False)
        except sqlite3.Error as error:
            reserve.delete()
            return str(error)
        return "" if reserve.allocate() else "the disk is full"

    def start(self, call_soon: CallSoon) -> None:
        """Start the writer thread, which schedules functions on the event loop with `call_soon`."""
        self._database.tagged.clear()
        self._writer.call_soon = call_soon
        self._writer_thread = threading.Thread(target=self._writer.run, name="store", daemon=True)
        self._writer_thread.start()

    def close(self) -> None:
        """Commit all earlier operations, and release the folder. Waits for the disk. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.flush()
        self._writer.calls.put(None)
        if self._writer_thread is None:
            self._writer.run()
        else:
            self._writer_thread.join()
        self._writer.end()
        self._lock.release()

    def flush(self) -> None:
        """Pass the operations of this event-loop pass to the writer thread, which commits them together."""
        if self._refused and self._fenced:
            self._report_refused()
        if self._calls:
            calls, self._calls = self._calls, []
            self._writer.calls.put(calls)
            if self._writer.broken:
                self._writer.refuse_calls()

    def refuse(self, done: Done) -> None:
        """Queue a call of `done` with the outcome `refusal`, in order behind all earlier refusals.

        Used while the store is not healthy.
        """
        self._refused.append(done)

    def _report_refused(self) -> None:
        while self._refused:
            refused, self._refused = self._refused, []
            outcome = self.refusal
            for done in refused:
                done(outcome)

    def _health_changed(self, healthy: bool) -> None:
        """Process the start or end of a disk failure, in the event loop.

        At the start, the writer thread is requested to report when it has refused all messages appended
        before.
        """
        if healthy:
            self._report_refused()
            self._failure = ""
        else:
            self._failure = self._writer.failure
            self._fenced = False
            self.gate.close()
            self._calls.append((Group.fence, self._acknowledge_failure))
        self._on_health(healthy)
        self.flush()

    def _acknowledge_failure(self) -> None:
        """Notify the writer that the event loop knows of the failure. Runs in the writer thread."""
        self._writer.acknowledge_failure()
        self._writer.call_soon(self._report_and_open)

    def _report_and_open(self) -> None:
        """Report the refusals that `refuse` has queued, and open the gate for messages.

        Called in the event loop when the writer thread has reported all refusals of its own.
        """
        self._fenced = True
        self._report_refused()
        self.gate.open()

    @property
    def healthy(self) -> bool:
        """False if the disk is full or fails; messages are refused until it works again."""
        return not self._failure

    @property
    def refusal(self) -> Outcome:
        """Outcome while the store is not healthy: sources must retry; the text is the error of the disk."""
        return refusal_of(self._failure)

    @property
    def failure(self) -> str:
        """Error text of the disk; "" if the store is healthy."""
        return self._failure

    # Logs.

    def logs(self) -> list[Log]:
        """Return all logs, the oldest first."""
        return list(self._logs.values())

    def log(self, kind: str, name: str) -> Log:
        """Return the log of this kind and name, creating it with the next commit if there is none.

        Raises UnicodeEncodeError if the name is not valid text.
        """
        found = self._logs.get((kind, name))
        if found is None:
            _valid_key(name)
            self._last_log += 1
            found = self._logs[kind, name] = Log(self._last_log, kind, name)
            self._calls.append((Group.create, found))
        return found

    def drop(self, log: Log) -> None:
        """Delete a log with its messages. Later operations on it have no effect."""
        if not log.dropped:
            log.dropped = True
            del self._logs[log.kind, log.name]
            self._calls.append((Group.drop, log))

    def rename(self, log: Log, kind: str, name: str) -> None:
        """Change kind and name of a log, which keeps its messages. No other log may have the new ones.

        Raises UnicodeEncodeError if the name is not valid text.
        """
        _valid_key(name)
        assert (kind, name) not in self._logs
        del self._logs[log.kind, log.name]
        log.kind, log.name = kind, name
        self._logs[kind, name] = log
        self._calls.append((Group.rename, log))

    def extent(self, log: Log) -> LogExtent:
        """Return the positions, the number and the size (bytes, with overhead) of a log's stored messages.

        Only valid before `start`, or for a log created since.
        """
        return self._database.index.extent(log.id)

    def rows(self, log: Log) -> list[StoredRow]:
        """Return the stored rows (runs of messages) of a log, in order of position.

        Only valid before `start`.
        """
        self._before_start()
        return self._database.index.rows(log.id)

    def logs_tagged(self, fits: Callable[[bytes], bool]) -> set[int]:
        """Return the ids of logs with at least one message whose tag (see `append`) is accepted by `fits`.

        `fits` gets a tag and returns True or False. Only valid before `start`.
        """
        self._before_start()
        return set().union(*[logs for tag, logs in self._database.tagged.items() if fits(tag)])

    # Messages.

    def append(self, log: Log, first: int, messages: list[Message], done: Done, *, tag: bytes = b"") -> None:
        """Store `messages` in a log, at the positions from `first` on.

        `done` is called with ACCEPTED when they are on disk, or were settled before they were written.
        Otherwise it is called with an outcome (RELEASED, STORE), and they are dropped. `tag` is stored with
        the messages, and returned when they are read. Messages with the tag TRANSIENT are stored only until
        the next start.
        """
        if self._failure:
            self.figures.refused += len(messages)
            self.refuse(done)
            return
        byte_count = weight_of(messages)
        self.figures.pending += len(messages)
        self.figures.pending_bytes += byte_count
        self._calls.append((Group.append, log, first, messages, byte_count, tag, done))

    @property
    def congested(self) -> bool:
        """True if more than `pending_bytes_max` bytes wait for the disk, so that sources should pause."""
        return self.figures.pending_bytes > self._pending_bytes_max

    def hold(self, releases: list[Callable[[], None]]) -> None:
        """Call the functions `releases`, each of which resumes a source, when the store is not congested.

        They are called when the next outcomes are reported, at the earliest.
        """
        self._releases += releases

    def _release_held(self) -> None:
        if self._releases and not self.congested:
            releases, self._releases = self._releases, []
            for release in releases:
                release()

    def settle(self, log: Log, positions: Sequence[int] | range) -> None:
        """Record that the messages at these positions are settled, so that they may be deleted.

        Unknown positions are ignored.
        """
        self._calls.append((Group.settle, log, positions))

    def settle_beside(self, log: Log, positions: Sequence[int] | range) -> None:
        """Settle messages that were copied to other logs, in the transaction that writes the copies.

        The copies are the messages appended in this pass of the event loop. If they are refused, nothing is
        settled.
        """
        if not self._failure:
            self._calls.append((Group.settle_beside, log, positions))

    def read_from(
        self,
        log: Log,
        position: int,
        then: Callable[[list[Stored]], None],
        *,
        messages_max: int,
        bytes_max: int,
    ) -> None:
        """Read unsettled messages from `position` on, and call `then` with them, in order.

        Whole rows are read until `messages_max` messages or `bytes_max` bytes are reached, so there may be
        more; an empty list means that no further messages are stored. All earlier operations are taken into
        account. A read that fails for a reason that may be temporary is tried again, a second later.
        Unreadable messages are left out, counted, and reported to `on_damage`. Before `start`, `then` is
        called at once.
        """

        def job() -> Callable[[], None]:
            bits = self._writer.group.bits
            rows = self._database.index.of(log.id)
            found: list[Stored] = []
            at = position
            while not found and not log.dropped:  # unreadable rows hide nothing behind them
                ids, at = rows.from_position(at, messages_max, bytes_max, bits)
                if not ids:
                    break
                found = [one for one in self._database.messages(ids, bits) if one[0] >= position]
            return partial(then, found)

        self._do(job)

    def _do(self, job: Callable[[], Callable[[], None]]) -> None:
        """Run `job` in the writer thread, then the function that it returns in the event loop.

        Before `start`, both are called at once.
        """
        if self._writer_thread is None:
            read_now(job)()
        else:
            self._calls.append((Group.read, job))

    def use_bodies(self, make_body: MakeBody) -> list[tuple[int, int, Spooled]]:
        """Set the function that returns the body in a file, and return all stored messages with such a body.

        `make_body` gets the name and size of the file. Returns log id, position and body of each of these
        messages. Only valid before `start`.
        """
        self._before_start()
        self._database.reader.make_body = make_body
        return [
            (log, position, message.body)
            for log, position, message in self._database.references()
            if isinstance(message.body, Spooled)
        ]

    # Small records.

    def put(self, kind: str, key: Key, value: bytes | Message) -> None:
        """Store a small record under its kind and key, replacing an earlier value.

        Raises UnicodeEncodeError for a key that is not valid text, as the other methods for records do.
        """
        self._calls.append((Group.put, kind, _valid_key(key), value))

    def put_with_messages(self, kind: str, key: Key, value: bytes) -> None:
        """Store a small record together with the messages appended in this pass of the event loop.

        If those messages are refused, the record with this kind and key is deleted.
        """
        if self._failure:
            self.delete(kind, key)
        else:
            self._calls.append((Group.put_with_messages, kind, _valid_key(key), value))

    def put_if_refused(self, kind: str, key: Key, value: bytes) -> None:
        """Store a small record only if the messages appended in this pass of the event loop are refused.

        It is written in the transaction of the other operations of this pass. If the messages are written,
        the record is not stored.
        """
        if self._failure:
            self.put(kind, key, value)
        else:
            self._calls.append((Group.put_if_refused, kind, _valid_key(key), value))

    def delete(self, kind: str, key: Key) -> None:
        """Delete the small record of this kind and key, if there is one."""
        self._calls.append((Group.put, kind, _valid_key(key), None))

    def delete_all(self, kind: str, prefix: Key = "") -> None:
        """Delete the small records of a kind whose keys begin with `prefix`.

        An empty prefix deletes all records of the kind.
        """
        self._calls.append((Group.empty, kind, _valid_key(prefix)))

    def records(self, kind: str) -> Iterator[tuple[Key, bytes | Message]]:
        """Return key and value of each small record of a kind on disk, in order of key.

        Only valid before `start`. Unreadable records are left out and reported to `on_damage`.
        """
        self._before_start()
        return self._database.records(kind)

    def after_commit(self, done: Done) -> None:
        """Call `done` with ACCEPTED when all earlier operations are on disk or needed no write.

        If the disk fails, `done` is called with an outcome (RELEASED, STORE). Settlements, records and
        changes of logs are nevertheless written once the disk works again; messages are not.
        """
        self._calls.append((Group.barrier, done))

    def after_settled(self, done: Callable[[], None]) -> None:
        """Call `done` when all earlier settlements are on disk, even if the disk fails in between.

        `done` is not called if the store is closed before.
        """
        self._calls.append((Group.when_settled, done))

    # Dead letters.

    def add_letters(self, messages: Iterable[Message], route: str, outcome: Outcome) -> None:
        """Store a dead letter for each message; the oldest dead letters beyond the limits are deleted.

        `route` is the name of the route that refused them, or "".
        """
        message_list = list(messages)
        self._letters_added += len(message_list)
        self._letters_bytes_added += weight_of(message_list)
        self._calls.append((Group.add_letters, message_list, route, outcome, clock.utc()))

    def delete_letters(self, ids: Iterable[int] | None = None) -> None:
        """Delete the dead letters with these ids; None deletes all."""
        self._calls.append((Group.delete_letters, None if ids is None else list(ids)))

    def newest_letters(
        self,
        count: int,
        then: Callable[[list[StoredDeadLetter]], None],
        *,
        before: int | None = None,
        bytes_max: int = LETTERS_BYTES_MAX,
    ) -> None:
        """Call `then` with at most `count` dead letters, newest first.

        With `before`, only those older than the one with that id are included. The result ends early with the
        message that fills up `bytes_max` bytes. Before `start`, `then` is called at once.
        """
        letters = self._database.letters
        self._letters(lambda: letters.newest(before), then, count, bytes_max)

    def find_letters(
        self,
        ids: Iterable[int],
        then: Callable[[list[StoredDeadLetter]], None],
        *,
        bytes_max: int = LETTERS_BYTES_MAX,
    ) -> None:
        """Call `then` with the dead letters that have these ids, in this order, without missing ones.

        The result ends early with the message that fills up `bytes_max` bytes. Before `start`, `then` is
        called at once.
        """
        letters, letter_ids = self._database.letters, list(ids)
        self._letters(lambda: letters.find(letter_ids), then, None, bytes_max)

    def _letters(
        self,
        query: Callable[[], Iterable[Line]],
        then: Callable[[list[StoredDeadLetter]], None],
        count: int | None,
        bytes_max: int,
    ) -> None:
        self._do(lambda: partial(then, self._database.dead_letters(query, count, bytes_max)))

    def letter_routes(self, then: Callable[[list[tuple[int, WallTime, str]]], None]) -> None:
        """Call `then` with id, time and route of all dead letters, oldest first; no message is read.

        Unreadable ones are left out, and reported to `on_damage`. Before `start`, `then` is called at once.
        """
        letters = self._database.letters
        self._do(lambda: partial(then, letters.routes(self._damaged)))

    @property
    def letters_count(self) -> int:
        """Number of dead letters, including those not written yet."""
        return len(self._database.letters)

    def has_room_for_letters(self, messages: list[Message]) -> bool:
        """Return True if dead letters for these messages fit within the limits, in total and for each user.

        Dead letters that are not written yet are included.
        """
        return self._database.letters.has_room(messages, self._letters_added, self._letters_bytes_added)

    @property
    def letters_crowded_out(self) -> int:
        """Number of dead letters that were deleted since the start to make room for newer ones."""
        return self._database.letters.shares.evicted_count

    @property
    def letters_bytes(self) -> int:
        """Total size of the messages in the dead letters, in bytes with overhead."""
        return self._database.letters.shares.total

    def _before_start(self) -> None:
        assert self._writer_thread is None, "the thread has the database now"

    def _damaged(self, text: str) -> None:
        self.figures.damaged += 1
        self._writer.call_soon(partial(self._on_damage, text))


def _valid_key(key: Key) -> Key:
    """Return the key unchanged. Raises UnicodeEncodeError if it is a str that cannot be encoded in UTF-8."""
    if isinstance(key, str):
        key.encode()
    return key

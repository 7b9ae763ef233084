"""The store, as the event loop sees it.

Every call only adds to a list; `flush`, at the end of a wake-up, hands the list to the writing thread, and
all that one wake-up has handed in is committed together, in the order given. The loop never waits for the
disk, except in the constructor and in `close`. Functions given to the store are called in the loop, through
`call_soon`.

From when the loop has heard that the disk fails until it hears that it does not, messages are refused here,
behind those that the thread refuses. So a source hears of its refusals in the order of its messages, and
there is one moment before which everything is refused, and has been told so, and behind which nothing is: who
waits for that moment overtakes none of its own messages.

Positions are the owner's: messages of a log are appended at rising positions, and never two at the same one
as long as the first is stored. What is appended to a log that was dropped goes with it.
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
from gateway.model.spooled import Spooled
from gateway.store.database import Database, Stored, connect
from gateway.store.folder import FolderLock, Reserve
from gateway.store.gate import Gate
from gateway.store.group import Done, Group, Key
from gateway.store.index import Extent, Log, Row
from gateway.store.letters import DeadLetter, Line
from gateway.store.messages import MakeBody, MessageReader
from gateway.store.schema import STEPS, Step
from gateway.store.writer import Calls, CallSoon, Figures, Writer, refusal_of

PROBE_SECS: Final = 1.0
PENDING_OCTETS_MAX: Final = 67_108_864
RESERVE_OCTETS: Final = 8_388_608
LETTERS_MAX: Final = 10_000
LETTERS_OCTETS_MAX: Final = 67_108_864


class Store:
    """What survives a crash."""

    def __init__(
        self,
        folder: Path,
        *,
        probe_secs: float = PROBE_SECS,
        pending_octets_max: int = PENDING_OCTETS_MAX,
        reserve_octets: int = RESERVE_OCTETS,
        letters_max: int = LETTERS_MAX,
        letters_octets_max: int = LETTERS_OCTETS_MAX,
        letter_shares: UserShares | None = None,
        on_health: Callable[[bool], None] = lambda healthy: None,
        on_damage: Callable[[str], None] = lambda text: None,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
        steps: Sequence[Step] = STEPS,
    ) -> None:
        """Open `folder`, creating it if need be, and read what is stored, without messages.

        More than `pending_octets_max` waiting for the disk makes the store congested.
        `on_health` hears when the disk begins or
        ceases to take what is written, `on_damage` what could not be read. `factory` and `steps` are for
        tests. Raises StoreError, which says what is wrong and what to do.
        """
        self.folder = folder
        self.figures = Figures()
        self._pending_octets_max = pending_octets_max
        self._on_damage = on_damage
        self._calls: Calls = []
        self._held: list[Callable[[], None]] = []  # sources that wait until this is not congested any more
        self._refused: list[Done] = []  # to be told so when the wake-up ends, and the thread has refused its
        self._letters_added = self._letters_octets_added = 0  # handed to the thread since the start
        self._fenced = True
        self.gate = Gate()
        self._on_health = on_health
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = FolderLock(folder)
        try:
            reserve = Reserve(folder, reserve_octets)
            if failure := "" if reserve.plenty() else "the disk is full":
                reserve.give_up()
            self._database = Database(
                connect(folder, factory, steps),
                folder,
                MessageReader(),
                letters=letter_shares
                or UserShares("dead letters", count_max=letters_max, octets_max=letters_octets_max),
                damage=self._damaged,
            )
            self._writer = Writer(
                self._database,
                reserve,
                self.figures,
                probe_secs=probe_secs,
                on_health=self._health_changed,
                on_told=self._release_held,
                failure=failure or self._open(reserve),
            )
        except BaseException:
            self._lock.release()
            raise
        self._failure = self._writer.failure  # as far as the loop has heard
        self._logs = {(log.kind, log.name): log for log in self._database.logs}
        self._last_log = self._database.last_log

    def _open(self, reserve: Reserve) -> str:
        """The first write: from now on the end is not a clean one. Returns why it cannot be written."""
        try:
            self._database.mark(clean=False)
        except sqlite3.Error as error:
            reserve.give_up()
            return str(error)
        return "" if reserve.take() else "the disk is full"

    def start(self, call_soon: CallSoon) -> None:
        """Start the thread. `call_soon`, which it calls, has the event loop run a function."""
        self._writer.call_soon = call_soon
        self._thread = threading.Thread(target=self._writer.run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Commit what has gathered, and let go of the folder; waits for the disk. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.flush()
        self._writer.calls.put(None)
        if self._thread is None:
            self._writer.run()
        else:
            self._thread.join()
        self._writer.end()
        self._lock.release()

    def flush(self) -> None:
        """The wake-up is over: what it has handed in is a transaction, or a part of one."""
        if self._fenced:
            self._tell_refused()
        if self._calls:
            calls, self._calls = self._calls, []
            self._writer.calls.put(calls)
            if self._writer.broken:
                self._writer.refuse_calls()

    def refuse(self, done: Done) -> None:
        """While the store is not healthy: `done` hears so, in its turn."""
        self._refused.append(done)

    def _tell_refused(self) -> None:
        while self._refused:
            refused, self._refused = self._refused, []
            outcome = self.refusal
            for done in refused:
                done(outcome)

    def _health_changed(self, healthy: bool) -> None:
        """In the loop. A failure is told to the thread in turn, behind all that was handed in before."""
        if healthy:
            self._tell_refused()
            self._failure = ""
        else:
            self._failure = self._writer.failure
            self._fenced = False
            self.gate.close()
            self._calls.append((Group.fence, self._reached))
        self._on_health(healthy)
        self.flush()

    def _reached(self) -> None:
        """In the thread: it has refused all that was handed in before the loop had heard of the failure."""
        self._writer.heard()
        self._writer.call_soon(self._passed)

    def _passed(self) -> None:
        """In the loop, which has been told of those refusals."""
        self._fenced = True
        self._tell_refused()
        self.gate.open()

    @property
    def healthy(self) -> bool:
        """False: the disk is full or fails; messages are refused until it takes them again."""
        return not self._failure

    @property
    def refusal(self) -> Outcome:
        """What sources are told while it is not healthy."""
        return refusal_of(self._failure)

    @property
    def failure(self) -> str:
        """What is wrong with the disk; empty when nothing is."""
        return self._failure

    # Logs.

    def logs(self) -> list[Log]:
        """All logs, the oldest first."""
        return list(self._logs.values())

    def log(self, kind: str, name: str) -> Log:
        """The log of this kind and name; a new one is written with the next commit."""
        found = self._logs.get((kind, name))
        if found is None:
            _sound(name)
            self._last_log += 1
            found = self._logs[kind, name] = Log(self._last_log, kind, name)
            self._calls.append((Group.create, found))
        return found

    def drop(self, log: Log) -> None:
        """The log is no more, nor are its messages."""
        if not log.dropped:
            log.dropped = True
            del self._logs[log.kind, log.name]
            self._calls.append((Group.drop, log))

    def rename(self, log: Log, kind: str, name: str) -> None:
        """Give the log, with its messages, a kind and name that no other log has."""
        _sound(name)
        assert (kind, name) not in self._logs
        del self._logs[log.kind, log.name]
        log.kind, log.name = kind, name
        self._logs[kind, name] = log
        self._calls.append((Group.rename, log))

    def extent(self, log: Log) -> Extent:
        """What is stored of a log, in sum. Before `start`, or of a log that is new since."""
        return self._database.index.extent(log.id)

    def rows(self, log: Log) -> list[Row]:
        """What is stored of a log, in order of position. Before `start` only."""
        self._before_start()
        return self._database.index.rows(log.id)

    # Messages.

    def append(self, log: Log, first: int, messages: list[Message], done: Done, *, tag: bytes = b"") -> None:
        """Store `messages` at positions `first` and on, with a tag that comes back with them.

        `done` hears ACCEPTED when they are on disk, or settled meanwhile; otherwise (RELEASED, STORE), and
        they are forgotten. Under the tag TRANSIENT they are forgotten at the next start, too.
        """
        if self._failure:
            self.figures.refused += len(messages)
            self.refuse(done)
            return
        octets = weight_of(messages)
        self.figures.pending += len(messages)
        self.figures.pending_octets += octets
        self._calls.append((Group.append, log, first, messages, octets, tag, done))

    @property
    def congested(self) -> bool:
        """So much waits for the disk that sources should stop."""
        return self.figures.pending_octets > self._pending_octets_max

    def hold(self, releases: list[Callable[[], None]]) -> None:
        """Call these, which let sources go on, as soon as the store is not congested any more."""
        self._held += releases

    def _release_held(self) -> None:
        if self._held and not self.congested:
            held, self._held = self._held, []
            for release in held:
                release()

    def settle(self, log: Log, positions: Sequence[int] | range) -> None:
        """The messages at these positions need not survive any more. Unknown ones are passed over."""
        self._calls.append((Group.settle, log, positions))

    def settle_beside(self, log: Log, positions: Sequence[int] | range) -> None:
        """Settle messages if what is appended in this wake-up is written: they have moved to other logs. When
        the messages are refused, these stay.
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
        octets_max: int,
    ) -> None:
        """`then` gets what is stored at `position` and behind it, less what is settled, in order.

        Rows are read whole until either limit is reached, so there may be more; none: nothing is stored there
        or behind. Sees what was handed in before it. What cannot be read is left out, counted, and told to
        `on_damage`. Before `start`, `then` is called at once.
        """

        def job() -> Callable[[], None]:
            bits = self._writer.group.bits
            rows = self._database.index.of(log.id)
            found: list[Stored] = []
            at = position
            while not found and not log.dropped:  # what cannot be read hides nothing behind it
                ids, at = rows.from_position(at, messages_max, octets_max, bits)
                if not ids:
                    break
                found = [one for one in self._database.messages(ids, bits) if one[0] >= position]
            return partial(then, found)

        self._do(job)

    def _do(self, job: Callable[[], Callable[[], None]]) -> None:
        """In the thread; before there is one, here and now."""
        if self._thread is None:
            job()()
        else:
            self._calls.append((Group.read, job))

    def use_bodies(self, make_body: MakeBody) -> list[tuple[int, int, Spooled]]:
        """Bodies that are files are found by `make_body` from now on. Before `start` only.

        Returns the log, position and body of those that are stored.
        """
        self._before_start()
        self._database.reader.make_body = make_body
        return [
            (log, position, message.body)
            for log, position, message in self._database.references()
            if isinstance(message.body, Spooled)
        ]

    # Small things.

    def put(self, kind: str, key: Key, value: bytes | Message) -> None:
        """Store a value under its kind and key, in place of an earlier one."""
        self._calls.append((Group.put, kind, _sound(key), value))

    def put_beside(self, kind: str, key: Key, value: bytes) -> None:
        """The same, of a value that says of a message of this wake-up that it is stored. When the messages
        are refused, the value is deleted.
        """
        if self._failure:
            self.delete(kind, key)
        else:
            self._calls.append((Group.put_beside, kind, _sound(key), value))

    def delete(self, kind: str, key: Key) -> None:
        """Delete a value, if there is one."""
        self._calls.append((Group.put, kind, _sound(key), None))

    def delete_all(self, kind: str, prefix: Key = "") -> None:
        """Delete the values whose keys begin with `prefix`; all of the kind without one."""
        self._calls.append((Group.empty, kind, _sound(prefix)))

    def things(self, kind: str) -> Iterator[tuple[Key, bytes | Message]]:
        """Keys and values on disk, in order of key. Before `start` only. Raises StoreError when damaged."""
        self._before_start()
        return self._database.things(kind)

    def after_commit(self, done: Done) -> None:
        """`done` hears ACCEPTED when everything handed in before is on disk, at once if there is nothing.

        When the disk does not take it, `done` hears (RELEASED, STORE); settlements, values and logs are
        written none the less, when it takes them again.
        """
        self._calls.append((Group.barrier, done))

    # Dead letters.

    def add_letters(self, messages: Iterable[Message], route: str, outcome: Outcome) -> None:
        """Keep messages that nothing would take; the oldest make room."""
        given = list(messages)
        self._letters_added += len(given)
        self._letters_octets_added += weight_of(given)
        self._calls.append((Group.add_letters, given, route, outcome, clock.utc()))

    def delete_letters(self, ids: Iterable[int] | None = None) -> None:
        """Delete the dead letters with these ids; without ids all."""
        self._calls.append((Group.delete_letters, None if ids is None else list(ids)))

    def newest_letters(
        self, count: int, then: Callable[[list[DeadLetter]], None], *, before: int | None = None
    ) -> None:
        """`then` gets at most `count` letters, the newest first, older than the letter with id `before`.

        Before `start`, `then` is called at once.
        """
        letters = self._database.letters
        self._letters(lambda: letters.newest(before), then, count)

    def find_letters(self, ids: Iterable[int], then: Callable[[list[DeadLetter]], None]) -> None:
        """`then` gets the letters with these ids that there are, in this order; before `start` at once."""
        letters, wanted = self._database.letters, list(ids)
        self._letters(lambda: letters.find(wanted), then)

    def _letters(
        self,
        query: Callable[[], Iterable[Line]],
        then: Callable[[list[DeadLetter]], None],
        count: int | None = None,
    ) -> None:
        self._do(lambda: partial(then, self._database.dead_letters(query, count)))

    @property
    def letters_count(self) -> int:
        """Dead letters that are kept."""
        return len(self._database.letters)

    def has_room_for_letters(self, messages: list[Message]) -> bool:
        """Return True if no dead letter has to go for these, and no user exceeds its share. Those that are
        not written yet are counted."""
        return self._database.letters.has_room(messages, self._letters_added, self._letters_octets_added)

    @property
    def letters_crowded_out(self) -> int:
        """Dead letters that newer ones have taken the place of, since the start."""
        return self._database.letters.shares.pushed_out

    @property
    def letters_octets(self) -> int:
        """Octets of their bodies."""
        return self._database.letters.shares.total

    def _before_start(self) -> None:
        assert self._thread is None, "the thread has the database now"

    def _damaged(self, text: str) -> None:
        self.figures.damaged += 1
        self._writer.call_soon(partial(self._on_damage, text))


def _sound(key: Key) -> Key:
    """The key; raises UnicodeEncodeError here, in the caller, for a string that is no text."""
    if isinstance(key, str):
        key.encode()
    return key

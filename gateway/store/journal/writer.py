"""The gateway's side of the journal: the event loop leaves parts behind, a thread writes them to the disk.

`record` copies the bodies; when enough rows have gathered it makes columns of them, and leaves those to the
thread, which writes; when little happens it makes the columns too. It does not make them
all: to get the interpreter's lock from a busy event loop takes a thread 5 ms, more when the loop lets it go
for moments in between, and while it waits the loop pays for each of those moments. So it should need the lock
seldom (measured with a CRC in the thread: 0.5 us more for each message, or nothing gained when it is one for
the block; with all of it there: a third of the messages not recorded, at half the speed).

A message is never held up: when the disk cannot follow (slow, or full), rows beyond the backlog are dropped
and counted, and a GAP block takes their numbers, so that no reader mistakes the journal for complete. What is
still in memory when the process is killed is lost: the journal is a record, not a store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Final, NamedTuple

from isal.isal_zlib import crc32  # zlib's takes ten times as long

from gateway.clock import utc as wall_time
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.times import Monotonic, WallTime
from gateway.store.journal.appending import Appender, Pwritev
from gateway.store.journal.bursts import Bursts
from gateway.store.journal.encoding import Encoder
from gateway.store.journal.format import Draft, Laid, gap_draft, lay_out, mark_draft, seal
from gateway.store.journal.gathering import Gathering, Memories, RowLabels, Settled
from gateway.store.journal.wall import SECOND, WallClock

CHUNK_OCTETS_MAX: Final = 512 * 1_048_576  # of the bodies of a block, whatever their limit is
FLUSH_OCTETS: Final = 4 * 1_048_576  # of bodies that may gather
WRITE_OCTETS: Final = 2 * 1_048_576  # of blocks that may gather
WRITE_BLOCKS_MAX: Final = 100  # at a time
MARK_SECS: Final = 60.0  # between two low-water marks when nothing crosses


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the journal is written. A limit of 0 does not limit.

    `compress`: zlib's level, 0 to 9; 0: not at all. `body_bytes_max`: larger bodies are left out; 0: all are.
    `sync_interval_secs`: between fsyncs; 0: never. `backlog_bytes_max`: of blocks that wait for the disk.
    """

    segment_bytes: int = 64 * 1_048_576
    segment_secs: float = 3_600.0
    retention_bytes: int = 10 * 1_073_741_824
    retention_secs: float = 7 * 86_400.0
    compress: int = 0
    body_bytes_max: int = 65_536
    flush_interval_secs: float = 0.2
    flush_rows: int = 4_096
    block_rows_max: int = 8_192
    backlog_bytes_max: int = 64 * 1_048_576
    sync_interval_secs: float = 1.0
    retry_secs: float = 1.0


_Sources = list[Message] | list[Address]


class _Block(NamedTuple):
    """What waits for the disk: a draft when the thread is to lay it out. `memories` are in use until it
    is written."""

    block: Draft | Laid
    octets: int
    memories: Sequence[memoryview]


def nothing_open() -> None:
    """Everything that came is settled."""


class JournalWriter:
    """Writes one shard of a journal.

    `clock` is the event loop's, that `received` is told in; it is read there only. `tell` gets a
    line for the log when writing begins to fail, and when it works again; the thread calls it, mostly.
    `oldest` says when the oldest message came that is not settled (None: there is none).
    Counters: `rows`, `blocks`, `octets` written, `dropped` rows, `errors` of the disk, `failed` rows that
    could not be encoded (a bug). Raises JournalError as Appender does.
    """

    def __init__(
        self,
        folder: Path,
        shard: int = 0,
        options: Options | None = None,
        *,
        clock: Callable[[], Monotonic],
        tell: Callable[[str], None],
        oldest: Callable[[], Monotonic | None] = nothing_open,
        utc: Callable[[], WallTime] = wall_time,
        pwritev: Pwritev = os.pwritev,
    ) -> None:
        chosen = self.options = options or Options()
        self._appender = Appender(
            folder,
            shard,
            segment_bytes=chosen.segment_bytes,
            segment_secs=chosen.segment_secs,
            retention_bytes=chosen.retention_bytes,
            retention_secs=chosen.retention_secs,
            sync_interval_secs=chosen.sync_interval_secs,
            level=chosen.compress,
            utc=utc,
            pwritev=pwritev,
        )
        self._encoder = Encoder(shard)
        largest = chosen.body_bytes_max
        self._rows_max = max(
            1, min(chosen.block_rows_max, CHUNK_OCTETS_MAX // largest if largest else 1 << 31)
        )
        self._wall = WallClock(clock, utc)
        self._utc = utc
        self._tell = tell
        self.rows = self.blocks = self.octets = self.errors = self.failed = 0
        self.failure = ""  # what the disk said, while it says so
        # The event loop's.
        self._rows_in = 0
        self.dropped = 0
        self._oldest = oldest
        # Of whoever has the lock: what gathers, and to make blocks of it.
        self._lock = threading.Lock()
        self._memories = Memories()
        self._gathering = self._gather()
        self._next = self._appender.next
        self._accounted = 0  # of the dropped rows
        self._queued = 0  # octets of blocks, ever
        self._low_us = 0  # of all that was received before it, nothing is open and all is recorded
        self._stands: tuple[int, Monotonic] | None = None  # which row is the next one, since when
        # The thread's.
        self._blocks: deque[_Block] = deque()  # others append
        self._laid: list[Laid] = []  # the first of `_blocks`, ready to write
        self._written = 0  # octets of blocks, ever
        self._failed_since = False
        self._wake = threading.Event()
        self._closing = False
        self._disk_thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._disk_thread.start()

    @property
    def backlog(self) -> int:
        """Rows that wait to be written."""
        return self._rows_in - self.rows - self.failed

    @property
    def backlog_octets(self) -> int:
        """Octets of blocks that wait to be written."""
        return self._queued - self._written

    @property
    def healthy(self) -> bool:
        """False: the disk refuses what is written."""
        return not self.failure

    @property
    def next(self) -> int:
        """The sequence number of the next row that is written."""
        return self._appender.next

    @property
    def folder(self) -> Path:
        """Where the journal is."""
        return self._appender.folder

    @property
    def segments(self) -> int:
        """Files of this shard."""
        return self._appender.segments

    @property
    def cut(self) -> int:
        """Octets of an incomplete block that were cut off at the start."""
        return self._appender.cut

    # The event loop's.

    def record(
        self,
        labels: RowLabels,
        messages: list[Message],
        outcome: Outcome,
        received: Monotonic,
        sources: _Sources | None = None,
        slots: list[int] | None = None,
        bursts: Bursts | None = None,
    ) -> None:
        """A recipient's sink has settled `messages`, which are not changed afterwards; `received` is the
        clock's time of their arrival. `sources` are, when they crossed, the same messages as they came in, or
        only their addresses, when crossing changed nothing else and counted a hop. `slots`: their places in
        what was received together, by which the rows of one message are known; None: from 0 on. `bursts`: the
        same messages again, when that is how all of them came; then they need not be looked at one by one."""
        whole, origins = _apart(sources)
        self._keep(Settled(labels, messages, whole, outcome, 0, 0, slots, origins, bursts), received)

    def refuse(
        self,
        labels: RowLabels,
        sources: list[Message],
        outcome: Outcome,
        received: Monotonic,
        slots: Sequence[int] | None = None,
    ) -> None:
        """A route would not let `sources` cross, or they had no target: there is nothing that went out."""
        self._keep(Settled(labels, None, sources, outcome, 0, 0, slots), received)

    def _keep(self, settled: Settled, received: Monotonic) -> None:
        count = len(settled.heads)
        if not count:
            return
        if self._queued - self._written > self.options.backlog_bytes_max:
            self.dropped += count
            self._wake.set()
            return
        wall = self._wall
        now = wall.now()
        done, came = wall.micros(now), wall.micros(received)
        self._rows_in += count
        with self._lock:  # the thread has it seldom, and for no longer than a block takes to be made
            for some in _slices(settled._replace(received_us=came, settled_us=done), self._rows_max):
                self._add(some)
            # What a route refuses is recorded before its batch counts as open.
            self._low_us = min(self._low(now), came) if settled.messages is None else self._low(now)

    def tick(self) -> None:
        """Now and then: say how far the journal is complete though nothing has crossed."""
        now = self._wall.now()
        with self._lock:
            self._low_us = self._low(now)
            quiet = not (self._gathering.rows or self.backlog or self.failure)
            if self._stands is None or self._stands[0] != self._next:
                self._stands = self._next, now
            # Also when it says nothing new, for it says that the gateway lives.
            if quiet and self._next and now - self._stands[1] >= MARK_SECS:
                self._stands = self._next, now
                self._queue(mark_draft(self._appender.shard, self._next, self._low_us))

    def _low(self, now: Monotonic) -> int:
        oldest = self._oldest()
        return self._wall.micros(now if oldest is None else oldest)

    def _add(self, settled: Settled) -> None:
        gathering = self._gathering
        count = len(settled.heads)
        if gathering.rows and gathering.rows + count > self._rows_max:
            self._flush()
            gathering = self._gathering
        try:
            gathering.add(settled)
        except Exception as error:  # a bug of ours must cost what has gathered, not the gateway
            self._queue(self._gap_for(gathering.rows + count, error))
            self._gathering = self._gather()
            return
        most = self.options.flush_rows
        if gathering.rows >= most or gathering.octets >= FLUSH_OCTETS or gathering.nearly_full:
            self._flush()

    def close(self, timeout: float = 10.0) -> None:
        """Write what has gathered, once, and end the thread. What the disk does not take is lost and told.

        Waits for the disk, for `timeout` seconds at most.
        """
        self._closing = True
        self._wake.set()
        self._disk_thread.join(timeout)
        if self._disk_thread.is_alive():
            self._tell(f"the journal's disk does not answer; {self.backlog} rows are left to it")

    # Of whoever has the lock.

    def _gather(self) -> Gathering:
        return Gathering(
            self._memories,
            body_bytes_max=self.options.body_bytes_max,
            apart=self._encoder.apart,
        )

    def _flush(self) -> None:
        """Make a block of what has gathered."""
        gathering = self._gathering
        if gathering.rows:
            draft = self._encoded(gathering)
            self._gathering = self._gather()  # as the encoder wants it now
            self._queue(draft, gathering.memories(lent=True))
            for memory in gathering.memories(lent=False):
                self._memories.give_back(memory)
        if self.dropped > self._accounted and self.backlog_octets <= self.options.backlog_bytes_max:
            self._queue(self._dropped())
        if self.backlog_octets > WRITE_OCTETS:
            self._wake.set()

    def _queue(self, draft: Draft, memories: Sequence[memoryview] = ()) -> None:
        self._next = draft.header.next
        draft = draft._replace(header=draft.header._replace(low_us=self._low_us))
        if self.options.compress:  # the thread's work, for it lets the interpreter's lock go
            block = _Block(draft, sum(map(len, draft.buffers)), memories)
        else:
            laid = seal(lay_out(draft, 0), crc32)
            block = _Block(laid, laid.header.octets, memories)
        self._blocks.append(block)
        self._queued += block.octets

    def _dropped(self) -> Draft:
        """The gap for what was dropped since the last one."""
        rows = self.dropped - self._accounted
        self._accounted += rows
        reason, text = ("unwritable", self.failure) if self._failed_since else ("backlog", "")
        self._failed_since = bool(self.failure)
        return self._gap(rows, reason, text)

    def _gap(self, rows: int, reason: str, text: str) -> Draft:
        now_us = int(self._utc() * SECOND)
        given = dumps({"reason": reason, "text": text}).encode()
        return gap_draft(self._appender.shard, self._next, rows, now_us, given)

    def _encoded(self, gathering: Gathering) -> Draft:
        """The block of what has gathered; a gap when that fails."""
        try:
            return self._encoder.encode(self._next, gathering)
        except Exception as error:  # as above
            self._encoder = self._encoder.afresh()
            return self._gap_for(gathering.rows, error)

    def _gap_for(self, rows: int, error: Exception) -> Draft:
        self.failed += rows
        self._tell(f"{rows} rows of the journal could not be encoded: {error!r}")
        return self._gap(rows, "error", repr(error))

    # The thread's.

    def _run(self) -> None:
        options = self.options
        while not self._closing:
            if self._wake.wait(options.flush_interval_secs):
                self._wake.clear()
            else:  # little happens, so the loop leaves rows behind; else this would only disturb it
                with self._lock:
                    self._flush()
            self._write()
            if self.failure and not self._closing:
                time.sleep(options.retry_secs)
        with self._lock:
            self._flush()
        self._write()
        if lost := self.backlog:
            self.dropped += lost
            self._tell(f"the journal lost its last {lost} rows: {self.failure}")
        self._attempt(self._appender.close)

    def _write(self) -> None:
        """Write all blocks that wait, and see to what is due by the clock."""
        level = self.options.compress
        while self._blocks:
            if not self._laid:
                some = list(islice(self._blocks, WRITE_BLOCKS_MAX))
                self._laid = [
                    seal(lay_out(one.block, level), crc32) if isinstance(one.block, Draft) else one.block
                    for one in some
                ]
            if not self._attempt(self._append):
                return
        self._attempt(self._appender.tick)

    def _append(self) -> None:
        # A disk that is nearly full may have room for one.
        written = self._appender.append(self._laid[:1] if self.failure else self._laid)
        for header, *_ in self._laid[:written]:
            _, octets, memories = self._blocks.popleft()
            for memory in memories:
                self._memories.give_back(memory)
            self._written += octets
            self.blocks += 1
            self.octets += header.octets
            if not header.gap:
                self.rows += header.rows
        del self._laid[:written]
        if self.failure:
            self.failure = ""
            self._tell(f"the journal in {self._appender.folder} is written again")

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do something with the disk; False when it refused."""
        try:
            action()
        except OSError as error:
            self.errors += 1
            self._failed_since = True
            if not self.failure:
                self._tell(f"the journal in {self._appender.folder} cannot be written: {error.strerror}")
            self.failure = error.strerror or str(error)
            return False
        return True


def _apart(sources: _Sources | None) -> tuple[list[Message] | None, list[Address] | None]:
    """Messages, or addresses only."""
    if sources is None:
        return None, None
    if isinstance(sources[0], Message):
        return sources, None
    return None, sources


def _slices(settled: Settled, most: int) -> Iterator[Settled]:
    """They, in pieces that fit into a block."""
    count = len(settled.heads)
    if count <= most:
        yield settled
        return
    _, messages, sources, _, _, _, slots, origins, _ = settled
    for begin in range(0, count, most):
        some = slice(begin, begin + most)
        yield settled._replace(
            messages=None if messages is None else messages[some],
            sources=None if sources is None else sources[some],
            origins=None if origins is None else origins[some],
            slots=(range(count) if slots is None else slots)[some],
            bursts=None,
        )

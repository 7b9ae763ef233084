"""Writer of the journal: the event loop records settled messages, and a thread writes them to the disk.

`record` copies the bodies. When enough rows have gathered, the event loop encodes them as columns and passes
the block to the thread, which writes it; with little traffic the thread encodes, too. The thread does not
encode everything, because a thread needs 5 ms to get the interpreter lock from a busy event loop, and more if
the loop releases it for moments in between, each of which costs the loop time. (Measured: with the CRC in the
thread 0.5 us more for each message, or no gain with one for the block; with everything in the thread a third
of the messages unrecorded, at half the speed.)

A message is never delayed. If the disk is too slow or full, rows beyond the backlog are dropped and counted,
and a GAP block takes their numbers, so that no reader takes the journal for complete. Rows that are still in
memory when the process is killed are lost: the journal is a record, not a store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from isal.isal_zlib import crc32  # zlib's takes ten times as long

from gateway.clock import utc as wall_time
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.times import Monotonic, WallTime
from gateway.store.journal.appender import Appender, Pwritev
from gateway.store.journal.appender import JournalOptions as JournalOptions
from gateway.store.journal.bursts import Bursts
from gateway.store.journal.column_buffers import Gathering, Memories, RowLabels, SettledMessages
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.format import BlockPieces, Draft, gap_draft, lay_out, mark_draft, seal
from gateway.store.journal.wall import SECOND, WallClock

log = structlog.get_logger()

CHUNK_BYTES_MAX: Final = 512 * 1_048_576  # of the bodies of a block, whatever their limit
FLUSH_BYTES: Final = 4 * 1_048_576  # bytes of bodies after which rows are encoded
WRITE_BYTES: Final = 2 * 1_048_576  # bytes of blocks after which the thread is woken
WRITE_BLOCKS_MAX: Final = 100  # at a time
MARK_SECS: Final = 60.0  # between two low-water marks without traffic

_Sources = list[Message] | list[Address]


class _Block(NamedTuple):
    """Block that waits for the disk; a Draft if the writer's thread is to complete it.

    `byte_count` is its size in the backlog. `memories` are in use until the block is written.
    """

    block: Draft | BlockPieces
    byte_count: int
    memories: Sequence[memoryview]


def no_open_receipt() -> None:
    """Return None: no received message is unsettled. Default of `oldest` of a JournalWriter."""


class JournalWriter:
    """Writer of one shard of a journal. A thread of its own writes to the disk.

    `clock` returns loop-clock seconds; only the event loop calls it. `utc` returns the wall-clock time.
    `oldest` returns when the oldest unsettled message was received (loop clock), or None.

    Counters: `rows`, `blocks`, `byte_count` written, `dropped` rows, `errors` of the disk, `failed` rows that
    could not be encoded (a bug). The constructor raises JournalError as Appender does.
    """

    def __init__(
        self,
        folder: Path,
        shard: int = 0,
        options: JournalOptions | None = None,
        *,
        clock: Callable[[], Monotonic],
        oldest: Callable[[], Monotonic | None] = no_open_receipt,
        utc: Callable[[], WallTime] = wall_time,
        pwritev: Pwritev = os.pwritev,
    ) -> None:
        chosen = self.options = options or JournalOptions()
        self._appender = Appender(folder, shard, chosen, utc=utc, pwritev=pwritev)
        self._name = str(folder)
        self._encoder = Encoder(shard)
        self._backlog_max, self._flush_rows = chosen.backlog_bytes_max, chosen.flush_rows
        largest = chosen.body_bytes_max
        self._rows_max = max(
            1, min(chosen.block_rows_max, CHUNK_BYTES_MAX // largest if largest else 1 << 31)
        )
        self._wall = WallClock(clock, utc)
        self._utc = utc
        self.rows = self.blocks = self.byte_count = self.errors = self.failed = 0
        self.failure = ""  # current error of the disk
        # The event loop's.
        self._rows_in = 0
        self.dropped = 0
        self._oldest = oldest
        # With the lock: what gathers, and encoding it.
        self._lock = threading.Lock()
        self._memories = Memories()
        self._gathering = self._gather()
        self._next = self._appender.next
        self._accounted = 0  # dropped rows that a gap covers
        self._queued = 0  # total bytes of queued blocks
        self._low_us = 0  # everything received before is settled and recorded
        self._stands: tuple[int, Monotonic] | None = None  # number of the next row, and since when
        # The thread's.
        self._blocks: deque[_Block] = deque()  # The thread's.
        self._laid: list[BlockPieces] = []  # the first of `_blocks`, ready to be written
        self._written = 0  # total bytes of written blocks
        self._failed_since = False
        self._wake = threading.Event()
        self._closing = False
        self._disk_thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._disk_thread.start()

    @property
    def backlog(self) -> int:
        """Number of rows that wait to be written."""
        return self._rows_in - self.rows - self.failed

    @property
    def backlog_bytes(self) -> int:
        """Size in bytes of the blocks that wait to be written."""
        return self._queued - self._written

    @property
    def healthy(self) -> bool:
        """False if the last write to the disk failed."""
        return not self.failure

    @property
    def next(self) -> int:
        """Sequence number behind the last row that was written."""
        return self._appender.next

    @property
    def folder(self) -> Path:
        """Folder of the journal."""
        return self._appender.folder

    @property
    def segments(self) -> int:
        """Number of files of this shard."""
        return self._appender.segments

    @property
    def cut_bytes(self) -> int:
        """Size in bytes of the incomplete block that was cut off the newest file at the start."""
        return self._appender.cut

    @property
    def lost_rows(self) -> int:
        """Number of rows that were found damaged at the start, and for which gaps were recorded."""
        return self._appender.lost

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
        """Record `messages` that their target has settled with `outcome`. They must not change afterwards.

        `labels` are equal for all. `received` is when they arrived, in loop-clock seconds. `sources` are the
        messages as received, if a route changed them, or only the source addresses if it changed only address
        and hop count. `slots` are their positions in the batch in which they arrived (None: 0, 1, 2 and so
        on). `bursts` are the same messages, if all arrived in bursts; then they are not examined one by one.
        """
        whole, origins = _split_sources(sources)
        self._queue_rows(
            SettledMessages(labels, messages, whole, outcome, 0, 0, slots, origins, bursts), received
        )

    def refuse(
        self,
        labels: RowLabels,
        sources: list[Message],
        outcome: Outcome,
        received: Monotonic,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Record messages that were not delivered: a route refused them, or they had no target.

        `sources` are the messages as received; the other parameters are those of `record`.
        """
        self._queue_rows(SettledMessages(labels, None, sources, outcome, 0, 0, slots), received)

    def _queue_rows(self, settled: SettledMessages, received: Monotonic) -> None:
        """Add settled messages to the rows of the next block, or drop them if the backlog is full.

        `received` is when they arrived, in loop-clock seconds.
        """
        count = len(settled.heads)
        if not count:
            return
        if self._queued - self._written > self._backlog_max:
            self.dropped += count
            self._wake.set()
            return
        wall = self._wall
        now = wall.now()
        done, came = wall.micros(now), wall.micros(received)
        self._rows_in += count
        with self._lock:  # the thread rarely has it, and not longer than encoding a block takes
            for some in _slices(settled._replace(received_us=came, settled_us=done), self._rows_max):
                self._add(some)
            # What a route refuses is recorded before its batch counts as unsettled.
            self._low_us = min(self._low(now), came) if settled.messages is None else self._low(now)

    def tick(self) -> None:
        """Update the low-water mark: all messages received before that time are recorded.

        A shard without traffic gets a block with only this mark every MARK_SECS, which shows that the gateway
        runs.
        """
        now = self._wall.now()
        with self._lock:
            self._low_us = self._low(now)
            quiet = not (self._gathering.rows or self.backlog or self.failure)
            if self._stands is None or self._stands[0] != self._next:
                self._stands = self._next, now
            # Even without news, because it shows that the gateway is alive.
            if quiet and self._next and now - self._stands[1] >= MARK_SECS:
                self._stands = self._next, now
                self._queue(mark_draft(self._appender.shard, self._next, self._low_us))

    def _low(self, now: Monotonic) -> int:
        """Return the time before which all received messages are settled now, in microseconds UTC.

        `now` is in loop-clock seconds.
        """
        oldest = self._oldest()
        return self._wall.micros(now if oldest is None else oldest)

    def _add(self, settled: SettledMessages) -> None:
        """Add messages to the rows of the next block, and flush the rows when there are enough.

        `settled` has messages that fit into one block. If they do not fit into the present one, it is flushed
        first.
        """
        gathering = self._gathering
        count = len(settled.heads)
        if gathering.rows and gathering.rows + count > self._rows_max:
            self._flush()
            gathering = self._gathering
        try:
            gathering.add(settled)
        except Exception as error:  # a bug must lose what has gathered, not stop the gateway
            self._queue(self._gap_for(gathering.rows + count, error))
            self._gathering = self._gather()
            return
        most = self._flush_rows
        if gathering.rows >= most or gathering.byte_count >= FLUSH_BYTES or gathering.nearly_full:
            self._flush()

    def close(self, timeout: float = 10.0) -> None:
        """Write all recorded rows, end the thread and close the files.

        Waits for the disk for at most `timeout` seconds. Rows that cannot be written are lost, and this is
        logged.
        """
        self._closing = True
        self._wake.set()
        self._disk_thread.join(timeout)
        if self._disk_thread.is_alive():
            log.error("journal not closed in time, rows lost", folder=self._name, rows=self.backlog)

    # With the lock.

    def _gather(self) -> Gathering:
        return Gathering(
            self._memories,
            body_bytes_max=self.options.body_bytes_max,
            apart=self._encoder.unshared_columns,
        )

    def _flush(self) -> None:
        """Encode the collected rows as a block, and queue the block for the disk.

        Then queue a gap block for dropped rows, if there are any and the backlog is not full.
        """
        gathering = self._gathering
        if gathering.rows:
            draft = self._encoded(gathering)
            self._gathering = self._gather()  # with the columns apart that the encoder wants now
            self._queue(draft, gathering.memories(lent=True))
            for memory in gathering.memories(lent=False):
                self._memories.give_back(memory)
        if self.dropped > self._accounted and self.backlog_bytes <= self._backlog_max:
            self._queue(self._dropped())
        if self.backlog_bytes > WRITE_BYTES:
            self._wake.set()

    def _queue(self, draft: Draft, memories: Sequence[memoryview] = ()) -> None:
        """Queue a block for the disk. `memories` are returned to the pool when the block is written."""
        self._next = draft.header.next
        draft = draft._replace(header=draft.header._replace(low_us=self._low_us))
        if self.options.compress:  # in the thread, because compression releases the interpreter lock
            block = _Block(draft, sum(map(len, draft.buffers)), memories)
        else:
            laid = seal(lay_out(draft, 0), crc32)
            block = _Block(laid, laid.header.byte_count, memories)
        self._blocks.append(block)
        self._queued += block.byte_count

    def _dropped(self) -> Draft:
        """Return a gap block for the rows that were dropped since the last one."""
        rows = self.dropped - self._accounted
        self._accounted += rows
        reason, text = ("unwritable", self.failure) if self._failed_since else ("backlog", "")
        self._failed_since = bool(self.failure)
        return self._gap(rows, reason, text)

    def _gap(self, rows: int, reason: str, text: str) -> Draft:
        now_us = int(self._utc() * SECOND)
        record = dumps({"reason": reason, "text": text}).encode()
        return gap_draft(self._appender.shard, self._next, rows, now_us, record)

    def _encoded(self, gathering: Gathering) -> Draft:
        """Encode the rows in `gathering` as a block. If that fails, return a gap block for them."""
        try:
            return self._encoder.encode(self._next, gathering)
        except Exception as error:  # as above
            self._encoder = self._encoder.afresh()
            return self._gap_for(gathering.rows, error)

    def _gap_for(self, rows: int, error: Exception) -> Draft:
        """Count and log rows that could not be encoded, and return a gap block for them."""
        self.failed += rows
        log.error("journal rows not encoded, lost", folder=self._name, rows=rows, error=repr(error))
        return self._gap(rows, "error", repr(error))

    # The thread's.

    def _run(self) -> None:
        """Write queued blocks until the writer is closed. This is the function of the writer's thread."""
        options = self.options
        while not self._closing:
            if self._wake.wait(options.flush_interval_secs):
                self._wake.clear()
            else:  # little traffic, so the loop leaves rows behind; otherwise this would only disturb it
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
            log.error(
                "journal not writable at stop, rows lost", folder=self._name, rows=lost, why=self.failure
            )
        self._attempt(self._appender.close)

    def _write(self) -> None:
        """Write all queued blocks, then run the timer of the files: sync, retention, merging, conversion."""
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
        """Write some of the completed blocks to the file, and count the written ones. Raises OSError."""
        # An almost full disk may have space for one block.
        written = self._appender.append(self._laid[:1] if self.failure else self._laid)
        for header, *_ in self._laid[:written]:
            _, byte_count, memories = self._blocks.popleft()
            for memory in memories:
                self._memories.give_back(memory)
            self._written += byte_count
            self.blocks += 1
            self.byte_count += header.byte_count
            if not header.is_gap:
                self.rows += header.rows
        del self._laid[:written]
        if self.failure:
            self.failure = ""
            log.info("journal writable again", folder=self._name)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Call `action`. Return False if it raised OSError, which is logged and stored in `failure`."""
        try:
            action()
        except OSError as error:
            self.errors += 1
            self._failed_since = True
            why = error.strerror or str(error)
            if not self.failure:
                log.error("journal not writable, rows buffered", folder=self._name, why=why)
            self.failure = why
            return False
        return True


def _split_sources(sources: _Sources | None) -> tuple[list[Message] | None, list[Address] | None]:
    """Return (messages, None) or (None, addresses), as `sources` has either; (None, None) for None."""
    if sources is None:
        return None, None
    if isinstance(sources[0], Message):
        return sources, None
    return None, sources


def _slices(settled: SettledMessages, most: int) -> Iterator[SettledMessages]:
    """Yield settled messages in parts of at most `most` messages, so that each part fits into a block."""
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

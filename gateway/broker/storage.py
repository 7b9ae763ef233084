"""Storage of a queue: which messages are on disk, which are only on disk, and which can be deleted.

A durable message is written, and accepted after the commit; meanwhile it waits in memory as any other and may
be delivered. If its recipient requires messages to be stored first, or if the queue occupies too much memory,
new messages are only written (transient ones too, so that the order is preserved), accepted after the commit,
and read back in pieces when it is their turn. Positions in the queue are positions in the store's log.

`PagedLog` is the part of any log that is only on disk; `QueueStorage` is the storage of a Queue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.broker.pressure import hold_sources
from gateway.model.batch import SubBatch
from gateway.model.message import Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.shares import NO_LIMIT
from gateway.store.database import Stored
from gateway.store.index import TRANSIENT, Log
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.broker.queue import Queue

# Limits of one piece; while it is delivered the next is being read.
PIECE_MESSAGES_MAX: Final = 4_096
PIECE_BYTES_MAX: Final = 4_194_304
PIECES_MAX: Final = 2
RANGES_MAX: Final = 10_000  # ranges of positions recorded as never delivered

Range = tuple[int, int]  # first position, and the position behind the last


class PagedLog:
    """Part of a log that is only on disk, in order of position. It is read into memory in pieces."""

    def __init__(
        self,
        store: Store,
        log: Log,
        arrived: Callable[[int], None],
    ) -> None:
        """Create an empty list of the messages of `log` that are only on disk.

        `arrived` is called after each read from disk, with the number of bytes that were counted but do not
        exist: messages that were settled after they were written count until everything is read. The number
        is negative if an earlier version, which did not count long addresses, has written the messages.
        """
        self.log = log
        self.count = 0  # messages that are only on disk, or read but not consumed
        self.byte_count = 0
        self._store = store
        self._arrived = arrived
        self._runs: deque[tuple[int, int]] = deque()  # (first, end) of what is only on disk, in order
        self._pieces: deque[list[Stored]] = deque()  # each of consecutive positions
        self._reading = False
        self._epoch = 0  # a read that was requested before a change of epoch is ignored
        self._emptied = 0  # end of the positions that were here when everything was forgotten

    def __bool__(self) -> bool:
        return bool(self._runs or self._pieces)

    def put(self, first: int, end: int, count: int, byte_count: int) -> None:
        """Add `count` messages, which are only on disk, to the end of this part of the log.

        Their positions are in the range from `first` to before `end`, and their size is `byte_count` bytes.
        """
        if self._runs and self._runs[-1][1] == first:
            first = self._runs.pop()[0]
        self._runs.append((first, end))
        self.count += count
        self.byte_count += byte_count

    def subtract_refused(self, first: int, count: int, byte_count: int) -> bool:
        """Subtract `count` messages from position `first` on, which the store has refused.

        Their size is `byte_count` bytes. Return False if they were removed from this part of the log before.
        """
        if first < self._emptied:
            return False
        self.count -= count
        self.byte_count -= byte_count
        return True

    def next_piece(self) -> list[Stored]:
        """Remove and return the next messages that were read from disk.

        Returns [] if there are none or if they are still being read. The caller must use them before it calls
        `read_ahead`, which may deliver the next ones at once.
        """
        piece = self._pieces.popleft() if self._pieces else []
        self.count -= len(piece)
        self.byte_count -= weight_of([message for _, message, _ in piece])
        return piece

    def read_ahead(self) -> None:
        """Request the next messages from disk, unless enough were read or are being read."""
        if self._runs and not self._reading and len(self._pieces) < PIECES_MAX:
            self._reading = True
            self._store.read_from(
                self.log,
                self._runs[0][0],
                partial(self._read, self._epoch, self._runs[-1][1]),
                messages_max=PIECE_MESSAGES_MAX,
                bytes_max=PIECE_BYTES_MAX,
            )

    def _read(self, epoch: int, end: int, found: list[Stored]) -> None:
        """Add messages that were read from disk; `end` was the end of the log when they were requested.

        `epoch` is the value that `_epoch` had then. If it has changed, because messages were unloaded or
        removed, the result is ignored.
        """
        if epoch != self._epoch:
            self._arrived(0)  # the callers that wait must check again
            return
        self._reading = False
        self._arrived(self._add_read(end, found))

    def _add_read(self, end: int, found: list[Stored]) -> int:
        """Add messages that were read from disk. Return the bytes that were counted but do not exist.

        `end` was the end of the log when they were requested.
        """
        if found:
            end = found[-1][0] + 1  # there may be more behind it
        runs = self._runs
        while runs and runs[0][1] <= end:
            runs.popleft()
        if runs and runs[0][0] < end:
            runs[0] = (end, runs[0][1])
        for _, piece in groupby(enumerate(found), lambda row: row[1][0] - row[0]):
            self._pieces.append([stored for _, stored in piece])
        if sum(len(piece) for piece in self._pieces) >= self.count:
            runs.clear()  # what else they hold is settled
        return self._recount()

    def _recount(self) -> int:
        """Correct `count` and `byte_count` by the messages that were read. Return the bytes counted too much.

        While more messages are on disk, only a `byte_count` that is too low is corrected.
        """
        lacking = self.byte_count - weight_of(self.read_messages())
        if self._runs:
            lacking = min(lacking, 0)
        else:
            self.count = sum(len(piece) for piece in self._pieces)
        self.byte_count -= lacking
        return lacking

    def read_messages(self) -> Iterator[Message]:
        """Yield the messages that were read and are not consumed yet."""
        for piece in self._pieces:
            for _, message, _ in piece:
                yield message

    def unload(self) -> None:
        """Drop the messages in memory that were read but not consumed; they are still on disk."""
        if self._pieces:
            self._runs.appendleft((self._pieces[0][0][0], self._pieces[-1][-1][0] + 1))
            self._pieces.clear()
        self._epoch += 1
        self._reading = False

    @property
    def first(self) -> int | None:
        """Position of the first message that is only on disk, or was read and not consumed; None if none."""
        return self._pieces[0][0][0] if self._pieces else self._runs[0][0] if self._runs else None

    def empty(self, end: int) -> None:
        """Remove all messages from this part of the log; their positions are before `end`."""
        self._emptied = end
        self._runs.clear()
        self._pieces.clear()
        self.count = self.byte_count = 0
        self._epoch += 1
        self._reading = False


class MemoryLimits(NamedTuple):
    """Number and bytes of the stored messages of one queue that may also be in memory."""

    messages: int = NO_LIMIT
    byte_count: int = NO_LIMIT


class QueueStorage(PagedLog):
    """Storage of a durable queue.

    An earlier process may have delivered any message that it stored, except for those that it recorded as
    never delivered when it ended.
    """

    def __init__(self, queue: Queue, store: Store, log: Log, memory: MemoryLimits) -> None:
        """Create the storage of `queue`. Beyond the limits `memory` new messages are only on disk."""
        super().__init__(store, log, self._has_arrived)
        self.restrained = False  # its owner occupies too much memory: new messages are only on disk
        self._queue = queue
        self._messages_max, self._bytes_max = memory
        self._loaded: list[Callable[[], None]] = []
        self.on_refused: Callable[[list[Message]], None] | None = None  # gets refused messages
        extent = store.extent(log)
        self.recovered = extent.end  # end of the positions from before this process
        self._untouched: list[Range] = []  # ranges of those that were never delivered
        if extent.count:
            self.put(extent.first, extent.end, extent.count, extent.byte_count)
        queue.attach_storage(self, extent.end, self.byte_count, store.gate)

    # Messages of an earlier process.

    def set_undelivered(self, untouched: list[Range]) -> None:
        """Set the ranges of positions that an earlier process has recorded as never delivered."""
        self._untouched = untouched

    def undelivered_ranges(self) -> list[Range]:
        """Return the ranges of positions that were certainly never delivered, at most RANGES_MAX.

        Each range is (first, end).
        """
        found: list[Range] = []
        for first, end in self._queue.undelivered_ranges():
            for low, high in (*self._untouched, (self.recovered, end)):
                if max(first, low) < min(end, high):
                    found.append((max(first, low), min(end, high)))
        return found[:RANGES_MAX]

    def delivered(self, position: int) -> tuple[bool, int]:
        """Return (delivered, end) for the stored message at `position`.

        `delivered` is True if an earlier process may have delivered the message. It is the same for all
        positions from `position` to before `end`.
        """
        ranges = self._untouched
        at = bisect_right(ranges, position, key=itemgetter(0)) - 1
        if at >= 0 and position < ranges[at][1]:
            return False, ranges[at][1]
        return True, ranges[at + 1][0] if at + 1 < len(ranges) else self.recovered

    def stored_before(self, position: int) -> Iterator[list[Message]]:
        """Yield the messages that an earlier process stored from `position` on, in pieces.

        The store must not have been started yet, because until then it reads synchronously.
        """
        found: list[Stored] = []
        while True:
            self._store.read_from(
                *(self.log, position, found.extend),
                messages_max=PIECE_MESSAGES_MAX,
                bytes_max=PIECE_BYTES_MAX,
            )
            if not found:
                return
            yield [message for _, message, _ in found]
            position = found[-1][0] + 1
            found.clear()

    def load_all(self) -> None:
        """Move all messages that an earlier process stored into the queue's memory, before the store starts.

        Nothing is delivered yet.
        """
        while self._runs:
            found: list[Stored] = []
            self._store.read_from(
                *(self.log, self._runs[0][0], found.extend),
                messages_max=PIECE_MESSAGES_MAX,
                bytes_max=PIECE_BYTES_MAX,
            )
            self._queue.subtract_missing_bytes(self._add_read(self._runs[-1][1], found))
            while piece := self.next_piece():
                self._queue.refill(piece[0][0], [message for _, message, _ in piece])

    # Publishing.

    def take(self, sub_batch: SubBatch, messages: list[Message]) -> list[Message]:
        """Queue `messages` of the sub-batch `sub_batch`, and store those that must survive a restart.

        They are queued in memory or on disk only. `sub_batch` is settled: stored messages after their commit,
        others at once. Return the queued messages: all of `messages`, unless the store is read-only now.
        """
        queue = self._queue
        alone = bool(self) or self._memory_full() or sub_batch.recipient.stored_first
        if not self._store.healthy:
            return self._take_unwritten(sub_batch, messages, alone)
        first = queue.next
        if not alone:
            queue.put(messages)
        start = 0
        for durable, group in groupby(messages, lambda message: message.durable):
            stop = start + len(list(group))
            if durable or alone:
                if alone:
                    self._put_aside(first + start, messages[start:stop])
                run = messages if stop - start == len(messages) else messages[start:stop]
                written = partial(self._written, sub_batch, start, stop, first + start, alone)
                self._store.append(self.log, first + start, run, written, tag=b"" if durable else TRANSIENT)
                if not durable:
                    sub_batch.batch.store_until_restart(sub_batch.slots[start:stop])
            else:
                sub_batch.settle_at(range(start, stop))
            start = stop
        if self._store.congested:
            self._store.hold(hold_sources(sub_batch))
        return messages

    def _take_unwritten(self, sub_batch: SubBatch, messages: list[Message], alone: bool) -> list[Message]:
        """Queue only transient messages that fit into memory, because the store is read-only now.

        Other messages are refused and not queued, so that they are not delivered before they are refused.
        `alone` is True if no message may be in memory only. Return the queued messages.
        """
        positions = [] if alone else [at for at, message in enumerate(messages) if not message.durable]
        queued = [messages[at] for at in positions]
        self._queue.put(queued)
        sub_batch.settle_at(positions)
        if len(positions) < len(messages):
            self._store.refuse(sub_batch.settle)
        return queued

    def _memory_full(self) -> bool:
        """Return True if new messages are only written to disk, because memory cannot take them now."""
        queue = self._queue
        if self.restrained or not queue.memory_reaches_end:
            return True
        return (
            len(queue) - self.count >= self._messages_max
            or queue.byte_count - self.byte_count >= self._bytes_max
        )

    def _put_aside(self, first: int, messages: list[Message]) -> None:
        queue = self._queue
        count = len(messages)
        queue.next += count
        queue.add_to_size(messages)
        self.put(first, queue.next, count, weight_of(messages))

    def _written(
        self, sub_batch: SubBatch, start: int, stop: int, first: int, alone: bool, outcome: Outcome
    ) -> None:
        """Settle messages of `sub_batch` after their commit; if it failed, remove them from the queue.

        They are at the indexes `start` to before `stop` in `sub_batch`, and have positions from `first` on.
        `alone` is True if they were not in memory.
        """
        if outcome is not ACCEPTED:
            messages = sub_batch.messages[start:stop]
            if alone:
                if self.subtract_refused(first, len(messages), weight_of(messages)):
                    self._queue.subtract_refused(messages)
                else:
                    messages = []
            else:
                messages = self._queue.remove_refused(first, len(messages))
            if self.on_refused is not None:
                self.on_refused(messages)
        if stop - start == len(sub_batch.messages):
            sub_batch.settle(outcome)
        else:
            sub_batch.settle_at(range(start, stop), outcome)

    # Delivery and settlement.

    def forget(self, positions: Sequence[int]) -> None:
        """Delete the messages at these positions from the disk, because they are settled."""
        if positions:
            self._store.settle(self.log, positions)

    def forget_beside(self, positions: Sequence[int]) -> None:
        """Delete settled messages in the transaction that stores what is published in this event-loop pass.

        If that transaction fails, they stay on disk.
        """
        self._store.settle_beside(self.log, positions)

    def refill(self) -> bool:
        """Move the next messages from disk into the queue's memory, which must be empty.

        Return False if there are none, or if they are still being read.
        """
        piece = self.next_piece()
        if piece:
            self._queue.refill(piece[0][0], [message for _, message, _ in piece])
        self.read_ahead()
        return bool(piece)

    def when_loaded(self, then: Callable[[], None]) -> None:
        """Call `then` when the queue's next messages are in memory: at once if they have been read."""
        if self.refill():
            then()
        else:
            self._loaded.append(then)

    def _has_arrived(self, lacking: int) -> None:
        self._queue.subtract_missing_bytes(lacking)
        self._queue.dispatch()
        loaded, self._loaded = self._loaded, []
        for then in loaded:
            then()

    # Deletion.

    def clear(self, first: int | None) -> None:
        """Delete all messages from position `first` on.

        None deletes only the messages that are on disk and not in memory.
        """
        if first is None:
            first = self.first
        if not (
            self._queue.unacknowledged or self._queue.awaiting_dead_letters
        ):  # everything: faster than settling each
            self._store.drop(self.log)
            self.log = self._store.log(self.log.kind, self.log.name)
        elif first is not None:
            self.forget(range(first, self._queue.next))
        self.empty(self._queue.next)

    def drop(self) -> None:
        """Delete the stored messages of a deleted queue."""
        self._store.drop(self.log)

"""The durable side of a queue: what of it is on disk, what is there alone, and what may be forgotten.

A durable message is written, and accepted when the commit has it; meanwhile it waits in memory as any other
and may be delivered. When its recipient wants it stored first, or the queue holds more in memory than it
should, what comes is written only (the transient too, or the order would be lost) and read again in pieces
when its turn has come. Positions in the queue are positions in the store's log.

`PagedLog` is what waits on disk alone, of whatever keeps its messages in a log; `QueueStorage` is the side of
a Queue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from gateway.broker.pressure import hold_sources
from gateway.model.batch import SubBatch
from gateway.model.message import Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.store.database import Stored
from gateway.store.index import TRANSIENT, Log
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.broker.queue import Queue

# One piece that is read; while it is handed out the next is on its way.
PIECE_MESSAGES_MAX: Final = 4_096
PIECE_OCTETS_MAX: Final = 4_194_304
PIECES_MAX: Final = 2
RANGES_MAX: Final = 10_000  # of positions, of which is noted that nobody has been handed them

Range = tuple[int, int]  # positions, from the first to before the end


class PagedLog:
    """What of a log is on disk alone, in order of position; it is read in pieces."""

    def __init__(
        self,
        store: Store,
        log: Log,
        arrived: Callable[[int], None],
        weigh: Callable[[Iterable[Message]], int] = weight_of,
    ) -> None:
        """`arrived` is called when a piece has been read, with the octets that were counted and are not
        there: what was settled after it was written counts until all has been read. `weigh`: as whoever keeps
        the log counts.
        """
        self.log = log
        self._weigh = weigh
        self.count = 0  # messages on disk alone, and those read that have not been taken
        self.octets = 0
        self._store = store
        self._arrived = arrived
        self._runs: deque[tuple[int, int]] = deque()  # (first, end) of what is on disk alone, in order
        self._pieces: deque[list[Stored]] = deque()  # of consecutive positions each
        self._reading = False
        self._epoch = 0  # a read that was asked for before it was cleared comes too late

    def __bool__(self) -> bool:
        return bool(self._runs or self._pieces)

    def put(self, first: int, end: int, count: int, octets: int) -> None:
        """`count` messages from `first` to before `end`, behind all others, are on disk alone."""
        if self._runs and self._runs[-1][1] == first:
            first = self._runs.pop()[0]
        self._runs.append((first, end))
        self.count += count
        self.octets += octets

    def take_back(self, count: int, octets: int) -> None:
        """So much was put that the disk did not take."""
        self.count -= count
        self.octets -= octets

    def next_piece(self) -> list[Stored]:
        """What comes next, no longer counted here. Empty: there is nothing, or it is still being read.

        Put it in its place and then `read_ahead`: what that brings may come at once.
        """
        piece = self._pieces.popleft() if self._pieces else []
        self.count -= len(piece)
        self.octets -= self._weigh([message for _, message, _ in piece])
        return piece

    def read_ahead(self) -> None:
        """See to it that a piece is on its way or here."""
        if self._runs and not self._reading and len(self._pieces) < PIECES_MAX:
            self._reading = True
            self._store.read_from(
                self.log,
                self._runs[0][0],
                partial(self._read, self._epoch, self._runs[-1][1]),
                messages_max=PIECE_MESSAGES_MAX,
                octets_max=PIECE_OCTETS_MAX,
            )

    def _read(self, epoch: int, end: int, found: list[Stored]) -> None:
        """The store has read; `end` is where all that was put had ended when that was asked for."""
        if epoch != self._epoch:
            self._arrived(0)  # whoever waits for it has to look again
            return
        self._reading = False
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
            runs.clear()  # what they hold besides is settled
        self._arrived(0 if runs else self._recount())

    def _recount(self) -> int:
        """All has been read: what it was thought to be and was not is no more. Returns its octets."""
        octets = self._weigh(message for piece in self._pieces for _, message, _ in piece)
        lacking = self.octets - octets
        self.count = sum(len(piece) for piece in self._pieces)
        self.octets = octets
        return lacking

    def unload(self) -> None:
        """Nobody will take what has been read for a while: leave it on disk."""
        if self._pieces:
            self._runs.appendleft((self._pieces[0][0][0], self._pieces[-1][-1][0] + 1))
            self._pieces.clear()
        self._epoch += 1
        self._reading = False

    @property
    def first(self) -> int | None:
        """The first position that is on disk alone."""
        return self._pieces[0][0][0] if self._pieces else self._runs[0][0] if self._runs else None

    def empty(self) -> None:
        """Nothing is on disk alone any more."""
        self._runs.clear()
        self._pieces.clear()
        self.count = self.octets = 0
        self._epoch += 1
        self._reading = False


class QueueStorage(PagedLog):
    """What a durable queue has on disk.

    Of messages from before this process nobody knows whether they have been delivered, save for those of
    which the process before noted, as it came to its end, that they were `untouched`.
    """

    def __init__(
        self, queue: Queue, store: Store, log: Log, *, memory_messages_max: int, memory_octets_max: int
    ) -> None:
        """`memory_...`: beyond them messages wait on disk alone."""
        super().__init__(store, log, self._has_arrived, queue.weigh)
        self.restrained = False  # its owner holds too much of the memory: what comes waits on disk alone
        self._queue = queue
        self._messages_max = memory_messages_max
        self._octets_max = memory_octets_max
        self._loaded: list[Callable[[], None]] = []
        extent = store.extent(log)
        self.recovered = extent.end  # positions below it are from before this process
        self._untouched: list[Range] = []  # of those
        octets = 0
        if extent.count:
            octets = extent.octets if queue.weigh is weight_of else self._weigh_stored(extent.first)
            self.put(extent.first, extent.end, extent.count, octets)
        queue.keep_in(self, extent.end, octets, store.gate)

    # Before this process.

    def recall(self, untouched: list[Range]) -> None:
        """What `untouched` has said as the process before ended."""
        self._untouched = untouched

    def untouched(self) -> list[Range]:
        """The positions that nobody has been handed yet, as far as is known; RANGES_MAX ranges at most."""
        found: list[Range] = []
        for first, end in self._queue.untouched():
            for low, high in (*self._untouched, (self.recovered, end)):
                if max(first, low) < min(end, high):
                    found.append((max(first, low), min(end, high)))
        return found[:RANGES_MAX]

    def delivered(self, position: int) -> tuple[bool, int]:
        """Whether the message at a position below `recovered` may have been delivered before; and where that
        may change.
        """
        ranges = self._untouched
        at = bisect_right(ranges, position, key=itemgetter(0)) - 1
        if at >= 0 and position < ranges[at][1]:
            return False, ranges[at][1]
        return True, ranges[at + 1][0] if at + 1 < len(ranges) else self.recovered

    def _weigh_stored(self, position: int) -> int:
        """What is stored from `position` on, for a queue that counts otherwise than the store: before that is
        started it answers at once."""
        octets = 0
        found: list[Stored] = []
        while True:
            self._store.read_from(
                *(self.log, position, found.extend),
                messages_max=PIECE_MESSAGES_MAX,
                octets_max=PIECE_OCTETS_MAX,
            )
            if not found:
                return octets
            octets += self._weigh([message for _, message, _ in found])
            position = found[-1][0] + 1
            found.clear()

    # In.

    def take(self, part: SubBatch, messages: list[Message]) -> None:
        """Queue the messages, in memory or on disk alone, and write those that must be written."""
        queue = self._queue
        alone = bool(self) or self._memory_full() or part.recipient.stored_first
        if not self._store.healthy:
            self._take_unwritten(part, messages, alone)
            return
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
                written = partial(self._written, part, start, stop, first + start, alone)
                self._store.append(self.log, first + start, run, written, tag=b"" if durable else TRANSIENT)
            if not durable:
                part.settle_at(range(start, stop))
            start = stop
        if self._store.congested:
            self._store.hold(hold_sources(part))

    def _take_unwritten(self, part: SubBatch, messages: list[Message], alone: bool) -> None:
        """The disk takes nothing now: neither does the queue, but for what is transient and fits into memory.
        To queue the others until they are refused would deliver them first.
        """
        taken = [] if alone else [at for at, message in enumerate(messages) if not message.durable]
        self._queue.put([messages[at] for at in taken])
        part.settle_at(taken)
        if len(taken) < len(messages):
            self._store.refuse(part.settle)

    def _memory_full(self) -> bool:
        queue = self._queue
        if self.restrained:
            return True
        return len(queue) - self.count >= self._messages_max or queue.octets - self.octets >= self._octets_max

    def _put_aside(self, first: int, messages: list[Message]) -> None:
        queue = self._queue
        count = len(messages)
        octets = self._weigh(messages)
        queue.next += count
        queue.octets += octets
        self.put(first, queue.next, count, octets)

    def _written(
        self, part: SubBatch, start: int, stop: int, first: int, alone: bool, outcome: Outcome
    ) -> None:
        """The store has committed the messages, or could not."""
        if outcome is not ACCEPTED:
            messages = part.messages[start:stop]
            if alone:
                octets = self._weigh(messages)
                self.take_back(len(messages), octets)
                self._queue.shrink(octets)
            else:
                self._queue.withdraw(first, len(messages))
        if stop - start == len(part.messages):
            part.settle(outcome)
        else:
            part.settle_at(range(start, stop), outcome)

    # Out.

    def forget(self, positions: Sequence[int]) -> None:
        """These messages need not survive any longer."""
        if positions:
            self._store.settle(self.log, positions)

    def forget_beside(self, positions: Sequence[int]) -> None:
        """Settle these messages in the transaction that writes what is published in this wake-up."""
        self._store.settle_beside(self.log, positions)

    def refill(self) -> bool:
        """The queue has nothing in memory: give it the next piece. False: there is none, or not yet."""
        piece = self.next_piece()
        if piece:
            self._queue.refill(piece[0][0], [message for _, message, _ in piece])
        self.read_ahead()
        return bool(piece)

    def when_loaded(self, then: Callable[[], None]) -> None:
        """Call `then` when what the queue lacks has been read."""
        self._loaded.append(then)
        self.read_ahead()

    def _has_arrived(self, lacking: int) -> None:
        self._queue.shrink(lacking)
        self._queue.dispatch()
        loaded, self._loaded = self._loaded, []
        for then in loaded:
            then()

    # The end.

    def clear(self, first: int | None) -> None:
        """Forget everything from position `first` on; None: from what is on disk alone."""
        if first is None:
            first = self.first
        if not self._queue.unacknowledged:  # all of it: cheaper than to settle each
            self._store.drop(self.log)
            self.log = self._store.log(self.log.kind, self.log.name)
        elif first is not None:
            self.forget(range(first, self._queue.next))
        self.empty()

    def drop(self) -> None:
        """The queue is deleted."""
        self._store.drop(self.log)

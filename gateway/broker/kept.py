"""The durable side of a queue: what of it is on disk, what is there alone, and what may be forgotten.

A durable message is written, and accepted when the commit has it; meanwhile it waits in memory as any other
and may be delivered. When the queue holds more in memory than it should, what comes is written only (the
transient too, or the order would be lost) and read again in pieces when its turn has come. Positions in the
queue are positions in the store's log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from gateway.broker.pressure import Pressure
from gateway.model.batch import Part
from gateway.model.message import Message
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


class Kept:
    """What a durable queue has on disk."""

    def __init__(
        self, queue: Queue, store: Store, log: Log, *, memory_messages_max: int, memory_octets_max: int
    ) -> None:
        """`memory_...`: beyond them messages wait on disk alone."""
        self.log = log
        self.count = 0  # messages on disk alone, and those read that have not been handed to the queue
        self.octets = 0
        self._queue = queue
        self._store = store
        self._messages_max = memory_messages_max
        self._octets_max = memory_octets_max
        self._runs: deque[tuple[int, int]] = deque()  # (first, end) of what is on disk alone, in order
        self._pieces: deque[tuple[int, list[Message]]] = deque()
        self._reading = False
        self._epoch = 0  # a read that was asked for before a purge comes too late
        self._loaded: list[Callable[[], None]] = []
        self._pressure = Pressure()
        extent = store.extent(log)
        self.recovered = extent.end  # positions below it are from before this process
        if extent.count:
            self._runs.append((extent.first, extent.end))
            self.count, self.octets = extent.count, extent.octets
            queue.octets += extent.octets
        queue.next = extent.end
        queue.kept = self
        queue.gone = []

    # In.

    def take(self, part: Part, messages: list[Message]) -> None:
        """Queue the messages, in memory or on disk alone, and write those that must be written."""
        queue = self._queue
        alone = bool(self._runs or self._pieces) or self._memory_full()
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
            self._pressure.hold_sources(part)

    def _memory_full(self) -> bool:
        queue = self._queue
        return len(queue) - self.count >= self._messages_max or queue.octets - self.octets >= self._octets_max

    def _put_aside(self, first: int, messages: list[Message]) -> None:
        queue = self._queue
        count = len(messages)
        octets = sum([len(message.body) for message in messages])
        if self._runs and self._runs[-1][1] == first:
            first = self._runs.pop()[0]
        self._runs.append((first, queue.next + count))
        self.count += count
        self.octets += octets
        queue.next += count
        queue.octets += octets

    def _written(self, part: Part, start: int, stop: int, first: int, alone: bool, outcome: Outcome) -> None:
        """The store has committed the messages, or could not."""
        if outcome is not ACCEPTED:
            messages = part.messages[start:stop]
            if alone:
                self.count -= len(messages)
                octets = sum([len(message.body) for message in messages])
                self.octets -= octets
                self._queue.octets -= octets
            else:
                self._queue.withdraw(first, len(messages))
        if stop - start == len(part.messages):
            part.settle(outcome)
        else:
            part.settle_at(range(start, stop), outcome)
        if not self._store.congested:
            self._pressure.relieve()

    # Out.

    def forget(self, positions: Sequence[int]) -> None:
        """These messages need not survive any longer."""
        if positions:
            self._store.settle(self.log, positions)

    def refill(self) -> bool:
        """The queue has nothing in memory: give it the next piece. False: there is none, or not yet."""
        if not self._pieces:
            self._read_ahead()
            return False
        first, messages = self._pieces.popleft()
        self.count -= len(messages)
        self.octets -= sum([len(message.body) for message in messages])
        self._queue.refill(first, messages)
        self._read_ahead()
        return True

    def when_loaded(self, then: Callable[[], None]) -> None:
        """Call `then` when what the queue lacks has been read."""
        self._loaded.append(then)
        self._read_ahead()

    def _read_ahead(self) -> None:
        if self._runs and not self._reading and len(self._pieces) < PIECES_MAX:
            self._reading = True
            self._store.read_from(
                self.log,
                self._runs[0][0],
                partial(self._read, self._epoch, self._queue.next),
                messages_max=PIECE_MESSAGES_MAX,
                octets_max=PIECE_OCTETS_MAX,
            )

    def _read(self, epoch: int, end: int, found: list[Stored]) -> None:
        """The store has read; `end` is where the queue ended when that was asked for."""
        if epoch != self._epoch:
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
            rows = [row for _, row in piece]
            self._pieces.append((rows[0][0], [message for _, message, _ in rows]))
        if not runs:
            self._recount()
        self._queue.dispatch()
        loaded, self._loaded = self._loaded, []
        for then in loaded:
            then()

    def _recount(self) -> None:
        """All that was on disk alone has been read: what it was thought to be and was not is no more."""
        count = sum(len(messages) for _, messages in self._pieces)
        octets = sum(len(message.body) for _, messages in self._pieces for message in messages)
        self._queue.octets -= self.octets - octets
        self.count, self.octets = count, octets

    # The end.

    def clear(self, first: int | None) -> None:
        """Forget everything from position `first` on; None: from what is on disk alone."""
        if first is None:
            first = self._pieces[0][0] if self._pieces else self._runs[0][0] if self._runs else None
        if first is not None:
            self.forget(range(first, self._queue.next))
        self._runs.clear()
        self._pieces.clear()
        self.count = self.octets = 0
        self._epoch += 1
        self._reading = False

    def drop(self) -> None:
        """The queue is deleted."""
        self._store.drop(self.log)
        self._pressure.relieve()

"""Operations since the last commit, in the order in which the event loop called them.

Operations that cancel out do so here, before anything is written to disk. A message that is settled before it
is written is never written. Of several values under one key only the last is written. The messages of a log
that is dropped are dropped with it. After a failed commit the group continues without its messages, whose
sources are informed; everything else is written with the next commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.times import WallTime
from gateway.store.index import WHOLE, Index, Log, merge_bits, position_bits, ranges, unsettled
from gateway.store.letters import StoredLetters

RUN_MESSAGES_MAX: Final = 1_000  # of one row, which is read or deleted at once
RUN_BYTES_MAX: Final = 1_048_576  # bytes of one row, unless one message alone has more

Key = bytes | str
Done = Callable[[Outcome], None]


class MessageRun(NamedTuple):
    """Messages to be written as one new row of a log.

    Message k is at position `first + offsets[k]`, or `first + k` without offsets. `count` is the number of
    positions, `byte_count` the size of the messages in bytes, with overhead.
    """

    log: int
    first: int
    count: int  # type: ignore[assignment]  # as in Row
    offsets: list[int] | None
    messages: Sequence[Message]
    byte_count: int
    tag: bytes


class RowSettlement(NamedTuple):
    """Settled messages of one stored row: bit k of `bits` is set if the message at `first + k` is settled.

    `bits` is WHOLE if all are settled.
    """

    log: int
    first: int
    count: int  # type: ignore[assignment]  # as in Row
    bits: int


class _UnwrittenRun:
    """Consecutive messages of one log that are not written yet, from the position `first` on.

    Bit k of `bits` is set if the message at position `first + k` is settled already.
    """

    __slots__ = ("bits", "first", "messages", "tag")

    def __init__(self, first: int, messages: list[Message], tag: bytes) -> None:
        self.first = first
        self.messages = messages
        self.tag = tag
        self.bits = 0


class Group:
    """Operations of the store that are collected to be written in one transaction."""

    def __init__(self, index: Index, letters: StoredLetters) -> None:
        self.index = index
        self.letters = letters
        self.changes: dict[int, RowSettlement] = {}  # by row
        self.created: dict[int, Log] = {}
        self.renamed: dict[int, Log] = {}
        self.dropped: list[int] = []
        # Kinds and prefixes whose records are deleted before `things` are written.
        self.emptied: list[tuple[str, Key]] = []
        self.things: dict[tuple[str, Key], bytes | Message | None] = {}  # None: deleted
        # The keys among `things` that are valid only if the messages are written.
        self.beside: list[tuple[str, Key]] = []
        # Records that are written only if the messages are refused.
        self.if_refused: dict[tuple[str, Key], bytes] = {}
        # Messages that are settled only if the messages are written.
        self.moved: list[tuple[Log, Sequence[int] | range]] = []
        self.callbacks: list[Done] = []
        self.settled_callbacks: list[Callable[[], None]] = []
        self.reads: list[Callable[[], Callable[[], None]]] = []
        self.appended = 0
        self.appended_bytes = 0
        self._unwritten_runs: dict[int, list[_UnwrittenRun]] = {}

    @property
    def has_changes(self) -> bool:
        """True if there is something to write besides messages."""
        return bool(
            self.changes
            or self.things
            or self.created
            or self.renamed
            or self.dropped
            or self.emptied
            or self.letters.has_changes
        )

    @property
    def is_awaited(self) -> bool:
        """True if someone waits for the outcome of the transaction, or for a read after it."""
        return bool(self.callbacks or self.settled_callbacks or self.reads)

    # Operations that are handed in.

    def append(
        self, log: Log, first: int, messages: list[Message], byte_count: int, tag: bytes, done: Done
    ) -> None:
        """Add messages for the positions of a log from `first` on.

        `byte_count` is their size in bytes, with overhead. `tag` is stored with them. `done` is called with
        their outcome after the commit.
        """
        self.callbacks.append(done)
        self.appended += len(messages)
        self.appended_bytes += byte_count
        if log.dropped or not messages:
            return
        runs = self._unwritten_runs.setdefault(log.id, [])
        at = 0
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.tag == tag
            and last.first + len(last.messages) == first
            and last.bits != WHOLE
        ):
            at = RUN_MESSAGES_MAX - len(last.messages)
            last.messages += messages[:at]
        for start in range(at, len(messages), RUN_MESSAGES_MAX):
            runs.append(_UnwrittenRun(first + start, messages[start : start + RUN_MESSAGES_MAX], tag))
        if last is not None and first < last.first:
            runs.sort(key=_first)

    def settle(self, log: Log, positions: Sequence[int] | range) -> None:
        """Record that the messages at these positions are settled, whether they are on disk or not yet.

        Unknown positions are ignored.
        """
        if log.dropped:
            return
        runs = self._unwritten_runs.get(log.id)
        rows = self.index.logs.get(log.id)
        for start, stop in ranges(positions):
            if runs is not None:
                _settle_runs(runs, start, stop)
            if rows is not None:
                for id, first, count, _ in rows.overlapping(start, stop):
                    known_bits = self.bits(id)
                    bits = merge_bits(known_bits, position_bits(first, count, start, stop), count)
                    if bits != known_bits:
                        self.changes[id] = RowSettlement(log.id, first, count, bits)

    def settle_beside(self, log: Log, positions: Sequence[int] | range) -> None:
        """Record that these messages of `log` are settled, but only if this group's messages are written."""
        self.moved.append((log, positions))

    def settle_moved(self) -> None:
        """Settle the messages that `settle_beside` got, before the messages of this group are written."""
        for log, positions in self.moved:
            self.settle(log, positions)
        self.moved.clear()

    def bits(self, row: int) -> int:
        """Return which messages of a stored row are settled, as bits; WHOLE if all of them are.

        The lowest bit is for the row's first position. `row` is the row's id.
        """
        change = self.changes.get(row)
        return self.index.settled.get(row, 0) if change is None else change.bits

    def create(self, log: Log) -> None:
        """Add the creation of a log to the transaction."""
        self.created[log.id] = log

    def rename(self, log: Log) -> None:
        """Add the change of a log's kind and name to the transaction; `log` has the new ones."""
        (self.created if log.id in self.created else self.renamed)[log.id] = log

    def drop(self, log: Log) -> None:
        """Delete a log with its messages."""
        self._unwritten_runs.pop(log.id, None)
        self.renamed.pop(log.id, None)
        rows = self.index.logs.get(log.id)
        if rows is not None:
            for id, _, _, _ in rows.all():
                self.changes.pop(id, None)
        if self.created.pop(log.id, None) is None:
            self.dropped.append(log.id)

    def put(self, kind: str, key: Key, value: bytes | Message | None) -> None:
        """Set the value of the small record with this kind and key; None deletes the record."""
        self.if_refused.pop((kind, key), None)
        self.things[kind, key] = value

    def put_with_messages(self, kind: str, key: Key, value: bytes) -> None:
        """Set the value of a small record if the messages of this group are written; otherwise delete it."""
        self.things[kind, key] = value
        self.beside.append((kind, key))

    def put_if_refused(self, kind: str, key: Key, value: bytes) -> None:
        """Set the value of a small record if the messages of this group are refused.

        Otherwise do nothing.
        """
        self.if_refused[kind, key] = value

    def empty(self, kind: str, prefix: Key) -> None:
        """Delete the small records of `kind` whose keys begin with `prefix`; with no prefix, all of them."""
        for one in [one for one in self.things if one[0] == kind and begins(one[1], prefix)]:
            del self.things[one]
        self.emptied.append((kind, prefix))

    def add_letters(self, messages: Iterable[Message], route: str, outcome: Outcome, utc: WallTime) -> None:
        """Add a dead letter for each message to the transaction.

        `route` is the name of the route that refused them, or ""; `utc` is the time of the refusal.
        """
        self.letters.add(messages, route, outcome, utc)

    def delete_letters(self, ids: Iterable[int] | None) -> None:
        """Delete the dead letters with these ids; None for all."""
        self.letters.delete(ids)

    def barrier(self, done: Done) -> None:
        """Call `done` after the commit, with ACCEPTED or the outcome of refused messages."""
        self.callbacks.append(done)

    def when_settled(self, done: Callable[[], None]) -> None:
        """Call `done` when all earlier settlements are on disk, even if that takes several attempts."""
        self.settled_callbacks.append(done)

    def fence(self, reached: Callable[[], None]) -> None:
        """Call `reached` at once. All operations queued before are in this group then, or were refused."""
        reached()

    def read(self, job: Callable[[], Callable[[], None]]) -> None:
        """Run `job` after the commit in the writer thread.

        Call the function that it returns on the event loop.
        """
        self.reads.append(job)

    # What is written.

    def runs(self) -> Iterator[MessageRun]:
        """Yield the unsettled messages that were appended, grouped into the rows to write."""
        for log, runs in self._unwritten_runs.items():
            for run in runs:
                if run.bits != WHOLE:
                    yield from _runs(log, run)

    def drop_messages(self) -> None:
        """Drop the appended messages, and the operations that depend on their being written.

        All other operations stay in the group. The records of `put_if_refused` are added to them.
        """
        self._unwritten_runs.clear()
        for one in self.beside:
            self.things[one] = None
        self.beside.clear()
        self.things.update(self.if_refused)
        self.if_refused.clear()
        self.moved.clear()

    def take_callbacks(self) -> tuple[list[Done], int, int]:
        """Return and clear the callbacks that wait for the outcome, in order.

        Also returns and clears the number of appended messages and their size in bytes, with overhead.
        """
        callbacks, self.callbacks = self.callbacks, []
        appended, self.appended = self.appended, 0
        byte_count, self.appended_bytes = self.appended_bytes, 0
        return callbacks, appended, byte_count

    def take_settled(self) -> list[Callable[[], None]]:
        """Return and clear the callbacks of `when_settled`."""
        callbacks, self.settled_callbacks = self.settled_callbacks, []
        return callbacks

    def take_reads(self) -> list[Callable[[], Callable[[], None]]]:
        """Return and clear the read jobs, in order."""
        reads, self.reads = self.reads, []
        return reads


def begins(key: Key, prefix: Key) -> bool:
    """Return True if `key` begins with `prefix`. A str never begins with bytes, nor bytes with a str."""
    if not prefix:
        return True
    if isinstance(key, str):
        return isinstance(prefix, str) and key.startswith(prefix)
    return isinstance(prefix, bytes) and key.startswith(prefix)


def _settle_runs(runs: list[_UnwrittenRun], start: int, stop: int) -> None:
    """Mark positions `start` to `stop - 1` as settled in unwritten runs, which are sorted by position."""
    at = max(bisect_right(runs, start, key=_first) - 1, 0)
    for place in range(at, len(runs)):
        run = runs[place]
        if run.first >= stop:
            return
        count = len(run.messages)
        if run.first + count > start:
            run.bits = merge_bits(run.bits, position_bits(run.first, count, start, stop), count)


def _first(run: _UnwrittenRun) -> int:
    return run.first


def _runs(log: int, run: _UnwrittenRun) -> Iterator[MessageRun]:
    """Yield the rows to write for an unwritten run: its unsettled messages.

    A row has at most RUN_BYTES_MAX bytes, unless it is a single message.
    """
    messages: Sequence[Message] = run.messages
    offsets: Sequence[int] = range(len(messages))
    if run.bits:
        offsets = unsettled(run.bits, len(messages))
        messages = [messages[offset] for offset in offsets]
    sizes = [message.byte_count for message in messages]
    byte_count = sum(sizes)
    if byte_count <= RUN_BYTES_MAX:
        yield _run(log, run, offsets, messages, byte_count)
        return
    start = byte_count = 0
    for at, size in enumerate(sizes):
        if at > start and byte_count + size > RUN_BYTES_MAX:
            yield _run(log, run, offsets[start:at], messages[start:at], byte_count)
            start, byte_count = at, 0
        byte_count += size
    yield _run(log, run, offsets[start:], messages[start:], byte_count)


def _run(
    log: int, run: _UnwrittenRun, offsets: Sequence[int], messages: Sequence[Message], byte_count: int
) -> MessageRun:
    """Return the row to write for these messages of `run`, which are at these offsets of it.

    Its positions begin with the first of these messages and end with the last.
    """
    start = offsets[0]
    count = offsets[-1] - start + 1
    gaps = None if count == len(offsets) else [offset - start for offset in offsets]
    return MessageRun(log, run.first + start, count, gaps, messages, byte_count, run.tag)

"""What has gathered since the last commit, in the order in which it was handed in.

Everything that cancels out does so here, before the disk hears of it: a message that is settled while it
still waits is not written, of several values under one key only the last is, what is appended to a log that
is then dropped goes with it. After a commit that failed the group lives on without its messages: their
sources have been told, and everything else is written with the next commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.model.times import WallTime
from gateway.store.index import WHOLE, Index, Log, merged, ranges, stretch, unsettled
from gateway.store.letters import Letters

RUN_MESSAGES_MAX: Final = 1_000  # of one row: what is read, or deleted, in one go
RUN_OCTETS_MAX: Final = 1_048_576  # and what they weigh, unless one alone has more

Key = bytes | str
Done = Callable[[Outcome], None]


class Run(NamedTuple):
    """Messages for one row: they stand at `first + offset`; no offsets: one after the other."""

    log: int
    first: int
    count: int  # type: ignore[assignment]  # as in Row
    offsets: list[int] | None
    messages: Sequence[Message]
    octets: int
    tag: bytes


class Change(NamedTuple):
    """What of a stored row is settled now."""

    log: int
    first: int
    count: int  # type: ignore[assignment]  # as in Row
    bits: int


class _Piece:
    """A stretch of one log that waits to be written; what of it is settled already."""

    __slots__ = ("bits", "first", "messages", "tag")

    def __init__(self, first: int, messages: list[Message], tag: bytes) -> None:
        self.first = first
        self.messages = messages
        self.tag = tag
        self.bits = 0


class Group:
    """The content of one transaction."""

    def __init__(self, index: Index, letters: Letters) -> None:
        self.index = index
        self.letters = letters
        self.changes: dict[int, Change] = {}  # by row
        self.created: dict[int, Log] = {}
        self.renamed: dict[int, Log] = {}
        self.dropped: list[int] = []
        self.emptied: list[tuple[str, Key]] = []  # kinds and prefixes, before `things`
        self.things: dict[tuple[str, Key], bytes | Message | None] = {}  # None: deleted
        self.beside: list[tuple[str, Key]] = []  # of them those that stand and fall with the messages
        self.moved: list[tuple[Log, Sequence[int] | range]] = []  # settled if the messages are written
        self.told: list[Done] = []
        self.reads: list[Callable[[], Callable[[], None]]] = []
        self.appended = 0
        self.appended_octets = 0
        self._pieces: dict[int, list[_Piece]] = {}

    @property
    def changed(self) -> bool:
        """Whether there is something to write besides messages."""
        return bool(
            self.changes
            or self.things
            or self.created
            or self.renamed
            or self.dropped
            or self.emptied
            or self.letters.changed
        )

    # What is handed in.

    def append(
        self, log: Log, first: int, messages: list[Message], octets: int, tag: bytes, done: Done
    ) -> None:
        """Messages for positions `first` and on."""
        self.told.append(done)
        self.appended += len(messages)
        self.appended_octets += octets
        if log.dropped or not messages:
            return
        pieces = self._pieces.setdefault(log.id, [])
        at = 0
        last = pieces[-1] if pieces else None
        if (
            last is not None
            and last.tag == tag
            and last.first + len(last.messages) == first
            and last.bits != WHOLE
        ):
            at = RUN_MESSAGES_MAX - len(last.messages)
            last.messages += messages[:at]
        for start in range(at, len(messages), RUN_MESSAGES_MAX):
            pieces.append(_Piece(first + start, messages[start : start + RUN_MESSAGES_MAX], tag))
        if last is not None and first < last.first:
            pieces.sort(key=_first)

    def settle(self, log: Log, positions: Sequence[int] | range) -> None:
        """These messages, waiting or stored, need not survive any more; unknown positions are passed over."""
        if log.dropped:
            return
        pieces = self._pieces.get(log.id)
        rows = self.index.logs.get(log.id)
        for start, stop in ranges(positions):
            if pieces is not None:
                _settle_pieces(pieces, start, stop)
            if rows is not None:
                for id, first, count, _ in rows.overlapping(start, stop):
                    bits = merged(self.bits(id), stretch(first, count, start, stop), count)
                    self.changes[id] = Change(log.id, first, count, bits)

    def settle_beside(self, log: Log, positions: Sequence[int] | range) -> None:
        """These messages need not survive if those that come with them are written."""
        self.moved.append((log, positions))

    def settle_moved(self) -> None:
        """All that was handed in is about to be written: settle what stands and falls with it."""
        for log, positions in self.moved:
            self.settle(log, positions)
        self.moved.clear()

    def bits(self, row: int) -> int:
        """What of a stored row is settled."""
        change = self.changes.get(row)
        return self.index.settled.get(row, 0) if change is None else change.bits

    def create(self, log: Log) -> None:
        """A log is new."""
        self.created[log.id] = log

    def rename(self, log: Log) -> None:
        """A log has another kind and name."""
        (self.created if log.id in self.created else self.renamed)[log.id] = log

    def drop(self, log: Log) -> None:
        """A log goes with its messages."""
        self._pieces.pop(log.id, None)
        self.renamed.pop(log.id, None)
        rows = self.index.logs.get(log.id)
        if rows is not None:
            for id, _, _, _ in rows.all():
                self.changes.pop(id, None)
        if self.created.pop(log.id, None) is None:
            self.dropped.append(log.id)

    def put(self, kind: str, key: Key, value: bytes | Message | None) -> None:
        """A thing has this value; None: it is no more."""
        self.things[kind, key] = value

    def put_beside(self, kind: str, key: Key, value: bytes) -> None:
        """A thing has this value if the messages that come with it are written; otherwise it is no more."""
        self.things[kind, key] = value
        self.beside.append((kind, key))

    def empty(self, kind: str, prefix: Key) -> None:
        """The things of `kind` whose keys begin with `prefix` are no more; all of them without a prefix."""
        for one in [one for one in self.things if one[0] == kind and begins(one[1], prefix)]:
            del self.things[one]
        self.emptied.append((kind, prefix))

    def add_letters(self, messages: Iterable[Message], route: str, outcome: Outcome, utc: WallTime) -> None:
        """Messages that nothing would take."""
        self.letters.add(messages, route, outcome, utc)

    def delete_letters(self, ids: Iterable[int] | None) -> None:
        """Dead letters that nobody needs any more; None: all."""
        self.letters.delete(ids)

    def barrier(self, done: Done) -> None:
        """Someone waits for all that came before."""
        self.told.append(done)

    def fence(self, reached: Callable[[], None]) -> None:
        """All that was handed in before has been taken."""
        reached()

    def read(self, job: Callable[[], Callable[[], None]]) -> None:
        """To be done after the commit; what it returns is for the event loop."""
        self.reads.append(job)

    # What is to be written.

    def runs(self) -> Iterator[Run]:
        """The messages that are not settled, as rows."""
        for log, pieces in self._pieces.items():
            for piece in pieces:
                if piece.bits != WHOLE:
                    yield from _runs(log, piece)

    def forget(self) -> None:
        """The messages are not to be written, nor what stands beside them; everything else stays."""
        self._pieces.clear()
        for one in self.beside:
            self.things[one] = None
        self.beside.clear()
        self.moved.clear()

    def take_told(self) -> tuple[list[Done], int, int]:
        """Who waits, in order, and for how many messages and octets."""
        told, self.told = self.told, []
        appended, self.appended = self.appended, 0
        octets, self.appended_octets = self.appended_octets, 0
        return told, appended, octets

    def take_reads(self) -> list[Callable[[], Callable[[], None]]]:
        """What is to be read, in order."""
        reads, self.reads = self.reads, []
        return reads


def begins(key: Key, prefix: Key) -> bool:
    """Whether `key` begins with `prefix`; text and octets never begin with each other."""
    if not prefix:
        return True
    if isinstance(key, str):
        return isinstance(prefix, str) and key.startswith(prefix)
    return isinstance(prefix, bytes) and key.startswith(prefix)


def _settle_pieces(pieces: list[_Piece], start: int, stop: int) -> None:
    at = max(bisect_right(pieces, start, key=_first) - 1, 0)
    for place in range(at, len(pieces)):
        piece = pieces[place]
        if piece.first >= stop:
            return
        count = len(piece.messages)
        if piece.first + count > start:
            piece.bits = merged(piece.bits, stretch(piece.first, count, start, stop), count)


def _first(piece: _Piece) -> int:
    return piece.first


def _runs(log: int, piece: _Piece) -> Iterator[Run]:
    """The live messages of a piece, cut where they exceed RUN_OCTETS_MAX."""
    messages: Sequence[Message] = piece.messages
    offsets: Sequence[int] = range(len(messages))
    if piece.bits:
        offsets = unsettled(piece.bits, len(messages))
        messages = [messages[offset] for offset in offsets]
    sizes = [message.octets for message in messages]
    octets = sum(sizes)
    if octets <= RUN_OCTETS_MAX:
        yield _run(log, piece, offsets, messages, octets)
        return
    start = octets = 0
    for at, size in enumerate(sizes):
        if at > start and octets + size > RUN_OCTETS_MAX:
            yield _run(log, piece, offsets[start:at], messages[start:at], octets)
            start, octets = at, 0
        octets += size
    yield _run(log, piece, offsets[start:], messages[start:], octets)


def _run(log: int, piece: _Piece, offsets: Sequence[int], messages: Sequence[Message], octets: int) -> Run:
    """The row begins with its first live message and ends with its last."""
    start = offsets[0]
    count = offsets[-1] - start + 1
    gaps = None if count == len(offsets) else [offset - start for offset in offsets]
    return Run(log, piece.first + start, count, gaps, messages, octets, piece.tag)

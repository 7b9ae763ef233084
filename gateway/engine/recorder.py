"""What this life of a replica writes to the log besides marks and clients that come.

Records are numbered. What has not come back when the connection is lost is written again over the next one,
when the log has been read to its end; whether it still counts the log says.

A stream whose leader is on a node that is lost loses what it was sent in that moment, over connections to
other nodes, too, and nobody is told. It keeps the order. So a record that comes back before one that was
written earlier says that this one is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.containment import contained
from gateway.engine.client_session import ClientSession, Told
from gateway.engine.records import Record
from gateway.model.outcome import ACCEPTED

UNLOGGED_MAX: Final = 100_000  # records; each waits for some client's packet, while the cluster is away


class Recorder:
    """Records on their way, and who waits for them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` has `flush` called when this wake-up ends."""
        self.life = ""
        self._wake = wake
        self._numbers = 0
        self._write: Callable[[Record], None] | None = None
        self._unlogged: dict[int, Record] = {}
        self._written: dict[int, None] = {}  # over this connection, and not back yet: in this order
        self._waiting: deque[tuple[int, Told]] = deque()
        self._unflushed: list[Told] = []
        self._dirty: dict[ClientSession, None] = {}

    def begin(self, life: str) -> None:
        """Another life: what the last one had to say is nobody's business any more."""
        self.life = life
        self._unlogged.clear()
        self._written.clear()
        self._waiting.clear()
        self._unflushed.clear()
        self._dirty.clear()

    @property
    def full(self) -> bool:
        """Nothing more should be begun that has to be recorded."""
        return len(self._unlogged) >= UNLOGGED_MAX

    def __len__(self) -> int:
        return len(self._unlogged)

    def next_number(self) -> int:
        """For a record of this life."""
        self._numbers += 1
        return self._numbers

    def up(self, write: Callable[[Record], None]) -> None:
        """The log has been read to its end, and can be written."""
        self._write = write
        for record in self._unlogged.values():
            write(record)
            self.wrote(record.number)
        self.flush()

    def down(self) -> None:
        """The connection is gone."""
        self._write = None
        self._written.clear()

    def wrote(self, number: int) -> None:
        """A record has been written: one of these, or another one of this life."""
        self._written[number] = None

    def put(self, record: Record) -> None:
        """Write a record that has the last number, now or when that is possible."""
        self._unlogged[record.number] = record
        if self._write is not None:
            self._write(record)
            self.wrote(record.number)

    def changed(self, session: ClientSession) -> None:
        """A session has something to say when the wake-up ends."""
        self._dirty[session] = None
        self._wake()

    def forget(self, session: ClientSession) -> None:
        """It has nothing more to say."""
        self._dirty.pop(session, None)

    def after_logged(self, done: Told) -> None:
        """`done` hears when all that was to be written until now has come back; at once if that is so."""
        if self._dirty:
            self._unflushed.append(done)
        elif self._unlogged:
            self._waiting.append((self._numbers, done))
        else:
            done(ACCEPTED)

    def flush(self) -> None:
        """The wake-up ends: write what sessions have to say."""
        dirty, self._dirty = self._dirty, {}
        for session in dirty:
            self.put(session.flush(self.life, self.next_number()))
        unflushed, self._unflushed = self._unflushed, []
        self._waiting.extend([(self._numbers, done) for done in unflushed])

    def came(self, number: int) -> bool:
        """A record of this life has come back. False: one that was written before it is lost."""
        if number in self._written:
            if next(iter(self._written)) != number:
                return False
            del self._written[number]
        elif next(iter(self._unlogged), number) < number:
            # Over an earlier connection, with which one that was written before it is lost: it comes again,
            # behind that one, or what a client has asked for first would have the last word.
            return True
        self._unlogged.pop(number, None)
        first = next(iter(self._unlogged), self._numbers + 1)
        while self._waiting and self._waiting[0][0] < first:
            done = self._waiting.popleft()[1]
            try:
                done(ACCEPTED)
            except Exception as error:  # of one client: the others have waited as long
                contained("connection", error)
        return True

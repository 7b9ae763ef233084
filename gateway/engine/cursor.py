"""The place up to which one replica has read a log, and the check that the log still has what is behind it.

A stream numbers its records, but the numbers have gaps: RabbitMQ begins each segment file with a record of
its own, which takes an offset and is delivered to nobody. So a small gap within what one consumer receives
means nothing. A large one means that the reader was so slow that segment files went before it came to them:
RabbitMQ goes on with the first one that is left, and says nothing.

A consumer asks for the last record that was read. If that arrives first, nothing is missing behind it. If
another one does, the log was cut beyond that place, or replaced: what was read before is no longer valid.

A consumer that asks for an offset behind the end of a replaced log receives nothing at all, and neither does
one of a log that has no leader for now. To tell these apart the consumer after one that received nothing asks
for whatever comes next: an offset that is not higher than the last one that was read belongs to another log.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from gateway.model.properties import Value, ValueType, string
from gateway.model.times import Monotonic

GAP_MAX: Final = 8  # offsets from one record to the next; each segment file costs one of them


class Placement(Enum):
    """Meaning of one record to a replica that follows a log."""

    NEW = "new"
    KNOWN = "known"  # or of a consumer whose records no longer count
    CUT = "cut"  # the log lacks records that were not read: read it from its beginning
    SAME = "same"  # the log is the one that was read: consume it from the last record on


class LogCursor:
    """The position in one log, over all consumers that follow each other."""

    def __init__(self, position: int = -1) -> None:
        """`position`: offset of the last record that was read; -1 for none."""
        self.position = position
        self.received_at = Monotonic(0.0)  # the last record of this consumer, or its begin
        self._first = False  # the next record is the first of its consumer
        self._probing = False  # the consumer was asked for whatever comes next
        self._ended = False  # records of this consumer no longer count
        self._silent = False  # the last consumer has received nothing
        self._hole = (-1, -1)  # the last large gap: found again, there never was anything in it

    def begin(self, now: Monotonic) -> Value | None:
        """Return the offset that a new consumer has to ask for; None if nothing has been read yet."""
        self._probing = self._silent and self.position >= 0
        self._silent = False
        self._first, self._ended = True, False
        self.received_at = now
        if self._probing:
            return string("next")
        return None if self.position < 0 else Value(ValueType.INT64, self.position)

    def stall(self) -> None:
        """Note that the consumer is given up because nothing arrives in time."""
        self._silent = self._first

    def receive(self, offset: int, now: Monotonic) -> Placement:
        """Return what the record at `offset` means, and move to it if it is new."""
        if self._ended:
            return Placement.KNOWN
        self.received_at = now
        first, self._first = self._first, False
        if first and self.position >= 0:
            if self._probing:
                self._ended = True
                return Placement.SAME if offset > self.position else Placement.CUT
            if offset != self.position:
                self._ended = True
                return Placement.CUT
        if offset <= self.position:
            return Placement.KNOWN
        if 0 <= self.position < offset - GAP_MAX and self._hole != (self.position, offset):
            self._hole = self.position, offset
            self._ended = True
            return Placement.CUT
        self.position = offset
        return Placement.NEW

    def begin_anew(self) -> None:
        """Forget the position: the log is read from its beginning."""
        self.position = -1

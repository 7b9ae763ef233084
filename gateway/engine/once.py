"""Which messages of QoS 2 have come already.

A replica that has lost its connection sends again what was not confirmed, and the cluster gives back to a
replica what that had not acknowledged. Both repeat some of the last messages of a life, so a window behind
the highest number is remembered. What is older than that is taken: it is better twice than not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from gateway.engine.envelope import Number

LIVES_MAX: Final = 64  # of more, the one that was heard of longest ago is forgotten
RECENT_MAX: Final = 256  # numbers of each life that a session remembers to have had, of
RECENT_LIVES_MAX: Final = 4  # lives: three replicas, and one that has just been lost


class Window:
    """The numbers of one life that have come."""

    __slots__ = ("_seen", "_size", "_top")

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen = bytearray(size)
        self._top = 0

    def is_first(self, count: int) -> bool:
        """Note the number; False: it has come before."""
        size, top, seen = self._size, self._top, self._seen
        at = count % size
        if count > top:
            if count - top >= size:
                seen[:] = bytes(size)
            elif (begin := (top + 1) % size) <= at:
                seen[begin : at + 1] = bytes(at + 1 - begin)
            else:
                seen[begin:] = bytes(size - begin)
                seen[: at + 1] = bytes(at + 1)
            self._top = count
        elif count <= top - size:
            return True
        elif seen[at]:
            return False
        seen[at] = 1
        return True


class Once:
    """The windows of all lives that this replica hears of."""

    def __init__(self, window: int) -> None:
        """`window`: numbers of each."""
        self._window = window
        self._lives: dict[bytes, Window] = {}

    def is_first(self, number: Number) -> bool:
        """Note the number; False: it has come before."""
        life, count = number
        known = self._lives.pop(life, None)
        if known is None:
            if len(self._lives) >= LIVES_MAX:
                del self._lives[next(iter(self._lives))]
            known = Window(self._window)
        self._lives[life] = known
        return known.is_first(count)


class Recent:
    """The last messages of QoS 2 that the client of a session has had, those of each life by themselves.

    Who publishes at a replica that is lost, and publishes again at another one, does so among all that others
    publish meanwhile; of the lost one's life nothing comes any more, so it is still known what was had of it.
    """

    __slots__ = ("_lives",)

    def __init__(self, numbers: Iterable[Number] = ()) -> None:
        self._lives: dict[bytes, dict[int, None]] = {}
        for number in numbers:
            self.add(number)

    def __contains__(self, number: Number) -> bool:
        return number[1] in self._lives.get(number[0], ())

    def __iter__(self) -> Iterator[Number]:
        """The life that was heard of longest ago, and its oldest number, first."""
        return ((life, count) for life, counts in self._lives.items() for count in counts)

    def add(self, number: Number) -> None:
        """The client has it."""
        life, count = number
        counts = self._lives.pop(life, None)
        if counts is None:
            if len(self._lives) >= RECENT_LIVES_MAX:
                del self._lives[next(iter(self._lives))]
            counts = {}
        self._lives[life] = counts
        if count not in counts:
            counts[count] = None
            if len(counts) > RECENT_MAX:
                del counts[next(iter(counts))]

"""Messages of shared subscriptions that ended sessions owed: on disk, until other members have them.

MQTT 5: 4.8.2.

The log of a session that ends is renamed, and read from its beginning, a piece at a time, one log after the
other. Each message goes to another member of its group: it leaves the log in the transaction in which it is
in the log of that member. When no member can have it now (all are full, or the disk is), the log waits behind
the others until the clock ticks. When the group has no member any more the message is dropped and counted. A
restart finds what is left.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway import clock
from gateway.broker.mqtt.session import SessionTally, Told, shared_filter
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.store.database import Stored
from gateway.store.index import Log
from gateway.store.store import Store

ENDED: Final = "ended"  # the kind of their logs
PIECE_MESSAGES_MAX: Final = 1_000
PIECE_OCTETS_MAX: Final = 1_048_576

Hand = Callable[[str, Message, Told], bool | None]
"""Gives a message to a member of the group with this filter. None: the group has none; False: none can."""


class EndedSessions:
    """The logs of sessions that have ended, the oldest first."""

    def __init__(self, store: Store, tally: SessionTally, hand: Hand) -> None:
        """Finds those of an earlier process. Before the store is started."""
        self._store = store
        self._tally = tally
        self._hand = hand
        self._logs: deque[Log] = deque(log for log in store.logs() if log.kind == ENDED)
        self._names = itertools.count(time.time_ns())
        self._next = 0  # position in the first log
        self._open: set[int] = set()  # positions that were handed on and are not safe there yet
        self._reading = False
        self._begun = False
        self._stuck = False  # until the clock ticks

    def __len__(self) -> int:
        return len(self._logs)

    def add(self, log: Log) -> None:
        """A session has ended, and this was its log."""
        self._store.rename(log, ENDED, f"{log.name} {next(self._names):x}")
        self._logs.append(log)
        self._go_on()

    def tick(self) -> None:
        """Go on with what had to wait. The first call says that the store has been started."""
        self._begun = True
        self._stuck = False
        self._go_on()

    def _go_on(self) -> None:
        if self._logs and self._begun and not (self._stuck or self._reading or self._open):
            self._reading = True
            self._store.read_from(
                *(self._logs[0], self._next, self._read),
                messages_max=PIECE_MESSAGES_MAX,
                octets_max=PIECE_OCTETS_MAX,
            )

    def _read(self, found: list[Stored]) -> None:
        self._reading = False
        if not found:
            self._store.drop(self._logs.popleft())
            self._next = 0
        utc = clock.utc()
        for position, message, tag in found:
            if not self._place(position, message, shared_filter(tag), utc):
                self._wait()
                break
            self._next = position + 1
        self._go_on()

    def _place(self, position: int, message: Message, topic_filter: str, utc: float) -> bool:
        """Give the message to another session, or forget it. False: it has to wait."""
        log = self._logs[0]
        if topic_filter and message.expires and message.expires <= utc:
            self._tally.expired += 1
        elif topic_filter:
            self._open.add(position)
            handed = self._hand(topic_filter, message, partial(self._told, log, position))
            if handed:
                if position in self._open:
                    self._store.settle_beside(log, (position,))
                return True
            self._open.discard(position)
            if handed is not None:
                return False
            self._tally.unshared += 1
        self._store.settle(log, (position,))
        return True

    def _told(self, log: Log, position: int, outcome: Outcome) -> None:
        self._open.discard(position)
        if outcome is ACCEPTED:
            self._store.settle(log, (position,))
        elif not self._stuck:
            self._wait()
        self._go_on()

    def _wait(self) -> None:
        """The others have their turn, when the clock ticks; this one is read again from its beginning."""
        self._stuck = True
        self._logs.rotate(-1)
        self._next = 0

"""Messages of shared subscriptions that ended sessions owed, until other members have them (5: 4.8.2).

They stay on disk. The log of an ending session is renamed, and read from its beginning, a piece at a time,
one log after the other. Each message is passed to another member of its group: it leaves the log in the
transaction that adds it to the log of that member. If no member can have it now (all are full, or the disk
is), the log waits behind the others until the next tick. If the group has no members any more, the message is
dropped and counted; so is one that may have been sent to its client at QoS 2, because no other client may get
it ([MQTT-4.8.2-5]). Which ones these are is part of the log's name. A restart continues with what is left.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway import clock
from gateway.broker.mqtt.session import LeftLog, SessionTally, Told, qos_of, shared_filter
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.store.database import Stored
from gateway.store.index import Log
from gateway.store.store import Store

ENDED: Final = "ended"  # kind of their logs
SENT: Final = re.compile(r" [0-9a-f]+<([0-9]+)\Z")  # end of a log's name: a unique number, and what was sent
PIECE_MESSAGES_MAX: Final = 1_000
PIECE_BYTES_MAX: Final = 1_048_576

Hand = Callable[[str, Message, Told], bool | None]
"""Function that passes a message to a member of the group with this filter.

Returns None if the group has no members, False if none of them can have it.
"""


class EndedSessions:
    """Logs of sessions that have ended, the oldest first."""

    def __init__(self, store: Store, tally: SessionTally, hand: Hand) -> None:
        """Find the logs of an earlier process, before the store starts."""
        self._store = store
        self._tally = tally
        self._hand = hand
        self._logs: deque[Log] = deque(log for log in store.logs() if log.kind == ENDED)
        self._names = itertools.count(clock.unix_time_ns())
        self._next = 0  # position in the first log
        self._open: set[int] = set()  # positions that were passed on and are not safe there yet
        self._reading = False
        self._begun = False
        self._stuck = False  # until the next tick

    def __len__(self) -> int:
        return len(self._logs)

    def add(self, left_log: LeftLog) -> None:
        """Add the log of a session that has ended."""
        log = left_log.log
        self._store.rename(log, ENDED, f"{log.name} {next(self._names):x}<{left_log.sent}")
        self._logs.append(log)
        self._go_on()

    def tick(self) -> None:
        """Continue with what had to wait. The first call also says that the store has started."""
        self._begun = True
        self._stuck = False
        self._go_on()

    def _go_on(self) -> None:
        if self._logs and self._begun and not (self._stuck or self._reading or self._open):
            log = self._logs[0]
            self._reading = True
            self._store.read_from(
                *(log, self._next, partial(self._read, log)),
                messages_max=PIECE_MESSAGES_MAX,
                bytes_max=PIECE_BYTES_MAX,
            )

    def _read(self, log: Log, found: list[Stored]) -> None:
        """Pass on what was read of `log`; nothing else is read until each message is passed on or waits."""
        try:
            if found:
                self._pass_on(log, found)
            else:
                self._logs.remove(log)
                self._store.drop(log)
                self._next = 0
        finally:
            self._reading = False
        self._go_on()

    def _pass_on(self, log: Log, found: list[Stored]) -> None:
        """Pass on these messages of `log`, until one must wait."""
        utc = clock.utc()
        sent = _sent(log)
        for position, message, tag in found:
            is_sent = position < sent and qos_of(message, tag) == 2
            self._next = position + 1
            if not self._place(log, position, message, shared_filter(tag), is_sent, utc):
                self._wait(log)
            if self._stuck:
                return

    def _place(
        self, log: Log, position: int, message: Message, topic_filter: str, is_sent: bool, utc: float
    ) -> bool:
        """Pass the message of `log` to another session, or drop it. Return False if it must wait.

        `is_sent` is True if no other session may have it.
        """
        if topic_filter and message.expires and message.expires <= utc:
            self._tally.expired += 1
        elif topic_filter and is_sent:
            self._tally.unshared += 1
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
            self._wait(log)
        self._go_on()

    def _wait(self, log: Log) -> None:
        """Put `log` behind the others until the next tick; it is read again from its beginning."""
        self._stuck = True
        self._logs.remove(log)
        self._logs.append(log)
        self._next = 0


def _sent(log: Log) -> int:
    """Return the position below which messages of an ended session may have been sent; 0 if it is unknown."""
    found = SENT.search(log.name)
    return 0 if found is None else int(found[1])

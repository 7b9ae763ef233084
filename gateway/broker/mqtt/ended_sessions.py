"""Messages of shared subscriptions in the logs of ended sessions, until other members have them (5: 4.8.2).

They stay on disk. The log of an ending session is renamed, and read from its beginning, a piece at a time,
one log after the other. Each message is passed to another member of its group: it leaves the log in the
transaction that adds it to the log of that member. If no member can have it now (all are full, or the disk
is), the log waits with those of the same group: one of them is tried at a tick, and the next one whenever the
group accepts a message. If the group has no members any more, the message is dropped and counted; so is one
that may have been sent to its client at QoS 2, because no other client may get it ([MQTT-4.8.2-5]).

The logs count toward the per-user limits of the users whose sessions ended. If there are too many, the oldest
log of a user with more than an equal part is deleted. The client, the user and what may have been sent are in
the name of a log, so that a restart continues with what is left.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway import clock
from gateway.broker.mqtt.session import EndedSessionLog, OutcomeCallback, SessionTally, qos_of, shared_filter
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.shares import UserEntries, UserShares
from gateway.store.database import Stored
from gateway.store.index import Log
from gateway.store.store import Store

ENDED: Final = "ended"  # kind of their logs
# End of a log's name as earlier versions wrote it, without the user: a unique number, and what was sent.
SENT: Final = re.compile(r" [0-9a-f]+<([0-9]+)\Z")
TRIED_MAX: Final = 100  # shared subscriptions that are retried at one tick, with a read for each
PIECE_MESSAGES_MAX: Final = 1_000
PIECE_BYTES_MAX: Final = 1_048_576

PassToMember = Callable[[str, Message, OutcomeCallback], bool | None]
"""Function that passes a message to a member of the shared subscription with this filter.

Returns True if a member has it, False if no member can accept it now, and None if there are no members.
"""


class EndedSessions:
    """Logs of ended sessions whose messages are being passed on, the oldest first."""

    def __init__(self, store: Store, tally: SessionTally, hand: PassToMember, shares: UserShares) -> None:
        """Find the logs of an earlier process, before the store starts.

        Dropped messages are counted in `tally`. `hand` passes a message to a member of a shared subscription.
        `shares` limits the bytes and number of the logs, in total and for each user.
        """
        self._store = store
        self.shares = shares
        self._entries: UserEntries[Log] = UserEntries(shares)
        for log in store.logs():
            if log.kind == ENDED:
                self._entries.add(log, _parse_log_name(log)[1], store.extent(log).byte_count)
        self._tally = tally
        self._pass_to_member = hand
        self._logs: deque[Log] = deque(self._entries)  # to be read
        self._waiting: dict[str, deque[Log]] = {}  # by filter of the group that could not have a message
        self._evicted: list[Log] = []  # to be deleted when nothing of them is on its way
        self._names = itertools.count(clock.unix_time_ns())
        self._next = 0  # position in the first log
        self._open: set[int] = set()  # positions that were passed on and are not safe there yet
        self._reading = False
        self._begun = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, left_log: EndedSessionLog, user: str) -> None:
        """Add the log of a session of `user` that has ended. Delete old logs if a limit is exceeded."""
        log = left_log.log
        self._store.rename(log, ENDED, json.dumps([log.name, next(self._names), left_log.sent, user]))
        self._logs.append(log)
        self._entries.add(log, user, left_log.byte_count)
        while (evicted := self._entries.entry_to_evict(user)) is not None:
            self._entries.discard(evicted)
            self._evicted.append(evicted)
        self._read_next()

    def tick(self) -> None:
        """Read logs again whose messages no member of their shared subscription could accept.

        One log is read for each shared subscription, and for at most TRIED_MAX of them at a time. Nothing is
        read before the first call, which means that the store has started.
        """
        self._begun = True
        for topic_filter in list(itertools.islice(self._waiting, TRIED_MAX)):
            self._try_again(topic_filter)
        self._read_next()

    def _try_again(self, topic_filter: str) -> None:
        """Schedule one log that waits for the shared subscription with this filter to be read again.

        If other logs wait for it, too, the filter becomes the last one to be retried.
        """
        waiting = self._waiting.pop(topic_filter, None)
        while waiting and waiting[0].dropped:
            waiting.popleft()
        if waiting:
            self._logs.append(waiting.popleft())
        if waiting:
            self._waiting[topic_filter] = waiting

    def _read_next(self) -> None:
        if not self._begun or self._reading or self._open:
            return
        for log in self._evicted:
            self._store.drop(log)
        self._evicted.clear()
        while self._logs and self._logs[0].dropped:
            self._logs.popleft()
            self._next = 0
        if self._logs:
            log = self._logs[0]
            self._reading = True
            self._store.read_from(
                *(log, self._next, partial(self._read, log)),
                messages_max=PIECE_MESSAGES_MAX,
                bytes_max=PIECE_BYTES_MAX,
            )

    def _read(self, log: Log, found: list[Stored]) -> None:
        """Pass on the messages `found`, which were read from `log`. If `found` is empty, delete the log.

        The next messages are read once other sessions have stored the messages `found`.
        """
        try:
            if found:
                self._pass_on(log, found)
            else:
                self._entries.discard(log)
                self._store.drop(log)
        finally:
            self._reading = False
        self._read_next()

    def _pass_on(self, log: Log, found: list[Stored]) -> None:
        """Pass the messages of `log` to other sessions, until one cannot be passed on now."""
        utc = clock.utc()
        sent, _ = _parse_log_name(log)
        for position, message, tag in found:
            is_sent = position < sent and qos_of(message, tag) == 2
            self._next = position + 1
            topic_filter = shared_filter(tag)
            if not self._pass_or_drop(log, position, message, topic_filter, is_sent, utc):
                self._wait(log, topic_filter)
            if not self._logs or self._logs[0] is not log:
                return

    def _pass_or_drop(
        self, log: Log, position: int, message: Message, topic_filter: str, is_sent: bool, utc: float
    ) -> bool:
        """Pass a message of `log` to another session, or drop it. Return False if the message must wait.

        `is_sent` is True if it may have been sent at QoS 2, so that no other session may get it. `utc` is the
        present time in POSIX seconds; an expired message is dropped.
        """
        if topic_filter and message.expires and message.expires <= utc:
            self._tally.expired += 1
        elif topic_filter and is_sent:
            self._tally.unshared += 1
        elif topic_filter:
            self._open.add(position)
            handed = self._pass_to_member(
                topic_filter, message, partial(self._settle_message, log, position, topic_filter)
            )
            if handed is not False:
                self._try_again(topic_filter)
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

    def _settle_message(self, log: Log, position: int, topic_filter: str, outcome: Outcome) -> None:
        self._open.discard(position)
        if outcome is ACCEPTED:
            self._store.settle(log, (position,))
        else:
            self._wait(log, topic_filter)
        self._read_next()

    def _wait(self, log: Log, topic_filter: str) -> None:
        """Stop reading `log` until the shared subscription with this filter can accept messages.

        The log will be read again from its beginning. Nothing is done if another log is being read.
        """
        if self._logs and self._logs[0] is log:
            self._logs.popleft()
            self._waiting.setdefault(topic_filter, deque()).append(log)
            self._next = 0


def _parse_log_name(log: Log) -> tuple[int, str]:
    """Return (position, user) from the name of an ended session's log.

    Messages at lower positions may have been sent to the client. The values are 0 and "" if they are unknown.
    """
    if log.name.endswith("]"):
        _, _, sent, user = json.loads(log.name)
        return sent, user
    found = SENT.search(log.name)
    return 0 if found is None else int(found[1]), ""

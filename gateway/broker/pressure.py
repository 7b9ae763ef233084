"""Back-pressure: full queues and a full store pause their sources, and resume them when they have space.

A message that the gateway's own disk refuses is held (`HeldReceipts`) by a source that cannot inform its
sender: a link, or a client with an older version of MQTT. If such messages were requeued at a remote broker,
or retried later, they would follow messages that were accepted meanwhile. Messages that arrive after them are
therefore not sent either: all of them wait, as many as the sender sends without an acknowledgement, and are
sent in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from gateway.model.batch import SubBatch
from gateway.model.message import Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserShares

FULL = Outcome(Verdict.RELEASED, Reason.QUOTA, "the queue is full")
PACE_SECS: Final = 0.01  # between two measurements of a consumer's rate
SLOW_SECS: Final = 0.05  # a consumer that takes longer for the minimum that may wait is slow
DEEP_SECS: Final = 1.0  # what takes longer than that to consume is a store, not a delay
FLOOR: Final = 65_536  # bytes that a restrained holder may hold in any case
R = TypeVar("R")
MayHold = Callable[[str | None], bool]
"""Function that returns True if full queues of this user may pause publishers or refuse messages.

None stands for the operator, who declared the queue or session in the configuration.
"""


def permit_always(user: str | None) -> bool:
    """Return True for every user, because no roles are configured."""
    return True


class FullQueues:
    """Settings and counters for full queues, shared by all queues of a gateway.

    `may_hold` gets a user, and returns True if this user's queues may pause publishers. `user_shares` returns
    a new object with the limits of each user's messages that wait to be routed: delayed messages and dead
    letters.
    """

    __slots__ = ("dropped", "may_hold", "refused", "user_shares")

    def __init__(
        self,
        may_hold: MayHold = permit_always,
        user_shares: Callable[[], UserShares] | None = None,
    ) -> None:
        self.may_hold = may_hold
        self.user_shares = user_shares or partial(UserShares, "waiting messages")
        self.refused = 0  # messages whose publisher was informed that the queue is full
        self.dropped = 0  # copies dropped by a queue that may not pause its publishers


def reduced_limit(allowed: int, byte_count: int) -> int:
    """Return a lower limit in bytes for a queue or session whose owner occupies too much memory.

    `allowed` is the usual limit, and `byte_count` the size of the messages. The result is 5/8 of
    `byte_count`, at least FLOOR and at most `allowed`, so that a large queue counts as full. Publishers that
    cannot be paused are refused at twice the result, which is 125 % of `byte_count`.
    """
    return min(allowed, max(byte_count * 5 // 8, FLOOR))


def hold_sources(sub_batch: SubBatch) -> list[Callable[[], None]]:
    """Pause reading from the connections that published the messages of a sub-batch.

    Return functions, each of which resumes some of them.
    """
    return sub_batch.batch.source.hold({message.sender for message in sub_batch.messages})


class Pressure:
    """Connections that a full queue has paused, with the functions that resume them."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def hold_sources(self, sub_batch: SubBatch) -> None:
        """Pause the connections that published a sub-batch's messages, until `resume_sources` is called."""
        self._waiting += hold_sources(sub_batch)

    def resume_sources(self) -> None:
        """Resume the paused connections, because the queue has space."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for release in waiting:
                release()

    def __bool__(self) -> bool:
        return bool(self._waiting)


class PressureByUser(Pressure):
    """Connections that a full queue has paused, which are resumed for one user or for all."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        super().__init__()
        self._users: dict[str, list[Callable[[], None]]] = {}

    def hold_sources(self, sub_batch: SubBatch) -> None:
        """Pause the connections that published a sub-batch's messages, until their user is resumed."""
        by_user: dict[str, set[Sender]] = {}
        for message in sub_batch.messages:
            by_user.setdefault(message.sender.user, set()).add(message.sender)
        for user, senders in by_user.items():
            self._users.setdefault(user, []).extend(sub_batch.batch.source.hold(senders))

    def is_paused(self, user: str) -> bool:
        """Return True if connections of the user are paused here."""
        return user in self._users

    def resume_user(self, user: str) -> None:
        """Resume the paused connections of one user."""
        for release in self._users.pop(user, ()):
            release()

    def resume_sources(self) -> None:
        """Resume all paused connections, because the queue has space."""
        for user in list(self._users):
            self.resume_user(user)

    def __bool__(self) -> bool:
        return bool(self._users)


class ConsumerRate:
    """Measured rate of one consumer, by which its publishers are paused when messages wait too long.

    Publishers are paused while the consumer would need more than `delay_secs` for the waiting messages.
    Otherwise publishers that are faster than the consumer would fill the queue, and each message would wait
    for all messages before it. Publishers are not paused for this reason if the consumer is slow, or would
    need more than DEEP_SECS (after a disconnection, for example): the queue then has to fill.
    """

    __slots__ = ("_at", "_before", "_delay_secs", "_least", "_per_sec", "consumed_count", "on")

    def __init__(self, delay_secs: float, least: int, now: float) -> None:
        """Start the measurement at `now`, in seconds of any clock that only goes forward.

        `delay_secs` is the longest delay of a message in seconds. Up to `least` messages may always wait.
        """
        self.on = False  # publishers are paused
        self.consumed_count = 0  # messages; counted by the code that hands them out
        self._delay_secs = delay_secs
        self._least = least
        self._per_sec = 0.0
        self._before = 0
        self._at = now

    def is_behind(self, waiting: int, now: float) -> bool:
        """Return True if publishers should be paused, because the consumer is behind.

        `waiting` is the number of messages in the queue; `now` is a time of the clock that `__init__` was
        given.
        """
        elapsed = now - self._at
        if elapsed >= PACE_SECS:
            per_sec = (self.consumed_count - self._before) / elapsed
            self._per_sec = (self._per_sec + per_sec) / 2 if self._per_sec else per_sec
            self._before = self.consumed_count
            self._at = now
        most = max(self._per_sec * self._delay_secs, self._least)
        if self._least > self._per_sec * SLOW_SECS or waiting > self._per_sec * DEEP_SECS:
            return False
        return waiting > (most / 2 if self.on else most)


class HeldReceipts(Generic[R]):
    """Receipts of messages of one source that wait until the disk works.

    A receipt is what the source needs to acknowledge a message. While `on` is True, the source must add the
    receipt of each further message with `append`.
    """

    __slots__ = ("_behind", "_healthy", "_refused", "on")

    def __init__(self, healthy: Callable[[], bool]) -> None:
        """Create an empty queue of receipts; `healthy` returns True if the disk accepts messages."""
        self.on = False
        self._healthy = healthy
        self._refused: list[R] = []
        self._behind: list[R] = []

    def add_refused(self, receipt: R) -> None:
        """Add the receipt of a message that the disk has refused.

        Must be called in the order in which the messages were published.
        """
        self._refused.append(receipt)
        self.on = True

    def append(self, receipt: R) -> None:
        """Add the receipt of a message that has arrived while earlier messages wait for the disk."""
        self._behind.append(receipt)

    def take_due(self) -> list[R]:
        """Remove and return, in order, the receipts of all messages that must be published again.

        Returns [] while the disk fails.
        """
        return self.take_all() if self.on and self._healthy() else []

    def take_all(self) -> list[R]:
        """Remove and return all receipts, in order of arrival, for messages that are not published again.

        The source gives these messages up, or their senders resend them.
        """
        receipts = self._refused + self._behind
        self.on = False
        self._refused, self._behind = [], []
        return receipts

"""Shares of users in an outbox on the cluster, where no replica sees the messages of other replicas.

A replica knows how many messages are in the queue, from a count every few seconds, and which messages its own
clients have added. It forgets the oldest of these when the queue has fewer messages than were added, because
they have been consumed. As long as the queue has less than one user may fill (`limits.user_share`),
everything is accepted. The rest of the limit is a reserve for users with few messages: at each replica a user
gets at most a quarter of it, and nothing if the user has added more than that. So a user who has filled the
outbox is refused at the replicas that it used, and at three others it leaves a part of the reserve.

The sizes of messages from other replicas are unknown; they are assumed to be as large as those added here.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from gateway.model.shares import NO_LIMIT, UserShares

PERIODS_MAX: Final = 64  # beyond which the two oldest are joined
PARTS: Final = 4  # of the reserve, one of which a user gets at a replica


class Period:
    """Messages that were added to the outbox between two counts: number and bytes of each user."""

    __slots__ = ("byte_count", "count", "users")

    def __init__(self) -> None:
        self.count = self.byte_count = 0
        self.users: dict[str, tuple[int, int]] = {}

    def add(self, user: str, count: int, byte_count: int) -> None:
        """Add `count` messages of a user that have `byte_count` bytes together."""
        before = self.users.get(user, (0, 0))
        self.users[user] = before[0] + count, before[1] + byte_count
        self.count += count
        self.byte_count += byte_count


class SharedOutboxShares:
    """Limits of each user's messages in one outbox, and their number as far as this replica knows it.

    `quota` has the limits of the outbox, and counts the messages that this replica's clients have added.
    `refusals` counts refused messages. `removes` is True if the cluster removes the oldest message of a full
    outbox.
    """

    def __init__(self, quota: UserShares, refusals: UserShares, *, removes: bool) -> None:
        self._quota = quota
        self._refusals = refusals
        self._removes = removes
        self._periods: deque[Period] = deque([Period()])
        self._waiting = 0  # messages in the queue at the last count
        self._added_count = 0  # messages that this replica has added since

    def reconcile(self, waiting: int) -> None:
        """Record that the outbox has `waiting` messages now. Subtract consumed ones from users' counts."""
        self._waiting, self._added_count = waiting, 0
        periods, quota = self._periods, self._quota
        while periods and quota.count - periods[0].count >= waiting:
            period = periods.popleft()
            for user, (count, byte_count) in period.users.items():
                quota.remove(user, byte_count, count)
        if len(periods) >= PERIODS_MAX:
            first = periods.popleft()
            for user, (count, byte_count) in first.users.items():
                periods[0].add(user, count, byte_count)
        if not periods or periods[-1].count:
            periods.append(Period())

    def admit(self, user: str, byte_count: int) -> bool:
        """Count a message of `byte_count` bytes that a user adds to the outbox. Return True.

        If the user's part of the outbox's limit is used up, count the message as refused and return False.
        """
        if limit := self._limit_of(user, byte_count):
            self._refusals.refuse(user, limit, 1)
            return False
        self._periods[-1].add(user, 1, byte_count)
        self._quota.add(user, byte_count, 1)
        self._added_count += 1
        return True

    def _limit_of(self, user: str, byte_count: int) -> str:
        """Return the option that forbids the user another message of `byte_count` bytes, or "" if none does.

        The result has the name of the option and its value.
        """
        quota = self._quota
        count = self._waiting + self._added_count
        total = count * quota.total // max(quota.count, 1)
        if count < quota.user_count_max and total + byte_count <= quota.user_bytes_max:
            return ""
        mine, mine_bytes = quota.count_of(user), quota.of(user)
        if not mine or (self._removes and mine == quota.count and mine >= count):
            return ""  # there are no messages of others, or none of the user
        part = max((quota.count_max - quota.user_count_max) // PARTS, 1)
        part_bytes = (quota.bytes_max - quota.user_bytes_max) // PARTS
        if mine < part and mine_bytes + byte_count <= part_bytes:
            return ""
        return quota.exceeded_user_limit(user, NO_LIMIT)

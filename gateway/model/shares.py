"""Limits on a resource that all users share: how many items each user has, and how many bytes these occupy.

`UserShares` counts items and reports if one more would exceed a limit: the total or that of its user.
`UserEntries` are entries that newer ones replace, such as dead letters: when there are too many, the oldest
entry of a user who has more than an equal part is removed, so that no user displaces the entries of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

from gateway.model.message import Message

NO_LIMIT: Final = 1 << 62
OPERATOR: Final = "\0"  # key for definitions from the configuration; not a valid user name
ROUTES: Final = "\0routes"  # key for objects that are created for routes; not a valid user name

K = TypeVar("K")


def always() -> bool:
    """Return True. Default of `applies` in UserShares: the limit for one user is always in force."""
    return True


class UserShares:
    """Usage of one resource, such as retained messages: number and bytes of the items, in total and by user.

    `refused` is the number of items that did not fit, `evicted_count` the number of items that were removed
    to make space for others. For the log, `last_user` is the user of the last refused or removed item, and
    `last_limit` the option that the last refused item would have exceeded.
    """

    def __init__(
        self,
        resource: str,
        *,
        count_max: int = NO_LIMIT,
        bytes_max: int = NO_LIMIT,
        user_share: float = 1.0,
        count_option: str = "",
        bytes_option: str = "",
        share_option: str = "limits.user_share",
        applies: Callable[[], bool] = always,
        refusals: UserShares | None = None,
    ) -> None:
        """Set the limits in number and bytes, and the names of the configuration options that set them.

        One user may occupy at most the fraction `user_share` of both limits while `applies` returns True.
        `refusals` also counts the items that are refused here, unless it is None.
        """
        self._refusals = refusals
        self.resource = resource
        self._user_share = user_share
        self.set_limits(count_max, bytes_max)
        self.count = 0
        self.total = 0
        self.refused = 0
        self.evicted_count = 0
        self.last_user = ""
        self.last_limit = ""
        self._count_option = count_option
        self._bytes_option = bytes_option
        self._share_option = share_option
        self._applies = applies
        self._counts: dict[str, int] = {}
        self._byte_count: dict[str, int] = {}

    def of(self, user: str | None) -> int:
        """Return the total bytes of the user's items; None stands for items from the configuration file."""
        return self._byte_count.get(OPERATOR if user is None else user, 0)

    def count_of(self, user: str | None) -> int:
        """Return the number of the user's items; None stands for items from the configuration file."""
        return self._counts.get(OPERATOR if user is None else user, 0)

    def refuse_if_full(self, user: str | None, byte_count: int, count: int = 1) -> str:
        """Return "" if `count` more items of `user`, of `byte_count` bytes in total, fit.

        Otherwise return the option that they would exceed, as "NAME (VALUE)", and count one refusal.
        """
        limit = self.exceeded_limit(user, byte_count, count)
        if limit:
            self.refuse(user or "", limit, 1)
        return limit

    def exceeded_limit(self, user: str | None, byte_count: int, count: int = 1) -> str:
        """Return "" if `count` more items of `user`, of `byte_count` bytes in total, fit.

        Otherwise return the option that they would exceed, as "NAME (VALUE)". In contrast to
        `refuse_if_full`, no refusal is counted.
        """
        if limit := self.exceeded_total_limit(byte_count, count):
            return limit
        return self.exceeded_user_limit(user, byte_count, count)

    def exceeded_user_limit(self, user: str | None, byte_count: int, count: int = 1) -> str:
        """Return "" if `count` more items of `byte_count` bytes in total fit the limit for one user.

        Otherwise return the option that sets this limit, as "NAME (VALUE)". The items are those of `user`.
        The limit for all users together is not checked.
        """
        if not self._applies():
            return ""
        if self.of(user) + byte_count > self.user_bytes_max:
            return f"{self._share_option} ({self.user_bytes_max} bytes of {self.resource})"
        if self.count_of(user) + count > self.user_count_max:
            return f"{self._share_option} ({self.user_count_max} {self.resource})"
        return ""

    def exceeded_total_limit(self, byte_count: int, count: int = 1) -> str:
        """Return "" if `count` more items of `byte_count` bytes in total fit the limit for all users.

        Otherwise return the option that they would exceed, as "NAME (VALUE)".
        """
        if self.total + byte_count > self.bytes_max:
            return f"{self._bytes_option} ({self.bytes_max})"
        return f"{self._count_option} ({self.count_max})" if self.count + count > self.count_max else ""

    def bytes_by_user(self) -> dict[str, int]:
        """Return the total bytes of each user's items, as a new dictionary."""
        return dict(self._byte_count)

    def room_of(self, user: str) -> tuple[int, int, int, int]:
        """Return the remaining capacity: items and bytes for all users, then items and bytes for `user`.

        A value is negative if a limit is exceeded. Both values for the user are NO_LIMIT while the limit for
        one user is not in force.
        """
        count, byte_count = self.count_max - self.count, self.bytes_max - self.total
        if not self._applies():
            return count, byte_count, NO_LIMIT, NO_LIMIT
        own = self.user_count_max - self.count_of(user), self.user_bytes_max - self.of(user)
        return count, byte_count, *own

    def set_limits(self, count_max: int, bytes_max: int) -> None:
        """Set the limits for all users together. The limits for one user become a fraction of them."""
        self.count_max, self.bytes_max = count_max, bytes_max
        self.user_count_max = count_max if count_max == NO_LIMIT else _part(count_max, self._user_share)
        self.user_bytes_max = bytes_max if bytes_max == NO_LIMIT else int(bytes_max * self._user_share)

    def refuse(self, user: str, limit: str, count: int) -> None:
        """Record that `count` items of `user` were refused because of `limit`, as "NAME (VALUE)"."""
        self.refused += count
        self.last_user = user
        self.last_limit = limit
        if self._refusals is not None:
            self._refusals.refuse(user, limit, count)

    def refuse_over_share(self, messages: Sequence[Message], *, spares_lone: bool = False) -> list[int]:
        """Return the positions of those messages that do not fit the limit for the user who sent them.

        These messages are counted as refused. After the first message of a user that does not fit, all later
        messages of that user are refused, too. If `spares_lone` is True, a user who owns all present items is
        not limited.
        """
        if self._user_share >= 1.0 or not self._applies():
            return []
        if (
            self.count + len(messages) <= self.user_count_max
            and self.total + sum([message.byte_count for message in messages]) <= self.user_bytes_max
        ):
            return []
        positions: list[int] = []
        accepted: dict[str, tuple[int, int]] = {}
        limits: dict[str, str] = {}  # of users who are refused
        for at, message in enumerate(messages):
            user = message.sender.user
            count, byte_count = accepted.get(user, (0, 0))
            count, byte_count = count + 1, byte_count + message.byte_count
            limit = limits.get(user) or self.exceeded_user_limit(user, byte_count, count)
            if limit and not (spares_lone and self.count_of(user) == self.count):
                positions.append(at)
                limits[user] = limit
                self.refuse(user, limit, 1)
            else:
                accepted[user] = count, byte_count
        return positions

    def has_room_for(self, messages: Iterable[Message], byte_count: int = 0, count: int = 0) -> bool:
        """Return True if the messages fit the limit for all users, and the limits for their senders.

        They must fit in addition to the present items, and to `count` further items of `byte_count` bytes in
        total.
        """
        weights = weights_by_user(messages)
        all_count, all_bytes = self.count + count, self.total + byte_count
        for user, (more, more_bytes) in weights.items():
            all_count, all_bytes = all_count + more, all_bytes + more_bytes
            if self.exceeded_limit(user, byte_count + more_bytes, count + more):
                return False
        return all_count <= self.count_max and all_bytes <= self.bytes_max

    def add(self, user: str | None, byte_count: int, count: int = 1) -> None:
        """Add `count` items of `user`, of `byte_count` bytes in total, to the usage. No limit is checked."""
        name = OPERATOR if user is None else user
        self.count += count
        self.total += byte_count
        self._counts[name] = self._counts.get(name, 0) + count
        self._byte_count[name] = self._byte_count.get(name, 0) + byte_count

    def remove(self, user: str | None, byte_count: int, count: int = 1) -> None:
        """Subtract `count` items of `user`, of `byte_count` bytes in total, which `add` has counted."""
        name = OPERATOR if user is None else user
        self.count -= count
        self.total -= byte_count
        self._counts[name] -= count
        self._byte_count[name] -= byte_count
        if not self._counts[name] and not self._byte_count[name]:
            del self._counts[name], self._byte_count[name]

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Add messages to the usage of the users who sent them. No limit is checked."""
        for user, (count, byte_count) in weights_by_user(messages).items():
            self.add(user, byte_count, count)

    def remove_messages(self, messages: Iterable[Message]) -> None:
        """Subtract messages from the usage of the users who sent them."""
        for user, (count, byte_count) in weights_by_user(messages).items():
            self.remove(user, byte_count, count)

    def replace(self, weights: Mapping[str, tuple[int, int]]) -> None:
        """Replace the usage of all users by `weights`: the number of items and their bytes, by user."""
        self._counts = {user: count for user, (count, _) in weights.items()}
        self._byte_count = {user: byte_count for user, (_, byte_count) in weights.items()}
        self.count = sum(self._counts.values())
        self.total = sum(self._byte_count.values())

    @property
    def is_exceeded(self) -> bool:
        """True if the number or the bytes of all items exceed the limits."""
        return self.count > self.count_max or self.total > self.bytes_max

    def user_to_evict(self, user: str) -> str:
        """Return the user whose oldest item has to be removed, because the limits are exceeded.

        The result is `user`, who has just added an item, if this user has several items and more than an
        equal part of the limit; otherwise it is the user with the highest usage.
        """
        by_bytes = self.total > self.bytes_max
        usage = self._byte_count if by_bytes else self._counts
        most = self.bytes_max if by_bytes else self.count_max
        if self.count_of(user) > 1 and usage[user] * len(usage) > most:
            return user
        return max(usage, key=usage.__getitem__)


class Holding:
    """Bytes that one object, such as a connection, occupies and that count toward its user's limit.

    `end` subtracts all of them.
    """

    __slots__ = ("_byte_count", "_shares", "_user")

    def __init__(self, shares: UserShares, user: str) -> None:
        self._shares = shares
        self._user = user
        self._byte_count = 0

    def take(self, byte_count: int) -> str:
        """Count `byte_count` more bytes and return "", or return the exceeded option as "NAME (VALUE)".

        In the second case nothing is counted.
        """
        if limit := self._shares.refuse_if_full(self._user, byte_count):
            return limit
        self._byte_count += byte_count
        self._shares.add(self._user, byte_count, 0)
        return ""

    def give(self, byte_count: int) -> None:
        """Subtract bytes that `take` has counted. After `end`, this has no effect."""
        if byte_count and self._byte_count:
            self._byte_count -= byte_count
            self._shares.remove(self._user, byte_count, 0)

    def end(self) -> None:
        """Subtract all bytes of this object from the usage of its user."""
        byte_count, self._byte_count = self._byte_count, 0
        if byte_count:
            self._shares.remove(self._user, byte_count, 0)


class UserEntries(Generic[K]):
    """Keys of stored items, such as the topics of retained messages, with their users, the oldest first.

    `shares` counts the items and their bytes by user.
    """

    def __init__(self, shares: UserShares) -> None:
        self.shares = shares
        self._entries: dict[K, tuple[str, int]] = {}  # user and bytes
        self._of_users: dict[str, dict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._entries)

    def add(self, key: K, user: str, byte_count: int) -> None:
        """Add the newest item: `key` identifies it, `user` owns it, and `byte_count` is its size in bytes."""
        self._entries[key] = (user, byte_count)
        self._of_users.setdefault(user, {})[key] = None
        self.shares.add(user, byte_count)

    def discard(self, key: K) -> bool:
        """Remove the item with this key. Return False if there is none."""
        found = self._entries.pop(key, None)
        if found is None:
            return False
        user, byte_count = found
        keys = self._of_users[user]
        del keys[key]
        if not keys:
            del self._of_users[user]
        self.shares.remove(user, byte_count)
        return True

    def clear(self) -> None:
        """Remove all items."""
        for key in list(self._entries):
            self.discard(key)

    def entry_to_evict(self, user: str) -> K | None:
        """Return the key of the item to remove because `user` has added one, or None if all items fit.

        The item is counted in `shares.evicted_count` at once. The caller must remove it with `discard`.
        """
        shares = self.shares
        if not self._entries or not shares.is_exceeded:
            return None
        crowder = shares.user_to_evict(user)
        shares.evicted_count += 1
        shares.last_user = crowder
        return next(iter(self._of_users[crowder]))


def weights_by_user(messages: Iterable[Message]) -> dict[str, tuple[int, int]]:
    """Return the number of messages of each user who sent some, and their total size in bytes, by user."""
    weights: dict[str, tuple[int, int]] = {}
    for message in messages:
        user = message.sender.user
        count, byte_count = weights.get(user, (0, 0))
        weights[user] = (count + 1, byte_count + message.byte_count)
    return weights


def _part(total: int, share: float) -> int:
    """Return the fraction `share` of the limit `total`, rounded down.

    The result is at least 1 (or 0 if `total` is 0), and less than `total` if `share` is below 1 and `total`
    above 1.
    """
    return max(min(int(total * share), total - (share < 1.0)), min(total, 1))

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
    """Return True; the default for `applies`, where the per-user limit is always in force."""
    return True


class UserShares:
    """Usage of one resource, such as retained messages: number and bytes of the items, in total and by user.

    `refused` counts the items that did not fit, `evicted_count` the items that were evicted for others. For
    the log, `last_user` is the user of the latest of these items, and `last_limit` the option that the latest
    refused item would have exceeded.
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
        """Set the limits in number and bytes, and the names of the options that set them.

        One user may occupy at most the fraction `user_share` of both limits while `applies` returns True.
        `refusals`, if given, also counts the items that are refused here.
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
        """Return the total bytes of a user's items; None stands for the items from the configuration file."""
        return self._byte_count.get(OPERATOR if user is None else user, 0)

    def count_of(self, user: str | None) -> int:
        """Return the number of items of a user; None stands for those from the configuration file."""
        return self._counts.get(OPERATOR if user is None else user, 0)

    def full_with(self, user: str | None, byte_count: int, count: int = 1) -> str:
        """Return the exceeded option as "NAME (VALUE)" if more items do not fit, and count one refusal.

        Return "" if `count` more items of `byte_count` bytes in total fit.
        """
        limit = self.limit_of(user, byte_count, count)
        if limit:
            self.refuse(user or "", limit, 1)
        return limit

    def limit_of(self, user: str | None, byte_count: int, count: int = 1) -> str:
        """Return the option that more items would exceed, as "NAME (VALUE)", without counting a refusal.

        Return "" if `count` more items of `byte_count` bytes in total fit.
        """
        if limit := self.limit_of_all(byte_count, count):
            return limit
        return self.limit_of_user(user, byte_count, count)

    def limit_of_user(self, user: str | None, byte_count: int, count: int = 1) -> str:
        """Return the option of the per-user limit that more items would exceed, as "NAME (VALUE)".

        Return "" if `count` more items of `byte_count` bytes in total fit into the user's part of the limit.
        The usage of other users is not considered.
        """
        if not self._applies():
            return ""
        if self.of(user) + byte_count > self.user_bytes_max:
            return f"{self._share_option} ({self.user_bytes_max} bytes of {self.resource})"
        if self.count_of(user) + count > self.user_count_max:
            return f"{self._share_option} ({self.user_count_max} {self.resource})"
        return ""

    def limit_of_all(self, byte_count: int, count: int = 1) -> str:
        """Return the option for the items of all users that more items would exceed, as "NAME (VALUE)".

        Return "" if `count` more items of `byte_count` bytes in total fit.
        """
        if self.total + byte_count > self.bytes_max:
            return f"{self._bytes_option} ({self.bytes_max})"
        return f"{self._count_option} ({self.count_max})" if self.count + count > self.count_max else ""

    def bytes_by_user(self) -> dict[str, int]:
        """Return the total bytes of each user's items, as a new dictionary."""
        return dict(self._byte_count)

    def room_of(self, user: str) -> tuple[int, int, int, int]:
        """Return the remaining capacity: items and bytes for all users, then items and bytes for `user`.

        A capacity is negative if there are too many items, and NO_LIMIT for the user while the per-user limit
        does not apply.
        """
        count, byte_count = self.count_max - self.count, self.bytes_max - self.total
        if not self._applies():
            return count, byte_count, NO_LIMIT, NO_LIMIT
        own = self.user_count_max - self.count_of(user), self.user_bytes_max - self.of(user)
        return count, byte_count, *own

    def set_limits(self, count_max: int, bytes_max: int) -> None:
        """Set the limits for all users, and compute those for one user: a fraction of them, or NO_LIMIT."""
        self.count_max, self.bytes_max = count_max, bytes_max
        self.user_count_max = count_max if count_max == NO_LIMIT else _part(count_max, self._user_share)
        self.user_bytes_max = bytes_max if bytes_max == NO_LIMIT else int(bytes_max * self._user_share)

    def refuse(self, user: str, limit: str, count: int) -> None:
        """Count `count` items of `user` as refused because of the option `limit`."""
        self.refused += count
        self.last_user = user
        self.last_limit = limit
        if self._refusals is not None:
            self._refusals.refuse(user, limit, count)

    def refuse_over_share(self, messages: Sequence[Message], *, spares_lone: bool = False) -> list[int]:
        """Return the positions of messages by which the users who sent them exceed the per-user limit.

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
            limit = limits.get(user) or self.limit_of_user(user, byte_count, count)
            if limit and not (spares_lone and self.count_of(user) == self.count):
                positions.append(at)
                limits[user] = limit
                self.refuse(user, limit, 1)
            else:
                accepted[user] = count, byte_count
        return positions

    def has_room_for(self, messages: Iterable[Message], byte_count: int = 0, count: int = 0) -> bool:
        """Return True if these messages fit into the total limit and the per-user limits of their senders.

        They must fit in addition to `count` items of `byte_count` bytes in total that are not yet counted.
        """
        weights = weights_by_user(messages)
        all_count, all_bytes = self.count + count, self.total + byte_count
        for user, (more, more_bytes) in weights.items():
            all_count, all_bytes = all_count + more, all_bytes + more_bytes
            if self.limit_of(user, byte_count + more_bytes, count + more):
                return False
        return all_count <= self.count_max and all_bytes <= self.bytes_max

    def add(self, user: str | None, byte_count: int, count: int = 1) -> None:
        """Count `count` new items of `byte_count` bytes in total."""
        name = OPERATOR if user is None else user
        self.count += count
        self.total += byte_count
        self._counts[name] = self._counts.get(name, 0) + count
        self._byte_count[name] = self._byte_count.get(name, 0) + byte_count

    def remove(self, user: str | None, byte_count: int, count: int = 1) -> None:
        """Subtract `count` items that were added with `byte_count` bytes in total."""
        name = OPERATOR if user is None else user
        self.count -= count
        self.total -= byte_count
        self._counts[name] -= count
        self._byte_count[name] -= byte_count
        if not self._counts[name] and not self._byte_count[name]:
            del self._counts[name], self._byte_count[name]

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Count messages for the users who sent them."""
        for user, (count, byte_count) in weights_by_user(messages).items():
            self.add(user, byte_count, count)

    def remove_messages(self, messages: Iterable[Message]) -> None:
        """Subtract messages that were counted for the users who sent them."""
        for user, (count, byte_count) in weights_by_user(messages).items():
            self.remove(user, byte_count, count)

    def replace(self, weights: Mapping[str, tuple[int, int]]) -> None:
        """Replace all counts by those in `weights`: number of items and their bytes, by user."""
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

        That is `user`, who has just added an item, if this user has several items and more than an equal part
        of the limit; otherwise the user with the highest usage.
        """
        by_bytes = self.total > self.bytes_max
        usage = self._byte_count if by_bytes else self._counts
        most = self.bytes_max if by_bytes else self.count_max
        if self.count_of(user) > 1 and usage[user] * len(usage) > most:
            return user
        return max(usage, key=usage.__getitem__)


class Holding:
    """Bytes of one object, such as a connection, that count toward a per-user limit; `end` frees them all."""

    __slots__ = ("_byte_count", "_shares", "_user")

    def __init__(self, shares: UserShares, user: str) -> None:
        self._shares = shares
        self._user = user
        self._byte_count = 0

    def take(self, byte_count: int) -> str:
        """Count more bytes. Return "", or the exceeded option with its value if they do not fit."""
        if limit := self._shares.full_with(self._user, byte_count):
            return limit
        self._byte_count += byte_count
        self._shares.add(self._user, byte_count, 0)
        return ""

    def give(self, byte_count: int) -> None:
        """Subtract bytes that `take` counted. After `end`, this changes nothing."""
        if byte_count and self._byte_count:
            self._byte_count -= byte_count
            self._shares.remove(self._user, byte_count, 0)

    def end(self) -> None:
        """Subtract all bytes of this object from its user's usage."""
        byte_count, self._byte_count = self._byte_count, 0
        if byte_count:
            self._shares.remove(self._user, byte_count, 0)


class UserEntries(Generic[K]):
    """Identifiers of entries, such as retained topics, with their users, oldest first.

    `shares` counts the entries and their bytes by user.
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
        """Add the newest entry: `key` is its identifier, `user` its owner, `byte_count` its size in bytes."""
        self._entries[key] = (user, byte_count)
        self._of_users.setdefault(user, {})[key] = None
        self.shares.add(user, byte_count)

    def discard(self, key: K) -> bool:
        """Remove an entry. Return False if there was none."""
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
        """Remove all entries."""
        for key in list(self._entries):
            self.discard(key)

    def entry_to_evict(self, user: str) -> K | None:
        """Return the entry to remove because `user` has added one, or None if all entries fit.

        The entry is counted in `shares.evicted_count`. The caller removes it with `discard`.
        """
        shares = self.shares
        if not self._entries or not shares.is_exceeded:
            return None
        crowder = shares.user_to_evict(user)
        shares.evicted_count += 1
        shares.last_user = crowder
        return next(iter(self._of_users[crowder]))


def weights_by_user(messages: Iterable[Message]) -> dict[str, tuple[int, int]]:
    """Return the number and bytes of the messages that each user sent."""
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

"""Fair shares: how many of something each holder has, so that nobody has all of it.

Definitions (queues, exchanges, bindings, subscriptions, sessions) are counted in bytes, too: what their names
and arguments occupy is up to whoever makes them.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from gateway.model.properties import Headers, Value, ValueType

NO_LIMIT: Final = 1 << 62
ENTRY_OCTETS: Final = 256  # of an argument, besides its name and value
LEVEL_OCTETS: Final = 200  # of a level of a topic filter, besides its text
LEVELS_FEW: Final = 10  # levels that are counted by their text alone, for most filters share them
OPERATOR: Final = "\0"  # whose share definitions of the configuration are counted in; no user is called so
SHARE: Final = 0.9  # of all, unless the configuration says how many: somebody else always gets in


def share_of(total: int, given: int) -> int:
    """How many of `total` one holder may have; `said` is the option, 0: nothing was said."""
    return given or ceil(total * SHARE)


class Shares:
    """Counts by holder. Who has most is known without looking through them: it only ever moves by one."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._holders: dict[int, dict[str, None]] = {}  # by count
        self._most = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, holder: str) -> int:
        return self._counts.get(holder, 0)

    @property
    def largest(self) -> str | None:
        """A holder that has as many as any; None: nobody has anything."""
        return next(iter(self._holders[self._most])) if self._most else None

    def add(self, holder: str) -> None:
        """It has one more."""
        count = self._counts.get(holder, 0)
        self._move(holder, count, count + 1)
        self._most = max(self._most, count + 1)

    def remove(self, holder: str) -> None:
        """It has one less."""
        count = self._counts[holder]
        self._move(holder, count, count - 1)
        if self._most not in self._holders:
            self._most -= 1

    def _move(self, holder: str, before: int, after: int) -> None:
        if before:
            same = self._holders[before]
            del same[holder]
            if not same:
                del self._holders[before]
        if after:
            self._counts[holder] = after
            self._holders.setdefault(after, {})[holder] = None
        else:
            del self._counts[holder]


class DefinitionShares:
    """The bytes of all definitions, by the user who made them. Sizes are estimates of what they occupy."""

    def __init__(self, total_max: int = NO_LIMIT, user_max: int = NO_LIMIT) -> None:
        """`total_max` and `user_max` are the bytes of all definitions and of one user's."""
        self.total_max = total_max
        self.user_max = user_max
        self.total = 0
        self._of_users: dict[str, int] = {}

    def of(self, user: str | None) -> int:
        """Return the bytes of a user's definitions; None: the configuration's."""
        return self._of_users.get(OPERATOR if user is None else user, 0)

    def full_with(self, user: str | None, octets: int) -> str:
        """Return the option that forbids a definition of this size, or "" if there is room for it."""
        if self.total + octets > self.total_max:
            return f"limits.definitions_bytes_max ({self.total_max})"
        if self.of(user) + octets > self.user_max:
            return f"limits.definitions_per_user_share ({self.user_max} bytes)"
        return ""

    def add(self, user: str | None, octets: int) -> None:
        """Count a definition."""
        self.total += octets
        self._of_users[OPERATOR if user is None else user] = self.of(user) + octets

    def remove(self, user: str | None, octets: int) -> None:
        """Forget a definition that was counted with this size."""
        self.total -= octets
        left = self.of(user) - octets
        if left:
            self._of_users[OPERATOR if user is None else user] = left
        else:
            del self._of_users[OPERATOR if user is None else user]


def text_octets(*texts: str) -> int:
    """Return what the texts of a definition occupy: in memory, and in the record that the store has."""
    return 2 * sum([len(text.encode()) for text in texts])


def filter_octets(topic_filter: str) -> int:
    """Return what a topic filter occupies."""
    deep = max(topic_filter.count("/") + 1 - LEVELS_FEW, 0)
    return text_octets(topic_filter) + LEVEL_OCTETS * deep


def argument_octets(arguments: Headers) -> int:
    """Return what the arguments of a definition occupy, with all that is nested in them."""
    return sum([ENTRY_OCTETS + text_octets(name) + _value_octets(value) for name, value in arguments])


def argument_count(arguments: Headers) -> int:
    """Return how many arguments there are, with all that is nested in them."""
    return sum([1 + _nested_count(value) for _, value in arguments])


def _value_octets(value: Value) -> int:
    content = value.value
    if value.type is ValueType.TABLE:
        return argument_octets(content)
    if value.type is ValueType.ARRAY:
        return sum([ENTRY_OCTETS + _value_octets(one) for one in content])
    if isinstance(content, str):
        return text_octets(content)
    return 2 * len(content) if isinstance(content, bytes) else 0


def _nested_count(value: Value) -> int:
    if value.type is ValueType.TABLE:
        return argument_count(value.value)
    return sum([1 + _nested_count(one) for one in value.value]) if value.type is ValueType.ARRAY else 0

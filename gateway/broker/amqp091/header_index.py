"""Index of the bindings of a headers exchange: which of them a message's headers fulfil.

A *condition* is a header with a value, or a header that merely exists. A message fulfils at most two
conditions for each of its headers. A binding that needs any of its conditions is listed under each of them. A
binding that needs all of them is listed under one, the rarest when it was added; the others are compared when
a message fulfils that one. Bindings of one user with the same conditions are one group, and compared once.

The worst cost of a message is known in advance: a message has one value of each header, so in the worst case
it has, for each header, the value with the most comparisons. `add` and `remove` return how they change that
sum.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, Generic, NamedTuple, TypeVar

from gateway.model.properties import Headers, Value, ValueType, without_order

T = TypeVar("T")


Condition = tuple[Any, ...]
"""(name, value) of a header that must have the value, or (name,) of one that must exist."""

UNIQUE_TYPES: Final = frozenset(
    (ValueType.VOID, ValueType.BOOL, ValueType.DECIMAL, ValueType.ARRAY, ValueType.TABLE)
)
"""Types of headers that equal no other type.

Numbers of all sizes and timestamps are one type, as in RabbitMQ, and so are texts and byte strings.
"""

FEW: Final = 4  # conditions that are compared one by one; with more, sets are compared
GROUP_STEPS: Final = 4  # of a group, in addition to a step for each of its conditions


class HeaderConditions(NamedTuple):
    """Conditions of a headers binding.

    `all` is True if a message must fulfil all of them, and False if any one is enough.
    """

    all: bool
    conditions: frozenset[Condition]


class _BindingGroup(Generic[T]):
    """Destinations that one user has bound with the same conditions."""

    __slots__ = ("conditions", "destinations", "key", "listed", "steps")

    def __init__(self, key: tuple[str | None, HeaderConditions]) -> None:
        self.key = key
        self.conditions = key[1].conditions
        self.listed: list[Condition] = []  # conditions under which the group is listed
        self.steps = 1
        self.destinations: dict[T, int] = {}  # how often each is bound


class HeaderIndex(Generic[T]):
    """Index of headers bindings, which finds the destinations for the headers of a message."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str | None, HeaderConditions], _BindingGroup[T]] = {}
        self._always: dict[T, int] = {}  # bound with all of no conditions
        self._all: dict[Condition, dict[_BindingGroup[T], None]] = {}
        self._any: dict[Condition, dict[_BindingGroup[T], None]] = {}
        self._names: dict[str, int] = {}  # number of listings, by header
        self._steps: dict[tuple[str | None, Condition], int] = {}
        self._levels: dict[tuple[str | None, str, int], dict[int, int]] = {}  # number of conditions, by steps

    def add(self, required: HeaderConditions, destination: T, user: str | None) -> int:
        """Add a binding of a user. Return how many comparisons it adds in the worst case.

        The worst case is the message that needs the most comparisons for the bindings of this user.
        """
        if not required.conditions:
            if required.all:
                self._always[destination] = self._always.get(destination, 0) + 1
            return 0
        key = (user, required)
        group = self._groups.get(key)
        if group is not None:
            group.destinations[destination] = group.destinations.get(destination, 0) + 1
            return 0
        group = self._groups[key] = _BindingGroup(key)
        group.destinations[destination] = 1
        lists = self._any
        group.listed = list(required.conditions)
        if required.all:
            lists = self._all
            group.listed = [min(group.listed, key=self._rarity)]
            group.steps = GROUP_STEPS + len(required.conditions)
        more = 0
        for condition in group.listed:
            lists.setdefault(condition, {})[group] = None
            self._names[condition[0]] = self._names.get(condition[0], 0) + 1
            more += self._charge(user, condition, group.steps)
        return more

    def remove(self, required: HeaderConditions, destination: T, user: str | None) -> int:
        """Remove a binding of a user. Return how many comparisons are saved in the worst case.

        The worst case is the message that needs the most comparisons for the bindings of this user.
        """
        if not required.conditions:
            if required.all:
                _take_one(self._always, destination)
            return 0
        group = self._groups[user, required]
        _take_one(group.destinations, destination)
        if group.destinations:
            return 0
        del self._groups[user, required]
        lists = self._all if required.all else self._any
        less = 0
        for condition in group.listed:
            del lists[condition][group]
            if not lists[condition]:
                del lists[condition]
            _take_one(self._names, condition[0])
            less -= self._charge(user, condition, -group.steps)
        return less

    def match(self, headers: dict[str, Any]) -> dict[T, None]:
        """Return the destinations whose conditions these headers fulfil, each once."""
        found: dict[T, None] = dict.fromkeys(self._always)
        names, every, some = self._names, self._all, self._any
        fulfilled: set[Condition] = set()
        hits: dict[_BindingGroup[T], None] = {}
        for name in headers:
            if name not in names:
                continue
            for condition in ((name, headers[name]), (name,)):
                if some and condition in some:
                    hits.update(some[condition])
                groups = every.get(condition)
                if groups is None:
                    continue
                for group in groups:
                    if len(group.conditions) > FEW:
                        fulfilled = fulfilled or _conditions(headers)
                        if not group.conditions <= fulfilled:
                            continue
                    elif not _matches(group.conditions, headers):
                        continue
                    for destination in group.destinations:
                        found[destination] = None
        for group in hits:
            for destination in group.destinations:
                found[destination] = None
        return found

    def _rarity(self, condition: Condition) -> tuple[int, bool]:
        listed = self._all.get(condition)
        return (0 if listed is None else len(listed), len(condition) == 1)

    def _charge(self, user: str | None, condition: Condition, steps: int) -> int:
        """Add `steps` comparisons to a header condition of a user. Return how many the worst case gains.

        The worst case is the value of this header that needs the most comparisons. Negative numbers subtract.
        """
        levels = self._levels.setdefault((user, condition[0], len(condition)), {})
        most = max(levels, default=0)
        key = (user, condition)
        before = self._steps.get(key, 0)
        after = before + steps
        if before:
            _take_one(levels, before)
        if after:
            self._steps[key] = after
            levels[after] = levels.get(after, 0) + 1
        else:
            del self._steps[key]
            if not levels:
                del self._levels[user, condition[0], len(condition)]
        return max(levels, default=0) - most


def _matches(conditions: frozenset[Condition], headers: dict[str, Any]) -> bool:
    """Return True if headers fulfil all conditions."""
    for condition in conditions:
        name = condition[0]
        if name not in headers or (len(condition) == 2 and headers[name] != condition[1]):
            return False
    return True


def _conditions(headers: dict[str, Any]) -> set[Condition]:
    """Return every condition that these headers fulfil."""
    found: set[Condition] = {(name,) for name in headers}
    found.update(headers.items())
    return found


K = TypeVar("K")


def _take_one(counts: dict[K, int], key: K) -> None:
    remaining = counts[key] - 1
    if remaining:
        counts[key] = remaining
    else:
        del counts[key]


def parse_conditions(arguments: Headers) -> HeaderConditions:
    """Return the conditions in the arguments of a headers binding.

    `x-match` is all (default), any, all-with-x or any-with-x. Other arguments that begin with `x-` are
    ignored, except with the `-with-x` forms. An argument without a value (void) matches any header of that
    name.
    """
    mode = "all"
    conditions: list[Condition] = []
    for name, value in arguments:
        if name == "x-match":
            mode = str(value.value)
        else:
            conditions.append((name,) if value.value is None else (name, comparable(value)))
    if not mode.endswith("-with-x"):
        conditions = [condition for condition in conditions if not condition[0].startswith("x-")]
    return HeaderConditions(mode.startswith("all"), frozenset(conditions))


def comparable(value: Value) -> Any:
    """Convert an argument or header value so that equal values compare as equal in Python."""
    if value.type in UNIQUE_TYPES:
        return value.type, without_order(value).value  # as bindings are stored: a table has no order
    if value.type is ValueType.BYTES:
        with suppress(UnicodeDecodeError):
            return value.value.decode()  # compared as texts, if they are UTF-8
    return value.value

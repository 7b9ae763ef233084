"""Comparison of MQTT topic filters: one covers another, or both match a common topic.

A subscription to a filter is granted if the filter of one rule covers it; two rules that only together cover
it do not grant it. It is refused if it has a topic in common with a denied filter. A topic is a filter
without wildcards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

ONE, REST = "+", "#"
WILD: Final = (ONE, REST)
Fill = Callable[[str], "str | None"]
Rule = tuple["list[str] | None", str, str]  # levels (None with placeholders), filter text, rule name


def covers(allowed: Sequence[str], levels: Sequence[str]) -> bool:
    """Return True if `allowed` matches every topic that `levels` matches.

    Both arguments are topic filters, split into their levels.
    """
    if levels[0][:1] == "$" and allowed[0] in WILD:
        return False  # a wildcard first does not match topics that begin with $ (5: 4.7.2)
    count = len(levels)
    for at, level in enumerate(allowed):
        if level == REST:
            return True
        if at >= count or levels[at] == REST or (level != ONE and level != levels[at]):
            return False
    return count == len(allowed)


def overlaps(denied: Sequence[str], levels: Sequence[str]) -> bool:
    """Return True if at least one topic matches both topic filters, which are split into their levels."""
    first = denied[0], levels[0]
    if any(one[:1] == "$" for one in first) and any(one in WILD for one in first):
        return False
    for at in range(max(len(denied), len(levels))):
        mine = denied[at] if at < len(denied) else None
        other = levels[at] if at < len(levels) else None
        if REST in (mine, other):
            return True
        if mine is None or other is None or (mine != other and ONE not in (mine, other)):
            return False
    return True


class FilterSet:
    """Topic filters of rules, each with the name of its rule.

    Filters may contain placeholders. Each check passes the values of the placeholders, so that all clients
    with a role can share one set.
    """

    __slots__ = ("_by_first", "_exact", "_wild")

    def __init__(self, rules: Iterable[tuple[str, str]]) -> None:
        """Build the set from `rules`: pairs of a filter and the name of its rule."""
        self._exact: dict[str, str] = {}
        self._by_first: dict[str, list[Rule]] = {}
        self._wild: list[Rule] = []
        for text, rule in rules:
            levels = text.split("/")
            fixed = None if "{" in text else levels
            if fixed and not set(levels) & set(WILD):
                self._exact.setdefault(text, rule)
            if levels[0] in WILD or "{" in levels[0]:
                self._wild.append((fixed, text, rule))
            else:
                self._by_first.setdefault(levels[0], []).append((fixed, text, rule))

    def covering_rule(self, topic_filter: str, fill: Fill = str) -> str | None:
        """Return the name of a rule whose filter covers a topic or topic filter, or None.

        `fill` replaces the placeholders of a rule's filter; if it returns None, the rule does not apply.
        """
        found = self._exact.get(topic_filter)
        if found is not None:
            return found
        levels = topic_filter.split("/")
        for among in (self._by_first.get(levels[0], ()), self._wild):
            for fixed, text, rule in among:
                allowed = fixed or _filled(text, fill)
                if allowed is not None and covers(allowed, levels):
                    return rule
        return None

    def overlapping_rule(self, topic_filter: str, fill: Fill = str) -> str | None:
        """Return the name of a rule whose filter has a topic in common with `topic_filter`, or None.

        `fill` replaces the placeholders of a rule's filter; if it returns None, the rule does not apply.
        """
        if not (self._by_first or self._wild):
            return None
        levels = topic_filter.split("/")
        near: Iterable[Rule] = self._by_first.get(levels[0], ())
        if levels[0] in WILD:
            near = (one for several in self._by_first.values() for one in several)
        for among in (near, self._wild):
            for fixed, text, rule in among:
                denied = fixed or _filled(text, fill)
                if denied is not None and overlaps(denied, levels):
                    return rule
        return None


def _filled(text: str, fill: Fill) -> list[str] | None:
    filled = fill(text)
    return None if filled is None else filled.split("/")

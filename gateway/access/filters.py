"""What topic filters say of each other: whether one matches all that another does, and whether both match
anything.

A filter that is subscribed to is granted when one rule covers it: two rules that cover it together are not
looked for. It is refused when it meets what is denied. A topic is a filter without wildcards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

ONE, REST = "+", "#"
WILD: Final = (ONE, REST)
Fill = Callable[[str], "str | None"]
Rule = tuple["list[str] | None", str, str]  # levels if they are fixed, the text, what it is a rule of


def covers(allowed: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether `allowed` (levels) matches every topic that `wanted` does."""
    if wanted[0][:1] == "$" and allowed[0] in WILD:
        return False  # wildcards do not mean topics that begin with $ (5: 4.7.2)
    count = len(wanted)
    for at, level in enumerate(allowed):
        if level == REST:
            return True
        if at >= count or wanted[at] == REST or (level != ONE and level != wanted[at]):
            return False
    return count == len(allowed)


def meets(denied: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether there can be a topic that both match."""
    first = denied[0], wanted[0]
    if any(one[:1] == "$" for one in first) and any(one in WILD for one in first):
        return False
    for at in range(max(len(denied), len(wanted))):
        mine = denied[at] if at < len(denied) else None
        other = wanted[at] if at < len(wanted) else None
        if REST in (mine, other):
            return True
        if mine is None or other is None or (mine != other and ONE not in (mine, other)):
            return False
    return True


class FilterSet:
    """Filters of rules, each with what is said of it when it decides. They may have placeholders: who asks
    says what stands for them, so that all clients of a role share one set.
    """

    __slots__ = ("_by_first", "_exact", "_wild")

    def __init__(self, rules: Iterable[tuple[str, str]]) -> None:
        """`rules`: filters, and the names of what they are rules of."""
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

    def covering(self, wanted: str, fill: Fill = str) -> str | None:
        """The rule that allows all of a topic or filter. `fill` puts something for placeholders; None: there
        is nothing, and the rule does not apply."""
        found = self._exact.get(wanted)
        if found is not None:
            return found
        levels = wanted.split("/")
        for among in (self._by_first.get(levels[0], ()), self._wild):
            for fixed, text, rule in among:
                allowed = fixed or _filled(text, fill)
                if allowed is not None and covers(allowed, levels):
                    return rule
        return None

    def meeting(self, wanted: str, fill: Fill = str) -> str | None:
        """The rule that means some of it."""
        if not (self._by_first or self._wild):
            return None
        levels = wanted.split("/")
        near: Iterable[Rule] = self._by_first.get(levels[0], ())
        if levels[0] in WILD:
            near = (one for several in self._by_first.values() for one in several)
        for among in (near, self._wild):
            for fixed, text, rule in among:
                denied = fixed or _filled(text, fill)
                if denied is not None and meets(denied, levels):
                    return rule
        return None


def _filled(text: str, fill: Fill) -> list[str] | None:
    filled = fill(text)
    return None if filled is None else filled.split("/")

"""Topic filters in a trie: what matches a topic is found level by level, whatever does not is never touched.

One trie serves MQTT subscriptions and AMQP topic bindings; only the wildcards and the separator differ. Its
mirror, the tree of topics, holds names and is asked by filter: that is how retained messages are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Node(Generic[T]):
    """One level of the trie."""

    __slots__ = ("children", "values")

    def __init__(self) -> None:
        self.children: dict[str, Node[T]] = {}
        self.values: dict[T, None] = {}  # a set that keeps order


class Trie(Generic[T]):
    """Patterns (lists of levels) to values. `one` matches a level; `many` matches any number, also none."""

    def __init__(self, one: str, many: str) -> None:
        self._one = one
        self._many = many
        self._root: Node[T] = Node()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, pattern: list[str], value: T) -> None:
        """Add `value` under `pattern`; adding it twice changes nothing."""
        node = self._root
        for level in pattern:
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = Node()
            node = child
        if value not in node.values:
            node.values[value] = None
            self._count += 1

    def remove(self, pattern: list[str], value: T) -> bool:
        """Remove `value` from `pattern`, and the levels that this leaves empty. False: it was not there."""
        path = [self._root]
        for level in pattern:
            child = path[-1].children.get(level)
            if child is None:
                return False
            path.append(child)
        if value not in path[-1].values:
            return False
        del path[-1].values[value]
        self._count -= 1
        for at in range(len(pattern) - 1, -1, -1):
            child = path[at + 1]
            if child.values or child.children:
                break
            del path[at].children[pattern[at]]
        return True

    def begins(self, level: str) -> bool:
        """Does any pattern begin with this level, by name?"""
        return level in self._root.children

    def match(self, levels: list[str], *, hidden: bool = False) -> dict[T, None]:
        """The values whose patterns match `levels`, each once.

        `hidden`: the first level must be named, a wildcard does not match it (MQTT's `$` topics).
        """
        found: dict[T, None] = {}
        seen: set[tuple[int, int]] = set()
        stack: list[tuple[Node[T], int]] = [(self._root, 0)]
        if hidden:
            named = self._root.children.get(levels[0])
            stack = [(named, 1)] if named is not None and levels[0] not in (self._one, self._many) else []
        one, many = self._one, self._many
        end = len(levels)
        while stack:
            node, at = stack.pop()
            rest = node.children.get(many)
            if rest is not None:
                self._match_rest(rest, at, end, stack, seen, found)
            if at == end:
                found.update(node.values)
                continue
            child = node.children.get(levels[at])
            if child is not None and levels[at] not in (one, many):
                stack.append((child, at + 1))
            child = node.children.get(one)
            if child is not None:
                stack.append((child, at + 1))
        return found

    def _match_rest(
        self,
        rest: Node[T],
        at: int,
        end: int,
        stack: list[tuple[Node[T], int]],
        seen: set[tuple[int, int]],
        found: dict[T, None],
    ) -> None:
        """`many` swallows any number of levels. When nothing follows it, that is all of them."""
        if not rest.children:
            found.update(rest.values)
            return
        for skipped in range(at, end + 1):
            if (id(rest), skipped) not in seen:
                seen.add((id(rest), skipped))
                stack.append((rest, skipped))

    def items(self) -> Iterator[tuple[list[str], T]]:
        """Every pattern with its values."""
        stack: list[tuple[Node[T], list[str]]] = [(self._root, [])]
        while stack:
            node, path = stack.pop()
            for value in node.values:
                yield path, value
            for level, child in node.children.items():
                stack.append((child, [*path, level]))


class Branch(Generic[T]):
    """One level of a tree of topics; `value` is that of the topic which ends here."""

    __slots__ = ("children", "value")

    def __init__(self) -> None:
        self.children: dict[str, Branch[T]] = {}
        self.value: T | None = None


class TopicTree(Generic[T]):
    """MQTT topics (lists of levels) to values, which a filter finds without touching what it cannot match."""

    def __init__(self) -> None:
        self._root: Branch[T] = Branch()

    def put(self, levels: list[str], value: T) -> None:
        """Set the value of a topic, in place of an earlier one."""
        branch = self._root
        for level in levels:
            child = branch.children.get(level)
            if child is None:
                child = branch.children[level] = Branch()
            branch = child
        branch.value = value

    def remove(self, levels: list[str]) -> None:
        """Forget a topic that is there, and the levels that this leaves empty."""
        path = [self._root]
        for level in levels:
            path.append(path[-1].children[level])
        path[-1].value = None
        for at in range(len(levels) - 1, -1, -1):
            child = path[at + 1]
            if child.value is not None or child.children:
                break
            del path[at].children[levels[at]]

    def find(self, pattern: list[str]) -> list[T]:
        """The values of the topics that a filter matches; no wildcard matches a first level with `$`."""
        found: list[T] = []
        stack: list[tuple[Branch[T], int]] = [(self._root, 0)]
        end = len(pattern)
        while stack:
            branch, at = stack.pop()
            rest = at < end and pattern[at] == "#"
            if (at >= end or rest) and branch.value is not None:
                found.append(branch.value)
            if at >= end:
                continue
            level = pattern[at]
            if rest or level == "+":
                after = at if rest else at + 1
                for name, child in reversed(branch.children.items()):
                    if at or branch is not self._root or not name.startswith("$"):
                        stack.append((child, after))
            elif (named := branch.children.get(level)) is not None:
                stack.append((named, at + 1))
        return found


def topic_matches(pattern: list[str], levels: list[str]) -> bool:
    """MQTT: does the filter match the topic? Wildcards do not match a first level that begins with `$`."""
    if levels[0].startswith("$") and pattern[0] in ("+", "#"):
        return False
    for at, level in enumerate(pattern):
        if level == "#":
            return True
        if at >= len(levels) or (level != "+" and level != levels[at]):
            return False
    return len(pattern) == len(levels)

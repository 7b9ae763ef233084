"""Topic filters in a trie: matches are found level by level, without examining other filters.

One trie serves MQTT subscriptions and AMQP topic bindings; only the wildcards and the separator differ. A run
of levels in which no two patterns differ is one node, so that a single pattern needs two nodes, however many
levels it has. A search visits each node at most once, because a wildcard for any number of levels ends a
path. Inside a pattern (in AMQP only) such a wildcard may match at many places of one topic: these patterns
are matched together in strips of bits, which costs the same whatever they and the topic are.

The reverse structure, the tree of topics, holds names and is searched by filter. It finds retained messages,
some at a time, since a filter may match all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")
STRIP_BITS: Final = 2_048
WIDTHS: Final = (8, 32, 128, 512)  # states of a pattern; a longer one has a strip of its own


class Node(Generic[T]):
    """Node of a trie of patterns.

    A node stands for one level, and for the following levels that all patterns below it have in common
    (`tail`). The wildcard for any number of levels always has a node of its own. `wild` is True if the tail
    contains the wildcard for one level.
    """

    __slots__ = ("children", "tail", "values", "wild")

    def __init__(self, tail: list[str], wild: bool) -> None:
        self.tail = tail
        self.wild = wild
        self.children: dict[str, Node[T]] = {}
        self.values: dict[T, None] = {}  # a set that keeps order


class Strip(Generic[T]):
    """Set of patterns that have a wildcard for any number of levels inside, as one integer of bits.

    Each pattern has a slot of `width` bits with one bit for each state. In state n the first n parts of a
    pattern are matched. A level of a topic advances the states of all patterns together.
    """

    __slots__ = ("_ends", "_last", "_literals", "_many", "_ones", "_starts", "free", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.free = list(range(max(STRIP_BITS // width, 1)))
        self._starts = 0
        self._last = 0  # states in which a pattern is matched
        self._ends: dict[int, dict[T, None]] = {}  # values of a pattern, by the number of that state
        self._literals: dict[str, int] = {}  # states from which this level leads to the next one
        self._ones = 0  # states from which any level does
        self._many = 0  # states that any level leaves unchanged, and from which no level leads on, too

    def put(self, parts: list[str], one: str, many: str) -> tuple[int, dict[T, None]]:
        """Add a pattern, with `one` and `many` as wildcards. Return its slot and its set of values.

        The set is empty; the caller adds values to it.
        """
        slot = self.free.pop()
        self._flip(slot, parts, one, many)
        values = self._ends[slot * self.width + len(parts)] = {}
        return slot, values

    def drop(self, slot: int, parts: list[str], one: str, many: str) -> None:
        """Remove a pattern, which has the number `slot`. The other parameters are those of `put`."""
        self._flip(slot, parts, one, many)
        del self._ends[slot * self.width + len(parts)]
        self.free.append(slot)

    def __len__(self) -> int:
        return len(self._ends)

    def _flip(self, slot: int, parts: list[str], one: str, many: str) -> None:
        """Toggle the bits of the pattern in its slot: set them, or clear them if they are set."""
        first = slot * self.width
        self._starts ^= 1 << first
        self._last ^= 1 << first + len(parts)
        masks: dict[str, int] = {}
        for at, part in enumerate(parts, first):
            masks[part] = masks.get(part, 0) | 1 << at
        self._ones ^= masks.pop(one, 0)
        self._many ^= masks.pop(many, 0)
        for part, mask in masks.items():
            remaining = self._literals.get(part, 0) ^ mask
            if remaining:
                self._literals[part] = remaining
            else:
                del self._literals[part]

    def match(self, levels: list[str], found: dict[T, None]) -> None:
        """Add the values of the patterns that match a topic with these levels to `found`."""
        literals, ones, many = self._literals, self._ones, self._many
        states = self._starts
        states |= (states & many) << 1
        for level in levels:
            states = (states & (literals.get(level, 0) | ones)) << 1 | states & many
            states |= (states & many) << 1
            if not states:
                return
        states &= self._last
        while states:
            lowest = states & -states
            found.update(self._ends[lowest.bit_length() - 1])
            states ^= lowest


class Trie(Generic[T]):
    """Map from patterns (lists of levels) to sets of values, searched by topic.

    The wildcard `one` matches a level; `many` matches any number of levels, including none.
    """

    def __init__(self, one: str, many: str) -> None:
        self._one = one
        self._many = many
        self._root: Node[T] = Node([], False)
        self._count = 0
        self._strips: dict[Strip[T], None] = {}
        self._with_room: dict[int, dict[Strip[T], None]] = {}  # by width
        self._inner: dict[tuple[str, ...], tuple[Strip[T], int, dict[T, None]]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, pattern: list[str], value: T) -> None:
        """Add `value` to the values of `pattern`. Adding it twice has no effect."""
        values = self._values_in_strip(pattern) if self._many in pattern[:-1] else self._values_of(pattern)
        if value not in values:
            values[value] = None
            self._count += 1

    def _values_of(self, pattern: list[str]) -> dict[T, None]:
        """Return the set of values of a pattern, to which the caller may add.

        Creates the pattern's node if necessary, and splits a node whose levels differ from the pattern.
        """
        node, at, end = self._root, 0, len(pattern)
        while at < end:
            level = pattern[at]
            at += 1
            child = node.children.get(level)
            if child is None:
                tail = pattern[at : end - 1] if pattern[-1] == self._many else pattern[at:]
                child = node.children[level] = self._node(tail)
            elif pattern[at : at + len(child.tail)] != child.tail:
                child = node.children[level] = self._split_node(child, pattern, at)
            node = child
            at += len(child.tail)
        return node.values

    def _node(self, tail: list[str]) -> Node[T]:
        return Node(tail, self._one in tail)

    def _split_node(self, child: Node[T], pattern: list[str], at: int) -> Node[T]:
        """Insert and return a node for the common levels of `child`'s tail and the pattern from `at` on."""
        tail = child.tail
        common = 0
        while at + common < len(pattern) and tail[common] == pattern[at + common]:
            common += 1
        before = self._node(tail[:common])
        before.children[tail[common]] = child
        child.tail = tail[common + 1 :]
        child.wild = self._one in child.tail
        return before

    def _values_in_strip(self, pattern: list[str]) -> dict[T, None]:
        """Return the set of values of a pattern that belongs to a strip; add the pattern if necessary."""
        key = tuple(pattern)
        if key not in self._inner:
            parts = self._parts(pattern)
            width = next((width for width in WIDTHS if len(parts) < width), len(parts) + 1)
            with_room = self._with_room.setdefault(width, {})
            strip = next(iter(with_room), None)
            if strip is None:
                strip = Strip(width)
                self._strips[strip] = with_room[strip] = None
            self._inner[key] = (strip, *strip.put(parts, self._one, self._many))
            if not strip.free:
                del with_room[strip]
        return self._inner[key][2]

    def _parts(self, pattern: list[str]) -> list[str]:
        """Return the levels of a pattern, with each run of wildcards in a normal form.

        The wildcards for single levels come first, then one wildcard for any number of levels.
        """
        parts: list[str] = []
        open_ = False
        for level in pattern:
            if level == self._many:
                open_ = True
                continue
            if open_ and level != self._one:
                parts.append(self._many)
                open_ = False
            parts.append(level)
        return [*parts, self._many] if open_ else parts

    def remove(self, pattern: list[str], value: T) -> bool:
        """Remove `value` from the values of `pattern`, and nodes that are no longer needed.

        Return False if the pattern did not have the value.
        """
        if self._many in pattern[:-1]:
            return self._remove_from_strip(pattern, value)
        path: list[tuple[Node[T], str]] = []  # the nodes above, each with the level that leads on
        node, at = self._root, 0
        while at < len(pattern):
            child = node.children.get(pattern[at])
            if child is None or pattern[at + 1 : at + 1 + len(child.tail)] != child.tail:
                return False
            path.append((node, pattern[at]))
            node = child
            at += 1 + len(child.tail)
        if value not in node.values:
            return False
        del node.values[value]
        self._count -= 1
        while path and not node.values:
            above, level = path.pop()
            if not node.children:
                del above.children[level]
                node = above
                continue
            if len(node.children) == 1 and self._many not in node.children:
                further, child = next(iter(node.children.items()))
                child.tail = [*node.tail, further, *child.tail]
                child.wild = self._one in child.tail
                above.children[level] = child
            break
        return True

    def _remove_from_strip(self, pattern: list[str], value: T) -> bool:
        """Remove a value of a pattern that belongs to a strip. Return False if it was not found."""
        strip, slot, values = self._inner.get(tuple(pattern), (None, 0, {}))
        if strip is None or value not in values:
            return False
        del values[value]
        self._count -= 1
        if not values:
            del self._inner[tuple(pattern)]
            strip.drop(slot, self._parts(pattern), self._one, self._many)
            if len(strip):
                self._with_room[strip.width][strip] = None
            else:
                del self._strips[strip]
                self._with_room[strip.width].pop(strip, None)
        return True

    def begins(self, level: str) -> bool:
        """Return True if some pattern has this name, not a wildcard, as its first level."""
        return level in self._root.children

    def match(self, levels: list[str], *, hidden: bool = False) -> dict[T, None]:
        """Return the values whose patterns match `levels`, each once.

        With `hidden` no wildcard matches the first level (topics of MQTT that begin with `$`).
        """
        found: dict[T, None] = {}
        if not self._count:
            return found
        one, many = self._one, self._many
        end = len(levels)
        stack: list[tuple[Node[T], int]] = [(self._root, 0)]
        if hidden:
            child = self._root.children.get(levels[0])
            if child is None or levels[0] in (one, many):
                stack = []
            else:
                after = self._match_tail(child, levels, 1)
                stack = [(child, after)] if after >= 0 else []
        while stack:
            node, at = stack.pop()
            children = node.children
            if children:
                rest = children.get(many)
                if rest is not None:
                    found.update(rest.values)
            if at == end:
                found.update(node.values)
                continue
            level = levels[at]
            child = children.get(level)
            if child is not None and level != one and level != many:
                after = self._match_tail(child, levels, at + 1) if child.tail else at + 1
                if after >= 0:
                    stack.append((child, after))
            child = children.get(one)
            if child is not None:
                after = self._match_tail(child, levels, at + 1) if child.tail else at + 1
                if after >= 0:
                    stack.append((child, after))
        for strip in self._strips:
            strip.match(levels, found)
        return found

    def _match_tail(self, node: Node[T], levels: list[str], at: int) -> int:
        """Return the index in `levels` behind the levels that a node's tail matches from index `at` on.

        Returns -1 if the topic does not match the tail.
        """
        tail = node.tail
        after = at + len(tail)
        if after > len(levels):
            return -1
        if not node.wild:
            return after if levels[at:after] == tail else -1
        one = self._one
        for level in tail:
            if level != one and level != levels[at]:
                return -1
            at += 1
        return after

    def items(self) -> Iterator[tuple[list[str], T]]:
        """Yield (pattern, value) for each value of every pattern."""
        stack: list[tuple[Node[T], list[str]]] = [(self._root, [])]
        while stack:
            node, path = stack.pop()
            for value in node.values:
                yield path, value
            for level, child in node.children.items():
                stack.append((child, [*path, level, *child.tail]))
        for pattern, (_, _, values) in self._inner.items():
            for value in values:
                yield list(pattern), value


class TopicLevel(Generic[T]):
    """Level in a tree of topics. `value` is that of the topic that ends at this level, or None."""

    __slots__ = ("children", "names", "value")

    def __init__(self) -> None:
        self.children: dict[str, TopicLevel[T]] = {}
        self.names: list[str] = []  # of the children, sorted, so that a walk can be interrupted and resumed
        self.value: T | None = None


class TopicTree(Generic[T]):
    """Map from MQTT topics (lists of levels) to values, searched by filter."""

    def __init__(self) -> None:
        self._root: TopicLevel[T] = TopicLevel()

    def put(self, levels: list[str], value: T) -> None:
        """Set the value of the topic with these levels, replacing an earlier one."""
        branch = self._root
        for level in levels:
            child = branch.children.get(level)
            if child is None:
                child = branch.children[level] = TopicLevel()
                insort(branch.names, level)
            branch = child
        branch.value = value

    def remove(self, levels: list[str]) -> None:
        """Remove an existing topic, and tree levels that are empty afterwards."""
        path = [self._root]
        for level in levels:
            path.append(path[-1].children[level])
        path[-1].value = None
        for at in range(len(levels) - 1, -1, -1):
            child = path[at + 1]
            if child.value is not None or child.children:
                break
            del path[at].children[levels[at]]
            del path[at].names[bisect_left(path[at].names, levels[at])]

    def find(
        self, pattern: list[str], after: list[str] | None = None, *, most: int, steps: int
    ) -> tuple[list[T], list[str] | None]:
        """Return values of topics that a filter matches, in the order of their levels.

        The search begins behind the topic `after` (its levels); None means at the beginning. It returns at
        most `most` values, and visits at most `steps` branches. The second result is the topic where it
        stopped, to be passed as the next `after`, or None at the end. Topics may be added and removed between
        two calls. No wildcard matches a first level with `$`.
        """
        found: list[T] = []
        path = [] if after is None else list(after)
        stack = self._resume(pattern, path)
        if after is None:
            self._collect_match(self._root, 0, pattern, found)
        while stack:
            if len(found) >= most or steps <= 0:
                return found, path
            branch, at = stack[-1]
            depth = len(stack) - 1
            name = self._name_at(branch, depth, at, pattern)
            if name is None:
                stack.pop()
                del path[depth:]
                continue
            if depth == 0 and name.startswith("$") and pattern[0] in ("+", "#"):
                stack[-1] = (branch, bisect_left(branch.names, "%"))  # the character behind `$`
                continue
            steps -= 1
            stack[-1] = (branch, at + 1)
            del path[depth:]
            path.append(name)
            child = branch.children.get(name)
            if child is not None:
                self._collect_match(child, depth + 1, pattern, found)
                stack.append((child, 0))
        return found, None

    def _resume(self, pattern: list[str], path: list[str]) -> list[tuple[TopicLevel[T], int]]:
        """Return the stack of branches for a search that stopped at the topic `path`.

        Each branch has the index of the next child to visit.
        """
        stack: list[tuple[TopicLevel[T], int]] = []
        branch = self._root
        for depth, name in enumerate(path):
            is_literal = depth < len(pattern) and pattern[depth] not in ("+", "#")
            stack.append((branch, 1 if is_literal else bisect_right(branch.names, name)))
            child = branch.children.get(name)
            if child is None:
                return stack
            branch = child
        stack.append((branch, 0))
        return stack

    @staticmethod
    def _name_at(branch: TopicLevel[T], depth: int, at: int, pattern: list[str]) -> str | None:
        """Return the name of the child with index `at` among those that the pattern allows, or None."""
        if depth >= len(pattern):
            if pattern[-1] != "#":
                return None
        elif pattern[depth] not in ("+", "#"):
            return pattern[depth] if at == 0 else None
        return branch.names[at] if at < len(branch.names) else None

    @staticmethod
    def _collect_match(branch: TopicLevel[T], depth: int, pattern: list[str], found: list[T]) -> None:
        """Add the value of a branch at this depth to `found`, if the pattern matches its topic."""
        rest = pattern[-1] == "#"
        if branch.value is not None and (depth >= len(pattern) - 1 if rest else depth == len(pattern)):
            found.append(branch.value)


def topic_matches(pattern: list[str], levels: list[str]) -> bool:
    """Return True if the MQTT filter matches the topic.

    Wildcards do not match a first level that begins with `$`.
    """
    if levels[0].startswith("$") and pattern[0] in ("+", "#"):
        return False
    for at, level in enumerate(pattern):
        if level == "#":
            return True
        if at >= len(levels) or (level != "+" and level != levels[at]):
            return False
    return len(pattern) == len(levels)

"""The trie of topic filters: as a naive matcher says, for the wildcards of MQTT and of AMQP."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.broker.topics import TopicTree, Trie, topic_matches

LEVEL = st.sampled_from(["a", "b", "", "$a", "é"])
LEVELS = st.lists(LEVEL, min_size=1, max_size=5)
MQTT_FILTER = st.builds(
    lambda levels, rest: levels + ["#"] * rest,
    st.lists(LEVEL | st.just("+"), min_size=1, max_size=4),
    st.booleans(),
)
AMQP_PATTERN = st.lists(LEVEL | st.sampled_from(["*", "#"]), min_size=1, max_size=6)


def naive_amqp(pattern: list[str], levels: list[str]) -> bool:
    if not pattern:
        return not levels
    if pattern[0] == "#":
        return any(naive_amqp(pattern[1:], levels[at:]) for at in range(len(levels) + 1))
    return bool(levels) and pattern[0] in ("*", levels[0]) and naive_amqp(pattern[1:], levels[1:])


def naive_mqtt(pattern: list[str], levels: list[str]) -> bool:
    if levels[0].startswith("$") and pattern[0] in ("+", "#"):
        return False
    if pattern == ["#"] or not pattern:
        return bool(pattern) or not levels
    if pattern[-1] == "#":
        head = pattern[:-1]
        return len(levels) >= len(head) and all(p in ("+", one) for p, one in zip(head, levels, strict=False))
    return len(pattern) == len(levels) and all(
        p in ("+", one) for p, one in zip(pattern, levels, strict=True)
    )


@given(patterns=st.lists(MQTT_FILTER, max_size=8), levels=LEVELS)
def test_mqtt_filters_match_as_a_naive_matcher_says(patterns: list[list[str]], levels: list[str]) -> None:
    trie: Trie[int] = Trie("+", "#")
    for number, pattern in enumerate(patterns):
        trie.add(pattern, number)
    found = trie.match(levels, hidden=levels[0].startswith("$"))
    assert set(found) == {n for n, pattern in enumerate(patterns) if naive_mqtt(pattern, levels)}
    assert set(found) == {n for n, pattern in enumerate(patterns) if topic_matches(pattern, levels)}


@given(patterns=st.lists(AMQP_PATTERN, max_size=8), levels=LEVELS)
def test_amqp_patterns_match_as_a_naive_matcher_says(patterns: list[list[str]], levels: list[str]) -> None:
    trie: Trie[int] = Trie("*", "#")
    for number, pattern in enumerate(patterns):
        trie.add(pattern, number)
    assert set(trie.match(levels)) == {n for n, pattern in enumerate(patterns) if naive_amqp(pattern, levels)}


@given(patterns=st.lists(AMQP_PATTERN, max_size=8), kept=st.integers(0, 255))
def test_what_is_removed_leaves_nothing_behind(patterns: list[list[str]], kept: int) -> None:
    trie: Trie[int] = Trie("*", "#")
    for number, pattern in enumerate(patterns):
        trie.add(pattern, number)
        trie.add(pattern, number)
    assert len(trie) == len(patterns)
    for number, pattern in enumerate(patterns):
        if not kept >> number & 1:
            assert trie.remove(pattern, number)
            assert not trie.remove(pattern, number)
    left = [(pattern, number) for number, pattern in enumerate(patterns) if kept >> number & 1]
    assert sorted(trie.items()) == sorted(left)
    assert len(trie) == len(left)


@pytest.mark.parametrize(
    "pattern, topic, matches",
    [
        ("#", "a/b", True),
        ("#", "$SYS/uptime", False),
        ("+/uptime", "$SYS/uptime", False),
        ("$SYS/#", "$SYS/uptime", True),
        ("$SYS/+", "$SYS/uptime", True),
        ("a/#", "a", True),
        ("a/+", "a", False),
        ("a/+", "a/", True),
        ("+/+", "/a", True),
        ("/+", "/a", True),
        ("+", "/a", False),
        ("a/+/c", "a//c", True),
    ],
)
def test_the_specifications_own_examples(pattern: str, topic: str, matches: bool) -> None:
    trie: Trie[str] = Trie("+", "#")
    trie.add(pattern.split("/"), "it")
    levels = topic.split("/")
    assert ("it" in trie.match(levels, hidden=topic.startswith("$"))) is matches
    assert topic_matches(pattern.split("/"), levels) is matches


def test_a_hostile_pattern_costs_no_exponential_time() -> None:
    trie: Trie[int] = Trie("*", "#")
    trie.add(["#", "a"] * 30 + ["b"], 1)
    assert trie.match(["a"] * 120) == {}


class Counted(str):
    """A level of a topic that counts how often it is looked up."""

    count = 0

    def __hash__(self) -> int:
        Counted.count += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


@pytest.mark.parametrize("kinds", ["#*", "#a", "#*a"])
def test_wildcards_inside_patterns_take_turns_together(kinds: str) -> None:
    """What a match looks up grows with the levels of a topic, and not with what the patterns do to it."""
    rng = random.Random(kinds)
    trie: Trie[int] = Trie("*", "#")
    patterns = {tuple(rng.choice(kinds) for _ in range(100)) for _ in range(200)}
    for number, pattern in enumerate(patterns):
        trie.add(["#", *pattern], number)
    counts = []
    for size in (32, 128):
        Counted.count = 0
        trie.match([Counted("a")] * size)
        counts.append(Counted.count)
    assert counts[1] <= 5 * counts[0]
    assert counts[1] <= len(patterns) * 128  # far less than patterns times parts times levels


@pytest.mark.needs("time")
def test_strips_that_are_emptied_are_gone_and_filled_ones_are_filled_again() -> None:
    trie: Trie[int] = Trie("*", "#")
    patterns = [["#", f"x{at}", *["a"] * (at % 140)] for at in range(600)]
    for round_ in range(3):
        for number, pattern in enumerate(patterns):
            trie.add(pattern, number)
        for number, pattern in enumerate(patterns):
            assert set(trie.match(["y", f"x{number}", *["a"] * (number % 140)])) == {number}
            if round_ or number % 2:
                assert trie.remove(pattern, number)
                assert not trie.remove(pattern, number)
        left = sorted(number for _, number in trie.items())
        assert left == ([] if round_ else list(range(0, 600, 2)))
        assert len(trie) == len(left)
    assert not trie._strips
    assert not any(trie._with_room.values())


@given(
    topics=st.sets(st.lists(LEVEL, min_size=1, max_size=4).map(tuple), max_size=8),
    gone=st.integers(0, 255),
    pattern=MQTT_FILTER,
)
def test_a_filter_finds_topics_as_a_naive_matcher_says(
    topics: set[tuple[str, ...]], gone: int, pattern: list[str]
) -> None:
    tree: TopicTree[tuple[str, ...]] = TopicTree()
    for topic in topics:
        tree.put(list(topic), topic)
    left = {topic for number, topic in enumerate(sorted(topics)) if not gone >> number & 1}
    for topic in topics - left:
        tree.remove(list(topic))
    found, place = tree.find(pattern, most=100, steps=1_000)
    assert place is None
    assert found == sorted(topic for topic in left if naive_mqtt(pattern, list(topic)))


@given(
    topics=st.sets(st.lists(LEVEL, min_size=1, max_size=4).map(tuple), max_size=8),
    changes=st.lists(st.lists(LEVEL, min_size=1, max_size=4).map(tuple), max_size=8),
    pattern=MQTT_FILTER,
    most=st.integers(1, 3),
    steps=st.integers(1, 5),
)
def test_a_walk_goes_on_where_it_was_whatever_comes_and_goes(
    topics: set[tuple[str, ...]],
    changes: list[tuple[str, ...]],
    pattern: list[str],
    most: int,
    steps: int,
) -> None:
    """What stays is found once; what comes or goes meanwhile at most once."""
    tree: TopicTree[tuple[str, ...]] = TopicTree()
    for topic in topics:
        tree.put(list(topic), topic)
    there = set(topics)
    found: list[tuple[str, ...]] = []
    place = None
    turns = 0
    while turns == 0 or place is not None:
        turns += 1
        assert turns < 1_000
        piece, place = tree.find(pattern, place, most=most, steps=steps)
        assert len(piece) <= most
        found += piece
        if changes:
            topic = changes.pop()
            if topic in there:
                tree.remove(list(topic))
                there.remove(topic)
                topics.discard(topic)
            else:
                tree.put(list(topic), topic)
                there.add(topic)
    assert len(found) == len(set(found))
    assert {topic for topic in topics if naive_mqtt(pattern, list(topic))} <= set(found)
    assert all(naive_mqtt(pattern, list(topic)) for topic in found)


@pytest.mark.parametrize("filters", ["apart", "alike", "wild"])
def test_deep_patterns_cost_few_nodes(filters: str) -> None:
    """What is made for a pattern does not grow with its levels, wherever it differs from others."""
    rng = random.Random(filters)
    trie: Trie[int] = Trie("+", "#")
    words = {"apart": [f"{at}" for at in range(1_000)], "alike": ["a", "b"], "wild": ["a", "+"]}[filters]
    patterns = [[rng.choice(words) for _ in range(190)] for _ in range(300)]
    for number, pattern in enumerate(patterns):
        trie.add(pattern, number)
    assert nodes_of(trie) <= 2 * len(patterns) + 1
    for number, pattern in enumerate(patterns):
        assert number in trie.match(["a" if level == "+" else level for level in pattern])
        assert trie.remove(pattern, number)
    assert nodes_of(trie) == 1


def nodes_of(trie: Trie[int]) -> int:
    stack, count = [trie._root], 0
    while stack:
        node = stack.pop()
        count += 1
        stack += node.children.values()
    return count

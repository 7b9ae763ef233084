"""Patterns: what they take, what they capture, and how two of them relate."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MappingError
from gateway.mapping.compiler import compile_level_test
from gateway.mapping.patterns import (
    PATTERN_LEVELS_MAX,
    Pattern,
    PatternToken,
    TokenKind,
    covers,
    parse_tokens,
    witness,
)
from gateway.model.address import Address
from gateway.protocols import DIALECTS
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address

A = ("a",)


def pattern(protocol: str, text: str, scope: str = "") -> Pattern:
    return Pattern(DIALECTS[protocol], parse_tokens(DIALECTS[protocol], text), scope)


@pytest.mark.parametrize(
    "text, topic, captures",
    [
        ("a/b", "a/b", {}),
        ("a/b", "a/b/c", None),
        ("a/b", "a", None),
        ("a/+", "a/", {}),
        ("a/+", "a", None),
        ("a/#", "a", {}),
        ("a/#", "a/b/c", {}),
        ("#", "a", {}),
        ("#", "$SYS/x", None),
        ("+/x", "$SYS/x", None),
        ("{first}/x", "$SYS/x", None),
        ("$SYS/#", "$SYS/x", {}),
        ("plant/{line}/{rest...}", "plant/1", {"line": ("1",), "rest": ()}),
        ("plant/{line}/{rest...}", "plant/1/b//c", {"line": ("1",), "rest": ("b", "", "c")}),
        ("plant/{line}/{rest...}", "plant", None),
        ("{a}/{b}", "/", {"a": ("",), "b": ("",)}),
        ("{a}/é", "ü/é", {"a": ("ü",)}),
        ("v1.2/{a}", "v1.2/x", {"a": ("x",)}),
    ],
)
def test_topics(text: str, topic: str, captures: dict[str, tuple[str, ...]] | None) -> None:
    made = pattern("mqtt", text)
    assert made.match(topic_address(topic)) == captures
    assert (made.mismatch(topic_address(topic)) == "") == (captures is not None)


@pytest.mark.parametrize(
    "text, key, captures",
    [
        ("a.b", "a.b", {}),
        ("", "", {}),
        ("*", "", None),
        ("#", "", {}),
        ("#", "a.b", {}),
        ("a.*.c", "a.b.c", {}),
        ("a.*.c", "a.c", None),
        ("a.#.c", "a.c", {}),
        ("a.#.c", "a.c.c", {}),
        ("#.b.#", "a.b", {}),
        ("{left...}.x.{right...}", "a.x.x.b", {"left": ("a", "x"), "right": ("b",)}),
        ("{left...}.x.{right...}", "x", {"left": (), "right": ()}),
        ("{left...}.x.{right...}", "a.b", None),
        ("a/{b}", "a/x", None),
    ],
)
def test_binding_keys(text: str, key: str, captures: dict[str, tuple[str, ...]] | None) -> None:
    if text == "a/{b}":
        with pytest.raises(MappingError, match="whole level"):
            pattern("amqp091", text)
        return
    made = pattern("amqp091", text, "ex")
    assert made.match(amqp_address("ex", key)) == captures
    assert (made.mismatch(amqp_address("ex", key)) == "") == (captures is not None)
    assert made.match(amqp_address("other", key)) is None


@given(
    st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=5),
    st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=6),
)
def test_binding_keys_agree_with_a_regular_expression(tokens: list[str], levels: list[str]) -> None:
    words = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    expression = "".join(words.get(token, r"\." + token) for token in tokens)
    expected = re.fullmatch(expression, "".join("." + level for level in levels)) is not None
    made = Pattern(DIALECTS["amqp091"], parse_tokens(DIALECTS["amqp091"], ".".join(tokens)))
    assert (made.match_levels(tuple(levels)) is not None) == expected


def test_many_rests_do_not_explode() -> None:
    made = pattern("amqp091", ".".join(["#", "a"] * 20))
    assert made.match(amqp_address("", ".".join(A * 100) + ".b")) is None


@pytest.mark.parametrize(
    "address, queue, matches",
    [
        (amqp_address("any", "key"), "jobs", True),
        (amqp_address("", "jobs"), "", True),
        (amqp_address("", "other"), "", False),
        (amqp_address("any", "jobs"), "", False),
        (amqp_address("", "jobs"), "other", False),
        (topic_address("jobs"), "", False),
    ],
)
def test_queues(address: Address, queue: str, matches: bool) -> None:
    made = Pattern(DIALECTS["amqp091"], parse_tokens(DIALECTS["amqp091"], "#"), queue="jobs")
    assert (made.match(address, queue) is not None) == matches
    assert (made.mismatch(address, queue) == "") == matches


def test_what_came_from_a_named_queue_is_not_for_the_exchanges() -> None:
    assert pattern("amqp091", "#", "ex").match(amqp_address("ex", "k"), "jobs") is None


def test_destinations_of_a_service() -> None:
    made = pattern("amqpfast", "plant.{name}", "queue")
    assert made.match(fast_address("queue", "plant.x")) == {"name": ("x",)}
    assert made.match(fast_address("topic", "plant.x")) is None
    assert "service" in made.mismatch(fast_address("topic", "plant.x"))


@pytest.mark.parametrize(
    "protocol, text, reason",
    [
        ("mqtt", "a/#/b", "may only be the last level"),
        ("mqtt", "{a...}/b", "may only be the last level"),
        ("mqtt", "a+/b", "whole level"),
        ("mqtt", "dev-{id}/b", "whole level"),
        ("mqtt", "{a}/{a}", "used twice"),
        ("mqtt", "{topic}/x", "reserved word"),
        ("mqtt", "{1a}", "whole level"),
        ("mqtt", "", "at least one character"),
        ("amqp091", "a.b*", "whole level"),
    ],
)
def test_what_is_no_pattern(protocol: str, text: str, reason: str) -> None:
    with pytest.raises(MappingError, match=reason):
        parse_tokens(DIALECTS[protocol], text)


@pytest.mark.parametrize(
    "protocol, text, shown, prefix",
    [
        ("mqtt", "plant/{line}/x/{rest...}", "plant/+/x/#", "plant/"),
        ("mqtt", "plant/x", "plant/x", "plant/x"),
        ("amqp091", "{a...}.b.{c}", "#.b.*", ""),
        ("amqpfast", "a.b.#", "a.b.#", "a.b."),
    ],
)
def test_as_a_subscription(protocol: str, text: str, shown: str, prefix: str) -> None:
    made = pattern(protocol, text)
    assert (made.show(), made.literal_prefix()) == (shown, prefix)


@pytest.mark.parametrize(
    "address, reason",
    [
        ("x/b/c", "level 1 is 'x', not 'a'"),
        ("a", "fewer than the pattern"),
        ("a/b/c/d", "only 3"),
        ("a/b/x", "level 3"),
    ],
)
def test_mismatches_name_the_level(address: str, reason: str) -> None:
    assert reason in pattern("mqtt", "a/+/c").mismatch(topic_address(address))


def test_mismatch_behind_a_rest() -> None:
    assert "do not match '#.b'" in pattern("amqp091", "#.b", "e").mismatch(amqp_address("e", "a"))


@pytest.mark.parametrize(
    "wide, narrow, expected",
    [
        ("#", "a/b", True),
        ("#", "$SYS/x", False),
        ("a/#", "a", True),
        ("a/+", "a/b", True),
        ("a/+", "a/#", False),
        ("a/b", "a/+", False),
        ("+/+", "{x}/b", True),
        ("a/#", "a/+/{c...}", True),
    ],
)
def test_covers(wide: str, narrow: str, expected: bool) -> None:
    assert covers(pattern("mqtt", wide), pattern("mqtt", narrow)) == expected


@pytest.mark.parametrize(
    "one, other, meeting",
    [
        ("a.*", "*.b", ("a", "b")),
        ("a.#", "#.b", ("a", "b")),
        ("a.b", "a.c", None),
        ("#", "a.*.c", ("a", "x", "c")),
        ("a.#.z", "*.b.c.z", ("a", "b", "c", "z")),
        ("*", "*.*", None),
        ("#", "#", ()),
    ],
)
def test_witness(one: str, other: str, meeting: tuple[str, ...] | None) -> None:
    first, second = pattern("amqp091", one), pattern("amqp091", other)
    found = witness(first, second)
    assert found == meeting
    if found is not None:
        assert first.match_levels(found) is not None
        assert second.match_levels(found) is not None


TOKENS = st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=5).map(".".join)


@given(TOKENS, TOKENS, st.lists(st.sampled_from(["a", "b", "x"]), max_size=5).map(tuple))
def test_witness_and_covers_agree_with_match(one: str, other: str, levels: tuple[str, ...]) -> None:
    first, second = pattern("amqp091", one), pattern("amqp091", other)
    if first.match_levels(levels) is not None and second.match_levels(levels) is not None:
        assert witness(first, second) is not None
    if covers(first, second) and second.match_levels(levels) is not None:
        assert first.match_levels(levels) is not None


def test_patterns_of_different_scopes_never_meet() -> None:
    assert witness(pattern("amqp091", "#", "a"), pattern("amqp091", "#", "b")) is None
    assert witness(pattern("mqtt", "+/x"), pattern("mqtt", "$a/x")) is None
    assert not covers(pattern("amqp091", "#", "a"), pattern("amqp091", "#", "b"))


@pytest.mark.parametrize("count", [11, 60])
def test_many_rests_are_compared_in_no_time(count: int) -> None:
    """What is looked at grows with the product of the patterns' lengths; it doubled with each rest before."""
    one = pattern("amqp091", ".".join(["#", "a"] * count))
    other = pattern("amqp091", ".".join(["#", "a"] * count) + ".b")
    assert not covers(one, other)
    assert not covers(other, one)
    assert covers(one, one)
    assert witness(one, other) is None
    assert witness(one, one) == ("a",) * count
    assert one.match_levels(("a",) * 2_000) == {}
    assert other.match_levels(("a",) * 2_000) is None


def test_long_patterns_do_not_nest() -> None:
    levels = tuple(f"l{at}" for at in range(PATTERN_LEVELS_MAX))
    one = pattern("amqp091", ".".join(levels))
    wild = pattern("amqp091", ".".join(["*"] * PATTERN_LEVELS_MAX))
    assert one.match_levels(levels) == {}
    assert covers(wild, one)
    assert witness(wild, one) == levels
    with pytest.raises(MappingError, match="at most"):
        pattern("amqp091", ".".join(["*"] * (PATTERN_LEVELS_MAX + 1)))


@given(st.lists(st.text(min_size=1, alphabet="ab'\"\\{}\n"), min_size=1, max_size=4))
def test_literals_of_a_shape_stay_apart(literals: list[str]) -> None:
    """Routes of one shape share their compiled code, and each compares with its own literals."""
    tokens = tuple(PatternToken(TokenKind.LITERAL, text) for text in literals)
    others = tuple(PatternToken(TokenKind.LITERAL, f"{text}x") for text in literals)
    one, other = (compile_level_test(Pattern(DIALECTS["mqtt"], of)) for of in (tokens, others))
    assert one is not None
    assert other is not None
    assert one.__code__ is other.__code__
    levels = tuple(literals)
    assert one(levels)
    assert not other(levels)
    assert other(tuple(f"{text}x" for text in literals))

"""What an expression may cost: counted in steps before it runs, so that no message holds up the others."""

from __future__ import annotations

import cel
import orjson
import pytest

from gateway.errors import MappingError
from gateway.mapping.conditions import (
    CONDITION_BODY_MAX,
    CONDITION_VALUES_MAX,
    HEADERS_DEPTH_MAX,
    Condition,
)
from gateway.mapping.expressions import (
    DEPTH_MAX,
    EXPRESSION_BYTES_MAX,
    PATTERN_BYTES_MAX,
    STEPS_MAX,
    Expression,
    UnsupportedExpression,
)
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, property_set
from gateway.protocols.mqtt.dialect import topic_address

FEW, MANY = 100, 1_000  # sizes of messages


class Counts:
    unparsable = 0
    undecided = 0


def growth(text: str) -> float:
    """How much dearer the expression gets when a message is ten times as large."""
    cost = Expression(text)
    return cost.steps(MANY) / cost.steps(FEW)


def holds(text: str, body: object, headers: tuple[tuple[str, Value], ...] = ()) -> tuple[bool, int, int]:
    counts = Counts()
    message = Message(topic_address("a"), orjson.dumps(body), property_set(Properties(headers=headers)))
    found = Condition(text, ()).holds(message, {}, counts)
    return found, counts.unparsable, counts.undecided


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "body.a == 1 && (headers.kind in ['a', 'b'] || !has(body.c))",
        "body.list.exists(x, x.temperature > 80.0 && x.name.startsWith('a'))",
        "body.list.exists(x, x.tags.exists(t, t == 'red'))",
        "body.list.all(x, x.tags.all(t, t.parts.exists_one(p, p.size() > 1)))",
        "body.text.matches('^[a-z]{3,8} [0-9]+$')",
        "body.list.exists(x, [1, 2, 3].exists(n, n == x))",
        "(body.a ? body.b : body.c) == {'a': [1, 'x']}",
        "timestamp(body.at) > timestamp('2020-01-01T00:00:00Z') // since then",
        r'''r"a\" == b'b' + """c"""''',
    ],
)
def test_most_cost_what_the_message_is_large(text: str) -> None:
    assert growth(text) <= 11
    assert Expression(text).steps(FEW) < STEPS_MAX


@pytest.mark.parametrize(
    "text, least",
    [
        ("body.exists(x, body.exists(y, x == y))", 50),
        ("body.a.exists(x, x in body.b)", 50),
        ("body.list.exists(x, x.tags.exists(t, t == x.name))", 50),  # a name for each of its tags
        ("body.filter(x, x > 1) == []", 50),
        ("body.map(x, x.a) == []", 50),
        ("body.a.exists(x, body.b.exists(y, body.c.exists(z, x + y == z)))", 500),
        ("body.exists(x, body.exists(y, x.t.exists(u, u == y)))", 50),
    ],
)
def test_what_goes_through_the_same_again_costs_more(text: str, least: float) -> None:
    assert growth(text) >= least


@pytest.mark.parametrize(
    "text, reason",
    [
        ("'a'" + " + 'a'" * 1_000 + " == body", "bytes"),
        ("(" * (DEPTH_MAX + 1) + "1" + ")" * (DEPTH_MAX + 1) + " == 1", "nested deeper"),
        ("[" * (DEPTH_MAX + 1) + "1" + "]" * (DEPTH_MAX + 1) + " == 1", "nested deeper"),
        ("true ? 1 : " * (DEPTH_MAX + 1) + "1", "nested deeper"),
        ("size(" * (DEPTH_MAX + 1) + "body" + ")" * (DEPTH_MAX + 1), "nested deeper"),
        ("[1]" + ".map(x, [x, x])" * 17 + " == []", "too many steps"),
        ("['a']" + ".map(x, x + x)" * 17 + " == []", "too many steps"),
        ("body" + ".map(x, [x, x])" * 17 + " == []", "too many steps"),
        ("[1,1,1,1,1,1].all(x, " * 8 + "true" + ")" * 8, "too many steps"),
        ("body.all(x, " * 8 + "true" + ")" * 8, "nested too deep"),
        ("body.map(x, body)", "not names from outside"),
        ("body.a.matches(body.b)", "one text in quotes"),
        ("body.matches('a' + body.b)", "one text in quotes"),
        ("body.matches(('a'))", "one text in quotes"),
        ("body.matches('((a{99}){99}){99}')", "too many steps"),
        (r"body.matches('\\w{100}')", "too many steps"),
        (r"body.matches(r'[\w\d]{100}')", "too many steps"),
        (r"body.matches('\x5cw{100}')", "octal"),
        ("body.matches('(?ix)a{ 1000 }')", "verbose"),
        ("body.matches('" + "a" * PATTERN_BYTES_MAX + "')", "a pattern has at most"),
    ],
)
def test_what_is_too_dear_for_any_message_is_refused(text: str, reason: str) -> None:
    if "bytes" not in reason:
        assert len(text) <= EXPRESSION_BYTES_MAX
    else:
        text += " || true" * (EXPRESSION_BYTES_MAX // 8)
    with pytest.raises(MappingError) as caught:
        Condition(text, ())
    assert reason in str(caught.value)


@pytest.mark.parametrize("sign", ["+", "&&", "||", "*", ".a", "[0]", "==", "!"])
def test_the_longest_chains_are_read_and_evaluated(sign: str) -> None:
    """Neither this parser nor the library's comes to the end of its stack."""
    if sign == "!":
        text = sign * (EXPRESSION_BYTES_MAX - 4) + "body"
    elif sign[0] in ".[":
        text = "body" + sign * ((EXPRESSION_BYTES_MAX - 4) // len(sign))
    elif sign == "+":
        text = "1" + "+1" * 400  # more are refused: each copies what was before
    else:
        text = "1" + f"{sign}1" * ((EXPRESSION_BYTES_MAX - 1) // (len(sign) + 1))
    counts = Counts()
    assert Condition(text, ()).holds(Message(topic_address("a"), b"0"), {}, counts) in (True, False)


def test_a_text_that_is_not_understood_is_refused_in_the_words_of_the_library() -> None:
    with pytest.raises(UnsupportedExpression):
        Expression("Point{x: 1}")
    with pytest.raises(MappingError, match="the cost of evaluating it is unknown"):
        Condition("Point{x: 1}", ())
    with pytest.raises(MappingError, match="not a CEL expression: "):
        Condition("1 +", ())


def test_a_message_too_large_for_its_expression_leaves_it_undecided() -> None:
    text = "body.a.exists(x, body.b.exists(y, x + y == 5))"
    assert holds(text, {"a": [1, 2], "b": [3]}) == (True, 0, 0)
    many = list(range(CONDITION_VALUES_MAX // 2 - 10))
    assert holds(text, {"a": many, "b": many}) == (False, 0, 1)


def test_a_body_of_too_many_values_is_no_body() -> None:
    """Commas in a text are not values."""
    assert holds("size(body) > 1", [1] * CONDITION_VALUES_MAX) == (False, 1, 0)
    assert holds("size(body) > 1", {"k": [{"x": 1}] * CONDITION_VALUES_MAX}) == (False, 1, 0)
    assert holds("size(body) > 1", [1] * (CONDITION_VALUES_MAX - 1)) == (True, 0, 0)
    assert holds("size(body) > 1", "," * (CONDITION_BODY_MAX // 2)) == (True, 0, 0)


def test_a_body_as_deep_as_json_may_be_is_evaluated() -> None:
    body = b"[" * 1_000 + b"]" * 1_000
    counts = Counts()
    condition = Condition("size(body) == 1 && body == body && body[0][0] != 1", ())
    assert condition.holds(Message(topic_address("a"), body), {}, counts) is True


def test_headers_too_deep_or_too_many_are_undecided() -> None:
    deep = Value(ValueType.INT8, 1)
    for _ in range(HEADERS_DEPTH_MAX - 1):
        deep = Value(ValueType.ARRAY, (deep,))
    assert holds("'h' in headers", 1, (("h", deep),)) == (True, 0, 0)
    assert holds("'h' in headers", 1, (("h", Value(ValueType.TABLE, (("t", deep),))),)) == (False, 0, 1)
    many = tuple((str(at), Value(ValueType.INT8, 1)) for at in range(CONDITION_VALUES_MAX + 1))
    assert holds("'1' in headers", 1, many[:-1]) == (True, 0, 0)
    assert holds("'1' in headers", 1, many) == (False, 0, 1)


def test_a_panic_of_the_library_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, so that whoever catches everything does not catch it."""
    panic = type("PanicException", (BaseException,), {})

    class Program:
        def references(self) -> dict[str, list[str]]:
            return {"variables": ["body"], "functions": []}

        def execute(self, known: object) -> object:
            raise panic

    monkeypatch.setattr(cel, "compile", lambda text: Program())
    assert holds("body", 1) == (False, 0, 1)

    def refuse(text: str) -> None:
        raise panic

    monkeypatch.setattr(cel, "compile", refuse)
    with pytest.raises(MappingError, match="that the gateway can compile"):
        Condition("body", ())


def test_what_is_no_panic_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cel, "compile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Condition("body", ())

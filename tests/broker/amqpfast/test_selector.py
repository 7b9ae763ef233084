"""Selectors: rows of texts and what they make of a message that says these things."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gateway import containment
from gateway.broker.amqpfast import selector
from gateway.broker.amqpfast.selection import LanguageUnknown, selection
from gateway.broker.amqpfast.selector import DEPTH_MAX, STEPS_MAX, SelectorRefused, compile_selector
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.protocols.amqpfast.dialect import fast_address

SAID = {"a": "text", "n": 3, "f": 2.5, "yes": True, "no": False, "q": "it's 100%", "$x#1": 1}

HOLDS = [
    "a = 'text'",
    "a <> 'other' AND n >= 3",
    "n BETWEEN 1 AND 3",
    "n NOT BETWEEN 4 AND 5",
    "f > 2 and F IS NULL",
    "missing IS NULL",
    "a is not null",
    "a IN ('x', 'text')",
    "a NOT IN ('x')",
    "a LIKE 't%'",
    "a LIKE '_ex_'",
    "a LIKE '%e%t'",
    "a LIKE '%'",
    "a NOT LIKE 'te'",
    "q LIKE '%!%' ESCAPE '!'",
    "q = 'it''s 100%'",
    "yes",
    "NOT no",
    "yes = TRUE and no <> true",
    "n * 2 + 1 = 7",
    "n + 2 * 2 = 7",
    "(n + 2) * 2 = 10",
    "-n < -2.9",
    "- -n = 3",
    "7 / 2 = 3 AND -7 / 2 = -3",
    "7.0 / 2 = 3.5 AND 1e1 = 10 AND .5 < 1.",
    "missing = 1 OR yes",
    "yes OR missing",
    "NOT (missing = 1 AND no)",
    "$x#1 = 1",
    "TRUE",
]
HOLDS_NOT = [
    "a = 'Text'",
    "A = 'text'",
    "missing = 1",
    "NOT missing = 1",
    "missing <> 'x'",
    "missing LIKE '%'",
    "missing NOT IN ('x')",
    "a = 3",
    "a <> 3",
    "a > 'a'",
    "n = 'text'",
    "n LIKE '3'",
    "n IN ('3')",
    "yes > no",
    "a",
    "n / 0 = 1",
    "a + 1 = 2",
    "missing = 1 AND yes",
    "a LIKE 'text_'",
    "a LIKE 'tex'",
    "FALSE",
]
NO_SELECTOR = [
    "",
    "a =",
    "= a",
    "a AND",
    "3",
    "'text'",
    "n + 1",
    "NOT 3",
    "a b",
    "(a = 1",
    "a = 1)",
    "a = 'open",
    "a LIKE b",
    "a LIKE 'x!' ESCAPE '!'",
    "a LIKE 'x' ESCAPE '!!'",
    "a IN ()",
    "a IN (1)",
    "a NOT = 1",
    "a IS 1",
    "a BETWEEN 1",
    "a == 1",
    "a = 1 ; b",
    "5x = 1",
    "(a = 1) + 1 = 2",
    "n = 1234567890123456789012",
    "(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1),
    "NOT " * (DEPTH_MAX + 1) + "a",
    "a = '" + "x" * 5_000 + "'",
]


@pytest.mark.parametrize("text", HOLDS)
def test_it_holds(text: str) -> None:
    assert compile_selector(text)(SAID) is True


@pytest.mark.parametrize("text", HOLDS_NOT)
def test_it_does_not_hold(text: str) -> None:
    assert compile_selector(text)(SAID) is False


@pytest.mark.parametrize("text", NO_SELECTOR)
def test_it_is_no_selector(text: str) -> None:
    with pytest.raises(SelectorRefused):
        compile_selector(text)


def test_a_pattern_does_not_look_back() -> None:
    selects = compile_selector("a LIKE '" + "%x" * 500 + "y'")
    assert not selects({"a": "x" * 60_000})


LONG = 1_300  # parts: as many as there is room for


@pytest.mark.parametrize(
    "text, holds",
    [
        ("+".join(["n"] * LONG) + f" = {5 * LONG}", True),
        ("1" + "*1" * LONG + " = 1", True),
        (" OR ".join(["t"] * 500), True),
        (" AND ".join(["t"] * 500), True),
        ("n = 1 OR " * 300 + "t", True),
        ("t AND " * 500 + "n = 1", False),
        ("n IN ('" + "','".join(["x"] * 900) + "')", False),
        ("n" + "*n" * 100 + " > 0", False),  # beyond 64 bits is no number
    ],
)
def test_chains_as_long_as_a_selector_may_be(text: str, holds: bool) -> None:
    """They are loops: no length comes to the end of the stack."""
    assert compile_selector(text)({"n": 5, "t": True}) is holds


@pytest.mark.parametrize("opening", ["(", "NOT ", "-", "+", "NOT (", "-("])
def test_the_deepest_nests_are_evaluated(opening: str) -> None:
    deep = DEPTH_MAX // (2 if len(opening) > 1 and "(" in opening else 1)
    text = opening * deep + ("t" if "NOT" in opening else "n") + ")" * (opening.count("(") * deep)
    selects = compile_selector(text if "NOT" in opening else text + " = 5")
    assert selects({"n": 5, "t": True}) is True
    with pytest.raises(SelectorRefused):
        compile_selector(opening * (DEPTH_MAX + 1) + "n" + ")" * (opening.count("(") * (DEPTH_MAX + 1)))


@pytest.mark.parametrize(
    "pattern",
    [
        "%" + "_" * 100 + "b%",
        "%" + "a" * 900 + "b" + "a" * 900 + "%",
        "%" + "a_" * 400 + "b%",
        "%_a%_b%_c%_d%" * 40,
    ],
)
def test_like_gives_up_before_it_takes_long(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it may spend is counted in steps, and is the same whatever the text is."""
    spent: list[int] = []

    class Counted(selector.SelectorEvaluation):
        def __init__(self, known: selector.PropertyLookup) -> None:
            super().__init__(known)
            spent.append(0)

        def check(self, steps: int) -> None:
            super().check(steps)
            spent[-1] += steps

    monkeypatch.setattr(selector, "SelectorEvaluation", Counted)
    selects = compile_selector(f"a LIKE '{pattern}'")
    for size in (100, 10_000, 1_000_000):
        assert selects({"a": "a" * size}) is False
    assert max(spent) <= 2 * STEPS_MAX


@pytest.mark.parametrize(
    "pattern, text, holds",
    [
        ("%b_d%", "abcbxd", True),
        ("a%_", "a", False),
        ("a%_", "ab", True),
        ("%__%", "a", False),
        ("%__%", "ab", True),
        ("%%", "", True),
        ("_%_", "a", False),
        ("%a!%b%", "xa%by", True),
        ("%a!%b%", "xacby", False),
        ("a_%b_%c", "axxbxxc", True),
        ("a_%b_%c", "abc", False),
        ("%.%", "abc", False),
        ("%\n_%", "a\nb", True),
    ],
)
def test_like(pattern: str, text: str, holds: bool) -> None:
    assert compile_selector(f"a LIKE '{pattern}' ESCAPE '!'")({"a": text}) is holds


def test_equal_long_texts_have_a_price() -> None:
    text = "x" * 1_000_000
    known = {"a": text, "b": text[:-1] + "x"}
    assert compile_selector("a = b")(known) is True
    assert compile_selector("a = b AND " * 300 + "a = b")(known) is False


def test_a_name_is_found_among_many_headers() -> None:
    """The first of that name counts, as among few."""
    few = (("n", string("first")), ("n", string("second")))
    many = (*((f"h{at}", string("x")) for at in range(5_000)), *few)
    for headers in (few, many):
        message = Message(fast_address("queue", "q"), b"", property_set(Properties(headers=headers)))
        selects = selection("", b"n = 'first' AND none IS NULL AND PRIORITY = 0")
        assert selects is not None
        assert selects(message) is True


def test_what_nobody_foresaw_selects_nothing_and_is_counted() -> None:
    message = Message(fast_address("queue", "q"), b"", expires=float("inf"))  # no integer
    selects = selection("", b"EXPIRATION > 0")
    assert selects is not None
    before = containment.counted["message"]
    assert selects(message) is False
    assert containment.counted["message"] == before + 1


SAYS = Properties(
    content_type="text/plain",
    message_id="id",
    correlation=b"c",
    priority=7,
    timestamp=12,
    headers=(
        ("weight", Value(ValueType.DECIMAL, Decimal("1.5"))),
        ("TYPE", string("mine")),
        ("b", string("x")),
    ),
)
OF_MESSAGES = [
    ("Application/JMS", b"weight = 1.5 AND TYPE = 'mine'", True),
    ("", b"PRIORITY = 7 AND PERSISTENT AND IDENTIFIER = 'id' AND MIME_TYPE LIKE 'text/%'", True),
    ("", b"JMSPriority = 7 AND JMSDeliveryMode = 'PERSISTENT' AND JMSTimestamp = 12000", True),
    ("", b"CORRELATION_ID = 'c' AND JMSCorrelationID = 'c' AND EXPIRATION = 0", True),
    ("", b"ENCODING IS NULL AND REPLY_TO IS NULL", True),
    ("application/CEL", b"durable && headers.b == 'x' && content_type.startsWith('text')", True),
    ("application/cel", b"headers.none == 1", False),
]


@pytest.mark.parametrize("mime_type, data, holds", OF_MESSAGES)
def test_what_a_message_says(mime_type: str, data: bytes, holds: bool) -> None:
    message = Message(fast_address("queue", "q"), b"", property_set(SAYS), durable=True)
    selects = selection(mime_type, data)
    assert selects is not None
    assert selects(message) is holds


def test_languages() -> None:
    assert selection("text/whatever", b"") is None
    assert selection("", b"  ") is None
    with pytest.raises(LanguageUnknown):
        selection("text/whatever", b"x")
    with pytest.raises(SelectorRefused):
        selection("", b"\xff")
    with pytest.raises(SelectorRefused):
        selection("application/cel", b"nothing == 1")

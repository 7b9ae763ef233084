"""Selectors: rows of texts and what they make of a message that says these things."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gateway.broker.amqpfast.selection import LanguageUnknown, selection
from gateway.broker.amqpfast.selector import DEPTH_MAX, SelectorRefused, compile_selector
from gateway.model.address import FastAddress
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, property_set, string

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


@pytest.mark.parametrize("mime_type, octets, holds", OF_MESSAGES)
def test_what_a_message_says(mime_type: str, octets: bytes, holds: bool) -> None:
    message = Message(FastAddress("queue", "q"), b"", property_set(SAYS), durable=True)
    selects = selection(mime_type, octets)
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

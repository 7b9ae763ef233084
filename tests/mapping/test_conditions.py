"""Conditions: what they see, and that nothing breaks them."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MappingError, RemoteProtocolError
from gateway.mapping.conditions import CONDITION_BODY_MAX, Condition
from gateway.model.message import Message, Sender
from gateway.model.properties import Properties, PropertySet, Value, ValueType, property_set, string
from gateway.protocols.mqtt.dialect import topic_address


class Counts:
    unparsable = 0
    undecided = 0


HEADERS = (
    ("a", string("x")),
    ("n", Value(ValueType.INT32, 7)),
    ("many", string("1")),
    ("many", string("2")),
    ("many", string("3")),
    ("d", Value(ValueType.DECIMAL, Decimal("1.5"))),
    ("t", Value(ValueType.TABLE, (("in", Value(ValueType.ARRAY, (string("q"),))),))),
    ("none", Value(ValueType.VOID, None)),
)
ADDRESS = {"topic": "a/b", "line": "l1"}


def message(body: bytes = b'{"temperature": 99, "list": [1, 2]}') -> Message:
    properties = property_set(Properties(content_type="application/json", headers=HEADERS))
    return Message(topic_address("a/b"), body, properties, 1, True, False, sender=Sender("mqtt", "c1", "ann"))


def decide(text: str, one: Message | None = None) -> tuple[bool, int, int]:
    counts = Counts()
    condition = Condition(text, ADDRESS)
    return (
        condition.holds(one or message(), condition.fixed(ADDRESS), counts),
        counts.unparsable,
        counts.undecided,
    )


@pytest.mark.parametrize(
    "text",
    [
        "body.temperature > 80.0 || retain",
        "has(body.list) && size(body.list) == 2",
        "body.list.exists(one, one == 2)",
        "line == 'l1' && topic.startsWith('a/')",
        "qos == 1 && durable && !retain",
        "headers.a == 'x' && headers.n == 7 && headers.d == 1.5",
        "headers.many == ['1', '2', '3']",
        "headers.t['in'][0] == 'q' && headers.none == null",
        "'a' in headers && !('z' in headers)",
        "content_type == 'application/json'",
        "client_id == 'c1' && user == 'ann'",
        "size == 35",
        "topic.matches('^a/.$')",
        "true",
    ],
)
def test_true(text: str) -> None:
    assert decide(text) == (True, 0, 0)


@pytest.mark.parametrize("text", ["body.temperature < 80", "retain", "false", "'text'", "1"])
def test_false(text: str) -> None:
    assert decide(text) == (False, 0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "body.humidity > 1",
        "body.temperature > 'a'",
        "headers.z == 1",
        "body.list[9] == 1",
        "body.temperature / 0 == 1",
        "timestamp(topic) > timestamp('2020-01-01T00:00:00Z')",
        "topic.matches('(')",
    ],
)
def test_undecided_is_false_and_counted(text: str) -> None:
    assert decide(text) == (False, 0, 1)


@pytest.mark.parametrize(
    "body", [b"", b"\xff\x00binary", b"{", b'{"a": NaN}', b"[" * 100_000, b" " * CONDITION_BODY_MAX + b"1"]
)
def test_a_body_that_is_not_json_is_false_and_counted(body: bytes) -> None:
    assert decide("body != null", message(body)) == (False, 1, 0)


NO_JSON = [
    # What the expression is when `body` is an error, as CEL has it: an error is absorbed by what decides.
    ("true || body.a > 1", (True, 0, 0)),
    ("body.a > 1 || true", (True, 0, 0)),
    ("false || body.a > 1", (False, 1, 0)),
    ("body.a > 1 || false", (False, 1, 0)),
    ("false && body.a > 1", (False, 0, 0)),
    ("body.a > 1 && false", (False, 0, 0)),
    ("true && body.a > 1", (False, 1, 0)),
    ("body.a > 1 && true", (False, 1, 0)),
    ("!(body.a > 1)", (False, 1, 0)),
    ("true ? true : body.a > 1", (True, 0, 0)),
    ("false ? body.a > 1 : true", (True, 0, 0)),
    ("body.a > 1 ? true : true", (False, 1, 0)),
    ("has(body.a) || true", (True, 0, 0)),
    ("has(body.a)", (False, 1, 0)),
    ("client_id != 'x' || body.celsius < 70.0", (True, 0, 0)),
    ("qos == 3 && body.celsius < 70.0", (False, 0, 0)),
]


@pytest.mark.parametrize("text, found", NO_JSON)
def test_an_error_is_absorbed_by_what_decides(text: str, found: tuple[bool, int, int]) -> None:
    assert decide(text, message(b"\xff\x00binary")) == found


def test_a_body_is_not_parsed_unless_the_expression_says_body() -> None:
    assert decide("qos == 1", message(b"\xff")) == (True, 0, 0)


@given(st.binary(max_size=40))
def test_no_body_breaks_a_condition(body: bytes) -> None:
    assert decide("body.a.b[0] > 1 || retain", message(body))[0] is False


@pytest.mark.parametrize("text", ["headers.a == 'x'", "content_type == ''"])
def test_malformed_properties_are_false_and_counted(text: str) -> None:
    def decode(raw: bytes) -> Properties:
        raise RemoteProtocolError("malformed", reason=0x81)

    broken = Message(topic_address("a"), b"1", PropertySet("mqtt", b"\xff", decode))
    assert decide(text, broken) == (False, 0, 1)
    assert decide(f"{text} || true", broken) == (True, 0, 0)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("body.", "not a CEL expression: "),
        ("", "not a CEL expression"),
        ("bodi.x == 1", "unknown name 'bodi'; did you mean 'body'?"),
        ("zzz == 1", "unknown name 'zzz'; known: body, client_id"),
        ("topic.startWith('a')", "unknown function 'startWith'; did you mean 'startsWith'?"),
        ("frobnicate(1)", "unknown function 'frobnicate'"),
    ],
)
def test_what_is_no_condition(text: str, reason: str) -> None:
    with pytest.raises(MappingError) as caught:
        Condition(text, ADDRESS)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "text, value", [("false", False), ("1 < 2", True), ("1 / 0 == 1", False), ("retain", None)]
)
def test_constants(text: str, value: bool | None) -> None:
    assert Condition(text, ()).constant() is value


@pytest.mark.parametrize("text, per_message", [("topic == 'a'", False), ("line == 'a' && qos == 1", True)])
def test_what_the_address_decides(text: str, per_message: bool) -> None:
    assert Condition(text, ADDRESS).per_message is per_message


def test_one_condition_serves_many_addresses() -> None:
    condition: Condition = Condition("line == 'l2'", ADDRESS)
    holds: Callable[..., bool] = condition.holds
    assert holds(message(), condition.fixed({"line": "l2"}), Counts())
    assert not holds(message(), condition.fixed({"line": "l1"}), Counts())


@pytest.mark.parametrize(
    "text",
    [
        "int(line) == 3",
        "size > 3 && retain == true",
        "body.a == 3 && headers['b'] == 'x'",
        "[1, 2].exists(line, line == 3)",
        "line == null",
        "'3' == line",
    ],
)
def test_comparisons_of_one_kind_are_not_reported(text: str) -> None:
    assert Condition(text, ["line"]).type_error() == ""

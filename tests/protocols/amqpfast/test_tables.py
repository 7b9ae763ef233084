"""Field tables, and the headers of other protocols in their words."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqpfast import tables as t
from gateway.protocols.amqpfast.spec import ReplyCode
from tests.protocols.amqpfast.wires import headers, tables

V = ValueType
NONE: frozenset[str] = frozenset()

ROWS: list[tuple[Headers, str]] = [
    ((), "0000"),
    (
        (("LOGIN", string("Johan")), ("PASSWORD", string("Ok"))),
        "001c 054c4f47494e 53 0005 4a6f68616e 0850415353574f5244 53 0002 4f6b",
    ),
    ((("a", Value(V.INT32, -2)),), "0007 0161 49 fffffffe"),
    ((("a", Value(V.DECIMAL, Decimal("-1.50"))),), "0008 0161 44 02 ffffff6a"),
    ((("$#_9"[:1] + "#_9", Value(V.TIMESTAMP, (1 << 32) - 1)),), "000a 0424235f39 54 ffffffff"),
    ((("a", Value(V.STRING, b"\xff")),), "0006 0161 53 0001 ff"),
]


@pytest.mark.parametrize("table, wire", ROWS)
def test_rows(table: Headers, wire: str) -> None:
    data = bytes.fromhex(wire)
    assert t.encode_table(table) == data
    assert t.decode_table(data) == (table, len(data))
    assert t.decode_table(b"xx" + data + b"yy", 2) == (table, len(data) + 2)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError) as caught:
            t.decode_table(data[:size])
        assert caught.value.reason == ReplyCode.BAD_FIELD_VALUE


@given(tables)
def test_any_table_comes_back(table: Headers) -> None:
    data = t.encode_table(table)
    assert t.decode_table(data) == (table, len(data))


def test_the_first_of_a_name_stands() -> None:
    pair = t.encode_pair("a", Value(V.INT32, 1))
    other = t.encode_pair("a", Value(V.INT32, 2))
    data = t.U16.pack(len(pair) * 2) + pair + other
    assert t.decode_table(data)[0] == (("a", Value(V.INT32, 1)),)


@pytest.mark.parametrize(
    "wire",
    [
        "0003 0161 58",
        "0002 0161",
        "0001 05",
        "0004 0161 49 00",
        "0005 0161 53 0009",
        "0004 01ff 5300",
        "ffff",
    ],
)
def test_what_is_no_table(wire: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        t.decode_table(bytes.fromhex(wire))
    assert caught.value.reason == ReplyCode.BAD_FIELD_VALUE


UNFIT: list[tuple[str, Value]] = [
    ("", string("")),
    ("1a", string("")),
    ("a-b", string("")),
    ("a" * 129, string("")),
    ("a", string("x" * 65_536)),
    ("a", Value(V.INT32, 1 << 31)),
    ("a", Value(V.TIMESTAMP, -1)),
    ("a", Value(V.BOOL, True)),
    ("a", Value(V.DECIMAL, Decimal("1E+2"))),
    ("a", Value(V.DECIMAL, Decimal("NaN"))),
    ("a", Value(V.DECIMAL, Decimal("-0"))),
    ("a", Value(V.DECIMAL, Decimal(1 << 31))),
    ("a", Value(V.DECIMAL, Decimal((0, (1,), -256)))),
]


@pytest.mark.parametrize("name, value", UNFIT)
def test_what_a_table_cannot_hold(name: str, value: Value) -> None:
    with pytest.raises(LocalProtocolError):
        t.encode_table(((name, value),))


def test_a_table_has_a_limit() -> None:
    with pytest.raises(LocalProtocolError):
        t.encode_table(tuple((f"a{at}", string("x" * 60_000)) for at in range(2)))


NAMES = [
    ("plain", "plain"),
    ("$a#_9", "$a#_9"),
    ("x-mqtt", "#_x_2dmqtt"),
    ("", "#_"),
    ("9", "#_9"),
    ("#_a", "#__23_5fa"),
    ("\u00e9", "#__c3_a9"),
]


@pytest.mark.parametrize("name, written", NAMES)
def test_names(name: str, written: str) -> None:
    assert t.write_name(name) == written
    assert t.NAME.match(written)
    assert t.read_name(written) == name


@pytest.mark.parametrize("name", ["#_a_", "#_a_2", "#_a_zz", "#_a_ff"])
def test_names_of_somebody_else(name: str) -> None:
    assert t.read_name(name) == name


@given(headers)
def test_any_headers_come_back(said: Headers) -> None:
    lost: set[str] = set()
    pairs = tuple(t.encode_headers(said, frozenset({"RETAIN"}), lost))
    back = t.decode_table(t.encode_table(pairs))[0]
    found = t.decode_headers(back)
    if lost:
        assert lost <= {"header_order", "header_name_long"}
    if "header_name_long" not in lost:
        assert sorted(map(repr, found)) == sorted(map(repr, said))
    if not lost:
        assert found == said


def test_headers_that_people_can_read() -> None:
    said = (
        ("n", Value(V.INT64, 1 << 40)),
        ("b", Value(V.BOOL, True)),
        ("r", string("1")),
        ("r", string("2")),
        ("l", Value(V.ARRAY, (string("x"), Value(V.INT8, 1)))),
        ("RETAIN", string("mine")),
    )
    pairs = dict(t.encode_headers(said, frozenset({"RETAIN"}), set()))
    assert pairs["n"] == string("1099511627776")
    assert pairs["b"] == Value(V.INT32, 1)
    assert pairs["l"] == string('[["string", "x"], ["int8", 1]]')
    assert pairs["#_RETAIN"] == string("mine")
    assert pairs[t.TYPES] == string('{"n":"int64","b":"bool","r":"repeated","l":"array"}')


@pytest.mark.parametrize(
    "types, value",
    [
        ("no json", string("1")),
        ("[1]", string("1")),
        ('{"a": "no type"}', string("1")),
        ('{"a": 5}', string("1")),
        ('{"a": "int64"}', string("x")),
        ('{"a": "array"}', string("[[]]")),
        ('{"a": "table"}', string("{}{")),
        ('{"a": "repeated"}', string("[1]")),
        ('{"a": "repeated"}', Value(V.INT32, 1)),
        ('{"a": "decimal"}', string("x")),
        ('{"a": "array"}', string("[" * 9_000)),
        ('{"a": "repeated"}', string('[["bytes", {"base64": "!"}]]')),
    ],
)
def test_types_that_are_not_ours(types: str, value: Value) -> None:
    assert t.decode_headers(((t.TYPES, string(types)), ("a", value))) == (("a", value),)


def deep(levels: int) -> Any:
    value = string("x")
    for _ in range(levels):
        value = Value(V.ARRAY, (value,))
    return value


def test_values_that_are_nested_deeply() -> None:
    said = (("a", deep(t.NESTING_MAX)),)
    assert t.decode_headers(tuple(t.encode_headers(said, NONE, set()))) == said
    assert t.decode_headers(tuple(t.encode_headers((("a", deep(t.NESTING_MAX + 5)),), NONE, set()))) != said


LOSSES: list[tuple[Headers, str]] = [
    ((("-" * 60, string("")),), "header_name_long"),
    ((("a", string("x" * 65_536)),), "header_value_long"),
    ((("a", string("")), ("b", string("")), ("a", string(""))), "header_order"),
    (tuple((f"{'a' * 100}{at}", Value(V.BOOL, True)) for at in range(700)), "header_types_long"),
]


@pytest.mark.parametrize("said, loss", LOSSES)
def test_a_loss_has_a_name(said: Headers, loss: str) -> None:
    lost: set[str] = set()
    t.encode_headers(said, NONE, lost)
    assert lost == {loss}

"""Field tables: every type, four ways, and what is refused."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqp091.spec import NESTING_MAX
from gateway.protocols.amqp091.table import decode_fields, decode_table, encode_table, encode_value, plain
from tests.protocols.amqp091.wires import headers

V = ValueType
ROWS = [
    (Value(V.VOID, None), "56"),
    (Value(V.BOOL, True), "74 01"),
    (Value(V.INT8, -1), "62 ff"),
    (Value(V.UINT8, 255), "42 ff"),
    (Value(V.INT16, -2), "73 fffe"),
    (Value(V.UINT16, 65534), "75 fffe"),
    (Value(V.INT32, -2), "49 fffffffe"),
    (Value(V.UINT32, 4294967294), "69 fffffffe"),
    (Value(V.INT64, -2), "6c fffffffffffffffe"),
    (Value(V.FLOAT, 1.5), "66 3fc00000"),
    (Value(V.DOUBLE, -1.5), "64 bff8000000000000"),
    (Value(V.DECIMAL, Decimal("-1.25")), "44 02 ffffff83"),
    (Value(V.DECIMAL, Decimal("314")), "44 00 0000013a"),
    (string("\u00e9"), "53 00000002 c3a9"),
    (Value(V.STRING, b"\xff"), "53 00000001 ff"),
    (Value(V.BYTES, b"\x00\xff"), "78 00000002 00ff"),
    (Value(V.TIMESTAMP, 1 << 63), "54 8000000000000000"),
    (Value(V.ARRAY, (string("a"), Value(V.VOID, None))), "41 00000007 53 00000001 61 56"),
    (Value(V.ARRAY, ()), "41 00000000"),
    (Value(V.TABLE, (("k", Value(V.BOOL, False)),)), "46 00000004 016b 74 00"),
]
READ_ONLY = [(Value(V.INT64, -2), "4c fffffffffffffffe"), (Value(V.INT16, -2), "55 fffe")]


def table_of(data: bytes) -> bytes:
    pair = b"\x04name" + data
    return len(pair).to_bytes(4, "big") + pair


@pytest.mark.parametrize("value, data", [*ROWS, *READ_ONLY])
def test_a_row_is_decoded(value: Value, data: str) -> None:
    wire = table_of(bytes.fromhex(data))
    assert decode_table(wire + b"\xff") == ((("name", value),), len(wire))
    assert decode_fields(wire[4:]) == (("name", value),)
    for end in range(len(wire)):
        with pytest.raises(RemoteProtocolError) as caught:
            decode_table(wire[:end])
        assert caught.value.reason == 502


@pytest.mark.parametrize("value, data", ROWS)
def test_a_row_is_encoded(value: Value, data: str) -> None:
    assert encode_value(value) == bytes.fromhex(data)
    assert encode_table((("name", value),)) == table_of(bytes.fromhex(data))


@given(headers)
def test_tables_survive(table: Headers) -> None:
    wire = encode_table(table)
    assert decode_table(wire) == (table, len(wire))


def test_a_repeated_name_is_kept() -> None:
    table = (("a", string("1")), ("b", string("2")), ("a", string("3")), ("a", string("4")))
    assert decode_table(encode_table(table))[0] == table
    assert plain(table) == {"a": ["1", "3", "4"], "b": "2"}


def test_plain_values() -> None:
    inner = Value(V.TABLE, (("x", Value(V.INT8, 1)),))
    assert plain((("a", Value(V.ARRAY, (inner, Value(V.VOID, None)))),)) == {"a": [{"x": 1}, None]}


def nested(depth: int) -> bytes:
    data = b"\0\0\0\0"
    for _ in range(depth):
        data = (len(data) + 2).to_bytes(4, "big") + b"\0F" + data
    return data


def test_nesting_has_a_limit() -> None:
    assert decode_table(nested(NESTING_MAX))
    with pytest.raises(RemoteProtocolError, match="nested"):
        decode_table(nested(NESTING_MAX + 1))
    arrays = b""
    for _ in range(NESTING_MAX + 1):
        arrays = b"A" + len(arrays).to_bytes(4, "big") + arrays
    with pytest.raises(RemoteProtocolError, match="nested"):
        decode_table(table_of(arrays))


@pytest.mark.parametrize("kind", [V.TABLE, V.ARRAY])
def test_nesting_has_a_limit_for_us(kind: ValueType) -> None:
    value = Value(kind, ())
    for _ in range(NESTING_MAX + 1):
        value = Value(kind, (value,) if kind is V.ARRAY else (("", value),))
    with pytest.raises(LocalProtocolError, match="nested"):
        encode_table((("a", value),))


FAULTS = [
    "5a",
    "00",
    "53 00000009 61",
    "41 00000001 53",
    "41 00000002 74 01 00",
    "46 00000001 05",
    "44 02 0000",
]
FAULTS += ["46 00000003 01ff 56", "78 ffffffff"]


@pytest.mark.parametrize("data", FAULTS)
def test_values_that_are_none(data: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_table(table_of(bytes.fromhex(data)))
    assert caught.value.reason == 502


UNWRITABLE = [
    Value(V.INT8, 128),
    Value(V.UINT32, -1),
    Value(V.TIMESTAMP, -1),
    Value(V.FLOAT, 1e300),
    Value(V.DECIMAL, Decimal("12345678901")),
    Value(V.DECIMAL, Decimal("NaN")),
    Value(V.DECIMAL, Decimal("1e-256")),
    Value(V.DECIMAL, Decimal("1e99999999")),
    Value(V.TABLE, (("x" * 256, Value(V.VOID, None)),)),
]


@pytest.mark.parametrize("value", UNWRITABLE)
def test_values_that_no_field_holds(value: Value) -> None:
    with pytest.raises(LocalProtocolError):
        encode_value(value)


def test_a_positive_exponent_is_written_out() -> None:
    assert decode_fields(b"\x01a" + encode_value(Value(V.DECIMAL, Decimal("12e3")))) == (
        ("a", Value(V.DECIMAL, Decimal(12000))),
    )

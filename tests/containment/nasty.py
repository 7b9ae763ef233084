"""Values, and notes about their types, that no encoder expects."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

from gateway.model.properties import Value, ValueType

HALF: Final = "\ud800"  # of a character: a str that has no bytes

CONTENTS: Final[list[Any]] = [
    None,
    True,
    0,
    -1,
    255,
    1 << 31,
    1 << 63,
    1 << 64,
    10**400,
    0.0,
    1e308,
    float("inf"),
    float("nan"),
    Decimal("1.5"),
    Decimal("-0"),
    Decimal("1E+400"),
    Decimal("1E-400"),
    Decimal("NaN"),
    "",
    "plain",
    "a\0b",
    HALF,
    "\U0010ffff",
    "x" * 256,
    "x" * 70_000,
    b"",
    b"\xff",
    b"x" * 70_000,
    (),
    [],
    {},
    object(),
    (Value(ValueType.STRING, HALF),),
    (Value(ValueType.INT8, 999),),
    (1, 2),
    (("name", Value(ValueType.VOID, None)),),
    ((HALF, Value(ValueType.VOID, None)),),
    (("x" * 300, Value(ValueType.VOID, None)),),
    (("", Value(ValueType.BOOL, True)), ("", Value(ValueType.BOOL, False))),
]

NAMES: Final = ["h", "", "a\0b", HALF, "x" * 256, "x" * 70_000, "gateway-types", "GATEWAY_TYPES", "x-death"]


def deep(depth: int, kind: ValueType = ValueType.ARRAY) -> Value:
    """Arrays or tables within each other."""
    value = Value(kind, ())
    for _ in range(depth):
        inner: Any = (value,) if kind is ValueType.ARRAY else (("t", value),)
        value = Value(kind, inner)
    return value


VALUES: Final = [
    *(Value(kind, content) for kind in ValueType for content in CONTENTS),
    *(deep(depth, kind) for depth in (31, 33, 65, 500) for kind in (ValueType.ARRAY, ValueType.TABLE)),
]

TEXTS: Final = [
    "",
    "null",
    "true",
    "5",
    "-1",
    "1e400",
    "9" * 400,
    "9" * 5_000,
    "Infinity",
    "NaN",
    '"text"',
    '"\\ud800"',
    '["\\ud800"]',
    '{"a":"\\ud800"}',
    '{"\\ud800":1}',
    "[]",
    "{}",
    "[1]",
    '[["int32", Infinity]]',
    '[["int32", 1]]',
    '[["double", ' + "9" * 400 + "]]",
    '[["decimal", {"a": 1}]]',
    '[["table", 5]]',
    '[["table", [[5, ["int32", 1]]]]]',
    '[["string", {"base64": 5}]]',
    '[["bytes", {"base64": "\\ud800"}]]',
    '[["array", "abc"]]',
    '[["string", "\\ud800"]]',
    "[" * 100_000,
    "[" * 200 + "]" * 200,
    '{"a":' * 200 + "1" + "}" * 200,
    "x" * 300,
    "////",
    "*not base64*",
]
"""What a peer may write under a name."""

TYPES: Final[list[Any]] = [
    *(kind.value for kind in ValueType),
    None,
    "string64",
    "repeated",
    "no such type",
    HALF,
    5,
    True,
    [],
    ["int32"],
    {},
    {"array": [None]},
    {"array": None},
    {"array": 5},
    {"array": {"a": None}},
    {"array": ["int32"]},
    {"array": [{"array": [None]}]},
    {"table": {}},
    {"table": {"a": None}},
    {"table": {HALF: "int32"}},
    {"table": None},
    {"table": ["a"]},
    {"array": [None], "table": {}},
]
"""What a peer may claim that it is."""

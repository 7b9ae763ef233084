"""Typed header values as the text of an MQTT user property, and back.

A plain string stands as it is. Any other value is written as text that a person can read, and its type is
noted in one user property (`gateway-types`), a JSON object from header name to type, or to a list of types
when the name repeats:

| type | text |
|---|---|
| void | empty |
| bool | `true`, `false` |
| int8 ... int64, timestamp (POSIX seconds), decimal, float, double | the number; `NaN`, `Infinity` |
| bytes; a string that is not UTF-8 or holds U+0000 (type `string64`) | base64 |
| array, table | JSON, the inner values in the forms above: numbers as numbers, decimals as strings |

The type of an array is `{"array": [types]}`, of a table `{"table": {name: type}}`.
Whoever else writes a `gateway-types` that does not fit its texts loses the types, never the texts.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from decimal import Decimal
from math import isinf, isnan
from typing import Any, Final

from gateway.model.properties import Value, ValueType, string

STRING64: Final = "string64"
_NUMBERS: Final = {
    ValueType.INT8: (-(2**7), 2**7 - 1),
    ValueType.UINT8: (0, 2**8 - 1),
    ValueType.INT16: (-(2**15), 2**15 - 1),
    ValueType.UINT16: (0, 2**16 - 1),
    ValueType.INT32: (-(2**31), 2**31 - 1),
    ValueType.UINT32: (0, 2**32 - 1),
    ValueType.INT64: (-(2**63), 2**63 - 1),
    ValueType.TIMESTAMP: (0, 2**64 - 1),
}
_REALS: Final = {ValueType.FLOAT: 3.4028235677973366e38, ValueType.DOUBLE: float("inf")}
_DECIMAL_OCTETS_MAX: Final = 512  # a sign, 255 places and room for an exponent
_DECIMAL_SCALE_MAX: Final = 255
_NESTED_MAX: Final = 64  # a deeper table is an attack on the stack, not a header

Type = Any
"""What `gateway-types` has for one value: a name, or the object of an array or table; None: a string."""


def is_text(octets: str) -> bool:
    """Whether MQTT can carry `octets` as a UTF-8 string of at most 65 535 octets."""
    try:
        size = len(octets.encode())
    except UnicodeEncodeError:
        return False
    return size <= 65_535 and "\0" not in octets


def _plain(value: Value) -> tuple[Any, Type]:
    """The value as JSON has it, and its type."""
    kind, content = value
    if kind is ValueType.STRING:
        if isinstance(content, str) and is_text(content):
            return content, None
        octets = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        return b64encode(octets).decode(), STRING64
    if kind is ValueType.ARRAY:
        pairs = [_plain(one) for one in content]
        return [one for one, _ in pairs], {"array": [inner for _, inner in pairs]}
    if kind is ValueType.TABLE:
        named = {name: _plain(one) for name, one in content}
        return (
            {name: one for name, (one, _) in named.items()},
            {"table": {name: inner for name, (_, inner) in named.items()}},
        )
    if kind is ValueType.BYTES:
        return b64encode(content).decode(), kind.value
    if kind is ValueType.DECIMAL:
        return str(content), kind.value
    return content, kind.value


def to_text(value: Value) -> tuple[str, Type]:
    """The text of a value and its type; the type of a plain string is None."""
    plain, type = _plain(value)
    if isinstance(plain, str):
        return plain, type
    if plain is None:
        return "", type
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")), type


def from_text(text: str, type: Type) -> Value:
    """The value that `to_text` wrote; the text as a string when it does not fit `type`."""
    try:
        return _typed(_loaded(text, type), type, 0)
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return string(text)


def _loaded(text: str, type: Type) -> Any:
    if isinstance(type, str) and type in _TEXTS:
        return text
    if type == ValueType.VOID.value and not text:
        return None
    return text if type is None else json.loads(text)


_TEXTS: Final = frozenset((STRING64, ValueType.BYTES.value, ValueType.DECIMAL.value))


def _typed(plain: Any, type: Type, depth: int) -> Value:
    """Raises ValueError, TypeError or KeyError when `plain` is not what `type` says."""
    if depth > _NESTED_MAX:
        raise ValueError("nested too deep")
    if isinstance(type, dict):
        if isinstance(plain, list):
            inner = type["array"]
            pairs = zip(plain, inner, strict=True)
            return Value(ValueType.ARRAY, tuple(_typed(one, kind, depth + 1) for one, kind in pairs))
        table = type["table"]
        items = tuple((name, _typed(one, table[name], depth + 1)) for name, one in plain.items())
        return Value(ValueType.TABLE, items)
    if type is None or type in (STRING64, ValueType.BYTES.value, ValueType.DECIMAL.value):
        if not isinstance(plain, str):
            raise TypeError("not a text")
        return _from_string(plain, type)
    kind = ValueType(type)
    if kind is ValueType.VOID and plain is None:
        return Value(kind, None)
    if kind is ValueType.BOOL and isinstance(plain, bool):
        return Value(kind, plain)
    if kind in _NUMBERS and isinstance(plain, int) and not isinstance(plain, bool):
        low, high = _NUMBERS[kind]
        if low <= plain <= high:
            return Value(kind, plain)
    if kind in _REALS and isinstance(plain, int | float) and not isinstance(plain, bool):
        real = float(plain)
        if isinf(real) or isnan(real) or abs(real) < _REALS[kind]:
            return Value(kind, real)
    raise ValueError(f"not a {type}")


def _decimal(text: str) -> Decimal:
    """A decimal that every AMQP can carry: 32 bits and up to 255 places. Others raise ValueError."""
    if len(text) > _DECIMAL_OCTETS_MAX:
        raise ValueError("too long for a decimal")
    found = Decimal(text)
    _, digits, exponent = found.as_tuple()
    if not isinstance(exponent, int) or not -_DECIMAL_SCALE_MAX <= exponent <= 0 or len(digits) > 10:
        raise ValueError("not a decimal of AMQP")
    if int("".join(map(str, digits))) > _NUMBERS[ValueType.INT32][1]:
        raise ValueError("not a decimal of AMQP")
    return found


def _from_string(text: str, type: str | None) -> Value:
    if type is None:
        return string(text)
    if type == ValueType.DECIMAL.value:
        return Value(ValueType.DECIMAL, _decimal(text))
    octets = b64decode(text, validate=True)
    if type == ValueType.BYTES.value:
        return Value(ValueType.BYTES, octets)
    try:
        return string(octets.decode())
    except UnicodeDecodeError:
        return Value(ValueType.STRING, octets)

"""Typed header values as text in MQTT user properties, and back.

A plain string is written unchanged. Any other value is written as text that people can read. Its type is
stored in one user property (`gateway-types`), a JSON object from header name to type, or to a list of types
if the name repeats:

| type | text |
|---|---|
| void | empty |
| bool | `true`, `false` |
| int8 ... int64, timestamp (POSIX seconds), decimal, float, double | the number; `NaN`, `Infinity` |
| bytes; a string that is not UTF-8 or holds U+0000 (type `string64`) | base64 |
| array, table | JSON, the inner values in the forms above: numbers as numbers, decimals as strings |

The type of an array is `{"array": [types]}`, of a table `{"table": {name: type}}`. If another sender writes a
`gateway-types` that does not fit the texts, the types are lost, never the texts: such a header is a plain
string. The same holds for a header whose text would not be Unicode (JSON can escape half a character).
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from decimal import Decimal
from typing import Any, Final

from gateway.model.properties import NESTING_MAX, RANGES, Value, ValueType, fits, string

STRING64: Final = "string64"
_DECIMAL_BYTES_MAX: Final = 512  # a sign, 255 digits and space for an exponent
_DECIMAL_SCALE_MAX: Final = 255

Type = Any
"""Type of one value in `gateway-types`: a name, the object of an array or table, or None for a string."""


def is_text(data: str) -> bool:
    """Return True if MQTT can carry the string: it is valid UTF-8 without NUL, of at most 65 535 bytes."""
    try:
        size = len(data.encode())
    except UnicodeEncodeError:
        return False
    return size <= 65_535 and "\0" not in data


def _plain(value: Value) -> tuple[Any, Type]:
    """Return a value in a form that JSON can express, and its type for the user property `gateway-types`."""
    kind, content = value
    if kind is ValueType.STRING:
        if isinstance(content, str) and is_text(content):
            return content, None
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        return b64encode(data).decode(), STRING64
    if kind is ValueType.ARRAY:
        pairs = [_plain(one) for one in content]
        return [one for one, _ in pairs], {"array": [inner for _, inner in pairs]}
    if kind is ValueType.TABLE:
        plain_values = {name: _plain(one) for name, one in content}
        return (
            {name: one for name, (one, _) in plain_values.items()},
            {"table": {name: inner for name, (_, inner) in plain_values.items()}},
        )
    if kind is ValueType.BYTES:
        return b64encode(content).decode(), kind.value
    if kind is ValueType.DECIMAL:
        return str(content), kind.value
    return content, kind.value


def to_text(value: Value) -> tuple[str, Type]:
    """Return a header value as text, and its type for the user property `gateway-types`.

    The type of a plain string is None.
    """
    plain, type = _plain(value)
    if isinstance(plain, str):
        return plain, type
    if plain is None:
        return "", type
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")), type


def from_text(text: str, type: Type) -> Value:
    """Convert a text and its type to a header value: the inverse function of `to_text`.

    If the text is not valid for the type, return it as a string.
    """
    if type is None:
        return string(text)
    try:
        value = _typed(_loaded(text, type), type, 0)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return string(text)
    return value if fits(value) else string(text)


def _loaded(text: str, type: Type) -> Any:
    """Return the value in JSON form that `text` stands for, according to its type.

    Raises ValueError if the type requires JSON and the text is not JSON.
    """
    if isinstance(type, str) and type in _TEXTS:
        return text
    if type == ValueType.VOID.value and not text:
        return None
    return json.loads(text)


_TEXTS: Final = frozenset((STRING64, ValueType.BYTES.value, ValueType.DECIMAL.value))
_REALS: Final = frozenset((ValueType.FLOAT, ValueType.DOUBLE))


def _typed(plain: Any, type: Type, depth: int) -> Value:
    """Convert `plain`, a value in JSON form, to a header value of the type `type`.

    `depth` is the number of arrays and tables that contain it. The result may be out of the type's range.
    Raises ValueError, TypeError, KeyError, AttributeError or ArithmeticError if `plain` is not valid for
    `type`.
    """
    if depth > NESTING_MAX:
        raise ValueError("nested too deep")
    if isinstance(type, dict):
        if isinstance(plain, list):
            inner = type["array"]
            pairs = zip(plain, inner, strict=True)
            return Value(ValueType.ARRAY, tuple([_typed(one, kind, depth + 1) for one, kind in pairs]))
        table = type["table"]
        items = [(name, _typed(one, table[name], depth + 1)) for name, one in plain.items()]
        return Value(ValueType.TABLE, tuple(items))
    if type is None or type in _TEXTS:
        if not isinstance(plain, str):
            raise TypeError("not a text")
        return _from_string(plain, type)
    kind = ValueType(type)
    if kind is ValueType.STRING:
        raise ValueError("a plain string has no type")
    if kind in _REALS and isinstance(plain, int) and not isinstance(plain, bool):
        plain = float(plain)
    return Value(kind, plain)


def _decimal(text: str) -> Decimal:
    """Parse a decimal of at most 32 bits and 255 decimal places, the limits of both AMQP protocols.

    Raises ValueError for any other text.
    """
    if len(text) > _DECIMAL_BYTES_MAX:
        raise ValueError("too long for a decimal")
    found = Decimal(text)
    _, digits, exponent = found.as_tuple()
    if not isinstance(exponent, int) or not -_DECIMAL_SCALE_MAX <= exponent <= 0 or len(digits) > 10:
        raise ValueError("not a decimal of AMQP")
    if int("".join(map(str, digits))) > RANGES[ValueType.INT32][1]:
        raise ValueError("not a decimal of AMQP")
    return found


def _from_string(text: str, type: str | None) -> Value:
    """Convert the text of a string, decimal or bytes value to a header value.

    `type` is None for a plain string. Bytes, and strings that MQTT cannot carry, are in base64. Raises
    ValueError if the text is invalid.
    """
    if type is None:
        return string(text)
    if type == ValueType.DECIMAL.value:
        return Value(ValueType.DECIMAL, _decimal(text))
    data = b64decode(text, validate=True)
    if type == ValueType.BYTES.value:
        return Value(ValueType.BYTES, data)
    try:
        return string(data.decode())
    except UnicodeDecodeError:
        return Value(ValueType.STRING, data)

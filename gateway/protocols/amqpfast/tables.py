"""Field tables and their translation to and from headers of the model.

A table has four types: S strings, I 32-bit integers, D decimals, T times. `decode_table` and `encode_table`
handle only those. Names begin with a letter, `$` or `#` and continue with letters, digits, these characters
and `_`. Any name is read, but only valid names are written.

Headers of other protocols have more types, any name, and names that repeat. `encode_headers` writes these in
the form of a table, and `decode_headers` reads them back. An invalid name is written as `#_` with its invalid
bytes as `_` and two hexadecimal digits. A value of another type is written as a number or a readable text,
and GATEWAY_TYPES stores the type of each such name in JSON. A type that does not fit the value is ignored,
because another sender wrote it; the value is then what the table contains.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from decimal import Decimal
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers, Value, ValueType, fits, is_unicode, string
from gateway.protocols.amqpfast.spec import (
    FIELD_DECIMAL,
    FIELD_INTEGER,
    FIELD_STRING,
    FIELD_TIME,
    LONG_STRING_MAX,
    NAME_BYTES_MAX,
    ReplyCode,
)

U16: Final = Struct(">H")
I32: Final = Struct(">i")
U32: Final = Struct(">I")
DECIMAL: Final = Struct(">Bi")
DECIMAL_PLACES_MAX: Final = 255
FIELD_BYTES_MIN: Final = 4  # an empty name, a type, an empty string
FIELDS_MAX: Final = LONG_STRING_MAX // FIELD_BYTES_MIN  # no table holds more
TYPES: Final = "GATEWAY_TYPES"
REPEATED: Final = "repeated"  # type of a name that repeats: its values are in a JSON list
ESCAPED: Final = "#_"
NESTING_MAX: Final = 32  # of arrays and tables in JSON
NAME: Final = re.compile(r"[A-Za-z$#][A-Za-z0-9_$#]*\Z")


def bad_field(text: str) -> RemoteProtocolError:
    """Return the error for a field that cannot be decoded (502)."""
    return RemoteProtocolError(text, reason=ReplyCode.BAD_FIELD_VALUE)


# --- the table itself


def decode_table(data: bytes, at: int = 0, fields_max: int = FIELDS_MAX) -> tuple[Headers, int]:
    """Decode the field table at `at`, which begins with its length.

    Return the table and the position behind it. A string that is not UTF-8 becomes bytes. If a name is
    repeated, only its first value is returned. Raises RemoteProtocolError (502) if the bytes are not a table
    within `data`, or if the table has more than `fields_max` fields.
    """
    try:
        end = at + 2 + U16.unpack_from(data, at)[0]
        if end > len(data):
            raise bad_field("a field table reaches beyond its frame")
        return _read_pairs(data, at + 2, end, fields_max), end
    except (StructError, IndexError):
        raise bad_field("a field table is cut short") from None


def _read_pairs(data: bytes, at: int, end: int, fields_max: int) -> Headers:
    """Decode the names and values of a table that begin at `at` and stop at `end`.

    Raises RemoteProtocolError 502 if they are invalid, or more than `fields_max`.
    """
    pairs: dict[str, Value] = {}
    count = 0
    while at < end:
        count += 1
        if count > fields_max:
            raise bad_field(f"a field table has more than {fields_max} fields")
        name_end = at + 1 + data[at]
        if name_end >= end:
            raise bad_field("a field name reaches beyond its table")
        try:
            name = data[at + 1 : name_end].decode()
        except UnicodeDecodeError:
            raise bad_field("a field name is not UTF-8") from None
        value, at = _read_value(data, name_end)
        if at > end:
            raise bad_field("a field value reaches beyond its table")
        pairs.setdefault(name, value)
    return tuple(pairs.items())


def _read_value(data: bytes, at: int) -> tuple[Value, int]:
    """Decode the field value at `at`, which begins with its tag.

    Return the value and the position behind it.
    """
    tag = data[at]
    at += 1
    if tag == FIELD_STRING:
        end = at + 2 + U16.unpack_from(data, at)[0]
        raw = data[at + 2 : end]
        try:
            return Value(ValueType.STRING, raw.decode()), end
        except UnicodeDecodeError:
            return Value(ValueType.STRING, raw), end
    if tag == FIELD_INTEGER:
        return Value(ValueType.INT32, I32.unpack_from(data, at)[0]), at + 4
    if tag == FIELD_TIME:
        return Value(ValueType.TIMESTAMP, U32.unpack_from(data, at)[0]), at + 4
    if tag == FIELD_DECIMAL:
        places, number = DECIMAL.unpack_from(data, at)
        return Value(ValueType.DECIMAL, Decimal((number < 0, _digits(number), -places))), at + 5
    raise bad_field(f"unknown field type 0x{tag:02x}")


def _digits(number: int) -> tuple[int, ...]:
    return tuple(map(int, str(abs(number))))


def encode_table(headers: Headers, *, strict: bool = True) -> bytes:
    """Encode a field table with its length. Raises LocalProtocolError for an invalid name or value.

    If `strict` is False, any name is allowed that a peer can send.
    """
    data = b"".join(encode_pair(name, value, strict=strict) for name, value in headers)
    if len(data) > LONG_STRING_MAX:
        raise LocalProtocolError(f"a field table has at most {LONG_STRING_MAX} bytes")
    return U16.pack(len(data)) + data


def encode_pair(name: str, value: Value, *, strict: bool = True) -> bytes:
    """Encode one name with its value, as `encode_table` does."""
    data = name.encode()
    if strict and (not NAME.match(name) or len(data) > NAME_BYTES_MAX):
        raise LocalProtocolError(f"{name!r} is not the name of a field")
    written = _write_value(value)
    if written is None:
        raise LocalProtocolError(f"{name} cannot hold {value!r}")
    return bytes((len(data),)) + data + written


def _write_value(value: Value) -> bytes | None:
    """Encode a value with its tag. Return None if a table cannot hold it."""
    kind, content = value
    try:
        if kind is ValueType.STRING:
            data = content.encode() if isinstance(content, str) else content
            return b"S" + U16.pack(len(data)) + data
        if kind is ValueType.INT32:
            return b"I" + I32.pack(content)
        if kind is ValueType.TIMESTAMP:
            return b"T" + U32.pack(content)
    except (StructError, UnicodeEncodeError):
        return None
    return _write_decimal(content) if kind is ValueType.DECIMAL else None


def _write_decimal(number: Decimal) -> bytes | None:
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int) or not -DECIMAL_PLACES_MAX <= exponent <= 0 or len(digits) > 10:
        return None
    plain = int("".join(map(str, digits)) or "0")
    if sign and not plain:
        return None  # a negative zero
    try:
        return b"D" + DECIMAL.pack(-exponent, -plain if sign else plain)
    except StructError:
        return None


# --- headers of other protocols


def write_name(name: str) -> str:
    """Return the name that stands for a header in a field table: the header's name, escaped if necessary.

    The result may be longer than NAME_BYTES_MAX, which the caller has to check.
    """
    if NAME.match(name) and not name.startswith(ESCAPED):
        return name
    return escape_name(name)


def escape_name(name: str) -> str:
    """Return the escaped form of a name; different names have different escaped forms."""
    data = name.encode(errors="surrogatepass")
    return ESCAPED + "".join(chr(one) if chr(one).isalnum() and one < 0x80 else f"_{one:02x}" for one in data)


def read_name(name: str) -> str:
    """Return the header's name for a name in a field table: the inverse function of `write_name`.

    A name that `write_name` cannot have returned is returned unchanged.
    """
    if not name.startswith(ESCAPED):
        return name
    parts = name[len(ESCAPED) :].split("_")
    try:
        data = parts[0].encode() + b"".join(
            bytes.fromhex(part[:2]) + part[2:].encode() if len(part) > 1 else _none() for part in parts[1:]
        )
        found = data.decode()
    except ValueError:
        return name  # another sender's name
    return found


def _none() -> bytes:
    raise ValueError


def encode_headers(headers: Headers, reserved: frozenset[str], lost: set[str]) -> list[tuple[str, Value]]:
    """Convert headers to entries that a field table can hold.

    Names in `reserved` are escaped. The last entry, GATEWAY_TYPES, has the original types of values that a
    table cannot express. Add the names of parts that get lost to `lost`: `header_name_long`,
    `header_value_long`, `header_value`, `header_order`, `header_types_long`.
    """
    found: dict[str, list[Value]] = {}
    last = None
    for name, value in headers:
        if not (is_unicode(name) and fits(value)):
            lost.add("header_value")
            continue
        if name in found and name != last:
            lost.add("header_order")
        found.setdefault(name, []).append(value)
        last = name
    pairs = []
    types: dict[str, str] = {}
    for name, values in found.items():
        written = escape_name(name) if name in reserved else write_name(name)
        if len(written) > NAME_BYTES_MAX:
            lost.add("header_name_long")
            continue
        value, kind = _encode_value(values)
        if _write_value(value) is None:
            lost.add("header_value_long")
            continue
        pairs.append((written, value))
        if kind:
            types[written] = kind
    if types:
        types_header = string(json.dumps(types, separators=(",", ":")))
        if _write_value(types_header) is None:
            lost.add("header_types_long")
        else:
            pairs.append((TYPES, types_header))
    return pairs


def _encode_value(values: list[Value]) -> tuple[Value, str]:
    """Return a value for a field table from all values of one header, and the name of their original type.

    The name is "" if the value is unchanged, and `repeated` if there are several values.
    """
    if len(values) > 1:
        return string(json.dumps([_to_json(each, 0) for each in values], ensure_ascii=False)), REPEATED
    value = values[0]
    kind, content = value
    if _write_value(value) is not None:
        return value, ""
    if kind in (ValueType.ARRAY, ValueType.TABLE):
        return string(json.dumps(_to_json(value, 0)[1], ensure_ascii=False)), kind.value
    if kind is ValueType.BYTES:
        return Value(ValueType.STRING, content), kind.value
    if kind is ValueType.STRING:
        return value, ""
    if kind in SMALL:
        return Value(ValueType.INT32, int(content)), kind.value
    return string("" if content is None else str(content)), kind.value


SMALL: Final = frozenset((ValueType.BOOL, ValueType.INT8, ValueType.UINT8, ValueType.INT16, ValueType.UINT16))
FLOATS: Final = frozenset((ValueType.FLOAT, ValueType.DOUBLE))


def decode_headers(pairs: Headers) -> Headers:
    """Convert the entries of a field table to headers: the inverse of `encode_headers`.

    Tables that were not built by `encode_headers` are accepted, too.
    """
    types: dict[str, Any] = {}
    for name, value in pairs:
        if name == TYPES and isinstance(value.value, str):
            types = _object(value.value)
    found: list[tuple[str, Value]] = []
    for written, value in pairs:
        if written == TYPES:
            continue
        name, kind = read_name(written), types.get(written)
        try:
            if kind is None:
                values = [value]
            elif kind == REPEATED:
                values = [_from_json(each, 0) for each in json.loads(value.value)]
            else:
                values = [_understand_value(value, ValueType(kind))]
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
            values = []
        if not values or not all(map(fits, values)):
            values = [value]
        found += [(name, one) for one in values]
    return tuple(found)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _understand_value(value: Value, kind: ValueType) -> Value:
    content = value.value
    if kind in (ValueType.ARRAY, ValueType.TABLE):
        return _from_json([kind.value, json.loads(content)], 0)
    if kind is ValueType.BYTES:
        return Value(kind, content.encode() if isinstance(content, str) else content)
    return _simple(kind, content)


def _simple(kind: ValueType, content: Any) -> Value:
    """Convert `content` to a value of the type `kind`, which must not be string, bytes, array or table.

    The result may be out of the type's range. Raises ValueError, TypeError or ArithmeticError.
    """
    if kind is ValueType.VOID:
        return Value(kind, None)
    if kind is ValueType.BOOL:
        return Value(kind, bool(content))
    if kind is ValueType.DECIMAL:
        return Value(kind, Decimal(content))
    return Value(kind, float(content) if kind in FLOATS else int(content))


def _to_json(value: Value, depth: int) -> list[Any]:
    """Return a value as a list [type, content] that JSON can express.

    `depth` is the number of arrays and tables that contain the value.
    """
    kind, content = value
    encoded: Any = content
    if depth > NESTING_MAX:
        kind, encoded = ValueType.STRING, str(content)
    elif kind is ValueType.ARRAY:
        encoded = [_to_json(each, depth + 1) for each in content]
    elif kind is ValueType.TABLE:
        encoded = [[name, _to_json(each, depth + 1)] for name, each in content]
    elif isinstance(content, bytes):
        encoded = {"base64": b64encode(content).decode()}
    elif kind is ValueType.DECIMAL or kind in FLOATS:
        encoded = str(content)
    return [kind.value, encoded]


def _from_json(pair: Any, depth: int) -> Value:
    """Convert a list [type, content] to a value: the inverse function of `_to_json`.

    `depth` is as in `_to_json`. Raises ValueError or TypeError if the list is invalid.
    """
    if depth > NESTING_MAX + 1:
        raise ValueError
    word, content = pair
    kind = ValueType(word)
    if kind is ValueType.ARRAY:
        return Value(kind, tuple(_from_json(each, depth + 1) for each in content))
    if kind is ValueType.TABLE:
        return Value(kind, tuple((_text(name), _from_json(each, depth + 1)) for name, each in content))
    if kind in (ValueType.STRING, ValueType.BYTES):
        return Value(kind, _data(content) if isinstance(content, dict) else _text(content))
    return _simple(kind, content)


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise TypeError
    return content


def _data(content: dict[str, Any]) -> bytes:
    try:
        return b64decode(content["base64"], validate=True)
    except (KeyError, Base64Error):
        raise ValueError from None

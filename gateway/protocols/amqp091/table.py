"""Codec between field tables and arrays (4.2.5.5) and headers of the model, for every type of RabbitMQ.

Types are preserved: the model has the type that the table had, and writes it again. A repeated name is
preserved too; the translator decides whether a target may see one. `survey` checks a table without decoding
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers, Value, ValueType
from gateway.protocols.amqp091.spec import (
    FIELD_ARRAY,
    FIELD_BYTES,
    FIELD_DECIMAL,
    FIELD_STRING,
    FIELD_TABLE,
    FIELD_VOID,
    FIXED_FIELDS,
    FIXED_FIELDS_READ_ONLY,
    NESTING_MAX,
    SHORT_STRING_MAX,
    ReplyCode,
)

U32: Final = Struct(">I")
DECIMAL: Final = Struct(">Bi")
VOID: Final = Value(ValueType.VOID, None)
FIELDS_UNBOUNDED: Final = 1 << 32
FIELD_BYTES_MIN: Final = 1  # of an array, so that fewer bytes cannot contain more fields than allowed
DECIMAL_SCALE_MAX: Final = 255
DECIMAL_DIGITS_MAX: Final = 10  # of a signed 32-bit number

READ_FIXED: Final = {
    ord(tag): (kind, Struct(form), Struct(form).size)
    for tag, kind, form in (*FIXED_FIELDS, *FIXED_FIELDS_READ_ONLY)
}
WRITE_FIXED: Final = {kind: (tag.encode(), Struct(form)) for tag, kind, form in FIXED_FIELDS}
UNKNOWN: Final = 0
ANYTHING: Final = 1
TEXTS: Final = 2  # only ASCII strings
HAS_LENGTH: Final = 252  # a string: four bytes of length, and that many bytes
HAS_BYTES: Final = 253  # a byte string, encoded likewise
NESTS: Final = 254  # a nested or an unknown type


def _sizes() -> bytes:
    """Return a table of 256 bytes: the size of a field value's data in bytes, by the tag of the value.

    A tag whose type has no fixed size, or is unknown, has HAS_LENGTH, HAS_BYTES or NESTS instead.
    """
    sizes = bytearray([NESTS] * 256)
    for tag, (_, _, size) in READ_FIXED.items():
        sizes[tag] = size
    sizes[FIELD_STRING], sizes[FIELD_BYTES] = HAS_LENGTH, HAS_BYTES
    sizes[FIELD_VOID], sizes[FIELD_DECIMAL] = 0, DECIMAL.size
    return bytes(sizes)


SIZES: Final = _sizes()
MEANS: Final = bytes([chr(byte) in "xBC" for byte in range(256)])
"""Flags of the first bytes with which reserved names begin: `x-`, BCC or CC."""


def syntax_error(text: str) -> RemoteProtocolError:
    """Return the error for arguments or properties that cannot be decoded (502)."""
    return RemoteProtocolError(text, reason=ReplyCode.SYNTAX_ERROR)


def decode_table(data: bytes, at: int = 0, fields_max: int = FIELDS_UNBOUNDED) -> tuple[Headers, int]:
    """Decode the field table at `at`, which begins with its length.

    Return the table and the position behind it. Raises RemoteProtocolError (502) if the bytes are not a table
    within `data`, or if the table has more than `fields_max` fields, including those of nested tables and
    arrays.
    """
    try:
        return _read_table(data, at, 0, [fields_max])
    except (StructError, IndexError):
        raise syntax_error("a field table is cut short") from None


def survey(data: bytes, at: int) -> int:
    """Classify the field table at `at` without decoding it. Return UNKNOWN, ANYTHING or TEXTS.

    UNKNOWN means that the table must be decoded. ANYTHING and TEXTS mean that it can be forwarded undecoded:
    it is well-formed and not nested, all names are ASCII, and no name begins like one that the gateway
    interprets. TEXTS means, in addition, that all values are ASCII strings.
    """
    at += 4
    if at > len(data):
        return UNKNOWN
    end = at + (data[at - 4] << 24 | data[at - 3] << 16 | data[at - 2] << 8 | data[at - 1])
    if end > len(data):
        return UNKNOWN
    ascii_ = data[at:end].isascii()
    found = TEXTS if ascii_ else ANYTHING
    sizes = SIZES
    try:
        while at < end:
            size = data[at]
            tag_at = at + 1 + size
            if not size or MEANS[data[at + 1]]:
                return UNKNOWN
            if not ascii_ and not data[at + 1 : tag_at].isascii():
                return UNKNOWN
            size = sizes[data[tag_at]]
            if size == HAS_LENGTH:
                size = (
                    data[tag_at + 1] << 24 | data[tag_at + 2] << 16 | data[tag_at + 3] << 8 | data[tag_at + 4]
                )
                at = tag_at + 5 + size
            elif size == HAS_BYTES:
                found = ANYTHING
                at = tag_at + 5 + U32.unpack_from(data, tag_at + 1)[0]
            elif size == NESTS:
                return UNKNOWN
            else:
                found = ANYTHING
                at = tag_at + 1 + size
    except (IndexError, StructError):
        return UNKNOWN
    return found if at == end else UNKNOWN


def texts_of(data: bytes, at: int, before: bytes, between: bytes, bare: bool = False) -> list[bytes]:
    """Return the names and values of the field table at offset `at` of `data`, as a flat list of bytes.

    All values must be texts. `before` is inserted before each name and `between` before each value, unless
    they are empty. Each name follows its length in one byte and each value its length in two bytes; with
    `bare`, the lengths are left out. Return an empty list if a value is longer than 65 535 bytes.
    """
    found: list[bytes] = []
    with_before, with_between = bool(before), bool(between)
    at += 4
    end = at + (data[at - 4] << 24 | data[at - 3] << 16 | data[at - 2] << 8 | data[at - 1])
    while at < end:
        tag_at = at + 1 + data[at]
        if data[tag_at + 1] or data[tag_at + 2]:
            return []
        stop = tag_at + 5 + (data[tag_at + 3] << 8 | data[tag_at + 4])
        if with_before:
            found.append(before)
        found.append(data[at + 1 if bare else at : tag_at])
        if with_between:
            found.append(between)
        found.append(data[tag_at + 5 if bare else tag_at + 3 : stop])
        at = stop
    return found


def encode_table(headers: Headers) -> bytes:
    """Encode a field table with its length. Raises LocalProtocolError if a type cannot hold its value."""
    data = b"".join(_write_pairs(headers, 0))
    return U32.pack(len(data)) + data


def decode_fields(data: bytes) -> Headers:
    """Decode the fields of a table without its length prefix, as in an AMQPLAIN response."""
    return decode_table(U32.pack(len(data)) + data)[0]


def encode_value(value: Value) -> bytes:
    """Encode one field value with its tag. Raises LocalProtocolError if its type cannot hold it."""
    return _write_value(value, 0)


def plain(headers: Headers) -> dict[str, Any]:
    """Convert a field table to a dictionary of Python values. The values of a repeated name become a list."""
    found: dict[str, Any] = {}
    repeated: set[str] = set()
    for name, value in headers:
        bare = _plain_value(value)
        if name not in found:
            found[name] = bare
        elif name in repeated:
            found[name].append(bare)
        else:
            found[name] = [found[name], bare]
            repeated.add(name)
    return found


def _plain_value(value: Value) -> Any:
    if value.type is ValueType.TABLE:
        return plain(value.value)
    if value.type is ValueType.ARRAY:
        return [_plain_value(each) for each in value.value]
    return value.value


def _extent(data: bytes, at: int) -> tuple[int, int]:
    """Return begin and end of the bytes that follow the 32-bit length field at `at`.

    Raises RemoteProtocolError 502 if they end behind `data`.
    """
    begin = at + 4
    end = begin + U32.unpack_from(data, at)[0]
    if end > len(data):
        raise syntax_error("a field reaches beyond its frame")
    return begin, end


def _count(budget: list[int]) -> None:
    """Subtract one field from `budget[0]`, the number of fields that are still allowed.

    Raises RemoteProtocolError 502 if the number becomes negative.
    """
    budget[0] -= 1
    if budget[0] < 0:
        raise syntax_error("a table has too many fields")


def _read_table(data: bytes, at: int, depth: int, budget: list[int]) -> tuple[Headers, int]:
    """Decode the table at `at`. Return the table and the position behind it.

    `depth` is its depth of nesting; for `budget` see `_count`.
    """
    if depth > NESTING_MAX:
        raise syntax_error(f"tables are nested deeper than {NESTING_MAX}")
    at, end = _extent(data, at)
    pairs = []
    while at < end:
        _count(budget)
        name_end = at + 1 + data[at]
        if name_end >= end:
            raise syntax_error("a field name reaches beyond its table")
        try:
            name = data[at + 1 : name_end].decode()
        except UnicodeDecodeError:
            raise syntax_error("a field name is not UTF-8") from None
        value, at = _read_value(data, name_end, depth, budget)
        pairs.append((name, value))
    if at != end:
        raise syntax_error("a field value reaches beyond its table")
    return tuple(pairs), at


def _read_array(data: bytes, at: int, depth: int, budget: list[int]) -> tuple[Value, int]:
    if depth > NESTING_MAX:
        raise syntax_error(f"arrays are nested deeper than {NESTING_MAX}")
    at, end = _extent(data, at)
    values = []
    while at < end:
        _count(budget)
        value, at = _read_value(data, at, depth, budget)
        values.append(value)
    if at != end:
        raise syntax_error("an array value reaches beyond its array")
    return Value(ValueType.ARRAY, tuple(values)), at


def _read_value(data: bytes, at: int, depth: int, budget: list[int]) -> tuple[Value, int]:
    """Decode the field value at `at`, which begins with its tag.

    Return the value and the position behind it. `depth` is its depth of nesting; for `budget` see `_count`.
    """
    tag = data[at]
    at += 1
    if tag == FIELD_STRING:
        begin, end = _extent(data, at)
        raw = data[begin:end]
        try:
            return Value(ValueType.STRING, raw.decode()), end
        except UnicodeDecodeError:
            return Value(ValueType.STRING, raw), end
    fixed = READ_FIXED.get(tag)
    if fixed is not None:
        kind, form, size = fixed
        return Value(kind, form.unpack_from(data, at)[0]), at + size
    if tag == FIELD_TABLE:
        table, end = _read_table(data, at, depth + 1, budget)
        return Value(ValueType.TABLE, table), end
    if tag == FIELD_ARRAY:
        return _read_array(data, at, depth + 1, budget)
    if tag == FIELD_BYTES:
        begin, end = _extent(data, at)
        return Value(ValueType.BYTES, data[begin:end]), end
    if tag == FIELD_DECIMAL:
        scale, number = DECIMAL.unpack_from(data, at)
        digits = tuple(map(int, str(abs(number))))
        return Value(ValueType.DECIMAL, Decimal((int(number < 0), digits, -scale))), at + DECIMAL.size
    if tag == FIELD_VOID:
        return VOID, at
    raise syntax_error(f"unknown field type 0x{tag:02x}")


def _write_pairs(headers: Headers, depth: int) -> Iterable[bytes]:
    if depth > NESTING_MAX:
        raise LocalProtocolError(f"tables are nested deeper than {NESTING_MAX}")
    for name, value in headers:
        data = name.encode()
        if len(data) > SHORT_STRING_MAX:
            raise LocalProtocolError("a field name has at most 255 bytes")
        yield bytes((len(data),)) + data
        yield _write_value(value, depth)


def _write_value(value: Value, depth: int) -> bytes:
    """Encode one field value with its tag. `depth` is the number of tables and arrays that contain it.

    Raises LocalProtocolError.
    """
    kind, bare = value
    fixed = WRITE_FIXED.get(kind)
    if fixed is not None:
        tag, form = fixed
        try:
            return tag + form.pack(bare)
        except (StructError, OverflowError):
            raise LocalProtocolError(f"a field of type {kind.value} cannot hold {bare!r}") from None
    if kind is ValueType.STRING:
        data = bare.encode() if isinstance(bare, str) else bare
        return b"S" + U32.pack(len(data)) + data
    if kind is ValueType.TABLE:
        data = b"".join(_write_pairs(bare, depth + 1))
        return b"F" + U32.pack(len(data)) + data
    if kind is ValueType.ARRAY:
        if depth >= NESTING_MAX:
            raise LocalProtocolError(f"arrays are nested deeper than {NESTING_MAX}")
        data = b"".join([_write_value(each, depth + 1) for each in bare])
        return b"A" + U32.pack(len(data)) + data
    if kind is ValueType.BYTES:
        return b"x" + U32.pack(len(bare)) + bytes(bare)
    if kind is ValueType.DECIMAL:
        return b"D" + _write_decimal(bare)
    return b"V"


def _write_decimal(number: Decimal) -> bytes:
    """Encode a decimal as scale and 32-bit integer. Raises LocalProtocolError if it does not fit."""
    sign, digits, exponent = number.as_tuple()
    if (
        not isinstance(exponent, int)
        or exponent < -DECIMAL_SCALE_MAX
        or len(digits) + exponent > DECIMAL_DIGITS_MAX
    ):
        raise LocalProtocolError(f"a decimal field cannot hold {number}")
    unscaled = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    try:
        return DECIMAL.pack(max(-exponent, 0), -unscaled if sign else unscaled)
    except StructError:
        raise LocalProtocolError(f"a decimal field cannot hold {number}") from None

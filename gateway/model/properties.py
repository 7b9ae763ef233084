"""Properties of a message: its metadata besides body and address.

`Properties` is the decoded form. A `PropertySet` is the form in which some protocol wrote it, decoded on
demand. Its `byte_count` is its weight: the size of the encoded form or, for a set built here, of its texts.
Device traffic repeats a few property sets endlessly. So all messages with the same encoded properties
share one set, which caches in `forms` how other protocols write it: translation costs one dictionary lookup.

A Value states its type, and a header from another protocol may claim any type for its content: `fits` checks
that the content has that type. Code that builds values from a peer's data calls it and rejects those that do
not fit, so that encoders need no second check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import Any, Final, NamedTuple

from gateway.containment import contained
from gateway.errors import ProtocolError, RemoteProtocolError


class ValueType(Enum):
    """Type of a header's value, which is preserved when a message is translated to another protocol and back.

    The members are AMQP's field types.
    """

    VOID = "void"
    BOOL = "bool"
    INT8 = "int8"
    UINT8 = "uint8"
    INT16 = "int16"
    UINT16 = "uint16"
    INT32 = "int32"
    UINT32 = "uint32"
    INT64 = "int64"
    FLOAT = "float"
    DOUBLE = "double"
    DECIMAL = "decimal"  # decimal.Decimal
    STRING = "string"  # str, or bytes if not UTF-8
    BYTES = "bytes"
    TIMESTAMP = "timestamp"  # int, POSIX seconds
    ARRAY = "array"  # tuple[Value, ...]
    TABLE = "table"  # Headers


class Value(NamedTuple):
    """Header value with its type."""

    type: ValueType
    value: Any


HEADER_BYTES: Final = 8  # bytes for a header's type and number, or for the lengths before its texts

Headers = tuple[tuple[str, Value], ...]
"""Names and values in order; a name may occur more than once."""


def string(text: str) -> Value:
    """Return a header value of type string."""
    return Value(ValueType.STRING, text)


def as_table(headers: Headers) -> Headers:
    """Return the headers sorted by name, in nested tables too, so that equal tables compare equal.

    The order of a table has no meaning (AMQP 0-9-1: 4.2.5.5). Entries with the same name keep their order.
    """
    if not headers:
        return headers
    return tuple(sorted([(name, without_order(value)) for name, value in headers], key=_name_of))


def _name_of(header: tuple[str, Value]) -> str:
    return header[0]


def without_order(value: Value) -> Value:
    """Return `value` with the entries of all tables in it sorted by name, at any depth."""
    if value.type is ValueType.TABLE:
        return Value(ValueType.TABLE, as_table(value.value))
    if value.type is ValueType.ARRAY:
        return Value(ValueType.ARRAY, tuple([without_order(one) for one in value.value]))
    return value


RANGES: Final = {
    ValueType.INT8: (-(2**7), 2**7 - 1),
    ValueType.UINT8: (0, 2**8 - 1),
    ValueType.INT16: (-(2**15), 2**15 - 1),
    ValueType.UINT16: (0, 2**16 - 1),
    ValueType.INT32: (-(2**31), 2**31 - 1),
    ValueType.UINT32: (0, 2**32 - 1),
    ValueType.INT64: (-(2**63), 2**63 - 1),
    ValueType.TIMESTAMP: (0, 2**64 - 1),
}
"""Smallest and largest value of each integer type."""

NESTING_MAX: Final = 64  # arrays and tables: more than any protocol writes, less than any stack
FLOAT_MAX: Final = 3.4028235677973366e38  # absolute values from here on round to infinity in 32 bits


def is_unicode(text: Any) -> bool:
    """Return True if `text` is a str without lone surrogates, which no protocol can encode."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fits(value: Value, depth: int = 0) -> bool:
    """Return True if the content of `value` is valid for its type, and nested at most NESTING_MAX deep.

    `depth` is the number of arrays and tables that contain `value`.
    """
    kind, content = value
    limits = RANGES.get(kind)
    if limits is not None:
        return type(content) is int and limits[0] <= content <= limits[1]
    if kind is ValueType.ARRAY or kind is ValueType.TABLE:
        if depth >= NESTING_MAX or not isinstance(content, tuple):
            return False
        if kind is ValueType.ARRAY:
            return all(isinstance(each, Value) and fits(each, depth + 1) for each in content)
        return all(_is_pair(each) and fits(each[1], depth + 1) for each in content)
    return _SIMPLE[kind](content)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and is_unicode(pair[0]) and isinstance(pair[1], Value)


_SIMPLE: Final[dict[ValueType, Callable[[Any], bool]]] = {
    ValueType.VOID: lambda content: content is None,
    ValueType.BOOL: lambda content: isinstance(content, bool),
    ValueType.STRING: lambda content: isinstance(content, bytes) or is_unicode(content),
    ValueType.BYTES: lambda content: isinstance(content, bytes),
    ValueType.DOUBLE: lambda content: isinstance(content, float),
    ValueType.FLOAT: lambda content: (
        isinstance(content, float) and (not isfinite(content) or abs(content) < FLOAT_MAX)
    ),
    ValueType.DECIMAL: lambda content: isinstance(content, Decimal) and content.is_finite(),
}


@dataclass(frozen=True)
class Properties:
    """Decoded properties of a message, independent of any protocol. None means not present."""

    content_type: str | None = None
    content_encoding: str | None = None
    utf8: bool | None = None  # MQTT 5 payload format indicator: True means that the body is UTF-8
    correlation: bytes | None = None
    reply_to: str | None = None  # in the form of the protocol that the message came from
    priority: int | None = None
    timestamp: int | None = None  # POSIX seconds
    message_id: str | None = None
    type: str | None = None
    app_id: str | None = None
    user_id: str | None = None  # authenticated: only the translator of AMQP 0-9-1 reads it
    headers: Headers = field(default=())


ReadTexts = Callable[[bytes, bytes, bytes, bool], list[bytes]]
"""Function that splits encoded headers into a flat list: the name and value of each header, as bytes.

Its arguments are the encoded headers, bytes to insert before each name, bytes to insert before each value
(nothing is inserted for b""), and a flag. If the flag is False, each name follows its length in one byte and
each value its length in two; if True, names and values come without lengths. The two protocols that encode
headers share this format, so that the headers of one are built from those of the other by cutting and
joining. The list is empty if there are no headers or a length does not fit.
"""


class PropertySet:
    """Properties of a message as `protocol` encoded them in `raw`, decoded once, on demand.

    Translators to other protocols cache their results in the set: several by key in `forms`, and the last
    pair of key and result in `form`, because most sets are translated in one way only. `parsed` is what the
    encoding protocol found in `raw` on arrival, or None. `has_reply_to` is False if the set certainly has no
    reply address, and True if it must be decoded to find out. `read_texts` is a function that returns all
    headers if `raw` has nothing but headers with ASCII texts (see ReadTexts), otherwise None.
    """

    __slots__ = (
        "_decode",
        "_forms",
        "_properties",
        "byte_count",
        "form",
        "has_reply_to",
        "parsed",
        "protocol",
        "raw",
        "read_texts",
    )

    def __init__(
        self,
        protocol: str,
        raw: bytes,
        decode: Callable[[bytes], Properties] | None = None,
        properties: Properties | None = None,
    ) -> None:
        self.protocol = protocol
        self.raw = raw
        self.byte_count = len(raw)
        self.has_reply_to = properties is None or bool(properties.reply_to)
        self.parsed: Any = None
        self.form: Any = None
        self.read_texts: ReadTexts | None = None
        self._forms: dict[object, Any] | None = None  # created on demand: most sets that occur once need none
        self._decode = decode
        self._properties = properties

    def stored_form(self, key: object) -> Any:
        """Return the result that a translator has cached under `key`, or None if there is none."""
        found = self._forms
        return None if found is None else found.get(key)

    @property
    def forms(self) -> dict[object, Any]:
        """Results that translators have cached in this set, by key."""
        found = self._forms
        if found is None:
            found = self._forms = {}
        return found

    @property
    def properties(self) -> Properties:
        """Decoded properties. Raises RemoteProtocolError if the bytes are malformed."""
        found = self._properties
        if found is None:
            assert self._decode is not None
            try:
                found = self._properties = self._decode(self.raw)
            except ProtocolError:
                raise
            except Exception as error:  # callers are prepared for malformed bytes only
                contained("message", error, protocol=self.protocol)
                raise RemoteProtocolError("the properties cannot be read", reason=0) from error
        return found


def property_set(properties: Properties) -> PropertySet:
    """Return a property set for decoded properties that no protocol has encoded yet."""
    made = PropertySet("model", b"", properties=properties)
    made.byte_count = _weight(properties)
    return made


def _weight(properties: Properties) -> int:
    """Return the approximate size of properties in bytes: all texts, and HEADER_BYTES for each header."""
    texts = (
        *(properties.content_type, properties.content_encoding, properties.correlation, properties.reply_to),
        *(properties.message_id, properties.type, properties.app_id, properties.user_id),
    )
    byte_count = sum([len(text) for text in texts if text])
    waiting: list[Any] = [properties.headers] if properties.headers else []
    while waiting:  # not recursive: a peer chose the nesting depth
        for one in waiting.pop():
            name, value = one if type(one) is tuple else ("", one)
            byte_count += len(name) + HEADER_BYTES
            kind, content = value if isinstance(value, Value) else (None, value)
            if isinstance(content, str | bytes):
                byte_count += len(content)
            elif isinstance(content, tuple) and (kind is ValueType.ARRAY or kind is ValueType.TABLE):
                waiting.append(content)
    return byte_count


NO_PROPERTIES: Final = property_set(Properties())

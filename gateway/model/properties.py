"""What a message says about itself besides its body and address.

`Properties` is the meaning; a `PropertySet` is the same as some protocol wrote it, decoded when asked for.
Its `octets` are what it weighs: those that the protocol wrote or, of a set made here, those of its texts.
Device traffic repeats a few property sets endlessly, so a set is shared by all messages that carry the same
octets, and remembers in `forms` how other protocols write it: translating costs one dictionary look-up.

A Value says what type it has, and a note in a header of another protocol may say so of anything: `fits` tells
whether the content is of that type. Whoever makes values of what a peer wrote asks it, and takes none that
does not; so whoever encodes a value need not ask again.
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
    """The type of a header value, so that it survives a round trip. The members are AMQP's field types."""

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
    STRING = "string"  # str, or bytes when the octets are not UTF-8
    BYTES = "bytes"
    TIMESTAMP = "timestamp"  # int, POSIX seconds
    ARRAY = "array"  # tuple[Value, ...]
    TABLE = "table"  # Headers


class Value(NamedTuple):
    """A header value with its type."""

    type: ValueType
    value: Any


HEADER_OCTETS: Final = 8  # of a header's type and number, or of the lengths before its texts

Headers = tuple[tuple[str, Value], ...]
"""Ordered; a name may repeat."""


def string(text: str) -> Value:
    """A header value of type string."""
    return Value(ValueType.STRING, text)


def as_table(headers: Headers) -> Headers:
    """Return the headers in the order of their names, in nested tables too.

    A table has no order: two that differ in it alone are equal (AMQP 0-9-1: 4.2.5.5). Of a repeated name
    the entries keep their order.
    """
    if not headers:
        return headers
    return tuple(sorted([(name, _without_order(value)) for name, value in headers], key=_name_of))


def _name_of(header: tuple[str, Value]) -> str:
    return header[0]


def _without_order(value: Value) -> Value:
    if value.type is ValueType.TABLE:
        return Value(ValueType.TABLE, as_table(value.value))
    if value.type is ValueType.ARRAY:
        return Value(ValueType.ARRAY, tuple([_without_order(one) for one in value.value]))
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
"""The least and the greatest number of each type that holds whole ones."""

NESTING_MAX: Final = 64  # of arrays and tables: deeper than any protocol writes them, and short of any stack
FLOAT_MAX: Final = 3.4028235677973366e38  # what rounds to a greater one is no 32-bit number


def is_unicode(text: Any) -> bool:
    """Whether it is a str of Unicode scalar values: a lone surrogate has no octets in any protocol."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fits(value: Value, depth: int = 0) -> bool:
    """Whether the content of a value is what its type says; not when it is nested beyond NESTING_MAX."""
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
    """A message's properties in no protocol's form. None: not said."""

    content_type: str | None = None
    content_encoding: str | None = None
    utf8: bool | None = None  # MQTT 5 payload format indicator: True says that the body is UTF-8
    correlation: bytes | None = None
    reply_to: str | None = None  # in the words of the protocol that the message came from
    priority: int | None = None
    timestamp: int | None = None  # POSIX seconds
    message_id: str | None = None
    type: str | None = None
    app_id: str | None = None
    user_id: str | None = None  # authenticated: a translator of AMQP 0-9-1 alone reads it
    headers: Headers = field(default=())


ReadTexts = Callable[[bytes, bytes, bytes, bool], list[bytes]]
"""Called with octets, and what is to stand before a name and before its value: returns for each header that
(if it is not empty), the name behind its length in one octet, that, and the value behind its length in two;
at last is said whether they are wanted bare, without lengths. So much two protocols have in common that write
headers so that one's are made of the other's by cutting and joining. Nothing is returned where a length has
no room, or for no headers.
"""


class PropertySet:
    """Properties as `protocol` wrote them (`raw`), decoded once, when something asks.

    `forms` is for translators: what they made of this set, under a key of their own; `form` has what the last
    of them made, with its key in front, for most sets that come once go one way. `known` is for the
    protocol that wrote it: what it has found out when the octets came, None: nothing yet. `asks` is False
    when it is known that there is no reply address in here, so that nobody has to decode it for that.
    `read_texts` cuts all that there is out of `raw`, if that is headers with texts of ASCII for values; see
    ReadTexts. None: there may be more.
    """

    __slots__ = (
        "_decode",
        "_forms",
        "_properties",
        "asks",
        "form",
        "known",
        "octets",
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
        self.octets = len(raw)
        self.asks = properties is None or bool(properties.reply_to)
        self.known: Any = None
        self.form: Any = None
        self.read_texts: ReadTexts | None = None
        self._forms: dict[object, Any] | None = None  # of most sets that come only once nothing is made
        self._decode = decode
        self._properties = properties

    def made(self, key: object) -> Any:
        """What a translator has made of it under this key; None: nothing."""
        found = self._forms
        return None if found is None else found.get(key)

    @property
    def forms(self) -> dict[object, Any]:
        """What translators made of it."""
        found = self._forms
        if found is None:
            found = self._forms = {}
        return found

    @property
    def properties(self) -> Properties:
        """The meaning. Raises RemoteProtocolError when the octets are malformed."""
        found = self._properties
        if found is None:
            assert self._decode is not None
            try:
                found = self._properties = self._decode(self.raw)
            except ProtocolError:
                raise
            except Exception as error:  # whoever asks is prepared for malformed octets
                contained("message", error, protocol=self.protocol)
                raise RemoteProtocolError("the properties cannot be read", reason=0) from error
        return found


def property_set(properties: Properties) -> PropertySet:
    """A set that no protocol has written yet."""
    made = PropertySet("model", b"", properties=properties)
    made.octets = _weight(properties)
    return made


def _weight(properties: Properties) -> int:
    """Octets of the texts in there, and a few for each header, about."""
    texts = (
        *(properties.content_type, properties.content_encoding, properties.correlation, properties.reply_to),
        *(properties.message_id, properties.type, properties.app_id, properties.user_id),
    )
    octets = sum([len(text) for text in texts if text])
    waiting: list[Any] = [properties.headers] if properties.headers else []
    while waiting:  # a peer chose how deep they are
        for one in waiting.pop():
            name, value = one if type(one) is tuple else ("", one)
            octets += len(name) + HEADER_OCTETS
            kind, content = value if isinstance(value, Value) else (None, value)
            if isinstance(content, str | bytes):
                octets += len(content)
            elif isinstance(content, tuple) and (kind is ValueType.ARRAY or kind is ValueType.TABLE):
                waiting.append(content)
    return octets


NO_PROPERTIES: Final = property_set(Properties())

"""Properties as JSON, for sets without the bytes of a protocol: the model's only encoding of its own.

The JSON object has the fields that are set, under their names in `Properties`; `correlation` is base64.
`headers` is a list of `[name, type, value]`, in order, with a repeated name as often as it occurs. The type
is a ValueType's word and determines the form of the value:

| type | value |
|---|---|
| void | `null` |
| bool | `true`, `false` |
| int8 ... int64, uint8 ... uint32, timestamp | a number |
| float, double | a number, or `"nan"`, `"inf"`, `"-inf"` |
| decimal | a string, as Python writes a Decimal |
| string | a string; `{"base64": ...}` if its bytes are not UTF-8 |
| bytes | a string, base64 |
| array | a list of `[type, value]` |
| table | a list of `[name, type, value]` |

Empty properties are written as no bytes.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from decimal import Decimal
from math import isfinite
from typing import Any, Final

import orjson

from gateway.model.properties import Headers, Properties, ReadTexts, Value, ValueType

TEXTS: Final = (
    "content_type",
    "content_encoding",
    "utf8",
    "reply_to",
    "priority",
    "timestamp",
    "message_id",
    "type",
    "app_id",
    "user_id",
)
"""Fields that have a type in JSON; `correlation` and `headers` are the others."""

NOTHING: Final = Properties()
PLAIN: Final = bytes(set(range(0x20, 0x7F)) - set(b'"\\'))
"""Characters that JSON strings contain unescaped."""
BEFORE_FIRST: Final = b'{"headers":[["'
BEFORE_NAME: Final = b'"],["'
BEFORE_VALUE: Final = b'","string","'
BEHIND_LAST: Final = b'"]]}'
# Quotes for each header; QUOTES_MORE are added once for all.
QUOTES: Final = (BEFORE_NAME + BEFORE_VALUE).count(b'"')
QUOTES_MORE: Final = (BEFORE_FIRST + BEHIND_LAST).count(b'"') - BEFORE_NAME.count(b'"')


def encode_properties(properties: Properties) -> bytes:
    """Encode `properties` as JSON in ASCII; b"" if none is set."""
    if properties == NOTHING:
        return b""
    document: dict[str, Any] = {}
    for name in TEXTS:
        value = getattr(properties, name)
        if value is not None:
            document[name] = value
    if properties.correlation is not None:
        document["correlation"] = b64encode(properties.correlation).decode()
    if properties.headers:
        document["headers"] = _written(properties.headers)
    try:
        written = orjson.dumps(document)
    except TypeError:  # a whole number of more than 64 bits, or half a character
        return json.dumps(document, separators=(",", ":")).encode()
    return written if written.isascii() else json.dumps(document, separators=(",", ":")).encode()


def encode_texts(read: ReadTexts, raw: bytes) -> bytes | None:
    """Encode text headers as `encode_properties` would, without creating objects.

    `read` extracts the names and texts from `raw`, the protocol's bytes of a property set. Returns None if
    there are no text headers, or if a character must be escaped. Used for traffic in which each message has
    new texts.
    """
    pieces = read(raw, BEFORE_NAME, BEFORE_VALUE, True)
    if not pieces:
        return None
    quotes = len(pieces) // 4 * QUOTES + QUOTES_MORE
    pieces[0] = BEFORE_FIRST
    pieces.append(BEHIND_LAST)
    written = b"".join(pieces)
    return written if written.translate(None, PLAIN) == b'"' * quotes else None


def decode_properties(data: bytes) -> Properties:
    """Decode the bytes that `encode_properties` returned.

    Raises ValueError, KeyError or TypeError for other bytes.
    """
    if not data:
        return NOTHING
    document = json.loads(data)
    headers = _read(document.pop("headers", ()))
    correlation = document.pop("correlation", None)
    return Properties(
        **document, correlation=None if correlation is None else b64decode(correlation), headers=headers
    )


def _written(headers: Headers) -> list[Any]:
    return [[name, value.type.value, _plain(value)] for name, value in headers]


def _plain(value: Value) -> Any:
    """Return the JSON form of a header's value; the table in the module describes it."""
    kind, content = value
    if kind is ValueType.ARRAY:
        return [[one.type.value, _plain(one)] for one in content]
    if kind is ValueType.TABLE:
        return _written(content)
    if kind is ValueType.DECIMAL:
        return str(content)
    if kind is ValueType.BYTES:
        return b64encode(content).decode()
    if isinstance(content, bytes):
        return {"base64": b64encode(content).decode()}
    if isinstance(content, float) and not isfinite(content):
        return str(content)
    return content


def _read(headers: Any) -> Headers:
    return tuple((name, decode_value(kind, plain)) for name, kind, plain in headers)


def decode_value(word: str, plain: Any) -> Value:
    """Decode a header's value: `word` is its type, and `plain` its JSON form (see the module).

    Raises ValueError, KeyError or TypeError if the two do not fit.
    """
    kind = ValueType(word)
    if kind is ValueType.ARRAY:
        return Value(kind, tuple(decode_value(*one) for one in plain))
    if kind is ValueType.TABLE:
        return Value(kind, _read(plain))
    if kind is ValueType.DECIMAL:
        return Value(kind, Decimal(plain))
    if kind is ValueType.BYTES:
        return Value(kind, b64decode(plain))
    if kind is ValueType.STRING and isinstance(plain, dict):
        return Value(kind, b64decode(plain["base64"]))
    if kind in (ValueType.FLOAT, ValueType.DOUBLE) and isinstance(plain, str):
        return Value(kind, float(plain))
    return Value(kind, plain)

"""Validation of message bodies against a JSON Schema.

Each body that does not fit gets a reason and the location of the fault. A Python worker checks a body first
by the schema, then by the types of the table's columns (an integer of 20 digits fits no column). Values that
a schema permits and Spark's parser does not (1e3 as an integer, lower-case letters in a time) are rewritten
in Spark's notation. A body that Spark still cannot read is reported without a location. So no value becomes
null silently.

A value that fits but would change in its column is rescued: recorded as JSON, by its location in the body.
These are fields without a column, numbers with more digits than a double has, fractions of a microsecond, and
leap seconds. The column has the nearest value. Columns of decimals or text store every digit.

A body in the wire format of Confluent's serializers (a zero byte, the schema's number in a registry, then the
value) loses those five bytes, and its row has the number. With a registry, Avro and Protobuf are converted to
JSON first (`registry.py`); without one they are reported as not JSON. If all bodies are Avro or Protobuf
without a number, their schema is a file (`encodings.py`). The table's columns come from the route's own
schema.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple

import jsonschema_rs
import orjson
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from gateway.errors import PipelineError
from gateway.pipeline.jobs.encodings import BodyEncoding, UndecodableError
from gateway.pipeline.jobs.registry import Registry
from gateway.pipeline.jobs.schema import from_json_schema, route_of
from gateway.pipeline.traffic.fates import CandidateMapping
from gateway.pipeline.traffic.rows import address_of

VERSION_DIGITS: Final = 12  # Digits of the digest of a schema without `$id`.
FAULT_CHARACTERS_MAX: Final = 300
CORRUPT: Final = "_corrupt_record"
INTEGER_MAX: Final = (1 << 63) - 1  # Largest value of an integer column.
EXACT_MAX: Final = 1 << 53  # Beyond it a double does not represent every integer.
DIGITS_MAX: Final = 18  # Digits of an integer that certainly fits 64 bits.
LONG: Final = re.compile(rb"[0-9][0-9.]{15}|[0-9][eE][+-]?[0-9]")
"""Pattern of numbers that a double may not represent exactly; it may also match inside a text."""
FINE: Final = re.compile(r"([.,][0-9]{6})([0-9]+)")
"""Fraction of a second, and the digits below a microsecond."""
LEAP: Final = re.compile(r"(T[0-9]{2}:[0-9]{2}:)60")
ENVELOPE: Final = struct.Struct(">BI")  # Confluent's wire format: zero, and the schema's number.
UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Microseconds in each unit of an event time."""

KNOWN_MAX: Final = 200_000  # Addresses whose captures a task caches.
ADDED: Final = ("registry_id", "fault", "place", "rescued")


class BodySchema(NamedTuple):
    """JSON Schema of message bodies.

    `text` is the schema itself, `kind` the Spark type of such bodies, and `version` the text that identifies
    the schema in rows: its `$id`, or else the beginning of its digest.
    """

    text: str
    kind: StructType
    version: str


def schema_of(file: Path) -> BodySchema:
    """Read a JSON Schema from a file.

    Raises PipelineError if the file is unreadable, or the schema is invalid or does not describe an object.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"the JSON Schema {file} cannot be read: {error}") from error
    kind = from_json_schema(text)
    if not isinstance(kind, StructType):
        raise PipelineError(
            f"{file} does not describe an object with properties, which are the columns of the table"
        )
    validator(text)
    identifier = json.loads(text).get("$id")
    return BodySchema(text, kind, str(identifier or sha256(text.encode()).hexdigest()[:VERSION_DIGITS]))


def validator(text: str) -> Any:
    """Return a validator for the JSON Schema `text`. Raises PipelineError if the schema is invalid."""
    try:
        return jsonschema_rs.validator_for(
            json.loads(text), validate_formats=True, retriever=_refuse_reference
        )
    except jsonschema_rs.ValidationError as error:
        raise PipelineError(f"the JSON Schema is invalid: {_first_line(error.message)}") from error


def _refuse_reference(address: str) -> Any:
    """Raise ValueError for a reference from a JSON Schema to another file.

    The other file could change between two tasks.
    """
    raise ValueError(f"{address} refers to another file")


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:FAULT_CHARACTERS_MAX]


BodyPath = tuple[str, ...]
"""Field names and list positions that lead to a value of a body."""


class NoPlaceError(Exception):
    """Error for a value that is valid by the JSON Schema, but that its column cannot store.

    `path` is the location of the value in the body.
    """

    def __init__(self, why: str, path: BodyPath) -> None:
        super().__init__(why)
        self.path = path


class ValueConversion:
    """Conversion of the values of one body to values that the table's columns can store.

    `rescued` has, by location in the body, the original values that a column would change, or that have no
    column. `exact` is True if numbers were parsed without loss, as integers and decimals.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.rescued: dict[str, Any] = {}
        self._exact = exact

    def convert(self, value: Any, kind: DataType, path: BodyPath = ()) -> Any:
        """Return `value` in a form that Spark's parser accepts for the type `kind`.

        A value that needs no conversion is returned unchanged. Raises NoPlaceError if a column of this type
        cannot store the value. `path` is the location of the value in the body.
        """
        if value is None or isinstance(value, bool):
            return value
        if isinstance(kind, StructType | MapType):
            return self._object(value, kind, path) if isinstance(value, dict) else value
        if isinstance(kind, ArrayType):
            return self._list(value, kind.elementType, path) if isinstance(value, list) else value
        if isinstance(kind, StringType):
            return _text(value) if self._exact and not isinstance(value, str) else value
        if isinstance(kind, TimestampType):
            return self._time(value, path) if isinstance(value, str) else value
        if isinstance(value, int | float | Decimal):
            if isinstance(kind, LongType):
                return _to_integer(value, path)
            if isinstance(kind, DoubleType):
                return self._double(value, path)
            if isinstance(kind, DecimalType):
                return _decimal(value, kind, path)
        return value

    def _object(self, value: dict[str, Any], kind: StructType | MapType, path: BodyPath) -> dict[str, Any]:
        if isinstance(kind, MapType):
            kinds = dict.fromkeys(value, kind.valueType)
        else:
            kinds = {one.name: one.dataType for one in kind.fields if one.name in value}
            if len(kinds) < len(value):
                rest = {"/".join((*path, name)): one for name, one in value.items() if name not in kinds}
                self.rescued |= rest
        made = {name: self.convert(value[name], one, (*path, name)) for name, one in kinds.items()}
        changed = {name: one for name, one in made.items() if one is not value[name]}
        return value | changed if changed else value

    def _list(self, value: list[Any], kind: DataType, path: BodyPath) -> list[Any]:
        items = [self.convert(one, kind, (*path, str(at))) for at, one in enumerate(value)]
        return value if all(one is old for one, old in zip(items, value, strict=True)) else items

    def _double(self, value: int | float | Decimal, path: BodyPath) -> int | float:
        if isinstance(value, float) or (isinstance(value, int) and -EXACT_MAX <= value <= EXACT_MAX):
            return value
        nearest = float(value)
        if not isfinite(nearest):
            raise NoPlaceError(f"{value} does not fit its column: it is outside the range of a double", path)
        if Decimal(repr(nearest)) != value:
            self.rescued["/".join(path)] = value
        return nearest

    def _time(self, value: str, path: BodyPath) -> str:
        text = value.upper()
        fraction = FINE.search(text)
        if fraction is not None:
            text = f"{text[: fraction.start(2)]}{text[fraction.end() :]}"
        leaps = LEAP.search(text) is not None
        try:
            moment = datetime.fromisoformat(LEAP.sub(r"\g<1>59", text) if leaps else text)
            if leaps:  # The next second, since clocks of computers have no leap seconds.
                text = (moment + timedelta(seconds=1)).isoformat()
        except (ValueError, OverflowError):
            raise NoPlaceError(f"{value!r} does not fit its column of times", path) from None
        if leaps or (fraction is not None and fraction[2].strip("0")):
            self.rescued["/".join(path)] = value
        return value if text == value else text


def _text(value: Any) -> Any:
    """Return a value that is not a str as JSON text, so that Spark does not convert numbers to doubles."""
    return str(value) if isinstance(value, int | Decimal) else _dumped(value).decode()


def _to_integer(value: int | float | Decimal, path: BodyPath) -> int:
    if isinstance(value, float) and (not value.is_integer() or abs(value) > EXACT_MAX):
        raise NoPlaceError(f"{value} does not fit its column of integers", path)
    if isinstance(value, Decimal) and (value.adjusted() > DIGITS_MAX or value != value.to_integral_value()):
        raise NoPlaceError(f"{value} does not fit its column of integers", path)
    found = int(value)
    if not -INTEGER_MAX - 1 <= found <= INTEGER_MAX:
        raise NoPlaceError(f"{value} does not fit its column: integers have 64 bits", path)
    return value if isinstance(value, int) else found


def _decimal(value: int | float | Decimal, kind: DecimalType, path: BodyPath) -> int | float | Decimal:
    found = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    _, digits, exponent = found.as_tuple()
    assert isinstance(exponent, int)  # JSON has no infinity.
    zeros = len(digits) - len("".join(map(str, digits)).rstrip("0"))
    if -exponent - zeros > kind.scale or len(digits) + exponent > kind.precision - kind.scale:
        raise NoPlaceError(f"{value} does not fit its column of {kind.simpleString()}", path)
    return value


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, default=_written)


def _written(value: Any) -> Any:
    if isinstance(value, Decimal):
        return orjson.Fragment(str(value))
    raise TypeError


def exactly(body: bytes) -> Any:
    """Parse the JSON text `body` without losing digits of numbers.

    Raises NoPlaceError for an exponent beyond the range of Python's decimals, and ValueError for invalid
    JSON.
    """
    return json.loads(body, parse_float=_fraction, parse_int=_integer)


def _fraction(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise NoPlaceError(f"{text} fits no column", ()) from None


def _integer(text: str) -> int | Decimal:
    """Parse an integer as an int, or as a Decimal if it has more than 18 digits."""
    found = Decimal(text)
    return int(text) if found.adjusted() < DIGITS_MAX else found


class BodyValidation:
    """Function for Spark's `mapInArrow` that validates message bodies.

    The function appends the results of validation and the route's captures to the rows, as columns.
    """

    def __init__(
        self,
        candidate: CandidateMapping,
        route: str,
        captures: tuple[str, ...],
        schema: str,
        kind: StructType,
        encoding: Registry | BodyEncoding | None = None,
    ) -> None:
        """Create the function for the messages of the route `route`, which has these captures.

        `candidate` is the mapping with the route, `schema` the JSON Schema of bodies, and `kind` the type of
        a body in the table, which may have more fields than the schema. `encoding` has the schemas by which
        bodies in Avro or Protobuf are decoded; None if bodies are JSON.
        """
        self._encoding = encoding
        self._candidate = candidate
        self._route = route
        self._captures = captures
        self._schema = schema
        self._kind = kind

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield each batch with validated bodies, the results of validation, and the captures, as columns.

        Captures are null for an address that the route's pattern does not match.
        """
        route = route_of(self._candidate, self._route)
        queue = self._candidate.queue_of(route.source, route.name)
        separator = route.pattern.dialect.separator
        cache: dict[tuple[Any, ...], tuple[str | None, ...]] = {}
        nothing: tuple[str | None, ...] = (None,) * len(self._captures)
        body_validator = validator(self._schema)
        encoding = self._encoding
        decode = None if encoding is None else encoding.decoder()
        is_framed = encoding is None or encoding.is_framed
        for batch in batches:
            captured = []
            words = [batch.column(name).to_pylist() for name in ("protocol", "scope", "name")]
            for address in zip(*words, strict=True):
                if address not in cache:
                    if len(cache) >= KNOWN_MAX:
                        cache.clear()
                    found = route.pattern.match(address_of(*address), queue)
                    cache[address] = (
                        nothing  # Routed by an earlier mapping with another pattern.
                        if found is None
                        else tuple(separator.join(found.get(name, ())) for name in self._captures)
                    )
                captured.append(cache[address])
            verdicts = [
                validate_body(body, body_validator, self._kind, decode, is_framed=is_framed)
                for body in batch.column("body").to_pylist()
            ]
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns["body"] = pa.array([one.body for one in verdicts], pa.binary())
            columns["registry_id"] = pa.array([one.registry_id for one in verdicts], pa.int64())
            columns["fault"] = pa.array([one.fault for one in verdicts], pa.string())
            columns["place"] = pa.array([one.place for one in verdicts], pa.string())
            columns["rescued"] = pa.array([one.rescued for one in verdicts], pa.string())
            for at, name in enumerate(self._captures):
                columns[captured_as(name)] = pa.array([one[at] for one in captured], pa.string())
            yield pa.RecordBatch.from_pydict(columns)


def captured_as(capture: str) -> str:
    """Return a temporary name for the column of `capture`, different from the names of all other columns."""
    return f"capture {capture}"


class BodyVerdict(NamedTuple):
    """Result of validating one body.

    `body` is the body, without the five bytes of Confluent's wire format, and converted to JSON if it was
    decoded; `registry_id` is the schema number in the five bytes. `fault` is None if the body is valid,
    otherwise the error, and `place` is the error's location. `rescued` is a JSON object with the values, by
    location, that a column cannot store unchanged, or that have no column.
    """

    body: bytes | None
    registry_id: int | None = None
    fault: str | None = None
    place: str | None = None
    rescued: str | None = None


def validate_body(
    body: bytes | None,
    body_validator: Any,
    kind: DataType,
    decode: Callable[[int | None, bytes], bytes] | None = None,
    *,
    is_framed: bool = True,
) -> BodyVerdict:
    """Validate a message body with `body_validator`, the validator of its JSON Schema.

    `kind` is the Spark type of bodies. `decode` takes the number of a schema in a registry (or None) and an
    encoded body, and returns the body as JSON; without `decode`, bodies are JSON. With `is_framed` a body may
    be in Confluent's wire format.
    """
    if body is None:
        return BodyVerdict(None, fault="the body was not recorded")
    number = None
    if is_framed and body[:1] == b"\0" and len(body) >= ENVELOPE.size:
        _, number = ENVELOPE.unpack_from(body)
        body = body[ENVELOPE.size :]
    try:
        body = body if decode is None else decode(number, body)
    except UndecodableError as error:
        return BodyVerdict(body, number, _first_line(str(error)))
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return BodyVerdict(body, number, f"not JSON: {_first_line(str(error))}")
    if body_validator.is_valid(found):
        exact = LONG.search(body) is not None
        conversion = ValueConversion(exact=exact)
        try:
            found = exactly(body) if exact else found
            placed = conversion.convert(found, kind)
        except NoPlaceError as error:
            return BodyVerdict(body, number, _first_line(str(error)), "/".join(error.path))
        rescued = _dumped(conversion.rescued).decode() if conversion.rescued else None
        return BodyVerdict(body if placed is found else _dumped(placed), number, rescued=rescued)
    first = next(iter(body_validator.iter_errors(found)))
    return BodyVerdict(body, number, _first_line(first.message), "/".join(map(str, first.instance_path)))


def parsed(kind: StructType) -> Column:
    """Return a column with the bodies, which are JSON text, parsed to the type `kind`.

    If Spark cannot parse a body, the additional field CORRUPT contains the body's text.
    """
    whole = StructType([*kind.fields, StructField(CORRUPT, StringType())])
    options = {"columnNameOfCorruptRecord": CORRUPT}
    return F.from_json(F.col("body").cast("string"), whole.json(), options)


def merge_types(old: DataType, new: DataType, place: str) -> DataType:
    """Return a type with the fields of both types, those of the old one first.

    `place` is the location of the type in the body, for errors. Raises PipelineError if a field has different
    types.
    """
    if isinstance(old, StructType) and isinstance(new, StructType):
        return _merged_fields(old, new, place)
    if isinstance(old, ArrayType) and isinstance(new, ArrayType):
        return ArrayType(merge_types(old.elementType, new.elementType, f"{place}.element"))
    if isinstance(old, MapType) and isinstance(new, MapType):
        return MapType(StringType(), merge_types(old.valueType, new.valueType, f"{place}.value"))
    if old == new or (isinstance(old, DoubleType) and isinstance(new, LongType)):
        return old
    raise PipelineError(
        f"{place} is {old.simpleString()} in the table, and {new.simpleString()} by this schema: a column"
        " keeps its type; give the field another name, or the rows another table"
    )


def _merged_fields(old: StructType, new: StructType, place: str) -> StructType:
    after = {one.name: one.dataType for one in new.fields}
    before = {one.name: one.dataType for one in old.fields}
    present_fields = [
        StructField(name, merge_types(kind, after.get(name, kind), f"{place}.{name}"))
        for name, kind in before.items()
    ]
    fresh = [StructField(name, kind) for name, kind in after.items() if name not in before]
    return StructType([*present_fields, *fresh])


def additions(old: StructType, new: StructType, place: str) -> Iterator[tuple[str, str]]:
    """Yield (SQL name, type) of each field that `new` has and `old` lacks, also in nested types.

    `place` is the SQL name of the column that has these types.
    """
    there = {one.name: one.dataType for one in old.fields}
    for one in new.fields:
        name = f"{place}.`{one.name}`"
        if one.name in there:
            yield from _inside(there[one.name], one.dataType, name)
        else:
            yield name, one.dataType.simpleString()


def _inside(old: DataType, new: DataType, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(old, StructType) and isinstance(new, StructType):
        yield from additions(old, new, name)
    elif isinstance(old, ArrayType) and isinstance(new, ArrayType):
        yield from _inside(old.elementType, new.elementType, f"{name}.element")
    elif isinstance(old, MapType) and isinstance(new, MapType):
        yield from _inside(old.valueType, new.valueType, f"{name}.value")


class EventTime(NamedTuple):
    """Location of the event time in a body.

    `path` has the field names, from the outermost to the innermost. `unit` is the unit of a time that is a
    number.
    """

    path: tuple[str, ...]
    unit: str = "ms"

    @classmethod
    def read(cls, text: str) -> EventTime:
        """Parse `field.field` or `field.field:unit`. Raises PipelineError for an unknown unit."""
        path, _, unit = text.partition(":")
        if unit and unit not in UNITS:
            raise PipelineError(f"the unit of an event time must be {', '.join(UNITS)}, not {unit!r}")
        return cls(tuple(path.split(".")), unit or "ms")

    def column(self, body: Column, kind: StructType) -> tuple[Column, Column]:
        """Return two columns: the value in the body, and this value converted to a time.

        `body` is the column of bodies, and `kind` its type. Raises PipelineError if the field does not exist
        or cannot be a time.
        """
        found: DataType = kind
        for name in self.path:
            fields = {one.name: one.dataType for one in found.fields} if isinstance(found, StructType) else {}
            if name not in fields:
                raise PipelineError(
                    f"the schema has no field {'.'.join(self.path)}; its fields are "
                    f"{', '.join(fields) or 'none'}"
                )
            found, body = fields[name], body.getField(name)
        if isinstance(found, TimestampType):
            return body, body
        if isinstance(found, StringType):
            return body, F.try_to_timestamp(body)
        if isinstance(found, LongType | DoubleType | DecimalType):
            return body, F.timestamp_micros((body * UNITS[self.unit]).cast("long"))
        raise PipelineError(f"{'.'.join(self.path)} is {found.simpleString()}, not a time")

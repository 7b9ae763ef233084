"""Bodies that fit a JSON Schema, and those that do not: each has a reason then, and its place in the body.

What does not fit is told apart in a Python worker: first by the schema itself, keyword by keyword, then by
the types of the table's columns (a whole number of 20 digits has no place in one). Values that a schema takes
and Spark's parser does not (1e3 for a whole number, small letters in a time) are written as Spark reads them.
What Spark still cannot read is told by it, without a place. So no value becomes null on its way.

What fits but would not be the same in its column is rescued, by its place in the body: fields that the table
has no column for, numbers of more digits than a double has, fractions of a microsecond, leap seconds. The
column has what comes nearest. A column of decimals, or of text, has every digit.

A body in the wire format of Confluent's serializers (a zero octet, the number of its schema in a registry,
then JSON) loses those five octets, and its row has the number. Their registry is not asked, for the route's
own schema is what the table's columns come from; Avro and Protobuf are no JSON, and are told so.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
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
from gateway.pipeline.jobs.schema import from_json_schema, route_of
from gateway.pipeline.traffic.fates import Candidate
from gateway.pipeline.traffic.rows import address_of

VERSION_DIGITS: Final = 12  # of the digest of a schema that has no $id
FAULT_CHARACTERS_MAX: Final = 300
CORRUPT: Final = "_corrupt_record"
INTEGER_MAX: Final = (1 << 63) - 1  # of a column of whole numbers
EXACT_MAX: Final = 1 << 53  # beyond it a number with a fraction or exponent is not told exactly
DIGITS_MAX: Final = 18  # of a whole number that surely has 64 bits
LONG: Final = re.compile(rb"[0-9][0-9.]{15}|[0-9][eE][+-]?[0-9]")
"""What a body has whose numbers a double may not tell exactly; or what is in a text and only looks so."""
FINE: Final = re.compile(r"([.,][0-9]{6})([0-9]+)")
"""A fraction of a second, and the digits below a microsecond."""
LEAP: Final = re.compile(r"(T[0-9]{2}:[0-9]{2}:)60")
ENVELOPE: Final = struct.Struct(">BI")  # of Confluent's wire format: zero, and the schema's number
UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Microseconds in what a number of an event time may count."""

KNOWN_MAX: Final = 200_000  # addresses whose captures a task remembers
ADDED: Final = ("registry_id", "fault", "place", "rescued")


class BodySchema(NamedTuple):
    """A JSON Schema: its text, Spark's type of what it describes, and by what rows know it: its `$id`, else
    the beginning of its digest."""

    text: str
    kind: StructType
    version: str


def schema_of(file: Path) -> BodySchema:
    """The schema in a file. Raises PipelineError: it cannot be read, or is none, or of no object."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"the JSON Schema {file} cannot be read: {error}") from error
    kind = from_json_schema(text)
    if not isinstance(kind, StructType):
        raise PipelineError(f"{file} describes no object with properties, and a table's columns are those")
    validator(text)
    known = json.loads(text).get("$id")
    return BodySchema(text, kind, str(known or sha256(text.encode()).hexdigest()[:VERSION_DIGITS]))


def validator(text: str) -> Any:
    """What asks the schema. Raises PipelineError: it is none."""
    try:
        return jsonschema_rs.validator_for(json.loads(text), validate_formats=True, retriever=_nowhere)
    except jsonschema_rs.ValidationError as error:
        raise PipelineError(f"the JSON Schema is none: {_first_line(error.message)}") from error


def _nowhere(address: str) -> Any:
    """A schema is one file: what a worker would fetch could change between two tasks."""
    raise ValueError(f"{address} is another file")


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:FAULT_CHARACTERS_MAX]


BodyPath = tuple[str, ...]
"""The fields and places in lists that lead to a value of a body."""


class NoPlaceError(Exception):
    """A value that the schema takes and its column cannot. `path` is where it stands in the body."""

    def __init__(self, why: str, path: BodyPath) -> None:
        super().__init__(why)
        self.path = path


class Placing:
    """The values of one body on their way into columns. `rescued` gets those that would not be the same
    there, by their place. `exact`: numbers are as they were written, whole ones and decimals."""

    def __init__(self, *, exact: bool = False) -> None:
        self.rescued: dict[str, Any] = {}
        self._exact = exact

    def placed(self, value: Any, kind: DataType, path: BodyPath = ()) -> Any:
        """Return a value as Spark's parser takes it for a column of this type; itself, if it does already.

        Raises NoPlaceError: no such column has a place for it.
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
                return _whole(value, path)
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
        made = {name: self.placed(value[name], one, (*path, name)) for name, one in kinds.items()}
        changed = {name: one for name, one in made.items() if one is not value[name]}
        return value | changed if changed else value

    def _list(self, value: list[Any], kind: DataType, path: BodyPath) -> list[Any]:
        items = [self.placed(one, kind, (*path, str(at))) for at, one in enumerate(value)]
        return value if all(one is old for one, old in zip(items, value, strict=True)) else items

    def _double(self, value: int | float | Decimal, path: BodyPath) -> int | float:
        if isinstance(value, float) or (isinstance(value, int) and -EXACT_MAX <= value <= EXACT_MAX):
            return value
        nearest = float(value)
        if not isfinite(nearest):
            raise NoPlaceError(f"{value} has no place in its column: it is beyond what a double has", path)
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
            if leaps:  # as the clocks of computers count, which have none
                text = (moment + timedelta(seconds=1)).isoformat()
        except (ValueError, OverflowError):
            raise NoPlaceError(f"{value!r} has no place in its column of times", path) from None
        if leaps or (fraction is not None and fraction[2].strip("0")):
            self.rescued["/".join(path)] = value
        return value if text == value else text


def _text(value: Any) -> Any:
    """What is no text, as it was written: Spark's parser would make a double of a number."""
    return str(value) if isinstance(value, int | Decimal) else _dumped(value).decode()


def _whole(value: int | float | Decimal, path: BodyPath) -> int:
    if isinstance(value, float) and (not value.is_integer() or abs(value) > EXACT_MAX):
        raise NoPlaceError(f"{value} has no place in its column of whole numbers", path)
    if isinstance(value, Decimal) and (value.adjusted() > DIGITS_MAX or value != value.to_integral_value()):
        raise NoPlaceError(f"{value} has no place in its column of whole numbers", path)
    found = int(value)
    if not -INTEGER_MAX - 1 <= found <= INTEGER_MAX:
        raise NoPlaceError(f"{value} has no place in its column: whole numbers have 64 bits", path)
    return value if isinstance(value, int) else found


def _decimal(value: int | float | Decimal, kind: DecimalType, path: BodyPath) -> int | float | Decimal:
    found = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    _, digits, exponent = found.as_tuple()
    assert isinstance(exponent, int)  # JSON has no infinity
    zeros = len(digits) - len("".join(map(str, digits)).rstrip("0"))
    if -exponent - zeros > kind.scale or len(digits) + exponent > kind.precision - kind.scale:
        raise NoPlaceError(f"{value} has no place in its column of {kind.simpleString()}", path)
    return value


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, default=_written)


def _written(value: Any) -> Any:
    if isinstance(value, Decimal):
        return orjson.Fragment(str(value))
    raise TypeError


def exactly(body: bytes) -> Any:
    """JSON whose numbers have all their digits. Raises NoPlaceError: one has an exponent beyond them all."""
    return json.loads(body, parse_float=_fraction, parse_int=_integer)


def _fraction(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise NoPlaceError(f"{text} has no place in any column", ()) from None


def _integer(text: str) -> int | Decimal:
    """What has more than 64 bits is written by nobody but as a decimal."""
    found = Decimal(text)
    return int(text) if found.adjusted() < DIGITS_MAX else found


class Fitted:
    """`mapInArrow` of a route's rows: puts what it captures behind them, and of each body whether it fits."""

    def __init__(
        self, candidate: Candidate, route: str, captures: tuple[str, ...], schema: str, kind: StructType
    ) -> None:
        """`kind` is the type of a body in the table, which may have more fields than the schema."""
        self._candidate = candidate
        self._route = route
        self._captures = captures
        self._schema = schema
        self._kind = kind

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        route = route_of(self._candidate, self._route)
        queue = self._candidate.queue_of(route.source, route.name)
        separator = route.pattern.dialect.separator
        known: dict[tuple[Any, ...], tuple[str | None, ...]] = {}
        nothing: tuple[str | None, ...] = (None,) * len(self._captures)
        asked = validator(self._schema)
        for batch in batches:
            captured = []
            words = [batch.column(name).to_pylist() for name in ("protocol", "scope", "name")]
            for address in zip(*words, strict=True):
                if address not in known:
                    if len(known) >= KNOWN_MAX:
                        known.clear()
                    found = route.pattern.match(address_of(*address), queue)
                    known[address] = (
                        nothing  # of a mapping before, which had another pattern
                        if found is None
                        else tuple(separator.join(found.get(name, ())) for name in self._captures)
                    )
                captured.append(known[address])
            told = [told_of(body, asked, self._kind) for body in batch.column("body").to_pylist()]
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns["body"] = pa.array([one.body for one in told], pa.binary())
            columns["registry_id"] = pa.array([one.registry_id for one in told], pa.int64())
            columns["fault"] = pa.array([one.fault for one in told], pa.string())
            columns["place"] = pa.array([one.place for one in told], pa.string())
            columns["rescued"] = pa.array([one.rescued for one in told], pa.string())
            for at, name in enumerate(self._captures):
                columns[captured_as(name)] = pa.array([one[at] for one in captured], pa.string())
            yield pa.RecordBatch.from_pydict(columns)


def captured_as(capture: str) -> str:
    """The name of a capture's column on the way, so that it is no other's."""
    return f"capture {capture}"


class Told(NamedTuple):
    """A body without its envelope, the number that this had, and what is wrong with it; None: nothing.
    `rescued`: JSON of the values that are not the same in their column, or have none, by their place."""

    body: bytes | None
    registry_id: int | None = None
    fault: str | None = None
    place: str | None = None
    rescued: str | None = None


def told_of(body: bytes | None, asked: Any, kind: DataType) -> Told:
    """Return what is to be said of a body. `asked` validates it, `kind` is Spark's type of it."""
    if body is None:
        return Told(None, fault="the journal has no body")
    number = None
    if body[:1] == b"\0" and len(body) > ENVELOPE.size:
        _, number = ENVELOPE.unpack_from(body)
        body = body[ENVELOPE.size :]
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return Told(body, number, f"no JSON: {_first_line(str(error))}")
    if asked.is_valid(found):
        exact = LONG.search(body) is not None
        placing = Placing(exact=exact)
        try:
            found = exactly(body) if exact else found
            placed = placing.placed(found, kind)
        except NoPlaceError as error:
            return Told(body, number, _first_line(str(error)), "/".join(error.path))
        rescued = _dumped(placing.rescued).decode() if placing.rescued else None
        return Told(body if placed is found else _dumped(placed), number, rescued=rescued)
    first = next(iter(asked.iter_errors(found)))
    return Told(body, number, _first_line(first.message), "/".join(map(str, first.instance_path)))


def parsed(kind: StructType) -> Column:
    """The body as columns, and what had no place in them under CORRUPT."""
    whole = StructType([*kind.fields, StructField(CORRUPT, StringType())])
    options = {"columnNameOfCorruptRecord": CORRUPT}
    return F.from_json(F.col("body").cast("string"), whole.json(), options)


def merged(old: DataType, new: DataType, place: str) -> DataType:
    """A type in which there is a place for values of both: the fields of both, in the order of the old one.
    Raises PipelineError: the new one has another type for a field than a table has already."""
    if isinstance(old, StructType) and isinstance(new, StructType):
        return _merged_fields(old, new, place)
    if isinstance(old, ArrayType) and isinstance(new, ArrayType):
        return ArrayType(merged(old.elementType, new.elementType, f"{place}.element"))
    if isinstance(old, MapType) and isinstance(new, MapType):
        return MapType(StringType(), merged(old.valueType, new.valueType, f"{place}.value"))
    if old == new or (isinstance(old, DoubleType) and isinstance(new, LongType)):
        return old
    raise PipelineError(
        f"{place} is {old.simpleString()} in the table, and {new.simpleString()} by this schema: a column"
        " keeps its type; give the field another name, or the rows another table"
    )


def _merged_fields(old: StructType, new: StructType, place: str) -> StructType:
    after = {one.name: one.dataType for one in new.fields}
    before = {one.name: one.dataType for one in old.fields}
    kept = [
        StructField(name, merged(kind, after.get(name, kind), f"{place}.{name}"))
        for name, kind in before.items()
    ]
    fresh = [StructField(name, kind) for name, kind in after.items() if name not in before]
    return StructType([*kept, *fresh])


def additions(old: StructType, new: StructType, place: str) -> Iterator[tuple[str, str]]:
    """The fields that `new`, a merged type, has besides: what SQL calls them, and their types."""
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
    """Where in a body its time stands: the fields that lead there, and what a number counts."""

    path: tuple[str, ...]
    unit: str = "ms"

    @classmethod
    def read(cls, text: str) -> EventTime:
        """`field.field` or `field.field:unit`. Raises PipelineError."""
        path, _, unit = text.partition(":")
        if unit and unit not in UNITS:
            raise PipelineError(f"an event time counts {', '.join(UNITS)}, not {unit!r}")
        return cls(tuple(path.split(".")), unit or "ms")

    def column(self, body: Column, kind: StructType) -> tuple[Column, Column]:
        """The value in a body, and its time. Raises PipelineError: there is no such field, or it cannot be a
        time."""
        found: DataType = kind
        for name in self.path:
            fields = {one.name: one.dataType for one in found.fields} if isinstance(found, StructType) else {}
            if name not in fields:
                raise PipelineError(
                    f"the schema has no field {'.'.join(self.path)}; there are {', '.join(fields) or 'none'}"
                )
            found, body = fields[name], body.getField(name)
        if isinstance(found, TimestampType):
            return body, body
        if isinstance(found, StringType):
            return body, F.try_to_timestamp(body)
        if isinstance(found, LongType | DoubleType | DecimalType):
            return body, F.timestamp_micros((body * UNITS[self.unit]).cast("long"))
        raise PipelineError(f"{'.'.join(self.path)} is {found.simpleString()}, and no time")

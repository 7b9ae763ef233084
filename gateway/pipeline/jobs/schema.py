"""Job `schema`: show the messages of a route as a table, with columns for captures and the JSON body.

It also creates a view of the last value of each address. Captures are the parts of an address that the
route's pattern names. They are computed by the gateway's own patterns, once for each address in a task. The
type of a body is inferred from recorded bodies, or derived from a JSON Schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
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
from gateway.mapping.routes import Route
from gateway.pipeline.traffic.fates import CandidateMapping
from gateway.pipeline.traffic.rows import ASIDE, address_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAMPLE_ROWS: Final = 10_000
COLUMNS: Final = (
    *("shard", "source_endpoint", "received", "slot", "source_protocol", "source_address"),
    *("source_scope", "source_name", "client", "message_id", "body", "reason_text"),
)
OWN: Final = ("received", "address", "client", "message_id")
BODY: Final = "body"
DECIMAL_DIGITS: Final = 38  # Maximum of a decimal column.
DEPTH_MAX: Final = 32  # Nesting of a JSON Schema; deeper schemas are recursive.
NAME: Final = re.compile(r"[^A-Za-z0-9_]")


class Captures:
    """Function for Spark's `mapInArrow` that appends one column for each capture of a route.

    A capture is the part of an address that a named wildcard of the route's pattern matches.
    """

    def __init__(self, candidate: CandidateMapping, route: str, names: tuple[str, ...]) -> None:
        self._candidate = candidate
        self._route = route
        self._names = names

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the rows whose address matches the route's pattern, with a column for each capture."""
        route = route_of(self._candidate, self._route)
        queue = self._candidate.queue_of(route.source, route.name)
        separator = route.pattern.dialect.separator
        cache: dict[tuple[Any, ...], tuple[str | None, ...] | None] = {}
        for batch in batches:
            addresses = zip(
                *(batch.column(name).to_pylist() for name in ("protocol", "scope", "name")), strict=True
            )
            found = []
            for address in addresses:
                if address not in cache:
                    captures = route.pattern.match(address_of(*address), queue)
                    cache[address] = (
                        None
                        if captures is None
                        else tuple(separator.join(captures.get(name, ())) for name in self._names)
                    )
                found.append(cache[address])
            keep = [one is not None for one in found]
            matched = [one for one in found if one is not None]
            filtered = batch.filter(pa.array(keep, pa.bool_())).select([*OWN, BODY])
            columns = [pa.array([one[at] for one in matched], pa.string()) for at in range(len(self._names))]
            names = [*OWN, BODY, *(column_of(name) for name in self._names)]
            yield pa.RecordBatch.from_arrays([*filtered.columns, *columns], names=names)


def route_of(candidate: CandidateMapping, name: str) -> Route:
    """Return the route `name` of a mapping. Raises PipelineError if the mapping has no such route."""
    for route in candidate.router.routes:
        if route.name == name:
            return route
    there = ", ".join(route.name for route in candidate.router.routes)
    raise PipelineError(f"unknown route {name}; known: {there or 'none'}")


def column_of(capture: str, others: Collection[str] = (*OWN, BODY)) -> str:
    """Return the column name for a capture: its name, with underscores instead of special characters.

    If a column in `others` has that name, an underscore is appended.
    """
    found = NAME.sub("_", capture)
    return f"{found}_" if found in others else found


def table(traffic: DataFrame, candidate: CandidateMapping, name: str, body: DataType | None) -> DataFrame:
    """Return the messages whose address matches the route `name`, one row for each message.

    The columns are received, address, client, message_id, the route's captures, and the body parsed as the
    type `body` (None: as bytes). A body that cannot be parsed is null. Raises PipelineError if there is no
    such route.
    """
    route = route_of(candidate, name)
    captures = tuple(route.pattern.names)
    rows = (
        traffic.where(F.col("source_endpoint") == route.source)
        .where(~F.coalesce(F.expr(ASIDE), F.lit(False)))
        .dropDuplicates(["shard", "source_endpoint", "received", "slot"])
        .select(
            "received",
            F.col("source_address").alias("address"),
            *("client", "message_id", "body"),
            F.col("source_protocol").alias("protocol"),
            F.col("source_scope").alias("scope"),
            F.col("source_name").alias("name"),
        )
    )
    plain = StructType(
        [rows.schema[one] for one in (*OWN, BODY)]
        + [StructField(column_of(one), StringType()) for one in captures]
    )
    found = rows.mapInArrow(Captures(candidate, name, captures), plain)
    order = [*OWN, *(column_of(one) for one in captures), BODY]
    if body is None:
        return found.select(*order)
    return found.withColumn(BODY, _parsed(body)).select(*order)


def _parsed(body: DataType) -> Column:
    if isinstance(body, StructType | ArrayType | MapType):
        return F.from_json(F.col(BODY).cast("string"), body.json())
    return F.expr(f"try_cast(cast({BODY} as string) as {body.simpleString()})")


def infer_type(data: DataFrame) -> DataType | None:
    """Infer the type of JSON bodies from a sample of the column `body` of `data`, and return it.

    Return None if the bodies are not JSON objects.
    """
    texts = data.where(F.col(BODY).isNotNull()).limit(SAMPLE_ROWS).select(F.col(BODY).cast("string"))
    lines = [row[0] for row in texts.collect()]
    if not lines:
        return None
    spark = data.sparkSession
    read = spark.read.json(spark.sparkContext.parallelize(lines))
    names = [field.name for field in read.schema.fields if field.name != "_corrupt_record"]
    if not names:
        return None
    return StructType([read.schema[name] for name in names])


def last_values(rows: DataFrame) -> DataFrame:
    """Return the newest row of each address in `rows`."""
    names = [name for name in rows.columns if name != "address"]
    newest = F.max_by(F.struct(*names), F.col("received")).alias("newest")
    return rows.groupBy("address").agg(newest).select("address", "newest.*")


def create_views(rows: DataFrame, route: str) -> tuple[str, str]:
    """Create two session views: the rows of a route, and the last row of each address. Return their names."""
    name = NAME.sub("_", route)
    rows.createOrReplaceTempView(name)
    last_values(rows).createOrReplaceTempView(f"{name}_last")
    return name, f"{name}_last"


def from_json_schema(text: str) -> DataType:
    """Return the Spark type of values that the JSON Schema `text` describes.

    Raises PipelineError if the schema is invalid or cannot be converted.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PipelineError(f"the JSON Schema is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise PipelineError("a JSON Schema must be an object")
    return _typed(document, document, 0)


_PLAIN: Final[Mapping[str, DataType]] = {
    "integer": LongType(),
    "number": DoubleType(),
    "boolean": BooleanType(),
    "string": StringType(),
    "null": StringType(),
}
_FORMATS: Final[Mapping[str, DataType]] = {"date-time": TimestampType(), "date": DateType()}


def _typed(schema: Any, document: dict[str, Any], depth: int) -> DataType:
    """Return the Spark type for `schema`, a part of a JSON Schema. The type is text if no other is suitable.

    `document` is the whole schema, and `depth` the nesting depth. Raises PipelineError for a recursive
    schema.
    """
    if not isinstance(schema, dict):
        return StringType()
    if depth > DEPTH_MAX:
        raise PipelineError("the JSON Schema refers to itself, and a Spark type cannot")
    reference = schema.get("$ref")
    if reference is not None:
        return _typed(_referred(reference, document), document, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        types = [kind for kind in kinds if kind != "null"]
        kinds = types[0] if len(types) == 1 else "number" if set(types) == {"integer", "number"} else None
    if kinds is None:
        others = [
            one for word in ("anyOf", "oneOf") for one in schema.get(word, ()) if one != {"type": "null"}
        ]
        if len(others) == 1:
            return _typed(others[0], document, depth + 1)
        kinds = "object" if "properties" in schema else None
    if kinds == "object":
        return _object(schema, document, depth)
    if kinds == "array":
        return ArrayType(_typed(schema.get("items"), document, depth + 1))
    if kinds == "string":
        return _FORMATS.get(schema.get("format", ""), StringType())
    if kinds == "number" and (scale := _scale(schema.get("multipleOf"))) is not None:
        return DecimalType(DECIMAL_DIGITS, scale)
    return _PLAIN.get(kinds or "", StringType())


def _scale(step: Any) -> int | None:
    """Return the number of decimal places of numbers with the `multipleOf` value `step` in a JSON Schema.

    Return None if `step` is not a power of ten.
    """
    if not isinstance(step, int | float) or isinstance(step, bool):
        return None
    sign, digits, exponent = Decimal(repr(step)).normalize().as_tuple()
    if sign or digits != (1,) or not isinstance(exponent, int) or not -DECIMAL_DIGITS <= exponent <= 0:
        return None
    return -exponent


def _object(schema: dict[str, Any], document: dict[str, Any], depth: int) -> DataType:
    properties = schema.get("properties")
    if properties:
        fields = [StructField(name, _typed(one, document, depth + 1)) for name, one in properties.items()]
        return StructType(fields)
    return MapType(StringType(), _typed(schema.get("additionalProperties"), document, depth + 1))


def _referred(reference: Any, document: dict[str, Any]) -> Any:
    """Return the part of a JSON Schema that a reference `#/...` points to.

    Raises PipelineError for a reference to another document, or to a missing part.
    """
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise PipelineError(
            f"the JSON Schema refers to {reference!r}; only its own parts (#/...) are followed"
        )
    found: Any = document
    for step in filter(None, reference[1:].split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or step not in found:
            raise PipelineError(f"the JSON Schema has no {reference}")
        found = found[step]
    return found

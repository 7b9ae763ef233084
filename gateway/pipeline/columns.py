"""Columns of a journal row, with their Spark and Arrow types.

They are the journal's own columns (`docs/reference/journal.md`) and three derived ones: `shard`, `sequence`
and `headers`. (shard, sequence) identifies a row permanently. Unsigned numbers have the next wider signed
type, which Spark has; texts are never null where the journal has "". Every column is nullable in Spark,
because a journal of another version may lack it. Spark is imported only when needed: exports to Arrow or
Parquet work without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from gateway.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Arrow = Any
"""An Arrow type, schema or array; pyarrow has no type stubs."""

HEADER_NAMES: Final = ("name", "type", "value")
HEADER: Final = "struct<name:string,type:string,value:string>"
"""Typed header. Headers are ordered and names may repeat. `type` is a name of the model's ValueType; `value`
is the text of a string, for other types JSON as in `gateway/store/properties.py`."""

HEADERS: Final = f"array<{HEADER}>"
HEADER_ARROW: Final[Arrow] = pa.struct([(name, pa.string()) for name in HEADER_NAMES])
_TIME: Final[Arrow] = pa.timestamp("us", tz="UTC")


class JournalColumn(NamedTuple):
    """Column of the journal: name, Spark type in SQL notation, Arrow type, and description (`says`)."""

    name: str
    spark: str
    arrow: Arrow
    says: str


def _text(name: str, says: str) -> JournalColumn:
    return JournalColumn(name, "string", pa.string(), says)


def _time(name: str, says: str) -> JournalColumn:
    return JournalColumn(name, "timestamp", _TIME, says)


def _flag(name: str, says: str) -> JournalColumn:
    return JournalColumn(name, "boolean", pa.bool_(), says)


COLUMNS: Final = (
    _text(
        "shard",
        "number of the process that wrote the row, after the name of its folder and a slash if it has one",
    ),
    JournalColumn(
        "sequence",
        "bigint",
        pa.int64(),
        "number of the row in its shard; a power failure may repeat unsynced ones",
    ),
    _time("received", "when the message arrived, UTC"),
    _time("settled", "when its outcome was reported to its source, UTC"),
    JournalColumn("slot", "bigint", pa.int64(), "position among messages received together; see the journal"),
    _text("source_endpoint", "listener or link that received it"),
    _text("client", 'client identifier; "": unknown'),
    _text("user", 'user name; "": unknown'),
    _text("remote_address", 'host:port; "": unknown'),
    _text("source_protocol", "name of the protocol, as in the configuration"),
    _text("route", 'name of the route; "": it took none'),
    _text("mapping_version", "version of the mapping file at that time"),
    _text("target_endpoint", "listener or link to which it was routed"),
    _text("target_protocol", "as source_protocol"),
    _text("outcome", "accepted, released or rejected"),
    _text("reason", "none, or the reason"),
    _text("reason_text", "the reason in words"),
    _text("source_address", "topic; exchange:routing key; service:destination"),
    _text("source_scope", "exchange or service; null in MQTT"),
    _text("source_name", "topic, routing key or destination"),
    _text("target_address", "as source_address; null: a route refused the message"),
    _text("target_scope", "as source_scope"),
    _text("target_name", "as source_name"),
    JournalColumn("assurance", "tinyint", pa.int8(), "0, 1 or 2, as received"),
    _flag("durable", "as received"),
    _flag("retain", "as received"),
    JournalColumn("hops", "smallint", pa.int16(), "routes crossed before; 255: or more"),
    JournalColumn("delivered_assurance", "tinyint", pa.int8(), "as delivered"),
    _flag("delivered_durable", "as delivered"),
    _flag("delivered_retain", "as delivered"),
    _time("expires", "UTC; null: never"),
    JournalColumn("body_size", "bigint", pa.int64(), "bytes"),
    _text("properties", "one JSON object, as received; {}: none"),
    _text("message_id", "null: none"),
    _text("correlation_id", "null: none, or not UTF-8 (then it is in properties)"),
    _text("content_type", "null: none"),
    JournalColumn("body", "binary", pa.binary(), "the body; null: it was not recorded"),
    JournalColumn(
        "headers", f"array<{HEADER}>", pa.list_(pa.field("element", HEADER_ARROW)), "typed headers"
    ),
)
LOW_WATER: Final = _time(
    "low_water", "time up to which the shard is complete: no later row was received before it; null: unknown"
)
"""Column that is read only if it is named: the low-water mark of the row's block."""

BY_NAME: Final = {column.name: column for column in (*COLUMNS, LOW_WATER)}


def spark_schema(names: Sequence[str] | None = None) -> StructType:
    """Return the Spark schema of the journal's columns `names` in this order; None selects all columns.

    Raises PipelineError for an unknown column.
    """
    from pyspark.sql import types as known

    header = known.StructType([known.StructField(name, known.StringType()) for name in HEADER_NAMES])
    types = {
        "string": known.StringType(),
        "timestamp": known.TimestampType(),
        "boolean": known.BooleanType(),
        "bigint": known.LongType(),
        "tinyint": known.ByteType(),
        "smallint": known.ShortType(),
        "binary": known.BinaryType(),
        HEADERS: known.ArrayType(header),
    }
    return known.StructType(
        [known.StructField(one.name, types[one.spark]) for one in _selected_columns(names)]
    )


def arrow_schema(names: Sequence[str] | None = None) -> Arrow:
    """Return the Arrow schema of the journal's columns `names` in this order; None selects all columns."""
    return pa.schema([(column.name, column.arrow) for column in _selected_columns(names)])


def _selected_columns(names: Sequence[str] | None) -> Sequence[JournalColumn]:
    if names is None:
        return COLUMNS
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise PipelineError(f"the journal has no column {', '.join(unknown)}; it has {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names]

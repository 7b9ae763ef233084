"""Columns of the live sources: those of the journal that a broker provides, and `redelivered`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.types import BooleanType, StructField, StructType

from gateway.model.message import Message
from gateway.pipeline.columns import arrow_schema, spark_schema
from gateway.store.journal.encoder import LATEST
from gateway.store.journal.wall import SECOND
from gateway.store.journal.wires import recorded_texts, words_of

NAMES: Final = (
    *("received", "source_protocol", "source_address", "source_scope", "source_name"),
    *("assurance", "durable", "retain", "hops", "expires", "body_size", "properties", "message_id", "body"),
)
REDELIVERED: Final = "redelivered"
HOPS_MAX: Final = 255  # Maximum of the journal.


class LiveMessage(NamedTuple):
    """Received message with the time of receipt (microseconds UTC) and the broker's redelivered flag."""

    message: Message
    utc_us: int
    redelivered: bool


def live_schema() -> StructType:
    """Return the Spark schema of rows from the live sources."""
    return StructType([*spark_schema(NAMES).fields, StructField(REDELIVERED, BooleanType())])


def live_arrow() -> Any:
    """Return the Arrow schema of rows from the live sources."""
    return arrow_schema(NAMES).append(pa.field(REDELIVERED, pa.bool_()))


def batch_of(rows: Sequence[LiveMessage]) -> Any:
    """Return the rows as an Arrow record batch."""
    messages = [row.message for row in rows]
    addresses = [words_of(message.address) for message in messages]
    sets = [recorded_texts(message.property_set) for message in messages]
    columns = [
        [row.utc_us for row in rows],
        [message.address.protocol for message in messages],
        [_text(address[0]) for address in addresses],
        [_text(address[1]) for address in addresses],
        [_text(address[2]) for address in addresses],
        [message.assurance for message in messages],
        [message.durable for message in messages],
        [message.retain for message in messages],
        [min(message.hops, HOPS_MAX) for message in messages],
        [int(min(message.expires, LATEST) * SECOND) or None for message in messages],
        [len(message.body) for message in messages],
        [texts[0].decode() for texts in sets],
        [_text(texts[1]) for texts in sets],
        [message.body for message in messages],
        [row.redelivered for row in rows],
    ]
    schema = live_arrow()
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()

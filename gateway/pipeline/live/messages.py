"""Conversion of rows to messages for the sink: address, properties and message id.

The address is given in the terms of the protocol (`topic`; `queue`, or `exchange` and `routing_key`;
`service` and `destination`), each as a column, or as an option for all rows; or as one column `address` in
the journal's form. Properties are those of the column `properties`, in the journal's JSON, and each column
for a single property overrides them. A message without an id gets one that is the same whenever the row is
written again: the journal's shard and sequence if the row has them, else query, batch, partition and
position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final

from pyspark.sql.types import BinaryType, StringType, StructType

from gateway.errors import PipelineError
from gateway.model.address import Address
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.dialect import NameRefused
from gateway.model.message import NEVER, Message
from gateway.model.properties import Headers, Properties, ValueType, property_set, string
from gateway.protocols import DIALECTS
from gateway.store.properties import decode_properties, decode_value

WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    dialect.name: tuple(name for name, word in dialect.words.items() if word.target is not None)
    for dialect in DIALECTS.values()
}
"""Words of an address by protocol, for columns or options."""

TEXTS: Final = (
    *("content_type", "content_encoding", "reply_to", "message_id", "type", "app_id", "user_id"),
    *("correlation", "priority", "timestamp"),
)
GUARANTEES: Final = ("assurance", "durable", "retain", "expires")
COLUMNS: Final = frozenset(
    (
        *("body", "address", "properties", "headers", "shard", "sequence"),
        *TEXTS,
        *GUARANTEES,
    )
)
ADDRESSES_MAX: Final = 65_536  # Maximum number that one task caches.


class RowConversion:
    """Conversion of rows with one schema to messages of one protocol.

    The object is created in the driver and used in the tasks. `fixed` has values for all rows: the parts of
    the address, and the QoS (`assurance`). `prefix` is prepended to generated message ids.
    """

    def __init__(self, protocol: str, schema: StructType, fixed: Mapping[str, str], prefix: str) -> None:
        """Check that the columns in `schema` are valid. The parameters are those of the class.

        Raises PipelineError for an unknown column, and if the rows have no address or body.
        """
        self.protocol = protocol
        self.fixed = dict(fixed)
        self.prefix = prefix
        self.names = [field.name for field in schema.fields]
        column_names = {*COLUMNS, *WORDS[protocol]}
        for name in self.names:
            if name not in column_names:
                near = get_close_matches(name, column_names, 1)
                hint = (
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"columns for {protocol}: {', '.join(sorted(column_names))}"
                )
                raise PipelineError(f"gateway_publish: unknown column {name!r}; {hint}")
        stated = {*self.names, *self.fixed}
        if "address" not in stated and not stated & set(WORDS[protocol]):
            raise PipelineError(f"no target: set a column or option {', '.join(WORDS[protocol])} or address")
        if "body" not in stated:
            raise PipelineError("gateway_publish needs the column body (binary or string)")
        kind = schema["body"].dataType
        if not isinstance(kind, BinaryType | StringType):
            raise PipelineError(f"the column body is binary or string, not {kind.simpleString()}")

    def messages(self, batch: Any, run: str, first: int) -> Iterator[Message]:
        """Yield the messages of the rows in an Arrow record batch, in order.

        A row without a message id gets one from its shard and sequence number or, without these, from `run`,
        an id of the query and task, and its position; `first` is the position of the first row. Raises
        PipelineError for an invalid row.
        """
        columns = {name: batch.column(at).to_pylist() for at, name in enumerate(batch.schema.names)}
        for place in range(batch.num_rows):
            row = {name: values[place] for name, values in columns.items()}
            yield self._message(row, run, first + place)

    def _message(self, row: dict[str, Any], run: str, place: int) -> Message:
        """Return the message of a row.

        A row without a message id gets one from its shard and sequence number or, without these, from `run`,
        an id of the query and task, and `place`, the position of the row.
        """
        body = row["body"]
        if isinstance(body, str):
            body = body.encode()
        properties = self._properties(row)
        if not properties.message_id:
            properties = replace(properties, message_id=self._id(row, run, place))
        qos = row.get("assurance")
        assurance = int(self.fixed.get("assurance", 1)) if qos is None else qos
        durable = row.get("durable")
        expires = row.get("expires")
        return Message(
            self._address(row),
            body or b"",
            property_set(properties),
            assurance,
            DURABLE_AT_QOS[assurance] if durable is None else durable,
            bool(row.get("retain")),
            expires.timestamp() if isinstance(expires, datetime) else NEVER,
        )

    def _id(self, row: dict[str, Any], run: str, place: int) -> str:
        shard, sequence = row.get("shard"), row.get("sequence")
        if shard is not None and sequence is not None:
            return f"{self.prefix}{shard}:{sequence}"
        return f"{self.prefix}{run}:{place}"

    def _address(self, row: dict[str, Any]) -> Address:
        words = {
            word: self.fixed.get(word) if row.get(word) is None else row[word]
            for word in WORDS[self.protocol]
        }
        dialect, address = DIALECTS[self.protocol], row.get("address")
        try:
            if not any(words.values()) and address is not None:
                return dialect.parse(address)
            return dialect.published({word: text for word, text in words.items() if text})[0]
        except NameRefused as error:
            where = address or " ".join(filter(None, words.values()))
            raise PipelineError(f"no message can be published to {where!r}: {error}") from error

    def _properties(self, row: dict[str, Any]) -> Properties:
        stated = row.get("properties")
        try:
            found = decode_properties((stated or "").encode())
        except (ValueError, KeyError, TypeError) as error:
            raise PipelineError(f"the column properties is not what a journal has: {stated!r}") from error
        changed = {name: row[name] for name in TEXTS if row.get(name) is not None}
        correlation = changed.get("correlation")
        if isinstance(correlation, str):
            changed["correlation"] = correlation.encode()
        moment = changed.get("timestamp")
        if isinstance(moment, datetime):
            changed["timestamp"] = int(moment.timestamp())
        headers = row.get("headers")
        if headers is not None:
            changed["headers"] = _headers(headers)
        return replace(found, **changed) if changed else found


def _headers(stated: Sequence[Any]) -> Headers:
    """Convert a row's headers to Headers: a map of texts, or the journal's list of (name, type, value)."""
    found = []
    for one in stated:
        if isinstance(one, dict):
            kind, text = one["type"], one["value"]
            plain = text if kind == ValueType.STRING.value else json.loads(text)
            found.append((one["name"], decode_value(kind, plain)))
        else:
            name, text = one
            found.append((name, string("" if text is None else str(text))))
    return tuple(found)

"""Sink `gateway_publish`: publish rows to a broker or a gateway, in batches and in streams.

A task connects, publishes its rows in order with a limit of unconfirmed ones, and reports to the driver when
the last one is confirmed. A failed attempt is not undone: the next one publishes its rows again with the same
ids, and a route that deduplicates refuses them. Temporarily refused rows are retried with fewer unconfirmed
ones; permanently refused rows fail the task, unless `onReject` is `skip`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from gateway.clients.wire import IN_FLIGHT, BrokerRefusal, Client, connect
from gateway.errors import PipelineError
from gateway.model.message import Message
from gateway.pipeline.live.messages import WORDS, RowConversion
from gateway.pipeline.live.options import CONNECTION, QueryOptions

PUBLISHING: Final = ("inFlight", "attempts", "onReject", "idPrefix", "qos")
CHUNK_ROWS: Final = 5_000
RETRY_SECS: Final = 0.2
RETRY_SECS_MAX: Final = 5.0
EXAMPLES: Final = 3


@dataclass(frozen=True)
class PublishedRows(WriterCommitMessage):
    """Result of one task: the number of published rows, and how many of them were refused."""

    rows: int
    refused: int


class PublishSource(DataSource):
    """Spark data source of the sink `gateway_publish`; see `docs/guides/pipeline-live.md`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        words = tuple(word for some in WORDS.values() for word in some)
        self.chosen = QueryOptions(self.name(), options, (*CONNECTION, *PUBLISHING, *words))

    def __repr__(self) -> str:
        return "PublishSource()"

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "gateway_publish"

    def writer(self, schema: StructType, overwrite: bool) -> BatchPublisher:
        """Return the writer of a batch query. Raises PipelineError for unusable options or columns."""
        self._append_only(overwrite)
        return BatchPublisher(SinkSettings(self.chosen, schema, secrets.token_hex(8)))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamPublisher:
        """Return the writer of a streaming query. Raises PipelineError for unusable options or columns."""
        self._append_only(overwrite)
        return StreamPublisher(SinkSettings(self.chosen, schema, ""))

    def _append_only(self, overwrite: bool) -> None:
        if overwrite:
            raise PipelineError("published messages cannot be overwritten; use mode('append')")


class SinkSettings:
    """Settings for publishing the rows of one query, which Spark sends to every task.

    `run` is an id of the query. It is part of the generated ids of messages whose rows have no id.
    """

    def __init__(self, options: QueryOptions, schema: StructType, run: str) -> None:
        """Check the options of a query and the columns of its rows, which `schema` describes.

        `run` is an id of the query. Raises PipelineError for unusable options or columns.
        """
        protocol = options.access().target.protocol
        fixed = {word: text for word in WORDS[protocol] if (text := options.text(word)) is not None}
        fixed["assurance"] = str(options.integer("qos", 1, least=0, most=2))
        self._options = options
        self._run = run
        self._shape = RowConversion(protocol, schema, fixed, options.text("idPrefix") or "")
        self._in_flight = options.integer("inFlight", IN_FLIGHT, most=65_000)
        self._attempts = options.integer("attempts", 5)
        self._skips = options.choice("onReject", "fail", ("fail", "skip")) == "skip"

    def connect(self) -> None:
        """Connect and disconnect once, to check that the options are usable.

        Raises LinkError if no connection is possible.
        """
        connect(self._options.access()).close()

    def publish(self, batches: Iterator[Any]) -> PublishedRows:
        """Publish all rows of a task, and wait for the broker's acknowledgements.

        Raises LinkError if the connection fails, and PipelineError for refused rows unless `onReject` is
        "skip".
        """
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        run = f"{query}:{batch}" if query else self._run
        run = f"{run}:{context.partitionId()}"
        client: Client | None = None
        rows = refused = 0
        try:
            for arrow in batches:
                messages = self._shape.messages(arrow, run, rows)
                while some := list(islice(messages, CHUNK_ROWS)):
                    client = client or connect(self._options.access())
                    refused += self._publish(client, some)
                    rows += len(some)
        except BaseException:
            if client is not None:
                client.close_abruptly()
            raise
        if client is not None:
            client.close()
        return PublishedRows(rows, refused)

    def _publish(self, client: Client, messages: Sequence[Message]) -> int:
        """Publish messages with retries, and return how many the broker has permanently refused.

        Raises LinkError if the connection fails, and PipelineError for refused messages unless `onReject` is
        "skip".
        """
        unpublished = dict(enumerate(messages))
        final: dict[int, BrokerRefusal] = {}
        in_flight, wait = self._in_flight, RETRY_SECS
        for attempt in range(self._attempts):
            positions = list(unpublished)
            refused = client.publish_many([unpublished[at] for at in positions], in_flight=in_flight)
            again: dict[int, Message] = {}
            for at, refusal in refused.items():
                position = positions[at]
                if refusal.final or attempt == self._attempts - 1:
                    final[position] = refusal
                else:
                    again[position] = unpublished[position]
            unpublished = again
            if not unpublished:
                break
            # Down to one at a time, which identifies the refused message.
            in_flight = max(1, in_flight // 10)
            time.sleep(wait)
            wait = min(wait * 2, RETRY_SECS_MAX)
        if final and not self._skips:
            examples = [
                f"{messages[at].address!r}: {why.text}" for at, why in islice(final.items(), EXAMPLES)
            ]
            raise PipelineError(f"{len(final)} messages were refused: {'; '.join(examples)}")
        return len(final)


class BatchPublisher(DataSourceArrowWriter):
    """Writer of a batch query, `df.write.format("gateway_publish")`."""

    def __init__(self, publication: SinkSettings) -> None:
        self._publication = publication

    def write(self, iterator: Iterator[Any]) -> PublishedRows:
        """Publish the rows of one task."""
        return self._publication.publish(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Complete the batch query. If it had no rows, connect once, which raises LinkError if it fails."""
        if not any(isinstance(one, PublishedRows) and one.rows for one in messages):
            self._publication.connect()


class StreamPublisher(DataSourceStreamArrowWriter):
    """Writer of a streaming query, `df.writeStream.format("gateway_publish")`."""

    def __init__(self, publication: SinkSettings) -> None:
        self._publication = publication

    def write(self, iterator: Iterator[Any]) -> PublishedRows:
        """Publish the rows of one task of a micro-batch."""
        return self._publication.publish(iterator)

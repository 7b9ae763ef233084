"""The format `gateway_publish`: rows are published to a broker or a gateway, in batches and in streams.

A task connects, publishes its rows in their order with so many on their way, and reports to the driver when
the last one is confirmed. An attempt that fails is not taken back: its rows are published again by the next
one, with the same ids, and a route that deduplicates refuses them. What the broker refuses for the moment is
tried again, fewer and fewer at a time; what it refuses for good fails the task, unless `onReject` is `skip`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pkgutil import resolve_name
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from gateway.clients.wire import IN_FLIGHT, Access, Client, Refusal
from gateway.errors import PipelineError
from gateway.model.message import Message
from gateway.pipeline.live.messages import WORDS, Shape
from gateway.pipeline.live.options import CONNECTION, Options
from gateway.protocols import DIALECTS

PUBLISHING: Final = ("inFlight", "attempts", "onReject", "idPrefix", "qos")
CHUNK_ROWS: Final = 5_000
RETRY_SECS: Final = 0.2
RETRY_SECS_MAX: Final = 5.0
EXAMPLES: Final = 3


@dataclass(frozen=True)
class Published(WriterCommitMessage):
    """What one task did."""

    rows: int
    refused: int


class PublishSource(DataSource):
    """The sink; see `docs/guides/pipeline-live.md`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        words = tuple(word for some in WORDS.values() for word in some)
        self.chosen = Options(self.name(), options, (*CONNECTION, *PUBLISHING, *words))

    def __repr__(self) -> str:
        return "PublishSource()"

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "gateway_publish"

    def writer(self, schema: StructType, overwrite: bool) -> BatchPublisher:
        """Of a batch. Raises PipelineError."""
        self._append_only(overwrite)
        return BatchPublisher(Publication(self.chosen, schema, secrets.token_hex(8)))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamPublisher:
        """Of a stream. Raises PipelineError."""
        self._append_only(overwrite)
        return StreamPublisher(Publication(self.chosen, schema, ""))

    def _append_only(self, overwrite: bool) -> None:
        if overwrite:
            raise PipelineError("what was published cannot be overwritten; say mode('append')")


class Publication:
    """How one query publishes; goes to every task. `run` stands in the ids of rows that have none."""

    def __init__(self, given: Options, schema: StructType, run: str) -> None:
        """Raises PipelineError for options and columns that cannot be used."""
        protocol = given.access().target.protocol
        fixed = {word: text for word in WORDS[protocol] if (text := given.text(word)) is not None}
        fixed["assurance"] = str(given.whole("qos", 1, least=0, most=2))
        self._given = given
        self._run = run
        self._shape = Shape(protocol, schema, fixed, given.text("idPrefix") or "")
        self._in_flight = given.whole("inFlight", IN_FLIGHT, most=65_000)
        self._attempts = given.whole("attempts", 5)
        self._skips = given.one_of("onReject", "fail", ("fail", "skip")) == "skip"

    def connect(self) -> None:
        """Connect, and leave again. Raises LinkError."""
        client_of(self._given.access()).close()

    def publish(self, batches: Iterator[Any]) -> Published:
        """Publish everything; returns when all is confirmed. Raises LinkError or PipelineError."""
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
                    client = client or client_of(self._given.access())
                    refused += self._publish(client, some)
                    rows += len(some)
        except BaseException:
            if client is not None:
                client.cut()
            raise
        if client is not None:
            client.close()
        return Published(rows, refused)

    def _publish(self, client: Client, messages: Sequence[Message]) -> int:
        """Publish some; returns how many were refused for good."""
        left = dict(enumerate(messages))
        final: dict[int, Refusal] = {}
        in_flight, wait = self._in_flight, RETRY_SECS
        for attempt in range(self._attempts):
            positions = list(left)
            refused = client.publish_many([left[at] for at in positions], in_flight=in_flight)
            again: dict[int, Message] = {}
            for at, refusal in refused.items():
                position = positions[at]
                if refusal.final or attempt == self._attempts - 1:
                    final[position] = refusal
                else:
                    again[position] = left[position]
            left = again
            if not left:
                break
            in_flight = max(1, in_flight // 10)  # in the end one at a time, which shows who is to blame
            time.sleep(wait)
            wait = min(wait * 2, RETRY_SECS_MAX)
        if final and not self._skips:
            given = [f"{messages[at].address!r}: {why.text}" for at, why in islice(final.items(), EXAMPLES)]
            raise PipelineError(f"{len(final)} messages were refused: {'; '.join(given)}")
        return len(final)


class BatchPublisher(DataSourceArrowWriter):
    """`df.write.format("gateway_publish")`."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication

    def write(self, iterator: Iterator[Any]) -> Published:
        """One task."""
        return self._publication.publish(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done. Raises LinkError: there were no rows, and there would be nobody to take any."""
        if not any(isinstance(one, Published) and one.rows for one in messages):
            self._publication.connect()


class StreamPublisher(DataSourceStreamArrowWriter):
    """`df.writeStream.format("gateway_publish")`."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication

    def write(self, iterator: Iterator[Any]) -> Published:
        """One task of a micro-batch."""
        return self._publication.publish(iterator)


def client_of(access: Access) -> Client:
    """A connection to publish on. Raises LinkError."""
    made: Client = resolve_name(DIALECTS[access.target.protocol].client)(access)
    return made

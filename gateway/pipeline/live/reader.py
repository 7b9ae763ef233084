"""Stream reader of the messages that a broker sends.

The connection belongs to the process that plans the query, because a message must be acknowledged where it
was received; a partition contains its messages. An offset is the number of a message in a *run* (one lifetime
of that process). A batch that was planned but not finished when the process died is planned again by Spark,
with an offset of another run: it is then empty, and the broker redelivers its messages into a later batch. So
a message is read at least once, and `redelivered` is the broker's flag.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from gateway.clients.wire import Client
from gateway.pipeline.limits import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from gateway.pipeline.live.columns import batch_of, live_arrow
from gateway.pipeline.live.options import QueryOptions
from gateway.pipeline.live.receiver import BufferLimits, Receiver

PARTITION_ROWS: Final = 10_000
MEBIBYTE: Final = 1_048_576
Offset = dict[str, Any]


class MessagePartition(InputPartition):
    """Spark partition that contains its messages, in Arrow's stream format."""

    def __init__(self, data: bytes) -> None:
        super().__init__(None)
        self.data = data

    def __repr__(self) -> str:
        return f"Carried({len(self.data)} bytes)"


class LiveReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stream reader of one query. When it is pickled for Spark's workers, its connection is left out."""

    def __init__(self, chosen: QueryOptions, window: int, connect: Callable[[], Client]) -> None:
        """Create a reader that connects on first use.

        `chosen` are the query's options, and `window` is the maximum number of unacknowledged messages.
        `connect` opens a connection that consumes.
        """
        self._chosen = chosen
        self._window = window
        self._connect = connect
        self._run = secrets.token_hex(4)
        self._receiver: Receiver | None = None
        self._until_quiet = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_receiver": None}

    @property
    def receiver(self) -> Receiver:
        """Receiver of messages. It is created, with its connection, on first use.

        Spark also creates readers that it only inspects, and those must not connect.
        """
        if self._receiver is None:
            options = self._chosen
            limits = BufferLimits(
                self._window,
                options.integer("bufferBytes", 64 * MEBIBYTE),
                options.number("awaySecs", 60.0),
            )
            self._receiver = Receiver(self._connect, limits)
        return self._receiver

    def initialOffset(self) -> Offset:
        """Return the offset before all messages."""
        return {"run": "", "next": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch by `maxMessagesPerTrigger`."""
        most = self._chosen.integer("maxMessagesPerTrigger", 0, least=0)
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end once no message has arrived for `quietSecs` seconds.

        A broker does not report that there are no more messages.
        """
        self._until_quiet = True

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Acknowledge the messages before `start`, which Spark has committed; return the micro-batch's end.

        `limit` has the maximum number of messages in the micro-batch.
        """
        above = start["next"] if start["run"] == self._run else 0
        receiver = self.receiver
        receiver.commit(above)  # Spark calls `commit` only with the next batch, which may wait for capacity.
        if self._until_quiet:
            receiver.wait(above, self._chosen.number("quietSecs", 2.0))
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = receiver.latest(above, most)
        return {"run": self._run, "next": found} if found > above else start

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return partitions with the messages from `start` up to, not including, `end`.

        Return an empty list for offsets of an earlier run, whose messages the broker redelivers.
        """
        if end["run"] != self._run:
            return []
        first = start["next"] if start["run"] == self._run else 0
        rows = self.receiver.rows(first, end["next"])
        return [
            MessagePartition(_data(batch_of(rows[at : at + PARTITION_ROWS])))
            for at in range(0, len(rows), PARTITION_ROWS)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition."""
        assert isinstance(partition, MessagePartition)
        with pa.ipc.open_stream(partition.data) as stream:
            yield from stream

    def commit(self, end: Offset) -> None:
        """Acknowledge all messages before `end`."""
        if end["run"] == self._run:
            self.receiver.commit(end["next"])


def _data(batch: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, live_arrow()) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())

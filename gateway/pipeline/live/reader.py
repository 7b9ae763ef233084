"""A stream of what a broker sends.

The connection lives in the process that plans the query, for an acknowledgement has to be said where the
message came from; a partition carries its messages with it. An offset is the number of a message in a *run*
(one life of that process). A batch that was planned and not finished when the process died is planned again
by Spark, with an offset of another run: it is empty then, and the broker sends its messages once more, into
a later batch. So a message is read at least once, and `redelivered` says what the broker knows of it.
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
from gateway.pipeline.live.options import Options
from gateway.pipeline.live.receiving import Limits, Receiver

PARTITION_ROWS: Final = 10_000
MEBIBYTE: Final = 1_048_576
Offset = dict[str, Any]


class Carried(InputPartition):
    """A partition with its messages, as Arrow writes them."""

    def __init__(self, octets: bytes) -> None:
        super().__init__(None)
        self.octets = octets

    def __repr__(self) -> str:
        return f"Carried({len(self.octets)} octets)"


class LiveReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One query's reader. What is sent to the workers is without the connection."""

    def __init__(self, chosen: Options, window: int, connect: Callable[[], Client]) -> None:
        """`window`: how many messages may be unacknowledged; `connect`: makes a connection that consumes."""
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
        """Connected when it is first wanted: readers are also made to be looked at."""
        if self._receiver is None:
            given = self._chosen
            limits = Limits(
                self._window,
                given.whole("bufferBytes", 64 * MEBIBYTE),
                given.number("awaySecs", 60.0),
            )
            self._receiver = Receiver(self._connect, limits)
        return self._receiver

    def initialOffset(self) -> Offset:
        """Before everything."""
        return {"run": "", "next": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxMessagesPerTrigger`."""
        most = self._chosen.whole("maxMessagesPerTrigger", 0, least=0)
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """A broker does not say how much there is: the query ends when nothing has come for `quietSecs`."""
        self._until_quiet = True

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """What has come. Spark plans on from `start` when everything before it is in its commit log."""
        above = start["next"] if start["run"] == self._run else 0
        receiver = self.receiver
        receiver.commit(above)  # `commit` itself comes too late: with the next batch, which may wait for room
        if self._until_quiet:
            receiver.wait(above, self._chosen.number("quietSecs", 2.0))
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        found = receiver.latest(above, most)
        return {"run": self._run, "next": found} if found > above else start

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The messages, in pieces; none of a run that is over, for they come again."""
        if end["run"] != self._run:
            return []
        first = start["next"] if start["run"] == self._run else 0
        rows = self.receiver.rows(first, end["next"])
        return [
            Carried(_octets(batch_of(rows[at : at + PARTITION_ROWS])))
            for at in range(0, len(rows), PARTITION_ROWS)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The messages of a partition."""
        assert isinstance(partition, Carried)
        with pa.ipc.open_stream(partition.octets) as stream:
            yield from stream

    def commit(self, end: Offset) -> None:
        """Acknowledge everything before `end`."""
        if end["run"] == self._run:
            self.receiver.commit(end["next"])


def _octets(batch: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, live_arrow()) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())

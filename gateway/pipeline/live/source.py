"""The formats `gateway_mqtt`, `gateway_amqp` and `gateway_amqpfast`: streams of what a broker sends.

The connection lives in the process that plans the query, for an acknowledgement has to be said where the
message came from; a partition carries its messages with it. An offset is the number of a message in a *run*
(one life of that process). A batch that was planned and not finished when the process died is planned again
by Spark, with an offset of another run: it is empty then, and the broker sends its messages once more, into
a later batch. So a message is read at least once, and `redelivered` says what the broker knows of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from gateway.clients.amqp import AmqpClient
from gateway.clients.amqpfast import FastClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import Client
from gateway.errors import PipelineError
from gateway.pipeline.live.columns import batch_of, live_arrow, live_schema
from gateway.pipeline.live.options import CONNECTION, Options
from gateway.pipeline.live.receiving import Limits, Receiver
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST, SERVICES
from gateway.protocols.mqtt.dialect import MQTT

PARTITION_ROWS: Final = 10_000
MEBIBYTE: Final = 1_048_576
BUFFER: Final = ("bufferMessages", "bufferBytes", "maxMessagesPerTrigger", "quietSecs", "awaySecs")
Offset = dict[str, Any]


class LiveSource(DataSource):
    """What the three formats have in common."""

    protocol: ClassVar[str]
    own: ClassVar[tuple[str, ...]]

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.chosen = Options(self.name(), options, (*CONNECTION, *BUFFER, *self.own))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def schema(self) -> StructType:
        """See `docs/guides/pipeline-live.md`."""
        return live_schema()

    def streamReader(self, schema: StructType) -> LiveReader:
        """The reader; it connects when it is first asked for something."""
        self.check()
        return LiveReader(self)

    def check(self) -> None:
        """Raises PipelineError for options that cannot be used."""
        raise NotImplementedError

    def connect(self) -> Client:
        """A connection that consumes. Raises LinkError."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """How many messages may be unacknowledged."""
        return self.chosen.whole("bufferMessages", 10_000, most=10_000_000)


class MqttSource(LiveSource):
    """`topics`: filters. With `clientId` the broker keeps the session `sessionSecs` when the query stops."""

    protocol = MQTT.name
    own = ("topics", "qos", "clientId", "sessionSecs")

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "gateway_mqtt"

    def check(self) -> None:
        """Topics, and no session without a name."""
        self.chosen.access(self.protocol)
        if not self.chosen.listed("topics"):
            self.chosen.needed("topics", "plant/+/telemetry,site/#")
        if self.chosen.text("sessionSecs") is not None and not self.chosen.text("clientId"):
            raise PipelineError("option sessionSecs needs clientId, by which the broker knows the session")
        self.chosen.whole("qos", 1, least=0, most=1)

    def connect(self) -> Client:
        """Subscribe to all topics."""
        given = self.chosen
        client_id = given.text("clientId") or ""
        session = given.whole("sessionSecs", 7 * 86_400 if client_id else 0, least=0)
        client = MqttClient(
            given.access(self.protocol), client_id=client_id, session_secs=session, receive_max=self.window
        )
        client.subscribe(given.listed("topics"), given.whole("qos", 1, least=0, most=1))
        return client


class AmqpSource(LiveSource):
    """`queues`; with `exchange` and `bindingKeys` the one queue is declared, durable, and bound."""

    protocol = AMQP091.name
    own = ("queues", "exchange", "bindingKeys")

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "gateway_amqp"

    def check(self) -> None:
        """Queues, and exactly one that is to be bound."""
        self.chosen.access(self.protocol)
        queues = self.chosen.listed("queues")
        if not queues:
            self.chosen.needed("queues", "telemetry,orders")
        if self.chosen.text("exchange") is not None and len(queues) != 1:
            raise PipelineError("option exchange binds one queue, and option queues names several")

    def connect(self) -> Client:
        """Consume from all queues."""
        given = self.chosen
        queues = given.listed("queues")
        client = AmqpClient(given.access(self.protocol))
        exchange = given.text("exchange")
        if exchange is not None:
            client.declare(queues[0], exchange, given.listed("bindingKeys") or ["#"])
        for queue in queues:
            client.consume(queue, None, "", prefetch=min(max(1, self.window // len(queues)), 65_535))
        return client


class FastSource(LiveSource):
    """`destinations`: `service:name`; a name that ends in a dot stands for all that begin with it. With
    `clientId` and `subscription` those of service topic are durable."""

    protocol = AMQPFAST.name
    own = ("destinations", "clientId", "subscription")

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "gateway_amqpfast"

    def check(self) -> None:
        """Destinations with services that there are."""
        self.chosen.access(self.protocol)
        if not self.chosen.listed("destinations"):
            self.chosen.needed("destinations", "queue:orders,topic:plant.")
        for one in self.chosen.listed("destinations"):
            if AMQPFAST.split(one)[0] is None:
                raise PipelineError(
                    f"option destinations: {one!r} is not service:name with one of {', '.join(SERVICES)}"
                )
        if self.chosen.text("subscription") is not None and not self.chosen.text("clientId"):
            raise PipelineError("option subscription needs clientId, to whom the subscription belongs")

    def connect(self) -> Client:
        """Consume all destinations."""
        given = self.chosen
        client = FastClient(given.access(self.protocol), client_name=given.text("clientId") or "")
        destinations = given.listed("destinations")
        prefetch = min(max(1, self.window // len(destinations)), 65_535)
        for at, one in enumerate(destinations):
            service, name = AMQPFAST.split(one)
            assert service is not None  # `check` has seen to it
            subscription = given.text("subscription") or ""
            durable = f"{subscription}.{at}" if subscription and service == "topic" else ""
            client.consume(service, name, identifier=durable, prefetch=prefetch)
        return client


class Carried(InputPartition):
    """A partition with its messages, as Arrow writes them."""

    def __init__(self, octets: bytes) -> None:
        super().__init__(None)
        self.octets = octets

    def __repr__(self) -> str:
        return f"Carried({len(self.octets)} octets)"


class LiveReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One query's reader. What is sent to the workers is without the connection."""

    def __init__(self, source: LiveSource) -> None:
        self._source = source
        self._run = secrets.token_hex(4)
        self._receiver: Receiver | None = None
        self._until_quiet = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_receiver": None}

    @property
    def receiver(self) -> Receiver:
        """Connected when it is first wanted: readers are also made to be looked at."""
        if self._receiver is None:
            given = self._source.chosen
            limits = Limits(
                self._source.window,
                given.whole("bufferBytes", 64 * MEBIBYTE),
                given.number("awaySecs", 60.0),
            )
            self._receiver = Receiver(self._source.connect, limits)
        return self._receiver

    def initialOffset(self) -> Offset:
        """Before everything."""
        return {"run": "", "next": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxMessagesPerTrigger`."""
        most = self._source.chosen.whole("maxMessagesPerTrigger", 0, least=0)
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
            receiver.wait(above, self._source.chosen.number("quietSecs", 2.0))
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

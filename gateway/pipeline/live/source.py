"""Live sources `gateway_mqtt`, `gateway_amqp` and `gateway_amqpfast`, with their options.

Each class checks the options of its protocol and opens the connection; `reader.py` reads the messages.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import ClassVar, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import StructType

from gateway.clients.amqp import AmqpClient
from gateway.clients.amqpfast import FastClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import Client
from gateway.errors import PipelineError
from gateway.pipeline.live.columns import live_schema
from gateway.pipeline.live.options import CONNECTION, QueryOptions
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST, SERVICES
from gateway.protocols.mqtt.dialect import MQTT

BUFFER: Final = ("bufferMessages", "bufferBytes", "maxMessagesPerTrigger", "quietSecs", "awaySecs")


class LiveSource(DataSource):
    """Base class of the sources `gateway_mqtt`, `gateway_amqp` and `gateway_amqpfast`."""

    protocol: ClassVar[str]
    own: ClassVar[tuple[str, ...]]

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.chosen = QueryOptions(self.name(), options, (*CONNECTION, *BUFFER, *self.own))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def schema(self) -> StructType:
        """Return the schema of the rows; `docs/guides/pipeline-live.md` describes the columns."""
        return live_schema()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a stream reader that connects on first use. Raises PipelineError for unusable options."""
        from gateway.pipeline.live.reader import LiveReader

        self.check()
        return LiveReader(self.chosen, self.window, self.connect)

    def check(self) -> None:
        """Raise PipelineError if the options of the query are unusable."""
        raise NotImplementedError

    def connect(self) -> Client:
        """Open a connection to the broker that consumes messages. Raises LinkError if this fails."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Maximum number of unacknowledged messages at a time, from the option `bufferMessages`."""
        return self.chosen.integer("bufferMessages", 10_000, most=10_000_000)


class MqttSource(LiveSource):
    """Source of MQTT messages that match the topic filters in option `topics`.

    With the option `clientId`, the broker stores the session for `sessionSecs` seconds after the query stops.
    """

    protocol = MQTT.name
    own = ("topics", "qos", "clientId", "sessionSecs")

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "gateway_mqtt"

    def check(self) -> None:
        """Raise PipelineError without topics, for sessionSecs without clientId, and for an invalid option."""
        self.chosen.access(self.protocol)
        if not self.chosen.listed("topics"):
            self.chosen.required_text("topics", "plant/+/telemetry,site/#")
        if self.chosen.text("sessionSecs") is not None and not self.chosen.text("clientId"):
            raise PipelineError("option sessionSecs needs clientId, by which the broker knows the session")
        self.chosen.integer("qos", 1, least=0, most=1)

    def connect(self) -> Client:
        """Connect and subscribe to all topics."""
        options = self.chosen
        client_id = options.text("clientId") or ""
        session = options.integer("sessionSecs", 7 * 86_400 if client_id else 0, least=0)
        client = MqttClient(
            options.access(self.protocol), client_id=client_id, session_secs=session, receive_max=self.window
        )
        client.subscribe(options.listed("topics"), options.integer("qos", 1, least=0, most=1))
        return client


class LiveAmqpSource(LiveSource):
    """Source of AMQP 0-9-1 messages from the queues in option `queues`.

    With `exchange` and `bindingKeys` there must be one queue, which is declared durable and bound.
    """

    protocol = AMQP091.name
    own = ("queues", "exchange", "bindingKeys")

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "gateway_amqp"

    def check(self) -> None:
        """Raise PipelineError if no queue is given, or if several queues are to be bound to an exchange."""
        self.chosen.access(self.protocol)
        queues = self.chosen.listed("queues")
        if not queues:
            self.chosen.required_text("queues", "telemetry,orders")
        if self.chosen.text("exchange") is not None and len(queues) != 1:
            raise PipelineError("option exchange binds one queue, but option queues names several")

    def connect(self) -> Client:
        """Connect and consume from all queues."""
        options = self.chosen
        queues = options.listed("queues")
        client = AmqpClient(options.access(self.protocol))
        exchange = options.text("exchange")
        if exchange is not None:
            client.declare(queues[0], exchange, options.listed("bindingKeys") or ["#"])
        for queue in queues:
            client.consume(queue, None, "", prefetch=min(max(1, self.window // len(queues)), 65_535))
        return client


class LiveFastSource(LiveSource):
    """Source of AMQP/Fast messages from the destinations in option `destinations`.

    A destination is written `service:name`. A name that ends in a dot stands for all names that begin with
    it. With the options `clientId` and `subscription`, subscriptions to topics are durable.
    """

    protocol = AMQPFAST.name
    own = ("destinations", "clientId", "subscription")

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "gateway_amqpfast"

    def check(self) -> None:
        """Raise PipelineError for missing or invalid options.

        At least one destination is required, each with a known service, and `subscription` needs `clientId`.
        """
        self.chosen.access(self.protocol)
        if not self.chosen.listed("destinations"):
            self.chosen.required_text("destinations", "queue:orders,topic:plant.")
        for one in self.chosen.listed("destinations"):
            if AMQPFAST.split(one)[0] is None:
                raise PipelineError(
                    f"option destinations: {one!r} is not service:name with one of {', '.join(SERVICES)}"
                )
        if self.chosen.text("subscription") is not None and not self.chosen.text("clientId"):
            raise PipelineError("option subscription needs clientId, to whom the subscription belongs")

    def connect(self) -> Client:
        """Connect and consume from all destinations."""
        options = self.chosen
        client = FastClient(options.access(self.protocol), client_name=options.text("clientId") or "")
        destinations = options.listed("destinations")
        prefetch = min(max(1, self.window // len(destinations)), 65_535)
        for at, one in enumerate(destinations):
            service, name = AMQPFAST.split(one)
            assert service is not None  # Verified by `check`.
            subscription = options.text("subscription") or ""
            durable = f"{subscription}.{at}" if subscription and service == "topic" else ""
            client.consume(service, name, identifier=durable, prefetch=prefetch)
        return client

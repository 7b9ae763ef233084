"""Programs that ask and programs that answer, one of each kind and protocol, that know nothing of a gateway.

A requester says where it wants its answer in its own protocol's words; a responder reads these words, and
publishes there as programs of its protocol do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import pika
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import Head, decode_head_properties, encode_head_properties
from tests.clients.peers import PATIENCE_SECS, Paho
from tests.ingress.amqpfast.client import QUEUE, TOPIC, Fast
from tests.interop.gateway_fixture import Running

DIRECT: Final = "amq.rabbitmq.reply-to"


class Heard(NamedTuple):
    """What came: where its answer is wanted, its correlation, its body."""

    reply_to: str | None
    correlation: bytes | None
    body: bytes


class Requester(Protocol):
    """Asks below the levels `ask`, and hears the answer."""

    def ask(self, body: bytes, correlation: bytes) -> None: ...

    def answer(self) -> Heard: ...


class Responder(Protocol):
    """Hears what is asked, and says what it is answered."""

    def question(self) -> Heard: ...

    def say(self, heard: Heard, body: bytes) -> None: ...


def said(**properties: Any) -> Properties:
    """The properties of a PUBLISH."""
    made = Properties(PacketTypes.PUBLISH)
    for name, value in properties.items():
        setattr(made, name, value)
    return made


@contextmanager
def _noticed(gateway: Running, listener: str) -> Iterator[None]:
    """Behind it the gateway has noticed that who came within has gone: there it may come later than here."""
    connections = gateway.gateway.listeners[listener].connections
    before = gateway.ask(lambda: len(connections))
    yield
    gateway.until(lambda: len(connections) == before)


# MQTT 5


class MqttParty:
    """Either: asks by Response Topic, answers by PUBLISH to it."""

    def __init__(self, client: Paho, topic: str = "reply/rr") -> None:
        self.client = client
        self.topic = topic

    def ask(self, body: bytes, correlation: bytes) -> None:
        self.client.publish(
            "ask/it", body, 1, properties=said(ResponseTopic=self.topic, CorrelationData=correlation)
        )

    def answer(self) -> Heard:
        message = self.client.message()
        found = message.properties
        return Heard(
            getattr(found, "ResponseTopic", None),
            getattr(found, "CorrelationData", None),
            bytes(message.payload),
        )

    question = answer

    def say(self, heard: Heard, body: bytes) -> None:
        assert heard.reply_to is not None
        properties = said(CorrelationData=heard.correlation) if heard.correlation is not None else said()
        assert self.client.publish(heard.reply_to, body, 1, properties=properties) == 0


@contextmanager
def mqtt_requester(gateway: Running, topic: str = "reply/rr") -> Iterator[MqttParty]:
    with _noticed(gateway, "mqtt"), Paho(gateway, "5.0", "asks") as client:
        client.subscribe(topic, 1)
        yield MqttParty(client, topic)


@contextmanager
def mqtt_responder(gateway: Running) -> Iterator[MqttParty]:
    with Paho(gateway, "5.0", "answers") as client:
        client.subscribe("ask/#", 1)
        yield MqttParty(client)


# AMQP 0-9-1


class PikaParty:
    """Either: asks by reply_to, answers through the default exchange."""

    def __init__(self, connection: pika.BlockingConnection, queue: str, reply_to: str) -> None:
        self.connection = connection
        self.channel = connection.channel()
        self.channel.confirm_delivery()
        self.reply_to = reply_to
        self.heard: list[Heard] = []
        if queue != DIRECT:
            found = self.channel.queue_declare(queue, exclusive=not queue).method.queue
            self.reply_to = self.reply_to or found
            queue = found
        if not reply_to:
            self.reply_to = queue
        self.queue = queue
        self.channel.basic_consume(queue, self._note, auto_ack=True)

    def _note(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        correlation = properties.correlation_id
        self.heard.append(
            Heard(properties.reply_to, None if correlation is None else correlation.encode(), body)
        )

    def ask(self, body: bytes, correlation: bytes) -> None:
        properties = pika.BasicProperties(reply_to=self.reply_to, correlation_id=correlation.decode())
        self.channel.basic_publish("amq.topic", "ask.it", body, properties)

    def answer(self) -> Heard:
        while not self.heard:
            self.connection.process_data_events(PATIENCE_SECS)
        return self.heard.pop(0)

    question = answer

    def say(self, heard: Heard, body: bytes, *, mandatory: bool = True) -> None:
        assert heard.reply_to is not None
        correlation = None if heard.correlation is None else heard.correlation.decode()
        properties = pika.BasicProperties(correlation_id=correlation)
        self.channel.basic_publish("", heard.reply_to, body, properties, mandatory=mandatory)


@contextmanager
def _pika(gateway: Running, queue: str, reply_to: str = "") -> Iterator[PikaParty]:
    url = pika.URLParameters(gateway.amqp_url)
    with _noticed(gateway, "amqp091"), pika.BlockingConnection(url) as connection:
        yield PikaParty(connection, queue, reply_to)


@contextmanager
def amqp_requester(gateway: Running) -> Iterator[PikaParty]:
    """Waits at a queue of its own name."""
    with _pika(gateway, "answers.here") as party:
        yield party


@contextmanager
def amqp_exclusive_requester(gateway: Running) -> Iterator[PikaParty]:
    """Waits at an exclusive queue that the server named."""
    with _pika(gateway, "") as party:
        yield party


@contextmanager
def amqp_direct_requester(gateway: Running) -> Iterator[PikaParty]:
    """Waits for direct replies."""
    with _pika(gateway, DIRECT) as party:
        yield party


@contextmanager
def amqp_responder(gateway: Running) -> Iterator[PikaParty]:
    with _pika(gateway, "questions") as party:
        party.channel.queue_bind("questions", "amq.topic", "ask.#")
        yield party


# AMQP/Fast


class FastParty:
    """Either: asks by the header REPLY_TO, answers by SEND to the destination of that name."""

    def __init__(self, client: Fast, service: int, reply_to: str = "") -> None:
        self.client = client
        self.service = service
        self.reply_to = reply_to

    def ask(self, body: bytes, correlation: bytes) -> None:
        pairs = (
            ("REPLY_TO", string(self.reply_to)),
            ("CORRELATION_ID", Value(ValueType.STRING, correlation)),
        )
        self.client.put(
            self.client.handle("ask.it", TOPIC), body, head=encode_head_properties(Head(headers=pairs))
        )

    def answer(self) -> Heard:
        (row,) = self.client.rows(1)
        headers = {name: value.value for name, value in decode_head_properties(row[3]).headers}
        correlation = headers.get("CORRELATION_ID")
        data = correlation.encode() if isinstance(correlation, str) else correlation
        return Heard(headers.get("REPLY_TO"), data, row[4])

    question = answer

    def say(self, heard: Heard, body: bytes) -> None:
        assert heard.reply_to is not None
        headers = () if heard.correlation is None else (_correlation(heard.correlation),)
        handle = self.client.handle(heard.reply_to, self.service, consumer=False, browser=False)
        self.client.put(handle, body, head=encode_head_properties(Head(headers=headers)))


def _correlation(data: bytes) -> tuple[str, Value]:
    return "CORRELATION_ID", Value(ValueType.STRING, data)


@contextmanager
def _fast(gateway: Running, name: str) -> Iterator[Fast]:
    with _noticed(gateway, "amqpfast"), Fast(gateway, name).open() as client:
        yield client


@contextmanager
def fast_queue_requester(gateway: Running) -> Iterator[FastParty]:
    """Waits at a temporary queue that the server named."""
    with _fast(gateway, "asks") as client:
        handle = client.ask_handle("", QUEUE, temporary=True)
        name = client.command(m.HandleCreated).dest_name
        assert client.reply()[3] == 200
        client.consume(handle)
        yield FastParty(client, QUEUE, name)


@contextmanager
def fast_topic_requester(gateway: Running) -> Iterator[FastParty]:
    """Waits at a topic."""
    with _fast(gateway, "asks") as client:
        client.consume(client.handle("answers.mine", TOPIC))
        yield FastParty(client, TOPIC, "answers.mine")


@contextmanager
def _fast_responder(gateway: Running, service: int) -> Iterator[FastParty]:
    with _fast(gateway, "answers") as client:
        client.consume(client.handle("ask.", TOPIC))
        yield FastParty(client, service)


def fast_queue_responder(gateway: Running) -> Any:
    """Takes the name for that of a queue."""
    return _fast_responder(gateway, QUEUE)


def fast_topic_responder(gateway: Running) -> Any:
    """Takes the name for that of a topic."""
    return _fast_responder(gateway, TOPIC)


REQUESTERS: Final[dict[str, tuple[Callable[[Running], Any], ...]]] = {
    "mqtt": (mqtt_requester,),
    "amqp091": (amqp_requester, amqp_exclusive_requester, amqp_direct_requester),
    "amqpfast": (fast_queue_requester, fast_topic_requester),
}
RESPONDERS: Final[dict[str, tuple[Callable[[Running], Any], ...]]] = {
    "mqtt": (mqtt_responder,),
    "amqp091": (amqp_responder,),
    "amqpfast": (fast_queue_responder, fast_topic_responder),
}
